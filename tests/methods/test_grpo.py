from __future__ import annotations

import math
from collections.abc import Sequence

import naive
import pytest
import torch
from rounding import follow

from past_opsd.core import config
from past_opsd.core.losses import Reinforce, Stay
from past_opsd.core.nouns import Attempt, Batch, PastError, Problem, Response, Term, Verdict, View, route
from past_opsd.learner.plan import pulls
from past_opsd.methods.grpo import Grpo
from past_opsd.policy.model import Model
from past_opsd.run.train import session

PROMPT = (1, 2, 3)


def method(*overrides: str) -> Grpo:
    recipe = config.load("embedded/grpo", overrides)
    return config.plugin("method", "grpo").build(recipe.method, None, recipe.rollout)


def batch(*groups: str) -> Batch:
    """One problem per string, one response per character: '1' is a success."""
    attempts = []
    for i, outcomes in enumerate(groups):
        problem = Problem(f"p{i}", "x", "z", "4")
        for j, outcome in enumerate(outcomes):
            response = Response((i, j), f"{i}.{j}", (0.0, 0.0), True)
            attempts.append(Attempt(problem, View("student", PROMPT), response, Verdict(outcome == "1", "")))
    return route(attempts)


def weighed(made: Grpo, of: Batch) -> list[Term]:
    """The terms that have a weight: without `beta` the penalty has none."""
    return [term for term in made.student_terms(of) if term.weight]


def test_a_response_is_compared_with_its_own_problems_group():
    """Routing mixes the groups' order; each response must still meet the advantage of its own group."""
    terms = weighed(method("method.advantage_eps=0"), batch("1000", "0111"))
    advantages = {term.tokens: term.loss.advantage for term in terms}  # pyright: ignore[reportFunctionMemberAccess]
    # Rewards 1, 0, 0, 0: mean 1/4, sample standard deviation 1/2.
    first, second = [1.5, -0.5, -0.5, -0.5], [-1.5, 0.5, 0.5, 0.5]
    expected = {(0, j): a for j, a in enumerate(first)} | {(1, j): a for j, a in enumerate(second)}
    assert advantages == pytest.approx(expected)
    for term in terms:
        assert (term.name, term.live, term.frozen) == ("reinforce", View("student", PROMPT), None)
        assert term.weight == pytest.approx(1 / 8)


def test_a_group_without_spread_counts_in_the_mean_with_advantage_zero():
    terms = weighed(method(), batch("10", "11", "00"))
    assert [t.weight for t in terms] == pytest.approx([1 / 6] * 6)
    zero = {t.tokens for t in terms if t.loss.advantage == 0.0}  # pyright: ignore[reportFunctionMemberAccess]
    assert zero == {(1, 0), (1, 1), (2, 0), (2, 1)}


def test_dynamic_sampling_replaces_groups_without_spread():
    assert [method().teaches(batch(group).attempts) for group in ("10", "11", "00", "01")] == [True, False, False, True]


def test_without_any_spread_there_is_nothing_to_step_on():
    assert not any(map(pulls, method().student_terms(batch("11", "00"))))
    assert any(map(pulls, method("method.beta=0.1").student_terms(batch("11", "00"))))
    assert method().student_terms(batch()) == []


def test_the_penalty_pulls_on_every_response_whatever_its_outcome():
    made = method("method.beta=0.1", "rollout.student.temperature=1.2")
    terms = made.student_terms(batch("11", "10"))
    assert [t.name for t in terms] == ["reinforce", "stay"] * 4
    for term in terms:
        assert term.temperature == 1.2
        if term.name == "stay":
            assert (term.frozen, term.loss) == (View("base", PROMPT), Stay(math.inf))
            assert term.weight == pytest.approx(0.1 / 4)
        else:
            assert isinstance(term.loss, Reinforce)
            assert term.frozen is None
    assert [t.name for t in made.student_terms(batch("11"))].count("stay") == 2


def test_the_log_says_how_many_groups_had_spread():
    made = method()
    made.student_terms(batch("10", "11", "00", "01"))
    assert made.metrics() == {"group/mixed": 0.5, "group/all_success": 0.25, "group/all_failure": 0.25}
    made.student_terms(batch())
    assert set(made.metrics().values()) == {0.0}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.samples_per_problem=1", r"rollout\.samples_per_problem = 1"),
        ("rollout.student.temperature=0.0", r"rollout\.student\.temperature = 0"),
    ],
)
def test_what_makes_groups_meaningless_is_told(override: str, message: str):
    with pytest.raises(PastError, match=message):
        method(override)


def test_budgets_of_the_shipped_recipes():
    """Rollouts an update: as many as the other rows', eight times as many in the row that says so."""
    counts = {}
    for name in ("embedded/grpo", "embedded/grpo_full", "embedded/past", "paper/grpo"):
        recipe = config.load(name)
        counts[name] = (recipe.rollout.problems_per_cycle, recipe.rollout.samples_per_problem, recipe.run.cycles)
    assert counts == {
        "embedded/grpo": (1, 8, 50),
        "embedded/grpo_full": (8, 8, 50),
        "embedded/past": (8, 1, 50),
        "paper/grpo": (4, 8, 100),
    }


def naive_loss(model: Model, attempts: Sequence[Attempt], temperature: float, beta: float, by_token: bool):
    """GRPO in plain autograd, one sequence at a time; a group without spread adds exact zeros and is counted."""
    sequences = []
    for problem in {a.problem.id for a in attempts}:
        group = [a for a in attempts if a.problem.id == problem]
        rewards = [float(a.verdict.correct) for a in group]
        average = sum(rewards) / len(group)
        spread = math.sqrt(sum((r - average) ** 2 for r in rewards) / (len(group) - 1))
        for a, reward in zip(group, rewards, strict=True):
            y, prompt = a.response.tokens, a.view.prompt
            live = (naive.logp(model, "student", prompt, y, grad=True) / temperature).log_softmax(-1)
            base = (naive.logp(model, "base", prompt, y, grad=False) / temperature).log_softmax(-1)
            chosen = live[torch.arange(len(y)), torch.tensor(y)]
            ratio = (chosen - chosen.detach()).exp()
            advantage = (reward - average) / (spread + 1e-4)
            policy = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            sequences.append(beta * naive.exact_kl(live, base) - policy)
    if by_token:
        return torch.cat(sequences).mean()
    return torch.stack([s.mean() for s in sequences]).mean()


@pytest.mark.parametrize(
    ("temperature", "beta", "reduction"), [(1.0, 0.0, "sequence"), (1.3, 0.5, "sequence"), (1.0, 0.0, "token")]
)
def test_one_cycle_equals_an_independent_naive_implementation(
    small_recipe, temperature: float, beta: float, reduction: str
):
    overrides = [*follow("student"), f"rollout.student.temperature={temperature}", f"method.beta={beta}"]
    overrides += [f"learner.reduction='{reduction}'", "rollout.samples_per_problem=4"]
    recipe = small_recipe("embedded/grpo", *overrides)
    with session(recipe) as mine, session(recipe) as other:
        naive.perturb(mine, "student")
        naive.perturb(other, "student")
        cycle = mine.loop.cycle(0)
        assert 0 < cycle.metrics["group/mixed"] < 1
        assert len(cycle.batch.attempts) == 24
        loss = naive_loss(other.model, cycle.batch.attempts, temperature, beta, reduction == "token")
        moved = naive.adamw_step(other.model, "student", loss)
        naive.assert_same(mine, other, moved)
        assert mine.model.versions["teacher"] == 0


def test_a_cycle_without_spread_takes_no_step(small_recipe):
    recipe = small_recipe("embedded/grpo", "rollout.student.max_new_tokens=1")  # every response is cut: all fail
    with session(recipe) as parts:
        before = parts.model.digest("student")
        cycle = parts.loop.cycle(0)
        assert cycle.metrics["group/all_failure"] == 1.0
        assert cycle.metrics["student/stepped"] == 0.0
        assert parts.model.digest("student") == before
        assert parts.learner.steps == {"student": 0, "teacher": 0}
