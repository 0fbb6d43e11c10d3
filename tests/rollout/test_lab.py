from __future__ import annotations

from collections.abc import Sequence

from past_opsd.core.nouns import Problem, Response, Verdict
from past_opsd.rollout.lab import Lab, Work
from past_opsd.run.train import Session


def test_attempts_come_back_in_order_with_their_own_verdicts(past: Session):
    problems = past.loop.take(0)
    work = [Work(a.problem, a.view, i) for i, a in enumerate(past.loop.attempts(0, past.loop.take(0)))]
    attempts = past.loop.lab.attempt(work[::-1], past.recipe.rollout.student, past.model.versions)[::-1]
    assert [a.problem for a in attempts] == problems
    for a in attempts:
        assert a.verdict.correct == (a.verdict.answer == a.problem.answer)


def test_the_verifier_reads_the_problem_and_the_response_and_nothing_else(past: Session):
    seen: list[tuple[Problem, Response]] = []

    class Recording:
        identity = "recording"

        def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
            seen.extend(items)
            return [Verdict(False, "wrong")] * len(items)

    first = past.loop.attempts(0, past.loop.take(0))
    lab = Lab(past.loop.lab.engine, Recording())
    made = lab.attempt([Work(a.problem, a.view, 1) for a in first], past.recipe.rollout.student, past.model.versions)
    assert seen == [(a.problem, a.response) for a in made]


def test_no_work_asks_nobody():
    assert Lab(engine=None, verifier=None).attempt([], None, {}) == []
