"""Units of measure and counting words: one spelling for each, and what it is in terms of the others."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

from past_opsd.rollout.verifiers._normalise import words

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
kwh
amp ampere
ohm
mole mol
byte
calorie cal
kcal kilocalorie
cup
pint
quart
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
    "dozen": 12,
    "score": 20,
    "gross": 144,
    "hundred": 100,
    "thousand": 1000,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "bn": 10**9,
    "trillion": 10**12,
    "quadrillion": 10**15,
}
# Words that stand beside a unit and change nothing.
_FILLERS = words("of the a an total altogether exactly each about approximately roughly different distinct")
# What is counted and has no plural in s, or is said of any count.
_COUNTS = words(
    "people men women children feet teeth geese mice fish sheep deer cattle dice money water altogether total them "
    "left remaining each mph kmh kph kmph fps sqft celsius fahrenheit pm am"
)
# Words that make something else of the number before or after them, so that they are no unit.
_MEANINGFUL = words(
    "and or not no if when where for mod modulo base but except unless either neither nor is isn't are than plus "
    "minus times over divided half twice double triple least most more less greater fewer up to between both "
    "choose only otherwise halves thirds fourths quarters fifths sixths sevenths eighths ninths tenths hundredths "
    "thousandths half third fourth quarter fifth sixth tenth hundredth thousandth pi factorial root power "
    "below above remainder r x inverse reciprocal opposite wrong incorrect "
    "zero one two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty sixty "
    "seventy eighty ninety twos threes fours fives sixes sevens eights nines tens zeros zeroes couple "
    "point decimal thrice doubled tripled halved multiplied added subtracted raised "
    "ago earlier short behind loss debt deficit maybe perhaps possibly probably versus vs was were does has as "
    "until through thru then be else also thus inclusive exclusive excluding including without minimum maximum "
    "ppm ppb ppt permille promille permil bps nth th st nd rd error fails works nearly almost around under "
    "against equals equal roughly never none false untrue instead rather"
)
_PART = re.compile(
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie|hundred|thousand|[a-z]+llion)ths?"
)
_OF_SIGN = words("positive negative")
_MOST_WORDS = 8
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
                name = parts.pop().split("^")[0]
                parts += ["per"] * (power < 0 and parts[-1:] != ["per"])
                parts.append(name if power == -1 else f"{name}^{abs(power)}")
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
            if name == "unit" and pending == 1:
                continue
            parts.append(name if pending == 1 else f"{name}^{pending}")
            pending = 1
    return re.sub(r"\bdegree (?=celsius|fahrenheit)", "", " ".join(parts)).removesuffix(" per").strip()


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


def changes(said: list[str]) -> bool:
    """Do words after a number make something else of it?"""
    lows = [word.lower() for word in said]
    scaled = any(first == "per" and _singular(second) in SCALES for first, second in pairwise(lows))
    signed = any(a in _OF_SIGN and not _is_plural(b) for a, b in pairwise([*lows, ""]))
    if not lows or len(lows) > _MOST_WORDS or scaled or signed:
        return True
    return bool(_MEANINGFUL.intersection(lows)) or any(_PART.fullmatch(w) or w.endswith(("n't", "not")) for w in lows)


def counts(said: list[str]) -> bool:
    """Is there a unit among these words, or a plural?"""
    return any(_is_plural(word.lower()) or is_known(word) or is_letter(word) for word in said)


def _is_plural(low: str) -> bool:
    if low in _COUNTS or low == "per" or _singular(low) in SCALES:
        return True
    return len(low) > 3 and _singular(low) != low and not low.endswith(("us", "is", "'s"))


def is_power(word: str) -> bool:
    """Does it make an area or a volume of the unit after it?"""
    return word.lower() in ("square", "sq", "cubic", "cu")


def is_letter(word: str) -> bool:
    """Could a single letter be a unit's sign?"""
    return word in _LETTERS


def same(gold: str, said: str) -> bool:
    """Do two canonical units mean the same, one perhaps in more words?"""
    a, b = gold.split(), said.split()
    if "unit" in (gold.split("^")[0], said.split("^")[0]):
        return len(a) == len(b) == 1 and gold.partition("^")[2] == said.partition("^")[2]
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
