"""How much memory is free, and how many sequences are decoded together in it.

Nothing here needs a model: what a token takes is told, so that estimates can ask before one is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from past_opsd.core.lazy import Lazy

if TYPE_CHECKING:
    import torch
else:
    torch = Lazy("torch")

GIB = 2**30
SHARE = 0.9
"""Of the free memory that decoding may take; the rest is for what allocators and kernels waste."""
GROWTH = 64
"""Tokens for which sequences get room beyond those they have, at least."""


def grown(tokens: int) -> int:
    """The room that sequences of so many tokens get where memory is short."""
    return tokens + max(GROWTH, tokens // 8)


@dataclass(frozen=True)
class Room:
    """Memory for sequences that are decoded together, as rows of equally many columns, a token each."""

    size: int
    """Bytes for all of them."""
    token: int
    """Bytes of a token's keys and values in all layers."""
    row: int
    """Bytes of a sequence besides: its logits, and what drawing from them takes."""
    batch: int
    """Most sequences."""

    def rows(self, columns: int) -> int:
        """How many sequences may have so many tokens."""
        return max(0, min(self.batch, self.size // (self.token * columns + self.row)))

    def columns(self, rows: int) -> int:
        """How many tokens so many sequences may have."""
        return (self.size // rows - self.row) // self.token


class Seats(NamedTuple):
    """How many sequences are decoded together: when they start, and as long as all of them run to their limit."""

    first: int
    last: int


def seats(free: int, token: int, prompt: int, limit: int, batch: int, row: int = 0) -> Seats:
    """How many sequences the torch engine decodes together.

    Args:
        free: bytes that are free when decoding starts.
        token: bytes of one token's keys and values in all layers.
        prompt: tokens of a prompt.
        limit: most tokens of a response.
        batch: most sequences, `engine.batch`.
        row: bytes of a sequence besides, for what is drawn from its logits.

    Returns:
        Those that start; and those that remain while all run to the limit, the rest being set aside until others have
        ended. No sequence is certain to end where the latter is 0, and the engine refuses to start.
    """
    room = Room(int(SHARE * free), token, row, batch)
    last = room.rows(prompt + limit)
    return Seats(max(last, room.rows(min(grown(prompt), prompt + limit))), last)


def free(device: torch.device) -> int:
    """Bytes that may still be taken on a device, with what its allocator holds and does not use."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return host_free()


def host_free(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: what the machine has available, or a container's limit leaves."""
    return max(0, min([_available(root), *_left(root)]))


def _available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # a system without such a file, macOS for one, tells how much it has
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left(root: Path) -> Iterator[int]:
    """What every control group around this process leaves, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        # Inside a container the path may be the host's; the limit then stands at the base.
        place = base / own.lstrip("/")
        for folder in (place, *place.parents):
            yield from _of_group(folder, *names)
            if folder == base:
                break


def _of_group(folder: Path, limit: str, usage: str, reclaimed: str) -> Iterator[int]:
    """What a group leaves; the files that the system would drop from its memory count as free."""
    try:
        most, used = (int((folder / name).read_text(encoding="ascii")) for name in (limit, usage))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        yield most - used + int(stat.get(reclaimed, 0))
    except (OSError, ValueError):
        return  # no such group here, or "max": without a limit
