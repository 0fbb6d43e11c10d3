"""Sample and verify: the one door to responses, used by rollouts, continuations and Avg@k alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from past_opsd.config import Sampling
from past_opsd.engines import Engine, Request
from past_opsd.types import Adapter, Attempt, Problem, View
from past_opsd.verifiers import Verifier


@dataclass(frozen=True, slots=True)
class Work:
    """One response wanted: who reads what for which problem, and the seed that decides the draw."""

    problem: Problem
    view: View
    seed: int


@dataclass
class Lab:
    """An engine and a verifier."""

    engine: Engine
    verifier: Verifier

    def attempt(self, work: Sequence[Work], sampling: Sampling, versions: Mapping[Adapter, int]) -> list[Attempt]:
        """One verified attempt per item, in order."""
        if not work:
            return []
        responses = self.engine.sample([Request(w.view, w.seed) for w in work], sampling, versions)
        verdicts = self.verifier.verify([(w.problem.answer, r) for w, r in zip(work, responses, strict=True)])
        return [Attempt(w.problem, w.view, r, v) for w, r, v in zip(work, responses, verdicts, strict=True)]
