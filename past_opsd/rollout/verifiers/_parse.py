r"""An answer's text as a typed value (`_values`).

`parse` tries one reader after the other on cleaned text (`_normalise.clean`) and refuses what none of them knows. Those
of single numbers are in `_numbers`; those here read what has parts, which are parsed in turn.
"""

from __future__ import annotations

import re
from dataclasses import replace

import sympy
from sympy.core.function import AppliedUndef

from past_opsd.rollout.verifiers import _numbers
from past_opsd.rollout.verifiers._latex import UnreadError, read
from past_opsd.rollout.verifiers._normalise import plain_word, split_top, squeeze, unquote, words
from past_opsd.rollout.verifiers._numbers import COUNTED
from past_opsd.rollout.verifiers._regions import EVERYTHING, NOTHING, solve
from past_opsd.rollout.verifiers._values import (
    Cases,
    Choice,
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

_DENYING = words(
    "not no isn't never than least most between except unless about if where when such either neither or wrong"
)
_SETS = {r"\mathbb{R}": "R", r"\R": "R", r"\Re": "R", r"\mathbb{Z}": "Z", r"\mathbb{N}": "N", r"\mathbb{Q}": "Q",
         r"\mathbb{C}": "C", r"\mathbf{R}": "R", r"\mathbf{Z}": "Z"}  # fmt: skip
_RELATION = re.compile(
    r"\\(?P<name>leqslant|geqslant|leqq|geqq|leq|geq|le|ge|lt|gt|neq|ne|approx|simeq|doteq|notin|in|equiv)(?![a-zA-Z])"
    r"|(?P<sign><=|>=|!=|==|<|>|=)"
)
_MEANING = {
    "leqslant": "<=", "geqslant": ">=", "leqq": "<=", "geqq": ">=", "leq": "<=", "geq": ">=", "le": "<=", "ge": ">=",
    "lt": "<", "gt": ">", "neq": "!=", "ne": "!=", "approx": "~", "simeq": "~", "doteq": "~", "==": "=", "notin": "!in",
}  # fmt: skip
_ENVIRONMENT = re.compile(r"\\begin\{([a-zA-Z]*matrix|array|cases|aligned)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_CHOICE = re.compile(
    r"(?i:(?:option|choice|answer)\s+)?(?:\(\s*([A-Z])\s*\)|([A-Z])\s*[).:](?=\s|$)|(?<=\s)([A-Z])$)\s*[:.]?\s*(.*)",
    re.DOTALL,
)
_LEAD = re.compile(
    r"(?:\\text\s*\{(?P<quoted>[A-Za-z' ]*[A-Za-z])\s*(?::|\bis:?|\bare:?)\s*\}"
    r"|(?P<bare>(?i:(?:the )?(?:final )?(?:answer|total|result)(?: is)?)):?)\s*(?P<rest>[^:\s].*)",
    re.DOTALL,
)
_CONGRUENCE = re.compile(
    r"(.*?)\\equiv(?![a-zA-Z])(.*?)\s*\(?\s*(?:\\[pb]?mod|\\text\s*\{\s*mod\s*\}|mod)\s*\{?([^{}()]+)\}?\s*\)?",
    re.DOTALL,
)
_NAME = re.compile(r"(?P<base>[A-Za-z]+|\\[a-z]+)(?P<index>_(?:\d|\{\d+\}))?(?:\((?P<of>[^()]*)\))?")
_OUTWARD = re.compile(r"\s*([\[\]])([^\[\]]*)([\[\]])\s*", re.DOTALL)
_LAST_STEP = re.compile(r"\\(?:Rightarrow|implies|Longrightarrow|therefore|iff|Leftrightarrow)(?![a-zA-Z])")


def parse(text: str) -> Value:
    """The value of a cleaned text, or `UnreadError`."""
    text = _LAST_STEP.split(text)[-1].strip()
    for reader in _READERS:
        value = reader(text)
        if value is not None:
            return value
    raise UnreadError(text[:50])


def _maybe(text: str) -> Value | None:
    try:
        return parse(text) if text else None
    except ContradictionError:
        raise
    except UnreadError:
        return None


def _word(text: str) -> Value | None:
    """Words that stand for a value, and words that stand for themselves."""
    bare = unquote(text)
    said = plain_word(bare)
    if squeeze(text) in (r"\emptyset", r"\{\}") or said == "no solution":
        return Span(NOTHING)
    if said == "all real numbers" or squeeze(text) in (r"\mathbb{R}", r"\R"):
        return Span(EVERYTHING)
    if said in COUNTED:
        return Number(sympy.Integer(COUNTED.index(said)))
    if said in ("infinity", "positive infinity"):
        return Number(sympy.oo)
    if said in ("yes", "no"):
        return Word(said)
    if without := re.fullmatch(
        r"(?:all )?real(?: number)?s(?: except(?: for)?| other than| but) (.*)", bare, re.IGNORECASE
    ):
        left_out = parse(without[1].strip())
        points = left_out.values if isinstance(left_out, Items) and not left_out.brackets else (left_out,)
        return Span(as_span(Items(points, "{}")).region.complement())
    quoted = bare != text
    letters = re.fullmatch(r"[a-z][a-z' -]*[a-z]", said)
    is_word = letters and (quoted or len(said) > 3) and not re.search(r"(?:^| )(?:or|and)(?: |$)", said)
    return Word(said) if is_word else None


def _announced(text: str) -> Value | None:
    r"""`\text{The answer is } 7`, `Answer: 7`: what is announced, unless the words deny it."""
    found = _LEAD.fullmatch(text)
    lead = found and (found["quoted"] or found["bare"])
    if not found or not lead or _DENYING.intersection(lead.lower().split()):
        return None
    return parse(found["rest"])


def _choice(text: str) -> Value | None:
    bare = unquote(text).strip()
    if bare != text.strip() and re.fullmatch("[A-Za-z]", bare) and bare not in "ei":
        return Choice(bare.upper())
    found = _CHOICE.fullmatch(bare) or (re.fullmatch(r"\(([a-z])\)()()()", bare) if bare != text else None)
    if found is None or found[4][:1] in tuple("+-*/^=_!,)<>(") or re.search(r"\b(?:or|and|not|but)\b", found[4]):
        return None
    letter = (found[1] or found[2] or found[3]).upper()
    if not found[4]:
        return Choice(letter)
    rest = re.sub(r"^\s*[A-Za-z.]*\}|^\s*\}", "", found[4])
    value = parse(rest)
    return None if isinstance(value, Choice | Items) and not getattr(value, "brackets", "") else Choice(letter, value)


def _environment(text: str) -> Value | None:
    r"""A matrix, cases or a system between `\begin` and `\end`, perhaps with a name: `f(x) = \begin{cases}...`."""
    name, sign, rest = text.partition("=")
    if sign and _NAME.fullmatch(squeeze(name)) and rest.lstrip(" ([").startswith(r"\begin"):
        value = _environment(rest.strip())
        return value and Equation(None, None, squeeze(name), value, plain=True)
    inner = text
    while inner[:1] + inner[-1:] in ("()", "[]") and _ENVIRONMENT.fullmatch(inner[1:-1].strip()):
        inner = inner[1:-1].strip()
    inner = re.sub(r"^\\\{\s*(?=\\begin)|(?<=\})\s*\\?\.$", "", inner)
    found = _ENVIRONMENT.fullmatch(inner)
    if found is None or r"\begin" in found[2]:
        return None
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2]) if row.strip()]
    if found[1] in ("cases", "aligned"):
        return _cases(rows)
    if found[1] in ("vmatrix", "Vmatrix"):
        return None
    parsed = tuple(tuple(parse(cell.strip()) for cell in row.split("&")) for row in rows)
    return Matrix(parsed) if len({len(row) for row in parsed}) == 1 else None


def _cases(rows: list[str]) -> Value:
    """A function by cases, or a system of equations written under one another."""
    condition = re.compile(r"&|,?\s*\\text\s*\{\s*,?\s*(?=if|for|when|otherwise)|,(?=[^,]*(?:<|>|\\[lg]e|\\ne|=))")
    parts = [condition.split(row, maxsplit=1) for row in rows]
    whole = [row for row in rows if _RELATION.search(row)]
    if len(whole) == len(rows) and all(len(p) == 1 or not p[1].strip() for p in parts):
        return parse(", ".join(row.replace("&", "").rstrip(",;. ") for row in rows))
    return Cases(tuple((parse(p[0].strip(" ,")), _condition(p[1] if len(p) > 1 else "")) for p in parts))


def _condition(text: str) -> Value:
    text = re.sub(r"\b(?:if|for|when|where)\b", " ", unquote(text).replace("&", " ")).strip(" ,.{}")
    if not text or text.startswith(("otherwise", "else")):
        return Word("otherwise")
    try:
        return parse(text)
    except UnreadError:
        return Word(squeeze(text))


def _outward(text: str) -> Value | None:
    """`]0, 1[`, alone or in a union: an end whose bracket faces away is open."""
    parts = [_OUTWARD.fullmatch(part) for part in re.split(r"\\cup(?![a-zA-Z])", text)]
    pieces = ["[("[m[1] == "]"] + m[2] + "])"[m[3] == "["] for m in parts if m is not None]
    changed = text.startswith("]") or text.endswith("[")
    return parse(r"\cup ".join(pieces)) if changed and len(pieces) == len(parts) else None


def _either(text: str) -> Value | None:
    r"""Parts joined by `or` or `and`: regions are united or intersected, everything else is a list."""
    for sign in (r"\lor", r"\land"):
        parts = _split_command(text, sign)
        if len(parts) > 1:
            values: list[Value] = [parse(part.strip(" ,")) for part in parts if part.strip(" ,")]
            if any(_is_unbounded(value) for value in values):
                values = [as_span(value) for value in values]
            if all(isinstance(value, Span) for value in values):
                return _joined(values, unite=sign == r"\lor")
            return _listed(values)
    return None


def _is_unbounded(value: Value) -> bool:
    """Is it an interval for sure, as no point has an infinite coordinate?"""
    return isinstance(value, Items) and any(isinstance(v, Number) and v.expr.is_infinite for v in value.values)


def _congruence(text: str) -> Value | None:
    found = _CONGRUENCE.fullmatch(text)
    return found and Congruence(squeeze(found[1]), read(found[2]), read(found[3]))


def _split_command(text: str, command: str) -> list[str]:
    parts, start = [], 0
    for found in re.finditer(re.escape(command) + r"(?![a-zA-Z])", text):
        if _outside(text, found.start()):
            parts.append(text[start : found.start()])
            start = found.end()
    return [*parts, text[start:]]


def _outside(text: str, at: int) -> bool:
    return sum((c in "([{") - (c in ")]}") for c in text[:at]) <= 0


def _joined(values: list[Value], *, unite: bool) -> Span:
    spans = [value for value in values if isinstance(value, Span)]
    names = {span.name for span in spans if span.name}
    domains = {span.domain for span in spans}
    if len(names) > 1:
        raise UnreadError("regions of several variables")
    region = spans[0].region
    for span in spans[1:]:
        region = region.union(span.region) if unite else region.intersection(span.region)
    return Span(region, "".join(names), "".join(sorted(domains - {"R"})) or "R")


def _list(text: str) -> Value | None:
    for separator in ";,":
        parts = [part.strip() for part in split_top(text, separator)]
        if len(parts) > 1:
            return _listed([parse(part) for part in parts])
    return None


def _listed(values: list[Value]) -> Value:
    """Several values side by side, with the names they were given taken into account."""
    flat: list[Value] = []
    for value in values:
        flat += value.values if isinstance(value, Items) and not (value.brackets or value.names) else [value]
    if len(flat) == 1:
        return flat[0]
    spans = [value for value in flat if isinstance(value, Span) and value.name]
    if len(spans) == len(flat):
        both = _joined(flat, unite=False)
        return both if both.region.pieces else _joined(flat, unite=True)
    named = [_NAME.fullmatch(v.name) for v in flat if isinstance(v, Equation) and v.value is not None]
    names = [squeeze(v.name) for v in flat if isinstance(v, Equation) and v.value is not None]
    if len(names) == len(flat):
        bases = {m["base"] if m else name for m, name in zip(named, names, strict=True)}
        inner = tuple(v.value for v in flat if isinstance(v, Equation) and v.value is not None)
        if len(set(names)) == len(names) and len(bases) == len(names):
            return Items(inner, names=tuple(names))
        # Several values of one name are its set of values: `x = 3 or x = -2` is no point (3, -2).
        return Items(inner, "{}") if len(bases) == 1 else Items(tuple(flat))
    if len(names) == 1 and isinstance(flat[0], Equation) and flat[0].value is not None:
        flat[0] = flat[0].value
    return Items(tuple(flat))


def _set_algebra(text: str) -> Value | None:
    for command in (r"\cup", r"\setminus", r"\backslash", r"\cap"):
        parts = _split_command(text, command)
        if len(parts) > 1:
            spans = [as_span(parse(part.strip())) for part in parts]
            result = spans[0].region
            for span in spans[1:]:
                if command == r"\cup":
                    result = result.union(span.region)
                elif command == r"\cap":
                    result = result.intersection(span.region)
                else:
                    result = result.intersection(span.region.complement())
            return Span(result, domain=spans[0].domain)
    return None


def _bracketed(text: str) -> Value | None:
    """A tuple, an interval or a set, if brackets stand around the whole."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return _braced(text[2:-2].strip())
    if len(text) < 3 or text[0] not in "([{" or text[-1] not in ")]}" or not _is_one_group(text):
        return None
    inner = text[1:-1].strip()
    pair = "" if text[0] == "{" else text[0] + text[-1]
    value = _list(inner)
    if value is None:
        return parse(inner) if pair in ("()", "[]", "") else None
    if not isinstance(value, Items):
        return value
    if pair in ("(]", "[)"):
        return as_span(Items(value.values, pair))
    grouped = pair == "()" and re.fullmatch(r"[1-9]\d{0,2}(?:,\d{3})+", inner)
    return Items(value.values, pair, value.names, Number(read(inner.replace(",", ""))) if grouped else None)


def _is_one_group(text: str) -> bool:
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and i < len(text) - 1:
            return False
    return depth == 0


def _braced(inner: str) -> Value | None:
    r"""`\{1, 2\}`, or `\{x \in \mathbb{R} \mid x > 3\}`."""
    if not inner:
        return Span(NOTHING)
    parts = _split_command(inner, r"\mid")
    for bar in ("|", ":"):
        parts = parts if len(parts) == 2 else [part.strip() for part in split_top(inner, bar)]
    if len(parts) == 2 and _RELATION.search(parts[1]):
        said = parse(parts[1].strip())
        if not isinstance(said, Span):
            return None
        if r"\in" in parts[0]:
            said = _joined([parse(parts[0].strip()), said], unite=False)
        return replace(said, name="")
    value = _list(inner) or parse(inner)
    if isinstance(value, Span | Equation):
        return None
    return Items(value.values if isinstance(value, Items) and not value.brackets else (value,), "{}")


def _ratio(text: str) -> Value | None:
    text = re.sub(r"(?<=\d) to (?=\d)", ":", unquote(text) if "text" in text else text)
    parts = [part.strip() for part in split_top(text, ":")]
    if len(parts) < 2 or not all(parts):
        return None
    values = [_maybe(part) for part in parts]
    exprs = tuple(v.expr for v in values if isinstance(v, Number) and not v.unit)
    return Ratio(exprs, squeeze(":".join(parts))) if len(exprs) == len(parts) else None


def _relation(text: str) -> Value | None:
    found = [m for m in _RELATION.finditer(text) if _outside(text, m.start())]
    if not found:
        return None
    signs = [_MEANING.get(m["name"] or m["sign"], m["name"] or m["sign"]) for m in found]
    edges = [0, *(edge for m in found for edge in m.span()), len(text)]
    parts = [text[a:b].strip() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    if "in" in signs or "!in" in signs:
        return _member(parts, signs)
    if "equiv" in signs:
        raise UnreadError("a congruence without its modulus")
    if set(signs) <= {"=", "~"}:
        return _equation(parts, signs)
    return _inequality(parts, signs)


def _member(parts: list[str], signs: list[str]) -> Value | None:
    if len(parts) != 2:
        return None
    if squeeze(parts[1]) in _SETS:
        domain = _SETS[squeeze(parts[1])]
        return Span(EVERYTHING, squeeze(parts[0]), domain)
    span = as_span(parse(parts[1]))
    region = span.region if signs[0] == "in" else span.region.complement()
    return Span(region, squeeze(parts[0]), span.domain)


def _equation(parts: list[str], signs: list[str]) -> Value | None:
    """A chain of equations: every number in it must be the last one."""
    if not parts[-1]:
        return None
    if any(_DENYING.intersection(map(str.lower, re.findall(r"\b[A-Z]?[a-z']+\b", part))) for part in parts[:-1]):
        return None
    first, last = _maybe(parts[0]), parse(parts[-1])
    if first is None and len(split_top(parts[0], "+-")) > 1:
        return None
    if not parts[0]:
        return last
    turned = isinstance(last, Number) and not last.expr.is_number and isinstance(first, Number) and first.expr.is_number
    if turned and (len(parts) == 2 or (isinstance(last, Number) and last.expr.is_Symbol)):
        parts, first, last = parts[::-1], last, first  # `5 = x`
    value, numbers = last, [v for v in map(_maybe, parts[:-1]) if isinstance(v, Number) and v.expr.is_number]
    if isinstance(last, Number) and last.expr.is_number:
        for number in numbers:
            value = _agreed(number, last, rounded="~" in signs)
    elif numbers and not isinstance(last, Number):
        raise ContradictionError("a number is no list")
    left = first.expr if isinstance(first, Number) else None
    right = last.expr if isinstance(last, Number) else None
    if left is not None and left.is_number:
        return value
    named = left is None or _is_name(left)
    plain = named and (left is None or _is_atom(left) or all(str(s)[:1].isupper() for s in left.free_symbols))
    return Equation(left, right, squeeze(parts[0]), value if named else None, plain)


def _agreed(number: Number, last: Number, *, rounded: bool) -> Number:
    """The value that two numbers of a chain give, which must be one: the exact one, with the decimal beside it."""
    if is_zero(number.expr - last.expr):
        return last
    if rounded and last.places is not None and rounds_to(number.expr, last):
        return replace(number, also=last)
    raise ContradictionError("two numbers")


def _is_atom(expr: sympy.Expr) -> bool:
    return isinstance(expr, sympy.Symbol | AppliedUndef | sympy.Abs)


def _is_name(left: sympy.Expr) -> bool:
    r"""May this stand for a value? `x`, `f(3)`, `m+n`, `|AB|` may; `x + 1`, `2x` and `x + y - 3` are arithmetic."""
    has_constant = any(term.is_number for total in left.atoms(sympy.Add) for term in total.args)
    if has_constant or any(not n.is_Integer for n in left.atoms(sympy.Rational)):
        return False
    if len(left.free_symbols) != 1 or left.is_Symbol or isinstance(left, sympy.Function):
        return True
    numbers = [n for n in left.atoms(sympy.Number) if n not in (1, -1)]
    return not (isinstance(left, sympy.Add | sympy.Mul | sympy.Pow) and (numbers or left.is_Add))


def _inequality(parts: list[str], signs: list[str]) -> Value | None:
    if "" in parts:
        return None
    sides = [_maybe(part) for part in parts]
    exprs = [side.expr if isinstance(side, Number) else None for side in sides]
    unknown = [i for i, expr in enumerate(exprs) if expr is None or not expr.is_number]
    names = {s for expr in exprs if expr is not None for s in expr.free_symbols}
    if len(unknown) == 1:
        at = unknown[0]
        expr = exprs[at]
        if expr is None or isinstance(expr, sympy.Symbol | AppliedUndef):
            free = sympy.Symbol("x", real=True)
            exprs[at], name = free, squeeze(parts[at])
            return _solved([e for e in exprs if e is not None], signs, free, name)
    if None not in exprs and len(names) == 1 and not any(e.atoms(AppliedUndef) for e in exprs if e is not None):
        (free,) = names
        return _solved([e for e in exprs if e is not None], signs, free, str(free))
    if None in exprs or "=" in signs or "!=" in signs:
        return None
    both = zip(exprs[:-1], signs, exprs[1:], strict=True)
    return Relation(tuple(_positive(a, sign, b) for a, sign, b in both if a is not None and b is not None))


def _positive(a: sympy.Expr, sign: str, b: sympy.Expr) -> tuple[str, sympy.Expr]:
    return (">=" if "=" in sign else ">", a - b if sign[0] == ">" else b - a)


def _solved(exprs: list[sympy.Expr], signs: list[str], free: sympy.Basic, name: str) -> Span:
    region = EVERYTHING
    for left, sign, right in zip(exprs[:-1], signs, exprs[1:], strict=True):
        region = region.intersection(solve(left, sign, right, free))
    return Span(region, name)


_READERS = (
    _numbers.clock,
    _numbers.date,
    _announced,
    _choice,
    _word,
    _environment,
    _congruence,
    _numbers.compound,
    _outward,
    _either,
    _list,
    _relation,
    _set_algebra,
    _ratio,
    _bracketed,
    _numbers.based,
    _numbers.number,
)
