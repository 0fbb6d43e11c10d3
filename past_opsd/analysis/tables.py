"""A suite's results as tables: terminal, Markdown, LaTeX. One description of the columns serves all three."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from past_opsd.analysis import settings
from past_opsd.core.stats import EDGE, Interval

Result = Mapping[str, Any]
Costs = Mapping[str, float]
ABSENT = "-"
MISSING = "(missing)"


@dataclass(frozen=True)
class Sheet:
    """Header and rows, all text."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sheets(result: Result, digits: int = 3) -> list[Sheet]:
    """The suite's own tables, then scores, costs, and where a row has them its failed branch and settings of its own.

    `digits` are the decimals of scores: three as in the paper, one for a screen.
    """
    found = [OWN[name](result, digits) for name in result.get("sheets", ())]
    found += [scores(result, digits), costs(result)]
    further = [diagnostics(result), Sheet(settings.TITLE, settings.HEADER, settings.lines(result))]
    return [*found, *(sheet for sheet in further if sheet.rows)]


def _about(result: Result) -> str:
    seeds = ", ".join(map(str, result["seeds"]))
    return f"Avg@{result['samples']} (%) after {result['cycles']} cycles, seeds {seeds}"


def scores(result: Result, digits: int = 3) -> Sheet:
    """Avg@k per task, macro, and the difference to the reference with its paired 95 % interval."""
    tasks = tuple(result["rows"][0]["tasks"])
    reference, factors = result["reference"], result.get("factors", {})
    names = tuple(dict.fromkeys(name for row in factors.values() for name in row))
    title = (
        f"{result['title']}: {_about(result)}; difference to {reference} with its paired 95 % interval over draws "
        f"({EDGE})"
    )
    header = ("Method", *names, *tasks, "Macro", "Seeds", "Difference")
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        known = factors.get(row["label"], {})
        yes = tuple(("yes" if known[name] else "no") if name in known else "" for name in names)
        if "missing" in row:
            rows.append((f"{row['label']} {MISSING}", *yes, *[ABSENT] * (len(tasks) + 3)))
            continue
        span = [100 * value for value in row.get("by_seed", [row["macro"][0]])]
        seeds = f"{min(span):.{digits}f}-{max(span):.{digits}f}" if len(span) > 1 else ""
        difference = row["difference"]
        told = ABSENT if difference is None else interval(difference, sign=True, bounds=False, digits=digits)
        values = (row["tasks"][task] for task in tasks)
        shown = (f"{100 * value:.{digits}f}" for value in (*values, row["macro"][0]))
        rows.append((row["label"], *yes, *shown, seeds, "" if row["label"] == reference else told))
    return Sheet(title, header, rows)


def _whole(value: float) -> str:
    """A mean of counts: with a decimal where it is none itself."""
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-6 else f"{value:,.1f}"


def _size(value: float) -> str:
    """150,368 as 0.150 M, 1.72e9 as 1.720 B."""
    return f"{value / 1e9:.3f} B" if value >= 1e8 else f"{value / 1e6:.3f} M"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.4f}"


# A cost of a run, the column that shows it, and how.
COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "student_steps": ("Updates", _whole),
    "teacher_steps": ("T. steps", _whole),
    "phase1_steps": ("Ph. 1 steps", _whole),
    "student_samples": ("S. samples", _whole),
    "replaced": ("replaced", _whole),
    "dropped": ("dropped", _whole),
    "teacher_samples": ("T. samples", _whole),
    "phase1_samples": ("Ph. 1 samples", _whole),
    "verifier_calls": ("Verifier", _whole),
    "student_tokens": ("S. tokens", _whole),
    "teacher_tokens": ("T. tokens", _whole),
    "phase1_tokens": ("Ph. 1 tokens", _whole),
    "tokens": ("Tokens", _whole),
    "phase1_seconds": ("Ph. 1 h", _hours),
    "device_seconds": ("Device-h", _hours),
    "seconds": ("Wall-h", _hours),
    "peak_mib": ("Peak GB", lambda mib: f"{mib * 2**20 / 1e9:.3f}"),
    "trained": ("Trained", _size),
    "deployed": ("Deployed", _size),
}
COST_NOTE = (
    "optimizer steps that the student, the teacher and phase 1 (what comes before the first cycle) took; samples and "
    "tokens of each, of the student's samples those that dynamic sampling replaced and those that were dropped because "
    "they do not fit the context; verifier calls; hours of training on a process with its device, and on the wall, "
    "evaluation left out; peak memory of a process; parameters that are trained, and that are served"
)


def costs(result: Result) -> Sheet:
    """[tab:cost-accounting]: what each method took; means over seeds; columns of zeros are left out."""
    table = cost_table({row["label"]: row["costs"] for row in result["rows"] if "costs" in row})
    absent = [row for row in result["rows"] if "missing" in row]
    rows = [(f"{row['label']} {MISSING}", *[ABSENT] * (len(table.header) - 1)) for row in absent]
    return Sheet(f"Cost: {COST_NOTE}", table.header, table.rows + rows)


def cost_table(costs: Mapping[str, Costs]) -> Sheet:
    """The costs of methods or runs, by label."""
    used = {key: shown for key, shown in COSTS.items() if any(row.get(key) for row in costs.values())}
    rows = [
        (label, *(form(row[key]) if key in row else ABSENT for key, (_, form) in used.items()))
        for label, row in costs.items()
    ]
    return Sheet("Cost", ("Method", *(name for name, _ in used.values())), rows)


def diagnostics(result: Result) -> Sheet:
    """The teacher on failed trajectories: success, KL to the student, and what became of the groups."""
    keys = ("teacher_success", "compatibility_kl", "mixed", "all_success", "skipped", "retried")
    header = ("Method", "success", "compat. KL", "mixed", "all-success", "skipped", "retried")
    rows = [
        (row["label"], *(_diagnostic(row, key, 3) for key in keys)) for row in result["rows"] if row.get("diagnostics")
    ]
    return Sheet(
        "Failed branch, means over cycles: the teacher's success, its KL to the student, shares of groups", header, rows
    )


def _diagnostic(row: Mapping[str, Any], key: str, digits: int) -> str:
    return f"{row['diagnostics'][key]:.{digits}f}" if key in row["diagnostics"] else ABSENT


def objectives(result: Result, digits: int = 3) -> Sheet:
    """[tab:objective-ablation]."""

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        spent, generated = (
            row["costs"]["learner_seconds"],
            row["costs"]["student_tokens"] + row["costs"]["teacher_tokens"],
        )
        return (
            _macro(row, digits),
            _diagnostic(row, "teacher_success", 4),
            _diagnostic(row, "compatibility_kl", 4),
            COSTS["peak_mib"][1](row["costs"]["peak_mib"]),
            f"{generated / spent:,.0f}" if spent else ABSENT,
        )

    title = (
        f"{result['title']}: {_about(result)}; the teacher's success on failed trajectories and its KL to the frozen "
        "student on successful ones, means over cycles; peak memory of the process; sampled tokens a second of the "
        "optimizer's phases"
    )
    header = ("Objective", "Macro", "Teacher success", "Compat. KL", "GB", "Tokens/s")
    return Sheet(title, header, _rows(result, cells, len(header)))


def sampling(result: Result, digits: int = 3) -> Sheet:
    """[tab:adaptive-sampling]."""

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        shown = (COSTS[key][1](row["costs"][key]) for key in ("teacher_samples", "teacher_tokens", "device_seconds"))
        return (_macro(row, digits), *shown)

    title = f"{result['title']}: {_about(result)}; the teacher's samples and tokens, and the run's device-hours"
    header = ("Sampler", "Macro", "Samples", "Tokens", "Device-h")
    return Sheet(title, header, _rows(result, cells, len(header)))


def _macro(row: Mapping[str, Any], digits: int) -> str:
    return f"{100 * row['macro'][0]:.{digits}f}"


def _rows(result: Result, cells: Callable[[Mapping[str, Any]], tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """A line for every row that was run, and for every one that is missing."""
    found: list[tuple[str, ...]] = []
    for row in result["rows"]:
        if "missing" in row:
            found.append((f"{row['label']} {MISSING}", *[ABSENT] * (width - 1)))
        elif "costs" in row:
            found.append((row["label"], *cells(row)))
    return found


OWN: dict[str, Callable[[Result, int], Sheet]] = {"objectives": objectives, "sampling": sampling}


def terminal(sheet: Sheet, width: int = 80) -> list[Table]:
    """For a screen of 80 columns: what does not fit beside the labels goes into a table below."""
    widths = [max(map(len, column)) + 2 for column in zip(sheet.header, *sheet.rows, strict=True)]
    blocks: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        if blocks[-1] and widths[0] + sum(widths[j] for j in blocks[-1]) + widths[i] > width:
            blocks.append([])
        blocks[-1].append(i)
    return [_table(sheet, (0, *block), titled=n == 0) for n, block in enumerate(blocks)]


def _table(sheet: Sheet, columns: Sequence[int], titled: bool) -> Table:
    title = sheet.title if titled else None
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for i in columns:
        table.add_column(sheet.header[i], justify="left" if i == 0 else "right", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*(row[i] for i in columns))
    return table


def markdown(result: Result) -> str:
    """All sheets of a suite."""
    parts = [f"{sheet.title}\n\n{markdown_table(sheet)}" for sheet in sheets(result)]
    parts += [f"{row['label']} is missing: {row['missing']}" for row in result["rows"] if "missing" in row]
    return "\n\n".join(parts) + "\n"


def markdown_table(sheet: Sheet) -> str:
    """A sheet without its title."""
    rule = "|---" + "|---:" * (len(sheet.header) - 1) + "|"
    return "\n".join([_md(sheet.header), rule, *(_md(row) for row in sheet.rows)])


def _md(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def latex(result: Result) -> str:
    """All sheets of a suite, for booktabs."""
    parts: list[str] = []
    for sheet in sheets(result):
        lines = [f"% {sheet.title}", f"\\begin{{tabular}}{{@{{}}l{'r' * (len(sheet.header) - 1)}@{{}}}}", "\\toprule"]
        lines += [_tex(sheet.header), "\\midrule", *(_tex(row) for row in sheet.rows), "\\bottomrule", "\\end{tabular}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _tex(cells: Sequence[str]) -> str:
    escaped = (cell.replace("%", "\\%").replace("_", "\\_").replace("&", "\\&") for cell in cells)
    return " & ".join(escaped) + " \\\\"


def interval(value: Interval | Sequence[float], sign: bool = False, bounds: bool = True, digits: int = 1) -> str:
    """'62.1 [60.3, 63.9]' in percent; `sign` writes a plus where there is no minus, at the `bounds` too or not."""
    estimate, low, high = (value.estimate, value.low, value.high) if isinstance(value, Interval) else value
    first, others = ("+" if sign else ""), ("+" if sign and bounds else "")
    ends = ", ".join(f"{100 * end:{others}.{digits}f}" for end in (low, high))
    return f"{100 * estimate:{first}.{digits}f} [{ends}]"
