import pytest

from past_opsd.core.nouns import Problem, Response
from past_opsd.rollout.verifiers.exact import Exact, Options


@pytest.mark.parametrize(
    ("gold", "text", "reason"),
    [
        ("4", r"\boxed{ 4 }", "correct"),
        ("4", r"\boxed{5}", "wrong"),
        ("4", r"\boxed{4.0}", "wrong"),
        ("4", "4", "no_box"),
        ("4", r"<think>\boxed{4}</think>", "no_box"),
        ("4", r"\boxed{5} so \boxed{4}", "correct"),
        ("4", r"\boxed{5}, \boxed{4}", "correct"),
        (" ", r"\boxed{4}", "bad_gold"),
    ],
)
def test_last_box(gold: str, text: str, reason: str) -> None:
    (verdict,) = Exact(Options()).verify([(Problem("p", "", "", gold), Response((), text, (), True))])
    assert (verdict.reason, verdict.correct) == (reason, reason == "correct")


def test_whole_text() -> None:
    verifier = Exact(Options(whole_text=True))
    texts = ["<think>hm</think> # 4 \n", "# 4", "# 5", "<think> # 4", "# 4"]
    items = [(Problem("p", "", "", "# 4"), Response((), text, (), i < 4)) for i, text in enumerate(texts)]
    assert [v.reason for v in verifier.verify(items)] == ["correct", "correct", "wrong", "no_box", "truncated"]
    assert verifier.identity != Exact(Options()).identity
