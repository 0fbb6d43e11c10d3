from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL, Quiet
from ranks import Launcher

from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.interface.cli import main
from past_opsd.run.evaluate import Evaluation
from past_opsd.run.folder import TRACKERS, RunFolder
from past_opsd.run.trackers import BACKENDS, Displays, Tracker, open_trackers
from past_opsd.run.train import Display, train

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:tensorboard.*",
    "ignore::DeprecationWarning:google.*",
    "ignore::DeprecationWarning:wandb.*",
    "ignore::DeprecationWarning:trackio.*",
)

Rows = dict[int, dict[str, Any]]  # step -> name -> value


@pytest.fixture(scope="module", autouse=True)
def _apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trackers write to folders of this test alone, and reach no server."""
    home = tmp_path_factory.mktemp("home")
    assert "trackio" not in sys.modules, "Trackio reads its folder when it is imported"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        patch.setenv("WANDB_MODE", "offline")
        for name in ("HOME", "XDG_CACHE_HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(home))
        for name in ("WANDB_API_KEY", "WANDB_PROJECT", "NETRC", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            patch.delenv(name, raising=False)
        yield


def need(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'past-opsd[{name}]'")


def run(recipe: Recipe, folder: Path, names: Sequence[str], resume: bool = False, console: Display | None = None):
    with Displays(console or Quiet(), open_trackers(names, folder, recipe)) as shown:
        return train(recipe, folder, resume, shown)


def read(name: str, folder: Path) -> tuple[Rows, str, list[str]]:
    """What the package itself finds: values by step, the recipe as it keeps it, notes. Each step must be there once."""
    return {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio}[name](folder)


def read_tensorboard(folder: Path) -> tuple[Rows, str, list[str]]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={SCALARS: 0, TENSORS: 0}).Reload()
    rows: Rows = {}
    for tag in events.Tags()[SCALARS]:
        for event in events.Scalars(tag):
            assert tag not in rows.setdefault(event.step, {}), (tag, event.step)
            rows[event.step][tag] = event.value
    texts = {
        tag: [item.tensor_proto.string_val[0].decode() for item in events.Tensors(tag)]
        for tag in events.Tags()[TENSORS]
    }
    return rows, "\n".join(texts["recipe/text_summary"]), texts.get("note/text_summary", [])


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: a LevelDB log of protocol buffers, blocks of 32 KiB, a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    raw, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if (room := -at % 32768) and room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        record += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
            record = b""


def wandb_finished(path: Path) -> list[Any]:
    """All records; wandb's own process may still be writing the last ones."""
    for _ in range(200):
        records = list(wandb_records(path))
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def read_wandb(folder: Path) -> tuple[Rows, str, list[str]]:
    state = json.loads((folder / TRACKERS).read_text())
    newest = max((folder / "wandb").glob(f"offline-run-*-{state['id']}"), key=lambda p: p.stat().st_mtime_ns)
    rows: Rows = {}
    recipe, notes = "", []
    for record in wandb_finished(newest / f"run-{state['id']}.wandb"):
        if record.WhichOneof("record_type") == "run":
            assert record.run.run_id == state["id"]
            recipe = json.dumps({item.key: json.loads(item.value_json) for item in record.run.config.update})
        if record.WhichOneof("record_type") == "history":
            values = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            notes += [values.pop("note")] if "note" in values else []
            step = record.history.step.num
            assert step not in rows
            rows[step] = {name: value for name, value in values.items() if not name.startswith("_")}
    return rows, recipe, notes


def read_trackio(folder: Path) -> tuple[Rows, str, list[str]]:
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    state = json.loads((folder / TRACKERS).read_text())
    (found,) = [r for r in Api().runs("past-opsd") if r.name.endswith(state["id"][:6])]
    rows: Rows = {}
    notes = []
    for row in SQLiteStorage.get_logs("past-opsd", found.name):
        if "note" in row:
            notes.append(row["note"]["_value"])
            continue
        values = {name: float(value) for name, value in row.items() if name not in ("step", "timestamp")}
        assert not set(values) & set(rows.setdefault(row["step"], {}))
        rows[row["step"]] |= values
    return rows, json.dumps(found.config), notes


def expected(recipe: Recipe, folder: Path) -> Rows:
    """The folder's own records, cycle k at step k + 1."""
    rows: Rows = {line.pop("cycle") + 1: line for line in RunFolder(folder).read_metrics()}
    for path in (folder / "evaluations").glob("step-*.json"):
        evaluation = Evaluation.load(path)
        summary = evaluation.summary(recipe.evaluation.pass_k)
        rows.setdefault(evaluation.step, {}).update({f"eval/{name}": value for name, value in summary.items()})
    return rows


def same(found: Rows, wanted: Rows) -> bool:
    assert sorted(found) == sorted(wanted)
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=1e-6, abs=1e-12)  # TensorBoard keeps single precision
    return True


INSTALLED = [name for name in BACKENDS if importlib.util.find_spec(name)]
SETTINGS = [*SMALL, "run.checkpoint_every=2", "evaluation.at=[0.0, 1.0]"]

# Trains in a process of its own and kills it when cycle 2 is recorded, before the boundary after it.
DRIVER = """
import os, signal, sys, time
from pathlib import Path
from past_opsd.core import config
from past_opsd.run.trackers import Displays, open_trackers
from past_opsd.run.train import train

class Console:
    def phase(self, k, name):
        if (k, name) == (2, "evaluate"):
            time.sleep(1.5)  # Trackio writes every half a second
            os.kill(os.getpid(), signal.SIGKILL)
    def cycle(self, k, metrics): pass
    def evaluated(self, step, summary): pass
    def note(self, text): raise AssertionError(text)

folder, names, recipe = Path(sys.argv[1]), sys.argv[2].split(","), config.load("embedded/past", sys.argv[3:])
with Displays(Console(), open_trackers(names, folder, recipe)) as shown:
    train(recipe, folder, False, shown)
"""


@pytest.fixture(scope="module")
def resumed(
    tmp_path_factory: pytest.TempPathFactory, small_recipe, launch: Launcher
) -> tuple[Recipe, Path, dict[str, list[int]]]:
    """A run with every tracker at once, killed for good behind a boundary and resumed; the steps found in between."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    driver = folder.parent / "driver.py"
    driver.write_text(DRIVER)
    killed = launch(1, str(driver), str(folder), ",".join(INSTALLED), *SETTINGS)
    assert killed.codes == [-signal.SIGKILL], killed.err
    between = {name: sorted(read(name, folder)[0]) for name in INSTALLED if name != "wandb"}
    identity = (folder / TRACKERS).read_text()
    recipe = small_recipe("embedded/past", *SETTINGS)
    assert run(recipe, folder, [*INSTALLED, *INSTALLED], resume=True).finished
    assert (folder / TRACKERS).read_text() == identity
    return recipe, folder, between


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_a_killed_and_resumed_run_is_one_run_with_every_step_once(resumed, name: str):
    need(name)
    recipe, folder, between = resumed
    if name != "wandb":  # whose own process keeps an offline run in memory and loses it
        assert between[name] == [0, 1, 2, 3]  # step 3 lies behind the last boundary
    found, written, notes = read(name, folder)
    assert same(found, expected(recipe, folder))
    assert written.count("Attempt: {student_output}") == 1
    assert str(recipe.learner.student.lr) in written
    assert any("resuming from" in note for note in notes)


@pytest.mark.slow
def test_a_tracker_that_joins_later_gets_the_whole_run(resumed, tmp_path: Path):
    need("tensorboard")
    recipe, done, _ = resumed
    folder = tmp_path / "run"
    shutil.copytree(done, folder, ignore=shutil.ignore_patterns("checkpoint-00003", "tensorboard", TRACKERS))
    assert run(recipe, folder, ["tensorboard"], resume=True).finished
    assert same(read("tensorboard", folder)[0], expected(recipe, folder))


@pytest.mark.slow
def test_a_gap_left_by_a_switched_off_tracker_is_filled(resumed, tmp_path: Path):
    need("tensorboard")
    recipe, done, _ = resumed
    folder = tmp_path / "run"
    shutil.copytree(done, folder, ignore=shutil.ignore_patterns("checkpoint-00003", "tensorboard"))
    (line,) = [line for line in RunFolder(folder).read_metrics() if line["cycle"] == 0]
    shutil.move(folder / "metrics.jsonl", folder / "kept")
    shutil.move(folder / "evaluations", folder / "kept-too")
    with Displays(Quiet(), open_trackers(["tensorboard"], folder, recipe)) as shown:
        shown.cycle(0, line)
    shutil.move(folder / "kept", folder / "metrics.jsonl")
    shutil.move(folder / "kept-too", folder / "evaluations")
    assert run(recipe, folder, ["tensorboard"], resume=True).finished
    assert same(read("tensorboard", folder)[0], expected(recipe, folder))


@pytest.mark.parametrize("name", BACKENDS)
def test_values_that_are_not_finite_and_notes(tmp_path: Path, small_recipe, name: str):
    need(name)
    values = {"a/nan": math.nan, "a/inf": math.inf, "a/low": -math.inf, "a/fine": 0.5, "cycle": 0}
    console = Quiet()
    with Displays(console, open_trackers([name], tmp_path, small_recipe())) as shown:
        shown.note("first")
        shown.note("second")
        shown.cycle(0, dict(values))
        shown.evaluated(1, {"macro/avg@4": math.nan})
        shown.note("last")
    rows, _, notes = read(name, tmp_path)
    del values["cycle"]
    assert {k: float(v) for k, v in rows[1].items()} == pytest.approx(
        values | {"eval/macro/avg@4": math.nan}, nan_ok=True
    )
    assert console.notes == ["first", "second", "last"]
    assert notes[0].startswith("first\n\nsecond")
    assert notes[-1].endswith("last")


def test_what_tensorboard_holds_behind_the_boundary_is_replaced(tmp_path: Path, small_recipe):
    need("tensorboard")
    for value, cycles in ((1.0, range(3)), (2.0, range(2, 4))):
        with Displays(Quiet(), open_trackers(["tensorboard"], tmp_path, small_recipe())) as shown:
            for k in cycles:
                shown.cycle(k, {"x": value})
    rows, _, _ = read("tensorboard", tmp_path)
    assert rows == {1: {"x": 1.0}, 2: {"x": 1.0}, 3: {"x": 2.0}, 4: {"x": 2.0}}


def test_another_recipe_in_the_folder_is_another_run(tmp_path: Path, small_recipe):
    need("tensorboard")
    for seed in (17, 29):
        recipe = small_recipe("embedded/past", f"run.seed={seed}")
        with Displays(Quiet(), open_trackers(["tensorboard"], tmp_path, recipe)) as shown:
            for k in range(3 if seed == 17 else 1):
                shown.cycle(k, {"seed": float(seed)})
    rows, written, _ = read("tensorboard", tmp_path)
    assert rows == {1: {"seed": 29.0}}
    assert "seed = 29" in written


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path: Path, small_recipe, quiet: Quiet):
    """A full disk in the middle, a server away at the start, a failure at the end."""

    class Failing:
        def __init__(self, where: str):
            self.where, self.calls = where, []

        def start(self, start):
            from past_opsd.run.trackers import Reached

            self._do("start")
            return Reached()

        def log(self, step, values):
            self._do(f"log {step}")

        def note(self, step, text): ...

        def finish(self):
            self._do("finish")

        def _do(self, what: str) -> None:
            self.calls.append(what)
            if what == self.where:
                raise OSError(28, "No space left on device")

    recipe = small_recipe("embedded/opsd", "evaluation.at=[0.0]")
    backends = {where: Failing(where) for where in ("start", "log 2", "finish", "never")}
    trackers = [Tracker(where, backend, tmp_path / "run", recipe) for where, backend in backends.items()]
    with Displays(quiet, trackers) as shown:
        assert train(recipe, tmp_path / "run", False, shown).finished
    assert quiet.notes == [
        f"{where} failed and is switched off, the run goes on without it (OSError: [Errno 28] No space left on device)"
        for where in ("start", "log 2", "finish")
    ]
    steps = [f"log {step}" for step in range(4)]
    assert {where: backend.calls for where, backend in backends.items()} == {
        "start": ["start"],
        "log 2": ["start", *steps[:3]],
        "finish": ["start", *steps, "finish"],
        "never": ["start", *steps, "finish"],
    }


def test_a_real_disk_that_refuses(tmp_path: Path, small_recipe, quiet: Quiet):
    need("tensorboard")
    recipe = small_recipe("embedded/opsd", "run.cycles=1", "evaluation.at=[]")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tensorboard").write_text("not a folder")
    assert run(recipe, folder, ["tensorboard"], console=quiet).finished
    assert len(quiet.notes) == 1
    assert quiet.notes[0].startswith("tensorboard failed and is switched off")


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """wandb meant to reach a server: its process reads the environment anew, now and afterwards."""
    need("wandb")
    import wandb

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        wandb.teardown()
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
        yield monkeypatch
        monkeypatch.undo()
        wandb.teardown()
        server.shutdown()


def test_a_real_server_that_refuses(tmp_path: Path, small_recipe, quiet: Quiet, online: pytest.MonkeyPatch):
    online.setenv("WANDB_API_KEY", "0" * 40)
    recipe = small_recipe("embedded/opsd", "run.cycles=1", "evaluation.at=[]")
    assert run(recipe, tmp_path / "run", ["wandb"], console=quiet).finished
    assert len(quiet.notes) == 1
    assert quiet.notes[0].startswith("wandb failed and is switched off")


def test_a_missing_key_is_told_before_anything_starts(tmp_path: Path, small_recipe, online: pytest.MonkeyPatch):
    with pytest.raises(PastError, match=r"No API key configured.* Or set WANDB_MODE=offline"):
        open_trackers(["wandb"], tmp_path / "run", small_recipe())
    assert not (tmp_path / "run").exists()


def test_a_console_that_fails_is_not_hidden(tmp_path: Path):
    class Broken(Quiet):
        def cycle(self, cycle: int, metrics: dict[str, float]) -> None:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError), Displays(Broken(), []) as shown:
        shown.cycle(0, {})


def test_unknown_and_missing_trackers_are_told(tmp_path: Path, small_recipe, monkeypatch: pytest.MonkeyPatch):
    recipe = small_recipe()
    with pytest.raises(PastError, match="no tracker 'mlflow'; known are tensorboard, wandb, trackio"):
        open_trackers(["tensorboard", "mlflow"], tmp_path, recipe)
    for name in BACKENDS:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
        with pytest.raises(PastError, match=rf"pip install 'past-opsd\[{name}\]'"):
            open_trackers([name], tmp_path, recipe)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", BACKENDS)
def test_a_refused_run_leaves_no_trace(tmp_path: Path, small_recipe, name: str):
    need(name)
    recipe = small_recipe("embedded/opsd", "run.cycles=1", "evaluation.at=[]")
    train(recipe, tmp_path / "run", False, Quiet())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PastError, match="already holds a run"):
        run(recipe, tmp_path / "run", [name])
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_state_is_told(tmp_path: Path, small_recipe):
    (tmp_path / TRACKERS).write_text("{")
    with pytest.raises(PastError, match=r"trackers\.json: not written by this package"):
        open_trackers([], tmp_path, small_recipe())


def test_a_state_that_is_no_file_of_the_run_is_not_read(tmp_path: Path, small_recipe):
    os.mkfifo(tmp_path / TRACKERS)
    with pytest.raises(PastError, match="a pipe"):
        open_trackers([], tmp_path, small_recipe())
    (tmp_path / TRACKERS).unlink()
    (tmp_path / TRACKERS).symlink_to("/dev/zero")
    with pytest.raises(PastError, match="leads out of the run"):
        open_trackers([], tmp_path, small_recipe())


def test_the_command_takes_trackers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    need("tensorboard")
    settings = [*SMALL, "run.cycles=1", "evaluation.at=[]"]
    sets = [word for setting in settings for word in ("--set", setting)]
    command = ["train", "embedded/opsd", "--out", str(tmp_path / "run"), *sets, "--track"]
    assert main([*command, "tensorboard,mlflow"]) == 2
    assert "no tracker 'mlflow'; known are tensorboard, wandb, trackio" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*command, "tensorboard"]) == 0
    assert sorted(read("tensorboard", tmp_path / "run")[0]) == [1]
