"""The matrix products of a piece of work: recorded as they happen, then run alone.

The products run again in their order, on random numbers that lie where the originals lay relative to each other: a
buffer for every storage. So weights come from memory or cache as they did, and what is left out is everything else.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from past_opsd.run.profiling import Clock

aten = torch.ops.aten
PRODUCTS = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.matmul,
    aten.linear,
    aten.scaled_dot_product_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in which storage."""

    storage: int
    size: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One product: the phase it belongs to, the operation, its arguments with tensors as places."""

    phase: str
    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder(TorchDispatchMode):
    """Inside it every matrix product is noted, those of a backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.calls: list[Call] = []

    def enter(self, phase: str) -> None:
        """Products from here on belong to this phase."""
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in PRODUCTS:
            named = {key: _place(value) for key, value in kwargs.items()}
            self.calls.append(Call(self.phase, func, tuple(map(_place, args)), named))
        return func(*args, **kwargs)


def _place(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage()
    layout = (int(value.storage_offset()), tuple(value.shape), value.stride(), value.dtype)
    return Place(storage.data_ptr(), storage.nbytes(), *layout)


class Replay:
    """The recorded products on random numbers."""

    def __init__(self, calls: Sequence[Call]):
        sizes: dict[int, int] = defaultdict(int)
        for call in calls:
            for place in (*call.args, *call.kwargs.values()):
                if isinstance(place, Place):
                    sizes[place.storage] = max(sizes[place.storage], place.size)
        draw = torch.Generator().manual_seed(17)
        self._buffers = {
            storage: torch.randn(-(-size // 8) * 2, generator=draw).view(torch.uint8) for storage, size in sizes.items()
        }
        self._calls = [
            (call.phase, call.operation, tuple(map(self._tensor, call.args)), self._named(call.kwargs))
            for call in calls
        ]

    def _named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {key: self._tensor(value) for key, value in kwargs.items()}

    def _tensor(self, value: Any) -> Any:
        if not isinstance(value, Place):
            return value
        return torch.as_strided(self._buffers[value.storage].view(value.dtype), value.shape, value.stride, value.offset)

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """CPU seconds by phase."""
        clock = Clock(now=time.process_time)
        current = ""
        for phase, operation, args, kwargs in self._calls:
            if phase != current:
                current = phase
                clock.phase(phase)
            operation(*args, **kwargs)
        clock.stop()
        return clock.seconds(0)
