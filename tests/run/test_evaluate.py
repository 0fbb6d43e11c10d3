from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Quiet

from past_opsd.core.nouns import PastError
from past_opsd.run.evaluate import Evaluation, evaluate
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import Session, session, train


def test_outcomes_and_summary(past: Session, tmp_path: Path):
    evaluation = past.evaluate(0)
    assert set(evaluation.tasks) == {"chain3", "chain4", "chain5"}
    for name, outcomes in evaluation.outcomes().items():
        assert outcomes.shape == (4, 4)
        assert sum(evaluation.tasks[name].reasons.values()) == 16
        assert evaluation.tasks[name].reasons.get("correct", 0) == outcomes.sum()
    summary = evaluation.summary([1, 4])
    expected = np.mean([o.mean() for o in evaluation.outcomes().values()])
    assert summary["macro/avg@4"] == pytest.approx(expected)
    assert summary["macro/pass@1"] == pytest.approx(expected)
    assert summary["macro/pass@4"] >= summary["macro/pass@1"]
    evaluation.save(tmp_path / "e.json")
    assert Evaluation.load(tmp_path / "e.json") == evaluation


def test_the_names_of_held_out_sets_are_free(past: Session):
    evaluation = past.evaluate(0)
    renamed = replace(evaluation, tasks={f"maths/{name}": result for name, result in evaluation.tasks.items()})
    mine, plain = renamed.summary([1, 4]), evaluation.summary([1, 4])
    assert {k: v for k, v in mine.items() if k.startswith("macro/")} == {
        k: v for k, v in plain.items() if k.startswith("macro/")
    }
    assert mine["maths/chain3/avg@4"] == plain["chain3/avg@4"]


def test_methods_of_one_seed_share_draws_and_other_seeds_draw_anew(small_recipe):
    """Before any update two methods give the same outcomes, so they pair; a second seed is a second sample."""
    outcomes = []
    for name, seed in (("embedded/past", 17), ("embedded/opsd", 17), ("embedded/opsd", 29)):
        with session(small_recipe(name, f"run.seed={seed}")) as parts:
            outcomes.append(parts.evaluate(0))
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_answers_are_what_the_verifier_compared(past: Session):
    evaluation = past.evaluate(0)
    problems = {name: {p.id: p.answer for p in ps} for name, ps in past.task.evaluation().items()}
    for name, result in evaluation.tasks.items():
        for problem, answers, outcomes in zip(result.problems, result.answers, result.outcomes, strict=True):
            assert all((a == problems[name][problem]) == bool(o) for a, o in zip(answers, outcomes, strict=True))


def test_problems_that_do_not_fit_are_counted_or_refused(past: Session, small_recipe):
    sets = past.task.evaluation()
    mixed = replace(past.task, evaluation_sets={"mixed": (*sets["chain3"], *sets["chain5"])})
    limit = len(past.loop.prompts.evaluation(sets["chain3"][0])) + past.recipe.evaluation.sampling.max_new_tokens
    arguments = (past.loop.lab, past.loop.prompts, mixed, past.recipe.evaluation)
    fixed = {"adapter": "student", "versions": past.model.versions, "seed": 0, "step": 0}
    evaluation = evaluate(*arguments, **fixed, max_context=limit)
    assert evaluation.dropped == len(sets["chain5"])
    assert evaluation.tasks["mixed"].problems == [p.id for p in sets["chain3"]]
    with pytest.raises(PastError, match="no room"):
        evaluate(*arguments, **fixed, max_context=limit - 1)


def test_a_file_that_is_no_evaluation_is_told(tmp_path: Path):
    (tmp_path / "e.json").write_text('{"step": 1}')
    with pytest.raises(PastError, match="not an evaluation"):
        Evaluation.load(tmp_path / "e.json")


def test_runs_of_a_seed_share_the_scores_before_the_first_update(
    tmp_path: Path, small_recipe, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []
    own = Session.evaluate

    def counted(self: Session, step: int) -> Evaluation:
        made.append(f"{self.recipe.name} {step}")
        return own(self, step)

    monkeypatch.setattr(Session, "evaluate", counted)
    kept, short = tmp_path / "kept", ("run.cycles=1", "evaluation.at=[0.0, 1.0]")

    def run(place: str, name: str, *overrides: str, shared: bool = True) -> bytes:
        folder = tmp_path / place
        train(small_recipe(name, *short, *overrides), folder, False, Quiet(), untrained=kept if shared else None)
        assert len(RunFolder(folder).steps()) == 2
        return RunFolder(folder).evaluations.path(0).read_bytes()

    alone = run("alone", "embedded/past", shared=False)
    assert run("opsd", "embedded/opsd") == run("past", "embedded/past") == alone
    assert made == ["embedded/past 0", "embedded/past 1", "embedded/opsd 0", "embedded/opsd 1", "embedded/past 1"]
    last = [RunFolder(tmp_path / place).checkpoint(1) / "adapter_model.safetensors" for place in ("alone", "past")]
    assert last[0].read_bytes() == last[1].read_bytes()

    # Another seed, other sampling, or a student that has been trained before: scores of its own.
    for n, (name, *others) in enumerate(
        (
            ("embedded/past", "run.seed=29"),
            ("embedded/past", "evaluation.sampling.temperature=0.5"),
            ("embedded/sd_zero", "method.phase1_problems=24", "method.phase1_batch=8"),
        )
    ):
        made.clear()
        run(f"other{n}", name, *others)
        assert made == [f"{name} 0", f"{name} 1"]

    for file in kept.iterdir():
        file.write_text("{}")
    with pytest.raises(PastError, match=f"{kept}.*not an evaluation"):
        run("damaged", "embedded/past")
