"""Figures of what the student learned: scores over cycles, their change, and the signs of health beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from past_opsd.analysis.report import answers, data
from past_opsd.analysis.report.data import Method, Traces
from past_opsd.analysis.report.panels import Figure, Panel, slug
from past_opsd.analysis.report.style import (
    MOST_LINES,
    MOST_MARKS,
    MOST_RAW,
    MOST_ROWS,
    OTHER,
    SERIES,
    Line,
    Quantity,
    Spot,
    draw_lines,
    half_window,
    has_bands,
    line_table,
    lines_of,
)
from past_opsd.run.evaluate import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOUNDARIES, CYCLES = "cycles done", "cycle"
POSITIONS = 16


def curve(
    name: str,
    title: str,
    lines: Sequence[Line],
    quantity: Quantity,
    about: str = "",
    *,
    x: str = BOUNDARIES,
    smooth: bool = False,
    steps: bool = False,
    level: float | None = None,
    legend: bool = True,
) -> Panel:
    """A panel of lines over cycles or positions; `about` says what they are, `level` is a dashed line."""
    half = half_window(lines) if smooth and lines else 0

    def draw(ax: Axes) -> list[Spot]:
        ax.set_xlabel(x)
        return draw_lines(ax, lines, quantity, x=x, half=half, steps=steps, level=level, legend=legend)

    note = f"{about} {_note(lines, quantity, half)}".strip()
    return Panel(name, title, draw, line_table(lines, quantity, x), note)


def _note(lines: Sequence[Line], quantity: Quantity, half: int) -> str:
    """What the drawing does to the numbers."""
    parts: list[str] = []
    if half:
        behind = ", raw seed mean behind" if len(lines) <= MOST_RAW else ""
        parts.append(f"moving mean over {2 * half + 1} cycles{behind}")
    counts = sorted({len(line.traces) for line in lines})
    if counts and counts[-1] > 1:
        many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        parts.append(f"means over {many} seeds, {_ranges(lines, quantity)}")
    if quantity.log:
        parts.append("the vertical axis is logarithmic")
    if any(line.look.colour == OTHER for line in lines):
        parts.append(f"methods after the first {len(SERIES)} are grey, told apart by their marks")
    if len(lines) > MOST_LINES:
        parts.append(f"those after the first {MOST_LINES} are thin lines, named in the table")
    if any(len({frozenset(v) for v in line.traces.values()}) > 1 for line in lines):
        parts.append("where a run has no value the mean is over the others")
    rows = len({x for line in lines for values in line.traces.values() for x in values})
    if rows > MOST_ROWS:
        parts.append(f"the table shows {MOST_ROWS} of {rows} rows at most")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""


def _ranges(lines: Sequence[Line], quantity: Quantity) -> str:
    """Where the ranges over seeds are to be seen."""
    if has_bands(lines, quantity):
        return "bands are their ranges"
    few = max(len(v) for line in lines for v in line.traces.values()) <= MOST_MARKS and not quantity.log
    return "thin bars are their ranges" if few else "their ranges are in the table"


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
    """[fig:main-learning-dynamics]: Avg@k over cycles, per task and macro."""
    k = samples_text(methods)
    return _scores(
        methods,
        "main-learning-dynamics",
        "fig:main-learning-dynamics",
        "Score over cycles",
        f"Avg@{k} of the student; a cycle is one update of it, unless the method skips one that teaches it nothing.",
        Quantity(f"Avg@{k}", "share", floor=None),
        lambda traces: traces,
    )


def changes(methods: Sequence[Method]) -> Figure | None:
    """[fig:learning-curves]: the same as change from each method's own checkpoint 0.

    One method's change is its score again, moved; the summary has it with its interval.
    """
    if len(methods) == 1:
        return None
    k = samples_text(methods)
    return _scores(
        methods,
        "learning-curves",
        "fig:learning-curves",
        "Change from checkpoint 0",
        f"Avg@{k} minus the same run's value before its first cycle.",
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
        names = {"Macro": "macro/avg@k"} | names
    panels: list[Panel] = []
    for task, key in names.items():
        lines = lines_of(methods, lambda m, key=key: change(data.scores(m, key)))
        if lines:
            about = "The tasks' mean, each with the same weight." if key == "macro/avg@k" else ""
            panels.append(curve(f"{name}-{slug(task)}", task, lines, quantity, about, legend=len(methods) > 1))
    return Figure(name, label, title, caption, panels, "learning") if panels else None


def health(methods: Sequence[Method]) -> Figure | None:
    """Length, truncation, entropy, pass@k and styles: what can go wrong while the score rises."""
    k = samples_text(methods)
    legend = len(methods) > 1
    shown = [
        ("macro/mean_length", "Response length", Quantity("Mean length (tokens)"), "Held-out responses."),
        (
            "macro/truncated",
            "Truncated responses",
            Quantity("Cut by the token limit", "share"),
            "Held-out responses that the token limit cut: failures, whatever they say.",
        ),
        (
            "macro/pass@k",
            f"Pass@{k}",
            Quantity(f"Pass@{k}, macro", "share", floor=None),
            f"Problems solved by one of {k} draws or more. Falling while Avg@{k} rises is a policy that narrows.",
        ),
        (
            "gap",
            f"Pass@{k} minus Avg@{k}",
            Quantity(f"Pass@{k} - Avg@{k}", "points"),
            "What there is to gain by drawing more often.",
        ),
    ]
    for style in sorted(
        {s for m in methods for r in m.runs.values() for e in r.evaluations.values() for s in _styles(e)}
    ):
        about = answers.style_meaning(methods, style)
        quantity = Quantity(f"'{style}' responses", "share")
        shown.append((f"macro/style/{style}", f"Style: {style}", quantity, about))
    panels: list[Panel] = []
    for key, title, quantity, about in shown:
        missing = 0.0 if "/style/" in key else None
        lines = lines_of(methods, _gap if key == "gap" else partial(data.scores, key=key, missing=missing))
        if lines:
            name = slug(key.removeprefix("macro/").removesuffix("@k").replace("/", "-").replace("_", "-"))
            panels.append(curve(f"health-{name}", title, lines, quantity, about, legend=legend))
    entropy = lines_of(methods, _entropy)
    if entropy:
        quantity, about = Quantity("Entropy (nats a token)"), "On the responses it is trained on."
        panels.append(
            curve("health-entropy", "Student entropy", entropy, quantity, about, x=CYCLES, smooth=True, legend=legend)
        )
    caption = "What can go wrong while the score rises; evaluations are macro over tasks."
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
        "student/distill": ("Student distillation", "Where the teacher asks the student to change."),
        "teacher/correct": ("Teacher, correct branch", "Where the adapted teacher leaves the student's success."),
        "teacher/stay": ("Teacher, failed branch", "Where the teacher's successful continuations leave the student."),
    }
    panels: list[Panel] = []
    for term, (title, about) in terms.items():
        lines = lines_of(methods, partial(_by_position, term=term))
        if lines:
            name, quantity = f"kl-by-position-{term.replace('/', '-')}", Quantity("KL (nats)", log=True)
            panels.append(curve(name, title, lines, quantity, about, x="token position", legend=len(methods) > 1))
    caption = (
        f"KL between the trained and the frozen side at the first {POSITIONS} response tokens, mean over all cycles."
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
