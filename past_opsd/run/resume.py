"""Where a run goes on, and what may change before it does: what makes it another run is refused, the rest is told."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from past_opsd.core import config, life
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import is_table
from past_opsd.run import checkpoint
from past_opsd.run.evaluate import evaluation_steps
from past_opsd.run.folder import RunFolder

FREE = frozenset(
    {"name", "description", "run.checkpoint_every", "run.keep_checkpoints", "verifier.workers", "method.ahead"}
    | {"evaluation.at", "evaluation.pass_k", "evaluation.beside", "rollout.stream"}
)
"""Keys of a recipe that may change when a run goes on: they decide what is kept and shown, not what is learned."""
ROUNDING = frozenset(
    {"run.threads", "learner.token_budget", "learner.loss_memory_mib", "learner.shared_prompts", "engine.batch"}
    | {"model.gradient_checkpointing", "engine.memory_gib", "engine.sleep"}
)
"""Keys that may change too, at the price of the last bits: the same sums in another order."""
SETTLED = frozenset({"model.dtype", "model.attention", "model.lora.compute", "learner.implementation"})
"""Keys that may be left to the machine. From 'auto' to what it came to and back is no change: what they came to is
compared, in `compute` and `settled` of a run's identity."""
ALIKE = {"settled.losses": ("fused", "triton"), "settled.adapters": ("float32", "bfloat16", "float16")}
"""What a machine may settle otherwise when a run goes on, and is told: other roundings of the same sums."""


def lasting(recipe: Recipe) -> dict[str, Any]:
    """The settings that stay the same for as long as a run goes on: leaf -> value."""
    leaves = {key: value for key, _, value in changes({}, config.dump(recipe))}
    moving = FREE | ROUNDING | {"run.cycles"}
    return {key: value for key, value in leaves.items() if key not in moving and not key.startswith("distributed.")}


def chosen(run: RunFolder, step: int | None) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, of boundary `step` or the newest whole one, and notes on those passed over."""
    if step is None:
        return checkpoint.newest_whole(run)
    path = run.checkpoint(step)
    problem = checkpoint.damage(path)
    if problem is not None:
        raise PastError(f"{path} cannot be resumed from: {problem}")
    later = [number for number in run.steps() if number > step]
    kept = f"the checkpoints after boundary {step} are set aside as later-checkpoint-*, their records are dropped"
    return path, [kept] if later else []


def continued(run: RunFolder, state: Mapping[str, Any], recipe: Recipe, identity: Mapping[str, Any]) -> list[str]:
    """What a person should know of the changes since the checkpoint with this state; another run is refused."""
    refused: list[str] = []
    notes: list[str] = []
    places, done = config.places(recipe), state["next_cycle"]
    for key, old, new in since(state.get("identity"), identity, recipe):
        name = key.removeprefix("recipe.")
        told = f"{key}: {old!r} -> {new!r}"
        if name in places and all(isinstance(value, str) for value in (old, new)):
            notes.append(f"{name} is {new} now, not {old}; what is read there is the same")
        elif name in SETTLED and (old in (None, "auto") or new == "auto"):
            continue
        elif all(value in ALIKE.get(key, ()) for value in (old, new)):
            notes.append(f"{key.removeprefix('settled.')} in {new} now, not {old}: the same sums, rounded otherwise")
        elif name == key or name not in FREE | ROUNDING | {"run.cycles"}:
            refused.append(told)
        elif name == "run.cycles":
            problem = _other_length(recipe, new, done)
            refused += [f"{told} ({problem})"] if problem else []
            notes.append(f"going on to {new} cycles instead of {old}")
        elif name in ROUNDING:
            notes.append(f"{name} is {new} now, not {old}: the same sums in another order, so the last bits may differ")
    if refused:
        raise PastError(_another(run, refused))
    late = sorted(s for s in evaluation_steps(recipe) if s < done and not run.evaluations.path(s).exists())
    if late and not recipe.evaluation.beside:
        notes.append(f"not evaluated after {', '.join(map(str, late))} cycles: the run is past that")
    return notes


def _another(run: RunFolder, refused: list[str]) -> str:
    lines = "\n".join(f"  {line}" for line in refused)
    back = ""
    if any(line.startswith("recipe.") for line in refused) and run.exists():
        command = [*life.program(), "train", str(run), "--resume"]
        back = f"\nAs it was started, it goes on with: {shlex.join(command)}"
    return f"{run} was started with another setup; to continue it, restore what it had:\n{lines}{back}"


def _other_length(recipe: Recipe, new: int, done: int) -> str:
    """Why a run cannot go on to another number of cycles; empty where it can."""
    if new < done:
        return f"{done} cycles are done already; take {done} or more"
    falling = [f"learner.{role}.schedule = '{section.schedule}'" for role, section in _falling(recipe)]
    if falling:
        return (
            f"{' and '.join(falling)} ends at run.cycles, so with {new} cycles every step would have had another "
            "learning rate; start it anew in another folder (--out)"
        )
    return ""


def _falling(recipe: Recipe) -> list[tuple[str, config.OptimizerSection]]:
    both = (("student", recipe.learner.student), ("teacher", recipe.learner.teacher))
    return [(role, section) for role, section in both if section.schedule != "constant"]


def changes(saved: Any, current: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Leaves that differ: key, saved value, current value."""
    if is_table(saved) and is_table(current):
        keys = list(dict.fromkeys([*saved, *current]))
        inner = ((key, saved.get(key), current.get(key)) for key in keys)
        return [leaf for key, a, b in inner for leaf in changes(a, b, f"{path}.{key}" if path else key)]
    return [] if saved == current else [(path, saved, current)]


def since(saved: Any, identity: Mapping[str, Any], recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """What differs between a saved identity and a run's.

    Not keys of older recipes that changed nothing, nor keys that came later and have their default.
    """
    if is_table(saved) and "settled" not in saved:  # an earlier version, which settled neither
        saved = {**saved, "settled": _before(saved)}
    former = {f"recipe.{key}" for key in config.former(recipe)}
    later = {f"recipe.{key}" for key in config.defaults(recipe) if not _has(saved, f"recipe.{key}")}
    return [change for change in changes(saved, identity) if change[0] not in former | later]


def _before(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier version settled: losses as the recipe said, adapters multiplied in their own dtype."""
    own = _get(saved, "recipe.model.lora.dtype")
    base = str(saved.get("compute")).split(" ")[0]
    return {"losses": _get(saved, "recipe.learner.implementation"), "adapters": base if own == "base" else own}


def _get(saved: Any, key: str) -> Any:
    for part in key.split("."):
        saved = saved.get(part) if is_table(saved) else None
    return saved


def _has(saved: Any, key: str) -> bool:
    for part in key.split("."):
        if not is_table(saved) or part not in saved:
            return False
        saved = saved[part]
    return True


def differences(saved: Any, current: Any) -> list[str]:
    """Leaves that differ, as 'key: saved -> current'."""
    return [f"{key}: {a!r} -> {b!r}" for key, a, b in changes(saved, current)]
