"""The classes of answers: what the verifier said of held-out responses, their styles, and what each class means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from past_opsd.analysis.report.data import Method, last_step
from past_opsd.run.evaluate import Evaluation

# In reading order: every reason of the shipped verifiers, for a reader who has not seen one.
REASONS = {
    "correct": "The final answer equals the reference answer.",
    "wrong": "A final answer was found and understood, and it differs from the reference answer.",
    "truncated": "The token limit cut the response, so it was not read; a longer limit or shorter responses help.",
    "no_answer": "The words that announce the final answer (verifier.after) are not there.",
    "no_box": "No \\boxed{} after the thinking part, so there is no final answer.",
    "empty_box": "There is a \\boxed{}, but nothing is in it.",
    "unclosed_box": "A \\boxed{ that never closes, and no closed one.",
    "unparseable": "What is in the box cannot be read as mathematics.",
    "too_complex": "What is in the box is longer or deeper nested than the verifier's limits.",
    "timeout": "The comparison did not end in time and was killed; it counts as a failure.",
    "crashed": "The comparison's process died twice, for want of memory or killed from outside; a failure.",
    "not_applicable": "The reward function gave no reward for this response; a failure.",
    "error": "The verifier's own function raised an error or gave no verdict; mend it, every such answer is a failure.",
    "bad_gold": "The reference answer is empty or cannot be read: mend the data ('past data check' finds these).",
}
UNKNOWN = "A class of the recipe's own verifier."
STYLES = {
    "embedded": {
        "detailed": "Every step is written out, as the base model writes: 6*7=2; 2*3=6; \\boxed{6}.",
        "terse": "Values alone, as the reference solutions are written: 2, 6, \\boxed{6}.",
        "other": "Neither of the two: cut, mixed or malformed.",
    }
}


@dataclass(frozen=True)
class Classes:
    """Shares of held-out responses by class, a column for every method or boundary."""

    columns: list[str]
    rows: dict[str, list[float]]  # class -> share in each column


def meaning(reason: str) -> str:
    """What a class of answer means."""
    return REASONS.get(reason, UNKNOWN)


def style_meaning(methods: Sequence[Method], style: str) -> str:
    """What a style means, where the shipped task that names it says so."""
    found = {STYLES.get(m.recipe.task.name, {}).get(style, "") for m in methods}
    return found.pop() if len(found) == 1 else ""


def reasons(methods: Sequence[Method]) -> Classes | None:
    """Verdicts at the last evaluation of every method; of one method, at its first and its last."""
    counted = {label: _count(found) for label, found in _columns(methods).items()}
    counted = {label: counts for label, counts in counted.items() if counts}
    known = {reason for counts in counted.values() for reason in counts}
    order = [*(r for r in REASONS if r in known), *sorted(known - set(REASONS))]
    rows = {reason: [counts.get(reason, 0) / sum(counts.values()) for counts in counted.values()] for reason in order}
    return Classes(list(counted), rows) if rows else None


def _columns(methods: Sequence[Method]) -> dict[str, list[Evaluation]]:
    found: dict[str, list[Evaluation]] = {}
    for method in methods:
        last = last_step(method)
        steps = sorted({step for run in method.runs.values() for step in run.evaluations})
        for step in dict.fromkeys([*steps[:1], last] if len(methods) == 1 else [last]):
            if step is not None:
                name = ("before training" if step == 0 else f"after {step}") if len(methods) == 1 else method.label
                found[name] = [run.evaluations[step] for run in method.runs.values() if step in run.evaluations]
    return found


def _count(evaluations: Sequence[Evaluation]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for evaluation in evaluations:
        for result in evaluation.tasks.values():
            for reason, count in result.reasons.items():
                counts[reason] = counts.get(reason, 0) + count
    return {reason: count for reason, count in counts.items() if count}
