"""Each function of `theory.finite` against a second writing from its definition, over supports with zeros."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr

from past_opsd.analysis.theory import (
    Decomposition,
    barycenter,
    clipping_floor,
    decompose,
    geometric_barycenter,
    js,
    kl,
    reverse_floor,
    tv,
    value_shift,
)
from past_opsd.core.losses import GeneralizedJSD, Match, Stay
from past_opsd.core.nouns import PastError

property_test = settings(deadline=None, derandomize=True, max_examples=60)
MASSES = st.one_of(st.sampled_from([0.0, 0.0, 1e-200, 1e-12, 1.0]), st.floats(1e-6, 1.0))


def normal(values):
    array = np.array(values)
    return array / array.sum(-1, keepdims=True)


def rows(count, size, masses=MASSES):
    row = st.lists(masses, min_size=size, max_size=size).filter(lambda values: sum(values) > 1e-6)
    return st.lists(row, min_size=count, max_size=count).map(normal)


@st.composite
def pair(draw, masses=MASSES):
    return draw(rows(2, draw(st.integers(1, 6)), masses))


@st.composite
def teachers(draw, masses=MASSES):
    """q [M, V], p [V], weights [M] (some zero)."""
    size, count = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    q = draw(rows(count, size, masses))
    (p,) = draw(rows(1, size, masses))
    (weights,) = draw(rows(1, count, st.one_of(st.just(0.0), st.floats(0.01, 1.0))))
    return q, p, weights


def naive_kl(p, q):
    return math.fsum(0.0 if a == 0 else math.inf if b == 0 else a * math.log(a / b) for a, b in zip(p, q, strict=True))


def same(a, b, tolerance=1e-12):
    return a == b or (math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b)))


@property_test
@given(pair())
def test_kl_is_its_definition(views):
    p, q = views
    assert same(kl(p, q), naive_kl(p, q))
    assert same(kl(p, q), rel_entr(p, q).sum())
    assert kl(p, q) >= 0
    assert kl(p, p) == 0


def test_kl_is_infinite_exactly_where_mass_is_missing():
    assert kl([0.5, 0.5], [1.0, 0.0]) == math.inf
    assert kl([1.0, 0.0], [0.5, 0.5]) == math.log(2)
    assert kl([[1.0, 0.0], [0.5, 0.5]], [1.0, 0.0]).tolist() == [0.0, math.inf]


def test_kl_runs_along_the_axis_asked_for():
    p, q = np.array([[0.2, 0.8], [0.6, 0.4]]), np.array([[0.5, 0.5], [0.1, 0.9]])
    np.testing.assert_array_equal(kl(p.T, q.T, axis=0), kl(p, q))
    np.testing.assert_array_equal(tv(p.T, q.T, axis=0), tv(p, q))
    np.testing.assert_array_equal(js(p.T, q.T, axis=0), js(p, q))


@property_test
@given(pair())
def test_tv_is_the_largest_difference_of_an_event(views):
    p, q = views
    events = itertools.product((0, 1), repeat=len(p))
    assert same(tv(p, q), max(sum(e * (a - b) for e, a, b in zip(event, p, q, strict=True)) for event in events))


@property_test
@given(pair())
def test_pinsker(views):
    p, q = views
    assert tv(p, q) <= math.sqrt(kl(p, q) / 2) + 1e-12


@property_test
@given(pair())
def test_js_is_the_mean_divergence_from_the_mixture(views):
    p, q = views
    middle = (p + q) / 2
    assert same(js(p, q), (naive_kl(p, middle) + naive_kl(q, middle)) / 2)
    assert same(js(p, q), js(q, p))
    assert -1e-15 <= js(p, q) <= math.log(2) + 1e-15


def test_js_of_masses_that_a_mixture_would_lose():
    tiny = 5e-324
    assert js([1.0, tiny], [1.0, 0.0]) == 0.0
    assert js([1.0, 0.0], [0.0, 1.0]) == math.log(2)


@property_test
@given(pair(st.floats(0.01, 1.0)))
def test_the_losses_of_the_package_are_these_divergences(views):
    p, q = views
    frozen, live = torch.tensor(np.log(p))[None], torch.tensor(np.log(q))[None]
    at = torch.zeros(1, dtype=torch.long)
    assert same(kl(p, q), float(Match()(live, frozen, at)))
    assert same(kl(q, p), float(Stay()(live, frozen, at)))
    assert same(js(p, q), float(GeneralizedJSD()(live, frozen, at)))


@property_test
@given(teachers())
def test_barycenter_is_the_weighted_mean(problem):
    q, _, weights = problem
    expected = [math.fsum(w * row[a] for w, row in zip(weights, q, strict=True)) for a in range(q.shape[1])]
    np.testing.assert_allclose(barycenter(q, weights), expected, rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(barycenter(q, 7.0 * weights), expected, rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(barycenter(q), q.mean(0), rtol=1e-13, atol=1e-16)


@property_test
@given(teachers())
def test_decompose_splits_the_divergence(problem):
    q, p, weights = problem
    parts = decompose(q, p, weights)
    total = math.fsum(w * naive_kl(row, p) for w, row in zip(weights, q, strict=True) if w > 0)
    mean = weights @ q
    assert same(parts.total, total)
    assert same(parts.shift, naive_kl(mean, p))
    assert same(parts.privileged, mutual_information(weights, q))
    assert same(parts.total, parts.privileged + parts.shift)
    if 1e-3 < parts.total < math.inf:
        assert same(parts.surviving, 1 - parts.privileged / parts.total, 1e-9)


def mutual_information(weights, q):
    """H(U) + H(A) - H(U, A) from the joint table."""
    joint = weights[:, None] * q
    entropy = lambda masses: -math.fsum(m * math.log(m) for m in np.ravel(masses) if m > 0)  # noqa: E731
    return entropy(joint.sum(1)) + entropy(joint.sum(0)) - entropy(joint)


def test_decompose_at_its_ends():
    agree = decompose([[0.3, 0.7]] * 3, [0.5, 0.5])
    assert agree.privileged == 0
    assert agree.surviving == 1
    cancel = decompose([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5])
    assert cancel == Decomposition(math.log(2), math.log(2), 0.0)
    assert cancel.surviving == 0
    assert math.isnan(decompose([[0.5, 0.5]], [0.5, 0.5]).surviving)
    outside = decompose([[0.5, 0.5]], [1.0, 0.0])
    assert (outside.total, outside.privileged, outside.shift) == (math.inf, 0.0, math.inf)
    assert math.isnan(outside.surviving)


def test_a_teacher_of_weight_zero_does_not_count():
    q, p = [[0.3, 0.7], [1.0, 0.0]], [0.0, 1.0]
    assert decompose([[0.0, 1.0], *q], p, [1.0, 0.0, 0.0]) == Decomposition(0.0, 0.0, 0.0)
    np.testing.assert_array_equal(geometric_barycenter([[0.3, 0.7], [1.0, 0.0]], [1.0, 0.0]), [0.3, 0.7])


def test_a_mass_too_small_for_the_mean_is_not_infinitely_far_from_it():
    parts = decompose([[1.0, 5e-324], [1.0, 0.0]], [0.5, 0.5])
    assert parts.privileged == 0
    assert math.isfinite(parts.total)


@property_test
@given(teachers(), st.integers(0, 2**32 - 1))
def test_the_barycenter_is_the_least_forward_target(problem, seed):
    q, _, weights = problem
    floor = decompose(q, barycenter(q, weights), weights).total
    for pi in np.random.default_rng(seed).dirichlet(np.ones(q.shape[1]), 5):
        excess = weights @ kl(q, pi) - floor
        assert same(excess, kl(barycenter(q, weights), pi), 1e-11)
        assert excess >= 2 * tv(barycenter(q, weights), pi) ** 2 - 1e-12


@property_test
@given(teachers(), st.integers(0, 2**32 - 1))
def test_the_geometric_barycenter_is_the_least_reverse_target(problem, seed):
    q, _, weights = problem
    kept = q[weights > 0]
    assume((kept > 0).all(0).any())
    target = geometric_barycenter(q, weights)
    powers = [math.prod(x**w for x, w in zip(kept[:, a], weights[weights > 0], strict=True)) for a in range(q.shape[1])]
    np.testing.assert_allclose(target, normal(powers), rtol=1e-9, atol=1e-15)
    assert same(reverse_floor(q, weights), -math.log(sum(powers)), 1e-9)
    assert (target[(kept == 0).any(0)] == 0).all()
    support = target > 0
    for draw in np.random.default_rng(seed).dirichlet(np.ones(support.sum()), 5):
        pi = np.zeros(len(support))
        pi[support] = draw
        mean = weights[weights > 0] @ kl(pi, kept)
        assert same(mean, kl(pi, target) + reverse_floor(q, weights), 1e-9)


def test_no_common_action_means_no_reverse_target():
    with pytest.raises(PastError, match="share no action"):
        geometric_barycenter([[1.0, 0.0], [0.0, 1.0]])


@property_test
@given(teachers(), st.integers(0, 2**32 - 1))
def test_value_shift_is_linear_and_bounded_by_tv(problem, seed):
    q, p, weights = problem
    Q = np.random.default_rng(seed).random(len(p))
    shifts = value_shift(q, p, Q)
    naive = [math.fsum((a - b) * v for a, b, v in zip(row, p, Q, strict=True)) for row in q]
    np.testing.assert_allclose(shifts, naive, atol=1e-14)
    assert same(value_shift(barycenter(q, weights), p, Q), weights @ shifts)
    assert (np.abs(shifts) <= tv(q, p) + 1e-14).all()


@property_test
@given(pair(st.floats(0.01, 1.0)), st.floats(0.001, 2.0))
def test_the_clipped_loss_is_the_kl_exactly_in_the_safe_region(views, tau):
    p, q = views
    floor = clipping_floor(p, tau)
    np.testing.assert_allclose(floor, [x * math.exp(-tau / x) for x in p], rtol=1e-12)
    assume((np.abs(q - floor) > 1e-6).all())
    clipped = float(Match(tau)(torch.tensor(np.log(q))[None], torch.tensor(np.log(p))[None], torch.zeros(1).long()))
    assert (abs(clipped - kl(p, q)) < 1e-10) == bool((q >= floor).all())


def test_the_clipping_floor_of_an_absent_entry_is_zero():
    assert clipping_floor([1.0, 0.0], 0.05).tolist() == [math.exp(-0.05), 0.0]


MISTAKES = {
    "negative": (lambda: kl([1.5, -0.5], [0.5, 0.5]), "negative or nan"),
    "nan": (lambda: tv([math.nan, 1.0], [0.5, 0.5]), "negative or nan"),
    "logits": (lambda: js([2.0, 3.0], [0.5, 0.5]), "sum to 5"),
    "scalar": (lambda: kl(1.0, [1.0]), "along an axis"),
    "empty": (lambda: kl([], []), "along an axis"),
    "one-teacher": (lambda: barycenter([0.5, 0.5]), r"\[M, V\]"),
    "weights-shape": (lambda: barycenter([[0.5, 0.5]], [0.5, 0.5]), "1 teachers need weights"),
    "weights-sum": (lambda: decompose([[0.5, 0.5]], [0.5, 0.5], [0.0]), "positive, finite sum"),
    "weights-sign": (lambda: barycenter([[1.0], [1.0]], [2.0, -1.0]), "non-negative"),
    "tau": (lambda: clipping_floor([1.0], 0.0), "tau > 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    call, message = MISTAKES[name]
    with pytest.raises(PastError, match=message):
        call()
