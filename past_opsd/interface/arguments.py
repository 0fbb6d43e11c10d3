"""What commands take: help and completion read it without loading what the work needs."""

from __future__ import annotations

from argparse import REMAINDER, SUPPRESS, ArgumentParser, ArgumentTypeError
from pathlib import Path

TRAJECTORIES = 12
REPEATS = 8
LENGTHS = "4096,16384,38912"
GPU_CHECK = "past-gpu-check.md"
SEEDS = (17, 29, 43)
_SEEDS = ",".join(map(str, SEEDS))
DEMOS = ("embedded", "smollm2", "smollm2_nth")  # families of recipes that have a demo, the default first


def place(text: str) -> Path:
    """A file or folder by its name; none at all, as of a variable that is not set, would be the current folder."""
    if not text.strip():
        raise ArgumentTypeError("the name is empty")
    return Path(text)


def recipe(parser: ArgumentParser, *, optional: bool = False) -> None:
    """A recipe and what is changed in it."""
    many = "?" if optional else None
    parser.add_argument("recipe", nargs=many, help="a shipped recipe (see 'past recipes') or a .toml file")
    _overrides(parser, "override, e.g. run.cycles=20")


def trust(parser: ArgumentParser) -> None:
    """The option of every command that opens a run."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="do what the run's recipe names: run its modules, fetch its model or data, send requests to its servers",
    )


def inspect(parser: ArgumentParser) -> None:
    """`past inspect`, beside the recipe."""
    parser.add_argument("--index", type=int, default=0, help="which training example (default 0)")
    parser.add_argument("--dry", action="store_true", help="load no weights; the reference stands in for a response")


def train(parser: ArgumentParser) -> None:
    """`past train`."""
    recipe(parser, optional=True)
    parser.add_argument("--out", type=place, help="run folder (default runs/RECIPE-SEED)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest whole checkpoint; the run's folder may stand for its recipe",
    )
    parser.add_argument("--profile", action="store_true", help="write where the time goes to RUN/profile")
    parser.add_argument("--track", default="", metavar="NAMES", help="also log to tensorboard, wandb and/or trackio")
    parser.add_argument(
        "--untrained",
        type=place,
        metavar="FOLDER",
        help="take the scores before the first update from here, or leave them here for other runs of the seed",
    )


def evaluate(parser: ArgumentParser) -> None:
    """`past eval`."""
    recipe(parser, optional=True)
    parser.add_argument("--adapter", type=place, help="checkpoint or PEFT folder (default: the bare base model)")
    parser.add_argument("--model", help="instead of a recipe: a folder or hub id, with --benchmark")
    parser.add_argument(
        "--benchmark", metavar="NAMES", help="aime24,aime25,hmmt25,math500,gsm8k; NAME=FILE reads a file of yours"
    )
    parser.add_argument("--preset", default="paper", help="with --benchmark: 'paper' (default) or 'card' sampling")
    parser.add_argument("--out", type=place, help="write the outcomes as JSON")
    parser.add_argument(
        "--follow",
        type=place,
        metavar="RUN",
        help="evaluate a run's checkpoints as they come (its evaluation.beside is true)",
    )
    trust(parser)


def compare(parser: ArgumentParser) -> None:
    """`past compare`."""
    parser.add_argument("--suite", default="main", help="which suite (default main; a wrong name lists them)")
    parser.add_argument("--family", default="embedded", help="recipe folder of the suite (default embedded)")
    parser.add_argument("--seeds", default=_SEEDS, help=f"training seeds, comma-separated (default {_SEEDS})")
    parser.add_argument("--reference", help="row to take differences to (default: the suite's own)")
    parser.add_argument("--out", type=place, help="folder (default runs/compare)")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time (default: one per core)")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="only see every row start and end, small, with made data and no scores",
    )
    _overrides(parser)


def rehearse(parser: ArgumentParser) -> None:
    """`past rehearse`."""
    parser.add_argument("recipe", nargs="+", help="a shipped recipe, a folder of them (paper) or a .toml file")
    parser.add_argument("--out", type=place, help="keep the runs in this new folder (default: they are deleted)")
    _overrides(parser)


def demo(parser: ArgumentParser) -> None:
    """`past demo`."""
    parser.add_argument(
        "--family",
        choices=DEMOS,
        default=DEMOS[0],
        help="whose recipes: the embedded default, or SmolLM2-135M's two laboratories (past models pull smollm2-135m)",
    )
    parser.add_argument("--out", type=place, default=Path("runs/demo"), help="folder, made anew (default runs/demo)")
    parser.add_argument("--seeds", default=_SEEDS, help=f"training seeds, comma-separated (default {_SEEDS})")
    _overrides(parser)


def completion(parser: ArgumentParser) -> None:
    """`past completion`; the scripts call it with the words typed so far."""
    parser.add_argument("shell", nargs="?", choices=("bash", "zsh", "fish"), help="whose script to print")
    parser.add_argument("--words", dest="typed", nargs=REMAINDER, help=SUPPRESS)


def report(parser: ArgumentParser) -> None:
    """`past report`."""
    parser.add_argument("runs", nargs="+", type=place, metavar="RUN", help="run folder, or a folder that holds runs")
    parser.add_argument("--out", type=place, help="HTML file (default: report/index.html in the one folder given)")
    parser.add_argument(
        "--trajectories",
        type=int,
        default=TRAJECTORIES,
        metavar="N",
        help="attempts of each method in the trajectory browser; 0 leaves it out (default %(default)s)",
    )
    trust(parser)
    parser.add_argument("--figures", action="store_true", help="also write each figure as SVG and PDF beside the page")


def watch(parser: ArgumentParser) -> None:
    """`past watch`."""
    parser.add_argument(
        "runs", nargs="+", type=place, metavar="RUN", help="run folder, or a folder that holds runs; may not exist yet"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s: this machine)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default 0: any free one)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between looks (default %(default)s)")


def probe(parser: ArgumentParser) -> None:
    """`past probe`."""
    parser.add_argument("folder", type=place, metavar="RUN", help="run folder of 'past train'")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="which checkpoint (default: the newest whole one)")
    which.add_argument("--every-checkpoint", action="store_true", help="all kept checkpoints, one line each")
    parser.add_argument("--problems", type=int, default=64, help="problems (default %(default)s)")
    parser.add_argument("--samples", type=int, default=2, help="student responses a problem (default %(default)s)")
    parser.add_argument("--split", choices=("train", "evaluation"), default="train", help="whose problems")
    trust(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")


def shift(parser: ArgumentParser) -> None:
    """`past shift`."""
    parser.add_argument(
        "target",
        type=place,
        metavar="RUN",
        help="run folder of 'past train', or a recipe, to look before its first cycle",
    )
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest whole one)")
    for name, count, what in (
        ("responses", 128, "student responses"),
        ("pairs", 256, "pairs of rollouts, where teacher and student differ"),
        ("prefixes", 24, "prefixes that are completed to tell what survives; 0: none"),
        ("completions", 12, "completions a prefix"),
    ):
        parser.add_argument(f"--{name}", type=int, default=count, help=f"{what} (default %(default)s)")
    _overrides(parser, "of a recipe: override, e.g. run.seed=43")
    trust(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def theory(parser: ArgumentParser) -> None:
    """`past theory`."""
    parser.add_argument("--seed", type=int, default=0, help="of the random finite problems (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def export(parser: ArgumentParser) -> None:
    """`past export`."""
    parser.add_argument("folder", metavar="RUN", type=place, help="a run's folder")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest whole one)")
    parser.add_argument("--out", type=place, help="folder to write (default RUN/export or RUN/export-merged)")
    parser.add_argument("--merge", action="store_true", help="write the whole model with the adapter merged in")
    trust(parser)
    parser.add_argument("--push", metavar="REPO", help="also upload to this Hugging Face hub repository")
    parser.add_argument("--private", action="store_true", help="with --push: a repository made anew is private")


def doctor(parser: ArgumentParser) -> None:
    """`past doctor`, beside the recipe."""
    parser.add_argument(
        "--repeats", type=int, help=f"repeats of every check (default {REPEATS}; 2 with a large model on a CPU)"
    )
    parser.add_argument("--dry", action="store_true", help="load no weights")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="instead: does what is claimed of GPUs hold on this machine? kernel, memory, time, engine; one file",
    )
    parser.add_argument("--out", type=place, help=f"with --gpu: the file to write (default {GPU_CHECK})")


def trace(parser: ArgumentParser) -> None:
    """`past trace`."""
    parser.add_argument("recipe", nargs="+", help="shipped recipes (see 'past recipes') or .toml files")
    parser.add_argument(
        "--lengths",
        nargs="?",
        const=LENGTHS,
        metavar="TOKENS",
        help=f"also with responses of so many tokens, comma-separated (without a value: {LENGTHS})",
    )
    parser.add_argument("--processes", default="1", help="numbers of GPUs, comma-separated (default 1)")
    parser.add_argument(
        "--gpu", default="H100-80GB", help="whose data sheet (default %(default)s; a wrong name lists them)"
    )
    _overrides(parser)


def simulate(parser: ArgumentParser) -> None:
    """`past simulate`, beside the recipe."""
    parser.add_argument("--gpus", default="1,8,64", help="numbers of GPUs, comma-separated (default %(default)s)")
    parser.add_argument(
        "--gpu", default="H100-80GB", help="whose data sheet (default %(default)s; a wrong name lists them)"
    )
    for name, value, what in (
        ("mean", 0.6, "mean length as a share of max_new_tokens, which cuts longer ones"),
        ("spread", 0.5, "standard deviation of the lengths' logarithm"),
        ("solved", 0.5, "share of the student's responses that are right"),
        ("success", 0.4, "share of the teacher's continuations that are right"),
        ("verdict", 0.05, "mean seconds of a verdict"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{what} (default %(default)s)")
    parser.add_argument(
        "--records", type=place, metavar="RUN", help="take lengths, solved and success from what this run recorded"
    )
    parser.add_argument("--base", type=int, help="first continuations of a group, G_base (default: G_max, as at first)")
    parser.add_argument("--cycles", type=int, default=100, help="cycles that are simulated (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")


def serve(parser: ArgumentParser) -> None:
    """`past serve`, beside the recipe."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    parser.add_argument("--dry", action="store_true", help="print the command instead of running it")


def verify(parser: ArgumentParser) -> None:
    """`past verify`."""
    parser.add_argument("file", type=place, help="JSON lines with `gold` and `prediction` (or `response`)")
    parser.add_argument("--out", type=place, help="write the rows here with `correct` and `reason` added")
    parser.add_argument("--verifier", default="boxed_math", help="which verifier (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the verifier, e.g. timeout=2"
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave out rows that cannot be read, and count them")
    parser.add_argument(
        "--protocol-field",
        metavar="NAME",
        help="field that says how to read a row: direct, wrap (put the prediction in a box first) or skip",
    )


def _overrides(parser: ArgumentParser, text: str = "override") -> None:
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text)
