from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from past_opsd.core.nouns import PastError, Problem, Response
from past_opsd.rollout.verifiers import reasoning_gym as scorers
from past_opsd.rollout.verifiers.pool import WorkerPool
from past_opsd.rollout.verifiers.reasoning_gym import Gym
from past_opsd.tasks import Problems, reasoning_gym
from past_opsd.tasks.reasoning_gym import Options, build

installed = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym: the extra [tasks]"
)
# A worked solution, a plain number, a text, a grid, one that follows the order of a set, one that looks at its size.
TASKS = ["gsm_symbolic", "chain_sum", "calendar_arithmetic", "mini_sudoku", "ransom_note", "list_functions"]
OPTIONS = Options(tasks=TASKS, train_problems=20, eval_problems=4, configs={"chain_sum": {"min_terms": 5}})


def say(text: str, finished: bool = True) -> Response:
    return Response((), text, (), finished)


@pytest.fixture(scope="module", autouse=True)
def _one_maker() -> Iterator[None]:
    """One process makes all problems of this file: each would import reasoning-gym anew."""

    class Staying(WorkerPool):
        def close(self) -> None: ...

    maker = Staying("past_opsd.rollout.verifiers._gym:make", workers=1, timeout=100, memory_mb=8192)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasoning_gym, "WorkerPool", lambda *args, **kwargs: maker)
        yield
    WorkerPool.close(maker)


@pytest.fixture(scope="module")
def task() -> Problems:
    return build(OPTIONS)


@pytest.fixture(scope="module")
def gym() -> Iterator[Gym]:
    with Gym(scorers.Options(workers=1)) as verifier:
        yield verifier


@installed
def test_sets_are_disjoint_distinct_and_named_by_task(task: Problems):
    assert {name: len(part) for name, part in task.evaluation().items()} == dict.fromkeys(TASKS, 4)
    assert [p.id.split(":")[0] for p in task.train()[:7]] == [*TASKS, TASKS[0]]
    every = [*task.train(), *(p for part in task.evaluation().values() for p in part)]
    assert len({p.text for p in every}) == len(every) == len({p.id for p in every})
    few = build(Options(tasks=["coin_flip"], train_problems=40, eval_problems=20))  # it has some hundred questions
    assert not {p.text for p in few.train()} & {p.text for p in few.evaluation()["coin_flip"]}
    sums = [p for p in every if p.id.startswith("chain_sum")]
    assert all(len(re.findall(r"\d+", p.text)) >= 5 for p in sums)


@installed
def test_reference_solutions_are_worked_where_there_is_one_and_the_note_says_where_not(task: Problems):
    worked, bare = task.train()[0], task.train()[1]
    assert worked.solution.endswith(f"The answer is \\boxed{{{worked.answer}}}.")
    assert len(worked.solution) > 100
    assert "####" not in worked.solution
    assert bare.solution == f"\\boxed{{{bare.answer}}}"
    (note,) = task.notes
    assert note.startswith("chain_sum, calendar_arithmetic, mini_sudoku, ransom_note, list_functions: ")
    assert build(Options(tasks=["gsm_symbolic"], train_problems=1, eval_problems=1)).notes == ()


@installed
def test_another_process_makes_the_same_problems(task: Problems):
    script = (
        "import sys, json; from past_opsd.tasks.reasoning_gym import *\n"
        "print(build(Options(**json.loads(sys.argv[1]))).identity, 'reasoning_gym' in sys.modules)"
    )
    command = [sys.executable, "-c", script, json.dumps(OPTIONS.model_dump())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [*task.identity.split(), "False"]
    other = build(OPTIONS.model_copy(update={"seed": 1}))
    assert other.identity != task.identity
    assert not {p.text for p in other.train()} & {p.text for p in task.train()}


@installed
def test_every_reference_solution_is_scored_as_correct_and_others_are_not(task: Problems, gym: Gym):
    problems = [*task.train(), *(p for part in task.evaluation().values() for p in part)]
    assert {v.reason for v in gym.verify([(p, say(p.solution)) for p in problems])} == {"correct"}
    assert {v.reason for v in gym.verify([(p, say(r"\boxed{no such answer}")) for p in problems])} == {"wrong"}


@installed
def test_reasons(task: Problems, gym: Gym):
    friday = next(p for p in task.train() if p.id.startswith("calendar"))
    texts = [rf"\boxed{{\text{{{friday.answer}}}}}", friday.answer, rf"<think>\boxed{{{friday.answer}}}</think>"]
    items = [*((friday, say(text)) for text in texts), (friday, say(friday.solution, finished=False))]
    items.append((Problem("p", "another question", "", "", friday.extra), say(r"\boxed{1}")))
    assert [v.reason for v in gym.verify(items)] == ["correct", "no_box", "no_box", "truncated", "bad_gold"]
    with pytest.raises(PastError, match="problems of the task 'reasoning_gym' alone"):
        gym.verify([(Problem("p", "1+1", "", "2"), say(r"\boxed{2}"))])
    partial = (task.train()[0], say(r"\boxed{123456789}"))  # this scorer gives 0.01 for any number
    assert not gym.verify([partial])[0].correct
    with Gym(scorers.Options(workers=1, threshold=0.01)) as lenient:
        assert lenient.verify([partial])[0].correct
        assert lenient.identity != gym.identity


@installed
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(tasks=["graph_color"]), "'graph_color' brings no reference answer"),
        (Options(tasks=["chain_summ"]), "no task 'chain_summ'; near are chain_sum"),
        (Options(tasks=["chain_sum"], configs={"chain_sum": {"terms": 3}}), "'chain_sum' refuses the settings .*terms"),
        (Options(tasks=["chain_sum"], configs={"chain_sum": {"min_terms": 9}}), "refuses the settings"),
        (Options(tasks=["chain_sum"], configs={"lcm": {}}), "'lcm', which is not among"),
        (Options(tasks=["coin_flip"], train_problems=900), r"'coin_flip' gave \d+ different problems where 900"),
    ],
    ids=["no answer", "unknown", "unknown setting", "bad setting", "stray config", "too small"],
)
def test_what_cannot_be_made_is_told(options: Options, message: str):
    with pytest.raises(PastError, match=message):
        build(options)


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for make in (lambda: build(Options(tasks=["chain_sum"])), lambda: scorers.build(scorers.Options())):
        with pytest.raises(PastError, match=r"pip install 'past-opsd\[tasks\]'"):
            make()


def test_options():
    for tasks in ([], ["lcm", "lcm"]):
        with pytest.raises(ValidationError, match="different names"):
            Options(tasks=tasks)
    for module in (reasoning_gym, scorers):
        assert all(info.description for info in module.Options.model_fields.values())
