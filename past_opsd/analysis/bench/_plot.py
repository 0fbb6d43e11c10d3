"""The figure of `past bench scaling`, in the look of the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from past_opsd.analysis.report.style import FG, RC, SERIES
from past_opsd.core.files import whole

if TYPE_CHECKING:
    from past_opsd.analysis.bench.scaling import Point

    Curves = Mapping[str, Sequence[Point]]


def draw(curves: Curves, path: Path) -> None:
    """Time against work on every axis, and memory on the first of them."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", RC | {"svg.hashsalt": "scaling"}]):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _draw_time(left, curves)
        _draw_memory(right, next(iter(curves.values())))
        with whole(path) as part:
            figure.savefig(part, format="svg", metadata={"Date": None})


def _draw_time(ax: Any, curves: Curves) -> None:
    widest = max(own[-1].work / own[0].work for own in curves.values())
    ax.plot([1, widest], [1, widest], color=FG, lw=0.8, ls=(0, (1, 1.2)), label="proportional")
    for (title, own), colour, marker in zip(curves.items(), SERIES, "osD^", strict=False):
        xs, ys = [p.work / own[0].work for p in own], [p.cpu / own[0].cpu for p in own]
        ax.plot(xs, ys, color=colour, marker=marker, label=title)
    ax.set(xscale="log", yscale="log", xlabel="work, times the first", ylabel="CPU time, times the first")
    _plain(ax)


def _draw_memory(ax: Any, points: Sequence[Point]) -> None:
    xs = [point.sizes.response for point in points]
    ax.plot(xs, [p.sizes.dense for p in points], color=FG, lw=0.8, ls=(0, (1, 1.2)), label="dense logits")
    columns = {"step": "step_mib", "step, checkpointing": "checkpointed_mib", "loss alone": "loss_mib"}
    for (label, field), colour, marker in zip(columns.items(), SERIES, "osD", strict=False):
        values = [vars(point)[field] for point in points]
        if None not in values:
            ax.plot(xs, values, color=colour, marker=marker, label=label)
    ax.set(xscale="log", yscale="log", xlabel="response length (tokens)", ylabel="peak memory (MiB)")
    _plain(ax)


def _plain(ax: Any) -> None:
    """Powers of two as they are."""
    from matplotlib.ticker import LogLocator, NullLocator

    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(base=2))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    ax.legend()
