from __future__ import annotations

import re

import pytest

from past_opsd.analysis.bench import startup
from past_opsd.core.nouns import PastError
from past_opsd.interface.cli import main


def test_prints_cpu_time_and_memory(capsys, monkeypatch):
    monkeypatch.setattr(startup, "COMMANDS", ("--version", "completion fish"))
    assert main(["bench", "startup", "--repeats", "1"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["command", "CPU", "s", "MB"]
    assert [re.sub(r"\d+", "N", row).split() for row in rows] == [
        ["past", "--version", "N.N", "N"],
        ["past", "completion", "fish", "N.N", "N"],
    ]


def test_a_command_that_fails_is_no_measurement():
    with pytest.raises(PastError, match="past show none ended with exit code 2"):
        startup.measure(["show", "none"])


def test_repeats_below_one_are_refused(capsys):
    assert main(["bench", "startup", "--repeats", "0"]) == 2
    assert "--repeats is 0" in capsys.readouterr().err
