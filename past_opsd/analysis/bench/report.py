"""`past bench report`: time and memory of `past report` on a long run with many responses a cycle.

Two cycles of PAST are trained for real; the run is made long by repeating their records, which a report reads as any
other.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from past_opsd.analysis.bench.startup import measure
from past_opsd.core import config
from past_opsd.core.nouns import PastError
from past_opsd.run.folder import RunFolder

RECIPE = "embedded/past"
SAMPLES = 8


def run(args: argparse.Namespace) -> int:
    """Make the run in a folder that is deleted afterwards, and report it in a process of its own."""
    if args.cycles < 2 or args.responses < SAMPLES or args.responses % SAMPLES:
        raise PastError(f"give --cycles 2 or more, and --responses as a multiple of {SAMPLES}")
    with tempfile.TemporaryDirectory(prefix="past-bench-report-") as place:
        folder = Path(place) / "run"
        size = make(folder, args.cycles, args.responses)
        page = Path(place) / "page.html"
        began = time.perf_counter()
        seconds, memory = measure(["report", str(folder), "--out", str(page)])
        wall = time.perf_counter() - began
        print(f"{args.cycles:,} cycles of {args.responses:,} responses, {size / 1e6:,.0f} MB of records")
        shown = f"{memory / 2**20:,.0f} MiB, page {page.stat().st_size / 1e6:.2f} MB"
        print(f"the report: {seconds:.1f} s of CPU, {wall:.1f} s, {shown}")
    return 0


def make(folder: Path, cycles: int, responses: int) -> int:
    """A run of so many cycles; the size of its records."""
    sizes = [f"rollout.problems_per_cycle={responses // SAMPLES}", f"rollout.samples_per_problem={SAMPLES}"]
    settings = ["run.cycles=2", "run.checkpoint_every=1", "evaluation.at=[0.0, 1.0]", *sizes]
    # In a process of its own: what this one held would count as the memory of those that it starts.
    measure(["train", RECIPE, "--out", str(folder), *(word for setting in settings for word in ("--set", setting))])
    run = RunFolder(folder)
    metrics, timings = run.read_metrics(), [line for line in run.read_timings() if line["cycle"] >= 0]
    for k in range(2, cycles):
        run.add_line(run.metrics_file, metrics[k % 2] | {"cycle": k})
        run.add_line(run.timings_file, timings[k % 2] | {"cycle": k})
        for series in (run.rollouts, run.continuations):
            if series.path(k % 2).is_file():
                shutil.copy(series.path(k % 2), series.path(k))
    run.write_recipe(config.load(RECIPE, [*settings, f"run.cycles={cycles}"]))
    return sum(file.stat().st_size for file in folder.rglob("*.parquet"))
