"""What a run writes down: metrics, timings, rollouts, continuations.

metrics.jsonl                         one line a cycle; a function of the recipe, so two runs compare byte by byte
timings.jsonl                         seconds by phase, apart because they never repeat
rollouts/cycle-00003.parquet          the student's responses of a cycle
continuations/cycle-00003.parquet     the teacher's, with the trajectory each belongs to
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from past_opsd.files import sync, whole, writing
from past_opsd.loop import Cycle
from past_opsd.types import Attempt, PastError

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
            if (self._run / name).exists():
                _cut(self._run / name, next_cycle)
        for kind in ("rollouts", "continuations"):
            for path in (self._run / kind).glob("cycle-*.parquet"):
                if _number(path) >= next_cycle:
                    path.unlink()
        for path in (self._run / "evaluations").glob("step-*.json"):
            if _number(path) > next_cycle:
                path.unlink()

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        path = self._run / name
        with writing(path):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            sync(path)  # the checkpoint that follows is on the disk, and this must be there before it

    def _parquet(self, kind: str, k: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)
        with whole(self._run / kind / f"cycle-{k:05d}.parquet") as part:
            pq.write_table(table, part, compression="zstd")


def _cut(path: Path, next_cycle: int) -> None:
    """Shorten, not write anew: a kill here must not cost the lines that stay."""
    end = 0
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        if line and _parse(path, number, line)["cycle"] >= next_cycle:
            break
        end += len(line) + 1
    with writing(path):
        os.truncate(path, end)


def _number(path: Path) -> int:
    """The cycle or boundary a file is of; one that a person put there under another name is of none."""
    found = re.fullmatch(r"(?:cycle|step)-([0-9]+)", path.stem)
    return int(found[1]) if found else -1


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
    lines = path.read_bytes().split(b"\n")
    return [_parse(path, number, line) for number, line in enumerate(lines[:-1], 1) if line]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PastError(f"{path}:{number}: not a line that a run wrote ({error}); mend it or delete it") from None
    if not isinstance(found, dict) or not isinstance(found.get("cycle"), int):
        raise PastError(f"{path}:{number}: not a line that a run wrote; mend it or delete it")
    return found


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
