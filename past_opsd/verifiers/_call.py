"""A user's function in a worker process: find it, call it, turn what it gives into a verdict. Imports no torch."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import json
import math
import numbers
import operator
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from past_opsd.types import Problem, Verdict
from past_opsd.verifiers import Reason
from past_opsd.verifiers._extract import find_boxes

_SHOWN = 300
# TRL passes these besides the columns.
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NO_COLUMNS = ("prompt", "completion", "completion_ids")


def load(argument: str) -> Callable[[str], str]:
    """The function that answers one task, bound to the settings in `argument` (JSON)."""
    settings: dict[str, Any] = json.loads(argument)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a file beside the recipe need not be installed
    module, _, name = settings["path"].partition(":")
    function: Any = operator.attrgetter(name)(importlib.import_module(module))
    if not callable(function):
        raise TypeError(f"{settings['path']} is not a function but a {type(function).__name__}")

    def answer(task: str) -> str:
        item: dict[str, Any] = json.loads(task)
        return json.dumps(_about(function) if "about" in item else _judge(function, settings, item))

    return answer


def _about(function: Callable[..., Any]) -> str:
    """A hash of the file the function was written in."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # built in, or an object with __call__
        file = inspect.getsourcefile(type(function))
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else "no source file"


def _judge(function: Callable[..., Any], settings: Mapping[str, Any], item: Mapping[str, Any]) -> dict[str, Any]:
    problem = Problem(**item["problem"])
    try:
        if settings["style"] == "trl":
            value = _trl(function, problem, item, settings["conversational"])
        else:
            value = _finished(function(item["text"], problem))
        return _verdict(value, settings["threshold"], item["text"])
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:_SHOWN]}


def _finished(value: Any) -> Any:
    """What an async function gives in the end."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def _trl(function: Callable[..., Any], problem: Problem, item: Mapping[str, Any], conversational: bool | None) -> Any:
    """The reward of one completion, asked the way TRL asks: every column a list, here of one."""
    prompt = problem.extra.get("prompt", problem.text)
    if conversational is None:
        conversational = isinstance(prompt, list)
    if conversational and not isinstance(prompt, list):
        prompt = [{"role": "user", "content": prompt}]
    elif not conversational:
        prompt = problem.text
    completion = [{"role": "assistant", "content": item["text"]}] if conversational else item["text"]
    own = {"problem": problem.text, "solution": problem.solution, "answer": problem.answer, "id": problem.id}
    columns = {name: [value] for name, value in (own | dict(problem.extra)).items() if name not in _NO_COLUMNS}
    given = (
        [prompt],
        [completion],
        [item["tokens"]],
        None,
        lambda column, values: None,
        lambda name, value: None,
    )
    rewards = _finished(function(**accepted(function, columns | dict(zip(_GIVEN, given, strict=True)))))
    if not isinstance(rewards, list | tuple) or len(rewards) != 1:
        raise TypeError(f"a reward function must give one reward for each completion, in a list; got {rewards!r:.80}")
    return rewards[0]


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments, those that the function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(arguments)
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}


def _verdict(value: Any, threshold: float, text: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        value = Verdict(value["correct"], value.get("reason", ""), value.get("answer", ""))
    if isinstance(value, Verdict):
        if not isinstance(value.correct, bool):
            raise TypeError(f"the verdict's 'correct' must be true or false; got {value.correct!r:.80}")
        reason = Reason.CORRECT.value if value.correct else str(value.reason or Reason.WRONG.value)
        if not value.correct and reason == Reason.CORRECT.value:
            raise ValueError("the verdict says both 'correct' and that it is not")
        return {"correct": value.correct, "reason": reason, "answer": str(value.answer) or _box(text)}
    if value is None:
        reason = Reason.NOT_APPLICABLE
    elif isinstance(value, numbers.Real) and not math.isnan(value):
        passed = value if isinstance(value, bool) else float(value) >= threshold
        reason = Reason.CORRECT if passed else Reason.WRONG
    else:
        raise TypeError(f"a verifier function must give true, false, a number or a verdict; got {value!r:.80}")
    return {"correct": reason is Reason.CORRECT, "reason": reason.value, "answer": _box(text)}


def _box(text: str) -> str:
    """What majority@k votes on where the function names no answer."""
    found = find_boxes(text)
    return "" if found.failure is not None else found.last.strip()[:_SHOWN]
