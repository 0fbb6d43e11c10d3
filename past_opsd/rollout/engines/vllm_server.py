"""vLLM behind HTTP: one or several servers that may die and return while a run goes on.

A request's seed decides its draw, so a request that failed is repeated, on another server too, and gives what it would
have given. A server that failed one is left out until it answers again. It may have forgotten its adapters: they are
loaded, and all are probed, before it gets any request. Every request has a connection of its own, so what a server
says after its time, or twice, reaches nobody.
"""

from __future__ import annotations

import http.client
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from past_opsd.core.config import Sampling
from past_opsd.core.nouns import PastError
from past_opsd.rollout.engines.vllm_backend import GREEDY, SEED, TOP, Draw, Drawn, Options, Served, parameters, silence

SHORT = 10.0
"""Seconds for what a healthy server answers at once."""
AGAIN = 1.0
"""Seconds between two questions to a server that is away."""


class FaultError(Exception):
    """The server did not answer, or no longer knows an adapter; the request may be repeated."""

    def __init__(self, text: str, status: int = 0, silent: bool = False):
        super().__init__(text)
        self.status = status
        self.silent = silent


class StoppedError(Exception):
    """Another request of the batch failed for good."""


class Standing(Enum):
    """Where a server stands."""

    HERE = "gets requests"
    DOUBTED = "failed a request and is being asked"
    AWAY = "did not answer either"


class ServerBackend:
    """Requests spread over the servers that are there by their seeds, adapters loaded on all."""

    def __init__(
        self, options: Options, stop: Sequence[int], base: Served, bound: float, context: int, restarted: bool = False
    ):
        self._stop = stop
        self._options = options
        self._note: Callable[[str], None] | None = None
        self._stopping = threading.Event()
        self._in_flight = options.in_flight
        self._changed = threading.Condition()
        self._servers = [Server(url, options, bound, self._stopping, self._changed) for url in options.urls]
        missing = [server for server in self._servers if not server.connect(base, options.max_model_len or context)]
        # At a first start a person is there to mend an address; a job that starts again by itself goes on without.
        if missing and (len(missing) == len(self._servers) or not restarted):
            self.close()
            raise PastError(
                f"engine.urls: no vLLM server answers at {missing[0].url} ({missing[0].trouble}); start one with "
                "'past serve RECIPE'"
            )

    def hear(self, note: Callable[[str], None]) -> None:
        self._note = note

    def load(self, served: Served) -> None:
        self._stopping.clear()
        for server in self._servers:
            server.load(served)
        self._pick(0, [])

    def unload(self, served: Served) -> None:
        for server in self._servers:
            server.unload(served)

    def draw(self, draws: Sequence[Draw], sampling: Sampling) -> list[Drawn]:
        self._stopping.clear()
        workers = min(len(draws), self._in_flight * len(self._servers))
        with ThreadPoolExecutor(workers, thread_name_prefix="past-vllm") as pool:
            settings = parameters(sampling, self._stop, 0)
            futures = [pool.submit(self._ask, d, settings) for d in draws]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stopping.set()
                for future in futures:
                    future.cancel()
                for server in self._servers:
                    server.hang_up()
                raise

    def _ask(self, draw: Draw, settings: Mapping[str, Any]) -> Drawn:
        """One response, through faults and restarts."""
        failed: list[Server] = []
        for attempt in range(self._options.retries + 1):
            server = self._pick(draw.seed, failed)
            try:
                return server.complete(draw, settings)
            except FaultError as fault:
                if self._stopping.is_set():
                    raise StoppedError from None
                if attempt == self._options.retries:
                    raise PastError(
                        f"a request failed {attempt + 1} times, last on {server.url}: {fault}; look at the server's "
                        "log, then continue the run with --resume"
                    ) from None
                failed.append(server)
                server.leave(fault)
        raise AssertionError("unreachable")

    def _pick(self, seed: int, failed: Sequence[Server]) -> Server:
        """The server of a seed, of those that are there; where none is, once one is back.

        One that failed the request already is asked only where there is no other.
        """
        deadline = time.monotonic() + self._options.patience_seconds
        with self._changed:
            while True:
                for server in self._servers:
                    server.ask_again()
                self._tell()
                here = [server for server in self._servers if server.standing is Standing.HERE]
                best = [server for server in here if server not in failed] or here
                if best:
                    return best[seed % len(best)]
                if self._stopping.is_set():
                    raise StoppedError
                left = deadline - time.monotonic()
                if left <= 0 and all(server.standing is Standing.AWAY for server in self._servers):
                    raise PastError(self._nobody())
                self._changed.wait(min(max(left, 0.05), AGAIN))

    def _tell(self) -> None:
        """Say once that a server is left out, and once that it is back."""
        if self._note is None:
            return
        for server in self._servers:
            if server.standing is Standing.AWAY and not server.told:
                server.told = True
                self._note(f"{server.url} is left out until it serves again ({server.trouble})")
            elif server.standing is Standing.HERE and server.told:
                server.told = False
                self._note(f"{server.url} serves the current adapters again")

    def _nobody(self) -> str:
        troubles = "; ".join(f"{server.url} ({server.trouble})" for server in self._servers)
        return (
            f"no vLLM server came back within engine.patience_seconds = {self._options.patience_seconds:g}: "
            f"{troubles}; start one again with 'past serve RECIPE', then continue the run with --resume"
        )

    def metrics(self) -> dict[str, float]:
        taken = [server.take() for server in self._servers]
        probed = [distance for distances, _ in taken for distance in distances]
        out: dict[str, float] = {"engine/retries": sum(retries for _, retries in taken)}
        return ({"engine/probe_mean_abs": max(probed)} if probed else {}) | out

    def close(self) -> None:
        self._stopping.set()
        for server in self._servers:
            server.hang_up()


class Server:
    """One server: what it should serve, and how to bring it back there.

    Its standing changes under the condition `changed`, which all servers of a backend share.
    """

    def __init__(
        self, url: str, options: Options, bound: float, stopping: threading.Event, changed: threading.Condition
    ):
        self.url = url
        self.standing = Standing.HERE
        self.trouble = ""
        self.told = False
        self._options = options
        self._bound = bound
        self._stopping = stopping
        self._changed = changed
        self._asking = False  # a thread asks it whether it is back
        self._base: Served | None = None
        self._base_name = ""
        self._context = 0
        self._loaded: list[Served] = []
        self._gone: set[str] = set()  # unloaded while it was away
        self._open: set[http.client.HTTPConnection] = set()
        self._guard = threading.Lock()
        self._retries = 0
        self._answered = 0.0  # when the server last gave a response, on the monotonic clock
        self._probed: list[float] = []

    def connect(self, base: Served, context: int) -> bool:
        """Compare the base; False where no server is there yet."""
        self._base, self._context = base, context
        try:
            self._restore([])
        except FaultError as fault:
            self.standing, self.trouble = Standing.AWAY, str(fault)
        return self.standing is Standing.HERE

    def load(self, served: Served) -> None:
        """Serve an adapter from now on; a server that is away gets it when it comes back."""
        with self._changed:
            self._loaded.append(served)
            if self.standing is not Standing.HERE:
                return
        try:
            self._load(served)
        except FaultError as fault:
            self.leave(fault)

    def unload(self, served: Served) -> None:
        with self._changed:
            self._loaded.remove(served)
            if self.standing is not Standing.HERE:
                self._gone.add(served.name)
                return
        self._unload(served.name)

    def complete(self, draw: Draw, settings: Mapping[str, Any]) -> Drawn:
        """One response."""
        return self._complete(draw, settings)

    def take(self) -> tuple[list[float], int]:
        """Probe distances and failed requests since the last call."""
        with self._guard:
            taken = (self._probed, self._retries)
            self._probed, self._retries = [], 0
        return taken

    def hang_up(self) -> None:
        """Break off all requests; the server stops working on them."""
        with self._guard:
            sockets = [c.sock for c in self._open if c.sock is not None]
        for sock in sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it had ended by itself

    def leave(self, fault: FaultError) -> None:
        """A request failed: the server gets no other until it has shown that it serves what it should."""
        with self._guard:
            self._retries += 1
        with self._changed:
            left = self.standing is Standing.HERE
            if left:
                self.standing, self.trouble = Standing.DOUBTED, str(fault)
        if left and fault.silent:
            self.hang_up()  # its other requests need not wait as long
        self.ask_again()

    def ask_again(self) -> None:
        """See to it that somebody asks a server that is not there whether it is back."""
        with self._changed:
            if self.standing is Standing.HERE or self._asking or self._stopping.is_set():
                return
            self._asking, self.standing = True, Standing.DOUBTED
        threading.Thread(target=self._return, name="past-vllm-return", daemon=True).start()

    def _return(self) -> None:
        """Until the server is back with what it should serve, or nobody wants it any more."""
        while True:
            wanted = list(self._loaded)
            try:
                self._restore(wanted)
                trouble = ""
            except Exception as error:
                trouble = str(error) or type(error).__name__
            with self._changed:
                stopped = self._stopping.is_set()
                lost = bool(trouble) and self.standing is Standing.DOUBTED
                if trouble and not stopped:
                    self.standing, self.trouble = Standing.AWAY, trouble
                elif not trouble and wanted == self._loaded:
                    self.standing = Standing.HERE
                self._asking = self.standing is not Standing.HERE and not stopped
                self._changed.notify_all()
                if not self._asking:
                    return
            if lost:
                self.hang_up()  # what it has not answered by now goes to others
            if trouble:
                self._stopping.wait(AGAIN)

    def _restore(self, wanted: Sequence[Served]) -> None:
        """Load whatever the server lost, and probe all that it serves."""
        self._call("GET", "/health", None, SHORT)
        cards = self._cards()
        plain = [card for card in cards if card.get("parent") is None]
        if not plain:
            raise FaultError("it lists no model")
        self._base_name = plain[0]["id"]
        limit = plain[0].get("max_model_len") or self._context
        if limit < self._context:
            raise PastError(
                f"{self.url} takes {limit} tokens, the recipe needs {self._context}: restart it with 'past serve "
                "RECIPE', or set model.max_context"
            )
        assert self._base is not None
        self._probe(self._base)
        names = {card["id"] for card in cards}
        for served in wanted:
            if served.name in names:
                self._check(served)
            else:
                self._load(served)
        gone = set(self._gone)
        for name in sorted(gone & names):
            self._unload(name)
        self._gone -= gone

    def _load(self, served: Served) -> None:
        payload = {"lora_name": served.name, "lora_path": str(served.folder)}
        try:
            self._call("POST", "/v1/load_lora_adapter", payload, self._options.timeout_seconds)
        except PastError as error:
            # An earlier try may have got through before its answer was lost; the listing below decides.
            if "already been loaded" not in str(error):
                raise
        except FaultError as fault:
            if fault.status != 404:
                raise
            raise PastError(
                f"{self.url} cannot load {served.folder} ({fault}); the server must see that folder "
                "(engine.adapter_folder) and take adapters at run time, as 'past serve' starts it"
            ) from None
        self._check(served)

    def _unload(self, name: str) -> None:
        try:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, SHORT)
        except FaultError:
            return  # a server that is away or was restarted has forgotten the adapter already

    def _check(self, served: Served) -> None:
        """That it serves this very version."""
        roots = [card.get("root") for card in self._cards() if card["id"] == served.name]
        if roots != [str(served.folder)]:
            raise PastError(f"{self.url} serves {served.name} from {roots}, not from {served.folder}")
        self._probe(served)

    def _cards(self) -> list[dict[str, Any]]:
        """The models and adapters that it lists."""
        said = self._call("GET", "/v1/models", None, SHORT)
        try:
            return [{**card, "id": str(card["id"])} for card in said["data"]]
        except (LookupError, TypeError):
            raise FaultError(f"a list of models that is none: {said!r:.200}") from None

    def _probe(self, served: Served) -> None:
        answers: list[Mapping[int, float]] = []
        for probe in served.probes:
            settings = parameters(GREEDY, [], TOP)
            answer = self._complete(Draw(served, probe.prompt, 0), settings).top
            if not answer or not 0 <= min(answer) <= max(answer) < len(probe.expected):
                raise FaultError(f"a distribution that is none: {answer!r:.200}")
            answers.append(answer)
        distance = served.check(answers, self._bound, self.url)
        with self._guard:
            self._probed.append(distance)

    def _complete(self, draw: Draw, settings: Mapping[str, Any]) -> Drawn:
        payload = {
            "model": self._base_name if draw.served.number == 0 else draw.served.name,
            "prompt": list(draw.prompt),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
            "vllm_xargs": {SEED: str(draw.seed)},
            **settings,
        }
        limit = silence(self._options.timeout_seconds, settings["max_tokens"])
        answer = self._call("POST", "/v1/completions", payload, limit, queued=True)
        drawn = _drawn(answer, settings["max_tokens"])
        self._answered = time.monotonic()
        return drawn

    def _call(
        self, method: str, path: str, payload: Mapping[str, Any] | None, timeout: float, queued: bool = False
    ) -> Any:
        """What the server answers. A `queued` request waits its turn: time counts from the last answer to any other."""
        headers = {"Content-Type": "application/json", "Connection": "close"}
        key = os.environ.get("VLLM_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        body = None if payload is None else json.dumps(payload)
        try:
            with self._connection(timeout) as connection:
                connection.request(method, urlsplit(self.url).path + path, body, headers)
                if queued:
                    self._await(connection.sock, timeout)
                response = connection.getresponse()
                status, text = response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise FaultError(f"{type(error).__name__}: {error}", silent=isinstance(error, TimeoutError)) from None
        # 404 is what a restarted server says of an adapter that it no longer has.
        if status >= 500 or status in (404, 408, 429):
            raise FaultError(f"status {status}: {text[:300]}", status)
        if status != 200:
            raise PastError(f"{self.url}{path} answered with status {status}: {text[:500]}")
        try:
            return json.loads(text) if text.startswith("{") else text
        except ValueError:
            raise FaultError(f"half an answer: {text[-100:]!r}") from None

    def _await(self, sock: socket.socket, timeout: float) -> None:
        """Until an answer begins; a server that goes on answering others is at work."""
        asked = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while True:
                left = max(asked, self._answered) + timeout - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer to anybody for {timeout:g} s")
                if selector.select(left):
                    return

    @contextmanager
    def _connection(self, timeout: float) -> Generator[http.client.HTTPConnection]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        with self._guard:
            self._open.add(connection)
        try:
            if self._stopping.is_set():
                raise OSError("stopped")
            yield connection
        finally:
            with self._guard:
                self._open.discard(connection)
            connection.close()


def _drawn(answer: Any, most: int) -> Drawn:
    """What was drawn, of an answer that is one."""
    try:
        choice = answer["choices"][0]
        tokens, said = tuple(choice["token_ids"]), choice["logprobs"]
        logprobs = tuple(said["token_logprobs"])
        first: dict[str, float] = said["top_logprobs"][0] or {}
        top = {int(key.removeprefix("token_id:")): float(value) for key, value in first.items()}
        whole = 0 < len(tokens) == len(logprobs) <= most
        if (
            not whole
            or {type(token) for token in tokens} != {int}
            or not all(isinstance(value, float) for value in logprobs)
        ):
            raise ValueError("tokens and log-probabilities do not fit")
    except (LookupError, TypeError, ValueError, AttributeError):
        raise FaultError(f"an answer that is none: {answer!r:.200}") from None
    return Drawn(tokens, logprobs, top)
