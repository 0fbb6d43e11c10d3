from __future__ import annotations

import re
from typing import get_args

import pytest

from past_opsd.core import config
from past_opsd.core.nouns import PastError, Problem, Response
from past_opsd.rollout.verifiers.exact import Exact
from past_opsd.rollout.verifiers.exact import Options as Exactly
from past_opsd.tasks.lookups import DAYS, MONTHS, SEEN, UNSEEN, Family, Options, build, style

FAMILIES = list(get_args(Family))


@pytest.fixture(scope="module")
def task():
    return build(Options(families=FAMILIES, train_problems=200, eval_problems=15, unseen_problems=30))


def looked_up(text: str) -> str:
    """The answer by another way: from the question alone."""
    names = re.findall(r"\w+", text.partition(":")[2])
    if " letters " in text:
        return "".join(name[0 if "first" in text else -1] for name in names)
    if "word of this list" in text:
        return names[{"first": 0, "second": 1, "third": 2}[text.split()[3]]]
    count, way, start = re.search(r"comes (\d+) \w+ (after|before) (\w+)", text).groups()  # pyright: ignore
    circle = DAYS if start in DAYS else MONTHS
    return circle[(circle.index(start) + int(count) * (1 if way == "after" else -1)) % len(circle)]


def test_worked_solutions_are_right_and_verify(task):
    verifier = Exact(Exactly(after="Answer:"))
    problems: list[Problem] = [*task.train(), *(p for part in task.evaluation().values() for p in part)]
    for problem in problems:
        assert looked_up(problem.text) == problem.answer
        assert style(problem.solution) == "worked"
    verdicts = verifier.verify([(p, Response((), p.solution, (), True)) for p in problems])
    assert all(v.correct for v in verdicts)


def test_no_question_is_on_both_sides_for_any_seed(task):
    settings = [Options(families=FAMILIES, train_problems=200, eval_problems=1, seed=seed) for seed in (0, 1, 2)]
    trained = {p.text for options in settings for p in build(options).train()}
    for name, held_out in task.evaluation().items():
        texts = {p.text for p in held_out}
        assert len(texts) == len(held_out)
        assert not texts & trained, name


def test_unseen_sets_have_words_of_their_own(task):
    assert not set(SEEN) & set(UNSEEN)
    known = {*SEEN, *DAYS}
    assert not {word for p in task.train() for word in re.findall(r"\w+", p.text)} & {*UNSEEN, *MONTHS}
    for name, held_out in task.evaluation().items():
        for problem in held_out:
            asked = re.findall(r"\w+", problem.text.partition(":")[2]) or problem.text.rstrip("?").split()[-1:]
            assert all((word in known) != name.endswith("-unseen") for word in asked), (name, problem)


def test_a_seed_decides_and_a_larger_set_begins_with_the_smaller():
    one, two = build(Options(train_problems=20)), build(Options(train_problems=40))
    assert [p.text for p in one.train()] == [p.text for p in two.train()[:20]]
    other = build(Options(train_problems=20, seed=1))
    assert [p.text for p in other.train()] != [p.text for p in one.train()]
    assert other.identity != one.identity != two.identity


def test_too_few_questions_are_told():
    with pytest.raises(PastError, match=r"'weekdays' has about \d+ different questions for 'train'; lower task.train"):
        build(Options(families=["weekdays"], train_problems=2000))


def test_a_family_twice_is_refused():
    with pytest.raises(ValueError, match="must be different"):
        Options(families=["weekdays", "weekdays"])


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("lemon starts with l. Answer: l", "worked"),
        ("Answer: l", "bare"),
        ("l", "bare"),
        ("The attempt above is wrong. Answer: l", "comment"),
        ("lemon starts with l", "other"),
        ("Answer: l and b", "other"),
    ],
)
def test_styles(text: str, label: str):
    assert style(text) == label


@pytest.mark.parametrize("name", ["smollm2/past", "smollm2_nth/past"])
def test_examples_of_the_recipes_are_no_questions_of_the_task(name: str):
    recipe = config.load(name)
    words = {w for e in recipe.prompts.examples for w in re.findall(r"\w+", (e.problem or "").partition(":")[2])}
    assert words
    assert not words & {*SEEN, *UNSEEN}
