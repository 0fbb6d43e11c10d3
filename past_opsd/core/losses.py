"""Token losses on log-probabilities, one per equation, and where their reduction is decided.

A `Loss` is called as `loss(live_logp, frozen_logp, tokens)` with log-probabilities [T, V] (natural log) and token ids
[T]; it returns one value a position [T], unreduced. The gradient runs through `live_logp` alone. Here q is the live
distribution and p the frozen one. A loss of one's own is a subclass that writes `__call__`, or a plain function.

`add_gradient` makes the gradient with respect to the live logits z (live_logp = log_softmax(z)) on a `Block` of
positions, for `past_opsd.policy.fused`. Two kinds of losses have it in closed form and work in place:

- "entries" (`Divergence`): a sum over the vocabulary of entries c_v, each clipped from above at tau. With
  b_v = q_v dc_v/dq_v and m_v = 1[c_v < tau]:  d/dz_j = m_j b_j - q_j sum_v m_v b_v.
  Its `entries(q, p, log_ratio, c, b)` writes c and b into the buffers given; log_ratio is log p - log q, finite.
- "token" (`OnToken`): a function f of the token's log-probability:  d/dz_j = -f' (q_j - 1[j = token]).
  Its `slope(live, frozen)` gives f and f' at the token's two log-probabilities [T].
- "dense": anything else, by autograd through `__call__`.

Every loss gives the same `diagnostics`, written here densely and by definition; the closed forms give the same numbers.

A probability of exactly 0 (log-probability -inf) on the weighting side of a divergence contributes 0 to the
value and to the gradient. On the other side the divergence is infinite, and it is reported as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from past_opsd.core.lazy import Lazy
from past_opsd.core.nouns import PastError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Lazy("torch")

Kind = Literal["entries", "token", "dense"]
Reduction = Literal["sequence", "token"]


@dataclass
class Block:
    """What losses read of n positions, and buffers to work in: [n, V] where nothing else is said.

    `live` and `frozen` are the token's log-probabilities [n], `log_ratio` is log p - log q. `p`, `log_ratio` and
    `frozen` are None without a frozen view, `live_logp` where every loss has a closed form.
    """

    tokens: Tensor
    q: Tensor
    live: Tensor
    live_logp: Tensor | None
    p: Tensor | None
    log_ratio: Tensor | None
    frozen: Tensor | None
    buffers: tuple[Tensor, Tensor, Tensor]

    @cached_property
    def kl(self) -> Tensor:
        """KL(frozen || live) [n]."""
        assert self.p is not None
        assert self.log_ratio is not None
        return torch.mul(self.p, self.log_ratio, out=self.buffers[-1]).sum(-1)

    def alone(self) -> Block:
        """Without the frozen view."""
        return replace(self, p=None, log_ratio=None, frozen=None)


class Loss:
    """What a loss is to everyone else; positions must not depend on each other."""

    kind: ClassVar[Kind] = "dense"
    reads_frozen: ClassVar[bool] = True
    tau: float = math.inf

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        """One value a position."""
        raise NotImplementedError

    def diagnostics(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> dict[str, Tensor]:
        """Per position [T]: where a frozen view is read `kl`; `clipped` and `removed`, 0 for a loss without a clip.

        `kl` is the unclipped KL(frozen || live) over the full vocabulary, `clipped` the fraction of the loss's entries
        that its clip holds, and `removed` what the clip takes off its value.
        """
        found = self.clip(live_logp, frozen_logp, tokens)
        return found if frozen_logp is None else {"kl": _clipped_kl(frozen_logp, live_logp, math.inf), **found}

    def clip(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> dict[str, Tensor]:
        """`clipped` and `removed`."""
        return {name: live_logp.new_zeros(len(live_logp)) for name in ("clipped", "removed")}

    def add_gradient(self, block: Block, weight: Tensor, out: Tensor, found: dict[str, Tensor]) -> Tensor:
        """Add `weight` [n, 1] times the gradient with respect to the live logits to `out` [n, V]; return the values.

        Diagnostics go into those of `found`, which is empty where none are wanted.
        """
        assert block.live_logp is not None
        frozen_logp = None if block.log_ratio is None else block.live_logp + block.log_ratio
        with torch.enable_grad():
            live_logp = block.live_logp.detach().requires_grad_()
            value = self(live_logp, frozen_logp, block.tokens)
            (grad,) = torch.autograd.grad(value.sum(), live_logp)
        out.add_(grad.sub_(block.q * grad.sum(-1, keepdim=True)).mul_(weight))
        if found:
            kl = {"kl": block.kl} if "kl" in found else {}
            fill(found, self.clip(block.live_logp, frozen_logp, block.tokens) | kl)
        return value.detach()

    @property
    def key(self) -> str:
        """Losses of the same key are one loss, but for what `stack` puts side by side."""
        return repr(self)

    def stack(self, losses: Sequence[Loss], lengths: Tensor) -> Loss:
        """One loss for several sequences' positions, one after the other; `losses` have this one's key."""
        return self

    def at(self, positions: Tensor | slice) -> Loss:
        """The same loss for some of its positions."""
        return self

    @staticmethod
    def of(loss: Loss | Callable[..., Tensor]) -> Loss:
        """A loss as it is, a function as a loss."""
        return loss if isinstance(loss, Loss) else Function(loss)


@dataclass(frozen=True)
class Function(Loss):
    """Somebody's function (live_logp, frozen_logp, tokens) -> one value a position."""

    function: Callable[..., Tensor]

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        return self.function(live_logp, frozen_logp, tokens)


class Divergence(Loss):
    """A sum over the vocabulary of entries, each clipped from above at `tau`."""

    kind = "entries"
    own_kl: ClassVar[bool] = True
    """Whether the unclipped sum is itself the KL that is logged; else that is KL(frozen || live)."""

    def entries(self, q: Tensor, p: Tensor, log_ratio: Tensor, c: Tensor, b: Tensor) -> None:
        """Write the entries c and b = q dc/dq; all are [T, V]."""
        raise NotImplementedError

    def add_gradient(self, block: Block, weight: Tensor, out: Tensor, found: dict[str, Tensor]) -> Tensor:
        q, p, log_ratio, (c, b, work) = block.q, block.p, block.log_ratio, block.buffers
        assert p is not None
        assert log_ratio is not None
        self.entries(q, p, log_ratio, c, b)
        whole = value = c.sum(-1)
        # Written so that a NaN at one position does not keep the others from being clipped.
        cut = self.tau < math.inf and not bool(c.amax() < self.tau)
        clipped = torch.zeros_like(whole)
        if cut:
            value = c.clamp_(max=self.tau).sum(-1)
            clipped = (c.shape[-1] - c.lt_(self.tau).sum(-1)) / c.shape[-1]
            # c becomes the clipped gradient m b - q sum(m b), b the unclipped one; nothing clipped, they are the same.
            c.mul_(b).addcmul_(q, c.sum(-1, keepdim=True), value=-1)
        if found or not cut:
            b.addcmul_(q, b.sum(-1, keepdim=True), value=-1)
        out.addcmul_(c if cut else b, weight)
        if found:
            square = torch.mul(b, b, out=work).sum(-1)
            found["clipped"].copy_(clipped)
            found["removed"].copy_(whole - value)
            found["norm_unclipped"].copy_(square.sqrt())
            found["norm_clipped"].copy_((torch.mul(c, c, out=work).sum(-1) if cut else square).sqrt())
            found["dot"].copy_(torch.mul(b, c, out=work).sum(-1) if cut else square)
            found["kl"].copy_(whole if self.own_kl else block.kl)
        return value

    def diagnostics(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> dict[str, Tensor]:
        """Also the norms and the inner product `dot` of the logit gradients with and without the clip."""
        frozen_logp = _frozen(self, frozen_logp)
        q, p, log_ratio = live_logp.exp(), frozen_logp.exp(), (frozen_logp - live_logp).nan_to_num(nan=0.0)
        c, b = torch.empty_like(q), torch.empty_like(q)
        self.entries(q, p, log_ratio, c, b)
        keep = c < self.tau
        unclipped = b - q * b.sum(-1, keepdim=True)
        b *= keep
        clipped = b - q * b.sum(-1, keepdim=True)
        return {
            "kl": c.sum(-1) if self.own_kl else (p * log_ratio).sum(-1),
            "clipped": (~keep).sum(-1, dtype=q.dtype) / c.shape[-1],
            "removed": (c - self.tau).clamp(min=0).sum(-1),
            "dot": (clipped * unclipped).sum(-1),
            "norm_clipped": clipped.norm(dim=-1),
            "norm_unclipped": unclipped.norm(dim=-1),
        }


class OnToken(Loss):
    """A function of the token's log-probability under the live view, and under the frozen one where there is one."""

    kind = "token"

    def slope(self, live: Tensor, frozen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Value and derivative at the token's log-probabilities [T]."""
        raise NotImplementedError

    def removed(self, live: Tensor, frozen: Tensor | None) -> Tensor:
        """By how much a clip changes the value; where by nothing, it does not bind."""
        return torch.zeros_like(live)

    def add_gradient(self, block: Block, weight: Tensor, out: Tensor, found: dict[str, Tensor]) -> Tensor:
        value, slope = self.slope(block.live, block.frozen)
        slope = slope.unsqueeze(-1) * weight
        out.addcmul_(block.q, -slope).scatter_add_(1, block.tokens.unsqueeze(-1), slope)
        if found:
            removed = self.removed(block.live, block.frozen)
            found["clipped"].copy_(removed > 0)
            found["removed"].copy_(removed)
        if "kl" in found:
            found["kl"].copy_(block.kl)
        return value

    def clip(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> dict[str, Tensor]:
        frozen = None if frozen_logp is None else at_tokens(frozen_logp, tokens)
        removed = self.removed(at_tokens(live_logp, tokens), frozen)
        return {"clipped": (removed > 0).to(removed.dtype), "removed": removed}


@dataclass(frozen=True)
class Match(Divergence):
    """[eq:pointwise-clipped-divergence] KL(frozen || live), clipped from above at `tau`.

    Each vocabulary entry is clipped before the sum: a clipped entry has no gradient and the sum can be negative.
    `tau=inf` is the exact KL. Serves [eq:correct-teacher-loss] and, the views swapped,
    [eq:student-projection-objective].
    """

    tau: float = math.inf

    def __post_init__(self) -> None:
        _check_tau(self)

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        return _clipped_kl(_frozen(self, frozen_logp), live_logp, self.tau)

    def entries(self, q: Tensor, p: Tensor, log_ratio: Tensor, c: Tensor, b: Tensor) -> None:
        """c = p (log p - log q), b = -p."""
        torch.mul(p, log_ratio, out=c)
        torch.neg(p, out=b)


@dataclass(frozen=True)
class Stay(Divergence):
    """[eq:failed-path-kl] the exact KL(live || frozen), which is the reverse KL.

    The paper never clips it; a finite `tau` is the ablation "failed-path clipping" of tab:objective-ablation.
    """

    tau: float = math.inf

    def __post_init__(self) -> None:
        _check_tau(self)

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        return _clipped_kl(live_logp, _frozen(self, frozen_logp), self.tau)

    def entries(self, q: Tensor, p: Tensor, log_ratio: Tensor, c: Tensor, b: Tensor) -> None:
        """c = q (log q - log p), b = c + q."""
        torch.mul(q, log_ratio, out=c).neg_()
        torch.add(c, q, out=b)


@dataclass(frozen=True)
class GeneralizedJSD(Divergence):
    """beta KL(p || M) + (1 - beta) KL(q || M) with M = beta p + (1 - beta) q: beta sits on the frozen view.

    beta = 0 means KL(frozen || live) and beta = 1 KL(live || frozen), as in TRL and GKD; these are the
    limits of the JSD divided by beta and by 1 - beta, not the JSD itself, which vanishes at both ends.
    """

    own_kl = False

    beta: float = 0.5
    tau: float = math.inf

    def __post_init__(self) -> None:
        _check_tau(self)
        if not 0 <= self.beta <= 1:
            raise PastError(f"GeneralizedJSD: beta is {self.beta}; it must lie in [0, 1] (0: Match, 1: Stay)")

    @property
    def _end(self) -> Match | Stay | None:
        if self.beta == 0:
            return Match(self.tau)
        return Stay(self.tau) if self.beta == 1 else None

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
class Advantaged(OnToken):
    """A policy gradient: `advantage` is one number, or one a position [T] when several sequences are stacked."""

    advantage: float | Tensor

    @property
    def key(self) -> str:
        return repr(replace(self, advantage=0.0))

    def stack(self, losses: Sequence[Loss], lengths: Tensor) -> Loss:
        advantages = [float(loss.advantage) for loss in losses if isinstance(loss, Advantaged)]
        return replace(self, advantage=torch.tensor(advantages, device=lengths.device).repeat_interleave(lengths))

    def at(self, positions: Tensor | slice) -> Loss:
        if isinstance(self.advantage, torch.Tensor) and self.advantage.ndim:
            return replace(self, advantage=self.advantage[positions])
        return self

    def _advantage(self, like: Tensor) -> Tensor:
        return torch.as_tensor(self.advantage, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class Reinforce(Advantaged):
    """[eq:grpo-objective] the clipped policy gradient of one token, -min(rho A, clip(rho, 1 +- epsilon) A).

    rho is the token's probability ratio live / frozen. Without a frozen view it is taken against the live
    view itself: rho is exactly 1, the value -A and the gradient that of -A log live(token); nothing is clipped.
    """

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

    def removed(self, live: Tensor, frozen: Tensor | None) -> Tensor:
        rho = torch.ones_like(live) if frozen is None else torch.exp(live - frozen)
        advantage = self._advantage(live)
        return (rho * advantage - rho.clamp(1 - self.epsilon, 1 + self.epsilon) * advantage).clamp(min=0.0)


@dataclass(frozen=True)
class ModulatedReinforce(Advantaged):
    """The policy gradient with a frozen view that scales each token's advantage and never turns its sign.

    A_t = A ((1 - strength) + strength clip(w_t, 1 +- width)) with w_t = exp(sign(A) (log frozen(y) - log live(y)))
    held constant. The old policy is the live one, as in a `Reinforce` without a frozen view: the ratio is exactly 1.
    """

    strength: float = 0.5
    width: float = 0.2

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
        advantage = self._advantage(live)
        w = torch.exp(advantage.sign() * (frozen - live)).clamp(1 - self.width, 1 + self.width)
        return Reinforce(advantage * (1 - self.strength + self.strength * w))

    def removed(self, live: Tensor, frozen: Tensor | None) -> Tensor:
        advantage = self._advantage(live)
        w = torch.exp((advantage.sign() * (_frozen(self, frozen) - live)).clamp(max=80.0))  # finite
        return advantage.abs() * self.strength * (w - w.clamp(1 - self.width, 1 + self.width)).abs()


@dataclass(frozen=True)
class Imitate(OnToken):
    """The negative log-likelihood of the tokens; the frozen view is not read."""

    reads_frozen = False

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        return -at_tokens(live_logp, tokens)

    def slope(self, live: Tensor, frozen: Tensor | None) -> tuple[Tensor, Tensor]:
        """-log q(token) and -1."""
        return -live, torch.full_like(live, -1.0)


@dataclass(frozen=True)
class SampledStay(OnToken):
    """KL(live || frozen) from one token y that was drawn from the live view: its log-ratio and its policy gradient.

    The value is log live(y) - log frozen(y), the gradient that times grad log live(y). Over y drawn from the live view
    their expectations are KL(live || frozen) and its gradient; where the views agree both are exactly 0.
    """

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        live = at_tokens(live_logp, tokens)
        value = live.detach() - at_tokens(_frozen(self, frozen_logp), tokens)
        return value * (1 + live - live.detach())

    def slope(self, live: Tensor, frozen: Tensor | None) -> tuple[Tensor, Tensor]:
        """log q(token) - log p(token), twice."""
        value = live - _frozen(self, frozen)
        return value, value


@dataclass(frozen=True)
class SampledMatch(OnToken):
    """KL(frozen || live) from one token y that was drawn from the frozen view: r - 1 - log r, r = live(y) / frozen(y).

    Over y drawn from the frozen view the expectations of value and gradient are KL(frozen || live) and its gradient.
    -log live(y) has the same expected gradient, but where the views agree this one is exactly 0 for every token, so
    that they stay there whichever tokens are kept.
    """

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        log_r = at_tokens(live_logp, tokens) - at_tokens(_frozen(self, frozen_logp), tokens)
        return torch.expm1(log_r) - log_r

    def slope(self, live: Tensor, frozen: Tensor | None) -> tuple[Tensor, Tensor]:
        """r - 1 - log r and r - 1."""
        log_r = live - _frozen(self, frozen)
        slope = torch.expm1(log_r)
        return slope - log_r, slope


@dataclass(frozen=True)
class TopK(Loss):
    """KL(frozen || live) on the frozen view's `k` likeliest entries.

    `tail=False` renormalises both views over the k entries; `tail=True` keeps their masses and adds one entry
    that holds the rest of each. Entries, the tail included, are clipped at `tau`.
    """

    k: int
    tail: bool = False
    tau: float = math.inf

    def __post_init__(self) -> None:
        _check_tau(self)
        if self.k < 1:
            raise PastError(f"TopK: k is {self.k}; it must be at least 1")

    def __call__(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> Tensor:
        p, q = self._views(live_logp, _frozen(self, frozen_logp))
        return _clipped_kl(p, q, self.tau)

    def clip(self, live_logp: Tensor, frozen_logp: Tensor | None, tokens: Tensor) -> dict[str, Tensor]:
        if self.tau == math.inf:
            return super().clip(live_logp, frozen_logp, tokens)
        p, q = self._views(live_logp, _frozen(self, frozen_logp))  # [T, k], or [T, k + 1]
        c = p.exp() * (p - q).masked_fill(p == -math.inf, 0.0)
        return {
            "clipped": (c >= self.tau).to(c.dtype).mean(-1),
            "removed": (c - self.tau).clamp(min=0).sum(-1),
        }

    def _views(self, live_logp: Tensor, frozen_logp: Tensor) -> list[Tensor]:
        """Frozen and live log-probabilities of the entries kept."""
        k = min(self.k, frozen_logp.shape[-1])
        top = frozen_logp.topk(k, dim=-1).indices
        views = [frozen_logp.gather(-1, top), live_logp.gather(-1, top)]
        if not self.tail:
            return [torch.log_softmax(view, dim=-1) for view in views]
        if k < frozen_logp.shape[-1]:
            rest = [logp.scatter(-1, top, -math.inf).logsumexp(-1, keepdim=True) for logp in (frozen_logp, live_logp)]
            return [torch.cat(pair, dim=-1) for pair in zip(views, rest, strict=True)]
        return views


@dataclass(frozen=True)
class MixedTopK(Loss):
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
        forward, backward = _clipped_kl(p, q, math.inf), _clipped_kl(q, p, math.inf)
        return (1 - self.reverse) * forward + self.reverse * backward


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


def fill(found: dict[str, Tensor], numbers: Mapping[str, Tensor]) -> None:
    """Copy the diagnostics asked for."""
    for name, row in found.items():
        row.copy_(numbers[name])


def _clipped_kl(a_logp: Tensor, b_logp: Tensor, tau: float) -> Tensor:
    """sum_v min(a_v log(a_v / b_v), tau)."""
    a = a_logp.exp()
    ratio = (a_logp - b_logp).masked_fill(a == 0, 0.0)
    if tau == math.inf:
        return (a * ratio).sum(-1)
    # A clipped entry leaves the graph before the product: an infinite ratio times a zero gradient is NaN.
    with torch.no_grad():
        clipped = a * ratio >= tau
    return (a * ratio.masked_fill(clipped, 0.0)).masked_fill(clipped, tau).sum(-1)


def _frozen(loss: object, frozen: Tensor | None) -> Tensor:
    if frozen is None:
        raise PastError(f"{type(loss).__name__} compares with a frozen view, and none was given")
    return frozen.detach()


def _check_tau(loss: Loss) -> None:
    if not loss.tau >= 0:
        raise PastError(f"{type(loss).__name__}: tau is {loss.tau}; it must be 0 or more (inf: no clipping)")
