"""The responses of a cycle as a Parquet file: one row each, written and read again here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
MOST_ROWS = 1_000_000  # of a cycle; no run writes so many

Row = Mapping[str, Any]


def row(k: int, a: Attempt, versions: Mapping[Any, int], trajectory: int, discarded: bool, start: int = 0) -> Row:
    """An attempt of cycle k, supervised from `start` on; `trajectory` is the student's response it is or continues."""
    return {
        "cycle": k,
        "problem": a.problem.id,
        "adapter": a.view.adapter,
        "version": versions[a.view.adapter],
        "trajectory": trajectory,
        "discarded": discarded,
        "prompt_tokens": list(a.view.prompt),
        "tokens": list(a.response.tokens),
        "mask": [int(t >= start) for t in range(len(a.response.tokens))],
        "length": len(a.response.tokens),
        "finished": a.response.finished,
        "text": a.response.text,
        "correct": a.verdict.correct,
        "reason": a.verdict.reason,
        "answer": a.verdict.answer,
        "logprobs": list(a.response.logprobs),
    }


def attempt(row: Row, problem: Problem) -> Attempt:
    """What `row` was made of."""
    response = Response(tuple(row["tokens"]), row["text"], tuple(row["logprobs"]), row["finished"])
    verdict = Verdict(row["correct"], row["reason"], row["answer"])
    return Attempt(problem, View(row["adapter"], tuple(row["prompt_tokens"])), response, verdict)


def write(file: Path, rows: Sequence[Row]) -> None:
    """The rows of a cycle, in one piece."""
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)
    with whole(file) as part:
        pq.write_table(table, part, compression="zstd")


def read(file: Path, vocabulary: int = 2**31, max_context: int = 2**31) -> list[Row]:
    """The rows of a cycle, checked against the sizes of the model that reads them: the file may be anybody's."""
    rows: list[Row] = read_table(file).to_pylist()
    try:
        for row in rows:
            _check(row, vocabulary, max_context)
    except (ValueError, TypeError) as error:
        raise PastError(f"{file}: cannot be read ({error})") from None
    return rows


def read_table(file: Path) -> Any:
    """The rows of a cycle as they stand, a `pyarrow.Table`, within bounds."""
    plain(file, MOST)
    try:
        with pq.ParquetFile(file) as opened:
            about = opened.metadata
            size = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
            if about.num_rows > MOST_ROWS or size > MOST:
                raise ValueError(f"{about.num_rows} rows of {size} bytes")
            return opened.read(columns=SCHEMA.names).select(SCHEMA.names).cast(SCHEMA)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError, _Broken) as error:
        raise PastError(f"{file}: cannot be read ({error})") from None


def _check(row: Row, vocabulary: int, max_context: int) -> None:
    """Refuse a row that no run of this model wrote."""
    missing = [name for name, value in row.items() if value is None]
    if missing:
        raise ValueError(f"a row without {missing[0]}")
    ids = [*row["prompt_tokens"], *row["tokens"]]
    if not row["prompt_tokens"] or len(ids) > max_context:
        raise ValueError(f"{len(ids)} tokens")
    if not all(isinstance(id_, int) and 0 <= id_ < vocabulary for id_ in ids):
        raise ValueError("ids that are not the tokenizer's")
    if row["adapter"] not in ("base", "student", "teacher") or row["trajectory"] < 0:
        raise ValueError("a view that no run has")
