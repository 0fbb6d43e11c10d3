"""What comes before the first cycle, killed in its midst."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conftest import SMALL, Quiet
from ranks import Launcher

from past_opsd.run import phase1
from past_opsd.run.folder import RunFolder, read_lines
from past_opsd.run.train import train

FEW = 8  # samples a batch
SETTINGS = [*SMALL, "run.cycles=2", "evaluation.at=[]", "rollout.samples_per_problem=2"]
OWN = {
    "embedded/h2sd": ["rollout.problems_per_cycle=8"],
    "embedded/sd_zero": ["method.phase1_problems=12", "method.phase1_epochs=1"],
}

# Trains in a process of its own, which dies for good around the writing of a chosen batch.
DRIVER = f"""
import os, signal, sys
from pathlib import Path
from conftest import Quiet
from past_opsd.core import config
from past_opsd.run import attempts, phase1
from past_opsd.run.train import train

phase1.BATCH = {FEW}
recipe, out, point, wanted = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
write, count = attempts.write, 0

def dying(file, rows):
    global count
    count += 1
    if (point, wanted) == ("drawn", count): os.kill(os.getpid(), signal.SIGKILL)
    write(file, rows)
    if (point, wanted) == ("written", count): os.kill(os.getpid(), signal.SIGKILL)

attempts.write = dying
train(config.load(recipe, sys.argv[5:]), out, False, Quiet())
"""


def samples(folder: Path) -> int:
    """How many were drawn before the first cycle, by whichever process."""
    return sum(line["samples"] for line in read_lines(RunFolder(folder).phase1_timings))


def fingerprint(folder: Path) -> dict[str, bytes]:
    """All of the run that must not depend on an interruption."""
    run = RunFolder(folder)
    files = [run.metrics_file, *sorted(p for p in run.checkpoint(2).rglob("*") if p.is_file())]
    files += sorted((folder / "phase1").glob("*.parquet"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "points"), [("embedded/h2sd", ("drawn", "written")), ("embedded/sd_zero", ("written",))]
)
def test_a_kill_before_the_first_cycle_costs_a_batch_and_changes_no_bit(
    recipe: str,
    points: tuple[str, ...],
    tmp_path: Path,
    small_recipe,
    launch: Launcher,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(phase1, "BATCH", FEW)
    settings, driver = [*SETTINGS, *OWN[recipe]], tmp_path / "driver.py"
    driver.write_text(DRIVER)
    train(small_recipe(recipe, *settings), tmp_path / "unbroken", False, Quiet())
    whole = samples(tmp_path / "unbroken")
    last = RunFolder(tmp_path / "unbroken").read_metrics()[-1]
    assert last["cost/phase1_samples"] == last["cost/phase1_verifier_calls"] == whole > 2 * FEW
    for point in points:
        folder = tmp_path / point
        ended = launch(1, str(driver), recipe, str(folder), point, "2", *settings)
        assert ended.codes == [-signal.SIGKILL], ended.err
        assert RunFolder(folder).steps() == []
        second = samples(folder) - FEW
        assert 0 < second <= FEW
        train(small_recipe(recipe, *settings), folder, True, Quiet())
        assert samples(folder) == whole + (second if point == "drawn" else 0)
        assert fingerprint(folder) == fingerprint(tmp_path / "unbroken")


@pytest.mark.slow
def test_seconds_before_the_first_cycle_have_a_line_of_their_own(tmp_path: Path, small_recipe):
    recipe = small_recipe("embedded/h2sd", *SETTINGS)
    run = RunFolder(tmp_path / "hints")
    train(recipe, run.path, False, Quiet(), stop=lambda: True)  # at boundary 0
    for _ in range(2):
        first, *rest = run.read_timings()
        assert first["cycle"] == -1
        assert 0 < first["prepare"] == pytest.approx(phase1.seconds(run)["prepare"], abs=1e-4)
        assert not any("prepare" in line for line in rest)
        train(recipe, run.path, True, Quiet())
    assert [line["cycle"] for line in rest] == list(range(recipe.run.cycles))
    train(small_recipe("embedded/past", *SETTINGS), tmp_path / "none", False, Quiet())
    assert not (tmp_path / "none" / "phase1").exists()
    assert phase1.seconds(RunFolder(tmp_path / "none")) == {}


@pytest.mark.slow
def test_samples_of_another_setup_and_damaged_ones_are_drawn_again(tmp_path: Path, small_recipe):
    recipe = small_recipe("embedded/h2sd", *SETTINGS)
    run = RunFolder(tmp_path)
    train(recipe, tmp_path, False, Quiet(), stop=lambda: True)
    (file,) = (p for p in (tmp_path / "phase1").glob("*.parquet") if p.stat().st_size == max_size(tmp_path))
    before, drawn = file.read_bytes(), samples(tmp_path)

    def again(*overrides: str) -> int:
        """Samples drawn by a start that finds no checkpoint."""
        for step in run.steps():
            run.checkpoint(step).rename(tmp_path / "checkpoints" / f"old-{len(list(tmp_path.rglob('old-*')))}")
        run.timings_file.unlink()
        count = samples(tmp_path)
        train(small_recipe("embedded/h2sd", *SETTINGS, *overrides), tmp_path, False, Quiet(), stop=lambda: True)
        return samples(tmp_path) - count

    assert again() == 0
    assert again("learner.student.lr=1e-3") == 0  # what comes later does not matter
    assert again("verifier.timeout=4.5") == drawn
    file.write_bytes(before[:-9])
    assert again() > 0
    assert file.read_bytes() == before


def max_size(folder: Path) -> int:
    return max(p.stat().st_size for p in (folder / "phase1").glob("*.parquet"))
