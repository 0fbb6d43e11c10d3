r"""The final answer of a response: the last closed, non-empty `\boxed{}` after the thinking part.

Pure Python and linear in the length of the text, so it is safe to run on anything a model writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from past_opsd.rollout.verifiers import Reason

# One token is a whole run of backslashes, with the box command when one follows, or a brace. The parity of a run
# says whether the brace after it is escaped.
_TOKEN = re.compile(r"\\+(?P<box>(?:boxed|fbox)\s*+(?:\{|(?P<bare>[+-]?\d+(?:\.\d+)?)(?![\w{^])))?|[{}]")
# What may stand between two boxes that together are one answer of several parts: a comma, a conjunction (after one
# word or a quoted remark), and the name of what comes next.
_JOINT = re.compile(
    r"(?:\s*+[A-Za-z]++\s++(?=(?:and|or)\b))?+"
    r"(?:\s|[,;$~]|\\[,;!() ]|\\q?quad|\\text\{(?:[^{}]*\b(?:and|or)\b)?[\s,]*\}|and\b|or\b)*+"
    r"(?:[A-Za-z](?:_\{?\w\}?)?\s*=\s*\$?\s*)?+"
)
_SPACE = re.compile(r"\s*+")
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Found:
    """The boxes that make up the final answer, or why there are none (`failure`).

    `parts` holds the last box and those joined to it by nothing but a comma or a conjunction, in order.
    """

    parts: tuple[str, ...]
    failure: Reason | None = None

    @property
    def last(self) -> str:
        return self.parts[-1]


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`; None when thinking was opened and never closed."""
    _, _, answer = text.rpartition(_CLOSE)
    return None if _OPEN in answer else answer


def find_answer(text: str, *, strip_thinking: bool = True) -> Found:
    """The final answer of a whole response."""
    answer = after_thinking(text) if strip_thinking else text
    return Found((), Reason.NO_BOX) if answer is None else find_boxes(answer)


def find_boxes(text: str) -> Found:
    """The box that closes last and is not blank, with the boxes joined to it."""
    spans, unclosed, blank = _closed_boxes(text)
    if not spans:
        failure = Reason.EMPTY_BOX if blank else Reason.UNCLOSED_BOX if unclosed else Reason.NO_BOX
        return Found((), failure)
    first = len(spans) - 1
    while first > 0 and _joined(text, spans[first - 1], spans[first]):
        first -= 1
    return Found(tuple(text[start:stop] for _, start, stop, _ in spans[first:]))


_Span = tuple[int, int, int, int]  # command, content start, content stop, end of the box


def _closed_boxes(text: str) -> tuple[list[_Span], bool, bool]:
    """Spans of the closed non-blank boxes in the order they close (so an outer one after its inner ones); is one
    unclosed; is one blank."""
    spans: list[_Span] = []
    blank = False
    stack: list[tuple[int, int] | None] = []  # a box's (command, content start), None for any other brace
    escaped = -1
    for token in _TOKEN.finditer(text):
        start, stop = token.span()
        if token["bare"] is not None:
            spans.append((start, *token.span("bare"), stop))
        elif token["box"] is not None:
            stack.append((start, stop))
        elif text[start] == "\\":
            escaped = stop if (stop - start) % 2 else -1
        elif start == escaped:
            continue
        elif text[start] == "{":
            stack.append(None)
        elif stack and (box := stack.pop()) is not None:
            command, content = box
            if _SPACE.match(text, content).end() == start:  # pyright: ignore[reportOptionalMemberAccess]
                blank = True
            else:
                spans.append((command, content, start, stop))
    return spans, any(box is not None for box in stack), blank


def _joined(text: str, left: _Span, right: _Span) -> bool:
    if right[0] < left[3]:  # one inside the other
        return False
    gap = text[left[3] : right[0]]
    separated = not gap or bool(gap.strip(" \t\n$"))  # boxes on lines of their own say the same thing again
    return len(gap) <= 60 and separated and _JOINT.fullmatch(gap) is not None
