"""[fig:past-method]: one cycle as boxes and arrows, with a run's own totals in the boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from past_opsd.analysis.report import data
from past_opsd.analysis.report.data import Method, Traces
from past_opsd.analysis.report.learning import samples_text
from past_opsd.analysis.report.panels import Figure, Panel
from past_opsd.analysis.report.style import BAD, FG, GOOD, STUDENT, TEACHER, Spot, leads
from past_opsd.analysis.report.teaching import adapting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (4.2, 5.06)
_LEFT, _RIGHT = 0.35, 4.14
_FAILED = (
    "teacher continuations",
    "continuations verified",
    "groups mixed",
    "groups skipped",
    "KL to the student",
)
_DISTILLED = ("student steps", "distillation KL")


@dataclass(frozen=True)
class Box:
    """Place in inches, colour, heading, lines, and the totals that belong to it."""

    x: float
    width: float
    y: float
    height: float
    colour: str
    title: str
    lines: tuple[str, ...]
    about: tuple[str, ...]


def method(methods: Sequence[Method]) -> Figure | None:
    """The cycle of the first method that adapts its teacher, PAST before its ablations."""
    found = sorted((m for m in adapting(methods) if data.measured(m) is not None), key=lambda m: not leads(m))
    if not found:
        return None
    chosen = found[0]
    totals = _totals(chosen)
    rows = [[name, value] for name, value in totals.items()]
    panel = Panel(
        "past-method-cycle",
        chosen.label,
        partial(_draw, totals=totals),
        (["Quantity", chosen.label], rows),
        size=_SIZE,
    )
    seeds = f", means over {len(chosen.runs)} seeds" if len(chosen.runs) > 1 else ""
    caption = (
        f"One cycle: the verifier routes complete student responses to {_branches(totals)} one privileged teacher, "
        f"which is then distilled on the student's own prefixes. Numbers are totals of {chosen.label}{seeds}"
    )
    caption += "; arrows go from the first to the last fifth of the cycles." if "→" in str(totals) else "."
    return Figure("past-method", "fig:past-method", "The cycle with its totals", caption, [panel], "cycle")


def _branches(totals: dict[str, str]) -> str:
    used = {"correct": "correct-branch KL" in totals, "failed": "teacher continuations" in totals}
    names = [name for name, there in used.items() if there]
    return f"the {names[0]} branch, which adapts" if len(names) == 1 else "two branches that adapt"


def _totals(method: Method) -> dict[str, str]:
    """What a box says, by name; what a recipe does not record is not there."""
    row = data.measured(method)
    assert row is not None  # the others were left out
    out: dict[str, str] = {}

    def put(name: str, value: float | None, form: str) -> None:
        if value is not None:
            out[name] = form.format(value)

    put("cycles", fmean(run.completed for run in method.runs.values()), "{:g}")
    put("student responses", row.costs["student_samples"], "{:,.0f}")
    put("responses verified", _percent(_mean(data.trace(method, "rollout/success"))), "{:.0f} %")
    put("teacher steps", _sum(data.trace(method, "teacher/stepped")), "{:g}")
    put("student steps", row.costs["student_steps"], "{:g}")
    out |= _ends("correct-branch KL", data.trace(method, "teacher/correct/kl"), "{:.2g}")
    if row.costs["teacher_samples"]:
        put("teacher continuations", row.costs["teacher_samples"], "{:,.0f}")
        put("continuations verified", _percent(row.diagnostics.get("teacher_success")), "{:.0f} %")
        put("groups skipped", _percent(row.diagnostics.get("skipped")), "{:.1f} %")
        put("groups mixed", _percent(row.diagnostics.get("mixed")), "{:.0f} %")
        put("KL to the student", row.diagnostics.get("compatibility_kl"), "{:.2g}")
    out |= _ends("distillation KL", data.trace(method, "student/distill/kl"), "{:.2g}")
    scores = data.band(data.scores(method, "macro/avg@k"))
    if scores.x:
        name = f"macro Avg@{samples_text([method])}"
        first, last = 100 * scores.mean[0], 100 * scores.mean[-1]
        out[name] = f"{first:.1f} → {last:.1f} %" if len(scores.x) > 1 else f"{first:.1f} %"
    return out


def _mean(traces: Traces) -> float | None:
    return fmean(fmean(values.values()) for values in traces.values()) if traces else None


def _sum(traces: Traces) -> float | None:
    return fmean(sum(values.values()) for values in traces.values()) if traces else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _ends(name: str, traces: Traces, form: str) -> dict[str, str]:
    """A quantity's mean over the first and the last fifth of its cycles."""
    if not traces:
        return {}
    pairs: list[tuple[float, float]] = []
    for values in traces.values():
        ordered = [values[x] for x in sorted(values)]
        fifth = max(1, len(ordered) // 5)
        pairs.append((fmean(ordered[:fifth]), fmean(ordered[-fifth:])))
    first, last = (form.format(fmean(column)) for column in zip(*pairs, strict=True))
    return {name: f"{first} → {last}"}


def _boxes(totals: dict[str, str]) -> list[Box]:
    def say(form: str, *names: str) -> tuple[str, ...]:
        return (form.format(*(totals[n] for n in names)),) if all(n in totals for n in names) else ()

    score = next((n for n in totals if n.startswith("macro Avg@")), "")
    correct = say("KL {} nats", "correct-branch KL")
    failed = say("{} continuations", "teacher continuations")
    failed += say("{} verified", "continuations verified") + say("{} of groups skipped", "groups skipped")
    failed += say("KL to student {} nats", "KL to the student")
    sampled = say("{} responses to the problem alone", "student responses")
    full = (_LEFT, _RIGHT - _LEFT)
    half = (_RIGHT - _LEFT - 0.16) / 2
    verified = say("{} verified correct", "responses verified")
    steps = say("{} optimizer steps", "teacher steps")
    return [
        Box(*full, 4.4, 0.6, STUDENT, "Student samples", sampled, ("cycles", "student responses")),
        Box(*full, 3.47, 0.6, FG, "Verifier routes", verified, ("responses verified",)),
        Box(_LEFT, half, 2.06, 1.08, GOOD, "Correct: preserve", correct or ("not used",), ("correct-branch KL",)),
        Box(_RIGHT - half, half, 2.06, 1.08, BAD, "Failed: improve", failed or ("not used",), _FAILED),
        Box(*full, 1.13, 0.6, TEACHER, "One teacher adapts", steps, ("teacher steps",)),
        Box(*full, 0.06, 0.74, STUDENT, "Student distills", _last(totals, score), (*_DISTILLED, score)),
    ]


def _last(totals: dict[str, str], score: str) -> tuple[str, ...]:
    lines = (f"KL {totals['distillation KL']} nats, own prefixes",) if "distillation KL" in totals else ()
    return (*lines, f"{score} {totals[score]}") if score else lines


def _draw(ax: Axes, totals: dict[str, str]) -> list[Spot]:
    ax.set_axis_off()
    ax.set_xlim(0, _SIZE[0])
    ax.set_ylim(0, _SIZE[1])
    boxes = _boxes(totals)
    for box in boxes:
        _draw_box(ax, box)
    student, verifier, correct, failed, teacher, distilled = boxes
    for upper, lower, box in (
        (student, verifier, student),
        (verifier, correct, correct),
        (verifier, failed, failed),
        (correct, teacher, correct),
        (failed, teacher, failed),
        (teacher, distilled, teacher),
    ):
        x = box.x + box.width / 2
        _arrow(ax, (x, upper.y), (x, lower.y + lower.height))
    bottom, top = distilled.y + distilled.height / 2, student.y + student.height / 2
    ax.plot([_LEFT, 0.16, 0.16], [bottom, bottom, top], color=FG, lw=1, solid_joinstyle="round")
    _arrow(ax, (0.16, top), (_LEFT, top))
    ax.text(0.06, (bottom + top) / 2, "next cycle", rotation=90, ha="center", va="center")
    return [
        Spot(
            box.title,
            [(name, "", totals[name]) for name in box.about if name in totals],
            [(box.x, box.y + box.height), (box.x + box.width, box.y)],
            "area",
        )
        for box in boxes
    ]


def _draw_box(ax: Axes, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.08", "linewidth": 1.2}
    place = ((box.x, box.y), box.width, box.height)
    ax.add_patch(FancyBboxPatch(*place, facecolor=box.colour, edgecolor="none", alpha=0.12, **shape))
    ax.add_patch(FancyBboxPatch(*place, facecolor="none", edgecolor=box.colour, **shape))
    rows = [box.title, *box.lines]
    for i, text in enumerate(rows):
        y = box.y + box.height / 2 + ((len(rows) - 1) / 2 - i) * 0.19
        weight = "bold" if i == 0 else "normal"
        ax.text(box.x + box.width / 2, y, text, ha="center", va="center", fontweight=weight)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    from matplotlib.patches import FancyArrowPatch

    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=FG, lw=1, shrinkA=0, shrinkB=0))
