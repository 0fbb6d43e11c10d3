"""Problems that a Python function of the user's makes: `path = "my_pkg.problems:sums"`.

    def sums() -> dict[str, list[Problem]]: ...

It is called once, without arguments, and gives problems by set: "train" is trained on, every other name is an
evaluation set. The task's identity is a hash of what it gave, so it may draw, but the same each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import Field

from past_opsd.core import own
from past_opsd.core.config import Section
from past_opsd.core.nouns import PastError, Problem
from past_opsd.core.reading import is_table
from past_opsd.tasks import Problems, Task
from past_opsd.tasks.dataset import identity

TRAIN = "train"


class Options(Section):
    """Settings of a user's function."""

    path: str = Field(pattern=r"^[\w.]+:[\w.]+$", description="The function, as package.module:function.")


def build(options: Options) -> Task:
    """The problems as the function gives them now."""
    where = f"task.path = '{options.path}'"
    function = own.find(options.path, "task.path")
    try:
        found = function()
    except Exception as error:
        raise PastError(f"{where}: the function failed ({type(error).__name__}: {error})") from error
    sets = {name: _problems(rows, f"{where}, set '{name}'") for name, rows in _sets(found, where).items()}
    held_out = {name: rows for name, rows in sets.items() if name != TRAIN}
    return Problems(identity(f"function {options.path}", list(sets.values())), sets[TRAIN], held_out)


def _sets(found: object, where: str) -> Mapping[str, object]:
    if not is_table(found) or TRAIN not in found or len(found) < 2:
        raise PastError(
            f"{where}: the function must give a dict of lists of problems, 'train' and at least one set to evaluate "
            f"on, e.g. {{'train': [...], 'held_out': [...]}}; it gave {found!r:.80}"
        )
    return found


def _problems(rows: object, where: str) -> tuple[Problem, ...]:
    found = list(cast(Sequence[object], rows)) if isinstance(rows, Sequence) else []
    problems = [row for row in found if isinstance(row, Problem)]
    if not problems or len(problems) < len(found):
        raise PastError(f"{where}: must be a list of past_opsd.Problem, one or more; it is {rows!r:.80}")
    seen: set[str] = set()
    for row in problems:
        if row.id in seen:
            raise PastError(f"{where}: the id {row.id!r} repeats; ids decide the random draws, so each is there once")
        seen.add(row.id)
    return tuple(problems)
