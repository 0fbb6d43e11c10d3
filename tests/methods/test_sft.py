from __future__ import annotations

import naive
import pytest
import torch
from rounding import follow

from past_opsd.core import config
from past_opsd.core.losses import Imitate
from past_opsd.core.nouns import Batch, PastError, Problem, View
from past_opsd.run.train import session


def test_the_student_imitates_the_reference_and_its_end_under_its_own_prompt(small_recipe):
    with session(small_recipe("embedded/sft")) as parts:
        problems = tuple(parts.loop.take(0))
        terms = parts.loop.method.student_terms(Batch((), (), problems))
        tokenizer = parts.model.tokenizer
        assert len(terms) == 6
        for term, problem in zip(terms, problems, strict=True):
            assert (term.live, term.frozen) == (View("student", parts.loop.prompts.student(problem)), None)
            assert term.loss == Imitate()
            assert term.weight == pytest.approx(1 / 6)
            assert tokenizer.decode(list(term.tokens[:-1])) == problem.solution
            assert term.tokens[-1] == tokenizer.eos_token_id


def test_a_cycle_samples_nothing_and_moves_the_student_alone(small_recipe, monkeypatch: pytest.MonkeyPatch):
    with session(small_recipe("embedded/sft")) as parts:

        def sample(*args: object) -> None:
            raise AssertionError("SFT must not sample")

        monkeypatch.setattr(parts.loop.lab.engine, "sample", sample)
        cycle = parts.loop.cycle(0)
        assert (cycle.batch.attempts, cycle.groups, cycle.dropped) == ((), [], 0)
        assert cycle.batch.problems == tuple(parts.loop.take(0))
        assert parts.learner.steps == {"student": 1, "teacher": 0}
        assert parts.model.versions["teacher"] == 0


def test_a_problem_that_comes_twice_counts_twice(small_recipe):
    """An epoch's end and the next one's beginning may meet in one cycle."""
    with session(small_recipe("embedded/sft")) as parts:
        a, b = parts.loop.take(0)[:2]
        terms = parts.loop.method.student_terms(Batch((), (), (a, b, a)))
        assert sum(t.weight for t in terms if t.tokens == terms[0].tokens) == pytest.approx(2 / 3)


@pytest.mark.parametrize("reduction", ["sequence", "token"])
def test_one_cycle_equals_an_independent_naive_implementation(small_recipe, reduction: str):
    """Against the model library's own masked cross-entropy, one problem at a time."""
    recipe = small_recipe("embedded/sft", *follow("student"), f"learner.reduction='{reduction}'")
    with session(recipe) as mine, session(recipe) as other:
        model = other.model
        naive.perturb(mine, "student")
        naive.perturb(other, "student")
        losses, lengths = [], []
        model.activate("student")
        for parameter in model.parameters("student").values():
            parameter.requires_grad_(True)
        for problem in mine.loop.cycle(0).batch.problems:
            prompt, solution = other.loop.prompts.student(problem), encoded(model, problem)
            ids = torch.tensor([[*prompt, *solution]])
            labels = torch.tensor([[-100] * len(prompt) + solution])
            losses.append(model.peft(input_ids=ids, labels=labels).loss)
            lengths.append(len(solution))
        assert len(set(lengths)) > 1
        weights = torch.tensor([n / sum(lengths) if reduction == "token" else 1 / len(lengths) for n in lengths])
        moved = naive.adamw_step(model, "student", (weights * torch.stack(losses)).sum())
        naive.assert_same(mine, other, moved)


def encoded(model, problem: Problem) -> list[int]:
    return [*model.tokenizer.encode(problem.solution, add_special_tokens=False), model.tokenizer.eos_token_id]


def test_samples_per_problem_has_no_meaning():
    recipe = config.load("embedded/sft", ["rollout.samples_per_problem=8"])
    with pytest.raises(PastError, match=r"rollout\.samples_per_problem = 8 has no meaning for SFT"):
        config.plugin("method", "sft").build(recipe.method, None, recipe.rollout)
