from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from past_opsd.core import config
from past_opsd.interface import completion
from past_opsd.interface.cli import COMMANDS, build_parser, main

NAMES = sorted(command.name for commands in COMMANDS.values() for command in commands)


def complete(*words: str) -> list[str]:
    return completion.candidates(build_parser, words)


def test_every_command_and_all_options_of_each_are_offered():
    assert complete("") == NAMES
    for name in NAMES:
        parser = build_parser(name)._get_positional_actions()[0].choices[name]  # type: ignore[index]
        shown = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
        assert complete(name, "--") == sorted(shown)


def test_recipes_and_choices_and_subcommands():
    assert complete("train", "") == config.shipped()
    assert complete("show", "paper/pas") == ["paper/past", "paper/past_4b", "paper/past_thinking"]
    assert complete("train", "--set", "run.seed=1", "embedded/past", "--res") == ["--resume"]
    assert complete("rehearse", "paper/past", "paper/pas") == ["paper/past", "paper/past_4b", "paper/past_thinking"]
    assert complete("models", "") == ["check", "list", "pull"]
    assert complete("models", "check", "x", "--recipe", "embedded/past") == ["embedded/past"]
    assert complete("models", "pull", "--w") == ["--wheel"]
    assert complete("probe", "x", "--split", "") == ["evaluation", "train"]
    assert complete("bench", "st") == ["startup", "step"]


def test_where_a_file_or_a_value_stands_nothing_is_offered():
    assert complete("train", "--out", "") == []
    assert complete("train", "embedded/past", "") == []
    assert complete("verify", "") == []
    assert complete("no-such-command", "") == []


def test_runs_are_found_wherever_a_run_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("runs/a", "runs/main/b-17", "elsewhere/c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "recipe.toml").touch()
    monkeypatch.chdir(tmp_path)
    for command in ("report", "watch", "probe", "shift", "export"):
        assert complete(command, "") == ["runs/a", "runs/main", "runs/main/b-17"]
    assert complete("report", "runs/a", "runs/m") == ["runs/main", "runs/main/b-17"]
    assert complete("probe", "runs/a", "") == []


def test_a_shell_is_needed(capsys: pytest.CaptureFixture[str]):
    assert main(["completion"]) == 2
    assert "name a shell" in capsys.readouterr().err


ASK = {
    "bash": """
        eval "$(past completion bash)"
        COMP_WORDS=(past models check x --recipe embedded/pas); COMP_CWORD=5
        _past; printf '%s\\n' "${COMPREPLY[@]}"
        COMP_WORDS=(past train --); COMP_CWORD=2
        _past; printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        compdef() { }
        compadd() { print -l -- "${(@P)2}" }
        eval "$(past completion zsh)"
        words=(past models check x --recipe embedded/pas); CURRENT=6; _past
        words=(past train --); CURRENT=3; _past
    """,
    "fish": """
        past completion fish | source
        complete --do-complete 'past models check x --recipe embedded/pas' | grep embedded
        complete --do-complete 'past train --'
    """,
}


@pytest.mark.parametrize("shell", ASK)
def test_a_real_shell_completes(shell: str, tmp_path: Path):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    past = tmp_path / "past"
    past.write_text(f'#!/bin/sh\nexec {sys.executable} -m past_opsd "$@"\n')
    past.chmod(0o755)
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [shell, *flags, "-c", ASK[shell]], env=variables, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    expected = ["embedded/past", "--help", "--out", "--profile", "--resume", "--set", "--track", "--untrained"]
    assert (done.stdout.split(), done.stderr) == (expected, "")
