"""The four cells of the factorial, read as the teacher reads them, byte by byte."""

from __future__ import annotations

import re

import pytest
from chatml import THINK, TURNS, tokenizer

from past_opsd.core import config
from past_opsd.core.nouns import Attempt, Problem, Response, Verdict, View
from past_opsd.core.prompts import Prompts
from past_opsd.policy.model import load_tokenizer

PROBLEM = Problem("p", "6*7*3*4", "2, 6, 4, \\boxed{4}", "4")
ATTEMPT = "6*7=3; 3*3=9; 9*4=6; \\boxed{6}"
CELLS = {
    "Vanilla OPSD": ("opsd", []),
    "Teacher only": ("past", ["method.trajectory=false"]),
    "Trajectory only": ("past", ["method.train_teacher=false"]),
    "PAST": ("past", []),
}


def read(family: str) -> dict[str, tuple[str, str]]:
    """Cell -> whose weights read what text."""
    found = {}
    for cell, (name, overrides) in CELLS.items():
        recipe = config.load(f"{family}/{name}", overrides)
        model = load_tokenizer(recipe.model) if family == "embedded" else tokenizer(TURNS + THINK)
        prompts = Prompts(model, recipe.prompts)
        method = config.plugin("method", recipe.method.name).build(recipe.method, prompts, recipe.rollout)
        response = Response(prompts.completion(ATTEMPT), ATTEMPT, (), True)
        view = method.teacher_view(
            Attempt(PROBLEM, View("student", prompts.student(PROBLEM)), response, Verdict(False, "wrong"))
        )
        found[cell] = view.adapter, model.decode(view.prompt, skip_special_tokens=False)
    return found


@pytest.mark.parametrize("family", ["embedded", "paper", "smollm2", "smollm2_nth", "word_problems"])
def test_cells_differ_in_their_factors_alone(family: str):
    (_, vanilla), (_, teacher), (_, trajectory), (_, past) = read(family).values()
    assert teacher == vanilla
    assert trajectory == past
    assert ATTEMPT in past
    assert ATTEMPT not in vanilla
    assert [adapter for adapter, _ in read(family).values()] == ["base", "teacher", "base", "teacher"]


@pytest.mark.parametrize("family", ["embedded", "paper", "smollm2", "smollm2_nth", "word_problems"])
def test_without_a_trajectory_no_word_of_an_attempt_is_read(family: str):
    """The message with the trajectory, less the attempt's block and the sentences about it."""
    _, vanilla = read(family)["Vanilla OPSD"]
    _, past = read(family)["PAST"]
    if family in ("embedded", "smollm2", "smollm2_nth"):
        assert vanilla == re.sub(r"\nAttempt: .*", "", past)  # in the examples too
        return
    block = f"=== Student Attempt Begin ===\n{ATTEMPT}\n=== Student Attempt End ===\n\n"
    about = past[past.index("The student attempt above") : past.index("Use the reference solution to ensure")]
    assert about.endswith("compatible with a correct\nsolution. ")
    assert vanilla == past.replace(block, "").replace(about, "")
    assert "attempt" not in vanilla.lower()


@pytest.mark.parametrize("family", ["embedded", "paper", "smollm2"])
def test_the_shipped_rows_are_these_cells(family: str):
    for row, name in (("Teacher only", "teacher_only"), ("Trajectory only", "trajectory_only")):
        method, overrides = CELLS[row]
        shipped, cell = config.load(f"{family}/{name}"), config.load(f"{family}/{method}", overrides)
        assert config.dump(shipped.method) == config.dump(cell.method)
        assert config.load(f"{family}/{name}").prompts == config.load(f"{family}/opsd").prompts
