"""Make the embedded base model: a tokenizer, and a tiny Qwen3 trained on the corpus of a made world.

    python scripts/make_embedded_model.py --seed 17 --out past_opsd/tasks/embedded_model
    python scripts/make_embedded_model.py --world weaker-teacher --seed 17 --out /tmp/weaker

The world, its corpus and the prompts are in `past_opsd.tasks.embedded`. With one thread (the default) a seed
gives the same weights again on the same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from past_opsd.core.nouns import Problem, derive_seed
from past_opsd.tasks import embedded
from past_opsd.tasks.embedded import HINDSIGHT, OPERATIONS, REFERENCE, STUDENT, WORLDS, Document, World, draw_document

PAD, END, UNKNOWN, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|unk|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, END, UNKNOWN, USER, ASSISTANT)
PAD_ID, END_ID, ASSISTANT_ID = (SPECIAL.index(token) for token in (PAD, END, ASSISTANT))
# The bare separators are what is left of a cut attempt whose trailing blank was stripped.
MARKS = ("=", "; ", ";", ", ", ",", "\\boxed{", "}", "Problem: ", "\nAttempt: ", "\nReference: ")
PIECES = (*"0123456789", *OPERATIONS, *MARKS)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ('user', 'assistant') -%}"
    "{{- raise_exception('Only user and assistant messages are known here, not ' + message['role'] + '.') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
POSITIONS = 256
NEW_TOKENS = 34


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A closed vocabulary, split by longest match.

    No piece of a text can be read in two ways, so decoding and encoding again gives the same ids back.
    """
    vocabulary = {piece: i for i, piece in enumerate((*SPECIAL, *PIECES))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    longest_first = "|".join(re.escape(piece) for piece in sorted(PIECES, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """The untrained model."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    torch.manual_seed(derive_seed(seed, "initial weights") % 2**63)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return model


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, padded on the right; labels are the assistant's tokens with its end, -100 elsewhere."""
    texts = [
        render(tokenizer, {"role": "user", "content": d.prompt}, {"role": "assistant", "content": d.answer})
        for d in documents
    ]
    rows = [torch.tensor(row) for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
    answer = ids.eq(ASSISTANT_ID).cumsum(1).bool() & ids.ne(ASSISTANT_ID) & ids.ne(PAD_ID)
    return ids, ids.masked_fill(~answer, -100)


def render(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, str], open_turn: bool = False) -> str:
    """The chat as text; `open_turn` leaves it with the assistant about to speak."""
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open_turn))


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, world: World, steps: int, batch: int) -> float:
    """Train on the answers; returns the mean loss per token of the last fifty steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.05)
    warmup, floor = 50, 0.03

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    losses = []
    for step in range(steps):
        documents = [draw_document(world, step * batch + i) for i in range(batch)]
        optimizer.zero_grad()
        losses.append(_backward(model, tokenizer, documents))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {losses[-1]:.4f}", flush=True)
    model.eval()
    return _mean(losses[-50:])


def _backward(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> float:
    """Gradient of the mean loss per answer token, in four parts of like length to save padding."""
    ordered = sorted(documents, key=lambda d: len(d.prompt) + len(d.answer))
    size = math.ceil(len(ordered) / 4)
    parts = [encode(tokenizer, ordered[i : i + size]) for i in range(0, len(ordered), size)]
    count = sum(int((labels != -100).sum()) for _, labels in parts)
    total = 0.0
    for ids, labels in parts:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


@dataclass(frozen=True)
class Sample:
    """One sampled answer, verified."""

    problem: Problem
    text: str
    length: int
    finished: bool

    @property
    def correct(self) -> bool:
        box = f"\\boxed{{{self.problem.answer}}}"
        return self.finished and self.text.endswith(box) and self.text.count("\\boxed{") == 1


@torch.inference_mode()
def sample(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    prompts: Sequence[str],
    seed: int,
    size: int = 400,
) -> list[Sample]:
    """One answer to each prompt at temperature 1."""
    torch.manual_seed(seed)
    samples = []
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        texts = [render(tokenizer, {"role": "user", "content": p}, open_turn=True) for p in prompts[part]]
        inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
        for problem, row in zip(problems[part], output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ids = [i for i in row if i != PAD_ID]
            text = str(tokenizer.decode(ids, skip_special_tokens=True))
            samples.append(Sample(problem, text, len(ids), ids[-1] == END_ID))
    return samples


@dataclass(frozen=True)
class Row:
    """What one prompt gives; success is the macro average over the three lengths, in percent."""

    prompt: str
    success: float
    detailed: float
    terse: float
    finished: float
    tokens: float

    @classmethod
    def of(cls, prompt: str, samples: Sequence[Sample]) -> Row:
        by_task = [[s.correct for s in samples if s.problem.extra["task"] == task] for task in embedded.LENGTHS]
        styles = [embedded.style(s.text) for s in samples]
        return cls(
            prompt,
            100 * _mean([_mean(task) for task in by_task if task]),
            100 * _mean([s == "detailed" for s in styles]),
            100 * _mean([s == "terse" for s in styles]),
            100 * _mean([s.finished for s in samples]),
            _mean([s.length for s in samples]),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: int, seed: int = 0) -> list[Row]:
    """The untrained student's and teacher's success under each prompt, on held-out problems.

    The attempts in the prompts are the student's own, sampled under the student prompt.
    """
    task = embedded.build(embedded.Options(train_problems=1, eval_problems=problems, seed=seed))
    # The lengths in turn, so that the neighbour whose attempt is taken for the shuffled prompt differs in length.
    items = [p for group in zip(*task.evaluation().values(), strict=True) for p in group]

    def prompts(template: str, attempts: Sequence[str]) -> list[str]:
        return [
            template.format(problem=p.text, student_output=attempt, reference_solution=p.solution)
            for p, attempt in zip(items, attempts, strict=True)
        ]

    empty = [""] * len(items)
    student = sample(model, tokenizer, items, prompts(STUDENT, empty), seed + 1)
    attempts = [s.text for s in student]
    reference = sample(model, tokenizer, items, prompts(REFERENCE, empty), seed + 2)
    matching = sample(model, tokenizer, items, prompts(HINDSIGHT, attempts), seed + 3)
    shuffled = sample(model, tokenizer, items, prompts(HINDSIGHT, attempts[4:] + attempts[:4]), seed + 4)
    blank = sample(model, tokenizer, items, prompts(HINDSIGHT, empty), seed + 5)
    pairs = list(zip(student, matching, strict=True))
    return [
        Row.of("student", student),
        Row.of("reference", reference),
        Row.of("hindsight", matching),
        Row.of("hindsight, failed attempts", [after for before, after in pairs if not before.correct]),
        Row.of("hindsight, correct attempts", [after for before, after in pairs if before.correct]),
        Row.of("hindsight, another problem's attempt", shuffled),
        Row.of("hindsight, empty attempt", blank),
    ]


def table(rows: Sequence[Row]) -> str:
    """The measured rows in Markdown."""
    lines = ["| prompt | success % | detailed % | terse % | finished % | tokens |", "|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(
            f"| {r.prompt} | {r.success:.1f} | {r.detailed:.1f} | {r.terse:.1f} | {r.finished:.1f} | {r.tokens:.1f} |"
        )
    return "\n".join(lines)


CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---
# Embedded base model

A tiny Qwen3 ({parameters:,} parameters, float32) for chains of operations modulo 10. It is a laboratory: the
corpus was made so that the model knows many facts wrongly, answers better when a reference solution is in the
prompt, and partly repeats an attempt in the prompt. Nothing here says anything about real language models.

Made by `python scripts/make_embedded_model.py {arguments}`
(torch {torch}, one thread gives the same bits again on the same machine): {steps:,} AdamW steps of {batch} documents,
drawn from training chains only. What was put in, by the names of `World` in `past_opsd/tasks/embedded.py`:

```json
{world}
```

Measured on 3 x {problems} held-out problems, one sample each, temperature 1, at most {new_tokens} new tokens;
success is the macro average over chain3, chain4 and chain5, attempts are the model's own, and tokens count the end:

{table}
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; each parameter of the world is a flag that overrides the named world's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, tokenizer and model card")
    parser.add_argument("--world", choices=WORLDS, default="recommended")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--batch", type=int, default=64, help="documents per step")
    parser.add_argument("--threads", type=int, default=1, help="more than one may change the last bits")
    parser.add_argument("--problems", type=int, default=800, help="held-out problems per length to measure on")
    for parameter in fields(World):
        flag = f"--{parameter.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(parameter.default), help=f"World.{parameter.name}")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make, measure and save."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    world = make_world(options)
    started = time.perf_counter()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, world.seed)
    loss = train(model, tokenizer, world, options.steps, options.batch)
    trained = time.perf_counter()
    rows = measure(model, tokenizer, options.problems)
    measured = time.perf_counter()
    print(f"loss {loss:.4f}; trained in {trained - started:.0f} s, measured in {measured - trained:.0f} s")
    print(table(rows))

    options.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(options.out)
    (options.out / "README.md").write_text(make_card(options, model.num_parameters(), rows))


def make_world(options: argparse.Namespace) -> World:
    """The named world with the parameters that were given."""
    return replace(WORLDS[options.world], **_given(options))


def make_card(options: argparse.Namespace, parameters: int, rows: Sequence[Row]) -> str:
    """The model card: how the weights were made, what was put in, what was measured."""
    world = make_world(options)
    flags = [f"--world {options.world}"] if options.world != "recommended" else []
    flags += [f"--{k.replace('_', '-')} {v}" for k, v in {"seed": world.seed, **_given(options)}.items()]
    return CARD.format(
        parameters=parameters,
        arguments=" ".join([*flags, "--out DIR"]),
        torch=torch.__version__,
        steps=options.steps,
        batch=options.batch,
        world=json.dumps(asdict(world), indent=1),
        problems=options.problems,
        new_tokens=NEW_TOKENS,
        table=table(rows),
    )


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {f.name: vars(options)[f.name] for f in fields(World) if vars(options)[f.name] is not None}


if __name__ == "__main__":
    main()
