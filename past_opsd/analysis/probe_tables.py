"""The tables of `past probe`, within 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

CONDITIONS = ("matching", "removed", "shuffled")
STUDENT = "student"
DIFFERENCES = (("removed", "matching"), ("shuffled", "matching"), ("shuffled", "removed"))
SUBSETS = ("all", "correct", "failed")
METRICS = {
    "success": "success %",
    "jsd_student": "JSD student",
    "jsd_matching": "JSD matched",
    "kl": "KL student",
    "kl_successful": "KL verified",
    "p_reference": "p reference",
    "p_own": "p own",
}
SHARES = frozenset({"success", "p_reference", "p_own"})
"""Between 0 and 1."""


def show(console: Console, result: Mapping[str, Any], file: Path) -> None:
    """Two tables within 80 columns and the verdict."""
    counts, settings = result["counts"], result["settings"]
    console.print(
        f"{result['recipe']}, step {result['step']}: {counts['responses']} responses of {counts['problems']} "
        f"{settings['split']} problems,\n{counts['correct']} correct, {counts['failed']} failed; "
        f"teacher weights: {settings['teacher_adapter']}",
        highlight=False,
    )
    if settings["own_condition"] != "matching":
        other = {
            "removed": "the prompt without the attempt",
            "reference": "prompts.reference, which is none of the three",
            "other": "a prompt that is none of the three",
        }
        console.print(f"this run's own teacher reads {other[settings['own_condition']]}", highlight=False)
    if counts["dropped"]:
        console.print(f"{counts['dropped']} responses were left out: they do not fit", style="bold red")
    console.print(_table("Teacher under three prompts (95 % interval)", CONDITIONS, result["conditions"]))
    names = [f"{a}-{b}" for a, b in DIFFERENCES if b == "matching"]
    console.print(_table("Paired differences to matching (95 % interval)", names, result["differences"], sign=True))
    for line in (*_departures(result), *_styles(result)):
        console.print(line, highlight=False)
    console.print(result["verdict"], highlight=False)
    for note in result["notes"]:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    console.print(f"written: {file}", highlight=False, soft_wrap=True)


def _departures(result: Mapping[str, Any]) -> list[str]:
    """What the student itself does where a failed response first leaves the reference."""
    own = result["conditions"][STUDENT]["failed"]
    if own["p_reference"] is None:
        return []
    shown = [cell(own[metric]) for metric in ("p_reference", "p_own")]
    return [f"the student where failed responses leave the reference: p reference {shown[0]}, p own {shown[1]}"]


def _styles(result: Mapping[str, Any]) -> list[str]:
    """How the responses are written, where the task tells styles apart."""
    total = result["counts"]["responses"]
    lines = {
        name: ", ".join(f"{label} {number(count / total, percent=True)} %" for label, count in labels.items())
        for name, labels in result["styles"].items()
    }
    return [f"{name:9s} writes {line}" for name, line in lines.items() if line]


def _table(title: str, names: Sequence[str], data: Mapping[str, Any], sign: bool = False) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for subset in SUBSETS:
        table.add_row(f"[bold]{subset}[/]")
        for metric, label in METRICS.items():
            cells = (cell(data[name][subset][metric], percent=metric == "success", sign=sign) for name in names)
            table.add_row(label, *cells)
    return table


def cell(value: Mapping[str, Any] | None, percent: bool = False, sign: bool = False) -> str:
    """'78.1 [71.5, 84.4]' in percent, '.0012 [.0008, .0016]' otherwise; '-' where nothing was measured."""
    if value is None:
        return "-"
    estimate = number(value["estimate"], percent, sign)
    if value["low"] is None:
        return estimate
    low, high = (number(value[end], percent, sign) for end in ("low", "high"))
    return rf"{estimate} \[{low}, {high}]"


def number(value: float, percent: bool = False, sign: bool = False) -> str:
    """In percent with one digit; else with four, the zero before the point left out."""
    plus = "+" if sign else ""
    if percent:
        return f"{round(100 * value, 1) + 0.0:{plus}.1f}"
    return f"{round(value, 4) + 0.0:{plus}.4f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:{plus}.3f}"


def show_steps(console: Console, results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """One line a boundary."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left")
    table.title = f"{results[0]['recipe']}: success in % by step, paired differences (95 %)"
    for name in ("step", "student", "matching", "removed-matching", "shuffled-matching", "KL"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        matching, counts = result["conditions"]["matching"]["all"], result["counts"]
        table.add_row(
            str(result["step"]),
            number(counts["correct"] / counts["responses"], percent=True),
            number(matching["success"]["estimate"], percent=True),
            cell(result["differences"]["removed-matching"]["all"]["success"], percent=True, sign=True),
            cell(result["differences"]["shuffled-matching"]["all"]["success"], percent=True, sign=True),
            number(matching["kl"]["estimate"]),
        )
    console.print(table)
    for result in results:
        console.print(f"step {result['step']}: {result['verdict']}", highlight=False)
    for note in dict.fromkeys(note for result in results for note in result["notes"]):
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    console.print(f"written: {folder}", highlight=False, soft_wrap=True)
