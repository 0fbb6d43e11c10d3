"""Lookups in natural language, for small pretrained models: easy to say, easy to check, often done wrongly.

    first-letters   What are the first letters of these words: lemon, bag?
                    lemon starts with l, bag starts with b. Answer: lb
    last-letters    What are the last letters of these words: lemon, bag?
                    lemon ends with n, bag ends with g. Answer: ng
    nth-word        What is the second word of this list: lemon, bag, river?
                    The first is lemon, the second is bag. Answer: bag
    weekdays        Which day comes 3 days after Monday?
                    After Monday come Tuesday, Wednesday, Thursday. Answer: Thursday

Each family has two held-out sets: questions of its own kind that no training question repeats, and `-unseen`, whose
words no training question has (for weekdays: months). Which words are unseen is fixed, for any seed; which questions of
seen words are held out follows from a hash of the question, for any seed too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from past_opsd.core.config import Section
from past_opsd.core.nouns import PastError, Problem, derive_seed
from past_opsd.tasks import Problems

SEEN = (
    "apple", "arm", "bag", "ball", "band", "bear", "bed", "bell", "bird", "boat", "book", "box", "bridge", "cake",
    "camp", "card", "chair", "city", "cloud", "coat", "corn", "cup", "desk", "dog", "door", "dress", "drum", "duck",
    "ear", "egg", "farm", "field", "fire", "fish", "flag", "flower", "foot", "garden", "gate", "gift", "glass",
    "hand", "hat", "hill", "horse", "house", "ice", "island", "jar", "key", "king", "kitchen", "lake", "lamp", "leaf",
    "lemon", "letter", "map", "milk", "mountain", "nest", "night", "oil", "orange", "paper", "pen", "plant", "queen",
    "rain", "river", "road", "rope", "sand", "school", "ship", "shoe", "snow", "spoon", "star", "stone", "table",
    "tent", "tower", "tree", "umbrella", "village", "wall", "water", "window", "wolf", "yard", "zoo",
)  # fmt: skip
UNSEEN = (
    "ant", "bottle", "bus", "candle", "clock", "cow", "dish", "engine", "forest", "goat", "hammer", "ink", "jacket",
    "knife", "ladder", "moon", "needle", "ocean", "pillow", "rabbit", "sugar", "tiger", "uncle", "valley", "wheel",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
ORDINALS = ("first", "second", "third")

Family = Literal["first-letters", "last-letters", "nth-word", "weekdays"]
Line = tuple[str, str, str]
"""Question, worked solution, answer."""


class Options(Section):
    """Settings of the lookups."""

    families: list[Family] = Field(
        default=["first-letters"], description="kinds of question, in turn; each has its own held-out sets"
    )
    train_problems: int = Field(default=320, ge=1, le=10_000, description="training questions, the families in turn")
    eval_problems: int = Field(default=60, ge=1, le=1_000, description="held-out questions of seen words, a family")
    unseen_problems: int = Field(default=30, ge=0, le=1_000, description="held-out questions of unseen words, a family")
    seed: int = Field(default=0, ge=0, description="which questions are drawn on each side of the fixed split")

    @field_validator("families")
    @classmethod
    def _possible(cls, families: list[Family]) -> list[Family]:
        if not families or len(set(families)) != len(families):
            raise ValueError(f"families {families} must be different, and at least one")
        return families


@dataclass(frozen=True)
class _Kind:
    """A family: how a question is made of the words of its world."""

    ask: Callable[[random.Random, Sequence[str]], Line]
    seen: Sequence[str]
    unseen: Sequence[str]


def build(options: Options) -> Problems:
    """Draw the questions; a larger set of one seed begins with the smaller one."""
    streams = [_questions(options, family, "train") for family in options.families]
    train = tuple(next(streams[i % len(streams)]) for i in range(options.train_problems))
    evaluation: dict[str, tuple[Problem, ...]] = {}
    for family in options.families:
        for name, side, count in (
            (family, "held-out", options.eval_problems),
            (f"{family}-unseen", "unseen", options.unseen_problems),
        ):
            if count:
                stream = _questions(options, family, side)
                evaluation[name] = tuple(next(stream) for _ in range(count))
    content = "\n".join(f"{p.id} {p.text} {p.solution}" for part in (train, *evaluation.values()) for p in part)
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    settings = ", ".join(f"{name}={options.__dict__[name]}" for name in Options.model_fields)
    return Problems(f"lookups({settings})#{digest}", train, evaluation, label=style)


def style(text: str) -> str:
    """`worked` as the solutions are, `bare` without the work, `comment` about an attempt or a reference, or `other`."""
    if any(word in text.lower() for word in ("attempt", "reference", "student", "correct", "mistake")):
        return "comment"
    work, marker, answer = text.partition("Answer:")
    if not marker:
        return "bare" if len(text.split()) == 1 else "other"
    if len(answer.split()) != 1:
        return "other"
    return "worked" if work.strip() else "bare"


def _questions(options: Options, family: Family, side: str) -> Iterator[Problem]:
    """Distinct questions of one family and one side of the split; a message where there are no more."""
    kind = KINDS[family]
    rng = random.Random(derive_seed(options.seed, "lookups", family, side))
    words = kind.unseen if side == "unseen" else kind.seen
    drawn: set[str] = set()
    misses = 0
    while misses < 2_000:
        text, solution, answer = kind.ask(rng, words)
        if text in drawn or (side != "unseen" and _held_out(text) != (side == "held-out")):
            misses += 1
            continue
        misses = 0
        drawn.add(text)
        yield Problem(f"{family}:{side}:{len(drawn)}", text, solution, answer, {"family": family})
    raise PastError(
        f"task 'lookups': '{family}' has about {len(drawn)} different questions for '{side}'; lower task."
        + {"train": "train_problems", "held-out": "eval_problems", "unseen": "unseen_problems"}[side]
    )


def _held_out(text: str) -> bool:
    """A fifth of all questions."""
    return int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) % 5 == 0


def _first_letters(rng: random.Random, words: Sequence[str]) -> Line:
    return _letters(rng.sample(words, 2), "first", "starts", 0)


def _last_letters(rng: random.Random, words: Sequence[str]) -> Line:
    return _letters(rng.sample(words, 2), "last", "ends", -1)


def _letters(words: Sequence[str], which: str, verb: str, index: int) -> Line:
    letters = [word[index] for word in words]
    work = ", ".join(f"{word} {verb} with {letter}" for word, letter in zip(words, letters, strict=True))
    answer = "".join(letters)
    return f"What are the {which} letters of these words: {', '.join(words)}?", f"{work}. Answer: {answer}", answer


def _nth_word(rng: random.Random, words: Sequence[str]) -> Line:
    chosen = rng.sample(words, len(ORDINALS))
    n = rng.randint(1, len(ORDINALS))
    work = ", ".join(f"the {ORDINALS[i]} is {chosen[i]}" for i in range(n))
    question = f"What is the {ORDINALS[n - 1]} word of this list: {', '.join(chosen)}?"
    return question, f"{work[0].upper()}{work[1:]}. Answer: {chosen[n - 1]}", chosen[n - 1]


def _weekdays(rng: random.Random, names: Sequence[str]) -> Line:
    start, count, back = rng.randrange(len(names)), rng.randint(2, 9), rng.random() < 0.5
    step = -1 if back else 1
    passed = [names[(start + step * i) % len(names)] for i in range(1, count + 1)]
    unit, side = ("day" if names is DAYS else "month"), ("before" if back else "after")
    question = f"Which {unit} comes {count} {unit}s {side} {names[start]}?"
    return question, f"{side.capitalize()} {names[start]} come {', '.join(passed)}. Answer: {passed[-1]}", passed[-1]


KINDS: dict[Family, _Kind] = {
    "first-letters": _Kind(_first_letters, SEEN, UNSEEN),
    "last-letters": _Kind(_last_letters, SEEN, UNSEEN),
    "nth-word": _Kind(_nth_word, SEEN, UNSEEN),
    "weekdays": _Kind(_weekdays, DAYS, MONTHS),
}
