"""How far apart two ways to the same float32 number may end, by counting roundings.

A sum of n terms is off by at most n * eps / 2 of the sum of their sizes, in whatever order a machine takes it, so two
orders differ by at most n * eps; along a chain of products the counts add up. An entry that is small because large
terms cancelled keeps the error of those terms: a bound is relative to the largest entry, never to the entry itself.
For the same reason an optimizer that divides a gradient by its own size is taken out of a comparison: with `follow`
an AdamW step is the gradient, up to a smooth function.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
# A gradient of the embedded model: in each of three blocks some 750 additions (products over 64 and 192 terms, norms,
# attention over at most 200 positions), as many again on the way back, and a sum over at most 2,000 tokens.
CHAIN = 2**13


def follow(*adapters: str) -> list[str]:
    """Settings with which AdamW's first step is lr * g / (|g| + 1): it follows the gradient's size, tiny or not."""
    return [f"learner.{a}.{k}" for a in adapters for k in ("eps=1.0", "lr=1.0", "max_grad_norm=1e9")]


def assert_rounding(found: Tensor, want: Tensor, scale: float, roundings: int = CHAIN) -> None:
    """`found` is `want` up to so many roundings of numbers of size `scale`, and the last bit of what is stored."""
    assert found.shape == want.shape
    error = float((found.detach().double() - want.detach().double()).abs().max())
    bound = EPS * (roundings * scale + float(want.detach().abs().max()))
    assert error <= bound, f"{error:.2e} apart, {bound:.2e} allowed: {roundings} roundings of {scale:.2e}"
