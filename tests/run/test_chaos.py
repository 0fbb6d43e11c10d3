"""What breaks, and what is left: scripts/chaos.py in short, every damage to a checkpoint, values that are NaN."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from conftest import Quiet
from safetensors.torch import load_file, save_file

from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.policy import fused
from past_opsd.run import checkpoint
from past_opsd.run.folder import CHECKPOINT, MANIFEST, RunFolder
from past_opsd.run.train import Session, train

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "run.cycles=3",
    "run.keep_checkpoints=4",
    "rollout.problems_per_cycle=2",
    "task.train_problems=12",
    "task.eval_problems=1",
    "evaluation.samples=2",
    "evaluation.pass_k=[1]",
    "evaluation.at=[0.0]",
    "model.lora.rank=2",
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_run_survives_what_a_machine_can_do_to_it():
    command = [sys.executable, ROOT / "scripts" / "chaos.py", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(said) == ["kills", "chains", "moments", "workers", "disk", "limit"]
    assert int(said["kills"].split()[0]) >= 15


@pytest.fixture(scope="module")
def recipe(small_recipe) -> Recipe:
    return small_recipe("embedded/past", *TINY)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> Path:
    folder = tmp_path_factory.mktemp("chaos") / "run"
    train(recipe, folder, False, Quiet())
    return folder


@pytest.fixture
def run(unbroken: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(unbroken, tmp_path / "run"))


def fingerprint(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "timings.jsonl")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if "damaged-" not in str(p)}


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [half, empty, longer, flip, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", sorted([*CHECKPOINT, MANIFEST]))
def test_whatever_happens_to_a_file_of_the_newest_checkpoint_the_one_before_is_found(
    unbroken: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
):
    for step in (2, 3):
        shutil.copytree(RunFolder(unbroken).checkpoint(step), RunFolder(tmp_path).checkpoint(step))
    assert checkpoint.newest_whole(RunFolder(tmp_path)) == (RunFolder(tmp_path).checkpoint(3), [])
    damage(RunFolder(tmp_path).checkpoint(3) / name)
    found, notes = checkpoint.newest_whole(RunFolder(tmp_path))
    assert found == RunFolder(tmp_path).checkpoint(2)
    (note,) = notes
    assert note.startswith(f"{RunFolder(tmp_path).checkpoint(3)} is damaged ({name} ")


def test_a_checkpoint_has_the_files_that_it_must_have(unbroken: Path):
    path = RunFolder(unbroken).checkpoint(3)
    found = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert found == CHECKPOINT | {MANIFEST}


def test_damaged_checkpoints_do_not_count_as_boundaries_of_the_run(
    run: Path, unbroken: Path, recipe: Recipe, quiet: Quiet
):
    """All but the first two are damaged, and the run is stopped again before it is past them."""
    for step in (2, 3):
        flip(RunFolder(run).checkpoint(step) / "adapter_model.safetensors")
    asked = chain([False], repeat(True))
    outcome = train(recipe, run, True, quiet, stop=lambda: next(asked))
    assert (outcome.completed, outcome.finished) == (2, False)
    assert RunFolder(run).steps() == [0, 1, 2]
    assert checkpoint.newest_whole(RunFolder(run)) == (RunFolder(run).checkpoint(2), [])
    assert sorted(p.name for p in (run / "checkpoints").glob("damaged-*")) == [
        "damaged-checkpoint-00002",
        "damaged-checkpoint-00003",
    ]
    assert train(recipe, run, True, quiet).finished
    assert fingerprint(run) == fingerprint(unbroken)


def test_a_copy_of_a_checkpoint_under_another_name_is_no_boundary(run: Path):
    for name in ("checkpoint-00003-backup", "checkpoint-7", "checkpoint-old", "checkpoint-٠٠٠٠٣"):
        shutil.copytree(RunFolder(run).checkpoint(3), run / "checkpoints" / name)
    assert RunFolder(run).steps() == [0, 1, 2, 3]


class Poisoning(Quiet):
    """Writes NaN into a weight when a phase of the second cycle begins."""

    def __init__(self, phase: str, adapter: str):
        super().__init__()
        self._when, self._adapter = (1, phase), adapter
        self.session: Session | None = None

    def phase(self, cycle: int, name: str) -> None:
        if (cycle, name) == self._when:
            assert self.session is not None
            with torch.no_grad():
                list(self.session.model.parameters(self._adapter).values())[1].view(-1)[0] = torch.nan


@pytest.mark.parametrize(
    ("phase", "adapter", "message"),
    [
        ("rollout", "student", "non-finite entries in the"),
        ("distill", "teacher", "non-finite entries in the"),
        ("publish", "student", "the student's adapter at boundary 2, which is not saved, holds values that are not"),
    ],
)
def test_nan_in_an_adapter_ends_the_run_and_costs_nothing(
    unbroken: Path,
    tmp_path: Path,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    adapter: str,
    message: str,
):
    import past_opsd.run.train as module

    display = Poisoning(phase, adapter)
    real = module.assemble

    def assemble(*args, **kwargs) -> Session:
        display.session = real(*args, **kwargs)
        return display.session

    with monkeypatch.context() as patch:
        patch.setattr(module, "assemble", assemble)
        with pytest.raises(PastError, match=message):
            train(recipe, tmp_path / "run", False, display)
    assert checkpoint.newest_whole(RunFolder(tmp_path / "run")) == (RunFolder(tmp_path / "run").checkpoint(1), [])
    assert train(recipe, tmp_path / "run", True, Quiet()).finished
    assert fingerprint(tmp_path / "run") == fingerprint(unbroken)


def test_nan_in_a_loss_ends_the_run_and_costs_nothing(
    unbroken: Path, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
):
    real, calls = fused.run, iter(range(10**6))

    def poisoned(*args, **kwargs):
        result = real(*args, **kwargs)
        if next(calls) == 7:
            result.values[0][0] = torch.nan
        return result

    with monkeypatch.context() as patch:
        patch.setattr(fused, "run", poisoned)
        with pytest.raises(PastError, match="step stopped: 1 non-finite entries in the loss"):
            train(recipe, tmp_path / "run", False, Quiet())
    assert train(recipe, tmp_path / "run", True, Quiet()).finished
    assert fingerprint(tmp_path / "run") == fingerprint(unbroken)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_refused(unbroken: Path, tmp_path: Path, past: Session, value: float):
    path = Path(shutil.copytree(RunFolder(unbroken).checkpoint(3), tmp_path / "adapter"))
    tensors = load_file(path / "adapter_model.safetensors")
    tensors[min(tensors)].view(-1)[0] = value
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(PastError, match=r"adapter_model\.safetensors holds values that are not finite"):
        checkpoint.load_adapter(past.model, "student", path)


def test_metrics_that_a_disk_has_eaten_are_told(run: Path, recipe: Recipe, quiet: Quiet):
    """A file system may leave zeros where a machine lost its power."""
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    (run / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\0" * len(lines[1]), *lines[2:]]))
    with pytest.raises(PastError, match=r"metrics\.jsonl:2: not a line that a run wrote"):
        train(recipe, run, True, quiet)
