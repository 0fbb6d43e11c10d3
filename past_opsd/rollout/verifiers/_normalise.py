r"""One way of writing instead of many, before an answer is read: small pure functions on LaTeX text.

`clean` applies them in order. Everything here runs on bounded text (the caller refuses longer content) and
nothing is ever evaluated. The rule for adding one: it may only turn a way of writing a value into another way
of writing the same value.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from itertools import product


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "∕": "/", "÷": "/", "’": "'", "‘": "'",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "±": r"\pm ", "∓": r"\mp ",
    "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "∨": r"\lor ", "∧": r"\land ", "∖": r"\setminus ",
    "€": r"\text{ euro}", "¢": r"\text{ cents}", "£": r"\text{ gbp}", "¥": r"\text{ yen}", "₹": r"\text{ rupee}",
    "″": "''", "′": "'",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "⟨": r"\langle ", "⟩": r"\rangle ",
}  # fmt: skip
_TEXT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?)\s*\{([^{}]*)\}"
)
_COMMANDS = (
    "frac dfrac tfrac cfrac sqrt pi le leq leqslant ge geq geqslant lt gt ne neq in cup cap setminus infty cdot times "
    "div pm mp left right text textbf textit textrm textnormal mathrm mathbf mathbb mbox operatorname begin end circ "
    "degree approx binom sin cos tan cot sec csc log ln exp theta alpha beta gamma lambda mu phi omega overline "
    "emptyset mid boxed quad qquad langle rangle lfloor rfloor lceil rceil land lor sum prod int lim"
)
_DOUBLED = re.compile(rf"(?<!\\)\\\\(?=(?:{'|'.join(_COMMANDS.split())})(?![a-zA-Z]))")
_JOINING = re.compile(rf"{_TEXT}|(?<=[\s\d)}}\]$.,])(?P<bare>or|and)(?=[\s$\\(])")
_SYNONYMS = {
    "no solution": {"no solutions", "none", "empty set", "null set", "no real solution", "no real solutions",
                    "no real roots", "there is no solution", "there are no solutions"},
    "undefined": {"dne", "d.n.e", "does not exist", "nan", "not defined", "indeterminate"},
    "all real numbers": {"all reals", "all real", "real numbers", "any real number", "all real values"},
}  # fmt: skip
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_MIXED = re.compile(r"(?<![\w.^}/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.^/])")
_REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}(?!\d)")
_GOING_ON = re.compile(
    r"(?<![\w.])(\d*\.\d{0,9}?)(?:(?=(\d)\2\2)\2{3,20}|(?=(\d{2,9})\3)(?:\3){2,9})\s*(?:\\[lc]?dots(?![a-zA-Z])|\.\.\.|…)$"
)
_SCIENTIFIC = re.compile(r"(?<![\w.}])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
_RATIONAL = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?P<decimal>\d*\.\d+)|(?P<whole>\d+)(?:\s*/\s*(?P<over>\d+))?"
    r"|\\[dtc]?frac\{(?P<top>\d+)\}\{(?P<under>\d+)\})"
)
_OPENING, _CLOSING = "([{", ")]}"
_LONGEST = 2000  # Python converts no more than 4300 digits


def drop_invisible(text: str) -> str:
    """Zero-width, direction and control characters away; every kind of blank a plain space."""
    kept = (" " if c.isspace() else c for c in text if c.isspace() or unicodedata.category(c) not in ("Cf", "Cc", "Cs"))
    return "".join(kept)


def ascii_digits(text: str) -> str:
    """Full-width forms and the digits of any script as ASCII."""

    def fold(c: str) -> str:
        if "\uff01" <= c <= "\uff5e":
            return chr(ord(c) - 0xFEE0)
        return str(unicodedata.decimal(c)) if c.isdecimal() else c

    return "".join(map(fold, text))


def unicode_scripts(text: str) -> str:
    """`3²` is 3^{2}, never 32; `x₁` is x_{1}."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: "^{" + m[0].translate(_SUPER) + "}", text)
    return re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋]+", lambda m: "_{" + m[0].translate(_SUB) + "}", text)


def unicode_fractions(text: str) -> str:
    r"""`½` and `1⁄2` are \frac{1}{2}; `1½` keeps its whole part in front and so is a mixed number."""
    text = "".join(unicodedata.normalize("NFKC", c) if _is_vulgar(c) else c for c in _part(text))
    return re.sub(r"(?<!\d)(\d++)\s*+⁄\s*(\d+)", r"\\frac{\1}{\2}", text)


def _part(text: str) -> str:
    """A space between a whole number and a fraction sign, so that the digits do not run together."""
    return "".join(" " + c if _is_vulgar(c) and i and text[i - 1].isdigit() else c for i, c in enumerate(text))


def _is_vulgar(c: str) -> bool:
    return unicodedata.decomposition(c).startswith("<fraction>") and "⁄" in unicodedata.normalize("NFKC", c)


def unicode_roots(text: str) -> str:
    r"""`√2`, `√(2)`, `√x` as \sqrt{}; `∛` likewise."""
    for sign, command in (("√", r"\sqrt"), ("∛", r"\sqrt[3]")):
        while (at := text.find(sign)) >= 0:
            rest = text[at + 1 :].lstrip()
            if rest[:1] in ("(", "{") and (stop := _closing(rest, 0)) > 0:
                inner, rest = rest[1:stop], rest[stop + 1 :]
            elif number := re.match(r"\d+(?:\.\d+)?|[A-Za-z]|\\[a-z]+", rest):
                inner, rest = number[0], rest[number.end() :]
            else:
                return text
            text = f"{text[:at]}{command}{{{inner}}}{rest}"
    return text


def unicode_signs(text: str) -> str:
    """Signs that have a LaTeX name, by that name; currency signs away."""
    return "".join(_SIGNS.get(c, c) for c in text)


def unwrap(text: str) -> str:
    r"""Without `$..$`, `\(..\)`, `\[..\]`, inner box commands and redundant outer braces."""
    text = re.sub(r"\\+(?:boxed|fbox)\s*(?=\{)", "", text).strip()
    while True:
        inner = text
        for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if len(inner) > len(left + right) and inner.startswith(left) and inner.endswith(right):
                body = inner[len(left) : -len(right)]
                inner = inner if left in body or body.endswith("\\") else body.strip()
        if inner[:1] == "{" and _closing(inner, 0) == len(inner) - 1 and "," not in inner:
            inner = inner[1:-1].strip()
        if inner == text:
            return text
        text = inner


def join_thousands(text: str) -> str:
    r"""`1{,}234`, `1,\!234`, `1\,234`, `1 234 567` and `1,234/2` without separators.

    A plain comma separates thousands only when every comma outside brackets does; else it makes a list.
    """
    text = re.sub(r"(?<=\d)(?:\{,\}|\\text\{,\}|,\\!\s*|\\[,:;!]|~)(?=\d{3}(?!\d))", "", text)
    if re.fullmatch(r"-?[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?", text):
        return text.replace(" ", "")
    groups = [m.span() for m in _GROUPED.finditer(text) if not _depth(text, m.start())]
    commas = [i for i, c in enumerate(text) if c in ",;" and not _depth(text, i)]
    if commas and all(text[i] == "," and any(a < i < b for a, b in groups) for i in commas):
        text = "".join(c for i, c in enumerate(text) if i not in commas)
    return text


def plain_spaces(text: str) -> str:
    r"""LaTeX spaces (`\,`, `\;`, `\ `, `~`, `\quad`) as one plain space, `\!` as none."""
    text = re.sub(r"\\!|\\(?:displaystyle|textstyle)(?![a-zA-Z])", "", text)
    text = re.sub(r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-z])|\\hspace\*?\{[^{}]*\}", " ", text)
    return re.sub(r"\s+", " ", text).strip()


def drop_decoration(text: str) -> str:
    r"""Without colour, underlining, ticks and what is set invisible; `\mathrm{e}` and `\mathrm{i}` as constants."""
    text = re.sub(r"\\[hv]?phantom\s*\{[^{}]*\}|\\checkmark(?![a-zA-Z])|[✓✔✅]|\\color\s*\{[^{}]*\}", " ", text)
    text = re.sub(r"\\(?:underline|textcolor\s*\{[^{}]*\})\s*(?=\{)", "", text)
    text = re.sub(r"\\varnothing(?![a-zA-Z])", r"\\emptyset", text)
    text = re.sub(r"\\not\s*=", r"\\ne ", re.sub(r"\\not\s*\\in(?![a-zA-Z])", r"\\notin ", text))
    return re.sub(r"\\(?:mathrm|text|operatorname)\s*\{([ei])\}", r"{\1}", text).strip()


def one_command(text: str) -> str:
    r"""One spelling of `{n \choose k}`, `\mathbb R`, `^\circ\text{C}` and `\colon`; without `for all x` at the end."""
    text = re.sub(r"\{([^{}]*?)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\\(mathbb|mathbf)\s+([A-Z])(?![a-zA-Z])", r"\\\1{\2}", text)
    text = re.sub(
        r"\s*\\text\s*\{,? ?for (?:all|every|any)(?: real)? ?\} ?([a-z])(?: ?\\in ?\\mathbb\{R\})?$", "", text
    )
    text = re.sub(r"(\\circ ?\}?) ?\\(?:text|mathrm) ?\{ ?([CF]) ?\}", r"\1 \2", text)
    return re.sub(r"\\colon(?![a-zA-Z])", ":", text)


def drop_sizes(text: str) -> str:
    r"""Without \left, \right, \big and their kin, which only set a bracket's size; `\left.` sets none.

    Pointed brackets as round ones, and braces by their short name.
    """
    text = re.sub(r"\\(?:left|right)\s*\.", "", text)
    for name, sign in (("langle", "("), ("rangle", ")"), ("lbrace", "\\{"), ("rbrace", "\\}")):
        text = re.sub(rf"\\{name}(?![a-zA-Z])", lambda _, sign=sign: sign, text)
    return re.sub(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*", "", text).strip()


def drop_full_stop(text: str) -> str:
    """Without the sentence's final punctuation, and without a backslash left hanging."""
    text = text.rstrip().rstrip("\\").rstrip()
    return text if text.endswith("..") else text.rstrip(".,;:").rstrip()


def single_backslashes(text: str) -> str:
    r"""`-2 \\le x` as -2 \le x: text that was escaped twice. A row's end in a matrix is no command's name."""
    if r"\\begin" in text:
        text = text.replace(r"\\", "\\")
    return _DOUBLED.sub(r"\\", text)


def drop_dollars(text: str) -> str:
    r"""Without the dollar signs that set mathematics apart; one that stands alone is money."""
    signs = re.findall(r"(?<!\\)\$", text)
    return re.sub(r"(?<!\\)\$", r"\\$" if len(signs) == 1 else " ", text)


def joining_words(text: str) -> str:
    r"""`or` and `and`, quoted or bare, as \lor and \land; `\degree` as `^\circ`."""

    def sign(m: re.Match[str]) -> str:
        word = (m["bare"] or m[1] or "").strip(" ,").lower()
        return {"or": r" \lor ", "and": r" \land "}.get(word, m[0])

    text = re.sub(r"\\(?:vee|wedge)(?![a-zA-Z])", lambda m: r"\lor " if m[0] == r"\vee" else r"\land ", text)
    text = _JOINING.sub(sign, text)
    return re.sub(r"\^?\\degrees?(?![a-zA-Z])", r"^\\circ ", text).strip()


def unquote(text: str) -> str:
    r"""The words of `\text{}` and its like in their place."""
    return " ".join(re.sub(_TEXT, r" \1 ", text).split())


def mixed_numbers(text: str) -> str:
    r"""`1 1/2` as 1\frac{1}{2}. Only proper fractions make mixed numbers."""

    def mixed(m: re.Match[str]) -> str:
        whole, top, bottom = m.groups()
        proper = len(m[0]) <= _LONGEST and 0 < int(top) < int(bottom)
        return rf"{whole}\frac{{{top}}}{{{bottom}}}" if proper else m[0]

    return _MIXED.sub(mixed, text)


def repeating_decimals(text: str) -> str:
    r"""`0.1\overline{6}` as the fraction it is, and `0.1666\ldots`, where a digit three times or more twice says so."""

    def fraction(m: re.Match[str]) -> str:
        whole, fixed, cycle = m.groups()
        if len(m[0]) > _LONGEST:
            return m[0]
        bottom = (10 ** len(cycle) - 1) * 10 ** len(fixed)
        top = int(whole + fixed + cycle) - int(whole + fixed or "0")
        return rf"\frac{{{top}}}{{{bottom}}}"

    text = _GOING_ON.sub(lambda m: rf"{m[1]}\overline{{{m[2] or m[3]}}}", text)
    return _REPEATING.sub(fraction, text)


def program_text(text: str) -> str:
    """`x**2` as x^{2}, `Eq(a, b)` as a = b: what a program prints."""
    text = re.sub(r"\s*\*\*\s*(-?[\w.]+|\([^()]*\))", r"^{\1}", text)
    inner = text.strip()[3:-1]
    sides = split_top(inner, ",")
    is_call = (
        re.fullmatch(r"\s*Eq\(.*\)\s*", text, re.DOTALL) is not None and _closing(text.strip(), 2) == len(inner) + 3
    )
    return f"{sides[0].strip()} = {sides[1].strip()}" if is_call and len(sides) == 2 else text


def scientific(text: str) -> str:
    r"""`1.5e-3` as 1.5 \cdot 10^{-3}: the letter is not Euler's number."""
    return _SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", text)


def expand_pm(text: str) -> str:
    r"""`\frac{-1\pm\sqrt{17}}{2}` as its two values, item by item of a list. `\mp` takes the other sign."""
    if r"\pm" not in text and r"\mp" not in text:
        return text
    opened, closed = ("\\{", "\\}") if text.startswith("\\{") and text.endswith("\\}") else ("", "")
    items = split_top(text[len(opened) : len(text) - len(closed)], ",")
    return opened + ", ".join(value for item in items for value in _both_signs(item.strip())) + closed


def _both_signs(item: str) -> list[str]:
    signs = re.split(r"(\\pm|\\mp)(?![a-zA-Z])", item)
    count = len(signs) // 2
    if not 0 < count <= 3:
        return [item]
    tied = r"\mp" in signs
    choices = [(0,) * count, (1,) * count] if tied else list(product((0, 1), repeat=count))
    values: list[str] = []
    for choice in choices:
        parts = list(signs)
        for i, flip in enumerate(choice):
            plus = (parts[2 * i + 1] == r"\pm") != bool(flip)
            bare = not parts[2 * i].strip() or parts[2 * i].rstrip()[-1] in "=(,{["
            parts[2 * i + 1] = "-" if not plus else "" if bare else "+"
        values.append("".join(parts).strip())
    return values


_STEPS = (
    drop_invisible,
    single_backslashes,
    ascii_digits,
    unicode_fractions,
    unicode_scripts,
    unicode_signs,
    unicode_roots,
    drop_decoration,
    one_command,
    unwrap,
    join_thousands,
    plain_spaces,
    join_thousands,
    drop_full_stop,
    unwrap,
    drop_dollars,
    plain_spaces,
    drop_full_stop,
    joining_words,
    mixed_numbers,
    repeating_decimals,
    program_text,
    scientific,
    expand_pm,
    drop_sizes,
    plain_spaces,
    one_command,
)


def clean(text: str) -> str:
    """All of the above, in order."""
    for step in _STEPS:
        text = step(text)
    return text


def rational(text: str) -> Fraction | None:
    r"""The value of `-42`, `2.50`, `7/9` or `-\\frac{7}{9}`; None for anything else."""
    number = _RATIONAL.fullmatch(text) if len(text) <= _LONGEST else None
    if number is None:
        return None
    bottom = int(number["over"] or number["under"] or 1)
    if not bottom:
        return None
    top = Fraction(number["decimal"] or int(number["top"] or number["whole"]))
    return top / bottom * (-1 if number["sign"] == "-" else 1)


def voted(text: str) -> str:
    """A cleaned answer in the form that is counted for majority@k: one for a number, one for a word."""
    value = rational(text)
    return str(value) if value is not None else label(text) or squeeze(text)


def squeeze(text: str) -> str:
    """For comparing text with text: without the spaces, commands and synonyms that cannot matter."""
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])\s*", "", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    return re.sub(r"(?<![\w\\]) | (?!\w)", "", text)


def label(text: str) -> str | None:
    r"""A word answer (`\text{east}`, `odd`) or a choice (`\textbf{(C)}`, `C`) in one spelling; None if neither."""
    bare = unquote(text).rstrip(".")
    if choice := re.fullmatch(r"(\(?)\s*([A-Za-z])\s*\)?", bare):
        return choice[2] if bare == text.strip() and not choice[1] else choice[2].upper()
    return plain_word(bare) if re.fullmatch(r"[A-Za-z][A-Za-z' -]*[A-Za-z]", bare) else None


def plain_word(text: str) -> str:
    """Words in lower case, without an article and with one spelling for what has several."""
    said = re.sub(r"^(?:the|a|an) ", "", " ".join(text.lower().strip(" .!'\"").split()))
    return next((name for name, spellings in _SYNONYMS.items() if said in spellings), said)


def is_quoted(text: str) -> bool:
    r"""Is the whole of it one `\text{}`, so that it is a word and no product of variables?"""
    return re.fullmatch(_TEXT, text.strip()) is not None


def nesting(text: str) -> int:
    """How deep brackets of any kind are nested."""
    depth = deepest = 0
    for c in text:
        depth += (c in _OPENING) - (c in _CLOSING)
        deepest = max(deepest, depth)
    return deepest


def split_top(text: str, separators: str) -> list[str]:
    """Split at separators outside every bracket."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in _OPENING) - (c in _CLOSING)
        if depth <= 0 and c in separators:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _depth(text: str, stop: int) -> int:
    return sum((c in _OPENING) - (c in _CLOSING) for c in text[:stop])


def _closing(text: str, at: int) -> int:
    """The index of the bracket that closes the one at `at`, or -1."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in _OPENING) - (text[i] in _CLOSING)
        if depth == 0:
            return i
    return -1
