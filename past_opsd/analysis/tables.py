"""A suite's results as tables: terminal, Markdown, LaTeX. One description of the columns serves all three."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from past_opsd.analysis import settings
from past_opsd.core.stats import EDGE, Interval

Result = Mapping[str, Any]

# Cost of a run and the column that shows it.
COSTS = {
    "student_steps": "steps",
    "student_samples": "stud.",
    "student_tokens": "k tok",
    "teacher_samples": "teach.",
    "teacher_tokens": "k tok",
    "phase1_samples": "ph. 1",
    "phase1_tokens": "k tok",
    "verifier_calls": "verif.",
    "seconds": "s",
    "peak_mib": "MiB",
}


@dataclass(frozen=True)
class Sheet:
    """Header and rows, all text."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sheets(result: Result) -> list[Sheet]:
    """Scores, costs, and where a row has them the failed branch's diagnostics and settings of its own."""
    found = [scores(result), costs(result)]
    further = [diagnostics(result), Sheet(settings.TITLE, settings.HEADER, settings.lines(result))]
    return [*found, *(sheet for sheet in further if sheet.rows)]


def scores(result: Result) -> Sheet:
    """Avg@k per task, macro, and the difference to the reference with its paired 95 % interval."""
    tasks = tuple(result["rows"][0]["tasks"])
    reference = result["reference"]
    title = (
        f"{result['title']}: Avg@{result['samples']} (%) after {result['updates']} updates, seeds "
        f"{', '.join(map(str, result['seeds']))}; difference to {reference} with its paired 95 % interval "
        f"({EDGE})"
    )
    header = ("Method", *tasks, "Macro", "Seeds", "Difference")
    rows = []
    for row in result["rows"]:
        span = [100 * value for value in row.get("by_seed", [row["macro"][0]])]
        seeds = f"{min(span):.1f}-{max(span):.1f}" if len(span) > 1 else ""
        difference = "" if row["label"] == reference else interval(row["difference"], sign=True, bounds=False)
        values = (*(f"{100 * row['tasks'][t]:.1f}" for t in tasks), f"{100 * row['macro'][0]:.1f}")
        rows.append((row["label"], *values, seeds, difference))
    rows += [(label, "missing", *[""] * (len(header) - 2)) for label in result.get("missing", {})]
    return Sheet(title, header, rows)


def costs(result: Result) -> Sheet:
    """What each method generated, verified and took, by role; means over seeds; columns of zeros are left out."""
    costed = [row for row in result["rows"] if "costs" in row]
    used = {key: name for key, name in COSTS.items() if any(row["costs"][key] for row in costed)}
    header = ("Method", *used.values())
    rows = [(row["label"], *(_amount(key, row["costs"][key]) for key in used)) for row in costed]
    return Sheet(
        "Cost: student steps taken; samples and thousands of tokens by student, teacher and phase 1; verifier calls; "
        "training seconds; peak memory",
        header,
        rows,
    )


def _amount(key: str, value: float) -> str:
    return f"{value / 1000:,.1f}" if key.endswith("_tokens") else f"{value:,.0f}"


def diagnostics(result: Result) -> Sheet:
    """The teacher on failed trajectories: success, KL to the student, and what became of the groups."""
    keys = ("teacher_success", "compatibility_kl", "mixed", "all_success", "skipped", "retried")
    header = ("Method", "success", "compat. KL", "mixed", "all-success", "skipped", "retried")
    rows = [
        (row["label"], *(f"{row['diagnostics'][k]:.3f}" if k in row["diagnostics"] else "-" for k in keys))
        for row in result["rows"]
        if row.get("diagnostics")
    ]
    return Sheet(
        "Failed branch, means over cycles: the teacher's success, its KL to the student, shares of groups", header, rows
    )


def terminal(sheet: Sheet) -> Table:
    """For a screen of 80 columns."""
    table = Table(title=sheet.title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for i, name in enumerate(sheet.header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*row)
    return table


def markdown(result: Result) -> str:
    """All sheets of a suite."""
    parts = []
    for sheet in sheets(result):
        lines = [sheet.title, "", _md(sheet.header), "|---" + "|---:" * (len(sheet.header) - 1) + "|"]
        parts.append("\n".join([*lines, *(_md(row) for row in sheet.rows)]))
    parts += [f"{label} is missing: {why}" for label, why in result.get("missing", {}).items()]
    return "\n\n".join(parts) + "\n"


def _md(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def latex(result: Result) -> str:
    """All sheets of a suite, for booktabs."""
    parts = []
    for sheet in sheets(result):
        lines = [f"% {sheet.title}", f"\\begin{{tabular}}{{@{{}}l{'r' * (len(sheet.header) - 1)}@{{}}}}", "\\toprule"]
        lines += [_tex(sheet.header), "\\midrule", *(_tex(row) for row in sheet.rows), "\\bottomrule", "\\end{tabular}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _tex(cells: Sequence[str]) -> str:
    escaped = (cell.replace("%", "\\%").replace("_", "\\_").replace("&", "\\&") for cell in cells)
    return " & ".join(escaped) + " \\\\"


def interval(value: Interval | Sequence[float], sign: bool = False, bounds: bool = True) -> str:
    """'62.1 [60.3, 63.9]' in percent; `sign` writes a plus where there is no minus, at the `bounds` too or not."""
    estimate, low, high = (value.estimate, value.low, value.high) if isinstance(value, Interval) else value
    first, others = ("+" if sign else ""), ("+" if sign and bounds else "")
    return f"{100 * estimate:{first}.1f} [{100 * low:{others}.1f}, {100 * high:{others}.1f}]"
