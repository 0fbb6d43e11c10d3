from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from conftest import Quiet

from past_opsd.run import profiling
from past_opsd.run.folder import RunFolder
from past_opsd.run.profiling import PROFILED_CYCLE, Clock, Profile, totals, verdict
from past_opsd.run.train import Session, train


def test_a_span_inside_a_phase_is_charged_to_itself_alone():
    times = iter([0.0, 2.0, 7.0, 8.0, 8.5])
    clock = Clock(now=lambda: next(times))
    clock.phase("rollout")
    with clock.span("verify"):
        pass
    clock.phase("adapt")
    clock.stop()
    assert clock.seconds(0) == {"rollout": 3.0, "verify": 5.0, "adapt": 0.5}
    assert [e[0] for e in clock.events] == ["rollout", "verify", "rollout", "adapt"]


def test_cycles_are_kept_apart():
    times = iter([0.0, 1.0, 5.0, 8.0])
    clock = Clock(now=lambda: next(times))
    for k in range(2):
        clock.cycle = k
        clock.phase("rollout")
        clock.stop()
    assert [clock.seconds(k) for k in range(2)] == [{"rollout": 1.0}, {"rollout": 3.0}]


def test_the_verdict_names_the_dominant_phase_first():
    lines = [{"cycle": k, "rollout": 1.0, "distill": 3.0, "publish": 0.001, "peak_mib": 900.0} for k in range(2)]
    assert totals(lines) == {"rollout": 2.0, "distill": 6.0, "publish": 0.002}
    assert verdict(lines) == "8.0 s in cycles: distill 75 %, rollout 25 %"
    assert verdict([]) == ""


def operations(file: Path) -> list[str]:
    return [str(e.get("name")) for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]


@pytest.mark.slow
def test_a_trace_is_bounded_by_forwards_however_long_the_phase(
    past: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each forward of the embedded model makes an attention call a layer."""
    forwards = 3
    monkeypatch.setattr(profiling, "FORWARDS", forwards)
    profile = Profile(tmp_path, past.model, skip=["draw"])
    with profile.operations(PROFILED_CYCLE):
        past.loop.cycle(0, profile.phase)
    wanted = {f"operations-00001-{phase}.json.gz" for phase in ("rollout", "adapt", "distill")}
    assert {p.name for p in tmp_path.iterdir()} == wanted
    layers = past.model.config.num_hidden_layers
    calls = operations(tmp_path / "operations-00001-rollout.json.gz").count("aten::scaled_dot_product_attention")
    # The prompts' forward and the first step stand before the second tick.
    assert 0 < calls <= layers * (forwards + 1)
    past.model.tick()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, small_recipe) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "run"
    train(small_recipe(), folder, False, Quiet(), profile=True)
    return folder


@pytest.mark.slow
def test_a_profiled_run_leaves_a_breakdown_and_traces(profiled: Path):
    folder = profiled / "profile"
    phases = json.loads((folder / "phases.json").read_text())
    assert set(phases) == {"rollout", "verify", "draw", "adapt", "distill", "identity"} | {
        "publish",
        "evaluate",
        "checkpoint",
    }
    assert sum(p["share"] for p in phases.values()) == pytest.approx(1, abs=1e-3)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["cycle"] for e in events} == {0, 1, 2}
    ends = [e["ts"] + e["dur"] for e in events]
    assert all(a <= b["ts"] + 1 for a, b in zip(ends, events[1:], strict=False)), "phases overlap on the time line"
    assert any("mm" in name for name in operations(folder / "operations-00001-adapt.json.gz"))


@pytest.mark.slow
def test_profiling_changes_nothing_but_its_own_folder(profiled: Path, tmp_path: Path, small_recipe, quiet: Quiet):
    plain = tmp_path / "plain"
    train(small_recipe(), plain, False, quiet)
    assert (plain / "metrics.jsonl").read_bytes() == (profiled / "metrics.jsonl").read_bytes()
    assert not (plain / "profile").exists()
    assert set(RunFolder(plain).read_timings()[0]) >= {"rollout", "verify", "adapt", "distill"}
