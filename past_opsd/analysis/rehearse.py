"""`past rehearse RECIPE`: the recipe itself from start to end, small, on this machine.

Prompts, method, samplers, schedules, verifier and file formats are the recipe's own. What is too large is scaled down,
what is not here is stood in for (`stand_ins.py`), and both are told key by key. Halfway the run is stopped and resumed.
A rehearsal shows that a recipe starts, takes its steps and ends; it says nothing about scores, so it prints none.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.table import Table

from past_opsd.analysis import stand_ins, suite, tables
from past_opsd.analysis.suite import Suite
from past_opsd.core import config, life
from past_opsd.core.config import EMBEDDED, PromptsSection, Recipe
from past_opsd.core.nouns import Adapter, PastError, Term
from past_opsd.core.prompts import ALLOWED
from past_opsd.core.reading import room
from past_opsd.run import resume
from past_opsd.run.evaluate import evaluation_steps
from past_opsd.run.folder import RunFolder
from past_opsd.run.loop import Learner
from past_opsd.run.train import Session, Silent, train

CYCLES = 2
MOST: Mapping[str, int] = {
    "run.cycles": CYCLES,
    "evaluation.samples": 4,
    "phase1_problems": 8,
    "train_problems": 64,
    "eval_problems": 2,
}
"""The most that a key, or every key of a name, keeps."""
TOKENS = {"max_new_tokens": 12}
"""The same where the model is stood in for, whose responses are short."""
WITH_CYCLES = ("warmup_steps", "strength_cycles", "teacher_sync_every")
"""Keys that count cycles of the run and shrink with them."""


@dataclass(frozen=True)
class Change:
    """A key that is not as the recipe has it."""

    key: str
    recipe: Any
    rehearsal: Any


@dataclass
class Counts:
    """What one row did."""

    updates: dict[Adapter, int] = field(default_factory=lambda: {"student": 0, "teacher": 0})
    tokens: dict[Adapter, int] = field(default_factory=lambda: {"student": 0, "teacher": 0})
    responses: dict[str, int] = field(default_factory=dict[str, int])  # all, right, cut
    continuations: dict[str, int] = field(default_factory=dict[str, int])
    before: dict[str, int] = field(default_factory=dict[str, int])  # the first cycle
    evaluated: list[int] = field(default_factory=list[int])
    checkpoints: list[int] = field(default_factory=list[int])
    resumed: int = 0


@dataclass(frozen=True)
class Rehearsed:
    """One row: what it did, or why it ended."""

    label: str
    recipe: str
    changes: tuple[Change, ...] = ()
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    failure: str = ""


def run(names: Sequence[str], out: Path | None, overrides: Sequence[str]) -> int:
    """Recipes, or all of a shipped folder, one after the other; 1 when one failed."""
    names = [found for name in names for found in _family(name)]
    for name in names:
        config.locate(name)
    with _place(out) as place:
        return show(Console(), list(rehearse({name: name for name in names}, place, overrides, _tell)))


def run_suite(chosen: Suite, out: Path | None, overrides: Sequence[str], seed: int) -> int:
    """`past compare --rehearse`: every row of a suite, one seed, and the tables that are made of them."""
    console = Console()
    with _place(out) as place:
        rows = list(rehearse(chosen.rows, place, [*overrides, f"run.seed={seed}"], _tell))
        code = show(console, rows)
        made = [row.label for row in rows if not row.failure]
        if not made:
            return code
        sheets = make_tables(chosen, made, place, seed)
    console.print(f"tables made of these rows, and not shown: {', '.join(sheets)}", highlight=False, soft_wrap=True)
    return code


def _tell(text: str) -> None:
    life.doing(text)


def _family(name: str) -> list[str]:
    """The recipes of a shipped folder; any other name is that of a recipe."""
    return [found for found in config.shipped() if found.partition("/")[0] == name] or [name]


@contextmanager
def _place(out: Path | None) -> Generator[Path]:
    if out is not None:
        room(out, folder=True)
        if (out / "runs").exists():
            raise PastError(f"{out} holds a rehearsal already; choose another --out, or delete it")
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="past-rehearse-") as name:
        yield Path(name)


def rehearse(
    rows: Mapping[str, str], out: Path, overrides: Sequence[str], tell: Callable[[str], None] = lambda text: None
) -> Iterator[Rehearsed]:
    """Every row, label -> recipe, in `OUT/runs/RECIPE-SEED`; one that fails says why and the others go on."""
    recipes: dict[str, Recipe | str] = {}
    for name in dict.fromkeys(rows.values()):
        try:
            recipes[name] = config.load(name, overrides)
        except PastError as error:
            recipes[name] = str(error)
    loaded = [recipe for recipe in recipes.values() if isinstance(recipe, Recipe)]
    home = out / "stand-ins"
    if any(_standing(recipe) for recipe in loaded):
        tell("making what stands in for models and data")
        _furnish(home, loaded)
    done: dict[str, Rehearsed] = {}
    for label, name in rows.items():
        if name not in done:
            tell(f"rehearsing {name}, {len(done) + 1} of {len(recipes)}")
            recipe = recipes[name]
            if isinstance(recipe, str):
                done[name] = Rehearsed(label, name, failure=recipe)
            else:
                done[name] = _row(name, recipe, scaled(name, overrides, home), out)
        yield replace(done[name], label=label)


def _row(name: str, recipe: Recipe, small: Recipe, out: Path) -> Rehearsed:
    changes = tuple(Change(*leaf) for leaf in resume.changes(config.dump(recipe), config.dump(small)))
    done = Rehearsed(name, name, changes)
    folder, began = suite.run_folder(out, name, recipe.run.seed), time.monotonic()
    try:
        counts = _train(small, folder)
        _check(small, RunFolder(folder), counts)
        done = replace(done, counts=counts)
    except Exception as error:  # whatever one row does, the others are rehearsed
        kind = "" if isinstance(error, PastError) else f"{type(error).__name__}: "
        done = replace(done, failure=f"{kind}{error}")
    return replace(done, seconds=time.monotonic() - began)


def _train(recipe: Recipe, folder: Path) -> Counts:
    """To the middle, and from there to the end."""
    counts, middle = Counts(), recipe.run.cycles // 2
    run = RunFolder(folder)

    def opened(session: Session) -> None:
        session.loop.learner = _Counting(session.loop.learner, counts)

    def at_the_middle() -> bool:
        return len(run.read_metrics()) >= middle

    train(recipe, folder, False, Silent(), opened=opened, stop=at_the_middle, patient=False)
    counts.resumed = run.steps()[-1]
    train(recipe, folder, True, Silent(), opened=opened, patient=False)
    return counts


@dataclass
class _Counting:
    """A learner that counts the tokens that its steps supervise, each once."""

    learner: Learner
    counts: Counts

    @property
    def versions(self) -> Mapping[Adapter, int]:
        return self.learner.versions

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        self.counts.tokens[phase] += sum({(term.live, term.tokens): term.supervised for term in terms}.values())
        metrics = self.learner.step(phase, terms)
        self.counts.updates[phase] += int(metrics[f"{phase}/stepped"])
        return metrics

    def merge(self, source: Adapter, target: Adapter, weight: float) -> None:
        self.learner.merge(source, target, weight)

    def reset(self, adapter: Adapter) -> None:
        self.learner.reset(adapter)


def _check(recipe: Recipe, run: RunFolder, counts: Counts) -> None:
    """Read back what the run left; what should be there and is not is a failure."""
    lines = run.read_metrics()
    counts.responses = _outcomes(lines, "rollout")
    counts.continuations = _outcomes(lines, "failed")
    last = lines[-1]
    names = {"cost/phase1_samples": "samples", "phase1/steps": "updates", "hints/own": "hints of its own"}
    names |= {"hints/column": "hints of the data", "hints/fallback": "hints from references"}
    counts.before = {told: int(last[key]) for key, told in names.items() if last.get(key)}
    counts.evaluated, counts.checkpoints = run.evaluations.numbers(), run.steps()
    missing = sorted(evaluation_steps(recipe) - set(counts.evaluated))
    if len(lines) != recipe.run.cycles or run.steps()[-1] != recipe.run.cycles or missing:
        raise PastError(
            f"it ended after {len(lines)} of {recipe.run.cycles} cycles, at checkpoint {run.steps()[-1]}, without the "
            f"evaluations at {missing}"
        )
    if not counts.updates["student"]:
        raise PastError("the student took no step in any cycle")
    run.read_evaluations()


def _outcomes(lines: Sequence[Mapping[str, float]], branch: str) -> dict[str, int]:
    reasons = {name: sum(int(line.get(f"{branch}/reason/{name}", 0)) for line in lines) for name in _reasons(lines)}
    total = sum(reasons.values())
    return {"all": total, "right": reasons.get("correct", 0), "cut": reasons.get("truncated", 0)} if total else {}


def _reasons(lines: Sequence[Mapping[str, float]]) -> set[str]:
    return {key.rpartition("/reason/")[2] for line in lines for key in line if "/reason/" in key}


def make_tables(chosen: Suite, made: Sequence[str], out: Path, seed: int) -> list[str]:
    """The suite's tables of these rows, in every form; returns what each is, by its first words."""
    rows = {label: recipe for label, recipe in chosen.rows.items() if label in made}
    reference = chosen.reference if chosen.reference in rows else next(iter(rows))
    there = replace(chosen, rows=rows, reference=reference)
    result = suite.results(there, suite.collect(there, [seed], out), [seed])
    tables.markdown(result)
    tables.latex(result)
    return [sheet.title.partition(":")[0].partition(",")[0] for sheet in tables.sheets(result)]


# What is scaled down and stood in for.


def _standing(recipe: Recipe) -> bool:
    """Whether the recipe's model or data may not be here."""
    return recipe.model.path not in EMBEDDED or hasattr(recipe.task, "train")


def scaled(name: str, overrides: Sequence[str], home: Path) -> Recipe:
    """The recipe with little of everything, and with what is here in the place of what may not be."""
    recipe = config.load(name, [*overrides, "engine.name=torch"])
    ratio, own = min(1.0, CYCLES / recipe.run.cycles), recipe.model.path in EMBEDDED
    small = _small(recipe, ratio, {} if own else TOKENS)
    most = small.evaluation.samples
    evaluation = {"pass_k": sorted({min(k, most) for k in small.evaluation.pass_k})}
    update: dict[str, Any] = {"evaluation": small.evaluation.model_copy(update=evaluation)}
    if not own:
        paths = {"path": str(home / "model"), "revision": None, "gguf_file": None}
        paths |= {"expert": str(home / "model")} if recipe.model.expert else {}
        update["model"] = small.model.model_copy(update=paths)
    return stand_ins.with_rows(small.model_copy(update=update), home)


def _small(section: BaseModel, ratio: float, tokens: Mapping[str, int], path: str = "") -> Any:
    """A section with its large numbers cut, and those within it."""
    update: dict[str, Any] = {}
    for key in type(section).model_fields:
        value, here = section.__dict__[key], f"{path}{key}"
        most = MOST.get(here, MOST.get(key, tokens.get(key)))
        if isinstance(value, BaseModel):
            update[key] = _small(value, ratio, tokens, f"{here}.")
        elif most is not None and isinstance(value, int):
            update[key] = min(value, most)
        elif key in WITH_CYCLES and value:
            update[key] = max(1, round(value * ratio))
    return section.model_copy(update=update)


def _furnish(home: Path, recipes: Sequence[Recipe]) -> None:
    """A model for all of them and every set of data that one names."""
    texts = [text for recipe in recipes for text in _texts(recipe.prompts)]
    texts += [f"{row['problem']}\n\n{row['solution']}" for row in stand_ins.rows(stand_ins.TRAIN_ROWS)]
    positions = max(recipe.model.max_context or 0 for recipe in recipes) or 40960
    stand_ins.save_model(home / "model", list(dict.fromkeys(texts)), positions)
    names = {name for recipe in recipes if hasattr(recipe.task, "train") for name in recipe.task.evaluation}
    stand_ins.save_sets(home, names)


def _texts(section: PromptsSection) -> list[str]:
    return [text for role in ALLOWED if (text := getattr(section, role))]


# What is printed.


def show(console: Console, rows: Sequence[Rehearsed]) -> int:
    """Row by row what happened, then what was not as in the recipes; 1 when a row failed."""
    for row in rows:
        title = row.label if row.label == row.recipe else f"{row.label} ({row.recipe})"
        if row.failure:
            console.print(f"{title}: FAILED", style="bold red", highlight=False, markup=False, soft_wrap=True)
            console.print(f"  {row.failure}", highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(f"{title}: done in {row.seconds:.1f} s", highlight=False, markup=False, soft_wrap=True)
            for line in told(row.counts):
                console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(differences(rows))
    if any(change.key == "model.path" for row in rows for change in row.changes):
        console.print(
            "A model with random weights that writes boxed digits at random stands in for the recipe's, made problems "
            "for its data. Right and wrong are what the recipe's own verifier says of what that wrote.",
            highlight=False,
            soft_wrap=True,
        )
    failed = [row.label for row in rows if row.failure]
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="bold red", highlight=False, markup=False, soft_wrap=True)
    else:
        count = f"all {len(rows)} rows" if len(rows) > 1 else "it"
        console.print(f"{count} started, trained, resumed, evaluated and ended", highlight=False)
    return 1 if failed else 0


def told(counts: Counts) -> list[str]:
    """What a row did, in lines."""
    before = ", ".join(f"{count} {name}" for name, count in counts.before.items())
    sampled = [
        f"{found['all']} {name} ({found['right']} right, {found['cut']} cut)"
        for name, found in (("responses", counts.responses), ("continuations of the teacher", counts.continuations))
        if found
    ]
    steps = [
        f"{count} {role} updates on {counts.tokens[role]:,} tokens" for role, count in counts.updates.items() if count
    ]
    evaluated, kept = (", ".join(map(str, steps)) or "none" for steps in (counts.evaluated, counts.checkpoints))
    lines = [f"before the first cycle: {before}" if before else "", ", ".join(sampled), ", ".join(steps)]
    lines.append(f"evaluations at {evaluated}; checkpoints at {kept}; stopped at {counts.resumed} and resumed")
    return [line for line in lines if line]


def differences(rows: Sequence[Rehearsed]) -> Table:
    """Every key that is not as in the recipes, with both values; rows that differ in it stand in lines of their own."""
    table = Table(
        title="Not as in the recipe", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False
    )
    for name in ("key", "recipe", "rehearsal", "rows"):
        table.add_column(name, overflow="fold")
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for change in row.changes:
            found.setdefault((change.key, _brief(change.recipe), _brief(change.rehearsal)), []).append(row.label)
    changed = sum(bool(row.changes) for row in rows)
    for (key, before, after), labels in sorted(found.items()):
        table.add_row(key, before, after, "all" if len(labels) == changed else ", ".join(labels))
    return table


def _brief(value: Any) -> str:
    """A value in one line; of a path that a rehearsal made, its last part."""
    text = "not set" if value is None else str(value)
    return f".../{Path(text).name}" if Path(text).is_absolute() else text
