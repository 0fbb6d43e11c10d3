from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from analysis.conftest import FAST, SEEDS
from conftest import Quiet
from rich.console import Console
from rich.measure import Measurement

from past_opsd.analysis import suite, tables
from past_opsd.analysis.results import evidence
from past_opsd.core import config
from past_opsd.core.nouns import PastError
from past_opsd.run import profiling
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import train

LONG = [*FAST, "run.cycles=6"]
TWO = suite.Suite("two", "Two rows", "Vanilla OPSD", {"Vanilla OPSD": "embedded/opsd", "PAST": "embedded/past"})
ONE = suite.Suite("one", "One row", "PAST", {"PAST": "embedded/past"})

DRIVER = """
import sys
from pathlib import Path
from past_opsd.analysis import suite
from analysis.test_suite import LONG, ONE, SEEDS
suite.run_all(ONE, SEEDS, Path(sys.argv[1]), 1, LONG, print)
"""


def result(out: Path, chosen: suite.Suite) -> dict:
    """The suite's results without what is never the same twice."""
    found = suite.results(chosen, suite.collect(chosen, SEEDS, out), SEEDS)
    for row in found["rows"]:
        for key in ("seconds", "device_seconds", "learner_seconds", "peak_mib"):
            row.get("costs", {}).pop(key, None)
    return found


def test_every_suite_names_recipes_that_exist():
    for family in ("embedded", "paper"):
        for found in suite.suites(family).values():
            assert found.reference in found.rows
            for recipe in found.rows.values():
                assert config.load(recipe).name == recipe


def test_a_row_without_a_penalty_has_no_compatibility_kl():
    """`teacher/stay/kl` is absent with beta_kl = 0."""
    rows = [{"label": "PAST", "diagnostics": {"teacher_success": 0.5, "compatibility_kl": 0.01}}]
    rows.append({"label": "beta_KL 0", "diagnostics": {"teacher_success": 0.25}})
    shown = [row[:3] for row in tables.diagnostics({"rows": rows}).rows]
    assert shown == [("PAST", "0.500", "0.010"), ("beta_KL 0", "0.250", tables.ABSENT)]


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
        assert list(row["curve"]) == [0, 1, 2]
        assert row["curve"][0] == pytest.approx(base["macro"][0])
        assert row["curve"][2] == pytest.approx(row["macro"][0])
        assert len(row["by_seed"]) == 2
        assert row["difference"][1] <= row["difference"][0] <= row["difference"][2]
    assert opsd["costs"]["student_samples"] == 12
    assert opsd["costs"]["verifier_calls"] == 12
    assert past["costs"]["verifier_calls"] == 12 + past["costs"]["teacher_samples"]
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
def test_after_a_kill_nobody_lives_on_and_the_suite_ends_with_the_same_table(tmp_path: Path):
    unbroken = tmp_path / "unbroken"
    for seed in SEEDS:
        recipe = config.load("embedded/past", [f"run.seed={seed}", *LONG])
        train(recipe, suite.run_folder(unbroken, "embedded/past", seed), False, Quiet())
    process, below = started(tmp_path)
    process.kill()
    process.wait()
    assert below
    assert ended(below)
    assert 0 < RunFolder(suite.run_folder(tmp_path, "embedded/past", 17)).steps()[-1] < 6
    assert not suite.run_folder(tmp_path, "embedded/past", 29).exists()
    assert suite.run_all(ONE, SEEDS, tmp_path, 1, LONG, lambda text: None) == {}
    assert result(tmp_path, ONE) == result(unbroken, ONE)


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
    found = suite.results(three, suite.collect(three, [17], out, failed), [17])
    assert [row["label"] for row in found["rows"] if "missing" in row] == ["GRPO", "PAST"]
    text = tables.markdown(found)
    assert "| GRPO (missing) |" in text
    assert "PAST is missing: seed 17: " in text


def test_tables_in_three_forms(compared: Path, tmp_path: Path):
    found = suite.results(TWO, suite.collect(TWO, SEEDS, compared), SEEDS)
    folder = suite.save(tmp_path, found)
    assert folder == tmp_path / "two"
    assert json.loads((folder / "results.json").read_text())["rows"][2]["label"] == "PAST"
    text = (folder / "tables.md").read_text()
    score = f"{100 * found['rows'][2]['macro'][0]:.3f}"
    assert f"| {score} |" in text
    assert "| Base |" in text
    assert f"& {score} &" in (folder / "tables.tex").read_text()
    assert found["settings"] == []
    assert [len(sheet.rows) for sheet in tables.sheets(found)] == [3, 2, 1]
    for sheet in tables.sheets(found, digits=1):
        assert all(len(row) == len(sheet.header) for row in sheet.rows)
        wide = Console(width=200)
        for table in tables.terminal(sheet):
            assert Measurement.get(wide, wide.options, table).maximum <= 80


def test_factors_are_those_of_the_recipes():
    for family in ("embedded", "paper"):
        found = suite.find("factorial", family)
        for label, recipe in found.rows.items():
            method = config.ask_method(config.load(recipe))
            known = found.factors[label]
            assert known["Trajectory"] == method.reads_response
            assert known["Trained teacher"] == bool(method.continuations)
        header = ("Method", "Trajectory", "Trained teacher")
        row = {"label": "PAST", "tasks": {"t": 0.5}, "macro": [0.5, 0.4, 0.6], "difference": None}
        result = {"title": "", "samples": 1, "cycles": 1, "seeds": [1], "reference": "x", "rows": [row]}
        sheet = tables.scores(result | {"factors": found.factors})
        assert (sheet.header[:3], sheet.rows[0][:3]) == (header, ("PAST", "yes", "yes"))


def test_the_papers_own_tables(compared: Path):
    both = replace(TWO, sheets=("objectives", "sampling"))
    found = suite.results(both, suite.collect(both, SEEDS, compared), SEEDS)
    objectives, sampling, *_ = tables.sheets(found)
    assert objectives.header == ("Objective", "Macro", "Teacher success", "Compat. KL", "GB", "Tokens/s")
    costs = found["rows"][2]["costs"]
    tokens = costs["student_tokens"] + costs["teacher_tokens"]
    assert objectives.rows[1][-1] == f"{tokens / costs['learner_seconds']:,.0f}"
    assert objectives.rows[0][2:4] == ("-", "-"), "Vanilla OPSD's teacher is not adapted"
    assert sampling.rows[1][2] == f"{costs['teacher_samples']:,.0f}"


def test_a_row_without_its_runs_is_shown_as_missing(compared: Path, tmp_path: Path):
    three = replace(TWO, rows={**TWO.rows, "GRPO": "embedded/grpo"})
    found = suite.results(three, suite.collect(three, SEEDS, compared), SEEDS)
    assert "not a run folder" in found["rows"][3]["missing"]
    for sheet in tables.sheets(found)[:2]:
        assert sheet.rows[-1][0] == "GRPO (missing)"
        assert set(sheet.rows[-1][1:]) == {"-"}
    assert "GRPO is missing: " in (suite.save(tmp_path, found) / "tables.md").read_text()
    said = suite.collect(three, SEEDS, compared, {"embedded/opsd": "it broke"})
    assert [row.missing for row in said][:2] == ["it broke", ""]
    lost = replace(three, reference="GRPO")
    without = suite.results(lost, suite.collect(lost, SEEDS, compared), SEEDS)
    assert [row[-1] for row in tables.scores(without).rows] == ["-"] * 4
    with pytest.raises(PastError, match="suite 'two': no row has its runs; Vanilla OPSD:"):
        suite.results(TWO, suite.collect(TWO, SEEDS, tmp_path), SEEDS)


def test_costs_have_the_preparation_the_steps_and_the_sizes(tmp_path: Path, small_recipe):
    sets = ["run.cycles=1", "method.phase1_problems=24", "method.phase1_batch=8", "evaluation.at=[1.0]"]
    train(small_recipe("embedded/sd_zero", *sets), tmp_path, False, Quiet())
    timings, last = RunFolder(tmp_path).read_timings(), RunFolder(tmp_path).read_metrics()[-1]
    costs = suite.row("SD-Zero", "embedded/sd_zero", [tmp_path]).costs
    assert [line["cycle"] for line in timings] == [-1, 0]
    assert 0 < costs["phase1_seconds"] == pytest.approx(timings[0]["prepare"])
    assert costs["seconds"] > costs["phase1_seconds"]
    assert costs["device_seconds"] == pytest.approx(costs["seconds"])
    assert costs["phase1_steps"] == last["phase1/steps"] > 0
    assert costs["student_steps"] == 1
    assert (costs["trained"], costs["deployed"]) == (58368, 150368 + 58368)
    assert costs["verifier_calls"] == last["cost/verifier_calls"] + last["cost/phase1_verifier_calls"]
    assert costs["tokens"] == last["cost/student_tokens"] + last["cost/phase1_tokens"]


def test_processes_count_in_the_device_hours(compared: Path):
    """Two processes for the first cycle, one after a resume."""
    record = evidence.read(suite.run_folder(compared, "embedded/past", 17))
    lines = [line | {"processes": n} for line, n in zip(record.timings, (2, 1), strict=True)]
    costs = suite.averaged("", "", [replace(record, timings=lines)]).costs
    first, second = (sum(profiling.totals([line]).values()) for line in lines)
    assert costs["device_seconds"] == pytest.approx(2 * first + second)
    assert costs["trained"] == 2 * 58368


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
