"""Figures of what the student learned: scores over updates, their change, and the signs of health beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from past_opsd.evaluate import Evaluation
from past_opsd.report import data
from past_opsd.report.data import Method, Traces
from past_opsd.report.panels import Figure, Panel, slug
from past_opsd.report.style import (
    FG,
    MOST_LINES,
    MOST_MARKS,
    MOST_RAW,
    MOST_ROWS,
    Line,
    Quantity,
    draw_lines,
    half_window,
    has_bands,
    line_table,
    lines_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UPDATES, CYCLES = "student updates", "cycle"
POSITIONS = 16


def curve(
    name: str,
    title: str,
    lines: Sequence[Line],
    quantity: Quantity,
    *,
    x: str = UPDATES,
    smooth: bool = False,
    steps: bool = False,
    level: float | None = None,
    legend: bool = True,
) -> Panel:
    """A panel of lines over updates, cycles or positions; `level` is a dashed line across."""
    half = half_window(lines) if smooth and lines else 0
    shown = lines if legend else [Line("", line.look, line.traces) for line in lines]

    def draw(ax: Axes) -> None:
        draw_lines(ax, shown, quantity, half=half, steps=steps)
        ax.set_xlabel(x)
        if level is not None:
            ax.axhline(level * quantity.scale, color=FG, lw=0.8, ls=(0, (3, 2)), zorder=1.6)

    return Panel(name, title, draw, line_table(lines, quantity, x), _note(lines, quantity, half))


def _note(lines: Sequence[Line], quantity: Quantity, half: int) -> str:
    """What the drawing does to the numbers."""
    parts = []
    several = any(len(line.traces) > 1 for line in lines)
    if half:
        behind = ", raw seed mean behind" if len(lines) <= MOST_RAW else ""
        parts.append(f"moving mean over {2 * half + 1} cycles{behind}")
    if several and not has_bands(lines, quantity):
        few = max(len(v) for line in lines for v in line.traces.values()) <= MOST_MARKS and not quantity.log
        parts.append("thin bars are the seed ranges" if few else "the seed ranges are in the table")
    if len(lines) > MOST_LINES:
        parts.append(f"the first {MOST_LINES} methods are in colour, the others grey and named in the table")
    if any(len({frozenset(v) for v in line.traces.values()}) > 1 for line in lines):
        parts.append("where a run has no value the mean is over the others")
    rows = len({x for line in lines for values in line.traces.values() for x in values})
    if rows > MOST_ROWS:
        parts.append(f"the table shows {MOST_ROWS} of {rows} rows at most")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""


def seeds_text(methods: Sequence[Method]) -> str:
    """What a line and a band are."""
    counts = {len(method.runs) for method in methods}
    if counts == {1}:
        return "One training seed."
    n = f"{counts.pop()} " if len(counts) == 1 else ""
    return f"Lines are means over {n}training seeds, bands their range."


def samples_text(methods: Sequence[Method]) -> str:
    """The k of Avg@k: a number where all evaluations agree."""
    found = {e.samples for m in methods for run in m.runs.values() for e in run.evaluations.values()}
    return str(found.pop()) if len(found) == 1 else "k"


def tasks(methods: Sequence[Method]) -> list[str]:
    """Held-out sets in the order in which they appear."""
    return list(
        dict.fromkeys(t for m in methods for r in m.runs.values() for e in r.evaluations.values() for t in e.tasks)
    )


def dynamics(methods: Sequence[Method]) -> Figure | None:
    """[fig:main-learning-dynamics]: Avg@k over student updates, per task and macro."""
    k = samples_text(methods)
    return _scores(
        methods,
        "main-learning-dynamics",
        "fig:main-learning-dynamics",
        "Score over student updates",
        f"Avg@{k} of the student over its updates. {seeds_text(methods)} Macro weights the tasks equally.",
        Quantity(f"Avg@{k}", "share", floor=None),
        lambda traces: traces,
    )


def changes(methods: Sequence[Method]) -> Figure | None:
    """[fig:learning-curves]: the same as change from each method's own checkpoint 0."""
    k = samples_text(methods)
    return _scores(
        methods,
        "learning-curves",
        "fig:learning-curves",
        "Change from checkpoint 0",
        f"Avg@{k} minus the same run's value before its first update. {seeds_text(methods)}",
        Quantity(f"Change of Avg@{k}", "points"),
        data.change,
    )


def _scores(
    methods: Sequence[Method],
    name: str,
    label: str,
    title: str,
    caption: str,
    quantity: Quantity,
    change: Callable[[Traces], Traces],
) -> Figure | None:
    names = {task: f"{task}/avg@k" for task in tasks(methods)}
    if len(names) > 1:
        names |= {"Macro": "macro/avg@k"}
    panels = []
    for task, key in names.items():
        lines = lines_of(methods, lambda m, key=key: change(data.scores(m, key)))
        if lines:
            panels.append(curve(f"{name}-{slug(task)}", task, lines, quantity, legend=len(methods) > 1))
    return Figure(name, label, title, caption, panels, "learning") if panels else None


def health(methods: Sequence[Method]) -> Figure | None:
    """Length, truncation, entropy, pass@k and styles: what can go wrong while the score rises."""
    k = samples_text(methods)
    legend = len(methods) > 1
    shown: list[tuple[str, str, Quantity]] = [
        ("macro/mean_length", "Response length", Quantity("Mean length (tokens)")),
        ("macro/truncated", "Truncated responses", Quantity("Cut by the token limit", "share")),
        ("macro/pass@k", f"Pass@{k}", Quantity(f"Pass@{k}, macro", "share", floor=None)),
        ("gap", f"Pass@{k} minus Avg@{k}", Quantity(f"Pass@{k} - Avg@{k}", "share")),
    ]
    styles = sorted({s for m in methods for r in m.runs.values() for e in r.evaluations.values() for s in _styles(e)})
    shown += [(f"macro/style/{s}", f"Style: {s}", Quantity(f"'{s}' responses", "share")) for s in styles]
    panels = []
    for key, title, quantity in shown:
        missing = 0.0 if "/style/" in key else None
        lines = lines_of(methods, _gap if key == "gap" else partial(data.scores, key=key, missing=missing))
        if lines:
            name = slug(key.removeprefix("macro/").removesuffix("@k").replace("/", "-").replace("_", "-"))
            panels.append(curve(f"health-{name}", title, lines, quantity, legend=legend))
    entropy = lines_of(methods, _entropy)
    if entropy:
        quantity = Quantity("Entropy (nats a token)")
        panels.append(
            curve("health-entropy", "Student entropy", entropy, quantity, x=CYCLES, smooth=True, legend=legend)
        )
    caption = (
        f"Held-out responses over student updates, macro over tasks, and the student's entropy on its training "
        f"responses over cycles. Pass@{k} falling while Avg@{k} rises is a policy that narrows. {seeds_text(methods)}"
    )
    return Figure("health", "", "Health of the student", caption, panels, "health") if panels else None


def _styles(evaluation: Evaluation) -> set[str]:
    return {style for result in evaluation.tasks.values() for style in result.styles}


def _gap(method: Method) -> Traces:
    average, best = data.scores(method, "macro/avg@k"), data.scores(method, "macro/pass@k")
    return {seed: {x: best[seed][x] - value for x, value in values.items()} for seed, values in average.items()}


def _entropy(method: Method) -> Traces:
    """The student's entropy in whichever term trains it; terms of one cycle are averaged."""
    names = {k for r in method.runs.values() for line in r.metrics for k in line}
    keys = sorted(k for k in names if k.startswith("student/") and k.endswith("/entropy"))
    traces = [data.trace(method, key) for key in keys]
    found: dict[int, dict[int, float]] = {}
    for seed in method.runs:
        own = [t[seed] for t in traces if seed in t]
        cycles = sorted({x for values in own for x in values})
        if cycles:
            found[seed] = {x: fmean([values[x] for values in own if x in values]) for x in cycles}
    return found


def positions(methods: Sequence[Method]) -> Figure | None:
    """Where in a response the frozen view disagrees with the live one: KL at the first positions."""
    terms = {
        "student/distill": ("Student distillation", "KL (nats)"),
        "teacher/correct": ("Teacher, correct branch", "KL (nats)"),
        "teacher/stay": ("Teacher, failed branch", "KL (nats)"),
    }
    panels = []
    for term, (title, label) in terms.items():
        lines = lines_of(methods, partial(_by_position, term=term))
        if lines:
            name = f"kl-by-position-{term.replace('/', '-')}"
            quantity = Quantity(label, log=True)
            panels.append(curve(name, title, lines, quantity, x="token position", legend=len(methods) > 1))
    caption = (
        f"KL between live and frozen view at the first {POSITIONS} response tokens, mean over all cycles; the vertical "
        f"axis is logarithmic. {seeds_text(methods)}"
    )
    return Figure("kl-by-position", "", "KL by token position", caption, panels, "teacher") if panels else None


def _by_position(method: Method, term: str) -> Traces:
    found: dict[int, dict[int, float]] = {}
    for t in range(POSITIONS):
        for seed, values in data.trace(method, f"{term}/kl@{t:02d}").items():
            average = fmean(list(values.values()))
            if average > 0:
                found.setdefault(seed, {})[t] = average
    return found
