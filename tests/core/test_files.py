"""Files whole or not at all, nothing through links, one writer at a time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from past_opsd.core import files, lock
from past_opsd.core.files import append, fresh_folder, leftovers, put, sweep, whole, write_text
from past_opsd.core.lock import held
from past_opsd.core.nouns import PastError
from past_opsd.run.folder import LAYOUT, RunFolder

posix = pytest.mark.skipif(sys.platform == "win32", reason="links, pipes and flock")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of the reader, outside of what is written."""
    file = tmp_path / "precious.txt"
    file.write_text("mine")
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


# Writing


@posix
def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(folder: Path, precious: Path):
    for name in (".page.html.part", "page.html"):
        (folder / name).symlink_to(precious)
    write_text(folder / "page.html", "new")
    assert precious.read_text() == "mine"
    assert (folder / "page.html").read_text() == "new"
    assert not (folder / "page.html").is_symlink()


def test_the_name_that_is_written_to_is_another_each_time(folder: Path):
    names = set()
    for _ in range(5):
        with whole(folder / "a") as part:
            names.add(part.name)
            assert part.is_file()  # made before anything can take its place
            part.write_text("x")
    assert len(names) == 5
    assert os.listdir(folder) == ["a"]


def test_a_failure_leaves_the_old_file_and_nothing_else(folder: Path):
    write_text(folder / "a", "old")

    def fail() -> None:
        with whole(folder / "a") as part:
            part.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(folder) == ["a"]
    assert (folder / "a").read_text() == "old"


@posix
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "device"])
def test_only_a_plain_file_is_added_to(folder: Path, precious: Path, kind: str):
    file = folder / "metrics.jsonl"
    if kind in ("link", "dangling"):
        file.symlink_to(precious if kind == "link" else folder.parent / "made.txt")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        try:
            os.mknod(file, 0o666 | 0o020000, os.makedev(1, 7))
        except PermissionError:
            pytest.skip("no right to make a device")
    with pytest.raises(PastError, match=r"metrics\.jsonl: cannot be written, it is not a plain file; remove it"):
        append(file, "line\n")
    assert precious.read_text() == "mine"
    assert not (folder.parent / "made.txt").exists()


@posix
def test_a_second_name_of_another_file_is_not_added_to(folder: Path, precious: Path):
    os.link(precious, folder / "metrics.jsonl")
    append(folder / "metrics.jsonl", " and more")
    assert precious.read_text() == "mine"
    assert (folder / "metrics.jsonl").read_text() == "mine and more"


# Folders


def test_a_folder_takes_the_place_of_another_in_one_step(folder: Path):
    final = folder / "export"
    for text in ("old", "new"):
        with fresh_folder(final) as made:
            (made / "a").write_text(text)
            before = put(made, final)
    assert before is not None
    assert (final / "a").read_text() == "new"
    assert (before / "a").read_text() == "old"


def test_where_the_system_cannot_exchange_folders_it_takes_three_steps(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files.sys, "platform", "elsewhere")
    for name in ("old", "new"):
        (folder / name).mkdir()
        (folder / name / "a").write_text(name)
    assert put(folder / "new", folder / "old") == folder / "new"
    assert [(folder / name / "a").read_text() for name in ("old", "new")] == ["new", "old"]
    assert sorted(os.listdir(folder)) == ["new", "old"]


def test_what_a_replaced_folder_held_outlives_an_error_after_the_exchange(folder: Path):
    (folder / "export").mkdir()
    (folder / "export" / "thesis").write_text("mine")

    def fail() -> None:
        with fresh_folder(folder / "export") as made:
            (made / "a").write_text("new")
            put(made, folder / "export")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [p.read_text() for p in folder.rglob("thesis")] == ["mine"]


@posix
def test_leftovers_are_of_our_names_and_no_links(folder: Path, precious: Path):
    token = "0123456789abcdef"
    (folder / f".a.json.{token}.part").write_text("x")
    (folder / ".step-00003.json.part").write_text("x")  # as earlier versions wrote it
    (folder / ".download.part").write_text("somebody's")
    (folder / f".b.{token}.part").symlink_to(precious)
    (folder / f".c.{token}.part").mkdir()
    sweep(folder)
    assert sorted(os.listdir(folder)) == [f".b.{token}.part", f".c.{token}.part", ".download.part"]
    assert precious.exists()
    (folder / f".writing-export-{token}").mkdir()
    (folder / ".writing-export-mine").mkdir()
    (folder / f".writing-export-{token[::-1]}").symlink_to(folder.parent)
    assert [p.name for p in leftovers(folder / "export")] == [f".writing-export-{token}"]


KILLS = """
import os, shutil, sys
from pathlib import Path
from past_opsd.core import marked

root = Path(sys.argv[1])
out, real = root / "out", {name: os.__dict__[name] for name in ("rename", "replace", "unlink", "rmdir", "mkdir")}

def write(text):
    with marked.replacing(out, ".mark") as folder:
        for name in ("a", "b"):
            (folder / name).write_text(text)

def around(call, left):
    def wrapped(*args, **kwargs):
        result = call(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)
        return result
    return wrapped

kills = 0
while True:
    shutil.rmtree(out, ignore_errors=True)
    write("old")
    (out / "mine").mkdir()
    (out / "mine" / "notes").write_text("mine")
    if os.fork() == 0:
        left = [kills + 1]
        for name, call in real.items():
            setattr(os, name, around(call, left))
        marked.put = around(marked.put, left)
        write("new")
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.wait()[1]) == 9
    assert {(out / name).read_text() for name in ("a", "b")} in ({"old"}, {"new"}), kills
    assert [p.read_text() for p in root.rglob("notes")] == ["mine"], kills
    write("newer")
    assert [(out / name).read_text() for name in ("a", "b", "mine/notes")] == ["newer", "newer", "mine"], kills
    assert sorted(os.listdir(root)) == ["out"] and sorted(os.listdir(out)) == [".mark", "a", "b", "mine"], kills
    if not killed:
        break
    kills += 1
print(kills)
"""


@posix
def test_a_kill_while_a_folder_is_replaced_leaves_the_old_one_or_the_new_one(tmp_path: Path):
    (tmp_path / "root").mkdir()
    command = [sys.executable, "-c", KILLS, str(tmp_path / "root")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8


# Links in a run


@posix
@pytest.mark.parametrize("name", [entry.name for entry in LAYOUT if entry.name != lock.NAME])
def test_a_run_with_a_link_out_of_it_is_refused(folder: Path, tmp_path: Path, name: str):
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PastError, match=rf"{name} is a link that leads out of the run, to {tmp_path}/elsewhere"):
        RunFolder(folder).enclosed()


@posix
def test_links_further_down_count_and_those_that_stay_inside_do_not(folder: Path, tmp_path: Path):
    inner = folder / "checkpoints" / "checkpoint-00001" / "teacher"
    inner.mkdir(parents=True)
    (folder / "wandb").mkdir()
    (folder / "wandb" / "debug.log").symlink_to("/tmp/elsewhere.log")  # as that package makes them
    (folder / "notes").symlink_to(tmp_path)  # no name of ours
    (folder / "elsewhere").mkdir()
    (folder / "report").symlink_to("elsewhere")
    (folder / "evaluations").symlink_to("evaluations")
    RunFolder(folder).enclosed()
    (tmp_path / "other").symlink_to(folder)
    RunFolder(tmp_path / "other").enclosed()
    (folder / "elsewhere" / "figures").symlink_to("../../other/../")
    with pytest.raises(PastError, match="figures is a link that leads out"):
        RunFolder(folder).enclosed()
    (folder / "elsewhere" / "figures").unlink()
    (inner / "state.json").symlink_to("/etc/hostname")
    with pytest.raises(PastError, match=r"teacher/state\.json is a link that leads out of the run, to /etc/hostname"):
        RunFolder(folder).enclosed()


# One writer

HOLD = """
import os, sys, time
from pathlib import Path
from past_opsd.core.lock import held
with held(Path(sys.argv[1])):
    if sys.argv[2] == "fork" and os.fork() == 0:
        Path(sys.argv[3]).write_text(str(os.getpid()))
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *(more or ("", ""))], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "held\n"
    return process


@posix
def test_a_second_writer_is_refused_and_told_who_the_first_is(folder: Path):
    process = holder(folder)
    try:
        with pytest.raises(PastError) as caught, held(folder):
            pass
        text = str(caught.value)
        assert text.startswith(f"{folder} is being written by another process (-c {folder} ")
        assert f"pid {process.pid} on {socket.gethostname()}, since 20" in text
        assert f"{time.gmtime().tm_year}-" in text
    finally:
        process.kill()
        process.wait()
    with held(folder):  # what the kill left is no obstacle
        assert json.loads((folder / lock.NAME).read_text())["pid"] == os.getpid()
    assert os.listdir(folder) == []


@posix
def test_a_forked_child_does_not_hold_the_lock_of_a_killed_parent(folder: Path, tmp_path: Path):
    process = holder(folder, "fork", str(tmp_path / "child"))
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    process.kill()
    process.wait()
    try:
        os.kill(child, 0)
        with held(folder):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


@posix
def test_a_program_that_is_started_meanwhile_does_not_hold_it(folder: Path):
    with held(folder):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        with held(folder):
            pass
    finally:
        process.kill()
        process.wait()


@posix
def test_threads_of_one_process_exclude_each_other_too(folder: Path):
    with held(folder), pytest.raises(PastError, match=f"pid {os.getpid()} "), held(folder):
        pass


@posix
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "nonsense"])
def test_what_a_stranger_put_in_the_locks_place_is_not_written_to(folder: Path, precious: Path, kind: str):
    path = folder / lock.NAME
    if kind == "link":
        path.symlink_to(precious)
    elif kind == "hard link":
        os.link(precious, path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"\xff\x00[")
    with held(folder):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert precious.read_text() == "mine"


def test_a_folder_that_stays_empty_goes_again(tmp_path: Path):
    with held(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert os.listdir(tmp_path) == []
    with held(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
    assert (tmp_path / "a" / "b" / "file").exists()


@posix
def test_without_locks_it_goes_on_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "fcntl", None)
    notes: list[str] = []
    with held(folder, notes.append):
        pass
    assert notes == [f"{folder}: its file system knows no locks; see to it that no other process writes this folder"]
