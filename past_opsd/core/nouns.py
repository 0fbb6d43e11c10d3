"""The nouns of the paper as frozen dataclasses; everything else speaks in these.

X is `Problem.text`, Z is `Problem.solution`, Y and C_j are `Response`, R is `Verdict.correct`.
A method is a list of `Term`; a `Term` is one summand `weight * mean over tokens of loss(live, frozen)`.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

Adapter = Literal["student", "teacher", "base", "expert"]
Tokens = tuple[int, ...]


class PastError(Exception):
    """A mistake a person can mend: the message says what was wrong, where, and what to do."""


class Closing:
    """What ends at the end of a `with`, by its `close`."""

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Problem:
    """A task with its privilege: `text` is X, `solution` is Z, `answer` is read by the verifier alone."""

    id: str
    text: str
    solution: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)


@dataclass(frozen=True, slots=True)
class View:
    """Which policy reads which prompt: adapter(. | prompt, y_<t)."""

    adapter: Adapter
    prompt: Tokens


@dataclass(frozen=True, slots=True)
class Work:
    """One response wanted: who reads what for which problem, and the seed that decides the draw."""

    problem: Problem
    view: View
    seed: int


@dataclass(frozen=True, slots=True)
class Response:
    """A sampled response: ids as sampled, never re-tokenised. `finished` is false when the token limit cut it."""

    tokens: Tokens
    text: str
    logprobs: tuple[float, ...]
    finished: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """R and why: `correct`, or the kind of failure (`wrong`, `no_box`, `truncated`, `timeout`, ...).

    `answer` is what the verifier compared, "" where there was nothing; majority@k votes on it.
    """

    correct: bool
    reason: str
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One verified response: the student's Y, or one of the teacher's continuations C_j."""

    problem: Problem
    view: View
    response: Response
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Group:
    """A failed student attempt with the teacher's continuations.

    `continuations` is the realised group, the only one a loss may read. `discarded` is the all-failure group of size
    G_max that the retry replaced: kept for the records and the cost. `unused` was drawn ahead and turned out not to be
    needed: a cost, and nothing else.
    """

    attempt: Attempt
    continuations: tuple[Attempt, ...]
    discarded: tuple[Attempt, ...] = ()
    unused: tuple[Attempt, ...] = ()

    @property
    def drawn(self) -> tuple[Attempt, ...]:
        """All draws that the sampling rule made, in order: the replaced group, then the realised one."""
        return self.discarded + self.continuations

    @property
    def successes(self) -> tuple[Attempt, ...]:
        """S_g, the verifier-successful continuations."""
        return tuple(c for c in self.continuations if c.verdict.correct)

    @property
    def mixed(self) -> bool:
        """m_g^mix: the group holds both outcomes."""
        return 0 < len(self.successes) < len(self.continuations)

    @property
    def active(self) -> bool:
        """At least one success; an all-failure group contributes nothing."""
        return bool(self.successes)

    @property
    def retried(self) -> bool:
        """A complete group failed and was drawn anew."""
        return bool(self.discarded)


@dataclass(frozen=True, slots=True)
class Batch:
    """One cycle's student rollouts, routed by outcome, and the problems they were asked."""

    correct: tuple[Attempt, ...]
    failed: tuple[Attempt, ...]
    problems: tuple[Problem, ...] = ()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return self.correct + self.failed


@dataclass(frozen=True, slots=True)
class Forks:
    """What a term does with the positions where its live view is least decided: this share of each response."""

    share: float
    weight: float
    """Their weight beside the 1 of every other position; 0 leaves them out."""


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of an objective: weight * reduce_t loss(live view, frozen view) along `tokens`.

    `live` gets the gradient, `frozen` is a stop-gradient target read along the same token ids.
    For a policy-gradient loss `frozen=None` means "the live view before this step": with one optimizer
    step a snapshot, the old policy and the live one are the same function when the loss is taken.
    Both views' logits are divided by `temperature`. The mean is over the tokens from `start` on: those before it are
    read, not supervised. With `forks` the summands at the response's forks are weighed, the others stay as they are:
    1/T sum_t w_t loss_t. `sampled` are the log-probabilities with which an engine drew the tokens at that temperature:
    where its arithmetic is not the trainer's, a policy gradient is corrected for it.
    """

    name: str
    live: View
    frozen: View | None
    tokens: Tokens
    loss: Callable[..., Any]
    weight: float = 1.0
    temperature: float = 1.0
    forks: Forks | None = None
    start: int = 0
    sampled: tuple[float, ...] = ()

    @property
    def supervised(self) -> int:
        """T_i, the positions that the mean is over."""
        return len(self.tokens) - self.start


def route(attempts: Iterable[Attempt], problems: Iterable[Problem] = ()) -> Batch:
    """Split rollouts by R. The outcome chooses the objective and enters no prompt."""
    attempts = tuple(attempts)
    return Batch(
        correct=tuple(a for a in attempts if a.verdict.correct),
        failed=tuple(a for a in attempts if not a.verdict.correct),
        problems=tuple(problems),
    )


def scale(factor: float, terms: Sequence[Term]) -> list[Term]:
    """factor * (sum of terms)."""
    return [replace(term, weight=factor * term.weight) for term in terms]


def mean(items: Iterable[Sequence[Term]]) -> list[Term]:
    """The mean over the non-empty items, each a sum of terms.

    Serves the means within a branch and [eq:teacher-active-branch-loss] alike: a branch without a valid
    term is an empty item, so it neither contributes nor scales the other.
    """
    present = [item for item in items if item]
    return [term for item in present for term in scale(1.0 / len(present), item)]


def by_problem(attempts: Sequence[Attempt]) -> list[list[Attempt]]:
    """Attempts of the same problem together, in the order in which problems first appear."""
    groups: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.problem.id, []).append(attempt)
    return list(groups.values())


def group_advantages(outcomes: Sequence[bool], eps: float) -> list[float]:
    """[eq:grpo-advantage-ratio]: (R_g - mean) / (s_R + eps); zero for a group without spread."""
    rewards = [float(r) for r in outcomes]
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    centre, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(r - centre) / (spread + eps) for r in rewards]


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed that is a function of its parts alone, e.g. (seed, cycle, problem id, role, draw).

    Every random draw of the package comes from here, never from a global stream: the composition of a
    batch, the number of processes and a resume do not change what is drawn.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
