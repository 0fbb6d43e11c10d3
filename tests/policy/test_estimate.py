from __future__ import annotations

import pytest
import torch

from past_opsd.core import config
from past_opsd.core.nouns import PastError
from past_opsd.policy import estimate
from past_opsd.policy.model import Model


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen3-0.6B", 0.6), ("Qwen/Qwen3-1.7B", 1.7), ("Qwen/Qwen3-4B", 4.0), ("Qwen/Qwen3-8B", 8.2)],
)
def test_known_shapes_have_their_names_size(name: str, billions: float):
    assert estimate.KNOWN[name].parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_shape_counts_the_weights_of_the_real_model():
    recipe = config.load("embedded/past")
    model = Model(recipe.model)
    shape = estimate.shape_of(model.config, "embedded")
    real = sum(p.numel() for n, p in model.peft.named_parameters() if "lora_" not in n)
    assert shape.parameters == pytest.approx(real, rel=0.01)
    assert shape.lora(recipe.model.lora.rank) == sum(p.numel() for p in model.parameters("student").values())


def test_a_configuration_without_dimensions_is_told():
    class Odd:
        def get_text_config(self):
            return self

        def to_dict(self):
            return {"num_attention_heads": 2}

    with pytest.raises(PastError, match="'odd': its configuration has no 'num_hidden_layers'"):
        estimate.shape_of(Odd(), "odd")


def test_the_load_follows_the_method():
    past, opsd = (estimate.expected_load(config.load(f"paper/{name}")) for name in ("past", "opsd"))
    assert (past.student_samples, past.teacher_samples) == (4, 32)
    assert opsd.teacher_samples == 0
    assert past.teacher_prompt - opsd.teacher_prompt == 1024, "only PAST's teacher reads the response"


SPEED = estimate.Speed(1e12, 1e11, 1e12)


def cycle(*overrides: str, speed: estimate.Speed = SPEED, launches: int = 0) -> dict[str, float]:
    recipe = config.load("paper/past", overrides)
    shape, load = estimate.KNOWN[recipe.model.path], estimate.expected_load(recipe)
    return estimate.seconds(shape, load, speed, True, launches=launches)


def test_time_is_linear_in_the_samples():
    once, twice = cycle(), cycle("rollout.problems_per_cycle=8")
    assert twice == pytest.approx({name: 2 * value for name, value in once.items()})


def test_attention_is_quadratic_in_the_length():
    """Products alone would be linear: what is beyond is attention, forward, recomputed and two and a half backward."""
    shape = estimate.KNOWN["Qwen/Qwen3-1.7B"]
    load = estimate.Load(1, 0, 1000, 0, 0, 0)
    longer = estimate.Load(1, 0, 2000, 0, 0, 0)
    speed = estimate.Speed(1.0, 1.0, 1.0)
    a, b = (estimate.seconds(shape, it, speed, True) for it in (load, longer))
    pairs = shape.layers * shape.heads * shape.head_dim * (2000**2 - 2 * 1000**2)
    assert b["distill"] - 2 * a["distill"] == pytest.approx((2 + 2.5 + 1) * pairs)
    read = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2 * (2000**2 - 2 * 1000**2) / 2
    assert b["rollout"] - 2 * a["rollout"] == pytest.approx(read)


def test_a_token_takes_at_least_its_launches():
    free = cycle()
    bound = cycle(speed=estimate.Speed(1e12, 1e11, 1e12, launch=1.0), launches=3)
    assert bound["draw"] == pytest.approx(1024 * 3, rel=0.5)
    assert bound["draw"] > free["draw"]
    assert bound["adapt"] == free["adapt"]


def test_this_machine_is_measured():
    speed = estimate.measure(torch.float32, torch.device("cpu"), 4, seconds=0.05)
    assert speed.wide > 1e8
    assert speed.narrow > 1e7
    assert speed.reading > 1e7
    assert estimate.available(torch.device("cpu")) > 2**28
