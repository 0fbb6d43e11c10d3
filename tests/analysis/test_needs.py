from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from ranks import Launcher

from past_opsd.analysis import needs, needs_tables
from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.interface.cli import main

# Layers, width, heads, heads of keys, vocabulary.
SIZES = {"wide": (4, 256, 8, 2, 2048), "deep": (6, 128, 4, 4, 1024), "wordy": (4, 128, 4, 2, 16384)}


def recipe_of(folder: Path, size: str, *overrides: str) -> Recipe:
    layers, width, heads, kv_heads, vocabulary = SIZES[size]
    transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return config.load("embedded/past", [*settings_of(folder), *overrides])


def settings_of(folder: Path) -> list[str]:
    return [
        f"model.path={folder}",
        "rollout.problems_per_cycle=2",
        "rollout.samples_per_problem=1",
        "rollout.student.max_new_tokens=64",
        "rollout.teacher.max_new_tokens=64",
        "evaluation.sampling.max_new_tokens=256",
        "engine.batch=4",
        "method.group_max=3",
        "learner.token_budget=2048",
        "learner.loss_memory_mib=4",
    ]


def check_against_the_allocator(recipe: Recipe) -> None:
    torch.set_num_threads(1)
    traced, measured = needs.trace(recipe, "cpu"), needs.measure(recipe, torch.device("cpu"))
    assert list(measured) == ["sampling", "teacher step", "student step"]
    for phase, real in measured.items():
        assert real > 2**20, "large enough to measure"
        assert traced.beyond(phase) == pytest.approx(real, rel=0.1), phase


@pytest.mark.slow
def test_the_traced_peak_is_the_allocators(tmp_path: Path):
    check_against_the_allocator(recipe_of(tmp_path, "wide", "model.gradient_checkpointing=true"))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["true", "false"])
@pytest.mark.parametrize("shared", ["true", "false"])
@pytest.mark.parametrize("size", SIZES)
def test_the_traced_peak_is_the_allocators_whatever_the_shape(
    tmp_path: Path, size: str, shared: str, checkpointing: str
):
    settings = [f"learner.shared_prompts={shared}", f"model.gradient_checkpointing={checkpointing}"]
    check_against_the_allocator(recipe_of(tmp_path, size, *settings))


MEASURED = """
import json, sys, torch
from past_opsd.analysis import needs
from past_opsd.core import config
from past_opsd.policy.distributed import joined
torch.set_num_threads(1)
torch.manual_seed(0)  # every process draws the same weights
with joined() as world:
    world.connect(60)
    recipe = config.load("embedded/past", sys.argv[1:])
    print(json.dumps(needs.measure(recipe, torch.device("cpu"), world=world)))
"""


# Long rows beside small adapters, so that activations decide.
LONG = ["model.lora.rank=2", "model.max_context=1536", "model.gradient_checkpointing=true"]
LONG += [f"rollout.{role}.max_new_tokens=200" for role in ("student", "teacher")]


@pytest.mark.slow
def test_the_traced_peak_is_the_allocators_where_processes_share_rows(tmp_path: Path, launch: Launcher):
    whole = needs.trace(recipe_of(tmp_path, "wide", *LONG), "cpu", processes=2)
    traced = needs.trace(recipe_of(tmp_path, "wide", *LONG, "distributed.split=2"), "cpu", processes=2)
    assert traced.beyond("teacher step") < 0.6 * whole.beyond("teacher step")
    script = tmp_path / "measured.py"
    script.write_text(MEASURED)
    ended = launch(2, str(script), *settings_of(tmp_path), *LONG, "distributed.split=2")
    assert ended.codes == [0, 0], ended.err
    for measured in map(json.loads, ended.out):
        for phase in ("teacher step", "student step"):
            assert traced.beyond(phase) == pytest.approx(measured[phase], rel=0.1), phase


@pytest.mark.slow
def test_blocks_that_are_counted_are_as_blocks_that_are_run(tmp_path: Path):
    recipe = recipe_of(tmp_path, "deep", "model.gradient_checkpointing=true")
    counted = needs.trace(recipe)
    section = needs._settled(recipe.model, counted.choice)
    whole = needs._trace(recipe, section, "gpu", 1, 80e9, SIZES["deep"][0])
    for name, phase in whole.phases.items():
        assert counted.phases[name].kinds == phase.kinds, name
        assert counted.phases[name].launches == phase.launches
        assert counted.phases[name].flops == phase.flops
        assert counted.phases[name].attention == phase.attention


@pytest.mark.slow
def test_memory_follows_the_settings(tmp_path: Path):
    def peaks(*settings: str, processes: int = 1) -> dict[str, int]:
        found = needs.trace(recipe_of(tmp_path, "deep", *settings), processes=processes)
        return {name: phase.peak for name, phase in found.phases.items()}

    one = peaks()
    kept = peaks("model.gradient_checkpointing=false")
    assert kept["teacher step"] > one["teacher step"]
    assert kept["evaluation"] == one["evaluation"]
    seated = peaks("engine.batch=8")
    assert seated["evaluation"] > one["evaluation"]
    assert seated["teacher step"] == one["teacher step"]
    shared, sharded = (peaks(f"distributed.shard={kind}", processes=2) for kind in ("none", "full"))
    assert sharded["student step"] != shared["student step"], "half of the blocks, and two of them put together"


@pytest.mark.slow
def test_the_evaluation_takes_what_is_free_or_does_not_fit(tmp_path: Path):
    recipe = recipe_of(tmp_path, "deep", "engine.batch=64")
    large, small, none = (needs.trace(recipe, size=size) for size in (80e9, 100e6, 8e6))
    assert large.rows == 64
    assert 0 < small.rows < 64
    assert small.phases["evaluation"].peak <= 100e6
    assert none.rows == 0
    assert [found.fits("evaluation", 0) for found in (large, small, none)] == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opsd", "grpo", "sft", "sd_zero", "h2sd", "opd"])
def test_every_method_can_be_traced(name: str):
    found = needs.trace(config.load(f"embedded/{name}", ["rollout.problems_per_cycle=2"]), "cpu")
    assert found.phases["student step"].launches > 100
    assert found.longest > 0


@pytest.mark.slow
def test_the_command_tells_one_recipe_in_detail_and_a_sweep_as_a_table(tmp_path: Path, capsys):
    recipe_of(tmp_path, "deep")
    words = ["--set", f"model.path={tmp_path}", "--set", "rollout.problems_per_cycle=2", "--set", "engine.batch=2"]
    assert main(["trace", "embedded/past", *words, "--lengths", "32"]) == 0
    out = capsys.readouterr().out
    for expected in ("sampling, a token", "teacher step", "KV cache", "TFLOP", "memory-efficient (not flash: a mask)"):
        assert expected in out, out
    rows = [line for line in out.splitlines() if line.startswith("| embedded/past")]
    assert len(rows) == 2
    assert "| 32 |" in rows[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "Z9"], "--gpu Z9: no data sheet of it here; known are A100-80GB"),
        (["--lengths", "4k"], "--lengths 4k: give whole numbers"),
        (["--processes", "0"], "--processes 0: give whole numbers"),
        (["--set", "model.path=/no/such/model"], "no configuration can be loaded from '/no/such/model'"),
    ],
)
def test_what_cannot_be_traced_is_told(words: list[str], message: str, capsys):
    assert main(["trace", "embedded/past", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_papers_evaluation_seats_what_fits(capsys):
    assert main(["trace", "paper/past"]) == 0
    out = capsys.readouterr().out
    assert "rows 14 can be decoded to 38,912 tokens" in out, out


@pytest.mark.slow
def test_the_tables_of_the_docs_are_what_the_command_prints(capsys):
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    commands = [line.split() for line in text.splitlines() if line.startswith("    past trace ")]
    assert commands
    for words in commands:
        assert main(words[1:]) == 0
        table = capsys.readouterr().out.partition("| recipe")
        assert table[1] + table[2] in text, table[2]


def test_servers_draw_elsewhere():
    found = needs.trace(config.load("scale/qwen3-32b-nodes", ["rollout.problems_per_cycle=2"]), layers=2, processes=2)
    assert list(found.phases) == ["teacher step", "student step"]
    assert set(found.seconds(needs_tables.assumed("H100-80GB", 1))) == {"adapt", "distill"}
    assert "servers'" in needs_tables.table([found], "H100-80GB")
    assert "whose memory is not traced" in needs_tables.detail(found, "H100-80GB")
