"""The browser's numbers are those that training recorded, and its text is what the tokens spell."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Quiet, small
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from past_opsd.analysis.report import data, trajectories
from past_opsd.core.losses import Match, Stay
from past_opsd.core.nouns import View
from past_opsd.run import checkpoint
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import session, train


def _train(folder: Path, name: str, *overrides: str) -> Path:
    train(
        small(name, "run.cycles=2", "run.keep_checkpoints=9", "evaluation.at=[0.0]", *overrides), folder, False, Quiet()
    )
    return folder


@pytest.fixture(scope="module")
def past_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp("runs") / "past", "embedded/past", "rollout.problems_per_cycle=12")


@pytest.fixture
def copy(past_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(past_run, tmp_path / "run")


def _collect(folder: Path, count: int = 100) -> dict[str, Any]:
    return trajectories.collect(data.methods(data.find([folder])), count)


def test_the_kl_along_attempts_is_the_one_that_training_recorded(tmp_path: Path) -> None:
    """Vanilla OPSD's teacher does not move, so every boundary must give the cycle's own number."""
    found = _collect(_train(tmp_path / "opsd", "embedded/opsd"))
    lines = RunFolder(tmp_path / "opsd").read_metrics()
    assert len(lines) == 2
    for line in lines:
        kl = [t["mean_kl"] for t in found["trajectories"] if t["cycle"] == line["cycle"]]
        assert len(kl) == 6
        assert sum(kl) / len(kl) == pytest.approx(line["student/distill/kl"], abs=2e-6)


@pytest.mark.slow
@pytest.mark.portable
def test_the_kl_along_continuations_is_the_failed_path_kl(past_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "MAX_CONTINUATIONS", 99)
    found = _collect(past_run)
    for line in RunFolder(past_run).read_metrics():
        here = [t for t in found["trajectories"] if t["cycle"] == line["cycle"]]
        drawn = [c for t in here for c in t["continuations"]]
        assert len(drawn) == line["failed/samples"]
        kl = [c["mean_kl"] for c in drawn if c["correct"] and not c["discarded"]]
        assert sum(kl) / len(kl) == pytest.approx(line["teacher/stay/kl"], abs=2e-6)
        assert all("kl" not in c for c in drawn if not c["correct"])
        assert all(not t["continuations"] for t in here if t["correct"])


def test_discarded_draws_come_after_those_that_were_used(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy / "continuations" / "cycle-00000.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    seen: dict[int, int] = {}
    for row in rows:
        seen[row["trajectory"]] = seen.get(row["trajectory"], 0) + 1
        row["discarded"] = seen[row["trajectory"]] <= 2
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    monkeypatch.setattr(trajectories, "MAX_CONTINUATIONS", 3)
    drawn = [t for t in _collect(copy, 4)["trajectories"] if t["cycle"] == 0 and not t["correct"]]
    assert drawn
    for t in drawn:
        assert t["drawn"] == 8
        assert [c["discarded"] for c in t["continuations"]] == [False] * 3


def test_a_reading_is_the_full_vocabulary_computation(monkeypatch: pytest.MonkeyPatch, past_run: Path) -> None:
    """Chunks of three rows give what one [T, V] table of log-probabilities gives."""
    with session(small()) as parts, torch.no_grad():
        model = parts.model
        path = RunFolder(past_run).checkpoint(1)
        checkpoint.load_adapter(model, "student", path)
        checkpoint.load_adapter(model, "teacher", path / "teacher")
        row = pq.read_table(past_run / "rollouts" / "cycle-00001.parquet").to_pylist()[0]
        tokens = tuple(row["tokens"])
        problem = next(p for p in parts.task.train() if p.id == row["problem"])
        views = View("student", tuple(row["prompt_tokens"])), View("teacher", parts.loop.prompts.reference(problem))
        temperature, tau = 1.3, 0.01
        monkeypatch.setattr(trajectories, "_CELLS", 3 * len(model.head))
        found = trajectories.read(model, *views, tokens, temperature, Match(tau))
        reverse = trajectories.read(model, *views, tokens, temperature, Stay(tau))
        alone = trajectories.read(model, views[0], None, tokens)
        live, frozen = (
            torch.log_softmax(model.hidden([(v, tokens)]) @ model.head.T / temperature, dim=-1) for v in views
        )
    p, q = frozen.exp(), live.exp()
    at = range(len(tokens)), tokens
    contributions = p * (frozen - live)
    assert found.kl == pytest.approx(contributions.sum(-1).tolist(), abs=1e-5)
    assert found.clipped == (contributions >= tau).sum(-1).tolist()
    assert sum(found.clipped) > 0
    assert reverse.clipped == (q * (live - frozen) >= tau).sum(-1).tolist()
    assert found.student_p == pytest.approx(q[at].tolist(), abs=1e-5)
    assert found.teacher_p == pytest.approx(p[at].tolist(), abs=1e-5)
    assert found.student_entropy == pytest.approx((-q * live).sum(-1).tolist(), abs=1e-5)
    assert found.teacher_entropy == pytest.approx((-p * frozen).sum(-1).tolist(), abs=1e-5)
    assert [[i for i, _ in top] for top in found.student_top] == q.topk(5).indices.tolist()
    assert [[i for i, _ in top] for top in found.teacher_top] == p.topk(5).indices.tolist()
    assert len(alone.student_p) == len(tokens)
    assert alone.kl == alone.teacher_p == alone.clipped == []


def _edit(run: Path, old: str, new: str) -> Path:
    text = (run / "recipe.toml").read_text()
    assert text.count(old) == 1
    (run / "recipe.toml").write_text(text.replace(old, new))
    return run


def test_clipping_is_counted_where_the_method_clips(copy: Path) -> None:
    before = _collect(copy, 6)
    tight = _collect(_edit(copy, "tau = 1.0", "tau = 0.0001"), 6)
    assert (before["runs"][0]["tau"], tight["runs"][0]["tau"]) == (1.0, 0.0001)
    counts = [sum(sum(t["clipped"]) for t in found["trajectories"]) for found in (before, tight)]
    assert counts[1] > counts[0] + 10
    unclipped = _collect(_edit(copy, 'objective = "kl"', 'objective = "sampled_token"'), 6)
    assert unclipped["runs"][0]["tau"] is None
    assert all("clipped" not in t for t in unclipped["trajectories"])


@pytest.mark.parametrize("recipe", ["embedded/grpo", "embedded/sft", "embedded/opd"])
def test_methods_with_other_teachers_or_none(recipe: str, tmp_path: Path) -> None:
    found = _collect(_train(tmp_path / "run", recipe, "run.cycles=1", "rollout.problems_per_cycle=4"), 6)
    if recipe == "embedded/sft":
        assert found["trajectories"] == []
        assert "samples no responses" in found["runs"][0]["note"]
        return
    assert len(found["trajectories"]) in (4, 6)
    teacher = recipe == "embedded/opd"
    assert found["runs"][0]["measure"] == ("kl" if teacher else "entropy")
    assert all(("kl" in t) is teacher and len(t["entropy"]) == len(t["pieces"]) for t in found["trajectories"])


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, as a byte-level tokenizer falls back to."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_a_character_of_several_tokens_belongs_to_the_last_of_them() -> None:
    tokenizer, text = _bytes_tokenizer(), " né 漢🙂\n\tx"
    ids = tokenizer(text)["input_ids"]
    found = trajectories.pieces(tokenizer, ids)
    assert len(found) == len(ids) == len(text.encode())
    assert "".join(found) == text
    assert found[:5] == [" ", "n", "", "é", " "]
    assert found[-8:] == ["漢", "", "", "", "🙂", "\n", "\t", "x"]
    cut = trajectories.pieces(tokenizer, tokenizer("ab🙂")["input_ids"][:-1])
    assert cut[:2] == ["a", "b"]
    assert len(cut) == 5
    assert "".join(cut[2:]).strip("\N{REPLACEMENT CHARACTER}") == ""


def test_an_entry_that_is_no_text_shows_as_the_tokenizer_writes_it() -> None:
    tokenizer, vocabulary = _bytes_tokenizer(), trajectories.Vocabulary()
    half, whole = tokenizer("é")["input_ids"][0], tokenizer("x")["input_ids"][0]
    assert [vocabulary.place(tokenizer, i) for i in (half, whole, half)] == [0, 1, 0]
    assert vocabulary.texts == ["Ã", "x"]


def test_boundaries_are_cycles_whose_checkpoint_is_kept(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for cycle in range(10):
        (tmp_path / "rollouts" / f"cycle-{cycle:05d}.parquet").touch()
    assert trajectories.boundaries(RunFolder(tmp_path)) == []
    for step in (0, 10):
        (tmp_path / "checkpoints" / f"checkpoint-{step:05d}").mkdir(parents=True)
    assert trajectories.boundaries(RunFolder(tmp_path)) == [0]
    for step in (2, 5, 8):
        (tmp_path / "checkpoints" / f"checkpoint-{step:05d}").mkdir()
    assert trajectories.boundaries(RunFolder(tmp_path)) == [0, 5, 8]


def _row(i: int, correct: bool) -> dict[str, Any]:
    return {"cycle": 3, "problem": f"p{i}", "trajectory": i, "correct": correct, "length": 1}


@pytest.mark.parametrize(
    ("failed", "correct", "expected"),
    [(8, 8, (2, 2)), (1, 8, (1, 3)), (8, 1, (3, 1)), (0, 8, (0, 4)), (8, 0, (4, 0)), (1, 1, (1, 1)), (0, 0, (0, 0))],
)
def test_failed_and_correct_attempts_are_both_chosen(failed: int, correct: int, expected: tuple[int, int]) -> None:
    rows = [_row(i, i >= failed) for i in range(failed + correct)]
    found = trajectories.choose(rows, 4, seed=17)
    assert (sum(not r["correct"] for r in found), sum(r["correct"] for r in found)) == expected
    assert found == trajectories.choose(rows[::-1], 4, seed=17)
    assert len(found) < 4 or failed < 8 or correct < 8 or found != trajectories.choose(rows, 4, seed=18)


def test_the_count_is_shared_by_the_boundaries(past_run: Path) -> None:
    found = _collect(past_run, 5)["trajectories"]
    assert [t["cycle"] for t in found] == [0, 0, 0, 1, 1]
    assert len({t["id"] for t in found}) == 5
    assert {t["correct"] for t in found} == {True, False}
    assert _collect(past_run, 0) == {**_collect(past_run, 0), "runs": [], "trajectories": []}


def test_long_responses_are_cut_and_say_so(past_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {t["id"]: t for t in _collect(past_run, 4)["trajectories"]}
    monkeypatch.setattr(trajectories, "MAX_TOKENS", 5)
    monkeypatch.setattr(trajectories, "MAX_CONTINUATION", 4)
    for t in _collect(past_run, 4)["trajectories"]:
        full = whole[t["id"]]
        assert t["length"] == len(full["pieces"]) > 5
        for key in ("pieces", "p", "q"):
            assert t[key] == full[key][:5]
        assert len(t["top"]) == len(t["teacher_top"]) == 5
        assert t["kl"] == pytest.approx(full["kl"][:5], abs=1)
        assert all(len(c["pieces"]) == 4 < c["length"] for c in t["continuations"])


def test_the_text_is_what_was_recorded(past_run: Path) -> None:
    rows = {r["trajectory"]: r for r in pq.read_table(past_run / "rollouts" / "cycle-00001.parquet").to_pylist()}
    found = [t for t in _collect(past_run)["trajectories"] if t["cycle"] == 1]
    assert len(found) == len(rows)
    for t in found:
        row = rows[int(t["id"].rpartition("-")[2])]
        assert "".join(t["pieces"]).removesuffix("<|end|>") == row["text"]
        assert "recorded" not in t
        assert (t["problem"], t["correct"], t["given"]) == (row["problem"], row["correct"], row["answer"])


def _damage(run: Path) -> None:
    path = RunFolder(run).checkpoint(0) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def _no_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def _bad_parquet(run: Path) -> None:
    (run / "rollouts" / "cycle-00000.parquet").write_bytes(b"PAR1 no")


def _other_problems(run: Path) -> None:
    _edit(run, "train_problems = 60", "train_problems = 12")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_damage, "checkpoint-00000 is damaged: adapter_model.safetensors"),
        (_no_checkpoints, "no checkpoint of a cycle with rollouts is kept"),
        (_bad_parquet, "cycle-00000.parquet: cannot be read"),
        (_other_problems, "is not, on this machine, what the run was trained on"),
    ],
)
def test_a_run_that_cannot_be_read_again_says_why(harm: Any, words: str, copy: Path) -> None:
    harm(copy)
    found = _collect(copy)
    assert found["trajectories"] == []
    assert words in found["runs"][0]["note"]


def test_another_seed_stands_in_for_one_that_cannot_be_read(copy: Path, tmp_path: Path, past_run: Path) -> None:
    other = shutil.copytree(past_run, tmp_path / "other")
    _edit(other, "seed = 17", "seed = 99")
    _no_checkpoints(copy)
    (method,) = data.methods(data.find([copy, other]))
    found = trajectories.collect([method], 4)
    assert len(found["trajectories"]) == 4
    assert found["runs"][0]["seed"] == 99
    assert "run: no checkpoint" in found["runs"][0]["note"]
