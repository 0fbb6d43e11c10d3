"""The `past` command."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from past_opsd import __version__, config
from past_opsd.types import PastError

if TYPE_CHECKING:
    from past_opsd.distributed import World

Run = Callable[[argparse.Namespace], int]

# Commands that are modules of their own, with `add_arguments(parser)` and `run(args)`: what each does, where it is,
# and whether it takes a recipe.
MODULES = {
    "report": ("write a run's or a comparison's report as one HTML file, with figures", "report", False),
    "watch": ("show the report of a run in the browser while it trains", "watch", False),
    "probe": ("does the teacher use the matching trajectory? (removed, shuffled)", "probes", False),
    "shift": ("how much of the teacher's change can reach the student", "shift", False),
    "theory": ("check every proposition of the paper on finite problems", "theory.command", False),
    "export": ("write the trained student as a PEFT adapter or a merged model", "export", False),
    "doctor": ("check a recipe's protocol, numerics and recovery; memory and time", "doctor", True),
    "models": ("pull and list models", "models", False),
    "data": ("look at a data file: what would be used, lengths, duplicates, overlap", "data", False),
    "serve": ("start a vLLM server for a recipe", "serve", True),
    "verify": ("grade a JSONL file of {gold, prediction} rows", "verifiers.grade", False),
    "bench": ("measure this package beside its peers", "bench", False),
}


SEVERAL = ("train", "eval")  # commands that several processes run together


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: a user's mistake is one message and exit code 2, never a stack trace."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words[0] if words else "")
    args = parser.parse_args(words)
    if args.run is None:
        parser.print_help()
        return 2
    args.words = words
    try:
        if words[0] not in SEVERAL and _several():
            return 2
        return args.run(args)
    except PastError as error:
        print(f"past: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("past: interrupted; the last complete checkpoint is untouched", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def _parser(command: str) -> argparse.ArgumentParser:
    """All commands; what a command alone needs is imported only when it is the one given."""
    parser = argparse.ArgumentParser(
        prog="past", description="On-policy self-distillation with PAST and its baselines."
    )
    parser.add_argument("--version", action="version", version=f"past-opsd {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    _command(commands, "recipes", "list the shipped recipes", _recipes)

    show = _command(commands, "show", "print a recipe in full, every field explained", _show)
    _recipe_arguments(show)

    look = _command(commands, "inspect", "print what student and teacher read for one example", _inspect)
    _recipe_arguments(look)
    look.add_argument("--index", type=int, default=0, help="which training example (default 0)")
    look.add_argument("--dry", action="store_true", help="load no weights; the reference stands in for a response")

    train = _command(commands, "train", "run a recipe", _train)
    _recipe_arguments(train)
    train.add_argument("--out", type=Path, help="run folder (default runs/RECIPE-SEED)")
    train.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint")
    train.add_argument("--profile", action="store_true", help="write where the time goes to RUN/profile")
    train.add_argument("--track", default="", metavar="NAMES", help="also log to tensorboard, wandb and/or trackio")

    evaluate = _command(commands, "eval", "Avg@k, pass@k and majority@k of the base or of an adapter", _eval)
    _recipe_arguments(evaluate, optional=True)
    evaluate.add_argument("--adapter", type=Path, help="checkpoint or PEFT folder (default: the bare base model)")
    evaluate.add_argument("--model", help="instead of a recipe: a folder or hub id, with --benchmark")
    evaluate.add_argument(
        "--benchmark", metavar="NAMES", help="aime24,aime25,hmmt25,math500,gsm8k; NAME=FILE reads a file of yours"
    )
    evaluate.add_argument("--preset", default="paper", help="with --benchmark: 'paper' (default) or 'card' sampling")
    evaluate.add_argument("--out", type=Path, help="write the outcomes as JSON")

    compare = _command(commands, "compare", "run a suite of recipes over seeds; tables with paired intervals", _compare)
    compare.add_argument("--suite", default="main", help="which suite (default main; a wrong name lists them)")
    compare.add_argument("--family", default="embedded", help="recipe folder of the suite (default embedded)")
    compare.add_argument("--seeds", default="17,29,43", help="training seeds, comma-separated (default 17,29,43)")
    compare.add_argument("--reference", help="row to take differences to (default: the suite's own)")
    compare.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder (default runs/compare)")
    compare.add_argument("--jobs", type=int, default=0, help="runs at a time (default: one per core)")
    compare.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override")

    demo = _command(commands, "demo", "Vanilla OPSD and PAST on the embedded default, with a table", _demo)
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder, made anew (default runs/demo)")
    demo.add_argument("--seeds", default="17,29,43", help="training seeds, comma-separated (default 17,29,43)")
    demo.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override")

    for name, (summary, module, takes_recipe) in MODULES.items():
        parser_ = _command(commands, name, summary, None)
        if command == name:
            if takes_recipe:
                _recipe_arguments(parser_)
            implementation = importlib.import_module(f"past_opsd.{module}")
            implementation.add_arguments(parser_)
            parser_.set_defaults(run=implementation.run)
    return parser


def _command(commands: argparse._SubParsersAction, name: str, summary: str, run: Run | None) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary)
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def _recipe_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    many = "?" if optional else None
    parser.add_argument("recipe", nargs=many, help="a shipped recipe (see 'past recipes') or a .toml file")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override, e.g. run.cycles=20"
    )


def _recipes(args: argparse.Namespace) -> int:
    names = config.shipped()
    width = max(len(n) for n in names)
    for name in names:
        print(f"{name:{width}s}  {config.load(name).description}")
    return 0


def _show(args: argparse.Namespace) -> int:
    print(config.to_toml(config.load(args.recipe, args.overrides)), end="")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    recipe = config.load(args.recipe, args.overrides)
    from rich.console import Console

    from past_opsd.inspect import inspect

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
    from past_opsd.distributed import joined

    with joined(lambda: _continue(args)) as world:
        recipe = config.load(args.recipe, args.overrides)
        args.out = args.out or Path("runs") / f"{recipe.name.replace('/', '-')}-{recipe.run.seed}"
        world.connect(recipe.distributed.timeout_seconds)
        if world.first:
            return _train_aloud(args, recipe, world)
        from past_opsd.train import Silent, train

        return 0 if train(recipe, args.out, args.resume, Silent(), world=world).finished else 130


def _continue(args: argparse.Namespace) -> str:
    """How a run that ended on one of several processes goes on."""
    from past_opsd import checkpoint

    path = None if args.out is None else checkpoint.newest_whole(args.out)[0]
    if path is None:
        return ""
    words = [*args.words, *([] if args.resume else ["--resume"])]
    return f"The newest checkpoint is {path}; continue with the same launcher and: past {shlex.join(words)}"


def _train_aloud(args: argparse.Namespace, recipe: config.Recipe, world: World) -> int:
    from rich.console import Console

    from past_opsd import ui
    from past_opsd.record import read_lines
    from past_opsd.trackers import Displays, open_trackers
    from past_opsd.train import train

    console, folder = Console(), args.out
    trackers = open_trackers([name for name in args.track.split(",") if name], folder, recipe)
    with ui.TrainDisplay(console, recipe.name, recipe.run.cycles) as bar, Displays(bar, trackers) as display:
        outcome = train(recipe, folder, args.resume, display, profile=args.profile, world=world)
    metrics, timings = (read_lines(folder / name) for name in ("metrics.jsonl", "timings.jsonl"))
    ui.closing(console, outcome, metrics[-1] if metrics else {}, timings, recipe.evaluation.pass_k)
    return 0 if outcome.finished else 130


def _eval(args: argparse.Namespace) -> int:
    from past_opsd.distributed import joined

    with joined() as world:
        recipe = _evaluated_recipe(args)
        world.connect(recipe.distributed.timeout_seconds)
        return _evaluate(args, recipe, world)


def _evaluate(args: argparse.Namespace, recipe: config.Recipe, world: World) -> int:
    from rich.console import Console

    from past_opsd import checkpoint, ui
    from past_opsd.train import session

    with session(recipe, world=world) as parts:
        if args.adapter is not None:
            checkpoint.load_adapter(parts.model, "student", args.adapter)
            parts.loop.publish()
        evaluation = parts.evaluate(0)
    if world.first:
        if args.out is not None:
            evaluation.save(args.out)
        ui.evaluated(Console(), evaluation, recipe.evaluation.pass_k)
    return 0


def _evaluated_recipe(args: argparse.Namespace) -> config.Recipe:
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
    from rich.console import Console

    from past_opsd import suite, tables

    console = Console()
    chosen = suite.find(args.suite, args.family, args.reference)
    jobs = args.jobs or max(1, os.cpu_count() or 1)
    suite.run_all(chosen, seeds, args.out, jobs, args.overrides, lambda text: console.print(text, highlight=False))
    result = suite.results(chosen, suite.collect(chosen, seeds, args.out), seeds)
    folder = suite.save(args.out, result)
    for sheet in tables.sheets(result):
        console.print(tables.terminal(sheet))
    console.print(f"results.json, tables.md, tables.tex: {folder}", highlight=False, soft_wrap=True)
    return 0


def _seeds(text: str) -> list[int]:
    try:
        return [int(s) for s in text.split(",")]
    except ValueError:
        raise PastError(f"--seeds {text}: write whole numbers separated by commas, e.g. 17,29,43") from None


def _demo(args: argparse.Namespace) -> int:
    seeds = _seeds(args.seeds)
    from rich.console import Console

    from past_opsd.demo import demo

    demo(Console(), args.out, seeds, args.overrides)
    return 0


if __name__ == "__main__":
    sys.exit(main())
