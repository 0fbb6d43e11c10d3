"""`past bench WHAT`: this package beside its peers, both sides in one run.

A benchmark is a module here with `run(args)`, imported when it is run, and a line in `BENCHMARKS`.
"""

from __future__ import annotations

import argparse
import importlib

METHODS = ("grpo", "opsd")
LOSSES = ("match", "stay", "jsd", "tokens", "teacher", "every", "watching")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand per benchmark."""
    kinds = parser.add_subparsers(metavar="WHAT", dest="what", required=True)
    for name, (summary, options) in BENCHMARKS.items():
        options(kinds.add_parser(name, help=summary, description=summary))


def run(args: argparse.Namespace) -> int:
    """Run the chosen one."""
    return importlib.import_module(f"past_opsd.analysis.bench.{args.what}").run(args)


def _cycle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", default="embedded/past", help="whose cycles (default embedded/past)")
    parser.add_argument("--cycles", type=int, default=8, help="cycles of each side, taking turns (default 8)")
    parser.add_argument(
        "--base", type=int, help="first draws of a group (G_base), as late in a run; default: the recipe's"
    )
    parser.add_argument(
        "--verdict", type=float, default=0.0, help="seconds that a verdict takes longer (default 0), in --judges"
    )
    parser.add_argument("--judges", type=int, default=2, help="processes that verify (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override")


def _divergence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1024, help="positions T (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=49152, help="vocabulary V (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=576, help="hidden size H (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats of each (default %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bf16", "fp16"),
        default="float32",
        help="of states and head (default %(default)s)",
    )


def _kernel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loss", choices=LOSSES, default="match", help="which losses (default %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of logits (default bf16)")
    parser.add_argument("--rivals", action="store_true", help="other blocks and warps too")


def _rollout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", default="embedded/past", help="whose model and prompts (default embedded/past)")
    parser.add_argument("--requests", type=int, default=96, help="responses to sample (default 96)")
    parser.add_argument("--batch", type=int, default=32, help="sequences decoded together (default 32)")
    parser.add_argument("--tokens", type=int, default=0, help="token limit (default: the recipe's)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each, taking turns (default 3)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override")


def _scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=2, help="prompts at factor 1 (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=192, help="tokens of every prompt (default %(default)s)")
    parser.add_argument("--response", type=int, default=128, help="response tokens at factor 1 (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=16384, help="entries at factor 1 (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default %(default)s)")
    parser.add_argument("--budget", type=int, default=1024, help="padded tokens a micro-batch (default %(default)s)")
    parser.add_argument("--loss-mib", type=int, default=16, help="memory for logits in the loss (default %(default)s)")
    parser.add_argument("--factors", type=int, default=8, help="largest factor (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps of each size (default %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write the numbers as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw them as SVG (needs matplotlib)")


def _shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", default="word_problems/past", help="whose model and method (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the teacher's prompt (default %(default)s)")
    parser.add_argument(
        "--student-prompt", type=int, default=256, help="tokens of the student's prompt (default %(default)s)"
    )
    parser.add_argument("--group", type=int, default=8, help="continuations of a prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a continuation (default %(default)s)")
    parser.add_argument("--problems", type=int, default=1, help="failed attempts (default %(default)s)")
    parser.add_argument("--examples", type=int, default=0, help="tokens all prompts begin with (default %(default)s)")
    parser.add_argument("--alike", type=int, default=0, help="tokens a group's paths begin with (default %(default)s)")
    parser.add_argument("--twice", type=int, default=0, help="continuations drawn twice (default %(default)s)")
    parser.add_argument("--budget", type=int, default=4096, help="padded tokens a micro-batch (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps of each (default %(default)s)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override")


def _step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipes", default="word_problems", help="whose 'grpo' and 'opsd' (default %(default)s)")
    parser.add_argument("--only", choices=METHODS, help="one of the two comparisons")
    parser.add_argument("--group", type=int, default=8, help="GRPO: responses to its one prompt (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="OPSD: prompts, a response each (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every response (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each side (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed updates of each side (default %(default)s)")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override")


def _startup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="runs of each command (default %(default)s)")


def _records(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--responses", type=int, default=64, help="responses of a cycle (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=38912, help="tokens of each (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="times each is measured (default %(default)s)")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cycles", type=int, default=1000, help="cycles of the run (default %(default)s)")
    parser.add_argument("--responses", type=int, default=512, help="responses of a cycle (default %(default)s)")


BENCHMARKS = {
    "cycle": ("cycles with rollout.stream and without, the same work", _cycle),
    "divergence": (
        "the full-vocabulary implementations side by side",
        _divergence,
    ),
    "kernel": ("registers, spills and occupancy of the GPU kernel, compiled for three generations of GPUs", _kernel),
    "records": ("a cycle's file of long responses and their verdicts: time and memory", _records),
    "report": ("time and memory of `past report` on a long run", _report),
    "rollout": ("tokens a second of our engines and of transformers' generate, on the same prompts", _rollout),
    "scaling": ("time and memory of a learner step against its sizes", _scaling),
    "shared": ("PAST's teacher step with and without sharing what its continuations begin with", _shared),
    "step": ("one update from rollout to optimizer step, by this package and by TRL", _step),
    "startup": ("CPU time and memory of the commands that only read", _startup),
}
