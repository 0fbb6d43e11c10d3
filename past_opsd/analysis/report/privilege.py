"""How much of the teacher's change can reach a student that sees only the prefix, from the records of `past shift`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from past_opsd.analysis.report.data import Method
from past_opsd.analysis.report.panels import WIDTH, Figure, Panel
from past_opsd.analysis.report.style import (
    FG,
    STUDENT,
    TEACHER,
    Look,
    Quantity,
    Spot,
    bar_height,
    draw_stacks,
    fit,
    looks,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAYS, REACHES = "stays privileged", "reaches the student"
_COLOURS = (TEACHER, STUDENT)


@dataclass(frozen=True)
class Measurement:
    """One run's record at one boundary."""

    label: str
    look: Look
    seed: int
    step: int
    estimates: dict[str, dict[str, float] | None]


def decomposition(methods: Sequence[Method]) -> Figure | None:
    """[fig:past-intro] with a run's own numbers."""
    by_name = looks(methods)
    found = [
        Measurement(m.label, by_name[m.name], seed, step, record["estimates"])
        for m in methods
        for seed, run in m.runs.items()
        for step, record in sorted(run.shifts.items())
    ]
    if not found:
        return None
    legend = len(methods) > 1
    shares = Quantity("Part of the change", "share", floor=None)
    value = Quantity("Change of success", "points")
    fraction, change = (
        "How much of the teacher's change a prefix-only student can take over; lines are 95 % intervals over problems.",
        "Change of the frozen student's success when it follows the mean teacher for one token; lines are 95 % "
        "intervals over problems.",
    )
    panels = [
        _parts(found, legend),
        _intervals(found, "surviving", "Surviving fraction", shares, legend, fraction),
        _intervals(found, "value", "Value shift", value, legend, change),
    ]
    caption = "What a student that sees only the prefix can learn from the teacher's change; made by 'past shift RUN'."
    title = "What of the hindsight reaches the student"
    panels = [panel for panel in panels if panel is not None]
    return Figure("privilege-decomposition", "fig:past-intro", title, caption, panels, "privilege") if panels else None


def _parts(found: Sequence[Measurement], legend: bool) -> Panel | None:
    """[eq:privilege-shift-decomposition] as stacked bars, means over seeds."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for m in found:
        if m.estimates["privileged"] is not None and m.estimates["shift"] is not None:
            groups.setdefault((m.label, m.step), []).append(m.estimates)
    if not groups:
        return None
    labels = [f"{label}, {step}" if legend else f"after {step}" for label, step in groups]
    means = [
        [fmean(e[name]["estimate"] for e in group) for name in ("privileged", "shift")] for group in groups.values()
    ]
    # The corrected estimate of a small part may fall below zero; a bar has no such side, the table shows it.
    parts = {name: [max(0.0, row[i]) for row in means] for i, name in enumerate((STAYS, REACHES))}
    rows = [
        [label, str(step), f"{privileged:.4g}", f"{shift:.4g}"]
        for (label, step), (privileged, shift) in zip(groups, means, strict=True)
    ]
    draw = partial(draw_stacks, labels=labels, parts=parts, x="nats a token", form="{:.3g}", colours=_COLOURS)
    header = ["Method", "cycles", f"{STAYS} (nats)", f"{REACHES} (nats)"]
    size = (WIDTH, max(2.2, bar_height(len(labels))))
    note = (
        "KL(teacher || student) at student prefixes, split into what depends on privilege that the prefix does not "
        "show and what the prefix carries"
    )
    note += ", means over seeds." if any(len(group) > 1 for group in groups.values()) else "."
    return Panel("privilege-decomposition-parts", "The teacher's change by part", draw, (header, rows), note, size)


def _intervals(
    found: Sequence[Measurement], name: str, title: str, quantity: Quantity, legend: bool, note: str
) -> Panel | None:
    """An estimate over boundaries with its interval, one run beside the other."""
    series: dict[tuple[str, int], list[Measurement]] = {}
    for m in found:
        if m.estimates[name] is not None:
            series.setdefault((m.label, m.seed), []).append(m)
    if not series:
        return None
    rows = [
        [m.label, str(m.seed), str(m.step), *(quantity.text(v) for v in _ends(m, name))]
        for group in series.values()
        for m in group
    ]
    header = ["Method", "seed", "cycles", title + quantity.unit, "low", "high"]
    draw = partial(_draw, series=list(series.values()), name=name, quantity=quantity, legend=legend)
    return Panel(f"privilege-decomposition-{name}", title, draw, (header, rows), note)


def _ends(m: Measurement, name: str) -> tuple[float, float, float]:
    value = m.estimates[name]
    assert value is not None
    return value["estimate"], value["low"], value["high"]


def _draw(ax: Axes, series: Sequence[Sequence[Measurement]], name: str, quantity: Quantity, legend: bool) -> list[Spot]:
    span = max(m.step for group in series for m in group) - min(m.step for group in series for m in group)
    pitch = 0.018 * (span or 10)
    seen: set[str] = set()
    spots: list[Spot] = []
    for i, group in enumerate(series):
        shift = (i - (len(series) - 1) / 2) * pitch
        colour, label = group[0].look.colour, group[0].label
        xs = [m.step + shift for m in group]
        values = [[quantity.scale * v for v in _ends(m, name)] for m in group]
        for m, x, (middle, low, high) in zip(group, xs, values, strict=True):
            ax.plot([x, x], [low, high], color=colour, lw=1.2, zorder=2.5)
            said = "{} [{}, {}]".format(*map(quantity.text, _ends(m, name)))
            title = f"{label}, seed {m.seed}, after {m.step} cycles"
            spots.append(Spot(title, [(quantity.label, colour, quantity.said(said))], [(x, middle)], "point"))
        text = label if legend and label not in seen else ""
        seen.add(label)
        ax.plot(
            xs,
            [v[0] for v in values],
            color=colour,
            marker=group[0].look.marker,
            lw=1,
            label=text,
            zorder=group[0].look.layer,
        )
    ax.axhline(0, color=FG, lw=0.7, zorder=1)
    ax.margins(x=0.08)
    ax.set_xlabel("cycles done")
    ax.set_ylabel(quantity.label + quantity.unit)
    whole_numbers(ax)
    fit(ax, quantity)
    return spots
