"""PAST: one teacher adapted from complete student trajectories, then distilled onto the student's own prefixes.

    U = (Y, Z)                                                                             [eq:past-privilege]
    correct   L_+ = 1/T sum_t D_tau( p_k(. | H_t) || q_phi(. | H_t, U) )            [eq:correct-teacher-loss]
    failed    L_- = mixed * L_GRPO + beta_KL * mean over successes of K_j            [eq:failed-teacher-loss]
              K_j = 1/|C_j| sum_s KL( q_phi(. | G_s, U) || p_k(. | G_s) )                [eq:failed-path-kl]
    teacher   L_T = mean of the active branches' means                       [eq:teacher-active-branch-loss]
    student   L_S = mean_i 1/T_i sum_t D_tau( q_{k+1}(. | H_t, U) || pi(. | H_t) ) [eq:student-projection-objective]

The paper's factorial cells, branch, objective, regularisation, clipping and sampler ablations are options. The paper
does not say which standard deviation normalises the advantage; here it is the sample one (n - 1), as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from past_opsd.core.config import DistillingOptions, RolloutSection
from past_opsd.core.losses import GeneralizedJSD, Imitate, Loss, Match, Reinforce, SampledMatch, SampledStay, Stay, TopK
from past_opsd.core.nouns import Attempt, Batch, Group, Term, View, group_advantages, mean, scale
from past_opsd.core.prompts import Prompts
from past_opsd.core.sampler import Controller, ControllerOptions, Round, adaptive, best_ahead, fixed
from past_opsd.methods import Method, distill

DRAW = 1 / 64
"""What one more sequence adds to a round of decoding on a GPU, in rounds: an estimate, not measured."""


class Options(DistillingOptions):
    """PAST, with the paper's ablations as options."""

    former = ("epsilon",)
    headline = True

    trajectory: bool = Field(default=True, description="the teacher reads the student's complete response")
    train_teacher: bool = Field(default=True, description="adapt the teacher; off keeps the initial weights")
    branches: Literal["both", "correct", "failed"] = Field(
        default="both", description="branches that adapt the teacher"
    )
    objective: Literal["kl", "sampled_token", "jsd", "kl_ce", "top_k"] = Field(
        default="kl", description="distribution matching on correct trajectories and in distillation"
    )
    tau: float = Field(default=0.05, gt=0, description="clip of one vocabulary entry's contribution; inf is exact KL")
    clip_correct: bool = Field(default=True, description="clip the correct branch at tau (off: exact KL there)")
    clip_failed: bool = Field(
        default=False, description="clip the failed-path KL at tau too (the paper keeps it exact)"
    )
    jsd_beta: float = Field(default=0.5, gt=0, lt=1, description="weight of the frozen view in the JSD mixture")
    ce_weight: float = Field(default=1.0, ge=0, description="weight of the cross-entropy in 'kl_ce'")
    top_k: int = Field(default=100, ge=1, description="entries kept in 'top_k'")
    top_k_tail: bool = Field(default=False, description="'top_k' keeps the rest of the mass as one bucket")
    beta_kl: float = Field(default=0.05, ge=0, description="weight of the failed-path KL to the student")
    advantage_eps: float = Field(default=1e-4, ge=0, description="added to the group's standard deviation")
    temperature: float = Field(
        default=1.0, gt=0, description="both views' logits are divided by this in matching and KL"
    )
    sampler: Literal["adaptive", "fixed"] = Field(
        default="adaptive", description="how the failed branch draws continuations"
    )
    group_max: int = Field(default=8, ge=1, description="G_max; the group size of 'fixed'")
    warmup_cycles: int = Field(default=10, ge=0, description="cycles before G_base may fall")
    ema_decay: float = Field(default=0.9, ge=0, lt=1, description="decay of the teacher-success average")
    success_threshold: float = Field(
        default=0.4, ge=0, le=1, description="G_base falls while the average stays at or above"
    )
    patience: int = Field(default=5, ge=1, description="cycles at or above the threshold before each step down")
    ahead: Literal["auto"] | NonNegativeInt = Field(
        default="auto",
        description="continuations drawn ahead of need, in fewer rounds: the same groups, what is not needed counts as "
        "cost; 'auto' is 0 on a CPU, on a GPU what takes the least time",
    )

    @model_validator(mode="after")
    def _possible(self) -> Options:
        if not self.train_teacher and self.branches != "both":
            raise ValueError(f"branches = '{self.branches}' has no meaning with train_teacher = false")
        if self.objective == "sampled_token" and not self.clip_correct:
            raise ValueError("clip_correct = false has no meaning with objective = 'sampled_token', which never clips")
        return self

    @property
    def continuations(self) -> int:
        return self.group_max if self.train_teacher else 0

    @property
    def reads_response(self) -> bool:
        return self.trajectory

    def small(self, most: int) -> Self:
        return self.model_copy(update={"group_max": min(self.group_max, most)})

    def losses(self) -> dict[str, Loss]:
        ends = {"correct": self.tau if self.clip_correct else math.inf, "distill": self.tau}
        kinds: dict[str, Callable[[float], Loss]] = {
            "kl": Match,
            "kl_ce": Match,
            "jsd": lambda tau: GeneralizedJSD(self.jsd_beta, tau),
            "top_k": lambda tau: TopK(self.top_k, self.top_k_tail, tau),
        }
        matched: dict[str, Loss] = {"correct": SampledMatch(), "distill": SampledStay()}
        if self.objective != "sampled_token":
            matched = {name: kinds[self.objective](tau) for name, tau in ends.items()}
        ce = {f"{name}/ce": Imitate() for name in ends} if self.objective == "kl_ce" else {}
        stay = Stay(self.tau if self.clip_failed else math.inf)
        return matched | ce | {"stay": stay, "reinforce": Reinforce(0.0)}


def build(options: Options, prompts: Prompts, rollout: RolloutSection) -> Past:
    """The method with its prompts; the policy gradient reads the teacher at its sampling temperature."""
    return Past(options, prompts, rollout.teacher.temperature)


class Past(Method):
    """The cycle's two objectives."""

    singly = True

    def __init__(self, options: Options, prompts: Prompts, teacher_temperature: float):
        self._o = options
        self._prompts = prompts
        self._teacher_temperature = teacher_temperature
        self._controlled = ControllerOptions(
            maximum=options.group_max,
            warmup=options.warmup_cycles,
            decay=options.ema_decay,
            threshold=options.success_threshold,
            patience=options.patience,
        )
        self._controller = Controller.start(self._controlled)
        self.explores = options.train_teacher and options.branches != "correct"

    def teacher_view(self, attempt: Attempt) -> View:
        """q(. | H_t, U): problem, complete response and reference; without the response, Vanilla OPSD's message."""
        if self._o.trajectory:
            prompt = self._prompts.hindsight(attempt.problem, attempt.response.text)
        else:
            prompt = self._prompts.reference(attempt.problem)
        return View("teacher" if self._o.train_teacher else "base", prompt)

    def explore(self, failed: Sequence[Attempt], draw: Round) -> list[Group]:
        if not self.explores:
            return []
        if self._o.sampler == "fixed":
            return fixed(failed, self._o.group_max, draw)
        return adaptive(failed, self._controller.base, self._o.group_max, draw, self._ahead(len(failed)))

    def _ahead(self, failed: int) -> int:
        """Follows from the recipe, the engine and the controller, never from a clock: a resume draws the same."""
        if self._o.ahead != "auto":
            return self._o.ahead
        if not self.wide:
            return 0
        return best_ahead(failed, self._controller.ema or 0.0, self._controller.base, self._o.group_max, DRAW)

    def teacher_terms(self, batch: Batch, groups: Sequence[Group]) -> list[Term]:
        """[eq:teacher-active-branch-loss]: examples within a branch first, then the active branches."""
        if not self._o.train_teacher:
            return []
        correct = mean(self._keep(a) for a in batch.correct) if self._o.branches != "failed" else []
        failed = mean(self._improve(g) for g in groups if g.active) if self._o.branches != "correct" else []
        return mean([correct, failed])

    def _keep(self, attempt: Attempt) -> list[Term]:
        """[eq:correct-teacher-loss]: keep the frozen student's distribution on its own correct trajectory."""
        term = Term(
            "correct",
            live=self.teacher_view(attempt),
            frozen=attempt.view,
            tokens=attempt.response.tokens,
            loss=self._matching(self._o.tau if self._o.clip_correct else math.inf, SampledMatch()),
            temperature=self._o.temperature,
        )
        return self._with_ce(term)

    def _improve(self, group: Group) -> list[Term]:
        """[eq:failed-teacher-loss]: seek verified success, stay close to the student on successful paths."""
        reward = self._reinforce(group) if group.mixed else []
        return reward + scale(self._o.beta_kl, mean([self._stay(c, group)] for c in group.successes))

    def _reinforce(self, group: Group) -> list[Term]:
        """[eq:grpo-objective] with the teacher's own snapshot as the old policy."""
        advantages = group_advantages([c.verdict.correct for c in group.continuations], self._o.advantage_eps)
        return mean(
            [
                Term(
                    "reinforce",
                    live=c.view,
                    frozen=None,
                    tokens=c.response.tokens,
                    loss=Reinforce(advantage),
                    temperature=self._teacher_temperature,
                    sampled=c.response.logprobs,
                )
            ]
            for c, advantage in zip(group.continuations, advantages, strict=True)
        )

    def _stay(self, continuation: Attempt, group: Group) -> Term:
        """[eq:failed-path-kl]: the student reads the continuation's prefix under its own prompt."""
        return Term(
            "stay",
            live=continuation.view,
            frozen=group.attempt.view,
            tokens=continuation.response.tokens,
            loss=Stay(self._o.tau if self._o.clip_failed else math.inf),
            temperature=self._o.temperature,
        )

    def student_terms(self, batch: Batch) -> list[Term]:
        """[eq:student-projection-objective] on every original trajectory, correct and failed."""
        return mean(self._distill(a) for a in batch.attempts)

    def _distill(self, attempt: Attempt) -> list[Term]:
        loss = self._matching(self._o.tau, SampledStay())
        term = distill(attempt, self.teacher_view(attempt), loss, self._o.temperature, self._o.at_forks)
        return self._with_ce(term)

    def _with_ce(self, term: Term) -> list[Term]:
        """The term, and in the ablation "KL + CE" the scaled cross-entropy of its tokens."""
        if self._o.objective != "kl_ce":
            return [term]
        ce = replace(term, name=f"{term.name}/ce", frozen=None, loss=Imitate())
        return [term, *scale(self._o.ce_weight, [ce])]

    def _matching(self, tau: float, sampled: Loss) -> Loss:
        """The distribution objective, [eq:pointwise-clipped-divergence] unless an ablation chose another.

        `sampled` is what the response's own tokens allow, which are draws of the student: where it is the frozen view
        the same direction, where it is the live view the reverse.
        """
        match self._o.objective:
            case "kl" | "kl_ce":
                return Match(tau)
            case "jsd":
                return GeneralizedJSD(self._o.jsd_beta, tau)
            case "top_k":
                return TopK(self._o.top_k, self._o.top_k_tail, tau)
            case "sampled_token":
                return sampled

    def end_cycle(self, groups: Sequence[Group]) -> None:
        successes, samples = sum(len(g.successes) for g in groups), sum(len(g.drawn) for g in groups)
        self._controller = self._controller.update(successes, samples)

    def metrics(self) -> dict[str, float]:
        return {"sampling/g_base": self._controller.base, "sampling/success_ema": self._controller.ema or 0.0}

    def state(self) -> dict[str, Any]:
        return {"controller": self._controller.to_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._controller = Controller.from_dict(self._controlled, state["controller"])
