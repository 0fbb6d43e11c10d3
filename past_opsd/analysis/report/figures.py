"""Every figure of the report that a set of runs supports."""

from __future__ import annotations

from collections.abc import Sequence

from past_opsd.analysis.report import cost, cycle, data, learning, privilege, teaching
from past_opsd.analysis.report.data import Run
from past_opsd.analysis.report.panels import Figure, Panel, save, svg

__all__ = ["SECTIONS", "Figure", "Panel", "figures", "save", "svg"]

SECTIONS = {
    "learning": "Learning",
    "answers": "Answers",
    "teacher": "Teacher mechanism",
    "objectives": "Objectives",
    "sampling": "Sampling",
    "privilege": "Privilege",
    "cost": "Cost",
    "cycle": "The cycle",
    "health": "Health",
}
"""Name -> title, in report order; the answers and the health warnings stand there without a figure, too."""


def figures(runs: Sequence[Run]) -> list[Figure]:
    """Those that the records support, in report order."""
    methods = data.methods(runs)
    makers = (
        learning.dynamics,
        learning.changes,
        teaching.mechanism,
        teaching.dynamics,
        learning.positions,
        teaching.objectives,
        teaching.sampling,
        teaching.privilege,
        privilege.decomposition,
        cost.accounting,
        cycle.method,
        learning.health,
        teaching.forks,
    )
    return [figure for maker in makers if (figure := maker(methods)) is not None]
