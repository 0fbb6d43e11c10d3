"""What a person sees in the terminal: progress, tables, coloured prompts. Plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from past_opsd.analysis.tables import interval
from past_opsd.core import life
from past_opsd.core.stats import EDGE, bootstrap, choose_unit
from past_opsd.run.evaluate import Evaluation
from past_opsd.run.frames import Run
from past_opsd.run.health import evaluation_alarms
from past_opsd.run.profiling import verdict


def screen() -> Console:
    """The terminal; in a notebook, which is none though it may say so, plain lines."""
    found = Console()
    return Console(force_jupyter=False, force_terminal=False, width=120) if found.is_jupyter else found


class _Now(ProgressColumn):
    """What the command does at this moment, how far it is and for how long."""

    def render(self, task: Task) -> Text:
        return Text(life.state())


class TrainDisplay:
    """Progress of one run: a live bar on a terminal, a line every tenth of the run elsewhere; `life` adds its own."""

    def __init__(self, console: Console, title: str, cycles: int):
        self._console = console
        self._title = title
        self._cycles = cycles
        self._start: tuple[int, float] | None = None  # first cycle and when it began
        self._numbers = ""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=6),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[state]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            _Now(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task(title, total=cycles, state="starting")

    def __enter__(self) -> TrainDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, cycle: int, name: str) -> None:
        self._start = self._start or (cycle, time.monotonic())
        life.doing(f"cycle {cycle + 1} of {self._cycles}, {name}")
        done = cycle + 1 if name == "evaluate" else cycle
        self._progress.update(self._task, completed=done, state=f"{name:8s} {self._numbers}")

    def cycle(self, cycle: int, metrics: dict[str, float]) -> None:
        shown = {"student": "rollout/success", "teacher": "failed/success"}
        self._numbers = " ".join(f"{role} {metrics[key]:.2f}" for role, key in shown.items() if key in metrics)
        done = cycle + 1
        self._progress.update(self._task, completed=done)
        if not self._console.is_terminal and (done % max(1, self._cycles // 10) == 0 or done == self._cycles):
            first, began = self._start or (cycle, time.monotonic())
            left = f"{(time.monotonic() - began) / (done - first) * (self._cycles - done):.0f} s left"
            self._console.print(f"{self._title}: cycle {done}/{self._cycles}, {self._numbers}, {left}", highlight=False)

    def evaluated(self, step: int, summary: dict[str, float]) -> None:
        key = next(k for k in summary if k.startswith("macro/avg@"))
        self._console.print(
            f"{self._title}: after {step} updates {key.removeprefix('macro/')} {100 * summary[key]:.1f}",
            highlight=False,
        )

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", style="yellow", highlight=False, soft_wrap=True)


def closing(console: Console, run: Run, pass_k: Sequence[int], again: str) -> None:
    """The summary at the end of a run; `again` is the command that continues it."""
    outcome, lines, timings = run.outcome(), run.files.read_metrics(), run.files.read_timings()
    metrics = lines[-1] if lines else {}
    if outcome.evaluations:
        console.print(evaluation_table(outcome.evaluations, pass_k))
    if metrics:
        student, teacher = (_sampled(role, metrics) for role in ("student", "teacher"))
        console.print(student, highlight=False)
        console.print(f"{teacher}; verifier {metrics['cost/verifier_calls']:,.0f} calls", highlight=False)
        if metrics.get("cost/phase1_samples"):
            before = [f"{metrics[f'cost/phase1_{k}']:,.0f}" for k in ("samples", "tokens", "verifier_calls")]
            console.print("before cycle 0: {} samples, {} tokens; verifier {} calls".format(*before), highlight=False)
    where = verdict(timings)
    if where:
        console.print(where, highlight=False)
    for warning in outcome.warnings:
        console.print(f"warning: {warning}", style="bold red", highlight=False, soft_wrap=True)
    if outcome.finished:
        console.print(f"run: {outcome.folder}", highlight=False, soft_wrap=True)
    else:
        kept = run.files.newest()
        console.print(f"stopped after {outcome.completed} of {outcome.cycles} cycles", highlight=False)
        console.print(f"checkpoint: {kept}", highlight=False, soft_wrap=True, markup=False)
        console.print(f"continue with: {again}", highlight=False, soft_wrap=True, markup=False)


def _sampled(role: str, metrics: Mapping[str, float]) -> str:
    """What a role wrote in training, and how much of it the token limit cut."""
    samples = metrics[f"cost/{role}_samples"]
    text = f"{role} {samples:,.0f} samples, {metrics[f'cost/{role}_tokens']:,.0f} tokens"
    cut = metrics.get(f"cost/{role}_truncated")  # earlier versions did not count them
    return text if cut is None or not samples else f"{text}, {100 * cut / samples:.1f} % cut by the limit"


def evaluation_table(evaluations: Mapping[int, Evaluation], pass_k: Sequence[int]) -> Table:
    """Avg@k by task over evaluated boundaries."""
    first = next(iter(evaluations.values()))
    table = Table(title=f"Avg@{first.samples} (%)", title_justify="left")
    table.add_column("updates", justify="right")
    for name in (*first.tasks, "macro"):
        table.add_column(name, justify="right")
    last_k = max(pass_k)
    table.add_column(f"pass@{last_k}", justify="right")
    table.add_column("length", justify="right")
    table.add_column("cut", justify="right")
    for step, evaluation in sorted(evaluations.items()):
        summary = evaluation.summary(pass_k)
        values = [f"{100 * summary[f'{name}/avg@{evaluation.samples}']:.1f}" for name in (*first.tasks, "macro")]
        values += [f"{100 * summary[f'macro/pass@{last_k}']:.1f}", f"{summary['macro/mean_length']:.1f}"]
        values.append(f"{100 * summary['macro/truncated']:.1f}")
        table.add_row(str(step), *values)
    return table


def evaluated(console: Console, evaluation: Evaluation, pass_k: Sequence[int]) -> None:
    """One evaluation in full: every metric by task, with the 95 % interval of the macro average."""
    summary = evaluation.summary(pass_k)
    metrics = list(dict.fromkeys(key.split("/", 1)[1] for key in summary))
    table = Table(title=f"{evaluation.samples} samples a problem", title_justify="left")
    table.add_column("")
    for name in (*evaluation.tasks, "macro"):
        table.add_column(name, justify="right")
    for metric in metrics:
        share = 1.0 if metric == "mean_length" else 100.0
        row = [f"{share * summary[f'{name}/{metric}']:.1f}" for name in (*evaluation.tasks, "macro")]
        table.add_row(metric + ("" if metric == "mean_length" else " %"), *row)
    console.print(table)
    outcomes = {name: o[None] for name, o in evaluation.outcomes().items()}
    unit = choose_unit(outcomes)
    if unit is not None:
        over = "draws" if unit == "sample" else "problems"
        found = interval(bootstrap(outcomes, unit=unit))
        text = f"macro Avg@{evaluation.samples} {found} (95 %, over {over}; {EDGE})"
        console.print(text, highlight=False, soft_wrap=True)
    for name, result in evaluation.tasks.items():
        reasons = ", ".join(f"{reason} {n}" for reason, n in result.reasons.items())
        console.print(f"{name}: {reasons}", highlight=False, soft_wrap=True)
    for warning in evaluation_alarms(evaluation):
        console.print(f"warning: {warning}", style="bold red", highlight=False, soft_wrap=True)
    if evaluation.dropped:
        console.print(f"{evaluation.dropped} problems were left out: prompt and response do not fit", style="bold red")
