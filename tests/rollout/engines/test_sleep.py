"""vLLM asleep while the trainer steps: the order of calls with a stand-in, all that its CPU build does of it for real.

The CPU build frees no memory: that a GPU's does is vLLM's own claim, and nothing here says more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout.engines.parts import move, need_vllm, perturbed, publish

from past_opsd.core import config
from past_opsd.core.config import Sampling
from past_opsd.core.nouns import PastError
from past_opsd.policy.model import Model
from past_opsd.rollout.engines import Request, vllm, vllm_handover
from past_opsd.rollout.engines.vllm_sleep import LEVELS, Sleeper, Wish, level

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn about themselves

SAMPLING = Sampling(max_new_tokens=16)


@pytest.mark.parametrize(
    ("wish", "able", "deep"),
    [("auto", True, 1), ("keep", True, 1), ("drop", True, 2), ("auto", False, 0)],
)
def test_how_deep_vllm_sleeps_follows_from_what_it_can(wish: Wish, able: bool, deep: int):
    assert level(wish, lambda: able) == deep


def test_nobody_asks_vllm_where_nobody_wants_it_to_sleep():
    assert level("none", lambda: pytest.fail("asked")) == 0


@pytest.mark.parametrize("wish", ["keep", "drop"])
def test_a_sleep_that_vllm_cannot_have_is_refused_where_it_was_demanded(wish: Wish):
    with pytest.raises(PastError, match=rf"engine\.sleep = '{wish}': this build .* use 'auto'"):
        level(wish, lambda: False)


def test_servers_are_not_put_to_sleep():
    settings = ["engine.name=vllm", "engine.mode=server"]
    with pytest.raises(PastError, match="sleep = 'keep' is for mode = 'local'"):
        config.load("embedded/past", [*settings, "engine.sleep=keep"])
    assert config.load("embedded/past", [*settings, "engine.sleep=auto"]).engine.model_dump()["sleep"] == "auto"


class Recording:
    """In vLLM's place: it only writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake {' '.join(tags or ['all'])}")

    def collective_rpc(self, method: str) -> None:
        self.calls.append(method)


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("none", []),
        ("keep", ["sleep 1", "wake all"]),
        ("drop", ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "adapters"]),
    ],
)
def test_what_vllm_is_told_and_in_which_order(wish: Wish, expected: list[str]):
    told = Recording()
    sleeper = Sleeper(told, LEVELS[wish], lambda: told.calls.append("adapters"))
    sleeper.wake()  # it is awake
    for again in (0, 1):
        sleeper.sleep()
        sleeper.sleep()
        assert sleeper.asleep == bool(expected)
        sleeper.wake()
        sleeper.wake()
        assert not sleeper.asleep
        assert told.calls == expected * (again + 1)


def test_without_sleep_auto_goes_on_and_says_so(make: Callable[..., Any], model: Model, requests: list[Request]):
    """vLLM's own CPU build, which has none."""
    need_vllm()
    with pytest.raises(PastError, match=r"engine\.sleep = 'drop': this build of vLLM cannot sleep"):
        make("vllm-local", model, sleep="drop")
    engine = publish(make("vllm-local", model, sleep="auto"), model)
    assert engine.note == "engine.sleep = 'auto': this build of vLLM cannot sleep (it can on GPUs); it stays awake"
    before = engine.sample(requests, SAMPLING, model.versions)
    engine.sleep()
    assert not engine._backend._llm.llm_engine.is_sleeping()
    assert [r.tokens for r in engine.sample(requests, SAMPLING, model.versions)] == [r.tokens for r in before]
    engine.close()


@pytest.fixture(scope="module")
def kept(make: Callable[..., Any], folder: Any) -> Iterator[tuple[vllm.VllmEngine, Model]]:
    need_vllm()
    model = perturbed(folder)
    engine = publish(make("vllm-local", model), model)
    assert engine.note == ""
    yield engine, model
    engine.close()


def deep(engine: vllm.VllmEngine, wish: Wish) -> Any:
    """Let the CPU build take the calls: its engine stops and forgets its prefixes, its worker keeps its memory."""
    backend = engine._backend
    backend._sleeper = Sleeper(backend._llm, LEVELS[wish], backend._again)
    return backend._llm


@pytest.mark.parametrize("wish", ["keep", "drop"])
def test_it_wakes_by_itself_and_draws_as_before(
    kept: tuple[vllm.VllmEngine, Model], requests: list[Request], wish: Wish
):
    engine, model = kept
    llm = deep(engine, wish)
    before = engine.sample(requests, SAMPLING, model.versions)
    loras = llm.llm_engine.list_loras()
    engine.sleep()
    assert llm.llm_engine.is_sleeping()
    if wish == "drop":
        llm.collective_rpc("reset_weights")  # all zeros: as good as given up
    after = engine.sample(requests, SAMPLING, model.versions)
    assert not llm.llm_engine.is_sleeping()
    assert [r.tokens for r in after] == [r.tokens for r in before]
    assert llm.llm_engine.list_loras() == loras == {s.number for s in engine._served.values()}


@pytest.mark.parametrize("wish", ["keep", "drop"])
def test_it_wakes_to_serve_what_a_step_moved(kept: tuple[vllm.VllmEngine, Model], requests: list[Request], wish: Wish):
    engine, model = kept
    llm = deep(engine, wish)
    engine.sleep()
    move(model, "student")
    engine.publish("student", model.versions["student"])
    assert not llm.llm_engine.is_sleeping()
    assert llm.llm_engine.list_loras() == {s.number for s in engine._served.values()}
    engine.sample(requests, SAMPLING, model.versions)  # and compares with the trainer


def test_weights_that_were_not_read_again_are_noticed(kept: tuple[vllm.VllmEngine, Model]):
    """What a wake without `reload_weights` would serve does not pass the adapters' probes."""
    engine, model = kept
    llm = deep(engine, "keep")
    llm.collective_rpc("reset_weights")
    move(model, "student")
    with pytest.raises(PastError, match="serves something else than student"):
        engine.publish("student", model.versions["student"])
    deep(engine, "drop")
    engine.sleep()
    move(model, "student")
    engine.publish("student", model.versions["student"])


def test_it_ends_asleep(make: Callable[..., Any], folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need_vllm()
    monkeypatch.setattr(vllm_handover, "MEMORY", tmp_path)
    model = perturbed(folder)
    engine = publish(make("vllm-local", model), model)
    deep(engine, "drop")
    removed: list[int] = []
    engine._backend._llm.llm_engine.remove_lora = removed.append
    assert [p.name for p in tmp_path.glob("*/*/adapter_model.safetensors")] == ["adapter_model.safetensors"] * 3
    engine.sleep()
    engine.close()
    assert removed == []  # in memory that may be gone
    assert list(tmp_path.iterdir()) == []
