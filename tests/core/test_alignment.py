"""From which token on two views of a response predict the same kind of text."""

from __future__ import annotations

import pytest
from chatml import OPEN, OPENED, THINK, TURNS, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from past_opsd.core import config
from past_opsd.core.nouns import Problem, Tokens
from past_opsd.core.prompts import Prompts

PROBLEM = Problem("p", "6*7*3*4", "2, 6, 4, \\boxed{4}", "4")
ANSWER, THOUGHT = "First 42.", "<think>\nHm.\n</think>\n\nFirst 42."
OFF, ON = "{enable_thinking=false}", "{enable_thinking=true}"


def prompts(template: str, student: str, teacher: str) -> Prompts:
    kwargs = [f"prompts.student_kwargs={student}", f"prompts.teacher_kwargs={teacher}"]
    return Prompts(tokenizer(template), config.load("paper/past", kwargs).prompts)


def views(made: Prompts, attempt: str = ANSWER) -> tuple[Tokens, Tokens]:
    return made.student(PROBLEM), made.hindsight(PROBLEM, attempt)


def start(made: Prompts, text: str) -> int:
    return made.aligned_from(*views(made), made.completion(text))


def test_the_first_token_alone_is_unaligned_where_the_student_may_not_think_and_the_teacher_may():
    """Qwen3: an empty block stands in the student's prompt; the teacher would open one, and then reads an answer."""
    made = prompts(TURNS + THINK, OFF, ON)
    assert [made.place(view) for view in views(made)] == ["after", "before"]
    assert start(made, ANSWER) == 1
    assert start(made, "\n" + ANSWER) == 2, "a blank line decides nothing"
    assert start(made, THOUGHT) == 1, "a continuation of the teacher's opens its block, and then both are inside"
    assert made.aligned_from(*reversed(views(made)), made.completion(ANSWER)) == 1


@pytest.mark.parametrize("template", [TURNS + THINK, TURNS + OPENED, TURNS + OPEN])
@pytest.mark.parametrize("kwargs", [OFF, ON])
def test_views_that_open_alike_are_aligned_throughout(template: str, kwargs: str):
    for text in (ANSWER, THOUGHT):
        assert start(prompts(template, kwargs, kwargs), text) == 0


def test_a_block_that_one_prompt_opens_is_unaligned_until_it_is_closed():
    made = prompts(TURNS + OPENED, ON, OFF)
    assert [made.place(view) for view in views(made)] == ["inside", "after"]
    thought = made.completion("Hm.\n</think>\n\nFirst 42.")
    closes = thought.index(made.encode("</think>")[0])
    assert made.aligned_from(*views(made), thought) == closes + 1
    assert start(made, "Hm.") == len(made.completion("Hm.")), "cut before it was closed: nothing is supervised"


def test_thinking_in_the_attempt_is_not_the_teachers():
    made = prompts(TURNS + THINK, ON, ON)
    for attempt in (THOUGHT, "<think>\nHm"):
        student, teacher = views(made, attempt)
        assert made.place(teacher) == made.place(student) == "before"
        assert made.aligned_from(student, teacher, made.completion(THOUGHT)) == 0


def test_a_reviser_reads_its_own_turn():
    """SD-Zero's teacher stands after a whole response, which its student may only begin."""
    for kwargs, expected in ((OFF, 0), (ON, 1)):
        made = prompts(TURNS + THINK, kwargs, ON)
        student = made.student(PROBLEM)
        revising = student + made.encode(ANSWER if kwargs == OFF else THOUGHT) + made.encode("\n\nWait.\n\n")
        assert made.aligned_from(student, revising, made.completion(THOUGHT)) == expected


def test_a_template_without_thinking_has_nothing_to_align():
    made = prompts(TURNS + OPEN, OFF, ON)
    student = made.student(PROBLEM)
    assert made.aligned_from(student, student + made.encode(ANSWER), made.completion(ANSWER)) == 0


MADE = {template: prompts(TURNS + template, OFF, ON) for template in (THINK, OPENED)}


@given(st.sampled_from(sorted(MADE)), st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "4"]), min_size=1))
def test_views_that_agree_once_agree_from_there_on(template: str, words: list[str]):
    made = MADE[template]
    tokens = made.encode("".join(words))
    one, other = ([*made._places(view, tokens)] for view in views(made))
    first = made.aligned_from(*views(made), tokens)
    assert all(a != b for a, b in zip(one[:first], other[:first], strict=True))
    assert one[first:] == other[first:]
