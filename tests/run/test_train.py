from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import SMALL, Quiet
from ranks import Launcher

from past_opsd.core import config
from past_opsd.core.nouns import PastError
from past_opsd.policy import fused, memory
from past_opsd.run import checkpoint
from past_opsd.run.folder import RunFolder
from past_opsd.run.resume import continued, differences
from past_opsd.run.train import Session, session, train

KILLED = [*SMALL, "run.checkpoint_every=2", "evaluation.at=[0.0, 1.0]"]

# Runs a recipe in a process of its own and kills that process for good at the chosen point.
DRIVER = """
import os, signal, sys
from pathlib import Path
from past_opsd.run import checkpoint
from past_opsd.core import config
from past_opsd.run.train import train

out, cycle, phase = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def die(): os.kill(os.getpid(), signal.SIGKILL)

class Display:
    def phase(self, k, name):
        if (k, name) == (cycle, phase): die()
    def cycle(self, k, metrics):
        if (k, "recorded") == (cycle, phase): die()
    def evaluated(self, step, summary): pass
    def note(self, text): pass

if phase.startswith("checkpoint"):
    real = checkpoint.sync
    def sync(path):
        name = f".writing-checkpoint-{cycle + 1:05d}" if phase == "checkpoint" else f"checkpoint-{cycle + 1:05d}"
        if name in str(path) and (phase == "checkpoint" or ".writing" not in str(path)): die()
        real(path)
    def sync_parent(path):
        real(path)
        if path.name == "checkpoints" and (path / f"checkpoint-{cycle + 1:05d}").exists(): die()
    checkpoint.sync = sync if phase == "checkpoint" else sync_parent

train(config.load("embedded/past", sys.argv[4:]), Path(out), False, Display())
"""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, small_recipe) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    train(small_recipe("embedded/past", *KILLED), folder, False, Quiet())
    return folder


def fingerprint(folder: Path, step: int = 3) -> dict[str, bytes]:
    """Everything that must not depend on an interruption."""
    last = RunFolder(folder).checkpoint(step)
    files = {str(p.relative_to(last)): p.read_bytes() for p in sorted(last.rglob("*")) if p.is_file()}
    files["metrics"] = (folder / "metrics.jsonl").read_bytes()
    for kind in ("rollouts", "continuations", "evaluations"):
        files |= {str(p.relative_to(folder)): p.read_bytes() for p in sorted((folder / kind).iterdir())}
    return files


PHASES = ["rollout", "draw", "adapt", "distill", "publish", "recorded"]
POINTS = [(2, p) for p in PHASES] + [(1, "distill"), (2, "evaluate"), (1, "checkpoint"), (1, "checkpointed")]
ALWAYS = [(2, "distill")]


@pytest.mark.parametrize(
    ("cycle", "phase"), [pytest.param(*p, marks=[] if p in ALWAYS else [pytest.mark.slow]) for p in POINTS]
)
def test_sigkill_and_resume_give_the_bits_of_an_unbroken_run(
    unbroken: Path, tmp_path: Path, small_recipe, quiet: Quiet, launch: Launcher, cycle: int, phase: str
):
    folder, driver = tmp_path / "run", tmp_path / "driver.py"
    driver.write_text(DRIVER)
    ended = launch(1, str(driver), str(folder), str(cycle), phase, *KILLED)
    assert ended.codes == [-signal.SIGKILL], ended.err
    reached = RunFolder(folder).steps()[-1]
    assert reached == (2 if cycle == 2 or phase == "checkpointed" else 0)
    outcome = train(small_recipe("embedded/past", *KILLED), folder, True, quiet)
    assert outcome.finished
    assert any("resuming from" in note for note in quiet.notes)
    assert fingerprint(folder) == fingerprint(unbroken)


@pytest.mark.slow
def test_two_runs_are_the_same_and_another_seed_is_not(unbroken: Path, tmp_path: Path, small_recipe):
    train(small_recipe("embedded/past", *KILLED), tmp_path / "again", False, Quiet())
    assert fingerprint(tmp_path / "again") == fingerprint(unbroken)
    train(small_recipe("embedded/past", *KILLED, "run.seed=29"), tmp_path / "other", False, Quiet())
    assert fingerprint(tmp_path / "other")["metrics"] != fingerprint(unbroken)["metrics"]


@pytest.mark.slow
def test_drawing_ahead_is_the_same_run_in_fewer_rounds(tmp_path: Path, small_recipe):
    """Adapters, groups and the controller to the bit; what no group needed is a cost and nothing else."""
    falling = ["method.warmup_cycles=0", "method.success_threshold=0.0", "method.patience=1", "evaluation.at=[]"]
    falling += ["run.cycles=2", "method.group_max=4"]
    for ahead in (0, 3):
        train(small_recipe("embedded/past", *falling, f"method.ahead={ahead}"), tmp_path / str(ahead), False, Quiet())
    runs = [RunFolder(tmp_path / name) for name in ("0", "3")]
    adapters = [
        {str(p.relative_to(run.checkpoint(2))): p.read_bytes() for p in run.checkpoint(2).rglob("*.safetensors")}
        for run in runs
    ]
    assert adapters[0]
    assert adapters[0] == adapters[1]
    states = [checkpoint.read_state(run.checkpoint(2))["method"] for run in runs]
    assert states[0] == states[1]
    assert states[0]["controller"]["base"] == 2
    columns = ["problem", "trajectory", "discarded", "tokens", "correct"]
    for k in range(2):
        files = [run.continuations.path(k) for run in runs]
        assert pq.read_table(files[0], columns=columns) == pq.read_table(files[1], columns=columns)
    plain, ahead = (run.read_metrics()[-1] for run in runs)
    unused = ahead.pop("cost/teacher_ahead_samples")
    assert unused > 0
    assert ahead["cost/teacher_samples"] - plain["cost/teacher_samples"] == unused
    assert ahead["cost/verifier_calls"] - plain["cost/verifier_calls"] == unused
    assert ahead["cost/teacher_tokens"] - plain["cost/teacher_tokens"] == ahead.pop("cost/teacher_ahead_tokens")
    assert {k: v for k, v in ahead.items() if "cost/" not in k} == {k: v for k, v in plain.items() if "cost/" not in k}
    assert "cost/teacher_ahead_samples" not in plain


def test_an_evaluation_that_was_short_of_memory_says_so(
    tmp_path: Path, small_recipe, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "GROWTH", 4)
    tight = ["run.cycles=1", "evaluation.at=[1.0]", "engine.memory_gib=0.0038", "method.branches='correct'"]
    train(small_recipe("embedded/past", *tight), tmp_path / "run", False, quiet)
    (told,) = [note for note in quiet.notes if "memory was short" in note]
    assert re.search(r"evaluation after 1 updates: .* set aside \d+ times and \d[\d,]* tokens read again", told)


@pytest.fixture
def half(unbroken: Path, tmp_path: Path) -> Path:
    """The unbroken run with its last checkpoint taken away."""
    folder = tmp_path / "half"
    shutil.copytree(unbroken, folder)
    shutil.rmtree(RunFolder(folder).checkpoint(3))
    return folder


def test_a_finished_run_resumes_to_itself(unbroken: Path, tmp_path: Path, small_recipe, quiet: Quiet):
    folder = tmp_path / "copy"
    shutil.copytree(unbroken, folder)
    assert train(small_recipe("embedded/past", *KILLED), folder, True, quiet).finished
    assert fingerprint(folder) == fingerprint(unbroken)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["method.beta_kl=0.1"], "recipe.method.beta_kl: 0.05 -> 0.1"),
        (["prompts.student='{problem}'"], "recipe.prompts.student: 'Problem: {problem}' -> '{problem}'"),
        (["verifier.name='exact'"], "verifier: "),
        (["task.seed=1"], "task: "),
    ],
)
def test_resuming_with_another_setup_is_refused_with_the_difference(
    half: Path, small_recipe, quiet: Quiet, overrides: list[str], expected: str
):
    with pytest.raises(PastError, match="was started with another setup") as caught:
        train(small_recipe("embedded/past", *KILLED, *overrides), half, True, quiet)
    assert expected in str(caught.value)


@pytest.mark.slow
def test_a_run_can_be_extended_to_what_a_longer_one_would_be(
    unbroken: Path, tmp_path: Path, small_recipe, quiet: Quiet
):
    """A finished run of three cycles goes on to five: the bits of five in one go, and nothing is lost."""
    longer = [*KILLED, "run.cycles=5"]
    train(small_recipe("embedded/past", *longer), tmp_path / "whole", False, Quiet())
    folder = tmp_path / "extended"
    shutil.copytree(unbroken, folder)
    assert train(small_recipe("embedded/past", *longer), folder, True, quiet).finished
    assert any("going on to 5 cycles instead of 3" in note for note in quiet.notes)
    whole, extended = fingerprint(tmp_path / "whole", 5), fingerprint(folder, 5)
    assert extended.pop("evaluations/step-00003.json")  # the end of the shorter run stays recorded
    for found in (whole, extended):  # and the checkpoint says which boundaries were evaluated
        name = next(name for name in found if name.endswith("state.json"))
        state = json.loads(found.pop(name))
        assert state["records"].pop("evaluated") == ([0, 3, 5] if found is extended else [0, 5])
        assert (state["records"]["digests"].pop("evaluations/step-00003.json", None) is None) == (found is whole)
        found[name] = json.dumps(state).encode()
        del found[name.replace("state.json", "MANIFEST.json")]
    assert extended == whole
    assert 3 in RunFolder(folder).steps()
    assert "cycles = 5" in (folder / "recipe.toml").read_text()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["run.cycles=2"], r"recipe\.run\.cycles: 3 -> 2 \(3 cycles are done already; take 3 or more\)"),
        (["run.cycles=5", "method.beta_kl=0.1"], r"recipe\.method\.beta_kl: 0\.05 -> 0\.1\nAs it was started"),
    ],
)
def test_another_length_is_refused_with_the_reason(
    unbroken: Path, tmp_path: Path, small_recipe, quiet: Quiet, overrides: list[str], expected: str
):
    shutil.copytree(unbroken, tmp_path / "run")
    with pytest.raises(PastError, match=expected) as caught:
        train(small_recipe("embedded/past", *KILLED, *overrides), tmp_path / "run", True, quiet)
    assert "run.cycles: 3 -> 5" not in str(caught.value)  # that alone would be allowed
    assert fingerprint(tmp_path / "run") == fingerprint(unbroken)


def test_a_schedule_that_ends_with_the_run_cannot_be_extended(tmp_path: Path, small_recipe, quiet: Quiet):
    sets = ["evaluation.at=[]", "learner.student.schedule='cosine'"]
    train(small_recipe("embedded/opsd", *sets, "run.cycles=1"), tmp_path / "run", False, quiet)
    with pytest.raises(PastError, match=r"learner\.student\.schedule = 'cosine' ends at run\.cycles"):
        train(small_recipe("embedded/opsd", *sets, "run.cycles=2"), tmp_path / "run", True, quiet)


def test_what_is_kept_and_shown_may_change_and_rounding_is_told(half: Path, small_recipe, quiet: Quiet):
    free = ["run.checkpoint_every=1", "run.keep_checkpoints=5", "evaluation.at=[0.0, 0.34, 0.67, 1.0]"]
    sets = [*KILLED, *free, "learner.token_budget=8000"]
    assert train(small_recipe("embedded/past", *sets), half, True, quiet).finished
    told = "\n".join(quiet.notes)
    assert "learner.token_budget is 8000 now" in told
    assert "not evaluated after 1 cycles: the run is past that" in told
    assert (half / "evaluations" / "step-00002.json").exists()  # asked for where the run goes on: made now


def other_model(folder: Path, change: str) -> Path:
    from past_opsd.tasks import embedded

    shutil.copytree(embedded.model_path(), folder)
    if change == "base":
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        tensors[next(iter(tensors))].flatten()[0] += 1e-3
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif change == "chat_template":
        path = folder / "chat_template.jinja"
        path.write_text(path.read_text() + "{# another #}")
    else:
        path = folder / "tokenizer.json"
        plain = json.loads(path.read_text())
        plain["added_tokens"][0]["lstrip"] = not plain["added_tokens"][0]["lstrip"]
        path.write_text(json.dumps(plain))
    return folder


@pytest.mark.parametrize("change", ["base", "chat_template", "tokenizer"])
def test_resuming_with_another_model_is_refused(tmp_path: Path, small_recipe, quiet: Quiet, change: str):
    model, run = tmp_path / "model", tmp_path / "run"
    other_model(model, "chat_template" if change != "chat_template" else "tokenizer")
    recipe = small_recipe("embedded/past", "run.cycles=1", "evaluation.at=[]", f"model.path='{model}'")
    train(recipe, run, False, quiet)
    shutil.rmtree(model)
    other_model(model, change)
    with pytest.raises(PastError, match=rf"\n  {change}: "):
        train(recipe, run, True, quiet)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_told(
    unbroken: Path, tmp_path: Path, small_recipe, quiet: Quiet, damage: str
):
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    file = RunFolder(folder).checkpoint(3) / "teacher" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[-5] ^= 1
        file.write_bytes(data)
    elif damage == "remove":
        file.unlink()
    else:
        (RunFolder(folder).checkpoint(3) / checkpoint.MANIFEST).write_text("{")
    train(small_recipe("embedded/past", *KILLED), folder, True, quiet)
    assert any("is damaged" in note for note in quiet.notes)
    assert fingerprint(folder) == fingerprint(unbroken)


def test_without_any_whole_checkpoint_the_run_is_refused(half: Path, small_recipe, quiet: Quiet):
    for step in RunFolder(half).steps():
        (RunFolder(half).checkpoint(step) / checkpoint.MANIFEST).unlink()
    with pytest.raises(PastError, match="no checkpoint is whole"):
        train(small_recipe("embedded/past", *KILLED), half, True, quiet)


def test_an_existing_run_is_not_overwritten(unbroken: Path, small_recipe, quiet: Quiet):
    before = fingerprint(unbroken)
    with pytest.raises(PastError, match="already holds a run"):
        train(small_recipe("embedded/past", *KILLED), unbroken, False, quiet)
    assert fingerprint(unbroken) == before


# One writer, and records that were lost


class Training(Quiet):
    """Tries to train in the same folder from within a cycle."""

    def __init__(self, act) -> None:
        super().__init__()
        self._act = act
        self.told: list[str] = []

    def phase(self, cycle: int, name: str) -> None:
        if (cycle, name) == (0, "adapt"):
            for resume in (False, True):
                with pytest.raises(PastError) as caught:
                    self._act(resume)
                self.told.append(str(caught.value))


def test_a_second_trainer_of_a_folder_is_refused(tmp_path: Path, unbroken: Path, small_recipe):
    recipe, folder = small_recipe("embedded/past", *KILLED), tmp_path / "run"
    display = Training(lambda resume: train(recipe, folder, resume, Quiet()))
    assert train(recipe, folder, False, display).finished
    assert len(display.told) == 2
    for text in display.told:
        assert f"{folder} is being written by another process (" in text
        assert f"pid {os.getpid()} on " in text
    assert fingerprint(folder) == fingerprint(unbroken)
    assert not (folder / ".lock").exists()


@pytest.mark.slow
def test_a_run_is_looked_at_while_it_trains(tmp_path: Path, small_recipe):
    from past_opsd.analysis import report
    from past_opsd.analysis.report.data import find
    from past_opsd.run import boundary

    class Looking(Quiet):
        def phase(self, cycle: int, name: str) -> None:
            if (cycle, name) == (1, "adapt"):
                report.write(find([folder]), folder / "report" / "index.html", trajectories=0, figures=False)
                step, _ = boundary.choose(folder, None)
                RunFolder(folder).write_probe(step, {"step": step})

    folder = tmp_path / "run"
    assert train(small_recipe("embedded/past", "run.cycles=2", "evaluation.at=[]"), folder, False, Looking()).finished
    assert (folder / "report" / "index.html").is_file()
    assert len(list((folder / "probes").glob("step-*.json"))) == 1


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path, small_recipe, quiet: Quiet):
    with pytest.raises(PastError, match="problems_per_cycle"):
        train(small_recipe("embedded/past", "rollout.problems_per_cycle=99"), tmp_path / "a" / "b", False, quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", [False, True])
def test_records_without_checkpoints_are_not_deleted(half: Path, small_recipe, quiet: Quiet, resume: bool):
    shutil.rmtree(half / "checkpoints")
    before = {p: p.read_bytes() for p in half.rglob("*") if p.is_file()}
    with pytest.raises(PastError, match=r"holds records of a run \(metrics\.jsonl\) but no checkpoint"):
        train(small_recipe("embedded/past", *KILLED), half, resume, quiet)
    assert {p: p.read_bytes() for p in half.rglob("*") if p.is_file()} == before


def test_a_recipe_that_a_person_wrote_is_not_replaced(tmp_path: Path, small_recipe, quiet: Quiet):
    file = tmp_path / "recipe.toml"
    for text in ('inherits = "embedded/past"  # mine\n', "not a recipe"):
        file.write_text(text)
        with pytest.raises(PastError, match=r"recipe\.toml was not written by a run"):
            train(small_recipe("embedded/past", *KILLED), tmp_path, False, quiet)
        assert file.read_text() == text
    file.write_text(config.to_toml(small_recipe("embedded/opsd")))  # of a start that was killed early
    recipe = small_recipe("embedded/past", "run.cycles=1", "evaluation.at=[]")
    assert train(recipe, tmp_path, False, quiet).finished
    assert file.read_text() == config.to_toml(recipe)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_a_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]))


GONE = {
    "metrics.jsonl": (remove, "lost: metrics.jsonl lacks cycles 0-1"),
    "timings.jsonl": (remove, "lost: timings.jsonl lacks cycles 0-1"),
    "rollouts": (remove, "lost: rollouts/ lacks cycles 0-1"),
    "evaluations": (remove, "lost: evaluations/ lacks step 0"),
    "recipe.toml": (remove, "recipe.toml is written anew: it was missing"),
}
DAMAGED = {
    "metrics.jsonl": (without_a_line, "lost: metrics.jsonl lacks cycle 0"),
    "rollouts/cycle-00001.parquet": (cut, "lost: rollouts/: cycle 1 cannot be read"),
    "continuations": (remove, "lost: continuations/ lacks cycle 1"),  # whether cycle 0 had any nobody knows any more
    "evaluations/step-00000.json": (cut, "it is damaged-step-00000.json now"),
    "recipe.toml": (cut, "recipe.toml is written anew: it was damaged"),
}


@pytest.mark.parametrize("blows", [GONE, DAMAGED], ids=["gone", "damaged"])
def test_a_resume_says_what_is_lost_and_counts_on(half: Path, unbroken: Path, small_recipe, quiet: Quiet, blows):
    for name, (damage, _) in blows.items():
        damage(half / name)
    outcome = train(small_recipe("embedded/past", *KILLED), half, True, quiet)
    assert outcome.finished
    assert any("the checkpoint of boundary 2 is whole: adapters, optimizers, cost totals" in n for n in quiet.notes)
    for _, told in blows.values():
        assert any(told in note for note in quiet.notes), quiet.notes
        assert told in outcome.warnings or not told.startswith("lost:")
    last = RunFolder(half).checkpoint(3).relative_to(half)
    assert (half / last / "state.json").read_bytes() == (unbroken / last / "state.json").read_bytes()
    assert (half / "metrics.jsonl").read_bytes().splitlines()[-1] == (
        unbroken / "metrics.jsonl"
    ).read_bytes().splitlines()[-1]
    assert (half / "recipe.toml").read_bytes() == (unbroken / "recipe.toml").read_bytes()


def test_a_whole_run_has_nothing_to_say_of_its_records(half: Path, small_recipe, quiet: Quiet):
    outcome = train(small_recipe("embedded/past", *KILLED), half, True, quiet)
    told = ("lost", "altered", "anew")
    assert not any(word in text for text in (*quiet.notes, *outcome.warnings) for word in told)


def test_a_resume_says_which_record_was_altered(
    half: Path, small_recipe, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
):
    """Files that are whole and valid, but not those that were written; and the state is read once."""
    run, reads = RunFolder(half), []
    file = run.rollouts.path(1)
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index("reason"), "reason", [["wrong"] * len(table)]), file)
    scores = run.evaluations.path(0)
    scores.write_text(scores.read_text().replace('"dropped": 0', '"dropped": 1'))
    run.metrics_file.write_text(run.metrics_file.read_text().replace('"rollout/dropped": 0', '"rollout/dropped": 1', 1))
    read = checkpoint.read_json
    monkeypatch.setattr(checkpoint, "read_json", lambda path: reads.append(path) or read(path))
    assert train(small_recipe("embedded/past", *KILLED), half, True, quiet).finished
    assert sorted(note for note in quiet.notes if note.startswith("altered: ")) == [
        "altered: evaluations/step-00000.json is not what the run wrote",
        "altered: metrics.jsonl, cycle 0 is not what the run wrote",
        "altered: rollouts/cycle-00001.parquet is not what the run wrote",
    ]
    assert any("the checkpoint of boundary 2 is whole" in note for note in quiet.notes)
    assert reads.count(run.checkpoint(2) / "state.json") == 1


def test_the_evaluation_of_the_boundary_a_run_stands_at_is_made_again(
    unbroken: Path, tmp_path: Path, small_recipe, quiet: Quiet
):
    folder = Path(shutil.copytree(unbroken, tmp_path / "run"))
    (folder / "evaluations" / "step-00003.json").unlink()
    assert train(small_recipe("embedded/past", *KILLED), folder, True, quiet).finished
    assert any("evaluations/ lacks step 3" in note for note in quiet.notes)
    assert fingerprint(folder) == fingerprint(unbroken)


@pytest.mark.parametrize("known", [True, False])
def test_a_checkpoint_of_an_earlier_version_counts_on_from_the_metrics(
    half: Path, unbroken: Path, small_recipe, quiet: Quiet, known: bool
):
    """One that does not hold the totals: they are in the last line, or else they are told to be lost."""
    path = RunFolder(half).checkpoint(2)
    state = json.loads((path / "state.json").read_text())
    del state["records"]
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    content = (path / "state.json").read_bytes()
    manifest["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    if not known:
        (half / "metrics.jsonl").unlink()
    train(small_recipe("embedded/past", *KILLED), half, True, quiet)
    same = (half / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    told = any("lost: the costs of cycles before 2; totals count from there" in note for note in quiet.notes)
    assert (same, told) == (known, not known)


def test_one_ctrl_c_ends_at_the_next_boundary(tmp_path: Path, unbroken: Path, small_recipe):
    class Interrupting(Quiet):
        def phase(self, cycle: int, name: str) -> None:
            if (cycle, name) == (0, "adapt"):
                signal.raise_signal(signal.SIGINT)

    folder = tmp_path / "run"
    outcome = train(small_recipe("embedded/past", *KILLED), folder, False, Interrupting())
    assert (outcome.completed, outcome.finished) == (1, False)
    assert train(small_recipe("embedded/past", *KILLED), folder, True, Quiet()).finished
    assert fingerprint(folder) == fingerprint(unbroken)


def test_training_works_off_the_main_thread(tmp_path: Path, small_recipe):
    recipe = small_recipe("embedded/opsd", "run.cycles=1", "evaluation.at=[]")
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(train(recipe, tmp_path / "run", False, Quiet())))
    thread.start()
    thread.join()
    assert outcomes[0].finished


def test_student_adapter_loads_in_plain_peft(unbroken: Path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from past_opsd.tasks import embedded

    base = AutoModelForCausalLM.from_pretrained(embedded.model_path())
    ids = torch.tensor([[1, 2, 3]])
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, str(RunFolder(unbroken).checkpoint(3)))(ids).logits
    assert not torch.equal(plain, adapted)


def test_no_file_of_a_checkpoint_is_a_pickle(unbroken: Path):
    for path in RunFolder(unbroken).checkpoint(3).rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".safetensors"), path


def test_evaluated_checkpoints_are_kept_and_others_pruned(unbroken: Path, small_recipe, tmp_path: Path):
    assert RunFolder(unbroken).steps() == [0, 2, 3]
    recipe = small_recipe("embedded/opsd", "run.cycles=4", "run.keep_checkpoints=1", "evaluation.at=[0.5]")
    train(recipe, tmp_path / "run", False, Quiet())
    assert RunFolder(tmp_path / "run").steps() == [2, 4]


def test_too_many_problems_a_cycle_is_told(small_recipe, tmp_path: Path, quiet: Quiet):
    with pytest.raises(PastError, match=r"rollout\.problems_per_cycle = 99 is more than the task's 60 problems"):
        train(small_recipe("embedded/past", "rollout.problems_per_cycle=99"), tmp_path, False, quiet)


@pytest.mark.slow
def test_a_wrong_tau_is_noticed_in_a_real_run(tmp_path: Path, small_recipe, quiet: Quiet):
    """The threshold of a large vocabulary on the tiny one: the clip turns gradients around, and the run says so."""
    recipe = small_recipe("embedded/opsd", "run.cycles=10", "method.tau=0.01", "evaluation.at=[]")
    outcome = train(recipe, tmp_path / "run", False, quiet)
    assert any("clipping turned the gradient" in note for note in quiet.notes)
    assert any("clipping turned the gradient" in warning for warning in outcome.warnings)


def test_differences():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c: 2 -> 3", "d: None -> 4"]


def test_a_run_goes_on_without_a_key_that_changed_nothing(past: Session, tmp_path: Path):
    saved = json.loads(json.dumps(past.identity))
    state = {"identity": saved, "next_cycle": 0}
    saved["recipe"]["method"]["epsilon"] = 0.3
    assert continued(RunFolder(tmp_path), state, past.recipe, past.identity) == []
    saved["recipe"]["method"]["tau"] = 0.3
    with pytest.raises(PastError, match=r"recipe\.method\.tau: 0\.3 -> 1\.0"):
        continued(RunFolder(tmp_path), state, past.recipe, past.identity)


def test_a_run_goes_on_with_a_key_that_came_later_if_it_has_its_default(past: Session, tmp_path: Path):
    saved = json.loads(json.dumps(past.identity))
    state = {"identity": saved, "next_cycle": 0}
    del saved["recipe"]["rollout"]["dynamic_rounds"]
    assert continued(RunFolder(tmp_path), state, past.recipe, past.identity) == []
    later = past.recipe.model_copy(update={"rollout": past.recipe.rollout.model_copy(update={"dynamic_rounds": 3})})
    identity = past.identity | {"recipe": config.dump(later)}
    with pytest.raises(PastError, match=r"recipe\.rollout\.dynamic_rounds: None -> 3"):
        continued(RunFolder(tmp_path), state, later, identity)


@pytest.mark.parametrize(("was", "now"), [("auto", "fused"), ("fused", "auto")])
def test_what_a_machine_settled_may_be_written_out_and_left_to_it_again(
    small_recipe, tmp_path: Path, was: str, now: str
):
    with session(small_recipe("embedded/past", f"learner.implementation='{now}'")) as past:
        assert past.identity["settled"] == {"losses": "fused", "adapters": "float32"}
        saved = json.loads(json.dumps(past.identity))
        saved["recipe"]["learner"]["implementation"] = was
        assert continued(RunFolder(tmp_path), {"identity": saved, "next_cycle": 0}, past.recipe, past.identity) == []
        saved["settled"]["losses"] = "bf16"
        with pytest.raises(PastError, match=r"settled\.losses: 'bf16' -> 'fused'"):
            continued(RunFolder(tmp_path), {"identity": saved, "next_cycle": 0}, past.recipe, past.identity)


def test_a_run_of_an_earlier_version_goes_on_with_what_is_settled_now(past: Session, tmp_path: Path):
    """It knew neither `settled` nor the keys behind it: other roundings are told, what is more than that is refused."""

    def notes(implementation: str, dtype: str = "float32") -> list[str]:
        saved, identity = json.loads(json.dumps(past.identity)), json.loads(json.dumps(past.identity))
        del saved["settled"], saved["recipe"]["model"]["lora"]["compute"]
        saved["recipe"]["learner"]["implementation"] = implementation
        identity["settled"]["adapters"] = dtype
        return continued(RunFolder(tmp_path), {"identity": saved, "next_cycle": 0}, past.recipe, identity)

    assert notes("fused") == []
    assert notes("triton") == ["losses in fused now, not triton: the same sums, rounded otherwise"]
    assert notes("fused", "bfloat16") == ["adapters in bfloat16 now, not float32: the same sums, rounded otherwise"]
    with pytest.raises(PastError, match=r"settled\.losses: 'bf16' -> 'fused'"):
        notes("bf16")


def test_what_was_chosen_for_a_gpu_is_said_once_at_the_start(small_recipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "settle", lambda requested, device: ("fused", f"{requested} is fused on {device}"))
    with session(small_recipe()) as past:
        assert past.notes.count("auto is fused on cpu") == 1
