"""Whether weights are bit for bit what they were: for checks within a process or among its peers, at every step.

The bits of a tensor are read as integers in a table, and the table's row and column sums, modulo 2^64, are made where
the tensor lies; only these sums go to the host, in one transfer, and are hashed. One changed entry changes its row's
sum; two exchanged ones change the sums of two rows, or within a row those of two columns. What is kept for others to
verify, checkpoints above all, has SHA-256 of every byte.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDTH = 256
ENTRIES = 2**20
"""Smaller tensors are put together up to about so many entries: a device is slow to start and quick to add."""


@torch.inference_mode()
def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A hash of the tensors' bits, in their order; it differs wherever one entry changed or two were exchanged."""
    sums: list[Tensor] = []
    for flat in _joined(tensors):
        size = flat.element_size()
        words = flat.view(WORDS[max(size, math.gcd(8, size * len(flat)))])  # several entries in one where they fit
        table = words.view(-1, math.gcd(WIDTH, len(words)))
        sums += [table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64)]
    first = sums[0].device
    together = torch.cat([part.to(first) for part in sums]).cpu()
    return hashlib.sha256(together.numpy().tobytes()).hexdigest()


def _joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The entries in order, those of neighbours of one kind and place together."""
    held: list[Tensor] = []
    entries, kind = 0, None
    for tensor in tensors:
        own = (tensor.dtype, tensor.device)
        if held and (own != kind or entries >= ENTRIES):
            yield torch.cat(held)
            held, entries = [], 0
        held.append(tensor.reshape(-1))
        entries, kind = entries + tensor.numel(), own
    yield held[0] if len(held) == 1 else torch.cat(held)
