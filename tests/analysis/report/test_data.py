from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import Quiet, small

from past_opsd.analysis import suite
from past_opsd.analysis.report import data
from past_opsd.core.nouns import PastError
from past_opsd.interface import cli
from past_opsd.run.train import train


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One real run of PAST."""
    folder = tmp_path_factory.mktemp("data") / "runs" / "embedded-past-17"
    train(small("embedded/past", "run.cycles=2", "evaluation.at=[0.0, 1.0]"), folder, False, Quiet())
    return folder


def copy(original: Path, target: Path, *changes: tuple[str, str]) -> Path:
    """The run under another folder, with other settings in its recipe."""
    shutil.copytree(original, target)
    text = (target / "recipe.toml").read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (target / "recipe.toml").write_text(text)
    return target


def seeded(seed: int) -> tuple[str, str]:
    return ("\nseed = 17\n", f"\nseed = {seed}\n")


def names(runs: list[data.Run]) -> dict[str, list[int]]:
    return {method.name: list(method.runs) for method in data.methods(runs)}


def test_a_run_is_loaded_with_all_its_records(original: Path):
    (run,) = data.find([original])
    assert (run.name, run.seed, run.completed) == ("embedded/past", 17, 2)
    lines = (original / "metrics.jsonl").read_text().splitlines()
    assert run.metrics == [json.loads(line) for line in lines]
    assert [line["cycle"] for line in run.timings] == [0, 1]
    assert sorted(run.evaluations) == [0, 2]
    assert run.summaries[2]["macro/avg@4"] == run.evaluations[2].summary([4])["macro/avg@4"]
    assert run.probes == run.shifts == {}


def test_runs_are_found_three_levels_down_and_once(original: Path, tmp_path: Path):
    deep = copy(original, tmp_path / "a" / "b" / "c", seeded(29))
    near = copy(original, tmp_path / "near", seeded(43))
    found = data.find([tmp_path, near, deep.parent])
    assert [run.folder for run in found] == [deep.resolve(), near.resolve()]
    copy(original, tmp_path / "a" / "b" / "x" / "too-deep")
    assert len(data.find([tmp_path])) == 2


def test_a_folder_without_runs_says_what_to_do(tmp_path: Path):
    with pytest.raises(PastError, match=r"holds no run .*recipe\.toml.*'past train"):
        data.find([tmp_path])
    with pytest.raises(PastError, match="no such folder"):
        data.find([tmp_path / "missing"])


@pytest.mark.slow
def test_a_damaged_run_among_others_is_told_and_left_out(original: Path, tmp_path: Path, capsys):
    near, broken = copy(original, tmp_path / "near", seeded(29)), copy(original, tmp_path / "broken")
    (broken / "metrics.jsonl").write_text("no line of a run\n")
    told: list[str] = []
    assert [run.folder for run in data.find([tmp_path], told.append)] == [near.resolve()]
    (note,) = told
    assert note.startswith(f"{broken.resolve()} is left out: {broken.resolve() / 'metrics.jsonl'}:1: not a line")
    assert cli.main(["report", str(tmp_path), "--trajectories", "0"]) == 0
    assert f"note: {note}" in capsys.readouterr().err
    with pytest.raises(PastError, match=r"metrics\.jsonl:1: not a line that a run wrote"):
        data.find([broken])  # it is meant, so it is not left out
    shutil.rmtree(near)
    with pytest.raises(PastError, match="broken is left out"):
        data.find([tmp_path])


def test_a_run_in_training_loads(original: Path, tmp_path: Path):
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(original / "recipe.toml", begun)
    (run,) = data.find([begun])
    assert (run.completed, run.metrics, run.evaluations, run.warnings) == (0, [], {}, [])
    first = (original / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (begun / "metrics.jsonl").write_text(first + '{"cycle": 1, "rollout/suc')
    (run,) = data.find([begun])
    assert run.completed == 1
    assert [line["cycle"] for line in run.metrics] == [0]


def test_records_of_probes_and_shifts_are_read_by_step(original: Path, tmp_path: Path):
    folder = copy(original, tmp_path / "run")
    (folder / "probes").mkdir()
    value = {"estimate": 0.5, "low": 0.25, "high": 1}
    metrics = {"all": {"success": value, "jsd_student": value | {"low": None, "high": None}, "kl": None}}
    probe = {"step": 2, "conditions": {"matching": metrics, "removed": metrics, "shuffled": metrics}}
    shift = {"step": 1, "estimates": {"privileged": value, "shift": value, "surviving": None, "value": value}}
    (folder / "probes" / "step-00002.json").write_text(json.dumps(probe))
    (folder / "probes" / "shift-00001.json").write_text(json.dumps(shift))
    (run,) = data.find([folder])
    assert (run.probes, run.shifts) == ({2: probe}, {1: shift})
    shift["estimates"]["value"] = value | {"low": "x"}
    for damaged in ('{"step"', '{"step": 1}', json.dumps(shift)):
        (folder / "probes" / "shift-00001.json").write_text(damaged)
        with pytest.raises(PastError, match=r"shift-00001\.json: not .*measure again"):
            data.find([folder])


def test_seeds_of_a_recipe_are_one_method_with_the_suites_label(original: Path, tmp_path: Path):
    folders = [copy(original, tmp_path / str(seed), seeded(seed)) for seed in (43, 29)]
    (method,) = data.methods(data.find([original, *folders]))
    assert (method.name, method.label, list(method.runs)) == ("embedded/past", "PAST", [17, 29, 43])


def test_runs_with_the_same_seed_are_told_apart_by_folder(original: Path, tmp_path: Path):
    twin = copy(original, tmp_path / "twin")
    assert names(data.find([original, twin])) == {
        "embedded/past (embedded-past-17)": [17],
        "embedded/past (twin)": [17],
    }
    for place in ("one", "two"):
        for seed in (17, 29):
            change = [seeded(seed)] if seed != 17 else []
            copy(original, tmp_path / place / f"run-{seed}", *change)
    found = names(data.find([tmp_path / "one", tmp_path / "two"]))
    assert found == {"embedded/past (one)": [17, 29], "embedded/past (two)": [17, 29]}


def test_other_settings_are_another_method_and_incidental_ones_are_not(original: Path, tmp_path: Path):
    same = copy(original, tmp_path / "same", seeded(29), ("checkpoint_every = 1\n", "checkpoint_every = 2\n"))
    other = copy(original, tmp_path / "other", seeded(43), ("beta_kl = 0.05\n", "beta_kl = 0.5\n"))
    found = data.methods(data.find([original, same, other]))
    assert sorted(list(m.runs) for m in found) == [[17, 29], [43]]
    assert len({m.name for m in found}) == len({m.label for m in found}) == 2


def test_a_recipe_of_ones_own_keeps_its_name_and_equal_labels_differ(original: Path, tmp_path: Path):
    change = ('name = "embedded/past"', 'name = "mine"')
    mine = copy(original, tmp_path / "mine", change)
    paper = copy(original, tmp_path / "paper", ('name = "embedded/past"', 'name = "paper/past"'))
    found = {m.name: m.label for m in data.methods(data.find([mine, original, paper]))}
    assert found == {"embedded/past": "PAST (embedded/past)", "paper/past": "PAST (paper/past)", "mine": "mine"}


def test_methods_come_in_the_order_of_the_suites(original: Path, tmp_path: Path):
    for name in ("zzz", "embedded/opsd", "embedded/jsd"):
        copy(original, tmp_path / name.replace("/", "-"), ('name = "embedded/past"', f'name = "{name}"'))
    found = [m.name for m in data.methods(data.find([tmp_path, original]))]
    assert found == ["embedded/opsd", "embedded/past", "embedded/jsd", "zzz"]


def test_bands_are_mean_and_range_over_the_seeds_that_have_a_value():
    band = data.band({1: {0: 1.0, 2: 4.0}, 2: {0: 3.0}, 3: {0: 8.0, 2: 0.0}})
    assert (band.x, band.mean, band.low, band.high) == ([0, 2], [4.0, 2.0], [1.0, 0.0], [8.0, 4.0])


def test_smoothing_is_a_centred_mean_of_what_is_there():
    assert data.smooth({1: {0: 1.0, 1: 2.0, 3: 6.0}}, 1) == {1: {0: 1.5, 1: 1.5, 2: 4.0, 3: 6.0}}
    assert data.smooth({1: {0: 1.0, 5: 2.0}}, 1)[1] == {0: 1.0, 1: 1.0, 4: 2.0, 5: 2.0}


def test_change_is_to_the_same_seeds_own_start():
    assert data.change({1: {0: 0.5, 4: 0.75}, 2: {0: 0.25, 4: 0.25}, 3: {4: 1.0}}) == {
        1: {0: 0.0, 4: 0.25},
        2: {0: 0.0, 4: 0.0},
    }


def test_costs_are_those_of_compare(original: Path, tmp_path: Path):
    copy(original, tmp_path / "runs" / "embedded-past-17")
    runs = data.find([tmp_path])
    (method,) = data.methods(runs)
    row = data.measured(method)
    (expected,) = suite.collect(suite.Suite("s", "S", "PAST", {"PAST": "embedded/past"}), [17], tmp_path)
    assert row is not None
    assert (row.costs, row.diagnostics) == (expected.costs, expected.diagnostics)
    assert sum(data.phases(method).values()) == pytest.approx(row.costs["seconds"])
    begun = data.Method("x", "x", {1: data.Run(tmp_path, runs[0].recipe, [], [], {}, {}, {}, [], 0)})
    assert data.measured(begun) is None
