"""`past bench divergence`: the full-vocabulary implementations side by side, as in tab:full-vocab-implementation.

Every contestant does one forward and backward from hidden states to the gradient of the live hidden states, the
head frozen. Ours take Match(tau=0.05) with its diagnostics; TRL has no clip and takes the plain forward KL. With
`--dtype bf16` or `fp16` hidden states and head are in half precision, as of a model that is loaded so; `reference`
stays in float32.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import Tensor

from past_opsd.analysis.bench._worker import peak_beyond
from past_opsd.core.losses import Match
from past_opsd.core.nouns import PastError
from past_opsd.policy.fused import Implementation, Job
from past_opsd.policy.fused import run as run_losses

TAU = 0.05
CHECKED_ROWS = 64
GEMMS = ("three GEMMs", "three GEMMs, head in tiles")
TRL_DENSE, TRL_TILED = "TRL dense", "TRL tiled"
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# What a contestant gives: the loss per row and the gradient of the live hidden states.
Outcome = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """Hidden states of two views of the same positions, under one head."""

    live: Tensor
    frozen: Tensor
    head: Tensor
    tokens: Tensor

    @classmethod
    def make(cls, tokens: int, vocab: int, hidden: int) -> Problem:
        """Logits of standard deviation 4, the views a quarter of that apart: KL about 0.45, most rows clipped."""
        draw = torch.Generator().manual_seed(17)
        live = torch.randn(tokens, hidden, generator=draw).mul_(4)
        return cls(
            live,
            torch.randn(tokens, hidden, generator=draw).add_(live),
            torch.randn(vocab, hidden, generator=draw).mul_(hidden**-0.5),
            torch.randint(vocab, (tokens,), generator=draw),
        )

    def to(self, dtype: torch.dtype) -> Problem:
        """The same in another precision."""
        return Problem(self.live.to(dtype), self.frozen.to(dtype), self.head.to(dtype), self.tokens)

    def first(self, rows: int) -> Problem:
        """Some of its positions."""
        return Problem(self.live[:rows], self.frozen[:rows], self.head, self.tokens[:rows])


@dataclass(frozen=True)
class Line:
    """One row of the table; times are medians over the repeats, memory is None where it cannot be measured."""

    name: str
    loss_error: float | None
    cosine: float | None
    mebibytes: float | None
    seconds: float
    cpu_seconds: float
    nonfinite: int | None


def run(args: argparse.Namespace) -> int:
    """Measure and print the table and the ratios."""
    for name in ("tokens", "vocab", "hidden", "threads", "repeats"):
        if vars(args)[name] < 1:
            raise PastError(f"--{name} is {vars(args)[name]}; it must be at least 1")
    # The table is a CPU's; the kernel of `triton` is for GPUs.
    names = [*(name for name in get_args(Implementation) if name != "triton"), *GEMMS]
    installed = importlib.util.find_spec("trl") is not None
    if installed:
        names += [TRL_DENSE, TRL_TILED]
    shape = (args.tokens, args.vocab, args.hidden)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        lines = measure(names, shape, args.threads, args.repeats, args.dtype)
    finally:
        torch.set_num_threads(before)
    print(report(lines, shape, args.threads, args.repeats, args.dtype))
    if not installed:
        print("TRL is not installed: pip install 'past-opsd[bench]' adds it to the table.")
    return 0


def measure(
    names: list[str], shape: tuple[int, int, int], threads: int, repeats: int, dtype: str = "float32"
) -> list[Line]:
    """Accuracy on the first rows, memory in a process each, then times, the contestants taking turns."""
    problem = Problem.make(*shape)
    accuracy = _accuracy(names, problem, dtype)
    memory = {name: peak_memory(name, shape, threads, dtype) for name in names}
    contestants = {name: contestant(name) for name in names}
    problems = {kind: problem.to(kind) for kind in {_precision(name, dtype) for name in names}}
    small = Problem.make(8, 64, 16)
    for name, call in contestants.items():
        call(small.to(_precision(name, dtype)))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    nonfinite: dict[str, int] = {}
    for _ in range(repeats):
        for name, call in contestants.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            outcome = call(problems[_precision(name, dtype)])
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            if outcome is not None:
                nonfinite[name] = max(nonfinite.get(name, 0), _nonfinite(outcome))
    lines: list[Line] = []
    for name in names:
        wall, cpu = (statistics.median(column) for column in zip(*times[name], strict=True))
        error, cosine = accuracy.get(name, (None, None))
        lines.append(Line(name, error, cosine, memory[name], wall, cpu, nonfinite.get(name)))
    return lines


def _precision(name: str, dtype: str) -> torch.dtype:
    """What a contestant is given: the reference is float32 whatever the others are."""
    return torch.float32 if name == "reference" else DTYPES[dtype]


def _nonfinite(outcome: Outcome) -> int:
    """Losses and entries of the gradient that are not finite, over all rows."""
    return int(sum((~tensor.isfinite()).sum() for tensor in outcome))


def contestant(name: str) -> Callable[[Problem], Outcome | None]:
    """The work measured under this name."""
    if name in get_args(Implementation):
        return lambda problem: _ours(cast(Implementation, name), problem, TAU)
    if name == TRL_DENSE:
        return _trl_dense()
    if name == TRL_TILED:
        return _trl_tiled()
    return lambda problem: _gemms(problem, len(problem.head) if name == GEMMS[0] else 2048)


def _ours(implementation: Implementation, problem: Problem, tau: float) -> Outcome:
    job = Job(Match(tau), _weight(problem))
    result = run_losses(implementation, problem.live, problem.frozen, problem.head, None, problem.tokens, [job])
    return result.values[0], result.grad


def _weight(problem: Problem) -> Tensor:
    T = len(problem.tokens)
    return problem.live.new_full((T,), 1 / T, dtype=torch.promote_types(problem.live.dtype, torch.float32))


def _gemms(problem: Problem, tile: int) -> None:
    """The limit: two projections and one back, nothing else, at a chunk size where they run at full speed."""
    T, rows = len(problem.tokens), min(512, len(problem.tokens))
    logits = problem.head.new_empty(rows, len(problem.head))
    for start in range(0, T, rows):
        n = min(rows, T - start)
        for hidden in (problem.frozen, problem.live):
            for entry in range(0, len(problem.head), tile):
                part = problem.head[entry : entry + tile]
                torch.mm(hidden[start : start + n], part.t(), out=logits[:n, entry : entry + len(part)])
        torch.mm(logits[:n], problem.head)


def _trl_dense() -> Callable[[Problem], Outcome]:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    loss = importlib.import_module("trl.experimental.sdft.loss_utils").compute_full_logit_self_distillation_loss

    def call(problem: Problem) -> Outcome:
        hidden = problem.live.clone().requires_grad_()
        with torch.no_grad():
            frozen = (problem.frozen @ problem.head.t())[None]
        live = (hidden @ problem.head.t())[None]
        value: Tensor = loss(live, frozen, distillation_alpha=0.0)[0]
        return value.detach(), torch.autograd.grad((value * _weight(problem)).sum(), hidden)[0]

    return call


def _trl_tiled() -> Callable[[Problem], Outcome]:
    loss = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def call(problem: Problem) -> Outcome:
        hidden = problem.live.clone().requires_grad_()
        value, _ = loss.apply(hidden, problem.head, None, problem.frozen, problem.head, None, 0.0, 1.0)
        return value.detach(), torch.autograd.grad((value * _weight(problem)).sum(), hidden)[0]

    return call


def _accuracy(names: list[str], problem: Problem, dtype: str) -> dict[str, tuple[float, float]]:
    """Mean absolute loss error and cosine of the gradient, against float64 autograd of what was not rounded."""
    part = problem.first(min(CHECKED_ROWS, len(problem.tokens)))
    exact = part.to(torch.float64)
    truth = {tau: _ours("chunked", exact, tau) for tau in (TAU, math.inf)}
    del exact
    found: dict[str, tuple[float, float]] = {}
    for name in names:
        outcome = contestant(name)(part.to(_precision(name, dtype)))
        if outcome is None:
            continue
        (value, grad), (true_value, true_grad) = outcome, truth[math.inf if name.startswith("TRL") else TAU]
        grad = grad.double()
        sizes = cast(Tensor, grad.norm() * true_grad.norm())
        cosine = float((grad * true_grad).sum() / sizes)
        found[name] = (float((value.double() - true_value).abs().mean()), cosine)
    return found


def peak_memory(name: str, shape: tuple[int, int, int], threads: int, dtype: str = "float32") -> float | None:
    """MiB of resident memory one call needs at its peak beyond its inputs, in a fresh process; Linux only."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory_here, (name, shape, threads, dtype))


def _peak_memory_here(name: str, shape: tuple[int, int, int], threads: int, dtype: str) -> float | None:
    torch.set_num_threads(threads)
    precision = _precision(name, dtype)
    call, problem = contestant(name), Problem.make(*shape).to(precision)
    call(Problem.make(8, 64, 16).to(precision))
    gc.collect()
    return peak_beyond(lambda: call(problem))


def report(lines: list[Line], shape: tuple[int, int, int], threads: int, repeats: int, dtype: str = "float32") -> str:
    """The table and the ratios as text."""
    T, V, H = shape
    text = [
        f"Full-vocabulary losses, T={T} V={V} H={H}, {dtype}, {threads} thread(s), median of {repeats}",
        "",
        _row("Implementation", "Loss error", "Grad. cos.", "Extra MiB", "Tokens/s", "Non-finite"),
    ]
    for line in lines:
        error, cosine = _cell(line.loss_error, ".2e"), _cell(line.cosine, ".7f")
        memory, nonfinite = _cell(line.mebibytes, ".0f"), _cell(line.nonfinite, "d")
        name = f"{line.name}, float32" if line.name == "reference" and dtype != "float32" else line.name
        text.append(_row(name, error, cosine, memory, f"{T / line.seconds:.1f}", nonfinite))
    text += ["", *_ratios({line.name: line for line in lines}), "", *_notes(T, dtype)]
    return "\n".join(text)


def _row(name: str, *cells: str) -> str:
    return f"{name:<26}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, (10, 11, 10, 10, 11), strict=True))


def _cell(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _ratios(lines: dict[str, Line]) -> list[str]:
    fused = lines["fused"]
    limit = min((lines[name] for name in GEMMS), key=lambda line: line.seconds)
    limit_cpu = min(lines[name].cpu_seconds for name in GEMMS)
    text: list[str] = []
    if TRL_TILED in lines:
        trl = lines[TRL_TILED]
        text.append(
            f"TRL tiled / fused: {trl.seconds / fused.seconds:.2f} in time "
            f"({trl.cpu_seconds / fused.cpu_seconds:.2f} in CPU time)"
        )
    text.append(
        f"fused / three GEMMs: {fused.seconds / limit.seconds:.2f} in time "
        f"({fused.cpu_seconds / limit_cpu:.2f} in CPU time)"
    )
    text.append(f"fused, memory beyond its inputs: {_cell(fused.mebibytes, '.0f')} MiB")
    return text


def _notes(T: int, dtype: str) -> list[str]:
    rounded = (
        [] if dtype == "float32" else [f"Hidden states and head are rounded to {dtype}, and that counts in the error."]
    )
    return [
        f"Ours: Match(tau={TAU}) with diagnostics. TRL has no clip: its rows are the plain",
        "forward KL, without them. Loss error (mean absolute, nats a token) and cosine are",
        f"against float64 autograd of the same loss on the first {min(CHECKED_ROWS, T)} rows.",
        *rounded,
        "Non-finite: losses and entries of the gradient, counted over all rows.",
        "Extra MiB: peak resident memory of one call beyond its inputs, each in a fresh",
        "process. The contestants take turns, so that other load on the machine meets all",
        "of them; on a busy machine trust the CPU time.",
    ]
