"""Paths as rows of one forward; paths that begin alike can share the forward and the backward of what they begin with.

A path is a view and the token ids read along it. A forward has B rows of L columns. Plain rows hold one path each,
right-padded. A shared row is a tree: what several paths begin with stands in it once, be it examples that all prompts
show, the prompt of several responses, equal beginnings of responses or a whole response drawn twice. Each segment of
the tree sees the segments before it on its paths and itself, and positions go on along a path, so every hidden state
and every gradient is what the path would get alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

import torch
from torch import Tensor

from past_opsd.core.nouns import Adapter, Tokens, View

Read = tuple[View, Tokens]
"""A path: a view, and the token ids it reads along."""
Segments = list[tuple[int, int]]
"""A shared row, segment after segment: the number of the segment before it on its paths (-1: none), and its length."""


@dataclass(frozen=True)
class Packed:
    """One forward: ids and positions [B, L], and where each path's predictions stand in [B * L].

    What a position may look at: in plain rows what `mask` [B, L] marks as not padding; in shared rows see `segments`.
    """

    ids: Tensor  # [B, L]
    positions: Tensor  # [B, L]
    index: Tensor  # [sum T]
    lengths: list[int]  # T of each path
    mask: Tensor | None = None  # [B, L]
    segments: list[Segments] = field(default_factory=list[Segments])


def sequence(path: Read) -> Tokens:
    """What a path reads: its prompt and its tokens but the last, which is only predicted."""
    view, tokens = path
    return view.prompt + tokens[:-1]


def plain(paths: Sequence[Read]) -> Packed:
    """One row a path."""
    sequences = [sequence(path) for path in paths]
    width = max(len(s) for s in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, read in enumerate(sequences):
        ids[row, : len(read)] = torch.tensor(read)
        mask[row, : len(read)] = 1
    starts = [row * width + len(view.prompt) - 1 for row, (view, _) in enumerate(paths)]
    index = torch.cat([torch.arange(s, s + len(y)) for s, (_, y) in zip(starts, paths, strict=True)])
    return Packed(ids, torch.arange(width).expand_as(ids), index, [len(y) for _, y in paths], mask=mask)


class Tree:
    """What the paths of a row read, common beginnings once.

    A beginning becomes a segment of its own where that saves at least `worth` positions; a position costs a network's
    arithmetic, a segment an attention of its own in every layer (`Model.worth`).
    """

    def __init__(self, paths: Sequence[Read], worth: int = 1):
        self._sequences = [sequence(path) for path in paths]
        self._worth = worth
        self.segments: Segments = []
        self.ids: list[int] = []
        self.positions: list[int] = []
        self._ends: dict[Tokens, int] = {}  # what is read -> the segment it ends in
        self._starts: list[int] = []
        self._grow(sorted(set(self._sequences)))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def saved(self) -> int:
        """By how many positions the row is shorter than its paths alone."""
        return sum(map(len, self._sequences)) - len(self)

    @property
    def pays(self) -> bool:
        """Whether the row saves more than its segments cost."""
        return self.saved >= self._worth * len(self.segments)

    def columns(self, path: Read) -> list[int]:
        """Where in the row the predictions of a path's tokens stand."""
        chain, segment = list[int](), self._ends[sequence(path)]
        while segment >= 0:
            parent, length = self.segments[segment]
            chain[:0] = range(self._starts[segment], self._starts[segment] + length)
            segment = parent
        return chain[len(path[0].prompt) - 1 :]

    def root(self, path: Read) -> int:
        """The segment that a path begins with: paths of different roots have nothing in common."""
        segment = self._ends[sequence(path)]
        while self.segments[segment][0] >= 0:
            segment = self.segments[segment][0]
        return segment

    def _grow(self, sequences: list[Tokens]) -> None:
        """Depth first, so that a segment's first child stands right behind it."""
        waiting = [(sequences, 0, -1)]  # sorted sequences, how much of them stands already, and in which segment
        while waiting:
            group, begin, parent = waiting.pop()
            if len(group) == 1:
                self._ends[group[0]] = self._add(group[0], begin, len(group[0]), parent)
                continue
            end = common_prefix(group)
            if (len(group) - 1) * (end - begin) >= max(1, self._worth):
                parent = self._add(group[0], begin, end, parent)
                begin = end
            if len(group[0]) == end:  # sorted, so the one that ends here is the first
                done = group.pop(0)
                self._ends[done] = self._add(done, begin, end, parent)
            branches = [list(branch) for _, branch in groupby(group, key=lambda tokens: tokens[end])]
            waiting += [(branch, begin, parent) for branch in reversed(branches)]

    def _add(self, tokens: Tokens, begin: int, end: int, parent: int) -> int:
        if begin == end:
            return parent
        self._starts.append(len(self.ids))
        self.segments.append((parent, end - begin))
        self.ids += tokens[begin:end]
        self.positions += range(begin, end)
        return len(self.segments) - 1


def shared(paths: Sequence[Read], sizes: Sequence[int], worth: int = 1) -> Packed:
    """A row for each of `sizes`, which says how many of the paths, in order, stand in it."""
    waiting = iter(paths)
    rows = [list(islice(waiting, size)) for size in sizes]
    trees = [Tree(row, worth) for row in rows]
    width = max(map(len, trees))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    index: list[int] = []
    for row, (members, tree) in enumerate(zip(rows, trees, strict=True)):
        ids[row, : len(tree)] = torch.tensor(tree.ids)
        positions[row, : len(tree)] = torch.tensor(tree.positions)
        index += [row * width + column for path in members for column in tree.columns(path)]
    lengths = [len(y) for _, y in paths]
    return Packed(ids, positions, torch.tensor(index), lengths, segments=[tree.segments for tree in trees])


def spans(segments: Segments) -> Iterator[list[tuple[int, int]]]:
    """Of each segment, the columns it may look at up to its own end: from, to; touching ones joined."""
    starts: list[int] = []
    start = 0
    for number, (_, length) in enumerate(segments):
        starts.append(start)
        start += length
        found: list[tuple[int, int]] = []
        while number >= 0:
            begin, end = starts[number], starts[number] + segments[number][1]
            if found and found[0][0] == end:
                found[0] = (begin, found[0][1])
            else:
                found.insert(0, (begin, end))
            number = segments[number][0]
        yield found


def dense(rows: Sequence[Segments], width: int) -> Tensor:
    """The mask [B, 1, L, L] of shared rows: true where a position may look; padding sees itself."""
    mask = torch.zeros(len(rows), width, width, dtype=torch.bool)
    for row, segments in enumerate(rows):
        for (_, length), seen in zip(segments, spans(segments), strict=True):
            stop = seen[-1][1]
            for begin, end in seen:
                mask[row, stop - length : stop, begin:end] = True
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return (mask & causal | torch.eye(width, dtype=torch.bool))[:, None]


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


def alike(units: Sequence[Sequence[Read]], budget: int) -> Iterator[list[int]]:
    """Indices of units, those that begin alike beside each other, cut so that an adapter's row stays within the budget.

    A unit is what is read together, by one adapter or several. Of what units share, only what the first reads of two
    neighbours begin with is counted once, so a row may come out shorter than the budget, never longer. A unit that
    exceeds it goes alone.
    """
    reads = [by_adapter(unit) for unit in units]
    trees: list[dict[Adapter, int]] = [{name: len(Tree(own)) for name, own in unit.items()} for unit in reads]
    firsts: list[dict[Adapter, Tokens]] = [{n: min(map(sequence, own)) for n, own in unit.items()} for unit in reads]
    batch: list[int] = []
    size: dict[Adapter, int] = {}
    for i in sorted(range(len(units)), key=lambda i: sorted(firsts[i].items())):
        begun = firsts[batch[-1]] if batch else {}
        grown = dict(size)
        for name, more in trees[i].items():
            common = common_prefix([begun[name], firsts[i][name]]) if name in begun else 0
            grown[name] = size.get(name, 0) + more - common
        if batch and max(grown.values()) > budget:
            yield batch
            batch, grown = [], trees[i]
        batch.append(i)
        size = grown
    if batch:
        yield batch


def by_adapter(reads: Sequence[Read]) -> dict[Adapter, list[Read]]:
    """What each adapter reads, each read once."""
    found: dict[Adapter, list[Read]] = {}
    for read in dict.fromkeys(reads):
        found.setdefault(read[0].adapter, []).append(read)
    return found


def common_prefix(prompts: Sequence[Tokens]) -> int:
    """How many tokens all of these begin with."""
    first, last = min(prompts), max(prompts)  # what these two begin with, all between them begin with
    if first == last:
        return len(first)
    differ = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(differ, min(len(first), len(last)))
