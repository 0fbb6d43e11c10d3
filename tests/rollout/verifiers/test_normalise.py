from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from past_opsd.rollout.verifiers import _normalise as n

CASES: list[tuple[Callable[[str], str], str, str]] = [
    (n.drop_invisible, "4\u200b2\u202e\x00", "42"),
    (n.drop_invisible, "4\u00a02", "4 2"),
    (n.ascii_digits, "４２＋٤", "42+4"),
    (n.ascii_digits, "3²", "3²"),
    (n.unicode_scripts, "3²", "3^{2}"),
    (n.unicode_scripts, "x₁¹⁰", "x_{1}^{10}"),
    (n.unicode_fractions, "½", r"\frac{1}{2}"),
    (n.unicode_fractions, "1⁄2", r"\frac{1}{2}"),
    (n.unicode_fractions, "1½", r"1 \frac{1}{2}"),
    (n.unicode_roots, "2√6", r"2\sqrt{6}"),
    (n.unicode_roots, "√(x+1)", r"\sqrt{x+1}"),
    (n.unicode_roots, "√", "√"),
    (n.unicode_signs, "−2×π", r"-2\times \pi "),
    (n.unwrap, "$42$", "42"),
    (n.unwrap, r"\(42\)", "42"),
    (n.unwrap, r"\boxed{5}", "5"),
    (n.unwrap, "{{{7}}}", "7"),
    (n.unwrap, "{1,3}", "{1,3}"),
    (n.unwrap, "$1$ or $2$", "$1$ or $2$"),
    (n.unwrap, "{a}{b}", "{a}{b}"),
    (n.join_thousands, "1,234/2", "1234/2"),
    (n.join_thousands, "1{,}234", "1234"),
    (n.join_thousands, r"11,\! 111", "11111"),
    (n.join_thousands, r"1\,234", "1234"),
    (n.join_thousands, "1 234 567", "1234567"),
    (n.join_thousands, "4 2", "4 2"),
    (n.join_thousands, "1, 234", "1, 234"),
    (n.join_thousands, "(1,234)", "(1,234)"),
    (n.join_thousands, "1,234,5", "1,234,5"),
    (n.join_thousands, "1,234, 7", "1,234, 7"),
    (n.join_thousands, "0,123", "0,123"),
    (n.plain_spaces, r"2\,x\quad y\!z", "2 x yz"),
    (n.drop_decoration, r"\phantom{42}", ""),
    (n.drop_decoration, r"\textcolor{red}{42} \checkmark", "{42}"),
    (n.drop_decoration, r"1-\mathrm{e}", "1-{e}"),
    (n.drop_full_stop, "42.", "42"),
    (n.drop_full_stop, "185\\", "185"),
    (n.drop_full_stop, "0.3...", "0.3..."),
    (n.single_backslashes, r"-2 \\le x \\le 7", r"-2 \le x \le 7"),
    (n.single_backslashes, r"1 \\ 2", r"1 \\ 2"),
    (n.single_backslashes, r"\\begin{matrix} 1 \\\\ 2 \\end{matrix}", r"\begin{matrix} 1 \\ 2 \end{matrix}"),
    (n.drop_dollars, "$125$ miles", "125 miles"),
    (n.drop_dollars, "$10", r"\$10"),
    (n.joining_words, r"x<1 \text{ or } x>3", r"x<1 \lor x>3"),
    (n.joining_words, "21,16 or 11", r"21,16 \lor 11"),
    (n.joining_words, r"\text{oregon}", r"\text{oregon}"),
    (n.joining_words, r"60\degree", r"60^\circ"),
    (n.drop_sizes, r"\left. 1 \right)", "1 )"),
    (n.drop_sizes, r"\langle 1, 2 \rangle", "( 1, 2 )"),
    (n.mixed_numbers, "1 1/2", r"1\frac{1}{2}"),
    (n.mixed_numbers, "1 5/2", "1 5/2"),
    (n.mixed_numbers, "1 1/2x", "1 1/2x"),
    (n.mixed_numbers, "2^3 1/2", "2^3 1/2"),
    (n.repeating_decimals, r"0.1\overline{6}", r"\frac{15}{90}"),
    (n.repeating_decimals, r"\overline{AB}", r"\overline{AB}"),
    (n.program_text, "2**10 + x**(n+1)", "2^{10} + x^{(n+1)}"),
    (n.program_text, "Eq(x**2, f(1, 2))", "x^{2} = f(1, 2)"),
    (n.program_text, "Eq(x, 1) + Eq(y, 2)", "Eq(x, 1) + Eq(y, 2)"),
    (n.scientific, "1.5e-3", r"(1.5 \cdot 10^{-3})"),
    (n.scientific, "2ex", "2ex"),
    (n.expand_pm, r"\frac{-1\pm\sqrt{17}}{2}", r"\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2}"),
    (n.expand_pm, r"\pm 3", "3, - 3"),
    (n.expand_pm, r"a \pm b \mp c", "a + b - c, a - b + c"),
    (n.expand_pm, r"x = 1 \pm 2, 5", "x = 1 + 2, x = 1 - 2, 5"),
    (n.expand_pm, r"\{\pm 1\}", r"\{1, - 1\}"),
    (n.expand_pm, "1 + 2", "1 + 2"),
]


@pytest.mark.parametrize(("function", "text", "wanted"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_each_rewriting(function: Callable[[str], str], text: str, wanted: str) -> None:
    assert " ".join(function(text).split()) == " ".join(wanted.split())


@pytest.mark.parametrize("text", [text for _, text, _ in CASES])
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    assert n.clean(n.clean(text)) == n.clean(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-42", Fraction(-42)),
        ("025", Fraction(25)),
        ("4/6", Fraction(2, 3)),
        (r"-\dfrac{7}{9}", Fraction(-7, 9)),
        ("1/0", None),
        ("2.50", Fraction(5, 2)),
        ("-.5", Fraction(-1, 2)),
        ("1.2.3", None),
        ("4 2", None),
        ("1/2/3", None),
    ],
)
def test_plain_rationals(text: str, value: Fraction | None) -> None:
    assert n.rational(text) == value


def test_squeezing_keeps_the_space_that_separates_numbers() -> None:
    assert n.squeeze(r"\left( 1 , 2 \right)") == "(1,2)"
    assert n.squeeze("4 2") != n.squeeze("42")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (r"\text{East}", "east"),
        (r"\textbf{(C)}", "C"),
        ("C", "C"),
        ("(c)", "C"),
        ("x", "x"),
        (r"\text{DNE}", "undefined"),
        ("2x", None),
        ("x+1", None),
        (r"\pi", None),
    ],
)
def test_labels(text: str, name: str | None) -> None:
    assert n.label(text) == name


def test_answers_that_are_equal_vote_together() -> None:
    assert {n.voted(n.clean(text)) for text in ("0.5", r"\frac{1}{2}", "2/4", ".50", "$0.5$", "1/2.")} == {"1/2"}
    assert {n.voted(n.clean(text)) for text in ("East", r"\text{east}", r"\textbf{East}.")} == {"east"}
    assert len({n.voted(n.clean(text)) for text in ("x", "X", "-x", "2", "-2", "2x")}) == 6


@given(st.text(alphabet=st.sampled_from("\\{}()$,.1 23/^_texpm½√²e=~"), max_size=60) | st.text(max_size=60))
@settings(max_examples=400, deadline=None)
def test_cleaning_never_raises(text: str) -> None:
    n.clean(text)
