"""What every method owes: a recipe, a docs page, an exact resume; and that nobody else need know it.

A shipped method is one module, its recipe `embedded/NAME` and its page `docs/methods/NAME.md`. All tests here find it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Quiet

from past_opsd.core import config
from past_opsd.run.train import train

ROOT = Path(__file__).resolve().parents[2]
METHODS = config.known("method")

# Recipes beside a method's own, and what makes a recipe small, or makes it carry more from cycle to cycle.
RUNS: dict[str, list[str]] = {name: [] for name in (*METHODS, "opsd_current", "opsd_ema", "grpo_dynamic")} | {
    "grpo": ["method.beta=0.01"],
    "sd_zero": ["method.phase1_problems=24", "method.phase1_batch=8", "method.teacher_sync_every=2"],
    "h2sd": ["rollout.problems_per_cycle=3", "rollout.samples_per_problem=4"],
    "grpo_dynamic": ["rollout.problems_per_cycle=2", "rollout.samples_per_problem=4"],
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_recipe_and_a_page(method: str):
    assert config.load(f"embedded/{method}").method.name == method
    assert (ROOT / "docs" / "methods" / f"{method}.md").is_file()


# What speaks of them because a person does: TRL's own words, whom we race, the command that starts vLLM's server.
SPEAKERS = {"trl", "bench", "serve", "methods", "engines"}


def compared(tree: ast.Module) -> Iterator[str]:
    """Texts that a module compares something with, and `method` or `engine` where it compares their name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
            elif isinstance(part, ast.Attribute) and part.attr == "name" and isinstance(part.value, ast.Attribute):
                yield f"the name of {part.value.attr}" if part.value.attr in ("method", "engine") else ""


def test_nobody_asks_for_a_method_or_an_engine_by_name():
    """`past` and `torch` are also the names of a command and a library."""
    names = {*METHODS, *config.known("engine")} - {"past", "torch"} | {"the name of method", "the name of engine"}
    found = {
        f"{file.name}: {text}"
        for file in (ROOT / "past_opsd").rglob("*.py")
        if not SPEAKERS & {*file.relative_to(ROOT).parts, file.stem}
        for text in compared(ast.parse(file.read_text(encoding="utf-8")))
        if text in names
    }
    # Whether a recipe carries its method's own name: any method's.
    assert found == {"style.py: the name of method"}


class Stop(Quiet):
    """Ends a run in the middle of a cycle."""

    def __init__(self, cycle: int, phase: str):
        super().__init__()
        self._at = (cycle, phase)

    def phase(self, cycle: int, name: str) -> None:
        if (cycle, name) == self._at:
            raise InterruptedError


def files(folder: Path) -> dict[str, bytes]:
    """Everything a run keeps but its timings."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "timings.jsonl")
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_resumes_to_the_bits_of_an_unbroken_one(tmp_path: Path, small_recipe, name: str):
    recipe = small_recipe(f"embedded/{name}", "run.checkpoint_every=2", "evaluation.at=[1.0]", *RUNS[name])
    train(recipe, tmp_path / "unbroken", False, Quiet())
    for cycle, phase in ((1, "publish"), (2, "distill")):
        folder = tmp_path / f"stopped-{cycle}"
        with pytest.raises(InterruptedError):
            train(recipe, folder, False, Stop(cycle, phase))
        assert train(recipe, folder, True, Quiet()).finished
        assert files(folder) == files(tmp_path / "unbroken")
