"""The simulator beside cases worked out by hand: a step takes a second whatever it decodes, a prompt nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from conftest import Quiet

from past_opsd.analysis import simulate
from past_opsd.analysis.simulate import Draws, Gpu, Judges, Pace, Setting, phased, streaming, wanted
from past_opsd.core import config
from past_opsd.interface.cli import main
from past_opsd.policy.estimate import KNOWN
from past_opsd.run.train import train

SECOND = Pace(lambda rows, tokens: 1.0, lambda length: 0.0)


def setting(**changes: object) -> Setting:
    # With success = 1 nothing is drawn ahead, whatever comes.
    plain = {"gpus": 1, "base": 1, "maximum": 2, "success": 1.0, "student_prompt": 0, "teacher_prompt": 0}
    return Setting(SECOND, **(plain | changes))  # type: ignore[arg-type]


def draws(seconds: float) -> Draws:
    """Two failures; of each a continuation that fails and one that does not."""
    first = (5, False, seconds), (7, True, seconds)
    second = (2, False, seconds), (9, True, seconds)
    return Draws(((10, False, seconds), (4, False, seconds)), (first, second))


def test_rows_share_a_step_and_wait_for_a_seat():
    gpu = Gpu(SECOND, seats=2)
    for job, length in enumerate((3, 5, 4)):
        gpu.add(job, 0, length, at=0.0)
    assert (gpu.run(2.0), gpu.now) == ([], 2.0)
    assert (gpu.run(math.inf), gpu.now) == ([0], 3.0)
    assert (gpu.run(math.inf), gpu.now) == ([1], 5.0)
    assert (gpu.run(math.inf), gpu.now) == ([2], 7.0)
    assert not gpu.busy


def test_a_step_costs_what_its_rows_cost_and_a_prompt_holds_up_all():
    gpu = Gpu(Pace(lambda rows, tokens: float(rows), lambda length: length / 10), seats=4)
    gpu.add(0, 20, 2, at=1.0)  # read at 3
    gpu.add(1, 10, 1, at=1.0)  # read at 4
    assert (gpu.run(math.inf), gpu.now) == ([1], 6.0)
    assert (gpu.run(math.inf), gpu.now) == ([0], 7.0)


def test_judges_take_what_comes_first():
    judges = Judges(2)
    assert [judges.verdict(at, 3.0) for at in (0.0, 1.0, 1.0, 9.0)] == [3.0, 4.0, 6.0, 12.0]


def test_the_sampler_says_what_is_wanted():
    assert wanted([], 2, 4, 0) == 2
    assert wanted([False, False], 2, 4, 0) == 1
    assert wanted([], 2, 4, 1) == 3
    assert wanted([False] * 3, 2, 4, 1) == 1
    assert wanted([False, True], 2, 4, 0) == 0
    assert wanted([False] * 4, 2, 4, 0) == 4
    assert wanted([False] * 8, 2, 4, 0) == 0


@pytest.mark.parametrize(
    ("seconds", "changes", "expected"),
    [
        (0.0, {}, (10 + 5 + 9, 22)),  # the second's last begins at 12 and ends at 21, the first's at 15 and 22
        (0.0, {"gpus": 2}, (10 + 5 + 9, 22)),
        (0.0, {"servers": True}, (10 + 5 + 9, 10 + 5 + 7)),
        (1.0, {"servers": True}, (12 + 7 + 11, 11 + 6 + 8)),
        # On its own the torch engine waits for verdicts where half of its rows have ended, and stands still meanwhile.
        (1.0, {}, (12 + 7 + 11, 27)),
    ],
)
def test_cycles_worked_out_by_hand(seconds: float, changes: dict, expected: tuple[float, float]):
    s = setting(**changes)
    assert (phased(s, draws(seconds)), streaming(s, draws(seconds))) == pytest.approx(expected)


@pytest.mark.parametrize("servers", [False, True])
def test_what_is_right_needs_nothing_more(servers: bool):
    right = Draws(((10, True, 1.0), (4, True, 1.0)), ((), ()))
    assert phased(setting(servers=servers), right) == 12.0
    assert streaming(setting(servers=servers), right) == 11.0


def test_both_sides_get_the_same_draws_and_the_seed_decides_them():
    recipe = config.load("paper/past")
    chances = simulate.assumed(0.5, 0.4, 0.6, 0.5, 0.05)
    shape = KNOWN["Qwen/Qwen3-1.7B"]
    found = [simulate.compare(recipe, shape, "H100-80GB", (1, 8), chances, 8, 3, seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert [(line.gpus, line.servers) for line in found[0]] == [(1, False), (8, False), (8, True)]
    one = [simulate.draw(recipe, chances, 8, 1, k) for k in (0, 1)]
    assert one[0] != one[1]
    assert all(len(group) == 16 for group in one[0].continuations)
    assert all(1 <= length <= 1024 for length, _, _ in one[0].responses)


def test_the_command_prints_a_table_that_fits_a_terminal(capsys, small_recipe, tmp_path: Path):
    assert main(["simulate", "paper/past", "--cycles", "2", "--gpus", "1,8"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "1 trains, 7 serve both adapters" in out
    assert "not measured" in out
    run = tmp_path / "run"
    recipe = small_recipe("embedded/past", "run.cycles=1", "evaluation.at=[]")
    train(recipe, run, False, Quiet())
    assert main(["simulate", str(run / "recipe.toml"), "--records", str(run), "--cycles", "2", "--gpus", "1"]) == 0
    assert "lengths and outcomes as in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("paper/opsd", "draws no continuations"),
        ("paper/past --base 9", "--base 9: give 1 to G_max, which is 8"),
        ("paper/past --gpu X", "no data sheet"),
        ("paper/past --solved 2", "are shares"),
        ("paper/past --gpus 0", "whole numbers from 1 on"),
        ("paper/past --cycles 0", "--cycles is 1 or more"),
        ("paper/past --records nowhere", "no records"),
    ],
)
def test_a_mistake_is_one_message(capsys, words: str, said: str):
    assert main(["simulate", *words.split()]) == 2
    assert said in capsys.readouterr().err
