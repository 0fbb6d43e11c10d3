"""Sequences as rows of one forward; paths that share a prompt can share its forward and backward.

Plain rows hold one path each, right-padded. A shared row holds a prompt once, followed by the responses of all its
paths: position ids start again behind the prompt for each of them, and the mask lets a response see the prompt and
itself, so every row of hidden states and every gradient is what the path would get alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from past_opsd.types import Tokens, View

WORTH = 1024  # positions; below it, attending by parts and the longer rows cost what they save


@dataclass(frozen=True)
class Packed:
    """One forward: ids and positions [B, L], the mask, and where each path's predictions stand in [B * L].

    `rows` of shared rows: the prompt's length and the lengths of what follows it, response by response.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    index: Tensor
    rows: list[tuple[int, list[int]]] = field(default_factory=list)


def plain(paths: Sequence[tuple[View, Tokens]]) -> Packed:
    """One row a path; the mask [B, L] marks what is not padding. The last token is never read, only predicted."""
    sequences = [view.prompt + tokens[:-1] for view, tokens in paths]
    width = max(len(s) for s in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    starts = [row * width + len(view.prompt) - 1 for row, (view, _) in enumerate(paths)]
    index = torch.cat([torch.arange(s, s + len(y)) for s, (_, y) in zip(starts, paths, strict=True)])
    return Packed(ids, torch.arange(width).expand_as(ids), mask, index)


def shared(paths: Sequence[tuple[View, Tokens]]) -> Packed:
    """One row a prompt, with all its responses; the mask [B, 1, L, L] is true where a position may look."""
    groups: dict[Tokens, list[int]] = {}
    for i, (view, _) in enumerate(paths):
        groups.setdefault(view.prompt, []).append(i)
    width = max(row_length(prompt, [paths[i][1] for i in members]) for prompt, members in groups.items())
    ids = torch.zeros(len(groups), width, dtype=torch.long)
    positions = torch.zeros(len(groups), width, dtype=torch.long)
    segments = torch.full((len(groups), width), -1)  # padding looks like another response, and sees only itself
    index: list[Tensor] = [torch.empty(0)] * len(paths)
    for row, (prompt, members) in enumerate(groups.items()):
        start = len(prompt)
        ids[row, :start] = torch.tensor(prompt)
        positions[row, :start] = torch.arange(start)
        segments[row, :start] = 0
        # Every response's first token is predicted by the prompt's last.
        first = torch.tensor([row * width + start - 1])
        for segment, i in enumerate(members, 1):
            tokens = paths[i][1]
            stop = start + len(tokens) - 1
            ids[row, start:stop] = torch.tensor(tokens[:-1])
            positions[row, start:stop] = torch.arange(len(prompt), len(prompt) + len(tokens) - 1)
            segments[row, start:stop] = segment
            index[i] = torch.cat([first, torch.arange(row * width + start, row * width + stop)])
            start = stop
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    mask = (same | (segments == 0)[:, None, :]) & causal | torch.eye(width, dtype=torch.bool)
    rows = [(len(prompt), [len(paths[i][1]) - 1 for i in members]) for prompt, members in groups.items()]
    return Packed(ids, positions, mask[:, None], torch.cat(index), rows)


def row_length(prompt: Tokens, responses: Sequence[Tokens]) -> int:
    """Positions of a shared row."""
    return len(prompt) + sum(len(tokens) - 1 for tokens in responses)


def pays(paths: Sequence[tuple[View, Tokens]]) -> bool:
    """Whether sharing saves at least a third of the positions, and enough of them to be worth the longer rows."""
    alone = sum(len(view.prompt) + len(tokens) - 1 for view, tokens in paths)
    saved = sum(len(view.prompt) for view, _ in paths) - sum(len(p) for p in {view.prompt for view, _ in paths})
    return saved >= WORTH and 3 * saved >= alone
