"""PAST: privileged adaptation from complete student trajectories, for on-policy self-distillation.

Names for scripts and notebooks; each is imported when it is first used.

Recipes and runs
    load            a recipe: a file, a shipped name or a variant, with overrides
    RunFolder       a run's folder: its metrics, responses, evaluations and checkpoints
    PASTConfig, PASTTrainer     for a script written for TRL

The nouns
    Problem, View, Response, Verdict, Attempt, Group, Batch, Term, PastError

To write one's own
    Section         the options of a method, task, verifier or engine
    Method          turns a batch into terms
    Loss            a token loss on log-probabilities
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from past_opsd.core.config import Section, load
    from past_opsd.core.losses import Loss
    from past_opsd.core.nouns import Attempt, Batch, Group, PastError, Problem, Response, Term, Verdict, View
    from past_opsd.interface.trl import PASTConfig, PASTTrainer
    from past_opsd.methods import Method
    from past_opsd.run.folder import RunFolder

__version__ = "0.1.0"

__all__ = [
    "Attempt",
    "Batch",
    "Group",
    "Loss",
    "Method",
    "PASTConfig",
    "PASTTrainer",
    "PastError",
    "Problem",
    "Response",
    "RunFolder",
    "Section",
    "Term",
    "Verdict",
    "View",
    "load",
]

_PLACES = {
    "core.config": ("Section", "load"),
    "core.losses": ("Loss",),
    "core.nouns": ("Attempt", "Batch", "Group", "PastError", "Problem", "Response", "Term", "Verdict", "View"),
    "interface.trl": ("PASTConfig", "PASTTrainer"),
    "methods": ("Method",),
    "run.folder": ("RunFolder",),
}


def __getattr__(name: str) -> Any:
    place = next((place for place, names in _PLACES.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module 'past_opsd' has no attribute {name!r}")
    return getattr(importlib.import_module(f"past_opsd.{place}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
