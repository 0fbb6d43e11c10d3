from __future__ import annotations

import re

from past_opsd.interface.cli import main


def test_prints_both_ways_of_writing_and_the_verdicts(capsys):
    assert main(["bench", "records", "--responses", "3", "--tokens", "50", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 responses of 50 tokens")
    rows = [line for line in out.splitlines() if re.search(r" \d+\.\d\d +\d+\.\d\d +(\d+|-)$", line)]
    assert [row[:17].strip() for row in rows] == ["one table of rows", "group by group"]
    assert re.search(r"^verdicts: \d+\.\d\d s, [\d,]+ responses a second", out, re.MULTILINE)
    assert re.search(r"^10,000 such responses: \d+ s of writing, \d+ s of verifying$", out, re.MULTILINE)


def test_sizes_below_one_are_refused(capsys):
    assert main(["bench", "records", "--tokens", "0"]) == 2
    assert "--tokens is 0" in capsys.readouterr().err
