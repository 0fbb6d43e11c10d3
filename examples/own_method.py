"""A method of one's own: reverse KL to a teacher that reads the reference and averages the student's past weights.

python examples/own_method.py [FOLDER] [CYCLES]
"""

from __future__ import annotations

import sys

from pydantic import Field

import past_opsd as past
from past_opsd.core.losses import Stay


class ReverseKL(past.Method):
    """min KL(student || teacher) on the student's own prefixes; the teacher is an average of students."""

    class Options(past.MethodOptions):
        """The keys of [method] in the recipe."""

        decay: float = Field(default=0.9, ge=0, lt=1, description="what the teacher keeps of itself a cycle")

    def prepare(self, tools):
        """Start the average at the student."""
        tools.copy("student", "teacher")

    def teacher_view(self, attempt):
        """The teacher's weights read the problem and its reference solution."""
        return past.View("teacher", self.prompts.reference(attempt.problem))

    def student_terms(self, batch):
        """The mean over responses; a loss is Stay(), or any function like the one in loss_by_hand.py."""
        return past.mean([past.distill(a, self.teacher_view(a), Stay(), temperature=1.0)] for a in batch.attempts)

    def sync(self):
        """After a cycle, mix so much of the student into the teacher."""
        return 1 - self.options.decay


def main(folder: str = "runs/reverse-kl", cycles: str = "20") -> None:
    """Train it on the embedded default."""
    mine = {"method.name": ReverseKL, "method.decay": 0.95, "run.cycles": int(cycles), "evaluation.at": [0.0, 1.0]}
    run = past.train(past.load("embedded/opsd", mine), folder)
    print(run.scores().select(["step", "task", "avg@12"]).to_pylist())


if __name__ == "__main__":
    main(*sys.argv[1:])
