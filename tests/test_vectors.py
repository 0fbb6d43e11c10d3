"""Against numbers that neither the package nor torch computed: tests/data, written by scripts/make_vectors.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from past_opsd.core import losses
from past_opsd.core.stats import avg_at_k, pass_at_k
from past_opsd.policy import fused
from past_opsd.rollout.verifiers._extract import find_answer

HERE = Path(__file__).parent


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (HERE / "data" / name).read_text(encoding="utf-8").splitlines()]


def name(row: dict) -> str:
    return f"{row['loss']} {row['arguments']} at {row['temperature']}"


def test_the_files_are_what_the_script_writes():
    subprocess.run([sys.executable, HERE.parent / "scripts" / "make_vectors.py", "--check"], check=True)


def assert_stated(found: torch.Tensor, stated: list) -> None:
    """Sums of up to nine entries of doubles: 1e-12 of the largest entry is a thousand times what rounding makes."""
    expected = torch.tensor(stated, dtype=torch.float64)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("row", rows("losses.jsonl"), ids=name)
def test_losses_and_their_gradients(row: dict):
    """By autograd through the formula, and as the learner takes them, with the logits as states under the head I."""
    loss = getattr(losses, row["loss"])(**row["arguments"])
    live = torch.tensor(row["live_logits"], dtype=torch.float64, requires_grad=True)
    frozen = torch.tensor(row["frozen_logits"], dtype=torch.float64)
    tokens = torch.tensor(row["tokens"])
    live_logp, frozen_logp = (torch.log_softmax(z / row["temperature"], -1) for z in (live, frozen))
    values = loss(live_logp, frozen_logp, tokens)
    assert_stated(values, row["values"])
    assert_stated(torch.autograd.grad(values.sum(), live)[0], row["gradient"])
    head = torch.eye(live.shape[1], dtype=torch.float64)
    job = fused.Job(loss, torch.ones(len(tokens), dtype=torch.float64))
    for implementation in ("reference", "chunked", "fused"):
        result = fused.run(
            implementation, live.detach(), frozen, head, None, tokens, [job], temperature=row["temperature"]
        )
        assert_stated(result.values[0], row["values"])
        assert_stated(result.grad, row["gradient"])


@pytest.mark.parametrize("row", rows("scores.jsonl"), ids=str)
def test_scores(row: dict):
    assert avg_at_k([row["right"]]) == pytest.approx(row["avg"], abs=1e-12)
    assert pass_at_k([row["right"]], row["k"]) == pytest.approx(row["pass"], abs=1e-12)


@pytest.mark.parametrize("row", rows("boxes.jsonl"), ids=lambda row: row["text"])
def test_boxes(row: dict):
    found = find_answer(row["text"])
    assert (None if found.failure else found.last) == row["content"]
