"""Checkpoints at cycle boundaries: complete or absent, and loadable without running any code from them.

    checkpoint-00025/
      adapter_config.json, adapter_model.safetensors    the student, as plain PEFT loads it
      teacher/adapter_config.json, adapter_model.safetensors
      optimizer-student.safetensors, optimizer-teacher.safetensors
      state.json       next cycle, step counters, versions, the method's state, RNG states, identity, recipe
      MANIFEST.json    size and SHA-256 of every other file

A folder is written under a temporary name, flushed to disk and renamed, so a kill leaves the previous one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from past_opsd.learner import Learner
from past_opsd.model import TRAINABLE, Model
from past_opsd.types import Adapter, PastError

FORMAT = 1
MANIFEST = "MANIFEST.json"


def folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a boundary lives."""
    return run / "checkpoints" / f"checkpoint-{step:05d}"


def steps(run: Path) -> list[int]:
    """Boundaries with a checkpoint, oldest first."""
    return sorted(int(p.name.rpartition("-")[2]) for p in (run / "checkpoints").glob("checkpoint-*") if p.is_dir())


def save(run: Path, step: int, model: Model, learner: Learner, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of boundary `step` atomically."""
    final = folder(run, step)
    temporary = final.with_name(f".writing-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "teacher").mkdir(parents=True)
    model.save_adapter("student", temporary)
    model.save_adapter("teacher", temporary / "teacher")
    for adapter in TRAINABLE:
        save_file(_optimizer_state(model, learner, adapter), temporary / f"optimizer-{adapter}.safetensors")
    progress = {"format": FORMAT, "next_cycle": step, "steps": learner.steps, "versions": model.versions}
    plain = progress | {"rng": _rng_states()} | dict(state)
    (temporary / "state.json").write_text(json.dumps(plain, indent=1, ensure_ascii=False), encoding="utf-8")
    files = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*") if p.is_file())
    manifest = {name: {"bytes": (temporary / name).stat().st_size, "sha256": _hash(temporary / name)} for name in files}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in sorted(temporary.rglob("*"), reverse=True):
        _sync(path)
    _sync(temporary)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    _sync(final.parent)
    return final


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None when it is whole."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"] or _hash(file) != entry["sha256"]:
                return f"{name} differs from what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None if {"state.json", "adapter_model.safetensors"} <= set(manifest) else f"{MANIFEST} is incomplete"


def newest_whole(run: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and a line for every damaged one passed over."""
    notes: list[str] = []
    for step in reversed(steps(run)):
        path = folder(run, step)
        problem = damage(path)
        if problem is None:
            return path, notes
        notes.append(f"{path} is damaged ({problem}); an older one is used")
    return None, notes


def read_state(path: Path) -> dict[str, Any]:
    """The checkpoint's plain data."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PastError(f"{path}: state.json cannot be read ({error})") from None
    if state.get("format") != FORMAT:
        raise PastError(f"{path}: written in format {state.get('format')}, this version reads format {FORMAT}")
    return state


def restore(path: Path, model: Model, learner: Learner) -> dict[str, Any]:
    """Put adapters, optimizers, counters and RNG states back; returns the plain state."""
    state = read_state(path)
    load_adapter(model, "student", path)
    load_adapter(model, "teacher", path / "teacher")
    for adapter in TRAINABLE:
        _load_optimizer(model, learner, adapter, path / f"optimizer-{adapter}.safetensors")
    learner.steps.update(state["steps"])
    model.set_versions(state["versions"])
    _restore_rng(state["rng"])
    return state


def load_adapter(model: Model, adapter: Adapter, path: Path) -> None:
    """Copy a saved PEFT adapter into the model's adapter of that name."""
    file = path / "adapter_model.safetensors"
    saved = _tensors(file)
    with torch.no_grad():
        for name, parameter in model.parameters(adapter).items():
            key = name.replace(f".{adapter}.", ".")
            if key not in saved or saved[key].shape != parameter.shape:
                got = tuple(saved[key].shape) if key in saved else "nothing"
                raise PastError(
                    f"{file}: {key} has {got} where the model needs {tuple(parameter.shape)}; "
                    "the adapter was made for another base model, LoRA rank or set of targets"
                )
            parameter.copy_(saved[key])
    unknown = set(saved) - {name.replace(f".{adapter}.", ".") for name in model.parameters(adapter)}
    if unknown:
        raise PastError(f"{file}: holds {sorted(unknown)[0]}, which this model's adapter does not have")
    model.bump(adapter)


def prune(run: Path, keep: int, protected: set[int]) -> None:
    """Delete all but the newest `keep` checkpoints and the protected boundaries; the student stays in the kept ones."""
    for step in steps(run)[:-keep]:
        if step not in protected:
            shutil.rmtree(folder(run, step))


def _optimizer_state(model: Model, learner: Learner, adapter: Adapter) -> dict[str, Tensor]:
    optimizer = learner.optimizers[adapter]
    out: dict[str, Tensor] = {}
    for name, parameter in model.parameters(adapter).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            out[f"{name}|{key}"] = value.detach().cpu().contiguous()
    return out


def _load_optimizer(model: Model, learner: Learner, adapter: Adapter, file: Path) -> None:
    saved = _tensors(file)
    optimizer = learner.optimizers[adapter]
    optimizer.state.clear()
    for name, parameter in model.parameters(adapter).items():
        entries = {key.rpartition("|")[2]: value for key, value in saved.items() if key.rpartition("|")[0] == name}
        if entries:
            # AdamW keeps its step counter on the CPU, the moments beside the parameter.
            state = {k: v if k == "step" else v.to(parameter.device) for k, v in entries.items()}
            optimizer.state[parameter] = state


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise PastError(f"{file}: cannot be read as safetensors ({error})") from None


def _rng_states() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    cuda = [_encode(s) for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else []
    return {"python": [version, list(internal), gauss], "torch": _encode(torch.get_rng_state()), "cuda": cuda}


def _restore_rng(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_decode(s) for s in state["cuda"]])


def _encode(tensor: Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
