"""What is free, and how many sequences are decoded together in it: arithmetic, and files as systems write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from past_opsd.policy import memory
from past_opsd.policy.memory import GIB, Room, host_free, seats

QWEN3_1_7B = 28 * 2 * 8 * 128 * 2
"""Bytes of a token: layers, keys and values, heads, size, bfloat16."""


def test_seats_are_what_memory_holds():
    # Nine tenths of 70 GiB hold 589,824 tokens of 112 KiB: 16 prompts of 256 with 35,000 tokens each, 64 at first.
    assert 0.9 * 70 * GIB / QWEN3_1_7B == 589_824
    assert seats(70 * GIB, QWEN3_1_7B, 256, 35_000, 64) == (64, 16)
    assert seats(70 * GIB, QWEN3_1_7B, 256, 38_912, 64) == (64, 15)
    assert seats(70 * GIB, QWEN3_1_7B, 256, 38_912, 8) == (8, 8)
    assert seats(70 * GIB, QWEN3_1_7B, 17_000, 1_024, 64) == (32, 32)  # 17,000 and the response, all at once
    assert seats(70 * GIB, QWEN3_1_7B, 16_000, 16_000, 64) == (32, 18)  # room for an eighth more at first
    assert seats(4 * GIB, QWEN3_1_7B, 256, 38_912, 64).last == 0  # one does not fit
    assert seats(70 * GIB, QWEN3_1_7B, 256, 1_024, 640, row=100 * 2**20) == (477, 268)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(*(st.integers(1, 10**n) for n in (12, 6, 5, 5, 3)), st.integers(0, 10**8))
def test_seats_fit_and_one_more_would_not(free: int, token: int, prompt: int, limit: int, batch: int, row: int):
    first, last = seats(free, token, prompt, limit, batch, row)
    size = int(memory.SHARE * free)
    assert last <= first <= batch
    assert last * ((prompt + limit) * token + row) <= size
    assert last == batch or (last + 1) * ((prompt + limit) * token + row) > size
    assert first * ((prompt + min(limit, max(memory.GROWTH, prompt // 8))) * token + row) <= size
    room = Room(size, token, row, batch)
    for rows in {1, batch}:
        columns = room.columns(rows)
        assert columns <= 0 or room.rows(columns) == rows
        assert columns < 0 or room.rows(columns + 1) < rows


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 9000000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n"}
SECOND = "sys/fs/cgroup"
FIRST = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        pytest.param({}, 4000 * 1024, id="no group"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, 4000 * 1024, id="a group without limits"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                f"{SECOND}/memory.max": "3000000\n",
                f"{SECOND}/memory.current": "1000000\n",
                f"{SECOND}/memory.stat": "anon 7\ninactive_file 300000\n",
            },
            2_300_000,
            id="a container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{SECOND}/a/b/memory.max": "max\n",
                f"{SECOND}/a/b/memory.current": "1\n",
                f"{SECOND}/a/b/memory.stat": "",
                f"{SECOND}/a/memory.max": "500\n",
                f"{SECOND}/a/memory.current": "100\n",
                f"{SECOND}/a/memory.stat": "",
            },
            400,
            id="the limit of a group around it",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/host/path\n3:cpu:/\n0::/\n",
                f"{FIRST}/memory.limit_in_bytes": "900\n",
                f"{FIRST}/memory.usage_in_bytes": "1000\n",
                f"{FIRST}/memory.stat": "total_inactive_file 40\n",
            },
            0,
            id="the first version, full",
        ),
    ],
)
def test_a_containers_limit_counts_where_it_is_less(tmp_path: Path, files: dict[str, str], free: int):
    assert host_free(write(tmp_path, MACHINE | files)) == free


def test_a_system_that_tells_nothing_has_its_memory(tmp_path: Path):
    assert host_free(tmp_path) > GIB // 8
