"""`past inspect`: what student and teacher read for one real example, with the supervised tokens coloured."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import Attempt, PastError, Response, Tokens, Verdict, View
from past_opsd.core.prompts import Prompts
from past_opsd.policy.model import load_tokenizer
from past_opsd.run.train import session

PROMPT, SUPERVISED, UNALIGNED = "dim", "bold black on green", "black on yellow"
PLACES = {"before": "before any thinking", "inside": "inside a thinking block", "after": "after a thinking block"}


def inspect(console: Console, recipe: Recipe, index: int, dry: bool) -> None:
    """Print one training example as every role sees it.

    The response is sampled from the initial student and verified; `dry` loads no weights and puts the reference
    solution in its place.
    """
    if index < 0:
        raise PastError(f"--index {index}: examples are counted from 0")
    if dry:
        tokenizer = load_tokenizer(recipe.model)
        prompts = Prompts(tokenizer, recipe.prompts)
        method = config.plugin("method", recipe.method.name).build(recipe.method, prompts, recipe.rollout)
        problems = config.plugin("task", recipe.task.name).build(recipe.task).train()
        _within(index, len(problems))
        problem = problems[index]
        response = Response(prompts.completion(problem.solution), problem.solution, (), True)
        view = View("student", prompts.student(problem))
        attempt = Attempt(problem, view, response, Verdict(False, "not verified: the reference stands in for it"))
        _show(console, tokenizer, prompts, method, attempt)
        return
    with session(recipe) as assembled:
        if not assembled.loop.method.rollouts:
            raise PastError(f"'{recipe.method.name}' trains on the reference itself and samples nothing: use --dry")
        _within(index, len(assembled.loop.problems))
        k = index // recipe.rollout.problems_per_cycle
        attempts = assembled.loop.attempts(k, assembled.loop.take(k))
        chosen = attempts[index % len(attempts)]
        _show(console, assembled.model.tokenizer, assembled.loop.prompts, assembled.loop.method, chosen)


def _within(index: int, count: int) -> None:
    if index >= count:
        raise PastError(f"--index {index}: the task has {count} training examples, 0 to {count - 1}")


def _show(console: Console, tokenizer: Any, prompts: Prompts, method: Any, attempt: Attempt) -> None:
    tokens = attempt.response.tokens
    teacher = method.teacher_view(attempt)
    start = prompts.aligned_from(attempt.view.prompt, teacher.prompt, tokens)
    console.print(Text(f"problem {attempt.problem.id}: {attempt.verdict.reason}", style="bold"))
    legend = ["prompt tokens ", ("dim", PROMPT), ", supervised tokens ", ("like this", SUPERVISED)]
    legend += [", others of the response ", ("like this", UNALIGNED)] if start else []
    console.print(Text.assemble(*legend))
    views = {"student": attempt.view} | ({"teacher": teacher} if teacher != attempt.view else {})
    for title, view in views.items():
        console.print(
            f"\n{title} reads ({view.adapter} weights, {len(view.prompt)} + {len(tokens)} tokens)", style="bold"
        )
        console.print(coloured(tokenizer, view.prompt, tokens, start), soft_wrap=True)
    if start:
        places = [PLACES[prompts.place(view.prompt)] for view in (attempt.view, teacher)]
        console.print(
            f"\nnote: {start} of {len(tokens)} positions not supervised: the student's prompt ends {places[0]}, the "
            f"teacher's {places[1]}, so the two expect different text there",
            style="yellow",
        )
    boundary = [tokenizer.decode(list(v.prompt[-1:])) for v in (attempt.view, teacher)]
    if boundary[0] != boundary[1] and not start:
        console.print(
            f"\nnote: the prompts end differently ({boundary[0]!r} and {boundary[1]!r}), so the two views may expect "
            "different first tokens; see prompts.student_kwargs and prompts.teacher_kwargs",
            style="yellow",
        )
    if len(views) > 1:
        console.print("\nBoth views are read along the same token ids.")


def coloured(tokenizer: Any, prompt: Tokens, response: Tokens, start: int = 0) -> Text:
    """The exact input, special tokens included; the response is supervised from `start` on."""
    text = Text(tokenizer.decode(list(prompt), skip_special_tokens=False), style=PROMPT)
    for part, style in ((response[:start], UNALIGNED), (response[start:], SUPERVISED)):
        text.append(tokenizer.decode(list(part), skip_special_tokens=False), style=style)
    return text
