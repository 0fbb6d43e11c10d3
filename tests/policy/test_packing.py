from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import assert_rounding
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, LlamaConfig

import past_opsd.policy.attention
from past_opsd.core.config import ModelSection
from past_opsd.core.nouns import View
from past_opsd.policy import packing
from past_opsd.policy.model import Network

PROMPT = (5, 6, 7)
PATHS = [
    (View("teacher", PROMPT), (1, 2, 3)),
    (View("teacher", PROMPT), (7,)),
    (View("teacher", PROMPT), (2, 2, 2, 2)),
    (View("teacher", (9, 8)), (4,)),
]
# Three prompts that begin alike: the first is the whole beginning, the others go on.
BRANCHES = [
    (View("student", (5, 6)), (1, 2, 3)),
    (View("student", (5, 6, 7, 8)), (1, 2)),
    (View("student", (5, 6, 9)), (4,)),
]


def test_plain_rows_read_the_prompt_and_all_but_the_last_token():
    packed = packing.plain(PATHS)
    assert packed.ids.tolist()[0] == [5, 6, 7, 1, 2, 0]
    assert packed.mask.tolist()[3] == [1, 1, 0, 0, 0, 0]
    assert packed.index.tolist() == [2, 3, 4, 8, 14, 15, 16, 17, 19]


def test_a_shared_row_holds_its_prompt_once_and_positions_start_again():
    packed = packing.shared(PATHS, [3, 1])
    assert packed.ids.tolist() == [[5, 6, 7, 1, 2, 2, 2, 2], [9, 8, 0, 0, 0, 0, 0, 0]]
    assert packed.positions.tolist()[0] == [0, 1, 2, 3, 4, 3, 4, 5]
    # first tokens are all predicted by the prompt's last position
    assert packed.index.tolist() == [2, 3, 4, 2, 2, 5, 6, 7, 9]
    assert packed.segments == [[(-1, 3), (0, 2), (0, 3)], [(-1, 2)]]


def test_prompts_that_begin_alike_go_on_from_there():
    packed = packing.shared(BRANCHES, [3])
    assert packed.ids.tolist() == [[5, 6, 1, 2, 7, 8, 1, 9]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 2, 3, 4, 2]]
    assert packed.index.tolist() == [1, 2, 3, 5, 6, 7]
    assert packed.segments == [[(-1, 2), (0, 2), (0, 3), (0, 1)]]


def test_responses_that_begin_alike_branch_where_they_part_and_a_repeated_one_is_read_once():
    tokens = [(1, 2, 3, 4), (1, 2, 7, 7), (1, 2, 3, 4), (1, 2, 3, 9), (8, 8)]
    paths = [(View("teacher", PROMPT), y) for y in tokens]
    tree = packing.Tree(paths)
    assert tree.ids == [5, 6, 7, 1, 2, 3, 7, 8]
    assert tree.segments == [(-1, 3), (0, 2), (1, 1), (1, 1), (0, 1)]
    assert [tree.columns(path) for path in paths] == [[2, 3, 4, 5], [2, 3, 4, 6], [2, 3, 4, 5], [2, 3, 4, 5], [2, 7]]
    assert tree.saved == sum(3 + len(y) - 1 for y in tokens) - 8


@pytest.mark.parametrize(("worth", "segments"), [(2, 5), (3, 4), (12, 4), (13, 3)])
def test_a_segment_is_made_where_it_saves_what_it_costs(worth: int, segments: int):
    """Three share a prompt of six, which saves twelve positions; two of them go on alike, which saves two."""
    paths = [(View("teacher", PROMPT * 2), y) for y in ((1, 2, 3, 4), (1, 2, 7, 7), (8, 8, 8))]
    assert len(packing.Tree(paths, worth).segments) == segments


@given(st.data())
def test_every_path_finds_its_own_tokens_in_the_tree(data: st.DataObject):
    small = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)
    paths = [(View("base", data.draw(small)), data.draw(small)) for _ in range(data.draw(st.integers(1, 7)))]
    worth = data.draw(st.integers(1, 9))
    packed = packing.shared(paths, [len(paths)], worth)
    (segments,) = packed.segments
    mask = packing.dense([segments], packed.ids.shape[1])[0, 0]
    index = packed.index.split([len(tokens) for _, tokens in paths])
    for (view, tokens), columns in zip(paths, index, strict=True):
        for t, column in enumerate(columns.tolist()):
            seen = mask[column].nonzero().flatten()  # in the order of the path, since a row is written depth first
            assert tuple(packed.ids[0, seen].tolist()) == view.prompt + tokens[:t]
            assert packed.positions[0, seen].tolist() == list(range(len(seen)))


def test_a_path_sees_what_is_common_and_itself_and_nothing_else():
    seen = [row.nonzero().flatten().tolist() for row in packing.dense([[(-1, 3), (0, 2), (0, 3)]], 8)[0, 0]]
    assert seen[:3] == [[0], [0, 1], [0, 1, 2]]
    assert seen[3:5] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert seen[5:] == [[0, 1, 2, 5], [0, 1, 2, 5, 6], [0, 1, 2, 5, 6, 7]]


def test_padding_sees_something_so_that_no_row_is_empty():
    mask = packing.dense([[(-1, 3), (0, 2), (0, 3)], [(-1, 2)]], 8)
    assert bool(mask.any(-1).all())
    assert not bool(mask[1, 0, :2, 2:].any()), "a prompt must not see the padding"


@pytest.mark.parametrize(
    ("prompts", "expected"), [([(1, 2, 3), (1, 2, 4)], 2), ([(1, 2), (1, 2, 4)], 2), ([(1,), (2,)], 0), ([(1, 2)], 2)]
)
def test_how_far_prompts_are_the_same(prompts: list[tuple[int, ...]], expected: int):
    assert packing.common_prefix(prompts) == expected


def test_the_bias_of_a_long_row_is_torchs_and_takes_no_memory():
    """torch's own makes a tensor of two numbers a score, which nothing reads."""
    query, key, value = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 5, 6))
    ours, theirs = past_opsd.policy.attention.causal_lower_right(3, 5), causal_lower_right(3, 5)
    found, want = (scaled_dot_product_attention(query, key, value[:, :, :5], bias) for bias in (ours, theirs))
    assert torch.equal(found, want)
    assert past_opsd.policy.attention.causal_lower_right(10**6, 10**6).untyped_storage().nbytes() == 0


def test_the_length_of_a_row_is_what_is_read():
    for paths in (PATHS[:3], BRANCHES):
        assert len(packing.Tree(paths)) == packing.shared(paths, [3]).ids.shape[1]
    assert len(packing.Tree(PATHS[:1])) == packing.plain(PATHS[:1]).ids.shape[1]


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
    by_parts, calls = past_opsd.policy.attention._shared, []
    monkeypatch.setattr(past_opsd.policy.attention, "_shared", lambda *a: (calls.append(a[3]), by_parts(*a))[1])
    torch.manual_seed(0)
    made = ARCHITECTURES[name]()
    made.vocab_size, made.tie_word_embeddings = 64, False
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    network = Network(ModelSection(path=str(tmp_path), attention=attention), str(tmp_path))
    assert network.shares_prompts is (name != "gemma3")
    generator = torch.Generator().manual_seed(1)
    ids = [tuple(torch.randint(64, (n,), generator=generator).tolist()) for n in (40, 9, 14, 1, 30, 5)]
    prompts = ids[0], ids[0], ids[0] + ids[5], ids[0], ids[5], ids[1], ids[2]
    paths = [(View("base", x), y) for x, y in zip(prompts, [*ids[1:5], ids[1], ids[5], ids[4]], strict=True)]
    calls.clear()
    network.worth = 1  # such a small network would not share
    alone = network.states(paths)
    together = network.states(paths, [4, 1, 2]) if network.shares_prompts else alone
    # The dense mask would give the same; where torch's attention is used, only the parts are computed.
    lengths = [[length for _, length in row] for row in calls[0]] if calls else []
    assert [sum(row) for row in lengths] == ([40 + 8 + 13 + 5 + 29, 13, 13 + 43] if calls else [])
    assert len(calls) == (2 if attention == "sdpa" and name != "gemma3" else 0)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@given(st.data())
def test_rows_of_what_begins_alike_respect_the_budget(data: st.DataObject):
    small = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)
    count, budget = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 30))
    reads = st.tuples(st.sampled_from(["student", "teacher"]), small, small)
    drawn = st.lists(reads, min_size=1, max_size=4).map(lambda some: [(View(a, x), y) for a, x, y in some])
    units = [data.draw(drawn) for _ in range(count)]
    made = list(packing.alike(units, budget))
    assert sorted(i for batch in made for i in batch) == list(range(count))
    for batch in made:
        rows = packing.by_adapter([read for i in batch for read in units[i]])
        assert len(batch) == 1 or max(len(packing.Tree(row)) for row in rows.values()) <= budget


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "expected"),
    [
        ("cpu", torch.float32, (0, 0), True),
        ("cuda", torch.bfloat16, (8, 0), True),
        ("cuda", torch.float32, (8, 0), False),
        ("cuda", torch.float16, (7, 5), False),
    ],
)
def test_heads_share_keys_where_the_kernel_reads_groups(
    device: str, dtype: torch.dtype, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert past_opsd.policy.attention._reads_groups(torch.device(device), dtype) == expected


def test_repeated_keys_are_shared_ones(monkeypatch: pytest.MonkeyPatch):
    attention = past_opsd.policy.attention
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 8, generator=draw) for heads in (6, 2, 2))
    rows = packing.shared([*BRANCHES, PATHS[0], PATHS[1]], [3, 2]).segments
    shared = attention._shared(query, key, value, rows, None)
    monkeypatch.setattr(attention, "_reads_groups", lambda device, dtype: False)
    assert_rounding(attention._shared(query, key, value, rows, None), shared, float(value.abs().max()), 9)


@pytest.mark.parametrize("heights", [None, [1, 2, 1, 3, 1, 1]])
def test_batches_respect_the_budget_in_order_of_width(heights: list[int] | None):
    widths = [7, 3, 40, 2, 3, 9]
    made = list(packing.batches(widths, 30, heights))
    assert sorted(i for batch in made for i in batch) == list(range(len(widths)))
    assert [widths[i] for batch in made for i in batch] == sorted(widths)
    for batch in made:
        rows = len(batch) if heights is None else sum(heights[i] for i in batch)
        assert len(batch) == 1 or max(widths[i] for i in batch) * rows <= 30
    assert list(packing.batches([], 30)) == []
