"""`past verify`: grade a file of model responses and, where it states verdicts, how far we and math-verify agree."""

from __future__ import annotations

import json
import time
import tomllib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from past_opsd.core.config import plugin
from past_opsd.core.files import whole
from past_opsd.core.nouns import PastError, Problem, Response, Verdict
from past_opsd.core.reading import is_table, plain, room
from past_opsd.rollout.verifiers import Verifier
from past_opsd.rollout.verifiers.pool import WorkerPool

_STATED = ("stated", "equal", "expected", "correct", "label")
_OWN = ("gold", "prediction", "response", "finished")
_SKIPPED = "skipped"
_BATCH = 256
_PLAIN_LIMIT = 5.0


@dataclass(slots=True)
class Agreement:
    """How many stated verdicts ours equal, and how the others differ."""

    same: int = 0
    total: int = 0
    wrongly_accepted: int = 0

    def add(self, ours: bool, stated: bool) -> None:
        self.total += 1
        self.same += ours == stated
        self.wrongly_accepted += ours and not stated

    @property
    def wrongly_rejected(self) -> int:
        return self.total - self.same - self.wrongly_accepted

    @property
    def rate(self) -> float:
        return self.same / self.total if self.total else float("nan")


@dataclass(slots=True)
class Pair:
    """Our agreement with stated verdicts, and plain math-verify's on the same rows."""

    ours: Agreement = field(default_factory=Agreement)
    plain: Agreement = field(default_factory=Agreement)


@dataclass(slots=True)
class Summary:
    """What `grade_file` saw. `suspect` and `policy` rows are in no other agreement."""

    rows: int = 0
    correct: int = 0
    bad: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter[str])
    compared: Pair = field(default_factory=Pair)
    by_source: dict[str, Pair] = field(default_factory=dict[str, Pair])
    suspect: Pair = field(default_factory=Pair)
    policy: Pair = field(default_factory=Pair)

    @property
    def overall(self) -> Agreement:
        return self.compared.ours

    def count(self, row: Mapping[str, Any], verdict: Verdict, stated: bool | None, plain: bool | None) -> None:
        """Take one graded row in, with math-verify's verdict if it was asked."""
        self.rows += 1
        self.correct += verdict.correct
        self.reasons[verdict.reason] += 1
        if stated is None or verdict.reason == _SKIPPED:
            return
        for pair in self._pairs(row):
            pair.ours.add(verdict.correct, stated)
            if plain is not None:
                pair.plain.add(plain, stated)

    def _pairs(self, row: Mapping[str, Any]) -> list[Pair]:
        if row.get("suspect"):
            return [self.suspect]
        if row.get("policy"):
            return [self.policy]
        group = _group(row)
        return [self.compared, *([self.by_source.setdefault(group, Pair())] if group else [])]


@dataclass(frozen=True, slots=True)
class _Row:
    data: dict[str, Any]
    problem: Problem
    response: Response | None  # None: not applicable to a verifier that reads boxes
    stated: bool | None


def grade_file(
    path: Path,
    out: Path | None,
    verifier: Verifier,
    *,
    skip_bad: bool = False,
    protocol_field: str | None = None,
    plain: WorkerPool | None = None,
) -> Summary:
    """Grade `path` (JSON lines with `gold` and `prediction`) into `out`, in order, in one pass.

    Other columns are at the verifier's disposal: `problem` and `solution` by name, the rest as the problem's extra.
    `out` holds every row with `correct` and `reason` set, and `stated` where the row came with a verdict; it
    appears whole or not at all. A bad row is an error, or with `skip_bad` left out and counted. `plain` asks
    math-verify about the rows that state a verdict.
    """
    if out is not None and out.exists() and path.exists() and out.samefile(path):
        raise PastError(f"--out {out}: that is the file to be graded. Name another one.")
    began = time.monotonic()
    summary = Summary()
    with _replacing(out) as sink:
        batch: list[_Row] = []
        for row in _rows(path, protocol_field, skip_bad, summary):
            batch.append(row)
            if len(batch) == _BATCH:
                _grade(batch, verifier, sink, summary, plain)
                batch = []
        _grade(batch, verifier, sink, summary, plain)
        if not summary.rows:
            why = f"all {summary.bad} rows are bad" if summary.bad else "there are no rows in it"
            raise PastError(f"{path}: {why}. Give a file of JSON lines with `gold` and `prediction`.")
    summary.seconds = time.monotonic() - began
    return summary


def _grade(
    batch: list[_Row], verifier: Verifier, sink: IO[bytes] | None, summary: Summary, plain: WorkerPool | None
) -> None:
    asked = [row for row in batch if row.response is not None and row.stated is not None] if plain else []
    replies = plain.run([(row.problem.answer, row.response.text) for row in asked if row.response]) if plain else []
    others = {id(row): reply == "yes" for row, reply in zip(asked, replies, strict=True)}
    verdicts = iter(verifier.verify([(row.problem, row.response) for row in batch if row.response is not None]))
    for row in batch:
        verdict = Verdict(False, _SKIPPED) if row.response is None else next(verdicts)
        summary.count(row.data, verdict, row.stated, others.get(id(row)))
        if sink is not None:
            stated = {} if row.stated is None else {"stated": row.stated}
            sink.write(_line(row.data | stated | {"correct": verdict.correct, "reason": verdict.reason}))


def _rows(path: Path, protocol_field: str | None, skip_bad: bool, summary: Summary) -> Iterator[_Row]:
    try:
        source = path.open("rb")
    except OSError as error:
        raise PastError(f"{path}: cannot be read ({error.strerror}). Give a file of JSON lines.") from None
    with source:
        for number, line in enumerate(source, 1):
            if not line.strip():
                continue
            try:
                yield _parse(line, protocol_field)
            except ValueError as error:
                if not skip_bad:
                    raise PastError(
                        f"{path}:{number}: {error}. Mend the line, or leave it out with --skip-bad."
                    ) from None
                summary.bad += 1


def _parse(line: bytes, protocol_field: str | None) -> _Row:
    """One row, or a ValueError that says what is wrong with it."""
    try:
        data = json.loads(line.decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("not a JSON object in UTF-8") from None
    if not is_table(data):
        raise ValueError("not a JSON object")
    gold = _string(data, "gold", "gold")
    text = _string(data, "prediction", "prediction" if "prediction" in data else "response")
    finished = data.get("finished", True)
    if not isinstance(finished, bool):
        raise ValueError("`finished` is neither true nor false")
    protocol = "direct"
    if protocol_field is not None:
        protocol = data.get(protocol_field)
        if protocol not in ("direct", "wrap", "skip"):
            raise ValueError(f"`{protocol_field}` is not one of direct, wrap, skip")
    if protocol == "wrap":
        text = rf"\boxed{{{text}}}"
    response = None if protocol == "skip" else Response((), text, (), finished)
    return _Row(data, _problem(data, gold), response, _stated(data))


def _problem(data: Mapping[str, Any], gold: str) -> Problem:
    """The row as a problem: every other column is at a user's function's disposal."""
    texts = {name: value for name in ("id", "problem", "solution") if isinstance(value := data.get(name), str)}
    extra = {name: value for name, value in data.items() if name not in texts and name not in _OWN}
    return Problem(texts.get("id", ""), texts.get("problem", ""), texts.get("solution", ""), gold, extra)


def _stated(data: Mapping[str, Any]) -> bool | None:
    """The verdict that a row came with. One with a `reason` was graded here, so its `correct` is our own."""
    names = (name for name in _STATED if not (name == "correct" and "reason" in data))
    return next((data[name] for name in names if isinstance(data.get(name), bool)), None)


def _string(data: Mapping[str, Any], name: str, key: str) -> str:
    value = data.get(key)
    if name == "gold" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is {'missing' if value is None else 'not a string'}")
    return value


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate can only be written escaped
        return (json.dumps(row) + "\n").encode()


def _group(row: Mapping[str, Any]) -> str:
    """What a row is counted under: its family, or where it comes from."""
    source = row.get("family", row.get("source"))
    if "family" in row:
        return str(source)
    return source.split(" ")[0].split("::")[0] if isinstance(source, str) else ""


@contextmanager
def _replacing(out: Path | None) -> Generator[IO[bytes] | None]:
    """A file that takes the place of `out` when the block ends well, and goes away when it does not."""
    if out is None:
        yield None
        return
    with whole(out) as part, part.open("wb") as sink:
        yield sink


def render(summary: Summary) -> str:
    """The summary for a terminal of 80 columns."""
    share = f" ({summary.correct / summary.rows:.1%})" if summary.rows else ""
    lines = [f"{summary.rows} rows, {summary.correct} correct{share}, {summary.seconds:.1f} s"]
    if summary.bad:
        lines.append(f"{summary.bad} bad rows left out")
    lines += [f"  {reason:<14}{count:>8}" for reason, count in summary.reasons.most_common()]
    if summary.overall.total or summary.policy.ours.total or summary.suspect.ours.total:
        lines += _table(summary)
    return "\n".join(lines)


def _table(summary: Summary) -> list[str]:
    """Agreement with the stated verdicts, ours and beside it math-verify's."""
    both = summary.compared.plain.total > 0
    heads = f"{'agree':>8}{'accepts':>8}{'rejects':>8}"
    lines = [f"{'':<31}{'ours':>24}{'plain math-verify':>24}"] if both else []
    lines.append(f"{'stated verdicts':<25}{'rows':>6}{heads}{heads if both else ''}")
    lines.append(_row("all", summary.compared))
    lines += [_row(f"  {name}", summary.by_source[name]) for name in sorted(summary.by_source)]
    for name, part in (("left out: conventions", summary.policy), ("left out: stated wrongly", summary.suspect)):
        if part.ours.total:
            lines.append(_row(name, part))
    lines.append("accepts: accepted though stated wrong. rejects: rejected though stated right.")
    return lines


def _row(name: str, pair: Pair) -> str:
    name = name if len(name) <= 24 else name[:23] + "…"
    sides = [pair.ours] + [pair.plain] * bool(pair.plain.total)
    cells = (f"{side.rate:>8.1%}{side.wrongly_accepted:>8}{side.wrongly_rejected:>8}" for side in sides)
    return f"{name:<25}{pair.ours.total:>6}{''.join(cells)}"


def _graded(path: Path) -> bool:
    """Whether a file holds rows that were graded here."""
    with path.open("rb") as file:
        try:
            row = json.loads(file.readline(1 << 20))
        except (ValueError, RecursionError):
            return False
    return is_table(row) and {"correct", "reason"} <= set(row)


def verify(
    file: Path, out: Path | None, name: str, settings: list[str], *, skip_bad: bool, protocol_field: str | None
) -> Summary:
    """`past verify`: the rows of a file, graded by the verifier of this name and beside it by plain math-verify."""
    plain(file)
    if out is not None:
        room(out, ours=lambda path: path.samefile(file) or _graded(path))  # the former is told below
    beside = WorkerPool("past_opsd.rollout.verifiers._plain:accepts", workers=2, timeout=_PLAIN_LIMIT, memory_mb=4096)
    try:
        with _build(name, settings) as verifier:
            return grade_file(file, out, verifier, skip_bad=skip_bad, protocol_field=protocol_field, plain=beside)
    finally:
        beside.close()


def _build(name: str, settings: list[str]) -> Verifier:
    module = plugin("verifier", name)
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise PastError(f"--set {setting}: write it as KEY=VALUE, e.g. --set timeout=2")
        try:
            values[key.strip()] = tomllib.loads(f"v = {value}")["v"]
        except (ValueError, RecursionError):
            values[key.strip()] = value.strip()
    try:
        options = module.Options(**values)
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(module.Options.model_fields)
        raise PastError(f"--set {'.'.join(map(str, first['loc']))}: {first['msg']}. {name} knows {known}.") from None
    return module.build(options)
