from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from past_opsd.core import config
from past_opsd.core.config import ModelSection
from past_opsd.core.nouns import PastError, View
from past_opsd.interface.cli import main
from past_opsd.policy.model import Model
from past_opsd.run import checkpoint
from past_opsd.run.export import MARK, card, export, push
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import session, train

IDS = (3, 5, 7, 9, 4, 6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small_recipe):
    class Silent:
        def phase(self, *_: object) -> None: ...
        def cycle(self, *_: object) -> None: ...
        def evaluated(self, *_: object) -> None: ...
        def note(self, *_: object) -> None: ...

    folder = tmp_path_factory.mktemp("export") / "run"
    train(small_recipe("embedded/past", "learner.student.lr=0.01"), folder, False, Silent())
    return folder


@pytest.fixture(scope="module")
def expected(run: Path, small_recipe) -> torch.Tensor:
    """The student's own logits behind the first five ids."""
    with session(small_recipe()) as parts, torch.no_grad():
        checkpoint.load_adapter(parts.model, "student", RunFolder(run).checkpoint(3))
        states = parts.model.hidden([(View("student", IDS[:1]), IDS[1:])])
        return states @ parts.model.head.T


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS[:-1]])).logits[0]


def test_a_damaged_checkpoint_passed_over_is_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    copy = shutil.copytree(run, tmp_path / "run")
    (RunFolder(copy).checkpoint(3) / "adapter_model.safetensors").write_bytes(b"")
    assert main(["export", str(copy)]) == 0
    assert "checkpoint-00003 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--push", ""], ["--private"]])
def test_a_push_to_nowhere_is_told(run: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["export", str(run), "--out", str(tmp_path / "out"), *words]) == 2
    assert "name the repository" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plain_peft_loads_the_adapter_from_what_its_config_names(run: Path, expected: torch.Tensor):
    out = export(run, run / "export")
    named = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(named)
    before = logits(base)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, out)), expected, rtol=1e-4, atol=1e-4)
    assert (before - expected).abs().max() > 1e-2, "the adapter changes nothing: the comparison says nothing"


def test_the_merged_model_needs_no_peft(run: Path, expected: torch.Tensor):
    out = export(run, run / "merged", merge=True)
    assert not (out / "adapter_config.json").exists()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_lm_evaluation_harness_scores_as_the_student_does(run: Path, expected: torch.Tensor):
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-eval: 'make test-vllm' has it")
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    out = export(run, run / "harness")
    base = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = huggingface.HFLM(pretrained=base, peft=str(out), device="cpu", batch_size=1, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(out)
    context, continuation = (tokenizer.decode(list(part)) for part in (IDS[:3], IDS[3:]))
    request = Instance("loglikelihood", {}, (context, " " + continuation), 0)
    encoded = model._encode_pair(context, " " + continuation)
    ((value, _),) = model.loglikelihood([request], disable_tqdm=True)
    ids = [*encoded[0], *encoded[1]]
    with torch.no_grad():
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
        logp = torch.log_softmax(plain(input_ids=torch.tensor([ids])).logits[0], -1)
    wanted = sum(float(logp[i - 1, ids[i]]) for i in range(len(encoded[0]), len(ids)))
    assert math.isclose(value, wanted, rel_tol=1e-4)


def test_an_older_checkpoint_can_be_chosen_and_unknown_ones_are_listed(run: Path):
    first, last = (export(run, run / f"step-{step}", step=step) for step in (0, 3))
    assert (first / "adapter_model.safetensors").read_bytes() != (last / "adapter_model.safetensors").read_bytes()
    with pytest.raises(PastError, match="no checkpoint of step 7; kept are 0, "):
        export(run, run / "seven", step=7)
    assert not (run / "seven").exists()


def test_a_damaged_checkpoint_is_refused(run: Path, tmp_path: Path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    file = RunFolder(copy).checkpoint(3) / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(PastError, match="damaged"):
        export(copy, copy / "out", step=3)


def test_the_card_says_what_it_is_and_how_it_scored(run: Path):
    text = (export(run, run / "card") / "README.md").read_text()
    assert "base_model:" not in text.partition("# ")[0]  # a model that the hub does not know
    assert "run on the local model `embedded`, that comes with past-opsd; it has no id on the hub, seed" in text
    assert "library_name: peft" in text
    assert "| updates | chain3 | chain4 | chain5 | macro |" in text
    assert "[run]" in text


def test_an_adapter_is_written_in_order(tmp_path: Path):
    """PEFT holds the names of its targets in a set, whose order changes with the process's hash seed."""
    Model(ModelSection(path="embedded"), seed=3).save_adapter("teacher", tmp_path)
    text = (tmp_path / "adapter_config.json").read_text()
    plain = json.loads(text)
    assert len(plain["target_modules"]) > 5
    assert plain["target_modules"] == sorted(plain["target_modules"])


def test_an_export_is_in_order_where_its_checkpoint_is_not(run: Path, tmp_path: Path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    last = RunFolder(copy).checkpoint(3)
    plain = json.loads((last / "adapter_config.json").read_text())
    data = json.dumps(plain | {"target_modules": sorted(plain["target_modules"], reverse=True)}).encode()
    (last / "adapter_config.json").write_bytes(data)
    manifest = json.loads((last / checkpoint.MANIFEST).read_text())
    manifest["adapter_config.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (last / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    out = export(copy, tmp_path / "out")
    targets = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)


@pytest.mark.parametrize(
    ("path", "hub", "told"),
    [
        (
            "Qwen/Qwen3-1.7B",
            "Qwen/Qwen3-1.7B",
            "run on [Qwen/Qwen3-1.7B](https://huggingface.co/Qwen/Qwen3-1.7B), seed",
        ),
        ("gpt2", "gpt2", "run on [gpt2](https://huggingface.co/gpt2), seed"),
        (
            "smollm2-135m",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "a local copy of [HuggingFaceTB/SmolLM2-135M-Instruct]",
        ),
        ("/cache/models--Qwen--Qwen3-4B/snapshots/0a1b", "Qwen/Qwen3-4B", "a local copy of [Qwen/Qwen3-4B]"),
        ("here/model", None, "/here/model`, in a folder or file of the machine that trained it"),
        ("/data/models/mine", None, "the local model `/data/models/mine`"),
        ("./mine", None, "the local model `./mine`"),
        ("mine.gguf", None, "the local model `mine.gguf`"),
    ],
)
def test_the_card_names_the_base_on_the_hub_or_says_that_it_is_local(
    path: str, hub: str | None, told: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    recipe = config.load("embedded/past", [f"model.path='{path}'"])
    text = card(recipe, run, Path("checkpoint-00003"), merge=False)
    head = text.split("---")[1]
    assert (f"base_model: {hub}\n" in head) if hub else ("base_model" not in head)
    assert told in text


def test_nothing_else_is_overwritten(run: Path, tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(PastError, match="holds something else"):
        export(run, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_with_a_readme_is_no_export(run: Path, tmp_path: Path):
    (tmp_path / "src" / ".git").mkdir(parents=True)
    for name in ("README.md", "thesis.tex", ".git/HEAD"):
        (tmp_path / "src" / name).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(PastError, match="src holds something else than what this command writes; choose another --out"):
        export(run, tmp_path / "src")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "where", [".", "..", "../..", "checkpoints", "checkpoints/checkpoint-00009", "report/x", "link"]
)
def test_the_run_itself_is_never_replaced(run: Path, tmp_path: Path, where: str):
    copy = tmp_path / "runs" / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("[e-m]*", "step-*", "card"))
    (tmp_path / "runs" / "link").symlink_to(copy)
    before = tree(tmp_path)
    with pytest.raises(PastError, match=r"--out .* is (the run's own folder or holds it|among the run's own records)"):
        export(copy, copy.parent / "link" if where == "link" else copy / where)
    assert tree(tmp_path) == before


def test_files_of_ones_own_in_an_earlier_export_stay(run: Path, tmp_path: Path):
    out = export(run, tmp_path / "out", step=0)
    old = tree(out)
    (out / ".git").mkdir()
    mine = {".git/HEAD": b"ref", "notes.txt": b"mine"}
    for name, content in mine.items():
        (out / name).write_bytes(content)
    (out / "data").symlink_to(tmp_path)
    export(run, out, step=3)
    new = tree(out)
    assert {name: new.pop(name) for name in mine} == mine
    assert set(new) == set(old)
    assert new["adapter_model.safetensors"] != old["adapter_model.safetensors"]
    assert os.readlink(out / "data") == str(tmp_path)
    assert os.listdir(tmp_path) == ["out"], "nothing is left beside it"


@pytest.mark.parametrize("change", ["edited", "added", "link"])
def test_a_file_of_ones_own_under_an_exports_name_is_refused(run: Path, tmp_path: Path, change: str):
    out = export(run, tmp_path / "out")
    if change == "added":
        plain = json.loads((out / MARK).read_text())
        del plain["files"]["README.md"]
        (out / MARK).write_text(json.dumps(plain))
    elif change == "edited":
        (out / "README.md").write_text("my own card")
    else:
        (tmp_path / "card").write_bytes((out / "README.md").read_bytes())
        (out / "README.md").unlink()
        (out / "README.md").symlink_to(tmp_path / "card")
    before = tree(tmp_path)
    with pytest.raises(PastError, match=r"README\.md is (not what was written there|in the way); move it away, or "):
        export(run, out)
    assert tree(tmp_path) == before


def test_a_mark_is_no_weapon(run: Path, tmp_path: Path):
    """Whatever a stranger's mark lists, nothing outside its folder goes, and inside nothing that it does not know."""
    (tmp_path / "precious.txt").write_text("mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    out = tmp_path / "out"
    out.mkdir()
    (out / "inside.txt").write_text("mine")
    (out / "link").symlink_to(tmp_path)
    (out / "file-link").symlink_to(tmp_path / "precious.txt")
    before = tree(tmp_path)
    weapons = [
        "../precious.txt",
        str(tmp_path / "precious.txt"),
        "link/precious.txt",
        "file-link",
        "a/../../precious.txt",
    ]
    for name in [*weapons, ".", "", "link", "./inside.txt", MARK]:
        for said in (digest, ""):
            (out / MARK).write_text(json.dumps({"files": {name: said}}))
            with pytest.raises(PastError, match=r"holds something else|is not what was written there"):
                export(run, out)
    for text in (
        "[]",
        "{",
        '{"files": []}',
        '{"files": {"inside.txt": 1}}',
        '{"files": {"inside.txt": ""}}',
        "[" * 10**5,
    ):
        (out / MARK).write_text(text)
        with pytest.raises(PastError, match="holds something else"):
            export(run, out)
    (out / MARK).unlink()
    assert tree(tmp_path) == before


def test_a_folder_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_an_unreachable_hub_keeps_the_folder_and_says_what_to_do(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    out = export(run, tmp_path / "out")
    with pytest.raises(PastError, match="hf auth login"):
        push(out, "nobody/nothing", private=True)
    with pytest.raises(PastError, match="--push a/b/c"):
        push(out, "a/b/c", private=True)
    assert (out / "README.md").is_file()
