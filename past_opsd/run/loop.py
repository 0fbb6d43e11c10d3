"""The cycle: rollout, verify, route, adapt the teacher, distill the student, publish both adapters.

Snapshots need no copies: the teacher step reads the student before it moves (p_k), the student step reads the teacher
after it moved (q_{k+1}). Nothing outlives a cycle but its records; checkpoints are written at its boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from past_opsd.core.config import RolloutSection, Sampling
from past_opsd.core.nouns import (
    Adapter,
    Attempt,
    Batch,
    Group,
    PastError,
    Problem,
    Term,
    Tokens,
    View,
    by_problem,
    derive_seed,
    route,
)
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


Draw = Callable[[Sequence[Work], Sampling], list[Attempt]]
Door = Callable[[Draw, Sequence[Work], Sampling], list[Attempt]]


@dataclass(frozen=True)
class Cycle:
    """What one cycle leaves for the records."""

    batch: Batch
    groups: list[Group]
    sampled: tuple[Attempt, ...]
    """All of the student's responses, also those that no phase could read."""
    dropped: int
    """Examples that were asked for and not trained on: no room to sample a response, or to read it with privilege."""
    starts: tuple[int, ...]
    """The first token of each of the batch's attempts that the teacher supervises, in order."""
    unexplored: int
    """Failed responses that are distilled, and of which no continuation was drawn: none would fit."""
    versions: dict[Adapter, int]
    metrics: dict[str, float]
    replaced: tuple[Attempt, ...] = ()
    """Of those, what dynamic sampling gave up."""


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
    cycles: int
    door: Door = lambda draw, work, sampling: draw(work, sampling)
    """Through which samples come; before the first cycle `phase1.py` keeps them there."""

    def __post_init__(self) -> None:
        self.method.wide = bool(getattr(self.lab.engine, "wide", False))
        if self.rollout.dynamic_rounds and type(self.method).teaches is Method.teaches:
            raise PastError(
                f"rollout.dynamic_rounds = {self.rollout.dynamic_rounds}: every problem teaches this method, so none "
                "would be replaced; set it to 0, its default"
            )

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
        sampled = self.attempts(k, asked) if self.method.rollouts else []  # Y ~ p_k(. | X), R = V(X, Y)
        kept = [a for a in sampled if self._room(a) >= len(a.response.tokens)]
        used, more = self._filled(k, asked, kept)
        batch = route(used, problems)

        phase("draw")
        # Room limits what is explored, never what is distilled: else a tight context would choose by outcome.
        open_ = [a for a in batch.failed if self._room(a) >= self.rollout.teacher.max_new_tokens]
        groups = self._explore(k, open_)  # C_j ~ q_k(. | U)
        if groups and not _same([group.attempt for group in groups], open_):
            raise PastError("explore() of the method must give a Group for every attempt given, in order, or none")

        phase("adapt")
        metrics = self._step("teacher", self.method.teacher_terms(batch, groups))

        phase("distill")
        metrics |= self._step("student", self.method.student_terms(batch))

        phase("publish")
        weight = self.method.sync()
        if weight:
            self.learner.merge("student", "teacher", weight)
        self.publish()
        self.method.end_cycle(groups)
        wanted = len(asked) * self.rollout.samples_per_problem if self.method.rollouts else 0
        dropped = wanted - len(kept) + len(asked) - len(problems)
        unexplored = len(batch.failed) - len(open_) if self.method.explores else 0
        metrics |= self.method.metrics() | self.lab.engine.metrics()
        starts = tuple(self._start(a.view, self.method.teacher_view(a), a.response.tokens) for a in batch.attempts)
        stays = set(map(id, used))
        replaced = tuple(a for a in (*kept, *more) if id(a) not in stays)
        return Cycle(batch, groups, (*sampled, *more), dropped, starts, unexplored, versions, metrics, replaced)

    def _step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        """One optimizer step, and how many positions its terms with two views supervise and leave out."""
        aligned = [self.align(term) for term in terms]
        compared = [term for term in aligned if term.frozen is not None and term.weight]
        self.lab.rest()
        metrics = self.learner.step(phase, [term for term in aligned if term.supervised])
        if compared:
            metrics[f"{phase}/supervised"] = sum(term.supervised for term in compared)
            metrics[f"{phase}/unaligned"] = sum(term.start for term in compared)
        return metrics

    def align(self, term: Term) -> Term:
        """The term from the first token on that both of its views predict from the same place of the answer."""
        if term.frozen is None:
            return term
        return replace(term, start=max(term.start, self._start(term.live, term.frozen, term.tokens)))

    def _start(self, one: View, other: View, tokens: Tokens) -> int:
        return self.prompts.aligned_from(one.prompt, other.prompt, tokens)

    def _filled(self, k: int, asked: Sequence[Problem], first: list[Attempt]) -> tuple[list[Attempt], list[Attempt]]:
        """Dynamic sampling: problems that teach nothing give way to new ones; returns what is used and what was drawn.

        The new ones are those not asked in this cycle, in an order that follows from the seed and k alone, so neither a
        resume nor the other cycles' problems depend on what was replaced. Where nothing teaches, the first draw stands.
        """
        rounds = self.rollout.dynamic_rounds
        spare = self._spare(k, asked) if rounds else []
        teaching = [group for group in by_problem(first) if not rounds or self.method.teaches(group)]
        drawn: list[Attempt] = []
        for _ in range(rounds):
            wanted = len(asked) - len(teaching)
            new, spare = spare[:wanted], spare[wanted:]
            if not new:
                break
            found = self.attempts(k, new)
            fitting = by_problem([a for a in found if self._room(a) >= len(a.response.tokens)])
            teaching += [group for group in fitting if self.method.teaches(group)]
            drawn += found
        return ([a for group in teaching for a in group] if rounds and teaching else first), drawn

    def _spare(self, k: int, asked: Sequence[Problem]) -> list[Problem]:
        """The problems that a cycle has not asked, in an order of its own."""
        ids = {problem.id for problem in asked}
        order = np.random.default_rng(derive_seed(self.seed, "dynamic", k)).permutation(len(self.problems))
        return [self.problems[i] for i in order if self.problems[i].id not in ids]

    def publish(self) -> None:
        """Let the engine serve both adapters as they are now."""
        for adapter in ("student", "teacher"):
            self.lab.engine.publish(adapter, self.learner.versions[adapter])

    def prepare(self) -> None:
        """What the method does before the first cycle."""
        self.method.prepare(self)

    def attempt(self, work: Sequence[Work], sampling: Sampling) -> list[Attempt]:
        """Sample and verify with the adapters as they are now."""
        return self.door(self._attempt, work, sampling)

    def _attempt(self, work: Sequence[Work], sampling: Sampling) -> list[Attempt]:
        return self.lab.attempt(work, sampling, self.learner.versions)

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        """One optimizer step outside a cycle, published at once."""
        self.lab.rest()
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

    def upcoming(self) -> list[Problem]:
        """The problems of all cycles, each once, in the order in which they come."""
        return list({p.id: p for k in range(self.cycles) for p in self.take(k)}.values())

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
        self.method.meet(self, [w.problem for w in work])
        return self.attempt(work, self.rollout.student)

    def _room(self, attempt: Attempt) -> int:
        """Tokens that the context leaves after the privileged view's prompt."""
        return self.max_context - len(self.method.teacher_view(attempt).prompt)

    def _explore(self, k: int, failed: Sequence[Attempt]) -> list[Group]:
        return self.method.explore(failed, self._draw(k, failed))

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


def _same(some: Sequence[Attempt], others: Sequence[Attempt]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _copies(problems: Sequence[Problem]) -> list[int]:
    """How often each problem has come before in the list."""
    ids = [problem.id for problem in problems]
    return [ids[:i].count(id_) for i, id_ in enumerate(ids)]
