"""Rollout engines: token ids in, token ids and log-probabilities out.

An engine module holds `Options` (its keys in the recipe's `[engine]`, a `config.EngineOptions`) and
`build(options, model)`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from past_opsd.core.config import Sampling
from past_opsd.core.nouns import Adapter, PastError, Response, View


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample. The seed alone decides the draw, whatever else is in the batch."""

    view: View
    seed: int


Asked = tuple[Request, Sampling]
Flow = Generator[list[tuple[int, Response]], Sequence[Asked], None]
"""Decoding that gives responses as they end, each with its place in the order of asking, and takes further requests in
exchange. It ends when all have ended and none is given; closed before, it breaks off."""


T = TypeVar("T")
S = TypeVar("S")


def sent(flow: Generator[T, S, None], value: S) -> T | None:
    """What a generator gives for a value; None after its last."""
    try:
        return flow.send(value)
    except StopIteration:
        return None


class StaleAdapterError(PastError):
    """The engine was asked for an adapter version that it does not serve."""


class Engine(Protocol):
    """Samples complete responses from published adapters.

    One with an attribute `tell` calls it with how many of how many responses are drawn, as they come. One with
    `hear` is given a function that shows a person a line.
    `own_weights = True` samples from weights of its own; any other from the trainer's, which are put together for it.
    One with `wide = True` decodes many sequences in about the time of one, as a GPU does.
    One with `streams = True` has `stream(asked, versions)`, a `Flow`; with `mixes = True` it decodes both adapters'
    requests together, else it gives what has ended at every step, and those that came first go first.
    One with a method `sleep` is told so before every optimizer step, and wakes by itself when it is next asked.
    One with a `note` has something to say to a person before the run.
    """

    def publish(self, adapter: Adapter, version: int) -> None:
        """Serve `adapter` as it is now, under this version."""
        ...

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, versions: Mapping[Adapter, int]
    ) -> list[Response]:
        """One response per request, in order. Refuses when a version is not the published one.

        `Response.logprobs` are those of the sampled tokens at the sampling temperature, before top-p, top-k
        and min-p cut the support.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers since the last call, for the cycle's record."""
        ...

    def close(self) -> None:
        """Give back what the engine took: files, processes, memory. It may not be used afterwards."""
        ...
