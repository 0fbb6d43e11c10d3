from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import SMALL

from past_opsd import config
from past_opsd.cli import main

SETS = [argument for setting in SMALL for argument in ("--set", setting)]


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_recipes_lists_every_shipped_recipe(capsys):
    code, out, _ = run(capsys, "recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == config.shipped()


def test_show_prints_the_resolved_recipe(capsys):
    code, out, _ = run(capsys, "show", "embedded/past", "--set", "run.cycles=7")
    assert code == 0
    assert "# student updates; the only length knob\ncycles = 7\n" in out


def test_a_users_mistake_is_one_message(capsys):
    code, out, err = run(capsys, "show", "embedded/past", "--set", "method.beta_lk=1")
    assert (code, out) == (2, "")
    assert err == "past: --set method.beta_lk=1: method.beta_lk: unknown key; did you mean 'beta_kl'?\n"


def test_without_a_command_help_is_printed(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert "train" in out


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("name", ["embedded/past", "embedded/opsd"])
def test_inspect_shows_both_inputs(capsys, name: str, dry: bool):
    code, out, _ = run(capsys, "inspect", name, *SETS, *(["--dry"] if dry else []))
    assert code == 0
    student, teacher = out.split("teacher reads")
    assert "Reference:" not in student
    assert "Reference:" in teacher
    assert ("Attempt:" in teacher) == (name == "embedded/past")
    assert len(re.findall(r"<\|assistant\|>", out)) == 2


def test_train_eval_and_resume(capsys, tmp_path: Path):
    folder = tmp_path / "run"
    code, out, _ = run(capsys, "train", "embedded/opsd", "--out", folder, *SETS)
    assert code == 0
    assert "verifier 18 calls" in out
    assert "after 3 updates" in out
    code, _, err = run(capsys, "train", "embedded/opsd", "--out", folder, *SETS)
    assert code == 2
    assert "continue it with --resume" in err
    code, _, _ = run(capsys, "train", "embedded/opsd", "--out", folder, "--resume", *SETS)
    assert code == 0

    adapter = folder / "checkpoints" / "checkpoint-00003"
    out_file = tmp_path / "e.json"
    code, out, _ = run(capsys, "eval", "embedded/opsd", "--adapter", adapter, "--out", out_file, *SETS)
    assert code == 0
    assert "majority@4 %" in out
    saved = json.loads((folder / "evaluations" / "step-00003.json").read_text())
    assert json.loads(out_file.read_text())["tasks"] == saved["tasks"]


def test_eval_of_one_sample_has_no_interval(capsys):
    one = ["--set", "evaluation.samples=1", "--set", "evaluation.pass_k=[1]"]
    code, out, _ = run(capsys, "eval", "embedded/opsd", *SETS, *one)
    assert code == 0
    assert "95 %" not in out


def test_eval_of_a_missing_adapter_is_told(capsys, tmp_path: Path):
    code, _, err = run(capsys, "eval", "embedded/opsd", "--adapter", tmp_path, *SETS)
    assert code == 2
    assert "cannot be read as safetensors" in err


def test_demo_prints_the_table_and_repeats_digit_for_digit(capsys, tmp_path: Path):
    arguments = ["demo", "--out", tmp_path / "demo", "--seeds", "17,29", *SETS, "--set", "run.cycles=1"]
    arguments += ["--set", "evaluation.at=[0.0, 1.0]"]
    tables = []
    for _ in range(2):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        rows = [line.strip() for line in out.splitlines()]
        tables.append([line for line in rows if line.startswith(("Base ", "Vanilla OPSD  ", "PAST  "))])
    assert len(tables[0]) == 3
    assert tables[0] == tables[1]
    assert all(re.search(r"\d+\.\d \[\d+\.\d, \d+\.\d\]", line) for line in tables[0])


def test_demo_spares_other_folders(capsys, tmp_path: Path):
    (tmp_path / "precious").write_text("x")
    code, _, err = run(capsys, "demo", "--out", tmp_path)
    assert code == 2
    assert "is not a demo's" in err
    assert (tmp_path / "precious").exists()


def test_demo_seeds_must_be_numbers(capsys):
    code, _, err = run(capsys, "demo", "--seeds", "a,b")
    assert code == 2
    assert "whole numbers" in err


def test_eval_takes_a_model_and_benchmarks_instead_of_a_recipe(capsys, tmp_path: Path):
    task = config.plugin("task", "embedded")
    rows = task.build(task.Options(train_problems=8, eval_problems=3)).train()[:3]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"problem": p.text, "answer": p.answer}) + "\n" for p in rows))
    short = ["--set", "evaluation.sampling.max_new_tokens=16", "--set", "evaluation.samples=2"]
    short += ["--set", "evaluation.pass_k=[1, 2]", "--set", "model.max_context=256", "--set", "model.dtype=float32"]
    words = ["eval", "--model", "embedded", "--benchmark", f"aime24={file}", *short]
    code, out, err = run(capsys, *words, "--out", tmp_path / "result.json")
    assert code == 0, err
    assert "avg@2" in out
    saved = json.loads((tmp_path / "result.json").read_text())
    assert list(saved["tasks"]) == ["aime24"]
    assert len(saved["tasks"]["aime24"]["outcomes"]) == 3
    code, _, err = run(capsys, "eval", "--model", "embedded")
    assert (code, "give a recipe, or --model and --benchmark" in err) == (2, True)
