"""`past bench shared`: PAST's teacher step with and without sharing the prompt among its continuations.

One failed attempt, its prompt, and a group of continuations of equal length, every other one a success: the policy
gradient on all of them, the KL to the frozen student on the successes. Tokens are random. With and without
`learner.shared_prompts`, each in a process of its own, taking turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from past_opsd.analysis.bench._worker import Side, peak, serve, tokens_of
from past_opsd.core import config
from past_opsd.core.nouns import Attempt, Batch, Group, PastError, Problem, Response, View
from past_opsd.core.prompts import Prompts
from past_opsd.learner import Learner, bundle, gather_paths
from past_opsd.policy import packing
from past_opsd.policy.model import Model
from past_opsd.rollout.verifiers import Reason

GOAL = 2.0
SIZES = ("prompt", "student_prompt", "group", "tokens", "budget", "threads", "repeats")


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, and how many continuations."""

    prompt: int
    student_prompt: int
    group: int
    tokens: int


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
        least = 2 if name in ("group", "tokens") else 1
        if vars(args)[name] < least:
            raise PastError(f"--{name.replace('_', '-')} is {vars(args)[name]}; it must be at least {least}")
    sizes = Sizes(args.prompt, args.student_prompt, args.group, args.tokens)
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
    terms = method.teacher_terms(Batch((), ()), [group(sizes, len(model.head))])
    learner = Learner(model, recipe.learner, recipe.run.cycles)

    def step() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        learner.step("teacher", terms)
        return time.perf_counter() - wall, time.process_time() - cpu

    def gradient() -> Any:
        return learner.gradient("teacher", terms)[1].numpy()

    def positions() -> int:
        section = recipe.learner
        bundles = bundle(gather_paths(terms, section.reduction), section.token_budget, section.shared_prompts)
        return sum(packing.row_length(item.live) for item in bundles)

    serve(pipe, {"gradient": gradient, "step": step, "positions": positions, "peak": peak})


def group(sizes: Sizes, vocabulary: int) -> Group:
    """A failed attempt and its continuations, of random tokens."""
    problem = Problem("bench", "", "", "")
    student = View("student", tokens_of("student", sizes.student_prompt, vocabulary))
    teacher = View("teacher", tokens_of("teacher", sizes.prompt, vocabulary))

    def attempt(view: View, index: int, correct: bool) -> Attempt:
        tokens = tokens_of(f"{view.adapter} {index}", sizes.tokens, vocabulary)
        response = Response(tokens, "", (0.0,) * len(tokens), finished=True)
        return Attempt(problem, view, response, (Reason.CORRECT if correct else Reason.WRONG).verdict())

    continuations = tuple(attempt(teacher, i, i % 2 == 0) for i in range(sizes.group))
    return Group(attempt(student, 0, correct=False), continuations)


def report(args: argparse.Namespace, lines: Sequence[Line], difference: float) -> str:
    """The table and the ratio."""
    text = [
        f"Teacher step of {args.recipe}: a prompt of {args.prompt} tokens, {args.group} continuations of "
        f"{args.tokens}, a student prompt of {args.student_prompt},",
        f"micro-batches of {args.budget} tokens, {args.threads} thread(s), median of {args.repeats}",
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
