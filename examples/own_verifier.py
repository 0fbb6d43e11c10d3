"""A verifier and a task of one's own, as two functions: nothing has to be installed or put into a module.

python examples/own_verifier.py [FOLDER] [CYCLES]
"""

from __future__ import annotations

import random
import re
import sys

import past_opsd as past


def sums() -> dict[str, list[past.Problem]]:
    """Problems by set: "train" is trained on, every other name is evaluated on. Called anew, it gives the same."""
    draw = random.Random(0)
    rows = [(a, b, (a + b) % 10) for a in range(10) for b in range(10)]
    draw.shuffle(rows)
    made = [past.Problem(f"{a}+{b}", f"{a}+{b}", f"\\boxed{{{c}}}", str(c)) for a, b, c in rows]
    return {"train": made[:60], "held_out": made[60:80]}


def last_number(response: str, problem: past.Problem) -> bool:
    """Right where the last number of the response is the answer, box or no box."""
    found = re.findall(r"\d+", response)
    return bool(found) and found[-1] == problem.answer


def main(folder: str = "runs/own-verifier", cycles: str = "10") -> None:
    """Train PAST on these problems with this verifier, and show how its verdicts came out."""
    overrides = {"task.name": sums, "verifier.name": last_number, "run.cycles": int(cycles), "evaluation.at": [0, 1]}
    run = past.train(past.load("embedded/past", overrides), folder)
    for row in run.rollouts().select(["problem", "text", "correct", "reason"]).slice(0, 5).to_pylist():
        print(row)


if __name__ == "__main__":
    main(*sys.argv[1:])
