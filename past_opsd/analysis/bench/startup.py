"""`past bench startup`: CPU time and memory of the commands that only read, each as a process of its own."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from past_opsd.core.nouns import PastError

COMMANDS = ("--version", "--help", "train --help", "recipes", "show embedded/past", "models list", "completion bash")


def run(args: argparse.Namespace) -> int:
    """The least of a few runs: what a command needs, not what the machine was busy with."""
    if args.repeats < 1:
        raise PastError(f"--repeats is {args.repeats}; it must be at least 1")
    print(f"{'command':26s}  CPU s     MB")
    for command in COMMANDS:
        seconds, memory = map(min, zip(*(measure(command.split()) for _ in range(args.repeats)), strict=True))
        print(f"past {command:21s}  {seconds:5.2f}  {memory / 1e6:5.0f}")
    return 0


def measure(words: Sequence[str]) -> tuple[float, int]:
    """CPU seconds and peak bytes of one `past WORDS`."""
    process = subprocess.Popen([sys.executable, "-m", "past_opsd", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise PastError(f"past {' '.join(words)} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
