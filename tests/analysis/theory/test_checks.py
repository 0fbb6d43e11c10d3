"""`past theory`: every result of the paper is covered, every statement holds, and a fault planted anywhere is seen."""

from __future__ import annotations

import argparse
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from past_opsd.analysis.theory import adaptive, check, checks, clipping, command, process, projection, transfer
from past_opsd.analysis.theory.check import Check, compare
from past_opsd.analysis.theory.finite import kl
from past_opsd.core import sampler
from past_opsd.core.losses import Match, Stay
from past_opsd.interface import arguments, commands

LABELS = {
    "prop:causal-projection",
    "cor:restricted-causal-projection",
    "cor:privilege-shift",
    "eq:surviving-shift-fraction",
    "prop:perfect-teacher-no-transfer",
    "prop:value-aligned-transfer",
    "eq:outcome-barycenter",
    "eq:outcome-value-decomposition",
    "eq:failure-tv-scaling",
    "cor:outcome-transfer-margin",
    "prop:continuation-compatibility",
    "prop:local-policy-improvement",
    "app:theory: forward and reverse",
    "prop:correct-fixed-point",
    "eq:correct-tv-bound",
    "eq:clipping-safe-region",
    "app:theory: adaptive sampling",
}


@pytest.fixture(scope="module")
def found():
    return checks.checks(0)


@pytest.mark.slow
def test_every_result_is_covered_and_every_statement_holds(found):
    assert {c.label for c in found} == LABELS
    assert [c for c in found if not c.ok] == []
    assert max(c.residual for c in found if c.exact) < 1e-9
    assert len({(c.label, c.statement) for c in found}) == len(found)


@pytest.mark.slow
def test_no_check_rests_on_few_instances(found):
    counted = [c for c in found if "T = " not in c.statement and c.statement.startswith(("E ", "g(", "qbar", "KL("))]
    assert len(counted) > 8
    assert all(c.instances >= 10 for c in counted)


@pytest.mark.slow
def test_the_numbers_of_the_paper(found):
    by_statement = {c.statement: c for c in found if c.label == "eq:clipping-safe-region"}
    assert by_statement["p = (.9,.1), q = (.001,.999), 3 decimals: KL"].left == 5.892
    assert by_statement["the same clipped at tau = 0.05"].left == -0.180
    halves = [c.left for c in found if "student success" in c.statement]
    assert halves == [2.0 ** (1 - T) for T in range(2, 13)]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers_and_another_seed_others():
    groups = (projection.privilege_shift, transfer.local_improvement, transfer.compatibility)
    once, again, other = ([c for group in groups for c in group(seed)] for seed in (4, 4, 5))
    assert once == again
    assert [c.left for c in once] != [c.left for c in other]
    assert all(c.ok for c in other)


class Whole(Match):
    """`losses.Match` with the clip on the whole position."""

    def __call__(self, live_logp, frozen_logp, tokens):
        return Match()(live_logp, frozen_logp, tokens).clamp(max=self.tau)


def no_retry(failed, base, maximum, draw):
    return sampler.fixed(failed, base, draw, retry=False)


def stuck(failed, base, maximum, draw, rule=sampler.adaptive):
    return rule(failed, maximum, maximum, draw)


def short_group(G, draw):
    return sampler.fixed(adaptive.FAILED, max(1, G - 1), draw)


def first_only(self, cell, code):
    steps = (*self.student[: cell.t], self.teacher[cell.t][code], *self.read_by(code)[cell.t + 1 :])
    return process._continuation(steps, cell.t, cell.h)


def unweighted(q, weights=None):
    return np.asarray(q).mean(0)


# What is replaced, by what, and the group that must notice.
FAULTS = {
    "kl-reversed": (projection, "kl", lambda p, q: kl(q + 1e-9, p + 1e-9), projection.causal_projection),
    "mean-unweighted": (process, "barycenter", unweighted, projection.causal_projection),
    "information": (projection, "_entropy", lambda m: float(np.ravel(m) @ np.ravel(m)), projection.privilege_shift),
    "wrong-loss": (projection, "Match", Stay, projection.causal_projection),
    "arithmetic-for-geometric": (projection, "geometric_barycenter", unweighted, projection.forward_and_reverse),
    "fewer-students": (transfer, "expected_reward", lambda *a: 0.25, transfer.no_transfer),
    "value-mean": (process, "barycenter", unweighted, transfer.value_alignment),
    "branch-mean": (transfer, "barycenter", unweighted, transfer.outcome_branches),
    "ideal-branch": (transfer, "keep_correct", lambda p: p, transfer.outcome_branches),
    "margin-optimistic": (transfer, "_delta_plus", lambda cell: 0.0, transfer.outcome_margin),
    "pinsker-too-small": (transfer, "kl", lambda p, q: 0.5 * kl(p, q), transfer.outcome_margin),
    "hybrid": (process.Process, "hybrid_continuation", first_only, transfer.compatibility),
    "interpolation": (transfer, "mix", lambda a, b, e: process.mix(a, b, 2 * e), transfer.local_improvement),
    "occupancy": (transfer, "occupancy", lambda p: [np.ones(len(s)) for s in p], transfer.local_improvement),
    "clip-mode": (clipping, "Match", Whole, clipping.safe_region),
    "floor": (clipping, "clipping_floor", lambda p, tau: p * np.exp(-2 * tau / p), clipping.safe_region),
    "no-clip": (clipping, "Match", lambda tau: Match(), clipping.counter_example),
    "correct-tv": (clipping, "tv", lambda p, q: np.full(len(q), 1.0), clipping.correct_branch),
    "sampler-no-retry": (sampler, "adaptive", no_retry, adaptive.adaptive_groups),
    "group-short": (adaptive, "_fixed", short_group, adaptive.fixed_groups),
    "controller-stuck": (sampler, "adaptive", stuck, adaptive.controlled),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, monkeypatch):
    where, attribute, fault, group = FAULTS[name]
    monkeypatch.setattr(where, attribute, fault)
    monkeypatch.setattr(transfer, "HORIZONS", range(2, 5))
    assert not all(c.ok for c in group(0))


def test_restricted_families_need_the_projected_target(monkeypatch):
    monkeypatch.setattr(process, "barycenter", lambda q, w: np.asarray(q)[0])
    assert not all(c.ok for c in projection.restricted_projection(0))


def test_compare_reports_the_worst_instance():
    c = compare("l", "s", "=", [([1.0, 2.0], [1.0, 2.5]), (3.0, 3.0)])
    assert (c.left, c.right, c.residual, c.instances) == (2.0, 2.5, 0.2, 3)
    c = compare("l", "s", ">=", [(1.0, 0.0), (1.0, 0.75), (2.0, 0.0)])
    assert (c.left, c.right, c.residual, c.ok) == (1.0, 0.75, 0.0, True)
    c = compare("l", "s", "<=", [(1.0, 0.75), (0.0, 1.0)])
    assert (c.residual, c.ok) == (0.25, False)
    assert compare("l", "s", ">=", [(0.0, 1e-7)]).residual == 1e-7
    assert compare("l", "s", "=", [(1e6, 1e6 + 1)]).residual == pytest.approx(1e-6)


@pytest.mark.parametrize("side", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("relation", ["=", ">=", "<="])
def test_a_side_that_is_no_number_fails(side, relation):
    assert not compare("l", "s", relation, [(side, side), (1.0, 1.0)]).ok


def test_nothing_compared_is_an_error():
    with pytest.raises(ValueError, match="nothing to compare"):
        compare("l", "s", "=", [])


def test_a_searched_side_has_its_own_limit():
    assert compare("l", "s", "=", [(1.0, 1.0 + 1e-7)], exact=False).ok
    assert not compare("l", "s", "=", [(1.0, 1.0 + 1e-7)]).ok
    assert check.EXACT <= 1e-9


def parsed(*words):
    parser = argparse.ArgumentParser()
    arguments.theory(parser)
    return parser.parse_args(words)


def screen(rows, width=80):
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        command.show(console, rows)
    return captured.get()


@pytest.mark.slow
def test_the_table_fits_80_columns(found):
    text = screen(found)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.strip() in LABELS for line in lines) == len(LABELS)
    assert "…" not in text
    for c in found:
        assert f"{c.left:#.4g}" in text
        assert c.statement.split(" ")[0] in text
    assert "5.892" in text
    assert "-0.1800" in text
    assert f"{len(found)} statements, largest residual" in text


@pytest.mark.slow
def test_the_command_exits_1_when_a_statement_does_not_hold(found, monkeypatch, capsys):
    monkeypatch.setattr(checks, "checks", lambda seed: found)
    assert commands.theory(parsed()) == 0
    bad = Check("two is three [really]", "prop:x", 2.0, math.inf, "=", math.inf, True)
    monkeypatch.setattr(checks, "checks", lambda seed: [*found, bad])
    capsys.readouterr()
    assert commands.theory(parsed()) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "does not hold: prop:x: two is three [really]" in out
    assert "1 do not hold" in out


@pytest.mark.slow
def test_json_holds_every_statement_and_only_numbers(found, monkeypatch, capsys):
    bad = Check("s", "prop:x", 2.0, math.nan, "=", math.inf, True)
    asked = []
    monkeypatch.setattr(checks, "checks", lambda seed: asked.append(seed) or [*found, bad])
    assert commands.theory(parsed("--json", "--seed", "3")) == 1
    out = capsys.readouterr().out
    assert "NaN" not in out
    assert "Infinity" not in out
    data = json.loads(out)
    assert asked == [3]
    assert (data["seed"], data["ok"], len(data["statements"])) == (3, False, len(found) + 1)
    first, last = data["statements"][0], data["statements"][-1]
    assert first["left"] == found[0].left
    assert first["ok"] is True
    assert (last["right"], last["residual"], last["ok"]) == (None, None, False)
