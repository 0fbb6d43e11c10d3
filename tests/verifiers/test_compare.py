"""What is equal as mathematics, and what only looks so. Runs the comparison in this process: no case is endless."""

import pytest

from past_opsd.verifiers._compare import compare
from past_opsd.verifiers._normalise import clean

EQUAL = [
    ("42", "x = 42"),
    ("42", "2 + 40 = 42"),
    ("42", "m+n = 42"),
    ("42", "f(3) = 42"),
    ("2", r"17 \bmod 5 = 2"),
    (r"\frac{3}{2}", "1 1/2"),
    (r"\frac{3}{2}", r"1\frac{1}{2}"),
    (r"\frac{3}{2}", "1½"),
    (r"\sqrt{2}", "√2"),
    (r"\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2}", r"\frac{-1\pm\sqrt{17}}{2}"),
    ("1+2i", "i(2-i)"),
    ("-1", "i^2"),
    ("617", "1,234/2"),
    (r"\frac{x^2}{4}+\frac{y^2}{9}=1", "9x^2+4y^2=36"),
    ("y=2x+3", "2x-y+3=0"),
    ("x^2=4", "x^2-4=0"),
    ("Eq(x**2/4 + y**2/9, 1)", r"\frac{x^2}{4}+\frac{y^2}{9}=1"),
    ("x=1,y=2", "1, 2"),
    ("x=1,y=2", "y=2, x=1"),
    ("x_1=1,x_2=2", "2, 1"),
    (r"\frac13", r"0.\overline{3}"),
    ("0.0000001", "10^{-7}"),
    ("1/3", "0.333333"),
    (r"\frac12", r"\sin 30^\circ"),
    (r"1-\frac1e", r"1-\frac{1}{\mathrm{e}}"),
    (r"x\ge 2", r"[2,\infty)"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"2^{25}\cdot 26!", r"26!\cdot 2^{25}"),
]

DIFFERENT = [
    ("42", "41 = 42"),
    ("42", "x = 41 = 42"),
    ("42", "x + 1 = 42"),
    ("42", "2x = 42"),
    ("42, 43", "41 = 42, 43"),
    ("42", "(lambda: 42)()"),
    ("42", "4 2"),
    ("6", "4 2"),
    ("42", "42, 41"),
    ("42", r"42 \text{ or } 41"),
    ("42", r"42 \text{ or 41}"),
    ("2", "2e"),
    ("3", "3d"),
    ("10", "10m"),
    ("32", "3²"),
    (r"\pm 3", "3"),
    ("3", r"\pm 3"),
    (r"\frac{x^2}{4}+\frac{y^2}{9}=1", r"\frac{x^2}{9}+\frac{y^2}{4}=1"),
    (r"\frac{x^2}{4}+\frac{y^2}{9}=1", r"\frac{x^2}{16}+\frac{y^2}{9}=1"),
    ("x^2+y^2=1", "x^2+y^2=4"),
    ("x^2+y^2=-1", "x^2+y^2=-2"),
    ("x^2=-1", "x^2=-4"),
    ("Eq(x**2/4 + y**2/9, 1)", "Eq(x**2/9 + y**2/4, 1)"),
    ("x=1,y=2", "2, 1"),
    ("x=1,y=2", "x=2, y=1"),
    ("x=2", "y=2"),
    ("52_8", "52_7"),
    ("0.0000001", "0.0000002"),
    ("0.0000001", "0"),
    ("1/3", "0.333"),
    (r"\pi", r"\frac{22}{7}"),
    (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"),
    ("(1,2)", "(2,1)"),
    ("[0,1]", "(0,1)"),
    ("x>2", r"[2,\infty)"),
    ("0", r"\frac{0}{0}"),
    ("0", r"\emptyset"),
    ("42", "__import__('os').system('true')"),
    ("42", r"\write18{true}42"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold: str, answer: str) -> None:
    assert compare(clean(gold), clean(answer)) == "correct"


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold: str, answer: str) -> None:
    assert compare(clean(gold), clean(answer)) in ("wrong", "unparseable")


def test_reasons() -> None:
    assert compare("42", "(lambda: 42)()") == "unparseable"
    assert compare(r"\frac{", "42") == "bad_gold"
    assert compare("42", "43+1") == "wrong"
