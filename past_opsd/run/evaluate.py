"""Avg@k, pass@k and majority@k of one adapter on a task's held-out sets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from past_opsd.core import stats
from past_opsd.core.config import EvaluationSection, Recipe
from past_opsd.core.files import write_text
from past_opsd.core.nouns import Adapter, Attempt, PastError, Problem, View, derive_seed
from past_opsd.core.prompts import Prompts
from past_opsd.core.reading import read_bytes
from past_opsd.rollout.lab import Lab, Work
from past_opsd.tasks import Task


@dataclass(frozen=True)
class TaskResult:
    """One held-out set: outcomes [problems, k] with what explains them."""

    problems: list[str]
    outcomes: list[list[int]]
    answers: list[list[str]]
    reasons: dict[str, int]
    styles: dict[str, int]
    mean_length: float
    truncated: float


@dataclass(frozen=True)
class Evaluation:
    """Every held-out set of a task under one adapter at one boundary."""

    step: int
    adapter: str
    samples: int
    dropped: int
    tasks: dict[str, TaskResult]

    def outcomes(self) -> dict[str, np.ndarray]:
        """Outcomes by task, [problems, k]."""
        return {name: np.array(result.outcomes) for name, result in self.tasks.items()}

    def summary(self, pass_k: Sequence[int] = (1,)) -> dict[str, float]:
        """Avg@k, pass@k of these k, majority@k per task, and their macro averages: `macro/avg@12` and so on."""
        out: dict[str, float] = {}
        styles = sorted({style for result in self.tasks.values() for style in result.styles})
        for name, result in self.tasks.items():
            outcomes = np.array(result.outcomes)
            out[f"{name}/avg@{self.samples}"] = float(stats.avg_at_k(outcomes))
            out |= {f"{name}/pass@{k}": float(stats.pass_at_k(outcomes, k)) for k in pass_k}
            out[f"{name}/majority@{self.samples}"] = float(stats.majority_at_k(outcomes, result.answers))
            out[f"{name}/mean_length"] = result.mean_length
            out[f"{name}/truncated"] = result.truncated
            for style in styles:
                out[f"{name}/style/{style}"] = result.styles.get(style, 0) / outcomes.size
        first = f"{next(iter(self.tasks))}/"
        for metric in [key.removeprefix(first) for key in out if key.startswith(first)]:
            out[f"macro/{metric}"] = float(np.mean([out[f"{name}/{metric}"] for name in self.tasks]))
        return out

    def save(self, path: Path) -> None:
        """Write as JSON."""
        write_text(path, json.dumps(asdict(self), ensure_ascii=False) + "\n")

    @staticmethod
    def load(path: Path) -> Evaluation:
        """Read what `save` wrote."""
        try:
            found = _SCHEMA.validate_json(read_bytes(path), strict=True)
            found.check()
        except ValueError as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            reason = str(error) if first is None else ": ".join([*map(str, first["loc"]), first["msg"]])
            raise PastError(f"{path}: not an evaluation written by this package ({reason:.200})") from None
        return found

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether a file holds an evaluation."""
        try:
            return bool(Evaluation.load(path))
        except PastError:
            return False

    def check(self) -> None:
        """Every set has problems, and `samples` outcomes and answers for each."""
        for name, result in self.tasks.items():
            shapes = {len(row) for row in (*result.outcomes, *result.answers)}
            counts = {len(result.problems), len(result.outcomes), len(result.answers)}
            if shapes != {self.samples} or len(counts) != 1:
                raise ValueError(f"'{name}' does not have {self.samples} outcomes and answers for each problem")
            if {value for row in result.outcomes for value in row} - {0, 1}:
                raise ValueError(f"'{name}' has outcomes that are neither 0 nor 1")
            numbers = (result.mean_length, result.truncated, *result.reasons.values(), *result.styles.values())
            if not all(0 <= number < 1e12 for number in numbers):
                raise ValueError(f"'{name}' has a length, a share or a count that cannot be")
        if not self.tasks or self.samples < 1:
            raise ValueError("no outcomes")
        if not 0 <= self.step < 1e9:
            raise ValueError(f"step {self.step}")


_SCHEMA = TypeAdapter(Evaluation)


def stack(evaluations: Sequence[Evaluation]) -> dict[str, np.ndarray]:
    """One method's outcomes over seeds, task -> [seeds, problems, k]."""
    runs = [evaluation.outcomes() for evaluation in evaluations]
    shapes = [{task: values.shape for task, values in run.items()} for run in runs]
    if any(shape != shapes[0] for shape in shapes):
        raise PastError(
            f"the seeds of one method were not evaluated alike at step {evaluations[0].step}: their tasks, problems or "
            "samples differ; take the run apart that does not belong to the others"
        )
    return {task: np.stack([run[task] for run in runs]) for task in runs[0]}


def macro_avg(outcomes: Mapping[str, np.ndarray]) -> float:
    """The macro Avg@k of outcomes by task."""
    return stats.macro({task: stats.avg_at_k(values) for task, values in outcomes.items()})


def evaluation_steps(recipe: Recipe) -> set[int]:
    """The boundaries at which the recipe evaluates."""
    return {round(fraction * recipe.run.cycles) for fraction in recipe.evaluation.at}


def evaluate(
    lab: Lab,
    prompts: Prompts,
    task: Task,
    section: EvaluationSection,
    *,
    adapter: Adapter,
    versions: Mapping[Adapter, int],
    seed: int,
    step: int,
    max_context: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Sample k responses per problem and verify them. Draws depend on (seed, problem, draw) alone, so methods pair.

    `tell` hears which set is under way.
    """
    tasks: dict[str, TaskResult] = {}
    dropped = 0
    for name, problems in task.evaluation().items():
        views = [(p, View(adapter, prompts.evaluation(p))) for p in problems]
        fitting = [(p, v) for p, v in views if len(v.prompt) + section.sampling.max_new_tokens <= max_context]
        dropped += len(views) - len(fitting)
        if not fitting:
            raise PastError(
                f"evaluation.sampling.max_new_tokens = {section.sampling.max_new_tokens} leaves no room for any prompt "
                f"of '{name}' within {max_context} tokens"
            )
        work = [
            Work(p, v, derive_seed(seed, "evaluation", p.id, draw))
            for p, v in fitting
            for draw in range(section.samples)
        ]
        tell(f"evaluating {name}")
        attempts = lab.attempt(work, section.sampling, versions)
        tasks[name] = _collect([p for p, _ in fitting], attempts, section.samples, task.style)
    return Evaluation(step, adapter, section.samples, dropped, tasks)


def _collect(
    problems: Sequence[Problem], attempts: Sequence[Attempt], k: int, style: Callable[[str], str]
) -> TaskResult:
    rows = [attempts[i : i + k] for i in range(0, len(attempts), k)]
    styles = Counter(style(a.response.text) for a in attempts)
    del styles[""]
    return TaskResult(
        problems=[p.id for p in problems],
        outcomes=[[int(a.verdict.correct) for a in row] for row in rows],
        answers=[[a.verdict.answer for a in row] for row in rows],
        reasons=dict(sorted(Counter(a.verdict.reason for a in attempts).items())),
        styles=dict(sorted(styles.items())),
        mean_length=float(np.mean([len(a.response.tokens) for a in attempts])),
        truncated=float(np.mean([not a.response.finished for a in attempts])),
    )
