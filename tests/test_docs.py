"""Every snippet of README.md and docs/: Python runs, recipes load, command lines are understood.

Not run: what needs a GPU, vLLM, a tracker's account or a model from the hub. Its command lines are parsed, recipe and
settings included, and its Python is compiled; `NOT_RUN` says which and why.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from past_opsd.core import config
from past_opsd.interface.cli import COMMANDS, build_parser, main

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
NAMES = [command.name for commands in COMMANDS.values() for command in commands]
NOT_RUN = {"docs/trl.md": "loads Qwen3-1.7B from the hub; examples/trl_script.py is the same on the embedded model"}
STAND_IN = "paper/past"  # for recipes of the reader's own
QUICK = ("recipes", "show", "completion", "schema", "models list")
SMALL = """
extends = "{parent}"
name = "embedded/{name}"
[run]
threads = 1
[rollout]
problems_per_cycle = 4
[task]
train_problems = 40
eval_problems = 3
"""


@dataclass(frozen=True)
class Snippet:
    """A block of code on a page; lines that are indented are one without a language."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(page: Path) -> Iterator[Snippet]:
    name, lines = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        if fence := re.fullmatch(r"```(\w*)", lines[at]):
            end = next(i for i in range(at + 1, len(lines)) if lines[i] == "```")
            yield Snippet(name, at + 1, fence[1], "\n".join(lines[at + 1 : end]))
            at = end + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip() or lines[at - 1].startswith("#")):
            end = next((i for i in range(at, len(lines)) if lines[i] and not lines[i].startswith("    ")), len(lines))
            yield Snippet(name, at + 1, "", "\n".join(line[4:] for line in lines[at:end]))
            at = end
        else:
            at += 1


ALL = [snippet for page in PAGES for snippet in snippets(page)]
PYTHON = sorted({s.page for s in ALL if s.language == "python"})
TOML = [s for s in ALL if s.language == "toml"]


def shell_lines() -> Iterator[tuple[str, list[str]]]:
    """The words of every command line that begins with past, or with Python or a launcher and our module."""
    for snippet in ALL:
        if snippet.language not in ("", "sh", "bash", "console"):
            continue
        joined = snippet.text.replace("\\\n", " ")
        for line in joined.splitlines():
            shown = "<<" in line or re.search(r" \d+\.\d+ +\d+", line) is not None  # a script, or what a command prints
            if re.match(r"(past|torchrun|accelerate|python3?) ", line.strip()) and not shown:
                text = re.sub(r"[\[\]]| [|>&]+ .*", "", line.strip()) if "=[" not in line else line.strip()
                yield snippet.where, shlex.split(text, comments=True)


def ours(words: list[str]) -> list[str] | None:
    """What follows `past`, whoever starts it; None for another program."""
    if words[0] == "past":
        return words[1:]
    return words[words.index("past_opsd") + 1 :] if "past_opsd" in words else None


LINES = [(where, found) for where, words in shell_lines() if (found := ours(words)) is not None]


def test_the_pages_have_snippets():
    assert len(PYTHON) >= 5
    assert len(TOML) >= 6
    assert len(LINES) > 60


@pytest.mark.parametrize(("where", "words"), LINES, ids=[f"{where} {' '.join(words[:2])}" for where, words in LINES])
def test_a_command_line_is_understood(where: str, words: list[str], capsys: pytest.CaptureFixture[str]):
    known = {"RECIPE": STAND_IN, "RUN...": "RUN", **dict.fromkeys("THVNR", "1")}
    words = [known.get(word, word) for word in words if not word.startswith("$")]
    try:
        args = build_parser(words[0]).parse_args(words)
    except SystemExit:
        pytest.fail(f"{where}: {capsys.readouterr().err}")
    assert args.run is not None, where
    recipe, overrides = getattr(args, "recipe", None), getattr(args, "overrides", [])
    if isinstance(recipe, str):
        config.load(STAND_IN if recipe.endswith(".toml") else recipe, overrides)
    if words[0] == "compare":
        from past_opsd.analysis import suite

        for name in suite.find(args.suite, args.family, args.reference).rows.values():
            config.load(name, overrides)
    if " ".join(words).startswith(QUICK):
        assert main(words) == 0, where


def test_commands_and_options_named_in_a_sentence_exist():
    for page in PAGES:
        for text in re.findall(r"`past ([^`]+)`", page.read_text(encoding="utf-8")):
            command, *rest = text.split()
            if command == "--help" or command.endswith(":"):  # the latter is what a command prints
                continue
            assert command in NAMES, (page.name, text)
            parser = build_parser(command)._subparsers._group_actions[0].choices[command]  # type: ignore[union-attr]
            inner = [
                action for action in parser._actions if hasattr(action, "choices") and isinstance(action.choices, dict)
            ]
            if inner and rest and rest[0] in inner[0].choices:
                parser = inner[0].choices[rest[0]]
            options = [word.strip("[]").partition("=")[0] for word in rest if word.strip("[").startswith("--")]
            assert set(options) <= set(parser._option_string_actions) | {"--help"}, (page.name, text)


@pytest.mark.parametrize("snippet", TOML, ids=[s.where for s in TOML])
def test_a_recipe_loads(snippet: Snippet, tmp_path: Path):
    whole = re.search(r"^extends ", snippet.text, re.MULTILINE) is not None
    file = tmp_path / "mine.toml"
    file.write_text(snippet.text if whole else f'extends = "{STAND_IN}"\nname = "mine"\n{snippet.text}\n')
    recipe = config.load(file)
    assert recipe.name == "mine"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the embedded recipes are files of the same names with less to do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "embedded").mkdir()
    for name in ("past", "opsd"):
        parent = config.SHIPPED / "embedded" / f"{name}.toml"
        (tmp_path / "embedded" / name).write_text(SMALL.format(parent=parent, name=name))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON)
def test_python_runs(page: str, place: Path, monkeypatch: pytest.MonkeyPatch):
    """The snippets of a page one after the other, in one module: what the first defines the next may use."""
    module = ModuleType("snippets")
    monkeypatch.setitem(sys.modules, "snippets", module)
    for snippet in (s for s in ALL if s.page == page and s.language == "python"):
        code = compile(snippet.text, snippet.where, "exec")
        if page in NOT_RUN:
            for node in ast.walk(ast.parse(snippet.text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("past_opsd"):
                    found = importlib.import_module(node.module or "")
                    assert all(hasattr(found, alias.name) for alias in node.names), snippet.where
            continue
        exec(code, module.__dict__)


def test_python_inside_of_a_command_line_compiles():
    """docs/vllm.md compares two engines' runs, one of them vLLM's."""
    found = [re.search(r"<<'END'\n(.*)\nEND", s.text, re.DOTALL) for s in ALL if "<<'END'" in s.text]
    assert found
    for script in found:
        compile(script[1], "heredoc", "exec")  # type: ignore[index]
