"""Paths as rows of one forward; paths whose prompts have a prefix in common can share its forward and backward.

A path is a view and the token ids read along it. A forward has B rows of L columns. Plain rows hold one path each,
right-padded. A shared row holds the common prefix of its paths' prompts once, followed by the rest of each prompt and
its response: position ids go on from the prefix for each of them, and a path sees the prefix and itself, so every
hidden state and every gradient is what the path would get alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor

from past_opsd.core.nouns import Tokens, View

WORTH = 128  # tokens of a common prefix; attending by segments has a cost for each of them

Read = tuple[View, Tokens]
"""A path: a view, and the token ids it reads along."""
Segments = list[tuple[int, list[int]]]
"""Of each shared row: the length of the common prefix, and the lengths of what follows it, path by path."""


@dataclass(frozen=True)
class Packed:
    """One forward: ids and positions [B, L], and where each path's predictions stand in [B * L].

    What a position may look at: in plain rows what `mask` [B, L] marks as not padding; in shared rows see `segments`.
    """

    ids: Tensor  # [B, L]
    positions: Tensor  # [B, L]
    index: Tensor  # [sum T]
    mask: Tensor | None = None  # [B, L]
    segments: Segments = field(default_factory=Segments)


def plain(paths: Sequence[Read]) -> Packed:
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


def shared(paths: Sequence[Read], sizes: Sequence[int]) -> Packed:
    """A row for each of `sizes`, which says how many of the paths, in order, stand in it."""
    waiting = iter(paths)
    rows = [list(islice(waiting, size)) for size in sizes]
    width = max(map(row_length, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    index: list[int] = []
    segments: Segments = []
    for row, members in enumerate(rows):
        prefix = common_prefix([view.prompt for view, _ in members])
        follow = [view.prompt[prefix:] + tokens[:-1] for view, tokens in members]
        read = [*members[0][0].prompt[:prefix], *chain.from_iterable(follow)]
        ids[row, : len(read)] = torch.tensor(read)
        where, start = list(range(prefix)), prefix
        for (view, tokens), own in zip(members, follow, strict=True):
            where += range(prefix, prefix + len(own))
            # A prompt's last token predicts the first of the response; without a rest it is the prefix's last.
            rest = len(view.prompt) - prefix
            first = start + rest - 1 if rest else prefix - 1
            index += [row * width + i for i in (first, *range(start + rest, start + rest + len(tokens) - 1))]
            start += len(own)
        positions[row, : len(read)] = torch.tensor(where)
        segments.append((prefix, [len(own) for own in follow]))
    return Packed(ids, positions, torch.tensor(index), segments=segments)


def dense(segments: Segments, width: int) -> Tensor:
    """The mask [B, 1, L, L] of shared rows: true where a position may look."""
    numbers = torch.full((len(segments), width), -1)  # [B, L]; padding looks like another path, and sees only itself
    for row, (prefix, lengths) in enumerate(segments):
        start = prefix
        numbers[row, :start] = 0
        for number, length in enumerate(lengths, 1):
            numbers[row, start : start + length] = number
            start += length
    same = numbers[:, :, None] == numbers[:, None, :]  # [B, L, L]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    mask = (same | (numbers == 0)[:, None, :]) & causal | torch.eye(width, dtype=torch.bool)
    return mask[:, None]


def batches(widths: Sequence[int], budget: int, heights: Sequence[int] | None = None) -> Iterator[list[int]]:
    """Indices in order of width, cut so that the padded size of a batch stays within the budget.

    An item has one row, or so many as `heights` says; one that exceeds the budget goes alone.
    """
    batch: list[int] = []
    rows = 0
    for i in sorted(range(len(widths)), key=lambda i: widths[i]):
        height = 1 if heights is None else heights[i]
        if batch and widths[i] * (rows + height) > budget:
            yield batch
            batch, rows = [], 0
        batch.append(i)
        rows += height
    if batch:
        yield batch


def common_prefix(prompts: Sequence[Tokens]) -> int:
    """How many tokens all prompts begin with."""
    first, last = min(prompts), max(prompts)  # what these two begin with, all between them begin with
    if first == last:
        return len(first)
    differ = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(differ, len(first))


def row_length(paths: Sequence[Read]) -> int:
    """Positions of a shared row; of a plain one for a single path."""
    return sum(len(view.prompt) + len(tokens) - 1 for view, tokens in paths) - saved(paths)


def saved(paths: Sequence[Read]) -> int:
    """By how many positions a shared row is shorter than its paths alone."""
    return (len(paths) - 1) * common_prefix([view.prompt for view, _ in paths])


def pays(paths: Sequence[Read]) -> bool:
    """Whether a shared row has a long prefix, and at least a fifth fewer positions than its paths alone."""
    return common_prefix([view.prompt for view, _ in paths]) >= WORTH and 4 * saved(paths) >= row_length(paths)
