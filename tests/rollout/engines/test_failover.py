"""Servers that fail in the middle of a batch and come back, against real sockets: no draw changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from rollout.engines.stand_in import BASE, StandIn, distribution, tokens

from past_opsd.core.config import Sampling
from past_opsd.core.nouns import PastError
from past_opsd.rollout.engines import vllm_server
from past_opsd.rollout.engines.vllm_backend import Draw, Options, Probe, Served
from past_opsd.rollout.engines.vllm_server import FaultError, ServerBackend

SAMPLING = Sampling(max_new_tokens=16)
PROMPTS = [(1, 2), (3, 1, 4), (5,)]
WEIGHTS = {"student-1": 2.0, "student-2": 3.0}
LIMIT = 60.0
"""Seconds after which a test has failed."""


def served(folder: Path, name: str, weight: float | None = None) -> Served:
    """A version of an adapter, as the engine hands it over."""
    truth = WEIGHTS[name] if weight is None else weight
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "weight").write_text(str(truth))
    number = 1 + list(WEIGHTS).index(name)
    return Served(name, number, number, "", place, probes(truth))


def probes(weight: float) -> tuple[Probe, ...]:
    return tuple(Probe(prompt, distribution(weight, prompt)) for prompt in PROMPTS)


BARE = Served("base", 0, 0, "", None, probes(BASE))


def draws(adapter: Served, count: int = 24) -> list[Draw]:
    return [Draw(adapter, PROMPTS[seed % len(PROMPTS)], seed) for seed in range(count)]


def expected(asked: list[Draw]) -> list[list[int]]:
    return [tokens(WEIGHTS[draw.served.name], draw.prompt, draw.seed) for draw in asked]


def drawn(backend: ServerBackend, asked: list[Draw]) -> list[list[int]]:
    return [list(answer.tokens) for answer in backend.draw(asked, SAMPLING)]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StandIn, StandIn]]:
    monkeypatch.setattr(vllm_server, "AGAIN", 0.05)
    servers = (StandIn(), StandIn())
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        if server.fault != "dies":
            server.stop()


Make = Callable[..., tuple[ServerBackend, list[str]]]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(servers, **options)`: a backend, and what it says to a person."""
    made: list[ServerBackend] = []

    def build(
        servers: tuple[StandIn, ...], restarted: bool = False, **options: object
    ) -> tuple[ServerBackend, list[str]]:
        given = {"mode": "server", "urls": [server.url for server in servers], "in_flight": 4} | options
        backend = ServerBackend(Options.model_validate(given), [0], BARE, 0.001, 32, restarted)
        said: list[str] = []
        backend.hear(said.append)
        made.append(backend)
        return backend, said

    yield build
    for backend in made:
        backend.close()


def until(condition: Callable[[], bool], act: Callable[[], object] = lambda: time.sleep(0.02)) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        act()


@pytest.mark.parametrize("fault", ["dies", "hangs", "late", "busy", "garbage", "half", "other"])
def test_a_server_that_fails_in_a_batch_changes_no_draw_and_gets_the_current_adapter_when_it_returns(
    pair: tuple[StandIn, StandIn], make: Make, tmp_path: Path, fault: str
):
    _, ill = pair
    backend, said = make(pair, timeout_seconds=1.0 if fault in ("hangs", "late") else 60.0)
    old, new = (served(tmp_path, name) for name in WEIGHTS)
    backend.load(old)
    asked = draws(old)
    assert drawn(backend, asked) == expected(asked)
    assert {len(server.answered) for server in pair} == {12}, "each server has its half"

    ill.fault, ill.after = fault, 12 + 3
    assert drawn(backend, asked) == expected(asked)
    assert len(ill.answered) == 15
    until(lambda: bool(said), lambda: drawn(backend, asked))
    ill.let_go()  # what was late is answered now, to nobody
    assert drawn(backend, asked) == expected(asked)
    assert [text.partition(" (")[0] for text in said] == [f"{ill.url} is left out until it serves again"]
    assert backend.metrics()["engine/retries"] > 0
    assert len(ill.answered) == 15

    backend.load(new)
    backend.unload(old)
    if fault != "dies":
        ill.stop()
    ill.start()
    asked = draws(new)
    until(lambda: bool(ill.answered), lambda: drawn(backend, asked))
    assert drawn(backend, asked) == expected(asked)
    assert list(ill.adapters) == [new.name]
    first = ill.log.index(f"draw {new.name}")
    assert ill.log.index(f"load {new.name}") < ill.log.index(f"probe {new.name}") < first
    assert said[1:] == [f"{ill.url} serves the current adapters again"]


def test_what_waits_for_a_silent_server_goes_to_another_at_once(
    pair: tuple[StandIn, StandIn], make: Make, tmp_path: Path
):
    """One request's time is over; the others', asked a little later, is not."""
    _, ill = pair
    backend, _ = make(pair, timeout_seconds=600.0)
    adapter = served(tmp_path, "student-1")
    backend.load(adapter)
    ill.fault = "hangs"
    asked, found = draws(adapter), list[list[int]]()
    thread = threading.Thread(target=lambda: found.extend(drawn(backend, asked)), daemon=True)
    thread.start()
    until(lambda: ill.log.count(f"draw {adapter.name}") == 8)  # all threads wait there
    backend._servers[1].leave(FaultError("no answer to anybody", silent=True))
    thread.join(LIMIT)
    assert found == expected(asked)


def test_a_server_that_was_only_cut_off_forgets_what_was_unloaded_meanwhile(
    pair: tuple[StandIn, StandIn], make: Make, tmp_path: Path
):
    _, ill = pair
    backend, said = make(pair)
    old, new = (served(tmp_path, name) for name in WEIGHTS)
    backend.load(old)
    ill.fault = "busy"
    until(lambda: bool(said), lambda: drawn(backend, draws(old)))
    backend.load(new)
    backend.unload(old)
    ill.fault = ""
    until(lambda: bool(ill.answered), lambda: drawn(backend, draws(new)))
    assert list(ill.adapters) == [new.name]


@pytest.mark.parametrize("wrong", ["base", "folder", "weights"])
def test_a_server_that_returns_with_something_else_gets_nothing(
    pair: tuple[StandIn, StandIn], make: Make, tmp_path: Path, wrong: str
):
    """Another model, an adapter of this name from elsewhere, another one in its place."""
    _, ill = pair
    backend, said = make(pair)
    adapter = served(tmp_path, "student-1")
    backend.load(adapter)
    ill.stop()
    asked = draws(adapter)
    until(lambda: bool(said), lambda: drawn(backend, asked))
    ill.base = 1.5 if wrong == "base" else BASE
    ill.start()
    held = {"folder": ("/elsewhere", 2.0), "weights": (str(adapter.folder), 2.5)}
    ill.adapters = {"student-1": held[wrong]} if wrong in held else {}
    trouble = "serves student-1 from" if wrong == "folder" else "serves something else than"
    until(lambda: trouble in backend._servers[1].trouble)
    assert drawn(backend, asked) == expected(asked)
    assert not ill.answered
    assert len(said) == 1


def test_a_request_that_one_server_cannot_answer_is_asked_of_another(
    pair: tuple[StandIn, StandIn], make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It answers everything else, so it may be there again before the request is repeated: here it is at once."""
    _, ill = pair
    backend, said = make(pair, retries=1)
    adapter = served(tmp_path, "student-1")
    backend.load(adapter)
    ill.refused = {"7"}
    asked = draws(adapter)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_server.Server, "leave", lambda self, fault: None)
        assert drawn(backend, asked) == expected(asked)
    assert drawn(backend, asked) == expected(asked)
    until(lambda: len(ill.answered) > 12, lambda: drawn(backend, asked))
    assert not said


def test_with_no_server_left_the_run_ends_with_one_message(pair: tuple[StandIn, StandIn], make: Make, tmp_path: Path):
    backend, said = make(pair, patience_seconds=0.2)
    adapter = served(tmp_path, "student-1")
    backend.load(adapter)
    for server in pair:
        server.stop()
    with pytest.raises(PastError) as ended:
        backend.draw(draws(adapter), SAMPLING)
    text = str(ended.value)
    assert all(server.url in text for server in pair)
    assert "past serve RECIPE" in text
    assert text.endswith("continue the run with --resume")
    assert len(said) == len(set(said)) <= 2
    for server in pair:
        server.start()
    assert drawn(backend, draws(adapter)) == expected(draws(adapter)), "the next batch asks them again"


def test_a_server_that_is_missing_at_the_start_is_an_error_but_not_where_a_job_starts_again(
    pair: tuple[StandIn, StandIn], make: Make, tmp_path: Path
):
    _, ill = pair
    ill.stop()
    with pytest.raises(PastError, match=f"no vLLM server answers at {ill.url} .*past serve"):
        make(pair)
    backend, said = make(pair, restarted=True)
    adapter = served(tmp_path, "student-1")
    backend.load(adapter)
    asked = draws(adapter)
    assert drawn(backend, asked) == expected(asked)
    until(lambda: bool(said), lambda: drawn(backend, asked))
    ill.start()
    until(lambda: bool(ill.answered), lambda: drawn(backend, asked))
    assert list(ill.adapters) == ["student-1"]


def test_distributions_of_stand_ins_are_apart():
    """Else a wrong adapter would pass a probe."""
    rows = [[distribution(w, prompt) for prompt in PROMPTS] for w in (BASE, 1.5, 2.0, 2.5, 3.0)]
    for i, one in enumerate(rows):
        assert all(np.abs(np.array(one) - np.array(other)).mean() > 0.1 for other in rows[:i])
