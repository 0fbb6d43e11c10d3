"""What a recipe needs on a device: its own cycle and evaluation, run on shapes.

The real loop makes the terms with the recipe's own method, the real learner takes both steps, and the torch engine's
own rows grow to the length of the longest response; only the responses are made up, every one at its limit and every
other one right. The blocks of a decoder are alike, so two and three of them are traced, and each further one counts as
the third; what is done again on the same shapes is run once and counted as often as it is done.

`measure` runs the same on real tensors, with weights drawn at random, and asks the allocator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from past_opsd.core import config, life
from past_opsd.core.config import ModelSection, Recipe, Sampling
from past_opsd.core.nouns import Adapter, Closing, Problem, Response, Term, Tokens, Verdict
from past_opsd.core.prompts import Prompts
from past_opsd.learner.diagnostics import Log
from past_opsd.learner.plan import Bundle
from past_opsd.learner.step import Learner
from past_opsd.methods import Method
from past_opsd.policy import fused, model
from past_opsd.policy.distributed import World
from past_opsd.policy.estimate import (
    BYTES,
    GIB,
    MACHINE,
    PROBLEM,
    SOLUTION,
    Load,
    Shape,
    Speed,
    expected_load,
    seconds,
    shape_of,
)
from past_opsd.policy.memory import SHARE, Room
from past_opsd.policy.model import TRAINABLE
from past_opsd.policy.pretrained import Choice, Machine, hardware
from past_opsd.policy.tracing import Device, Phase, Tracer, replaced
from past_opsd.policy.weightless import Weightless, configuration
from past_opsd.rollout.engines import Request
from past_opsd.rollout.engines._draw import choose
from past_opsd.rollout.engines._rows import DRAWING, Rows, Sizes
from past_opsd.rollout.lab import Lab
from past_opsd.run.loop import Loop

PHASES = {"adapt": "teacher step", "distill": "student step"}
"""The cycle's phases that are traced as such, and what they are called here."""
EARLY = 512
"""Problems that a method finds which works before the first cycle."""
STANDING = ("weights", "adapters", "optimizer")
"""Kinds that no phase frees."""
T = TypeVar("T")


@dataclass(frozen=True)
class Needs:
    """What the phases of a recipe take on one of its devices."""

    recipe: Recipe
    choice: Choice
    processes: int
    phases: dict[str, Phase]
    longest: int
    """Tokens of the longest row of a step."""
    seated: dict[str, int]
    """Responses of their longest that sampling and evaluation decode together; the engine starts more, and sets some
    aside."""
    shape: Shape

    @property
    def rows(self) -> int:
        """What evaluation decodes together."""
        return self.seated.get("evaluation", 0)

    @property
    def split(self) -> int:
        """How many processes hold a row of a step together."""
        return self.recipe.distributed.split if self.processes > 1 else 1

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of all phases."""
        return max(phase.peak for phase in self.phases.values())

    def fits(self, name: str, size: float) -> bool:
        """Whether a phase stays within so many bytes; decoding takes what is free, if one response fits."""
        if name in self.seated:
            return self.seated[name] > 0
        return self.phases[name].peak <= SHARE * size

    def beyond(self, name: str) -> int:
        """Bytes of a phase at its worst moment, beyond what no phase frees."""
        return sum(size for kind, size in self.phases[name].kinds.items() if kind not in STANDING)

    @property
    def load(self) -> Load:
        """What a cycle asks for."""
        return expected_load(self.recipe)

    def seconds(self, speed: Speed) -> dict[str, float]:
        """Seconds of a cycle by phase; nothing of rollouts that are made elsewhere."""
        launches = self.phases["sampling"].launches if "sampling" in self.phases else 0
        found = seconds(
            self.shape,
            self.load,
            speed,
            self.choice.gradient_checkpointing,
            self.processes,
            dtype=self.choice.dtype,
            launches=launches,
        )
        elsewhere = config.ask_engine(self.recipe).elsewhere
        return {name: value for name, value in found.items() if not (elsewhere and name in ("rollout", "draw"))}


def seats(recipe: Recipe, shape: Shape, dtype: str, size: float, prompt: int, limit: int, requests: int) -> Room:
    """The room that the torch engine has for responses on a device of so many bytes, as it would find it free."""
    width, lora = BYTES[dtype], shape.lora(recipe.model.lora.rank)
    pair = 2 * shape.kv_heads * shape.head_dim * width
    given = recipe.engine.model_dump().get("memory_gib")
    free = SHARE * (size - shape.parameters * width - 2 * 3 * 4 * lora)
    batch = min(recipe.engine.model_dump().get("batch", 64), requests)
    row = DRAWING * shape.vocab + 20 * limit
    return Room(int(free if given is None else given * GIB), (shape.layers + 1) * pair, row, max(1, batch))


def with_length(recipe: Recipe, length: int) -> Recipe:
    """The recipe with responses of so many tokens in training and evaluation, whatever context that takes."""

    def cut(sampling: Sampling) -> Sampling:
        return sampling.model_copy(update={"max_new_tokens": length})

    rollout = recipe.rollout
    changed = rollout.model_copy(update={"student": cut(rollout.student), "teacher": cut(rollout.teacher)})
    evaluation = recipe.evaluation.model_copy(update={"sampling": cut(recipe.evaluation.sampling)})
    context = recipe.model.model_copy(update={"max_context": 4 * (length + PROBLEM + SOLUTION)})
    return recipe.model_copy(update={"rollout": changed, "evaluation": evaluation, "model": context})


def trace(
    recipe: Recipe, device: Device = "gpu", processes: int = 1, size: float = 80e9, layers: int | None = None
) -> Needs:
    """Trace a recipe as one of so many processes on devices of `size` bytes; `layers` cuts the model to so many."""
    length = recipe.rollout.student.max_new_tokens
    life.doing(f"tracing {recipe.name} on {processes} {device.upper()}(s), {length:,} tokens")
    machine = Machine((8, 0) if device == "gpu" else None)
    choice = hardware(recipe.model, machine)
    section = _settled(recipe.model, choice)
    text = configuration(section, section.path).get_text_config()
    count = text.num_hidden_layers if layers is None else layers
    alike = len(set(getattr(text, "layer_types", None) or [""])) == 1
    depths = (2, 3) if alike and count > 3 else (count,)  # the first block alone reads the embeddings
    found = [_trace(recipe, section, device, processes, size, depth) for depth in depths]
    phases = found[0].phases
    if len(found) == 2:
        phases = {name: phase.deeper(found[1].phases[name], count - depths[0]) for name, phase in phases.items()}
    whole = replace(found[0], choice=choice, phases=phases)
    if processes > 1 and recipe.distributed.shard != "none":
        _shard(whole, min(processes, MACHINE) if recipe.distributed.shard == "hybrid" else processes)
    return whole


def _shard(needs: Needs, parts: int) -> None:
    """Take off what the other processes hold of a sharded base: computed, the exchange itself is not traced.

    A step has the block at work and the next one put together; sampling from the trainer's weights all of them.
    """
    width, shape = BYTES[needs.choice.dtype], needs.shape
    away = shape.body * width * (parts - 1) // parts
    for name, phase in needs.phases.items():
        together = shape.body if name in ("sampling", "evaluation") else 2 * shape.block
        for kinds in phase.peaks.values():
            kinds["weights"] += together * width - away


def _settled(section: ModelSection, choice: Choice) -> ModelSection:
    return section.model_copy(
        update={
            "device": "meta",
            "device_map": "single",
            "dtype": choice.dtype,
            "attention": "eager" if choice.attention == "eager" else "sdpa",
            "gradient_checkpointing": choice.gradient_checkpointing,
        }
    )


def _trace(recipe: Recipe, section: ModelSection, device: Device, processes: int, size: float, layers: int) -> Needs:
    shape, seated = shape_of(configuration(section, section.path), section.path), dict[str, int]()
    tracer = Tracer(device)
    with _as_on(device, tracer), tracer:
        weightless = Weightless(section, _Peers(0, processes), layers, recipe.distributed.split)
        named = dict(weightless.peft.named_parameters())
        tracer.hold((p for name, p in named.items() if "lora_" not in name), "weights")
        tracer.hold((p for name, p in named.items() if "lora_" in name), "adapters")
        if weightless.expert is not None:
            tracer.hold(weightless.expert.network.parameters(), "weights")
        _ = weightless.shares_prompts  # tried once, before the first cycle
        learner = _Watched(tracer, weightless, recipe, device)
        _settle(learner, weightless, device)
        tracer.hold(_states(learner), "optimizer")
        made = _Made(_fitting(recipe, weightless), len(weightless.head))
        loop = _loop(recipe, weightless, learner, made)
        loop.prepare()
        made.batches.clear()
        phases = {name: Phase() for name in PHASES.values()}
        loop.cycle(0, lambda name: tracer.begin(phases.get(PHASES.get(name, ""), Phase())) and None)
        if config.ask_engine(recipe).here:
            phases["sampling"] = tracer.begin(Phase())
            seated["sampling"] = _sample(recipe, weightless, made, shape, size, processes, tracer.forget)
            phases["evaluation"] = tracer.begin(Phase())
            asked = [loop.prompts.evaluation(p) for p in loop.problems[:8]]
            sampling, prompt = recipe.evaluation.sampling, max(map(len, asked))
            room = seats(recipe, shape, section.dtype, size, prompt, sampling.max_new_tokens, 10**6)
            seated["evaluation"] = room.rows(prompt + sampling.max_new_tokens)
            _decode(weightless, asked, room, sampling, "student", tracer.forget)
        tracer.begin(Phase())
    order = ("sampling", "teacher step", "student step", "evaluation")
    found = {name: phases[name] for name in order if name in phases and phases[name].launches}
    return Needs(recipe, weightless.choice, processes, found, learner.longest, seated, shape)


class Allocations:
    """Bytes that a device's allocator gave out at the worst moment of each phase, beyond what stood at its begin.

    A GPU's allocator tells its peak; of the CPU's torch's profiler hears every allocation.
    """

    def __init__(self, device: torch.device) -> None:
        self.peaks: dict[str, int] = {}
        self._cuda = device if device.type == "cuda" else None
        self._name, self._before = "", 0
        self._profile: Any = None

    def phase(self, name: str) -> None:
        """The phase before ends here and this one begins."""
        self.end()
        self._name = name
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each profile writes two lines to stderr
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()

    def end(self) -> None:
        """The current phase ends."""
        if self._name and self._cuda is not None:
            self.peaks[self._name] = torch.cuda.max_memory_allocated(self._cuda) - self._before
        elif self._name:
            self._profile.__exit__(None, None, None)
            events = self._profile.profiler.kineto_results.events()
            changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
            self.peaks[self._name] = max(accumulate((change for *_, change in changes), initial=0))
        self._name = ""


def measure(recipe: Recipe, device: torch.device, size: float = 80e9, world: World | None = None) -> dict[str, int]:
    """What `Needs.beyond` says of steps and sampling, as this device's allocator has it."""
    choice = hardware(recipe.model)
    section = _settled(recipe.model, choice).model_copy(update={"device": str(device)})
    model = Weightless(section, world, split=recipe.distributed.split)
    _ = model.shares_prompts
    learner = Learner(model, recipe.learner, 1)
    _settle(learner, model, "gpu" if device.type == "cuda" else "cpu")
    made = _Made(_fitting(recipe, model), len(model.head))
    loop = _loop(recipe, model, learner, made)
    loop.prepare()
    made.batches.clear()
    heard = Allocations(device)
    loop.cycle(0, heard.phase)
    if config.ask_engine(recipe).here:
        heard.phase("sampling")
        _sample(recipe, model, made, shape_of(model.config, section.path), size)
    heard.end()
    found = {PHASES.get(name, name): peak for name, peak in heard.peaks.items()}
    return {name: found[name] for name in ("sampling", *PHASES.values()) if name in found}


def _fitting(recipe: Recipe, weightless: Weightless) -> int:
    """Tokens of the longest response that the teacher's row still holds: longer ones a run does not train on."""
    context = weightless.max_context
    twice = 2 if config.ask_method(recipe).reads_response else 1
    around = len(Prompts(weightless.tokenizer, recipe.prompts).hindsight(Problem("", "", "", ""), ""))
    return max(1, (context - sum(_parts(context)) - around) // twice)


def _parts(context: int) -> tuple[int, int]:
    """Tokens of a problem and of its solution."""
    return min(PROBLEM, context // 8), min(SOLUTION, context // 4)


def _loop(recipe: Recipe, weightless: Weightless, learner: Learner, made: _Made) -> Loop:
    prompts = Prompts(weightless.tokenizer, recipe.prompts)
    method = config.plugin("method", recipe.method.name).build(recipe.method, prompts, recipe.rollout)
    early = type(method).prepare is not Method.prepare  # it works on a set of problems before the first cycle
    problem, solution = _parts(weightless.max_context)
    problems = [
        Problem(str(i), _words(problem - i % 2, i), _words(solution, i + 1), "1")
        for i in range(max(recipe.rollout.problems_per_cycle, EARLY if early else 0))
    ]
    lab = Lab(made, made)
    return Loop(recipe.run.seed, recipe.rollout, problems, prompts, method, lab, learner, weightless.max_context, 1)


def _words(count: int, seed: int) -> str:
    return " ".join(str(7919 * (seed + 1) + i) for i in range(count))


class EveryOther(Closing):
    """A verifier for which every other response is right, so that every branch of a method has work."""

    identity = ""

    def __init__(self) -> None:
        self._verdicts = cycle((True, False))

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        return [Verdict(next(self._verdicts), "", "1") for _ in items]


class _Made(EveryOther):
    """An engine and a verifier for shapes: every response at its limit, every other one right."""

    def __init__(self, longest: int, vocabulary: int):
        super().__init__()
        self._longest, self._vocabulary = longest, vocabulary
        self.batches: list[tuple[list[Tokens], Sampling, Adapter]] = []

    def publish(self, adapter: Adapter, version: int) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, versions: Mapping[Adapter, int]
    ) -> list[Response]:
        self.batches.append(([r.view.prompt for r in requests], sampling, requests[0].view.adapter))
        length = min(sampling.max_new_tokens, self._longest)
        return [self._response(request.seed, length) for request in requests]

    def _response(self, seed: int, length: int) -> Response:
        tokens = tuple((seed + i) % self._vocabulary for i in range(length))
        return Response(tokens, " ".join(map(str, tokens)), (0.0,) * length, True)


class _Watched(Learner):
    """The learner, and the longest row that it was given; micro-batches of the same shapes are run once."""

    def __init__(self, tracer: Tracer, weightless: Weightless, recipe: Recipe, device: Device):
        super().__init__(weightless, recipe.learner, recipe.run.cycles)
        if device == "gpu" and recipe.learner.implementation == "auto":
            self.implementation = "triton"
        self._tracer = tracer
        self.longest = 0

    def step(self, phase: Adapter, terms: Sequence[Term]) -> dict[str, float]:
        views = [(view, term.tokens) for term in terms for view in (term.live, term.frozen) if view is not None]
        self.longest = max([self.longest, *(len(view.prompt) + len(tokens) for view, tokens in views)])
        return super().step(phase, terms)

    def _round(self, phase: Adapter, n: int, plans: Sequence[Sequence[Sequence[Bundle]]], log: Log) -> list[str]:
        chosen = plans[self._model.world.rank][n]
        shapes = [[b.tree.segments, [t.segments for t in b.frozen_trees], _names(b)] for b in chosen]
        self._tracer.once(
            (phase, self.steps[phase], repr(shapes)), lambda: super(_Watched, self)._round(phase, n, plans, log)
        )
        return []


def _names(bundle: Bundle) -> list[Any]:
    """What decides the loss of a bundle's paths, but for the lengths."""
    return [[(t.name, t.temperature, t.start) for t, _ in path.terms] for path in bundle.paths]


class _Peers(World):
    """One of several processes whose peers say what it says."""

    def gather(self, item: T) -> list[T]:
        return [item] * self.size

    def agree(self, what: str, value: object) -> None: ...

    def group(self, size: int) -> None: ...

    def _together(self, action: Callable[[], object]) -> None: ...


def _settle(learner: Learner, weightless: Weightless, device: Device) -> None:
    """Both optimizers as they are after their first step."""
    for adapter in TRAINABLE:
        optimizer = learner.optimizers[adapter]
        for group in optimizer.param_groups:
            group["foreach"] = device == "gpu"  # torch's own choice there
        for parameter in weightless.parameters(adapter).values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _states(learner: Learner) -> Iterator[Tensor]:
    for optimizer in learner.optimizers.values():
        for state in optimizer.state.values():
            yield from (value for value in state.values() if value.device.type == "meta")


def _sample(
    recipe: Recipe,
    weightless: Weightless,
    made: _Made,
    shape: Shape,
    size: float,
    processes: int = 1,
    counted: Callable[[], None] = lambda: None,
) -> int:
    """What was asked of the made engine, by the torch engine's rows; how many of the longest are decoded together."""
    seated: list[int] = []
    for prompts, sampling, adapter in made.batches:
        own = prompts[: -(-len(prompts) // processes)]
        longest, limit = max(map(len, own)), sampling.max_new_tokens
        room = seats(recipe, shape, weightless.choice.dtype, size, longest, limit, len(own))
        seated.append(room.rows(longest + limit))
        _decode(weightless, own, room, sampling, adapter, counted)
    return min(seated, default=0)


def _decode(
    weightless: Weightless,
    prompts: Sequence[Tokens],
    room: Room,
    sampling: Sampling,
    adapter: Adapter,
    counted: Callable[[], None] = lambda: None,
) -> None:
    """The engine's rows from their prompts to the last token; only the last step is taken, after `counted` is called.

    So many rows as the room holds at their limit, at least one; in the room that leaves these as many columns as in
    the whole model.
    """
    limit, longest = sampling.max_new_tokens, max(map(len, prompts))
    rows, device = max(1, room.rows(longest + limit)), weightless.device
    entering = [prompts[i % len(prompts)] for i in range(rows)]
    columns = max(room.columns(rows), longest + limit)
    with weightless.sampling(adapter), torch.inference_mode():
        sizes = Sizes.of(weightless)
        space = replace(room, token=sizes.token, size=rows * (sizes.token * columns + room.row), batch=rows)
        state = cast(Any, Rows(weightless, entering, limit, space, sizes))
        uniforms = torch.zeros(rows, limit, dtype=torch.float64, device=device)
        drawn = torch.zeros(rows, limit, dtype=torch.long, device=device), torch.zeros(rows, limit, device=device)
        logits = state.enter(entering)
        window, last = state._window, state._longest + limit - 1
        while window.end < last:  # as if every token had been read, the buffers growing as they fill
            window.end = min(state._columns, last)
            if window.end < last:
                state._make_room()
        window.end = max(window.end - 1, state._longest)
        counted()
        tokens, _ = choose(logits, uniforms[:, 0], sampling)
        state.step(tokens)
        del drawn


@contextmanager
def _as_on(device: Device, tracer: Tracer) -> Generator[None]:
    """Meta tensors are not on the host: what the code decides by the kind of device, it decides for this one.

    The loss does the same on every chunk of positions and on every block of a chunk.
    """
    loss: Any = fused

    def first(*args: int) -> Iterator[slice]:
        spans, before = list(chunks(*args)), tracer.so_far()
        yield from spans[:1]
        tracer.add(before, tracer.so_far(), len(spans) - 1)

    def once(heads: fused.Heads, part: fused.Chunk, *tensors: Tensor) -> None:
        jobs = tuple((type(job.loss), job.frozen) for job in part.jobs)
        tracer.once((len(part), part.frozen is None, jobs, tensors[0].dtype), lambda: block(heads, part, *tensors))

    chunks, block = loss._chunks, loss._block
    tables = cast(list[dict[str, Any]], [fused.BLOCK_BYTES, model.SEGMENT])
    with ExitStack() as stack:
        stack.enter_context(replaced(loss, "_chunks", first))
        stack.enter_context(replaced(loss, "_block", once))
        stack.enter_context(replaced(loss, "_kernel", _kernel))
        kept = [table["gpu"] for table in tables]
        for table in tables:
            table["gpu"] = table[device]
        try:
            yield
        finally:
            for table, value in zip(tables, kept, strict=True):
                table["gpu"] = value


def _kernel(device: torch.device) -> fused.Elementwise:
    return _elementwise


def _elementwise(heads: fused.Heads, chunk: fused.Chunk, z: Tensor, x: Tensor | None, out: Tensor) -> None:
    """What the Triton kernel is: one launch that writes over its logits."""
    out.zero_()
