from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from past_opsd.core.files import WriteError
from past_opsd.core.nouns import PastError
from past_opsd.run import attempts
from past_opsd.run.folder import RunFolder, line_name, read_lines
from past_opsd.run.record import Recorder, lost
from past_opsd.run.train import Session


@pytest.fixture
def recorded(past: Session, tmp_path: Path):
    cycles = [past.loop.cycle(k) for k in range(2)]
    recorder = Recorder(RunFolder(tmp_path), {})
    for k, cycle in enumerate(cycles):
        recorder.cycle(k, cycle, {"cost/student_samples": 6 * (k + 1)}, {"rollout": 1.0})
    recorder.settle()
    return recorder, cycles, tmp_path


def test_rollouts_hold_what_the_paper_lists(recorded):
    _, cycles, folder = recorded
    rows = pq.read_table(folder / "rollouts" / "cycle-00001.parquet").to_pylist()
    assert len(rows) == len(cycles[1].batch.attempts)
    for row, a in zip(rows, cycles[1].batch.attempts, strict=True):
        assert tuple(row["tokens"]) == a.response.tokens
        assert row["mask"] == [1] * len(a.response.tokens)
        assert (row["length"], row["correct"], row["reason"]) == (
            len(a.response.tokens),
            a.verdict.correct,
            a.verdict.reason,
        )
        assert (row["cycle"], row["adapter"], row["version"]) == (1, "student", 1)
        assert row["logprobs"] == pytest.approx(a.response.logprobs)


def test_attempts_are_read_as_they_were(recorded):
    _, cycles, folder = recorded
    rows = attempts.read(RunFolder(folder).rollouts.path(1))
    for row, a in zip(rows, cycles[1].batch.attempts, strict=True):
        found = attempts.attempt(row, a.problem)
        logprobs = tuple(float(np.float32(p)) for p in a.response.logprobs)  # as the file keeps them
        assert found == replace(a, response=replace(a.response, logprobs=logprobs))
    longest = max(len(row["prompt_tokens"]) + len(row["tokens"]) for row in rows)
    for sizes in ((1, longest), (2**31, longest - 1)):
        with pytest.raises(PastError, match=r"cycle-00001\.parquet: cannot be read"):
            attempts.read(RunFolder(folder).rollouts.path(1), *sizes)


def test_continuations_name_their_trajectory(recorded):
    _, cycles, folder = recorded
    rows = pq.read_table(folder / "continuations" / "cycle-00000.parquet").to_pylist()
    assert len(rows) == sum(len(g.drawn) for g in cycles[0].groups)
    attempts = cycles[0].batch.attempts
    for row in rows:
        assert attempts[row["trajectory"]].problem.id == row["problem"]
        assert not attempts[row["trajectory"]].verdict.correct
        assert row["adapter"] == "teacher"


def test_failures_that_are_alike_keep_their_own_continuations(past: Session, tmp_path: Path):
    cycle = past.loop.cycle(0)
    first, second = cycle.groups[:2]
    twin = replace(second, attempt=first.attempt)
    batch = replace(cycle.batch, failed=(first.attempt, twin.attempt))
    starts = (0,) * len(batch.attempts)
    cycle = replace(cycle, batch=batch, groups=[first, twin], starts=starts)
    with Recorder(RunFolder(tmp_path), {}) as recorder:
        recorder.cycle(0, cycle, {}, {})
    rows = pq.read_table(tmp_path / "continuations" / "cycle-00000.parquet").to_pylist()
    at = len(batch.correct)
    assert [row["trajectory"] for row in rows] == [at] * len(first.drawn) + [at + 1] * len(second.drawn)


def test_metrics_count_what_happened(recorded):
    _, cycles, folder = recorded
    line = RunFolder(folder).read_metrics()[0]
    correct, failed = len(cycles[0].batch.correct), len(cycles[0].batch.failed)
    assert line["rollout/success"] == pytest.approx(correct / (correct + failed))
    assert line["failed/samples"] == sum(len(g.drawn) for g in cycles[0].groups)
    shares = line["failed/mixed"] + line["failed/all_success"] + line["failed/skipped"]
    assert shares == pytest.approx(1.0)
    assert sum(v for k, v in line.items() if k.startswith("rollout/reason/")) == correct + failed


def test_rewind_takes_back_later_cycles(recorded):
    _, _, folder = recorded
    (folder / "evaluations").mkdir()
    for step in (0, 1, 2):
        (folder / "evaluations" / f"step-{step:05d}.json").write_text("{}")
    RunFolder(folder).rewind(1)
    assert [line["cycle"] for line in RunFolder(folder).read_metrics()] == [0]
    assert sorted(p.name for p in (folder / "rollouts").iterdir()) == ["cycle-00000.parquet"]
    assert sorted(p.name for p in (folder / "evaluations").iterdir()) == ["step-00000.json", "step-00001.json"]


def test_rewind_takes_back_no_file_of_another_name(recorded):
    _, _, folder = recorded
    names = ["cycle-00001-copy.parquet", "cycle-1.parquet", "cycle-9.parquet", "cycle-000001.parquet"]
    for name in names:
        (folder / "rollouts" / name).write_text("mine")
    (folder / "rollouts" / "cycle-00009.parquet").mkdir()
    RunFolder(folder).rewind(0)
    assert sorted(p.name for p in (folder / "rollouts").iterdir()) == sorted([*names, "cycle-00009.parquet"])


def test_what_is_lost_is_named(recorded):
    recorder, cycles, folder = recorded
    for k in range(2, 6):
        recorder.cycle(k, cycles[1], {}, {})
    recorder.settle()
    assert lost(RunFolder(folder), 6) == []
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([lines[0], lines[4], lines[5], lines[5]]))
    (folder / "timings.jsonl").unlink()
    (folder / "rollouts" / "cycle-00003.parquet").unlink()
    file = folder / "rollouts" / "cycle-00001.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    (folder / "rollouts" / "cycle-00002.parquet").write_bytes(b"")
    (folder / "continuations" / "cycle-00004.parquet").write_bytes(b"PAR1")
    (folder / "continuations" / "cycle-00005.parquet").unlink()
    assert lost(RunFolder(folder), 6) == [
        "metrics.jsonl lacks cycles 1-3",
        "timings.jsonl lacks cycles 0-5",
        "metrics.jsonl has cycle 5 more than once",
        "rollouts/ lacks cycle 3",
        "rollouts/: cycles 1-2 cannot be read",
        "continuations/ lacks cycle 5",
        "continuations/: cycle 4 cannot be read",
    ]


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"cycle": 0}) + '\n{"cycle": 1, "roll')
    assert RunFolder(tmp_path).read_metrics() == [{"cycle": 0}]
    RunFolder(tmp_path).rewind(5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"cycle": 0}\n'


def test_lines_are_on_the_disk_before_a_checkpoint_can_follow(recorded, monkeypatch: pytest.MonkeyPatch):
    recorder, cycles, folder = recorded
    synced: list[tuple[str, int]] = []
    monkeypatch.setattr("past_opsd.run.folder.sync", lambda path: synced.append((path.name, len(read_lines(path)))))
    recorder.cycle(2, cycles[1], {}, {})
    assert synced == [("metrics.jsonl", 3), ("timings.jsonl", 3)]
    assert len(RunFolder(folder).read_metrics()) == 3


def test_responses_are_written_beside_the_next_cycle_and_before_a_checkpoint(
    past: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cycle, digests, door = past.loop.cycle(0), dict[str, str](), Event()
    plain = attempts.write

    def slow(file: Path, rows) -> None:
        assert door.wait(60)
        plain(file, rows)

    monkeypatch.setattr(attempts, "write", slow)
    with Recorder(run := RunFolder(tmp_path), digests) as recorder:
        line = recorder.cycle(0, cycle, {}, {})
        assert run.read_metrics() == [line]
        assert run.rollouts.numbers() == []
        assert list(digests) == [line_name(0)]
        door.set()
        recorder.settle()
        assert list(digests) == [line_name(0), "rollouts/cycle-00000.parquet", "continuations/cycle-00000.parquet"]
        assert run.altered(digests) == []
        recorder.cycle(1, cycle, {}, {})
        recorder.cycle(2, cycle, {}, {})
        assert {0, 1} <= set(run.rollouts.numbers())  # what is written is one cycle behind at most
    assert run.continuations.numbers() == run.rollouts.numbers() == [0, 1, 2]
    assert run.altered(digests) == []


def test_what_could_not_be_written_beside_a_cycle_stops_the_run(recorded, monkeypatch: pytest.MonkeyPatch):
    recorder, cycles, _ = recorded

    def full(file: Path, rows) -> None:
        raise WriteError(f"{file}: no space left")

    monkeypatch.setattr(attempts, "write", full)
    recorder.cycle(2, cycles[1], {}, {})
    with pytest.raises(WriteError, match=r"cycle-00002\.parquet: no space left"):
        recorder.settle()


def test_a_file_is_written_and_read_group_by_group(recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, cycles, _ = recorded
    own = cycles[1].batch.attempts
    rows = [attempts.row(1, a, {"student": 0}, i, False, i) for i, a in enumerate(own)]
    longest = max(len(a.view.prompt) + len(a.response.tokens) for a in own)
    monkeypatch.setattr(attempts, "GROUP", longest + 1)
    held: list[int] = []

    def counted():
        for place, row in enumerate(rows):
            held.append(place)
            yield row

    file = tmp_path / "some.parquet"
    attempts.write(file, counted())
    with pq.ParquetFile(file) as opened:
        assert opened.num_row_groups >= len(rows) // 2 > 1
    found = attempts.read(file)
    assert [tuple(row["tokens"]) for row in found] == [a.response.tokens for a in own]
    assert [row["mask"] for row in found] == [
        [int(t >= i) for t in range(len(a.response.tokens))] for i, a in enumerate(own)
    ]
    assert attempts.read(file, places={1, 4}) == [found[1], found[4]]
    brief = attempts.outline(file)
    assert [row["place"] for row in brief] == list(range(len(rows)))
    assert all(row[key] == whole[key] for row, whole in zip(brief, found, strict=True) for key in row.keys() & whole)
    assert attempts.read_table(file).to_pylist() == found
    attempts.write(file, [rows[0] | {"length": rows[0]["length"] + 1}])
    with pytest.raises(PastError, match=r"some\.parquet: cannot be read"):
        attempts.read(file)


def test_a_file_that_would_swell_is_refused(tmp_path: Path):
    """Zeros without end, in little space on the disk."""
    file = tmp_path / "bomb.parquet"
    columns = {"tokens": [[0] * 2_000_000], "text": ["a"]}
    rows = [{name: columns.get(name, [None])[0] for name in attempts.SCHEMA.names}] * 40
    pq.write_table(pa.Table.from_pylist(rows, schema=attempts.SCHEMA), file, use_dictionary=False, compression="zstd")
    assert file.stat().st_size < 1_000_000
    for reader in (attempts.read, attempts.read_table, attempts.outline):
        with pytest.raises(PastError, match=r"bomb\.parquet: cannot be read \(40 rows of"):
            reader(file)
