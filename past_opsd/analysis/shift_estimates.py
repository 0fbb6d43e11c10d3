"""The arithmetic of `past shift`: from draws at tokens to estimates with intervals, a table and a verdict.

With M draws the barycenter qbar_M is itself random, so the plug-in puts I(A;U|H) too low and KL(qbar || p) too high by
the same E KL(qbar_M || qbar) = O(1/M). The jackknife over the M draws takes the 1/M part away; their sum, the mean
KL(q_U || p), has no bias and does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    return systematic(weights, 1, rng)[0]


def systematic(chances: np.ndarray, count: int, rng: np.random.Generator) -> list[int]:
    """`count` indices, each as often as its chance says on average, spread as evenly as can be."""
    ends: Any = chances.cumsum()
    places = (np.arange(count) + rng.random()) / count * ends[-1]
    return np.minimum(ends.searchsorted(places, side="right"), len(chances) - 1).tolist()


@dataclass(frozen=True)
class Moved:
    """A response Y of the student, under the teacher that has read it."""

    problem: str
    length: int
    correct: bool
    distance: float
    """TV(q, p), summed over its tokens."""
    change: float
    """KL(q || p), mean over its tokens."""
    reverse: float
    """KL(p || q), mean over its tokens."""
    pairs: int
    gain: float
    """Of its pairs of rollouts; their mean over responses estimates dJ/d eps."""


@dataclass(frozen=True)
class Split:
    """What the distributions of one prefix say. `preservation` is (1 - eta) sqrt(delta_+ / 2)."""

    total: float
    privileged: float
    shift: float
    shift_corrected: float
    failure: float
    preservation: float


@dataclass(frozen=True)
class Prefixed(Split):
    """A prefix, with the weight that it has beside others."""

    problem: str
    position: int
    length: int
    weight: float


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
        preservation=math.sqrt(share * delta / 2),
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
    "margin": lambda c: c["failed_value"] - c["preservation"],
    "change": lambda c: c["change"],
    "value": lambda c: c["value"],
    "local_improvement": lambda c: c["slope"],
    "eta": lambda c: c["failed"],
    "gamma_failed": lambda c: c["failed_value"] / c["failed"],
    "delta_correct": lambda c: c["correct_reverse"] / (1 - c["failed"]),
}


def summarise(moved: Sequence[Moved], seen: Sequence[Prefixed], seed: int) -> dict[str, dict[str, float] | None]:
    """Means over responses, weighted means over prefixes and ratios of them, with intervals from resampling problems.

    gamma_- and delta_+ weigh failed and correct responses as [eq:outcome-transfer-margin] does.
    """
    index = {id_: k for k, id_ in enumerate(dict.fromkeys(m.problem for m in moved))}
    by_response = {
        "change": [m.change for m in moved],
        "slope": [m.gain for m in moved],
        "value": [m.gain / m.length for m in moved],
        "failed": [float(not m.correct) for m in moved],
        "failed_value": [m.gain / m.length * (not m.correct) for m in moved],
        "correct_reverse": [m.reverse * m.correct for m in moved],
    }
    names = ("total", "privileged", "shift", "shift_corrected", "preservation")
    by_prefix = {name: [s.weight * getattr(s, name) for s in seen] for name in names}
    rng = np.random.default_rng(derive_seed(seed, "shift", "bootstrap"))
    n = len(index)
    times = rng.multinomial(n, np.full(n, 1.0 / n), size=RESAMPLES)
    whole: dict[str, Any] = {}
    resampled: dict[str, Any] = {}
    parts = (
        (by_response, [m.problem for m in moved], [1.0] * len(moved)),
        (by_prefix, [s.problem for s in seen], [s.weight for s in seen]),
    )
    for columns, problems, weights in parts:
        owners = [index[id_] for id_ in problems]
        count = np.bincount(owners, weights, minlength=n) if owners else np.zeros(n)
        for name, values in columns.items():
            sums = np.bincount(owners, values, minlength=n) if owners else np.zeros(n)
            with np.errstate(divide="ignore", invalid="ignore"):
                whole[name] = sums.sum() / count.sum()
                resampled[name] = (times @ sums) / (times @ count)
    return {name: _interval(statistic, whole, resampled) for name, statistic in STATISTICS.items()}


def _interval(statistic: Callable[[Columns], Any], whole: Columns, resampled: Columns) -> dict[str, float] | None:
    """None where the statistic does not exist, e.g. gamma_- without a failure."""
    with np.errstate(divide="ignore", invalid="ignore"):
        middle, replicates = float(statistic(whole)), np.asarray(statistic(resampled))
    if not math.isfinite(middle):
        return None
    low, high = np.quantile(replicates[np.isfinite(replicates)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"estimate": middle, "low": float(low), "high": float(high)}


def verdict(summary: Mapping[str, Any]) -> str:
    """What the change is worth, what of it survives and what is guaranteed, in plain words."""
    slope, surviving, margin = summary["local_improvement"], summary["surviving"], summary["margin"]
    if summary["change"]["estimate"] == 0:
        return "the teacher equals the student at every token: there is no change to carry over"
    gain, least, most = (f"{slope[k]:+.2f}" for k in ("estimate", "low", "high"))
    meaning = "not distinguishable from zero"
    if slope["low"] > 0:
        meaning = "an improvement"
    elif slope["high"] < 0:
        meaning = "a loss"
    text = (
        f"A small step towards the teacher changes the student's success by {gain} times the step "
        f"(95 %: {least} to {most}), {meaning}."
    )
    if surviving is None:
        return text
    share, low, high = (f"{100 * surviving[k]:.0f}" for k in ("estimate", "low", "high"))
    bound = "guarantees an improvement" if margin["low"] > 0 else "guarantees none"
    return (
        f"{share} % of the teacher's change can reach the student (95 %: {low} to {high}); the rest depends on what "
        f"the prefix does not show. {text} The outcome margin {bound}."
    )


def bias_note(summary: Mapping[str, Any], completions: int) -> str:
    """The finite-M bias in words, with its size; nothing where no prefix was completed."""
    if summary["bias"] is None:
        return ""
    bias, total = summary["bias"]["estimate"], summary["total"]["estimate"]
    share = f" ({100 * bias / total:.1f} % of the whole change)" if total > 0 else ""
    return (
        f"with {completions} completions the plug-in moves about {bias:.2g} nats{share} from the privileged part to "
        "the shift, because the mean of few teachers lies nearer to each of them; the corrected column is the "
        "jackknife, right up to order 1/M^2."
    )


# Row of the table: label, corrected or only estimate, plug-in, percent.
_ROWS = (
    ("change KL(q_U||p)", "change", None, False),
    ("at the prefixes", "total", None, False),
    ("privileged I(A;U|H)", "privileged", "privileged_plugin", False),
    ("shift KL(qbar||p)", "shift", "shift_plugin", False),
    ("surviving %", "surviving", "surviving_plugin", True),
    ("dJ/d eps, points", "local_improvement", None, True),
    ("value shift g, points", "value", None, True),
    ("failure eta %", "eta", None, True),
    ("gamma_-, points", "gamma_failed", None, True),
    ("delta_+", "delta_correct", None, False),
    ("lower bound, points", "margin", None, True),
)


def show(console: Console, result: Mapping[str, Any], file: Path | None) -> None:
    """One table within 80 columns and the verdict."""
    counts, summary = result["counts"], result["estimates"]
    console.print(
        f"{result['recipe']}, step {result['step']}: {counts['responses']} responses of {counts['problems']} problems, "
        f"{counts['rollouts']} rollouts,\n{counts['completions']} completions of {counts['prefixes']} prefixes; "
        f"teacher weights: {result['settings']['teacher_adapter']}",
        highlight=False,
    )
    for count, what in ((counts["dropped"], "responses"), (counts["dropped_prefixes"], "prefixes")):
        if count:
            console.print(f"{count} {what} were left out: they do not fit", style="bold red")
    table = Table(title="Causal shift (95 % interval, nats)", title_justify="left", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    for name in ("", "corrected", "plug-in"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for label, name, plugin, percent in _ROWS:
        table.add_row(label, _cell(summary[name], percent), _cell(summary[plugin], percent) if plugin else "")
    console.print(table)
    for text in filter(None, (result["verdict"], result["bias"])):
        console.print(text, highlight=False)
    for note in result["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    if file is not None:
        console.print(f"written: {file}", highlight=False, soft_wrap=True)


def _cell(value: Mapping[str, float] | None, percent: bool) -> str:
    if value is None:
        return "-"
    middle, low, high = (_number(value[k], percent) for k in ("estimate", "low", "high"))
    return rf"{middle} \[{low}, {high}]"


def _number(value: float, percent: bool, plus: str = "") -> str:
    value, digits = (100 * value, 2) if percent else (value, 5)
    return f"{round(value, digits) + 0.0:{plus}.{digits}f}"
