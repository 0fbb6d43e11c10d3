r"""Rows to problems: which column is the problem, which the reference solution, which the answer.

Names that are common are understood. An answer that holds a worked solution ("... #### 42", as in GSM8K) is split into
both; a missing answer is the last box of the solution. A row that cannot be used is kept with its place and the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from past_opsd.tasks._rows import Row, rows
from past_opsd.types import PastError, Problem
from past_opsd.verifiers._extract import find_boxes

Role = Literal["problem", "solution", "answer", "id"]
ALIASES: Mapping[Role, tuple[str, ...]] = {
    "problem": ("problem", "Question", "question", "prompt"),
    "solution": ("solution", "reference_solution", "privileged_context"),
    "answer": ("answer", "Answer", "ground_truth"),
    "id": ("id",),
}
SHOWN = 10
_MARKED = re.compile(r"(?P<solution>.*?)\n?[ \t]*####[ \t]*(?P<answer>[^\n#]+?)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reading:
    """How a source is read: `columns` names columns by role, `keep` the further ones (None: all)."""

    columns: Mapping[Role, str] = field(default_factory=dict)
    keep: Sequence[str] | None = None
    needs_solution: bool = True
    needs_answer: bool = True
    limit: int | None = None

    def names(self, role: Role) -> tuple[str, ...]:
        """Columns that may hold a role, the mapped one first."""
        mapped = (self.columns[role],) if role in self.columns else ()
        return tuple(dict.fromkeys(mapped + ALIASES[role]))

    def wanted(self, columns: Sequence[str]) -> list[str]:
        """Of the columns there are, those that are read."""
        if self.keep is None:
            return list(columns)
        used = {name for role in ALIASES for name in self.names(role)} | set(self.keep)
        return [column for column in columns if column in used]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a source gave. `used` counts where each role came from; `bad` says what is wrong where."""

    source: str
    problems: tuple[Problem, ...]
    bad: tuple[str, ...]
    columns: tuple[str, ...]
    used: Mapping[str, Counter[str]]

    @property
    def rows(self) -> int:
        return len(self.problems) + len(self.bad)

    def listing(self) -> str:
        """The first bad rows, a line each."""
        rest = len(self.bad) - SHOWN
        return "\n".join([f"  {line}" for line in self.bad[:SHOWN]] + ([f"  and {rest} more"] if rest > 0 else []))


class _BadRowError(Exception):
    """Why a row cannot be used."""


def load(source: str, reading: Reading) -> Loaded:
    """Read a whole source; a row that cannot be used never stops it."""
    problems: list[Problem] = []
    bad: list[str] = []
    columns: dict[str, None] = {}
    used: dict[str, Counter[str]] = {role: Counter() for role in ALIASES}
    ids: set[str] = set()

    def wanted(found: Sequence[str]) -> list[str]:
        columns.update(dict.fromkeys(found))
        return reading.wanted(found)

    for row in rows(source, wanted):
        if reading.limit is not None and len(problems) >= reading.limit:
            break
        try:
            problem, origins = _problem(row, reading)
            if problem.id in ids:
                raise _BadRowError(f"repeats the id '{problem.id}'; ids decide the random draws, so make them differ")
        except _BadRowError as error:
            bad.append(f"{row.where}: {error}")
            continue
        ids.add(problem.id)
        problems.append(problem)
        for role, origin in origins.items():
            used[role][origin] += 1
    if not problems and not bad:
        raise PastError(f"{source}: holds no problem")
    return Loaded(source, tuple(problems), tuple(bad), tuple(columns), used)


def _problem(row: Row, reading: Reading) -> tuple[Problem, dict[str, str]]:
    if isinstance(row.data, str):
        raise _BadRowError(row.data)
    data = row.data
    origins: dict[str, str] = {}
    found: dict[str, Any] = {}
    for role in ALIASES:
        names = (name for name in reading.names(role) if data.get(name) is not None)
        if (column := next(names, None)) is not None:
            origins[role], found[role] = column, data[column]
    # What a role took under another name stays readable under its own: a user's verifier may ask for it.
    extra = {name: value for name, value in data.items() if origins.get(name) != name}
    if isinstance(found.get("problem"), list):
        extra[origins["problem"]] = found["problem"]
        found["problem"] = _conversation(found["problem"])
    texts = {role: _text(role, value) for role, value in found.items()}
    solution, answer = _solution_and_answer(texts, origins)
    checks: list[tuple[Role, str, bool]] = [
        ("problem", texts.get("problem", ""), True),
        ("solution", solution, reading.needs_solution),
        ("answer", answer, reading.needs_answer),
    ]
    for role, value, needed in checks:
        if needed and not value.strip():
            names = reading.names(role)
            held = f"found {found[role]!r}" if role in found else "found none"
            raise _BadRowError(f"needs a non-empty text '{names[0]}' (or {', '.join(names[1:])}), {held:.80}")
    return Problem(texts.get("id") or row.name, texts["problem"], solution, answer, extra), origins


def _solution_and_answer(texts: Mapping[str, str], origins: dict[str, str]) -> tuple[str, str]:
    solution, answer = texts.get("solution", ""), texts.get("answer", "")
    marked = _MARKED.fullmatch(answer)
    if marked is not None:
        if not solution.strip():
            solution = marked["solution"]
            origins["solution"] = f"{origins['answer']}, before ####"
        origins["answer"] = f"{origins['answer']}, after ####"
        return solution, marked["answer"]
    if not answer.strip() and solution.strip():
        boxes = find_boxes(solution)
        if boxes.failure is None:
            origins["answer"] = f"{origins['solution']}, last box"
            return solution, ", ".join(part.strip() for part in boxes.parts)
        if (marked := _MARKED.fullmatch(solution)) is not None:
            origins["answer"] = f"{origins['solution']}, after ####"
            return marked["solution"], marked["answer"]
    return solution, answer


def _text(role: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and role != "problem":
        return str(value)
    if not isinstance(value, str):
        raise _BadRowError(f"'{role}' must be a text, found {value!r:.80}")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise _BadRowError(f"'{role}' holds half of a surrogate pair, which is no character: {value!a:.80}")
    return value


def _conversation(messages: list[Any]) -> str:
    """The text of a prompt given as messages: a user turn, with a system turn before it at most."""
    turns = [m for m in messages if isinstance(m, dict)]
    roles = [turn.get("role") for turn in turns]
    if len(turns) != len(messages) or roles not in (["user"], ["system", "user"]):
        raise _BadRowError(
            "'problem' as messages must be one user turn, with one system turn before it at most; found "
            + f"{[str(role) for role in roles]}"
        )
    return "\n\n".join(_content(turn.get("content")) for turn in turns)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise _BadRowError("a message holds something else than text")
    return "".join(str(text) for text in texts)
