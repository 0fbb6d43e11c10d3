"""Sample and verify: the one door to responses, used by rollouts, continuations and Avg@k alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    """Entered around the verifier's work, so that its time is told apart from sampling."""

    def attempt(self, work: Sequence[Work], sampling: Sampling, versions: Mapping[Adapter, int]) -> list[Attempt]:
        """One verified attempt per item, in order."""
        if not work:
            return []
        responses = self.engine.sample([Request(w.view, w.seed) for w in work], sampling, versions)
        with self.span("verify"):
            verdicts = self.verifier.verify([(w.problem, r) for w, r in zip(work, responses, strict=True)])
        return [Attempt(w.problem, w.view, r, v) for w, r, v in zip(work, responses, verdicts, strict=True)]
