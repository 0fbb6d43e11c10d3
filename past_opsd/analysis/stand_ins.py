"""What stands in for the model and the data of a rehearsed recipe: made on the spot, in the form of the real ones.

The model has Qwen3's architecture, a tokenizer of the family's kind and a chat template of the family's form, thinking
mode included. Its weights are random but for one thing: its embeddings and its head are laid out so that after a token
some tokens are likely. So it mostly writes what `_FOLLOWS` allows: a thinking part where the prompt leaves that open, a
box with a digit, an end. The digits are the answers of the data at random, so about half of its responses are right,
some are cut and some are noise, and the recipe's own verifier tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, logging

from past_opsd.core.config import Recipe

pa: Any = pyarrow  # it has no types
pq: Any = pyarrow.parquet
PAD, START, END, THINK, THOUGHT = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"
# One turn after the other; the prompt opens the assistant's, and where thinking is off also closes an empty thought.
TEMPLATE = (
    "{%- for message in messages %}"
    "{%- set text = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in text %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TRAIN_ROWS, EVALUATION_ROWS = 40, 2
VOCABULARY = 640
WIDTH = 64
ANSWERS = ("1", "2")
WORDS = (" Then", " So", " Hence")
# After a token, as one piece of text, the tokens that are likely.
_FOLLOWS: dict[str, tuple[str, ...]] = {
    "\n": (THINK,),
    THINK: WORDS,
    WORDS[0]: (*WORDS, THOUGHT),
    WORDS[1]: (*WORDS, THOUGHT),
    WORDS[2]: (THOUGHT,),
    THOUGHT: ("\n\n",),
    "\n\n": (" Thus", "\\boxed"),
    " Thus": (" Thus", "\\boxed"),
    "\\boxed": ("{",),
    "{": ANSWERS,
    ANSWERS[0]: ("}",),
    ANSWERS[1]: ("}",),
    "}": (END,),
}
_LIKELY = 12.0
"""The logit of what is likely, over others at about zero."""


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the family's kind, its merges learned from these texts; digits stand alone."""
    made = Tokenizer(BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator([*texts, *[f"{text}." for text in _FOLLOWS] * 99], trainer)
    made.add_special_tokens([AddedToken(name, special=True) for name in (PAD, START, END)])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in (THINK, THOUGHT)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=PAD, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def make_model(tokenizer: PreTrainedTokenizerFast, positions: int) -> Qwen3ForCausalLM:
    """A block with random weights between embeddings and a head that say what follows what."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
        dtype="bfloat16",
    )
    generator = torch.Generator().manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.02, generator=generator)
        table, head = model.model.embed_tokens.weight, model.lm_head.weight
        table.normal_(0, 1, generator=generator)
        for before, after in _FOLLOWS.items():
            direction = torch.nn.functional.normalize(table[_id(tokenizer, before)].float(), dim=0)
            for token in after:
                # A final state has the length sqrt(WIDTH).
                head[_id(tokenizer, token)] += _LIKELY / WIDTH**0.5 * direction
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model.bfloat16()


def _id(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    (found,) = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def save_model(folder: Path, texts: Iterable[str], positions: int) -> None:
    """As a folder that loads as one from the hub does."""
    logging.disable_progress_bar()
    tokenizer = make_tokenizer(texts)
    make_model(tokenizer, positions).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    """Problems that differ, with solutions and answers, as columns of the real sets."""
    made: list[dict[str, str]] = []
    for n in range(first, first + count):
        answer = ANSWERS[n % len(ANSWERS)]
        a = n + 3
        left = a + int(answer)
        made.append(
            {
                "problem": f"A shelf holds {left} books and {a} of them are lent. How many are left?",
                "solution": f"Of {left} books {a} are lent, so {left} - {a} = {answer} are left. \\boxed{{{answer}}}",
                "answer": answer,
            }
        )
    return made


def save_rows(file: Path, found: list[dict[str, str]]) -> None:
    """As Parquet, which is what the hub serves."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(found), file)


def save_sets(home: Path, names: Iterable[str]) -> None:
    """Problems to train on, and those of every held-out set."""
    save_rows(home / "train.parquet", rows(TRAIN_ROWS))
    for number, name in enumerate(sorted(names)):
        found = rows(EVALUATION_ROWS, TRAIN_ROWS + number * EVALUATION_ROWS)
        save_rows(home / f"{name}.parquet", [{key: row[key] for key in ("problem", "answer")} for row in found])


def with_rows(recipe: Recipe, home: Path) -> Recipe:
    """The recipe on the sets that `save_sets` makes there, where it reads any; a task that makes its own stays."""
    if not hasattr(recipe.task, "train"):
        return recipe
    sets = {name: str(home / f"{name}.parquet") for name in recipe.task.evaluation}
    made = {"train": str(home / "train.parquet"), "evaluation": sets, "columns": {}}
    task = recipe.task.model_copy(update=made)
    return recipe.model_copy(update={"task": task})
