# pyright: standard
# Triton's language has no types: inside a kernel everything is unknown.
"""The elementwise pass of `fused.py` as one Triton kernel: a program a position, in blocks of its V entries.

A launch takes the logits of a chunk and all losses that apply to its positions. A program reads its logits

1. for the maximum and the normaliser of each view, and the live view's entropy;
2. once for each divergence, for its value and the sum its gradient subtracts, which a clip makes unforeseeable;
3. for the gradient, written over the logits, for the norms of clipped and unclipped logit gradients, and for
   KL(frozen || live) where no divergence has it as its sum.

Losses on tokens alone skip the second reading. What is between a load and a store stays in registers: beside the
chunk's logits, which the projections need anyway, a call holds a few numbers a position and nothing of the size [T, V].
Arithmetic is float32 (float64 where the head is float64), whatever the logits are.

Losses and their settings are constants of the kernel, so each combination is compiled once. Probabilities of exactly
0 follow `past_opsd.core.losses`: entries beyond the vocabulary's end, or with a bias of -inf, add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton import knobs  # pyright: ignore[reportMissingImports]

from past_opsd.core.losses import (
    Advantaged,
    GeneralizedJSD,
    Imitate,
    Loss,
    Match,
    ModulatedReinforce,
    Reinforce,
    SampledMatch,
    SampledStay,
    Stay,
    fill,
)
from past_opsd.core.nouns import PastError

if TYPE_CHECKING:
    from past_opsd.policy.fused import Chunk, Heads

INTERPRETED: bool = knobs.runtime.interpret
DIAGNOSTICS = ("kl", "clipped", "removed", "dot", "norm_clipped", "norm_unclipped")

# Entries of a position that a program holds at once, and how many of them a warp has. With these no loss spills on
# sm_80, sm_90 or sm_100, and most bytes are under way at once: `past bench kernel` compiles them and their rivals.
BLOCK = 2048
WARP = 512

# A loss as the kernel knows it: (kind, whether it clips, tau, beta) for a divergence, (kind, whether it reads the
# frozen view, and its two settings) for a loss on tokens.
Key = tuple[int, int, float, float]
_MATCH, _STAY, _JSD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_IMITATE, _SAMPLED_STAY, _REINFORCE, _MODULATED = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
_SAMPLED_MATCH = tl.constexpr(7)


def check(device: torch.device) -> None:
    """Refuse a device for which nothing can be compiled."""
    if device.type != "cuda" and not INTERPRETED:
        raise PastError(
            f"implementation 'triton' needs a CUDA GPU, and the hidden states are on '{device}'; use 'fused' "
            "(TRITON_INTERPRET=1 runs the kernel on a CPU, for tests)"
        )


def key(loss: Loss, frozen: bool) -> Key:
    """The loss as constants of the kernel; `frozen` tells whether it may read the frozen view."""
    clips = int(loss.tau < float("inf"))
    match loss:
        case Imitate():
            return _IMITATE.value, 0, 0.0, 0.0
        case Reinforce():
            return _REINFORCE.value, int(frozen), float(loss.epsilon), 0.0
        case _ if not frozen:
            raise PastError(f"{type(loss).__name__} compares with a frozen view, and none was given")
        case Match():
            return _MATCH.value, clips, float(loss.tau), 0.0
        case Stay():
            return _STAY.value, clips, float(loss.tau), 1.0
        case GeneralizedJSD():
            return _JSD.value, clips, float(loss.tau), float(loss.beta)
        case ModulatedReinforce():
            return _MODULATED.value, 1, float(loss.strength), float(loss.width)
        case SampledStay():
            return _SAMPLED_STAY.value, 1, 0.0, 0.0
        case SampledMatch():
            return _SAMPLED_MATCH.value, 1, 0.0, 0.0
        case _:
            raise PastError(f"implementation 'triton' has no kernel for {type(loss).__name__}; use 'fused'")


def shape(V: int) -> tuple[int, int]:
    """Entries of a block and warps of a program, for a vocabulary."""
    block = min(BLOCK, triton.next_power_of_2(V))
    return block, max(1, block // WARP)


def constants(losses: Sequence[tuple[Loss, bool]], diagnosed: bool) -> dict[str, Any]:
    """Losses, each with whether it may read the frozen view, as constants of the kernel.

    `MEASURED` tells that one of them asks for a KL(frozen || live) which is not its own sum, `READ` that the frozen
    view's entries are read again after the normaliser.
    """
    keys = tuple(key(loss, frozen) for loss, frozen in losses)
    measured = diagnosed and any(kind == _JSD.value or (kind > _JSD.value and reads) for kind, reads, _, _ in keys)
    return {"JOBS": keys, "MEASURED": measured, "READ": measured or any(kind <= _JSD.value for kind, *_ in keys)}


def elementwise(heads: Heads, chunk: Chunk, z: Tensor, x: Tensor | None, out: Tensor) -> None:
    """Fill in values and diagnostics of the chunk and write the logit gradient into `out` [n, V], one of the two."""
    n, V = z.shape
    result, count = chunk.result, len(chunk.jobs)
    weights, advantages, values = z.new_zeros((3, max(1, count), n), dtype=heads.dtype).unbind()  # [jobs, n] each
    for i, job in enumerate(chunk.jobs):
        weights[i] = job.weight
        if isinstance(job.loss, Advantaged):
            advantages[i] = job.loss.advantage
    live = z.new_zeros((2, n), dtype=heads.dtype) if result.live else None
    diagnostics = z.new_zeros((max(1, count), len(DIAGNOSTICS), n), dtype=heads.dtype) if result.live else None
    biases = (None if bias is None else bias.contiguous() for bias in (heads.live_bias, heads.frozen_bias))
    block, warps = shape(V)
    launch: Any = kernel
    with torch.cuda.device_of(z):
        launch[(n,)](
            z, x, out, *biases, chunk.tokens.contiguous(), weights, advantages, values, live, diagnostics,
            n, V, z.stride(0), 0 if x is None else x.stride(0), out.stride(0),
            TEMPERATURE=float(heads.temperature),
            **constants([(job.loss, job.frozen) for job in chunk.jobs], diagnostics is not None),
            FLOAT=tl.float64 if heads.dtype == torch.float64 else tl.float32,
            BLOCK=block,
            num_warps=warps,
        )  # fmt: skip
    for mine, theirs in zip(result.values, values, strict=False):
        mine.add_(theirs)
    if live is not None and diagnostics is not None:
        fill(result.live, dict(zip(("entropy", "token_logp"), live, strict=True)))
        for found, rows in zip(result.diagnostics, diagnostics, strict=False):
            fill(found, dict(zip(DIAGNOSTICS, rows, strict=True)))


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
    if KIND == _MATCH or BETA == 0.0:
        c = tl.where(p == 0, 0.0, p * log_ratio)  # a NaN stays
        b = -p
    elif KIND == _STAY or BETA == 1.0:
        c = tl.where(q == 0, 0.0, -q * log_ratio)
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
    live, frozen, V, KIND: tl.constexpr, CLIPS: tl.constexpr, TAU: tl.constexpr, BETA: tl.constexpr,
    TEMPERATURE: tl.constexpr, FLOAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Value, unclipped value, fraction of entries cut, mass removed, and the sums of kept and of all b."""
    tau = tl.full((), TAU, FLOAT)
    zero = tl.full((), 0.0, FLOAT)
    value, whole, clipped, removed, kept_b, all_b = zero, zero, zero, zero, zero, zero
    kept = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        q, p, log_ratio = _probabilities(live, frozen, columns, V, TEMPERATURE, FLOAT)  # pyright: ignore
        c, b = _entries(q, p, log_ratio, KIND, BETA)
        whole += tl.sum(c, 0)
        all_b += tl.sum(b, 0)
        if CLIPS:
            # A NaN is not cut: it stays in the value.
            value += tl.sum(tl.where(c >= tau, tau, c), 0)
            removed += tl.sum(tl.where(c >= tau, c - tau, 0.0), 0)
            kept += tl.sum(((c < tau) & (columns < V)).to(tl.int32), 0)
            kept_b += tl.sum(tl.where(c < tau, b, 0.0), 0)
    if CLIPS:
        clipped = (V - kept).to(FLOAT) / V
    else:
        value = whole
        kept_b = all_b
    return value, whole, clipped, removed, kept_b, all_b


@triton.jit
def _clamp(x, radius):
    """x, brought to within `radius` of 1."""
    return tl.where(x > 1.0 + radius, 1.0 + radius, tl.where(x < 1.0 - radius, 1.0 - radius, x))


@triton.jit
def _on_token(
    live, frozen, advantage, KIND: tl.constexpr, READS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """A loss, its slope and what its clip removes, at the token's log-probabilities, as the loss itself gives them."""
    removed = tl.full((), 0.0, FLOAT)
    if KIND == _IMITATE:
        value = -live
        slope = tl.full((), -1.0, FLOAT)
    elif KIND == _SAMPLED_STAY:
        slope = live - frozen
        value = slope
    elif KIND == _SAMPLED_MATCH:
        slope = tl.exp(live - frozen) - 1.0
        value = slope - (live - frozen)
    elif KIND == _MODULATED:
        towards = tl.where(advantage > 0, frozen - live, tl.where(advantage < 0, live - frozen, 0.0))
        change = tl.exp(tl.where(towards > 80.0, 80.0, towards))
        scale = _clamp(change, tl.full((), B, FLOAT))
        value = -advantage * (1.0 - A + A * scale)
        slope = value
        removed = tl.abs(advantage) * A * tl.abs(change - scale)
    elif READS:
        rho = tl.exp(live - frozen)
        free = rho * advantage
        bound = _clamp(rho, tl.full((), A, FLOAT)) * advantage
        value = tl.where(free > bound, -bound, -free)
        slope = tl.where(free > bound, 0.0, -free)
        removed = tl.where(free > bound, free - bound, 0.0)
    else:
        value = -advantage
        slope = value
    return value, slope, removed


@triton.jit
def kernel(
    z, x, out, z_bias, x_bias, tokens, weights, advantages, values, of_live, diagnostics,
    n, V, z_stride, x_stride, out_stride,
    TEMPERATURE: tl.constexpr, JOBS: tl.constexpr, MEASURED: tl.constexpr, READ: tl.constexpr,
    FLOAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One position. `weights`, `advantages`, `values` are [jobs, n], `of_live` [2, n], `diagnostics` [jobs, 6, n]."""
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
    DIAGNOSED: tl.constexpr = diagnostics is not None
    if x is not None:
        x += row * x_stride
        x_token = _load(x, x_bias, token, V, TEMPERATURE, FLOAT)
        x_top, x_unit, x_log, _ = _normalise(x, x_bias, V, TEMPERATURE, FLOAT, BLOCK)
        frozen_token = x_token - x_top - x_log
        if READ:
            frozen = (x, x_bias, x_top, x_unit, x_log)
    if DIAGNOSED:
        tl.store(of_live + row, entropy)
        tl.store(of_live + n + row, live_token)

    zero = tl.full((), 0.0, FLOAT)
    slope = zero
    sums = ()
    norms = ()
    for i in tl.static_range(len(JOBS)):
        norms = norms + ((zero, zero, zero),)  # noqa: RUF005
        if JOBS[i][0] >= _IMITATE:
            advantage = tl.load(advantages + i * n + row)
            value, steep, removed = _on_token(
                live_token, frozen_token, advantage, JOBS[i][0], JOBS[i][1], JOBS[i][2], JOBS[i][3], FLOAT
            )
            slope += tl.load(weights + i * n + row) * steep
            sums = sums + ((zero, zero),)  # noqa: RUF005
            clipped = tl.where(removed > 0, zero + 1.0, zero)
        else:
            value, whole, clipped, removed, kept_b, all_b = _divergence(
                live, frozen, V, JOBS[i][0], JOBS[i][1], JOBS[i][2], JOBS[i][3], TEMPERATURE, FLOAT, BLOCK
            )
            sums = sums + ((kept_b, all_b),)  # noqa: RUF005
            if DIAGNOSED and JOBS[i][0] != _JSD:
                tl.store(diagnostics + 6 * i * n + row, whole)
        if DIAGNOSED:
            tl.store(diagnostics + (6 * i + 1) * n + row, clipped)
            tl.store(diagnostics + (6 * i + 2) * n + row, removed)
        tl.store(values + i * n + row, value)

    if len(JOBS) > 0:
        kl = zero
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            q, p, log_ratio = _probabilities(live, frozen, columns, V, TEMPERATURE, FLOAT)
            gradient = slope * (tl.where(columns == token, 1.0, 0.0) - q)
            if MEASURED:
                kl += tl.sum(tl.where(p == 0, 0.0, p * log_ratio), 0)
            added = ()
            for i in tl.static_range(len(JOBS)):
                dot, square_clipped, square = norms[i]  # pyright: ignore[reportAssignmentType]
                if JOBS[i][0] < _IMITATE:
                    c, b = _entries(q, p, log_ratio, JOBS[i][0], JOBS[i][3])
                    kept_b, all_b = sums[i]  # pyright: ignore[reportAssignmentType]
                    unclipped = b - q * all_b
                    own = unclipped
                    if JOBS[i][1]:
                        own = tl.where(c < tl.full((), JOBS[i][2], FLOAT), b, 0.0) - q * kept_b
                    gradient += tl.load(weights + i * n + row) * own
                    if DIAGNOSED:
                        dot += tl.sum(own * unclipped, 0)
                        square_clipped += tl.sum(own * own, 0)
                        square += tl.sum(unclipped * unclipped, 0)
                added = added + ((dot, square_clipped, square),)  # noqa: RUF005
            norms = added
            tl.store(out + columns, gradient.to(out.dtype.element_ty), mask=columns < V)
        if DIAGNOSED:
            for i in tl.static_range(len(JOBS)):
                dot, square_clipped, square = norms[i]  # pyright: ignore[reportAssignmentType]
                if JOBS[i][0] >= _JSD:
                    tl.store(diagnostics + 6 * i * n + row, kl)
                tl.store(diagnostics + (6 * i + 3) * n + row, dot)
                tl.store(diagnostics + (6 * i + 4) * n + row, tl.sqrt(square_clipped))
                tl.store(diagnostics + (6 * i + 5) * n + row, tl.sqrt(square))
