"""What a run tells of itself as it goes: callback events, TRL's names for its numbers, its responses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from past_opsd.core.files import whole
from past_opsd.interface.trl.config import EVALUATION
from past_opsd.interface.trl.messages import translate
from past_opsd.interface.trl.rewards import RewardVerifier
from past_opsd.interface.ui import TrainDisplay
from past_opsd.run import attempts
from past_opsd.run.evaluate import Evaluation
from past_opsd.run.folder import RunFolder

if TYPE_CHECKING:
    from past_opsd.interface.trl.trainer import PASTTrainer

pa: Any = pyarrow  # it has no types
pq: Any = pyarrow.parquet


@dataclass(frozen=True)
class Steps:
    """What the trainer does as a run goes on."""

    recall: Callable[[int], None]
    reached: Callable[[int], None]
    event: Callable[[str], None]
    logs_at: Callable[[int], bool]
    log: Callable[[dict[str, float]], None]
    evaluated: Callable[[dict[str, float]], None]


class Events:
    """A display that turns the run's progress into callback events, behind a progress bar where one is wanted."""

    reads_records = True
    """Callbacks may look into the run's folder."""

    def __init__(self, trainer: PASTTrainer, steps: Steps, bar: TrainDisplay | None):
        self._trainer = trainer
        self._steps = steps
        self._bar = bar
        self._epoch: int | None = None

    def phase(self, cycle: int, name: str) -> None:
        if self._bar is not None:
            self._bar.phase(cycle, name)
        if name != "rollout":
            return
        self._steps.recall(cycle)
        epoch = int(self._trainer.state.epoch or 0.0)
        if epoch != self._epoch:
            self._epoch = epoch
            self._steps.event("on_epoch_begin")
        self._steps.event("on_step_begin")

    def cycle(self, cycle: int, metrics: dict[str, float]) -> None:
        if self._bar is not None:
            self._bar.cycle(cycle, metrics)
        trainer, step = self._trainer, cycle + 1
        self._steps.reached(step)
        self._steps.event("on_step_end")
        if int(trainer.state.epoch or 0.0) != self._epoch or step == trainer.state.max_steps:
            self._steps.event("on_epoch_end")
        logged = trainer.verifier.collected() if isinstance(trainer.verifier, RewardVerifier) else {}
        if self._steps.logs_at(step):
            self._steps.log(named(metrics) | logged)
            if trainer.args.log_completions:
                completions(trainer, step)

    def evaluated(self, step: int, summary: dict[str, float]) -> None:
        if self._bar is not None:
            self._bar.evaluated(step, summary)
        found = RunFolder(self._trainer.folder).read_evaluation(step)
        self._steps.evaluated(evaluated(found, self._trainer.recipe.evaluation.pass_k))

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.note(translate(text))
        else:
            print(f"note: {translate(text)}", file=sys.stderr)


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Ours and, beside them, the names TRL's users plot."""
    known = {
        "rollout/mean_length": "completions/mean_length",
        "rollout/truncated": "completions/clipped_ratio",
        "rollout/success": "reward",
        "student/distill/loss": "self_distillation/distillation_loss",
        "student/distill/entropy": "entropy",
    }
    return dict(metrics) | {theirs: metrics[ours] for ours, theirs in known.items() if ours in metrics}


def evaluated(found: Evaluation, pass_k: Sequence[int], prefix: str = EVALUATION) -> dict[str, float]:
    """Ours and, beside them, TRL's names: `eval_reward`, and `eval_NAME_reward` for each of several datasets."""
    summary = found.summary(pass_k)
    theirs = {
        "reward": f"avg@{found.samples}",
        "completions/mean_length": "mean_length",
        "completions/clipped_ratio": "truncated",
    }
    out = {f"{prefix}_{name}": value for name, value in summary.items()}
    out |= {f"{prefix}_{name}": summary[f"macro/{ours}"] for name, ours in theirs.items()}
    for task in found.tasks if list(found.tasks) != [EVALUATION] else ():
        out |= {f"{prefix}_{task}_{name}": summary[f"{task}/{ours}"] for name, ours in theirs.items()}
    return out


def completions(trainer: PASTTrainer, step: int) -> None:
    """Print a step's responses with their rewards, and write them where TRL does."""
    run = RunFolder(trainer.folder)
    rows = [row for row in attempts.read(run.rollouts.path(step - 1)) if not row["discarded"]]
    if trainer.args.log_unique_prompts:
        rows = list({row["problem"]: row for row in rows}.values())
    decode = trainer.processing_class.decode
    texts = [(decode(row["prompt_tokens"]), row["text"], float(row["correct"])) for row in rows]
    columns = {
        name: list(values)
        for name, values in zip(("prompt", "completion", "reward"), zip(*texts, strict=True), strict=True)
    }
    with whole(run.completions.path(step)) as part:
        pq.write_table(pa.table({"step": [step] * len(texts), **columns}), part)
    shown = Table("Prompt", "Completion", "Reward", title=f"Step {step}", show_lines=True)
    for prompt, completion, reward in texts[: trainer.args.num_completions_to_print]:
        shown.add_row(Text(prompt), Text(completion), f"{reward:g}")
    Console().print(shown)
