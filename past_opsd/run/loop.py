"""The cycle: rollout, verify, route, adapt the teacher, distill the student, publish both adapters.

Snapshots need no copies: the teacher step reads the student before it moves (p_k), the student step reads the teacher
after it moved (q_{k+1}). Nothing outlives a cycle but its records; checkpoints are written at its boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from past_opsd.core.config import RolloutSection, Sampling
from past_opsd.core.nouns import Adapter, Attempt, Batch, Group, PastError, Problem, Term, View, derive_seed, route
from past_opsd.core.prompts import Prompts
from past_opsd.core.sampler import Round
from past_opsd.methods import Method
from past_opsd.rollout.lab import Lab, Work


class Learner(Protocol):
    """What the loop asks of the learner."""

    @property
    def versions(self) -> Mapping[Adapter, int]: ...

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]: ...

    def merge(self, source: Adapter, target: Adapter, weight: float) -> None: ...

    def reset(self, adapter: Adapter) -> None: ...


@dataclass(frozen=True)
class Cycle:
    """What one cycle leaves for the records."""

    batch: Batch
    groups: list[Group]
    dropped: int
    versions: dict[Adapter, int]
    metrics: dict[str, float]


@dataclass
class Loop:
    """The parts of a run, and the cycle that moves them."""

    seed: int
    rollout: RolloutSection
    problems: Sequence[Problem]
    prompts: Prompts
    method: Method
    lab: Lab
    learner: Learner
    max_context: int

    def cycle(self, k: int, phase: Callable[[str], None] = lambda name: None) -> Cycle:
        """One cycle, from p_k and q_k to p_{k+1} and q_{k+1}; no prompt is rendered twice."""
        with self.prompts.once():
            return self._cycle(k, phase)

    def _cycle(self, k: int, phase: Callable[[str], None]) -> Cycle:
        versions = dict(self.learner.versions)
        self.lab.engine.metrics()  # what evaluations and a resume did between cycles is not this cycle's

        phase("rollout")
        asked = self.take(k)
        problems = [p for p in asked if self.method.room(p) <= self.max_context]
        attempts = self.attempts(k, asked) if self.method.rollouts else []  # Y ~ p_k(. | X), R = V(X, Y)
        kept = [a for a in attempts if self._fits(a)]
        batch = route(kept, problems)

        phase("draw")
        groups = self.method.explore(batch.failed, self._draw(k, batch.failed))  # C_j ~ q_k(. | U)
        if groups and tuple(group.attempt for group in groups) != batch.failed:
            raise PastError("explore() of the method must give a Group for every failed attempt, in order, or none")

        phase("adapt")
        metrics = self.learner.step("teacher", self.method.teacher_terms(batch, groups))

        phase("distill")
        metrics |= self.learner.step("student", self.method.student_terms(batch))

        phase("publish")
        weight = self.method.sync()
        if weight:
            self.learner.merge("student", "teacher", weight)
        self.publish()
        self.method.end_cycle(groups)
        wanted = len(asked) * self.rollout.samples_per_problem if self.method.rollouts else 0
        dropped = wanted - len(kept) + len(asked) - len(problems)
        metrics |= self.method.metrics() | self.lab.engine.metrics()
        return Cycle(batch, groups, dropped, versions, metrics)

    def publish(self) -> None:
        """Let the engine serve both adapters as they are now."""
        for adapter in ("student", "teacher"):
            self.lab.engine.publish(adapter, self.learner.versions[adapter])

    def prepare(self) -> None:
        """What the method does before the first cycle."""
        self.method.prepare(self)

    def attempt(self, work: Sequence[Work], sampling: Sampling) -> list[Attempt]:
        """Sample and verify with the adapters as they are now."""
        return self.lab.attempt(work, sampling, self.learner.versions)

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        """One optimizer step outside a cycle, published at once."""
        metrics = self.learner.step(phase, terms)
        self.publish()
        return metrics

    def copy(self, source: Adapter, target: Adapter) -> None:
        """Make one adapter equal to another and forget its optimizer's state."""
        self.learner.merge(source, target, 1.0)
        self.learner.reset(target)
        self.publish()

    def reset(self, adapter: Adapter) -> None:
        """Forget an adapter's optimizer state and step count."""
        self.learner.reset(adapter)

    def take(self, k: int) -> list[Problem]:
        """The problems of cycle k: every epoch is its own permutation, and the position follows from k alone."""
        n, size = len(self.problems), self.rollout.problems_per_cycle
        positions = range(k * size, (k + 1) * size)
        orders = {
            epoch: np.random.default_rng(derive_seed(self.seed, "epoch", epoch)).permutation(n)
            for epoch in {p // n for p in positions}
        }
        return [self.problems[orders[p // n][p % n]] for p in positions]

    def attempts(self, k: int, problems: Sequence[Problem]) -> list[Attempt]:
        """[eq:on-policy-rollout]: the student's complete responses of cycle k, sampled from X alone and verified."""
        n = self.rollout.samples_per_problem
        # Where an epoch ends inside a cycle a problem can come twice; its second samples are draws of their own.
        copies = _copies(problems)
        work = [
            Work(problem, View("student", prompt), derive_seed(self.seed, k, problem.id, "student", sample))
            for problem, copy in zip(problems, copies, strict=True)
            for prompt in [self.prompts.student(problem)]
            for sample in range(copy * n, (copy + 1) * n)
            if len(prompt) + self.rollout.student.max_new_tokens <= self.max_context
        ]
        return self.attempt(work, self.rollout.student)

    def _fits(self, attempt: Attempt) -> bool:
        """Whether the privileged view has room for the response, and for a continuation where one may be drawn."""
        room = len(attempt.response.tokens)
        if self.method.explores and not attempt.verdict.correct:
            room = max(room, self.rollout.teacher.max_new_tokens)
        return len(self.method.teacher_view(attempt).prompt) + room <= self.max_context

    def _draw(self, k: int, failed: Sequence[Attempt]) -> Round:
        """Teacher continuations of the failed attempts, sampled and verified in one batch per round."""
        views = [self.method.teacher_view(a) for a in failed]
        # A problem can fail more than once in a cycle; each failure draws from seeds of its own.
        copies = _copies([a.problem for a in failed])

        def draw(requests: Sequence[tuple[int, int]]) -> list[Attempt]:
            work = [
                Work(
                    failed[i].problem,
                    views[i],
                    derive_seed(self.seed, k, failed[i].problem.id, "teacher", copies[i], index),
                )
                for i, index in requests
            ]
            return self.attempt(work, self.rollout.teacher)

        return draw


def _copies(problems: Sequence[Problem]) -> list[int]:
    """How often each problem has come before in the list."""
    ids = [problem.id for problem in problems]
    return [ids[:i].count(id_) for i, id_ in enumerate(ids)]
