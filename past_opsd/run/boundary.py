"""A finished or running training run opened at one of its checkpoints, for the commands that look into it.

The parts are rebuilt from the run's own recipe, both adapters are loaded and published, and nothing is trained. What
is measured along token ids goes from hidden states through the head chunk by chunk: no [T, V] of a whole response.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from past_opsd.core import config, life
from past_opsd.core.nouns import Adapter, Attempt, PastError, Problem, Response, Verdict, View, derive_seed
from past_opsd.policy import packing
from past_opsd.policy.packing import Read
from past_opsd.policy.pretrained import on_disk
from past_opsd.rollout.lab import Work
from past_opsd.run import checkpoint
from past_opsd.run.folder import RunFolder
from past_opsd.run.resume import since
from past_opsd.run.train import Session, session
from past_opsd.tasks._rows import on_disk as data_on_disk

# Without these the adapters mean something else; a changed verifier or recipe is only worth a note.
_ESSENTIAL = ("base", "expert", "tokenizer", "chat_template")
# Parameters from which several threads make a forward shorter.
LARGE = 10_000_000
# Chunk-sized tensors alive at once while a divergence is taken, beside one per view.
_COPIES = 8


@dataclass
class Boundary:
    """The parts of a run at one boundary, or of a recipe before its first cycle."""

    session: Session
    run: RunFolder | None
    teacher: Adapter
    step: int = 0
    notes: list[str] = field(default_factory=list[str])

    @property
    def seed(self) -> int:
        return self.session.recipe.run.seed

    def move(self, step: int) -> None:
        """Load both adapters of another checkpoint and let the engine serve them."""
        assert self.run is not None
        self.notes = enter(self.session, self.run.checkpoint(step))
        self.step = step

    def description(self) -> dict[str, Any]:
        """Which run, which step: the head of every file written about it."""
        recipe = self.session.recipe
        return {"step": self.step, "recipe": recipe.name, "method": recipe.method.name, "seed": self.seed}


@contextmanager
def opened(folder: Path, step: int, trust: bool = False) -> Generator[Boundary]:
    """The run at the checkpoint of this step. Code that its recipe names is run only with `trust`."""
    run = RunFolder(folder)
    require_trust(run, entrusted(run.recipe()), trust)
    with _looked_into(config.load(run.recipe_file)) as assembled:
        boundary = Boundary(assembled, run, teacher_adapter(assembled))
        boundary.move(step)
        yield boundary


@contextmanager
def untrained(recipe: config.Recipe) -> Generator[Boundary]:
    """A recipe's parts before its first cycle."""
    with _looked_into(recipe) as assembled:
        yield Boundary(assembled, None, teacher_adapter(assembled))


@contextmanager
def _looked_into(recipe: config.Recipe) -> Generator[Session]:
    """A recipe's parts; a large model takes the cores that there are, since a look is no run beside others."""
    threads = torch.get_num_threads()
    with session(recipe) as assembled:
        if assembled.model.sizes["base"] >= LARGE:
            torch.set_num_threads(threads)
        yield assembled


def code(recipe: config.Recipe) -> list[str]:
    """What a recipe would run that is not in this package."""
    sections = {kind: config.dump(recipe)[kind] for kind in config.PLUGINS}
    named = [f"{kind}.name = {s['name']!r}" for kind, s in sections.items() if config.is_foreign(s["name"])]
    functions = [kind for kind, section in sections.items() if section["name"] == config.FUNCTION]
    named += [f"{kind}.path = {sections[kind]['path']!r}" for kind in functions]
    return named + ["model.trust_remote_code = true"] * recipe.model.trust_remote_code


def remote(recipe: config.Recipe) -> list[str]:
    """What a recipe would fetch from the hub, because it is not on this machine."""
    wanted = {"model.path": recipe.model.path, "model.expert": recipe.model.expert}
    revisions = {"model.path": recipe.model.revision}
    models = {key: path for key, path in wanted.items() if path and not on_disk(path, revisions.get(key))}
    task = config.dump(recipe)["task"]
    sets: dict[str, Any] = task.get("evaluation") if isinstance(task.get("evaluation"), dict) else {}
    sources = {"task.train": task.get("train")} | {f"task.evaluation.{name}": source for name, source in sets.items()}
    data = {key: source for key, source in sources.items() if isinstance(source, str) and not data_on_disk(source)}
    return [f"{key} = {name!r} from the hub" for key, name in (models | data).items()]


def reached(recipe: config.Recipe) -> list[str]:
    """What a recipe's engine would be given or send that nobody vouches for."""
    return config.ask_engine(recipe).unvouched()


def entrusted(recipe: config.Recipe) -> list[str]:
    """Everything that a person must say is all right before somebody else's recipe is put to work."""
    return [*code(recipe), *remote(recipe), *reached(recipe)]


def require_trust(run: RunFolder, named: Sequence[str], trust: bool) -> None:
    """A run's folder may be somebody else's: what its recipe names is run, fetched or asked when a person says so."""
    if named and not trust:
        fetched = [name for name in named if name.endswith("from the hub")]
        sent = [name for name in named if name.startswith("engine.urls")]
        rest = [name for name in named if name not in fetched and name not in sent]
        kinds = {"run code from outside the package": rest, "fetch": fetched, "send": sent}
        would = "; ".join(f"{what}: {', '.join(names)}" for what, names in kinds.items() if names)
        raise PastError(
            f"{run.recipe_file} would {would}. Nothing of it was done. "
            "If it is yours, or you trust it, say so with --trust, from Python with trust=True"
        )


def choose(folder: Path, step: int | None) -> tuple[int, list[str]]:
    """The wanted boundary, or the newest whole one with a line for each damaged one passed over."""
    run = RunFolder(folder)
    run.recipe()
    kept = run.steps()
    if not kept:
        raise PastError(f"{run}: the run has no checkpoint yet")
    if step is None:
        path, notes = checkpoint.newest_whole(run)
        if path is None:
            raise PastError(f"{run}: no checkpoint is whole; " + "; ".join(notes))
        return run.checkpoints.number(path), notes
    if step not in kept:
        raise PastError(f"{run}: no checkpoint of step {step}; kept are {', '.join(map(str, kept))}")
    problem = checkpoint.damage(run.checkpoint(step))
    if problem is not None:
        others = ", ".join(str(s) for s in kept if s != step) or "none"
        raise PastError(f"{run.checkpoint(step)} is damaged ({problem}); other steps kept: {others}")
    return step, []


def whole(folder: Path) -> tuple[list[int], list[str]]:
    """Every undamaged boundary, and a line for each damaged one."""
    choose(folder, None)
    run = RunFolder(folder)
    problems = {step: checkpoint.damage(run.checkpoint(step)) for step in run.steps()}
    notes = [f"{run.checkpoint(s)} is damaged ({p}); left out" for s, p in problems.items() if p is not None]
    return [step for step, problem in problems.items() if problem is None], notes


def enter(session: Session, path: Path) -> list[str]:
    """The parts as they were at a checkpoint, both adapters served; a line for whatever else is not as in training."""
    state = checkpoint.read_state(path)
    notes = _compare(state.get("identity"), session, path)
    checkpoint.load_adapters(session.model, path)
    checkpoint.restore_method(path, state, session.loop.method)
    session.loop.publish()
    return notes


def _compare(saved: Any, session: Session, path: Path) -> list[str]:
    changes = since(saved, session.identity, session.recipe)
    bad = [f"  {key}: {old!r} -> {new!r}" for key, old, new in changes if key in _ESSENTIAL]
    if bad:
        raise PastError("\n".join([f"{path} was trained on another model; restore what it had:", *bad]))
    # A key that the run did not have yet has its default now.
    return [f"changed since training: {key}: {old!r} -> {new!r}" for key, old, new in changes if old is not None]


def teacher_adapter(session: Session) -> Adapter:
    """Whose weights the run's teacher has; refuses methods without a privileged teacher."""
    view = own_view(session)
    name = session.recipe.method.name
    if view.adapter == "expert":
        raise PastError(f"method '{name}' learns from a separate expert that reads the prefix alone: nothing to probe")
    if view == _prototype(session).view:
        raise PastError(f"method '{name}' has no privileged teacher: there is nothing to probe")
    return view.adapter


def own_view(session: Session) -> View:
    """What the run's own teacher reads for an empty, correct attempt at the first problem."""
    return session.loop.method.teacher_view(_prototype(session))


def own_condition(session: Session) -> str:
    """Which prompt the run's own teacher reads: a probe's 'matching' or 'removed', else 'reference' or 'other'."""
    problem, prompts = session.loop.problems[0], session.loop.prompts
    known = {prompts.reference(problem): "reference"}  # where it is the removed one, that is what a probe calls it
    known |= {prompts.hindsight(problem, ""): "matching", prompts.removed(problem): "removed"}
    return known.get(own_view(session).prompt, "other")


def _prototype(session: Session) -> Attempt:
    problem = session.loop.problems[0]
    view = View("student", session.loop.prompts.student(problem))
    return Attempt(problem, view, Response((), "", (), True), Verdict(True, "correct"))


def pick(problems: Sequence[Problem], count: int, *seed: int | str) -> list[Problem]:
    """Up to `count` different problems, seeded."""
    order = np.random.default_rng(derive_seed(*seed)).permutation(len(problems))
    return [problems[i] for i in order[:count]]


def responses(at: Boundary, problems: Sequence[Problem], samples: int, role: str) -> list[Attempt]:
    """Fresh student responses from X alone; problems whose prompt leaves no room are left out."""
    loop = at.session.loop
    work = [
        Work(problem, View("student", prompt), derive_seed(at.seed, role, at.step, problem.id, "student", sample))
        for problem in problems
        for prompt in [loop.prompts.student(problem)]
        if len(prompt) + loop.rollout.student.max_new_tokens <= loop.max_context
        for sample in range(samples)
    ]
    return loop.attempt(work, loop.rollout.student)


@torch.no_grad()
def read(at: Boundary, units: Sequence[Sequence[Read]]) -> Iterator[tuple[int, dict[Read, Tensor]]]:
    """Each unit's number with the hidden states that predict the tokens of its reads, [tokens, H] each.

    Units are read in batches within `learner.token_budget`. Where that pays, a batch is one row an adapter, in which
    every beginning stands once: mostly they are the same examples, problems and responses over and over.
    """
    model, budget = at.session.model, at.session.recipe.learner.token_budget
    everything = packing.by_adapter([read for unit in units for read in unit])
    shared = model.shares_prompts and all(packing.Tree(reads, model.worth).pays for reads in everything.values())
    widths = [max(len(packing.sequence(read)) for read in unit) for unit in units]
    heights = list(map(len, units))
    done = 0
    for batch in packing.alike(units, budget) if shared else packing.batches(widths, budget, heights):
        states: dict[Read, Tensor] = {}
        for reads in packing.by_adapter([read for i in batch for read in units[i]]).values():
            found = model.hidden(reads, [len(reads)] if shared else [])
            states |= zip(reads, torch.split(found, [len(tokens) for _, tokens in reads]), strict=True)
        yield from ((i, {read: states[read] for read in units[i]}) for i in batch)
        done += len(batch)
        life.count(done, len(units), "are read")


@torch.no_grad()
def along(at: Boundary, states: Sequence[Tensor], measure: Callable[[list[Tensor]], Tensor]) -> np.ndarray:
    """What `measure` says of the log-probabilities of a path's readers at each of its tokens, [K, tokens].

    `states` are the path's hidden states, one a reader; `measure` gets one [rows, V] a reader and gives [K, rows].
    """
    model, budget = at.session.model, at.session.recipe.learner.loss_memory_mib << 20
    rows = max(1, budget // (4 * len(model.head) * (len(states) + _COPIES)))
    chunks = zip(*(torch.split(s, rows) for s in states), strict=True)
    values = torch.cat([measure([model.log_probs(s) for s in chunk]) for chunk in chunks], dim=1)
    return values.double().cpu().numpy()


@torch.no_grad()
def next_token(at: Boundary, views: Sequence[View]) -> np.ndarray:
    """The next token's distribution after each view's prompt, float64 [views, V]; one adapter for all."""
    model = at.session.model
    distinct = list(dict.fromkeys(views))
    out = np.empty((len(distinct), len(model.head)))
    # The one token only marks the position that predicts it; it is not read.
    for i, states in read(at, [[(view, (0,))] for view in distinct]):
        out[i] = torch.softmax(model.logits(states[distinct[i], (0,)]).double(), dim=-1).cpu().numpy()[0]
    index = {view: row for row, view in enumerate(distinct)}
    return out[[index[view] for view in views]]
