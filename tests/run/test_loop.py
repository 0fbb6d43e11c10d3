from __future__ import annotations

import io
from collections import Counter

import chatml
import pytest
from rich.console import Console

from past_opsd.core.nouns import Group, PastError, by_problem
from past_opsd.interface import look
from past_opsd.rollout.engines import Request
from past_opsd.run.attempts import read
from past_opsd.run.folder import RunFolder
from past_opsd.run.record import Recorder, summarise
from past_opsd.run.train import Session, assemble, costs, session


def test_a_cycle_takes_one_step_per_phase_and_publishes_both(past: Session):
    past.loop.cycle(0)
    assert past.learner.steps == {"student": 1, "teacher": 1}
    assert past.model.versions == {"base": 0, "student": 1, "teacher": 1}
    attempts = past.loop.attempts(1, past.loop.take(1))
    past.loop.lab.engine.sample([Request(attempts[0].view, 1)], past.recipe.rollout.student, past.model.versions)


def test_the_engine_may_rest_before_every_step_and_is_asked_only_between_them(small_recipe, monkeypatch):
    """One that shares the trainer's memory: adapt and distill follow a `sleep`, and nothing is sampled in between."""
    with session(small_recipe("embedded/past")) as parts:
        engine, said = parts.loop.lab.engine, []

        def heard(owner, name: str) -> None:
            real = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a: (said.append(name), real(*a))[1])

        monkeypatch.setattr(engine, "sleep", lambda: said.append("sleep"), raising=False)
        heard(engine, "sample")
        heard(engine, "publish")
        heard(parts.learner, "step")
        parts.loop.cycle(0)
        assert said.count("sample") > 1, "no continuation was drawn: the order says little"
        while said[0] == "sample":
            said.pop(0)
        assert said == ["sleep", "step", "sleep", "step", "publish", "publish"]
        said.clear()
        parts.loop.step("student", [])
        assert said == ["sleep", "step", "publish", "publish"]


def test_an_epoch_visits_every_problem_once_and_follows_from_the_cycle_alone(past: Session):
    size, n = past.recipe.rollout.problems_per_cycle, len(past.loop.problems)
    cycles = n // size
    first = [p.id for k in range(cycles) for p in past.loop.take(k)]
    second = [p.id for k in range(cycles, 2 * cycles) for p in past.loop.take(k)]
    assert len(set(first)) == n
    assert set(first) == set(second)
    assert first != second
    assert past.loop.take(3) == past.loop.take(3)


def test_an_epoch_boundary_inside_a_cycle_loses_nothing(small_recipe):
    with session(small_recipe("embedded/past", "task.train_problems=10", "rollout.problems_per_cycle=4")) as parts:
        ids = [p.id for k in range(5) for p in parts.loop.take(k)]
        assert sorted(ids[:10]) == sorted(ids[10:])
        assert len(set(ids)) == 10


def test_a_problem_that_comes_twice_in_a_cycle_is_sampled_anew(small_recipe):
    settings = ["task.train_problems=4", "rollout.problems_per_cycle=3", "rollout.samples_per_problem=4"]
    with session(small_recipe("embedded/past", *settings)) as parts:
        k = next(k for k in range(20) if len({p.id for p in parts.loop.take(k)}) < 3)
        attempts = parts.loop.attempts(k, parts.loop.take(k))
        twice = next(p for p in parts.loop.take(k) if parts.loop.take(k).count(p) == 2)
        texts = [a.response.text for a in attempts if a.problem == twice]
        assert len(texts) == 8
        assert texts[:4] != texts[4:]


def test_a_tight_context_limits_what_is_explored_and_not_what_is_distilled(small_recipe, tmp_path):
    """Else a failure without room for a whole continuation would go where a success of its length stays."""
    settings = ["rollout.problems_per_cycle=16", "rollout.teacher.max_new_tokens=80"]
    with session(small_recipe("embedded/past", *settings)) as parts:
        loop = parts.loop
        attempts = loop.attempts(0, loop.take(0))
        lengths = sorted(len(loop.method.teacher_view(a).prompt) for a in attempts if not a.verdict.correct)
        loop.max_context = lengths[len(lengths) // 2] + 80
        cycle = loop.cycle(0)
        assert cycle.dropped == 0
        assert len(cycle.batch.attempts) == len(cycle.sampled) == 16
        open_ = [a for a in cycle.batch.failed if len(loop.method.teacher_view(a).prompt) + 80 <= loop.max_context]
        assert 0 < len(open_) < len(cycle.batch.failed)
        assert [g.attempt for g in cycle.groups] == open_
        assert cycle.unexplored == len(cycle.batch.failed) - len(open_)
        terms = loop.method.student_terms(cycle.batch)
        assert Counter(t.tokens for t in terms) == Counter(a.response.tokens for a in attempts)
        line = summarise(cycle)
        assert (line["failed/unexplored"], line["rollout/sampled"]) == (cycle.unexplored, 16)
        # The records name the attempt that a continuation belongs to, whichever of them drew none.
        with Recorder(run := RunFolder(tmp_path), {}) as recorder:
            recorder.cycle(0, cycle, {}, {})
        places = {i for i, a in enumerate(cycle.batch.attempts) if any(g.attempt is a for g in cycle.groups)}
        drawn = read(run.continuations.path(0))
        assert {row["trajectory"] for row in drawn} == places
        assert all(row["problem"] == cycle.batch.attempts[row["trajectory"]].problem.id for row in drawn)


def test_what_is_kept_depends_on_lengths_and_not_on_the_outcome(small_recipe):
    for name in ("past", "opsd"):
        with session(small_recipe(f"embedded/{name}", "rollout.teacher.max_new_tokens=250")) as parts:
            cycle = parts.loop.cycle(0)
            assert cycle.dropped == 0
            assert cycle.batch.failed
            assert cycle.groups == []
            assert cycle.unexplored == (len(cycle.batch.failed) if name == "past" else 0)
            assert parts.learner.steps["student"] == 1


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a model whose template writes an empty thinking block for a student that is not to think."""
    folder = chatml.model(tmp_path_factory.mktemp("qwen3"), chatml.TURNS + chatml.THINK)
    return [
        f"model.path='{folder}'",
        "prompts.student_kwargs={enable_thinking=false}",
        "prompts.teacher_kwargs={enable_thinking=true}",
        "method.group_max=1",
        "rollout.student.max_new_tokens=8",
        "rollout.teacher.max_new_tokens=8",
    ]


def test_a_first_token_that_the_views_expect_differently_is_not_supervised(small_recipe, thinking, tmp_path):
    with session(small_recipe("embedded/past", *thinking)) as parts:
        cycle, prompts = parts.loop.cycle(0), parts.loop.prompts
        terms = parts.loop.method.student_terms(cycle.batch)
        starts = [prompts.aligned_from(t.live.prompt, t.frozen.prompt, t.tokens) for t in terms if t.frozen]
        assert starts == [parts.loop.align(t).start for t in terms]
        assert min(starts) == 1
        assert cycle.metrics["student/unaligned"] == sum(starts)
        assert cycle.metrics["student/supervised"] == sum(len(t.tokens) for t in terms) - sum(starts)
        assert cycle.metrics["student/stepped"] == 1
        with Recorder(run := RunFolder(tmp_path), {}) as recorder:
            recorder.cycle(0, cycle, {}, {})
        masks = [row["mask"] for row in read(run.rollouts.path(0))]
        assert masks == [[0] * n + [1] * (len(t.tokens) - n) for t, n in zip(terms, starts, strict=True)]
    alike = [text.replace("true", "false") for text in thinking]
    with session(small_recipe("embedded/past", *alike)) as parts:
        metrics = parts.loop.cycle(0).metrics
        assert metrics["student/unaligned"] == 0
        assert metrics["student/supervised"] > 0


def test_inspect_marks_what_is_not_supervised(small_recipe, thinking: list[str]):
    console = Console(record=True, width=200, color_system="truecolor", file=io.StringIO())
    look.inspect(console, small_recipe("embedded/past", *thinking), 0, dry=True)
    text = console.export_text(clear=False)
    assert "note: 1 of " in text
    assert "the student's prompt ends after a thinking block, the teacher's before any thinking" in text
    assert "others of the response like this" in text


def test_solutions_that_do_not_fit_are_dropped_and_counted(small_recipe):
    with session(small_recipe("embedded/sft", "model.max_context=21")) as parts:
        cycles = [parts.loop.cycle(k) for k in range(2)]
        kept = [p for c in cycles for p in c.batch.problems]
        assert 0 < len(kept) < 12
        assert sum(c.dropped for c in cycles) == 12 - len(kept)
        assert all(parts.loop.method.room(p) <= 21 for p in kept)


def test_what_was_sampled_is_what_is_scored(past: Session):
    """Ids are never re-tokenised: the terms hold the sampled ids, even where the text would tokenise otherwise."""
    cycle = past.loop.cycle(0)
    sampled = {a.response.tokens for a in cycle.batch.attempts}
    assert {t.tokens for t in past.loop.method.student_terms(cycle.batch)} == sampled
    eos = past.model.tokenizer.eos_token_id
    assert all(tokens[-1] == eos for tokens in sampled if eos in tokens)


def test_the_student_reads_the_problem_alone(past: Session):
    cycle = past.loop.cycle(0)
    for term in past.loop.method.student_terms(cycle.batch):
        text = past.model.tokenizer.decode(term.live.prompt)
        assert "Reference" not in text
        assert "Attempt" not in text


def test_teacher_continuations_are_not_student_paths(past: Session):
    cycle = past.loop.cycle(0)
    own = {a.response.tokens for a in cycle.batch.attempts}
    drawn = {c.response.tokens for g in cycle.groups for c in g.continuations} - own
    assert drawn
    assert not drawn & {t.tokens for t in past.loop.method.student_terms(cycle.batch)}


def test_what_does_not_fit_is_dropped_and_counted(small_recipe):
    with session(small_recipe("embedded/past", "model.max_context=80")) as parts:
        cycle = parts.loop.cycle(0)
        limit = parts.model.max_context
        assert limit == 80
        assert cycle.dropped > 0
        assert cycle.dropped + len(cycle.batch.attempts) == parts.recipe.rollout.problems_per_cycle
        assert len(cycle.sampled) == parts.recipe.rollout.problems_per_cycle
        cost, line = costs(cycle), summarise(cycle)
        drawn = [c for group in cycle.groups for c in group.drawn]
        assert cost["cost/student_samples"] == line["rollout/sampled"] == len(cycle.sampled)
        assert cost["cost/student_tokens"] == sum(len(a.response.tokens) for a in cycle.sampled)
        assert cost["cost/verifier_calls"] == len(cycle.sampled) + len(drawn)
        assert line["rollout/dropped"] == cycle.dropped
        for a in cycle.batch.attempts:
            assert len(parts.loop.method.teacher_view(a).prompt) + len(a.response.tokens) <= limit


def test_a_cycle_with_nothing_left_takes_no_step(small_recipe):
    with session(small_recipe("embedded/past", "model.max_context=40")) as parts:
        assert parts.loop.attempts(0, parts.loop.take(0)) == []
        cycle = parts.loop.cycle(0)
        assert cycle.dropped == parts.recipe.rollout.problems_per_cycle
        assert parts.learner.steps == {"student": 0, "teacher": 0}


def test_repeated_failures_of_one_problem_draw_their_own_continuations(small_recipe):
    recipe = small_recipe("embedded/past", "rollout.samples_per_problem=8", "rollout.problems_per_cycle=1")
    with session(recipe) as parts:
        attempts = [a for k in range(3) for a in parts.loop.attempts(k, parts.loop.take(k))]
        failed = [a for a in attempts if not a.verdict.correct and a.problem == attempts[0].problem]
        failed = [failed[0], failed[0]]
        one, two = parts.loop._draw(0, failed)([(0, 0), (1, 0)])
        again = parts.loop._draw(0, failed)([(0, 0), (0, 1), (1, 0)])
        # The same draws in another batch: the same tokens; log-probabilities are sums in another order.
        assert [again[0].response.tokens, again[2].response.tokens] == [one.response.tokens, two.response.tokens]
        texts = [c.response.text for c in parts.loop._draw(0, failed)([(i, j) for i in (0, 1) for j in range(8)])]
        assert texts[:8] != texts[8:]


def rendered(parts: Session, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each prompt was rendered in cycle 0."""
    texts: Counter[str] = Counter()
    real = parts.model.tokenizer.apply_chat_template

    def counting(*args, **kwargs):
        texts[text := real(*args, **kwargs)] += 1
        return text

    monkeypatch.setattr(parts.model.tokenizer, "apply_chat_template", counting)
    parts.loop.cycle(0)
    return texts


def test_eight_attempts_take_sixteen_renders(small_recipe, monkeypatch: pytest.MonkeyPatch):
    with session(small_recipe("embedded/past", "rollout.problems_per_cycle=8")) as parts:
        assert rendered(parts, monkeypatch).total() == 16


@pytest.mark.parametrize("name", ["opsd", "sft", "h2sd"])
def test_no_prompt_is_rendered_twice_in_a_cycle(small_recipe, monkeypatch: pytest.MonkeyPatch, name: str):
    samples = "rollout.samples_per_problem=1" if name == "sft" else "rollout.samples_per_problem=3"
    with session(small_recipe(f"embedded/{name}", samples)) as parts:
        texts = rendered(parts, monkeypatch)
        assert set(texts.values()) == {1}
        again = parts.loop.prompts.student(parts.loop.problems[0])
        assert again == parts.loop.prompts.student(parts.loop.problems[0])
        assert texts.total() > len(texts), "what a cycle rendered is forgotten at its end"


def test_a_method_that_explores_some_failures_alone_is_refused(past: Session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(past.loop.method, "explore", lambda failed, draw: [Group(a, ()) for a in failed[1:]])
    with pytest.raises(PastError, match="a Group for every attempt given, in order, or none"):
        past.loop.cycle(0)


GROUPS = ["rollout.problems_per_cycle=3", "rollout.samples_per_problem=4"]


def test_dynamic_sampling_fills_the_batch_with_groups_that_teach(small_recipe):
    """The plain run's groups stay where they teach; the others give way to problems the cycle has not asked."""
    with (
        session(small_recipe("embedded/grpo", *GROUPS)) as plain,
        session(small_recipe("embedded/grpo_dynamic", *GROUPS)) as dynamic,
    ):
        before, after = plain.loop.cycle(0), dynamic.loop.cycle(0)
        groups = by_problem(after.batch.attempts)
        assert [p.id for p in plain.loop.take(1)] == [p.id for p in dynamic.loop.take(1)]
    assert len(groups) == 3
    assert all(plain.loop.method.teaches(group) for group in groups)
    first = by_problem(before.batch.attempts)
    stays = [group for group in first if plain.loop.method.teaches(group)]
    assert 0 < len(stays) < 3, "the seed no longer shows both"
    texts = {a.response.text for group in groups for a in group}
    assert {a.response.text for group in stays for a in group} <= texts
    gave_way = {a.problem.id for group in first if group not in stays for a in group}
    assert gave_way <= {a.problem.id for a in after.replaced}
    assert not gave_way & {a.problem.id for a in after.batch.attempts}
    counted = summarise(after)
    assert counted["rollout/replaced"] == len(after.replaced) > 0
    everything = after.sampled
    assert set(map(id, everything)) == set(map(id, (*after.batch.attempts, *after.replaced)))
    assert counted["rollout/success"] == pytest.approx(sum(a.verdict.correct for a in everything) / len(everything))
    assert costs(after)["cost/student_samples"] == costs(after)["cost/verifier_calls"] == len(everything)


def test_dynamic_sampling_is_bounded(small_recipe):
    """At a temperature near zero no group has spread: so many rounds, then the first draw stands and nothing steps."""
    settings = [*GROUPS, "rollout.dynamic_rounds=2", "rollout.student.temperature=0.001"]
    with session(small_recipe("embedded/grpo_dynamic", *settings)) as parts:
        cycle = parts.loop.cycle(0)
        assert {a.problem.id for a in cycle.batch.attempts} == {p.id for p in parts.loop.take(0)}
    assert len(cycle.replaced) == 2 * 3 * 4
    assert len({a.problem.id for a in cycle.replaced}) == 6
    assert cycle.metrics["student/stepped"] == 0


def test_dynamic_sampling_is_refused_where_every_problem_teaches(small_recipe):
    with pytest.raises(PastError, match=r"rollout\.dynamic_rounds = 4: every problem teaches this method"):
        assemble(small_recipe("embedded/past", "rollout.dynamic_rounds=4"))
