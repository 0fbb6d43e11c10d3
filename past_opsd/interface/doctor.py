"""`past doctor RECIPE`: the checks of tab:protocol-checks on this recipe, and what it needs on this machine.

Every check is repeated on other problems and seeds. What would take long runs on a small copy of the recipe: few
problems, short responses, two cycles; fewer of them, and two repeats, where the model is large for a CPU. `--dry` loads
no weights: numerics run on made hidden states of the model's shape, the other checks on the embedded model with the
recipe's method.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from past_opsd.core import config, life
from past_opsd.core.config import MethodOptions, Recipe
from past_opsd.core.losses import Match
from past_opsd.core.nouns import Attempt, PastError, Problem, Response, Term, Tokens, Verdict, View, derive_seed
from past_opsd.core.prompts import OPTIONAL, Prompts
from past_opsd.interface import arguments
from past_opsd.learner import Learner
from past_opsd.methods import distill
from past_opsd.policy import estimate, fused
from past_opsd.policy.pretrained import hardware, load_tokenizer, read_config
from past_opsd.policy.templates import check as check_templates
from past_opsd.run import checkpoint
from past_opsd.run.evaluate import evaluate
from past_opsd.run.folder import STATE, RunFolder
from past_opsd.run.health import counted
from past_opsd.run.train import Session, Silent, session, train
from past_opsd.tasks import Problems

LOSS_BOUND = 1e-3
HALF_BOUND = 1e-2  # the paper's own implementations in bfloat16 are 0.0025 to 0.0038 off
COSINE_BOUND = 0.999
MADE_VOCAB = 2048  # CPUs without bfloat16 units take minutes for a large head
REPEATS = arguments.REPEATS
SLOW = 30_000_000  # parameters; on a CPU, a cycle of more takes minutes unless it is cut to a few sequences

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the table: the mean of what was observed, how many repeats passed, and a word on it."""

    name: str
    observed: list[float]
    passed: int
    note: str = ""
    warnings: tuple[str, ...] = ()
    """What the runs of this check warned of; they fail nothing."""


class Watch:
    """Says on stderr what is being checked: a line that moves on a terminal, a line for each check elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )

    def __enter__(self) -> Watch:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items, one after the other."""
        todo = list(items)
        start, task = time.monotonic(), self._progress.add_task(name, total=len(todo))
        for done, item in enumerate(todo):
            life.doing(f"checking: {name}, {done + 1} of {len(todo)}")
            yield item
            self._progress.advance(task)
        self._progress.remove_task(task)
        if not self._console.is_terminal:
            text = f"checked: {name} ({len(todo)} in {time.monotonic() - start:.1f} s)"
            self._console.print(text, highlight=False, soft_wrap=True)


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
    with session(small(recipe)) as parts:
        tokenizer, problems = parts.model.tokenizer, parts.loop.problems
        rows = [
            prompt_modes(recipe, tokenizer, _choose(problems, repeats), watch),
            training_protocol(parts, recipe, _choose(problems, repeats), watch),
            evaluation_protocol(parts, recipe, repeats, watch),
            *numerics(parts, repeats, watch),
        ]
    return [*rows, *runs(recipe, repeats, watch)]


def dry(recipe: Recipe, repeats: int, watch: Watch) -> list[Row]:
    """What can be checked without the recipe's weights."""
    try:
        tokenizer = load_tokenizer(recipe.model)
        made = [_placeholder(i) for i in range(repeats)]
        modes = prompt_modes(recipe, tokenizer, made, watch)
    except PastError as error:
        modes = Row("Model and thinking mode", [], 0, f"needs the tokenizer: {error}")
    return [
        modes,
        Row("Training-data protocol", [], 0, "needs the task's data: run without --dry"),
        recipe_protocol(recipe),
        *made_numerics(recipe, repeats, watch),
        *runs(embedded_copy(recipe), repeats, watch, "on the embedded model"),
    ]


def slow(recipe: Recipe) -> bool:
    """Whether a cycle takes minutes here unless it is cut to a few sequences."""
    return hardware(recipe.model).device == "cpu" and shape_for(recipe).parameters > SLOW


def small(recipe: Recipe, seed: int | None = None, **learner: Any) -> Recipe:
    """The recipe with few problems, short responses and two cycles; everything else as it is."""
    rollout = recipe.rollout
    problems, samples, tokens, group = (1, 2, 64, 2) if slow(recipe) else (4, 4, 64, 3)
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


def _choose(problems: Sequence[Problem], repeats: int) -> list[Problem]:
    order = np.random.default_rng(derive_seed("doctor", len(problems))).permutation(len(problems))
    return [problems[order[i % len(order)]] for i in range(repeats)]


def _placeholder(i: int) -> Problem:
    return Problem(f"doctor-{i}", f"What is {i} + {i}?", f"{i} + {i} = {2 * i}. \\boxed{{{2 * i}}}", str(2 * i))


def prompt_modes(recipe: Recipe, tokenizer: Any, problems: Sequence[Problem], watch: Watch) -> Row:
    """The template renders every role, and honours the thinking mode that the recipe asks for."""
    findings = check_templates(tokenizer, recipe.prompts)
    prompts = Prompts(tokenizer, recipe.prompts)
    broken = [f for f in findings if f.level == "error"]
    name = "Model and thinking mode"
    observed = [float(not broken and _renders(prompts, problem)) for problem in watch.each(name, problems)]
    return Row(name, observed, sum(map(int, observed)), "; ".join(f.text for f in findings))


def _renders(prompts: Prompts, problem: Problem) -> bool:
    views = (prompts.student(problem), prompts.evaluation(problem), prompts.hindsight(problem, "an attempt"))
    return all(views) and len(set(views)) >= 2


def training_protocol(parts: Session, recipe: Recipe, problems: Sequence[Problem], watch: Watch) -> Row:
    """The student reads X alone; the teacher reads what its method gives it; both fit with the whole response."""
    decode = parts.model.tokenizer.decode
    observed: list[float] = []
    too_long = 0
    name = "Training-data protocol"
    for problem in watch.each(name, problems):
        attempt = _attempt(parts, problem)
        student = decode(list(attempt.view.prompt))
        teacher = parts.loop.method.teacher_view(attempt)
        room = len(teacher.prompt) + recipe.rollout.student.max_new_tokens
        too_long += room > parts.model.max_context
        hidden = problem.solution.strip() == "" or problem.solution.strip() not in student
        observed.append(float(_holds(decode, attempt.view.prompt, problem.text) and hidden))
    note = f"{too_long} of {len(problems)} do not fit the context and would be dropped" if too_long else ""
    return Row(name, observed, sum(map(int, observed)), note)


def _holds(decode: Callable[[list[int]], str], prompt: Tokens, text: str) -> bool:
    """Whether a prompt contains a text, white space aside (tokenizers may normalise it)."""
    return "".join(text.split()) in "".join(decode(list(prompt)).split())


def _attempt(parts: Session, problem: Problem, correct: bool = False) -> Attempt:
    """The reference in the place of a response: no sampling is needed to look at prompts."""
    tokens = parts.loop.prompts.completion(problem.solution or problem.answer)
    response = Response(tokens, problem.solution or problem.answer, (0.0,) * len(tokens), True)
    view = View("student", parts.loop.prompts.student(problem))
    return Attempt(problem, view, response, Verdict(correct, "correct" if correct else "wrong"))


def evaluation_protocol(parts: Session, recipe: Recipe, repeats: int, watch: Watch) -> Row:
    """Held-out problems are held out, their prompts fit, and every one has an answer to compare with."""
    training = {" ".join(p.text.split()) for p in parts.loop.problems}
    limit, sampling = parts.model.max_context, recipe.evaluation.sampling
    observed: list[float] = []
    name = "Evaluation protocol"
    held_out = [problem for problems in parts.task.evaluation().values() for problem in _choose(problems, repeats)]
    for problem in watch.each(name, held_out):
        fits = len(parts.loop.prompts.evaluation(problem)) + sampling.max_new_tokens <= limit
        observed.append(float(fits and bool(problem.answer) and " ".join(problem.text.split()) not in training))
    return Row(name, observed, sum(map(int, observed)), _protocol(recipe))


def recipe_protocol(recipe: Recipe) -> Row:
    """The evaluation settings alone, where there are no data."""
    return Row("Evaluation protocol", [1.0], 1, _protocol(recipe))


def _protocol(recipe: Recipe) -> str:
    e = recipe.evaluation
    cut = "no cut" if e.sampling.top_p == 1 and e.sampling.top_k == 0 and e.sampling.min_p == 0 else "cut support"
    return (
        f"Avg@{e.samples} at temperature {e.sampling.temperature:g}, {cut}, "
        f"{e.sampling.max_new_tokens:,} new tokens (the paper: 12, 1, no cut, 38,912)"
    )


def numerics(parts: Session, repeats: int, watch: Watch) -> list[Row]:
    """The chosen implementation against float32 autograd: the batch's objective and the adapter's whole gradient."""
    errors: list[float] = []
    cosines: list[float] = []
    chosen = parts.recipe.learner.implementation
    exact = Learner(parts.model, parts.recipe.learner.model_copy(update={"implementation": "reference"}), 1)
    perturb(parts)
    for problem in watch.each("Batch loss and gradient", _choose(parts.loop.problems, repeats)):
        batch = parts.loop.method
        attempt = _attempt(parts, problem)
        tokens = attempt.response.tokens[:64]
        attempt = replace(attempt, response=replace(attempt.response, tokens=tokens, logprobs=(0.0,) * len(tokens)))
        teacher = batch.teacher_view(attempt)
        frozen = teacher if teacher.adapter != "student" else View("base", teacher.prompt)
        term = _match(attempt, frozen)
        a, b = (learner.gradient("student", [term]) for learner in (parts.learner, exact))
        errors.append(abs(a[0] - b[0]))
        cosines.append(cosine(a[1], b[1]))
    return _numeric_rows(errors, cosines, chosen, parts.model.head.dtype)


def _match(attempt: Attempt, frozen: View) -> Term:
    return distill(attempt, frozen, Match(math.inf), 1.0)


def perturb(parts: Session) -> None:
    """Move both adapters off the identity: at the start every divergence between them is exactly zero."""
    parts.model.perturb(seed=7, scale=0.02)
    parts.loop.publish()


def made_numerics(recipe: Recipe, repeats: int, watch: Watch) -> list[Row]:
    """The same comparison from made hidden states of the model's width, with a part of its vocabulary."""
    shape = shape_for(recipe)
    vocab = min(shape.vocab, MADE_VOCAB)
    choice = hardware(recipe.model)
    dtype = getattr(torch, choice.dtype)
    errors: list[float] = []
    cosines: list[float] = []
    for repeat in watch.each("Batch loss and gradient", range(repeats)):
        generator = torch.Generator().manual_seed(repeat)
        live = torch.randn(8, shape.hidden, generator=generator)
        frozen = live + 0.3 * torch.randn(8, shape.hidden, generator=generator)
        head = torch.randn(vocab, shape.hidden, generator=generator).mul_(4 * shape.hidden**-0.5)
        live, frozen, head = (x.to(choice.device, dtype) for x in (live, frozen, head))
        tokens = torch.randint(vocab, (8,), generator=generator).to(choice.device)
        jobs = [fused.Job(Match(math.inf), torch.full((8,), 1 / 8, device=choice.device))]
        a, b = (
            fused.run(name, live, frozen, head, None, tokens, jobs)
            for name in (recipe.learner.implementation, "reference")
        )
        errors.append(abs(float(a.values[0].mean() - b.values[0].mean())))
        cosines.append(cosine(a.grad, b.grad))
    return _numeric_rows(errors, cosines, recipe.learner.implementation, dtype)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two gradients as vectors."""
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def _numeric_rows(errors: list[float], cosines: list[float], implementation: str, dtype: torch.dtype) -> list[Row]:
    bound = HALF_BOUND if dtype.itemsize == 2 else LOSS_BOUND
    note = f"{implementation} in {str(dtype).removeprefix('torch.')} against float32 autograd, at most {bound:g}"
    return [
        Row("Batch-loss absolute error", errors, sum(e <= bound for e in errors), note),
        Row("Batch-gradient cosine", cosines, sum(c >= COSINE_BOUND for c in cosines)),
    ]


def semantics(recipe: Recipe, repeats: int, watch: Watch, note: str = "") -> Row:
    """What holds whatever the model: the outcome enters no prompt, equal contexts have no KL, one adapter moves."""
    observed: list[float] = []
    name = "CPU semantic tests"
    with session(small(recipe)) as parts:
        perturb(parts)
        for problem in watch.each(name, _choose(parts.loop.problems, repeats)):
            checks = [_outcome_is_hidden(parts, problem), _equal_contexts(parts, problem), _one_moves(parts, problem)]
            observed.append(sum(checks) / len(checks))
    return Row(name, observed, sum(value == 1.0 for value in observed), note)


def _outcome_is_hidden(parts: Session, problem: Problem) -> bool:
    if parts.loop.method.tells_outcome:
        return True
    return parts.loop.method.teacher_view(_attempt(parts, problem, True)) == parts.loop.method.teacher_view(
        _attempt(parts, problem, False)
    )


def _equal_contexts(parts: Session, problem: Problem) -> bool:
    """The same view twice: the divergence and its gradient vanish, so prompts and tokens are aligned."""
    attempt = _attempt(parts, problem)
    value, gradient = parts.learner.gradient("student", [_match(attempt, attempt.view)])
    return abs(value) < 1e-5 and float(gradient.abs().max()) < 1e-4


def _one_moves(parts: Session, problem: Problem) -> bool:
    teacher, student = (parts.model.digest(adapter) for adapter in ("teacher", "student"))
    parts.learner.step("student", [_match(attempt := _attempt(parts, problem), View("base", attempt.view.prompt))])
    return parts.model.digest("teacher") == teacher and parts.model.digest("student") != student


class _Snapshot(Silent):
    """A display that copies the run as a kill in the middle of the second cycle would leave it."""

    def __init__(self, run: Path, copy: Path):
        self._run, self._copy = run, copy

    def phase(self, cycle: int, name: str) -> None:
        if (cycle, name) == (1, "adapt"):
            shutil.copytree(self._run, self._copy)


def runs(recipe: Recipe, repeats: int, watch: Watch, note: str = "") -> list[Row]:
    """The rows that take whole cycles.

    Two cycles three times: as the recipe says, the same broken in the second cycle and resumed, and with float32
    autograd in the place of the recipe's implementation of the losses.
    """
    chosen = recipe.learner.implementation
    differences: list[float] = []
    resumed: list[float] = []
    even = flipped = right = count = 0
    lines: list[dict[str, Any]] = []
    for repeat in watch.each("End-to-end difference and resume", range(repeats)):
        seed = recipe.run.seed + repeat
        copy, exact = small(recipe, seed), small(recipe, seed, implementation="reference")
        with _folder() as whole, _folder() as broken, _folder() as other:
            train(copy, whole, False, _Snapshot(whole, broken), patient=False)
            train(copy, broken, True, Silent(), patient=False)
            resumed.append(float(_bytes(whole) == _bytes(broken)))
            lines += RunFolder(whole).read_metrics()
            train(exact, other, False, Silent(), patient=False)
            a, b = _outcomes(copy, [whole, other])
        flips = int(np.sum(a != b))
        differences.append(100 * float(a.mean() - b.mean()))
        # Equal up to chance: of the outcomes that differ, neither side wins more than two standard errors too often.
        even += abs(float(np.sum(a) - np.sum(b))) <= 2 * math.sqrt(flips)
        flipped, right, count = flipped + flips, right + int(a.sum()), count + len(a)
    rollout = small(recipe).rollout
    cut = rollout.student.max_new_tokens < recipe.rollout.student.max_new_tokens
    # Responses that were made short here are no sign of anything.
    trouble = tuple(text for text in counted(lines, "small cycles") if not (cut and "hit the token limit" in text))
    told = (
        f"{chosen} minus reference, in points: {flipped} of {count} outcomes differ, {right} are right; passed when "
        f"those that differ are even up to chance; two cycles of {rollout.problems_per_cycle} x "
        f"{rollout.samples_per_problem} responses of at most {rollout.student.max_new_tokens} tokens"
    )
    return [
        Row("End-to-end paired difference", differences, even, ", ".join(filter(None, [told, note])), trouble),
        semantics(recipe, repeats, watch, note),
        Row("Resume and RNG recovery", resumed, sum(map(int, resumed)), note),
    ]


def _outcomes(recipe: Recipe, runs: Sequence[Path]) -> list[np.ndarray]:
    """Of each run's last student on a few held-out problems."""
    out: list[np.ndarray] = []
    with session(recipe) as parts:
        task = parts.task
        few = Problems(task.identity, (), {name: tuple(p)[:4] for name, p in task.evaluation().items()}, task.style)
        for run in runs:
            checkpoint.load_adapter(parts.model, "student", RunFolder(run).checkpoint(recipe.run.cycles))
            parts.loop.publish()
            result = evaluate(
                parts.loop.lab,
                parts.loop.prompts,
                few,
                recipe.evaluation,
                adapter="student",
                versions=parts.model.versions,
                seed=derive_seed("doctor", recipe.run.seed),
                step=recipe.run.cycles,
                max_context=parts.model.max_context,
            )
            out.append(np.concatenate([outcomes.flatten() for outcomes in result.outcomes().values()]))
    return out


@contextmanager
def _folder() -> Iterator[Path]:
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
    """Memory and time on this machine, and what to change when it will not fit."""
    shape, choice = shape_for(recipe), hardware(recipe.model)
    load = estimate.expected_load(recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = estimate.memory(recipe, shape, load, choice.dtype, choice.gradient_checkpointing)
    total, free = sum(parts.values()), estimate.available(device)
    count = shape.parameters / 1e6
    size = f"{count / 1e3:.2f} B" if count >= 1000 else f"{count:.3g} M"
    console.print(f"\n{recipe.model.path}: {size} parameters, {choice.dtype}", style="bold")
    for name, part in parts.items():
        console.print(f"  {name:32s} {part / estimate.GIB:8.2f} GiB", highlight=False)
    fits = total <= 0.9 * free
    verdict = "fits" if fits else "will NOT fit"
    console.print(f"  {'together':32s} {total / estimate.GIB:8.2f} GiB; {free / estimate.GIB:.1f} GiB free: {verdict}")
    if not fits:
        for line in advice(recipe, shape, load, free, choice.dtype):
            console.print(f"  - {line}", highlight=False, soft_wrap=True)
    # A CPU multiplies half precision far slower than float32, and nobody would train so on it.
    dtype = torch.float32 if device.type == "cpu" else getattr(torch, choice.dtype)
    speed = estimate.measure(dtype, device, load.student_samples)
    phases = estimate.seconds(shape, load, speed, choice.gradient_checkpointing)
    cycle = sum(phases.values())
    shown = ", ".join(f"{name} {_duration(value)}" for name, value in phases.items() if value)
    longest = _duration(cycle * recipe.run.cycles)
    console.print(f"  a cycle at most {_duration(cycle)} here, every response at its limit:", highlight=False)
    console.print(f"    {shown}", highlight=False)
    console.print(f"  {recipe.run.cycles} cycles {longest}, evaluation apart", highlight=False)


def advice(recipe: Recipe, shape: estimate.Shape, load: estimate.Load, free: int, dtype: str) -> list[str]:
    """What would make the recipe fit, most telling first."""
    out: list[str] = []

    def would(text: str, changed: Recipe, dtype: str) -> None:
        size = sum(estimate.memory(changed, shape, estimate.expected_load(changed), dtype, True).values())
        fits = "fits" if size <= 0.9 * free else "still too much"
        out.append(f"{text}: {size / estimate.GIB:.1f} GiB, {fits}")

    smaller = max(load.longest, recipe.learner.token_budget // 4)
    learner = recipe.learner.model_copy(update={"token_budget": smaller})
    would(f"learner.token_budget = {smaller}", recipe.model_copy(update={"learner": learner}), dtype)
    if dtype == "float32":
        would('model.dtype = "bfloat16"', recipe, "bfloat16")
    half = recipe.rollout.model_copy(
        update={
            role: sampling.model_copy(update={"max_new_tokens": max(1, sampling.max_new_tokens // 2)})
            for role, sampling in (("student", recipe.rollout.student), ("teacher", recipe.rollout.teacher))
        }
    )
    shorter = recipe.model_copy(update={"rollout": half, "learner": learner})
    would("that and half of max_new_tokens for both roles", shorter, dtype)
    out.append("or a smaller model, or rollouts on vLLM servers of their own (engine.name = 'vllm', mode = 'server')")
    return out


def _duration(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:,.1f} h"
