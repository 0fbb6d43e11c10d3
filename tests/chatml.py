"""A ChatML tokenizer in memory, with the thinking switch of Qwen3's template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]
# ChatML, piece by piece; TURNS keeps what it is given.
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As Qwen3 does: thinking off is an empty block that the prompt already closes.
THINK = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As DeepSeek-R1 does: thinking on is a block that the prompt already opens.
OPENED = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)


def tokenizer(template: str | None, adds_bos: bool = False, **special: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, in memory."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
        )
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | special
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in names.items() if v is not None})
    made.chat_template = template
    return made


def model(folder: Path, template: str) -> Path:
    """A randomly initialised Qwen3 with such a tokenizer, as a folder."""
    words = tokenizer(template)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    with torch.random.fork_rng():
        torch.manual_seed(5)
        network = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=len(words), num_key_value_heads=2, eos_token_id=words.eos_token_id, **shape)
        )
        network.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
