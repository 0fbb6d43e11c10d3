from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from naive import logp
from operations import Operations
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import import_utils

from past_opsd.core.config import LoraSection, ModelSection
from past_opsd.core.nouns import PastError, View
from past_opsd.policy.model import Factor, Model, Network, settle_lora
from past_opsd.policy.pretrained import Choice, Machine, hardware, resolve

PROMPT = (1, 5, 7, 2)
TOKENS = (6, 7, 8)


@pytest.fixture
def model() -> Model:
    return Model(ModelSection(path="embedded", lora=LoraSection(rank=4, alpha=8)), seed=3)


def perturb(model: Model, adapter: str, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters(adapter).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.bump(adapter)


def test_both_adapters_start_as_the_identity(model: Model):
    states = [model.hidden([(View(a, PROMPT), TOKENS)]) for a in ("base", "student", "teacher")]
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_adapters_start_from_the_seed_alone():
    made = [Model(ModelSection(path="embedded"), seed=s) for s in (1, 1, 2)]
    assert made[0].digest("teacher") == made[1].digest("teacher") != made[2].digest("teacher")


def test_hidden_states_predict_exactly_the_tokens(model: Model):
    perturb(model, "teacher")
    pairs = [(PROMPT, TOKENS), (PROMPT[:2], (4,)), ((1,), TOKENS * 2)]
    paths = [(View("teacher", prompt), tokens) for prompt, tokens in pairs]
    got = (model.hidden(paths) @ model.head.T).log_softmax(-1).split([3, 1, 6])
    for (view, tokens), rows in zip(paths, got, strict=True):
        expected = logp(model, "teacher", view.prompt, tokens, grad=False)
        torch.testing.assert_close(rows.detach(), expected, atol=2e-5, rtol=1e-4)


def test_views_of_two_adapters_do_not_share_a_forward(model: Model):
    with pytest.raises(ValueError, match="one adapter per forward"):
        model.hidden([(View("teacher", PROMPT), TOKENS), (View("student", PROMPT), TOKENS)])


def test_a_phase_makes_exactly_its_adapter_trainable(model: Model):
    assert model.trainable() == set()
    with model.training("teacher"):
        model.hidden([(View("student", PROMPT), TOKENS)])
        assert model.trainable() == set(model.parameters("teacher"))
    with model.training("student"):
        assert model.trainable() == set(model.parameters("student"))
    assert model.trainable() == set()


def test_adapters_share_no_parameter_and_cover_all_targets(model: Model):
    student, teacher = model.parameters("student"), model.parameters("teacher")
    assert not set(student) & set(teacher)
    assert len(student) == len(teacher) == 3 * 7 * 2


def test_sampling_folds_the_adapter_and_puts_the_weights_back(model: Model):
    perturb(model, "student")
    before = model.identity()["base"]
    with model.sampling("student") as network, torch.inference_mode():
        logits = network(input_ids=torch.tensor([PROMPT + TOKENS])).logits[0, 3:6]
    expected = logp(model, "student", PROMPT, TOKENS, grad=False)
    torch.testing.assert_close(logits.log_softmax(-1).clone(), expected, atol=2e-5, rtol=1e-4)
    model._active = None
    assert model.identity()["base"] == before


def test_the_weights_are_put_back_after_an_error(model: Model):
    perturb(model, "student")
    before = model.identity()["base"]
    with pytest.raises(ZeroDivisionError), model.sampling("student"):
        raise ZeroDivisionError
    assert model.identity()["base"] == before


def test_a_new_version_is_folded_anew(model: Model):
    def logits() -> torch.Tensor:
        with model.sampling("student") as network, torch.inference_mode():
            return network(input_ids=torch.tensor([PROMPT])).logits

    first = logits()
    perturb(model, "student")
    assert not torch.equal(first, logits())


def test_digest_changes_with_one_bit(model: Model):
    before = model.digest("teacher")
    with torch.no_grad():
        next(iter(model.parameters("teacher").values()))[0, 0] += 1e-7
    assert model.digest("teacher") != before


def test_identity_tells_another_chat_template(model: Model):
    before = model.identity()
    model.tokenizer.chat_template += " "
    after = model.identity()
    assert before.pop("chat_template") != after.pop("chat_template")
    assert before == after


SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
GPT2["eos_token_id"] = 2
SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
FUSED = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "llama": ("LlamaConfig", SHAPE, SEVEN),
    "mistral": ("MistralConfig", SHAPE, SEVEN),
    "qwen2": ("Qwen2Config", SHAPE, SEVEN),
    "qwen3": ("Qwen3Config", SHAPE | {"head_dim": 8, "tie_word_embeddings": True}, SEVEN),
    "gemma": ("GemmaConfig", SHAPE | {"head_dim": 8}, SEVEN),
    "olmo2": ("Olmo2Config", SHAPE, SEVEN),
    "granite": ("GraniteConfig", SHAPE | {"logits_scaling": 8.0}, SEVEN),
    "cohere": ("CohereConfig", SHAPE | {"logit_scale": 0.0625}, SEVEN),
    "phi": ("PhiConfig", SHAPE, {"q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"}),
    "phi3": ("Phi3Config", SHAPE, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
    "neox": ("GPTNeoXConfig", SHAPE, FUSED),
    "gpt2": ("GPT2Config", GPT2, {"c_attn", "c_proj", "c_fc"}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        SHAPE | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        SEVEN,  # experts are fused tensors and stay frozen; the shared expert is adapted, routers are not
    ),
    "mixtral": ("MixtralConfig", SHAPE | {"num_local_experts": 4}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
}


def folder_of(path: Path, config: str, shape: dict[str, Any]) -> Path:
    """A randomly initialised model with the embedded tokenizer, as a folder."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        network = AutoModelForCausalLM.from_config(getattr(transformers, config)(**shape))
        network.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(resolve("embedded")) / name, path)
    return path


def section_of(path: Path | str, **kwargs: Any) -> ModelSection:
    return ModelSection(path=str(path), lora=LoraSection(rank=4, alpha=8), **kwargs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture(name: str, tmp_path: Path):
    config, shape, targets = ARCHITECTURES[name]
    model = Model(section_of(folder_of(tmp_path / "m", config, shape)), seed=3)
    adapted = {n.split(".lora_")[0].rpartition(".")[2] for n in model.parameters("student")}
    blocks = [n for n, m in model.network.named_modules() if "lora_" not in n and n.endswith(tuple(targets))]
    assert adapted == targets
    assert len(model.parameters("student")) == 2 * len(blocks)
    perturb(model, "student")
    rows = model.hidden([(View("student", PROMPT), TOKENS)]) @ model.head.T
    rows = rows if model.head_bias is None else rows + model.head_bias
    expected = logp(model, "student", PROMPT, TOKENS, grad=False)
    torch.testing.assert_close(rows.detach().log_softmax(-1), expected, atol=2e-5, rtol=1e-4)
    model._active = None
    with model.sampling("student") as network, torch.inference_mode():
        folded = network(input_ids=torch.tensor([PROMPT + TOKENS])).logits[0, 3:6].clone()
    torch.testing.assert_close(folded.log_softmax(-1), expected, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(expected, logp(model, "base", PROMPT, TOKENS, grad=False), atol=1e-3)


def gradients(path: str, checkpointing: bool) -> tuple[dict[str, torch.Tensor], int]:
    model = Model(section_of(path, gradient_checkpointing=checkpointing), seed=3)
    perturb(model, "student")
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    block = next(m for m in model.network.modules() if isinstance(m, torch.nn.ModuleList))[0]
    next(block.children()).register_forward_pre_hook(count)
    with model.training("student"):
        states = model.hidden([(View("student", PROMPT), TOKENS)])
        states.backward(torch.linspace(-1, 1, states.numel()).view_as(states))
        return {n: p.grad for n, p in model.parameters("student").items() if p.grad is not None}, runs


@pytest.mark.parametrize("name", ["embedded", "gpt2"])  # GPT-2's own configuration has dropout
def test_checkpointing_recomputes_and_gives_the_same_gradients(name: str, tmp_path: Path):
    path = name if name == "embedded" else str(folder_of(tmp_path / "m", "GPT2Config", GPT2))
    plain, once = gradients(path, False)
    recomputed, twice = gradients(path, True)
    assert (once, twice) == (1, 2)
    assert plain.keys() == recomputed.keys() != set()
    for key, value in plain.items():
        assert torch.equal(value, recomputed[key]), key


def test_checkpointing_leaves_sampling_its_cache():
    model = Model(section_of("embedded", gradient_checkpointing=True), seed=3)
    with model.training("student"):
        pass
    with model.sampling("student") as network, torch.inference_mode():
        assert network(input_ids=torch.tensor([PROMPT]), use_cache=True).past_key_values.get_seq_length() == len(PROMPT)


NOTHING, V100, T4, A100 = Machine(None), Machine((7, 0)), Machine((7, 5)), Machine((8, 0))


@pytest.mark.parametrize(
    ("machine", "keys", "expected"),
    [
        (NOTHING, {}, Choice("cpu", "float32", "sdpa", False, None)),
        (V100, {}, Choice("cuda", "float32", "sdpa", True, None)),
        (T4, {"dtype": "float16"}, Choice("cuda", "float16", "sdpa", True, None)),
        (V100, {"device": "cpu", "dtype": "bfloat16"}, Choice("cpu", "bfloat16", "sdpa", False, None)),
        (A100, {}, Choice("cuda", "bfloat16", "sdpa", True, None)),
        (A100, {"attention": "flash_attention_2"}, Choice("cuda", "bfloat16", "flash_attention_2", True, None)),
        (A100, {"dtype": "float32"}, Choice("cuda", "float32", "sdpa", True, None)),
        (A100, {"device": "cpu"}, Choice("cpu", "float32", "sdpa", False, None)),
        (A100, {"device": "cuda:1", "attention": "eager"}, Choice("cuda:1", "bfloat16", "eager", True, None)),
        (A100, {"device_map": "auto"}, Choice("cuda", "bfloat16", "sdpa", True, "auto")),
        (A100, {"gradient_checkpointing": False}, Choice("cuda", "bfloat16", "sdpa", False, None)),
        (NOTHING, {"device": "mps"}, Choice("mps", "float32", "sdpa", True, None)),
        (NOTHING, {"dtype": "bfloat16"}, Choice("cpu", "bfloat16", "sdpa", False, None)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_machine_settles_what_the_recipe_leaves_open(machine: Machine, keys: dict[str, Any], expected: Choice):
    assert hardware(ModelSection(path="embedded", **keys), machine) == expected


def test_a_gpu_that_is_not_there_is_told():
    with pytest.raises(PastError, match="torch sees no CUDA GPU"):
        hardware(ModelSection(path="embedded", device="cuda"), NOTHING)


def test_the_machine_is_the_gpu_that_the_recipe_means(monkeypatch: pytest.MonkeyPatch):
    gpus = [(8, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", gpus.__getitem__)
    assert Machine.here(ModelSection(path="embedded")) == A100
    assert Machine.here(ModelSection(path="embedded", device="cuda:1")) == T4
    assert Machine.here(ModelSection(path="embedded", device_map="auto")) == T4
    with pytest.raises(PastError, match=r"model.device = 'cuda:2', but torch sees 2 GPU\(s\)"):
        Machine.here(ModelSection(path="embedded", device="cuda:2"))


@pytest.mark.parametrize("machine", [V100, T4])
def test_emulated_bfloat16_is_refused_with_the_reason(machine: Machine):
    with pytest.raises(PastError, match=r"compute capability 7\.[05]\) has no bfloat16 units.*use 'auto'"):
        hardware(ModelSection(path="embedded", dtype="bfloat16"), machine)


def test_installing_flash_attention_does_not_end_the_sharing_of_prompts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_utils, "is_flash_attn_2_available", lambda: True)
    assert hardware(ModelSection(path="embedded"), A100).attention == "sdpa"


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("base", torch.bfloat16)])
def test_adapters_keep_float32_beside_a_half_precision_base(dtype: Any, expected: torch.dtype):
    section = ModelSection(path="embedded", dtype="bfloat16", lora=LoraSection(rank=4, alpha=8, dtype=dtype))
    model = Model(section, seed=3)
    kinds = {p.dtype for a in ("student", "teacher") for p in model.parameters(a).values()}
    assert kinds == {expected}
    assert model.head.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("keys", "base", "expected"),
    [
        ({}, "bfloat16", "bfloat16"),
        ({}, "float16", "float32"),
        ({}, "float32", "float32"),
        ({"compute": "float32"}, "bfloat16", "float32"),
        ({"compute": "base"}, "float16", "float16"),
        ({"dtype": "base", "compute": "float32"}, "bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_of_products_with_adapters(keys: dict[str, Any], base: str, expected: str):
    assert settle_lora(LoraSection(**keys), base) == expected


def beside_bfloat16(compute: str = "auto") -> Model:
    section = ModelSection(path="embedded", dtype="bfloat16", lora=LoraSection(rank=4, alpha=8, compute=compute))
    model = Model(section, seed=3)
    perturb(model, "student")
    return model


@pytest.mark.parametrize(("compute", "expected"), [("auto", set()), ("float32", {torch.float32})])
def test_adapters_are_multiplied_in_the_bases_dtype_and_learn_in_float32(compute: str, expected: set[torch.dtype]):
    model = beside_bfloat16(compute)
    with model.training("student"), Operations() as seen:
        states = model.hidden([(View("student", PROMPT), TOKENS)])
        states.backward(torch.ones_like(states))
    assert set(seen.products) == {torch.bfloat16} | expected
    assert {p.grad.dtype for p in model.parameters("student").values() if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None for p in model.parameters("student").values())


def test_products_in_bfloat16_are_off_by_its_roundings():
    """One layer, y = x W^T + s (x A^T) B^T, against the same in float64, entry by entry.

    bfloat16 rounds A, B, x A^T, its product with B^T, x W^T and the sum, each by half an eps of its size; s is a power
    of two. Backward: B, g B and the gradient of A; A, x A^T and the gradient of B. The sums inside are float32.
    """
    model = beside_bfloat16()
    model.activate("student")
    layer = next(m for n, m in model.peft.named_modules() if n.endswith("down_proj"))
    W, A, B = (m.weight for m in (layer.base_layer, layer.lora_A["student"], layer.lora_B["student"]))
    for factor in (A, B):
        factor.requires_grad_()
    draw = torch.Generator().manual_seed(0)
    x, g = (torch.randn(5, n, generator=draw).bfloat16() for n in W.shape[::-1])
    y = layer(x)
    y.backward(g)
    y, x, g, W, a, b = (t.detach().double() for t in (y, x, g, W, A, B))
    s, u = layer.scaling["student"], torch.finfo(torch.bfloat16).eps / 2 * 1.05  # products of roundings, and float32's
    exact = x @ W.T + s * (x @ a.T) @ b.T
    inner = s * (x.abs() @ a.abs().T) @ b.abs().T
    assert ((y - exact).abs() <= u * (4 * inner + (x @ W.T).abs() + exact.abs())).all()
    assert ((A.grad - s * (g @ b).T @ x).abs() <= 3 * u * s * (g.abs() @ b.abs()).T @ x.abs()).all()
    assert ((B.grad - s * g.T @ (x @ a.T)).abs() <= 3 * u * s * g.abs().T @ (x.abs() @ a.abs().T)).all()
    assert float((y - x @ W.T).abs().max()) > 10 * u * float(exact.abs().max())  # the adapter is seen


def test_steps_below_bfloat16s_spacing_add_up():
    model, step = beside_bfloat16(), 1e-6
    parameters = list(model.parameters("student").values())
    rounded = torch.cat([p.detach().bfloat16().flatten() for p in parameters])
    before = model.hidden([(View("student", PROMPT), TOKENS)]).detach()

    def move(times: int) -> None:
        with torch.no_grad():
            for p in parameters:
                for _ in range(times):
                    p.add_(step)

    move(1)
    now = torch.cat([p.detach().bfloat16().flatten() for p in parameters])
    assert float((now == rounded).float().mean()) > 0.9
    move(2000)
    after = model.hidden([(View("student", PROMPT), TOKENS)]).detach()
    effect = torch.cat([p.detach().flatten() for p in parameters]) - rounded.float()
    assert 1.8e-3 < float(effect.mean()) < 2.2e-3
    assert not torch.equal(after, before)


def test_float32_bases_keep_pefts_own_products():
    model = Model(section_of("embedded"), seed=3)
    assert model.lora_dtype == "float32"
    assert not any(isinstance(module, Factor) for module in model.peft.modules())


def test_half_precision_sampling_does_not_round_the_adapter_away():
    """Sums over another number of rows may round otherwise, by less than the adapter's effect; the effect is there."""
    model = Model(section_of("embedded", dtype="bfloat16"), seed=3)

    def trained() -> torch.Tensor:
        return (model.hidden([(View("student", PROMPT), TOKENS)]) @ model.head.T).float().detach()

    before = trained()
    with torch.no_grad():
        for parameter in model.parameters("student").values():
            parameter.add_(3e-3)
    model.bump("student")
    with model.sampling("student") as network, torch.inference_mode():
        sampled = network(input_ids=torch.tensor([PROMPT + TOKENS])).logits[0, 3:6].float()
    effect = float((trained() - before).abs().mean())
    assert effect > 0.02
    assert float((sampled - trained()).abs().mean()) < effect / 4


def test_placement_by_accelerate_changes_nothing():
    states = []
    for device_map in ("single", "auto"):
        model = Model(section_of("embedded", device_map=device_map), seed=3)
        perturb(model, "student")
        with model.sampling("student") as network, torch.inference_mode():
            logits = network(input_ids=torch.tensor([PROMPT])).logits.clone()
        states.append((model.hidden([(View("student", PROMPT), TOKENS)]), logits))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


def test_identity_tells_another_attention():
    kinds = [Model(section_of("embedded", attention=a)).identity()["compute"] for a in ("auto", "sdpa", "eager")]
    assert kinds == ["float32 sdpa", "float32 sdpa", "float32 eager"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelSection(path="/no/such/folder"), "model.path: no tokenizer can be loaded from '/no/such/folder'"),
        (ModelSection(path="embedded", lora=LoraSection(targets=["nope"])), "model.lora.targets"),
    ],
    ids=["folder", "targets"],
)
def test_what_cannot_be_loaded_is_told(section: ModelSection, message: str):
    with pytest.raises(PastError, match=message):
        Model(section)


def edit_config(path: Path, **keys: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def no_tokenizer(path: Path) -> None:
    for file in path.glob("*token*"):
        file.unlink()


def damaged(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def headless(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def small_head(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    rows = {name: tensors[name][:16].clone() for name in ("lm_head.weight", "model.embed_tokens.weight")}
    save_file(tensors | rows, path / "model.safetensors", {"format": "pt"})
    edit_config(path, vocab_size=16)


BROKEN: dict[str, tuple[Any, str]] = {
    "no_tokenizer": (no_tokenizer, "holds no tokenizer that can be loaded"),
    "damaged": (damaged, "a weights file in .* is damaged"),
    "no_weights": (lambda p: (p / "model.safetensors").unlink(), "cannot be loaded as a causal language model"),
    "headless": (headless, "lacks 1 weights of a LlamaForCausalLM, e.g. lm_head.weight"),
    "other_shape": (lambda p: edit_config(p, hidden_size=64), "where its config.json means"),
    "unknown": (lambda p: edit_config(p, model_type="nonesuch"), r"\(nonesuch\) cannot be loaded"),
    "not_json": (lambda p: (p / "config.json").write_text("{"), "config.json in .* cannot be read"),
    "quantised": (
        lambda p: edit_config(p, quantization_config={"quant_method": "gptq", "bits": 4}),
        r"holds quantised weights \(gptq\)",
    ),
    "encoder_decoder": (lambda p: edit_config(p, model_type="bart", is_encoder_decoder=True), "is an encoder-decoder"),
    "small_head": (small_head, "has ids up to 36, but the model's head has 16 rows"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_told_in_one_message(name: str, tmp_path: Path):
    spoil, message = BROKEN[name]
    path = folder_of(tmp_path / "m", "LlamaConfig", SHAPE)
    spoil(path)
    with pytest.raises(PastError, match=message) as caught:
        Model(section_of(path))
    assert "\n" not in str(caught.value)


def test_capped_logits_are_refused(tmp_path: Path):
    path = folder_of(tmp_path / "m", "Gemma2Config", SHAPE | {"head_dim": 8})
    with pytest.raises(PastError, match="caps its logits"):
        Network(section_of(path), str(path))


def test_logits_that_are_not_the_head_on_the_states_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = folder_of(tmp_path / "m", "GraniteConfig", SHAPE | {"logits_scaling": 8.0})
    monkeypatch.setattr(Network, "_logit_scale", lambda self, path: 1.0)
    with pytest.raises(PastError, match="otherwise than by a linear head"):
        Network(section_of(path), str(path))


def test_a_pulled_name_that_is_not_there_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PastError, match="past models pull smollm2-135m"):
        resolve("smollm2-135m")
