from __future__ import annotations

import pytest

from past_opsd.analysis.bench import cycle
from past_opsd.core.nouns import Closing
from past_opsd.interface.cli import main

SMALL = ["--cycles", "1", "--set", "rollout.problems_per_cycle=2", "--set", "task.train_problems=8"]


def test_prints_both_sides_and_the_ratio(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "cycle", *SMALL, "--base", "1", "--verdict", "0.01"]) == 0
    out = capsys.readouterr().out
    for word in ("phased", "streaming", "a verdict 0.01 s longer", "same adapters to the bit", "phased / streaming"):
        assert word in out


def test_a_late_verdict_is_the_verdict(monkeypatch: pytest.MonkeyPatch):
    class Real(Closing):
        identity = "real"

        def verify(self, items):
            return [*items]

    slept: list[float] = []
    monkeypatch.setattr(cycle.time, "sleep", slept.append)
    late = cycle.Late(Real(), 0.5, 2)  # type: ignore[arg-type]
    assert late.verify([1, 2, 3]) == [1, 2, 3]  # type: ignore[list-item]
    assert slept == [1.0]


def test_sides_that_differ_are_refused(capsys, monkeypatch: pytest.MonkeyPatch):
    names = iter("ab")
    monkeypatch.setattr(cycle.Side, "adapters", property(lambda self: next(names)))
    assert main(["bench", "cycle", *SMALL]) == 2
    assert "did not make the same adapters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [("--cycles 0", "1 or more"), ("--recipe embedded/opsd --base 1", "has no sampler whose base draw could be set")],
)
def test_a_mistake_is_one_message(capsys, words: str, said: str):
    assert main(["bench", "cycle", *words.split()]) == 2
    assert said in capsys.readouterr().err
