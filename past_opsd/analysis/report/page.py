"""The report as one HTML text: no file beside it is needed and nothing is fetched.

What it shows is gathered here and written by the templates. They escape everything that a model, a data set or a recipe
wrote; the embedded data passes `embed`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from past_opsd import __version__
from past_opsd.analysis.report import answers, summary
from past_opsd.analysis.report.data import Method, Run
from past_opsd.analysis.report.figures import SECTIONS, Figure, Panel, svg
from past_opsd.analysis.report.style import LEAST_SPAN, widened
from past_opsd.core import config
from past_opsd.core.stats import EDGE
from past_opsd.run.folder import RunFolder

ASSETS = Path(__file__).parent / "assets"
DOCTYPE = "<!doctype html>"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
LIVE_POLICY = f"{POLICY}; connect-src 'self'"
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(frozen=True)
class Content:
    """What a page shows. `files` are the names of written figure files, by figure."""

    runs: list[Run]
    methods: list[Method]
    figures: list[Figure]
    browser: dict[str, Any]
    files: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Drawn:
    """A figure's panels with their SVG; one that an earlier figure has is named and led to instead of drawn again."""

    figure: Figure
    panels: list[tuple[Panel, str]]
    above: list[tuple[Panel, Figure]]
    files: Sequence[str]


@dataclass(frozen=True)
class Section:
    """One entry of the table of contents: what the template of its id says, then figures."""

    id: str
    title: str
    figures: list[Drawn]


@dataclass(frozen=True)
class Axis:
    """What the intervals of all rows are drawn on."""

    low: float
    high: float

    def at(self, share: float) -> str:
        """A place on it, in percent of its length."""
        return f"{100 * (share - self.low) / max(self.high - self.low, 1e-9):.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


TEMPLATES.filters |= {"percent": _percent, "points": _points}


def is_page(file: Path) -> bool:
    """Whether a file is a page, which a new one may replace."""
    with file.open("rb") as opened:
        return opened.read(len(DOCTYPE)).decode(errors="replace").lower() == DOCTYPE


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def page(content: Content, live: bool = False) -> str:
    """The whole document; a `live` one may ask the server that it came from, and has no trajectories."""
    methods = content.methods
    runs = [
        [m.label, seed, f"{run.completed} of {run.recipe.run.cycles}", len(run.warnings), run.folder]
        for m in methods
        for seed, run in m.runs.items()
    ]
    scores = summary.scores(methods)
    reasons = answers.reasons(methods)
    return TEMPLATES.get_template("report.html").render(
        policy=LIVE_POLICY if live else POLICY,
        version=__version__,
        asset=_asset,
        embed=embed,
        toml=config.to_toml,
        meaning=answers.meaning,
        title=_title(methods),
        facts=_facts(content),
        methods=methods,
        scores=scores,
        tiles=_tiles(methods, scores),
        axis=_axis(scores),
        against=next((row.against for row in scores if row.difference is not None), ""),
        resampled=_resampled(scores),
        reasons=reasons,
        ill=[run for run in content.runs if run.warnings],
        sections=[s for s in _sections(content, reasons is not None) if not (live and s.id == "trajectories")],
        browser=content.browser | {"meanings": _meanings(content.browser)},
        runs=runs,
        changed=[[key, *values] for key, values in summary.differences(methods).items()] if len(runs) > 1 else [],
    )


def embed(data: Any) -> str:
    """JSON that is safe inside a script element: a response that closes the element stays text."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    # A lone surrogate cannot be written as UTF-8; JSON can name it.
    return "".join(c if not "\ud800" <= c <= "\udfff" else f"\\u{ord(c):04x}" for c in text)


def _title(methods: Sequence[Method]) -> str:
    names = [method.label for method in methods]
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) < 4 else f"{len(names)} methods compared"


def _facts(content: Content) -> list[str]:
    runs = content.runs
    seeds = sorted({run.seed for run in runs})
    descriptions = list(dict.fromkeys(run.recipe.description for run in runs if run.recipe.description))
    facts = [descriptions[0]] if len(descriptions) == 1 else []
    facts += [f"{len(content.methods)} methods"] if len(content.methods) > 1 else []
    facts += [f"{len(runs)} runs"] if len(runs) > 1 else []
    facts.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
    return [*facts, _progress(runs)]


def _progress(runs: Sequence[Run]) -> str:
    """When everything ended, or how far the runs are."""
    open_ = [run for run in runs if run.completed < run.recipe.run.cycles]
    if not open_:
        written = [RunFolder(run.folder).metrics_file for run in runs]
        ended = max((path.stat().st_mtime for path in written if path.exists()), default=None)
        cycles = sorted({run.recipe.run.cycles for run in runs})
        length = f"{' or '.join(map(str, cycles))} cycles"
        if ended is None:
            return length
        return f"{length}, ended {datetime.datetime.fromtimestamp(ended):%Y-%m-%d %H:%M}"
    if len(runs) == 1:
        return f"cycle {open_[0].completed} of {open_[0].recipe.run.cycles}"
    least = min(open_, key=lambda run: run.completed / run.recipe.run.cycles)
    return f"{len(open_)} of {len(runs)} runs unfinished (one at cycle {least.completed} of {least.recipe.run.cycles})"


def _tiles(methods: Sequence[Method], rows: Sequence[summary.Row]) -> list[tuple[str, summary.Row]]:
    """The headline numbers, where they are few."""
    names = [row.label for row in rows]
    if len(methods) == 1:
        rows = rows[:: max(1, len(rows) - 1)]
        names = ["Before training" if row.step == 0 else f"After {row.step} cycles" for row in rows]
    return list(zip(names, rows, strict=True)) if len(rows) < 6 else []


def _axis(rows: Sequence[summary.Row]) -> Axis | None:
    if not rows:
        return None
    return Axis(*widened(min(r.low for r in rows), max(r.high for r in rows), LEAST_SPAN / 100, 0.0, 1.0))


def _sections(content: Content, answered: bool) -> Iterator[Section]:
    """Those that have something to show, in reading order."""
    yield Section("summary", "Summary", [])
    drawn: dict[str, Figure] = {}
    for name in dict.fromkeys([*SECTIONS, *(figure.section for figure in content.figures)]):
        own = [_drawn(f, content.files.get(f.name, ()), drawn) for f in content.figures if f.section == name]
        if own or name == "health" or (name == "answers" and answered):
            yield Section(name, SECTIONS.get(name, name.capitalize()), own)
    yield Section("trajectories", "Trajectories", [])
    yield Section("recipe", "Recipe", [])


def _drawn(figure: Figure, files: Sequence[str], drawn: dict[str, Figure]) -> Drawn:
    above = [(p, drawn[p.shows]) for p in figure.panels if p.shows in drawn]
    shown = [(p, svg(p)) for p in figure.panels if p.shows not in drawn]
    drawn |= {p.shows: figure for p, _ in shown if p.shows}
    return Drawn(figure, shown, above, files)


def _meanings(browser: Mapping[str, Any]) -> dict[str, str]:
    """The classes of answers that the browser shows, explained."""
    shown = [r for t in browser["trajectories"] for r in (t, *t["continuations"])]
    names = {"correct" if r["correct"] else str(r["reason"]) for r in shown}
    order = [*(r for r in answers.REASONS if r in names), *sorted(names - set(answers.REASONS))]
    return {name: answers.meaning(name) for name in order}


def _resampled(rows: Sequence[summary.Row]) -> str:
    """How the intervals were made, as far as there are any."""
    units = {row.interval.unit for row in rows if row.interval is not None}
    if not units:
        return ""
    what = "the k draws of every problem" if units == {"sample"} else "the problems"
    pairs = "; differences pair the draws of a seed and problem" if any(row.difference for row in rows) else ""
    return f"Intervals resample {what} (percentile bootstrap, 95\u00a0%), with {EDGE}{pairs}. "
