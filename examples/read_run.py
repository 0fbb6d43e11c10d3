"""Reading a run: its records as tables, in Arrow or in pandas.

python examples/read_run.py RUN
"""

from __future__ import annotations

import sys

import pyarrow.compute as pc

import past_opsd as past


def main(folder: str) -> None:
    """Print what happened, table by table."""
    run = past.open_run(folder)
    print(f"{run.recipe.name}: {run.completed} of {run.recipe.run.cycles} cycles")
    print("metrics of a cycle:", *run.metrics().column_names)
    macro = run.scores().filter(pc.field("task") == "macro")
    print("Avg@k by boundary:", dict(zip(macro["step"].to_pylist(), macro.column(2).to_pylist(), strict=True)))
    by_problem = run.evaluations().group_by(["step", "problem"]).aggregate([("correct", "mean")])
    never = by_problem.filter((pc.field("step") == run.completed) & (pc.field("correct_mean") == 0))
    print(f"{never.num_rows} held-out problems are never solved, e.g. {never['problem'].to_pylist()[:3]}")
    reasons = run.rollouts().group_by(["reason"]).aggregate([("length", "mean"), ("length", "count")])
    print("the student's responses:", reasons.to_pylist())
    print("the teacher's continuations:", run.continuations().num_rows)
    print("cost at the end:", run.costs().slice(run.completed - 1).to_pylist())


if __name__ == "__main__":
    main(*sys.argv[1:])
