"""`past simulate`: a recipe's cycle as events on GPUs that are not here, phased and with `rollout.stream`.

A GPU decodes its rows step by step; a step takes what `policy/estimate.py` says of so many rows, and at least the
launches of its kernels. Responses have drawn lengths, verdicts take drawn times, outcomes are drawn; the groups are
made by the real sampler. Both sides get the same draws. Steps of the learner and reading prompts are arithmetic too.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import Attempt, PastError, Problem, Response, Verdict, View, derive_seed
from past_opsd.core.sampler import adaptive, best_ahead, expected_samples
from past_opsd.methods.past import DRAW
from past_opsd.policy import estimate
from past_opsd.policy.estimate import BYTES, PROBLEM, Load, Shape

BLOCK, AROUND = 64, 32
"""Kernels of the torch engine's step: in each block, and around them; 1,824 for Qwen3-1.7B, as `past trace` counts."""


@dataclass(frozen=True)
class Pace:
    """What a GPU takes for a step of decoding and for reading a prompt."""

    step: Callable[[int, float], float]
    """Seconds for so many rows that have so many tokens together."""
    prompt: Callable[[int], float]
    """Seconds for a prompt of so many tokens."""


def pace(shape: Shape, gpu: str, launched: bool) -> Pace:
    """By the arithmetic that `past trace` uses; servers replay their kernels, which are not `launched` one by one."""
    body, head = shape.body, shape.hidden * shape.vocab
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES["bfloat16"]
    least = (shape.layers * BLOCK + AROUND) * estimate.LAUNCH if launched else 0.0
    speeds = {1: estimate.assumed(gpu, 1)}

    def step(rows: int, tokens: float) -> float:
        speed = speeds.setdefault(rows, estimate.assumed(gpu, rows))
        return max(rows * (body + head) / speed.narrow + tokens * cached / speed.reading, least)

    def prompt(length: int) -> float:
        return (length * body + shape.layers * shape.heads * shape.head_dim * length**2) / speeds[1].wide

    return Pace(step, prompt)


@dataclass(frozen=True)
class Draws:
    """What is drawn of a cycle: for each response its tokens, whether it is right, how long its verdict takes; and the
    same of each response's continuations, of which a group needs twice G_max at most."""

    responses: tuple[tuple[int, bool, float], ...]
    continuations: tuple[tuple[tuple[int, bool, float], ...], ...]


@dataclass(frozen=True)
class Setting:
    """Where and how cycles run."""

    pace: Pace
    gpus: int
    base: int
    maximum: int
    success: float
    student_prompt: int
    teacher_prompt: int
    judges: int = 1
    seats: int = 64
    servers: bool = False
    """The GPUs serve both adapters together; else each decodes one adapter at a time, its share of the responses."""


@dataclass
class Gpu:
    """Rows that are decoded together, and the time at which they are so far."""

    pace: Pace
    seats: int
    now: float = 0.0
    rows: dict[int, list[float]] = field(default_factory=dict[int, list[float]])  # tokens to go, tokens there
    waiting: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    def add(self, job: int, prompt: int, length: int, at: float) -> None:
        """A response of so many tokens after such a prompt, asked at a time that is not before `now` of busy rows."""
        if not self.rows and not self.waiting:
            self.now = max(self.now, at)
        self.waiting.append((job, prompt, length))
        self._enter()

    def _enter(self) -> None:
        while self.waiting and len(self.rows) < self.seats:
            job, prompt, length = self.waiting.pop(0)
            self.now += self.pace.prompt(prompt)
            self.rows[job] = [float(length), float(prompt)]

    @property
    def busy(self) -> bool:
        return bool(self.rows)

    def _step(self) -> float:
        return self.pace.step(len(self.rows), sum(there for _, there in self.rows.values()))

    @property
    def next(self) -> float:
        """When the next row ends, if none comes before."""
        return self.now + min(left for left, _ in self.rows.values()) * self._step()

    def run(self, until: float) -> list[int]:
        """Decode up to that time, or to the next end; who has ended."""
        until = min(until, self.next)
        steps = max(0.0, until - self.now) / self._step()
        self.now = max(self.now, until)
        for row in self.rows.values():
            row[0], row[1] = row[0] - steps, row[1] + steps
        ended = [job for job, (left, _) in self.rows.items() if left < 1e-6]
        for job in ended:
            del self.rows[job]
        self._enter()
        return ended


class Judges:
    """Processes that verify, each one response at a time, in the order of asking."""

    def __init__(self, count: int):
        self._free = [0.0] * count

    def verdict(self, at: float, seconds: float) -> float:
        """When the verdict is there."""
        begin = max(at, heapq.heappop(self._free))
        heapq.heappush(self._free, begin + seconds)
        return begin + seconds


def attempt(correct: bool) -> Attempt:
    """What the sampler looks at."""
    return Attempt(Problem("", "", "", ""), View("teacher", ()), Response((), "", (), True), Verdict(correct, ""))


class _MissingError(Exception):
    def __init__(self, count: int):
        super().__init__()
        self.count = count


def wanted(outcomes: Sequence[bool], base: int, maximum: int, ahead: int) -> int:
    """How many more continuations the sampler asks for of a response with these; 0 when its group is complete."""

    def draw(requests: Sequence[tuple[int, int]]) -> list[Attempt]:
        indices = [index for _, index in requests]
        if indices[-1] >= len(outcomes):
            raise _MissingError(indices[-1] + 1 - len(outcomes))
        return [attempt(outcomes[index]) for index in indices]

    try:
        adaptive([attempt(False)], base, maximum, draw, ahead)
    except _MissingError as missing:
        return missing.count
    return 0


def _together(s: Setting, jobs: Sequence[tuple[int, int, float]], at: float) -> float:
    """Prompts, lengths and seconds of a verdict: when all are decoded, and then verified."""
    shares = [jobs[n :: s.gpus] for n in range(s.gpus)]
    ends: list[float] = []
    for own in shares:
        gpu = Gpu(s.pace, s.seats, at)
        for job, (prompt, length, _) in enumerate(own):
            gpu.add(job, prompt, length, at)
        while gpu.busy:
            gpu.run(math.inf)
        ends.append(gpu.now)
    if s.servers:  # one process has all of them verified
        shares, ends = [jobs], [max(ends)]
    verified = at
    for own, end in zip(shares, ends, strict=True):
        judges = Judges(s.judges)
        verified = max([verified, end, *(judges.verdict(end, seconds) for _, _, seconds in own)])
    return verified


def phased(s: Setting, draws: Draws) -> float:
    """Seconds until the last group is complete: everybody waits for everybody after each round."""
    now = _together(s, [(s.student_prompt, length, seconds) for length, _, seconds in draws.responses], 0.0)
    failed = [i for i, (_, correct, _) in enumerate(draws.responses) if not correct]
    ahead = best_ahead(len(failed), s.success, s.base, s.maximum, DRAW)

    def draw(requests: Sequence[tuple[int, int]]) -> list[Attempt]:
        nonlocal now
        found = [draws.continuations[failed[i]][index] for i, index in requests]
        now = _together(s, [(s.teacher_prompt, length, seconds) for length, _, seconds in found], now)
        return [attempt(correct) for _, correct, _ in found]

    adaptive([attempt(False) for _ in failed], s.base, s.maximum, draw, ahead)
    return now


def streaming(s: Setting, draws: Draws) -> float:
    """The same with what `run/stream.py` does."""
    if s.servers:
        return _mixed(s, draws)
    return max(_apart(s, draws, range(n, len(draws.responses), s.gpus)) for n in range(s.gpus))


def _apart(s: Setting, draws: Draws, own: Sequence[int]) -> float:
    """One GPU and its share: responses, then all that follows; what follows enters when half before it has ended."""
    gpu, judges = Gpu(s.pace, s.seats), Judges(s.judges)
    ahead, verified = best_ahead(1, s.success, s.base, s.maximum, DRAW), 0.0
    for i in own:
        gpu.add(i, s.student_prompt, draws.responses[i][0], 0.0)
    while gpu.busy:
        for i in gpu.run(math.inf):
            verified = max(verified, judges.verdict(gpu.now, draws.responses[i][2]))
    seen: dict[int, list[bool]] = {i: [] for i in own if not draws.responses[i][1]}
    left = {i: wanted([], s.base, s.maximum, ahead) for i in seen}
    enter = [(i, n) for i, count in left.items() for n in range(count)]
    gpu.now = max(gpu.now, verified)
    keys: dict[int, tuple[int, int]] = {}
    while True:
        for key in enter:
            keys[len(keys)] = key
            gpu.add(len(keys) - 1, s.teacher_prompt, draws.continuations[key[0]][key[1]][0], gpu.now)
        few = (len(gpu.rows) + len(gpu.waiting)) // 2
        enter, ended, verified = list[tuple[int, int]](), list[tuple[int, int]](), gpu.now
        while gpu.busy and not enter:
            for key in (keys[job] for job in gpu.run(math.inf)):
                verified = max(verified, judges.verdict(gpu.now, draws.continuations[key[0]][key[1]][2]))
                ended.append(key)
            if len(gpu.rows) + len(gpu.waiting) <= few:
                gpu.now = max(gpu.now, verified)
                for i, _ in ended:
                    left[i] -= 1
                for i in sorted({i for i, _ in ended if not left[i]}):
                    have = sum(1 for other, _ in keys.values() if other == i)
                    seen[i] = [correct for _, correct, _ in draws.continuations[i][:have]]
                    left[i] = wanted(seen[i], s.base, s.maximum, ahead)
                    enter += [(i, n) for n in range(have, have + left[i])]
                ended = []
        if not enter:
            return gpu.now


def _mixed(s: Setting, draws: Draws) -> float:
    """All GPUs and all requests: a failed response's continuations enter with its verdict."""
    gpus, judges = [Gpu(s.pace, s.seats) for _ in range(s.gpus)], Judges(s.judges)
    ahead = best_ahead(1, s.success, s.base, s.maximum, DRAW)
    keys: list[tuple[int, int]] = []  # response, and its continuation or -1
    have, left = dict[int, int](), dict[int, int]()
    verdicts: list[tuple[float, int]] = []
    last = 0.0

    def add(key: tuple[int, int], at: float) -> None:
        gpu = min(gpus, key=lambda gpu: len(gpu.rows) + len(gpu.waiting))
        first = key[1] < 0
        length = draws.responses[key[0]][0] if first else draws.continuations[key[0]][key[1]][0]
        gpu.add(len(keys), s.student_prompt if first else s.teacher_prompt, length, at)
        keys.append(key)

    for i in range(len(draws.responses)):
        add((i, -1), 0.0)
    while True:
        busy = [gpu for gpu in gpus if gpu.busy]
        at = min([gpu.next for gpu in busy] + [at for at, _ in verdicts[:1]], default=math.inf)
        if at == math.inf:
            return last
        for gpu in busy:
            for job in gpu.run(at):
                i, n = keys[job]
                seconds = (draws.responses[i] if n < 0 else draws.continuations[i][n])[2]
                heapq.heappush(verdicts, (judges.verdict(gpu.now, seconds), job))
        if not verdicts or verdicts[0][0] > at:
            continue
        last, job = heapq.heappop(verdicts)
        i, _ = keys[job]
        left[i] = left.get(i, 1) - 1
        if draws.responses[i][1] or left[i]:
            continue
        seen = [correct for _, correct, _ in draws.continuations[i][: have.get(i, 0)]]
        left[i] = wanted(seen, s.base, s.maximum, ahead)
        for index in range(len(seen), len(seen) + left[i]):
            add((i, index), last)
        have[i] = len(seen) + left[i]


@dataclass(frozen=True)
class Chances:
    """From what draws come."""

    solved: float
    success: float
    lengths: Callable[[random.Random, int], int]
    """Tokens of a response with such a limit."""
    verdict: float
    """Mean seconds of a verdict, exponential."""
    source: str
    """Where lengths come from, in words."""


def assumed(solved: float, success: float, mean: float, spread: float, verdict: float) -> Chances:
    """Shares that are right, and lengths around a share of the limit."""
    source = f"lengths {mean:g} of the limit on average, spread {spread:g}"
    return Chances(solved, success, lognormal(mean, spread), verdict, source)


def lognormal(mean: float, spread: float) -> Callable[[random.Random, int], int]:
    """Lengths around a share of the limit, which cuts them; `spread` is the standard deviation of the logarithm."""

    def length(rng: random.Random, limit: int) -> int:
        return max(1, min(limit, round(mean * limit * math.exp(rng.gauss(-(spread**2) / 2, spread)))))

    return length


def draw(recipe: Recipe, chances: Chances, maximum: int, seed: int, k: int) -> Draws:
    """The draws of cycle k, the same wherever they run."""
    rollout = recipe.rollout
    rng = random.Random(derive_seed(seed, "simulate", k))

    def one(limit: int, right: float) -> tuple[int, bool, float]:
        seconds = rng.expovariate(1 / chances.verdict) if chances.verdict else 0.0
        return chances.lengths(rng, limit), rng.random() < right, seconds

    count = rollout.problems_per_cycle * rollout.samples_per_problem
    responses = tuple(one(rollout.student.max_new_tokens, chances.solved) for _ in range(count))
    teacher = rollout.teacher.max_new_tokens
    groups = tuple(tuple(one(teacher, chances.success) for _ in range(2 * maximum)) for _ in responses)
    return Draws(responses, groups)


def recorded(folder: Path, verdict: float) -> Chances:
    """What a run's records show; a length is one of those, at random."""
    from past_opsd.run import attempts
    from past_opsd.run.folder import RunFolder

    run = RunFolder(folder)
    lengths, rates = list[int](), list[float]()
    for series in (run.rollouts, run.continuations):
        tables = [attempts.read_table(series.path(number)).to_pydict() for number in series.numbers()]
        right = [correct for table in tables for correct in table["correct"]]
        if not right:
            raise PastError(f"{folder} has no records of both responses and continuations; give --mean and --spread")
        lengths += [length for table in tables for length in table["length"]]
        rates.append(statistics.fmean(right))

    def length(rng: random.Random, limit: int) -> int:
        return min(limit, rng.choice(lengths))

    return Chances(rates[0], rates[1], length, verdict, f"lengths and outcomes as in {folder}")


@dataclass(frozen=True)
class Line:
    """A row of the table: mean seconds of a cycle, and of the learner's steps in it."""

    gpus: int
    servers: bool
    phased: float
    streaming: float
    steps: float


def compare(
    recipe: Recipe, shape: Shape, gpu: str, counts: Sequence[int], chances: Chances, base: int, cycles: int, seed: int
) -> list[Line]:
    """Cycles on so many GPUs: each a process that decodes and trains, or one that trains and the others serve."""
    maximum = config.ask_method(recipe).continuations
    load = estimate.expected_load(recipe)
    every = [draw(recipe, chances, maximum, seed, k) for k in range(cycles)]
    failed = [i for d in every for i, (_, correct, _) in enumerate(d.responses) if not correct]
    mean = [statistics.fmean(length for d in every for length, _, _ in d.responses)]
    mean.append(statistics.fmean(length for d in every for group in d.continuations for length, _, _ in group))
    drawn = expected_samples(chances.success, base, maximum) * len(failed) / cycles
    real = Load(load.student_samples, round(drawn), round(mean[0]), round(mean[1]), PROBLEM, load.teacher_prompt)
    found: list[Line] = []
    for count in counts:
        for servers in (False, True) if count > 1 else (False,):
            setting = Setting(
                pace(shape, gpu, launched=not servers),
                count - servers,
                base,
                maximum,
                chances.success,
                PROBLEM,
                load.teacher_prompt,
                judges=int(recipe.verifier.model_dump().get("workers", 1)) or 1,
                servers=servers,
            )
            learning = estimate.seconds(shape, real, estimate.assumed(gpu, 1), True, 1 if servers else count)
            steps = learning["adapt"] + learning["distill"]
            both = [statistics.fmean(side(setting, d) for d in every) + steps for side in (phased, streaming)]
            found.append(Line(count, servers, both[0], both[1], steps))
    return found


def table(lines: Sequence[Line]) -> str:
    """As text."""
    out = [f"{'GPUs':>4}  {'engine':34s}{'phased s':>10}{'streaming s':>13}{'ratio':>7}{'steps s':>9}"]
    for line in lines:
        kind = f"1 trains, {line.gpus - 1} serve both adapters" if line.servers else "torch, one adapter at a time"
        ratio = line.phased / line.streaming
        out.append(f"{line.gpus:4d}  {kind:34s}{line.phased:10.1f}{line.streaming:13.1f}{ratio:7.2f}{line.steps:9.1f}")
    return "\n".join(out)


def run(recipe: Recipe, gpu: str, counts: Sequence[int], chances: Chances, base: int, cycles: int, seed: int) -> str:
    """The table, with what it rests on."""
    path = recipe.model.path
    shape = estimate.KNOWN.get(path)
    if shape is None:
        from past_opsd.policy.weightless import configuration

        shape = estimate.shape_of(configuration(recipe.model, path), path)
    lines = compare(recipe, shape, gpu, counts, chances, base, cycles, seed)
    rollout = recipe.rollout
    responses = rollout.problems_per_cycle * rollout.samples_per_problem
    most = rollout.student.max_new_tokens
    return "\n".join(
        [
            f"{recipe.name} on {gpu}: {cycles} cycles of {responses} responses of up to {most:,} tokens",
            f"right: {chances.solved:.2f} of them, {chances.success:.2f} of continuations; G_base {base}",
            f"{chances.source}; a verdict {chances.verdict:g} s",
            "",
            table(lines),
            "",
            "Seconds of a cycle, with both steps of the learner. Inferred, not measured:",
            "from data sheets, 10 us a kernel on the torch engine and none on servers,",
            "lengths and outcomes drawn as said, nothing of what processes exchange.",
        ]
    )
