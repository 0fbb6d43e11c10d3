"""The records of runs as the report reads them: found, loaded, and grouped into methods over seeds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from past_opsd.analysis import suite
from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.run import profiling, train
from past_opsd.run.evaluate import Evaluation
from past_opsd.run.folder import DEPTH, RECIPE, RunFolder, runs_below

MOST = 1e100  # what is larger, infinite or no number is left out of a figure
# Settings that do not change what a run learns: runs that differ in these alone are the same method.
INCIDENTAL = ("seed", "threads", "checkpoint_every", "keep_checkpoints")


@dataclass(frozen=True)
class Run:
    """One run's folder: what it was asked to do and what it wrote down so far."""

    folder: Path
    recipe: Recipe
    metrics: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    evaluations: dict[int, Evaluation]
    probes: dict[int, dict[str, Any]]
    shifts: dict[int, dict[str, Any]]
    warnings: list[str]
    completed: int

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def seed(self) -> int:
        return self.recipe.run.seed

    @cached_property
    def summaries(self) -> dict[int, dict[str, float]]:
        """`Evaluation.summary` by boundary."""
        return {step: e.summary([e.samples]) for step, e in self.evaluations.items()}


@dataclass(frozen=True)
class Method:
    """Runs of one recipe, by training seed."""

    name: str
    label: str
    runs: dict[int, Run]

    @property
    def recipe(self) -> Recipe:
        """The recipe; it differs between seeds in incidental settings alone."""
        return next(iter(self.runs.values())).recipe


@dataclass(frozen=True)
class Band:
    """A quantity over cycles: mean and range over the seeds that have it."""

    x: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: list[int]


Traces = Mapping[int, Mapping[int, float]]  # seed -> x -> value


def find(paths: Iterable[str | Path], tell: Callable[[str], None] = lambda text: None) -> list[Run]:
    """The runs in the given folders, each a run or a folder that holds runs at most three levels down.

    A run that was given and is damaged is refused; one that was found below is told and left out of the others.
    """
    found: dict[Path, Run] = {}
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            raise PastError(f"{path}: no such folder; give a run folder or a folder that holds runs")
        problems: list[str] = []
        inner = runs_below(path, problems.append)
        if not inner and not problems:
            raise PastError(
                f"{path}: holds no run (a folder with {RECIPE}, at most {DEPTH} levels down); "
                "'past train RECIPE --out DIR' makes one"
            )
        whole = {}
        for run in (RunFolder(run.path.resolve()) for run in inner):
            try:
                whole[run.path] = found.get(run.path) or load(run.path)
            except PastError as error:
                if inner == [RunFolder(path)]:
                    raise
                problems.append(f"{run} is left out: {error}")
        if not whole:
            raise PastError("; ".join(problems))
        for problem in problems:
            tell(problem)
        found |= whole
    return list(found.values())


def load(path: Path) -> Run:
    """One run; it may be in training still."""
    run = RunFolder(path)
    recipe, metrics = run.recipe(), run.read_metrics()
    last = metrics[-1]["cycle"] + 1 if metrics else 0
    completed = max([last, *run.steps()])
    try:
        outcome = train.outcome(recipe, run, completed)
    except PastError as error:
        told = str(error)
        raise PastError(told if str(path) in told else f"{path}: {told}") from None
    return Run(
        folder=path,
        recipe=recipe,
        metrics=metrics,
        timings=run.read_timings(),
        evaluations=outcome.evaluations,
        probes=run.read_probes(),
        shifts=run.read_shifts(),
        warnings=outcome.warnings,
        completed=completed,
    )


def methods(runs: Sequence[Run]) -> list[Method]:
    """Runs grouped over seeds, in the order of the shipped suites, then as given.

    Runs whose settings differ, or that repeat a seed, are different methods and are told apart by folder.
    """
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    found: list[Method] = []
    order = {name: i for i, name in enumerate(_labels())}
    labels = {name: _labels().get(name, name) for name in by_name}
    for name in sorted(by_name, key=lambda n: order.get(n, len(order))):
        clash = Counter(labels.values())[labels[name]] > 1
        label = f"{labels[name]} ({name})" if clash and labels[name] != name else labels[name]
        groups = _groups(by_name[name])
        for place, members in groups.items():
            suffix = f" ({place})" if len(groups) > 1 else ""
            by_seed = {run.seed: run for run in sorted(members, key=lambda run: run.seed)}
            found.append(Method(name + suffix, label + suffix, by_seed))
    return found


@cache
def _labels() -> dict[str, str]:
    """Shipped recipe -> what the suites call it first."""
    found: dict[str, str] = {}
    for path in sorted(config.SHIPPED.glob("*/suites.toml")):
        for known in suite.suites(path.parent.name).values():
            for label, recipe in known.rows.items():
                found.setdefault(recipe, label)
    return found


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one recipe name, split where they cannot be one method; keys are folder names that tell them apart."""
    parts: dict[Any, list[Run]] = {}
    for run in runs:
        parts.setdefault(_settings(run.recipe), []).append(run)
    splits: list[Callable[[Run], Path]] = [lambda run: run.folder.parent, lambda run: run.folder]
    for split in splits:
        pieces: dict[Any, list[Run]] = {}
        for key, members in parts.items():
            repeated = len({run.seed for run in members}) < len(members)
            for run in members:
                pieces.setdefault((key, split(run)) if repeated else key, []).append(run)
        parts = pieces
    groups = list(parts.values())
    places = [members[0].folder if len(members) == 1 else members[0].folder.parent for members in groups]
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = [str(Path(*place.parts[-depth:])) for place in places]
        if len(set(names)) == len(names):
            return dict(zip(names, groups, strict=True))
    names = [str(members[0].folder) for members in groups]
    return dict(zip(names, groups, strict=True))


def _settings(recipe: Recipe) -> str:
    plain = config.dump(recipe)
    plain["run"] = {key: value for key, value in plain["run"].items() if key not in INCIDENTAL}
    return json.dumps(plain, sort_keys=True)


def trace(method: Method, key: str) -> dict[int, dict[int, float]]:
    """A metric over cycles, by seed; seeds and cycles without it are left out."""
    found = {
        seed: {line["cycle"]: line[key] for line in run.metrics if _drawable(line.get(key))}
        for seed, run in method.runs.items()
    }
    return {seed: values for seed, values in found.items() if values}


def _drawable(value: float | None) -> bool:
    """A number that fits an axis."""
    return value is not None and abs(value) < MOST


def scores(method: Method, key: str, missing: float | None = None) -> dict[int, dict[int, float]]:
    """A number of `Evaluation.summary` over boundaries, by seed; `@k` stands for the samples of a problem.

    Boundaries without it are left out, or hold `missing`.
    """
    found: dict[int, dict[int, float]] = {}
    for seed, run in method.runs.items():
        values = {}
        for step, evaluation in run.evaluations.items():
            value = run.summaries[step].get(key.replace("@k", f"@{evaluation.samples}"), missing)
            if value is not None:
                values[step] = value
        if values:
            found[seed] = values
    return found


def last_step(method: Method) -> int | None:
    """The last boundary that most seeds reached, so that an unfinished seed does not stand for the method."""
    steps = [step for run in method.runs.values() for step in run.evaluations]
    return max(steps, key=lambda step: (steps.count(step), step), default=None)


def change(traces: Traces) -> dict[int, dict[int, float]]:
    """Each seed's difference to its own value at 0; seeds without one are left out."""
    return {seed: {x: v - values[0] for x, v in values.items()} for seed, values in traces.items() if 0 in values}


def smooth(traces: Traces, half: int) -> dict[int, dict[int, float]]:
    """Each seed's centred mean over the values within `half` on either side, at every cycle that has one near."""
    found: dict[int, dict[int, float]] = {}
    for seed, values in traces.items():
        first, last = min(values), max(values)
        cycles = {y for x in values for y in range(max(first, x - half), min(last, x + half) + 1)}
        near = {x: [values[y] for y in range(x - half, x + half + 1) if y in values] for x in sorted(cycles)}
        found[seed] = {x: fmean(those) for x, those in near.items()}
    return found


def band(traces: Traces) -> Band:
    """Mean and range over seeds wherever a seed has a value."""
    xs = sorted({x for values in traces.values() for x in values})
    columns = [[values[x] for values in traces.values() if x in values] for x in xs]
    return Band(xs, [fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns], list(traces))


def measured(method: Method) -> suite.Row | None:
    """Costs and diagnostics as `past compare` takes them, means over the seeds that have completed a cycle."""
    folders = [run.folder for run in method.runs.values() if run.metrics and run.timings]
    return suite.row(method.label, method.name, folders) if folders else None


def phases(method: Method) -> dict[str, float]:
    """Training seconds by phase, means over seeds."""
    found = [profiling.totals(run.timings) for run in method.runs.values() if run.timings]
    names = dict.fromkeys(name for total in found for name in total)
    return {name: fmean(total.get(name, 0.0) for total in found) for name in names}
