"""The user's own problems: JSON lines, CSV, Parquet, a folder of shards, or a dataset on the Hugging Face hub.

    [task]
    name = "dataset"
    train = "hf:siyanzhao/Openthoughts_math_30k_opsd"
    evaluation = { aime24 = "aime24.jsonl", gsm8k = "hf:openai/gsm8k?config=main&split=test" }

Evaluation rows need no solution. A row that cannot be used stops the run with its file and line, unless
`bad_rows = "skip"`; then the rows left out are counted and named at the start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from past_opsd.core.config import Place, Section
from past_opsd.core.nouns import PastError, Problem, derive_seed
from past_opsd.tasks import Problems
from past_opsd.tasks._columns import Loaded, Reading, Role, load

HELD_OUT = "held_out"


class Options(Section):
    """Problems from files or from the Hugging Face hub."""

    train: Annotated[str, Place(surely=True)] = Field(
        description="training problems: a .jsonl, .json, .csv, .tsv or .parquet file, a folder, or hf:owner/name"
    )
    evaluation: Annotated[dict[str, str], Place(surely=True)] = Field(
        default={}, description="held-out sources by benchmark name; their rows need no solution"
    )
    hold_out: int = Field(
        default=0, ge=0, description="so many problems of `train` are kept out of training and evaluated"
    )
    columns: dict[Role, str] = Field(default={}, description="columns by role, where aliases do not find them")
    keep: list[str] | None = Field(
        default=None, description="further columns for the verifier; unset keeps all, [] none"
    )
    limit: int | None = Field(default=None, ge=1, description="use only so many training problems, the first ones")
    evaluation_limit: int | None = Field(
        default=None, ge=1, description="use only so many problems of each held-out set"
    )
    needs_solution: bool = Field(default=True, description="false where the method reads no reference solution (GRPO)")
    needs_answer: bool = Field(
        default=True, description="false where the verifier reads no answer (a function of yours)"
    )
    bad_rows: Literal["refuse", "skip"] = Field(default="refuse", description="what to do when rows cannot be used")


def build(options: Options) -> Problems:
    """Read every source now, so that a bad row is found before anything runs."""
    if not options.evaluation and not options.hold_out:
        raise PastError(
            'task: nothing to evaluate on; write e.g. evaluation = { aime24 = "aime24.jsonl" }, or hold_out = 100 to '
            "keep so many of the training problems apart"
        )
    notes: list[str] = []
    train = load(options.train, training(options))
    check_mapping(train, options)
    accept(train, options.bad_rows, notes)
    notes += train.notes
    learned, kept = split(train.problems, options.hold_out)
    held_out = held_out_reading(options)
    sets = {
        name: accept(load(source, held_out), options.bad_rows, notes).problems
        for name, source in options.evaluation.items()
    }
    if kept:
        if HELD_OUT in sets:
            raise PastError(f"task.evaluation names a set '{HELD_OUT}', which is what hold_out makes; rename it")
        sets[HELD_OUT] = kept
    return Problems(identity("dataset", [learned, *sets.values()]), learned, sets, notes=tuple(notes))


def split(problems: tuple[Problem, ...], count: int) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Problems to learn from and `count` held-out ones: a choice by their texts alone, so equal texts stay together."""
    if not count:
        return problems, ()
    texts = sorted({p.text for p in problems}, key=lambda text: derive_seed("hold out", text))
    apart = set(texts[:count])
    learned = tuple(p for p in problems if p.text not in apart)
    if not learned:
        raise PastError(
            f"task.hold_out = {count}: there are only {len(texts)} different problems, so none would be left"
        )
    first = {p.text: p for p in reversed(problems) if p.text in apart}  # repeats are evaluated once
    return learned, tuple(p for p in problems if first.get(p.text) is p)


def training(options: Options) -> Reading:
    """How training rows are read."""
    return Reading(options.columns, options.keep, options.needs_solution, options.needs_answer, options.limit)


def held_out_reading(options: Options) -> Reading:
    """How evaluation rows are read."""
    return Reading(options.columns, options.keep, False, options.needs_answer, options.evaluation_limit)


def accept(loaded: Loaded, bad_rows: str, notes: list[str]) -> Loaded:
    """The source, when its rows can be used; what was left out goes to the notes."""
    if loaded.bad:
        told = f"{loaded.source}: {len(loaded.bad)} of {loaded.rows} rows cannot be used"
        if bad_rows == "refuse" or not loaded.problems:
            advice = 'Mend them, or leave them out with task.bad_rows = "skip".' if loaded.problems else ""
            raise PastError(f"{told}:\n{loaded.listing()}\n{advice}".rstrip())
        notes.append(f"{told} and are left out:\n{loaded.listing()}")
    return loaded


def check_mapping(loaded: Loaded, options: Options) -> None:
    """A mapped column that does not exist is a slip, not a reason to take another."""
    for role, column in options.columns.items():
        if column not in loaded.columns:
            raise PastError(
                f"task.columns.{role} = '{column}': {loaded.source} has no such column; "
                f"it has {', '.join(loaded.columns)}"
            )


def identity(name: str, parts: Sequence[Sequence[Problem]]) -> str:
    """The task's name with a hash of every problem."""
    digest = hashlib.sha256()
    for problem in (p for part in parts for p in part):
        row = [problem.id, problem.text, problem.solution, problem.answer, dict(problem.extra)]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return f"{name}#{digest.hexdigest()[:16]}"
