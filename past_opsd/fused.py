"""From hidden states and the frozen head to losses, their gradient and diagnostics, chunk by chunk.

The head is frozen and every weight is known beforehand, so the gradient with respect to the live hidden states
is made together with the value: per chunk of positions two projections (live and frozen), one elementwise pass,
one projection back. Five implementations of the same function, cf. tab:full-vocab-implementation:

- `reference`: dense autograd through the losses, projections in float32;
- `bf16`: dense autograd, hidden states, head, logits and their gradient rounded to bfloat16, softmax and loss in
  float32 (on a CPU, which may lack bfloat16 units, the rounded operands are multiplied in float32);
- `chunked`: autograd chunk by chunk, projections in the head's dtype;
- `fused`: closed-form gradients written over the logits, chunk by chunk, projections in the head's dtype;
- `triton`: `fused` with its elementwise pass as one GPU kernel, see `past_opsd.fused_triton`; rows with a loss that
  has no closed form run as `chunked`.

Softmax and losses are always float32 (float64 where the head is float64).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from past_opsd.losses import Entrywise, Imitate, Loss, MatchPlusCE, TokenWise, at_tokens, select
from past_opsd.types import PastError

Implementation = Literal["reference", "bf16", "chunked", "fused", "triton"]
DEFAULT_BUDGET = 224 * 2**20
CLIP_ROWS = ("kl", "clipped", "removed", "dot", "norm_clipped", "norm_unclipped")

# What a thread of `fused` touches at once, so that it stays in cache: bytes of a block of rows in the elementwise
# pass (larger on other devices), and entries of the head in a projection (all where the product itself is shared).
_BLOCK_BYTES = 2**20
_TILE = 2048
_DEVICE_BLOCK_BYTES = 2**26
# Chunk-sized tensors alive at once when autograd runs a chunk.
_AUTOGRAD_COPIES = 24


@dataclass(frozen=True)
class Job:
    """One loss with its weight per row [T]; the loss does not exist where the weight is 0.

    `always` evaluates it there too, for its values and diagnostics, without a gradient. `frozen=False` hides the
    frozen view from this loss: a Reinforce whose old policy is the live one can so share its rows with a divergence
    that does read the frozen view.
    """

    loss: Loss
    weight: Tensor
    frozen: bool = True
    always: bool = False


@dataclass(frozen=True)
class Result:
    """What `run` gives back, all detached.

    `grad` [T, H] is d/d live_hidden of sum_jobs sum_rows weight * loss. `values` holds each job's unweighted
    loss per row, 0 where its weight is 0. `rows` holds diagnostics per row: `entropy` of the live view and
    `token_logp`; and where a Match, Stay or GeneralizedJSD applies (0 elsewhere; the last such job wins)
    `kl`, the unclipped divergence, `clipped`, the fraction of its entries at or above tau, `removed`, the mass
    cut off above tau, and `norm_clipped`, `norm_unclipped` and `dot`, the Euclidean norms and the inner product
    of the logit gradients with and without the clip.
    """

    grad: Tensor
    values: list[Tensor]
    rows: dict[str, Tensor]


@dataclass(frozen=True)
class Heads:
    """Both views' heads and biases, and the temperature of their logits."""

    live: Tensor
    live_bias: Tensor | None
    frozen: Tensor
    frozen_bias: Tensor | None
    temperature: float

    @property
    def dtype(self) -> torch.dtype:
        """Of softmax and losses."""
        return torch.float64 if self.live.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Part:
    """A job's loss on the rows at hand; a MatchPlusCE makes two parts."""

    job: int
    factor: float
    loss: Loss
    weight: Tensor
    frozen: bool

    def at(self, rows: Tensor | slice) -> Part:
        return Part(self.job, self.factor, select(self.loss, rows), self.weight[rows], self.frozen)


@dataclass(frozen=True)
class Rows:
    """Rows to which the same parts apply, and where their results go."""

    live: Tensor
    frozen: Tensor | None
    tokens: Tensor
    parts: list[Part]
    grad: Tensor
    values: list[Tensor]
    diagnostics: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, rows: Tensor | slice) -> Rows:
        """Some of the rows: views for a slice, copies for indices."""
        if isinstance(rows, slice) and rows == slice(0, len(self)):
            return self
        return Rows(
            self.live[rows],
            None if self.frozen is None else self.frozen[rows],
            self.tokens[rows],
            [part.at(rows) for part in self.parts],
            self.grad[rows],
            [value[rows] for value in self.values],
            {name: row[rows] for name, row in self.diagnostics.items()},
        )


# Fills in the rows' values and diagnostics from live and frozen logits, and writes the logit gradient into the last
# argument, one of the two.
Elementwise = Callable[[Heads, Rows, Tensor, Tensor | None, Tensor], None]


def run(
    implementation: Implementation,
    live_hidden: Tensor,
    frozen_hidden: Tensor | None,
    head: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    jobs: Sequence[Job],
    *,
    temperature: float = 1.0,
    frozen_head: Tensor | None = None,
    frozen_bias: Tensor | None = None,
    budget_bytes: int = DEFAULT_BUDGET,
    diagnostics: bool = True,
) -> Result:
    """Losses, gradient and diagnostics of hidden states [T, H] read along `tokens` [T] under a head [V, H].

    Logits are (hidden @ head.T + bias) / temperature. The frozen view uses the same head and bias unless
    `frozen_head` is given (then `frozen_bias` is its bias). `budget_bytes` bounds the logits held at once by
    `chunked`, `fused` and `triton`. No autograd graph leaves the function. A bias with entries that are not finite is
    beyond `fused`, which then runs as `chunked`, slower and with the same result.
    """
    require(implementation, live_hidden.device)
    heads = Heads(head, bias, head, bias, temperature)
    if frozen_head is not None:
        heads = Heads(head, bias, frozen_head, frozen_bias, temperature)
    _check(live_hidden, frozen_hidden, heads, tokens, jobs)
    biases = (heads.live_bias, heads.frozen_bias)
    if implementation == "fused" and any(b is not None and not b.isfinite().all() for b in biases):
        # The closed forms need finite log-ratios; a bias of -inf takes entries out of the vocabulary.
        implementation = "chunked"
    parts = list(_parts(jobs, frozen_hidden))
    names = ("entropy", "token_logp") if diagnostics else ()
    if diagnostics and any(isinstance(part.loss, Entrywise) for part in parts):
        names += CLIP_ROWS
    whole = Rows(
        live_hidden.detach(),
        frozen_hidden,
        tokens,
        parts,
        grad=torch.zeros_like(live_hidden, requires_grad=False),
        values=[live_hidden.new_zeros(len(tokens), dtype=heads.dtype) for _ in jobs],
        diagnostics={name: live_hidden.new_zeros(len(tokens), dtype=heads.dtype) for name in names},
    )
    with torch.no_grad():
        for index, applying in _groups(jobs):
            if applying or diagnostics:
                _run_group(implementation, heads, whole, index, applying, budget_bytes)
    return Result(whole.grad, whole.values, whole.diagnostics)


def require(implementation: Implementation, device: torch.device) -> None:
    """Refuse an implementation that does not exist or cannot run on this device."""
    if implementation not in get_args(Implementation):
        raise PastError(f"unknown implementation {implementation!r}; use one of {', '.join(get_args(Implementation))}")
    if implementation == "triton":
        _kernel(device)


def _check(live: Tensor, frozen: Tensor | None, heads: Heads, tokens: Tensor, jobs: Sequence[Job]) -> None:
    T, (V, H), (V_frozen, H_frozen) = len(tokens), heads.live.shape, heads.frozen.shape
    if live.shape != (T, H):
        raise PastError(f"live hidden states are {tuple(live.shape)}; {T} tokens and the head need ({T}, {H})")
    if frozen is not None and frozen.shape != (T, H_frozen):
        raise PastError(f"frozen hidden states are {tuple(frozen.shape)}; ({T}, {H_frozen}) is needed")
    if V_frozen != V:
        raise PastError(f"the frozen head has {V_frozen} entries and the live head {V}; they must share a vocabulary")
    for i, job in enumerate(jobs):
        if job.weight.shape != (T,):
            raise PastError(f"job {i}: weight is {tuple(job.weight.shape)}; one weight a row, ({T},), is needed")


def _parts(jobs: Sequence[Job], frozen: Tensor | None) -> Iterator[Part]:
    for i, job in enumerate(jobs):
        reads = job.frozen and frozen is not None
        for factor, loss in job.loss.parts if isinstance(job.loss, MatchPlusCE) else ((1.0, job.loss),):
            if isinstance(loss, Entrywise) and not reads:
                raise PastError(f"job {i}: {type(loss).__name__} compares with a frozen view, and none was given")
            yield Part(i, factor, loss, job.weight, reads and not isinstance(loss, Imitate))


def _groups(jobs: Sequence[Job]) -> Iterator[tuple[Tensor | None, list[int]]]:
    """Rows by the set of jobs that apply to them: (row indices, or None for all rows; the jobs)."""
    if not jobs:
        yield None, []
        return
    applies = torch.stack([(job.weight != 0) | job.always for job in jobs], dim=1)
    if applies.all():
        yield None, list(range(len(jobs)))
        return
    members: dict[tuple[bool, ...], list[int]] = {}
    for row, pattern in enumerate(applies.tolist()):
        members.setdefault(tuple(pattern), []).append(row)
    for pattern, rows in members.items():
        yield torch.tensor(rows, device=applies.device), [i for i, applied in enumerate(pattern) if applied]


def _run_group(
    implementation: Implementation, heads: Heads, whole: Rows, index: Tensor | None, applying: list[int], budget: int
) -> None:
    parts = [part for part in whole.parts if part.job in applying]
    rows = replace(whole, parts=parts, frozen=whole.frozen if any(part.frozen for part in parts) else None)
    if index is not None:
        rows = rows.at(index)
    if implementation == "triton" and any(not isinstance(part.loss, Entrywise | TokenWise) for part in parts):
        implementation = "chunked"
    if implementation in ("fused", "triton"):
        _fused(heads, rows, budget, _elementwise if implementation == "fused" else _kernel(rows.live.device))
    elif implementation == "chunked":
        for chunk in _chunks(len(rows), budget, _AUTOGRAD_COPIES * heads.live.shape[0] * heads.dtype.itemsize):
            _autograd(heads, heads.live.dtype, rows.at(chunk))
    else:
        _autograd(heads, torch.bfloat16 if implementation == "bf16" else heads.dtype, rows)
    if index is not None:
        whole.grad[index] = rows.grad
        for value, part in zip(whole.values, rows.values, strict=True):
            value[index] = part
        for name, row in whole.diagnostics.items():
            row[index] = rows.diagnostics[name]


def _chunks(n: int, budget: int, row_bytes: int) -> Iterator[slice]:
    """Even slices of n rows, each as many rows as the budget holds."""
    count = math.ceil(n / max(1, budget // row_bytes))
    size = math.ceil(n / max(1, count))
    for start in range(0, n, max(1, size)):
        yield slice(start, min(start + size, n))


def _autograd(heads: Heads, dtype: torch.dtype, rows: Rows) -> None:
    """Autograd through the losses on dense logits of these rows, projected in `dtype`."""

    def log_probabilities(hidden: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
        head, bias = head.to(dtype), None if bias is None else bias.to(dtype)
        if dtype == torch.bfloat16 and hidden.device.type == "cpu":
            logits = F.linear(hidden.float(), head.float(), None if bias is None else bias.float()).to(dtype)
        else:
            logits = F.linear(hidden, head, bias)
        return torch.log_softmax(logits.to(heads.dtype) / heads.temperature, dim=-1)

    frozen_logp = None
    if rows.frozen is not None:
        frozen_logp = log_probabilities(rows.frozen.to(dtype), heads.frozen, heads.frozen_bias)
    with torch.enable_grad():
        hidden = rows.live.to(dtype, copy=True).requires_grad_()
        live_logp = log_probabilities(hidden, heads.live, heads.live_bias)
        total = live_logp.new_zeros(())
        for part in rows.parts:
            value = part.loss(live_logp, frozen_logp if part.frozen else None, rows.tokens)
            total = total + part.factor * (part.weight.to(value.dtype) * value).sum()
            rows.values[part.job].add_(value.detach(), alpha=part.factor)
        if rows.parts:
            rows.grad.copy_(torch.autograd.grad(total, hidden)[0])
    if not rows.diagnostics:
        return
    live_logp = live_logp.detach()
    rows.diagnostics["entropy"].copy_(torch.special.entr(live_logp.exp()).sum(-1))
    rows.diagnostics["token_logp"].copy_(at_tokens(live_logp, rows.tokens))
    for part in rows.parts:
        if isinstance(part.loss, Entrywise) and frozen_logp is not None:
            _diagnose(part.loss, live_logp, frozen_logp, rows.diagnostics)


def _diagnose(loss: Entrywise, live_logp: Tensor, frozen_logp: Tensor, out: dict[str, Tensor]) -> None:
    """The diagnostics of a clipped divergence, densely and by definition."""
    q, p, log_ratio = live_logp.exp(), frozen_logp.exp(), (frozen_logp - live_logp).nan_to_num(nan=0.0)
    c, b = torch.empty_like(q), torch.empty_like(q)
    loss.entries(q, p, log_ratio, c, b)
    kl = c.sum(-1, keepdim=True)
    clippable = c if loss.mode == "entry" else kl
    keep = (clippable < loss.tau).expand_as(c)
    unclipped = b - q * b.sum(-1, keepdim=True)
    b *= keep
    clipped = b - q * b.sum(-1, keepdim=True)
    out["kl"].copy_(kl.squeeze(-1))
    out["clipped"].copy_((~keep).sum(-1, dtype=q.dtype) / c.shape[-1])
    out["removed"].copy_((clippable - loss.tau).clamp(min=0).sum(-1))
    out["dot"].copy_((clipped * unclipped).sum(-1))
    out["norm_clipped"].copy_(clipped.norm(dim=-1))
    out["norm_unclipped"].copy_(unclipped.norm(dim=-1))


def _kernel(device: torch.device) -> Elementwise:
    """The elementwise pass in Triton, refused where it cannot run."""
    if importlib.util.find_spec("triton") is None:
        raise PastError(
            "implementation 'triton' needs the package triton: pip install 'past-opsd[triton]' (Linux), or use 'fused'"
        )
    from past_opsd import fused_triton

    fused_triton.check(device)
    return fused_triton.elementwise


def _fused(heads: Heads, rows: Rows, budget: int, elementwise: Elementwise) -> None:
    """Per chunk: project, overwrite logits with the gradient block by block, project back.

    A chunk with a frozen view that does not fit whole goes in two halves through a buffer of one and a half chunks,
    [z1 x1 -] and then [g1 x2 z2]; the second gradient goes where x2 was, so that one product takes both back.
    """
    row_bytes = heads.live.shape[0] * heads.live.dtype.itemsize
    logits = heads.live.new_empty(0)
    views = 1.0 if rows.frozen is None else 2.0 if 2 * len(rows) * row_bytes <= budget else 1.5
    for span in _chunks(len(rows), budget, int(views * row_bytes)):
        chunk = rows.at(span)
        n = len(chunk)
        half = (n + 1) // 2 if views == 1.5 else n
        if not len(logits):
            logits = heads.live.new_empty((n if rows.frozen is None else n + half, heads.live.shape[0]))
        z, x = _project(heads, chunk.at(slice(0, half)), logits)
        elementwise(heads, chunk.at(slice(0, half)), z, x, z)
        if half < n:
            z, x = _project(heads, chunk.at(slice(half, n)), logits[half:], frozen_first=True)
            elementwise(heads, chunk.at(slice(half, n)), z, x, logits[half:n])
        if chunk.parts:
            chunk.grad.copy_(torch.mm(logits[:n], heads.live)).div_(heads.temperature)


def _elementwise(heads: Heads, chunk: Rows, z: Tensor, x: Tensor | None, out: Tensor) -> None:
    """`_block` on every block of rows, the blocks shared among as many threads as torch has.

    Threads over blocks wait for each other once; threads inside each operation would wait thousands of times.
    """
    n, V, on_cpu = len(chunk), heads.live.shape[0], z.device.type == "cpu"
    size = (_BLOCK_BYTES if on_cpu else _DEVICE_BLOCK_BYTES) // (V * heads.dtype.itemsize)
    size = max(1, min(n, size))
    blocks = [slice(start, min(start + size, n)) for start in range(0, n, size)]
    threads = torch.get_num_threads()
    workers = min(threads, len(blocks)) if on_cpu else 1
    scratch = torch.empty((workers, 5, size, V), dtype=heads.dtype, device=z.device)

    def work(worker: int) -> None:
        with torch.no_grad():
            for at in blocks[worker::workers]:
                frozen = None if x is None else x[at]
                _block(heads, chunk.at(at), z[at], frozen, out[at], scratch[worker, :, : at.stop - at.start])

    if workers == 1:
        work(0)
        return
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            list(pool.map(work, range(workers)))
        finally:
            torch.set_num_threads(threads)


def _project(heads: Heads, rows: Rows, logits: Tensor, frozen_first: bool = False) -> tuple[Tensor, Tensor | None]:
    """Live and frozen logits, without bias and temperature, one after the other in `logits`."""
    n, live = len(rows), rows.live.to(heads.live.dtype)
    if rows.frozen is None:
        _matmul(live, heads.live, logits[:n])
        return logits[:n], None
    z, x = logits[:n], logits[n : 2 * n]
    if frozen_first:
        z, x = x, z
    if heads.frozen is heads.live:
        # One product for both views reads the head once.
        frozen = rows.frozen.to(live.dtype)
        _matmul(torch.cat((frozen, live) if frozen_first else (live, frozen)), heads.live, logits[: 2 * n])
    else:
        _matmul(live, heads.live, z)
        _matmul(rows.frozen.to(heads.frozen.dtype), heads.frozen, x)
    return z, x


def _matmul(hidden: Tensor, head: Tensor, out: Tensor) -> None:
    tiled = hidden.device.type == "cpu" and torch.get_num_threads() == 1
    tile = _TILE if tiled else max(1, len(head))
    for start in range(0, len(head), tile):
        at = slice(start, start + tile)
        if hidden.dtype == out.dtype:
            torch.mm(hidden, head[at].t(), out=out[:, at])
        else:
            out[:, at] = torch.mm(hidden, head[at].t())


def _block(
    heads: Heads, rows: Rows, live_logits: Tensor, frozen_logits: Tensor | None, out: Tensor, scratch: Tensor
) -> None:
    """The elementwise pass: fill in values and diagnostics, write the logit gradient into `out`, one of the two."""
    q, p, c, b, work = scratch.unbind()
    z, z_top, q_top = _normalise(live_logits, heads.live_bias, heads.temperature, q)
    live_token, frozen_token, x = at_tokens(z, rows.tokens) - z_top + q_top, None, None
    if rows.diagnostics:
        rows.diagnostics["entropy"].copy_(z_top - torch.mul(q, z, out=work).sum(-1) - q_top)
        rows.diagnostics["token_logp"].copy_(live_token)
    if frozen_logits is not None:
        x, x_top, p_top = _normalise(frozen_logits, heads.frozen_bias, heads.temperature, p)
        frozen_token = at_tokens(x, rows.tokens) - x_top + p_top
        # log p - log q; differences of like with like come first, where views agree nothing is rounded.
        x.sub_(z).sub_(((x_top - z_top) + (q_top - p_top)).unsqueeze(-1))
    live_logp = None
    if any(not isinstance(part.loss, Entrywise | TokenWise) for part in rows.parts):
        live_logp = (z - z_top.unsqueeze(-1)).add_(q_top.unsqueeze(-1))
    z.zero_()
    for part in rows.parts:
        weight = (part.factor * part.weight.to(z.dtype)).unsqueeze(-1)
        if isinstance(part.loss, TokenWise):
            value, slope = part.loss.slope(live_token, frozen_token if part.frozen else None)
            slope = slope.unsqueeze(-1) * weight
            z.addcmul_(q, -slope).scatter_add_(1, rows.tokens.unsqueeze(-1), slope)
        elif isinstance(part.loss, Entrywise) and x is not None:
            value, grad = _entrywise(part.loss, q, p, x, (c, b, work), rows.diagnostics)
            z.addcmul_(grad, weight)
        else:
            assert live_logp is not None
            value, grad = _by_autograd(part, live_logp, x, rows.tokens)
            z.add_(grad.sub_(q * grad.sum(-1, keepdim=True)).mul_(weight))
        rows.values[part.job].add_(value, alpha=part.factor)
    if z.data_ptr() != out.data_ptr():
        out.copy_(z)


def _normalise(logits: Tensor, bias: Tensor | None, temperature: float, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finish the logits and put their softmax into `out`; return them, their maximum and its log-probability."""
    logits = logits.to(out.dtype)
    if bias is not None:
        logits.add_(bias)
    if temperature != 1:
        logits.div_(temperature)
    torch.softmax(logits, -1, out=out)
    return logits, logits.amax(-1), out.amax(-1).log_()


def _by_autograd(part: Part, live_logp: Tensor, log_ratio: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient with respect to the log-probabilities, for a loss without a closed form."""
    frozen_logp = live_logp + log_ratio if part.frozen and log_ratio is not None else None
    with torch.enable_grad():
        live = live_logp.detach().requires_grad_()
        value = part.loss(live, frozen_logp, tokens)
        return value.detach(), torch.autograd.grad(value.sum(), live)[0]


def _entrywise(
    loss: Entrywise, q: Tensor, p: Tensor, log_ratio: Tensor, buffers: tuple[Tensor, ...], out: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Values and logit gradient, the latter in one of the buffers; diagnostics go to `out`."""
    c, b, work = buffers
    loss.entries(q, p, log_ratio, c, b)
    kl = value = c.sum(-1)
    # Written so that a NaN in one row does not keep the others from being clipped.
    cut = loss.tau < math.inf and not bool((c.amax() if loss.mode == "entry" else kl.amax()) < loss.tau)
    kept = c
    if cut and loss.mode == "entry":
        value = c.clamp_(max=loss.tau).sum(-1)
        kept = c.lt_(loss.tau)
    elif cut:
        value = kl.clamp(max=loss.tau)
        kept = c.copy_((kl < loss.tau).unsqueeze(-1).expand_as(c))
    clipped = (c.shape[-1] - kept.sum(-1)) / c.shape[-1] if cut else torch.zeros_like(kl)
    # c becomes the clipped gradient m b - q sum(m b), b the unclipped one; nothing clipped, they are the same.
    if cut:
        c.mul_(b).addcmul_(q, c.sum(-1, keepdim=True), value=-1)
    if out or not cut:
        b.addcmul_(q, b.sum(-1, keepdim=True), value=-1)
    grad = c if cut else b
    if out:
        square = torch.mul(b, b, out=work).sum(-1)
        out["kl"].copy_(kl)
        out["clipped"].copy_(clipped)
        out["removed"].copy_(kl - value)
        out["norm_unclipped"].copy_(square.sqrt())
        out["norm_clipped"].copy_((torch.mul(c, c, out=work).sum(-1) if cut else square).sqrt())
        out["dot"].copy_(torch.mul(b, c, out=work).sum(-1) if cut else square)
    return value, grad
