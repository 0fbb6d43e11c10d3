"""Killable worker processes: any number of tasks, each answered, timed out or reported as crashed.

A worker is a fresh interpreter that imports one function and nothing of the caller: no torch, no re-import of
the caller's main module, no inherited threads or locks. Each has its own pipes, so killing one, from here or
from outside, cannot harm another. Tasks and answers are JSON lines.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from past_opsd.core.nouns import PastError

_LOG = logging.getLogger(__name__)
_TELL_EVERY = 30.0
_START_LIMIT = 120.0
_START_TRIES = 3
_MAX_CRASHES = 2
_LOOK_EVERY = 0.5


class Lost(Enum):
    """What became of a task without an answer."""

    TIMEOUT = "timeout"
    CRASHED = "crashed"


@dataclass(eq=False, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    deadline: float
    ready: bool = False
    task: int | None = None


@dataclass(eq=False, slots=True)
class _State:
    """What outlives the pool object, so that a finaliser can end the workers."""

    workers: list[_Worker] = field(default_factory=list[_Worker])
    inbox: queue.SimpleQueue[tuple[_Worker, bytes]] = field(default_factory=queue.SimpleQueue[tuple[_Worker, bytes]])

    def end(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        if sys.platform != "win32":
            with suppress(ProcessLookupError):  # the worker leads a group of its own, with what it started
                os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.wait()
        if worker.process.stdin is not None:
            with suppress(BrokenPipeError):  # closing flushes what a dead worker did not read
                worker.process.stdin.close()

    def end_all(self) -> None:
        for worker in list(self.workers):
            self.end(worker)


class WorkerPool:
    """Runs `target` ("module:function", strings to a string) in up to `workers` processes.

    A task that takes longer than `timeout` seconds has its process killed, with what that started. A task whose
    process dies gets one more try in a fresh one. Processes start with the first task and stay for the next call.
    With an `argument`, `target` is called with it once in each process and gives the function. `advice` is said when
    no process can start.
    """

    def __init__(
        self,
        target: str,
        *,
        workers: int,
        timeout: float,
        memory_mb: int,
        argument: str = "",
        advice: str = "Give the verifier more memory_mb if the import works in this environment.",
    ) -> None:
        self.target, self.size, self.timeout, self.memory_mb = target, workers, timeout, memory_mb
        self.argument, self.advice = argument, advice
        self._state = _State()
        self._failed_starts = 0
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, self._state.end_all)

    @property
    def pids(self) -> list[int]:
        """The living workers' process ids."""
        return [worker.process.pid for worker in list(self._state.workers)]

    def close(self) -> None:
        """Kill every worker."""
        self._closed = True
        self._finalizer()

    def run(self, tasks: Sequence[Sequence[str]]) -> list[str | Lost]:
        """One answer a task, in order; tasks run on all workers at once."""
        if self._closed:
            raise PastError("This verifier was closed. Build a new one with build(options).")
        with self._lock:
            answers: dict[int, str | Lost] = {}
            crashes = [0] * len(tasks)
            waiting = deque(range(len(tasks)))
            told = time.monotonic()
            while len(answers) < len(tasks):
                if time.monotonic() - told > _TELL_EVERY:
                    told = time.monotonic()
                    late = sum(answer is Lost.TIMEOUT for answer in answers.values())
                    _LOG.warning("verifier: %d of %d comparisons done, %d timed out", len(answers), len(tasks), late)
                self._assign(tasks, waiting, missing=len(tasks) - len(answers))
                self._receive(answers, crashes, waiting)
            return [answers[i] for i in range(len(tasks))]

    def _assign(self, tasks: Sequence[Sequence[str]], waiting: deque[int], missing: int) -> None:
        while len(self._state.workers) < min(self.size, missing):
            self._start()
        for worker in self._state.workers:
            if waiting and worker.ready and worker.task is None:
                worker.task = waiting.popleft()
                worker.deadline = time.monotonic() + self.timeout
                assert worker.process.stdin is not None
                with suppress(BrokenPipeError):  # it is dead: its end of file is in the inbox, or will be
                    worker.process.stdin.write(json.dumps(tasks[worker.task]).encode() + b"\n")
                    worker.process.stdin.flush()

    def _receive(self, answers: dict[int, str | Lost], crashes: list[int], waiting: deque[int]) -> None:
        """Take one message, or time out whoever is over the limit."""
        active = [worker for worker in self._state.workers if worker.task is not None or not worker.ready]
        wait = min(worker.deadline for worker in active) - time.monotonic()
        try:
            worker, line = self._state.inbox.get(timeout=max(0.0, wait))
        except queue.Empty:
            for worker in active:
                if worker.deadline <= time.monotonic():
                    self._expire(worker, answers)
            return
        if worker not in self._state.workers:
            return
        if not line:
            self._bury(worker, answers, crashes, waiting)
        elif not worker.ready:
            self._welcome(worker, line)
        elif worker.task is not None:
            answers[worker.task] = json.loads(line)
            worker.task = None

    def _expire(self, worker: _Worker, answers: dict[int, str | Lost]) -> None:
        if not worker.ready:
            raise PastError(f"A verifier process did not start within {_START_LIMIT:.0f} s. Is the machine overloaded?")
        assert worker.task is not None
        answers[worker.task] = Lost.TIMEOUT
        self._state.end(worker)
        self._start()  # its imports run while the caller goes on

    def _bury(self, worker: _Worker, answers: dict[int, str | Lost], crashes: list[int], waiting: deque[int]) -> None:
        """A worker died: its task goes to the front of the queue once, then is given up."""
        self._state.end(worker)
        if not worker.ready:
            self._count_failed_start("it ended at once")
        if worker.task is not None:
            crashes[worker.task] += 1
            if crashes[worker.task] < _MAX_CRASHES:
                waiting.appendleft(worker.task)
            else:
                answers[worker.task] = Lost.CRASHED

    def _welcome(self, worker: _Worker, line: bytes) -> None:
        problem = json.loads(line)
        if problem:
            self._state.end(worker)
            self._count_failed_start(problem)
        else:
            worker.ready, self._failed_starts = True, 0

    def _count_failed_start(self, problem: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _START_TRIES:
            self._failed_starts = 0
            raise PastError(f"A verifier process cannot start: {problem}. {self.advice}")

    def _start(self) -> None:
        path = os.pathsep.join(map(os.path.abspath, sys.path))  # an empty entry stands for the working directory
        # A fixed hash seed makes sympy order terms alike in every worker, so a verdict does not depend on which.
        environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, self.target, str(self.timeout), str(self.memory_mb), self.argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        worker = _Worker(process, deadline=time.monotonic() + _START_LIMIT)
        self._state.workers.append(worker)
        threading.Thread(target=_listen, args=(worker, self._state.inbox), daemon=True).start()


def _listen(worker: _Worker, inbox: queue.SimpleQueue[tuple[_Worker, bytes]]) -> None:
    """Pass a worker's lines on; an empty one is its end."""
    assert worker.process.stdout is not None
    with worker.process.stdout as lines:
        for line in lines:
            inbox.put((worker, line))
    inbox.put((worker, b""))


def _limit_memory(megabytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_AS, megabytes << 20)


def _lower(kind: int, value: int) -> None:
    """Set a soft limit, within the hard one."""
    import resource

    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so much more CPU time: a busy orphan must not run for ever."""
    try:
        import resource
    except ImportError:
        return
    _lower(resource.RLIMIT_CPU, int(time.process_time() + seconds) + 2)


def _follow(parent: int) -> None:
    """End this process, with what it started, once its parent is gone: a task that waits uses no CPU time."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os.killpg(0, signal.SIGKILL)


def _serve(target: str, timeout: float, memory_mb: int, argument: str) -> None:
    """The worker's life: import, say so, then answer line by line until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":  # where a process keeps the number of a dead parent
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing a library prints may look like an answer
    _limit_memory(memory_mb)
    module, _, name = target.partition(":")
    try:
        function = importlib.import_module(module).__dict__[name]
        function = function(argument) if argument else function
        problem = ""
    except Exception as error:
        function, problem = None, f"{type(error).__name__}: {error}"
    replies.write(json.dumps(problem).encode() + b"\n")
    replies.flush()
    if function is None:
        return
    for line in sys.stdin.buffer:
        _limit_cpu(timeout)
        try:
            answer = function(*json.loads(line))
        except MemoryError:
            os._exit(1)
        replies.write(json.dumps(answer).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
