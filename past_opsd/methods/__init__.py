"""Methods: one file each, none importing another.

A method turns one routed batch into teacher terms and student terms; it does no tensor work. Its module holds
`Options` (its keys in the recipe's `[method]`, a `config.MethodOptions`) and `build(options, prompts, rollout)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

from past_opsd.core.config import MethodOptions, RolloutSection, Sampling
from past_opsd.core.nouns import Adapter, Attempt, Batch, Forks, Group, PastError, Problem, Term, View, Work
from past_opsd.core.prompts import Prompts
from past_opsd.core.sampler import Round


class Tools(Protocol):
    """What a method may use before the first cycle, and before it reads problems that nobody foresaw."""

    seed: int
    problems: Sequence[Problem]
    prompts: Prompts
    max_context: int

    def upcoming(self) -> list[Problem]:
        """The problems of the run's cycles, each once, in the order in which they come."""
        ...

    def attempt(self, work: Sequence[Work], sampling: Sampling) -> list[Attempt]:
        """Sample and verify with the adapters as they are now."""
        ...

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        """One optimizer step, published at once."""
        ...

    def copy(self, source: Adapter, target: Adapter) -> None:
        """Make one adapter equal to another and forget its optimizer's state."""
        ...

    def reset(self, adapter: Adapter) -> None:
        """Forget an adapter's optimizer state and step count."""
        ...


def distill(attempt: Attempt, teacher: View, loss: Any, temperature: float, forks: Forks | None = None) -> Term:
    """A frozen view supervises the student along its own response."""
    return Term(
        "distill",
        live=attempt.view,
        frozen=teacher,
        tokens=attempt.response.tokens,
        loss=loss,
        temperature=temperature,
        forks=forks,
    )


def require_groups(rollout: RolloutSection, name: str) -> None:
    """Refuse settings under which the samples of a problem cannot differ in outcome."""
    if rollout.samples_per_problem < 2:
        raise PastError(
            f"rollout.samples_per_problem = 1 leaves {name} without a group to compare with: "
            "set it to 2 or more, e.g. 8"
        )
    if rollout.student.temperature == 0:
        raise PastError(
            f"rollout.student.temperature = 0 draws the same response again and again: {name} needs sampling"
        )


class Method:
    """What the loop asks of a method. A method overrides what it needs; only `student_terms` is a must.

    A method of one's own is a subclass; a nested class `Options`, a `MethodOptions` with pydantic fields, holds the
    keys of its recipe section. It is named in a recipe as `module:Class`, or given as the class itself:
    `load("embedded/opsd", {"method.name": Mine})`.
    """

    Options: ClassVar[type[MethodOptions]] = MethodOptions
    """The keys of `[method]` in the recipe."""

    @classmethod
    def build(cls, options: Any, prompts: Prompts, rollout: RolloutSection) -> Self:
        """The method of a recipe."""
        return cls(options, prompts, rollout)

    def __init__(self, options: Any, prompts: Prompts, rollout: RolloutSection):
        self.options, self.prompts, self.rollout = options, prompts, rollout

    rollouts = True
    """Whether the student samples responses at all."""

    explores = False
    """Whether the teacher draws continuations of failed responses."""

    singly = False
    """Whether `explore` decides for each failed response by that response's own draws alone. It may then be asked of
    one while others are still being decoded, and once more whenever draws that it asked for are there."""

    wide = False
    """Whether the engine decodes many sequences in about the time of one; the loop says so before the first cycle."""

    tells_outcome = False
    """Whether the teacher reads another message by outcome, by the method's definition."""

    def prepare(self, tools: Tools) -> None:
        """Work before the first cycle: a first training phase, offline hints. Part of boundary 0."""

    def meet(self, tools: Tools, problems: Sequence[Problem]) -> None:
        """Make what reading attempts at these problems needs; mostly `prepare` has, for all of `tools.upcoming()`."""

    def room(self, problem: Problem) -> int:
        """Tokens that training on the problem itself needs, where nothing is sampled; longer ones are dropped."""
        return 0

    def teaches(self, group: Sequence[Attempt]) -> bool:
        """Whether the responses to one problem can move the student; dynamic sampling replaces those that cannot."""
        return True

    def teacher_view(self, attempt: Attempt) -> View:
        """The privileged view that reads this attempt; the attempt's own view where there is none."""
        return attempt.view

    def explore(self, failed: Sequence[Attempt], draw: Round) -> list[Group]:
        """Teacher continuations for the failed attempts with room for one, a `Group` each; [] where none are drawn."""
        return []

    def teacher_terms(self, batch: Batch, groups: Sequence[Group]) -> list[Term]:
        """The teacher's objective; empty when nothing is active, and then no step is taken."""
        return []

    def student_terms(self, batch: Batch) -> list[Term]:
        """The student's objective."""
        raise NotImplementedError

    def end_cycle(self, groups: Sequence[Group]) -> None:
        """Move whatever the method carries from cycle to cycle."""

    def sync(self) -> float:
        """After a cycle, the share of the student that is mixed into the teacher adapter: 0 leaves it, 1 copies."""
        return 0.0

    def metrics(self) -> dict[str, float]:
        """What the method carries, as numbers for the log."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the method carries, as plain JSON data for the checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
