"""The embedded engine: batched sampling with a KV cache on the trainer's own weights.

Prompts are read once, however many samples they get, and so is a beginning they all share; sequences that end leave
the batch and waiting ones enter.
A request's seed alone decides its tokens (`_draw.py`), so the rest of the batch cannot change a sample.

Memory decides how many sequences are alive (`policy/memory.py`). Nothing is reserved for lengths that a response may
never reach: where sequences outgrow the room, those with the fewest tokens are set aside with what they have drawn, and
are read again when others have ended. The one with the most tokens always stays, so each step brings an end nearer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from pydantic import Field

from past_opsd.core.config import EngineOptions, Sampling
from past_opsd.core.lazy import Lazy
from past_opsd.core.nouns import Adapter, PastError, Response, Tokens
from past_opsd.policy import memory
from past_opsd.rollout.engines import Asked, Flow, Request, StaleAdapterError, sent

if TYPE_CHECKING:
    import torch

    from past_opsd.policy.model import Model
    from past_opsd.rollout.engines import _draw, _rows
else:
    torch = Lazy("torch")
    _draw, _rows = Lazy("past_opsd.rollout.engines._draw"), Lazy("past_opsd.rollout.engines._rows")

Drawn = tuple[list[int], list[float]]
"""Tokens and their log-probabilities."""


class Options(EngineOptions):
    """The embedded torch engine."""

    here = True

    batch: int = Field(default=64, ge=1, description="most sequences decoded together; memory may allow fewer")
    memory_gib: float | None = Field(
        default=None, gt=0, description="memory for decoding; default: nine tenths of what is free when it starts"
    )


def build(options: Options, model: Model) -> TorchEngine:
    """The engine on this model."""
    return TorchEngine(options, model)


class _Seats:
    """What the sequences that are decoded now have drawn, a line of the buffers each, in the order of the rows."""

    def __init__(self, count: int, limit: int, device: torch.device):
        self._uniforms = torch.zeros(count, limit, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(count, limit, dtype=torch.long, device=device)
        self._logps = torch.zeros(count, limit, dtype=torch.float32, device=device)
        self._free = list(range(count))[::-1]
        self._request: dict[int, int] = {}  # who sits where
        self._seat = torch.zeros(0, dtype=torch.long, device=device)  # of each row
        self.age = torch.zeros(0, dtype=torch.long, device=device)
        """Tokens that each row has drawn."""

    @property
    def free(self) -> int:
        """Seats that nobody has."""
        return len(self._free)

    def take(self, requests: Sequence[int], seeds: Sequence[int], begun: Sequence[Drawn]) -> None:
        """Requests sit down, with what they had drawn before."""
        places = [self._free.pop() for _ in requests]
        self._request.update(zip(places, requests, strict=True))
        for place, seed, (tokens, logps) in zip(places, seeds, begun, strict=True):
            self._uniforms[place] = torch.from_numpy(_draw.uniforms_of(seed, self._uniforms.shape[1]))
            self._tokens[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            self._logps[place, : len(logps)] = torch.tensor(logps, dtype=torch.float32)
        ages = [len(tokens) for tokens, _ in begun]
        self._seat = torch.cat([self._seat, torch.tensor(places, device=self._seat.device)])
        self.age = torch.cat([self.age, torch.tensor(ages, device=self.age.device)])

    def draw(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """The next token of each row."""
        choice, logp = _draw.choose(logits, self._uniforms[self._seat, self.age], sampling)
        self._tokens[self._seat, self.age], self._logps[self._seat, self.age] = choice, logp
        self.age = self.age + 1
        return choice

    def youngest(self, count: int) -> torch.Tensor:
        """The rows with the fewest tokens, fewest first; of equals those asked for last."""
        ages, seats = (cast(list[int], column.tolist()) for column in (self.age, self._seat))
        rows = sorted(range(len(ages)), key=lambda row: (ages[row], -self._request[seats[row]]))
        return torch.tensor(rows[:count], device=self.age.device)

    def leave(self, gone: torch.Tensor, order: torch.Tensor) -> dict[int, Drawn]:
        """Rows give up their seats, `order` stays: what those who go have drawn, by request."""
        places, lengths = (cast(list[int], column[gone].tolist()) for column in (self._seat, self.age))
        self._free += places
        self._seat, self.age = self._seat[order], self.age[order]
        return {
            self._request.pop(place): (self._tokens[place, :length].tolist(), self._logps[place, :length].tolist())
            for place, length in zip(places, lengths, strict=True)
        }


def _entering(rows: _rows.Rows, free: int, waiting: Sequence[int], lengths: Sequence[int]) -> int:
    """How many of those who wait, the next one last, enter now."""
    # A forward for few prompts costs as much as a step: they enter when a quarter of the seats is free.
    enough = min(len(waiting), max(1, rows.capacity // 4))
    if not waiting or free < enough:
        return 0
    count = rows.seats([lengths[i] for i in waiting[: -free - 1 : -1]])
    return count if count >= enough or not len(rows) else 0


def _side_by_side(places: Sequence[int], requests: Sequence[Request]) -> list[int]:
    """In an order in which samples of one prompt enter together and share its forward."""
    return sorted(places, key=lambda i: (len(requests[i].view.prompt), requests[i].view.prompt, i))


class TorchEngine:
    """Samples from the trainer's network with one adapter folded in."""

    streams, mixes = True, False

    def __init__(self, options: Options, model: Model):
        _rows.require_attention(model)
        self._options = options
        self._model = model
        self.wide = model.device.type != "cpu"
        self._published: dict[Adapter, int] = {"base": 0}
        self._eos = torch.tensor(sorted(model.stops), dtype=torch.long, device=model.device)
        self._sizes: _rows.Sizes | None = None
        self._evictions = self._recomputed = 0
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
            chosen = _side_by_side([i for i, view in enumerate(views) if view.adapter == adapter], requests)
            with self._model.sampling(adapter), torch.inference_mode():
                for ended in self._decode([requests[i] for i in chosen], sampling, len(chosen)):
                    for place, response in self._responses(ended):
                        out[chosen[place]] = response
        return cast(list[Response], out)

    def stream(self, asked: Sequence[Asked], versions: Mapping[Adapter, int]) -> Flow:
        """The requests of one adapter after those of the other, so that each is folded in once.

        Requests on prompts that are being decoded join at once; others wait for their turn.
        """
        every, waiting = list(asked), list(range(len(asked)))
        while waiting:
            (first, sampling) = every[waiting[0]]
            adapter = first.view.adapter
            self._check(adapter, versions.get(adapter))
            alike = [i for i in waiting if (every[i][0].view.adapter, every[i][1]) == (adapter, sampling)]
            waiting = sorted({*waiting} - {*alike})
            requests = [request for request, _ in every]
            places = _side_by_side(alike, requests)
            views = {requests[i].view for i in places}
            with self._model.sampling(adapter), torch.inference_mode():
                decoding = self._decode([requests[i] for i in places], sampling, self._options.batch)
                joining: Sequence[Request] | None = None
                while (ended := sent(decoding, joining)) is not None:
                    more = yield [(places[n], response) for n, response in self._responses(ended)]
                    new = range(len(every), len(every) + len(more))
                    every += more
                    joins = [i for i in new if every[i][0].view in views and every[i][1] == sampling]
                    waiting += [i for i in new if i not in joins]
                    places += joins
                    joining = [every[i][0] for i in joins]

    def metrics(self) -> dict[str, float]:
        """How often a sequence was set aside for want of memory, and the tokens read again for that; none if never."""
        found = self._model.world.gather((self._evictions, self._recomputed))
        self._evictions = self._recomputed = 0
        times, tokens = (sum(counts) for counts in zip(*found, strict=True))
        return {"engine/evictions": times, "engine/recomputed_tokens": tokens} if times else {}

    def close(self) -> None: ...

    def _check(self, adapter: Adapter, wanted: int | None) -> None:
        published = self._published.get(adapter)
        now = self._model.versions[adapter]
        if not wanted == published == now:
            raise StaleAdapterError(
                f"{adapter}: version {wanted} was asked for, {published} is published, the weights are at {now}; "
                "publish an adapter after each of its steps"
            )

    def _make_rows(self, prompts: Sequence[Tokens], limit: int) -> _rows.Rows:
        """Room for the responses, if there is enough for the longest alone."""
        sizes = self._sizes = self._sizes or _rows.Sizes.of(self._model)
        given, device = self._options.memory_gib, self._model.device
        if given is not None:
            size, there = int(given * memory.GIB), f"engine.memory_gib = {given:g}"
        else:
            devices = {parameter.device for parameter in self._model.network.parameters()}
            free = min(memory.free(own) for own in devices)
            free //= self._model.world.local_size if device.type == "cpu" else 1  # whose processes share it
            size = int(memory.SHARE * free)
            there = f"{size / memory.GIB:.2g} GiB, {memory.SHARE:.0%} of what is free,"
        longest = max(map(len, prompts))
        room = sizes.room(size, limit, self._options.batch)
        if room.columns(1) < longest + limit:
            needed = sizes.needed(longest + limit, limit) / memory.GIB
            raise PastError(
                f"to decode one response of {limit} tokens after a prompt of {longest} takes {needed:.2g} GiB on "
                f"{device}; {there} is less. Lower max_new_tokens (rollout.student, rollout.teacher, "
                "evaluation.sampling), give it more memory (engine.memory_gib, another model.device), or sample "
                "elsewhere (engine.name = 'vllm')"
            )
        return _rows.Rows(self._model, prompts, limit, room, sizes)

    def _decode(
        self, asked: Sequence[Request], sampling: Sampling, seats: int
    ) -> Generator[dict[int, Drawn], Sequence[Request] | None, None]:
        """What has ended at each step, by its place in the order asked; whoever ends makes room for those who wait.

        What is sent joins those who wait; its prompts are among those asked at first.
        """
        limit, requests = sampling.max_new_tokens, list(asked)
        rows = self._make_rows([request.view.prompt for request in requests], limit)
        seated = _Seats(min(self._options.batch, seats), limit, self._model.device)
        waiting = list(range(len(requests)))[::-1]  # the next one stands last
        lengths = [
            len(request.view.prompt) for request in requests
        ]  # with what they had drawn when they were set aside
        drawn: dict[int, Drawn] = {}  # of those set aside
        ended = 0
        logits = torch.zeros(0, device=self._model.device)
        self.tell(0, len(requests))
        while waiting or len(rows):
            self._model.tick()
            count = _entering(rows, seated.free, waiting, lengths)
            if count:
                taken = [waiting.pop() for _ in range(count)]
                begun = [drawn.pop(i, ([], [])) for i in taken]
                seated.take(taken, [requests[i].seed for i in taken], begun)
                first = rows.enter(
                    [requests[i].view.prompt + tuple(tokens) for i, (tokens, _) in zip(taken, begun, strict=True)]
                )
                logits = torch.cat([logits, first]) if len(logits) else first
            choice = seated.draw(logits, sampling)
            over = torch.isin(choice, self._eos) | (seated.age == limit)
            done: dict[int, Drawn] = {}
            if bool(over.any()):
                gone = over.nonzero().squeeze(1)
                done = seated.leave(gone, order := rows.leave(gone))
                ended += len(done)
                choice = choice[order]
                self.tell(ended, len(requests))
            excess = rows.excess()
            if excess:
                gone = seated.youngest(excess)
                aside = seated.leave(gone, order := rows.leave(gone))
                drawn |= aside
                choice = choice[order]
                waiting += aside  # those with the most tokens last: they are the first to go on
                for i, (tokens, _) in aside.items():
                    lengths[i] = len(requests[i].view.prompt) + len(tokens)
                self._evictions += len(aside)
                self._recomputed += sum(lengths[i] for i in aside)
            logits = rows.step(choice) if len(rows) else logits[:0]
            for request in (yield done) or ():
                waiting.insert(0, len(requests))
                requests.append(request)
                lengths.append(len(request.view.prompt))

    def _responses(self, drawn: Mapping[int, Drawn]) -> list[tuple[int, Response]]:
        if not drawn:
            return []
        ends = set(cast(list[int], self._eos.tolist()))
        texts = self._model.tokenizer.batch_decode([ids for ids, _ in drawn.values()], skip_special_tokens=True)
        return [
            (place, Response(tuple(ids), text, tuple(logps), ids[-1] in ends))
            for (place, (ids, logps)), text in zip(drawn.items(), texts, strict=True)
        ]
