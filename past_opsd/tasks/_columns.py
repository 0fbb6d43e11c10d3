r"""Rows to problems: which column is the problem, which the reference solution, which the answer.

Names that are common are understood, whatever their case, spaces and underscores; where a role finds none, one column
whose name comes near is taken, and that is told. An answer that holds a worked solution ("... #### 42", as in GSM8K)
is split into both; a missing answer is the last box of the solution. A row that cannot be used is kept with its place
and the reason.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from past_opsd.core.nouns import PastError, Problem
from past_opsd.core.reading import is_list, is_table
from past_opsd.rollout.verifiers._extract import find_boxes
from past_opsd.tasks._rows import Row, rows

Role = Literal["problem", "solution", "answer", "id"]
ALIASES: Mapping[Role, tuple[str, ...]] = {
    "problem": ("problem", "question", "prompt"),
    "solution": ("solution", "reference_solution", "privileged_context"),
    "answer": ("answer", "ground_truth", "final_answer", "expected_answer"),
    "id": ("id",),
}
_ALIKE = 0.8  # of difflib's measure, at about the same length: a letter left out, added or swapped
_BESIDE = ("statement", "text", "body", "content", "full", "final", "gold", "correct", "true", "worked", "math", "the")
SHOWN = 10
_MARKED = re.compile(r"(?P<solution>.*?)\n?[ \t]*####[ \t]*(?P<answer>[^\n#]+?)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reading:
    """How a source is read: `columns` names columns by role, `keep` the further ones (None: all)."""

    columns: Mapping[Role, str] = field(default_factory=dict[Role, str])
    keep: Sequence[str] | None = None
    needs_solution: bool = True
    needs_answer: bool = True
    limit: int | None = None

    def names(self, role: Role) -> tuple[str, ...]:
        """Names a role is known by, the mapped column first."""
        mapped = (self.columns[role],) if role in self.columns else ()
        return tuple(dict.fromkeys(mapped + ALIASES[role]))

    def wanted(self, columns: Sequence[str]) -> list[str]:
        """Of the columns there are, those that are read."""
        if self.keep is None:
            return list(columns)
        used = {name for names in self.found(tuple(columns)).values() for name in names} | set(self.keep)
        return [column for column in columns if column in used]

    def found(self, columns: tuple[str, ...]) -> dict[Role, tuple[str, ...]]:
        """By role the columns that may hold it, the likeliest first."""
        return _found(tuple(self.columns.items()), columns)

    def guessed(self, columns: tuple[str, ...]) -> dict[Role, str]:
        """By role a column that is taken because its name comes near."""
        known = {role: {plain(name) for name in self.names(role)} for role in ALIASES}
        first: dict[Role, str] = {role: names[0] for role, names in self.found(columns).items() if names}
        return {role: name for role, name in first.items() if plain(name) not in known[role]}


@lru_cache(maxsize=256)
def _found(mapped: tuple[tuple[Role, str], ...], columns: tuple[str, ...]) -> dict[Role, tuple[str, ...]]:
    chosen = dict(mapped)
    out: dict[Role, tuple[str, ...]] = {}
    for role, aliases in ALIASES.items():
        names = [chosen[role]] if role in chosen else []
        names += [name for alias in aliases for name in (alias, *columns) if plain(name) == plain(alias)]
        out[role] = tuple(dict.fromkeys(name for name in names if name in columns))
    taken = {name for names in out.values() for name in names}
    for role in ("problem", "solution", "answer"):
        if not out[role]:
            near = [name for name in columns if name not in taken and is_near(role, name)]
            out[role] = tuple(near) if len(near) == 1 else ()
    return out


def plain(name: str) -> str:
    """A column's name without case, spaces and signs."""
    return "".join(c for c in name.casefold() if c.isalnum())


def is_near(role: Role, column: str) -> bool:
    """Whether a column's name is an alias of the role misspelt, in the plural, or with a harmless word beside it."""
    words = [w.casefold().removesuffix("s") for w in re.split(r"[\W_]+|(?<=[a-z])(?=[A-Z])", column) if w]
    for alias in map(plain, ALIASES[role]):
        beside = alias in words and set(words) <= {alias, *_BESIDE}
        alike = difflib.SequenceMatcher(None, alias, plain(column)).ratio() >= _ALIKE
        if beside or (alike and abs(len(alias) - len(plain(column))) <= 1):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a source gave. `used` counts where each role came from; `bad` says what is wrong where.

    `notes` name columns that were taken because their names come near.
    """

    source: str
    problems: tuple[Problem, ...]
    bad: tuple[str, ...]
    columns: tuple[str, ...]
    used: Mapping[str, Counter[str]]
    notes: tuple[str, ...] = ()

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
    guessed: dict[Role, str] = {}
    used: dict[str, Counter[str]] = {role: Counter() for role in ALIASES}
    ids: set[str] = set()

    def wanted(found: Sequence[str]) -> list[str]:
        columns.update(dict.fromkeys(found))
        guessed.update(reading.guessed(tuple(found)))
        return reading.wanted(found)

    for row in rows(source, wanted):
        if reading.limit is not None and len(problems) >= reading.limit:
            break
        try:
            problem, origins = _problem(row, reading, columns)
            if problem.id in ids:
                raise _BadRowError(f"repeats the id '{problem.id}'; ids decide the random draws, so make them differ")
        except _BadRowError as error:
            bad.append(_shown(f"{row.where}: {error}"))
            continue
        ids.add(problem.id)
        problems.append(problem)
        for role, origin in origins.items():
            used[role][origin] += 1
    if not problems and not bad:
        raise PastError(f"{source}: holds no problem")
    notes = [
        _shown(f"{source}: the column '{name}' is read as the {role}; if that is wrong, set task.columns.{role}")
        for role, name in guessed.items()
    ]
    return Loaded(source, tuple(problems), tuple(bad), tuple(columns), used, tuple(notes))


def _shown(text: str) -> str:
    """A message that can be written, whatever a column is called."""
    return text.encode("utf-8", "backslashreplace").decode()


def _problem(row: Row, reading: Reading, columns: Iterable[str]) -> tuple[Problem, dict[str, str]]:
    if isinstance(row.data, str):
        raise _BadRowError(row.data)
    data = row.data
    origins: dict[str, str] = {}
    found: dict[str, Any] = {}
    for role, names in reading.found(tuple(data)).items():
        column = next((name for name in names if data[name] is not None), None)
        if column is not None:
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
            raise _BadRowError(_missing(role, reading, tuple(data), origins, columns))
    return Problem(texts.get("id") or row.name, texts["problem"], solution, answer, extra), origins


def _missing(
    role: Role, reading: Reading, read: tuple[str, ...], origins: Mapping[str, str], columns: Iterable[str]
) -> str:
    """What a row lacks, what columns there are beside those read, and what to do."""
    empty = reading.found(read)[role]
    if empty:
        return f"its {role} (column '{empty[0]}') is empty"
    taken = {name for names in reading.found(tuple(columns)).values() for name in names}
    others = [name for name in columns if name not in taken]
    near = [name for name in others if is_near(role, name)]
    names = reading.names(role)
    lack = f"has no {role}: no column '{names[0]}' (or {', '.join(names[1:])})"
    choice = ", ".join((near or others)[:SHOWN])
    advice = f"set task.columns.{role} to one of: {choice}" if others else f"add a column '{names[0]}'"
    if role == "answer" and "solution" in origins:
        box = r"a \boxed{...} or '#### ...'"
        where = f"the solution in '{origins['solution']}' has no box to take it from"
        return f"{lack}, and {where}; end it with {box}, or {advice}"
    return f"{lack}; {advice}"


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
    turns = [m for m in messages if is_table(m)]
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
    parts = content if is_list(content) else [content]
    texts = [part.get("text") for part in parts if is_table(part) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise _BadRowError("a message holds something else than text")
    return "".join(str(text) for text in texts)
