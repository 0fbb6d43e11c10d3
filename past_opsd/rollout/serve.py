"""`past serve RECIPE`: a vLLM server for a recipe's base model, ready to be given adapters."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from typing import Any

from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import is_list
from past_opsd.rollout.engines.vllm_backend import Options, arguments, environment


def serve(recipe: Recipe, host: str, port: int, *, dry: bool = False) -> None:
    """Become the server; `dry` prints it as a shell would run it."""
    if not 1 <= port <= 65535:
        raise PastError(f"--port {port}: ports are 1 to 65535")
    if not host.strip():
        raise PastError("--host is empty: give an address, e.g. 127.0.0.1")
    words, variables = command(recipe, host, port), variables_of(recipe)
    if dry:
        print(" ".join([*(f"{key}={shlex.quote(value)}" for key, value in variables.items()), shlex.join(words)]))
    elif importlib.util.find_spec("vllm") is None:
        raise PastError("'past serve' needs vLLM here: pip install 'past-opsd[vllm]'; see docs/vllm.md")
    else:
        os.execve(words[0], words, os.environ | variables)


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
