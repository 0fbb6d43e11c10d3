from __future__ import annotations

import pytest
import torch

from past_opsd.core.losses import Match
from past_opsd.core.nouns import Term, View
from past_opsd.policy.fingerprint import fingerprint
from past_opsd.run.train import Session


def some(dtype: torch.dtype) -> list[torch.Tensor]:
    """Shapes that fill a table, that leave an odd entry, and a single number."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in ((6, 64), (5, 7), (512, 4), (1,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_of_every_entry_counts(dtype: torch.dtype):
    tensors = some(dtype)
    before, kind = fingerprint(tensors), {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert fingerprint([t.clone() for t in tensors]) == before
    for tensor in tensors:
        bits = tensor.view(kind).view(-1)
        for place in {0, len(bits) // 2, len(bits) - 1}:
            for bit in range(8 * dtype.itemsize):
                lowest = torch.iinfo(kind).min
                mask = lowest if bit == 8 * dtype.itemsize - 1 else 1 << bit
                bits[place] ^= mask
                assert fingerprint(tensors) != before
                bits[place] ^= mask
    assert fingerprint(tensors) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchanged_entries_are_seen_also_when_only_their_signs_differ(dtype: torch.dtype):
    """One entry is 1.5, another -1.5, the rest as they are; the two are exchanged, wherever they stand."""
    tensors = some(dtype)
    flat = [t.view(-1) for t in tensors]
    places = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 64), (0, 383), (2, 0), (2, 3), (2, 1024), (2, 1025), (1, 34), (3, 0)]
    for i, (a, m) in enumerate(places):
        for b, n in places[:i]:
            kept = flat[a][m].clone(), flat[b][n].clone()
            flat[a][m], flat[b][n] = 1.5, -1.5
            before = fingerprint(tensors)
            flat[a][m], flat[b][n] = -1.5, 1.5
            assert fingerprint(tensors) != before, (a, m, b, n)
            flat[a][m], flat[b][n] = kept


def test_order_counts():
    tensors = some(torch.float32)
    assert fingerprint(tensors) != fingerprint(tensors[::-1])
    assert fingerprint([tensors[0]]) != fingerprint([tensors[0].flip(0)])


@pytest.mark.parametrize("bits", [1, 2**31 - 1])
def test_a_step_that_moved_the_other_adapter_is_refused(past: Session, monkeypatch: pytest.MonkeyPatch, bits: int):
    bump = past.model.bump
    entry = list(past.model.parameters("student").values())[-1].detach().view(torch.int32).view(-1)

    def spill(adapter: str) -> None:
        entry[7] ^= bits
        bump(adapter)

    monkeypatch.setattr(past.model, "bump", spill)
    with pytest.raises(RuntimeError, match="student adapter moved"):
        past.learner.step("teacher", [Term("t", View("teacher", (1, 5)), View("student", (1, 2)), (6, 7), Match())])
