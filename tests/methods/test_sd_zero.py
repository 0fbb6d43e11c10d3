from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import naive
import pytest
import torch
from rounding import assert_rounding, follow

from past_opsd.core import config
from past_opsd.core.losses import Imitate, MixedTopK, Stay
from past_opsd.core.nouns import Adapter, Attempt, Batch, PastError, Problem, Response, Term, Verdict, View
from past_opsd.core.prompts import Prompts
from past_opsd.methods.sd_zero import Options, Revision, SdZero
from past_opsd.policy.model import load_tokenizer
from past_opsd.rollout.lab import Work
from past_opsd.run.train import Session, session

PROBLEMS = [Problem(f"p{i}", f"{i}*7*3*4", "", str(i)) for i in range(4)]
WRONG, RIGHT = "2*7=5; \\boxed{5}", "2*7=4; \\boxed{4}"
FAILED, CORRECT = ";\nAttempt: ", ",\nAttempt: "
PHASE1 = ["method.phase1_problems=24", "method.phase1_batch=8"]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    recipe = config.load("embedded/sd_zero")
    return Prompts(load_tokenizer(recipe.model), recipe.prompts)


def method(prompts: Prompts, *overrides: str) -> SdZero:
    recipe = config.load("embedded/sd_zero", overrides)
    return config.plugin("method", "sd_zero").build(recipe.method, prompts, recipe.rollout)


@dataclass
class Fake:
    """Tools whose responses are written by the test and whose calls are kept."""

    prompts: Prompts
    answer: Callable[[Work], tuple[str, bool]]
    finished: bool = True
    max_context: int = 256
    seed: int = 17
    lr: float = 1.0
    problems: Sequence[Problem] = tuple(PROBLEMS)
    asked: list[list[Work]] = field(default_factory=list)
    calls: list[tuple] = field(default_factory=list)

    def upcoming(self):
        return list(self.problems)

    def attempt(self, work, sampling):
        self.asked.append(list(work))
        assert sampling.max_new_tokens == 34
        return [attempt(self.prompts, w.problem, w.view, *self.answer(w), self.finished) for w in work]

    def step(self, phase, terms):
        self.calls.append(("step", phase, list(terms)))
        return {"student/lr": self.lr, f"student/{terms[0].name}/loss": 0.25}

    def copy(self, source, target):
        self.calls.append(("copy", source, target))

    def reset(self, adapter):
        self.calls.append(("reset", adapter))

    @property
    def steps(self) -> list[list[Term]]:
        return [call[2] for call in self.calls if call[0] == "step"]


def attempt(prompts: Prompts, problem: Problem, view: View, text: str, correct: bool, finished: bool = True) -> Attempt:
    ids = prompts.completion(text) if finished else prompts.encode(text)
    return Attempt(problem, view, Response(ids, text, (0.0,) * len(ids), finished), Verdict(correct, "x"))


def revising(work: Work) -> bool:
    """Whether the request asks for a revision: its prompt goes on after the assistant's turn began."""
    return work.view.prompt[-1] != 4


def fails_then_mends(work: Work) -> tuple[str, bool]:
    """Problem 0 is solved at once; of the others' revisions, even seeds are verified."""
    if not revising(work):
        return (RIGHT, True) if work.problem.id == "p0" else (WRONG, False)
    return (RIGHT, True) if work.seed % 2 == 0 else (WRONG, False)


def test_the_instruction_follows_the_response_as_ids(prompts: Prompts):
    made = method(prompts)
    view = View("student", prompts.student(PROBLEMS[0]))
    y = prompts.encode(WRONG)
    failed = attempt(prompts, PROBLEMS[0], view, WRONG, False)
    assert failed.response.tokens == (*y, prompts.eos)
    assert made.teacher_view(failed) == View("teacher", view.prompt + y + prompts.encode(FAILED))
    correct = attempt(prompts, PROBLEMS[0], view, RIGHT, True)
    assert made.teacher_view(correct) == View("teacher", view.prompt + prompts.encode(RIGHT) + prompts.encode(CORRECT))
    cut = attempt(prompts, PROBLEMS[0], view, WRONG, False, finished=False)
    assert made.teacher_view(cut) == made.teacher_view(failed)


def test_the_outcome_is_in_the_teachers_context_and_not_in_the_students(prompts: Prompts):
    made = method(prompts)
    view = View("student", prompts.student(PROBLEMS[0]))
    wrong, right = (attempt(prompts, PROBLEMS[0], view, WRONG, outcome) for outcome in (False, True))
    assert made.teacher_view(wrong) != made.teacher_view(right)
    for term in made.student_terms(Batch((right,), (wrong,))):
        assert term.live == view


def test_only_failed_responses_are_revised_unless_told(prompts: Prompts):
    for revise_correct, asked in (("false", 3), ("true", 4)):
        tools = Fake(prompts, fails_then_mends)
        made = method(prompts, "method.phase1_problems=4", f"method.revise_correct={revise_correct}")
        made.prepare(tools)
        initial, revisions = tools.asked
        assert sorted(w.problem.id for w in initial) == ["p0", "p1", "p2", "p3"]
        assert len(revisions) == 2 * asked
        assert {w.view.adapter for w in initial + revisions} == {"student"}
        for w in initial:
            assert w.view.prompt == prompts.student(w.problem)
        for w in revisions:
            text, mark = (RIGHT, CORRECT) if w.problem.id == "p0" else (WRONG, FAILED)
            assert w.view.prompt == prompts.student(w.problem) + prompts.encode(text) + prompts.encode(mark)
        assert len({w.seed for w in initial + revisions}) == len(initial) + len(revisions)


def test_only_verified_revisions_are_kept_each_once(prompts: Prompts):
    tools = Fake(prompts, fails_then_mends)
    made = method(prompts, "method.phase1_problems=4", "method.phase1_revisions=8", "method.stage2_target=0")
    made.prepare(tools)
    verified = [w for w in tools.asked[1] if w.seed % 2 == 0]
    solved = {w.problem.id for w in verified}
    assert len(verified) > len(solved)
    first_epoch = tools.steps[0]
    assert len(first_epoch) == len(solved)
    y, y_revised = prompts.encode(WRONG), prompts.completion(RIGHT)
    for term in first_epoch:
        assert term.tokens == y + prompts.encode(FAILED) + y_revised
        assert term.loss == Imitate()
        assert term.frozen is None
    assert {t.live for t in first_epoch} == {View("student", prompts.student(p)) for p in PROBLEMS if p.id in solved}
    metrics = made.metrics()
    assert metrics["phase1/kept"] == len(solved)
    assert metrics["phase1/duplicates"] == len(verified) - len(solved)


def test_stages_are_disjoint_and_know_their_members(prompts: Prompts):
    def varied(work: Work) -> tuple[str, bool]:
        if not revising(work):
            return fails_then_mends(work)
        return f"2*7={work.seed % 10}; \\boxed{{4}}", True

    tools = Fake(prompts, varied)
    overrides = ("method.revise_correct=true", "method.phase1_revisions=4", "method.phase1_epochs=1")
    made = method(prompts, "method.phase1_problems=4", "method.stage1_target=5", "method.stage2_target=6", *overrides)
    made.prepare(tools)
    generation, revision = tools.steps
    own = {p.id: prompts.student(p) for p in PROBLEMS}
    asked = {w.view.prompt: w.problem.id for w in tools.asked[1]}
    members = [asked[t.live.prompt] for t in revision]
    corrects = len({w.seed % 10 for w in tools.asked[1] if w.problem.id == "p0"})
    assert {t.name for t in generation} == {"generation"}
    assert {t.name for t in revision} == {"revision"}
    assert len(generation) == 5
    assert len(revision) == 6
    assert members.count("p0") == min(6, corrects), "revisions of correct responses fill stage 2 first"
    assert {t.live.prompt for t in generation} <= {own["p1"], own["p2"], own["p3"]}
    whole = {t.live.prompt + t.tokens for t in generation}
    assert len(whole) == 5
    assert whole.isdisjoint({t.live.prompt + t.tokens for t in revision})
    assert all(t.tokens[-1] == prompts.eos and prompts.eos not in t.tokens[:-1] for t in generation + revision)


@pytest.mark.parametrize(("kept", "first", "second"), [(60, 50, 10), (7, 6, 1), (1, 1, 0), (9000, 5000, 1000)])
def test_fewer_revisions_shrink_both_stages_in_proportion(prompts: Prompts, kept: int, first: int, second: int):
    made = method(prompts)
    view = View("student", (1,))
    failed = attempt(prompts, PROBLEMS[0], view, WRONG, False)
    stages = made.stages([Revision(failed, failed)] * kept)
    assert (len(stages[0]), len(stages[1])) == (first, second)


def test_stage_1_takes_no_revision_of_a_correct_response(prompts: Prompts):
    made = method(prompts, "method.stage1_target=3", "method.stage2_target=1")
    view = View("student", (1,))
    right, wrong = (attempt(prompts, PROBLEMS[0], view, text, text == RIGHT) for text in (RIGHT, WRONG))
    of_right, of_wrong = Revision(right, right), Revision(wrong, right)
    assert made.stages([of_wrong, of_right, of_right, of_wrong]) == ([of_wrong, of_wrong], [of_right])
    assert made.stages([of_right] * 4) == ([], [of_right])


def test_phase_1_trains_in_mini_batches_and_ends_with_a_frozen_teacher_and_fresh_optimizers(prompts: Prompts):
    def varied(work: Work) -> tuple[str, bool]:
        return (f"2*7={work.seed % 10}; \\boxed{{4}}", True) if revising(work) else (WRONG, False)

    tools = Fake(prompts, varied)
    overrides = ("method.phase1_revisions=6", "method.phase1_batch=4", "method.phase1_epochs=2")
    made = method(prompts, "method.phase1_problems=4", "method.stage2_target=5000", *overrides)
    made.prepare(tools)
    metrics = made.metrics()
    kept, first, second = (int(metrics[f"phase1/{k}"]) for k in ("kept", "stage1", "stage2"))
    assert first + second == kept
    sizes = [len(terms) for terms in tools.steps]
    expected = [[4] * (n // 4) + ([n % 4] if n % 4 else []) for n in (first, first, second, second)]
    assert sizes == [size for sizes in expected for size in sizes]
    assert metrics["phase1/steps"] == len(sizes)
    for terms in tools.steps:
        assert sum(t.weight for t in terms) == pytest.approx(1.0)
    ends = [i for i, call in enumerate(tools.calls) if call[0] != "step"]
    assert [tools.calls[i] for i in ends] == [("reset", "student")] * 2 + [("copy", "student", "teacher")]
    steps_of_stage_1 = len(expected[0]) * 2
    assert ends[0] == steps_of_stage_1
    assert ends[2] == len(tools.calls) - 1
    epochs = [[t.tokens for terms in tools.steps[: steps_of_stage_1 // 2] for t in terms]]
    epochs.append([t.tokens for terms in tools.steps[steps_of_stage_1 // 2 : steps_of_stage_1] for t in terms])
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_phase_1_costs_are_counted_and_stay(prompts: Prompts):
    tools = Fake(prompts, fails_then_mends)
    made = method(prompts, "method.phase1_problems=4", "method.phase1_revisions=8")
    made.prepare(tools)
    y = len(prompts.completion(WRONG))
    expected = {
        "cost/phase1_samples": 4 + 24,
        "cost/phase1_tokens": 28 * y,
        "cost/phase1_verifier_calls": 28,
        "phase1/responses": 4,
        "phase1/response_success": 0.25,
        "phase1/revisions": 24,
        "phase1/dropped": 0,
    }
    assert made.metrics() | expected == made.metrics()
    before = made.metrics()
    made.end_cycle([])
    assert made.metrics() == before
    again = method(prompts)
    again.restore(made.state())
    assert again.metrics() == before
    assert again.state() == made.state()


def test_what_does_not_fit_in_phase_1_is_dropped_and_counted(prompts: Prompts):
    own = len(prompts.student(PROBLEMS[0]))
    tools = Fake(prompts, fails_then_mends, max_context=own + 34 + 1)
    made = method(prompts, "method.phase1_problems=4")
    with pytest.raises(PastError, match="none of 0 revisions of 4 responses"):
        made.prepare(tools)
    assert made.metrics()["phase1/dropped"] == 6
    tools = Fake(prompts, fails_then_mends, max_context=own + 33)
    with pytest.raises(PastError, match="none of 0 revisions of 0 responses"):
        made.prepare(tools)
    assert made.metrics()["phase1/dropped"] == 4


def test_phase_1_can_be_left_out(prompts: Prompts):
    tools = Fake(prompts, fails_then_mends)
    method(prompts, "method.phase1_problems=0").prepare(tools)
    assert tools.calls == [("copy", "student", "teacher")]


def test_mistakes_are_told(prompts: Prompts):
    with pytest.raises(PastError, match="phase 1 kept nothing: none of 8 revisions"):
        method(prompts, "method.phase1_problems=4").prepare(Fake(prompts, lambda work: (WRONG, False)))
    with pytest.raises(PastError, match="phase1_problems = 5 is more than the task's 4 problems"):
        method(prompts, "method.phase1_problems=5").prepare(Fake(prompts, fails_then_mends))
    with pytest.raises(PastError, match="become the same tokens"):
        method(prompts, "method.instruction_failed='wrong'", "method.instruction_correct='right'")
    with pytest.raises(PastError, match="both 0"):
        method(prompts, "method.stage1_target=0", "method.stage2_target=0")
    with pytest.raises(PastError, match="must not be empty"):
        method(prompts, "method.instruction_correct=''")
    with pytest.raises(PastError, match="schedule = 'constant'"):
        method(prompts, "method.phase1_problems=4").prepare(Fake(prompts, fails_then_mends, lr=0.0))


def test_defaults_are_the_released_instructions(prompts: Prompts):
    options = Options()
    assert (options.phase1_sampling.temperature, options.phase1_sampling.top_p) == (1.0, 0.9)
    paper = config.load("paper/sd_zero")
    assert paper.method.phase1_sampling.top_p == 0.9
    made = paper.method
    samples = made.phase1_problems * made.phase1_responses * (1 + made.phase1_revisions)
    assert made.revise_correct
    assert samples == 13_056
    assert paper.run.cycles * paper.rollout.problems_per_cycle == 400


@pytest.mark.parametrize(
    ("override", "loss", "temperature"),
    [
        ("method.divergence='reverse'", Stay(), 1.0),
        ("method.divergence='released'", MixedTopK(64), 1.0),
        ("method.temperature=1.3", Stay(), 1.3),
    ],
)
def test_divergences(prompts: Prompts, override: str, loss, temperature: float):
    view = View("student", prompts.student(PROBLEMS[0]))
    a = attempt(prompts, PROBLEMS[0], view, WRONG, False)
    made = method(prompts, override)
    (term,) = made.student_terms(Batch((), (a,)))
    assert (term.loss, term.temperature) == (loss, temperature)
    assert term.frozen == made.teacher_view(a)
    assert term.tokens == a.response.tokens


def test_an_untouched_phase_1_repeats_itself(small_recipe):
    with (
        session(small_recipe("embedded/sd_zero", *PHASE1)) as one,
        session(small_recipe("embedded/sd_zero", *PHASE1)) as two,
    ):
        one.loop.prepare()
        two.loop.prepare()
        assert one.model.digest("student") == two.model.digest("student")
        assert one.loop.method.metrics() == two.loop.method.metrics()
        assert all(bool(p.any()) for n, p in one.model.parameters("student").items() if "lora_B" in n)
        for mine, theirs in zip(*(one.model.parameters(a).values() for a in ("student", "teacher")), strict=True):
            assert torch.equal(mine, theirs)
        assert one.learner.steps == {"student": 0, "teacher": 0}
        assert not one.learner.optimizers["student"].state


def assert_same(mine: Session, other: Session, moved: float, adapter: Adapter = "student") -> None:
    for name, value in other.model.parameters("student").items():
        assert_rounding(mine.model.parameters(adapter)[name.replace(".student.", f".{adapter}.")], value, moved)


def without_end(parts: Session, tokens: tuple[int, ...]) -> tuple[int, ...]:
    eos = parts.model.tokenizer.eos_token_id
    assert eos not in tokens[:-1]
    return tokens[:-1] if tokens[-1] == eos else tokens


def marks(parts: Session, correct: bool) -> tuple[int, ...]:
    return tuple(parts.model.tokenizer(CORRECT if correct else FAILED, add_special_tokens=False)["input_ids"])


def test_phase_1_equals_an_independent_naive_implementation(small_recipe, monkeypatch):
    """One step of each stage from the same samples, the second stage with a fresh optimizer."""
    overrides = ["method.phase1_epochs=1", "method.phase1_batch=500", "method.stage2_target=5000"]
    overrides += ["method.phase1_problems=40", "method.phase1_revisions=4"]
    recipe = small_recipe("embedded/sd_zero", *overrides, *follow("student"))
    with session(recipe) as mine, session(recipe) as other:
        sampled: list[list[Attempt]] = []
        sample = mine.loop.lab.attempt

        def keep(*given):
            sampled.append(sample(*given))
            return sampled[-1]

        monkeypatch.setattr(mine.loop.lab, "attempt", keep)
        mine.loop.prepare()
        initial, revised = sampled
        failed = [a for a in initial if not a.verdict.correct]
        records: dict[tuple, tuple] = {}
        for a, r in zip([a for a in failed for _ in range(4)], revised, strict=True):
            assert r.problem == a.problem
            if r.verdict.correct:
                x = other.loop.prompts.student(a.problem)
                key = (x, without_end(other, a.response.tokens) + marks(other, False), r.response.tokens)
                records[key] = key
        assert len(records) >= 4
        half = round(len(records) / 2)
        second, first = list(records)[:half], list(records)[half:]

        def imitation(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
            logp = naive.logp(other.model, "student", prompt, tokens, grad=True)
            return -torch.stack([logp[t, y] for t, y in enumerate(tokens)]).mean()

        loss = torch.stack([imitation(x, context + y) for x, context, y in first]).mean()
        moved = naive.adamw_step(other.model, "student", loss)
        loss = torch.stack([imitation(x + context, y) for x, context, y in second]).mean()
        moved = max(moved, naive.adamw_step(other.model, "student", loss))
        assert_same(mine, other, moved)
        assert_same(mine, other, moved, "teacher")


def mixed_top_k(p: torch.Tensor, q: torch.Tensor, k: int) -> torch.Tensor:
    total = []
    for row_p, row_q in zip(p.exp(), q.exp(), strict=True):
        top = sorted(range(len(row_p)), key=lambda v: -float(row_p[v]))[:k]
        a, b = row_p[top] / row_p[top].sum(), row_q[top] / row_q[top].sum()
        total.append(0.5 * (a * (a / b).log()).sum() + 0.5 * (b * (b / a).log()).sum())
    return torch.stack(total)


@pytest.mark.parametrize("divergence", ["reverse", "released"])
def test_one_cycle_equals_an_independent_naive_implementation(small_recipe, divergence: str):
    overrides = [f"method.divergence='{divergence}'", "method.top_k=5"]
    recipe = small_recipe("embedded/sd_zero", *PHASE1, *overrides, *follow("student"))
    with session(recipe) as mine, session(recipe) as other:
        for parts in (mine, other):
            naive.perturb(parts, "student", "teacher")
        batch = mine.loop.cycle(0).batch
        assert batch.correct
        assert batch.failed
        losses = []
        for a in batch.attempts:
            y = a.response.tokens
            x = other.loop.prompts.student(a.problem)
            context = x + without_end(other, y) + marks(other, a.verdict.correct)
            q = naive.logp(other.model, "teacher", context, y, grad=False)
            live = naive.logp(other.model, "student", x, y, grad=True)
            values = naive.exact_kl(live, q) if divergence == "reverse" else mixed_top_k(q, live, 5)
            losses.append(values.mean())
        moved = naive.adamw_step(other.model, "student", torch.stack(losses).mean())
        assert_same(mine, other, moved)
        assert mine.learner.steps == {"student": 1, "teacher": 0}


def test_the_teacher_follows_every_so_many_cycles(small_recipe):
    def same(parts: Session) -> bool:
        pairs = zip(*(parts.model.parameters(a).values() for a in ("student", "teacher")), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    with session(small_recipe("embedded/sd_zero", *PHASE1, "method.teacher_sync_every=2")) as parts:
        parts.loop.prepare()
        assert same(parts)
        found = []
        for k in range(4):
            assert parts.loop.method.sync() == parts.loop.method.sync()
            parts.loop.cycle(k)
            found.append(same(parts))
        assert found == [False, True, False, True]
    with session(small_recipe("embedded/sd_zero", *PHASE1)) as parts:
        parts.loop.prepare()
        teacher = parts.model.digest("teacher")
        for k in range(2):
            parts.loop.cycle(k)
        assert parts.model.digest("teacher") == teacher
