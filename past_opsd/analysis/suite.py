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
from typing import Any

import numpy as np

from past_opsd.analysis import settings, tables
from past_opsd.core import config, life, stats
from past_opsd.core.config import Recipe
from past_opsd.core.files import write_text
from past_opsd.core.nouns import PastError
from past_opsd.run import profiling
from past_opsd.run.evaluate import Evaluation, evaluation_steps, macro_avg, stack
from past_opsd.run.folder import METRICS, TIMINGS, RunFolder

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


@dataclass(frozen=True)
class Row:
    """One row's runs over seeds."""

    label: str
    recipe: str
    evaluations: list[dict[int, Evaluation]]  # by seed: step -> evaluation
    costs: dict[str, float]
    diagnostics: dict[str, float]
    settings: settings.Settings = field(default_factory=dict)

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
    return {name: Suite(name, t["title"], t["reference"], dict(t["rows"])) for name, t in tables.items()}


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

    def __exit__(self, *_: object) -> None:
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
    command = [sys.executable, "-m", "past_opsd", "train", recipe, "--out", str(folder), "--resume", *sets]
    own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), life.SWITCH: "off", life.PARENT: str(os.getpid())}
    group = 0 if os.name == "posix" else None  # its own: a Ctrl-C on the terminal is this process's to pass on
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | own, process_group=group
    )


def without(suite: Suite, failed: Mapping[str, str]) -> tuple[Suite, dict[str, str]]:
    """The suite without the rows whose runs failed, and those by label with the reason; the reference must be there."""
    missing = {label: failed[recipe] for label, recipe in suite.rows.items() if recipe in failed}
    rows = {label: recipe for label, recipe in suite.rows.items() if label not in missing}
    reference = suite.reference if suite.reference in rows else next(iter(rows), suite.reference)
    return replace(suite, rows=rows, reference=reference), missing


def collect(suite: Suite, seeds: Sequence[int], out: Path) -> list[Row]:
    """Read the runs of a suite."""
    rows = [
        row(label, recipe, [run_folder(out, recipe, seed) for seed in seeds]) for label, recipe in suite.rows.items()
    ]
    return [replace(row, settings=settings.of_run(run_folder(out, row.recipe, seeds[0]))) for row in rows]


def row(label: str, recipe: str, folders: Sequence[Path]) -> Row:
    """One method's line: its runs, one folder a seed, read and averaged."""
    evaluations, costs, diagnostics = [], [], []
    for folder in folders:
        run = RunFolder(folder)
        evaluations.append(run.read_evaluations())
        metrics, timings = run.read_metrics(), run.read_timings()
        if not metrics or not timings:
            raise PastError(f"{folder}: {METRICS} and {TIMINGS} hold no cycle; make the run again")
        seconds = sum(profiling.totals(timings).values())
        peak = max(line.get("peak_mib", math.nan) for line in timings)
        steps = sum(line.get("student/stepped", math.nan) for line in metrics)
        counted = {key: metrics[-1].get(f"cost/{key}", 0) for key in tables.COSTS}
        counted["verifier_calls"] += metrics[-1].get("cost/phase1_verifier_calls", 0)
        measured = {"student_steps": steps, "seconds": seconds, "peak_mib": peak}
        for name, value in (counted | measured).items():
            if not 0 <= value < 1e15:
                raise PastError(f"{folder}: {METRICS} and {TIMINGS} do not tell what the run cost ({name})")
        costs.append(counted | measured)
        diagnostics.append(
            {
                name: float(np.mean(values))
                for name, key in DIAGNOSTICS.items()
                if (values := [line[key] for line in metrics if abs(line.get(key, math.nan)) < 1e100])
            }
        )
    return Row(label, recipe, evaluations, _means(costs), _means(diagnostics))


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Key -> mean over the tables that have it."""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    return {key: float(np.mean([t[key] for t in tables if key in t])) for key in keys}


def results(
    suite: Suite, rows: Sequence[Row], seeds: Sequence[int], missing: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Everything the tables show, as plain data; `missing` rows by label, with the reason."""
    reference = next(row for row in rows if row.label == suite.reference)
    last = max(reference.evaluations[0])
    first = min(reference.evaluations[0])
    base, other = reference.outcomes(first), reference.outcomes(last)
    out: dict[str, Any] = {
        "suite": suite.name,
        "title": suite.title,
        "seeds": list(seeds),
        "reference": suite.reference,
        "samples": reference.evaluations[0][last].samples,
        "updates": last,
        "settings": settings.differences({row.label: row.settings for row in rows}, suite.reference),
        "rows": [_scores("Base", base, other)],
        "missing": dict(missing or {}),
    }
    for row in rows:
        at_end = other if row is reference else row.outcomes(max(row.evaluations[0]))
        scores = _scores(row.label, at_end, other)
        curve = {step: macro_avg(row.outcomes(step)) for step in sorted(row.evaluations[0])}
        by_seed = [macro_avg({t: o[i : i + 1] for t, o in row.outcomes(max(curve)).items()}) for i in range(len(seeds))]
        extra = {"recipe": row.recipe, "curve": curve, "by_seed": by_seed, "costs": row.costs}
        out["rows"].append(scores | extra | {"diagnostics": row.diagnostics})
    return out


def _scores(label: str, outcomes: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, Any]:
    def interval(unit: stats.Unit) -> list[float]:
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
    write_text(folder / "results.json", json.dumps(result, indent=1) + "\n")
    write_text(folder / "tables.md", tables.markdown(result))
    write_text(folder / "tables.tex", tables.latex(result))
    return folder
