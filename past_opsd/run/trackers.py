# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Weights & Biases and Trackio are extras, and not there where types are checked.
"""Experiment trackers: what the console is told of a run goes to TensorBoard, Weights & Biases or Trackio as well.

A tracker follows the run's folder. It starts with the first cycle, so a run that is refused leaves nothing behind; what
the folder records up to there and the tracker lacks is sent first, and what the tracker has is not sent again. A killed
and resumed run is therefore one run there, each step once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.files import write_text
from past_opsd.core.nouns import PastError, derive_seed
from past_opsd.core.reading import SMALL, read_json
from past_opsd.run.folder import RunFolder
from past_opsd.run.resume import lasting
from past_opsd.run.train import Display

PROJECT = "past-opsd"
NOTE, EVALUATION = "note", "eval/"


@dataclass(frozen=True)
class Reached:
    """The last steps a tracker already holds; -1 for none."""

    cycle: int = -1
    evaluation: int = -1

    @staticmethod
    def of(names_by_step: Sequence[tuple[int, str]]) -> Reached:
        """From the (step, name) of every value found there."""
        cycles = [s for s, name in names_by_step if not name.startswith(EVALUATION) and name != NOTE]
        evaluations = [s for s, name in names_by_step if name.startswith(EVALUATION)]
        return Reached(max(cycles, default=-1), max(evaluations, default=-1))


@dataclass(frozen=True)
class Start:
    """What a backend learns at the start: `boundary` updates are complete; `fresh` is a run it has not seen."""

    id: str
    boundary: int
    fresh: bool
    folder: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.folder.resolve().name}-{self.id[:6]}"

    @property
    def config(self) -> dict[str, Any]:
        return config.dump(self.recipe)


class Backend(Protocol):
    """One tracking package."""

    def start(self, start: Start) -> Reached: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def note(self, step: int, text: str) -> None: ...

    def finish(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def start(self, start: Start) -> Reached:
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = RunFolder(start.folder).tensorboard
        reached = Reached()
        if folder.is_dir() and not start.fresh:
            found = self._read(folder)
            reached = Reached(min(found.cycle, start.boundary), min(found.evaluation, start.boundary))
        # Readers drop what was written before for purge_step and later steps: it is about to be written again.
        purge_step = max(reached.cycle, reached.evaluation) + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        if purge_step == 0:
            self._writer.add_text("recipe", f"```toml\n{config.to_toml(start.recipe)}```", 0)
        return reached

    @staticmethod
    def _read(folder: Path) -> Reached:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={SCALARS: 1}).Reload()
        tags: Any = events.Tags()[SCALARS]
        return Reached.of([(events.Scalars(tag)[-1].step, tag) for tag in tags])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def note(self, step: int, text: str) -> None:
        self._writer.add_text(NOTE, text, step)

    def finish(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run with its files in RUN/wandb. `WANDB_MODE=offline` keeps it there."""

    def __init__(self) -> None:
        import wandb  # pyright: ignore[reportMissingImports]
        from wandb.errors import UsageError  # pyright: ignore[reportMissingImports]

        self._noted = (-1, "")
        if wandb.setup().settings.mode not in ("offline", "dryrun", "disabled"):
            try:
                wandb.login(verify=False)  # asks for a missing key now, not when the progress bar is up
            except UsageError as error:
                raise PastError(f"wandb: {error} Or set WANDB_MODE=offline.") from None

    def start(self, start: Start) -> Reached:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=start.id,
            name=start.name,
            dir=start.folder,
            config=start.config,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        # An offline folder does not know of earlier ones and is filled from the start; the newest is the whole run.
        return Reached(self._run.step - 1, self._run.step - 1) if self._run.resumed else Reached()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def note(self, step: int, text: str) -> None:
        told, before = self._noted
        self._noted = (step, f"{before}\n\n{text}" if told == step else text)  # a step holds one value of a name
        self._run.log({NOTE: self._noted[1]}, step=step)

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio's local database; `trackio show --project past-opsd` shows it."""

    def start(self, start: Start) -> Reached:
        import trackio  # pyright: ignore[reportMissingImports]
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        rows = SQLiteStorage.get_logs(PROJECT, start.name)
        self._run = trackio.init(PROJECT, name=start.name, config=start.config, resume="allow", embed=False)
        return Reached.of([(row["step"], name) for row in rows for name in row if name not in ("step", "timestamp")])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def note(self, step: int, text: str) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run.log({NOTE: trackio.Markdown(text)}, step=step)

    def finish(self) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        trackio.finish()


BACKENDS: dict[str, Callable[[], Backend]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


class Tracker:
    """A display whose audience is a tracking package."""

    def __init__(self, name: str, backend: Backend, folder: Path, recipe: Recipe):
        self.name = name
        self._backend = backend
        self._folder = folder
        self._recipe = recipe
        self._reached: Reached | None = None  # None: not started
        self._step = 0
        self._notes: list[str] = []

    def phase(self, cycle: int, name: str) -> None:
        self._start(cycle)

    def cycle(self, cycle: int, metrics: dict[str, float]) -> None:
        reached = self._start(cycle)
        if cycle + 1 > reached.cycle:
            self._log_cycle(cycle, metrics)

    def evaluated(self, step: int, summary: dict[str, float]) -> None:
        reached = self._start(step)
        if step > reached.evaluation:
            self._log_evaluation(step, summary)

    def note(self, text: str) -> None:
        """Kept until the next cycle is logged, then told with it."""
        self._notes.append(text)

    def close(self) -> None:
        if self._reached is not None:
            self._tell_notes()
            self._backend.finish()

    def _start(self, boundary: int) -> Reached:
        if self._reached is None:
            self._reached = self._backend.start(_identify(self.name, self._folder, self._recipe, boundary))
            self._catch_up(self._reached)
        return self._reached

    def _catch_up(self, reached: Reached) -> None:
        run, pass_k = RunFolder(self._folder), self._recipe.evaluation.pass_k
        summaries = {step: e.summary(pass_k) for step, e in run.read_evaluations().items()}
        cycles = {line["cycle"] + 1: line for line in run.read_metrics()}
        for step in sorted({*cycles, *summaries}):
            if step in cycles and step > reached.cycle:
                self._log_cycle(step - 1, cycles[step])
            if step in summaries and step > reached.evaluation:
                self._log_evaluation(step, summaries[step])

    def _log_cycle(self, cycle: int, metrics: Mapping[str, float]) -> None:
        self._step = cycle + 1
        self._tell_notes()
        self._backend.log(self._step, {name: value for name, value in metrics.items() if name != "cycle"})

    def _log_evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        self._backend.log(step, {f"{EVALUATION}{name}": value for name, value in summary.items()})

    def _tell_notes(self) -> None:
        if self._notes:
            self._backend.note(self._step, "\n\n".join(self._notes))
            self._notes = []


class Displays:
    """The console and the trackers as one display. A tracker that fails is told once and switched off."""

    def __init__(self, console: Display, trackers: Sequence[Tracker]):
        self._console = console
        self._trackers = list(trackers)
        self.reads_records = getattr(console, "reads_records", False)

    def __enter__(self) -> Displays:
        return self

    def __exit__(self, *_: object) -> None:
        self._each(lambda tracker: tracker.close())
        self._trackers = []

    def phase(self, cycle: int, name: str) -> None:
        self._console.phase(cycle, name)
        self._each(lambda tracker: tracker.phase(cycle, name))

    def cycle(self, cycle: int, metrics: dict[str, float]) -> None:
        self._console.cycle(cycle, metrics)
        self._each(lambda tracker: tracker.cycle(cycle, metrics))

    def evaluated(self, step: int, summary: dict[str, float]) -> None:
        self._console.evaluated(step, summary)
        self._each(lambda tracker: tracker.evaluated(step, summary))

    def note(self, text: str) -> None:
        self._console.note(text)
        self._each(lambda tracker: tracker.note(text))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # whatever a tracker does, the run goes on
                self._trackers.remove(tracker)
                said = f"{type(error).__name__}: {error}"
                self._console.note(f"{tracker.name} failed and is switched off, the run goes on without it ({said})")


def open_trackers(names: Sequence[str], folder: Path, recipe: Recipe) -> list[Tracker]:
    """The named trackers of the run in `folder`, nothing started or written yet."""
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in BACKENDS:
            raise PastError(f"no tracker '{name}'; known are {', '.join(BACKENDS)}")
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise PastError(f"--track {name} needs a package that is missing: pip install 'past-opsd[{name}]'")
    RunFolder(folder).enclosed()
    _read_state(folder)
    return [Tracker(name, BACKENDS[name](), folder, recipe) for name in names]


def _identify(name: str, folder: Path, recipe: Recipe, boundary: int) -> Start:
    """The run's id, the same for all trackers: kept in the folder, made anew for a recipe that is another run."""
    digest = f"{derive_seed(json.dumps(lasting(recipe), sort_keys=True)):016x}"
    known = _read_state(folder)
    if known is None or known.recipe != digest:
        made = derive_seed(str(folder.resolve()), digest, recipe.run.seed, time.time_ns())
        known = _State(f"{made:016x}", digest, [])
    fresh = name not in known.trackers
    if fresh:
        write_text(
            RunFolder(folder).trackers_file, json.dumps(asdict(replace(known, trackers=[*known.trackers, name]))) + "\n"
        )
    return Start(known.id, boundary, fresh, folder, recipe)


@dataclass(frozen=True)
class _State:
    id: str
    recipe: str
    trackers: list[str]


def _read_state(folder: Path) -> _State | None:
    path = RunFolder(folder).trackers_file
    if not os.path.lexists(path):
        return None
    try:
        return _State(**read_json(path, SMALL))
    except (PastError, TypeError) as error:
        raise PastError(f"{path}: not written by this package ({error}); remove it to track anew") from None
