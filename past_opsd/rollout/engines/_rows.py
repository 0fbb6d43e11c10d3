"""The state of sequences being decoded together: they may leave at any step, and others may take their place.

A sequence is a row of every layer's key and value buffer. All rows end in the same column, so that a step writes one
column of the buffers and copies nothing; a row that leaves is overwritten by the last one, and a prompt enters
right-aligned. The network sees an ordinary left-padded batch: any mask it makes of that, a sliding window included,
holds.

The buffers stay within a `memory.Room`. They have rows for the sequences that are there, and columns for the longest
and some more; where another column would not fit, `excess` says how many rows must leave first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from past_opsd.core.nouns import PastError, Tokens
from past_opsd.policy import memory, packing
from past_opsd.policy.memory import Room
from past_opsd.policy.model import Model
from past_opsd.rollout.engines._lean import Lean

# A prefix that all prompts share is worth a forward of its own from this length on.
SHARED_PREFIX = 32
# Tokens of a sequence that are read at a time where a forward of whole prompts would not fit.
PIECE = 512
# Bytes for each entry of the vocabulary that logits and drawing from them take: float32 and float64 copies, and a sort.
DRAWING = 96


@dataclass(frozen=True)
class Sizes:
    """What decoding a network takes, measured on one token."""

    like: list[tuple[Tensor, Tensor]]
    """A token's keys and values by layer, [1, heads, 1, size]."""
    token: int
    """Bytes of a token in all layers, with its part of the copies that growing and attention make of one of them."""
    work: int
    """Bytes of a token in a forward besides: one block's activations."""
    width: int
    """Bytes of a number."""
    vocabulary: int

    @classmethod
    def of(cls, model: Model) -> Sizes:
        """Asks the network; under inference mode."""
        cache = DynamicCache()
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        cast(Any, model.network)(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        like = [(keys.clone(), values.clone()) for keys, values in _states(cache)]
        parts = [states.numel() * states.element_size() for pair in like for states in pair]
        text, width = model.config.get_text_config(), like[0][0].element_size()
        # A layer's keys and values may be copied; eager attention repeats them for every query head.
        copies = 2 * max(1, text.num_attention_heads // like[0][0].shape[1]) if model.choice.attention == "eager" else 2
        hidden = text.hidden_size
        inner = text.to_dict().get("intermediate_size") or 4 * hidden
        work = width * (12 * hidden + 5 * inner)
        return cls(like, sum(parts) + copies * max(parts), work, width, len(model.head))

    def room(self, size: int, limit: int, batch: int) -> Room:
        """Rows for responses of up to `limit` tokens in so many bytes."""
        # A drawn token is kept with its uniform and its log-probability: 8 + 8 + 4 bytes.
        return Room(size - PIECE * self.work, self.token, DRAWING * self.vocabulary + 20 * limit, batch)

    def needed(self, tokens: int, limit: int) -> int:
        """Bytes for one sequence of so many tokens, the prompt among them."""
        return PIECE * self.work + self.token * tokens + self.room(0, limit, 1).row

    def forward(self, rows: int, tokens: int) -> int:
        """Bytes of reading rows of so many tokens at once: their cache, a block's activations and a mask."""
        return rows * tokens * (self.token + self.work + tokens * (1 + self.width))


@dataclass
class _Window:
    """Which part of the buffers is alive: rows first..rows-1, columns start..end-1."""

    rows: int = 0
    start: int = 0
    end: int = 0
    first: int = 0


class _Layer(CacheLayerMixin):
    """One layer's buffers [rows, heads, columns, size], of which the network sees the window."""

    is_sliding = False  # everything is kept; a sliding window is the mask's business

    def __init__(self, window: _Window, buffers: list[Tensor]):
        super().__init__()
        self.window = window
        self.buffers = buffers
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        w, (keys, values) = self.window, self.buffers
        rows, end = slice(w.first, w.rows), w.end + key_states.shape[2]
        keys[rows, :, w.end : end] = key_states
        values[rows, :, w.end : end] = value_states
        return keys[rows, :, w.start : end], values[rows, :, w.start : end]

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class Rows:
    """Sequences in a room, one token a step, up to `limit` tokens after each prompt; used under inference mode."""

    def __init__(self, model: Model, prompts: Sequence[Tokens], limit: int, room: Room, sizes: Sizes):
        self._model = model
        self._network = cast(Any, model.network)
        self._sizes = sizes
        self._window = _Window()
        self._layers = [
            _Layer(self._window, [t.new_zeros(0, t.shape[1], 0, t.shape[3]) for t in pair]) for pair in sizes.like
        ]
        self._longest = max(len(prompt) for prompt in prompts)
        whole = self._longest + limit
        self._most = 4 * whole // 3 + 1  # with so many columns there is always a quarter to move the window by
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)
        self._next = torch.zeros(0, dtype=torch.long, device=model.device)
        self._starts = torch.zeros(0, dtype=torch.long)  # first column of each row; steers the window, so on the CPU
        self._window.start = self._window.end = self._longest  # every prompt finds its columns left of the end
        common = self._common(prompts)
        beside = replace(room, size=room.size - common * room.token)
        if beside.columns(1) < whole:
            common, beside = 0, room
        self._room = beside
        self._prefix = prompts[0][:common]
        self._prefilled = self._read_prefix() if common else None
        self._lean = Lean(model) if Lean.applies(model) else None

    def __len__(self) -> int:
        return self._window.rows

    @property
    def _columns(self) -> int:
        return self._mask.shape[1]

    def _width(self, *lengths: int) -> int:
        """Columns that the rows need, with others of these lengths; and any prompt."""
        w = self._window
        return max(w.end - w.start if w.rows else 0, self._longest, *lengths)

    @property
    def capacity(self) -> int:
        """How many rows of the present width there is room for; one in any case."""
        return max(1, self._room.rows(self._room_for(self._width())))

    def seats(self, lengths: Sequence[int]) -> int:
        """How many sequences of these lengths, in order, find room beside the rows that are there."""
        for count, longest in enumerate(accumulate(lengths, max), 1):
            if len(self) + count > max(1, self._room.rows(self._room_for(self._width(longest)))):
                return count - 1
        return len(lengths)

    def _room_for(self, width: int) -> int:
        """Columns for rows of this width where they are made anew."""
        return min(memory.grown(width), self._most)

    def enter(self, sequences: Sequence[Tokens]) -> Tensor:
        """Add a row for each sequence; the logits of their next tokens. Equal ones are computed once."""
        w = self._window
        self._make_place(len(sequences), max(map(len, sequences)))
        distinct = list(dict.fromkeys(sequences))
        index = {sequence: row for row, sequence in enumerate(distinct)}
        rows = torch.tensor([index[sequence] for sequence in sequences], device=self._model.device)
        last, longest = w.rows + len(sequences), max(map(len, distinct))
        taken = last * (self._room.token * self._columns + self._room.row)
        # Beside a longer row, a shared prefix would leave a short one with a gap; no row is wider than a prompt and its
        # response.
        fits = taken + self._sizes.forward(len(distinct), longest) <= self._room.size
        if fits and longest <= self._longest:
            logits = self._enter_together(distinct, rows)
        else:
            logits = self._enter_singly(sequences, distinct)
        w.rows = last
        w.start = int(self._starts.min())
        return logits[rows]

    def _enter_together(self, distinct: Sequence[Tokens], rows: Tensor) -> Tensor:
        """The logits after distinct sequences, read in one forward; `rows` says which of them each new row gets."""
        w = self._window
        cache, mask, logits = self._prefill(distinct)
        first, last, left = w.rows, w.rows + len(rows), w.end - mask.shape[1]
        for layer, filled in zip(self._layers, _states(cache), strict=True):
            for buffer, states in zip(layer.buffers, filled, strict=True):
                buffer[first:last, :, left : w.end] = states[rows]
        self._mask[first:last] = 0
        self._mask[first:last, left : w.end] = mask[rows]
        self._next = torch.cat([self._next, mask.sum(1)[rows]])
        self._starts = torch.cat([self._starts, left + mask.argmax(1)[rows].cpu()])
        return logits

    def _enter_singly(self, sequences: Sequence[Tokens], distinct: Sequence[Tokens]) -> Tensor:
        """The same in the memory of a piece: a sequence is read into its row, and that copied for its equals."""
        w, found = self._window, dict[Tokens, tuple[int, Tensor]]()
        for row, sequence in enumerate(sequences, w.rows):
            left = w.end - len(sequence)
            if sequence not in found:
                found[sequence] = (row, self._read(row, sequence))
            else:
                for buffer in (buffer for layer in self._layers for buffer in layer.buffers):
                    buffer[row, :, left : w.end] = buffer[found[sequence][0], :, left : w.end]
            self._mask[row] = 0
            self._mask[row, left : w.end] = 1
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        self._next = torch.cat([self._next, lengths.to(self._next.device)])
        self._starts = torch.cat([self._starts, w.end - lengths])
        return torch.cat([found[sequence][1] for sequence in distinct])

    def _read(self, row: int, sequence: Tokens) -> Tensor:
        """Keys and values of one sequence, piece by piece into the buffers; the logits at its end, [1, V]."""
        left, done = self._window.end - len(sequence), len(self._prefix)
        window = _Window(row + 1, left, left + done, row)
        if self._prefilled is not None:
            for layer, pair in zip(self._layers, _states(self._prefilled), strict=True):
                for buffer, states in zip(layer.buffers, pair, strict=True):
                    buffer[row, :, left : left + done] = states[0]
        device, logits = self._model.device, torch.zeros(0)
        for begin in range(done, len(sequence), PIECE):
            ids = torch.tensor([sequence[begin : begin + PIECE]], device=device)
            positions = torch.arange(begin, begin + ids.shape[1], device=device)[None]
            cache = Cache(layers=[_Layer(window, layer.buffers) for layer in self._layers])
            logits = self._forward(ids, ids.new_ones(1, begin + ids.shape[1]), positions, cache)
            window.end += ids.shape[1]
        return logits

    def leave(self, gone: Tensor) -> Tensor:
        """Drop rows; the order of those that stay, as indices of the rows before."""
        w = self._window
        stay = torch.ones(w.rows, dtype=torch.bool)
        stay[gone.cpu()] = False
        kept = int(stay.sum())
        order = torch.arange(kept)
        holes, movers = (~stay[:kept]).nonzero().squeeze(1), stay[kept:].nonzero().squeeze(1) + kept
        order[holes] = movers
        w.rows = kept
        self._starts = self._starts[order]
        if len(holes):
            into, source = holes.to(self._mask.device), movers.to(self._mask.device)
            for layer in self._layers:
                for buffer in layer.buffers:
                    buffer[into, :, w.start : w.end] = buffer[source, :, w.start : w.end]
            self._mask[into] = self._mask[source]
        if kept:
            w.start = int(self._starts.min())
        order = order.to(self._next.device)
        self._next = self._next[order]
        return order

    def excess(self) -> int:
        """How many rows must leave before the next step."""
        return len(self) - self._plan()[0] if len(self) else 0

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token a row; the logits of the next."""
        w = self._window
        if w.end == self._columns:
            self._make_room()
        self._mask[: w.rows, w.end] = 1
        mask = self._mask[: w.rows, w.start : w.end + 1]
        if self._lean is None:
            logits = self._forward(tokens[:, None], mask, self._next[:, None], Cache(layers=[*self._layers]))
        else:
            logits = self._lean.step(tokens, self._next, mask, self._layers)
        w.end += 1
        self._next = self._next + 1
        return logits

    def _common(self, prompts: Sequence[Tokens]) -> int:
        """How much all prompts share; 0 where that is little, or a window would not see past it."""
        common = min(packing.common_prefix(prompts), min(len(prompt) for prompt in prompts) - 1)
        alone = common < SHARED_PREFIX or len(set(prompts)) == 1
        return 0 if alone or not self._model.full_attention else common

    def _read_prefix(self) -> DynamicCache:
        """The keys and values of what all prompts share, computed once."""
        cache = DynamicCache()
        ids = torch.tensor([self._prefix], device=self._model.device)
        positions = torch.arange(len(self._prefix), device=self._model.device)[None]
        self._forward(ids, torch.ones_like(ids), positions, cache)
        return cache

    def _prefill(self, prompts: Sequence[Tokens]) -> tuple[DynamicCache, Tensor, Tensor]:
        """Keys and values of left-padded prompts, their mask, and the logits at their ends."""
        common = len(self._prefix)
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            rest = prompt[common:]
            ids[row, width - len(rest) :] = torch.tensor(rest)
            mask[row, width - len(rest) :] = 1
        mask[:, :common] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache()
        if self._prefilled is not None:
            for i, pair in enumerate(_states(self._prefilled)):
                keys, values = (states.expand(len(prompts), -1, -1, -1) for states in pair)
                cache.update(keys, values, i)
        device = self._model.device
        ids, mask, positions = ids.to(device), mask.to(device), positions.to(device)
        logits = self._forward(ids[:, common:], mask, positions[:, common:], cache)
        return cache, mask, logits

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        output = self._network(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _make_place(self, count: int, longest: int) -> None:
        """Buffers with room for `count` more rows, and columns left of the end for the longest of them."""
        w, width = self._window, self._width(longest)
        rows, columns = w.rows + count, self._columns
        fits = columns > width and self._room.rows(columns) >= rows
        if rows <= len(self._mask) and fits and longest <= w.end:
            return
        if not fits:
            columns = min(self._room_for(width), self._room.columns(rows))
        self._reshape(rows, columns, w.end if longest <= w.end < columns else width)

    def _plan(self) -> tuple[int, int]:
        """How many rows can stay when the next column is written, and the columns that the buffers have then.

        They grow by half where that fits; by what is left, but not less than `grown` says, where it does not.
        """
        rows, columns = len(self), self._columns
        if self._window.end < columns or 4 * self._width() <= 3 * columns:
            return rows, columns
        possible = max(self._room.columns(rows), memory.grown(columns))
        wanted = min(columns + max(memory.GROWTH, columns // 2), possible, self._most)
        stay = self._room.rows(wanted)
        # One row stays in any case: alone it has the columns for its limit.
        return (min(rows, stay), wanted) if stay else (1, max(columns, self._room.columns(1)))

    def _make_room(self) -> None:
        """The last column is written: widen the buffers, or move the window to the left where it needs few of them."""
        stay, columns = self._plan()
        assert len(self) <= stay, "rows must leave first"
        if columns > self._columns:
            self._reshape(len(self), columns, self._window.end)
        else:
            self._move(self._width())

    def _move(self, end: int) -> None:
        """The window further left, in the same buffers."""
        w = self._window
        shift = w.end - end
        old, new = slice(w.start, w.end), slice(w.start - shift, end)
        for layer in self._layers:
            for buffer in layer.buffers:
                buffer[: w.rows, :, new] = buffer[: w.rows, :, old].clone()
        mask = self._mask[: w.rows, old].clone()
        self._mask.zero_()
        self._mask[: w.rows, new] = mask
        self._starts -= shift
        w.start, w.end = new.start, end

    def _reshape(self, rows: int, columns: int, end: int) -> None:
        """Other buffers, the window at another end; one buffer at a time, so that no more than one stands twice."""
        w = self._window
        start = end - (w.end - w.start if w.rows else 0)
        old, new = slice(w.end - (end - start), w.end), slice(start, end)
        for layer in self._layers:
            for i, buffer in enumerate(layer.buffers):
                layer.buffers[i] = buffer.new_zeros(rows, buffer.shape[1], columns, buffer.shape[3])
                layer.buffers[i][: w.rows, :, new] = buffer[: w.rows, :, old]
        mask = self._mask.new_zeros(rows, columns)
        mask[: w.rows, new] = self._mask[: w.rows, old]
        self._mask = mask
        self._starts += end - w.end
        w.start, w.end = start, end


def _states(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values by layer."""
    return [(cast(Any, layer).keys, cast(Any, layer).values) for layer in cache.layers]


def require_attention(model: Model) -> None:
    """Refuse networks that keep another state than keys and values."""
    stray = model.attention_kinds - {"full_attention", "sliding_attention"}
    if stray or cast(Any, model.network)._is_stateful:
        kinds = ", ".join(sorted(stray)) or "a recurrent state"
        raise PastError(
            f"engine.name = 'torch' decodes networks that keep keys and values; '{model.section.path}' has {kinds}. "
            "Use engine.name = 'vllm'"
        )
