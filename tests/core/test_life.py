from __future__ import annotations

import io
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import SMALL

from past_opsd.core import life
from past_opsd.interface import ui
from past_opsd.interface.cli import main

SETS = [word for setting in (*SMALL, "evaluation.at=[0.0, 1.0]") for word in ("--set", setting)]

# Which commands had loaded torch when their first word was due; each is left right there.
FIRST = """
import sys
from past_opsd.core import life
from past_opsd.interface.cli import main
class Said(BaseException): pass
def start(self): raise Said
life.Pulse.start = start
for line in sys.stdin:
    try:
        main(line.split())
        print("silent", line.strip())
    except Said:
        life._current = None
        print("loaded" if {"torch", "transformers", "sympy"} & set(sys.modules) else "ok", line.strip())
"""
LONG = [
    *("train embedded/past", "eval embedded/past", "compare", "demo", "doctor embedded/past", "probe runs/x"),
    *("shift runs/x", "report runs/x", "models pull smollm2-135m", "data check x.jsonl", "inspect embedded/past"),
    *("verify x.jsonl", "export runs/x"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(found, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found()


def test_the_first_word_of_every_long_command_comes_before_anything_heavy():
    command = [sys.executable, "-c", FIRST]
    done = subprocess.run(command, input="\n".join(LONG), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"ok {line}" for line in LONG]


def test_silence_is_broken_by_what_goes_on_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(life, "SILENCE", 0.0)
    with life.beating(["train", "x"]):
        life.doing("evaluating chain3")
        life.count(120, 600)
        print("a result")
        time.sleep(0.6)
    out, err = capsys.readouterr()
    assert out == "a result\n"  # what machines read stays clean
    lines = err.splitlines()
    assert lines[0] == "past train: starting"
    assert "past train: evaluating chain3: 120 of 600 responses" in lines


def test_who_speaks_is_not_interrupted(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(life, "SILENCE", 60.0)
    with life.beating(["train", "x"]):
        print("a line")
        time.sleep(0.6)
    assert capsys.readouterr().err == "past train: starting\n"


def test_on_a_terminal_the_line_moves_and_goes_away(monkeypatch: pytest.MonkeyPatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(life, "STILL", 0.0)
    monkeypatch.delenv("TERM", raising=False)

    def command() -> None:
        life.doing("loading")
        wait_for(lambda: "past demo: loading" in screen.getvalue())
        print("done")
        assert "\r\x1b[Kdone" in screen.getvalue()  # its own line was wiped first
        print("half", end="")
        time.sleep(0.6)
        assert screen.getvalue().endswith("half")  # somebody's unfinished line is left alone
        print()
        wait_for(lambda: not screen.getvalue().endswith("half\n"))
        raise RuntimeError

    with pytest.raises(RuntimeError), life.beating(["demo"]):
        command()
    assert screen.getvalue().endswith("\r\x1b[K")
    assert sys.stderr is screen
    assert life.state() == ""


@pytest.mark.parametrize("line", ["", "recipes", "show embedded/past", "train --help", "models list", "--version"])
def test_quick_commands_say_nothing_extra(line: str, capsys):
    with life.beating(line.split()):
        assert life.state() == ""
    assert capsys.readouterr().err == ""


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv(life.SWITCH, "off")
    with life.beating(["train", "x"]):
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert capsys.readouterr().err == ""


def interrupted(monkeypatch: pytest.MonkeyPatch, at: tuple[int, str], *signals: signal.Signals) -> None:
    """The next run gets these signals there, one after the other."""
    waiting = list(signals)

    def phase(self: ui.TrainDisplay, cycle: int, name: str) -> None:
        while (cycle, name) == at and waiting:
            signal.raise_signal(waiting.pop(0))

    monkeypatch.setattr(ui.TrainDisplay, "phase", phase)


def advice(text: str) -> list[str]:
    """The words of the command that a text tells to continue with."""
    (line,) = [line for line in text.splitlines() if "with: " in line]
    words = shlex.split(line.partition("with: ")[2])
    start = life.program()
    assert words[: len(start)] == start
    return words[len(start) :]


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_one_interrupt_is_acknowledged_and_the_printed_command_finishes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, kind: signal.Signals
):
    folder = tmp_path / "a folder; with $signs"
    interrupted(monkeypatch, (0, "adapt"), kind)
    assert main(["train", "embedded/opsd", *SETS, "--out", str(folder)]) == 130
    out, err = capfd.readouterr()
    assert "past: finishing cycle 1 of 3, then a checkpoint; " in err
    assert "stopped after 1 of 3 cycles" in out
    assert f"checkpoint: {folder}/checkpoints/checkpoint-00001" in out
    assert main(advice(out)) == 0
    assert f"run: {folder}" in capfd.readouterr().out


def test_the_second_interrupt_stops_at_once_and_names_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    folder = tmp_path / "run"
    interrupted(monkeypatch, (1, "adapt"), signal.SIGINT, signal.SIGINT)
    assert main(["train", "embedded/opsd", *SETS, "--out", str(folder)]) == 130
    err = capfd.readouterr().err
    assert "press Ctrl-C again to stop now" in err
    assert f"past: stopped at once; the last checkpoint is {folder}/checkpoints/checkpoint-00001" in err
    assert main(advice(err)) == 0
    capfd.readouterr()
    assert main(["train", "--resume", "--out", str(folder), "--set", "method.tau=0.3"]) == 2
    refused = capfd.readouterr().err
    assert "recipe.method.tau: " in refused
    assert main(advice(refused)) == 0


def test_an_interrupt_before_any_checkpoint_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    def load(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("past_opsd.run.train.Model", load)
    assert main(["train", "embedded/opsd", *SETS, "--out", str(tmp_path / "run")]) == 130
    err = capfd.readouterr().err
    assert "past: stopped before it wrote a checkpoint" in err
    assert not (tmp_path / "run").exists()
    assert advice(err)[-1] == "--resume"


def test_a_run_without_a_recipe_needs_a_folder_that_has_one(tmp_path: Path, capsys):
    for words, expected in [
        (["train"], "give a recipe"),
        (["train", "--resume", "--out", str(tmp_path / "none")], "is no folder of a run"),
        (["train", str(tmp_path)], "holds no recipe.toml"),
    ]:
        assert main(words) == 2
        assert expected in capsys.readouterr().err
