"""Vanilla OPSD: the initial policy reads the reference solution and teaches the student on its own prefixes.

    L = mean_i 1/T_i sum_t D_tau( p_0(. | H_t, Z) || pi(. | H_t) )          [eq:on-policy-distillation-objective]

The teacher keeps the initial weights (the bare base, adapters off). The verifier's outcome is recorded and unused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from past_opsd.config import RolloutSection, Section
from past_opsd.losses import Match
from past_opsd.prompts import Prompts
from past_opsd.sampling import Draw, Draws
from past_opsd.types import Attempt, Batch, Group, Term, View, mean


class Options(Section):
    """Vanilla OPSD."""

    tau: float = Field(0.05, gt=0, description="clip of one vocabulary entry's contribution; inf is exact KL")
    temperature: float = Field(1.0, gt=0, description="both views' logits are divided by this")


def build(options: Options, prompts: Prompts, rollout: RolloutSection) -> Opsd:
    """The method with its prompts."""
    return Opsd(options, prompts)


class Opsd:
    """Reference-only teacher, never adapted."""

    def __init__(self, options: Options, prompts: Prompts):
        self._options = options
        self._prompts = prompts

    def teacher_view(self, attempt: Attempt) -> View:
        return View("base", self._prompts.reference(attempt.problem))

    def explore(self, failed: Sequence[Attempt], draw: Draw) -> list[Draws]:
        return []

    def teacher_terms(self, batch: Batch, groups: Sequence[Group]) -> list[Term]:
        return []

    def student_terms(self, batch: Batch) -> list[Term]:
        """[eq:on-policy-distillation-objective] with the reference-only teacher."""
        return mean([self._distill(a)] for a in batch.attempts)

    def _distill(self, attempt: Attempt) -> Term:
        return Term(
            "distill",
            live=attempt.view,
            frozen=self.teacher_view(attempt),
            tokens=attempt.response.tokens,
            loss=Match(self._options.tau),
            temperature=self._options.temperature,
        )

    def end_cycle(self, draws: Sequence[Draws]) -> None:
        return None

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        return None
