from __future__ import annotations

import importlib.util
import shlex

import pytest

from past_opsd.interface import cli
from past_opsd.policy.model import resolve


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["serve", *words, "--dry"]) == 0
    return shlex.split(capsys.readouterr().out)


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_command_fits_the_recipe(capsys: pytest.CaptureFixture[str]):
    words = dry(
        capsys, "embedded/past", "--port", "8123", "--set", "model.lora.rank=20", "--set", "model.max_context=128"
    )
    assert after(words, "--model") == resolve("embedded")
    assert after(words, "--dtype") == "float32"
    assert after(words, "--max-lora-rank") == "32"
    assert after(words, "--max-model-len") == "128"
    assert after(words, "--logprobs-mode") == "processed_logits"
    assert after(words, "--logits-processors") == "past_opsd.rollout.engines.vllm_logits:Draws"
    assert after(words, "--generation-config") == "vllm"
    assert after(words, "--port") == "8123"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in words


def test_it_listens_to_this_machine_alone_unless_told_otherwise(capsys: pytest.CaptureFixture[str]):
    assert after(dry(capsys, "embedded/past"), "--host") == "127.0.0.1"
    assert after(dry(capsys, "embedded/past", "--host", "0.0.0.0"), "--host") == "0.0.0.0"


def test_the_engines_arguments_become_flags(capsys: pytest.CaptureFixture[str]):
    words = dry(
        capsys,
        "embedded/past",
        *("--set", "engine.name=vllm", "--set", "engine.gpu_memory_utilization=0.5"),
        *(
            "--set",
            "engine.arguments={ enforce_eager = true, enable_prefix_caching = false, tensor_parallel_size = 2 }",
        ),
    )
    assert after(words, "--gpu-memory-utilization") == "0.5"
    assert after(words, "--tensor-parallel-size") == "2"
    assert {"--enforce-eager", "--no-enable-prefix-caching"} <= set(words)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "embedded/past"]) == 2
    assert "needs vLLM here" in capsys.readouterr().err
