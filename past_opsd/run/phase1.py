"""What a method samples before the first cycle, kept batch by batch: after a kill it is read, not drawn again.

A batch is a file named after all that decides it: the model and its adapters' versions, the data, the verifier, the
engine, how it is sampled, and every prompt with its seed. So a batch of another setup is never taken for this run's.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from past_opsd.core import config, life
from past_opsd.core.config import Sampling
from past_opsd.core.nouns import Attempt, PastError, Work
from past_opsd.policy.distributed import World
from past_opsd.run import attempts
from past_opsd.run.folder import RunFolder, read_lines
from past_opsd.run.loop import Draw, Loop

BATCH = 128
"""Samples in one file: what a kill can cost."""
_DECIDES = ("model", "engine", "verifier")  # of a recipe, beside what the work itself says


@contextmanager
def kept(run: RunFolder, loop: Loop, world: World, identity: Mapping[str, Any]) -> Generator[None]:
    """Around what comes before the first cycle, which takes samples that are there already and keeps the others."""
    keeper, began = _Keeper(run, loop, world, identity), time.perf_counter()
    before, loop.door = loop.door, keeper
    try:
        yield
    finally:
        loop.door = before
    if world.first and keeper.used:
        keeper.tell(0, time.perf_counter() - began - keeper.sampling)


def seconds(run: RunFolder) -> dict[str, float]:
    """What came before the first cycle took, over all processes that worked on it; empty where nothing was sampled."""
    found = [line["seconds"] for line in read_lines(run.phase1_timings) if 0 <= line.get("seconds", -1) < 1e15]
    return {"prepare": sum(found)} if found else {}


class _Keeper:
    def __init__(self, run: RunFolder, loop: Loop, world: World, identity: Mapping[str, Any]):
        self._run, self._loop, self._world = run, loop, world
        self._setup = {**identity, "recipe": {key: identity["recipe"][key] for key in _DECIDES}}
        self.used = False
        self.sampling = 0.0

    def __call__(self, draw: Draw, work: Sequence[Work], sampling: Sampling) -> list[Attempt]:
        out: list[Attempt] = []
        for start in range(0, len(work), BATCH):
            life.doing(f"before the first cycle, samples {start + 1:,} to {min(start + BATCH, len(work)):,}")
            out += self._batch(draw, work[start : start + BATCH], sampling)
        return out

    def _batch(self, draw: Draw, work: Sequence[Work], sampling: Sampling) -> list[Attempt]:
        self.used = True
        digest = self._digest(work, sampling)
        found = self._world.share(lambda: self._read(digest, work))
        if found is not None:
            return found
        began = time.perf_counter()
        drawn = draw(work, sampling)
        took = time.perf_counter() - began
        self.sampling += took
        if self._world.first:
            self.tell(len(work), took)
            versions = self._loop.learner.versions
            rows = [attempts.row(0, a, versions, i, discarded=False) for i, a in enumerate(drawn)]
            attempts.write(self._run.phase1_batch(digest), rows)
        return drawn

    def tell(self, samples: int, took: float) -> None:
        """Seconds count as soon as they are spent: a batch that a kill cuts off here is drawn and counted again."""
        self._run.phase1_timings.parent.mkdir(parents=True, exist_ok=True)
        self._run.add_line(self._run.phase1_timings, {"cycle": 0, "samples": samples, "seconds": round(took, 4)})

    def _digest(self, work: Sequence[Work], sampling: Sampling) -> str:
        items = [[w.problem.id, w.view.adapter, w.view.prompt, w.seed] for w in work]
        decides = [self._setup, dict(self._loop.learner.versions), config.dump(sampling), items]
        return hashlib.blake2b(json.dumps(decides).encode(), digest_size=16).hexdigest()

    def _read(self, digest: str, work: Sequence[Work]) -> list[Attempt] | None:
        """None where there is no such file, or it is damaged: then the batch is drawn."""
        file = self._run.phase1_batch(digest)
        if not file.is_file():
            return None
        try:
            rows = attempts.read(file)
        except PastError:
            return None
        asked = [(w.problem.id, w.view.adapter, w.view.prompt) for w in work]
        if [(row["problem"], row["adapter"], tuple(row["prompt_tokens"])) for row in rows] != asked:
            return None
        return [attempts.attempt(row, w.problem) for row, w in zip(rows, work, strict=True)]
