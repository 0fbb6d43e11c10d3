"""Problems from JSON-lines files: one object a line with a problem, a reference solution and an answer.

Common column names are understood: problem | question | Question | prompt, solution | reference_solution,
answer | Answer | ground_truth. Evaluation files need no solution. A row that cannot be used stops the run with its file
and line: nothing is skipped unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from past_opsd.config import Section
from past_opsd.tasks import Problems
from past_opsd.types import PastError, Problem

ALIASES = {
    "problem": ("problem", "question", "Question", "prompt"),
    "solution": ("solution", "reference_solution"),
    "answer": ("answer", "Answer", "ground_truth"),
}


class Options(Section):
    """Problems from JSON-lines files."""

    train: str = Field(description="training problems: one JSON object a line with problem, solution, answer")
    evaluation: dict[str, str] = Field(description="held-out files by benchmark name: problem, answer")


def build(options: Options) -> Problems:
    """Read every file now, so that a bad row is found before anything runs."""
    train = read(Path(options.train), needs_solution=True)
    sets = {name: read(Path(path), needs_solution=False) for name, path in options.evaluation.items()}
    if not sets:
        raise PastError('task.evaluation names no file; write e.g. evaluation = { aime24 = "aime24.jsonl" }')
    digest = hashlib.sha256()
    for problem in (p for part in (train, *sets.values()) for p in part):
        row = [problem.id, problem.text, problem.solution, problem.answer, dict(problem.extra)]
        digest.update(json.dumps(row, sort_keys=True).encode())
    return Problems(f"jsonl#{digest.hexdigest()[:16]}", train, sets)


def read(path: Path, needs_solution: bool) -> tuple[Problem, ...]:
    """The file's problems; ids default to file name and line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split at U+2028 inside a text
    except (OSError, UnicodeDecodeError) as error:
        raise PastError(f"{path}: cannot be read ({error}); set task.train and task.evaluation to your files") from None
    problems = [_problem(line, path, number, needs_solution) for number, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise PastError(f"{path}: holds no problem")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise PastError(
                f"{path}: two rows have the id '{problem.id}'; ids decide the random draws, so make them differ"
            )
        seen.add(problem.id)
    return tuple(problems)


def _problem(line: str, path: Path, number: int, needs_solution: bool) -> Problem:
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PastError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise PastError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    text = _field(row, "problem", where, required=True)
    solution = _field(row, "solution", where, required=needs_solution)
    answer = _field(row, "answer", where, required=True)
    used = {name for names in ALIASES.values() for name in names}
    extra = {key: value for key, value in row.items() if key not in used and key != "id"}
    return Problem(str(row.get("id", f"{path.name}:{number}")), text, solution, answer, extra)


def _field(row: Mapping[str, Any], name: str, where: str, required: bool) -> str:
    value = next((row[alias] for alias in ALIASES[name] if row.get(alias) is not None), None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and (value.strip() or not required):
        return value
    if value is None and not required:
        return ""
    raise PastError(f"{where}: needs a non-empty text '{name}' (or {', '.join(ALIASES[name][1:])}), found {value!r}")
