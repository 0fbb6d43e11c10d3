from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Quiet

from past_opsd.analysis import shift, shift_estimates, theory
from past_opsd.analysis.shift import Prefix, Start
from past_opsd.core.nouns import Attempt, PastError, Problem, Response, Verdict, View
from past_opsd.interface import arguments, commands
from past_opsd.run import boundary
from past_opsd.run.boundary import Boundary
from past_opsd.run.train import train

# The teacher takes a large step, so that it cannot be mistaken for the student.
LARGE = "learner.teacher.lr=5e-3"
QUICK = ["run.cycles=1", LARGE, "evaluation.samples=1", "evaluation.pass_k=[1]", "evaluation.at=[1.0]"]
FLOOR = 1e-5  # completions less likely than this are not enumerated


def parsed(*words: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.shift(parser)
    return parser.parse_args([str(w) for w in words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_recipe) -> Path:
    folder = tmp_path_factory.mktemp("shift") / "run"
    train(small_recipe("embedded/past", *QUICK), folder, False, Quiet())
    return folder


def world(
    rng: np.random.Generator, privileges: int = 6, vocabulary: int = 5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P(U | H), q_U, p."""
    weights = rng.dirichlet(np.ones(privileges))
    return weights, rng.dirichlet(np.ones(vocabulary) * 0.7, size=privileges), rng.dirichlet(np.ones(vocabulary) * 3)


def biases(weights: np.ndarray, q: np.ndarray, p: np.ndarray, M: int) -> tuple[float, float]:
    """The mean error of plug-in and jackknife, the part that is linear in the draws, and so without bias, taken out."""
    rng = np.random.default_rng(11)
    qbar = theory.barycenter(q, weights)
    plugin, corrected = [], []
    for _ in range(500):
        drawn = q[rng.choice(len(q), size=M, p=weights)]
        linear = float(theory.barycenter(drawn) @ np.log(qbar / p))
        plugin.append(theory.decompose(drawn, p).shift - linear)
        corrected.append(shift_estimates.jackknife_shift(drawn, p) - linear)
        assert plugin[-1] == pytest.approx(float(theory.kl(theory.barycenter(drawn), qbar)), abs=1e-9)
    return float(np.mean(plugin)), float(np.mean(corrected))


@pytest.mark.parametrize("M", [4, 16])
def test_the_jackknife_is_nearer_to_the_truth_than_the_plug_in(M: int):
    plugin, corrected = biases(*world(np.random.default_rng(11)), M)
    assert plugin > 0.1 / M
    assert abs(corrected) < plugin / 3


def test_the_jackknife_leaves_each_draw_out_once():
    _, q, p = world(np.random.default_rng(4))
    left_out = [float(theory.kl(np.delete(q, m, axis=0).mean(0), p)) for m in range(len(q))]
    expected = 6 * float(theory.kl(q.mean(0), p)) - 5 * np.mean(left_out)
    assert shift_estimates.jackknife_shift(q, p) == pytest.approx(expected, abs=1e-12)


def test_the_parts_add_up_and_the_correction_keeps_their_sum():
    rng = np.random.default_rng(3)
    _, q, p = world(rng)
    found = shift_estimates.split(q, p, np.array([True, False, True, True, False, False]))
    assert found.privileged + found.shift == pytest.approx(found.total, abs=1e-12)
    assert found.failure == 0.5
    delta = theory.kl(p, q)[[0, 2, 3]].mean()
    assert found.preservation == pytest.approx(0.5 * math.sqrt(delta / 2))
    equal = shift_estimates.split(np.tile(q[0], (4, 1)), p, np.ones(4, dtype=bool))
    assert equal.shift_corrected == pytest.approx(equal.total, abs=1e-12)


def test_coupled_actions_have_the_value_shift_as_their_mean():
    rng = np.random.default_rng(5)
    _, (q, *_), p = world(rng)
    Q = rng.random(len(p))
    couplings = [shift_estimates.couple(q, p, rng) for _ in range(20000)]
    gains = np.array([c.distance * (Q[c.actions[0]] - Q[c.actions[1]]) for c in couplings])
    assert couplings[0].distance == pytest.approx(float(theory.tv(q, p)))
    assert gains.mean() == pytest.approx(float(theory.value_shift(q, p, Q)), abs=4 * gains.std() / math.sqrt(20000))
    assert all(q[c.actions[0]] > p[c.actions[0]] and q[c.actions[1]] < p[c.actions[1]] for c in couplings)
    same = shift_estimates.couple(p, p, rng)
    assert same.distance == 0
    assert same.actions[0] == same.actions[1]


@dataclass(frozen=True)
class Finite:
    """A prefix of a made world in which everything is known."""

    weights: np.ndarray
    q: np.ndarray
    p: np.ndarray
    Q: np.ndarray
    success: np.ndarray

    @classmethod
    def make(cls, rng: np.random.Generator) -> Finite:
        weights, q, p = world(rng)
        return cls(weights, q, p, rng.random(len(p)), rng.random(len(q)) < 0.6)

    def truth(self) -> list[float]:
        exact = theory.decompose(self.q, self.p, self.weights)
        g = theory.value_shift(self.q, self.p, self.Q)
        columns = (g, ~self.success, ~self.success * g, np.where(self.success, theory.kl(self.p, self.q), 0.0))
        return [exact.total, exact.shift, *(float(self.weights @ column) for column in columns)]

    def completed(self, rng: np.random.Generator, M: int, problem: str) -> shift_estimates.Prefixed:
        """As the command samples prefixes."""
        us = rng.choice(len(self.q), size=M, p=self.weights)
        parts = shift_estimates.split(self.q[us], self.p, self.success[us])
        return shift_estimates.Prefixed(**asdict(parts), problem=problem, position=0, length=1, weight=1.0)


def moved(worlds: list[Finite], rng: np.random.Generator, responses: int, pairs: int) -> list[shift_estimates.Moved]:
    """As the command samples responses, which are one token long here: so many of every world."""
    drawn = [(i, u) for i, f in enumerate(worlds) for u in rng.choice(len(f.q), size=responses, p=f.weights)]
    distances = np.array([theory.tv(worlds[i].q[u], worlds[i].p) for i, u in drawn])
    gains, counts = np.zeros(len(drawn)), np.zeros(len(drawn), dtype=int)
    for n in shift_estimates.systematic(distances, pairs, rng):
        f, u = worlds[drawn[n][0]], drawn[n][1]
        first, second = (rng.random() < f.Q[a] for a in shift_estimates.couple(f.q[u], f.p, rng).actions)
        gains[n] += distances.sum() / pairs * (float(first) - float(second))
        counts[n] += 1
    rows = []
    for n, (i, u) in enumerate(drawn):
        f = worlds[i]
        changes = (float(theory.kl(f.q[u], f.p)), float(theory.kl(f.p, f.q[u])))
        row = (f"p{i}", 1, bool(f.success[u]), float(distances[n]), *changes, int(counts[n]), float(gains[n]))
        rows.append(shift_estimates.Moved(*row))
    return rows


def population(prefixes: list[Finite]) -> dict[str, float]:
    total, moved, value, eta, failed, delta = np.mean([f.truth() for f in prefixes], axis=0)
    truth = {"total": total, "shift": moved, "surviving": moved / total, "privileged": total - moved, "value": value}
    return truth | {"eta": eta, "gamma_failed": failed / eta, "delta_correct": delta / (1 - eta)}


def cut(attempt: Attempt, t: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return attempt.response.tokens[:t], attempt.response.logprobs[:t]


def test_responses_are_finished_in_one_batch_as_if_each_had_its_own(finished: Path, monkeypatch):
    with boundary.opened(finished, 1) as at:
        drawn = boundary.responses(at, at.session.loop.problems[:6], 1, "test")
        found = [Prefix(a.problem, a.view.prompt, *cut(a, 2 * i), len(a.response.tokens)) for i, a in enumerate(drawn)]
        # So short that a response ends behind its own room and within the longest one.
        limit = min(len(a.response.tokens) for a in drawn) - 1
        starts = [Start(h, h.tokens, h.logprobs, 7 * i) for i, h in enumerate(found) if len(h.tokens) < limit]
        starts.append(Start(found[0], (), (), 98))
        short = at.session.loop.rollout.student.model_copy(update={"max_new_tokens": limit})
        at.session.loop.rollout = at.session.loop.rollout.model_copy(update={"student": short})
        starts.append(Start(found[0], drawn[0].response.tokens[:1] * (limit - 1), (0.0,) * (limit - 1), 99))
        asked: list[int] = []
        sample = at.session.loop.lab.engine.sample
        monkeypatch.setattr(at.session.loop.lab.engine, "sample", lambda *a: asked.append(len(a[0])) or sample(*a))
        together = shift.finish(at, starts)
        assert asked == [len(starts)]
        alone = [shift.finish(at, [start])[0] for start in starts]
    assert [(a.response.tokens, a.response.finished) for a in together] == [
        (a.response.tokens, a.response.finished) for a in alone
    ]
    assert all(len(a.response.tokens) <= limit for a in together)
    assert not together[-1].response.finished


def test_estimates_find_the_truth_of_a_finite_world():
    rng = np.random.default_rng(7)
    worlds = [Finite.make(rng) for _ in range(12)]
    truth = population(worlds)
    completed = [f.completed(rng, 1500, f"p{i}") for i, f in enumerate(worlds)]
    found = shift_estimates.summarise(moved(worlds, rng, 400, 8_000), completed, 0)
    tight = {"total": 0.02, "shift": 0.02, "surviving": 0.02, "privileged": 0.02, "value": 0.02, "eta": 0.02}
    for name, tolerance in (tight | {"gamma_failed": 0.03, "delta_correct": 0.04}).items():
        assert found[name]["estimate"] == pytest.approx(truth[name], abs=tolerance), name
    assert found["local_improvement"] == found["value"]  # responses of one token
    assert found["change"]["estimate"] == pytest.approx(truth["total"], abs=0.02)


@pytest.mark.slow
def test_intervals_cover_the_population(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shift_estimates, "RESAMPLES", 1000)
    rng = np.random.default_rng(23)
    truth = population([Finite.make(rng) for _ in range(3000)])
    covered = dict.fromkeys(("surviving", "value", "privileged"), 0)
    for _ in range(50):
        worlds = [Finite.make(rng) for _ in range(24)]
        completed = [f.completed(rng, 8, f"p{i}") for i, f in enumerate(worlds)]
        found = shift_estimates.summarise(moved(worlds, rng, 2, 96), completed, 0)
        for name in covered:
            covered[name] += found[name]["low"] <= truth[name] <= found[name]["high"]
    assert all(41 <= count <= 50 for count in covered.values()), covered


def test_draws_come_as_often_as_their_chance_and_evenly():
    rng = np.random.default_rng(1)
    chances = rng.dirichlet(np.ones(9))
    counts = np.array([np.bincount(shift_estimates.systematic(chances, 40, rng), minlength=9) for _ in range(3000)])
    assert np.abs(counts - 40 * chances).max() < 1
    # A count is one of two neighbours, so its standard deviation is at most a half.
    assert counts.mean(0) == pytest.approx(40 * chances, abs=4 * 0.5 / math.sqrt(3000))


def test_what_belongs_to_one_problem_is_resampled_together():
    rng = np.random.default_rng(2)
    worlds = [Finite.make(rng) for _ in range(8)]
    rows, completed = moved(worlds, rng, 4, 64), [f.completed(rng, 4, f"p{i}") for i, f in enumerate(worlds)]
    one = shift_estimates.summarise(rows, completed, 0)
    two = shift_estimates.summarise([*rows, *rows], [*completed, *completed], 0)
    assert one["total"] == pytest.approx(two["total"])
    assert one["surviving"] == pytest.approx(two["surviving"])
    assert one["local_improvement"] == pytest.approx(two["local_improvement"])


def test_no_failure_leaves_the_failed_branch_open():
    rows = [shift_estimates.Moved(f"p{i}", 5, True, 0.4, 0.2, 0.1, 2, 0.5) for i in range(3)]
    seen = [shift_estimates.Prefixed(0.2, 0.1, 0.1, 0.09, 0.0, 0.2, f"p{i}", 0, 5, 1.0) for i in range(3)]
    found: dict[str, Any] = dict(shift_estimates.summarise(rows, seen, 0))
    assert found["gamma_failed"] is None
    assert found["margin"]["estimate"] == pytest.approx(-0.2)
    assert found["local_improvement"]["estimate"] == pytest.approx(0.5)
    assert found["value"]["estimate"] == pytest.approx(0.1)
    verdict = shift_estimates.verdict(found)
    assert verdict.startswith("45 % of the teacher's change can reach the student")
    assert "by +0.50 times the step (95 %: +0.50 to +0.50), an improvement." in verdict
    assert "guarantees none" in verdict
    assert "0.01 nats (5.0 % of the whole change)" in shift_estimates.bias_note(found, 16)
    # Without prefixes there is no word of what survives.
    found = dict(shift_estimates.summarise(rows, [], 0))
    assert found["surviving"] is found["margin"] is None
    assert shift_estimates.verdict(found).startswith("A small step")
    assert shift_estimates.bias_note(found, 16) == ""


@dataclass(frozen=True)
class Exact:
    """All completions of a prefix that matter, with the student's probability, outcome and teacher."""

    prefix: Prefix
    probabilities: np.ndarray
    correct: np.ndarray
    q: np.ndarray
    p: np.ndarray
    Q: np.ndarray


Whole = tuple[int, Response, float]


def enumerate_completions(at: Boundary, prefix: Prefix, roots: list[tuple[int, ...]]) -> Iterator[Whole]:
    """Every whole response that begins with a root: which root, the response, its probability given the root."""
    stops, limit = at.session.model.stops, at.session.loop.rollout.student.max_new_tokens
    decode = at.session.model.tokenizer.decode
    level = [(root, y, 1.0) for root, y in enumerate(roots)]
    while level:
        going = []
        for root, y, w in level:
            if y[-1] in stops or len(y) == limit:
                yield root, Response(y, decode(y, skip_special_tokens=True), (), y[-1] in stops), w
            else:
                going.append((root, y, w))
        if not going:
            return
        rows = boundary.next_token(at, [View("student", prefix.prompt + y) for _, y, _ in going])
        level = [
            (root, (*y, int(a)), float(w * row[a]))
            for (root, y, w), row in zip(going, rows, strict=True)
            for a in np.flatnonzero(w * row > FLOOR)
        ]


def enumerated(at: Boundary, prefix: Prefix) -> Exact:
    problem, verify = prefix.problem, at.session.loop.lab.verifier.verify
    _, responses, mass = zip(*enumerate_completions(at, prefix, [prefix.tokens]), strict=True)
    assert sum(mass) > 0.999
    verdicts = verify([(problem, r) for r in responses])
    prompts = [at.session.loop.prompts.hindsight(problem, r.text) for r in responses]
    q = boundary.next_token(at, [View("teacher", prompt + prefix.tokens) for prompt in prompts])
    p = boundary.next_token(at, [View("student", prefix.prompt + prefix.tokens)])[0]
    actions = [int(a) for a in np.flatnonzero(np.maximum(q.max(0), p) > 1e-4)]
    ends = list(enumerate_completions(at, prefix, [(*prefix.tokens, a) for a in actions]))
    Q = np.zeros(len(p))
    for (root, _, w), verdict in zip(ends, verify([(problem, r) for _, r, _ in ends]), strict=True):
        Q[actions[root]] += w * verdict.correct
    return Exact(prefix, np.array(mass) / sum(mass), np.array([v.correct for v in verdicts]), q, p, Q)


@pytest.fixture(scope="module")
def opened(finished: Path) -> Iterator[Boundary]:
    with boundary.opened(finished, 1) as at:
        yield at


@pytest.fixture(scope="module")
def exact(opened: Boundary) -> Exact:
    """A prefix before the last digits, where the student errs now and then and the teacher knows what it wrote."""
    found = []
    for a in boundary.responses(opened, opened.session.loop.problems[:48], 1, "fork"):
        signs = [t for t, y in enumerate(a.response.tokens) if opened.session.model.tokenizer.decode([y]) == "="]
        found += [Prefix(a.problem, a.view.prompt, a.response.tokens[: t + 1], (), 0) for t in signs[-1:]]
    seen = zip(found, shift.look(opened, found, completions=8), strict=True)
    unsure = [(h, s) for h, s in seen if 0.2 < s.failure < 0.8]
    return enumerated(opened, max(unsure, key=lambda pair: pair[1].privileged)[0])


@pytest.mark.slow
def test_drawn_completions_give_the_exact_decomposition(opened: Boundary, exact: Exact):
    M = 600
    truth = theory.decompose(exact.q, exact.p, exact.probabilities)
    assert truth.privileged > 0.01
    assert truth.shift > 0.001
    (found,) = shift.look(opened, [exact.prefix], completions=M)
    spread = math.sqrt(exact.probabilities @ (theory.kl(exact.q, exact.p) - truth.total) ** 2 / M)
    assert found.total == pytest.approx(truth.total, abs=4 * spread)
    assert found.shift_corrected == pytest.approx(truth.shift, abs=4 * spread)
    eta = exact.probabilities @ ~exact.correct
    assert found.failure == pytest.approx(eta, abs=4 * math.sqrt(0.25 / M))


@pytest.mark.slow
def test_drawn_tokens_give_the_exact_slope(opened: Boundary, exact: Exact):
    """Over all responses that begin with the prefix, and all of their later tokens."""
    h, loop, model = exact.prefix, opened.session.loop, opened.session.model
    _, responses, mass = zip(*enumerate_completions(opened, h, [h.tokens]), strict=True)
    right = [v.correct for v in loop.lab.verifier.verify([(h.problem, r) for r in responses])]
    reached: dict[tuple[int, ...], np.ndarray] = {}  # what begins so: its probability, and that of being right
    for r, w, correct in zip(responses, mass, right, strict=True):
        for t in range(len(h.tokens), len(r.tokens) + 1):
            reached[r.tokens[:t]] = np.add(reached.get(r.tokens[:t], np.zeros(2)), (w, w * correct))
    verdicts = {True: Verdict(True, "correct"), False: Verdict(False, "wrong")}
    view = View("student", h.prompt)
    attempts = [Attempt(h.problem, view, r, verdicts[c]) for r, c in zip(responses, right, strict=True)]
    units = [[(loop.method.teacher_view(a), a.response.tokens), (view, a.response.tokens)] for a in attempts]
    truth = unknown = 0.0
    for i, states in boundary.read(opened, units):
        y = responses[i].tokens
        for t in range(len(h.tokens), len(y)):
            q, p = (model.log_probs(states[read][t : t + 1])[0].double().exp().numpy() for read in units[i])
            on = {a: reached[(*y[:t], a)] for a in range(len(p)) if (*y[:t], a) in reached}
            truth += mass[i] * sum((q[a] - p[a]) * right_ / any_ for a, (any_, right_) in on.items())
            unknown += mass[i] * (1 - q[list(on)].sum())
    # Responses are drawn as the engine draws them, then tokens and actions; what is before the prefix does not count.
    drawn = shift.finish(opened, [Start(h, h.tokens, (0.0,) * len(h.tokens), seed) for seed in range(500)])
    found = shift.compare(opened, drawn)
    for s in found:
        s.distances[: len(h.tokens)] = 0
    gains = np.array([m.gain for m in shift.value(opened, found, 1000)])
    assert sum(mass) > 0.999
    assert unknown < 0.01
    # A response's sum of distances bounds what it can add; pairs are drawn anew for it.
    distances = np.array([s.distances.sum() for s in found])
    deviation = math.sqrt(distances.var() / len(found) + distances.mean() ** 2 / 1000)
    assert gains.mean() == pytest.approx(truth, abs=4 * deviation + unknown)
    assert abs(truth) > 4 * deviation  # enough to tell a wrong sign


@pytest.mark.slow
def test_on_the_real_model_the_jackknife_is_nearer_at_few_completions(exact: Exact):
    plugin, corrected = biases(exact.probabilities, exact.q, exact.p, 4)
    assert plugin > 0
    assert abs(corrected) < plugin / 2


@pytest.mark.slow
def test_the_bound_holds_where_everything_is_known(exact: Exact):
    w, fails = exact.probabilities, ~exact.correct
    g = theory.value_shift(exact.q, exact.p, exact.Q)
    eta = w @ fails
    delta = w @ np.where(exact.correct, theory.kl(exact.p, exact.q), 0) / (1 - eta)
    bound = w @ (fails * g) - (1 - eta) * math.sqrt(delta / 2)
    assert theory.value_shift(theory.barycenter(exact.q, w), exact.p, exact.Q) == pytest.approx(w @ g, abs=1e-9)
    assert w @ g >= bound


def test_a_started_response_is_finished_within_the_rollouts_limit(opened: Boundary):
    (a,) = boundary.responses(opened, opened.session.loop.problems[:1], 1, "finish")
    y, limit = a.response.tokens, opened.session.loop.rollout.student.max_new_tokens
    prefix = Prefix(a.problem, a.view.prompt, y[:3], a.response.logprobs[:3], len(y))
    full = (*y[:3], *[y[3]] * (limit - 3))
    assert not opened.session.model.stops & set(full)
    starts = [Start(prefix, y, (), 1), Start(prefix, full, (), 1), Start(prefix, full[:-1], (), 1)]
    starts += [Start(prefix, y[:3], y_logprobs, seed) for seed, y_logprobs in enumerate([(0.0,) * 3] * 6)]
    ended, cut, last, *rest = shift.finish(opened, starts)
    assert ended.response.tokens == y
    assert ended.response.finished
    assert ended.verdict == a.verdict
    assert cut.response.tokens == full
    assert cut.verdict.reason == "truncated"
    assert len(last.response.tokens) == limit
    for attempt in rest:
        assert attempt.response.tokens[:3] == y[:3]
        assert len(attempt.response.tokens) <= limit
        assert len(attempt.response.logprobs) == len(attempt.response.tokens)
        assert attempt.response.text == opened.session.model.tokenizer.decode(
            attempt.response.tokens, skip_special_tokens=True
        )
        assert attempt.view.prompt == a.view.prompt
        tokens = attempt.response.tokens
        views = [View("student", a.view.prompt + tokens[:t]) for t in range(3, len(tokens))]
        written = np.log(boundary.next_token(opened, views)[np.arange(len(views)), tokens[3:]])
        assert attempt.response.logprobs[3:] == pytest.approx(written, abs=1e-4)
    assert len({attempt.response.tokens for attempt in rest}) > 1 or len(y) <= 5


def test_weighted_prefixes_stand_for_every_token_of_every_response():
    problem, rng = Problem("p", "x", "z", "a"), np.random.default_rng(3)
    found = []
    for n in (20, 5, 1):
        y = Response(tuple(range(n)), "", (0.0,) * n, True)
        attempt = Attempt(problem, View("student", (1,)), y, Verdict(True, "correct"))
        found.append(shift.Along(attempt, View("teacher", (2,)), rng.random(n) ** 4, 0.0, 0.0))
    seen: dict[tuple[int, int], float] = {}
    for seed in range(400):
        drawn = shift.prefixes(found, 50, seed)
        assert all(h.tokens == tuple(range(len(h.tokens))) and len(h.tokens) < h.length for h in drawn)
        assert all(0 < h.weight < 2 for h in drawn)
        for h in drawn:
            seen[h.length, len(h.tokens)] = seen.get((h.length, len(h.tokens)), 0) + h.weight / (50 * 400)
    # Counts of a draw are off by less than one, their mean over 400 by a twentieth; each is worth less than 2 / 50.
    for n in (20, 5, 1):
        assert [seen[n, t] for t in range(n)] == pytest.approx([1 / (3 * n)] * n, abs=4 * 0.5 / 20 * 2 / 50)
    for s in found:
        s.distances[:] = 0
    assert all(h.weight == 1 for h in shift.prefixes(found, 50, 0))


def test_the_command_writes_what_it_prints(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    words = (run, "--responses", "9", "--pairs", "7", "--prefixes", "6", "--completions", "4", "--json")
    assert commands.shift(parsed(*words)) == 0
    printed = json.loads(capsys.readouterr().out)
    file = run / "probes" / "shift-00001.json"
    assert json.loads(file.read_text()) == printed
    assert printed["counts"]["prefixes"] == len(printed["prefixes"]) == 6
    assert printed["counts"]["completions"] == 24
    assert printed["counts"]["responses"] == len(printed["responses"]) == 9
    assert printed["counts"]["rollouts"] == 14
    slope = np.mean([row["gain"] for row in printed["responses"]])
    assert printed["estimates"]["local_improvement"]["estimate"] == pytest.approx(slope)
    for prefix in printed["prefixes"]:
        assert prefix["privileged"] + prefix["shift"] == pytest.approx(prefix["total"], abs=1e-9)
        assert prefix["position"] < prefix["length"]
    e = printed["estimates"]
    assert e["privileged"]["estimate"] + e["shift"]["estimate"] == pytest.approx(e["total"]["estimate"])
    before = file.read_text()
    commands.shift(parsed(*words))
    assert file.read_text() == before


def test_a_teacher_without_the_trajectory_loses_nothing(
    tmp_path: Path, small_recipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "run"
    train(small_recipe("embedded/opsd", *QUICK), folder, False, Quiet())
    monkeypatch.setenv("COLUMNS", "80")
    commands.shift(parsed(folder, "--responses", "6", "--pairs", "6", "--prefixes", "5", "--completions", "3"))
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines() if not line.startswith("written")]
    assert max(map(len, shown)) <= 80
    assert "…" not in "\n".join(shown)
    assert any(line.startswith("100 % of the teacher's change can reach the student") for line in shown)
    found = json.loads((folder / "probes" / "shift-00001.json").read_text())
    assert found["estimates"]["total"]["estimate"] > 1e-4
    assert abs(found["estimates"]["privileged"]["estimate"]) < 1e-12
    assert found["settings"]["own_condition"] == "removed"


def test_bad_input_is_one_clear_message(finished: Path, tmp_path: Path):
    with pytest.raises(PastError, match="not a run folder"):
        commands.shift(parsed(tmp_path))
    with pytest.raises(PastError, match="kept are 0, 1"):
        commands.shift(parsed(finished, "--step", "5"))
    with pytest.raises(PastError, match="completions is 1; it must be at least 2"):
        commands.shift(parsed(finished, "--completions", "1"))
    with boundary.opened(finished, 1) as at:
        at.session.loop.max_context = 45
        with pytest.raises(PastError, match="max_context"):
            shift.shift(at, 4, 4, 2, 2)
    with pytest.raises(PastError, match="--set changes a recipe"):
        commands.shift(parsed(finished, "--set", "run.seed=3"))


@pytest.mark.slow
def test_a_recipe_is_looked_at_before_its_first_cycle(capsys: pytest.CaptureFixture[str]):
    words = ("embedded/past", "--set", "run.seed=29", "--responses", "40", "--pairs", "60", "--prefixes", "0", "--json")
    assert commands.shift(parsed(*words)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recipe"], found["step"], found["seed"]) == ("embedded/past", 0, 29)
    assert found["estimates"]["local_improvement"]["low"] < found["estimates"]["local_improvement"]["high"]
    assert found["prefixes"] == []
