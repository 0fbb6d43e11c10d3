"""The commands that call `interface.api`, one function each: arguments in, what a terminal shows out.

What only the work needs is imported by the work.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from past_opsd.core import launch, life
from past_opsd.core.nouns import PastError

if TYPE_CHECKING:
    from past_opsd.core.config import Recipe


def printable(text: str) -> str:
    """Text as a terminal may show it: what a file says may not steer the terminal, nor fail to be written."""
    kept = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return "".join(kept).encode("utf-8", "backslashreplace").decode()


def recipes(args: Namespace) -> int:
    """`past recipes`."""
    from past_opsd.interface import api

    found = api.recipes()
    width = max(map(len, found))
    for name, description in found.items():
        print(f"{name:{width}s}  {description}")
    return 0


def show(args: Namespace) -> int:
    """`past show`."""
    from past_opsd.core import config

    print(config.to_toml(config.load(args.recipe, args.overrides)), end="")
    return 0


def inspect(args: Namespace) -> int:
    """`past inspect`."""
    from past_opsd.core import config

    recipe = config.load(args.recipe, args.overrides)
    from rich.console import Console

    from past_opsd.interface.look import inspect

    inspect(Console(), recipe, args.index, args.dry)
    return 0


def doctor(args: Namespace) -> int:
    """`past doctor`."""
    if args.gpu:
        from past_opsd.interface import kit

        for option, given in (("--dry", args.dry), ("--repeats", args.repeats is not None)):
            if given:
                raise PastError(f"--gpu runs the recipe's model once and takes no {option}; give one of the two")
        return kit.run(args)
    if args.out is not None:
        raise PastError("--out is where --gpu writes its file; without --gpu nothing is written")
    from past_opsd.interface import doctor

    return doctor.run(args)


def trace(args: Namespace) -> int:
    """`past trace`."""
    from past_opsd.core import config
    from past_opsd.policy.estimate import GPUS

    if args.gpu not in GPUS:
        raise PastError(f"--gpu {args.gpu}: no data sheet of it here; known are {', '.join(GPUS)}")
    processes = _numbers("--processes", args.processes)
    lengths = [] if args.lengths is None else _numbers("--lengths", args.lengths)
    recipes = [config.load(name, args.overrides) for name in args.recipe]
    from past_opsd.analysis import needs, needs_tables

    found: list[needs.Needs] = []
    for recipe in recipes:
        for n in processes:
            for length in (None, *lengths):
                changed = recipe if length is None else needs.with_length(recipe, length)
                found.append(needs.trace(changed, processes=n, size=GPUS[args.gpu][2]))
    if len(recipes) == len(processes) == 1:
        print(needs_tables.detail(found[0], args.gpu))
    if len(found) > 1:
        print(("\n" if len(recipes) == len(processes) == 1 else "") + needs_tables.table(found, args.gpu))
    return 0


def _numbers(option: str, text: str) -> list[int]:
    numbers = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(numbers) < 1:
        raise PastError(f"{option} {text}: give whole numbers from 1 on, comma-separated, e.g. {option} 1,8")
    return numbers


def train(args: Namespace) -> int:
    """`past train`."""
    try:
        return _train(args)
    except KeyboardInterrupt:
        from past_opsd.run.folder import RunFolder

        kept = None if args.out is None else RunFolder(args.out).newest()
        if kept is None:
            raise KeyboardInterrupt(f"stopped before it wrote a checkpoint; start again with: {_again(args)}") from None
        raise KeyboardInterrupt(
            f"stopped at once; the last checkpoint is {kept}\ncontinue with: {_again(args)}"
        ) from None


def _train(args: Namespace) -> int:
    from past_opsd.core import config
    from past_opsd.interface import api
    from past_opsd.policy.distributed import joined

    with joined(lambda: _continue(args)) as world:
        recipe = config.load(_own_recipe(args), args.overrides)
        args.out = args.out or api.default_folder(recipe)
        world.connect(recipe.distributed.timeout_seconds)
        track = [name for name in args.track.split(",") if name]
        run = api.train(
            recipe,
            args.out,
            resume=args.resume,
            track=track,
            profile=args.profile,
            world=world,
            again=_again(args),
            untrained=args.untrained,
        )
        if world.first:
            from rich.console import Console

            from past_opsd.interface import ui

            ui.closing(Console(), run, recipe.evaluation.pass_k, _again(args))
        return 0 if run.finished else 130


def _own_recipe(args: Namespace) -> str:
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


def _again(args: Namespace) -> str:
    """This command line once more, to continue what it began."""
    words = [*args.words, *([] if args.resume else ["--resume"])]
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return f"the same launcher and: past {shlex.join(words)}"
    return shlex.join([*life.program(), *words])


def _continue(args: Namespace) -> str:
    """How a run that ended on one of several processes goes on."""
    from past_opsd.run import checkpoint
    from past_opsd.run.folder import RunFolder

    path = None if args.out is None else checkpoint.newest_whole(RunFolder(args.out))[0]
    if path is None:
        return ""
    if launch.restarts():
        return f"The newest checkpoint is {path}; torchrun starts the processes again, and they go on from there"
    return f"The newest checkpoint is {path}; continue with {_again(args)}"


def evaluate(args: Namespace) -> int:
    """`past eval`."""
    from past_opsd.policy.distributed import joined

    if args.follow is not None:
        return _follow(args)
    with joined() as world:
        recipe = _evaluated_recipe(args)
        world.connect(recipe.distributed.timeout_seconds)
        from past_opsd.core.reading import room
        from past_opsd.interface import api
        from past_opsd.run.evaluate import Evaluation

        if args.out is not None:
            room(args.out, ours=Evaluation.is_one)
        found = api.evaluate(recipe, args.adapter, world=world)
        if world.first:
            from rich.console import Console

            from past_opsd.interface import ui

            if args.out is not None:
                found.save(args.out)
            ui.evaluated(Console(), found, recipe.evaluation.pass_k)
    return 0


def _follow(args: Namespace) -> int:
    """`past eval --follow RUN`."""
    given = {"a recipe": args.recipe, "--model": args.model, "--benchmark": args.benchmark}
    for name, value in (given | {"--adapter": args.adapter, "--out": args.out}).items():
        if value is not None:
            raise PastError(f"--follow RUN evaluates that run and writes there; leave {name} away")
    from rich.console import Console

    from past_opsd.interface import ui
    from past_opsd.policy.distributed import joined
    from past_opsd.run.folder import RunFolder
    from past_opsd.run.follow import follow

    recipe, console = RunFolder(args.follow).recipe(), Console()
    with joined() as world:
        world.connect(recipe.distributed.timeout_seconds)
        tell = partial(console.print, highlight=False, soft_wrap=True)
        for evaluation in follow(args.follow, args.overrides, world, args.trust, tell):
            if world.first:
                name = f"macro/avg@{evaluation.samples}"
                score = evaluation.summary()[name]
                console.print(f"after {evaluation.step} cycles: {name} {100 * score:.1f}", highlight=False)
        if world.first:
            found = RunFolder(args.follow).read_evaluations()
            console.print(ui.evaluation_table(found, recipe.evaluation.pass_k))
    return 0


def _evaluated_recipe(args: Namespace) -> Recipe:
    from past_opsd.core import config

    if args.recipe is not None and args.model is None and args.benchmark is None:
        return config.load(args.recipe, args.overrides)
    if args.recipe is not None or args.model is None or args.benchmark is None:
        raise PastError(
            "give a recipe, or --model and --benchmark: past eval --model Qwen/Qwen3-1.7B --benchmark aime24"
        )
    from past_opsd.tasks.benchmarks import evaluation_recipe

    return evaluation_recipe(args.model, args.benchmark.split(","), args.preset, args.overrides, args.adapter)


def compare(args: Namespace) -> int:
    """`past compare`."""
    seeds = _seeds(args.seeds)
    if args.jobs < 0:
        raise PastError(f"--jobs {args.jobs}: give 1 or more, or 0 for one per core")
    from rich.console import Console

    from past_opsd.analysis import suite, tables
    from past_opsd.interface import api

    if args.rehearse:
        from past_opsd.analysis import rehearse

        chosen = suite.find(args.suite, args.family, args.reference)
        return rehearse.run_suite(chosen, args.out, args.overrides, seeds[0])
    console, out = Console(), args.out or Path("runs/compare")
    again = f"what is done is kept; continue with: {shlex.join([*life.program(), *args.words])}"
    try:
        result = api.compare(
            args.suite,
            family=args.family,
            seeds=seeds,
            folder=out,
            overrides=args.overrides,
            reference=args.reference,
            jobs=args.jobs,
            tell=lambda text: console.print(text, highlight=False),
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {again}") from None
    for sheet in tables.sheets(result, digits=1):
        console.print(*tables.terminal(sheet), sep="\n")
    console.print(f"results.json, tables.md, tables.tex: {out / args.suite}", highlight=False, soft_wrap=True)
    missing = {row["label"]: row["missing"] for row in result["rows"] if "missing" in row}
    if missing:
        lines = "\n".join(f"  {label}: {printable(why)}" for label, why in missing.items())
        print(f"past: {len(missing)} rows are missing:\n{lines}\n{again}", file=sys.stderr)
    return 1 if missing else 0


def rehearse(args: Namespace) -> int:
    """`past rehearse`."""
    from past_opsd.analysis import rehearse

    return rehearse.run(args.recipe, args.out, args.overrides)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(s) for s in text.split(",")]
    except ValueError:
        raise PastError(f"--seeds '{text}': write whole numbers separated by commas, e.g. 17,29,43") from None
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise PastError(f"--seeds '{text}': seeds are 0 or more, and each is given once")
    return seeds


def demo(args: Namespace) -> int:
    """`past demo`."""
    seeds = _seeds(args.seeds)
    from rich.console import Console

    from past_opsd.interface.demo import demo

    demo(Console(), args.out, seeds, args.overrides, args.family)
    return 0


def report(args: Namespace) -> int:
    """`past report`."""
    from past_opsd.interface import api

    began = time.monotonic()
    out = api.report(
        args.runs,
        args.out,
        trajectories=args.trajectories,
        figures=args.figures,
        trust=args.trust,
        tell=lambda text: print(f"note: {text}", file=sys.stderr),
    )
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB, {time.monotonic() - began:.1f} s")
    return 0


def watch(args: Namespace) -> int:
    """`past watch`: serve until Ctrl-C."""
    if not 0.1 <= args.every <= 3600:  # a browser takes what is endless for no wait at all
        raise PastError(f"--every {args.every}: give 0.1 seconds or more, up to an hour (3600)")
    from past_opsd.analysis.watch import serve

    with serve(args.runs, args.host, args.port, args.every) as server:
        print(f"{server.url} (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            print()
    return 0


def probe(args: Namespace) -> int:
    """`past probe`."""
    from rich.console import Console

    from past_opsd.analysis import probe_tables, probes
    from past_opsd.run import boundary
    from past_opsd.run.folder import RunFolder

    if args.every_checkpoint:
        steps, notes = boundary.whole(args.folder)
    else:
        step, notes = boundary.choose(args.folder, args.step)
        steps = [step]
    console = Console()
    found = probes.probe_run(
        args.folder,
        steps,
        problems=args.problems,
        samples=args.samples,
        split=args.split,
        trust=args.trust,
        notes=notes,
        around=lambda step: nullcontext() if args.json else console.status(f"step {step}"),
    )
    results, files = list(found.values()), RunFolder(args.folder).probes
    if args.json:
        print(json.dumps(results if args.every_checkpoint else results[0], indent=1))
    elif args.every_checkpoint:
        probe_tables.show_steps(console, results, files.folder)
    else:
        probe_tables.show(console, results[0], files.path(steps[0]))
    return 0


def shift(args: Namespace) -> int:
    """`past shift`."""
    from rich.console import Console

    from past_opsd.analysis import shift_estimates
    from past_opsd.core import config
    from past_opsd.interface import api
    from past_opsd.run.folder import RunFolder

    console = Console()
    with nullcontext() if args.json else console.status("sampling"):
        result = api.shift(
            args.target,
            args.step,
            responses=args.responses,
            pairs=args.pairs,
            prefixes=args.prefixes,
            completions=args.completions,
            overrides=args.overrides,
            trust=args.trust,
        )
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        kept = None if config.is_recipe(args.target) else RunFolder(args.target).shifts.path(result["step"])
        shift_estimates.show(console, result, kept)
    return 0


def export(args: Namespace) -> int:
    """`past export`."""
    if args.push == "" or (args.private and args.push is None):
        raise PastError("name the repository to push to, as OWNER/NAME; a private one needs a name, too")
    from past_opsd.interface import api
    from past_opsd.run import boundary
    from past_opsd.run.export import push

    step, notes = boundary.choose(args.folder, args.step)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    out = api.export(args.folder, args.out, step=step, merge=args.merge, trust=args.trust)
    print(f"{'model' if args.merge else 'adapter'}: {out}")
    if args.push is not None:
        print(f"pushed: {push(out, args.push, args.private)}")
    return 0


def serve(args: Namespace) -> int:
    """`past serve`."""
    from past_opsd.core import config
    from past_opsd.rollout.serve import serve

    serve(config.load(args.recipe, args.overrides), args.host, args.port, dry=args.dry)
    return 0


def verify(args: Namespace) -> int:
    """`past verify`."""
    from past_opsd.rollout.verifiers import grade

    summary = grade.verify(
        args.file, args.out, args.verifier, args.set, skip_bad=args.skip_bad, protocol_field=args.protocol_field
    )
    print(grade.render(summary))
    return 0


def theory(args: Namespace) -> int:
    """`past theory`: exit code 1 when a statement does not hold."""
    from rich.console import Console

    from past_opsd.analysis.theory import command
    from past_opsd.analysis.theory.checks import checks

    found = checks(args.seed)
    if args.json:
        print(json.dumps(command.report(found, args.seed), indent=2))
    else:
        command.show(Console(), found)
    return 0 if all(check.ok for check in found) else 1
