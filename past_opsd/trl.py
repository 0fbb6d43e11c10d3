"""PAST for scripts written for TRL: `from past_opsd.trl import PASTTrainer, PASTConfig`.

A thin shell: the configuration becomes a recipe, the dataset becomes files in `output_dir/data`, the reward function
becomes the verifier, and the same loop runs. So everything else works on the folder: `past report`, `past probe`,
`past export`, and `past train OUTPUT_DIR/recipe.toml --resume` for rewards that can be imported.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from past_opsd import config
from past_opsd.config import Recipe
from past_opsd.evaluate import Evaluation
from past_opsd.export import export
from past_opsd.files import enclosed, write_text
from past_opsd.train import Outcome, train
from past_opsd.types import Closing, PastError, Problem, Response, Verdict
from past_opsd.verifiers import Reason

Reward = Callable[..., Any]
EVALUATION = "eval"


@dataclass
class PASTConfig:
    """TRL's names for PAST's options; one optimizer step here is one cycle."""

    output_dir: str = "past-output"
    method: str = field(default="past", metadata={"help": "past, opsd or grpo"})
    seed: int = 42
    max_steps: int = 100
    per_device_train_batch_size: int = field(default=4, metadata={"help": "problems a cycle"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "multiplies the problems of a cycle"})
    num_rollouts: int = field(default=1, metadata={"help": "student responses a problem"})
    num_generations: int = field(default=8, metadata={"help": "G_max; for grpo the responses a problem"})
    max_completion_length: int = 1024
    max_length: int | None = field(default=None, metadata={"help": "prompt and response together"})
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    learning_rate: float = 5e-6
    teacher_learning_rate: float | None = None
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 0.1
    epsilon: float = 0.2
    kl_coef: float = field(default=0.05, metadata={"help": "the paper's beta_KL (TRL's beta means several things)"})
    distillation_mode: Literal["full_logits", "topk_logits", "sampled_token"] = "full_logits"
    distillation_topk: int = 100
    distillation_add_tail: bool = False
    distillation_kl_clip: float = field(default=0.05, metadata={"help": "the paper's tau; inf for none"})
    success_reward_threshold: float = 1.0
    reward_weights: list[float] | None = None
    teacher_prompt_template: str | None = field(
        default=None, metadata={"help": "with {prompt}, {student_output}, {privileged_context}"}
    )
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    teacher_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    bf16: bool | None = field(default=None, metadata={"help": "unset: where the hardware has it"})
    gradient_checkpointing: bool | None = None
    use_vllm: bool = False
    vllm_mode: Literal["colocate", "server"] = "colocate"
    vllm_server_base_url: str | list[str] = "http://127.0.0.1:8000"
    vllm_gpu_memory_utilization: float = 0.3
    save_steps: int = 5
    save_total_limit: int = 2
    eval_steps: int | None = field(default=None, metadata={"help": "unset: at the start and the end"})
    num_eval_samples: int = field(default=12, metadata={"help": "responses a problem, the k of Avg@k"})
    logging_steps: int = 1
    report_to: str | list[str] = "none"
    run_name: str | None = None
    disable_tqdm: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For callbacks that log the configuration."""
        return asdict(self)

    def to_json_string(self) -> str:
        """For callbacks that log the configuration."""
        return json.dumps(self.to_dict(), indent=2, default=str)


class PASTTrainer:
    """GRPOTrainer's arguments in GRPOTrainer's order; `train`, `evaluate` and `save_model` as there."""

    def __init__(
        self,
        model: str | Path,
        reward_funcs: Reward | str | Sequence[Reward] | None = None,
        args: PASTConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        processing_class: Any = None,
        peft_config: Any = None,
        callbacks: Sequence[TrainerCallback] | None = None,
    ):
        if not isinstance(model, str | Path):
            raise PastError("PASTTrainer(model=...) takes a folder or a hub id: it loads one base for both adapters")
        if processing_class is not None:
            raise PastError("PASTTrainer reads the tokenizer of the model's folder: leave processing_class out")
        if train_dataset is None:
            raise PastError("PASTTrainer needs a train_dataset with prompts, reference solutions and answers")
        self.args = args or PASTConfig()
        self.folder = Path(self.args.output_dir)
        self.verifier, section = _verifier(reward_funcs, self.args)
        files = _write_data(self.folder / "data", train_dataset, eval_dataset)
        self.recipe = recipe(str(model), self.args, files, peft_config, section)
        self.state = TrainerState(max_steps=self.args.max_steps)
        self.control = TrainerControl()
        # Callbacks are asked as transformers' Trainer asks them; there is no torch optimizer or loader to show.
        self._callbacks = CallbackHandler(list(callbacks or []), None, None, None, None)
        self._outcome: Outcome | None = None

    def add_callback(self, callback: TrainerCallback) -> None:
        """Also tell this one."""
        self._callbacks.add_callback(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Outcome:
        """Run all cycles, or go on from the newest whole checkpoint of `output_dir`."""
        from past_opsd.trackers import Displays, open_trackers

        if isinstance(resume_from_checkpoint, str) and self.folder not in Path(resume_from_checkpoint).parents:
            raise PastError(f"resume_from_checkpoint = '{resume_from_checkpoint}' is not inside {self.folder}")
        names = [self.args.report_to] if isinstance(self.args.report_to, str) else self.args.report_to
        trackers = open_trackers([name for name in names if name != "none"], self.folder, self.recipe)
        self._event("on_train_begin")
        with Displays(_Events(self), trackers) as display:
            self._outcome = train(
                self.recipe,
                self.folder,
                bool(resume_from_checkpoint),
                display,
                verifier=self.verifier,
                stop=lambda: self.control.should_training_stop,
            )
        self._event("on_train_end")
        return self._outcome

    def evaluate(self) -> dict[str, float]:
        """The newest evaluation's numbers, `eval_` before each name."""
        files = sorted((self.folder / "evaluations").glob("step-*.json"))
        if not files:
            raise PastError(f"{self.folder} holds no evaluation: give eval_dataset and train first")
        return _prefixed(Evaluation.load(files[-1]).summary(self.recipe.evaluation.pass_k))

    def save_model(self, output_dir: str | None = None) -> None:
        """The student as a PEFT adapter."""
        export(self.folder, Path(output_dir) if output_dir else self.folder / "export")

    def _event(self, name: str, **more: Any) -> None:
        # Callbacks read the trainer's arguments by attribute; ours are a plain dataclass with the same names.
        call = self._callbacks.call_event
        self.control = call(name, self.args, self.state, self.control, **more)  # pyright: ignore[reportArgumentType]


class _Events:
    """A display that turns the run's progress into callback events."""

    def __init__(self, trainer: PASTTrainer):
        self._trainer = trainer

    def phase(self, cycle: int, name: str) -> None:
        if name == "rollout":
            self._trainer._event("on_step_begin")

    def cycle(self, cycle: int, metrics: dict[str, float]) -> None:
        trainer = self._trainer
        trainer.state.global_step = cycle + 1
        trainer._event("on_step_end")
        if (cycle + 1) % trainer.args.logging_steps == 0:
            logs = _named(metrics)
            trainer.state.log_history.append({**logs, "step": cycle + 1})
            trainer._event("on_log", logs=logs)
        if (cycle + 1) % trainer.args.save_steps == 0:
            trainer._event("on_save")

    def evaluated(self, step: int, summary: dict[str, float]) -> None:
        self._trainer._event("on_evaluate", metrics=_prefixed(summary))

    def note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr)


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Ours and, beside them, the names TRL's users plot."""
    known = {
        "rollout/mean_length": "completions/mean_length",
        "rollout/truncated": "completions/clipped_ratio",
        "rollout/success": "reward",
        "student/distill/loss": "self_distillation/distillation_loss",
        "student/distill/entropy": "entropy",
    }
    return dict(metrics) | {theirs: metrics[ours] for ours, theirs in known.items() if ours in metrics}


def _prefixed(summary: Mapping[str, float]) -> dict[str, float]:
    return {f"eval_{name}": value for name, value in summary.items()}


def recipe(
    model: str, args: PASTConfig, files: Mapping[str, str], peft_config: Any, verifier: Mapping[str, Any]
) -> Recipe:
    """The configuration as a recipe; what cannot be is told with the recipe's own words."""
    base = config.load(f"paper/{args.method}")
    data = config.dump(base)
    sampling = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "max_new_tokens": args.max_completion_length,
    }
    samples = args.num_generations if args.method == "grpo" else args.num_rollouts
    every = args.eval_steps or args.max_steps
    at = sorted({0.0, 1.0, *(step / args.max_steps for step in range(0, args.max_steps + 1, every))})
    data |= {"name": args.run_name or f"trl/{args.method}", "description": "", "verifier": dict(verifier)}
    data["run"] |= {
        "cycles": args.max_steps,
        "seed": args.seed,
        "checkpoint_every": args.save_steps,
        "keep_checkpoints": args.save_total_limit,
    }
    data["model"] |= {
        "path": model,
        "max_context": args.max_length,
        "dtype": "auto" if args.bf16 is None else "bfloat16" if args.bf16 else "float32",
        "gradient_checkpointing": "auto" if args.gradient_checkpointing is None else args.gradient_checkpointing,
        "lora": _lora(data["model"]["lora"], peft_config),
    }
    data["rollout"] = {
        "problems_per_cycle": args.per_device_train_batch_size * args.gradient_accumulation_steps,
        "samples_per_problem": samples,
        "student": sampling,
        "teacher": sampling,
    }
    data["learner"] |= {role: _optimizer(args, role) for role in ("student", "teacher")}
    data["evaluation"] |= {
        "samples": args.num_eval_samples,
        "pass_k": [1, args.num_eval_samples] if args.num_eval_samples > 1 else [1],
        "at": at if EVALUATION in files else [],
        "sampling": sampling,
    }
    data["prompts"] |= _prompts(data["prompts"], args)
    data["method"] |= _method(data["method"], args)
    # Without held-out problems nothing is evaluated; the task still wants a source by name.
    data["task"] = {
        "name": "dataset",
        "train": files["train"],
        "evaluation": {EVALUATION: files.get(EVALUATION, files["train"])},
        "needs_solution": args.method != "grpo",
        "needs_answer": verifier["name"] != "function",
    }
    data["engine"] = _engine(args)
    return config.validate(data, {}, "PASTConfig")


def _lora(default: Mapping[str, Any], peft_config: Any) -> dict[str, Any]:
    if peft_config is None:
        return dict(default)
    if peft_config.lora_dropout:
        raise PastError("peft_config.lora_dropout must be 0: both views of a divergence have to be functions")
    targets = peft_config.target_modules
    return {
        "rank": peft_config.r,
        "alpha": float(peft_config.lora_alpha),
        "targets": "auto" if targets is None else targets if isinstance(targets, str) else sorted(targets),
    }


def _optimizer(args: PASTConfig, role: str) -> dict[str, Any]:
    rate = args.teacher_learning_rate if role == "teacher" and args.teacher_learning_rate else args.learning_rate
    return {
        "lr": rate,
        "schedule": args.lr_scheduler_type,
        "warmup_steps": args.warmup_steps,
        "beta1": args.adam_beta1,
        "beta2": args.adam_beta2,
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
    }


def _prompts(default: Mapping[str, Any], args: PASTConfig) -> dict[str, Any]:
    """The dataset's prompt is the user message as it is; the teacher's is the paper's, or the given template."""
    out: dict[str, Any] = {"student": "{problem}", "evaluation": "{problem}"}
    out |= {f"{role}_kwargs": dict(args.chat_template_kwargs) for role in ("student", "evaluation")}
    out["teacher_kwargs"] = dict(args.teacher_chat_template_kwargs or args.chat_template_kwargs)
    head = "Problem: {problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    out |= {role: default[role].replace(head, "{problem}") for role in ("reference", "hindsight", "removed")}
    if args.teacher_prompt_template is not None:
        template = args.teacher_prompt_template
        for theirs, ours in (("{prompt}", "{problem}"), ("{privileged_context}", "{reference_solution}")):
            template = template.replace(theirs, ours)
        out["hindsight" if "{student_output}" in template else "reference"] = template
    return out


def _method(default: Mapping[str, Any], args: PASTConfig) -> dict[str, Any]:
    wanted = {
        "tau": args.distillation_kl_clip,
        "beta_kl": args.kl_coef,
        "epsilon": args.epsilon,
        "group_max": args.num_generations,
        "objective": {"full_logits": "kl", "topk_logits": "top_k", "sampled_token": "sampled_token"}[
            args.distillation_mode
        ],
        "top_k": args.distillation_topk,
        "top_k_tail": args.distillation_add_tail,
        "temperature": args.temperature,
    }
    return {key: value for key, value in wanted.items() if key in default}


def _engine(args: PASTConfig) -> dict[str, Any]:
    if not args.use_vllm:
        return {"name": "torch"}
    if args.vllm_mode == "colocate":
        return {"name": "vllm", "mode": "local", "gpu_memory_utilization": args.vllm_gpu_memory_utilization}
    urls = args.vllm_server_base_url
    return {"name": "vllm", "mode": "server", "urls": [urls] if isinstance(urls, str) else list(urls)}


def _write_data(folder: Path, train_rows: Iterable[Mapping[str, Any]], eval_rows: Any) -> dict[str, str]:
    """The datasets as JSON lines beside the run, so that a resume and every other command find them."""
    enclosed(folder.parent)
    files: dict[str, str] = {}
    for name, rows in (("train", train_rows), (EVALUATION, eval_rows)):
        if rows is None:
            continue
        path = folder / f"{name}.jsonl"
        text = "".join(json.dumps(dict(row), ensure_ascii=False, default=str) + "\n" for row in rows)
        write_text(path, text)
        files[name] = str(path)
    return files


def _verifier(rewards: Any, args: PASTConfig) -> tuple[RewardVerifier | None, dict[str, Any]]:
    """The verifier's recipe section, and the object itself where the functions live in this process alone."""
    if rewards is None:
        return None, {"name": "boxed_math"}
    functions = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    if len(functions) == 1:
        (only,) = functions
        path = only if isinstance(only, str) else _path_of(only)
        section = {"name": "function", "path": path, "style": "trl"}
        section |= {"success_reward_threshold": args.success_reward_threshold}
        if not path.startswith("__main__:") and "<" not in path:
            return None, section
    if any(isinstance(function, str) for function in functions):
        raise PastError("reward_funcs: a text names one importable function, 'package.module:function'")
    section = {"name": "function", "path": "__main__:rewards", "style": "trl"}
    return RewardVerifier(functions, args.reward_weights, args.success_reward_threshold), section


def _path_of(function: Reward) -> str:
    return f"{function.__module__}:{function.__qualname__}"


class RewardVerifier(Closing):
    """Reward functions of the calling script, asked in this process: there is no time limit on them."""

    def __init__(self, functions: Sequence[Reward], weights: Sequence[float] | None, threshold: float):
        if weights is not None and len(weights) != len(functions):
            raise PastError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")
        self._functions = list(functions)
        self._weights = list(weights) if weights is not None else [1.0] * len(functions)
        self._threshold = threshold
        names = ", ".join(_path_of(function) for function in functions)
        self.identity = f"rewards {names} weights {self._weights} threshold {threshold}"

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        """The weighted sum of all rewards, against the threshold; a truncated response fails before it is asked."""
        asked = [(p, r) for p, r in items if r.finished]
        sums = iter(self._rewards(asked) if asked else [])
        return [self._verdict(next(sums)) if r.finished else Reason.TRUNCATED.verdict() for _, r in items]

    def _verdict(self, reward: float) -> Verdict:
        return (Reason.CORRECT if reward >= self._threshold else Reason.WRONG).verdict()

    def _rewards(self, items: Sequence[tuple[Problem, Response]]) -> list[float]:
        prompts = [problem.extra.get("prompt", problem.text) for problem, _ in items]
        chat = isinstance(prompts[0], list)
        texts = [response.text for _, response in items]
        names = dict.fromkeys(["solution", "answer", *(name for problem, _ in items for name in problem.extra)])
        columns = {
            name: [p.extra.get(name, {"solution": p.solution, "answer": p.answer}.get(name)) for p, _ in items]
            for name in names
            if name != "prompt"
        }
        given = {
            "prompts": prompts,
            "completions": [[{"role": "assistant", "content": t}] for t in texts] if chat else texts,
            "completion_ids": [list(response.tokens) for _, response in items],
            "trainer_state": None,
            "log_extra": lambda *_: None,
            "log_metric": lambda *_: None,
        }
        total = [0.0] * len(items)
        for function, weight in zip(self._functions, self._weights, strict=True):
            values = function(**given, **columns)
            values = asyncio.run(_wait(values)) if inspect.isawaitable(values) else values
            total = [t + weight * (v or 0.0) for t, v in zip(total, values, strict=True)]
        return total


async def _wait(value: Any) -> Any:
    return await value
