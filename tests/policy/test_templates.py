from __future__ import annotations

from typing import Any

import pytest
from chatml import OPEN, OPENED, THINK, TURNS, tokenizer

from past_opsd.core import config
from past_opsd.core.config import PromptsSection
from past_opsd.core.nouns import PastError
from past_opsd.policy.model import load_tokenizer
from past_opsd.policy.templates import Finding, check, require

FORGETS = "m.content.split('<think>')[0] + m.content.split('</think>')[-1]"
DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"


def section(**kwargs: Any) -> PromptsSection:
    return config.load("embedded/past").prompts.model_copy(update=kwargs)


def codes(findings: list[Finding]) -> list[str]:
    return [f"{f.level} {f.code}" for f in findings]


@pytest.mark.parametrize("name", [n for n in config.shipped() if n.startswith(("embedded/", "paper/"))])
def test_shipped_recipes_have_nothing_to_hear(name: str):
    recipe = config.load(name)
    shipped = recipe.model.path == "embedded"
    model = load_tokenizer(recipe.model) if shipped else tokenizer(TURNS + THINK)
    assert check(model, recipe.prompts) == []


@pytest.mark.parametrize(
    ("model", "keys", "expected"),
    [
        (tokenizer(None), {}, ["error no_template"]),
        (tokenizer(""), {}, ["error no_template"]),
        (tokenizer("{{ raise_exception('only tools') }}"), {}, ["error fails"]),
        (tokenizer(TURNS + OPEN), {}, []),
        (tokenizer(TURNS.replace("m.content", "m.content[:5]") + OPEN), {}, ["error drops_content"]),
        (tokenizer(TURNS.replace("m.content", "m.content * 2") + OPEN), {}, ["error drops_content"]),
        (
            tokenizer(TURNS.replace("m.content", FORGETS) + OPEN),
            {},
            ["error drops_thinking"],
        ),
        (tokenizer(TURNS.replace("m.content", FORGETS) + OPEN), {"strip_thinking": True}, []),
        (tokenizer(TURNS + OPEN, eos_token=None), {}, ["error no_eos"]),
        (tokenizer(TURNS + OPEN, eos_token="<|endoftext|>"), {}, ["note other_eos"]),
        (tokenizer(TURNS + OPEN, pad_token=None), {}, ["note no_pad"]),
        (tokenizer(TURNS + OPEN), {"student_kwargs": {"enable_thinking": False}}, ["note ignored"]),
        (tokenizer(TURNS + OPEN), {"teacher_kwargs": {"tone": "mild"}}, ["note ignored"]),
        (tokenizer("{{ tone }}" + TURNS + OPEN), {"teacher_kwargs": {"tone": "mild"}}, []),
        (tokenizer(TURNS + THINK), {"student_kwargs": {"enable_thinking": False}}, ["note openings"]),
        (
            tokenizer(TURNS + THINK),
            {"student_kwargs": {"enable_thinking": False}, "teacher_kwargs": {"enable_thinking": True}},
            [],
        ),
        (
            tokenizer(TURNS + OPENED),
            {"student_kwargs": {"enable_thinking": False}, "teacher_kwargs": {"enable_thinking": True}},
            ["note inside"],
        ),
        (tokenizer(TURNS + OPEN + "{{ hint }}"), {"teacher_kwargs": {"hint": "Well, "}}, ["note openings"]),
        (tokenizer(DEFAULT + TURNS + OPEN), {}, ["note system"]),
        (tokenizer("{{ strftime_now('%Y') }}" + TURNS + OPEN), {}, ["note dated"]),
        (tokenizer("{{ bos_token }}" + TURNS + OPEN, bos_token="<|bos|>", adds_bos=True), {}, []),
        (tokenizer("{{ bos_token * 2 }}" + TURNS + OPEN, bos_token="<|bos|>"), {}, ["error two_bos"]),
        (tokenizer(TURNS + OPEN, bos_token="<|bos|>", adds_bos=True), {}, ["note no_bos"]),
        (tokenizer(TURNS + OPEN, bos_token="<|im_start|>"), {}, []),
    ],
    ids=[
        "none",
        "empty",
        "fails",
        "plain",
        "cut",
        "twice",
        "cut-thinking",
        "cut-thinking-as-asked",
        "no-eos",
        "other-eos",
        "no-pad",
        "ignores-thinking",
        "ignores-text",
        "reads-text",
        "opens-differently",
        "opens-differently-as-asked",
        "opens-thinking",
        "opens-otherwise",
        "own-system",
        "dated",
        "bos",
        "two-bos",
        "no-bos",
        "bos-in-turn",
    ],
)
def test_each_finding_has_its_template(model: Any, keys: dict[str, Any], expected: list[str]):
    assert codes(check(model, section(**keys))) == expected


def test_a_turn_that_sampling_never_ends_is_an_error():
    model = tokenizer(TURNS + OPEN, eos_token="<|endoftext|>")
    end, other = model.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert codes(check(model, section(), {other})) == ["error never_ends"]
    assert codes(check(model, section(), {other, end})) == ["note other_eos"]


def test_an_ignored_argument_is_told_once_with_every_place():
    kwargs = {f"{role}_kwargs": {"enable_thinking": role == "teacher"} for role in ("student", "teacher", "evaluation")}
    (finding,) = check(tokenizer(TURNS + OPEN), section(**kwargs))
    assert "prompts.student_kwargs, prompts.teacher_kwargs, prompts.evaluation_kwargs" in finding.text


def test_the_own_system_message_is_quoted():
    (finding,) = check(tokenizer(DEFAULT + TURNS + OPEN), section())
    assert "'You are kind.'" in finding.text


def test_errors_are_raised_together_and_notes_returned():
    (note,) = require(tokenizer(TURNS + OPEN, pad_token=None), section())
    assert "no padding token" in note
    with pytest.raises(PastError) as caught:
        require(tokenizer(TURNS.replace("m.content", "m.role") + OPEN, eos_token=None), section())
    assert [line.split(" ")[1] for line in str(caught.value).splitlines()] == ["chat", "tokenizer"]
