"""`past shift RUN`: how much of the teacher's change can reach a student that sees only the prefix.

At prefixes H of fresh student responses the frozen student finishes the response M times; each finished response is
one privilege U_m ~ P(U | H), under which the run's own teacher gives a next-token distribution q_m. From these:

    mean KL(q_m || p) = I(A;U|H) + KL(qbar || p)                    [eq:privilege-shift-decomposition]
    surviving fraction = mean KL(qbar || p) / mean KL(q_U || p)           [eq:surviving-shift-fraction]
    g(q_m) = sum_a (q_m(a) - p(a)) Q(H, a)                            [eq:frozen-student-value-shift]

`shift_estimates` has the arithmetic, this module draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from past_opsd.analysis import shift_estimates
from past_opsd.analysis.shift_estimates import Coupling, Estimate, Split, couple, estimate, split
from past_opsd.core import life
from past_opsd.core.nouns import Attempt, PastError, Problem, Response, Tokens, View, derive_seed
from past_opsd.rollout.engines import Request
from past_opsd.run import boundary
from past_opsd.run.boundary import Boundary

FORMAT = 1
MEMORY = 256 << 20  # bytes for next-token distributions at a time


@dataclass(frozen=True)
class Prefix:
    """H: a problem with the first tokens of a response the student sampled; `length` is the whole response's."""

    problem: Problem
    prompt: Tokens
    tokens: Tokens
    logprobs: tuple[float, ...]
    length: int


@dataclass(frozen=True)
class Start:
    """A response to finish: what is written so far, and the seed of the rest."""

    prefix: Prefix
    written: Tokens
    logprobs: tuple[float, ...]
    seed: int


def prefixes(attempts: Sequence[Attempt], seed: int) -> list[Prefix]:
    """One prefix of each response: t uniform over 1..T as in the student's objective, strata spread over responses.

    y_t is always a token of the response, so no prefix goes beyond its end.
    """
    rng = np.random.default_rng(seed)
    places = (rng.permutation(len(attempts)) + rng.random(len(attempts))) / max(1, len(attempts))
    found: list[Prefix] = []
    for attempt, place in zip(attempts, places, strict=True):
        y = attempt.response
        t = min(int(place * len(y.tokens)), len(y.tokens) - 1)
        found.append(Prefix(attempt.problem, attempt.view.prompt, y.tokens[:t], y.logprobs[:t], len(y.tokens)))
    return found


def finish(at: Boundary, starts: Sequence[Start]) -> list[Attempt]:
    """The frozen student completes each response within the rollout's own limit; verified as whole responses."""
    loop = at.session.loop
    stops, limit = at.session.model.stops, loop.rollout.student.max_new_tokens
    rest: list[Response] = [Response((), "", (), bool(s.written) and s.written[-1] in stops) for s in starts]
    rooms = {i: limit - len(s.written) for i, s in enumerate(starts) if not rest[i].finished}
    members = [i for i, room in rooms.items() if room > 0]
    if members:
        # One batch for all: a seed decides the tokens one by one, so what goes beyond a response's room is cut off.
        sampling = loop.rollout.student.model_copy(update={"max_new_tokens": max(rooms[i] for i in members)})
        views = [View("student", starts[i].prefix.prompt + starts[i].written) for i in members]
        requests = [Request(v, starts[i].seed) for v, i in zip(views, members, strict=True)]
        for i, r in zip(members, loop.lab.engine.sample(requests, sampling, loop.learner.versions), strict=True):
            whole = r.finished and len(r.tokens) <= rooms[i]
            rest[i] = Response(r.tokens[: rooms[i]], "", r.logprobs[: rooms[i]], whole)
    return _verified(at, starts, rest)


def _verified(at: Boundary, starts: Sequence[Start], rest: Sequence[Response]) -> list[Attempt]:
    ids = [s.written + r.tokens for s, r in zip(starts, rest, strict=True)]
    texts = at.session.model.tokenizer.batch_decode([list(i) for i in ids], skip_special_tokens=True)
    whole = [
        Response(tokens, text, s.logprobs + r.logprobs, r.finished)
        for s, r, tokens, text in zip(starts, rest, ids, texts, strict=True)
    ]
    problems = [s.prefix.problem for s in starts]
    verdicts = at.session.loop.lab.verifier.verify(list(zip(problems, whole, strict=True)))
    views = [View("student", s.prefix.prompt) for s in starts]
    return [Attempt(p, v, y, r) for p, v, y, r in zip(problems, views, whole, verdicts, strict=True)]


@dataclass(frozen=True)
class Seen:
    """A prefix after its completions: the numbers that need the distributions, which are not kept, and the actions."""

    prefix: Prefix
    split: Split
    failed: list[bool]
    couplings: list[Coupling]
    seeds: list[int]


def look(at: Boundary, found: Sequence[Prefix], completions: int, rollouts: int) -> list[Seen]:
    """Complete each prefix and read the teachers there; one whose teacher prompts do not fit is left out."""
    tags = [(at.seed, "shift", at.step, h.problem.id, i) for i, h in enumerate(found)]
    starts = [
        Start(h, h.tokens, h.logprobs, derive_seed(*tag, "completion", m))
        for h, tag in zip(found, tags, strict=True)
        for m in range(completions)
    ]
    life.doing("finishing responses")
    attempts = finish(at, starts)
    life.doing("reading the teacher and the student where they stand")
    seen: list[Seen] = []
    for i, q, p in _distributions(at, found, attempts, completions):
        h, tag = found[i], tags[i]
        own = attempts[i * completions : (i + 1) * completions]
        actions = [np.random.default_rng(derive_seed(*tag, "action", j)) for j in range(rollouts)]
        couplings = [couple(q[j % completions], p, rng) for j, rng in enumerate(actions)]
        seeds = [derive_seed(*tag, "rollout", j) for j in range(rollouts)]
        correct = np.array([a.verdict.correct for a in own])
        seen.append(Seen(h, split(q, p, correct), (~correct).tolist(), couplings, seeds))
    return seen


def _distributions(
    at: Boundary, found: Sequence[Prefix], attempts: Sequence[Attempt], completions: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Of each prefix whose teacher prompts fit: its number, the teachers' next-token distributions, the student's."""
    loop = at.session.loop
    views = [loop.method.teacher_view(a) for a in attempts]
    own = [views[i * completions : (i + 1) * completions] for i in range(len(found))]
    fits = [
        max(len(v.prompt) for v in vs) + len(h.tokens) <= loop.max_context for h, vs in zip(found, own, strict=True)
    ]
    kept = [i for i, fit in enumerate(fits) if fit]
    size = max(1, MEMORY // (8 * len(at.session.model.head) * (completions + 1)))
    for group in (kept[k : k + size] for k in range(0, len(kept), size)):
        q = boundary.next_token(at, [View(v.adapter, v.prompt + found[i].tokens) for i in group for v in own[i]])
        p = boundary.next_token(at, [View("student", found[i].prompt + found[i].tokens) for i in group])
        for n, i in enumerate(group):
            yield i, q[n * completions : (n + 1) * completions], p[n]


def roll_out(at: Boundary, seen: Sequence[Seen]) -> list[Estimate]:
    """After an action that the teacher takes more often and one that it takes less often, the student goes on."""
    starts = [
        Start(s.prefix, (*s.prefix.tokens, action), (), seed)
        for s in seen
        for coupling, seed in zip(s.couplings, s.seeds, strict=True)
        for action in coupling.actions
    ]
    life.doing("trying actions")
    outcomes = iter([float(a.verdict.correct) for a in finish(at, starts)])
    found: list[Estimate] = []
    for s in seen:
        gains = [c.distance * (next(outcomes) - next(outcomes)) for c in s.couplings]
        failed = [s.failed[j % len(s.failed)] for j in range(len(gains))]
        h = s.prefix
        found.append(estimate(s.split, gains, failed, h.problem.id, len(h.tokens), h.length))
    return found


def shift(at: Boundary, count: int, completions: int, rollouts: int) -> dict[str, Any]:
    """Everything about one boundary, as plain data for RUN/probes/shift-*.json."""
    loop = at.session.loop
    per_problem = -(-count // len(loop.problems))
    problems = boundary.pick(loop.problems, min(count, len(loop.problems)), at.seed, "shift", "problems")
    attempts = boundary.responses(at, problems, per_problem, "shift")[:count]
    found = prefixes(attempts, derive_seed(at.seed, "shift", at.step, "prefixes"))
    seen = look(at, found, completions, rollouts)
    names = {s.prefix.problem.id for s in seen}
    if len(names) < 2:
        raise PastError("fewer than two problems fit the context; raise --prefixes or model.max_context")
    estimates = roll_out(at, seen)
    summary = shift_estimates.summarise(estimates, at.seed)
    return {
        "kind": "shift",
        "format": FORMAT,
        **at.description(),
        "settings": {
            "prefixes": count,
            "completions": completions,
            "rollouts": rollouts,
            "teacher_adapter": at.teacher,
            "own_condition": boundary.own_condition(at.session),
            "student": loop.rollout.student.model_dump(),
            "level": shift_estimates.LEVEL,
            "resamples": shift_estimates.RESAMPLES,
        },
        "counts": {
            "prefixes": len(seen),
            "problems": len(names),
            "dropped": count - len(seen),
            "completions": completions * len(seen),
            "failed_completions": sum(sum(s.failed) for s in seen),
            "rollouts": 2 * rollouts * len(seen),
        },
        "estimates": summary,
        "prefixes": [asdict(e) for e in estimates],
        "verdict": shift_estimates.verdict(summary),
        "bias": shift_estimates.bias_note(summary, completions),
        "notes": at.notes,
    }


def shift_run(
    folder: Path, step: int | None, *, prefixes: int, completions: int, rollouts: int, trust: bool = False
) -> dict[str, Any]:
    """A run at one of its checkpoints, by default the newest whole one; the result is kept in its folder."""
    for name, given, least in (("prefixes", prefixes, 2), ("completions", completions, 2), ("rollouts", rollouts, 1)):
        if given < least:
            raise PastError(f"{name} is {given}; it must be at least {least}")
    chosen, notes = boundary.choose(folder, step)
    with boundary.opened(folder, chosen, trust) as at:
        at.notes += notes
        result = shift(at, prefixes, completions, rollouts)
    at.run.write_shift(chosen, result)
    return result
