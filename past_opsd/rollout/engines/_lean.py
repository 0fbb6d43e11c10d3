"""One decoding step of a plain decoder, written out.

Decoding a small model a token at a time is bound by the number of calls, not by their arithmetic. For the families
whose blocks are root-mean-square norms, rotary attention and a gated MLP, a step is a few tensor operations a layer on
the network as `Model.sampling` lends it: with the adapter folded into its weights, or, in half precision, beside them,
in the same dtype as in training. Other networks run their own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from past_opsd.policy.model import Model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Buffers(Protocol):
    """A layer's keys and values."""

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Write one column and give all of the window."""
        ...


class Lean:
    """The network's step on its present weights; made anew for every adapter."""

    @staticmethod
    def applies(model: Model) -> bool:
        """Whether the model is of such a family, and on one device."""
        plain = model.full_attention and model.choice.attention == "sdpa" and model.config.model_type in FAMILIES
        return plain and len({parameter.device for parameter in model.network.parameters()}) == 1

    def __init__(self, model: Model):
        network = cast(Any, model.network)
        self._embedding = network.get_input_embeddings().weight
        self._rotary = network.model.rotary_emb
        self._norm = _norm(network.model.norm)
        self._head = network.get_output_embeddings()
        dtype = getattr(torch, model.lora_dtype)
        self._blocks = [_Block(layer, dtype) for layer in network.model.layers]

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor, layers: Sequence[Buffers]) -> Tensor:
        """The logits after one token a row, [rows, V]; mask [rows, columns] is 1 where a row has a token."""
        hidden = self._embedding[tokens]
        cos, sin = self._rotary(hidden, positions[:, None])
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        hole = None
        if not bool(mask.all()):
            hole = torch.zeros(mask.shape, dtype=hidden.dtype, device=mask.device)
            hole = hole.masked_fill_(mask == 0, -torch.inf)[:, None, None]
        for block, layer in zip(self._blocks, layers, strict=True):
            hidden = block.step(hidden, cos, sin, hole, layer)
        return linear(rms_norm(hidden, *self._norm), self._head.weight, self._head.bias).float()


class _Block:
    def __init__(self, block: Any, dtype: torch.dtype):
        attention, mlp = block.self_attn, block.mlp
        self._before, self._between = _norm(block.input_layernorm), _norm(block.post_attention_layernorm)
        self._qkv = _Projections([attention.q_proj, attention.k_proj, attention.v_proj], dtype)
        self._o, self._gates = (
            _Projections([attention.o_proj], dtype),
            _Projections([mlp.gate_proj, mlp.up_proj], dtype),
        )
        self._down = _Projections([mlp.down_proj], dtype)
        named = dict(attention.named_children())
        self._norms = (_norm(named["q_norm"]), _norm(named["k_norm"])) if "q_norm" in named else None
        self._act, self._size, self._scale = mlp.act_fn, attention.head_dim, attention.scaling

    def step(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, layer: Buffers) -> Tensor:
        rows, size = len(hidden), self._size
        x = rms_norm(hidden, *self._before)
        q, k, v = self._qkv(x)
        q, k, v = q.view(rows, -1, size), k.view(rows, -1, size), v.view(rows, -1, 1, size)
        if self._norms is not None:
            q, k = rms_norm(q, *self._norms[0]), rms_norm(k, *self._norms[1])
        # Rotation by halves: the second factor's sign is in the sine.
        q = torch.addcmul(q * cos, q.roll(size // 2, -1), sin)
        k = torch.addcmul(k * cos, k.roll(size // 2, -1), sin)
        keys, values = layer.update(k[:, :, None], v)
        # Heads that share keys and values are several queries of one head.
        q = q.view(rows, k.shape[1], -1, size)
        read = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self._scale)
        hidden = hidden + self._o(read.reshape(rows, -1))[0]
        gate, up = self._gates(rms_norm(hidden, *self._between))
        return hidden + self._down(self._act(gate) * up)[0]


class _Projections:
    """Projections of one input, x W^T + b, each with what its active adapter adds, (x A^T) B^T s.

    The first factors are one product for all of them. They are taken in the dtype in which the trainer multiplies them.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype):
        layers = [(m.base_layer, m) if isinstance(m, LoraLayer) else (m, None) for m in modules]
        self._weights: list[tuple[Tensor, Tensor | None]] = [
            (cast(Any, m).weight, cast(Any, m).bias) for m, _ in layers
        ]
        factors = [None if layer is None or layer.disable_adapters else _factors(layer, dtype) for _, layer in layers]
        firsts = [first for first, _ in filter(None, factors)]
        self._first = torch.cat(firsts) if firsts else None  # [sum of ranks, width of x]
        self._seconds = [None if pair is None else pair[1] for pair in factors]  # [rank, width of the output] each

    def __call__(self, x: Tensor) -> list[Tensor]:
        out = [linear(x, *weights) for weights in self._weights]
        if self._first is None:
            return out
        inner, start = linear(x.to(self._first.dtype), self._first), 0
        for i, second in enumerate(self._seconds):
            if second is not None:
                own = inner[:, start : (start := start + len(second))]
                out[i] = _add_product(out[i], own, second)
        return out


def _factors(layer: LoraLayer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A [rank, in] and s B^T [rank, out] of the active adapter."""
    (adapter,) = layer.active_adapters
    first, second = (cast(Tensor, factor[adapter].weight) for factor in (layer.lora_A, layer.lora_B))
    scale = cast(float, cast(Any, layer).scaling[adapter])
    return first.to(dtype), (second * scale).to(dtype).t()


def _add_product(to: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`to` + a b, rounded to its own dtype once."""
    return to.addmm_(a, b) if to.dtype == b.dtype else torch.addmm(to.to(b.dtype), a, b).to(to.dtype)


def _norm(module: Any) -> tuple[tuple[int, ...], Tensor, float]:
    return tuple(module.weight.shape), module.weight, module.variance_epsilon
