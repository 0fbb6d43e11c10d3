"""`past bench shared`: PAST's teacher step with and without sharing what its continuations begin with.

Failed attempts, their prompts, and for each a group of continuations of equal length, every other one a success: the
policy gradient on all of them, the KL to the frozen student on the successes. Tokens are random; all prompts may begin
with the same examples, and the continuations of a group with the same tokens. With and without
`learner.shared_prompts`, each in a process of its own, taking turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from past_opsd.analysis.bench._worker import Side, peak, serve, tokens_of
from past_opsd.core import config
from past_opsd.core.nouns import Attempt, Batch, Group, PastError, Problem, Response, View
from past_opsd.core.prompts import Prompts
from past_opsd.learner import Learner, bundle, gather_paths
from past_opsd.policy.model import Model
from past_opsd.rollout.verifiers import Reason

GOAL = 2.0
LEAST = {"group": 2, "tokens": 2, "examples": 0, "alike": 0, "twice": 0}
SIZES = ("prompt", "student_prompt", "group", "tokens", "problems", *LEAST, "budget", "threads", "repeats")


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, and how many of everything.

    Prompts of the teacher and of the student begin with `examples`, the continuations of a group with `alike` tokens;
    `twice` of them were drawn twice.
    """

    prompt: int
    student_prompt: int
    group: int
    tokens: int
    problems: int = 1
    examples: int = 0
    alike: int = 0
    twice: int = 0


@dataclass(frozen=True)
class Line:
    """One setting: positions of its live forwards, its steps' times, its process's peak memory where measurable."""

    name: str
    positions: int
    seconds: list[float]
    cpu: list[float]
    mebibytes: float | None


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    for name in SIZES:
        least = LEAST.get(name, 1)
        if vars(args)[name] < least:
            raise PastError(f"--{name.replace('_', '-')} is {vars(args)[name]}; it must be at least {least}")
    if (
        args.examples >= min(args.prompt, args.student_prompt)
        or args.alike >= args.tokens
        or 2 * args.twice > args.group
    ):
        raise PastError(
            "--examples must be shorter than both prompts, --alike than --tokens, --twice half of --group at most"
        )
    sizes = Sizes(**{field.name: vars(args)[field.name] for field in fields(Sizes)})
    overrides = [*args.overrides, f"learner.token_budget={args.budget}", f"run.threads={args.threads}"]
    lines, difference = measure(args.recipe, overrides, sizes, args.repeats)
    print(report(args, lines, difference))
    return 0


def measure(recipe: str, overrides: Sequence[str], sizes: Sizes, repeats: int) -> tuple[list[Line], float]:
    """Both settings, and the largest difference of their gradients, relative to the largest entry."""
    sides = {
        name: Side(name, _side, recipe, [*overrides, f"learner.shared_prompts={value}"], sizes)
        for name, value in (("prompt repeated", "false"), ("prompt shared", "true"))
    }
    try:
        alone, together = (side.ask("gradient") for side in sides.values())  # also warms up
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, side in sides.items():
                times[name].append(side.ask("step"))
        lines = [
            Line(
                name, side.ask("positions"), [t[0] for t in times[name]], [t[1] for t in times[name]], side.ask("peak")
            )
            for name, side in sides.items()
        ]
    finally:
        for side in sides.values():
            side.close()
    return lines, float(np.abs(alone - together).max() / np.abs(alone).max())


def _side(pipe: Connection, name: str, overrides: Sequence[str], sizes: Sizes) -> None:
    recipe = config.load(name, overrides)
    torch.set_num_threads(recipe.run.threads)
    model = Model(recipe.model, seed=1)
    if model.max_context < sizes.prompt + sizes.tokens:
        raise PastError(
            f"--prompt and --tokens need {sizes.prompt + sizes.tokens}, the model reads {model.max_context}"
        )
    model.perturb(seed=3, scale=0.01)  # at the identity half of the gradient is zero
    method = config.plugin("method", recipe.method.name).build(
        recipe.method, Prompts(model.tokenizer, recipe.prompts), recipe.rollout
    )
    terms = method.teacher_terms(Batch((), ()), [group(sizes, len(model.head), i) for i in range(sizes.problems)])
    learner = Learner(model, recipe.learner, recipe.run.cycles)

    def step() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        learner.step("teacher", terms)
        return time.perf_counter() - wall, time.process_time() - cpu

    def gradient() -> Any:
        return learner.gradient("teacher", terms)[1].numpy()

    def positions() -> int:
        section = recipe.learner
        worth = model.worth if section.shared_prompts else None
        return sum(
            len(item.tree) for item in bundle(gather_paths(terms, section.reduction), section.token_budget, worth)
        )

    serve(pipe, {"gradient": gradient, "step": step, "positions": positions, "peak": peak})


def group(sizes: Sizes, vocabulary: int, index: int = 0) -> Group:
    """A failed attempt and its continuations, of random tokens."""
    problem = Problem(f"bench {index}", "", "", "")

    def tokens(name: str, length: int, begin: tuple[int, ...] = ()) -> tuple[int, ...]:
        return begin + tokens_of(f"{name} {index}", length - len(begin), vocabulary)

    examples = tokens_of("examples", sizes.examples, vocabulary)
    student = View("student", tokens("student prompt", sizes.student_prompt, examples))
    teacher = View("teacher", tokens("teacher prompt", sizes.prompt, examples))
    alike = tokens("alike", sizes.alike)
    drawn = [tokens(f"continuation {i}", sizes.tokens, alike) for i in range(sizes.group - sizes.twice)]

    def attempt(view: View, read: tuple[int, ...], correct: bool) -> Attempt:
        response = Response(read, "", (0.0,) * len(read), finished=True)
        return Attempt(problem, view, response, (Reason.CORRECT if correct else Reason.WRONG).verdict())

    several = [*enumerate(drawn), *enumerate(drawn[: sizes.twice])]
    continuations = tuple(attempt(teacher, read, i % 2 == 0) for i, read in several)
    return Group(attempt(student, tokens("attempt", sizes.tokens), correct=False), continuations)


def report(args: argparse.Namespace, lines: Sequence[Line], difference: float) -> str:
    """The table and the ratio."""
    text = [
        f"Teacher step of {args.recipe}: {args.problems} prompt(s) of {args.prompt} tokens, {args.group} continuations "
        f"of {args.tokens} each,",
        f"a student prompt of {args.student_prompt}, micro-batches of {args.budget} tokens, {args.threads} thread(s), "
        f"median of {args.repeats}",
    ]
    if args.examples or args.alike or args.twice:
        text.append(
            f"in common: {args.examples} tokens of all prompts, {args.alike} of a group's continuations; {args.twice} "
            "of these drawn twice"
        )
    text += [
        "",
        f"{'':26s}{'positions':>10s}{'seconds':>10s}{'CPU s':>10s}{'peak MiB':>10s}",
    ]
    for line in lines:
        memory = "-" if line.mebibytes is None else f"{line.mebibytes:.0f}"
        wall, cpu = statistics.median(line.seconds), statistics.median(line.cpu)
        text.append(f"{line.name:26s}{line.positions:10d}{wall:10.2f}{cpu:10.2f}{memory:>10s}")
    apart, shared = lines
    wall = statistics.median(apart.seconds) / statistics.median(shared.seconds)
    cpu = statistics.median(apart.cpu) / statistics.median(shared.cpu)
    text += ["", f"repeated / shared: {wall:.2f} in time ({cpu:.2f} in CPU time; goal {GOAL:g})"]
    if apart.mebibytes is not None and shared.mebibytes is not None:
        text[-1] += f", {apart.mebibytes / shared.mebibytes:.2f} in peak memory"
    return "\n".join([*text, f"largest difference of the gradients, relative to the largest entry: {difference:.1e}"])
