"""Forks: which positions they are, what the log says of them, and the remedy's exact gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from naive import clipped_kl, logp, perturb
from rounding import assert_rounding

from past_opsd.core import config
from past_opsd.core.losses import Match
from past_opsd.core.nouns import Forks, Term, View
from past_opsd.learner import Log, forks
from past_opsd.policy import fused
from past_opsd.run.train import Session, session

PROMPT, HINT = (1, 5, 7, 2), (1, 5, 7, 2, 9, 9)
PATHS = [((6, 7, 8, 4, 11, 12, 6), 0.7), ((4, 9, 3, 8, 8), 0.2), ((10,), 0.1)]
TAU, TEMPERATURE = 0.3, 1.3


def terms(how: Forks | None) -> list[Term]:
    live, frozen = View("student", PROMPT), View("teacher", HINT)
    return [Term("distill", live, frozen, y, Match(TAU), weight, TEMPERATURE, how) for y, weight in PATHS]


def at(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logprobs / TEMPERATURE, -1)


def naive(parts: Session, how: Forks | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum, one position after the other, and its gradient by autograd through the whole model."""
    total = torch.zeros(())
    for tokens, weight in PATHS:
        q = at(logp(parts.model, "student", PROMPT, tokens, grad=True))
        p = at(logp(parts.model, "teacher", HINT, tokens, grad=False))
        entropy = [-float((row.exp() * row).sum()) for row in q.detach()]
        count = 0 if how is None else math.ceil(how.share * len(tokens) - 1e-9)
        chosen = set(sorted(range(len(tokens)), key=lambda t: -entropy[t])[:count])
        for t, value in enumerate(clipped_kl(p, q, TAU)):
            total = total + weight / len(tokens) * (how.weight if how and t in chosen else 1.0) * value
    parameters = list(parts.model.parameters("student").values())
    return total.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)])


@pytest.mark.parametrize("how", [None, Forks(0.2, 0.0), Forks(0.5, 0.25), Forks(0.3, 1.0)], ids=str)
@pytest.mark.parametrize("implementation", ["fused", "chunked"])
def test_the_gradient_is_the_one_of_a_naive_writing(small_recipe, how: Forks | None, implementation: str):
    with session(small_recipe("embedded/past", f"learner.implementation='{implementation}'")) as parts:
        perturb(parts, "student", "teacher")
        want_value, want = naive(parts, how)
        value, gradient = parts.learner.gradient("student", terms(how))
        assert_rounding(gradient, want, float(want.abs().max()))
        assert value == pytest.approx(float(want_value), rel=1e-4)
        if how is not None and how.weight < 1:
            other, _ = parts.learner.gradient("student", terms(None))
            assert abs(other - value) > 0.01 * abs(other), "the remedy changed nothing"


@pytest.mark.parametrize("budget", [16, 64])
def test_micro_batches_do_not_change_which_positions_are_forks(small_recipe, budget: int):
    found = []
    for tokens in (16384, budget):
        with session(small_recipe("embedded/past", f"learner.token_budget={tokens}")) as parts:
            perturb(parts, "student", "teacher")
            found.append(parts.learner.gradient("student", terms(Forks(0.4, 0.0)))[1])
    assert_rounding(found[1], found[0], float(found[0].abs().max()))


def test_the_highest_of_each_sequence_and_the_earlier_of_equals():
    entropy = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.0, 0.5, 0.5, 0.7])
    found = forks.highest(entropy, [5, 2, 1], [0.4, 0.5, 0.0])
    assert found.nonzero().flatten().tolist() == [1, 3, 5]
    assert forks.highest(entropy, [8], [0.2]).sum() == 2  # rounded up
    assert forks.weights(entropy, [5, 3], [Forks(0.2, 0.25), None]).tolist() == [1, 0.25, 1, 1, 1, 1, 1, 1]


def test_the_log_says_where_the_change_lands():
    """Constructed: all of the KL at the one fork of the first response, at the quiet positions of the second."""
    entropy = torch.tensor([2.0, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.6, 0.0, 0.0])
    kl = torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.5, 0.0])
    zeros = torch.zeros(10)
    result = fused.Result(zeros[:, None], [kl], {"entropy": entropy}, [{"kl": kl, "clipped": zeros, "removed": zeros}])
    log = Log()
    log.add([5, 5], {"distill": fused.Job(Match(), torch.full((10,), 0.1))}, result, {"distill": [0, 0]})
    found = log.summary()
    assert found["distill/fork_kl"] == pytest.approx(2.5)
    assert found["distill/rest_kl"] == pytest.approx(0.125)
    assert found["distill/fork_share"] == pytest.approx(5 / 6)
    assert found["distill/fork_entropy"] == pytest.approx(1.3)
    assert found["distill/fork_count"] == pytest.approx(1.0)
    assert found["distill/fork_rate"] == pytest.approx(0.2)
    whole, half = Log(), Log()
    half.add([5, 5], {"distill": fused.Job(Match(), torch.full((10,), 0.1))}, result, {"distill": [0, 0]})
    for _ in range(2):
        whole.merge(half)
    assert whole.summary()["distill/fork_share"] == pytest.approx(5 / 6), "shares of two processes are not added"


def test_equal_views_have_no_share(past: Session):
    same = [replace(t, frozen=t.live, live=t.live) for t in terms(None)]
    metrics = past.learner.step("student", same)
    assert metrics["student/distill/fork_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["student/distill/fork_count"] >= 0


def test_options_say_what_a_term_does():
    past, opsd = config.load("embedded/past").method, config.load("embedded/opsd_forks_mask").method
    assert past.at_forks is None, "off by default"
    assert opsd.at_forks == Forks(0.2, 0.0)
    assert config.load("embedded/forks_down_weight", ["method.fork_weight=0.5"]).method.at_forks == Forks(0.2, 0.5)
