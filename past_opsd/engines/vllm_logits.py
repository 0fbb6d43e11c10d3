"""Loaded by vLLM inside its worker: makes the logits it reports log-probabilities at the sampling temperature.

vLLM reports log-probabilities either before the temperature or after top-p and top-k cut the support, but never
between the two, where `Response.logprobs` is defined. A constant added to a row changes no distribution, so
subtracting T * logsumexp(z / T) before the temperature divides leaves sampling alone and turns the processed logit of
a surviving token (`logprobs_mode = "processed_logits"`) into exactly log softmax(z / T).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import builtin, interface  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.sample.logits_processor import interface as slots  # pyright: ignore[reportMissingImports]


class AtTemperature(interface.LogitsProcessor, slots.LogitsProcessor):
    """Written to both interfaces: vLLM's first model runner keeps requests by row, its second one by slot."""

    def __init__(self, vllm_config: Any, *where: Any) -> None:
        self._temperatures: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        return False  # vLLM applies only these before the temperature, and to greedy requests too

    def update_state(self, batch_update: Any) -> None:
        builtin.process_dict_updates(self._temperatures, batch_update, lambda params, *_: effective(params))

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._temperatures[req_idx] = effective(sampling_params)
        return True

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        keys = range(len(logits)) if ctx is None else _slots(ctx, len(logits))
        wanted = [self._temperatures.get(key, 1.0) for key in keys]
        return normalise(logits, torch.tensor(wanted, dtype=logits.dtype, device=logits.device))


def _slots(ctx: Any, rows: int) -> list[int]:
    """Each row's slot, from the host's copy where it is enough: reading the GPU's would wait for it."""
    known = ctx.idx_mapping_np.tolist()
    return known if len(known) == rows else ctx.expanded_idx_mapping.tolist()


def effective(params: Any) -> float:
    """The temperature the log-probabilities are taken at: greedy requests report those of the model itself."""
    return params.temperature if params.temperature >= 1e-5 else 1.0


def normalise(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Shift each row so that its value over the temperature is a log-probability."""
    t = temperatures[:, None]
    return logits - t * torch.logsumexp(logits / t, dim=-1, keepdim=True)
