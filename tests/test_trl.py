"""A script written for TRL's GRPOTrainer becomes a PAST run by its two class names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from past_opsd import config
from past_opsd.cli import main
from past_opsd.tasks import embedded
from past_opsd.trl import PASTConfig, PASTTrainer, recipe
from past_opsd.types import PastError

PROBLEMS = embedded.build(embedded.Options(train_problems=24)).train()
PROMPT = "Problem: {}"


def rows(conversational: bool) -> Dataset:
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
            "teacher_prompt_template": "{prompt}\nAttempt: {student_output}\nReference: {privileged_context}",
        }
        | more
    )


class Seen(TrainerCallback):
    def __init__(self, stop_at: int = 0):
        self.events: list[str] = []
        self.logs: list[dict[str, float]] = []
        self.stop_at = stop_at

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

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

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


CALLS: list[dict] = []


def boxed_reward(prompts, completions, answer, **kwargs):
    """As TRL's users write them: lists in, a list of floats out."""
    CALLS.append({"prompts": prompts, "completions": completions, "answer": answer, **kwargs})
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(f"# {a}" in " ".join(t.split())) for t, a in zip(texts, answer, strict=True)]


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
    assert seen.events == ["begin", "step 1", "save", "step 2", "save", "evaluate", "end"]
    assert {"reward", "completions/mean_length", "self_distillation/distillation_loss"} <= set(seen.logs[-1])
    call = CALLS[0]
    assert isinstance(call["completions"][0], list if conversational else str)
    assert isinstance(call["prompts"][0], list if conversational else str)
    assert len(call["hardness"]) == len(call["prompts"]) == len(call["completion_ids"])
    assert set(trainer.evaluate()) >= {"eval_macro/avg@2", "eval_eval/mean_length"}
    trainer.save_model(str(tmp_path / "adapter"))
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (saved["r"], sorted(saved["target_modules"])) == (4, ["q_proj", "v_proj"])


def test_a_callback_can_stop_the_run_and_a_resume_ends_as_if_unbroken(tmp_path: Path):
    def make(name: str, *callbacks: TrainerCallback) -> PASTTrainer:
        args = settings(tmp_path / name)
        return PASTTrainer("embedded", local(boxed_reward), args, rows(False), callbacks=callbacks)

    whole, broken = make("whole"), make("broken", Seen(stop_at=1))
    whole.train()
    assert not broken.train().finished
    assert make("broken").train(resume_from_checkpoint=True).finished
    a, b = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "broken"))
    assert a == b


def test_an_importable_reward_runs_in_killable_processes(tmp_path: Path):
    made = PASTTrainer("embedded", "trl.rewards:accuracy_reward", settings(tmp_path), rows(False))
    assert made.verifier is None
    assert made.recipe.verifier.path == "trl.rewards:accuracy_reward"
    assert made.recipe.verifier.style == "trl"


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
    assert config.dump(config.from_dump(config.dump(made))) == config.dump(made)


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
    assert PASTTrainer("embedded", None, args, rows(False)).train().finished


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": object()}, "takes a folder or a hub id"),
        ({"train_dataset": None}, "needs a train_dataset"),
        ({"processing_class": object()}, "leave processing_class out"),
        ({"peft_config": LoraConfig(lora_dropout=0.1)}, "lora_dropout must be 0"),
        ({"reward_funcs": [boxed_reward, "a:b"]}, "names one importable function"),
    ],
    ids=["model", "dataset", "tokenizer", "dropout", "mixed rewards"],
)
def test_what_cannot_be_is_one_message(tmp_path: Path, change, message: str):
    arguments = {"model": "embedded", "args": settings(tmp_path), "train_dataset": rows(False)} | change
    with pytest.raises(PastError, match=message):
        PASTTrainer(**arguments)


def test_the_other_commands_read_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    PASTTrainer("embedded", None, settings(tmp_path / "run"), rows(False)).train()
    assert main(["export", str(tmp_path / "run")]) == 0
    assert "adapter:" in capsys.readouterr().out
