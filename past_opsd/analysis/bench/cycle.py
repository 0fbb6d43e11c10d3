"""`past bench cycle`: a recipe's cycles with `rollout.stream` and without, taking turns.

Both sides draw the same tokens and move the same adapters, which is compared; what differs is when things are done.
What can be gained are pauses: the engine waits for verdicts, or decodes the last few of a round. `--verdict` makes each
verdict take longer, as that of a program that is run does; `--base 1` draws continuations one at a time in more rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from past_opsd.core import config
from past_opsd.core.nouns import Closing, PastError, Problem, Response, Verdict
from past_opsd.rollout.verifiers import Verifier
from past_opsd.run.profiling import Clock
from past_opsd.run.train import Session, session

NAMES = ("phased", "streaming")
PHASES = ("sampling", "verify", "adapt", "distill")


class Late(Closing):
    """A verifier whose verdicts take so much longer each, in so many processes; nothing is computed meanwhile."""

    apart = True

    def __init__(self, real: Verifier, seconds: float, processes: int):
        self._real, self._seconds, self._processes = real, seconds, processes
        self.identity = real.identity

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        time.sleep(self._seconds * -(-len(items) // self._processes))
        return self._real.verify(items)

    def close(self) -> None:
        self._real.close()


@dataclass
class Side:
    """One of the two: wall-clock seconds and CPU seconds of each cycle, and seconds of each cycle by phase."""

    session: Session
    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    phases: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def cycle(self, k: int) -> None:
        """One more."""
        clock = Clock()
        self.session.loop.lab.span = clock.span
        wall, cpu = time.perf_counter(), time.process_time()
        self.session.loop.cycle(k, clock.phase)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        clock.stop()
        found = clock.seconds(0)
        found["sampling"] = found.get("rollout", 0.0) + found.get("draw", 0.0)
        self.phases.append(found)

    @property
    def seconds(self) -> float:
        """Of a cycle, the median."""
        return statistics.median(self.wall)

    @property
    def adapters(self) -> list[str]:
        return [self.session.model.fingerprint(adapter) for adapter in ("student", "teacher")]


def run(args: argparse.Namespace) -> int:
    """Print the table and the ratio."""
    if min(args.cycles, args.judges, args.threads) < 1 or args.verdict < 0:
        raise PastError("--cycles, --judges and --threads are 1 or more, --verdict is 0 or more")
    with ExitStack() as stack:
        sides = [Side(stack.enter_context(_session(args, stream))) for stream in (False, True)]
        for side in sides:
            _prepare(side.session, args)
            side.cycle(0)  # the first warms up
            for kept in (side.wall, side.cpu, side.phases):
                kept.clear()
        for k in range(1, args.cycles + 1):
            for side in sides if k % 2 else sides[::-1]:
                side.cycle(k)
        if sides[0].adapters != sides[1].adapters:
            raise PastError("the two sides did not make the same adapters, so their times cannot be compared")
        print(report(sides, args))
    return 0


def _session(args: argparse.Namespace, stream: bool) -> AbstractContextManager[Session]:
    own = [f"rollout.stream={str(stream).lower()}", f"run.threads={args.threads}"]
    return session(config.load(args.recipe, [*args.overrides, *own]))


def _prepare(parts: Session, args: argparse.Namespace) -> None:
    loop = parts.loop
    loop.prepare()
    if args.verdict:
        loop.lab.verifier = Late(loop.lab.verifier, args.verdict, args.judges)
    if args.base is not None:
        state = loop.method.state()
        if "controller" not in state:
            raise PastError(f"--base: '{args.recipe}' has no sampler whose base draw could be set")
        loop.method.restore(state | {"controller": {**state["controller"], "base": args.base}})


def report(sides: Sequence[Side], args: argparse.Namespace) -> str:
    """The table as text."""
    late = f", a verdict {args.verdict:g} s longer in {args.judges} process(es)" if args.verdict else ""
    lines = [
        f"Cycles of {args.recipe}, {args.threads} thread(s), median of {args.cycles} of each{late}",
        "",
        f"{'side':12s}{'s a cycle':>10s}{'CPU s':>8s}" + "".join(f"{name:>10s}" for name in PHASES),
    ]
    for name, side in zip(NAMES, sides, strict=True):
        phases = (statistics.median(found.get(phase, 0.0) for found in side.phases) for phase in PHASES)
        cells = "".join(f"{seconds:10.3f}" for seconds in phases)
        lines.append(f"{name:12s}{side.seconds:10.3f}{statistics.median(side.cpu):8.3f}{cells}")
    pairs = [one / other for one, other in zip(sides[0].wall, sides[1].wall, strict=True)]
    ratio = sum(sides[0].wall) / sum(sides[1].wall)
    lines += [
        "",
        f"phased / streaming: {ratio:.2f} in time of all cycles, {statistics.median(pairs):.2f} the median of cycles,",
        f"{sum(sides[0].cpu) / sum(sides[1].cpu):.2f} in CPU time. The same tokens, and the same adapters to the bit.",
        "verify: seconds in which verdicts were waited for.",
    ]
    return "\n".join(lines)
