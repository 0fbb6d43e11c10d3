from __future__ import annotations

import re
from pathlib import Path

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


def total(*overrides: str, checkpointing: bool = True) -> int:
    recipe = config.load("paper/past", overrides)
    shape = estimate.KNOWN["Qwen/Qwen3-1.7B"]
    load = estimate.expected_load(recipe)
    return sum(estimate.memory(recipe, shape, load, "bfloat16", checkpointing).values())


def test_memory_grows_with_what_needs_it():
    assert total(checkpointing=False) > total()
    assert total("model.lora.rank=128") > total()
    assert total("rollout.student.max_new_tokens=8192", "rollout.teacher.max_new_tokens=8192") > total()


def test_the_load_follows_the_method():
    past, opsd = (estimate.expected_load(config.load(f"paper/{name}")) for name in ("past", "opsd"))
    assert (past.student_samples, past.teacher_samples) == (4, 32)
    assert opsd.teacher_samples == 0
    assert past.teacher_prompt - opsd.teacher_prompt == 1024, "only PAST's teacher reads the response"


def in_process(processes: int, *overrides: str) -> dict[str, int]:
    recipe = config.load("scale/qwen3-32b-nodes", overrides)
    shape, load = estimate.KNOWN[recipe.model.path], estimate.expected_load(recipe)
    return estimate.memory(recipe, shape, load, "bfloat16", True, processes)


def test_sharding_divides_the_blocks_and_nothing_else():
    shape = estimate.KNOWN["Qwen/Qwen3-32B"]
    one, eight = (in_process(n)["base weights"] for n in (1, 8))
    assert one - eight == pytest.approx(2 * shape.body * 7 / 8, rel=1e-6)
    assert in_process(8, "distributed.shard=none")["base weights"] == one
    assert in_process(8)["two adapters, two AdamW states"] == in_process(1)["two adapters, two AdamW states"]


def test_the_torch_engine_puts_a_sharded_base_together_and_servers_do_not():
    shape = estimate.KNOWN["Qwen/Qwen3-32B"]
    assert in_process(8, "engine.name=torch")["rollouts"] > 2 * shape.body
    assert "rollouts" not in in_process(8)


def test_the_table_of_the_docs_is_what_the_command_prints(capsys: pytest.CaptureFixture[str], monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    python -m past_opsd\.policy\.estimate (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        monkeypatch.setattr("sys.argv", ["estimate", *command.split()])
        assert estimate.main() == 0
        printed = capsys.readouterr().out
        assert printed in text, printed


def test_time_is_linear_in_the_samples():
    shape, speed = estimate.KNOWN["Qwen/Qwen3-1.7B"], estimate.Speed(1e12, 1e11)
    once = estimate.expected_load(config.load("paper/past"))
    twice = estimate.expected_load(config.load("paper/past", ["rollout.problems_per_cycle=8"]))
    a, b = (estimate.seconds(shape, load, speed, True) for load in (once, twice))
    assert b == pytest.approx({name: 2 * value for name, value in a.items()})


def test_this_machine_is_measured():
    speed = estimate.measure(torch.float32, torch.device("cpu"), 4, seconds=0.05)
    assert speed.wide > 1e8
    assert speed.narrow > 1e7
    assert estimate.available(torch.device("cpu")) > 2**28
