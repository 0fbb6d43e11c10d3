"""The folder through which adapters go to vLLM: in memory where the engine is in this process, and gone with the run.

A folder in memory is locked (`flock`) for as long as its process lives, however that ends. What a killed run left there
is unlocked: the same person's next run removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from past_opsd.core.lock import claim
from past_opsd.core.nouns import PastError

MEMORY = Path("/dev/shm")
"""Where files lie in memory, on Linux."""
PREFIX = "past-adapters-"
COPIES = 4
"""Adapters that lie in it at once: base, student, teacher, and one that is about to replace another."""


class HandOver:
    """A new folder under a name drawn at random, which nobody else may enter where `parent` is not given."""

    def __init__(self, parent: str | None, adapter: int | None = None):
        """In the folder `parent`; else in memory, if that has room for adapters of so many bytes; else where the
        system keeps temporary files."""
        self._lock: int | None = None
        if parent is None and adapter is not None and _room(COPIES * adapter):
            _sweep(MEMORY)
            made = Path(tempfile.mkdtemp(prefix=".past-", dir=MEMORY))
            self._lock = claim(made)  # before it has a name that is looked for
            self.path = made.with_name(PREFIX + made.name.removeprefix(".past-"))
            made.rename(self.path)
            return
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            raise PastError(
                f"engine.adapter_folder = '{parent}' cannot be written ({error}); name an existing folder"
            ) from None
        if parent is not None:
            self.path.chmod(0o755)  # servers may run as somebody else

    def remove(self) -> None:
        """The folder goes with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _room(size: int) -> bool:
    """Whether the memory's folder is there, ours to write to, and has twice that much left."""
    try:
        return os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= 2 * size
    except OSError:
        return False


def _sweep(parent: Path) -> None:
    """Remove this person's folders that no living process holds."""
    for left in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else removed it first
            if left.is_symlink() or left.lstat().st_uid != os.getuid():
                continue
            lock = claim(left)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
