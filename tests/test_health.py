from __future__ import annotations

from past_opsd.evaluate import Evaluation, TaskResult
from past_opsd.health import alarms, entropy_health, health


def test_alarms():
    assert "raise method.tau" in alarms({"student/distill/alignment": -0.1})[0]
    assert alarms({"student/distill/alignment": 0.1, "rollout/truncated": 0.1, "rollout/dropped": 0}) == []
    assert len(alarms({"rollout/truncated": 0.6, "rollout/dropped": 1})) == 2


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
