"""What each role reads: the only place where privilege is written into a prompt.

Every prompt is one user message, after the recipe's examples, rendered by the tokenizer's own chat template, ending
where the assistant's turn begins, as token ids. The outcome R enters none of them: `hindsight` sees a problem and a
text, never a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from past_opsd.core.config import PromptsSection
from past_opsd.core.lazy import Lazy
from past_opsd.core.nouns import PastError, Problem, Tokens

if TYPE_CHECKING:
    import jinja2
else:
    jinja2 = Lazy("jinja2")

FIELDS = ("problem", "student_output", "reference_solution", "hint")
_FIELD = re.compile(r"\{(" + "|".join(FIELDS) + r")\}")
_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)

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


def fill(template: str, fields: Mapping[str, str]) -> str:
    """Put the fields into the template in one pass; braces elsewhere (`\\boxed{}`) and in the fields stay."""
    return _FIELD.sub(lambda match: fields[match[1]], template)


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
        """(X, Z): Vanilla OPSD's teacher."""
        kwargs = self._section.teacher_kwargs
        return self._render("reference", kwargs, problem=problem.text, reference_solution=problem.solution)

    def hindsight(self, problem: Problem, attempt: str) -> Tokens:
        """(X, Y, Z), [eq:past-privilege]: PAST's teacher reads the complete student response as text."""
        attempt = self._attempt(attempt)
        fields = {"problem": problem.text, "student_output": attempt, "reference_solution": problem.solution}
        return self._render("hindsight", self._section.teacher_kwargs, **fields)

    def removed(self, problem: Problem) -> Tokens:
        """The hindsight message with the attempt taken out."""
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
        message = [*self._section.turns, {"role": "user", "content": content}]
        try:
            text = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **kwargs)
        except jinja2.TemplateError as error:
            raise PastError(f"the tokenizer's chat template cannot render prompts.{role}: {error}") from None
        return self.encode(text)
