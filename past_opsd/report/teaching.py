"""Figures of the teacher: its use of the trajectory, its training, objectives against each other, and its sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from past_opsd import config
from past_opsd.report import data
from past_opsd.report.data import Method, Traces
from past_opsd.report.learning import CYCLES, curve, samples_text, seeds_text
from past_opsd.report.panels import Figure, Panel
from past_opsd.report.points import Point, draw_points
from past_opsd.report.style import MOST_LINES, Line, Look, Quantity, is_past, lines_of, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CORRECT_KL = ("teacher/correct/kl", "Correct-branch KL", Quantity("KL(student || teacher) (nats)"))
FAILED_SUCCESS = ("failed/success", "Failed-branch success", Quantity("Continuations verified", "share"))
CLIP = ("teacher/correct/clip_fraction", "Clip fraction", Quantity("Clipped entries", "share"))
TEACHER_NORM = ("teacher/grad_norm", "Teacher gradient norm", Quantity("Norm before clipping"))
STUDENT_NORM = ("student/grad_norm", "Student gradient norm", Quantity("Norm before clipping"))
SKIPPED = ("failed/skipped", "Skipped groups", Quantity("Groups without a success", "share"))

CONDITIONS = {"matching": "matching", "removed": "removed", "shuffled": "shuffled"}
PROBED = {
    "success": ("Teacher success", Quantity("Continuations verified", "share", floor=None)),
    "jsd_student": ("JSD to the student", Quantity("JSD (nats)")),
    "kl": ("Compatibility KL", Quantity("KL(teacher || student) (nats)")),
}


def adapting(methods: Sequence[Method]) -> list[Method]:
    """Those whose teacher took a step."""
    return [m for m in methods if any(line.get("teacher/stepped") for r in m.runs.values() for line in r.metrics)]


def _traced(
    methods: Sequence[Method], prefix: str, keys: Sequence[tuple[str, str, Quantity]], some: Sequence[Method]
) -> list[Panel]:
    """A smoothed panel for every metric that one of the methods `some` recorded."""
    panels = []
    chosen = {m.name for m in some}
    for key, title, quantity in keys:
        lines = lines_of(methods, lambda m, key=key: data.trace(m, key) if m.name in chosen else {})
        if lines:
            name = f"{prefix}-{key.replace('/', '-').replace('_', '-')}"
            panels.append(curve(name, title, lines, quantity, x=CYCLES, smooth=True, legend=len(methods) > 1))
    return panels


def mechanism(methods: Sequence[Method]) -> Figure | None:
    """[fig:teacher-mechanism]: the teacher under perturbed trajectories, and both branches over cycles."""
    probed = _probe_panels(methods)
    traced = _traced(methods, "teacher-mechanism", (CORRECT_KL, FAILED_SUCCESS), adapting(methods))
    if not probed and not traced:
        return None
    caption = ""
    if probed:
        caption += (
            "The teacher at the newest probed checkpoint of each run, reading the matching attempt, no attempt, or the "
            "attempt of another problem; bars are 95 % intervals over problems. "
        )
    else:
        caption += "The comparison of matching, removed and shuffled trajectories is made by 'past probe RUN'. "
    if traced:
        caption += f"Correct-branch KL and failed-branch success over cycles. {seeds_text(methods)}"
    title = "Does the teacher use the trajectory, and how does it adapt?"
    return Figure("teacher-mechanism", "fig:teacher-mechanism", title, caption.strip(), [*probed, *traced], "teacher")


def _probe_panels(methods: Sequence[Method]) -> list[Panel]:
    by_name = looks(methods)
    found = [
        (method, seed, run.probes[max(run.probes)])
        for method in methods
        for seed, run in method.runs.items()
        if run.probes
    ]
    panels = []
    for metric, (title, quantity) in PROBED.items():
        rows = [
            (method.label, by_name[method.name], seed, record["step"], _estimates(record, metric))
            for method, seed, record in found
        ]
        rows = [row for row in rows if row[4]]
        if rows:
            header = ["Method", "seed", "step", *(c + quantity.unit for c in CONDITIONS.values())]
            cells = [
                [label, str(seed), str(step), *(_cell(values.get(c), quantity) for c in CONDITIONS)]
                for label, _, seed, step, values in rows
            ]
            draw = partial(_draw_conditions, rows=rows, quantity=quantity, legend=len(methods) > 1)
            panels.append(Panel(f"teacher-mechanism-{metric.replace('_', '-')}", title, draw, (header, cells)))
    return panels


def _estimates(record: dict[str, Any], metric: str) -> dict[str, dict[str, Any]]:
    values = {c: record["conditions"][c]["all"][metric] for c in CONDITIONS}
    return {c: value for c, value in values.items() if value is not None}


def _cell(value: dict[str, Any] | None, quantity: Quantity) -> str:
    if value is None:
        return ""
    text = quantity.text(value["estimate"])
    return text if value["low"] is None else f"{text} [{quantity.text(value['low'])}, {quantity.text(value['high'])}]"


def _draw_conditions(
    ax: Axes, rows: Sequence[tuple[str, Look, int, int, dict[str, Any]]], quantity: Quantity, legend: bool
) -> None:
    """A point with its interval for every run, side by side under each condition."""
    pitch = min(0.16, 0.7 / len(rows))
    seen: set[str] = set()
    for i, (label, look, _, _, values) in enumerate(rows):
        shift = (i - (len(rows) - 1) / 2) * pitch
        for j, condition in enumerate(CONDITIONS):
            if condition not in values:
                continue
            value = values[condition]
            x, y = j + shift, value["estimate"] * quantity.scale
            if value["low"] is not None:
                ends = [value["low"] * quantity.scale, value["high"] * quantity.scale]
                ax.plot([x, x], ends, color=look.colour, lw=1.4, zorder=2.5)
            name = label if legend and label not in seen else ""
            seen.add(label)
            ax.plot([x], [y], ls="", marker=look.marker, ms=5, color=look.colour, label=name or None, zorder=3)
    ax.set_xticks(range(len(CONDITIONS)), list(CONDITIONS.values()))
    ax.set_xlim(-0.5, len(CONDITIONS) - 0.5)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel(quantity.label + quantity.unit)
    if quantity.floor is not None:
        ax.set_ylim(bottom=quantity.floor)


def dynamics(methods: Sequence[Method]) -> Figure | None:
    """[fig:teacher-dynamics]: both branches and the optimizer over cycles."""
    keys = (CORRECT_KL, FAILED_SUCCESS, CLIP, TEACHER_NORM)
    panels = _traced(methods, "teacher-dynamics", keys, adapting(methods))
    caption = (
        "The teacher's training: unclipped KL on correct trajectories, success of its continuations of failed ones, "
        f"share of vocabulary entries whose contribution was clipped, and gradient norm. {seeds_text(methods)}"
    )
    return _figure("teacher-dynamics", "Teacher training over cycles", caption, panels, "teacher")


def privilege(methods: Sequence[Method]) -> Figure | None:
    """[fig:privilege-dynamics]: both branches, both gradients, and how often there was nothing to learn from."""
    keys = (CORRECT_KL, FAILED_SUCCESS, TEACHER_NORM, STUDENT_NORM, SKIPPED)
    panels = _traced(methods, "privilege-dynamics", keys, adapting(methods))
    caption = (
        "Correct-branch KL, failed-branch success, gradient norms of both phases, and the share of failed trajectories "
        f"skipped because no continuation succeeded. {seeds_text(methods)}"
    )
    if not any(run.shifts for m in methods for run in m.runs.values()):
        caption += " How much of the teacher's change can reach the student is measured by 'past shift RUN'."
    return _figure("privilege-dynamics", "Privilege and optimisation over cycles", caption, panels, "privilege")


def _figure(name: str, title: str, caption: str, panels: list[Panel], section: str) -> Figure | None:
    return Figure(name, f"fig:{name}", title, caption, panels, section) if panels else None


def sampling(methods: Sequence[Method]) -> Figure | None:
    """[fig:adaptive-sampling]: the base group size against the teacher's success."""
    drawing = [m for m in methods if data.trace(m, "failed/samples") and data.trace(m, "sampling/g_base")]
    if not drawing:
        return None
    legend = len(methods) > 1
    options = [config.dump(m.recipe.method) for m in drawing]
    thresholds = {o["success_threshold"] for o in options if o.get("sampler") == "adaptive"}
    level = thresholds.pop() if len(thresholds) == 1 else None

    by_name = looks(methods)
    if len(drawing) > MOST_LINES:  # the samplers that differ are the ones to see in colour
        drawing.sort(key=lambda m: (not is_past(m), final(data.trace(m, "sampling/g_base"))))

    def lines(key: str) -> list[Line]:
        return [Line(m.label, by_name[m.name], data.trace(m, key)) for m in drawing]

    name = "adaptive-sampling"
    base, ema, cost = Quantity("Base group size"), Quantity("Success", "share"), Quantity("Continuations so far")
    panels = [
        curve(f"{name}-g-base", "Base group size", lines("sampling/g_base"), base, x=CYCLES, steps=True, legend=legend),
        curve(
            f"{name}-ema",
            "Teacher-success average",
            lines("sampling/success_ema"),
            ema,
            x=CYCLES,
            level=level,
            legend=legend,
        ),
        curve(f"{name}-cost", "Teacher samples", lines("cost/teacher_samples"), cost, x=CYCLES, legend=legend),
    ]
    above = f" (dashed: {100 * level:g} %)" if level is not None else ""
    caption = (
        f"The sampler lowers its base group size while the moving average of the teacher's success stays at its "
        f"threshold{above}. {seeds_text(methods)}"
    )
    return Figure(name, f"fig:{name}", "Adaptive sampling", caption, panels, "sampling")


def objectives(methods: Sequence[Method]) -> Figure | None:
    """[fig:objective-tradeoffs]: final score against compatibility KL and against throughput."""
    k = samples_text(methods)
    by_name = looks(methods)
    rows = [(m, row) for m in methods if (row := data.measured(m)) is not None]
    axes: tuple[tuple[str, str, str, Callable[[Any], float | None]], ...] = (
        ("kl", "Score and compatibility", "Compatibility KL (nats)", lambda r: r.diagnostics.get("compatibility_kl")),
        ("throughput", "Score and throughput", "Generated tokens a training second", throughput),
    )
    panels = []
    for slug, title, x, pick in axes:
        points, cells = [], []
        for method, row in rows:
            value, score = pick(row), final(data.scores(method, "macro/avg@k"))
            if value is not None and score is not None:
                points.append(Point(method.label, by_name[method.name], value, 100 * score))
                cells.append([method.label, f"{value:.4g}", f"{100 * score:.1f}"])
        if len(points) >= 2:
            draw = partial(draw_points, points=points, x=x, y=f"Macro Avg@{k} (%)")
            header = ["Method", x, f"Macro Avg@{k} (%)"]
            panels.append(Panel(f"objective-tradeoffs-{slug}", title, draw, (header, cells), size=(4.2, 3.4)))
    caption = (
        "Last evaluation against the mean KL of the teacher's successful continuations to the student, and against "
        "student and teacher tokens generated per second of training on the machine that trained it. Means over seeds."
    )
    return _figure("objective-tradeoffs", "Quality, compatibility and speed", caption, panels, "objectives")


def throughput(row: Any) -> float | None:
    """Generated tokens of the cycles over the seconds of the cycles; phase 1 is not timed and not counted."""
    tokens = row.costs["student_tokens"] + row.costs["teacher_tokens"]
    return tokens / row.costs["seconds"] if tokens and row.costs["seconds"] > 0 else None


def final(traces: Traces) -> float | None:
    """The mean over seeds of each seed's last value."""
    return fmean(values[max(values)] for values in traces.values()) if traces else None
