"""torch's scaled dot-product attention with two shapes computed in pieces, exactly and with less work.

- One query a row (decoding): heads that share keys and values are several queries of one head, so nothing is repeated.
- A shared row (`packing.Tree`): each segment attends to those before it on its paths and to itself. A dense mask would
  compute every path against every other; the causal bias that ends at the lower right needs no mask, so that on a GPU
  the kernels that take none remain.

Everything else is transformers' own `sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, masking_utils
from transformers.integrations import sdpa_attention
from transformers.masking_utils import AttentionMaskInterface

from past_opsd.policy import packing
from past_opsd.policy.split import Split

NAME = "past_sdpa"


class SharedMask(Tensor):
    """The mask of shared rows: it knows their segments, and takes no memory until somebody asks for the dense one.

    It also knows which ranks share the rows.
    """

    segments: list[packing.Segments]
    ranks: Split

    # What is computed from it is an ordinary tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType, reportPrivateUsage, reportUnknownVariableType]

    @staticmethod
    def of(segments: list[packing.Segments], width: int, device: torch.device, ranks: Split) -> SharedMask:
        """Of the shape [B, 1, L, L]."""
        shape = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).expand(len(segments), 1, width, width)
        made = shape.as_subclass(SharedMask)
        made.segments, made.ranks = segments, ranks
        return made


class _LowerRight(CausalBias):
    """torch's causal bias without its tensor [2, L, columns], which nothing reads: 50 GB for a row of 79,000 tokens."""

    def __new__(cls, variant: CausalVariant, seq_len_q: int, seq_len_kv: int) -> _LowerRight:
        return Tensor.__new__(cls)


def causal_lower_right(rows: int, columns: int) -> CausalBias:
    """The last row sees every column, each before it one less."""
    return _LowerRight(CausalVariant.LOWER_RIGHT, rows, columns)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer: query, key and value [B, heads, L, size] to [B, L, heads, size]."""
    plain = kwargs.get("position_bias") is None and not kwargs.get("dropout")
    if isinstance(attention_mask, SharedMask):
        if plain:
            rows = attention_mask.segments
            whole = attention_mask.ranks.around(lambda q, k, v: _shared(q, k, v, rows, scaling), query, key, value)
            return whole, None
        attention_mask = packing.dense(attention_mask.segments, query.shape[2]).to(query.device)
    if plain and query.shape[2] == 1 and query.shape[1] > key.shape[1]:
        rows, heads, _, size = query.shape
        folded = query.reshape(rows, key.shape[1], -1, size)  # [B, key heads, queries of a head, size]
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(rows, 1, heads, value.shape[-1]), None
    return sdpa_attention.sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _shared(query: Tensor, key: Tensor, value: Tensor, rows: list[packing.Segments], scaling: float | None) -> Tensor:
    """[B, heads, L, size] to [B, L, heads, size], row by row and segment by segment."""
    if query.shape[1] > key.shape[1] and not _reads_groups(query.device, query.dtype):
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] > key.shape[1]}
    width = query.shape[2]
    out: list[Tensor] = []
    for row, segments in enumerate(rows):
        q, k, v = (x[row : row + 1] for x in (query, key, value))  # [1, heads, L, size]
        pieces: list[Tensor] = []
        stop = 0
        for (_, length), seen in zip(segments, packing.spans(segments), strict=True):
            stop = seen[-1][1]
            keys, values = (_columns(x, seen) for x in (k, v))  # [1, key heads, what it sees, size]
            bias = causal_lower_right(length, keys.shape[2])
            pieces.append(scaled_dot_product_attention(q[:, :, stop - length : stop], keys, values, bias, **options))
        if stop < width:
            pieces.append(query.new_zeros(1, query.shape[1], width - stop, value.shape[3]))  # padding
        out.append(torch.cat(pieces, dim=2))
    return torch.cat(out).transpose(1, 2).contiguous()


def _reads_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel for a bias that ends at the lower right takes heads that share keys and values.

    torch's flash kernel does: half precision, from compute capability 8.0 on. Its memory-efficient one takes that bias
    with as many heads on either side, and is what is left else; without it all scores would be held.
    """
    if device.type != "cuda":
        return True
    return dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)


def _columns(of: Tensor, seen: list[tuple[int, int]]) -> Tensor:
    pieces = [of[:, :, begin:end] for begin, end in seen]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, masking_utils.sdpa_mask)
