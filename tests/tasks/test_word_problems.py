from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest
from pydantic import ValidationError

from past_opsd.core.nouns import Problem, Response
from past_opsd.rollout.verifiers.boxed_math import BoxedMath
from past_opsd.rollout.verifiers.boxed_math import Options as Boxed
from past_opsd.tasks import word_problems
from past_opsd.tasks._phrases import NAMES, SCENES, Phrase
from past_opsd.tasks.word_problems import Options, build

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
COUNT = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
SETTINGS = [Options(train_problems=1200, eval_problems=200), Options(train_problems=600, largest=4, steps=[4, 2])]


@pytest.fixture(scope="module", params=SETTINGS, ids=["default", "tiny numbers"])
def problems(request: pytest.FixtureRequest) -> list[Problem]:
    task = build(request.param)
    return [*task.train(), *(p for part in task.evaluation().values() for p in part)]


def numbers(text: str) -> list[int]:
    return [2 if word == "twice" else int(word) for word in re.findall(r"\d+|twice", text)]


def test_the_worked_arithmetic_is_right_and_leads_to_the_answer(problems: list[Problem]):
    for problem in problems:
        steps = STEP.findall(problem.solution)
        assert len(steps) == problem.extra["steps"], problem
        for a, sign, b, result in steps:
            assert COUNT[sign](int(a), int(b)) == int(result) > 0, problem
        for (*_, result), (left, *_) in pairwise(steps):
            assert result == left, problem
        assert steps[-1][-1] == problem.answer
        assert problem.solution.endswith(f"The answer is \\boxed{{{problem.answer}}}.")


def test_the_working_uses_every_number_of_the_problem_once_and_no_other(problems: list[Problem]):
    for problem in problems:
        steps = STEP.findall(problem.solution)
        used = [int(steps[0][0])] + [int(b) for _, _, b, _ in steps]
        assert Counter(used) == Counter(numbers(problem.text)), problem


def test_the_words_say_the_operation(problems: list[Problem]):
    """A reading of each sentence by its cue words alone, apart from the phrase book."""
    cues = [
        ("/", r"equally among|equal piles|equal groups|groups of the same size|, \d+ in each|cost \d+ dollars each"),
        ("*", r"times as many|twice as many|in each|sells each|now pays|a week for"),
        ("+", r"\d+ more|and \d+ \w+(?: \w+)? (?:in the other|in store|at school)"),
        ("-", r"(?:gives|loses|sells|sends|spends|eats|throws away|uses up|buys|for|Soon|later) \d+ "),
    ]
    for problem in problems:
        sentences = [s for s in re.split(r"(?<=[.?]) ", problem.text) if not s.startswith("How many")]
        found = [next((sign for sign, cue in cues if re.search(cue, s)), "") for s in sentences]
        said = [sign for sign in found if sign]
        assert said == [sign for _, sign, _, _ in STEP.findall(problem.solution)], problem


def test_english_number_agrees(problems: list[Problem]):
    things = {noun.many: noun.one for scene in SCENES for noun in (*scene.things, *scene.boxes)} | {"tickets": "ticket"}
    ones = set(things.values())
    for problem in problems:
        for count, word in re.findall(r"(?<![=*/+-] )\b(\d+) (?:more )?([a-z]+)", problem.text + problem.solution):
            if word in things or word in ones:
                assert (word in ones) == (count == "1"), (count, word, problem)
        for count, word in re.findall(r"= (\d+) ([a-z]+)", problem.solution):
            assert (word in things) != (count == "1"), (count, word, problem)
        assert "{" not in problem.text
        assert not re.search(r"\b1 (?:more )?\w+ (?:get|come|join|leave|walk)\b", problem.text), problem
        assert re.fullmatch(r"(?:[A-Z][^.?]*[.?] ?)+", problem.text), problem
        assert problem.text.endswith("?")


def test_training_and_evaluation_share_no_problem_even_with_names_and_things_changed():
    nouns = sorted({w for s in SCENES for n in (*s.things, *s.boxes) for w in (n.one, n.many)}, key=len, reverse=True)
    holders = [h for s in SCENES for h in s.holders]
    words = re.compile(rf"\b(?:{'|'.join(map(re.escape, [*nouns, *NAMES, *holders]))})\b", re.IGNORECASE)

    def anonymous(problem: Problem) -> str:
        return re.sub(r"\b(?:Then|Later|After that,) ", "", words.sub("_", problem.text))

    train = {anonymous(p) for p in build(Options(train_problems=3000, seed=1)).train()}
    held_out = [anonymous(p) for s in build(Options(eval_problems=500, seed=2)).evaluation().values() for p in s]
    assert not train & set(held_out)
    same_side = {anonymous(p) for p in build(Options(train_problems=3000, seed=3)).train()}
    assert train & same_side  # the comparison can find a common problem


def test_repeats_to_the_letter_and_grows_from_the_front():
    small, large = build(Options(train_problems=30)), build(Options(train_problems=90))
    assert small.train() == large.train()[:30]
    assert small == build(Options(train_problems=30))
    assert len({small.identity, large.identity, build(Options(train_problems=30, seed=1)).identity}) == 3
    for other in (Options(train_problems=30, largest=19), Options(train_problems=30, seed=1)):
        assert not {p.text for p in build(other).train()} & {p.text for p in small.train()}


def test_sets_are_named_by_their_steps_varied_and_without_repeats(problems: list[Problem]):
    task = build(Options(steps=[2, 5], eval_problems=7))
    assert {name: len(part) for name, part in task.evaluation().items()} == {"2-step": 7, "5-step": 7}
    assert [p.extra["steps"] for p in task.train()[:4]] == [2, 5, 2, 5]
    assert len({p.text for p in problems}) == len(problems) == len({p.id for p in problems})
    assert {p.extra["scene"] for p in problems} == {scene.name for scene in SCENES}
    phrases = [p for s in SCENES for p in (*s.gains, *s.losses, *s.times, *s.shares, *s.groups, *s.both, *s.end_sums)]
    assert len({p.said for p in phrases if isinstance(p, Phrase)}) >= 40
    assert max(max(numbers(p.text)) for p in build(Options(largest=5, train_problems=300)).train()) == 5


def test_the_verifier_accepts_every_worked_solution_and_no_other_number(problems: list[Problem]):
    with BoxedMath(Boxed()) as verifier:
        right = [(p, Response((), p.solution, (), True)) for p in problems]
        wrong = [(p, Response((), f"\\boxed{{{int(p.answer) + 1}}}", (), True)) for p in problems]
        assert all(v.correct for v in verifier.verify(right))
        assert {v.reason for v in verifier.verify(wrong)} == {"wrong"}


@pytest.mark.parametrize("steps", [[], [0], [2, 2], [9]], ids=["none", "zero", "twice", "many"])
def test_impossible_steps_are_refused(steps: list[int]):
    with pytest.raises(ValidationError, match="different numbers between 1 and 8"):
        Options(steps=steps)


def test_every_option_is_explained():
    assert all(info.description for info in word_problems.Options.model_fields.values())
