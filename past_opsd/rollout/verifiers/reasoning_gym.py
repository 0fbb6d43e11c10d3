r"""reasoning-gym's own scorers: the last `\boxed{}` after the thinking part, scored by the task the problem came from.

Goes with the task `reasoning_gym`. The scorers run in processes that can be killed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from importlib.metadata import version

from pydantic import Field

from past_opsd.core.config import Section
from past_opsd.core.nouns import Closing, PastError, Problem, Response, Verdict
from past_opsd.rollout.verifiers import Reason, Verifier
from past_opsd.rollout.verifiers._extract import find_answer
from past_opsd.rollout.verifiers.pool import Lost, WorkerPool

_SHOWN = 300


class Options(Section):
    """Settings of reasoning-gym's scorers."""

    threshold: float = Field(default=1.0, gt=0, le=1, description="Score from which an answer counts as correct.")
    strip_thinking: bool = Field(default=True, description="Read only what follows the last </think>.")
    timeout: float = Field(default=10.0, gt=0, le=600, description="Seconds a scorer may take before it is killed.")
    workers: int = Field(default=2, ge=1, description="Processes that score at the same time.")
    memory_mb: int = Field(default=4096, ge=512, description="Address space of each of these processes, in MiB.")


class Gym(Closing):
    """See the module's docstring; satisfies `Verifier`."""

    apart = True

    def __init__(self, options: Options) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise PastError(
                "the verifier 'reasoning_gym' needs the package reasoning-gym: pip install 'past-opsd[tasks]'"
            )
        self.options = options
        settings = options.model_dump(exclude={"workers"})
        listed = ", ".join(f"{key}={value}" for key, value in settings.items())
        self.identity = f"reasoning_gym {version('reasoning-gym')} ({listed})"
        self._pool = WorkerPool(
            "past_opsd.rollout.verifiers._gym:score",
            workers=options.workers,
            timeout=options.timeout,
            memory_mb=options.memory_mb,
        )

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        """One verdict an item, in order."""
        said = [self._answer(response) for _, response in items]
        tasks = [
            (_task(problem, answer),)
            for (problem, _), answer in zip(items, said, strict=True)
            if not isinstance(answer, Reason)
        ]
        replies = iter(self._pool.run(tasks) if tasks else [])
        return [
            answer.verdict() if isinstance(answer, Reason) else self._reason(next(replies)).verdict(answer[:_SHOWN])
            for answer in said
        ]

    def _answer(self, response: Response) -> str | Reason:
        if not response.finished:
            return Reason.TRUNCATED
        found = find_answer(response.text, strip_thinking=self.options.strip_thinking)
        return found.last.strip() if found.failure is None else found.failure

    def _reason(self, reply: str | Lost) -> Reason:
        if isinstance(reply, Lost):
            return Reason.TIMEOUT if reply is Lost.TIMEOUT else Reason.CRASHED
        if not reply:
            return Reason.BAD_GOLD
        return Reason.CORRECT if float(reply) >= self.options.threshold else Reason.WRONG


def _task(problem: Problem, answer: str) -> str:
    if not {"origin", "index"} <= set(problem.extra):
        raise PastError("the verifier 'reasoning_gym' scores problems of the task 'reasoning_gym' alone")
    origin, index = problem.extra["origin"], problem.extra["index"]
    return json.dumps({"origin": origin, "index": index, "question": problem.text, "answer": answer})


def build(options: Options) -> Verifier:
    """The verifier; its processes start with the first answer."""
    return Gym(options)
