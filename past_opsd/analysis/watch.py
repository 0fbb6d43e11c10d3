"""`past watch`: the report of runs in the browser while they train.

A small server on this machine: "/" is the report, "/state" says how far the runs are and under which version; the page
asks for the state every few seconds and, when the version is another, swaps in what changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from past_opsd.analysis import report
from past_opsd.analysis.report import data, page
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import is_table, read_bytes, read_toml
from past_opsd.run.folder import REPORTED, RunFolder, runs_below

LIVE_POLICY = page.LIVE_POLICY
SCRIPT = page.ASSETS / "watch.js"
WAIT = 10.0
"""Seconds in which a client must have sent its request, and take each part of the answer."""
CLIENTS = 64


@dataclass(frozen=True)
class State:
    """How far the runs are. `version` changes with their files; `age` is seconds since the last change."""

    version: str
    ready: bool
    finished: bool
    text: str
    age: float
    problem: str


@dataclass(frozen=True)
class Progress:
    """One run: complete cycles, all cycles, and whether its last boundary was written."""

    folder: Path
    cycle: int
    cycles: int
    finished: bool


def progress(folder: Path) -> Progress | None:
    """How far a run is; None where its recipe went away. A damaged recipe or record is a `PastError`."""
    run = RunFolder(folder)
    if not os.path.lexists(run.recipe_file):
        return None
    section = read_toml(run.recipe_file).get("run")
    cycles = section.get("cycles") if is_table(section) else None
    if type(cycles) is not int or not 0 < cycles < 10**9:
        raise PastError(f"{run.recipe_file}: run.cycles does not say how long the run is")
    cycle = read_bytes(run.metrics_file).count(b"\n") if os.path.lexists(run.metrics_file) else 0
    return Progress(folder, cycle, cycles, run.checkpoint(cycles).is_dir())


class Watched:
    """The runs behind a server: their state, and their report kept until they change."""

    def __init__(self, paths: Sequence[Path], render: Callable[[Sequence[Path]], str]):
        for path in paths:
            wrong = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)
            if wrong is not None:
                raise PastError(f"{path}: {wrong} is a file; give a run folder or a folder that holds runs")
        self._paths = list(paths)
        self._render = render
        self._rendering = threading.Lock()  # one report at a time; `state` never waits for it
        self._kept: tuple[str, str] | None = None  # version and report
        self._problem = ""

    def state(self) -> State:
        """What the files say now."""
        runs, damaged = self._runs()
        started = [run for run in runs if run.cycle]
        digest = hashlib.blake2b(digest_size=12)
        newest = 0.0
        for folder in [run.folder for run in runs] + list(damaged):
            found = [p for pattern in REPORTED for p in sorted(folder.glob(pattern))]
            for path in found:
                try:
                    status = path.stat()
                except OSError:  # a resumed run takes files back
                    continue
                digest.update(os.fsencode(path) + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
                newest = max(newest, status.st_mtime)
        digest.update(bytes(run.finished for run in runs))
        return State(
            version=digest.hexdigest(),
            ready=bool(started),
            finished=bool(runs) and all(run.finished for run in runs),
            text=_text(runs) if started else "waiting for the first cycle",
            age=max(0.0, time.time() - newest) if newest else 0.0,
            problem="; ".join(dict.fromkeys(filter(None, [self._problem, *damaged.values()]))),
        )

    def page(self) -> tuple[str, str]:
        """The report and the version it shows, rendered where the kept one is of another."""
        now = self.state()
        if not now.ready:
            return now.version, _waiting(self._paths, now.problem)
        with self._rendering:
            version = self.state().version  # before reading: a later change makes another version
            if self._kept is None or self._kept[0] != version or self._problem:
                started = [run.folder for run in self._runs()[0] if run.cycle]
                html, self._problem = self._try(started)
                self._kept = self._kept if html is None else (version, html)
            return self._kept or (version, _waiting(self._paths, self._problem))

    def _try(self, started: Sequence[Path]) -> tuple[str | None, str]:
        """A report and what is wrong: damaged runs are left out of it. Without a report the last good one stays."""
        html, problem = self._attempt(started)
        if html is not None or len(started) < 2:
            return html, problem
        alone = {folder: _damage(folder) for folder in started}
        whole = [folder for folder, damage in alone.items() if not damage]
        if not whole or len(whole) == len(started):
            return None, problem
        html, again = self._attempt(whole)
        return html, "; ".join(filter(None, [*alone.values(), again]))

    def _attempt(self, started: Sequence[Path]) -> tuple[str | None, str]:
        try:
            return self._render(started), ""
        except Exception as error:  # whatever a file holds, the page stays up and says what is wrong
            return None, _told(error)

    def _runs(self) -> tuple[list[Progress], dict[Path, str]]:
        """How far the runs are, and what is wrong with those that do not say."""
        found: list[Progress] = []
        damaged: dict[Path, str] = {}
        for folder in {run.path.resolve(): None for path in self._paths for run in runs_below(path)}:
            try:
                run = progress(folder)
            except (PastError, OSError) as error:
                damaged[folder] = _told(error)
                continue
            found += [run] if run is not None else []
        return found, damaged


def _damage(folder: Path) -> str:
    """What keeps a run from being shown."""
    try:
        data.load(folder)
    except Exception as error:
        return _told(error)
    return ""


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, PastError) else f"{type(error).__name__}: {error}"


def _text(runs: Sequence[Progress]) -> str:
    cycles = f"cycle {sum(run.cycle for run in runs)}/{sum(run.cycles for run in runs)}"
    return cycles if len(runs) == 1 else f"{len(runs)} runs, {sum(run.finished for run in runs)} finished, {cycles}"


def _report(found: Sequence[Path]) -> str:
    return report.render(data.find(found), trajectories=0, live=True)


def _waiting(paths: Sequence[Path], problem: str = "") -> str:
    return page.TEMPLATES.get_template("waiting.html").render(policy=LIVE_POLICY, paths=paths, problem=problem)


class Server(ThreadingHTTPServer):
    """Serves the watched runs to browsers on addresses that are its own."""

    daemon_threads = True

    def process_request(self, request: Any, client_address: Any) -> None:
        """One more thread, where there are not too many yet."""
        if self._clients.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is nothing to tell; anything else in one line, and the server stays up."""
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, OSError):
            print(f"past: a page could not be made ({_told(error)})", file=sys.stderr)

    def __init__(self, host: str, port: int, watched: Watched, every: float):
        self.watched = watched
        self.every = every
        self._clients = threading.BoundedSemaphore(CLIENTS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PastError(
                f"cannot listen on {host}, port {port} ({error}); choose another --host or --port"
            ) from None
        self.host = host

    @property
    def url(self) -> str:
        name = "localhost" if self._everywhere() else self.host
        return f"http://{f'[{name}]' if ':' in name else name}:{self.server_port}/"

    def _everywhere(self) -> bool:
        return self.host in ("", "0.0.0.0", "::")

    def owns(self, header: str) -> bool:
        """Whether a Host header names this server. A page of another site that rebinds its name to us does not."""
        try:
            parts = urlsplit(f"//{header}")
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            return False
        if port != self.server_port:
            return False
        if name in ("localhost", self.host.lower()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return self._everywhere() and name == socket.gethostname().lower()
        return address.is_loopback or self._everywhere()


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "past"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(WAIT)  # for each read and write
        # A client that sends a byte now and then never runs into the time-out of one read.
        self._alarm = threading.Timer(WAIT, self._hang_up)
        self._alarm.daemon = True
        self._alarm.start()

    def finish(self) -> None:
        self._alarm.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        self._alarm.cancel()  # the whole request is here
        if not self.server.owns(self.headers.get("Host", "")):
            self.send_error(403, "This server answers to its own address alone")
            return
        path = self.path.partition("?")[0]
        if path == "/state":
            text, kind = json.dumps(asdict(self.server.watched.state())), "application/json"
        elif path == "/":
            version, html = self.server.watched.page()
            text, kind = _inject(html, version, self.server.every), "text/html; charset=utf-8"
        else:
            self.send_error(404)
            return
        content = text.encode("utf-8", "replace")
        self.send_response(200)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", f"{LIVE_POLICY}; frame-ancestors 'none'"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal shows the address."""


def _inject(html: str, version: str, every: float) -> str:
    head, _, tail = html.rpartition("</body>")
    settings = json.dumps({"version": version, "every": every})
    script = SCRIPT.read_text(encoding="utf-8")
    return f"{head}<script id=\"past-live\" data-settings='{settings}'>{script}</script></body>{tail}"


def serve(paths: Sequence[Path], host: str = "127.0.0.1", port: int = 0, every: float = 5.0) -> Server:
    """A server that is bound and not yet running."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PastError("the report's figures need matplotlib: pip install matplotlib")
    return Server(host, port, Watched(paths, _report), every)
