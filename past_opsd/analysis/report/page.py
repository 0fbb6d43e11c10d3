"""The report as one HTML text: no file beside it is needed and nothing is fetched.

Everything that a model, a data set or a recipe wrote passes `html.escape` or, inside the embedded data, `embed`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from past_opsd import __version__
from past_opsd.analysis.report import answers, summary
from past_opsd.analysis.report.data import Method, Run
from past_opsd.analysis.report.figures import SECTIONS, Figure, Panel, svg
from past_opsd.analysis.report.style import LEAST_SPAN, widened
from past_opsd.core import config
from past_opsd.core.stats import EDGE, Interval
from past_opsd.run.folder import RunFolder

ASSETS = Path(__file__).parent / "assets"
DOCTYPE = "<!doctype html>"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
BROWSER = """
<noscript><p class="warned">The trajectory browser needs scripts; figures and tables above do not.</p></noscript>
<div class="browser" id="browser">
  <div class="pick">
    <div class="filters" role="search">
      <input id="search" type="search" placeholder="Search problems and responses" aria-label="Search">
      <select id="by-verdict" aria-label="Verdict"></select>
      <select id="by-cycle" aria-label="Cycle"></select>
      <select id="by-run" aria-label="Method"></select>
    </div>
    <p class="count" id="count" aria-live="polite"></p>
    <ol class="list" id="list"></ol>
  </div>
  <article class="detail" id="detail" aria-live="off"></article>
</div>
<p class="note keys">Keys: <kbd>j</kbd> <kbd>k</kbd> next and previous trajectory, arrows move between tokens,
<kbd>Esc</kbd> closes the card.</p>
<aside class="card" id="card" hidden role="status"></aside>
"""


@dataclass(frozen=True)
class Content:
    """What a page shows. `files` are the names of written figure files, by figure."""

    runs: list[Run]
    methods: list[Method]
    figures: list[Figure]
    browser: dict[str, Any]
    files: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Section:
    """One entry of the table of contents."""

    id: str
    title: str
    body: str


def is_page(file: Path) -> bool:
    """Whether a file is a page, which a new one may replace."""
    with file.open("rb") as opened:
        return opened.read(len(DOCTYPE)).decode(errors="replace").lower() == DOCTYPE


def page(content: Content) -> str:
    """The whole document."""
    sections = _sections(content)
    links = "".join(f'<a href="#{s.id}">{escape(s.title)}</a>' for s in sections)
    bodies = "".join(
        f'<section id="{s.id}" aria-labelledby="{s.id}-title"><h2 id="{s.id}-title">{escape(s.title)}</h2>'
        f"{s.body}</section>"
        for s in sections
    )
    style, charts, script = (_asset(name) for name in ("report.css", "charts.js", "report.js"))
    browser = content.browser | {"meanings": _meanings(content.browser)}
    return (
        f'{DOCTYPE}<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{escape(_title(content))}</title><link rel="icon" href="data:,"><style>{style}</style></head>'
        f'<body><a class="skip" href="#summary">Skip to the summary</a>{_header(content)}'
        f'<div class="frame"><nav class="toc" aria-label="Sections">{links}</nav><main>{bodies}</main></div>'
        f"<footer>past-opsd {escape(__version__)}. Self-contained: nothing was loaded from a network.</footer>"
        '<aside class="tip" id="tip" role="status" hidden></aside>'
        f'<script type="application/json" id="trajectory-data">{embed(browser)}</script>'
        f"<script>{charts}{script}</script></body></html>\n"
    )


def embed(data: Any) -> str:
    """JSON that is safe inside a script element: a response that closes the element stays text."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    # A lone surrogate cannot be written as UTF-8; JSON can name it.
    return "".join(c if not "\ud800" <= c <= "\udfff" else f"\\u{ord(c):04x}" for c in text)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in a box of its own, so that a wide one scrolls there and not the page."""
    head = "".join(f'<th scope="col">{escape(str(h))}</th>' for h in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, Markup):
        return f"<td>{value.html}</td>"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{escape('' if value is None else str(value))}</td>"
    return f'<td class="num">{value:,}</td>' if isinstance(value, int) else f'<td class="num">{value:.5g}</td>'


@dataclass(frozen=True)
class Markup:
    """Text that is HTML already."""

    html: str


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _title(content: Content) -> str:
    if len(content.methods) == 1:
        return content.methods[0].label
    names = [m.label for m in content.methods]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) < 4 else f"{len(names)} methods compared"


def _header(content: Content) -> str:
    facts = " · ".join(_facts(content))
    return (
        '<header class="top"><div class="brand"><span class="mark" aria-hidden="true"></span>Training report</div>'
        '<button type="button" id="theme" class="theme" aria-label="Switch between light and dark">Theme</button>'
        f'<h1>{escape(_title(content))}</h1><p class="lede">{escape(facts)}</p>'
        f"{_tiles(content)}{_health_line(content)}</header>"
    )


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
        updates = f"{' or '.join(map(str, cycles))} cycles"
        if ended is None:
            return updates
        return f"{updates}, ended {datetime.datetime.fromtimestamp(ended):%Y-%m-%d %H:%M}"
    if len(runs) == 1:
        return f"cycle {open_[0].completed} of {open_[0].recipe.run.cycles}"
    least = min(open_, key=lambda run: run.completed / run.recipe.run.cycles)
    return f"{len(open_)} of {len(runs)} runs unfinished (one at cycle {least.completed} of {least.recipe.run.cycles})"


def _tiles(content: Content) -> str:
    rows = summary.scores(content.methods)
    names = [row.label for row in rows]
    if len(content.methods) == 1:
        rows = rows[:: max(1, len(rows) - 1)]
        names = ["Before training" if row.step == 0 else f"After {row.step} updates" for row in rows]
    tiles = "".join(_tile(name, row) for name, row in zip(names, rows, strict=True))
    return f'<div class="tiles">{tiles}</div>' if tiles and len(rows) < 6 else ""


def _tile(name: str, row: summary.Row) -> str:
    spread = "" if row.interval is None else f"<p>95 % interval {100 * row.low:.1f} to {100 * row.high:.1f}</p>"
    change = ""
    if row.difference is not None:
        change = f'<p class="change">{_signed(row.difference)}<br>against {escape(row.against)}</p>'
    return (
        f'<div class="tile"><h3>{escape(name)}</h3><p class="big">{100 * row.macro:.1f}<small>%</small></p>'
        f"<p>macro Avg@{row.samples} after {row.step} updates</p>{spread}{change}</div>"
    )


def _signed(value: Interval) -> str:
    parts = (f"{100 * v:+.1f}".replace("-", "−") for v in (value.estimate, value.low, value.high))
    return "{} <span>[{}, {}]</span>".format(*parts)


def _health_line(content: Content) -> str:
    found = sum(len(run.warnings) for run in content.runs)
    if not found:
        return '<p class="healthy">No health warnings.</p>'
    with_ = sum(bool(run.warnings) for run in content.runs)
    where = f" in {with_} of {len(content.runs)} runs" if len(content.runs) > 1 else ""
    first = next(w for run in content.runs for w in run.warnings)
    text = f"{found} health warning{'s' if found > 1 else ''}{where}"
    more = ' <a href="#health">All of them</a>' if found > 1 else ""
    return f'<p class="warned"><strong>{text}.</strong> {escape(first)}.{more}</p>'


def _sections(content: Content) -> list[Section]:
    found = [Section("summary", "Summary", _summary(content))]
    known = {figure.section: "" for figure in content.figures}
    drawn: dict[str, Figure] = {}
    for name in dict.fromkeys([*SECTIONS, *known]):
        own = [f for f in content.figures if f.section == name]
        figures = [_figure(f, content.files.get(f.name, ()), drawn) for f in own]
        body = {"health": _warnings, "answers": _answers}.get(name, lambda _: "")(content) + "".join(figures)
        if body:
            found.append(Section(name, SECTIONS.get(name, name.capitalize()), body))
    found.append(Section("trajectories", "Trajectories", _browser(content.browser)))
    return [*found, Section("recipe", "Recipe", _recipe(content))]


def _figure(figure: Figure, files: Sequence[str], drawn: dict[str, Figure]) -> str:
    """The figure's panels; one that an earlier figure has is named and led to instead of drawn again."""
    shown = [p for p in figure.panels if p.shows not in drawn]
    above = "".join(_elsewhere(p, drawn[p.shows]) for p in figure.panels if p.shows in drawn)
    drawn |= {p.shows: figure for p in shown if p.shows}
    panels = "".join(
        f'<div class="panel"><h4>{escape(p.title)}</h4>{svg(p)}'
        + (f'<p class="note">{escape(p.note)}</p>' if p.note else "")
        + "</div>"
        for p in shown
    )
    tables = "".join(f"<h4>{escape(p.title)}</h4>{table(*p.table)}" for p in shown)
    links = ", ".join(f'<a href="{escape(f)}">{escape(f)}</a>' for f in files)
    label = f' <code title="the figure or table of the paper">{escape(figure.label)}</code>' if figure.label else ""
    return (
        f'<figure id="figure-{escape(figure.name)}" class="figure"><h3>{escape(figure.title)}{label}</h3>'
        + (f'<div class="panels count-{min(len(shown), 4)}">{panels}</div>' if shown else "")
        + f"<figcaption>{escape(figure.caption)}</figcaption>"
        + (f'<ul class="above">{above}</ul>' if above else "")
        + (f'<details class="data"><summary>Data</summary>{tables}</details>' if shown else "")
        + (f'<p class="files">{links}</p>' if links else "")
        + "</figure>"
    )


def _elsewhere(panel: Panel, figure: Figure) -> str:
    link = f'<a href="#figure-{escape(figure.name)}">{escape(figure.title)}</a>'
    return f"<li>{escape(panel.title)}: above, under {link}</li>"


def _answers(content: Content) -> str:
    """What became of the held-out responses, each class with its meaning."""
    found = answers.reasons(content.methods)
    if found is None:
        return ""
    body = [
        [_explained(reason, answers.meaning(reason)), *(_percent(share) for share in shares)]
        for reason, shares in found.rows.items()
    ]
    when = "at the last evaluation of each method, " if len(content.methods) > 1 else ""
    note = f"Verdicts on all held-out responses {when}in percent. Everything but 'correct' counts as a failure."
    return f'<div class="classes">{table(["Class", *found.columns], body)}</div><p class="note">{note}</p>'


def _explained(name: str, meaning: str) -> Markup:
    return Markup(f"<strong>{escape(name.replace('_', ' '))}</strong><small>{escape(meaning)}</small>")


def _meanings(browser: Mapping[str, Any]) -> dict[str, str]:
    """The classes of answers that the browser shows, explained."""
    shown = [r for t in browser["trajectories"] for r in (t, *t["continuations"])]
    names = {"correct" if r["correct"] else str(r["reason"]) for r in shown}
    order = [*(r for r in answers.REASONS if r in names), *sorted(names - set(answers.REASONS))]
    return {name: answers.meaning(name) for name in order}


def _summary(content: Content) -> str:
    rows = summary.scores(content.methods)
    if not rows:
        return '<p class="empty">No evaluation has been written yet.</p>' + _runs(content)
    low, high = widened(min(r.low for r in rows), max(r.high for r in rows), LEAST_SPAN / 100, 0.0, 1.0)
    alone = len(content.methods) == 1
    tasks = list(rows[0].tasks)
    samples = rows[0].samples
    paired = next((r.against for r in rows if r.difference is not None), None)
    columns: list[tuple[str, list[Any]]] = [
        ("Updates", [r.step for r in rows]) if alone else ("Method", [r.label for r in rows]),
        (f"Macro Avg@{samples}", [Markup(f'<strong class="num">{100 * r.macro:.1f}</strong>') for r in rows]),
        ("95 % interval", [Markup(_span(r, low, high)) for r in rows]),
    ]
    if paired is not None:
        columns.append((f"Difference to {paired}", [Markup(_difference(r)) for r in rows]))
    columns += [(task, [_percent(r.tasks.get(task)) for r in rows]) for task in tasks]
    columns.append((f"pass@{samples}", [_percent(r.passed) for r in rows]))
    if not alone:
        columns.append(("Updates", [r.step for r in rows]))
    if len({r.seeds for r in rows}) > 1:
        columns.append(("Seeds", [r.seeds for r in rows]))
    body = list(zip(*(cells for _, cells in columns), strict=True))
    note = f"Shares in percent. {_resampled(rows)}"
    note += f'<span class="spans">The lines span {100 * low:.0f} to {100 * high:.0f} %.</span>'
    inner = table([name for name, _ in columns], body)
    return f'<div class="scores">{inner}</div><p class="note">{note}</p>{_runs(content)}'


def _resampled(rows: Sequence[summary.Row]) -> str:
    """How the intervals were made, as far as there are any."""
    units = {row.interval.unit for row in rows if row.interval is not None}
    if not units:
        return ""
    what = "the k draws of every problem" if units == {"sample"} else "the problems"
    pairs = "; differences pair the draws of a seed and problem" if any(row.difference for row in rows) else ""
    return f"Intervals resample {what} (percentile bootstrap, 95\u00a0%), with {EDGE}{pairs}. "


def _difference(row: summary.Row) -> str:
    return "" if row.difference is None else f'<span class="num">{_signed(row.difference)}</span>'


def _percent(value: float | None) -> Markup:
    return Markup("" if value is None else f'<span class="num">{100 * value:.1f}</span>')


def _span(row: summary.Row, low: float, high: float) -> str:
    """An interval on the axis that all rows share, with its numbers."""
    width = max(high - low, 1e-9)
    a, b, dot = (100 * (v - low) / width for v in (row.low, row.high, row.macro))
    text = "" if row.interval is None else f"{100 * row.low:.1f}–{100 * row.high:.1f}"
    return (
        '<span class="span"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="axis" d="M0 5H100"/><path class="bar" d="M{a:.1f} 5H{b:.1f}"/>'
        f'<path class="dot" d="M{dot:.1f} 1V9"/></svg><span class="num">{text}</span></span>'
    )


def _runs(content: Content) -> str:
    rows = [
        [m.label, seed, f"{run.completed} of {run.recipe.run.cycles}", len(run.warnings), str(run.folder)]
        for m in content.methods
        for seed, run in m.runs.items()
    ]
    inner = table(["Method", "Seed", "Cycles", "Warnings", "Folder"], rows)
    return f'<details class="data"><summary>Runs ({len(rows)})</summary>{inner}</details>'


def _warnings(content: Content) -> str:
    if not any(run.warnings for run in content.runs):
        return (
            '<p class="healthy">Nothing to report: no falling scores, no collapse of entropy, no style drift, no '
            "clipping against the gradient, nothing dropped.</p>"
        )
    items = "".join(
        f"<li><strong>{escape(m.label)}, seed {seed}</strong><ul>"
        + "".join(f"<li>{escape(w)}</li>" for w in run.warnings)
        + "</ul></li>"
        for m in content.methods
        for seed, run in m.runs.items()
        if run.warnings
    )
    return f'<ul class="warnings">{items}</ul>'


def _browser(browser: Mapping[str, Any]) -> str:
    notes = "".join(
        f'<p class="notice"><strong>{escape(run["method"])}</strong> {escape(run["note"])}</p>'
        for run in browser["runs"]
        if run["note"]
    )
    if not browser["runs"]:
        return '<p class="empty">Left out: the report was written with --trajectories 0.</p>'
    if not browser["trajectories"]:
        return f'<p class="empty">The trajectory browser is not available.</p>{notes}'
    taught = any("kl" in t for t in browser["trajectories"])
    alone = any("kl" not in t for t in browser["trajectories"])
    colour = (
        "how far the teacher, who reads more than the problem, is from the student at each of the student's own tokens"
    )
    if alone:
        own = "the student's entropy at each of its tokens"
        colour = f"{colour}; {own}, where a method has no teacher" if taught else own
    readers = "student and teacher as they were" if taught else "the student as it was"
    return (
        f'<p class="note intro">Attempts that the student sampled in training, read again by {readers} at that '
        f"boundary. Colour: {escape(colour)}. One run of each method.</p>{notes}{BROWSER}{_classes(browser)}"
    )


def _classes(browser: Mapping[str, Any]) -> str:
    """The legend of the badges."""
    items = "".join(
        f'<dt><span class="badge {"yes" if name == "correct" else "no"}">{escape(name.replace("_", " "))}</span></dt>'
        f"<dd>{escape(text)}</dd>"
        for name, text in _meanings(browser).items()
    )
    return f'<dl class="meanings">{items}</dl>'


def _recipe(content: Content) -> str:
    changed = summary.differences(content.methods)
    labels = [m.label for m in content.methods]
    parts = []
    if len(content.runs) > 1:
        body = [[key, *values] for key, values in changed.items()]
        parts.append("<h3>What differs</h3>" + table(["Setting", *labels], body) if body else "<p>Nothing differs.</p>")
    for method in content.methods:
        toml = _toml(config.to_toml(method.recipe))
        opened = " open" if len(content.methods) == 1 else ""
        title = f"{escape(method.label)} <code>{escape(method.recipe.name)}</code>"
        parts.append(f'<details class="toml"{opened}><summary>{title}</summary><pre>{toml}</pre></details>')
    return "".join(parts)


def _toml(text: str) -> str:
    def line(raw: str) -> str:
        kind = "c" if raw.startswith("#") else "h" if raw.startswith("[") else ""
        return f'<span class="{kind}">{escape(raw)}</span>' if kind else escape(raw)

    return "\n".join(map(line, text.splitlines()))
