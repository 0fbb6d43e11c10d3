"""`past report`: runs as one self-contained HTML file with figures, tables and a browser of trajectories."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from past_opsd.analysis.report import data, figures, page, trajectories
from past_opsd.analysis.report.data import Run
from past_opsd.core import arguments
from past_opsd.core.files import write_text
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import room
from past_opsd.run.folder import RunFolder

TRAJECTORIES = arguments.TRAJECTORIES


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


add_arguments = arguments.report


def run(args: argparse.Namespace) -> int:
    """`past report`."""
    if args.trajectories < 0:
        raise PastError(f"--trajectories {args.trajectories}: give 0 or more")
    if args.out is None and len(args.runs) > 1:
        raise PastError("several folders were given: say with --out FILE.html where the report shall go")
    out = args.out or RunFolder(args.runs[0]).page
    if out.is_dir():
        raise PastError(f"--out {out} is a folder; give the name of a file, e.g. {out / 'index.html'}")
    if args.out is not None:
        room(out, ours=page.is_page)
    began = time.monotonic()
    for folder in args.runs:
        RunFolder(folder).enclosed()
    runs = data.find(args.runs, lambda text: print(f"note: {text}", file=sys.stderr))
    write(runs, out, trajectories=args.trajectories, figures=args.figures, trust=args.trust)
    size = out.stat().st_size / 1e6
    print(f"{out}: {len(runs)} run{'s' if len(runs) > 1 else ''}, {size:.2f} MB, {time.monotonic() - began:.1f} s")
    return 0
