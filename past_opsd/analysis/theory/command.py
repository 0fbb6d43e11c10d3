"""`past theory`: the checks as a table or as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from past_opsd.analysis.theory.check import EXACT, SEARCHED, Check


def report(found: Sequence[Check], seed: int) -> dict[str, object]:
    """The checks as plain values; a number that is not finite is null."""
    rows = [{key: _plain(value) for key, value in asdict(check).items()} | {"ok": check.ok} for check in found]
    return {"seed": seed, "ok": all(check.ok for check in found), "statements": rows}


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(console: Console, found: Sequence[Check]) -> None:
    """The table, grouped by result, and the closing lines."""
    console.print(table(found))
    failed = [check for check in found if not check.ok]
    for check in failed:
        console.print(f"does not hold: {check.label}: {check.statement}", markup=False, highlight=False, emoji=False)
    console.print(closing(found), markup=False, highlight=False, emoji=False)


def table(found: Sequence[Check]) -> Table:
    """For a screen of 80 columns; a statement that does not hold is marked."""
    sheet = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    sheet.add_column("statement", overflow="fold")
    for name in ("left", "", "right", "residual"):
        sheet.add_column(name, justify="center" if not name else "right", no_wrap=True)
    for label, group in groupby(found, key=lambda check: check.label):
        sheet.add_row(Text(label, style="bold"))
        for check in group:
            sides = f"{check.left:#.4g}", check.relation, f"{check.right:#.4g}"
            size = f"{check.residual:.1e}" if check.ok else f"[bold red]{check.residual:.1e}![/bold red]"
            sheet.add_row(Padding(Text(check.statement), (0, 0, 0, 1)), *sides, size)
    return sheet


def closing(found: Sequence[Check]) -> str:
    """How many statements, and the largest residual of those that are exact and of those that were searched for."""
    exact, searched = (_largest(check for check in found if check.exact is kind) for kind in (True, False))
    failed = sum(not check.ok for check in found)
    return (
        f"{len(found)} statements, largest residual {exact:.1e} (exact, limit {EXACT:.0e}), "
        f"{searched:.1e} (numeric search, limit {SEARCHED:.0e})" + (f"; {failed} do not hold" if failed else "")
    )


def _largest(found: Iterable[Check]) -> float:
    return max((check.residual for check in found), default=0.0)
