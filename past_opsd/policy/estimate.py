"""What a recipe will need: memory and time from the model's shape, before any weight is loaded.

Memory is the sum of what stands in memory at the worst moment of a cycle on one device; time is arithmetic over
throughputs that are measured on this machine. Both take response lengths at their limit, so they are upper sides.

`python -m past_opsd.policy.estimate RECIPE... [--processes N] [--set KEY=VALUE]` prints them for GPUs that are not
here, as a table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError

GIB = 2**30
MACHINE = 8  # GPUs of a machine, over which distributed.shard = 'hybrid' spreads the base
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Dense half-precision operations and bytes a second, bytes of memory: data sheets, nothing measured here.
GPUS = {
    "A100-80GB": (312e12, 2.0e12, 80e9),
    "H100-80GB": (989e12, 3.35e12, 80e9),
    "L40S-48GB": (362e12, 0.86e12, 48e9),
}


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool

    @property
    def block(self) -> int:
        """Weights of one block's seven projections."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv + 3 * self.mlp)

    @property
    def body(self) -> int:
        """Weights of all blocks: what a token is multiplied with before the head."""
        return self.layers * self.block

    @property
    def parameters(self) -> int:
        """All weights; norms are left out, being less than a thousandth."""
        return self.body + self.vocab * self.hidden * (1 if self.tied else 2)

    def lora(self, rank: int) -> int:
        """Weights of one adapter on the seven projections."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = (self.hidden + q) * 2 + (self.hidden + kv) * 2 + (self.hidden + self.mlp) * 3
        return self.layers * rank * ends


# The models of the paper and its neighbours, so that an estimate needs no download.
KNOWN = {
    "Qwen/Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936, True),
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151936, True),
    "Qwen/Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151936, True),
    "Qwen/Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936, False),
    "Qwen/Qwen3-14B": Shape(40, 5120, 40, 8, 128, 17408, 151936, False),
    "Qwen/Qwen3-32B": Shape(64, 5120, 64, 8, 128, 25600, 151936, False),
}


def shape_of(config: Any, path: str) -> Shape:
    """The dimensions in a model's configuration."""
    plain: Mapping[str, Any] = config.get_text_config().to_dict()
    try:
        heads = plain["num_attention_heads"]
        return Shape(
            layers=plain["num_hidden_layers"],
            hidden=plain["hidden_size"],
            heads=heads,
            kv_heads=plain.get("num_key_value_heads") or heads,
            head_dim=plain.get("head_dim") or plain["hidden_size"] // heads,
            mlp=plain.get("intermediate_size") or 4 * plain["hidden_size"],
            vocab=plain["vocab_size"],
            tied=bool(plain.get("tie_word_embeddings")),
        )
    except KeyError as error:
        raise PastError(f"'{path}': its configuration has no {error}, so memory and time cannot be estimated") from None


PROBLEM, SOLUTION = 256, 1024
"""Tokens of a prompt's parts where no data were read."""


@dataclass(frozen=True)
class Load:
    """What one cycle asks for, in samples and tokens."""

    student_samples: int
    teacher_samples: int
    response: int
    continuation: int
    student_prompt: int
    teacher_prompt: int

    @property
    def longest(self) -> int:
        """The longest sequence of a cycle."""
        return self.teacher_prompt + max(self.response, self.continuation)


def expected_load(recipe: Recipe) -> Load:
    """Every response at its limit; no data are read, so problems and solutions have the lengths assumed here."""
    rollout = recipe.rollout
    samples = rollout.problems_per_cycle * rollout.samples_per_problem
    method = config.ask_method(recipe)
    draws, response = method.continuations, rollout.student.max_new_tokens
    teacher = PROBLEM + SOLUTION + (response if method.reads_response else 0)
    return Load(samples, samples * draws, response, rollout.teacher.max_new_tokens, PROBLEM, teacher)


def memory(
    recipe: Recipe, shape: Shape, load: Load, dtype: str, checkpointing: bool, processes: int = 1
) -> dict[str, int]:
    """Bytes by part in one of `processes` at the worst moment of a cycle.

    Rollouts and training do not overlap, so the larger one counts; servers take rollouts elsewhere.
    """
    width = BYTES[dtype]
    sharded = processes > 1 and recipe.distributed.shard != "none"
    parts = min(processes, MACHINE) if recipe.distributed.shard == "hybrid" else processes
    training = _training(recipe, shape, load, width, checkpointing)
    if processes > 1:
        training += 4 * shape.lora(recipe.model.lora.rank)  # the buffer in which gradients are added up
    if sharded:
        training += 2 * shape.block * width  # the block at work and the next one, put together
    sampling = _sampling(recipe, shape, load, dtype, processes) + (shape.body * width if sharded else 0)
    if config.ask_engine(recipe).elsewhere:
        sampling = 0
    moment = {"rollouts": sampling} if sampling > training else {"activations and loss": training}
    blocks = -(-shape.body // parts) if sharded else shape.body
    return {
        "base weights": (blocks + shape.parameters - shape.body) * width,
        "two adapters, two AdamW states": 2 * 3 * 4 * shape.lora(recipe.model.lora.rank),
        **moment,
    }


def _training(recipe: Recipe, shape: Shape, load: Load, width: int, checkpointing: bool) -> int:
    tokens = max(recipe.learner.token_budget, load.longest)
    q = shape.heads * shape.head_dim
    kept = shape.hidden if checkpointing else 8 * shape.hidden + 4 * q + 5 * shape.mlp
    one_block = (8 * shape.hidden + 4 * q + 5 * shape.mlp) if checkpointing else 0
    activations = tokens * width * (shape.layers * kept + one_block)
    states = tokens * shape.hidden * 4 * 3  # live states, frozen states and the gradient between body and head
    gradients = 4 * shape.lora(recipe.model.lora.rank)
    return activations + states + (recipe.learner.loss_memory_mib << 20) + gradients


def _sampling(recipe: Recipe, shape: Shape, load: Load, dtype: str, processes: int) -> int:
    width = BYTES[dtype]
    samples = -(-max(load.student_samples, load.teacher_samples, 1) // processes)
    batch = min(recipe.engine.model_dump().get("batch", 64), samples)
    cache = batch * load.longest * shape.layers * 2 * shape.kv_heads * shape.head_dim * width
    folded = shape.body * width if dtype == "float32" else 0
    return cache + folded + batch * shape.vocab * 16


@dataclass(frozen=True)
class Speed:
    """Measured throughput in multiply-adds a second: of wide products, and of products with few rows."""

    wide: float
    narrow: float


def measure(dtype: torch.dtype, device: torch.device, rows: int, seconds: float = 0.6) -> Speed:
    """Time a training-shaped and a decoding-shaped product on this machine."""
    weight = torch.randn(4096, 1024, device=device, dtype=torch.float32).to(dtype)
    return Speed(_rate(weight, 1024, seconds), _rate(weight, max(1, rows), seconds))


def _rate(weight: torch.Tensor, rows: int, seconds: float) -> float:
    x = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
    done, began = -1, time.perf_counter()
    while time.perf_counter() - began < seconds:
        (x @ weight.T)[0, 0].item()
        done += 1
        if done == 0:  # the first product warms up
            began = time.perf_counter()
    return done * rows * weight.numel() / (time.perf_counter() - began)


def assumed(gpu: str, rows: int) -> Speed:
    """A GPU's speed from its data sheet, in bfloat16: 2/5 of its peak, decoding at 3/5 of its bandwidth."""
    peak, bandwidth, _ = GPUS[gpu]
    wide = 0.4 * peak / 2
    return Speed(wide, min(wide, 0.6 * bandwidth / BYTES["bfloat16"] * max(1, rows)))


def seconds(shape: Shape, load: Load, speed: Speed, checkpointing: bool, processes: int = 1) -> dict[str, float]:
    """Seconds of one cycle by phase; a frozen base needs no weight gradients, so a backward costs one forward.

    Processes share samples evenly; what they exchange is left out.
    """
    body, head = shape.body, shape.hidden * shape.vocab

    def forward(samples: int, prompt: int, response: int, passes: int) -> float:
        return samples * (prompt + response) * body * passes / speed.wide

    def loss(samples: int, response: int) -> float:
        return samples * response * head * 3 / speed.wide

    def decode(samples: int, prompt: int, response: int) -> float:
        return samples * (prompt * body / speed.wide + response * (body + head) / speed.narrow)

    live = 3 if checkpointing else 2
    n, m = -(-load.student_samples // processes), -(-load.teacher_samples // processes)
    adapt = 0.0
    if m:
        adapt += forward(m, load.teacher_prompt, load.continuation, live) + loss(m, load.continuation)
        adapt += forward(m, load.student_prompt, load.continuation, 1)
    distill = forward(n, load.student_prompt, load.response, live) + loss(n, load.response)
    distill += forward(n, load.teacher_prompt, load.response, 1)
    return {
        "rollout": decode(n, load.student_prompt, load.response),
        "draw": decode(m, load.teacher_prompt, load.continuation),
        "adapt": adapt,
        "distill": distill,
    }


def available(device: torch.device) -> int:
    """Bytes that a run may use here."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def table(recipes: Sequence[Recipe], processes: Sequence[int], gpu: str) -> str:
    """Memory of one GPU and time of one cycle for every recipe and number of processes, as Markdown."""
    lines = [
        f"| recipe, model | GPUs | base | adapters | rest | GiB of {GPUS[gpu][2] / GIB:.0f} | s a cycle |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe in recipes:
        shape, load = _known(recipe), expected_load(recipe)
        for n in processes:
            parts = list(memory(recipe, shape, load, "bfloat16", True, n).values())
            total = sum(parts) / GIB
            fits = "" if total <= 0.9 * GPUS[gpu][2] / GIB else " **no**"
            cells = [f"{recipe.name}, {recipe.model.path.rpartition('/')[2]}", str(n)]
            cells += [f"{part / GIB:.1f}" for part in parts] + [
                f"{total:.1f}{fits}",
                f"{_cycle(recipe, shape, load, gpu, n):.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cycle(recipe: Recipe, shape: Shape, load: Load, gpu: str, processes: int) -> float:
    """Seconds of a cycle on such GPUs; without the rollouts where servers make them."""
    rows = [-(-samples // processes) for samples in (load.student_samples, load.teacher_samples)]
    phases, teacher = (seconds(shape, load, assumed(gpu, n), True, processes) for n in rows)
    if config.ask_engine(recipe).elsewhere:
        return phases["adapt"] + phases["distill"]
    return sum((phases | {"draw": teacher["draw"]}).values())


def _known(recipe: Recipe) -> Shape:
    if recipe.model.path not in KNOWN:
        raise PastError(f"'{recipe.model.path}' is not among {', '.join(KNOWN)}; 'past doctor RECIPE --dry' reads it")
    return KNOWN[recipe.model.path]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m past_opsd.policy.estimate", description="What recipes need on GPUs."
    )
    parser.add_argument("recipes", nargs="+", help="recipes for models whose shapes are known here")
    parser.add_argument("--processes", default="1", help="numbers of GPUs, comma-separated (default 1)")
    parser.add_argument("--gpu", default="H100-80GB", choices=sorted(GPUS), help="data sheet (default H100-80GB)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override")
    args = parser.parse_args()
    try:
        recipes = [config.load(name, args.overrides) for name in args.recipes]
        print(table(recipes, [int(n) for n in args.processes.split(",")], args.gpu))
    except PastError as error:
        print(f"past: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
