"""The `past` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from past_opsd import __version__
from past_opsd.core import launch, life
from past_opsd.core.nouns import PastError
from past_opsd.interface import arguments, commands
from past_opsd.interface.commands import printable

Run = Callable[[argparse.Namespace], int]
Arguments = Callable[[argparse.ArgumentParser], None]

SEVERAL = ("train", "eval")  # commands that several processes run together


@dataclass(frozen=True)
class Command:
    """A line of the help, and the words of an example after the command's name.

    `run` is a function, or a module of the package with `run(args)` and, where `arguments` names no other place, a
    quick `add_arguments(parser)`. What only the work needs is imported by the work.
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
    life.follow()
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
        launch.settle()
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
        for group, entries in COMMANDS.items():
            lines += ["", f"{group}, e.g. {entries[0].line}"]
            lines += [f"  {entry.name:10s}  {entry.summary}" for entry in entries]
        lines += ["", "Each has its own page: past COMMAND --help. The version: past --version", ""]
        return "\n".join(lines)


def build_parser(command: str) -> argparse.ArgumentParser:
    """All commands; only the one given is asked for its arguments."""
    parser = _Past(prog="past", description="On-policy self-distillation with PAST and its baselines.")
    parser.add_argument("--version", action="version", version=f"past-opsd {__version__}")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for entry in chain.from_iterable(COMMANDS.values()):
        own = subparsers.add_parser(
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


def _several() -> bool:
    """Whether a launcher started several processes; the first of them says that this command is not for that."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    if os.environ.get("RANK", "0") == "0":
        print(f"past: only {' and '.join(SEVERAL)} run as several processes; start this without it", file=sys.stderr)
    return True


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
        Command(
            "demo",
            "Vanilla OPSD and PAST on a laptop, with a table and a report",
            "",
            commands.demo,
            arguments.demo,
        ),
        Command(
            "init",
            "write a commented recipe for your model and data",
            "--model Qwen/Qwen3-1.7B --data train.jsonl",
            "interface.init",
        ),
        Command("recipes", "list the shipped recipes", "", commands.recipes),
        Command("show", "print a recipe in full, every field explained", "embedded/past", commands.show, recipe=True),
        Command(
            "schema", "print a JSON schema of recipes, for editors", "--out recipe.schema.json", "interface.schema"
        ),
        Command("completion", "print what makes TAB complete past", "bash", _completion, arguments.completion),
    ),
    "Train": (
        Command("train", "run a recipe", "embedded/past --set run.seed=29", commands.train, arguments.train),
        Command(
            "inspect",
            "print what student and teacher read for one example",
            "embedded/past --dry",
            commands.inspect,
            arguments.inspect,
            recipe=True,
        ),
        Command(
            "doctor",
            "check a recipe's protocol, numerics, recovery, memory and time",
            "embedded/past",
            commands.doctor,
            arguments.doctor,
            recipe=True,
        ),
        Command(
            "trace",
            "what a recipe takes on GPUs that are not here",
            "paper/past --lengths 4096,38912",
            commands.trace,
            arguments.trace,
        ),
        Command(
            "simulate",
            "how long a cycle takes on GPUs that are not here, streaming or not",
            "paper/past --gpus 1,8,64",
            commands.simulate,
            arguments.simulate,
            recipe=True,
        ),
        Command(
            "rehearse",
            "see a recipe start and end here: small, with a made model and data",
            "paper/past",
            commands.rehearse,
            arguments.rehearse,
        ),
        Command(
            "compare",
            "run a suite of recipes over seeds; one table with intervals",
            "--suite main --seeds 17,29",
            commands.compare,
            arguments.compare,
        ),
    ),
    "Look": (
        Command(
            "report",
            "write a run's or a comparison's report as one HTML file",
            f"{_RUN} --figures",
            commands.report,
            arguments.report,
        ),
        Command(
            "watch", "show the report of a run in the browser while it trains", _RUN, commands.watch, arguments.watch
        ),
        Command(
            "probe",
            "does the teacher use the matching trajectory?",
            f"{_RUN} --every-checkpoint",
            commands.probe,
            arguments.probe,
        ),
        Command(
            "shift", "how much of the teacher's change can reach the student", _RUN, commands.shift, arguments.shift
        ),
    ),
    "Evaluate": (
        Command(
            "eval",
            "Avg@k, pass@k and majority@k of the base or of an adapter",
            f"embedded/past --adapter {_RUN}/export",
            commands.evaluate,
            arguments.evaluate,
        ),
        Command(
            "verify",
            "grade a JSONL file of {gold, prediction} rows",
            "answers.jsonl --out graded.jsonl",
            commands.verify,
            arguments.verify,
        ),
        Command(
            "export",
            "write the student as a PEFT adapter or a merged model",
            f"{_RUN} --merge",
            commands.export,
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
        Command(
            "serve",
            "start a vLLM server for a recipe",
            "scale/qwen3-8b-8gpu --dry",
            commands.serve,
            arguments.serve,
            recipe=True,
        ),
    ),
    "Measure": (
        Command(
            "theory",
            "check every proposition of the paper on finite problems",
            "--seed 1",
            commands.theory,
            arguments.theory,
        ),
        Command(
            "results",
            "tables and figures from kept evidence; what runs cost",
            "rebuild --check",
            "interface.results",
        ),
        Command("bench", "measure this package beside its peers", "divergence --tokens 256", "analysis.bench"),
    ),
}
