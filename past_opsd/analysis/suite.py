"""`past compare`: a set of recipes over seeds, resumed where it was interrupted, and one table with paired intervals.

A suite is a table of a recipe folder's `suites.toml`: a title, a reference row and the rows by label. Runs live in
`OUT/runs/RECIPE-SEED`, are shared by suites, and are made by `past train --resume` in processes of their own, so a kill
of any process costs at most the cycles since a checkpoint. Results and tables follow from the runs' files alone.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from past_opsd.analysis import settings, tables
from past_opsd.analysis.results import evidence
from past_opsd.analysis.results.evidence import Record
from past_opsd.core import config, life, stats
from past_opsd.core.config import Recipe
from past_opsd.core.files import write_text
from past_opsd.core.nouns import PastError
from past_opsd.run import profiling
from past_opsd.run.evaluate import Evaluation, evaluation_steps, macro_avg, stack
from past_opsd.run.folder import METRICS, PREPARATION, TIMINGS, UNTRAINED, RunFolder

Outcomes = dict[str, np.ndarray]

COUNTED = (
    "student_samples",
    "student_tokens",
    "teacher_samples",
    "teacher_tokens",
    "phase1_samples",
    "phase1_tokens",
    "verifier_calls",
)
DIAGNOSTICS = {
    "teacher_success": "failed/success",
    "compatibility_kl": "teacher/stay/kl",
    "mixed": "failed/mixed",
    "all_success": "failed/all_success",
    "skipped": "failed/skipped",
    "retried": "failed/retried",
}


@dataclass(frozen=True)
class Suite:
    """Rows to compare: label -> recipe."""

    name: str
    title: str
    reference: str
    rows: dict[str, str]
    factors: dict[str, dict[str, bool]] = field(default_factory=dict[str, dict[str, bool]])
    """Row -> what it has and has not, for tables with a column for each."""
    sheets: tuple[str, ...] = ()
    """Tables of its own before those that every suite has, see `tables.OWN`."""
    worlds: tuple[str, ...] = ("default",)
    """For which base models it is run."""


@dataclass(frozen=True)
class Row:
    """One row's runs over seeds."""

    label: str
    recipe: str
    evaluations: list[dict[int, Evaluation]]  # by seed: step -> evaluation
    costs: dict[str, float]
    diagnostics: dict[str, float]
    settings: settings.Settings = field(default_factory=dict[str, str])
    missing: str = ""
    """Why there is nothing to show."""

    def outcomes(self, step: int) -> dict[str, np.ndarray]:
        """Task -> [seeds, problems, k] at a boundary."""
        return stack([by_step[step] for by_step in self.evaluations])


def suites(family: str) -> dict[str, Suite]:
    """The suites of a shipped recipe folder, by name."""
    path = config.SHIPPED / family / "suites.toml"
    if not path.is_file():
        known = sorted(p.parent.name for p in config.SHIPPED.glob("*/suites.toml"))
        raise PastError(f"no suites for '{family}'; recipe folders with suites: {', '.join(known)}")
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: _suite(name, table) for name, table in tables.items()}


def _suite(name: str, table: Mapping[str, Any]) -> Suite:
    more = {key: tuple(table[key]) for key in ("sheets", "worlds") if key in table}
    return Suite(name, table["title"], table["reference"], dict(table["rows"]), table.get("factors", {}), **more)


def find(name: str, family: str, reference: str | None = None) -> Suite:
    """A suite by name; `reference` chooses another row to take differences to."""
    known = suites(family)
    if name not in known:
        raise PastError(f"no suite '{name}' in '{family}'; known are {', '.join(known)}")
    found = known[name]
    if reference is None:
        return found
    if reference not in found.rows:
        raise PastError(f"--reference '{reference}' is no row of suite '{name}'; its rows are {', '.join(found.rows)}")
    return replace(found, reference=reference)


def run_folder(out: Path, recipe: str, seed: int) -> Path:
    """Where a row's run lives."""
    return out / "runs" / f"{recipe.replace('/', '-')}-{seed}"


def is_done(folder: Path, recipe: Recipe) -> bool:
    """Whether a run reached its last boundary and has all its evaluations."""
    run = RunFolder(folder)
    wanted = [run.evaluations.path(step) for step in evaluation_steps(recipe)]
    return run.checkpoint(recipe.run.cycles).is_dir() and all(path.is_file() for path in wanted)


def run_all(
    suite: Suite, seeds: Sequence[int], out: Path, jobs: int, overrides: Sequence[str], tell: Callable[[str], None]
) -> dict[str, str]:
    """Make every run that is not there yet, `jobs` at a time; a recipe whose run fails is returned with the reason."""
    failed: dict[str, str] = {}
    waiting: list[tuple[str, int, list[str]]] = []
    for seed in seeds:
        for recipe in dict.fromkeys(suite.rows.values()):
            settings = [f"run.seed={seed}", *overrides]
            try:
                if not is_done(run_folder(out, recipe, seed), config.load(recipe, settings)):
                    waiting.append((recipe, seed, settings))
            except PastError as error:
                failed.setdefault(recipe, str(error))
    total, done, began = len(waiting), 0, time.monotonic()
    running = _Running()
    asking = life.interruptible(lambda: f"the {running.count} runs under way finish their cycle, then a checkpoint")
    with asking as asked, ThreadPoolExecutor(jobs) as pool, running:
        made = {
            pool.submit(running.make, recipe, run_folder(out, recipe, seed), settings): (recipe, seed)
            for recipe, seed, settings in waiting
        }
        while made:
            life.doing(f"{running.count} runs under way")
            life.count(done, total, "are done")
            if asked():
                running.end()
            for future in wait(made, timeout=0.1, return_when=FIRST_COMPLETED).done:
                recipe, seed = made.pop(future)
                code, errors, seconds = future.result()
                if code in (None, 130, -signal.SIGTERM) and asked():
                    continue
                done += 1
                if code:
                    said = f"seed {seed}: {errors.strip().removeprefix('past: ') or f'exit code {code}'}"
                    failed.setdefault(recipe, said)
                    tell(f"{done}/{total} {recipe} failed, {said}")
                    continue
                left = (time.monotonic() - began) / done * (total - done)
                tell(f"{done}/{total} {recipe} seed {seed}: {seconds:.0f} s, about {left:.0f} s left")
        if asked():
            raise KeyboardInterrupt
    return failed


class _Running:
    """The processes under way; whatever still runs at the end is ended, and keeps what its last checkpoint has."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._ended = False

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        for _ in range(2):  # the second time at once
            self.end(again=True)
            time.sleep(0.2 * bool(self.count))

    @property
    def count(self) -> int:
        return len(self._processes)

    def make(self, recipe: str, folder: Path, settings: Sequence[str]) -> tuple[int | None, str, float]:
        """A run in a process of its own: exit code, what it said, seconds; no code where none is started any more."""
        began = time.monotonic()
        with self._lock:
            if self._ended:
                return None, "", 0.0
            process = _start(recipe, folder, settings)
            self._processes.append(process)
        _, errors = process.communicate()
        with self._lock:
            self._processes.remove(process)
        return process.returncode, errors, time.monotonic() - began

    def end(self, again: bool = False) -> None:
        """Start no more, and ask those under way to end: once they finish their cycle, asked again they do not."""
        with self._lock:
            asking, self._ended = again or not self._ended, True
            for process in self._processes if asking else ():
                process.terminate()


def _start(recipe: str, folder: Path, settings: Sequence[str]) -> subprocess.Popen[str]:
    sets = [word for setting in settings for word in ("--set", setting)]
    shared = folder.parent.parent / UNTRAINED
    command = [sys.executable, "-m", "past_opsd", "train", recipe, "--out", str(folder), "--resume", *sets]
    command += ["--untrained", str(shared)]
    own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), life.SWITCH: "off", life.PARENT: str(os.getpid())}
    group = 0 if os.name == "posix" else None  # its own: a Ctrl-C on the terminal is this process's to pass on
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | own, process_group=group
    )


def collect(suite: Suite, seeds: Sequence[int], out: Path, failed: Mapping[str, str] | None = None) -> list[Row]:
    """Read the runs of a suite; a row without all its runs, or whose recipe `failed`, says why."""

    def read(recipe: str, seed: int) -> Record:
        if failed and recipe in failed:
            raise PastError(failed[recipe])
        return evidence.read(run_folder(out, recipe, seed))

    return gather(suite, seeds, read)


def gather(suite: Suite, seeds: Sequence[int], read: Callable[[str, int], Record]) -> list[Row]:
    """The rows of a suite from its records, wherever they are read."""
    rows: list[Row] = []
    for label, recipe in suite.rows.items():
        try:
            records = [read(recipe, seed) for seed in seeds]
            for record in records:
                if not record.complete:
                    raise PastError(f"{record.place}: its last boundary has not been evaluated")
            rows.append(averaged(label, recipe, records))
        except PastError as error:
            rows.append(Row(label, recipe, [], {}, {}, missing=str(error)))
    return rows


def row(label: str, recipe: str, folders: Sequence[Path]) -> Row:
    """One method's line: its runs, one folder a seed, read and averaged."""
    return averaged(label, recipe, [evidence.read(folder) for folder in folders])


def averaged(label: str, recipe: str, records: Sequence[Record]) -> Row:
    """One method's line: its runs, one a seed."""
    diagnostics = [
        {
            name: float(np.mean(values))
            for name, key in DIAGNOSTICS.items()
            if (values := [line[key] for line in record.metrics if abs(line.get(key, math.nan)) < 1e100])
        }
        for record in records
    ]
    costs = [_costs(record) for record in records]
    evaluations, own = [record.evaluations for record in records], settings.of(records[0].settings)
    return Row(label, recipe, evaluations, _means(costs), _means(diagnostics), own)


def _costs(record: Record) -> dict[str, float]:
    """What a run sampled, verified, stepped and took; a device is a process, with its GPU where it has one."""
    metrics, timings = record.metrics, record.timings
    if not metrics or not timings:
        raise PastError(f"{record.place}: {METRICS} and {TIMINGS} hold no cycle; make the run again")
    last = metrics[-1]
    costs = {key: last.get(f"cost/{key}", 0) for key in COUNTED}
    costs["verifier_calls"] += last.get("cost/phase1_verifier_calls", 0)
    costs["tokens"] = sum(costs[key] for key in COUNTED if key.endswith("_tokens"))
    costs["phase1_steps"] = last.get("phase1/steps", 0)
    costs["student_steps"] = sum(line.get("student/stepped", math.nan) for line in metrics)
    costs["teacher_steps"] = sum(line.get("teacher/stepped", 0) for line in metrics)
    costs |= {key: sum(line.get(f"rollout/{key}", 0) for line in metrics) for key in ("replaced", "dropped")}
    seconds = [sum(profiling.totals([line]).values()) for line in timings]
    costs["seconds"] = sum(seconds)
    costs["device_seconds"] = sum(s * line.get("processes", 1) for s, line in zip(seconds, timings, strict=True))
    costs["phase1_seconds"] = sum(s for s, line in zip(seconds, timings, strict=True) if line["cycle"] == PREPARATION)
    costs["learner_seconds"] = sum(profiling.totals(timings).get(name, 0) for name in ("adapt", "distill"))
    costs["peak_mib"] = max(line.get("peak_mib", math.nan) for line in timings)
    if record.sizes:
        adapters = 2 if costs["teacher_steps"] else 1
        costs["trained"] = adapters * record.sizes["adapter"]
        costs["deployed"] = record.sizes["base"] + record.sizes["adapter"]
    for name, value in costs.items():
        if not 0 <= value < 1e15:
            raise PastError(f"{record.place}: {METRICS} and {TIMINGS} do not tell what the run cost ({name})")
    return costs


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Key -> mean over the tables that have it."""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    return {key: float(np.mean([t[key] for t in tables if key in t])) for key in keys}


def results(suite: Suite, rows: Sequence[Row], seeds: Sequence[int]) -> dict[str, Any]:
    """Everything the tables show, as plain data."""
    present = {row.label: row for row in rows if not row.missing}
    if not present:
        raise PastError(f"suite '{suite.name}': no row has its runs; {rows[0].label}: {rows[0].missing}")
    reference = present.get(suite.reference)
    known = reference or next(iter(present.values()))
    last, first = max(known.evaluations[0]), min(known.evaluations[0])
    other = reference.outcomes(last) if reference else None
    out: dict[str, Any] = {
        "suite": suite.name,
        "title": suite.title,
        "sheets": list(suite.sheets),
        "seeds": list(seeds),
        "reference": suite.reference,
        "samples": known.evaluations[0][last].samples,
        "cycles": last,
        "factors": suite.factors,
        "settings": settings.differences({label: row.settings for label, row in present.items()}, suite.reference),
        "rows": [_scores("Base", known.outcomes(first), other)],
    }
    for row in rows:
        if row.missing:
            out["rows"].append({"label": row.label, "recipe": row.recipe, "missing": row.missing})
            continue
        at_end = other if row is reference and other else row.outcomes(max(row.evaluations[0]))
        scores = _scores(row.label, at_end, other)
        curve = {step: macro_avg(row.outcomes(step)) for step in sorted(row.evaluations[0])}
        by_seed = [macro_avg({t: o[i : i + 1] for t, o in row.outcomes(max(curve)).items()}) for i in range(len(seeds))]
        extra = {"recipe": row.recipe, "curve": curve, "by_seed": by_seed, "costs": row.costs}
        out["rows"].append(scores | extra | {"diagnostics": row.diagnostics})
    return _rounded(out)


def _rounded(value: Any) -> Any:
    """To nine decimals: another processor adds in another order."""
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in cast("Sequence[Any]", value)]
    return value


def _scores(label: str, outcomes: Outcomes, reference: Outcomes | None) -> dict[str, Any]:
    def interval(unit: stats.Unit) -> list[float] | None:
        if reference is None:
            return None
        if outcomes is reference:
            return [0.0, 0.0, 0.0]
        found = stats.paired_bootstrap(outcomes, reference, unit=unit)
        return [found.estimate, found.low, found.high]

    own = stats.bootstrap(outcomes)
    return {
        "label": label,
        "tasks": {task: stats.avg_at_k(values) for task, values in outcomes.items()},
        "macro": [own.estimate, own.low, own.high],
        "pass": stats.macro({task: stats.pass_at_k(values, values.shape[-1]) for task, values in outcomes.items()}),
        "difference": interval("sample"),
        "difference_by_problem": interval("problem"),
    }


def save(out: Path, result: Mapping[str, Any]) -> Path:
    """Write `OUT/SUITE/results.json`, `tables.md` and `tables.tex`; returns the folder."""
    folder = out / result["suite"]
    for name, text in files(result).items():
        write_text(folder / name, text)
    return folder


def files(result: Mapping[str, Any]) -> dict[str, str]:
    """A suite's results as files, by name."""
    return {
        "results.json": json.dumps(result, indent=1) + "\n",
        "tables.md": tables.markdown(result),
        "tables.tex": tables.latex(result),
    }
