"""Signs that a run harms its model unseen: what a cycle shows at once, and what a whole run made worse."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from past_opsd.run.evaluate import Evaluation


def health(evaluations: dict[int, Evaluation], pass_k: Sequence[int]) -> list[str]:
    """What got worse between the first and the last evaluation, beside the score itself."""
    if len(evaluations) < 2:
        return []
    first, last = (evaluations[step].summary(pass_k) for step in (min(evaluations), max(evaluations)))
    found: list[str] = []
    for key in first:
        name, before, after = key.removeprefix("macro/"), first[key], last.get(key, 0.0)
        if not key.startswith("macro/"):
            continue
        if name.startswith(("avg@", "pass@")) and after < before - 0.02:
            found.append(f"{name} fell from {100 * before:.1f} to {100 * after:.1f} %")
        if name == "truncated" and after > before + 0.02:
            found.append(f"truncated responses rose from {100 * before:.1f} to {100 * after:.1f} %")
        if name == "mean_length" and not 0.75 * before <= after <= 1.33 * before:
            found.append(f"mean length went from {before:.1f} to {after:.1f} tokens")
    styles = {key for key in (*first, *last) if key.startswith("macro/style/")}
    for key in sorted(styles):
        before, after = first.get(key, 0.0), last.get(key, 0.0)
        if after > before + 0.02:
            label = key.removeprefix("macro/style/")
            found.append(f"style drift: '{label}' responses rose from {100 * before:.1f} to {100 * after:.1f} %")
    return found


def entropy_health(lines: Sequence[dict[str, float]]) -> list[str]:
    """Whether the student's entropy collapsed between the first and the last fifth of the run."""
    keys = [key for key in (lines[0] if lines else {}) if key.startswith("student/") and key.endswith("/entropy")]
    fifth = max(1, len(lines) // 5)
    found: list[str] = []
    for key in keys:
        values = [line[key] for line in lines if key in line]
        before, after = (sum(part) / len(part) for part in (values[:fifth], values[-fifth:]))
        if after < 0.2 * before:
            found.append(f"{key} collapsed from {before:.3f} to {after:.3f}")
    return found


FORKS_FROM = 20
"""Cycles of a run before its forks are judged; what changed is the last fifth beside the first."""
FORKS_SHARE = 0.5
"""Of the teacher's change, on a fifth of the positions: two and a half times what falls there by chance."""
SHORTER, CLOSED, ERRORS = 0.85, 0.5, 2.0
"""What is left of the length, of the forks' rate or entropy; standard errors by which the success fell."""


def fork_health(lines: Sequence[Mapping[str, float]]) -> list[str]:
    """The pattern of privileged distillation that closes forks (arXiv 2607.05184), term by term of the student.

    Most of the change lands where the student is least decided, and two of three follow: responses get shorter, forks
    close (their rate or their entropy halves), fewer responses are right.
    """
    if len(lines) < FORKS_FROM:
        return []
    terms = [key.removesuffix("/fork_share") for key in lines[-1] if key.endswith("/fork_share")]
    lengths, success = _ends(lines, "rollout/mean_length"), _ends(lines, "rollout/success")
    found: list[str] = []
    for term in (name for name in terms if name.startswith("student/")):
        shares = [line[f"{term}/fork_share"] for line in lines if f"{term}/fork_share" in line]
        share = sum(shares) / len(shares)
        signs = [
            *_fell("responses got shorter", lengths, SHORTER),
            *(
                _fell("there are fewer forks", _ends(lines, f"{term}/fork_rate"), CLOSED)
                or _fell("forks are less open", _ends(lines, f"{term}/fork_entropy"), CLOSED)
            ),
            *(["fewer responses are right"] if success and _lower(*success) else []),
        ]
        if share >= FORKS_SHARE and len(signs) >= 2:
            found.append(
                f"the teacher's change lands on forks ({100 * share:.0f} % of the KL of {term} on the fifth of the "
                f"positions where the student is least decided) while {' and '.join(signs)}: distillation may close "
                "them; where method.forks is 'keep' set 'down-weight' or 'mask', or withhold less from the student"
            )
    return found


def _ends(lines: Sequence[Mapping[str, float]], key: str) -> tuple[list[float], list[float]] | None:
    """A number's values in the first and the last fifth of the cycles that have it."""
    values = [line[key] for line in lines if key in line]
    fifth = len(values) // 5
    return (values[:fifth], values[-fifth:]) if fifth else None


def _fell(words: str, ends: tuple[list[float], list[float]] | None, left: float) -> list[str]:
    """The words, where at most `left` of the first mean is left in the last."""
    if ends is None:
        return []
    before, after = (sum(part) / len(part) for part in ends)
    return [words] if after <= left * before and before > 0 else []


def _lower(first: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the later mean is lower by more than chance between cycles."""
    means = [sum(part) / len(part) for part in (first, last)]
    spread = sum(
        sum((value - m) ** 2 for value in part) / max(1, len(part) - 1) / len(part)
        for part, m in zip((first, last), means, strict=True)
    )
    return means[1] < means[0] - ERRORS * spread**0.5


def alarms(metrics: Mapping[str, float]) -> list[str]:
    """What is wrong with one cycle, and what to change; numbers stand in brackets."""
    found: list[str] = []
    for key, value in metrics.items():
        if key.endswith("/alignment") and value < 0:
            found.append(
                f"{key.removesuffix('/alignment')}: clipping turned the gradient against the unclipped one "
                f"(cosine {value:.2f}): raise method.tau"
            )
    if metrics.get("rollout/truncated", 0) > 0.5:
        found.append("more than half of the responses hit the token limit: raise rollout.student.max_new_tokens")
    if metrics.get("failed/truncated", 0) > 0.5:
        found.append(
            "more than half of the teacher's continuations hit the token limit: raise rollout.teacher.max_new_tokens"
        )
    if metrics.get("rollout/empty", 0) > 0.5:
        found.append(
            "more than half of the responses are empty: look at the prompt and its end with 'past inspect', and at the "
            "model's end-of-sequence tokens"
        )
    for role in ("student", "teacher"):
        if count := metrics.get(f"{role}/nonfinite", 0):
            found.append(f"numbers of the {role}'s log are not finite ({count:.0f}): its two views exclude each other")
    if metrics.get("rollout/dropped", 0) > 0:
        found.append("examples were dropped because they do not fit the context: raise model.max_context")
    for phase in ("teacher", "student"):
        taken, left = metrics.get(f"{phase}/supervised", 0), metrics.get(f"{phase}/unaligned", 0)
        if left > taken:
            found.append(
                f"{phase}: most positions are not supervised, student and teacher stand at different places of the "
                "answer there: set enable_thinking alike in prompts.student_kwargs and prompts.teacher_kwargs"
            )
    if metrics.get("failed/unexplored", 0) > 0:
        found.append(
            "failed responses were distilled but not explored, no continuation fits the context: raise "
            "model.max_context or lower rollout.teacher.max_new_tokens"
        )
    if metrics.get("failed/skipped", 0) == 1:
        found.append(
            "every group of the failed branch was skipped, no continuation of the teacher is right: check that the "
            "references are right and prompts.hindsight shows them, raise rollout.teacher.max_new_tokens or "
            "method.group_max"
        )
    return found + _verdict_alarms(_reasons(metrics)) + _step_alarms(metrics)


def _reasons(metrics: Mapping[str, float]) -> Counter[str]:
    """Why verdicts were what they were, of the student's responses and the teacher's continuations together."""
    found: Counter[str] = Counter()
    for key, count in metrics.items():
        branch, _, reason = key.partition("/reason/")
        if reason and branch in ("rollout", "failed"):
            found[reason] += int(count)
    return found


def _verdict_alarms(reasons: Mapping[str, int]) -> list[str]:
    """Verdicts that say nothing about the response."""
    found: list[str] = []
    total = sum(reasons.values())
    failed = {reason: reasons[reason] for reason in ("error", "crashed", "timeout") if reasons.get(reason)}
    if sum(failed.values()) > 0.1 * total:
        listed = ", ".join(f"{reason} {n}" for reason, n in failed.items())
        found.append(
            f"the verifier itself failed ({listed} of {total}), and such responses count as wrong: mend the function, "
            "or raise verifier.timeout or verifier.memory_mb"
        )
    if reasons.get("bad_gold"):
        found.append(
            f"the reference answer is empty or cannot be read ({reasons['bad_gold']} of {total} verdicts), and such "
            "responses count as wrong: find the rows with 'past data check'"
        )
    return found


def _step_alarms(metrics: Mapping[str, float]) -> list[str]:
    found: list[str] = []
    if metrics.get("student/stepped") == 0:
        found.append(
            "the student took no step, nothing was left to learn from: see the other warnings, or give a cycle more "
            "problems or samples"
        )
    if metrics.get("teacher/stepped") == 0 and metrics.get("failed/samples", 0) > 0:
        found.append("the teacher took no step, no trajectory was left to adapt it on: see the other warnings")
    for role in ("student", "teacher"):
        if metrics.get(f"{role}/stepped") == 1 and metrics.get(f"{role}/grad_norm") == 0:
            found.append(
                f"the {role}'s gradient was exactly zero: its step taught nothing; look at its loss and prompts"
            )
    return found


STREAK = 10
"""So many cycles in a row are no accident."""
DROUGHTS: dict[str, tuple[str, float]] = {
    "no response of the student is right, so nothing shows what to keep: take easier problems, raise "
    "rollout.student.max_new_tokens, or check the answers with 'past verify'": ("rollout/success", 0.0),
    "every response of the student is right, so there is nothing to correct: take harder problems": (
        "rollout/success",
        1.0,
    ),
    "the teacher's policy gradient has no step, no group holds both right and wrong continuations: raise "
    "method.group_max or rollout.teacher.temperature, or take other problems": ("failed/mixed", 0.0),
}
"""What may be so in one cycle but not in all: words -> a number of the cycle's record that stays at a value."""


def droughts(lines: Sequence[Mapping[str, float]]) -> list[str]:
    """What was so in every cycle of a run, or in many of them in a row."""
    found: list[str] = []
    for text, (key, value) in DROUGHTS.items():
        held = [line[key] == value for line in lines if key in line]
        longest = max((len(list(run)) for so, run in groupby(held) if so), default=0)
        if longest >= min(STREAK, max(3, len(held))):
            found.append(f"in {'all ' if longest == len(held) else ''}{longest} cycles in a row: {text}")
    return found


class Watcher:
    """Warns of a run as it goes, of each thing once; the count at the end tells how often it was so."""

    def __init__(self, before: Sequence[Mapping[str, float]]):
        self._lines = list(before)
        self._told: set[str] = set()

    def see(self, metrics: Mapping[str, float]) -> list[str]:
        """What the newest cycle shows for the first time."""
        self._lines.append(metrics)
        found = alarms(metrics) + fork_health(self._lines)
        if len(self._lines) >= STREAK:
            found += droughts(self._lines[-STREAK:])
        new = [text for text in found if kind(text) not in self._told]
        self._told |= set(map(kind, new))
        return new


def kind(alarm: str) -> str:
    """An alarm without its numbers."""
    return re.sub(r" \([^)]*\)|^in (all )?\d+ cycles in a row: ", "", alarm)


def counted(lines: Sequence[Mapping[str, float]], what: str) -> list[str]:
    """Each alarm of some cycles once, with how many of them it is of."""
    kinds = Counter(name for line in lines for name in {kind(text): None for text in alarms(line)})
    return [f"in {n} of {len(lines)} {what}: {text}" for text, n in kinds.items()]


def evaluation_alarms(evaluation: Evaluation) -> list[str]:
    """What makes an evaluation's score say little."""
    found: list[str] = []
    for name, result in evaluation.tasks.items():
        found += [f"evaluation of {name}: {text}" for text in _verdict_alarms(result.reasons)]
        if result.truncated > 0.5:
            found.append(
                f"evaluation of {name}: more than half of the responses hit the token limit: raise "
                "evaluation.sampling.max_new_tokens"
            )
    return found
