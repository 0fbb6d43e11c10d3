"""The scripts and the notebook of examples/, run as a person runs them."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from past_opsd.core import config, own
from past_opsd.interface.cli import build_parser, main
from past_opsd.run.folder import RunFolder

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    """As `python examples/NAME words...`, in this process: the script is `__main__` while it runs."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def settings(words: list[str]) -> config.Recipe:
    """What `past train` makes of a command line."""
    args = build_parser(words[0]).parse_args(words)
    return config.load(args.recipe, args.overrides)


def test_what_a_cluster_is_given_is_what_past_train_takes(tmp_path: Path):
    """The job's script with an `srun` that shows what it was asked to start; the file of Docker's by its words."""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    job = ["bash", str(EXAMPLES / "cluster" / "train.sbatch"), "embedded/past", "out", "--set", "run.cycles=7"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    told = subprocess.run(job, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True).stdout
    option, program, *words = told.splitlines()
    assert (option, program) == ("--distribution=block", "past")
    recipe = settings(words)
    assert (recipe.name, recipe.run.cycles, recipe.distributed.shard) == ("embedded/past", 7, "hybrid")
    service = yaml.safe_load((EXAMPLES / "cluster" / "compose.yaml").read_text())["services"]["train"]
    assert service["entrypoint"][-2:] == ["-m", "past_opsd"]
    assert settings([re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]]).name


def test_a_loss_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run("loss_by_hand.py", monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    values = {line[:10].strip(): float(line[10:].split()[0]) for line in lines}
    assert list(values) == ["Hellinger", "KL", "clipped KL"]
    assert values["clipped KL"] < values["KL"]


@pytest.mark.slow
def test_a_method_of_ones_own_is_short_and_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = (EXAMPLES / "own_method.py").read_text()
    assert source.count("\n") <= 55
    run("own_method.py", monkeypatch, tmp_path / "run", 1)
    folder = RunFolder(tmp_path / "run")
    assert folder.recipe().method.name == "__main__:ReverseKL"
    written = (tmp_path / "run" / "code" / "method.py").read_text()
    assert written in source
    assert written.startswith("class ReverseKL(past.Method):")
    state = json.loads((folder.checkpoint(1) / "state.json").read_text())
    assert set(state["identity"]["code"]) == {"method"}
    capsys.readouterr()
    # The command line is another program: it has no such class, and says so in one message.
    assert main(["train", str(folder), "--resume", "--set", "run.cycles=2"]) == 2
    told = capsys.readouterr().err
    assert "method.name = '__main__:ReverseKL' was defined in a script or a notebook" in told
    assert "past_opsd.resume(RUN)" in told
    assert main(["report", str(folder), "--trajectories", "0"]) == 0


def test_a_verifier_and_a_task_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run("own_verifier.py", monkeypatch, tmp_path / "run", 1)
    assert "'reason'" in capsys.readouterr().out
    recipe = RunFolder(tmp_path / "run").recipe()
    assert (recipe.verifier.path, recipe.verifier.workers) == ("__main__:last_number", 0)
    assert recipe.task.path == "__main__:sums"
    assert {file.name for file in (tmp_path / "run" / "code").iterdir()} == {"task.py", "verifier.py"}
    assert main(["train", str(tmp_path / "run"), "--resume"]) == 2
    assert "= '__main__:" in capsys.readouterr().err
    # The run that it made, read.
    run("read_run.py", monkeypatch, tmp_path / "run")
    out = capsys.readouterr().out
    assert "embedded/past: 1 of 1 cycles" in out
    assert "the student's responses" in out


def test_a_trl_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run("trl_script.py", monkeypatch, tmp_path / "run", 1)
    assert (tmp_path / "run" / "export" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_the_notebook_runs_and_has_no_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    book = nbformat.read(EXAMPLES / "first_run.ipynb", as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in book.cells)
    monkeypatch.setenv("PAST_NOTEBOOK_CYCLES", "2")
    monkeypatch.setenv("PAST_NOTEBOOK_FOLDER", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    assert "embedded/past: cycle 2/2" in printed
    assert "__main__:Plain 3 class Plain(past.Method):" in printed
    kinds = [kind for cell in book.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert "image/png" in kinds
    assert "text/html" in kinds


def test_what_cannot_be_found_again_is_refused():
    with pytest.raises(Exception, match="cannot be found again by this name"):
        own.name_of(lambda response, problem: True, "verifier.name")
