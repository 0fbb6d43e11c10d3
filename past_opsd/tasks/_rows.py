"""Rows of a source: a file (JSON lines, a JSON list, CSV, TSV, Parquet), a folder of them, or a Hugging Face dataset.

A source is one string: a path, or `hf:owner/name` with `?config=..&split=..&revision=..` where needed. Only data is
read; nothing that a source brings along is executed.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import parse_qsl

from past_opsd.core.config import HUB
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import is_table, plain

_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = (".csv", ".tsv")
_KINDS = (".jsonl", ".ndjson", *_TABLES, ".parquet")  # of shards; a .json among them is often a description
_KNOWN = "JSON lines (.jsonl), a JSON list (.json), CSV (.csv, .tsv), Parquet (.parquet) or a folder of one of them"
_CELL = 1 << 24  # characters in one cell of a CSV file; a quote that never closes would take the rest of the file
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
        what = f"files of several kinds ({', '.join(sorted(kinds))})" if kinds else f"no {', '.join(_KINDS)} file"
        raise PastError(f"{folder}: holds {what}; name a folder of one kind, or one file")
    return found


def _file(path: Path, name: str, wanted: Wanted) -> Iterator[Row]:
    if path.exists():
        plain(path)
    if path.suffix.lower() == ".parquet":
        yield from _parquet(path, name, wanted)
    elif path.suffix.lower() in _TABLES:
        yield from _table(path, name, wanted)
    elif path.suffix.lower() in _LINES or not path.exists():
        yield from _json(path, name, wanted)
    else:
        raise PastError(f"{path}: unknown kind of file; give {_KNOWN}")


def _open(path: Path) -> IO[bytes]:
    """The file behind its byte-order mark, if it has one of UTF-8."""
    try:
        file = path.open("rb")
        start = file.read(4)
    except OSError as error:
        raise PastError(
            f"{path}: cannot be read ({error.strerror}). A relative path is looked for beside its recipe, then in the "
            f"working folder ({Path.cwd()}); a dataset on the Hugging Face hub is written hf:owner/name"
        ) from None
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        file.close()
        raise PastError(f"{path}: is UTF-16; save it as UTF-8")
    file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
    return file


def _json(path: Path, name: str, wanted: Wanted) -> Iterator[Row]:
    """A JSON object a line, or one list of objects."""
    with _open(path) as lines:  # bytes: a text line could end at U+2028 inside a value
        begin = lines.tell()
        first = next((line.strip() for line in lines if line.strip()), b"")
        whole = first[1:].lstrip().startswith(b"{") and not any(line.strip() for line in lines)
        lines.seek(begin)
        if first.startswith(b"[") and (path.suffix.lower() == ".json" or whole or not _is_json(first)):
            yield from _list(path, name, lines.read(), wanted)
            return
        if first == b"{":
            raise PastError(
                f"{path}: one object is spread over several lines; write one object a line, or a list [...]"
            )
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield Row(f"{path}:{number}", f"{name}:{number}", _object(line, wanted))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _list(path: Path, name: str, content: bytes, wanted: Wanted) -> Iterator[Row]:
    try:
        items = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise PastError(
            f"{path}: begins as a JSON list and is none ({error}); mend it, or write one object a line"
        ) from None
    for number, item in enumerate(items, 1):
        yield Row(f"{path}: item {number}", f"{name}:{number}", _chosen(item, wanted))


def _table(path: Path, name: str, wanted: Wanted) -> Iterator[Row]:
    """CSV or TSV with a line of column names; an empty cell is no value."""
    csv.field_size_limit(_CELL)
    with _open(path) as file:
        begin = file.tell()
        delimiter = _delimiter(path, file.readline(_BATCH << 10))
        file.seek(begin)
        try:
            reader = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""), delimiter=delimiter, strict=True)
            header = [cell.strip() for cell in next(reader, list[str]())]
            if len(set(header)) != len(header):
                twice = next(cell for cell in header if header.count(cell) > 1)
                raise PastError(
                    f"{path}:1: two columns are called '{twice}'; the first line must name each column once"
                )
            while True:
                line = reader.line_num + 1
                cells = next(reader, None)
                if cells is None:
                    return
                if cells:
                    yield Row(f"{path}:{line}", f"{name}:{line}", _cells(header, cells, wanted))
        except (csv.Error, UnicodeDecodeError) as error:
            raise PastError(f"{path}: cannot be read as CSV in UTF-8 ({error})") from None


def _delimiter(path: Path, header: bytes) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=lambda sign: header.count(sign.encode()))


def _cells(header: list[str], cells: list[str], wanted: Wanted) -> dict[str, Any] | str:
    if len(cells) != len(header):
        return f"has {len(cells)} cells where the first line names {len(header)} columns; quote cells that hold a comma"
    data = dict(zip(header, cells, strict=True))
    return {column: data[column] or None for column in wanted(header)}


def _object(line: bytes, wanted: Wanted) -> dict[str, Any] | str:
    try:
        data = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); write one JSON object a line"
    return _chosen(data, wanted)


def _chosen(data: Any, wanted: Wanted) -> dict[str, Any] | str:
    if not is_table(data):
        return f'a row must be a JSON object, not {type(data).__name__}; write e.g. {{"problem": ..., "answer": ...}}'
    return {column: data[column] for column in wanted(tuple(data))}


def _parquet(path: Path, name: str, wanted: Wanted) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    opened: Any = pq.ParquetFile  # pyarrow has no types
    broken = cast(type[Exception], pa.ArrowException)
    try:
        with opened(path) as file:
            columns = wanted(file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH, columns=columns):
                for data in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}: row {number}", f"{name}:{number}", data)
    except (OSError, ValueError, OverflowError, MemoryError, broken) as error:  # a damaged file asks for all
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


def on_disk(source: str) -> bool:
    """Whether a source is on this machine already, or is none of the hub's."""
    if not source.startswith(HUB):
        return True
    try:
        name, settings = parse_hub(source)
        if Path(name).exists():
            return True
        import huggingface_hub

        where: dict[str, Any] = {"repo_type": "dataset", "revision": settings["revision"], "local_files_only": True}
        return bool(cast(Any, huggingface_hub).snapshot_download(name, **where))
    except OSError:
        return False
    except (PastError, ValueError):
        return True  # not even the name of one: nothing will be fetched


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
