from __future__ import annotations

from pathlib import Path

import naive
import pytest
import torch
from rounding import follow

from past_opsd.core.losses import GeneralizedJSD, Match
from past_opsd.core.nouns import PastError, View
from past_opsd.run.train import session


def test_the_teacher_is_another_model_that_reads_what_the_student_reads(small_recipe):
    with session(small_recipe("embedded/opd")) as parts:
        batch = parts.loop.cycle(0).batch
        for term, a in zip(parts.loop.method.student_terms(batch), batch.attempts, strict=True):
            assert term.frozen == View("expert", parts.loop.prompts.student(a.problem))
            assert term.loss == Match(1.0)
        assert parts.learner.steps == {"student": 1, "teacher": 0}
    with session(small_recipe("embedded/opd", "method.beta=0.5")) as parts:
        assert parts.loop.method.student_terms(batch)[0].loss == GeneralizedJSD(0.5, 1.0)


def test_one_cycle_equals_an_independent_naive_implementation(small_recipe):
    recipe = small_recipe("embedded/opd", *follow("student"))
    with session(recipe) as mine, session(recipe) as other:
        batch = mine.loop.cycle(0).batch
        losses = []
        for a in batch.attempts:
            ids = torch.tensor([a.view.prompt + a.response.tokens])
            with torch.no_grad():
                logits = other.model.expert.network(input_ids=ids).logits[0, len(a.view.prompt) - 1 : -1]
            live = naive.logp(other.model, "student", a.view.prompt, a.response.tokens, grad=True)
            losses.append(naive.clipped_kl(logits.log_softmax(-1), live, 1.0).mean())
        moved = naive.adamw_step(other.model, "student", torch.stack(losses).mean())
        naive.assert_same(mine, other, moved)


def test_without_an_expert_it_says_what_to_set(small_recipe):
    recipe = small_recipe("embedded/past", "method.name='opd'")
    with session(recipe) as parts, pytest.raises(PastError, match=r"set model\.expert"):
        parts.loop.cycle(0)


def test_an_expert_with_another_vocabulary_is_refused(small_recipe, tmp_path: Path):
    import shutil

    from past_opsd.tasks import embedded

    shutil.copytree(embedded.model_path(), tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"+2"', '"+4"'), encoding="utf-8")
    with (
        pytest.raises(PastError, match="has another vocabulary"),
        session(small_recipe("embedded/opd", f"model.expert='{tmp_path / 'other'}'")),
    ):
        pass


def test_the_expert_is_part_of_a_runs_identity(small_recipe):
    with session(small_recipe("embedded/opd")) as with_expert, session(small_recipe("embedded/past")) as without:
        assert with_expert.identity["expert"].startswith("embedded-expert ")
        assert without.identity["expert"] == "none"
