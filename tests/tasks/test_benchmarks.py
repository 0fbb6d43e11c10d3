from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from past_opsd.core import config
from past_opsd.core.nouns import PastError, Response
from past_opsd.rollout.verifiers.boxed_math import BoxedMath
from past_opsd.rollout.verifiers.boxed_math import Options as Boxed
from past_opsd.run.train import session
from past_opsd.tasks import benchmarks
from past_opsd.tasks.benchmarks import BENCHMARKS, PRESETS, Options, build, evaluation_recipe, lora_overrides

FILES = {
    "aime24": "eval/aime24.jsonl",
    "aime25": "eval/aime25.jsonl",
    "hmmt25": "eval/hmmt25.jsonl",
    "gsm8k": "train/gsm8k_test.jsonl",
}


@pytest.fixture
def files(shared: Path) -> dict[str, str]:
    return {name: str(shared / "data" / path) for name, path in FILES.items()}


@pytest.fixture(scope="module")
def verifier() -> Iterator[BoxedMath]:
    with BoxedMath(Boxed(workers=1)) as built:
        yield built


def write(path: Path, *rows: dict[str, str]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_local_files_take_the_hubs_place(files: dict[str, str]):
    task = build(Options(sets=list(FILES), files=files))
    assert {name: len(part) for name, part in task.evaluation().items()} == {
        name: BENCHMARKS[name].problems for name in FILES
    }
    assert task.notes == ()
    assert task.train() == ()
    few = build(Options(sets=["aime24"], files={"aime24": files["aime24"]}, limit=3))
    assert len(few.evaluation()["aime24"]) == 3
    assert few.notes == ()
    assert few.identity != task.identity


@pytest.mark.parametrize("name", [*FILES, "solutions"])
def test_every_gold_verifies_against_itself_and_can_be_read(shared: Path, verifier: BoxedMath, name: str):
    paths = FILES | {"solutions": "eval/aime_with_solutions.jsonl"}
    task = build(Options(sets=["s"], files={"s": str(shared / "data" / paths[name])}))
    problems = task.evaluation()["s"]
    assert len(problems) >= 30
    same = verifier.verify([(p, Response((), rf"so \boxed{{{p.answer}}}.", (), True)) for p in problems])
    other = verifier.verify([(p, Response((), r"\boxed{\sqrt{7}+8.123}", (), True)) for p in problems[:60]])
    assert {v.reason for v in same} == {"correct"}
    assert {v.reason for v in other} == {"wrong"}


def test_a_set_of_another_size_is_noted_and_a_bad_row_refused(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", {"problem": "1+1", "answer": "2"})
    assert build(Options(sets=["aime24"], files={"aime24": source})).notes == (
        f"{source}: 1 problems where AIME 2024 has 30",
    )
    assert build(Options(sets=["mine"], files={"mine": source})).notes == ()
    with pytest.raises(PastError, match="1 of 1 rows cannot be used"):
        build(Options(sets=["mine"], files={"mine": write(tmp_path / "b.jsonl", {"problem": "1+1"})}))


@pytest.mark.parametrize(
    ("sets", "files", "message"),
    [
        (["aime26"], {}, "no benchmark 'aime26'; known are aime24, aime25, hmmt25, math500, gsm8k"),
        ([], {}, "no benchmark named"),
        (["aime24"], {"aime25": "x"}, "files names 'aime25'"),
    ],
    ids=["unknown", "none", "unused"],
)
def test_wrong_names_are_told(sets: list[str], files: dict[str, str], message: str):
    with pytest.raises(PastError, match=message):
        build(Options(sets=sets, files=files))


def test_the_papers_protocol():
    recipe = evaluation_recipe("Qwen/Qwen3-1.7B", ["aime24", "aime25", "hmmt25"], "paper")
    paper = config.load("paper/past")
    assert recipe.task.sets == ["aime24", "aime25", "hmmt25"]
    assert {name: BENCHMARKS[name].source for name in recipe.task.sets} == paper.task.evaluation
    assert recipe.evaluation == paper.evaluation
    sampling = recipe.evaluation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (recipe.evaluation.samples, sampling.max_new_tokens, recipe.model.max_context) == (12, 38912, 40960)
    assert recipe.prompts.evaluation == (
        "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert recipe.prompts.evaluation_kwargs == {"enable_thinking": True}
    assert recipe.verifier.name == "boxed_math"


def test_the_model_cards_sampling_and_overrides():
    recipe = evaluation_recipe("some/model", ["math500", "my.set=data/my set.jsonl"], "card", ["evaluation.samples=64"])
    sampling = recipe.evaluation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    assert (recipe.evaluation.samples, recipe.model.path) == (64, "some/model")
    assert (recipe.task.sets, recipe.task.files) == (
        ["math500", "my.set"],
        {"my.set": str(Path("data/my set.jsonl").resolve())},
    )
    assert recipe.name == "eval/card"
    again = config.validate(tomllib.loads(config.to_toml(recipe)), {}, "what was written")
    assert config.dump(again) == config.dump(recipe)


def test_unknown_presets_and_benchmarks_are_told_before_anything_is_loaded():
    with pytest.raises(PastError, match=f"no preset 'x'; known are {', '.join(PRESETS)}"):
        evaluation_recipe("m", ["aime24"], "x")
    with pytest.raises(PastError, match="no benchmark 'aime'"):
        evaluation_recipe("m", ["aime"], "paper")


def test_an_adapter_brings_its_lora_shape(tmp_path: Path):
    shape = {"r": 8, "lora_alpha": 32, "target_modules": ["v_proj", "q_proj"], "use_rslora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(shape))
    lora = evaluation_recipe("m", ["aime24"], "paper", adapter=tmp_path).model.lora
    assert (lora.rank, lora.alpha, lora.targets) == (8, 32, ["q_proj", "v_proj"])
    (tmp_path / "adapter_config.json").write_text(json.dumps(shape | {"use_rslora": True}))
    with pytest.raises(PastError, match="uses use_rslora"):
        lora_overrides(tmp_path)
    with pytest.raises(PastError, match="give a PEFT folder"):
        lora_overrides(tmp_path / "none")


def test_options_are_explained():
    assert all(info.description for info in benchmarks.Options.model_fields.values())


def test_a_recipe_made_here_evaluates_a_model(tmp_path: Path):
    made = config.plugin("task", "embedded").build(config.load("embedded/past").task).evaluation()["chain3"][:6]
    source = write(tmp_path / "c.jsonl", *({"id": p.id, "problem": p.text, "answer": p.answer} for p in made))
    small = ["model.dtype=float32", "model.lora.rank=4", "run.threads=1", "prompts.evaluation=Problem: {problem}"]
    small += ["evaluation.samples=4", "evaluation.pass_k=[1]", "evaluation.sampling.max_new_tokens=34"]
    recipe = evaluation_recipe("embedded", [f"chains={source}"], "paper", small)
    with session(recipe) as parts:
        result = parts.evaluate(0).tasks["chains"]
    assert result.problems == [p.id for p in made]
    assert 0 < sum(map(sum, result.outcomes)) < 24
