"""How a token is drawn, the same in every engine.

A request draws its own uniforms from its seed, one per token, and picks tokens by the inverse of the cumulative
distribution. So neither the rest of the batch nor the engine changes a sample, up to the rounding of its logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from past_opsd.core.config import Sampling


def uniforms_of(seed: int, count: int) -> np.ndarray:
    """A request's first uniforms; a longer call begins with those of a shorter one."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def choose(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability at the sampling temperature, before the support is cut."""
    if sampling.temperature == 0:
        logp = torch.log_softmax(logits, dim=-1)
        choice = logits.argmax(dim=-1)
        return choice, logp.gather(1, choice[:, None]).squeeze(1)
    logp = torch.log_softmax(logits / sampling.temperature, dim=-1)
    probs = cut(logp.double().exp(), sampling)
    cumulative = probs.cumsum(dim=-1)
    # side="right" never returns an entry of probability zero: it is the first whose cumulative mass exceeds u.
    choice = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    choice = choice.clamp(max=probs.shape[-1] - 1)
    return choice, logp.gather(1, choice[:, None]).squeeze(1)


def cut(probs: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top-k, top-p and min-p cut, in that order; the rest is renormalised by the caller."""
    if 0 < sampling.top_k < probs.shape[-1]:
        floor = probs.topk(sampling.top_k, dim=-1).values[:, -1:]
        probs = probs.where(probs >= floor, 0)
    if sampling.top_p < 1:
        probs = probs / probs.sum(-1, keepdim=True)
        values, order = _ranked(probs, int((probs > 0).sum(-1).max()) if sampling.top_k else probs.shape[-1])
        # An entry stays while the mass before it is still below top_p, so the largest always stays.
        outside = values.cumsum(-1) - values >= sampling.top_p
        probs = probs.masked_fill(torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, outside), 0)
    if sampling.min_p > 0:
        probs = probs.where(probs >= sampling.min_p * probs.max(-1, keepdim=True).values, 0)
    return probs


def _ranked(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and where they stand, equals by place: a stable sort without the rest."""
    if count < probs.shape[-1]:
        places = probs.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
        values, order = probs.gather(1, places).sort(dim=-1, descending=True, stable=True)
        return values, places.gather(1, order)
    return torch.sort(probs, dim=-1, descending=True, stable=True)
