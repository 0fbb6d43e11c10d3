"""Colours, line styles and the few kinds of plots that the figures are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from past_opsd.report import data
from past_opsd.report.data import Band, Method, Traces

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FG, GRID = "#1f2328", "#d8dee4"
# Told apart under the common colour deficiencies and on white and dark alike (after Okabe and Ito, and Tol).
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#882255", "#999933")
# Drawn colour -> CSS variable of the page.
THEME = {FG: "fg", GRID: "grid"} | {colour: f"c{i}" for i, colour in enumerate(SERIES)}
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)))
_MARKERS = "osD^vPX<"

MOST_LINES = 9
MOST_BANDS = 5
MOST_RAW = 3
MOST_MARKS = 12
MOST_ROWS = 200

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
    """A method's quantity over cycles or updates."""

    label: str
    look: Look
    traces: Traces


def looks(methods: Sequence[Method]) -> dict[str, Look]:
    """Method name -> look; PAST takes the first colour, the others theirs in order."""
    colours = (*SERIES, FG)
    found: dict[str, Look] = {}
    for i, method in enumerate(sorted(methods, key=lambda m: not is_past(m))):
        turn = i // len(colours)
        marker = _MARKERS[(i + turn) % len(_MARKERS)]
        found[method.name] = Look(colours[i % len(colours)], _DASHES[turn % len(_DASHES)], marker, i)
    return found


def is_past(method: Method) -> bool:
    """Whether this is the paper's full method, not a baseline or an ablation."""
    return method.recipe.name.rpartition("/")[2] == "past"


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


def half_window(lines: Sequence[Line]) -> int:
    """Cycles on either side of the moving mean: a twentieth of the longest trace, none below ten cycles."""
    longest = max(len(values) for line in lines for values in line.traces.values())
    return longest // 20 if longest >= 10 else 0


def has_bands(lines: Sequence[Line], quantity: Quantity) -> bool:
    """Whether the lines are few enough for their bands; on a logarithmic axis a band is wide."""
    return len(lines) <= (2 if quantity.log else MOST_BANDS)


def draw_lines(ax: Axes, lines: Sequence[Line], quantity: Quantity, *, half: int = 0, steps: bool = False) -> None:
    """Seed means as lines, seed ranges as bands or, with many lines, as bars; `half` is that of a moving mean.

    More than `MOST_LINES` lines: the first ones in colour, the others in grey behind.
    """
    bands, raw = has_bands(lines, quantity), half > 0 and len(lines) <= MOST_RAW
    for i, line in enumerate(lines):
        shown = scaled(data.band(data.smooth(line.traces, half) if half else line.traces), quantity.scale)
        if i >= MOST_LINES:
            ax.plot(shown.x, shown.mean, color=FG, alpha=0.25, lw=0.8, zorder=1.5)
            continue
        colour = line.look.colour
        kind: dict[str, Any] = {"drawstyle": "steps-mid"} if steps else {}
        kind |= {"zorder": line.look.layer}
        marker = line.look.marker if len(shown.x) <= MOST_MARKS else ""
        if raw:
            rough = scaled(data.band(line.traces), quantity.scale)
            ax.plot(rough.x, rough.mean, color=colour, alpha=0.35, lw=0.7, zorder=2)
        if bands and len(shown.seeds) > 1:
            edge: dict[str, Any] = {"step": "mid"} if steps else {}
            ax.fill_between(shown.x, shown.low, shown.high, color=colour, alpha=0.15, lw=0, zorder=1.8, **edge)
        if not bands and not quantity.log and marker:
            ax.vlines(shown.x, shown.low, shown.high, color=colour, lw=0.9, alpha=0.6, zorder=1.8)
        ax.plot(shown.x, shown.mean, color=colour, ls=line.look.dash, marker=marker, label=line.label, **kind)
    _finish(ax, quantity)


def _finish(ax: Axes, quantity: Quantity) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    ax.set_ylabel(quantity.label + quantity.unit)
    steps = [1, 2, 2.5, 5, 10]
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1, steps=steps))
    if quantity.log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
        return
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=steps))
    if quantity.kind == "points":
        ax.axhline(0, color=FG, lw=0.7, zorder=1)
    elif quantity.floor is not None:
        top = max(ax.get_ylim()[1], quantity.floor + 1e-3)
        ax.set_ylim(quantity.floor, 1.04 * top)


def scaled(band: Band, factor: float) -> Band:
    """The band in an axis's units."""
    if factor == 1.0:
        return band
    mean, low, high = ([factor * v for v in values] for values in (band.mean, band.low, band.high))
    return Band(band.x, mean, low, high, band.seeds)


def line_table(lines: Sequence[Line], quantity: Quantity, x: str) -> tuple[list[str], list[list[str]]]:
    """One row a cycle or boundary, one column a method: the mean and, over several seeds, the range."""
    bands = [data.band(line.traces) for line in lines]
    xs = sorted({value for band in bands for value in band.x})
    stride = -(-len(xs) // MOST_ROWS)
    cells = [dict(zip(b.x, zip(b.mean, b.low, b.high, strict=True), strict=True)) for b in bands]
    rows = [[str(v), *(spread(column.get(v), quantity) for column in cells)] for v in xs[::stride]]
    return [x, *(line.label + quantity.unit for line in lines)], rows


def spread(value: tuple[float, float, float] | None, quantity: Quantity) -> str:
    """A cell: mean and range, or an empty one."""
    if value is None:
        return ""
    mean, low, high = (quantity.text(v) for v in value)
    return mean if low == high else f"{mean} ({low} to {high})"


def draw_stacks(
    ax: Axes, labels: Sequence[str], parts: Mapping[str, Sequence[float]], x: str, form: str, colours: Sequence[str]
) -> None:
    """Horizontal stacked bars with their totals; `colours` of the parts, of the labels where there is one part."""
    from matplotlib.ticker import MaxNLocator

    places = list(range(len(labels)))
    left = [0.0] * len(labels)
    for i, (part, values) in enumerate(parts.items()):
        one = len(parts) == 1
        colour: Any = list(colours) if one else colours[i % len(colours)]
        ax.barh(places, list(values), left=left, height=0.65, color=colour, label="" if one else part, lw=0)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, total in zip(places, left, strict=True):
        ax.annotate(form.format(total), (total, place), (3, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, labels)
    ax.set_xlim(0, 1.2 * max(left) if max(left) > 0 else 1)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(x)
    ax.set_ylim(len(labels) - 0.5, -0.5)


def bar_height(count: int) -> float:
    """Inches for a chart of that many horizontal bars."""
    return max(1.5, 0.75 + 0.24 * count)
