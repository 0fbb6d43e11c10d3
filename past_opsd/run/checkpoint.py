"""Checkpoints at cycle boundaries: complete or absent, and loadable without running any code from them.

    checkpoint-00025/
      adapter_config.json, adapter_model.safetensors    the student, as plain PEFT loads it
      teacher/adapter_config.json, adapter_model.safetensors
      optimizer-student.safetensors, optimizer-teacher.safetensors
      state.json       next cycle, step counters, versions, the method's state, RNG states, identity, recipe
      MANIFEST.json    size and SHA-256 of every other file

A folder is written under a temporary name, flushed to disk and renamed, so a kill leaves the previous one. One that is
damaged is passed over, and set aside as `damaged-checkpoint-00025` when the run goes on from an older one. Old ones are
deleted, but none in which somebody put files of their own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from past_opsd.core.files import aside, fresh_folder, leftovers, put, sync, sync_all, temporary_name, writing
from past_opsd.core.nouns import Adapter, PastError
from past_opsd.core.reading import is_table, plain, read_json
from past_opsd.learner import Learner
from past_opsd.policy.model import TRAINABLE, Model
from past_opsd.run.folder import ADAPTER, CHECKPOINT, MANIFEST, OPTIMIZERS, STATE, TEACHER, RunFolder

FORMAT = 1


class Stateful(Protocol):
    """What a method is here."""

    def restore(self, state: Mapping[str, Any]) -> None: ...


def save(run: RunFolder, step: int, model: Model, learner: Learner, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of boundary `step` atomically; weights that are not numbers are refused."""
    final = run.checkpoint(step)
    for adapter in TRAINABLE:
        _finite(model.parameters(adapter), f"the {adapter}'s adapter at boundary {step}, which is not saved,")
    _sweep(run)
    with fresh_folder(final) as temporary:
        _write(temporary, step, model, learner, state)
        if put(temporary, final) is not None:
            shutil.rmtree(temporary)
        sync(final.parent)
    return final


def _write(path: Path, step: int, model: Model, learner: Learner, state: Mapping[str, Any]) -> None:
    (path / TEACHER).mkdir()
    model.save_adapter("student", path)
    model.save_adapter("teacher", path / TEACHER)
    for adapter in TRAINABLE:
        safetensors.torch.save_file(_optimizer_state(model, learner, adapter), path / OPTIMIZERS[adapter])
    progress = {"format": FORMAT, "next_cycle": step, "steps": learner.steps, "versions": model.versions}
    plain = progress | {"rng": _rng_states()} | dict(state)
    (path / STATE).write_text(json.dumps(plain, indent=1, ensure_ascii=False), encoding="utf-8")
    files = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    manifest = {name: {"bytes": (path / name).stat().st_size, "sha256": _hash(path / name)} for name in files}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync_all(path, sync)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None when it is whole."""
    try:
        manifest = read_json(path / MANIFEST)
        missing = sorted(CHECKPOINT - set(manifest))
        if missing:
            return f"{MANIFEST} does not list {missing[0]}"
        for name, entry in manifest.items():
            file = path / name
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                return f"{MANIFEST} lists {name}, which is elsewhere"
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"] or _hash(file) != entry["sha256"]:
                return f"{name} differs from what was written"
    except (PastError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def newest_whole(run: RunFolder) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and a line for every damaged one passed over."""
    notes: list[str] = []
    for step in reversed(run.steps()):
        path = run.checkpoint(step)
        problem = damage(path)
        if problem is None:
            return path, notes
        notes.append(f"{path} is damaged ({problem}); an older one is used")
    return None, notes


def set_aside(run: RunFolder, after: int, label: str = "damaged") -> None:
    """Checkpoints after the boundary a run goes on from, damaged or not wanted, no longer count as its boundaries."""
    for path in (run.checkpoint(step) for step in run.steps() if step > after):
        with writing(path):
            path.rename(aside(path, label))


def read_state(path: Path) -> dict[str, Any]:
    """The checkpoint's plain data."""
    try:
        state = read_json(path / STATE)
    except PastError as error:
        raise PastError(f"{path}: state.json cannot be read ({error})") from None
    if not is_table(state) or "format" not in state:
        raise PastError(f"{path}: state.json is not one of a checkpoint")
    if state["format"] != FORMAT:
        raise PastError(f"{path}: written in format {state['format']!r:.80}, this version reads format {FORMAT}")
    if not isinstance(state.get("next_cycle"), int):
        raise PastError(f"{path}: state.json does not say where the run goes on (next_cycle)")
    return state


def restore(path: Path, model: Model, learner: Learner, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Put adapters, optimizers, counters and RNG states back; returns the plain state, read here if it is not given."""
    state = read_state(path) if state is None else state
    load_adapters(model, path)
    for adapter in TRAINABLE:
        _load_optimizer(model, learner, adapter, path / OPTIMIZERS[adapter])
    try:
        learner.steps.update({adapter: int(state["steps"][adapter]) for adapter in learner.steps})
        model.set_versions({adapter: int(state["versions"][adapter]) for adapter in model.versions})
        restore_rng(state)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise PastError(f"{path}: state.json cannot be used ({type(error).__name__}: {error})") from None
    return state


def restore_method(path: Path, state: Mapping[str, Any], method: Stateful) -> None:
    """Put the method's own state back, from the checkpoint's plain data."""
    try:
        method.restore(state["method"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PastError(f"{path}: the method's state cannot be used ({type(error).__name__}: {error})") from None


def load_adapters(model: Model, path: Path) -> None:
    """Copy the student and the teacher of a checkpoint into the model."""
    load_adapter(model, "student", path)
    load_adapter(model, "teacher", path / TEACHER)


def load_adapter(model: Model, adapter: Adapter, path: Path) -> None:
    """Copy a saved PEFT adapter into the model's adapter of that name."""
    file = path / ADAPTER[1]
    kept = RunFolder(path).newest()
    if kept is not None and not file.exists():
        raise PastError(f"{path} is a run; name one of its checkpoints, e.g. {kept}")
    saved = _tensors(file)
    _finite(saved, str(file))
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


def prune(run: RunFolder, keep: int, protected: set[int]) -> None:
    """Delete all but the newest `keep` checkpoints and the protected boundaries; the student stays in the kept ones."""
    for step in run.steps()[:-keep]:
        path = run.checkpoint(step)
        if step not in protected and _only_ours(path):
            path.rename(temporary_name(path))  # a kill must not leave half of one
    _sweep(run)


def _only_ours(path: Path) -> bool:
    """Whether everything in a checkpoint's folder was written as part of it."""
    files = (p for p in path.rglob("*") if p.is_symlink() or not p.is_dir())
    return {p.relative_to(path).as_posix() for p in files} <= CHECKPOINT | {MANIFEST}


def _sweep(run: RunFolder) -> None:
    """Delete what a kill left of checkpoints that were being written or deleted."""
    for left in leftovers(run.checkpoints.folder / f"{run.checkpoints.prefix}[0-9]+"):
        shutil.rmtree(left, ignore_errors=True)


def _optimizer_state(model: Model, learner: Learner, adapter: Adapter) -> dict[str, Tensor]:
    optimizer = learner.optimizers[adapter]
    out: dict[str, Tensor] = {}
    for name, parameter in model.parameters(adapter).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            out[f"{name}|{key}"] = value.detach().cpu().contiguous()
    return out


def _load_optimizer(model: Model, learner: Learner, adapter: Adapter, file: Path) -> None:
    saved = _tensors(file)
    _finite(saved, str(file))
    optimizer = learner.optimizers[adapter]
    optimizer.state.clear()
    parameters = model.parameters(adapter)
    entries: dict[str, dict[str, Tensor]] = {}
    for key, value in saved.items():
        name, _, kind = key.rpartition("|")
        if name not in parameters or value.shape != (() if kind == "step" else parameters[name].shape):
            raise PastError(f"{file}: {key} does not belong to this model's {adapter} adapter")
        # AdamW keeps its step counter on the CPU, the moments beside the parameter.
        entries.setdefault(name, {})[kind] = value if kind == "step" else value.to(parameters[name].device)
    for name, state in entries.items():
        if set(state) != {"step", "exp_avg", "exp_avg_sq"}:
            raise PastError(f"{file}: the optimizer's state of {name} is {sorted(state)}; it is not AdamW's")
        optimizer.state[parameters[name]] = state


def _finite(tensors: Mapping[str, Tensor], what: str) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise PastError(f"{what} holds values that are not finite, in {name}; nothing can be computed with them")


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        plain(file)
        return safetensors.torch.load_file(file)
    except (PastError, OSError, SafetensorError) as error:
        raise PastError(f"{file}: cannot be read as safetensors ({error})") from None


def _rng_states() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    # This process's own GPU: its peers have theirs, and asking after those would claim memory on them.
    cuda = [_encode(torch.cuda.get_rng_state())] if torch.cuda.is_available() else []
    return {"python": [version, list(internal), gauss], "torch": _encode(torch.get_rng_state()), "cuda": cuda}


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the global streams back to where the checkpoint with this plain state found them."""
    streams = state["rng"]
    version, internal, gauss = streams["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(_decode(streams["torch"]))
    if streams["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(streams["cuda"][0]))


def _encode(tensor: Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
