from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, LlamaConfig

import past_opsd.attention
from past_opsd import packing
from past_opsd.config import ModelSection
from past_opsd.model import Network
from past_opsd.types import View

PROMPT = (5, 6, 7)
PATHS = [
    (View("teacher", PROMPT), (1, 2, 3)),
    (View("teacher", (9, 8)), (4,)),
    (View("teacher", PROMPT), (7,)),
    (View("teacher", PROMPT), (2, 2, 2, 2)),
]


def test_plain_rows_read_the_prompt_and_all_but_the_last_token():
    packed = packing.plain(PATHS)
    assert packed.ids.tolist()[0] == [5, 6, 7, 1, 2, 0]
    assert packed.mask.tolist()[1] == [1, 1, 0, 0, 0, 0]
    assert packed.index.tolist() == [2, 3, 4, 7, 14, 20, 21, 22, 23]


def test_a_shared_row_holds_its_prompt_once_and_positions_start_again():
    packed = packing.shared(PATHS)
    assert packed.ids.tolist() == [[5, 6, 7, 1, 2, 2, 2, 2], [9, 8, 0, 0, 0, 0, 0, 0]]
    assert packed.positions.tolist()[0] == [0, 1, 2, 3, 4, 3, 4, 5]
    # first tokens are all predicted by the prompt's last position
    assert packed.index.tolist() == [2, 3, 4, 9, 2, 2, 5, 6, 7]


def test_a_response_sees_the_prompt_and_itself_and_nothing_else():
    mask = packing.shared(PATHS).mask[0, 0]
    seen = [row.nonzero().flatten().tolist() for row in mask]
    assert seen[:3] == [[0], [0, 1], [0, 1, 2]]
    assert seen[3:5] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert seen[5:] == [[0, 1, 2, 5], [0, 1, 2, 5, 6], [0, 1, 2, 5, 6, 7]]


def test_padding_sees_something_so_that_no_row_is_empty():
    mask = packing.shared(PATHS).mask
    assert bool(mask.any(-1).all())
    assert not bool(mask[1, 0, :2, 2:].any()), "a prompt must not see the padding"


@pytest.mark.parametrize(
    ("prompt", "count", "length", "expected"),
    [(1024, 8, 256, True), (1024, 1, 256, False), (40, 8, 20, False), (300, 8, 4000, False)],
)
def test_sharing_is_used_where_it_pays(prompt: int, count: int, length: int, expected: bool):
    paths = [(View("teacher", (1,) * prompt), (2,) * length)] * count
    assert packing.pays(paths) is expected


def test_row_length_counts_what_is_read():
    assert packing.row_length(PROMPT, [(1, 2, 3), (7,), (2, 2, 2, 2)]) == packing.shared(PATHS).ids.shape[1]
    assert torch.equal(packing.plain(PATHS[:1]).ids[0], torch.tensor([5, 6, 7, 1, 2]))


ARCHITECTURES = {
    "llama": lambda: LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4),
    "neox": lambda: GPTNeoXConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4),
    "gemma3": lambda: Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8, sliding_window=8
    ),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_shared_row_is_exact_or_not_used(tmp_path: Path, name: str, attention: str, monkeypatch: pytest.MonkeyPatch):
    by_parts, calls = past_opsd.attention._shared, []
    monkeypatch.setattr(past_opsd.attention, "_shared", lambda *a: (calls.append(a[3]), by_parts(*a))[1])
    torch.manual_seed(0)
    made = ARCHITECTURES[name]()
    made.vocab_size, made.tie_word_embeddings = 64, False
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    network = Network(ModelSection(path=str(tmp_path), attention=attention), str(tmp_path))
    assert network.shares_prompts is (name != "gemma3")
    generator = torch.Generator().manual_seed(1)
    ids = [tuple(torch.randint(64, (n,), generator=generator).tolist()) for n in (40, 9, 14, 1, 30, 5)]
    paths = [(View("base", ids[0]), y) for y in ids[1:5]] + [(View("base", ids[5]), ids[1])]
    calls.clear()
    alone, together = network.states(paths), network.states(paths, share=True)
    # The dense mask would give the same; where torch's attention is used, only the parts are computed.
    parts = [(40, [8, 13, 0, 29]), (5, [8])]
    assert calls == ([parts] * 2 if attention == "sdpa" and name != "gemma3" else [])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
