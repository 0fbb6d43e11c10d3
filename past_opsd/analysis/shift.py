"""`past shift RUN`: what the teacher's change is worth to the student, and how much of it can reach one.

**Value.** Fresh student responses Y are read by the student, p, and by the run's own teacher, which has seen Y, q. A
token of Y is drawn in proportion to TV(q, p) there, an action from each side of q - p, and the student goes on:

    dJ/d eps = E_Y sum_t g(q_Y; y_<t) = E_Y sum_t TV_t (success after the one - success after the other)
                                                                        [eq:local-policy-improvement]

Given y_<t the rest of Y is a draw of the privilege U, so nothing else has to be drawn for it.

**Transfer.** At prefixes H of these responses the frozen student finishes the response M times; each finished response
is one privilege U_m ~ P(U | H), under which the teacher gives a next-token distribution q_m. From these:

    mean KL(q_m || p) = I(A;U|H) + KL(qbar || p)                    [eq:privilege-shift-decomposition]
    surviving fraction = mean KL(qbar || p) / mean KL(q_U || p)           [eq:surviving-shift-fraction]

Positions are drawn half evenly and half in proportion to TV, and weighted back. `shift_estimates` has the arithmetic,
this module draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from past_opsd.analysis import shift_estimates
from past_opsd.analysis.shift_estimates import Coupling, Moved, Prefixed, couple, split, systematic
from past_opsd.core import config, life
from past_opsd.core.nouns import Attempt, PastError, Problem, Response, Tokens, View, derive_seed
from past_opsd.policy.packing import Read
from past_opsd.rollout.engines import Request
from past_opsd.run import boundary
from past_opsd.run.boundary import Boundary
from past_opsd.run.folder import RunFolder

FORMAT = 2
MEMORY = 256 << 20  # bytes for next-token distributions at a time


@dataclass(frozen=True)
class Prefix:
    """H: a problem with the first tokens of a response the student sampled; `length` is the whole response's.

    `weight` is how often it would come if every response were as likely, and every token of it, over how often it does.
    """

    problem: Problem
    prompt: Tokens
    tokens: Tokens
    logprobs: tuple[float, ...]
    length: int
    weight: float = 1.0


@dataclass(frozen=True)
class Along:
    """A response with what teacher and student differ by at each of its tokens."""

    attempt: Attempt
    teacher: View
    distances: np.ndarray
    """TV(q, p) before each token."""
    change: float
    """KL(q || p), mean over tokens."""
    reverse: float
    """KL(p || q), mean over tokens."""

    @property
    def reads(self) -> tuple[Read, Read]:
        """As the teacher and as the student reads it."""
        tokens = self.attempt.response.tokens
        return (self.teacher, tokens), (self.attempt.view, tokens)


@dataclass(frozen=True)
class Start:
    """A response to finish: what is written so far, and the seed of the rest."""

    prefix: Prefix
    written: Tokens
    logprobs: tuple[float, ...]
    seed: int


def compare(at: Boundary, attempts: Sequence[Attempt]) -> list[Along]:
    """Read the responses as teacher and student; those whose teacher prompt does not fit are left out."""
    loop = at.session.loop
    seen = [Along(a, loop.method.teacher_view(a), np.empty(0), 0.0, 0.0) for a in attempts]
    seen = [s for s in seen if len(s.teacher.prompt) + len(s.attempt.response.tokens) <= loop.max_context]
    life.doing("reading responses as teacher and student")
    out: list[Along] = list(seen)
    for i, states in boundary.read(at, [s.reads for s in seen]):
        distances, change, reverse = boundary.along(at, [states[r] for r in seen[i].reads], _distances)
        out[i] = replace(seen[i], distances=distances, change=float(change.mean()), reverse=float(reverse.mean()))
    return out


def _distances(logp: list[Tensor]) -> Tensor:
    """TV, KL(q || p) and KL(p || q) at each row."""
    log_q, log_p = (part.double() for part in logp)
    q, p = log_q.exp(), log_p.exp()
    difference = log_q - log_p
    return torch.stack([(q - p).clamp_min(0).sum(-1), (q * difference).sum(-1), -(p * difference).sum(-1)])


def prefixes(found: Sequence[Along], count: int, seed: int) -> list[Prefix]:
    """Positions y_<t, with weights whose mean estimates the mean over responses of the mean over their tokens.

    Half of the chance goes evenly to responses and their tokens, as in the student's objective, half where teacher and
    student differ. y_t is always a token of the response, so no prefix goes beyond its end.
    """
    even = np.concatenate([np.full(len(s.distances), 1 / (len(found) * len(s.distances))) for s in found])
    distance = np.concatenate([s.distances for s in found])
    total = distance.sum()
    chance = (even + distance / total) / 2 if total > 0 else even
    places = systematic(chance, count, np.random.default_rng(seed))
    weights = (even / chance)[places].tolist()
    return [_prefix(found[i], t, weight) for (i, t), weight in zip(_located(found, places), weights, strict=True)]


def _prefix(found: Along, t: int, weight: float = 1.0) -> Prefix:
    y, problem, prompt = found.attempt.response, found.attempt.problem, found.attempt.view.prompt
    return Prefix(problem, prompt, y.tokens[:t], y.logprobs[:t], len(y.tokens), weight)


def _located(found: Sequence[Along], places: Sequence[int]) -> list[tuple[int, int]]:
    """Which response, and which token of it, stands at each place when all are laid one after the other."""
    first = np.concatenate([[0], np.cumsum([len(s.distances) for s in found])])
    owners = np.searchsorted(first, places, side="right") - 1
    return [(int(i), int(place - first[i])) for i, place in zip(owners, places, strict=True)]


def value(at: Boundary, found: Sequence[Along], pairs: int) -> list[Moved]:
    """Pairs of rollouts after actions of q and of p, at tokens drawn in proportion to TV(q, p).

    [eq:value-survives-projection]: their mean is that of the mean teacher, so no rollout from qbar itself is needed.
    """
    tag = (at.seed, "shift", at.step)
    distance = np.concatenate([s.distances for s in found])
    total = float(distance.sum())
    places = systematic(distance / total, pairs, np.random.default_rng(derive_seed(*tag, "pairs"))) if total else []
    drawn: list[list[int]] = [[] for _ in found]  # of each response, the tokens at which it is left
    for i, t in _located(found, places):
        drawn[i].append(t)
    couplings = _couplings(at, found, drawn)
    starts: list[Start] = []
    for i, (s, places_, own) in enumerate(zip(found, drawn, couplings, strict=True)):
        for j, (t, coupling) in enumerate(zip(places_, own, strict=True)):
            h, seed = _prefix(s, t), derive_seed(*tag, s.attempt.problem.id, i, "pair", j)
            starts += [Start(h, (*h.tokens, action), (), seed) for action in coupling.actions]
    life.doing("trying actions")
    outcomes = iter([float(a.verdict.correct) for a in finish(at, starts)])
    return [
        Moved(
            problem=s.attempt.problem.id,
            length=len(s.distances),
            correct=s.attempt.verdict.correct,
            distance=float(s.distances.sum()),
            change=s.change,
            reverse=s.reverse,
            pairs=len(own),
            gain=total / max(1, pairs) * sum(next(outcomes) - next(outcomes) for _ in own),
        )
        for s, own in zip(found, couplings, strict=True)
    ]


def _couplings(at: Boundary, found: Sequence[Along], drawn: Sequence[Sequence[int]]) -> list[list[Coupling]]:
    """At each drawn token an action of either side; distributions are read again rather than kept."""
    chosen = [i for i, places in enumerate(drawn) if places]
    out: list[list[Coupling]] = [[] for _ in found]
    model = at.session.model
    for n, states in boundary.read(at, [found[i].reads for i in chosen]):
        i = chosen[n]
        problem = found[i].attempt.problem.id
        rng = np.random.default_rng(derive_seed(at.seed, "shift", at.step, problem, i, "actions"))
        for t in drawn[i]:
            q, p = (model.log_probs(states[r][t : t + 1])[0].double().exp().cpu().numpy() for r in found[i].reads)
            out[i].append(couple(q, p, rng))
    return out


def finish(at: Boundary, starts: Sequence[Start]) -> list[Attempt]:
    """The frozen student completes each response within the rollout's own limit; verified as whole responses."""
    if not starts:
        return []
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


def look(at: Boundary, found: Sequence[Prefix], completions: int) -> list[Prefixed]:
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
    seen: list[Prefixed] = []
    for i, q, p in _distributions(at, found, attempts, completions):
        h, own = found[i], attempts[i * completions : (i + 1) * completions]
        correct = np.array([a.verdict.correct for a in own])
        parts = asdict(split(q, p, correct))
        seen.append(Prefixed(**parts, problem=h.problem.id, position=len(h.tokens), length=h.length, weight=h.weight))
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


def shift(at: Boundary, responses: int, pairs: int, prefixes_: int, completions: int) -> dict[str, Any]:
    """Everything about one boundary, as plain data for RUN/probes/shift-*.json."""
    loop = at.session.loop
    per_problem = -(-responses // len(loop.problems))
    problems = boundary.pick(loop.problems, min(responses, len(loop.problems)), at.seed, "shift", "problems")
    life.doing("the student's responses")
    attempts = boundary.responses(at, problems, per_problem, "shift")[:responses]
    found = compare(at, attempts)
    names = {s.attempt.problem.id for s in found}
    if len(names) < 2:
        raise PastError("fewer than two problems fit the context; raise --responses or model.max_context")
    moved = value(at, found, pairs)
    wanted = prefixes(found, prefixes_, derive_seed(at.seed, "shift", at.step, "prefixes")) if prefixes_ else []
    seen = look(at, wanted, completions)
    summary = shift_estimates.summarise(moved, seen, at.seed)
    return {
        "kind": "shift",
        "format": FORMAT,
        **at.description(),
        "settings": {
            "responses": responses,
            "pairs": pairs,
            "prefixes": prefixes_,
            "completions": completions,
            "teacher_adapter": at.teacher,
            "own_condition": boundary.own_condition(at.session),
            "student": loop.rollout.student.model_dump(),
            "level": shift_estimates.LEVEL,
            "resamples": shift_estimates.RESAMPLES,
        },
        "counts": {
            "problems": len(names),
            "responses": len(found),
            "dropped": responses - len(found),
            "prefixes": len(seen),
            "dropped_prefixes": prefixes_ - len(seen),
            "completions": completions * len(seen),
            "rollouts": 2 * sum(m.pairs for m in moved),
        },
        "estimates": summary,
        "responses": [asdict(m) for m in moved],
        "prefixes": [asdict(s) for s in seen],
        "verdict": shift_estimates.verdict(summary),
        "bias": shift_estimates.bias_note(summary, completions),
        "notes": at.notes,
    }


def shift_of(
    target: Path | str,
    step: int | None,
    *,
    responses: int,
    pairs: int,
    prefixes: int,
    completions: int,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> dict[str, Any]:
    """A run at one of its checkpoints, by default the newest whole one, or a recipe before its first cycle.

    What is measured of a run is kept in its folder.
    """
    least = {
        "responses": (responses, 2),
        "pairs": (pairs, 1),
        "prefixes": (prefixes, 0),
        "completions": (completions, 2),
    }
    for name, (given, bound) in least.items():
        if given < bound:
            raise PastError(f"{name} is {given}; it must be at least {bound}")
    counts = (responses, pairs, prefixes, completions)
    if config.is_recipe(target):
        with boundary.untrained(config.load(target, overrides)) as at:
            return shift(at, *counts)
    if overrides:
        raise PastError("--set changes a recipe; a run is looked at as it was trained")
    folder = Path(target)
    chosen, notes = boundary.choose(folder, step)
    with boundary.opened(folder, chosen, trust) as at:
        at.notes += notes
        result = shift(at, *counts)
    RunFolder(folder).write_shift(chosen, result)
    return result
