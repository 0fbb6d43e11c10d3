r"""What an answer's text may say, as typed values: a number with its unit, a list, a region of the real line, ..."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import sympy

from past_opsd.rollout.verifiers._latex import UnreadError
from past_opsd.rollout.verifiers._regions import Piece, Region, order


class ContradictionError(UnreadError):
    """The answer says of one thing that it is two: `41 = 42`."""


@dataclass(frozen=True, slots=True)
class Number:
    """An expression. `unit` is canonical; `loose` if it is a bare letter that may as well be a variable."""

    expr: sympy.Expr
    unit: str = ""
    loose: bool = False
    odd: bool = False  # is the word after it no known unit and no plural, so that only gold can say what it is?
    places: int | None = None  # digits after the point, where it is written as a decimal
    digits: int = 0  # significant digits of a decimal
    scientific: bool = False
    word: str = ""  # what it spells, if it is letters only
    also: Number | None = None  # the decimal given beside an exact value, or the same in another unit


@dataclass(frozen=True, slots=True)
class Items:
    """Several values. `brackets` are those around them; a bare list has none. `names` if each was given one."""

    values: tuple[Value, ...]
    brackets: str = ""
    names: tuple[str, ...] = ()
    joined: Number | None = None  # `(1,000)` may be a thousand


@dataclass(frozen=True, slots=True)
class Span:
    """A region of the real line that `name` (if there is one) lies in; `domain` is R or another set's letter."""

    region: Region
    name: str = ""
    domain: str = "R"


@dataclass(frozen=True, slots=True)
class Equation:
    """`name = value`, with both sides as expressions where they are. `value` is None if the left side is no name."""

    left: sympy.Expr | None
    right: sympy.Expr | None
    name: str
    value: Value | None
    plain: bool = False  # is the left side a name and no formula, so that the value alone says it all?


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain of inequalities in several variables: for each, what is at least (`>=`) or more (`>`) than zero."""

    parts: tuple[tuple[str, sympy.Expr], ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True, slots=True)
class Cases:
    """What holds under which condition; a condition is a region or its text."""

    rows: tuple[tuple[Value, Value], ...]


@dataclass(frozen=True, slots=True)
class Word:
    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A letter of a multiple choice, and the value beside it if there is one."""

    letter: str
    value: Value | None = None


@dataclass(frozen=True, slots=True)
class Clock:
    seconds: int


@dataclass(frozen=True, slots=True)
class Ratio:
    parts: tuple[sympy.Expr, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a stated base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Congruence:
    name: str
    residue: sympy.Expr
    modulus: sympy.Expr


Value = (
    Number | Items | Span | Equation | Relation | Matrix | Cases | Word | Choice | Clock | Ratio | Based | Congruence
)


def as_span(value: Value) -> Span:
    """A value as a part of the real line, or `UnreadError`: an interval, a finite set, a region."""
    if isinstance(value, Span):
        return value
    if isinstance(value, Items) and all(isinstance(v, Number) and _is_plain(v) for v in value.values):
        numbers = [v.expr for v in value.values if isinstance(v, Number)]
        if value.brackets in ("()", "[]", "(]", "[)") and len(numbers) == 2 and _ascend(*numbers):
            if any(n.is_infinite and edge in "[]" for n, edge in zip(numbers, value.brackets, strict=True)):
                raise UnreadError("infinity belongs to no interval")
            return Span(Region.of(Piece(numbers[0], numbers[1], value.brackets[0] == "[", value.brackets[1] == "]")))
        if value.brackets == "{}":
            return Span(Region.of(*(Piece(n, n, True, True) for n in numbers)))
    raise UnreadError("no part of the real line")


def _ascend(low: sympy.Expr, high: sympy.Expr) -> bool:
    """Could these be an interval's ends? `(1, -1)` is a point, and no way to write the empty set."""
    return not (low.is_number and high.is_number) or order(low, high) < 0


def _is_plain(number: Number) -> bool:
    return number.expr.is_extended_real is not False and not number.unit


def is_zero(difference: sympy.Expr) -> bool:
    """Is a number without variables zero? Exactly where it is rational, else to eighty digits."""
    if difference.is_Rational:
        return bool(cast(Any, difference) == 0)
    if difference.is_zero is not None:
        return bool(difference.is_zero)
    size = abs(cast(Any, sympy.N(difference, 15, maxn=400)))
    return bool(size.is_number and size.is_finite and size < sympy.Float("1e-80"))


def rounds_to(exact: sympy.Expr, decimal: Number) -> bool:
    """Is the decimal this value, rounded to the digits that it gives?"""
    if decimal.places is None or not exact.is_number or exact.is_extended_real is False or not exact.is_finite:
        return False
    off = abs(exact - decimal.expr) * sympy.Integer(10) ** decimal.places
    rest = cast(Any, sympy.N(off - sympy.Rational(1, 2), 20))
    return bool(rest <= 0)
