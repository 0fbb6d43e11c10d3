"""What the package imports and ships, against what pyproject.toml declares."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import past_opsd

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "past_opsd"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_FOR_USERS = ("dev", "bench", "docs")

# Imported by nothing but code that has looked whether the extra is there.
ONLY_WITH = {
    "policy/fused_triton.py": "triton",
    "rollout/engines/vllm_logits.py": "vllm",
    "rollout/verifiers/_gym.py": "tasks",
}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", text)[0].lower().replace("-", "_") for text in requirements}


PLAIN = names(PROJECT["dependencies"])
EXTRAS = {extra: names(found) for extra, found in PROJECT["optional-dependencies"].items()}


def imports(nodes: list[ast.stmt], inside: bool) -> Iterator[tuple[str, bool]]:
    """Packages that are imported, by statement or as `Lazy("name")`, and whether that waits for a call."""
    for node in nodes:
        for part in ast.walk(node) if inside else [node]:
            if isinstance(part, ast.Import):
                yield from ((alias.name, inside) for alias in part.names)
            elif isinstance(part, ast.ImportFrom):
                yield part.module or "", inside
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "Lazy":
                yield part.args[0].value, True  # type: ignore[attr-defined]
        if not inside:
            bodies = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign)
            yield from imports([node] if deferred else [part for body in bodies for part in body], deferred)


def imported(file: Path) -> set[tuple[str, bool]]:
    found = {(name.split(".")[0], inside) for name, inside in imports(ast.parse(file.read_text()).body, False)}
    return {(name, inside) for name, inside in found if name not in sys.stdlib_module_names and name != "past_opsd"}


FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_every_import_is_declared(file: str):
    users = set().union(*(found for extra, found in EXTRAS.items() if extra not in NOT_FOR_USERS))
    here = EXTRAS[ONLY_WITH[file]] if file in ONLY_WITH else set()
    for name, inside in imported(PACKAGE / file):
        assert name in PLAIN | here | (users if inside else set()), f"{file} imports {name}"


def test_every_plain_dependency_is_used():
    used = {name for file in FILES for name, _ in imported(PACKAGE / file)}
    assert PLAIN - used == {"gguf", "pip"}  # transformers imports the one, 'past models pull' runs the other


def test_messages_name_extras_that_exist():
    texts = [path.read_text() for path in [*PACKAGE.rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    lists = [found for text in texts for found in re.findall(r"past-opsd\[([a-z,]+)\]", text)]
    named = {extra for found in lists for extra in found.split(",")}
    assert named <= set(EXTRAS)
    assert {"vllm", "data", "tasks"} <= named


def test_every_extra_is_in_the_readme():
    table = (ROOT / "README.md").read_text()
    assert [extra for extra in EXTRAS if extra not in NOT_FOR_USERS and f"| `{extra}` |" not in table] == []


def test_every_data_file_is_shipped():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["past_opsd"]
    shipped = {path for pattern in settings for path in PACKAGE.glob(pattern) if path.is_file()}
    there = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert there - shipped == set()


def test_version_notes_and_citation_agree():
    notes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(past_opsd.__version__)}\b", notes, re.MULTILINE)
    assert f"version: {past_opsd.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_images_copy_files_that_are_there_and_install_extras_that_exist():
    for file in sorted((ROOT / "docker").iterdir()):
        text = file.read_text()
        copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
        assert copied
        assert all((ROOT / word).exists() for word in copied), file
        assert all(f"!{word}\n" in (ROOT / ".dockerignore").read_text() for word in copied), file
        assert text.count("--constraint constraints.txt") == text.count("pip install")
        assert {extra for found in re.findall(r"\.\[([a-z,]+)\]", text) for extra in found.split(",")} <= set(EXTRAS)


def test_no_module_shadows_the_standard_library():
    """A file of the package run directly would import it in the place of Python's own."""
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in sys.stdlib_module_names]


NAMES = sorted(name for names in past_opsd._PLACES.values() for name in names)


def test_the_names_for_scripts_are_there_and_cost_nothing_before_they_are_used():
    assert sorted(name for name in dir(past_opsd) if name != "__version__") == NAMES
    contents = (past_opsd.__doc__ or "").partition("Recipes\n")[2]
    assert all(re.search(rf"\b{name}\b", contents) and getattr(past_opsd, name).__doc__ for name in NAMES)
    for line in re.findall(r"from past_opsd\.(\S+) import (\w+) as (\w+)", (PACKAGE / "__init__.py").read_text()):
        assert line[1] == line[2]
        assert line[1] in past_opsd._PLACES[line[0]]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        past_opsd.nothing  # noqa: B018
    code = "import sys, past_opsd; past_opsd.load; past_opsd.train; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_reads_like_a_table_of_contents():
    page = pydoc.plain(pydoc.render_doc(past_opsd))
    assert page.count("\n") < 90
    assert "past.train(recipe" in page
    assert "Methods defined here" not in page


def test_every_function_for_scripts_says_what_it_takes_gives_and_raises():
    for name in NAMES:
        function = getattr(past_opsd, name)
        if function.__module__ != "past_opsd.interface.api" and name != "load":
            continue
        text = inspect.getdoc(function) or ""
        assert "Returns:" in text, name
        assert "Raises:" in text or name == "recipes", name
        for argument in inspect.signature(function).parameters:
            assert re.search(rf"^    {argument}: ", text, re.MULTILINE), (name, argument)


def test_the_package_opens_on_a_dozen_entries():
    entries = [path.name for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__pycache__")]
    assert len(entries) <= 12, entries
