"""GRPO: the student learns from the outcomes of several own responses to one problem; nobody teaches it.

    A_g = (R_g - mean R) / (s_R + eps)                                               [eq:grpo-advantage-ratio]
    L = mean over the responses of all groups of
        -1/T_g sum_t min( rho A_g, clip(rho, 1 +- epsilon) A_g )                           [eq:grpo-objective]
        + beta/T_g sum_t KL( pi(. | H_t) || p_0(. | H_t) )

With one optimizer step per snapshot the ratio rho is exactly 1: no epsilon binds, and there is no option for one.
A group without spread has advantage zero and still counts in the mean, as in the paper's expectation. The reference
penalty is optional; the reference is the initial policy (the bare base, adapters off).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from past_opsd.core.config import MethodOptions, RolloutSection
from past_opsd.core.losses import Loss, Reinforce, Stay
from past_opsd.core.nouns import Attempt, Batch, Term, View, by_problem, group_advantages, mean, scale
from past_opsd.core.prompts import Prompts
from past_opsd.methods import Method, require_groups


class Options(MethodOptions):
    """GRPO on the student."""

    former = ("epsilon",)

    advantage_eps: float = Field(default=1e-4, ge=0, description="added to the group's standard deviation")
    beta: float = Field(default=0.0, ge=0, description="weight of the exact KL to the initial policy; 0 leaves it out")

    def losses(self) -> dict[str, Loss]:
        return {"reinforce": Reinforce(0.0), "stay": Stay()}


def build(options: Options, prompts: Prompts, rollout: RolloutSection) -> Grpo:
    """The method; the policy gradient reads the student at its sampling temperature."""
    require_groups(rollout, "GRPO")
    return Grpo(options, rollout.student.temperature)


class Grpo(Method):
    """Group-relative policy gradient on the student's own responses."""

    def __init__(self, options: Options, temperature: float):
        self._options = options
        self._temperature = temperature
        self._shares: dict[str, float] = {}

    def teaches(self, group: Sequence[Attempt]) -> bool:
        """A group without spread has advantage zero."""
        return len({a.verdict.correct for a in group}) > 1

    def student_terms(self, batch: Batch) -> list[Term]:
        """[eq:grpo-objective] over all groups."""
        groups = by_problem(batch.attempts)
        wins = [sum(a.verdict.correct for a in group) / len(group) for group in groups]
        self._shares = {
            "group/mixed": _share([0 < w < 1 for w in wins]),
            "group/all_success": _share([w == 1 for w in wins]),
            "group/all_failure": _share([w == 0 for w in wins]),
        }
        return mean(terms for group in groups for terms in self._group(group))

    def _group(self, group: Sequence[Attempt]) -> list[list[Term]]:
        """The terms of each response."""
        advantages = group_advantages([a.verdict.correct for a in group], self._options.advantage_eps)
        return [
            [self._reinforce(attempt, advantage), *scale(self._options.beta, [self._stay(attempt)])]
            for attempt, advantage in zip(group, advantages, strict=True)
        ]

    def _reinforce(self, attempt: Attempt, advantage: float) -> Term:
        return Term(
            "reinforce",
            live=attempt.view,
            frozen=None,
            tokens=attempt.response.tokens,
            loss=Reinforce(advantage),
            temperature=self._temperature,
            sampled=attempt.response.logprobs,
        )

    def _stay(self, attempt: Attempt) -> Term:
        """The penalty, on every response whatever its outcome."""
        return Term(
            "stay",
            live=attempt.view,
            frozen=View("base", attempt.view.prompt),
            tokens=attempt.response.tokens,
            loss=Stay(),
            temperature=self._temperature,
        )

    def metrics(self) -> dict[str, float]:
        return dict(self._shares)


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
