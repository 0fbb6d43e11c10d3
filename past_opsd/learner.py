"""Terms become one optimizer step. The learner knows no method.

Terms that share a live view and its tokens share one live forward; frozen views are recomputed per micro-batch under
no_grad and released. Row weights are fixed before the first forward, so micro-batches, their size, their padding and
the number of processes that share them do not change the update.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from past_opsd import fused, packing
from past_opsd.config import LearnerSection, OptimizerSection
from past_opsd.distributed import balance
from past_opsd.losses import Advantaged, Match, Stay, token_weights
from past_opsd.model import TRAINABLE, Model
from past_opsd.types import Adapter, PastError, Term, Tokens, View

POSITIONS = 16  # the KL is logged position by position this far: a bad prompt boundary shows at the first tokens


class NonFiniteError(PastError):
    """A loss or gradient is not a number; the step was not taken and both adapters are as they were."""


@dataclass
class Path:
    """One live forward: a view along token ids, with every term that reads it and each term's weight per token."""

    live: View
    tokens: Tokens
    terms: list[tuple[Term, float]] = field(default_factory=list)

    def views(self) -> list[tuple[View | None, float, list[tuple[Term, float]]]]:
        """Terms by (frozen view, temperature); terms without a frozen view ride along with those that have one."""
        found: dict[tuple[View | None, float], list[tuple[Term, float]]] = defaultdict(list)
        for term, weight in self.terms:
            found[term.frozen, term.temperature].append((term, weight))
        for frozen, temperature in [key for key in found if key[0] is None]:
            hosts = [key for key in found if key[0] is not None and key[1] == temperature]
            if hosts:
                found[hosts[0]].extend(found.pop((frozen, temperature)))
        return [(frozen, temperature, terms) for (frozen, temperature), terms in found.items()]


def gather_paths(terms: Sequence[Term], reduction: str) -> list[Path]:
    """Terms grouped by live forward, with the per-token weights of the chosen reduction."""
    weights: list[float] = [0.0] * len(terms)
    names: dict[str, list[int]] = defaultdict(list)
    for i, term in enumerate(terms):
        names[term.name].append(i)
    for members in names.values():
        lengths = [len(terms[i].tokens) for i in members]
        shares = token_weights(lengths, [terms[i].weight for i in members], reduction)  # pyright: ignore[reportArgumentType]
        for i, share in zip(members, shares, strict=True):
            weights[i] = share
    paths: dict[tuple[View, Tokens, int], Path] = {}
    seen: Counter[tuple[View, Tokens, str]] = Counter()
    for term, weight in zip(terms, weights, strict=True):
        # The same response drawn twice is two paths: the n-th term of a name belongs to the n-th of them.
        copy = seen[term.live, term.tokens, term.name]
        seen[term.live, term.tokens, term.name] += 1
        path = paths.setdefault((term.live, term.tokens, copy), Path(term.live, term.tokens))
        path.terms.append((term, weight))
    return list(paths.values())


@dataclass(frozen=True)
class Bundle:
    """Paths whose live forward is one row: a path alone, or several whose prompts begin alike."""

    paths: Sequence[Path]

    @cached_property
    def live(self) -> list[packing.Pair]:
        """The row of the live forward."""
        return [(path.live, path.tokens) for path in self.paths]

    @cached_property
    def frozen(self) -> dict[Adapter, list[list[packing.Pair]]]:
        """The rows of the frozen forwards: a row for several paths, as live; a row each where one path has several."""
        found: dict[Adapter, dict[packing.Pair, None]] = defaultdict(dict)
        for path in self.paths:
            for term, _ in path.terms:
                if term.frozen is not None:
                    found[term.frozen.adapter][term.frozen, path.tokens] = None
        alone = len(self.paths) == 1
        return {adapter: [[p] for p in pairs] if alone else [list(pairs)] for adapter, pairs in found.items()}

    @cached_property
    def width(self) -> int:
        """Tokens of the longest row, live or frozen."""
        return max(map(packing.row_length, [self.live, *(row for rows in self.frozen.values() for row in rows)]))

    @cached_property
    def rows(self) -> int:
        """Rows of the largest forward."""
        return max([1, *map(len, self.frozen.values())])


def bundle(paths: Sequence[Path], token_budget: int, share: bool) -> list[Bundle]:
    """Paths whose prompts begin alike together where that pays; a row of several never exceeds the budget."""
    if not share:
        return [Bundle([path]) for path in paths]
    order = {id(path): i for i, path in enumerate(paths)}
    groups: list[list[Path]] = []
    begin = 0
    for path in sorted(paths, key=lambda p: p.live.prompt):
        # They are sorted, so all of a group begin with what its first and its last begin with.
        also = packing.common([groups[-1][0].live.prompt, path.live.prompt]) if groups else 0
        if also >= packing.WORTH and also * len(groups[-1]) > begin * (len(groups[-1]) - 1):
            groups[-1].append(path)
            begin = also
        else:
            groups.append([path])
    made = [row for group in groups for row in _divide(group, token_budget)]
    return sorted(made, key=lambda b: order[id(b.paths[0])])


def _divide(paths: Sequence[Path], token_budget: int) -> list[Bundle]:
    """As few rows as fit the budget, and these alike: the longest decides about the memory."""
    fewest = -(-Bundle(paths).width // token_budget)
    for count in range(fewest, len(paths)):
        size = -(-len(paths) // count)
        rows = [Bundle(paths[i : i + size]) for i in range(0, len(paths), size)]
        several = [row for row in rows if len(row.paths) > 1]
        if not all(packing.pays(row.live) for row in several):
            break
        if all(row.width <= token_budget for row in several):
            return rows
    return [Bundle([path]) for path in paths]


def micro_batches(bundles: Sequence[Bundle], token_budget: int) -> Iterator[list[Bundle]]:
    """Length-sorted batches whose padded size stays within the budget; a longer path goes alone, never cut."""
    batch: list[Bundle] = []
    rows = 0
    for item in sorted(bundles, key=lambda b: b.width):
        if batch and item.width * (rows + item.rows) > token_budget:
            yield batch
            batch, rows = [], 0
        batch.append(item)
        rows += item.rows
    if batch:
        yield batch


def learning_rate(section: OptimizerSection, step: int, total: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then the schedule down to zero at `total`."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    share = min(1.0, (step - section.warmup_steps) / max(1, total - section.warmup_steps))
    if section.schedule == "linear":
        return section.lr * (1 - share)
    if section.schedule == "cosine":
        return section.lr * 0.5 * (1 + math.cos(math.pi * share))
    return section.lr


class Learner:
    """Two adapters, two optimizers, two step counters; one step per call."""

    def __init__(self, model: Model, section: LearnerSection, total_steps: int):
        fused.require(section.implementation, model.head.device)  # now, not after the first rollouts
        self._model = model
        self._section = section
        self._total = total_steps
        self._sections: dict[Adapter, OptimizerSection] = {"student": section.student, "teacher": section.teacher}
        self.optimizers = {a: self._optimizer(a) for a in TRAINABLE}
        self.steps: dict[Adapter, int] = {"student": 0, "teacher": 0}

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
    def blend(self, source: Adapter, target: Adapter, share: float) -> None:
        """target <- (1 - share) * target + share * source, factor by factor of the LoRA product."""
        pairs = zip(self._model.parameters(source).values(), self._model.parameters(target).values(), strict=True)
        for mine, theirs in pairs:
            theirs.lerp_(mine, share)
        self._model.bump(target)

    def reset(self, adapter: Adapter) -> None:
        """A fresh optimizer and step count."""
        self.optimizers[adapter] = self._optimizer(adapter)
        self.steps[adapter] = 0

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        """One optimizer step on the sum of the terms; no terms, no step, and nothing advances.

        Returns the phase's diagnostics. Raises `NonFiniteError` before anything moved.
        """
        if not terms:
            return {f"{phase}/stepped": 0.0}
        stray = {t.live.adapter for t in terms} - {phase}
        if stray:
            raise ValueError(f"the {phase} step got live terms of {sorted(stray)}")
        other: Adapter = "teacher" if phase == "student" else "student"
        frozen = self._model.digest(other)
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
        if self._model.digest(other) != frozen:
            raise RuntimeError(f"the {other} adapter moved during the {phase} step")
        if not self._model.world.alone:
            self._model.world.agree(f"{phase} adapter after a step", self._model.digest(phase))
        metrics = {f"{phase}/{key}": value for key, value in log.summary().items()}
        extra = {"stepped": 1.0, "grad_norm": norm, "lr": optimizer.param_groups[0]["lr"], "nonfinite": 0.0}
        return metrics | {f"{phase}/{key}": value for key, value in extra.items()}

    def gradient(self, phase: Adapter, terms: Sequence[Term]) -> tuple[float, Tensor]:
        """The objective and its gradient as one vector, without a step: for comparing implementations."""
        try:
            with self._model.training(phase):
                log = self._accumulate(phase, terms)
            parts = [p.grad.flatten() for p in self._model.parameters(phase).values() if p.grad is not None]
            return log.objective, torch.cat(parts).clone()
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
        log, failures = Log(), []
        plans = self._plans(terms)
        rounds = max(map(len, plans)) if self._model.sharded else len(plans[self._model.world.rank])
        for n in range(rounds):
            failures += self._round(phase, n, plans, log)
        return log if self._model.world.alone else self._add_up(phase, log, failures)

    def _plans(self, terms: Sequence[Term]) -> list[list[list[Bundle]]]:
        """Every rank's micro-batches; all ranks know all of them."""
        size, budget = self._model.world.size, self._section.token_budget
        paths = gather_paths(terms, self._section.reduction)
        # A row that holds more than a rank's share would leave other ranks idle.
        limit = budget if size == 1 else min(budget, -(-sum(Bundle([path]).width for path in paths) // size))
        bundles = bundle(paths, limit, self._shares_prompts())
        shares = balance([item.width * item.rows for item in bundles], size)
        return [list(micro_batches([bundles[i] for i in own], budget)) for own in shares]

    def _shares_prompts(self) -> bool:
        networks = [self._model] if self._model.expert is None else [self._model, self._model.expert]
        return self._section.shared_prompts and all(network.shares_prompts for network in networks)

    def _round(self, phase: Adapter, n: int, plans: Sequence[Sequence[Sequence[Bundle]]], log: Log) -> list[str]:
        """One micro-batch; returns what failed, for the ranks to stop together.

        The ranks of a sharded base make the same forwards and backwards, if need be on a single token and for nothing.
        """
        plan = plans[self._model.world.rank]
        chosen = plan[n] if n < len(plan) else []
        batch = [path for item in chosen for path in item.paths]
        frozen = self._frozen_states(chosen)
        if self._model.sharded:
            others = [_frozen_adapters(other[n]) for other in plans if n < len(other)]
            self._model.idle(max(others) - _frozen_adapters(chosen))
        pairs = [pair for item in chosen for pair in item.live]
        live = self._model.hidden(pairs or [(View(phase, (0,)), (0,))], [len(item.paths) for item in chosen])
        grad, failures = None, []
        try:
            grad = self._gradient(phase, batch, live.detach(), frozen, log)
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
        for part, _ in reports:
            whole.merge(part)
        return whole

    @torch.no_grad()
    def _frozen_states(self, chosen: Sequence[Bundle]) -> dict[packing.Pair, Tensor]:
        """Hidden states of every frozen view in the micro-batch, one forward per adapter."""
        wanted: dict[Adapter, list[list[packing.Pair]]] = defaultdict(list)
        for item in chosen:
            for adapter, rows in item.frozen.items():
                wanted[adapter] += rows
        states: dict[packing.Pair, Tensor] = {}
        for rows in wanted.values():
            pairs = [pair for row in rows for pair in row]
            split = self._model.hidden(pairs, list(map(len, rows))).split([len(tokens) for _, tokens in pairs])
            states.update(zip(pairs, split, strict=True))
        return states

    def _gradient(
        self,
        phase: Adapter,
        batch: Sequence[Path],
        live: Tensor,
        frozen: dict[packing.Pair, Tensor],
        log: Log,
    ) -> Tensor:
        """d(sum of weighted losses)/d(live hidden states), by loss calls on rows that need the same losses."""
        grad = torch.zeros_like(live, dtype=torch.float32)
        starts = [0]
        for path in batch:
            starts.append(starts[-1] + len(path.tokens))
        calls: dict[tuple[Any, ...], list[Rows]] = defaultdict(list)
        for path, start in zip(batch, starts, strict=False):
            for view, temperature, terms in path.views():
                states = None if view is None else frozen[view, path.tokens]
                names = tuple(sorted((t.name, job_key(t.loss)) for t, _ in terms))
                head = None if view is None or view.adapter != "expert" else "expert"
                calls[temperature, head, states is None, names].append(Rows(path, start, states, terms))
        for (temperature, head, *_), rows in calls.items():
            self._call(phase, rows, temperature, head, live, grad, log)
        return grad

    def _call(
        self,
        phase: Adapter,
        rows: Sequence[Rows],
        temperature: float,
        head: str | None,
        live: Tensor,
        grad: Tensor,
        log: Log,
    ) -> None:
        expert = self._model.expert if head == "expert" else None
        index = torch.cat([torch.arange(r.start, r.start + len(r.path.tokens)) for r in rows]).to(live.device)
        tokens = torch.tensor([y for r in rows for y in r.path.tokens], device=live.device)
        states = None if rows[0].states is None else torch.cat([r.states for r in rows if r.states is not None])
        names, jobs = stack_jobs(rows, live.device)
        result = fused.run(
            self._section.implementation,
            live[index],
            states,
            self._model.head,
            self._model.head_bias,
            tokens,
            jobs,
            temperature=temperature,
            frozen_head=None if expert is None else expert.head,
            frozen_bias=None if expert is None else expert.head_bias,
            budget_bytes=self._section.loss_memory_mib << 20,
        )
        for name, job, values in zip(names, jobs, result.values, strict=True):
            if not bool(torch.isfinite(values).all()):
                raise NonFiniteError(_message(phase, name, "loss", values))
            log.add(name, job.loss, [len(r.path.tokens) for r in rows], values, job.weight, result.rows)
        if not bool(torch.isfinite(result.grad).all()):
            raise NonFiniteError(_message(phase, " + ".join(names), "gradient", result.grad))
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


@dataclass(frozen=True)
class Rows:
    """A path's rows in one loss call."""

    path: Path
    start: int
    states: Tensor | None
    terms: list[tuple[Term, float]]


def job_key(loss: Any) -> Any:
    """Losses with the same key stack into one call; advantages differ by sequence and stack as a vector."""
    return repr(replace(loss, advantage=0.0)) if isinstance(loss, Advantaged) else repr(loss)


def stack_jobs(rows: Sequence[Rows], device: torch.device) -> tuple[list[str], list[fused.Job]]:
    """One job per term name, with its weight for every row; all rows of a call have the same names and losses."""
    names: list[str] = []
    jobs: list[fused.Job] = []
    for name in dict.fromkeys(t.name for t, _ in rows[0].terms):
        pairs = [next((t, w) for t, w in row.terms if t.name == name) for row in rows]
        lengths = torch.tensor([len(row.path.tokens) for row in rows], device=device)
        term = pairs[0][0]
        loss = term.loss
        if isinstance(loss, Advantaged):
            advantages = torch.tensor([float(t.loss.advantage) for t, _ in pairs], device=device)  # pyright: ignore[reportFunctionMemberAccess]
            loss = replace(loss, advantage=advantages.repeat_interleave(lengths))
        weights = torch.tensor([w for _, w in pairs], device=device).repeat_interleave(lengths)
        names.append(name)
        jobs.append(fused.Job(loss, weights, frozen=term.frozen is not None, always=True))
    return names, jobs


def _message(phase: str, term: str, what: str, values: Tensor) -> str:
    bad = int((~torch.isfinite(values)).sum())
    return (
        f"{phase} step stopped: {bad} non-finite entries in the {what} of term '{term}'. "
        "No adapter moved; lower the learning rate, or look at the last cycle's rollouts"
    )


def _nothing() -> list[float]:
    return [0.0, 0.0, 0.0]


class Log:
    """The appendix's diagnostics of one phase, by term."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._objective: dict[str, float] = defaultdict(float)
        self._paths: dict[str, list[float]] = defaultdict(list)
        self._positions: dict[str, list[float]] = defaultdict(list)
        self._align: dict[str, list[float]] = defaultdict(_nothing)

    def add(
        self, name: str, loss: Any, lengths: Sequence[int], values: Tensor, weight: Tensor, rows: dict[str, Tensor]
    ) -> None:
        """Add one job's rows: weighted objective, and means over sequences of per-token diagnostics."""
        self._objective[name] += float((weight * values).sum())
        columns = {"loss": values, "entropy": rows["entropy"]}
        if isinstance(loss, Match | Stay):
            columns["kl"] = rows["kl"]
        if isinstance(loss, Match):
            columns |= {"clip_fraction": rows["clipped"], "removed_mass": rows["removed"]}
            sums = self._align[name]
            for i, part in enumerate(("dot", "norm_clipped", "norm_unclipped")):
                sums[i] += float((rows[part] if i == 0 else rows[part] ** 2).sum())
        for key, column in columns.items():
            means = [float(part.mean()) for part in column.split(list(lengths))]
            self._sums[f"{name}/{key}"] += sum(means)
            self._counts[f"{name}/{key}"] += len(means)
            if key == "kl":
                self._paths[name] += means
                for part in column.split(list(lengths)):
                    for t, value in enumerate(part[:POSITIONS].tolist()):
                        self._positions[f"{name}/kl@{t:02d}"].append(value)

    def merge(self, other: Log) -> None:
        """Add what another process logged."""
        for mine, theirs in (
            (self._sums, other._sums),
            (self._counts, other._counts),
            (self._objective, other._objective),
        ):
            for key, value in theirs.items():
                mine[key] += value
        for mine, theirs in ((self._paths, other._paths), (self._positions, other._positions)):
            for key, values in theirs.items():
                mine[key] += values
        for name, sums in other._align.items():
            self._align[name] = [a + b for a, b in zip(self._align[name], sums, strict=True)]

    @property
    def objective(self) -> float:
        """The weighted sum of all terms."""
        return math.fsum(self._objective.values())

    def summary(self) -> dict[str, float]:
        """Flat metrics."""
        out = {key: self._sums[key] / self._counts[key] for key in self._sums}
        out |= {f"{name}/objective": value for name, value in self._objective.items()}
        out |= {key: math.fsum(values) / len(values) for key, values in self._positions.items()}
        for name, values in self._paths.items():
            quantiles = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.1, 0.5, 0.9, 1.0]).double())
            out |= {f"{name}/kl_{q}": float(v) for q, v in zip(("q10", "q50", "q90", "max"), quantiles, strict=True)}
        for name, (dot, clipped, unclipped) in self._align.items():
            norm = math.sqrt(clipped * unclipped)
            out[f"{name}/alignment"] = dot / norm if norm > 0 else 1.0
        return dict(sorted(out.items()))
