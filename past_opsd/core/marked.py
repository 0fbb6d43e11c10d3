"""A folder of ours that may be replaced: a mark in it lists the files that we wrote, and nothing else is ever deleted.

The mark is the word of whoever made the folder, so it counts only for plain files inside that are, byte for byte, what
it says of them. The new folder takes the old one's place in one step; what else lay there is moved over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from past_opsd.core.files import fresh_folder, leftovers, put, sync_all, write_text, writing
from past_opsd.core.lock import claim
from past_opsd.core.nouns import PastError


@contextmanager
def replacing(out: Path, mark: str) -> Generator[Path]:
    """A folder to write to, which becomes `out`: there is nothing yet, an empty folder or an earlier one of ours."""
    with writing(out):
        earlier = _earlier(out, mark)
        _clear_up(out, mark)
        with fresh_folder(out) as folder:
            descriptor = claim(folder)
            try:
                yield folder
                names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
                _no_clash(out, [name for name in names if name not in earlier])
                digests = {name: _digest(folder, name) for name in names}
                write_text(folder / mark, json.dumps({"files": digests}, indent=1) + "\n")
                sync_all(folder)
                if put(folder, out) is not None:
                    _retire(folder, out, mark)
            finally:
                if descriptor is not None:
                    os.close(descriptor)


def _earlier(out: Path, mark: str) -> dict[str, str]:
    """The files of ours in a folder; one that holds anything else, or files of ours that were changed, is refused."""
    if not out.exists() or not any(out.iterdir()):
        return {}
    files = _listed(out / mark)
    if files is None:
        raise PastError(f"{out} holds something else than what this command writes; choose another --out")
    for name, digest in files.items():
        if os.path.lexists(out / name) and _digest(out, name) != digest:
            raise PastError(f"{out / name} is not what was written there; move it away, or choose another --out")
    return files


def _listed(mark: Path) -> dict[str, str] | None:
    """Names and digests in a mark; None where there is none, or one that we cannot have written."""
    try:
        if not stat.S_ISREG(mark.lstat().st_mode) or mark.stat().st_size > 1 << 20:
            return None
        files = json.loads(mark.read_text(encoding="utf-8"))["files"]
        sound = all(_inside(name) and re.fullmatch("[0-9a-f]{64}", digest) for name, digest in files.items())
        return dict(files) if sound and mark.name not in files else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name


def _digest(folder: Path, name: str) -> str | None:
    """Of a plain file that is reached through no link; None for anything else."""
    path = folder / name
    between = [parent for parent in path.parents if parent != folder and parent.is_relative_to(folder)]
    if any(parent.is_symlink() for parent in between) or not stat.S_ISREG(path.lstat().st_mode):
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _no_clash(out: Path, names: list[str]) -> None:
    """Refuse to put a file where one lies that is not ours."""
    for name in names:
        if os.path.lexists(out / name):
            raise PastError(f"{out / name} is in the way; move it away, or choose another --out")


def _retire(old: Path, out: Path, mark: str) -> None:
    """Delete what is ours in a folder that was replaced, and move the rest to `out`; the mark goes last."""
    for name, digest in (_listed(old / mark) or {}).items():
        if os.path.lexists(old / name) and _digest(old, name) == digest:
            (old / name).unlink()
    _move(old, out, mark)
    if os.listdir(old) == [mark]:
        (old / mark).unlink()
        old.rmdir()


def _move(source: Path, to: Path, mark: str) -> None:
    """Everything in a folder but its mark; what is in the way stays where it is."""
    for entry in [Path(e.path) for e in os.scandir(source) if e.name != mark]:
        folder = entry.is_dir() and not entry.is_symlink()
        if not os.path.lexists(to / entry.name):
            os.rename(entry, to / entry.name)
        elif folder:
            _move(entry, to / entry.name, mark)
            if not os.listdir(entry):
                entry.rmdir()


def _clear_up(out: Path, mark: str) -> None:
    """Delete what a kill left beside `out`, and give back what it kept from being moved."""
    for left in leftovers(out.with_name(re.escape(out.name))):
        descriptor = claim(left)
        if descriptor is None:
            continue  # it is being written now
        if _listed(left / mark) is None:
            shutil.rmtree(left, ignore_errors=True)
        elif left.name.endswith("-old") and not out.exists():
            os.rename(left, out)
        elif out.is_dir() or not left.name.endswith("-old"):
            _retire(left, out, mark)
        os.close(descriptor)
