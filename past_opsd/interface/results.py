"""`past results`: runs as evidence that can be kept, and every table, interval and figure from it again."""

from __future__ import annotations

import argparse
from pathlib import Path

from past_opsd.core.nouns import PastError

FAMILY = "embedded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand each."""
    kinds = parser.add_subparsers(metavar="WHAT", dest="what", required=True)
    about = "keep what tables need of runs: every draw's outcome, curves, costs and diagnostics"
    collect = kinds.add_parser("collect", help=about, description=about)
    collect.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or a folder that holds runs")
    collect.add_argument("--world", default="default", help="whose evidence it replaces (default %(default)s)")
    collect.add_argument("--add", action="store_true", help="keep the evidence of other runs that is there already")
    about = "make the tables, the page and its figure from the evidence"
    rebuild = kinds.add_parser("rebuild", help=about, description=about)
    rebuild.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
    about = "the page (default docs/experiments/FAMILY-results.md, of embedded docs/results.md)"
    rebuild.add_argument("--page", type=Path, help=about)
    for own in (collect, rebuild):
        own.add_argument("--family", default=FAMILY, help="recipe folder of the suites (default %(default)s)")
        own.add_argument("--folder", type=Path, help="of the evidence (default results/FAMILY)")
    about = "print what runs cost, a line each"
    cost = kinds.add_parser("cost", help=about, description=about)
    cost.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or a folder that holds runs")


def run(args: argparse.Namespace) -> int:
    """The chosen one."""
    return {"collect": _collect, "rebuild": _rebuild, "cost": _cost}[args.what](args)


def _folder(args: argparse.Namespace) -> Path:
    return args.folder or Path("results") / args.family


def _page(args: argparse.Namespace) -> Path:
    own = "results.md" if args.family == FAMILY else f"experiments/{args.family}-results.md"
    return args.page or Path("docs") / own


def _collect(args: argparse.Namespace) -> int:
    if not args.world.replace("-", "").isalnum():
        raise PastError(f"--world '{args.world}': use letters, digits and dashes")
    from past_opsd.analysis.results import evidence

    records = evidence.gather(args.runs, print)
    folder = _folder(args) / evidence.WORLDS / args.world
    if args.add and folder.is_dir():
        found = evidence.load(folder) | {(record.recipe, record.seed): record for record in records}
        records = [found[key] for key in sorted(found)]
    evidence.write(folder, records)
    size = sum(file.stat().st_size for file in folder.glob("*.parquet"))
    print(f"{folder}: {len(records)} runs, {size / 1e6:.2f} MB")
    return 0


def _rebuild(args: argparse.Namespace) -> int:
    from past_opsd.analysis.results import page
    from past_opsd.core.files import whole

    made = page.build(_folder(args), args.family, _page(args))
    changed = [path for path, data in made.items() if not path.is_file() or path.read_bytes() != data]
    for path in changed:
        print(f"{path}: {'does not follow from the evidence' if args.check else 'written'}")
        if not args.check:
            with whole(path) as part:
                part.write_bytes(made[path])
    stray = page.stray(_folder(args), made)
    for path in stray:
        print(f"{path}: there is no evidence of it; delete it")
    print(f"{len(made) - len(changed)} of {len(made)} files are what the evidence gives")
    return 1 if args.check and (changed or stray) else 0


def _cost(args: argparse.Namespace) -> int:
    from rich.console import Console

    from past_opsd.analysis import suite, tables
    from past_opsd.analysis.results import evidence
    from past_opsd.run.folder import runs_below

    found = [evidence.read(run.path) for path in args.runs for run in runs_below(path, print)]
    if not found:
        raise PastError(f"{args.runs[0]}: holds no run; give the --out folder of 'past train' or 'past compare'")
    costs = {f"{r.recipe}, seed {r.seed}": suite.averaged("", r.recipe, [r]).costs for r in found}
    if len(costs) < len(found):
        costs = {r.place: suite.averaged("", r.recipe, [r]).costs for r in found}
    console = Console()
    sheet = tables.cost_table(costs)
    console.print(*tables.terminal(sheet), sep="\n")
    console.print(f"{tables.COST_NOTE}.", highlight=False)
    return 0
