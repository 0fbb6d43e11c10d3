"""Reward functions as TRL calls them, as the verifier of a run."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from transformers import TrainerState

from past_opsd.core import own
from past_opsd.core.nouns import Closing, PastError, Problem, Response, Verdict
from past_opsd.interface.trl.config import PASTConfig
from past_opsd.rollout.verifiers import Reason
from past_opsd.rollout.verifiers._call import called, rewards

Reward = Callable[..., Any]


def verifier(functions: Any, args: PASTConfig) -> tuple[RewardVerifier | None, dict[str, Any]]:
    """The verifier's recipe section, and the object itself where the functions live in this process alone."""
    if functions is None:
        return None, {"name": "boxed_math"}
    several = isinstance(functions, list | tuple)
    given: list[Any] = list(cast("Sequence[Any]", functions)) if several else [functions]
    _check_rewards(given, args)
    section = {"name": "function", "style": "trl", "strip_thinking": False}  # TRL shows the whole completion
    (path,) = [_path_of(given[0])] if len(given) == 1 else [None]
    if path is None:
        made = RewardVerifier(given, args.reward_weights, args.success_reward_threshold)
        return made, section | {"path": "__main__:rewards"}
    (weight,) = args.reward_weights or [1.0]
    if weight <= 0:
        raise PastError(f"reward_weights = [{weight}]: the weight of the only reward function must be above 0")
    return None, section | {"path": path, "success_reward_threshold": args.success_reward_threshold / weight}


def _check_rewards(functions: Sequence[Any], args: PASTConfig) -> None:
    if not functions:
        raise PastError("reward_funcs is empty; give a function, or leave it out to compare boxed answers")
    for function in functions:
        if isinstance(function, str):
            if len(functions) > 1:
                raise PastError("reward_funcs: a text names one importable function, 'package.module:function'")
            if ":" not in function:
                raise PastError(
                    f"reward_funcs = '{function}': reward models are not run; give a function, or the name of one that "
                    "can be imported as 'package.module:function'"
                )
        elif not callable(function) or hasattr(function, "state_dict"):
            raise PastError(f"reward_funcs: a {type(function).__name__} is no function; reward models are not run")
    weights = args.reward_weights
    if weights is not None and len(weights) != len(functions):
        raise PastError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")


def _path_of(function: Reward | str) -> str | None:
    """Where worker processes find the function; None for one that only this process has."""
    if isinstance(function, str):
        return function
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or module is None or getattr(module, name, None) is not function:
        return None
    return None if own.only_here(function) else f"{module.__name__}:{name}"


class RewardVerifier(Closing):
    """Reward functions of the calling script, asked in this process: there is no time limit on them."""

    def __init__(self, functions: Sequence[Reward], weights: Sequence[float] | None, threshold: float):
        self._functions = list(functions)
        self._weights = list(weights) if weights is not None else [1.0] * len(functions)
        self._threshold = threshold
        self._metrics: dict[str, list[float]] = {}
        self.state: TrainerState | None = None
        names = ", ".join(f"{f.__module__}:{called(f)}" for f in functions)
        self.identity = f"rewards {names} weights {self._weights} threshold {threshold}"

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        """The weighted sum of all rewards, against the threshold; a truncated response fails before it is asked."""
        asked = [(p, r) for p, r in items if r.finished]
        sums = iter(self._rewards(asked) if asked else [])
        return [self._verdict(next(sums)) if r.finished else Reason.TRUNCATED.verdict() for _, r in items]

    def collected(self) -> dict[str, float]:
        """The means of what reward functions gave `log_metric` since the last call."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics = {}
        return means

    def _verdict(self, reward: float | None) -> Verdict:
        if reward is None:
            return Reason.NOT_APPLICABLE.verdict()
        return (Reason.CORRECT if reward >= self._threshold else Reason.WRONG).verdict()

    def _rewards(self, items: Sequence[tuple[Problem, Response]]) -> list[float | None]:
        """The sums; a function that gives None has no say, and where none has one there is no sum."""
        asked = [(problem, response.text, response.tokens) for problem, response in items]
        terms: list[list[float]] = [[] for _ in items]
        for function, weight in zip(self._functions, self._weights, strict=True):
            values = rewards(function, asked, trainer_state=self.state, log_metric=self._log)
            for sums, value in zip(terms, values, strict=True):
                if value is not None and not math.isnan(value):
                    sums.append(weight * float(value))
        return [sum(sums) if sums else None for sums in terms]

    def _log(self, name: str, value: float) -> None:
        self._metrics.setdefault(name, []).append(float(value))
