"""Classes and functions of one's own, in the place of a module's name: `module:name` in a recipe.

A script or a notebook gives the object itself; a recipe, and so a run's folder, has its name. One that is written in
the script or notebook is `__main__:name`, and is found there again as long as that is the program that runs.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import linecache
import operator
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from past_opsd.core.nouns import PastError

MAIN = "__main__"


def is_own(name: str) -> bool:
    """Whether a name is that of an object in a module, not of a module."""
    return ":" in name


def name_of(thing: Any, key: str) -> str:
    """`module:name` of a class or function, by which it is found again; `key` is where it was given."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name:
        raise PastError(
            f"{key}: a {type(thing).__name__} ({thing!r:.80}) is given; give a name, or a class or function of yours"
        )
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing:
        raise PastError(
            f"{key}: {module}:{name} cannot be found again by this name: define it at the top level of a module, a "
            "script or a notebook's cell, under a name of its own, and give what that name stands for now"
        )
    return f"{module}:{name}"


def find(name: str, key: str) -> Any:
    """The object behind `module:name`."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a file beside the recipe need not be installed
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except AttributeError:
        if module == MAIN:
            raise PastError(
                f"{key} = '{name}' was defined in a script or a notebook, and the program that runs now does not have "
                "it. Go on there: define it and call past_opsd.resume(RUN); or put it into a module of yours and start "
                f"a new run with {key} = 'module:{attribute}'"
            ) from None
        raise PastError(f"{key} = '{name}': the module {module} has no {attribute}") from None
    except Exception as error:  # whatever a module of the user's does while it is imported
        raise PastError(f"{key} = '{name}': cannot be imported ({type(error).__name__}: {error})") from error


def only_here(thing: Any) -> bool:
    """Whether other processes do not find it: they search installed packages and the folder they start in."""
    module = sys.modules[thing.__module__]
    file = Path(getattr(module, "__file__", None) or "none").resolve()
    root = file.parents[module.__name__.count(".") + (file.name == "__init__.py")]
    return module.__name__ == MAIN or str(root) not in {os.getcwd(), *map(os.path.abspath, sys.path[1:])}


def source(thing: Any) -> str:
    """A class or function as it was written; empty where its text is not kept."""
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        return _in_cell(thing) if inspect.isclass(thing) else ""


def digest(thing: Any) -> str:
    """Of its source."""
    text = source(thing)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else "no source"


def _in_cell(thing: type) -> str:
    """The source of a class in a notebook, which has no file: the text of its methods' cell is kept."""
    for member in vars(thing).values():
        if not inspect.isfunction(member):
            continue
        text = "".join(linecache.getlines(member.__code__.co_filename))
        with_it = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef) and n.name == thing.__name__]
        if with_it:
            return (ast.get_source_segment(text, with_it[-1]) or "") + "\n"
    return ""
