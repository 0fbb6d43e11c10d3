from __future__ import annotations

import pytest

from past_opsd.core.nouns import (
    Attempt,
    Group,
    Problem,
    Response,
    Term,
    Verdict,
    View,
    derive_seed,
    group_advantages,
    mean,
    route,
    scale,
)

VIEW = View("student", (1, 2))


def attempt(correct: bool, text: str = "") -> Attempt:
    return Attempt(Problem("p", "x", "z", "4"), VIEW, Response((3,), text, (0.0,), True), Verdict(correct, "wrong"))


def term(name: str, weight: float = 1.0) -> Term:
    return Term(name, VIEW, None, (3,), print, weight)


def test_route_splits_by_outcome_and_keeps_order():
    attempts = [attempt(True, "a"), attempt(False, "b"), attempt(True, "c")]
    batch = route(attempts)
    assert [a.response.text for a in batch.correct] == ["a", "c"]
    assert [a.response.text for a in batch.failed] == ["b"]
    assert len(batch.attempts) == 3


@pytest.mark.parametrize(
    ("outcomes", "active", "mixed"), [([], 0, 0), ([0, 0], 0, 0), ([1], 1, 0), ([1, 1], 1, 0), ([0, 1], 1, 1)]
)
def test_group_classes(outcomes: list[int], active: bool, mixed: bool):
    group = Group(attempt(False), tuple(attempt(bool(o)) for o in outcomes))
    assert (group.active, group.mixed) == (active, mixed)


def test_mean_ignores_empty_items():
    """A missing branch does not scale the other."""
    assert [t.weight for t in mean([[term("a")], []])] == [1.0]
    assert [t.weight for t in mean([[term("a")], [term("b"), term("c")]])] == [0.5, 0.5, 0.5]
    assert mean([[], []]) == []


def test_nested_means_give_the_branch_weights():
    """Three correct and one failed: each branch weighs one half whatever the ratio."""
    correct = mean([[term("c")] for _ in range(3)])
    failed = mean([[term("f")]])
    weights = {t.name: 0.0 for t in correct + failed}
    for t in mean([correct, failed]):
        weights[t.name] += t.weight
    assert weights == pytest.approx({"c": 0.5, "f": 0.5})


def test_scale_multiplies_weights():
    assert [t.weight for t in scale(0.05, [term("a", 2.0)])] == [0.1]


def test_advantages_by_hand():
    # Rewards 1, 0, 0, 0: mean 1/4, sample standard deviation 1/2.
    assert group_advantages([True, False, False, False], 0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert group_advantages([True, True], 1e-4) == [0.0, 0.0]
    assert group_advantages([True], 1e-4) == [0.0]


def test_seeds_depend_on_every_part_and_its_type():
    seeds = {derive_seed(*parts) for parts in [(1, 2), (2, 1), (12,), ("1", "2"), (1, "2"), (1, 2, 0), ("1\x1f2",)]}
    assert len(seeds) == 7
    assert derive_seed(17, 3, "chain3:6*7", "student", 0) == derive_seed(17, 3, "chain3:6*7", "student", 0)
    assert derive_seed(0) < 2**64
