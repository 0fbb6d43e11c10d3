"""Shared parts of the tests: the embedded default, small and on one thread."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import Launcher

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.run.train import Session, session

SMALL = [
    "run.cycles=3",
    "run.checkpoint_every=1",
    "rollout.problems_per_cycle=6",
    "task.train_problems=60",
    "task.eval_problems=4",
    "evaluation.samples=4",
    "evaluation.pass_k=[1, 4]",
]


COMPUTES = re.compile(r"^(?:import|from) (?:torch|naive|rounding)\b", re.MULTILINE)
COMPARES = re.compile(r"assert_close|allclose|approx\(|assert_same|assert_rounding|torch\.equal|tolerance|1e-\d")

COMMANDS = r"^from past_opsd\.(?:interface\.cli|interface import.* cli|analysis\.bench|analysis import.* bench)\b"
ELSEWHERE = re.compile(COMMANDS + r"|importorskip\(.triton|find_spec\(.triton", re.MULTILINE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as numeric what stands in a file that computes with torch and compares numbers.

    Not the files whose numbers come from a command, or from Triton's interpreter, which computes without torch.
    """
    text = {path: path.read_text(encoding="utf-8") for path in {item.path for item in items}}
    computing = {path: lines for path, lines in text.items() if COMPUTES.search(lines) and COMPARES.search(lines)}
    numeric = {path for path, lines in computing.items() if not ELSEWHERE.search(lines)}
    for item in items:
        if item.path in numeric:
            item.add_marker("numeric")


class Quiet:
    """A display that keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.phases: list[tuple[int, str]] = []

    def phase(self, cycle: int, name: str) -> None:
        self.phases.append((cycle, name))

    def cycle(self, cycle: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, summary: dict[str, float]) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread, whatever the test before left, and before any fixture computes: bits depend on it."""
    torch.set_num_threads(1)


@pytest.fixture
def quiet() -> Quiet:
    return Quiet()


def small(name: str = "embedded/past", *overrides: str) -> Recipe:
    return config.load(name, [*SMALL, *overrides])


@pytest.fixture(scope="session")
def small_recipe():
    """`small_recipe(name, *overrides)`: a shipped recipe cut down to seconds."""
    return small


@pytest.fixture
def past() -> Iterator[Session]:
    """PAST on the embedded default, freshly assembled."""
    with session(small()) as parts:
        yield parts


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of third-party data beside the project; tests that need it skip where it is missing."""
    folder = Path(__file__).resolve().parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}")
    return folder


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """`launch(size, *words)`: `past words...` or a script in processes of their own, forked from one that is warm."""
    launcher = Launcher(tmp_path_factory.mktemp("launches"))
    yield launcher
    launcher.close()
