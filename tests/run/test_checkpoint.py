from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from past_opsd.core.nouns import PastError
from past_opsd.run import checkpoint
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import Session, session


@pytest.fixture
def saved(past: Session, tmp_path: Path) -> tuple[Session, Path]:
    past.loop.cycle(0)
    return past, checkpoint.save(RunFolder(tmp_path), 1, past.model, past.learner, {"method": past.loop.method.state()})


def test_everything_comes_back(saved: tuple[Session, Path], small_recipe):
    parts, path = saved
    with session(small_recipe("embedded/past", "run.seed=99")) as other:
        state = checkpoint.restore(path, other.model, other.learner)
        for adapter in ("student", "teacher"):
            assert other.model.digest(adapter) == parts.model.digest(adapter)
            mine, theirs = parts.learner.optimizers[adapter].state, other.learner.optimizers[adapter].state
            for a, b in zip(mine.values(), theirs.values(), strict=True):
                assert all(torch.equal(a[k], b[k]) for k in ("step", "exp_avg", "exp_avg_sq"))
        assert other.learner.steps == parts.learner.steps
        assert other.model.versions == parts.model.versions
        assert state["next_cycle"] == 1
        assert state["method"] == parts.loop.method.state()


def test_rng_states_come_back(saved: tuple[Session, Path]):
    import random

    parts, path = saved
    expected = (random.random(), float(torch.rand(())))
    random.random()
    checkpoint.restore(path, parts.model, parts.learner)
    random.seed(0)
    checkpoint.restore(path, parts.model, parts.learner)
    assert (random.random(), float(torch.rand(()))) == expected


def test_nothing_temporary_is_left(saved: tuple[Session, Path]):
    _, path = saved
    assert [p.name for p in path.parent.iterdir()] == ["checkpoint-00001"]
    assert checkpoint.damage(path) is None


def test_a_left_over_temporary_folder_does_not_count(saved: tuple[Session, Path]):
    parts, path = saved
    (path.parent / ".writing-checkpoint-00002").mkdir()
    assert RunFolder(path.parents[1]).steps() == [1]
    checkpoint.save(RunFolder(path.parents[1]), 2, parts.model, parts.learner, {})
    assert RunFolder(path.parents[1]).steps() == [1, 2]


def test_a_checkpoint_that_holds_a_file_of_somebodys_own_is_not_deleted(saved: tuple[Session, Path]):
    parts, path = saved
    run = path.parents[1]
    for step in (2, 3, 4):
        checkpoint.save(RunFolder(run), step, parts.model, parts.learner, {})
    (RunFolder(run).checkpoint(2) / "merged").mkdir()
    (RunFolder(run).checkpoint(2) / "merged" / "model.safetensors").write_text("mine")
    checkpoint.prune(RunFolder(run), 1, set())
    assert RunFolder(run).steps() == [2, 4]
    assert checkpoint.damage(RunFolder(run).checkpoint(2)) is None


def test_a_checkpoint_set_aside_before_is_kept(saved: tuple[Session, Path]):
    parts, path = saved
    run = path.parents[1]
    for _ in range(3):
        checkpoint.save(RunFolder(run), 2, parts.model, parts.learner, {})
        checkpoint.set_aside(RunFolder(run), after=1)
    assert sorted(p.name for p in path.parent.iterdir() if p != path) == [
        f"damaged-checkpoint-00002{suffix}" for suffix in ("", "-2", "-3")
    ]


def test_an_adapter_of_another_shape_is_told(saved: tuple[Session, Path], small_recipe):
    _, path = saved
    message = "made for another base model, LoRA rank or set of targets"
    with session(small_recipe("embedded/past", "model.lora.rank=8")) as other, pytest.raises(PastError, match=message):
        checkpoint.load_adapter(other.model, "student", path)


def test_an_adapter_with_unknown_tensors_is_told(saved: tuple[Session, Path]):
    parts, path = saved
    file = path / "adapter_model.safetensors"
    save_file(load_file(file) | {"surprise": torch.zeros(1)}, file)
    with pytest.raises(PastError, match="holds surprise"):
        checkpoint.load_adapter(parts.model, "student", path)


def test_not_a_checkpoint_is_told(past: Session, tmp_path: Path):
    with pytest.raises(PastError, match=r"state\.json cannot be read"):
        checkpoint.restore(tmp_path, past.model, past.learner)
    with pytest.raises(PastError, match="cannot be read as safetensors"):
        checkpoint.load_adapter(past.model, "student", tmp_path)


def test_another_format_is_told(saved: tuple[Session, Path]):
    parts, path = saved
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(PastError, match="written in format 99"):
        checkpoint.restore(path, parts.model, parts.learner)
