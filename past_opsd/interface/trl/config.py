"""TRL's names for PAST's options, and the recipe that they become."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast

from peft import LoraConfig

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.interface.trl import fields as trl_fields

T = TypeVar("T")
EVALUATION = "eval"
METHODS = ("past", "opsd", "grpo")
CYCLES = 100
"""The length of a run that says nothing of it: the paper's."""


def _completed(cls: type[T]) -> type[T]:
    """`cls` with TRL's other fields at TRL's defaults, and one message for a name that is neither TRL's nor ours."""
    rest: list[Any] = [_other(name, default) for name, default in trl_fields.others().items()]
    made = make_dataclass(cls.__name__, rest, bases=(cls,), namespace={"__doc__": cls.__doc__})
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    plain_init: Callable[..., None] = made.__init__

    @wraps(plain_init)
    def __init__(self: Any, *values: Any, **named: Any) -> None:  # noqa: N807
        known = [f.name for f in fields(made)]
        for name in named:
            if name not in known:
                raise trl_fields.unknown(name, known)
        plain_init(self, *values, **named)

    made.__init__ = __init__
    return cast("type[T]", made)


def _other(name: str, default: object) -> tuple[str, Any, Any]:
    help_ = "without effect" if name in trl_fields.IGNORED else "refused unless it is the default"
    if isinstance(default, list):
        return name, list[str], field(default_factory=list[str], metadata={"help": help_})
    kind: Any = str | None if default is None else type(default)
    return name, kind, field(default=default, metadata={"help": help_})


@_completed
@dataclass
class PASTConfig:
    """TRL's names for PAST's options; one optimizer step here is one cycle. docs/trl.md has every field of TRL's."""

    output_dir: str = "past-output"
    method: str = field(default="past", metadata={"help": "past, opsd or grpo"})
    seed: int = 42
    max_steps: int = -1
    num_train_epochs: float | None = field(default=None, metadata={"help": "where max_steps is unset; neither: 100"})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "problems a cycle, over all processes"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "multiplies the problems of a cycle"})
    num_rollouts: int = field(default=1, metadata={"help": "student responses a problem"})
    num_generations: int = field(default=8, metadata={"help": "G_max; for grpo the responses a problem"})
    max_completion_length: int = 1024
    max_length: int | None = field(default=None, metadata={"help": "prompt and response together"})
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float | None = None
    learning_rate: float = 5e-6
    teacher_learning_rate: float | None = None
    lr_scheduler_type: str = "constant"
    warmup_steps: float = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 0.1
    beta: float = field(default=0.0, metadata={"help": "grpo: weight of the KL to the initial policy"})
    kl_coef: float = field(default=0.05, metadata={"help": "the paper's beta_KL (TRL's beta means several things)"})
    loss_type: str = field(default="grpo", metadata={"help": "grpo, dapo or bnpo: how tokens are averaged"})
    distillation_mode: Literal["full_logits", "topk_logits", "sampled_token"] = "full_logits"
    distillation_topk: int = 100
    distillation_add_tail: bool = False
    distillation_kl_clip: float = field(default=0.05, metadata={"help": "the paper's tau; inf for none"})
    success_reward_threshold: float = 1.0
    reward_weights: list[float] | None = None
    teacher_prompt_template: str | None = field(
        default=None, metadata={"help": "with {prompt}, {student_output}, {privileged_context}"}
    )
    chat_template_kwargs: dict[str, Any] | str | None = None
    teacher_chat_template_kwargs: dict[str, Any] | str | None = None
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    bf16: bool | None = field(default=None, metadata={"help": "unset: where the hardware has it"})
    fp16: bool = False
    use_cpu: bool = False
    gradient_checkpointing: bool | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_server_base_url: list[str] | str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_enable_sleep_mode: bool = False
    vllm_tensor_parallel_size: int = 1
    fsdp: str | None = field(default=None, metadata={"help": "full_shard spreads the frozen base"})
    ddp_timeout: int = 1800
    save_strategy: str = "steps"
    save_steps: float = 5
    save_total_limit: int | None = 2
    eval_strategy: str = field(default="ends", metadata={"help": "ends, steps, epoch or no"})
    eval_steps: float | None = None
    eval_on_start: bool = False
    num_eval_samples: int = field(default=12, metadata={"help": "responses a problem, the k of Avg@k"})
    num_generations_eval: int | None = field(default=None, metadata={"help": "another name of num_eval_samples"})
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    logging_strategy: str = "steps"
    logging_steps: float = 1
    logging_first_step: bool = False
    log_completions: bool = False
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    report_to: list[str] | str | None = "none"
    run_name: str | None = None
    disable_tqdm: bool | None = None
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_strategy: str = "end"
    hub_revision: str | None = None
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False
    resume_from_checkpoint: str | None = None

    def __post_init__(self) -> None:
        for name in ("chat_template_kwargs", "teacher_chat_template_kwargs", "model_init_kwargs"):
            if isinstance(text := getattr(self, name), str):  # as a command line gives it
                try:
                    setattr(self, name, json.loads(text))
                except ValueError as error:
                    raise PastError(f"PASTConfig({name}={text!r:.80}) is not JSON ({error})") from None

    @property
    def world_size(self) -> int:
        """How many processes the launcher started."""
        return int(os.environ.get("WORLD_SIZE", 1))

    @property
    def process_index(self) -> int:
        """Which of them this one is."""
        return int(os.environ.get("RANK", 0))

    @property
    def local_process_index(self) -> int:
        """Which of them this one is on its machine."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def problems_per_step(self) -> int:
        """The problems of a cycle."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def steps(self, problems: int) -> int:
        """The cycles of a run over so many problems."""
        if self.max_steps > 0 or self.num_train_epochs is None:
            return self.max_steps if self.max_steps > 0 else CYCLES
        return math.ceil(self.num_train_epochs * problems / self.problems_per_step)

    def to_dict(self) -> dict[str, Any]:
        """For callbacks that log the configuration; tokens stay secret."""
        plain = {name: trl_fields.plain(value) for name, value in asdict(cast(Any, self)).items()}
        return plain | ({"hub_token": "<HUB_TOKEN>"} if self.hub_token else {})

    def to_json_string(self) -> str:
        """For callbacks that log the configuration."""
        return json.dumps(self.to_dict(), indent=2, default=str)


def defaults() -> dict[str, Any]:
    """The default of every field of `PASTConfig`."""
    known: Any = fields(cast(Any, PASTConfig))
    return {f.name: f.default_factory() if f.default is MISSING else f.default for f in known}


def recipe(
    model: str,
    args: PASTConfig,
    files: Mapping[str, str],
    peft_config: Any,
    verifier: Mapping[str, Any],
    problems: int = 0,
) -> Recipe:
    """The configuration as a recipe, for a dataset of so many problems."""
    if args.method not in METHODS:
        raise PastError(f"PASTConfig(method='{args.method}'): known are {', '.join(METHODS)}")
    data = config.dump(config.load(f"paper/{args.method}"))
    cycles = args.steps(problems)
    sampling = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": max(0, args.top_k or 0),  # vLLM's -1 and None keep all, too
        "min_p": args.min_p or 0.0,
        "max_new_tokens": args.max_completion_length,
    }
    samples = args.num_generations if args.method == "grpo" else args.num_rollouts
    k = args.num_generations_eval or args.num_eval_samples
    at = [step / cycles for step in _evaluations(args, cycles, problems)]
    data |= {"name": args.run_name or f"trl/{args.method}", "description": "", "verifier": dict(verifier)}
    data["run"] |= {
        "cycles": cycles,
        "seed": args.seed,
        "checkpoint_every": interval(args.save_strategy, args.save_steps, args, cycles, problems) or cycles,
        "keep_checkpoints": cycles + 1 if args.save_total_limit is None else args.save_total_limit,
    }
    data["model"] |= _model(model, args) | {"lora": _lora(data["model"]["lora"], peft_config)}
    data["rollout"] = {
        "problems_per_cycle": args.problems_per_step,
        "samples_per_problem": samples,
        "student": sampling,
        "teacher": sampling,
    }
    data["learner"] |= {role: _optimizer(args, role, cycles) for role in ("student", "teacher")}
    data["learner"]["reduction"] = _choice("loss_type", args, {"grpo": "sequence", "dapo": "token", "bnpo": "token"})
    data["evaluation"] |= {
        "samples": k,
        "pass_k": [1, k] if k > 1 else [1],
        "at": at if len(files) > 1 else [],
        "sampling": sampling,
    }
    data["prompts"] |= _prompts(data["prompts"], args)
    data["method"] |= _method(data["method"], args)
    # Without held-out problems nothing is evaluated; the task still wants a source by name.
    data["task"] = {
        "name": "dataset",
        "train": files["train"],
        "evaluation": held_out(files) or {EVALUATION: files["train"]},
        "needs_solution": args.method != "grpo",
        "needs_answer": verifier["name"] != "function",
    }
    data["engine"] = _engine(args)
    data["distributed"] |= {"shard": _shard(args.fsdp), "timeout_seconds": float(args.ddp_timeout)}
    return config.validate(data, {}, "PASTConfig")


def _choice(name: str, args: PASTConfig, known: Mapping[str, T]) -> T:
    value = trl_fields.plain(getattr(args, name))
    if value not in known:
        raise PastError(f"PASTConfig({name}={value!r}): known are {', '.join(known)}")
    return known[value]


def interval(strategy: Any, steps: float, args: PASTConfig, cycles: int, problems: int = 0) -> int | None:
    """Cycles between two events of a kind; None for never."""
    strategy = trl_fields.plain(strategy)
    if strategy == "no":
        return None
    if strategy == "epoch":
        return max(1, math.ceil(problems / args.problems_per_step))
    if strategy != "steps":
        raise PastError(f"PASTConfig: a strategy is steps, epoch or no, not {strategy!r}")
    return _count(steps, cycles)


def _count(steps: float, cycles: int) -> int:
    """A number of cycles; below 1 a share of the run, as in transformers."""
    return max(1, math.ceil(steps * cycles)) if 0 < steps < 1 else int(steps)


def _evaluations(args: PASTConfig, cycles: int, problems: int) -> list[int]:
    strategy = trl_fields.plain(args.eval_strategy)
    ends = strategy == "ends"
    steps = args.eval_steps or (cycles if ends else args.logging_steps)
    every = interval("steps" if ends else strategy, steps, args, cycles, problems)
    if every is None:
        return []
    at = {*range(every, cycles + 1, every)}
    return sorted(at | ({0, cycles} if ends else set[int]()) | ({0} if args.eval_on_start else set[int]()))


def held_out(files: Mapping[str, str]) -> dict[str, str]:
    """The files of the held-out datasets, by name."""
    return {name: path for name, path in files.items() if name != "train"}


def _model(path: str, args: PASTConfig) -> dict[str, Any]:
    given = dict(cast("Mapping[str, Any]", args.model_init_kwargs or {}))
    dtype = "float16" if args.fp16 else "auto" if args.bf16 is None else "bfloat16" if args.bf16 else "float32"
    for name in ("torch_dtype", "dtype"):
        dtype = str(given.pop(name, None) or dtype).removeprefix("torch.")
    out = {
        "path": path,
        "max_context": args.max_length,
        "dtype": dtype,
        "device": "cpu" if args.use_cpu else "auto",
        "gradient_checkpointing": "auto" if args.gradient_checkpointing is None else args.gradient_checkpointing,
        "trust_remote_code": bool(given.pop("trust_remote_code", False) or args.trust_remote_code),
        "revision": given.pop("revision", None),
        "attention": given.pop("attn_implementation", None) or "auto",
        "device_map": "auto" if given.pop("device_map", None) == "auto" else "single",
    }
    given.pop("use_cache", None)  # engines cache, training does not
    if given:
        raise PastError(
            f"PASTConfig(model_init_kwargs={{'{min(given)}': ...}}) is not possible; known are dtype, "
            "attn_implementation, revision, device_map and trust_remote_code"
        )
    return out


def _lora(default: Mapping[str, Any], peft_config: Any) -> dict[str, Any]:
    if peft_config is None:
        return dict(default)
    if not isinstance(peft_config, LoraConfig):
        raise PastError(f"peft_config must be a LoraConfig, not {type(peft_config).__name__}: both adapters are LoRA")
    if peft_config.lora_dropout:
        raise PastError("peft_config.lora_dropout must be 0: both views of a divergence have to be functions")
    taken = {"r", "lora_alpha", "target_modules", "lora_dropout", "task_type", "inference_mode", "fan_in_fan_out"}
    given = cast("dict[str, Any]", peft_config.to_dict())
    usual = cast("dict[str, Any]", LoraConfig().to_dict())
    other = sorted(k for k in given if k not in taken and given[k] != usual[k] and "base_model" not in k)
    if other:
        raise PastError(
            f"peft_config.{other[0]} = {given[other[0]]!r:.80} is not possible: both adapters are plain LoRA; nearest: "
            "r, lora_alpha, target_modules"
        )
    targets = peft_config.target_modules
    everywhere = targets is None or targets == "all-linear"
    return {
        "rank": peft_config.r,
        "alpha": float(peft_config.lora_alpha),
        "targets": "auto" if everywhere else targets if isinstance(targets, str) else sorted(targets or []),
    }


def _optimizer(args: PASTConfig, role: str, cycles: int) -> dict[str, Any]:
    rate = args.teacher_learning_rate if role == "teacher" and args.teacher_learning_rate else args.learning_rate
    schedules = {name: name for name in ("constant", "linear", "cosine")} | {"constant_with_warmup": "constant"}
    return {
        "lr": rate,
        "schedule": _choice("lr_scheduler_type", args, schedules),
        "warmup_steps": _count(args.warmup_steps, cycles),
        "beta1": args.adam_beta1,
        "beta2": args.adam_beta2,
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
    }


def _prompts(default: Mapping[str, Any], args: PASTConfig) -> dict[str, Any]:
    """The dataset's prompt is the user message as it is; the teacher's is the paper's, or the given template."""
    own = dict(cast("Mapping[str, Any]", args.chat_template_kwargs or {}))
    out: dict[str, Any] = {"student": "{problem}", "evaluation": "{problem}"}
    out |= {f"{role}_kwargs": own for role in ("student", "evaluation")}
    out["teacher_kwargs"] = dict(cast("Mapping[str, Any]", args.teacher_chat_template_kwargs or own))
    head = "Problem: {problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    out |= {role: default[role].replace(head, "{problem}") for role in ("reference", "hindsight", "removed")}
    if args.teacher_prompt_template is not None:
        template = args.teacher_prompt_template
        for theirs, ours in (("{prompt}", "{problem}"), ("{privileged_context}", "{reference_solution}")):
            template = template.replace(theirs, ours)
        out["hindsight" if "{student_output}" in template else "reference"] = template
    return out


def _method(default: Mapping[str, Any], args: PASTConfig) -> dict[str, Any]:
    if args.beta and args.method != "grpo":
        raise PastError(
            f"PASTConfig(beta={args.beta}) is GRPO's distance to its reference model, which {args.method} does not "
            "have; nearest: kl_coef, the failed branch's distance to the student"
        )
    modes = {"full_logits": "kl", "topk_logits": "top_k", "sampled_token": "sampled_token"}
    wanted = {
        "tau": args.distillation_kl_clip,
        "beta_kl": args.kl_coef,
        "beta": args.beta,
        "group_max": args.num_generations,
        "objective": _choice("distillation_mode", args, modes),
        "top_k": args.distillation_topk,
        "top_k_tail": args.distillation_add_tail,
        "temperature": args.temperature,
    }
    return {key: value for key, value in wanted.items() if key in default}


def _engine(args: PASTConfig) -> dict[str, Any]:
    if not args.use_vllm:
        return {"name": "torch"}
    mode = _choice("vllm_mode", args, {"colocate": "local", "server": "server"})
    out = {"name": "vllm", "mode": mode, "max_model_len": args.vllm_max_model_length}
    if mode == "local":
        arguments = {"tensor_parallel_size": args.vllm_tensor_parallel_size}
        out |= {"arguments": arguments} if args.vllm_tensor_parallel_size > 1 else {}
        out |= {"sleep": "keep"} if args.vllm_enable_sleep_mode else {}
        return out | {"gpu_memory_utilization": args.vllm_gpu_memory_utilization}
    host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
    urls = args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}"
    out |= {"patience_seconds": float(args.vllm_server_timeout)}
    return out | {"urls": [urls] if isinstance(urls, str) else list(urls)}


def _shard(fsdp: Any) -> str:
    words = str(fsdp or "").split()
    if not words or words[0].lower() in ("false", "0"):
        return "none"
    if {word.lower() for word in words} <= {"true", "1", "full_shard", "auto_wrap"}:
        return "full"
    raise PastError(
        f"PASTConfig(fsdp={fsdp!r}) is not possible: the frozen base is spread whole; nearest: 'full_shard'"
    )
