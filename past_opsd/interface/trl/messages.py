"""Messages of the command and its recipes, in the words of `PASTConfig` and `PASTTrainer`."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_completion_length",
}
_OPTIMIZER = {
    "schedule": "lr_scheduler_type",
    "warmup_steps": "warmup_steps",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
}
# What the recipe's keys are called here.
ARGUMENTS: Mapping[str, str] = {
    **{
        f"{role}.{ours}": theirs
        for role in ("rollout.student", "rollout.teacher", "evaluation.sampling")
        for ours, theirs in _SAMPLING.items()
    },
    **{f"learner.{role}.{ours}": theirs for role in ("student", "teacher") for ours, theirs in _OPTIMIZER.items()},
    "learner.student.lr": "learning_rate",
    "learner.teacher.lr": "teacher_learning_rate",
    "learner.reduction": "loss_type",
    "rollout.problems_per_cycle": "per_device_train_batch_size * gradient_accumulation_steps",
    "rollout.samples_per_problem": "num_rollouts (method='grpo': num_generations)",
    "evaluation.samples": "num_eval_samples",
    "evaluation.at": "eval_steps",
    "run.cycles": "max_steps",
    "run.seed": "seed",
    "run.checkpoint_every": "save_steps",
    "run.keep_checkpoints": "save_total_limit",
    "model.path": "model",
    "model.max_context": "max_length",
    "model.dtype": "model_init_kwargs['dtype']",
    "model.attention": "model_init_kwargs['attn_implementation']",
    "model.revision": "model_init_kwargs['revision']",
    "model.device_map": "model_init_kwargs['device_map']",
    "model.device": "use_cpu",
    "model.gradient_checkpointing": "gradient_checkpointing",
    "model.trust_remote_code": "trust_remote_code",
    "model.lora.rank": "peft_config.r",
    "model.lora.alpha": "peft_config.lora_alpha",
    "model.lora.targets": "peft_config.target_modules",
    "prompts.hindsight": "teacher_prompt_template",
    "prompts.reference": "teacher_prompt_template",
    "prompts.student": "the prompt",
    "prompts.evaluation": "the prompt",
    "method.tau": "distillation_kl_clip",
    "method.beta_kl": "kl_coef",
    "method.beta": "beta",
    "method.group_max": "num_generations",
    "method.objective": "distillation_mode",
    "method.top_k_tail": "distillation_add_tail",
    "method.top_k": "distillation_topk",
    "method.temperature": "temperature",
    "task.train": "train_dataset",
    "task.evaluation": "eval_dataset",
    "verifier.path": "reward_funcs",
    "verifier.success_reward_threshold": "success_reward_threshold",
    "engine.name": "use_vllm",
    "engine.mode": "vllm_mode",
    "engine.urls": "vllm_server_base_url",
    "engine.max_model_len": "vllm_max_model_length",
    "engine.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "engine.sleep": "vllm_enable_sleep_mode",
    "engine.patience_seconds": "vllm_server_timeout",
    "distributed.timeout_seconds": "ddp_timeout",
    "distributed.shard": "fsdp",
}
_KEY = re.compile(r"(?<![\w./])(" + "|".join(sorted(map(re.escape, ARGUMENTS), key=len, reverse=True)) + r")(?![\w/])")
_COMMANDS = [
    (re.compile(r"'?past train\b[^'\n]*?--resume\b[^'\n;]*'?"), "train(resume_from_checkpoint=True)"),
    (re.compile(r"--resume --out \S+"), "train(resume_from_checkpoint=True)"),
    (re.compile(r"--resume"), "train(resume_from_checkpoint=True)"),
    (re.compile(r"the --out folder of 'past train'"), "the output_dir of a PASTTrainer"),
    (re.compile(r"--out"), "output_dir"),
    (re.compile(r"--track (\S+)"), r"report_to='\1'"),
    (re.compile(r"--push (\S+):"), r"push_to_hub, hub_model_id = '\1':"),
    (re.compile(r"--trust\b"), "trust_remote_code=True"),
    (re.compile(r"--set (?=[\w{])"), ""),
]


def translate(text: str) -> str:
    """A message with arguments in place of the command's options and the recipe's keys."""
    for pattern, words in _COMMANDS:
        text = pattern.sub(words, text)
    return _KEY.sub(lambda found: ARGUMENTS[found[1]], text)
