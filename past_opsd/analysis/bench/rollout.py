"""`past bench rollout`: tokens a second of our engines and of transformers' generate, on the same prompts.

Every contestant answers the same requests at the same temperature and token limit, in batches of the same size.
Responses end when the model ends them, so their lengths are ragged. Prompts are a recipe's own; its student samples.
vLLM takes part where it is installed (`make test-vllm` makes such an environment).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from past_opsd.core import config
from past_opsd.core.config import Sampling
from past_opsd.core.nouns import PastError, Tokens, View, derive_seed
from past_opsd.core.prompts import Prompts
from past_opsd.policy.model import Model
from past_opsd.rollout.engines import Engine, Request

Contestant = Callable[[], list[int]]
"""Answers all requests once and gives the responses' lengths."""


@dataclass(frozen=True)
class Line:
    """One contestant: tokens of a run, and seconds of each."""

    name: str
    tokens: int
    seconds: list[float]

    @property
    def speed(self) -> float:
        return self.tokens / statistics.median(self.seconds)


def run(args: argparse.Namespace) -> int:
    """Print the table and the ratios."""
    torch.set_num_threads(args.threads)
    recipe = config.load(args.recipe, args.overrides)
    model = Model(recipe.model, seed=1)
    model.perturb(seed=3, scale=0.01)  # folding an identity would be no work
    problems = config.plugin("task", recipe.task.name).build(recipe.task).train()
    prompts = Prompts(model.tokenizer, recipe.prompts)
    asked = [prompts.student(problems[i % len(problems)]) for i in range(args.requests)]
    sampling = recipe.rollout.student.model_copy(update={"max_new_tokens": args.tokens} if args.tokens else {})
    contestants = build(model, asked, sampling, args.batch)
    lines = measure(contestants, args.repeats)
    print(report(lines, args))
    return 0


def build(model: Model, prompts: Sequence[Tokens], sampling: Sampling, batch: int) -> dict[str, Contestant]:
    """Every contestant that can run here."""
    requests = [Request(View("student", prompt), derive_seed("bench", i)) for i, prompt in enumerate(prompts)]
    out: dict[str, Contestant] = {"torch engine": _engine(model, "torch", {"batch": batch}, requests, sampling)}
    out["generate, adapter folded"] = lambda: _folded(model, prompts, sampling, batch)
    out["generate, PEFT"] = lambda: _with_peft(model, prompts, sampling, batch)
    if importlib.util.find_spec("vllm") is not None:
        options = {"arguments": {"max_num_seqs": batch, "enforce_eager": True}, "mismatch_samples": 0}
        try:
            out["vLLM"] = _engine(model, "vllm", options, requests, sampling)
        except PastError as error:
            print(f"without vLLM: {error}\n")
    return out


def _engine(
    model: Model, name: str, options: dict[str, Any], requests: Sequence[Request], sampling: Sampling
) -> Contestant:
    module = config.plugin("engine", name)
    engine = cast(Engine, module.build(module.Options(**options), model))
    for adapter in ("student", "teacher"):
        engine.publish(adapter, model.versions[adapter])
    return lambda: [len(r.tokens) for r in engine.sample(requests, sampling, model.versions)]


def _folded(model: Model, prompts: Sequence[Tokens], sampling: Sampling, batch: int) -> list[int]:
    with model.sampling("student") as network:
        return _generate(model, network, prompts, sampling, batch)


def _with_peft(model: Model, prompts: Sequence[Tokens], sampling: Sampling, batch: int) -> list[int]:
    model.activate("student")
    return _generate(model, model.peft, prompts, sampling, batch)


def _generate(model: Model, network: Any, prompts: Sequence[Tokens], sampling: Sampling, batch: int) -> list[int]:
    """transformers' own sampler, as a trainer calls it: left-padded batches, each until its last sequence ends."""
    lengths: list[int] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        width = max(map(len, part))
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(part):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            output = network.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=sampling.temperature > 0,
                temperature=sampling.temperature or None,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=sorted(model.stops),
                pad_token_id=0,
            )
        lengths += [_length(row, model.stops) for row in output[:, width:].tolist()]
    return lengths


def _length(row: Sequence[int], ends: frozenset[int]) -> int:
    """Tokens up to and with the first end."""
    return next((i + 1 for i, token in enumerate(row) if token in ends), len(row))


def measure(contestants: dict[str, Contestant], repeats: int) -> list[Line]:
    """Warm every contestant up, then let them take turns: other load on the machine meets all alike."""
    tokens = {name: sum(answer()) for name, answer in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, answer in contestants.items():
            began = time.perf_counter()
            answer()
            seconds[name].append(time.perf_counter() - began)
    return [Line(name, tokens[name], seconds[name]) for name in contestants]


def report(lines: Sequence[Line], args: argparse.Namespace) -> str:
    """The table as text; the ratio is ours over theirs."""
    ours = lines[0]
    text = [
        f"Rollouts of {args.recipe}: {args.requests} requests, batch {args.batch}, {args.threads} thread(s), "
        f"median of {args.repeats}",
        "",
        f"{'engine':26s}{'tokens':>9s}{'tokens/s':>11s}{'ours / it':>12s}",
    ]
    for line in lines:
        text.append(f"{line.name:26s}{line.tokens:9d}{line.speed:11.1f}{ours.speed / line.speed:12.2f}")
    if importlib.util.find_spec("vllm") is None:
        text += ["", "vLLM is not installed here; 'make test-vllm' makes an environment that has it."]
    return "\n".join(text)
