"""`past probe RUN`: does the teacher use the trajectory it reads? cf. fig:teacher-mechanism, panel a.

The run's teacher at a checkpoint reads three prompts for every fresh student response Y:

    matching   (X, Y, Z), its own response
    removed    (X, Z), the attempt's block cut out
    shuffled   (X, Y', Z), a response Y' to another problem

Every condition sees the same responses and draws from the same seeds, so conditions pair by problem. Where a response
first leaves the reference solution, the probability of the reference's token and of the response's own are read, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from past_opsd.analysis.probe_tables import CONDITIONS, DIFFERENCES, METRICS, SHARES, STUDENT
from past_opsd.core import life, stats
from past_opsd.core.losses import GeneralizedJSD, Stay
from past_opsd.core.nouns import Adapter, Attempt, PastError, Problem, Tokens, View, derive_seed
from past_opsd.core.prompts import Prompts
from past_opsd.policy.packing import Read
from past_opsd.rollout.lab import Work
from past_opsd.run import boundary
from past_opsd.run.boundary import Boundary
from past_opsd.run.folder import RunFolder

FORMAT = 1
_JSD, _KL = GeneralizedJSD(0.5), Stay()


@dataclass(frozen=True)
class Measured:
    """What was measured of every response: condition -> metric -> [responses], nan where there is nothing.

    Conditions are the teacher's three, and "student" for what the student itself does at a departure. `styles` has the
    label of every response by condition.
    """

    problems: list[str]
    correct: np.ndarray
    values: Mapping[str, Mapping[str, np.ndarray]]
    styles: Mapping[str, Sequence[str]]


def donors(attempts: Sequence[Attempt], seed: int) -> list[int]:
    """For each response the one of another problem that takes its place, by index.

    Within a verdict class the responses are laid out problem by problem in a seeded order and moved on by the largest
    problem's share: a permutation, so the attempts that are read stay the same ones and keep their share of right
    answers, and only the correspondence breaks. A class that one problem dominates draws from all other problems.
    """
    rng = np.random.default_rng(seed)
    ids = [a.problem.id for a in attempts]
    rank = {id_: r for r, id_ in enumerate(rng.permutation(sorted(set(ids))).tolist())}
    out = [-1] * len(attempts)
    for verdict in (True, False):
        members = [i for i, a in enumerate(attempts) if a.verdict.correct == verdict]
        members.sort(key=lambda i: rank[ids[i]])
        largest = max(Counter(ids[i] for i in members).values(), default=0)
        for place, i in enumerate(members):
            if 2 * largest <= len(members):
                out[i] = members[(place + largest) % len(members)]
                continue
            others = [j for j in range(len(attempts)) if ids[j] != ids[i]]
            if not others:
                raise PastError("shuffling needs responses of at least two problems; raise --problems")
            out[i] = others[rng.integers(len(others))]
    return out


def teacher_views(prompts: Prompts, teacher: Adapter, attempt: Attempt, donor: Attempt) -> dict[str, View]:
    """The teacher's view of one response under each condition."""
    problem = attempt.problem
    return {
        "matching": View(teacher, prompts.hindsight(problem, attempt.response.text)),
        "removed": View(teacher, prompts.removed(problem)),
        "shuffled": View(teacher, prompts.hindsight(problem, donor.response.text)),
    }


def measure(at: Boundary, attempts: Sequence[Attempt], views: Sequence[Mapping[str, View]]) -> Measured:
    """Success, divergences along Y and along the teacher's own continuations, and what happens at departures."""
    continued = _continue(at, attempts, views)
    life.doing("reading responses under every prompt")
    units: list[list[Read]] = []
    for i, (attempt, own) in enumerate(zip(attempts, views, strict=True)):
        paths = [(own[c], attempt.response.tokens) for c in CONDITIONS]
        paths += [(own[c], continued[c][i].response.tokens) for c in CONDITIONS]
        units.append(paths + [(attempt.view, tokens) for tokens in dict.fromkeys(tokens for _, tokens in paths)])
    values = {c: {m: np.full(len(attempts), np.nan) for m in METRICS} for c in (*CONDITIONS, STUDENT)}
    for i, states in boundary.read(at, units):
        for condition, found in _one(at, attempts[i], views[i], {c: continued[c][i] for c in CONDITIONS}, states):
            for metric, value in found.items():
                values[condition][metric][i] = value
    style = at.session.task.style
    written = {STUDENT: attempts} | continued
    styles = {name: [style(a.response.text) for a in some] for name, some in written.items()}
    return Measured([a.problem.id for a in attempts], np.array([a.verdict.correct for a in attempts]), values, styles)


def _one(
    at: Boundary,
    attempt: Attempt,
    views: Mapping[str, View],
    continued: Mapping[str, Attempt],
    states: Mapping[Read, Tensor],
) -> Iterator[tuple[str, dict[str, float]]]:
    """Condition, metric -> value, of one response."""
    y = attempt.response.tokens
    readers = [attempt.view, *(views[c] for c in CONDITIONS)]
    along = boundary.along(at, [states[view, y] for view in readers], _divergences).mean(1)
    departure = departed(y, at.session.loop.prompts.completion(attempt.problem.solution))
    for k, (name, view) in enumerate(zip((STUDENT, *CONDITIONS), readers, strict=True)):
        found: dict[str, float] = {}
        if departure is not None:
            t, other = departure
            p = at.session.model.log_probs(states[view, y][t : t + 1])[0].exp()
            found |= {"p_reference": float(p[other]), "p_own": float(p[y[t]])}
        if name == STUDENT:
            yield name, found | {"success": float(attempt.verdict.correct)}
            continue
        c = continued[name]
        paths = [states[reader, c.response.tokens] for reader in (view, attempt.view)]
        kl = float(boundary.along(at, paths, _compatibility).mean())
        found |= {"success": float(c.verdict.correct), "kl": kl}
        found |= {"jsd_student": along[k - 1], "jsd_matching": along[len(CONDITIONS) + k - 1]}
        yield name, found | ({"kl_successful": kl} if c.verdict.correct else {})


def departed(tokens: Tokens, reference: Tokens) -> tuple[int, int] | None:
    """Where a response first leaves the reference solution and the token it has there; None if one begins the other."""
    places = (t for t, (own, other) in enumerate(zip(tokens, reference, strict=False)) if own != other)
    t = next(places, None)
    return None if t is None else (t, reference[t])


def _divergences(logp: list[Tensor]) -> Tensor:
    """JSD of each condition's teacher to the student, then to the matching teacher."""
    student, *teachers = logp
    none = torch.empty(0)
    return torch.stack([_JSD(t, other, none) for other in (student, teachers[0]) for t in teachers])


def _compatibility(logp: list[Tensor]) -> Tensor:
    """[eq:failed-path-kl], on any continuation: exact KL(teacher || student)."""
    teacher, student = logp
    return _KL(teacher, student, torch.empty(0))[None]


def _continue(
    at: Boundary, attempts: Sequence[Attempt], views: Sequence[Mapping[str, View]]
) -> dict[str, list[Attempt]]:
    """One verified teacher response per student response and condition; the seeds do not know the condition."""
    counts: dict[str, int] = {}
    seeds: list[int] = []
    for attempt in attempts:
        id_ = attempt.problem.id
        counts[id_] = counts.get(id_, -1) + 1
        seeds.append(derive_seed(at.seed, "probe", at.step, id_, "teacher", counts[id_]))
    given = list(zip(attempts, views, seeds, strict=True))
    found: dict[str, list[Attempt]] = {}
    for condition in CONDITIONS:
        life.doing(f"teacher's responses, {condition}")
        work = [Work(attempt.problem, own[condition], seed) for attempt, own, seed in given]
        found[condition] = at.session.loop.attempt(work, at.session.loop.rollout.teacher)
    return found


def probe(at: Boundary, problems: Sequence[Problem], samples: int, split: str) -> dict[str, Any]:
    """Everything about one boundary, as plain data for RUN/probes/step-*.json."""
    loop = at.session.loop
    drawn = boundary.responses(at, problems, samples, "probe")
    if len({a.problem.id for a in drawn}) < 2:
        raise PastError("shuffling needs responses of at least two problems; raise --problems or model.max_context")
    partner = donors(drawn, derive_seed(at.seed, "probe", at.step, "shuffle"))
    pairs = [(a, drawn[j]) for a, j in zip(drawn, partner, strict=True)]
    views = [teacher_views(loop.prompts, at.teacher, a, donor) for a, donor in pairs]
    kept = [i for i, v in enumerate(views) if _fits(at, drawn[i], v)]
    if not kept:
        raise PastError("no response fits the context under all three prompts; raise model.max_context")
    measured = measure(at, [drawn[i] for i in kept], [views[i] for i in kept])
    same = [pairs[i][0].verdict.correct == pairs[i][1].verdict.correct for i in kept]
    conditions = {c: _estimates(measured, measured.values[c], None, at.seed) for c in (*CONDITIONS, STUDENT)}
    differences = {
        f"{a}-{b}": _estimates(measured, measured.values[a], measured.values[b], at.seed) for a, b in DIFFERENCES
    }
    return {
        "kind": "probe",
        "format": FORMAT,
        **at.description(),
        "settings": {
            "problems": len(problems),
            "samples": samples,
            "split": split,
            "teacher_adapter": at.teacher,
            "own_condition": boundary.own_condition(at.session),
            "student": loop.rollout.student.model_dump(),
            "teacher": loop.rollout.teacher.model_dump(),
            "level": 0.95,
            "resamples": 10_000,
        },
        "counts": {
            "problems": len(set(measured.problems)),
            "responses": len(kept),
            "correct": int(measured.correct.sum()),
            "failed": int((~measured.correct).sum()),
            "dropped": len(problems) * samples - len(kept),
            "shuffled_same_verdict": sum(same),
        },
        "conditions": conditions,
        "differences": differences,
        "styles": {c: dict(Counter(filter(None, labels)).most_common()) for c, labels in measured.styles.items()},
        "verdict": verdict(conditions, differences),
        "notes": at.notes,
    }


def _fits(at: Boundary, attempt: Attempt, views: Mapping[str, View]) -> bool:
    room = max(len(attempt.response.tokens), at.session.loop.rollout.teacher.max_new_tokens)
    return max(len(v.prompt) for v in views.values()) + room <= at.session.loop.max_context


def _estimates(
    measured: Measured, values: Mapping[str, np.ndarray], minus: Mapping[str, np.ndarray] | None, seed: int
) -> dict[str, dict[str, Any]]:
    """Subset -> metric -> estimate with interval; the paired difference by problem where `minus` is given."""
    masks = {"all": np.ones_like(measured.correct), "correct": measured.correct, "failed": ~measured.correct}
    out: dict[str, dict[str, Any]] = {}
    for subset, mask in masks.items():
        out[subset] = {}
        for metric in METRICS:
            scores = by_problem(measured.problems, values[metric], mask)
            if minus is not None:
                scores = scores - by_problem(measured.problems, minus[metric], mask)
            bounds = (0.0 if minus is None else -1.0, 1.0) if metric in SHARES else None
            out[subset][metric] = interval(scores[~np.isnan(scores)], seed, bounds)
    return out


def by_problem(problems: Sequence[str], values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The mean of each problem's present values, nan where it has none; problems in order of appearance."""
    index = {id_: k for k, id_ in enumerate(dict.fromkeys(problems))}
    rows = np.array([index[id_] for id_ in problems])
    present = mask & ~np.isnan(values)
    counts = np.bincount(rows[present], minlength=len(index))
    sums = np.bincount(rows[present], weights=values[present], minlength=len(index))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def interval(scores: np.ndarray, seed: int, bounds: tuple[float, float] | None = None) -> dict[str, Any] | None:
    """Mean over problems with its 95 % bootstrap interval; one problem has no interval, none no estimate."""
    if len(scores) == 0:
        return None
    if len(scores) == 1:
        return {"estimate": float(scores[0]), "low": None, "high": None, "problems": 1}
    found = stats.bootstrap_scores({"all": scores[None]}, unit="problem", seed=seed, bounds=bounds)
    return {"estimate": found.estimate, "low": found.low, "high": found.high, "problems": len(scores)}


def verdict(conditions: Mapping[str, Any], differences: Mapping[str, Any]) -> str:
    """Teacher success under the three prompts in plain words; an order is claimed only where its steps are certain."""
    success = {c: conditions[c]["all"]["success"]["estimate"] for c in CONDITIONS}
    gaps = {
        ("matching", "removed"): _turned(differences["removed-matching"]["all"]["success"]),
        ("matching", "shuffled"): _turned(differences["shuffled-matching"]["all"]["success"]),
        ("removed", "shuffled"): _turned(differences["shuffled-removed"]["all"]["success"]),
    }
    if gaps["matching", "removed"][1] > 0 and gaps["removed", "shuffled"][1] > 0:
        return "teacher success: matching above removed above shuffled; both paired intervals exclude zero"
    order = sorted(CONDITIONS, key=lambda c: -success[c])
    certain, open_ = list[str](), list[str]()
    for (a, b), (gap, low, high) in gaps.items():
        if low > 0 or high < 0:
            certain.append(f"{a} above {b}" if gap > 0 else f"{b} above {a}")
        else:
            open_.append(f"{a} and {b}")
    if not open_:
        return f"teacher success: {' above '.join(order)}; all paired intervals exclude zero"
    seen = ", ".join(f"{c} {100 * success[c]:.1f} %" for c in order)
    known = f"; certain is {' and '.join(certain)}" if certain else ""
    return f"teacher success: seen as {seen}{known}; not distinguishable: {', '.join(open_)}"


def _turned(difference: Mapping[str, Any]) -> tuple[float, float, float]:
    """b - a with its interval as a - b; without an interval nothing is certain."""
    if difference["low"] is None:
        return -difference["estimate"], -math.inf, math.inf
    return -difference["estimate"], -difference["high"], -difference["low"]


def probe_run(
    folder: Path,
    steps: Sequence[int],
    *,
    problems: int,
    samples: int,
    split: str,
    trust: bool = False,
    notes: Sequence[str] = (),
    around: Callable[[int], AbstractContextManager[Any]] = lambda step: nullcontext(),
) -> dict[int, dict[str, Any]]:
    """A run at these checkpoints, on the same problems, each within `around`; the results are kept in its folder."""
    for name, given, least in (("problems", problems, 2), ("samples", samples, 1)):
        if given < least:
            raise PastError(f"{name} is {given}; it must be at least {least}")
    results: dict[int, dict[str, Any]] = {}
    with boundary.opened(folder, steps[0], trust) as at:
        chosen = boundary.pick(_problems(at, split), problems, at.seed, "probe", "problems")
        for step in steps:
            if step != at.step:
                at.move(step)
            at.notes += notes
            with around(step):
                results[step] = probe(at, chosen, samples, split)
            RunFolder(folder).write_probe(step, results[step])
    return results


def _problems(at: Boundary, split: str) -> list[Problem]:
    task = at.session.task
    if split == "train":
        return list(at.session.loop.problems)
    problems = [p for part in task.evaluation().values() for p in part]
    if any(not p.solution for p in problems):
        raise PastError("--split evaluation: these problems have no reference solution for the teacher to read")
    return problems
