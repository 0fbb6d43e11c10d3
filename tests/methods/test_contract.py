"""What every method owes: a docs page, independence, and an exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Quiet

from past_opsd import config
from past_opsd.train import train

ROOT = Path(__file__).resolve().parents[2]
METHODS = sorted(p.stem for p in (ROOT / "past_opsd" / "methods").glob("*.py") if p.stem != "__init__")

# Recipe and what makes it small, or makes it carry more from cycle to cycle.
RUNS = {
    "past": [],
    "opsd": [],
    "opsd_current": [],
    "opsd_ema": [],
    "opd": [],
    "grpo": ["method.beta=0.01"],
    "sft": [],
    "sd_zero": ["method.phase1_problems=24", "method.phase1_batch=8", "method.teacher_sync_every=2"],
    "h2sd": ["rollout.problems_per_cycle=3", "rollout.samples_per_problem=4"],
}


def test_every_method_is_run_here():
    assert {config.load(f"embedded/{name}").method.name for name in RUNS} == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_documented_and_independent(method: str):
    assert (ROOT / "docs" / "methods" / f"{method}.md").is_file()
    assert f"    past_opsd.methods.{method}\n" in (ROOT / ".importlinter").read_text(encoding="utf-8")
    shipped = [config.load(name) for name in config.shipped() if name.startswith("embedded/")]
    assert method in {recipe.method.name for recipe in shipped}


class Stop(Quiet):
    """Ends a run in the middle of a cycle."""

    def __init__(self, cycle: int, phase: str):
        super().__init__()
        self._at = (cycle, phase)

    def phase(self, cycle: int, name: str) -> None:
        if (cycle, name) == self._at:
            raise InterruptedError


def files(folder: Path) -> dict[str, bytes]:
    """Everything a run keeps but its timings."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "timings.jsonl")
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_resumes_to_the_bits_of_an_unbroken_one(tmp_path: Path, small_recipe, name: str):
    recipe = small_recipe(f"embedded/{name}", "run.checkpoint_every=2", "evaluation.at=[1.0]", *RUNS[name])
    train(recipe, tmp_path / "unbroken", False, Quiet())
    for cycle, phase in ((1, "publish"), (2, "distill")):
        folder = tmp_path / f"stopped-{cycle}"
        with pytest.raises(InterruptedError):
            train(recipe, folder, False, Stop(cycle, phase))
        assert train(recipe, folder, True, Quiet()).finished
        assert files(folder) == files(tmp_path / "unbroken")
