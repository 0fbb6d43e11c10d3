"""SFT: the student imitates the reference solutions, off-policy.

    L = mean_i 1/|Z_i| sum_t -log pi(Z_t | X, Z_<t)

The student reads its own prompt; only the reference's tokens and the end of the turn are supervised. Nothing is
sampled and nothing is verified in training.
"""

from __future__ import annotations

from past_opsd.core.config import MethodOptions, RolloutSection
from past_opsd.core.losses import Imitate, Loss
from past_opsd.core.nouns import Batch, PastError, Problem, Term, View, mean
from past_opsd.core.prompts import Prompts
from past_opsd.methods import Method


class Options(MethodOptions):
    """Supervised fine-tuning on the reference solutions."""

    def losses(self) -> dict[str, Loss]:
        return {"imitate": Imitate()}


def build(options: Options, prompts: Prompts, rollout: RolloutSection) -> Sft:
    """The method with its prompts."""
    if rollout.samples_per_problem != 1:
        raise PastError(
            f"rollout.samples_per_problem = {rollout.samples_per_problem} has no meaning for SFT, which samples no "
            "response: leave it at 1; rollout.problems_per_cycle is the batch"
        )
    return Sft(prompts)


class Sft(Method):
    """Imitation of the reference solutions."""

    rollouts = False

    def __init__(self, prompts: Prompts):
        self._prompts = prompts

    def room(self, problem: Problem) -> int:
        return len(self._prompts.student(problem)) + len(self._prompts.completion(problem.solution))

    def student_terms(self, batch: Batch) -> list[Term]:
        return mean([self._imitate(problem)] for problem in batch.problems)

    def _imitate(self, problem: Problem) -> Term:
        return Term(
            "imitate",
            live=View("student", self._prompts.student(problem)),
            frozen=None,
            tokens=self._prompts.completion(problem.solution),
            loss=Imitate(),
        )
