"""The recipe's objectives once more, by their definitions and plain autograd, against what the learner computes.

Nothing here goes through `fused.py`, the closed forms of `losses.py`, packing or micro-batches: a term is read alone,
its logits are dense, its temperature, clip, advantage, weight and forks are applied as the equations write them. A loss
that has no second writing here, somebody's own for one, is compared with autograd through its own value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from past_opsd.core.losses import GeneralizedJSD, Imitate, Loss, Match, ModulatedReinforce, Reinforce, Stay, TopK
from past_opsd.core.nouns import Adapter, Term, View
from past_opsd.policy import fused
from past_opsd.policy.model import Model

Value = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Live and frozen log-probabilities [T, V] and tokens [T] to one value a position."""


def definition(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:
    """The loss as its equation writes it; without a frozen view the live one before the step stands in its place."""
    written = _WRITTEN.get(type(loss))
    if written is None:
        return loss
    value = written(loss)
    return lambda live, frozen, tokens: value(live, live.detach() if frozen is None else frozen, tokens)


def _at(logp: Tensor, tokens: Tensor) -> Tensor:
    return logp[torch.arange(len(tokens), device=logp.device), tokens]


def _clip(entries: Tensor, tau: float) -> Tensor:
    return torch.where(entries < tau, entries, torch.full_like(entries, tau)).sum(-1)


def _match(loss: Match) -> Value:
    return lambda live, frozen, tokens: _clip(frozen.exp() * (frozen - live), loss.tau)


def _stay(loss: Stay) -> Value:
    return lambda live, frozen, tokens: _clip(live.exp() * (live - frozen), loss.tau)


def _jsd(loss: GeneralizedJSD) -> Value:
    def value(live: Tensor, frozen: Tensor, tokens: Tensor) -> Tensor:
        p, q = frozen.exp(), live.exp()
        mixture = (loss.beta * p + (1 - loss.beta) * q).log()
        return _clip(loss.beta * p * (frozen - mixture) + (1 - loss.beta) * q * (live - mixture), loss.tau)

    if loss.beta in (0, 1):
        return _stay(Stay(loss.tau)) if loss.beta else _match(Match(loss.tau))
    return value


def _reinforce(loss: Reinforce) -> Value:
    def value(live: Tensor, frozen: Tensor, tokens: Tensor) -> Tensor:
        ratio = (_at(live, tokens) - _at(frozen, tokens)).exp()
        bounded = ratio.clamp(1 - loss.epsilon, 1 + loss.epsilon)
        return -torch.minimum(ratio * float(loss.advantage), bounded * float(loss.advantage))

    return value


def _modulated(loss: ModulatedReinforce) -> Value:
    def value(live: Tensor, frozen: Tensor, tokens: Tensor) -> Tensor:
        own, advantage = _at(live, tokens), float(loss.advantage)
        towards = (_at(frozen, tokens) - own.detach()) * math.copysign(1.0, advantage)
        scale = 1 - loss.strength + loss.strength * towards.exp().clamp(1 - loss.width, 1 + loss.width)
        return -advantage * scale * (own - own.detach()).exp()

    return value


def _imitate(loss: Imitate) -> Value:
    return lambda live, frozen, tokens: -_at(live, tokens)


_WRITTEN: dict[type, Callable[..., Value]] = {
    Match: _match,
    Stay: _stay,
    GeneralizedJSD: _jsd,
    Reinforce: _reinforce,
    ModulatedReinforce: _modulated,
    Imitate: _imitate,
}


_CLIPPED = (Match, Stay, GeneralizedJSD, TopK)


def gradient(model: Model, phase: Adapter, terms: Sequence[Term], reduction: str) -> tuple[float, Tensor]:
    """The sum of the terms, and its gradient as one vector, term by term."""
    weights = _weights(terms, reduction)
    parameters = list(model.parameters(phase).values())
    total = 0.0
    try:
        with model.training(phase):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            for term, weight in zip(terms, weights, strict=True):
                summed = weight * _values(model, term).sum()
                total += float(summed.detach())
                summed.backward()
        return total, torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).clone()
    finally:
        for parameter in parameters:
            parameter.grad = None


def imitation(term: Term) -> Term:
    """-log live(token) along a term's path, at its temperature."""
    return replace(term, name="imitation", frozen=None, loss=Imitate(), weight=1.0, forks=None)


def _weights(terms: Sequence[Term], reduction: str) -> list[float]:
    """Of each token of a term: its weight over its length, or over the weighted mean length of its name's terms."""
    if reduction == "sequence":
        return [term.weight / len(term.tokens) for term in terms]
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for term in terms:
        sums[term.name][0] += term.weight
        sums[term.name][1] += term.weight * len(term.tokens)
    return [term.weight * sums[term.name][0] / sums[term.name][1] if term.weight else 0.0 for term in terms]


def _values(model: Model, term: Term) -> Tensor:
    """The term's summands [T], forks weighed."""
    with torch.no_grad():
        frozen = None if term.frozen is None else _logp(model, term.frozen, term)
    live = _logp(model, term.live, term)
    tokens = torch.tensor(term.tokens, device=live.device)
    values = definition(term.loss)(live, frozen, tokens)
    if term.forks is not None:
        entropy = -(live.detach().exp() * live.detach()).sum(-1)
        count = math.ceil(round(term.forks.share * len(tokens), 9))
        chosen = sorted(range(len(tokens)), key=lambda t: (-float(entropy[t]), t))[:count]
        values = values * torch.ones_like(entropy).index_fill(
            0, torch.tensor(chosen, device=live.device), term.forks.weight
        )
    return values


def _logp(model: Model, view: View, term: Term) -> Tensor:
    """log view(. | prompt, y_<t) at the term's temperature, float32 [T, V]."""
    network = model.expert if view.adapter == "expert" and model.expert is not None else model
    return _softmax(
        fused.project(model.hidden([(view, term.tokens)]), network.head, network.head_bias), term.temperature
    )


def _softmax(logits: Tensor, temperature: float) -> Tensor:
    """Logits, in the head's dtype: an entry that stands at the clip must not fall on both sides of it by rounding."""
    return torch.log_softmax(logits.float() / temperature, -1)


@dataclass(frozen=True)
class Size:
    """Of made hidden states and the head they are read with."""

    hidden: int
    vocab: int
    dtype: torch.dtype
    device: torch.device


def made(
    implementation: fused.Implementation,
    losses: Sequence[tuple[Callable[..., Tensor], bool, float]],
    size: Size,
    seed: int,
) -> tuple[float, float]:
    """Losses, each with whether it reads a frozen view and its temperature, on made hidden states of a model's shape.

    The two views are far enough apart that every clip binds. Returns the largest error of a mean value, beside 1 or the
    value where that is larger, and the smallest cosine of a gradient.
    """
    error, cosine = 0.0, 1.0
    states = cache(partial(_states, size, seed))
    for loss, reads, temperature in losses:
        settled = Loss.of(loss)
        for distance in (0.3, 1.0, 3.0, 10.0):
            live, frozen, head, tokens = states(distance)
            weight = torch.full((len(tokens),), 1 / len(tokens), device=live.device)
            job = fused.Job(settled, weight, frozen=reads)
            found = fused.run(
                implementation, live, frozen if reads else None, head, None, tokens, [job], temperature=temperature
            )
            want, slope, binds = _dense(loss, live, frozen if reads else None, head, tokens, temperature)
            value = float(found.values[0].double().mean())
            error = max(error, _worse(abs(value - want) / max(1.0, abs(want))))
            cosine = min(cosine, alike(found.grad, slope))
            if binds or settled.tau == math.inf:
                break
    return error, cosine


def _states(size: Size, seed: int, distance: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    live = torch.randn(8, size.hidden, generator=draw)
    frozen = live + distance * torch.randn(8, size.hidden, generator=draw)
    head = torch.randn(size.vocab, size.hidden, generator=draw).mul_(4 * size.hidden**-0.5)
    tokens = torch.randint(size.vocab, (8,), generator=draw).to(size.device)
    live, frozen, head = (x.to(size.device, size.dtype) for x in (live, frozen, head))
    return live, frozen, head, tokens


def _dense(
    loss: Callable[..., Tensor],
    live: Tensor,
    frozen: Tensor | None,
    head: Tensor,
    tokens: Tensor,
    temperature: float,
) -> tuple[float, Tensor, bool]:
    """The mean of the loss, its gradient, and whether its clip changed it."""
    states = live.float().requires_grad_()
    q = _softmax(fused.project(states, head, None), temperature)
    p = None if frozen is None else _softmax(fused.project(frozen, head, None), temperature)
    value = definition(loss)(q, p, tokens).mean()
    (slope,) = torch.autograd.grad(value, states)
    free: Any = replace(loss, tau=math.inf) if isinstance(loss, _CLIPPED) else loss
    unbounded = definition(free)(q.detach(), p, tokens).mean()
    return float(value.detach()), slope, float(unbounded) != float(value.detach())


def _worse(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def alike(a: Tensor, b: Tensor) -> float:
    """The cosine of two gradients as vectors; -1 where one is no number, 1 where both are exactly 0."""
    a, b = a.double().flatten(), b.double().flatten()
    if not bool(a.isfinite().all() and b.isfinite().all()):
        return -1.0
    if not bool(a.any() or b.any()):
        return 1.0
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
