"""`past bench step`: one update from rollout to optimizer step, by this package and by TRL.

GRPO beside TRL's GRPOTrainer, Vanilla OPSD beside its SDFTTrainer with full logits: the same weights, LoRA, prompts,
lengths and thread count, float32 on the CPU. No response may end, so both sides compute the same tokens; every other
response counts as right. Each side is a process of its own and they take turns, update by update.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from past_opsd.analysis.bench import METHODS, _ours, _trl
from past_opsd.analysis.bench._ours import Plan, Step
from past_opsd.analysis.bench._worker import Side
from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.core.prompts import fill, turns
from past_opsd.policy.pretrained import resolve

TITLES = {"grpo": "GRPO", "opsd": "Vanilla OPSD"}
THEIRS = {"grpo": "TRL GRPOTrainer", "opsd": "TRL SDFTTrainer"}
GOALS = {"grpo": 0.6, "opsd": 0.75}

Breakdown = Mapping[str, tuple[float, float]]
"""By phase: CPU seconds, and those of its matrix products alone."""


@dataclass(frozen=True)
class Line:
    """One side: its timed updates, and its peak memory where that can be measured."""

    name: str
    steps: Sequence[Step]
    mebibytes: float | None

    @property
    def seconds(self) -> float:
        return statistics.median(step.seconds for step in self.steps)

    @property
    def cpu(self) -> float:
        return statistics.median(step.cpu for step in self.steps)


def run(args: argparse.Namespace) -> int:
    """Measure and print both comparisons."""
    for name in ("group", "prompts", "tokens", "threads", "repeats"):
        if vars(args)[name] < 1:
            raise PastError(f"--{name} is {vars(args)[name]}; it must be at least 1")
    with_trl = has_trl()
    for method in METHODS if args.only is None else (args.only,):
        prompts, samples = (1, args.group) if method == "grpo" else (args.prompts, 1)
        name, overrides = f"{args.recipes}/{method}", tuple(args.overrides)
        plan = Plan(name, overrides, prompts, samples, args.tokens, args.threads, args.checkpointing)
        lines, breakdown = measure(method, plan, args.repeats, with_trl)
        print(report(method, plan, lines, breakdown), flush=True)
    if not with_trl:
        print("TRL is not installed: 'make bench' makes an environment that has it and runs this there.")
    return 0


def has_trl() -> bool:
    """Whether the other side can run here."""
    return importlib.util.find_spec("trl") is not None


def measure(method: str, plan: Plan, repeats: int, with_trl: bool) -> tuple[list[Line], Breakdown]:
    """Warm both sides up, let them take turns, then look closer at ours."""
    recipe = plan.load()
    sides = {"past-opsd": Side("past-opsd", _ours.run, plan)}
    if with_trl:
        sides[THEIRS[method]] = Side(THEIRS[method], _trl.run, twin(method, plan, recipe))
    try:
        warm = {name: Step(*side.ask("step")) for name, side in sides.items()}
        same = {step.tokens for step in warm.values()}
        if len(same) > 1:
            raise PastError(f"the sides do not compute the same tokens (prompts, responses, teacher prompts): {same}")
        steps: dict[str, list[Step]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, side in sides.items():
                steps[name].append(Step(*side.ask("step")))
        lines = [Line(name, steps[name], side.ask("peak")) for name, side in sides.items()]
        for name in list(sides)[1:]:
            sides.pop(name).close()
        return lines, sides["past-opsd"].ask("breakdown", repeats)
    finally:
        for side in sides.values():
            side.close()


def twin(method: str, plan: Plan, recipe: Recipe) -> _trl.Twin:
    """Our recipe in TRL's words."""
    student, reference = recipe.prompts.student, recipe.prompts.reference
    if not reference.startswith(student):
        raise PastError(f"{plan.recipe}: TRL's teacher message begins with the student's; prompts.reference does not")
    rest = reference.removeprefix(student).replace("{reference_solution}", "\0")
    rest = rest.replace("{", "{{").replace("}", "}}").replace("\0", "{privileged_context}")
    before, of_teacher = (turns(recipe.prompts, role) for role in ("student", "reference"))
    if before != of_teacher:
        raise PastError(f"{plan.recipe}: TRL's teacher reads the student's examples; those of prompts.reference differ")
    problems = config.plugin("task", recipe.task.name).build(recipe.task).train()[: plan.prompts]
    optimizer, lora = recipe.learner.student, recipe.model.lora
    return _trl.Twin(
        method=method,
        path=resolve(recipe.model.path),
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        lr=optimizer.lr,
        max_grad_norm=optimizer.max_grad_norm,
        before=before,
        messages=[fill(student, {"problem": problem.text}) for problem in problems],
        solutions=[problem.solution for problem in problems],
        teacher_template="{prompt}" + rest,
        samples=plan.samples,
        tokens=plan.tokens,
        threads=plan.threads,
        checkpointing=plan.checkpointing,
    )


def report(method: str, plan: Plan, lines: Sequence[Line], breakdown: Breakdown) -> str:
    """The table, the ratios and where our time goes."""
    prompt, response, teacher = lines[0].steps[0].tokens
    privileged = f", {teacher} of teacher prompts" if teacher else ""
    text = [
        f"One update of {TITLES[method]} ({plan.recipe}): {plan.prompts} prompt(s) x {plan.samples} response(s) of "
        f"{plan.tokens} tokens, {plan.threads} thread(s),",
        f"median of {len(lines[0].steps)}; {prompt} prompt tokens, {response} of responses{privileged}"
        f"{', gradient checkpointing' if plan.checkpointing else ''}",
        "",
        f"{'side':26s}{'seconds':>10s}{'CPU s':>10s}{'peak MiB':>10s}",
    ]
    for line in lines:
        memory = "-" if line.mebibytes is None else f"{line.mebibytes:.0f}"
        text.append(f"{line.name:26s}{line.seconds:10.2f}{line.cpu:10.2f}{memory:>10s}")
    if len(lines) > 1:
        text += ["", _ratios(method, *lines)]
    return "\n".join([*text, "", *_phases(breakdown), ""])


def _ratios(method: str, ours: Line, theirs: Line) -> str:
    text = (
        f"ours / TRL: {ours.seconds / theirs.seconds:.2f} in time ({ours.cpu / theirs.cpu:.2f} in CPU time; "
        f"goal {GOALS[method]})"
    )
    if ours.mebibytes is not None and theirs.mebibytes is not None:
        text += f", {ours.mebibytes / theirs.mebibytes:.2f} in peak memory (goal 0.5)"
    return text


def _phases(breakdown: Breakdown) -> list[str]:
    """Our phases beside their matrix products, run alone."""
    text = [f"{'our phase':26s}{'CPU s':>10s}{'products':>10s}{'share':>10s}"]
    whole = sum(seconds for seconds, _ in breakdown.values())
    for name, (seconds, products) in breakdown.items():
        if seconds >= 0.001 * whole:
            text.append(f"{name:26s}{seconds:10.2f}{products:10.2f}{100 * products / seconds:8.0f} %")
    products = sum(products for _, products in breakdown.values())
    return [*text, f"{'all':26s}{whole:10.2f}{products:10.2f}{100 * products / whole:8.0f} %  (goal 70 %)"]
