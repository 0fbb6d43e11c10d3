"""A decoder's dimensions, what a cycle asks of it, and the time that takes: arithmetic over throughputs.

Throughputs are measured on this machine or taken from a GPU's data sheet. Response lengths are at their limit, so times
are upper sides of the arithmetic. The memory is not computed but traced: `past_opsd.analysis.needs`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.policy import memory

GIB = 2**30
MACHINE = 8  # GPUs of a machine, over which distributed.shard = 'hybrid' spreads the base
LAUNCH = 10e-6
"""Seconds that eager code takes for a kernel: assumed, nothing measured here."""
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


@dataclass(frozen=True)
class Speed:
    """What a device does in a second."""

    wide: float
    """Multiply-adds of wide products."""
    narrow: float
    """Multiply-adds of products with few rows."""
    reading: float
    """Bytes of keys and values read by decoding."""
    launch: float = 0.0
    """Seconds between two kernels at least."""


def measure(dtype: torch.dtype, device: torch.device, rows: int, seconds: float = 0.6) -> Speed:
    """Time a training-shaped and a decoding-shaped product on this machine, and reading."""
    weight = torch.randn(4096, 1024, device=device, dtype=torch.float32).to(dtype)
    narrow = _rate(weight, max(1, rows), seconds)
    return Speed(_rate(weight, 1024, seconds), narrow, _rate(weight, 1, seconds) * dtype.itemsize)


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
    """A GPU's speed from its data sheet, in bfloat16: 2/5 of its peak, decoding at 3/5 of its bandwidth; `LAUNCH`."""
    peak, bandwidth, _ = GPUS[gpu]
    wide, reading = 0.4 * peak / 2, 0.6 * bandwidth
    return Speed(wide, min(wide, reading / BYTES["bfloat16"] * max(1, rows)), reading, LAUNCH)


def seconds(
    shape: Shape,
    load: Load,
    speed: Speed,
    checkpointing: bool,
    processes: int = 1,
    *,
    dtype: str = "bfloat16",
    launches: int = 0,
) -> dict[str, float]:
    """Seconds of one cycle by phase; a frozen base needs no weight gradients, so a backward costs one forward.

    Attention is quadratic in the length: its backward costs two and a half forwards, and a token that is decoded reads
    the keys and values before it. A token takes at least its `launches`. Processes share samples evenly; what they
    exchange is left out.
    """
    body, head = shape.body, shape.hidden * shape.vocab
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]

    def forward(samples: int, prompt: int, response: int, backward: bool = False) -> float:
        length, again = prompt + response, 1 + (checkpointing if backward else 0)
        products, attention = again + backward, again + 2.5 * backward
        work = length * body * products + shape.layers * shape.heads * shape.head_dim * length**2 * attention
        return samples * work / speed.wide

    def loss(samples: int, response: int) -> float:
        return samples * response * head * 3 / speed.wide

    def decode(samples: int, prompt: int, response: int) -> float:
        products = samples * response * (body + head) / speed.narrow
        reading = samples * response * (prompt + response / 2) * cached / speed.reading
        least = response * launches * speed.launch if samples else 0.0
        return forward(samples, prompt, 0) + max(products + reading, least)

    n, m = -(-load.student_samples // processes), -(-load.teacher_samples // processes)
    adapt = 0.0
    if m:
        adapt += forward(m, load.teacher_prompt, load.continuation, backward=True) + loss(m, load.continuation)
        adapt += forward(m, load.student_prompt, load.continuation)
    distill = forward(n, load.student_prompt, load.response, backward=True) + loss(n, load.response)
    distill += forward(n, load.teacher_prompt, load.response)
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
    return memory.host_free()
