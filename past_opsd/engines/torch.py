"""The embedded engine: batched sampling with a KV cache on the trainer's own weights.

The prompts of a batch are prefilled once each, however many samples they get; sequences that end leave the batch.
Every request draws its own uniforms from its seed, one per token, and picks tokens by the inverse of the cumulative
distribution, so the rest of the batch cannot change a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import DynamicCache

from past_opsd.config import Sampling
from past_opsd.engines import Request, StaleAdapterError
from past_opsd.model import Model
from past_opsd.types import Adapter, PastError, Response


class Options(BaseModel):
    """The embedded torch engine."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    batch: int = Field(64, ge=1, description="sequences decoded together")


def build(options: Options, model: Model) -> TorchEngine:
    """The engine on this model."""
    return TorchEngine(options, model)


class TorchEngine:
    """Samples from the trainer's network with one adapter folded in."""

    def __init__(self, options: Options, model: Model):
        self._options = options
        self._model = model
        self._published: dict[Adapter, int] = {"base": 0}
        self._eos = _stop_tokens(model)

    def publish(self, adapter: Adapter, version: int) -> None:
        if self._model.versions[adapter] != version:
            raise StaleAdapterError(f"{adapter} is at version {self._model.versions[adapter]}, not {version}")
        self._published[adapter] = version

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, versions: Mapping[Adapter, int]
    ) -> list[Response]:
        served: set[Adapter] = {request.view.adapter for request in requests}
        for adapter in served:
            self._check(adapter, versions.get(adapter))
        out: list[Response | None] = [None] * len(requests)
        # Sorting puts samples of one prompt side by side, so their prefill is shared.
        views = [request.view for request in requests]
        order = sorted(range(len(views)), key=lambda i: (views[i].adapter, len(views[i].prompt), views[i].prompt, i))
        while order:
            adapter = views[order[0]].adapter
            batch = [i for i in order[: self._options.batch] if views[i].adapter == adapter]
            order = order[len(batch) :]
            with self._model.sampling(adapter), torch.inference_mode():
                responses = self._decode([requests[i] for i in batch], sampling)
            for i, response in zip(batch, responses, strict=True):
                out[i] = response
        return cast(list[Response], out)

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...

    def _check(self, adapter: Adapter, wanted: int | None) -> None:
        published = self._published.get(adapter)
        now = self._model.versions[adapter]
        if not wanted == published == now:
            raise StaleAdapterError(
                f"{adapter}: version {wanted} was asked for, {published} is published, the weights are at {now}; "
                "publish an adapter after each of its steps"
            )

    def _decode(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        device = self._model.device
        n, limit = len(requests), sampling.max_new_tokens
        state = _Prefilled(self._model, requests)
        uniforms = torch.from_numpy(np.stack([_uniforms(r.seed, limit) for r in requests])).to(device)
        tokens = torch.zeros(n, limit, dtype=torch.long, device=device)
        logps = torch.zeros(n, limit, dtype=torch.float32, device=device)
        lengths = torch.full((n,), limit, device=device)
        ended = torch.zeros(n, dtype=torch.bool, device=device)
        alive = torch.arange(n, device=device)  # row of the cache -> request
        logits = state.logits
        for step in range(limit):
            choice, logp = choose(logits, uniforms[alive, step], sampling)
            tokens[alive, step] = choice
            logps[alive, step] = logp
            stop = torch.isin(choice, self._eos)
            if bool(stop.any()):
                lengths[alive[stop]] = step + 1
                ended[alive[stop]] = True
                keep = (~stop).nonzero().squeeze(1)
                if len(keep) == 0:
                    break
                alive, choice = alive[keep], choice[keep]
                state.keep(keep)
            if step + 1 < limit:
                logits = state.step(choice)
        return self._responses(tokens, logps, lengths, ended)

    def _responses(self, tokens: Tensor, logps: Tensor, lengths: Tensor, ended: Tensor) -> list[Response]:
        ids = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        values = [row[:n] for row, n in zip(logps.tolist(), lengths.tolist(), strict=True)]
        texts = self._model.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [
            Response(tuple(i), text, tuple(v), done)
            for i, text, v, done in zip(ids, texts, values, ended.tolist(), strict=True)
        ]


class _Prefilled:
    """The network's state for one batch: a cache row per live sequence, left-padded prompts."""

    def __init__(self, model: Model, requests: Sequence[Request]):
        self._network = cast(Any, model.network)
        prompts = list(dict.fromkeys(request.view.prompt for request in requests))
        width = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._cache = DynamicCache(config=model.config)
        logits = self._forward(ids.to(model.device), mask.to(model.device), positions.to(model.device))
        index = {prompt: row for row, prompt in enumerate(prompts)}
        rows = torch.tensor([index[r.view.prompt] for r in requests], device=model.device)
        self._cache.batch_select_indices(rows)
        self._mask = mask.to(model.device)[rows]
        self._next = self._mask.sum(1)
        self.logits = logits[rows]

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]
        self._next = self._next[rows]

    def step(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        logits = self._forward(tokens[:, None], self._mask, self._next[:, None])
        self._next = self._next + 1
        return logits

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        output = self._network(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()


def choose(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability at the sampling temperature, before the support is cut."""
    if sampling.temperature == 0:
        logp = torch.log_softmax(logits, dim=-1)
        choice = logits.argmax(dim=-1)
        return choice, logp.gather(1, choice[:, None]).squeeze(1)
    logp = torch.log_softmax(logits / sampling.temperature, dim=-1)
    probs = _cut(logp.double().exp(), sampling)
    cumulative = probs.cumsum(dim=-1)
    # side="right" never returns an entry of probability zero: it is the first whose cumulative mass exceeds u.
    choice = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    choice = choice.clamp(max=probs.shape[-1] - 1)
    return choice, logp.gather(1, choice[:, None]).squeeze(1)


def _cut(probs: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top-k, top-p and min-p cut, in that order; the rest is renormalised by the caller."""
    if 0 < sampling.top_k < probs.shape[-1]:
        floor = probs.topk(sampling.top_k, dim=-1).values[:, -1:]
        probs = probs.where(probs >= floor, 0)
    if sampling.top_p < 1:
        probs = probs / probs.sum(-1, keepdim=True)
        values, order = probs.sort(dim=-1, descending=True, stable=True)
        # An entry stays while the mass before it is still below top_p, so the largest always stays.
        outside = values.cumsum(-1) - values >= sampling.top_p
        probs = probs.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), 0)
    if sampling.min_p > 0:
        probs = probs.where(probs >= sampling.min_p * probs.max(-1, keepdim=True).values, 0)
    return probs


def _uniforms(seed: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def _stop_tokens(model: Model) -> Tensor:
    configured = cast(Any, model.network).generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    ids = {i for i in [*ids, model.tokenizer.eos_token_id] if i is not None}
    if not ids:
        raise PastError(
            f"model '{model.section.path}' names no end-of-sequence token, so no response could ever finish"
        )
    return torch.tensor(sorted(ids), device=model.device)
