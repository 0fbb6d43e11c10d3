"""What becomes of every field of TRL's GRPOConfig, those of transformers' TrainingArguments among them.

Honoured ones are fields of `PASTConfig`. Refused ones would change what is trained or written, and cannot: any value
but the default is an error. Those without effect are named in a warning. A test holds the list against TRL.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from past_opsd.core.nouns import PastError

# TRL's default, and what the field means here.
HONOURED: Mapping[str, tuple[Any, str]] = {
    "output_dir": (None, "the run's folder"),
    "per_device_train_batch_size": (8, "problems a cycle, over all processes together (TRL: completions a process)"),
    "num_train_epochs": (3.0, "passes over the problems, where max_steps is not set"),
    "max_steps": (-1, "cycles; -1: num_train_epochs decides, or 100 where that is not set either"),
    "learning_rate": (1e-6, "the student's peak learning rate, and the teacher's unless teacher_learning_rate is set"),
    "lr_scheduler_type": ("linear", "constant, constant_with_warmup, linear or cosine"),
    "warmup_steps": (0, "steps of linear warm-up; below 1 a share of the run"),
    "weight_decay": (0.0, "AdamW's"),
    "adam_beta1": (0.9, "AdamW's"),
    "adam_beta2": (0.999, "AdamW's"),
    "adam_epsilon": (1e-8, "AdamW's"),
    "gradient_accumulation_steps": (1, "multiplies the problems of a cycle"),
    "max_grad_norm": (1.0, "each adapter's gradient is clipped to this norm"),
    "bf16": (None, "the frozen base in bfloat16; unset: where the hardware has it; False: float32"),
    "fp16": (False, "the frozen base in float16"),
    "gradient_checkpointing": (True, "unset: on GPUs"),
    "logging_strategy": ("steps", "steps, epoch or no"),
    "logging_steps": (10, "cycles between two on_log events and entries of state.log_history"),
    "logging_first_step": (False, "log the first cycle too"),
    "disable_tqdm": (None, "True: no progress bar"),
    "report_to": ("none", "tensorboard, wandb, trackio, several of them, all (that are installed) or none"),
    "run_name": (None, "the recipe's name"),
    "eval_strategy": ("no", "ends (at the start and the end, and every eval_steps if set), steps, epoch or no"),
    "eval_steps": (None, "cycles between evaluations; below 1 a share of the run"),
    "eval_on_start": (False, "also before the first cycle"),
    "save_strategy": ("steps", "steps, epoch or no; the last boundary is always written"),
    "save_steps": (500, "cycles between checkpoints; below 1 a share of the run"),
    "save_total_limit": (None, "newest checkpoints kept besides the evaluated ones; None keeps all"),
    "push_to_hub": (False, "the student is uploaded when the run is over, as by trainer.push_to_hub()"),
    "hub_token": (None, "for push_to_hub"),
    "hub_private_repo": (None, "for push_to_hub: a repository made anew is private"),
    "hub_model_id": (None, "for push_to_hub; unset: the name of output_dir"),
    "hub_strategy": ("every_save", "end, or every_save: also after every checkpoint"),
    "hub_revision": (None, "for push_to_hub: the branch"),
    "metric_for_best_model": (None, "state.best_metric follows it, for EarlyStoppingCallback"),
    "greater_is_better": (None, "for metric_for_best_model; unset: unless its name ends in loss"),
    "seed": (42, "every draw is a function of it"),
    "use_cpu": (False, "compute on the CPU"),
    "ddp_timeout": (1800, "seconds that a process waits for the others"),
    "fsdp": (None, "True or full_shard: the frozen base is spread over the processes"),
    "do_train": (False, "as in TRL: for scripts to read"),
    "do_eval": (False, "as in TRL: for scripts to read"),
    "do_predict": (False, "as in TRL: for scripts to read"),
    "resume_from_checkpoint": (None, "as in TRL: for scripts to hand to train()"),
    "model_init_kwargs": (None, "dtype, attn_implementation, revision, device_map, trust_remote_code"),
    "trust_remote_code": (False, "run code that the model's repository ships"),
    "num_generations": (8, "G_max, the teacher's continuations of a failure; with method='grpo' responses a problem"),
    "num_generations_eval": (None, "another name of num_eval_samples"),
    "max_completion_length": (512, "longer responses are cut and count as failures"),
    "temperature": (1.0, "of every role"),
    "top_p": (1.0, "of every role"),
    "top_k": (0, "of every role"),
    "min_p": (None, "of every role"),
    "chat_template_kwargs": (None, "the student's, the evaluation's, and the teacher's unless it has its own"),
    "use_vllm": (False, "the vLLM engine"),
    "vllm_mode": ("colocate", "colocate or server"),
    "vllm_server_base_url": (None, "one address or several; unset: vllm_server_host and vllm_server_port"),
    "vllm_server_host": ("0.0.0.0", "where the server is; 0.0.0.0 is this machine"),
    "vllm_server_port": (8000, "where the server is"),
    "vllm_server_timeout": (240.0, "seconds to wait for a server that does not answer"),
    "vllm_gpu_memory_utilization": (0.3, "with colocate: vLLM's share of the GPU"),
    "vllm_max_model_length": (None, "prompt and response together, in vLLM"),
    "vllm_enable_sleep_mode": (False, "with colocate: vLLM sleeps while optimizer steps run"),
    "vllm_tensor_parallel_size": (1, "with colocate: GPUs of one vLLM"),
    "beta": (0.0, "with method='grpo' the weight of the exact KL to the initial policy; for PAST see kl_coef"),
    "reward_weights": (None, "weights of the sum that success_reward_threshold is held against"),
    "loss_type": ("dapo", "grpo: the mean over each response's tokens; dapo, bnpo: the mean over all tokens"),
    "log_completions": (False, "print responses with their rewards, and write output_dir/completions/*.parquet"),
    "num_completions_to_print": (None, "for log_completions; None prints all"),
    "log_unique_prompts": (False, "for log_completions: one response a problem"),
}

_RATIO = "the old policy is the trainer's own, one step a snapshot, so the ratio is 1 and nothing is clipped"
_IMPORTANCE = "token by token, with the recipe's learner.importance_cap"
_LOADER = "there is no torch data loader"
_DDP = "gradients are added up once a step, without DistributedDataParallel"
_EVALUATION = "evaluation samples and verifies responses; there are no predictions or labels to collect"
_ENGINE = "rollouts come from an engine of our own, or vLLM"
_LOSS = "a setting of a loss_type that is not there"
_COMPILE = "nothing is compiled"
_TRACKIO = "trackio logs locally"

# TRL's default, why nothing else is possible, and what comes nearest.
REFUSED: Mapping[str, tuple[Any, str, str]] = {
    "lr_scheduler_kwargs": (None, "the schedules have no further settings", "lr_scheduler_type, warmup_steps"),
    "optim": ("adamw_torch_fused", "both adapters are trained by AdamW", "adamw_torch, adam_beta1, adam_beta2"),
    "optim_args": (None, "both adapters are trained by plain AdamW", "adam_beta1, adam_beta2, weight_decay"),
    "optim_target_modules": (None, "the adapters' parameters are trained, all of them", "peft_config.target_modules"),
    "label_smoothing_factor": (0.0, "there are no labels to smooth", "distillation_kl_clip"),
    "torch_compile": (False, _COMPILE, "use_vllm for faster rollouts"),
    "torch_compile_backend": (None, _COMPILE, "use_vllm for faster rollouts"),
    "torch_compile_mode": (None, _COMPILE, "use_vllm for faster rollouts"),
    "neftune_noise_alpha": (None, "both views of a divergence have to be functions, without noise", "temperature"),
    "auto_find_batch_size": (False, "micro-batches already fit a budget of tokens", "gradient_checkpointing"),
    "eval_delay": (0, "evaluations are at fixed boundaries", "eval_steps, eval_on_start"),
    "enable_jit_checkpoint": (False, "checkpoints are at boundaries, and Ctrl-C stops at the next one", "save_steps"),
    "load_best_model_at_end": (
        False,
        "every evaluated checkpoint is kept for you to choose from",
        "metric_for_best_model; state.best_global_step names the step",
    ),
    "ignore_data_skip": (False, "a resumed run goes on exactly where it stopped", "seed, another output_dir"),
    "restore_callback_states_from_checkpoint": (False, "checkpoints hold no callbacks", "callbacks"),
    "data_seed": (None, "one seed decides all draws", "seed"),
    "accelerator_config": (None, "there is no Accelerator", "ddp_timeout, fsdp"),
    "parallelism_config": (None, "processes share out rollouts and gradients, not one sequence", "fsdp"),
    "train_sampling_strategy": ("random", "the order of problems is a function of the seed", "seed"),
    "fsdp_config": (None, "spreading the frozen base has no settings", "fsdp"),
    "deepspeed": (None, "adapters are replicated, and the frozen base can be spread", "fsdp"),
    "router_aux_loss_coef": (None, "routers of mixtures of experts are frozen", "peft_config.target_modules"),
    "shuffle_dataset": (True, "the order of problems is a function of the seed", "seed"),
    "generation_batch_size": (None, "every cycle samples its own responses", "per_device_train_batch_size"),
    "steps_per_generation": (None, "every cycle samples its own responses", "per_device_train_batch_size"),
    "generation_kwargs": (None, "samplers know these settings alone", "temperature, top_p, top_k, min_p"),
    "repetition_penalty": (1.0, "what was sampled must be what is scored", "temperature, top_p, top_k, min_p"),
    "vllm_structured_outputs_regex": (None, "what was sampled must be what is scored", "reward_funcs"),
    "vllm_model_impl": ("vllm", "vLLM's own implementation is compared with the trainer's", "use_vllm"),
    "num_iterations": (1, "PAST takes one step of each adapter a batch", "max_steps"),
    "multi_objective_aggregation": (
        "sum_then_normalize",
        "a response succeeds or not: the weighted sum is held against a threshold",
        "reward_weights, success_reward_threshold",
    ),
    "scale_rewards": ("group", "advantages are scaled within their group", "success_reward_threshold"),
    "mask_truncated_completions": (
        False,
        "a truncated response is a failure that is learned from",
        "max_completion_length",
    ),
    "sync_ref_model": (
        False,
        "PAST stays close to the student itself, GRPO here to the initial policy",
        "kl_coef, beta",
    ),
    "top_entropy_quantile": (1.0, "every token of a response counts", "distillation_kl_clip"),
    "entropy_coef": (0.0, "there is no entropy term", "kl_coef, temperature"),
    "use_adaptive_entropy": (False, "there is no entropy term", "kl_coef, temperature"),
    "max_tool_calling_iterations": (None, "responses call no tools", "reward_funcs"),
    "log_completions_hub_repo": (None, "completions stay in output_dir/completions", "log_completions, report_to"),
}

# TRL's default, and why the field changes nothing.
IGNORED: Mapping[str, tuple[Any, str]] = {
    "average_tokens_across_devices": (True, "all processes together take one mean"),
    "bf16_full_eval": (False, "evaluation computes as training does"),
    "fp16_full_eval": (False, "evaluation computes as training does"),
    "tf32": (None, "torch's own setting stays"),
    "gradient_checkpointing_kwargs": (None, "checkpointing is never reentrant"),
    "use_liger_kernel": (False, "losses are fused by kernels of our own"),
    "liger_kernel_config": (None, "losses are fused by kernels of our own"),
    "use_cache": (False, "engines cache, training does not"),
    "torch_empty_cache_steps": (None, "micro-batches fit a budget of tokens"),
    "log_on_each_node": (True, "the first process logs"),
    "logging_nan_inf_filter": (True, "a loss that is not finite stops the run"),
    "include_num_input_tokens_seen": ("no", "tokens are counted as cost/..."),
    "log_level": ("passive", "set it with transformers.logging"),
    "log_level_replica": ("warning", "the first process logs"),
    "project": ("huggingface", "the project is past-opsd, or WANDB_PROJECT"),
    "trackio_space_id": (None, _TRACKIO),
    "trackio_bucket_id": (None, _TRACKIO),
    "trackio_static_space_id": (None, _TRACKIO),
    "per_device_eval_batch_size": (8, "the engine batches by itself"),
    "prediction_loss_only": (False, _EVALUATION),
    "eval_do_concat_batches": (True, _EVALUATION),
    "eval_use_gather_object": (False, _EVALUATION),
    "eval_accumulation_steps": (None, _EVALUATION),
    "include_for_metrics": ([], _EVALUATION),
    "batch_eval_metrics": (False, _EVALUATION),
    "save_only_model": (False, "a checkpoint is always whole"),
    "save_on_each_node": (False, "all processes share output_dir"),
    "hub_always_push": (False, "uploads are not skipped"),
    "full_determinism": (False, "draws are functions of the seed anyway"),
    "dataloader_drop_last": (False, _LOADER),
    "dataloader_num_workers": (0, _LOADER),
    "dataloader_pin_memory": (True, _LOADER),
    "dataloader_persistent_workers": (False, _LOADER),
    "dataloader_prefetch_factor": (None, _LOADER),
    "dataloader_multiprocessing_context": (None, _LOADER),
    "dataloader_in_order": (True, _LOADER),
    "remove_unused_columns": (False, "every column reaches the reward functions"),
    "label_names": (None, _EVALUATION),
    "length_column_name": ("length", "batches are not grouped by length"),
    "ddp_find_unused_parameters": (None, _DDP),
    "ddp_bucket_cap_mb": (None, _DDP),
    "ddp_broadcast_buffers": (None, _DDP),
    "ddp_static_graph": (None, _DDP),
    "ddp_backend": (None, "gloo on CPUs, nccl on GPUs"),
    "debug": ("", "losses and adapters are always checked"),
    "skip_memory_metrics": (True, "memory is in timings.jsonl"),
    "local_rank": (-1, "the launcher's environment says it"),
    "disable_dropout": (False, "dropout is always off"),
    "cast_lm_head_to_fp32": (False, "losses are computed in float32"),
    "ds3_gather_for_generation": (True, "there is no DeepSpeed"),
    "pad_to_multiple_of": ("auto", "padding does not enter the losses"),
    "cache_implementation": (None, _ENGINE),
    "vllm_group_port": (51216, "adapters go to the server as files"),
    "delta": (None, _RATIO),
    "epsilon": (0.2, _RATIO),
    "epsilon_high": (None, _RATIO),
    "sapo_temperature_neg": (1.05, _LOSS),
    "sapo_temperature_pos": (1.0, _LOSS),
    "vespo_k_pos": (2.0, _LOSS),
    "vespo_lambda_pos": (3.0, _LOSS),
    "vespo_k_neg": (3.0, _LOSS),
    "vespo_lambda_neg": (2.0, _LOSS),
    "importance_sampling_level": ("token", _RATIO),
    "ref_model_mixup_alpha": (0.6, "a setting of sync_ref_model"),
    "ref_model_sync_steps": (512, "a setting of sync_ref_model"),
    "entropy_coef_min": (0.0, "a setting of use_adaptive_entropy"),
    "entropy_coef_max": (1.0, "a setting of use_adaptive_entropy"),
    "entropy_coef_delta": (0.005, "a setting of use_adaptive_entropy"),
    "entropy_target": (0.2, "a setting of use_adaptive_entropy"),
    "vllm_importance_sampling_correction": (True, _IMPORTANCE),
    "vllm_importance_sampling_mode": ("sequence_mask", _IMPORTANCE),
    "vllm_importance_sampling_clip_max": (3.0, _IMPORTANCE),
    "vllm_importance_sampling_clip_min": (None, _IMPORTANCE),
    "vllm_importance_sampling_cap": (None, _IMPORTANCE),
    "off_policy_mask_threshold": (None, _RATIO),
    "use_bias_correction_kl": (True, "the KL is exact, over the whole vocabulary"),
    "log_multimodal": (True, "prompts and responses are text"),
    "use_transformers_continuous_batching": (False, _ENGINE),
    "transformers_continuous_batching_config": (None, _ENGINE),
    "use_transformers_paged": (False, _ENGINE),
}

# Values that mean the same as a refused field's default.
_SAME: Mapping[str, tuple[Any, ...]] = {
    "optim": ("adamw_torch",),
    "scale_rewards": (True,),
    "shuffle_dataset": (None,),
}
# Names of earlier versions, and what took their place.
_FORMER = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "no_cuda": "use_cpu",
    "max_prompt_length": "max_length",
    "max_new_tokens": "max_completion_length",
    "beta_kl": "kl_coef",
    "num_samples": "num_rollouts",
}


def others() -> dict[str, Any]:
    """The fields that are not honoured, with TRL's defaults."""
    return {name: row[0] for rows in (REFUSED, IGNORED) for name, row in rows.items()}


def plain(value: Any) -> Any:
    """What a configuration holds, with transformers' enums as their texts."""
    return getattr(value, "value", value)


def unknown(name: str, known: Iterable[str]) -> PastError:
    """The message for a name that is neither TRL's nor ours."""
    near = [_FORMER[name]] if name in _FORMER else difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "docs/trl.md lists all"
    return PastError(f"PASTConfig has no argument {name}; {hint}")


def check(args: Any) -> list[str]:
    """Refuse what cannot be; name the fields that were set and change nothing."""
    changed = {name for name, default in others().items() if _differs(name, getattr(args, name), default)}
    refused = [
        f"PASTConfig({name}={plain(getattr(args, name))!r:.80}) is not possible: {reason}; nearest: {nearest}"
        for name, (_, reason, nearest) in REFUSED.items()
        if name in changed
    ]
    if refused:
        raise PastError("\n".join(refused))
    return [f"{name} ({why})" for name, (_, why) in IGNORED.items() if name in changed]


def _differs(name: str, value: Any, default: Any) -> bool:
    value = plain(value)
    nothing = default is None and not value  # False, "" and {} ask for nothing, as None does
    return not nothing and value != default and value not in _SAME.get(name, ())


def different(defaults: Mapping[str, Any], args: Any) -> list[str]:
    """The fields that are left at a default of ours which is not TRL's, each with both."""
    return [
        f"{name} {defaults[name]} (TRL: {theirs})"
        for name, (theirs, _) in HONOURED.items()
        if defaults[name] != theirs and plain(getattr(args, name)) == defaults[name]
    ]


def table(defaults: Mapping[str, Any]) -> str:
    """The whole list as Markdown, for docs/trl.md."""
    honoured = [
        f"| `{name}` | `{theirs}` | {'' if defaults[name] == theirs else f'`{defaults[name]}`'} | {meaning} |"
        for name, (theirs, meaning) in HONOURED.items()
    ]
    refused = [f"| `{name}` | `{d!r}` | {reason} | {nearest} |" for name, (d, reason, nearest) in REFUSED.items()]
    reasons: dict[str, list[str]] = {}
    for name, (_, why) in IGNORED.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    ignored = [f"| {', '.join(names)} | {why} |" for why, names in reasons.items()]
    parts = [
        (f"### Honoured ({len(HONOURED)})", "| field | TRL's default | ours | here |", "|---|---|---|---|", honoured),
        (f"### Refused ({len(REFUSED)})", "| field | only value | why | nearest |", "|---|---|---|---|", refused),
        (f"### Without effect ({len(IGNORED)})", "| fields | why |", "|---|---|", ignored),
    ]
    return "\n\n".join("\n".join([title, "", head, rule, *rows]) for title, head, rule, rows in parts)
