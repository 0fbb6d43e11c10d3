from __future__ import annotations

import pytest
import torch
from naive import logp

from past_opsd.config import LoraSection, ModelSection
from past_opsd.model import Model
from past_opsd.types import PastError, View

PROMPT = (1, 5, 7, 2)
TOKENS = (6, 7, 8)


@pytest.fixture
def model() -> Model:
    return Model(ModelSection(path="embedded", lora=LoraSection(rank=4, alpha=8)), seed=3)


def stir(model: Model, adapter: str, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters(adapter).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.bump(adapter)


def test_both_adapters_start_as_the_identity(model: Model):
    states = [model.hidden([(View(a, PROMPT), TOKENS)]) for a in ("base", "student", "teacher")]
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_adapters_start_from_the_seed_alone():
    made = [Model(ModelSection(path="embedded"), seed=s) for s in (1, 1, 2)]
    assert made[0].digest("teacher") == made[1].digest("teacher") != made[2].digest("teacher")


def test_hidden_states_predict_exactly_the_tokens(model: Model):
    stir(model, "teacher")
    pairs = [(PROMPT, TOKENS), (PROMPT[:2], (4,)), ((1,), TOKENS * 2)]
    paths = [(View("teacher", prompt), tokens) for prompt, tokens in pairs]
    got = (model.hidden(paths) @ model.head.T).log_softmax(-1).split([3, 1, 6])
    for (view, tokens), rows in zip(paths, got, strict=True):
        expected = logp(model, "teacher", view.prompt, tokens, grad=False)
        torch.testing.assert_close(rows.detach(), expected, atol=2e-5, rtol=1e-4)


def test_views_of_two_adapters_do_not_share_a_forward(model: Model):
    with pytest.raises(ValueError, match="one adapter per forward"):
        model.hidden([(View("teacher", PROMPT), TOKENS), (View("student", PROMPT), TOKENS)])


def test_a_phase_makes_exactly_its_adapter_trainable(model: Model):
    assert model.trainable() == set()
    with model.training("teacher"):
        model.hidden([(View("student", PROMPT), TOKENS)])
        assert model.trainable() == set(model.parameters("teacher"))
    with model.training("student"):
        assert model.trainable() == set(model.parameters("student"))
    assert model.trainable() == set()


def test_adapters_share_no_parameter_and_cover_all_targets(model: Model):
    student, teacher = model.parameters("student"), model.parameters("teacher")
    assert not set(student) & set(teacher)
    assert len(student) == len(teacher) == 3 * 7 * 2


def test_sampling_folds_the_adapter_and_puts_the_weights_back(model: Model):
    stir(model, "student")
    before = model.identity()["base"]
    with model.sampling("student") as network, torch.inference_mode():
        logits = network(input_ids=torch.tensor([PROMPT + TOKENS])).logits[0, 3:6]
    expected = logp(model, "student", PROMPT, TOKENS, grad=False)
    torch.testing.assert_close(logits.log_softmax(-1).clone(), expected, atol=2e-5, rtol=1e-4)
    model._active = None
    assert model.identity()["base"] == before


def test_the_weights_are_put_back_after_an_error(model: Model):
    stir(model, "student")
    before = model.identity()["base"]
    with pytest.raises(ZeroDivisionError), model.sampling("student"):
        raise ZeroDivisionError
    assert model.identity()["base"] == before


def test_a_new_version_is_folded_anew(model: Model):
    def logits() -> torch.Tensor:
        with model.sampling("student") as network, torch.inference_mode():
            return network(input_ids=torch.tensor([PROMPT])).logits

    first = logits()
    stir(model, "student")
    assert not torch.equal(first, logits())


def test_digest_changes_with_one_bit(model: Model):
    before = model.digest("teacher")
    with torch.no_grad():
        next(iter(model.parameters("teacher").values()))[0, 0] += 1e-7
    assert model.digest("teacher") != before


def test_identity_tells_another_chat_template(model: Model):
    before = model.identity()
    model.tokenizer.chat_template += " "
    after = model.identity()
    assert before.pop("chat_template") != after.pop("chat_template")
    assert before == after


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelSection(path="/no/such/folder"), "model.path: no tokenizer can be loaded from '/no/such/folder'"),
        (ModelSection(path="embedded", lora=LoraSection(targets=["nope"])), "model.lora.targets"),
    ],
)
def test_what_cannot_be_loaded_is_told(section: ModelSection, message: str):
    with pytest.raises(PastError, match=message):
        Model(section)
