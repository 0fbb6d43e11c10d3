"""`past data check`: what a data file would give, before anything is trained on it."""

from __future__ import annotations

import argparse
import random
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import Attempt, PastError, Problem, Response, Verdict, View, derive_seed
from past_opsd.rollout.verifiers import Reason
from past_opsd.tasks import benchmarks
from past_opsd.tasks._columns import ALIASES, Loaded, load
from past_opsd.tasks._overlap import RUN, Overlap, Repeats, normalise, overlaps, repeats
from past_opsd.tasks.dataset import Options, check_mapping, held_out_reading, split, training

WIDTH = 80
_PROBE = r"\boxed{987654321987}"  # no gold answer: what a verifier says to it shows whether it can read the gold
_FEW = 5


@dataclass
class Report:
    """Lines for a terminal, and whether a run would refuse the data."""

    lines: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])

    def head(self, text: str) -> None:
        self.lines += ["", text] if self.lines else [text]

    def say(self, text: str, indent: int = 2) -> None:
        pad = " " * indent
        self.lines += textwrap.wrap(
            text, WIDTH, initial_indent=pad, subsequent_indent=pad + "  ", break_on_hyphens=False
        )

    def row(self, text: str) -> None:
        """One line, cut where it is too long."""
        self.lines.append(_short(text, WIDTH))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `past data`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser("check", help="what would be used of a file, and what is wrong with it")
    check.add_argument("source", nargs="?", help="a file, a folder or hf:owner/name (default: the recipe's)")
    check.add_argument("--recipe", help="read as this recipe reads, and compare lengths with its budget")
    check.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override")
    check.add_argument("--column", action="append", default=[], metavar="ROLE=NAME", help="e.g. problem=Question")
    check.add_argument("--evaluation", nargs="+", default=[], metavar="[NAME=]SOURCE", help="held-out sets to compare")
    check.add_argument("--benchmark", default="", metavar="NAMES", help="held-out sets by name: aime24,hmmt25,...")
    check.add_argument("--rows", type=int, default=3, help="rows to show, drawn at random (default 3)")
    check.add_argument("--seed", type=int, default=0, help="which rows are shown (default 0)")


def run(args: argparse.Namespace) -> int:
    """`past data check`: 1 when a run would refuse the data."""
    if args.rows < 0:
        raise PastError(f"--rows {args.rows}: give 0 or more")
    recipe = config.load(args.recipe, args.overrides) if args.recipe else None
    if recipe is None and args.overrides:
        raise PastError("--set changes a recipe: name one with --recipe")
    report = check(recipe, args)
    print("\n".join(report.lines))
    return 1 if report.refused else 0


def check(recipe: Recipe | None, args: argparse.Namespace) -> Report:
    """Every section of the report."""
    source, options = _source(recipe, args)
    reading, held_out = training(options), held_out_reading(options)
    report = Report()
    loaded = load(source, reading)
    check_mapping(loaded, options)
    report.head(_short(source, WIDTH))
    _rows(report, loaded, options)
    _roles(report, loaded)
    for note in loaded.notes:
        report.say(note)
    sets = {name: load(source, held_out) for name, source in _held_out(recipe, args).items()}
    for name, other in sets.items():
        report.head(_short(f"held-out set {name}", WIDTH))
        _rows(report, other, options)
    if loaded.problems:
        if options.hold_out:
            _, apart = split(loaded.problems, options.hold_out)
            report.head(f"{len(apart)} problems are kept out of training (task.hold_out)")
        if options.needs_answer:
            _answers(report, recipe, loaded.problems)
        if recipe is not None:
            _lengths(report, recipe, loaded.problems)
        _repeated(report, loaded.problems)
        for name, other in sets.items():
            _overlapping(report, name, other.problems, overlaps(loaded.problems, other.problems))
        _examples(report, loaded.problems, args.rows, args.seed)
    report.head("would be refused:" if report.refused else "nothing would be refused")
    for reason in report.refused:
        report.say(reason)
    return report


def _source(recipe: Recipe | None, args: argparse.Namespace) -> tuple[str, Options]:
    """What to read, and how: as the recipe says, or as the arguments say."""
    if recipe is not None and recipe.task.name == "dataset":
        if args.column:
            raise PastError("--column: the recipe says which columns are read; use --set task.columns.problem=NAME")
        return args.source or recipe.task.train, recipe.task
    if args.source is None:
        raise PastError("name a file, a folder or hf:owner/name, or a --recipe whose task is 'dataset'")
    empty: dict[str, Any] = {"evaluation": {}, "keep": []}
    return args.source, Options.model_validate(empty | {"train": args.source, "columns": columns(args.column)})


def columns(pairs: Sequence[str]) -> dict[str, str]:
    """Columns by role, from ROLE=NAME."""
    found: dict[str, str] = {}
    for pair in pairs:
        role, _, name = pair.partition("=")
        if role not in ALIASES or not name:
            raise PastError(f"--column {pair}: write ROLE=NAME with a role of {', '.join(ALIASES)}")
        found[role] = name
    return found


def _held_out(recipe: Recipe | None, args: argparse.Namespace) -> dict[str, str]:
    """Sources by name: those given, else those of the recipe."""
    found = dict(named(entry) for entry in args.evaluation)
    if args.benchmark:
        found |= benchmarks.sources([name.strip() for name in args.benchmark.split(",")], {})
    if not found and recipe is not None and recipe.task.name == "dataset":
        return dict(recipe.task.evaluation)
    return found


def named(entry: str) -> tuple[str, str]:
    """`name=source`, or a source that names itself; a hub's settings hold signs of equality too."""
    name, sign, source = entry.partition("=")
    if not sign or name.startswith("hf:"):
        return (entry if entry.startswith("hf:") else Path(entry).stem), entry
    return name, source


def _roles(report: Report, loaded: Loaded) -> None:
    for role in ("problem", "solution", "answer"):
        origins = ", ".join(f"{origin} ({n})" for origin, n in loaded.used[role].most_common())
        report.say(f"{role:<9}<- {origins or 'nothing'}")
    roles = {origin.split(",")[0] for role in ALIASES for origin in loaded.used[role]}
    others = [column for column in loaded.columns if column not in roles]
    if others:
        report.say(f"further columns: {', '.join(others)}")


def _rows(report: Report, loaded: Loaded, options: Options) -> None:
    report.say(f"{loaded.rows} rows, {len(loaded.problems)} usable, {len(loaded.bad)} bad")
    if loaded.bad:
        for line in loaded.listing().split("\n"):
            report.say(line.strip(), indent=4)
        if options.bad_rows == "refuse" or not loaded.problems:
            report.refused.append(f'{len(loaded.bad)} bad rows of {loaded.source} (leave out: task.bad_rows = "skip")')


def _answers(report: Report, recipe: Recipe | None, problems: Sequence[Problem]) -> None:
    """Each gold answer against itself, and against one that is surely another."""
    name = recipe.verifier.name if recipe is not None else "boxed_math"
    module = config.plugin("verifier", name)
    with module.build(recipe.verifier if recipe is not None else module.Options()) as verifier:
        same = verifier.verify([(p, Response((), rf"\boxed{{{p.answer}}}", (), True)) for p in problems])
        other = verifier.verify([(p, Response((), _PROBE, (), True)) for p in problems])
    bad = [
        (p, a if not a.correct else b)
        for p, a, b in zip(problems, same, other, strict=True)
        if not a.correct or b.reason == Reason.BAD_GOLD
    ]
    report.head("answers")
    report.say(f"{len(problems) - len(bad)} of {len(problems)} are read by the verifier '{name}'")
    for problem, verdict in bad[:_FEW]:
        report.row(f"    {problem.id}: {verdict.reason}: {problem.answer}")
    if len(bad) > _FEW:
        report.row(f"    and {len(bad) - _FEW} more")
    if bad:
        report.say("no response to these can be right; mend or remove them")


@dataclass(frozen=True)
class Need:
    """Tokens one problem needs: prompts, and whole sequences without and with a response of full length."""

    student: int
    teacher: int
    solution: int
    least: int
    most: int


def _lengths(report: Report, recipe: Recipe, problems: Sequence[Problem]) -> None:
    """Prompts in tokens, and what the loop would drop for want of room."""
    limit, tokens = needs(recipe, problems)
    report.head(f"tokens, with {recipe.name}; room for {limit} in one sequence")
    report.row(f"    {'':<34}{'median':>10}{'95 %':>10}{'longest':>10}")
    for name, values in (
        ("student prompt", [n.student for n in tokens]),
        ("teacher prompt, without an attempt", [n.teacher for n in tokens]),
        ("reference solution", [n.solution for n in tokens]),
        ("whole, with the longest response", [n.most for n in tokens]),
    ):
        report.row(f"    {name:<34}{statistics.median_low(values):>10}{at_95(values):>10}{max(values):>10}")
    never = sum(n.least > limit for n in tokens)
    maybe = sum(n.least <= limit < n.most for n in tokens)
    report.say(f"{never} of {len(tokens)} do not fit and would be dropped each time")
    report.say(f"{maybe} of {len(tokens)} would be dropped where the response is long")
    if never == len(tokens):
        report.refused.append("no problem fits the context")


def at_95(values: Sequence[int]) -> int:
    """The 95th percentile, one of the values."""
    return sorted(values)[round(0.95 * (len(values) - 1))]


def needs(recipe: Recipe, problems: Sequence[Problem]) -> tuple[int, list[Need]]:
    """The model's room for one sequence, and what each problem takes of it."""
    from past_opsd.core.prompts import Prompts
    from past_opsd.policy.pretrained import load_tokenizer, read_config

    tokenizer = load_tokenizer(recipe.model)
    tokenizer.model_max_length = 1 << 40  # it would warn of the lengths that are measured here
    text = read_config(recipe.model).get_text_config()
    own = text.to_dict().get(text.attribute_map.get("max_position_embeddings", "max_position_embeddings"))
    limit = min(n for n in (own, recipe.model.max_context, 1 << 40) if n is not None)
    prompts = Prompts(tokenizer, recipe.prompts)
    method = config.plugin("method", recipe.method.name).build(recipe.method, prompts, recipe.rollout)
    longest = recipe.rollout.student.max_new_tokens
    drawn = recipe.rollout.teacher.max_new_tokens if method.explores else 0

    def teacher(problem: Problem, student: View, said: str) -> int:
        """The longer of the teacher's two prompts, whatever the outcome was."""
        response = Response(prompts.completion(said), said, (), True)
        attempts = (Attempt(problem, student, response, Verdict(ok, "")) for ok in (False, True))
        return max(len(method.teacher_view(attempt).prompt) for attempt in attempts)

    def need(problem: Problem) -> Need:
        view = View("student", prompts.student(problem))
        student, solution = len(view.prompt), len(prompts.encode(problem.solution))
        if not method.rollouts:
            room = method.room(problem)
            return Need(student, 0, solution, room, room)
        bare = teacher(problem, view, "")
        shown = longest if reads_attempt else 0
        least = max(student + longest, bare + 1)
        return Need(student, bare, solution, least, max(student + longest, bare + shown + max(longest, drawn)))

    first = View("student", prompts.student(problems[0]))
    reads_attempt = teacher(problems[0], first, "one two three four") > teacher(problems[0], first, "")
    return limit, [need(problem) for problem in problems]


def _repeated(report: Report, problems: Sequence[Problem]) -> None:
    report.head("repeats")
    found: dict[str, Repeats] = {
        "the same text": repeats(problems, str),
        "the same but for case, spaces, punctuation": repeats(problems, normalise),
    }
    for name, same in found.items():
        report.say(f"{same.surplus} rows repeat another: {name}")
    loose = found["the same but for case, spaces, punctuation"]
    for group in loose.groups[:_FEW]:
        report.row(f"    {', '.join(p.id for p in group[:4])}: {group[0].text}")
    if loose.conflicts:
        report.say(f"{len(loose.conflicts)} problems stand there with different answers:")
        for group in loose.conflicts[:_FEW]:
            report.row("    " + ", ".join(f"{p.id} says {_short(p.answer, 20)}" for p in group[:3]))


def _overlapping(report: Report, name: str, problems: Sequence[Problem], found: Sequence[Overlap]) -> None:
    report.head(_short(f"overlap with {name} ({len(problems)} problems)", WIDTH))
    exact = sum(o.exact for o in found)
    half = sum(o.share >= 0.5 and not o.exact for o in found)
    report.say(f"{exact} stand in the training data (case, spaces and punctuation aside)")
    report.say(f"{len(found) - exact} more share a run of {RUN} words with a training problem, {half} at least half")
    for o in sorted(found, key=lambda o: -o.share)[:_FEW]:
        report.row(f"    {o.held_out.id} ~ {o.training.id}, {o.share:.0%}: {o.held_out.text}")


def _examples(report: Report, problems: Sequence[Problem], count: int, seed: int) -> None:
    rng = random.Random(derive_seed(seed, "data check"))
    chosen = rng.sample(range(len(problems)), min(max(0, count), len(problems)))
    for i in sorted(chosen):
        problem = problems[i]
        report.head(_short(f"row {problem.id}", WIDTH))
        for name, text in (("problem", problem.text), ("solution", problem.solution), ("answer", problem.answer)):
            report.lines += list(_block(name, text))


def _block(name: str, text: str) -> Iterator[str]:
    """A text in at most four lines."""
    lines = textwrap.wrap(" ".join(text.split()), WIDTH - 12, max_lines=4, placeholder=" …") or ["(empty)"]
    for i, line in enumerate(lines):
        yield f"  {name if i == 0 else '':<10}{line}"


def _short(text: str, width: int) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= width else text[: width - 1] + "…"
