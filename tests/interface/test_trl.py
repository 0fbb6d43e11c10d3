"""A script written for TRL's GRPOTrainer becomes a PAST run by its two class names."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict
from hub import Hub
from peft import LoraConfig, PeftModel
from ranks import Launcher
from safetensors.torch import load_file
from transformers import AutoTokenizer, EarlyStoppingCallback, HfArgumentParser, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SchedulerType

import past_opsd
from past_opsd.core import config
from past_opsd.core.nouns import PastError, Problem, Response
from past_opsd.interface.cli import main
from past_opsd.interface.trl import PASTConfig, PASTTrainer, recipe, trainer
from past_opsd.interface.trl import fields as listed
from past_opsd.interface.trl.config import defaults
from past_opsd.interface.trl.messages import ARGUMENTS, translate
from past_opsd.interface.trl.rewards import RewardVerifier
from past_opsd.policy.model import load_tokenizer, resolve
from past_opsd.run import checkpoint
from past_opsd.run.evaluate import Evaluation
from past_opsd.run.folder import RunFolder
from past_opsd.tasks import embedded

PROBLEMS = embedded.build(embedded.Options(train_problems=24)).train()
PROMPT = "Problem: {}"
TEACHER = "{prompt}\nAttempt: {student_output}\nReference: {privileged_context}"


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    trainer._TOLD.clear()


def rows(conversational: bool = False) -> Dataset:
    """TRL's columns: a prompt as text or messages, the privileged context, and what the reward reads."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": PROMPT.format(p.text)}]
                if conversational
                else PROMPT.format(p.text),
                "privileged_context": p.solution,
                "answer": p.answer,
                "hardness": len(p.text),
            }
            for p in PROBLEMS
        ]
    )


def settings(folder: Path, **more) -> PASTConfig:
    return PASTConfig(
        **{
            "output_dir": str(folder),
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "num_generations": 3,
            "max_completion_length": 34,
            "learning_rate": 5e-4,
            "max_grad_norm": 1.0,
            "distillation_kl_clip": 1.0,
            "save_steps": 1,
            "num_eval_samples": 2,
            "teacher_prompt_template": TEACHER,
        }
        | more
    )


def make(folder: Path, callbacks=(), **more) -> PASTTrainer:
    reward, held_out = more.pop("reward", local(boxed_reward)), more.pop("eval_dataset", None)
    return PASTTrainer("embedded", reward, settings(folder, **more), rows(), held_out, callbacks=callbacks)


class Seen(TrainerCallback):
    def __init__(self, stop_at: int = 0):
        self.events: list[str] = []
        self.logs: list[dict[str, float]] = []
        self.saved: list[bool] = []
        self.stop_at = stop_at

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.events.append("epoch")

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == self.stop_at
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append("evaluate")

    def on_save(self, args, state, control, **kwargs):
        self.events.append("save")
        self.saved.append(RunFolder(Path(args.output_dir)).checkpoint(state.global_step).is_dir())

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


CALLS: list[dict] = []


def boxed_reward(prompts, completions, answer, **kwargs):
    """As TRL's users write them: lists in, a list of floats out."""
    CALLS.append({"prompts": prompts, "completions": completions, "answer": answer, **kwargs})
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(f"\\boxed{{{a}}}" in t) for t, a in zip(texts, answer, strict=True)]


def local(function):
    """The function as a script would define it: not importable from elsewhere."""
    function.__module__ = "__main__"
    return function


@pytest.mark.parametrize("conversational", [False, True])
def test_a_trl_script_runs_with_two_names_changed(tmp_path: Path, conversational: bool):
    CALLS.clear()
    seen = Seen()
    trainer = PASTTrainer(
        model="embedded",
        reward_funcs=[local(boxed_reward)],
        args=settings(tmp_path / "run"),
        train_dataset=rows(conversational),
        eval_dataset=rows(conversational).select(range(3)),
        peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]),
        callbacks=[seen],
    )
    outcome = trainer.train()
    assert outcome.finished
    assert seen.events == ["begin", "evaluate", "epoch", "step 1", "save", "step 2", "evaluate", "save", "end"]
    assert seen.saved == [True, True], "a checkpoint was told of before it was there"
    assert {"reward", "completions/mean_length", "self_distillation/distillation_loss"} <= set(seen.logs[1])
    call = CALLS[0]
    assert isinstance(call["completions"][0], list if conversational else str)
    assert isinstance(call["prompts"][0], list if conversational else str)
    assert len(call["hardness"]) == len(call["prompts"]) == len(call["completion_ids"])
    assert CALLS[-1]["trainer_state"].global_step == 2
    assert [entry["step"] for entry in trainer.state.log_history] == [0, 1, 2, 2]
    trainer.save_model(str(tmp_path / "adapter"))
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (saved["r"], sorted(saved["target_modules"])) == (4, ["q_proj", "v_proj"])


# One run with two evaluation sets, for the tests that only look at it.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PASTTrainer:
    sets = {"easy": rows().select(range(3)), "hard": rows().select(range(3, 6))}
    made = make(tmp_path_factory.mktemp("trl") / "run", max_steps=3, eval_dataset=sets, disable_tqdm=True)
    made.train()
    return made


def again(trained: PASTTrainer, folder: Path, **more) -> PASTTrainer:
    """A new trainer on a copy of the run."""
    shutil.copytree(trained.folder, folder)
    for file in (folder / "data").iterdir():
        file.unlink()  # its place is part of the recipe
    return make(folder, max_steps=3, **more)


def test_evaluate_evaluates_the_student_as_it_is(trained: PASTTrainer):
    found = trained.evaluate()
    recorded = Evaluation.load(trained.folder / "evaluations" / "step-00003.json").summary([1, 2])
    assert {name: value for name, value in found.items() if "/avg@2" in name} == {
        f"eval_{name}": value for name, value in recorded.items() if "/avg@2" in name
    }
    assert found["eval_reward"] == pytest.approx((found["eval_easy_reward"] + found["eval_hard_reward"]) / 2)
    assert {"eval_hard_completions/mean_length", "eval_runtime", "eval_samples_per_second"} <= set(found)
    assert trained.state.log_history[-1]["eval_reward"] == found["eval_reward"]
    other = trained.evaluate(rows().select([7]), metric_key_prefix="test")
    assert {"test_reward", "test_eval/pass@2"} <= set(other)
    assert not any(name.startswith("test_easy") for name in other)


def test_evaluate_before_training_is_the_base_and_without_data_a_message(tmp_path: Path):
    held_out = DatasetDict({"few": rows().select(range(2))})
    fresh = make(tmp_path / "run", eval_dataset=held_out)
    assert fresh.evaluate()["eval_few_reward"] in {n / 4 for n in range(5)}
    assert not (tmp_path / "run" / "evaluations").exists()
    with pytest.raises(PastError, match=r"evaluate\(\) needs an eval_dataset"):
        make(tmp_path / "other").evaluate()
    with pytest.raises(PastError, match="'a/b' cannot be a dataset's name"):
        make(tmp_path / "other", eval_dataset={"a/b": rows()})


def test_the_model_is_the_peft_model_with_the_student_active(trained: PASTTrainer, tmp_path: Path):
    assert isinstance(trained.model, PeftModel)
    assert trained.model.active_adapter == "student"
    ids = torch.tensor([[3, 5, 7, 9, 4, 6]])
    reopened = again(trained, tmp_path / "run")
    trained.save_model(tmp_path / "adapter")
    base = PeftModel.from_pretrained(_base(), tmp_path / "adapter")
    with torch.no_grad():
        mine, theirs, plain = (m(input_ids=ids).logits for m in (trained.model, base, _base()))
        assert torch.equal(mine, reopened.model(input_ids=ids).logits)
    torch.testing.assert_close(mine, theirs)
    assert float((mine - plain).abs().max()) > 1e-3


def _base():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve("embedded"), dtype=torch.float32).eval()


def test_save_model_into_the_runs_own_folder_harms_nothing(trained: PASTTrainer, tmp_path: Path):
    made = again(trained, tmp_path / "run")
    before = {p: p.read_bytes() for p in made.folder.rglob("*") if p.is_file()}
    made.save_model(made.args.output_dir)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert PeftModel.from_pretrained(_base(), made.folder).peft_config["default"].r == 64
    with pytest.raises(PastError, match=r"holds no checkpoint yet; call train\(\) first"):
        make(tmp_path / "other").save_model()


def test_a_callback_can_stop_the_run_and_a_resume_ends_as_if_unbroken(tmp_path: Path):
    whole, broken = make(tmp_path / "whole"), make(tmp_path / "broken", [Seen(stop_at=1)])
    whole.train()
    assert not broken.train().finished
    resumed = make(tmp_path / "broken")
    assert resumed.train(resume_from_checkpoint=True).finished
    a, b = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "broken"))
    assert a == b
    assert resumed.state.log_history == whole.state.log_history
    assert resumed.state.global_step == 2


@pytest.mark.slow
def test_a_resume_goes_on_from_the_checkpoint_it_names(tmp_path: Path):
    made = make(tmp_path / "run", max_steps=3, save_total_limit=None, disable_tqdm=True)
    made.train()
    kept = {p: p.read_bytes() for kind in ("cycle-*", "*.safetensors") for p in made.folder.rglob(kind)}
    lines = (made.folder / "metrics.jsonl").read_bytes()
    seen = Seen(stop_at=2)
    made.add_callback(seen)
    assert made.train(resume_from_checkpoint=made.folder / "checkpoint-1").completed == 2
    assert [event for event in seen.events if event.startswith("step")] == ["step 2"]
    assert RunFolder(made.folder).steps() == [0, 1, 2]
    assert checkpoint.damage(made.folder / "checkpoints" / "later-checkpoint-00003") is None
    left = (made.folder / "metrics.jsonl").read_bytes()
    assert lines.startswith(left)
    assert left.count(b"\n") == 2
    made.remove_callback(seen)
    assert made.train(resume_from_checkpoint=str(RunFolder(made.folder).checkpoint(1))).finished
    assert (made.folder / "metrics.jsonl").read_bytes() == lines
    assert all(path.read_bytes() == content for path, content in kept.items())


def test_a_checkpoint_that_is_not_there_is_a_message(trained: PASTTrainer, tmp_path: Path):
    for wrong in (trained.folder / "checkpoint-9", tmp_path / "checkpoint-00001", trained.folder):
        with pytest.raises(PastError, match=r"is no checkpoint of output_dir.*checkpoint-00003"):
            trained.train(resume_from_checkpoint=str(wrong))


def test_a_callback_may_save_and_look_at_the_model(tmp_path: Path):
    class Saver(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            made.save_model(tmp_path / f"step-{state.global_step}")
            assert made.model.active_adapter == "student"

    made = make(tmp_path / "run", [Saver()], disable_tqdm=True)
    made.train()
    plain = make(tmp_path / "plain", disable_tqdm=True)
    plain.train()
    for step in (1, 2):
        saved = load_file(tmp_path / f"step-{step}" / "adapter_model.safetensors")
        kept = load_file(RunFolder(plain.folder).checkpoint(step) / "adapter_model.safetensors")
        assert all(torch.equal(value, kept[name]) for name, value in saved.items())


def test_an_existing_run_is_neither_continued_nor_changed_by_mistake(trained: PASTTrainer):
    with pytest.raises(PastError) as error:
        trained.train()
    again = "choose another folder (output_dir), or continue it with: train(resume_from_checkpoint=True)"
    assert again in str(error.value)
    data = (trained.folder / "data" / "train.jsonl").read_bytes()
    with pytest.raises(PastError, match="holds a run with other data"):
        PASTTrainer("embedded", None, settings(trained.folder), rows().select(range(9)))
    assert (trained.folder / "data" / "train.jsonl").read_bytes() == data


# Fields.


def test_every_field_has_one_verdict_and_no_name_is_a_type_error():
    names = [*listed.HONOURED, *listed.REFUSED, *listed.IGNORED]
    assert len(names) == len(set(names)) == 189
    own = defaults()
    assert set(names) <= set(own)
    assert {name: own[name] for name in listed.others()} == listed.others()
    for name in names:
        assert getattr(PASTConfig(**{name: own[name]}), name) == own[name]
    listed.check(PASTConfig())


def test_the_list_is_that_of_the_installed_trl():
    trl = pytest.importorskip("trl", reason="trl is not installed; the committed list is tested without it")
    theirs = {
        f.name: listed.plain(f.default_factory() if callable(f.default_factory) else f.default)
        for f in fields(trl.GRPOConfig)
    }
    ours = {name: row[0] for part in (listed.HONOURED, listed.REFUSED, listed.IGNORED) for name, row in part.items()}
    assert ours == theirs
    given = list(inspect.signature(trl.GRPOTrainer.__init__).parameters)
    assert list(inspect.signature(PASTTrainer.__init__).parameters) == given


def _another(default: object) -> object:
    if isinstance(default, bool):
        return not default
    return {int: 7, float: 0.7, str: "other", list: ["x"], type(None): "other"}[type(default)]


@pytest.mark.parametrize("name", listed.REFUSED)
def test_a_refused_field_says_why_and_what_comes_nearest(tmp_path: Path, name: str):
    default, reason, nearest = listed.REFUSED[name]
    with pytest.raises(PastError) as error:
        make(tmp_path, **{name: _another(default)})
    assert str(error.value).startswith(f"PASTConfig({name}=")
    assert reason in str(error.value)
    assert f"nearest: {nearest}" in str(error.value)
    assert not list(tmp_path.iterdir()), "something was written"
    words = re.findall(r"[a-z]+_[a-z_0-9]+", nearest)
    known = {
        *defaults(),
        "peft_config",
        "target_modules",
        "reward_funcs",
        "adamw_torch",
        "output_dir",
        "best_global_step",
    }
    assert set(words) <= known
    assert not set(words) & ({*listed.REFUSED, *listed.IGNORED} - {"adamw_torch"}), "sent to a field that does nothing"


def test_a_refused_field_is_seen_when_it_is_set_later(tmp_path: Path):
    args = settings(tmp_path)
    args.num_iterations = 4
    with pytest.raises(PastError, match="num_iterations=4"):
        PASTTrainer("embedded", None, args, rows())
    args.num_iterations, args.scale_rewards, args.optim = 1, True, "adamw_torch"
    args.deepspeed, args.lr_scheduler_kwargs = "", {}
    PASTTrainer("embedded", None, args, rows())


def test_fields_without_effect_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    changed = {name: _another(row[0]) for name, row in listed.IGNORED.items()}
    make(tmp_path, **changed)
    make(tmp_path, **changed)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert all(f"{name} (" in line for name in listed.IGNORED)
    assert not any(f" {name} (" in line for name in listed.HONOURED)


def test_defaults_that_are_not_trls_are_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    PASTTrainer("embedded", None, PASTConfig(output_dir=str(tmp_path)), rows())
    PASTTrainer("embedded", None, PASTConfig(output_dir=str(tmp_path), learning_rate=1e-6), rows())
    first, second = capsys.readouterr().err.splitlines()
    assert "learning_rate 5e-06 (TRL: 1e-06)" in first
    assert "learning_rate" not in second
    assert first.count("(TRL:") == sum(defaults()[name] != row[0] for name, row in listed.HONOURED.items()) - 1


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("learning_rat", "learning_rate"),
        ("num_generation", "num_generations"),
        ("warmup_ratio", "warmup_steps"),
        ("evaluation_strategy", "eval_strategy"),
        ("max_prompt_length", "max_length"),
    ],
)
def test_an_unknown_name_gets_the_nearest_known(name: str, near: str):
    with pytest.raises(PastError, match=f"no argument {name}; did you mean {near}\\?"):
        PASTConfig(**{name: 1})
    with pytest.raises(PastError, match=r"docs/trl\.md lists all"):
        PASTConfig(xyzzy=1)


HERE = {  # what an honoured field changes in the recipe
    "per_device_train_batch_size": (3, "rollout.problems_per_cycle", 3),
    "num_train_epochs": (0.5, "run.cycles", 3),
    "max_steps": (7, "run.cycles", 7),
    "learning_rate": (0.25, "learner.teacher.lr", 0.25),
    "lr_scheduler_type": (SchedulerType.COSINE, "learner.student.schedule", "cosine"),
    "warmup_steps": (0.5, "learner.student.warmup_steps", 2),
    "weight_decay": (0.5, "learner.student.weight_decay", 0.5),
    "adam_beta1": (0.5, "learner.student.beta1", 0.5),
    "adam_beta2": (0.5, "learner.student.beta2", 0.5),
    "adam_epsilon": (0.5, "learner.student.eps", 0.5),
    "gradient_accumulation_steps": (3, "rollout.problems_per_cycle", 12),
    "max_grad_norm": (0.5, "learner.student.max_grad_norm", 0.5),
    "bf16": (True, "model.dtype", "bfloat16"),
    "fp16": (True, "model.dtype", "float16"),
    "gradient_checkpointing": (True, "model.gradient_checkpointing", True),
    "run_name": ("mine", "name", "mine"),
    "eval_strategy": (IntervalStrategy.EPOCH, "evaluation.at", [1.0]),
    "eval_steps": (2, "evaluation.at", [0.0, 0.5, 1.0]),
    "save_strategy": ("epoch", "run.checkpoint_every", 6),
    "save_steps": (0.25, "run.checkpoint_every", 1),
    "save_total_limit": (None, "run.keep_checkpoints", 5),
    "seed": (5, "run.seed", 5),
    "use_cpu": (True, "model.device", "cpu"),
    "ddp_timeout": (5, "distributed.timeout_seconds", 5.0),
    "fsdp": ("full_shard auto_wrap", "distributed.shard", "full"),
    "model_init_kwargs": ({"dtype": torch.float16}, "model.dtype", "float16"),
    "trust_remote_code": (True, "model.trust_remote_code", True),
    "num_generations": (5, "method.group_max", 5),
    "num_generations_eval": (5, "evaluation.samples", 5),
    "max_completion_length": (5, "rollout.student.max_new_tokens", 5),
    "temperature": (0.5, "rollout.teacher.temperature", 0.5),
    "top_p": (0.5, "evaluation.sampling.top_p", 0.5),
    "top_k": (5, "rollout.student.top_k", 5),
    "min_p": (0.5, "rollout.student.min_p", 0.5),
    "chat_template_kwargs": ('{"enable_thinking": true}', "prompts.teacher_kwargs", {"enable_thinking": True}),
    "use_vllm": (True, "engine.name", "vllm"),
    "vllm_mode": ("server", "engine.mode", "server"),
    "vllm_server_base_url": ("http://there:1", "engine.urls", ["http://there:1"]),
    "vllm_server_host": ("there", "engine.urls", ["http://there:8000"]),
    "vllm_server_port": (5, "engine.urls", ["http://127.0.0.1:5"]),
    "vllm_server_timeout": (5, "engine.patience_seconds", 5.0),
    "vllm_gpu_memory_utilization": (0.5, "engine.gpu_memory_utilization", 0.5),
    "vllm_enable_sleep_mode": (True, "engine.sleep", "keep"),
    "vllm_max_model_length": (50, "engine.max_model_len", 50),
    "vllm_tensor_parallel_size": (2, "engine.arguments", {"tensor_parallel_size": 2}),
    "loss_type": ("dapo", "learner.reduction", "token"),
}
TOGETHER = {  # what must be set too for a field to mean something
    "eval_strategy": {"max_steps": 6},
    "num_train_epochs": {"max_steps": -1},
    "vllm_gpu_memory_utilization": {"use_vllm": True},
    "vllm_enable_sleep_mode": {"use_vllm": True},
    "vllm_max_model_length": {"use_vllm": True},
    "vllm_tensor_parallel_size": {"use_vllm": True},
} | {
    name: {"use_vllm": True, "vllm_mode": "server"}
    for name in ("vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")
}
ELSEWHERE = {  # honoured by the trainer itself, and tested beside what they do
    *("output_dir", "logging_strategy", "logging_steps", "logging_first_step", "disable_tqdm", "report_to"),
    *("eval_on_start", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_revision"),
    *("metric_for_best_model", "greater_is_better", "do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
    *("beta", "reward_weights", "log_completions", "num_completions_to_print", "log_unique_prompts"),
}


def made_recipe(**more) -> config.Recipe:
    args = PASTConfig(**({"max_steps": 4} | more))
    return recipe("some/model", args, {"train": "t", "eval": "e"}, None, {"name": "boxed_math"}, 24)


@pytest.mark.parametrize("name", HERE)
def test_an_honoured_field_changes_the_recipe(name: str):
    value, key, expected = HERE[name]
    found = config.dump(made_recipe(**TOGETHER.get(name, {}) | {name: value}))
    for part in key.split("."):
        found = found[part]
    assert found == expected


def test_no_honoured_field_goes_untested():
    assert {*HERE, *ELSEWHERE} == set(listed.HONOURED)
    assert not HERE.keys() & ELSEWHERE


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ({}, [0.0, 1.0]),
        ({"eval_strategy": "no"}, []),
        ({"eval_strategy": "steps", "eval_steps": 3}, [0.75]),
        ({"eval_strategy": "steps", "eval_steps": 0.5, "eval_on_start": True}, [0.0, 0.5, 1.0]),
        ({"eval_strategy": "steps", "logging_steps": 2}, [0.5, 1.0]),
    ],
)
def test_when_is_evaluated(change, at: list[float]):
    assert made_recipe(**change).evaluation.at == at


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.04}, "nearest: kl_coef"),
        ({"loss_type": "dr_grpo"}, "loss_type='dr_grpo'.*: known are grpo, dapo, bnpo"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial'.*: known are constant"),
        ({"eval_strategy": "sometimes"}, "steps, epoch or no, not 'sometimes'"),
        ({"method": "ppo"}, "method='ppo'.*: known are past, opsd, grpo"),
        ({"fsdp": "offload"}, "nearest: 'full_shard'"),
        ({"model_init_kwargs": {"num_labels": 2}}, "model_init_kwargs={'num_labels'"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs='{'.* is not JSON"),
        ({"top_p": 1.5}, "PASTConfig: top_p: "),
        ({"max_completion_length": None}, "PASTConfig: max_completion_length: "),
        ({"kl_coef": -1.0}, "PASTConfig: kl_coef: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_value_that_cannot_be_names_the_argument(tmp_path: Path, change, message: str):
    with pytest.raises(PastError, match=message):
        make(tmp_path, **change)


def test_betas_meaning_in_grpo():
    assert made_recipe(method="grpo", beta=0.04).method.beta == 0.04


def test_the_documentation_has_the_whole_table():
    page = Path(past_opsd.__file__).parents[1] / "docs" / "trl.md"
    assert listed.table(defaults()) in page.read_text(encoding="utf-8")


def test_a_command_line_gives_the_configuration():
    parser = HfArgumentParser(PASTConfig)  # pyright: ignore[reportArgumentType]
    words = "--output_dir out --learning_rate 1e-5 --use_vllm --report_to wandb --save_total_limit 3 --num_iterations 1"
    more = ["--chat_template_kwargs", '{"enable_thinking": false}', "--dataloader_num_workers", "4", "--beta", "0"]
    (args,) = parser.parse_args_into_dataclasses([*words.split(), *more])
    assert isinstance(args, PASTConfig)
    assert (args.learning_rate, args.use_vllm, args.report_to, args.save_total_limit) == (1e-5, True, "wandb", 3)
    assert args.chat_template_kwargs == {"enable_thinking": False}
    assert args.dataloader_num_workers == 4
    assert "--per_device_train_batch_size" in parser.format_help()


def test_a_token_is_not_shown_to_callbacks():
    assert "hf_secret" not in PASTConfig(hub_token="hf_secret").to_json_string()


# What is seen of a run.


@pytest.mark.slow
def test_a_progress_bar_unless_it_is_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make(tmp_path / "shown").train()
    assert "cycle 2/2" in capsys.readouterr().err
    make(tmp_path / "hidden", disable_tqdm=True).train()
    assert "cycle" not in capsys.readouterr().err


@pytest.mark.slow
def test_logging_follows_its_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def noted(completions, answer, log_metric):
        log_metric("length", len(completions[0]))
        return [1.0] * len(completions)

    more = {"log_completions": True, "num_completions_to_print": 1, "log_unique_prompts": True, "num_rollouts": 2}
    made = make(
        tmp_path / "run", max_steps=3, logging_steps=2, logging_first_step=True, reward=noted, disable_tqdm=True, **more
    )
    made.train()
    assert [entry["step"] for entry in made.state.log_history] == [1, 2]
    assert made.state.log_history[0]["length"] > 0
    files = sorted((tmp_path / "run" / "completions").iterdir())
    assert [file.name for file in files] == ["completions_00001.parquet", "completions_00002.parquet"]
    table = pq.read_table(files[0]).to_pydict()
    assert list(table) == ["step", "prompt", "completion", "reward"]
    assert len(table["prompt"]) == len(set(table["prompt"])) == 4
    assert all("Problem: " in prompt for prompt in table["prompt"])
    out = capsys.readouterr().out
    assert "Step 1" in out
    assert out.count("Problem:") == 2, "one response a logged step"
    silent = make(tmp_path / "silent", logging_strategy="no", disable_tqdm=True)
    silent.train()
    assert silent.state.log_history == []


def test_report_to_names_trackers(tmp_path: Path):
    with pytest.raises(PastError, match="no tracker 'mlflow'"):
        make(tmp_path, report_to=["mlflow"]).train()
    pytest.importorskip("tensorboard")
    make(tmp_path / "run", report_to="tensorboard", disable_tqdm=True).train()
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_early_stopping_and_callbacks_that_cannot_be_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    class Deaf(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs): ...

    more = {"max_steps": 5, "eval_steps": 1, "metric_for_best_model": "reward", "num_eval_samples": 1}
    held_out = rows().select(range(2))
    patient = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=2.0)
    made = make(tmp_path / "run", [patient, Deaf], eval_dataset=held_out, disable_tqdm=True, **more)
    assert "warning: Deaf: on_optimizer_step never happens here" in capsys.readouterr().err
    outcome = made.train()
    assert outcome.completed == 2, "no reward improves by 2, so the second evaluation after the first one ends it"
    assert made.state.best_metric is not None
    assert isinstance(made.pop_callback(Deaf), Deaf)
    wrong = make(tmp_path / "wrong", eval_dataset=held_out, **more | {"metric_for_best_model": "accuracy"})
    with pytest.raises(PastError, match=r"metric_for_best_model = 'accuracy' is no number of an evaluation: .*reward"):
        wrong.train()


# The hub, played by a server of this machine.


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as made:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield made


def test_push_to_hub_uploads_the_student(trained: PASTTrainer, tmp_path: Path, hub: Hub):
    made = again(trained, tmp_path / "run", hub_model_id="me/mine", hub_token="hf_x", hub_private_repo=True)
    url = made.push_to_hub("All done")
    assert "me/mine" in url
    assert hub.created == [{"name": "mine", "organization": "me", "private": True}]
    assert hub.tokens == {"Bearer hf_x"}
    assert (
        hub.files["main"]["adapter_model.safetensors"]
        == (RunFolder(made.folder).checkpoint(3) / "adapter_model.safetensors").read_bytes()
    )
    assert {"README.md", "adapter_config.json", "tokenizer.json"} <= set(hub.files["main"])
    assert hub.messages == ["All done"]
    made.args.hub_revision = "try"
    made.push_to_hub()
    assert set(hub.files) == {"main", "try"}


@pytest.mark.slow
def test_a_run_is_pushed_when_it_ends_and_on_the_way(tmp_path: Path, hub: Hub):
    more = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_token": "hf_x", "disable_tqdm": True}
    make(tmp_path / "often", hub_strategy="every_save", **more).train()
    assert hub.messages == ["Step 1", "End of training"]
    hub.refuse = True
    with pytest.raises(PastError, match=r"push_to_hub, hub_model_id = 'me/mine': the hub refused .* is written"):
        make(tmp_path / "end", **more).train()
    assert RunFolder(tmp_path / "end").steps()[-1] == 2


# Rewards.


def answers(items: list[str], functions, weights=None, threshold=1.0, extra=None) -> list[str]:
    verifier = RewardVerifier(functions, weights, threshold)
    problem = Problem("p", "x", "z", "7", extra or {})
    return [v.reason for v in verifier.verify([(problem, Response((1,), text, (0.0,), True)) for text in items])]


def test_reward_functions_are_called_as_trl_calls_them():
    async def slow(completions, **kwargs):
        await asyncio.sleep(0)
        return [0.5] * len(completions)

    def picky(completions, answer):  # no **kwargs
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    class Scorer:
        def __call__(self, prompts, completions, level, **kwargs):
            assert level == ["hard"] * len(completions)
            return [None if c == "?" else 1.0 for c in completions]

    def named(completions, problem, id, completion_ids):
        assert (problem, id, completion_ids) == (["x"] * 2, ["p"] * 2, [[1]] * 2)
        return [1.0, 0.0]

    assert answers(["7", "8"], [named]) == ["correct", "wrong"]
    assert answers(["7", "8"], [picky]) == ["correct", "wrong"]
    assert answers(["7", "8"], [picky, slow], [1.0, 2.0]) == ["correct", "correct"]
    assert answers(["7", "8"], [picky, slow], [0.5, 0.8], 0.9) == ["correct", "wrong"]
    assert answers(["?", "8"], [Scorer()], extra={"level": "hard"}) == ["not_applicable", "correct"]
    assert answers(["?", "8"], [Scorer(), slow], threshold=0.5, extra={"level": "hard"}) == ["correct", "correct"]

    def short(completions):
        return [1.0]

    with pytest.raises(PastError, match="short must give 2 rewards in a list"):
        answers(["7", "8"], [short])


def test_an_importable_reward_runs_in_killable_processes(tmp_path: Path):
    made = make(tmp_path, reward="trl.rewards:accuracy_reward", reward_weights=[0.5])
    assert made.verifier is None
    section = made.recipe.verifier
    assert (section.path, section.style, section.strip_thinking) == ("trl.rewards:accuracy_reward", "trl", False)
    assert section.success_reward_threshold == 2.0
    assert make(tmp_path, reward=json.dumps).recipe.verifier.path == "json:dumps"


def test_a_reward_beside_the_script_alone_stays_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "beside_the_script.py").write_text(
        "def check(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside_the_script  # pyright: ignore[reportMissingImports]

    assert isinstance(make(tmp_path / "run", reward=beside_the_script.check).verifier, RewardVerifier)
    monkeypatch.chdir(tmp_path)
    assert make(tmp_path / "run", reward=beside_the_script.check).recipe.verifier.path == "beside_the_script:check"


# The recipe.


def test_names_of_trl_become_the_recipes(tmp_path: Path):
    args = settings(
        tmp_path, kl_coef=0.2, distillation_mode="topk_logits", distillation_topk=7, temperature=0.9, bf16=True
    )
    made = recipe("some/model", args, {"train": "t.jsonl", "eval": "e.jsonl"}, None, {"name": "boxed_math"})
    assert (made.method.beta_kl, made.method.objective, made.method.top_k, made.method.group_max) == (
        0.2,
        "top_k",
        7,
        3,
    )
    assert made.model.path == "some/model"
    assert made.model.dtype == "bfloat16"
    assert made.rollout.student.temperature == made.rollout.teacher.temperature == 0.9
    assert made.prompts.student == "{problem}"
    assert "{student_output}" in made.prompts.hindsight
    assert made.evaluation.at == [0.0, 1.0]
    again = config.validate(tomllib.loads(config.to_toml(made)), {}, "what was written")
    assert config.dump(again) == config.dump(made)


def test_the_papers_teacher_prompt_is_the_default(tmp_path: Path):
    args = settings(tmp_path, teacher_prompt_template=None)
    made = recipe("some/model", args, {"train": "t.jsonl"}, None, {"name": "boxed_math"})
    paper = config.load("paper/past").prompts.hindsight
    assert made.prompts.hindsight.startswith("{problem}\n\n=== Student Attempt Begin ===")
    assert paper.endswith(made.prompts.hindsight.partition("=== Student Attempt Begin ===")[2])
    assert made.evaluation.at == []


@pytest.mark.parametrize("method", ["opsd", "grpo"])
def test_the_baselines_run_through_the_same_shell(tmp_path: Path, method: str):
    more = {"teacher_prompt_template": "{prompt}\nReference: {privileged_context}"} if method == "opsd" else {}
    args = settings(tmp_path, method=method, **more)
    assert PASTTrainer("embedded", None, args, rows()).train().finished


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": object()}, "takes a folder or a hub id"),
        ({"args": object()}, "args must be a PASTConfig, not object"),
        ({"train_dataset": None}, "needs a train_dataset"),
        ({"train_dataset": []}, "train_dataset holds no row"),
        ({"eval_dataset": {}}, "eval_dataset holds no dataset"),
        ({"processing_class": object()}, "must be a tokenizer"),
        ({"optimizers": (object(), None)}, "optimizers=.* nearest: learning_rate"),
        ({"quantization_config": object()}, "quantization_config=.* nearest: model_init_kwargs"),
        ({"tools": [print]}, "tools=.* nearest: reward_funcs"),
        ({"rollout_func": print}, "rollout_func=.* nearest: use_vllm"),
        ({"peft_config": LoraConfig(lora_dropout=0.1)}, "lora_dropout must be 0"),
        ({"peft_config": LoraConfig(use_dora=True)}, "peft_config.use_dora = True is not possible"),
        ({"peft_config": LoraConfig(use_rslora=True)}, "peft_config.use_rslora"),
        ({"peft_config": LoraConfig(modules_to_save=["lm_head"])}, "peft_config.modules_to_save"),
        ({"peft_config": object()}, "must be a LoraConfig"),
        ({"reward_funcs": [boxed_reward, "a:b"]}, "names one importable function"),
        ({"reward_funcs": "org/reward-model"}, "reward models are not run"),
        ({"reward_funcs": torch.nn.Linear(1, 1)}, "reward models are not run"),
        ({"reward_funcs": []}, "reward_funcs is empty"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_one_message(tmp_path: Path, change, message: str):
    arguments = {"model": "embedded", "args": settings(tmp_path), "train_dataset": rows()} | change
    with pytest.raises(PastError, match=message):
        PASTTrainer(**arguments)


def test_the_lora_that_is_asked_for():
    files, section = {"train": "t"}, {"name": "boxed_math"}
    lora = LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", task_type="CAUSAL_LM")
    made = recipe("some/model", PASTConfig(), files, lora, section).model.lora
    assert (made.rank, made.alpha, made.targets) == (3, 5.0, "auto")


def test_the_models_own_tokenizer_may_be_handed_over(tmp_path: Path):
    own = AutoTokenizer.from_pretrained(resolve("embedded"))
    own.padding_side = "left"
    PASTTrainer("embedded", None, settings(tmp_path), rows(), processing_class=own)
    own.chat_template = "{{ messages }}"
    with pytest.raises(PastError, match="another chat template than the tokenizer of 'embedded'"):
        PASTTrainer("embedded", None, settings(tmp_path), rows(), processing_class=own)
    assert (
        make(tmp_path).processing_class.get_vocab()
        == load_tokenizer(made_recipe().model.model_copy(update={"path": "embedded"})).get_vocab()
    )


# Messages.


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "x already holds a run; continue it with --resume, or choose another --out",
            "x already holds a run; continue it with train(resume_from_checkpoint=True), or choose another output_dir",
        ),
        ("go on with --resume --out runs/x", "go on with train(resume_from_checkpoint=True)"),
        (
            "continue with: past train mine.toml --set run.cycles=3 --resume --out x",
            "continue with: train(resume_from_checkpoint=True)",
        ),
        (
            "rollout.problems_per_cycle = 9 is more",
            "per_device_train_batch_size * gradient_accumulation_steps = 9 is more",
        ),
        ("model.path: 'x' is not there", "model: 'x' is not there"),
        ("learner.student.lr: too small", "learning_rate: too small"),
        ("model.safetensors and /a/model.path/b stay", "model.safetensors and /a/model.path/b stay"),
        ("--track wandb needs a package", "report_to='wandb' needs a package"),
    ],
)
def test_a_message_speaks_of_arguments(said: str, expected: str):
    assert translate(said) == expected


def test_every_translated_key_is_one_of_a_recipe_and_every_argument_is_known():
    plain = config.dump(made_recipe(use_vllm=True))
    grpo = config.dump(made_recipe(method="grpo"))
    for key in ARGUMENTS:
        found = (grpo if key == "method.beta" else plain) | {"verifier": {"path": "", "success_reward_threshold": 0}}
        for part in key.split("."):
            assert part in found, key
            found = found[part]
    known = {*defaults(), "model", "train_dataset", "eval_dataset", "reward_funcs", "peft_config"}
    words = {word for argument in ARGUMENTS.values() for word in re.findall(r"[a-z]\w+_\w+|^model$", argument)}
    assert words - known <= {"lora_alpha", "target_modules", "attn_implementation", "device_map"}


def test_no_message_of_a_run_names_an_option_of_the_command():
    """Everything that `train` may say, from the sources it is made of."""
    package = Path(past_opsd.__file__).parent
    names = "loop train resume checkpoint record ledger evaluate export trackers"
    sources = [package / "run" / f"{name}.py" for name in names.split()]
    sources += [package / "core" / f"{name}.py" for name in ("prompts", "files")]
    sources += [package / "policy" / f"{name}.py" for name in ("model", "pretrained", "templates")]
    folders = ("rollout", "rollout/engines", "rollout/verifiers", "learner", "tasks", "methods")
    sources += [file for folder in folders for file in (package / folder).glob("*.py")]
    for command in ("serve.py", "verifiers/grade.py"):
        sources.remove(package / "rollout" / command)
    said = [line for file in sources for line in file.read_text().splitlines() if re.search(r'f?".*--[a-z]', line)]
    skipped = ("add_argument", "help=", "past serve", "--logits", "--logprobs", "past eval", '"""')
    left = [line for line in said if "--" in translate(line) and not any(word in line for word in skipped)]
    assert said
    assert not left


def test_a_failing_run_speaks_of_arguments(tmp_path: Path):
    with pytest.raises(PastError, match=r"^per_device_train_batch_size \* gradient_accumulation_steps = 99 is more"):
        make(tmp_path, per_device_train_batch_size=99).train()


def test_the_other_commands_read_the_folder(trained: PASTTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", str(trained.folder), "--out", str(tmp_path / "out")]) == 0
    assert "adapter:" in capsys.readouterr().out


# Several processes.

SCRIPT = r"""
import os, sys
if "before" in sys.argv:  # a script that has opened the channels itself, as accelerate's state does
    from accelerate import PartialState
    PartialState(cpu=True)
from past_opsd.tasks import embedded
from past_opsd.interface.trl import PASTConfig, PASTTrainer

PROBLEMS = embedded.build(embedded.Options(train_problems=24)).train()
ROWS = [{"prompt": f"Problem: {p.text}", "privileged_context": p.solution, "answer": p.answer} for p in PROBLEMS]

def reward(completions, answer, **kwargs):
    return [float(f"\\boxed{{{a}}}" in c) for c, a in zip(completions, answer)]

args = PASTConfig(
    output_dir=sys.argv[1], max_steps=1 if "before" in sys.argv else 2, per_device_train_batch_size=6,
    num_generations=3, max_completion_length=34,
    learning_rate=5e-4, max_grad_norm=1.0, distillation_kl_clip=1.0, save_steps=1, num_eval_samples=2,
    teacher_prompt_template="{prompt}\nAttempt: {student_output}\nReference: {privileged_context}",
    disable_tqdm=True, eval_strategy="no",
)
trainer = PASTTrainer("embedded", reward, args, ROWS, {"few": ROWS[:3]})
trainer.train()
found = trainer.evaluate()
trainer.save_model(args.output_dir)
assert trainer.is_world_process_zero() == (os.environ["RANK"] == "0")
assert trainer.state.global_step == args.max_steps and len(trainer.state.log_history) >= args.max_steps
trainer.accelerator.print(f"reward {found['eval_reward']} {trainer.accelerator.num_processes}")
"""


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(launch: Launcher, tmp_path: Path):
    """Sampled ids are the same. Gradients are summed in another order, and AdamW divides the smallest of them by their
    own size, so single entries may differ by a step: what is held small is the distance against the way moved."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    said = {}
    for name, size, *more in (("one", 1), ("two", 2), ("joined", 2, "before")):
        ended = launch(size, str(script), str(tmp_path / name), *more)
        assert ended.codes == [0] * size, ended.err
        assert not any(ended.out[1:] + ended.err[1:]), "only the first process speaks"
        said[name] = ended.out[0].split()
    assert said["one"][:2] == said["two"][:2]
    assert [words[2] for words in said.values()] == ["1", "2", "2"]
    one, two, joined = ({p.name: p for p in (tmp_path / name / "rollouts").iterdir()} for name in said)
    for other in (two, joined):
        for name, path in other.items():
            a, b = (pq.read_table(p, columns=["problem", "tokens", "correct"]).to_pydict() for p in (path, one[name]))
            assert a == b
    mine, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    moved = [name for name in mine if "lora_B" in name]  # they start at zero
    way = torch.cat([mine[name].flatten() for name in moved])
    apart = torch.cat([(mine[name] - theirs[name]).flatten() for name in moved])
    assert float(way.norm()) > 0
    assert float(apart.norm()) <= 1e-2 * float(way.norm())


@pytest.mark.slow
def test_a_mistake_is_told_once_by_all_processes(launch: Launcher, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("max_steps=1", "num_iterations=5, max_steps=1"))
    ended = launch(2, str(script), str(tmp_path / "run"))
    told = [text for text in ended.err if "num_iterations=5" in text]
    assert len(told) == 1
    assert all(ended.codes)
    assert not (tmp_path / "run").exists()
