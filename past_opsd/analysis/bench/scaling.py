"""`past bench scaling`: time and memory of a learner step against its sizes.

One student step with a full-vocabulary divergence to a frozen teacher, on a random Llama. Response length, vocabulary,
batch and group size grow one at a time. Memory is the peak beyond the model of the whole step, of the step with
gradient checkpointing, and of the loss alone (hidden states to gradient), beside what dense logits would take.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from past_opsd.analysis.bench import _plot
from past_opsd.analysis.bench._worker import HONEST_MALLOC, Side, peak_beyond, serve, tokens_of
from past_opsd.core.config import LearnerSection, LoraSection, ModelSection
from past_opsd.core.files import write_text
from past_opsd.core.losses import Match
from past_opsd.core.nouns import PastError, Term, View, mean
from past_opsd.learner import Learner, bundle, gather_paths
from past_opsd.policy import fused
from past_opsd.policy.estimate import shape_of
from past_opsd.policy.model import Model
from past_opsd.policy.pretrained import load_tokenizer

AXES = {"response length": "response", "vocabulary": "vocabulary", "batch": "batch", "group": "group"}
FACTORS = {"response": (1, 2, 4, 8), "vocabulary": (1, 2, 3), "batch": (1, 2, 4, 8), "group": (1, 2, 4, 8)}
LAYERS, HEADS = 4, 4


@dataclass(frozen=True)
class Sizes:
    """What a step is asked for: prompts in the batch, responses to each, lengths in tokens, and the model's size."""

    batch: int
    group: int
    prompt: int
    response: int
    vocabulary: int
    hidden: int

    @property
    def rows(self) -> int:
        """Positions at which the loss is taken."""
        return self.batch * self.group * self.response

    @property
    def dense(self) -> float:
        """MiB of both views' logits at all of them."""
        return 2 * 4 * self.rows * self.vocabulary / 2**20


@dataclass(frozen=True)
class Setup:
    """Sizes and what stays the same: threads and the bounds of a micro-batch and of the loss."""

    sizes: Sizes
    threads: int
    budget: int
    loss_mib: int


@dataclass(frozen=True)
class Point:
    """One size of one axis; memory is MiB beyond the model, None where it cannot be measured."""

    axis: str
    factor: int
    sizes: Sizes
    work: float
    seconds: float
    cpu: float
    step_mib: float | None
    checkpointed_mib: float | None
    loss_mib: float | None


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    sizes = Sizes(args.batch, 1, args.prompt, args.response, args.vocabulary, args.hidden)
    for name in ("batch", "prompt", "response", "hidden", "budget", "loss_mib", "factors", "threads", "repeats"):
        if vars(args)[name] < 1:
            raise PastError(f"--{name.replace('_', '-')} is {vars(args)[name]}; it must be at least 1")
    if args.vocabulary < 64 or args.hidden % (2 * HEADS):
        raise PastError(f"--vocabulary must be at least 64 and --hidden a multiple of {2 * HEADS}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise PastError("--plot needs matplotlib: pip install matplotlib")
    points = measure(Setup(sizes, args.threads, args.budget, args.loss_mib), args.factors, args.repeats)
    print(report(points, args))
    if args.out:
        write_text(Path(args.out), json.dumps([asdict(point) for point in points], indent=1) + "\n")
    if args.plot:
        curves = {title: [point for point in points if point.axis == field] for title, field in AXES.items()}
        _plot.draw(curves, Path(args.plot))
    return 0


def setups(base: Setup, largest: int) -> Iterator[tuple[str, int, Setup]]:
    """Axis, factor and sizes of every measured step."""
    for field in AXES.values():
        for factor in FACTORS[field]:
            if factor <= largest:
                value = factor * vars(base.sizes)[field]
                yield field, factor, replace(base, sizes=replace(base.sizes, **{field: value}))


def measure(base: Setup, largest: int, repeats: int) -> list[Point]:
    """Times in one process, all sizes taking turns; memory in another, whose allocator gives back what is freed."""
    asked = list(setups(base, largest))
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary in {setup.sizes.vocabulary for _, _, setup in asked}:
            make_model(_folder(folder, vocabulary), vocabulary, base.sizes.hidden)
        distinct = list(dict.fromkeys(setup for _, _, setup in asked))
        with Side("time", _side, folder, base.threads) as side:
            times: dict[Setup, list[tuple[float, float]]] = {setup: [] for setup in distinct}
            work = {setup: side.ask("warm", setup) for setup in distinct}
            for _ in range(repeats):
                for setup in distinct:
                    times[setup].append(side.ask("step", setup))
        with Side("memory", _side, folder, base.threads, environment=HONEST_MALLOC) as side:
            memory = {setup: side.ask("memory", setup) for setup in distinct}
    medians = {setup: tuple(map(statistics.median, zip(*times[setup], strict=True))) for setup in distinct}
    return [
        Point(field, factor, setup.sizes, work[setup], *medians[setup], *memory[setup])
        for field, factor, setup in asked
    ]


def _folder(folder: str, vocabulary: int) -> str:
    return str(Path(folder) / str(vocabulary))


def make_model(folder: str, vocabulary: int, hidden: int) -> None:
    """A random Llama with the embedded model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=2**16,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(17)
        LlamaForCausalLM(shape).save_pretrained(folder)
    load_tokenizer(ModelSection(path="embedded")).save_pretrained(folder)


def _side(pipe: Connection, folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    models: dict[tuple[int, bool], Model] = {}

    def learner(setup: Setup, checkpointing: bool) -> Learner:
        key = (setup.sizes.vocabulary, checkpointing)
        if key not in models:
            models[key] = Model(_model_section(_folder(folder, key[0]), checkpointing), seed=1)
        section = LearnerSection(token_budget=setup.budget, loss_memory_mib=setup.loss_mib)
        return Learner(models[key], section, 1000)

    def step(setup: Setup) -> tuple[float, float]:
        ready, work = learner(setup, False), terms(setup.sizes)
        wall, cpu = time.perf_counter(), time.process_time()
        ready.step("student", work)
        return time.perf_counter() - wall, time.process_time() - cpu

    def warm(setup: Setup) -> float:
        step(setup)
        return multiply_adds(models[setup.sizes.vocabulary, False], setup)

    def memory(setup: Setup) -> list[float | None]:
        found = []
        gc.collect()
        for checkpointing in (False, True):
            ready, work = learner(setup, checkpointing), terms(setup.sizes)
            ready.step("student", terms(replace(setup.sizes, batch=1, group=1, response=2)))  # optimizer state
            found.append(peak_beyond(lambda ready=ready, work=work: ready.step("student", work)))
        return [*found, _loss_memory(models[setup.sizes.vocabulary, False], setup)]

    serve(pipe, {"warm": warm, "step": step, "memory": memory})


def _model_section(path: str, checkpointing: bool) -> ModelSection:
    lora = LoraSection(rank=8, alpha=16.0)
    return ModelSection(path=path, device="cpu", dtype="float32", gradient_checkpointing=checkpointing, lora=lora)


def _loss_memory(model: Model, setup: Setup) -> float | None:
    draw = torch.Generator().manual_seed(17)
    live, frozen = torch.randn(2, setup.sizes.rows, setup.sizes.hidden, generator=draw)
    tokens = torch.randint(setup.sizes.vocabulary, (setup.sizes.rows,), generator=draw)
    job = fused.Job(Match(0.05), torch.full((setup.sizes.rows,), 1 / setup.sizes.rows))
    budget = setup.loss_mib << 20
    return peak_beyond(lambda: fused.run("fused", live, frozen, model.head, None, tokens, [job], budget_bytes=budget))


def terms(sizes: Sizes) -> list[Term]:
    """A divergence to the frozen teacher along random responses; the teacher's prompt is twice as long."""
    found: list[list[Term]] = []
    for i in range(sizes.batch):
        student = View("student", tokens_of(f"student {i}", sizes.prompt, sizes.vocabulary))
        teacher = View("teacher", tokens_of(f"teacher {i}", 2 * sizes.prompt, sizes.vocabulary))
        for j in range(sizes.group):
            tokens = tokens_of(f"response {i} {j}", sizes.response, sizes.vocabulary)
            found.append([Term("distill", student, teacher, tokens, Match(0.05))])
    return mean(found)


def multiply_adds(model: Model, setup: Setup) -> float:
    """Of the step's products with weights: three passes over the blocks, three over the head."""
    shape = shape_of(model.config, "bench")
    bundles = bundle(gather_paths(terms(setup.sizes), "sequence"), setup.budget, model.worth)
    live = sum(len(item.tree) for item in bundles)
    frozen = sum(len(tree) for item in bundles for tree in item.frozen_trees)
    body = shape.body * (2 * live + frozen)
    return float(body + 3 * setup.sizes.rows * shape.vocab * shape.hidden)


def exponent(points: Sequence[Point]) -> float:
    """a in CPU time = c * work ** a, by least squares of the logarithms; NaN for a single size."""
    xs, ys = [math.log(p.work) for p in points], [math.log(p.cpu) for p in points]
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((a - x) ** 2 for a in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else math.nan


def report(points: Sequence[Point], args: argparse.Namespace) -> str:
    """One table: every axis's sizes, then its exponent."""
    text = [
        f"A learner step on a random Llama ({LAYERS} layers of {args.hidden}): {args.batch} prompt(s) of {args.prompt} "
        f"tokens, responses of {args.response},",
        f"vocabulary {args.vocabulary}; micro-batches of {args.budget} tokens, {args.loss_mib} MiB for logits, "
        f"{args.threads} thread(s), median of {args.repeats}",
        "",
        f"{'':22s}{'work':>8s}{'seconds':>9s}{'CPU s':>9s}{'CPU s':>8s}{'step':>8s}{'ckpt.':>8s}{'loss':>8s}"
        f"{'dense':>8s}",
        f"{'':22s}{'x first':>8s}{'':>18s}{'x first':>8s}" + 4 * f"{'MiB':>8s}",
    ]
    for title, field in AXES.items():
        own = [point for point in points if point.axis == field]
        for point in own:
            memory = (point.step_mib, point.checkpointed_mib, point.loss_mib, point.sizes.dense)
            cells = "".join("       -" if value is None else f"{value:8.0f}" for value in memory)
            name = f"{title} x{point.factor}"
            text.append(
                f"{name:22s}{point.work / own[0].work:8.2f}{point.seconds:9.3f}{point.cpu:9.3f}"
                f"{point.cpu / own[0].cpu:8.2f}{cells}"
            )
        text.append(f"{'':22s}CPU time ~ work^{exponent(own):.2f}" if len(own) > 1 else "")
    return "\n".join([*text, "", *_NOTES])


_NOTES = (
    "Work: multiply-adds of the products with weights. MiB: peak resident memory beyond the",
    "model; of the step, of the step with gradient checkpointing, of the loss alone; dense is",
    "what the logits of both views at all positions would take.",
)
