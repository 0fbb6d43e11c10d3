"""What a piece of the real code would take on a device, found by running it on tensors that have shapes and no values.

`Tracer` follows every ATen operation: which storages live and of what kind they are, kernel launches, floating-point
operations, values read back to the host, and which of torch's attention kernels each call can use. The device's tensors
are meta tensors; the host's are real. Small tensors made from the host's numbers (masks, lengths, positions) keep their
values, so that the code takes the branches that it would take; any other value that is read back is a 1.

Where a GPU would run a fused attention kernel, a stand-in with the memory of that kernel takes its place; where it
would fall back to the math kernel, the real one runs and its scores count. Memory is what is allocated, by tensors: not
what a caching allocator reserves beyond it, nor the scratch space inside of kernels, nor a GPU's context.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward  # pyright: ignore[reportPrivateUsage]
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils.flop_counter import flop_registry

from past_opsd.policy import attention
from past_opsd.policy.attention import causal_lower_right

aten: Any = torch.ops.aten
Kernel = Literal["flash", "memory-efficient", "math"]
Device = Literal["gpu", "cpu"]

# Where a storage is made, by the innermost of these functions that is at work, and what it then is. Peaks are kept for
# each of these places, because with more layers another one may become the highest.
PLACES = {
    "past_opsd.learner.step.Learner._accumulate": "gradients",
    "past_opsd.learner.step.Learner._frozen_states": "activations",
    "past_opsd.learner.step.Learner._round": "activations",
    "past_opsd.policy.fused.run": "logits and loss",
    "past_opsd.policy.tracing._backward": "activations",
    "past_opsd.policy.distributed.World.sum": "gradients",
    "past_opsd.learner.step.Learner.step": "optimizer",
    "past_opsd.rollout.engines._rows.Rows._reshape": "KV cache",
    "transformers.cache_utils.DynamicLayer.update": "KV cache",
    "past_opsd.rollout.engines._draw.choose": "logits and loss",
    "past_opsd.rollout.engines._rows.Rows.enter": "activations",
    "past_opsd.rollout.engines._rows.Rows.step": "activations",
}
OWN = "past_opsd."
_SMALL = 2**22  # entries of a tensor whose values are kept
_SHAPED = {aten.nonzero.default, aten.masked_select.default}  # what these return has a shape that depends on values
_REPEATS = {aten.repeat_interleave.Tensor}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_FREE = {  # operations that launch nothing
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh", "detach",
    "alias", "_reshape_alias", "set_", "is_same_size",
}  # fmt: skip


Kinds = dict[str, int]
"""Bytes by kind."""


@dataclass
class Phase:
    """What was found between two moments."""

    peaks: dict[str, Kinds] = field(default_factory=dict[str, Kinds])
    """Bytes of live storages at the worst moment in each of `PLACES`, by kind."""
    launches: int = 0
    """Operations on the device that are more than another view of a tensor."""
    flops: Counter[str] = field(default_factory=Counter[str])
    """Floating-point operations of matrix products and attention, by dtype."""
    reads: Counter[str] = field(default_factory=Counter[str])
    """Values that the host waited for, by place in the code."""
    attention: Counter[tuple[Kernel, str]] = field(default_factory=Counter[tuple[Kernel, str]])
    """Forward calls of attention by the kernel that they can use and why it is not flash."""

    @property
    def kinds(self) -> Kinds:
        """Bytes by kind at the worst moment."""
        return max(self.peaks.values(), key=_size, default=Kinds())

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return _size(self.kinds)

    def deeper(self, other: Phase, layers: int) -> Phase:
        """This with so many layers more, where `other` had one more: every layer takes the same."""
        return Phase(
            {place: _more(kinds, other.peaks.get(place, kinds), layers) for place, kinds in self.peaks.items()},
            self.launches + layers * (other.launches - self.launches),
            *(
                Counter(_more(mine, theirs, layers))
                for mine, theirs in (
                    (self.flops, other.flops),
                    (self.reads, other.reads),
                    (self.attention, other.attention),
                )
            ),
        )


def _size(kinds: Kinds) -> int:
    return sum(kinds.values())


def _more(one: Mapping[Any, int], two: Mapping[Any, int], layers: int) -> dict[Any, int]:
    keys = [*one, *(key for key in two if key not in one)]
    return {key: one.get(key, 0) + layers * (two.get(key, 0) - one.get(key, 0)) for key in keys}


class Tracer:
    """Live storages of one device, and what is done on it; a context manager."""

    def __init__(self, device: Device = "gpu", real: bool = False):
        self.phase = Phase()
        self._device = device
        self.real = real
        self._type = "cpu" if real else "meta"
        self._live: Counter[str] = Counter()
        self._total = 0
        self._storages: dict[int, tuple[str, int, weakref.ref[torch.UntypedStorage]]] = {}
        self._highest: dict[str, int] = {}
        self._done: dict[Any, tuple[Phase, Phase]] = {}
        self._places: dict[Any, str | None] = {}
        self._modes = ExitStack()

    def __enter__(self) -> Tracer:
        # torch's causal bias, a tensor of its own class, cannot be made while operations are followed.
        self._modes.enter_context(replaced(attention, "causal_lower_right", _unfollowed))
        if self._type == "meta":
            self._modes.enter_context(_Calls(self))
        self._modes.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    def begin(self, phase: Phase) -> Phase:
        """Count in this phase from now on."""
        self.phase, self._highest = phase, {}
        self._mark("")
        return phase

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count these tensors as of this kind, whoever made them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) in self._storages:
                old, size, _ = self._storages[id(storage)]
                self._live[old] -= size
                self._total -= size
            self._add(storage, kind, "")

    def so_far(self) -> Phase:
        """What was counted until now."""
        phase = self.phase
        return Phase({}, phase.launches, Counter(phase.flops), Counter(phase.reads), Counter(phase.attention))

    def once(self, key: Any, action: Callable[[], object]) -> None:
        """Do it, or where the same key was there before in this phase, count what it did then."""
        key = id(self.phase), key
        if key in self._done:
            self.add(*self._done[key])
            return
        before = self.so_far()
        action()
        self._done[key] = before, self.so_far()

    def forget(self) -> None:
        """Count anew; peaks stay."""
        self.phase.launches = 0
        for counter in (self.phase.flops, self.phase.reads, self.phase.attention):
            counter.clear()

    def add(self, before: Phase, after: Phase, times: int = 1) -> None:
        """Count what was done between two moments so many times more, for the same on tensors of the same shapes."""
        self.phase.launches += times * (after.launches - before.launches)
        for counter, old, new in (
            (self.phase.flops, before.flops, after.flops),
            (self.phase.reads, before.reads, after.reads),
            (self.phase.attention, before.attention, after.attention),
        ):
            for key, value in new.items():
                cast(Counter[Any], counter)[key] += times * (value - cast(Counter[Any], old)[key])

    def _mark(self, place: str) -> None:
        if self._total > self._highest.get(place, 0):
            self._highest[place] = self._total
            self.phase.peaks[place] = {kind: size for kind, size in self._live.items() if size}

    def _add(self, storage: torch.UntypedStorage, kind: str, place: str) -> None:
        key, size = id(storage), storage.nbytes()

        def gone(_: object) -> None:
            name, size, _ref = self._storages.pop(key)
            self._live[name] -= size
            self._total -= size

        self._storages[key] = (kind, size, weakref.ref(storage, gone))
        self._live[kind] += size
        self._total += size
        self._mark(place)

    def made(self, out: Any) -> None:
        """Take note of the storages of what an operation returned."""
        for tensor in _tensors(out):
            if tensor.device.type == self._type:
                storage = tensor.untyped_storage()
                if id(storage) not in self._storages:
                    place = self._place()
                    self._add(storage, PLACES.get(place, "activations"), place)

    def _place(self) -> str:
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            code = frame.f_code
            if code not in self._places:
                name = f"{frame.f_globals.get('__name__')}.{code.co_qualname}"
                self._places[code] = name if name in PLACES else None
            if self._places[code] is not None:
                return self._places[code] or ""
            frame = frame.f_back
        return ""

    def read(self, what: str) -> None:
        """A value goes to the host, which waits for it."""
        self.phase.reads[f"{_line()} {what}"] += 1

    def computed(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operation."""
        leaves = [*_tensors(args), *_tensors(out)]
        if func.is_view or func._schema.name.partition("::")[2] in _FREE:
            return
        if not any(t.device.type == self._type for t in leaves):
            return
        self.phase.launches += 1
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.phase.flops[_dtype(leaves[0])] += cast(int, count(*args, **kwargs, out_val=out))

    # Values of small tensors that are made from known ones.

    def known(self, tensor: Any) -> Tensor | None:
        """The values of a tensor, where they are known."""
        if not isinstance(tensor, Tensor) or tensor.device.type == "cpu":
            return cast(Tensor | None, tensor)
        value = cast(Tensor | None, getattr(tensor, "_known", None))
        return None if value is None or hasattr(value.untyped_storage(), "_spoiled") else value

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the values of what an operation returned, where it is small and follows from known ones."""
        written = [
            a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
        ]
        small = all(t.numel() <= _SMALL for t in _tensors(out))
        inputs = _tensors((args, kwargs))
        if small and _made_on_host(func, inputs) and all(self.known(t) is not None for t in inputs):
            values = func(*_map(self.known, args), **_on_host(_map(self.known, kwargs)))
            for tensor, value in zip(_tensors(out), _tensors(values), strict=True):
                if not any(tensor is t for t in inputs):
                    cast(Any, tensor)._known = value
        else:
            for tensor in _tensors(written):
                value = getattr(tensor, "_known", None)
                if value is not None:
                    value.untyped_storage()._spoiled = True

    # Attention.

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`scaled_dot_product_attention` by the kernel that the device would use."""
        rows, columns = query.shape[-2], key.shape[-2]
        pairs = rows * columns
        if isinstance(attn_mask, CausalBias):
            lower = self._device == "gpu" and query.dtype != torch.float32
            is_causal, attn_mask = (True, None) if lower or rows == columns else (False, _lower_right(query, key))
        if is_causal or isinstance(attn_mask, CausalBias):
            pairs -= rows * (rows - 1) // 2
        kernel, why = self.kernel(query, attn_mask, enable_gqa)
        self.phase.attention[kernel, why] += 1
        if kernel == "math":
            return scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal and rows == columns,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # the kernels add their mask
        work = 4 * pairs * query.shape[0] * query.shape[1] * query.shape[3]
        return cast(Any, _Fused).apply(query, key, value, attn_mask, work, self)

    def kernel(self, query: Tensor, mask: Tensor | None, grouped: bool) -> tuple[Kernel, str]:
        """The kernel that the device would use, and why it is not flash."""
        if self._device == "cpu":
            return "flash", ""
        reason = ""
        if query.dtype not in (torch.bfloat16, torch.float16):
            reason = _dtype(query)
        elif mask is not None:
            reason = "a mask"
        elif query.shape[-1] > 256:
            reason = "heads wider than 256"
        if not reason:
            return "flash", ""
        return ("math", f"{reason} and grouped queries") if grouped else ("memory-efficient", reason)

    def attended(self, query: Tensor, work: int) -> None:
        """Count a stand-in's arithmetic."""
        self.phase.launches += 1
        self.phase.flops[_dtype(query)] += work

    @property
    def fused_backward(self) -> bool:
        """Whether the backward of attention needs what a GPU's kernel needs."""
        return self._device == "gpu"


class _Fused(torch.autograd.Function):
    """The tensors of a fused attention kernel: no scores, but the logarithm of their sums."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, work: int, tracer: Tracer
    ) -> Tensor:
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        ctx.work, ctx.tracer = work, tracer
        tracer.attended(query, work)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        ctx.tracer.attended(query, int(2.5 * ctx.work))
        if ctx.tracer.fused_backward:
            # FlashAttention-2 adds up the queries' gradient in float32, and makes the keys' for every head of queries.
            whole = [torch.empty_like(query, dtype=torch.float32)]
            if key.shape[1] != query.shape[1]:
                wide = (*key.shape[:1], query.shape[1], *key.shape[2:])
                whole += [key.new_empty(wide), value.new_empty(wide)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None, None


def _unfollowed(rows: int, columns: int) -> Any:
    with _disable_current_modes():
        return causal_lower_right(rows, columns)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """Within this, an attribute is another."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _lower_right(query: Tensor, key: Tensor) -> Tensor:
    rows, columns = query.shape[-2], key.shape[-2]
    return torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(diagonal=columns - rows)


class _Calls(TorchFunctionMode):
    """What must be seen before torch takes it apart."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and args[0].device.type == "meta":
            return self._tracer.attend(*args, **kwargs)
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "meta":
            # A meta tensor would never see its numbers.
            return torch.tensor(*args, **{**kwargs, "device": None}).to("meta")
        if func is Tensor.backward:
            with self:  # a backward computes blocks again, and they call attention
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)


def _backward(tensor: Tensor, gradient: Tensor, **_: object) -> None:
    """What `Tensor.backward` does, below the functions that a mode sees."""
    _engine_run_backward((tensor,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Operations(TorchDispatchMode):
    """Every ATen operation, forward, backward and recomputed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to say so would import the compiler

    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer
        self._plain: dict[Any, bool] = {}
        self._shaped: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs, tracer = dict(kwargs or {}), self._tracer
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # without autograd, operations that are made of others come whole
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs) if tracer.real else self._on_meta(func, args, kwargs)
        tracer.made(out)
        tracer.computed(func, args, kwargs, out)
        return out

    def _on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tracer = self._tracer
        first: Any = args[0] if args else None
        on_device = isinstance(first, Tensor) and first.device.type == "meta"
        if func is aten._local_scalar_dense.default and on_device:
            tracer.read("item")
            value = tracer.known(first)
            return torch.ones((), dtype=first.dtype).item() if value is None else value.item()
        if func is aten._to_copy.default and on_device and kwargs.get("device") == torch.device("cpu"):
            tracer.read("copy")
            value = tracer.known(first)
            value = torch.ones(first.shape, dtype=first.dtype) if value is None else value
            return func(value, **kwargs)
        asked = func in _SHAPED or (func in _REPEATS and kwargs.get("output_size") is None)
        if asked and any(t.device.type == "meta" for t in _tensors(args)):
            tracer.read(func._schema.name.partition("::")[2])
            return _shaped(func, tracer, args, kwargs)
        if func in _INDEXING:
            args = (first, [p for index in args[1] for p in _positions(tracer, index)], *args[2:])
        out = self._shapes(func, args, kwargs)
        if any(t.device.type == "meta" for t in _tensors(out)):
            tracer.follow(func, args, kwargs, out)
        return out

    def _shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operation returns, remembered by the shapes of what it takes: torch works them out slowly."""
        if func not in self._plain:
            schema = func._schema
            aliased = any(a.alias_info for a in (*schema.arguments, *schema.returns))
            self._plain[func] = func.namespace == "aten" and not aliased
        if not self._plain[func] or {t.device.type for t in _tensors(args)} != {"meta"}:
            return func(*args, **kwargs)
        key = func, _shape(args), _shape(kwargs)
        if key in self._shaped:
            return _anew(self._shaped[key])
        out = func(*args, **kwargs)
        self._shaped[key] = _map(lambda t: _Like(t.shape, t.stride(), t.dtype), out)
        return out


def _shaped(func: Any, tracer: Tracer, args: Any, kwargs: dict[str, Any]) -> Tensor:
    values = _map(tracer.known, args)
    if any(v is None for t, v in zip(args, values, strict=True) if t is not None):
        raise NotImplementedError(f"{func} of values that are not known has no shape that could be traced")
    value = func(*values, **kwargs)
    out = value.to("meta")
    out._known = value
    return out


def _positions(tracer: Tracer, index: Tensor | None) -> list[Tensor | None]:
    """A boolean index as the positions that it means, dimension by dimension."""
    if index is None or index.dtype not in (torch.bool, torch.uint8) or index.device.type != "meta":
        return [index]
    tracer.read("boolean index")
    value = tracer.known(index)
    if value is None:
        raise NotImplementedError("a boolean index of values that are not known has no shape that could be traced")
    return [where.to("meta") for where in value.nonzero(as_tuple=True)]


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [leaf for item in cast(Any, tree) for leaf in _tensors(item)]
    if isinstance(tree, dict):
        return _tensors(list(cast(Any, tree).values()))
    return []


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return _like(tree, (_map(function, item) for item in cast(Any, tree)))
    if isinstance(tree, dict):
        return {key: _map(function, item) for key, item in cast(Any, tree).items()}
    return tree


def _like(tree: Any, items: Iterable[Any]) -> Any:
    return list(items) if isinstance(tree, list) else tuple(items)


def _shape(tree: Any) -> Any:
    """What decides the shapes of results, as a key."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, list | tuple):
        return tuple(_shape(item) for item in cast(Any, tree))
    if isinstance(tree, dict):
        return tuple((key, _shape(item)) for key, item in cast(Any, tree).items())
    return type(tree), tree


@dataclass(frozen=True)
class _Like:
    """A tensor's looks."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _anew(tree: Any) -> Any:
    if isinstance(tree, _Like):
        return torch.empty_strided(tree.shape, tree.stride, dtype=tree.dtype, device="meta")
    if isinstance(tree, list | tuple):
        return _like(tree, (_anew(item) for item in cast(Any, tree)))
    return tree


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | ({"device": torch.device("cpu")} if kwargs.get("device") is not None else {})


def _made_on_host(func: Any, inputs: list[Tensor]) -> bool:
    """Whether running it on the host is right: it has inputs, or makes numbers."""
    return bool(inputs) or not func._schema.name.partition("::")[2].startswith("empty")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _line() -> str:
    """Where in the package the present operation was asked for."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(OWN) and name != __name__:
            return f"{name.removeprefix(OWN)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
