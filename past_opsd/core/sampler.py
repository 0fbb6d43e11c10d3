"""The adaptive failed-branch sampler: who draws how many teacher continuations, and what that costs.

`adaptive` is the state machine of the appendix "Adaptive Failed-Branch Sampling", run for all failed
trajectories together in batched rounds; `fixed` is the fixed-size sampler that it is compared with.
`Controller` moves the base draw G_base between cycles. The closed forms at the end are those of
"Adaptive-Sampling Identities".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from past_opsd.core.nouns import Attempt, Group, PastError

Round = Callable[[Sequence[tuple[int, int]]], list[Attempt]]
"""One batched round: asked for (trajectory, draw index) pairs, returns verified continuations in that order.

Draw indices of a trajectory run 0, 1, 2, ... through the retry, so seeds derived from them never repeat.
"""


def adaptive(failed: Sequence[Attempt], base: int, maximum: int, draw: Round, ahead: int = 0) -> list[Group]:
    """A group for each failed trajectory: G_base = `base`, G_max = `maximum`.

    Every round asks for all trajectories that need it at once: `base` each; then one more for each that
    has no success yet, up to `maximum`; then one complete group of `maximum` for those still without.
    At most `maximum - base + 2` rounds and `2 * maximum` continuations a trajectory.

    With `ahead` each round asks for so many more of a trajectory, up to `maximum` in its group. A draw is decided
    by its index, so the groups are those of `ahead = 0` in fewer rounds; what the rule turns out not to need is
    in `Group.unused`.
    """
    _check_group(base, maximum)
    if ahead < 0:
        raise PastError(f"continuations are drawn ahead or not, got {ahead}")
    drawn: list[list[Attempt]] = [[] for _ in failed]
    while True:
        requests = [
            (i, index)
            for i, seen in enumerate(drawn)
            for need in [_needed(seen, base, maximum)]
            if need > len(seen)
            # A group is filled up to G_max; the retry is complete as it is.
            for index in range(len(seen), max(need, min(need + ahead, maximum)))
        ]
        if not requests:
            return [_realised(a, seen, base, maximum) for a, seen in zip(failed, drawn, strict=True)]
        _extend(drawn, requests, draw)


def fixed(failed: Sequence[Attempt], size: int, draw: Round, retry: bool = True) -> list[Group]:
    """Exactly `size` continuations for each failed trajectory, in one round.

    With `retry` an all-failure group is drawn once more, as in `adaptive`: then the two samplers differ in
    the size of the first stage alone, which is what the paper's fixed-8 row compares. Without it such a
    group is skipped at once.
    """
    if retry:
        return adaptive(failed, size, size, draw)
    _check_group(size, size)
    drawn: list[list[Attempt]] = [[] for _ in failed]
    _extend(drawn, [(i, index) for i in range(len(failed)) for index in range(size)], draw)
    return [Group(attempt, tuple(group)) for attempt, group in zip(failed, drawn, strict=True)]


def _needed(seen: Sequence[Attempt], base: int, maximum: int) -> int:
    """How many draws of a trajectory the sequential rule makes, as far as the outcomes seen so far decide it."""
    first = next((i for i, c in enumerate(seen[:maximum]) if c.verdict.correct), None)
    if first is not None:
        return max(base, first + 1)
    return max(base, len(seen) + 1) if len(seen) < maximum else 2 * maximum


def _realised(attempt: Attempt, drawn: Sequence[Attempt], base: int, maximum: int) -> Group:
    """What the rule made of a trajectory's draws; beyond `maximum` it needs the retry, which replaces them."""
    needed = _needed(drawn, base, maximum)
    begin = maximum if needed > maximum else 0
    return Group(attempt, tuple(drawn[begin:needed]), tuple(drawn[:begin]), tuple(drawn[needed:]))


def _extend(drawn: list[list[Attempt]], requests: Sequence[tuple[int, int]], draw: Round) -> None:
    if not requests:
        return
    found = draw(requests)
    if len(found) != len(requests):
        raise PastError(
            f"the sampler asked for {len(requests)} continuations and got {len(found)}: "
            "a draw function must answer every request, in order"
        )
    for (i, _), continuation in zip(requests, found, strict=True):
        drawn[i].append(continuation)


def _check_group(base: int, maximum: int) -> None:
    if not 1 <= base <= maximum:
        raise PastError(f"the base draw must lie between 1 and the maximum group size, got {base} and {maximum}")


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """How G_base falls. The paper fixes none of the last four: their defaults are this package's choice.

    `maximum` is G_max. `warmup` is the number of updates during which the base draw stays there. `decay` is
    the weight of the past in the moving average of teacher success per continuation, `threshold` the level
    it has to hold and `patience` for how many updates in a row.
    """

    maximum: int = 8
    warmup: int = 10
    decay: float = 0.9
    threshold: float = 0.4
    patience: int = 5

    def __post_init__(self) -> None:
        if self.maximum < 1:
            raise PastError(f"controller: maximum (G_max) must be at least 1, got {self.maximum}")
        if self.warmup < 0:
            raise PastError(f"controller: warmup must not be negative, got {self.warmup}")
        if not 0.0 <= self.decay < 1.0:
            raise PastError(f"controller: decay must lie in [0, 1), got {self.decay}")
        if not 0.0 <= self.threshold <= 1.0:
            raise PastError(f"controller: threshold is a success rate in [0, 1], got {self.threshold}")
        if self.patience < 1:
            raise PastError(f"controller: patience must be at least 1, got {self.patience}")


@dataclass(frozen=True, slots=True)
class Controller:
    """G_base and what moves it; a value, so that a cycle which does not finish leaves no trace.

    `ema` is the moving average (None before the first update), `streak` the number of updates in a row
    with it at or above the threshold since the last decrease, `updates` the number of cycles that drew.
    """

    options: ControllerOptions
    base: int
    ema: float | None = None
    streak: int = 0
    updates: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.base <= self.options.maximum:
            raise PastError(
                f"controller: the base draw {self.base} does not lie between 1 and the maximum group size "
                f"{self.options.maximum}; continue a run with the group size that it was started with"
            )
        if self.ema is not None and not 0.0 <= self.ema <= 1.0:
            raise PastError(f"controller: ema is a success rate in [0, 1], got {self.ema}")
        if self.streak < 0 or self.updates < 0:
            raise PastError(f"controller: streak and updates count, got {self.streak} and {self.updates}")

    @classmethod
    def start(cls, options: ControllerOptions) -> Controller:
        """Warm-up starts at G_base = G_max."""
        return cls(options, base=options.maximum)

    def update(self, successes: int, samples: int) -> Controller:
        """The controller after a cycle in which `successes` of `samples` drawn continuations succeeded.

        Count every draw, replaced groups included: then E[successes] = s E[samples] whatever the stopping
        rule (Wald), while the realised groups alone favour success. The streak counts through the
        warm-up, the base draw moves only after it. A cycle without samples changes nothing.
        """
        if not 0 <= successes <= samples:
            raise PastError(f"controller: {successes} successes in {samples} samples is impossible")
        if samples == 0:
            return self
        options, rate = self.options, successes / samples
        # Written as a correction, so that a constant rate stays exactly itself and can hold a threshold.
        ema = rate if self.ema is None else self.ema + (1.0 - options.decay) * (rate - self.ema)
        updates = self.updates + 1
        streak = self.streak + 1 if ema >= options.threshold else 0
        if updates > options.warmup and streak >= options.patience and self.base > 1:
            return replace(self, base=self.base - 1, ema=ema, streak=0, updates=updates)
        return replace(self, ema=ema, streak=streak, updates=updates)

    def to_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; the options belong to the configuration."""
        state = asdict(self)
        del state["options"]
        return state

    @classmethod
    def from_dict(cls, options: ControllerOptions, state: Mapping[str, Any]) -> Controller:
        """The controller that `to_dict` described, under `options`."""
        known = {"base", "ema", "streak", "updates"}
        if set(state) != known:
            raise PastError(
                f"controller: a saved state has the keys {sorted(known)}, this one has {sorted(state)}; "
                "the checkpoint is damaged or of another version"
            )
        counts = (state["base"], state["streak"], state["updates"])
        if not all(isinstance(count, int) for count in counts) or not isinstance(state["ema"], float | int | None):
            raise PastError(f"controller: a saved state holds numbers, got {dict(state)}; the checkpoint is damaged")
        return cls(options, **state)


def expected_first_stage(s: float, b: int, G: int) -> float:
    """E[N_1]: first-stage draws of a trajectory whose continuations succeed independently with probability s."""
    _check_rate(s, b, G)
    return b + sum((1.0 - s) ** j for j in range(b, G))


def expected_samples(s: float, b: int, G: int) -> float:
    """E[N]: all draws, the retry included. `b = G` is the fixed-size sampler with retry."""
    return expected_first_stage(s, b, G) + G * (1.0 - s) ** G


def skip_probability(s: float, G: int) -> float:
    """P(skip): the full group and its retry fail. It does not depend on the base draw."""
    _check_rate(s, G, G)
    return (1.0 - s) ** (2 * G)


def all_success_probability(s: float, b: int, G: int) -> float:
    """P(every member of the realised group succeeds), where the policy gradient is zero.

    Either the base draw succeeds throughout, or the first stage fails and the retry succeeds throughout;
    a group extended to its first success holds failures.
    """
    _check_rate(s, b, G)
    return s**b + (1.0 - s) ** G * s**G


def mixed_probability(s: float, b: int, G: int) -> float:
    """P(the realised group holds both outcomes): the trajectories that carry a policy gradient."""
    return 1.0 - all_success_probability(s, b, G) - skip_probability(s, G)


def best_ahead(failed: int, s: float, b: int, G: int, work: float) -> int:
    """How many continuations to draw ahead so that the first stage of `failed` trajectories takes the least time.

    The unit is a round in which few are drawn, bound by its latency; each draw adds `work` of it. With a drawn
    ahead the rounds begin at n = 0, b + a, b + 2a + 1, ... < G draws of a trajectory, which has no success yet with
    probability (1 - s)^n, while some one has none with 1 - (1 - (1 - s)^n)^failed. The time is the sum of the latter
    over the rounds, and work * failed times the sum of (draws of the round) * (the former). With two failures,
    s = 0.4, b = 1, G = 8 and work 1/64 it is 3.43 rounds for a = 0 and 1.25 for a = 7. The smallest a of the least
    time is given.
    """
    _check_rate(s, b, G)

    def time(a: int) -> float:
        total, n = 0.0, 0
        while n < G:
            size, open_ = min((b if n == 0 else 1) + a, G - n), (1.0 - s) ** n
            total += 1.0 - (1.0 - open_) ** failed + work * failed * size * open_
            n += size
        return total

    return min(range(G - b + 1), key=time)


def _check_rate(s: float, b: int, G: int) -> None:
    if not 0.0 <= s <= 1.0:
        raise PastError(f"a success probability lies in [0, 1], got {s}")
    _check_group(b, G)
