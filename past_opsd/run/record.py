"""What a cycle leaves in a run's folder: metrics, timings, rollouts, continuations; and what of it is lost."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from past_opsd.run.attempts import Row, row
from past_opsd.run.folder import (
    METRICS,
    PREPARATION,
    TIMINGS,
    RunFolder,
    Series,
    file_digest,
    line_digest,
    line_name,
)
from past_opsd.run.loop import Cycle


class Recorder:
    """Writes a run's records down, cycle by cycle, and a digest of each.

    Responses are written beside the next cycle. `settle` waits for them: before a checkpoint, which has their digests,
    and before the next cycle's, so that never more than two cycles' responses are held.
    """

    def __init__(self, run: RunFolder, digests: dict[str, str], processes: int = 1):
        self._run = run
        self._digests = digests
        self._processes = processes
        self._writer = ThreadPoolExecutor(1, "records")
        self._writing: dict[str, Future[str]] = {}

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.shutdown(cancel_futures=error[0] is not None)
        if error[0] is None:
            self.settle()

    def settle(self) -> None:
        """Wait until what was recorded is on the disk; what could not be written is raised here."""
        writing, self._writing = self._writing, {}
        for name, digest in writing.items():
            self._digests[name] = digest.result()

    def cycle(self, k: int, cycle: Cycle, totals: Mapping[str, int], seconds: Mapping[str, float]) -> dict[str, float]:
        """Record cycle k; returns its metrics line."""
        self.settle()
        self._write(self._run.rollouts, k, _rollouts(k, cycle))
        if cycle.groups:
            self._write(self._run.continuations, k, _continuations(k, cycle))
        line = {"cycle": k} | summarise(cycle) | dict(totals)
        self._run.add_line(self._run.metrics_file, line)
        self._digests[line_name(k)] = line_digest(line)
        self.time(k, seconds)
        return line

    def prepared(self, seconds: Mapping[str, float]) -> None:
        """What came before the first cycle took, once."""
        if seconds and not any(line["cycle"] == PREPARATION for line in self._run.read_timings()):
            self.time(PREPARATION, seconds)

    def time(self, k: int, seconds: Mapping[str, float]) -> None:
        """Seconds by phase of cycle k, on how many processes, and the memory so far."""
        timing = {name: round(s, 4) for name, s in seconds.items()}
        about = {"processes": self._processes, "peak_mib": round(peak_memory(), 1)}
        self._run.add_line(self._run.timings_file, {"cycle": k} | timing | about)

    def _write(self, series: Series, k: int, rows: Iterable[Row]) -> None:
        def write() -> str:
            self._run.write_attempts(series, k, rows)
            return file_digest(series.path(k))

        self._writing[self._run.name(series.path(k))] = self._writer.submit(write)


def _rollouts(k: int, cycle: Cycle) -> Iterator[Row]:
    taught = cycle.batch.attempts
    for i, (attempt, start) in enumerate(zip(taught, cycle.starts, strict=True)):
        yield row(k, attempt, cycle.versions, i, False, start)
    for i, attempt in enumerate(cycle.replaced, len(taught)):
        yield row(k, attempt, cycle.versions, i, True)


def _continuations(k: int, cycle: Cycle) -> Iterator[Row]:
    rest = iter(enumerate(cycle.batch.attempts))  # groups come in the order of their attempts
    for group in cycle.groups:
        trajectory = next(i for i, a in rest if a is group.attempt)
        for discarded, drawn in ((True, group.discarded), (False, group.continuations)):
            for c in drawn:
                yield row(k, c, cycle.versions, trajectory, discarded)


def lost(run: RunFolder, cycles: int) -> list[str]:
    """What of a run's first `cycles` cycles is not in its records any more, a line for each of them."""
    metrics, timings = run.read_metrics(), run.read_timings()
    every = set(range(cycles))
    found = [_gap(name, every - _of(lines)) for name, lines in ((METRICS, metrics), (TIMINGS, timings))]
    twice = {k for k, times in Counter(line["cycle"] for line in metrics).items() if times > 1}
    found.append(f"{METRICS} has {_cycles(twice)} more than once" if twice else "")
    drawn = _of([line for line in metrics if line.get("failed/samples")])
    for series, wanted in ((run.rollouts, every), (run.continuations, drawn & every)):
        files = {k: series.path(k) for k in sorted(wanted)}
        name = f"{series.folder.name}/"
        found.append(_gap(name, {k for k, file in files.items() if not file.exists()}))
        cut = {k for k, file in files.items() if file.exists() and not _is_parquet(file)}
        found.append(f"{name}: {_cycles(cut)} cannot be read" if cut else "")
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


def summarise(cycle: Cycle) -> dict[str, float]:
    """The cycle's numbers beside the learner's diagnostics."""
    attempts = cycle.sampled
    lengths = [len(a.response.tokens) for a in attempts]
    drawn = [c for group in cycle.groups for c in group.drawn]
    out: dict[str, float] = {"rollout/sampled": len(attempts), "rollout/dropped": cycle.dropped}
    if cycle.replaced:
        out["rollout/replaced"] = len(cycle.replaced)
    if attempts:
        out |= {
            "rollout/success": _mean([a.verdict.correct for a in attempts]),
            "rollout/mean_length": _mean(lengths),
            "rollout/truncated": _mean([not a.response.finished for a in attempts]),
            "rollout/empty": _mean([not a.response.text.strip() for a in attempts]),
        }
    out |= {f"rollout/reason/{r}": n for r, n in sorted(Counter(a.verdict.reason for a in attempts).items())}
    if cycle.groups or cycle.unexplored:
        out["failed/unexplored"] = cycle.unexplored
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
