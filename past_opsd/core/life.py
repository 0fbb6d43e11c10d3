"""Signs of life: a command says at once that it started, then what it does whenever it was silent for a while.

A line that moves on a terminal, a plain line elsewhere; always on stderr, so what is read by machines stays clean. Only
the standard library is used, so the first word is out before anything heavy is imported. Where no command runs, as in a
script of one's own, `doing` and `count` do nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

SILENCE = 8.0
"""Seconds without a word after which a plain line is due."""
STILL = 1.0
"""The same on a terminal, where the line moves and goes away again."""

QUICK = frozenset({"recipes", "show", "schema", "completion", "init", "watch", "serve", "help", "version"})
"""Commands that answer at once, or speak for themselves."""

SWITCH = "PAST_LIFE"
"""The environment variable that, set to 'off', silences this."""

PARENT = "PAST_PARENT"
"""The environment variable with the process that a command ends with."""

_CLEAR = "\r\x1b[K"
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_current: Pulse | None = None


class Pulse:
    """What a command does now, told in silence."""

    def __init__(self, title: str, stream: TextIO):
        self._title = title
        self._stream = stream
        self._moves = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._doing, self._since, self._count = "starting", time.monotonic(), ""
        self._heard = self._since
        self._shown = False  # the moving line is on the screen
        self._inside = False  # somebody else's line is not finished
        self._lock = threading.RLock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="past-life")

    def start(self) -> None:
        """The first word, now; the others from a thread."""
        self._say()
        self._thread.start()

    def stop(self) -> None:
        """Silence, and a clean line."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._wipe()

    def doing(self, text: str) -> None:
        """From now on this."""
        with self._lock:
            if text != self._doing:
                self._doing, self._since, self._count = text, time.monotonic(), ""

    def count(self, done: int, total: int, what: str) -> None:
        """How far it is."""
        self._count = f"{done:,} of {total:,} {what}"

    def state(self) -> str:
        """What is done, how far, and for how long."""
        counted = f": {self._count}" if self._count else ""
        seconds = int(time.monotonic() - self._since)
        return f"{self._doing}{counted}{f', {seconds} s' if seconds else ''}"

    def hear(self, text: str, stream: TextIO) -> int:
        """Let others write: the moving line makes room, and the silence begins anew."""
        with self._lock:
            self._wipe()
            plain = _CODES.sub("", text)
            if plain and stream.isatty():
                self._inside = not plain.endswith(("\n", "\r"))
            self._heard = time.monotonic()
            return stream.write(text)

    def _beat(self) -> None:
        while not self._end.wait(0.25):
            with self._lock:
                silent = time.monotonic() - self._heard
                if silent >= (STILL if self._moves else SILENCE) and not (self._moves and self._inside):
                    self._say()

    def _say(self) -> None:
        text = f"{self._title}: {self.state()}"
        with suppress(OSError, ValueError):  # nobody reads any more: the command itself will find out
            if self._moves:
                self._stream.write(f"{_CLEAR}{text[: shutil.get_terminal_size().columns - 1]}")
                self._shown = True
            else:
                self._stream.write(f"{text}\n")
                self._heard = time.monotonic()
            self._stream.flush()

    def _wipe(self) -> None:
        if self._shown:
            self._shown = False
            with suppress(OSError, ValueError):
                self._stream.write(_CLEAR)
                self._stream.flush()


class _Heard:
    """A stream of this process; the pulse hears what is written to it."""

    def __init__(self, stream: TextIO, pulse: Pulse):
        self._stream, self._pulse = stream, pulse

    def write(self, text: str) -> int:
        return self._pulse.hear(text, self._stream)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def doing(text: str) -> None:
    """The running command now does this."""
    if _current is not None:
        _current.doing(text)


def count(done: int, total: int, what: str = "responses") -> None:
    """The running command is so far with what it does."""
    if _current is not None:
        _current.count(done, total, what)


def state() -> str:
    """What the running command does, in words; empty where none runs."""
    return "" if _current is None else _current.state()


@contextmanager
def beating(words: Sequence[str]) -> Generator[None]:
    """Signs of life around the command that these words of a command line are, if it may take long."""
    global _current
    if not _long(words) or _current is not None:
        yield
        return
    if os.environ.get(SWITCH) == "off" or os.environ.get("RANK", "0") != "0":
        with _asked_to_end():
            yield
        return
    out, err = sys.stdout, sys.stderr
    pulse = _current = Pulse(f"past {words[0]}", err)
    mine = _Heard(out, pulse), _Heard(err, pulse)
    sys.stdout, sys.stderr = mine  # pyright: ignore[reportAttributeAccessIssue]
    pulse.start()
    try:
        with _asked_to_end():
            yield
    finally:
        pulse.stop()
        _current = None
        if (sys.stdout, sys.stderr) == mine:
            sys.stdout, sys.stderr = out, err


def _long(words: Sequence[str]) -> bool:
    if len(words) < 2 and (not words or words[0] not in ("demo", "compare", "theory")):
        return False
    if words[0].startswith("-") or words[0] in QUICK or {"-h", "--help"} & set(words):
        return False
    return words[0] != "models" or words[1] == "pull"


@contextmanager
def _asked_to_end() -> Generator[None]:
    """Being told to end is as Ctrl-C, so that what was started is cleaned up; other handlers are left alone."""
    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread() or os.environ.get("WORLD_SIZE", "1") != "1":
        kinds = []
    taken = [kind for kind in kinds if signal.getsignal(kind) is signal.SIG_DFL]
    for kind in taken:
        signal.signal(kind, signal.default_int_handler)
    try:
        yield
    finally:
        for kind in taken:
            signal.signal(kind, signal.SIG_DFL)


def follow() -> None:
    """Be told to end, as by SIGTERM, when the process that started this one has died, if it asked for that."""
    parent = os.environ.pop(PARENT, "")

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, daemon=True, name="past-follow").start()


@contextmanager
def interruptible(under_way: Callable[[], str], terminate: bool = True) -> Generator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM is acknowledged and asks to stop where it is safe; the second stops at once.

    `under_way` says what is finished first; it says nothing where another process speaks for all. Without `terminate`,
    or where a script answers SIGTERM itself, that is left alone.
    """
    asked = False

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        if not under_way():
            return
        again = "press Ctrl-C again to stop now" if signum == signal.SIGINT else "a second signal stops it now"
        say(f"past: {under_way()}; {again}")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals reach the main thread only
        return
    free = signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.default_int_handler)
    kinds = [signal.SIGINT, *([signal.SIGTERM] if terminate and free else [])]
    previous = [(kind, signal.signal(kind, ask)) for kind in kinds]
    try:
        yield lambda: asked
    finally:
        for kind, handler in previous:
            signal.signal(kind, handler)


def say(text: str) -> None:
    """A line on stderr, at once, also from a signal's handler that came in the midst of another line."""
    with suppress(OSError):
        os.write(2, f"{_CLEAR if os.isatty(2) else ''}{text}\n".encode())


def program() -> list[str]:
    """How this program was started, as words that a person can type again."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name.split(".")[0] == "past_opsd":
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    own = Path(sys.argv[0])
    if own.name != "past":
        return ["past"]
    found = shutil.which("past")
    return ["past"] if found is not None and Path(found).resolve() == own.resolve() else [str(own)]
