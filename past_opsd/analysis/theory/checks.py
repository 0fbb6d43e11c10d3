"""All checks, in the order of the paper."""

from __future__ import annotations

from past_opsd.analysis.theory import adaptive, clipping, projection, transfer
from past_opsd.analysis.theory.check import Check

GROUPS = (
    projection.causal_projection,
    projection.restricted_projection,
    projection.privilege_shift,
    transfer.no_transfer,
    transfer.value_alignment,
    transfer.outcome_branches,
    transfer.outcome_margin,
    transfer.compatibility,
    transfer.local_improvement,
    projection.forward_and_reverse,
    clipping.correct_branch,
    clipping.safe_region,
    clipping.fixed_point_curvature,
    clipping.counter_example,
    adaptive.fixed_groups,
    adaptive.adaptive_groups,
    adaptive.controlled,
)


def checks(seed: int = 0) -> list[Check]:
    """Every proposition, corollary and identity of the theory, on finite problems drawn from `seed`."""
    return [check for group in GROUPS for check in group(seed)]
