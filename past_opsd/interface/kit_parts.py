"""The parts of `past doctor RECIPE --gpu`, each a table and a verdict.

The machine, the loss's kernel, memory as traced and as the allocator has it, two short cycles of the recipe, and the
engine beside the trainer. What cannot run says so and stops nothing else.
"""

from __future__ import annotations

import gc
import importlib.metadata
import math
import platform
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from past_opsd.analysis import needs, stand_ins
from past_opsd.core import life
from past_opsd.core.config import MethodOptions, Recipe
from past_opsd.core.losses import Loss, Match, Stay
from past_opsd.core.nouns import Adapter, PastError, Term
from past_opsd.interface import doctor, exact
from past_opsd.interface.checks import COSINE_BOUND, HALF_BOUND, Recording
from past_opsd.learner.step import IDENTITY
from past_opsd.policy import estimate, fused
from past_opsd.policy.pretrained import hardware
from past_opsd.policy.tracing import Tracer
from past_opsd.rollout.engines import vllm
from past_opsd.run.profiling import Clock
from past_opsd.run.train import Session, session

PACKAGES = ("past-opsd", "torch", "transformers", "peft", "triton", "vllm")
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
SHEETS = {"A100-80GB": "A100.*80GB", "H100-80GB": "H100 80GB HBM3", "L40S-48GB": "L40S"}
"""What torch calls the GPUs whose data sheets are known."""
LOSSES: Sequence[Loss] = (Match(), Match(0.05), Stay(), Stay(0.05))
VOCABULARIES = (2048, 5003, 151_936)  # a block of the kernel, no multiple of one, Qwen3's
POSITIONS, WIDTH = 8, 16  # of the made states
BLOCK = 1024  # summands that are taken as added up pairwise; blocks of them one after the other
TIMED = {"cuda": 256, "cpu": 64}  # positions
TOKENS = {"cuda": 256, "cpu": 64}  # of a response in the cycles
CONTEXT = 512  # of the memory's rows where the model is large for a CPU
WITHIN = 0.1  # of the allocator's peak, as docs/scale.md says of the CPU's
FACTOR = 3.0  # a phase may take so many times its arithmetic
LEAST = 0.1  # seconds of arithmetic below which a phase is all overhead
COMPARED = 4  # responses of each adapter
PHASES = ("rollout", "verify", "draw", "adapt", "distill", IDENTITY, "publish")

Verdict = Literal["ok", "differs", "could not run"]


@dataclass
class Part:
    """A section of the file: what was found, and what to think of it."""

    title: str
    verdict: Verdict = "ok"
    why: str = ""
    columns: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list[Sequence[str]])
    notes: list[str] = field(default_factory=list[str])
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])

    def judge(self, wrong: Sequence[str], fine: str) -> None:
        """'differs' where something is wrong, named; else what is fine."""
        self.verdict, self.why = ("differs", "; ".join(wrong)) if wrong else ("ok", fine)


def attempt(parts: Sequence[Part], look: Callable[[], None]) -> None:
    """Fill the parts in; what a recipe, torch, Triton or a full memory may say becomes their verdict."""
    life.doing(f"checking: {parts[0].title}")
    try:
        look()
    except Exception as error:
        foreign = type(error).__module__.partition(".")[0] == "triton"
        if not (foreign or isinstance(error, PastError | RuntimeError | MemoryError)):
            raise
        kind = "" if isinstance(error, PastError) else f"{type(error).__name__}: "
        for part in [p for p in parts if p is parts[0] or not p.rows]:
            part.verdict, part.why = "could not run", f"{kind}{' '.join(str(error).split())[:300]}"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device(recipe: Recipe) -> torch.device:
    device = torch.device(hardware(recipe.model).device)
    if device.type not in TOKENS:
        raise PastError(f"model.device = '{recipe.model.device}': --gpu looks at CUDA GPUs, or at the CPU")
    return device


# Machine


def machine(part: Part, recipe: Recipe) -> None:
    """What there is to compute with, and what the recipe makes of it."""
    part.columns = ("what", "here")
    found = {"system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        sheet = cast(Any, torch.cuda).get_device_properties(i)
        found[f"GPU {i}"] = (
            f"{sheet.name}, capability {sheet.major}.{sheet.minor}, {sheet.total_memory / estimate.GIB:.1f} GiB"
        )
    if len(found) == 1:
        found["GPU"] = "none: torch sees none, and everything below is the CPU's"
    driver = Path("/proc/driver/nvidia/version")
    found["driver"] = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "none"
    found["CUDA of torch"] = str(torch.version.cuda or "none")
    found |= {name: _version(name) for name in PACKAGES}
    part.rows, part.numbers = [*found.items()], dict(found)
    choice, device = hardware(recipe.model), _device(recipe)
    implementation, note = fused.settle(recipe.learner.implementation, device)
    chosen = {"computes in": str(choice), "learner.implementation": f"{implementation}{note and f' ({note})'}"}
    part.numbers |= chosen
    part.rows += chosen.items()
    if device.type == "cpu" and torch.cuda.is_available():
        part.notes.append("The recipe computes on the CPU; for the GPU add: --set model.device=auto")
    part.judge(_attention(part, getattr(torch, choice.dtype), device), _named(device))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _attention(part: Part, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Which attention kernels run on which calls; wrong is one that the memory was traced with and that does not."""
    wrong: list[str] = []
    tracer = Tracer("gpu" if device.type == "cuda" else "cpu")
    for grouped in (False, True):
        query = torch.zeros(1, 4, 16, 64, dtype=dtype, device=device)
        key = query[:, :2] if grouped else query
        for mask in (None, torch.ones(16, 16, dtype=torch.bool, device=device).tril()):
            what = f"attention, {'a mask' if mask is not None else 'causal'}{', grouped queries' if grouped else ''}"
            runs = [name for name, kernel in KERNELS.items() if _runs(kernel, query, key, mask, grouped)]
            taken, _ = tracer.kernel(query, mask, grouped)
            part.rows.append((what, f"{', '.join(runs)}; traced as {taken}"))
            part.numbers[what] = {"runs": runs, "traced": taken}
            if taken not in runs:
                wrong.append(f"{what} is traced as {taken}, which does not run here")
    return wrong


def _runs(kernel: SDPBackend, query: Tensor, key: Tensor, mask: Tensor | None, grouped: bool) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"), sdpa_kernel([kernel]):  # torch warns of what it will raise
            scaled_dot_product_attention(query, key, key, mask, is_causal=mask is None, enable_gqa=grouped)
    except RuntimeError:
        return False
    return True


# Kernel


def kernel(part: Part, recipe: Recipe) -> None:
    """The chosen implementation of the losses against their plain formulas in float64; its time and memory."""
    choice, device = hardware(recipe.model), _device(recipe)
    implementation, note = fused.settle(recipe.learner.implementation, device)
    part.notes += [note] if note else []
    part.columns = ("dtype", "vocabulary", "value off", "allowed", "gradient off", "allowed")
    wrong: list[str] = []
    cases: list[dict[str, Any]] = []
    for dtype in (torch.float64, torch.float32):
        for vocabulary in VOCABULARIES:
            case = _worst([_compare(implementation, loss, vocabulary, dtype, device) for loss in LOSSES])
            cases.append({"dtype": _short(dtype), "vocabulary": vocabulary, **case})
            part.rows.append((_short(dtype), f"{vocabulary:,}", *(f"{value:.1e}" for value in case.values())))
            if not (case["value"] <= case["value allowed"] and case["gradient"] <= case["gradient allowed"]):
                wrong.append(f"{implementation} in {_short(dtype)}, vocabulary {vocabulary:,}")
    shape, dtype = doctor.shape_for(recipe), getattr(torch, choice.dtype)
    if dtype.itemsize == 2:
        vocabulary = shape.vocab if device.type == "cuda" else doctor.MADE_VOCAB
        size = exact.Size(shape.hidden, vocabulary, dtype, device)
        error, cosine = exact.made(implementation, [(loss, True, 1.0) for loss in LOSSES], size, seed=0)
        cases.append({"dtype": choice.dtype, "vocabulary": vocabulary, "value": error, "cosine": cosine})
        row = (choice.dtype, f"{vocabulary:,}", f"{error:.1e}", f"{HALF_BOUND:.1e}", f"cosine {cosine:.6f}")
        part.rows.append((*row, f"at least {COSINE_BOUND:g}"))
        if not (error <= HALF_BOUND and cosine >= COSINE_BOUND):
            wrong.append(f"{implementation} in {choice.dtype}")
    seconds, peaks = _speed(implementation, shape, dtype, device)
    times, memory = (b / max(a, 1e-9) for a, b in (seconds, peaks))
    part.notes.append(
        f"{implementation} beside dense autograd on {TIMED[device.type]} positions of {shape.vocab:,} entries: "
        f"{seconds[0] * 1e3:.1f} against {seconds[1] * 1e3:.1f} ms, {peaks[0] / 2**20:.1f} against "
        f"{peaks[1] / 2**20:.1f} MiB at the peak"
    )
    part.numbers = {"implementation": implementation, "cases": cases, "seconds": seconds, "bytes": peaks}
    part.judge(wrong, f"{implementation}: right, {times:.1f} x as fast and {memory:.1f} x as lean as autograd")


def _compare(
    implementation: fused.Implementation, loss: Loss, vocabulary: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """How far values and gradient are from the formula in float64, and how far they may be.

    A logit is a sum of `WIDTH` products, a softmax's denominator one of `vocabulary` exponentials, pairwise within a
    block: as many roundings of what the summands' sizes add up to make `off`, the error of a log-probability. Values
    and the gradient of a logit follow it by p + q times 1, their log-ratio and its mean.
    """
    draw = torch.Generator().manual_seed(vocabulary)
    live = torch.randn(POSITIONS, WIDTH, generator=draw)
    frozen = live + torch.randn(POSITIONS, WIDTH, generator=draw) / 2
    head = torch.randn(vocabulary, WIDTH, generator=draw) / 4
    tokens = torch.randint(vocabulary, (POSITIONS,), generator=draw).to(device)
    weight = torch.ones(POSITIONS, device=device, dtype=dtype)
    live, frozen, head = (x.to(device, dtype) for x in (live, frozen, head))
    found = fused.run(implementation, live, frozen, head, None, tokens, [fused.Job(loss, weight)])
    x, y, w = (x.double() for x in (live, frozen, head))
    z = (x @ w.T).requires_grad_()
    q, p = torch.log_softmax(z, -1), torch.log_softmax(y @ w.T, -1)
    value = exact.definition(loss)(q, p, tokens)
    (slope,) = torch.autograd.grad(value.sum(), z)
    q, value = q.detach(), value.detach()
    ratio, mass = (p - q).abs(), p.exp() + q.exp()
    mean = (mass * ratio).sum(-1, keepdim=True)
    summands = torch.maximum(x.abs(), y.abs()) @ w.abs().T
    off = torch.finfo(dtype).eps * (WIDTH + vocabulary / BLOCK + 16) * float(summands.max())
    return {
        "value": float((found.values[0].double() - value).abs().max()),
        "value allowed": 2 * off * (1 + float(mean.max())),
        "gradient": float((found.grad.double() - slope @ w).abs().max()),
        "gradient allowed": 2 * off * float((mass * (1 + ratio + mean) @ w.abs()).max()),
    }


def _worst(cases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of several losses the one that comes nearest to what is allowed, or is no number; values and gradient apart."""
    out: dict[str, float] = {}
    for name in ("value", "gradient"):
        shares = [case[name] / case[f"{name} allowed"] for case in cases]
        worst = cases[max(range(len(cases)), key=lambda i: shares[i] if shares[i] == shares[i] else math.inf)]
        out |= {name: worst[name], f"{name} allowed": worst[f"{name} allowed"]}
    return out


def _speed(
    implementation: fused.Implementation, shape: estimate.Shape, dtype: torch.dtype, device: torch.device
) -> tuple[list[float], list[int]]:
    """Median seconds and peak bytes of the implementation and of dense autograd, on states of the model's shape."""
    draw = torch.Generator().manual_seed(0)
    T = TIMED[device.type]
    live, frozen = (torch.randn(T, shape.hidden, generator=draw).to(device, dtype) for _ in range(2))
    head = (torch.randn(shape.vocab, shape.hidden, generator=draw) * shape.hidden**-0.5).to(device, dtype)
    tokens = torch.randint(shape.vocab, (T,), generator=draw).to(device)
    job = fused.Job(Match(0.05), torch.full((T,), 1 / T, device=device))
    seconds: list[float] = []
    peaks: list[int] = []
    sides: Sequence[fused.Implementation] = (implementation, "reference")
    for name in sides:
        times: list[float] = []
        for _ in range(4):  # the first one compiles
            began = _now(device)
            fused.run(name, live, frozen, head, None, tokens, [job])
            times.append(_now(device) - began)
        seconds.append(statistics.median(times[1:]))
        heard = needs.Allocations(device)
        heard.phase(name)
        fused.run(name, live, frozen, head, None, tokens, [job])
        heard.end()
        peaks.append(heard.peaks[name])
    return seconds, peaks


def _now(device: torch.device) -> float:
    """The time at which everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Memory


def memory(part: Part, recipe: Recipe) -> None:
    """What `past trace` says of steps and sampling beside what the allocator gives out, on weights drawn at random."""
    device, settled = _device(recipe), _settled(recipe)
    size = estimate.available(device)
    traced = needs.trace(settled, "gpu" if device.type == "cuda" else "cpu", size=size)
    life.doing("checking: Memory, on real tensors")
    measured = needs.measure(settled, device, size)
    part.columns = ("MiB beyond weights and optimizer", "traced", "measured", "traced / measured")
    wrong: list[str] = []
    worst = 0.0
    for name, real in measured.items():
        ratio = traced.beyond(name) / max(real, 1)
        part.rows.append((name, f"{traced.beyond(name) / 2**20:,.1f}", f"{real / 2**20:,.1f}", f"{ratio:.3f}"))
        part.numbers[name] = {"traced": traced.beyond(name), "measured": real}
        worst = max(worst, abs(ratio - 1))
        if abs(ratio - 1) > WITHIN:
            wrong.append(f"{name}: traced {ratio:.2f} of what is measured")
    part.numbers["launches"] = traced.phases["sampling"].launches if "sampling" in traced.phases else 0
    part.notes.append(f"Rows of up to {traced.longest:,} tokens, every response at its limit; weights are random.")
    if "sampling" not in measured:
        part.notes.append("Responses are drawn elsewhere, or by an engine whose memory is not traced.")
    part.judge(wrong, f"traced within {worst:.1%} of the allocator, {WITHIN:.0%} allowed")


def _settled(recipe: Recipe) -> Recipe:
    """The recipe with everything settled as on this machine; small where its model is large for a CPU."""
    choice = hardware(recipe.model)
    implementation, _ = fused.settle(recipe.learner.implementation, torch.device(choice.device))
    fixed: dict[str, Any] = {"dtype": choice.dtype, "gradient_checkpointing": choice.gradient_checkpointing}
    if doctor.slow(recipe):
        recipe = doctor.small(recipe)
        fixed["max_context"] = min(CONTEXT, recipe.model.max_context or CONTEXT)
    # Of a method that works before the first cycle, little of that.
    method = recipe.method.small(8) if isinstance(recipe.method, MethodOptions) else recipe.method
    learner = recipe.learner.model_copy(update={"implementation": implementation})
    model = recipe.model.model_copy(update=fixed)
    return recipe.model_copy(update={"model": model, "learner": learner, "method": method})


# Phases and engine


class _Noting:
    """A learner that notes the terms of its steps."""

    def __init__(self, learner: Any):
        self._learner = learner
        self.terms: dict[Adapter, list[Term]] = {}

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        self.terms[phase] = list(terms)
        return self._learner.step(phase, terms)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


def cycles(phases: Part, engine: Part, recipe: Recipe, launches: int = 0) -> None:
    """Two cycles with the recipe's model, prompts and method on made problems; the second is timed and compared.

    The first pays for what is compiled, and moves both adapters off the identity, where engine and trainer would agree
    whatever the adapters. Every other response counts as right, so that both steps have work.
    """
    device = _device(recipe)
    with tempfile.TemporaryDirectory(prefix="past-kit-") as home:
        short = stand_ins.with_rows(doctor.small(recipe, tokens=TOKENS[device.type]), Path(home))
        problems = max(2, short.rollout.problems_per_cycle)  # one right and one wrong, at least
        rollout = short.rollout.model_copy(update={"problems_per_cycle": problems})
        short = short.model_copy(update={"rollout": rollout})
        stand_ins.save_sets(Path(home), getattr(short.task, "evaluation", ()))
        with session(short, verifier=needs.EveryOther()) as assembled:
            assembled.loop.prepare()
            noting, recording = _Noting(assembled.learner), Recording(assembled.loop.lab.engine)
            lab = replace(assembled.loop.lab, engine=recording)
            loop = replace(assembled.loop, learner=noting, lab=lab)
            loop.cycle(0, lambda name: life.doing(f"checking: a first cycle, {name}"))
            recording.seen.clear()
            clock = Clock(now=partial(_now, device))
            lab.span = assembled.learner.span = clock.span

            def phase(name: str) -> None:
                life.doing(f"checking: a timed cycle, {name}")
                clock.phase(name)
                if name == "adapt":  # before anything moves
                    with clock.span("compare"):
                        attempt([engine], partial(compare, engine, assembled, recording))
                        life.doing(f"checking: a timed cycle, {name}")

            loop.cycle(1, phase)
            clock.stop()
            _told(phases, assembled, clock.seconds(0), recording, noting.terms, launches)


def compare(part: Part, assembled: Session, recording: Recording) -> None:
    """The engine's log-probabilities of its responses beside the trainer's, within the bound that holds in training."""
    noise = vllm.noise(assembled.model)
    bound = assembled.recipe.engine.model_dump().get("mismatch_bound") or vllm.allowed(noise)
    part.columns = ("adapter", "responses", "tokens", "mean |difference|", "largest", "allowed mean")
    wrong: list[str] = []
    worst = 0.0
    for adapter in sorted({request.view.adapter for request, _, _ in recording.seen}):
        own = [item for item in recording.seen if item[0].view.adapter == adapter][:COMPARED]
        differences = np.concatenate(
            [
                np.array(response.logprobs)
                - vllm.logprobs(assembled.model, request.view, response.tokens, sampling.temperature or 1.0)
                for request, sampling, response in own
            ]
        )
        mean, largest = float(np.abs(differences).mean()), float(np.abs(differences).max())
        row = (adapter, str(len(own)), str(len(differences)), f"{mean:.2e}", f"{largest:.2e}", f"{bound:.2e}")
        part.rows.append(row)
        part.numbers[adapter] = {"tokens": len(differences), "mean": mean, "largest": largest}
        worst = max(worst, mean)
        if not mean <= bound:
            wrong.append(f"{adapter}: {mean:.2e} a token on average, {bound:.2e} allowed")
    part.numbers |= {"bound": bound, "noise": noise, "engine": assembled.recipe.engine.name}
    part.notes.append(
        f"Engine '{assembled.recipe.engine.name}'. The trainer is {noise:.2e} a token from itself when it computes "
        f"otherwise (in a batch, alone and under other attention); {vllm.NOISE:g} times that is allowed, at least "
        f"{vllm.EXACT:g}."
    )
    part.judge(wrong, f"{worst:.1e} a token on average, {bound:.1e} allowed")


def _told(
    part: Part,
    assembled: Session,
    seconds: Mapping[str, float],
    recording: Recording,
    terms: Mapping[Adapter, Sequence[Term]],
    launches: int,
) -> None:
    """Seconds by phase beside the arithmetic of `policy/estimate.py` for what this cycle did."""
    choice, device = assembled.model.choice, assembled.model.device
    shape = estimate.shape_of(assembled.model.config, assembled.recipe.model.path)
    name = _named(device)
    known = next((gpu for gpu, pattern in SHEETS.items() if re.search(pattern, name)), None)
    peak = estimate.GPUS[known][0] if known and choice.dtype != "float32" else None
    loads = {
        "rollout": _drawn("student", recording),
        "draw": _drawn("teacher", recording),
        "adapt": _step("teacher", terms.get("teacher", ())),
        "distill": _step("student", terms.get("student", ())),
    }
    part.columns = ("phase", "seconds", "by arithmetic", "TFLOP", "TFLOP/s", "of the peak")
    wrong: list[str] = []
    judged = False
    for phase in (phase for phase in PHASES if phase in seconds):
        taken = seconds[phase]
        told = part.numbers[phase] = {"seconds": taken}
        cells = [""] * 4
        if phase in loads and loads[phase].student_samples:
            work = partial(
                estimate.seconds,
                shape,
                loads[phase],
                checkpointing=choice.gradient_checkpointing,
                dtype=choice.dtype,
                launches=launches,
            )
            expected = work(_speed_of(known, choice.dtype, device, loads[phase].student_samples))[phase]
            flops = 2 * work(estimate.Speed(1.0, 1.0, math.inf))[phase]
            told |= {"arithmetic": expected, "flops": flops}
            share = f"{flops / taken / peak:.1%}" if peak else ""
            cells = [f"{expected:.2f}", f"{flops / 1e12:.3g}", f"{flops / taken / 1e12:.3g}", share]
            judged = judged or expected >= LEAST
            if expected >= LEAST and taken > FACTOR * expected:
                wrong.append(f"{phase}: {taken / expected:.1f} times its arithmetic")
        part.rows.append((phase, f"{taken:.2f}", *cells))
    source = f"the data sheet of {known}" if known else "products timed here"
    part.notes += [
        f"On {name}. Arithmetic: `policy/estimate.py` on this cycle's own lengths, at speeds from {source}; prompts "
        f"that samples share count for each. Phases of less than {LEAST:g} s of arithmetic are not judged.",
        f"Every other response counted as right, whatever it said. `{IDENTITY}` is the check of which adapter moved.",
    ]
    fine = f"no phase above {FACTOR:g} times its arithmetic" if judged else "too little work to judge its time"
    part.judge(wrong, f"a cycle in {sum(seconds[name] for name in PHASES if name in seconds):.1f} s, {fine}")


def _speed_of(known: str | None, dtype: str, device: torch.device, rows: int) -> estimate.Speed:
    """By the data sheet, or as products on this device show it; on a CPU in float32, as `past doctor` has it."""
    if known:
        return estimate.assumed(known, rows)
    cuda = device.type == "cuda"
    measured = estimate.measure(getattr(torch, dtype) if cuda else torch.float32, device, rows, seconds=0.2)
    return replace(measured, launch=estimate.LAUNCH) if cuda else measured


def _drawn(adapter: Adapter, recording: Recording) -> estimate.Load:
    """What an adapter sampled."""
    own = [(request.view, response) for request, _, response in recording.seen if request.view.adapter == adapter]
    return _load(adapter, [(len(view.prompt), len(response.tokens)) for view, response in own])


def _step(adapter: Adapter, terms: Sequence[Term]) -> estimate.Load:
    """A step's paths, each read once with a gradient, and the prompts of what is read without."""
    paths = {(term.live, term.tokens) for term in terms}
    frozen = [len(term.frozen.prompt) for term in terms if term.frozen is not None]
    return _load(adapter, [(len(view.prompt), len(tokens)) for view, tokens in paths], frozen)


def _load(adapter: Adapter, paths: Sequence[tuple[int, int]], frozen: Sequence[int] = ()) -> estimate.Load:
    """An adapter's own paths, prompt and response each, as an estimate takes them: by their mean lengths."""
    n, other = len(paths), round(sum(frozen) / max(1, len(frozen)))
    prompt, response = (round(sum(column) / n) for column in zip(*paths, strict=True)) if n else (0, 0)
    prompts = (prompt, other) if adapter == "student" else (other, prompt)
    return estimate.Load(n, n, response, response, *prompts)
