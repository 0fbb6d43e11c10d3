# pyright: standard
# Every table is pyarrow's, which has no types.
"""A run's records as Arrow tables, for notebooks and scripts; `.to_pandas()` makes a data frame of each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from past_opsd.core.config import Recipe
from past_opsd.run import attempts, boundary, profiling, train
from past_opsd.run.evaluate import Evaluation
from past_opsd.run.folder import RunFolder, Series

_COST = "cost/"


@dataclass(frozen=True)
class Run:
    """A run in its folder, finished or not; each call reads what is there now.

    The tables are `pyarrow.Table`: `run.metrics().to_pandas()` is a data frame where pandas is installed,
    `run.metrics()["cycle"]` a column that numpy and matplotlib take as it is. A run may stand where a folder is asked
    for: `probe(run)`, `Path(run)`.
    """

    folder: Path

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    @property
    def files(self) -> RunFolder:
        """The names of the files in the folder, and readers of each kind."""
        return RunFolder(self.folder)

    @property
    def recipe(self) -> Recipe:
        """The run's own recipe; what it names outside of the package is not imported: `load(run.files.recipe_file)`."""
        return self.files.recipe()

    @property
    def completed(self) -> int:
        """Cycles up to the newest checkpoint; 0 before the first."""
        steps = self.files.steps()
        return steps[-1] if steps else 0

    @property
    def finished(self) -> bool:
        """Whether all cycles of the recipe were run."""
        return self.outcome().finished

    @property
    def warnings(self) -> list[str]:
        """What a person should know of how the run went: what got worse unseen, what was lost."""
        return self.outcome().warnings

    def outcome(self) -> train.Outcome:
        """How the run ended, as the command line sums it up."""
        return train.outcome(self.recipe, self.files, self.completed)

    def checkpoint(self, step: int | None = None) -> Path:
        """The folder of a checkpoint, by default the newest whole one; its root is the student for PEFT.

        Raises:
            PastError: there is none of that boundary, or none that is whole.
        """
        return self.files.checkpoint(boundary.choose(self.folder, step)[0])

    def metrics(self) -> pa.Table:
        """One row a cycle: what was logged, such as `rollout/success`; null where it was not."""
        return _table(self.files.read_metrics())

    def timings(self) -> pa.Table:
        """One row a cycle: seconds by phase, and the peak of memory."""
        return _table(self.files.read_timings())

    def costs(self) -> pa.Table:
        """One row a cycle: samples, tokens and verifier calls from the start up to there, and the cycle's seconds."""
        seconds = {line["cycle"]: sum(profiling.totals([line]).values()) for line in self.files.read_timings()}
        rows = [
            {"cycle": line["cycle"]}
            | {key.removeprefix(_COST): value for key, value in line.items() if key.startswith(_COST)}
            | {"seconds": seconds.get(line["cycle"])}
            for line in self.files.read_metrics()
        ]
        return _table(rows)

    def scores(self) -> pa.Table:
        """One row for each evaluated boundary and each set, `macro` the last: `avg@k`, `pass@k` and the rest."""
        return scores(self.files.read_evaluations().values(), self.recipe.evaluation.pass_k)

    def evaluations(self) -> pa.Table:
        """One row a held-out response: `step`, `task`, `problem`, `draw`, `correct`, `answer`."""
        return draws(self.files.read_evaluations().values())

    def rollouts(self, cycles: Iterable[int] | None = None) -> pa.Table:
        """One row a response of the student: text, verdict, token ids and their log-probabilities.

        `cycles` counts from 0; without it all of them are read.
        """
        return _responses(self.files.rollouts, cycles)

    def continuations(self, cycles: Iterable[int] | None = None) -> pa.Table:
        """One row a response of the teacher; `trajectory` is the row of the cycle's rollouts that it continues."""
        return _responses(self.files.continuations, cycles)

    def probes(self) -> dict[int, dict[str, Any]]:
        """What `probe` measured, by boundary."""
        return self.files.read_probes()

    def shifts(self) -> dict[int, dict[str, Any]]:
        """What `shift` measured, by boundary."""
        return self.files.read_shifts()


def scores(evaluations: Iterable[Evaluation], pass_k: Sequence[int]) -> pa.Table:
    """Evaluations summed up: a row for each set of each, and their macro average."""
    rows = []
    for evaluation in evaluations:
        summary = evaluation.summary(pass_k)
        for task in (*evaluation.tasks, "macro"):
            own = {key.removeprefix(f"{task}/"): value for key, value in summary.items() if key.startswith(f"{task}/")}
            rows.append({"step": evaluation.step, "task": task} | own)
    return _table(rows)


def draws(evaluations: Iterable[Evaluation]) -> pa.Table:
    """Evaluations in full: a row for each response to each problem."""
    rows = [
        {
            "step": evaluation.step,
            "task": task,
            "problem": problem,
            "draw": draw,
            "correct": bool(outcome),
            "answer": answer,
        }
        for evaluation in evaluations
        for task, result in evaluation.tasks.items()
        for problem, outcomes, answers in zip(result.problems, result.outcomes, result.answers, strict=True)
        for draw, (outcome, answer) in enumerate(zip(outcomes, answers, strict=True))
    ]
    return _table(rows)


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    """Numbers that are whole in one line and not in another are one column."""
    mixed = any(isinstance(value, float) for value in values)
    return pa.array([float(value) if mixed and value is not None else value for value in values])


def _responses(series: Series, cycles: Iterable[int] | None) -> pa.Table:
    wanted = series.numbers() if cycles is None else cycles
    tables = [attempts.read_table(series.path(k)) for k in wanted]
    return pa.concat_tables(tables) if tables else attempts.SCHEMA.empty_table()
