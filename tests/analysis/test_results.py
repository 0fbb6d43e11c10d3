from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from analysis.conftest import SEEDS

from past_opsd.analysis import suite, tables
from past_opsd.analysis.results import evidence, page
from past_opsd.core import stats
from past_opsd.core.nouns import PastError
from past_opsd.interface import results
from past_opsd.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
TWO = suite.Suite("two", "Two rows", "Vanilla OPSD", {"Vanilla OPSD": "embedded/opsd", "PAST": "embedded/past"})
TEMPLATE = """# {{ seeds() }}
{{ title("main") }}
{{ table("main") }}
{{ table("main", "costs") }}
{{ claims("main", [("PAST", "Vanilla OPSD", 5.617), ("PAST", "GRPO", 1)]) }}
{{ differences("main", [("PAST", "Vanilla OPSD"), ("PAST", "GRPO")]) }}
not run: {{ missing("main") }}
begun: {{ begun("main") }}
unsure: {{ mean("main", "PAST", "student/distill/entropy", 2, 2) }} {{ mean("main", "PAST", "no/such", 1, 2) }}
![unsure]({{ figure("main", ["PAST", "Vanilla OPSD"], "certainty") }})
{{ score("main", "PAST") }} {{ gap("main", "PAST", "Base") }} {{ order("main", ["PAST", "SFT"]) }}
![curves]({{ figure("main", ["PAST", "SFT", "Vanilla OPSD"]) }})
"""


def past(*words: object) -> int:
    parser = argparse.ArgumentParser()
    results.add_arguments(parser)
    return results.run(parser.parse_args(list(map(str, words))))


@pytest.fixture(scope="module")
def collected(compared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evidence of the runs, a template, and all that follows."""
    folder = tmp_path_factory.mktemp("results") / "embedded"
    assert past("collect", compared, "--folder", folder) == 0
    (folder / page.TEMPLATE).write_text(TEMPLATE)
    (folder / "why.md.jinja").write_text('{% set row = "PAST" %}\n{% include "embedded/_part.md.jinja" %}\n')
    (folder / "_part.md.jinja").write_text('{{ at("main", row, 0) }} ![]({{ figure("main", [row]) }})\n')
    assert past("rebuild", "--folder", folder, "--page", folder / "docs" / "page.md") == 0
    return folder


@pytest.fixture
def copy(collected: Path, tmp_path: Path) -> Path:
    shutil.copytree(collected, tmp_path / "embedded")
    return tmp_path / "embedded"


def check(folder: Path) -> int:
    return past("rebuild", "--check", "--folder", folder, "--page", folder / "docs" / "page.md")


def test_evidence_gives_the_results_of_the_runs(compared: Path, collected: Path):
    kept = page.World(collected / "worlds" / "default")
    assert kept.seeds == SEEDS
    mine = suite.results(TWO, suite.gather(TWO, SEEDS, kept.read), SEEDS)
    assert mine == suite.results(TWO, suite.collect(TWO, SEEDS, compared), SEEDS)
    run = evidence.read(suite.run_folder(compared, "embedded/past", 17))
    found = kept.read("embedded/past", 17)
    for step, evaluation in run.evaluations.items():
        for task, result in evaluation.tasks.items():
            other = found.evaluations[step].tasks[task]
            assert (other.outcomes, other.problems, other.styles) == (result.outcomes, result.problems, result.styles)


def test_evidence_can_be_added_to(compared: Path, copy: Path, tmp_path: Path):
    """Runs come one after the other: what is there already stays, what is given again is taken anew."""
    kept = {file.name: file.read_bytes() for file in (copy / "worlds" / "default").iterdir()}
    one = tmp_path / "one"
    shutil.copytree(suite.run_folder(compared, "embedded/past", 17), one)
    assert past("collect", one, "--folder", copy, "--add") == 0
    assert {file.name: file.read_bytes() for file in (copy / "worlds" / "default").iterdir()} == kept
    assert past("collect", one, "--folder", copy) == 0
    assert set(evidence.load(copy / "worlds" / "default")) == {("embedded/past", 17)}
    assert past("collect", compared, "--folder", copy, "--add") == 0
    assert {file.name: file.read_bytes() for file in (copy / "worlds" / "default").iterdir()} == kept


def test_what_was_measured_of_a_run_is_evidence_too(compared: Path, copy: Path, tmp_path: Path):
    """Estimates of probes and shifts, averaged over the seeds that have them; the rows behind a shift are not kept."""
    one = {"all": dict.fromkeys(("success", "jsd_student", "kl"))}
    for seed, success in zip(SEEDS, (0.25, 0.75), strict=True):
        folder = tmp_path / f"past-{seed}"
        shutil.copytree(suite.run_folder(compared, "embedded/past", seed), folder)
        right = {"all": {"success": {"estimate": success, "low": 0.0, "high": 1.0}, "jsd_student": None, "kl": None}}
        conditions = {"matching": right, "removed": one, "shuffled": one}
        RunFolder(folder).write_probe(2, {"step": 2, "conditions": conditions})
    found = dict.fromkeys(("privileged", "shift", "value"))
    part = {"estimate": 0.5, "low": 0.25, "high": 0.75}
    RunFolder(folder).write_shift(1, {"step": 1, "estimates": found | {"surviving": part}, "responses": [1, 2]})
    assert past("collect", *tmp_path.glob("past-*"), "--folder", copy, "--add") == 0
    records = evidence.load(copy / "worlds" / "default")
    assert set(records) == {(recipe, seed) for recipe in TWO.rows.values() for seed in SEEDS}
    assert records["embedded/past", SEEDS[1]].measured["shift"] == {
        1: {"step": 1, "estimates": found | {"surviving": part}}
    }
    source = page.Source(copy, "embedded")
    assert source.measured("main", "PAST", "probe.conditions.matching.all.success") == "0.50"
    assert source.measured("main", "PAST", "probe.conditions.matching.all.kl") == "-"
    assert source.measured("main", "PAST", "shift.estimates.surviving", 0, 100, 1) == "50"
    assert source.measured("main", "PAST", "shift.estimates.surviving") == "-"
    assert source.measured("main", "Vanilla OPSD", "probe.conditions.matching.all.success") == "-"
    titles = [panel.title for panel in source.figure("main", ["PAST"], "reading").panels]
    assert titles[0] == "Teacher success"


def test_what_was_rebuilt_is_found_to_follow(collected: Path, capsys: pytest.CaptureFixture[str]):
    assert check(collected) == 0
    assert re.search(r"^(\d+) of \1 files are what the evidence gives", capsys.readouterr().out, re.MULTILINE)


def test_the_page_says_what_is_missing_and_the_figure_has_no_date(collected: Path):
    text = (collected / "docs" / "page.md").read_text()
    assert "| GRPO (missing) | - |" in text
    assert "PAST minus GRPO | +1.000 | not run |" in text
    assert "(SFT: not run)" in text
    assert "PAST minus GRPO | not run | not run |" in text
    assert re.search(r"^not run: SFT, .*GRPO", text, re.MULTILINE)
    records = evidence.load(collected / "worlds" / "default")
    score = suite.results(TWO, suite.gather(TWO, SEEDS, page.World(collected / "worlds" / "default").read), SEEDS)
    assert f"{100 * score['rows'][2]['macro'][0]:.3f}" in text
    logged = [records["embedded/past", seed].metrics[1]["student/distill/entropy"] for seed in SEEDS]
    assert f"unsure: {np.mean(logged):.2f} -\n" in text
    assert "The student on its own responses" in (collected / "docs" / "page-main-certainty.svg").read_text()
    drawn = (collected / "docs" / "page-main.svg").read_text()
    assert "<dc:date>" not in drawn
    assert "Vanilla OPSD" in drawn


def test_a_direction_needs_both_families(copy: Path):
    """Beside this evidence lies that of a family; here it is the same one."""
    world = copy / "worlds" / "default"
    records = evidence.load(world)
    for seed in SEEDS:
        for result in records["embedded/past", seed].evaluations[2].tasks.values():
            result.outcomes[:] = np.ones_like(result.outcomes).tolist()
        for result in records["embedded/opsd", seed].evaluations[2].tasks.values():
            result.outcomes[:] = np.zeros_like(result.outcomes).tolist()
    evidence.write(world, [records[key] for key in sorted(records)])
    pairs = [("PAST", "Vanilla OPSD"), ("Vanilla OPSD", "PAST"), ("PAST", "SFT")]
    rows = page.Source(copy, "embedded").both("main", pairs, "embedded").splitlines()[2:]
    assert rows[0].count("+100.0 [") == 2
    assert [row.split("|")[-2].strip() for row in rows] == ["above 0", "below 0", "not run"]

    up, down, across = (
        stats.Interval(middle, middle - 1, middle + 1, 10, 0.95, "problem+seed") for middle in (2.0, -2.0, 0.5)
    )
    assert page.direction([up, down]) == "opposite"
    assert page.direction([up, across]) == page.direction([across, across]) == "open"


def test_another_template_is_a_page_beside_the_first(collected: Path):
    rows = suite.results(TWO, suite.gather(TWO, SEEDS, page.World(collected / "worlds" / "default").read), SEEDS)[
        "rows"
    ]
    assert (
        collected / "docs" / "page-why.md"
    ).read_text() == f"{100 * rows[2]['curve'][0]:.1f} ![](page-why-main.svg)\n"
    assert (collected / "docs" / "page-why-main.svg").is_file()
    assert not list((collected / "docs").glob("*part*"))


def test_differences_have_both_intervals(copy: Path):
    world = copy / "worlds" / "default"
    records = evidence.load(world)
    for result in records["embedded/past", SEEDS[0]].evaluations[2].tasks.values():  # all right with one seed
        result.outcomes[:] = np.ones_like(result.outcomes).tolist()
    evidence.write(world, [records[key] for key in sorted(records)])
    opsd, past = (row.outcomes(2) for row in suite.gather(TWO, SEEDS, page.World(world).read))
    both, alone = (stats.paired_bootstrap(past, opsd, unit=unit) for unit in ("problem+seed", "problem"))
    assert both.low < alone.low
    cells = [tables.interval(found, sign=True) for found in (both, alone)]
    told = page.Source(copy, "embedded").differences("main", [("PAST", "Vanilla OPSD")])
    assert f"| PAST minus Vanilla OPSD | {cells[0]} | {cells[1]} |" in told


def test_rows_with_some_of_the_seeds_are_told_apart(copy: Path):
    world = copy / "worlds" / "default"
    records = evidence.load(world)
    del records["embedded/past", SEEDS[1]]
    evidence.write(world, [records[key] for key in sorted(records)])
    source = page.Source(copy, "embedded")
    assert source.score("main", "PAST") == "not run"
    assert "PAST" in source.missing("main").split(", ")
    kept = records["embedded/past", SEEDS[0]].evaluations[2].summary()["macro/avg@4"]
    assert source.begun("main") == f"PAST {100 * kept:.1f} (seed {SEEDS[0]})"


def flip(folder: Path) -> None:
    """One draw of one problem comes out otherwise."""
    world = folder / "worlds" / "default"
    records = evidence.load(world)
    outcomes = records["embedded/past", 17].evaluations[2].tasks["chain3"].outcomes
    outcomes[0][0] ^= 1
    evidence.write(world, [records[key] for key in sorted(records)])


def reword(folder: Path) -> None:
    file = folder / "docs" / "page.md"
    file.write_text(file.read_text().replace("PAST", "Past", 1))


def redraw(folder: Path) -> None:
    file = folder / "docs" / "page-main.svg"
    file.write_bytes(file.read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("change", "told"), [(flip, "main/results.json"), (reword, "docs/page.md"), (redraw, "docs/page-main.svg")]
)
def test_what_does_not_follow_is_told(copy: Path, capsys: pytest.CaptureFixture[str], change, told: str):
    change(copy)
    assert check(copy) == 1
    assert f"{told}: does not follow from the evidence" in capsys.readouterr().out


def test_tables_of_which_there_is_no_evidence_are_told(copy: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(copy / "main", copy / "mine")
    assert check(copy) == 1
    assert "mine/tables.md: there is no evidence of it; delete it" in capsys.readouterr().out


def test_evidence_is_small_and_holds_no_place_of_a_machine(compared: Path, collected: Path, tmp_path: Path):
    files = list((collected / "worlds" / "default").iterdir())
    assert sorted(file.name for file in files) == ["cycles.parquet", "outcomes.parquet", "runs.parquet"]
    records = list(evidence.load(collected / "worlds" / "default").values())
    bits = sum(np.size(t.outcomes) for r in records for e in r.evaluations.values() for t in e.tasks.values())
    assert bits == 2 * 2 * 3 * 3 * 4 * 4
    away = {**records[0].settings, "model": {**records[0].settings["model"], "path": "/home/somebody/weaker"}}
    evidence.write(tmp_path, [evidence.Record("", "a", 1, away, {}, records[0].evaluations, *lines(records[0]))])
    assert evidence.load(tmp_path)["a", 1].settings["model"]["path"] == "weaker"


def lines(record: evidence.Record) -> tuple[list[dict], list[dict]]:
    return record.metrics, record.timings


def test_runs_that_cannot_be_taken_are_told(compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = suite.run_folder(compared, "embedded/past", 17)
    shutil.copytree(first, tmp_path / "twice" / "a")
    shutil.copytree(first, tmp_path / "twice" / "b")
    with pytest.raises(PastError, match="are both embedded/past with seed 17"):
        past("collect", tmp_path / "twice", "--folder", tmp_path / "out")
    RunFolder(tmp_path / "twice" / "a").evaluations.path(2).unlink()
    assert past("collect", tmp_path / "twice", "--folder", tmp_path / "out") == 0
    assert "is left out: its last boundary has not been evaluated" in capsys.readouterr().out
    with pytest.raises(PastError, match="no such folder"):
        past("collect", tmp_path / "nowhere")
    with pytest.raises(PastError, match=r"--world '\.\./up'"):
        past("collect", tmp_path, "--world", "../up")
    with pytest.raises(PastError, match="holds no evidence"):
        past("rebuild", "--folder", tmp_path)


def test_evidence_that_is_none_is_refused(copy: Path):
    (copy / "worlds" / "default" / "outcomes.parquet").write_bytes(b"PAR1")
    with pytest.raises(PastError, match="not evidence that 'past results collect' wrote"):
        check(copy)


def test_a_template_that_asks_for_what_is_not_there_is_told(copy: Path):
    (copy / page.TEMPLATE).write_text("\n{{ nothing() }}")
    with pytest.raises(PastError, match=r"page\.md\.jinja.*'nothing' is undefined"):
        check(copy)
    (copy / page.TEMPLATE).write_text("{{ score('main', 'Nobody') }}")
    with pytest.raises(PastError, match="'Nobody' is no row of suite 'main'"):
        check(copy)


def test_the_costs_of_runs_are_printed(compared: Path, capsys: pytest.CaptureFixture[str]):
    assert past("cost", compared) == 0
    out = capsys.readouterr().out
    assert "embedded/past, seed 29" in out
    assert "Device-h" in out
    assert max(map(len, out.splitlines())) <= 80


FAMILIES = [path.parent.name for path in sorted((ROOT / "results").glob(f"*/{page.TEMPLATE}"))]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_committed_pages_follow_from_the_committed_evidence(family: str, monkeypatch: pytest.MonkeyPatch, capsys):
    """Every table, interval and figure, byte for byte."""
    monkeypatch.chdir(ROOT)
    assert past("rebuild", "--check", "--family", family) == 0, capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_states_no_score_of_its_own(family: str):
    """Numbers with a decimal point in the prose come from the evidence, but for settings and the paper's own."""
    files = sorted((ROOT / "results" / family).glob("*.jinja"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    prose = re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "", text, flags=re.DOTALL)
    assert set(re.findall(r"\d+\.\d+", prose)) <= {"0.85", "0.5"}
