"""A run in a folder: assemble the parts a recipe names, train, evaluate, checkpoint, resume."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from past_opsd import __version__
from past_opsd.core import config, life, own
from past_opsd.core.config import Recipe
from past_opsd.core.files import WriteError
from past_opsd.core.lock import held
from past_opsd.core.nouns import PastError, derive_seed
from past_opsd.core.prompts import Prompts
from past_opsd.learner import Learner
from past_opsd.policy import templates
from past_opsd.policy.distributed import World
from past_opsd.policy.model import Model
from past_opsd.rollout.lab import Lab
from past_opsd.rollout.verifiers import Verifier
from past_opsd.run import checkpoint, evaluate, ledger, phase1
from past_opsd.run.evaluate import Evaluation, evaluation_steps
from past_opsd.run.folder import RunFolder
from past_opsd.run.health import Watcher, counted, droughts, entropy_health, evaluation_alarms, fork_health, health
from past_opsd.run.ledger import Ledger
from past_opsd.run.loop import Cycle, Loop
from past_opsd.run.profiling import Clock, Profile
from past_opsd.run.record import Recorder
from past_opsd.run.resume import chosen, continued, differences
from past_opsd.tasks import Task


class Display(Protocol):
    """Where progress goes."""

    def phase(self, cycle: int, name: str) -> None: ...

    def cycle(self, cycle: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, summary: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """A display that shows nothing: for every process but the first, and for runs inside of something else."""

    def phase(self, cycle: int, name: str) -> None: ...

    def cycle(self, cycle: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, summary: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass
class Session:
    """The parts of a run, built from its recipe."""

    recipe: Recipe
    model: Model
    learner: Learner
    loop: Loop
    task: Task
    notes: tuple[str, ...] = ()
    """What a person should know before the run."""
    ledger: Ledger = field(default_factory=Ledger)

    def close(self) -> None:
        """Stop the verifier's workers and what the engine started."""
        self.loop.lab.verifier.close()
        self.loop.lab.engine.close()

    @property
    def world(self) -> World:
        """The processes of this run."""
        return self.model.world

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that must be the same for a resume to mean anything; how many processes there are need not be."""
        recipe = config.dump(self.recipe)
        del recipe["distributed"]
        # A function is part of its verifier's or task's own identity.
        classes = {kind: thing for kind, thing in self.own_code().items() if own.is_own(recipe[kind]["name"])}
        return {
            **self.model.identity(),
            "settled": {"losses": self.learner.implementation, "adapters": self.model.lora_dtype},
            "task": self.task.identity,
            "verifier": self.loop.lab.verifier.identity,
            "recipe": recipe,
            **({"code": {kind: own.digest(thing) for kind, thing in classes.items()}} if classes else {}),
        }

    @property
    def origin(self) -> str:
        """A name for what the scores before the first update follow from: all but what training does afterwards."""
        later = ("name", "description", "method", "learner", "rollout")
        recipe = {key: section for key, section in self.identity["recipe"].items() if key not in later}
        recipe["run"] = {key: recipe["run"][key] for key in ("seed", "evaluation_seed", "threads")}
        text = json.dumps({**self.identity, "settled": None, "recipe": recipe}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def own_code(self) -> dict[str, Any]:
        """The classes and functions of one's own that run in this process, by section."""
        found: dict[str, Any] = {}
        for kind in config.PLUGINS:
            section = getattr(self.recipe, kind)
            name = section.path if section.name == config.FUNCTION else section.name
            if own.is_own(name) and not getattr(section, "workers", 0):
                found[kind] = own.find(name, kind)
        return found

    def evaluate(self, step: int) -> evaluate.Evaluation:
        """Avg@k of the student as it is now."""
        return evaluate.evaluate(
            self.loop.lab,
            self.loop.prompts,
            self.task,
            self.recipe.evaluation,
            adapter="student",
            versions=self.model.versions,
            # Methods of one training seed share draws, so they pair; other seeds draw anew, so they add evidence.
            seed=derive_seed(self.recipe.run.evaluation_seed, self.recipe.run.seed),
            step=step,
            max_context=self.model.max_context,
            tell=life.doing,
        )


def assemble(
    recipe: Recipe, verifier: Verifier | None = None, world: World | None = None, model: Model | None = None
) -> Session:
    """Build the model (or take the one there is), the task, the engine, the verifier and the method of a recipe."""
    world = world or World()
    threads = recipe.run.threads
    if not world.alone and not threads:
        threads = max(1, (os.cpu_count() or 1) // world.local_size)
    if threads:
        torch.set_num_threads(threads)
    seed = derive_seed(recipe.run.seed, "adapters") >> 1
    if model is None:
        life.doing(f"loading {recipe.model.path}")
        model = Model(recipe.model, seed, world, shard=recipe.distributed.shard)
    notes = templates.require(model.tokenizer, recipe.prompts, model.stops)
    prompts = Prompts(model.tokenizer, recipe.prompts)
    life.doing("reading the data")
    task = config.plugin("task", recipe.task.name).build(recipe.task)
    problems = task.train()
    life.doing("starting the engine and the verifier")
    engine = config.plugin("engine", recipe.engine.name).build(recipe.engine, model)
    if verifier is None:
        verifier = config.plugin("verifier", recipe.verifier.name).build(recipe.verifier)
    method = config.plugin("method", recipe.method.name).build(recipe.method, prompts, recipe.rollout)
    apart = bool(getattr(engine, "own_weights", False))
    drifts = apart or model.choice.dtype != "float32"
    learner = Learner(model, recipe.learner, recipe.run.cycles, drifts)
    around = nullcontext if apart else model.gathered
    lab = Lab(engine, cast(Verifier, verifier), world=world, around=around, tell=life.count)
    loop = Loop(
        recipe.run.seed, recipe.rollout, problems, prompts, method, lab, learner, model.max_context, recipe.run.cycles
    )
    loop.publish()
    life.doing("at work")
    told = [learner.note] if learner.note else []
    return Session(recipe, model, learner, loop, task, (*notes, *task.notes, *told))


@contextmanager
def session(recipe: Recipe, verifier: Verifier | None = None, world: World | None = None) -> Generator[Session]:
    """An assembled run, closed at the end."""
    assembled = assemble(recipe, verifier, world)
    try:
        yield assembled
    finally:
        assembled.close()


@dataclass
class Outcome:
    """How a run ended."""

    folder: Path
    completed: int
    cycles: int
    evaluations: dict[int, evaluate.Evaluation] = field(default_factory=dict[int, evaluate.Evaluation])
    warnings: list[str] = field(default_factory=list[str])

    @property
    def finished(self) -> bool:
        """All cycles were run."""
        return self.completed == self.cycles


def train(
    recipe: Recipe,
    folder: Path,
    resume: bool,
    display: Display,
    *,
    profile: bool = False,
    verifier: Verifier | None = None,
    stop: Callable[[], bool] = lambda: False,
    world: World | None = None,
    step: int | None = None,
    opened: Callable[[Session], None] = lambda assembled: None,
    patient: bool = True,
    again: str = "--resume",
    untrained: Path | None = None,
) -> Outcome:
    """Run the recipe's cycles in `folder`, from the start or from the newest whole checkpoint.

    `verifier` takes the place of the recipe's; `stop` is asked after every cycle whether to end there. A `patient` run
    answers the first Ctrl-C by finishing its cycle. `again` is how a person continues it, for messages. In a `world`
    of several processes all of them call this; the first alone writes and talks. A resume goes on from boundary `step`
    where that is given: what came after it is set aside. `opened` is shown the parts before the first cycle.
    In the folder `untrained` runs of a seed leave the scores before the first update for each other.
    """
    world, run = world or World(), RunFolder(folder)
    display = display if world.first else Silent()
    under_way = "stopping as soon as what was loaded is put together"

    def asking() -> AbstractContextManager[Callable[[], bool]]:
        if not patient:
            return nullcontext(lambda: False)
        return life.interruptible(lambda: under_way if world.first else "", terminate=world.alone)

    with (
        _continuable(run, again),
        _opened(recipe, run, resume, world, display, again) as existing,
        session(recipe, verifier, world) as assembled,
        asking() as asked,
    ):
        _enough(recipe, len(assembled.loop.problems))
        for note in assembled.notes:
            display.note(note)
        _same_setup(assembled)

        def stopping() -> bool:
            return world.any(asked() or stop())

        state: dict[str, Any] = {"next_cycle": 0}
        if existing:
            state = _restore(assembled, run, display, step)
        else:
            under_way = "finishing what comes before the first cycle, then a checkpoint"
            _begin(assembled, run, untrained)
        start = state["next_cycle"]
        opened(assembled)
        if hasattr(assembled.loop.lab.engine, "hear"):
            cast(Any, assembled.loop.lab.engine).hear(display.note)
        elsewhere = ("rollout", "draw") if getattr(assembled.loop.lab.engine, "own_weights", False) else ()
        profiler = Profile(run.profile, assembled.model, elsewhere) if profile and world.first else None

        def notify(cycle: int, name: str) -> None:
            display.phase(cycle, name)
            if profiler:
                profiler.phase(name)

        clock = Clock(notify)
        assembled.loop.lab.span = assembled.learner.span = clock.span
        if world.first:
            run.rewind(start)
        if existing:
            under_way = f"finishing what comes before cycle {start + 1}"
            _account(assembled, run, state, display)
        recorder = Recorder(run, assembled.ledger.digests, world.size) if world.first else None
        if recorder is not None and start == 0:
            recorder.prepared(phase1.seconds(run))
        watcher = Watcher(run.read_metrics()) if world.first else Watcher([])
        for k in range(start, recipe.run.cycles):
            if stopping():
                break
            clock.cycle = k
            under_way = _to_finish(recipe, k)
            with profiler.operations(k - start) if profiler else nullcontext():
                cycle = assembled.loop.cycle(k, clock.phase)
                clock.stop()
            if recorder is not None:
                metrics = _record(recorder, k, cycle, assembled.ledger.costs, clock.seconds(k))
                for warning in watcher.see(metrics):
                    display.note(f"cycle {k}: {warning}")
                display.cycle(k, metrics)
            _boundary(assembled, run, k + 1, display, clock, last=stopping())
            if profiler:
                profiler.write(clock)
        completed = world.share(lambda: run.steps()[-1])
    return outcome(recipe, run, completed) if world.first else Outcome(folder, completed, recipe.run.cycles)


@contextmanager
def _opened(
    recipe: Recipe, run: RunFolder, resume: bool, world: World, display: Display, again: str
) -> Generator[list[int]]:
    """The boundaries that the folder holds, which until the end no other process writes."""
    with held(run.path, display.note) if world.first else nullcontext():
        existing = world.share(lambda: ledger.existing(run, recipe))
        name = str(run.path.resolve())
        restarted = world.begun(name)
        if existing and not (resume or restarted):
            raise PastError(f"{run} already holds a run; choose another folder (--out), or continue it with: {again}")
        world.begin(name)
        if restarted:
            display.note("the launcher has started this job again, which goes on by itself")
        if (resume or restarted) and not existing:
            display.note(f"{run} holds no checkpoint yet; starting from the beginning")
        yield existing


def _evaluated(recipe: Recipe) -> set[int]:
    """The boundaries at which the run itself evaluates."""
    return set() if recipe.evaluation.beside else evaluation_steps(recipe)


def _to_finish(recipe: Recipe, k: int) -> str:
    then = "the evaluation there and a checkpoint" if k + 1 in _evaluated(recipe) else "a checkpoint"
    return f"finishing cycle {k + 1} of {recipe.run.cycles}, then {then}"


def _same_setup(session: Session) -> None:
    """Refuse processes that would not compute the same: another model revision, data file or package."""
    if session.world.alone:
        return
    setups = session.world.gather(session.identity)
    for rank, setup in enumerate(setups):
        found = differences(setups[0], setup)
        if found:
            lines = "\n".join(f"  {line}" for line in found)
            raise PastError(f"rank {rank} has another setup than rank 0:\n{lines}")


def _record(
    recorder: Recorder, k: int, cycle: Cycle, totals: dict[str, int], seconds: dict[str, float]
) -> dict[str, float]:
    for name, count in costs(cycle).items():
        totals[name] = totals.get(name, 0) + count
    return recorder.cycle(k, cycle, totals, seconds)


def _enough(recipe: Recipe, problems: int) -> None:
    if recipe.rollout.problems_per_cycle > problems:
        raise PastError(
            f"rollout.problems_per_cycle = {recipe.rollout.problems_per_cycle} is more than the task's "
            f"{problems} problems"
        )


def outcome(recipe: Recipe, run: RunFolder, completed: int) -> Outcome:
    """What the folder of a run shows."""
    evaluations, lines = run.read_evaluations(), run.read_metrics()
    warnings = counted(lines, "cycles") + droughts(lines)
    warnings += health(evaluations, recipe.evaluation.pass_k) + entropy_health(lines) + fork_health(lines)
    warnings += ledger.warnings(run)
    if evaluations:
        warnings += evaluation_alarms(evaluations[max(evaluations)])
    return Outcome(run.path, completed, recipe.run.cycles, evaluations, warnings)


def _begin(session: Session, run: RunFolder, untrained: Path | None) -> None:
    """What comes before the first cycle, up to its checkpoint."""
    # No draw of ours comes from a global stream; a user's verifier or task may, so those streams start from the seed.
    random.seed(derive_seed(session.recipe.run.seed, "python"))
    torch.manual_seed(derive_seed(session.recipe.run.seed, "torch") >> 1)
    if session.world.first:
        run.write_recipe(session.recipe)
        run.write_code({kind: own.source(thing) for kind, thing in session.own_code().items()})
    with phase1.kept(run, session.loop, session.world, session.identity):
        session.loop.prepare()
    # Code of one's own may draw from the global streams, so its evaluations are made.
    alike = untrained is not None and not session.model.versions["student"] and not session.own_code()
    _evaluate(session, run, 0, None, untrained / f"{session.origin}.json" if untrained and alike else None)
    _checkpoint(session, run, 0)


def _protected(recipe: Recipe, run: RunFolder) -> set[int]:
    """Boundaries whose checkpoints stay: where the recipe evaluates, and where the run was evaluated."""
    return evaluation_steps(recipe) | {s for s in run.steps() if run.evaluations.path(s).exists()}


def _restore(session: Session, run: RunFolder, display: Display, step: int | None = None) -> dict[str, Any]:
    """Everything as it was at a boundary; returns the checkpoint's plain state."""
    path, notes = session.world.share(lambda: chosen(run, step))
    for note in notes:
        display.note(note)
    if path is None:
        raise PastError(f"{run}: no checkpoint is whole; start again in another folder (--out)")
    if not path.is_dir():
        raise PastError(
            f"rank {session.world.rank} on {socket.gethostname()} does not see {path}; --out must be a folder that all "
            "machines share"
        )
    state = checkpoint.read_state(path)
    for note in continued(run, state, session.recipe, session.identity):
        display.note(note)
    checkpoint.restore(path, session.model, session.learner, state)
    if run.checkpoint(state["next_cycle"]) != path:
        raise PastError(f"{path}: its state.json is that of boundary {state['next_cycle']}, so it is another run's")
    checkpoint.restore_method(path, state, session.loop.method)
    session.loop.publish()
    if session.world.first:
        checkpoint.set_aside(run, after=state["next_cycle"], label="damaged" if step is None else "later")
        checkpoint.prune(run, session.recipe.run.keep_checkpoints, _protected(session.recipe, run))
    display.note(f"resuming from {path}")
    return state


def _account(session: Session, run: RunFolder, state: dict[str, Any], display: Display) -> None:
    """Take up what was counted before; where an evaluation of this very boundary is due, it is made (again)."""
    session.ledger = session.world.share(lambda: ledger.take_up(run, state, session.recipe, display.note))
    if session.world.share(lambda: not run.evaluations.path(state["next_cycle"]).is_file()):
        _evaluate(session, run, state["next_cycle"], display)
        checkpoint.restore_rng(state)


def _boundary(session: Session, run: RunFolder, step: int, display: Display, clock: Clock, last: bool) -> None:
    """After a complete cycle: evaluate and checkpoint where the recipe says so, and always at the end."""
    section = session.recipe.run
    due = step in evaluation_steps(session.recipe)  # here or elsewhere: of its checkpoint
    if not due and step % section.checkpoint_every and step != section.cycles and not last:
        return
    if step in _evaluated(session.recipe):
        clock.phase("evaluate")
        _evaluate(session, run, step, display)
        clock.stop()
    with clock.span("checkpoint"):
        _checkpoint(session, run, step)
    if session.world.first:
        checkpoint.prune(run, section.keep_checkpoints, _protected(session.recipe, run))


def _evaluate(session: Session, run: RunFolder, step: int, display: Display | None, shared: Path | None = None) -> None:
    """Where the recipe says so; another run may have left the same scores in the file that is `shared`."""
    if step not in _evaluated(session.recipe):
        return
    found = session.world.share(lambda: Evaluation.load(shared) if shared and shared.is_file() else None)
    evaluation = found or session.evaluate(step)
    if shared and not found and session.world.first:
        evaluation.save(shared)
    session.ledger.evaluated = sorted({*session.ledger.evaluated, step})
    if session.world.first:
        session.ledger.write(run, evaluation)
    told = session.loop.lab.engine.metrics()
    if display is not None:
        if told.get("engine/evictions"):
            display.note(
                f"evaluation after {step} updates: memory was short, so responses were set aside "
                f"{told['engine/evictions']:,} times and {told['engine/recomputed_tokens']:,} tokens read again"
            )
        display.evaluated(step, evaluation.summary(session.recipe.evaluation.pass_k))


def _checkpoint(session: Session, run: RunFolder, step: int) -> None:
    """Written by the first process; the others go on when it is complete."""
    if session.world.first:
        _save(session, run, step)
    session.world.barrier()


def _save(session: Session, run: RunFolder, step: int) -> None:
    position = step * session.recipe.rollout.problems_per_cycle
    state = {
        "method": session.loop.method.state(),
        "data_position": position,
        "rollout_seed": session.recipe.run.seed,
        "package": __version__,
        "identity": session.identity,
        "parameters": session.model.sizes,
        "records": session.ledger.dump(),
    }
    checkpoint.save(run, step, session.model, session.learner, state)


def costs(cycle: Cycle) -> dict[str, int]:
    """Samples, tokens and verifier calls of one cycle, by role; what was sampled counts, trained on or not.

    Where continuations were drawn ahead, those that no group needed are told apart too.
    """
    student = [a.response for a in cycle.sampled]
    unused = [c.response for group in cycle.groups for c in group.unused]
    teacher = [c.response for group in cycle.groups for c in group.drawn] + unused
    ahead = {"cost/teacher_ahead_samples": len(unused), "cost/teacher_ahead_tokens": sum(len(r.tokens) for r in unused)}
    return {
        "cost/student_samples": len(student),
        "cost/student_tokens": sum(len(r.tokens) for r in student),
        "cost/student_truncated": sum(not r.finished for r in student),
        "cost/teacher_samples": len(teacher),
        "cost/teacher_tokens": sum(len(r.tokens) for r in teacher),
        "cost/teacher_truncated": sum(not r.finished for r in teacher),
        "cost/verifier_calls": len(student) + len(teacher),
        **(ahead if unused else {}),
    }


@contextmanager
def _continuable(run: RunFolder, again: str) -> Generator[None]:
    """Where a file could not be written, say what the run goes on from."""
    try:
        yield
    except WriteError as error:
        path, _ = checkpoint.newest_whole(run)
        kept = f"no boundary was complete yet; put that right and start it again with: {again}"
        if path is not None:
            step = checkpoint.read_state(path)["next_cycle"]
            kept = f"the run is whole up to boundary {step}; put that right and continue it from there with: {again}"
        raise PastError(f"{error}; {kept}") from None
