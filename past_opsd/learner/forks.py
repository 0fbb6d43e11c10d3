"""Forks: the positions of a response where the trained view is least decided.

In the student's phase the trained view is the student, at the temperature of the term. A share of each response, those
of its positions with the highest entropy, is compared with the rest; that depends on no other response, so batches and
processes do not change it. How many forks there are at all is counted against a fixed entropy, `OPEN`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from past_opsd.core.nouns import Forks

SHARE = 0.2
"""The part of each response that the log calls its forks, whatever a term does with them."""
OPEN = 0.5
"""Nats: a choice of four to one. A position of at least this entropy is counted as a fork."""


def highest(entropy: Tensor, lengths: Sequence[int], shares: Sequence[float]) -> Tensor:
    """Which positions [T] are among the highest entropies of their sequence: its share of them, rounded up.

    Sequences stand one after the other; of equal entropies the earlier position counts as the higher.
    """
    sizes = [math.ceil(round(share * n, 9)) for share, n in zip(shares, lengths, strict=True)]
    rows = torch.nn.utils.rnn.pad_sequence(
        list(torch.split(entropy, list(lengths))), True, -math.inf
    )  # [sequences, longest]
    rank = rows.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    count, size = torch.tensor([lengths, sizes], device=entropy.device).unsqueeze(-1)
    return (rank < size)[torch.arange(rows.shape[1], device=entropy.device) < count]


def weights(entropy: Tensor, lengths: Sequence[int], forks: Sequence[Forks | None]) -> Tensor:
    """What each position's weight is multiplied by [T], given how each sequence treats its forks."""
    given = [Forks(0.0, 1.0) if f is None else f for f in forks]
    chosen = highest(entropy, lengths, [f.share for f in given])
    factor = torch.tensor([f.weight for f in given], device=entropy.device)
    return torch.where(chosen, factor.repeat_interleave(torch.tensor(lengths, device=entropy.device)), 1.0)
