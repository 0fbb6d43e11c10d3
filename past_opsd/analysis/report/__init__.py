"""`past report`: runs as one self-contained HTML file with figures, tables and a browser of trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from past_opsd.analysis.report import data, figures, page, trajectories
from past_opsd.analysis.report.data import Run
from past_opsd.core.files import write_text

TRAJECTORIES = 12


def render(runs: Sequence[Run], *, trajectories: int = TRAJECTORIES, live: bool = False) -> str:
    """The report of one run or of many as HTML, with `trajectories` attempts of one run of each method.

    A `live` one is for `past watch`: it may ask its server for news.
    """
    return _render(runs, trajectories, None, False, live)


def write(
    runs: Sequence[Run], out: Path, *, trajectories: int = TRAJECTORIES, figures: bool = True, trust: bool = False
) -> Path:
    """Write the report to `out`, whole or not at all; `figures` puts SVG and PDF files into `figures/` beside it.

    Code that the runs' recipes name is run, for the trajectories, only with `trust`.
    """
    write_text(out, _render(runs, trajectories, out.parent / "figures" if figures else None, trust))
    return out


def _render(runs: Sequence[Run], count: int, folder: Path | None, trust: bool, live: bool = False) -> str:
    methods = data.methods(runs)
    found = figures.figures(list(runs))
    files: Mapping[str, list[str]] = {}
    if folder is not None:
        files = {f.name: [f"{folder.name}/{path.name}" for path in figures.save(f, folder)] for f in found}
    browser = trajectories.collect(methods, count, trust)
    return page.page(page.Content(list(runs), methods, found, browser, files), live)
