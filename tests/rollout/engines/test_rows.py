"""Sequences leave and enter while others decode: on every kind of network each sample stays what it is alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from operations import Operations
from policy.test_model import ARCHITECTURES, SHAPE, folder_of, section_of
from rollout.engines.parts import move, publish

from past_opsd.core.config import LoraSection, ModelSection, Sampling
from past_opsd.core.nouns import Adapter, PastError, Tokens, View, derive_seed
from past_opsd.policy import memory
from past_opsd.policy.model import Model
from past_opsd.rollout.engines import Request, _lean, _rows
from past_opsd.rollout.engines.torch import Options, build

HOT = Sampling(max_new_tokens=16, temperature=1.5)
WINDOWED = {"windowed": ("MistralConfig", SHAPE | {"sliding_window": 6}, set())}


def network(path: Path, name: str) -> Model:
    config, shape, _ = (ARCHITECTURES | WINDOWED)[name]
    model = Model(section_of(folder_of(path / name, config, shape)), seed=3)
    move(model, "student", 0.2)
    return model


def ragged(count: int, common: int = 0) -> list[Request]:
    """Prompts of many lengths after a common beginning; every third is asked twice."""
    stem = tuple(3 + i % 17 for i in range(common))
    prompts = [stem + tuple(4 + (7 * i + j) % 30 for j in range(3 + i % 9)) for i in range(count)]
    prompts = [p for i, p in enumerate(prompts) for _ in range(2 if i % 3 == 0 else 1)]
    return [Request(View("student", p), derive_seed("ragged", i)) for i, p in enumerate(prompts)]


def check(model: Model, requests: list[Request], batch: int, sampling: Sampling = HOT) -> list[int]:
    """Each response is the one it would be alone, and its log-probabilities are the trainer's."""
    engine = publish(build(Options(batch=batch), model), model)
    lengths = []
    responses = engine.sample(requests, sampling, model.versions)
    for request, response in zip(requests, responses, strict=True):
        assert engine.sample([request], sampling, model.versions)[0].tokens == response.tokens
        with torch.no_grad():
            logits = model.hidden([(request.view, response.tokens)]) @ model.head.T
            logits = logits if model.head_bias is None else logits + model.head_bias
        logp = (logits / sampling.temperature).log_softmax(-1)
        own = logp.gather(1, torch.tensor(response.tokens)[:, None]).squeeze(1)
        np.testing.assert_allclose(response.logprobs, own, atol=1e-4)
        lengths.append(len(response.tokens))
    return lengths


@pytest.mark.parametrize("name", [*ARCHITECTURES, *WINDOWED])
def test_every_architecture_decodes_in_changing_company(name: str, tmp_path: Path):
    lengths = check(network(tmp_path, name), ragged(9), batch=4)
    assert len(set(lengths)) > 3  # some leave early


def test_a_prompt_that_is_the_beginning_of_the_others_keeps_a_token_of_its_own(tmp_path: Path):
    requests = ragged(3, common=40)
    stem = Request(View("student", requests[0].view.prompt[:40]), derive_seed("stem"))
    check(network(tmp_path, "llama"), [*requests, stem], batch=8)


@pytest.mark.parametrize("name", ["llama", "gpt2", "windowed"])
def test_a_beginning_that_all_prompts_share_is_read_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, requests, read = network(tmp_path, name), ragged(6, common=33), []
    forward = _rows.Rows._forward

    def counted(self: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        read.append(ids.numel())
        return forward(self, ids, *rest)

    monkeypatch.setattr(_rows.Rows, "_forward", counted)
    publish(build(Options(batch=8), model), model).sample(requests, HOT, model.versions)
    once = name != "windowed"  # a window of six could not see across the padding between
    assert (33 in read) == once
    assert max(read) < 8 * 33 or not once
    check(model, requests, batch=8)


def test_the_buffers_move_and_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, done = network(tmp_path, "llama"), []
    monkeypatch.setattr(memory, "GROWTH", 6)
    for name in ("_reshape", "_move", "_make_room"):
        original = getattr(_rows.Rows, name)
        monkeypatch.setattr(_rows.Rows, name, lambda *a, f=original, n=name: (done.append(n), f(*a))[1])
    check(model, ragged(12), batch=3, sampling=Sampling(max_new_tokens=40, temperature=1.5))
    steps = list(pairwise(done))
    assert ("_make_room", "_reshape") in steps  # grew
    assert ("_make_room", "_move") in steps


LONG = Sampling(max_new_tokens=40, temperature=1.5)


def gib(model: Model, requests: list[Request], limit: int, rows: float) -> float:
    """Memory for so many sequences that all run to their limit."""
    with model.sampling("student"), torch.inference_mode():
        sizes = _rows.Sizes.of(model)
    whole = max(len(request.view.prompt) for request in requests) + limit
    once = sizes.needed(0, limit) - sizes.room(0, limit, 1).row
    return (once + rows * (sizes.needed(whole, limit) - once)) / memory.GIB


@pytest.mark.parametrize(("name", "common"), [("llama", 0), ("llama", 33), ("gpt2", 33), ("windowed", 0)])
def test_sequences_set_aside_for_want_of_memory_draw_the_same_tokens(
    name: str, common: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Read again in pieces, in whatever order they were asked for; the buffers stay within the room."""
    monkeypatch.setattr(memory, "GROWTH", 3)
    monkeypatch.setattr(_rows, "PIECE", 5)
    monkeypatch.setattr(_rows, "DRAWING", 0)  # else it would outweigh so few tokens
    model, requests = network(tmp_path, name), ragged(9, common)
    limit = 20 if common else 40
    sampling = Sampling(max_new_tokens=limit, temperature=1.5)
    expected = publish(build(Options(), model), model).sample(requests, sampling, model.versions)
    reshape, shares = _rows.Rows._reshape, []

    def watched(self: Any, rows: int, columns: int, end: int) -> None:
        reshape(self, rows, columns, end)
        shares.append(rows * (columns * self._room.token + self._room.row) / self._room.size)

    monkeypatch.setattr(_rows.Rows, "_reshape", watched)
    engine = publish(build(Options(memory_gib=gib(model, requests, limit, 3.2)), model), model)
    for way in (slice(None), slice(None, None, -1)):
        found = engine.sample(requests[way], sampling, model.versions)[way]
        assert [r.tokens for r in found] == [r.tokens for r in expected]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        told = engine.metrics()
        assert told["engine/evictions"] > 0
        assert told["engine/recomputed_tokens"] >= 4 * told["engine/evictions"]  # a prompt of three and a token
        assert engine.metrics() == {}
    assert 0.8 < max(shares) <= 1


def test_a_response_that_does_not_fit_alone_is_refused(tmp_path: Path):
    model, requests = network(tmp_path, "llama"), ragged(3)
    enough = gib(model, requests, LONG.max_new_tokens, 1.0)
    publish(build(Options(memory_gib=1.001 * enough), model), model).sample(requests, LONG, model.versions)
    engine = publish(build(Options(memory_gib=0.999 * enough), model), model)
    message = (
        rf"one response of 40 tokens after a prompt of 5 takes {enough:.2g} GiB on cpu; engine.memory_gib = .* is less"
    )
    with pytest.raises(PastError, match=message):
        engine.sample(requests, LONG, model.versions)


def test_what_is_free_decides_where_the_recipe_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, requests = network(tmp_path, "llama"), ragged(9)
    engine = publish(build(Options(), model), model)
    engine.sample(requests, LONG, model.versions)
    assert engine.metrics() == {}
    monkeypatch.setattr(memory, "GROWTH", 3)
    monkeypatch.setattr(_rows, "DRAWING", 0)
    some = gib(model, requests, LONG.max_new_tokens, 3.0) * memory.GIB / memory.SHARE
    monkeypatch.setattr(memory, "free", lambda device: int(some))
    engine.sample(requests, LONG, model.versions)
    assert engine.metrics()["engine/evictions"] > 0
    monkeypatch.setattr(memory, "free", lambda device: 1000)
    with pytest.raises(PastError, match=r"90% of what is free, is less. Lower max_new_tokens"):
        engine.sample(requests, LONG, model.versions)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_lean_step_is_the_networks_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, requests = network(tmp_path, name), ragged(8)
    assert _lean.Lean.applies(model)
    engine = publish(build(Options(batch=4), model), model)
    lean = engine.sample(requests, HOT, model.versions)
    monkeypatch.setattr(_lean.Lean, "applies", lambda model: False)
    plain = engine.sample(requests, HOT, model.versions)
    assert [r.tokens for r in lean] == [r.tokens for r in plain]
    for a, b in zip(lean, plain, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


@pytest.mark.parametrize("name", ["windowed", "gemma", "gpt2"])
def test_other_networks_run_their_own_forward(name: str, tmp_path: Path):
    assert not _lean.Lean.applies(network(tmp_path, name))


def trained(model: Model, adapter: Adapter, tokens: Sequence[Tokens]) -> torch.Tensor:
    """The trainer's log-probabilities after the first four tokens and after each further one, [tokens, rows, V]."""
    with torch.no_grad():
        states = model.hidden([(View(adapter, row[:4]), (*row[4:], 0)) for row in tokens])
    return model.log_probs(states).view(len(tokens), -1, len(model.head)).transpose(0, 1)


def decoded(model: Model, tokens: Sequence[Tokens]) -> tuple[torch.Tensor, int]:
    """The engine's, and how many operations a step took."""
    prompts, steps = [row[:4] for row in tokens], len(tokens[0]) - 4
    with model.sampling("student"), torch.inference_mode():
        sizes = _rows.Sizes.of(model)
        rows = _rows.Rows(model, prompts, steps, sizes.room(memory.GIB, steps, len(prompts)), sizes)
        out = [rows.enter(prompts)]
        with Operations() as seen:
            out += [rows.step(torch.tensor([row[4 + i] for row in tokens])) for i in range(steps)]
    return torch.stack(out).log_softmax(-1), seen.count // steps


@pytest.mark.parametrize(
    ("name", "dtype", "compute"),
    [
        ("llama", "bfloat16", "auto"),
        ("qwen2", "bfloat16", "float32"),
        ("qwen3", "bfloat16", "auto"),
        ("qwen2", "float16", "base"),
    ],
)
def test_beside_half_precision_weights_the_lean_step_is_the_trainers(
    name: str, dtype: Any, compute: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both steps are off from float32 arithmetic on the same weights by roundings, the written-out one by fewer.

    Means over some 4,000 entries: half as much again leaves room for chance, and the adapter's effect is far larger.
    """
    config, shape, _ = ARCHITECTURES[name]
    folder = folder_of(tmp_path / name, config, shape)
    half, exact = (
        Model(ModelSection(path=str(folder), dtype=d, lora=LoraSection(rank=4, alpha=8, compute=compute)), seed=3)
        for d in (dtype, "float32")
    )
    for model in (half, exact):
        move(model, "student", 0.2)
    exact.network.load_state_dict({k: v.float() for k, v in half.network.state_dict().items()})
    tokens = [tuple(3 + (7 * row + 5 * i) % 30 for i in range(20)) for row in range(6)]
    true, learner = trained(exact, "student", tokens), trained(half, "student", tokens)
    assert _lean.Lean.applies(half)
    lean, few = decoded(half, tokens)
    monkeypatch.setattr(_lean.Lean, "applies", lambda model: False)
    plain, many = decoded(half, tokens)

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).abs().mean())

    noise = apart(plain, true)
    assert apart(lean, true) < 1.5 * noise
    assert apart(lean, learner) < 1.5 * (noise + apart(learner, true))
    assert apart(trained(half, "base", tokens), true) > 10 * noise
    assert few < many * (0.7 if compute == "float32" else 0.5)


def test_a_base_on_several_devices_runs_its_own_forward(tmp_path: Path):
    model = network(tmp_path, "llama")
    assert _lean.Lean.applies(model)
    model.network.lm_head.to("meta")
    assert not _lean.Lean.applies(model)


def test_a_recurrent_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = network(tmp_path, "llama")
    monkeypatch.setattr(model.network, "_is_stateful", True)
    with pytest.raises(PastError, match=r"a recurrent state\. Use engine.name = 'vllm'"):
        build(Options(), model)
