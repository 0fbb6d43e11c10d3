from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from past_opsd.core import config
from past_opsd.core.nouns import PastError


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def error(path: Path | str, *overrides: str) -> str:
    with pytest.raises(PastError) as caught:
        config.load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", config.shipped())
def test_every_shipped_recipe_is_valid_described_and_reproduces_itself(name: str, tmp_path: Path):
    recipe = config.load(name)
    assert recipe.name == name
    assert recipe.description
    again = config.load(write(tmp_path, config.to_toml(recipe)))
    assert config.dump(again) == config.dump(recipe)


@pytest.mark.parametrize("name", config.shipped())
def test_show_explains_every_field(name: str):
    lines = config.to_toml(config.load(name)).splitlines()
    inside = False
    for before, line in zip(["", *lines], lines, strict=False):
        inside = inside != ("'''" in line and line.count("'''") == 1)
        if not inside and " = " in line and not line.startswith(("#", " ")) and "'''" not in line:
            assert before.startswith("# "), line


def test_unknown_key_names_file_line_and_nearest_key(tmp_path: Path):
    path = write(tmp_path, 'extends = "embedded/past"\n\n[method]\nbeta_lk = 0.1\n')
    assert error(path) == f"{path}:4: method.beta_lk: unknown key; did you mean 'beta_kl'?"


def test_unknown_section_names_the_nearest(tmp_path: Path):
    path = write(tmp_path, 'extends = "embedded/past"\n[rolout]\nproblems_per_cycle = 2\n')
    assert error(path) == f"{path}:2: rolout: unknown key; did you mean 'rollout'?"


def test_wrong_type_is_not_coerced(tmp_path: Path):
    path = write(tmp_path, 'extends = "embedded/past"\n[run]\ncycles = "20"\n')
    assert error(path).startswith(f"{path}:3: run.cycles: input should be a valid integer")


def test_line_numbers_skip_multi_line_strings(tmp_path: Path):
    path = write(tmp_path, "extends = \"embedded/past\"\nname = '''\n[run]\ncycles = 3\n'''\n[run]\ncylces = 3\n")
    assert error(path).startswith(f"{path}:7: run.cylces: unknown key")


def test_inherited_key_is_blamed_on_the_file_that_wrote_it(tmp_path: Path):
    base = write(tmp_path, 'extends = "embedded/past"\n[run]\ncylces = 3\n', "base.toml")
    mine = write(tmp_path, 'extends = "base.toml"\n[run]\nseed = 3\n')
    assert error(mine).startswith(f"{base}:3: ")


def test_all_mistakes_are_told_at_once():
    assert len(error("embedded/past", "run.cycles=0", "method.tau=-1", "nonsense=1").splitlines()) == 3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("evaluation.pass_k=[13]", "must lie between 1 and samples = 12"),
        ("evaluation.at=[2.0]", "fractions of the run"),
        ("method.group_max=0", "greater than or equal to 1"),
        ("method.name='pats'", "no method 'pats'; known are"),
        ("run.cycles", "write it as --set section.key=value"),
    ],
)
def test_impossible_settings(override: str, expected: str):
    assert expected in error("embedded/past", override)


def test_impossible_combination():
    message = error("embedded/past", "method.train_teacher=false", "method.branches='failed'")
    assert "has no meaning with train_teacher = false" in message


def test_unknown_recipe_names_the_nearest():
    assert "did you mean 'embedded/past'" in error("embeded/past")


def test_broken_toml_names_the_file(tmp_path: Path):
    path = write(tmp_path, "[run\n")
    assert f"{path}: not valid TOML" in error(path)


def test_circle(tmp_path: Path):
    path = write(tmp_path, 'extends = "mine.toml"\n')
    assert "runs in a circle" in error(path)


def test_overrides_win_and_keep_their_type():
    recipe = config.load("embedded/past", ["method.tau=inf", "run.seed=29", "name=words without quotes"])
    assert recipe.method.tau == float("inf")
    assert (recipe.run.seed, recipe.name) == (29, "words without quotes")


def test_choosing_another_method_drops_the_inherited_ones_options(tmp_path: Path):
    path = write(tmp_path, 'extends = "embedded/past"\n[method]\nname = "opsd"\n')
    recipe = config.load(path)
    assert recipe.method.name == "opsd"
    assert recipe.method.tau == 0.05
    assert recipe.run.cycles == config.load("embedded/past").run.cycles


def test_a_method_of_ones_own_by_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(
        tmp_path,
        "from past_opsd.core.config import Section\nclass Options(Section):\n    strength: float = 1.0\n"
        "def build(options, prompts, rollout): ...\n",
        "my_method.py",
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "my_method.py").rename(tmp_path / "mine" / "method.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = config.load("embedded/past", ["method.name='mine.method'"])
    assert recipe.method.strength == 1.0


def test_prompts_of_the_paper_are_verbatim(shared: Path):
    tex = (shared / "paper.tex").read_text(encoding="utf-8")
    block = tex.split("\\begin{verbatim}\n")[1].split("\n\\end{verbatim}")[0]
    assert config.load("paper/past").prompts.hindsight == block


def test_removed_is_hindsight_without_the_attempt():
    prompts = config.load("paper/past").prompts
    block = "=== Student Attempt Begin ===\n{student_output}\n=== Student Attempt End ===\n\n"
    assert prompts.hindsight.count(block) == 1
    assert prompts.removed == prompts.hindsight.replace(block, "")


def test_toml_strings_survive():
    for text in ("plain", 'with "quotes"', "back\\slash", "two\nlines \\boxed{}", "unicode ½"):
        assert tomllib.loads(f"v = {config.toml_value(text)}")["v"] == text


def test_a_child_does_not_inherit_its_parents_description(tmp_path: Path):
    middle = write(tmp_path, 'extends = "embedded/past"\ndescription = "the middle one"\n', "middle.toml")
    child = write(tmp_path, 'extends = "middle.toml"\n[run]\ncycles = 3\n', "child.toml")
    assert config.load("embedded/past").description
    assert config.load(middle).description == "the middle one"
    assert (config.load(child).description, config.load(child).name) == ("", "embedded/past")
    assert config.load(child, ["description=mine"]).description == "mine"
    assert not [name for name in config.shipped() if not config.load(name).description]


def test_a_place_that_is_not_given_has_its_default_or_is_missing(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "embedded/past"\n[task]\nname = "dataset"\ntrain = "a.jsonl"\nhold_out = 1\n')
    assert config.load(path).task.evaluation == {}
    path.write_text('extends = "embedded/past"\n[task]\nname = "dataset"\n')
    with pytest.raises(PastError, match=r"task\.train: is missing"):
        config.load(path)


@pytest.mark.parametrize("name", ["past", "grpo", "h2sd"])
def test_a_key_that_changed_nothing_is_read_and_left_out(tmp_path: Path, name: str):
    """A run of an older version has it in its recipe."""
    recipe = config.load(f"embedded/{name}")
    text = config.to_toml(recipe)
    assert "\nepsilon" not in text
    (tmp_path / "recipe.toml").write_text(text.replace("[method]\n", "[method]\nepsilon = 0.2\n"))
    assert config.dump(config.load(tmp_path / "recipe.toml", imports=False)) == config.dump(recipe)
    assert "method.epsilon" in config.former(recipe)


def test_a_variant_is_a_recipe_like_any_other(tmp_path: Path):
    past, variant = config.load("paper/past"), config.load("paper/beta_0.01")
    assert (variant.name, variant.method.beta_kl) == ("paper/beta_0.01", 0.01)
    assert config.dump(variant.method) == config.dump(past.method) | {"beta_kl": 0.01}
    child = write(tmp_path, 'extends = "paper/trajectory_only_4b"\nname = "mine"\n')
    assert (config.load(child).model.path, config.load(child).method.train_teacher) == ("Qwen/Qwen3-4B", False)


def test_a_slip_in_a_variant_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(config.SHIPPED / "embedded", tmp_path / "embedded")
    monkeypatch.setattr(config, "SHIPPED", tmp_path)
    file = write(tmp_path / "embedded", '["tau_0.1"]\nextends = "past.toml"\nmethod.taus = 0.1\n', config.VARIANTS)
    assert "embedded/tau_0.1" in config.shipped()
    assert f"{file}:3: method.taus: unknown key; did you mean 'tau'?" in error("embedded/tau_0.1")
    write(tmp_path / "embedded", '[a]\nextends = "embedded/a"\n', config.VARIANTS)
    assert "[a]: 'extends' runs in a circle" in error("embedded/a")


def test_tables_can_be_laid_over_a_recipe():
    tables = {"method": {"name": "opsd", "teacher": "ema"}, "run": {"cycles": 3}}
    recipe = config.load("embedded/past", tables)
    assert (recipe.method.name, recipe.method.teacher, recipe.run.cycles, recipe.run.threads) == ("opsd", "ema", 3, 1)
    with pytest.raises(PastError, match="unknown key; did you mean 'cycles'"):
        config.load("embedded/past", {"run": {"cycels": 3}})
