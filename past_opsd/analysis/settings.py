"""In which settings a row of a comparison differs from the others, read from the runs' own recipes.

What makes the method is apart: its section but for `SHARED`, the prompts of one baseline alone. So are names and seeds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from past_opsd.core.prompts import OPTIONAL
from past_opsd.core.reading import is_table

SHARED = ("tau", "temperature")
"""Of a method's section what means the same in all of them."""
APART = {"name", "description", "run.seed", *(f"prompts.{role}" for role in OPTIONAL)}
TITLE = "Settings in which a row differs from the others; what makes the method is apart"
HEADER = ("Method", "setting", "here", "common")
_WIDE = 24

Settings = Mapping[str, str]
"""Key -> value, as JSON."""


def of(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a recipe, as `config.dump` gives it, that the rows of a comparison could share."""
    return {
        key: json.dumps(value)
        for key, value in _leaves(recipe)
        if key not in APART and (not key.startswith("method.") or key.removeprefix("method.") in SHARED)
    }


def _leaves(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if is_table(value) and value and "float" not in value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value["float"] if is_table(value) and value else value  # 'inf' or 'nan'


def differences(rows: Mapping[str, Settings], reference: str) -> list[dict[str, str]]:
    """Where a row's value is not the common one: the reference's, or what most rows have of a key that it has not."""
    found: list[dict[str, str]] = []
    for key in dict.fromkeys(key for settings in rows.values() for key in settings):
        values = {label: settings[key] for label, settings in rows.items() if key in settings}
        common = values.get(reference) or Counter(values.values()).most_common(1)[0][0]
        found += [
            {"row": label, "key": key, "value": _shown(value), "common": _shown(common)}
            for label, value in values.items()
            if value != common
        ]
    order = list(rows)
    return sorted(found, key=lambda item: order.index(item["row"]))


def _shown(value: str) -> str:
    """As a recipe has it; a long text by its length."""
    plain = json.loads(value)
    if isinstance(plain, str) and (len(plain) > _WIDE or "\n" in plain):
        return f"a text of {len(plain)} letters"
    text = plain if isinstance(plain, str) else value.replace("null", "-")
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."


def lines(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The differences in a suite's results as rows under `HEADER`."""
    return [(item["row"], item["key"], item["value"], item["common"]) for item in result.get("settings", [])]
