"""Checks of the adaptive-sampling identities on the package's own sampler, over every sequence of outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from past_opsd.analysis.theory.check import Check, Pairs, compare
from past_opsd.core import sampler
from past_opsd.core.nouns import Attempt, Group, Problem, Response, Verdict, View
from past_opsd.core.sampler import Controller, ControllerOptions, Round

RATES = (0.02, 0.3, 0.5, 0.9)
LARGEST = 8
SIZES = tuple((b, G) for G in range(1, LARGEST + 1) for b in range(1, G + 1))

_ANSWERS = tuple(
    Attempt(Problem("", "", "", ""), View("teacher", ()), Response((), "", (), True), Verdict(correct, ""))
    for correct in (False, True)
)
FAILED = _ANSWERS[:1]
"""One failed trajectory."""


@dataclass(frozen=True, slots=True)
class Path:
    """One way a sampler's run can go: the outcomes of its draws in order, and what it made of them."""

    outcomes: tuple[bool, ...]
    groups: list[Group]

    def probability(self, s: float) -> float:
        """Of this path, when every draw succeeds independently with probability s."""
        successes = sum(self.outcomes)
        return s**successes * (1.0 - s) ** (len(self.outcomes) - successes)


def paths(sampler: Callable[[Round], list[Group]]) -> Iterator[Path]:
    """Every path of a sampler, depth first: answers beyond the script are failures, then the last one is turned."""
    script: list[bool] = []
    while True:
        position = iter(range(2**31))

        def draw(requests: Sequence[tuple[int, int]], position: Iterator[int] = position) -> list[Attempt]:
            places = [next(position) for _ in requests]
            script.extend([False] * (places[-1] + 1 - len(script)))
            return [_ANSWERS[script[place]] for place in places]

        groups = sampler(draw)
        yield Path(tuple(script), groups)
        while script and script[-1]:
            script.pop()
        if not script:
            return
        script[-1] = True


def expectation(tree: Sequence[Path], s: float, value: Callable[[Path], float]) -> float:
    """E[value] over the paths."""
    return math.fsum(path.probability(s) * value(path) for path in tree)


def samples(path: Path) -> int:
    """N: everything drawn."""
    return sum(len(group.drawn) for group in path.groups)


def first_stage(path: Path) -> int:
    """N_1: what was drawn before a retry."""
    return sum(len(group.discarded or group.continuations) for group in path.groups)


def successes(path: Path) -> int:
    """Draws that succeeded."""
    return sum(path.outcomes)


def skipped(path: Path) -> bool:
    """The first trajectory contributes nothing."""
    return not path.groups[0].active


def all_success(path: Path) -> bool:
    """Every member of the realised group succeeds."""
    return path.groups[0].successes == path.groups[0].continuations


def mixed(path: Path) -> bool:
    """The realised group holds both outcomes."""
    return path.groups[0].mixed


def fixed_groups(seed: int) -> Iterator[Check]:
    """(1-s)^G, s^G and the rest, from `sampler.fixed` without a retry."""
    label = "app:theory: adaptive sampling"
    failure, success, both = Pairs(), Pairs(), Pairs()
    for G in range(1, LARGEST + 1):
        tree = list(paths(partial(_fixed, G)))
        for s in RATES:
            failure.append((expectation(tree, s, skipped), (1 - s) ** G))
            success.append((expectation(tree, s, all_success), s**G))
            both.append((expectation(tree, s, mixed), 1 - (1 - s) ** G - s**G))
    yield compare(label, "fixed group: P(all fail) = (1-s)^G", "=", failure)
    yield compare(label, "fixed group: P(all succeed) = s^G", "=", success)
    yield compare(label, "fixed group: P(mixed) = 1 - (1-s)^G - s^G", "=", both)


def _fixed(G: int, draw: Round) -> list[Group]:
    return sampler.fixed(FAILED, G, draw, retry=False)


def adaptive_groups(seed: int) -> Iterator[Check]:
    """E[N_1], E[N] and P(skip) from `sampler.adaptive`, for every b <= G <= 8, beside the paper's sums."""
    label = "app:theory: adaptive sampling"
    total, first, drawn, skip, closed, wald = Pairs(), Pairs(), Pairs(), Pairs(), Pairs(), Pairs()
    for b, G in SIZES:
        tree = list(paths(partial(sampler.adaptive, FAILED, b, G)))
        for s in RATES:
            mean = partial(expectation, tree, s)
            extra = sum((1 - s) ** j for j in range(b, G))
            total.append((mean(lambda path: 1.0), 1.0))
            first.append((mean(first_stage), b + extra))
            drawn.append((mean(samples), b + extra + G * (1 - s) ** G))
            skip.append((mean(skipped), (1 - s) ** (2 * G)))
            wald.append((mean(successes), s * mean(samples)))
            closed.append((mean(first_stage), sampler.expected_first_stage(s, b, G)))
            closed.append((mean(samples), sampler.expected_samples(s, b, G)))
            closed.append((mean(skipped), sampler.skip_probability(s, G)))
            closed.append((mean(all_success), sampler.all_success_probability(s, b, G)))
            closed.append((mean(mixed), sampler.mixed_probability(s, b, G)))
    yield compare(label, "all paths of sampler.adaptive have mass 1", "=", total)
    yield compare(label, "E[N_1] = b + sum_{b<=j<G} (1-s)^j", "=", first)
    yield compare(label, "E[N] = E[N_1] + G (1-s)^G", "=", drawn)
    yield compare(label, "P(skip) = (1-s)^(2G)", "=", skip)
    yield compare(label, "the closed forms of past_opsd.core.sampler", "=", closed)
    yield compare(label, "E[successes] = s E[N]: what Controller averages", "=", wald)


def controlled(seed: int) -> Iterator[Check]:
    """What each step of `Controller` saves: lowering the base from b to b - 1 saves 1 - (1-s)^(b-1) draws."""
    label = "app:theory: adaptive sampling"
    saved = Pairs()
    controller = Controller.start(ControllerOptions(maximum=LARGEST, warmup=0, threshold=0.5, patience=1))
    while controller.base > 1:
        after = controller.update(successes=3, samples=4)
        trees = [list(paths(partial(sampler.adaptive, FAILED, c.base, LARGEST))) for c in (controller, after)]
        for s in RATES:
            before, now = (expectation(tree, s, samples) for tree in trees)
            saved.append((before - now, 1 - (1 - s) ** (controller.base - 1)))
        controller = after
    yield compare(label, "a Controller step b to b-1 saves 1 - (1-s)^(b-1)", "=", saved)
