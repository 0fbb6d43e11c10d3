"""Verifiers: one protocol, one closed set of reasons. A verifier is one module with `Options` and `build`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from past_opsd.core.nouns import Problem, Response, Verdict


class Reason(StrEnum):
    """Why a verdict is what it is. Everything but `CORRECT` is a failure, counted under its own name."""

    CORRECT = "correct"  # the final answer equals the gold answer
    WRONG = "wrong"  # the final answer was understood and differs from the gold answer
    TRUNCATED = "truncated"  # the token limit cut the response; not read at all
    NO_BOX = "no_box"  # no \boxed{} after the thinking part
    NO_ANSWER = "no_answer"  # the words that announce the answer are not there
    EMPTY_BOX = "empty_box"  # boxes, but nothing in any of them
    UNCLOSED_BOX = "unclosed_box"  # a \boxed{ that never closes, and no closed one
    UNPARSEABLE = "unparseable"  # the content of the box is not mathematics that can be read
    TOO_COMPLEX = "too_complex"  # the content of the box is longer or deeper nested than the limits
    TIMEOUT = "timeout"  # the comparison did not end in time; its process was killed
    CRASHED = "crashed"  # the comparison's process died, twice (memory limit, killed from outside)
    NOT_APPLICABLE = "not_applicable"  # a reward function gave no reward (None)
    ERROR = "error"  # a user's function raised, or gave something that is no verdict
    BAD_GOLD = "bad_gold"  # the gold answer is empty or cannot be read: an error in the data

    def verdict(self, answer: str = "") -> Verdict:
        """The verdict with this reason on what was compared."""
        return Verdict(self is Reason.CORRECT, self.value, answer)


class Verifier(Protocol):
    """Decides R. Bad model output is a verdict, never an exception.

    One with `apart = True` computes in processes of its own and may be asked from another thread, one call at a time:
    while responses are decoded, say.
    """

    identity: str
    """Names the verifier, every setting that can change a verdict, and the versions of what it computes with."""

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        """One verdict for each (problem, response), in order."""
        ...

    def close(self) -> None:
        """End whatever processes the verifier started; it may not be used afterwards."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
