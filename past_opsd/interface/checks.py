"""What `past doctor` looks at: prompts, data, evaluation and the objectives of a recipe, each a row of its table.

A check gives back what is wrong with one repeat, in words; where nothing is, the repeat has passed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from past_opsd.core import config, life
from past_opsd.core.config import PromptsSection, Recipe, Sampling
from past_opsd.core.losses import Advantaged, Loss, Match
from past_opsd.core.nouns import (
    Adapter,
    Attempt,
    Problem,
    Response,
    Term,
    Tokens,
    Verdict,
    View,
    derive_seed,
    route,
)
from past_opsd.core.prompts import Prompts
from past_opsd.interface import exact
from past_opsd.interface.exact import Size
from past_opsd.learner import NonFiniteError
from past_opsd.methods import distill
from past_opsd.policy.templates import check as check_templates
from past_opsd.rollout.engines import Engine, Request
from past_opsd.run.evaluate import evaluation_steps
from past_opsd.run.train import Session
from past_opsd.tasks import Problems

LOSS_BOUND = 1e-3
HALF_BOUND = 1e-2  # the paper's own implementations in bfloat16 are 0.0025 to 0.0038 off
COSINE_BOUND = 0.999
LONGEST = 64  # tokens of a made response
PAPER = "paper/"
PAPER_TASKS = {"aime24", "aime25", "hmmt25"}

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the table: the mean of what was observed, how many repeats passed, and a word on it."""

    name: str
    observed: list[float]
    passed: int
    note: str = ""
    warnings: tuple[str, ...] = ()
    """What the runs of this check warned of; they fail nothing."""

    @staticmethod
    def of(name: str, wrong: Sequence[Sequence[str]], note: str = "") -> Row:
        """From what is wrong with each repeat: 1 where nothing is, else 0; the note names each thing once."""
        observed = [float(not found) for found in wrong]
        said = "; ".join(dict.fromkeys(text for found in wrong for text in found))
        return Row(name, observed, sum(map(int, observed)), ". ".join(filter(None, [said, note])))


class Watch:
    """Says on stderr what is being checked: a line that moves on a terminal, a line for each check elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )

    def __enter__(self) -> Watch:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items, one after the other."""
        todo = list(items)
        start, task = time.monotonic(), self._progress.add_task(name, total=len(todo))
        for done, item in enumerate(todo):
            life.doing(f"checking: {name}, {done + 1} of {len(todo)}")
            yield item
            self._progress.advance(task)
        self._progress.remove_task(task)
        if not self._console.is_terminal:
            text = f"checked: {name} ({len(todo)} in {time.monotonic() - start:.1f} s)"
            self._console.print(text, highlight=False, soft_wrap=True)


def choose(problems: Sequence[Problem], repeats: int) -> list[Problem]:
    """So many of the problems, some twice where there are fewer."""
    order = np.random.default_rng(derive_seed("doctor", len(problems))).permutation(len(problems))
    return [problems[order[i % len(order)]] for i in range(repeats)]


def placeholder(i: int) -> Problem:
    """A problem where there are no data."""
    return Problem(f"doctor-{i}", f"What is {i} + {i}?", f"{i} + {i} = {2 * i}. \\boxed{{{2 * i}}}", str(2 * i))


# Model and thinking mode


def prompt_modes(recipe: Recipe, tokenizer: Any, problems: Sequence[Problem], watch: Watch) -> Row:
    """The template renders every role, and every argument that the recipe gives it changes what a role reads."""
    name = "Model and thinking mode"
    findings = check_templates(tokenizer, recipe.prompts)
    broken = [f.text for f in findings if f.level == "error"]
    notes = [f.text for f in findings if f.level != "error" and f.code != "ignored"]
    wrong = [[*broken] or _modes(recipe.prompts, tokenizer, problem) for problem in watch.each(name, problems)]
    return Row.of(name, wrong, "; ".join(notes))


ROLES: Mapping[str, Callable[[Prompts, Problem], Tokens]] = {
    "student": lambda prompts, problem: prompts.student(problem),
    "teacher": lambda prompts, problem: prompts.hindsight(problem, "an attempt"),
    "evaluation": lambda prompts, problem: prompts.evaluation(problem),
}


def _modes(section: PromptsSection, tokenizer: Any, problem: Problem) -> list[str]:
    prompts = Prompts(tokenizer, section)
    wrong: list[str] = []
    for role, render in ROLES.items():
        kwargs: dict[str, Any] = getattr(section, f"{role}_kwargs")
        for key, value in kwargs.items():
            other = {k: v for k, v in kwargs.items() if k != key}
            others = [other | {key: not value}] if isinstance(value, bool) else [other]
            versions = [section.model_copy(update={f"{role}_kwargs": o}) for o in others]
            if any(render(Prompts(tokenizer, version), problem) == render(prompts, problem) for version in versions):
                wrong.append(
                    f"the chat template ignores {key} = {str(value).lower()} of prompts.{role}_kwargs: the model is "
                    "not in the mode that the recipe states; take the key out, or use a template that knows it"
                )
    if len({render(prompts, problem) for render in ROLES.values()}) < 2:
        wrong.append("student, teacher and evaluation read the same prompt")
    return wrong


# Training-data protocol


def training_protocol(session: Session, recipe: Recipe, problems: Sequence[Problem], watch: Watch) -> Row:
    """The student reads X alone; the teacher reads what its method gives it; both fit with the whole response."""
    name = "Training-data protocol"
    wrong: list[list[str]] = []
    too_long = 0
    for problem, other in watch.each(name, zip(problems, [*problems[1:], problems[0]], strict=True)):
        attempt = made_attempt(session, problem, other)
        teacher = session.loop.method.teacher_view(attempt)
        too_long += len(teacher.prompt) + recipe.rollout.student.max_new_tokens > session.model.max_context
        wrong.append(_data(session, recipe, attempt, teacher))
    note = f"{too_long} of {len(problems)} do not fit the context and would be dropped" if too_long else ""
    return Row.of(name, wrong, note)


def _data(session: Session, recipe: Recipe, attempt: Attempt, teacher: View) -> list[str]:
    decode, problem = session.model.tokenizer.decode, attempt.problem
    student = decode(list(attempt.view.prompt))
    wrong: list[str] = []
    if not _holds(decode, attempt.view.prompt, problem.text):
        wrong.append("the student's prompt does not hold the problem in full")
    if problem.solution.strip() and problem.solution.strip() in student:
        wrong.append(f"problem {problem.id}: the student's prompt holds the reference solution")
    elif told(problem, problem.text):
        wrong.append(f"problem {problem.id}: the text of the problem tells its answer to the student")
    if attempt.view.adapter != "student":
        wrong.append(f"the student's prompt is read by '{attempt.view.adapter}'")
    if config.ask_method(recipe).reads_response and not _holds(decode, teacher.prompt, attempt.response.text):
        wrong.append("the teacher's prompt does not hold the student's response, as the method has it")
    return wrong


def told(problem: Problem, text: str) -> bool:
    """Whether a text says what the answer is: boxed, or after the words 'answer' or 'solution'."""
    answer = re.escape("".join(problem.answer.split()))
    if not answer:
        return False
    plain = "".join(text.split())
    said = rf"(?:answer|solution)(?:is|:|=|is:)+\$?{answer}(?![\w.,]*\d)"
    return bool(re.search(rf"\\boxed\{{{answer}\}}|{said}", plain, re.IGNORECASE))


def _holds(decode: Callable[[list[int]], str], prompt: Tokens, text: str) -> bool:
    """Whether a prompt contains a text, white space aside (tokenizers may normalise it)."""
    return "".join(text.split()) in "".join(decode(list(prompt)).split())


def made_attempt(session: Session, problem: Problem, words: Problem | None = None, correct: bool = False) -> Attempt:
    """A problem's reference (its own, or that of `words`) in the place of a response: nothing need be sampled."""
    source = words or problem
    text = source.solution or source.answer
    tokens = session.loop.prompts.completion(text)
    response = Response(tokens, text, (), True)
    view = View("student", session.loop.prompts.student(problem))
    return Attempt(problem, view, response, Verdict(correct, "correct" if correct else "wrong"))


# Evaluation protocol


class Recording:
    """An engine that notes what it was asked and what it answered."""

    streams = False

    def __init__(self, engine: Engine):
        self._engine = engine
        self.seen: list[tuple[Request, Sampling, Response]] = []

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, versions: Mapping[Adapter, int]
    ) -> list[Response]:
        responses = self._engine.sample(requests, sampling, versions)
        self.seen += [(request, sampling, response) for request, response in zip(requests, responses, strict=True)]
        return responses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def evaluation_protocol(
    session: Session, recipe: Recipe, repeats: int, watch: Watch, tokens: int, context: int | None = None
) -> Row:
    """Held-out problems are held out, and a real evaluation of them does what the recipe states; for a recipe of the
    paper, what the paper states. `session` may be another model's; responses are cut after so many tokens.
    """
    name = "Evaluation protocol"
    stated = recipe.evaluation
    short = stated.sampling.model_copy(update={"max_new_tokens": min(tokens, stated.sampling.max_new_tokens)})
    section = stated.model_copy(update={"sampling": short})
    sets = {task: tuple(choose(problems, repeats)) for task, problems in session.task.evaluation().items()}
    sets = {task: tuple({p.id: p for p in problems}.values()) for task, problems in sets.items()}
    engine = Recording(session.loop.lab.engine)
    run = session.recipe.run.model_copy(update={"seed": recipe.run.seed, "evaluation_seed": recipe.run.evaluation_seed})
    looked = replace(
        session,
        recipe=session.recipe.model_copy(update={"evaluation": section, "run": run}),
        task=Problems(session.task.identity, (), sets, session.task.style),
        loop=replace(session.loop, lab=replace(session.loop.lab, engine=engine)),
    )
    looked.evaluate(0)
    training = {" ".join(p.text.split()) for p in session.loop.problems}
    paper = paper_differences(recipe) if recipe.name.startswith(PAPER) else []
    limit = session.model.max_context if context is None else context
    wrong: list[list[str]] = []
    for problem in watch.each(name, [p for problems in sets.values() for p in problems]):
        found = [*paper]
        if " ".join(problem.text.split()) in training:
            found.append(f"held-out problem {problem.id} is also trained on")
        if not problem.answer:
            found.append(f"held-out problem {problem.id} has no answer to compare with")
        prompt = session.loop.prompts.evaluation(problem)
        if len(prompt) + stated.sampling.max_new_tokens > limit:
            found.append(f"prompts with evaluation.sampling.max_new_tokens do not fit the context of {limit} tokens")
        found += _draws(session, recipe, problem, section.sampling, engine.seen) + _truncated(session, problem)
        wrong.append(found)
    return Row.of(name, wrong, protocol_text(recipe))


def _draws(
    session: Session,
    recipe: Recipe,
    problem: Problem,
    sampling: Sampling,
    seen: Sequence[tuple[Request, Sampling, Response]],
) -> list[str]:
    """What the evaluation asked the engine for, beside what the recipe states, and what the engine made of it."""
    view = View("student", session.loop.prompts.evaluation(problem))
    own = [(request, how, response) for request, how, response in seen if request.view == view]
    wrong: list[str] = []
    k = recipe.evaluation.samples
    if len(own) != k:
        wrong.append(f"the evaluation draws {len(own)} responses of the student to its evaluation prompt, not {k}")
    seed = derive_seed(recipe.run.evaluation_seed, recipe.run.seed)
    if {request.seed for request, _, _ in own} != {derive_seed(seed, "evaluation", problem.id, i) for i in range(k)}:
        wrong.append("the evaluation's draws are not those of its seeds")
    asked = sampling.model_dump()
    for _, how, _ in own[:1]:
        wrong += [
            f"the evaluation samples with {key} = {value:g}, and the recipe states {asked[key]:g}"
            for key, value in how.model_dump().items()
            if value != asked[key]
        ]
    if own and sampling.temperature > 0:
        request, _, response = own[0]
        error = _off(session, request.view, response, sampling.temperature)
        if error > (0.2 if session.model.head.dtype.itemsize == 2 else LOSS_BOUND):
            wrong.append(
                f"log-probabilities of evaluated responses are {error:.2g} off those at temperature "
                f"{sampling.temperature:g}: the engine samples from another distribution"
            )
    return wrong


@torch.no_grad()
def _off(session: Session, view: View, response: Response, temperature: float) -> float:
    """The largest difference of a response's log-probabilities from those of the model at a temperature."""
    states = session.model.hidden([(view, response.tokens)])
    logp = session.model.log_probs(states, temperature)
    own = logp.gather(-1, torch.tensor(response.tokens, device=logp.device).unsqueeze(-1)).squeeze(-1)
    return float((own.cpu() - torch.tensor(response.logprobs)).abs().max())


def _truncated(session: Session, problem: Problem) -> list[str]:
    """A response that the token limit cut counts as a failure, whatever stands in it."""
    text = f"{problem.solution}\n\\boxed{{{problem.answer}}}"
    (verdict,) = session.loop.lab.verifier.verify([(problem, Response((0,), text, (0.0,), False))])
    return ["a response that was cut at the token limit counts as right"] if verdict.correct else []


def paper_differences(recipe: Recipe) -> list[str]:
    """Where a recipe evaluates otherwise than the paper says: Avg@12 at temperature 1, three sets, five checkpoints."""
    section = recipe.evaluation
    found = {
        "evaluation.samples": (section.samples, 12),
        "evaluation.sampling.temperature": (section.sampling.temperature, 1.0),
        "evaluation.sampling.top_p": (section.sampling.top_p, 1.0),
        "evaluation.sampling.top_k": (section.sampling.top_k, 0),
        "evaluation.sampling.min_p": (section.sampling.min_p, 0.0),
        "run.cycles": (recipe.run.cycles, 100),
        "boundaries evaluated": (sorted(evaluation_steps(recipe)), [0, 25, 50, 75, 100]),
        "held-out sets": (sorted(getattr(recipe.task, "evaluation", {}) or {}), sorted(PAPER_TASKS)),
    }
    return [f"{key}: {mine}, the paper has {paper}" for key, (mine, paper) in found.items() if mine != paper]


def protocol_text(recipe: Recipe) -> str:
    """What the recipe states, in a line."""
    e = recipe.evaluation
    cut = "no cut" if e.sampling.top_p == 1 and e.sampling.top_k == 0 and e.sampling.min_p == 0 else "cut support"
    return (
        f"Avg@{e.samples} at temperature {e.sampling.temperature:g}, {cut}, "
        f"{e.sampling.max_new_tokens:,} new tokens (the paper: Avg@12 at temperature 1)"
    )


# The recipe's objectives


def made_terms(session: Session, problem: Problem, other: Problem) -> dict[Adapter, list[Term]]:
    """Both phases' terms on one right and one wrong response to a problem, with continuations of both outcomes.

    The wrong response and continuations are in the words of another problem's reference.
    """
    method = session.loop.method
    right, wrong = made_attempt(session, problem, correct=True), made_attempt(session, problem, other)
    batch = route([_cut(right), _cut(wrong)] if method.rollouts else [], [problem, other])

    def draw(requests: Sequence[tuple[int, int]]) -> list[Attempt]:
        drawn = [(right if index % 2 == 0 else wrong, batch.failed[i]) for i, index in requests]
        return [replace(_cut(made), view=method.teacher_view(failed)) for made, failed in drawn]

    groups = method.explore(batch.failed, draw)
    found: dict[Adapter, list[Term]] = {
        "teacher": method.teacher_terms(batch, groups),
        "student": method.student_terms(batch),
    }
    return {phase: terms for phase, terms in found.items() if terms}


def _cut(attempt: Attempt) -> Attempt:
    tokens = attempt.response.tokens[:LONGEST]
    return replace(attempt, response=replace(attempt.response, tokens=tokens))


def losses_of(terms: Iterable[Term]) -> list[tuple[Callable[..., Any], bool, float]]:
    """The different losses of some terms, each with whether it reads a frozen view and its temperature."""
    found = {(Loss.of(t.loss).key, t.frozen is None, t.temperature): t for t in terms}
    return [(t.loss, t.frozen is not None, t.temperature) for t in found.values()]


def numerics(session: Session, size: Size, repeats: int, watch: Watch) -> list[Row]:
    """The recipe's own objectives in the chosen implementation against their definitions in float32 autograd: the
    whole gradient of both phases, and every loss on made states of a model's size where its clip binds.
    """
    section = session.recipe.learner
    errors: list[float] = []
    cosines: list[float] = []
    failures: list[str] = []
    problems = choose(session.loop.problems, repeats + 1)
    pairs = list(pairwise(problems))
    for repeat, (problem, other) in enumerate(watch.each("Batch loss and gradient", pairs)):
        phases = made_terms(session, problem, other)
        losses = losses_of(term for terms in phases.values() for term in terms)
        error, cosine = exact.made(session.learner.implementation, losses, size, seed=repeat)
        for phase, terms in phases.items():
            try:
                value, gradient = session.learner.gradient(phase, terms)
            except NonFiniteError as failure:
                failures.append(str(failure))
                error, cosine = float("inf"), -1.0
                continue
            want, slope = exact.gradient(session.model, phase, terms, section.reduction)
            error = max(error, abs(value - want))
            cosine = min(cosine, exact.alike(gradient, slope))
        errors.append(error)
        cosines.append(cosine)
    dtype = str(size.dtype).removeprefix("torch.")
    bound = HALF_BOUND if size.dtype.itemsize == 2 else LOSS_BOUND
    note = f"{session.learner.implementation} in {dtype} against float32 autograd, at most {bound:g}"
    note = ". ".join([*dict.fromkeys(failures), note])
    return [
        Row("Batch-loss absolute error", errors, sum(e <= bound for e in errors), note),
        Row("Batch-gradient cosine", cosines, sum(c >= COSINE_BOUND for c in cosines)),
    ]


# CPU semantic tests


def semantics(session: Session, repeats: int, watch: Watch, note: str = "") -> Row:
    """What holds whatever the model, `SEMANTICS`; the adapters of `session` must be off the identity, and one moves."""
    name = "CPU semantic tests"
    observed: list[float] = []
    wrong: list[str] = []
    problems = choose(session.loop.problems, repeats + 1)
    for problem, other in watch.each(name, list(pairwise(problems))):
        failed = [text for text, holds in SEMANTICS.items() if not holds(session, problem, other)]
        wrong += failed
        observed.append(1 - len(failed) / len(SEMANTICS))
    said = "; ".join(f"it does not hold that {text}" for text in dict.fromkeys(wrong))
    return Row(name, observed, sum(value == 1.0 for value in observed), ". ".join(filter(None, [said, note])))


def outcome_is_hidden(session: Session, problem: Problem, other: Problem) -> bool:
    """No prompt of the teacher depends on the verdict, unless the method is defined so."""
    if session.loop.method.tells_outcome:
        return True
    views = [
        session.loop.method.teacher_view(made_attempt(session, problem, other, correct)) for correct in (True, False)
    ]
    return views[0] == views[1]


def match(attempt: Attempt, frozen: View) -> Term:
    """The exact KL to a frozen view."""
    return distill(attempt, frozen, Match(), 1.0)


def equal_contexts(session: Session, problem: Problem, other: Problem) -> bool:
    """The same view twice: the divergence and its gradient vanish, so prompts and tokens are aligned."""
    attempt = made_attempt(session, problem)
    value, gradient = session.learner.gradient("student", [match(attempt, attempt.view)])
    return abs(value) < 1e-5 and float(gradient.abs().max()) < 1e-4


def as_stated(session: Session, problem: Problem, other: Problem) -> bool:
    """Every term has the loss, the clip, the temperature and the forks that the recipe's method states."""
    options = config.ask_method(session.recipe)
    stated = options.losses()
    for terms in made_terms(session, problem, other).values():
        for term in terms:
            if stated and (term.name not in stated or Loss.of(term.loss).key != Loss.of(stated[term.name]).key):
                return False
            if term.name == "distill" and term.temperature != getattr(options, "temperature", term.temperature):
                return False
            if term.name == "distill" and term.forks != getattr(options, "at_forks", None):
                return False
    return True


def rewards_success(session: Session, problem: Problem, other: Problem) -> bool:
    """A policy gradient's step makes what succeeded likelier and what failed less likely."""
    success, failure = (_cut(made_attempt(session, problem, words)).response.tokens for words in (problem, other))
    for phase, terms in made_terms(session, problem, other).items():
        for term in terms:
            if not isinstance(term.loss, Advantaged) or not term.loss.advantage or success == failure:
                continue
            right = (term.tokens == success) == (term.loss.advantage > 0)
            _, step = session.learner.gradient(phase, [replace(term, weight=1.0, forks=None)])
            _, likelier = exact.gradient(session.model, phase, [exact.imitation(term)], "sequence")
            towards = exact.alike(step, likelier) > 0  # the gradient of -log pi points away from the tokens
            if not right or towards != (term.loss.advantage > 0):
                return False
    return True


def one_moves(session: Session, problem: Problem, other: Problem) -> bool:
    """A step of the student moves the student alone."""
    teacher, student = (session.model.digest(adapter) for adapter in ("teacher", "student"))
    attempt = made_attempt(session, problem)
    session.learner.step("student", [match(attempt, View("base", attempt.view.prompt))])
    return session.model.digest("teacher") == teacher and session.model.digest("student") != student


SEMANTICS: Mapping[str, Callable[[Session, Problem, Problem], bool]] = {
    "the outcome enters no prompt": outcome_is_hidden,
    "equal contexts have no divergence": equal_contexts,
    "the terms are those that the method states": as_stated,
    "a policy gradient rewards success": rewards_success,
    "one adapter moves at a time": one_moves,
}
