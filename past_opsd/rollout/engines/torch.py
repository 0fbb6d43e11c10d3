"""The embedded engine: batched sampling with a KV cache on the trainer's own weights.

Prompts are read once, however many samples they get, and so is a beginning they all share; sequences that end leave
the batch and waiting ones enter.
A request's seed alone decides its tokens (`_draw.py`), so the rest of the batch cannot change a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from pydantic import Field

from past_opsd.core.config import EngineOptions, Sampling
from past_opsd.core.lazy import Lazy
from past_opsd.core.nouns import Adapter, Response
from past_opsd.rollout.engines import Request, StaleAdapterError

if TYPE_CHECKING:
    import torch

    from past_opsd.policy.model import Model
    from past_opsd.rollout.engines import _draw, _rows
else:
    torch = Lazy("torch")
    _draw, _rows = Lazy("past_opsd.rollout.engines._draw"), Lazy("past_opsd.rollout.engines._rows")


class Options(EngineOptions):
    """The embedded torch engine."""

    batch: int = Field(default=64, ge=1, description="sequences decoded together")


def build(options: Options, model: Model) -> TorchEngine:
    """The engine on this model."""
    return TorchEngine(options, model)


class TorchEngine:
    """Samples from the trainer's network with one adapter folded in."""

    def __init__(self, options: Options, model: Model):
        _rows.require_attention(model)
        self._options = options
        self._model = model
        self._published: dict[Adapter, int] = {"base": 0}
        self._eos = torch.tensor(sorted(model.stops), dtype=torch.long, device=model.device)
        self.tell: Callable[[int, int], None] = lambda done, total: None

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
        views = [request.view for request in requests]
        for adapter in sorted(served):
            # Sorting puts samples of one prompt side by side, so that they enter together and share its forward.
            chosen = [i for i, view in enumerate(views) if view.adapter == adapter]
            chosen.sort(key=lambda i: (len(views[i].prompt), views[i].prompt, i))
            with self._model.sampling(adapter), torch.inference_mode():
                responses = self._decode([requests[i] for i in chosen], sampling)
            for i, response in zip(chosen, responses, strict=True):
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
        """Responses in order; whoever ends makes room for those who wait."""
        limit, device = sampling.max_new_tokens, self._model.device
        seats = min(self._options.batch, len(requests))
        rows = _rows.Rows(self._model, [request.view.prompt for request in requests], seats)
        uniforms = torch.zeros(seats, limit, dtype=torch.float64, device=device)
        tokens = torch.zeros(seats, limit, dtype=torch.long, device=device)
        logps = torch.zeros(seats, limit, dtype=torch.float32, device=device)
        waiting, free = list(range(len(requests)))[::-1], list(range(seats))[::-1]
        sitting: dict[int, int] = {}  # seat -> request
        seat = torch.zeros(0, dtype=torch.long, device=device)  # of each row
        age = torch.zeros(0, dtype=torch.long, device=device)
        logits = torch.zeros(0, device=device)
        drawn: dict[int, tuple[list[int], list[float]]] = {}
        self.tell(0, len(requests))
        while waiting or len(rows):
            self._model.tick()
            # A forward for few prompts costs as much as a step: they enter when a quarter of the seats is free.
            if len(free) >= min(len(waiting), max(1, self._options.batch // 4)) > 0:
                taken = [(free.pop(), waiting.pop()) for _ in range(min(len(free), len(waiting)))]
                sitting.update(taken)
                for place, request in taken:
                    uniforms[place] = torch.from_numpy(_draw.uniforms_of(requests[request].seed, limit)).to(device)
                first = rows.enter([requests[request].view.prompt for _, request in taken])
                logits = torch.cat([logits, first]) if len(logits) else first
                seat = torch.cat([seat, torch.tensor([place for place, _ in taken], device=device)])
                age = torch.cat([age, age.new_zeros(len(taken))])
            choice, logp = _draw.choose(logits, uniforms[seat, age], sampling)
            tokens[seat, age], logps[seat, age] = choice, logp
            age = age + 1
            over = torch.isin(choice, self._eos) | (age == limit)
            if bool(over.any()):
                places, lengths = (cast(list[int], column[over].tolist()) for column in (seat, age))
                for place, length in zip(places, lengths, strict=True):
                    drawn[sitting.pop(place)] = (tokens[place, :length].tolist(), logps[place, :length].tolist())
                    free.append(place)
                self.tell(len(drawn), len(requests))
                order = rows.leave(over.nonzero().squeeze(1))
                seat, age, choice = seat[order], age[order], choice[order]
            logits = rows.step(choice) if len(rows) else logits[:0]
        return self._responses([drawn[i] for i in range(len(requests))])

    def _responses(self, drawn: Sequence[tuple[list[int], list[float]]]) -> list[Response]:
        ends = set(cast(list[int], self._eos.tolist()))
        texts = self._model.tokenizer.batch_decode([ids for ids, _ in drawn], skip_special_tokens=True)
        return [
            Response(tuple(ids), text, tuple(logps), ids[-1] in ends)
            for (ids, logps), text in zip(drawn, texts, strict=True)
        ]
