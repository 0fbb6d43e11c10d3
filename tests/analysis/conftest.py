"""Runs of two methods over two seeds, made once for all tests of tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SMALL, Quiet

from past_opsd.analysis import suite
from past_opsd.core import config
from past_opsd.run.train import train

FAST = [*SMALL, "run.cycles=2", "evaluation.at=[0.0, 0.5, 1.0]"]
SEEDS = [17, 29]


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of a suite, made here; a suite makes them in processes of their own."""
    out = tmp_path_factory.mktemp("compared")
    for seed in SEEDS:
        for recipe in ("embedded/opsd", "embedded/past"):
            train(config.load(recipe, [f"run.seed={seed}", *FAST]), suite.run_folder(out, recipe, seed), False, Quiet())
    return out
