"""A script written for TRL's GRPOTrainer, with two names changed.

python examples/trl_script.py [FOLDER] [STEPS]
"""

from __future__ import annotations

import sys

from past_opsd import PASTConfig, PASTTrainer  # was: from trl import GRPOConfig, GRPOTrainer

ROWS = [
    {"prompt": f"{a}+{b}", "solution": f"{a}+{b} makes \\boxed{{{(a + b) % 10}}}", "answer": str((a + b) % 10)}
    for a in range(10)
    for b in range(10)
]


def accuracy_reward(completions: list[str], answer: list[str], **columns) -> list[float]:
    """One reward a completion, from the columns of the data."""
    return [float(f"\\boxed{{{right}}}" in text) for text, right in zip(completions, answer, strict=True)]


def main(folder: str = "runs/trl", steps: str = "5") -> PASTTrainer:
    """Train, and save the student as a PEFT adapter."""
    trainer = PASTTrainer(
        model="embedded",
        reward_funcs=accuracy_reward,
        args=PASTConfig(output_dir=folder, max_steps=int(steps), num_generations=4, max_completion_length=24),
        train_dataset=ROWS,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
