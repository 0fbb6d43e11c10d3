"""What tables, intervals and curves follow from, without the runs themselves: Parquet files.

runs.parquet        a row a run: recipe, seed, settings, sizes
outcomes.parquet    a row a run, boundary and held-out set: the outcome of every draw, eight to a byte
cycles.parquet      a row a run and cycle: the metrics that tables read, and the seconds by phase
measured.parquet    a row a probe or shift of a run, where there are any: its estimates
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from past_opsd.core import config
from past_opsd.core.files import whole
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import MOST, plain
from past_opsd.run import checkpoint
from past_opsd.run.evaluate import Evaluation, TaskResult
from past_opsd.run.folder import RunFolder, runs_below

pa: Any = pyarrow  # it has no types
pq: Any = pyarrow.parquet
KEPT = ("cost/", "failed/", "group/", "hints/", "phase1/", "rollout/")
ALSO = (
    *("student/stepped", "teacher/stepped", "student/distill/kl", "teacher/correct/kl", "teacher/stay/kl"),
    *("student/distill/entropy", "teacher/correct/entropy", "teacher/stay/entropy"),
)
TIMED = "time/"
WORLDS = "worlds"
"""The folder of evidence by base model, within a family's."""
_RUNS = pa.schema(
    [
        ("recipe", pa.string()),
        ("seed", pa.int64()),
        ("base", pa.int64()),
        ("adapter", pa.int64()),
        ("settings", pa.string()),
    ]
)
_OUTCOMES = pa.schema(
    [
        ("recipe", pa.string()),
        ("seed", pa.int64()),
        ("step", pa.int32()),
        ("task", pa.string()),
        ("samples", pa.int32()),
        ("dropped", pa.int32()),
        ("problems", pa.list_(pa.string())),
        ("outcomes", pa.binary()),
        ("mean_length", pa.float64()),
        ("truncated", pa.float64()),
        ("reasons", pa.string()),
        ("styles", pa.string()),
    ]
)
_MEASURED = pa.schema(
    [
        ("recipe", pa.string()),
        ("seed", pa.int64()),
        ("kind", pa.string()),
        ("step", pa.int32()),
        ("result", pa.string()),
    ]
)
MEASURED = "measured"
ROWS = ("responses", "prefixes")
"""Of a shift, what its estimates are made from; not kept."""


@dataclass(frozen=True)
class Record:
    """One run: what it was asked, its scores at every evaluated boundary, its metrics and seconds by cycle."""

    place: str
    recipe: str
    seed: int
    settings: Mapping[str, Any]
    sizes: Mapping[str, int]
    evaluations: dict[int, Evaluation]
    metrics: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    measured: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict[str, dict[int, dict[str, Any]]])
    """What a "probe" and a "shift" found, by boundary."""

    @property
    def complete(self) -> bool:
        """Whether the last boundary was evaluated."""
        return self.settings["run"]["cycles"] in self.evaluations


def read(folder: Path) -> Record:
    """Of a run's folder."""
    run = RunFolder(folder)
    recipe = run.recipe()
    return Record(
        str(folder),
        recipe.name,
        recipe.run.seed,
        config.dump(recipe),
        _sizes(run),
        run.read_evaluations(),
        run.read_metrics(),
        run.read_timings(),
        {"probe": run.read_probes(), "shift": run.read_shifts()},
    )


def _sizes(run: RunFolder) -> dict[str, int]:
    """Parameters of the base and of an adapter; empty where no checkpoint tells."""
    newest = run.newest()
    try:
        found: dict[str, int] = checkpoint.read_state(newest)["parameters"] if newest is not None else {}
        sizes = {name: found[name] for name in ("base", "adapter")} if found else {}
    except (PastError, KeyError, TypeError):
        return {}
    return sizes if all(type(size) is int and 0 < size < 2**62 for size in sizes.values()) else {}


def gather(paths: Iterable[Path], tell: Callable[[str], None]) -> list[Record]:
    """The complete runs at or below the paths, by recipe and seed; what is left out is told."""
    found: dict[tuple[str, int], Record] = {}
    for path in paths:
        if not path.is_dir():
            raise PastError(f"{path}: no such folder; give the --out folder of 'past compare', or runs")
        for run in runs_below(path, tell):
            record = read(run.path)
            key = (record.recipe, record.seed)
            if not record.complete:
                tell(f"{record.place} is left out: its last boundary has not been evaluated")
            elif key in found:
                raise PastError(
                    f"{record.place} and {found[key].place} are both {record.recipe} with seed {record.seed}"
                )
            else:
                found[key] = record
    if not found:
        raise PastError("no complete run was found there; 'past compare' makes them")
    return [found[key] for key in sorted(found)]


def write(folder: Path, records: Sequence[Record]) -> None:
    """The files of a folder, each in one piece."""
    runs = [
        {
            "recipe": r.recipe,
            "seed": r.seed,
            "base": r.sizes.get("base"),
            "adapter": r.sizes.get("adapter"),
            "settings": json.dumps(_portable(r.settings), sort_keys=True),
        }
        for r in records
    ]
    outcomes = [row for r in records for row in _outcomes(r)]
    cycles = [row for r in records for row in _cycles(r)]
    names = sorted({name for row in cycles for name in row} - {"recipe", "seed", "cycle"})
    columns = [("recipe", pa.string()), ("seed", pa.int64()), ("cycle", pa.int32())]
    schema = pa.schema([*columns, *((name, pa.float64()) for name in names)])
    measured = [row for r in records for row in _measured(r)]
    kinds = [("runs", runs, _RUNS), ("outcomes", outcomes, _OUTCOMES), ("cycles", cycles, schema)]
    kinds += [(MEASURED, measured, _MEASURED)] if measured else []
    for name, rows, shape in kinds:
        with whole(folder / f"{name}.parquet") as part:
            pq.write_table(pa.Table.from_pylist(rows, schema=shape), part, compression="zstd", compression_level=19)


def _portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without the place that a model had on the machine of the run."""
    path = Path(settings["model"]["path"])
    model = settings["model"] | ({"path": path.name} if path.is_absolute() else {})
    return {**settings, "model": model}


def _outcomes(record: Record) -> list[dict[str, Any]]:
    return [
        {
            "recipe": record.recipe,
            "seed": record.seed,
            "step": step,
            "task": task,
            "samples": evaluation.samples,
            "dropped": evaluation.dropped,
            "problems": result.problems,
            "outcomes": np.packbits(np.array(result.outcomes, dtype=np.uint8)).tobytes(),
            "mean_length": result.mean_length,
            "truncated": result.truncated,
            "reasons": json.dumps(result.reasons),
            "styles": json.dumps(result.styles),
        }
        for step, evaluation in sorted(record.evaluations.items())
        for task, result in evaluation.tasks.items()
    ]


def _cycles(record: Record) -> list[dict[str, Any]]:
    """Metrics and timings of a cycle in one row; what came before the first has a row of its own."""
    rows: dict[int, dict[str, Any]] = {}
    for line in record.timings:
        own = {f"{TIMED}{name}": float(value) for name, value in line.items() if name != "cycle"}
        rows.setdefault(line["cycle"], {}).update(own)
    for line in record.metrics:
        kept = {name: float(value) for name, value in line.items() if _is_kept(name)}
        rows.setdefault(line["cycle"], {}).update(kept)
    about = {"recipe": record.recipe, "seed": record.seed}
    return [about | {"cycle": cycle} | row for cycle, row in sorted(rows.items())]


def _measured(record: Record) -> list[dict[str, Any]]:
    return [
        {
            "recipe": record.recipe,
            "seed": record.seed,
            "kind": kind,
            "step": step,
            "result": json.dumps({name: part for name, part in result.items() if name not in ROWS}),
        }
        for kind, results in sorted(record.measured.items())
        for step, result in sorted(results.items())
    ]


def _is_kept(name: str) -> bool:
    return name in ALSO or (name.startswith(KEPT) and "/reason/" not in name)


def load(folder: Path) -> dict[tuple[str, int], Record]:
    """What `write` wrote, by recipe and seed. Answers are not kept: draws have none, and majority@k says nothing."""
    try:
        runs, outcomes, cycles = (_read(folder / f"{name}.parquet") for name in ("runs", "outcomes", "cycles"))
        evaluations: dict[tuple[str, int], dict[int, Evaluation]] = {}
        for row in outcomes:
            by_step = evaluations.setdefault((row["recipe"], row["seed"]), {})
            empty = Evaluation(row["step"], "student", row["samples"], row["dropped"], {})
            by_step.setdefault(row["step"], empty).tasks[row["task"]] = _result(row)
        for found in evaluations.values():
            for evaluation in found.values():
                evaluation.check()
        lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in cycles:
            lines.setdefault((row["recipe"], row["seed"]), []).append(row)
        measured: dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]] = {}
        for row in _read(folder / f"{MEASURED}.parquet") if (folder / f"{MEASURED}.parquet").exists() else []:
            of_run = measured.setdefault((row["recipe"], row["seed"]), {})
            of_run.setdefault(row["kind"], {})[row["step"]] = json.loads(row["result"])
        return {
            key: _record(row, evaluations[key], lines[key], measured.get(key, {}))
            for row in runs
            if (key := (row["recipe"], row["seed"]))
        }
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise PastError(f"{folder}: not evidence that 'past results collect' wrote ({error})") from None


def _read(file: Path) -> list[dict[str, Any]]:
    plain(file, MOST)
    return pq.read_table(file).to_pylist()


def _result(row: Mapping[str, Any]) -> TaskResult:
    shape = (len(row["problems"]), row["samples"])
    bits = np.unpackbits(np.frombuffer(row["outcomes"], np.uint8), count=shape[0] * shape[1])
    return TaskResult(
        problems=row["problems"],
        outcomes=bits.reshape(shape).tolist(),
        answers=[[""] * shape[1]] * shape[0],
        reasons=json.loads(row["reasons"]),
        styles=json.loads(row["styles"]),
        mean_length=row["mean_length"],
        truncated=row["truncated"],
    )


def _record(
    run: Mapping[str, Any],
    evaluations: dict[int, Evaluation],
    rows: Sequence[Mapping[str, Any]],
    measured: dict[str, dict[int, dict[str, Any]]],
) -> Record:
    metrics, timings = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in rows:
        values = {k: v for k, v in row.items() if v is not None and k not in ("recipe", "seed", "cycle")}
        timed = {k.removeprefix(TIMED): v for k, v in values.items() if k.startswith(TIMED)}
        counted = {k: v for k, v in values.items() if not k.startswith(TIMED)}
        for part, lines in ((timed, timings), (counted, metrics)):
            if part:
                lines.append({"cycle": row["cycle"]} | part)
    sizes = {name: run[name] for name in ("base", "adapter") if run[name] is not None}
    place = f"{run['recipe']}, seed {run['seed']}"
    settings = json.loads(run["settings"])
    return Record(place, run["recipe"], run["seed"], settings, sizes, evaluations, metrics, timings, measured)
