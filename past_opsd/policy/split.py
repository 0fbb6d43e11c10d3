"""One row over several ranks: everything but attention is computed where a column lies, attention where its head is.

Each rank of a group holds as many columns of every row. Around attention they trade columns for heads (Ulysses): each
computes some of the heads on whole rows, so that attention itself knows nothing of it. The states that predict a path's
tokens are dealt out once more, as many to every rank, whatever row and column they were computed in: a path's positions
are then on the same ranks in the live view and in every frozen one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from past_opsd.policy.distributed import World
from past_opsd.policy.packing import Packed


class Split:
    """The ranks that share rows, and this one among them; by itself one rank that holds everything."""

    def __init__(self, size: int = 1, world: World | None = None):
        self.size = size
        self._world = world or World()
        self._rank = self._world.rank % size
        self._group = None if size == 1 else self._world.group(size)

    def own(self, rows: Tensor) -> Tensor:
        """This rank's columns of [B, L], as many on every rank: what is missing in the last ones is 0."""
        return pad(rows, (0, -rows.shape[1] % self.size)).chunk(self.size, dim=1)[self._rank]

    def around(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], *inputs: Tensor) -> Tensor:
        """Query, key and value [B, heads, own L, size] to [B, own L, heads, size].

        `attend` does the same on whole rows; it gets this rank's heads.
        """
        if self.size == 1:
            return attend(*inputs)
        query, key, value = (self._turn(self._repeat(x)) for x in inputs)  # [B, own heads, L, size]
        return self._turn(attend(query, key, value))

    def _repeat(self, x: Tensor) -> Tensor:
        """Heads as often as it takes for every rank to have as many."""
        copies = copies_of(x.shape[1], self.size)
        return x if copies == 1 else x.repeat_interleave(copies, dim=1)

    def _turn(self, x: Tensor) -> Tensor:
        """[B, X, Y, size] with this rank's part of Y to the whole of Y with this rank's part of X."""
        rows, cut, _, size = x.shape
        pieces = x.reshape(rows, self.size, cut // self.size, -1, size).movedim(1, 0)  # [ranks, B, own X, own Y, size]
        even = [1] * self.size
        return self._trade(pieces, even, even).movedim(0, 2).flatten(2, 3)

    def part(self, length: int) -> int:
        """How many of a path's positions this rank has the states of."""
        return length * (self._rank + 1) // self.size - length * self._rank // self.size

    def here(self, lengths: Sequence[int], device: torch.device) -> Tensor | slice:
        """Which they are, of paths one after the other."""
        if self.size == 1:
            return slice(None)
        return _where(self._takers(lengths) == self._rank).to(device)

    def _takers(self, lengths: Sequence[int]) -> Tensor:
        """The rank that has a position's states [sum T]: even and contiguous parts of each path."""
        return torch.cat([((torch.arange(n) + 1) * self.size - 1) // n for n in lengths])

    def deal(self, states: Tensor, packed: Packed) -> Tensor:
        """States of own columns [B, own L, H] to those that predict this rank's positions of each path [T here, H]."""
        flat = states.flatten(0, 1)
        if self.size == 1:
            return flat[packed.index.to(states.device)]
        length, width = packed.ids.shape[1], states.shape[1]
        row, column = packed.index // length, packed.index % length
        holder, taker = column // width, self._takers(packed.lengths)
        mine, here = (_where(ranks == self._rank) for ranks in (holder, taker))
        mine = mine[taker[mine].argsort(stable=True)]  # by whom they go to
        sent = flat[(row[mine] * width + column[mine] % width).to(states.device)]
        received = self._trade(sent, self._counts(holder[here]), self._counts(taker[mine]))
        return received[_back(holder[here]).to(states.device)]

    def gather(self, found: Tensor, lengths: Sequence[int]) -> Tensor:
        """What each rank found at its positions [T here], at all of them [sum T], on every rank."""
        if self.size == 1:
            return found
        taker = self._takers(lengths)
        received = self._trade(found.repeat(self.size), self._counts(taker), [len(found)] * self.size)
        return received[_back(taker).to(found.device)]

    def _counts(self, ranks: Tensor) -> list[int]:
        return cast(list[int], torch.bincount(ranks, minlength=self.size).tolist())

    def _trade(self, rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        return cast(Tensor, _Trade.apply(rows, self, receive, send))

    def exchange(self, rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        """So many rows for every rank of the group, one after the other, for so many of each."""
        return self._world.trade(rows, receive, send, self._group)


class _Trade(torch.autograd.Function):
    """Rows for rows; gradients go back the way their rows came."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, split: Split, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        ctx.way = split, receive, send
        return split.exchange(rows, receive, send)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        split, receive, send = ctx.way
        return split.exchange(grads[0], send, receive), None, None, None


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def _back(ranks: Tensor) -> Tensor:
    """Where each of these stands once they are sorted by rank."""
    return ranks.argsort(stable=True).argsort()


def copies_of(heads: int, ranks: int) -> int:
    """How often each head has to stand there for all ranks to have as many."""
    return ranks // math.gcd(heads, ranks)


def possible(heads: int, key_heads: int) -> list[int]:
    """Over how many ranks such an attention can be split."""
    return [n for n in range(1, heads + 1) if heads % (key_heads * copies_of(key_heads, n)) == 0]
