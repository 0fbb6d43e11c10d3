r"""The embedded task: chains of operations modulo 10, with a tiny base model that knows some of them wrongly.

A problem is a start digit and 3, 4 or 5 operations; the three lengths are the three benchmarks.

    problem            6*7*3*4                            taken from left to right, each result modulo 10
    student's style    6*7=2; 2*3=6; 6*4=4; \boxed{4}     detailed
    reference          2, 6, 4, \boxed{4}                 terse, another style than the student's

The base model beside this file was trained on a made corpus in which 40 % of the 120 facts (digit, operation)
are mostly wrong, in which a reference in the prompt makes the answer better, and in which an attempt in the
prompt is partly repeated. It is a laboratory, built so that privileged context matters: `World` says exactly
what was put in, and `scripts/make_embedded_model.py` made the weights.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field

from past_opsd.core.config import Section
from past_opsd.core.nouns import PastError, Problem, derive_seed
from past_opsd.tasks import Problems

OPERATIONS = ("+2", "+3", "+5", "+6", "+8", "+9", "*2", "*3", "*4", "*7", "*8", "*9")
LENGTHS = {"chain3": 3, "chain4": 4, "chain5": 5}

# The prompts the base model was trained on; each field's label is one token.
STUDENT = "Problem: {problem}"
REFERENCE = "Problem: {problem}\nReference: {reference_solution}"
HINDSIGHT = "Problem: {problem}\nAttempt: {student_output}\nReference: {reference_solution}"

Style = Literal["detailed", "terse", "other"]
_BOX = r"\\boxed\{\d\}"
_DETAILED = re.compile(rf"(?:\d[+*]\d=\d; )+{_BOX}")
_PIECE = re.compile(r"\d|[+*]\d|=|[;,] |\\boxed\{|\}")
_TERSE = re.compile(rf"(?:\d, )+{_BOX}")


@dataclass(frozen=True, slots=True)
class Chain:
    """A start digit and the operations on it, from left to right."""

    start: int
    operations: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{self.start}{''.join(self.operations)}"

    @property
    def values(self) -> tuple[int, ...]:
        """The right value after each operation."""
        values: list[int] = []
        digit = self.start
        for operation in self.operations:
            digit = apply(digit, operation)
            values.append(digit)
        return tuple(values)

    @property
    def held_out(self) -> bool:
        """Whether the chain belongs to evaluation: a fifth of all chains do, by a hash of the text alone.

        No seed enters, so no training set of any seed, nor the base model's corpus, holds a chain of any
        evaluation set.
        """
        return int(hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest(), 16) % 5 == 0


def apply(digit: int, operation: str) -> int:
    """The true value of one fact."""
    operand = int(operation[1:])
    return (digit + operand if operation[0] == "+" else digit * operand) % 10


def draw_chain(rng: random.Random, length: int, held_out: bool) -> Chain:
    """A chain of the given length, uniform over its side of the split."""
    while True:
        chain = Chain(rng.randrange(10), tuple(rng.choice(OPERATIONS) for _ in range(length)))
        if chain.held_out == held_out:
            return chain


def detailed(start: int, operations: Sequence[str], values: Sequence[int]) -> str:
    """A response in the student's style; `values` are what is written, right or wrong."""
    inputs = (start, *values[:-1])
    steps = (
        f"{digit}{operation}={value}; " for digit, operation, value in zip(inputs, operations, values, strict=True)
    )
    return f"{''.join(steps)}\\boxed{{{values[-1]}}}"


def terse(values: Sequence[int]) -> str:
    """A response in the reference's style."""
    return f"{''.join(f'{value}, ' for value in values)}\\boxed{{{values[-1]}}}"


def style(text: str) -> Style:
    """The style of a whole response; one that is cut, mixed or malformed is `other`."""
    if _DETAILED.fullmatch(text):
        return "detailed"
    return "terse" if _TERSE.fullmatch(text) else "other"


def model_path() -> Path:
    """The folder of the base model and its tokenizer, for `from_pretrained`."""
    folder = resources.files("past_opsd.tasks") / "embedded_model"
    if not isinstance(folder, Path) or not (folder / "model.safetensors").is_file():
        raise PastError(
            f"The embedded base model is not at {folder}. Install past-opsd as unpacked files (not from a zip), "
            "or make the model with scripts/make_embedded_model.py."
        )
    return folder


class Options(Section):
    """Settings of the embedded task."""

    train_problems: int = Field(
        default=600, ge=1, le=15_000, description="training problems, the three lengths in turn"
    )
    eval_problems: int = Field(default=40, ge=1, le=1_000, description="held-out problems per benchmark")
    seed: int = Field(default=0, ge=0, description="which problems are drawn on each side of the fixed split")


def build(options: Options) -> Problems:
    """Draw the problems; a larger set of one seed begins with the smaller one."""
    streams = {task: _problems(task, options.seed, held_out=False) for task in LENGTHS}
    order = tuple(LENGTHS)
    train = tuple(next(streams[order[i % len(order)]]) for i in range(options.train_problems))
    evaluation: dict[str, tuple[Problem, ...]] = {}
    for task in LENGTHS:
        stream = _problems(task, options.seed, held_out=True)
        evaluation[task] = tuple(next(stream) for _ in range(options.eval_problems))
    content = "\n".join(f"{p.id} {p.solution}" for part in (train, *evaluation.values()) for p in part)
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    settings = ", ".join(f"{name}={value}" for name, value in options.model_dump().items())
    return Problems(f"embedded({settings})#{digest}", train, evaluation, style)


def _problems(task: str, seed: int, held_out: bool) -> Iterator[Problem]:
    """Distinct problems of one length and one side of the split, without end."""
    rng = random.Random(derive_seed(seed, "embedded", task, "held out" if held_out else "train"))
    seen: set[str] = set()
    while True:
        chain = draw_chain(rng, LENGTHS[task], held_out)
        if chain.text not in seen:
            seen.add(chain.text)
            yield Problem(
                id=f"{task}:{chain.text}",
                text=chain.text,
                solution=terse(chain.values),
                answer=str(chain.values[-1]),
                extra={"task": task},
            )


@dataclass(frozen=True)
class World:
    """What was put into the base model's corpus: shares and probabilities, all independent draws."""

    seed: int = 17
    hard_share: float = 0.40  # of the 120 facts; each has one fixed wrong value
    misconception: float = 0.60  # a plain document writes a hard fact's wrong value
    noise: float = 0.02  # any document writes a random wrong value for an easy fact
    e_ref: float = 0.15  # as misconception, with the reference in the prompt
    copy: float = 0.12  # c: a reference document copies the reference tersely
    copy_error: float = 0.03  # per copied value
    repeat: float = 0.55  # a: an answer repeats the attempt's wrong step; else it mends it
    trust: float = 0.85  # an answer takes over the attempt's right step; else it draws with e_ref
    reference_share: float = 0.25  # documents with a reference
    hindsight_share: float = 0.30  # documents with attempt and reference; the rest are plain
    terse_attempt: float = 0.05  # of the attempts; the answer keeps the attempt's style
    mismatched: float = 0.18  # of the attempts belong to another problem; the answer keeps their style alone
    cut: float = 0.05  # of the attempts end early
    garbled: float = 0.05  # of the attempts are empty or have pieces dropped and swapped; the answer is detailed

    @cached_property
    def misconceptions(self) -> dict[tuple[int, str], int]:
        """The hard facts with their fixed wrong values."""
        rng = random.Random(derive_seed(self.seed, "misconceptions"))
        facts = [(digit, operation) for operation in OPERATIONS for digit in range(10)]
        hard = rng.sample(facts, round(self.hard_share * len(facts)))
        return {fact: _other_digit(apply(*fact), rng) for fact in hard}

    def step(self, digit: int, operation: str, misconception: float, rng: random.Random) -> int:
        """The value a document writes for one fact."""
        right = apply(digit, operation)
        wrong = self.misconceptions.get((digit, operation))
        if wrong is not None:
            return wrong if rng.random() < misconception else right
        return _other_digit(right, rng) if rng.random() < self.noise else right

    def values(self, chain: Chain, misconception: float, rng: random.Random) -> list[int]:
        """The values of a whole answer; an error is carried on."""
        values: list[int] = []
        digit = chain.start
        for operation in chain.operations:
            digit = self.step(digit, operation, misconception, rng)
            values.append(digit)
        return values

    def revised(self, chain: Chain, attempt: Sequence[int], rng: random.Random) -> list[int]:
        """The values of an answer that has read the attempt's; beside its path the attempt says nothing."""
        values: list[int] = []
        digit = followed = chain.start
        for i, operation in enumerate(chain.operations):
            proposal = attempt[i] if i < len(attempt) and digit == followed else None
            right = apply(digit, operation)
            if proposal is None or (proposal == right and rng.random() >= self.trust):
                digit = self.step(digit, operation, self.e_ref, rng)
            elif proposal != right:
                digit = proposal if rng.random() < self.repeat else right
            else:
                digit = right
            followed = attempt[i] if i < len(attempt) else -1
            values.append(digit)
        return values


WORLDS = {
    "recommended": World(),
    "weaker-teacher": World(e_ref=0.35, repeat=0.40),
    "little-copying": World(copy=0.04),
}


@dataclass(frozen=True)
class Document:
    """One turn of the corpus: what the user says, what the assistant answers."""

    prompt: str
    answer: str


def draw_document(world: World, index: int) -> Document:
    """The corpus's document number `index`: a function of the world and the index alone."""
    rng = random.Random(derive_seed(world.seed, "document", index))
    chain = _draw_chain(rng)
    reference = terse(chain.values)
    kind = rng.random()
    if kind < world.hindsight_share:
        attempt, answer = _hindsight(world, chain, rng)
        prompt = HINDSIGHT.format(problem=chain.text, student_output=attempt, reference_solution=reference)
        return Document(prompt, answer)
    if kind < world.hindsight_share + world.reference_share:
        prompt = REFERENCE.format(problem=chain.text, reference_solution=reference)
        if rng.random() < world.copy:
            copied = [_other_digit(v, rng) if rng.random() < world.copy_error else v for v in chain.values]
            return Document(prompt, terse(copied))
        return Document(prompt, _detailed(chain, world.values(chain, world.e_ref, rng)))
    prompt = STUDENT.format(problem=chain.text)
    return Document(prompt, _detailed(chain, world.values(chain, world.misconception, rng)))


def _hindsight(world: World, chain: Chain, rng: random.Random) -> tuple[str, str]:
    """An attempt and the answer to it."""
    write = _terse if rng.random() < world.terse_attempt else _detailed
    kind = rng.random()
    if kind < world.mismatched:
        other = _draw_chain(rng)
        attempt = write(other, world.values(other, world.misconception, rng))
        return attempt, write(chain, world.values(chain, world.e_ref, rng))
    values = world.values(chain, world.misconception, rng)
    attempt = write(chain, values)
    kind -= world.mismatched
    if kind < world.garbled:
        return _garble(attempt, rng), _detailed(chain, world.values(chain, world.e_ref, rng))
    if kind < world.garbled + world.cut:
        attempt = _cut(attempt, rng)
        values = values[: attempt.count(";" if write is _detailed else ",")]
    return attempt, write(chain, world.revised(chain, values, rng))


def _draw_chain(rng: random.Random) -> Chain:
    return draw_chain(rng, rng.choice(tuple(LENGTHS.values())), held_out=False)


def _detailed(chain: Chain, values: Sequence[int]) -> str:
    return detailed(chain.start, chain.operations, values)


def _terse(chain: Chain, values: Sequence[int]) -> str:
    return terse(values)


def _other_digit(digit: int, rng: random.Random) -> int:
    return (digit + rng.randrange(1, 10)) % 10


def _cut(attempt: str, rng: random.Random) -> str:
    """The attempt up to some piece, its trailing blank stripped or not."""
    pieces = _PIECE.findall(attempt)
    text = "".join(pieces[: rng.randrange(1, len(pieces))])
    return text.rstrip() if rng.random() < 0.5 else text


def _garble(attempt: str, rng: random.Random) -> str:
    """Nothing at all, or the attempt with about a third of its pieces dropped or swapped for others."""
    if rng.random() < 0.5:
        return ""
    pieces = _PIECE.findall(attempt)
    kept = [rng.choice(pieces) if rng.random() < 0.2 else piece for piece in pieces if rng.random() >= 0.15]
    return "".join(kept)
