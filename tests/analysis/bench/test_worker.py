from __future__ import annotations

import os
import sys

import pytest
import torch

from past_opsd.analysis.bench._products import Recorder, Replay
from past_opsd.analysis.bench._worker import Side, peak, peak_beyond, serve
from past_opsd.core.nouns import PastError

linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


def test_a_side_is_a_process_with_its_own_environment_and_ends_with_the_pipe():
    tools = {"pid": os.getpid, "variable": os.getenv, "peak": peak, "die": sys.exit}
    with Side("theirs", serve, tools, environment={"PAST_BENCH_SIDE": "1"}) as side:
        assert side.ask("pid") != os.getpid()
        assert side.ask("variable", "PAST_BENCH_SIDE") == "1"
        assert "PAST_BENCH_SIDE" not in os.environ
        with pytest.raises(PastError, match="'theirs' ended early"):
            side.ask("die")


def test_an_error_to_mend_crosses_the_pipe(in_threads):
    def build(pipe):
        raise PastError("no such model")

    with in_threads("ours", build) as side, pytest.raises(PastError, match=r"^no such model$"):
        side.ask("step")


@linux
def test_peak_memory_beyond_what_was_there():
    found = peak_beyond(lambda: torch.zeros(40 * 2**18).add_(1))
    assert found is not None
    assert 38 <= found <= 60


def test_products_are_recorded_with_their_phase_backward_included():
    layer = torch.nn.Linear(6, 5, bias=False)
    recorder = Recorder()
    with recorder:
        recorder.enter("train")
        layer(torch.ones(4, 6, requires_grad=True)).relu().sum().backward()
        recorder.enter("sample")
        with torch.inference_mode():
            layer(torch.ones(3, 6))
        with torch.no_grad():
            torch.mm(torch.ones(2, 6), layer.weight.t(), out=torch.empty(2, 5))
    # Forward, gradient of the input, gradient of the weight; then two plain ones.
    assert [call.phase for call in recorder.calls] == ["train"] * 3 + ["sample"] * 2
    weights = {call.args[1].storage for call in recorder.calls if call.args[1].size == 4 * 30}
    assert layer.weight.untyped_storage().data_ptr() in weights
    seconds = Replay(recorder.calls).run()
    assert set(seconds) == {"train", "sample"}
    assert all(value > 0 for value in seconds.values())
