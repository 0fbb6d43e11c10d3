"""PAST: privileged adaptation from complete student trajectories, for on-policy self-distillation.

    import past_opsd as past

    recipe = past.load("embedded/past", {"run.cycles": 10})
    run = past.train(recipe, "runs/first")
    run.scores().to_pandas()

Names for scripts and notebooks; each is imported when it is first used. `help(past.train)` explains one.

Recipes
    recipes         the shipped recipes, by name
    load            a recipe: a shipped name or a file, with overrides; a class or function of yours in it
    Recipe          what load gives

Work
    train           run a recipe in a folder
    resume          go on with a run
    evaluate        Avg@k and its kin of the base model or of an adapter
    compare         a suite of recipes over seeds
    export          the student for PEFT, vLLM and others

Look
    open_run        a run that was made before
    Run             a run's metrics, scores, responses and costs as tables
    Evaluation      every outcome on the held-out problems
    probe           does the teacher use the matching trajectory?
    shift           how much of the teacher's change can reach the student?
    report          runs as one HTML file

To write one's own
    Method          turns a batch into terms; MethodOptions holds its keys in a recipe
    Loss            a token loss on log-probabilities; a plain function does as well
    Section         keys of a task, verifier or engine
    distill, mean   a term for an attempt; the mean over examples
    PASTConfig, PASTTrainer     for a script written for TRL

The nouns
    Problem, View, Response, Verdict, Attempt, Group, Batch, Term
    PastError       a mistake a person can mend, in one message
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from past_opsd.core.config import MethodOptions as MethodOptions
    from past_opsd.core.config import Recipe as Recipe
    from past_opsd.core.config import Section as Section
    from past_opsd.core.config import load as load
    from past_opsd.core.losses import Loss as Loss
    from past_opsd.core.nouns import Attempt as Attempt
    from past_opsd.core.nouns import Batch as Batch
    from past_opsd.core.nouns import Group as Group
    from past_opsd.core.nouns import PastError as PastError
    from past_opsd.core.nouns import Problem as Problem
    from past_opsd.core.nouns import Response as Response
    from past_opsd.core.nouns import Term as Term
    from past_opsd.core.nouns import Verdict as Verdict
    from past_opsd.core.nouns import View as View
    from past_opsd.core.nouns import mean as mean
    from past_opsd.interface.api import compare as compare
    from past_opsd.interface.api import evaluate as evaluate
    from past_opsd.interface.api import export as export
    from past_opsd.interface.api import open_run as open_run
    from past_opsd.interface.api import probe as probe
    from past_opsd.interface.api import recipes as recipes
    from past_opsd.interface.api import report as report
    from past_opsd.interface.api import resume as resume
    from past_opsd.interface.api import shift as shift
    from past_opsd.interface.api import train as train
    from past_opsd.interface.trl import PASTConfig as PASTConfig
    from past_opsd.interface.trl import PASTTrainer as PASTTrainer
    from past_opsd.methods import Method as Method
    from past_opsd.methods import distill as distill
    from past_opsd.run.evaluate import Evaluation as Evaluation
    from past_opsd.run.frames import Run as Run

__version__ = "0.1.0"

_PLACES = {
    "core.config": ("MethodOptions", "Recipe", "Section", "load"),
    "core.losses": ("Loss",),
    "core.nouns": ("Attempt", "Batch", "Group", "PastError", "Problem", "Response", "Term", "Verdict", "View", "mean"),
    "interface.api": (
        "compare",
        "evaluate",
        "export",
        "open_run",
        "probe",
        "recipes",
        "report",
        "resume",
        "shift",
        "train",
    ),
    "interface.trl": ("PASTConfig", "PASTTrainer"),
    "methods": ("Method", "distill"),
    "run.evaluate": ("Evaluation",),
    "run.frames": ("Run",),
}


def __getattr__(name: str) -> Any:
    place = next((place for place, names in _PLACES.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module 'past_opsd' has no attribute {name!r}")
    return getattr(importlib.import_module(f"past_opsd.{place}"), name)


def __dir__() -> list[str]:
    # Without __all__, help() shows the table above and not every page of every name.
    return sorted(["__version__", *(name for names in _PLACES.values() for name in names)])
