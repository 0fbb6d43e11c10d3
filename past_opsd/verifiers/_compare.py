r"""Does an answer equal the gold answer? Runs in a worker process that can be killed; never in the caller's.

math-verify 0.9 compares; latex2sympy2-extended, its parser, reads. Both texts come cleaned (`_normalise.clean`).
What math-verify accepts is checked once more where it is known to accept wrong answers. A parsed object is
never printed: its text can be exponentially long.
"""

from __future__ import annotations

import logging
import re

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy.core.relational import Relational

from past_opsd.verifiers import Reason
from past_opsd.verifiers._normalise import has_adjacent_numbers, split_top

# It warns that its own time limit is off; the process's limit takes its place.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_READ = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_TOLERANCE = sympy.Float("5e-6", 20)
_POINTS = (sympy.Rational(7, 5), sympy.Rational(17, 13), sympy.Rational(31, 19))
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
_NAMED = re.compile(r"\s*(?P<base>[A-Za-z]+|\\[a-z]+)(?:_(?:\w|\{\w+\}))?\s*=(?P<value>[^=]+)")
_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?(\d+)\}?")
_DEGREES_IN_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc).*\\circ")


def compare(gold: str, answer: str) -> str:
    """The reason of the verdict on two cleaned answers that are not the same text."""
    gold, answer = align_names(gold, answer)
    if different_bases(gold, answer):
        return Reason.WRONG.value
    target = read(gold)
    if target is None:
        target = read(_EQUALS.split(gold)[-1])
    if target is None:
        return Reason.BAD_GOLD.value
    if has_adjacent_numbers(answer) and not has_adjacent_numbers(gold):
        return Reason.UNPARSEABLE.value
    said = conclusion(answer, is_gold_equation="=" in gold)
    if said is None:
        return Reason.WRONG.value
    found = read(said)
    if found is None:
        return Reason.UNPARSEABLE.value
    return (Reason.CORRECT if equal(target, found, percent="%" in gold + answer) else Reason.WRONG).value


def read(text: str) -> sympy.Basic | sympy.MatrixBase | None:
    """Parse, or None where it is no mathematics."""
    text = normalize_latex(text, _READ)
    try:
        parsed = latex2sympy(
            text,
            is_real=not should_treat_as_complex(text),
            convert_degrees=_DEGREES_IN_TRIG.search(text) is not None,
            normalization_config=None,
        )
    except Exception:  # the parser raises bare Exception on a syntax error
        return None
    return parsed if isinstance(parsed, sympy.Basic | sympy.MatrixBase) else None


def equal(gold: sympy.Basic | sympy.MatrixBase, found: sympy.Basic | sympy.MatrixBase, *, percent: bool) -> bool:
    """math-verify's judgement, unless a second look refutes it."""
    if _verify(gold, found):
        return percent or not refuted(gold, found)
    with_i = [_imaginary(side) for side in (gold, found)]
    return with_i != [gold, found] and _verify(*with_i) and not refuted(*with_i)


def _verify(gold: sympy.Basic | sympy.MatrixBase, found: sympy.Basic | sympy.MatrixBase) -> bool:
    return verify(gold, found, allow_set_relation_comp=True, timeout_seconds=None)


def _imaginary(side: sympy.Basic | sympy.MatrixBase) -> sympy.Basic | sympy.MatrixBase:
    """With the symbol i read as the imaginary unit."""
    symbols = [s for s in side.free_symbols if str(s) == "i"]
    return side.subs(dict.fromkeys(symbols, sympy.I)).doit() if symbols else side


def refuted(gold: sympy.Basic | sympy.MatrixBase, found: sympy.Basic | sympy.MatrixBase) -> bool:
    """Are the two plainly different although math-verify accepts?

    Expressions: by their value, at a fixed point where there are variables. Equations in several variables, or
    without a solution: unless one is a multiple of the other.
    """
    if isinstance(gold, sympy.Expr) and isinstance(found, sympy.Expr):
        return _differ(gold, found)
    if isinstance(gold, sympy.Eq) and isinstance(found, sympy.Eq):
        several = len(gold.free_symbols | found.free_symbols) > 1
        return not _proportional(gold, found) and (several or not _solvable(gold))
    return False


def _differ(a: sympy.Expr, b: sympy.Expr) -> bool:
    first, second = _value(a), _value(b)
    return first is not None and second is not None and not _near(first, second)


def _value(side: sympy.Expr) -> sympy.Expr | None:
    """A number, with variables set to fixed values by name; None where there is none."""
    names = sorted({str(s) for s in side.free_symbols})
    if len(names) > len(_POINTS) or any(len(name) > 1 for name in names):
        return None
    by_name = dict(zip(names, _POINTS, strict=False))
    try:
        value = side.subs({s: by_name[str(s)] for s in side.free_symbols}).doit().evalf(20)
    except Exception:  # sympy raises many kinds where an expression has no value
        return None
    return value if value.is_number and value.is_finite else None


def _near(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)))


def _solvable(equation: sympy.Eq) -> bool:
    try:
        return bool(sympy.solve(equation, *equation.free_symbols))
    except Exception:  # sympy raises NotImplementedError and others where it has no method
        return False


def _residual(equation: sympy.Eq) -> sympy.Expr:
    return equation.lhs - equation.rhs  # pyright: ignore[reportOperatorIssue]


def _proportional(gold: sympy.Eq, found: sympy.Eq) -> bool:
    try:
        ratio = sympy.simplify(_residual(gold) / _residual(found))
    except Exception:  # sides that cannot be subtracted, such as sets
        return gold == found
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def conclusion(answer: str, *, is_gold_equation: bool) -> str | None:
    """What a cleaned answer says in the end: `x = 42` and `2 + 40 = 42` say 42. None where it contradicts itself.

    Every number in a chain of equations must equal the last one. When the gold answer is a value, what an
    equation's left side names may be a variable, a function or an expression in several variables, but not
    arithmetic on one variable: `x + 1 = 42` does not say 42.
    """
    said = []
    for item in split_top(answer, ",;"):
        parts = _EQUALS.split(item)
        if len(parts) > 1 and not _consistent(parts, may_solve=not is_gold_equation):
            return None
        said.append(item)
    parts = _EQUALS.split(answer)
    if is_gold_equation or len(said) > 1 or len(parts) == 1:
        return answer
    return parts[-1].strip() or answer


def _consistent(parts: list[str], *, may_solve: bool) -> bool:
    last = read(parts[-1])
    for part in parts[:-1]:
        side = read(part)
        if not isinstance(side, sympy.Expr) or isinstance(side, Relational):
            continue
        if not side.free_symbols:
            value = _value(side)
            final = _value(last) if isinstance(last, sympy.Expr) else None
            if value is not None and (final is None or not _near(value, final)):
                return False
        elif may_solve and _is_arithmetic_on_one(side):
            return False
    return True


def _is_arithmetic_on_one(side: sympy.Expr) -> bool:
    numbers = [n for n in side.atoms(sympy.Number) if n not in (1, -1)] or side.is_Add
    return len(side.free_symbols) == 1 and isinstance(side, sympy.Add | sympy.Mul | sympy.Pow) and bool(numbers)


def align_names(gold: str, answer: str) -> tuple[str, str]:
    """`x = 1, y = 2` against `1, 2` or `y = 2, x = 1`: both as the tuple in the gold answer's order.

    Without this `2, 1` would pass, as a set. `x_1 = .., x_2 = ..` names interchangeable roots and stays.
    """
    wanted = [_NAMED.fullmatch(item) for item in split_top(gold, ",;")]
    names = [m["base"] for m in wanted if m is not None]
    if len(names) < 2 or len(names) != len(wanted) or len(set(names)) != len(names):
        return gold, answer
    inner = answer[1:-1] if answer[:1] == "(" and answer[-1:] == ")" else answer
    items = split_top(inner, ",;")
    given = [_NAMED.fullmatch(item) for item in items]
    if len(items) != len(names):
        return gold, answer
    if all(given):
        by_name = {m["base"]: m["value"] for m in given if m is not None}
        if set(by_name) != set(names):
            return gold, answer
        items = [by_name[name] for name in names]
    elif "=" in inner:
        return gold, answer
    return _tuple([m["value"] for m in wanted if m is not None]), _tuple(items)


def _tuple(values: list[str]) -> str:
    return "(" + ",".join(value.strip() for value in values) + ")"


def different_bases(gold: str, answer: str) -> bool:
    """`52_8` against `52_7`: math-verify drops the base."""
    sides = [_BASED.fullmatch(side.strip()) for side in (gold, answer)]
    return sides[0] is not None and sides[1] is not None and sides[0].groups() != sides[1].groups()
