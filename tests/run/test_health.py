from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Quiet

from past_opsd.analysis.report import data, figures
from past_opsd.interface import doctor
from past_opsd.rollout.engines.torch import TorchEngine
from past_opsd.run.evaluate import Evaluation, TaskResult
from past_opsd.run.folder import RunFolder
from past_opsd.run.health import STREAK, Watcher, alarms, droughts, entropy_health, fork_health, health
from past_opsd.run.train import Outcome, train

RAISES = ("verifier.name='function'", "verifier.path='json:loads'")  # json.loads(response, problem) is a TypeError
AGREES = ("verifier.name='function'", "verifier.path='agreeable:right'")


@pytest.fixture
def _agreeable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier of one's own that finds everything right."""
    (tmp_path / "agreeable.py").write_text("def right(response, problem):\n    return True\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def tiny(small_recipe, folder: Path, name: str, *overrides: str) -> tuple[Outcome, str, str]:
    """A real run; its outcome, what it said on the way, and its warnings at the end."""
    quiet = Quiet()
    outcome = train(small_recipe(name, "evaluation.at=[]", *overrides), folder, False, quiet)
    return outcome, "\n".join(quiet.notes), "\n".join(outcome.warnings)


def test_a_verifier_that_raises_and_a_failed_branch_without_success_are_told(tmp_path: Path, small_recipe):
    outcome, during, after = tiny(small_recipe, tmp_path / "run", "embedded/past", "method.group_max=2", *RAISES)
    for sign in ("the verifier itself failed", "every group of the failed branch was skipped", "the teacher took no"):
        assert during.count(sign) == 1  # the first time, not every cycle
        assert f"in 3 of 3 cycles: {sign}" in after
    assert "mend the function" in after
    assert "in all 3 cycles in a row: no response of the student is right" in after
    assert "in all 3 cycles in a row: the teacher's policy gradient has no step" in after
    assert data.load(tmp_path / "run").warnings == outcome.warnings


def test_teacher_truncation_is_told(tmp_path: Path, small_recipe):
    _, during, after = tiny(small_recipe, tmp_path / "run", "embedded/past", "rollout.teacher.max_new_tokens=2")
    assert "raise rollout.teacher.max_new_tokens" in during
    assert "in 3 of 3 cycles: more than half of the teacher's continuations hit the token limit" in after


@pytest.mark.usefixtures("_agreeable")
def test_a_student_that_is_always_right_is_told(tmp_path: Path, small_recipe):
    _, _, after = tiny(small_recipe, tmp_path / "run", "embedded/past", *AGREES)
    assert "in all 3 cycles in a row: every response of the student is right" in after
    assert "take harder problems" in after


def test_a_policy_gradient_without_a_step_is_told(tmp_path: Path, small_recipe):
    """GRPO where all of a group are alike: no advantage, no term, no step."""
    _, during, after = tiny(small_recipe, tmp_path / "run", "embedded/grpo", *RAISES)
    assert during.count("the student took no step") == 1
    assert "in 3 of 3 cycles: the student took no step" in after


def test_empty_responses_are_told(tmp_path: Path, small_recipe, monkeypatch: pytest.MonkeyPatch):
    real = TorchEngine._responses
    monkeypatch.setattr(
        TorchEngine, "_responses", lambda self, ended: [(i, replace(r, text=" ")) for i, r in real(self, ended)]
    )
    _, during, after = tiny(small_recipe, tmp_path / "run", "embedded/opsd")
    assert "more than half of the responses are empty" in during
    assert "'past inspect'" in after


@pytest.mark.slow
def test_the_doctor_tells_them_too(small_recipe):
    with doctor.Watch() as watch:
        rows = doctor.runs(small_recipe("embedded/past", *RAISES), 1, watch)
    warnings = "\n".join(warning for row in rows for warning in row.warnings)
    assert "in 2 of 2 small cycles: the verifier itself failed" in warnings
    assert "every group of the failed branch was skipped" in warnings


def test_a_drought_is_told_once_when_it_is_long_enough():
    watcher = Watcher([])
    told = [watcher.see({"cycle": k, "rollout/success": 0.0}) for k in range(2 * STREAK)]
    assert [bool(text) for text in told] == [k == STREAK - 1 for k in range(2 * STREAK)]
    lines = [{"rollout/success": 0.0}] * 5 + [{"rollout/success": 0.5}] + [{"rollout/success": 0.0}] * 9
    assert droughts(lines) == []
    assert droughts(lines[:2]) == []


def test_alarms():
    assert "raise method.tau" in alarms({"student/distill/alignment": -0.1})[0]
    assert alarms({"student/distill/alignment": 0.1, "rollout/truncated": 0.1, "rollout/dropped": 0}) == []
    assert len(alarms({"rollout/truncated": 0.6, "rollout/dropped": 1})) == 2
    (told,) = alarms({"failed/unexplored": 2, "student/supervised": 7, "student/unaligned": 1})
    assert "distilled but not explored" in told
    (told,) = alarms({"failed/unexplored": 0, "teacher/supervised": 3, "teacher/unaligned": 4})
    assert told.startswith("teacher: most positions are not supervised")


def evaluation(step: int, correct: int, length: float, terse: int, truncated: float = 0.0) -> Evaluation:
    outcomes = [[1] * correct + [0] * (4 - correct)] * 2
    answers = [["1"] * 4] * 2
    styles = {"detailed": 8 - terse, "terse": terse}
    result = TaskResult(["a", "b"], outcomes, answers, {}, styles, length, truncated)
    return Evaluation(step, "student", 4, 0, {"t": result})


def test_health_names_what_got_worse_and_only_that():
    start = evaluation(0, 2, 20.0, 0)
    assert health({0: start, 5: evaluation(5, 3, 22.0, 0)}, [4]) == []
    assert health({5: start}, [4]) == []
    worse = "\n".join(health({0: start, 5: evaluation(5, 0, 10.0, 4, 0.5)}, [4]))
    for sign in ("avg@4 fell", "pass@4 fell", "mean length went", "'terse' responses rose", "truncated responses rose"):
        assert sign in worse


def test_a_collapse_of_entropy_is_told():
    lines = [{"cycle": k, "student/distill/entropy": 1.0 / (1 + k)} for k in range(20)]
    assert "collapsed" in entropy_health(lines)[0]
    assert entropy_health([{"cycle": k, "student/distill/entropy": 1.0} for k in range(20)]) == []
    assert entropy_health([]) == []


def forking(
    cycles: int, share: float = 0.8, length: float = 1.0, rate: float = 1.0, success: float = 0.0
) -> list[dict[str, float]]:
    """Cycles over which the length and the rate of forks go to these parts of themselves, the success by so much."""
    return [
        {
            "cycle": k,
            "student/distill/fork_share": share,
            "student/distill/fork_rate": 0.2 * (1 + (rate - 1) * k / (cycles - 1)),
            "student/distill/fork_entropy": 1.0,
            "rollout/mean_length": 900 * (1 + (length - 1) * k / (cycles - 1)),
            "rollout/success": 0.5 + success * k / (cycles - 1) + (0.02 if k % 2 else -0.02),
        }
        for k in range(cycles)
    ]


@pytest.mark.parametrize(
    ("lines", "signs"),
    [
        (forking(40), []),
        (forking(40, rate=0.3), []),  # a student that learns decides: on its own that is no harm
        (forking(40, length=0.6, rate=0.3), ["shorter", "fewer forks"]),
        (forking(40, length=0.6, success=-0.3), ["shorter", "fewer responses are right"]),
        (forking(40, share=0.3, length=0.6, rate=0.3, success=-0.3), []),
        (forking(40, rate=0.3, success=0.3), []),
        (forking(12, length=0.3, rate=0.1, success=-0.4), []),
    ],
)
def test_the_pattern_of_closing_forks(lines: list[dict[str, float]], signs: list[str]):
    found = fork_health(lines)
    assert bool(found) is bool(signs)
    for sign in signs:
        assert sign in found[0]
        assert "method.forks" in found[0]


def test_closing_forks_are_told_once_while_a_run_goes():
    watcher = Watcher([])
    told = [text for line in forking(60, length=0.4, rate=0.2) for text in watcher.see(line)]
    assert len(told) == 1
    assert "(80 % of the KL of student/distill" in told[0]


def test_a_real_run_logs_its_forks_and_the_report_shows_them(tmp_path: Path, small_recipe, monkeypatch):
    """A run's own records have the pattern's numbers; with those of the study in their place the run is warned."""
    tiny(small_recipe, tmp_path / "run", "embedded/opsd")
    run = data.load(tmp_path / "run")
    first = run.metrics[0]
    assert 0.2 < first["student/distill/fork_share"] <= 1
    assert first["student/distill/fork_kl"] > first["student/distill/rest_kl"]
    assert 0 < first["student/distill/fork_count"] < first["rollout/mean_length"]
    assert (first["student/nonfinite"], run.warnings.count("forks")) == (0, 0)
    figure = next(figure for figure in figures.figures([run]) if figure.name == "forks")
    assert [panel.title for panel in figure.panels][:2] == ["Change that lands on forks", "KL at forks"]
    # The same records, had every cycle gone on as the study describes.
    worse = [dict(first) | line for line in forking(40, length=0.5, rate=0.2)]
    monkeypatch.setattr(RunFolder, "read_metrics", lambda self: worse)
    assert any("the teacher's change lands on forks" in warning for warning in data.load(tmp_path / "run").warnings)
