"""A run's folder: what it holds, and that its names and schemas stand in one place."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from conftest import Quiet, small

import past_opsd
from past_opsd.analysis import report
from past_opsd.analysis.report.data import find
from past_opsd.core.nouns import PastError
from past_opsd.run import folder
from past_opsd.run.evaluate import Evaluation, TaskResult
from past_opsd.run.folder import LAYOUT, RunFolder, Series, is_ours, runs_below
from past_opsd.run.train import train

PACKAGE = Path(past_opsd.__file__).parent
DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = {entry.name for entry in LAYOUT}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with a profile and a report."""
    made = RunFolder(tmp_path_factory.mktemp("folder") / "run")
    short = ["run.cycles=2", "rollout.problems_per_cycle=3", "evaluation.at=[0.0, 1.0]", "task.eval_problems=2"]
    assert train(small("embedded/past", *short), made.path, False, Quiet(), profile=True).finished
    report.write(find([made.path]), made.page, trajectories=0)
    return made


@pytest.mark.slow
def test_the_layout_knows_every_file_of_a_run(run: RunFolder):
    files = [path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()]
    assert [name for name in files if not is_ours(name, NAMES)] == []
    assert {name.partition("/")[0] for name in files} >= {"recipe.toml", "rollouts", "checkpoints", "profile", "report"}
    for stranger in ("notes.txt", "rollouts/mine.parquet", "rollouts/../recipe.toml", "checkpoints/checkpoint-00001/x"):
        assert not is_ours(stranger, NAMES)


@pytest.mark.slow
def test_what_was_written_is_read(run: RunFolder):
    assert [line["cycle"] for line in run.read_metrics()] == [line["cycle"] for line in run.read_timings()] == [0, 1]
    assert (run.rollouts.numbers(), run.evaluations.numbers(), run.steps()) == ([0, 1], [0, 2], [0, 1, 2])
    assert [evaluation.step for evaluation in run.read_evaluations().values()] == [0, 2]
    assert run.recipe().run.cycles == 2
    assert run.newest() == run.path / "checkpoints" / "checkpoint-00002"
    assert RunFolder(run.path / "none").newest() is None


def test_the_documentation_shows_the_layout():
    assert folder.table() in (DOCS / "architecture.md").read_text(encoding="utf-8")


def spelled(tree: ast.Module) -> list[str]:
    """Names of a run's files that a module writes itself: as a text of their own, or as a part of a path."""
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    paths = [n.right for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    parts = [n.value.partition("/")[0] for n in paths if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    unmistakable = ("metrics.jsonl", "timings.jsonl", "trackers.json", "cycle-", "completions_", "export-merged")
    found = [text for text in texts if text.startswith(unmistakable) and " " not in text]
    return found + [name for name in parts if name in NAMES]


def test_no_other_module_spells_the_names_of_a_runs_files():
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "folder.py"]
    found = {path.name: spelled(ast.parse(path.read_text(encoding="utf-8"))) for path in modules}
    assert {name: names for name, names in found.items() if names} == {}
    own = ast.parse('"""See metrics.jsonl."""; run / "rollouts"; open("metrics.jsonl")')
    assert spelled(own) == ["metrics.jsonl", "rollouts"]


def test_a_series_counts_what_has_its_name(tmp_path: Path):
    series = Series(tmp_path, "step-", ".json")
    names = [
        "step-00003.json",
        "step-123456.json",
        "step-3.json",
        "step-00003-copy.json",
        "step-012345.json",
        "step-x.json",
    ]
    for name in names:
        (tmp_path / name).touch()
    assert series.numbers() == [3, 123456]
    assert [series.path(number).name for number in series.numbers()] == names[:2]
    assert [series.number(tmp_path / name) for name in names] == [3, 123456, -1, -1, -1, -1]


def test_an_evaluation_under_the_name_of_another_is_refused(tmp_path: Path):
    run = RunFolder(tmp_path)
    result = TaskResult(["a"], [[1, 0]], [["1", "2"]], {"correct": 1, "wrong": 1}, {}, 3.0, 0.0)
    run.write_evaluation(Evaluation(2, "student", 2, 0, {"set": result}))
    assert run.read_evaluations()[2].tasks["set"] == result
    run.evaluations.path(2).rename(run.evaluations.path(4))
    with pytest.raises(PastError, match=r"step-00004\.json: holds the evaluation of step 2"):
        run.read_evaluations()


def test_runs_are_found_and_what_cannot_be_read_is_told(tmp_path: Path):
    for place in ("a/b/c", "a/b/c/inner", "x/y/z/deep", ".hidden", "near"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "recipe.toml").touch()
    told: list[str] = []
    found = runs_below(tmp_path, told.append)
    assert [run.path.relative_to(tmp_path).as_posix() for run in found] == ["a/b/c", "near"]
    assert runs_below(tmp_path / "near") == [RunFolder(tmp_path / "near")]
    assert runs_below(tmp_path / "missing", told.append) == told == []
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    try:
        assert runs_below(tmp_path, told.append) == found
        assert [str(closed) in note for note in told] == ([] if os.access(closed, os.R_OK) else [True])
    finally:
        closed.chmod(0o700)
