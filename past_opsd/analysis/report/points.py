"""Trade-offs: points of methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from past_opsd.analysis.report.style import LEAST_SPAN, Look, Spot, widened

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """A method in a trade-off."""

    label: str
    look: Look
    x: float
    y: float


def draw_points(ax: Axes, points: Sequence[Point], x: str, y: str) -> list[Spot]:
    """Points that the legend names; y is in percent.

    The horizontal axis begins at zero and is logarithmic over a wide range.
    """
    for point in points:
        look = point.look
        mark: dict[str, Any] = {"marker": look.marker, "ms": 6, "color": look.colour, "zorder": look.layer}
        ax.plot([point.x], [point.y], ls="", label=point.label, **mark)
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
    return [
        Spot(p.label, [(y, p.look.colour, f"{p.y:.1f}"), (x, "", f"{p.x:.4g}")], [(p.x, p.y)], "point") for p in points
    ]
