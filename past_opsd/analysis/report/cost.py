"""What the runs cost: time by phase, generated work by role, verifier calls, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from past_opsd.analysis import tables
from past_opsd.analysis.report import data
from past_opsd.analysis.report.data import Method
from past_opsd.analysis.report.panels import WIDTH, Figure, Panel
from past_opsd.analysis.report.style import (
    NEUTRAL,
    NEUTRAL_SOFT,
    STUDENT,
    STUDENT_SOFT,
    TEACHER,
    TEACHER_SOFT,
    bar_height,
    draw_stacks,
    looks,
)

ROLES = {"student": "student", "teacher": "teacher", "phase1": "phase 1"}
NEGLIGIBLE = 0.001
ROLE_COLOURS = {"student": STUDENT, "teacher": TEACHER, "phase 1": NEUTRAL}
# In the order of a cycle: the student's phases in slate, the teacher's in sand, what is neither in grey.
PHASES = {
    "phase1": NEUTRAL_SOFT,
    "rollout": STUDENT,
    "verify": NEUTRAL,
    "draw": TEACHER,
    "adapt": TEACHER_SOFT,
    "distill": STUDENT_SOFT,
    "publish": NEUTRAL_SOFT,
    "identity": NEUTRAL_SOFT,
    "prepare": NEUTRAL_SOFT,
}


def accounting(methods: Sequence[Method]) -> Figure | None:
    """[tab:cost-accounting] as bars, with the table beneath."""
    by_name = looks(methods)
    rows = {m.label: row for m in methods if (row := data.measured(m)) is not None}
    if not rows:
        return None
    labels = list(rows)
    colours = [by_name[m.name].colour for m in methods if m.label in rows]
    phases = {m.label: data.phases(m) for m in methods if m.label in rows}
    total = sum(sum(values.values()) for values in phases.values())
    names = dict.fromkeys([*PHASES, *(name for values in phases.values() for name in values)])
    shown = [n for n in names if sum(values.get(n, 0.0) for values in phases.values()) > NEGLIGIBLE * total]
    seconds = {name: [phases[label].get(name, 0.0) for label in labels] for name in shown}
    costs = [rows[label].costs for label in labels]
    samples = _by_role(costs, "samples")
    tokens = {role: [v / 1000 for v in values] for role, values in _by_role(costs, "tokens").items()}
    bars = partial(_bars, labels=labels, colours=colours)
    hues = [PHASES.get(name, NEUTRAL) for name in seconds]
    note = "Wall-clock seconds of the machine that trained, by phase; evaluation is not counted."
    panels = [bars("seconds", "Training time by phase", note, parts=seconds, unit="seconds", form="{:.1f}", hues=hues)]
    roles = partial(bars, hues=[ROLE_COLOURS[name] for name in tokens])
    if tokens:
        note = "Tokens that were sampled in training."
        panels.append(roles("tokens", "Generated tokens by role", note, parts=tokens, unit="thousand", form="{:,.1f}"))
    if samples:
        note = "Responses of the student and continuations of the teacher."
        panels.append(
            roles("samples", "Generated samples by role", note, parts=samples, unit="samples", form="{:,.0f}")
        )
    calls = {"verifier calls": [c["verifier_calls"] for c in costs]}
    if any(calls["verifier calls"]):
        note = "Answers that were verified in training."
        panels.append(bars("verifier", "Verifier calls", note, parts=calls, unit="calls", form="{:,.0f}"))
    peak = {"peak memory": [c["peak_mib"] for c in costs]}
    memory = bars("memory", "Peak memory", "Of the process that trained.", parts=peak, unit="MiB", form="{:,.0f}")
    panels.append(replace(memory, table=_table(rows)))
    several = any(len(m.runs) > 1 for m in methods)
    caption = (
        f"What training cost{', means over seeds' if several else ''}. The last table has all costs together: "
        f"{tables.COST_NOTE}."
    )
    return Figure("cost", "tab:cost-accounting", "What training cost", caption, panels, "cost")


def _by_role(costs: Sequence[dict[str, float]], what: str) -> dict[str, list[float]]:
    found = {name: [c.get(f"{role}_{what}", 0.0) for c in costs] for role, name in ROLES.items()}
    return {name: values for name, values in found.items() if any(values)}


def _bars(
    slug: str,
    title: str,
    note: str,
    labels: Sequence[str],
    colours: Sequence[str],
    parts: dict[str, list[float]],
    unit: str,
    form: str,
    hues: Sequence[str] = (),
) -> Panel:
    header = ["Method", *parts, *(["total"] if len(parts) > 1 else [])]
    cells: list[list[str]] = []
    for i, label in enumerate(labels):
        values = [part[i] for part in parts.values()]
        values += [sum(values)] if len(parts) > 1 else []
        cells.append([label, *(form.format(v) for v in values)])
    used = colours if len(parts) == 1 else hues
    draw = partial(draw_stacks, labels=labels, parts=parts, x=unit, form=form, colours=used)
    return Panel(f"cost-{slug}", title, draw, (header, cells), note, (WIDTH, bar_height(len(labels))))


def _table(rows: dict[str, data.suite.Row]) -> tuple[list[str], list[list[str]]]:
    sheet = tables.cost_table({label: row.costs for label, row in rows.items()})
    return list(sheet.header), [list(row) for row in sheet.rows]
