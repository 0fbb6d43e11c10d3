"""Signs that a run harms its model unseen: what a cycle shows at once, and what a whole run made worse."""

from __future__ import annotations

from collections.abc import Sequence

from past_opsd.evaluate import Evaluation


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


def alarms(metrics: dict[str, float]) -> list[str]:
    """Signs that a run is harming itself unseen."""
    found: list[str] = []
    for key, value in metrics.items():
        if key.endswith("/alignment") and value < 0:
            found.append(
                f"{key.removesuffix('/alignment')}: clipping turned the gradient against the unclipped one "
                f"(cosine {value:.2f}): raise method.tau"
            )
    if metrics.get("rollout/truncated", 0) > 0.5:
        found.append("more than half of the responses hit the token limit: raise rollout.student.max_new_tokens")
    if metrics.get("rollout/dropped", 0) > 0:
        found.append("examples were dropped because they do not fit the context: raise model.max_context")
    return found
