import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from past_opsd.core.nouns import PastError
from past_opsd.rollout.verifiers.pool import Lost, WorkerPool

VICTIM = """
import os, sys, time
from pathlib import Path

def act(what, argument=""):
    if what == "echo":
        print("noise on standard output", flush=True)
        return argument
    if what == "spin":
        10 ** 10 ** 10 % 7 if argument == "gil" else time.sleep(60)
    if what == "die":
        os._exit(3)
    if what == "die once":
        if not Path(argument).exists():
            Path(argument).write_text(str(os.getpid()))
            time.sleep(60)
        return "survived"
    if what == "eat":
        return str(len(bytearray(8 << 30)))
    if what == "loaded":
        import past_opsd.rollout.verifiers._compare
        return str(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
    raise ValueError(what)
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WorkerPool]]:
    (tmp_path / "victim.py").write_text(VICTIM)
    monkeypatch.syspath_prepend(tmp_path)
    built: list[WorkerPool] = []

    def build(target: str = "victim:act", workers: int = 2, timeout: float = 30.0, memory_mb: int = 2048) -> WorkerPool:
        built.append(WorkerPool(target, workers=workers, timeout=timeout, memory_mb=memory_mb))
        return built[-1]

    yield build
    for each in built:
        each.close()


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z" if Path("/proc").exists() else False


def _until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def test_answers_in_order_and_processes_stay(pool: Callable[..., WorkerPool]) -> None:
    workers = pool()
    assert workers.pids == []
    tasks = [("echo", f"{i} ∞ \ud800") for i in range(50)]
    assert workers.run(tasks) == [argument for _, argument in tasks]
    before = workers.pids
    assert workers.run([("echo", "again")]) == ["again"]
    assert workers.pids == before
    workers.close()
    assert all(map(_gone, before))
    with pytest.raises(PastError, match="closed"):
        workers.run([("echo", "x")])


def test_a_task_over_the_limit_is_killed_and_the_others_are_answered(pool: Callable[..., WorkerPool]) -> None:
    workers = pool(workers=1, timeout=1.0)
    workers.run([("echo", "warm")])
    began = time.monotonic()
    answers = workers.run([("echo", "a"), ("spin", "gil"), ("echo", "b")])
    assert answers == ["a", Lost.TIMEOUT, "b"]
    assert time.monotonic() - began < 20


def test_a_worker_killed_from_outside_in_mid_task_costs_nothing(
    pool: Callable[..., WorkerPool], tmp_path: Path
) -> None:
    workers, mark = pool(), tmp_path / "mark"
    answers: list[str | Lost] = []
    tasks = [("echo", "a"), ("die once", str(mark)), ("echo", "b"), ("echo", "c")]
    thread = threading.Thread(target=lambda: answers.extend(workers.run(tasks)))
    thread.start()
    _until(lambda: mark.exists() and mark.read_text())
    os.kill(int(mark.read_text()), signal.SIGKILL)
    thread.join(timeout=60)
    assert answers == ["a", "survived", "b", "c"]


def test_an_idle_worker_killed_from_outside_is_replaced(pool: Callable[..., WorkerPool]) -> None:
    workers = pool(workers=1)
    workers.run([("echo", "a")])
    (pid,) = workers.pids
    os.kill(pid, signal.SIGKILL)
    _until(lambda: _gone(pid))
    assert workers.run([("echo", "b"), ("echo", "c")]) == ["b", "c"]
    assert workers.pids != [pid]


def test_what_always_dies_is_given_up_after_one_more_try(pool: Callable[..., WorkerPool]) -> None:
    assert pool().run([("die", ""), ("echo", "a"), ("raise", "")]) == [Lost.CRASHED, "a", Lost.CRASHED]


@pytest.mark.skipif(sys.platform == "win32", reason="no address space limit on Windows")
def test_memory_is_capped(pool: Callable[..., WorkerPool]) -> None:
    assert pool(memory_mb=1024).run([("eat", ""), ("echo", "a")]) == [Lost.CRASHED, "a"]


def test_a_worker_imports_no_torch(pool: Callable[..., WorkerPool]) -> None:
    assert pool(workers=1).run([("loaded", "")]) == ["[]"]


def test_a_worker_finds_what_its_caller_finds_through_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "victim.py").write_text(VICTIM)
    script = (
        f"import sys; sys.path.append({str(Path(__file__).resolve().parents[3])!r})\n"
        "from past_opsd.rollout.verifiers.pool import WorkerPool\n"
        "print(WorkerPool('victim:act', workers=1, timeout=30, memory_mb=2048).run([('echo', 'here')]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("['here']\n", "")


def test_a_worker_that_cannot_start_is_an_error_for_people(pool: Callable[..., WorkerPool]) -> None:
    with pytest.raises(PastError, match="No module named 'no_such_module'"):
        pool("no_such_module:act").run([("echo", "a")])


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_busy_worker_does_not_outlive_a_killed_parent_for_long(tmp_path: Path) -> None:
    (tmp_path / "victim.py").write_text(VICTIM)
    script = (
        f"import sys; sys.path[:0] = {json.dumps([str(tmp_path), str(Path(__file__).resolve().parents[3])])}\n"
        "from past_opsd.rollout.verifiers.pool import WorkerPool\n"
        "pool = WorkerPool('victim:act', workers=1, timeout=1.0, memory_mb=2048)\n"
        "pool.run([('echo', 'x')]); print(pool.pids[0], flush=True); pool.timeout = 60; pool.run([('spin', 'gil')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        _until(lambda: int(Path(f"/proc/{pid}/stat").read_text().split()[13]) > 0)
        parent.kill()
    try:
        _until(lambda: _gone(pid))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
