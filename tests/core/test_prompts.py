from __future__ import annotations

import pytest

from past_opsd.core import config
from past_opsd.core.nouns import PastError, Problem
from past_opsd.core.prompts import Prompts, fill
from past_opsd.policy.model import load_tokenizer

PROBLEM = Problem("p", "6*7*3*4", "2, 6, 4, \\boxed{4}", "4")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(config.load("embedded/past").model)


def prompts(tokenizer, *overrides: str) -> Prompts:
    return Prompts(tokenizer, config.load("embedded/past", overrides).prompts)


def test_fill_is_one_pass_and_leaves_other_braces():
    text = fill("{problem} \\boxed{} {student_output}", {"problem": "{student_output}", "student_output": "{x}"})
    assert text == "{student_output} \\boxed{} {x}"


def test_prompts_end_where_the_assistant_begins(tokenizer):
    made = prompts(tokenizer)
    views = [made.student(PROBLEM), made.reference(PROBLEM), made.hindsight(PROBLEM, "6*7=2; "), made.removed(PROBLEM)]
    assert len({view[-1] for view in views}) == 1
    assert tokenizer.decode(views[0]).endswith("<|assistant|>")


def test_rendered_by_the_tokenizers_own_template(tokenizer):
    message = [{"role": "user", "content": "Problem: 6*7*3*4"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompts(tokenizer).student(PROBLEM)) == text


def test_examples_are_earlier_exchanges_of_every_roles_chat(tokenizer):
    example = "prompts.examples=[{user='Problem: 1*2', assistant='2'}]"
    plain, shown = prompts(tokenizer), prompts(tokenizer, example)
    earlier = [{"role": "user", "content": "Problem: 1*2"}, {"role": "assistant", "content": "2"}]
    for role in ("student", "reference", "removed"):
        own, with_example = (tokenizer.decode(getattr(p, role)(PROBLEM)) for p in (plain, shown))
        assert with_example.endswith(own)
        assert with_example.removesuffix(own) == tokenizer.apply_chat_template(earlier, tokenize=False)


DEMONSTRATION = (
    r"{problem='1*2', student_output='1*2=3; \boxed{3}', reference_solution='\boxed{2}', "
    r"assistant='1*2=2; \boxed{2}'}"
)


def asked(tokenizer, ids) -> list[str]:
    """What the user says in a prompt, turn by turn."""
    turns = tokenizer.decode(ids).split("<|user|>")[1:]
    return [turn.split("<|assistant|>")[0] for turn in turns]


def test_an_example_goes_through_each_roles_own_message(tokenizer):
    plain, shown = prompts(tokenizer), prompts(tokenizer, f"prompts.examples=[{DEMONSTRATION}]")
    example = Problem("e", "1*2", r"\boxed{2}", "2")
    for role, told in (("student", ()), ("evaluation", ()), ("reference", ()), ("removed", ())):
        first, last = asked(tokenizer, getattr(shown, role)(PROBLEM, *told))
        assert [first] == asked(tokenizer, getattr(plain, role)(example))
        assert [last] == asked(tokenizer, getattr(plain, role)(PROBLEM))
    first, last = asked(tokenizer, shown.hindsight(PROBLEM, "6*7=2; "))
    assert [first] == asked(tokenizer, plain.hindsight(example, r"1*2=3; \boxed{3}"))
    assert "1*2=3" not in tokenizer.decode(shown.student(PROBLEM)), "the student reads no attempt of an example either"


def test_an_example_is_read_by_the_roles_it_names(tokenizer):
    own = DEMONSTRATION[:-1] + ", roles=['hindsight', 'reference']}"
    plain, shown = prompts(tokenizer), prompts(tokenizer, f"prompts.examples=[{own}]")
    assert shown.student(PROBLEM) == plain.student(PROBLEM)
    assert shown.removed(PROBLEM) == plain.removed(PROBLEM)
    assert len(asked(tokenizer, shown.reference(PROBLEM))) == len(asked(tokenizer, shown.hindsight(PROBLEM, ""))) == 2


def test_an_example_without_what_a_role_shows_is_told(tokenizer):
    example = "{problem='1*2', reference_solution='2', assistant='2'}"
    message = r"example 1 of prompts\.examples has no 'student_output', which prompts\.hindsight shows"
    with pytest.raises(PastError, match=message):
        prompts(tokenizer, f"prompts.examples=[{example}]")
    others = "['student', 'evaluation', 'reference', 'removed']"
    prompts(tokenizer, f"prompts.examples=[{example[:-1]}, roles={others}}}]")


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ("{assistant='2'}", "either 'user'"),
        ("{user='1*2', problem='1*2', assistant='2'}", "either 'user'"),
        ("{user='1*2', hint='2', assistant='2'}", "'hint' of an example goes with 'problem'"),
        ("{user='1*2', assistant='2', roles=['nobody']}", "roles"),
    ],
)
def test_an_example_has_one_form(example: str, message: str):
    with pytest.raises(PastError, match=message):
        config.load("embedded/past", [f"prompts.examples=[{example}]"])


def test_hindsight_keeps_the_papers_field_order(tokenizer):
    text = tokenizer.decode(prompts(tokenizer).hindsight(PROBLEM, "6*7=2; 2*3=5; "))
    positions = [text.index(part) for part in ("6*7*3*4", "6*7=2; 2*3=5; ", PROBLEM.solution)]
    assert positions == sorted(positions)


def test_kwargs_of_each_role_reach_the_template(tokenizer):
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %}<|user|>{% endif %}"
        made = prompts(tokenizer, "prompts.teacher_kwargs={enable_thinking=true}")
        assert tokenizer.decode(made.reference(PROBLEM)).endswith("<|user|>")
        assert not tokenizer.decode(made.student(PROBLEM)).endswith("<|user|>")
        made = prompts(tokenizer, "prompts.evaluation_kwargs={enable_thinking=true}")
        assert tokenizer.decode(made.evaluation(PROBLEM)).endswith("<|user|>")
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize("role", ["student", "evaluation"])
@pytest.mark.parametrize("field", ["student_output", "reference_solution"])
def test_the_student_cannot_be_shown_privilege(tokenizer, role: str, field: str):
    with pytest.raises(PastError, match=f"names {{{field}}}, which this role must not see"):
        prompts(tokenizer, f"prompts.{role}='{{problem}} {{{field}}}'")


def test_a_forgotten_field_is_told(tokenizer):
    with pytest.raises(PastError, match=r"prompts\.hindsight must contain \{student_output\}"):
        prompts(tokenizer, "prompts.hindsight='{problem} {reference_solution}'")


def test_thinking_can_be_cut_from_the_attempt(tokenizer):
    made = prompts(tokenizer, "prompts.strip_thinking=true")
    plain = made.hindsight(PROBLEM, "6*7=2; ".strip())
    assert made.hindsight(PROBLEM, "<think>6*7=3; </think>6*7=2; ") == plain
    assert made.hindsight(PROBLEM, "6*7=2; <think>6*7") == plain


def test_a_tokenizer_without_template_is_refused(tokenizer):
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = None
        with pytest.raises(PastError, match="no chat template"):
            prompts(tokenizer)
    finally:
        tokenizer.chat_template = template


def test_completion_is_the_text_and_the_end(tokenizer):
    made = prompts(tokenizer)
    ids = made.completion(PROBLEM.solution)
    assert tokenizer.decode(ids[:-1]) == PROBLEM.solution
    assert ids[-1] == made.eos == tokenizer.eos_token_id
    assert made.encode(PROBLEM.solution) == ids[:-1]


def test_templates_of_one_baseline_may_be_empty_until_they_are_used(tokenizer):
    with pytest.raises(PastError, match=r"prompts\.hint is empty, and this method needs it"):
        prompts(tokenizer).hint(PROBLEM, "2, ")
    made = prompts(tokenizer, r'prompts.hint="Problem: {problem}\nReference: {hint}"')
    assert "Reference: 2, " in tokenizer.decode(made.hint(PROBLEM, "2, "))
    with pytest.raises(PastError, match="must not see"):
        prompts(tokenizer, "prompts.rephrase='{problem} {student_output} {reference_solution}'")
