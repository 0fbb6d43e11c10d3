"""What the `past` command does, as functions for notebooks and scripts; the command line calls them too.

Nothing heavy is imported before a function needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.interface.arguments import SEEDS, TRAJECTORIES

if TYPE_CHECKING:
    from past_opsd.policy.distributed import World
    from past_opsd.run.evaluate import Evaluation
    from past_opsd.run.frames import Run
    from past_opsd.run.train import Display

Folder = str | os.PathLike[str]
Overrides = Sequence[str] | Mapping[str, Any]
_WORLD: list[World] = []  # joined once a process


def recipes() -> dict[str, str]:
    """The shipped recipes.

    Returns:
        What each is, by the name that `load` takes.
    """
    return config.shipped_descriptions()


def train(
    recipe: Recipe | str | Path,
    folder: Folder | None = None,
    *,
    resume: bool = False,
    display: bool | Display = True,
    track: Sequence[str] = (),
    profile: bool = False,
    world: World | None = None,
    again: str | None = None,
    untrained: Folder | None = None,
) -> Run:
    """Run a recipe's cycles in a folder: train, evaluate, write checkpoints.

    Ctrl-C (a notebook's stop button) ends it after the cycle that is under way, with a checkpoint; a second, at once.
    In processes that torchrun or accelerate started, all of them call this; the first writes and talks.

    Args:
        recipe: from `load`, or what `load` takes: a shipped name or a file.
        folder: where the run is written; by default `runs/RECIPE-SEED`.
        resume: go on from the newest whole checkpoint there; from the start where there is none. Processes
            that torchrun starts again do so by themselves.
        display: True shows progress, a bar on a terminal and a line every tenth of the run elsewhere; False nothing; or
            an object of yours with the methods of `past_opsd.run.train.Display`.
        track: also log to "tensorboard", "wandb", "trackio".
        profile: write where the time goes to the run's folder.
        world: the processes of this run, where the caller has joined them already.
        again: how a person continues the run, for messages.
        untrained: a folder for the scores before the first update: found there, they are taken, else left there.

    Returns:
        The run: `run.finished`, `run.warnings`, and its records as tables.

    Raises:
        PastError: the recipe cannot be; the folder holds a run already; with `resume`, a run of another setup.
    """
    chosen = _recipe(recipe)
    place = Path(default_folder(chosen) if folder is None else folder)
    with _joined(world, chosen) as processes:
        from past_opsd.run.frames import Run
        from past_opsd.run.train import train as train_in

        told = again or f"past_opsd.resume({str(place)!r})"
        with _shown(chosen, place, display, track, processes) as shown:
            shared = None if untrained is None else Path(untrained)
            train_in(chosen, place, resume, shown, profile=profile, world=processes, again=told, untrained=shared)
        return Run(place)


def resume(
    run: Folder,
    overrides: Overrides = (),
    *,
    display: bool | Display = True,
    track: Sequence[str] = (),
    profile: bool = False,
) -> Run:
    """Go on with a run by its own recipe: the same bits as if it had not stopped.

    Args:
        run: the run, or its folder.
        overrides: what may change on the way, such as {"run.cycles": 100}; as for `load`.
        display: as for `train`.
        track: as for `train`.
        profile: as for `train`.

    Returns:
        The run.

    Raises:
        PastError: there is no run; its recipe names a class or function that is not there; the overrides would make
            it another run.
    """
    opened = open_run(run)
    recipe = config.load(opened.files.recipe_file, overrides)
    return train(recipe, opened.folder, resume=True, display=display, track=track, profile=profile)


def open_run(folder: Folder) -> Run:
    """A run that was made before, or is under way.

    Args:
        folder: where it is.

    Returns:
        The run: its records as tables, its recipe, its checkpoints.

    Raises:
        PastError: the folder holds no run.
    """
    from past_opsd.run.frames import Run

    run = Run(Path(folder))
    if not run.files.exists():
        raise PastError(f"{run.folder} holds no {run.files.recipe_file.name}, so it is no folder of a run")
    return run


def evaluate(recipe: Recipe | str | Path, adapter: Folder | None = None, *, world: World | None = None) -> Evaluation:
    """Sample responses to the held-out problems of a recipe and verify them.

    Args:
        recipe: whose model, prompts, problems and verifier; as for `train`.
        adapter: a checkpoint (`run.checkpoint()`) or another PEFT folder; by default the bare base model.
        world: as for `train`.

    Returns:
        Every outcome: `summary()` has Avg@k, pass@k, majority@k by set and their macro averages.

    Raises:
        PastError: the recipe cannot be, or the adapter cannot be read or is of another shape.
    """
    chosen = _recipe(recipe)
    with _joined(world, chosen) as processes:
        from past_opsd.run import checkpoint
        from past_opsd.run.train import session

        with session(chosen, world=processes) as assembled:
            if adapter is not None:
                checkpoint.load_adapter(assembled.model, "student", Path(adapter))
                assembled.loop.publish()
            return assembled.evaluate(0)


def probe(
    run: Folder,
    step: int | None = None,
    *,
    problems: int = 64,
    samples: int = 2,
    split: Literal["train", "evaluation"] = "train",
    trust: bool = False,
) -> dict[str, Any]:
    """Does the teacher use the matching trajectory? Its success with it, without it, and with another one.

    Args:
        run: the run, or its folder; the result is written there too.
        step: which checkpoint; by default the newest whole one.
        problems: how many problems.
        samples: the student's responses to each.
        split: whose problems.
        trust: do what the run's recipe names: run its modules, fetch its model or data, ask its servers. Needed for a
            run with a class or function of your own, since a run's folder may be somebody else's.

    Returns:
        Conditions, differences, counts and `verdict`, a sentence; docs/probes.md has every key.

    Raises:
        PastError: no such run or checkpoint, a method without a privileged teacher, or no `trust` where it is needed.
    """
    from past_opsd.analysis import probes
    from past_opsd.run import boundary

    chosen, notes = boundary.choose(Path(run), step)
    found = probes.probe_run(
        Path(run), [chosen], problems=problems, samples=samples, split=split, trust=trust, notes=notes
    )
    return found[chosen]


def shift(
    run: Folder,
    step: int | None = None,
    *,
    responses: int = 128,
    pairs: int = 256,
    prefixes: int = 24,
    completions: int = 12,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> dict[str, Any]:
    """What the teacher's change is worth to the student, and how much of it can reach one that sees only the prefix.

    Args:
        run: the run, or its folder, where the result is written too; or a recipe, to look before its first cycle.
        step: which checkpoint; by default the newest whole one.
        responses: the student's responses that teacher and student read.
        pairs: pairs of rollouts, at tokens where the two differ.
        prefixes: prefixes that are completed to tell what survives; none with 0.
        completions: the student's completions of each.
        overrides: of a recipe, as `section.key=value`.
        trust: as for `probe`.

    Returns:
        Estimates with their intervals, rows of responses and prefixes, and `verdict`; docs/probes.md has every key.

    Raises:
        PastError: as for `probe`.
    """
    from past_opsd.analysis import shift as shifts

    return shifts.shift_of(
        run if isinstance(run, str) else Path(run),
        step,
        responses=responses,
        pairs=pairs,
        prefixes=prefixes,
        completions=completions,
        overrides=overrides,
        trust=trust,
    )


def report(
    runs: Folder | Sequence[Folder],
    out: Folder | None = None,
    *,
    trajectories: int = TRAJECTORIES,
    figures: bool = False,
    trust: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Runs as one HTML file: curves, teacher, cost, health, every token.

    Args:
        runs: a run, a folder that holds runs, or several of these.
        out: the file; by default `report/index.html` in the one folder given.
        trajectories: attempts of each method in the browser of trajectories; 0 leaves it out.
        figures: also write each figure as SVG and PDF beside the page.
        trust: as for `probe`; without it the trajectories of such a run are left out.
        tell: hears what is left out.

    Returns:
        The file.

    Raises:
        PastError: no run there, or a file in the way that is no report.
    """
    from past_opsd.analysis import report as pages
    from past_opsd.core.reading import room
    from past_opsd.run.folder import RunFolder

    folders = [Path(runs)] if isinstance(runs, str | os.PathLike) else [Path(folder) for folder in runs]
    if trajectories < 0:
        raise PastError(f"trajectories = {trajectories}: give 0 or more")
    if out is None and len(folders) != 1:
        raise PastError("several folders were given: say with --out FILE.html (out=) where the report shall go")
    file = RunFolder(folders[0]).page if out is None else Path(out)
    if file.is_dir():
        raise PastError(f"{file} is a folder; give the name of a file, e.g. {file / 'index.html'}")
    if out is not None:
        room(file, ours=pages.page.is_page)
    for folder in folders:
        RunFolder(folder).enclosed()
    found = pages.data.find(folders, tell)
    return pages.write(found, file, trajectories=trajectories, figures=figures, trust=trust)


def export(
    run: Folder, out: Folder | None = None, *, step: int | None = None, merge: bool = False, trust: bool = False
) -> Path:
    """The student for other programs: a PEFT adapter with its tokenizer and card, or the whole model.

    Args:
        run: the run, or its folder.
        out: a new or empty folder, or an earlier export; by default `export` or `export-merged` in the run's folder.
        step: which checkpoint; by default the newest whole one.
        merge: write the model with the adapter merged in.
        trust: as for `probe`.

    Returns:
        The folder.

    Raises:
        PastError: no such run or checkpoint, or a folder in the way that is no export.
    """
    from past_opsd.run.export import export as write
    from past_opsd.run.folder import RunFolder

    place = RunFolder(Path(run)).export(merge) if out is None else Path(out)
    return write(Path(run), place, step=step, merge=merge, trust=trust)


def compare(
    suite: str = "main",
    *,
    family: str = "embedded",
    seeds: Sequence[int] = SEEDS,
    folder: Folder = "runs/compare",
    overrides: Sequence[str] = (),
    reference: str | None = None,
    jobs: int = 0,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """A suite of recipes over seeds, each run in a process of its own; what is done is kept and shared by suites.

    Args:
        suite: which one; a wrong name lists them.
        family: the recipe folder of the suite.
        seeds: training seeds.
        folder: where runs, results and tables go.
        overrides: settings for every run, as `past train --set` takes them.
        reference: the row to take differences to; by default the suite's own.
        jobs: runs at a time; 0 is one a core.
        tell: hears of every run that is done.

    Returns:
        What the tables show: a row a method with its scores, paired differences and costs, or why it is `missing`. The
        same is in `FOLDER/SUITE/results.json`, beside tables.md and tables.tex.

    Raises:
        PastError: no such suite, or no row whose runs could be made.
    """
    if jobs < 0:
        raise PastError(f"jobs = {jobs}: give 1 or more, or 0 for one per core")
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise PastError(f"seeds = {list(seeds)}: seeds are 0 or more, and each is given once")
    from past_opsd.analysis import suite as suites
    from past_opsd.core.reading import room

    chosen, out = suites.find(suite, family, reference), Path(folder)
    room(out, folder=True)
    failed = suites.run_all(chosen, seeds, out, jobs or os.cpu_count() or 1, list(overrides), tell)
    result = suites.results(chosen, suites.collect(chosen, seeds, out, failed), seeds)
    suites.save(out, result)
    return result


def default_folder(recipe: Recipe) -> Path:
    """Where a run goes that is given no folder."""
    return Path("runs") / f"{recipe.name.replace('/', '-')}-{recipe.run.seed}"


def _recipe(recipe: Recipe | str | Path) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else config.load(recipe)


@contextmanager
def _joined(world: World | None, recipe: Recipe) -> Generator[World]:
    """The processes that work together: the caller's, or those that the environment describes."""
    if world is not None:
        yield world
        return
    from past_opsd.policy.distributed import join, together

    if not _WORLD:
        _WORLD.append(join())
    with together(_WORLD[0]):
        _WORLD[0].connect(recipe.distributed.timeout_seconds)
        yield _WORLD[0]


@contextmanager
def _shown(
    recipe: Recipe, folder: Path, display: bool | Display, track: Sequence[str], world: World
) -> Generator[Display]:
    """Where progress goes: the caller's display or ours, and the trackers; the first process alone talks."""
    from past_opsd.run.trackers import Displays, open_trackers
    from past_opsd.run.train import Silent

    if not world.first:
        yield Silent()
        return
    with ExitStack() as stack:
        trackers = open_trackers(list(track), folder, recipe)
        if display is True:
            from past_opsd.interface.ui import TrainDisplay, screen

            shown = stack.enter_context(TrainDisplay(screen(), recipe.name, recipe.run.cycles))
        else:
            shown = Silent() if display is False else display
        yield stack.enter_context(Displays(shown, trackers))
