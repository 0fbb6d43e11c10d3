"""Files that are there whole or not at all, and what a person is told when one cannot be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from past_opsd.types import PastError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WriteError(PastError):
    """A file or folder could not be written; whatever stood there before is untouched."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A failure inside is one to write `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{path}: cannot be written, {_reason(error)}") from None


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` at the end: a kill, an error or a full disk leaves the old file."""
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            sync(part)
            os.replace(part, path)
            sync(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """A file or folder on the disk itself, not only in the system's memory: a power cut does not take it back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """A text file in one piece."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")


def _reason(error: OSError | SafetensorError) -> str:
    # safetensors has no error number, only the text of the system's error.
    numbers = [error.errno] if isinstance(error, OSError) else [n for n in _FULL if f"(os error {n})" in str(error)]
    if any(number in _FULL for number in numbers):
        return "the disk is full (or a quota or a limit on file sizes is reached)"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
