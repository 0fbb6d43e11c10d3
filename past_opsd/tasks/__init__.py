"""Tasks: where problems come from.

A task module holds `class Options(Section)` (its settings) and `def build(options) -> Task`. The module's
name is the task's name in a recipe; there is no registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from past_opsd.core.nouns import Problem


class Task(Protocol):
    """Training problems and, by benchmark name, held-out ones."""

    @property
    def identity(self) -> str:
        """Names the task, its settings and its content (a hash); a checkpoint of another identity is refused."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a person should be told before a run, e.g. rows that were left out; mostly empty."""
        ...

    def train(self) -> Sequence[Problem]:
        """The training problems in a fixed order; the loop decides which come when."""
        ...

    def style(self, text: str) -> str:
        """A coarse label of a response's style, so that drift towards the reference's shows; "" where none is known."""
        ...

    def evaluation(self) -> Mapping[str, Sequence[Problem]]:
        """Held-out problems by benchmark; a macro average weighs the benchmarks equally."""
        ...


@dataclass(frozen=True, slots=True)
class Problems:
    """Problems held in memory; satisfies `Task`."""

    identity: str
    train_set: tuple[Problem, ...]
    evaluation_sets: Mapping[str, tuple[Problem, ...]]
    label: Callable[[str], str] = lambda text: ""
    notes: tuple[str, ...] = ()

    def train(self) -> Sequence[Problem]:
        return self.train_set

    def evaluation(self) -> Mapping[str, Sequence[Problem]]:
        return self.evaluation_sets

    def style(self, text: str) -> str:
        return self.label(text)
