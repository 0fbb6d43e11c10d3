from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from past_opsd.analysis import needs, stand_ins
from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.nouns import PastError
from past_opsd.interface import kit, kit_parts
from past_opsd.interface.cli import main
from past_opsd.interface.doctor import shape_for
from past_opsd.interface.kit_parts import Part
from past_opsd.policy import estimate, fused
from past_opsd.policy.pretrained import hardware
from past_opsd.policy.tracing import Phase
from past_opsd.rollout.engines import vllm

SMALL = ["rollout.problems_per_cycle=2", "method.group_max=2"]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    torch.set_num_threads(1)
    return config.load("embedded/past", SMALL)


@pytest.fixture(autouse=True)
def _little(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the test of everything: one short row of logits, and no products timed."""
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr(kit_parts, "VOCABULARIES", (100,))
        monkeypatch.setattr(estimate, "measure", lambda *args, **kwargs: estimate.Speed(1e9, 1e9, 1e9))


def found(look: Any, recipe: Recipe) -> Part:
    part = Part("")
    look(part, recipe)
    return part


@pytest.mark.slow
def test_one_command_makes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "check.md"
    assert main(["doctor", "embedded/past", "--gpu", "--out", str(out), *(w for s in SMALL for w in ("--set", s))]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.partition("└")[0].splitlines()), shown
    assert list(tmp_path.iterdir()) == [out]
    text = out.read_text(encoding="utf-8")
    assert re.findall(r"^## \d\. (.*)", text, re.M) == [*(f"{title}: ok" for title in kit.TITLES), "What to do with it"]
    numbers = json.loads(text.partition("```json")[2].partition("```")[0])
    parts = {title: part["numbers"] for title, part in numbers["parts"].items()}
    assert list(parts) == list(kit.TITLES)
    assert parts["Machine"]["torch"] == torch.__version__
    assert [case["vocabulary"] for case in parts["Kernel"]["cases"]] == 2 * [2048, 5003, 151_936]
    assert set(parts["Memory"]) == {"sampling", "teacher step", "student step", "launches"}
    phases = parts["Phases of a cycle"]
    assert {"rollout", "draw", "adapt", "distill", "identity"} <= set(phases)
    assert all(phases[name]["flops"] > 0 for name in ("rollout", "draw", "adapt", "distill"))
    assert {"student", "teacher"} <= set(parts["Engine and trainer"])
    assert kit.is_ours(out), "the next one may take its place"


@pytest.mark.numeric
@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_a_kernel_that_is_off_is_found(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, off: float):
    right = fused._elementwise

    def kernel(heads: fused.Heads, chunk: fused.Chunk, *logits: Any) -> None:
        right(heads, chunk, *logits)
        chunk.result.values[0].add_(off)

    monkeypatch.setattr(fused, "_elementwise", kernel)
    part = found(kit.kernel, recipe)
    assert part.verdict == ("differs" if off else "ok"), part.rows
    if off:
        assert part.why == "fused in float64, vocabulary 100; fused in float32, vocabulary 100"


def test_a_trace_that_is_off_by_a_third_is_found(recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    phases = dict.fromkeys(
        ("sampling", "teacher step", "student step"), Phase({"": {"weights": 9, "activations": 1000}})
    )
    traced = needs.Needs(recipe, hardware(recipe.model), 1, phases, 1, 1, shape_for(recipe))
    wrong = {"sampling": 1.05, "teacher step": 1.3, "student step": 0.95}
    monkeypatch.setattr(needs, "trace", lambda *args, **kwargs: traced)
    monkeypatch.setattr(needs, "measure", lambda *args: {name: traced.beyond(name) * by for name, by in wrong.items()})
    part = found(kit.memory, recipe)
    assert (part.verdict, part.why) == ("differs", "teacher step: traced 0.77 of what is measured")


def test_an_engine_of_other_probabilities_and_a_slow_phase_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On the paper's recipe, whose data are not here: they are not asked for."""
    prompts = config.load("paper/past").prompts
    stand_ins.save_model(tmp_path, [prompts.student, prompts.hindsight], 4096)
    recipe = config.load("paper/past", [f"model.path={tmp_path}", "model.dtype=float32", "model.max_context=4096"])
    honest = vllm.logprobs
    monkeypatch.setattr(vllm, "logprobs", lambda *args: honest(*args) + 0.01)
    monkeypatch.setattr(kit_parts, "LEAST", 0.0)
    monkeypatch.setattr(estimate, "measure", lambda *args, **kwargs: estimate.Speed(1e15, 1e15, 1e15))
    phases, engine = Part(""), Part("")
    kit.cycles(phases, engine, recipe)
    assert engine.verdict == "differs"
    assert engine.why.startswith("student: 1.00e-02 a token on average, 1.00e-03 allowed; teacher")
    assert phases.verdict == "differs"
    assert re.match(r"rollout: \d+\.\d times its arithmetic", phases.why)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("CUDA out of memory.\nTried to allocate much")


@pytest.mark.slow
def test_a_part_that_cannot_run_leaves_the_others_whole(recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(needs, "trace", refuse)
    monkeypatch.setattr(kit_parts, "_told", refuse)  # after engine and trainer were compared
    parts = kit.check(recipe)
    assert [part.verdict for part in parts] == ["ok", "ok", "could not run", "could not run", "ok"]
    assert parts[2].why == "RuntimeError: CUDA out of memory. Tried to allocate much"
    text = kit.markdown(recipe, parts, 1.0)
    assert "## 3. Memory: could not run\nRuntimeError: CUDA out of memory" in text
    assert "## 5. Engine and trainer: ok" in text


def test_a_mistake_of_ours_is_no_verdict(recipe: Recipe):
    def mistaken() -> None:
        raise KeyError("no such phase")

    with pytest.raises(KeyError):
        kit.attempt([Part("")], mistaken)


def test_no_number_is_still_json(recipe: Recipe):
    text = kit.markdown(recipe, [Part("Kernel", numbers={"off": [float("nan"), 1.0]})], 1.0)
    assert json.loads(text.partition("```json")[2].partition("```")[0])["parts"]["Kernel"]["numbers"] == {
        "off": ["nan", 1.0]
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "--dry"], "--gpu runs the recipe's model once and takes no --dry"),
        (["--gpu", "--repeats", "2"], "takes no --repeats"),
        (["--out", "x.md"], "--out is where --gpu writes its file"),
        (["--gpu", "--out", "notes.md"], "notes.md exists and is not what this command writes"),
        (["--gpu", "--set", "model.path=/no/such/model"], "/no/such/model"),
    ],
)
def test_what_cannot_be_is_told_before_any_work(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("mine\n", encoding="utf-8")

    def work(recipe: Recipe) -> list[Part]:
        raise PastError("it went to work")

    monkeypatch.setattr(kit, "check", work)
    assert main(["doctor", "embedded/past", *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
    assert (tmp_path / "notes.md").read_text(encoding="utf-8") == "mine\n"
