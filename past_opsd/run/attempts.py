"""The responses of a cycle as a Parquet file: one row each, written and read again here and nowhere else.

A file is written and read row group by row group, so that neither takes more memory than a group besides what the
caller holds: a cycle may have billions of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from past_opsd.core.files import whole
from past_opsd.core.nouns import Attempt, PastError, Problem, Response, Verdict, View
from past_opsd.core.reading import MOST, plain

pa: Any = pyarrow  # it has no types
pq: Any = pyarrow.parquet
_Broken: type[Exception] = pa.ArrowException

SCHEMA = pa.schema(
    [
        ("cycle", pa.int32()),
        ("problem", pa.string()),
        ("adapter", pa.string()),
        ("version", pa.int32()),
        ("trajectory", pa.int32()),
        ("discarded", pa.bool_()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.int8())),
        ("length", pa.int32()),
        ("finished", pa.bool_()),
        ("text", pa.string()),
        ("correct", pa.bool_()),
        ("reason", pa.string()),
        ("answer", pa.string()),
        ("logprobs", pa.list_(pa.float32())),
    ]
)
LISTS = {"prompt_tokens": np.int32, "tokens": np.int32, "mask": np.int8, "logprobs": np.float32}
"""The columns with an entry for every token."""
WORDS = ["problem", "adapter", "reason"]
"""The columns in which few values come again and again; a dictionary of the others would be as large as they are."""
GROUP = 1 << 20
"""Tokens from which on a row group is closed."""
MOST_ROWS = 1_000_000  # of a cycle; no run writes so many
DENSE = 32
"""How many times its size on the disk a file of tokens, numbers and text may hold; a bomb holds thousands."""

Row = Mapping[str, Any]


def row(k: int, a: Attempt, versions: Mapping[Any, int], trajectory: int, discarded: bool, start: int = 0) -> Row:
    """An attempt of cycle k, supervised from `start` on; `trajectory` is the student's response it is or continues."""
    length = len(a.response.tokens)
    return {
        "cycle": k,
        "problem": a.problem.id,
        "adapter": a.view.adapter,
        "version": versions[a.view.adapter],
        "trajectory": trajectory,
        "discarded": discarded,
        "prompt_tokens": a.view.prompt,
        "tokens": a.response.tokens,
        "mask": bytes(min(start, length)) + b"\1" * (length - start),
        "length": length,
        "finished": a.response.finished,
        "text": a.response.text,
        "correct": a.verdict.correct,
        "reason": a.verdict.reason,
        "answer": a.verdict.answer,
        "logprobs": a.response.logprobs,
    }


def attempt(row: Row, problem: Problem) -> Attempt:
    """What `row` was made of."""
    response = Response(tuple(row["tokens"]), row["text"], tuple(row["logprobs"]), row["finished"])
    verdict = Verdict(row["correct"], row["reason"], row["answer"])
    return Attempt(problem, View(row["adapter"], tuple(row["prompt_tokens"])), response, verdict)


def write(file: Path, rows: Iterable[Row]) -> None:
    """The rows of a cycle, in one piece."""
    with whole(file) as part, pq.ParquetWriter(part, SCHEMA, compression="zstd", use_dictionary=WORDS) as writer:
        for group in _groups(rows):
            writer.write_table(pa.table([_column(group, field) for field in SCHEMA], schema=SCHEMA))


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group, tokens = list[Row](), 0
    for row in rows:
        group.append(row)
        tokens += len(row["prompt_tokens"]) + len(row["tokens"])
        if tokens >= GROUP:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _column(rows: Sequence[Row], field: Any) -> Any:
    values = [row[field.name] for row in rows]
    if field.name not in LISTS:
        return pa.array(values, field.type)
    ends = [0, *accumulate(map(len, values))]
    flat = np.fromiter(chain.from_iterable(values), LISTS[field.name], count=ends[-1])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat))


@contextmanager
def _opened(file: Path) -> Generator[Any]:
    """A `pyarrow.ParquetFile` within bounds; whatever is wrong with it, inside too, is told with its name."""
    plain(file)
    try:
        with pq.ParquetFile(file) as opened:
            about = opened.metadata
            sizes = [about.row_group(i).total_byte_size for i in range(about.num_row_groups)]
            most = max(MOST, DENSE * file.stat().st_size)
            if about.num_rows > MOST_ROWS or max(sizes, default=0) > MOST or sum(sizes) > most:
                raise ValueError(f"{about.num_rows} rows of {sum(sizes)} bytes")
            yield opened
    except (OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError, _Broken) as error:
        raise PastError(f"{file}: cannot be read ({error})") from None


def read(
    file: Path, vocabulary: int = 2**31, max_context: int = 2**31, places: Collection[int] | None = None
) -> list[Row]:
    """The rows of a cycle, or those at some places, checked against the sizes of the model that reads them.

    The file may be anybody's.
    """
    rows: list[Row] = []
    done = 0
    with _opened(file) as opened:
        for i in range(opened.num_row_groups):
            count = opened.metadata.row_group(i).num_rows
            own = [k for k in range(count) if places is None or done + k in places]
            done += count
            if own:
                table = opened.read_row_group(i, columns=SCHEMA.names).select(SCHEMA.names).cast(SCHEMA)
                rows += table.take(own).to_pylist()
        for row in rows:
            _check(row, vocabulary, max_context)
    return rows


def outline(file: Path) -> list[Row]:
    """Of every row what is short, and its place: enough to choose those to `read`."""
    names = [name for name in SCHEMA.names if name not in LISTS and name != "text"]
    with _opened(file) as opened:
        fields = pa.schema([SCHEMA.field(name) for name in names])
        rows: list[Row] = opened.read(columns=names).select(names).cast(fields).to_pylist()
        for row in rows:
            _complete(row)
    return [{"place": place, **row} for place, row in enumerate(rows)]


def read_table(file: Path) -> Any:
    """The rows of a cycle as they stand, a `pyarrow.Table`."""
    with _opened(file) as opened:
        return opened.read(columns=SCHEMA.names).select(SCHEMA.names).cast(SCHEMA)


def _complete(row: Row) -> None:
    missing = [name for name, value in row.items() if value is None]
    if missing:
        raise ValueError(f"a row without {missing[0]}")


def _check(row: Row, vocabulary: int, max_context: int) -> None:
    """Refuse a row that no run of this model wrote."""
    _complete(row)
    ids = [*row["prompt_tokens"], *row["tokens"]]
    if not row["prompt_tokens"] or len(ids) > max_context or row["length"] != len(row["tokens"]):
        raise ValueError(f"{len(ids)} tokens")
    if not all(isinstance(id_, int) and 0 <= id_ < vocabulary for id_ in ids):
        raise ValueError("ids that are not the tokenizer's")
    if row["adapter"] not in ("base", "student", "teacher") or row["trajectory"] < 0:
        raise ValueError("a view that no run has")
