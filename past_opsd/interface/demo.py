"""`past demo`: Vanilla OPSD and PAST with equal student updates; a table and a report."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from past_opsd.analysis import report
from past_opsd.analysis.probes import probe
from past_opsd.analysis.report.data import find
from past_opsd.analysis.shift import shift
from past_opsd.core import config, life, stats
from past_opsd.core.files import is_part, write_text, writing
from past_opsd.core.lock import held
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import room
from past_opsd.interface.arguments import DEMOS
from past_opsd.interface.ui import TrainDisplay, interval
from past_opsd.run import boundary
from past_opsd.run.evaluate import Evaluation, macro_avg, stack
from past_opsd.run.folder import REPORT, TRAINED, UNTRAINED, RunFolder, is_ours
from past_opsd.run.train import train

METHODS = {"Vanilla OPSD": "opsd", "PAST": "past"}
MARK = ".past-demo"
_RUN = re.compile(rf"({'|'.join(DEMOS)})-({'|'.join(METHODS.values())})-\d+")
TABLE = "table.json"
_SCORES = re.compile(rf"{UNTRAINED}/[0-9a-f]{{32}}\.json")


def demo(
    console: Console, folder: Path, seeds: Sequence[int], overrides: Sequence[str] = (), family: str = DEMOS[0]
) -> dict[str, list[Evaluation]]:
    """Train every method with every seed in `folder`, new or an earlier demo's, then print and save the table."""
    config.load(f"{family}/past", overrides)  # a mistake is told before anything is deleted
    room(folder, folder=True)
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise PastError(f"{folder} exists and is not a demo's; choose another --out")
    with held(folder):
        clear(folder)
        write_text(folder / MARK, "")
        return _demo(console, folder, seeds, overrides, family)


def clear(folder: Path) -> None:
    """Delete what an earlier demo wrote here; what has another name, or is a link, stays."""
    RunFolder(folder).enclosed()
    with writing(folder):
        for place, folders, files in os.walk(folder, topdown=False):
            for path in (Path(place, name) for name in files):
                if _is_ours(path.relative_to(folder).as_posix()) and not path.is_symlink():
                    path.unlink()
            for path in (Path(place, name) for name in folders):
                with suppress(OSError):  # not empty, or a link
                    path.rmdir()


def _is_ours(path: str) -> bool:
    """Whether a demo writes a file of this name; one of any other is somebody's own."""
    first, _, rest = path.partition("/")
    if _RUN.fullmatch(first):
        return is_ours(rest, TRAINED) or is_part(rest.rpartition("/")[2])
    return path == TABLE or _SCORES.fullmatch(path) is not None or is_ours(path, {REPORT})


def _demo(
    console: Console, folder: Path, seeds: Sequence[int], overrides: Sequence[str], family: str
) -> dict[str, list[Evaluation]]:
    began = time.monotonic()
    results: dict[str, list[Evaluation]] = {"Base": [], **{name: [] for name in METHODS}}
    updates = 0
    for seed in seeds:
        for name, method in METHODS.items():
            recipe_name = f"{family}/{method}"
            recipe = config.load(recipe_name, [f"run.seed={seed}", *overrides])
            run = folder / f"{recipe_name.replace('/', '-')}-{seed}"
            again = _again(recipe_name, seed, overrides, run)
            with _told(run, again), TrainDisplay(console, f"{name} {seed}", recipe.run.cycles) as display:
                outcome = train(recipe, run, False, display, again=again, untrained=folder / UNTRAINED)
                if not outcome.finished:
                    raise KeyboardInterrupt
            updates = recipe.run.cycles
            results[name].append(outcome.evaluations[updates])
            if name == "PAST":
                results["Base"].append(outcome.evaluations[0])
    console.print(table(results, updates, seeds))
    gain = stats.paired_bootstrap(stack(results["PAST"]), stack(results["Vanilla OPSD"]))
    console.print(f"PAST minus Vanilla OPSD: {interval(gain, sign=True)}", highlight=False)
    _save(folder / TABLE, results)
    teacher = folder / f"{family}-past-{seeds[0]}"
    life.doing("looking into the teacher")
    for line in look_into(teacher) if family == DEMOS[0] else _looks(teacher):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"{time.monotonic() - began:.0f} s; runs, rollouts and checkpoints: {folder}", highlight=False)
    life.doing("writing the report")
    page = report.write(find([folder]), RunFolder(folder).page)
    console.print(f"report: {page.resolve()}", highlight=False, soft_wrap=True)
    return results


def _again(recipe: str, seed: int, overrides: Sequence[str], run: Path) -> str:
    sets = [word for setting in (f"run.seed={seed}", *overrides) for word in ("--set", setting)]
    return shlex.join([*life.program(), "train", recipe, *sets, "--out", str(run), "--resume"])


@contextmanager
def _told(run: Path, again: str) -> Generator[None]:
    """Where a run of the demo is stopped, say what is left of it."""
    try:
        yield
    except KeyboardInterrupt:
        text = "the demo was stopped; it begins anew when it is started again"
        kept = RunFolder(run).newest()
        if kept is not None:
            text += f"\nthe last checkpoint is {kept}; this run alone goes on with: {again}"
        raise KeyboardInterrupt(text) from None


def look_into(run: Path) -> list[str]:
    """What the teacher of a run uses, and what of it can reach the student; both are kept in the run's folder."""
    step, _ = boundary.choose(run, None)
    with boundary.opened(run, step) as at:
        problems = boundary.pick(at.session.loop.problems, 64, at.seed, "probe", "problems")
        probed, shifted = probe(at, problems, 4, "train"), shift(at, 128, 256, 24, 12)
    RunFolder(run).write_probe(step, probed)
    RunFolder(run).write_shift(step, shifted)
    return [f"teacher (seed {at.seed}): {probed['verdict']}", f"transfer (seed {at.seed}): {shifted['verdict']}"]


def _looks(run: Path) -> list[str]:
    """The commands that ask the same of a larger model, which takes minutes."""
    return [f"its teacher: {shlex.join([*life.program(), what, str(run)])}" for what in ("probe", "shift")]


def table(results: dict[str, list[Evaluation]], updates: int, seeds: Sequence[int]) -> Table:
    """Avg@k per task, the macro average and the difference to the base, with paired 95 % intervals."""
    first = results["Base"][0]
    title = f"Avg@{first.samples} (%) after {updates} updates, seeds {', '.join(map(str, seeds))} [95 % interval]"
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    out.add_column("Method")
    for name in first.tasks:
        out.add_column(name, justify="right")
    out.add_column("Macro", justify="right")
    out.add_column("minus Base", justify="right")
    base = stack(results["Base"])
    for name, evaluations in results.items():
        outcomes = stack(evaluations)
        tasks = [f"{100 * stats.avg_at_k(outcomes[t]):.1f}" for t in first.tasks]
        difference = "" if name == "Base" else interval(stats.paired_bootstrap(outcomes, base), sign=True)
        out.add_row(name, *tasks, interval(stats.bootstrap(outcomes)), difference)
    return out


def _save(path: Path, results: dict[str, list[Evaluation]]) -> None:
    macro = {name: [macro_avg(run.outcomes()) for run in runs] for name, runs in results.items()}
    write_text(path, json.dumps(macro, indent=1) + "\n")
