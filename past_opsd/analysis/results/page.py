"""The tables of every suite, the page about them and its figure, from the evidence alone: the same bytes each time.

A page is a Jinja template beside the evidence, `page.md.jinja`; another one, `NAME.md.jinja`, is the page NAME beside
it, and what begins with an underscore is included by others. Their prose takes every number from a function of
`Source`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jinja2
import numpy as np

from past_opsd.analysis import suite, tables
from past_opsd.analysis.report import data, learning, panels, teaching
from past_opsd.analysis.results import evidence
from past_opsd.analysis.results.evidence import WORLDS, Record
from past_opsd.analysis.suite import Outcomes, Row, Suite
from past_opsd.core import config, stats
from past_opsd.core.nouns import PastError

SUFFIX = ".md.jinja"
TEMPLATE = f"page{SUFFIX}"
NOT_RUN = "not run"
SCORES = "scores"
FIGURES = {SCORES: learning.dynamics, "certainty": teaching.certainty, "reading": teaching.mechanism}
"""By the name that a template calls."""
FUNCTIONS = (
    *("has", "title", "table", "claims", "differences", "order", "begun", "missing", "seeds", "cycles", "sets"),
    *(
        "samples",
        "setting",
        "score",
        "span",
        "gap",
        "cost",
        "diagnostic",
        "mean",
        "measured",
        "percent",
        "style",
        "both",
        "at",
        "truncated",
    ),
)
"""Of `Source`, what a template may call."""


class World:
    """The evidence of one base model."""

    def __init__(self, folder: Path):
        self.records = evidence.load(folder)

    @cached_property
    def seeds(self) -> list[int]:
        """Every training seed that there is."""
        return sorted({seed for _, seed in self.records})

    def knows(self, chosen: Suite) -> bool:
        """Whether a row of a suite has been run with every seed."""
        return any(all((recipe, seed) in self.records for seed in self.seeds) for recipe in chosen.rows.values())

    def of(self, recipe: str) -> list[Record]:
        """Its runs, whatever their seeds."""
        return [record for (name, _), record in sorted(self.records.items()) if name == recipe]

    def read(self, recipe: str, seed: int) -> Record:
        """One run."""
        if (recipe, seed) not in self.records:
            raise PastError(f"{recipe}, seed {seed}: not in the evidence")
        return self.records[recipe, seed]


class Compared:
    """A suite in a world: its rows, and its results as `past compare` has them."""

    def __init__(self, chosen: Suite, world: World):
        self.suite = chosen
        self.world = world
        self.rows = {row.label: row for row in suite.gather(chosen, world.seeds, world.read)}
        self.result = suite.results(chosen, list(self.rows.values()), world.seeds)

    def outcomes(self, label: str) -> Outcomes | None:
        """At the last boundary; None for a row that is missing. `Base` is before the first cycle."""
        if label == "Base":
            row = next(row for row in self.rows.values() if not row.missing)
            return row.outcomes(min(row.evaluations[0]))
        row = self.row(label)
        return None if row.missing else row.outcomes(max(row.evaluations[0]))

    def row(self, label: str) -> Row:
        """By its label."""
        if label not in self.rows:
            raise PastError(f"'{label}' is no row of suite '{self.suite.name}'; its rows are {', '.join(self.rows)}")
        return self.rows[label]


class Source:
    """What a template may ask. A suite is named, its world too where it is not the default one."""

    def __init__(self, folder: Path, family: str):
        self._folder = folder
        self._suites = suite.suites(family)
        worlds = {path.name: World(path) for path in sorted((folder / WORLDS).iterdir())}
        self._found = {
            (chosen.name, name): Compared(chosen, worlds[name])
            for chosen in self._suites.values()
            for name in chosen.worlds
            if name in worlds and worlds[name].knows(chosen)
        }

    def files(self) -> dict[str, dict[str, str]]:
        """Folder -> name -> text, of every suite and world."""
        return {
            name if world == "default" else f"{name}-{world}": suite.files(found.result)
            for (name, world), found in self._found.items()
        }

    def functions(self) -> dict[str, Any]:
        """By the name that a template calls."""
        return {name: getattr(self, name) for name in FUNCTIONS}

    def has(self, name: str, world: str = "default") -> bool:
        """Whether there is evidence of a suite."""
        return (name, world) in self._found

    def _at(self, name: str, world: str) -> Compared:
        if (name, world) not in self._found:
            raise PastError(f"the page asks for suite '{name}' of world '{world}', of which there is no evidence")
        return self._found[name, world]

    def _sheet(self, name: str, sheet: str, world: str) -> tables.Sheet:
        result = self._at(name, world).result
        kinds: Mapping[str, Callable[[], tables.Sheet]] = {
            "scores": lambda: tables.scores(result),
            "costs": lambda: tables.costs(result),
            "diagnostics": lambda: tables.diagnostics(result),
        }
        return kinds[sheet]() if sheet in kinds else tables.OWN[sheet](result, 3)

    def title(self, name: str, sheet: str = "scores", world: str = "default") -> str:
        """What a table shows."""
        return self._sheet(name, sheet, world).title

    def table(self, name: str, sheet: str = "scores", world: str = "default") -> str:
        """In Markdown."""
        return tables.markdown_table(self._sheet(name, sheet, world))

    def seeds(self, name: str = "main", world: str = "default") -> str:
        """The training seeds."""
        return ", ".join(map(str, self._at(name, world).world.seeds))

    def cycles(self, name: str = "main", world: str = "default") -> str:
        """The last boundary."""
        return str(self._at(name, world).result["cycles"])

    def samples(self, name: str = "main", world: str = "default") -> str:
        """Draws a problem."""
        return str(self._at(name, world).result["samples"])

    def sets(self, name: str = "main", world: str = "default") -> str:
        """How many held-out sets of how many problems."""
        outcomes = self._at(name, world).outcomes("Base") or {}
        sizes = " or ".join(str(size) for size in sorted({values.shape[1] for values in outcomes.values()}))
        return f"{len(outcomes)} held-out sets of {sizes} problems"

    def setting(self, name: str, label: str, key: str, world: str = "default") -> str:
        """What a row's runs were given under `section.key`."""
        at = self._at(name, world)
        row = at.row(label)
        if row.missing:
            return NOT_RUN
        section, _, field = key.partition(".")
        return str(at.world.read(row.recipe, at.world.seeds[0]).settings[section][field])

    def score(self, name: str, label: str, world: str = "default") -> str:
        """Macro Avg@k in percent."""
        outcomes = self._at(name, world).outcomes(label)
        return NOT_RUN if outcomes is None else f"{100 * _macro(outcomes):.1f}"

    def span(self, name: str, label: str, world: str = "default") -> str:
        """Its range over seeds."""
        outcomes = self._at(name, world).outcomes(label)
        if outcomes is None:
            return NOT_RUN
        by_seed = [100 * _macro({t: o[i : i + 1] for t, o in outcomes.items()}) for i in range(_seeds(outcomes))]
        return f"{min(by_seed):.1f} to {max(by_seed):.1f}"

    def order(self, name: str, labels: Sequence[str], world: str = "default") -> str:
        """Rows by score, the lowest first."""
        found = self._at(name, world)
        scored = [(label, found.outcomes(label)) for label in labels]
        present = sorted(((_macro(o), label) for label, o in scored if o is not None), key=lambda item: item[0])
        text = " < ".join(f"{label} {100 * score:.1f}" for score, label in present)
        absent = [label for label, o in scored if o is None]
        return f"{text} ({', '.join(absent)}: {NOT_RUN})" if absent else text

    def cost(self, name: str, label: str, key: str, world: str = "default") -> str:
        """As the cost table shows it."""
        costs = self._at(name, world).row(label).costs
        return tables.COSTS[key][1](costs[key]) if key in costs else NOT_RUN

    def diagnostic(self, name: str, label: str, key: str, digits: int = 2, world: str = "default") -> str:
        """A mean over cycles."""
        found = self._at(name, world).row(label).diagnostics
        return f"{found[key]:.{digits}f}" if key in found else NOT_RUN

    def mean(self, name: str, label: str, key: str, first: int, last: int, world: str = "default") -> str:
        """What cycles `first` to `last`, counted from 1, logged, averaged over them and the seeds; those that did not
        log it are left out."""
        at = self._at(name, world)
        row = at.row(label)
        if row.missing:
            return NOT_RUN
        lines = [line for seed in at.world.seeds for line in at.world.read(row.recipe, seed).metrics]
        found = [line[key] for line in lines if key in line and first <= line["cycle"] + 1 <= last]
        return f"{np.mean(found):.2f}" if found else "-"

    def measured(
        self,
        name: str,
        label: str,
        path: str,
        digits: int = 2,
        factor: float = 1,
        step: int = -1,
        world: str = "default",
    ) -> str:
        """An estimate of a probe or a shift of a row's runs, averaged over the seeds that have it, at the last boundary
        or another; `path` leads to it, as in `probe.conditions.matching.failed.success`."""
        at = self._at(name, world)
        row = at.row(label)
        kind, _, rest = path.partition(".")
        found: list[float] = []
        for record in at.world.of(row.recipe):
            last = max(record.evaluations) if step < 0 else step
            value: Any = record.measured.get(kind, {}).get(last)
            for key in rest.split("."):
                value = None if value is None else value.get(key)
            if value is not None:
                found.append(value["estimate"])
        return f"{factor * float(np.mean(found)):.{digits}f}" if found else "-"

    def percent(self, name: str, label: str, key: str, world: str = "default") -> str:
        """A share that the run's last cycle logs, in percent."""
        at = self._at(name, world)
        row = at.row(label)
        if row.missing:
            return NOT_RUN
        values = [at.world.read(row.recipe, seed).metrics[-1][key] for seed in at.world.seeds]
        return f"{100 * float(np.mean(values)):.0f}"

    def style(self, name: str, label: str, style: str, world: str = "default") -> str:
        """The share of held-out responses at the last boundary that the task calls so, in percent."""
        row = self._at(name, world).row(label)
        if row.missing:
            return NOT_RUN
        ends = [by_step[max(by_step)] for by_step in row.evaluations]
        shares = [
            result.styles.get(style, 0) / (end.samples * len(result.problems))
            for end in ends
            for result in end.tasks.values()
        ]
        return f"{100 * float(np.mean(shares)):.0f}"

    def at(self, name: str, label: str, step: int, world: str = "default") -> str:
        """Macro Avg@k in percent at an earlier boundary."""
        row = self._at(name, world).row(label)
        return NOT_RUN if row.missing else f"{100 * _macro(row.outcomes(step)):.1f}"

    def truncated(self, name: str, label: str, step: int, world: str = "default") -> str:
        """The share of held-out responses that do not end by themselves at a boundary, in percent."""
        row = self._at(name, world).row(label)
        if row.missing:
            return NOT_RUN
        shares = [result.truncated for by_step in row.evaluations for result in by_step[step].tasks.values()]
        return f"{100 * float(np.mean(shares)):.1f}"

    def gap(self, name: str, label: str, other: str, world: str = "default", unit: stats.Unit = "problem") -> str:
        """The difference of two rows in points, with its paired interval, over problems unless told otherwise."""
        if unit == "problem+seed" and len(self._at(name, world).world.seeds) < 2:
            return "one seed"
        found = self._gap(name, label, other, world, unit)
        return NOT_RUN if found is None else tables.interval(found, sign=True)

    def _gap(
        self, name: str, label: str, other: str, world: str, unit: stats.Unit = "problem"
    ) -> stats.Interval | None:
        at = self._at(name, world)
        mine, theirs = at.outcomes(label), at.outcomes(other)
        return None if mine is None or theirs is None else stats.paired_bootstrap(mine, theirs, unit=unit)

    def differences(self, name: str, pairs: Sequence[tuple[str, str]], world: str = "default") -> str:
        """Rows minus others in points, with the intervals over problems and training seeds and over problems alone."""
        rows: list[tuple[str, ...]] = []
        for label, other in pairs:
            cells = [self.gap(name, label, other, world, unit) for unit in ("problem+seed", "problem")]
            rows.append((f"{label} minus {other}", *cells))
        header = ("Difference", "Over problems and seeds", "Over problems")
        return tables.markdown_table(tables.Sheet("", header, rows))

    def both(self, name: str, pairs: Sequence[tuple[str, str]], other: str) -> str:
        """Differences over problems and seeds in another family, whose evidence lies beside this one, and here; and
        whether they have a direction: an interval on the same side of 0 in both."""
        rows: list[tuple[str, ...]] = []
        sources = (Source(self._folder.parent / other, other), self)
        for label, minus in pairs:
            gaps = [source._gap(name, label, minus, "default", "problem+seed") for source in sources]
            cells = [NOT_RUN if gap is None else tables.interval(gap, sign=True) for gap in gaps]
            rows.append((f"{label} minus {minus}", *cells, direction(gaps)))
        header = ("Difference", *(source._at(name, "default").suite.title for source in sources), "Direction")
        return tables.markdown_table(tables.Sheet("", header, rows))

    def begun(self, name: str, world: str = "default") -> str:
        """The scores of rows that have been run with some of the seeds."""
        at = self._at(name, world)
        told: list[str] = []
        for row in (row for row in at.rows.values() if row.missing):
            seeds = [seed for seed in at.world.seeds if (row.recipe, seed) in at.world.records]
            records = [at.world.read(row.recipe, seed) for seed in seeds]
            if records and all(record.complete for record in records):
                found = suite.averaged(row.label, row.recipe, records)
                score = _macro(found.outcomes(max(found.evaluations[0])))
                told.append(f"{row.label} {100 * score:.1f} (seed {', '.join(map(str, seeds))})")
        return "; ".join(told) or "none"

    def missing(self, name: str, world: str = "default") -> str:
        """The rows that have not been run with every seed."""
        return ", ".join(row.label for row in self._at(name, world).rows.values() if row.missing) or "none"

    def claims(self, name: str, pairs: Sequence[tuple[str, str, float]], world: str = "default") -> str:
        """Differences that the paper reports beside ours: one row minus another, in points."""
        rows: list[tuple[str, ...]] = []
        for label, other, theirs in pairs:
            found = self._gap(name, label, other, world)
            cells = (NOT_RUN, "") if found is None else (tables.interval(found, sign=True), _verdict(found, theirs))
            rows.append((f"{label} minus {other}", f"{theirs:+.3f}", *cells))
        header = ("Difference", "Paper", "Here, interval over problems", "Direction")
        return tables.markdown_table(tables.Sheet("", header, rows))

    def figure(self, name: str, labels: Sequence[str], kind: str) -> panels.Figure:
        """Some rows of a suite: their scores [fig:main-learning-dynamics], or another of `FIGURES`."""
        found = self._at(name, "default")
        chosen = [self._method(found, label) for label in labels if not found.row(label).missing]
        made = FIGURES[kind](chosen)
        if made is None:
            raise PastError(f"suite '{name}' has nothing to draw of '{kind}'")
        return made

    def _method(self, found: Compared, label: str) -> data.Method:
        recipe = found.row(label).recipe
        runs = {seed: _run(found.world.read(recipe, seed)) for seed in found.world.seeds}
        return data.Method(recipe, label, runs)


def _run(record: Record) -> data.Run:
    """As a report knows it."""
    recipe = config.load(record.recipe, [f"run.seed={record.seed}"])
    probes, shifts = (record.measured.get(kind, {}) for kind in ("probe", "shift"))
    completed = max(record.evaluations)
    return data.Run(
        Path(record.recipe), recipe, record.metrics, record.timings, record.evaluations, probes, shifts, [], completed
    )


def _macro(outcomes: Outcomes) -> float:
    return stats.macro({task: stats.avg_at_k(values) for task, values in outcomes.items()})


def _seeds(outcomes: Outcomes) -> int:
    return len(next(iter(outcomes.values())))


def direction(gaps: Sequence[stats.Interval | None]) -> str:
    """On which side of 0 all intervals lie."""
    if None in gaps:
        return NOT_RUN
    sides = {(gap.low > 0) - (gap.high < 0) for gap in gaps if gap is not None}
    if 0 in sides:
        return "open"
    return "opposite" if len(sides) > 1 else f"{'above' if sides == {1} else 'below'} 0"


def _verdict(found: stats.Interval, theirs: float) -> str:
    """Whether the interval leaves a direction, and whose."""
    if found.low <= 0 <= found.high:
        return "undecided"
    return "as in the paper" if (found.estimate > 0) == (theirs > 0) else "opposite"


def build(folder: Path, family: str, page: Path) -> dict[Path, bytes]:
    """Every file that follows from the evidence in `folder`: tables beside it, the pages and their figures."""
    if not (folder / WORLDS).is_dir():
        raise PastError(f"{folder} holds no evidence ({WORLDS}/); 'past results collect RUNS' writes it")
    source = Source(folder, family)
    made = {
        folder / name / file: text.encode() for name, texts in source.files().items() for file, text in texts.items()
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder.parent),  # pages of several families may share their text
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    cast("dict[str, Any]", environment.globals).update(source.functions())
    for template in sorted(folder.glob(f"[!_]*{SUFFIX}")):
        name = template.name.removesuffix(SUFFIX)
        own = page if template.name == TEMPLATE else page.with_name(f"{page.stem.removesuffix('-results')}-{name}.md")
        made |= _page(environment, source, template, own)
    return made


def _page(environment: jinja2.Environment, source: Source, template: Path, page: Path) -> dict[Path, bytes]:
    """A page and the figures that its template asks for."""
    drawn: dict[Path, bytes] = {}

    def figure(name: str, labels: Sequence[str], kind: str = SCORES) -> str:
        file = page.with_name(f"{page.stem}-{name}{'' if kind == SCORES else f'-{kind}'}.svg")
        drawn[file] = panels.plain_svg(source.figure(name, labels, kind))
        return file.name

    try:
        text = environment.from_string(template.read_text(encoding="utf-8"), {"figure": figure}).render()
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise PastError(f"{template}{f':{line}' if line else ''}: {error}") from None
    return {page: text.encode()} | drawn


def stray(folder: Path, made: Mapping[Path, bytes]) -> list[Path]:
    """Tables beside the evidence that do not come from it."""
    names = {path.name for path in made if path.parent.parent == folder}
    return sorted(path for path in folder.glob("*/*") if path.name in names and path not in made)
