"""Break a short training run in every way that a machine can, and compare what is left with an unbroken run.

    python scripts/chaos.py                  everything: SIGKILL at every file operation, and the rest (minutes)
    python scripts/chaos.py --short          the part of it that the tests run (seconds)

kills     the trainer dies by SIGKILL before, in the middle of and after each of its writes, renames and deletions, and
          in every phase; the next process resumes and dies at the next point, until the run is done
chains    runs that die several times each, at seeded points
moments   the trainer is killed from outside at seeded random moments
workers   verifier processes die in the middle of batches, and their trainer dies while they work
disk      the file system fills up, again and again, and gets a little more room each time
limit     the same with a limit on file sizes, which needs no right to mount

After every blow: the checkpoints and metrics that were complete are those of the unbroken run. At the end: so is every
file of the run, no other file is left, and no process. One process imports everything and forks the trainers.
"""

from __future__ import annotations

import argparse
import builtins
import ctypes
import gc
import io
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError, derive_seed
from past_opsd.run import checkpoint
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import session, train

RECIPE = [
    "run.cycles=3",
    "run.checkpoint_every=1",
    "rollout.problems_per_cycle=3",
    "task.train_problems=12",
    "task.eval_problems=2",
    "evaluation.samples=2",
    "evaluation.pass_k=[1]",
    "evaluation.at=[0.0, 1.0]",
    "model.lora.rank=2",
]
# A verifier of the user's, in worker processes. Where DEATHS names a folder, every third task kills its worker once.
JUDGE = """
import hashlib, os, signal, time
from pathlib import Path

def judge(text, problem):
    name = hashlib.sha256(f"{problem.id} {text}".encode()).hexdigest()
    deaths = os.environ.get("DEATHS")
    if deaths and int(name, 16) % 3 == 0 and not (Path(deaths) / name).exists():
        (Path(deaths) / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("DAWDLE"):
        Path(os.environ["DAWDLE"]).touch()
        time.sleep(60)
    return text.rpartition("{")[2].partition("}")[0] == problem.answer
"""
_PR_SET_CHILD_SUBREAPER = 36


class ChaosError(Exception):
    """The run did not survive."""


@dataclass
class Points:
    """Names every moment around a change of the run's folder, and dies at the chosen one."""

    folder: Path
    fatal: Callable[[str], bool]
    report: Callable[[str], None]
    beginning: str = ""
    """What the run goes on from, as long as no phase has begun: a resume has as much to lose as there is by then."""

    def reach(self, name: str, before: Callable[[], None] = lambda: None) -> None:
        name = self.beginning + name
        if self.fatal(name):
            before()
            self.report(name)
            os.kill(os.getpid(), signal.SIGKILL)

    def about(self, path: Any) -> str | None:
        """The path inside the run's folder, or None for one elsewhere; what is random in a name is left out."""
        try:
            return _plain(Path(os.fsdecode(path)).relative_to(self.folder))
        except (TypeError, ValueError):
            return None

    def install(self) -> None:
        """Only ever in a process that is forked for one run."""
        for name in ("replace", "rename", "unlink", "mkdir", "rmdir", "truncate", "open"):
            setattr(os, name, self._around(name, os.__dict__[name]))
        real = io.open
        builtins.open = io.open = lambda file, mode="r", *args, **kwargs: self._open(real, file, mode, *args, **kwargs)
        pq.write_table = self._torn("parquet", pq.write_table)
        safetensors.torch.save_file = self._torn("safetensors", safetensors.torch.save_file)

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            about = _plain(path) if kwargs.get("dir_fd") is not None else self.about(path)
            if about is None or (name == "open" and not self._matters(args)):
                return real(path, *args, **kwargs)
            self.reach(f"before {name} {about}")
            result = real(path, *args, **kwargs)
            self.reach(f"after {name} {about}")
            return result

        return wrapped

    def _matters(self, args: tuple[Any, ...]) -> bool:
        """A file opened by number to be made, or flushed to disk; directories are opened so by rmtree as well."""
        return args == (os.O_RDONLY,) or bool(args[0] & os.O_CREAT)

    def _torn(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A writer outside Python: what it wrote is cut in half for the moment in the middle."""

        def wrapped(data: Any, path: Path, *args: Any, **kwargs: Any) -> Any:
            result = real(data, path, *args, **kwargs)
            half = os.path.getsize(path) // 2
            self.reach(f"amid {kind} {self.about(path)}", lambda: os.truncate(path, half))
            self.reach(f"after {kind} {self.about(path)}")
            return result

        return wrapped

    def _open(self, real: Callable[..., Any], file: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        about = self.about(file)
        if about is None or not set("wa") & set(mode):
            return real(file, mode, *args, **kwargs)
        self.reach(f"before opening {about}")
        raw = _Torn(str(file), mode.replace("b", "").replace("t", ""), kwargs.get("opener"), points=self, about=about)
        self.reach(f"after opening {about}")
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=kwargs.get("encoding") or "utf-8")


def _plain(path: Any) -> str:
    return re.sub(r"(?<=[.-])[0-9a-f]{16}(?=\.part|-|/|$)", "#", str(path))


class _Torn(io.FileIO):
    """A file whose writes can stop half-way."""

    def __init__(self, name: str, mode: str, opener: Any, *, points: Points, about: str):
        super().__init__(name, mode, opener=opener)
        self._points, self._about = points, about

    def write(self, data: Any, /) -> int:
        half = bytes(data)[: len(data) // 2]
        self._points.reach(f"amid writing {self._about}", lambda: super(_Torn, self).write(half) and None)
        written = super().write(data)
        self._points.reach(f"after writing {self._about}")
        return written


class Display:
    """Phases are points too."""

    def __init__(self, points: Points):
        self._points = points

    def phase(self, cycle: int, name: str) -> None:
        self._points.beginning = ""
        self._points.reach(f"in {name} of {cycle}")

    def cycle(self, cycle: int, metrics: dict[str, float]) -> None:
        self._points.reach(f"after cycle {cycle}")

    def evaluated(self, step: int, summary: dict[str, float]) -> None:
        self._points.reach(f"after evaluation {step}")

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class End:
    """How a trainer's process ended: `killed` at a point, with a `message` for people, or well."""

    killed: bool
    text: str


Setup = Callable[[], None]


def start(
    recipe: Recipe, folder: Path, fatal: Callable[[str], bool] | None = None, setup: Setup | None = None
) -> tuple[int, int]:
    """Fork a trainer; its process id, and where it says how it ended."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sink)
        return pid, source
    os.close(source)

    def report(text: str) -> None:
        os.write(sink, text.encode())

    try:
        kept = checkpoint.newest_whole(RunFolder(folder))[0]
        points = Points(folder, fatal or (lambda name: False), report, f"from {kept.name if kept else 'nothing'}: ")
        if fatal is not None:
            points.install()
        if setup is not None:
            setup()
        train(recipe, folder, True, Display(points))
        os._exit(0)
    except PastError as error:
        report(str(error))
        os._exit(2)
    except BaseException:
        report(traceback.format_exc())
        os._exit(1)


def finish(pid: int, source: int, kill_after: float | None = None) -> End:
    """Wait for a trainer, which may be killed before; anything but a clean end or a kill is told."""
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    with open(source, "rb") as said:
        text = said.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, 2, -signal.SIGKILL):
        raise ChaosError(f"the trainer ended with {code}:\n{text}")
    return End(code == -signal.SIGKILL, text)


def run(recipe: Recipe, folder: Path, **how: Any) -> End:
    """A trainer from its start to its end."""
    return finish(*start(recipe, folder, **how))


def fingerprint(folder: Path) -> dict[str, bytes]:
    """Every file of a run; of the timings, which never repeat, only which cycles they are of."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    found["timings.jsonl"] = str([line["cycle"] for line in RunFolder(folder).read_timings()]).encode()
    return found


def same(folder: Path, expected: dict[str, bytes], what: str) -> None:
    """The run is file by file the unbroken one, and holds nothing else."""
    found = fingerprint(folder)
    different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if different:
        raise ChaosError(f"{what}: differs from the unbroken run in {different}")


@dataclass
class Watch:
    """What was complete stays complete, and stays what it is in the unbroken run."""

    folder: Path
    expected: dict[str, bytes]
    boundary: int = -1
    history: list[str] = field(default_factory=list)

    def look(self, blow: str) -> None:
        self.history.append(blow)
        where = f"{len(self.history)} blows, last: {blow}"
        path, notes = checkpoint.newest_whole(RunFolder(self.folder))
        if notes:
            raise ChaosError(f"{where}: {notes}")
        reached = -1 if path is None else checkpoint.read_state(path)["next_cycle"]
        if reached < self.boundary:
            raise ChaosError(f"{where}: boundary {self.boundary} was complete and now {reached} is the newest")
        self.boundary = reached
        if path is not None:
            for file in (p for p in path.rglob("*") if p.is_file()):
                name = str(file.relative_to(self.folder))
                if name in self.expected and file.read_bytes() != self.expected[name]:
                    raise ChaosError(f"{where}: {name} is not what it is in the unbroken run")
        lines = self.expected["metrics.jsonl"].splitlines(keepends=True)
        kept = b"".join(lines[: max(0, reached)])
        metrics = self.folder / "metrics.jsonl"
        if kept and not metrics.read_bytes().startswith(kept):
            raise ChaosError(f"{where}: metrics of complete cycles are lost")
        for kind in ("rollouts", "continuations"):
            for k in range(max(0, reached)):
                name = f"{kind}/cycle-{k:05d}.parquet"
                if name in self.expected and (self.folder / name).read_bytes() != self.expected[name]:
                    raise ChaosError(f"{where}: {name} of a complete cycle is lost")


def kills(recipe: Recipe, folder: Path, expected: dict[str, bytes], thin: int, seed: int) -> str:
    """One run, killed at every point there is; or at one in `thin`, points that differ in numbers alone being one."""
    seen: set[str] = set()
    watch = Watch(folder, expected)

    def plain(name: str) -> str:
        beginning, mark, rest = name.rpartition(": ")
        return beginning + mark + (re.sub(r"\d+", "#", rest) if thin > 1 else rest)

    def fatal(name: str) -> bool:
        return plain(name) not in seen and derive_seed(seed, "point", plain(name)) % thin == 0

    while True:
        end = run(recipe, folder, fatal=fatal)
        if not end.killed:
            break
        seen.add(plain(end.text))
        watch.look(end.text)
    _well(end, "kills")
    same(folder, expected, f"{len(seen)} kills")
    return f"{len(seen)} SIGKILLs of one run, each at another point"


def chains(recipe: Recipe, folder: Path, expected: dict[str, bytes], count: int, length: int, seed: int) -> str:
    """Runs killed several times each, at seeded points."""
    total = 0
    for chain in range(count):
        draw = random.Random(derive_seed(seed, "chain", chain))
        place = folder / str(chain)
        watch = Watch(place, expected)
        for _ in range(length):
            target = draw.randint(1, 120)
            reached = iter(range(1, 1_000_000))
            end = run(recipe, place, fatal=lambda name, at=reached, n=target: next(at) == n)
            if not end.killed:
                break
            total += 1
            watch.look(end.text)
        _well(run(recipe, place), f"chain {chain}")
        same(place, expected, f"chain {chain} after {watch.history}")
    return f"{total} SIGKILLs in {count} runs at seeded points"


def moments(recipe: Recipe, folder: Path, expected: dict[str, bytes], count: int, seed: int) -> str:
    """Kills from outside, which also hit native code."""
    draw = random.Random(derive_seed(seed, "moments"))
    total, finished = 0, 0
    while total < count:
        place = folder / str(finished)
        watch = Watch(place, expected)
        while total < count:
            wait = draw.uniform(0.1, 0.8)
            end = finish(*start(recipe, place), kill_after=wait)
            total += 1
            watch.look(f"after {wait:.3f} s")
            if not end.killed:
                break
        _well(run(recipe, place), "moments")
        same(place, expected, "moments")
        finished += 1
    return f"{total} SIGKILLs in {finished} runs at random moments"


def workers(folder: Path) -> str:
    """Verifier processes die in mid-batch: the run is the same. Their trainer dies while they work: they go too."""
    deaths, dawdle = folder / "deaths", folder / "dawdle"
    deaths.mkdir(parents=True)
    (folder / "chaos_judge.py").write_text(JUDGE)
    sys.path.insert(0, str(folder))
    verifier = ["verifier.name='function'", "verifier.path='chaos_judge:judge'", "verifier.workers=2"]
    recipe = config.load("embedded/past", [*RECIPE, "run.cycles=1", *verifier])
    _well(run(recipe, folder / "unbroken"), "workers")
    _well(run(recipe, folder / "run", setup=lambda: os.environ.update(DEATHS=str(deaths))), "workers")
    same(folder / "run", fingerprint(folder / "unbroken"), "verifier processes that died")
    died = len(list(deaths.iterdir()))
    if not died:
        raise ChaosError("no verifier process died")
    pid, source = start(recipe, folder / "left", setup=lambda: os.environ.update(DAWDLE=str(dawdle)))
    while not dawdle.exists():
        time.sleep(0.02)
    finish(pid, source, kill_after=0.0)
    _no_process()
    return f"{died} verifier processes died in mid-batch, and all of them with their trainer"


def disk(recipe: Recipe, folder: Path, expected: dict[str, bytes], step: int) -> str:
    """A file system that is full again and again."""
    folder.mkdir(parents=True)
    size, full = 32, 0
    if (problem := _mount(folder, f"size={size}k")) is not None:
        return f"skipped: no small file system can be mounted ({problem})"
    watch = Watch(folder / "run", expected)
    try:
        while (end := run(recipe, folder / "run")).text:
            full += 1
            _told(end, folder / "run")
            watch.look(f"full at {size} KiB")
            size += step
            _mount(folder, f"remount,size={size}k")
        same(folder / "run", expected, f"{full} times a full disk")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    if not full:
        raise ChaosError("the disk never was full")
    return f"{full} times a full disk in one run, {size} KiB in the end"


def _mount(folder: Path, options: str) -> str | None:
    try:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()


def limit(recipe: Recipe, folder: Path, expected: dict[str, bytes], thin: int) -> str:
    """Files that cannot grow beyond a size: one limit below the size of each file that a run writes, or of some."""
    watch = Watch(folder, expected)
    sizes = sorted({len(content) for content in expected.values()})[::thin]
    hit = 0
    for size in sizes:
        end = run(recipe, folder, setup=lambda n=size - 1: resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)))
        if not end.text:
            break
        hit += 1
        _told(end, folder)
        watch.look(f"no file beyond {size} bytes")
    _well(run(recipe, folder), "limit")
    same(folder, expected, f"{hit} limits on file sizes")
    if not hit:
        raise ChaosError("no limit on file sizes was reached")
    return f"{hit} limits on file sizes in one run"


def _told(end: End, folder: Path) -> None:
    """One message that names the file, the reason and the way on; and nothing half-written takes up room."""
    left = [str(path) for path in folder.rglob(".*")]
    if left:
        raise ChaosError(f"a full disk was left with {left}")
    if not re.fullmatch(
        r"\S+: cannot be written, the disk is full [^;\n]*; [^;\n]*; put that right and [^;\n]*--resume", end.text
    ):
        raise ChaosError(f"a full disk was told so: {end.text}")


def _well(end: End, what: str) -> None:
    if end.killed or end.text:
        raise ChaosError(f"{what}: the run was not finished: {end.text}")


def _no_process(seconds: float = 20.0) -> None:
    """Processes that lost their parent are ours, since we asked for them; wait for them to end."""
    until = time.monotonic() + seconds
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > until:
                raise ChaosError("a process outlived its trainer")
            time.sleep(0.05)


@contextmanager
def reaper() -> Iterator[None]:
    """Orphans of our processes become our children, so that none is overlooked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    _no_process()


def _warm(recipe: Recipe) -> None:
    """What libraries import and remember on first use is done once, here, and not in every trainer."""
    with session(recipe) as parts:
        parts.loop.take(0)
    pa.Table.from_pylist([{"a": 1}], schema=pa.schema([("a", pa.int32())]))
    gc.collect()
    gc.freeze()


def main() -> int:
    """Deal the blows that were asked for; 1 at the first that a run does not survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--short", action="store_true", help="what the tests run")
    parser.add_argument("--seed", type=int, default=0, help="decides the random points and moments (default 0)")
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="kills, chains, moments, workers, disk and/or limit"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = config.load("embedded/past", RECIPE)
    _warm(recipe)
    with tempfile.TemporaryDirectory(prefix="past-chaos-") as name, reaper():
        root = Path(name).resolve()
        _well(run(recipe, root / "unbroken"), "the unbroken run")
        expected = fingerprint(root / "unbroken")
        short: bool = args.short
        blows: dict[str, Callable[[Path], str]] = {
            "kills": lambda to: kills(recipe, to, expected, 6 if short else 1, args.seed),
            "chains": lambda to: chains(recipe, to, expected, 1 if short else 12, 3 if short else 6, args.seed),
            "moments": lambda to: moments(recipe, to, expected, 2 if short else 40, args.seed),
            "workers": workers,
            "disk": lambda to: disk(recipe, to, expected, 384 if short else 16),
            "limit": lambda to: limit(recipe, to, expected, 4 if short else 1),
        }
        chosen = args.only.split(",") if args.only else list(blows)
        for what in chosen:
            began = time.monotonic()
            try:
                done = blows[what](root / what)
            except ChaosError as error:
                print(f"{what}: FAILED: {error}", file=sys.stderr)
                return 1
            print(f"{what}: {done} ({time.monotonic() - began:.1f} s)", flush=True)
            shutil.rmtree(root / what)
    return 0


if __name__ == "__main__":
    sys.exit(main())
