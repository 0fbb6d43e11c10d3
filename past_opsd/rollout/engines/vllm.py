"""Rollouts from vLLM, inside this process or from servers, checked against the trainer.

Every published version of an adapter gets a folder, a name and a number that were never used before: vLLM answers a
known number or path from its caches. Published adapters, and some responses of every batch, are compared with the
trainer's own log-probabilities. How far apart they may be follows from how far the trainer is from itself when it
computes the same otherwise.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from past_opsd.core.config import Sampling
from past_opsd.core.lazy import Lazy
from past_opsd.core.losses import at_tokens
from past_opsd.core.nouns import Adapter, PastError, Response, Tokens, View, derive_seed
from past_opsd.rollout.engines import Request, StaleAdapterError
from past_opsd.rollout.engines.vllm_backend import (
    Backend,
    Draw,
    Drawn,
    Options,
    Probe,
    Served,
    share,
    trainer_needs,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from safetensors import torch as safetensors

    from past_opsd.policy import fingerprint
    from past_opsd.policy.model import Model
else:
    np, torch, safetensors = Lazy("numpy"), Lazy("torch"), Lazy("safetensors.torch")
    fingerprint = Lazy("past_opsd.policy.fingerprint")

__all__ = ["Options", "VllmEngine", "build"]

PROBES, PROBE_TOKENS = 4, 16
EXACT = 1e-3
"""Distances below this are never refused: a mistake of any kind makes larger ones."""
NOISE = 3.0
"""Larger distances than so many times the trainer's own are refused."""
COMPARED_TOKENS = 1024
"""Longer responses are compared on their first tokens."""
ELSEWHERE = 0.4
"""The share of memory that vLLM is told on a device that is no GPU."""
ROWS = 128
"""Logit rows held at a time."""


def build(options: Options, model: Model) -> VllmEngine:
    """The engine for this model; vLLM's base is compared with the trainer's before anything is served."""
    stop = sorted(model.stops)
    if options.mode == "local" and not model.world.alone:
        raise PastError(
            "engine.mode = 'local' runs vLLM inside one process, but there are several: start servers with "
            "'past serve' and set engine.mode = 'server' and engine.urls, or use engine.name = 'torch'"
        )

    def connect(base: Served, bound: float) -> Backend:
        if options.mode == "server":
            from past_opsd.rollout.engines.vllm_server import ServerBackend

            own = options.model_copy(update={"in_flight": max(1, options.in_flight // model.world.size)})
            return ServerBackend(own, stop, base, bound, model.max_context, model.world.restarted)
        from past_opsd.rollout.engines.vllm_local import LocalBackend

        part = options.gpu_memory_utilization or _share(model)
        return LocalBackend(options, model.section, stop, base, bound, model.max_context, part)

    return VllmEngine(options, model, connect)


def _share(model: Model) -> float:
    """vLLM's part of the trainer's GPU; of anything else vLLM takes what its own settings say, and this is not read."""
    if model.device.type != "cuda":
        return ELSEWHERE
    text, width = model.config.get_text_config(), model.head.element_size()
    layers, hidden = text.num_hidden_layers, text.hidden_size
    needs = trainer_needs(model.sizes["adapter"], model.max_context, layers, hidden, width)
    free, total = torch.cuda.mem_get_info(model.device)
    return share(total, free, needs, width * model.sizes["base"])


class VllmEngine:
    """Publishes the trainer's adapters to vLLM and samples from them."""

    own_weights = True

    def __init__(self, options: Options, model: Model, connect: Callable[[Served, float], Backend]):
        self._options = options
        self._model = model
        self._noise = noise(model)
        self._bound = options.mismatch_bound or allowed(self._noise)
        self.wide = model.device.type != "cpu"
        self._number = 0
        self._differences: list[np.ndarray] = []
        self._world = model.world
        self._folder = self._world.share(lambda: _hand_over(options.adapter_folder))
        if self._world.first:
            self._removal = weakref.finalize(self, shutil.rmtree, self._folder, True)
        bare = Served("base", 0, 0, "", None, self._probes("base"))
        self._backend = connect(bare, self._bound)
        self._served: dict[Adapter, Served] = {"base": self._zeros(bare)}
        self._load(self._served["base"])

    def hear(self, note: Callable[[str], None]) -> None:
        """From now on say this way what a person should know at once."""
        self._backend.hear(note)

    def publish(self, adapter: Adapter, version: int) -> None:
        if self._model.versions[adapter] != version:
            raise StaleAdapterError(f"{adapter} is at version {self._model.versions[adapter]}, not {version}")
        if adapter == "base":
            return
        old = self._served.get(adapter)
        bits = self._model.fingerprint(adapter)
        if old is not None and (old.version, old.bits) == (version, bits):
            return
        new = self._write(adapter, version, bits)
        self._load(new)
        self._served[adapter] = new
        if old is not None:
            self._backend.unload(old)
            if self._world.first:
                shutil.rmtree(self._folder / old.name)

    def _load(self, new: Served) -> None:
        """The first rank loads; then every other finds it loaded and compares it with its own weights."""
        if self._world.first:
            self._backend.load(new)
        self._world.barrier()
        if not self._world.first:
            self._backend.load(new)

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, versions: Mapping[Adapter, int]
    ) -> list[Response]:
        wanted: set[Adapter] = {request.view.adapter for request in requests}
        served = {adapter: self._current(adapter, versions.get(adapter)) for adapter in wanted}
        draws = [Draw(served[r.view.adapter], r.view.prompt, r.seed) for r in requests]
        responses = self._responses(self._backend.draw(draws, sampling)) if draws else []
        self._compare(requests, responses, sampling.temperature or 1.0)
        return responses

    def _responses(self, drawn: Sequence[Drawn]) -> list[Response]:
        stops = self._model.stops
        texts = self._model.tokenizer.batch_decode([list(d.tokens) for d in drawn], skip_special_tokens=True)
        return [
            Response(d.tokens, text, d.logprobs, d.tokens[-1] in stops) for d, text in zip(drawn, texts, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """How far vLLM's log-probabilities were from the trainer's."""
        own, self._differences = self._differences, []
        reports = self._world.gather((own, self._backend.metrics()))
        found = [values for part, _ in reports for values in part]
        out: dict[str, float] = {}
        if found:
            values = np.concatenate(found)
            out = {
                "engine/logprob_mean_abs": float(np.abs(values).mean()),
                "engine/logprob_max_abs": float(np.abs(values).max()),
                "engine/logprob_drift": float(values.mean()),
                "engine/logprob_noise": self._noise,
                "engine/logprob_tokens": len(values),
            }
        return out | _combined([part for _, part in reports])

    def close(self) -> None:
        served, self._served = list(self._served.values()), {}
        try:
            for adapter in served:
                self._backend.unload(adapter)
            self._backend.close()
        finally:
            if self._world.first:
                self._removal()

    def _current(self, adapter: Adapter, wanted: int | None) -> Served:
        served = self._served.get(adapter)
        published = None if served is None else served.version
        now = self._model.versions.get(adapter)
        if served is None or not wanted == published == now:
            raise StaleAdapterError(
                f"{adapter}: version {wanted} was asked for, {published} is published, the weights are at {now}; "
                "publish an adapter after each of its steps"
            )
        return served

    def _name(self, adapter: Adapter, version: int) -> Path:
        """A folder whose name no server has ever seen."""
        self._number += 1
        folder = self._folder / f"{adapter}-c{version:05d}-{self._number}-{self._folder.name.rpartition('-')[2]}"
        if self._world.first:
            folder.mkdir()
        return folder

    def _zeros(self, bare: Served) -> Served:
        """The base as an adapter of zeros.

        vLLM's CPU kernels add the adapter of the last slot to rows without one, wherever a batch holds both.
        """
        folder = self._name("base", 0)
        if self._world.first:
            self._model.save_adapter("student", folder)
            file = folder / "adapter_model.safetensors"
            safetensors.save_file(
                {name: torch.zeros_like(tensor) for name, tensor in safetensors.load_file(file).items()}, file
            )
        return replace(bare, name=folder.name, number=self._number, folder=folder)

    def _write(self, adapter: Adapter, version: int, bits: str) -> Served:
        folder = self._name(adapter, version)
        if self._world.first:
            self._model.save_adapter(adapter, folder)
            if written(self._model, adapter, folder) != bits:
                raise PastError(
                    f"{folder}: the written adapter is not the {adapter} in memory; is the disk full or shared?"
                )
        return Served(folder.name, self._number, version, bits, folder, self._probes(adapter))

    def _probes(self, adapter: Adapter) -> tuple[Probe, ...]:
        """The trainer's next-token distributions after fixed prompts."""
        prompts = _prompts(self._model)
        reads = [(View(adapter, prompt), (0,)) for prompt in prompts]
        rows = torch.cat([block.cpu() for block in _log_probs(self._model, reads)]).numpy()
        return tuple(Probe(prompt, row) for prompt, row in zip(prompts, rows, strict=True))

    def _compare(self, requests: Sequence[Request], responses: Sequence[Response], temperature: float) -> None:
        """Measure some responses against the trainer, and refuse what is too far off."""
        adapters: list[Adapter] = list(dict.fromkeys(request.view.adapter for request in requests))
        rows = {a: [i for i, request in enumerate(requests) if request.view.adapter == a] for a in adapters}
        chosen: list[tuple[Adapter, int]] = [
            (a, i) for a in adapters for i in _spread(rows[a], self._options.mismatch_samples)
        ]
        most = max(self._world.gather(len(chosen))) if self._model.sharded else len(chosen)
        found: dict[Adapter, list[np.ndarray]] = {adapter: [] for adapter, _ in chosen}
        for adapter, i in chosen:
            tokens = responses[i].tokens[:COMPARED_TOKENS]
            expected = logprobs(self._model, requests[i].view, tokens, temperature)
            found[adapter].append(np.array(responses[i].logprobs[: len(tokens)]) - expected)
        self._model.idle(most - len(chosen))
        for adapter, differences in found.items():
            self._differences += differences
            self._refuse(adapter, float(np.abs(np.concatenate(differences)).mean()))

    def _refuse(self, adapter: Adapter, distance: float) -> None:
        if not distance <= self._bound:
            served = self._served[adapter]
            raise PastError(
                f"responses of {served.name} came with log-probabilities that differ from the trainer's by "
                f"{distance:.2g} per token on average (engine.mismatch_bound is {self._bound:g}). Check that vLLM runs "
                "the same base weights and dtype, that it was started with 'past serve' (its --logprobs-mode and "
                "--logits-processors), that no other run loads adapters of this name, that both sides use the same "
                "chat template and position scaling, and model.attention; raise the bound only for a known cause"
            )


def _combined(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Numbers of all ranks: counts add up, of distances the largest stays."""
    out: dict[str, float] = {}
    for key, value in ((key, value) for report in reports for key, value in report.items()):
        out[key] = max(out[key], value) if key in out and key.endswith("abs") else out.get(key, 0) + value
    return out


def written(model: Model, adapter: Adapter, folder: Path) -> str:
    """`Model.fingerprint` of a written adapter."""
    saved = safetensors.load_file(folder / "adapter_model.safetensors")
    return fingerprint.fingerprint(saved[name.replace(f".{adapter}.", ".")] for name in model.parameters(adapter))


def noise(model: Model) -> float:
    """How far the trainer is from itself, per token: the same positions in one batch, and alone under other attention.

    The mean |difference| of log-probabilities, weighted as tokens would be sampled.
    """
    paths = [(View("base", prompt[: 2 + i]), prompt[2 + i :]) for i, prompt in enumerate(_prompts(model))]
    together = torch.cat([block.cpu() for block in _log_probs(model, paths)])
    with model.otherwise():
        alone = torch.cat([block.cpu() for path in paths for block in _log_probs(model, [path])])
    return float((together.exp() * (together - alone).nan_to_num(nan=0.0).abs()).sum(-1).mean())


def allowed(noise: float) -> float:
    """How far from the trainer an engine may be, where the trainer is so far from itself."""
    return max(EXACT, NOISE * noise)


def _prompts(model: Model) -> list[Tokens]:
    """The probes' tokens."""
    size = min(len(model.tokenizer), len(model.head))
    draws = (np.random.Generator(np.random.Philox(key=derive_seed("probe", i))) for i in range(PROBES))
    return [tuple(rng.integers(size, size=PROBE_TOKENS).tolist()) for rng in draws]


def logprobs(model: Model, view: View, tokens: Tokens, temperature: float) -> np.ndarray:
    """The trainer's log-probabilities of a response at a temperature."""
    out: list[torch.Tensor] = []
    targets = torch.tensor(tokens)
    for block in _log_probs(model, [(view, tokens)], temperature):
        chosen = targets[sum(len(o) for o in out) :][: len(block)].to(block.device)
        out.append(at_tokens(block, chosen).cpu())
    return torch.cat(out).numpy()


def _log_probs(model: Model, paths: Sequence[tuple[View, Tokens]], temperature: float = 1.0) -> list[torch.Tensor]:
    """[rows, V] in order, a few rows at a time."""
    with torch.no_grad():
        return [model.log_probs(states, temperature) for states in torch.split(model.hidden(paths), ROWS)]


def _spread(rows: Sequence[int], count: int) -> list[int]:
    """At most `count` of the rows, evenly spread."""
    return [rows[i * len(rows) // count] for i in range(count)] if count < len(rows) else list(rows)


def _hand_over(folder: str | None) -> Path:
    try:
        made = Path(tempfile.mkdtemp(prefix="past-adapters-", dir=folder))
    except OSError as error:
        raise PastError(
            f"engine.adapter_folder = '{folder}' cannot be written ({error}); name an existing folder"
        ) from None
    if folder is not None:
        made.chmod(0o755)  # servers may run as somebody else
    return made
