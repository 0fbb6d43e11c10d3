from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_equations_is_fresh():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "equations.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_tag_is_a_label_of_the_paper(shared: Path):
    labels = set(re.findall(r"\\label\{(eq:[\w-]+)\}", (shared / "paper.tex").read_text(encoding="utf-8")))
    page = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    tags = set(re.findall(r"`(eq:[\w-]+)`", page))
    assert tags
    assert tags <= labels
