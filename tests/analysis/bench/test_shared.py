"""The teacher step with a shared prompt: the same gradient from fewer positions, and the table that says so."""

from __future__ import annotations

import argparse
import re

import pytest

from past_opsd.analysis.bench import BENCHMARKS, shared
from past_opsd.core.nouns import PastError


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    BENCHMARKS["shared"][1](parser)
    return parser.parse_args(words)


def test_prints_both_and_the_same_gradient(capsys, in_threads):
    words = "--recipe embedded/past --prompt 180 --student-prompt 30 --group 8 --tokens 12 --repeats 1"
    assert shared.run(arguments(*words.split())) == 0
    out = capsys.readouterr().out
    positions = dict(re.findall(r"^prompt (\w+) +(\d+) +[\d.]+ +[\d.]+", out, re.M))
    assert positions == {"repeated": str(8 * (180 + 11)), "shared": str(180 + 8 * 11)}
    assert re.search(r"^repeated / shared: [\d.]+ in time", out, re.M)
    difference = re.search(r"relative to the largest entry: (.*)$", out, re.M)
    assert difference is not None
    assert 0 < float(difference[1]) < 1e-4


def test_a_group_has_both_outcomes_and_terms_of_both_kinds():
    group = shared.group(shared.Sizes(9, 4, 5, 6), vocabulary=50)
    assert group.mixed
    assert [len(c.response.tokens) for c in group.continuations] == [6] * 5
    assert len({c.response.tokens for c in group.continuations}) == 5
    assert (len(group.attempt.view.prompt), len(group.continuations[0].view.prompt)) == (4, 9)


def test_what_groups_have_in_common_is_read_once(capsys, in_threads):
    words = "--recipe embedded/past --prompt 200 --student-prompt 190 --examples 180 --group 6 --tokens 9 --alike 4"
    words += " --twice 1 --problems 3 --repeats 1 --set model.lora.rank=2"
    assert shared.run(arguments(*words.split())) == 0
    out = capsys.readouterr().out
    assert "in common: 180 tokens of all prompts, 4 of a group's continuations; 1 of these drawn twice" in out
    positions = dict(re.findall(r"^prompt (\w+) +(\d+) +[\d.]+ +[\d.]+", out, re.M))
    # So small a network shares what all prompts begin with; the rest of a group saves less than it costs.
    assert positions == {"repeated": str(3 * 6 * 208), "shared": str(180 + 3 * 5 * 28)}
    group = shared.group(shared.Sizes(20, 19, 6, 9, problems=3, examples=18, alike=4, twice=1), 50, 2)
    assert len({c.response.tokens for c in group.continuations}) == 5
    assert len({c.response.tokens[:4] for c in group.continuations}) == 1


@pytest.mark.parametrize("words", [("--examples", "300"), ("--alike", "256"), ("--twice", "5")])
def test_what_is_in_common_must_fit(words: tuple[str, str]):
    with pytest.raises(PastError, match="--examples must be shorter than both prompts"):
        shared.run(arguments(*words))


def test_the_ratio_is_of_medians():
    lines = [
        shared.Line("prompt repeated", 10, [9.0, 6.0, 1.0], [4.0], 300.0),
        shared.Line("prompt shared", 4, [2.0], [2.0], 200.0),
    ]
    out = shared.report(arguments(), lines, 1e-6)
    assert "repeated / shared: 3.00 in time (2.00 in CPU time; goal 2), 1.50 in peak memory" in out


@pytest.mark.parametrize(("option", "value"), [("--group", "1"), ("--student-prompt", "0")])
def test_refuses_sizes_without_a_step(option, value):
    with pytest.raises(PastError, match=f"{option} is {value}"):
        shared.run(arguments(option, value))


def test_a_prompt_beyond_the_model_is_told(in_threads):
    with pytest.raises(PastError, match="need 320, the model reads 256"):
        shared.run(arguments("--recipe", "embedded/past", "--prompt", "300", "--tokens", "20"))
