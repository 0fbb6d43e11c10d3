"""What a model's chat template does with our prompts, told at the start.

`check` renders small messages and reads the result: an error means the run cannot be what the recipe says, a note is
worth knowing. Nothing here is a matter of one model's name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from past_opsd.core.config import PromptsSection
from past_opsd.core.nouns import PastError, Tokens
from past_opsd.core.prompts import CLOSES, OPENS

# Words no template would write itself; the middle one sits where reasoning models' templates like to cut.
FIRST, SECOND, THIRD = "Zinnia-one", "Zinnia-two", "Zinnia-three"
SYSTEM, ANSWER = "Marigold-system", "Marigold-answer"
USER = f"{FIRST} <think>{SECOND}</think> {THIRD}"


@dataclass(frozen=True)
class Finding:
    """What was seen, what it means, and what to set."""

    level: Literal["error", "note"]
    code: str
    text: str


def require(tokenizer: Any, section: PromptsSection, stops: Collection[int] = ()) -> list[str]:
    """The notes; errors are raised together as one `PastError`."""
    findings = check(tokenizer, section, stops)
    errors = [f.text for f in findings if f.level == "error"]
    if errors:
        raise PastError("\n".join(errors))
    return [f.text for f in findings]


def check(tokenizer: Any, section: PromptsSection, stops: Collection[int] = ()) -> list[Finding]:
    """Everything to say about this tokenizer's template under the recipe's `chat_template_kwargs`.

    `stops` are the ids that end a response in the engine; without them only the tokenizer's own end is known.
    """
    if not tokenizer.chat_template:
        return [
            _error(
                "no_template",
                "the tokenizer has no chat template: use an instruction-tuned model, "
                "or put a chat_template.jinja into its folder",
            )
        ]
    roles = {
        "student": section.student_kwargs,
        "teacher": section.teacher_kwargs,
        "evaluation": section.evaluation_kwargs,
    }
    template = _Template(tokenizer)
    try:
        for kwargs in roles.values():
            template.prompt(kwargs)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
        return [_error("fails", f"the chat template cannot render one user message: {error}")]
    return [
        *_dropped(template, roles, section.strip_thinking),
        *_ends(template, section, stops),
        *_ignored(template, roles),
        *_openings(template, section),
        *_system(template, section.student_kwargs),
        *_dated(tokenizer, roles),
        *_beginning(template, section.student_kwargs),
        *_padding(tokenizer),
    ]


def _error(code: str, text: str) -> Finding:
    return Finding("error", code, text)


def _note(code: str, text: str) -> Finding:
    return Finding("note", code, text)


class _Template:
    """Messages to text and ids, the way prompts are made."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def render(self, messages: list[tuple[str, str]], kwargs: Mapping[str, Any], prompt: bool) -> str:
        plain = [{"role": role, "content": content} for role, content in messages]
        return self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt, **kwargs)

    def prompt(self, kwargs: Mapping[str, Any]) -> str:
        return self.render([("user", USER)], kwargs, prompt=True)

    def opening(self, kwargs: Mapping[str, Any]) -> str:
        """What stands between the user's words and the first sampled token."""
        return self.prompt(kwargs).rpartition(THIRD)[2]

    def encode(self, text: str) -> Tokens:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _dropped(template: _Template, roles: Mapping[str, Mapping[str, Any]], stripped: bool) -> Iterator[Finding]:
    for role, kwargs in roles.items():
        text = template.prompt(kwargs)
        if any(text.count(word) != 1 for word in (FIRST, THIRD)):
            yield _error(
                "drops_content",
                f"the chat template does not write the user message of the {role} once and in full; "
                "problems would not reach the model: use the model's own template",
            )
            return
    if not stripped and SECOND not in template.prompt(roles["teacher"]):
        yield _error(
            "drops_thinking",
            "the chat template cuts <think> blocks out of user messages, so the teacher would not read the student's "
            "whole attempt: set prompts.strip_thinking = true if that is meant, or change the template",
        )


def _ends(template: _Template, section: PromptsSection, stops: Collection[int]) -> Iterator[Finding]:
    tokenizer = template.tokenizer
    eos = tokenizer.eos_token_id
    if eos is None:
        yield _error(
            "no_eos",
            "the tokenizer names no end-of-sequence token, so no response could be taught to end: set eos_token in "
            "tokenizer_config.json to the token that ends the assistant's turn",
        )
        return
    try:
        text = template.render([("user", FIRST), ("assistant", ANSWER)], section.student_kwargs, prompt=False)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError):
        return  # a template for prompts alone says nothing about how a turn ends
    rest = template.encode(text.rpartition(ANSWER)[2].lstrip())
    if ANSWER not in text or not rest or rest[0] == eos:
        return
    end, name = rest[0], tokenizer.convert_ids_to_tokens(rest[0])
    if stops and end not in stops:
        yield _error(
            "never_ends",
            f"the chat template ends the assistant's turn with '{name}', but sampling stops only at "
            f"{_names(tokenizer, stops)}: set eos_token in tokenizer_config.json, or eos_token_id in "
            f"generation_config.json, to '{name}'",
        )
    else:
        yield _note(
            "other_eos",
            f"the chat template ends the assistant's turn with '{name}', the tokenizer's end-of-sequence token is "
            f"'{tokenizer.eos_token}': methods that train on given text (SFT, SD-Zero) will teach the latter; set "
            "eos_token in tokenizer_config.json if they should not",
        )


def _names(tokenizer: Any, ids: Collection[int]) -> str:
    return ", ".join(f"'{name}'" for name in tokenizer.convert_ids_to_tokens(sorted(ids)))


def _ignored(template: _Template, roles: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Template arguments that change nothing, each told once with the places that set it."""
    places: dict[str, list[str]] = {}
    for role, kwargs in roles.items():
        for key, value in kwargs.items():
            others = {k: v for k, v in kwargs.items() if k != key}
            versions = [others | {key: True}, others | {key: False}] if isinstance(value, bool) else [others, kwargs]
            if len({template.prompt(version) for version in versions}) == 1:
                places.setdefault(key, []).append(f"prompts.{role}_kwargs")
    for key, names in places.items():
        yield _note(
            "ignored",
            f"the chat template ignores {key}, which {', '.join(names)} set: the prompts are the same without it",
        )


def _openings(template: _Template, section: PromptsSection) -> Iterator[Finding]:
    student, teacher = section.student_kwargs, section.teacher_kwargs
    ours, theirs = template.opening(student), template.opening(teacher)
    inside = {role: text.rfind(OPENS) > text.rfind(CLOSES) for role, text in (("student", ours), ("teacher", theirs))}
    if len(set(inside.values())) > 1:
        role = "student" if inside["student"] else "teacher"
        yield _note(
            "inside",
            f"the {role}'s prompt ends inside a thinking block and the other's does not: no position of a response is "
            "supervised before that block is closed; set enable_thinking alike in prompts.student_kwargs and "
            "prompts.teacher_kwargs",
        )
        return
    asked = "enable_thinking" in student and "enable_thinking" in teacher
    if ours == theirs or (asked and ours == template.opening(teacher | student)):
        return
    yield _note(
        "openings",
        f"the student's prompt ends {ours[-40:]!r} and the teacher's {theirs[-40:]!r}: the two expect different first "
        "tokens of the same response; set the same prompts.student_kwargs and prompts.teacher_kwargs, or "
        "enable_thinking in both if the difference is meant",
    )


def _system(template: _Template, kwargs: Mapping[str, Any]) -> Iterator[Finding]:
    """A system message of the template's own: what stands where a given one would."""
    before = template.prompt(kwargs).partition(FIRST)[0]
    try:
        given = template.render([("system", SYSTEM), ("user", USER)], kwargs, prompt=True).partition(FIRST)[0]
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError):
        return  # it knows no system message, so it has none of its own
    head, found, tail = given.partition(SYSTEM)
    own = before[len(head) : len(before) - len(tail)]
    if found and own.strip() and before == head + own + tail:
        yield _note(
            "system",
            f"the chat template adds a system message of its own to every prompt, student's and teacher's: {own!r}; "
            "to do without it, change the template in the model's folder",
        )


def _dated(tokenizer: Any, roles: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    if "strftime_now" in str(tokenizer.chat_template) and not all("date_string" in kwargs for kwargs in roles.values()):
        yield _note(
            "dated",
            "the chat template writes today's date, so prompts change from day to day: set date_string in "
            "prompts.student_kwargs, teacher_kwargs and evaluation_kwargs if the template takes it",
        )


def _beginning(template: _Template, kwargs: Mapping[str, Any]) -> Iterator[Finding]:
    tokenizer = template.tokenizer
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    text = template.prompt(kwargs)
    ids = template.encode(text)
    if ids[:2] == (bos, bos):
        yield _error(
            "two_bos",
            f"prompts begin with '{tokenizer.bos_token}' twice, which the model has never seen: the chat template "
            "writes it and the tokenizer adds it again; take it out of one of them",
        )
    adds = tuple(tokenizer(FIRST)["input_ids"])[:1] == (bos,)
    if adds and ids[:1] != (bos,):
        yield _note(
            "no_bos",
            f"the tokenizer begins text with '{tokenizer.bos_token}', the chat template does not write it, so prompts "
            "lack it: put {{ bos_token }} at the start of the template if the model was trained with it",
        )


def _padding(tokenizer: Any) -> Iterator[Finding]:
    if tokenizer.pad_token_id is None:
        yield _note(
            "no_pad",
            "the tokenizer has no padding token: nothing is missing here, since padding is id 0 under a mask that no "
            "weight reads; an outside engine may want pad_token in tokenizer_config.json, usually the end-of-sequence "
            "token",
        )
