"""`past serve RECIPE`: a vLLM server for a recipe's base model, ready to be given adapters."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from typing import Any

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import is_list
from past_opsd.rollout.engines.vllm_backend import Options, arguments, environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments beside the recipe."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    parser.add_argument("--dry", action="store_true", help="print the command instead of running it")


def run(args: argparse.Namespace) -> int:
    """Become the server; `--dry` prints it as a shell would run it."""
    if not 1 <= args.port <= 65535:
        raise PastError(f"--port {args.port}: ports are 1 to 65535")
    if not args.host.strip():
        raise PastError("--host is empty: give an address, e.g. 127.0.0.1")
    recipe = config.load(args.recipe, args.overrides)
    words, variables = command(recipe, args.host, args.port), variables_of(recipe)
    if args.dry:
        print(" ".join([*(f"{key}={shlex.quote(value)}" for key, value in variables.items()), shlex.join(words)]))
    elif importlib.util.find_spec("vllm") is None:
        raise PastError("'past serve' needs vLLM here: pip install 'past-opsd[vllm]'; see docs/vllm.md")
    else:
        os.execve(words[0], words, os.environ | variables)
    return 0


def command(recipe: Recipe, host: str, port: int) -> list[str]:
    """The server's command line. Of the engine's options those of vLLM count; another engine's recipe has defaults."""
    options = recipe.engine if isinstance(recipe.engine, Options) else Options()
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port)]
    for key, value in arguments(recipe.model, options).items():
        words += _flag(key, value)
    return words


def variables_of(recipe: Recipe) -> dict[str, str]:
    """Environment variables that the server needs and that are not set yet."""
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} | environment(recipe.model)


def _flag(key: str, value: Any) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if is_list(value):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]
