from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import naive
import pytest
from rounding import follow

from past_opsd.core import config
from past_opsd.core.losses import GeneralizedJSD, Imitate, Match, Reinforce, SampledMatch, SampledStay, Stay, TopK
from past_opsd.core.nouns import Attempt, Batch, Group, PastError, Problem, Response, Verdict, View, route
from past_opsd.methods.past import Past
from past_opsd.run.train import Session, session

PROBLEM = Problem("p", "6*7*3*4", "2, 6, 4, \\boxed{4}", "4")


def method(parts: Session, *overrides: str) -> Past:
    options = config.load("embedded/past", overrides)
    return config.plugin("method", "past").build(options.method, parts.loop.prompts, options.rollout)


def attempt(parts: Session, correct: bool, text: str = "6*7=2; \\boxed{2}") -> Attempt:
    tokens = tuple(parts.model.tokenizer(text, add_special_tokens=False)["input_ids"])
    view = View("student", parts.loop.prompts.student(PROBLEM))
    return Attempt(PROBLEM, view, Response(tokens, text, (0.0,) * len(tokens), True), Verdict(correct, "x"))


def group(parts: Session, made: Past, outcomes: list[int]) -> Group:
    failed = attempt(parts, False)
    view = made.teacher_view(failed)
    members = []
    for i, outcome in enumerate(outcomes):
        base = attempt(parts, bool(outcome), f"6*7={i}; \\boxed{{{i}}}")
        members.append(Attempt(PROBLEM, view, base.response, base.verdict))
    return Group(failed, tuple(members))


def weights(terms: list) -> dict[str, float]:
    out: dict[str, float] = {}
    for term in terms:
        out[term.name] = out.get(term.name, 0.0) + term.weight
    return out


def test_correct_branch_matches_the_student_under_the_hindsight_view(past: Session):
    a = attempt(past, True)
    (term,) = past.loop.method.teacher_terms(Batch((a,), ()), [])
    assert term.loss == Match(1.0)
    assert term.live == View("teacher", past.loop.prompts.hindsight(PROBLEM, a.response.text))
    assert term.frozen == View("student", past.loop.prompts.student(PROBLEM))
    assert term.tokens == a.response.tokens


def test_mixed_group_has_both_terms_and_the_papers_weights(past: Session):
    made = method(past)
    terms = made.teacher_terms(Batch((), ()), [group(past, made, [1, 0, 0, 1])])
    assert weights(terms) == pytest.approx({"reinforce": 1.0, "stay": 0.05})
    assert [t.weight for t in terms if t.name == "stay"] == pytest.approx([0.025, 0.025])
    losses = {t.name: type(t.loss) for t in terms}
    assert losses == {"reinforce": Reinforce, "stay": Stay}
    assert all(t.frozen == View("student", past.loop.prompts.student(PROBLEM)) for t in terms if t.name == "stay")
    assert all(t.frozen is None for t in terms if t.name == "reinforce")


def test_all_success_group_keeps_only_proximity(past: Session):
    made = method(past)
    assert weights(made.teacher_terms(Batch((), ()), [group(past, made, [1, 1])])) == pytest.approx({"stay": 0.05})


def test_without_proximity_a_group_that_is_not_mixed_takes_no_step_and_still_counts(past: Session):
    made = method(past, "method.beta_kl=0.0")
    same, mixed = group(past, made, [1, 1]), group(past, made, [1, 0])
    terms = made.teacher_terms(Batch((), ()), [same])
    assert terms
    assert past.learner.step("teacher", terms) == {"teacher/stepped": 0.0}
    assert weights(made.teacher_terms(Batch((), ()), [same, mixed])) == pytest.approx({"reinforce": 0.5, "stay": 0.0})
    metrics = past.learner.step("teacher", made.teacher_terms(Batch((), ()), [same, mixed]))
    assert metrics["teacher/stepped"] == 1.0
    assert not any("stay" in key for key in metrics)


def test_all_failure_group_contributes_nothing_and_scales_nothing(past: Session):
    made = method(past)
    dead, alive = group(past, made, [0, 0]), group(past, made, [1])
    assert made.teacher_terms(Batch((), ()), [dead]) == []
    assert weights(made.teacher_terms(Batch((), ()), [dead, alive])) == pytest.approx({"stay": 0.05})


def test_each_active_branch_weighs_the_same(past: Session):
    made = method(past)
    batch = Batch((attempt(past, True),) * 3, ())
    got = weights(made.teacher_terms(batch, [group(past, made, [1, 0])]))
    assert got == pytest.approx({"correct": 0.5, "reinforce": 0.5, "stay": 0.025})


def test_student_terms_cover_all_trajectories_and_no_continuation(past: Session):
    batch = Batch((attempt(past, True),), (attempt(past, False, "6*7=3; \\boxed{3}"),))
    terms = past.loop.method.student_terms(batch)
    assert [t.tokens for t in terms] == [a.response.tokens for a in batch.attempts]
    assert all(t.live == a.view for t, a in zip(terms, batch.attempts, strict=True))
    assert all(t.frozen is not None and t.frozen.adapter == "teacher" for t in terms)


def test_factorial_cells(past: Session):
    a = attempt(past, True)
    only_trajectory = method(past, "method.train_teacher=false")
    assert only_trajectory.teacher_view(a) == View("base", past.loop.prompts.hindsight(PROBLEM, a.response.text))
    assert only_trajectory.teacher_terms(Batch((a,), ()), []) == []
    only_adapted = method(past, "method.trajectory=false")
    assert only_adapted.teacher_view(a) == View("teacher", past.loop.prompts.reference(PROBLEM))


def test_branches(past: Session):
    for branches, expected in (("correct", {"correct"}), ("failed", {"reinforce", "stay"})):
        made = method(past, f"method.branches='{branches}'")
        terms = made.teacher_terms(Batch((attempt(past, True),), ()), [group(past, made, [1, 0])])
        assert set(weights(terms)) == expected


@pytest.mark.parametrize(
    ("override", "correct", "distill"),
    [
        ("method.objective='kl'", Match(1.0), Match(1.0)),
        ("method.clip_correct=false", Match(math.inf), Match(1.0)),
        ("method.objective='jsd'", GeneralizedJSD(0.5, 1.0), GeneralizedJSD(0.5, 1.0)),
        ("method.objective='kl_ce'", Match(1.0), Match(1.0)),
        ("method.objective='top_k'", TopK(100, False, 1.0), TopK(100, False, 1.0)),
        ("method.objective='sampled_token'", SampledMatch(), SampledStay()),
    ],
)
def test_objectives(past: Session, override: str, correct, distill):
    made = method(past, override)
    a = attempt(past, True)
    assert made.teacher_terms(Batch((a,), ()), [])[0].loss == correct
    assert made.student_terms(Batch((a,), ()))[0].loss == distill


def test_kl_and_ce_are_two_terms_on_the_same_path(past: Session):
    made = method(past, "method.objective='kl_ce'", "method.ce_weight=0.3", "method.temperature=1.2")
    batch = Batch((attempt(past, True), attempt(past, True)), ())
    for terms, name in ((made.teacher_terms(batch, []), "correct"), (made.student_terms(batch), "distill")):
        assert [t.name for t in terms] == [name, f"{name}/ce"] * 2
        for kl, ce in zip(terms[::2], terms[1::2], strict=True):
            assert (ce.live, ce.tokens, ce.temperature) == (kl.live, kl.tokens, kl.temperature)
            assert (ce.loss, ce.frozen) == (Imitate(), None)
            assert (kl.weight, ce.weight) == (0.5, pytest.approx(0.15))


def test_failed_path_clipping_is_an_option(past: Session):
    for override, tau in (("method.clip_failed=true", 1.0), ("method.clip_failed=false", math.inf)):
        made = method(past, override)
        stay = [t for t in made.teacher_terms(Batch((), ()), [group(past, made, [1])]) if t.name == "stay"]
        assert stay[0].loss == Stay(tau)


def test_beta_is_the_weight_of_proximity(past: Session):
    made = method(past, "method.beta_kl=0.2")
    assert weights(made.teacher_terms(Batch((), ()), [group(past, made, [1])])) == pytest.approx({"stay": 0.2})


def test_the_controller_survives_a_round_trip(past: Session):
    made, again = method(past), method(past)
    a = attempt(past, False)
    for _ in range(30):
        draws = made.explore([a], lambda asked: [attempt(past, True) for _ in asked])
        made.end_cycle(draws)
    assert made.metrics()["sampling/g_base"] < 8
    again.restore(made.state())
    assert again.metrics() == made.metrics()


@pytest.mark.parametrize(
    ("wide", "ahead", "asked"), [(False, "auto", 1), (True, "auto", 8), (True, 0, 1), (False, 2, 3)]
)
def test_continuations_are_drawn_ahead_where_the_engine_is_wide_or_the_recipe_says_so(
    past: Session, monkeypatch: pytest.MonkeyPatch, wide: bool, ahead: str | int, asked: int
):
    monkeypatch.setattr(past.loop.lab.engine, "wide", wide)
    made = method(past, f"method.ahead={ahead}")
    replace(past.loop, method=made)  # a loop tells its method
    made.restore({"controller": {"base": 1, "ema": 0.4, "streak": 0, "updates": 20}})
    rounds: list[int] = []

    def draw(requests: Sequence[tuple[int, int]]) -> list[Attempt]:
        rounds.append(len(requests))
        return [attempt(past, True) for _ in requests]

    (made_group,) = made.explore([attempt(past, False)], draw)
    assert rounds == [asked]
    assert (len(made_group.continuations), len(made_group.unused)) == (1, asked - 1)


def test_a_damaged_controller_state_is_told(past: Session):
    with pytest.raises(PastError, match="controller"):
        method(past).restore({"controller": {"base": 99, "ema": 0.1, "streak": 0, "updates": 1}})


def test_one_cycle_equals_an_independent_naive_implementation(small_recipe):
    """Same rollouts, both adapters after both steps: the package against plain autograd, one sequence at a time."""
    recipe = small_recipe("embedded/past", *follow("student", "teacher"))
    with session(recipe) as mine, session(recipe) as other:
        naive.perturb(mine, "student", "teacher")
        naive.perturb(other, "student", "teacher")
        cycle = mine.loop.cycle(0)
        assert cycle.batch.correct
        assert any(g.mixed for g in cycle.groups)
        model, prompts = other.model, other.loop.prompts
        loss = naive.past_teacher_loss(model, prompts, cycle.batch, cycle.groups, 1.0, 0.05)
        moved = naive.adamw_step(model, "teacher", loss)
        targets = [("teacher", prompts.hindsight(a.problem, a.response.text)) for a in cycle.batch.attempts]
        loss = naive.student_loss(model, cycle.batch.attempts, targets, 1.0)
        moved = max(moved, naive.adamw_step(model, "student", loss))
        for adapter in ("teacher", "student"):
            naive.assert_same(mine, other, moved, adapter)


def test_routing_is_the_only_use_of_the_outcome(past: Session):
    """The teacher's prompt is byte for byte the same for a correct and a failed trajectory but for the trajectory."""
    right, wrong = attempt(past, True), attempt(past, False)
    assert past.loop.method.teacher_view(right) == past.loop.method.teacher_view(wrong)
    other = attempt(past, False, "6*7=3; \\boxed{3}")
    a, b = (past.model.tokenizer.decode(past.loop.method.teacher_view(x).prompt) for x in (right, other))
    assert a.replace(right.response.text, "Y") == b.replace(other.response.text, "Y")
    assert route([right, wrong]).correct == (right,)
