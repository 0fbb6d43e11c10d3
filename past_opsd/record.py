"""What a run writes down: metrics, timings, rollouts, continuations.

metrics.jsonl                         one line a cycle; a function of the recipe, so two runs compare byte by byte
timings.jsonl                         seconds by phase, apart because they never repeat
rollouts/cycle-00003.parquet          the student's responses of a cycle
continuations/cycle-00003.parquet     the teacher's, with the trajectory each belongs to
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from past_opsd.loop import Cycle
from past_opsd.types import Attempt

SCHEMA = pa.schema(
    [
        ("cycle", pa.int32()),
        ("problem", pa.string()),
        ("adapter", pa.string()),
        ("version", pa.int32()),
        ("trajectory", pa.int32()),
        ("discarded", pa.bool_()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.int8())),
        ("length", pa.int32()),
        ("finished", pa.bool_()),
        ("text", pa.string()),
        ("correct", pa.bool_()),
        ("reason", pa.string()),
        ("answer", pa.string()),
        ("logprobs", pa.list_(pa.float32())),
    ]
)


class Recorder:
    """Writes a run's records and takes back those of cycles after a boundary."""

    def __init__(self, run: Path):
        self._run = run

    def cycle(self, k: int, cycle: Cycle, totals: Mapping[str, int], seconds: Mapping[str, float]) -> dict[str, float]:
        """Record cycle k; returns its metrics line."""
        attempts = list(cycle.batch.attempts)
        rollouts = [_row(k, a, cycle.versions, i, False) for i, a in enumerate(attempts)]
        failed = {id(a): i for i, a in enumerate(attempts)}
        continuations = [
            _row(k, c, cycle.versions, failed[id(a)], discarded)
            for a, d in zip(cycle.batch.failed, cycle.draws, strict=False)
            for discarded, group in ((True, d.discarded), (False, d.continuations))
            for c in group
        ]
        self._parquet("rollouts", k, rollouts)
        if continuations:
            self._parquet("continuations", k, continuations)
        line = {"cycle": k} | summarise(cycle) | dict(totals)
        self._append("metrics.jsonl", line)
        timing = {name: round(s, 4) for name, s in seconds.items()}
        self._append("timings.jsonl", {"cycle": k} | timing | {"peak_mib": round(peak_memory(), 1)})
        return line

    def rewind(self, next_cycle: int) -> None:
        """Forget everything from `next_cycle` on: a cycle after the last boundary leaves no trace."""
        for name in ("metrics.jsonl", "timings.jsonl"):
            path = self._run / name
            kept = [line for line in read_lines(path) if line["cycle"] < next_cycle]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            path.write_text(text, encoding="utf-8")
        for kind in ("rollouts", "continuations"):
            for path in (self._run / kind).glob("cycle-*.parquet"):
                if int(path.stem.rpartition("-")[2]) >= next_cycle:
                    path.unlink()
        for path in (self._run / "evaluations").glob("step-*.json"):
            if int(path.stem.rpartition("-")[2]) > next_cycle:
                path.unlink()

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self._run / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _parquet(self, kind: str, k: int, rows: Sequence[Mapping[str, Any]]) -> None:
        folder = self._run / kind
        folder.mkdir(exist_ok=True)
        table = pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)
        pq.write_table(table, folder / f"cycle-{k:05d}.parquet", compression="zstd")


def peak_memory() -> float:
    """The process's highest memory so far in MiB: resident, or on the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    unit = 1024 if sys.platform != "darwin" else 1024**2  # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file; a last line cut by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def summarise(cycle: Cycle) -> dict[str, float]:
    """The cycle's numbers beside the learner's diagnostics."""
    attempts = cycle.batch.attempts
    lengths = [len(a.response.tokens) for a in attempts]
    drawn = [c for d in cycle.draws for c in (*d.discarded, *d.continuations)]
    out: dict[str, float] = {"rollout/dropped": cycle.dropped}
    if attempts:
        out |= {
            "rollout/success": _mean([a.verdict.correct for a in attempts]),
            "rollout/mean_length": _mean(lengths),
            "rollout/truncated": _mean([not a.response.finished for a in attempts]),
        }
    out |= {f"rollout/reason/{r}": n for r, n in sorted(Counter(a.verdict.reason for a in attempts).items())}
    if cycle.draws:
        n = len(cycle.draws)
        wins = [d.successes for d in cycle.draws]
        sizes = [len(d.continuations) for d in cycle.draws]
        out |= {
            "failed/success": _mean([c.verdict.correct for c in drawn]),
            "failed/mean_length": _mean([len(c.response.tokens) for c in drawn]),
            "failed/truncated": _mean([not c.response.finished for c in drawn]),
            "failed/samples": len(drawn),
            "failed/mixed": sum(0 < w < s for w, s in zip(wins, sizes, strict=True)) / n,
            "failed/all_success": sum(w == s for w, s in zip(wins, sizes, strict=True)) / n,
            "failed/skipped": sum(d.skipped for d in cycle.draws) / n,
            "failed/retried": sum(d.retried for d in cycle.draws) / n,
        }
    return out | cycle.metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _row(k: int, a: Attempt, versions: Mapping[Any, int], trajectory: int, discarded: bool) -> dict[str, Any]:
    return {
        "cycle": k,
        "problem": a.problem.id,
        "adapter": a.view.adapter,
        "version": versions[a.view.adapter],
        "trajectory": trajectory,
        "discarded": discarded,
        "prompt_tokens": list(a.view.prompt),
        "tokens": list(a.response.tokens),
        "mask": [1] * len(a.response.tokens),
        "length": len(a.response.tokens),
        "finished": a.response.finished,
        "text": a.response.text,
        "correct": a.verdict.correct,
        "reason": a.verdict.reason,
        "answer": a.verdict.answer,
        "logprobs": list(a.response.logprobs),
    }
