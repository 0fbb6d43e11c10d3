"""Files that may be anybody's: only plain files are read, no further than a bound, and what cannot be read is told.

A run's folder may be damaged, or somebody else's: a pipe in place of a file would hold a reader for ever, a device has
no end. Whoever reads a file of a run or a recipe reads it through here.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from past_opsd.core.nouns import PastError

MOST = 256 << 20
"""Bytes of a record; the largest that a run writes are far below."""
SMALL = 4 << 20
"""Bytes of a file that a person may have written: a recipe, a settings file."""
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class ReadError(PastError):
    """A file could not be read."""


def plain(path: Path, most: int | None = None) -> None:
    """Refuse what is not a plain file, or is larger than `most`: for libraries that open files themselves."""
    try:
        _check(path, path.stat(), most)
    except (OSError, ValueError) as error:
        raise ReadError(f"{path}: cannot be read ({_reason(error)})") from None


def room(path: Path, folder: bool = False, ours: Callable[[Path], bool] = lambda path: True) -> None:
    """Refuse a place where no file (or folder) can come to be, before any work is done for it.

    A file that is there is replaced only if it is empty or `ours`: what the command would write.
    """
    above = next((p for p in path.parents if os.path.lexists(p)), Path())
    if not above.is_dir():
        raise PastError(f"{path} cannot be written: {above} is no folder; choose another place")
    if os.path.lexists(path) and path.is_dir() != folder:
        kind, wanted = ("a folder", "file") if path.is_dir() else ("a file", "folder")
        raise PastError(f"{path} is {kind}; give the name of a {wanted}")
    if not os.access(path if os.path.lexists(path) else above, os.W_OK):
        raise PastError(f"{path} cannot be written: it is not yours to write; choose another place")
    if not folder and os.path.lexists(path):
        _replaceable(path, ours)


def _replaceable(path: Path, ours: Callable[[Path], bool]) -> None:
    """A file takes the place of another by its name: /dev/null itself would be gone."""
    stream = path.is_symlink() and os.readlink(path).startswith("/proc/")  # /dev/stdout
    if stream or (path.exists() and not path.is_file()):
        raise PastError(f"{path} is not a plain file, so nothing is put in its place; choose another")
    if path.exists() and path.stat().st_size and not ours(path):
        raise PastError(f"{path} exists and is not what this command writes; remove it, or choose another place")


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """The whole of a plain file."""
    plain(path, most)
    try:
        # Not to wait, should a pipe have taken the file's place by now.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            _check(path, os.fstat(descriptor), most)
            content = file.read(most + 1)
    except OSError as error:
        raise ReadError(f"{path}: cannot be read ({_reason(error)})") from None
    if len(content) > most:
        raise ReadError(f"{path}: larger than {most >> 20} MiB, which no such file is")
    return content


def read_text(path: Path, most: int = MOST) -> str:
    """A UTF-8 file; one mark at its start that says so is left out."""
    try:
        return read_bytes(path, most).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: cannot be read (not UTF-8: {error.reason} at byte {error.start})") from None


def read_json(path: Path, most: int = MOST) -> Any:
    """What a JSON file holds."""
    text = read_text(path, most)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{path}: not JSON ({_short(error)})") from None


def read_toml(path: Path, text: str | None = None) -> dict[str, Any]:
    """What a TOML file holds; `text` where it was read already."""
    text = read_text(path, SMALL) if text is None else text
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is no error of TOML's own
        raise ReadError(f"{path}: not valid TOML: {_short(error)}") from None


def _check(path: Path, status: os.stat_result, most: int | None) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise ReadError(f"{path}: cannot be read ({_KINDS.get(kind, 'something else')}, not a plain file)")
    if most is not None and status.st_size > most:
        raise ReadError(f"{path}: larger than {most >> 20} MiB, which no such file is")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _short(error: Exception) -> str:
    return f"{str(error) or type(error).__name__:.200}"


def is_table(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether plain data, of JSON or TOML, is a table: its keys are texts."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether plain data is a list."""
    return isinstance(value, list)
