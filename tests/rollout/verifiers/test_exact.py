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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lemon starts with l. Answer: lb", "correct"),
        ("Answer: gs. No: Answer: lb \n", "correct"),
        ("Answer: lb\nAnd more", "wrong"),
        ("Answer: LB", "wrong"),
        ("lb", "no_answer"),
        ("<think>Answer: lb</think> lb", "no_answer"),
        ("<think>Answer: lb", "no_answer"),
    ],
)
def test_what_follows_a_mark(text: str, reason: str) -> None:
    verifier = Exact(Options(after="Answer:"))
    (verdict,) = verifier.verify([(Problem("p", "", "", "lb"), Response((), text, (), True))])
    assert verdict.reason == reason
    assert verifier.identity != Exact(Options()).identity
    with pytest.raises(ValueError, match="no meaning"):
        Options(after="Answer:", whole_text=True)


def test_whole_text() -> None:
    verifier = Exact(Options(whole_text=True))
    texts = ["<think>hm</think> # 4 \n", "# 4", "# 5", "<think> # 4", "# 4"]
    items = [(Problem("p", "", "", "# 4"), Response((), text, (), i < 4)) for i, text in enumerate(texts)]
    assert [v.reason for v in verifier.verify(items)] == ["correct", "correct", "wrong", "no_box", "truncated"]
    assert verifier.identity != Exact(Options()).identity
