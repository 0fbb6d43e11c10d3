"""Write tests/data/*.jsonl: losses with gradients, scores and boxes, computed without the package and without torch.

    python scripts/make_vectors.py            write them anew: the same bytes
    python scripts/make_vectors.py --check    say whether the files are what this script writes

Losses are sums written out entry by entry in 50-digit arithmetic, their gradients are central differences there, scores
are counted over all subsets, and texts are put together around boxes whose content is known.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from mpmath import exp, log, mp, mpf

mp.dps = 50
STEP = mpf(10) ** -20
FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data"

Row = Sequence[Any]


def softmax(logits: Row, temperature: Any) -> list[Any]:
    """Probabilities of logits divided by the temperature."""
    weights = [exp(mpf(z) / mpf(temperature)) for z in logits]
    return [w / sum(weights) for w in weights]


def kl(a: Row, b: Row, tau: Any = None) -> Any:
    """The sum of a log(a / b), each entry held at tau from above."""
    entries = [x * log(x / y) for x, y in zip(a, b, strict=True)]
    return sum(entries if tau is None else [min(entry, mpf(tau)) for entry in entries])


def jsd(p: Row, q: Row, beta: float) -> Any:
    """beta KL(p || M) + (1 - beta) KL(q || M) around M = beta p + (1 - beta) q; at the ends the KL that it leads to."""
    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    middle = [mpf(beta) * x + (1 - mpf(beta)) * y for x, y in zip(p, q, strict=True)]
    return mpf(beta) * kl(p, middle) + (1 - mpf(beta)) * kl(q, middle)


def top(p: Row, q: Row, k: int, tail: bool) -> Any:
    """KL(p || q) on p's k largest entries: with the rest as one entry more, or both made to sum to one."""
    kept = sorted(range(len(p)), key=lambda v: -p[v])[:k]
    a, b = [p[v] for v in kept], [q[v] for v in kept]
    if tail:
        return kl([*a, 1 - sum(a)], [*b, 1 - sum(b)])
    return kl([x / sum(a) for x in a], [y / sum(b) for y in b])


def surrogate(q: Row, p: Row, token: int, advantage: float, epsilon: float) -> Any:
    """PPO's clipped objective of one token, as a loss."""
    rho = q[token] / p[token]
    held = min(max(rho, 1 - mpf(epsilon)), 1 + mpf(epsilon))
    return -min(rho * mpf(advantage), held * mpf(advantage))


# What the package calls it, its arguments, and the value at one position from live q, frozen p and the token.
LOSSES: list[tuple[str, dict[str, Any], Callable[[Row, Row, int], Any]]] = [
    ("Match", {}, lambda q, p, y: kl(p, q)),
    *[("Match", {"tau": tau}, lambda q, p, y, tau=tau: kl(p, q, tau)) for tau in (0.002, 0.05, 0.5)],
    ("Stay", {}, lambda q, p, y: kl(q, p)),
    ("Stay", {"tau": 0.05}, lambda q, p, y: kl(q, p, 0.05)),
    *[("GeneralizedJSD", {"beta": beta}, lambda q, p, y, beta=beta: jsd(p, q, beta)) for beta in (0, 0.1, 0.5, 0.9, 1)],
    *[("TopK", {"k": 3, "tail": tail}, lambda q, p, y, tail=tail: top(p, q, 3, tail)) for tail in (True, False)],
    ("Imitate", {}, lambda q, p, y: -log(q[y])),
    *[
        ("Reinforce", {"advantage": a, "epsilon": 0.2}, lambda q, p, y, a=a: surrogate(q, p, y, a, 0.2))
        for a in (1.5, -0.75)
    ],
]


def gradient(value: Callable[[Row], Any], at: Row) -> list[Any]:
    """By central differences: in 50 digits they err by far less than a double can hold."""
    found = []
    for v in range(len(at)):
        up, down = ([z + sign * STEP * (i == v) for i, z in enumerate(map(mpf, at))] for sign in (1, -1))
        found.append((value(up) - value(down)) / (2 * STEP))
    return found


def _at(position: Callable[[Row, Row, int], Any], temperature: float, p: Row, token: int, logits: Row) -> Any:
    return position(softmax(logits, temperature), p, token)


def losses() -> Iterator[dict[str, Any]]:
    """Values and gradients of every loss at three positions, for three sizes, temperatures and spreads of logits."""
    draw = random.Random(20)
    for name, arguments, position in LOSSES:
        for size, temperature, spread in ((4, 1.0, 1.0), (9, 1.1, 3.0), (6, 0.7, 8.0)):
            live, frozen = ([[round(draw.gauss(0, spread), 4) for _ in range(size)] for _ in range(3)] for _ in "ab")
            tokens = [draw.randrange(size) for _ in range(3)]
            values, slopes = [], []
            for z, x, token in zip(live, frozen, tokens, strict=True):
                p = softmax(x, temperature)
                value = partial(_at, position, temperature, p, token)
                values.append(value(z))
                slopes.append(gradient(value, z))
            yield {
                "loss": name,
                "arguments": arguments,
                "temperature": temperature,
                "live_logits": live,
                "frozen_logits": frozen,
                "tokens": tokens,
                "values": [float(v) for v in values],
                "gradient": [[float(g) for g in row] for row in slopes],
            }


def scores() -> Iterator[dict[str, Any]]:
    """Every subset of k samples looked at: how many hold a success, how many a majority of right answers."""
    draw = random.Random(21)
    for n, k in ((1, 1), (4, 2), (6, 3), (8, 8), (9, 4)):
        for chance in (0.2, 0.7):
            right = [int(draw.random() < chance) for _ in range(n)]
            subsets = list(itertools.combinations(right, k))
            passed = Fraction(sum(any(s) for s in subsets), len(subsets))
            yield {"right": right, "k": k, "avg": float(Fraction(sum(right), n)), "pass": float(passed)}


def boxes() -> Iterator[dict[str, Any]]:
    """Texts made around known boxes; the last one that is not empty counts, after the thinking part."""
    draw = random.Random(22)
    contents = [
        "42",
        r"\frac{1}{2}",
        r"\{1, 2\}",
        r"x^{2^{n}}",
        r"\text{no {real} root}",
        r"\sqrt{\boxed{3}}",
        r"5\%",
        "",
    ]
    fillers = ["So", "we try {braces}", r"and \frac{a}{b}", "which is $x_{1}$,", "therefore"]
    for content in contents:
        for before in (0, 1, 2):
            others = draw.sample([c for c in contents if c and c != content], before)
            words = [draw.choice(fillers) for _ in range(3)]
            parts = [f"{word} \\boxed{{{other}}}" for word, other in zip(words, others, strict=False)]
            thought = f"<think>maybe \\boxed{{{draw.choice(contents[:4])}}}</think> " if draw.random() < 0.5 else ""
            text = f"{thought}{' '.join(parts)} {words[-1]} \\boxed{{{content}}}."
            yield {"text": text, "content": content or (others[-1] if others else None)}
    for text in ("nothing", r"\boxed", r"\boxed{1", r"\boxed{{2}", "<think>\\boxed{3}</think> so it is"):
        yield {"text": text, "content": None}


FILES: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "losses.jsonl": losses,
    "scores.jsonl": scores,
    "boxes.jsonl": boxes,
}


def main() -> int:
    """Write or check every file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    for name, make in FILES.items():
        text = "".join(json.dumps(row) + "\n" for row in make())
        if check and (FOLDER / name).read_text(encoding="utf-8") != text:
            print(f"tests/data/{name} is not what this script writes: run it without --check", file=sys.stderr)
            return 1
        if not check:
            (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
