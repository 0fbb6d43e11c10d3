"""A side of a benchmark in a process of its own, asked over a pipe: sides take turns, each has its peak memory."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from past_opsd.core.nouns import Closing, PastError, Tokens, derive_seed

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# glibc keeps freed memory for later; with this, tensors come from the system and go back to it at once.
HONEST_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

Tools = Mapping[str, Callable[..., Any]]


class Side(Closing):
    """The parent's end: `build(pipe, *args)` runs in a fresh process and answers with `serve`."""

    def __init__(self, name: str, build: Callable[..., None], *args: Any, environment: Mapping[str, str] | None = None):
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_main, args=(end, build, args), daemon=True)
        with _environment(environment or {}):
            self._process.start()
        end.close()

    def ask(self, what: str, *args: Any) -> Any:
        """What the tool of that name gives; an error that a person can mend is raised here as it is."""
        try:
            self._pipe.send((what, args))
            outcome, value = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise PastError(f"the process of '{self._name}' ended early; what it wrote before says why") from None
        if outcome == "error":
            raise PastError(value)
        return value

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


@contextmanager
def _environment(more: Mapping[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _main(pipe: Connection, build: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        build(pipe, *args)
    except PastError as error:
        pipe.recv()
        answer(pipe, str(error), "error")


def serve(pipe: Connection, tools: Tools, until: str | None = None) -> None:
    """Answer requests until one asks for `until`, which the caller then answers; the process ends with the pipe."""
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            sys.exit(0)
        if name == until:
            return
        answer(pipe, tools[name](*args))


def answer(pipe: Connection, value: Any, outcome: str = "ok") -> None:
    """Send a request's outcome."""
    pipe.send((outcome, value))


def peak() -> float | None:
    """MiB this process had resident at most; Linux only."""
    return _mebibytes("VmHWM") if STATUS.exists() else None


def peak_beyond(work: Callable[[], Any]) -> float | None:
    """MiB that this work needs at its peak beyond what is resident before it; Linux only."""
    if not (STATUS.exists() and CLEAR.exists()):
        work()
        return None
    CLEAR.write_text("5")  # resets the high-water mark to what is resident now
    before = _mebibytes("VmRSS")
    work()
    return _mebibytes("VmHWM") - before


def tokens_of(name: str, length: int, vocabulary: int) -> Tokens:
    """Made tokens, the same for the same name in every process."""
    draw = random.Random(derive_seed("bench", "tokens", name))
    return tuple(draw.randrange(vocabulary) for _ in range(length))


def _mebibytes(field: str) -> float:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024
