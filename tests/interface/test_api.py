"""The functions for scripts and notebooks, on one short run with a method, a verifier and a task from this file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import SMALL, Quiet

import past_opsd as past
from past_opsd.core import config
from past_opsd.core.losses import Stay

SETTINGS = {"run.cycles": 2, "run.checkpoint_every": 1, "rollout.problems_per_cycle": 3, "evaluation.at": [0.0, 1.0]}
SETTINGS |= {"evaluation.samples": 2, "evaluation.pass_k": [1, 2]}


class Plain(past.Method):
    """The base model, shown the reference, teaches by the reverse KL."""

    class Options(past.MethodOptions):
        strength: float = 1.0

    def teacher_view(self, attempt):
        return past.View("base", self.prompts.reference(attempt.problem))

    def student_terms(self, batch):
        return past.mean([past.distill(a, self.teacher_view(a), Stay(), 1.0)] for a in batch.attempts)


def ends_right(response: str, problem: past.Problem) -> bool:
    return response.rstrip(" }").endswith(problem.answer)


def sums() -> dict[str, list[past.Problem]]:
    made = [past.Problem(f"{a}+{b}", f"{a}+{b}", f"\\boxed{{{a + b}}}", str(a + b)) for a in range(4) for b in range(5)]
    return {"train": made[:16], "held_out": made[16:]}


OWN = SETTINGS | {"method.name": Plain, "method.strength": 2.0, "task.name": sums}
OWN |= {"verifier.workers": 0, "verifier.name": ends_right}  # processes of its own would import this file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("api") / "run"
    past.train(past.load("embedded/opsd", OWN), place, display=False)
    return place


# Recipes


def test_overrides_are_texts_or_a_dict():
    texts = past.load("embedded/past", ["run.cycles=7", "rollout.student.temperature=0.5"])
    dotted = past.load("embedded/past", {"run.cycles": 7, "rollout.student.temperature": 0.5})
    tables = past.load("embedded/past", {"run": {"cycles": 7}, "rollout": {"student": {"temperature": 0.5}}})
    assert config.dump(texts) == config.dump(dotted) == config.dump(tables)
    late = past.load("embedded/past", {"method.temperature": 0.5, "method.name": "opsd"})
    assert (late.method.name, late.method.temperature) == ("opsd", 0.5)
    assert "embedded/past" in past.recipes()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"run.cycles": "many"}, "the overrides: run.cycles: input should be"),
        ({"run": {"cycle": 3}}, "the overrides: run.cycle: unknown key; did you mean 'cycles'?"),
        ("run.cycles=3", "give a list of such texts, or a dict"),
        ({"method.name": Plain, "method.strenght": 1.0}, "did you mean 'strength'?"),
        ({"method.name": ends_right}, "is a function; a method is a class with Options and build"),
        ({"method.name": Path}, "is no method: it needs a class Options"),
        ({"method.name": 3}, r"method\.name: a int \(3\) is given"),
        ({"verifier.name": lambda response, problem: True}, "cannot be found again by this name"),
        ({"method.name": "nowhere_at_all:Mine"}, "cannot be imported"),
        ({"method.name": "past_opsd.methods:Mine"}, "has no Mine"),
    ],
)
def test_a_mistake_in_the_overrides_is_one_message(overrides, said: str):
    with pytest.raises(past.PastError, match=said):
        past.load("embedded/opsd", overrides)


def test_a_recipe_file_names_a_class_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_methods.py").write_text(
        "import past_opsd as past\n\nclass Mine(past.Method):\n"
        "    class Options(past.MethodOptions):\n        depth: int = 3\n"
    )
    (tmp_path / "mine.toml").write_text(
        'extends = "embedded/opsd"\nname = "mine"\n[method]\nname = "my_methods:Mine"\ndepth = 5\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = past.load("mine.toml")
    assert (recipe.method.name, recipe.method.depth) == ("my_methods:Mine", 5)
    (tmp_path / "full.toml").write_text(config.to_toml(recipe))
    assert config.load("full.toml", imports=False).method.depth == 5
    assert config.is_foreign("my_methods:Mine")


# A run


def test_what_was_given_is_recorded(folder: Path):
    recipe = past.open_run(folder).recipe
    here = Plain.__module__
    assert (recipe.method.name, recipe.method.strength) == (f"{here}:Plain", 2.0)
    assert (recipe.verifier.name, recipe.verifier.path) == ("function", f"{here}:ends_right")
    assert (recipe.task.name, recipe.task.path) == ("function", f"{here}:sums")
    assert (folder / "code" / "verifier.py").read_text().startswith("def ends_right(")
    assert (folder / "code" / "method.py").read_text().startswith("class Plain(past.Method):")


def test_its_records_are_tables(folder: Path):
    run = past.open_run(folder)
    assert (run.completed, run.finished) == (2, True)
    assert run.metrics()["cycle"].to_pylist() == [0, 1]
    scores = run.scores().to_pylist()
    assert [(row["step"], row["task"]) for row in scores] == [
        (step, task) for step in (0, 2) for task in ("held_out", "macro")
    ]
    draws = run.evaluations()
    assert draws.column_names == ["step", "task", "problem", "draw", "correct", "answer"]
    assert draws.num_rows == 2 * 4 * 2
    last = [row["correct"] for row in draws.to_pylist() if row["step"] == 2]
    assert scores[-1]["avg@2"] == pytest.approx(sum(last) / len(last), abs=1e-12)
    assert run.rollouts().num_rows == 2 * 3
    assert set(run.rollouts([1])["cycle"].to_pylist()) == {1}
    assert run.continuations().num_rows == 0
    costs = run.costs().to_pylist()
    assert costs[-1]["student_samples"] == 6
    assert costs[-1]["student_tokens"] == sum(run.rollouts()["length"].to_pylist())
    assert all(row["seconds"] > 0 for row in costs)
    assert run.metrics().to_pandas().shape[0] == 2
    assert run.checkpoint() == run.checkpoint(2) == folder / "checkpoints" / "checkpoint-00002"


def test_a_folder_that_holds_a_run_is_spared_and_one_that_holds_none_is_told(folder: Path, tmp_path: Path):
    with pytest.raises(past.PastError, match=r"already holds a run.*past_opsd\.resume\("):
        past.train(past.load("embedded/opsd", OWN), folder, display=False)
    with pytest.raises(past.PastError, match="no folder of a run"):
        past.open_run(tmp_path)
    with pytest.raises(past.PastError, match="no checkpoint of step 9"):
        past.open_run(folder).checkpoint(9)


def test_it_goes_on_and_refuses_another_source(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    display = Quiet()
    run = past.resume(copy, {"run.cycles": 3}, display=display)
    assert (run.completed, display.phases[-1][0]) == (3, 2)
    monkeypatch.setattr("past_opsd.core.own.source", lambda thing: "class Plain: another text")
    with pytest.raises(past.PastError, match=r"(?s)started with another setup.*code\.method: "):
        past.resume(copy, {"run.cycles": 4}, display=False)


def test_it_is_shown_in_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = past.load("embedded/opsd", [*SMALL, "run.cycles=1", "evaluation.at=[1.0]"])
    run = past.train(small, tmp_path / "run")
    assert "embedded/opsd: cycle 1/1" in capsys.readouterr().out
    score = past.evaluate(small, adapter=run.checkpoint())
    assert score.tasks == run.files.read_evaluation(1).tasks
    assert score.summary([1])["macro/avg@4"] == pytest.approx(run.scores().to_pylist()[-1]["avg@4"], abs=1e-12)
    with pytest.raises(past.PastError, match="no tracker 'none'"):
        past.train(small, tmp_path / "other", track=["none"], display=False)


@pytest.mark.slow
def test_looking_into_a_run_of_ones_own_needs_a_word(folder: Path, tmp_path: Path):
    named = rf"method\.name = '{Plain.__module__}:Plain', task\.path = .*, verifier\.path = "
    for look in (past.probe, past.shift):
        with pytest.raises(past.PastError, match=named + ".*trust=True"):
            look(folder)
    result = past.probe(folder, problems=3, samples=1, trust=True)
    assert past.open_run(folder).probes()[2] == result
    with pytest.raises(past.PastError, match="problems is 1; it must be at least 2"):
        past.probe(folder, problems=1, trust=True)
    page = past.report(past.open_run(folder), tmp_path / "page.html", trajectories=0)
    assert "Plain" in page.read_text(encoding="utf-8")
    assert (past.export(folder, tmp_path / "export") / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (list, "must give a dict of lists of problems"),
        (lambda: {"train": []}, "at least one set to evaluate on"),
        (lambda: {"train": [1], "held_out": [2]}, r"set 'train': must be a list of past_opsd\.Problem"),
        (lambda: {"train": [past.Problem("a", "", "", "")] * 2, "x": []}, "the id 'a' repeats"),
        (lambda: 1 / 0, "the function failed .ZeroDivisionError"),
    ],
)
def test_problems_that_cannot_be_are_told(given, said: str, monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setattr(sys.modules[__name__], "sums", given)
    task = config.plugin("task", "function")
    with pytest.raises(past.PastError, match=said):
        task.build(task.Options(path=f"{__name__}:sums"))


def test_a_suite_that_cannot_be_is_told(tmp_path: Path):
    with pytest.raises(past.PastError, match="no suite 'nothing'"):
        past.compare("nothing", folder=tmp_path)
    with pytest.raises(past.PastError, match="each is given once"):
        past.compare(seeds=[17, 17], folder=tmp_path)
