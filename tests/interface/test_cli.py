from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SMALL

from past_opsd import __version__
from past_opsd.analysis.bench import BENCHMARKS
from past_opsd.core import config
from past_opsd.interface.cli import COMMANDS, build_parser, main

SETS = [argument for setting in SMALL for argument in ("--set", setting)]


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_recipes_lists_every_shipped_recipe(capsys):
    code, out, _ = run(capsys, "recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == config.shipped()


def test_show_prints_the_resolved_recipe(capsys):
    code, out, _ = run(capsys, "show", "embedded/past", "--set", "run.cycles=7")
    assert code == 0
    assert "# student updates; the only length knob\ncycles = 7\n" in out


def test_a_users_mistake_is_one_message(capsys):
    code, out, err = run(capsys, "show", "embedded/past", "--set", "method.beta_lk=1")
    assert (code, out) == (2, "")
    assert err == "past: --set method.beta_lk=1: method.beta_lk: unknown key; did you mean 'beta_kl'?\n"


def test_without_a_command_help_is_printed(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert "train" in out


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("name", ["embedded/past", "embedded/opsd"])
def test_inspect_shows_both_inputs(capsys, name: str, dry: bool):
    code, out, _ = run(capsys, "inspect", name, *SETS, *(["--dry"] if dry else []))
    assert code == 0
    student, teacher = out.split("teacher reads")
    assert "Reference:" not in student
    assert "Reference:" in teacher
    assert ("Attempt:" in teacher) == (name == "embedded/past")
    assert len(re.findall(r"<\|assistant\|>", out)) == 2


def test_inspect_shows_the_examples_of_each_role_and_names_as_they_are(capsys):
    """A task whose ids hold ':train:', which a terminal's markup takes for a picture."""
    example = "{problem='1*2', student_output='1*2=3; ', reference_solution='2, ', assistant='1*2=2; '}"
    task = ["task.name=word_problems", "task.train_problems=8", "task.eval_problems=1", f"prompts.examples=[{example}]"]
    words = [word for setting in task for word in ("--set", setting)]
    code, out, _ = run(capsys, "inspect", "embedded/past", "--dry", *words)
    assert code == 0
    assert "problem 1-step:train:1:" in out
    student, teacher = out.split("teacher reads")
    assert ("1*2=3" in student, "1*2=3" in teacher) == (False, True)


def test_train_eval_and_resume(capsys, tmp_path: Path):
    folder = tmp_path / "run"
    code, out, _ = run(capsys, "train", "embedded/opsd", "--out", folder, *SETS)
    assert code == 0
    assert "verifier 18 calls" in out
    assert "after 3 updates" in out
    code, _, err = run(capsys, "train", "embedded/opsd", "--out", folder, *SETS)
    assert code == 2
    assert "continue it with: " in err
    assert err.endswith(" --resume\n")
    code, _, _ = run(capsys, "train", "embedded/opsd", "--out", folder, "--resume", *SETS)
    assert code == 0

    adapter = folder / "checkpoints" / "checkpoint-00003"
    out_file = tmp_path / "e.json"
    code, out, _ = run(capsys, "eval", "embedded/opsd", "--adapter", adapter, "--out", out_file, *SETS)
    assert code == 0
    assert "majority@4 %" in out
    saved = json.loads((folder / "evaluations" / "step-00003.json").read_text())
    assert json.loads(out_file.read_text())["tasks"] == saved["tasks"]


def test_eval_of_one_sample_a_problem_has_an_interval_over_problems(capsys):
    one = ["--set", "evaluation.samples=1", "--set", "evaluation.pass_k=[1]"]
    code, out, _ = run(capsys, "eval", "embedded/opsd", *SETS, *one)
    assert code == 0
    assert "(95 %, over problems; " in out


def test_eval_of_a_missing_adapter_is_told(capsys, tmp_path: Path):
    code, _, err = run(capsys, "eval", "embedded/opsd", "--adapter", tmp_path, *SETS)
    assert code == 2
    assert "cannot be read as safetensors" in err
    (tmp_path / "checkpoints/checkpoint-00002").mkdir(parents=True)
    _, _, err = run(capsys, "eval", "embedded/opsd", "--adapter", tmp_path, *SETS)
    assert f"name one of its checkpoints, e.g. {tmp_path}/checkpoints/checkpoint-00002" in err


@pytest.mark.slow
def test_demo_prints_the_table_and_repeats_digit_for_digit(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = ["demo", "--out", tmp_path / "demo", "--seeds", "17", *SETS, "--set", "run.cycles=1"]
    arguments += ["--set", "evaluation.at=[0.0, 1.0]"]
    tables = []
    for _ in range(2):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        rows = [line.strip() for line in out.splitlines()]
        tables.append([line for line in rows if line.startswith(("Base ", "Vanilla OPSD  ", "PAST  "))])
        # Once is enough for what comes after the table.
        assert (tmp_path / "demo" / "report" / "index.html").exists() == (len(tables) == 1)
        monkeypatch.setattr("past_opsd.interface.demo.look_into", lambda run: [])
        monkeypatch.setattr("past_opsd.analysis.report.write", lambda runs, out: out)
    assert len(tables[0]) == 3
    assert tables[0] == tables[1]
    assert all(re.search(r"\d+\.\d \[\d+\.\d, \d+\.\d\]", line) for line in tables[0])


def test_demo_spares_other_folders(capsys, tmp_path: Path):
    (tmp_path / "precious").write_text("x")
    code, _, err = run(capsys, "demo", "--out", tmp_path)
    assert code == 2
    assert "is not a demo's" in err
    assert (tmp_path / "precious").exists()


def test_demo_seeds_must_be_numbers(capsys):
    code, _, err = run(capsys, "demo", "--seeds", "a,b")
    assert code == 2
    assert "whole numbers" in err


def test_eval_takes_a_model_and_benchmarks_instead_of_a_recipe(capsys, tmp_path: Path):
    task = config.plugin("task", "embedded")
    rows = task.build(task.Options(train_problems=8, eval_problems=3)).train()[:3]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"problem": p.text, "answer": p.answer}) + "\n" for p in rows))
    short = ["--set", "evaluation.sampling.max_new_tokens=16", "--set", "evaluation.samples=2"]
    short += ["--set", "evaluation.pass_k=[1, 2]", "--set", "model.max_context=256", "--set", "model.dtype=float32"]
    words = ["eval", "--model", "embedded", "--benchmark", f"aime24={file}", *short]
    code, out, err = run(capsys, *words, "--out", tmp_path / "result.json")
    assert code == 0, err
    assert "avg@2" in out
    saved = json.loads((tmp_path / "result.json").read_text())
    assert list(saved["tasks"]) == ["aime24"]
    assert len(saved["tasks"]["aime24"]["outcomes"]) == 3
    code, _, err = run(capsys, "eval", "--model", "embedded")
    assert (code, "give a recipe, or --model and --benchmark" in err) == (2, True)


# One message for what cannot be done


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAST_LIFE", "off")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "rows.jsonl").write_text('{"gold": "1", "prediction": "\\\\boxed{1}"}\n')
    (tmp_path / "link.jsonl").symlink_to("rows.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    return tmp_path / "file"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("inspect embedded/past --dry --index 99999", "has 600 training examples, 0 to 599"),
        ("inspect embedded/past --index -1", "counted from 0"),
        ("demo --out file/x", "file is no folder"),
        ("demo --out file", "is a file"),
        ("demo --seeds 17,17", "each is given once"),
        ("demo --seeds=", "whole numbers"),
        ("compare --seeds=-1", "0 or more"),
        ("compare --jobs -1", "give 1 or more"),
        ("models pull smollm2-135m --to file/x", "file is no folder"),
        ("report folder --out file/x", "file is no folder"),
        ("report folder --out folder", "is a folder"),
        ("report file", "no such folder"),
        ("report folder --out rows.jsonl", "not what this command writes"),
        ("report folder --out pipe.jsonl", "not a plain file"),
        ("report folder --out /dev/null", "not a plain file"),
        ("report folder --out /dev/stdout", "not a plain file"),
        ("schema --out rows.jsonl", "not what this command writes"),
        ("compare --out file", "is a file"),
        ("compare --rehearse --out file", "is a file"),
        ("rehearse embedded/past --out file", "is a file"),
        ("rehearse embedded/past folder", "no recipe 'folder'"),
        ("report folder", "holds no run"),
        ("export folder --out file/x", "not a run folder"),
        ("probe file", "not a run folder"),
        ("watch file/x", "file is a file"),
        ("verify empty.jsonl", "there are no rows in it"),
        ("verify rows.jsonl --out rows.jsonl", "that is the file to be graded"),
        ("verify rows.jsonl --out link.jsonl", "that is the file to be graded"),
        ("verify rows.jsonl --out folder", "is a folder"),
        ("verify rows.jsonl --out file", "is not what this command writes"),
        ("verify pipe.jsonl", "a pipe"),
        ("verify folder", "a folder"),
        ("data check rows.jsonl --rows -1", "give 0 or more"),
        ("data check pipe.jsonl", "a pipe"),
        ("serve embedded/past --dry --port 65536", "1 to 65535"),
        ("serve embedded/past --dry --port 0", "1 to 65535"),
        ("show folder", "no recipe 'folder'"),
        ("show pipe.jsonl", "no recipe"),
        ("show embedded/past --set run.cycles=" + "9" * 5000, "run.cycles"),
        ("show embedded/past --set run.cycles=" + "[" * 5000, "run.cycles"),
        ("show embedded/past --set run=5", "run: input should be"),
    ],
)
def test_what_cannot_be_done_is_one_message(capsys, file: Path, words: str, said: str):
    before = sorted(file.parent.iterdir())
    code, _, err = run(capsys, *words.split())
    assert code == 2
    assert err.startswith("past: ")
    assert said in err
    assert sorted(file.parent.iterdir()) == before


def test_an_evaluation_replaces_nothing_but_one(capsys, tmp_path: Path):
    out = tmp_path / "mine"
    words = ["eval", "embedded/past", *SETS, "--out", out]
    out.write_text("notes")
    code, _, err = run(capsys, *words)
    assert (code, "not what this command writes" in err, out.read_text()) == (2, True, "notes")
    out.write_text("")
    assert [run(capsys, *words)[0], run(capsys, *words)[0]] == [0, 0]


@pytest.mark.parametrize("words", ["train embedded/past --out", "demo --out", "report", "export", "models pull x --to"])
def test_a_name_that_is_empty_is_not_the_current_folder(capsys, file: Path, words: str):
    before = sorted(file.parent.iterdir())
    with pytest.raises(SystemExit, match="2"):
        main([*words.split(), ""])
    assert "the name is empty" in capsys.readouterr().err
    assert sorted(file.parent.iterdir()) == before


def test_a_place_that_is_not_ours_to_write_is_told(capsys, file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # a superuser may write anywhere
    code, _, err = run(capsys, "demo", "--out", "folder/x")
    assert (code, "not yours to write" in err) == (2, True)


@pytest.mark.parametrize(("error", "said"), [(PermissionError(13, "Permission denied", "a"), "a: Permission denied")])
def test_an_error_of_the_system_is_told(capsys, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(config, "shipped_descriptions", fail)
    assert run(capsys, "recipes")[::2] == (2, f"past: {said}\n")


def test_streams_that_are_closed_are_no_bug(capsys, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)
        assert main(["recipes"]) == 0
        sys.stdout.close()
    assert capsys.readouterr().err == ""


def test_a_bug_is_called_one(capsys, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(config, "shipped_descriptions", fail)
    code, _, err = run(capsys, "recipes")
    assert (code, err) == (70, "past: this is a bug of past (ZeroDivisionError: oh); PAST_DEBUG=1 shows where\n")
    monkeypatch.setenv("PAST_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["recipes"])


def test_a_message_does_not_steer_the_terminal(capsys, tmp_path: Path):
    (tmp_path / "a.toml").write_text('"\\u001b[2Jx" = 1\n')
    code, _, err = run(capsys, "show", tmp_path / "a.toml")
    assert code == 2
    assert "\x1b" not in err
    assert run(capsys, "show", "\udc80")[0] == 2


def test_a_reader_that_goes_away_is_no_accident():
    words = [sys.executable, "-m", "past_opsd", "show", "embedded/past"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


COMMAND_NAMES = [command.name for commands in COMMANDS.values() for command in commands]
HEAVY = ["torch", "transformers", "peft", "sympy", "math_verify", "latex2sympy2_extended"]
HEAVY += ["pyarrow", "numpy", "matplotlib", "jinja2", "vllm"]
QUICK = """
import json, sys
from past_opsd.interface.cli import main
for words in json.loads(sys.argv[1]):
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 0, (words, code)
    loaded = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    assert not loaded, (words, loaded)
"""


def test_what_only_reads_loads_no_heavy_library():
    inner = [[*c.split(), "--help"] for c in ("models pull", "models list", "models check", "data check")]
    inner += [["bench", kind, "--help"] for kind in BENCHMARKS]
    help_ = [["--help"], ["--version"], *([name, "--help"] for name in COMMAND_NAMES), *inner]
    rest = [["recipes"], ["models", "list"], ["completion", "zsh"], ["completion", "--words", "show", ""]]
    rest += [["show", name] for name in ("embedded/past", "embedded/h2sd", "embedded/opd", "scale/qwen3-8b-8gpu")]
    words = json.dumps([*help_, *rest])
    subprocess.run([sys.executable, "-c", QUICK, words, json.dumps(HEAVY)], check=True, stdout=subprocess.DEVNULL)


def test_no_shipped_module_with_options_loads_a_heavy_library():
    folder = Path(config.__file__).parents[1]
    places = [folder.joinpath(*place.split(".")) for place in config.PLUGINS.values()]
    modules = [p for place in places for p in place.glob("*.py") if "Options" in p.read_text()]
    names = [".".join(p.relative_to(folder.parent).with_suffix("").parts) for p in modules]
    assert len(names) > 15
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    code += f"loaded = [name for name in {HEAVY} if name in sys.modules]\nassert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_is_grouped_by_task_with_examples_and_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys)
    assert code == 2
    for group, commands in COMMANDS.items():
        assert f"\n{group}, e.g. past {commands[0].name}" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == COMMAND_NAMES
    pages = [out]
    for name in COMMAND_NAMES:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        pages.append(capsys.readouterr().out)
        assert f"\nexample:\n  past {name}" in pages[-1]
    assert [line for page in pages for line in page.splitlines() if len(line) > 80] == []


def test_examples_are_understood():
    for commands in COMMANDS.values():
        for command in commands:
            words = command.line.split()[1:]
            assert build_parser(words[0]).parse_args(words).run is not None


def test_the_package_runs_as_a_module(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "past_opsd", "--version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, f"past-opsd {__version__}\n")
    done = subprocess.run([sys.executable, "-m", "past_opsd", "show", "none"], capture_output=True, cwd=tmp_path)
    assert done.returncode == 2
