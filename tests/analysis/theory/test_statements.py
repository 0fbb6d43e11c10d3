"""The propositions and inequalities over random processes, computed here from the cells and not by the checks."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from past_opsd.analysis.theory import barycenter, decompose, kl, perfect_teacher, tv, value_shift
from past_opsd.analysis.theory.adaptive import FAILED, expectation, first_stage, paths, samples, skipped, successes
from past_opsd.analysis.theory.clipping import correct_objective
from past_opsd.analysis.theory.process import Shape, expected_reward, keep_correct, mix, random_policy, random_process
from past_opsd.analysis.theory.projection import mean_over, mutual_information
from past_opsd.analysis.theory.search import golden, minimise
from past_opsd.analysis.theory.transfer import margin, occupancy_weighted_shift
from past_opsd.core.sampler import adaptive, expected_first_stage, expected_samples, fixed, skip_probability

property_test = settings(deadline=None, derandomize=True, max_examples=40)
CLOSE = {"rel_tol": 1e-11, "abs_tol": 1e-11}
SHAPES = st.builds(
    Shape,
    vocabulary=st.integers(2, 3),
    horizon=st.integers(1, 3),
    notes=st.integers(1, 2),
    sparse=st.booleans(),
    stop=st.booleans(),
    graded=st.booleans(),
    reach=st.sampled_from([0.02, 0.3, 1.0]),
)


@st.composite
def problems(draw, **fixed):
    """A process and a prefix-only policy."""
    shape = draw(SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    process = random_process(rng, Shape(**{name: getattr(shape, name) for name in Shape.__slots__} | fixed))
    return process, random_policy(rng, process)


@property_test
@given(problems())
def test_projection_decomposition(problem):
    process, policy = problem
    for cell in process.cells():
        pi, mean = policy[cell.t][cell.h], cell.weights @ cell.targets
        left = cell.weights @ kl(cell.targets, pi)
        assert math.isclose(left, cell.weights @ kl(cell.targets, mean) + kl(mean, pi), **CLOSE)


@property_test
@given(problems())
def test_the_mutual_information_is_what_the_prefix_cannot_follow(problem):
    process, _ = problem
    parts = [(cell.mass, decompose(cell.targets, cell.student, cell.weights)) for cell in process.cells()]
    mean = lambda name: math.fsum(mass * getattr(p, name) for mass, p in parts) / process.horizon  # noqa: E731
    assert math.isclose(mutual_information(process), mean("privileged"), **CLOSE)
    assert math.isclose(mean("total"), mutual_information(process) + mean("shift"), **CLOSE)


@property_test
@given(problems())
def test_value_shifts_survive_the_projection(problem):
    process, _ = problem
    for cell in process.cells():
        shifts = [value_shift(q, cell.student, cell.values) for q in cell.targets]
        assert math.isclose(value_shift(cell.mean, cell.student, cell.values), cell.weights @ shifts, **CLOSE)


@property_test
@given(problems())
def test_outcome_branches_add_up(problem):
    process, _ = problem
    for cell in process.cells():
        plus, minus = cell.branch(True), cell.branch(False)
        if plus is None or minus is None:
            continue
        mean = (1 - cell.eta) * barycenter(cell.targets, plus) + cell.eta * barycenter(cell.targets, minus)
        np.testing.assert_allclose(cell.mean, mean, atol=1e-13)


@property_test
@given(problems(graded=False))
def test_an_ideal_correct_branch_leaves_the_failed_shift_scaled_by_its_frequency(problem):
    for cell in keep_correct(problem[0]).cells():
        minus = cell.branch(False)
        far = 0.0 if minus is None else tv(barycenter(cell.targets, minus), cell.student)
        assert math.isclose(tv(cell.mean, cell.student), cell.eta * far, **CLOSE)


@property_test
@given(problems(sparse=False), st.sampled_from([0.0, 0.1, 1.0]))
def test_the_outcome_margin_is_a_lower_bound(problem, far):
    process, policy = problem
    for cell in process.cells():
        pi = (1 - far) * cell.mean + far * policy[cell.t][cell.h]
        gamma = delta = 0.0
        if (minus := cell.branch(False)) is not None:
            gamma = value_shift(minus @ cell.targets, cell.student, cell.values)
        if (plus := cell.branch(True)) is not None:
            delta = plus @ kl(cell.student, cell.targets)
        right = cell.eta * gamma - (1 - cell.eta) * math.sqrt(delta / 2) - math.sqrt(kl(cell.mean, pi) / 2)
        assert math.isclose(margin(cell, pi), right, **CLOSE)
        assert value_shift(pi, cell.student, cell.values) >= right - 1e-12


@property_test
@given(problems())
def test_compatibility_bounds_the_value_shift(problem):
    process, _ = problem
    for cell in process.cells():
        value = cell.student @ cell.values
        for code, target in zip(cell.codes, cell.targets, strict=True):
            own, hybrid = process.own_continuation(cell, code), process.hybrid_continuation(cell, code)
            shift = value_shift(target, cell.student, cell.values)
            success = own @ process.rewards(cell)
            assert math.isclose(hybrid @ process.rewards(cell), value + shift, **CLOSE)
            assert math.isclose(kl(own, hybrid), process.chained_kl(cell, code), **CLOSE)
            assert shift >= success - value - math.sqrt(kl(own, hybrid) / 2) - 1e-12


@property_test
@given(problems())
def test_the_derivative_along_a_mixture_is_the_occupancy_weighted_shift(problem):
    process, policy = problem
    J = lambda epsilon: expected_reward(mix(process.student, policy, epsilon), process.verifier)  # noqa: E731
    slope = occupancy_weighted_shift(process, policy)
    # One Richardson step on central differences is exact up to degree 4; here the degree is at most 3.
    central = [(J(h) - J(-h)) / (2 * h) for h in (0.1, 0.05)]
    assert math.isclose((4 * central[1] - central[0]) / 3, slope, **CLOSE)
    if slope > 1e-3:
        assert J(1e-4) > J(0.0)


@property_test
@given(problems(sparse=False, graded=True))
def test_the_correct_objective_bounds_the_mean_distance(problem):
    loss, apart = correct_objective(problem[0])
    assert 0 < apart <= math.sqrt(loss / 2)


def test_the_correct_objective_is_a_mean_over_correct_trajectories():
    process = random_process(np.random.default_rng(0), Shape(2, 3, 1))
    joint = [(cell.mass * w * s, cell.student, q) for cell in process.cells() for w, s, q in _each(cell)]
    correct = math.fsum(mass for mass, _, _ in joint)
    loss, apart = correct_objective(process)
    assert correct > 0
    assert math.isclose(loss, math.fsum(mass * kl(p, q) for mass, p, q in joint) / correct, **CLOSE)
    assert math.isclose(apart, math.fsum(mass * tv(p, q) for mass, p, q in joint) / correct, **CLOSE)
    assert correct_objective(keep_correct(process)) == (0.0, 0.0)


def _each(cell):
    return zip(cell.weights, cell.success, cell.targets, strict=True)


@pytest.mark.parametrize("T", range(2, 13))
def test_a_perfect_teacher_teaches_nothing(T):
    process = perfect_teacher(T)
    assert process.teacher_success() == 1
    assert expected_reward(process.student, process.verifier) == 2.0 ** (1 - T)
    for t, mean in ((cell.t, cell.mean) for cell in process.cells() if cell.h < 4):
        np.testing.assert_array_equal(mean, [0.5, 0.5], err_msg=f"position {t}")
    assert math.isclose(mutual_information(process), math.log(2), **CLOSE)


def test_mean_over_weighs_positions_alike():
    process = perfect_teacher(4)
    assert math.isclose(mean_over(process, lambda cell: 1.0), 1.0)
    assert math.isclose(mean_over(process, lambda cell: cell.t), 1.5)


def test_the_searches_agree_with_scipy():
    q, weights = np.random.default_rng(0).dirichlet(np.ones(4), 3), np.array([0.2, 0.3, 0.5])
    softmax = lambda z: np.exp(z - np.logaddexp.reduce(z))  # noqa: E731
    other = minimize(lambda z: weights @ kl(softmax(z), q), np.zeros(4), tol=1e-12)

    def objective(live):
        p = live.exp()
        return sum(w * (p * (live - torch.tensor(np.log(row)))).sum() for w, row in zip(weights, q, strict=True))

    np.testing.assert_allclose(minimise(objective, np.zeros((1, 4)))[0], softmax(other.x), atol=1e-6)
    assert math.isclose(golden(lambda x: (x - 1.25) ** 4 + x, -12, 12), 1.25 - 0.25 ** (1 / 3), abs_tol=1e-6)


SIZES = [(b, G) for G in (1, 2, 3, 5) for b in range(1, G + 1)]


@pytest.mark.parametrize(("b", "G"), SIZES, ids=[f"{b}of{G}" for b, G in SIZES])
@pytest.mark.parametrize("s", [0.1, 0.7])
def test_the_sampler_spends_what_the_identities_say(b, G, s):
    tree = list(paths(partial(adaptive, FAILED, b, G)))
    assert len({path.outcomes for path in tree}) == len(tree)
    assert math.isclose(expectation(tree, s, lambda path: 1.0), 1.0, **CLOSE)
    assert math.isclose(expectation(tree, s, first_stage), expected_first_stage(s, b, G), **CLOSE)
    assert math.isclose(expectation(tree, s, samples), expected_samples(s, b, G), **CLOSE)
    assert math.isclose(expectation(tree, s, skipped), skip_probability(s, G), **CLOSE)
    assert math.isclose(expectation(tree, s, successes), s * expectation(tree, s, samples), **CLOSE)


def test_the_paths_are_every_sequence_of_outcomes():
    tree = list(paths(lambda draw: fixed(FAILED, 3, draw, retry=False)))
    assert sorted(path.outcomes for path in tree) == [
        (a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)
    ]
    # b = 1, G = 2: stop at a success; two failures are replaced by a group of two.
    tree = list(paths(partial(adaptive, FAILED, 1, 2)))
    stages = sorted((path.outcomes, samples(path), first_stage(path)) for path in tree)
    assert stages == [
        *(((False, False, a, c), 4, 2) for a in (False, True) for c in (False, True)),
        ((False, True), 2, 2),
        ((True,), 1, 1),
    ]


def test_trajectories_drawn_together_cost_the_sum():
    tree = list(paths(partial(adaptive, 2 * FAILED, 1, 2)))
    assert math.isclose(expectation(tree, 0.3, samples), 2 * expected_samples(0.3, 1, 2), **CLOSE)
