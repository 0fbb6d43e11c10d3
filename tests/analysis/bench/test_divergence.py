"""The benchmark runs, says what it measured, and its measures can tell a heavy contestant from a light one."""

from __future__ import annotations

import argparse
import importlib.util
import sys

import pytest
import torch

from past_opsd.analysis.bench import BENCHMARKS
from past_opsd.analysis.bench import divergence as bench
from past_opsd.core.nouns import PastError


def arguments(*words):
    parser = argparse.ArgumentParser()
    BENCHMARKS["divergence"][1](parser)
    return parser.parse_args(words)


@pytest.mark.slow
def test_prints_the_table_and_the_ratios(capsys, monkeypatch):
    monkeypatch.setattr(bench, "peak_memory", lambda *args: None)
    before = torch.get_num_threads()
    words = ("--tokens", "24", "--vocab", "300", "--hidden", "16", "--repeats", "2")
    assert bench.run(arguments(*words)) == 0
    assert torch.get_num_threads() == before
    out = capsys.readouterr().out
    table = {line.split("  ")[0]: line.split() for line in out.splitlines() if line}
    for name in ("reference", "chunked", "fused"):
        error, cosine, _, speed, nonfinite = table[name][1:]
        assert float(error) < 1e-5
        assert float(cosine) == pytest.approx(1.0, abs=1e-6)
        assert float(speed) > 0
        assert nonfinite == "0"
    assert 1e-5 < float(table["bf16"][1]) < 0.1
    assert "fused / three GEMMs:" in out
    if importlib.util.find_spec("trl") is None:
        assert "pip install 'past-opsd[bench]'" in out
    else:
        assert "TRL tiled / fused:" in out


@pytest.mark.slow
def test_half_precision_is_measured_against_what_was_not_rounded(capsys, monkeypatch):
    """Rounding the operands costs bfloat16 eight times float16's error: 8 bits of a number against 11."""
    monkeypatch.setattr(bench, "peak_memory", lambda *args: None)
    errors = {}
    for dtype in ("bf16", "fp16"):
        words = ("--tokens", "24", "--vocab", "300", "--hidden", "16", "--repeats", "1", "--dtype", dtype)
        assert bench.run(arguments(*words)) == 0
        out = capsys.readouterr().out
        assert f"H=16, {dtype}, 1 thread(s)" in out
        table = {line[:26].strip(): line[26:].split() for line in out.splitlines() if line}
        assert float(table["reference, float32"][0]) < 1e-5
        errors[dtype] = [float(table[name][0]) for name in ("chunked", "fused")]
        assert all(float(table[name][1]) > 0.99 for name in ("bf16", "chunked", "fused"))
        assert table["fused"][-1] == "0"
    assert all(2 < a / b < 32 for a, b in zip(errors["bf16"], errors["fp16"], strict=True))


def test_what_is_not_finite_is_counted_on_every_row():
    problem = bench.Problem.make(80, 40, 8)
    problem.live[70:72] = float("inf")
    outcome = bench.contestant("fused")(problem)
    assert outcome is not None
    assert bench._nonfinite(outcome) >= 2


def test_contestants_without_trl_do_the_same_work():
    problem = bench.Problem.make(6, 40, 8)
    outcomes = {name: bench.contestant(name)(problem) for name in ("reference", "fused")}
    for found, want in zip(outcomes["fused"], outcomes["reference"], strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert bench.contestant(bench.GEMMS[0])(problem) is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_is_measured_in_a_fresh_process():
    """Dense logits of this shape are 32 MiB a copy; `fused` needs two of them, autograd several."""
    shape = (256, 32768, 8)
    dense, fused = bench.peak_memory("reference", shape, 1), bench.peak_memory("fused", shape, 1)
    assert dense is not None
    assert fused is not None
    assert 64 <= fused <= 110
    assert dense > 2 * fused


def test_refuses_an_empty_problem():
    with pytest.raises(PastError, match="--repeats"):
        bench.run(arguments("--repeats", "0"))
