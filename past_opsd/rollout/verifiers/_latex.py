r"""Reads a LaTeX expression into sympy, exactly: decimals become fractions, and what is not understood is refused.

A product written side by side and a division have the same rank, left to right: `1/2x` is x/2. Sums, integrals,
limits, remainders and the like stay what they are, unevaluated: restating a task is no answer to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

import sympy

from past_opsd.rollout.verifiers._normalise import words

_TOKEN = re.compile(r"\s*+(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<command>\\[a-zA-Z]+\*?|\\.)|(?P<sign>\S))")
_GREEK = words(
    r"\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa \lambda \mu \nu \xi "
    r"\rho \sigma \tau \upsilon \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Sigma \Phi \Psi "
    r"\Omega \ell \hbar \aleph"
)
_TIMES = (r"\cdot", r"\times", "*", r"\ast")
_OVER = ("/", r"\div")
_REMAINDER = (r"\bmod", r"\mod", r"\pmod")
_OPERATORS = _TIMES + _OVER + _REMAINDER


def _common_log(x: sympy.Expr) -> sympy.Expr:
    return sympy.log(x, 10)


_FUNCTIONS: dict[str, Callable[[sympy.Expr], sympy.Expr]] = {
    name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")
} | {
    "ln": sympy.log,
    "lg": _common_log,
    "tg": sympy.tan,
    "ctg": sympy.cot,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "arccot": sympy.acot,
    "arcsec": sympy.asec,
    "arccsc": sympy.acsc,
    "arsinh": sympy.asinh,
    "arcosh": sympy.acosh,
    "artanh": sympy.atanh,
}
_INVERSE = {
    "sin": sympy.asin,
    "cos": sympy.acos,
    "tan": sympy.atan,
    "cot": sympy.acot,
    "sec": sympy.asec,
    "csc": sympy.acsc,
    "sinh": sympy.asinh,
    "cosh": sympy.acosh,
    "tanh": sympy.atanh,
}
_NAMES = frozenset(_FUNCTIONS) | {"log", "max", "min", "gcd", "lcm", "det", "deg", "dim", "arg", "Re", "Im", "sgn"}
_TASKS = words(r"\sum \prod \int \iint \iiint \oint \lim \max \min \sup \inf")
_PLAIN_WORDS = sorted((*_NAMES, "sqrt", "pi"), key=len, reverse=True)
_BARE = re.compile(rf"(?<![a-zA-Z\\])({'|'.join(_PLAIN_WORDS)})(?![a-zA-Z])")
_OPEN = {"(": ")", "{": "}", "[": "]", r"\{": r"\}", r"\lbrace": r"\rbrace"}
_TEXTUAL = words(r"\text \textbf \textit \textrm \mathrm \mathbf \mathit \mathsf \operatorname \mbox")
_MARKED = words(r"\overline \bar \vec \hat \tilde \overrightarrow \widehat \dot \ddot \mathcal \mathbb \mathfrak")
_LONGEST = 4000  # Python converts no more than 4300 digits
# sympy's singletons have no types of their own.
E, IMAGINARY, INFINITY, PI = cast(tuple[sympy.Expr, ...], (sympy.E, sympy.I, sympy.oo, sympy.pi))
_CONSTANTS: dict[str, sympy.Expr] = {r"\pi": PI, r"\infty": INFINITY, "∞": INFINITY}


class UnreadError(ValueError):
    """The text is no expression that can be read."""


def read(text: str) -> sympy.Expr:
    """The value of a whole text, or `UnreadError`."""
    if re.search(
        r"(?<![\\a-zA-Z{])[a-zA-Z]{5,}|\\[dt]?frac\s*\{\s*(?:d|\\partial)\b[^{}]*\}\s*\{\s*(?:d|\\partial\s*)[a-z]",
        text,
    ):
        raise UnreadError("a word, or a derivative")
    parser = _Parser(_BARE.sub(r"\\\1 ", text))
    value = parser.sum()
    parser.expect_end()
    return value


def decimal(text: str) -> sympy.Expr:
    """A number in decimal digits, exactly."""
    if len(text) > _LONGEST:
        raise UnreadError("a number of thousands of digits")
    return sympy.Rational(text)


def _root(base: sympy.Expr, degree: sympy.Expr) -> sympy.Expr:
    return base ** (1 / degree)


def _opaque(name: str, *arguments: sympy.Basic) -> sympy.Expr:
    """An operation that is kept and never carried out."""
    return sympy.Function("task_" + name)(*arguments)


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str | None, str]] = [
            (m.lastgroup, m[m.lastgroup]) for m in _TOKEN.finditer(text) if m.lastgroup
        ]
        self.at = 0
        self.bars = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    @property
    def kind(self) -> str | None:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else None

    def take(self, wanted: str | None = None) -> str:
        token = self.next
        if not token or (wanted is not None and token != wanted):
            raise UnreadError(f"expected {wanted or 'more'}, found {token!r}")
        self.at += 1
        return token

    def expect_end(self) -> None:
        if self.next:
            raise UnreadError(f"unexpected {self.next!r}")

    def sum(self) -> sympy.Expr:
        value = self.product()
        while self.next in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> sympy.Expr:
        start = self.at
        value = self.signed()
        while True:
            bare = self.at - start == 1 and self.tokens[start][1][0] not in "\\)"  # `4 2` and `x2` are no products
            operator = self.next if self.next in _OPERATORS else ""
            if operator:
                self.take()
            elif not self.starts_factor() or (bare and self.kind == "number"):
                return value
            start = self.at
            factor = self.signed() if operator else self.power()
            if operator in _OVER:
                value = value / factor
            elif operator in _REMAINDER:
                value = _opaque("mod", value, factor)
            else:
                value = value * factor

    def signed(self) -> sympy.Expr:
        if self.next in ("+", "-"):
            return -self.signed() if self.take() == "-" else self.signed()
        return self.power()

    def starts_factor(self) -> bool:
        token = self.next
        if token in ("|", r"\vert", r"\lvert"):
            return token == r"\lvert" or not self.bars
        if self.kind == "command":
            return token not in _OPERATORS and token not in (r"\}", r"\rbrace", r"\rvert", r"\rfloor", r"\rceil")
        return self.kind == "number" or token in ("(", "{", "[") or (token.isalpha() and token.isascii())

    def power(self) -> sympy.Expr:
        base = self.postfix(self.primary())
        if self.next == "^":
            self.take()
            base = self.postfix(base ** self.exponent())
        return base

    def postfix(self, value: sympy.Expr) -> sympy.Expr:
        while True:
            if self.next == "!":
                self.take()
                if self.next == "!":
                    self.take()
                    value = sympy.factorial2(value)
                else:
                    value = sympy.factorial(value)
            elif self.next == "^" and self.after_caret() == r"\circ":
                self.skip_script()
                value = value * PI / 180
            else:
                return value

    def after_caret(self) -> str:
        inner = [token for _, token in self.tokens[self.at + 1 : self.at + 3]]
        return "".join(inner[:1] if inner[:1] != ["{"] else inner[1:])

    def skip_script(self) -> None:
        self.take("^")
        if self.next == "{":
            self.take()
            self.take()
            self.take("}")
        else:
            self.take()

    def exponent(self) -> sympy.Expr:
        if self.next in ("{", "("):
            return self.bracketed()
        if self.next in ("+", "-"):
            return self.signed()
        return self.postfix(self.primary())

    def bracketed(self) -> sympy.Expr:
        close = _OPEN[self.take()]
        bars, self.bars = self.bars, 0
        value = self.sum()
        self.bars = bars
        self.take(close)
        return value

    def primary(self) -> sympy.Expr:
        kind, token = self.kind, self.next
        if kind == "number":
            return self.number()
        if token in _OPEN:
            return self.bracketed()
        if token in ("|", r"\vert", r"\lvert"):
            return self.absolute()
        if kind == "command":
            return self.command()
        if token.isalpha() and token.isascii():
            return self.named(self.take())
        raise UnreadError(f"unexpected {token!r}")

    def number(self) -> sympy.Expr:
        """A number; `3\\frac{1}{2}` is a mixed one where the fraction is proper and of plain numbers."""
        value = decimal(self.take())
        if value.is_Integer and self.next in (r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"):
            before = self.at
            self.take()
            top, under = self.argument(), self.argument()
            after, self.at = self.at, before
            if top.is_Integer and under.is_Integer and 0 < int(top) < int(under):
                self.at = after
                return value + top / under
        return value

    def absolute(self) -> sympy.Expr:
        close = r"\rvert" if self.take() == r"\lvert" else self.tokens[self.at - 1][1]
        self.bars += 1
        value = self.sum()
        self.bars -= 1
        self.take(close)
        return sympy.Abs(value)

    def argument(self) -> sympy.Expr:
        """What a command takes: a group, or one digit, letter or command."""
        if self.next == "{":
            return self.bracketed()
        kind, token = self.tokens[self.at] if self.at < len(self.tokens) else (None, "")
        if kind == "number" and token.isdigit() and len(token) > 1:
            self.tokens[self.at] = ("number", token[1:])
            return decimal(token[0])
        if kind == "number":
            return decimal(self.take())
        return self.primary()

    def command(self) -> sympy.Expr:
        token = self.take()
        name = token[1:]
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token in _GREEK:
            return self.named(token)
        if token in (r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"):
            top = self.argument()
            return top / self.argument()
        if token == r"\sqrt":
            return self.root()
        if token in (r"\binom", r"\dbinom", r"\tbinom"):
            return sympy.binomial(self.argument(), self.argument())
        if token in (r"\lfloor", r"\lceil"):
            value = self.sum()
            self.take({r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}[token])
            return _opaque(name, value)
        if token in _TASKS and name not in ("max", "min"):
            return self.task(name)
        if name in _NAMES:
            return self.function(name)
        if token in _TEXTUAL or token in _MARKED:
            return self.marked(token)
        raise UnreadError(f"unknown command {token}")

    def marked(self, token: str) -> sympy.Expr:
        r"""`\overline{AB}` and `\text{area}` as one name; `\mathrm{e}` and `\operatorname{lcm}` as what they are."""
        word = "".join(t for _, t in self.group())
        if token in (r"\mathrm", r"\text", r"\operatorname"):
            if word in ("e", "i"):
                return self.named(word)
            if word in _NAMES:
                return self.function(word)
            if word == "mod":
                raise UnreadError("a remainder")
        return self.subscripted(f"{token}{{{word}}}")

    def group(self) -> list[tuple[str | None, str]]:
        """The tokens of a braced group, or one token."""
        if self.next != "{":
            self.take()
            return [self.tokens[self.at - 1]]
        start, depth = self.at + 1, 0
        while True:
            token = self.take()
            depth += (token == "{") - (token == "}")
            if depth == 0:
                return self.tokens[start : self.at - 1]

    def root(self) -> sympy.Expr:
        degree: sympy.Expr = sympy.Integer(2)
        if self.next == "[":
            degree = self.bracketed()
        if self.next == "(":
            return _root(self.bracketed(), degree)
        if self.kind == "number":
            return _root(decimal(self.take()), degree)
        return _root(self.argument(), degree)

    def named(self, letter: str) -> sympy.Expr:
        """Euler's number, the imaginary unit, a variable, or a function's value such as f(3)."""
        if self.next not in ("_", "'"):
            if letter == "e":
                return E
            if letter in ("i", "I"):
                return IMAGINARY
        return self.subscripted(letter)

    def subscripted(self, name: str) -> sympy.Expr:
        while self.next in ("_", "'"):
            name += self.take()
            if name[-1] == "_":
                name += "{" + "".join(t for _, t in self.group()) + "}"
        if self.next == "(" and len(name) == 1 and name in "fghFGHPQ":
            return sympy.Function(name)(*self.arguments())
        return sympy.Symbol(name, real=True)

    def arguments(self) -> list[sympy.Expr]:
        """What stands between the brackets after a function's name."""
        self.take("(")
        arguments = [self.sum()]
        while self.next == ",":
            self.take()
            arguments.append(self.sum())
        self.take(")")
        return arguments

    def task(self, name: str) -> sympy.Expr:
        r"""`\sum_{k=1}^{n} k` with its bounds as they are written."""
        bounds: list[sympy.Expr] = []
        while self.next in ("_", "^"):
            mark = self.take()
            inner = "".join(t for _, t in self.group())
            bounds.append(sympy.Symbol(mark + re.sub(r"\s+", "", inner)))
        return _opaque(name, *bounds, self.product())

    def function(self, name: str) -> sympy.Expr:
        base, exponent = None, None
        while self.next in ("_", "^"):
            if self.take() == "_":
                base = self.argument()
            else:
                exponent = self.exponent()
        if name not in _FUNCTIONS and name != "log":
            return _opaque(name, *self.arguments())
        value = self.operand()
        if exponent == -1 and name in _INVERSE:
            return _INVERSE[name](value)
        if name == "log":
            result = sympy.log(value, base if base is not None else 10)
        else:
            result = _FUNCTIONS[name](value)
        return result if exponent is None else result**exponent

    def operand(self) -> sympy.Expr:
        """What a function without brackets is applied to: the product up to a sign or another function."""
        if self.next in ("(", "{", "["):
            return self.postfix(self.bracketed())
        if self.next == "-":
            self.take()
            return -self.operand()
        value = self.power()
        while self.starts_factor() and self.next[1:] not in _NAMES and self.next not in ("(", "["):
            if self.kind == "number":
                break
            value = value * self.power()
        return value
