"""`past init`: a commented recipe for one's own model and data, from a look at both."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from past_opsd.core import config, life
from past_opsd.core.config import Recipe
from past_opsd.core.files import whole, write_text
from past_opsd.core.nouns import PastError
from past_opsd.interface import data, schema
from past_opsd.interface.arguments import place
from past_opsd.tasks import benchmarks
from past_opsd.tasks._columns import ALIASES, Loaded, load, plain
from past_opsd.tasks.dataset import Options, accept, check_mapping, training

SCHEMA = "recipe.schema.json"
LIMITS = (64, 128, 256, 512, 1024, 2048, 4096)  # what a response's limit is chosen from
THINKING = 38_912  # new tokens in evaluation where the model thinks aloud: the paper's
HELD_OUT = 200  # at most so many problems are kept out of training where no held-out set is named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `past init`."""
    parser.add_argument("recipe", nargs="?", type=place, default=Path("recipe.toml"), help="file (default recipe.toml)")
    parser.add_argument("--model", required=True, help="a folder, a hub id, a .gguf file or a pulled model")
    parser.add_argument("--data", required=True, help="training problems: a file, a folder or hf:owner/name")
    parser.add_argument("--evaluation", nargs="+", default=[], metavar="[NAME=]SOURCE", help="held-out problems")
    parser.add_argument("--benchmark", default="", metavar="NAMES", help="held-out sets by name: aime24,hmmt25,...")
    parser.add_argument("--column", action="append", default=[], metavar="ROLE=NAME", help="e.g. problem=Question")
    parser.add_argument("--extends", default="paper/past", metavar="RECIPE", help="start from (default paper/past)")


def run(args: argparse.Namespace) -> int:
    """Look, write, and say what comes next."""
    from rich.console import Console

    from past_opsd.interface import doctor

    console = Console()
    if args.recipe.suffix != ".toml":
        raise PastError(f"{args.recipe}: a recipe's name ends in .toml")
    if args.recipe.exists():
        raise PastError(f"{args.recipe} exists; name another file, or remove it")
    aid = args.recipe.parent / SCHEMA
    if aid.exists() and not schema.is_ours(aid):
        raise PastError(f"{aid} exists and is not a schema of recipes; write the recipe into another folder")
    found = look(args)
    for line in found.told:
        console.print(line, highlight=False, soft_wrap=True)
    with whole(args.recipe) as part:
        part.write_text(compose(found, args.recipe), encoding="utf-8")
        recipe = config.load(part)
    write_text(aid, schema.text())
    doctor.needs(console, recipe)
    console.print(f"\nwritten: {args.recipe}, and {SCHEMA} for editors. Next:", highlight=False, soft_wrap=True)
    for words, purpose in (
        (["data", "check", "--recipe", args.recipe], "rows, answers, lengths, overlap"),
        (["inspect", args.recipe, "--dry"], "what student and teacher read"),
        (["train", args.recipe], ""),
    ):
        command = shlex.join([*life.program(), *map(str, words)])
        said = f"  {command}" + f"   # {purpose}" * bool(purpose)
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    return 0


@dataclass
class Look:
    """What was found, and what follows for the recipe."""

    parent: str
    model: str
    source: str
    evaluation: Mapping[str, str]
    hold_out: int = 0
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    bad: int = 0
    switch: bool = False
    """The chat template has a thinking mode to switch."""
    room: int = 0
    solution: int = 0
    response: int = 0
    evaluated: int = 0
    told: list[str] = field(default_factory=list[str])


def look(args: argparse.Namespace) -> Look:
    """Read the data, the tokenizer and the model's shape."""
    parent = config.load(args.extends)
    if parent.task.name != "dataset":
        raise PastError(f"--extends {args.extends}: its task is '{parent.task.name}', which reads no data file")
    sets = dict(data.named(entry) for entry in args.evaluation)
    if args.benchmark:
        sets |= benchmarks.sources([name.strip() for name in args.benchmark.split(",")], {})
    found = Look(args.extends, args.model, args.data, sets)
    loaded = _data(found, parent, args)
    named = {"model.path": args.model, "task.train": args.data}
    settings = [*(f"{key}={config.toml_value(value)}" for key, value in named.items()), "model.dtype=auto"]
    draft = config.load(args.extends, [*settings, "model.max_context=1000000000"])
    _template(found, draft)
    _lengths(found, draft, loaded)
    return found


def _data(found: Look, parent: Recipe, args: argparse.Namespace) -> Loaded:
    settings = {"needs_solution": parent.task.needs_solution, "needs_answer": parent.task.needs_answer}
    options = Options.model_validate({"train": args.data, "columns": data.columns(args.column), "keep": [], **settings})
    loaded = load(args.data, training(options))
    check_mapping(loaded, options)
    try:
        accept(loaded, "skip", found.told)
    except PastError as error:
        raise PastError(f"{error}\nHere a column is named with --column ROLE=NAME, e.g. problem=Question") from None
    origins = ", ".join(f"{role} from '{_likeliest(loaded, role)}'" for role in ALIASES if loaded.used[role])
    found.told.insert(0, f"data: {len(loaded.problems):,} problems in {loaded.rows:,} rows; {origins}")
    found.columns = options.columns | {
        role: column
        for role in ALIASES
        if (column := _likeliest(loaded, role)) in loaded.columns and plain(column) not in map(plain, ALIASES[role])
    }
    found.bad = len(loaded.bad)
    if not found.evaluation:
        found.hold_out = min(HELD_OUT, max(1, len(loaded.problems) // 10))
        if len({p.text for p in loaded.problems}) <= found.hold_out:
            raise PastError(
                f"--data {args.data}: too few different problems to keep some apart; name held-out ones by --evaluation"
            )
    return loaded


def _likeliest(loaded: Loaded, role: str) -> str:
    return next((origin for origin, _ in loaded.used[role].most_common(1)), "")


def _template(found: Look, draft: Recipe) -> None:
    from past_opsd.policy import templates
    from past_opsd.policy.pretrained import load_tokenizer

    findings = templates.check(load_tokenizer(draft.model), draft.prompts)
    errors = [f.text for f in findings if f.level == "error"]
    if errors:
        raise PastError(f"--model {found.model}: " + "\n".join(errors))
    ignored = any(f.code == "ignored" and "enable_thinking" in f.text for f in findings)
    found.switch = "enable_thinking" in draft.prompts.student_kwargs and not ignored
    mode = "has a thinking mode" if found.switch else "has no thinking mode to switch"
    found.told.append(f"chat template: {mode}")
    found.told += [f"note: {f.text}" for f in findings if f.code not in ("ignored", "openings")]


def _lengths(found: Look, draft: Recipe, loaded: Loaded) -> None:
    """Limits of responses: half as long again as the references, as far as student and teacher have room for it."""
    found.room, tokens = data.needs(draft, loaded.problems)
    prompt = data.at_95([n.student for n in tokens])
    found.solution = data.at_95([n.solution for n in tokens])
    # The teacher reads the reference and the attempt before it writes as much again.
    free = (found.room - prompt - found.solution) // 2
    wanted = 1.5 * found.solution if found.solution else draft.rollout.student.max_new_tokens
    fitting = [limit for limit in LIMITS if limit <= free]
    if not fitting:
        raise PastError(
            f"--model {found.model}: room for {found.room} tokens, but a prompt takes {prompt} and a reference "
            f"{found.solution}; choose a model with a longer context, or shorter problems"
        )
    found.response = next((limit for limit in fitting if limit >= wanted), fitting[-1])
    most = found.room - max(n.student for n in tokens)
    found.evaluated = max(1, min(THINKING if found.switch else 4 * found.response, most))
    found.told += [
        f"tokens, 95 % of the rows below: student's prompt {prompt:,}, reference {found.solution:,}; "
        f"the model has room for {found.room:,}",
        f"responses up to {found.response:,} tokens in training, {found.evaluated:,} in evaluation",
    ]


def compose(found: Look, recipe: Path) -> str:
    """The recipe's text: what is one's own, each key with its reason; the rest is inherited."""
    toml = config.toml_value
    lines = [
        f"#:schema ./{SCHEMA}",
        f"# What is not said here is as in {found.parent}; 'past show {recipe}' prints the whole, every key explained.",
        f"extends = {toml(found.parent)}",
        f"name = {toml(recipe.stem)}",
        f"description = {toml(f'{found.parent} for {found.model}')}",
        "",
        "[run]",
        "cycles = 100            # student updates",
        "seed = 17",
        "",
        "[model]",
        f"path = {toml(_beside(found.model, recipe))}",
        'dtype = "auto"          # bfloat16 on a GPU that has it, float32 elsewhere',
        f"max_context = {found.room}     # prompt and response together; lower it to save memory",
        "",
        "[model.lora]",
        "rank = 64",
        "alpha = 128",
    ]
    if not found.switch:
        lines += ["", "[prompts]                # this model's chat template has no thinking mode to switch"]
        lines += [f"{role}_kwargs = {{}}" for role in ("student", "teacher", "evaluation")]
    lines += ["", "[task]", 'name = "dataset"', f"train = {toml(_beside(found.source, recipe))}"]
    if found.columns:
        named = ", ".join(f"{role} = {toml(name)}" for role, name in found.columns.items())
        lines.append(f"columns = {{ {named} }}")
    if found.bad:
        lines.append(f'bad_rows = "skip"       # {found.bad} rows cannot be used; "refuse" stops at them')
    if found.hold_out:
        lines.append(f"hold_out = {found.hold_out}           # problems kept out of training, to evaluate on")
        lines.append("evaluation = {}         # none of the inherited sets")
    else:
        named = ", ".join(f"{config.toml_key(n)} = {toml(_beside(s, recipe))}" for n, s in found.evaluation.items())
        lines.append(f"evaluation = {{ {named} }}")
    for role in ("student", "teacher"):
        why = f"  # 95 % of the references have at most {found.solution}" * (role == "student")
        lines += ["", f"[rollout.{role}]", f"max_new_tokens = {found.response}{why}"]
    lines += ["", "[evaluation.sampling]", f"max_new_tokens = {found.evaluated}"]
    return "\n".join(lines) + "\n"


def _beside(source: str, recipe: Path) -> str:
    """A path as the recipe names it: relative where it lies beside the recipe or below."""
    if source in config.EMBEDDED or not Path(source).exists():
        return source
    relative = os.path.relpath(source, recipe.resolve().parent)
    return os.path.abspath(source) if relative.startswith("..") else Path(relative).as_posix()
