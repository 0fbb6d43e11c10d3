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

from past_opsd.files import append, own, sweep, sync, whole, writing
from past_opsd.loop import Cycle
from past_opsd.reading import read_bytes
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


LINES = ("metrics.jsonl", "timings.jsonl")


class Recorder:
    """Writes a run's records and takes back those of cycles after a boundary."""

    def __init__(self, run: Path):
        self._run = run

    def cycle(self, k: int, cycle: Cycle, totals: Mapping[str, int], seconds: Mapping[str, float]) -> dict[str, float]:
        """Record cycle k; returns its metrics line."""
        rollouts = [_row(k, a, cycle.versions, i, False) for i, a in enumerate(cycle.batch.attempts)]
        continuations = [
            _row(k, c, cycle.versions, trajectory, discarded)
            for trajectory, group in enumerate(cycle.groups, len(cycle.batch.correct))  # failed ones come last
            for discarded, drawn in ((True, group.discarded), (False, group.continuations))
            for c in drawn
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
        for name in ("", "rollouts", "continuations", "evaluations", "profile"):
            sweep(self._run / name)
        for name in LINES:
            if os.path.lexists(self._run / name):
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
        append(path, json.dumps(line) + "\n")
        with writing(path):
            sync(path)  # the checkpoint that follows is on the disk, and this must be there before it

    def _parquet(self, kind: str, k: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)
        with whole(self._run / kind / f"cycle-{k:05d}.parquet") as part:
            pq.write_table(table, part, compression="zstd")


def _cut(path: Path, next_cycle: int) -> None:
    """Shorten, not write anew: a kill here must not cost the lines that stay."""
    with writing(path):
        own(path)
    end = 0
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        if line and _parse(path, number, line)["cycle"] >= next_cycle:
            break
        end += len(line) + 1
    with writing(path):
        os.truncate(path, end)


def _number(path: Path) -> int:
    """The cycle or boundary a file is of; one that a person put there under another name is of none."""
    found = re.fullmatch(r"(?:cycle|step)-([0-9]{5}|[1-9][0-9]{5,})", path.stem)
    return int(found[1]) if found and (path.is_file() or path.is_symlink()) else -1


def lost(run: Path, cycles: int) -> list[str]:
    """What of a run's first `cycles` cycles is not in its records any more, a line for each of them."""
    metrics, timings = (read_lines(run / name) for name in LINES)
    found = [_gap(name, set(range(cycles)) - _of(lines)) for name, lines in zip(LINES, (metrics, timings), strict=True)]
    twice = {k for k, times in Counter(line["cycle"] for line in metrics).items() if times > 1}
    found.append(f"metrics.jsonl has {_cycles(twice)} more than once" if twice else "")
    drawn = _of([line for line in metrics if line.get("failed/samples")])
    for kind, wanted in (("rollouts", range(cycles)), ("continuations", drawn & set(range(cycles)))):
        files = {k: run / kind / f"cycle-{k:05d}.parquet" for k in wanted}
        found.append(_gap(f"{kind}/", {k for k, file in files.items() if not file.exists()}))
        cut = {k for k, file in files.items() if file.exists() and not _is_parquet(file)}
        found.append(f"{kind}/: {_cycles(cut)} cannot be read" if cut else "")
    return [line for line in found if line]


def _of(lines: Sequence[Mapping[str, Any]]) -> set[int]:
    return {line["cycle"] for line in lines}


def _gap(name: str, cycles: set[int]) -> str:
    return f"{name} lacks {_cycles(cycles)}" if cycles else ""


def _cycles(numbers: set[int]) -> str:
    """{0, 1, 2, 5} as 'cycles 0-2, 5'."""
    runs: list[list[int]] = []
    for k in sorted(numbers):
        if runs and runs[-1][-1] == k - 1:
            runs[-1].append(k)
        else:
            runs.append([k])
    shown = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
    return f"cycle{'s' if len(numbers) > 1 else ''} {shown}"


def _is_parquet(file: Path) -> bool:
    """Whether both ends are those of a Parquet file, which is what a cut costs."""
    if not file.is_file():
        return False
    with file.open("rb") as source:
        head = source.read(4)
        source.seek(-min(4, file.stat().st_size), os.SEEK_END)
        return head == source.read(4) == b"PAR1" and file.stat().st_size > 8


def peak_memory() -> float:
    """The process's highest memory so far in MiB: resident, or on the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    unit = 1024 if sys.platform != "darwin" else 1024**2  # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file; a last line cut by a kill is left out."""
    if not os.path.lexists(path):
        return []
    lines = read_bytes(path).split(b"\n")
    return [_parse(path, number, line) for number, line in enumerate(lines[:-1], 1) if line]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    found: Any = None
    try:
        found = json.loads(line)
        wrong = _wrong(found)
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong:
        raise PastError(f"{path}:{number}: not a line that a run wrote ({wrong:.200}); mend it or delete it")
    return found


def _wrong(line: Any) -> str:
    """What a line has that no run writes; numbers that are not finite may stand there."""
    if not isinstance(line, dict):
        return "not an object"
    cycle = line.get("cycle")
    if type(cycle) is not int or not 0 <= cycle < 10**9:
        return "it does not say of which cycle it is"
    for key, value in line.items():
        if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= 2**63):
            return f"{key!a:.80} is no number"
        if not key.isprintable() or len(key) > 200:
            return f"{key!a:.80} is no name"
    return ""


def summarise(cycle: Cycle) -> dict[str, float]:
    """The cycle's numbers beside the learner's diagnostics."""
    attempts = cycle.batch.attempts
    lengths = [len(a.response.tokens) for a in attempts]
    drawn = [c for group in cycle.groups for c in group.drawn]
    out: dict[str, float] = {"rollout/dropped": cycle.dropped}
    if attempts:
        out |= {
            "rollout/success": _mean([a.verdict.correct for a in attempts]),
            "rollout/mean_length": _mean(lengths),
            "rollout/truncated": _mean([not a.response.finished for a in attempts]),
            "rollout/empty": _mean([not a.response.text.strip() for a in attempts]),
        }
    out |= {f"rollout/reason/{r}": n for r, n in sorted(Counter(a.verdict.reason for a in attempts).items())}
    if cycle.groups:
        n = len(cycle.groups)
        out |= {
            "failed/success": _mean([c.verdict.correct for c in drawn]),
            "failed/mean_length": _mean([len(c.response.tokens) for c in drawn]),
            "failed/truncated": _mean([not c.response.finished for c in drawn]),
            "failed/samples": len(drawn),
            "failed/mixed": sum(group.mixed for group in cycle.groups) / n,
            "failed/all_success": sum(group.successes == group.continuations for group in cycle.groups) / n,
            "failed/skipped": sum(not group.active for group in cycle.groups) / n,
            "failed/retried": sum(group.retried for group in cycle.groups) / n,
        }
        out |= {f"failed/reason/{r}": n for r, n in sorted(Counter(c.verdict.reason for c in drawn).items())}
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
