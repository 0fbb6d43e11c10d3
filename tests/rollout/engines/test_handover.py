"""Adapters on their way to vLLM: in memory, for nobody else's eyes, and gone after a run however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from past_opsd.core.nouns import PastError
from past_opsd.rollout.engines import vllm_handover as handover
from past_opsd.rollout.engines.vllm_handover import COPIES, HandOver


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In place of /dev/shm, which others use too."""
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setattr(handover, "MEMORY", place)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return place


def test_adapters_lie_in_memory_for_nobody_else_until_the_end(memory: Path):
    one, two = HandOver(None, 1), HandOver(None, 1)  # the second starts beside the first, which lives
    assert sorted(memory.iterdir()) == sorted([one.path, two.path])
    for made in (one, two):
        assert made.path.stat().st_mode & 0o777 == 0o700
        assert made.path.name.startswith("past-adapters-")
        (made.path / "student").mkdir()
        made.remove()
        made.remove()
    assert list(memory.iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from past_opsd.rollout.engines import vllm_handover as handover
handover.MEMORY = Path(sys.argv[1])
made = handover.HandOver(None, 1)
(made.path / "adapter").write_text("weights")
os.kill(os.getpid(), 9)
"""


def test_what_a_kill_left_goes_with_the_next_run(memory: Path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(memory)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = memory.iterdir()
    assert (left / "adapter").exists()
    made = HandOver(None, 1)
    assert list(memory.iterdir()) == [made.path]
    made.remove()


def test_what_is_not_this_persons_stays(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    theirs, elsewhere = memory / "past-adapters-theirs", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (memory / "past-adapters-link").symlink_to(elsewhere)
    HandOver(None, 1).remove()
    assert (elsewhere / "precious").exists()
    theirs.mkdir()
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    HandOver(None, 1).remove()
    assert theirs.exists()


@pytest.mark.parametrize("why", ["servers", "no room", "not there"])
def test_else_they_lie_with_temporary_files(why: str, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    free = os.statvfs(memory).f_bavail * os.statvfs(memory).f_frsize
    adapter = {"servers": None, "no room": free // COPIES, "not there": 1}[why]
    if why == "not there":
        monkeypatch.setattr(handover, "MEMORY", tmp_path / "nowhere")
    made = HandOver(None, adapter)
    assert made.path.parent == tmp_path
    assert made.path.stat().st_mode & 0o777 == 0o700
    made.remove()


def test_a_folder_that_a_person_names_is_taken(tmp_path: Path):
    made = HandOver(str(tmp_path), 1)
    assert made.path.parent == tmp_path
    assert made.path.stat().st_mode & 0o777 == 0o755  # servers may run as somebody else
    made.remove()
    with pytest.raises(PastError, match=r"engine\.adapter_folder = '/nowhere/at/all'"):
        HandOver("/nowhere/at/all")
