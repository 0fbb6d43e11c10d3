"""How often the 95 % intervals of past_opsd.core.stats contain the truth, on simulated results with a known difference.

Usage: python benchmarks/coverage.py [REPETITIONS]; docs/statistics.md quotes the table of 800 repetitions.
"""

from __future__ import annotations

import sys

import numpy as np

from past_opsd.core.stats import paired_bootstrap

TASKS, SEEDS, PROBLEMS, DRAWS = 3, 3, 30, 12
GAIN, BETWEEN_PROBLEMS, BETWEEN_CELLS = 0.05, 0.15, 0.05
UNITS = ("sample", "problem", "problem+seed")


def simulate(between_seeds: float, repetitions: int, rng: np.random.Generator) -> None:
    """Print coverage of the three truths and the mean width, for each unit."""
    hits = {unit: np.zeros(3) for unit in UNITS}
    widths = dict.fromkeys(UNITS, 0.0)
    for n in range(repetitions):
        seeds = rng.normal(0, between_seeds, size=(1, SEEDS, 1))
        problems = rng.normal(0, BETWEEN_PROBLEMS, size=(TASKS, 1, PROBLEMS)).clip(-0.3, 0.3)
        cells = rng.normal(0, BETWEEN_CELLS, size=(TASKS, SEEDS, PROBLEMS)).clip(-0.1, 0.1)
        level, gain = rng.uniform(0.3, 0.7, size=(TASKS, 1, PROBLEMS)), GAIN + problems + seeds + cells
        chances = [np.clip(level + sign * gain / 2, 0, 1) for sign in (1, -1)]
        a, b = (
            {str(t): (rng.random((SEEDS, PROBLEMS, DRAWS)) < p[t][..., None]).astype(int) for t in range(TASKS)}
            for p in chances
        )
        # These checkpoints on these problems; these checkpoints on any problems; any training on any problems.
        truths = np.array([(chances[0] - chances[1]).mean(), GAIN + seeds.mean(), GAIN])
        for unit in UNITS:
            interval = paired_bootstrap(a, b, unit=unit, resamples=1000, seed=n)
            hits[unit] += (interval.low <= truths) & (truths <= interval.high)
            widths[unit] += interval.high - interval.low
    for unit in UNITS:
        shares = "  ".join(f"{share:.2f}" for share in hits[unit] / repetitions)
        width = 100 * widths[unit] / repetitions
        print(f"seeds sd {100 * between_seeds:.0f}  {unit:13s} {shares}  width {width:.1f} points", flush=True)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 800
    generator = np.random.default_rng(2024)
    for spread in (0.02, 0.04):
        simulate(spread, count, generator)
