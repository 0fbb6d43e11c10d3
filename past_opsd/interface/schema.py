"""`past schema`: a JSON schema of recipes, with which editors complete keys, explain them and mark what is wrong.

Nothing is required in it, since a recipe may extend another; `past show` says what is missing in the whole.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from past_opsd.core import config
from past_opsd.core.files import write_text
from past_opsd.core.reading import room
from past_opsd.interface.arguments import place

TITLE = "Recipe of past-opsd"
DIALECT = "http://json-schema.org/draft-07/schema#"


def schema() -> dict[str, Any]:
    """Every section, key, type, bound and explanation, the shipped methods', tasks', verifiers' and engines' too."""
    shared: dict[str, Any] = {}
    made = _described(config.RecipeBase.model_json_schema(ref_template="#/definitions/{model}"), shared)
    made["properties"]["extends"] = {"type": "string", "description": "a recipe file beside this one, or a shipped one"}
    for kind in config.PLUGINS:
        choices: list[dict[str, Any]] = []
        for name in config.known(kind):
            options = config.plugin(kind, name).Options.model_json_schema(ref_template="#/definitions/{model}")
            choices.append(_described(options, shared))
            choices[-1]["properties"]["name"] = {"const": name, "description": f"which {kind}"}
        own = {"type": "string", "pattern": r"\.", "description": f"a module of yours that holds a {kind}"}
        choices.append({"type": "object", "properties": {"name": own}, "required": ["name"]})
        made["properties"][kind] = {"description": f"which {kind}, and its options", "anyOf": choices}
    return {"$schema": DIALECT, "title": TITLE, **made, "definitions": shared}


def _described(made: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """One section's schema; the sections inside it go to `shared`."""
    for name, section in made.pop("$defs", {}).items():
        shared[name] = _plain(section)
    return _plain(made)


def _plain(section: dict[str, Any]) -> dict[str, Any]:
    section.pop("required", None)
    section.pop("title", None)
    for field in section.get("properties", {}).values():
        field.pop("title", None)
        if not isinstance(field.get("default"), bool | int | str):
            field.pop("default", None)  # floats may be infinite, tables are explained key by key
    return section


def text() -> str:
    """The schema as a file holds it."""
    return json.dumps(schema(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def is_ours(file: Path) -> bool:
    """Whether a file is a schema that was written here."""
    with file.open("rb") as opened:
        return f'"title": "{TITLE}"'.encode() in opened.read(1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to write it."""
    parser.add_argument("--out", type=place, help="write it to a file (default: print it)")


def run(args: argparse.Namespace) -> int:
    """Print or write the schema."""
    if args.out is None:
        print(text(), end="")
    else:
        room(args.out, ours=is_ours)
        write_text(args.out, text())
        print(f"{args.out}: begin a recipe beside it with  #:schema ./{args.out.name}")
    return 0
