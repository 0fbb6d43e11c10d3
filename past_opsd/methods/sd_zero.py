"""SD-Zero: the policy learns to revise its own responses, and the reviser teaches it on its own prefixes.

    phase 1, before the first cycle: y ~ p_0(. | X), R = V(X, y), y' ~ p_0(. | X, y, P_R), kept if y' is verified
      stage 1, generation    1/n sum over the n tokens of (y, P_R, y') of -log pi( . | X, ...), failed y only
      stage 2, revision      1/|y'| sum_t -log pi( y'_t | X, y, P_R, y'_<t )
    phase 2, q = the revision-trained policy, frozen
      L = mean_i 1/T_i sum_t KL( pi(. | X, y_<t) || q(. | X, y, P_R, y_<t) )

P_R is an instruction that tells the outcome R: unlike in PAST, R stands in the teacher's context by definition. It
follows y inside the same assistant turn, as token ids; the end of y is taken off, y is never tokenised anew.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from past_opsd.core.config import DistillingOptions, MethodOptions, RolloutSection, Sampling
from past_opsd.core.losses import Imitate, Loss, MixedTopK, Stay
from past_opsd.core.nouns import Attempt, Batch, Group, PastError, Term, Tokens, View, Work, derive_seed, mean
from past_opsd.core.prompts import Prompts
from past_opsd.methods import Method, Tools, distill


class Phase1Sampling(Sampling):
    """How phase 1 samples responses and revisions."""

    top_p: float = Field(default=0.9, gt=0, le=1, description="nucleus mass kept; 1 keeps all")
    max_new_tokens: int = Field(default=16384, ge=1, description="longer responses are cut and count as failures")


class Options(DistillingOptions):
    """SD-Zero."""

    phase1_problems: int = Field(default=1088, ge=0, description="training problems of phase 1; 0 leaves phase 1 out")
    phase1_responses: int = Field(default=3, ge=1, description="responses per problem of phase 1")
    phase1_revisions: int = Field(default=3, ge=1, description="revisions per response of phase 1")
    revise_correct: bool = Field(default=False, description="revise correct responses of phase 1 too")
    stage1_target: int = Field(default=5000, ge=0, description="most revisions in stage 1; see stage2_target")
    stage2_target: int = Field(
        default=1000, ge=0, description="most revisions in stage 2; fewer kept shrink both in proportion"
    )
    phase1_epochs: int = Field(default=3, ge=1, description="epochs of each stage")
    phase1_batch: int = Field(default=16, ge=1, description="revisions in one optimizer step of phase 1")
    instruction_failed: str = Field(
        default="Wait, this response is wrong. Let me correct it.", description="P_0, after a failed response"
    )
    instruction_correct: str = Field(
        default="Let me rephrase the above solution.", description="P_1, after a correct response"
    )
    separator: str = Field(default="\n\n", description="stands before and after the instruction")
    divergence: Literal["reverse", "released"] = Field(
        default="reverse",
        description="'reverse' is KL(student, teacher); 'released' halves of both KLs on the teacher's top_k",
    )
    top_k: int = Field(default=64, ge=1, description="entries kept in 'released'")
    temperature: float = Field(default=1.0, gt=0, description="both views' logits are divided by this in phase 2")
    teacher_sync_every: int = Field(
        default=0, ge=0, description="cycles between copies of the student to the teacher; 0: none"
    )
    phase1_sampling: Phase1Sampling = Field(default=Phase1Sampling(), description="how phase 1 samples")

    @model_validator(mode="after")
    def _possible(self) -> Options:
        if self.phase1_problems and not self.stage1_target + self.stage2_target:
            raise ValueError("stage1_target and stage2_target are both 0: phase 1 would train on nothing")
        if not self.instruction_failed or not self.instruction_correct:
            raise ValueError("instruction_failed and instruction_correct must not be empty")
        return self

    @property
    def reads_response(self) -> bool:
        return True

    def small(self, most: int) -> Self:
        """Without phase 1: few short responses may well leave no verified revision to train on."""
        return self.model_copy(update={"phase1_problems": 0})

    def on(self, there: MethodOptions) -> Self:
        """Instructions are words of a vocabulary, lengths those of a task."""
        words = ("separator", "instruction_failed", "instruction_correct", "phase1_problems", "phase1_sampling")
        return self.model_copy(update={key: getattr(there, key) for key in words})

    def losses(self) -> dict[str, Loss]:
        return {"distill": MixedTopK(self.top_k) if self.divergence == "released" else Stay()}


def build(options: Options, prompts: Prompts, rollout: RolloutSection) -> SdZero:
    """The method with its prompts."""
    return SdZero(options, prompts)


@dataclass(frozen=True)
class Revision:
    """A response of phase 1 and a revision of it; `revised.view` reads (X, y, P_R)."""

    initial: Attempt
    revised: Attempt

    def generation(self) -> Term:
        """Stage 1: write the response, the instruction and the revision from the problem alone."""
        prompt = self.initial.view.prompt
        rest = self.revised.view.prompt[len(prompt) :] + self.revised.response.tokens
        return Term("generation", live=View("student", prompt), frozen=None, tokens=rest, loss=Imitate())

    def revision(self) -> Term:
        """Stage 2: write the revision after the response and the instruction."""
        tokens = self.revised.response.tokens
        return Term(
            "revision", live=View("student", self.revised.view.prompt), frozen=None, tokens=tokens, loss=Imitate()
        )


class SdZero(Method):
    """Self-revision training before the first cycle, then distillation of the frozen reviser."""

    tells_outcome = True

    def __init__(self, options: Options, prompts: Prompts):
        self._o = options
        texts = {False: options.instruction_failed, True: options.instruction_correct}
        self._instructions = {
            correct: prompts.encode(options.separator + text + options.separator) for correct, text in texts.items()
        }
        if texts[False] != texts[True] and self._instructions[False] == self._instructions[True]:
            raise PastError(
                "method.instruction_failed and method.instruction_correct become the same tokens: write them in words "
                "that the model's vocabulary has"
            )
        self._cycles = 0
        self._phase1: dict[str, float] = {}

    def prepare(self, tools: Tools) -> None:
        """Phase 1, and its result as the frozen teacher; the student goes on from there with a fresh optimizer."""
        if self._o.phase1_problems:
            kept = self._collect(tools)
            first, second = self.stages(kept)
            self._phase1 |= {"phase1/stage1": len(first), "phase1/stage2": len(second)}
            self._train(tools, [r.generation() for r in first])
            self._train(tools, [r.revision() for r in second])
        tools.copy("student", "teacher")

    def _collect(self, tools: Tools) -> list[Revision]:
        """Verified revisions of the initial policy's own responses, each (X, y, y') once."""
        initial_work = self._initial_work(tools)
        initial = tools.attempt(initial_work, self._o.phase1_sampling)
        asked = [
            (a, Work(a.problem, View("student", self._revising(a)), derive_seed(w.seed, "revision", j)))
            for a, w in zip(initial, initial_work, strict=True)
            if self._o.revise_correct or not a.verdict.correct
            for j in range(self._o.phase1_revisions)
        ]
        work = [(a, w) for a, w in asked if self._fits(tools, w)]
        revised = tools.attempt([w for _, w in work], self._o.phase1_sampling)
        pairs = [Revision(a, r) for (a, _), r in zip(work, revised, strict=True)]
        verified = [p for p in pairs if p.revised.verdict.correct]
        kept = list({(p.revised.view.prompt, p.revised.response.tokens): p for p in verified}.values())
        self._count(initial, revised, kept)
        wanted = self._o.phase1_problems * self._o.phase1_responses
        self._phase1["phase1/dropped"] = wanted - len(initial) + len(asked) - len(work)
        if not kept:
            raise PastError(
                f"phase 1 kept nothing: none of {len(revised)} revisions of {len(initial)} responses was verified; "
                "raise method.phase1_problems or method.phase1_revisions, or change method.instruction_failed"
            )
        return kept

    def _count(self, initial: Sequence[Attempt], revised: Sequence[Attempt], kept: Sequence[Revision]) -> None:
        verified = sum(a.verdict.correct for a in revised)
        self._phase1 |= {
            "cost/phase1_samples": len(initial) + len(revised),
            "cost/phase1_tokens": sum(len(a.response.tokens) for a in (*initial, *revised)),
            "cost/phase1_verifier_calls": len(initial) + len(revised),
            "phase1/responses": len(initial),
            "phase1/response_success": sum(a.verdict.correct for a in initial) / max(1, len(initial)),
            "phase1/revisions": len(revised),
            "phase1/revision_success": verified / max(1, len(revised)),
            "phase1/duplicates": verified - len(kept),
            "phase1/kept": len(kept),
        }

    def _initial_work(self, tools: Tools) -> list[Work]:
        if self._o.phase1_problems > len(tools.problems):
            raise PastError(
                f"method.phase1_problems = {self._o.phase1_problems} is more than the task's "
                f"{len(tools.problems)} problems"
            )
        order = random.Random(derive_seed(tools.seed, "phase1"))
        work = [
            Work(problem, View("student", prompt), derive_seed(tools.seed, "phase1", problem.id, i))
            for problem in order.sample(list(tools.problems), self._o.phase1_problems)
            for prompt in [tools.prompts.student(problem)]
            for i in range(self._o.phase1_responses)
        ]
        return [w for w in work if self._fits(tools, w)]

    def _fits(self, tools: Tools, work: Work) -> bool:
        return len(work.view.prompt) + self._o.phase1_sampling.max_new_tokens <= tools.max_context

    def stages(self, kept: Sequence[Revision]) -> tuple[list[Revision], list[Revision]]:
        """Disjoint: stage 2 takes its share, revisions of correct responses first; stage 1 failed ones of the rest."""
        failed = [r for r in kept if not r.initial.verdict.correct]
        ordered = [r for r in kept if r.initial.verdict.correct] + failed
        targets = self._o.stage1_target + self._o.stage2_target
        share = round(min(len(kept), targets) * self._o.stage2_target / targets)
        second, rest = ordered[:share], ordered[share:]
        first = [r for r in rest if not r.initial.verdict.correct][: self._o.stage1_target]
        return first, second

    def _train(self, tools: Tools, terms: Sequence[Term]) -> None:
        """One stage: epochs of mini-batches, each epoch in an order of its own, then a fresh optimizer."""
        losses: list[float] = []
        for epoch in range(self._o.phase1_epochs if terms else 0):
            name = terms[0].name
            order = list(terms)
            random.Random(derive_seed(tools.seed, "phase1", name, epoch)).shuffle(order)
            losses = []
            for start in range(0, len(order), self._o.phase1_batch):
                step = tools.step("student", mean([t] for t in order[start : start + self._o.phase1_batch]))
                if step["student/lr"] <= 0:
                    raise PastError(
                        "a stage of phase 1 takes more optimizer steps than run.cycles, where "
                        "learner.student.schedule has come down to 0: use schedule = 'constant'"
                    )
                losses.append(step[f"student/{name}/loss"])
            self._phase1[f"phase1/{name}_loss"] = sum(losses) / len(losses)
        self._phase1["phase1/steps"] = self._phase1.get("phase1/steps", 0) + len(losses) * self._o.phase1_epochs
        tools.reset("student")

    def teacher_view(self, attempt: Attempt) -> View:
        """q(. | X, y, P_R, y_<t): the frozen reviser about to write y once more."""
        return View("teacher", self._revising(attempt))

    def _revising(self, attempt: Attempt) -> Tokens:
        """(X, y, P_R) as ids: the response without its end, then the instruction for its outcome."""
        response = attempt.response
        y = response.tokens[:-1] if response.finished else response.tokens
        return attempt.view.prompt + y + self._instructions[attempt.verdict.correct]

    def student_terms(self, batch: Batch) -> list[Term]:
        return mean([self._distill(a)] for a in batch.attempts)

    def _distill(self, attempt: Attempt) -> Term:
        loss = Stay() if self._o.divergence == "reverse" else MixedTopK(self._o.top_k)
        return distill(attempt, self.teacher_view(attempt), loss, self._o.temperature, self._o.at_forks)

    def end_cycle(self, groups: Sequence[Group]) -> None:
        self._cycles += 1

    def sync(self) -> float:
        """1 in every `teacher_sync_every`-th cycle."""
        every = self._o.teacher_sync_every
        return 1.0 if every and (self._cycles + 1) % every == 0 else 0.0

    def metrics(self) -> dict[str, float]:
        return dict(self._phase1)

    def state(self) -> dict[str, Any]:
        return {"cycles": self._cycles, "phase1": dict(self._phase1)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._cycles, self._phase1 = state["cycles"], dict(state["phase1"])
