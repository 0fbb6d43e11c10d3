"""Units of measure and counting words: one spelling for each, and what it is in terms of the others."""

from __future__ import annotations

import re
from fractions import Fraction

from past_opsd.verifiers._normalise import words

# One line a unit: its spellings, first the one that stands for all.
_SPELLINGS = """
mm millimeter millimetre
cm centimeter centimetre
dm decimeter decimetre
m meter metre
km kilometer kilometre
inch in
ft foot feet
yd yard
mi mile
nm nanometer nanometre
mg milligram
g gram gramme
kg kilogram kilo
ton tonne
oz ounce
lb pound
ml mL milliliter millilitre
l L liter litre
gal gallon
ms millisecond
s sec second
min minute
h hr hour
day
week wk
month
year yr
degree deg
rad radian
dollar usd buck
cent
euro eur
gbp
yen jpy
yuan rmb cny
rupee inr
percent pct
hz hertz
newton
j joule
kj kilojoule
watt
kw kilowatt
volt
pa pascal
kelvin
acre
hectare ha
""".strip()
_CANONICAL = {word: line.split()[0] for line in _SPELLINGS.splitlines() for word in line.split()}
_FACTORS: dict[str, tuple[str, Fraction]] = {
    "mm": ("m", Fraction(1, 1000)), "cm": ("m", Fraction(1, 100)), "dm": ("m", Fraction(1, 10)),
    "m": ("m", Fraction(1)), "km": ("m", Fraction(1000)), "nm": ("m", Fraction(1, 10**9)),
    "inch": ("m", Fraction(254, 10000)), "ft": ("m", Fraction(3048, 10000)), "yd": ("m", Fraction(9144, 10000)),
    "mi": ("m", Fraction(1609344, 1000)),
    "mg": ("g", Fraction(1, 1000)), "g": ("g", Fraction(1)), "kg": ("g", Fraction(1000)), "ton": ("g", Fraction(10**6)),
    "oz": ("g", Fraction(28349523125, 10**9)), "lb": ("g", Fraction(45359237, 10**5)),
    "ml": ("l", Fraction(1, 1000)), "l": ("l", Fraction(1)),
    "ms": ("s", Fraction(1, 1000)), "s": ("s", Fraction(1)), "min": ("s", Fraction(60)), "h": ("s", Fraction(3600)),
    "day": ("s", Fraction(86400)), "week": ("s", Fraction(604800)),
    "cent": ("dollar", Fraction(1, 100)), "dollar": ("dollar", Fraction(1)),
    "month": ("year", Fraction(1, 12)), "year": ("year", Fraction(1)),
    "j": ("j", Fraction(1)), "kj": ("j", Fraction(1000)),
}  # fmt: skip
_PHRASES = {
    "mph": "mi per h",
    "kmh": "km per h",
    "kph": "km per h",
    "kmph": "km per h",
    "fps": "ft per s",
    "sqft": "ft^2",
}
SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
# Words that stand beside a unit and change nothing.
_FILLERS = words("of the a an total altogether exactly each about approximately roughly different distinct")
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_LETTERS = words("m g s h l L N J W K V")


def canonical(text: str) -> str:
    r"""A unit's text in one spelling: `sq. cm`, `cm^2`, `square centimetres` are all `cm^2`; empty for no unit.

    What is left after the known words is kept as it stands, in the singular.
    """
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", " degree ", text)
    text = re.sub(r"\bin\s+(?=[a-z]{3})", "", re.sub(r"\bper\s+cent\b", "percent", text))
    text = re.sub(r"\\\$", " dollar ", text).replace(r"\%", " percent ").replace("%", " percent ")
    text = re.sub(r"\\[a-zA-Z]+|[{}~]", " ", text).replace("²", "^2").replace("³", "^3")
    parts: list[str] = []
    pending = 1
    for token in re.findall(r"\^\s*-?\d+|/|[A-Za-zµΩ]+", text):
        if token[0] == "^":
            power = int(token[1:])
            if parts and power != 1:
                parts[-1] = f"{parts[-1].split('^')[0]}^{power}"
            continue
        word = "per" if token == "/" else token
        low = word.lower()
        if low in _POWERS:
            if low.endswith("ed") and parts:
                parts[-1] += f"^{_POWERS[low]}"
            else:
                pending = _POWERS[low]
            continue
        if low in _FILLERS:
            continue
        for name in _PHRASES.get(low, "").split() or [_name(word)]:
            if name == "unit":
                name = "unit" if pending == 1 else ""
            if name in ("", "unit"):
                pending = 1
                continue
            parts.append(name if pending == 1 else f"{name}^{pending}")
            pending = 1
    return " ".join(parts).removesuffix(" per").strip()


def _name(word: str) -> str:
    if word in _CANONICAL:
        return _CANONICAL[word]
    low = word.lower()
    singular = _singular(low)
    return next((_CANONICAL[w] for w in (low, singular) if w in _CANONICAL), singular)


def _singular(word: str) -> str:
    irregular = {
        "people": "person",
        "children": "child",
        "feet": "ft",
        "inches": "inch",
        "men": "man",
        "women": "woman",
    }
    if word in irregular:
        return irregular[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    plural = word.endswith("s") and not word.endswith("ss") and (len(word) > 3 or word[:-1] in _CANONICAL)
    return word[:-1] if plural and len(word) > 2 else word


def is_known(word: str) -> bool:
    """Is a bare word after a number a unit that needs no quoting? A single letter is a variable."""
    low = word.lower()
    return len(word) > 1 and (
        _name(word) in _FACTORS or _name(word) in _CANONICAL.values() or low in _PHRASES or low in _POWERS
    )


def is_letter(word: str) -> bool:
    """Could a single letter be a unit's sign?"""
    return word in _LETTERS


def same(gold: str, said: str) -> bool:
    """Do two canonical units mean the same, one perhaps in more words?"""
    a, b = gold.split(), said.split()
    if any(part.split("^")[0] in _FACTORS or part == "percent" for part in a + b):
        return [p for p in a if _measures(p)] == [p for p in b if _measures(p)]
    return set(a) <= set(b) or set(b) <= set(a)


def _measures(part: str) -> bool:
    return part.split("^")[0] in _CANONICAL.values() or part == "per"


def conversion(said: str, gold: str) -> Fraction | None:
    """The factor from one unit to the other of the same dimension, or None."""
    sides = [_in_base(unit) for unit in (said, gold)]
    if sides[0] is None or sides[1] is None or sides[0][0] != sides[1][0]:
        return None
    return sides[0][1] / sides[1][1]


def _in_base(unit: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    powers: dict[str, int] = {}
    factor, sign = Fraction(1), 1
    for part in unit.split():
        if part == "per":
            sign = -1
            continue
        name, _, power = part.partition("^")
        if name not in _FACTORS:
            return None
        base, size = _FACTORS[name]
        count = sign * int(power or 1)
        powers[base] = powers.get(base, 0) + count
        factor *= size**count
    return tuple(sorted(powers.items())), factor
