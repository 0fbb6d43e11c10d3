from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import SMALL, Quiet

from past_opsd import checkpoint
from past_opsd.train import differences, train
from past_opsd.types import PastError

KILLED = [*SMALL, "run.checkpoint_every=2", "evaluation.at=[0.0, 1.0]"]

# Runs a recipe in a process of its own and kills that process for good at the chosen point.
DRIVER = """
import os, signal, sys
from pathlib import Path
from past_opsd import checkpoint, config
from past_opsd.train import train

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
    last = checkpoint.folder(folder, step)
    files = {str(p.relative_to(last)): p.read_bytes() for p in sorted(last.rglob("*")) if p.is_file()}
    files["metrics"] = (folder / "metrics.jsonl").read_bytes()
    for kind in ("rollouts", "continuations", "evaluations"):
        files |= {str(p.relative_to(folder)): p.read_bytes() for p in sorted((folder / kind).iterdir())}
    return files


PHASES = ["rollout", "draw", "adapt", "distill", "publish", "recorded"]
POINTS = [(2, p) for p in PHASES] + [(1, "distill"), (2, "evaluate"), (1, "checkpoint"), (1, "checkpointed")]


@pytest.mark.parametrize(("cycle", "phase"), POINTS)
def test_sigkill_and_resume_give_the_bits_of_an_unbroken_run(
    unbroken: Path, tmp_path: Path, small_recipe, quiet: Quiet, cycle: int, phase: str
):
    folder = tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRIVER, str(folder), str(cycle), phase, *KILLED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    reached = checkpoint.steps(folder)[-1]
    assert reached == (2 if cycle == 2 or phase == "checkpointed" else 0)
    outcome = train(small_recipe("embedded/past", *KILLED), folder, True, quiet)
    assert outcome.finished
    assert any("resuming from" in note for note in quiet.notes)
    assert fingerprint(folder) == fingerprint(unbroken)


def test_two_runs_are_the_same_and_another_seed_is_not(unbroken: Path, tmp_path: Path, small_recipe):
    train(small_recipe("embedded/past", *KILLED), tmp_path / "again", False, Quiet())
    assert fingerprint(tmp_path / "again") == fingerprint(unbroken)
    train(small_recipe("embedded/past", *KILLED, "run.seed=29"), tmp_path / "other", False, Quiet())
    assert fingerprint(tmp_path / "other")["metrics"] != fingerprint(unbroken)["metrics"]


@pytest.fixture
def half(unbroken: Path, tmp_path: Path) -> Path:
    """The unbroken run with its last checkpoint taken away."""
    folder = tmp_path / "half"
    shutil.copytree(unbroken, folder)
    shutil.rmtree(checkpoint.folder(folder, 3))
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
    file = checkpoint.folder(folder, 3) / "teacher" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[-5] ^= 1
        file.write_bytes(data)
    elif damage == "remove":
        file.unlink()
    else:
        (checkpoint.folder(folder, 3) / checkpoint.MANIFEST).write_text("{")
    train(small_recipe("embedded/past", *KILLED), folder, True, quiet)
    assert any("is damaged" in note for note in quiet.notes)
    assert fingerprint(folder) == fingerprint(unbroken)


def test_without_any_whole_checkpoint_the_run_is_refused(half: Path, small_recipe, quiet: Quiet):
    for step in checkpoint.steps(half):
        (checkpoint.folder(half, step) / checkpoint.MANIFEST).unlink()
    with pytest.raises(PastError, match="no checkpoint is whole"):
        train(small_recipe("embedded/past", *KILLED), half, True, quiet)


def test_an_existing_run_is_not_overwritten(unbroken: Path, small_recipe, quiet: Quiet):
    before = fingerprint(unbroken)
    with pytest.raises(PastError, match="already holds a run"):
        train(small_recipe("embedded/past", *KILLED), unbroken, False, quiet)
    assert fingerprint(unbroken) == before


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
    adapted = PeftModel.from_pretrained(base, str(checkpoint.folder(unbroken, 3)))(ids).logits
    assert not torch.equal(plain, adapted)


def test_no_file_of_a_checkpoint_is_a_pickle(unbroken: Path):
    for path in checkpoint.folder(unbroken, 3).rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".safetensors"), path


def test_evaluated_checkpoints_are_kept_and_others_pruned(unbroken: Path, small_recipe, tmp_path: Path):
    assert checkpoint.steps(unbroken) == [0, 2, 3]
    recipe = small_recipe("embedded/opsd", "run.cycles=4", "run.keep_checkpoints=1", "evaluation.at=[0.5]")
    train(recipe, tmp_path / "run", False, Quiet())
    assert checkpoint.steps(tmp_path / "run") == [2, 4]


def test_too_many_problems_a_cycle_is_told(small_recipe, tmp_path: Path, quiet: Quiet):
    with pytest.raises(PastError, match=r"rollout\.problems_per_cycle = 99 is more than the task's 60 problems"):
        train(small_recipe("embedded/past", "rollout.problems_per_cycle=99"), tmp_path, False, quiet)


def test_a_wrong_tau_is_noticed_in_a_real_run(tmp_path: Path, small_recipe, quiet: Quiet):
    """The threshold of a large vocabulary on the tiny one: the clip turns gradients around, and the run says so."""
    recipe = small_recipe("embedded/opsd", "run.cycles=10", "method.tau=0.01", "evaluation.at=[]")
    outcome = train(recipe, tmp_path / "run", False, quiet)
    assert any("clipping turned the gradient" in note for note in quiet.notes)
    assert any("clipping turned the gradient" in warning for warning in outcome.warnings)


def test_differences():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c: 2 -> 3", "d: None -> 4"]
