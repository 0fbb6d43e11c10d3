"""The policy gradient's correction for an engine that computes otherwise than the trainer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from naive import exact_kl, logp, perturb
from rounding import CHAIN, EPS, assert_rounding

from past_opsd.core.losses import Reinforce, Stay
from past_opsd.core.nouns import Term, View
from past_opsd.learner import Learner
from past_opsd.run.train import Session, session

HINT, PLAIN = (1, 5, 7, 2, 9, 9), (1, 5, 2)
CAP, TEMPERATURE = 1.5, 1.3
PATHS = [((6, 7, 8, 4, 11), 1.5, 0.4), ((4, 9, 3), -0.7, 0.6)]
DRIFT = torch.tensor([0.0, 0.3, 0.2, 1.0, -0.1, 0.41, 0.4, -3.0])  # log 1.5 is 0.405


def softened(parts: Session, adapter: str, prompt: tuple[int, ...], tokens: tuple[int, ...], grad: bool):
    return torch.log_softmax(logp(parts.model, adapter, prompt, tokens, grad) / TEMPERATURE, -1)


def made(parts: Session) -> list[Term]:
    """Responses that an engine drew with log-probabilities of its own, `DRIFT` below the trainer's."""
    out, drift = [], DRIFT.tolist()
    for tokens, advantage, weight in PATHS:
        own = softened(parts, "teacher", HINT, tokens, False)[range(len(tokens)), tokens]
        sampled = tuple(float(value) - drift.pop(0) for value in own)
        view, loss = View("teacher", HINT), Reinforce(advantage)
        out.append(Term("reinforce", view, None, tokens, loss, weight, TEMPERATURE, sampled=sampled))
        out.append(Term("stay", view, View("student", PLAIN), tokens, Stay(), 0.05, TEMPERATURE))
    return out


def naive(parts: Session) -> tuple[float, torch.Tensor]:
    """Token by token, and the gradient by autograd through the whole model."""
    total, drift = torch.zeros(()), DRIFT.tolist()
    for tokens, advantage, weight in PATHS:
        q = softened(parts, "teacher", HINT, tokens, True)
        p = softened(parts, "student", PLAIN, tokens, False)
        for t, token in enumerate(tokens):
            factor = min(float(torch.tensor(drift.pop(0)).exp()), CAP)
            ratio = (q[t, token] - q[t, token].detach()).exp()
            total = total - weight / len(tokens) * factor * advantage * ratio
        total = total + 0.05 * exact_kl(q, p).mean()
    grads = torch.autograd.grad(total, list(parts.model.parameters("teacher").values()))
    return float(total.detach()), torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("implementation", ["fused", "chunked", "reference"])
def test_value_and_gradient_are_those_of_a_naive_writing(small_recipe, implementation: str):
    recipe = small_recipe(
        "embedded/past", f"learner.implementation='{implementation}'", f"learner.importance_cap={CAP}"
    )
    with session(recipe) as parts:
        perturb(parts, "student", "teacher")
        want_value, want = naive(parts)
        terms = made(parts)
        value, gradient = Learner(parts.model, recipe.learner, 10, drifts=True).gradient("teacher", terms)
        assert_rounding(gradient, want, float(want.abs().max()))
        assert value == pytest.approx(want_value, rel=1e-4)
        plain, other = parts.learner.gradient("teacher", terms)
        assert abs(plain - value) > 0.01
        assert float((other - gradient).abs().max()) > 0.01 * float(want.abs().max())


def test_the_log_has_the_mean_factor_and_what_the_cap_holds(past: Session):
    perturb(past, "student", "teacher")
    section = past.recipe.learner.model_copy(update={"importance_cap": CAP})
    learner = Learner(past.model, section, 10, drifts=True)
    metrics = learner.step("teacher", made(past))
    factor = DRIFT.exp().clamp(max=CAP)
    assert metrics["teacher/reinforce/importance"] == pytest.approx(float(factor[:5].mean() + factor[5:].mean()) / 2)
    assert metrics["teacher/reinforce/importance_capped"] == pytest.approx((1 / 5 + 1 / 3) / 2)
    assert "teacher/stay/importance" not in metrics


def test_the_embedded_engine_in_float32_is_not_corrected_by_a_bit(past: Session):
    perturb(past, "student", "teacher")
    terms = made(past)
    _, found = past.learner.gradient("teacher", terms)
    _, want = past.learner.gradient("teacher", [replace(t, sampled=()) for t in terms])
    assert torch.equal(found, want)
    off = past.recipe.learner.model_copy(update={"importance_cap": 0.0})
    assert torch.equal(Learner(past.model, off, 10, drifts=True).gradient("teacher", terms)[1], want)


@pytest.mark.parametrize(("recipe", "phase"), [("embedded/past", "teacher"), ("embedded/grpo", "student")])
def test_what_the_engine_reports_is_the_trainers_own_before_the_support_is_cut(small_recipe, recipe: str, phase: str):
    """A cycle with hot and cut sampling: in float32 every factor is 1 up to rounding, so the temperatures agree."""
    hot = ("temperature=1.4", "top_p=0.8")
    cut = [f"rollout.{role}.{setting}" for role in ("student", "teacher") for setting in hot]
    with session(small_recipe(recipe, *cut)) as parts:
        parts.loop.learner = Learner(parts.model, parts.recipe.learner, 10, drifts=True)
        metrics = parts.loop.cycle(0).metrics
        assert metrics[f"{phase}/reinforce/importance"] == pytest.approx(1.0, abs=CHAIN * EPS)
        assert metrics[f"{phase}/reinforce/importance_capped"] == 0.0


def test_bfloat16_is_corrected_also_on_the_trainers_own_weights(small_recipe):
    with session(small_recipe("embedded/grpo", "model.dtype='bfloat16'")) as parts:
        found = parts.loop.cycle(0).metrics["student/reinforce/importance"]
        assert found != 1.0
        assert found == pytest.approx(1.0, abs=0.3)
