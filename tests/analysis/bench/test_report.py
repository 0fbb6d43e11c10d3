from __future__ import annotations

import re

import pytest

from past_opsd.interface.cli import main


@pytest.mark.slow
def test_a_long_run_is_made_and_reported(capsys):
    assert main(["bench", "report", "--cycles", "12", "--responses", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("12 cycles of 8 responses, ")
    assert re.search(r"^the report: [\d.]+ s of CPU, [\d.]+ s, [\d,]+ MiB, page \d\.\d\d MB$", out, re.MULTILINE)


def test_sizes_that_cannot_be_are_refused(capsys):
    assert main(["bench", "report", "--responses", "9"]) == 2
    assert "as a multiple of 8" in capsys.readouterr().err
