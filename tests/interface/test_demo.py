"""What a demo may delete: what a demo wrote."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from conftest import Quiet
from rich.console import Console

from past_opsd.core.files import write_text
from past_opsd.core.lock import held
from past_opsd.core.nouns import PastError
from past_opsd.interface import demo
from past_opsd.run.train import train


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "demo"


def run(folder: Path, seed: int) -> None:
    demo.demo(Console(file=io.StringIO()), folder, [seed])


def test_what_a_demo_wrote_is_deleted_and_nothing_else(folder: Path, small_recipe):
    recipe = small_recipe("embedded/past", "run.cycles=1", "evaluation.at=[0.0]", "task.eval_problems=1")
    train(recipe, folder / "embedded-past-17", False, Quiet())
    write_text(folder / "table.json", "{}")
    write_text(folder / "untrained" / f"{7:032x}.json", "{}")
    write_text(folder / "report" / "index.html", "")
    write_text(folder / "report" / "figures" / "cost.svg", "")
    write_text(folder / "embedded-past-17" / "probes" / "step-00001.json", "{}")
    mine = {
        "thesis.tex",
        "untrained/mine.json",
        "embedded-past-17/notes.txt",
        "embedded-past-17/checkpoints/mine",
        "src/table.json",
    }
    for name in mine:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "link").symlink_to(folder.parent)
    demo.clear(folder)
    assert files(folder) == mine | {"link"}


def test_a_folder_that_is_no_demo_is_refused(folder: Path):
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(PastError, match="exists and is not a demo's"):
        run(folder, 17)
    with pytest.raises(PastError, match=r"thesis\.tex is a file"):
        run(folder / "thesis.tex", 17)
    assert files(folder) == {"thesis.tex"}


def test_a_mark_in_a_folder_of_somebody_else_costs_nothing(folder: Path):
    (folder / ".git").mkdir(parents=True)
    mine = {".git/HEAD", "README.md", "runs/metrics.jsonl", "embedded-past-x/recipe.toml", "embedded-past-17/model.py"}
    for name in mine:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    demo.clear(folder)
    assert files(folder) == mine


def test_links_in_a_demos_folder_are_not_followed(folder: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.toml").write_text("mine")
    folder.mkdir()
    (folder / "embedded-past-17").symlink_to(tmp_path / "mine")
    demo.clear(folder)
    assert (tmp_path / "mine" / "recipe.toml").exists()


def test_a_demo_that_is_running_is_not_replaced(folder: Path):
    folder.mkdir()
    (folder / demo.MARK).touch()
    (folder / "table.json").touch()
    with held(folder), pytest.raises(PastError, match="is being written by another process"):
        run(folder, 17)
    assert (folder / "table.json").exists()
