"""Rollout engines: token ids in, token ids and log-probabilities out.

An engine module holds `Options` (its keys in the recipe's `[engine]`, a `config.EngineOptions`) and
`build(options, model)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from past_opsd.core.config import Sampling
from past_opsd.core.nouns import Adapter, PastError, Response, View


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample. The seed alone decides the draw, whatever else is in the batch."""

    view: View
    seed: int


class StaleAdapterError(PastError):
    """The engine was asked for an adapter version that it does not serve."""


class Engine(Protocol):
    """Samples complete responses from published adapters.

    One with an attribute `tell` calls it with how many of how many responses are drawn, as they come. One with
    `hear` is given a function that shows a person a line.
    One with `own_weights = True` samples from weights of its own; any other from the trainer's, which are put together
    for it. One with `wide = True` decodes many sequences in about the time of one, as a GPU does.
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
