"""`past watch`: the report of runs in the browser while they train.

A small server on this machine: "/" is the report, "/state" says how far the runs are and under which version; the page
asks for the state every few seconds and, when the version is another, swaps in what changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import ipaddress
import json
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from past_opsd import arguments, checkpoint, report
from past_opsd.report import data, page
from past_opsd.types import PastError

LIVE_POLICY = f"{page.POLICY}; connect-src 'self'"
SCRIPT = page.ASSETS / "watch.js"
PATTERNS = ("recipe.toml", "metrics.jsonl", "timings.jsonl", "evaluations/*.json", "probes/*.json")


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
    """How far a run is; None while its recipe is still being written."""
    try:
        cycles = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))["run"]["cycles"]
    except (tomllib.TOMLDecodeError, KeyError, FileNotFoundError):
        return None
    metrics = folder / "metrics.jsonl"
    cycle = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    return Progress(folder, cycle, cycles, checkpoint.folder(folder, cycles).is_dir())


def folders(path: Path, depth: int = data.DEPTH) -> list[Path]:
    """The run folders at or below a path that exist by now."""
    if (path / "recipe.toml").is_file():
        return [path]
    if depth == 0 or not path.is_dir():
        return []
    inner = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    return [run for folder in inner for run in folders(folder, depth - 1)]


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
        runs = self._runs()
        started = [run for run in runs if run.cycle]
        digest = hashlib.blake2b(digest_size=12)
        newest = 0.0
        for run in runs:
            found = [p for pattern in PATTERNS for p in sorted(run.folder.glob(pattern))]
            for path in found:
                try:
                    status = path.stat()
                except FileNotFoundError:  # a resumed run takes files back
                    continue
                digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
                newest = max(newest, status.st_mtime)
            digest.update(b"finished" if run.finished else b"")
        return State(
            version=digest.hexdigest(),
            ready=bool(started),
            finished=bool(runs) and all(run.finished for run in runs),
            text=_text(runs) if started else "waiting for the first cycle",
            age=max(0.0, time.time() - newest) if newest else 0.0,
            problem=self._problem,
        )

    def page(self) -> tuple[str, str]:
        """The report and the version it shows, rendered where the kept one is of another."""
        if not self.state().ready:
            return self.state().version, _waiting(self._paths)
        with self._rendering:
            version = self.state().version  # before reading: a later change makes another version
            try:
                if self._kept is None or self._kept[0] != version:
                    self._kept = (version, _live(self._render([run.folder for run in self._runs() if run.cycle])))
                self._problem = ""
            except (PastError, OSError, ValueError) as error:
                # A file that is being written, or a damaged one: the last good report stays, the badge tells.
                self._problem = str(error)
            return self._kept or (version, _waiting(self._paths, self._problem))

    def _runs(self) -> list[Progress]:
        found = {folder.resolve(): None for path in self._paths for folder in folders(path)}
        return [run for folder in found if (run := progress(folder)) is not None]


def _text(runs: Sequence[Progress]) -> str:
    cycles = f"cycle {sum(run.cycle for run in runs)}/{sum(run.cycles for run in runs)}"
    return cycles if len(runs) == 1 else f"{len(runs)} runs, {sum(run.finished for run in runs)} finished, {cycles}"


def _report(found: Sequence[Path]) -> str:
    return report.render(data.find(found), trajectories=0)


def _live(html: str) -> str:
    """The report with a policy that lets it ask this server, and without the part that is left out."""
    if page.POLICY not in html:
        raise PastError("the report states no content security policy; past_opsd.watch does not fit past_opsd.report")
    hide = '<style>#trajectories, .toc a[href="#trajectories"] { display: none }</style></head>'
    return html.replace(page.POLICY, LIVE_POLICY, 1).replace("</head>", hide, 1)


def _waiting(paths: Sequence[Path], problem: str = "") -> str:
    names = ", ".join(f"<code>{escape(str(path))}</code>" for path in paths)
    told = f"<p>{escape(problem)}</p>" if problem else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Waiting</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{LIVE_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        "<style>body { font: 1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 20vh auto; padding: 0 1rem }"
        f"</style></head><body><h1>Waiting for the first cycle</h1><p>{names}</p>"
        f"<p>The report appears here by itself as soon as a cycle is complete.</p>{told}</body></html>\n"
    )


class Server(ThreadingHTTPServer):
    """Serves the watched runs to browsers on addresses that are its own."""

    daemon_threads = True

    def __init__(self, host: str, port: int, watched: Watched, every: float):
        self.watched = watched
        self.every = every
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

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        if not self.server.owns(self.headers.get("Host", "")):
            self.send_error(403, "This server answers to its own address alone")
            return
        path = urlsplit(self.path).path
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
        raise PastError("the report's figures need matplotlib: pip install 'past-opsd[report]'")
    return Server(host, port, Watched(paths, _report), every)


add_arguments = arguments.watch


def run(args: argparse.Namespace) -> int:
    """`past watch`: serve until Ctrl-C."""
    if not args.every >= 0.1:
        raise PastError(f"--every {args.every}: give 0.1 seconds or more")
    with serve(args.runs, args.host, args.port, args.every) as server:
        print(f"{server.url} (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            print()
    return 0
