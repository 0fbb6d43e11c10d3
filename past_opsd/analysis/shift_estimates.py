"""The arithmetic of `past shift`: from draws at prefixes to estimates with intervals, a table and a verdict.

With M draws the barycenter qbar_M is itself random, so the plug-in puts I(A;U|H) too low and KL(qbar || p) too high by
the same E KL(qbar_M || qbar) = O(1/M). The jackknife over the M draws takes the 1/M part away; their sum, the mean
KL(q_U || p), has no bias and does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from past_opsd.analysis.theory import barycenter, decompose, kl
from past_opsd.core.nouns import derive_seed

LEVEL = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Coupling:
    """One action from each side of q - p, normalised, and the total variation between q and p."""

    actions: tuple[int, int]
    distance: float


def couple(q: np.ndarray, p: np.ndarray, rng: np.random.Generator) -> Coupling:
    """The teacher's and the student's action where they differ.

    Coupled as closely as possible, they take the same action with probability 1 - TV(q, p), which changes nothing;
    else the teacher's action has the density (q - p)_+ / TV and the student's (p - q)_+ / TV. So
    TV * (success after the one - success after the other) has the expectation g(q) of [eq:frozen-student-value-shift].
    """
    distance = float(np.maximum(q - p, 0).sum())
    if distance == 0:
        action = int(p.argmax())
        return Coupling((action, action), 0.0)
    return Coupling((_pick(np.maximum(q - p, 0), rng), _pick(np.maximum(p - q, 0), rng)), distance)


def _pick(weights: np.ndarray, rng: np.random.Generator) -> int:
    cumulative = weights.cumsum()
    place: float = rng.random() * cumulative[-1]
    return min(int(np.searchsorted(cumulative, place, side="right")), len(weights) - 1)


@dataclass(frozen=True)
class Split:
    """What the distributions of one prefix say. `delta_correct` is (1 - eta) delta_+, the failed ones counting 0."""

    total: float
    privileged: float
    shift: float
    shift_corrected: float
    failure: float
    delta_correct: float
    preservation: float


@dataclass(frozen=True)
class Estimate(Split):
    """One prefix. `failed_value` is eta gamma_-, `preservation` (1 - eta) sqrt(delta_+ / 2)."""

    problem: str
    position: int
    length: int
    value: float
    failed_value: float


def split(q: np.ndarray, p: np.ndarray, correct: np.ndarray) -> Split:
    """Teachers q [M, V] of the completions, student p [V], which completions were correct [M]."""
    parts = decompose(q, p)
    share = float(correct.mean())
    delta = float(np.where(correct, kl(p, q), 0.0).mean())
    return Split(
        total=parts.total,
        privileged=parts.privileged,
        shift=parts.shift,
        shift_corrected=jackknife_shift(q, p),
        failure=1 - share,
        delta_correct=delta,
        preservation=math.sqrt(share * delta / 2),
    )


def estimate(
    parts: Split, gains: Sequence[float], failed: Sequence[bool], problem: str, position: int, length: int
) -> Estimate:
    """With the pairs of rollouts: unbiased draws of g(q_m), and whether completion m had failed.

    [eq:value-survives-projection]: their mean estimates g(qbar), so no rollout from qbar itself is needed.
    """
    gain, on_failure = np.array(gains), np.array(failed)
    return Estimate(
        **asdict(parts),
        problem=problem,
        position=position,
        length=length,
        value=float(gain.mean()),
        failed_value=float(np.where(on_failure, gain, 0.0).mean()),
    )


def jackknife_shift(q: np.ndarray, p: np.ndarray) -> float:
    """KL(qbar || p) without its 1/M bias: M theta - (M - 1) mean of the leave-one-out thetas."""
    M = len(q)
    # Sums before and after each row: subtracting a row from the whole sum would leave rounding where others have none.
    before, after = np.zeros_like(q), np.zeros_like(q)
    np.cumsum(q[:-1], axis=0, out=before[1:])
    after[:-1] = np.cumsum(q[:0:-1], axis=0)[::-1]
    without = kl((before + after) / (M - 1), p)
    return M * float(kl(barycenter(q), p)) - (M - 1) * float(without.mean())


# Summary name -> statistic of the columns' means; each is a mean or a ratio of means.
Columns = Mapping[str, Any]
STATISTICS: dict[str, Callable[[Columns], Any]] = {
    "total": lambda c: c["total"],
    "privileged": lambda c: c["total"] - c["shift_corrected"],
    "shift": lambda c: c["shift_corrected"],
    "surviving": lambda c: c["shift_corrected"] / c["total"],
    "privileged_plugin": lambda c: c["privileged"],
    "shift_plugin": lambda c: c["shift"],
    "surviving_plugin": lambda c: c["shift"] / c["total"],
    "bias": lambda c: c["shift"] - c["shift_corrected"],
    "value": lambda c: c["value"],
    "local_improvement": lambda c: c["slope"],
    "eta": lambda c: c["failure"],
    "gamma_failed": lambda c: c["failed_value"] / c["failure"],
    "delta_correct": lambda c: c["delta_correct"] / (1 - c["failure"]),
    "margin": lambda c: c["failed_value"] - c["preservation"],
}


def summarise(estimates: Sequence[Estimate], seed: int) -> dict[str, dict[str, float] | None]:
    """Means over prefixes and ratios of them, with percentile intervals from resampling problems.

    gamma_- and delta_+ weigh each prefix by its share of failed and correct completions, the weight they have in
    [eq:outcome-transfer-margin].
    """
    names = [name for name in asdict(estimates[0]) if name not in ("problem", "position", "length")]
    rows = np.array([[*(asdict(e)[n] for n in names), e.length * e.value, 1.0] for e in estimates])
    names += ["slope", "count"]
    index = {id_: k for k, id_ in enumerate(dict.fromkeys(e.problem for e in estimates))}
    clusters = np.zeros((len(index), len(names)))
    np.add.at(clusters, [index[e.problem] for e in estimates], rows)
    rng = np.random.default_rng(derive_seed(seed, "shift", "bootstrap"))
    n = len(clusters)
    times = rng.multinomial(n, np.full(n, 1.0 / n), size=RESAMPLES)
    whole, resampled = (_means(names, sums) for sums in (clusters.sum(0), times @ clusters))
    return {name: _interval(statistic, whole, resampled) for name, statistic in STATISTICS.items()}


def _means(names: Sequence[str], sums: np.ndarray) -> Columns:
    count = sums[..., names.index("count")]
    return {name: sums[..., k] / count for k, name in enumerate(names)}


def _interval(statistic: Callable[[Columns], Any], whole: Columns, resampled: Columns) -> dict[str, float] | None:
    """None where the statistic does not exist, e.g. gamma_- without a failure."""
    with np.errstate(divide="ignore", invalid="ignore"):
        middle, replicates = float(statistic(whole)), np.asarray(statistic(resampled))
    if not math.isfinite(middle):
        return None
    low, high = np.quantile(replicates[np.isfinite(replicates)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"estimate": middle, "low": float(low), "high": float(high)}


def verdict(summary: Mapping[str, Any]) -> str:
    """What survives and whether it helps, in plain words."""
    surviving, value, margin = summary["surviving"], summary["value"], summary["margin"]
    if surviving is None:
        return "the teacher equals the student at every prefix: there is no change to carry over"
    share, low, high = (f"{100 * surviving[k]:.0f}" for k in ("estimate", "low", "high"))
    gain, least, most = (_number(value[k], True, "+") for k in ("estimate", "low", "high"))
    if value["low"] > 0:
        meaning = "an improvement"
    elif value["high"] < 0:
        meaning = "a loss"
    else:
        meaning = "not distinguishable from zero"
    bound = "guarantees an improvement" if margin["low"] > 0 else "guarantees none"
    return (
        f"{share} % of the teacher's change can reach the student (95 %: {low} to {high}); the rest depends on what "
        f"the prefix does not show. Following the mean teacher for one token changes the student's success by {gain} "
        f"points (95 %: {least} to {most}), {meaning}. The outcome margin {bound}."
    )


def bias_note(summary: Mapping[str, Any], completions: int) -> str:
    """The finite-M bias in words, with its size."""
    bias, total = summary["bias"]["estimate"], summary["total"]["estimate"]
    share = f" ({100 * bias / total:.1f} % of the whole change)" if total > 0 else ""
    return (
        f"with {completions} completions the plug-in moves about {bias:.2g} nats{share} from the privileged part to "
        "the shift, because the mean of few teachers lies nearer to each of them; the corrected column is the "
        "jackknife, right up to order 1/M^2."
    )


# Row of the table: label, corrected or only estimate, plug-in, percent.
_ROWS = (
    ("change KL(q_U||p)", "total", None, False),
    ("privileged I(A;U|H)", "privileged", "privileged_plugin", False),
    ("shift KL(qbar||p)", "shift", "shift_plugin", False),
    ("surviving %", "surviving", "surviving_plugin", True),
    ("value shift g, points", "value", None, True),
    ("dJ/d eps, points", "local_improvement", None, True),
    ("failure eta %", "eta", None, True),
    ("gamma_-, points", "gamma_failed", None, True),
    ("delta_+", "delta_correct", None, False),
    ("lower bound, points", "margin", None, True),
)


def show(console: Console, result: Mapping[str, Any], file: Path) -> None:
    """One table within 80 columns and the verdict."""
    counts, summary = result["counts"], result["estimates"]
    console.print(
        f"{result['recipe']}, step {result['step']}: {counts['prefixes']} prefixes of {counts['problems']} problems, "
        f"{counts['completions']} completions,\n{counts['rollouts']} rollouts; "
        f"teacher weights: {result['settings']['teacher_adapter']}",
        highlight=False,
    )
    if counts["dropped"]:
        console.print(f"{counts['dropped']} prefixes were left out: they do not fit", style="bold red")
    table = Table(title="Causal shift (95 % interval, nats)", title_justify="left", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    for name in ("", "corrected", "plug-in"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for label, name, plugin, percent in _ROWS:
        table.add_row(label, _cell(summary[name], percent), _cell(summary[plugin], percent) if plugin else "")
    console.print(table)
    console.print(result["verdict"], highlight=False)
    console.print(result["bias"], highlight=False)
    for note in result["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    console.print(f"written: {file}", highlight=False, soft_wrap=True)


def _cell(value: Mapping[str, float] | None, percent: bool) -> str:
    if value is None:
        return "-"
    middle, low, high = (_number(value[k], percent) for k in ("estimate", "low", "high"))
    return rf"{middle} \[{low}, {high}]"


def _number(value: float, percent: bool, plus: str = "") -> str:
    value, digits = (100 * value, 2) if percent else (value, 5)
    return f"{round(value, digits) + 0.0:{plus}.{digits}f}"
