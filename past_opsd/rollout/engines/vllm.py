"""Rollouts from vLLM, inside this process or from servers, checked against the trainer.

Every published version of an adapter gets a folder, a name and a number that were never used before: vLLM answers a
known number or path from its caches. Published adapters, and some responses of every batch, are compared with the
trainer's own log-probabilities. How far apart they may be follows from how far the trainer is from itself when it
computes the same otherwise.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from past_opsd.core.config import Sampling
from past_opsd.core.lazy import Lazy
from past_opsd.core.losses import at_tokens
from past_opsd.core.nouns import Adapter, PastError, Response, Tokens, View, derive_seed
from past_opsd.rollout.engines import Asked, Flow, Request, StaleAdapterError, sent
from past_opsd.rollout.engines.vllm_backend import (
    Backend,
    Draw,
    Drawn,
    Options,
    Probe,
    Served,
    Stream,
    share,
    trainer_needs,
)
from past_opsd.rollout.engines.vllm_handover import HandOver
from past_opsd.rollout.engines.vllm_sleep import level

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
SPREAD = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments that spread one vLLM over several GPUs."""
ROWS = 128
"""Logit rows held at a time."""


def build(options: Options, model: Model) -> VllmEngine:
    """The engine for this model; vLLM's base is compared with the trainer's before anything is served."""
    stop = sorted(model.stops)
    apart = [name for name in SPREAD if options.arguments.get(name, 1) != 1]
    if options.mode == "local" and not model.world.alone and apart:
        raise PastError(
            f"engine.arguments: {apart[0]} = {options.arguments[apart[0]]}, but each of the {model.world.size} "
            "processes has a vLLM of its own on its own GPU: leave it out, or start servers with 'past serve' "
            "(engine.mode = 'server')"
        )

    def connect(base: Served, bound: float) -> Backend:
        if options.mode == "server":
            from past_opsd.rollout.engines.vllm_server import ServerBackend

            own = options.model_copy(update={"in_flight": max(1, options.in_flight // model.world.size)})
            return ServerBackend(own, stop, base, bound, model.max_context, model.world.restarted)
        from past_opsd.rollout.engines.vllm_local import LocalBackend, able

        deep = level(options.sleep, able)
        part = options.gpu_memory_utilization or _share(model, deep > 0)
        return LocalBackend(options, model.section, stop, base, bound, model.max_context, part, deep, model.world)

    return VllmEngine(options, model, connect)


def _share(model: Model, sleeps: bool) -> float:
    """vLLM's part of the trainer's GPU; of anything else vLLM takes what its own settings say, and this is not read.

    Where it sleeps while steps run, the trainer only compares responses beside it.
    """
    if model.device.type != "cuda":
        return ELSEWHERE
    text, width = model.config.get_text_config(), model.head.element_size()
    layers, hidden = text.num_hidden_layers, text.hidden_size
    tokens = min(model.max_context, COMPARED_TOKENS) if sleeps else model.max_context
    needs = trainer_needs(model.sizes["adapter"], tokens, layers, hidden, width)
    free, total = torch.cuda.mem_get_info(model.device)
    return share(total, free, needs, width * model.sizes["base"])


class VllmEngine:
    """Publishes the trainer's adapters to vLLM and samples from them."""

    own_weights, mixes = True, True

    def __init__(self, options: Options, model: Model, connect: Callable[[Served, float], Backend]):
        self._options = options
        self._model = model
        self._noise = noise(model)
        self._bound = options.mismatch_bound or allowed(self._noise)
        self.wide = model.device.type != "cpu"
        self._number = 0
        self._differences: list[np.ndarray] = []
        self._world = model.world
        self._own = options.mode == "local"
        """An engine of this rank's own reads adapters that this rank writes; servers read those of the first."""
        self._writes = self._own or self._world.first
        self._removal: Callable[[], object] = lambda: None
        self._folder = self._place()
        bare = Served("base", 0, 0, "", None, self._probes("base"))
        self._backend = connect(bare, self._bound)
        self.note = self._backend.note
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
        self._backend.wake()
        self._load(new)
        self._served[adapter] = new
        if old is not None:
            self._backend.unload(old)
            if self._writes:
                shutil.rmtree(self._folder / old.name)

    def _place(self) -> Path:
        """A folder to hand adapters over in: in memory for an engine in this process, else the first rank's for all."""
        adapter = 4 * self._model.sizes["adapter"] * self._world.local_size if self._own else None

        def make() -> Path:
            made = HandOver(self._options.adapter_folder, adapter)
            self._removal = weakref.finalize(self, made.remove)
            return made.path

        return make() if self._own else self._world.share(make)

    def _load(self, new: Served) -> None:
        """On servers the first rank loads; then every other finds it loaded and compares it with its own weights."""
        if self._writes:
            self._backend.load(new)
        if not self._own:
            self._world.barrier()
        if not self._writes:
            self._backend.load(new)

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, versions: Mapping[Adapter, int]
    ) -> list[Response]:
        draws = [draw for draw, _ in self._draws([(request, sampling) for request in requests], versions)]
        self._backend.wake()
        responses = self._responses(self._backend.draw(draws, sampling)) if draws else []
        self._compare(requests, responses, sampling.temperature or 1.0)
        return responses

    @property
    def streams(self) -> bool:
        """Servers answer request by request; vLLM in this process gives a batch at once."""
        return hasattr(self._backend, "stream")

    def stream(self, asked: Sequence[Asked], versions: Mapping[Adapter, int]) -> Flow:
        """Both adapters' requests together; some responses are compared with the trainer at the end."""
        every, found = list(asked), dict[int, Response]()
        backend: Any = self._backend
        with closing(cast(Stream, backend.stream(self._draws(asked, versions)))) as decoding:
            ended = next(decoding, None)
            while ended is not None:
                responses = self._responses([drawn for _, drawn in ended]) if ended else []
                new = [(place, response) for (place, _), response in zip(ended, responses, strict=True)]
                found |= new
                more = yield new
                every += more
                ended = sent(decoding, self._draws(more, versions))
        for sampling in dict.fromkeys(sampling for _, sampling in every):
            alike = [i for i, (_, other) in enumerate(every) if other == sampling]
            self._compare([every[i][0] for i in alike], [found[i] for i in alike], sampling.temperature or 1.0)

    def _draws(self, asked: Sequence[Asked], versions: Mapping[Adapter, int]) -> list[tuple[Draw, Sampling]]:
        wanted: set[Adapter] = {request.view.adapter for request, _ in asked}
        served = {adapter: self._current(adapter, versions.get(adapter)) for adapter in wanted}
        return [(Draw(served[r.view.adapter], r.view.prompt, r.seed), sampling) for r, sampling in asked]

    def sleep(self) -> None:
        """Leave memory to the steps that follow; it wakes when it is next asked to publish or sample."""
        self._backend.sleep()

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
        if self._writes:
            folder.mkdir()
        return folder

    def _zeros(self, bare: Served) -> Served:
        """The base as an adapter of zeros.

        vLLM's CPU kernels add the adapter of the last slot to rows without one, wherever a batch holds both.
        """
        folder = self._name("base", 0)
        if self._writes:
            self._model.save_adapter("student", folder)
            file = folder / "adapter_model.safetensors"
            safetensors.save_file(
                {name: torch.zeros_like(tensor) for name, tensor in safetensors.load_file(file).items()}, file
            )
        return replace(bare, name=folder.name, number=self._number, folder=folder)

    def _write(self, adapter: Adapter, version: int, bits: str) -> Served:
        folder = self._name(adapter, version)
        if self._writes:
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
