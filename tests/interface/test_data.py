from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from past_opsd.core import config
from past_opsd.core.nouns import PastError, Problem
from past_opsd.interface import data
from past_opsd.run.train import session
from past_opsd.tasks._overlap import normalise, overlaps, repeats

ROWS = [
    {
        "id": f"r{i}",
        "problem": f"Ana has {i} apples and buys {i} more. How many apples has Ana now?",
        "answer": str(2 * i),
    }
    for i in range(1, 9)
]
ROWS = [row | {"solution": f"It is \\boxed{{{row['answer']}}}."} for row in ROWS]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    code = data.run(parser.parse_args(["check", *words]))
    out = capsys.readouterr().out
    assert max(map(len, out.split("\n"))) <= 80
    return code, out


def problem(name: str, text: str, answer: str = "") -> Problem:
    return Problem(name, text, "", answer)


def test_a_sound_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    code, out = check(capsys, write(tmp_path / "a.jsonl", *(row | {"level": 1} for row in ROWS)), "--rows", "2")
    assert code == 0
    assert "  8 rows, 8 usable, 0 bad" in out
    assert "  problem  <- problem (8)\n  solution <- solution (8)\n  answer   <- answer (8)\n" in out
    assert "further columns: level" in out
    assert "8 of 8 are read by the verifier 'boxed_math'" in out
    assert len(re.findall(r"^row r\d$", out, re.MULTILINE)) == 2
    assert out.endswith("nothing would be refused\n")
    assert check(capsys, str(tmp_path / "a.jsonl"), "--rows", "2")[1] == out
    assert check(capsys, str(tmp_path / "a.jsonl"), "--rows", "2", "--seed", "3")[1] != out


def test_bad_rows_are_listed_and_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = write(tmp_path / "a.jsonl", ROWS[0], "{nope", ROWS[1])
    code, out = check(capsys, path)
    assert code == 1
    assert "3 rows, 2 usable, 1 bad" in out
    assert "a.jsonl:2:notJSON" in "".join(out.split())  # a long path is wrapped at 80 columns
    assert "would be refused:" in out
    recipe = ["--recipe", "embedded/past", "--set", "task.name=dataset", "--set", f'task.train="{path}"']
    lenient = [*recipe, "--set", f'task.evaluation={{ e = "{path}" }}', "--set", "task.bad_rows=skip"]
    code, out = check(capsys, *lenient)
    assert code == 0
    assert "held-out set e" in out
    code, out = check(capsys, write(tmp_path / "b.jsonl", "[]"))
    assert code == 1
    assert "1 rows, 0 usable, 1 bad" in out


def test_mapped_columns_and_marked_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    rows = [{"task": f"{i} + 1?", "answer": f"Count.\n#### {i + 1}"} for i in range(3)]
    path = write(tmp_path / "a.jsonl", *rows)
    code, out = check(capsys, path, "--column", "problem=task")
    assert code == 0
    assert "problem  <- task (3)" in out
    assert "solution <- answer, before #### (3)" in out
    assert "answer   <- answer, after #### (3)" in out
    with pytest.raises(PastError, match="no such column"):
        check(capsys, path, "--column", "problem=taks")
    with pytest.raises(PastError, match="write ROLE=NAME"):
        check(capsys, path, "--column", "probelm=task")


def test_answers_that_the_verifier_cannot_read_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    unreadable = ROWS[0] | {"id": "broken", "answer": "(lambda: 42)()"}
    code, out = check(capsys, write(tmp_path / "a.jsonl", unreadable, *ROWS[1:4]))
    assert code == 0
    assert "3 of 4 are read by the verifier 'boxed_math'" in out
    assert "    broken: bad_gold: (lambda: 42)()\n" in out
    code, out = check(capsys, str(tmp_path / "a.jsonl"), "--recipe", "embedded/past", "--set", "verifier.name=exact")
    assert "4 of 4 are read by the verifier 'exact'" in out


def test_repeats_and_conflicting_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    again = ROWS[0] | {"id": "again"}
    loose = ROWS[0] | {"id": "loose", "problem": f"  {ROWS[0]['problem'].upper()} ", "answer": "99"}
    code, out = check(capsys, write(tmp_path / "a.jsonl", *ROWS, again, loose))
    assert code == 0
    assert "1 rows repeat another: the same text" in out
    assert "2 rows repeat another: the same but for case, spaces, punctuation" in out
    assert "    r1, again, loose: Ana has 1 apples" in out
    assert "1 problems stand there with different answers:\n    r1 says 2, again says 2, loose says 99" in out


def test_overlap_with_held_out_sets(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    train = write(tmp_path / "a.jsonl", *ROWS)
    asked = ROWS[2]["problem"]
    held_out = [
        {"id": "same", "problem": asked.lower() + "\n", "answer": "6"},
        {"id": "part", "problem": f"{asked} And how many would she have after eating one of them?", "answer": "5"},
        {"id": "free", "problem": "What is the area of a circle with radius two?", "answer": "4"},
    ]
    named = f"mine={write(tmp_path / 'e.jsonl', *held_out)}"
    code, out = check(capsys, train, "--evaluation", named, write(tmp_path / "other.jsonl", held_out[2]))
    assert code == 0
    assert "overlap with mine (3 problems)\n  1 stand in the training data" in out
    assert "1 more share a run of 13 words with a training problem, 0 at least half" in out
    assert "    same ~ r3, 100%: ana has 3 apples" in out
    assert re.search(r"    part ~ r3, \d\d?%: ", out)
    assert "overlap with other (1 problems)\n  0 stand in the training data" in out


def test_what_counts_as_the_same():
    assert normalise(" What is  $2+3$? ") == normalise("what is 2 + 3")
    assert normalise("what is 2+3") != normalise("what is 2-3")
    assert normalise("Größe") == normalise("GRÖSSE")
    pair = repeats([problem("a", "x + 1"), problem("b", "X+1", "2"), problem("c", "y")], normalise)
    assert [[p.id for p in group] for group in pair.groups] == [["a", "b"]]
    assert len(pair.conflicts) == 1
    long = " ".join(f"w{i}" for i in range(20))
    held_out = [problem("long", long), problem("short", "w1 w2 w3"), problem("twelve", " ".join(long.split()[:12]))]
    (found,) = overlaps([problem("t", f"before {' '.join(long.split()[:14])}")], held_out)
    assert (found.held_out.id, found.exact, found.share) == ("long", False, 2 / 8)
    best = overlaps([problem("t", f"{long} more"), problem("u", long.upper())], held_out)
    assert [(o.held_out.id, o.training.id, o.exact) for o in best] == [("long", "u", True)]
    assert overlaps([problem("t", "W1, w2; w3")], held_out)[0].held_out.id == "short"


def test_lengths_are_what_the_loop_drops(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Of twelve problems four never fit, four fit unless the response is long; a real cycle agrees."""
    rows = []
    for i in range(12):
        steps = (2, 90, 125)[i % 3]
        rows.append({"problem": "6*7*3", "solution": "2, " * steps + "\\boxed{6}", "answer": "6", "id": str(i)})
    path = write(tmp_path / "a.jsonl", *rows)
    sets = ["task.name=dataset", f'task.train="{path}"', f'task.evaluation={{ e = "{path}" }}']
    sets += ["rollout.problems_per_cycle=12", "model.max_context=256"]
    words = [word for setting in sets for word in ("--set", setting)]
    code, out = check(capsys, "--recipe", "embedded/past", *words)
    assert code == 0
    assert "room for 256 in one sequence" in out
    assert "4 of 12 do not fit and would be dropped each time" in out
    assert "4 of 12 would be dropped where the response is long" in out
    with session(config.load("embedded/past", sets)) as parts:
        assert 4 <= parts.loop.cycle(0).dropped <= 8
        longest = max(len(parts.loop.prompts.student(p)) for p in parts.loop.problems)
    assert re.search(rf"student prompt +{longest} +{longest} +{longest}\n", out)

    def whole(name: str, *more: str) -> int:
        report = check(capsys, "--recipe", name, *words, *more)[1]
        return int(report.split("whole, with the longest response")[1].split()[2])

    longer = ("--set", "rollout.teacher.max_new_tokens=134")  # from 34; only a method that explores draws them
    assert whole("embedded/past", *longer) == whole("embedded/past") + 100
    assert whole("embedded/opsd", *longer) == whole("embedded/opsd")
    code, out = check(capsys, "--recipe", "embedded/past", *words, "--set", "model.max_context=40")
    assert code == 1
    assert "no problem fits the context" in out
    code, out = check(capsys, "--recipe", "embedded/sft", *words)
    assert "0 of 12 would be dropped where the response is long" in out


def test_arguments_that_do_not_go_together(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = write(tmp_path / "a.jsonl", *ROWS)
    for words, message in [
        (["--recipe", "embedded/past"], "name a file"),
        ([path, "--set", "run.cycles=1"], "name one with --recipe"),
        ([path, "--recipe", "paper/past", "--column", "problem=x"], "use --set task.columns.problem"),
        ([path, "--benchmark", "aime99"], "no benchmark 'aime99'"),
    ]:
        with pytest.raises(PastError, match=message):
            check(capsys, *words)


def test_names_of_held_out_sources():
    assert data.named("hf:openai/gsm8k?config=main&split=test")[0] == "hf:openai/gsm8k?config=main&split=test"
    assert data.named("g=hf:openai/gsm8k?split=test") == ("g", "hf:openai/gsm8k?split=test")
    assert data.named("data/e.jsonl") == ("e", "data/e.jsonl")


@pytest.mark.slow
def test_real_files(capsys: pytest.CaptureFixture[str], shared: Path):
    folder = shared / "data"
    test, aime = folder / "train" / "gsm8k_test.jsonl", folder / "eval" / "aime24.jsonl"
    code, out = check(capsys, str(folder / "train" / "gsm8k_train.jsonl"), "--evaluation", str(test), str(aime))
    assert code == 0
    assert "7473 rows, 7473 usable, 0 bad" in out
    assert "7473 of 7473 are read by the verifier" in out
    assert "gsm8k-test-602 ~ gsm8k-train-1314, 54%" in out
    assert "overlap with aime24 (30 problems)\n  0 stand in" in out
