r"""Mathematics in a box: the last `\boxed{}` after the thinking part, equal to the gold answer as mathematics.

Extraction and textual equality happen here, in the caller's process, in linear time. What is left is read and
compared as typed values in processes that can be killed. Truncated, malformed, unparseable and endless answers are
failures, each with its reason.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Literal

from pydantic import Field

from past_opsd.core.config import Section
from past_opsd.core.nouns import Closing, Problem, Response, Verdict
from past_opsd.rollout.verifiers import Reason, Verifier
from past_opsd.rollout.verifiers._extract import find_answer, find_boxes
from past_opsd.rollout.verifiers._normalise import (
    clean,
    drop_invisible,
    is_quoted,
    label,
    nesting,
    rational,
    squeeze,
    voted,
)
from past_opsd.rollout.verifiers._prose import stated
from past_opsd.rollout.verifiers.pool import Lost, WorkerPool

# Part of the identity: raise it with every change that can change a verdict.
RULES = 3
_REMEMBERED = 50_000
_SHOWN = 200
_CONVENTIONS = {"decimals", "percent", "units", "lists"}


class Options(Section):
    """Settings of the boxed mathematics verifier."""

    decimals: Literal["exact", "rounded"] = Field(
        default="exact",
        description="May a decimal stand for a value without a finite one, rounded to the digits given?",
    )
    percent: Literal["strict", "optional", "value"] = Field(
        default="strict",
        description="Is 50% never 50 (strict), may the sign be put in (optional), or is 50% the number 0.5 (value)?",
    )
    units: Literal["strict", "convert"] = Field(
        default="strict", description="Must a stated unit be the gold answer's, or may it be converted?"
    )
    lists: Literal["unordered", "ordered"] = Field(
        default="unordered", description="Does the order count in a list without brackets?"
    )
    timeout: float = Field(
        default=4.0, gt=0, le=60, description="Seconds a comparison may take before its process is killed."
    )
    workers: int = Field(default=2, ge=1, description="Processes that compare at the same time.")
    memory_mb: int = Field(default=2048, ge=256, description="Address space of each of these processes, in MiB.")
    strip_thinking: bool = Field(default=True, description="Read only what follows the last </think>.")
    max_length: int = Field(default=1500, ge=1, description="Characters in a box beyond which it is not parsed.")
    max_nesting: int = Field(default=30, ge=1, description="Depth of brackets in a box beyond which it is not parsed.")


class BoxedMath(Closing):
    """See the module's docstring; satisfies `Verifier`."""

    apart = True

    def __init__(self, options: Options) -> None:
        self.options = options
        settings = options.model_dump(include=set(Options.model_fields) - {"workers"})
        listed = ", ".join(f"{key}={value}" for key, value in settings.items())
        self.identity = f"boxed_math rules {RULES} ({listed}) sympy=={version('sympy')}"
        self._pool = WorkerPool(
            "past_opsd.rollout.verifiers._compare:judge",
            workers=options.workers,
            timeout=options.timeout,
            memory_mb=options.memory_mb,
            advice="Try `python -c 'import sympy'` in this environment; more memory_mb if that works.",
        )
        self._rules = json.dumps(options.model_dump(include=_CONVENTIONS))
        self._memory: OrderedDict[tuple[str, str], Reason] = OrderedDict()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the living workers."""
        return self._pool.pids

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        """One verdict an item, in order. All comparisons of a call run across the workers."""
        looked = [self._look(problem.answer, response) for problem, response in items]
        pairs = [pair for pair in dict.fromkeys(found for found, _ in looked) if isinstance(pair, tuple)]
        replies = self._pool.run([(clean(g), clean(said), self._rules) for g, said in pairs]) if pairs else []
        decided = dict(zip(pairs, map(_reason, replies), strict=True))
        for pair, reason in decided.items():
            if reason is not Reason.CRASHED:
                self._remember(pair, reason)
        return [(decided[f] if isinstance(f, tuple) else f).verdict(answer) for f, answer in looked]

    def _look(self, gold: str, response: Response) -> tuple[Reason | tuple[str, str], str]:
        """A reason where the text decides, else the pair that mathematics must decide; and the answer given."""
        if not response.finished:
            return Reason.TRUNCATED, ""
        found = find_answer(response.text, strip_thinking=self.options.strip_thinking)
        if found.failure is not None:
            return found.failure, ""
        pair = (_gold_content(gold), _join(found.parts))
        fits = len(pair[1]) <= self.options.max_length
        said = voted(clean(pair[1])) if fits else drop_invisible(pair[1][:_SHOWN]) + "…"
        known = self._memory.get(pair)
        if known is None and (known := self._by_text(*pair)) is None:
            return pair, said
        self._remember(pair, known)
        return known, said

    def _by_text(self, gold: str, answer: str) -> Reason | None:
        if not gold:
            return Reason.BAD_GOLD
        if gold == answer:
            return Reason.CORRECT
        if max(len(answer), len(gold)) > self.options.max_length:
            return Reason.TOO_COMPLEX
        target, said = clean(gold), clean(answer)
        if not said:
            return Reason.UNPARSEABLE
        if squeeze(target) == squeeze(said):
            return Reason.CORRECT
        values = rational(target), rational(said)
        if None not in values and (values[0] == values[1] or "." not in target + said):
            return Reason.CORRECT if values[0] == values[1] else Reason.WRONG
        words = label(target), label(said)
        if None not in words and words[0] == words[1]:
            return Reason.CORRECT
        if is_quoted(target) and None not in words:
            return Reason.WRONG
        return Reason.TOO_COMPLEX if max(nesting(said), nesting(target)) > self.options.max_nesting else None

    def _remember(self, pair: tuple[str, str], reason: Reason) -> None:
        self._memory[pair] = reason
        self._memory.move_to_end(pair)
        if len(self._memory) > _REMEMBERED:
            self._memory.popitem(last=False)


@lru_cache(maxsize=10_000)
def _gold_content(gold: str) -> str:
    """A gold answer may itself come boxed, announced or at the end of a text; that is then what counts."""
    found = find_boxes(gold)
    return (stated(gold) if found.failure is not None else _join(found.parts)).strip()


def _join(parts: tuple[str, ...]) -> str:
    """Boxes joined by a comma or a conjunction are one list: `\\boxed{1}, \\boxed{2}` does not say 2."""
    return ", ".join(part.strip() for part in parts)


def _reason(answer: str | Lost) -> Reason:
    if isinstance(answer, Lost):
        return Reason.TIMEOUT if answer is Lost.TIMEOUT else Reason.CRASHED
    return Reason(answer)


def build(options: Options) -> Verifier:
    """The verifier; its processes start with the first answer that text alone does not decide."""
    return BoxedMath(options)
