"""Finite processes against enumeration with plain tuples of actions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from past_opsd.analysis.theory import kl
from past_opsd.analysis.theory.process import (
    Shape,
    action_values,
    expected_reward,
    keep_correct,
    law,
    mix,
    occupancy,
    perfect_teacher,
    random_policy,
    random_process,
)
from past_opsd.core.nouns import PastError

property_test = settings(deadline=None, derandomize=True, max_examples=25)
SHAPES = st.builds(
    Shape,
    vocabulary=st.integers(2, 3),
    horizon=st.integers(1, 3),
    notes=st.integers(1, 2),
    sparse=st.booleans(),
    stop=st.booleans(),
    graded=st.booleans(),
    reach=st.sampled_from([0.2, 1.0]),
)


@st.composite
def processes(draw):
    return random_process(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(SHAPES))


def number(actions, V):
    place = 0
    for action in actions:
        place = place * V + action
    return place


def responses(process):
    return itertools.product(range(process.vocabulary), repeat=process.horizon)


def probability(policy, actions, start=0):
    V = policy[0].shape[-1]
    steps = range(start, len(actions))
    return math.prod(policy[t][number(actions[:t], V)][actions[t]] for t in steps)


def reward(process, actions):
    return process.verifier[number(actions, process.vocabulary)]


def after(process, prefix):
    tails = itertools.product(range(process.vocabulary), repeat=process.horizon - len(prefix))
    return [prefix + tail for tail in tails]


@property_test
@given(processes())
def test_law_occupancy_reward_and_values(process):
    V, student = process.vocabulary, process.student
    chances = {y: probability(student, y) for y in responses(process)}
    np.testing.assert_allclose(law(student), list(chances.values()), atol=1e-15)
    assert math.isclose(sum(chances.values()), 1.0)
    value = math.fsum(chance * reward(process, y) for y, chance in chances.items())
    assert math.isclose(expected_reward(student, process.verifier), value, abs_tol=1e-14)
    for t, (reached, Q) in enumerate(zip(occupancy(student), action_values(student, process.verifier), strict=True)):
        for prefix in itertools.product(range(V), repeat=t):
            h = number(prefix, V)
            assert math.isclose(reached[h], math.fsum(c for y, c in chances.items() if y[:t] == prefix), abs_tol=1e-14)
            for a in range(V):
                tails = after(process, (*prefix, a))
                expected = math.fsum(probability(student, y, t + 1) * reward(process, y) for y in tails)
                assert math.isclose(Q[h, a], expected, abs_tol=1e-14)


@property_test
@given(processes())
def test_cells_are_the_joint_law_of_prefix_and_privilege(process):
    V, found = process.vocabulary, {(cell.t, cell.h): cell for cell in process.cells()}
    values = process.values
    for t in range(process.horizon):
        for prefix in itertools.product(range(V), repeat=t):
            h = number(prefix, V)
            joint = {
                (y, z): probability(process.student, y) * note
                for y in after(process, prefix)
                for z, note in enumerate(process.notes)
            }
            possible = {u: mass for u, mass in joint.items() if mass > 0}
            if not possible:
                assert (t, h) not in found
                continue
            cell, mass = found[t, h], math.fsum(possible.values())
            assert math.isclose(cell.mass, mass)
            np.testing.assert_allclose(cell.weights, [m / mass for m in possible.values()], rtol=1e-12)
            codes = [process.reads[number(y, V), z] for y, z in possible]
            assert cell.codes.tolist() == codes
            np.testing.assert_array_equal(cell.targets, [process.teacher[t][code][h] for code in codes])
            np.testing.assert_array_equal(cell.success, [reward(process, y) for y, _ in possible])
            np.testing.assert_array_equal(cell.student, process.student[t][h])
            np.testing.assert_array_equal(cell.values, values[t][h])
            failed = math.fsum(m / mass * (1 - reward(process, y)) for (y, _), m in possible.items())
            assert math.isclose(cell.eta, failed, abs_tol=1e-14)


@property_test
@given(processes())
def test_branches_are_conditional_on_the_outcome(process):
    for cell in process.cells():
        for correct, outcome in ((True, cell.success), (False, 1 - cell.success)):
            weights = cell.branch(correct)
            if weights is None:
                assert not (cell.weights * outcome).any()
            else:
                np.testing.assert_allclose(weights, cell.weights * outcome / (cell.weights @ outcome), rtol=1e-12)


@property_test
@given(processes())
def test_continuations_and_their_divergence(process):
    V = process.vocabulary
    for cell in itertools.islice(process.cells(), 6):
        prefix = next(p for p in itertools.product(range(V), repeat=cell.t) if number(p, V) == cell.h)
        for code in cell.codes[:3]:
            teacher = process.read_by(code)
            tails = after(process, prefix)
            own = [probability(teacher, y, cell.t) for y in tails]
            first = [teacher[cell.t][cell.h][y[cell.t]] for y in tails]
            hybrid = [f * probability(process.student, y, cell.t + 1) for f, y in zip(first, tails, strict=True)]
            np.testing.assert_allclose(process.own_continuation(cell, code), own, atol=1e-15)
            np.testing.assert_allclose(process.hybrid_continuation(cell, code), hybrid, atol=1e-15)
            np.testing.assert_array_equal(process.rewards(cell), [reward(process, y) for y in tails])
            assert math.isclose(process.chained_kl(cell, code), kl(own, hybrid), abs_tol=1e-12)


@property_test
@given(processes())
def test_teacher_success_is_the_mean_over_privileges(process):
    expected = math.fsum(
        probability(process.student, y) * note * expected_reward(process.read_by(code), process.verifier)
        for y, codes in zip(responses(process), process.reads, strict=True)
        for note, code in zip(process.notes, codes, strict=True)
    )
    assert math.isclose(process.teacher_success(), expected, abs_tol=1e-13)


@property_test
@given(processes(), st.integers(0, 2**32 - 1))
def test_mix_is_a_policy_between_two(process, seed):
    policy = random_policy(np.random.default_rng(seed), process)
    for step, a, b in zip(mix(process.student, policy, 0.25), process.student, policy, strict=True):
        np.testing.assert_allclose(step, 0.75 * a + 0.25 * b)


def test_a_complex_step_keeps_its_imaginary_part():
    process = random_process(np.random.default_rng(0), Shape(2, 2, 1))
    policy = random_policy(np.random.default_rng(1), process)
    assert law(mix(process.student, policy, 1j)).dtype == np.complex128


@pytest.mark.parametrize("seed", range(5))
def test_sparse_teachers_stay_within_the_student(seed):
    process = random_process(np.random.default_rng(seed), Shape(3, 3, 1, sparse=True))
    for p, q in zip(process.student, process.teacher, strict=True):
        assert not (q[:, p == 0] > 0).any()
    assert (process.student[-1] == 0).any()
    assert ((process.teacher[-1] == 0) & (process.student[-1] > 0)).any()


def test_stop_makes_action_zero_absorbing():
    process = random_process(np.random.default_rng(0), Shape(3, 3, 1, stop=True))
    for y in responses(process):
        end = y.index(0) if 0 in y else len(y)
        assert (probability(process.student, y) > 0) == all(a == 0 for a in y[end:])


def test_reach_bounds_the_distance_of_the_teacher():
    process = random_process(np.random.default_rng(0), Shape(3, 3, 1, reach=0.1))
    assert all(np.abs(q - p).max() <= 0.1 for p, q in zip(process.student, process.teacher, strict=True))


def test_keep_correct_changes_the_correct_branch_alone():
    process = random_process(np.random.default_rng(0), Shape(3, 3, 2))
    for before, cell in zip(process.cells(), keep_correct(process).cells(), strict=True):
        expected = np.where(cell.success[:, None] == 1, cell.student, before.targets)
        np.testing.assert_array_equal(cell.targets, expected)


def test_the_perfect_teacher_repeats_the_last_bit():
    process = perfect_teacher(3)
    assert process.verifier.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
    for y, (code,) in zip(responses(process), process.reads, strict=True):
        teacher = process.read_by(code)
        assert probability(teacher, (y[-1],) * 3) == 1


MISTAKES = {
    "horizon": (lambda p: perfect_teacher(1), "at least 2"),
    "verifier": (lambda p: replace(p, verifier=p.verifier * 2), r"in \[0, 1\]"),
    "reads": (lambda p: replace(p, reads=p.reads + 1), "one of"),
    "notes": (lambda p: replace(p, notes=p.notes * 2), "notes"),
    "student": (lambda p: replace(p, student=p.student[::-1]), "step 0"),
    "teacher": (lambda p: replace(p, teacher=tuple(-q for q in p.teacher)), "teacher"),
    "graded": (lambda p: keep_correct(replace(p, verifier=p.verifier * 0.5)), "0 or 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    call, message = MISTAKES[name]
    with pytest.raises(PastError, match=message):
        call(random_process(np.random.default_rng(3), Shape(2, 2, 1)))
