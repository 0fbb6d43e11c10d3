import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from past_opsd.core.nouns import PastError
from past_opsd.interface.arguments import verify as add_arguments
from past_opsd.interface.commands import verify as run
from past_opsd.rollout.verifiers import Verifier
from past_opsd.rollout.verifiers.boxed_math import Options, build
from past_opsd.rollout.verifiers.grade import grade_file, render


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with build(Options()) as built:
        yield built


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_keep_their_order_and_fields(tmp_path: Path, verifier: Verifier) -> None:
    rows = [{"id": i, "gold": "7", "prediction": rf"\boxed{{{i % 3 + 6}}} ½", "extra": [i]} for i in range(600)]
    rows.append({"gold": 7, "response": "\\boxed{7}\ud800"})
    rows.append({"gold": "7", "prediction": r"\boxed{7}", "finished": False})
    out = tmp_path / "out.jsonl"
    summary = grade_file(write(tmp_path / "in.jsonl", rows), out, verifier)
    graded = read(out)
    assert [{k: v for k, v in row.items() if k not in ("correct", "reason")} for row in graded] == rows
    assert [row["correct"] for row in graded[:3]] == [False, True, False]
    assert [row["reason"] for row in graded[-2:]] == ["correct", "truncated"]
    assert (summary.rows, summary.correct, summary.overall.total) == (602, 201, 0)
    assert "½" in out.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_agreement_by_source_without_suspect_policy_and_skipped_rows(tmp_path: Path, verifier: Verifier) -> None:
    base = {"gold": "7", "p": "direct", "source": "a/b tests::one"}
    rows = [
        base | {"prediction": r"\boxed{7}", "equal": True},
        base | {"prediction": "7", "p": "wrap", "expected": True},
        base | {"prediction": r"\boxed{8}", "correct": True},
        base | {"prediction": r"\boxed{7}", "equal": False, "source": "c/d::two"},
        base | {"prediction": "7", "p": "skip", "equal": True},
        base | {"prediction": r"\boxed{8}", "equal": True, "suspect": "why"},
        base | {"prediction": r"\boxed{8}", "equal": True, "policy": "units"},
        base | {"prediction": r"\boxed{8}", "expected": None},
    ]
    out = tmp_path / "out.jsonl"
    summary = grade_file(write(tmp_path / "in.jsonl", rows), out, verifier, protocol_field="p")
    assert (summary.overall.same, summary.overall.total, summary.overall.wrongly_accepted) == (2, 4, 1)
    assert summary.overall.wrongly_rejected == 1
    assert {name: (p.ours.same, p.ours.total) for name, p in summary.by_source.items()} == {
        "a/b": (2, 3),
        "c/d": (0, 1),
    }
    assert (summary.suspect.ours.total, summary.policy.ours.total, summary.reasons["skipped"]) == (1, 1, 1)
    assert [row.get("stated") for row in read(out)][2:5] == [True, False, True]
    text = render(summary)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "50.0%" in text
    again = grade_file(out, None, verifier, protocol_field="p")
    assert again.overall == summary.overall


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops\n", "not a JSON object"),
        ("[1]\n", "not a JSON object"),
        ('{"prediction": "x"}\n', "`gold` is missing"),
        ('{"gold": "1"}\n', "`prediction` is missing"),
        ('{"gold": true, "prediction": "x"}\n', "`gold` is not a string"),
        ('{"gold": "1", "prediction": 3}\n', "`prediction` is not a string"),
        ('{"gold": "1", "prediction": "x", "finished": "yes"}\n', "`finished`"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path: Path, verifier: Verifier, line: str, message: str) -> None:
    good = {"gold": "1", "prediction": r"\boxed{1}"}
    path, out = write(tmp_path / "in.jsonl", [good, "\n", line, good]), tmp_path / "out.jsonl"
    out.write_text("before")
    with pytest.raises(PastError, match=rf"in\.jsonl:3: .*{message}.*--skip-bad"):
        grade_file(path, out, verifier)
    assert out.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    summary = grade_file(path, out, verifier, skip_bad=True)
    assert (summary.rows, summary.bad, len(read(out))) == (2, 1, 2)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "in.jsonl", [{"gold": "4", "prediction": r"\boxed{4.0}"}])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([str(path), "--verifier", "exact"])) == 0
    assert "wrong" in capsys.readouterr().out
    out = tmp_path / "out.jsonl"
    assert run(parser.parse_args([str(path), "--out", str(out), "--set", "workers=1"])) == 0
    assert read(out)[0]["correct"] is True
    for arguments, message in (
        ([str(tmp_path / "none.jsonl")], "cannot be read"),
        ([str(path), "--set", "timeouts=3"], "timeouts.*knows .*timeout,"),
        ([str(path), "--set", "timeout"], "KEY=VALUE"),
        ([str(path), "--verifier", "exactly"], "known are"),
        ([str(path), "--out", str(path / "out")], "cannot be written"),
        ([str(path), "--protocol-field", "p"], "in.jsonl:1: `p` is not one of"),
        ([str(write(tmp_path / "empty.jsonl", []))], "there are no rows in it"),
        ([str(write(tmp_path / "bad.jsonl", ["oops\n"])), "--skip-bad"], "all 1 rows are bad"),
        ([str(path), "--out", str(path)], "the file to be graded"),
        ([str(path), "--out", str(tmp_path / "." / "in.jsonl")], "the file to be graded"),
    ):
        with pytest.raises(PastError, match=message):
            run(parser.parse_args(arguments))
    assert read(path) == [{"gold": "4", "prediction": r"\boxed{4.0}"}]


@pytest.mark.slow
def test_the_command_sets_math_verify_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"family": "percent", "gold": "5", "prediction": r"\boxed{5\%}", "expected": False},
        {"family": "percent", "gold": "5", "prediction": r"\boxed{5}", "expected": True},
        {"family": "times", "gold": "20:34", "prediction": r"\boxed{20:34:00}", "expected": True},
    ]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = tmp_path / "out.jsonl"
    assert run(parser.parse_args([str(write(tmp_path / "in.jsonl", rows)), "--out", str(out)])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    table = {line[:25].strip(): line[25:].split() for line in lines}
    assert table["all"] == ["3", "100.0%", "0", "0", "33.3%", "1", "1"]
    assert table["percent"] == ["2", "100.0%", "0", "0", "50.0%", "1", "0"]
    assert table["times"] == ["1", "100.0%", "0", "0", "0.0%", "0", "1"]
    assert [row["reason"] for row in read(out)] == ["wrong", "correct", "correct"]
