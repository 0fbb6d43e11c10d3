"""vLLM behind HTTP: one or several servers that may die and return while a run goes on.

A request's seed decides its draw, so a request that failed is repeated and gives what it would have given. A server
that comes back has forgotten its adapters: they are loaded and probed again before it gets any request.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from past_opsd.core.config import Sampling
from past_opsd.core.nouns import PastError
from past_opsd.rollout.engines.vllm_backend import (
    GREEDY,
    SEED,
    TOP,
    Draw,
    Drawn,
    Options,
    Served,
    Stream,
    parameters,
    silence,
)

TICK = 0.02
"""Seconds between two looks at what others found meanwhile, verdicts say."""
SHORT = 10.0
"""Seconds for what a healthy server answers at once."""


class FaultError(Exception):
    """The server did not answer, or no longer knows an adapter; the request may be repeated."""

    def __init__(self, text: str, status: int = 0):
        super().__init__(text)
        self.status = status


class StoppedError(Exception):
    """Another request of the batch failed for good."""


class ServerBackend:
    """Requests spread over servers by their seeds, adapters loaded on all."""

    note = ""

    def __init__(self, options: Options, stop: Sequence[int], base: Served, bound: float, context: int):
        self._stop = stop
        self._stopping = threading.Event()
        self._in_flight = options.in_flight
        self._servers = [Server(url, options, bound, self._stopping) for url in options.urls]
        for server in self._servers:
            server.connect(base, options.max_model_len or context)

    def load(self, served: Served) -> None:
        for server in self._servers:
            server.load(served)

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
                self._break_off(futures)
                raise

    def stream(self, asked: Sequence[tuple[Draw, Sampling]]) -> Stream:
        """Answers as they come, with their places in the order of asking; what is sent is asked as well.

        At most `in_flight` requests are with a server, the others wait here.
        """
        self._stopping.clear()
        ended: queue.SimpleQueue[Future[Drawn]] = queue.SimpleQueue()
        places: dict[Future[Drawn], int] = {}
        count = 0
        with ThreadPoolExecutor(self._in_flight * len(self._servers), thread_name_prefix="past-vllm") as pool:
            try:
                while True:
                    for draw, sampling in asked:
                        future = pool.submit(self._ask, draw, parameters(sampling, self._stop, 0))
                        places[future], count = count, count + 1
                        future.add_done_callback(ended.put)
                    if not places:
                        return
                    asked = yield [(places.pop(future), future.result()) for future in _ready(ended)]
            except BaseException:
                self._break_off(places)
                raise

    def _break_off(self, futures: Iterable[Future[Drawn]]) -> None:
        self._stopping.set()
        for future in futures:
            future.cancel()
        for server in self._servers:
            server.hang_up()

    def _ask(self, draw: Draw, settings: Mapping[str, Any]) -> Drawn:
        return self._servers[draw.seed % len(self._servers)].complete(draw, settings)

    def metrics(self) -> dict[str, float]:
        taken = [server.take() for server in self._servers]
        probed = [distance for distances, _ in taken for distance in distances]
        out: dict[str, float] = {"engine/retries": sum(retries for _, retries in taken)}
        return ({"engine/probe_mean_abs": max(probed)} if probed else {}) | out

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Server:
    """One server: what it should serve, and how to bring it back there."""

    def __init__(self, url: str, options: Options, bound: float, stopping: threading.Event):
        self.url = url
        self._options = options
        self._bound = bound
        self._stopping = stopping
        self._base: Served | None = None
        self._base_name = ""
        self._loaded: list[Served] = []
        self._open: set[http.client.HTTPConnection] = set()
        self._guard = threading.Lock()
        self._recovering = threading.Lock()
        self._recoveries = 0
        self._retries = 0
        self._answered = 0.0  # when the server last gave a response, on the monotonic clock
        self._probed: list[float] = []

    def connect(self, base: Served, context: int) -> None:
        """Compare the base; a server that is not there yet is an error at once."""
        self._base = base
        try:
            self._restore(context)
        except FaultError as fault:
            raise PastError(
                f"engine.urls: no vLLM server answers at {self.url} ({fault}); start one with 'past serve RECIPE'"
            ) from None

    def load(self, served: Served) -> None:
        self._loaded.append(served)
        self._patiently(lambda: self._load(served))

    def unload(self, served: Served) -> None:
        self._loaded.remove(served)
        try:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": served.name}, SHORT)
        except FaultError:
            return  # a server that is away or was restarted has forgotten the adapter already

    def complete(self, draw: Draw, settings: Mapping[str, Any]) -> Drawn:
        """One response, through faults and restarts."""
        return self._patiently(lambda: self._complete(draw, settings))

    def take(self) -> tuple[list[float], int]:
        """Probe distances and repeated requests since the last call."""
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

    def _patiently(self, action: Any) -> Any:
        """Do it; on a fault bring the server back and do it again."""
        for attempt in range(self._options.retries + 1):
            seen = self._recoveries
            try:
                return action()
            except FaultError as fault:
                if self._stopping.is_set():
                    raise StoppedError from None
                if attempt == self._options.retries:
                    raise PastError(
                        f"{self.url} failed a request {attempt + 1} times, last: {fault}; look at the server's log, "
                        "then continue the run with --resume"
                    ) from None
                with self._guard:
                    self._retries += 1
                self._recover(seen, fault)
        raise AssertionError("unreachable")

    def _recover(self, seen: int, fault: FaultError) -> None:
        """Wait until the server answers again and serves what it should; one thread does it for all."""
        with self._recovering:
            if self._recoveries != seen:
                return
            deadline = time.monotonic() + self._options.patience_seconds
            while True:
                try:
                    self._restore()
                    break
                except FaultError as again:
                    fault = again
                if self._stopping.is_set():
                    raise StoppedError
                if time.monotonic() > deadline:
                    raise PastError(
                        f"{self.url} did not come back within engine.patience_seconds = "
                        f"{self._options.patience_seconds:g} ({fault}); start it again with 'past serve RECIPE' and "
                        "continue the run with --resume"
                    )
                self._stopping.wait(1.0)
            self._recoveries += 1

    def _restore(self, context: int = 0) -> None:
        """Load and probe whatever the server lost."""
        self._call("GET", "/health", None, SHORT)
        cards = {card["id"]: card for card in self._call("GET", "/v1/models", None, SHORT)["data"]}
        plain = [card for card in cards.values() if card.get("parent") is None]
        self._base_name = plain[0]["id"]
        limit = plain[0].get("max_model_len") or context
        if limit < context:
            raise PastError(
                f"{self.url} takes {limit} tokens, the recipe needs {context}: restart it with 'past serve RECIPE', or "
                "set model.max_context"
            )
        assert self._base is not None
        self._probe(self._base)
        for served in self._loaded:
            if served.name not in cards:
                self._load(served)

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
        cards = self._call("GET", "/v1/models", None, SHORT)["data"]
        roots = [card["root"] for card in cards if card["id"] == served.name]
        if roots != [str(served.folder)]:
            raise PastError(f"{self.url} serves {served.name} from {roots}, not from {served.folder}")
        self._probe(served)

    def _probe(self, served: Served) -> None:
        answers: list[Mapping[int, float]] = []
        for probe in served.probes:
            settings = parameters(GREEDY, [], TOP)
            answers.append(self._complete(Draw(served, probe.prompt, 0), settings).top)
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
        self._answered = time.monotonic()
        return _drawn(answer["choices"][0])

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
            raise FaultError(f"{type(error).__name__}: {error}") from None
        # 404 is what a restarted server says of an adapter that it no longer has.
        if status >= 500 or status in (404, 408, 429):
            raise FaultError(f"status {status}: {text[:300]}", status)
        if status != 200:
            raise PastError(f"{self.url}{path} answered with status {status}: {text[:500]}")
        return json.loads(text) if text.startswith("{") else text

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


def _ready(ended: queue.SimpleQueue[Future[Drawn]]) -> list[Future[Drawn]]:
    """What has ended by now, or within `TICK`."""
    out: list[Future[Drawn]] = []
    with suppress(queue.Empty):
        out.append(ended.get(timeout=TICK))
        while True:
            out.append(ended.get_nowait())
    return out


def _drawn(choice: Mapping[str, Any]) -> Drawn:
    said = choice["logprobs"]
    first: dict[str, float] = said["top_logprobs"][0] or {}
    top = {int(key.removeprefix("token_id:")): value for key, value in first.items()}
    return Drawn(tuple(choice["token_ids"]), tuple(said["token_logprobs"]), top)
