import time
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from pydantic import ValidationError

from past_opsd.core.nouns import Problem, Response, Verdict
from past_opsd.rollout.verifiers.boxed_math import BoxedMath, Options


def say(text: str, finished: bool = True) -> Response:
    return Response((), text, (), finished)


def ask(verifier: BoxedMath, items: list[tuple[str, Response]]) -> list[Verdict]:
    return verifier.verify([(Problem("p", "", "", gold), response) for gold, response in items])


def box(content: str) -> Response:
    return say(rf"so \boxed{{{content}}}.")


@pytest.fixture(scope="module")
def verifier() -> Iterator[BoxedMath]:
    with BoxedMath(Options(timeout=2.0)) as built:
        yield built


def test_reasons_in_order(verifier: BoxedMath) -> None:
    items = [
        ("42", box("42")),
        ("42", say(r"\boxed{42}", finished=False)),
        ("42", say("42")),
        ("42", say(r"\boxed{}")),
        ("42", say(r"\boxed{42")),
        ("42", say(r"<think>\boxed{42}")),
        ("42", box("43")),
        (r"\frac{1}{2}", box("0.5")),
        ("42", box("(lambda: 42)()")),
        ("42", box("1+" * 1000 + "1")),
        ("42", box("(" * 40 + "42" + ")" * 40)),
        ("42", box("9^{9^{9^9}}")),
        ("", box("42")),
        (r"\frac{", box("42")),
        ("1, 2", say(r"\boxed{1} and \boxed{2}")),
        ("2", say(r"\boxed{1}, \boxed{2}")),
        (r"so \boxed{7}", box("7")),
        ("$7$", box("7")),
    ]
    verdicts = ask(verifier, items)
    assert [v.reason for v in verdicts] == [
        "correct",
        "truncated",
        "no_box",
        "empty_box",
        "unclosed_box",
        "no_box",
        "wrong",
        "correct",
        "unparseable",
        "too_complex",
        "too_complex",
        "timeout",
        "bad_gold",
        "bad_gold",
        "correct",
        "wrong",
        "correct",
        "correct",
    ]
    assert all(v.correct == (v.reason == "correct") for v in verdicts)


def test_the_answer_is_reported_for_voting(verifier: BoxedMath) -> None:
    verdicts = ask(
        verifier, [("1", box("1{,}234 + x")), ("1", say("none")), ("1", box("7" * 5000)), ("1", box("a\ud800b"))]
    )
    assert [v.answer for v in verdicts[:2]] == ["1234+x", ""]
    assert len(verdicts[2].answer) < 300
    assert "\ud800" not in ask(verifier, [("1", box("\ud800" + "7" * 5000))])[0].answer
    assert verdicts[3].answer.encode() == b"ab"


def test_repeated_answers_cost_nothing_even_when_they_time_out(verifier: BoxedMath) -> None:
    items = [("3", box("8^{8^{8^8}}"))] * 200
    assert {v.reason for v in ask(verifier, items)} == {"timeout"}
    began = time.monotonic()
    assert {v.reason for v in ask(verifier, items)} == {"timeout"}
    assert time.monotonic() - began < 1.0


def test_text_and_plain_numbers_need_no_process() -> None:
    with BoxedMath(Options()) as lazy:
        items = [("42", box("42.")), ("42", box("43")), (r"\frac{1}{2}", box("2/4")), (r"\text{east}", box("East"))]
        items.append((r"\text{listen}", box("silent")))
        assert [v.correct for v in ask(lazy, items)] == [True, False, True, True, False]
        assert lazy.worker_pids == []
        assert ask(lazy, []) == []


@pytest.mark.slow
def test_the_default_limit_holds_with_the_kill_and_a_fresh_process() -> None:
    with BoxedMath(Options()) as fresh:
        began = time.monotonic()
        assert ask(fresh, [("1", box("((20!)!)!"))]) == [Verdict(False, "timeout", "((20!)!)!")]
        assert time.monotonic() - began < 10.0


def test_identity_names_what_can_change_a_verdict() -> None:
    one, other = BoxedMath(Options()), BoxedMath(Options(timeout=1.0))
    assert one.identity != BoxedMath(Options(decimals="rounded")).identity
    assert version("sympy") in one.identity
    assert one.identity != other.identity
    assert one.identity == BoxedMath(Options(workers=5)).identity


def test_options_refuse_unknown_keys_and_nonsense() -> None:
    with pytest.raises(ValidationError):
        Options(time_out=3)
    with pytest.raises(ValidationError):
        Options(timeout=0)
    assert all(field.description for field in Options.model_fields.values())
