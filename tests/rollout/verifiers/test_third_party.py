"""Against cases that others wrote: pairs with stated verdicts, real model outputs, adversarial inputs."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from past_opsd.core.nouns import Problem, Response
from past_opsd.rollout.verifiers import Reason
from past_opsd.rollout.verifiers._extract import find_boxes
from past_opsd.rollout.verifiers.boxed_math import BoxedMath, Options
from past_opsd.rollout.verifiers.grade import grade_file

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "verifier"


def data(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is not there")
    return DATA / name


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data(name).read_text().splitlines()]


@pytest.fixture(scope="module")
def verifier() -> Iterator[BoxedMath]:
    with BoxedMath(Options()) as built:
        yield built


def test_box_extraction() -> None:
    for row in rows("box_extraction.jsonl"):
        found = find_boxes(row["text"])
        said = "" if found.failure is Reason.EMPTY_BOX else None if found.failure is not None else found.last
        assert (said and said.strip()) == (row["boxed"] and row["boxed"].strip()), row


def test_stated_pairs(verifier: BoxedMath) -> None:
    summary = grade_file(data("public.jsonl"), None, verifier, protocol_field="boxed_protocol")
    assert summary.overall.total > 290
    assert summary.overall.wrongly_accepted == 0
    # Stated right, and rejected: two chains that contradict themselves, a repeated solution, and a decimal for a root.
    assert summary.overall.wrongly_rejected <= 4
    assert summary.by_source["MARIO-Math-Reasoning/MARIO_EVAL"].ours.wrongly_rejected <= 1
    others = [p.ours for name, p in summary.by_source.items() if "Math-Verify" not in name and "MARIO" not in name]
    assert min(part.rate for part in others) == 1.0


@pytest.mark.parametrize("name", ["real_outputs_public.jsonl", "gsm8k_model_solutions_1500.jsonl"])
def test_real_outputs(verifier: BoxedMath, name: str) -> None:
    assert grade_file(data(name), None, verifier).overall.rate == 1.0


@pytest.mark.parametrize("name", ["aime24.jsonl", "aime25.jsonl", "hmmt25.jsonl"])
def test_benchmark_golds_can_be_read(verifier: BoxedMath, name: str) -> None:
    golds = [Problem("p", "", "", row["answer"]) for row in rows(f"../eval/{name}")]
    same = verifier.verify([(gold, Response((), rf"\boxed{{{gold.answer}}}", (), True)) for gold in golds])
    assert all(verdict.correct for verdict in same)
    other = verifier.verify([(gold, Response((), r"\boxed{\sqrt{7}+8.123}", (), True)) for gold in golds])
    assert {verdict.reason for verdict in other} == {"wrong"}


@pytest.mark.slow
def test_adversarial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with BoxedMath(Options(timeout=2.0)) as verifier:
        for row in rows("adversarial.jsonl"):
            began = time.monotonic()
            (verdict,) = verifier.verify(
                [(Problem("p", "", "", row["gold"]), Response((), row["prediction"], (), True))]
            )
            assert time.monotonic() - began < row["must_return_within_s"], row["name"]
            assert row["expected"] in (None, verdict.correct), (row["name"], verdict)
    assert list(tmp_path.iterdir()) == []
