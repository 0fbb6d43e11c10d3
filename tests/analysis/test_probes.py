from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Quiet
from rich.console import Console

from past_opsd.analysis import probe_tables, probes, theory
from past_opsd.core import config
from past_opsd.core.nouns import Attempt, PastError, Problem, Response, Verdict, View
from past_opsd.interface import arguments, commands
from past_opsd.run import boundary
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import session, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_recipe) -> Path:
    folder = tmp_path_factory.mktemp("probes") / "run"
    quick = ["run.cycles=2", "evaluation.samples=1", "evaluation.pass_k=[1]", "evaluation.at=[0.0, 1.0]"]
    train(small_recipe("embedded/past", *quick), folder, False, Quiet())
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def parsed(*words: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.probe(parser)
    return parser.parse_args([str(w) for w in words])


def attempt(problem: str, correct: bool) -> Attempt:
    response = Response((1,), f"{problem} {correct}", (0.0,), True)
    verdict = Verdict(correct, "correct" if correct else "wrong")
    return Attempt(Problem(problem, problem, "z", "a"), View("student", (1,)), response, verdict)


def test_a_donor_is_another_problem_of_the_same_verdict_and_serves_once():
    attempts = [attempt(f"p{i}", correct) for i in range(9) for correct in (True, True, i % 3 == 0)]
    found = probes.donors(attempts, seed=5)
    assert sorted(found) == list(range(len(attempts)))
    for a, j in zip(attempts, found, strict=True):
        assert attempts[j].problem.id != a.problem.id
        assert attempts[j].verdict.correct == a.verdict.correct
    assert found != probes.donors(attempts, seed=6)


def test_a_class_of_one_problem_takes_donors_of_the_other_class():
    attempts = [attempt("p0", False), attempt("p0", False), attempt("p1", True), attempt("p2", True)]
    found = probes.donors(attempts, seed=5)
    assert all(attempts[j].problem.id != a.problem.id for a, j in zip(attempts, found, strict=True))
    assert found[2:] == [3, 2]
    with pytest.raises(PastError, match="two problems"):
        probes.donors(attempts[:2], seed=5)


def test_each_condition_reads_its_own_prompt(past):
    a, donor = attempt("3+2*2", True), attempt("5*7+8", True)
    views = probes.teacher_views(past.loop.prompts, "teacher", a, donor)
    texts = {name: past.model.tokenizer.decode(view.prompt) for name, view in views.items()}
    assert past.loop.prompts.hindsight(a.problem, a.response.text) == views["matching"].prompt
    assert past.loop.prompts.hindsight(a.problem, donor.response.text) == views["shuffled"].prompt
    assert "Attempt" in texts["matching"]
    assert "Attempt" in texts["shuffled"]
    assert "Attempt" not in texts["removed"]
    assert {view.adapter for view in views.values()} == {"teacher"}


def logits_of(at: boundary.Boundary, view: View, tokens: tuple[int, ...]) -> np.ndarray:
    """Next-token probabilities along `tokens`, from the whole network's own logits."""
    at.session.model.activate(view.adapter)
    ids = torch.tensor([view.prompt + tokens])
    with torch.no_grad():
        logits = at.session.model.network(input_ids=ids).logits[0, len(view.prompt) - 1 : -1]
    return torch.softmax(logits.double(), -1).numpy()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.slow
@pytest.mark.portable
def test_every_number_of_a_response_is_what_the_network_says(finished: Path, shared: bool, monkeypatch):
    with boundary.opened(finished, 2) as at:
        if shared:  # as with a model whose positions cost more than an attention of its own
            at.session.model.__dict__["worth"] = 1
        together: list[bool] = []
        hidden = at.session.model.hidden
        monkeypatch.setattr(
            at.session.model, "hidden", lambda reads, sizes=(): together.append(bool(sizes)) or hidden(reads, sizes)
        )
        # Chunks of one row: the means must not notice.
        small = at.session.recipe.learner.model_copy(update={"loss_memory_mib": 0, "token_budget": 150})
        at.session.recipe = at.session.recipe.model_copy(update={"learner": small})
        attempts = boundary.responses(at, at.session.loop.problems[:4], 2, "test")
        donors = probes.donors(attempts, 1)
        views = [
            probes.teacher_views(at.session.loop.prompts, at.teacher, a, attempts[j])
            for a, j in zip(attempts, donors, strict=True)
        ]
        measured = probes.measure(at, attempts, views)
        completion = at.session.loop.prompts.completion
        departures = [probes.departed(a.response.tokens, completion(a.problem.solution)) for a in attempts]
        assert any(departures)
        for i, (a, view) in enumerate(zip(attempts, views, strict=True)):
            y = a.response.tokens
            student, matching = logits_of(at, a.view, y), logits_of(at, view["matching"], y)
            for condition in probe_tables.CONDITIONS:
                teacher = logits_of(at, view[condition], y)
                got = {name: values[i] for name, values in measured.values[condition].items()}
                assert got["jsd_student"] == pytest.approx(theory.js(teacher, student).mean(), abs=2e-6)
                assert got["jsd_matching"] == pytest.approx(theory.js(teacher, matching).mean(), abs=2e-6)
                left = departures[i]
                seen = [float("nan")] * 2 if left is None else [teacher[left[0], id_] for id_ in (left[1], y[left[0]])]
                assert [got["p_reference"], got["p_own"]] == pytest.approx(seen, abs=2e-6, nan_ok=True)
        continued = probes._continue(at, attempts, views)["removed"]
        got = measured.values["removed"]
        for i, (a, c) in enumerate(zip(attempts, continued, strict=True)):
            teacher, student = (logits_of(at, v, c.response.tokens) for v in (c.view, a.view))
            assert got["kl"][i] == pytest.approx(theory.kl(teacher, student).mean(), abs=5e-6)
            assert got["success"][i] == c.verdict.correct
            assert math.isnan(got["kl_successful"][i]) != c.verdict.correct
    assert max(got["kl"]) > 1e-4
    assert any(together) == shared


def test_both_adapters_are_those_of_the_checkpoint(finished: Path, tmp_path: Path):
    with boundary.opened(finished, 2) as at:
        at.session.model.save_adapter("student", tmp_path)
        student = (tmp_path / "adapter_model.safetensors").read_bytes()
        at.session.model.save_adapter("teacher", tmp_path)
        teacher = (tmp_path / "adapter_model.safetensors").read_bytes()
    saved = RunFolder(finished).checkpoint(2)
    assert student == (saved / "adapter_model.safetensors").read_bytes()
    assert teacher == (saved / "teacher" / "adapter_model.safetensors").read_bytes()


def test_conditions_share_seeds_and_samples_do_not(finished: Path):
    with boundary.opened(finished, 2) as at:
        attempts = boundary.responses(at, at.session.loop.problems[:8], 2, "test")
        removed = [View("teacher", at.session.loop.prompts.removed(a.problem)) for a in attempts]
        views = [dict.fromkeys(probe_tables.CONDITIONS, view) for view in removed]
        first, second = (probes._continue(at, attempts, views)[c] for c in ("matching", "shuffled"))
        assert [c.response for c in first] == [c.response for c in second]
        assert any(a.response != b.response for a, b in zip(first[::2], first[1::2], strict=True))


@pytest.mark.parametrize(
    ("tokens", "reference", "found"),
    [((1, 2, 3), (1, 5, 6), (1, 5)), ((1, 2), (1, 2, 3), None), ((1, 2, 3), (1, 2), None), ((4,), (5,), (0, 5))],
)
def test_a_departure_is_the_first_other_token(tokens, reference, found):
    assert probes.departed(tokens, reference) == found


def test_scores_are_means_within_a_problem_first():
    values = np.array([1.0, 0.0, 1.0, np.nan, 5.0])
    mask = np.array([True, True, True, True, False])
    scores = probes.by_problem(["a", "a", "b", "c", "b"], values, mask)
    assert scores[:2].tolist() == [0.5, 1.0]
    assert math.isnan(scores[2])
    assert probes.interval(np.array([]), 0) is None
    assert probes.interval(np.array([0.5]), 0) == {"estimate": 0.5, "low": None, "high": None, "problems": 1}


def test_the_command_writes_what_it_prints(copied: Path, capsys: pytest.CaptureFixture[str]):
    words = (copied, "--problems", "10", "--samples", "2", "--json")
    assert commands.probe(parsed(*words)) == 0
    printed = json.loads(capsys.readouterr().out)
    file = copied / "probes" / "step-00002.json"
    assert json.loads(file.read_text()) == printed
    assert printed["counts"]["responses"] == 20 == printed["counts"]["correct"] + printed["counts"]["failed"]
    assert printed["settings"]["own_condition"] == "matching"
    assert printed["settings"]["teacher_adapter"] == "teacher"
    for condition in ("removed", "shuffled"):
        found = printed["conditions"][condition]["all"]["success"]["estimate"]
        base = printed["conditions"]["matching"]["all"]["success"]["estimate"]
        difference = printed["differences"][f"{condition}-matching"]["all"]["success"]
        assert difference["estimate"] == pytest.approx(found - base)
        assert difference["low"] <= difference["estimate"] <= difference["high"]
        assert printed["conditions"][condition]["all"]["jsd_matching"]["low"] > 0
    assert abs(printed["conditions"]["matching"]["all"]["jsd_matching"]["estimate"]) < 1e-7
    before = file.read_text()
    commands.probe(parsed(*words))
    assert file.read_text() == before


def fits(text: str) -> bool:
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("written")]
    return max(map(len, lines)) <= 80 and "…" not in text


def test_the_table_fits_80_columns(copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert commands.probe(parsed(copied, "--problems", "6", "--samples", "2", "--split", "evaluation")) == 0
    text = capsys.readouterr().out
    assert fits(text)
    assert "12 responses of 6 evaluation problems" in text
    assert "\nteacher success: " in text


@pytest.mark.slow
def test_every_checkpoint_is_measured_with_its_own_weights(copied: Path, capsys: pytest.CaptureFixture[str]):
    commands.probe(parsed(copied, "--every-checkpoint", "--problems", "4", "--samples", "1", "--json"))
    results = json.loads(capsys.readouterr().out)
    assert [r["step"] for r in results] == RunFolder(copied).steps()
    commands.probe(parsed(copied, "--problems", "4", "--samples", "1", "--json"))
    assert json.loads(capsys.readouterr().out) == results[-1]
    probe_tables.show_steps(Console(width=80), results, copied)
    shown = capsys.readouterr().out
    assert fits(shown)
    assert shown.count("teacher success:") == len(results)


def result(successes: dict[str, float], gaps: dict[str, tuple[float, float]]) -> str:
    conditions = {c: {"all": {"success": {"estimate": v}}} for c, v in successes.items()}
    differences = {}
    for a, b in probe_tables.DIFFERENCES:
        low, high = gaps[f"{a}-{b}"]
        value = {"estimate": successes[a] - successes[b], "low": low, "high": high}
        differences[f"{a}-{b}"] = {"all": {"success": value}}
    return probes.verdict(conditions, differences)


def test_the_verdict_claims_only_what_is_certain():
    ordered = {"matching": 0.6, "removed": 0.5, "shuffled": 0.4}
    sure = {"removed-matching": (-0.2, -0.05), "shuffled-matching": (-0.3, -0.1), "shuffled-removed": (-0.2, -0.01)}
    assert "matching above removed above shuffled" in result(ordered, sure)
    unsure = sure | {"shuffled-removed": (-0.2, 0.01)}
    text = result(ordered, unsure)
    assert "matching above removed above shuffled" not in text
    assert "certain is matching above removed and matching above shuffled" in text
    assert text.endswith("not distinguishable: removed and shuffled")
    swapped = {"matching": 0.6, "removed": 0.4, "shuffled": 0.5}
    text = result(swapped, sure | {"shuffled-removed": (0.01, 0.2)})
    assert text.endswith("matching above shuffled above removed; all paired intervals exclude zero")
    turned = {"matching": 0.4, "removed": 0.5, "shuffled": 0.41}
    gaps = {"removed-matching": (0.05, 0.2), "shuffled-matching": (-0.1, 0.1), "shuffled-removed": (-0.2, 0.1)}
    text = result(turned, gaps)
    assert "seen as removed 50.0 %, shuffled 41.0 %, matching 40.0 %" in text
    assert "certain is removed above matching;" in text


@pytest.mark.parametrize(
    ("value", "percent", "sign", "shown"),
    [
        (0.781, True, False, "78.1"),
        (-0.0004, True, True, "+0.0"),
        (0.00123, False, False, ".0012"),
        (-0.5, False, True, "-.5000"),
        (10.25, False, False, "10.250"),
        (-1e-9, False, False, ".0000"),
    ],
)
def test_numbers_are_short(value: float, percent: bool, sign: bool, shown: str):
    assert probe_tables.number(value, percent, sign) == shown


def test_bad_input_is_one_clear_message(copied: Path, tmp_path: Path):
    with pytest.raises(PastError, match="not a run folder"):
        commands.probe(parsed(tmp_path))
    with pytest.raises(PastError, match=r"no checkpoint of step 7; kept are 0, 1, 2"):
        commands.probe(parsed(copied, "--step", "7"))
    with pytest.raises(PastError, match="problems is 1"):
        commands.probe(parsed(copied, "--problems", "1"))
    adapter = RunFolder(copied).checkpoint(2) / "teacher" / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-1])
    with pytest.raises(PastError, match=r"is damaged .*other steps kept: 0, 1"):
        commands.probe(parsed(copied, "--step", "2"))
    step, notes = boundary.choose(copied, None)
    assert step == 1
    assert "damaged" in notes[0]
    steps, notes = boundary.whole(copied)
    assert steps == [0, 1]
    assert len(notes) == 1


def test_a_run_on_another_base_is_refused(copied: Path):
    path = RunFolder(copied).checkpoint(2) / "state.json"
    state = json.loads(path.read_text())
    state["identity"]["verifier"] = "another"
    path.write_text(json.dumps(state))
    with boundary.opened(copied, 2) as at:
        assert any("verifier" in note for note in at.notes)
        assert not any("recipe" in note for note in at.notes)
    state["identity"]["base"] = "another"
    path.write_text(json.dumps(state))
    with pytest.raises(PastError, match="another model"), boundary.opened(copied, 2):
        pass


@pytest.mark.parametrize("name", ["grpo", "sft", "opd"])
def test_methods_without_a_privileged_teacher_are_refused(copied: Path, small_recipe, name: str):
    (copied / "recipe.toml").write_text(config.to_toml(small_recipe(f"embedded/{name}")))
    with pytest.raises(PastError, match="probe"):
        commands.probe(parsed(copied))


@pytest.mark.parametrize(
    ("name", "adapter", "own"),
    [
        ("past", "teacher", "matching"),
        ("trajectory_only", "base", "matching"),
        ("teacher_only", "teacher", "removed"),
        ("opsd", "base", "removed"),
        ("opsd_ema", "teacher", "removed"),
        ("h2sd", "base", "other"),
        ("sd_zero", "teacher", "other"),
    ],
)
def test_the_teacher_is_the_one_that_the_method_uses(small_recipe, name: str, adapter: str, own: str):
    with session(small_recipe(f"embedded/{name}")) as parts:
        assert boundary.teacher_adapter(parts) == adapter
        assert boundary.own_condition(parts) == own


def test_what_does_not_fit_is_dropped_and_counted(finished: Path):
    with boundary.opened(finished, 2) as at:
        prompts, problems = at.session.loop.prompts, at.session.loop.problems[:6]
        longest = max(len(prompts.hindsight(p, "")) for p in problems)
        at.session.loop.max_context = longest + 34 + 14
        found = probes.probe(at, problems, 2, "train")
        assert 0 < found["counts"]["dropped"] == 12 - found["counts"]["responses"] < 12
        at.session.loop.max_context = 10
        with pytest.raises(PastError, match="max_context"):
            probes.probe(at, problems, 2, "train")


def test_a_subset_without_responses_has_no_estimate():
    values = dict.fromkeys(probe_tables.METRICS, np.array([0.25, 0.75]))
    measured = probes.Measured(["a", "b"], np.array([True, True]), dict.fromkeys(probe_tables.CONDITIONS, values), {})
    found = probes._estimates(measured, values, None, 0)
    assert found["failed"] == dict.fromkeys(probe_tables.METRICS)
    assert found["correct"]["kl"] == found["all"]["kl"]
    assert found["all"]["kl"]["estimate"] == 0.5
    assert probe_tables.cell(found["failed"]["kl"]) == "-"
