"""Which problems are the same: repeats within a set, and held-out problems that a training set holds.

Two measures: the same text after normalising (case, white space and punctuation aside), and a run of 13 words that a
held-out problem shares with a training problem. The second finds rewordings around a common core, and can find
harmless common phrases: `share` is the part of the held-out problem's runs that one training problem holds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from past_opsd.core.nouns import Problem

RUN = 13
_WORD = re.compile(r"[^\W_]+|[+*/=<>^%-]")  # signs of mathematics tell problems apart


@dataclass(frozen=True, slots=True)
class Repeats:
    """Problems that say the same: groups of at least two, and the groups whose answers differ."""

    groups: tuple[tuple[Problem, ...], ...]

    @property
    def surplus(self) -> int:
        return sum(len(group) - 1 for group in self.groups)

    @property
    def conflicts(self) -> tuple[tuple[Problem, ...], ...]:
        return tuple(g for g in self.groups if len({normalise(p.answer) for p in g}) > 1)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A held-out problem that a training problem holds, wholly (`share` 1, `exact`) or in part."""

    held_out: Problem
    training: Problem
    share: float
    exact: bool


def words(text: str) -> list[str]:
    """A text's words and signs of mathematics, in lower case."""
    return _WORD.findall(text.casefold())


def normalise(text: str) -> str:
    """A text without case, white space and punctuation."""
    return " ".join(words(text))


def repeats(problems: Iterable[Problem], key: Callable[[str], str]) -> Repeats:
    """Problems with the same key of their text."""
    groups: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        groups[key(problem.text)].append(problem)
    return Repeats(tuple(tuple(group) for group in groups.values() if len(group) > 1))


def overlaps(training: Iterable[Problem], held_out: Sequence[Problem]) -> list[Overlap]:
    """For each held-out problem the training problem that holds most of it, if any; in the held-out order.

    A held-out problem of fewer than 13 words is compared as a whole.
    """
    texts = [words(problem.text) for problem in held_out]
    whole: dict[str, list[int]] = defaultdict(list)
    places: dict[tuple[str, ...], set[int]] = defaultdict(set)
    totals: list[int] = []
    for i, text in enumerate(texts):
        whole[" ".join(text)].append(i)
        runs = set(_runs(text))
        totals.append(len(runs))
        for run in runs:
            places[run].add(i)
    best: dict[int, Overlap] = {}
    for problem in training:
        text = words(problem.text)
        same = set(whole.get(" ".join(text), ()))
        shared = Counter(i for run in set(_runs(text)) for i in places.get(run, ()))
        for i in same | set(shared):
            share = 1.0 if i in same else shared[i] / totals[i]
            if i not in best or (i in same, share) > (best[i].exact, best[i].share):
                best[i] = Overlap(held_out[i], problem, share, i in same)
    return [best[i] for i in sorted(best)]


def _runs(text: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return (tuple(text[i : i + RUN]) for i in range(len(text) - RUN + 1))
