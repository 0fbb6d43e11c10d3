"""The step's growth: sizes, work, exponent, and what is printed, written and drawn."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys

import pytest

from past_opsd.analysis.bench import BENCHMARKS, scaling
from past_opsd.core.nouns import PastError
from past_opsd.policy.model import Model

SIZES = scaling.Sizes(batch=2, group=1, prompt=6, response=4, vocabulary=64, hidden=16)
SETUP = scaling.Setup(SIZES, threads=1, budget=64, loss_mib=1)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    BENCHMARKS["scaling"][1](parser)
    return parser.parse_args(words)


@pytest.mark.slow
def test_prints_writes_and_draws(capsys, tmp_path, in_threads):
    words = "--batch 1 --prompt 6 --response 4 --vocabulary 64 --hidden 16 --budget 64 --factors 2 --repeats 1"
    out, plot = tmp_path / "new" / "points.json", tmp_path / "figure.svg"
    assert scaling.run(arguments(*words.split(), "--out", str(out), "--plot", str(plot))) == 0
    text = capsys.readouterr().out
    for title in scaling.AXES:
        assert re.search(rf"^{title} x1 +1\.00 +[\d.]+ +[\d.]+ +1\.00 ", text, re.M)
        assert re.search(rf"^{title} x2 +\d\.\d\d ", text, re.M)
    assert len(re.findall(r"time ~ work\^-?[\d.]+", text)) == 4
    points = json.loads(out.read_text())
    assert [(p["axis"], p["factor"]) for p in points] == [(a, f) for a in scaling.AXES.values() for f in (1, 2)]
    assert [p["sizes"]["response"] for p in points[:2]] == [4, 8]
    assert all(p["seconds"] > 0 for p in points)
    drawn = plot.read_text()
    assert "<svg" in drawn
    for label in ("proportional", "vocabulary", "dense logits", "response length (tokens)"):
        assert label in drawn


def test_work_counts_a_shared_prompt_once(tmp_path):
    scaling.make_model(str(tmp_path), 64, 16)
    model = Model(scaling._model_section(str(tmp_path), checkpointing=False))

    def work(budget=64, **sizes):
        setup = scaling.Setup(scaling.replace(SIZES, **sizes), threads=1, budget=budget, loss_mib=1)
        return scaling.multiply_adds(model, setup)

    body = 4 * 16 * (2 * 16 + 2 * 8 + 3 * 48)
    assert work() == 2 * (body * (2 * 9 + 15) + 3 * 4 * 64 * 16)
    assert work(batch=6) == 3 * work()
    model.worth = 300  # 3 x 600 positions saved are worth five segments
    alone, four = work(batch=1, prompt=600, budget=10_000), work(batch=1, prompt=600, group=4, budget=10_000)
    assert four == body * (2 * (600 + 12) + 1200 + 12) + 3 * 16 * 64 * 16
    assert four < 1.1 * alone


def test_the_exponent_is_that_of_the_times():
    points = [scaling.Point("batch", k, SIZES, 3.0 * k, 1.0, 0.2 * k**1.5, None, None, None) for k in (1, 2, 4)]
    assert scaling.exponent(points) == pytest.approx(1.5)
    assert math.isnan(scaling.exponent(points[:1]))


def test_one_size_grows_at_a_time():
    found = [(field, factor, setup.sizes) for field, factor, setup in scaling.setups(SETUP, largest=4)]
    assert [(field, factor) for field, factor, _ in found if field == "vocabulary"] == [
        ("vocabulary", 1),
        ("vocabulary", 2),
        ("vocabulary", 3),
    ]
    for field, factor, sizes in found:
        assert scaling.replace(sizes, **{field: vars(SIZES)[field]}) == SIZES
        assert vars(sizes)[field] == factor * vars(SIZES)[field]


def test_dense_logits_are_those_of_both_views():
    assert scaling.replace(SIZES, response=2**10, vocabulary=2**12).dense == 2 * 2 * 4 * 4


def test_a_plot_without_matplotlib_is_refused_before_measuring(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PastError, match="pip install matplotlib"):
        scaling.run(arguments("--plot", "x.svg"))


@pytest.mark.parametrize(("option", "value"), [("--hidden", "12"), ("--vocabulary", "40"), ("--repeats", "0")])
def test_refuses_impossible_sizes(option, value):
    with pytest.raises(PastError, match=option):
        scaling.run(arguments(option, value))
