"""Figures of the teacher: its use of the trajectory, its training, objectives against each other, and its sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from past_opsd.analysis.report import data
from past_opsd.analysis.report.data import Method, Traces
from past_opsd.analysis.report.learning import CYCLES, curve, samples_text
from past_opsd.analysis.report.panels import Figure, Panel
from past_opsd.analysis.report.points import Point, draw_points
from past_opsd.analysis.report.style import MOST_LINES, Line, Look, Quantity, Spot, fit, leads, lines_of, looks
from past_opsd.core import config

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CORRECT_KL = (
    "teacher/correct/kl",
    "Correct-branch KL",
    Quantity("KL(student || teacher) (nats)"),
    "On correct trajectories, before clipping.",
)
FAILED_SUCCESS = (
    "failed/success",
    "Failed-branch success",
    Quantity("Continuations verified", "share"),
    "Of the teacher's continuations of failed trajectories.",
)
CLIP = (
    "teacher/correct/clip_fraction",
    "Clip fraction",
    Quantity("Clipped entries", "share"),
    "Vocabulary entries whose contribution to the correct-branch KL was cut at tau.",
)
TEACHER_NORM = (
    "teacher/grad_norm",
    "Teacher gradient norm",
    Quantity("Norm before clipping"),
    "Of the teacher's step.",
)
STUDENT_NORM = (
    "student/grad_norm",
    "Student gradient norm",
    Quantity("Norm before clipping"),
    "Of the student's step.",
)
SKIPPED = (
    "failed/skipped",
    "Skipped groups",
    Quantity("Groups without a success", "share"),
    "Failed trajectories left out because no continuation of theirs succeeded.",
)
SURE = (
    FAILED_SUCCESS,
    (
        "teacher/stay/entropy",
        "The teacher on its successes",
        Quantity("Entropy (nats)"),
        "A token, on average, along its successful continuations of failed trajectories.",
    ),
    (
        "teacher/correct/entropy",
        "The teacher on correct responses",
        Quantity("Entropy (nats)"),
        "A token, on average, along the student's correct responses.",
    ),
    (
        "student/distill/entropy",
        "The student on its own responses",
        Quantity("Entropy (nats)"),
        "A token, on average, along what it sampled.",
    ),
)
FORKS = (
    (
        "student/distill/fork_share",
        "Change that lands on forks",
        Quantity("Of all KL", "share"),
        "Part of the distillation KL on the fifth of each response where the student is least decided; 20 % by chance.",
    ),
    (
        "student/distill/fork_kl",
        "KL at forks",
        Quantity("KL (nats)"),
        "Between teacher and student on that fifth of the positions.",
    ),
    (
        "student/distill/rest_kl",
        "KL elsewhere",
        Quantity("KL (nats)"),
        "On the other positions.",
    ),
    (
        "student/distill/fork_entropy",
        "Entropy at forks",
        Quantity("Entropy (nats)"),
        "Of the student, on that fifth of the positions.",
    ),
    (
        "student/distill/fork_count",
        "Forks in a response",
        Quantity("Positions"),
        "Positions at which the student's entropy is at least 0.5 nats, a choice of four to one.",
    ),
    (
        "rollout/mean_length",
        "Length of sampled responses",
        Quantity("Mean length (tokens)"),
        "Of the responses that the student is trained on.",
    ),
)
Traced = tuple[str, str, Quantity, str]

CONDITIONS = {"matching": "matching", "removed": "removed", "shuffled": "shuffled"}
PROBED = {
    "success": (
        "Teacher success",
        Quantity("Continuations verified", "share", floor=None),
        "Of the teacher's continuations.",
    ),
    "jsd_student": ("JSD to the student", Quantity("JSD (nats)"), "At the student's own tokens."),
    "kl": (
        "Compatibility KL",
        Quantity("KL(teacher || student) (nats)"),
        "Along the teacher's successful continuations.",
    ),
}


def adapting(methods: Sequence[Method]) -> list[Method]:
    """Those whose teacher took a step."""
    return [m for m in methods if any(line.get("teacher/stepped") for r in m.runs.values() for line in r.metrics)]


def _traced(methods: Sequence[Method], prefix: str, keys: Sequence[Traced], some: Sequence[Method]) -> list[Panel]:
    """A smoothed panel for every metric that one of the methods `some` recorded."""
    panels: list[Panel] = []
    chosen = {m.name for m in some}
    for key, title, quantity, about in keys:
        lines = lines_of(methods, lambda m, key=key: data.trace(m, key) if m.name in chosen else {})
        if lines:
            name = f"{prefix}-{key.replace('/', '-').replace('_', '-')}"
            made = curve(name, title, lines, quantity, about, x=CYCLES, smooth=True, legend=len(methods) > 1)
            panels.append(replace(made, shows=key))
    return panels


def mechanism(methods: Sequence[Method]) -> Figure | None:
    """[fig:teacher-mechanism]: the teacher under perturbed trajectories, and both branches over cycles."""
    probed = _probe_panels(methods)
    traced = _traced(methods, "teacher-mechanism", (CORRECT_KL, FAILED_SUCCESS), adapting(methods))
    if not probed and not traced:
        return None
    if probed:
        caption = (
            "The teacher at the newest probed checkpoint of each run, reading the matching attempt, no attempt, or the "
            "attempt of another problem."
        )
    else:
        caption = "The comparison of matching, removed and shuffled trajectories is made by 'past probe RUN'."
    title = "Does the teacher use the trajectory, and how does it adapt?"
    return Figure("teacher-mechanism", "fig:teacher-mechanism", title, caption, [*probed, *traced], "teacher")


def _probe_panels(methods: Sequence[Method]) -> list[Panel]:
    by_name = looks(methods)
    found = [
        (method, seed, run.probes[max(run.probes)])
        for method in methods
        for seed, run in method.runs.items()
        if run.probes
    ]
    panels: list[Panel] = []
    for metric, (title, quantity, about) in PROBED.items():
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
            known = any(value["low"] is not None for row in rows for value in row[4].values())
            note = f"{about} Lines are 95 % intervals over problems." if known else about
            panels.append(Panel(f"teacher-mechanism-{metric.replace('_', '-')}", title, draw, (header, cells), note))
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
) -> list[Spot]:
    """A point with its interval for every run, side by side under each condition."""
    pitch = min(0.16, 0.7 / len(rows))
    seen: set[str] = set()
    spots: list[Spot] = []
    for i, (label, look, seed, step, values) in enumerate(rows):
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
            said = quantity.said(_cell(value, quantity))
            title = f"{label}, seed {seed}, after {step} cycles: {condition}"
            spots.append(Spot(title, [(quantity.label, look.colour, said)], [(x, y)], "point"))
    ax.set_xticks(range(len(CONDITIONS)), list(CONDITIONS.values()))
    ax.set_xlim(-0.5, len(CONDITIONS) - 0.5)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel(quantity.label + quantity.unit)
    fit(ax, quantity)
    return spots


def dynamics(methods: Sequence[Method]) -> Figure | None:
    """[fig:teacher-dynamics]: both branches and the optimizer over cycles."""
    keys = (CORRECT_KL, FAILED_SUCCESS, CLIP, TEACHER_NORM)
    panels = _traced(methods, "teacher-dynamics", keys, adapting(methods))
    caption = "The teacher's training, cycle by cycle."
    return _figure("teacher-dynamics", "Teacher training over cycles", caption, panels, "teacher")


def privilege(methods: Sequence[Method]) -> Figure | None:
    """[fig:privilege-dynamics]: both branches, both gradients, and how often there was nothing to learn from."""
    keys = (CORRECT_KL, FAILED_SUCCESS, TEACHER_NORM, STUDENT_NORM, SKIPPED)
    panels = _traced(methods, "privilege-dynamics", keys, adapting(methods))
    caption = "Both branches and both optimizer steps, cycle by cycle."
    if not any(run.shifts for m in methods for run in m.runs.values()):
        caption += " How much of the teacher's change can reach the student is measured by 'past shift RUN'."
    return _figure("privilege-dynamics", "Privilege and optimisation over cycles", caption, panels, "privilege")


def certainty(methods: Sequence[Method]) -> Figure | None:
    """How sure teacher and student are, and whether the teacher succeeds."""
    distilled = [m for m in methods if data.trace(m, "student/distill/entropy")]
    panels = _traced(methods, "certainty", SURE, distilled)
    caption = "The teacher's success on failed responses, and how unsure it and the student are, cycle by cycle."
    return Figure("certainty", "", "Certainty", caption, panels, "teacher") if panels else None


def forks(methods: Sequence[Method]) -> Figure | None:
    """Where distillation changes the student: at the positions it is least decided, or elsewhere."""
    distilled = [m for m in methods if data.trace(m, "student/distill/fork_share")]
    panels = _traced(methods, "forks", FORKS, distilled)
    caption = (
        "A privileged teacher that closes a thinking student's forks can cost it long responses: most of the change on "
        "forks, and then fewer of them and shorter responses."
    )
    return Figure("forks", "", "Forks", caption, panels, "health") if panels else None


def _figure(name: str, title: str, caption: str, panels: list[Panel], section: str) -> Figure | None:
    return Figure(name, f"fig:{name}", title, caption, panels, section) if panels else None


def sampling(methods: Sequence[Method]) -> Figure | None:
    """[fig:adaptive-sampling]: the base group size against the teacher's success."""
    drawing = [m for m in methods if data.trace(m, "failed/samples") and data.trace(m, "sampling/g_base")]
    if not drawing:
        return None
    legend = len(methods) > 1
    options = {m.label: config.dump(m.recipe.method) for m in drawing}
    thresholds = {name: o["success_threshold"] for name, o in options.items() if o.get("sampler") == "adaptive"}
    level = next(iter(thresholds.values())) if len(set(thresholds.values())) == 1 else None
    by_name = looks(methods)
    if len(drawing) > MOST_LINES:  # the samplers that differ are the ones to see in colour
        drawing.sort(key=lambda m: (not leads(m), final(data.trace(m, "sampling/g_base"))))

    def lines(key: str) -> list[Line]:
        return [Line(m.label, by_name[m.name], data.trace(m, key)) for m in drawing]

    name = "adaptive-sampling"
    base, ema, cost = Quantity("Base group size"), Quantity("Success", "share"), Quantity("Continuations so far")
    trace = partial(curve, x=CYCLES, legend=legend)
    sizes, wholes = "Continuations drawn at first for a failed trajectory.", "Continuations drawn since the start."
    average = f"Moving average of the share of continuations verified.{_threshold(level)}"
    panels = [
        trace(f"{name}-g-base", "Base group size", lines("sampling/g_base"), base, sizes, steps=True),
        trace(f"{name}-ema", "Teacher-success average", lines("sampling/success_ema"), ema, average, level=level),
        trace(f"{name}-cost", "Teacher samples", lines("cost/teacher_samples"), cost, wholes),
    ]
    return Figure(name, f"fig:{name}", "Adaptive sampling", _rule(thresholds, len(drawing)), panels, "sampling")


def _threshold(level: float | None) -> str:
    return "" if level is None else f" Dashed: the threshold, {100 * level:g} %."


def _rule(thresholds: dict[str, float], drawing: int) -> str:
    """When the group size falls, as far as the recipes say so."""
    values = sorted(set(thresholds.values()))
    if not values:
        return "The group size is fixed."
    each = ", ".join(f"{100 * value:g} % ({name})" for name, value in thresholds.items())
    rule = (
        "The base group size falls while the moving average of the teacher's success is at its threshold or above: "
        f"{f'{100 * values[0]:g} %' if len(values) == 1 else each}."
    )
    rule += " The other samplers draw groups of a fixed size." if len(thresholds) < drawing else ""
    return rule


def objectives(methods: Sequence[Method]) -> Figure | None:
    """[fig:objective-tradeoffs]: final score against compatibility KL and against throughput."""
    k = samples_text(methods)
    by_name = looks(methods)
    rows = [(m, row) for m in methods if (row := data.measured(m)) is not None]
    axes: tuple[tuple[str, str, str, str, Callable[[Any], float | None]], ...] = (
        (
            "kl",
            "Score and compatibility",
            "Compatibility KL (nats)",
            "KL of the teacher's successful continuations to the student, mean over the run.",
            lambda r: r.diagnostics.get("compatibility_kl"),
        ),
        (
            "throughput",
            "Score and throughput",
            "Generated tokens a training second",
            "Student and teacher tokens, on the machine that trained.",
            throughput,
        ),
    )
    panels: list[Panel] = []
    for slug, title, x, about, pick in axes:
        points, cells = list[Point](), list[list[str]]()
        for method, row in rows:
            value, score = pick(row), final(data.scores(method, "macro/avg@k"))
            if value is not None and score is not None:
                points.append(Point(method.label, by_name[method.name], value, 100 * score))
                cells.append([method.label, f"{value:.4g}", f"{100 * score:.1f}"])
        if len(points) >= 2:
            draw = partial(draw_points, points=points, x=x, y=f"Macro Avg@{k} (%)")
            header = ["Method", x, f"Macro Avg@{k} (%)"]
            panels.append(Panel(f"objective-tradeoffs-{slug}", title, draw, (header, cells), about, (4.2, 3.4)))
    several = any(len(m.runs) > 1 for m in methods)
    caption = f"The last evaluation of each method against what it took{', means over seeds' if several else ''}."
    return _figure("objective-tradeoffs", "Quality, compatibility and speed", caption, panels, "objectives")


def throughput(row: Any) -> float | None:
    """Generated tokens of the cycles over the seconds of the cycles; what comes before the first is not counted."""
    tokens = row.costs["student_tokens"] + row.costs["teacher_tokens"]
    seconds = row.costs["seconds"] - row.costs["phase1_seconds"]
    return tokens / seconds if tokens and seconds > 0 else None


def final(traces: Traces) -> float | None:
    """The mean over seeds of each seed's last value."""
    return fmean(values[max(values)] for values in traces.values()) if traces else None
