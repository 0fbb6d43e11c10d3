"""Heavy libraries, imported when something of them is first used.

Recipes are checked against the options that stand beside the code of a method or an engine; reading one must not cost
the seconds that torch and transformers take to load.
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stands for a module; annotations name the real one under `if TYPE_CHECKING`."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
