# pyright: standard
# vLLM pins a torch of its own and is not there where types are checked.
"""Loaded by vLLM inside its worker: draws tokens as every engine here does, and reports their log-probabilities.

vLLM reports log-probabilities either before the temperature or after top-p and top-k cut the support, but never
between the two, where `Response.logprobs` is defined. A constant added to a row changes no distribution, so
subtracting T * logsumexp(z / T) before the temperature divides leaves sampling alone and turns the processed logit of
a surviving token (`logprobs_mode = "processed_logits"`) into exactly log softmax(z / T).

vLLM's own random numbers are not those of the seed's uniforms. A request that brings its seed (`SEED`) is therefore
drawn here: every other token's logit becomes -inf, and vLLM can only pick the one that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import builtin, interface  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.sample.logits_processor import interface as slots  # pyright: ignore[reportMissingImports]

from past_opsd.core.config import Sampling
from past_opsd.rollout.engines._draw import choose, uniforms_of
from past_opsd.rollout.engines.vllm_backend import SEED

BLOCK = 256


@dataclass
class Request:
    """What a request asked for, and where its tokens are counted (by vLLM's first model runner only)."""

    sampling: Sampling
    seed: int | None
    written: Sequence[int] = ()
    uniforms: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @staticmethod
    def of(params: Any, written: Sequence[int] = ()) -> Request:
        """The request behind vLLM's parameters."""
        seed = (params.extra_args or {}).get(SEED)
        greedy = params.temperature < 1e-5
        sampling = Sampling(
            temperature=0 if greedy else params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
        )
        return Request(sampling, None if seed is None or greedy else int(seed), written)

    @property
    def temperature(self) -> float:
        """What the log-probabilities are taken at: greedy requests report those of the model itself."""
        return self.sampling.temperature or 1.0

    def uniform(self, position: int) -> float:
        """Of the response's token at this position."""
        if position >= len(self.uniforms):
            assert self.seed is not None
            self.uniforms = uniforms_of(self.seed, position + BLOCK)
        return float(self.uniforms[position])


class Draws(interface.LogitsProcessor, slots.LogitsProcessor):
    """Written to both interfaces: vLLM's first model runner keeps requests by row, its second one by slot."""

    def __init__(self, vllm_config: Any, *where: Any) -> None:
        self._requests: dict[int, Request] = {}
        self._states = where[0]  # the second runner's per-slot state; a device for the first

    def is_argmax_invariant(self) -> bool:
        return False  # vLLM applies only these before the temperature, and to greedy requests too

    def update_state(self, batch_update: Any) -> None:
        builtin.process_dict_updates(self._requests, batch_update, lambda params, _, out: Request.of(params, out))

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._requests[req_idx] = Request.of(sampling_params)
        return True

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        if ctx is None:
            requests = [self._requests.get(row) for row in range(len(logits))]
            positions = [0 if request is None else len(request.written) for request in requests]
        else:
            if len(ctx.idx_mapping_np) != len(logits):
                raise NotImplementedError(
                    "speculative decoding would draw several tokens from one uniform; turn it off"
                )
            slot = ctx.idx_mapping_np
            requests = [self._requests.get(i) for i in slot.tolist()]
            positions = (ctx.seq_lens_upper_bound_np - self._states.prompt_len.np[slot]).tolist()
        wanted = [1.0 if request is None else request.temperature for request in requests]
        temperatures = torch.tensor(wanted, dtype=logits.dtype, device=logits.device)
        return draw(normalise(logits, temperatures), requests, positions)


def normalise(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Shift each row so that its value over the temperature is a log-probability."""
    t = temperatures[:, None]
    return logits - t * torch.logsumexp(logits / t, dim=-1, keepdim=True)


def draw(logits: Tensor, requests: Sequence[Request | None], positions: Sequence[int]) -> Tensor:
    """Leave one token to the rows whose requests bring a seed, each drawn by its own sampling."""
    kinds: dict[Sampling, list[int]] = {}
    for row, request in enumerate(requests):
        if request is not None and request.seed is not None:
            kinds.setdefault(request.sampling, []).append(row)
    for sampling, rows in kinds.items():
        index = torch.tensor(rows, device=logits.device)
        drawn = [(request, positions[row]) for row in rows if (request := requests[row]) is not None]
        uniforms = torch.tensor([r.uniform(t) for r, t in drawn], dtype=torch.float64, device=logits.device)
        chosen, _ = choose(logits[index].float(), uniforms, sampling)
        only = torch.full_like(logits[index], -torch.inf)
        logits[index] = only.scatter(1, chosen[:, None], logits[index].gather(1, chosen[:, None]))
    return logits
