"""OPD: a separate frozen teacher model supervises the student on the student's own prefixes.

    L = mean_i 1/T_i sum_t D_tau( q(. | H_t) || pi(. | H_t) )               [eq:on-policy-distillation-objective]

The teacher is another model with the same vocabulary (`model.expert`) and reads what the student reads: no privilege.
"""

from __future__ import annotations

from pydantic import Field

from past_opsd.core.config import DistillingOptions, RolloutSection
from past_opsd.core.losses import GeneralizedJSD, Loss, Match
from past_opsd.core.nouns import Attempt, Batch, Term, View, mean
from past_opsd.core.prompts import Prompts
from past_opsd.methods import Method, distill


class Options(DistillingOptions):
    """On-policy distillation from a separate teacher model."""

    tau: float = Field(
        default=float("inf"), gt=0, description="clip of one vocabulary entry's contribution; inf is exact"
    )
    beta: float = Field(
        default=0.0, ge=0, le=1, description="0 is KL(teacher, student), 1 the reverse, between them the JSD"
    )
    temperature: float = Field(default=1.0, gt=0, description="both models' logits are divided by this")

    def losses(self) -> dict[str, Loss]:
        return {"distill": GeneralizedJSD(self.beta, self.tau) if self.beta else Match(self.tau)}


def build(options: Options, prompts: Prompts, rollout: RolloutSection) -> Opd:
    """The method; the teacher reads the student's own prompt."""
    return Opd(options)


class Opd(Method):
    """A fixed external teacher without privilege."""

    def __init__(self, options: Options):
        self._options = options

    def teacher_view(self, attempt: Attempt) -> View:
        return View("expert", attempt.view.prompt)

    def student_terms(self, batch: Batch) -> list[Term]:
        """[eq:on-policy-distillation-objective] with a teacher that sees the prefix alone."""
        return mean([self._distill(a)] for a in batch.attempts)

    def _distill(self, attempt: Attempt) -> Term:
        o = self._options
        loss = Match(o.tau) if o.beta == 0 else GeneralizedJSD(o.beta, o.tau)
        return distill(attempt, self.teacher_view(attempt), loss, o.temperature, o.at_forks)
