"""One update beside TRL's: what is printed, that both sides are told the same, that unequal work is refused."""

from __future__ import annotations

import argparse
import re

import pytest

from past_opsd.analysis.bench import BENCHMARKS, step
from past_opsd.analysis.bench._ours import Plan, Step
from past_opsd.analysis.bench._worker import serve
from past_opsd.core import config
from past_opsd.core.nouns import PastError
from past_opsd.core.prompts import Prompts
from past_opsd.policy.model import load_tokenizer

SMALL = ("--recipes", "embedded", "--group", "3", "--prompts", "2", "--tokens", "40", "--repeats", "1")


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    BENCHMARKS["step"][1](parser)
    return parser.parse_args(words)


def plan(method: str) -> Plan:
    return Plan(f"embedded/{method}", (), 2, 1, 7, 1, False)


@pytest.mark.slow
def test_without_trl_our_side_and_where_to_get_it(capsys, monkeypatch, in_threads):
    monkeypatch.setattr(step, "has_trl", lambda: False)
    assert step.run(arguments(*SMALL)) == 0
    out = capsys.readouterr().out
    assert "One update of GRPO (embedded/grpo): 1 prompt(s) x 3 response(s) of 40 tokens" in out
    assert "; 24 prompt tokens, 120 of responses\n" in out
    # No response ended before its limit.
    assert re.search(r"One update of Vanilla OPSD.*\n.*, 80 of responses, \d+ of teacher prompts\n", out)
    for name in ("rollout", "distill", "all"):
        shares = re.findall(rf"^{name} +[\d.]+ +[\d.]+ +(\d+) %", out, re.M)
        assert len(shares) == 2
        assert all(0 < int(share) <= 100 for share in shares)
    assert "'make bench' makes an environment" in out
    assert "ours / TRL" not in out


def theirs(pipe, twin):
    """A peer that computes one token more than it was asked for."""
    serve(pipe, {"step": lambda: (1.0, 1.0, (16, twin.tokens + 1, 0)), "peak": lambda: 100.0})


def test_sides_with_unequal_work_are_refused(monkeypatch, in_threads):
    monkeypatch.setattr(step._trl, "run", theirs)
    with pytest.raises(PastError, match="do not compute the same tokens"):
        step.measure("grpo", Plan("embedded/grpo", (), 1, 2, 7, 1, False), 1, with_trl=True)


@pytest.mark.parametrize("method", step.METHODS)
def test_trl_is_told_what_our_side_reads(method):
    recipe = plan(method).load()
    twin = step.twin(method, plan(method), recipe)
    tokenizer = load_tokenizer(recipe.model)
    prompts = Prompts(tokenizer, recipe.prompts)
    problems = config.plugin("task", "embedded").build(recipe.task).train()[:2]

    def encode(text):
        message = [{"role": "user", "content": text}]
        return prompts.encode(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    for problem, message, solution in zip(problems, twin.messages, twin.solutions, strict=True):
        assert encode(message) == prompts.student(problem)
        taught = twin.teacher_template.format(prompt=message, privileged_context=solution)
        assert encode(taught) == prompts.reference(problem)
    assert (twin.rank, twin.alpha, twin.lr, twin.max_grad_norm) == (16, 32, 5e-4, 1.0)
    assert (twin.samples, twin.tokens) == (1, 7)


def test_braces_of_a_teacher_message_survive():
    recipe = config.load("word_problems/opsd", ["model.path=embedded"])
    twin = step.twin("opsd", Plan("word_problems/opsd", ("model.path=embedded",), 1, 1, 7, 1, False), recipe)
    assert twin.teacher_template.format(prompt="P", privileged_context="Z").endswith(r"final answer within \boxed{}.")


def test_a_teacher_message_of_another_kind_is_refused():
    overrides = ('prompts.reference="{reference_solution} solves {problem}"',)
    told = Plan("embedded/opsd", overrides, 1, 1, 7, 1, False)
    with pytest.raises(PastError, match=r"prompts\.reference does not"):
        step.twin("opsd", told, told.load())


def test_ratios_are_ours_over_theirs():
    def line(name, seconds, mebibytes):
        return step.Line(name, [Step(s, 2 * s, (10, 20, 0)) for s in seconds], mebibytes)

    lines = [line("past-opsd", [1.0, 9.0, 2.0], 300.0), line("TRL GRPOTrainer", [8.0], 1200.0)]
    out = step.report("grpo", plan("grpo"), lines, {"rollout": (2.0, 1.0), "distill": (6.0, 5.0)})
    assert "ours / TRL: 0.25 in time (0.25 in CPU time; goal 0.6), 0.25 in peak memory (goal 0.5)" in out
    assert re.search(r"^all +8\.00 +6\.00 +75 %", out, re.M)


def test_refuses_an_empty_update():
    with pytest.raises(PastError, match="--tokens is 0"):
        step.run(arguments("--tokens", "0"))
