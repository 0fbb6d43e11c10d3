"""Vanilla OPSD: a policy reads the reference solution and teaches the student on its own prefixes.

    L = mean_i 1/T_i sum_t D_tau( q(. | H_t, Z) || pi(. | H_t) )            [eq:on-policy-distillation-objective]

The teacher q is the initial policy (the bare base, adapters off) unless the recipe chooses another: the student's own
weights before the step, or an average of the student's past weights. The verifier's outcome is recorded and unused.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from past_opsd.core.config import DistillingOptions, RolloutSection
from past_opsd.core.losses import Loss, Match
from past_opsd.core.nouns import Adapter, Attempt, Batch, Term, View, mean
from past_opsd.core.prompts import Prompts
from past_opsd.methods import Method, Tools, distill

Kind = Literal["base", "current", "ema"]
WEIGHTS: dict[Kind, Adapter] = {"base": "base", "current": "student", "ema": "teacher"}


class Options(DistillingOptions):
    """Vanilla OPSD."""

    baseline = True

    tau: float = Field(default=0.05, gt=0, description="clip of one vocabulary entry's contribution; inf is exact KL")
    temperature: float = Field(default=1.0, gt=0, description="both views' logits are divided by this")
    teacher: Kind = Field(
        default="base", description="the teacher's weights: initial, the student's own, or their average"
    )
    ema_decay: float = Field(default=0.999, ge=0, lt=1, description="what the 'ema' teacher keeps of itself a cycle")

    def losses(self) -> dict[str, Loss]:
        return {"distill": Match(self.tau)}


def build(options: Options, prompts: Prompts, rollout: RolloutSection) -> Opsd:
    """The method with its prompts."""
    return Opsd(options, prompts)


class Opsd(Method):
    """Reference-only teacher, never trained."""

    def __init__(self, options: Options, prompts: Prompts):
        self._options = options
        self._prompts = prompts

    def prepare(self, tools: Tools) -> None:
        """The average starts at the student: two adapters that are both the identity still differ in their A."""
        if self._options.teacher == "ema":
            tools.copy("student", "teacher")

    def teacher_view(self, attempt: Attempt) -> View:
        return View(WEIGHTS[self._options.teacher], self._prompts.reference(attempt.problem))

    def student_terms(self, batch: Batch) -> list[Term]:
        """[eq:on-policy-distillation-objective] with the reference-only teacher."""
        return mean([self._distill(a)] for a in batch.attempts)

    def _distill(self, attempt: Attempt) -> Term:
        o = self._options
        return distill(attempt, self.teacher_view(attempt), Match(o.tau), o.temperature, o.at_forks)

    def sync(self) -> float:
        """The student's share in the average after a cycle."""
        return 1 - self._options.ema_decay if self._options.teacher == "ema" else 0.0
