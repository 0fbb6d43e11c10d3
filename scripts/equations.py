"""Collects the equation tags of the code, `[eq:label]`, into docs/equations.md.

Usage: python scripts/equations.py [--write]; without --write it fails when the page is stale.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "equations.md"
TAG = re.compile(r"\[(eq:[\w-]+)\]")

# The paper's labelled equations that the code implements or checks, in the paper's order.
EQUATIONS = {
    "eq:on-policy-rollout": "the student's complete response, sampled from X alone",
    "eq:grpo-advantage-ratio": "group-relative advantage and ratio",
    "eq:grpo-objective": "clipped policy gradient",
    "eq:student-prefix-state": "the state H_t = (X, Y_<t, t)",
    "eq:on-policy-distillation-objective": "forward-KL distillation on student prefixes",
    "eq:past-privilege": "the privilege U = (Y, Z)",
    "eq:student-projection-objective": "the student's objective under the adapted teacher",
    "eq:pointwise-clipped-divergence": "pointwise-clipped full-vocabulary KL",
    "eq:correct-teacher-loss": "keep the student's distribution on correct trajectories",
    "eq:failed-path-kl": "exact KL to the student on successful continuations",
    "eq:failed-teacher-loss": "verified success plus proximity on failed trajectories",
    "eq:teacher-active-branch-loss": "mean over the active branches",
    "eq:causal-teacher-barycenter": "the mean teacher given the prefix",
    "eq:projection-decomposition": "forward KL to a prefix-only policy: privileged variation plus distance to the mean",
    "eq:restricted-projection-excess": "the same excess over any family of students",
    "eq:irreducible-privilege": "privileged variation is the mutual information of action and privilege",
    "eq:privilege-shift-decomposition": "teacher change = privileged variation + causal shift",
    "eq:surviving-shift-fraction": "the share of the teacher's change that survives",
    "eq:frozen-student-value-shift": "value of a next-token change under the frozen student",
    "eq:value-survives-projection": "mean value shifts survive the projection",
    "eq:transfer-margin-terms": "preservation error, failed-branch margin, distillation error",
    "eq:outcome-barycenter": "the mean teacher by outcome",
    "eq:outcome-value-decomposition": "its value shift by outcome",
    "eq:failure-tv-scaling": "the failed branch is attenuated by its frequency",
    "eq:outcome-transfer-margin": "a lower bound of the student's value shift",
    "eq:compatibility-value-bound": "privileged success minus continuation mismatch",
    "eq:continuation-chain-rule-kl": "the trajectory KL token by token",
    "eq:local-policy-improvement": "the derivative of success along a conservative step",
    "eq:correct-tv-bound": "small preservation loss, small total variation",
    "eq:clipping-safe-region": "where the clipped loss is the KL",
}


def tags(path: Path) -> dict[str, list[str]]:
    """Label -> names of the functions, classes or modules that carry it."""
    source = path.read_text(encoding="utf-8")
    spans = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    found: dict[str, list[str]] = {}
    for number, line in enumerate(source.splitlines(), 1):
        for label in TAG.findall(line):
            inside = [(end - start, start, name) for start, end, name in spans if start <= number <= end]
            outer = [name for _, _, name in sorted(inside, reverse=True)]
            place = f"{path.relative_to(ROOT)}" + (f" `{'.'.join(outer)}`" if outer else "")
            if place not in found.setdefault(label, []):
                found[label].append(place)
    return found


def render() -> str:
    """The page."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "past_opsd").rglob("*.py")):
        for label, names in tags(path).items():
            places.setdefault(label, []).extend(names)
    unknown = sorted(set(places) - set(EQUATIONS))
    missing = sorted(set(EQUATIONS) - set(places))
    if unknown or missing:
        sys.exit(f"equations: tags the script does not know: {unknown}; equations no code carries: {missing}")
    lines = [
        "# Where each equation lives",
        "",
        "Made by `python scripts/equations.py --write` from the tags in the code; a test fails when it is stale.",
        "",
        "| equation | what it says | where |",
        "|---|---|---|",
    ]
    for label, text in EQUATIONS.items():
        # A function says more than its module's header: name the module alone only where nothing else is tagged.
        named = [p for p in places[label] if "`" in p] or places[label]
        lines.append(f"| `{label}` | {text} | {'<br>'.join(named)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check."""
    page = render()
    if "--write" in sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        print("docs/equations.md is stale: run `python scripts/equations.py --write`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
