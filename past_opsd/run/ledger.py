"""What a run's folder holds at a start: whether it is one that may be written, and which of its records are lost.

What is counted over a run is kept in every checkpoint, so that a resume needs no other record to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.files import aside, writing
from past_opsd.core.nouns import PastError
from past_opsd.run import checkpoint, record
from past_opsd.run.evaluate import Evaluation, evaluation_steps
from past_opsd.run.folder import RunFolder, file_digest

_COSTS = ("cost/student_", "cost/teacher_", "cost/verifier_")
Tell = Callable[[str], None]


@dataclass
class Ledger:
    """Totals over the cycles so far, the boundaries that were evaluated, and digests of the records of both."""

    costs: dict[str, int] = field(default_factory=dict[str, int])
    evaluated: list[int] = field(default_factory=list[int])
    digests: dict[str, str] = field(default_factory=dict[str, str])

    def dump(self) -> dict[str, Any]:
        """As plain data, for a checkpoint."""
        return asdict(self)

    def write(self, run: RunFolder, evaluation: Evaluation) -> None:
        """Keep an evaluation, and its digest."""
        run.write_evaluation(evaluation)
        file = run.evaluations.path(evaluation.step)
        self.digests[run.name(file)] = file_digest(file)


def existing(run: RunFolder, recipe: Recipe) -> list[int]:
    """The boundaries in the folder of a run; where there is none, what a start would write over is refused."""
    run.enclosed()
    found = run.steps()
    if found:
        return found
    # The first checkpoint comes before the first cycle: these records are of a run that has lost its checkpoints.
    places = [file for file in (run.metrics_file, run.timings_file) if file.is_file()]
    places += [series.folder for series in (run.rollouts, run.continuations) if series.numbers()]
    if places:
        raise PastError(
            f"{run} holds records of a run ({places[0].name}) but no checkpoint, and a start would delete them; choose "
            "another --out, or move them away"
        )
    file = run.recipe_file
    if file.exists() and file.read_bytes() != config.to_toml(recipe).encode() and not _resolved(file):
        raise PastError(f"{file} was not written by a run, and a start would replace it; choose another --out")
    return found


def _resolved(file: Path) -> bool:
    """Whether a recipe is as a run writes it, every field in its place."""
    try:
        return config.to_toml(config.load(file, imports=False)).encode() == file.read_bytes()
    except PastError:
        return False


def take_up(run: RunFolder, state: Mapping[str, Any], recipe: Recipe, tell: Tell) -> Ledger:
    """Go on from a checkpoint, whose plain state is given: tell what of the records before it is lost or altered."""
    step = state["next_cycle"]
    # A checkpoint of an earlier version may not say what was counted and evaluated.
    ledger = _read(state) or Ledger(_last_costs(run, step), sorted(s for s in evaluation_steps(recipe) if s <= step))
    notes = [*_set_aside(run), *lost(run, step, ledger.evaluated)]
    if step and not ledger.costs:
        notes.append(f"the costs of cycles before {step}; totals count from there")
    notes = [f"lost: {note}" for note in notes]
    notes += [f"altered: {name} is not what the run wrote" for name in run.altered(ledger.digests)]
    for note in notes:
        tell(note)
    if notes:
        totals = ", cost totals" if ledger.costs else ""
        tell(
            f"the checkpoint of boundary {step} is whole: adapters, optimizers{totals} and the cycles to come are what "
            "they would have been; a report shows what is there"
        )
    _rewrite(run, recipe, tell)
    return ledger


def lost(run: RunFolder, step: int, evaluated: Iterable[int]) -> list[str]:
    """What of the records up to a boundary is not there any more or cannot be read."""
    missing = [str(s) for s in evaluated if not run.evaluations.path(s).is_file()]
    name = f"{run.evaluations.folder.name}/"
    gap = [f"{name} lacks step{'s' if len(missing) > 1 else ''} {', '.join(missing)}"] if missing else []
    return record.lost(run, step) + gap


def warnings(run: RunFolder) -> list[str]:
    """What is lost up to the newest checkpoint, which came after all of it was written."""
    steps = run.steps()
    if not steps:
        return []
    try:
        ledger = _read(checkpoint.read_state(run.checkpoint(steps[-1]))) or Ledger()
    except PastError:
        ledger = Ledger()
    return [f"lost: {text}" for text in lost(run, steps[-1], ledger.evaluated)]


def _read(state: Mapping[str, Any]) -> Ledger | None:
    try:
        kept = state["records"]
        costs, evaluated = {str(k): int(v) for k, v in kept["costs"].items()}, [int(step) for step in kept["evaluated"]]
        digests = {str(k): str(v) for k, v in kept.get("digests", {}).items()}  # earlier versions kept none
        return Ledger(costs, evaluated, digests)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _last_costs(run: RunFolder, step: int) -> dict[str, int]:
    lines = [line for line in run.read_metrics() if line["cycle"] == step - 1]
    return {k: v for line in lines for k, v in line.items() if k.startswith(_COSTS)}


def _set_aside(run: RunFolder) -> list[str]:
    """Evaluations that cannot be read get another name, `damaged-...`, and a line each."""
    notes: list[str] = []
    for step in run.evaluations.numbers():
        try:
            run.read_evaluation(step)
        except PastError as error:
            file = run.evaluations.path(step)
            named = aside(file, "damaged")
            with writing(file):
                file.rename(named)
            notes.append(f"{error}; it is {named.name} now")
    return notes


def _rewrite(run: RunFolder, recipe: Recipe, tell: Tell) -> None:
    """The run's own recipe says what the run does, whatever happened to it."""
    file, text = run.recipe_file, config.to_toml(recipe)
    try:
        if file.read_bytes() == text.encode() or config.dump(config.load(file, imports=False)) == config.dump(recipe):
            return
        was = "of other settings"
    except (OSError, PastError):
        was = "damaged" if file.exists() else "missing"
    run.write_recipe(recipe)
    tell(f"{file} is written anew: it was {was}")
