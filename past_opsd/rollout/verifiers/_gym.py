# pyright: standard
# reasoning-gym is an extra, and not there where types are checked.
r"""reasoning-gym in a worker process: makes problems and scores answers.

Both run under one fixed hash seed, since some of its tasks follow the order of a set. For scoring the entry is made
anew from its origin, so that its metadata keep their types.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]

# Tasks whose metadata hold the way to the answer.
WORKED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "gsm_symbolic": lambda metadata: re.sub(r"\s*####[^\n]*\s*$", "", metadata["answer_cot"]),
    "string_manipulation": lambda metadata: "\n".join(metadata["states"]),
}
_TEXT = re.compile(r"\\(?:text|mathrm|texttt)\{(.*)\}", re.DOTALL)


def make(request: str) -> str:
    """Up to `count` entries with different questions, none of them in `taken`; or what is wrong with the request."""
    asked: dict[str, Any] = json.loads(request)
    name, origin = asked["origin"]["task"], asked["origin"]
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        return json.dumps(f"reasoning-gym has no task '{name}'" + (f"; near are {', '.join(near)}" if near else ""))
    try:
        data = _data(**origin)
    except (TypeError, ValueError, AssertionError) as error:
        return json.dumps(f"reasoning-gym's task '{name}' refuses the settings {origin['config']}: {error}")
    seen = set(asked["taken"])
    found: list[dict[str, Any]] = []
    for index in range(origin["size"]):
        if len(found) == asked["count"]:
            break
        entry = data[index]
        if entry["answer"] is None:
            return json.dumps(f"reasoning-gym's task '{name}' brings no reference answer; choose another")
        if entry["question"] not in seen:
            seen.add(entry["question"])
            way = WORKED[name](entry["metadata"]) if name in WORKED else ""
            found.append({"question": entry["question"], "answer": str(entry["answer"]), "way": way, "index": index})
    return json.dumps(found)


def score(item: str) -> str:
    """The best score of a boxed answer, as it stands or out of its \\text{}; "" where the entry is another one."""
    asked: dict[str, Any] = json.loads(item)
    data = _data(**asked["origin"])
    entry = data[asked["index"]]
    if entry["question"] != asked["question"]:
        return ""
    wrapped = _TEXT.fullmatch(asked["answer"])
    answers = [asked["answer"]] + ([wrapped[1]] if wrapped else [])
    return str(max(float(data.score_answer(answer, entry)) for answer in answers))


@lru_cache(maxsize=64)
def _data(task: str, config: str, seed: int, size: int) -> Any:
    return create_dataset(task, seed=seed, size=size, **json.loads(config))
