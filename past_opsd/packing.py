"""Sequences as rows of one forward; paths whose prompts begin alike can share that part's forward and backward.

Plain rows hold one path each, right-padded. A shared row holds once what its paths' prompts have in common, followed by
the rest of each prompt and its response: position ids go on from the common part for each of them, and a path sees the
common part and itself, so every row of hidden states and every gradient is what the path would get alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor

from past_opsd.types import Tokens, View

WORTH = 128  # positions of a common beginning; attending by parts has a cost for each part

Pair = tuple[View, Tokens]
Parts = list[tuple[int, list[int]]]
"""Of each shared row: the length of the common beginning, and the lengths of what follows it, path by path."""


@dataclass(frozen=True)
class Packed:
    """One forward: ids and positions [B, L], and where each path's predictions stand in [B * L].

    What a position may look at: in plain rows what `mask` [B, L] marks as not padding; in shared rows see `parts`.
    """

    ids: Tensor
    positions: Tensor
    index: Tensor
    mask: Tensor | None = None
    parts: Parts = field(default_factory=list)


def plain(paths: Sequence[Pair]) -> Packed:
    """One row a path. The last token is never read, only predicted."""
    sequences = [view.prompt + tokens[:-1] for view, tokens in paths]
    width = max(len(s) for s in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    starts = [row * width + len(view.prompt) - 1 for row, (view, _) in enumerate(paths)]
    index = torch.cat([torch.arange(s, s + len(y)) for s, (_, y) in zip(starts, paths, strict=True)])
    return Packed(ids, torch.arange(width).expand_as(ids), index, mask=mask)


def shared(paths: Sequence[Pair], sizes: Sequence[int]) -> Packed:
    """A row for each of `sizes`, which says how many of the paths, in order, stand in it."""
    waiting = iter(paths)
    rows = [list(islice(waiting, size)) for size in sizes]
    width = max(map(row_length, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    index: list[int] = []
    parts: Parts = []
    for row, members in enumerate(rows):
        begin = common([view.prompt for view, _ in members])
        follow = [view.prompt[begin:] + tokens[:-1] for view, tokens in members]
        read = [*members[0][0].prompt[:begin], *chain.from_iterable(follow)]
        ids[row, : len(read)] = torch.tensor(read)
        where, start = list(range(begin)), begin
        for (view, tokens), own in zip(members, follow, strict=True):
            where += range(begin, begin + len(own))
            # A prompt's last token predicts the first of the response; without a rest it is the common part's last.
            rest = len(view.prompt) - begin
            first = start + rest - 1 if rest else begin - 1
            index += [row * width + i for i in (first, *range(start + rest, start + rest + len(tokens) - 1))]
            start += len(own)
        positions[row, : len(read)] = torch.tensor(where)
        parts.append((begin, [len(own) for own in follow]))
    return Packed(ids, positions, torch.tensor(index), parts=parts)


def dense(parts: Parts, width: int) -> Tensor:
    """The mask [B, 1, L, L] of shared rows: true where a position may look."""
    segments = torch.full((len(parts), width), -1)  # padding looks like another path, and sees only itself
    for row, (begin, lengths) in enumerate(parts):
        start = begin
        segments[row, :start] = 0
        for segment, length in enumerate(lengths, 1):
            segments[row, start : start + length] = segment
            start += length
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    mask = (same | (segments == 0)[:, None, :]) & causal | torch.eye(width, dtype=torch.bool)
    return mask[:, None]


def common(prompts: Sequence[Tokens]) -> int:
    """How many tokens all prompts begin with."""
    first, last = min(prompts), max(prompts)  # what these two begin with, all between them begin with
    if first == last:
        return len(first)
    differ = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(differ, len(first))


def row_length(paths: Sequence[Pair]) -> int:
    """Positions of a shared row; of a plain one for a single path."""
    return sum(len(view.prompt) + len(tokens) - 1 for view, tokens in paths) - saved(paths)


def saved(paths: Sequence[Pair]) -> int:
    """By how many positions a shared row is shorter than its paths alone."""
    return (len(paths) - 1) * common([view.prompt for view, _ in paths])


def pays(paths: Sequence[Pair]) -> bool:
    """Whether a shared row has a long beginning, and at least a fifth fewer positions than its paths alone."""
    return common([view.prompt for view, _ in paths]) >= WORTH and 4 * saved(paths) >= row_length(paths)
