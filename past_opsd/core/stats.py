"""Scores of verified samples and their bootstrap intervals; docs/statistics.md says what each number means.

Outcomes are arrays of 0 and 1. One run on one task is [problems, k]; with the training seeds in front it
is [seeds, problems, k]. A result set is a mapping task -> [seeds, problems, k]. Scores are fractions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from past_opsd.core.nouns import PastError, derive_seed

Unit = Literal["sample", "problem", "problem+seed"]
Results = Mapping[str, npt.ArrayLike]
Floats = npt.NDArray[np.float64]

EDGE = "Wilson's bound where all came out alike"
"""The words under tables: no interval has no width because something was never seen."""

# Bounds the index arrays of the problem bootstrap: about 8 bytes each.
_CHUNK = 2_000_000

_SET = {3: "[seeds, problems, k]"}
_RUN = {2: "[problems, k]"} | _SET
_SCORES = {2: "[seeds, problems]"}


@dataclass(frozen=True, slots=True)
class Interval:
    """A macro score, or a difference of two, with its percentile bootstrap interval, honest at the edge."""

    estimate: float
    low: float
    high: float
    resamples: int
    level: float
    unit: Unit


def avg_at_k(outcomes: npt.ArrayLike) -> float:
    """Avg@k: the mean over problems (and seeds) of the share of a problem's k samples that is correct."""
    return float(_binary(outcomes, "avg_at_k", _RUN).mean())


def pass_at_k(outcomes: npt.ArrayLike, k: int, at_least: int = 1) -> float:
    """pass@k: the chance that `at_least` of k samples are correct, from the n >= k that were drawn.

    Unbiased: the share of the k-subsets of the n samples that hold `at_least` correct ones; for one it is
    1 - C(n-c, k) / C(n, k). G-Pass@k at the threshold t is `at_least=max(1, ceil(t * k))`.
    """
    return float(pass_scores(outcomes, k, at_least).mean())


def pass_scores(outcomes: npt.ArrayLike, k: int, at_least: int = 1) -> Floats:
    """`pass_at_k` of each problem: [problems] or [seeds, problems], to be given to `bootstrap_scores`."""
    array = _binary(outcomes, "pass_at_k", _RUN)
    n = array.shape[-1]
    if not 1 <= k <= n:
        raise PastError(f"pass_at_k: k = {k} needs between 1 and all of the {n} samples that each problem has")
    if not 1 <= at_least <= k:
        raise PastError(f"pass_at_k: at_least = {at_least} must lie between 1 and k = {k}")
    correct = array.sum(axis=-1, dtype=np.int64)
    values, where = np.unique(correct, return_inverse=True)
    return np.array([_subset_share(n, int(c), k, at_least) for c in values])[where.reshape(correct.shape)]


def _subset_share(n: int, c: int, k: int, at_least: int) -> float:
    # Integers until the one division: no cancellation and no overflow, whatever n and k.
    total = math.comb(n, k)
    fewer = sum(math.comb(c, j) * math.comb(n - c, k - j) for j in range(at_least))
    return (total - fewer) / total


def majority_at_k(outcomes: npt.ArrayLike, answers: npt.ArrayLike) -> float:
    """Maj@k: the share of problems whose most frequent answer is correct.

    `answers` holds the extracted answer of every sample, in the shape of `outcomes`. Answers vote as the
    strings they are: normalise them first if 1/2 and 0.5 shall be one. A sample without an answer (None)
    does not vote; a problem without a vote is wrong. A tie goes to the answer that occurs first, and an
    answer is as correct as its first occurrence.
    """
    return float(majority_scores(outcomes, answers).mean())


def majority_scores(outcomes: npt.ArrayLike, answers: npt.ArrayLike) -> Floats:
    """`majority_at_k` of each problem: [problems] or [seeds, problems], to be given to `bootstrap_scores`."""
    array = _binary(outcomes, "majority_at_k", _RUN)
    words = np.asarray(answers, dtype=object)
    if words.shape != array.shape:
        raise PastError(f"majority_at_k: outcomes have the shape {array.shape}, answers {words.shape}; give one each")
    k = array.shape[-1]
    rows = zip(array.reshape(-1, k), words.reshape(-1, k), strict=True)
    return np.array([_majority(verdicts, votes) for verdicts, votes in rows]).reshape(array.shape[:-1])


def _majority(verdicts: np.ndarray, votes: np.ndarray) -> float:
    cast = [vote for vote in votes if vote is not None]
    if not cast:
        return 0.0
    # most_common sorts stably, so the first answer to occur wins a tie.
    winner = Counter(cast).most_common(1)[0][0]
    return float(verdicts[list(votes).index(winner)])


def macro(scores: Mapping[str, float]) -> float:
    """The mean over tasks, each with the same weight however many problems it has."""
    if not scores:
        raise PastError("macro: there is no task to average over")
    return math.fsum(scores.values()) / len(scores)


def choose_unit(results: Mapping[str, np.ndarray]) -> Unit | None:
    """One draw a problem leaves the problems to resample; one problem as well leaves nothing."""
    if all(values.shape[2] > 1 for values in results.values()):
        return "sample"
    return "problem" if all(values.shape[1] > 1 for values in results.values()) else None


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a rate seen `successes` times in `n` independent draws; 0 of 12 gives [0, 0.24]."""
    if not 0 <= successes <= n or n < 1:
        raise PastError(f"wilson: {successes} successes of {n} draws is impossible")
    z2 = _z(level) ** 2
    middle = (successes + z2 / 2) / (n + z2)
    half = math.sqrt(z2 * (successes * (n - successes) / n + z2 / 4)) / (n + z2)
    return (0.0 if successes == 0 else middle - half), (1.0 if successes == n else middle + half)


def _z(level: float) -> float:
    if not 0.0 < level < 1.0:
        raise PastError(f"bootstrap: level must lie between 0 and 1, got {level}")
    return NormalDist().inv_cdf((1.0 + level) / 2.0)


def bootstrap(
    results: Results, *, unit: Unit = "sample", resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Interval:
    """The macro Avg@k of one method with its interval; `unit` as in `paired_bootstrap`."""
    return _interval(_result_set(results, "results"), unit, resamples, level, seed, (0.0, 1.0))


def paired_bootstrap(
    a: Results, b: Results, *, unit: Unit = "sample", resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Interval:
    """The difference a - b of two methods' macro Avg@k, with a percentile bootstrap interval.

    Both must hold the same tasks, seeds, problems and k: whatever is resampled is resampled in both alike.

    - `unit="sample"` is the paper's interval: within every (task, seed, problem) stratum the k paired draws
      are resampled. It answers "would the difference survive if these checkpoints answered these problems
      again?" and takes the problems and the trained checkpoints as given.
    - `unit="problem"` resamples the problems of a task, each with all its seeds and draws. It answers
      "would it hold on other problems of the same kind?" for these checkpoints.
    - `unit="problem+seed"` resamples the problems and, across all tasks at once, the training seeds. It
      answers "would it hold on other problems after training again?"; with three seeds it is a rough guide.
    """
    left, right = _result_set(a, "a"), _result_set(b, "b")
    if left.keys() != right.keys():
        raise PastError(
            f"paired_bootstrap: a has the tasks {sorted(left)}, b has {sorted(right)}; compare like with like"
        )
    for task in left:
        if left[task].shape != right[task].shape:
            raise PastError(
                f"paired_bootstrap: task {task!r} is {left[task].shape} [seeds, problems, k] in a but "
                f"{right[task].shape} in b; evaluate both on the same seeds and problems with the same k"
            )
    return _interval({task: left[task] - right[task] for task in left}, unit, resamples, level, seed, (-1.0, 1.0))


def bootstrap_scores(
    scores: Results,
    *,
    unit: Unit = "problem",
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
    bounds: tuple[float, float] | None = None,
) -> Interval:
    """The macro mean of any score per problem, task -> [seeds, problems], with its interval.

    For pass@k, Maj@k, length and the like; give the differences of two methods for a paired interval.
    The draws behind a score are not seen here, so `unit="sample"` is not possible. `bounds` are the least and the
    greatest possible score: (0, 1) for a rate, (-1, 1) for a difference of rates. Without them scores that are all
    alike have an interval of no width.
    """
    if unit == "sample":
        raise PastError("bootstrap_scores: the samples behind a score are not known; use 'problem' or 'problem+seed'")
    if not scores:
        raise PastError("bootstrap_scores: there is no task")
    arrays = {task: _array(values, f"scores[{task!r}]", _SCORES).astype(np.float64) for task, values in scores.items()}
    for task, array in arrays.items():
        if not np.isfinite(array).all():
            raise PastError(f"bootstrap_scores: task {task!r} has scores that are not finite")
        if bounds is not None and (array.min() < bounds[0] or array.max() > bounds[1]):
            raise PastError(f"bootstrap_scores: task {task!r} has scores outside of the bounds {bounds}")
    return _interval(arrays, unit, resamples, level, seed, bounds)


def _interval(
    values: Mapping[str, np.ndarray],
    unit: Unit,
    resamples: int,
    level: float,
    seed: int,
    bounds: tuple[float, float] | None,
) -> Interval:
    """`values` are per draw [seeds, problems, k] or, for the problem units, per problem [seeds, problems]."""
    if unit not in get_args(Unit):
        raise PastError(f"bootstrap: unknown unit {unit!r}; choose one of {', '.join(get_args(Unit))}")
    z = _z(level)
    if resamples * (1.0 - level) < 2.0 - 1e-9:
        raise PastError(f"bootstrap: {resamples} resamples are too few for a {level:.0%} interval; 10,000 are usual")
    # Sorted, so that the interval does not depend on the order in which the tasks were given.
    values = {task: values[task] for task in sorted(values)}
    _check_resampling(values, unit)
    rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
    if unit == "sample":
        replicates = _resample_draws(values, resamples, rng)
    else:
        scores = {task: array.reshape(*array.shape[:2], -1).mean(axis=2) for task, array in values.items()}
        replicates = _resample_problems(scores, resamples, rng, seeds=unit == "problem+seed")
    low, high = np.quantile(replicates, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    estimate = macro({task: float(array.mean()) for task, array in values.items()})
    down, up = _edge(values, unit, z, bounds) if bounds is not None else (0.0, 0.0)
    return Interval(estimate, min(float(low), estimate - down), max(float(high), estimate + up), resamples, level, unit)


def _edge(values: Mapping[str, np.ndarray], unit: Unit, z: float, bounds: tuple[float, float]) -> tuple[float, float]:
    """How far below and above the estimate the truth may lie for what came out all alike and resampling cannot move.

    What never happened in n draws may still happen in z^2 / (n + z^2) of them, Wilson's bound. Parts that are
    independent, tasks among them, add up by their squares (Newcombe's way).
    """
    down = up = 0.0
    for array in values.values():
        alike, total = _alike(array, unit, bounds)
        for value, n in alike.items():
            unseen = z * z / (n + z * z) * n / total / len(values)
            down += (unseen * _reach(value - bounds[0])) ** 2
            up += (unseen * _reach(bounds[1] - value)) ** 2
    return math.sqrt(down), math.sqrt(up)


def _alike(array: np.ndarray, unit: Unit, bounds: tuple[float, float]) -> tuple[dict[float, int], int]:
    """Value -> how many draws (problems) show it without exception, and how many there are.

    Draws count where all of their stratum are alike; problems where all of them are alike, or are rights and wrongs.
    """
    if unit == "sample":
        strata = array.reshape(-1, array.shape[2])
        constant = strata[(strata == strata[:, :1]).all(axis=1)][:, 0]
        values, counts = np.unique(constant, return_counts=True)
        return {float(v): int(c) * strata.shape[1] for v, c in zip(values, counts, strict=True)}, strata.size
    scores = array.reshape(*array.shape[:2], -1).mean(axis=(0, 2))
    values, counts = np.unique(scores, return_counts=True)
    if len(values) > 1 and not set(values) <= {bounds[0], 0.0, bounds[1]}:
        return {}, len(scores)
    return {float(v): int(c) for v, c in zip(values, counts, strict=True)}, len(scores)


def _reach(distance: float) -> float:
    """How far an outcome can move: to its bound; where both sides of a difference can move, by their squares."""
    return min(distance, math.sqrt(max(0.0, distance)))


def _check_resampling(values: Mapping[str, np.ndarray], unit: Unit) -> None:
    """Refuse what would give an interval of no width: resampling one thing says nothing about its spread."""
    for task, array in values.items():
        if unit == "sample" and array.shape[2] < 2:
            raise PastError(f"bootstrap: task {task!r} has one sample a problem; use unit='problem' or draw more")
        if unit != "sample" and array.shape[1] < 2:
            raise PastError(f"bootstrap: task {task!r} has one problem; only unit='sample' can tell anything")
    if unit == "problem+seed":
        seeds = {task: array.shape[0] for task, array in values.items()}
        if len(set(seeds.values())) > 1:
            raise PastError(f"bootstrap: unit='problem+seed' needs the same seeds in every task, got {seeds}")
        if min(seeds.values()) < 2:
            raise PastError("bootstrap: unit='problem+seed' needs at least two seeds; use unit='problem' for one")


def _resample_draws(values: Mapping[str, np.ndarray], resamples: int, rng: np.random.Generator) -> Floats:
    """Macro means after resampling the k draws within every (task, seed, problem) stratum.

    A resampled stratum is a multinomial over its counts of -1, 0 and +1, and strata with equal counts add
    up to one multinomial with as many times the trials: exact, and independent of the number of problems.
    """
    total = np.zeros(resamples)
    for array in values.values():
        k = array.shape[2]
        counts = np.stack([(array == -1).sum(axis=2), (array == 1).sum(axis=2)], axis=-1).reshape(-1, 2)
        task_sum = np.zeros(resamples, dtype=np.int64)
        for (minus, plus), strata in zip(*np.unique(counts, axis=0, return_counts=True), strict=True):
            shares = np.array([minus, plus, k - minus - plus]) / k
            drawn = rng.multinomial(int(strata) * k, shares, size=resamples)
            task_sum += drawn[:, 1] - drawn[:, 0]
        total += task_sum / array.size
    return total / len(values)


def _resample_problems(scores: Mapping[str, Floats], resamples: int, rng: np.random.Generator, seeds: bool) -> Floats:
    """Macro means after resampling problems within each task, and the seeds of all tasks together if `seeds`."""
    total = np.zeros(resamples)
    # A seed is one trained model, so the same seeds are drawn for all tasks of a resample.
    count = next(iter(scores.values())).shape[0]
    weights = rng.multinomial(count, np.full(count, 1.0 / count), size=resamples) / count if seeds else None
    for array in scores.values():
        problems = array.shape[1]
        step = max(1, _CHUNK // problems)
        for start in range(0, resamples, step):
            rows = slice(start, min(start + step, resamples))
            picked = rng.integers(problems, size=(rows.stop - rows.start, problems))
            if weights is None:
                total[rows] += array.mean(axis=0)[picked].mean(axis=1)
            else:
                total[rows] += np.take_along_axis(weights[rows] @ array, picked, axis=1).mean(axis=1)
    return total / len(scores)


def _result_set(results: Results, name: str) -> dict[str, npt.NDArray[np.int8]]:
    if not results:
        raise PastError(f"bootstrap: {name} holds no task")
    return {task: _binary(values, f"{name}[{task!r}]", _SET) for task, values in results.items()}


def _binary(outcomes: npt.ArrayLike, where: str, layouts: Mapping[int, str]) -> npt.NDArray[np.int8]:
    array = _array(outcomes, where, layouts)
    if not ((array == 0) | (array == 1)).all():
        raise PastError(f"{where}: outcomes are 0 or 1, found other values")
    return array.astype(np.int8)


def _array(values: npt.ArrayLike, where: str, layouts: Mapping[int, str]) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise PastError(f"{where}: every problem needs the same number of samples ({error})") from error
    if array.dtype.kind not in "buif":
        raise PastError(f"{where}: expected numbers, got an array of {array.dtype}")
    if array.ndim not in layouts:
        raise PastError(f"{where}: expected {' or '.join(layouts.values())}, got the shape {array.shape}")
    if array.size == 0:
        raise PastError(f"{where}: empty, of shape {array.shape}; every task needs at least one problem and sample")
    return array
