from __future__ import annotations

import builtins
import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SMALL

from past_opsd.core import config
from past_opsd.core.nouns import PastError, Problem
from past_opsd.run.train import session
from past_opsd.tasks import Problems, dataset
from past_opsd.tasks._columns import Loaded, Reading, load
from past_opsd.tasks._rows import parse_hub

GOOD = {"problem": "1+1", "solution": "so 2", "answer": "2"}
USER = {"role": "user", "content": "1+1"}


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return path


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)
    return path


def read(path: Path, **reading: Any) -> Loaded:
    return load(str(path), Reading(**reading))


def one(tmp_path: Path, row: dict[str, Any], **reading: Any) -> Problem:
    loaded = read(write(tmp_path / "a.jsonl", row, ""), **reading)
    assert loaded.bad == ()
    (problem,) = loaded.problems
    return problem


def build(path: Path, **options: Any) -> Problems:
    return dataset.build(dataset.Options(train=str(path), evaluation={"e": str(path)}, **options))


def test_aliases_numbers_and_extra_columns(tmp_path: Path):
    row = {"Question": "1+1", "reference_solution": "so 2", "ground_truth": 2, "level": "easy", "id": 7}
    problem = one(tmp_path, row)
    assert (problem.id, problem.text, problem.solution, problem.answer) == ("7", "1+1", "so 2", "2")
    under_their_own_names = {"Question": "1+1", "reference_solution": "so 2", "ground_truth": 2}
    assert problem.extra == under_their_own_names | {"level": "easy"}
    assert one(tmp_path, GOOD | {"id": 7, "level": "easy"}).extra == {"level": "easy"}
    assert one(tmp_path, {"prompt": "1+1", "privileged_context": "so", "Answer": 2.5}).answer == "2.5"


COLUMNS = [
    {"Problem": "1+1", "SOLUTION": "so 2", "Answer": "2"},
    {"Question": "1+1", "Reference Solution": "so 2", "Ground-Truth": "2"},
    {"problem statement": "1+1", "worked_solution": "so 2", "finalAnswer": "2"},
    {"problems": "1+1", "solutoin": "so 2", "answers": "2", "problem_id": 7, "answer_type": "int"},
]


@pytest.mark.parametrize("row", COLUMNS, ids=lambda row: next(iter(row)))
def test_other_spellings_of_columns_are_understood_and_guesses_are_told(tmp_path: Path, row: dict[str, Any]):
    loaded = read(write(tmp_path / "a.jsonl", row), keep=[])
    (problem,) = loaded.problems
    assert (problem.text, problem.solution, problem.answer) == ("1+1", "so 2", "2")
    told = "is read as the problem; if that is wrong, set task.columns.problem"
    for notes in (loaded.notes, build(tmp_path / "a.jsonl").notes):
        assert any(told in note for note in notes) == (row in COLUMNS[2:])


def test_a_name_that_only_sounds_alike_is_not_taken(tmp_path: Path):
    for name in ("problem_id", "problem_type", "question_number", "source"):
        loaded = read(write(tmp_path / "a.jsonl", {name: "7", "solution": "so", "answer": "2"}))
        assert loaded.bad
        assert f"set task.columns.problem to one of: {name}" in loaded.bad[0]


TABLE = [["Problem", "Solution", "Answer", "level"], ["1+1, or so", 'it\n"is" 2', "2", ""], ["2+2", "4", "4", "easy"]]


@pytest.mark.parametrize(("name", "sign"), [("a.csv", ","), ("a.CSV", ";"), ("a.csv", "\t"), ("a.tsv", "\t")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_as_spreadsheets_write_it(tmp_path: Path, name: str, sign: str, encoding: str):
    with (tmp_path / name).open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=sign).writerows([*TABLE, [], ["3+3", "6"]])
    loaded = read(tmp_path / name)
    assert [(p.text, p.solution, p.answer) for p in loaded.problems] == [tuple(row[:3]) for row in TABLE[1:]]
    assert [p.extra for p in loaded.problems][1]["level"] == "easy"
    assert loaded.problems[1].id == f"{name}:4"  # lines are counted as an editor does: a cell may hold several
    assert loaded.bad == (
        f"{tmp_path / name}:6: has 2 cells where the first line names 4 columns; quote cells that hold a comma",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'problem,answer\n"1+1,2\n', "cannot be read as CSV in UTF-8"),
        (b"problem,answer\n\xff,2\n", "cannot be read as CSV in UTF-8"),
        (b"problem,answer,answer\n1,2,3\n", "two columns are called 'answer'"),
        ("problem,answer\n1,2\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b"", "holds no problem"),
    ],
)
def test_a_csv_that_cannot_be_read_is_one_message(tmp_path: Path, text: bytes, message: str):
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(PastError, match=message):
        read(tmp_path / "a.csv")


def test_a_mark_before_the_first_line_and_a_list_of_objects(tmp_path: Path):
    rows = [GOOD, GOOD | {"problem": "2+2"}]
    for name, text in (("a.jsonl", "\n".join(map(json.dumps, rows))), ("a.json", json.dumps(rows, indent=2))):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert [p.text for p in read(tmp_path / name).problems] == ["1+1", "2+2"]
    (tmp_path / "b.json").write_text("[1, {]", encoding="utf-8")
    with pytest.raises(PastError, match="begins as a JSON list and is none"):
        read(tmp_path / "b.json")
    (tmp_path / "c.jsonl").write_text(json.dumps(GOOD, indent=2), encoding="utf-8")
    with pytest.raises(PastError, match="one object is spread over several lines"):
        read(tmp_path / "c.jsonl")


def test_relative_files_are_looked_for_beside_the_recipe_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, there = tmp_path / "here", tmp_path / "there"
    write(there / "data" / "train.jsonl", GOOD)
    write(here / "held.jsonl", GOOD)
    write(here / "data" / "train.jsonl", GOOD)
    (there / "base.toml").write_text(
        'extends = "paper/past"\nname = "base"\n[task]\ntrain = "data/train.jsonl"\n'
        'evaluation = { held = "held.jsonl", lost = "lost.jsonl", hub = "hf:openai/gsm8k?split=test" }\n'
    )
    (here / "mine.toml").write_text('extends = "../there/base.toml"\nname = "mine"\n[model]\npath = "model"\n')
    (here / "model").mkdir()
    monkeypatch.chdir(here)
    recipe = config.load(here / "mine.toml")
    assert recipe.task.train == str(there / "data" / "train.jsonl")
    assert recipe.model.path == str(here / "model")
    assert recipe.task.evaluation == {
        "held": str(here / "held.jsonl"),  # not beside the recipe: the working folder is tried
        "lost": str(there / "lost.jsonl"),
        "hub": "hf:openai/gsm8k?split=test",
    }
    with pytest.raises(PastError, match=re.escape(str(there / "lost.jsonl")) + ".*looked for beside its recipe, then"):
        load(recipe.task.evaluation["lost"], Reading())
    assert config.load("mine.toml", ["task.train=data/train.jsonl"]).task.train == str(here / "data" / "train.jsonl")


def test_a_table_that_is_a_value_replaces_the_inherited_one(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(
        'extends = "paper/past"\nname = "mine"\n[prompts]\nstudent_kwargs = {}\n'
        '[task]\nevaluation = { mine = "hf:a/b" }\n[rollout.student]\ntop_k = 3\n'
    )
    recipe = config.load(tmp_path / "mine.toml", ["task.evaluation.more=hf:c/d"])
    assert recipe.task.evaluation == {"mine": "hf:a/b", "more": "hf:c/d"}
    assert recipe.prompts.student_kwargs == {}
    assert (recipe.rollout.student.top_k, recipe.rollout.student.top_p) == (3, 0.95)  # a section is merged


def test_problems_held_out_of_training(tmp_path: Path):
    rows = [GOOD | {"problem": f"{i % 20}+1"} for i in range(30)]
    path = write(tmp_path / "a.jsonl", *rows)
    made = dataset.build(dataset.Options(train=str(path), hold_out=5))
    ((name, held),) = made.evaluation().items()
    assert (name, len(held)) == ("held_out", 5)
    assert not {p.text for p in held} & {p.text for p in made.train()}
    assert len({p.text for p in made.train()}) == 15
    longer = write(tmp_path / "b.jsonl", *rows, *(GOOD | {"problem": f"{i}+2"} for i in range(3)))
    kept = dataset.build(dataset.Options(train=str(longer), hold_out=5)).evaluation()["held_out"]
    assert len({p.text for p in kept} & {p.text for p in held}) >= 2  # by text: three more problems move at most three
    with pytest.raises(PastError, match="only 20 different problems, so none would be left"):
        dataset.build(dataset.Options(train=str(path), hold_out=20))
    with pytest.raises(PastError, match="nothing to evaluate on"):
        dataset.build(dataset.Options(train=str(path)))


def test_a_mapped_column_wins_and_one_that_is_missing_is_told(tmp_path: Path):
    row = GOOD | {"task": "2+2", "gold": "4", "key": "k"}
    problem = one(tmp_path, row, columns={"problem": "task", "answer": "gold", "id": "key"})
    assert (problem.id, problem.text, problem.answer) == ("k", "2+2", "4")
    assert problem.extra == {name: row[name] for name in ("problem", "answer", "task", "gold", "key")}
    with pytest.raises(PastError, match=r"task.columns.problem = 'taks': .* has problem, solution, answer, task"):
        build(write(tmp_path / "a.jsonl", row), columns={"problem": "taks"})


@pytest.mark.parametrize(
    ("row", "solution", "answer"),
    [
        ({"answer": "Half of 84 is 42.\n#### 42"}, "Half of 84 is 42.", "42"),
        ({"answer": "so #### 1,234 "}, "so", "1,234"),
        ({"solution": "own words", "answer": "Half.\n#### 42"}, "own words", "42"),
        (
            {"solution": r"first \boxed{1}, then \boxed{\frac{1}{2}}."},
            r"first \boxed{1}, then \boxed{\frac{1}{2}}.",
            None,
        ),
        ({"solution": "Half.\n#### 42"}, "Half.", "42"),
        ({"solution": r"\boxed{7}", "answer": "8"}, r"\boxed{7}", "8"),
        ({"solution": "s", "answer": "#### is a heading\nand more"}, "s", "#### is a heading\nand more"),
    ],
    ids=["gsm8k", "one line", "solution stays", "box", "solution marked", "answer wins", "no mark"],
)
def test_answers_inside_worked_solutions(tmp_path: Path, row: dict[str, str], solution: str, answer: str | None):
    problem = one(tmp_path, {"question": "q"} | row)
    assert (problem.solution, problem.answer) == (solution, r"\frac{1}{2}" if answer is None else answer)


def test_messages_become_the_problem_and_are_kept_for_reward_functions(tmp_path: Path):
    problem = one(tmp_path, GOOD | {"problem": None, "prompt": [USER]})
    assert problem.text == "1+1"
    assert problem.extra["prompt"] == [USER]
    parts = {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]}
    row = {"prompt": [{"role": "system", "content": "Be brief."}, parts], "solution": "s", "answer": "2"}
    assert one(tmp_path, row).text == "Be brief.\n\n1+1"


def test_columns_that_are_not_read_are_offered(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", {"foo": "x", "solution": "y", "answer": "1"})
    with pytest.raises(PastError, match=r"set task\.columns\.problem to one of: foo$"):
        build(path, keep=[])


def test_a_list_on_one_line_is_a_list_whatever_the_file_is_called(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps([GOOD, GOOD]) + "\n")
    assert len(build(tmp_path / "a.jsonl").train()) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{nope", "not JSON"),
        ([1], "a row must be a JSON object, not list"),
        ({"problem": "x", "solution": "y"}, "no box to take it from; end it with a \\boxed{...}"),
        ({"problem": "x", "solution": "y", "lvl": 1}, "or set task.columns.answer to one of: lvl"),
        ({"problem": "x", "answer": None, "solution": "y"}, "its answer (column 'answer') is empty"),
        (GOOD | {"problem": " "}, "its problem (column 'problem') is empty"),
        ({"problem": "x", "answer": "1"}, "has no solution: no column 'solution' (or reference_solution, "),
        ({"problem1": "x", "problem2": "y"} | {"answer": "1"}, "task.columns.problem to one of: problem1, problem2"),
        (GOOD | {"problem": 3}, "'problem' must be a text, found 3"),
        (GOOD | {"answer": True}, "'answer' must be a text, found True"),
        (GOOD | {"problem": ["x"]}, "must be one user turn"),
        (GOOD | {"problem": []}, "must be one user turn"),
        (GOOD | {"problem": [USER, {"role": "assistant", "content": "2"}]}, "found ['user', 'assistant']"),
        (GOOD | {"problem": [USER, USER]}, "must be one user turn"),
        (GOOD | {"problem": [{"role": "user", "content": [{"type": "image"}]}]}, "something else than text"),
        (GOOD | {"id": "a"}, "repeats the id 'a'"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "row",
)
def test_bad_rows_are_named_and_refused_or_left_out(tmp_path: Path, row: object, message: str):
    path = write(tmp_path / "a.jsonl", GOOD | {"id": "a"}, row, GOOD)
    with pytest.raises(PastError) as refused:
        build(path)
    assert f"{path}: 1 of 3 rows cannot be used" in str(refused.value)
    assert f"{path}:2: " in str(refused.value)
    assert message in str(refused.value)
    assert 'bad_rows = "skip"' in str(refused.value)
    task = build(path, bad_rows="skip", needs_solution=True)
    assert len(task.train()) == 2
    assert f"1 of 3 rows cannot be used and are left out:\n  {path}:2: " in task.notes[0]


def test_ten_bad_rows_are_listed_and_the_rest_counted(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", *["[]"] * 13, GOOD)
    with pytest.raises(PastError) as refused:
        build(path)
    assert str(refused.value).count("JSON object") == 10
    assert "  and 3 more" in str(refused.value)
    with pytest.raises(PastError, match="2 of 2 rows cannot be used"):
        build(write(tmp_path / "b.jsonl", "[]", "1"), bad_rows="skip")


def test_bytes_that_are_no_text_are_one_bad_row(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"problem": "\xff"}\n')
    assert [line.split(": ")[0] for line in read(path).bad] == [f"{path}:2"]


def test_unicode_line_separators_inside_a_text_do_not_end_a_row(tmp_path: Path):
    row = json.dumps(GOOD | {"problem": "one\u2028two\x85"}, ensure_ascii=False)
    (problem,) = read(write(tmp_path / "a.jsonl", row)).problems
    assert problem.text == "one\u2028two\x85"


def test_what_a_method_or_verifier_does_without_need_not_be_there(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", {"problem": "x", "tests": "assert 1"})
    assert build(path, needs_solution=False, needs_answer=False).train()[0].extra == {"tests": "assert 1"}
    held_out = write(tmp_path / "e.jsonl", {"problem": "x", "answer": "1"})
    train = write(tmp_path / "t.jsonl", GOOD)
    assert dataset.build(dataset.Options(train=str(train), evaluation={"e": str(held_out)})).evaluation()["e"]


def test_limits(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", *[GOOD | {"problem": str(i)} for i in range(5)], "not reached")
    task = build(path, limit=3, evaluation_limit=2)
    assert [p.text for p in task.train()] == ["0", "1", "2"]
    assert len(task.evaluation()["e"]) == 2


def test_parquet_and_json_lines_give_the_same_problems(tmp_path: Path):
    rows = [GOOD | {"problem": f"{i}", "prompt": [USER], "n": i} for i in range(5)]
    lines, table = write(tmp_path / "a.jsonl", *rows), parquet(tmp_path / "a.parquet", *rows)
    from_lines, from_table = read(lines).problems, read(table).problems
    assert [p.id for p in from_table] == [f"a.parquet:{i}" for i in range(1, 6)]
    assert [(p.text, p.solution, p.answer, p.extra) for p in from_table] == [
        (p.text, p.solution, p.answer, p.extra) for p in from_lines
    ]


def test_parquet_columns_that_are_not_kept_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = parquet(tmp_path / "a.parquet", *[GOOD | {"long": "x" * 100, "level": i} for i in range(3)])
    asked: list[list[str]] = []
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, **k: asked.append(k["columns"]) or whole(self, **k)
    )
    loaded = read(path, keep=["level"])
    assert [p.extra for p in loaded.problems] == [{"level": i} for i in range(3)]
    assert asked == [["problem", "solution", "answer", "level"]]
    assert loaded.columns == ("problem", "solution", "answer", "long", "level")
    assert read(write(tmp_path / "a.jsonl", GOOD | {"long": "x"}), keep=[]).problems[0].extra == {}


def test_a_parquet_row_is_named_and_a_broken_file_is_told(tmp_path: Path):
    path = parquet(tmp_path / "a.parquet", GOOD, GOOD | {"answer": None})
    assert read(path).bad[0].startswith(f"{path}: row 2: its answer (column 'answer') is empty")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(PastError, match=r"b\.parquet: cannot be read as Parquet"):
        read(tmp_path / "b.parquet")


@pytest.mark.parametrize("save", [write, parquet], ids=["jsonl", "parquet"])
def test_a_folder_of_shards_is_one_source_in_order(tmp_path: Path, save: Any):
    ending = "jsonl" if save is write else "parquet"
    for i in (1, 0):
        save(tmp_path / "data" / f"part-{i}.{ending}", GOOD | {"problem": f"{i}a"}, GOOD | {"problem": f"{i}b"})
    problems = read(tmp_path / "data").problems
    assert [p.text for p in problems] == ["0a", "0b", "1a", "1b"]
    assert problems[-1].id == f"part-1.{ending}:2"


def test_sources_that_are_none(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "mixed" / "a.jsonl", GOOD)
    parquet(tmp_path / "mixed" / "a.parquet", GOOD)
    (tmp_path / "a.txt").write_text("problem\n")
    for path, message in [
        (write(tmp_path / "a.jsonl", ""), "holds no problem"),
        (tmp_path / "none.jsonl", r"none\.jsonl: cannot be read .*hf:owner/name"),
        (tmp_path / "none", r"none: cannot be read"),
        (tmp_path / "empty", r"no \.jsonl, .*\.parquet file"),
        (tmp_path / "mixed", r"several kinds \(\.jsonl, \.parquet\)"),
        (tmp_path / "a.txt", r"unknown kind of file; give JSON lines \(\.jsonl\)"),
    ]:
        with pytest.raises(PastError, match=message):
            read(path)


def test_identity_follows_the_content(tmp_path: Path):
    def identity(row: dict, **options: Any) -> str:
        return build(write(tmp_path / "a.jsonl", row), **options).identity

    assert identity(GOOD) == identity(GOOD) != identity(GOOD | {"solution": "hence 2"})
    assert identity(GOOD | {"hint": "add"}) != identity(GOOD | {"hint": "count"})
    assert identity(GOOD | {"hint": "add"}, keep=[]) == identity(GOOD)
    with pytest.raises(PastError, match=r"nothing to evaluate on"):
        dataset.build(dataset.Options(train="x", evaluation={}))


def test_a_recipe_can_say_it_all(tmp_path: Path):
    file = write(
        tmp_path / "r.toml", 'extends = "embedded/past"', '[task]\nname = "dataset"', 'train = "t"', "keep = []"
    )
    file.write_text(file.read_text() + 'evaluation = { e = "e" }\ncolumns = { problem = "Q" }\nbad_rows = "skip"\n')
    recipe = config.load(file)
    assert recipe.task.columns == {"problem": "Q"}
    again = write(tmp_path / "again.toml", config.to_toml(recipe))
    assert config.dump(config.load(again)) == config.dump(recipe)
    with pytest.raises(PastError, match=r"task\.columns\.probelm"):
        config.load(file, ["task.columns.probelm=Q"])
    assert config.load("paper/past").task.train.startswith("hf:")


# The Hugging Face hub: a folder made by `datasets` goes the way a hub id goes.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets = pytest.importorskip("datasets", reason="needs the extra [data]")
    folder = tmp_path_factory.mktemp("hub")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list([GOOD | {"problem": str(i), "prompt": [USER], "long": "x"} for i in range(3)])
    data.to_parquet(folder / "plain" / "train.parquet")
    data.select([0]).to_parquet(folder / "plain" / "test.parquet")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(folder / "saved")
    data.save_to_disk(folder / "single")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra [data]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("plain", ["0", "1", "2"]),
        ("plain?split=test", ["0"]),
        ("saved", ["0", "1", "2"]),
        ("saved?split=test", ["1"]),
        ("single", ["0", "1", "2"]),
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_hugging_face_dataset(made: Path, name: str, texts: list[str]):
    loaded = load(f"hf:{made}/{name}", Reading(keep=["prompt"]))
    assert [p.text for p in loaded.problems] == texts
    assert [p.extra for p in loaded.problems] == [{"prompt": [USER]}] * len(texts)
    assert loaded.problems[0].id == f"{made}/{name.split('?')[0]}:1"
    assert "long" in loaded.columns


@pytest.mark.usefixtures("cache")
def test_a_dataset_that_cannot_be_loaded_is_told(made: Path, monkeypatch: pytest.MonkeyPatch):
    for name, message in [
        ("plain?split=dev", 'Unknown split "dev"'),
        ("plain?config=main", "'main' not found"),
        ("saved?split=dev", "KeyError"),
        ("nothing", "cannot be loaded"),
    ]:
        with pytest.raises(PastError, match=message):
            load(f"hf:{made}/{name}", Reading())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(PastError, match=r"hf:no/such: cannot be loaded .*hub within reach.*name a local copy"):
        load("hf:no/such", Reading())


def test_hub_names():
    assert parse_hub("hf:a/b") == ("a/b", {"config": None, "split": "train", "revision": None})
    assert parse_hub("hf:a/b?config=c&split=d&revision=e") == ("a/b", {"config": "c", "split": "d", "revision": "e"})
    for bad in ("hf:", "hf:a/b?spilt=d", "hf:a/b?split="):
        with pytest.raises(PastError, match="write it as hf:owner/name"):
            parse_hub(bad)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PastError, match=r"pip install 'past-opsd\[data\]'"):
        load("hf:a/b", Reading())


def test_real_files(shared: Path):
    data = shared / "data"
    options = dataset.Options(
        train=str(data / "train" / "gsm8k_train.jsonl"),
        evaluation={name: str(data / "eval" / f"{name}.jsonl") for name in ("aime24", "aime25", "hmmt25")},
    )
    task = dataset.build(options)
    assert len(task.train()) == 7473
    assert task.notes == ()
    assert {name: len(ps) for name, ps in task.evaluation().items()} == {"aime24": 30, "aime25": 30, "hmmt25": 30}


@pytest.mark.slow
def test_a_run_on_parquet_with_a_users_function_is_the_run_on_the_same_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_recipe: Any
):
    (tmp_path / "my_checks.py").write_text(
        "import re\n"
        "def check(response, problem):\n"
        "    return re.findall(r'boxed{(.)}', response)[-1:] == [problem.extra['gold']]\n"
    )
    monkeypatch.chdir(tmp_path)
    made = config.plugin("task", "embedded").build(small_recipe().task)
    for name, part in (("train", made.train()), *made.evaluation().items()):
        rows = [{"id": p.id, "problem": p.text, "solution": p.solution, "gold": p.answer} for p in part]
        parquet(tmp_path / f"{name}.parquet", *rows)
    held_out = ", ".join(f'{name} = "{name}.parquet"' for name in made.evaluation())
    cut = [s for s in SMALL if not s.startswith("task.")]
    sets = ["task.name=dataset", "task.train=train.parquet", f"task.evaluation={{ {held_out} }}"]
    sets += ["task.needs_answer=false", "verifier.name=function", "verifier.path=my_checks:check"]
    outcomes = []
    for recipe in (small_recipe(), config.load("embedded/past", [*cut, *sets])):
        with session(recipe) as parts:
            cycle = parts.loop.cycle(0)
            outcomes.append([(a.problem.id, a.response, a.verdict.correct) for a in cycle.batch.attempts])
            outcomes.append(
                [g.continuations for g in cycle.groups] and [parts.evaluate(1).outcomes()["chain3"].tolist()]
            )
    assert outcomes[:2] == outcomes[2:]
    assert {correct for _, _, correct in outcomes[0]} == {True, False}
