"""Colours, line styles and the few kinds of plots that the figures are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from past_opsd.analysis.report import data
from past_opsd.analysis.report.data import Band, Method, Traces
from past_opsd.core import config

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FG, GRID, SURFACE = "#1f2328", "#d8dee4", "#fefefe"
# A hue is a method and nothing else. Told apart in the common colour deficiencies and on white and dark alike.
SERIES = ("#1556a8", "#d8690b", "#168486", "#a01c7f", "#5f6a00", "#2a93d8", "#65340f")
OTHER = "#70757d"  # methods beyond these, told apart by marker and dash
# Roles are muted: what the student does is slate, what the teacher does is sand, each dark and light.
STUDENT, STUDENT_SOFT = "#3f4b60", "#97a1b3"
TEACHER, TEACHER_SOFT = "#8c7355", "#c8b69e"
NEUTRAL, NEUTRAL_SOFT = "#b9bdc3", "#dcdee1"
GOOD, BAD = "#17734a", "#b42318"
# Drawn colour -> CSS variable of the page.
THEME = {
    FG: "fg",
    GRID: "grid",
    SURFACE: "surface",
    **{colour: f"c{i}" for i, colour in enumerate(SERIES)},
    OTHER: "other",
    STUDENT: "student",
    STUDENT_SOFT: "student-soft",
    TEACHER: "teacher",
    TEACHER_SOFT: "teacher-soft",
    NEUTRAL: "neutral",
    NEUTRAL_SOFT: "neutral-soft",
    GOOD: "good",
    BAD: "bad",
}
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (7, 2)))
_MARKERS = "osD^vPX<>pH*hd8"

MOST_LINES = len(SERIES) + len(_DASHES)
MOST_BANDS = 5
MOST_RAW = 3
MOST_MARKS = 12
MOST_ROWS = 200
LEAST_SPAN = 10.0  # percent or points that an axis shows at least, so that noise does not look like a trend
LEAST_TOP = 1e-3

RC: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FG,
    "axes.labelcolor": FG,
    "axes.titlecolor": FG,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "white",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.color": FG,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "legend.borderpad": 0.1,
    "legend.labelspacing": 0.25,
    "legend.labelcolor": FG,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "patch.edgecolor": FG,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "text.color": FG,
    "text.parse_math": False,
    "xtick.color": FG,
    "xtick.labelsize": 9,
    "ytick.color": FG,
    "ytick.labelsize": 9,
}


@dataclass(frozen=True)
class Look:
    """How a method is drawn, in every panel alike; the first rank lies on top."""

    colour: str
    dash: Any
    marker: str
    rank: int

    @property
    def layer(self) -> float:
        return 4 - self.rank / 1000


@dataclass(frozen=True)
class Line:
    """A method's quantity over cycles."""

    label: str
    look: Look
    traces: Traces


@dataclass(frozen=True)
class Spot:
    """What a pointer finds at a place: a heading, and rows of a label, a colour and a value.

    `places` are in data coordinates: the marks of a column above one x, one point, or two corners of an area.
    """

    title: str
    rows: list[tuple[str, str, str]]
    places: list[tuple[float, float]]
    kind: Literal["column", "point", "area"]


def looks(methods: Sequence[Method]) -> dict[str, Look]:
    """Method name -> look; PAST takes the first colour, the others theirs in order, and grey when none is left."""
    found: dict[str, Look] = {}
    for i, method in enumerate(sorted(methods, key=lambda m: not leads(m))):
        marker = _MARKERS[i % len(_MARKERS)]
        late = i - len(SERIES)
        colour = SERIES[i] if late < 0 else OTHER
        dash = _DASHES[late % len(_DASHES)] if late >= 0 else _DASHES[i // 4]
        found[method.name] = Look(colour, dash, marker, i)
    return found


def leads(method: Method) -> bool:
    """Whether this is the method that a page is about, not a baseline or, by the recipe's name, an ablation."""
    recipe = method.recipe
    return config.ask_method(recipe).headline and recipe.name.rpartition("/")[2] == recipe.method.name


def lines_of(methods: Sequence[Method], traces: Callable[[Method], Traces]) -> list[Line]:
    """A line for every method that has the quantity."""
    by_name = looks(methods)
    found = [(m, traces(m)) for m in methods]
    return [Line(m.label, by_name[m.name], values) for m, values in found if values]


@dataclass(frozen=True)
class Quantity:
    """What an axis shows; shares are drawn and written in percent."""

    label: str
    kind: str = "number"  # "number", "share" or "points"
    floor: float | None = 0.0
    log: bool = False

    def text(self, value: float) -> str:
        """A table's cell."""
        if self.kind == "share":
            return f"{100 * value:.1f}"
        return f"{100 * value:+.1f}" if self.kind == "points" else f"{value:.4g}"

    @property
    def scale(self) -> float:
        return 1.0 if self.kind == "number" else 100.0

    @property
    def unit(self) -> str:
        return {"share": " (%)", "points": " (points)", "number": ""}[self.kind]

    def said(self, text: str) -> str:
        """A value as a pointer finds it."""
        return text + {"share": " %", "points": " points", "number": ""}[self.kind]


def half_window(lines: Sequence[Line]) -> int:
    """Cycles on either side of the moving mean: a twentieth of the longest trace, none below ten cycles."""
    longest = max(len(values) for line in lines for values in line.traces.values())
    return longest // 20 if longest >= 10 else 0


def has_bands(lines: Sequence[Line], quantity: Quantity) -> bool:
    """Whether the lines are few enough for their bands; on a logarithmic axis a band is wide."""
    return len(lines) <= (2 if quantity.log else MOST_BANDS)


def draw_lines(
    ax: Axes,
    lines: Sequence[Line],
    quantity: Quantity,
    *,
    x: str = "",
    half: int = 0,
    steps: bool = False,
    level: float | None = None,
    legend: bool = True,
) -> list[Spot]:
    """Seed means as lines, seed ranges as bands or, with many lines, as bars; `half` is that of a moving mean.

    `level` is a dashed line across, always in view. More than `MOST_LINES` lines: the others thin and grey behind.
    """
    bands, raw = has_bands(lines, quantity), half > 0 and len(lines) <= MOST_RAW
    for i, line in enumerate(lines):
        shown = _shown(line, quantity, half)
        if i >= MOST_LINES:
            ax.plot(shown.x, shown.mean, color=OTHER, alpha=0.5, lw=0.7, zorder=1.5)
            continue
        colour = line.look.colour
        kind: dict[str, Any] = {"drawstyle": "steps-mid"} if steps else {}
        kind |= {"zorder": line.look.layer, "label": line.label if legend else None}
        marker = line.look.marker if len(shown.x) <= MOST_MARKS else ""
        if raw:
            rough = scaled(data.band(line.traces), quantity.scale)
            ax.plot(rough.x, rough.mean, color=colour, alpha=0.35, lw=0.7, zorder=2)
        if bands and len(shown.seeds) > 1:
            edge: dict[str, Any] = {"step": "mid"} if steps else {}
            ax.fill_between(shown.x, shown.low, shown.high, color=colour, alpha=0.15, lw=0, zorder=1.8, **edge)
        if not bands and not quantity.log and marker:
            ax.vlines(shown.x, shown.low, shown.high, color=colour, lw=0.9, alpha=0.6, zorder=1.8)
        ax.plot(shown.x, shown.mean, color=colour, ls=line.look.dash, marker=marker, **kind)
    if level is not None:
        ax.axhline(level * quantity.scale, color=FG, lw=0.8, ls=(0, (3, 2)), zorder=1.6)
    _finish(ax, quantity)
    return _line_spots(lines[:MOST_LINES], quantity, x, half, legend)


def _shown(line: Line, quantity: Quantity, half: int) -> Band:
    """What is drawn of a line, in the axis's units."""
    return scaled(data.band(data.smooth(line.traces, half) if half else line.traces), quantity.scale)


def _line_spots(lines: Sequence[Line], quantity: Quantity, x: str, half: int, legend: bool) -> list[Spot]:
    """Every x with the values of all lines there, as in the table, and those of the moving mean."""
    cells = [_by_x(data.band(line.traces)) for line in lines]
    marks = [dict(zip(b.x, b.mean, strict=True)) for b in (_shown(line, quantity, half) for line in lines)]
    found: list[Spot] = []
    for at in _thinned(sorted({value for column in marks for value in column})):
        rows, places = list[tuple[str, str, str]](), list[tuple[float, float]]()
        for line, values, drawn in zip(lines, cells, marks, strict=True):
            if at not in drawn:
                continue
            parts = [quantity.said(spread(values[at], quantity))] if at in values else []
            parts += [f"moving mean {quantity.said(quantity.text(drawn[at] / quantity.scale))}"] if half else []
            rows.append((line.label if legend else quantity.label, line.look.colour, ", ".join(parts)))
            places.append((float(at), drawn[at]))
        found.append(Spot(f"{x} {at}".strip(), rows, places, "column"))
    return found


def _finish(ax: Axes, quantity: Quantity) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_ylabel(quantity.label + quantity.unit)
    steps = [1, 2, 2.5, 5, 10]
    if not quantity.log:
        ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=steps))
    if quantity.kind == "points":
        ax.axhline(0, color=FG, lw=0.7, zorder=1)
    whole_numbers(ax)
    fit(ax, quantity)


def whole_numbers(ax: Axes) -> None:
    """The horizontal axis counts cycles or positions; a single one stands in the middle."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    low, high = ax.get_xlim()
    if high - low < 1:
        ax.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)


def fit(ax: Axes, quantity: Quantity) -> None:
    """Vertical limits that do not magnify: from zero where there is one, and never less than a sensible span."""
    from matplotlib.ticker import NullFormatter

    if quantity.log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
        low, high = ax.get_ylim()
        if high < 10 * low:  # a decade at least
            middle = math.sqrt(low * high)
            ax.set_ylim(middle / math.sqrt(10), middle * math.sqrt(10))
        return
    low, high = ax.get_ylim()
    if quantity.kind == "number" or (quantity.floor is not None and quantity.kind == "share"):
        floor = quantity.floor or 0.0
        least = LEAST_SPAN if quantity.kind == "share" else LEAST_TOP
        ax.set_ylim(floor, max(1.04 * high, floor + least))
    else:
        share = quantity.kind == "share"
        bounds = (min(0.0, ax.dataLim.y0), max(100.0, ax.dataLim.y1)) if share else (-math.inf, math.inf)
        ax.set_ylim(widened(low, high, LEAST_SPAN, *bounds))


def widened(low: float, high: float, least: float, lowest: float, highest: float) -> tuple[float, float]:
    """The range about its middle, at least `least` wide, moved or cut to stay within bounds."""
    short = max(0.0, least - (high - low))
    low, high = low - short / 2, high + short / 2
    if low < lowest:
        low, high = lowest, max(high, lowest + least)
    if high > highest:
        low, high = min(low, highest - least), highest
    return low, high


def _by_x(band: Band) -> dict[int, tuple[float, float, float]]:
    return dict(zip(band.x, zip(band.mean, band.low, band.high, strict=True), strict=True))


def _thinned(xs: Sequence[int]) -> Sequence[int]:
    return xs[:: -(-len(xs) // MOST_ROWS) or 1]


def scaled(band: Band, factor: float) -> Band:
    """The band in an axis's units."""
    if factor == 1.0:
        return band
    mean, low, high = ([factor * v for v in values] for values in (band.mean, band.low, band.high))
    return Band(band.x, mean, low, high, band.seeds)


def line_table(lines: Sequence[Line], quantity: Quantity, x: str) -> tuple[list[str], list[list[str]]]:
    """One row a cycle or boundary, one column a method: the mean and, over several seeds, the range."""
    cells = [_by_x(data.band(line.traces)) for line in lines]
    xs = _thinned(sorted({value for column in cells for value in column}))
    rows = [[str(v), *(spread(column.get(v), quantity) for column in cells)] for v in xs]
    return [x, *(line.label + quantity.unit for line in lines)], rows


def spread(value: tuple[float, float, float] | None, quantity: Quantity) -> str:
    """A cell: mean and range, or an empty one."""
    if value is None:
        return ""
    mean, low, high = (quantity.text(v) for v in value)
    return mean if low == high else f"{mean} ({low} to {high})"


def draw_stacks(
    ax: Axes, labels: Sequence[str], parts: Mapping[str, Sequence[float]], x: str, form: str, colours: Sequence[str]
) -> list[Spot]:
    """Horizontal stacked bars with their totals; `colours` of the parts, of the labels where there is one part."""
    from matplotlib.ticker import MaxNLocator

    places = list(range(len(labels)))
    left = [0.0] * len(labels)
    one = len(parts) == 1
    for i, (part, values) in enumerate(parts.items()):
        colour: Any = list(colours) if one else colours[i]
        look: dict[str, Any] = {"color": colour, "edgecolor": SURFACE, "lw": 0.0 if one else 0.8}
        ax.barh(places, list(values), left=left, height=0.65, label="" if one else part, **look)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, total in zip(places, left, strict=True):
        ax.annotate(form.format(total), (total, place), (3, 0), textcoords="offset points", va="center")
    end = 1.2 * max(left) if max(left) > 0 else 1
    ax.set_yticks(places, [shortened(label) for label in labels])
    ax.set_xlim(0, end)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(x)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    return [
        Spot(label, _stack_rows(i, parts, x, form, colours), [(0.0, i - 0.5), (end, i + 0.5)], "area")
        for i, label in enumerate(labels)
    ]


def _stack_rows(
    i: int, parts: Mapping[str, Sequence[float]], x: str, form: str, colours: Sequence[str]
) -> list[tuple[str, str, str]]:
    one = len(parts) == 1
    rows = [
        (part, colours[i] if one else colours[j], f"{form.format(values[i])} {x}")
        for j, (part, values) in enumerate(parts.items())
    ]
    total = sum(values[i] for values in parts.values())
    return rows if one else [*rows, ("total", "", f"{form.format(total)} {x}")]


def shortened(label: str, most: int = 26) -> str:
    """A label that leaves room for what it names: the middle of a long one is left out."""
    return label if len(label) <= most else f"{label[: most // 2 - 1]}…{label[-(most // 2) :]}"


def bar_height(count: int) -> float:
    """Inches for a chart of that many horizontal bars."""
    return max(1.5, 0.75 + 0.24 * count)
