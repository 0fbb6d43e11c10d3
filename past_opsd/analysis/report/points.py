"""Trade-offs: labelled points of methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from past_opsd.analysis.report.style import FG, LEAST_SPAN, Look, Spot, shortened, widened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS = 10


@dataclass(frozen=True)
class Point:
    """A method in a trade-off."""

    label: str
    look: Look
    x: float
    y: float


def draw_points(ax: Axes, points: Sequence[Point], x: str, y: str) -> list[Spot]:
    """Points with labels where they cover least, with a legend where there are too many; y is in percent.

    The horizontal axis begins at zero and is logarithmic over a wide range.
    """
    named = len(points) <= MOST_LABELS
    for point in points:
        label = "" if named else point.label
        look = point.look
        mark: dict[str, Any] = {"marker": look.marker, "ms": 6, "color": look.colour, "zorder": look.layer}
        ax.plot([point.x], [point.y], ls="", label=label, **mark)
    positions = [point.x for point in points]
    if min(positions) > 0 and max(positions) > 8 * min(positions):
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.margins(0.16)
    else:
        ax.set_xlim(min(0.0, 1.1 * min(positions)), 1.16 * max(positions) if max(positions) > 0 else 1.0)
        ax.margins(y=0.16)
    ax.set_ylim(widened(*ax.get_ylim(), LEAST_SPAN, 0.0, 100.0))
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    for point, (dx, dy, anchor) in zip(points, _places(ax, points), strict=True) if named else ():
        arrow = {"arrowstyle": "-", "color": FG, "lw": 0.5, "alpha": 0.5} if dx * dx + dy * dy > 150 else None
        place: Any = {"textcoords": "offset points", "ha": anchor, "va": "center", "arrowprops": arrow}
        ax.annotate(shortened(point.label), (point.x, point.y), (dx, dy), zorder=5, **place)
    return [
        Spot(p.label, [(y, p.look.colour, f"{p.y:.1f}"), (x, "", f"{p.x:.4g}")], [(p.x, p.y)], "point") for p in points
    ]


def _places(ax: Axes, points: Sequence[Point]) -> list[tuple[float, float, str]]:
    """Offsets in points for every label: of a few places around a point, the one that overlaps least.

    Text widths are estimated, so that no renderer is needed and the result is the same everywhere.
    """
    ax.autoscale_view()
    box = ax.get_window_extent()
    unit = 72.0 / ax.get_figure(root=True).dpi  # pyright: ignore[reportOptionalMemberAccess]
    width, height = box.width * unit, box.height * unit
    corner = ax.transAxes.transform((0.0, 0.0))
    spots = [(ax.transData.transform((p.x, p.y)) - corner) * unit for p in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in spots]
    chosen: list[tuple[float, float, str]] = []
    for point, (x, y) in zip(points, spots, strict=True):
        size = 5.6 * len(shortened(point.label)) + 2
        best: tuple[float, tuple[float, float, str], tuple[float, float, float, float]] | None = None
        for rank, (dx, dy, anchor) in enumerate(_AROUND):
            start = x + dx - {"left": 0.0, "right": size, "center": size / 2}[anchor]
            rect = (start, y + dy - 7, start + size, y + dy + 7)
            outside = max(0.0, -rect[0]) + max(0.0, rect[2] - width) + max(0.0, -rect[1]) + max(0.0, rect[3] - height)
            cost = sum(_overlap(rect, other) for other in taken) + 20 * outside + 0.5 * rank
            if best is None or cost < best[0]:
                best = (cost, (dx, dy, anchor), rect)
        assert best is not None
        chosen.append(best[1])
        taken.append(best[2])
    return chosen


_AROUND: tuple[tuple[float, float, str], ...] = tuple(
    (dx * r, dy * r, anchor)
    for r in (1.0, 1.7, 2.6, 3.6, 5.0, 6.6, 8.4)
    for dx, dy, anchor in (
        (7, 0, "left"),
        (-7, 0, "right"),
        (0, 10, "center"),
        (0, -10, "center"),
        (6, 8, "left"),
        (-6, 8, "right"),
        (6, -8, "left"),
        (-6, -8, "right"),
    )
)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
