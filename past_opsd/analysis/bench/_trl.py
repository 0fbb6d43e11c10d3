"""TRL's side of `past bench step`: GRPOTrainer or SDFTTrainer, in a process of its own.

Its training loop runs as it is; a callback waits for the turn before an update and answers after it.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from past_opsd.analysis.bench._worker import answer, peak, serve


@dataclass(frozen=True)
class Twin:
    """What TRL is told so that it does what our side does."""

    method: str
    path: str
    rank: int
    alpha: float
    targets: str | list[str]
    lr: float
    max_grad_norm: float
    before: list[dict[str, str]]
    messages: list[str]
    solutions: list[str]
    teacher_template: str
    samples: int
    tokens: int
    threads: int
    checkpointing: bool


def run(pipe: Connection, twin: Twin) -> None:
    """Train until the pipe closes."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.simplefilter("ignore")
    import torch
    import transformers
    from transformers import TrainerCallback
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(twin.threads)
    library: Any = transformers  # typed in part
    tokenizer = library.AutoTokenizer.from_pretrained(twin.path, padding_side="left")
    never = library.AutoConfig.from_pretrained(twin.path).get_text_config().vocab_size  # no token has this id
    rows = [[*twin.before, {"role": "user", "content": message}] for message in twin.messages]
    seen = {"prompt": 0, "completion": 0, "teacher": 0}

    class Turns(TrainerCallback):
        """Waits for the turn, times the update."""

        began = (0.0, 0.0)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            serve(pipe, {"peak": peak}, until="step")
            gc.collect()
            self.began = (time.perf_counter(), time.process_time())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            answer(pipe, (wall, cpu, tuple(seen.values())))

        def on_self_distillation_batch_prepared(self, **batch: Any) -> None:
            completions = batch["completion_ids"].numel()
            seen["prompt"] = _length(tokenizer, rows) * twin.samples
            seen["completion"] = completions
            seen["teacher"] = int(batch["teacher_attention_mask"].sum()) - completions

    def alternating(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen["completion"] = sum(map(len, completion_ids))
        seen["prompt"] = _length(tokenizer, rows) * twin.samples
        return [float(i % 2 == 0) for i in range(len(completion_ids))]

    with tempfile.TemporaryDirectory() as folder:
        build = _grpo if twin.method == "grpo" else _sdft
        common = _common(twin, folder) | {"generation_kwargs": {"eos_token_id": never}}
        trainer = build(twin, tokenizer, rows, common, Turns(), alternating)
        trainer.eos_token_ids = [never]  # every response runs to its limit
        trainer.train()


def _length(tokenizer: Any, rows: list[Any]) -> int:
    texts = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
    return sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))


def _common(twin: Twin, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": len(twin.messages) * twin.samples,
        "gradient_accumulation_steps": 1,
        "num_generations": twin.samples,
        "max_completion_length": twin.tokens,
        "learning_rate": twin.lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": twin.max_grad_norm,
        "max_steps": 10**6,
        "shuffle_dataset": False,
        "gradient_checkpointing": twin.checkpointing,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def _lora(twin: Twin) -> Any:
    from peft import LoraConfig

    targets = "all-linear" if twin.targets == "auto" else twin.targets
    alpha: Any = twin.alpha
    return LoraConfig(r=twin.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")


def _dataset(rows: list[dict[str, Any]]) -> Any:
    return import_module("datasets").Dataset.from_list(rows)


def _grpo(twin: Twin, tokenizer: Any, rows: list[Any], common: Any, turns: Any, reward: Any) -> Any:
    args = import_module("trl.trainer.grpo_config").GRPOConfig(**common, beta=0.0, loss_type="grpo")
    return import_module("trl.trainer.grpo_trainer").GRPOTrainer(
        twin.path,
        reward_funcs=reward,
        args=args,
        train_dataset=_dataset([{"prompt": row} for row in rows]),
        processing_class=tokenizer,
        peft_config=_lora(twin),
        callbacks=[turns],
    )


def _sdft(twin: Twin, tokenizer: Any, rows: list[Any], common: Any, turns: Any, reward: Any) -> Any:
    sdft = import_module("trl.experimental.sdft")
    args = sdft.SDFTConfig(
        **common,
        distillation_mode="full_logits",
        distillation_alpha=0.0,
        teacher_model_kind="base",
        teacher_prompt_template=twin.teacher_template,
        max_prompt_length=None,  # its default would cut prompts
    )
    data = [{"prompt": row, "privileged_context": z} for row, z in zip(rows, twin.solutions, strict=True)]
    return sdft.SDFTTrainer(
        twin.path,
        args=args,
        train_dataset=_dataset(data),
        processing_class=tokenizer,
        peft_config=_lora(twin),
        callbacks=[turns],
    )
