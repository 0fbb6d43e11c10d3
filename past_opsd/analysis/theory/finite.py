"""Divergences and barycenters of finite distributions: float64, natural log, zeros welcome.

A distribution is an array whose last axis (or `axis`) is the vocabulary. Teachers that read different privilege
at one prefix are stacked as q [M, V], with `weights` [M] for P(U | H); without weights each counts the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from past_opsd.core.nouns import PastError

Floats = npt.NDArray[np.float64]

# Softmax of float32 logits over a large vocabulary sums to 1 within about 1e-5.
_MASS = 1e-4


def kl(p: npt.ArrayLike, q: npt.ArrayLike, axis: int = -1) -> Floats:
    """KL(p || q) along `axis`; infinite where p has mass and q has none. Rounding below 0 is cut off."""
    p, q = np.broadcast_arrays(distribution(p, "p", axis), distribution(q, "q", axis))
    terms = np.zeros(p.shape)
    shared = (p > 0) & (q > 0)
    terms[shared] = p[shared] * (np.log(p[shared]) - np.log(q[shared]))
    terms[(p > 0) & (q == 0)] = math.inf
    return np.maximum(terms.sum(axis), 0.0)


def tv(p: npt.ArrayLike, q: npt.ArrayLike, axis: int = -1) -> Floats:
    """Total variation, half the absolute difference: the largest difference of any event's probability."""
    return 0.5 * np.abs(distribution(p, "p", axis) - distribution(q, "q", axis)).sum(axis)


def js(p: npt.ArrayLike, q: npt.ArrayLike, axis: int = -1) -> Floats:
    """The Jensen-Shannon divergence with equal weights, between 0 and log 2."""
    p, q = np.broadcast_arrays(distribution(p, "p", axis), distribution(q, "q", axis))
    return 0.5 * _to_mixture(p, q).sum(axis) + 0.5 * _to_mixture(q, p).sum(axis)


def _to_mixture(p: Floats, q: Floats) -> Floats:
    """p log(p / ((p + q) / 2)) entry by entry, as p (log 2 - log(1 + q/p)): no mixture that could underflow."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_ratio = np.log(q) - np.log(p)
        terms = p * (math.log(2.0) - np.logaddexp(0.0, log_ratio))
    return np.where(p > 0, terms, 0.0)


def barycenter(q: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Floats:
    """[eq:causal-teacher-barycenter] q [M, V] -> E[q_U | H] [V], what forward-KL distillation can teach at most."""
    q = _teachers(q)
    return _weights(weights, len(q)) @ q


def geometric_barycenter(q: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Floats:
    """q [M, V] -> exp(E[log q_U | H]) normalised [V], the target of reverse KL: a zero of one teacher is a zero."""
    logs, _ = _mean_log(q, weights)
    return np.exp(logs)


def reverse_floor(q: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """The least mean KL(pi || q_U) over pi, attained at `geometric_barycenter`: -log sum_a exp(E[log q_U(a)])."""
    return _mean_log(q, weights)[1]


def _mean_log(q: npt.ArrayLike, weights: npt.ArrayLike | None) -> tuple[Floats, float]:
    q = _teachers(q)
    w = _weights(weights, len(q))
    with np.errstate(divide="ignore"):
        mean = (w[w > 0, None] * np.log(q[w > 0])).sum(0)
    top = mean.max()
    if top == -math.inf:
        raise PastError("the teachers share no action with mass, so no distribution has a finite mean reverse KL")
    log_mass = top + math.log(np.exp(mean - top).sum())
    return mean - log_mass, -log_mass


@dataclass(frozen=True, slots=True)
class Decomposition:
    """[eq:privilege-shift-decomposition] total = privileged + shift, in nats.

    `total` is E KL(q_U || p), `privileged` I(A;U|H), which no policy that sees only the prefix can follow, and
    `shift` KL(qbar || p), which it can.
    """

    total: float
    privileged: float
    shift: float

    @property
    def surviving(self) -> float:
        """[eq:surviving-shift-fraction] shift / total; nan when total is 0 or infinite."""
        return self.shift / self.total if self.total else math.nan


def decompose(q: npt.ArrayLike, p: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Decomposition:
    """Split the mean divergence of teachers q [M, V] from the student p [V]; each part is computed by itself."""
    q = _teachers(q)
    w = _weights(weights, len(q))
    q, w = q[w > 0], w[w > 0]
    # A subnormal mass can vanish from the mean of the rows and would then count as infinitely far from it.
    q = np.where(q < np.finfo(np.float64).tiny, 0.0, q)
    mean = barycenter(q, w)
    return Decomposition(float(w @ kl(q, p)), float(w @ kl(q, mean)), float(kl(mean, p)))


def value_shift(r: npt.ArrayLike, p: npt.ArrayLike, Q: npt.ArrayLike) -> Floats:
    """[eq:frozen-student-value-shift] sum_a (r(a) - p(a)) Q(a) along the last axis."""
    return ((distribution(r, "r") - distribution(p, "p")) * np.asarray(Q, dtype=np.float64)).sum(-1)


def clipping_floor(p: npt.ArrayLike, tau: float) -> Floats:
    """[eq:clipping-safe-region] p exp(-tau / p): where q is nowhere below it, the clipped loss is the KL itself."""
    if not tau > 0:
        raise PastError(f"clipping_floor: tau is {tau}; the safe region exists for tau > 0")
    p = distribution(p, "p")
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(p > 0, p * np.exp(-tau / p), 0.0)


def distribution(values: npt.ArrayLike, name: str, axis: int = -1) -> Floats:
    """`values` as float64, refused unless they are non-negative and sum to 1 along `axis`."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0 or array.shape[axis] == 0:
        raise PastError(f"{name}: expected probabilities along an axis, got the shape {array.shape}")
    if not (array >= 0).all():
        raise PastError(f"{name}: probabilities must not be negative or nan; give exp(log-probabilities), not logits")
    mass = array.sum(axis)
    if not (np.abs(mass - 1.0) <= _MASS).all():
        worst = float(np.ravel(mass)[np.abs(np.ravel(mass) - 1.0).argmax()])
        raise PastError(f"{name}: probabilities sum to {worst:.6g} along axis {axis}, not to 1; normalise them first")
    return array


def _teachers(q: npt.ArrayLike) -> Floats:
    array = distribution(q, "q")
    if array.ndim != 2:
        raise PastError(f"q: expected teachers [M, V], one row for each privilege, got the shape {array.shape}")
    return array


def _weights(weights: npt.ArrayLike | None, count: int) -> Floats:
    if weights is None:
        return np.full(count, 1.0 / count)
    array = np.asarray(weights, dtype=np.float64)
    if array.shape != (count,):
        raise PastError(f"weights: {count} teachers need weights of the shape ({count},), got {array.shape}")
    if not ((array >= 0).all() and 0 < array.sum() < math.inf):
        raise PastError("weights: they must be non-negative with a positive, finite sum")
    return array / array.sum()
