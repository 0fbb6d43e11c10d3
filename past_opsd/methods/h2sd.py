"""H2SD, a reconstruction: a fixed self-teacher with two hindsight views, chosen by the outcome.

    A_g = (R_g - mean R) / (s_R + eps) within a problem's group of G responses
    success   L_g = -1/T sum_t A_{g,t} log pi(y_t | H_t),
              A_{g,t} = A_g ((1 - lam) + lam clip(exp(sign(A_g) delta_t), 1 +- width)),
              delta_t = log p_0(y_t | X, Y, "rephrase", y_<t) - log pi(y_t | H_t), held constant
    failure   L_g = alpha 1/T sum_t KL( pi(. | H_t) || p_0(. | X, hint, y_<t) )
    L = mean over problems of the mean over the group

A group of successes alone has A = 0 and adds nothing, yet counts in the mean; a group of failures alone is distilled.
The teacher only re-scores the student's own tokens, with the initial weights (the bare base, adapters off). Hints are
made before the first cycle, once for each problem that the run will meet. No code of the method is public;
docs/methods/h2sd.md says what is known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from past_opsd.core.config import DistillingOptions, RolloutSection
from past_opsd.core.losses import Loss, ModulatedReinforce, Reinforce, Stay
from past_opsd.core.nouns import (
    Attempt,
    Batch,
    Group,
    PastError,
    Problem,
    Term,
    View,
    Work,
    by_problem,
    derive_seed,
    group_advantages,
    scale,
)
from past_opsd.core.prompts import Prompts
from past_opsd.methods import Method, Tools, distill, require_groups

COUNTS = (
    "hints/own",
    "hints/column",
    "hints/fallback",
    "cost/phase1_samples",
    "cost/phase1_tokens",
    "cost/phase1_verifier_calls",
)


class Options(DistillingOptions):
    """H2SD, a reconstruction."""

    former = ("epsilon", "hint_limit")

    strength: float = Field(
        default=0.5, ge=0, le=1, description="lam: how far the rephrasing view scales the advantage"
    )
    strength_cycles: int = Field(
        default=50, ge=0, description="lam falls linearly to 0 over so many cycles; 0 keeps it"
    )
    width: float = Field(
        default=0.2, ge=0, le=1, description="the scale of one token's advantage stays within 1 +- width"
    )
    advantage_eps: float = Field(default=1e-4, ge=0, description="added to the group's standard deviation")
    alpha_fail: float = Field(
        default=1.0, ge=0, description="weight of the KL to the hinted view on failures; 0 leaves it out"
    )
    tau: float = Field(default=math.inf, gt=0, description="clip of one vocabulary entry's contribution to that KL")
    punish_failures: bool = Field(default=False, description="failures also take their group's negative advantage")
    temperature: float = Field(default=1.0, gt=0, description="both views' logits are divided by this in the KL")
    hint_tries: int = Field(default=4, ge=0, description="responses in which the base may write a hint that verifies")
    fallback_tokens: int = Field(default=256, ge=1, description="tokens of the reference that stand in for a hint")

    @property
    def reads_response(self) -> bool:
        return True

    def losses(self) -> dict[str, Loss]:
        modulated = ModulatedReinforce(0.0, self.strength, self.width)  # at the start; the strength falls
        return {"modulated": modulated, "distill": Stay(self.tau), "punish": Reinforce(0.0)}


def build(options: Options, prompts: Prompts, rollout: RolloutSection) -> H2sd:
    """The method; the policy gradient reads the student at its sampling temperature."""
    require_groups(rollout, "H2SD")
    blank = Problem("", "", "", "")
    prompts.rephrase(blank, "")  # a recipe without the templates is refused here
    prompts.hint(blank, "")
    return H2sd(options, prompts, rollout)


class H2sd(Method):
    """Modulated policy gradient on successes, hinted reverse KL on failures."""

    tells_outcome = True

    def __init__(self, options: Options, prompts: Prompts, rollout: RolloutSection):
        self._o = options
        self._prompts = prompts
        self._rollout = rollout
        self._cycle = 0
        self._hints: dict[str, str] = {}
        self._counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self._groups: dict[str, float] = {}

    @property
    def strength(self) -> float:
        """lam in the cycle at hand."""
        if not self._o.strength_cycles:
            return self._o.strength
        return self._o.strength * max(0.0, 1 - self._cycle / self._o.strength_cycles)

    def prepare(self, tools: Tools) -> None:
        """A hint for every problem that the run will meet."""
        self.meet(tools, tools.upcoming())

    def meet(self, tools: Tools, problems: Sequence[Problem]) -> None:
        """A hint for each: its column, else one the base writes and the verifier confirms, else a fallback."""
        new = {p.id: p for p in problems if p.id not in self._hints}
        column = {p.id: hint for p in new.values() if (hint := given_hint(p))}
        own = self._written(tools, [p for p in new.values() if p.id not in column])
        fallback = {p.id: self._fallback(p) for p in new.values() if p.id not in column | own}
        for name, hints in (("column", column), ("own", own), ("fallback", fallback)):
            self._counts[f"hints/{name}"] += len(hints)
            self._hints |= hints

    def _written(self, tools: Tools, pending: Sequence[Problem]) -> dict[str, str]:
        """By problem the first response of the base that verifies, of so many as the recipe allows."""
        hints: dict[str, str] = {}
        limit = tools.max_context - self._rollout.teacher.max_new_tokens
        for n in range(self._o.hint_tries):
            work = [
                Work(p, View("base", self._prompts.write_hint(p)), derive_seed(tools.seed, p.id, "hint", n))
                for p in pending
                if p.id not in hints
            ]
            written = tools.attempt([w for w in work if len(w.view.prompt) <= limit], self._rollout.teacher)
            self._counts["cost/phase1_samples"] += len(written)
            self._counts["cost/phase1_tokens"] += sum(len(a.response.tokens) for a in written)
            self._counts["cost/phase1_verifier_calls"] += len(written)
            hints |= {a.problem.id: after_thinking(a.response.text) for a in written if a.verdict.correct}
        return hints

    def _fallback(self, problem: Problem) -> str:
        """The beginning of the reference, and the answer."""
        text, answer = problem.solution, f"\\boxed{{{problem.answer}}}"
        lengths = range(len(text) + 1)
        fits = bisect_right(lengths, self._o.fallback_tokens, key=lambda n: len(self._prompts.encode(text[:n])))
        head = text[: fits - 1]
        return head if answer in head else f"{head} {answer}"

    def _hint(self, problem: Problem) -> str:
        """Whatever a cycle asks has one; where nothing is sampled, as for a quick look, the column or the fallback."""
        return self._hints.get(problem.id) or given_hint(problem) or self._fallback(problem)

    def teacher_view(self, attempt: Attempt) -> View:
        """A verified response to rephrase, or the hint."""
        if attempt.verdict.correct:
            return View("base", self._prompts.rephrase(attempt.problem, attempt.response.text))
        return View("base", self._prompts.hint(attempt.problem, self._hint(attempt.problem)))

    def teaches(self, group: Sequence[Attempt]) -> bool:
        """Successes alone have advantage zero, failures alone are distilled."""
        kind = _kind(group)
        return kind == "mixed" or (kind == "all_failure" and self._o.alpha_fail > 0)

    def student_terms(self, batch: Batch) -> list[Term]:
        """Mean over problems of the mean over each problem's responses."""
        groups = by_problem(batch.attempts)
        kinds = Counter(_kind(group) for group in groups)
        self._groups = {
            f"group/{kind}": kinds[kind] / max(1, len(groups)) for kind in ("mixed", "all_success", "all_failure")
        }
        terms: list[Term] = []
        for group in groups:
            advantages = group_advantages([a.verdict.correct for a in group], self._o.advantage_eps)
            for attempt, advantage in zip(group, advantages, strict=True):
                terms += scale(1 / (len(group) * len(groups)), self._terms(attempt, advantage))
        return terms

    def _terms(self, attempt: Attempt, advantage: float) -> list[Term]:
        if attempt.verdict.correct:
            return [self._modulate(attempt, advantage)] if advantage else []
        terms = scale(self._o.alpha_fail, [self._distill(attempt)]) if self._o.alpha_fail else []
        return terms + ([self._punish(attempt, advantage)] if self._o.punish_failures and advantage else [])

    def _modulate(self, attempt: Attempt, advantage: float) -> Term:
        return Term(
            "modulated",
            live=attempt.view,
            frozen=self.teacher_view(attempt),
            tokens=attempt.response.tokens,
            loss=ModulatedReinforce(advantage, self.strength, self._o.width),
            temperature=self._rollout.student.temperature,
            sampled=attempt.response.logprobs,
        )

    def _distill(self, attempt: Attempt) -> Term:
        o = self._o
        return distill(attempt, self.teacher_view(attempt), Stay(o.tau), o.temperature, o.at_forks)

    def _punish(self, attempt: Attempt, advantage: float) -> Term:
        return Term(
            "punish",
            live=attempt.view,
            frozen=None,
            tokens=attempt.response.tokens,
            loss=Reinforce(advantage),
            temperature=self._rollout.student.temperature,
            sampled=attempt.response.logprobs,
        )

    def end_cycle(self, groups: Sequence[Group]) -> None:
        self._cycle += 1

    def metrics(self) -> dict[str, float]:
        return {"modulation/strength": self.strength} | self._groups | self._counts

    def state(self) -> dict[str, Any]:
        return {"cycle": self._cycle, "hints": self._hints, "counts": self._counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._cycle = int(state["cycle"])
        self._hints = dict(state["hints"])
        self._counts = dict(state["counts"])


def given_hint(problem: Problem) -> str:
    """The problem's own `hint` column, "" where it has none."""
    hint = problem.extra.get("hint")
    if hint is not None and not isinstance(hint, str):
        raise PastError(f"problem {problem.id}: its hint must be a text, found {hint!r}")
    return (hint or "").strip()


def after_thinking(text: str) -> str:
    """What a reader of the answer sees."""
    return text.rpartition("</think>")[2].strip()


def _kind(group: Sequence[Attempt]) -> str:
    wins = sum(a.verdict.correct for a in group)
    if wins == len(group):
        return "all_success"
    return "mixed" if wins else "all_failure"
