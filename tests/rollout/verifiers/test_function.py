from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from past_opsd.core import config
from past_opsd.core.nouns import PastError, Problem, Response, Verdict
from past_opsd.interface import arguments, commands
from past_opsd.rollout.verifiers.function import Function, Options, build

PLAIN = r'''
import asyncio, os, subprocess, sys, time
from past_opsd.core.nouns import Verdict

def check(response, problem):
    """Everything a response can ask for, by its first word."""
    what, _, rest = response.partition(" ")
    if what == "equals":
        return rest == problem.answer
    if what == "number":
        return float(rest)
    if what == "extra":
        return problem.extra["level"] == rest and problem.text == "1+1" and problem.solution == "so 2"
    if what == "verdict":
        return Verdict(False, "style", "an answer")
    if what == "dict":
        return {"correct": True}
    if what == "contradiction":
        return Verdict(False, "correct")
    if what == "raise":
        raise ValueError(rest)
    if what == "exit":
        sys.exit(3)
    if what == "die":
        os._exit(1)
    if what == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(rest, "w").write(f"{child.pid}")
        time.sleep(600)
    if what == "print":
        print('{"correct": true}', flush=True)
        return False
    if what == "torch":
        return "torch" not in sys.modules
    return {"none": None, "text": "yes", "nan": float("nan"), "list": [1.0], "maybe": {"correct": 1}}[what]

async def later(response, problem):
    await asyncio.sleep(0.01)
    return response == problem.answer

class Rewards:
    @staticmethod
    def check(response, problem):
        return True

NUMBER = 3
'''

ACCURACY = r"""
from math_verify import LatexExtractionConfig, parse, verify

def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs) -> list[float | None]:
    rewards = []
    for completion, gold in zip(completions, solution, strict=True):
        parsed = parse(gold)
        said = parse(completion[0]["content"], extraction_config=[LatexExtractionConfig()])
        rewards.append(float(verify(parsed, said)) if parsed else None)
    return rewards
"""

REWARDS = r"""
import asyncio

def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    log_extra("seen", columns["level"])
    log_metric("mean", 1.0)
    assert trainer_state is None
    assert prompts == [[{"role": "user", "content": "1+1"}]], prompts
    assert completions == [[{"role": "assistant", "content": "2"}]], completions
    assert completion_ids == [[5, 6]]
    assert columns == {"problem": ["1+1"], "solution": ["so 2"], "answer": ["2"], "id": ["p"], "level": [[3]]}, columns
    return [1.0]

def few(completions, ground_truth):
    return [0.7 if c == g else 0.2 for c, g in zip(completions, ground_truth)]

async def asynchronous(completions, answer, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if c == a else None for c, a in zip(completions, answer)]

def too_many(completions, **kwargs):
    return [1.0, 1.0]
"""


def problem(**extra: Any) -> Problem:
    return Problem("p", "1+1", "so 2", "2", extra)


def say(text: str, finished: bool = True) -> Response:
    return Response((5, 6), text, (), finished)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "user_checks.py").write_text(PLAIN)
    (folder / "user_rewards.py").write_text(REWARDS)
    (folder / "user_accuracy.py").write_text(ACCURACY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def make(folder: Path) -> Iterator[Callable[..., Function]]:
    built: dict[str, Function] = {}

    def get(path: str, **options: Any) -> Function:
        key = f"{path} {options}"
        if key not in built:
            built[key] = Function(Options(path=path, workers=1, **options))
        return built[key]

    yield get
    for each in built.values():
        each.close()


def reasons(verifier: Function, *texts: str, **extra: Any) -> list[str]:
    return [v.reason for v in verifier.verify([(problem(**extra), say(text)) for text in texts])]


def test_values_become_verdicts(make: Callable[..., Function]):
    check = make("user_checks:check")
    assert reasons(check, "equals 2", "equals 3", "number 1", "number 0.99", "none", "dict") == [
        "correct",
        "wrong",
        "correct",
        "wrong",
        "not_applicable",
        "correct",
    ]
    assert reasons(check, "extra hard", "extra easy", "print", "torch", level="hard") == [
        "correct",
        "wrong",
        "wrong",
        "correct",
    ]
    assert check.verify([(problem(), say("verdict"))]) == [Verdict(False, "style", "an answer")]
    assert [v.answer for v in check.verify([(problem(), say(r"equals \boxed{7}"))])] == ["7"]
    assert check.verify([]) == []
    loose = make("user_checks:check", success_reward_threshold=0.5)
    assert reasons(loose, "number 0.5", "number 0.4", "equals 3") == ["correct", "wrong", "wrong"]


def test_async_functions_and_static_methods(make: Callable[..., Function]):
    assert reasons(make("user_checks:later"), "2", "3") == ["correct", "wrong"]
    assert reasons(make("user_checks:Rewards.check"), "anything") == ["correct"]


def test_a_failing_function_costs_its_own_response_and_is_told_once(
    make: Callable[..., Function], caplog: pytest.LogCaptureFixture
):
    check = make("user_checks:check")
    texts = ["raise one", "equals 2", "raise two", "exit", "text", "nan", "list", "maybe", "contradiction"]
    with caplog.at_level(logging.WARNING):
        assert reasons(check, *texts) == ["error", "correct"] + ["error"] * 7
    told = [record.getMessage() for record in caplog.records]
    assert ["ValueError: one" in message for message in told].count(True) == 1
    assert not any("two" in message for message in told)
    assert any("SystemExit" in message for message in told)
    assert any("must give true, false, a number or a verdict; got 'yes'" in message for message in told)


def test_a_hanging_function_is_killed_with_what_it_started(make: Callable[..., Function], tmp_path: Path):
    check = make("user_checks:check", timeout=1.0)
    began = time.monotonic()
    assert reasons(check, "equals 2", f"hang {tmp_path / 'pid'}", "equals 2", "die", "equals 2") == [
        "correct",
        "timeout",
        "correct",
        "crashed",
        "correct",
    ]
    assert time.monotonic() - began < 30
    child = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    if Path("/proc").exists():
        limit = time.monotonic() + 10
        while child.exists() and child.read_text().split()[2] != "Z":
            assert time.monotonic() < limit, "the child lives on"
            time.sleep(0.02)


def test_truncated_responses_fail_before_the_function_is_asked_and_thinking_is_cut(make: Callable[..., Function]):
    check = make("user_checks:check")
    items = [say("equals 2", finished=False), say("<think>hm</think>equals 2"), say("<think>equals 2")]
    assert [v.reason for v in check.verify([(problem(), r) for r in items])] == ["truncated", "correct", "no_box"]
    whole = make("user_checks:later", strip_thinking=False)
    assert whole.verify([(Problem("p", "", "", "<think>x</think>2"), say("<think>x</think>2"))])[0].correct


def test_trls_accuracy_reward(make: Callable[..., Function]):
    reward = make("user_accuracy:accuracy_reward", style="trl", conversational=True)
    halves = Problem("p", "1/2?", r"$\frac{1}{2}$", "1/2")
    unreadable = Problem("p", "1/2?", "", "1/2")
    items = [(halves, say(r"\boxed{0.5}")), (halves, say(r"\boxed{0.6}")), (unreadable, say(r"\boxed{0.5}"))]
    assert [v.reason for v in reward.verify(items)] == ["correct", "wrong", "not_applicable"]


def test_a_reward_function_is_given_what_trl_gives(make: Callable[..., Function]):
    conversation = [{"role": "user", "content": "1+1"}]
    everything = make("user_rewards:everything", style="trl")
    assert reasons(everything, "2", level=[3], prompt=conversation) == ["correct"]
    assert reasons(everything, "2", level=[3]) == ["error"]  # a plain prompt: the completion is a text
    asked = make("user_rewards:everything", style="trl", conversational=True)
    assert reasons(asked, "2", level=[3]) == ["correct"]
    few = make("user_rewards:few", style="trl", success_reward_threshold=0.5)
    assert reasons(few, "2", "3", ground_truth="2") == ["correct", "wrong"]
    assert reasons(make("user_rewards:asynchronous", style="trl"), "2", "3") == ["correct", "not_applicable"]
    assert reasons(make("user_rewards:too_many", style="trl"), "2") == ["error"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.rewards:check", "No module named 'no_such_package'"),
        ("user_checks:chekc", "no attribute 'chekc'"),
        ("user_checks:NUMBER", "is not a function but a int"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_function_that_is_not_there_is_told_at_the_start(path: str, message: str):
    with pytest.raises(PastError, match=rf"{message}.*verifier.path = '{path}'"):
        build(Options(path=path))


def test_the_identity_follows_the_source_and_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # found through the working directory

    def identity(text: str, **options: Any) -> str:
        (tmp_path / "changing.py").write_text(text)
        with Function(Options(path="changing:f", **options)) as verifier:
            return verifier.identity

    one = identity("def f(response, problem): return True")
    assert "changing:f" in one
    assert one == identity("def f(response, problem): return True", workers=1)
    assert one != identity("def f(response, problem): return True  # other")
    assert one != identity("def f(response, problem): return True", success_reward_threshold=0.5)


def test_the_callers_process_never_imports_the_function(folder: Path):
    script = (
        f"import sys; sys.path.append({str(folder)!r})\n"
        "from past_opsd.rollout.verifiers.function import Function, Options\n"
        "with Function(Options(path='user_checks:check')) as f: print('user_checks' in sys.modules)\n"
    )
    path = os.pathsep.join([str(Path(__file__).resolve().parents[3]), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_options():
    for path in ("nothing", "a b:c", "a:b:c", ":c"):
        with pytest.raises(ValidationError):
            Options(path=path)
    assert all(field.description for field in Options.model_fields.values())
    recipe = config.load("embedded/past", ["verifier.name=function", "verifier.path=user_checks:check"])
    assert recipe.verifier.timeout == 10.0


@pytest.mark.usefixtures("folder")
def test_past_verify_with_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [
        {"gold": "2", "prediction": "equals 2"},
        {"gold": "2", "prediction": "extra hard", "level": "hard", "problem": "1+1", "solution": "so 2"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parser = argparse.ArgumentParser()
    arguments.verify(parser)
    words = ["--verifier", "function", "--set", "path=user_checks:check"]
    assert commands.verify(parser.parse_args([str(tmp_path / "in.jsonl"), *words])) == 0
    assert "2 rows, 2 correct" in capsys.readouterr().out
