"""Checks of what transfers: the counter-example, value alignment, the outcome margin, compatibility, improvement."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from past_opsd.analysis.theory.check import Check, Pairs, Sides, compare, stream
from past_opsd.analysis.theory.finite import Floats, barycenter, decompose, kl, tv, value_shift
from past_opsd.analysis.theory.process import (
    Cell,
    Policy,
    Process,
    Shape,
    expected_reward,
    keep_correct,
    law,
    mix,
    occupancy,
    perfect_teacher,
    random_policy,
    random_process,
)
from past_opsd.analysis.theory.projection import at, mutual_information, processes

HORIZONS = range(2, 13)


def no_transfer(seed: int) -> Iterator[Check]:
    """prop:perfect-teacher-no-transfer for T = 2 .. 12; nothing is random here."""
    label = "prop:perfect-teacher-no-transfer"
    teacher, targets, information, surviving, student = Pairs(), Pairs(), Pairs(), Pairs(), Pairs()
    for T in HORIZONS:
        process = perfect_teacher(T)
        teacher.append((process.teacher_success(), 1.0))
        information.append((mutual_information(process), math.log(2.0)))
        student.append((expected_reward(process.student, process.verifier), 2.0 ** (1 - T)))
        for cell in process.cells():
            targets.append((cell.mean, cell.student))
            surviving.append((decompose(cell.targets, cell.student, cell.weights).surviving, 0.0))
    yield compare(label, "T = 2..12: teacher success", "=", teacher)
    yield compare(label, "T = 2..12: qbar = p at every prefix", "=", targets)
    yield compare(label, "T = 2..12: I(A;U|H) = log 2", "=", information)
    yield compare(label, "T = 2..12: surviving fraction of the shift", "=", surviving)
    for horizon, pair in zip(HORIZONS, student, strict=True):
        yield compare(label, f"T = {horizon}: student success 2^{1 - horizon}", "=", [pair])


def g(cell: Cell, r: Floats) -> float:
    """[eq:frozen-student-value-shift] at a prefix."""
    return float(value_shift(r, cell.student, cell.values))


def value_alignment(seed: int) -> Iterator[Check]:
    """[eq:value-survives-projection]: the projected teacher's shift is the mean of the teachers' shifts."""
    label = "prop:value-aligned-transfer"
    means = Pairs()
    for process, _ in processes(seed, label):
        for cell in process.cells():
            shifts = value_shift(cell.targets, cell.student, cell.values)
            means.append((g(cell, cell.mean), cell.weights @ shifts))
    yield compare(label, "g(qbar;H) = E[g(q_U;H)|H]", "=", means)


def branch_mean(cell: Cell, correct: bool) -> Floats | None:
    """qbar_+ or qbar_-; None where that outcome is impossible."""
    weights = cell.branch(correct)
    return None if weights is None else barycenter(cell.targets, weights)


def outcome_branches(seed: int) -> Iterator[Check]:
    """[eq:outcome-barycenter] [eq:outcome-value-decomposition] [eq:failure-tv-scaling]."""
    barycenters, values, scaled = Pairs(), Pairs(), Pairs()
    for process, _ in processes(seed, "outcome"):
        for cell in process.cells():
            plus, minus = branch_mean(cell, True), branch_mean(cell, False)
            if plus is not None and minus is not None:
                barycenters.append((cell.mean, (1 - cell.eta) * plus + cell.eta * minus))
                values.append((g(cell, cell.mean), (1 - cell.eta) * g(cell, plus) + cell.eta * g(cell, minus)))
        if np.isin(process.verifier, (0.0, 1.0)).all():
            for cell in keep_correct(process).cells():
                if (minus := branch_mean(cell, False)) is not None:
                    scaled.append((tv(cell.mean, cell.student), cell.eta * tv(minus, cell.student)))
    yield compare("eq:outcome-barycenter", "qbar = (1-eta) qbar_+ + eta qbar_-", "=", barycenters)
    yield compare("eq:outcome-value-decomposition", "g(qbar) = (1-eta) g(qbar_+) + eta g(qbar_-)", "=", values)
    yield compare("eq:failure-tv-scaling", "q_U = p where R = 1: TV(qbar,p) = eta TV(qbar_-,p)", "=", scaled)


def margin(cell: Cell, pi: Floats) -> float:
    """[eq:outcome-transfer-margin] the right-hand side, with [eq:transfer-margin-terms]; a zero branch adds nothing."""
    total = -math.sqrt(kl(cell.mean, pi) / 2)
    if (minus := branch_mean(cell, False)) is not None:
        total += cell.eta * g(cell, minus)
    return total - (1 - cell.eta) * math.sqrt(_delta_plus(cell) / 2)


def _delta_plus(cell: Cell) -> float:
    """E[KL(p_k || q_U) | H, R = 1]."""
    if (weights := cell.branch(True)) is None:
        return 0.0
    return float(weights[weights > 0] @ kl(cell.student, cell.targets[weights > 0]))


def outcome_margin(seed: int) -> Iterator[Check]:
    """cor:outcome-transfer-margin and the steps of its proof, over 120 processes with teachers near and far."""
    label = "cor:outcome-transfer-margin"
    bound, certified, tight, steps = Pairs(), Pairs(), Pairs(), Pairs()
    for i in range(120):
        rng = stream(seed, label, i)
        reach = (0.02, 0.1, 0.4, 0.9)[i % 4]
        process = random_process(rng, Shape(2 + i % 2, 3, 1, graded=i % 3 == 0, reach=reach))
        # Half of the processes with a binary verifier keep the student on correct responses, as the branch asks.
        if ideal := i % 3 > 0 and i % 2 > 0:
            process = keep_correct(process)
        policy = random_policy(rng, process)
        for cell in process.cells():
            pi = (1 - reach) * cell.mean + 0.1 * reach * cell.student + 0.9 * reach * at(policy, cell)
            sides = g(cell, pi), margin(cell, pi)
            (certified if sides[1] > 0 else bound).append(sides)
            if ideal:
                tight.append((g(cell, cell.mean), margin(cell, cell.mean)))
            steps.append((abs(g(cell, pi) - g(cell, cell.mean)), tv(pi, cell.mean)))
            steps.append((tv(pi, cell.mean), math.sqrt(kl(cell.mean, pi) / 2)))
            steps.extend(_correct_steps(cell))
    yield compare(label, "g(pi) >= eta gamma_- - (1-eta) sqrt(delta_+/2) - sqrt(delta_S/2)", ">=", bound)
    yield compare(label, "the same where the margin is positive", ">=", certified)
    yield compare(label, "tight: pi = qbar and q_U = p where R = 1", "=", tight)
    yield compare(label, "its steps: TV bounds g, convexity, Pinsker, Jensen", "<=", steps)


def _correct_steps(cell: Cell) -> Iterator[Sides]:
    if (weights := cell.branch(True)) is not None:
        plus = barycenter(cell.targets, weights)
        mean_tv = float(weights @ tv(cell.targets, cell.student))
        yield -g(cell, plus), tv(plus, cell.student)
        yield tv(plus, cell.student), mean_tv
        yield mean_tv, math.sqrt(_delta_plus(cell) / 2)


def compatibility(seed: int) -> Iterator[Check]:
    """[eq:compatibility-value-bound] and [eq:continuation-chain-rule-kl], for every prefix and every privilege."""
    label = "prop:continuation-compatibility"
    hybrid, bound, last, chain = Pairs(), Pairs(), Pairs(), Pairs()
    for process, _ in processes(seed, label, 8):
        for cell in process.cells():
            rewards, value = process.rewards(cell), cell.student @ cell.values
            for code, target in zip(cell.codes, cell.targets, strict=True):
                own, mixed = process.own_continuation(cell, code), process.hybrid_continuation(cell, code)
                apart = float(kl(own, mixed))
                hybrid.append((mixed @ rewards, value + g(cell, target)))
                # At the last position the two laws are one and the bound is an equation.
                sides = last if cell.t == process.horizon - 1 else bound
                sides.append((g(cell, target), own @ rewards - value - math.sqrt(apart / 2)))
                chain.append((apart, process.chained_kl(cell, code)))
    yield compare(label, "E_M[V] = v + g(q_U;H)", "=", hybrid)
    yield compare(label, "g(q_U;H) >= s_U - v - sqrt(KL(Q_U||M_U) / 2)", ">=", bound)
    yield compare(label, "tight at the last position: g(q_U;H) = s_U - v", "=", last)
    yield compare(label, "KL(Q_U||M_U) = E sum_{s>t} KL(q_U||p) at G_s", "=", chain)


def local_improvement(seed: int) -> Iterator[Check]:
    """[eq:local-policy-improvement]: J(pi_eps) is a polynomial in eps, so its derivative is found without a limit."""
    label = "prop:local-policy-improvement"
    complex_step, fitted, gains = Pairs(), Pairs(), Pairs()
    for process, rng in processes(seed, label, 24):
        policy = random_policy(rng, process)
        slope = occupancy_weighted_shift(process, policy)
        coefficients = _polynomial(process, policy)
        complex_step.append(((law(mix(process.student, policy, 1e-20j)) @ process.verifier).imag / 1e-20, slope))
        fitted.append((coefficients[1], slope))
        if slope > 0:
            gains.extend(_gains(process, policy, slope, coefficients))
    yield compare(label, "dJ/deps at 0 = sum_t E g(pi;H_t), complex step", "=", complex_step)
    yield compare(label, "the same by interpolating J at T + 1 points", "=", fitted)
    yield compare(label, "slope > 0, eps small: gain / (eps slope) >= 1/2", ">=", gains)


def occupancy_weighted_shift(process: Process, policy: Policy) -> float:
    """Sum over t of E g_k(policy; H_t) under the student's occupancy, unreachable prefixes included with mass 0."""
    steps = zip(occupancy(process.student), policy, process.student, process.values, strict=True)
    return float(sum(reached @ value_shift(r, p, Q) for reached, r, p, Q in steps))


def _polynomial(process: Process, policy: Policy) -> Floats:
    """The coefficients of J(pi_eps), lowest first, through T + 1 Chebyshev points of [-1, 1]."""
    points = np.cos(np.pi * (np.arange(process.horizon + 1) + 0.5) / (process.horizon + 1))
    rewards = [float(law(mix(process.student, policy, x)) @ process.verifier) for x in points]
    return np.asarray(np.linalg.solve(np.vander(points, increasing=True), rewards), dtype=np.float64)


def _gains(process: Process, policy: Policy, slope: float, coefficients: Floats) -> Iterator[Sides]:
    """(gain / (eps slope), 1/2) for eps up to half of slope / sum of the later coefficients."""
    start = expected_reward(process.student, process.verifier)
    largest = slope / (2 * max(np.abs(coefficients[2:]).sum(), slope))
    for epsilon in largest * np.array([1.0, 0.5, 0.1, 0.01]):
        gain = expected_reward(mix(process.student, policy, epsilon), process.verifier) - start
        yield gain / (epsilon * slope), 0.5
