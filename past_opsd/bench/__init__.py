"""`past bench WHAT`: this package beside its peers, both sides in one run.

A benchmark is a module here with a docstring, `add_arguments(parser)` and `run(args)`.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand per module."""
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")):
        module = importlib.import_module(f"past_opsd.bench.{name}")
        summary = (module.__doc__ or "").split("\n")[0].partition(": ")[2].rstrip(".")
        kind = kinds.add_parser(name, help=summary, description=summary)
        module.add_arguments(kind)
        kind.set_defaults(bench=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen one."""
    return args.bench(args)
