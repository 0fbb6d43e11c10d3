"""What the engine and its two ways of reaching vLLM share: served adapters, draws, vLLM's arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from past_opsd.core.config import EngineOptions, ModelSection, Sampling
from past_opsd.core.lazy import Lazy
from past_opsd.core.nouns import PastError, Tokens
from past_opsd.policy.memory import GIB
from past_opsd.policy.pretrained import hardware, locate

if TYPE_CHECKING:
    import numpy as np
else:
    np = Lazy("numpy")

# What a recipe that nobody vouches for may set: sizes and switches that name no code, file or host.
HARMLESS = frozenset(
    {
        "block_size",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_log_stats",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "kv_cache_memory_bytes",
        "long_prefill_token_threshold",
        "max_long_partial_prefills",
        "max_num_batched_tokens",
        "max_num_partial_prefills",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "pipeline_parallel_size",
        "seed",
        "swap_space",
        "tensor_parallel_size",
    }
)
HOSTS = "PAST_VLLM_HOSTS"
"""The environment variable with the hosts that requests, and VLLM_API_KEY, may go to for any recipe."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
SEED = "past_seed"
"""The extra argument under which a request brings the seed of its draws."""
TOP = 20
"""Entries of a probe's distribution that are compared; vLLM returns no more unless told to."""
GREEDY = Sampling(temperature=0, max_new_tokens=1)
MOST = 0.9
"""Largest share of a GPU that vLLM gets where nobody says otherwise."""
STEP_TOKENS, STEP_COPIES = 16384, 6
"""What a training step is taken to hold: so many tokens, and of each so many copies of every layer's hidden state.

Steps traced on the shapes of Qwen3-1.7B to 8B hold 5.0 to 6.1 of them, with gradient checkpointing.
"""
USUAL = 8192
"""Tokens of a response up to which `timeout_seconds` holds as it is."""


class Options(EngineOptions):
    """The vLLM engine."""

    mode: Literal["local", "server"] = Field(
        default="local", description="inside this process, or servers ('past serve')"
    )
    urls: list[str] = Field(
        default=["http://127.0.0.1:8000"], min_length=1, description="the servers; requests are spread"
    )
    max_model_len: int | None = Field(default=None, ge=8, description="prompt + response limit; default: the trainer's")
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="vLLM's share of the GPU; default: inside this process what the trainer leaves, else vLLM's own",
    )
    arguments: dict[str, Any] = Field(
        default={}, description="further arguments of vLLM, e.g. { tensor_parallel_size = 2 }"
    )
    in_flight: int = Field(default=128, ge=1, description="requests sent to one server at a time")
    timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="a server that has answered nobody for so long has failed; more for responses above 8,192 tokens",
    )
    retries: int = Field(default=3, ge=0, description="how often one request may fail before the run gives up")
    patience_seconds: float = Field(
        default=600.0, ge=0, description="how long to wait for a server to return where none is left"
    )
    mismatch_bound: float | None = Field(
        default=None,
        gt=0,
        description="largest mean |log-probability difference| to the trainer; default 3 times what two ways of the "
        "trainer's own arithmetic differ by, at least 0.001",
    )
    mismatch_samples: int = Field(
        default=2, ge=0, description="responses of each batch and adapter compared with the trainer"
    )
    adapter_folder: str | None = Field(
        default=None, description="where adapters are handed over; every server must see it"
    )

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            try:
                parts = urlsplit(url)
                named = bool(parts.hostname) and parts.port != 0
            except ValueError:
                raise ValueError(f"'{url}' is not an address like http://127.0.0.1:8000") from None
            if not named or not url.startswith(("http://", "https://")) or not url.isprintable() or " " in url:
                raise ValueError(f"'{url}' is not an address like http://127.0.0.1:8000")
            if "@" in parts.netloc or parts.query or parts.fragment:
                raise ValueError("an address has no user, password or question in it; a key is taken from VLLM_API_KEY")
        return [url.rstrip("/") for url in urls]

    @field_validator("arguments")
    @classmethod
    def _names(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for key in arguments:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
                raise ValueError(f"'{key}' is not how vLLM names an argument in Python, e.g. tensor_parallel_size")
        if "trust_remote_code" in arguments:
            raise ValueError("'trust_remote_code' is decided by model.trust_remote_code")
        return arguments

    @property
    def elsewhere(self) -> bool:
        return self.mode == "server"

    def unvouched(self) -> list[str]:
        arguments = {k: v for k, v in self.arguments.items() if k not in HARMLESS or not isinstance(v, int | float)}
        found = [f"engine.arguments.{key} = {value!r:.80}" for key, value in arguments.items()]
        if self.mode == "server":
            known = {host.strip().lower() for host in os.environ.get(HOSTS, "").split(",")}
            urls = [url for url in self.urls if not known & {urlsplit(url).netloc.lower(), urlsplit(url).hostname}]
            sent = "prompts and VLLM_API_KEY" if os.environ.get("VLLM_API_KEY") else "prompts"
            found += [f"engine.urls: {sent} to {url}, which {HOSTS} does not name" for url in urls]
        if self.adapter_folder is not None:
            found.append(f"engine.adapter_folder = {self.adapter_folder!r}")
        return found


@dataclass(frozen=True)
class Probe:
    """A fixed prompt and the trainer's log-probabilities of the token after it."""

    prompt: Tokens
    expected: np.ndarray

    def distance(self, answer: Mapping[int, float]) -> float:
        """Mean |difference| over the tokens that were answered, weighted as they would be sampled."""
        ids = np.array(sorted(answer))
        served = np.array([answer[i] for i in ids])
        weights = np.exp(self.expected[ids])
        return float(np.average(np.abs(served - self.expected[ids]), weights=weights))


@dataclass(frozen=True)
class Served:
    """One version of an adapter as vLLM knows it; number 0 is no adapter at all."""

    name: str
    number: int
    version: int
    bits: str
    folder: Path | None
    probes: tuple[Probe, ...]

    def check(self, answers: Sequence[Mapping[int, float]], bound: float, where: str) -> float:
        """The mean distance to the trainer; refused beyond the bound."""
        distance = float(np.mean([p.distance(a) for p, a in zip(self.probes, answers, strict=True)]))
        if not distance <= bound:
            raise PastError(
                f"{where} serves something else than {self.name}: its log-probabilities differ from the trainer's by "
                f"{distance:.2g} per token on average (engine.mismatch_bound is {bound:g}); check that it was started "
                "for this recipe ('past serve') with its base model and dtype, and that nobody else loads such adapters"
            )
        return distance


@dataclass(frozen=True)
class Draw:
    """One response wanted of vLLM."""

    served: Served
    prompt: Tokens
    seed: int


@dataclass(frozen=True)
class Drawn:
    """What came back; `top` is the distribution of the first token where it was asked for."""

    tokens: Tokens
    logprobs: tuple[float, ...]
    top: Mapping[int, float]


class Backend(Protocol):
    """A way to reach vLLM."""

    def hear(self, note: Callable[[str], None]) -> None:
        """From now on say this way what a person should know at once."""
        ...

    def load(self, served: Served) -> None:
        """Serve an adapter, after its probes agreed with the trainer."""
        ...

    def unload(self, served: Served) -> None:
        """Forget an adapter."""
        ...

    def draw(self, draws: Sequence[Draw], sampling: Sampling) -> list[Drawn]:
        """One answer per draw, in order."""
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers since the last call."""
        ...

    def close(self) -> None: ...


def share(total: int, free: int, trainer: int, weights: int) -> float:
    """Of a GPU with `total` bytes, `free` of them free, the part that vLLM takes beside a trainer on it.

    It leaves `trainer` bytes, which the trainer has yet to take; of the rest it takes what there is, up to nine tenths
    of the GPU. It needs its own copy of the weights, a tenth more for its activations, and a GiB for keys and values.
    """
    left, least = free - trainer, int(1.1 * weights) + GIB
    if left < least:
        raise PastError(
            f"engine.mode = 'local': of {total / GIB:.1f} GiB of GPU memory {free / GIB:.1f} are free and the trainer "
            f"will take about {trainer / GIB:.1f} of them, but vLLM needs {least / GIB:.1f} for another copy of the "
            "model: use engine.name = 'torch', or servers on other GPUs (engine.mode = 'server'), or set "
            "engine.gpu_memory_utilization yourself"
        )
    return min(MOST, left / total)


def trainer_needs(adapter: int, tokens: int, layers: int, hidden: int, width: int) -> int:
    """Bytes that training takes beyond the loaded model: optimizer states, gradients, and a step's activations.

    `adapter` is the number of an adapter's weights, whose AdamW states and gradients are float32; `tokens` the longest
    context, `width` the bytes of a number.
    """
    return 4 * adapter * (2 * 2 + 1) + STEP_COPIES * min(tokens, STEP_TOKENS) * layers * hidden * width


def silence(timeout: float, tokens: int) -> float:
    """Seconds for which a server may answer nobody while responses of up to so many tokens are asked of it."""
    return timeout * max(1.0, tokens / USUAL)


def parameters(sampling: Sampling, stop: Sequence[int], top: int) -> dict[str, Any]:
    """Sampling as vLLM names it; everything it would otherwise take from a default is said."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(stop),
        "logprobs": top,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def arguments(section: ModelSection, options: Options) -> dict[str, Any]:
    """vLLM's arguments for a recipe's model, the same inside a process and as flags of a server."""
    source = locate(section.path, section.gguf_file)
    if source.gguf_file is not None:
        raise PastError(f"engine 'vllm' cannot serve {source.gguf_file}; it needs the unpacked weights in a folder")
    if section.lora.rank > RANKS[-1]:
        raise PastError(f"model.lora.rank = {section.lora.rank}: vLLM serves adapters up to rank {RANKS[-1]}")
    chosen: dict[str, Any] = {
        "model": source.path,
        "dtype": hardware(section).dtype,
        "enable_lora": True,
        "max_lora_rank": min(r for r in RANKS if r >= section.lora.rank),
        "max_loras": 3,
        "max_cpu_loras": 8,
        "logprobs_mode": "processed_logits",
        "logits_processors": ["past_opsd.rollout.engines.vllm_logits:Draws"],
        "generation_config": "vllm",
    }
    optional = {
        "revision": section.revision,
        "max_model_len": options.max_model_len or section.max_context,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "trust_remote_code": section.trust_remote_code or None,
    }
    chosen |= {key: value for key, value in optional.items() if value is not None}
    taken = sorted(chosen.keys() & options.arguments.keys())
    if taken:
        raise PastError(f"engine.arguments: '{taken[0]}' is decided by the recipe and cannot be set there")
    return chosen | options.arguments


def environment(section: ModelSection, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that vLLM needs and that are not set yet."""
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if Path(locate(section.path, section.gguf_file).path).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    return {key: value for key, value in wanted.items() if key not in given}
