"""Files that are there whole or not at all, and what a person is told when one cannot be written.

What is being written has a name that nobody can know beforehand and is made anew, so that a run's folder, which may be
somebody else's, cannot hold a link in its place; and no file or folder of a run may be a link that leads out of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from safetensors import SafetensorError

from past_opsd.core.nouns import PastError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_TOKEN = r"[0-9a-f]{16}"
# Without a token: what an earlier version of this package left behind.
_PART = re.compile(rf"\.(?:.+\.{_TOKEN}|recipe\.toml|(?:cycle|step)-[0-9]+\.[a-z]+)\.part")


class WriteError(PastError):
    """A file or folder could not be written; whatever stood there before is untouched."""


@contextmanager
def writing(path: Path) -> Generator[None]:
    """A failure inside is one to write `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{path}: cannot be written, {_reason(error)}") from None


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """A name to write to, which becomes `path` at the end: a kill, an error or a full disk leaves the old file."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o666))
        try:
            yield part
            sync(part)
            os.replace(part, path)
            sync(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """A text file in one piece."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")


def append(path: Path, text: str) -> None:
    """Add to a plain file: a link is not followed, and one that has other names becomes a file of its own first."""
    with writing(path):
        own(path)
        with open(path, "a", encoding="utf-8", opener=_open_plain) as file:
            file.write(text)


def own(path: Path) -> None:
    """Refuse what is not a plain file; one with several names (a hard link) gets a copy that is this name's alone."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file; remove it")
    if status.st_nlink > 1:
        with whole(path) as part:
            shutil.copyfile(path, part)


def _open_plain(name: str, flags: int) -> int:
    descriptor = os.open(name, flags | _NO_FOLLOW | _NO_WAIT, 0o666)  # a pipe without a reader must not hold us
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file; remove it")
    return descriptor


def aside(path: Path, label: str) -> Path:
    """A name beside `path` that nothing has yet, for what no longer counts: `damaged-step-00003.json`."""
    named, number = path.with_name(f"{label}-{path.name}"), count(2)
    while os.path.lexists(named):
        named = path.with_name(f"{label}-{path.stem}-{next(number)}{path.suffix}")
    return named


def temporary_name(folder: Path) -> Path:
    """Beside a folder, for while it is being written or deleted."""
    return folder.with_name(f".writing-{folder.name}-{secrets.token_hex(8)}")


@contextmanager
def fresh_folder(path: Path) -> Generator[Path]:
    """A new folder beside `path` to write to, gone when that fails; `put` gives it the name."""
    made = temporary_name(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        made.mkdir()
        status = made.stat()
        try:
            yield made
        except BaseException:
            if made.exists() and os.path.samestat(status, made.stat()):  # else it is what `put` took out of the way
                shutil.rmtree(made, ignore_errors=True)
            raise


def put(made: Path, path: Path) -> Path | None:
    """Give a folder its name in one step; what stood there is returned under the folder's old name."""
    try:
        os.rename(made, path)  # an empty folder gives way
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(made, path)
        return made
    return None


def _exchange(a: Path, b: Path) -> None:
    """Two folders change names: at once where the system can do that, else in three steps, taken back on an error."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename is not None and rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
        return
    spare = a.with_name(f"{a.name}-old")
    os.rename(b, spare)
    try:
        os.rename(a, b)
    except BaseException:
        os.rename(spare, b)
        raise
    os.rename(spare, a)


def leftovers(path: Path) -> list[Path]:
    """Folders that a kill left of `fresh_folder(path)`; a link is none. `path.name` is a pattern of `re`."""
    pattern = re.compile(rf"\.writing-{path.name}(?:-{_TOKEN}(?:-old)?)?")
    return [p for p in _entries(path.parent) if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


def sweep(folder: Path) -> None:
    """Delete what a kill left of files that were being written in this folder; nothing is followed."""
    for path in _entries(folder):
        if is_part(path.name) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def is_part(name: str) -> bool:
    """Whether a file of this name is one that was being written."""
    return _PART.fullmatch(name) is not None


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):  # none, or a file, or not for us to see
        return [Path(entry.path) for entry in os.scandir(folder)]
    return []


def sync(path: Path) -> None:
    """A file or folder on the disk itself, not only in the system's memory: a power cut does not take it back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path, sync: Callable[[Path], None] = sync) -> None:
    """A folder with everything in it on the disk itself."""
    for inner in sorted(folder.rglob("*"), reverse=True):
        sync(inner)
    sync(folder)


def enclosed(run: Path, names: Mapping[str, bool]) -> None:
    """Refuse a run in which a file or folder of these names, or in those that say so, is a link that leads out of it.

    It may be somebody else's: through the link we would read or overwrite files that are not the run's. The run's
    folder itself may be a link, since a person named it, and so may be what stays inside.
    """
    root = os.path.realpath(run)
    closed = {run / name for name, deep in names.items() if not deep}
    waiting, seen = [run / name for name in names], set[str]()
    while waiting:
        path = waiting.pop()
        target = os.path.realpath(path)
        if path.is_symlink() and os.path.commonpath([root, target]) != root:
            raise PastError(
                f"{path} is a link that leads out of the run, to {target}. Nothing is read or written through it: "
                "put a copy in its place, or remove it"
            )
        if path not in closed and target not in seen:
            seen.add(target)
            waiting += _entries(path)


def _reason(error: OSError | SafetensorError) -> str:
    # safetensors has no error number, only the text of the system's error.
    numbers = [error.errno] if isinstance(error, OSError) else [n for n in _FULL if f"(os error {n})" in str(error)]
    if any(number in _FULL for number in numbers):
        return "the disk is full (or a quota or a limit on file sizes is reached)"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
