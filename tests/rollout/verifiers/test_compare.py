"""What is equal as mathematics, and what only looks so: pairs in families, and rewritings of one value."""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from past_opsd.core.nouns import Problem, Response, Verdict
from past_opsd.rollout.verifiers._compare import judge
from past_opsd.rollout.verifiers._normalise import clean
from past_opsd.rollout.verifiers._prose import stated
from past_opsd.rollout.verifiers.boxed_math import BoxedMath, Options

HERE = Path(__file__).parent


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def verdicts(pairs: list[dict[str, Any]]) -> list[Verdict]:
    with BoxedMath(Options()) as verifier:
        items = [(Problem("p", "", "", row["gold"]), Response((), row["prediction"], (), True)) for row in pairs]
        return verifier.verify(items)


def judged(gold: str, answer: str) -> bool:
    return judge(clean(stated(gold)), clean(answer)) == "correct"


def test_every_family_without_a_false_verdict() -> None:
    pairs = rows("pairs.jsonl")
    assert len(pairs) > 700
    assert len({row["family"] for row in pairs}) > 20
    found = verdicts(pairs)
    wrong = [(row, v.reason) for row, v in zip(pairs, found, strict=True) if v.correct != row["expected"]]
    assert wrong == []
    assert {v.reason for v in found} <= {
        "correct",
        "wrong",
        "unparseable",
        "no_box",
        "empty_box",
        "unclosed_box",
        "bad_gold",
    }


def under(row: dict[str, Any], options: dict[str, str]) -> bool:
    answer = row["prediction"].removeprefix(r"\boxed{").removesuffix("}")
    return judge(clean(row["gold"]), clean(answer), json.dumps(options)) == "correct"


def test_every_convention_without_a_false_verdict() -> None:
    assert [row for row in rows("conventions.jsonl") if under(row, row["options"]) != row["expected"]] == []


def test_each_convention_is_an_option_that_changes_a_verdict() -> None:
    changed = {
        setting
        for row in rows("conventions.jsonl")
        for setting in row["options"].items()
        if under(row, {}) != row["expected"]
    }
    others = {
        (name, value)
        for name in ("decimals", "percent", "units", "lists")
        for value in get_args(Options.model_fields[name].annotation)
        if value != Options.model_fields[name].default
    }
    assert changed == others


def test_reasons() -> None:
    assert judge("42", "(lambda: 42)()") == "unparseable"
    assert judge(r"\frac{", "42") == "bad_gold"
    assert judge("42", "43+1") == "wrong"
    assert judge("42", "41=42") == "wrong"


WRITTEN: list[Callable[[Fraction], str]] = [
    lambda q: rf"\frac{{{q.numerator}}}{{{q.denominator}}}",
    lambda q: rf"\dfrac{{{q.numerator * 3}}}{{{q.denominator * 3}}}",
    lambda q: rf"\left({q.numerator}/{q.denominator}\right)",
    lambda q: rf"x = \tfrac{{{q.numerator}}}{{{q.denominator}}}",
    lambda q: rf"{q.numerator}\cdot {q.denominator}^{{-1}}",
    lambda q: rf"$ \frac {{{q.numerator}}} {{{q.denominator}}} $.",
    lambda q: rf"{q.numerator // q.denominator} + \frac{{{q.numerator % q.denominator}}}{{{q.denominator}}}",
    lambda q: rf"\frac{{{q.numerator}}}{{{q.denominator}}} \text{{ cm}}",
]
fractions = st.builds(Fraction, st.integers(-500, 500), st.integers(2, 60))


@given(fractions, st.sampled_from(WRITTEN), st.sampled_from(WRITTEN))
@settings(max_examples=60, deadline=None)
def test_one_value_written_in_two_ways(value: Fraction, one: Callable[..., str], other: Callable[..., str]) -> None:
    assert judged(one(value), other(value))


@given(fractions, st.sampled_from(WRITTEN), fractions.filter(bool), st.sampled_from(WRITTEN))
@settings(max_examples=60, deadline=None)
def test_another_value_is_never_accepted(value: Fraction, one: Any, off: Fraction, other: Any) -> None:
    assert not judged(one(value), other(value + off))
    assert not judged(one(value), other(value + off / 10**12))


@given(st.integers(10**3, 10**12), st.sampled_from([",", "{,}", r"\,", r",\!"]), st.integers(0, 11))
@settings(max_examples=60, deadline=None)
def test_thousands_separators(value: int, separator: str, at: int) -> None:
    grouped = f"{value:,}".replace(",", separator)
    assert judged(str(value), grouped)
    assert not judged(str(value + 10 ** (at % len(str(value)))), grouped)


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=6), st.randoms(use_true_random=False), st.integers(-20, 20))
@settings(max_examples=60, deadline=None)
def test_lists_and_tuples(values: list[int], random: Any, extra: int) -> None:
    shuffled = random.sample(values, len(values))
    bare, other = ", ".join(map(str, values)), ", ".join(map(str, shuffled))
    assert judged(bare, other)
    assert judged(rf"\{{{bare}\}}", rf"\{{{other}\}}")
    assert judged(f"({bare})", f"({other})") is (values == shuffled)
    assert not judged(bare, f"{other}, {extra}")
    assert not judged(bare, ", ".join(map(str, shuffled[1:])))


@given(
    st.integers(-9, 9),
    st.integers(1, 9),
    st.sampled_from(["()", "[]", "(]", "[)"]),
    st.sampled_from(["()", "[]", "(]", "[)"]),
)
@settings(max_examples=60, deadline=None)
def test_intervals_as_inequalities(low: int, width: int, gold: str, said: str) -> None:
    signs = [r"\le" if said[0] == "[" else "<", r"\le" if said[1] == "]" else "<"]
    answer = rf"{low} {signs[0]} x {signs[1]} {low + width}"
    assert judged(f"{gold[0]}{low}, {low + width}{gold[1]}", answer) is (gold == said)


@given(st.integers(-999, 999), st.sampled_from(["cm", "m", "km", "hours", "minutes", "kg", "dollars", r"\%"]))
@settings(max_examples=40, deadline=None)
def test_a_unit_may_be_left_out_but_not_changed(value: int, unit: str) -> None:
    text = rf"{value} \text{{ {unit}}}" if unit != r"\%" else rf"{value}\%"
    assert judged(text, str(value))
    assert judged(text, text.replace(" ", "  "))
    assert not judged(text, rf"{value} \text{{ grams}}")
    assert not judged(text, str(value + 1))


@given(st.text(alphabet=st.sampled_from("\\{}()[]$,.;:1234567890 /^_|!%=<>+-*xyiefracsqtpmle"), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_gets_a_verdict_and_itself_is_right_only_as_text(text: str) -> None:
    assert judge("77777", clean(text)) in ("wrong", "unparseable")
