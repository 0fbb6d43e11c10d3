"""torch's scaled dot-product attention with two shapes computed by parts, exactly and with less work.

- One query a row (decoding): heads that share keys and values are several queries of one head, so nothing is repeated.
- A shared row (`packing.shared`): the prompt attends to itself, each response to the prompt and itself. A dense mask
  would compute every response against every other.

Everything else is transformers' own `sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "past_sdpa"


class SharedMask(Tensor):
    """A dense mask [B, 1, L, L] that remembers each row's prompt length and the lengths of its responses."""

    rows: list[tuple[int, list[int]]]

    # What is computed from it is an ordinary tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def of(mask: Tensor, rows: list[tuple[int, list[int]]]) -> SharedMask:
        """The mask, with its structure."""
        made = mask.as_subclass(SharedMask)
        made.rows = rows
        return made


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, [B, L, heads, size]."""
    plain = kwargs.get("position_bias") is None and not kwargs.get("dropout")
    if plain and isinstance(attention_mask, SharedMask):
        return _shared(query, key, value, attention_mask.rows, scaling), None
    if plain and query.shape[2] == 1 and query.shape[1] > key.shape[1]:
        rows, heads, _, size = query.shape
        folded = query.reshape(rows, key.shape[1], -1, size)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(rows, 1, heads, value.shape[-1]), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _shared(
    query: Tensor, key: Tensor, value: Tensor, rows: list[tuple[int, list[int]]], scaling: float | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    width = query.shape[2]
    out: list[Tensor] = []
    for row, (prompt, responses) in enumerate(rows):
        q, k, v = (x[row : row + 1] for x in (query, key, value))
        asked, known, told = (x[:, :, :prompt] for x in (q, k, v))
        parts = [scaled_dot_product_attention(asked, known, told, is_causal=True, scale=scaling)]
        start = prompt
        for length in filter(None, responses):
            own = slice(start, start + length)
            keys, values = torch.cat([known, k[:, :, own]], dim=2), torch.cat([told, v[:, :, own]], dim=2)
            mask = torch.ones(length, prompt + length, dtype=torch.bool, device=q.device).tril(prompt)
            parts.append(scaled_dot_product_attention(q[:, :, own], keys, values, attn_mask=mask, scale=scaling))
            start += length
        parts.append(v.new_zeros(1, v.shape[1], width - start, v.shape[3]))  # padding
        out.append(torch.cat(parts, dim=2))
    return torch.cat(out).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
