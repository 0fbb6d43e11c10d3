from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import SMALL, Quiet

from past_opsd.analysis import suite, tables
from past_opsd.core import config
from past_opsd.core.nouns import PastError
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import train

FAST = [*SMALL, "run.cycles=6", "evaluation.at=[0.0, 0.5, 1.0]"]
SEEDS = [17, 29]
TWO = suite.Suite("two", "Two rows", "Vanilla OPSD", {"Vanilla OPSD": "embedded/opsd", "PAST": "embedded/past"})
ONE = suite.Suite("one", "One row", "PAST", {"PAST": "embedded/past"})

DRIVER = """
import sys
from pathlib import Path
from past_opsd.analysis import suite
from analysis.test_suite import FAST, ONE, SEEDS
suite.run_all(ONE, SEEDS, Path(sys.argv[1]), 1, FAST, print)
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of a suite, made here; a suite makes them in processes of their own, see below."""
    out = tmp_path_factory.mktemp("compared")
    for seed in SEEDS:
        for recipe in TWO.rows.values():
            train(config.load(recipe, [f"run.seed={seed}", *FAST]), suite.run_folder(out, recipe, seed), False, Quiet())
    return out


def result(out: Path, chosen: suite.Suite) -> dict:
    """The suite's results without what is never the same twice."""
    found = suite.results(chosen, suite.collect(chosen, SEEDS, out), SEEDS)
    for row in found["rows"]:
        for key in ("seconds", "peak_mib"):
            row.get("costs", {}).pop(key, None)
    return found


def test_every_suite_names_recipes_that_exist():
    for family in ("embedded", "paper"):
        for found in suite.suites(family).values():
            assert found.reference in found.rows
            for recipe in found.rows.values():
                assert config.load(recipe).name == recipe


def test_every_row_of_a_suite_takes_the_same_updates_and_evaluation():
    for found in suite.suites("embedded").values():
        recipes = [config.load(recipe) for recipe in found.rows.values()]
        assert len({(r.run.cycles, str(r.evaluation), str(r.task), r.model.path) for r in recipes}) == 1


def test_results_hold_scores_curves_costs_and_intervals(compared: Path):
    found = result(compared, TWO)
    assert [row["label"] for row in found["rows"]] == ["Base", "Vanilla OPSD", "PAST"]
    base, opsd, past = found["rows"]
    assert opsd["difference"] == [0.0, 0.0, 0.0]
    for row in (opsd, past):
        assert list(row["curve"]) == [0, 3, 6]
        assert row["curve"][0] == pytest.approx(base["macro"][0])
        assert row["curve"][6] == pytest.approx(row["macro"][0])
        assert len(row["by_seed"]) == 2
        assert row["difference"][1] <= row["difference"][0] <= row["difference"][2]
    assert opsd["costs"]["student_samples"] == 36
    assert opsd["costs"]["verifier_calls"] == 36
    assert past["costs"]["verifier_calls"] == 36 + past["costs"]["teacher_samples"]
    assert past["diagnostics"]["mixed"] + past["diagnostics"]["skipped"] <= 1 + 1e-9


def test_a_finished_suite_runs_nothing_again(compared: Path):
    told: list[str] = []
    suite.run_all(TWO, SEEDS, compared, 1, FAST, told.append)
    assert told == []


def started(out: Path) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A suite in a process of its own, in the midst of its first run, and the processes of that run."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(out)], env=environment, start_new_session=True)
    first = suite.run_folder(out, "embedded/past", 17) / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.exists()
    return process, psutil.Process(process.pid).children(recursive=True)


def alive(process: psutil.Process) -> bool:
    """Not so one that has ended and that nobody has asked for yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended(processes: list[psutil.Process], seconds: float = 100) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, processes))


@pytest.mark.slow
def test_after_a_kill_nobody_lives_on_and_the_suite_ends_with_the_same_table(compared: Path, tmp_path: Path):
    process, below = started(tmp_path)
    process.kill()
    process.wait()
    assert below
    assert ended(below)
    assert 0 < RunFolder(suite.run_folder(tmp_path, "embedded/past", 17)).steps()[-1] < 6
    assert not suite.run_folder(tmp_path, "embedded/past", 29).exists()
    assert suite.run_all(ONE, SEEDS, tmp_path, 1, FAST, lambda text: None) == {}
    assert result(tmp_path, ONE) == result(compared, ONE)


@pytest.mark.slow
def test_a_suite_that_is_asked_to_stop_finishes_the_cycle_under_way(tmp_path: Path):
    process, below = started(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) != 0
    assert ended(below)
    run = RunFolder(suite.run_folder(tmp_path, "embedded/past", 17))
    assert 0 < run.steps()[-1] == len(run.read_metrics()) < 6
    assert not suite.run_folder(tmp_path, "embedded/past", 29).exists()


@pytest.mark.slow
def test_a_row_that_fails_leaves_the_others(compared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The first row is there already, the second has no such key, the third's run ends with a message."""
    rows = {"Vanilla OPSD": "embedded/opsd", "GRPO": "embedded/grpo", "PAST": "embedded/past"}
    out = tmp_path / "out"
    shutil.copytree(suite.run_folder(compared, "embedded/opsd", 17), suite.run_folder(out, "embedded/opsd", 17))
    folder = suite.run_folder(out, "embedded/past", 17)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"cycle": 0}\n')  # of a run without checkpoints
    three = suite.Suite("three", "Three rows", "PAST", rows)
    told: list[str] = []
    settings = [*FAST, "method.tau=0.05"]
    failed = suite.run_all(three, [17], out, 2, settings, told.append)
    assert list(failed) == ["embedded/grpo", "embedded/past"]
    assert "method.tau: unknown key" in failed["embedded/grpo"]
    assert failed["embedded/past"].startswith(f"seed 17: {folder} holds records of a run")
    assert [text.partition(",")[0] for text in told] == ["1/1 embedded/past failed"]
    there, missing = suite.without(three, failed)
    assert (list(there.rows), there.reference, list(missing)) == (["Vanilla OPSD"], "Vanilla OPSD", ["GRPO", "PAST"])
    found = suite.results(there, suite.collect(there, [17], out), [17], missing)
    text = tables.markdown(found)
    assert "| GRPO | missing |" in text
    assert "PAST is missing: seed 17: " in text


def test_tables_in_three_forms(compared: Path, tmp_path: Path):
    found = suite.results(TWO, suite.collect(TWO, SEEDS, compared), SEEDS)
    folder = suite.save(tmp_path, found)
    assert folder == tmp_path / "two"
    assert json.loads((folder / "results.json").read_text())["rows"][2]["label"] == "PAST"
    text = (folder / "tables.md").read_text()
    score = f"{100 * found['rows'][2]['macro'][0]:.1f}"
    assert f"| {score} |" in text
    assert "| Base |" in text
    assert f"& {score} &" in (folder / "tables.tex").read_text()
    assert found["settings"] == []
    assert [len(sheet.rows) for sheet in tables.sheets(found)] == [3, 2, 1]
    for sheet in tables.sheets(found):
        assert all(len(row) == len(sheet.header) for row in sheet.rows)


def test_the_reference_can_be_chosen():
    assert suite.find("main", "embedded", "GRPO").reference == "GRPO"
    with pytest.raises(
        PastError, match="--reference 'nobody' is no row of suite 'branches'; its rows are Correct only"
    ):
        suite.find("branches", "embedded", "nobody")


def test_unknown_suites_are_told():
    with pytest.raises(PastError, match="no suite 'mian' in 'embedded'; known are main, factorial"):
        suite.find("mian", "embedded")
    with pytest.raises(PastError, match="no suites for 'nowhere'; recipe folders with suites: embedded, paper"):
        suite.find("main", "nowhere")
