r"""The same text: the last `\boxed{}` after the thinking part, what follows a mark, or the whole text is the gold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from past_opsd.core.config import Section
from past_opsd.core.nouns import Closing, Problem, Response, Verdict
from past_opsd.rollout.verifiers import Reason, Verifier
from past_opsd.rollout.verifiers._extract import after_thinking, find_answer


class Options(Section):
    """Settings of the exact verifier."""

    whole_text: bool = Field(default=False, description="Compare the whole answer text instead of the last box.")
    after: str = Field(
        default="", description="Compare what follows the last of these, 'Answer:' say, instead of a box."
    )
    strip_thinking: bool = Field(default=True, description="Read only what follows the last </think>.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.after and self.whole_text:
            raise ValueError("'after' has no meaning with whole_text = true")
        return self


class Exact(Closing):
    """String equality without surrounding white space; satisfies `Verifier`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        mark = f", after={options.after!r}" if options.after else ""
        self.identity = f"exact (whole_text={options.whole_text}, strip_thinking={options.strip_thinking}{mark})"

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        return [self._verdict(problem.answer, response) for problem, response in items]

    def _verdict(self, gold: str, response: Response) -> Verdict:
        if not response.finished:
            return Reason.TRUNCATED.verdict()
        if self.options.whole_text or self.options.after:
            answer = after_thinking(response.text) if self.options.strip_thinking else response.text
            if answer is None or self.options.after not in answer:
                return (Reason.NO_ANSWER if self.options.after else Reason.NO_BOX).verdict()
            answer = answer.rpartition(self.options.after)[2] if self.options.after else answer
        else:
            found = find_answer(response.text, strip_thinking=self.options.strip_thinking)
            if found.failure is not None:
                return found.failure.verdict()
            answer = found.last
        if not gold.strip():
            return Reason.BAD_GOLD.verdict(answer.strip())
        return (Reason.CORRECT if answer.strip() == gold.strip() else Reason.WRONG).verdict(answer.strip())


def build(options: Options) -> Verifier:
    """The verifier."""
    return Exact(options)
