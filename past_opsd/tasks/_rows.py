"""Rows of a source: a JSON-lines file, a Parquet file, a folder of shards, or a Hugging Face dataset.

A source is one string: a path, or `hf:owner/name` with `?config=..&split=..&revision=..` where needed. Only data is
read; nothing that a source brings along is executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from past_opsd.types import PastError

HUB = "hf:"
_KINDS = (".jsonl", ".parquet")
_SETTINGS = {"config": None, "split": "train", "revision": None}
_BATCH = 512

Wanted = Callable[[Sequence[str]], list[str]]
"""Of the columns a source has, those to read."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it stands; `data` is what is wrong with it where it is a text."""

    where: str
    name: str  # the id of a row that brings none
    data: dict[str, Any] | str


def rows(source: str, wanted: Wanted) -> Iterator[Row]:
    """The rows of a source in order; columns that are not wanted are not read where the format allows it."""
    if source.startswith(HUB):
        yield from _hub(source, wanted)
        return
    path = Path(source)
    if path.is_dir():
        for shard in _shards(path):
            yield from _file(shard, shard.relative_to(path).as_posix(), wanted)
    else:
        yield from _file(path, path.name, wanted)


def _shards(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.rglob("*") if p.suffix in _KINDS and p.is_file() and not p.name.startswith("."))
    kinds = {p.suffix for p in found}
    if len(kinds) != 1:
        what = "both .jsonl and .parquet files" if kinds else "no .jsonl or .parquet file"
        raise PastError(f"{folder}: holds {what}; name a folder of one kind, or one file")
    return found


def _file(path: Path, name: str, wanted: Wanted) -> Iterator[Row]:
    if path.suffix == ".parquet":
        yield from _parquet(path, name, wanted)
    elif path.suffix in (".jsonl", ".json", ".ndjson") or not path.exists():
        yield from _jsonl(path, name, wanted)
    else:
        raise PastError(
            f"{path}: unknown kind of file; give JSON lines (.jsonl), Parquet (.parquet) or a folder of them"
        )


def _jsonl(path: Path, name: str, wanted: Wanted) -> Iterator[Row]:
    try:
        lines = path.open("rb")  # bytes: a text line could end at U+2028 inside a value
    except OSError as error:
        raise PastError(
            f"{path}: cannot be read ({error.strerror}); give a file, a folder, or 'hf:owner/name' for a dataset "
            "on the Hugging Face hub"
        ) from None
    with lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield Row(f"{path}:{number}", f"{name}:{number}", _object(line, wanted))


def _object(line: bytes, wanted: Wanted) -> dict[str, Any] | str:
    try:
        data = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    if not isinstance(data, dict):
        return f"a row must be a JSON object, not {type(data).__name__}"
    return {column: data[column] for column in wanted(tuple(data))}


def _parquet(path: Path, name: str, wanted: Wanted) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = wanted(file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH, columns=columns):
                for data in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}: row {number}", f"{name}:{number}", data)
    except (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException) as error:  # a damaged file asks for all
        raise PastError(f"{path}: cannot be read as Parquet ({error})") from None


def parse_hub(source: str) -> tuple[str, dict[str, str | None]]:
    """The dataset's id (or local folder) and its config, split and revision."""
    name, _, query = source.removeprefix(HUB).partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = set(given) - set(_SETTINGS)
    if not name or unknown or not all(given.values()):
        raise PastError(
            f"{source}: write it as hf:owner/name, with ?config=NAME&split=NAME&revision=NAME where needed"
            + (f" ('{min(unknown)}' is unknown)" if unknown else "")
        )
    return name, _SETTINGS | given


def _hub(source: str, wanted: Wanted) -> Iterator[Row]:
    name, settings = parse_hub(source)
    try:
        import datasets
        from datasets.exceptions import DatasetNotFoundError, DatasetsError
    except ModuleNotFoundError:
        raise PastError(f"{source}: needs the package 'datasets': pip install 'past-opsd[data]'") from None
    data: Any  # a Dataset: `split` names one
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(name)
            data = saved[settings["split"]] if isinstance(saved, datasets.DatasetDict) else saved
        else:
            data = datasets.load_dataset(
                name, settings["config"], split=settings["split"], revision=settings["revision"]
            )
    except (ConnectionError, DatasetNotFoundError) as error:
        raise PastError(
            f"{source}: cannot be loaded ({error}). Is the name right and the hub within reach? Without a network, "
            "name a local copy: a .jsonl or .parquet file, or a folder of them."
        ) from None
    except (OSError, ValueError, KeyError, RuntimeError, DatasetsError) as error:
        raise PastError(f"{source}: cannot be loaded ({_first_line(error)})") from None
    data = data.select_columns(wanted(data.column_names))
    for number, row in enumerate(data, 1):
        yield Row(f"{source}: row {number}", f"{name}:{number}", dict(row))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
