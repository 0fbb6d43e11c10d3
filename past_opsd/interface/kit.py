"""`past doctor RECIPE --gpu`: whether what this package claims of GPUs holds on this machine, as one file to hand on.

On a machine without a GPU the same code looks at the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from past_opsd import __version__
from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.files import write_text
from past_opsd.core.reading import room
from past_opsd.interface import arguments
from past_opsd.interface.kit_parts import Part, attempt, cycles, kernel, machine, memory
from past_opsd.policy.pretrained import load_tokenizer

MARK = "<!-- written by past doctor --gpu -->"
TITLES = ("Machine", "Kernel", "Memory", "Phases of a cycle", "Engine and trainer")
ADVICE = (
    "Attach this whole file to a report to the project, whatever its verdicts: what is claimed of GPUs was computed,",
    "traced or seen in an interpreter, and a machine on which it holds tells as much as one on which it does not. The",
    "machine, its software and the whole recipe, paths included, are in it; no data and no weights are.",
    "",
    "- Kernel differs: train with `--set learner.implementation=fused`, which is plain torch.",
    "- Memory differs: `past trace` is wrong here by that much; lower `learner.token_budget` where it said too little.",
    "- Phases differ: `past doctor` and `past trace` tell too little time.",
    "- Engine and trainer differ: what is sampled is not what is trained; do not train so.",
)


def run(args: argparse.Namespace) -> int:
    """Write the file and print the verdicts; 1 where a part is not ok."""
    recipe = config.load(args.recipe, args.overrides)
    out = args.out or Path(arguments.GPU_CHECK)
    room(out, ours=is_ours)
    load_tokenizer(recipe.model)  # a model that is not here is told now, as in training
    began = time.monotonic()
    parts = check(recipe)
    write_text(out, markdown(recipe, parts, time.monotonic() - began))
    console = Console()
    console.print(table(recipe, parts))
    console.print(f"{out}: all numbers; attach it to a report, whatever the verdicts", highlight=False, soft_wrap=True)
    return 0 if all(part.verdict == "ok" for part in parts) else 1


def is_ours(file: Path) -> bool:
    """Whether a file was written here."""
    with file.open("rb") as opened:
        return opened.read(len(MARK)) == MARK.encode()


def table(recipe: Recipe, parts: Sequence[Part]) -> Table:
    """The verdicts, for a terminal."""
    out = Table(title=f"GPU check: {recipe.name}", title_justify="left")
    for name in ("Part", "Verdict", "What was found"):
        out.add_column(name)
    for part in parts:
        out.add_row(part.title, part.verdict, part.why)
    return out


def markdown(recipe: Recipe, parts: Sequence[Part], seconds: float) -> str:
    """The file: a section for each part, then all numbers for machines."""
    lines = [MARK, f"# GPU check of {recipe.name}", ""]
    lines += [f"`past doctor {recipe.name} --gpu`, past-opsd {__version__}, {seconds / 60:.1f} minutes.", ""]
    lines += _grid(("part", "verdict", "what was found"), [(p.title, p.verdict, p.why) for p in parts])
    for number, part in enumerate(parts, 1):
        lines += ["", f"## {number}. {part.title}: {part.verdict}", part.why]
        lines += ["", *_grid(part.columns, part.rows)] if part.rows else []
        lines += [line for note in part.notes for line in ("", note)]
    lines += ["", f"## {len(parts) + 1}. What to do with it", *ADVICE, "", "```json"]
    found = {part.title: {"verdict": part.verdict, "why": part.why, "numbers": part.numbers} for part in parts}
    plain = {"version": __version__, "seconds": seconds, "recipe": config.dump(recipe), "parts": found}
    return "\n".join([*lines, json.dumps(_finite(plain), indent=1, allow_nan=False), "```", ""])


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]


def _finite(value: Any) -> Any:
    """Numbers that JSON has not, as text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast(Sequence[Any], value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check(recipe: Recipe) -> list[Part]:
    """All parts, each whole or with the reason why it could not run."""
    first, second, third, fourth, fifth = parts = [Part(title) for title in TITLES]
    for part, look in ((first, machine), (second, kernel), (third, memory)):
        attempt([part], partial(look, part, recipe))
    attempt([fourth, fifth], partial(cycles, fourth, fifth, recipe, third.numbers.get("launches", 0)))
    return parts
