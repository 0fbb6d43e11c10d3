from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from past_opsd.analysis import settings, suite, tables
from past_opsd.core import config

SAMPLES, PROBLEMS = "rollout.samples_per_problem", "rollout.problems_per_cycle"
# What a row sets differently from the others of its suite. Each has its reason in the recipe, above the key.
KNOWN = {
    ("embedded", "main"): {
        ("GRPO", PROBLEMS, "1", "8"),
        ("GRPO", SAMPLES, "8", "1"),
        ("GRPO, 64 rollouts", SAMPLES, "8", "1"),
        ("GRPO, dynamic", PROBLEMS, "1", "8"),
        ("GRPO, dynamic", SAMPLES, "8", "1"),
        ("GRPO, dynamic", "rollout.dynamic_rounds", "16", "0"),
        ("H2SD, dynamic", PROBLEMS, "1", "8"),
        ("H2SD, dynamic", SAMPLES, "8", "1"),
        ("H2SD, dynamic", "rollout.dynamic_rounds", "16", "0"),
        ("H2SD, dynamic", "method.tau", "inf", "1.0"),
        ("OPD", "model.expert", "embedded-expert", "-"),
        ("H2SD, matched", PROBLEMS, "1", "8"),
        ("H2SD, matched", SAMPLES, "8", "1"),
        ("H2SD, matched", "method.tau", "inf", "1.0"),
        ("H2SD, 64 rollouts", SAMPLES, "8", "1"),
        ("H2SD, 64 rollouts", "method.tau", "inf", "1.0"),
    },
    ("embedded", "robustness"): {("GRPO", PROBLEMS, "1", "8"), ("GRPO", SAMPLES, "8", "1")},
    ("paper", "main"): {
        ("GRPO", SAMPLES, "8", "1"),
        ("H2SD", SAMPLES, "8", "1"),
        ("H2SD", "rollout.teacher.max_new_tokens", "4096", "1024"),
        ("H2SD", "method.tau", "inf", "0.05"),
        ("H2SD", "task.keep", '["hint"]', "[]"),
    },
    ("paper", "thinking"): {
        (row, key, value, common)
        for row in ("Vanilla OPSD, student thinks", "PAST, student thinks")
        for key, value, common in (
            ("prompts.student_kwargs.enable_thinking", "true", "false"),
            ("rollout.student.max_new_tokens", "16384", "1024"),
            ("rollout.teacher.max_new_tokens", "16384", "1024"),
        )
    },
}


def loaded(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    return config.dump(config.load(recipe, overrides))


@pytest.mark.parametrize("family", ["embedded", "paper"])
def test_shipped_rows_share_everything_but_what_is_known(family: str):
    for name, found in suite.suites(family).items():
        rows = {label: settings.of(loaded(recipe)) for label, recipe in found.rows.items()}
        listed = settings.differences(rows, found.reference)
        assert {tuple(item.values()) for item in listed} == KNOWN.get((family, name), set()), name


def test_recipes_with_settings_of_their_own_say_why():
    """A comment that reaches the key: no table of a baseline's recipe beside [method] comes without one."""
    for family in ("embedded", "paper"):
        for path in sorted((config.SHIPPED / family).glob("*.toml")):
            if path.name in ("_base.toml", "suites.toml", "variants.toml"):
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            for i, line in enumerate(lines):
                if line.startswith("[") and not line.startswith("[method"):
                    around = lines[max(0, i - 4) : i + 2]
                    assert any(text.startswith("#") for text in around), f"{path.name}: {line}"


def test_the_common_value_is_the_references_and_else_what_most_rows_have():
    rows = {"a": {"x": "1"}, "b": {"x": "2", "y": "2"}, "c": {"x": "2", "y": "1"}, "d": {"x": "1", "y": "1"}}
    assert settings.differences(rows, "a") == [
        {"row": "b", "key": "x", "value": "2", "common": "1"},
        {"row": "b", "key": "y", "value": "2", "common": "1"},
        {"row": "c", "key": "x", "value": "2", "common": "1"},
    ]
    assert settings.differences(rows, "b")[0] == {"row": "a", "key": "x", "value": "1", "common": "2"}


def test_what_makes_a_method_is_apart():
    past = settings.of(loaded("embedded/past"))
    assert {key for key in past if key.startswith("method.")} == {"method.tau", "method.temperature"}
    assert not {"name", "description", "run.seed", "prompts.hint"} & set(past)
    assert {"learner.student.max_grad_norm", "rollout.student.top_p", "prompts.student", "task.name"} <= set(past)
    beta = settings.of(loaded("embedded/beta_0"))
    assert settings.differences({"PAST": past, "beta_KL 0": beta}, "PAST") == []
    assert settings.of(loaded("embedded/past", ["method.tau=inf"]))["method.tau"] == '"inf"'
    assert math.isinf(config.load("embedded/past", ["method.tau=inf"]).method.tau)


def test_long_texts_are_told_by_their_length():
    rows = {
        n: settings.of(loaded("embedded/past", o))
        for n, o in (("a", []), ("b", [f"prompts.student='{{problem}}{'.' * 40}'"]))
    }
    (item,) = settings.differences(rows, "a")
    assert (item["key"], item["value"], item["common"]) == (
        "prompts.student",
        "a text of 49 letters",
        "Problem: {problem}",
    )


def test_the_list_stands_under_the_tables(tmp_path: Path):
    row = {"label": "Base", "tasks": {"chain3": 0.5}, "macro": [0.5, 0.4, 0.6], "difference": [0.0, 0.0, 0.0]}
    listed = [{"row": "GRPO", "key": SAMPLES, "value": "8", "common": "1"}]
    result = {
        "title": "T",
        "suite": "s",
        "samples": 12,
        "cycles": 50,
        "seeds": [17],
        "reference": "Base",
        "rows": [row],
    }
    folder = suite.save(tmp_path, result | {"settings": listed})
    assert f"| GRPO | {SAMPLES} | 8 | 1 |" in (folder / "tables.md").read_text()
    assert "samples\\_per\\_problem & 8 & 1" in (folder / "tables.tex").read_text()
    assert tables.sheets(result)[-1].title != settings.TITLE, "a list of earlier results, or nothing to list"
