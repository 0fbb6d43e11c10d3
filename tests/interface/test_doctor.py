from __future__ import annotations

import re
from pathlib import Path

import pytest

from past_opsd.core import config
from past_opsd.core.prompts import Prompts
from past_opsd.interface import doctor
from past_opsd.interface.cli import main
from past_opsd.methods.past import Past
from past_opsd.policy import fused
from past_opsd.policy.pretrained import load_tokenizer


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out


def test_the_table_of_the_paper_for_the_embedded_recipe(capsys):
    code, out = lines(capsys, "embedded/past", "--repeats", "2")
    assert code == 0, out
    rows = dict(re.findall(r"│ (\S.*?)\s+│\s+(-?\d\.\d{6})", out))
    assert list(rows) == [
        "Model and thinking mode",
        "Training-data protocol",
        "Evaluation protocol",
        "Batch-loss absolute error",
        "Batch-gradient cosine",
        "End-to-end paired difference",
        "CPU semantic tests",
        "Resume and RNG recovery",
    ]
    assert rows["Resume and RNG recovery"] == "1.000000"
    assert float(rows["Batch-loss absolute error"]) < 1e-5
    assert float(rows["Batch-gradient cosine"]) > 0.9999
    assert "fits" in out
    assert all(len(line) <= 80 for line in out.partition("└")[0].splitlines())


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for a hub that may not be there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.slow
@pytest.mark.usefixtures("_offline")
def test_dry_needs_no_weights_and_says_what_it_could_not_check(capsys):
    code, out = lines(capsys, "paper/past", "--dry", "--repeats", "3")
    assert code == 0, out
    assert out.count("not checked") == 2
    assert "fused in bfloat16 against float32 autograd, at most 0.01" in out
    assert "needs the tokenizer" in out
    assert "1.72 B parameters" in out
    assert "38,912 new tokens" in out


@pytest.mark.slow
@pytest.mark.usefixtures("_offline")
def test_advice_where_it_will_not_fit(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.estimate, "available", lambda device: 4 << 30)
    _, out = lines(capsys, "paper/past", "--dry", "--repeats", "1")
    assert "will NOT fit" in out
    assert "learner.token_budget" in out


@pytest.fixture
def perturbed(small_recipe):
    with doctor.session(doctor.small(config.load("embedded/past"))) as parts:
        doctor.perturb(parts)
        yield parts


def test_an_outcome_in_the_teachers_prompt_is_found(perturbed, monkeypatch: pytest.MonkeyPatch):
    problem = perturbed.loop.problems[0]
    assert doctor._outcome_is_hidden(perturbed, problem)
    real = Past.teacher_view

    def leaking(self, attempt):
        view = real(self, attempt)
        return type(view)(view.adapter, (*view.prompt, int(attempt.verdict.correct)))

    monkeypatch.setattr(Past, "teacher_view", leaking)
    assert not doctor._outcome_is_hidden(perturbed, problem)


def test_a_misaligned_view_is_found(perturbed, monkeypatch: pytest.MonkeyPatch):
    problem = perturbed.loop.problems[0]
    assert doctor._equal_contexts(perturbed, problem)
    real = doctor._match
    monkeypatch.setattr(doctor, "_match", lambda a, view: real(a, type(view)(view.adapter, view.prompt[1:])))
    assert not doctor._equal_contexts(perturbed, problem)


def test_a_wrong_gradient_is_found(perturbed, monkeypatch: pytest.MonkeyPatch):
    assert [row.passed for row in doctor.numerics(perturbed, 2, doctor.Watch())] == [2, 2]
    real = fused.run

    def wrong(implementation, *args, **kwargs):
        result = real(implementation, *args, **kwargs)
        if implementation == "fused":
            result.grad[::2] *= -1
        return result

    monkeypatch.setattr(fused, "run", wrong)
    loss, gradient = doctor.numerics(perturbed, 2, doctor.Watch())
    assert (loss.passed, gradient.passed) == (2, 0)


@pytest.mark.slow
def test_a_resume_that_is_not_exact_is_found(monkeypatch: pytest.MonkeyPatch):
    recipe = config.load("embedded/past")
    row = doctor.runs(recipe, 1, doctor.Watch())[2]
    assert (row.name, row.passed) == ("Resume and RNG recovery", 1)
    real = doctor.checkpoint.restore

    def inexact(path, model, learner, state):
        state = real(path, model, learner, state)
        model.perturb(seed=1, scale=1e-6)
        return state

    monkeypatch.setattr("past_opsd.run.checkpoint.restore", inexact)
    assert doctor.runs(recipe, 1, doctor.Watch())[2].passed == 0


def test_a_large_model_on_a_cpu_is_checked_on_less(monkeypatch: pytest.MonkeyPatch):
    recipe = config.load("embedded/past")
    assert doctor.small(recipe).rollout.problems_per_cycle == 4
    monkeypatch.setattr(doctor, "SLOW", 1000)
    assert doctor.small(recipe).rollout.problems_per_cycle == 1


def test_it_says_what_it_is_doing(capsys):
    assert list(doctor.Watch().each("Some check", range(3))) == [0, 1, 2]
    assert "checked: Some check (3 in" in capsys.readouterr().err


def test_no_repeats_are_a_mistake(capsys):
    assert main(["doctor", "embedded/past", "--repeats", "0"]) == 2
    assert "--repeats is 0" in capsys.readouterr().err


OWN_METHOD = '''
"""Reverse KL to the reference-only teacher, with a required option and groups of responses."""
from pydantic import BaseModel

from past_opsd.core.losses import Stay
from past_opsd.methods import Method, distill, require_groups
from past_opsd.core.nouns import View, mean


class Options(BaseModel):
    temperature: float


def build(options, prompts, rollout):
    require_groups(rollout, "this method")
    return Reverse(options, prompts)


class Reverse(Method):
    def __init__(self, options, prompts):
        self._temperature, self._prompts = options.temperature, prompts

    def teacher_view(self, attempt):
        return View("base", self._prompts.reference(attempt.problem))

    def student_terms(self, batch):
        views = [(a, self.teacher_view(a)) for a in batch.attempts]
        return mean([distill(a, view, Stay(), self._temperature)] for a, view in views)
'''


@pytest.mark.usefixtures("_offline")
def test_dry_checks_a_method_of_ones_own(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ones_own").mkdir()
    (tmp_path / "ones_own" / "reverse.py").write_text(OWN_METHOD)
    (tmp_path / "mine.toml").write_text(
        'extends = "paper/opsd"\nname = "mine"\n[rollout]\nsamples_per_problem = 4\n'
        '[method]\nname = "ones_own.reverse"\ntemperature = 1.1\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out = lines(capsys, str(tmp_path / "mine.toml"), "--dry", "--repeats", "1")
    assert code == 0, out
    assert "Resume and RNG recovery: on the embedded model" in out
    copy = doctor.embedded_copy(config.load(tmp_path / "mine.toml"))
    assert (copy.method.name, copy.method.temperature) == ("ones_own.reverse", 1.1)
    assert (copy.model.path, copy.rollout.samples_per_problem) == ("embedded", 4)


@pytest.mark.parametrize("method", [m for m in config.known("method") if f"paper/{m}" in config.shipped()])
def test_every_method_of_the_paper_has_a_copy_that_can_be_built(method: str):
    """`--dry` runs it; words and lengths of the large model's recipe are not those of the embedded one."""
    recipe = config.load(f"paper/{method}")
    copy = doctor.small(doctor.embedded_copy(recipe))
    assert copy.method.name == recipe.method.name
    prompts = Prompts(load_tokenizer(copy.model), copy.prompts)
    made = config.plugin("method", copy.method.name).build(copy.method, prompts, copy.rollout)
    assert made.room(doctor._placeholder(1)) < 256


def test_the_table_for_a_method_with_a_phase_before_the_first_cycle(capsys):
    recipe = doctor.embedded_copy(config.load("paper/sd_zero"))
    assert recipe.method.revise_correct, "what the method does is the recipe's own"
    assert [row.passed for row in doctor.runs(recipe, 1, doctor.Watch())] == [1, 1, 1]
