"""Plain math-verify's verdict, to set ours beside. Runs in a worker process that can be killed."""

from __future__ import annotations

import logging
from typing import Any, cast

from math_verify import parse, verify

# It warns that its own time limit is off; the process's limit takes its place.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_NEVER: Any = None


def accepts(gold: str, response: str) -> str:
    """ "yes" or "no"; a gold answer that is not marked as mathematics is marked so first, as its authors advise."""
    marked = any(sign in gold for sign in ("$", r"\(", r"\[", r"\boxed"))
    target = cast(Any, parse(gold if marked else f"${gold}$", parsing_timeout=_NEVER))
    found = cast(Any, parse(response, parsing_timeout=_NEVER))
    return "yes" if verify(target, found, timeout_seconds=_NEVER) else "no"
