"""Rows over several ranks. Here ranks are threads, which leave what they trade for each other, so that all but `World`
is what runs in processes; those are at the end, and whole runs in `test_distributed.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import shared_rows
import torch
from ranks import Launcher
from rounding import CHAIN, EPS, assert_rounding
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from past_opsd.core.nouns import PastError, View
from past_opsd.learner import NonFiniteError
from past_opsd.policy import fused, packing
from past_opsd.policy.distributed import World
from past_opsd.policy.split import Split
from past_opsd.run.train import Session


class Board:
    """Where so many ranks leave what they give."""

    def __init__(self, size: int):
        self.left: list[Any] = [None] * size
        self.all_here = threading.Barrier(size, timeout=60)


class Thread(World):
    """A rank that is a thread."""

    def __init__(self, rank: int, board: Board):
        super().__init__(rank, len(board.left))
        self._board = board

    def gather(self, item: Any) -> list[Any]:
        self._board.left[self.rank] = item
        self._board.all_here.wait()
        items = list(self._board.left)
        self._board.all_here.wait()
        return items

    def group(self, size: int) -> None:
        assert size == self.size

    def trade(self, rows: Tensor, receive: Sequence[int], send: Sequence[int], group: object) -> Tensor:
        got = [sent[self.rank] for sent in self.gather(rows.split(list(send)))]
        assert [len(rows) for rows in got] == list(receive)
        return torch.cat(got)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))


def together(size: int, action: Callable[[World], Any]) -> list[Any]:
    """What every rank returns."""
    board = Board(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: action(Thread(rank, board)), range(size)))


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize(("size", "heads", "key_heads"), [(2, 4, 2), (4, 4, 2), (4, 12, 6), (3, 6, 1), (2, 2, 2)])
def test_attention_over_ranks_is_attention(size: int, heads: int, key_heads: int):
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, 5 * size, 8, generator=draw) for n in (heads, key_heads, key_heads)]
    toward = torch.randn(2, 5 * size, heads, 8, generator=draw)
    whole = [x.clone().requires_grad_() for x in inputs]
    out = attend(*whole)
    out.backward(toward)
    want = out.detach()

    def of_rank(world: World) -> list[Tensor]:
        own = [x.chunk(size, dim=2)[world.rank].clone().requires_grad_() for x in inputs]
        out = Split(size, world).around(attend, *own)
        out.backward(toward.chunk(size, dim=1)[world.rank])
        return [out.detach(), *(x.grad for x in own)]

    outs, *grads = zip(*together(size, of_rank), strict=True)
    # At most 20 positions of 8 entries, read by up to 6 heads, there and back.
    assert_rounding(torch.cat(outs, dim=1), want, float(want.abs().max()), 2 * 20 * 8)
    for own, x in zip(grads, whole, strict=True):
        assert_rounding(torch.cat(own, dim=2), x.grad, float(x.grad.abs().max()), 4 * 20 * 8 * 6)


PATHS = [
    (View("base", (5, 6, 7)), (1, 2, 3, 4, 5, 6, 7)),
    (View("base", (5, 6, 7)), (7,)),
    (View("base", (5, 6, 9, 9)), (2, 2, 2)),
    (View("base", (8,)), (4, 4)),
]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [3, 1]])
def test_states_go_to_whom_they_are_due_and_gradients_back(size: int, sizes: list[int]):
    packed = packing.shared(PATHS, sizes)
    length, lengths = packed.ids.shape[1], [len(tokens) for _, tokens in PATHS]
    states = torch.randn(*packed.ids.shape, 3, generator=torch.Generator().manual_seed(0))
    toward = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(1))
    whole = states.clone().requires_grad_()
    want = Split().deal(whole, packed)
    want.backward(toward)

    def of_rank(world: World) -> tuple[Tensor, Any]:
        split = Split(size, world)
        here = split.here(lengths, states.device)
        assert [split.part(n) for n in lengths] == [len(split.here([n], states.device)) for n in lengths]
        own = torch.stack([split.own(column) for column in states.unbind(-1)], dim=-1).requires_grad_()
        dealt = split.deal(own, packed)
        assert torch.equal(dealt, want[here])
        dealt.backward(toward[here])
        assert torch.equal(split.gather(toward[here, 0], lengths), toward[:, 0])
        return own.grad, here

    grads, here = zip(*together(size, of_rank), strict=True)
    assert sorted(torch.cat(here).tolist()) == list(range(sum(lengths)))
    assert_rounding(torch.cat(grads, dim=1)[:, :length], whole.grad, float(whole.grad.abs().max()), len(PATHS))


@cache
def of_one(*settings: str) -> dict[str, Any]:
    parts = shared_rows.assembled(World(), *settings)
    return {phase: shared_rows.step(*parts, phase) for phase in ("teacher", "student")}


def assert_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    for phase, (gradient, log) in want.items():
        assert_rounding(found[phase][0], gradient, float(gradient.abs().max()))
        # A divergence near zero is a difference of log-probabilities of size 10, each from a hundred additions.
        assert found[phase][1] == pytest.approx(log, rel=CHAIN * EPS, abs=128 * EPS)


@pytest.mark.parametrize(
    ("size", "settings"), [(2, []), (4, ["model.gradient_checkpointing=true", "learner.shared_prompts=false"])]
)
def test_the_gradient_and_the_log_are_those_of_one_rank(size: int, settings: list[str]):
    ranks = [shared_rows.assembled(World(), *settings) for _ in range(size)]

    def of_rank(world: World) -> dict[str, Any]:
        model, learner = ranks[world.rank]
        model.world = world
        model._group = model._settle_split(size)
        return {phase: shared_rows.step(model, learner, phase) for phase in ("teacher", "student")}

    want = of_one(*settings)
    for found in together(size, of_rank):
        assert_same(found, want)
    states = [model.states(PATHS) for model, _ in ranks]
    assert all(len(own) == sum(len(tokens) for _, tokens in PATHS) for own in states), "shared outside of a phase"


def test_a_number_that_is_not_finite_stops_all_ranks_of_a_row(monkeypatch: pytest.MonkeyPatch):
    ranks = [shared_rows.assembled(World()) for _ in range(2)]
    real = fused.run

    def run(*args: Any, **kwargs: Any) -> fused.Result:
        result = real(*args, **kwargs)
        if threading.current_thread().name == "faulty":
            result.grad.fill_(torch.nan)
        return result

    monkeypatch.setattr(fused, "run", run)

    def of_rank(world: World) -> str:
        model, learner = ranks[world.rank]
        model.world = world
        model._group = model._settle_split(2)
        threading.current_thread().name = ["sound", "faulty"][world.rank]
        with pytest.raises(NonFiniteError) as told:
            shared_rows.step(model, learner, "teacher")
        return str(told.value)

    first, second = together(2, of_rank)
    assert first == second
    assert "non-finite entries in the gradient of term" in first


class Mute(World):
    """Ranks that trade nothing but zeros."""

    def gather(self, item: Any) -> list[Any]:
        return [item] * self.size

    def group(self, size: int) -> None: ...

    def trade(self, rows: Tensor, receive: Sequence[int], send: Sequence[int], group: object) -> Tensor:
        return rows.new_zeros(sum(receive), *rows.shape[1:])


@pytest.mark.parametrize(
    ("processes", "size", "changed", "message"),
    [
        (6, 4, {}, "distributed.split = 4: 6 processes are no groups of 4; start a multiple of 4"),
        (3, 3, {}, "distributed.split = 3: the 4 attention heads of 'embedded' divide over 1, 2, 4 processes"),
        (2, 2, {"choice.attention": "eager"}, "needs model.attention = 'sdpa', and it is 'eager'"),
        (2, 2, {"shares_prompts": False}, "would compute something else from split rows"),
        (2, 2, {"config.rope_parameters": {"rope_type": "dynamic"}}, "would compute something else from split rows"),
        (2, 2, {}, "would compute something else from split rows"),
    ],
    ids=["groups", "heads", "eager", "windows", "stretched", "tried"],
)
def test_what_cannot_be_split_is_told(past: Session, processes: int, size: int, changed: dict[str, Any], message: str):
    model: Any = past.model
    assert model.shares_prompts
    model.world = Mute(0, processes)
    for name, value in changed.items():
        owner, _, key = name.rpartition(".")
        if owner == "choice":
            model.choice = type(model.choice)(**{**vars(model.choice), key: value})
        else:
            setattr(getattr(model, owner) if owner else model, key, value)
    with pytest.raises(PastError, match=message):
        model._settle_split(size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "size", "settings"),
    [
        (2, 2, []),
        (4, 4, ["distributed.shard='full'"]),
        (4, 2, ["distributed.shard='full'", "model.gradient_checkpointing=true"]),
    ],
)
def test_processes_come_to_the_gradient_of_one(
    launch: Launcher, tmp_path: Path, processes: int, size: int, settings: list[str]
):
    ended = launch(processes, shared_rows.__file__, str(tmp_path), str(size), *settings)
    assert ended.codes == [0] * processes, ended.err
    want = of_one(*[setting for setting in settings if setting.startswith("model")])
    for rank in range(processes):
        assert_same(torch.load(tmp_path / f"{rank}.pt"), want)
