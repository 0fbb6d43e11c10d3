"""The state of sequences being decoded together: they may leave at any step, and others may take their place.

A sequence is a row of every layer's key and value buffer. All rows end in the same column, so that a step writes one
column of the buffers and copies nothing; a row that leaves is overwritten by the last one, and a prompt enters
right-aligned. The network sees an ordinary left-padded batch: any mask it makes of that, a sliding window included,
holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from past_opsd.core.nouns import PastError, Tokens
from past_opsd.policy import packing
from past_opsd.policy.model import Model
from past_opsd.rollout.engines._lean import Lean

# A prefix that all prompts share is worth a forward of its own from this length on.
SHARED_PREFIX = 32
# Columns added to the buffers at least, when they are full.
GROWTH = 64


@dataclass
class _Window:
    """Which part of the buffers is alive: rows 0..rows-1, columns start..end-1."""

    rows: int = 0
    start: int = 0
    end: int = 0


class _Layer(CacheLayerMixin):
    """One layer's buffers [rows, heads, columns, size], of which the network sees the window."""

    is_sliding = False  # everything is kept; a sliding window is the mask's business

    def __init__(self, window: _Window, keys: Tensor, values: Tensor):
        super().__init__()
        self.window = window
        self.buffers = [keys, values]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        w, (keys, values) = self.window, self.buffers
        keys[: w.rows, :, w.end : w.end + 1] = key_states
        values[: w.rows, :, w.end : w.end + 1] = value_states
        return keys[: w.rows, :, w.start : w.end + 1], values[: w.rows, :, w.start : w.end + 1]

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class Rows:
    """Up to `capacity` sequences, one token a step; used under inference mode."""

    def __init__(self, model: Model, prompts: Sequence[Tokens], capacity: int):
        self._model = model
        self._network = cast(Any, model.network)
        self._capacity = capacity
        self._window = _Window()
        self._layers: list[_Layer] = []
        self._longest = max(len(prompt) for prompt in prompts)
        self._mask = torch.zeros(capacity, 0, dtype=torch.long, device=model.device)
        self._next = torch.zeros(0, dtype=torch.long, device=model.device)
        self._starts = torch.zeros(0, dtype=torch.long)  # first column of each row; steers the window, so on the CPU
        self._window.start = self._window.end = self._longest  # every prompt finds its columns left of the end
        self._prefix, self._prefilled = self._shared(prompts)
        self._lean = Lean(model) if Lean.applies(model) else None

    def __len__(self) -> int:
        return self._window.rows

    def enter(self, prompts: Sequence[Tokens]) -> Tensor:
        """Add a row for each prompt; the logits of their first tokens. Equal prompts are computed once."""
        w, device = self._window, self._model.device
        distinct = list(dict.fromkeys(prompts))
        cache, mask, logits = self._prefill(distinct)
        index = {prompt: row for row, prompt in enumerate(distinct)}
        rows = torch.tensor([index[prompt] for prompt in prompts], device=device)
        width = mask.shape[1]
        self._reserve(cache)
        first, last, left = w.rows, w.rows + len(prompts), w.end - width
        for layer, filled in zip(self._layers, _states(cache), strict=True):
            for buffer, states in zip(layer.buffers, filled, strict=True):
                buffer[first:last, :, left : w.end] = states[rows]
        self._mask[first:last] = 0
        self._mask[first:last, left : w.end] = mask[rows]
        self._next = torch.cat([self._next, mask.sum(1)[rows]])
        starts = left + mask.argmax(1)[rows].cpu()
        self._starts = torch.cat([self._starts, starts])
        w.rows = last
        w.start = int(self._starts.min())
        return logits[rows]

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

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token a row; the logits of the next."""
        w = self._window
        if w.end == self._mask.shape[1]:
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

    def _shared(self, prompts: Sequence[Tokens]) -> tuple[Tokens, DynamicCache | None]:
        """A prefix of all prompts, computed once; empty where it is short, or a window would not see past it."""
        common = min(packing.common_prefix(prompts), min(len(prompt) for prompt in prompts) - 1)
        if common < SHARED_PREFIX or len(set(prompts)) == 1 or not self._model.full_attention:
            return (), None
        prefix = prompts[0][:common]
        cache = DynamicCache()
        ids = torch.tensor([prefix], device=self._model.device)
        positions = torch.arange(common, device=self._model.device)[None]
        self._forward(ids, torch.ones_like(ids), positions, cache)
        return prefix, cache

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

    def _reserve(self, cache: DynamicCache) -> None:
        """The buffers, shaped like the first prompts' cache."""
        if self._layers:
            return
        for pair in _states(cache):
            keys, values = (t.new_zeros(self._capacity, t.shape[1], 0, t.shape[3]) for t in pair)
            self._layers.append(_Layer(self._window, keys, values))
        self._resize(self._longest + GROWTH)

    def _make_room(self) -> None:
        """The last column is written: move the window to the left, or widen the buffers where it needs most of them."""
        w = self._window
        columns, end = self._mask.shape[1], max(self._longest, w.end - w.start)
        if 4 * end > 3 * columns:
            self._resize(columns + max(GROWTH, columns // 2))
            return
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

    def _resize(self, columns: int) -> None:
        used = self._mask.shape[1]
        mask = self._mask.new_zeros(self._capacity, columns)
        mask[:, :used] = self._mask
        self._mask = mask
        for layer in self._layers:
            layer.buffers = [_wider(buffer, columns) for buffer in layer.buffers]


def _states(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values by layer."""
    return [(cast(Any, layer).keys, cast(Any, layer).values) for layer in cache.layers]


def _wider(buffer: Tensor, columns: int) -> Tensor:
    out = buffer.new_zeros(*buffer.shape[:2], columns, buffer.shape[3])
    out[:, :, : buffer.shape[2]] = buffer
    return out


def require_attention(model: Model) -> None:
    """Refuse networks that keep another state than keys and values."""
    stray = model.attention_kinds - {"full_attention", "sliding_attention"}
    if stray or cast(Any, model.network)._is_stateful:
        kinds = ", ".join(sorted(stray)) or "a recurrent state"
        raise PastError(
            f"engine.name = 'torch' decodes networks that keep keys and values; '{model.section.path}' has {kinds}. "
            "Use engine.name = 'vllm'"
        )
