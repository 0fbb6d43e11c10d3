from __future__ import annotations

import json
from pathlib import Path

import pytest

from past_opsd.tasks import jsonl
from past_opsd.types import PastError

GOOD = {"problem": "1+1", "solution": "so 2", "answer": "2"}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return path


def test_aliases_numbers_and_extra_columns(tmp_path: Path):
    row = {"Question": "1+1", "reference_solution": "so 2", "ground_truth": 2, "level": "easy", "id": 7}
    (problem,) = jsonl.read(write(tmp_path / "a.jsonl", row, ""), needs_solution=True)
    assert (problem.id, problem.text, problem.solution, problem.answer) == ("7", "1+1", "so 2", "2")
    assert problem.extra == {"level": "easy"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{nope", r"a\.jsonl:2: not JSON"),
        ([1], r"a\.jsonl:2: a row must be a JSON object"),
        ({"problem": "x", "solution": "y"}, r"a\.jsonl:2: needs a non-empty text 'answer' \(or Answer, ground_truth\)"),
        ({"problem": " ", "solution": "y", "answer": "1"}, r"a\.jsonl:2: needs a non-empty text 'problem'"),
        ({"problem": "x", "answer": "1"}, r"a\.jsonl:2: needs a non-empty text 'solution'"),
        ({"problem": ["x"], "solution": "y", "answer": "1"}, r"a\.jsonl:2: needs a non-empty text 'problem'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: object, message: str):
    with pytest.raises(PastError, match=message):
        jsonl.read(write(tmp_path / "a.jsonl", GOOD, row), needs_solution=True)


def test_unicode_line_separators_inside_a_text_do_not_end_a_row(tmp_path: Path):
    row = json.dumps(GOOD | {"problem": "one\u2028two\x85"}, ensure_ascii=False)
    (problem,) = jsonl.read(write(tmp_path / "a.jsonl", row), needs_solution=True)
    assert problem.text == "one\u2028two\x85"


def test_evaluation_rows_need_no_solution(tmp_path: Path):
    assert jsonl.read(write(tmp_path / "a.jsonl", {"problem": "x", "answer": "1"}), needs_solution=False)


def test_empty_missing_and_repeated(tmp_path: Path):
    with pytest.raises(PastError, match="holds no problem"):
        jsonl.read(write(tmp_path / "a.jsonl", ""), needs_solution=True)
    with pytest.raises(PastError, match="cannot be read"):
        jsonl.read(tmp_path / "none.jsonl", needs_solution=True)
    with pytest.raises(PastError, match="two rows have the id 'a'"):
        jsonl.read(write(tmp_path / "a.jsonl", GOOD | {"id": "a"}, GOOD | {"id": "a"}), needs_solution=True)


def test_identity_follows_the_content(tmp_path: Path):
    def identity(row: dict) -> str:
        path = write(tmp_path / "a.jsonl", row)
        return jsonl.build(jsonl.Options(train=str(path), evaluation={"e": str(path)})).identity

    assert identity(GOOD) == identity(GOOD) != identity(GOOD | {"solution": "hence 2"})
    assert identity(GOOD | {"hint": "add"}) != identity(GOOD | {"hint": "count"})


def test_the_shared_files_are_readable(shared: Path):
    data = shared / "data"
    options = jsonl.Options(
        train=str(data / "train" / "gsm8k_train.jsonl"),
        evaluation={name: str(data / "eval" / f"{name}.jsonl") for name in ("aime24", "aime25", "hmmt25")},
    )
    task = jsonl.build(options)
    assert len(task.train()) == 7473
    assert {name: len(ps) for name, ps in task.evaluation().items()} == {"aime24": 30, "aime25": 30, "hmmt25": 30}
