r"""Does an answer equal the gold answer? Runs in a worker process that can be killed; never in the caller's.

Both texts come cleaned (`_normalise.clean`) and are read as typed values (`_parse.parse`). The gold answer's kind
decides what an answer may be. A value is never printed: its text can be exponentially long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any, cast

import sympy
from sympy.core.function import AppliedUndef

from past_opsd.rollout.verifiers import Reason, _units
from past_opsd.rollout.verifiers._latex import IMAGINARY, PI, UnreadError
from past_opsd.rollout.verifiers._parse import parse
from past_opsd.rollout.verifiers._regions import Piece, Region
from past_opsd.rollout.verifiers._values import (
    Based,
    Cases,
    Choice,
    Clock,
    Congruence,
    ContradictionError,
    Equation,
    Items,
    Matrix,
    Number,
    Ratio,
    Relation,
    Span,
    Value,
    Word,
    as_span,
    is_zero,
    rounds_to,
)

_BIG_C, _SMALL_C = sympy.symbols("C c", real=True)
_LONG = 6  # decimal places from which a gold answer is itself taken for a rounding
_SCIENTIFIC_DIGITS = 3
# Where two expressions in the same variables are looked at: each variable has a value of its own, in three ways.
_POINTS = (
    tuple(sympy.Rational(a, b) for a, b in ((7, 5), (17, 13), (31, 19), (43, 37), (59, 53), (71, 67), (83, 79))),
    tuple(sympy.Rational(a, b) for a, b in ((23, 11), (5, 3), (61, 41), (29, 17), (97, 47), (13, 7), (101, 73))),
    tuple(sympy.Rational(-a, b) for a, b in ((19, 7), (11, 3), (37, 23), (67, 29), (89, 61), (3, 2), (107, 71))),
)


@dataclass(frozen=True, slots=True)
class Rules:
    """What is a matter of convention; see the verifier's options."""

    decimals: str = "exact"
    percent: str = "strict"
    units: str = "strict"
    lists: str = "unordered"


def judge(gold: str, answer: str, rules: str = "{}") -> str:
    """The reason of the verdict on two cleaned answers that are not the same text. `rules` is JSON."""
    target = _gold(gold)
    if target is None:
        return Reason.BAD_GOLD.value
    try:
        equal = same(target, parse(answer), Rules(**json.loads(rules)))
    except ContradictionError:
        return Reason.WRONG.value
    except MemoryError:
        raise
    except Exception:  # beside our own refusals, sympy raises many kinds where there is no value or no method
        return Reason.UNPARSEABLE.value
    return (Reason.CORRECT if equal else Reason.WRONG).value


@lru_cache(maxsize=1024)
def _gold(text: str) -> Value | None:
    """The gold answer's value; where it contradicts itself, what it says last."""
    try:
        return parse(text)
    except ContradictionError:
        return _gold(text.rpartition("=")[2])
    except MemoryError:
        raise
    except Exception:  # see above
        return None


def same(gold: Value, said: Value, rules: Rules) -> bool:
    """Is what was said the gold answer? Its kind decides which other kinds will do."""
    if isinstance(said, Choice) and not isinstance(gold, Choice):
        return _letter(gold, said) or (said.value is not None and same(gold, said.value, rules))
    if isinstance(gold, Choice):
        return _choice(gold, said, rules)
    if isinstance(gold, Equation) or isinstance(said, Equation):
        return _equations(gold, said, rules)
    gold, said = _single(gold), _single(said)
    if isinstance(gold, Items) and isinstance(said, Number):
        return gold.joined is not None and same(gold.joined, said, rules)
    if isinstance(said, Items) and isinstance(gold, Number):
        return said.joined is not None and same(gold, said.joined, rules)
    if isinstance(gold, Number) and isinstance(said, Number):
        return _numbers(gold, said, rules)
    gold, said = _vector(gold, said), _vector(said, gold)
    if isinstance(gold, Items) and isinstance(said, Items) and _items(gold, said, rules):
        return True
    if isinstance(gold, Span) or isinstance(said, Span):
        return _spans(gold, said)
    if isinstance(gold, Word | Number) and isinstance(said, Word | Number):
        return _words(gold) == _words(said) != ""
    if isinstance(gold, Clock | Ratio | Number) and isinstance(said, Clock | Ratio | Number):
        return _clocks(gold, said) or _ratios(gold, said, rules)
    return _structures(gold, said, rules)


def _single(value: Value) -> Value:
    """A set or list of one thing as the thing."""
    if not isinstance(value, Items) or len(value.values) != 1:
        return value
    inner = value.values[0]
    return value if isinstance(inner, Items) and inner.brackets == value.brackets == "{}" else inner


def _vector(value: Value, other: Value) -> Value:
    """A matrix of one row or column as the tuple that the other is."""
    if not isinstance(value, Matrix) or not isinstance(other, Items) or other.brackets != "()":
        return value
    is_vector = len(value.rows) == 1 or len(value.rows[0]) == 1
    return Items(tuple(v for row in value.rows for v in row), "()") if is_vector else value


def _structures(gold: Value, said: Value, rules: Rules) -> bool:
    if isinstance(gold, Based) and isinstance(said, Based):
        return gold == said
    if isinstance(gold, Congruence) and isinstance(said, Congruence):
        apart = cast(Any, sympy.cancel((gold.residue - said.residue) / gold.modulus))
        return gold.name == said.name and equal(gold.modulus, said.modulus) and bool(apart.is_integer)
    if isinstance(gold, Matrix) and isinstance(said, Matrix):
        return _all_same([v for row in gold.rows for v in row], [v for row in said.rows for v in row], rules) and (
            len(gold.rows) == len(said.rows)
        )
    if isinstance(gold, Cases) and isinstance(said, Cases):
        rows = [Items((value, condition), "()") for value, condition in gold.rows]
        return _matched(rows, [Items((value, condition), "()") for value, condition in said.rows], rules)
    if isinstance(gold, Relation) and isinstance(said, Relation):
        return len(gold.parts) == len(said.parts) and all(
            any(a[0] == b[0] and _is_larger(_multiple(_plain(a[1]), _plain(b[1]))) for b in said.parts)
            for a in gold.parts
        )
    return False


def _is_larger(factor: sympy.Expr | None) -> bool:
    return factor is not None and bool(cast(Any, factor) > 0)


def _letter(gold: Value, said: Choice) -> bool:
    """A single letter as the gold answer, and the same letter chosen."""
    return isinstance(gold, Number) and gold.word in tuple("ABCDEFGHIJabcd") and gold.word.upper() == said.letter


def _choice(gold: Choice, said: Value, rules: Rules) -> bool:
    """The letter, the value beside it, or both; where both are given both must be right."""
    if isinstance(said, Choice):
        if gold.letter != said.letter:
            return False
        return gold.value is None or said.value is None or same(gold.value, said.value, rules)
    if isinstance(said, Number) and len(said.word) == 1:
        return said.word.upper() == gold.letter
    return gold.value is not None and same(gold.value, said, rules)


def _equations(gold: Value, said: Value, rules: Rules) -> bool:
    if not isinstance(gold, Equation):
        return isinstance(said, Equation) and said.value is not None and same(gold, said.value, rules)
    if not isinstance(said, Equation):
        return gold.plain and gold.value is not None and same(gold.value, said, rules)
    if gold.value is not None and said.value is not None:
        if _same_name(gold.name, said.name):
            return same(gold.value, said.value, rules)
        renamed = _renamed(gold.name, said)
        if renamed is not None:
            return same(gold.value, renamed, rules)
    sides = (gold.left, gold.right, said.left, said.right)
    if any(side is None for side in sides):
        return False
    a, b, c, d = (side for side in sides if side is not None)
    return _multiple(a - b, c - d) is not None


def _renamed(gold: str, said: Equation) -> Number | None:
    """`f(t) = 2t` as what it says of `f(x)`."""
    names = [re.fullmatch(r"([a-zA-Z])\(([a-z])\)", name) for name in (gold, said.name)]
    if names[0] is None or names[1] is None or names[0][1] != names[1][1] or not isinstance(said.value, Number):
        return None
    old, new = (sympy.Symbol(name[2], real=True) for name in (names[1], names[0]))
    return (
        None if new in said.value.expr.free_symbols else replace(said.value, expr=said.value.expr.xreplace({old: new}))
    )


def _multiple(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """The number by which one function is the other's multiple, if there is one."""
    if a.free_symbols != b.free_symbols or not a.free_symbols:
        return None
    values = [(_at(a, points), _at(b, points)) for points in _POINTS[:2]]
    if any(x is None or y is None or is_zero(y) for x, y in values):
        return None
    ratios = [x / y for x, y in values if x is not None and y is not None]
    return ratios[0] if is_zero(ratios[0] - ratios[1]) and not is_zero(ratios[0]) else None


def _same_name(gold: str, said: str) -> bool:
    """`y = 2x` and `f(x) = 2x` name the same function."""
    names = {gold, said}
    return len(names) == 1 or ("y" in names and any(re.fullmatch(r"[a-zA-Z]\([a-z]\)", name) for name in names))


def _items(gold: Items, said: Items, rules: Rules) -> bool:
    if len(gold.values) != len(said.values) or _sets_within(gold) != _sets_within(said):
        return False
    if gold.names and said.names:
        if set(gold.names) != set(said.names):
            return False
        by_name = dict(zip(said.names, said.values, strict=True))
        return _all_same(gold.values, [by_name[name] for name in gold.names], rules)
    if _is_ordered(gold, rules):
        return _fits(gold, said) and _all_same(gold.values, said.values, rules)
    if said.names or said.brackets in ("()", "[]"):
        if gold.brackets == "{}":
            return False
        return (said.brackets != "[]" or len(said.values) > 2) and _all_same(gold.values, said.values, rules)
    return _matched(gold.values, said.values, rules)


def _sets_within(items: Items) -> int:
    return sum(isinstance(value, Items) and value.brackets == "{}" for value in items.values)


def _is_ordered(items: Items, rules: Rules) -> bool:
    return items.brackets in ("()", "[]") or bool(items.names) or (not items.brackets and rules.lists == "ordered")


def _fits(gold: Items, said: Items) -> bool:
    """A tuple may be given without its brackets, but not as an interval or a set."""
    if gold.brackets == "[]" and len(gold.values) == 2:
        return said.brackets == "[]"
    return said.brackets in (gold.brackets, "") or (not gold.brackets and said.brackets == "()")


def _all_same(gold: Sequence[Value], said: Sequence[Value], rules: Rules) -> bool:
    return len(gold) == len(said) and all(same(g, s, rules) for g, s in zip(gold, said, strict=True))


def _matched(gold: Sequence[Value], said: Sequence[Value], rules: Rules) -> bool:
    """Each of the one has its own of the other."""
    left = list(said)
    for value in gold:
        found = next((i for i, other in enumerate(left) if same(value, other, rules)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _spans(gold: Value, said: Value) -> bool:
    try:
        a, b = as_span(_solutions(gold, said)), as_span(_solutions(said, gold))
    except UnreadError:
        return False
    if a.domain != b.domain or (a.name and b.name and not _same_name(a.name, b.name)):
        return False
    return _same_region(a.region, b.region)


def _solutions(value: Value, other: Value) -> Value:
    r"""A list without brackets as the set that it is of, where the other is `x \in \{1, 2\}`."""
    points = isinstance(other, Span) and all(bool(cast(Any, piece.low) == piece.high) for piece in other.region.pieces)
    if points and isinstance(value, Items) and not (value.brackets or value.names):
        return value if _repeats(value) else Items(value.values, "{}")
    return value


def _repeats(items: Items) -> bool:
    numbers = [v.expr for v in items.values if isinstance(v, Number)]
    return any(equal(a, b) for i, a in enumerate(numbers) for b in numbers[:i])


def _same_region(a: Region, b: Region) -> bool:
    return len(a.pieces) == len(b.pieces) and all(map(_same_piece, a.pieces, b.pieces))


def _same_piece(a: Piece, b: Piece) -> bool:
    return (a.low_in, a.high_in) == (b.low_in, b.high_in) and equal(a.low, b.low) and equal(a.high, b.high)


def _words(value: Value) -> str:
    return (value.text if isinstance(value, Word) else value.word if isinstance(value, Number) else "").lower()


def _clocks(gold: Value, said: Value) -> bool:
    times = [_time(side) for side in (gold, said)]
    clear = any(isinstance(side, Clock) for side in (gold, said)) or (isinstance(gold, Ratio) and _is_time(gold))
    return clear and None not in times and times[0] == times[1]


def _time(value: Value) -> int | None:
    if isinstance(value, Ratio) and (found := re.fullmatch(r"(\d{1,2}):(\d{2})", value.text)):
        return int(found[1]) * 3600 + int(found[2]) * 60
    return value.seconds if isinstance(value, Clock) else None


def _is_time(ratio: Ratio) -> bool:
    """`12:00` and `8:30` are no ratios in lowest terms."""
    found = re.fullmatch(r"(\d{1,2}):([0-5]\d)", ratio.text)
    return found is not None and int(found[1]) < 25 and (found[2] == "00" or gcd(int(found[1]), int(found[2])) != 1)


def _ratios(gold: Value, said: Value, rules: Rules) -> bool:
    if isinstance(gold, Ratio) and _is_time(gold):
        return False
    parts = [_parts(side) for side in (gold, said)]
    first, second = parts
    if first is None or second is None or len(first) != len(second):
        return False
    if any(part.is_zero for part in (*first, *second)):
        return False
    (a, *rest), (b, *others) = first, second
    return all(equal(x * b, y * a) for x, y in zip(rest, others, strict=True))


def _parts(value: Value) -> tuple[sympy.Expr, ...] | None:
    if isinstance(value, Ratio):
        return value.parts
    return (value.expr, sympy.S.One) if isinstance(value, Number) and not value.unit else None


def _numbers(gold: Number, said: Number, rules: Rules) -> bool:
    if said.also is not None and _numbers(gold, said.also, rules):
        return True
    if gold.also is not None and _numbers(gold.also, replace(said, also=None), rules):
        return True
    if "percent" in (gold.unit, said.unit):
        return _percent(gold, said, rules)
    if "degree" in (gold.unit, said.unit) and "rad" not in (gold.unit, said.unit):
        return _angles(gold, said, rules)
    if gold.unit == "degree" or said.unit == "degree":
        return equal(_radians(gold), _radians(said))
    if gold.unit and said.unit:
        if not _units.same(gold.unit, said.unit):
            factor = _units.conversion(said.unit, gold.unit) if rules.units == "convert" else None
            return factor is not None and equal(
                gold.expr, said.expr * sympy.Rational(factor.numerator, factor.denominator)
            )
    elif (gold.unit and gold.loose) or (said.unit and said.loose) or said.odd:
        return False
    return _amounts(gold, said, rules)


def _percent(gold: Number, said: Number, rules: Rules) -> bool:
    """A percent sign is a unit, which may be left out but not put in; what it makes of a number is a convention."""
    if gold.unit == said.unit:
        return _amounts(gold, said, rules)
    if gold.unit and said.unit:
        return False
    if rules.percent == "value":
        both = [side.expr / 100 if side.unit else side.expr for side in (gold, said)]
        return equal(both[0], both[1])
    return (bool(gold.unit) or rules.percent == "optional") and _amounts(gold, said, rules)


def _angles(gold: Number, said: Number, rules: Rules) -> bool:
    if gold.unit == said.unit:
        return _amounts(gold, said, rules)
    if gold.unit and said.unit:
        return False
    bare = said if gold.unit else gold
    if bare.expr.has(PI) and (bare.expr / PI).is_rational:
        return equal(_radians(gold), _radians(said))
    return _amounts(gold, said, rules)


def _radians(number: Number) -> sympy.Expr:
    return number.expr * PI / 180 if number.unit == "degree" else number.expr


def _amounts(gold: Number, said: Number, rules: Rules) -> bool:
    """Equal exactly, or to the digits given where the form says that digits were left out."""
    if equal(gold.expr, said.expr) or equal(_with_i(gold.expr, said.expr), _with_i(said.expr, gold.expr)):
        return True
    if not (gold.expr.is_number and said.expr.is_number):
        return _of_integration(gold.expr) and equal(gold.expr, cast(sympy.Expr, said.expr.subs(_SMALL_C, _BIG_C)))
    if gold.scientific != said.scientific:
        short, exact = (gold, said) if gold.scientific else (said, gold)
        enough = short.digits >= _SCIENTIFIC_DIGITS and short.places != short.digits - 1
        return enough and exact.places is None and bool(exact.expr.is_rational) and rounds_to(exact.expr, short)
    if gold.places is not None and gold.places >= _LONG and (said.places is None or said.places >= _LONG):
        return _agree(gold, said)
    return rules.decimals == "rounded" and _agree_roughly(gold, said)


def _of_integration(expr: sympy.Expr) -> bool:
    """Has it a constant of integration, whose letter may be small?"""
    return expr.is_Add and _BIG_C in expr.args and _SMALL_C not in expr.free_symbols


def _agree(gold: Number, said: Number) -> bool:
    """Do two numbers agree to the digits that both give?"""
    if said.places is not None and said.places < (gold.places or 0):
        return rounds_to(gold.expr, said)
    return rounds_to(said.expr, gold)


def _agree_roughly(gold: Number, said: Number) -> bool:
    """With two decimals or three digits at least: an exact value and a decimal, whichever of them is gold."""
    if (gold.places is None) == (said.places is None):
        return False
    short, exact = (gold, said) if gold.places is not None else (said, gold)
    enough = (short.places or 0) >= 2 or ((short.places or 0) >= 1 and short.digits >= 3)
    return enough and rounds_to(exact.expr, short)


def equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Are two expressions the same function of their variables?"""
    if a == b:
        return True
    a, b = _plain(a), _plain(b)
    if a.is_number and b.is_number:
        if not (a.is_finite and b.is_finite):
            return bool(cast(Any, a) == b) and a not in (sympy.nan, sympy.zoo)
        return is_zero(a - b)
    if a.is_number != b.is_number and not (a.free_symbols and b.free_symbols):
        return False
    if a.free_symbols != b.free_symbols:
        return False
    looked = False
    for points in _POINTS:
        x, y = _at(a, points), _at(b, points)
        if x is None or y is None:
            continue
        if points is _POINTS[-1] and not (x.is_real and y.is_real):
            continue  # a root or logarithm of a negative number
        if not is_zero(x - y):
            return False
        looked = True
    return looked or bool(cast(Any, a - b) == 0)


def _with_i(expr: sympy.Expr, other: sympy.Expr) -> Any:
    """With j for the imaginary unit where the other has i."""
    j = sympy.Symbol("j", real=True)
    return cast(Any, expr).subs(j, IMAGINARY) if other.has(IMAGINARY) and not expr.has(IMAGINARY) else expr


def _plain(expr: sympy.Expr) -> Any:
    """With every unknown function's value as a variable of its own."""
    unknown = sorted(expr.atoms(AppliedUndef), key=str)
    return cast(Any, expr).xreplace({f: sympy.Symbol("f_" + str(f), real=True) for f in unknown})


def _at(expr: sympy.Expr, points: Sequence[sympy.Expr]) -> sympy.Expr | None:
    """The value where each variable has a fixed value, by the order of their names."""
    names = sorted(expr.free_symbols, key=str)
    value = expr.subs({s: points[i % len(points)] + i // len(points) for i, s in enumerate(names)})
    return value if value.is_number and value.is_finite is not False else None
