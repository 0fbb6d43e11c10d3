from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from rich.console import Console

from past_opsd.interface import ui
from past_opsd.run.evaluate import Evaluation, TaskResult
from past_opsd.run.frames import Run
from past_opsd.run.train import Outcome

COSTS = {"cost/student_samples": 400, "cost/student_tokens": 220476, "cost/student_truncated": 50}
COSTS |= {"cost/teacher_samples": 0, "cost/teacher_tokens": 0, "cost/teacher_truncated": 0, "cost/verifier_calls": 400}


def shown(metrics: dict[str, float], truncated: float) -> str:
    result = TaskResult(["p"], [[1, 0]], [["4", "2"]], {"correct": 1, "wrong": 1}, {}, 551.0, truncated)
    outcome = Outcome(Path("run"), 1, 1, {1: Evaluation(1, "student", 2, 0, {"aime24": result})})
    console = Console(file=io.StringIO(), record=True, width=100)
    files = SimpleNamespace(read_metrics=lambda: [metrics], read_timings=list)
    ui.closing(console, cast(Run, SimpleNamespace(outcome=lambda: outcome, files=files)), [1], "")
    return console.export_text()


def test_a_run_ends_with_what_its_limits_cut():
    text = shown(COSTS, 0.125)
    assert "student 400 samples, 220,476 tokens, 12.5 % cut by the limit" in text
    assert "teacher 0 samples, 0 tokens; verifier 400 calls" in text
    header, row = (next(line for line in text.splitlines() if word in line) for word in ("cut", "551.0"))
    assert header.split()[-2].strip() == "cut"
    assert row.split()[-2] == "12.5"


def test_a_run_of_an_earlier_version_does_not_tell_what_was_cut():
    text = shown({key: value for key, value in COSTS.items() if not key.endswith("truncated")}, 0.0)
    assert "student 400 samples, 220,476 tokens\n" in text
