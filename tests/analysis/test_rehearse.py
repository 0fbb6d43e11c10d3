from __future__ import annotations

import json
from pathlib import Path

import pytest

from past_opsd.analysis import rehearse, stand_ins, suite
from past_opsd.analysis.rehearse import Rehearsed
from past_opsd.core import config
from past_opsd.interface import cli
from past_opsd.policy import templates
from past_opsd.run.resume import changes

TWICE = "sampling"  # rehearsed by the command itself, below
SUITES = [name for name in suite.suites("paper") if name != TWICE]
DONE: dict[str, Rehearsed] = {}
# All that may differ: sizes, what is not here, and keys that count cycles.
SCALED = {
    *("run.cycles", "model.path", "task.train", "evaluation.samples", "evaluation.pass_k"),
    *(f"task.evaluation.{name}" for name in ("aime24", "aime25", "hmmt25")),
    *(f"{role}.max_new_tokens" for role in ("rollout.student", "rollout.teacher", "evaluation.sampling")),
    *("method.phase1_problems", "method.phase1_sampling.max_new_tokens"),
    *("learner.student.warmup_steps", "method.strength_cycles"),
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rehearsal")


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_every_row_of_the_paper_starts_and_ends_and_its_tables_are_made(name: str, out: Path):
    chosen = suite.suites("paper")[name]
    new = {recipe: recipe for recipe in chosen.rows.values() if recipe not in DONE}
    DONE.update({row.recipe: row for row in rehearse.rehearse(new, out, [])})
    rows = {label: DONE[recipe] for label, recipe in chosen.rows.items()}
    assert {label: row.failure for label, row in rows.items() if row.failure} == {}
    for row in rows.values():
        recipe, did = config.load(row.recipe), row.counts
        assert did.updates["student"] == rehearse.CYCLES
        assert did.tokens["student"] > 0
        assert did.evaluated == did.checkpoints == [0, 1, 2]
        assert did.resumed == 1
        if recipe.method.name != "sft":
            assert did.responses["right"] > 0
            assert did.responses["right"] < did.responses["all"]
        adapts = recipe.method.name == "past" and recipe.method.train_teacher
        assert bool(did.updates["teacher"]) == bool(did.tokens["teacher"]) == adapts
        assert bool(did.continuations) == (adapts and recipe.method.branches != "correct")
        if did.continuations:
            assert 0 < did.continuations["right"] < did.continuations["all"]
        assert bool(did.before) == (recipe.method.name in ("sd_zero", "h2sd"))
    sheets = rehearse.make_tables(chosen, list(rows), out, 17)
    assert "Cost" in sheets


def test_only_sizes_and_what_is_not_here_differ_from_the_recipe(tmp_path: Path):
    for name in config.shipped():
        if not name.startswith("paper/"):
            continue
        recipe = config.load(name)
        small = rehearse.scaled(name, [], tmp_path)
        found = {key for key, _, _ in changes(config.dump(recipe), config.dump(small))}
        assert found <= SCALED, name
        assert {"run.cycles", "model.path", "task.train"} <= found


def test_servers_are_stood_in_for_and_models_of_the_package_are_not(tmp_path: Path):
    name = "scale/qwen3-32b-nodes"
    small = rehearse.scaled(name, [], tmp_path)
    assert (small.engine.name, small.distributed.shard) == ("torch", "full")
    small = rehearse.scaled("embedded/past", [], tmp_path)
    assert (small.model.path, small.rollout.student.max_new_tokens, small.run.cycles) == ("embedded", 34, 2)


@pytest.mark.parametrize("name", [name for name in config.shipped() if name.startswith("paper/")])
def test_the_template_has_the_familys_form(name: str, tokenizer):
    assert templates.check(tokenizer, config.load(name).prompts) == []


@pytest.fixture(scope="module")
def tokenizer():
    return stand_ins.make_tokenizer(rehearse._texts(config.load("paper/h2sd").prompts))


def test_thinking_is_open_or_closed_as_asked(tokenizer):
    def prompt(**kwargs: bool) -> str:
        turn = [{"role": "user", "content": "What is 1 + 1?"}]
        return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **kwargs)

    assert prompt(enable_thinking=True) == prompt()
    assert prompt().endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert prompt(enable_thinking=False) == prompt() + "<think>\n\n</think>\n\n"
    ids = tokenizer(prompt(enable_thinking=False), add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == prompt(enable_thinking=False)


def test_a_row_that_fails_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, text in (("large", "[rollout]\nproblems_per_cycle = 99"), ("wrong", "[rollout]\nproblems = 1")):
        (tmp_path / f"{name}.toml").write_text(f'extends = "paper/sft"\nname = "{name}"\n{text}\n')
    names = [str(tmp_path / "large.toml"), str(tmp_path / "wrong.toml"), "paper/sft"]
    assert cli.main(["rehearse", *names]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "rollout.problems_per_cycle = 99 is more than the task's 40 problems" in said
    assert "rollout.problems: unknown key" in said
    assert "paper/sft: done in" in said
    assert f"failed: {names[0]}, {names[1]}" in said


@pytest.mark.slow
def test_the_command_rehearses_a_suite_and_prints_no_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["compare", "--family", "paper", "--suite", TWICE, "--rehearse", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "Adaptive (paper/past): done" in said
    assert "Fixed-8 (paper/fixed_8): done" in said
    assert "all 2 rows started, trained, resumed, evaluated and ended" in said
    assert "run.cycles" in said
    (file,) = (tmp_path / "runs" / "paper-past-17" / "evaluations").glob("step-00002.json")
    assert json.loads(file.read_text())
    assert "Avg@" not in said
    assert "%" not in said
    assert cli.main(words) == 2
    assert "holds a rehearsal already" in capsys.readouterr().err
