"""Checks of the correct branch and of the pointwise clip, on the package's own `losses.Match`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from past_opsd.analysis.theory.check import Check, Pairs, compare, stream
from past_opsd.analysis.theory.finite import Floats, clipping_floor, kl, tv
from past_opsd.analysis.theory.process import Process, Shape, expected_reward, random_process
from past_opsd.analysis.theory.projection import processes
from past_opsd.analysis.theory.search import minimise
from past_opsd.core.losses import Match

TAUS = (0.005, 0.05, 0.5, 5.0)
EXAMPLE = ((0.9, 0.1), (0.001, 0.999), 0.05)
"""p, q and tau of the paper's counter-example."""


def match(p: Floats, q: Floats, tau: float = math.inf) -> float:
    """`losses.Match` at one position: the frozen view is p, the live view q."""
    return float(_on_logp(torch.tensor(np.log(p)), tau, torch.tensor(np.log(q))))


def _on_logp(frozen: Tensor, tau: float, live: Tensor) -> Tensor:
    return Match(tau)(live[None], frozen[None], torch.zeros(1, dtype=torch.long))[0]


def correct_branch(seed: int) -> Iterator[Check]:
    """prop:correct-fixed-point and [eq:correct-tv-bound]."""
    label = "prop:correct-fixed-point"
    bounds, at_student, found = Pairs(), Pairs(), Pairs()
    for process, _ in processes(seed, label):
        if expected_reward(process.student, process.verifier) == 0:
            continue
        loss, apart = correct_objective(process)
        if math.isfinite(loss):
            bounds.append((apart, math.sqrt(loss / 2)))
    rng = stream(seed, label, "search")
    for cell in random_process(rng, Shape(4, 2, 1)).cells():
        at_student.append((match(cell.student, cell.student), 0.0))
        objective = partial(_summed, torch.tensor(np.log(cell.student)))
        found.append((minimise(objective, rng.normal(size=(1, 4)))[0], cell.student))
    yield compare(label, "losses.Match at q = p", "=", at_student)
    yield compare(label, "a search with losses.Match ends at p", "=", found, exact=False)
    yield compare("eq:correct-tv-bound", "E[TV(p,q)|R=1] <= sqrt(L_+(q) / 2)", "<=", bounds)


def _summed(frozen: Tensor, live: Tensor) -> Tensor:
    return _on_logp(frozen, math.inf, live[0])


def correct_objective(process: Process) -> tuple[float, float]:
    """E[KL(p_k || q_U) | R = 1] and E[TV(p_k, q_U) | R = 1] over positions, prefixes and privileges."""
    mass = loss = apart = 0.0
    for cell in process.cells():
        joint = cell.mass * cell.weights * cell.success
        mass += joint.sum()
        loss += joint[joint > 0] @ kl(cell.student, cell.targets[joint > 0])
        apart += joint @ tv(cell.student, cell.targets)
    return float(loss / mass), float(apart / mass)


def safe_region(seed: int) -> Iterator[Check]:
    """[eq:clipping-safe-region]: inside it, on its edge, and one percent outside it."""
    label = "eq:clipping-safe-region"
    inside, outside, edge = Pairs(), Pairs(), Pairs()
    for tau in TAUS:
        for i in range(25):
            rng = stream(seed, label, f"{tau}", i)
            V = 2 + i % 5
            p = 0.9 * rng.dirichlet(np.ones(V)) + 0.1 / V
            floor, v = clipping_floor(p, tau), int(rng.integers(V))
            q = _above(floor, rng.dirichlet(np.ones(V)))
            inside.append((match(p, q, tau), kl(p, q)))
            # All but v stay inside.
            others = np.where(np.arange(V) == v, 0.0, rng.dirichlet(np.ones(V)))
            q = _above(floor, others / others.sum())
            edge.append((match(p, q, tau), kl(p, q)))
            lowered = np.where(np.arange(V) == v, 0.99, 1.0) * floor
            q = _above(lowered, others / others.sum())
            outside.append((kl(p, q) - match(p, q, tau), -p[v] * math.log(0.99)))
    yield compare(label, "inside, losses.Match clipped = KL", "=", inside)
    yield compare(label, "on the edge, losses.Match clipped = KL", "=", edge)
    yield compare(label, "1% outside, KL - clipped = p(v) log(1/0.99)", "=", outside)


def _above(floor: Floats, weights: Floats) -> Floats:
    """A distribution that exceeds `floor` by the mass that is left, spread by `weights`."""
    return floor + (1.0 - floor.sum()) * weights


def fixed_point_curvature(seed: int) -> Iterator[Check]:
    """Gradient and Hessian in the live logits at q = p: those of the KL, 0 and diag(p) - p p^T."""
    label = "eq:clipping-safe-region"
    gradients, hessians, closed = Pairs(), Pairs(), Pairs()
    for tau in TAUS:
        rng = stream(seed, label, "curvature", f"{tau}")
        p = rng.dirichlet(np.ones(5))
        clipped, exact = (_curvature(p, threshold) for threshold in (tau, math.inf))
        gradients.append((clipped[0], exact[0]))
        hessians.append((clipped[1], exact[1]))
        closed.append((clipped[1], np.diag(p) - np.outer(p, p)))
    yield compare(label, "at q = p, clipped and exact gradient", "=", gradients)
    yield compare(label, "at q = p, clipped and exact Hessian", "=", hessians)
    yield compare(label, "at q = p, clipped Hessian = diag(p) - p p'", "=", closed)


def _curvature(p: Floats, tau: float) -> tuple[np.ndarray, np.ndarray]:
    logits = torch.tensor(np.log(p), requires_grad=True)
    value = _on_logp(torch.tensor(np.log(p)), tau, torch.log_softmax(logits, dim=-1))
    (gradient,) = torch.autograd.grad(value, logits, create_graph=True)
    rows = [torch.autograd.grad(entry, logits, retain_graph=True)[0] for entry in gradient]
    return gradient.detach().numpy(), torch.stack(rows).numpy()


def counter_example(seed: int) -> Iterator[Check]:
    """The paper's example of a clipped sum below zero, to its three decimals; nothing is random here."""
    label = "eq:clipping-safe-region"
    p, q, tau = (np.array(EXAMPLE[0]), np.array(EXAMPLE[1]), EXAMPLE[2])
    yield compare(label, "p = (.9,.1), q = (.001,.999), 3 decimals: KL", "=", [(round(float(kl(p, q)), 3), 5.892)])
    yield compare(label, "the same clipped at tau = 0.05", "=", [(round(match(p, q, tau), 3), -0.180)])
