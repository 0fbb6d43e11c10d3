"""One writer of a folder at a time: who that is stands in the folder's `.lock`, and the kernel lets go of it.

The lock is the kernel's (`flock`), so that a killed process holds nothing; the file only says who it is. A process that
is forked from the holder does not hold it on.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import stat
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from past_opsd.core.files import writing
from past_opsd.core.nouns import PastError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = ".lock"
PATIENCE = 1.0
"""Seconds for a process that was just killed to be gone."""
_UNABLE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_descriptors: set[int] = set()


def _let_go() -> None:
    """In a forked child: its copies of the descriptors would keep the locks of a parent that is killed."""
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def held(folder: Path, note: Callable[[str], None] = lambda text: None) -> Generator[None]:
    """This process alone writes the folder, which is made where there is none and goes again if it stays empty."""
    path = folder / NAME
    with writing(folder):
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _take(path, note)
    try:
        yield
    finally:
        if descriptor in _descriptors:  # not in a forked child, where the lock is the parent's
            _descriptors.discard(descriptor)
            with suppress(OSError):
                if _is_at(descriptor, path):
                    path.unlink()
            os.close(descriptor)
            with suppress(OSError):
                for made in missing:
                    made.rmdir()


def claim(folder: Path) -> int | None:
    """A descriptor that holds a lock on the folder itself until it is closed; None where another process does."""
    descriptor = os.open(folder, os.O_RDONLY)
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
    return descriptor


def _take(path: Path, note: Callable[[str], None]) -> int:
    until = time.monotonic() + PATIENCE
    while True:
        descriptor = _open(path)
        if descriptor is None:
            continue
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "no locks")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            if time.monotonic() > until:
                raise PastError(
                    f"{path.parent} is being written by another process ({holder}); wait until it ends or stop it, or "
                    "choose another folder"
                ) from None
            time.sleep(0.05)
            continue
        except OSError as error:
            if error.errno not in _UNABLE:
                os.close(descriptor)
                raise
            note(f"{path.parent}: its file system knows no locks; see to it that no other process writes this folder")
        status = os.fstat(descriptor)
        if _is_at(descriptor, path) and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            _descriptors.add(descriptor)
            _sign(descriptor)
            return descriptor
        if _is_at(descriptor, path):  # a pipe, or another file's second name: not to be written to
            path.unlink()
        os.close(descriptor)


def _open(path: Path) -> int | None:
    """The lock's file, made where there is none; None where a link was in its place, which is gone now."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, flags, 0o666)
    except OSError:
        if not path.is_symlink():
            raise
        path.unlink()
        return None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name: its last holder may have taken it away."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """Say who holds the lock; on a full disk it is held without."""
    plain = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:500],
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    }
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(plain).encode())


def _holder(descriptor: int) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        plain = json.loads(os.pread(descriptor, 4096, 0))
        parts = (
            f"{plain['command']:.200}",
            f"pid {plain['pid']} on {plain['host']:.80}",
            f"since {plain['since']:.40}",
        )
        return "".join(c if c.isprintable() else " " for c in ", ".join(parts))
    return f"it has not said which; see who has {NAME} open"
