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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from past_opsd.core.nouns import PastError, Problem, Verdict
from past_opsd.core.reading import is_list
from past_opsd.rollout.verifiers import Reason
from past_opsd.rollout.verifiers._extract import find_boxes

_SHOWN = 300
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
    return answering(function, settings, lambda: _about(function))


def answering(
    function: Callable[..., Any], settings: Mapping[str, Any], about: Callable[[], str]
) -> Callable[[str], str]:
    """The function on tasks as JSON; asked `about` itself it says which source it has."""

    def answer(task: str) -> str:
        item: dict[str, Any] = json.loads(task)
        return json.dumps(about() if "about" in item else _judge(function, settings, item))

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
            (value,) = rewards(function, [(problem, item["text"], item["tokens"])], settings["conversational"])
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


def rewards(
    function: Callable[..., Any],
    items: Sequence[tuple[Problem, str, Sequence[int]]],
    conversational: bool | None = None,
    **given: Any,
) -> Sequence[Any]:
    """The rewards of (problem, completion, its ids), asked the way TRL asks: every column a list.

    Without `conversational` completions are messages where the first prompt is. `given` replaces what TRL passes
    besides the columns, where the caller has it.
    """
    prompts = [problem.extra.get("prompt", problem.text) for problem, _, _ in items]
    if conversational is None:
        conversational = isinstance(prompts[0], list)
    texts = [text for _, text, _ in items]
    asked: dict[str, Any] = {
        "prompts": [_prompt(prompt, item[0], conversational) for prompt, item in zip(prompts, items, strict=True)],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts,
        "completion_ids": [list(ids) for _, _, ids in items],
        "trainer_state": None,
        "log_extra": _unheard,
        "log_metric": _unheard,
    }
    values = _finished(function(**accepted(function, _columns([item[0] for item in items]) | asked | given)))
    if not hasattr(values, "__len__") or len(values) != len(items):
        raise PastError(
            f"the reward function {called(function)} must give {len(items)} rewards in a list, one for each "
            f"completion; it gave {values!r:.80}"
        )
    return values


def _unheard(name: str, value: Any) -> None:
    """What TRL logs for a function is logged nowhere here."""


def _prompt(prompt: Any, problem: Problem, conversational: bool) -> Any:
    if conversational:
        return prompt if is_list(prompt) else [{"role": "user", "content": prompt}]
    return problem.text if isinstance(prompt, list) else prompt


def _columns(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """The data's columns, the package's own names among them."""
    rows = [
        {"problem": p.text, "solution": p.solution, "answer": p.answer, "id": p.id} | dict(p.extra) for p in problems
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in _NO_COLUMNS)
    return {name: [row.get(name) for row in rows] for name in names}


def called(function: Callable[..., Any]) -> str:
    """A function's name, of an object that can be called its class's."""
    return getattr(function, "__name__", type(function).__name__)


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments, those that the function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(arguments)
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}


def _verdict(value: Any, threshold: float, text: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        said = cast(Mapping[str, Any], value)
        value = Verdict(said["correct"], said.get("reason", ""), said.get("answer", ""))
    if isinstance(value, Verdict):
        correct = cast(object, value.correct)  # whatever somebody's function put there
        if not isinstance(correct, bool):
            raise TypeError(f"the verdict's 'correct' must be true or false; got {correct!r:.80}")
        reason = Reason.CORRECT.value if value.correct else str(value.reason or Reason.WRONG.value)
        if not value.correct and reason == Reason.CORRECT.value:
            raise ValueError("the verdict says both 'correct' and that it is not")
        return {"correct": value.correct, "reason": reason, "answer": str(value.answer) or _box(text)}
    if value is None:
        reason = Reason.NOT_APPLICABLE
    elif isinstance(value, bool):
        reason = Reason.CORRECT if value else Reason.WRONG
    elif isinstance(value, numbers.Real) and not math.isnan(value):
        reason = Reason.CORRECT if float(value) >= threshold else Reason.WRONG
    else:
        raise TypeError(f"a verifier function must give true, false, a number or a verdict; got {value!r:.80}")
    return {"correct": reason is Reason.CORRECT, "reason": reason.value, "answer": _box(text)}


def _box(text: str) -> str:
    """What majority@k votes on where the function names no answer."""
    found = find_boxes(text)
    return "" if found.failure is not None else found.last.strip()[:_SHOWN]
