r"""Numbers as answers write them: with units, money and scales, in another base, as a time, a date or an angle.

Each reader takes a cleaned text and gives its value, or None where the text is not of its kind.
"""

from __future__ import annotations

import re
from dataclasses import replace

import sympy

from past_opsd.rollout.verifiers import _units
from past_opsd.rollout.verifiers._latex import UnreadError, decimal, read
from past_opsd.rollout.verifiers._normalise import unquote
from past_opsd.rollout.verifiers._values import Based, Clock, Number, Value, Word

COUNTED = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty",
)
_PLAIN = re.compile(r"[+-]?\s*(\d+(?:\.(\d+))?|\.(\d+))")
_SCIENTIFIC = re.compile(
    r"\(?([+-]?)\s*(\d)(?:\.(\d+))?\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))\)?"
)
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?(?::(\d{2}))?\s*([ap])\.?\s?m\.?|(\d{1,2}):(\d{2}):(\d{2})", re.IGNORECASE)
_MONTHS = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    "|nov(?:ember)?|dec(?:ember)?"
)
_DATE = re.compile(
    rf"(?:({_MONTHS})\.? (\d{{1,2}})(?:st|nd|rd|th)?|(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? ({_MONTHS})\.?)"
    r"(?:,? (\d{4}))?",
    re.IGNORECASE,
)
_BASED = re.compile(r"\(?\s*([0-9A-Fa-f]+)\s*\)?\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(\d+|[a-z]+)\s*\}?\s*\}?")
_BASE_WORDS = re.compile(r"([0-9A-Fa-f]+)\s*,?\s*(?:in\s+)?base\s*-?\s*(\d+|[a-z]+)", re.IGNORECASE)
_COMPOUND = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*,?\s*(?:\\land\s+|and\s+)?(\d+(?:\.\d+)?)\s*([A-Za-z]+)\.?")
_TEXT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?)\s*"
    r"\{((?:[^{}]|\^\{-?\d\})*)\}"
)
_POWER = r"((?:\s*\^\s*(?:\d|\{\s*-?\d\s*\}))?)"
_TAIL_TEXT = re.compile(rf"(?P<head>.*[^\s/])\s*(?P<slash>/?)\s*{_TEXT}{_POWER}", re.DOTALL)
_TAIL_WORDS = re.compile(
    r"(?P<head>.*(?:[\d)\]}!%]|\\pi(?=\s)))\s*(?P<words>[A-Za-z][A-Za-z /.]*?)" + _POWER + r"\.?", re.DOTALL
)
_TAIL_DEGREE = re.compile(
    r"(?P<head>.*[\w)\]}])\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?)\s*(?P<scale>[CF]?)", re.DOTALL
)
_MINUTES = re.compile(
    r"([+-]?\d+)\s*\^\s*\{?\s*\\circ\s*\}?\s*(\d+)\s*(?:'|\^\s*\{?\s*\\prime\s*\}?)(?:\s*(\d+(?:\.\d+)?)\s*(?:''|\"))?"
)
_MONEY = re.compile(
    r"(-?)\s*(?:(?:US|USD)?\s*\\\$|(?:\\text\{ ?)?USD ?\}?|\\text\{ ?(euro|gbp|yen|rupee)\})\s*(-?)(?=[\d.\\(])"
)


def clock(text: str) -> Value | None:
    found = _CLOCK.fullmatch(unquote(text).replace("~", " ").strip())
    if found is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in (found.groups()[:3] if found[4] else found.groups()[4:]))
    if found[4]:
        if not 1 <= hours <= 12:
            return None
        hours = hours % 12 + (12 if found[4].lower() == "p" else 0)
    return Clock(hours * 3600 + minutes * 60 + seconds) if hours < 25 and minutes < 60 and seconds < 60 else None


def date(text: str) -> Value | None:
    """`July 4, 1776`, `4 July 1776` and `July 4`, in one spelling."""
    found = _DATE.fullmatch(unquote(text).strip())
    if found is None:
        return None
    month, day = (found[1], found[2]) if found[1] else (found[4], found[3])
    return Word(f"{month[:3].lower()} {int(day)} {found[5] or ''}".strip())


def compound(text: str) -> Value | None:
    """`5 feet 6 inches` in each of its units, which is then part of the answer."""
    found = _COMPOUND.fullmatch(unquote(text))
    units = (_units.canonical(found[2]), _units.canonical(found[4])) if found else ("", "")
    factor = _units.conversion(units[1], units[0]) if units[0] != units[1] else None
    if not found or factor is None:
        return None
    rest = sympy.Rational(found[3]) * sympy.Rational(factor.numerator, factor.denominator)
    total = sympy.Rational(found[1]) + rest
    second = Number(total / sympy.Rational(factor.numerator, factor.denominator), units[1], loose=True)
    return Number(total, units[0], loose=True, also=second)


def based(text: str) -> Value | None:
    found = _BASED.fullmatch(text) or _BASE_WORDS.fullmatch(unquote(text))
    if found is None or not found[1][0].isdigit():
        return None
    base = (
        int(found[2]) if found[2].isdigit() else COUNTED.index(found[2].lower()) if found[2].lower() in COUNTED else 0
    )
    if not 2 <= base <= 36 or any(int(c, 36) >= base for c in found[1]):
        return None
    if base == 10:
        return Number(decimal(found[1]))
    return Based(found[1].upper().lstrip("0") or "0", base)


def number(text: str) -> Value | None:
    r"""An expression with what belongs to it: `\$5`, `5\%`, `26 \text{ cm}^2`, `90^\circ`, `3 million`."""
    if angle := _MINUTES.fullmatch(text.strip()):
        d, m, s = angle[1], angle[2], angle[3] or "0"
        size = decimal(d.lstrip("+-")) + decimal(m) / 60 + decimal(s) / 3600
        return Number(-size if d.startswith("-") else size, "degree")
    text = re.sub(rf"\\[dt]?frac\s*\{{\s*{_TEXT}\s*\}}\s*\{{\s*{_TEXT}\s*\}}$", r"\\text{\1/\2}", text.strip())
    if (quoted := re.fullmatch(_TEXT, text)) and re.match(r"\s*[-\d.]", quoted[1]):
        text = quoted[1].strip()
    text, unit, loose, odd = _without_unit(text)
    scale = 1
    for word in unit.split():
        scale *= _units.SCALES.get(word, 1)
    unit = " ".join(word for word in unit.split() if word not in _units.SCALES)
    text = unquote_digits(text)
    expr = read(text) * sympy.Integer(scale)
    if not (expr.is_number or expr.free_symbols or expr.atoms(sympy.Function)) or expr in (sympy.zoo, sympy.nan):
        raise UnreadError("no value")
    number = Number(expr, unit, loose, odd, word=text.strip() if re.fullmatch(r"[A-Za-z ]+", text.strip()) else "")
    if plain := _PLAIN.fullmatch(text.strip()):
        digits = plain[1].replace(".", "").lstrip("0")
        return replace(number, places=len(plain[2] or plain[3] or ""), digits=len(digits)) if scale == 1 else number
    if form := _SCIENTIFIC.fullmatch(text.strip()):
        after, power = len(form[3] or ""), int(form[4] or form[5])
        return replace(number, places=after - power, digits=after + 1, scientific=True)
    return number


def unquote_digits(text: str) -> str:
    r"""`\text{2/3}` as 2/3: digits need no quoting."""
    return re.sub(_TEXT, lambda m: m[1] if re.search(r"\d", m[1]) else m[0], text)


def _without_unit(text: str) -> tuple[str, str, bool, bool]:
    """The text before its unit, the unit, and whether that is a bare letter or an odd word."""
    units: list[str] = []
    if money := _MONEY.match(text):
        units.append(money[2] or "dollar")
        text = money[1] + money[3] + text[money.end() :]
    loose = False
    while True:
        if found := re.fullmatch(r"(?P<head>.*[^\s\\])\s*\\?%", text, re.DOTALL):
            unit = "percent"
        elif found := re.fullmatch(r"(?P<head>.*[^\s\\])\s*\\\$", text, re.DOTALL):
            unit = "dollar"
        elif found := _TAIL_DEGREE.fullmatch(text):
            if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", found["head"]):
                break
            unit = {"C": "celsius", "F": "fahrenheit"}.get(found["scale"], "degree")
        elif found := _TAIL_TEXT.fullmatch(text):
            if not _is_unit_text(found[3]) or not re.search(r"[\w)\]}!%]$", found["head"]):
                break
            unit = found["slash"] + found[3] + found[4]
        elif found := _TAIL_WORDS.fullmatch(text):
            said = re.findall(r"[A-Za-z]+", found["words"])
            single = len(said) == 1 and len(said[0]) == 1
            power = found[found.re.groups]
            if single and _units.is_letter(said[0]) and text.removesuffix(power).endswith(" " + said[0]):
                loose = True
            elif single or not _bare_units(said) or _units.changes(said):
                break
            unit = found["words"] + power
        else:
            break
        text, units = found["head"].rstrip(" /"), [unit, *units]
    odd = bool(units) and _is_odd(" ".join(units), text)
    return text, _units.canonical(" ".join(units)), loose, odd


def _bare_units(said: list[str]) -> bool:
    """Are these words units that need no quoting? A single letter is one only of an area or a volume: `sq m`."""
    return all(
        _bare_unit(word) or (_units.is_letter(word) and _units.is_power(before))
        for before, word in zip(["", *said], said, strict=False)
    )


def _bare_unit(word: str) -> bool:
    return _units.is_known(word) or word.lower() in (*_units.SCALES, "per", "of") or len(word) > 3


def _is_unit_text(text: str) -> bool:
    said = re.findall(r"[A-Za-z']+", text)
    plain = re.sub(r"(?<=[A-Za-z])\s*\^\s*(?:-?\d|\{\s*-?\d\s*\})", " ", text)
    if re.search(r"[^A-Za-z\s/.()'~-]", plain) or not said or said[0].lower() in ("squared", "cubed"):
        return False
    if len(said) == 1 and len(said[0]) == 1:
        return _units.is_letter(said[0].upper()) or _units.is_letter(said[0])
    return not _units.changes(said)


def _is_odd(unit: str, head: str) -> bool:
    """One word that may be no unit: `5 gross`. After one or a fraction, or what is no plain number, it may be one."""
    said = re.findall(r"[A-Za-z']+", unit)
    amount = re.sub(r"\\\$|\s", "", head)
    is_several = re.fullmatch(r"-?\d+(?:\.\d+)?", amount) is not None and amount != "1"
    return is_several and len(said) == 1 and not _units.counts(said)
