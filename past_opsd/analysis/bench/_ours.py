"""Our side of `past bench step`: a cycle of a recipe, in a process of its own."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from past_opsd.analysis.bench._products import Recorder, Replay
from past_opsd.analysis.bench._worker import peak, serve
from past_opsd.core import config
from past_opsd.core.nouns import Closing, Problem, Response, Verdict
from past_opsd.rollout.verifiers import Reason
from past_opsd.run.loop import Cycle
from past_opsd.run.profiling import Clock
from past_opsd.run.train import Session, assemble


@dataclass(frozen=True)
class Plan:
    """One update: which recipe with which overrides, on how many prompts and samples of how many tokens."""

    recipe: str
    overrides: tuple[str, ...]
    prompts: int
    samples: int
    tokens: int
    threads: int
    checkpointing: bool

    def load(self) -> config.Recipe:
        """The recipe at this size."""
        sizes = (
            f"rollout.problems_per_cycle={self.prompts}",
            f"rollout.samples_per_problem={self.samples}",
            f"rollout.student.max_new_tokens={self.tokens}",
            f"run.threads={self.threads}",
            f"model.gradient_checkpointing={str(self.checkpointing).lower()}",
            "model.device=cpu",
            "model.dtype=float32",
        )
        return config.load(self.recipe, [*sizes, *self.overrides])


@dataclass(frozen=True)
class Step:
    """One update's wall and CPU seconds, and its tokens: of prompts, of responses, of teacher prompts."""

    seconds: float
    cpu: float
    tokens: tuple[int, int, int]


class Alternating(Closing):
    """Every other response is right: costs nothing and gives every group a spread."""

    identity = "alternating"

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        return [(Reason.WRONG if i % 2 else Reason.CORRECT).verdict() for i in range(len(items))]


def run(pipe: Connection, plan: Plan) -> None:
    """Serve steps, the peak so far, phases and products of a step."""
    recipe = plan.load()
    torch.set_num_threads(plan.threads)
    assembled = assemble(recipe, Alternating())
    assembled.loop.problems = assembled.loop.problems[: plan.prompts]
    never = len(assembled.model.head)  # no token has this id: every response runs to its limit
    engine: Any = assembled.loop.lab.engine
    engine._eos.fill_(never)
    worker = _Worker(assembled)
    serve(pipe, {"step": worker.step, "peak": peak, "breakdown": worker.breakdown})


class _Worker:
    def __init__(self, session: Session):
        self._session = session
        self._cycle = 0

    def _run(self, phase: Callable[[str], None]) -> Cycle:
        cycle = self._session.loop.cycle(self._cycle, phase)
        self._cycle += 1
        return cycle

    def step(self) -> tuple[float, float, tuple[int, int, int]]:
        """One update: the fields of a `Step`."""
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        cycle = self._run(lambda name: None)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        attempts, method = cycle.batch.attempts, self._session.loop.method
        prompts = [len(a.view.prompt) for a in attempts]
        teacher = [len(view.prompt) for a in attempts if (view := method.teacher_view(a)) is not a.view]
        return wall, cpu, (sum(prompts), sum(len(a.response.tokens) for a in attempts), sum(teacher))

    def breakdown(self, repeats: int) -> dict[str, tuple[float, float]]:
        """By phase: CPU seconds of it, and of its matrix products alone; medians, the two taking turns."""
        recorder = Recorder()
        with recorder:
            self._run(recorder.enter)
        replay = Replay(recorder.calls)
        replay.run()
        whole, products = list[dict[str, float]](), list[dict[str, float]]()
        for _ in range(repeats):
            clock = Clock(now=time.process_time)
            self._run(clock.phase)
            clock.stop()
            whole.append(clock.seconds(0))
            products.append(replay.run())
        return {
            name: (statistics.median(w[name] for w in whole), statistics.median(p.get(name, 0.0) for p in products))
            for name in whole[0]
        }
