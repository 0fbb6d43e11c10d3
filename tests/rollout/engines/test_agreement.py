"""How far an engine may be from the trainer, with an engine that is a second trainer: other kernels, other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from rollout.engines.parts import move, publish

from past_opsd.core.config import LoraSection, ModelSection, Sampling
from past_opsd.core.nouns import PastError, View
from past_opsd.policy.model import Model
from past_opsd.rollout.engines import Request, vllm
from past_opsd.rollout.engines import torch as embedded
from past_opsd.rollout.engines.vllm_backend import Draw, Drawn, Options, Served
from past_opsd.run import checkpoint

SAMPLING = Sampling(max_new_tokens=12, temperature=1.2)


def trainer(dtype: str, attention: str = "sdpa") -> Model:
    made = Model(
        ModelSection(path="embedded", dtype=dtype, attention=attention, lora=LoraSection(rank=4, alpha=8)), seed=1
    )
    for adapter in ("student", "teacher"):
        move(made, adapter)
    return made


class Second:
    """Serves adapters by their files, from a model of its own."""

    note = ""

    def __init__(self, model: Model, bound: float):
        self._model, self._bound = model, bound
        self._engine = embedded.build(embedded.Options(), model)

    def load(self, served: Served) -> None:
        adapter = served.name.partition("-")[0]
        if adapter in ("student", "teacher"):
            checkpoint.load_adapter(self._model, adapter, served.folder or Path())
            self._engine.publish(adapter, self._model.versions[adapter])
        answers: list[Mapping[int, float]] = []
        for probe in served.probes:
            row = self._model.log_probs(self._model.hidden([(View(adapter, probe.prompt), (0,))]).detach())[0]
            answers.append({i: float(row[i]) for i in row.topk(5).indices.tolist()})
        served.check(answers, self._bound, "the second trainer")

    def unload(self, served: Served) -> None: ...

    def wake(self) -> None: ...

    def draw(self, draws: Sequence[Draw], sampling: Sampling) -> list[Drawn]:
        requests = [Request(View(d.served.name.partition("-")[0], d.prompt), d.seed) for d in draws]
        responses = self._engine.sample(requests, sampling, self._model.versions)
        return [Drawn(r.tokens, r.logprobs, {}) for r in responses]

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def engine(model: Model, other: Model, **options: object) -> vllm.VllmEngine:
    made = vllm.VllmEngine(Options.model_validate(options), model, lambda base, bound: Second(other, bound))
    publish(made, model)
    return made


REQUESTS = [Request(View("student", (1, 5, 7, 2 + i)), i) for i in range(6)]


def test_the_bound_follows_from_the_trainers_own_noise():
    model = trainer("bfloat16")
    own = vllm.noise(model)
    # A bfloat16 has 8 bits: two ways to a log-probability of size 1 to 10 differ by some 2^-9 to 2^-6 of it.
    assert 2**-9 < own < 0.1
    assert vllm.noise(model) == own
    made = engine(model, trainer("bfloat16", "eager"))
    assert made._bound == max(vllm.EXACT, vllm.NOISE * own)
    made.sample(REQUESTS, SAMPLING, model.versions)
    said = made.metrics()
    assert said["engine/logprob_noise"] == own
    assert 0 < said["engine/logprob_mean_abs"] < made._bound
    assert 0 < abs(said["engine/logprob_drift"]) <= said["engine/logprob_mean_abs"]
    made.close()


def test_in_float32_the_bound_is_tight():
    model = trainer("float32")
    assert vllm.noise(model) < 1e-5
    made = engine(model, trainer("float32", "eager"))
    assert made._bound == vllm.EXACT
    made.sample(REQUESTS, SAMPLING, model.versions)
    assert made.metrics()["engine/logprob_mean_abs"] < 1e-4
    made.close()


def test_the_noise_is_measured_on_the_other_kernel_and_leaves_the_first_in_place():
    model = trainer("float32")
    read = [(View("student", (1, 5, 7)), (2, 9))]
    before = model.hidden(read).detach().clone()
    with model.otherwise():
        other = model.hidden(read).detach()
        assert model.network.config._attn_implementation == "eager"
    np.testing.assert_allclose(other.numpy(), before.numpy(), atol=1e-4)
    np.testing.assert_array_equal(model.hidden(read).detach().numpy(), before.numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_weights_are_beyond_the_bound(dtype: str):
    """The responses of a student that went on without the trainer's knowledge."""
    model, other = trainer(dtype), trainer(dtype, "eager")
    made = engine(model, other)
    move(other, "student", 0.3)
    made._backend._engine.publish("student", other.versions["student"])
    with pytest.raises(PastError, match=r"responses of student-c.* differ from the trainer's by"):
        made.sample(REQUESTS, SAMPLING, model.versions)
    made.close()
