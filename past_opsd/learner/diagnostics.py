"""The appendix's diagnostics of one phase, by term."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

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

    def add(self, lengths: Sequence[int], jobs: Mapping[str, Job], result: Result) -> None:
        """Add one loss call on sequences of these lengths, one after the other, with a job for each term's name."""
        for (name, job), values, found in zip(jobs.items(), result.values, result.diagnostics, strict=True):
            host = name.rpartition("/")[0]
            if host in jobs:
                self._ride(host, name, lengths, job, jobs[host], values)
                continue
            self._objective[name] += float((job.weight * values).sum())
            columns = {NAMES[key]: found[key] for key in NAMES if key in found}
            for key, column in {"loss": values, "entropy": result.live["entropy"], **columns}.items():
                self._mean(f"{name}/{key}", _means(column, lengths))
            if "kl" in found:
                self._spread(name, found["kl"], lengths)
            if "dot" in found:
                sums = self._align[name]
                for i, key in enumerate(("dot", "norm_clipped", "norm_unclipped")):
                    sums[i] += float((found[key] if i == 0 else found[key] ** 2).sum())

    def _ride(self, host: str, name: str, lengths: Sequence[int], job: Job, other: Job, values: Tensor) -> None:
        """A second summand of the host's objective, in the host's loss by its weight beside the host's."""
        self._objective[host] += float((job.weight * values).sum())
        beside = torch.where(other.weight == 0, 0.0, job.weight / other.weight)
        self._sums[f"{host}/loss"] += sum(_means(beside * values, lengths))
        self._mean(f"{name}/loss", _means(values, lengths))

    def _mean(self, key: str, means: Sequence[float]) -> None:
        self._sums[key] += sum(means)
        self._counts[key] += len(means)

    def _spread(self, name: str, kl: Tensor, lengths: Sequence[int]) -> None:
        """The KL by sequence, and at the first positions."""
        self._paths[name] += _means(kl, lengths)
        for sequence in torch.split(kl, list(lengths)):
            first = cast(list[float], sequence[:POSITIONS].tolist())
            for t, value in enumerate(first):
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


def _means(column: Tensor, lengths: Sequence[int]) -> list[float]:
    return [float(sequence.mean()) for sequence in torch.split(column, list(lengths))]
