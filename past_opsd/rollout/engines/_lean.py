"""One decoding step of a plain decoder, written out.

Decoding a small model a token at a time is bound by the number of calls, not by their arithmetic. For the families
whose blocks are root-mean-square norms, rotary attention and a gated MLP, a step is a few tensor operations a layer on
the weights as `Model.sampling` folded them. Other networks, and weights that are not folded, run their own forward.
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
        """Whether the model is of such a family, with its adapter folded in."""
        plain = model.full_attention and model.choice.attention == "sdpa"
        return plain and model.folds and model.config.model_type in FAMILIES

    def __init__(self, model: Model):
        network = cast(Any, model.network)
        self._embedding = network.get_input_embeddings().weight
        self._rotary = network.model.rotary_emb
        self._norm = _norm(network.model.norm)
        self._head = network.get_output_embeddings()
        self._blocks = [_Block(layer) for layer in network.model.layers]

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
    def __init__(self, block: Any):
        attention, mlp = block.self_attn, block.mlp
        self._before, self._between = _norm(block.input_layernorm), _norm(block.post_attention_layernorm)
        self._q, self._k, self._v, self._o = (
            _linear(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        )
        self._gate, self._up, self._down = (_linear(p) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        named = dict(attention.named_children())
        self._norms = (_norm(named["q_norm"]), _norm(named["k_norm"])) if "q_norm" in named else None
        self._act, self._size, self._scale = mlp.act_fn, attention.head_dim, attention.scaling

    def step(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, layer: Buffers) -> Tensor:
        rows, size = len(hidden), self._size
        x = rms_norm(hidden, *self._before)
        q = linear(x, *self._q).view(rows, -1, size)
        k = linear(x, *self._k).view(rows, -1, size)
        v = linear(x, *self._v).view(rows, -1, 1, size)
        if self._norms is not None:
            q, k = rms_norm(q, *self._norms[0]), rms_norm(k, *self._norms[1])
        # Rotation by halves: the second factor's sign is in the sine.
        q = torch.addcmul(q * cos, q.roll(size // 2, -1), sin)
        k = torch.addcmul(k * cos, k.roll(size // 2, -1), sin)
        keys, values = layer.update(k[:, :, None], v)
        # Heads that share keys and values are several queries of one head.
        q = q.view(rows, k.shape[1], -1, size)
        read = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self._scale)
        hidden = hidden + linear(read.reshape(rows, -1), *self._o)
        x = rms_norm(hidden, *self._between)
        return hidden + linear(self._act(linear(x, *self._gate)) * linear(x, *self._up), *self._down)


def _linear(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    plain = cast(Any, module.base_layer if isinstance(module, LoraLayer) else module)
    return plain.weight, plain.bias


def _norm(module: Any) -> tuple[tuple[int, ...], Tensor, float]:
    return tuple(module.weight.shape), module.weight, module.variance_epsilon
