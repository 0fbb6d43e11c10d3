"""Micro-batches to one optimizer step.

A micro-batch is one live forward, one frozen forward an adapter under no_grad, one call of the fused loss for each set
of losses, and one backward; frozen states are released with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from past_opsd.core.config import LearnerSection, OptimizerSection
from past_opsd.core.losses import Loss
from past_opsd.core.nouns import Adapter, PastError, Term, View
from past_opsd.learner import forks
from past_opsd.learner.diagnostics import Log
from past_opsd.learner.plan import Bundle, Weighted, plan, pulls
from past_opsd.policy import fused, packing
from past_opsd.policy.model import TRAINABLE, Model

IDENTITY = "identity"
EVERY_BIT = 10
"""Steps of an adapter from one in which every bit of the other is compared to the next."""
Member = tuple[slice, View | None, list[Weighted]]
"""A sequence in a loss call: where it stands in the micro-batch's live states, the frozen view it reads, its terms."""


class NonFiniteError(PastError):
    """A loss or gradient is not a number; the step was not taken and both adapters are as they were."""


def learning_rate(section: OptimizerSection, step: int, total: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then the schedule down to zero at `total`."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    progress = min(1.0, (step - section.warmup_steps) / max(1, total - section.warmup_steps))
    if section.schedule == "linear":
        return section.lr * (1 - progress)
    if section.schedule == "cosine":
        return section.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return section.lr


class Learner:
    """Two adapters, two optimizers, two step counters; one step per call."""

    def __init__(self, model: Model, section: LearnerSection, total_steps: int, drifts: bool = False):
        """`drifts`: the engine's log-probabilities are not those of the trainer's arithmetic."""
        # Now, not after the first rollouts.
        self.implementation: fused.Implementation
        self.implementation, self.note = fused.settle(section.implementation, model.head.device)
        self._model = model
        self._section = section
        self._total = total_steps
        self._cap = section.importance_cap if drifts else 0.0
        self._sections: dict[Adapter, OptimizerSection] = {"student": section.student, "teacher": section.teacher}
        self.optimizers = {a: self._optimizer(a) for a in TRAINABLE}
        self.steps: dict[Adapter, int] = {"student": 0, "teacher": 0}
        self.span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
        """Entered around the checks of which adapter moved, so that their time is told apart."""

    def _optimizer(self, adapter: Adapter) -> torch.optim.AdamW:
        section = self._sections[adapter]
        parameters = list(self._model.parameters(adapter).values())
        return torch.optim.AdamW(
            parameters,
            lr=section.lr,
            betas=(section.beta1, section.beta2),
            eps=section.eps,
            weight_decay=section.weight_decay,
        )

    @property
    def versions(self) -> dict[Adapter, int]:
        """The adapters' versions: each optimizer step makes a new one."""
        return self._model.versions

    @torch.no_grad()
    def merge(self, source: Adapter, target: Adapter, weight: float) -> None:
        """target <- (1 - weight) * target + weight * source, factor by factor of the LoRA product: a step of an EMA."""
        pairs = zip(self._model.parameters(source).values(), self._model.parameters(target).values(), strict=True)
        for mine, theirs in pairs:
            theirs.lerp_(mine, weight)
        self._model.bump(target)

    def reset(self, adapter: Adapter) -> None:
        """A fresh optimizer and step count."""
        self.optimizers[adapter] = self._optimizer(adapter)
        self.steps[adapter] = 0

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        """One optimizer step on the sum of the terms; where none of them pulls, no step, and nothing advances.

        Returns the phase's diagnostics. Raises `NonFiniteError` before anything moved.
        """
        stray = {t.live.adapter for t in terms} - {phase}
        if stray:
            raise ValueError(f"the {phase} step got live terms of {sorted(stray)}")
        if not any(map(pulls, terms)):
            return {f"{phase}/stepped": 0.0}  # AdamW would follow its momentum
        other: Adapter = "teacher" if phase == "student" else "student"
        bits = self.steps[phase] % EVERY_BIT == 0
        with self.span(IDENTITY):
            frozen = self._model.mark(other, bits)
        optimizer = self.optimizers[phase]
        try:
            with self._model.training(phase):
                self._check_trainable(phase)
                log = self._accumulate(phase, terms)
                norm = self._clip(phase)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(self._sections[phase], self.steps[phase], self._total)
                optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)
        self.steps[phase] += 1
        self._model.bump(phase)
        with self.span(IDENTITY):
            if self._model.mark(other, bits) != frozen:
                raise RuntimeError(f"the {other} adapter moved during the {phase} step")
            if not self._model.world.alone:
                self._model.world.agree(f"{phase} adapter after a step", self._model.fingerprint(phase))
        metrics = {f"{phase}/{key}": value for key, value in log.summary().items()}
        extra = {"stepped": 1.0, "grad_norm": norm, "lr": optimizer.param_groups[0]["lr"], "nonfinite": log.nonfinite}
        return metrics | {f"{phase}/{key}": value for key, value in extra.items()}

    def gradient(self, phase: Adapter, terms: Sequence[Term]) -> tuple[float, Tensor]:
        """The objective and its gradient as one vector, without a step: for comparing implementations."""
        try:
            with self._model.training(phase):
                log = self._accumulate(phase, terms)
            pieces = [p.grad.flatten() for p in self._model.parameters(phase).values() if p.grad is not None]
            return log.objective, torch.cat(pieces).clone()
        finally:
            self.optimizers[phase].zero_grad(set_to_none=True)

    def _check_trainable(self, phase: Adapter) -> None:
        expected = set(self._model.parameters(phase))
        if self._model.trainable() != expected:
            raise RuntimeError(f"other parameters than the {phase} adapter's are trainable in its phase")

    def _accumulate(self, phase: Adapter, terms: Sequence[Term]) -> Log:
        """The gradient of all terms, in every process; and the diagnostics of all terms."""
        for parameter in self._model.parameters(phase).values():
            # Made by the first backward, they would stand in the gaps its activations leave, and the next forward's
            # would not fit there any more.
            parameter.grad = torch.zeros_like(parameter)
        log = Log()
        failures: list[str] = []
        plans = self._plan(terms)
        rounds = max(map(len, plans)) if self._model.sharded else len(plans[self._model.world.rank])
        for n in range(rounds):
            failures += self._round(phase, n, plans, log)
        return log if self._model.world.alone else self._add_up(phase, log, failures)

    def _plan(self, terms: Sequence[Term]) -> list[list[list[Bundle]]]:
        """Every rank's micro-batches; rows are merged where every network can read such rows."""
        section = self._section
        networks = [self._model] if self._model.expert is None else [self._model, self._model.expert]
        merge = section.shared_prompts and all(network.shares_prompts for network in networks)
        worth = self._model.worth if merge else None
        size = self._model.split.size
        groups = plan(terms, section.reduction, section.token_budget, worth, self._model.world.size // size)
        return [own for own in groups for _ in range(size)]

    def _round(self, phase: Adapter, n: int, plans: Sequence[Sequence[Sequence[Bundle]]], log: Log) -> list[str]:
        """One micro-batch; returns what failed, for the ranks to stop together.

        The ranks of a sharded base make the same forwards and backwards, if need be on a single token and for nothing.
        """
        own = plans[self._model.world.rank]
        chosen: Sequence[Bundle] = own[n] if n < len(own) else ()
        frozen = self._frozen_states(chosen)
        if self._model.sharded:
            others = [_frozen_adapters(other[n]) for other in plans if n < len(other)]
            self._model.idle(max(others) - _frozen_adapters(chosen))
        reads = [read for item in chosen for read in item.live]
        # [sum T, H]: the states that predict the tokens of each path, one path after the other; of T this rank's part.
        live = self._model.hidden(reads or [(View(phase, (0,)), (0,))], [len(item.paths) for item in chosen])
        grad: Tensor | None = None
        failures: list[str] = []
        try:
            grad = self._gradient(phase, chosen, live.detach(), frozen, log)
        except NonFiniteError as error:
            if self._model.world.alone:
                raise
            failures.append(str(error))
        live.backward(torch.zeros_like(live) if grad is None else grad.to(live.dtype))
        return failures

    def _add_up(self, phase: Adapter, log: Log, failures: Sequence[str]) -> Log:
        """Gradients and diagnostics over the ranks; a failure on one of them is everybody's, before anything moves."""
        world = self._model.world
        reports = world.gather((log, failures))
        failed = [text for _, texts in reports for text in texts]
        if failed:
            raise NonFiniteError(failed[0])
        world.sum([p.grad for p in self._model.parameters(phase).values() if p.grad is not None])
        whole = Log()
        for own, _ in reports[:: self._model.split.size]:  # ranks that share rows log the same
            whole.merge(own)
        return whole

    @torch.no_grad()
    def _frozen_states(self, chosen: Sequence[Bundle]) -> dict[packing.Read, Tensor]:
        """Hidden states [T, H] of every frozen view in the micro-batch, one forward per adapter; of T as live."""
        wanted: dict[Adapter, list[list[packing.Read]]] = defaultdict(list)
        for item in chosen:
            for adapter, rows in item.frozen.items():
                wanted[adapter] += rows
        states: dict[packing.Read, Tensor] = {}
        for rows in wanted.values():
            reads = [read for row in rows for read in row]
            hidden = self._model.hidden(reads, list(map(len, rows)))
            parts = torch.split(hidden, [self._model.split.part(len(tokens)) for _, tokens in reads])
            states.update(zip(reads, parts, strict=True))
        return states

    def _gradient(
        self,
        phase: Adapter,
        chosen: Sequence[Bundle],
        live: Tensor,
        frozen: dict[packing.Read, Tensor],
        log: Log,
    ) -> Tensor:
        """d(sum of weighted losses)/d(live hidden states), [sum T, H]; sequences with the same losses make one call."""
        grad = torch.zeros_like(live, dtype=torch.float32)
        calls: dict[tuple[float, bool, bool, tuple[tuple[str, str, bool], ...]], list[Member]] = defaultdict(list)
        start = 0
        for path in (path for item in chosen for path in item.paths):
            span = slice(start, start + self._model.split.part(len(path.tokens)))
            start = span.stop
            for (view, temperature), terms in path.by_frozen().items():
                losses = tuple(sorted((t.name, Loss.of(t.loss).key, bool(t.sampled)) for t, _ in terms))
                expert = view is not None and view.adapter == "expert"
                calls[temperature, expert, view is None, losses].append((span, view, terms))
        failures: list[NonFiniteError] = []
        for (temperature, *_), members in calls.items():
            try:
                self._call(phase, members, temperature, live, frozen, grad, log)
            except NonFiniteError as error:  # ranks that share rows make all calls together
                failures.append(error)
        if failures:
            raise failures[0]
        return grad

    def _call(
        self,
        phase: Adapter,
        members: Sequence[Member],
        temperature: float,
        live: Tensor,
        frozen: dict[packing.Read, Tensor],
        grad: Tensor,
        log: Log,
    ) -> None:
        """The fused loss on some sequences, its gradient added to theirs in `grad`, its diagnostics to the log.

        Ranks that share rows compute it each at its own positions, and know the values and diagnostics of all.
        """
        lengths = [len(terms[0][0].tokens) for _, _, terms in members]
        here = self._model.split.here(lengths, live.device)
        index = torch.cat([torch.arange(span.start, span.stop) for span, _, _ in members]).to(live.device)
        tokens = torch.tensor([y for _, _, terms in members for y in terms[0][0].tokens], device=live.device)[here]
        views = [frozen[view, terms[0][0].tokens] for _, view, terms in members if view is not None]
        expert = self._model.expert if any(v is not None and v.adapter == "expert" for _, v, _ in members) else None
        sequences = [terms for _, _, terms in members]
        jobs = stack_jobs(sequences, live.device)
        own = live[index]

        def run(states: Tensor | None, jobs: Sequence[fused.Job]) -> fused.Result:
            found = fused.run(
                self.implementation,
                own,
                states,
                self._model.head,
                self._model.head_bias,
                tokens,
                [job.at(here) for job in jobs],
                temperature=temperature,
                frozen_head=None if expert is None else expert.head,
                frozen_bias=None if expert is None else expert.head_bias,
                budget_bytes=self._section.loss_memory_mib << 20,
            )
            return found.each(lambda column: self._model.split.gather(column, lengths))

        forked = any(term.forks for terms in sequences for term, _ in terms)
        drifted = self._cap > 0 and any(term.sampled for terms in sequences for term, _ in terms)
        before = run(None, []).live if forked or drifted else {}
        if forked:
            jobs = weigh_forks(jobs, sequences, before["entropy"])
        factors = importance(sequences, before["token_logp"], self._cap) if drifted else {}
        jobs |= {name: replace(jobs[name], weight=jobs[name].weight * factor) for name, factor in factors.items()}
        result = run(torch.cat(views) if views else None, list(jobs.values()))
        for name, values in zip(jobs, result.values, strict=True):
            if not bool(torch.isfinite(values).all()):
                raise NonFiniteError(_message(phase, name, "loss", values))
        if not bool(torch.isfinite(result.grad).all()):
            raise NonFiniteError(_message(phase, " + ".join(jobs), "gradient", result.grad))
        starts = {name: [t.start for _, _, terms in members for t, _ in terms if t.name == name] for name in jobs}
        log.add(lengths, jobs, result, starts)
        log.add_importance(lengths, factors, starts, self._cap)
        grad.index_add_(0, index, result.grad.float())

    def _clip(self, phase: Adapter) -> float:
        parameters = list(self._model.parameters(phase).values())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._sections[phase].max_grad_norm))
        if not math.isfinite(norm):
            raise NonFiniteError(_message(phase, "all terms", "gradient of the adapter", torch.tensor([norm])))
        return norm


def _frozen_adapters(chosen: Sequence[Bundle]) -> int:
    """Forwards of the sharded base that a micro-batch's frozen views take: one an adapter."""
    return len({adapter for item in chosen for adapter in item.frozen} - {"expert"})


def stack_jobs(sequences: Sequence[Sequence[Weighted]], device: torch.device) -> dict[str, fused.Job]:
    """A job for each name of term, with its weight at every position; all sequences have the same names and losses."""
    jobs: dict[str, fused.Job] = {}
    lengths = torch.tensor([len(terms[0][0].tokens) for terms in sequences], device=device)
    for name in dict.fromkeys(t.name for t, _ in sequences[0]):
        own = [next((t, w) for t, w in terms if t.name == name) for terms in sequences]
        losses = [Loss.of(t.loss) for t, _ in own]
        weights = torch.tensor([w for _, w in own], device=device).repeat_interleave(lengths)
        end = 0
        for term, _ in own:
            weights[end : end + term.start] = 0.0
            end += len(term.tokens)
        loss = losses[0].stack(losses, lengths)
        jobs[name] = fused.Job(loss, weights, frozen=own[0][0].frozen is not None, always=True)
    return jobs


def weigh_forks(
    jobs: dict[str, fused.Job], sequences: Sequence[Sequence[Weighted]], entropy: Tensor
) -> dict[str, fused.Job]:
    """The jobs with the weight that each term gives its sequence's forks; `entropy` [T] is the live view's."""
    found: dict[str, fused.Job] = {}
    for name, job in jobs.items():
        own = [next(t for t, _ in terms if t.name == name) for terms in sequences]
        supervised = torch.cat([torch.arange(len(t.tokens)) >= t.start for t in own]).to(entropy.device)
        factor = torch.ones_like(entropy)
        factor[supervised] = forks.weights(entropy[supervised], [t.supervised for t in own], [t.forks for t in own])
        found[name] = replace(job, weight=job.weight * factor)
    return found


def importance(sequences: Sequence[Sequence[Weighted]], logp: Tensor, cap: float) -> dict[str, Tensor]:
    """By name, what a term's positions [T] weigh where its tokens were drawn with other log-probabilities than these.

    min(exp(logp - sampled), cap), held constant; `logp` [T] is the live view's of the tokens.
    """
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(t.name for t, _ in sequences[0] if t.sampled):
        own = [next(t for t, _ in terms if t.name == name) for terms in sequences]
        sampled = torch.tensor([value for t in own for value in t.sampled], dtype=logp.dtype, device=logp.device)
        found[name] = torch.exp(logp - sampled).clamp(max=cap)
    return found


def _message(phase: str, term: str, what: str, values: Tensor) -> str:
    bad = int((~torch.isfinite(values)).sum())
    return (
        f"{phase} step stopped: {bad} non-finite entries in the {what} of term '{term}'. "
        "No adapter moved; lower the learning rate, or look at the last cycle's rollouts"
    )
