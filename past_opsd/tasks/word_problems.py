r"""Generated word problems in the manner of grade-school sets: a short story, a question, a worked solution.

    problem     Ana has 12 apples. Ben gives Ana 5 more apples. How many apples does Ana have now?
    solution    Ana has 12 apples. With the gift from Ben, Ana has 12 + 5 = 17 apples. The answer is \boxed{17}.

A problem of n steps takes n operations. Whether a problem is held out follows from a hash of its sentences and numbers
without names and things, so no evaluation problem is a training problem with another name in it, for any seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import Field, field_validator

from past_opsd.core.config import Section
from past_opsd.core.nouns import Problem, derive_seed
from past_opsd.tasks import Problems
from past_opsd.tasks._phrases import NAMES, SCENES, Noun, Phrase, Scene

_DOLLAR, _TICKET = Noun("dollar", "dollars"), Noun("ticket", "tickets")
_CONNECTORS = ("", "", "Then ", "Later ", "After that, ")
_SMALL = 9  # the largest factor and divisor


class Options(Section):
    """Settings of the generated word problems."""

    train_problems: int = Field(
        default=600, ge=1, le=100_000, description="training problems, the numbers of steps in turn"
    )
    eval_problems: int = Field(default=40, ge=1, le=10_000, description="held-out problems per number of steps")
    seed: int = Field(default=0, ge=0, description="which problems are drawn on each side of the fixed split")
    steps: list[int] = Field(default=[1, 2, 3], description="numbers of operations; each is an evaluation set")
    largest: int = Field(default=20, ge=4, le=1000, description="largest number written in a problem")

    @field_validator("steps")
    @classmethod
    def _possible(cls, steps: list[int]) -> list[int]:
        if not steps or len(set(steps)) != len(steps) or not all(1 <= n <= 8 for n in steps):
            raise ValueError(f"steps {steps} must be different numbers between 1 and 8")
        return steps


def build(options: Options) -> Problems:
    """Draw the problems; a larger set of one seed begins with the smaller one."""
    streams = {steps: _problems(options, steps, held_out=False) for steps in options.steps}
    train = tuple(next(streams[options.steps[i % len(options.steps)]]) for i in range(options.train_problems))
    evaluation: dict[str, tuple[Problem, ...]] = {}
    for steps in options.steps:
        stream = _problems(options, steps, held_out=True)
        evaluation[f"{steps}-step"] = tuple(next(stream) for _ in range(options.eval_problems))
    content = "\n".join(f"{p.id} {p.text} {p.solution}" for part in (train, *evaluation.values()) for p in part)
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    settings = ", ".join(f"{name}={options.__dict__[name]}" for name in Options.model_fields)
    return Problems(f"word_problems({settings})#{digest}", train, evaluation)


def _problems(options: Options, steps: int, held_out: bool) -> Iterator[Problem]:
    """Distinct problems of one number of steps and one side of the split, without end."""
    side = "held-out" if held_out else "train"
    rng = random.Random(derive_seed(options.seed, "word_problems", steps, options.largest, side))
    seen: set[str] = set()
    while True:
        story = _Story(rng, rng.choice(SCENES), options.largest)
        story.tell(steps)
        text = " ".join(story.said)
        if story.held_out == held_out and text not in seen:
            seen.add(text)
            solution = f"{' '.join(story.worked)} The answer is \\boxed{{{story.value}}}."
            name = f"{steps}-step:{side}:{len(seen)}"
            yield Problem(name, text, solution, str(story.value), {"steps": steps, "scene": story.scene.name})


@dataclass
class _Story:
    """One problem as it is being told; `value` is how many things there are by now."""

    rng: random.Random
    scene: Scene
    largest: int
    value: int = 0
    said: list[str] = field(default_factory=list[str])
    worked: list[str] = field(default_factory=list[str])
    skeleton: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        rng, scene = self.rng, self.scene
        names = rng.sample(NAMES, 2)
        self.who, self.friend = rng.choice(scene.holders) if scene.holders else names[0], names[1]
        self.thing, self.box = rng.choice(scene.things), rng.choice(scene.boxes)

    @property
    def held_out(self) -> bool:
        """A fifth of all stories, whoever and whatever they are about."""
        digest = hashlib.blake2b("\n".join(self.skeleton).encode(), digest_size=8).hexdigest()
        return int(digest, 16) % 5 == 0

    def tell(self, steps: int) -> None:
        """The opening, what happens, the question: `steps` operations in all."""
        opened = self._open(self.rng.random() < 0.4)
        asked = steps - opened > 0 and self.rng.random() < 0.4
        for _ in range(steps - opened - asked):
            self._happen()
        if asked:
            self._ask()
        else:
            question = self.rng.choice(self.scene.question)
            self.skeleton.append(question)
            self.said.append(self._fill(question, 0))

    def _open(self, calculated: bool) -> int:
        """How many there are at first; the number of operations that took."""
        rng, scene = self.rng, self.scene
        if not calculated:
            self.value = rng.randint(2, self.largest)
            sentence = rng.choice(scene.plain)
            self.skeleton.append(f"{sentence} {self.value}")
            self.said.append(self._fill(sentence, self.value))
            self.worked.append(self.said[-1])
        elif rng.random() < 0.5:
            factor, each = rng.randint(2, min(_SMALL, self.largest)), rng.randint(2, self.largest)
            self._step(rng.choice(scene.groups), f"{factor} * {each}", factor * each, count=each, k=factor)
        else:
            first, second = rng.randint(1, self.largest), rng.randint(1, self.largest)
            self.value = first
            self._step(rng.choice(scene.both), f"{first} + {second}", first + second, count=second, k=first)
        return int(calculated)

    def _happen(self) -> None:
        """One event that a story can go on with."""
        rng, scene, value = self.rng, self.scene, self.value
        limit = self.largest**2
        kinds = ["gain"] * (value < limit) * 3 + ["loss"] * (value > 1) * 3
        kinds += ["times"] * (2 * value <= limit) + ["share"] * bool(self._divisors())
        kind = rng.choice(kinds)
        if kind == "gain":
            n = rng.randint(1, min(self.largest, limit - value))
            self._step(rng.choice(scene.gains), f"{value} + {n}", value + n, count=n)
        elif kind == "loss":
            n = rng.randint(1, min(self.largest, value - 1))
            self._step(rng.choice(scene.losses), f"{value} - {n}", value - n, count=n)
        elif kind == "times":
            k = rng.randint(2, min(_SMALL, self.largest, limit // value))
            self._step(rng.choice(scene.times), f"{value} * {k}", value * k, k=k)
        else:
            k = rng.choice(self._divisors())
            self._step(rng.choice(scene.shares), f"{value} / {k}", value // k, k=k)

    def _ask(self) -> None:
        """A question that takes one more operation."""
        rng, scene, value = self.rng, self.scene, self.value
        kind = rng.choice(["sum"] + ["product"] * (value > 1) + ["quotient"] * bool(self._divisors()))
        if kind == "sum":
            n = rng.randint(1, self.largest)
            self._step(rng.choice(scene.end_sums), f"{value} + {n}", value + n, count=n)
            return
        phrase, unit = rng.choice(scene.end_products if kind == "product" else scene.end_quotients)
        counted = {"": self.thing, "box": self.box, "dollar": _DOLLAR, "ticket": _TICKET}[unit]
        if kind == "product":
            k = rng.randint(2, min(_SMALL, self.largest))
            self._step(phrase, f"{value} * {k}", value * k, k=k, counted=counted)
        else:
            k = rng.choice(self._divisors())
            self._step(phrase, f"{value} / {k}", value // k, k=k, counted=counted)

    def _divisors(self) -> list[int]:
        return [k for k in range(2, min(_SMALL, self.largest) + 1) if self.value % k == 0]

    def _step(
        self, phrase: Phrase, sum_: str, result: int, *, count: int = 0, k: int = 0, counted: Noun | None = None
    ) -> None:
        work = f"{sum_} = {result} {(counted or self.thing).of(result)}"
        sentence = phrase.said
        if self.said and sentence.startswith(("{Who}", "{friend}")) and not sentence.endswith("?"):
            connector = self.rng.choice(_CONNECTORS)
            sentence = connector + (sentence.replace("{Who}", "{who}", 1) if connector else sentence)
        self.skeleton.append(f"{phrase.said} {count} {k} {self.value}")
        self.said.append(self._fill(sentence, count, k))
        self.worked.append(self._fill(phrase.worked, count, k, work))
        self.value = result

    def _fill(self, sentence: str, count: int, k: int = 0, work: str = "") -> str:
        noun = self.thing.of(count)
        return sentence.format(
            who=self.who,
            Who=self.who[0].upper() + self.who[1:],
            friend=self.friend,
            count=f"{count} {noun}",
            more=f"{count} more {noun}",
            first=f"{k} {self.thing.of(k)}",
            s="s" if count == 1 else "",
            k=k,
            times="twice" if k == 2 else f"{k} times",
            thing=self.thing.one,
            things=self.thing.many,
            box=self.box.one,
            boxes=self.box.many,
            work=work,
        )
