"""The `past` command."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from past_opsd import __version__
from past_opsd.core import arguments, life
from past_opsd.core.nouns import PastError

if TYPE_CHECKING:
    from past_opsd.core import config
    from past_opsd.policy.distributed import World

Run = Callable[[argparse.Namespace], int]
Arguments = Callable[[argparse.ArgumentParser], None]

SEVERAL = ("train", "eval")  # commands that several processes run together


@dataclass(frozen=True)
class Command:
    """A line of the help, and the words of an example after the command's name.

    `run` is a module of the package with `run(args)` and, where `arguments` names no other place, a quick
    `add_arguments(parser)`; or a function of this file. What only the work needs is imported by the work.
    """

    name: str
    summary: str
    example: str
    run: str | Run
    arguments: Arguments | None = None
    recipe: bool = False

    @property
    def line(self) -> str:
        """The example as it is typed."""
        return f"past {self.name} {self.example}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: a user's mistake is one message and exit code 2, never a stack trace."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(words[0] if words else "")
    args = parser.parse_args(words)
    if args.run is None:
        parser.print_help()
        return 2
    args.words = words
    try:
        if words[0] not in SEVERAL and _several():
            return 2
        with life.beating(words):
            code = args.run(args)
        sys.stdout.flush()  # here, where a reader that went away is no accident
        return code
    except PastError as error:
        print(f"past: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"past: {stop or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go; at the end of the process it would be tried again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("PAST_DEBUG"):
            raise
        return _unexpected(error)


def printable(text: str) -> str:
    """Text as a terminal may show it: what a file says may not steer the terminal, nor fail to be written."""
    kept = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return "".join(kept).encode("utf-8", "backslashreplace").decode()


def _unexpected(error: Exception) -> int:
    """A folder that is not ours to write, or a mistake of this package: one message either way."""
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        print(f"past: {printable(': '.join([*names, error.strerror]))}", file=sys.stderr)
        return 2
    said = printable(f"{type(error).__name__}: {error}")
    print(f"past: this is a bug of past ({said:.300}); PAST_DEBUG=1 shows where", file=sys.stderr)
    return 70


class _Past(argparse.ArgumentParser):
    """The whole command: its help is the table of commands, by task."""

    def format_help(self) -> str:
        lines = ["usage: past COMMAND ...", "", self.description or ""]
        for group, commands in COMMANDS.items():
            lines += ["", f"{group}, e.g. {commands[0].line}"]
            lines += [f"  {command.name:10s}  {command.summary}" for command in commands]
        lines += ["", "Each has its own page: past COMMAND --help. The version: past --version", ""]
        return "\n".join(lines)


def build_parser(command: str) -> argparse.ArgumentParser:
    """All commands; only the one given is asked for its arguments."""
    parser = _Past(prog="past", description="On-policy self-distillation with PAST and its baselines.")
    parser.add_argument("--version", action="version", version=f"past-opsd {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for entry in chain.from_iterable(COMMANDS.values()):
        own = commands.add_parser(
            entry.name,
            help=entry.summary,
            description=f"{entry.summary[0].upper()}{entry.summary[1:]}",
            epilog=f"example:\n  {entry.line}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if entry.name == command:
            _fill(own, entry)
    return parser


def _fill(parser: argparse.ArgumentParser, entry: Command) -> None:
    if entry.recipe:
        arguments.recipe(parser)
    if entry.arguments is not None:
        entry.arguments(parser)
    elif isinstance(entry.run, str):
        importlib.import_module(f"past_opsd.{entry.run}").add_arguments(parser)
    parser.set_defaults(run=partial(_run, entry.run) if isinstance(entry.run, str) else entry.run)


def _run(module: str, args: argparse.Namespace) -> int:
    return importlib.import_module(f"past_opsd.{module}").run(args)


def _recipes(args: argparse.Namespace) -> int:
    from past_opsd.core import config

    found = config.shipped_descriptions()
    width = max(map(len, found))
    for name, description in found.items():
        print(f"{name:{width}s}  {description}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from past_opsd.core import config

    print(config.to_toml(config.load(args.recipe, args.overrides)), end="")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from past_opsd.core import config

    recipe = config.load(args.recipe, args.overrides)
    from rich.console import Console

    from past_opsd.interface.look import inspect

    inspect(Console(), recipe, args.index, args.dry)
    return 0


def _several() -> bool:
    """Whether a launcher started several processes; the first of them says that this command is not for that."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    if os.environ.get("RANK", "0") == "0":
        print(f"past: only {' and '.join(SEVERAL)} run as several processes; start this without it", file=sys.stderr)
    return True


def _train(args: argparse.Namespace) -> int:
    try:
        return _train_together(args)
    except KeyboardInterrupt:
        from past_opsd.run.folder import RunFolder

        kept = None if args.out is None else RunFolder(args.out).newest()
        if kept is None:
            raise KeyboardInterrupt(f"stopped before it wrote a checkpoint; start again with: {_again(args)}") from None
        raise KeyboardInterrupt(
            f"stopped at once; the last checkpoint is {kept}\ncontinue with: {_again(args)}"
        ) from None


def _train_together(args: argparse.Namespace) -> int:
    from past_opsd.core import config
    from past_opsd.policy.distributed import joined

    with joined(lambda: _continue(args)) as world:
        recipe = config.load(_own_recipe(args), args.overrides)
        args.out = args.out or Path("runs") / f"{recipe.name.replace('/', '-')}-{recipe.run.seed}"
        world.connect(recipe.distributed.timeout_seconds)
        if world.first:
            return _train_aloud(args, recipe, world)
        from past_opsd.run.train import Silent, train

        return 0 if train(recipe, args.out, args.resume, Silent(), world=world).finished else 130


def _own_recipe(args: argparse.Namespace) -> str:
    """The recipe to load; the folder of a run, given as such or by --out alone, stands for the recipe in it."""
    from past_opsd.core import config
    from past_opsd.run.folder import RunFolder

    if args.recipe in config.shipped():
        return args.recipe
    if args.recipe is None and (args.out is None or not args.resume):
        raise PastError("give a recipe ('past recipes' lists them); --resume --out RUN alone continues that run")
    folder = Path(args.out if args.recipe is None else args.recipe)
    if not folder.is_dir():
        if args.recipe is None:
            raise PastError(f"{folder} is no folder of a run, so there is nothing to continue; give a recipe")
        return args.recipe
    run = RunFolder(folder)
    if not run.exists():
        raise PastError(f"{folder} holds no {run.recipe_file.name}, so it is no folder of a run; give a recipe")
    args.out = args.out or folder
    return str(run.recipe_file)


def _again(args: argparse.Namespace) -> str:
    """This command line once more, to continue what it began."""
    words = [*args.words, *([] if args.resume else ["--resume"])]
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return f"the same launcher and: past {shlex.join(words)}"
    return shlex.join([*life.program(), *words])


def _continue(args: argparse.Namespace) -> str:
    """How a run that ended on one of several processes goes on."""
    from past_opsd.run import checkpoint
    from past_opsd.run.folder import RunFolder

    path = None if args.out is None else checkpoint.newest_whole(RunFolder(args.out))[0]
    if path is None:
        return ""
    return f"The newest checkpoint is {path}; continue with {_again(args)}"


def _train_aloud(args: argparse.Namespace, recipe: config.Recipe, world: World) -> int:
    from rich.console import Console

    from past_opsd.interface import ui
    from past_opsd.run.folder import RunFolder
    from past_opsd.run.trackers import Displays, open_trackers
    from past_opsd.run.train import train

    console, folder = Console(), args.out
    trackers = open_trackers([name for name in args.track.split(",") if name], folder, recipe)
    with ui.TrainDisplay(console, recipe.name, recipe.run.cycles) as bar, Displays(bar, trackers) as display:
        outcome = train(recipe, folder, args.resume, display, profile=args.profile, world=world, again=_again(args))
    run = RunFolder(folder)
    metrics, timings = run.read_metrics(), run.read_timings()
    ui.closing(console, outcome, metrics[-1] if metrics else {}, timings, recipe.evaluation.pass_k, _again(args))
    return 0 if outcome.finished else 130


def _eval(args: argparse.Namespace) -> int:
    from past_opsd.policy.distributed import joined

    with joined() as world:
        recipe = _evaluated_recipe(args)
        world.connect(recipe.distributed.timeout_seconds)
        return _evaluate(args, recipe, world)


def _evaluate(args: argparse.Namespace, recipe: config.Recipe, world: World) -> int:
    from rich.console import Console

    from past_opsd.core.reading import room
    from past_opsd.interface import ui
    from past_opsd.run import checkpoint
    from past_opsd.run.evaluate import Evaluation
    from past_opsd.run.train import session

    with session(recipe, world=world) as parts:
        if args.adapter is not None:
            checkpoint.load_adapter(parts.model, "student", args.adapter)
            parts.loop.publish()
        if args.out is not None:
            room(args.out, ours=Evaluation.is_one)
        evaluation = parts.evaluate(0)
    if world.first:
        if args.out is not None:
            evaluation.save(args.out)
        ui.evaluated(Console(), evaluation, recipe.evaluation.pass_k)
    return 0


def _evaluated_recipe(args: argparse.Namespace) -> config.Recipe:
    from past_opsd.core import config

    if args.recipe is not None and args.model is None and args.benchmark is None:
        return config.load(args.recipe, args.overrides)
    if args.recipe is not None or args.model is None or args.benchmark is None:
        raise PastError(
            "give a recipe, or --model and --benchmark: past eval --model Qwen/Qwen3-1.7B --benchmark aime24"
        )
    from past_opsd.tasks.benchmarks import evaluation_recipe

    return evaluation_recipe(args.model, args.benchmark.split(","), args.preset, args.overrides, args.adapter)


def _compare(args: argparse.Namespace) -> int:
    seeds = _seeds(args.seeds)
    if args.jobs < 0:
        raise PastError(f"--jobs {args.jobs}: give 1 or more, or 0 for one per core")
    from rich.console import Console

    from past_opsd.analysis import suite, tables
    from past_opsd.core.reading import room

    console = Console()
    chosen = suite.find(args.suite, args.family, args.reference)
    room(args.out, folder=True)
    jobs = args.jobs or os.cpu_count() or 1
    again = f"what is done is kept; continue with: {shlex.join([*life.program(), *args.words])}"
    try:
        suite.run_all(chosen, seeds, args.out, jobs, args.overrides, lambda text: console.print(text, highlight=False))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {again}") from None
    result = suite.results(chosen, suite.collect(chosen, seeds, args.out), seeds)
    folder = suite.save(args.out, result)
    for sheet in tables.sheets(result, digits=1):
        console.print(*tables.terminal(sheet), sep="\n")
    console.print(f"results.json, tables.md, tables.tex: {folder}", highlight=False, soft_wrap=True)
    return 0


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(s) for s in text.split(",")]
    except ValueError:
        raise PastError(f"--seeds '{text}': write whole numbers separated by commas, e.g. 17,29,43") from None
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise PastError(f"--seeds '{text}': seeds are 0 or more, and each is given once")
    return seeds


def _demo(args: argparse.Namespace) -> int:
    seeds = _seeds(args.seeds)
    from rich.console import Console

    from past_opsd.interface.demo import demo

    demo(Console(), args.out, seeds, args.overrides)
    return 0


def _completion(args: argparse.Namespace) -> int:
    from past_opsd.interface import completion

    if args.typed is not None:
        typed = args.words[args.words.index("--words") + 1 :]  # as typed: argparse takes a lone "--" away
        print("\n".join(completion.candidates(build_parser, typed)))
    elif args.shell is not None:
        print(completion.SCRIPTS[args.shell], end="")
    else:
        raise PastError("name a shell: past completion bash, zsh or fish")
    return 0


_RUN = "runs/embedded-past-17"

# The commands by task, the example of a task first. A new command is one more line here.
COMMANDS: Mapping[str, Sequence[Command]] = {
    "Start": (
        Command("demo", "Vanilla OPSD and PAST on the embedded default, with a table", "", _demo, arguments.demo),
        Command(
            "init",
            "write a commented recipe for your model and data",
            "--model Qwen/Qwen3-1.7B --data train.jsonl",
            "interface.init",
        ),
        Command("recipes", "list the shipped recipes", "", _recipes),
        Command("show", "print a recipe in full, every field explained", "embedded/past", _show, recipe=True),
        Command(
            "schema", "print a JSON schema of recipes, for editors", "--out recipe.schema.json", "interface.schema"
        ),
        Command("completion", "print what makes TAB complete past", "bash", _completion, arguments.completion),
    ),
    "Train": (
        Command("train", "run a recipe", "embedded/past --set run.seed=29", _train, arguments.train),
        Command(
            "inspect",
            "print what student and teacher read for one example",
            "embedded/past --dry",
            _inspect,
            arguments.inspect,
            recipe=True,
        ),
        Command(
            "doctor",
            "check a recipe's protocol, numerics, recovery, memory and time",
            "embedded/past",
            "interface.doctor",
            arguments.doctor,
            recipe=True,
        ),
        Command(
            "compare",
            "run a suite of recipes over seeds; one table with intervals",
            "--suite main --seeds 17,29",
            _compare,
            arguments.compare,
        ),
    ),
    "Look": (
        Command(
            "report",
            "write a run's or a comparison's report as one HTML file",
            f"{_RUN} --figures",
            "analysis.report",
            arguments.report,
        ),
        Command(
            "watch", "show the report of a run in the browser while it trains", _RUN, "analysis.watch", arguments.watch
        ),
        Command(
            "probe",
            "does the teacher use the matching trajectory?",
            f"{_RUN} --every-checkpoint",
            "analysis.probes",
            arguments.probe,
        ),
        Command(
            "shift", "how much of the teacher's change can reach the student", _RUN, "analysis.shift", arguments.shift
        ),
    ),
    "Evaluate": (
        Command(
            "eval",
            "Avg@k, pass@k and majority@k of the base or of an adapter",
            f"embedded/past --adapter {_RUN}/export",
            _eval,
            arguments.evaluate,
        ),
        Command(
            "verify",
            "grade a JSONL file of {gold, prediction} rows",
            "answers.jsonl --out graded.jsonl",
            "rollout.verifiers.grade",
        ),
        Command(
            "export",
            "write the student as a PEFT adapter or a merged model",
            f"{_RUN} --merge",
            "run.export",
            arguments.export,
        ),
    ),
    "Models and data": (
        Command("models", "pull, list and check models", "pull smollm2-135m", "interface.models"),
        Command(
            "data",
            "look at a data file: what is used, lengths, repeats, overlap",
            "check train.jsonl --recipe mine.toml",
            "interface.data",
        ),
        Command("serve", "start a vLLM server for a recipe", "scale/qwen3-8b-8gpu --dry", "rollout.serve", recipe=True),
    ),
    "Measure": (
        Command(
            "theory",
            "check every proposition of the paper on finite problems",
            "--seed 1",
            "analysis.theory.command",
            arguments.theory,
        ),
        Command(
            "results",
            "tables and figures from kept evidence; what runs cost",
            "rebuild --check",
            "analysis.results",
        ),
        Command("bench", "measure this package beside its peers", "divergence --tokens 256", "analysis.bench"),
    ),
}
