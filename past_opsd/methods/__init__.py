"""Methods: one file each, none importing another.

A method turns one routed batch into teacher terms and student terms; it does no tensor work. Its module holds
`Options` (its keys in the recipe's `[method]`) and `build(options, prompts, rollout)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from past_opsd.sampling import Draw, Draws
from past_opsd.types import Attempt, Batch, Group, Term, View


class Method(Protocol):
    """What the loop asks of a method."""

    def teacher_view(self, attempt: Attempt) -> View:
        """The privileged view that reads this attempt."""
        ...

    def explore(self, failed: Sequence[Attempt], draw: Draw) -> list[Draws]:
        """Teacher continuations for the failed attempts, one `Draws` each; empty when the method draws none."""
        ...

    def teacher_terms(self, batch: Batch, groups: Sequence[Group]) -> list[Term]:
        """The teacher's objective; empty when nothing is active, and then no step is taken."""
        ...

    def student_terms(self, batch: Batch) -> list[Term]:
        """The student's objective, on its own prefixes."""
        ...

    def end_cycle(self, draws: Sequence[Draws]) -> None:
        """Move whatever the method carries from cycle to cycle."""
        ...

    def metrics(self) -> dict[str, float]:
        """That state as numbers for the log."""
        ...

    def state(self) -> dict[str, Any]:
        """That state, as plain JSON data for the checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        ...
