"""The paper's theory: its quantities on finite distributions, and exact checks of its statements (`past theory`)."""

from __future__ import annotations

from past_opsd.analysis.theory.finite import (
    Decomposition,
    barycenter,
    clipping_floor,
    decompose,
    geometric_barycenter,
    js,
    kl,
    reverse_floor,
    tv,
    value_shift,
)
from past_opsd.analysis.theory.process import Process, Shape, perfect_teacher, random_process

__all__ = [
    "Decomposition",
    "Process",
    "Shape",
    "barycenter",
    "clipping_floor",
    "decompose",
    "geometric_barycenter",
    "js",
    "kl",
    "perfect_teacher",
    "random_process",
    "reverse_floor",
    "tv",
    "value_shift",
]
