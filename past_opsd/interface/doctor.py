"""`past doctor RECIPE`: the checks of tab:protocol-checks on this recipe, and what it needs on this machine.

Every check is repeated on other problems and seeds. What would take long runs on a small copy of the recipe: few
problems, short responses, two cycles; fewer of them, and two repeats, where the model is large for a CPU. `--dry` loads
no weights: numerics run on made hidden states of the model's shape, the other checks on the embedded model with the
recipe's method.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from past_opsd.analysis.needs import Needs, trace
from past_opsd.core import config
from past_opsd.core.config import MethodOptions, Recipe
from past_opsd.core.nouns import Adapter, PastError, derive_seed
from past_opsd.core.prompts import OPTIONAL
from past_opsd.interface import arguments, exact
from past_opsd.interface.checks import (
    Row,
    Watch,
    choose,
    evaluation_protocol,
    numerics,
    placeholder,
    prompt_modes,
    semantics,
    training_protocol,
)
from past_opsd.policy import estimate, fused
from past_opsd.policy.memory import SHARE
from past_opsd.policy.model import TRAINABLE
from past_opsd.policy.pretrained import hardware, load_tokenizer, read_config
from past_opsd.policy.tracing import Device
from past_opsd.run import checkpoint
from past_opsd.run.evaluate import evaluate
from past_opsd.run.folder import STATE, RunFolder
from past_opsd.run.health import counted
from past_opsd.run.train import Session, Silent, session, train
from past_opsd.tasks import Problems

GPU = "H100-80GB"
MADE_VOCAB = 1024  # CPUs without bfloat16 units take minutes for a large head
REPEATS = arguments.REPEATS
UNKNOWN = 10**9  # the context of a model whose recipe does not say it, where its weights are not loaded
SLOW = 30_000_000  # parameters; on a CPU, a cycle of more takes minutes unless it is cut to a few sequences
UPDATE_BOUND = 0.9  # cosine of two implementations' first updates; AdamW makes rounding of tiny gradients visible

add_arguments = arguments.doctor


def run(args: argparse.Namespace) -> int:
    """Print the checks and the estimate; 1 when a check failed."""
    recipe = config.load(args.recipe, args.overrides)
    console = Console()
    repeats = args.repeats
    if repeats is None:
        repeats = 2 if slow(recipe) and not args.dry else REPEATS
    if repeats < 1:
        raise PastError(f"--repeats is {repeats}; it must be at least 1")
    with Watch() as watch:
        rows = dry(recipe, repeats, watch) if args.dry else full(recipe, repeats, watch)
    console.print(table(recipe, rows))
    for row in rows:
        if row.note:
            console.print(f"{row.name}: {row.note}", highlight=False, soft_wrap=True)
    for warning in (warning for row in rows for warning in row.warnings):
        console.print(f"warning: {warning}", style="bold red", highlight=False, soft_wrap=True)
    needs(console, recipe)
    failed = [row.name for row in rows if row.passed < len(row.observed)]
    if failed:
        console.print(f"not passed: {', '.join(failed)}", style="bold red", highlight=False)
    return 1 if failed else 0


def table(recipe: Recipe, rows: Sequence[Row]) -> Table:
    """tab:protocol-checks for this recipe."""
    out = Table(title=f"Protocol, numerical and recovery checks: {recipe.name}", title_justify="left")
    out.add_column("Check")
    for name in ("Observed mean", "Passed", "Repeats"):
        out.add_column(name, justify="right")
    for row in rows:
        mean = f"{np.mean(row.observed):.6f}" if row.observed else "not checked"
        out.add_row(row.name, mean, str(row.passed) if row.observed else "", str(len(row.observed) or ""))
    return out


def full(recipe: Recipe, repeats: int, watch: Watch) -> list[Row]:
    """All checks with the recipe's own model and data."""
    with session(small(recipe)) as assembled:
        problems = choose(assembled.loop.problems, repeats)
        head = assembled.model.head
        size = exact.Size(head.shape[1], min(head.shape[0], MADE_VOCAB), head.dtype, head.device)
        first = [
            prompt_modes(recipe, assembled.model.tokenizer, problems, watch),
            training_protocol(assembled, recipe, problems, watch),
            evaluation_protocol(assembled, recipe, repeats, watch, 2 if slow(recipe) else 8),
        ]
        perturb(assembled)
        first += numerics(assembled, size, repeats, watch)
        semantic = semantics(assembled, repeats, watch)
    ended, resumed = runs(recipe, repeats, watch)
    return [*first, ended, semantic, resumed]


def dry(recipe: Recipe, repeats: int, watch: Watch) -> list[Row]:
    """What can be checked without the recipe's weights."""
    try:
        tokenizer = load_tokenizer(recipe.model)
        modes = prompt_modes(recipe, tokenizer, [placeholder(i) for i in range(repeats)], watch)
    except PastError as error:
        modes = Row("Model and thinking mode", [], 0, f"needs the tokenizer: {error}")
    shape, choice = shape_for(recipe), hardware(recipe.model)
    dtype, device = getattr(torch, choice.dtype), torch.device(choice.device)
    size = exact.Size(shape.hidden, min(shape.vocab, MADE_VOCAB), dtype, device)
    copy, note = embedded_copy(recipe), "on the embedded model"
    with session(small(copy, implementation=recipe.learner.implementation)) as assembled:
        limit = recipe.model.max_context or UNKNOWN
        evaluation = evaluation_protocol(assembled, recipe, repeats, watch, 8, limit)
        perturb(assembled)
        rows = numerics(assembled, size, repeats, watch)
        semantic = semantics(assembled, repeats, watch, note)
    ended, resumed = runs(copy, repeats, watch, note)
    return [
        modes,
        Row("Training-data protocol", [], 0, "needs the task's data: run without --dry"),
        evaluation,
        *rows,
        ended,
        semantic,
        resumed,
    ]


def slow(recipe: Recipe) -> bool:
    """Whether a cycle takes minutes here unless it is cut to a few sequences."""
    return hardware(recipe.model).device == "cpu" and shape_for(recipe).parameters > SLOW


def small(recipe: Recipe, seed: int | None = None, tokens: int = 64, **learner: Any) -> Recipe:
    """The recipe with few problems, short responses and two cycles; everything else as it is."""
    rollout = recipe.rollout
    problems, samples, group = (1, 2, 2) if slow(recipe) else (4, 4, 3)
    short = {"max_new_tokens": min(tokens, rollout.student.max_new_tokens)}
    return recipe.model_copy(
        update={
            "run": recipe.run.model_copy(
                update={"cycles": 2, "checkpoint_every": 1, "seed": recipe.run.seed if seed is None else seed}
            ),
            "rollout": rollout.model_copy(
                update={
                    "problems_per_cycle": min(problems, rollout.problems_per_cycle),
                    "samples_per_problem": min(samples, rollout.samples_per_problem),
                    "student": rollout.student.model_copy(update=short),
                    "teacher": rollout.teacher.model_copy(update=short),
                }
            ),
            "evaluation": recipe.evaluation.model_copy(
                update={
                    "at": [],
                    "samples": samples,
                    "pass_k": [1],
                    "sampling": recipe.evaluation.sampling.model_copy(update=short),
                }
            ),
            "learner": recipe.learner.model_copy(update=learner),
            "method": recipe.method.small(group) if isinstance(recipe.method, MethodOptions) else recipe.method,
        }
    )


def embedded_copy(recipe: Recipe) -> Recipe:
    """The recipe's method on the embedded model and task, as a shipped recipe has it there where there is one."""
    shipped = f"embedded/{recipe.method.name}"
    if shipped in config.shipped():
        base = config.load(shipped)
        return base.model_copy(update={"name": recipe.name, "method": recipe.method.on(base.method)})
    prompts = {role: template for role in OPTIONAL if (template := getattr(recipe.prompts, role))}
    tables = {
        "name": recipe.name,
        "model": {"expert": "embedded-expert"} if recipe.model.expert else {},
        "prompts": prompts,
        "rollout": {"samples_per_problem": recipe.rollout.samples_per_problem},
        "method": recipe.method.model_dump(),
    }
    return config.load("embedded/_base", tables)


def perturb(session: Session) -> None:
    """Move both adapters off the identity: at the start every divergence between them is exactly zero."""
    session.model.perturb(seed=7, scale=0.02)
    session.loop.publish()


class _Snapshot(Silent):
    """A display that copies the run as a kill in the middle of the second cycle would leave it."""

    def __init__(self, run: Path, copy: Path):
        self._run, self._copy = run, copy

    def phase(self, cycle: int, name: str) -> None:
        if (cycle, name) == (1, "adapt"):
            shutil.copytree(self._run, self._copy)


def runs(recipe: Recipe, repeats: int, watch: Watch, note: str = "") -> tuple[Row, Row]:
    """The rows that take whole cycles.

    Two cycles three times: as the recipe says, the same broken in the second cycle and resumed, and with float32
    autograd in the place of the recipe's implementation of the losses. The first cycle of both implementations reads
    the same responses, so their updates can be compared as such.
    """
    chosen, _ = fused.settle(recipe.learner.implementation, torch.device(hardware(recipe.model).device))
    differences: list[float] = []
    cosines: list[float] = []
    resumed: list[float] = []
    even = flipped = right = count = 0
    lines: list[dict[str, Any]] = []
    for repeat in watch.each("End-to-end difference and resume", range(repeats)):
        seed = recipe.run.seed + repeat
        copy, plain = small(recipe, seed), small(recipe, seed, implementation="reference")
        with _folder() as whole, _folder() as broken, _folder() as other:
            train(copy, whole, False, _Snapshot(whole, broken), patient=False)
            _scramble(seed)
            train(copy, broken, True, Silent(), patient=False)
            resumed.append(float(_bytes(whole) == _bytes(broken)))
            lines += RunFolder(whole).read_metrics()
            train(plain, other, False, Silent(), patient=False)
            (a, first), (b, second) = _ends(copy, [whole, other])
        flips = int(np.sum(a != b))
        differences.append(100 * float(a.mean() - b.mean()))
        # Equal up to chance: of the outcomes that differ, neither side wins more than two standard errors too often.
        cosines.append(min(exact.alike(first[adapter], second[adapter]) for adapter in first))
        even += abs(float(np.sum(a) - np.sum(b))) <= 2 * math.sqrt(flips) and cosines[-1] >= UPDATE_BOUND
        flipped, right, count = flipped + flips, right + int(a.sum()), count + len(a)
    rollout = small(recipe).rollout
    cut = rollout.student.max_new_tokens < recipe.rollout.student.max_new_tokens
    # Responses that were made short here are no sign of anything.
    trouble = tuple(text for text in counted(lines, "small cycles") if not (cut and "hit the token limit" in text))
    told = (
        f"{chosen} minus reference, in points: {flipped} of {count} outcomes differ, {right} are right, and the first "
        f"updates have a cosine of {min(cosines):.4f}; passed when those that differ are even up to chance and the "
        f"cosine is at least {UPDATE_BOUND:g}; two cycles of {rollout.problems_per_cycle} x "
        f"{rollout.samples_per_problem} responses of at most {rollout.student.max_new_tokens} tokens"
    )
    return (
        Row("End-to-end paired difference", differences, even, ", ".join(filter(None, [told, note])), trouble),
        Row("Resume and RNG recovery", resumed, sum(map(int, resumed)), note),
    )


def _scramble(seed: int) -> None:
    """Leave the global streams as another process would have them: a resume must bring its own back."""
    random.seed(derive_seed("scrambled", seed))
    torch.manual_seed(derive_seed("scrambled", seed) >> 1)


def _ends(recipe: Recipe, runs: Sequence[Path]) -> list[tuple[np.ndarray, dict[Adapter, torch.Tensor]]]:
    """Of each run: its last student's outcomes on a few held-out problems, and how far its first cycle moved each
    adapter.
    """
    out: list[tuple[np.ndarray, dict[Adapter, torch.Tensor]]] = []
    with session(recipe) as assembled:
        task = assembled.task
        few = Problems(task.identity, (), {name: tuple(p)[:4] for name, p in task.evaluation().items()}, task.style)
        start = _vectors(assembled)
        for run in runs:
            checkpoint.load_adapters(assembled.model, RunFolder(run).checkpoint(1))
            reached = _vectors(assembled)
            moved: dict[Adapter, torch.Tensor] = {a: reached[a] - start[a] for a in TRAINABLE}
            checkpoint.load_adapter(assembled.model, "student", RunFolder(run).checkpoint(recipe.run.cycles))
            assembled.loop.publish()
            result = evaluate(
                assembled.loop.lab,
                assembled.loop.prompts,
                few,
                recipe.evaluation,
                adapter="student",
                versions=assembled.model.versions,
                seed=derive_seed("doctor", recipe.run.seed),
                step=recipe.run.cycles,
                max_context=assembled.model.max_context,
            )
            outcomes = np.concatenate([values.flatten() for values in result.outcomes().values()])
            out.append((outcomes, moved))
    return out


def _vectors(session: Session) -> dict[Adapter, torch.Tensor]:
    """Each adapter as one vector."""
    return {
        adapter: torch.cat([p.detach().flatten().clone() for p in session.model.parameters(adapter).values()])
        for adapter in TRAINABLE
    }


@contextmanager
def _folder() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="past-doctor-") as name:
        yield Path(name) / "run"


def _bytes(run: Path) -> dict[str, bytes]:
    found = RunFolder(run)
    last = found.checkpoint(found.steps()[-1])
    files = [
        found.metrics_file,
        *sorted(p for p in last.rglob("*") if p.suffix == ".safetensors"),
        last / STATE,
    ]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def shape_for(recipe: Recipe) -> estimate.Shape:
    """The model's dimensions: from its configuration, or for well-known models without it."""
    if recipe.model.path in estimate.KNOWN:
        return estimate.KNOWN[recipe.model.path]
    return estimate.shape_of(read_config(recipe.model), recipe.model.path)


def needs(console: Console, recipe: Recipe) -> None:
    """Memory and time on this machine, what to change when it will not fit, and what it takes on GPUs of 80 GB."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = estimate.available(device)
    found = trace(recipe, "gpu" if device.type == "cuda" else "cpu", size=free)
    count = found.shape.parameters / 1e6
    size = f"{count / 1e3:.2f} B" if count >= 1000 else f"{count:.3g} M"
    console.print(f"\n{recipe.model.path}: {size} parameters, {found.choice.dtype}", style="bold")
    for name, phase in found.phases.items():
        console.print(f"  {name:32s} {phase.peak / estimate.GIB:8.2f} GiB", highlight=False)
    if "evaluation" not in found.phases:
        console.print("  responses and evaluation are drawn elsewhere, or by an engine that is not traced")
    fits = all(found.fits(name, free) for name in found.phases)
    verdict = "fits" if fits else "will NOT fit"
    worst = f"{found.peak / estimate.GIB:8.2f} GiB; {free / estimate.GIB:.1f} GiB free: {verdict}"
    console.print(f"  {'at the worst moment':32s} {worst}")
    if not fits:
        for line in advice(found, free):
            console.print(f"  - {line}", highlight=False, soft_wrap=True)
    # A CPU multiplies half precision far slower than float32, and nobody would train so on it.
    dtype = torch.float32 if device.type == "cpu" else getattr(torch, found.choice.dtype)
    phases = found.seconds(estimate.measure(dtype, device, found.load.student_samples))
    cycle = sum(phases.values())
    shown = ", ".join(f"{name} {_duration(value)}" for name, value in phases.items() if value)
    longest = _duration(cycle * recipe.run.cycles)
    console.print(f"  a cycle at most {_duration(cycle)} here, every response at its limit:", highlight=False)
    console.print(f"    {shown}", highlight=False)
    console.print(f"  {recipe.run.cycles} cycles {longest}, evaluation apart", highlight=False)
    if found.shape.parameters > SLOW:
        on_gpus(console, recipe)


def on_gpus(console: Console, recipe: Recipe) -> None:
    """What fits on one and on eight GPUs of 80 GB, by phase: traced, not measured on one."""
    split = recipe.distributed.split
    for processes in (1, -(-8 // split) * split):
        found = trace(recipe, "gpu", processes)
        size = estimate.GPUS[GPU][2]
        peaks = [
            f"{name} {phase.peak / estimate.GIB:.1f} GiB" + ("" if found.fits(name, size) else " (does NOT fit)")
            for name, phase in found.phases.items()
        ]
        console.print(f"  on {processes} x 80 GB, traced: {', '.join(peaks)}", highlight=False, soft_wrap=True)
        if "evaluation" in found.phases:
            console.print(f"    {_batch(found)}", highlight=False, soft_wrap=True)


def _batch(found: Needs) -> str:
    length = f"{found.recipe.evaluation.sampling.max_new_tokens:,}"
    if not found.rows:
        return f"evaluation: not even one response of {length} tokens can be decoded"
    return f"evaluation: {found.rows} responses of {length} tokens at a time"


def advice(found: Needs, free: int) -> list[str]:
    """What would make the recipe fit, most telling first."""
    out: list[str] = []
    recipe = found.recipe
    device: Device = "gpu" if found.choice.device.startswith("cuda") else "cpu"

    def would(text: str, changed: Recipe) -> None:
        peak = max(
            phase.peak for name, phase in trace(changed, device, size=free).phases.items() if name not in decoding
        )
        out.append(
            f"{text}: steps of {peak / estimate.GIB:.1f} GiB, {'fits' if peak <= SHARE * free else 'still too much'}"
        )

    decoding = [name for name in ("sampling", "evaluation") if name in found.phases]
    if "evaluation" in decoding and not found.rows:
        out.append(_batch(found))
    if not all(found.fits(name, free) for name in found.phases if name not in decoding):
        smaller = max(found.longest, recipe.learner.token_budget // 4)
        learner = recipe.learner.model_copy(update={"token_budget": smaller})
        would(f"learner.token_budget = {smaller}", recipe.model_copy(update={"learner": learner}))
        if found.choice.dtype == "float32":
            half = recipe.model.model_copy(update={"dtype": "bfloat16"})
            would('model.dtype = "bfloat16"', recipe.model_copy(update={"model": half}))
    out.append("or a smaller model, or rollouts on vLLM servers of their own (engine.name = 'vllm', mode = 'server')")
    return out


def _duration(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:,.1f} h"
