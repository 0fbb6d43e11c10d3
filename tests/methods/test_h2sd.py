from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import naive
import pytest
import torch
from rounding import follow

from past_opsd.core import config
from past_opsd.core.config import Sampling
from past_opsd.core.losses import ModulatedReinforce, Reinforce, Stay
from past_opsd.core.nouns import Adapter, Attempt, PastError, Problem, Response, Term, Verdict, View, route
from past_opsd.core.prompts import Prompts
from past_opsd.learner import stack_jobs
from past_opsd.methods.h2sd import H2sd, given_hint
from past_opsd.rollout.lab import Work
from past_opsd.run.resume import differences
from past_opsd.run.train import Session, session
from past_opsd.tasks._columns import load
from past_opsd.tasks.dataset import training

PROBLEM = Problem("p", "6*7*3*4", "2, 6, 4, \\boxed{4}", "4")
OTHER = Problem("o", "1+2+3", "3, 6, \\boxed{6}", "6")
GROUPS = ["rollout.problems_per_cycle=3", "rollout.samples_per_problem=4"]


@pytest.fixture(scope="module")
def h2sd(small_recipe) -> Iterator[Session]:
    """H2SD assembled, its hints not made."""
    with session(small_recipe("embedded/h2sd", *GROUPS)) as parts:
        yield parts


def method(parts: Session, *overrides: str) -> H2sd:
    recipe = config.load("embedded/h2sd", overrides)
    return config.plugin("method", "h2sd").build(recipe.method, parts.loop.prompts, recipe.rollout)


def attempt(parts: Session, correct: bool, text: str = "6*7=2; \\boxed{2}", problem: Problem = PROBLEM) -> Attempt:
    tokens = parts.loop.prompts.encode(text)
    view = View("student", parts.loop.prompts.student(problem))
    return Attempt(problem, view, Response(tokens, text, (0.0,) * len(tokens), True), Verdict(correct, "x"))


def group(parts: Session, outcomes: Sequence[int], problem: Problem = PROBLEM) -> list[Attempt]:
    return [attempt(parts, bool(r), f"6*7={i}; \\boxed{{{i}}}", problem) for i, r in enumerate(outcomes)]


def summary(terms: Sequence[Term]) -> list[tuple[str, float]]:
    return sorted((t.name, round(t.weight, 9)) for t in terms)


# The objective.


def test_dynamic_sampling_replaces_what_adds_no_term(h2sd: Session):
    for sets in ([], ["method.alpha_fail=0"]):
        made = method(h2sd, *sets)
        for outcomes in ([1, 0, 0], [1, 1, 1], [0, 0, 0]):
            attempts = group(h2sd, outcomes)
            assert made.teaches(attempts) == bool(made.student_terms(route(attempts)))


def test_the_outcome_chooses_view_and_objective(h2sd: Session):
    made, prompts = method(h2sd), h2sd.loop.prompts
    made.restore(made.state() | {"hints": {"p": "6*7=2; 2*3=6; "}})
    attempts = group(h2sd, [1, 0, 0, 0])
    terms = made.student_terms(route(attempts))
    by_tokens = {t.tokens: t for t in terms}
    assert len(by_tokens) == len(terms) == 4
    # Rewards 1, 0, 0, 0: mean 1/4, sample standard deviation 1/2.
    advantage = 0.75 / (0.5 + 1e-4)
    for a in attempts:
        term = by_tokens[a.response.tokens]
        assert term.live == View("student", prompts.student(PROBLEM))
        assert term.frozen == made.teacher_view(a)
        assert term.weight == pytest.approx(1 / 4)
        if a.verdict.correct:
            assert term.frozen == View("base", prompts.rephrase(PROBLEM, a.response.text))
            assert (term.name, term.loss) == ("modulated", ModulatedReinforce(pytest.approx(advantage), 0.5, 0.2))
        else:
            assert term.frozen == View("base", prompts.hint(PROBLEM, "6*7=2; 2*3=6; "))
            assert (term.name, term.loss) == ("distill", Stay(math.inf))
    assert made.teacher_terms(route(attempts), []) == []


def test_groups_are_averaged_first_and_then_problems(h2sd: Session):
    batch = route([*group(h2sd, [1, 0]), *group(h2sd, [0, 0, 0, 1], OTHER)])
    terms = method(h2sd).student_terms(batch)
    expected = [("distill", 0.25), ("modulated", 0.25), *[("distill", 0.125)] * 3, ("modulated", 0.125)]
    assert summary(terms) == sorted(expected)


def test_a_group_of_successes_adds_nothing_and_counts_in_the_mean(h2sd: Session):
    made = method(h2sd)
    assert made.student_terms(route(group(h2sd, [1, 1]))) == []
    terms = made.student_terms(route([*group(h2sd, [1, 1]), *group(h2sd, [0, 1], OTHER)]))
    assert summary(terms) == [("distill", 0.25), ("modulated", 0.25)]
    assert made.metrics()["group/all_success"] == made.metrics()["group/mixed"] == 0.5


def test_a_group_of_failures_is_distilled(h2sd: Session):
    made = method(h2sd, "method.punish_failures=true")
    assert summary(made.student_terms(route(group(h2sd, [0, 0])))) == [("distill", 0.5), ("distill", 0.5)]
    assert made.metrics()["group/all_failure"] == 1.0


def test_the_uncertain_choices_are_options(h2sd: Session):
    batch = route(group(h2sd, [1, 0]))
    made = method(h2sd, "method.alpha_fail=0.3", "method.tau=1.0", "method.temperature=1.5")
    terms = {t.name: t for t in made.student_terms(batch)}
    assert terms["distill"].weight == pytest.approx(0.15)
    assert terms["distill"].loss == Stay(1.0)
    assert (terms["distill"].temperature, terms["modulated"].temperature) == (1.5, 1.0)
    assert summary(method(h2sd, "method.alpha_fail=0.0").student_terms(batch)) == [("modulated", 0.5)]
    terms = method(h2sd, "method.punish_failures=true", "rollout.student.temperature=1.1").student_terms(batch)
    punish = next(t for t in terms if t.name == "punish")
    assert punish.loss == Reinforce(pytest.approx(-0.5 / (math.sqrt(0.5) + 1e-4)))
    assert (punish.frozen, punish.temperature, punish.weight) == (None, 1.1, 0.5)


def test_the_modulation_fades(h2sd: Session):
    made = method(h2sd, "method.strength=0.8", "method.strength_cycles=4")
    seen = []
    for _ in range(6):
        (term,) = (t for t in made.student_terms(route(group(h2sd, [1, 0]))) if t.name == "modulated")
        seen.append(term.loss.strength)  # pyright: ignore[reportFunctionMemberAccess]
        made.end_cycle([])
    assert seen == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    constant = method(h2sd, "method.strength=0.8", "method.strength_cycles=0")
    constant.end_cycle([])
    assert constant.strength == 0.8


def test_modulated_terms_of_different_advantages_share_a_call():
    losses = [ModulatedReinforce(a, 0.4, 0.3) for a in (1.5, -0.5)]
    view = View("student", (1,))
    terms = [Term("modulated", view, view, (5,) * n, loss) for n, loss in zip((2, 3), losses, strict=True)]
    (job,) = stack_jobs([[(t, 0.1 * len(t.tokens))] for t in terms], torch.device("cpu")).values()
    assert isinstance(job.loss, ModulatedReinforce)
    assert torch.as_tensor(job.loss.advantage).tolist() == [1.5, 1.5, -0.5, -0.5, -0.5]
    assert (job.loss.strength, job.loss.width) == (0.4, 0.3)
    assert job.weight.tolist() == pytest.approx([0.2, 0.2, 0.3, 0.3, 0.3])


# Hints.


@dataclass
class Bench:
    """Tools that answer as told and keep what they were asked."""

    prompts: Prompts
    problems: Sequence[Problem]
    answer: Callable[[Problem, int], tuple[str, bool]]
    seed: int = 17
    max_context: int = 256
    asked: list[list[Work]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)

    def upcoming(self) -> list[Problem]:
        return list(self.problems)

    def attempt(self, work: Sequence[Work], sampling: Sampling) -> list[Attempt]:
        self.asked.append(list(work))
        self.samplings.append(sampling)
        made = []
        for w in work:
            text, correct = self.answer(w.problem, len(self.asked) - 1)
            made.append(Attempt(w.problem, w.view, Response((5, 6, 7), text, (0.0,) * 3, True), Verdict(correct, "x")))
        return made

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        raise AssertionError("hints take no step")

    def copy(self, source: Adapter, target: Adapter) -> None:
        raise AssertionError("hints move no adapter")

    def reset(self, adapter: Adapter) -> None:
        raise AssertionError("hints move no adapter")


def hinted(parts: Session, made: H2sd, problem: Problem) -> str:
    """The hint in the teacher's view of a failure."""
    text = parts.model.tokenizer.decode(made.teacher_view(attempt(parts, False, problem=problem)).prompt)
    return text.partition("Reference: ")[2].partition("<|end|>")[0]


def test_only_a_verified_hint_is_taken_and_tries_are_few(h2sd: Session):
    """The first try fails on both, the second on one; the third problem's hint never verifies."""
    third = replace(PROBLEM, id="t")
    made = method(h2sd, "method.hint_tries=3")

    def answer(problem: Problem, n: int) -> tuple[str, bool]:
        right = {"p": 1, "o": 2}.get(problem.id, 99)
        return f"{n}, ", n >= right

    bench = Bench(h2sd.loop.prompts, [PROBLEM, OTHER, third], answer)
    made.prepare(bench)
    assert [[w.problem.id for w in round_] for round_ in bench.asked] == [["p", "o", "t"], ["p", "o", "t"], ["o", "t"]]
    assert hinted(h2sd, made, PROBLEM) == "1,"
    assert hinted(h2sd, made, OTHER) == "2,"
    assert hinted(h2sd, made, third) == PROBLEM.solution
    for w in (w for round_ in bench.asked for w in round_):
        assert w.view == View("base", h2sd.loop.prompts.write_hint(w.problem))
    seeds = [w.seed for round_ in bench.asked for w in round_]
    assert len(set(seeds)) == len(seeds)
    assert bench.samplings == [config.load("embedded/h2sd").rollout.teacher] * 3
    counts = {k: v for k, v in made.metrics().items() if k.startswith(("hints/", "cost/"))}
    assert counts == {
        "hints/own": 2,
        "hints/column": 0,
        "hints/fallback": 1,
        "cost/phase1_samples": 8,
        "cost/phase1_tokens": 24,
        "cost/phase1_verifier_calls": 8,
    }


def test_a_request_that_does_not_fit_is_not_sent_and_falls_back(h2sd: Session):
    made = method(h2sd)
    bench = Bench(h2sd.loop.prompts, [PROBLEM], lambda problem, n: ("2, 6, 4, \\boxed{4}", True), max_context=40)
    made.prepare(bench)
    assert all(not work for work in bench.asked)
    assert made.metrics()["hints/fallback"] == 1


def test_a_column_is_taken_as_it_is_and_asks_nobody(h2sd: Session):
    given = replace(PROBLEM, extra={"hint": "2, 6, "})
    blank = replace(OTHER, extra={"hint": " "})
    bench = Bench(h2sd.loop.prompts, [given, blank], lambda problem, n: ("3, ", True))
    made = method(h2sd)
    made.prepare(bench)
    assert [w.problem.id for round_ in bench.asked for w in round_] == ["o"]
    assert hinted(h2sd, made, given) == "2, 6,"
    assert made.metrics()["hints/column"] == made.metrics()["hints/own"] == 1
    with pytest.raises(PastError, match=r"problem p: its hint must be a text, found \['2'\]"):
        method(h2sd).prepare(Bench(h2sd.loop.prompts, [replace(PROBLEM, extra={"hint": ["2"]})], lambda *_: ("", True)))


def test_a_problem_that_nobody_foresaw_gets_its_hint_when_it_is_met(h2sd: Session):
    made = method(h2sd)
    bench = Bench(h2sd.loop.prompts, [PROBLEM], lambda problem, n: (f"{problem.id}, ", True))
    made.prepare(bench)
    made.meet(bench, [PROBLEM, OTHER, OTHER])
    assert [[w.problem.id for w in round_] for round_ in bench.asked if round_] == [["p"], ["o"]]
    assert made.state()["hints"] == {"p": "p,", "o": "o,"}
    assert made.metrics()["hints/own"] == made.metrics()["cost/phase1_samples"] == 2


def test_thinking_is_no_part_of_a_hint(h2sd: Session):
    made = method(h2sd)
    made.prepare(Bench(h2sd.loop.prompts, [PROBLEM], lambda *_: ("<think>9, 9, </think>\n2, 6", True)))
    assert made.state()["hints"] == {"p": "2, 6"}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (256, "2, 6, 4, \\boxed{4}"),
        (9, "2, 6, 4, \\boxed{4}"),
        (8, "2, 6, 4, \\boxed{4 \\boxed{4}"),
        (3, "2, 6 \\boxed{4}"),
    ],
)
def test_the_fallback_is_the_references_beginning_and_the_answer(h2sd: Session, tokens: int, expected: str):
    made = method(h2sd, "method.hint_tries=0", f"method.fallback_tokens={tokens}")
    made.prepare(Bench(h2sd.loop.prompts, [PROBLEM], lambda *_: ("", False)))
    assert made.state()["hints"] == {"p": expected}
    assert made.metrics()["hints/fallback"] == 1
    assert made.metrics()["cost/phase1_samples"] == 0


def test_the_embedded_base_writes_hints_that_verify_for_the_problems_of_the_run(small_recipe):
    with session(small_recipe("embedded/h2sd", *GROUPS)) as parts:
        parts.loop.prepare()
        made, problems = parts.loop.method, parts.loop.upcoming()
        metrics, hints = made.metrics(), made.state()["hints"]
        assert sorted(hints) == sorted(p.id for k in range(3) for p in parts.loop.take(k))
        assert metrics["hints/own"] + metrics["hints/fallback"] == len(hints) == 9 < len(parts.loop.problems)
        assert metrics["hints/own"] > 0.7 * len(hints)
        assert len(hints) <= metrics["cost/phase1_samples"] <= 4 * len(hints)
        own = [p for p in problems if hints[p.id] != made._fallback(p)]  # pyright: ignore[reportAttributeAccessIssue]
        answers = [(p, Response((), hints[p.id], (), True)) for p in own]
        assert all(v.correct for v in parts.loop.lab.verifier.verify(answers))
        assert parts.learner.steps == {"student": 0, "teacher": 0}


def test_the_papers_recipe_reads_a_users_column(tmp_path: Path):
    file = tmp_path / "train.jsonl"
    rows = [
        {"problem": "1 + 1", "solution": "\\boxed{2}", "hint": "add", "source": "x"},
        {"problem": "2", "solution": "2 \\boxed{2}"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load(str(file), training(config.load("paper/h2sd").task)).problems
    assert [given_hint(p) for p in problems] == ["add", ""]
    assert [list(p.extra) for p in problems] == [["hint"], []]


# The whole cycle.


def naive_loss(parts: Session, attempts: Sequence[Attempt], hints: dict[str, str], strength: float) -> torch.Tensor:
    """The objective, response by response."""
    prompts, model = parts.loop.prompts, parts.model
    problems = sorted({a.problem.id for a in attempts})
    total = torch.zeros(())
    for name in problems:
        members = [a for a in attempts if a.problem.id == name]
        rewards = [float(a.verdict.correct) for a in members]
        average, n = sum(rewards) / len(rewards), len(rewards)
        spread = math.sqrt(sum((r - average) ** 2 for r in rewards) / (n - 1))
        for a, reward in zip(members, rewards, strict=True):
            y = a.response.tokens
            live = naive.logp(model, "student", prompts.student(a.problem), y, grad=True)
            if reward:
                frozen = naive.logp(model, "base", prompts.rephrase(a.problem, a.response.text), y, grad=False)
                advantage = (reward - average) / (spread + 1e-4)
                loss = torch.zeros(())
                for t, token in enumerate(y):
                    change = math.exp(float(frozen[t, token]) - float(live[t, token].detach()))
                    scaled = advantage * ((1 - strength) + strength * min(max(change, 0.8), 1.2))
                    loss = loss - scaled * live[t, token] / len(y)
            else:
                frozen = naive.logp(model, "base", prompts.hint(a.problem, hints[name]), y, grad=False)
                loss = naive.exact_kl(live, frozen).mean()
            total = total + loss / (n * len(problems))
    return total


def test_one_cycle_equals_an_independent_naive_implementation(small_recipe):
    recipe = small_recipe("embedded/h2sd", *follow("student"), *GROUPS, "rollout.problems_per_cycle=5")
    with session(recipe) as mine, session(recipe) as other:
        naive.perturb(mine, "student")
        naive.perturb(other, "student")
        mine.loop.prepare()
        batch = mine.loop.cycle(0).batch
        kinds = mine.loop.method.metrics()
        assert kinds["group/mixed"] > 0
        assert len({sum(a.problem.id == p.id for a in batch.correct) for p in batch.problems}) > 1
        loss = naive_loss(other, batch.attempts, mine.loop.method.state()["hints"], 0.5)
        moved = naive.adamw_step(other.model, "student", loss)
        naive.assert_same(mine, other, moved)
        assert mine.learner.steps == {"student": 1, "teacher": 0}


def test_the_embedded_recipes_keep_to_the_vocabulary_and_the_budget(h2sd: Session):
    made, prompts = method(h2sd), h2sd.loop.prompts
    unknown = h2sd.model.tokenizer.convert_tokens_to_ids("<|unk|>")
    for view in (
        made.teacher_view(attempt(h2sd, True)).prompt,
        made.teacher_view(attempt(h2sd, False)).prompt,
        prompts.write_hint(PROBLEM),
    ):
        assert unknown not in view
    wide, matched = (config.load(f"embedded/{n}") for n in ("h2sd", "h2sd_matched"))
    assert (wide.rollout.problems_per_cycle, wide.rollout.samples_per_problem, wide.run.cycles) == (8, 8, 50)
    assert matched.rollout.problems_per_cycle == 1
    changed = differences(config.dump(wide), config.dump(matched))
    assert {c.partition(":")[0] for c in changed} == {"name", "description", "rollout.problems_per_cycle"}
    paper = config.load("paper/h2sd")
    assert (paper.rollout.problems_per_cycle, paper.rollout.samples_per_problem, paper.run.cycles) == (4, 8, 100)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.samples_per_problem=1", "without a group to compare with"),
        ("rollout.student.temperature=0.0", "H2SD needs sampling"),
        ("prompts.rephrase=''", r"prompts\.rephrase is empty"),
        ("prompts.hint=''", r"prompts\.hint is empty"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(h2sd: Session, override: str, message: str):
    recipe = config.load("embedded/h2sd", [override])
    prompts = Prompts(h2sd.model.tokenizer, recipe.prompts)
    with pytest.raises(PastError, match=message):
        config.plugin("method", "h2sd").build(recipe.method, prompts, recipe.rollout)
