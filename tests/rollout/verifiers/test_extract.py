import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from past_opsd.rollout.verifiers import Reason
from past_opsd.rollout.verifiers._extract import after_thinking, find_answer, find_boxes


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"so \boxed{42}.", ("42",)),
        (r"\boxed {42}", ("42",)),
        (r"\boxed{a{b}c}", ("a{b}c",)),
        (r"\boxed{1} then \boxed{2}", ("2",)),
        (r"\boxed{7} and an empty \boxed{ }", ("7",)),
        (r"\boxed{7} but then \boxed{8", ("7",)),
        (r"\boxed{\boxed{5}}", (r"\boxed{5}",)),
        (r"\boxed{1, \boxed{2}}", (r"1, \boxed{2}",)),
        (r"\boxed{\{1, 2\}}", (r"\{1, 2\}",)),
        (r"\boxed{\{1, 2)}", (r"\{1, 2)",)),
        (r"\fbox{3}", ("3",)),
        (r"\boxed 7.", ("7",)),
        (r"\\boxed{9}", ("9",)),
        (r"stray } and { and \boxed{4}", ("4",)),
        (r"\boxed{1}, \boxed{2}", ("1", "2")),
        (r"$\boxed{1}$ \quad \text{and} \quad $\boxed{2}$", ("1", "2")),
        (r"first \boxed{wrong}, final \boxed{42}", ("42",)),
    ],
)
def test_what_counts_as_the_answer(text: str, parts: tuple[str, ...]) -> None:
    assert find_boxes(text).parts == parts


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("the answer is 42", Reason.NO_BOX),
        ("", Reason.NO_BOX),
        (r"\boxed not_a_brace", Reason.NO_BOX),
        (r"\boxed x", Reason.NO_BOX),
        (r"unboxed{42}", Reason.NO_BOX),
        (r"\boxed{42", Reason.UNCLOSED_BOX),
        (r"\boxed{\frac{1}{2}", Reason.UNCLOSED_BOX),
        (r"\boxed{42\}", Reason.UNCLOSED_BOX),
        (r"I computed 42. \boxed{}", Reason.EMPTY_BOX),
        ("\\boxed{ \n }", Reason.EMPTY_BOX),
    ],
)
def test_why_there_is_no_answer(text: str, failure: Reason) -> None:
    assert find_boxes(text).failure is failure


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"<think>\boxed{1}</think> \boxed{2}", ("2",)),
        (r"\boxed{1}</think> \boxed{2}", ("2",)),
        (r"<think>\boxed{1}</think> not sure", ()),
        (r"<think>\boxed{1} and on", ()),
        (r"<think>a</think> \boxed{1} <think> or", ()),
        (r"<think>a</think>b</think>\boxed{3}", ("3",)),
    ],
)
def test_thinking_is_no_answer(text: str, parts: tuple[str, ...]) -> None:
    assert find_answer(text).parts == parts


def test_thinking_can_be_kept() -> None:
    assert find_answer(r"<think>\boxed{1}", strip_thinking=False).parts == ("1",)
    assert after_thinking("<think>") is None


@given(st.text(alphabet=st.sampled_from("\\{} boxedf$,17</think>"), max_size=200) | st.text(max_size=200))
@settings(max_examples=400, deadline=None)
def test_never_raises_and_gives_balanced_content(text: str) -> None:
    found = find_answer(text)
    assert (found.failure is None) == bool(found.parts)
    assert all(part.strip() and part in text for part in found.parts)


@given(st.text(alphabet=st.sampled_from("\\{} boxed1,"), max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_last_box_is_found_whatever_stands_before(prefix: str) -> None:
    assert find_boxes(prefix.rstrip("\\") + r" end \boxed{answer}").parts[-1].endswith("answer")


@pytest.mark.parametrize(
    "unit",
    [
        r"\boxed{1} ",
        r"\boxed{",
        "{",
        "}",
        "\\",
        r"\boxed",
        r"\boxed ",
        r"\boxed{}",
        "{}",
        r"\{",
        r"\boxed{1}, ",
        "<think>",
    ],
)
def test_linear_on_long_text(unit: str) -> None:
    text = unit * (400_000 // len(unit)) + "}" * 50_000
    began = time.process_time()
    find_answer(text)
    assert time.process_time() - began < 2.0
