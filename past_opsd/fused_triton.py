"""The elementwise pass of `past_opsd.fused` as one Triton kernel: a program a row, loops over blocks of its entries.

A launch takes the logits of a chunk and all losses that apply to its rows. A program reads its row

1. for the maximum and the normaliser of each view, and the live view's entropy;
2. once for each divergence, for its value and the sum its gradient subtracts, which a clip makes unforeseeable;
3. for the gradient, written over the logits, and for the norms of clipped and unclipped logit gradients.

Losses on tokens alone skip the second reading. What is between a load and a store stays in registers: beside the
chunk's logits, which the projections need anyway, a call holds a few numbers a row and nothing of the size [T, V].
Arithmetic is float32 (float64 where the head is float64), whatever the logits are.

Losses and their settings are constants of the kernel, so each combination is compiled once. Probabilities of exactly
0 follow `past_opsd.losses`: entries beyond the vocabulary's end, or with a bias of -inf, add nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton import knobs  # pyright: ignore[reportMissingImports]

from past_opsd.losses import Entrywise, GeneralizedJSD, Imitate, Loss, Match, ModulatedReinforce, Reinforce
from past_opsd.types import PastError

if TYPE_CHECKING:
    from past_opsd.fused import Heads, Part, Rows

INTERPRETED: bool = knobs.runtime.interpret
DIAGNOSTICS = ("entropy", "token_logp", "kl", "clipped", "removed", "dot", "norm_clipped", "norm_unclipped")

# Entries of a row that a program holds at once, and the warps that share them.
_BLOCK = 4096
_WARPS = 8

# A part as the kernel knows it: (kind, clip, tau, beta) for a divergence, (kind, reads the frozen view, and the loss's
# two settings) for a loss on tokens.
Key = tuple[int, int, float, float]
_MATCH, _STAY, _JSD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_IMITATE, _SAMPLED, _REINFORCE, _MODULATED = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
_FREE, _ENTRY, _TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def check(device: torch.device) -> None:
    """Refuse a device for which nothing can be compiled."""
    if device.type != "cuda" and not INTERPRETED:
        raise PastError(
            f"implementation 'triton' needs a CUDA GPU, and the hidden states are on '{device}'; use 'fused' "
            "(TRITON_INTERPRET=1 runs the kernel on a CPU, for tests)"
        )


def key(loss: Loss, frozen: bool) -> Key:
    """The loss as constants of the kernel; `frozen` tells whether it may read the frozen view."""
    if isinstance(loss, Entrywise):
        clip = _FREE if loss.tau == math.inf else _ENTRY if loss.mode == "entry" else _TOKEN
        beta = loss.beta if isinstance(loss, GeneralizedJSD) else 0.0 if isinstance(loss, Match) else 1.0
        kind = _MATCH if beta == 0 else _STAY if beta == 1 else _JSD
        return kind.value, clip.value, float(loss.tau), float(beta)
    if isinstance(loss, Imitate):
        return _IMITATE.value, 0, 0.0, 0.0
    if isinstance(loss, Reinforce):
        return _REINFORCE.value, int(frozen), float(loss.epsilon), 0.0
    if not frozen:
        raise PastError(f"{type(loss).__name__} compares with a frozen view, and none was given")
    if isinstance(loss, ModulatedReinforce):
        return _MODULATED.value, 1, float(loss.strength), float(loss.width)
    return _SAMPLED.value, 1, 0.0, 0.0


def elementwise(heads: Heads, chunk: Rows, z: Tensor, x: Tensor | None, out: Tensor) -> None:
    """Fill in values and diagnostics of the chunk and write the logit gradient into `out`, one of the two."""
    n, V = z.shape
    parts: list[Part] = chunk.parts
    weights, advantages, values = z.new_zeros((3, max(1, len(parts)), n), dtype=heads.dtype).unbind()
    for i, part in enumerate(parts):
        torch.mul(part.weight.to(heads.dtype), part.factor, out=weights[i])
        if isinstance(part.loss, Reinforce | ModulatedReinforce):
            advantages[i] = part.loss.advantage
    diagnostics = z.new_zeros((len(DIAGNOSTICS), n), dtype=heads.dtype) if chunk.diagnostics else None
    biases = (None if bias is None else bias.contiguous() for bias in (heads.live_bias, heads.frozen_bias))
    divergences = [i for i, part in enumerate(parts) if isinstance(part.loss, Entrywise)]
    launch: Any = kernel
    with torch.cuda.device_of(z):
        launch[(n,)](
            z, x, out, *biases, chunk.tokens.contiguous(), weights, advantages, values, diagnostics,
            n, V, z.stride(0), 0 if x is None else x.stride(0), out.stride(0),
            TEMPERATURE=float(heads.temperature),
            PARTS=tuple(key(part.loss, part.frozen) for part in parts),
            LAST=max(divergences, default=-1),
            FLOAT=tl.float64 if heads.dtype == torch.float64 else tl.float32,
            BLOCK=min(_BLOCK, triton.next_power_of_2(V)),
            num_warps=_WARPS,
        )  # fmt: skip
    for i, part in enumerate(parts):
        chunk.values[part.job].add_(values[i], alpha=part.factor)
    if diagnostics is not None:
        found: dict[str, Tensor] = dict(zip(DIAGNOSTICS, diagnostics, strict=True))
        for name, row in chunk.diagnostics.items():
            row.copy_(found[name])


@triton.jit
def _load(logits, bias, columns, V, TEMPERATURE: tl.constexpr, FLOAT: tl.constexpr):
    """Finished logits; -inf beyond the vocabulary's end."""
    z = tl.load(logits + columns, mask=columns < V, other=-float("inf")).to(FLOAT)
    if bias is not None:
        z += tl.load(bias + columns, mask=columns < V, other=0.0).to(FLOAT)
    if TEMPERATURE != 1.0:
        z = z / TEMPERATURE
    return z


@triton.jit
def _normalise(logits, bias, V, TEMPERATURE: tl.constexpr, FLOAT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit, one over the sum of exp(z - top), the sum's logarithm, and the entropy."""
    top = tl.full((), -3e38, FLOAT)
    total = tl.full((), 0.0, FLOAT)
    moment = tl.full((), 0.0, FLOAT)
    for start in range(0, V, BLOCK):
        z = _load(logits, bias, start + tl.arange(0, BLOCK), V, TEMPERATURE, FLOAT)
        higher = tl.maximum(top, tl.max(z, 0))
        e = tl.exp(z - higher)
        shift = top - higher
        # moment is the sum of exp(z - top) (z - top), and both factors move with the maximum.
        moment = tl.exp(shift) * (moment + total * shift) + tl.sum(tl.where(e > 0, e * (z - higher), 0.0), 0)
        total = tl.exp(shift) * total + tl.sum(e, 0)
        top = higher
    return top, 1.0 / total, tl.log(total), tl.log(total) - moment / total


@triton.jit
def _probabilities(live, frozen, columns, V, TEMPERATURE: tl.constexpr, FLOAT: tl.constexpr):
    """q, p and log p - log q; a view is (logits or None, bias) and three of `_normalise`."""
    z_row, z_bias, z_top, z_unit, z_log = live
    x_row, x_bias, x_top, x_unit, x_log = frozen
    z = _load(z_row, z_bias, columns, V, TEMPERATURE, FLOAT)
    q = tl.exp(z - z_top) * z_unit
    p = q
    log_ratio = q
    if x_row is not None:
        x = _load(x_row, x_bias, columns, V, TEMPERATURE, FLOAT)
        p = tl.exp(x - x_top) * x_unit
        # Differences of like with like come first: where the views agree nothing is rounded.
        log_ratio = (x - z) - ((x_top - z_top) + (x_log - z_log))
    return q, p, log_ratio


@triton.jit
def _expm1(x):
    """exp(x) - 1; near 0 the error of exp is in both parts of a quotient that is smooth."""
    u = tl.exp(x)
    near = (tl.abs(x) < 0.5) & (u != 1.0)
    return tl.where(near, (u - 1.0) * x / tl.log(tl.where(near, u, 2.0)), tl.where(u == 1.0, x, u - 1.0))


@triton.jit
def _log1p(y):
    """log(1 + y); what 1 + y rounds off is in both parts of a quotient that is smooth."""
    u = 1.0 + y
    return tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _entries(q, p, log_ratio, KIND: tl.constexpr, BETA: tl.constexpr):
    """A divergence's c and b = q dc/dq, as the loss's `entries` gives them, and with probabilities of 0."""
    if KIND == _MATCH:
        c = tl.where(p > 0, p * log_ratio, 0.0)
        b = -p
    elif KIND == _STAY:
        c = tl.where(q > 0, -q * log_ratio, 0.0)
        b = c + q
    else:
        # log(M/q) = log(1 + beta (p/q - 1)). A bound binds only where the probability it falsifies is 0 or e^-80.
        r = tl.where(log_ratio < 80.0, tl.where(log_ratio > -1e4, log_ratio, -1e4), 80.0)
        log_m = _log1p(BETA * _expm1(r))
        b = (BETA - 1.0) * q * log_m
        c = BETA * p * (r - log_m) + b
    return c, b


@triton.jit
def _divergence(
    live, frozen, V, KIND: tl.constexpr, CLIP: tl.constexpr, TAU: tl.constexpr, BETA: tl.constexpr,
    TEMPERATURE: tl.constexpr, FLOAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Value, unclipped value, fraction of entries cut, mass removed, and the sums of kept and of all b."""
    tau = tl.full((), TAU, FLOAT)
    zero = tl.full((), 0.0, FLOAT)
    value, kl, clipped, removed, kept_b, all_b = zero, zero, zero, zero, zero, zero
    kept = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        q, p, log_ratio = _probabilities(live, frozen, columns, V, TEMPERATURE, FLOAT)  # pyright: ignore
        c, b = _entries(q, p, log_ratio, KIND, BETA)
        kl += tl.sum(c, 0)
        all_b += tl.sum(b, 0)
        if CLIP == _ENTRY:
            # A NaN is not cut: it stays in the value.
            value += tl.sum(tl.where(c >= tau, tau, c), 0)
            removed += tl.sum(tl.where(c >= tau, c - tau, 0.0), 0)
            kept += tl.sum(((c < tau) & (columns < V)).to(tl.int32), 0)
            kept_b += tl.sum(tl.where(c < tau, b, 0.0), 0)
    if CLIP == _ENTRY:
        clipped = (V - kept).to(FLOAT) / V
    elif CLIP == _TOKEN:
        value = tl.where(kl >= tau, tau, kl)
        removed = tl.where(kl >= tau, kl - tau, zero)
        clipped = tl.where(kl < tau, zero, zero + 1.0)
        kept_b = tl.where(kl < tau, all_b, zero)
    else:
        value = kl
        kept_b = all_b
    return value, kl, clipped, removed, kept_b, all_b


@triton.jit
def _clamp(x, radius):
    """x, brought to within `radius` of 1."""
    return tl.where(x > 1.0 + radius, 1.0 + radius, tl.where(x < 1.0 - radius, 1.0 - radius, x))


@triton.jit
def _on_token(
    live, frozen, advantage, KIND: tl.constexpr, READS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """A loss and its slope at the token's log-probabilities, as the loss's `slope` gives them."""
    if KIND == _IMITATE:
        value = -live
        slope = tl.full((), -1.0, FLOAT)
    elif KIND == _SAMPLED:
        slope = live - frozen
        value = slope * live
    elif KIND == _MODULATED:
        towards = tl.where(advantage > 0, frozen - live, tl.where(advantage < 0, live - frozen, 0.0))
        value = -advantage * (1.0 - A + A * _clamp(tl.exp(towards), tl.full((), B, FLOAT)))
        slope = value
    elif READS:
        rho = tl.exp(live - frozen)
        free = rho * advantage
        bound = _clamp(rho, tl.full((), A, FLOAT)) * advantage
        value = tl.where(free > bound, -bound, -free)
        slope = tl.where(free > bound, 0.0, -free)
    else:
        value = -advantage
        slope = value
    return value, slope


@triton.jit
def kernel(
    z, x, out, z_bias, x_bias, tokens, weights, advantages, values, diagnostics,
    n, V, z_stride, x_stride, out_stride,
    TEMPERATURE: tl.constexpr, PARTS: tl.constexpr, LAST: tl.constexpr, FLOAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. `weights`, `advantages`, `values` are [parts, n]; `diagnostics` [8, n] are those of part `LAST`."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    z += row * z_stride
    out += row * out_stride
    z_token = _load(z, z_bias, token, V, TEMPERATURE, FLOAT)
    z_top, z_unit, z_log, entropy = _normalise(z, z_bias, V, TEMPERATURE, FLOAT, BLOCK)
    live = (z, z_bias, z_top, z_unit, z_log)
    live_token = z_token - z_top - z_log
    frozen_token = live_token
    frozen = (None, None, z_top, z_unit, z_log)
    if x is not None:
        x += row * x_stride
        x_token = _load(x, x_bias, token, V, TEMPERATURE, FLOAT)
        x_top, x_unit, x_log, _ = _normalise(x, x_bias, V, TEMPERATURE, FLOAT, BLOCK)
        frozen_token = x_token - x_top - x_log
        if LAST >= 0:
            frozen = (x, x_bias, x_top, x_unit, x_log)
    DIAGNOSED: tl.constexpr = diagnostics is not None
    if DIAGNOSED:
        tl.store(diagnostics + row, entropy)
        tl.store(diagnostics + n + row, live_token)

    slope = tl.full((), 0.0, FLOAT)
    sums = ()
    for i in tl.static_range(len(PARTS)):
        if PARTS[i][0] >= _IMITATE:
            advantage = tl.load(advantages + i * n + row)
            value, steep = _on_token(
                live_token, frozen_token, advantage, PARTS[i][0], PARTS[i][1], PARTS[i][2], PARTS[i][3], FLOAT
            )
            slope += tl.load(weights + i * n + row) * steep
            sums = sums + ((slope, slope, slope),)  # noqa: RUF005
        else:
            value, kl, clipped, removed, kept_b, all_b = _divergence(
                live, frozen, V, PARTS[i][0], PARTS[i][1], PARTS[i][2], PARTS[i][3], TEMPERATURE, FLOAT, BLOCK
            )
            sums = sums + ((kl, kept_b, all_b),)  # noqa: RUF005
            if DIAGNOSED and i == LAST:
                tl.store(diagnostics + 2 * n + row, kl)
                tl.store(diagnostics + 3 * n + row, clipped)
                tl.store(diagnostics + 4 * n + row, removed)
        tl.store(values + i * n + row, value)

    if len(PARTS) > 0:
        dot = tl.full((), 0.0, FLOAT)
        square_clipped = tl.full((), 0.0, FLOAT)
        square = tl.full((), 0.0, FLOAT)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            q, p, log_ratio = _probabilities(live, frozen, columns, V, TEMPERATURE, FLOAT)
            gradient = slope * (tl.where(columns == token, 1.0, 0.0) - q)
            for i in tl.static_range(len(PARTS)):
                if PARTS[i][0] < _IMITATE:
                    c, b = _entries(q, p, log_ratio, PARTS[i][0], PARTS[i][3])
                    kl, kept_b, all_b = sums[i]  # pyright: ignore[reportAssignmentType]
                    whole = b - q * all_b
                    part = whole
                    if PARTS[i][1] != _FREE:
                        clippable = c if PARTS[i][1] == _ENTRY else kl
                        tau = tl.full((), PARTS[i][2], FLOAT)
                        part = tl.where(clippable < tau, b, 0.0) - q * kept_b
                    gradient += tl.load(weights + i * n + row) * part
                    if DIAGNOSED and i == LAST:
                        dot += tl.sum(part * whole, 0)
                        square_clipped += tl.sum(part * part, 0)
                        square += tl.sum(whole * whole, 0)
            tl.store(out + columns, gradient.to(out.dtype.element_ty), mask=columns < V)
        if DIAGNOSED and LAST >= 0:
            tl.store(diagnostics + 5 * n + row, dot)
            tl.store(diagnostics + 6 * n + row, tl.sqrt(square_clipped))
            tl.store(diagnostics + 7 * n + row, tl.sqrt(square))
