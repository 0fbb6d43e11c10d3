"""One frozen base with two LoRA adapters, `student` and `teacher`, both starting as the identity (q_0 = p_0).

`hidden` gives the final hidden states of (view, tokens) for the training side; `sampling` lends the same network with
one adapter folded into the weights for the rollout side, and puts the weights back as they were, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from past_opsd.config import ModelSection
from past_opsd.types import Adapter, PastError, Tokens, View

transformers_logging.disable_progress_bar()

TRAINABLE: tuple[Adapter, Adapter] = ("student", "teacher")


def resolve(path: str) -> str:
    """'embedded' and 'embedded-expert' ship with the package; anything else is a folder or a hub id."""
    shipped = {"embedded": "embedded_model", "embedded-expert": "embedded_expert"}
    return str(Path(__file__).parent / "tasks" / shipped[path]) if path in shipped else path


def load_tokenizer(section: ModelSection) -> Any:
    """The model's own tokenizer."""
    path = resolve(section.path)
    try:
        return AutoTokenizer.from_pretrained(
            path, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise PastError(_unloadable("tokenizer", section.path, error)) from None


def _tokenizer_text(tokenizer: Any) -> str:
    """What decides how text becomes ids; calls leave their padding and truncation behind, so those are left out."""
    if not tokenizer.is_fast:
        return json.dumps([tokenizer.get_vocab(), str(tokenizer.special_tokens_map)], sort_keys=True)
    plain = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps({k: v for k, v in plain.items() if k not in ("padding", "truncation")}, sort_keys=True)


def _unloadable(what: str, path: str, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    return f"model.path: no {what} can be loaded from '{path}' ({reason}); give a local folder or a hub id that exists"


class Network:
    """A frozen causal language model: hidden states and the output projection."""

    def __init__(self, section: ModelSection, path: str):
        source = resolve(path)
        kwargs: dict[str, Any] = {"trust_remote_code": section.trust_remote_code}
        if path == section.path:
            kwargs["revision"] = section.revision
        try:
            self.config = AutoConfig.from_pretrained(source, **kwargs)
            network = AutoModelForCausalLM.from_pretrained(
                source,
                config=self.config,
                dtype=getattr(torch, section.dtype),
                attn_implementation=section.attention,
                **kwargs,
            )
        except (OSError, ValueError, ImportError) as error:
            raise PastError(_unloadable("causal language model", path, error)) from None
        self._refuse_unsupported(path)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network = cast(nn.Module, network).requires_grad_(False).to(self.device).eval()

    def _refuse_unsupported(self, path: str) -> None:
        plain = self.config.to_dict()
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if plain.get(key) not in (None, 1, 1.0):
                raise PastError(f"'{path}' scales its logits ({key}); losses from hidden states do not know that")

    @property
    def head(self) -> Tensor:
        """The output projection [V, H]."""
        return cast(Any, self.network).get_output_embeddings().weight

    @property
    def head_bias(self) -> Tensor | None:
        """The output projection's bias, where there is one."""
        return cast(Any, self.network).get_output_embeddings().bias

    def states(self, paths: Sequence[tuple[View, Tokens]]) -> Tensor:
        """Final hidden states at the positions that predict each path's tokens, paths one after the other [sum T, H].

        Row t of a path is [eq:student-prefix-state]: it reads the prompt and y_<t and predicts y_t. Nothing is
        re-tokenised and the last token itself is never read.
        """
        sequences = [view.prompt + tokens[:-1] for view, tokens in paths]
        width = max(len(s) for s in sequences)
        ids = torch.zeros(len(sequences), width, dtype=torch.long)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        backbone = cast(Any, self.network).base_model
        states = backbone(
            input_ids=ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False
        ).last_hidden_state
        rows = [states[i, len(v.prompt) - 1 : len(v.prompt) + len(y) - 1] for i, (v, y) in enumerate(paths)]
        return torch.cat(rows)

    def digest_base(self) -> str:
        """A hash of the frozen weights."""
        weights = hashlib.sha256()
        for name, parameter in sorted(self.network.state_dict().items()):
            if "lora_" not in name:
                weights.update(name.replace("base_layer.", "").encode())
                weights.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return weights.hexdigest()[:16]


class Model(Network):
    """The frozen base, its two adapters, their versions; and a separate frozen expert where the recipe names one."""

    def __init__(self, section: ModelSection, seed: int = 0):
        self.section = section
        self.tokenizer = load_tokenizer(section)
        super().__init__(section, section.path)
        self.expert = None if section.expert is None else self._load_expert(section.expert)
        self.peft = self._adapters(self.network, seed).to(self.device)
        self.peft.eval()  # no dropout anywhere: live and frozen views are functions
        self._layers = [m for m in self.peft.modules() if isinstance(m, LoraLayer)]
        self._parameters = {a: self._named(a) for a in TRAINABLE}
        self._phase: Adapter | None = None
        self._active: Adapter | None = None
        self.versions: dict[Adapter, int] = {"base": 0, "student": 0, "teacher": 0}
        self._folded: tuple[Adapter, int, list[Tensor]] | None = None
        self.activate("base")

    def _adapters(self, base: Any, seed: int) -> PeftModel:
        lora = self.section.lora
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=0.0,
            target_modules=lora.targets,
            task_type="CAUSAL_LM",
            bias="none",
        )
        try:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = cast(PeftModel, get_peft_model(base, config, adapter_name="student"))
                model.add_adapter("teacher", config)
        except ValueError as error:
            raise PastError(f"model.lora.targets = {lora.targets!r} does not fit this model: {error}") from None
        return model

    def _load_expert(self, path: str) -> Network:
        expert = Network(self.section, path)
        tokenizer = load_tokenizer(self.section.model_copy(update={"path": path, "revision": None}))
        if _tokenizer_text(tokenizer) != _tokenizer_text(self.tokenizer) or len(expert.head) != len(self.head):
            raise PastError(
                f"model.expert = '{path}' has another vocabulary than model.path = '{self.section.path}'; "
                "full-vocabulary distillation needs the same tokens"
            )
        return expert

    def _named(self, adapter: Adapter) -> dict[str, nn.Parameter]:
        return {n: p for n, p in sorted(self.peft.named_parameters()) if f".{adapter}." in n and "lora_" in n}

    def parameters(self, adapter: Adapter) -> dict[str, nn.Parameter]:
        """An adapter's parameters by name, in a fixed order."""
        return self._parameters[adapter]

    def activate(self, adapter: Adapter) -> None:
        """Route forwards through one adapter, or through the bare base."""
        if adapter != self._active:
            for layer in self._layers:
                if adapter == "base":
                    layer.enable_adapters(False)
                else:
                    layer.enable_adapters(True)
                    layer.set_adapter(adapter)
            self._active = adapter
        # PEFT makes whatever it activates trainable; only the phase decides that here.
        for name in TRAINABLE:
            for parameter in self._parameters[name].values():
                parameter.requires_grad_(name == self._phase)

    @contextmanager
    def training(self, adapter: Adapter) -> Iterator[None]:
        """A phase: inside it exactly this adapter's parameters are trainable; outside none are."""
        self._phase = adapter
        self.activate(adapter)
        try:
            yield
        finally:
            self._phase = None
            self.activate("base")

    def trainable(self) -> set[str]:
        """Names of all parameters that would get a gradient now."""
        return {name for name, parameter in self.peft.named_parameters() if parameter.requires_grad}

    def bump(self, adapter: Adapter) -> None:
        """The adapter moved: a new version, so nothing made from the old one is served any more."""
        self.versions[adapter] += 1

    def set_versions(self, versions: Mapping[Adapter, int]) -> None:
        """Versions as a checkpoint recorded them; anything made from the weights before is forgotten."""
        self.versions.update(versions)
        self._folded = None

    def digest(self, adapter: Adapter) -> str:
        """A hash of an adapter's bytes."""
        digest = hashlib.sha256()
        for name, parameter in self._parameters[adapter].items():
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def save_adapter(self, adapter: Adapter, folder: Path) -> None:
        """Write an adapter as plain PEFT loads it."""
        tensors = get_peft_model_state_dict(self.peft, adapter_name=adapter)
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, folder / "adapter_model.safetensors")
        config = self.peft.peft_config[adapter]
        config.inference_mode = True
        config.save_pretrained(str(folder))

    @property
    def max_context(self) -> int:
        """Prompt plus response, in tokens."""
        own = self.config.get_text_config().max_position_embeddings
        return min(own, self.section.max_context or own)

    def hidden(self, paths: Sequence[tuple[View, Tokens]]) -> Tensor:
        """`states` under the views' adapter, of which there must be one."""
        adapters: set[Adapter] = {view.adapter for view, _ in paths}
        if len(adapters) != 1:
            raise ValueError(f"one adapter per forward, not {sorted(adapters)}")
        (adapter,) = adapters
        if adapter == "expert":
            if self.expert is None:
                raise PastError(
                    "this method distills from a separate teacher: set model.expert to its folder or hub id"
                )
            return self.expert.states(paths)
        self.activate(adapter)
        return self.states(paths)

    @contextmanager
    def sampling(self, adapter: Adapter) -> Iterator[nn.Module]:
        """The network with one adapter folded into its weights; the base's own tensors are put back afterwards."""
        folded = self._fold(adapter)
        self.activate("base")
        layers = [cast(Any, layer).base_layer for layer in self._layers]
        originals = [layer.weight.data for layer in layers]
        try:
            for layer, weight in zip(layers, folded, strict=True):
                layer.weight.data = weight
            yield self.network
        finally:
            for layer, weight in zip(layers, originals, strict=True):
                layer.weight.data = weight

    @torch.no_grad()
    def _fold(self, adapter: Adapter) -> list[Tensor]:
        if self._folded is not None and self._folded[:2] == (adapter, self.versions[adapter]):
            return self._folded[2]
        weights = [cast(Any, layer).base_layer.weight.data for layer in self._layers]
        if adapter != "base":
            deltas = (cast(Any, layer).get_delta_weight(adapter) for layer in self._layers)
            weights = [weight + delta.to(weight.dtype) for weight, delta in zip(weights, deltas, strict=True)]
        self._folded = (adapter, self.versions[adapter], weights)
        return weights

    def identity(self) -> dict[str, str]:
        """What a checkpoint must find again: base weights, expert, tokenizer, chat template."""
        tokenizer = hashlib.sha256(_tokenizer_text(self.tokenizer).encode())
        template = hashlib.sha256(str(self.tokenizer.chat_template).encode())
        return {
            "base": f"{self.section.path} {self.digest_base()}",
            "expert": "none" if self.expert is None else f"{self.section.expert} {self.expert.digest_base()}",
            "tokenizer": tokenizer.hexdigest()[:16],
            "chat_template": template.hexdigest()[:16],
        }
