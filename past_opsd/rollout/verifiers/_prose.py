r"""The answer in a gold text that is more: `#### 42`, `the answer is 42`, a solution that ends in it."""

from __future__ import annotations

import re

from past_opsd.rollout.verifiers._normalise import unquote

_LOOKED_AT = 2000  # characters at the end of a text
_ANNOUNCED = re.compile(
    r".*\banswers?\b[\s*]*(?:should be|must be|is|are|:|=)+[\s:*]*(?P<said>.*\S)", re.IGNORECASE | re.DOTALL
)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_ONE = r"-?\\?\$?\d(?:[\d,]*\d)?(?:\.\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%)?"
_NUMBER = re.compile(rf"(?<![\w.])(?:{_ONE}(?:,\s+|,?\s+and\s+|,?\s+or\s+))*{_ONE}")
_SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z$\\])|\n+")
_BARE_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_TELLING = re.compile(r"\b(?:answer|so|thus|hence|therefore|is|are|was|equals|gives|get|gets)\b", re.IGNORECASE)
_LIMITING = re.compile(r"\b(?:all|every|except|unless|least|most|than|between|if|not|no)\b", re.IGNORECASE)


def stated(gold: str) -> str:
    """What a gold text announces as its answer; the text itself if it announces nothing."""
    end = gold[-_LOOKED_AT:].strip()
    _, marked, said = end.rpartition("####")
    if marked and said.strip():
        return said.strip()
    if (found := _ANNOUNCED.fullmatch(end)) and len(found["said"]) < 200:
        return _SENTENCES.split(found["said"])[0].strip()
    return conclusion(end) if _is_prose(end) else gold


def conclusion(text: str) -> str:
    """The last formula of a text, with the words after it if they are few, or else the last number."""
    last = next((s for s in reversed(_SENTENCES.split(text.strip())) if re.search(r"[\d$\\]", s)), text)
    formulas = list(_FORMULA.finditer(last))
    if formulas:
        said = next(group for group in formulas[-1].groups() if group is not None)
        tail = last[formulas[-1].end() :].strip(" .")
        return (
            f"{said} {tail}"
            if re.fullmatch(r"(?:(?:square|cubic|sq\.?|cu\.?) )?[a-zA-Z]+(?: per [a-z]+)?", tail)
            else said
        )
    numbers = _NUMBER.findall(last)
    return numbers[-1] if numbers else text


def _is_prose(text: str) -> bool:
    """Sentences, rather than an answer with a few words in it."""
    words = [w for w in _BARE_WORD.findall(_FORMULA.sub(" ", unquote(text))) if w not in ("and", "or")]
    if not re.search(r"\d|\$", text) or (len(words) < 12 and _LIMITING.search(text)):
        return False
    return len(words) >= 5 or (bool(words) and _TELLING.search(text) is not None)
