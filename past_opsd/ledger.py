"""What a run's folder holds at a start: whether it is one that may be written, and which of its records are lost.

What is counted over a run is kept in every checkpoint, so that a resume needs no other record to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from past_opsd import checkpoint, config, record
from past_opsd.config import Recipe
from past_opsd.evaluate import Evaluation
from past_opsd.files import aside, enclosed, write_text, writing
from past_opsd.types import PastError

_COSTS = ("cost/student_", "cost/teacher_", "cost/verifier_")
Tell = Callable[[str], None]


@dataclass
class Ledger:
    """Totals over the cycles so far, and the boundaries that were evaluated."""

    costs: dict[str, int] = field(default_factory=dict)
    evaluated: list[int] = field(default_factory=list)

    def dump(self) -> dict[str, Any]:
        """As plain data, for a checkpoint."""
        return asdict(self)


def existing(folder: Path, recipe: Recipe) -> list[int]:
    """The boundaries in the folder of a run; where there is none, what a start would write over is refused."""
    enclosed(folder)
    found = checkpoint.steps(folder)
    if found:
        return found
    # The first checkpoint comes before the first cycle: these records are of a run that has lost its checkpoints.
    for name in (*record.LINES, "rollouts", "continuations"):
        if (folder / name).is_file() or any((folder / name).glob("cycle-*.parquet")):
            raise PastError(
                f"{folder} holds records of a run ({name}) but no checkpoint, and a start would delete them; choose "
                "another --out, or move them away"
            )
    file = folder / "recipe.toml"
    if file.exists() and file.read_bytes() != config.to_toml(recipe).encode() and not _resolved(file):
        raise PastError(f"{file} was not written by a run, and a start would replace it; choose another --out")
    return found


def _resolved(file: Path) -> bool:
    """Whether a recipe is as a run writes it, every field in its place."""
    try:
        return config.to_toml(config.load(file, imports=False)).encode() == file.read_bytes()
    except PastError:
        return False


def take_up(folder: Path, step: int, recipe: Recipe, evaluations: Iterable[int], tell: Tell) -> Ledger:
    """Go on from the checkpoint of a boundary: tell what is lost of the records before it, and mend what can be.

    `evaluations` are the boundaries that the recipe evaluates, for a checkpoint that does not say which were.
    """
    saved = _read(checkpoint.read_state(checkpoint.folder(folder, step)))
    ledger = saved or Ledger(_last_costs(folder, step), sorted(s for s in evaluations if s <= step))
    notes = [*_set_aside(folder), *lost(folder, step, ledger.evaluated)]
    if step and not ledger.costs:
        notes.append(f"the costs of cycles before {step}; totals count from there")
    for note in notes:
        tell(f"lost: {note}")
    if notes:
        totals = ", cost totals" if ledger.costs else ""
        tell(
            f"the checkpoint of boundary {step} is whole: adapters, optimizers{totals} and the cycles to come are what "
            "they would have been; a report leaves out what is lost"
        )
    _rewrite(folder / "recipe.toml", recipe, tell)
    return ledger


def lost(folder: Path, step: int, evaluated: Iterable[int]) -> list[str]:
    """What of the records up to a boundary is not there any more or cannot be read."""
    missing = [str(s) for s in evaluated if not (folder / "evaluations" / f"step-{s:05d}.json").is_file()]
    gap = [f"evaluations/ lacks step{'s' if len(missing) > 1 else ''} {', '.join(missing)}"] if missing else []
    return record.lost(folder, step) + gap


def warnings(folder: Path) -> list[str]:
    """What is lost up to the newest checkpoint, which came after all of it was written."""
    steps = checkpoint.steps(folder)
    if not steps:
        return []
    try:
        ledger = _read(checkpoint.read_state(checkpoint.folder(folder, steps[-1])))
    except PastError:
        ledger = None
    return [f"lost: {text}" for text in lost(folder, steps[-1], ledger.evaluated if ledger else ())]


def _read(state: Mapping[str, Any]) -> Ledger | None:
    try:
        kept = state["records"]
        return Ledger({str(k): int(v) for k, v in kept["costs"].items()}, [int(step) for step in kept["evaluated"]])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _last_costs(folder: Path, step: int) -> dict[str, int]:
    lines = [line for line in record.read_lines(folder / "metrics.jsonl") if line["cycle"] == step - 1]
    return {k: v for line in lines for k, v in line.items() if k.startswith(_COSTS)}


def _set_aside(folder: Path) -> list[str]:
    """Evaluations that cannot be read get another name, `damaged-...`, and a line each."""
    notes: list[str] = []
    for file in sorted((folder / "evaluations").glob("step-*.json")):
        try:
            Evaluation.load(file)
        except PastError as error:
            named = aside(file, "damaged")
            with writing(file):
                file.rename(named)
            notes.append(f"{error}; it is {named.name} now")
    return notes


def _rewrite(file: Path, recipe: Recipe, tell: Tell) -> None:
    """The run's own recipe says what the run does, whatever happened to it."""
    text = config.to_toml(recipe)
    try:
        if file.read_bytes() == text.encode() or config.dump(config.load(file, imports=False)) == config.dump(recipe):
            return
        was = "of other settings"
    except (OSError, PastError):
        was = "damaged" if file.exists() else "missing"
    write_text(file, text)
    tell(f"{file} is written anew: it was {was}")
