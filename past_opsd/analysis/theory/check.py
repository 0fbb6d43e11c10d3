"""One checked statement: two sides, how they should compare and by how much they do not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from past_opsd.core.nouns import derive_seed

Relation = Literal["=", ">=", "<="]
Sides = tuple[npt.ArrayLike, npt.ArrayLike]
Pairs = list[Sides]

# Sums of a few thousand float64 terms stay well below the first; a search stops where the objective is flat in
# float64, about the square root of its rounding away from the minimiser.
EXACT, SEARCHED = 1e-9, 1e-6


@dataclass(frozen=True, slots=True)
class Check:
    """A statement of the paper on concrete numbers.

    `left` and `right` are those of the worst of `instances` comparisons: the largest residual, then the least slack.
    The residual of an equation is |left - right| / max(1, |right|), that of an inequality its violation. `exact`
    says that both sides are closed-form sums; otherwise one was found by a numeric search.
    """

    statement: str
    label: str
    left: float
    right: float
    relation: Relation
    residual: float
    exact: bool
    instances: int = 1

    @property
    def ok(self) -> bool:
        """The residual is no more than rounding, or than what a numeric search leaves."""
        return self.residual < (EXACT if self.exact else SEARCHED)


def compare(label: str, statement: str, relation: Relation, pairs: Iterable[Sides], exact: bool = True) -> Check:
    """The check that summarises many comparisons; arrays are compared entry by entry."""
    sides = [np.broadcast_arrays(*(np.asarray(side, dtype=np.float64) for side in pair)) for pair in pairs]
    left, right = (np.concatenate([pair[i].ravel() for pair in sides]) if sides else np.empty(0) for i in (0, 1))
    if not left.size:
        raise ValueError(f"{label}: nothing to compare for {statement!r}; a check without an instance says nothing")
    residuals = residual(left, right, relation)
    # Infinite minus infinite is no slack; such a pair is the worst by its residual already.
    with np.errstate(invalid="ignore"):
        slack = np.abs(left - right) if relation != "=" else -np.abs(right)
    worst = np.lexsort((slack, -residuals))[0]
    found = float(left[worst]), float(right[worst])
    return Check(statement, label, *found, relation, float(residuals[worst]), exact, left.size)


def residual(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64], relation: Relation) -> np.ndarray:
    """By how much the relation fails, entry by entry; infinite for a side that is not a finite number."""
    finite = np.isfinite(left) & np.isfinite(right)
    left, right = np.where(finite, left, 0.0), np.where(finite, right, 0.0)
    gap = left - right if relation == "<=" else right - left
    off = np.abs(gap) / np.maximum(1.0, np.abs(right)) if relation == "=" else np.maximum(0.0, gap)
    return np.where(finite, off, math.inf)


def stream(seed: int, *parts: int | str) -> np.random.Generator:
    """The random numbers of one check."""
    return np.random.default_rng(derive_seed(seed, "theory", *parts))
