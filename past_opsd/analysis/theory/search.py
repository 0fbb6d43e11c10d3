"""Numeric minimisation that knows nothing of the closed forms it is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from past_opsd.analysis.theory.finite import Floats

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def golden(objective: Callable[[float], float], low: float, high: float) -> float:
    """The minimiser of a unimodal function of one number, by golden-section search."""
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = objective(a), objective(b)
    for _ in range(60):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = objective(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = objective(b)
    return (low + high) / 2.0


def minimise(objective: Callable[[Tensor], Tensor], start: Floats) -> Floats:
    """The distributions [N, V] that minimise `objective(log-probabilities)`, from logits `start`, by L-BFGS."""
    logits = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"max_iter": 2000, "history_size": 20, "tolerance_grad": 1e-11, "tolerance_change": 1e-16}
    solver = torch.optim.LBFGS([logits], line_search_fn="strong_wolfe", **options)

    def closure() -> float:
        solver.zero_grad()
        value = objective(torch.log_softmax(logits, dim=-1))
        value.backward()
        return float(value.detach())

    solver.step(closure)
    return np.asarray(torch.softmax(logits.detach(), dim=-1))
