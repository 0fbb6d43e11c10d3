"""A Python function of the user's decides: `path = "my_pkg.rewards:check"`.

    def check(response: str, problem: Problem) -> bool | float | Verdict: ...

A number is a success from `success_reward_threshold` on. With `style = "trl"` it is a reward function as TRL calls it,
sync or async. The function runs in processes that can be killed: one that hangs, raises or dies costs its own response
and nothing else. A truncated response fails before the function is asked. With `workers = 0`, as for a function that a
script or a notebook defines, it is asked in this process, without limits of time and memory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from past_opsd.core import own
from past_opsd.core.config import Section
from past_opsd.core.nouns import Closing, PastError, Problem, Response, Verdict
from past_opsd.rollout.verifiers import Reason, Verifier
from past_opsd.rollout.verifiers._call import answering
from past_opsd.rollout.verifiers._extract import after_thinking
from past_opsd.rollout.verifiers.pool import Lost, WorkerPool

_LOG = logging.getLogger(__name__)


class Options(Section):
    """Settings of a user's function."""

    path: str = Field(pattern=r"^[\w.]+:[\w.]+$", description="The function, as package.module:function.")
    style: Literal["plain", "trl"] = Field(
        default="plain", description="plain: f(response, problem); trl: f(prompts, completions, ..., **columns)."
    )
    success_reward_threshold: float = Field(default=1.0, description="A number counts as a success from here on.")
    conversational: bool | None = Field(
        default=None, description="trl: completions as messages; unset: where the dataset's prompt is messages."
    )
    strip_thinking: bool = Field(default=True, description="Show only what follows the last </think>.")
    timeout: float = Field(default=10.0, gt=0, le=3600, description="Seconds a call may take before it is killed.")
    workers: int = Field(
        default=2, ge=0, description="Processes that call the function at the same time; 0: this one, without limits."
    )
    memory_mb: int = Field(default=8192, ge=256, description="Address space of each of these processes, in MiB.")


class Here(Closing):
    """Stands for the pool where the function is asked in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        function = own.find(settings["path"], "verifier.path")
        if not callable(function):
            raise PastError(f"verifier.path = '{settings['path']}' is no function but a {type(function).__name__}")
        self._answer = answering(function, settings, lambda: own.digest(function))

    def run(self, tasks: Sequence[Sequence[str]]) -> list[str | Lost]:
        """One answer a task, in order."""
        return [self._answer(*task) for task in tasks]


class Function(Closing):
    """See the module's docstring; satisfies `Verifier`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        bound = {
            "path": options.path,
            "style": options.style,
            "threshold": options.success_reward_threshold,
            "conversational": options.conversational,
        }
        if options.workers == 0 or options.path.startswith(f"{own.MAIN}:"):
            self._pool = Here(bound)
        else:
            self._pool = WorkerPool(
                "past_opsd.rollout.verifiers._call:load",
                workers=options.workers,
                timeout=options.timeout,
                memory_mb=options.memory_mb,
                argument=json.dumps(bound),
                advice=f"verifier.path = '{options.path}' must be importable here (package.module:function).",
            )
        self.apart = isinstance(self._pool, WorkerPool)
        self._told: set[str] = set()
        (source,) = self._pool.run([(json.dumps({"about": True}),)])
        if isinstance(source, Lost):
            raise PastError(f"verifier.path = '{options.path}': its source file could not be read ({source.value})")
        settings = options.model_dump(exclude={"workers", "path"})
        listed = ", ".join(f"{key}={value}" for key, value in settings.items())
        self.identity = f"function {options.path} ({listed}) source {json.loads(source)}"

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        """One verdict an item, in order."""
        read = [self._read(response) for _, response in items]
        tasks = [
            (_task(problem, response, text),)
            for (problem, response), text in zip(items, read, strict=True)
            if isinstance(text, str)
        ]
        replies = iter(self._pool.run(tasks) if tasks else [])
        return [self._verdict(next(replies)) if isinstance(text, str) else text for text in read]

    def _read(self, response: Response) -> str | Verdict:
        """What the function is shown, or the verdict where it is not asked."""
        if not response.finished:
            return Reason.TRUNCATED.verdict()
        text = after_thinking(response.text) if self.options.strip_thinking else response.text
        return Reason.NO_BOX.verdict() if text is None else text

    def _verdict(self, reply: str | Lost) -> Verdict:
        if isinstance(reply, Lost):
            return (Reason.TIMEOUT if reply is Lost.TIMEOUT else Reason.CRASHED).verdict()
        said: dict[str, Any] = json.loads(reply)
        if "error" not in said:
            return Verdict(**said)
        kind = said["error"].partition(":")[0]
        if kind not in self._told:
            self._told.add(kind)
            _LOG.warning(
                "verifier function %s failed with %s; such responses count as failures ('error'), told once a kind",
                self.options.path,
                said["error"],
            )
        return Reason.ERROR.verdict()


def _task(problem: Problem, response: Response, text: str) -> str:
    plain = {
        "id": problem.id,
        "text": problem.text,
        "solution": problem.solution,
        "answer": problem.answer,
        "extra": dict(problem.extra),
    }
    return json.dumps({"text": text, "tokens": response.tokens, "problem": plain}, default=str)


def build(options: Options) -> Verifier:
    """The verifier, with one process up: a function that cannot be imported is told now."""
    return Function(options)
