from __future__ import annotations

import naive
import pytest
import torch
from rounding import follow

from past_opsd.core import config
from past_opsd.core.losses import Match
from past_opsd.core.nouns import PastError, View
from past_opsd.run.train import Session, session

ADAPTERS = ("student", "teacher")


@pytest.mark.parametrize(
    ("recipe", "weights"), [("opsd", "base"), ("opsd_current", "student"), ("opsd_ema", "teacher")]
)
def test_the_teacher_reads_the_reference_with_the_chosen_weights(small_recipe, recipe: str, weights):
    with session(small_recipe(f"embedded/{recipe}")) as parts:
        cycle = parts.loop.cycle(0)
        terms = parts.loop.method.student_terms(cycle.batch)
        for term, a in zip(terms, cycle.batch.attempts, strict=True):
            assert term.frozen == View(weights, parts.loop.prompts.reference(a.problem))
            assert term.live == View("student", parts.loop.prompts.student(a.problem))
            assert term.tokens == a.response.tokens
            assert term.loss == Match(1.0)
        assert parts.loop.method.teacher_terms(cycle.batch, []) == []
        assert cycle.groups == []
        assert parts.learner.steps == {"student": 1, "teacher": 0}
        assert parts.model.versions["teacher"] == (1 if weights == "teacher" else 0)


@pytest.mark.parametrize(
    ("recipe", "weights"), [("opsd", "base"), ("opsd_current", "student"), ("opsd_ema", "teacher")]
)
def test_one_cycle_equals_an_independent_naive_implementation(small_recipe, recipe: str, weights: str):
    """Both adapters after the cycle; three different sets of weights, so that reading the wrong ones shows."""
    made = small_recipe(f"embedded/{recipe}", *follow("student"))
    with session(made) as mine, session(made) as other:
        naive.perturb(mine, *ADAPTERS)
        naive.perturb(other, *ADAPTERS)
        batch = mine.loop.cycle(0).batch
        targets = [(weights, other.loop.prompts.reference(a.problem)) for a in batch.attempts]
        loss = naive.student_loss(other.model, batch.attempts, targets, 1.0)
        moved = naive.adamw_step(other.model, "student", loss)
        if recipe == "opsd_ema":
            student, teacher = (list(other.model.parameters(a).values()) for a in ADAPTERS)
            with torch.no_grad():
                for average, parameter in zip(teacher, student, strict=True):
                    average.copy_(0.95 * average + 0.05 * parameter)
        for adapter in ADAPTERS:
            naive.assert_same(mine, other, moved, adapter)


def values(parts: Session, adapter) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parts.model.parameters(adapter).values()]


def test_the_average_starts_at_the_student(small_recipe):
    """Fresh adapters share no A: averaging factors across them would multiply one's B with the other's A."""
    with session(small_recipe("embedded/opsd_ema")) as parts:
        before = values(parts, "student")
        assert any(not torch.equal(s, t) for s, t in zip(before, values(parts, "teacher"), strict=True))
        parts.loop.prepare()
        assert all(torch.equal(s, t) for s, t in zip(before, values(parts, "teacher"), strict=True))
        assert all(torch.equal(s, t) for s, t in zip(before, values(parts, "student"), strict=True))


def test_an_average_without_memory_is_the_current_student(small_recipe):
    found = []
    for overrides in (["method.teacher='current'"], ["method.teacher='ema'", "method.ema_decay=0.0"]):
        with session(small_recipe("embedded/opsd", *overrides)) as parts:
            parts.loop.prepare()
            for k in range(3):
                parts.loop.cycle(k)
            found.append(values(parts, "student"))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_three_teachers_part_ways(small_recipe):
    """The first cycle is the same for all, since all start as the initial policy; from the second on they differ."""
    after: dict[str, list[list[torch.Tensor]]] = {}
    for kind in ("base", "current", "ema"):
        made = small_recipe("embedded/opsd", f"method.teacher='{kind}'", "method.ema_decay=0.5")
        with session(made) as parts:
            parts.loop.prepare()
            after[kind] = []
            for k in range(3):
                parts.loop.cycle(k)
                after[kind].append(values(parts, "student"))
    for a, b in (("base", "current"), ("base", "ema"), ("current", "ema")):
        for k, same in ((0, True), (2, False)):
            pairs = zip(after[a][k], after[b][k], strict=True)
            assert all(torch.allclose(x, y, rtol=0, atol=1e-6) for x, y in pairs) == same, (a, b, k)


def test_an_impossible_decay_is_told():
    with pytest.raises(PastError, match=r"method\.ema_decay"):
        config.load("embedded/opsd_ema", ["method.ema_decay=1.0"])
