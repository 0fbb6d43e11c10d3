"""A model of the right shapes without weights: what `policy.tracing` runs the real code on."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import transformers
from peft import PeftModel
from torch import nn

from past_opsd.core.config import ModelSection
from past_opsd.core.nouns import Adapter
from past_opsd.policy.distributed import World
from past_opsd.policy.estimate import KNOWN
from past_opsd.policy.model import Model, Network
from past_opsd.policy.pretrained import read_config


class Words:
    """A tokenizer for which every word is a token, and a number is the token of that id."""

    chat_template = "{{ messages }}"
    eos_token_id = 0

    def __init__(self, vocabulary: int):
        self._vocabulary = vocabulary

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **kwargs: Any) -> str:
        """The messages' words."""
        return " ".join(message["content"] for message in conversation)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        words = text.split()
        return {"input_ids": [(int(w) if w.isdecimal() else zlib.crc32(w.encode())) % self._vocabulary for w in words]}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The words again."""
        return " ".join(map(str, token_ids))

    def get_vocab(self) -> dict[str, int]:
        """The highest id."""
        return {"": self._vocabulary - 1}


def configuration(section: ModelSection, path: str, layers: int | None = None) -> Any:
    """A model's configuration: of a known shape without a download, else its own; with as many layers as wanted."""
    if path in KNOWN:
        shape = KNOWN[path]
        config: Any = transformers.Qwen3Config(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.mlp,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            tie_word_embeddings=shape.tied,
            max_position_embeddings=40960,
        )
    else:
        config = read_config(section.model_copy(update={"path": path}))
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    return config


class Weightless(Model):
    """The model of a section on the section's device, mostly the meta device; its values are nobody's.

    On the CPU it has weights, drawn at random, and so shows what the allocator does.
    """

    def __init__(self, section: ModelSection, world: World | None = None, layers: int | None = None, split: int = 1):
        self._count = layers
        super().__init__(section, world=world, split=split)

    def _load(self, section: ModelSection, path: str) -> tuple[Any, nn.Module]:
        return _shapes(section, path, self._count)

    def _read_tokenizer(self, section: ModelSection) -> Any:
        return Words(configuration(section, section.path).get_text_config().vocab_size)

    def _prove(self, path: str) -> None:
        """Nothing to prove: the logits have no values."""

    def _adapters(self, base: Any, seed: int) -> PeftModel:
        with torch.device(self.choice.device):
            return super()._adapters(base, seed)

    def _load_expert(self, path: str) -> Network:
        return _Expert(self.section, path, self.choice, self.world)

    @property
    def max_context(self) -> int:
        """As the section says, also beyond what the model was made for."""
        return self.section.max_context or super().max_context

    def fingerprint(self, adapter: Adapter) -> str:
        """Nothing to read."""
        return ""


class _Expert(Network):
    def _load(self, section: ModelSection, path: str) -> tuple[Any, nn.Module]:
        return _shapes(section, path, None)

    def _prove(self, path: str) -> None:
        """Nothing to prove."""


def _shapes(section: ModelSection, path: str, layers: int | None) -> tuple[Any, nn.Module]:
    config = configuration(section, path, layers)
    with torch.device(section.device):
        network: Any = cast(Any, transformers.AutoModelForCausalLM).from_config(
            config, dtype=getattr(torch, section.dtype), attn_implementation=section.attention
        )
    return config, network.requires_grad_(False).eval()
