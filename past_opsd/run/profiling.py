"""Where a run's time goes: seconds by phase, and on request a trace that chrome://tracing or Perfetto shows.

phases.json                 seconds and share of every phase
trace.json                  the phases of every cycle on a time line
operations-00001.json.gz    every operation of one cycle, by torch's profiler
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from past_opsd.core.files import whole, write_text

PROFILED_CYCLE = 1  # the first one pays for warm-up


class Clock:
    """Charges time to one name at a time: a phase until the next one, a span inside it to itself.

    `now` may be `time.process_time`: then other load on the machine does not count.
    """

    def __init__(
        self,
        notify: Callable[[int, str], None] = lambda cycle, name: None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self.cycle = 0
        self.events: list[tuple[str, int, float, float]] = []  # name, cycle, start, seconds
        self._notify = notify
        self._now = now
        self._name: str | None = None
        self._since = 0.0

    def phase(self, name: str) -> None:
        """The phase before ends here and this one begins."""
        self._switch(name)
        self._notify(self.cycle, name)

    def stop(self) -> None:
        """The current phase ends."""
        self._switch(None)

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """A piece of work inside a phase, charged to its own name."""
        outer = self._name
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str | None) -> None:
        now = self._now()
        if self._name is not None:
            self.events.append((self._name, self.cycle, self._since, now - self._since))
        self._name, self._since = name, now

    def seconds(self, cycle: int) -> dict[str, float]:
        """Seconds by name within one cycle."""
        out: dict[str, float] = defaultdict(float)
        for name, k, _, seconds in self.events:
            if k == cycle:
                out[name] += seconds
        return dict(out)


class Profile:
    """Writes what a clock measured into a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def operations(self, cycle: int) -> Any:
        """A context that traces every operation of the profiled cycle, and does nothing around the others."""
        return self._trace(cycle) if cycle == PROFILED_CYCLE else nullcontext()

    @contextmanager
    def _trace(self, cycle: int) -> Generator[None]:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        with profile(activities=activities) as tracer:
            yield
        file = self._folder / f"operations-{cycle:05d}.json.gz"
        with tempfile.TemporaryDirectory(prefix="past-profile-") as scratch, whole(file) as part:
            tracer.export_chrome_trace(f"{scratch}/{file.name}")  # it compresses by the name's ending
            shutil.copyfile(f"{scratch}/{file.name}", part)

    def write(self, clock: Clock) -> None:
        """The breakdown and the time line of this process's part of the run."""
        totals: dict[str, float] = defaultdict(float)
        for name, _, _, seconds in clock.events:
            totals[name] += seconds
        whole = sum(totals.values()) or 1.0
        plain = {name: {"seconds": round(s, 4), "share": round(s / whole, 4)} for name, s in ranked(totals)}
        write_text(self._folder / "phases.json", json.dumps(plain, indent=1) + "\n")
        origin = clock.events[0][2] if clock.events else 0.0
        trace = [
            {
                "name": name,
                "cat": "phase",
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": round(1e6 * (start - origin), 1),
                "dur": round(1e6 * seconds, 1),
                "args": {"cycle": cycle},
            }
            for name, cycle, start, seconds in clock.events
        ]
        write_text(self._folder / "trace.json", json.dumps({"traceEvents": trace}) + "\n")


def ranked(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """The most expensive first."""
    return sorted(seconds.items(), key=lambda item: -item[1])


def totals(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by phase over the lines of a timings.jsonl."""
    out: dict[str, float] = defaultdict(float)
    for line in lines:
        for name, value in line.items():
            if name not in ("cycle", "processes", "peak_mib") and 0 <= value < 1e15:
                out[name] += value
    return dict(out)


def verdict(lines: Sequence[Mapping[str, float]]) -> str:
    """The phase that dominates, in words; empty where nothing was timed."""
    by_phase = totals(lines)
    whole = sum(by_phase.values())
    if not whole:
        return ""
    shares = [f"{name} {100 * s / whole:.0f} %" for name, s in ranked(by_phase) if s >= 0.01 * whole]
    return f"{whole:.1f} s in cycles: {', '.join(shares)}"
