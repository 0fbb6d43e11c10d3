import functools
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from past_opsd.core.nouns import Attempt, Group, PastError, Problem, Response, Verdict, View
from past_opsd.core.sampler import (
    Controller,
    ControllerOptions,
    adaptive,
    all_success_probability,
    best_ahead,
    expected_first_stage,
    expected_samples,
    fixed,
    mixed_probability,
    skip_probability,
)

PROBLEM = Problem(id="p", text="x", solution="z", answer="a")
SIZES = [(b, G) for G in range(1, 5) for b in range(1, G + 1)]
property_test = settings(deadline=None, derandomize=True, max_examples=150)


def attempt(trajectory: int, draw: int, correct: bool) -> Attempt:
    response = Response(tokens=(trajectory, draw), text="", logprobs=(), finished=True)
    return Attempt(PROBLEM, View("teacher", ()), response, Verdict(correct, "correct" if correct else "wrong"))


class World:
    """The outcome of every (trajectory, draw) is written down beforehand; remembers what each round asked for."""

    def __init__(self, outcomes):
        self.outcomes = outcomes
        self.rounds: list[list[tuple[int, int]]] = []

    def draw(self, requests):
        self.rounds.append(list(requests))
        return [attempt(i, d, bool(self.outcomes[i][d])) for i, d in requests]

    def asked(self, trajectory: int) -> list[int]:
        return [d for requests in self.rounds for i, d in requests if i == trajectory]


def by_the_paper(outcomes, b: int, G: int) -> tuple[list[int], list[int]]:
    """One trajectory, draw by draw in the words of the appendix: (realised group, discarded group)."""
    group = list(range(b))
    while not any(outcomes[d] for d in group) and len(group) < G:
        group.append(len(group))
    if any(outcomes[d] for d in group):
        return group, []
    return list(range(G, 2 * G)), group


def failures(n: int) -> list[Attempt]:
    """As many failed student trajectories, each its own."""
    return [attempt(i, -1, False) for i in range(n)]


def indices(continuations) -> list[int]:
    return [c.response.tokens[1] for c in continuations]


def all_sequences(G: int) -> list[tuple[int, ...]]:
    return list(itertools.product((0, 1), repeat=2 * G))


@pytest.mark.parametrize(("b", "G"), SIZES)
def test_every_outcome_sequence_follows_the_state_machine(b, G):
    sequences = all_sequences(G)
    world = World(sequences)
    drawn = adaptive(failures(len(sequences)), b, G, world.draw)

    for i, (outcomes, group) in enumerate(zip(sequences, drawn, strict=True)):
        realised, discarded = by_the_paper(outcomes, b, G)
        assert indices(group.continuations) == realised
        assert indices(group.discarded) == discarded
        assert group.attempt == attempt(i, -1, False)
        assert {c.response.tokens[0] for c in group.continuations + group.discarded} == {i}
        assert len(group.drawn) == len(realised) + len(discarded) <= 2 * G
        assert len(group.successes) == sum(outcomes[d] for d in realised)
        assert group.retried == (not any(outcomes[:G]))
        assert group.active == any(outcomes)
        assert world.asked(i) == list(range(len(group.drawn))), "draw indices are unique and run on through the retry"


@pytest.mark.parametrize(("b", "G"), SIZES)
def test_rounds_hold_all_trajectories_that_need_them(b, G):
    sequences = all_sequences(G)
    world = World(sequences)
    adaptive(failures(len(sequences)), b, G, world.draw)

    expected = [[(i, d) for i in range(len(sequences)) for d in range(b)]]
    expected += [[(i, size) for i, o in enumerate(sequences) if not any(o[:size])] for size in range(b, G)]
    expected += [[(i, G + d) for i, o in enumerate(sequences) if not any(o[:G]) for d in range(G)]]
    assert world.rounds == expected
    assert len(world.rounds) == G - b + 2


@pytest.mark.parametrize(("b", "G"), SIZES)
def test_a_trajectory_is_drawn_alike_alone_and_in_a_batch(b, G):
    sequences = all_sequences(G)
    together = adaptive(failures(len(sequences)), b, G, World(sequences).draw)
    for outcomes, group in zip(sequences, together, strict=True):
        alone = adaptive(failures(1), b, G, World([outcomes]).draw)[0]
        assert indices(alone.continuations) == indices(group.continuations)
        assert indices(alone.discarded) == indices(group.discarded)


@st.composite
def verdicts(draw: st.DrawFn) -> tuple[list[list[bool]], int, int]:
    """Outcomes of some trajectories' draws, a base draw and a largest group."""
    G = draw(st.integers(1, 6))
    return (
        draw(st.lists(st.lists(st.booleans(), min_size=2 * G, max_size=2 * G), max_size=6)),
        draw(st.integers(1, G)),
        G,
    )


@property_test
@given(verdicts())
def test_drawing_ahead_changes_no_group_and_no_controller(case):
    sequences, b, G = case
    controller = Controller(ControllerOptions(maximum=G, warmup=0, threshold=0.3, patience=1), b)
    failed, step_by_step = failures(len(sequences)), World(sequences)
    expected = adaptive(failed, b, G, step_by_step.draw)
    for ahead in (0, 1, G):
        world = World(sequences)
        groups = adaptive(failed, b, G, world.draw, ahead)
        assert [replace(g, unused=()) for g in groups] == expected
        after = controller.update(sum(len(g.successes) for g in groups), sum(len(g.drawn) for g in groups))
        assert after == controller.update(sum(len(g.successes) for g in expected), sum(len(g.drawn) for g in expected))
        for i, group in enumerate(groups):
            assert world.asked(i) == list(range(len(group.drawn) + len(group.unused)))
            assert indices(group.unused) == world.asked(i)[len(group.drawn) :]
            assert len(group.unused) <= min(ahead, G - 1)
        assert len(world.rounds) <= len(step_by_step.rounds) if ahead < G else len(world.rounds) <= 2


def test_what_is_drawn_ahead_fills_the_group_and_never_the_retry():
    world = World([(0, 1, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1, 0, 0)])
    groups = adaptive(failures(2), 1, 4, world.draw, ahead=1)
    both = [[(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 2), (1, 3)], [(1, 4), (1, 5), (1, 6), (1, 7)]]
    assert world.rounds == both
    assert [indices(g.unused) for g in groups] == [[], []]
    assert [indices(g.unused) for g in adaptive(failures(2), 1, 4, World(world.outcomes).draw, ahead=9)] == [[2, 3], []]
    with pytest.raises(PastError, match="drawn ahead or not"):
        adaptive(failures(1), 1, 4, world.draw, ahead=-1)


@pytest.mark.parametrize("failed", [1, 3])
@pytest.mark.parametrize("s", [0.0, 0.3, 0.9])
def test_how_many_are_drawn_ahead_is_what_takes_the_least_time(failed: int, s: float):
    """The stated time is the mean of what the sampler does, over every sequence of outcomes."""
    b, G, work = 1, 3, 0.1
    times = []
    for a in range(G - b + 1):
        total = 0.0
        for outcomes in itertools.product((0, 1), repeat=failed * G):
            world = World([(*outcomes[i * G : (i + 1) * G], *[1] * G) for i in range(failed)])
            adaptive(failures(failed), b, G, world.draw, a)
            first = [[d for _, d in requests if d < G] for requests in world.rounds]
            time = sum(bool(own) + work * len(own) for own in first)
            total += time * math.prod(s if o else 1 - s for o in outcomes)
        times.append(total)
    chosen = best_ahead(failed, s, b, G, work)
    assert times[chosen] == pytest.approx(min(times))


def test_no_round_is_asked_for_nothing():
    world = World([(1, 0, 0, 0)])
    adaptive(failures(1), 1, 2, world.draw)
    assert world.rounds == [[(0, 0)]]

    empty = World([])
    assert adaptive(failures(0), 2, 4, empty.draw) == []
    assert fixed(failures(0), 4, empty.draw) == []
    assert empty.rounds == []


def test_the_redraw_replaces_the_first_group():
    group = adaptive(failures(1), 1, 2, World([(0, 0, 1, 0)]).draw)[0]
    assert indices(group.discarded) == [0, 1]
    assert indices(group.continuations) == [2, 3]
    assert group.mixed


@pytest.mark.parametrize("G", [1, 2, 3])
def test_fixed_draws_whole_groups_and_retries_once(G):
    sequences = all_sequences(G)
    world = World(sequences)
    drawn = fixed(failures(len(sequences)), G, world.draw)
    assert drawn == adaptive(failures(len(sequences)), G, G, World(sequences).draw)
    assert len(world.rounds) == 2
    assert all(len(group.drawn) == (G if any(o[:G]) else 2 * G) for o, group in zip(sequences, drawn, strict=True))


@pytest.mark.parametrize("G", [1, 2, 3])
def test_fixed_without_retry_draws_once(G):
    sequences = all_sequences(G)
    world = World(sequences)
    drawn = fixed(failures(len(sequences)), G, world.draw, retry=False)
    assert len(world.rounds) == 1
    for outcomes, group in zip(sequences, drawn, strict=True):
        assert indices(group.continuations) == list(range(G))
        assert (len(group.drawn), group.retried, group.active) == (G, False, any(outcomes[:G]))


@pytest.mark.parametrize(("base", "maximum"), [(0, 2), (3, 2), (0, 0)])
def test_impossible_sizes_are_refused(base, maximum):
    with pytest.raises(PastError):
        adaptive(failures(1), base, maximum, World([]).draw)


def test_a_draw_function_that_drops_requests_is_refused():
    world = World([(0, 0, 0, 0)] * 3)
    with pytest.raises(PastError, match="asked for 3 continuations and got 2"):
        adaptive(failures(3), 1, 2, lambda requests: world.draw(requests)[:-1])


@st.composite
def worlds(draw):
    G = draw(st.integers(1, 6))
    b = draw(st.integers(1, G))
    row = st.lists(st.booleans(), min_size=2 * G, max_size=2 * G)
    return b, G, draw(st.lists(row, max_size=8))


@property_test
@given(worlds())
def test_any_batch_keeps_the_bounds(case):
    b, G, outcomes = case
    world = World(outcomes)
    drawn = adaptive(failures(len(outcomes)), b, G, world.draw)
    assert [len(d.drawn) for d in drawn] == [len(world.asked(i)) for i in range(len(outcomes))]
    assert len(world.rounds) <= G - b + 2
    assert all(world.rounds)
    for row, group in zip(outcomes, drawn, strict=True):
        size = len(group.continuations)
        assert b <= size <= G
        assert len(group.drawn) <= 2 * G
        # Growth beyond the base draw stops at the first success, and only there.
        if not group.retried and size > b:
            assert [row[d] for d in range(size)] == [False] * (size - 1) + [True]
        if group.retried:
            assert len(group.discarded) == size == G
            assert not any(c.verdict.correct for c in group.discarded)


@functools.cache
def draws_of_all_sequences(b: int, G: int) -> list[tuple[int, Group]]:
    """(number of successes in the sequence, what the sampler made of it) for all 2^(2G) sequences."""
    sequences = all_sequences(G)
    return list(zip(map(sum, sequences), adaptive(failures(len(sequences)), b, G, World(sequences).draw), strict=True))


def exact(b: int, G: int, s: float, value) -> float:
    """E[value(group)] when continuations succeed independently: every sequence weighted by its probability."""
    return math.fsum(s**c * (1 - s) ** (2 * G - c) * value(d) for c, d in draws_of_all_sequences(b, G))


def kind(group: Group) -> str:
    if not group.active:
        return "skipped"
    return "mixed" if group.mixed else "all-success"


@pytest.mark.parametrize("s", [0.0, 0.03, 0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("b", "G"), [*SIZES, (2, 5), (5, 5)])
def test_closed_forms_equal_enumeration(s, b, G):
    close = {"rel": 0, "abs": 1e-12}
    first = exact(b, G, s, lambda d: len(d.discarded) if d.retried else len(d.drawn))
    assert expected_first_stage(s, b, G) == pytest.approx(first, **close)
    assert expected_samples(s, b, G) == pytest.approx(exact(b, G, s, lambda d: len(d.drawn)), **close)
    assert skip_probability(s, G) == pytest.approx(exact(b, G, s, lambda d: not d.active), **close)
    assert mixed_probability(s, b, G) == pytest.approx(exact(b, G, s, lambda d: kind(d) == "mixed"), **close)
    everyone = exact(b, G, s, lambda d: kind(d) == "all-success")
    assert all_success_probability(s, b, G) == pytest.approx(everyone, **close)
    # Wald: the stopping rule does not bias successes per draw when every draw is counted.
    assert exact(b, G, s, lambda d: len(d.successes)) == pytest.approx(s * expected_samples(s, b, G), **close)


def test_closed_forms_by_hand():
    assert expected_first_stage(0.5, 2, 4) == 2 + 0.25 + 0.125
    assert expected_samples(0.5, 2, 4) == 2.375 + 4 / 16
    assert skip_probability(0.5, 4) == 1 / 256
    assert all_success_probability(0.5, 1, 2) == 0.5 + 0.25 * 0.25
    assert mixed_probability(1.0, 1, 8) == 0.0
    assert expected_samples(0.0, 1, 8) == 16


@pytest.mark.parametrize(("s", "b", "G"), [(-0.1, 1, 2), (1.1, 1, 2), (float("nan"), 1, 2), (0.5, 0, 2), (0.5, 3, 2)])
def test_closed_forms_refuse_what_is_no_probability_or_size(s, b, G):
    for form in (expected_first_stage, expected_samples, all_success_probability, mixed_probability):
        with pytest.raises(PastError):
            form(s, b, G)


@pytest.mark.parametrize("s", [0.05, 0.3, 0.48, 0.9])
@pytest.mark.parametrize(("b", "G"), [(1, 8), (4, 8), (8, 8), (2, 3)])
def test_simulation_agrees_with_the_closed_forms(s, b, G):
    n = 4_000
    rng = np.random.default_rng([17, b, G, round(100 * s)])
    drawn = adaptive(failures(n), b, G, World(rng.random((n, 2 * G)) < s).draw)

    f = 1 - s
    pmf = {b: 1 - f**b} | {j + 1: f**j * s for j in range(b, G)} | {2 * G: f**G}
    variance = sum(p * size**2 for size, p in pmf.items()) - sum(p * size for size, p in pmf.items()) ** 2
    assert math.isclose(sum(pmf.values()), 1)
    mean = sum(len(d.drawn) for d in drawn) / n
    assert abs(mean - expected_samples(s, b, G)) <= 5 * math.sqrt(variance / n) + 1e-12

    kinds = Counter(kind(d) for d in drawn)
    expected = {
        "skipped": skip_probability(s, G),
        "mixed": mixed_probability(s, b, G),
        "all-success": all_success_probability(s, b, G),
    }
    for name, p in expected.items():
        # 5 sigma of a binomial count, and a few events where sigma is far below one.
        assert abs(kinds[name] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 3


def run(controller: Controller, rates, samples: int = 100) -> list[Controller]:
    return [controller := controller.update(round(rate * samples), samples) for rate in rates]


def test_controller_starts_at_the_maximum_and_holds_through_warm_up():
    options = ControllerOptions(maximum=8, warmup=4, decay=0.0, threshold=0.5, patience=2)
    states = run(Controller.start(options), [1.0] * 9)
    assert Controller.start(options).base == 8
    # The streak is long by the end of the warm-up, so the first update after it moves the base draw.
    assert [c.base for c in states] == [8, 8, 8, 8, 7, 7, 6, 6, 5]
    assert [c.streak for c in states] == [1, 2, 3, 4, 0, 1, 0, 1, 0]


def test_controller_stops_at_one():
    options = ControllerOptions(maximum=3, warmup=0, decay=0.0, threshold=0.5, patience=1)
    assert [c.base for c in run(Controller.start(options), [1.0] * 5)] == [2, 1, 1, 1, 1]


def test_controller_needs_an_unbroken_streak():
    options = ControllerOptions(maximum=4, warmup=0, decay=0.0, threshold=0.5, patience=3)
    jitter = run(Controller.start(options), [0.6, 0.6, 0.49] * 10)
    assert {c.base for c in jitter} == {4}
    assert max(c.streak for c in jitter) == 2
    # Exactly at the threshold counts.
    assert [c.base for c in run(Controller.start(options), [0.5] * 3)] == [4, 4, 3]


def test_controller_average_by_hand():
    options = ControllerOptions(decay=0.9)
    states = run(Controller.start(options), [0.2, 0.7, 0.0])
    assert [c.ema for c in states] == pytest.approx([0.2, 0.25, 0.225], rel=1e-15)
    assert states[-1].updates == 3


def test_controller_average_smooths_a_single_bad_cycle():
    options = ControllerOptions(maximum=4, warmup=0, decay=0.9, threshold=0.5, patience=3)
    # 0.9 * 0.7 + 0.1 * 0 = 0.63 stays above the threshold.
    assert [c.base for c in run(Controller.start(options), [0.7, 0.0, 0.7])] == [4, 4, 3]


def test_a_cycle_without_samples_changes_nothing():
    controller = run(Controller.start(ControllerOptions(warmup=1)), [0.5, 0.6])[-1]
    assert controller.update(0, 0) is controller


@pytest.mark.parametrize(("successes", "samples"), [(2, 1), (-1, 3), (0, -1)])
def test_controller_refuses_impossible_counts(successes, samples):
    with pytest.raises(PastError, match="impossible"):
        Controller.start(ControllerOptions()).update(successes, samples)


@pytest.mark.parametrize(
    "bad",
    [
        {"maximum": 0},
        {"warmup": -1},
        {"decay": 1.0},
        {"decay": -0.1},
        {"threshold": 1.01},
        {"threshold": float("nan")},
        {"patience": 0},
    ],
)
def test_controller_options_are_checked(bad):
    with pytest.raises(PastError, match=next(iter(bad))):
        ControllerOptions(**bad)


@pytest.mark.parametrize(
    "change",
    [{"base": 9}, {"base": 0}, {"ema": 1.5}, {"streak": -1}, {"base": "8"}, {"ema": "0.5"}, {"extra": 1}],
)
def test_a_damaged_or_foreign_state_is_refused(change):
    options = ControllerOptions(maximum=8)
    state = Controller.start(options).to_dict() | change
    with pytest.raises(PastError, match="controller"):
        Controller.from_dict(options, state)


def test_a_state_without_a_key_is_refused():
    with pytest.raises(PastError, match="another version"):
        Controller.from_dict(ControllerOptions(), {"base": 8})


@property_test
@given(st.floats(0, 0.99), st.integers(1, 99))
def test_a_constant_rate_holds_a_threshold_equal_to_it(decay, successes):
    options = ControllerOptions(maximum=4, warmup=0, decay=decay, threshold=successes / 100, patience=5)
    assert run(Controller.start(options), [successes / 100] * 5)[-1].base == 3


@st.composite
def histories(draw):
    options = ControllerOptions(
        maximum=draw(st.integers(1, 9)),
        warmup=draw(st.integers(0, 5)),
        decay=draw(st.floats(0, 0.99)),
        threshold=draw(st.floats(0, 1)),
        patience=draw(st.integers(1, 4)),
    )
    counts = st.integers(0, 20).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
    return options, draw(st.lists(counts, max_size=40)), draw(st.integers(0, 40))


@property_test
@given(histories())
def test_controller_invariants_and_resume(case):
    options, counts, stop = case
    controller = resumed = Controller.start(options)
    since = 0
    for cycle, (successes, samples) in enumerate(counts):
        if cycle == stop:
            resumed = Controller.from_dict(options, json.loads(json.dumps(resumed.to_dict())))
        after = controller.update(successes, samples)
        resumed = resumed.update(successes, samples)
        assert resumed == after
        assert controller.base - 1 <= after.base <= controller.base
        assert after.base >= 1
        assert after.updates == controller.updates + (samples > 0)
        since += samples > 0
        if after.base < controller.base:
            assert after.updates > options.warmup
            assert since >= options.patience
            since = 0
        controller = after
    drawing = [c for c in counts if c[1]]
    without_idle = Controller.start(options)
    for successes, samples in drawing:
        without_idle = without_idle.update(successes, samples)
    assert without_idle == controller


def test_sampling_needs_no_tensor_library():
    code = "import sys, past_opsd.core.sampler; print(*{'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
