"""`PASTTrainer`: GRPOTrainer's interface to a run in a folder."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from peft import PeftModel
from rich.console import Console
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState, trainer_pt_utils
from transformers.trainer_callback import CallbackHandler

from past_opsd.core.config import Recipe
from past_opsd.core.files import write_text
from past_opsd.core.nouns import PastError, derive_seed
from past_opsd.interface.trl import fields
from past_opsd.interface.trl.config import EVALUATION, PASTConfig, defaults, held_out, interval, recipe
from past_opsd.interface.trl.events import Events, Steps, evaluated, named
from past_opsd.interface.trl.messages import translate
from past_opsd.interface.trl.rewards import Reward, RewardVerifier, verifier
from past_opsd.interface.ui import TrainDisplay
from past_opsd.policy import distributed
from past_opsd.policy.distributed import World, together
from past_opsd.policy.model import Model, load_tokenizer
from past_opsd.policy.model import _tokenizer_text as tokenizer_text  # pyright: ignore[reportPrivateUsage]
from past_opsd.run import checkpoint
from past_opsd.run.export import export, push
from past_opsd.run.folder import RunFolder
from past_opsd.run.trackers import BACKENDS, Displays, open_trackers
from past_opsd.run.train import Display, Outcome, Session, Silent, assemble, train

Rows = Iterable[Mapping[str, Any]]
T = TypeVar("T")
UNHEARD = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_predict", "on_prediction_step")
"""Events of transformers' own loop that have no place in a cycle."""
_TOLD: set[str] = set()
_WORLD: list[World] = []  # joined once a process
_THEIRS: Any = trainer_pt_utils  # functions without types


class PASTTrainer:
    """GRPOTrainer's arguments in GRPOTrainer's order; `train`, `evaluate`, `save_model`, `push_to_hub` as there.

    Under torchrun or accelerate launch every process makes one and calls the same methods; the first writes and talks.
    """

    def __init__(
        self,
        model: str | Path,
        reward_funcs: Reward | str | Sequence[Reward] | None = None,
        args: PASTConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ):
        self.args = PASTConfig() if args is None else args
        if not isinstance(self.args, cast(type, PASTConfig)):
            raise PastError(
                f"args must be a PASTConfig, not {type(args).__name__}: it takes the same names, so change the class"
            )
        self.folder = Path(self.args.output_dir)
        self._run = RunFolder(self.folder)
        self.world = _world(self.args, self.folder)
        self.accelerator = _Accelerator(self.world)
        self._inside = False
        with self._shared():
            _refuse_objects(
                model,
                reward_processing_classes=reward_processing_classes,
                optimizers=None if optimizers == (None, None) else optimizers,
                quantization_config=quantization_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
            if train_dataset is None:
                raise PastError("PASTTrainer needs a train_dataset with prompts, reference solutions and answers")
            self._tell_about_fields()
            self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
            self.verifier, section = verifier(reward_funcs, self.args)
            sets = {"train": train_dataset} | _named_sets(eval_dataset)
            files, counts = self._by_first(lambda: _write_data(self.folder, sets))
            self._problems = counts["train"]
            self.recipe = recipe(str(model), self.args, files, peft_config, section, self._problems)
            if processing_class is not None:
                _require_same(processing_class, self.recipe)
        self._network: Model | None = None
        self._saved = 0
        self.control: TrainerControl = TrainerControl()
        self.state = self._fresh_state()
        # Callbacks are asked as transformers' Trainer asks them; there is no torch optimizer or loader to show. The
        # handler wants to see the callback that steers transformers' own loop, which ours does without.
        self._callbacks: Any = CallbackHandler([DefaultFlowCallback], None, None, None, None)
        self._callbacks.pop_callback(DefaultFlowCallback)
        for callback in callbacks or []:
            self.add_callback(callback)
        self._event("on_init_end")

    log_metrics, metrics_format = _THEIRS.log_metrics, _THEIRS.metrics_format
    save_metrics, save_state = _THEIRS.save_metrics, _THEIRS.save_state

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Also tell this one."""
        self._callbacks.add_callback(callback)
        made: TrainerCallback = self._callbacks.callbacks[-1]
        unheard = [name for name in UNHEARD if getattr(type(made), name) is not getattr(TrainerCallback, name)]
        if unheard:
            self._tell(f"warning: {type(made).__name__}: {', '.join(unheard)} never happens here")

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """No longer tell this one, and give it back."""
        return self._callbacks.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """No longer tell this one."""
        self._callbacks.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this process writes and talks."""
        return self.world.first

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> Outcome:
        """Run all cycles, or go on: from the newest whole checkpoint (True) or from the one that is named."""
        self._network = None  # frees the memory for the one that is trained
        self.control = TrainerControl()
        with self._shared():
            step = self._named_step(resume_from_checkpoint)
            self.state, self._saved = self._fresh_state(), 0
            if isinstance(self.verifier, RewardVerifier):
                self.verifier.state = self.state
            self._event("on_train_begin")
            with self._display() as display:
                outcome = train(
                    self.recipe,
                    self.folder,
                    bool(resume_from_checkpoint),
                    display,
                    verifier=self.verifier,
                    stop=self._stop,
                    world=self.world,
                    step=step,
                    opened=self._opened,
                    again="train(resume_from_checkpoint=True)",
                )
            self._stop()  # the last checkpoint
            self._recall(outcome.completed)
            self.state = self.world.share(lambda: self.state)
            self._event("on_train_end")
        if self.args.push_to_hub:
            self.push_to_hub()
        return outcome

    def evaluate(
        self,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = EVALUATION,
    ) -> dict[str, float]:
        """Avg@k and its kin of the student as it is now, on `eval_dataset` or on the trainer's."""
        with self._shared():
            task = self.recipe.task
            if eval_dataset is not None:
                sets = _named_sets(eval_dataset)
                files, _ = self._by_first(lambda: _write_data(self.folder, sets, "evaluate-"))
                task = task.model_copy(update={"evaluation": held_out(files)})
            elif self.eval_dataset is None:
                raise PastError("evaluate() needs an eval_dataset: give one here or to PASTTrainer")
            model, step = self._load()
            began = time.monotonic()
            assembled = assemble(self.recipe.model_copy(update={"task": task}), self.verifier, self.world, model)
            try:
                found = assembled.evaluate(step)
            finally:
                assembled.close()
            metrics = evaluated(found, self.recipe.evaluation.pass_k, metric_key_prefix)
            seconds = time.monotonic() - began
            asked = found.samples * sum(len(result.problems) for result in found.tasks.values())
            metrics[f"{metric_key_prefix}_runtime"] = round(seconds, 4)
            metrics[f"{metric_key_prefix}_samples_per_second"] = round(asked / seconds, 3)
            self.state.global_step = step
            self._log(metrics)
            self._event("on_evaluate", metrics=metrics)
        return metrics

    @property
    def model(self) -> PeftModel:
        """The PEFT model with the student's adapter active: as trained, or as the newest checkpoint has it."""
        with self._shared():
            network, _ = self._load()
            network.activate("student")
            return network.peft

    @cached_property
    def processing_class(self) -> Any:
        """The model's tokenizer."""
        return load_tokenizer(self.recipe.model)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """The student as a PEFT adapter with its tokenizer, in `output_dir` (default OUTPUT_DIR/export).

        Given the run's own folder, as TRL's scripts do, the files are put beside the run's.
        """
        with self._shared():
            self._by_first(lambda: self._export(Path(output_dir) if output_dir else self._run.export()))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> str:
        """Export the student and upload it to the hub repository `hub_model_id`; gives the address."""
        with self._shared():
            return self._by_first(lambda: self._push(commit_message, token, revision))

    def _push(self, message: str | None, token: str | None = None, revision: str | None = None) -> str:
        args, out = self.args, self._run.export()
        self._export(out)
        self._event("on_push_begin")
        return push(
            out,
            args.hub_model_id or self.folder.resolve().name,
            bool(args.hub_private_repo),
            token=token or args.hub_token,
            revision=revision or args.hub_revision,
            message=message,
        )

    def _export(self, out: Path) -> None:
        if not self._run.steps():
            raise PastError(f"{self.folder} holds no checkpoint yet; call train() first")
        beside = out.resolve() == self.folder.resolve()
        made = export(self.folder, self._run.export() if beside else out, trust=True)  # the caller's own run
        for file in made.iterdir() if beside else ():
            if file.is_file():
                shutil.copyfile(file, out / file.name)

    def _load(self) -> tuple[Model, int]:
        """The model with the adapters of the newest whole checkpoint, and its boundary; 0 where there is none."""
        path = self.world.share(lambda: checkpoint.newest_whole(self._run)[0])
        if self._network is None:
            section = self.recipe
            seed = derive_seed(section.run.seed, "adapters") >> 1
            made = Model(section.model, seed, self.world, section.distributed.shard, section.distributed.split)
            if path is not None:
                checkpoint.load_adapters(made, path)
            self._network = made
        return self._network, 0 if path is None else checkpoint.read_state(path)["next_cycle"]

    def _opened(self, session: Session) -> None:
        self._network = session.model

    @contextmanager
    def _shared(self) -> Generator[None]:
        """What all processes do together; messages speak of this interface's arguments."""
        if self._inside:  # a callback's call, in the midst of a run
            if not self.world.alone:
                raise PastError("callbacks run in the first process alone: call this after train(), in all of them")
            yield
            return
        self._inside = True
        try:
            with together(self.world):
                yield
        except PastError as error:
            self._network = None
            raise PastError(translate(str(error))) from None
        finally:
            self._inside = False

    def _by_first(self, act: Callable[[], T]) -> T:
        """What the first process made; a mistake it meets is everybody's."""

        def attempt() -> tuple[Any, str | None]:
            try:
                return act(), None
            except PastError as error:
                return None, str(error)

        made, problem = self.world.share(attempt)
        if problem is not None:
            raise PastError(problem)
        return made

    @contextmanager
    def _display(self) -> Generator[Display]:
        if not self.world.first:
            yield Silent()
            return
        recipe = self.recipe
        trackers = open_trackers(_trackers(self.args.report_to), self.folder, recipe)
        bar = TrainDisplay(Console(stderr=True), recipe.name, recipe.run.cycles)
        with (
            nullcontext() if self.args.disable_tqdm else bar as shown,
            Displays(Events(self, self._steps(), shown), trackers) as all_,
        ):
            yield all_

    def _steps(self) -> Steps:
        return Steps(self._recall, self._reached, self._event, self._logs_at, self._log, self._evaluated)

    def _named_step(self, wanted: bool | str | Path | None) -> int | None:
        """The boundary of the checkpoint that is meant; None for the newest."""
        if wanted is None or isinstance(wanted, bool):
            return None
        there = self.world.share(lambda: self._run.steps())
        named, places = Path(wanted), (self.folder.resolve(), self._run.checkpoints.folder.resolve())
        number = re.fullmatch(r"checkpoint-0*(\d+)", named.name)
        if number is None or named.resolve().parent not in places or int(number[1]) not in there:
            listed = ", ".join(str(self._run.checkpoint(step)) for step in there) or "none"
            raise PastError(
                f"resume_from_checkpoint = '{wanted}' is no checkpoint of output_dir = '{self.folder}', which has: "
                f"{listed}"
            )
        return int(number[1])

    def _tell_about_fields(self) -> None:
        ignored, other = fields.check(self.args), fields.different(defaults(), self.args)
        if ignored:
            self._tell(f"warning: without effect here: {'; '.join(ignored)}")
        if other:
            self._tell(f"note: defaults of PASTConfig that are not TRL's: {', '.join(other)}")
        if not self.world.alone:
            self._tell("note: per_device_train_batch_size counts the problems of all processes together")

    def _tell(self, text: str) -> None:
        """Said once a process, by the first."""
        if self.world.first and text not in _TOLD:
            _TOLD.add(text)
            print(text, file=sys.stderr)

    def _fresh_state(self) -> TrainerState:
        epochs = self.recipe.run.cycles * self.args.problems_per_step / self._problems
        return TrainerState(
            max_steps=self.recipe.run.cycles,
            num_train_epochs=math.ceil(epochs),
            is_local_process_zero=self.world.local_rank == 0,
            is_world_process_zero=self.world.first,
        )

    def _event(self, name: str, **more: Any) -> None:
        if self.world.first:
            # Callbacks read the trainer's arguments by attribute; ours are a plain dataclass with the same names.
            self.control = self._callbacks.call_event(name, self.args, self.state, self.control, **more)

    def _log(self, logs: dict[str, float]) -> None:
        self.state.log_history.append({**logs, "epoch": self.state.epoch or 0.0, "step": self.state.global_step})
        self._event("on_log", logs=logs)

    def _reached(self, step: int) -> None:
        self.state.global_step = step
        self.state.epoch = step * self.args.problems_per_step / self._problems

    def _logs_at(self, step: int) -> bool:
        every = interval(
            self.args.logging_strategy, self.args.logging_steps, self.args, self.recipe.run.cycles, self._problems
        )
        return (every is not None and step % every == 0) or (self.args.logging_first_step and step == 1)

    def _recall(self, step: int) -> None:
        """The state of a run that goes on, from its records: once, before the first event of a cycle."""
        if self.state.global_step or self.state.log_history:
            return
        for line in self._run.read_metrics() if self.world.first else []:
            if line["cycle"] < step and self._logs_at(line["cycle"] + 1):
                self._reached(line["cycle"] + 1)
                logs = named(line)
                self.state.log_history.append({**logs, "epoch": self.state.epoch, "step": self.state.global_step})
        self._reached(step)
        self._saved = step
        if step == 0 and self.world.first and self._run.evaluations.path(0).is_file():
            self._evaluated(evaluated(self._run.read_evaluation(0), self.recipe.evaluation.pass_k))

    def _evaluated(self, metrics: dict[str, float]) -> None:
        self._log(metrics)
        self._event("on_evaluate", metrics=metrics)
        wanted = self.args.metric_for_best_model
        if wanted is None:
            return
        key = wanted if wanted.startswith(f"{EVALUATION}_") else f"{EVALUATION}_{wanted}"
        if key not in metrics:
            raise PastError(f"metric_for_best_model = '{wanted}' is no number of an evaluation: {', '.join(metrics)}")
        greater = self.args.greater_is_better
        sign = 1 if greater or (greater is None and not wanted.endswith("loss")) else -1
        if self.state.best_metric is None or sign * metrics[key] > sign * self.state.best_metric:
            self.state.best_metric, self.state.best_global_step = metrics[key], self.state.global_step

    def _stop(self) -> bool:
        """Whether a callback wants the run to end; asked at boundaries, so checkpoints are told of here."""
        if not self.world.first:
            return False
        newest = max(self._run.steps(), default=0)
        if newest == self.state.global_step > self._saved:
            self._saved = newest
            self._event("on_save")
            if self.args.push_to_hub and self.args.hub_strategy == "every_save" and newest < self.state.max_steps:
                self._push_on_the_way(newest)
        return self.control.should_training_stop

    def _push_on_the_way(self, step: int) -> None:
        try:
            self._push(f"Step {step}")
        except PastError as error:  # the run goes on, and pushes again
            self._tell(f"note: {translate(str(error))}")


class _Accelerator:
    """The few things that TRL's scripts ask of `trainer.accelerator`."""

    def __init__(self, world: World):
        self.process_index, self.num_processes = world.rank, world.size
        self.is_main_process = self.is_local_main_process = world.first
        self.wait_for_everyone = world.barrier

    def print(self, *words: Any, **options: Any) -> None:
        """Print in the first process alone."""
        if self.is_main_process:
            print(*words, **options)


def _world(args: PASTConfig, folder: Path) -> World:
    """The processes that the launcher started: joined once, however many trainers a script makes."""
    if not _WORLD:

        def advice() -> str:
            path = checkpoint.newest_whole(RunFolder(folder))[0]
            go_on = "continue with the same launcher and train(resume_from_checkpoint=True)"
            return "" if path is None else f"The newest checkpoint is {path}; {go_on}"

        world = distributed.join(advice)
        with together(world):
            world.connect(float(args.ddp_timeout))
        _WORLD.append(world)
    return _WORLD[0]


def _trackers(names: list[str] | str | None) -> list[str]:
    wanted = [names] if isinstance(names, str) else list(names or [])
    if wanted == ["all"]:
        return [name for name in BACKENDS if importlib.util.find_spec(name) is not None]
    return [name for name in wanted if name != "none"]


def _refuse_objects(model: Any, **given: Any) -> None:
    """Arguments of GRPOTrainer that have no counterpart, and objects where a name is needed."""
    if not isinstance(model, str | Path):
        name = getattr(getattr(model, "config", None), "_name_or_path", "") or "its folder or hub id"
        raise PastError(
            f"PASTTrainer(model=...) takes a folder or a hub id, not a {type(model).__name__}: it loads one base for "
            f"both adapters; nearest: model='{name}' with peft_config and model_init_kwargs"
        )
    reasons = {
        "reward_processing_classes": "reward models are not run; nearest: a function in reward_funcs",
        "optimizers": "each adapter has its own AdamW; nearest: learning_rate, teacher_learning_rate, adam_beta1",
        "quantization_config": "a base is folded with its adapter; nearest: model_init_kwargs={'dtype': 'bfloat16'}",
        "tools": "responses call no tools; nearest: reward_funcs",
        "rollout_func": "rollouts come from the engine; nearest: use_vllm",
        "environment_factory": "a response is one turn; nearest: reward_funcs",
    }
    for name, value in given.items():
        if value is not None:
            raise PastError(f"PASTTrainer({name}=...) is not possible: {reasons[name]}")


def _require_same(processing_class: Any, recipe: Recipe) -> None:
    given, own = getattr(processing_class, "tokenizer", processing_class), load_tokenizer(recipe.model)
    if not hasattr(given, "get_vocab"):
        raise PastError(f"processing_class must be a tokenizer, not {type(given).__name__}; or leave it out")
    other = [
        what
        for what, same in (
            ("vocabulary", tokenizer_text(given) == tokenizer_text(own)),
            ("chat template", given.chat_template == own.chat_template),
        )
        if not same
    ]
    if other:
        raise PastError(
            f"processing_class has another {' and '.join(other)} than the tokenizer of '{recipe.model.path}', which is "
            "used: leave it out, or save it into a copy of the model's folder and give that as model"
        )


def _named_sets(rows: Any) -> dict[str, Rows]:
    """The held-out datasets by name; one alone is called 'eval'."""
    if rows is None:
        return {}
    several = isinstance(rows, Mapping)
    named: dict[str, Rows] = dict(cast("Mapping[str, Rows]", rows)) if several else {EVALUATION: rows}
    for name in named:
        if name in ("train", "macro") or not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise PastError(f"eval_dataset: '{name}' cannot be a dataset's name; use letters, digits, '_', '-' and '.'")
    if not named:
        raise PastError("eval_dataset holds no dataset; leave it out to evaluate nothing")
    return named


def _write_data(folder: Path, sets: Mapping[str, Rows], prefix: str = "") -> tuple[dict[str, str], dict[str, int]]:
    """The datasets as JSON lines beside the run, so that a resume and every other command find them; their lengths."""
    run = RunFolder(folder)
    run.enclosed()
    files: dict[str, str] = {}
    counts: dict[str, int] = {}
    for name, rows in sets.items():
        several = name not in ("train", EVALUATION)
        path = run.data / f"{prefix}{f'{EVALUATION}-' if several else ''}{name}.jsonl"
        lines = [json.dumps(dict(row), ensure_ascii=False, default=str) + "\n" for row in rows]
        if not lines:
            raise PastError(f"{'train' if name == 'train' else 'eval'}_dataset holds no row")
        text = "".join(lines)
        there = path.is_file()
        if not there or path.read_text(encoding="utf-8") != text:
            if there and not prefix and run.steps():
                raise PastError(
                    f"{folder} holds a run with other data than this ({path} differs): choose another output_dir, or "
                    "give the datasets it was started with"
                )
            write_text(path, text)
        files[name], counts[name] = str(path), len(lines)
    return files, counts
