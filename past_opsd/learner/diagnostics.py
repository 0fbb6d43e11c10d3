"""The appendix's diagnostics of one phase, by term."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from past_opsd.learner import forks
from past_opsd.policy.fused import Job, Result

POSITIONS = 16  # the KL is logged position by position this far: a bad prompt boundary shows at the first tokens
NAMES = {"kl": "kl", "clipped": "clip_fraction", "removed": "removed_mass"}
"""What a loss's diagnostics are called in the log."""


def _nothing() -> list[float]:
    return [0.0, 0.0, 0.0]


class Log:
    """Sums that become metrics; a term `a/b` beside a term `a` counts in the loss and the objective of `a`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._objective: dict[str, float] = defaultdict(float)
        self._paths: dict[str, list[float]] = defaultdict(list)
        self._positions: dict[str, list[float]] = defaultdict(list)
        self._align: dict[str, list[float]] = defaultdict(_nothing)
        self.nonfinite = 0.0
        """Numbers of the log that are not finite; a loss or a gradient that is not stops the step."""

    def add(
        self, lengths: Sequence[int], jobs: Mapping[str, Job], result: Result, starts: Mapping[str, Sequence[int]]
    ) -> None:
        """Add one loss call on sequences of these lengths, one after the other, with a job for each term's name.

        What is logged is of the supervised positions, which of each name begin at `starts`; only the KL at the first
        positions is of all of them.
        """
        measured = [column for columns in (result.live, *result.diagnostics) for column in columns.values()]
        self.nonfinite += float((~torch.stack(measured).isfinite()).sum())
        for (name, job), values, found in zip(jobs.items(), result.values, result.diagnostics, strict=True):
            spans = _spans(lengths, starts[name])
            host = name.rpartition("/")[0]
            if host in jobs:
                self._ride(host, name, (spans, _spans(lengths, starts[host])), job, jobs[host], values)
                continue
            self._objective[name] += float((job.weight * values).sum())
            columns = {NAMES[key]: found[key] for key in NAMES if key in found}
            for key, column in {"loss": values, "entropy": result.live["entropy"], **columns}.items():
                self._mean(f"{name}/{key}", _means(column, spans))
            if "kl" in found:
                self._spread(name, found["kl"], lengths, spans)
                kl, entropy = (torch.cat([x[span] for span in spans]) for x in (found["kl"], result.live["entropy"]))
                self._fork(name, kl, entropy, [span.stop - span.start for span in spans])
            if "dot" in found:
                sums = self._align[name]
                for i, key in enumerate(("dot", "norm_clipped", "norm_unclipped")):
                    column = torch.cat([found[key][span] for span in spans])
                    sums[i] += float((column if i == 0 else column**2).sum())

    def add_importance(
        self, lengths: Sequence[int], factors: Mapping[str, Tensor], starts: Mapping[str, Sequence[int]], cap: float
    ) -> None:
        """Of a loss call's terms that are corrected for the engine: the mean factor, and the share held by the cap."""
        for name, factor in factors.items():
            spans = _spans(lengths, starts[name])
            self._mean(f"{name}/importance", _means(factor, spans))
            self._mean(f"{name}/importance_capped", _means((factor >= cap).to(factor.dtype), spans))

    def _ride(
        self, host: str, name: str, spans: tuple[Sequence[slice], Sequence[slice]], job: Job, other: Job, values: Tensor
    ) -> None:
        """A second summand of the host's objective, in the host's loss by its weight beside the host's."""
        own, hosts = spans
        self._objective[host] += float((job.weight * values).sum())
        beside = torch.where(other.weight == 0, 0.0, job.weight / other.weight)
        self._sums[f"{host}/loss"] += sum(_means(beside * values, hosts))
        self._mean(f"{name}/loss", _means(values, own))

    def _mean(self, key: str, means: Sequence[float]) -> None:
        self._sums[key] += sum(means)
        self._counts[key] += len(means)

    def _spread(self, name: str, kl: Tensor, lengths: Sequence[int], spans: Sequence[slice]) -> None:
        """The KL by sequence, and at the first positions, supervised or not."""
        self._paths[name] += _means(kl, spans)
        for sequence in torch.split(kl, list(lengths)):
            first = cast(list[float], sequence[:POSITIONS].tolist())
            for t, value in enumerate(first):
                self._positions[f"{name}/kl@{t:02d}"].append(value)

    def _fork(self, name: str, kl: Tensor, entropy: Tensor, lengths: Sequence[int]) -> None:
        """The KL and the entropy at forks and elsewhere, by sequence, and how many forks there are.

        `fork_share` is the part of all KL that lands on forks, every sequence with its mean as in the objective.
        """
        at = forks.highest(entropy, lengths, [forks.SHARE] * len(lengths)).to(kl.dtype)
        opened = (entropy >= forks.OPEN).to(kl.dtype)
        columns = torch.stack((at * kl, kl, at, at * entropy, opened))  # [5, T]
        means = [cast(list[float], part.mean(1).tolist()) for part in torch.split(columns, list(lengths), 1)]
        there, all_of_it, chosen, height, count = zip(*means, strict=True)
        self._mean(f"{name}/fork_kl", [a / n for a, n in zip(there, chosen, strict=True)])
        rest = [(b - a) / (1 - n) for a, b, n in zip(there, all_of_it, chosen, strict=True) if n < 1]
        if rest:
            self._mean(f"{name}/rest_kl", rest)
        self._mean(f"{name}/fork_entropy", [h / n for h, n in zip(height, chosen, strict=True)])
        self._mean(f"{name}/fork_rate", count)
        self._mean(f"{name}/fork_count", [c * n for c, n in zip(count, lengths, strict=True)])
        self._sums[f"{name}/fork_share"] += sum(there)
        self._counts[f"{name}/fork_share"] += sum(all_of_it)

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
        self.nonfinite += other.nonfinite
        for name, sums in other._align.items():
            self._align[name] = [a + b for a, b in zip(self._align[name], sums, strict=True)]

    @property
    def objective(self) -> float:
        """The weighted sum of all terms."""
        return math.fsum(self._objective.values())

    def summary(self) -> dict[str, float]:
        """Flat metrics."""
        out = {key: total / self._counts[key] for key, total in self._sums.items() if self._counts[key]}
        out |= {f"{name}/objective": value for name, value in self._objective.items()}
        out |= {key: math.fsum(values) / len(values) for key, values in self._positions.items()}
        for name, values in self._paths.items():
            quantiles = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.1, 0.5, 0.9, 1.0]).double())
            out |= {f"{name}/kl_{q}": float(v) for q, v in zip(("q10", "q50", "q90", "max"), quantiles, strict=True)}
        for name, (dot, clipped, unclipped) in self._align.items():
            norm = math.sqrt(clipped * unclipped)
            out[f"{name}/alignment"] = dot / norm if norm > 0 else 1.0
        return dict(sorted(out.items()))


def _spans(lengths: Sequence[int], starts: Sequence[int]) -> list[slice]:
    """Where the supervised positions of each sequence stand."""
    ends = list(accumulate(lengths))
    return [slice(end - length + start, end) for end, length, start in zip(ends, lengths, starts, strict=True)]


def _means(column: Tensor, spans: Sequence[slice]) -> list[float]:
    return [float(column[span].mean()) for span in spans]
