"""What each role reads: the only place where privilege is written into a prompt.

Every prompt is one user message, after the recipe's examples for that role, rendered by the tokenizer's own chat
template, ending where the assistant's turn begins, as token ids. The outcome R enters none of them: `hindsight` sees a
problem and a text, never a verdict.

Two prompts may open the turn differently: one template writes an empty thinking block for the student, who is not to
think, and none for the teacher, who is. `aligned_from` says from which token on both read the same kind of text.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, Protocol

from past_opsd.core.config import PromptsSection
from past_opsd.core.lazy import Lazy
from past_opsd.core.nouns import PastError, Problem, Tokens

if TYPE_CHECKING:
    import jinja2
else:
    jinja2 = Lazy("jinja2")

FIELDS = ("problem", "student_output", "reference_solution", "hint")
_FIELD = re.compile(r"\{(" + "|".join(FIELDS) + r")\}")
OPENS, CLOSES = "<think>", "</think>"
_THINKING = re.compile(f"{OPENS}.*?({CLOSES}|\\Z)", re.DOTALL)
_MARK = "Zinnia"  # a word that no template writes itself

Place = Literal["before", "inside", "after"]
"""Where a view stands in the assistant's turn: where thinking may begin, inside of it, in the answer."""

# Which fields a role may name. The student and the evaluation see X alone.
ALLOWED: Mapping[str, frozenset[str]] = {
    "student": frozenset({"problem"}),
    "evaluation": frozenset({"problem"}),
    "reference": frozenset({"problem", "reference_solution"}),
    "hindsight": frozenset({"problem", "student_output", "reference_solution"}),
    "removed": frozenset({"problem", "reference_solution"}),
    "rephrase": frozenset({"problem", "student_output"}),
    "hint": frozenset({"problem", "hint"}),
    "write_hint": frozenset({"problem", "reference_solution"}),
}
# Templates of one baseline alone; a recipe without it leaves them empty.
OPTIONAL = ("rephrase", "hint", "write_hint")


class Tokenizer(Protocol):
    """What is needed of a tokenizer here."""

    chat_template: Any
    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Any) -> Any: ...


def fill(template: str, fields: Mapping[str, str]) -> str:
    """Put the fields into the template in one pass; braces elsewhere (`\\boxed{}`) and in the fields stay."""
    return _FIELD.sub(lambda match: fields[match[1]], template)


def turns(section: PromptsSection, role: str) -> list[dict[str, str]]:
    """The examples that a role reads, as messages of a chat."""
    found: list[dict[str, str]] = []
    for number, example in enumerate(section.examples, 1):
        if example.roles is not None and role not in example.roles:
            continue
        fields: dict[str, str | None] = {name: example.__dict__[name] for name in ALLOWED[role]}
        missing = [name for name, value in fields.items() if value is None]
        if example.user is None and missing:
            raise PastError(
                f"example {number} of prompts.examples has no '{min(missing)}', which prompts.{role} shows; give it, "
                "or name in its 'roles' those that read it"
            )
        given = {name: value for name, value in fields.items() if value is not None}
        asked = fill(section.__dict__[role], given) if example.user is None else example.user
        found += [{"role": "user", "content": asked}, {"role": "assistant", "content": example.assistant}]
    return found


class Prompts:
    """The recipe's templates bound to a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, section: PromptsSection):
        for role, allowed in ALLOWED.items():
            template = section.__dict__[role]
            if role in OPTIONAL and not template:
                continue
            used = set(_FIELD.findall(template))
            if used - allowed:
                raise PastError(f"prompts.{role} names {{{min(used - allowed)}}}, which this role must not see")
            if allowed - used:
                raise PastError(f"prompts.{role} must contain {{{min(allowed - used)}}}")
        if not tokenizer.chat_template:
            raise PastError(
                "the tokenizer has no chat template; use an instruction-tuned model or set one in its folder"
            )
        self._tokenizer = tokenizer
        self._section = section
        self._examples = {role: turns(section, role) for role in ALLOWED if section.__dict__[role]}
        self._rendered: dict[tuple[str, str], Tokens] | None = None

    @contextmanager
    def once(self) -> Generator[None]:
        """Within this, no prompt is rendered twice; what was rendered is forgotten at its end."""
        self._rendered = {}
        try:
            yield
        finally:
            self._rendered = None

    def student(self, problem: Problem) -> Tokens:
        """X for the student."""
        return self._render("student", self._section.student_kwargs, problem=problem.text)

    def evaluation(self, problem: Problem) -> Tokens:
        """X in evaluation."""
        return self._render("evaluation", self._section.evaluation_kwargs, problem=problem.text)

    def reference(self, problem: Problem) -> Tokens:
        """(X, Z): Vanilla OPSD's teacher, and PAST's where it reads no trajectory."""
        kwargs = self._section.teacher_kwargs
        return self._render("reference", kwargs, problem=problem.text, reference_solution=problem.solution)

    def hindsight(self, problem: Problem, attempt: str) -> Tokens:
        """(X, Y, Z), [eq:past-privilege]: PAST's teacher reads the complete student response as text."""
        attempt = self._attempt(attempt)
        fields = {"problem": problem.text, "student_output": attempt, "reference_solution": problem.solution}
        return self._render("hindsight", self._section.teacher_kwargs, **fields)

    def removed(self, problem: Problem) -> Tokens:
        """The hindsight message with the attempt taken out: a perturbation for `past probe`; nobody trains on it."""
        kwargs = self._section.teacher_kwargs
        return self._render("removed", kwargs, problem=problem.text, reference_solution=problem.solution)

    def rephrase(self, problem: Problem, attempt: str) -> Tokens:
        """(X, Y): H2SD's teacher reads a verified response and is asked to rephrase it."""
        fields = {"problem": problem.text, "student_output": self._attempt(attempt)}
        return self._render("rephrase", self._section.teacher_kwargs, **fields)

    def hint(self, problem: Problem, hint: str) -> Tokens:
        """(X, hint): H2SD's teacher on a failure."""
        return self._render("hint", self._section.teacher_kwargs, problem=problem.text, hint=hint)

    def write_hint(self, problem: Problem) -> Tokens:
        """(X, Z): the request for a hint, answered once, offline."""
        kwargs = self._section.teacher_kwargs
        return self._render("write_hint", kwargs, problem=problem.text, reference_solution=problem.solution)

    def encode(self, text: str) -> Tokens:
        """A text's ids, nothing added."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def eos(self) -> int:
        """The id that ends a response."""
        return self._tokenizer.eos_token_id

    def completion(self, text: str) -> Tokens:
        """A given response as a policy would have to write it: its ids and the end."""
        return (*self.encode(text), self.eos)

    def aligned_from(self, one: Tokens, other: Tokens, tokens: Tokens) -> int:
        """The first of a response's tokens that both prompts' views predict from the same place; their number if none.

        Where a view stands follows from its prompt's end and the tokens so far, and these are the same for both: two
        views that stand at the same place once do so from there on.
        """
        if one == other or not self._thinks:
            return 0
        pairs = zip(self._places(one, tokens), self._places(other, tokens), strict=True)
        return next((t for t, (mine, theirs) in enumerate(pairs) if mine == theirs), len(tokens))

    def place(self, prompt: Tokens) -> Place:
        """Where a view stands before the first token of a response."""
        return next(self._places(prompt, (self.eos,)))

    def _places(self, prompt: Tokens, tokens: Tokens) -> Iterator[Place]:
        """Where a view stands before each of the tokens; a first word that opens no block begins the answer."""
        tags: list[tuple[Tokens, Place]] = [(self.encode(OPENS), "inside"), (self.encode(CLOSES), "after")]
        written = prompt[self._begun(prompt) :]
        place: Place = "before"
        turn = written + tokens
        for i, token in enumerate(turn):
            if i >= len(written):
                yield place
            reached: list[Place] = [where for tag, where in tags if turn[max(0, i + 1 - len(tag)) : i + 1] == tag]
            if reached:
                place = reached[0]
            elif place == "before" and self._tokenizer.decode([token]).strip():
                place = "after"

    def _begun(self, prompt: Tokens) -> int:
        """Where the assistant's turn begins: after the last place where every role's prompt opens it."""
        n = len(self._header)
        starts = range(len(prompt) - n, -1, -1) if n else ()
        return next((i + n for i in starts if prompt[i : i + n] == self._header), len(prompt))

    @cached_property
    def _thinks(self) -> bool:
        return OPENS in str(self._tokenizer.chat_template)

    @cached_property
    def _header(self) -> Tokens:
        """What stands between the user's words and the assistant's in every role's prompt, no thinking in it."""
        section = self._section
        roles = {"student": section.student_kwargs, "reference": section.teacher_kwargs}
        roles["evaluation"] = section.evaluation_kwargs
        rendered = [self._text(role, kwargs, _MARK).rpartition(_MARK)[2] for role, kwargs in roles.items()]
        columns = zip(*(text.partition(OPENS)[0] for text in rendered), strict=False)
        return self.encode("".join(c[0] for c in takewhile(lambda c: len(set(c)) == 1, columns)).rstrip())

    def _attempt(self, text: str) -> str:
        return _THINKING.sub("", text).strip() if self._section.strip_thinking else text

    def _render(self, role: str, kwargs: Mapping[str, Any], **fields: str) -> Tokens:
        template = self._section.__dict__[role]
        if not template:
            raise PastError(f"prompts.{role} is empty, and this method needs it")
        content = fill(template, fields)
        if self._rendered is None:
            return self._write(role, kwargs, content)
        if (role, content) not in self._rendered:
            self._rendered[role, content] = self._write(role, kwargs, content)
        return self._rendered[role, content]

    def _write(self, role: str, kwargs: Mapping[str, Any], content: str) -> Tokens:
        return self.encode(self._text(role, kwargs, content))

    def _text(self, role: str, kwargs: Mapping[str, Any], content: str) -> str:
        message = [*self._examples[role], {"role": "user", "content": content}]
        try:
            return self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **kwargs)
        except jinja2.TemplateError as error:
            raise PastError(f"the tokenizer's chat template cannot render prompts.{role}: {error}") from None
