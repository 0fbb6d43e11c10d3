"""What every engine promises, checked on each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from rollout.engines.parts import ADAPTERS, move, publish

from past_opsd.core.config import Sampling
from past_opsd.core.nouns import View
from past_opsd.policy.model import Model
from past_opsd.rollout.engines import Engine, Request, StaleAdapterError, sent
from past_opsd.rollout.engines._draw import cut as cut_support

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn about themselves

SAMPLING = Sampling(max_new_tokens=34)
HOT = Sampling(max_new_tokens=34, temperature=2.0)


@pytest.fixture(scope="module", params=["torch", "vllm-local", "vllm-server"])
def engine(request: pytest.FixtureRequest, make: Callable[..., Engine], model: Model) -> Iterator[Engine]:
    made = publish(make(request.param, model), model)
    yield made
    made.close()


def expected(model: Model, view: View, tokens: tuple[int, ...], temperature: float) -> torch.Tensor:
    """The trainer's log-probabilities [T, V]."""
    with torch.no_grad():
        return (model.hidden([(view, tokens)]) @ model.head.T / temperature).log_softmax(-1)


def own(logp: torch.Tensor, tokens: tuple[int, ...]) -> np.ndarray:
    return logp.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).numpy()


def test_the_batch_does_not_change_a_sample(engine: Engine, model: Model, requests: list[Request]):
    together = engine.sample(requests, HOT, model.versions)
    backwards = engine.sample(requests[::-1], HOT, model.versions)[::-1]
    alone = [engine.sample([request], HOT, model.versions)[0] for request in requests[:8]]
    assert len({r.tokens for r in together}) > 12
    assert [r.tokens for r in together] == [r.tokens for r in backwards]
    assert [r.tokens for r in together[:8]] == [r.tokens for r in alone]
    for a, b in zip(together, backwards, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_the_seed_decides_the_sample(engine: Engine, model: Model, requests: list[Request]):
    first = [r.tokens for r in engine.sample(requests, HOT, model.versions)]
    assert first == [r.tokens for r in engine.sample(requests, HOT, model.versions)]
    other = [Request(r.view, r.seed + 1) for r in requests]
    moved = [r.tokens for r in engine.sample(other, HOT, model.versions)]
    assert sum(a != b for a, b in zip(first, moved, strict=True)) > len(requests) // 2


def test_what_joins_a_stream_draws_what_it_draws_in_a_batch(engine: Engine, model: Model, requests: list[Request]):
    """Requests of the three policies come one after the other, each when another has ended."""
    if not engine.streams:
        pytest.skip("it gives a batch at once")
    expected = engine.sample(requests, HOT, model.versions)
    waiting = [(i, sampling) for i in range(8, len(requests)) for sampling in (HOT, SAMPLING)]
    asked = [(i, HOT) for i in range(8)]
    cold = engine.sample(requests[8:], SAMPLING, model.versions)
    flow = engine.stream([(requests[i], sampling) for i, sampling in asked], model.versions)
    found, ended = {}, next(flow)
    while ended is not None:
        found |= dict(ended)
        new = [waiting.pop(0) for _ in ended if waiting] or waiting[: 0 if len(found) < len(asked) else 1]
        waiting = [one for one in waiting if one not in new]
        asked += new
        ended = sent(flow, [(requests[i], sampling) for i, sampling in new])
    assert len(found) == len(asked) == 8 + 2 * len(cold)
    for place, (i, sampling) in enumerate(asked):
        wanted = expected[i] if sampling is HOT else cold[i - 8]
        assert (found[place].tokens, found[place].text) == (wanted.tokens, wanted.text)
        np.testing.assert_allclose(found[place].logprobs, wanted.logprobs, atol=1e-4)
    engine.sample(requests[:2], HOT, model.versions)


def test_a_stream_can_be_broken_off(engine: Engine, model: Model, requests: list[Request]):
    if not engine.streams:
        pytest.skip("it gives a batch at once")
    flow = engine.stream([(request, HOT) for request in requests], model.versions)
    next(flow)
    flow.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("past-vllm")]
    assert not torch.is_inference_mode_enabled()
    engine.sample(requests[:2], HOT, model.versions)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(HOT, id="hot"),
        pytest.param(Sampling(max_new_tokens=20, temperature=1.3, top_p=0.9, top_k=5, min_p=0.02), id="hot-and-cut"),
    ],
)
def test_the_seed_decides_the_sample_in_every_engine_alike(
    engine: Engine, make: Callable[..., Engine], model: Model, requests: list[Request], sampling: Sampling
):
    embedded = publish(make("torch", model), model).sample(requests, sampling, model.versions)
    assert [r.tokens for r in engine.sample(requests, sampling, model.versions)] == [r.tokens for r in embedded]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(max_new_tokens=20), id="plain"),
        pytest.param(Sampling(max_new_tokens=20, temperature=0.7), id="cool"),
        pytest.param(Sampling(max_new_tokens=20, temperature=1.3, top_p=0.9, top_k=5, min_p=0.02), id="hot-and-cut"),
        pytest.param(Sampling(max_new_tokens=20, temperature=0), id="greedy"),
    ],
)
def test_logprobs_are_the_trainers(engine: Engine, model: Model, requests: list[Request], sampling: Sampling):
    """At the sampling temperature, before the support is cut, for every policy in one batch."""
    assert {r.view.adapter for r in requests} == set(ADAPTERS)
    for request, response in zip(requests, engine.sample(requests, sampling, model.versions), strict=True):
        logp = expected(model, request.view, response.tokens, sampling.temperature or 1.0)
        np.testing.assert_allclose(response.logprobs, own(logp, response.tokens), atol=1e-4)
        if sampling.temperature == 0:
            assert tuple(logp.argmax(-1).tolist()) == response.tokens


def test_each_policy_is_its_own(engine: Engine, model: Model, requests: list[Request]):
    """One prompt under the three policies in one batch: each agrees with itself and with neither of the others."""
    views = [View(adapter, requests[0].view.prompt) for adapter in ADAPTERS]
    responses = engine.sample([Request(view, 5) for view in views], SAMPLING, model.versions)
    for response, drawn_from in zip(responses, views, strict=True):
        for view in views:
            distance = np.abs(own(expected(model, view, response.tokens, 1.0), response.tokens) - response.logprobs)
            assert (distance.mean() < 1e-4) == (view == drawn_from)


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param({"top_k": 3}, id="top_k"),
        pytest.param({"top_p": 0.6}, id="top_p"),
        pytest.param({"min_p": 0.3}, id="min_p"),
    ],
)
def test_samples_stay_in_the_support(engine: Engine, model: Model, requests: list[Request], cut: dict):
    def outside(sampling: Sampling) -> int:
        count = 0
        for request, response in zip(requests, engine.sample(requests, sampling, model.versions), strict=True):
            probs = expected(model, request.view, response.tokens, sampling.temperature).double().exp()
            kept = cut_support(probs, Sampling(**cut)).gather(1, torch.tensor(response.tokens)[:, None])
            count += int((kept == 0).sum())
        return count

    hot = {"max_new_tokens": 16, "temperature": 2.0}
    assert outside(Sampling(**hot)) > 20
    assert outside(Sampling(**hot, **cut)) == 0


@pytest.mark.parametrize("limit", [34, 5, 1])
def test_responses_end_at_eos_or_are_marked_cut(engine: Engine, model: Model, requests: list[Request], limit: int):
    eos = model.tokenizer.eos_token_id
    responses = engine.sample(requests, Sampling(max_new_tokens=limit), model.versions)
    for response in responses:
        assert len(response.tokens) == len(response.logprobs) <= limit
        assert response.finished == (response.tokens[-1] == eos)
        assert response.finished or len(response.tokens) == limit
        assert eos not in response.tokens[:-1]
        assert response.text == model.tokenizer.decode(response.tokens, skip_special_tokens=True)
        assert model.tokenizer.eos_token not in response.text
    assert any(r.finished for r in responses) == (limit == 34)


def test_responses_come_in_the_order_of_the_requests(engine: Engine, model: Model, requests: list[Request]):
    greedy = Sampling(temperature=0, max_new_tokens=8)
    by_request = {r: engine.sample([r], greedy, model.versions)[0].tokens for r in requests[::4]}
    mixed = [*by_request, *reversed(by_request)]
    assert len(set(by_request.values())) > 3
    assert [r.tokens for r in engine.sample(mixed, greedy, model.versions)] == [by_request[r] for r in mixed]


def test_nothing_asked_nothing_answered(engine: Engine, model: Model):
    assert engine.sample([], SAMPLING, model.versions) == []


@pytest.mark.parametrize(
    "versions",
    [
        pytest.param({"student": 0, "teacher": 0, "base": 0}, id="old"),
        pytest.param({}, id="none"),
        pytest.param({"student": 99, "teacher": 99, "base": 0}, id="future"),
    ],
)
def test_a_stale_version_is_refused(engine: Engine, requests: list[Request], versions: dict):
    with pytest.raises(StaleAdapterError, match="publish an adapter"):
        engine.sample(requests, SAMPLING, versions)


def test_a_step_has_to_be_published_and_then_counts(engine: Engine, model: Model, requests: list[Request]):
    mine = [Request(View("student", r.view.prompt), r.seed) for r in requests[:6]]
    before = engine.sample(mine, SAMPLING, model.versions)
    move(model, "student")
    with pytest.raises(StaleAdapterError, match="the weights are at"):
        engine.sample(mine, SAMPLING, model.versions)
    with pytest.raises(StaleAdapterError):
        engine.publish("student", model.versions["student"] + 1)
    engine.publish("student", model.versions["student"])
    after = engine.sample(mine, SAMPLING, model.versions)
    assert [r.logprobs for r in before] != [r.logprobs for r in after]
    for request, response in zip(mine, after, strict=True):
        logp = expected(model, request.view, response.tokens, 1.0)
        np.testing.assert_allclose(response.logprobs, own(logp, response.tokens), atol=1e-4)


def test_metrics_are_numbers_since_the_last_call(engine: Engine, model: Model, requests: list[Request]):
    engine.metrics()
    engine.sample(requests, SAMPLING, model.versions)
    said = engine.metrics()
    assert all(key.startswith("engine/") and np.isfinite(value) for key, value in said.items())
    assert not any(engine.metrics().values())
