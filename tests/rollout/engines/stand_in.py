"""A small HTTP server that speaks what the engine asks of vLLM, on a real socket, and fails as it is told to."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 8
BASE = 1.0


def distribution(weight: float, prompt: list[int] | tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of the token after a prompt, under a model that is one number."""
    logits = np.sin(weight * (1 + np.arange(VOCABULARY)) + sum(prompt))
    return logits - np.log(np.exp(logits).sum())


def tokens(weight: float, prompt: list[int] | tuple[int, ...], seed: str | int) -> list[int]:
    """What that model draws for a seed."""
    digest = hashlib.sha256(f"{weight} {list(prompt)} {seed}".encode()).digest()
    return [byte % VOCABULARY for byte in digest[: 3 + digest[-1] % 5]]


class StandIn:
    """One server. `fault` is what its completions do from answer `after` on:

    - "dies": half an answer, then every connection is reset and the port is closed
    - "hangs": nothing; "late": when it is let go the answer, twice
    - "busy": status 503; "garbage", "half", "other": 200, and no answer
    """

    def __init__(self, base: float = BASE):
        self.base = base
        self.port = 0
        self.fault, self.after = "", 0
        self.refused: set[str] = set()
        """Seeds that alone get status 500."""
        self.adapters: dict[str, tuple[str, float]] = {}
        self.answered: list[tuple[str, str]] = []
        """Adapter and seed of every completion that was answered and is no probe."""
        self.log: list[str] = []
        """What was loaded, unloaded, probed and drawn, in order."""
        self._held = threading.Event()
        self._counting = threading.Lock()
        self._connections: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen; after the first time on the same port, without an adapter and without a fault."""
        self.fault, self.adapters, self.log, self.answered = "", {}, [], []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                super().setup()
                stand_in._connections.append(self.connection)

            def do_GET(self) -> None:
                stand_in._listed(self)

            def do_POST(self) -> None:
                stand_in._asked(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, format: str, *args: Any) -> None: ...

        class Quiet(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 64

            def handle_error(self, request: Any, client_address: Any) -> None: ...

        self._serving = Quiet(("127.0.0.1", self.port), Handler)
        self.port = self._serving.server_port
        self._thread = threading.Thread(target=self._serving.serve_forever, args=(0.01,))
        self._thread.start()

    def let_go(self) -> None:
        """Whoever was held up goes on; those who come are held up anew."""
        held, self._held = self._held, threading.Event()
        held.set()

    def stop(self, serving: object = None) -> None:
        """As a killed process: the port is closed and every connection reset."""
        if serving not in (None, self._serving):
            return  # it was started again meanwhile
        self.let_go()
        self._serving.shutdown()
        self._thread.join()
        self._serving.socket.close()
        for connection in self._connections:
            try:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._connections.clear()

    def _listed(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/health":
            return _send(handler, 200, b"")
        cards: list[dict[str, Any]] = [{"id": "m", "root": "m", "parent": None, "max_model_len": 64}]
        cards += [{"id": name, "root": root, "parent": "m"} for name, (root, _) in self.adapters.items()]
        return _send(handler, 200, json.dumps({"data": cards}).encode())

    def _asked(self, handler: BaseHTTPRequestHandler, said: dict[str, Any]) -> None:
        if handler.path.endswith("unload_lora_adapter"):
            self.log.append(f"unload {said['lora_name']}")
            known = self.adapters.pop(said["lora_name"], None)
            return _send(handler, 200 if known else 404, b"ok")
        if handler.path.endswith("load_lora_adapter"):
            self.log.append(f"load {said['lora_name']}")
            weight = float((Path(said["lora_path"]) / "weight").read_text())
            self.adapters[said["lora_name"]] = (said["lora_path"], weight)
            return _send(handler, 200, b"ok")
        return self._complete(handler, said)

    def _complete(self, handler: BaseHTTPRequestHandler, said: dict[str, Any]) -> None:
        name, seed = said["model"], said["vllm_xargs"]["past_seed"]
        known = {"m": ("m", self.base)} | self.adapters
        if name not in known:
            return _send(handler, 404, b"no such model")
        weight, probe = known[name][1], bool(said["logprobs"])
        self.log.append(f"{'probe' if probe else 'draw'} {name}")
        if seed in self.refused and not probe:
            return _send(handler, 500, b"not this one")
        ids = [0] if probe else tokens(weight, said["prompt"], seed)
        row = distribution(weight, said["prompt"])
        top = {f"token_id:{i}": float(v) for i, v in enumerate(row)} if probe else {}
        logprobs = {"token_logprobs": [float(row[i]) for i in ids], "top_logprobs": [top] * len(ids)}
        body = json.dumps({"choices": [{"token_ids": ids, "logprobs": logprobs}]}).encode()
        with self._counting:
            fault = self.fault if len(self.answered) >= self.after else ""
            if not fault and not probe:
                self.answered.append((name, seed))
        if not fault:
            return _send(handler, 200, body)
        return self._fail(handler, fault, body)

    def _fail(self, handler: BaseHTTPRequestHandler, fault: str, body: bytes) -> None:
        if fault == "dies":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body[: len(body) // 2])
            threading.Thread(target=self.stop, args=(handler.server,)).start()
            self._held.wait(300)
        elif fault in ("hangs", "late"):
            self._held.wait(300)
            if fault == "late":
                _send(handler, 200, body)
                _send(handler, 200, body)
        elif fault == "half":
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + body[: len(body) // 2])
        else:
            no_answer = {
                "garbage": b"<html>no</html>",
                "other": b'{"choices": [{"token_ids": [1, 2], "logprobs": {}}]}',
            }
            _send(handler, 503 if fault == "busy" else 200, no_answer.get(fault, b"busy"))


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
