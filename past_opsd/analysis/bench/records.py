"""`past bench records`: what a cycle of long responses costs beside the sampling: its Parquet file and its verdicts.

The file is written group by group, as a run does, and as one table, as pyarrow makes it of rows. Each side has the same
responses and a process of its own; they take turns.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from past_opsd.analysis.bench._worker import Side, peak_beyond, serve
from past_opsd.core.nouns import Attempt, PastError, Problem, Response, Verdict, View
from past_opsd.rollout.verifiers import boxed_math
from past_opsd.run import attempts

pa: Any = pyarrow  # it has no types
pq: Any = pyarrow.parquet
LABELS = {"rows": "one table of rows", "groups": "group by group"}
MANY = 10_000
VOCABULARY = 151_936
WORDS = ("so", "we", "add", "both", "sides", "and", "find", "that", "x", "=", "12", "therefore")


def run(args: argparse.Namespace) -> int:
    """Print a line for each way of writing, one for reading a few rows, one for the verifier."""
    for name in ("responses", "tokens", "repeats"):
        if getattr(args, name) < 1:
            raise PastError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    tokens = args.responses * args.tokens
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in LABELS}
    size = (args.responses, args.tokens)
    with Side("rows", _build, *size) as rows, Side("groups", _build, *size) as groups:
        for _ in range(args.repeats):
            for name, side in (("rows", rows), ("groups", groups)):
                found[name].append(side.ask(name))
        verified = min(groups.ask("verify") for _ in range(args.repeats))
        read, written = min(groups.ask("read") for _ in range(args.repeats)), groups.ask("size")
    print(f"{args.responses} responses of {args.tokens:,} tokens; CPU time, MiB beside the responses themselves\n")
    print("writing            CPU s  Mtok/s    MiB")
    least = {name: min(seconds for seconds, _ in measured) for name, measured in found.items()}
    for name, measured in found.items():
        memory = [mib for _, mib in measured if mib is not None]
        room = f"{max(memory):6.0f}" if memory else "     -"
        print(f"{LABELS[name]:17s} {least[name]:6.2f} {tokens / least[name] / 1e6:7.2f} {room}")
    print(f"\nthe file: {written / 1e6:.1f} MB; its outline and three rows read in {read:.2f} s")
    print(f"verdicts: {verified:.2f} s, {args.responses / verified:,.0f} responses a second (boxed_math)")
    many = MANY / args.responses
    print(f"{MANY:,} such responses: {many * least['groups']:.0f} s of writing, {many * verified:.0f} s of verifying")
    return 0


def _build(pipe: Connection, responses: int, tokens: int) -> None:
    problem = Problem("p", "What is x?", "x is 12", "12")
    own = [_attempt(problem, i, tokens) for i in range(responses)]
    file = Path(tempfile.mkdtemp(prefix="past-records-")) / "responses.parquet"
    rows = [partial(attempts.row, 0, a, {"student": 0}, i, False) for i, a in enumerate(own)]
    writers: dict[str, Callable[[], object]] = {
        "rows": lambda: _as_rows(file, [{k: _listed(v) for k, v in make().items()} for make in rows]),
        "groups": lambda: attempts.write(file, (make() for make in rows)),
    }

    def measured(write: Callable[[], object]) -> tuple[float, float | None]:
        began = time.process_time()
        room = peak_beyond(write)
        return time.process_time() - began, room

    def read() -> float:
        began = time.process_time()
        places = [row["place"] for row in attempts.outline(file)][:3]
        attempts.read(file, places=places)
        return time.process_time() - began

    def verify() -> float:
        """A verifier that has seen nothing yet; wall time, since the comparisons run in processes of their own."""
        with boxed_math.BoxedMath(boxed_math.Options()) as verifier:
            began = time.perf_counter()
            verifier.verify([(a.problem, a.response) for a in own])
            return time.perf_counter() - began

    tools = {name: partial(measured, write) for name, write in writers.items()}
    serve(pipe, tools | {"read": read, "verify": verify, "size": lambda: file.stat().st_size})


def _attempt(problem: Problem, i: int, tokens: int) -> Attempt:
    draw = random.Random(i)
    ids = tuple(draw.randrange(VOCABULARY) for _ in range(tokens))
    logprobs = tuple(-draw.expovariate(2) for _ in range(tokens))
    text = " ".join(draw.choices(WORDS, k=tokens)) + rf" \boxed{{{i}}}"
    response = Response(ids, text, logprobs, True)
    return Attempt(problem, View("student", tuple(range(200))), response, Verdict(False, "wrong", str(i)))


def _as_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=attempts.SCHEMA), file, compression="zstd")


def _listed(value: Any) -> Any:
    return [*value] if isinstance(value, (tuple, bytes)) else value
