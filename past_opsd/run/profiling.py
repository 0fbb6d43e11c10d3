"""Where a run's time goes: seconds by phase, and on request a trace that chrome://tracing or Perfetto shows.

phases.json                         seconds and share of every phase
trace.json                          the phases of every cycle on a time line
operations-00001-adapt.json.gz      the operations of the first few forwards of a phase, by torch's profiler

A phase of a real model makes millions of operations, and their trace would be gigabytes; its forwards are all alike.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from past_opsd.core.files import whole, write_text
from past_opsd.policy.model import Model

PROFILED_CYCLE = 1  # the first one pays for warm-up
FORWARDS = 4  # of every phase: as many decoding steps, or forwards of the training side with what follows each of them


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
    """Writes what a clock measured into a folder, and the operations of some of one cycle's forwards."""

    def __init__(self, folder: Path, model: Model, skip: Sequence[str] = ()):
        self._folder = folder
        self._model = model
        self._skip = skip
        self._cycle: int | None = None
        self._name = ""
        self._forwards = FORWARDS
        self._traces: dict[str, profile] = {}
        self._running: profile | None = None

    @contextmanager
    def operations(self, cycle: int) -> Generator[None]:
        """Around a cycle: the profiled one is traced, phase by phase but for those to skip, and written at its end."""
        if cycle != PROFILED_CYCLE:
            yield
            return
        self._cycle = cycle
        self._model.tick = self._forward
        try:
            yield
        finally:
            self._model.tick = lambda: None
            self._cycle = None
            self._stop()
        for name, trace in self._traces.items():
            file = self._folder / f"operations-{cycle:05d}-{name}.json.gz"
            with tempfile.TemporaryDirectory(prefix="past-profile-") as scratch, whole(file) as part:
                trace.export_chrome_trace(f"{scratch}/{file.name}")  # it compresses by the name's ending
                shutil.copyfile(f"{scratch}/{file.name}", part)
        self._traces.clear()

    def phase(self, name: str) -> None:
        """A phase begins: its first forward starts a trace."""
        self._stop()
        self._name = name
        self._forwards = FORWARDS if self._cycle is None or name in self._skip else 0

    def _forward(self) -> None:
        if self._forwards == FORWARDS:
            self._stop()
            return
        if self._forwards == 0:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._running = self._traces[self._name] = profile(activities=activities)
            self._running.start()
        self._forwards += 1

    def _stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

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
