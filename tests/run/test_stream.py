"""The streaming cycle beside the phased one: the same run, whatever ends when."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL, Quiet
from ranks import Launcher
from run.test_train import DRIVER, KILLED, fingerprint

from past_opsd.core.nouns import Attempt, Problem, Response, Verdict, View, Work
from past_opsd.methods.past import Past
from past_opsd.policy.fingerprint import fingerprint as fingerprint_of
from past_opsd.rollout.engines import Request
from past_opsd.run import checkpoint
from past_opsd.run.folder import RunFolder
from past_opsd.run.loop import Cycle
from past_opsd.run.record import summarise
from past_opsd.run.stream import Streaming, _Verdicts
from past_opsd.run.train import Session, costs, session, train

ADAPTIVE = ["method.group_max=4", "rollout.samples_per_problem=3", "rollout.problems_per_cycle=4"]
CASES = {
    "adaptive": ["embedded/past", *ADAPTIVE],
    "ahead": ["embedded/past", *ADAPTIVE, "method.ahead=2"],
    "fixed": ["embedded/past", *ADAPTIVE, "method.sampler=fixed", "method.group_max=2"],
    "tight": ["embedded/past", *ADAPTIVE, "rollout.teacher.max_new_tokens=80", "model.max_context=125"],
    "opsd": ["embedded/opsd"],
    "grpo": ["embedded/grpo"],
    "dynamic": ["embedded/grpo", "rollout.dynamic_rounds=2", "rollout.problems_per_cycle=3"],
}
CYCLES = 2


class Judges:
    """The verifier of a run, asked from another thread; answers take a while, another one each time."""

    apart = True

    def __init__(self, real: Any, seconds: float = 0.004):
        self._real, self._seconds, self._rng = real, seconds, random.Random(3)
        self.identity, self.names = real.identity, set[str]()
        self.asked = 0
        self.fails_at = -1

    def verify(self, items: Sequence[tuple[Problem, Response]]) -> list[Verdict]:
        self.names.add(threading.current_thread().name)
        self.asked += len(items)
        if 0 <= self.fails_at < self.asked:
            raise RuntimeError("the judge is ill")
        time.sleep(self._rng.random() * self._seconds)
        return self._real.verify(items)

    def close(self) -> None:
        self._real.close()


class Shuffled:
    """An engine that decodes both adapters together and ends responses in an order of its own."""

    streams = mixes = True

    def __init__(self, real: Any, seed: int):
        self._real, self._rng = real, random.Random(seed)
        self.log: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def stream(self, asked: Sequence[tuple[Request, Any]], versions: Any) -> Generator[Any, Any, None]:
        every, waiting = list(asked), list(range(len(asked)))
        self.log += [("asked", r.view.adapter) for r, _ in asked]
        while waiting:
            ended = []
            if self._rng.random() < 0.7:
                place = waiting.pop(self._rng.randrange(len(waiting)))
                request, sampling = every[place]
                ended = self._real.sample([request], sampling, versions)
                self.log.append(("ended", request.view.adapter))
                ended = [(place, ended[0])]
            more = yield ended
            self.log += [("asked", r.view.adapter) for r, _ in more]
            waiting += range(len(every), len(every) + len(more))
            every += more


def seeds(session: Session) -> list[int]:
    """A list that fills with the seeds of all requests that the engine is asked."""
    engine, found = session.loop.lab.engine, list[int]()
    sample, stream = engine.sample, engine.stream

    def sampling(requests: Sequence[Request], *rest: Any) -> Any:
        found.extend(r.seed for r in requests)
        return sample(requests, *rest)

    def streaming(asked: Sequence[Any], *rest: Any) -> Generator[Any, Any, None]:
        found.extend(r.seed for r, _ in asked)
        flow, more = stream(asked, *rest), None
        while True:
            try:
                ended = flow.send(more)
            except StopIteration:
                return
            more = yield ended
            found.extend(r.seed for r, _ in more)

    engine.sample, engine.stream = sampling, streaming
    return found


def weights(session: Session) -> dict[str, str]:
    """The bits of the base, as the network has it, and of both adapters."""
    names = {"base": "lora_", "student": ".student.", "teacher": ".teacher."}
    named = dict(session.model.peft.named_parameters())
    return {a: fingerprint_of(p for n, p in named.items() if (part in n) == (a != "base")) for a, part in names.items()}


def cycles(
    recipe: Any, change: Callable[[Session], None] = lambda session: None
) -> tuple[list[Cycle], dict[str, Any], list[int]]:
    """Some cycles of a run, what they leave behind, and the seeds it drew from."""
    with session(recipe) as parts:
        change(parts)
        asked = seeds(parts)
        if isinstance(parts.loop.method, Past):  # the sampler's later cycles: one draw, then one more at a time
            parts.loop.method.restore({"controller": {"base": 1, "ema": None, "streak": 0, "updates": 0}})
        done = [parts.loop.cycle(k) for k in range(CYCLES)]
        left = weights(parts)
        return done, left | {"method": parts.loop.method.state(), "versions": dict(parts.model.versions)}, asked


def told(cycle: Cycle, exactly: bool = False) -> list[Any]:
    """All that a cycle leaves, with the log-probabilities or without."""

    def plain(attempts: Sequence[Attempt]) -> list[Attempt]:
        return [a if exactly else replace(a, response=replace(a.response, logprobs=())) for a in attempts]

    groups = [[plain([g.attempt]), plain(g.continuations), plain(g.discarded), plain(g.unused)] for g in cycle.groups]
    batch = [plain(cycle.batch.correct), plain(cycle.batch.failed), cycle.batch.problems]
    counts = [cycle.dropped, cycle.starts, cycle.unexplored, cycle.versions, plain(cycle.replaced)]
    return [plain(cycle.sampled), batch, groups, counts, cycle.metrics, costs(cycle), summarise(cycle)]


@pytest.fixture(scope="module")
def phased(small_recipe) -> Callable[[str], Any]:
    """The phased run of a case, made once."""
    made: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in made:
            made[name] = cycles(small_recipe(*CASES[name]))
        return made[name]

    return run


def slowly(session: Session) -> None:
    session.loop.lab.verifier = Judges(session.loop.lab.verifier)


def shuffled(session: Session) -> None:
    session.loop.lab.engine = Shuffled(session.loop.lab.engine, 5)


def both(session: Session) -> None:
    slowly(session)
    shuffled(session)


@pytest.mark.parametrize("change", [lambda session: None, slowly, shuffled, both], ids=["torch", "slow", "mix", "both"])
@pytest.mark.parametrize("name", CASES)
def test_streaming_is_the_same_run(name: str, change: Callable[[Session], None], phased, small_recipe):
    """Tokens, verdicts, groups, terms, metrics, adapters and the method's state, to the bit; no draw more or less."""
    expected, left, asked = phased(name)
    found, after, drawn = cycles(small_recipe(*CASES[name], "rollout.stream=true"), change)
    assert [told(cycle) for cycle in found] == [told(cycle) for cycle in expected]
    assert after == left
    assert sorted(drawn) == sorted(asked)
    if name in ("adaptive", "fixed", "ahead", "tight"):
        assert sum(len(g.drawn) for c in expected for g in c.groups) > len(expected[0].groups) > 2
    if name == "tight":
        assert sum(c.unexplored for c in expected) > 0


def test_where_problems_may_be_replaced_nothing_is_drawn_before_the_batch_is_known(
    small_recipe, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Past, "teaches", lambda self, group: any(a.verdict.correct for a in group), raising=False)
    case = [*CASES["adaptive"], "rollout.dynamic_rounds=1"]
    expected, left, asked = cycles(small_recipe(*case))
    found, after, drawn = cycles(small_recipe(*case, "rollout.stream=true"), both)
    assert any(c.replaced for c in expected)
    assert [told(c) for c in found] == [told(c) for c in expected]
    assert (after, sorted(drawn)) == (left, sorted(asked))


def test_on_the_torch_engine_the_student_is_the_same_to_the_last_bit_of_its_log_probabilities(phased, small_recipe):
    """The teacher's differ by rounding: its draws are in other company. They do not depend on the verifier's time."""
    recipe = small_recipe(*CASES["adaptive"], "rollout.stream=true")
    quick, slow = cycles(recipe), cycles(recipe, slowly)
    assert [told(c, exactly=True) for c in quick[0]] == [told(c, exactly=True) for c in slow[0]]
    assert quick[1:] == slow[1:]
    for expected, found in zip(phased("adaptive")[0], quick[0], strict=True):
        assert [a.response.logprobs for a in expected.sampled] == [a.response.logprobs for a in found.sampled]
        for one, other in zip(expected.groups, found.groups, strict=True):
            for a, b in zip(one.drawn, other.drawn, strict=True):
                assert a.response.logprobs == pytest.approx(b.response.logprobs, abs=1e-4)


def test_continuations_begin_while_responses_are_decoded(small_recipe):
    with session(small_recipe(*CASES["adaptive"], "rollout.stream=true")) as parts:
        both(parts)
        parts.loop.cycle(0)
        log = parts.loop.lab.engine.log
        last = max(i for i, entry in enumerate(log) if entry == ("ended", "student"))
        assert ("asked", "teacher") in log[:last]
        assert parts.loop.lab.verifier.names == {"past-verify"}


def test_responses_are_verified_while_others_are_decoded(small_recipe):
    """On the torch engine too: most verdicts are there when the last response ends."""
    with session(small_recipe("embedded/grpo", "rollout.stream=true")) as parts:
        slowly(parts)
        judge, engine, asked = parts.loop.lab.verifier, parts.loop.lab.engine, list[int]()

        def tell(done: int, total: int) -> None:
            if done < total:
                time.sleep(0.02)
                asked.append(judge.asked)

        engine.tell = tell
        parts.loop.cycle(0)
        assert asked[-1] > 0


def test_a_verifier_of_this_process_is_asked_in_this_thread(small_recipe):
    with session(small_recipe(*CASES["adaptive"], "rollout.stream=true")) as parts:
        slowly(parts)
        parts.loop.lab.verifier.apart = False
        parts.loop.cycle(0)
        assert parts.loop.lab.verifier.names == {threading.main_thread().name}


def test_verdicts_end_whatever_they_were_about_to_do():
    """The end may come while the thread gathers what is to be verified together."""

    class Quick:
        apart = True

        def verify(self, items: Sequence[Any]) -> list[Verdict]:
            return [Verdict(True, "") for _ in items]

    problem = Problem("", "", "", "")
    work, response = Work(problem, View("student", ()), 1), Response((), "", (), True)
    verdicts = _Verdicts(Quick(), lambda name: nullcontext())  # type: ignore[arg-type]
    begun, gathers, real = threading.Event(), threading.Event(), verdicts._waiting

    def waiting(most: int | None = None) -> Any:
        begun.set()
        assert gathers.wait(60)
        return real(most)

    verdicts._waiting = waiting  # type: ignore[method-assign]
    verdicts.ask(work, response)
    assert begun.wait(60)
    closing = threading.Thread(target=verdicts.close, daemon=True)
    closing.start()
    while not verdicts._closed or verdicts._asked.empty():
        time.sleep(0.001)
    gathers.set()
    closing.join(10)
    assert not closing.is_alive()


def fail(session: Session, kind: str) -> type[BaseException]:
    """Let something go wrong in the middle of a cycle."""
    engine, verifier = session.loop.lab.engine, session.loop.lab.verifier
    if kind == "verifier":
        verifier.fails_at = 15
        return RuntimeError
    count = iter(range(10**6))
    error = KeyboardInterrupt if kind == "Ctrl-C" else ValueError

    def tick() -> None:
        if next(count) == 60:
            raise error("stop")

    engine._real._model.tick = tick
    return error


@contextmanager
def nothing_left(session: Session) -> Generator[None]:
    """What a broken cycle must leave as it was."""
    before = weights(session)
    threads = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == threads
    assert weights(session) == before
    assert session.model.versions == {"base": 0, "student": 0, "teacher": 0}
    session.model.tick = lambda: None
    session.loop.lab.verifier.fails_at = -1


@pytest.mark.parametrize("mixes", [False, True], ids=["torch", "mix"])
@pytest.mark.parametrize("kind", ["verifier", "engine", "Ctrl-C"])
def test_a_cycle_that_is_broken_off_leaves_no_trace(kind: str, mixes: bool, phased, small_recipe):
    with session(small_recipe(*CASES["adaptive"], "rollout.stream=true")) as parts:
        both(parts)
        parts.loop.lab.engine.mixes = mixes
        parts.loop.lab.engine.stream = parts.loop.lab.engine.stream if mixes else parts.loop.lab.engine._real.stream
        parts.loop.method.restore({"controller": {"base": 1, "ema": None, "streak": 0, "updates": 0}})
        error = fail(parts, kind)
        with nothing_left(parts), pytest.raises(error):
            parts.loop.cycle(0)
        assert told(parts.loop.cycle(0)) == told(phased("adaptive")[0][0])


def test_where_nothing_can_stream_the_run_says_so_and_is_phased(small_recipe, monkeypatch: pytest.MonkeyPatch, phased):
    monkeypatch.setattr("past_opsd.rollout.engines.torch.TorchEngine.streams", False)
    with session(small_recipe(*CASES["adaptive"], "rollout.stream=true")) as parts:
        assert isinstance(parts.loop, Streaming)
        assert parts.notes[-1].startswith("rollout.stream = true changes nothing here: the engine gives")
        monkeypatch.setattr(parts.loop.lab.engine, "stream", None)
        parts.loop.method.restore({"controller": {"base": 1, "ema": None, "streak": 0, "updates": 0}})
        assert told(parts.loop.cycle(0), exactly=True) == told(phased("adaptive")[0][0], exactly=True)


STREAMED = [*KILLED, "rollout.stream=true", "rollout.samples_per_problem=2"]


def test_sigkill_and_resume_give_the_bits_of_an_unbroken_stream(
    tmp_path: Path, small_recipe, quiet: Quiet, launch: Launcher
):
    train(small_recipe("embedded/past", *STREAMED), tmp_path / "unbroken", False, Quiet())
    folder, driver = tmp_path / "run", tmp_path / "driver.py"
    driver.write_text(DRIVER)
    ended = launch(1, str(driver), str(folder), "2", "draw", *STREAMED)
    assert ended.codes[0] < 0, ended.err
    assert train(small_recipe("embedded/past", *STREAMED), folder, True, quiet).finished
    assert fingerprint(folder) == fingerprint(tmp_path / "unbroken")


def test_a_run_may_begin_to_stream_when_it_goes_on(tmp_path: Path, small_recipe, quiet: Quiet):
    """Its adapters are those of a run that never did."""
    plain = [*SMALL, "evaluation.at=[]", "run.cycles=2"]
    for name, stops in (("whole", 9), ("run", 1)):
        count = iter(range(stops))
        stop = lambda count=count: next(count, None) is None  # noqa: E731
        train(small_recipe("embedded/past", *plain), tmp_path / name, False, Quiet(), stop=stop)
    outcome = train(small_recipe("embedded/past", *plain, "rollout.stream=true"), tmp_path / "run", True, quiet)
    assert outcome.finished
    files = [
        {p.name: p.read_bytes() for p in RunFolder(tmp_path / name).checkpoint(2).rglob("*.safetensors")}
        for name in ("whole", "run")
    ]
    assert files[0]
    assert files[0] == files[1]
    assert checkpoint.read_state(RunFolder(tmp_path / "run").checkpoint(2))["identity"]["recipe"]["rollout"]["stream"]
    lines = [RunFolder(tmp_path / name).read_metrics() for name in ("whole", "run")]
    assert lines[0] == lines[1]
