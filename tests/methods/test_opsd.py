from __future__ import annotations

import naive
import torch

from past_opsd.losses import Match
from past_opsd.train import session
from past_opsd.types import View


def test_the_teacher_is_the_base_with_the_reference(small_recipe):
    with session(small_recipe("embedded/opsd")) as parts:
        cycle = parts.loop.cycle(0)
        terms = parts.loop.method.student_terms(cycle.batch)
        for term, a in zip(terms, cycle.batch.attempts, strict=True):
            assert term.frozen == View("base", parts.loop.prompts.reference(a.problem))
            assert term.live == View("student", parts.loop.prompts.student(a.problem))
            assert term.tokens == a.response.tokens
            assert term.loss == Match(1.0)
        assert parts.loop.method.teacher_terms(cycle.batch, []) == []
        assert cycle.draws == []
        assert parts.learner.steps == {"student": 1, "teacher": 0}
        assert parts.model.versions["teacher"] == 0


def test_one_cycle_equals_an_independent_naive_implementation(small_recipe):
    overrides = ["learner.student.eps=1.0", "learner.student.lr=1.0", "learner.student.max_grad_norm=1e9"]
    recipe = small_recipe("embedded/opsd", *overrides)
    with session(recipe) as mine, session(recipe) as other:
        batch = mine.loop.cycle(0).batch
        targets = [("base", other.loop.prompts.reference(a.problem)) for a in batch.attempts]
        loss = naive.student_loss(other.model, batch.attempts, targets, 1.0)
        parameters = other.model.parameters("student")
        grads = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for parameter, g in zip(parameters.values(), grads, strict=True):
                parameter.sub_(g / (g.abs() + 1.0))
        for name, value in parameters.items():
            torch.testing.assert_close(mine.model.parameters("student")[name], value, atol=2e-6, rtol=1e-3)
