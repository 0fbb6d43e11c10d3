"""The headline numbers of runs: scores with intervals, paired differences, and what the recipes differ in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from past_opsd.analysis.report.data import Method, last_step
from past_opsd.core import config, stats
from past_opsd.core.reading import is_table
from past_opsd.core.stats import Interval
from past_opsd.run.evaluate import Evaluation, macro_avg, stack

Outcomes = Mapping[str, np.ndarray]  # task -> [seeds, problems, k]


@dataclass(frozen=True)
class Row:
    """One method at one boundary, over the seeds evaluated there."""

    label: str
    step: int
    seeds: str
    samples: int
    tasks: dict[str, float]
    macro: float
    interval: Interval | None
    passed: float
    difference: Interval | None = None
    against: str = ""

    @property
    def low(self) -> float:
        return self.macro if self.interval is None else self.interval.low

    @property
    def high(self) -> float:
        return self.macro if self.interval is None else self.interval.high


def scores(methods: Sequence[Method]) -> list[Row]:
    """One method at every boundary, against its start; or every method at its last one, against the baseline."""
    if len(methods) == 1:
        return list(_curve(methods[0]))
    evaluated = [m for m in methods if last_step(m) is not None]
    return list(_compared(evaluated)) if evaluated else []


def _curve(method: Method) -> Iterator[Row]:
    steps = sorted({step for run in method.runs.values() for step in run.evaluations})
    for step in steps:
        found, start = _evaluations(method, step), _evaluations(method, steps[0])
        against = None if step == steps[0] else start
        yield _row(method.label, step, found, against, "the start")


def _compared(methods: Sequence[Method]) -> Iterator[Row]:
    baseline = next((m for m in methods if config.ask_method(m.recipe).baseline), methods[0])
    reference = _evaluations(baseline, last_step(baseline) or 0)
    base = _evaluations(baseline, 0)
    if base and last_step(baseline):
        yield _row("Base model", 0, base, None, baseline.label)
    for method in methods:
        step = last_step(method) or 0
        found = _evaluations(method, step)
        yield _row(method.label, step, found, None if method is baseline else reference, baseline.label)


def _evaluations(method: Method, step: int) -> dict[int, Evaluation]:
    return {seed: run.evaluations[step] for seed, run in method.runs.items() if step in run.evaluations}


def _row(
    label: str, step: int, found: Mapping[int, Evaluation], other: Mapping[int, Evaluation] | None, against: str
) -> Row:
    outcomes = stack(list(found.values()))
    samples = next(iter(found.values())).samples
    return Row(
        label=label,
        step=step,
        seeds=", ".join(map(str, found)),
        samples=samples,
        tasks={task: stats.avg_at_k(values) for task, values in outcomes.items()},
        macro=macro_avg(outcomes),
        interval=_own(outcomes),
        passed=stats.macro({task: stats.pass_at_k(values, samples) for task, values in outcomes.items()}),
        difference=None if other is None else _paired(found, other),
        against=against,
    )


def _own(outcomes: Outcomes) -> Interval | None:
    unit = stats.choose_unit(outcomes)
    return None if unit is None else stats.bootstrap(outcomes, unit=unit)


def _paired(a: Mapping[int, Evaluation], b: Mapping[int, Evaluation]) -> Interval | None:
    """Over the seeds that both have; None where the two were not evaluated alike."""
    common = [seed for seed in a if seed in b]
    if not common:
        return None
    left, right = stack([a[s] for s in common]), stack([b[s] for s in common])
    if {t: v.shape for t, v in left.items()} != {t: v.shape for t, v in right.items()}:
        return None
    unit = stats.choose_unit(left)
    return None if unit is None else stats.paired_bootstrap(left, right, unit=unit)


def differences(methods: Sequence[Method]) -> dict[str, list[str]]:
    """Setting -> its value in each method, for settings that are not the same in all runs."""
    flat = [[dict(_leaves(config.dump(run.recipe))) for run in m.runs.values()] for m in methods]
    keys = dict.fromkeys(key for runs in flat for run in runs for key in run)
    out: dict[str, list[str]] = {}
    for key in keys:
        values = [list(dict.fromkeys(run.get(key, "") for run in runs)) for runs in flat]
        if key not in ("name", "description") and len({v for group in values for v in group}) > 1:
            out[key] = [", ".join(group) for group in values]
    # Settings that every method has come first; the others are options of some methods alone.
    return dict(sorted(out.items(), key=lambda item: not all(item[1])))


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if is_table(value) and value and set(value) != {"float"}:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif is_table(value) and value:
        yield path, str(value["float"])
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)
