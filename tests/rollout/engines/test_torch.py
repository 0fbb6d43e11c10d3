from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from past_opsd.core.config import ModelSection, Sampling
from past_opsd.core.nouns import View, derive_seed
from past_opsd.policy import memory
from past_opsd.policy.model import Model
from past_opsd.rollout.engines import Request, StaleAdapterError
from past_opsd.rollout.engines._draw import choose, cut
from past_opsd.rollout.engines.torch import Options, TorchEngine, build
from past_opsd.tasks import embedded

SAMPLING = Sampling(max_new_tokens=34)


@pytest.fixture(scope="module")
def model() -> Model:
    made = Model(ModelSection(path="embedded"), seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in ("student", "teacher"):
            for parameter in made.parameters(adapter).values():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
            made.bump(adapter)
    return made


@pytest.fixture(scope="module")
def engine(model: Model) -> TorchEngine:
    made = build(Options(batch=32), model)
    for adapter in ("student", "teacher"):
        made.publish(adapter, model.versions[adapter])
    return made


@pytest.fixture(scope="module")
def requests(model: Model) -> list[Request]:
    problems = embedded.build(embedded.Options(train_problems=12)).train()
    prompts = []
    for problem in problems:
        message = [{"role": "user", "content": embedded.STUDENT.replace("{problem}", problem.text)}]
        text = model.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompts.append(tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"]))
    adapters = ("student", "teacher", "base")
    return [
        Request(View(adapters[i % 3], prompt), derive_seed(i, draw))
        for i, prompt in enumerate(prompts)
        for draw in (0, 1)
    ]


def test_the_batch_does_not_change_a_sample(engine: TorchEngine, model: Model, requests: list[Request]):
    hot = Sampling(max_new_tokens=34, temperature=2.0)  # so that every uniform matters
    together = engine.sample(requests, hot, model.versions)
    reversed_order = engine.sample(requests[::-1], hot, model.versions)[::-1]
    alone = [engine.sample([request], hot, model.versions)[0] for request in requests]
    assert len({len(r.tokens) for r in together}) > 3
    assert [r.tokens for r in together] == [r.tokens for r in alone] == [r.tokens for r in reversed_order]
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_little_memory_does_not_change_a_sample(
    engine: TorchEngine, model: Model, requests: list[Request], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "GROWTH", 4)
    hot = Sampling(max_new_tokens=34, temperature=2.0)
    tight = build(Options(memory_gib=0.0034), model)
    for adapter in ("student", "teacher"):
        tight.publish(adapter, model.versions[adapter])
    found = tight.sample(requests, hot, model.versions)
    assert [r.tokens for r in found] == [r.tokens for r in engine.sample(requests, hot, model.versions)]
    assert tight.metrics()["engine/evictions"] > 0


def test_samples_are_those_of_the_seed(engine: TorchEngine, model: Model, requests: list[Request]):
    again = [Request(r.view, r.seed + 1) for r in requests]
    first = engine.sample(requests, SAMPLING, model.versions)
    assert first == engine.sample(requests, SAMPLING, model.versions)
    assert [r.tokens for r in first] != [r.tokens for r in engine.sample(again, SAMPLING, model.versions)]


def test_logprobs_are_the_trainers(engine: TorchEngine, model: Model, requests: list[Request]):
    sampling = Sampling(max_new_tokens=34, temperature=1.3, top_p=0.9)
    for request, response in zip(requests, engine.sample(requests, sampling, model.versions), strict=True):
        states = model.hidden([(request.view, response.tokens)])
        logp = (states @ model.head.T / 1.3).log_softmax(-1)
        rows = torch.arange(len(response.tokens))
        expected = logp[rows, torch.tensor(response.tokens)].detach()
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_greedy_agrees_with_transformers(engine: TorchEngine, model: Model, requests: list[Request]):
    base = [r for r in requests if r.view.adapter == "base"]
    mine = engine.sample(base, Sampling(temperature=0, max_new_tokens=20), model.versions)
    model.activate("base")
    for request, response in zip(base, mine, strict=True):
        ids = torch.tensor([request.view.prompt])
        out = model.network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert tuple(out[0, ids.shape[1] :].tolist()) == response.tokens


def test_responses_end_at_eos_or_are_marked_cut(engine: TorchEngine, model: Model, requests: list[Request]):
    eos = model.tokenizer.eos_token_id
    for limit in (34, 5):
        for response in engine.sample(requests, Sampling(max_new_tokens=limit), model.versions):
            assert len(response.tokens) <= limit
            assert response.finished == (response.tokens[-1] == eos)
            assert eos not in response.tokens[:-1]
            assert model.tokenizer.eos_token not in response.text


@pytest.mark.parametrize("versions", [{"student": 0, "teacher": 0, "base": 0}, {}, {"student": 2}])
def test_a_stale_version_is_refused(engine: TorchEngine, requests: list[Request], versions: dict):
    with pytest.raises(StaleAdapterError, match="publish an adapter"):
        engine.sample(requests, SAMPLING, versions)


def test_unpublished_steps_are_refused(model: Model, requests: list[Request]):
    engine = build(Options(), model)
    with pytest.raises(StaleAdapterError):
        engine.sample(requests, SAMPLING, model.versions)
    with pytest.raises(StaleAdapterError):
        engine.publish("student", model.versions["student"] + 1)
    served = dict(model.versions)
    for adapter in ("student", "teacher"):
        engine.publish(adapter, served[adapter])
    engine.sample(requests, SAMPLING, served)
    model.bump("student")
    try:
        with pytest.raises(StaleAdapterError, match="the weights are at"):
            engine.sample(requests, SAMPLING, served)
    finally:
        model.set_versions(served)


LOGITS = torch.log(torch.tensor([[0.05, 0.4, 0.0, 0.3, 0.25]]))


def frequencies(sampling: Sampling) -> list[float]:
    """Exact: the share of the unit interval that picks each token, on a fine even grid."""
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    picks, _ = choose(LOGITS.expand(len(grid), -1), grid, sampling)
    return (torch.bincount(picks, minlength=5) / len(grid)).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.05, 0.4, 0.0, 0.3, 0.25]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampling(top_p=0.39), [0, 1, 0, 0, 0]),
        (Sampling(top_p=0.5), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampling(min_p=0.7), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampling(top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampling(temperature=0), [0, 1, 0, 0, 0]),
    ],
)
def test_the_distribution_is_the_stated_one(sampling: Sampling, expected: list[float]):
    assert frequencies(sampling) == pytest.approx(expected, abs=1e-4)


def test_temperature_sharpens():
    weights = [p ** (1 / 0.5) for p in (0.05, 0.4, 0.0, 0.3, 0.25)]
    assert frequencies(Sampling(temperature=0.5)) == pytest.approx([w / sum(weights) for w in weights], abs=1e-4)


@pytest.mark.parametrize("top_k", [1, 3, 7, 40])
def test_what_top_k_leaves_is_ranked_as_a_sort_of_all_would(top_k: int):
    """Equal probabilities too, at the edge of top-k and of top-p: the same entries stay, to the bit."""
    generator = torch.Generator().manual_seed(top_k)
    smooth = torch.randn(64, 40, generator=generator).double().softmax(-1)
    tied = torch.randint(1, 4, (64, 40), generator=generator).double().softmax(-1)
    for probs in (smooth, tied):
        for top_p in (0.05, 0.5, 0.95):
            floor = probs.topk(top_k, dim=-1).values[:, -1:]
            left = probs.where(probs >= floor, 0)
            left = left / left.sum(-1, keepdim=True)
            values, order = left.sort(dim=-1, descending=True, stable=True)
            outside = values.cumsum(-1) - values >= top_p
            expected = left.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), 0)
            assert torch.equal(cut(probs, Sampling(top_k=top_k, top_p=top_p)), expected)


def test_extreme_uniforms_pick_possible_tokens():
    picks, logp = choose(LOGITS.expand(2, -1), torch.tensor([0.0, math.nextafter(1.0, 0.0)]).double(), Sampling())
    assert picks.tolist() == [0, 4]
    assert torch.isfinite(logp).all()
