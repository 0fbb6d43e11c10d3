"""`past init` and `past schema`: from a model and a data file to a recipe that runs and that an editor understands."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import jsonschema
import pytest

from past_opsd.core import config
from past_opsd.interface import schema
from past_opsd.interface.cli import main
from past_opsd.run.train import Silent, train

ROWS = [
    {"Problem Statement": f"add {i} and 2", "Solution": "we add, " * 5 + rf"\boxed{{{i + 2}}}", "n": i}
    for i in range(20)
]


def lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_a_recipe_from_a_look_at_model_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines(tmp_path / "data" / "train.jsonl", [*ROWS, {"Problem Statement": "nothing to learn here"}])
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine.toml", "--model", "embedded", "--data", "data/train.jsonl"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "20 problems in 21 rows; problem from 'Problem Statement', solution from 'Solution'" in told
    assert "1 of 21 rows cannot be used and are left out" in told
    assert "has no thinking mode to switch" in told
    assert "room for 256" in told
    assert "GiB free: fits" in told

    text = (tmp_path / "mine.toml").read_text()
    assert text.startswith("#:schema ./recipe.schema.json\n")
    monkeypatch.chdir("/")  # the recipe finds its data from anywhere
    recipe = config.load(tmp_path / "mine.toml")
    assert recipe.name == "mine"
    assert recipe.task.train == str(tmp_path / "data" / "train.jsonl")
    assert recipe.task.columns == {"problem": "Problem Statement"}
    assert (recipe.task.bad_rows, recipe.task.hold_out, recipe.task.evaluation) == ("skip", 2, {})
    assert recipe.prompts.student_kwargs == recipe.prompts.teacher_kwargs == {}
    assert recipe.model.max_context == 256
    assert recipe.rollout.student.max_new_tokens == recipe.rollout.teacher.max_new_tokens == 64
    made = json.loads((tmp_path / "recipe.schema.json").read_text())
    jsonschema.validate(tomllib.loads(text), made)

    small = ["run.cycles=1", "rollout.problems_per_cycle=2", "evaluation.samples=1", "evaluation.pass_k=[1]"]
    outcome = train(
        config.load(tmp_path / "mine.toml", [*small, "method.group_max=2"]), tmp_path / "run", False, Silent()
    )
    assert outcome.finished
    assert list(outcome.evaluations[1].tasks) == ["held_out"]


@pytest.mark.slow
def test_what_comes_next_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    lines(tmp_path / "train \N{ROCKET}.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my [b]recipes[/b]/a b.toml", "--model", "embedded", "--data", "train \N{ROCKET}.jsonl"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last)[-2:] == ["train", "my [b]recipes[/b]/a b.toml"]
    assert config.load("my [b]recipes[/b]/a b.toml").task.train == str(tmp_path / "train \N{ROCKET}.jsonl")


def test_a_column_can_be_named_where_none_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = lines(tmp_path / "train.jsonl", [{"foo": "1+1", "solution": r"\boxed{2}"}] * 3)
    assert main(["init", str(tmp_path / "a.toml"), "--model", "embedded", "--data", str(path)]) == 2
    told = capsys.readouterr().err
    assert "to one of: foo" in told
    assert "--column ROLE=NAME" in told


@pytest.mark.slow
def test_held_out_sets_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train_file = lines(tmp_path / "train.jsonl", ROWS)
    held = lines(tmp_path / "elsewhere" / "held set.jsonl", ROWS[:3])
    folder = tmp_path / "recipes"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["init", "recipes/mine.toml", "--model", "embedded", "--data", str(train_file)]
    assert main([*words, "--evaluation", f"my.set={held}", "--benchmark", "aime24"]) == 0
    recipe = config.load(folder / "mine.toml")
    assert recipe.task.evaluation == {"my.set": str(held), "aime24": "hf:HuggingFaceH4/aime_2024"}
    assert (recipe.task.train, recipe.task.hold_out) == (str(train_file), 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.toml"], "mine.toml exists; name another file"),
        (["mine.txt"], "a recipe's name ends in .toml"),
        (["new.toml", "--data", "none.jsonl"], "none.jsonl: cannot be read"),
        (["new.toml", "--model", "no/such/model"], "no tokenizer can be loaded from 'no/such/model'"),
        (["new.toml", "--column", "problem=Nope"], "has no such column; it has Problem Statement, Solution, n"),
        (["new.toml", "--extends", "embedded/past"], "its task is 'embedded', which reads no data file"),
        (["new.toml", "--extends", "paper/pats"], "did you mean 'paper/past'?"),
        (["new.toml", "--data", "one.jsonl"], "too few different problems to keep some apart"),
        (["other/new.toml"], "recipe.schema.json exists and is not a schema of recipes"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "train.jsonl", ROWS)
    lines(tmp_path / "one.jsonl", ROWS[:1])
    (tmp_path / "mine.toml").write_text("# mine\n")
    lines(tmp_path / "other" / "recipe.schema.json", [{"mine": True}])
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert main(["init", "--model", "embedded", "--data", "train.jsonl", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_the_schema_takes_every_shipped_recipe_and_marks_slips(capsys: pytest.CaptureFixture[str]):
    assert main(["schema"]) == 0
    made = json.loads(capsys.readouterr().out)
    validator = jsonschema.Draft7Validator(made)
    validator.check_schema(made)
    for name in config.shipped():
        table, _ = config.locate(name).read()
        assert not list(validator.iter_errors(table)), name
    whole = tomllib.loads(config.to_toml(config.load("embedded/past")))
    assert not list(validator.iter_errors(whole))
    for slip in (
        "rolout = {}",
        "[run]\ncycels = 3",
        '[run]\ncycles = "3"',
        "[run]\ncycles = 0",
        "[rollout.student]\ntop_q = 1",
        '[method]\nname = "past"\nbeta_lk = 1',
        '[method]\nname = "pats"',
        '[model]\ndtype = "float8"',
    ):
        assert list(validator.iter_errors(tomllib.loads(slip))), slip
    own = '[method]\nname = "my.method"\nanything = 1'
    assert not list(validator.iter_errors(tomllib.loads(own)))
    explained = made["properties"]["method"]["anyOf"]
    past = next(s for s in explained if s["properties"]["name"].get("const") == "past")
    assert past["properties"]["beta_kl"]["description"] == "weight of the failed-path KL to the student"


def test_the_schema_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["schema", "--out", str(tmp_path / "s.json")]) == 0
    assert "#:schema ./s.json" in capsys.readouterr().out
    assert (tmp_path / "s.json").read_text() == schema.text()
