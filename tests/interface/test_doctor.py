from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from past_opsd.core import config
from past_opsd.core.losses import Divergence, Match, Reinforce, Stay
from past_opsd.core.nouns import Problem, Verdict, View, derive_seed
from past_opsd.core.prompts import Prompts
from past_opsd.interface import checks, doctor, exact
from past_opsd.interface.cli import main
from past_opsd.methods import past
from past_opsd.methods.past import Past
from past_opsd.policy import fused
from past_opsd.policy.pretrained import load_tokenizer
from past_opsd.rollout.engines import _draw
from past_opsd.run import evaluate
from past_opsd.run.train import Session


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out


@pytest.mark.slow
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
    code, out = lines(capsys, "paper/past", "--dry", "--repeats", "1")
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
    monkeypatch.setattr(doctor, "dry", lambda recipe, repeats, watch: [])
    _, out = lines(capsys, "paper/past", "--dry", "--repeats", "1")
    assert "will NOT fit" in out
    assert "learner.token_budget" in out


@pytest.fixture(scope="module")
def perturbed() -> Iterator[Session]:
    torch.set_num_threads(1)
    with doctor.session(doctor.small(config.load("embedded/past"))) as parts:
        doctor.perturb(parts)
        yield parts


@pytest.fixture
def pair(perturbed: Session) -> tuple[Problem, Problem]:
    first, second = checks.choose(perturbed.loop.problems, 2)
    return first, second


def numeric(parts: Session) -> list[int]:
    """Repeats of the loss and of the gradient that passed, of one."""
    head = parts.model.head
    size = exact.Size(head.shape[1], head.shape[0], head.dtype, head.device)
    return [row.passed for row in checks.numerics(parts, size, 1, checks.Watch())]


THINKS = "{%- if enable_thinking -%}{{- '=' -}}{%- endif -%}"


@pytest.mark.parametrize("ignoring", [False, True])
def test_a_template_that_ignores_the_thinking_mode_is_found(ignoring: bool):
    recipe = config.load(
        "embedded/past",
        [f"prompts.{role}_kwargs={{enable_thinking={value}}}" for role, value in MODES.items()],
    )
    tokenizer = load_tokenizer(recipe.model)
    if not ignoring:
        tokenizer.chat_template += THINKS
    row = checks.prompt_modes(recipe, tokenizer, [checks.placeholder(i) for i in range(2)], checks.Watch())
    assert row.passed == (0 if ignoring else 2), row.note
    assert ("ignores enable_thinking = false of prompts.student_kwargs" in row.note) is ignoring


MODES = {"student": "false", "teacher": "true", "evaluation": "true"}


def evaluated(parts: Session, *overrides: str) -> checks.Row:
    recipe = config.load("embedded/past", list(overrides))
    return checks.evaluation_protocol(parts, recipe, 1, checks.Watch(), 4)


def test_the_evaluation_is_the_one_that_the_recipe_states(perturbed: Session):
    for settings in ([], ["evaluation.sampling.temperature=0.7", "evaluation.sampling.top_k=3", "run.seed=29"]):
        row = evaluated(perturbed, *settings)
        assert row.passed == len(row.observed) == 3, row.note


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampling": {"temperature": 0.3}}, "temperature = 0.3, and the recipe states 1"),
        ({"sampling": {"top_k": 2}}, "top_k = 2, and the recipe states 0"),
        ({"sampling": {"max_new_tokens": 3}}, "max_new_tokens = 3"),
        ({"samples": 3, "pass_k": [1]}, "draws 3 responses of the student to its evaluation prompt, not 12"),
    ],
)
def test_an_evaluation_that_does_something_else_is_found(
    perturbed: Session, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
):
    real = evaluate.evaluate

    def other(lab, prompts, task, section, **rest):
        inner = {"sampling": section.sampling.model_copy(update=change["sampling"])} if "sampling" in change else change
        return real(lab, prompts, task, section.model_copy(update=inner), **rest)

    monkeypatch.setattr(evaluate, "evaluate", other)
    row = evaluated(perturbed)
    assert row.passed == 0
    assert said in row.note


def test_an_engine_that_samples_at_another_temperature_is_found(perturbed: Session, monkeypatch: pytest.MonkeyPatch):
    real = _draw.choose

    def colder(logits, uniforms, sampling):
        return real(logits, uniforms, sampling.model_copy(update={"temperature": 0.3}))

    monkeypatch.setattr(_draw, "choose", colder)
    row = evaluated(perturbed)
    assert row.passed == 0
    assert "samples from another distribution" in row.note


def test_draws_of_other_seeds_and_a_truncated_response_that_counts_are_found(
    perturbed: Session, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluate, "derive_seed", lambda *parts: derive_seed(*parts, "again"))
    generous = [Verdict(True, "correct")]
    monkeypatch.setattr(type(perturbed.loop.lab.verifier), "verify", lambda self, items: generous * len(items))
    row = evaluated(perturbed)
    assert row.passed == 0
    assert "are not those of its seeds" in row.note
    assert "cut at the token limit counts as right" in row.note


def test_held_out_problems_that_are_trained_on_or_do_not_fit_are_found(perturbed: Session):
    leaking = replace(perturbed, loop=replace(perturbed.loop, problems=perturbed.task.evaluation()["chain3"]))
    row = evaluated(leaking)
    assert (row.passed, len(row.observed)) == (2, 3)
    assert "is also trained on" in row.note
    assert "do not fit the context of 256" in evaluated(perturbed, "evaluation.sampling.max_new_tokens=250").note


def test_recipes_of_the_paper_evaluate_as_the_paper_does():
    for name in config.shipped():
        if name.startswith(checks.PAPER):
            assert checks.paper_differences(config.load(name)) == [], name
    changes = ["evaluation.samples=3", "evaluation.pass_k=[1]", "evaluation.sampling.temperature=0.3"]
    said = "; ".join(checks.paper_differences(config.load("paper/past", changes)))
    assert "evaluation.samples: 3, the paper has 12" in said
    assert "temperature: 0.3, the paper has 1.0" in said


def test_a_row_that_tells_its_answer_is_found(perturbed: Session, pair, monkeypatch: pytest.MonkeyPatch):
    first, second = pair
    recipe = config.load("embedded/past")
    assert checks.training_protocol(perturbed, recipe, [first, second], checks.Watch()).passed == 2
    leaky = replace(first, text=first.text + f"\\boxed{{{first.answer}}}")
    row = checks.training_protocol(perturbed, recipe, [leaky, second], checks.Watch())
    assert row.passed == 1
    assert f"problem {first.id}: the text of the problem tells its answer" in row.note
    real = Prompts.student
    monkeypatch.setattr(Prompts, "student", lambda self, p: real(self, p) + self.encode(p.solution))
    row = checks.training_protocol(perturbed, recipe, [first, second], checks.Watch())
    assert row.passed == 0
    assert "holds the reference solution" in row.note
    monkeypatch.setattr(Prompts, "student", real)
    monkeypatch.setattr(
        Past, "teacher_view", lambda self, attempt: View("teacher", real(self._prompts, attempt.problem))
    )
    row = checks.training_protocol(perturbed, recipe, [first, second], checks.Watch())
    assert "does not hold the student's response" in row.note


@pytest.mark.parametrize(
    ("text", "tells"),
    [("What is 6 * 7?", False), ("... The answer is 42.", True), ("Answer: $42$", True), ("the answer is 421", False)],
)
def test_what_tells_an_answer(text: str, tells: bool):
    assert checks.told(Problem("p", text, "", "42"), text) is tells


def test_an_outcome_in_the_teachers_prompt_is_found(perturbed: Session, pair, monkeypatch: pytest.MonkeyPatch):
    assert checks.outcome_is_hidden(perturbed, *pair)
    real = Past.teacher_view

    def leaking(self, attempt):
        view = real(self, attempt)
        return type(view)(view.adapter, (*view.prompt, int(attempt.verdict.correct)))

    monkeypatch.setattr(Past, "teacher_view", leaking)
    assert not checks.outcome_is_hidden(perturbed, *pair)


def test_a_misaligned_view_is_found(perturbed: Session, pair, monkeypatch: pytest.MonkeyPatch):
    assert checks.equal_contexts(perturbed, *pair)
    real = checks.match
    monkeypatch.setattr(checks, "match", lambda a, view: real(a, type(view)(view.adapter, view.prompt[1:])))
    assert not checks.equal_contexts(perturbed, *pair)


OBJECTIVES = ["embedded/past", "embedded/jsd", "embedded/kl_ce", "embedded/forks_mask", "embedded/clip_failed"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_recipes_own_objective_is_its_definition(perturbed: Session, pair, name: str):
    """Its tau, temperature, weights and forks, in the gradient of both phases."""
    recipe = doctor.small(config.load(name, ["method.temperature=1.2", "rollout.teacher.temperature=0.8"]))
    method = config.plugin("method", "past").build(recipe.method, perturbed.loop.prompts, recipe.rollout)
    parts = replace(perturbed, recipe=recipe, loop=replace(perturbed.loop, method=method))
    assert numeric(parts) == [1, 1]
    assert all(holds(parts, *pair) for holds in (checks.as_stated, checks.rewards_success))


def unclipped(self: Match, *args: Any) -> Any:
    return Divergence.add_gradient(replace(self, tau=math.inf), *args)


def turned(self: Reinforce, live: Any, frozen: Any) -> Any:
    value, slope = Reinforce.__dict__["_real"](self, live, frozen)
    return value, -slope


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "an unclipped loss": (Match, "add_gradient", unclipped),
    "a failed-path KL the other way": (Stay, "entries", Match.entries),
    "a policy gradient with its sign turned": (Reinforce, "slope", turned),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_loss_is_found(perturbed: Session, monkeypatch: pytest.MonkeyPatch, fault: str):
    owner, name, planted = FAULTS[fault]
    monkeypatch.setattr(Reinforce, "_real", Reinforce.slope, raising=False)
    monkeypatch.setattr(owner, name, planted)
    loss, gradient = numeric(perturbed)
    assert gradient == 0 or loss == 0


def test_a_policy_gradient_that_punishes_success_is_found(perturbed: Session, pair, monkeypatch: pytest.MonkeyPatch):
    assert checks.rewards_success(perturbed, *pair)
    real = past.group_advantages
    monkeypatch.setattr(past, "group_advantages", lambda outcomes, eps: [-a for a in real(outcomes, eps)])
    assert not checks.rewards_success(perturbed, *pair)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("_matching", lambda self, tau, sampled: Match()),
        ("_stay", lambda self, c, group: replace(Past.__dict__["_real"](self, c, group), loss=Match())),
    ],
)
def test_a_method_whose_terms_are_not_the_stated_ones_is_found(
    perturbed: Session, pair, monkeypatch: pytest.MonkeyPatch, name: str, planted: Callable[..., Any]
):
    assert checks.as_stated(perturbed, *pair)
    monkeypatch.setattr(Past, "_real", Past._stay, raising=False)
    monkeypatch.setattr(Past, name, planted)
    assert not checks.as_stated(perturbed, *pair)


def test_a_nan_in_the_logits_is_found(perturbed: Session, monkeypatch: pytest.MonkeyPatch):
    real = fused._matmul

    def planted(hidden, head, out):
        real(hidden, head, out)
        out[0, 0] = math.nan

    monkeypatch.setattr(fused, "_matmul", planted)
    assert numeric(perturbed) == [0, 0]


def test_a_wrong_gradient_and_a_wrong_temperature_are_found(perturbed: Session, monkeypatch: pytest.MonkeyPatch):
    assert numeric(perturbed) == [1, 1]
    real = fused.run

    def wrong(implementation, *args, **kwargs):
        result = real(implementation, *args, **kwargs)
        result.grad[::2] *= -1
        return result

    monkeypatch.setattr(fused, "run", wrong)
    assert numeric(perturbed) == [1, 0]
    monkeypatch.setattr(fused, "run", lambda *args, **kwargs: real(*args, **kwargs | {"temperature": 1.3}))
    assert numeric(perturbed) == [0, 0]


@pytest.mark.slow
def test_a_resume_that_loses_its_streams_and_an_implementation_that_trains_otherwise_are_found(
    monkeypatch: pytest.MonkeyPatch,
):
    real = fused.run

    def turned_around(implementation, *args, **kwargs):
        result = real(implementation, *args, **kwargs)
        if implementation == "fused":
            result.grad.neg_()
        return result

    monkeypatch.setattr(fused, "run", turned_around)
    monkeypatch.setattr("past_opsd.run.checkpoint.restore_rng", lambda state: None)
    ended, resumed = doctor.runs(config.load("embedded/past"), 1, checks.Watch())
    assert (ended.name, ended.passed) == ("End-to-end paired difference", 0)
    assert (resumed.name, resumed.passed) == ("Resume and RNG recovery", 0)


@pytest.mark.slow
def test_a_resume_that_is_not_exact_is_found(monkeypatch: pytest.MonkeyPatch):
    real = doctor.checkpoint.restore

    def inexact(path, model, learner, state):
        state = real(path, model, learner, state)
        model.perturb(seed=1, scale=1e-6)
        return state

    monkeypatch.setattr("past_opsd.run.checkpoint.restore", inexact)
    ended, resumed = doctor.runs(config.load("embedded/past"), 1, checks.Watch())
    assert (ended.passed, resumed.passed) == (1, 0)


def test_a_large_model_on_a_cpu_is_checked_on_less(monkeypatch: pytest.MonkeyPatch):
    recipe = config.load("embedded/past")
    assert doctor.small(recipe).rollout.problems_per_cycle == 4
    monkeypatch.setattr(doctor, "SLOW", 1000)
    assert doctor.small(recipe).rollout.problems_per_cycle == 1


def test_it_says_what_it_is_doing(capsys):
    assert list(checks.Watch().each("Some check", range(3))) == [0, 1, 2]
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
@pytest.mark.slow
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
    assert made.room(checks.placeholder(1)) < 256


@pytest.mark.slow
def test_the_table_for_a_method_with_a_phase_before_the_first_cycle(capsys):
    recipe = doctor.embedded_copy(config.load("paper/sd_zero"))
    assert recipe.method.revise_correct, "what the method does is the recipe's own"
    assert [row.passed for row in doctor.runs(recipe, 1, checks.Watch())] == [1, 1]
