from __future__ import annotations

import argparse
import re

import pytest
import torch

from past_opsd.analysis.bench import BENCHMARKS, rollout


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    BENCHMARKS["rollout"][1](parser)
    return parser.parse_args(words)


def test_the_table_names_every_contestant_and_the_ratio(capsys: pytest.CaptureFixture[str]):
    before = torch.get_num_threads()
    assert rollout.run(arguments("--requests", "6", "--batch", "4", "--repeats", "1")) == 0
    torch.set_num_threads(before)
    out = capsys.readouterr().out
    rows = {name.strip(): float(ratio) for name, ratio in re.findall(r"^(.{26}) *\d+ +[\d.]+ +([\d.]+)$", out, re.M)}
    assert {"torch engine", "generate, adapter folded", "generate, PEFT"} <= set(rows)
    assert rows["torch engine"] == 1.0


def test_a_slower_contestant_gets_a_higher_ratio():
    lines = [rollout.Line("torch engine", 100, [1.0]), rollout.Line("slow", 100, [4.0, 2.0, 3.0])]
    assert [line.speed for line in lines] == [100.0, pytest.approx(33.333, rel=1e-3)]
    assert "3.00" in rollout.report(lines, arguments())


def test_lengths_end_with_the_first_end():
    assert rollout._length([5, 2, 7, 2], {2, 9}) == 2
    assert rollout._length([5, 6], {2}) == 2
