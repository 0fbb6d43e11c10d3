"""Checks of the causal projection: what forward KL keeps of a privileged teacher, and what reverse KL would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from past_opsd.analysis.theory.check import Check, Pairs, compare, stream
from past_opsd.analysis.theory.finite import Floats, barycenter, decompose, geometric_barycenter, kl, reverse_floor, tv
from past_opsd.analysis.theory.process import Cell, Policy, Process, Shape, random_policy, random_process
from past_opsd.analysis.theory.search import golden, minimise
from past_opsd.core.losses import Loss, Match, Stay

SHAPES = (
    Shape(2, 4, 1),
    Shape(3, 3, 2),
    Shape(4, 2, 3, graded=True),
    Shape(3, 3, 1, stop=True),
    Shape(3, 3, 2, sparse=True),
    Shape(2, 5, 1, sparse=True, graded=True),
)


def processes(seed: int, name: str, count: int = 12) -> Iterator[tuple[Process, np.random.Generator]]:
    """Random processes of all shapes, each with a stream for what else a check draws."""
    for i in range(count):
        rng = stream(seed, name, i)
        yield random_process(rng, SHAPES[i % len(SHAPES)]), rng


def mean_over(process: Process, value: Callable[[Cell], float]) -> float:
    """E[value(H)] with the position drawn uniformly and the prefix from the student's rollouts."""
    return math.fsum(cell.mass * value(cell) for cell in process.cells()) / process.horizon


def at(policy: Policy, cell: Cell) -> Floats:
    """pi(. | H)."""
    return policy[cell.t][cell.h]


def to_policy(policy: Policy, cell: Cell) -> float:
    """E[KL(q_U || pi) | H]."""
    return float(cell.weights @ kl(cell.targets, at(policy, cell)))


def to_mean(cell: Cell) -> float:
    """E[KL(q_U || qbar) | H]."""
    return float(cell.weights @ kl(cell.targets, cell.mean))


def mean_to_policy(policy: Policy, cell: Cell) -> float:
    """KL(qbar || pi) at H."""
    return float(kl(cell.mean, at(policy, cell)))


def causal_projection(seed: int) -> Iterator[Check]:
    """[eq:projection-decomposition] and its minimiser, with random policies and with the package's own loss."""
    label = "prop:causal-projection"
    sums, least, unique = Pairs(), Pairs(), Pairs()
    for process, rng in processes(seed, label):
        floor = mean_over(process, to_mean)
        for _ in range(4):
            policy = random_policy(rng, process)
            total, rest = (mean_over(process, partial(part, policy)) for part in (to_policy, mean_to_policy))
            apart = mean_over(process, lambda cell, policy=policy: float(tv(cell.mean, at(policy, cell))))
            sums.append((total, floor + rest))
            least.append((total, floor))
            unique.append((total - floor, 2 * apart**2))
    yield compare(label, "E KL(q_U||pi) = E KL(q_U||qbar) + E KL(qbar||pi)", "=", sums)
    yield compare(label, "E KL(q_U||pi) >= E KL(q_U||qbar): qbar minimises", ">=", least)
    yield compare(label, "and alone does: excess >= 2 E[TV(qbar,pi)]^2", ">=", unique)
    found = _searched(seed, label, Match(), barycenter)
    yield compare(label, "a search with losses.Match ends at qbar", "=", found, exact=False)


def restricted_projection(seed: int) -> Iterator[Check]:
    """[eq:restricted-projection-excess] in two families that do not hold qbar: one slope, and one shared distribution.

    Both objectives are minimised separately, in the values and not through the identity.
    """
    label = "cor:restricted-causal-projection"
    for name, family, span in (("one slope", _sloped, 1), ("one row for all H", _tied, 0)):
        excess, minimisers, gaps = Pairs(), Pairs(), Pairs()
        for process, rng in processes(seed, f"{label}/{name}", 4):
            members = family(process, rng)
            risks = [_risk(process, members, projected) for projected in (False, True)]
            best = [_least(risk, process.vocabulary, span) for risk in risks]
            floors = [risk(theta) for risk, theta in zip(risks, best, strict=True)]
            for _ in range(4):
                theta = rng.normal(size=best[0].shape)
                left, right = (risk(theta) - floor for risk, floor in zip(risks, floors, strict=True))
                excess.append((left, right))
            left, right = (np.concatenate(members(theta)) for theta in best)
            minimisers.append((left, right))
            gaps.append((floors[1], 1e-6))
        yield compare(label, f"{name}: same excess to q_U and to qbar", "=", excess)
        yield compare(label, f"{name}: same minimiser", "=", minimisers, exact=False)
        yield compare(label, f"{name}: qbar is out of reach, least KL", ">=", gaps)


Family = Callable[[Floats], Policy]


def _sloped(process: Process, rng: np.random.Generator) -> Family:
    """pi_theta(. | H) = softmax(theta f(H, .)) with fixed features f."""
    features = [rng.normal(size=step.shape) for step in process.student]
    return lambda theta: tuple(_softmax(theta[0] * f) for f in features)


def _tied(process: Process, rng: np.random.Generator) -> Family:
    """The same distribution softmax(theta) at every prefix."""
    return lambda theta: tuple(np.broadcast_to(_softmax(theta), step.shape) for step in process.student)


def _risk(process: Process, members: Family, projected: bool) -> Callable[[Floats], float]:
    """theta -> E KL(q_U || pi_theta) or, `projected`, E KL(qbar || pi_theta)."""
    V, cells = process.vocabulary, list(process.cells())
    parts = [(cell.mean[None], np.ones(1)) if projected else (cell.targets, cell.weights) for cell in cells]
    targets = np.concatenate([q for q, _ in parts])
    weights = np.concatenate([cell.mass * w for cell, (_, w) in zip(cells, parts, strict=True)]) / process.horizon
    # Where prefix h of length t lies among all prefixes, shortest first.
    places = [sum(V**s for s in range(cell.t)) + cell.h for cell in cells]
    rows = np.repeat(places, [len(q) for q, _ in parts])
    return lambda theta: float(weights @ kl(targets, np.concatenate(members(theta))[rows]))


def _least(risk: Callable[[Floats], float], vocabulary: int, span: int) -> Floats:
    """The minimiser by golden-section search, one coordinate after the other until none moves."""
    theta = np.zeros(span or vocabulary)
    # The last logit of a shared distribution stays 0: softmax does not see a common shift.
    free = range(span or vocabulary - 1)
    for _ in range(60):
        before = theta.copy()
        for i in free:
            theta[i] = golden(lambda x, i=i: risk(np.where(np.arange(len(theta)) == i, x, theta)), -12.0, 12.0)
        if len(free) == 1 or np.abs(theta - before).max() < 1e-7:
            break
    return theta


def privilege_shift(seed: int) -> Iterator[Check]:
    """[eq:irreducible-privilege] [eq:privilege-shift-decomposition] [eq:surviving-shift-fraction]."""
    label = "cor:privilege-shift"
    information, sums, fractions, functions = Pairs(), Pairs(), Pairs(), Pairs()
    for process, _ in processes(seed, label):
        mutual = mutual_information(process)
        total = mean_over(process, partial(to_policy, process.student))
        shift = mean_over(process, partial(mean_to_policy, process.student))
        information.append((mean_over(process, to_mean), mutual))
        sums.append((total, mutual + shift))
        # The quotient by a divergence near zero would show rounding, not the identity.
        if total > 1e-3:
            fractions.append((shift / total, 1 - mutual / total))
        for cell in process.cells():
            parts = decompose(cell.targets, cell.student, cell.weights)
            functions.append((parts.total, parts.privileged + parts.shift))
    yield compare(label, "E KL(q_U||qbar) = I(A;U|H) from joint entropies", "=", information)
    yield compare(label, "E KL(q_U||p) = I(A;U|H) + E KL(qbar||p)", "=", sums)
    yield compare(label, "decompose: total = privileged + shift, each H", "=", functions)
    yield compare("eq:surviving-shift-fraction", "E KL(qbar||p) / E KL(q_U||p) = 1 - I / E KL(q_U||p)", "=", fractions)


def mutual_information(process: Process) -> float:
    """I(A;U|H) = H(A,H) + H(U,H) - H(A,U,H) - H(H) from the joint law alone; the position is part of H."""
    total = 0.0
    for cell in process.cells():
        mass = cell.mass / process.horizon
        joint = mass * cell.weights[:, None] * cell.targets
        total += _entropy(joint.sum(0)) + _entropy(joint.sum(1)) - _entropy(joint) - _entropy(joint.sum())
    return total


def _entropy(masses: np.ndarray | np.float64) -> float:
    masses = np.ravel(masses)
    masses = masses[masses > 0]
    return -float(masses @ np.log(masses))


def forward_and_reverse(seed: int) -> Iterator[Check]:
    """The two barycenters of the appendix, forward and reverse, each against a search with the package's loss."""
    label = "app:theory: forward and reverse"
    sums = Pairs()
    for process, rng in processes(seed, label, 4):
        policy = random_policy(rng, process)
        for cell in process.cells():
            pi, (q, weights) = at(policy, cell), _overlapping(cell)
            right = kl(pi, geometric_barycenter(q, weights)) + reverse_floor(q, weights)
            sums.append((weights @ kl(pi, q), right))
    sparse, dense = [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]], [[0.6, 0.4, 0.0], [0.2, 0.8, 0.0]]
    suppressed = [(geometric_barycenter(sparse), [0.0, 1.0, 0.0]), (geometric_barycenter(dense)[2], 0.0)]
    forward = _searched(seed, f"{label}/forward", Match(), barycenter)
    reverse = _searched(seed, f"{label}/reverse", Stay(), geometric_barycenter)
    yield compare(label, "argmin E KL(q_U||pi) = E[q_U|H], by search", "=", forward, exact=False)
    yield compare(label, "argmin E KL(pi||q_U) ~ exp E[log q_U|H], by search", "=", reverse, exact=False)
    yield compare(label, "E KL(pi||q_U) = KL(pi||argmin) - log norm", "=", sums)
    yield compare(label, "reverse: an action one teacher never takes is lost", "=", suppressed)


def _overlapping(cell: Cell) -> tuple[Floats, Floats]:
    """Targets with full support, as the reverse direction needs them."""
    return 0.9 * cell.targets + 0.1 / cell.targets.shape[-1], cell.weights


def _searched(
    seed: int, name: str, loss: Loss, closed: Callable[[Floats, Floats], Floats]
) -> Iterable[tuple[Floats, Floats]]:
    """(where the search ends, the closed form) over the prefixes of two processes with full support."""
    for i, shape in enumerate((Shape(2, 3, 2), Shape(4, 2, 1))):
        rng = stream(seed, name, "search", i)
        process = random_process(rng, shape)
        for cell in process.cells():
            q, weights = _overlapping(cell)
            objective = partial(_mean_loss, loss, torch.tensor(np.log(q)), torch.tensor(weights))
            found = minimise(objective, rng.normal(size=(1, q.shape[-1])))[0]
            yield found, closed(q, weights)


def _mean_loss(loss: Loss, frozen: Tensor, weights: Tensor, live: Tensor) -> Tensor:
    rows = loss(live.expand_as(frozen), frozen, torch.zeros(len(frozen), dtype=torch.long))
    return weights @ rows


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
