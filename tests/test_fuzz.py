"""Whatever a file holds, a person gets a result or one message: never another exception, never an endless wait.

PAST_FUZZ=50 draws fifty times as many examples, and others than the fixed ones.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Quiet, small
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from past_opsd.analysis import report, suite
from past_opsd.analysis.probes import probe
from past_opsd.analysis.report import data, figures, page
from past_opsd.analysis.shift import shift
from past_opsd.analysis.watch import Watched
from past_opsd.core import config
from past_opsd.core.nouns import PastError, Response, derive_seed
from past_opsd.rollout.verifiers import _normalise, boxed_math
from past_opsd.rollout.verifiers._extract import find_answer
from past_opsd.rollout.verifiers.grade import grade_file
from past_opsd.run import boundary, checkpoint, export
from past_opsd.run.evaluate import Evaluation
from past_opsd.run.folder import CHECKPOINT, RunFolder
from past_opsd.run.train import Session, _restore, session, train
from past_opsd.tasks import dataset
from past_opsd.tasks._columns import ALIASES, Loaded, Reading, load

TIMES = int(os.environ.get("PAST_FUZZ", "1"))


def fuzz(examples: int):
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


texts = st.text(max_size=30) | st.sampled_from(["", " ", "\0", "\ud800", "None", "nan", "../../etc", "é" * 50, "{x}"])
numbers = (
    st.integers(-3, 3)
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.sampled_from([0, 1, -1, 10**400, 2**63, float("inf"), float("nan"), 1e308])
)
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# Recipes

RECIPES = [tomllib.loads(config.to_toml(config.load(name))) for name in config.shipped()[::4]]
SOURCES = [config.to_toml(config.load(name)) for name in config.shipped()[::9]]
MODULES = [
    "past",
    "",
    ".",
    "..",
    "a.",
    ".a",
    "a..b",
    "os.path",
    "json",
    "json.decoder",
    "no.such.module",
    "ä.b",
    "\0.a",
]
MODULES += [
    "json.decoder.JSONDecodeError",
    "a b.c",
    "past_opsd",
    "past_opsd.methods",
    "sys.path",
    "../x",
    "_call",
    "pool",
]
toml_values = st.recursive(
    st.booleans()
    | st.integers(-3, 10**20)
    | st.floats()
    | texts.filter(lambda text: "\ud800" not in text)
    | st.sampled_from(MODULES)
    | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def tables(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(data, dict):
        for key, value in data.items():
            yield from tables(value, (*path, key))


def changed(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(data.get(key), dict):
            return
        data = data[key]
    if value is ...:
        data.pop(path[-1], None)
    else:
        data[path[-1]] = value


@fuzz(100)
@given(st.data())
def test_a_recipe_with_anything_in_it(data: st.DataObject):
    tree = json.loads(json.dumps(data.draw(st.sampled_from(RECIPES))))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(tables(tree))))
        if data.draw(st.booleans()) or not path:
            path = (*path, data.draw(st.text(max_size=5) | st.sampled_from(["name", "lr", "run", "extends"])))
        changed(tree, path, data.draw(toml_values | st.just(...)))
    recipe = attempt(lambda: config.validate(tree, {}, "fuzz"))
    if recipe is None:
        return
    again = config.validate(tomllib.loads(config.to_toml(recipe)), {}, "again")
    assert config.dump(again) == config.dump(recipe)


@fuzz(100)
@given(st.sampled_from(SOURCES), st.integers(0), st.binary(max_size=12), st.integers(0, 60))
def test_a_recipe_that_was_damaged(place: Path, text: str, at: int, put: bytes, gone: int):
    source = text.encode()
    at %= len(source)
    (place / "mine.toml").write_bytes(source[:at] + put + source[at + gone :])
    attempt(lambda: config.load(place / "mine.toml"))


@fuzz(60)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_a_recipe_that_is_none(place: Path, source: bytes):
    (place / "mine.toml").write_bytes(source)
    attempt(lambda: config.load(place / "mine.toml"))


KEYS = [".".join(path) for path in tables(RECIPES[0]) if path]


@fuzz(100)
@given(
    st.lists(st.builds("{}={}".format, st.sampled_from(KEYS) | texts, toml_values.map(str) | texts) | texts, max_size=3)
)
def test_overrides_of_any_kind(overrides: list[str]):
    attempt(lambda: config.load("embedded/past", overrides))


@fuzz(60)
@given(st.sampled_from(sorted(config.PLUGINS)), st.sampled_from(MODULES) | st.text(max_size=6))
def test_a_module_of_any_name(kind: str, name: str):
    assume(name.isidentifier() or name in MODULES)
    attempt(lambda: config.load("embedded/past", [f"{kind}.name={json.dumps(name)}"]))


def attempt(action: Any) -> Any:
    """What it gives, or None where it ends in a message for people."""
    try:
        return action()
    except PastError as error:
        said = str(error)
    assert said.strip()
    return None


# Datasets

columns = st.sampled_from([name for names in ALIASES.values() for name in names])
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": plain}) | plain, max_size=3
)
rows = st.dictionaries(columns | texts, plain | messages | st.sampled_from(["4 #### 2", r"\boxed{3}", "#### ####"]))
readings = st.builds(
    Reading,
    columns=st.dictionaries(st.sampled_from(list(ALIASES)), columns | st.text(max_size=5), max_size=2),
    keep=st.none() | st.lists(columns | texts, max_size=3),
    needs_solution=st.booleans(),
    needs_answer=st.booleans(),
    limit=st.none() | st.integers(1, 3),
)


def usable(loaded: Loaded | None) -> None:
    """Whatever is accepted can be used: hashed, drawn for, written down."""
    for problem in loaded.problems if loaded else ():
        assert problem.id
        assert problem.text.strip()
        derive_seed(problem.id)
        "".join([problem.id, problem.text, problem.solution, problem.answer]).encode()
    if loaded:
        loaded.listing().encode()
        dataset.identity("fuzz", [loaded.problems])


@fuzz(150)
@given(st.lists(rows | plain, max_size=4), readings)
def test_rows_of_any_kind(place: Path, found: list[Any], reading: Reading):
    (place / "data.jsonl").write_text("\n".join(map(json.dumps, found)), encoding="utf-8")
    usable(attempt(lambda: load(str(place / "data.jsonl"), reading)))


@pytest.mark.parametrize("role", ["problem", "solution", "answer", "id"])
def test_half_a_character_is_no_text(place: Path, role: str):
    row = {"problem": "1+1", "solution": "2", "answer": "2", "id": "a"} | {role: "x\ud800"}
    (place / "half.jsonl").write_text(json.dumps(row))
    loaded = load(str(place / "half.jsonl"), Reading())
    usable(loaded)
    assert "half of a surrogate pair" in loaded.bad[0]


@fuzz(100)
@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"{", b"[" * 9000, b'{"problem": ', b"\xff", b"9" * 5000])))
def test_lines_of_any_bytes(place: Path, lines: list[bytes]):
    (place / "data.jsonl").write_bytes(b"\n".join(lines))
    usable(attempt(lambda: load(str(place / "data.jsonl"), Reading(needs_solution=False))))
    attempt(lambda: grade_file(place / "data.jsonl", None, _Says(), skip_bad=False))
    attempt(lambda: grade_file(place / "data.jsonl", None, _Says(), skip_bad=True))


@fuzz(50)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["gold", "prediction", "response", "finished", "correct", "id"]) | texts, plain)
    ),
    st.sampled_from([None, "protocol", "gold"]),
)
def test_rows_to_grade_of_any_kind(place: Path, found: list[Any], protocol: str | None):
    (place / "grade.jsonl").write_text("\n".join(map(json.dumps, found)), encoding="utf-8")
    attempt(lambda: grade_file(place / "grade.jsonl", None, _Says(), skip_bad=True, protocol_field=protocol))


class _Says:
    identity = "says"

    def verify(self, items: Any) -> list[Any]:
        return [boxed_math.Reason.WRONG.verdict() for _ in items]

    def close(self) -> None: ...


arrow_columns = st.one_of(
    st.lists(st.none() | st.text(max_size=9), min_size=2, max_size=2).map(lambda v: pa.array(v, pa.string())),
    st.lists(st.none() | st.binary(max_size=9), min_size=2, max_size=2).map(lambda v: pa.array(v, pa.binary())),
    st.lists(st.floats(width=32), min_size=2, max_size=2).map(lambda v: pa.array(v, pa.float32())),
    st.lists(st.datetimes(), min_size=2, max_size=2).map(lambda v: pa.array(v, pa.timestamp("us"))),
    st.lists(st.integers(0, 10**9), min_size=2, max_size=2).map(lambda v: pa.array(v, pa.duration("s"))),
    st.lists(st.decimals(0, 9, places=2), min_size=2, max_size=2).map(lambda v: pa.array(v, pa.decimal128(9, 2))),
    st.lists(st.lists(st.integers(0, 9)), min_size=2, max_size=2).map(lambda v: pa.array(v, pa.list_(pa.int8()))),
    st.just(pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32()))),
    st.just(pa.array([{"role": "user", "content": "x"}, None])),
    st.just(pa.array([[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}]])),
    st.just(pa.nulls(2)),
    st.just(pa.array(["a", "b"]).dictionary_encode()),
)


@fuzz(80)
@given(st.dictionaries(columns | st.text("ab\0 é", max_size=3), arrow_columns, min_size=1, max_size=4), st.data())
def test_tables_of_any_kind(place: Path, found: dict[str, pa.Array], data: st.DataObject):
    path = place / "data.parquet"
    pq.write_table(pa.table(found), path)
    content = path.read_bytes()
    usable(attempt(lambda: load(str(path), data.draw(readings))))
    at = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:at] + data.draw(st.binary(max_size=5)) + content[at + data.draw(st.integers(0, 9)) :])
    usable(attempt(lambda: load(str(path), Reading(needs_solution=False))))


# Answers

PIECES = [
    r"\boxed{",
    r"\fbox{",
    "}",
    "{",
    "(",
    ")",
    "[",
    "]",
    r"\frac",
    r"\text{",
    r"\pm",
    r"\mp",
    "√",
    "½",
    "⁄",
    "²",
    "₁",
]
PIECES += [
    "1",
    "12,345",
    "1 1/2",
    "0.",
    r"\overline{3}",
    "e5",
    "**",
    "Eq(",
    ",",
    ";",
    " ",
    "\n",
    "$",
    "\\",
    r"\left",
    "cm",
]
PIECES += [r"\sqrt{", "and", "=", "-", "+", "/", "%", "</think>", "<think>", "٣", "\u202e", "\ud800", "x", r"\,", r"\!"]
answers = st.one_of(
    st.text(max_size=80),
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.builds(
        lambda piece, n, tail: piece * n + tail, st.sampled_from(PIECES), st.integers(0, 1500), st.text(max_size=5)
    ),
    st.builds(
        lambda a, b, n, tail: ((a + b) * n)[:1499] + tail,
        st.sampled_from(PIECES),
        st.sampled_from(PIECES),
        st.integers(0, 750),
        st.sampled_from(["", "!", "a1", "}"]),
    ),
)
VERIFIER = boxed_math.BoxedMath(boxed_math.Options(max_length=6000))
LIMIT = 5.0


@fuzz(400)
@given(answers)
def test_an_answer_of_any_text(text: str):
    began = time.process_time()
    for strip in (True, False):
        find_answer(text, strip_thinking=strip)
    cleaned = _normalise.clean(text)
    for read in (_normalise.squeeze, _normalise.rational, _normalise.label, _normalise.nesting, _normalise.is_quoted):
        read(cleaned)
    _normalise.voted(cleaned)
    assert time.process_time() - began < LIMIT


@fuzz(300)
@given(answers, answers)
def test_a_pair_of_any_texts(gold: str, text: str):
    """All of the verifier that runs in the caller's process; what is left over goes to processes that can be killed."""
    began = time.process_time()
    for said in (text, rf"so \boxed{{{text}}}"):
        VERIFIER._look(gold, Response((), said, (), True))
    assert time.process_time() - began < LIMIT


@pytest.mark.parametrize("digits", [4299, 4301, 5900])
def test_numbers_longer_than_python_converts(digits: int):
    """A person may raise max_length; Python refuses to convert more than 4300 digits."""
    long = "9" * digits
    for text in (long, f"1/{long}", f"1 1/{long}", rf"0.\overline{{{long}}}", f"-{long}"):
        for gold, said in ((text, "2"), ("2", text), (text, text + "0")):
            VERIFIER._look(gold, Response((), rf"\boxed{{{said}}}", (), True))


# What a run leaves


@pytest.fixture(scope="module")
def parts() -> Iterator[Session]:
    with session(small("embedded/past", "model.lora.rank=2")) as found:
        yield found


@pytest.fixture(scope="module")
def saved(parts: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts.loop.cycle(0)
    state = {"method": parts.loop.method.state(), "identity": parts.identity}
    return checkpoint.save(RunFolder(tmp_path_factory.mktemp("saved")), 1, parts.model, parts.learner, state)


class _Silent:
    def note(self, text: str) -> None: ...


@fuzz(150)
@given(st.data())
def test_a_manifest_of_any_kind(saved: Path, data: st.DataObject):
    file = saved / checkpoint.MANIFEST
    content = file.read_bytes()
    tree = json.loads(content)
    if data.draw(st.booleans()):
        path = data.draw(st.sampled_from([p for p in tables(tree) if p]))
        changed(tree, path, data.draw(plain | st.just(...)))
        changed(tree, (data.draw(texts),), data.draw(plain | st.just(...)))
        put = json.dumps(tree).encode()
    else:
        put = data.draw(st.binary(max_size=30) | plain.map(lambda v: json.dumps(v).encode()) | st.just(b"[" * 10**5))
    assume(put != content)
    try:
        file.write_bytes(put)
        found, notes = checkpoint.newest_whole(RunFolder(saved.parents[1]))
        assert (found is None) == bool(notes)
        assert found is None or json.loads(content).items() <= json.loads(put).items()
    finally:
        file.write_bytes(content)


@fuzz(100)
@given(st.data())
def test_a_state_of_any_kind(saved: Path, parts: Session, data: st.DataObject):
    """A state with a manifest that fits it: what another program, or a person, may have written."""
    file, listing = saved / "state.json", saved / checkpoint.MANIFEST
    content, listed = file.read_bytes(), listing.read_bytes()
    tree = json.loads(content)
    if data.draw(st.integers(0, 3)):
        for _ in range(data.draw(st.integers(1, 2))):
            inner = [p for p in tables(tree) if p and p[0] not in ("identity",)]
            changed(tree, data.draw(st.sampled_from(inner)), data.draw(plain | st.just(...)))
        put = json.dumps(tree).encode()
    else:
        put = data.draw(st.binary(max_size=30) | plain.map(lambda v: json.dumps(v).encode()))
    manifest = json.loads(listed)
    try:
        file.write_bytes(put)
        manifest["state.json"] = {"bytes": len(put), "sha256": checkpoint._hash(file)}
        listing.write_text(json.dumps(manifest))
        state = attempt(lambda: _restore(parts, RunFolder(saved.parents[1]), _Silent()))
        assert state is None or isinstance(state["next_cycle"], int)
    finally:
        file.write_bytes(content)
        listing.write_bytes(listed)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@fuzz(60)
@given(st.sampled_from(sorted(n for n in CHECKPOINT if n.endswith(".safetensors"))), st.data())
def test_tensors_of_any_kind(saved: Path, parts: Session, name: str, data: st.DataObject):
    file = saved / name
    content = file.read_bytes()
    try:
        at = data.draw(st.integers(0, 600) | st.integers(0, len(content) - 1))
        file.write_bytes(content[:at] + data.draw(st.binary(max_size=9)) + content[at + data.draw(st.integers(0, 9)) :])
        attempt(lambda: checkpoint.restore(saved, parts.model, parts.learner))
    finally:
        file.write_bytes(content)


@fuzz(100)
@given(
    st.binary(max_size=50)
    | st.lists(plain | st.fixed_dictionaries({"cycle": plain})).map(
        lambda rows: "\n".join(map(json.dumps, rows)).encode()
    )
)
def test_records_of_any_kind(place: Path, content: bytes):
    (place / "metrics.jsonl").write_bytes(content)
    attempt(lambda: RunFolder(place).read_metrics())
    attempt(lambda: RunFolder(place).rewind(1))


result = st.fixed_dictionaries(
    {
        "problems": plain | st.just(["a", "b"]),
        "outcomes": plain | st.sampled_from([[[0, 1], [1, 1]], [[0], [1, 1]], [[]], [], [["a"]], [[2.5]]]),
        "answers": plain | st.just([["1", "2"], ["1", "1"]]),
        "reasons": plain | st.just({"wrong": 1}),
        "styles": plain | st.just({}),
        "mean_length": plain | st.just(3.0),
        "truncated": plain | st.just(0.0),
    }
)
evaluations = st.fixed_dictionaries(
    {
        "step": plain | st.just(0),
        "adapter": plain | st.just("student"),
        "samples": plain | st.just(2),
        "dropped": plain | st.just(0),
        "tasks": plain | st.dictionaries(texts, plain | result, max_size=2),
    }
)


@fuzz(150)
@given(plain | evaluations)
def test_an_evaluation_of_any_kind(place: Path, content: Any):
    (place / "step-00000.json").write_text(json.dumps(content), encoding="utf-8")
    found = attempt(lambda: Evaluation.load(place / "step-00000.json"))
    if found is not None:
        found.summary([1])


# A whole run, damaged in any way

ODD: list[Any] = [None, True, "", "x", "NaN", -1, 0, 0.5, -0.5, 2**31, 2**63, 10**400, 1e308, -1e308, 1e-308, [], {}]
ODD += [float("nan"), float("inf"), -float("inf"), [1], [[0, 1], [1]], {"a": 1}, "\ud800", "\0", "é" * 300, "<script>"]
GARBAGE = [b"", b"\0" * 99, b"\xff\xfe\0", b"{", b"[]", b"null", b"{}", b"[" * 10**5, b'{"cycle": 0}\n', b"NaN\n"]
VALUES = ["", "1", "-1", "true", '"x"', "nan", "1e400", "10" * 200, "[]", "{}", "[1, 2]", "1979-05-27", '"\\u0000"']
NAMES = ["step-0.json", "step-x.json", "step--1.json", "step-" + "9" * 30 + ".json", "shift-x.json", "shift-9.json"]
NAMES += ["cycle-x.parquet", "cycle-99999999999999999999.parquet"]
Draw = random.Random


def _numbers(run: Path, rng: Draw) -> None:
    file = run / rng.choice(["metrics.jsonl", "timings.jsonl"])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in rng.choices(lines, k=2):
        key = rng.choice([*line, "cycle", "cycle", "peak_mib", "student/stepped", "cost/verifier_calls", "new/key"])
        line[key] = rng.choice(ODD)
        if rng.random() < 0.2:
            del line[key]
    lines = rng.choice([lines, lines, lines[::-1], lines * 2, lines[:0]])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _json(run: Path, rng: Draw) -> None:
    file = rng.choice([p for p in sorted(run.rglob("*.json")) if p.name != "adapter_config.json"])
    tree = json.loads(file.read_text())
    changed(tree, rng.choice([path for path in tables(tree) if path]), rng.choice([..., *ODD]))
    file.write_text(json.dumps(tree))


def _setting(run: Path, rng: Draw) -> None:
    lines = (run / "recipe.toml").read_text().splitlines()
    i = rng.choice([i for i, line in enumerate(lines) if "=" in line and not line.startswith("#")])
    lines[i] = f"{lines[i].partition('=')[0]}= {rng.choice(VALUES)}"
    (run / "recipe.toml").write_text("\n".join(lines) + "\n")


def _column(run: Path, rng: Draw) -> None:
    file = rng.choice([*sorted(run.glob("rollouts/*")), *sorted(run.glob("continuations/*"))])
    table = pq.read_table(file)
    name = rng.choice(table.column_names)
    i, n = table.column_names.index(name), len(table)
    values: list[Any] = rng.choice([[None], ["x"], [[]], [[2**31 - 1]], [[None]], [[0] * 5000], [-1], [10**15]])
    pq.write_table(table.set_column(i, name, pa.array(values * n)) if rng.random() < 0.8 else table.drop(name), file)


def _bytes(run: Path, rng: Draw) -> None:
    file = _some(run, rng)
    content = file.read_bytes()
    at = rng.randrange(len(content) + 1)
    file.write_bytes(
        rng.choice([*GARBAGE, content[:at], content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]])
    )


def _kind(run: Path, rng: Draw) -> None:
    file = _some(run, rng)
    file.unlink()
    make: list[Any] = [os.mkfifo, Path.mkdir, lambda path: None]
    make += [lambda path, to=to: path.symlink_to(to) for to in ("/dev/zero", "/nonexistent", file)]
    rng.choice(make)(file)


def _name(run: Path, rng: Draw) -> None:
    file = _some(run, rng)
    shutil.copy(file, file.with_name(rng.choice(NAMES)))


def _some(run: Path, rng: Draw) -> Path:
    return rng.choice(sorted(p for p in run.rglob("*") if p.is_file()))


DAMAGES = [_numbers, _numbers, _json, _json, _setting, _column, _bytes, _kind, _name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every record there is."""
    run = tmp_path_factory.mktemp("made") / "run"
    short = ["run.cycles=2", "evaluation.at=[0.0, 1.0]", "rollout.problems_per_cycle=3", "model.lora.rank=2"]
    train(small("embedded/past", *short, "task.eval_problems=2", "run.keep_checkpoints=1"), run, False, Quiet())
    with boundary.opened(run, 2) as at:
        RunFolder(run).write_probe(2, probe(at, boundary.pick(at.session.loop.problems, 2, 0), 1, "train"))
        RunFolder(run).write_shift(2, shift(at, 4, 4, 2, 2))
    return run


def damaged(made: Path, place: Path, seed: int) -> Path:
    rng = random.Random(seed)
    run = place / f"damaged-{seed}"
    shutil.copytree(made, run)
    for damage in rng.sample(DAMAGES, rng.choice([1, 1, 1, 2])):
        try:
            damage(run, rng)
        except (ValueError, pa.ArrowException, OSError):  # the other damage left nothing to damage here
            continue
    return run


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5 * TIMES))])
def test_a_run_damaged_in_any_way(made: Path, tmp_path: Path, seed: int):
    """Report, comparison, card and page: each works or ends in one message, and none waits for ever."""
    for i in range(10):
        run = damaged(made, tmp_path, 10 * seed + i)
        attempt(lambda run=run: figures.figures(data.find([run])))
        attempt(lambda run=run: suite.row("a", "a", [run]))
        attempt(lambda run=run: export.card(RunFolder(run).recipe(), run, RunFolder(run).checkpoint(2), False))
        attempt(lambda run=run: boundary.choose(run, None))
        watched = Watched([run], lambda found: f"<head>{page.POLICY}</head><body>{len(data.find(found))}</body>")
        assert "<body>" in watched.page()[1]
        assert isinstance(watched.state().problem, str)
        shutil.rmtree(run)


@pytest.mark.parametrize("seed", range(1, 1 + TIMES))
def test_a_damaged_run_is_drawn_or_told(made: Path, tmp_path: Path, seed: int):
    """The whole page, with its panels and trajectories."""
    rng = random.Random(seed)
    run = Path(shutil.copytree(made, tmp_path / "run"))
    for damage in (_numbers, _column):
        damage(run, rng)
    found = attempt(lambda: report.render(data.find([run]), trajectories=1))
    assert found is None or found.startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["recipe.toml", "metrics.jsonl", "timings.jsonl", "evaluations/step-00002.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_what_never_ends_is_not_read(made: Path, tmp_path: Path, name: str, kind: str):
    run = Path(shutil.copytree(made, tmp_path / "run"))
    (run / name).unlink()
    if kind == "pipe":
        os.mkfifo(run / name)
    elif kind == "device":
        (run / name).symlink_to("/dev/zero")
    else:
        with (run / name).open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(PastError, match=f"{name}(: (larger|cannot be read)| is a link that leads out)|holds no run"):
        data.find([run])
    assert "<body>" in Watched([run], lambda found: f"<head>{page.POLICY}</head><body>{data.find(found)}").page()[1]
