"""Token losses on log-probabilities, one per equation, and where their reduction is decided.

A loss is called as `loss(live_logp, frozen_logp, tokens)` with log-probabilities [T, V] (natural log) and
token ids [T]; it returns one value a row, unreduced. The gradient runs through `live_logp` alone. Here q is
the live distribution and p the frozen one.

For the losses of the hot path the gradient with respect to the live logits z (live_logp = log_softmax(z)) is
also written in closed form, in one of two shapes that `past_opsd.fused` knows how to run in place:

- an `Entrywise` loss is a sum over the vocabulary of entries c_v, each clipped from above at tau. With
  b_v = q_v dc_v/dq_v and m_v = 1[c_v < tau]:  d/dz_j = m_j b_j - q_j sum_v m_v b_v.
  Its `entries(q, p, log_ratio, c, b)` writes c and b into the buffers given; log_ratio is log p - log q, finite.
- a `TokenWise` loss is a function f of the token's log-probability:  d/dz_j = -f' (q_j - 1[j = token]).
  Its `slope(live, frozen)` gives f and f' at the token's two log-probabilities.

A probability of exactly 0 (log-probability -inf) on the weighting side of a divergence contributes 0 to the
value and to the gradient. On the other side the divergence is infinite, and it is reported as such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from past_opsd.lazy import Lazy
from past_opsd.types import PastError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Lazy("torch")

ClipMode = Literal["entry", "token"]
Reduction = Literal["sequence", "token"]


class Loss(Protocol):
    """What a loss is to everyone else; rows must not depend on each other."""

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Match:
    """[eq:pointwise-clipped-divergence] KL(frozen || live), clipped from above at `tau`.

    `mode="entry"` clips each vocabulary entry before the sum, as in the paper: a clipped entry has no gradient
    and the sum can be negative. `mode="token"` clips the sum of a position. `tau=inf` is the exact KL.
    Serves [eq:correct-teacher-loss] and [eq:student-projection-objective], the views swapped.
    """

    tau: float = math.inf
    mode: ClipMode = "entry"

    def __post_init__(self) -> None:
        _check_clip(self)

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        return _clipped_kl(_frozen(self, frozen_logp), live_logp, self.tau, self.mode)

    def entries(self, q: Tensor, p: Tensor, log_ratio: Tensor, c: Tensor, b: Tensor) -> None:
        """c = p (log p - log q), b = -p."""
        torch.mul(p, log_ratio, out=c)
        torch.neg(p, out=b)


@dataclass(frozen=True)
class Stay:
    """[eq:failed-path-kl] the exact KL(live || frozen), which is the reverse KL.

    The paper never clips it; a finite `tau` is the ablation "failed-path clipping" of tab:objective-ablation.
    """

    tau: float = math.inf
    mode: ClipMode = "entry"

    def __post_init__(self) -> None:
        _check_clip(self)

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        return _clipped_kl(live_logp, _frozen(self, frozen_logp), self.tau, self.mode)

    def entries(self, q: Tensor, p: Tensor, log_ratio: Tensor, c: Tensor, b: Tensor) -> None:
        """c = q (log q - log p), b = c + q."""
        torch.mul(q, log_ratio, out=c).neg_()
        torch.add(c, q, out=b)


ReverseKL = Stay


@dataclass(frozen=True)
class GeneralizedJSD:
    """beta KL(p || M) + (1 - beta) KL(q || M) with M = beta p + (1 - beta) q: beta sits on the frozen view.

    beta = 0 means KL(frozen || live) and beta = 1 KL(live || frozen), as in TRL and GKD; these are the
    limits of the JSD divided by beta and by 1 - beta, not the JSD itself, which vanishes at both ends.
    """

    beta: float = 0.5
    tau: float = math.inf
    mode: ClipMode = "entry"

    def __post_init__(self) -> None:
        _check_clip(self)
        if not 0 <= self.beta <= 1:
            raise PastError(f"GeneralizedJSD: beta is {self.beta}; it must lie in [0, 1] (0: Match, 1: Stay)")

    @property
    def _end(self) -> Match | Stay | None:
        if self.beta == 0:
            return Match(self.tau, self.mode)
        return Stay(self.tau, self.mode) if self.beta == 1 else None

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        if (end := self._end) is not None:
            return end(live_logp, frozen_logp, tokens)
        frozen_logp = _frozen(self, frozen_logp)
        p, q = frozen_logp.exp(), live_logp.exp()
        absent = (p == 0) & (q == 0)
        log_p, log_q = frozen_logp.masked_fill(absent, 0.0), live_logp.masked_fill(absent, 0.0)
        log_M = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        c = self.beta * p * (log_p - log_M).masked_fill(p == 0, 0.0)
        c = c + (1 - self.beta) * q * (log_q - log_M).masked_fill(q == 0, 0.0)
        if self.mode == "token":
            total = c.sum(-1)
            return total.masked_fill(total >= self.tau, self.tau)
        return c.masked_fill(c >= self.tau, self.tau).sum(-1)

    def entries(self, q: Tensor, p: Tensor, log_ratio: Tensor, c: Tensor, b: Tensor) -> None:
        """c = beta p log(p/M) + (1 - beta) q log(q/M), b = (1 - beta) q log(q/M)."""
        if (end := self._end) is not None:
            return end.entries(q, p, log_ratio, c, b)
        # log(M/q) = log(1 + beta (p/q - 1)); beyond e^80 the 1 is lost and the log-ratio adds linearly.
        torch.clamp(log_ratio, max=80.0, out=b).expm1_().mul_(self.beta).log1p_()
        b.add_(torch.clamp(log_ratio, min=80.0, out=c).sub_(80.0))
        torch.sub(log_ratio, b, out=c).mul_(p).mul_(self.beta)
        b.mul_(q).mul_(self.beta - 1)
        c.add_(b)
        return None


@dataclass(frozen=True)
class Reinforce:
    """[eq:grpo-objective] the clipped policy gradient of one token, -min(rho A, clip(rho, 1 +- epsilon) A).

    rho is the token's probability ratio live / frozen. Without a frozen view it is taken against the live
    view itself: rho is exactly 1, the value -A and the gradient that of -A log live(token).
    `advantage` is one number, or one a row ([T]) when several sequences are stacked.
    """

    advantage: float | Tensor
    epsilon: float = 0.2

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        live = at_tokens(live_logp, tokens)
        old = live if frozen_logp is None else at_tokens(frozen_logp, tokens)
        rho = torch.exp(live - old.detach())
        advantage = self._advantage(live)
        return -torch.minimum(rho * advantage, rho.clamp(1 - self.epsilon, 1 + self.epsilon) * advantage)

    def slope(self, live: Tensor, frozen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Value, and -rho A where the clip does not bind."""
        rho = torch.ones_like(live) if frozen is None else torch.exp(live - frozen)
        advantage = self._advantage(live)
        free, clipped = rho * advantage, rho.clamp(1 - self.epsilon, 1 + self.epsilon) * advantage
        return -torch.minimum(free, clipped), torch.where(free <= clipped, -free, 0.0)

    def _advantage(self, like: Tensor) -> Tensor:
        return torch.as_tensor(self.advantage, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class ModulatedReinforce:
    """The policy gradient with a frozen view that scales each token's advantage and never turns its sign.

    A_t = A ((1 - strength) + strength clip(w_t, 1 +- width)) with w_t = exp(sign(A) (log frozen(y) - log live(y)))
    held constant. The old policy is the live one, as in a `Reinforce` without a frozen view: the ratio is exactly 1.
    """

    advantage: float | Tensor
    strength: float = 0.5
    width: float = 0.2
    epsilon: float = 0.2

    def __post_init__(self) -> None:
        for name in ("strength", "width"):
            if not 0 <= getattr(self, name) <= 1:
                raise PastError(f"ModulatedReinforce: {name} is {getattr(self, name)}; it must lie in [0, 1]")

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        frozen = at_tokens(_frozen(self, frozen_logp), tokens)
        return self._scaled(at_tokens(live_logp, tokens).detach(), frozen)(live_logp, None, tokens)

    def slope(self, live: Tensor, frozen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Those of `Reinforce` at ratio 1 with the scaled advantage."""
        return self._scaled(live, _frozen(self, frozen)).slope(live, None)

    def _scaled(self, live: Tensor, frozen: Tensor) -> Reinforce:
        advantage = torch.as_tensor(self.advantage, dtype=live.dtype, device=live.device)
        w = torch.exp(advantage.sign() * (frozen - live)).clamp(1 - self.width, 1 + self.width)
        return Reinforce(advantage * (1 - self.strength + self.strength * w), self.epsilon)


@dataclass(frozen=True)
class Imitate:
    """The negative log-likelihood of the tokens; the frozen view is not read."""

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        return -at_tokens(live_logp, tokens)

    def slope(self, live: Tensor, frozen: Tensor | None) -> tuple[Tensor, Tensor]:
        """-log q(token) and -1."""
        return -live, torch.full_like(live, -1.0)


@dataclass(frozen=True)
class SampledToken:
    """KL(live || frozen) by its policy gradient on the sampled token alone.

    A = log frozen(y) - log live(y) is held constant and the loss is -A log live(y). Only the gradient,
    -A grad log live(y), means something: for y drawn from the live view its expectation is the gradient of
    KL(live || frozen). The value is no divergence and may be negative.
    """

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        live = at_tokens(live_logp, tokens)
        return (live.detach() - at_tokens(_frozen(self, frozen_logp), tokens)) * live

    def slope(self, live: Tensor, frozen: Tensor | None) -> tuple[Tensor, Tensor]:
        """-A log q(token) and -A."""
        minus_A = live - _frozen(self, frozen)
        return minus_A * live, minus_A


@dataclass(frozen=True)
class TopK:
    """KL(frozen || live) on the frozen view's `k` likeliest entries.

    `tail=False` renormalises both views over the k entries; `tail=True` keeps their masses and adds one entry
    that holds the rest of each. Entries, the tail included, are clipped at `tau`.
    """

    k: int
    tail: bool = False
    tau: float = math.inf

    def __post_init__(self) -> None:
        _check_tau(self, self.tau)
        if self.k < 1:
            raise PastError(f"TopK: k is {self.k}; it must be at least 1")

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        frozen_logp = _frozen(self, frozen_logp)
        k = min(self.k, frozen_logp.shape[-1])
        top = frozen_logp.topk(k, dim=-1).indices
        views = [frozen_logp.gather(-1, top), live_logp.gather(-1, top)]
        if not self.tail:
            views = [torch.log_softmax(view, dim=-1) for view in views]
        elif k < frozen_logp.shape[-1]:
            rest = [logp.scatter(-1, top, -math.inf).logsumexp(-1, keepdim=True) for logp in (frozen_logp, live_logp)]
            views = [torch.cat(pair, dim=-1) for pair in zip(views, rest, strict=True)]
        return _clipped_kl(views[0], views[1], self.tau, "entry")


@dataclass(frozen=True)
class MixedTopK:
    """(1 - reverse) KL(frozen || live) + reverse KL(live || frozen) on the frozen view's `k` likeliest entries.

    Both views are renormalised over these entries; nothing is clipped.
    """

    k: int
    reverse: float = 0.5

    def __post_init__(self) -> None:
        if self.k < 1:
            raise PastError(f"MixedTopK: k is {self.k}; it must be at least 1")
        if not 0 <= self.reverse <= 1:
            raise PastError(f"MixedTopK: reverse is {self.reverse}; it must lie in [0, 1]")

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        frozen_logp = _frozen(self, frozen_logp)
        top = frozen_logp.topk(min(self.k, frozen_logp.shape[-1]), dim=-1).indices
        p, q = (torch.log_softmax(view.gather(-1, top), dim=-1) for view in (frozen_logp, live_logp))
        forward, backward = _clipped_kl(p, q, math.inf, "entry"), _clipped_kl(q, p, math.inf, "entry")
        return (1 - self.reverse) * forward + self.reverse * backward


@dataclass(frozen=True)
class MatchPlusCE:
    """The ablation "KL + CE": Match plus `weight` times the negative log-likelihood of the token."""

    tau: float = math.inf
    weight: float = 1.0
    mode: ClipMode = "entry"

    @property
    def parts(self) -> tuple[tuple[float, Match | Imitate], ...]:
        """The same loss as (weight, loss) summands."""
        return (1.0, Match(self.tau, self.mode)), (self.weight, Imitate())

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        (_, match), (weight, imitate) = self.parts
        return match(live_logp, frozen_logp, tokens) + weight * imitate(live_logp, None, tokens)


Entrywise = Match | Stay | GeneralizedJSD
TokenWise = Reinforce | ModulatedReinforce | Imitate | SampledToken
Advantaged = Reinforce | ModulatedReinforce


def select(loss: Loss, rows: Tensor | slice) -> Loss:
    """The same loss for some of its rows: an advantage per row is taken along."""
    if isinstance(loss, Advantaged) and isinstance(loss.advantage, torch.Tensor) and loss.advantage.ndim:
        return replace(loss, advantage=loss.advantage[rows])
    return loss


def token_weights(lengths: Sequence[int], weights: Sequence[float], reduction: Reduction = "sequence") -> list[float]:
    """The weight of each token of sequence i, given sequence weights w_i and lengths T_i.

    "sequence": w_i / T_i, the paper's mean over a sequence's own tokens. "token": one mean over all tokens,
    w_i (sum_j w_j) / (sum_j w_j T_j), so that long sequences count for more, as upstream OPSD does.
    """
    if len(lengths) != len(weights):
        raise PastError(f"token_weights: {len(lengths)} lengths but {len(weights)} weights; give one weight a sequence")
    for i, length in enumerate(lengths):
        if length < 1:
            raise PastError(f"token_weights: sequence {i} has no tokens; drop empty sequences before the loss")
    if reduction == "sequence":
        return [weight / length for weight, length in zip(weights, lengths, strict=True)]
    if reduction != "token":
        raise PastError(f"token_weights: unknown reduction {reduction!r}; use 'sequence' or 'token'")
    total = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
    if total == 0:
        if any(weights):
            raise PastError("token_weights: the weighted token count is 0; 'token' reduction has no mean here")
        return [0.0] * len(lengths)
    return [weight * sum(weights) / total for weight in weights]


def at_tokens(logp: Tensor, tokens: Tensor) -> Tensor:
    """logp[t, tokens[t]]."""
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _clipped_kl(a_logp: Tensor, b_logp: Tensor, tau: float, mode: ClipMode) -> Tensor:
    """sum_v min(a_v log(a_v / b_v), tau), or the sum itself clipped."""
    a = a_logp.exp()
    ratio = (a_logp - b_logp).masked_fill(a == 0, 0.0)
    if tau == math.inf:
        return (a * ratio).sum(-1)
    # A clipped entry leaves the graph before the product: an infinite ratio times a zero gradient is NaN.
    with torch.no_grad():
        c = a * ratio
        clipped = c >= tau if mode == "entry" else (c.sum(-1, keepdim=True) >= tau).expand_as(c)
    c = a * ratio.masked_fill(clipped, 0.0)
    if mode == "entry":
        return c.masked_fill(clipped, tau).sum(-1)
    return c.sum(-1).masked_fill(clipped[..., 0], tau)


def _frozen(loss: object, frozen: Tensor | None) -> Tensor:
    if frozen is None:
        raise PastError(f"{type(loss).__name__} compares with a frozen view, and none was given")
    return frozen.detach()


def _check_clip(loss: Match | Stay | GeneralizedJSD) -> None:
    _check_tau(loss, loss.tau)
    if loss.mode not in ("entry", "token"):
        raise PastError(f"{type(loss).__name__}: unknown mode {loss.mode!r}; use 'entry' or 'token'")


def _check_tau(loss: object, tau: float) -> None:
    if not tau >= 0:
        raise PastError(f"{type(loss).__name__}: tau is {tau}; it must be 0 or more (inf: no clipping)")
