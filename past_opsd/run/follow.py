"""Evaluation beside training: another process evaluates a run's checkpoints as they come.

The draws of an evaluation follow from the run's seeds and the checkpoint's adapter, so the scores are those that the
run itself would have written. A boundary counts as evaluated when its file is there: a follower that ends early, or a
run that is taken back to an earlier checkpoint, leaves work for the next look and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from past_opsd.core import config, life
from past_opsd.core.nouns import PastError
from past_opsd.policy.distributed import World
from past_opsd.run import boundary, checkpoint
from past_opsd.run.evaluate import Evaluation, evaluation_steps
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import session

PAUSE = 2.0
"""Seconds between looks at the run's folder."""


def follow(
    folder: Path,
    overrides: Sequence[str] = (),
    world: World | None = None,
    trust: bool = False,
    tell: Callable[[str], None] = print,
) -> Iterator[Evaluation]:
    """Every evaluation of a run that leaves them to others, as its checkpoints come; ends with the last one.

    `overrides` say where it computes, e.g. another device or server than the run's. Whatever is not as in training is
    told once; another model is refused.
    """
    run, world = RunFolder(folder), world or World()
    boundary.require_trust(run, boundary.entrusted(run.recipe()), trust)
    recipe = config.load(run.recipe_file, overrides)
    if not recipe.evaluation.beside:
        raise PastError(
            f"{run} evaluates itself while it trains; a run that leaves it to 'past eval --follow' is started with "
            "--set evaluation.beside=true"
        )
    told: set[str] = set()
    with session(recipe, world=world) as assembled:
        while left := world.share(lambda: _left(run, evaluation_steps(recipe))):
            step = world.share(lambda: next((step for step in left if _there(run, step)), None))
            if step is None:
                life.doing(f"waiting for the checkpoint after {left[0]} of {recipe.run.cycles} cycles")
                time.sleep(PAUSE)
                continue
            for note in boundary.enter(assembled, run.checkpoint(step)):
                if world.first and note not in told:
                    told.add(note)
                    tell(note)
            evaluation = assembled.evaluate(step)
            if world.first:
                run.write_evaluation(evaluation)
            world.barrier()
            yield evaluation


def _left(run: RunFolder, steps: set[int]) -> list[int]:
    return [step for step in sorted(steps) if not run.evaluations.path(step).exists()]


def _there(run: RunFolder, step: int) -> bool:
    """Whether a boundary's checkpoint is written; a damaged one is told, since nobody will write it again."""
    if step not in run.steps():
        return False
    problem = checkpoint.damage(run.checkpoint(step))
    if problem is not None:
        raise PastError(f"{run.checkpoint(step)} is damaged ({problem}), so it cannot be evaluated")
    return True
