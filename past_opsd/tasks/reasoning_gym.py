r"""Problems made by reasoning-gym (the extra `[tasks]`): any of its tasks by name, its own scorers as the verifier.

    [task]
    name = "reasoning_gym"
    tasks = ["gsm_symbolic", "chain_sum"]
    configs = { chain_sum = { min_terms = 3 } }

    [verifier]
    name = "reasoning_gym"

Each task is an evaluation set. Training and evaluation draw from different seeds, and no question stands in both. Few
tasks bring a worked solution; for the others the reference is the bare answer, and a note says so.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Collection, Iterator
from importlib.metadata import version
from typing import Any

from pydantic import Field, field_validator

from past_opsd.core.config import Section
from past_opsd.core.nouns import PastError, Problem, derive_seed
from past_opsd.rollout.verifiers.pool import Lost, WorkerPool
from past_opsd.tasks import Problems

_SPARE = 3  # entries to look at for each problem wanted, before a task counts as too small
_PATIENCE = 900.0  # seconds for one set of one task


class Options(Section):
    """Problems made by reasoning-gym."""

    tasks: list[str] = Field(description="names of reasoning-gym tasks; each is an evaluation set")
    configs: dict[str, dict[str, Any]] = Field(
        default={}, description="settings of a task, e.g. { chain_sum = { min_terms = 3 } }"
    )
    train_problems: int = Field(default=600, ge=1, le=100_000, description="training problems, the tasks in turn")
    eval_problems: int = Field(default=40, ge=1, le=10_000, description="held-out problems per task")
    seed: int = Field(default=0, ge=0, description="which problems are made")

    @field_validator("tasks")
    @classmethod
    def _some(cls, tasks: list[str]) -> list[str]:
        if not tasks or len(set(tasks)) != len(tasks):
            raise ValueError(f"tasks {tasks} must be different names, at least one")
        return tasks


def build(options: Options) -> Problems:
    """Make every problem now."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise PastError("the task 'reasoning_gym' needs the package reasoning-gym: pip install 'past-opsd[tasks]'")
    stray = set(options.configs) - set(options.tasks)
    if stray:
        raise PastError(f"task.configs names '{min(stray)}', which is not among task.tasks")
    share = -(-options.train_problems // len(options.tasks))
    pool = WorkerPool("past_opsd.rollout.verifiers._gym:make", workers=1, timeout=_PATIENCE, memory_mb=8192)
    streams: dict[str, Iterator[Problem]] = {}
    evaluation: dict[str, tuple[Problem, ...]] = {}
    bare: list[str] = []
    try:
        for name in options.tasks:
            drawn = _draw(pool, options, name, "train", share, ())
            taken = [problem.text for problem in drawn]
            evaluation[name] = _draw(pool, options, name, "held-out", options.eval_problems, taken)
            streams[name] = iter(drawn)
            bare += [name] if drawn[0].solution.startswith("\\boxed") else []
    finally:
        pool.close()
    train = tuple(next(streams[options.tasks[i % len(options.tasks)]]) for i in range(options.train_problems))
    content = "\n".join(f"{p.text} {p.solution} {p.answer}" for part in (train, *evaluation.values()) for p in part)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    note = f"{', '.join(bare)}: reasoning-gym brings no worked solutions here; the reference is the bare answer"
    identity = f"reasoning_gym {version('reasoning-gym')}#{digest}"
    return Problems(identity, train, evaluation, notes=(note,) if bare else ())


def _draw(
    pool: WorkerPool, options: Options, name: str, side: str, count: int, taken: Collection[str]
) -> tuple[Problem, ...]:
    """`count` problems with different questions, none of them taken."""
    config = json.dumps(options.configs.get(name, {}), sort_keys=True)
    seed = derive_seed(options.seed, "reasoning_gym", name, side) >> 33
    origin = {"task": name, "config": config, "seed": seed, "size": _SPARE * count}
    (reply,) = pool.run([(json.dumps({"origin": origin, "count": count, "taken": list(taken)}),)])
    if isinstance(reply, Lost):
        raise PastError(f"reasoning-gym's task '{name}' could not be made ({reply.value}); ask for fewer problems")
    made = json.loads(reply)
    if isinstance(made, str):
        raise PastError(made)
    if len(made) < count:
        raise PastError(
            f"reasoning-gym's task '{name}' gave {len(made)} different problems where {count} are wanted ({side}); "
            "ask for fewer, or give the task wider settings in task.configs"
        )
    return tuple(_problem(entry, origin, side) for entry in made)


def _problem(entry: dict[str, Any], origin: dict[str, Any], side: str) -> Problem:
    boxed = f"\\boxed{{{entry['answer']}}}"
    solution = f"{entry['way']}\nThe answer is {boxed}." if entry["way"] else boxed
    name = f"{origin['task']}:{side}:{entry['index']}"
    return Problem(name, entry["question"], solution, entry["answer"], {"origin": origin, "index": entry["index"]})
