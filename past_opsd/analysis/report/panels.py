"""Panels and figures, and how they become files: themed SVG for the page, plain SVG and PDF for papers.

Panels are drawn in the colours of `style.THEME`; the page's SVG has each of them replaced by a CSS variable. No pyplot:
every figure is an object of its own, and the same records give the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from past_opsd.analysis.report import style
from past_opsd.analysis.report.style import Spot
from past_opsd.core.files import whole
from past_opsd.core.nouns import PastError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Table = tuple[list[str], list[list[str]]]

WIDTH, HEIGHT = 4.2, 3.0
_LEGEND_ROW = 0.18  # inches
_NO_DATE: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Panel:
    """One set of axes, the numbers it shows as a table, and a note on what is drawn; `draw` tells what is where.

    `shows` names the quantity where several figures of the paper have the same panel: a page draws it once.
    """

    name: str
    title: str
    draw: Callable[[Axes], list[Spot]]
    table: Table
    note: str = ""
    size: tuple[float, float] = (WIDTH, HEIGHT)
    shows: str = ""


@dataclass(frozen=True)
class Figure:
    """Panels that belong together; `label` is the paper's, or "" for a figure that the paper does not have."""

    name: str
    label: str
    title: str
    caption: str
    panels: list[Panel]
    section: str


@contextmanager
def _matplotlib(salt: str) -> Generator[None]:
    """The package's own look, whatever the user's settings are; they are back afterwards."""
    try:
        import matplotlib.style
    except ImportError:
        raise PastError("figures need matplotlib: pip install matplotlib") from None
    with matplotlib.style.context(["default", style.RC | {"svg.hashsalt": salt}]):
        yield


def slug(text: str) -> str:
    """A part of a panel's name: what is not a plain letter or digit is replaced, and such names stay distinct."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", text)
    return plain if plain == text else f"{plain}-{hashlib.blake2b(text.encode(), digest_size=3).hexdigest()}"


def _canvas(width: float, height: float) -> Canvas:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _legend(canvas: Canvas, width: float) -> None:
    """One legend below all axes, each label once; the canvas grows so that the axes keep their height."""
    entries: dict[str, Any] = {}
    for ax in canvas.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(style.shortened(label, 40), handle)
    if not entries:
        return
    widest = 0.42 + 0.078 * max(map(len, entries))
    columns = min(len(entries), max(1, int(width / widest)))
    rows = math.ceil(len(entries) / columns)
    columns = math.ceil(len(entries) / rows)
    canvas.set_figheight(canvas.get_figheight() + _LEGEND_ROW * rows + 0.05)
    canvas.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)


def draw(panel: Panel) -> tuple[Canvas, list[Spot]]:
    """The panel alone, without its title, and what is where; only inside the package's look."""
    canvas = _canvas(*panel.size)
    spots = panel.draw(canvas.add_subplot())
    _legend(canvas, panel.size[0])
    return canvas, spots


def svg(panel: Panel) -> str:
    """The panel as an inline SVG: scales with its box, takes text, grid and series colours from CSS variables."""
    buffer = io.StringIO()
    with _matplotlib(panel.name), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's browser has its own fonts
        canvas, spots = draw(panel)
        canvas.savefig(buffer, format="svg", transparent=True, metadata=_NO_DATE)
        hover = _hover(canvas, spots)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for pattern in (r"<style.*?</style>\s*", r"<!--.*?-->\s*", r"<defs>\s*</defs>\s*"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    text = _own_ids(text, panel.name)
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><")
    for colour, variable in style.THEME.items():
        text = re.sub(re.escape(colour), f"var(--{variable}, {colour})", text, flags=re.IGNORECASE)
    return _root(text, panel.title, hover)


def _hover(canvas: Canvas, spots: Sequence[Spot]) -> str:
    """The spots in the units of the SVG as JSON: labels with colours once, then every spot with its rows and marks."""
    (ax,) = canvas.axes
    width, height = (72 * side for side in canvas.get_size_inches())

    def placed(points: Sequence[tuple[float, float]], transform: Any) -> list[list[float]]:
        found = (transform + canvas.transFigure.inverted()).transform(points)
        return [[round(width * float(x), 1), round(height * (1 - float(y)), 1)] for x, y in found]

    keys: dict[tuple[str, str], int] = {}
    plain = []
    for spot in spots:
        rows = [
            [keys.setdefault((label, style.THEME.get(colour, "")), len(keys)), value]
            for label, colour, value in spot.rows
        ]
        plain.append([spot.kind, spot.title, rows, placed(spot.places, ax.transData)])
    found = {"keys": list(keys), "frame": placed([(0.0, 1.0), (1.0, 0.0)], ax.transAxes), "spots": plain}
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


def _own_ids(text: str, name: str) -> str:
    """Only ids that are referred to, each with the panel's name in front: several panels share one document."""
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', text)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)


def _root(text: str, title: str, hover: str) -> str:
    found = re.search(r'viewBox="[^"]+"', text)
    assert found is not None
    look = "stroke-linejoin: round; stroke-linecap: butt; font-family: var(--font, system-ui, sans-serif)"
    label = f"{title}. Arrow keys move between its values."
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {found[0]} width="100%" role="img" tabindex="0" '
        f'aria-label="{escape(label, quote=True)}" data-hover="{escape(hover, quote=True)}" style="{look}">'
    )
    return head + text[text.index(">") + 1 :].strip() + "\n"


def save(figure: Figure, folder: Path) -> list[Path]:
    """The whole figure as `NAME.svg` and `NAME.pdf`: panels side by side, plain colours on white."""
    paths = [folder / f"{figure.name}.svg", folder / f"{figure.name}.pdf"]
    with _matplotlib(figure.name):
        canvas = _sheet(figure.panels)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # arranged once for both files
        with whole(paths[0]) as part:
            canvas.savefig(part, format="svg", metadata=_NO_DATE)
        with whole(paths[1]) as part:
            canvas.savefig(part, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    return paths


def plain_svg(figure: Figure) -> bytes:
    """The whole figure as an SVG file: panels side by side, plain colours on white."""
    buffer = io.BytesIO()
    with _matplotlib(figure.name):
        _sheet(figure.panels).savefig(buffer, format="svg", metadata=_NO_DATE)
    return buffer.getvalue()


def _sheet(panels: Sequence[Panel]) -> Canvas:
    """Up to four panels a row."""
    rows = math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / rows)
    heights = [max(p.size[1] for p in panels[r * columns : (r + 1) * columns]) for r in range(rows)]
    width = sum(max(p.size[0] for p in panels[c::columns]) for c in range(columns))
    scale = 1.0 if columns == 1 else 0.85
    canvas = _canvas(scale * width, scale * sum(heights) + 0.25 * rows)
    grid = canvas.add_gridspec(rows, columns, height_ratios=heights)
    for i, panel in enumerate(panels):
        ax = canvas.add_subplot(grid[divmod(i, columns)])
        panel.draw(ax)
        letter = f"({chr(ord('a') + i)}) " if len(panels) > 1 else ""
        ax.set_title(letter + panel.title, loc="left")
    _legend(canvas, scale * width)
    return canvas
