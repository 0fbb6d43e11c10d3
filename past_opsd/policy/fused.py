"""From hidden states and the frozen head to losses, their gradient and diagnostics, chunk by chunk.

The head is frozen and every weight is known beforehand, so the gradient with respect to the live hidden states
is made together with the value: per chunk of positions two projections (live and frozen), one elementwise pass,
one projection back. T counts positions, H is the width of a hidden state, V the size of the vocabulary. Five
implementations of the same function, cf. tab:full-vocab-implementation:

- `reference`: dense autograd through the losses, projections in float32;
- `bf16`: dense autograd, hidden states, head, logits and their gradient rounded to bfloat16, softmax and loss in
  float32 (on a CPU, which may lack bfloat16 units, the rounded operands are multiplied in float32);
- `chunked`: autograd chunk by chunk, projections in the head's dtype;
- `fused`: closed-form gradients written over the logits, chunk by chunk, projections in the head's dtype;
- `triton`: `fused` with its elementwise pass as one GPU kernel, see `past_opsd.policy.fused_triton`; positions with a
  loss that has no closed form run as `chunked`.

`settle` says which of them "auto" is on a device.

Softmax and losses are always float32 (float64 where the head is float64).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from past_opsd.core.losses import Block, Imitate, Loss, Match, Stay, at_tokens, fill
from past_opsd.core.nouns import PastError

Implementation = Literal["reference", "bf16", "chunked", "fused", "triton"]
DEFAULT_BUDGET = 224 * 2**20
KERNEL_CAPABILITY = (8, 0)  # the least for which the kernel is compiled in the tests
# Of a gradient's largest entry: float32 exponentials of a GPU are off by some 1e-6, a wrong kernel by far more.
TRIAL_BOUND = 1e-3
CLIP = ("clipped", "removed")
ALIGNMENT = ("dot", "norm_clipped", "norm_unclipped")

# What a thread of `fused` touches at once, so that it stays in cache: bytes of a block of positions in the
# elementwise pass (larger on other devices), and entries of the head in a projection (all where the product itself is
# shared among threads).
BLOCK_BYTES = {"cpu": 2**20, "gpu": 2**26}
_TILE = 2048
# Chunk-sized tensors alive at once when autograd runs a chunk.
_AUTOGRAD_COPIES = 24


@dataclass(frozen=True)
class Job:
    """One loss with its weight per position [T]; the loss does not exist where the weight is 0.

    `always` evaluates it there too, for its values and diagnostics, without a gradient. `frozen=False` hides the
    frozen view from this loss: a Reinforce whose old policy is the live one can so share its positions with a
    divergence that does read the frozen view.
    """

    loss: Loss
    weight: Tensor
    frozen: bool = True
    always: bool = False

    def at(self, positions: Tensor | slice) -> Job:
        """The same job on some of its positions."""
        return replace(self, loss=self.loss.at(positions), weight=self.weight[positions])


@dataclass(frozen=True)
class Result:
    """What `run` gives back, all detached.

    `grad` [T, H] is d/d live_hidden of sum_jobs sum_positions weight * loss. `values` holds each job's unweighted loss
    per position [T], 0 where its weight is 0. `live` holds `entropy` and `token_logp` of the live view, [T] each, and
    `diagnostics` what each job's loss says of itself (`Loss.diagnostics`), [T] each, 0 where its weight is 0; both are
    empty where no diagnostics were wanted.
    """

    grad: Tensor
    values: list[Tensor]
    live: dict[str, Tensor]
    diagnostics: list[dict[str, Tensor]]

    def at(self, positions: Tensor | slice) -> Result:
        """Of some of the positions: views for a slice, copies for indices."""
        return replace(self.each(lambda column: column[positions]), grad=self.grad[positions])

    def each(self, change: Callable[[Tensor], Tensor]) -> Result:
        """With another column [T] in the place of each, in a fixed order; the gradient is kept."""
        return Result(
            self.grad,
            [change(value) for value in self.values],
            {name: change(row) for name, row in self.live.items()},
            [{name: change(row) for name, row in found.items()} for found in self.diagnostics],
        )

    def of(self, jobs: Sequence[int]) -> Result:
        """Of some of the jobs."""
        return replace(self, values=[self.values[i] for i in jobs], diagnostics=[self.diagnostics[i] for i in jobs])

    def put(self, positions: Tensor, other: Result) -> None:
        """Take over another result of the same jobs at these positions."""
        self.grad[positions] = other.grad
        for mine, theirs in zip(self.values, other.values, strict=True):
            mine[positions] = theirs
        for mine, theirs in zip((self.live, *self.diagnostics), (other.live, *other.diagnostics), strict=True):
            for name, row in mine.items():
                row[positions] = theirs[name]


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
class Chunk:
    """Positions to which the same jobs apply, and where their results go: live [T, H], frozen [T, H'], tokens [T]."""

    live: Tensor
    frozen: Tensor | None
    tokens: Tensor
    jobs: list[Job]
    result: Result

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, positions: Tensor | slice) -> Chunk:
        """Some of the positions: views for a slice, copies for indices."""
        if isinstance(positions, slice) and positions == slice(0, len(self)):
            return self
        return Chunk(
            self.live[positions],
            None if self.frozen is None else self.frozen[positions],
            self.tokens[positions],
            [job.at(positions) for job in self.jobs],
            self.result.at(positions),
        )

    def of(self, applying: Sequence[int]) -> Chunk:
        """With some of the jobs, and with the frozen view where one of them reads it."""
        jobs = [self.jobs[i] for i in applying]
        frozen = self.frozen if any(job.frozen for job in jobs) else None
        return replace(self, jobs=jobs, frozen=frozen, result=self.result.of(applying))


# Fills in the chunk's values and diagnostics from live and frozen logits [T, V], and writes the logit gradient into
# the last argument, one of the two.
Elementwise = Callable[[Heads, Chunk, Tensor, Tensor | None, Tensor], None]


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
    jobs = [_settled(i, job, frozen_hidden) for i, job in enumerate(jobs)]

    def zeros(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: live_hidden.new_zeros(len(tokens), dtype=heads.dtype) for name in names}

    result = Result(
        grad=torch.zeros_like(live_hidden, requires_grad=False),
        values=[live_hidden.new_zeros(len(tokens), dtype=heads.dtype) for _ in jobs],
        live=zeros(("entropy", "token_logp") if diagnostics else ()),
        diagnostics=[zeros(_diagnosed(job) if diagnostics else ()) for job in jobs],
    )
    whole = Chunk(live_hidden.detach(), frozen_hidden, tokens, jobs, result)
    with torch.no_grad():
        for positions, applying in _groups(jobs):
            if applying or diagnostics:
                _run_group(implementation, heads, whole, positions, applying, budget_bytes)
    return result


def require(implementation: Implementation, device: torch.device) -> None:
    """Refuse an implementation that does not exist or cannot run on this device."""
    if implementation not in get_args(Implementation):
        raise PastError(f"unknown implementation {implementation!r}; use one of {', '.join(get_args(Implementation))}")
    if implementation == "triton":
        _kernel(device)


def settle(requested: Implementation | Literal["auto"], device: torch.device) -> tuple[Implementation, str]:
    """The implementation that a setting means on this device, and what a person should know of that choice.

    "auto" is the GPU kernel where it can run and, tried on a few positions, gives what `fused` gives; else `fused`.
    """
    if requested != "auto":
        require(requested, device)
        return requested, ""
    if device.type != "cuda":
        return "fused", ""
    problem = _unfit(torch.cuda.get_device_capability(device)) or _trial(device)
    if problem:
        return "fused", f"losses by 'fused', not by the GPU kernel: {problem}"
    return "triton", "losses by the GPU kernel 'triton'"


def _unfit(capability: tuple[int, int]) -> str:
    """Why the kernel cannot run on a GPU of this capability; empty where it can."""
    if torch.version.hip is not None:
        return "it has been compiled for NVIDIA's GPUs alone"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'past-opsd[triton]')"
    if capability < KERNEL_CAPABILITY:
        return "it needs compute capability {}.{}, and this GPU has {}.{}".format(*KERNEL_CAPABILITY, *capability)
    return ""


def _trial(device: torch.device) -> str:
    """What is wrong with the kernel's values and gradient on a few positions; empty where nothing is."""
    draw = torch.Generator().manual_seed(0)
    live, frozen, head = (torch.randn(n, 16, generator=draw).to(device) for n in (4, 4, 5000))
    tokens, weight = torch.arange(4, device=device), torch.ones(4, device=device)
    jobs = [Job(Match(0.05), weight), Job(Stay(), weight), Job(Imitate(), weight)]
    wanted = run("fused", live, frozen, head, None, tokens, jobs)
    try:
        found = run("triton", live, frozen, head, None, tokens, jobs)
    except Exception as error:  # whatever a compiler, a driver or a GPU may say
        return f"its trial ended in {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    pairs = zip((found.grad, *found.values), (wanted.grad, *wanted.values), strict=True)
    apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return "" if apart < TRIAL_BOUND else f"in its trial it was {apart:.1e} off"


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
            raise PastError(f"job {i}: weight is {tuple(job.weight.shape)}; one weight a position, ({T},), is needed")


def _settled(i: int, job: Job, frozen: Tensor | None) -> Job:
    """The job with its loss as a `Loss`, and with `frozen` only where it does read a frozen view."""
    loss = Loss.of(job.loss)
    reads = job.frozen and frozen is not None and loss.reads_frozen
    if loss.kind == "entries" and not reads:
        raise PastError(f"job {i}: {type(loss).__name__} compares with a frozen view, and none was given")
    return replace(job, loss=loss, frozen=reads)


def _diagnosed(job: Job) -> tuple[str, ...]:
    return (*(("kl",) if job.frozen else ()), *CLIP, *(ALIGNMENT if job.loss.kind == "entries" else ()))


def _groups(jobs: Sequence[Job]) -> Iterator[tuple[Tensor | None, list[int]]]:
    """Positions by the set of jobs that apply to them: (their indices, or None for all; the jobs)."""
    if not jobs:
        yield None, []
        return
    applies = torch.stack([(job.weight != 0) | job.always for job in jobs], dim=1)  # [T, jobs]
    if applies.all():
        yield None, list(range(len(jobs)))
        return
    members: dict[tuple[bool, ...], list[int]] = {}
    patterns = cast(list[list[bool]], applies.tolist())
    for position, pattern in enumerate(patterns):
        members.setdefault(tuple(pattern), []).append(position)
    for pattern, positions in members.items():
        yield torch.tensor(positions, device=applies.device), [i for i, applied in enumerate(pattern) if applied]


def _run_group(
    implementation: Implementation,
    heads: Heads,
    whole: Chunk,
    positions: Tensor | None,
    applying: Sequence[int],
    budget: int,
) -> None:
    group = whole.of(applying)
    if positions is not None:
        group = group.at(positions)
    if implementation == "triton" and any(job.loss.kind == "dense" for job in group.jobs):
        implementation = "chunked"
    if implementation in ("fused", "triton"):
        _fused(heads, group, budget, _elementwise if implementation == "fused" else _kernel(group.live.device))
    elif implementation == "chunked":
        for span in _chunks(len(group), budget, _AUTOGRAD_COPIES * heads.live.shape[0] * heads.dtype.itemsize):
            _autograd(heads, heads.live.dtype, group.at(span))
    else:
        _autograd(heads, torch.bfloat16 if implementation == "bf16" else heads.dtype, group)
    if positions is not None:
        whole.result.of(applying).put(positions, group.result)


def _chunks(n: int, budget: int, position_bytes: int) -> Iterator[slice]:
    """Even slices of n positions, each as many as the budget holds."""
    count = math.ceil(n / max(1, budget // position_bytes))
    size = math.ceil(n / max(1, count))
    for start in range(0, n, max(1, size)):
        yield slice(start, min(start + size, n))


def project(hidden: Tensor, head: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Hidden states [T, H] to logits [T, V], in the head's dtype, or all operands and the result rounded to `dtype`."""
    if dtype is None:
        return F.linear(hidden.to(head.dtype), head, bias)
    hidden, head, bias = hidden.to(dtype), head.to(dtype), None if bias is None else bias.to(dtype)
    if dtype == torch.bfloat16 and hidden.device.type == "cpu":
        return F.linear(hidden.float(), head.float(), None if bias is None else bias.float()).to(dtype)
    return F.linear(hidden, head, bias)


def log_probs(logits: Tensor, temperature: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits [T, V] to log-probabilities, by a softmax in `dtype`."""
    return torch.log_softmax(logits.to(dtype) / temperature, dim=-1)


def _autograd(heads: Heads, dtype: torch.dtype, chunk: Chunk) -> None:
    """Autograd through the losses on dense logits of these positions, projected in `dtype`."""
    result, frozen_logp = chunk.result, None
    if chunk.frozen is not None:
        logits = project(chunk.frozen, heads.frozen, heads.frozen_bias, dtype)
        frozen_logp = log_probs(logits, heads.temperature, heads.dtype)
    with torch.enable_grad():
        hidden = chunk.live.to(dtype, copy=True).requires_grad_()
        logits = project(hidden, heads.live, heads.live_bias, dtype)
        live_logp = log_probs(logits, heads.temperature, heads.dtype)
        total = live_logp.new_zeros(())
        for job, found in zip(chunk.jobs, result.values, strict=True):
            value = job.loss(live_logp, frozen_logp if job.frozen else None, chunk.tokens)
            total = total + (job.weight.to(value.dtype) * value).sum()
            found.add_(value.detach())
        if chunk.jobs:
            result.grad.copy_(torch.autograd.grad(total, hidden)[0])
    if not result.live:
        return
    live_logp = live_logp.detach()
    entropies = cast(Tensor, torch.special.entr(live_logp.exp()))
    result.live["entropy"].copy_(entropies.sum(-1))
    result.live["token_logp"].copy_(at_tokens(live_logp, chunk.tokens))
    for job, found in zip(chunk.jobs, result.diagnostics, strict=True):
        fill(found, job.loss.diagnostics(live_logp, frozen_logp if job.frozen else None, chunk.tokens))


def _kernel(device: torch.device) -> Elementwise:
    """The elementwise pass in Triton, refused where it cannot run."""
    if importlib.util.find_spec("triton") is None:
        raise PastError(
            "implementation 'triton' needs the package triton: pip install 'past-opsd[triton]' (Linux), or use 'fused'"
        )
    from past_opsd.policy import fused_triton

    fused_triton.check(device)
    return fused_triton.elementwise


def _fused(heads: Heads, group: Chunk, budget: int, elementwise: Elementwise) -> None:
    """Per chunk: project, overwrite logits with the gradient block by block, project back.

    A chunk with a frozen view that does not fit whole goes in two halves through a buffer of one and a half chunks,
    [z1 x1 -] and then [g1 x2 z2]; the second gradient goes where x2 was, so that one product takes both back.
    """
    V = heads.live.shape[0]
    position_bytes = V * heads.live.dtype.itemsize
    logits = heads.live.new_empty(0)
    views = 1.0 if group.frozen is None else 2.0 if 2 * len(group) * position_bytes <= budget else 1.5
    for span in _chunks(len(group), budget, int(views * position_bytes)):
        chunk = group.at(span)
        n = len(chunk)
        half = (n + 1) // 2 if views == 1.5 else n
        if not len(logits):
            logits = heads.live.new_empty((n if group.frozen is None else n + half, V))
        z, x = _project(heads, chunk.at(slice(0, half)), logits)  # [half, V] each
        elementwise(heads, chunk.at(slice(0, half)), z, x, z)
        if half < n:
            z, x = _project(heads, chunk.at(slice(half, n)), logits[half:], frozen_first=True)
            elementwise(heads, chunk.at(slice(half, n)), z, x, logits[half:n])
        if chunk.jobs:
            chunk.result.grad.copy_(torch.mm(logits[:n], heads.live)).div_(heads.temperature)  # [n, V] to [n, H]


def _elementwise(heads: Heads, chunk: Chunk, z: Tensor, x: Tensor | None, out: Tensor) -> None:
    """`_block` on every block of positions, the blocks shared among as many threads as torch has.

    Threads over blocks wait for each other once; threads inside each operation would wait thousands of times.
    """
    n, V, on_cpu = len(chunk), heads.live.shape[0], z.device.type == "cpu"
    size = BLOCK_BYTES["cpu" if on_cpu else "gpu"] // (V * heads.dtype.itemsize)
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


def _project(heads: Heads, chunk: Chunk, logits: Tensor, frozen_first: bool = False) -> tuple[Tensor, Tensor | None]:
    """Live and frozen logits [n, V], without bias and temperature, one after the other in `logits`."""
    n, live = len(chunk), chunk.live.to(heads.live.dtype)
    if chunk.frozen is None:
        _matmul(live, heads.live, logits[:n])
        return logits[:n], None
    z, x = logits[:n], logits[n : 2 * n]
    if frozen_first:
        z, x = x, z
    if heads.frozen is heads.live:
        # One product for both views reads the head once.
        frozen = chunk.frozen.to(live.dtype)
        _matmul(torch.cat((frozen, live) if frozen_first else (live, frozen)), heads.live, logits[: 2 * n])
    else:
        _matmul(live, heads.live, z)
        _matmul(chunk.frozen.to(heads.frozen.dtype), heads.frozen, x)
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
    heads: Heads, chunk: Chunk, live_logits: Tensor, frozen_logits: Tensor | None, out: Tensor, scratch: Tensor
) -> None:
    """The elementwise pass: fill in values and diagnostics, write the logit gradient into `out`, one of the two."""
    q, p, c, b, work = scratch.unbind()  # [n, V] each, as are the logits z and x
    result = chunk.result
    z, z_top, q_top = _normalise(live_logits, heads.live_bias, heads.temperature, q)
    live_token, frozen_token, x = at_tokens(z, chunk.tokens) - z_top + q_top, None, None
    if result.live:
        result.live["entropy"].copy_(z_top - torch.mul(q, z, out=work).sum(-1) - q_top)
        result.live["token_logp"].copy_(live_token)
    if frozen_logits is not None:
        x, x_top, p_top = _normalise(frozen_logits, heads.frozen_bias, heads.temperature, p)
        frozen_token = at_tokens(x, chunk.tokens) - x_top + p_top
        # log p - log q; differences of like with like come first, where views agree nothing is rounded.
        x.sub_(z).sub_(((x_top - z_top) + (q_top - p_top)).unsqueeze(-1))
    live_logp = None
    if any(job.loss.kind == "dense" for job in chunk.jobs):
        live_logp = (z - z_top.unsqueeze(-1)).add_(q_top.unsqueeze(-1))
    block = Block(chunk.tokens, q, live_token, live_logp, None if x is None else p, x, frozen_token, (c, b, work))
    z.zero_()
    for job, values, found in zip(chunk.jobs, result.values, result.diagnostics, strict=True):
        weight = job.weight.to(z.dtype).unsqueeze(-1)  # [n, 1]
        values.add_(job.loss.add_gradient(block if job.frozen else block.alone(), weight, z, found))
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
