from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import Quiet

from past_opsd.core.nouns import PastError
from past_opsd.interface.cli import main
from past_opsd.policy.pretrained import resolve
from past_opsd.run import follow
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import train

AT = ("run.cycles=2", "evaluation.at=[0.0, 0.5, 1.0]")
BESIDE = (*AT, "evaluation.beside=true")


def kept(folder: Path) -> dict[str, bytes]:
    """Scores, metrics and the adapters of every boundary."""
    run = RunFolder(folder)
    weights = [file for step in run.steps() for file in sorted(run.checkpoint(step).rglob("*.safetensors"))]
    assert len(weights) >= 2 * len(run.steps())
    files = [*folder.glob("evaluations/*"), run.path / "metrics.jsonl", *weights]
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(files)}


@pytest.mark.slow
def test_scores_made_beside_a_run_are_those_it_would_have_made(
    tmp_path: Path, small_recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    alone, folder = tmp_path / "alone", tmp_path / "run"
    train(small_recipe("embedded/past", *AT), alone, False, Quiet())
    recipe = small_recipe("embedded/past", *BESIDE)
    train(recipe, folder, False, Quiet(), stop=lambda: len(RunFolder(folder).read_metrics()) == 1)
    run = RunFolder(folder)
    assert run.steps() == [0, 1]
    assert run.evaluations.numbers() == []
    # While nothing is there to evaluate, the run goes on.
    monkeypatch.setattr(follow.time, "sleep", lambda seconds: train(recipe, folder, True, Quiet()))
    assert main(["eval", "--follow", str(folder)]) == 0
    assert run.evaluations.numbers() == [0, 1, 2]
    assert kept(folder) == kept(alone)
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("after")] == [
        f"after {step} cycles" for step in range(3)
    ]
    # What is evaluated stays, and nothing is left to do.
    assert list(follow.follow(folder)) == []

    # What is not as in training is told once; another model is refused.
    for step in (0, 1):
        run.evaluations.path(step).unlink()
    told: list[str] = []
    list(follow.follow(folder, ["engine.batch=8"], tell=told.append))
    assert told == ["changed since training: recipe.engine.batch: 256 -> 8"]
    run.evaluations.path(0).unlink()
    other = shutil.copytree(resolve("embedded"), tmp_path / "other")
    (other / "chat_template.jinja").write_text((other / "chat_template.jinja").read_text() + " ")
    with pytest.raises(PastError, match="was trained on another model"):
        list(follow.follow(folder, [f"model.path='{other}'"]))
    assert not run.evaluations.path(0).exists()

    next(run.checkpoint(2).rglob("*.safetensors")).write_bytes(b"")
    run.evaluations.path(2).unlink()
    with pytest.raises(PastError, match=r"checkpoint-00002 is damaged \(.*cannot be evaluated"):
        list(follow.follow(folder))


def test_what_cannot_be_followed_is_told(tmp_path: Path, small_recipe, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "run"
    assert main(["eval", "--follow", str(folder)]) == 2
    assert "recipe.toml" in capsys.readouterr().err
    train(small_recipe("embedded/sft", "run.cycles=1", "evaluation.at=[]"), folder, False, Quiet())
    with pytest.raises(PastError, match=r"evaluates itself while it trains.*evaluation.beside=true"):
        list(follow.follow(folder))
    assert main(["eval", "embedded/sft", "--follow", str(folder)]) == 2
    assert "leave a recipe away" in capsys.readouterr().err
