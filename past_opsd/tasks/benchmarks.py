r"""Held-out benchmarks by name, from the Hugging Face hub or from files of your own, and how they are evaluated.

    [task]
    name = "benchmarks"
    sets = ["aime24", "aime25", "hmmt25"]
    files = { aime24 = "aime24.jsonl" }       # instead of the hub

For evaluation alone: there is nothing to train on. `evaluation_recipe` makes the recipe behind `past eval --benchmark`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from past_opsd.core import config
from past_opsd.core.config import Place, Recipe, Section
from past_opsd.core.nouns import PastError, Problem
from past_opsd.core.reading import is_list
from past_opsd.tasks import Problems
from past_opsd.tasks._columns import Reading, load
from past_opsd.tasks.dataset import accept, identity


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A public set: its name, where it is, how many problems it has."""

    title: str
    source: str
    problems: int


BENCHMARKS: Mapping[str, Benchmark] = {
    "aime24": Benchmark("AIME 2024", "hf:HuggingFaceH4/aime_2024", 30),
    "aime25": Benchmark("AIME 2025", "hf:yentinglin/aime_2025", 30),
    "hmmt25": Benchmark("HMMT February 2025", "hf:MathArena/hmmt_feb_2025", 30),
    "math500": Benchmark("MATH-500", "hf:HuggingFaceH4/MATH-500?split=test", 500),
    "gsm8k": Benchmark("GSM8K", "hf:openai/gsm8k?config=main&split=test", 1319),
}


@dataclass(frozen=True, slots=True)
class Preset:
    """How responses are sampled in evaluation. The prompt, the last box and the macro average are the same for all."""

    title: str
    temperature: float
    top_p: float
    top_k: int
    samples: int = 12
    max_new_tokens: int = 38_912
    max_context: int = 40_960

    def overrides(self) -> list[str]:
        """As settings of a recipe."""
        pass_k = sorted({k for k in (1, 4, self.samples) if k <= self.samples})
        return [
            f"model.max_context={self.max_context}",
            f"evaluation.samples={self.samples}",
            f"evaluation.pass_k={pass_k}",
            f"evaluation.sampling.temperature={self.temperature}",
            f"evaluation.sampling.top_p={self.top_p}",
            f"evaluation.sampling.top_k={self.top_k}",
            "evaluation.sampling.min_p=0.0",
            f"evaluation.sampling.max_new_tokens={self.max_new_tokens}",
        ]


PRESETS: Mapping[str, Preset] = {
    "paper": Preset("the paper's protocol", temperature=1.0, top_p=1.0, top_k=0),
    "card": Preset("Qwen3's model card, thinking mode", temperature=0.6, top_p=0.95, top_k=20),
}


class Options(Section):
    """Held-out benchmarks; for evaluation alone."""

    sets: list[str] = Field(description=f"which benchmarks: {', '.join(BENCHMARKS)}, or names in `files`")
    files: Annotated[dict[str, str], Place(surely=True)] = Field(
        default={}, description="sources in place of the hub's, or of further sets, by name"
    )
    limit: int | None = Field(default=None, ge=1, description="use only so many problems of each set, the first ones")


def build(options: Options) -> Problems:
    """Read every set now."""
    reading = Reading(keep=(), needs_solution=False, limit=options.limit)
    sets: dict[str, tuple[Problem, ...]] = {}
    notes: list[str] = []
    for name, source in sources(options.sets, options.files).items():
        sets[name] = accept(load(source, reading), "refuse", notes).problems
        known = BENCHMARKS.get(name)
        if known is not None and options.limit is None and len(sets[name]) != known.problems:
            notes.append(f"{source}: {len(sets[name])} problems where {known.title} has {known.problems}")
    return Problems(identity("benchmarks", list(sets.values())), (), sets, notes=tuple(notes))


def sources(names: Sequence[str], files: Mapping[str, str]) -> dict[str, str]:
    """Where each named set is read from."""
    unknown = [name for name in [*names, *files] if name not in BENCHMARKS and name not in files]
    if unknown or not names:
        said = f"no benchmark '{unknown[0]}'" if unknown else "no benchmark named"
        raise PastError(
            f'{said}; known are {", ".join(BENCHMARKS)}, others by a file: files = {{ mine = "mine.jsonl" }}'
        )
    unused = sorted(set(files) - set(names))
    if unused:
        raise PastError(f"files names '{unused[0]}', which is not among the sets {', '.join(names)}")
    return {name: files[name] if name in files else BENCHMARKS[name].source for name in names}


def evaluation_recipe(
    model: str, benchmarks: Sequence[str], preset: str, overrides: Sequence[str] = (), adapter: Path | None = None
) -> Recipe:
    """The recipe that evaluates `model` on the benchmarks; an entry `name=source` of `benchmarks` names a file.

    With an adapter its LoRA shape is taken from its own `adapter_config.json`. `overrides` win.
    """
    if preset not in PRESETS:
        raise PastError(f"no preset '{preset}'; known are {', '.join(PRESETS)}")
    pairs = [entry.partition("=") for entry in benchmarks]
    names = [name for name, _, _ in pairs]
    files = {name: source for name, _, source in pairs if source}
    sources(names, files)
    settings = [
        f"name={json.dumps(f'eval/{preset}')}",
        f"description={json.dumps(PRESETS[preset].title)}",
        f"model.path={json.dumps(model)}",
        "task.name=benchmarks",
        f"task.sets={json.dumps(names)}",
        f"task.files={{ {', '.join(f'{json.dumps(name)} = {json.dumps(source)}' for name, source in files.items())} }}",
        *PRESETS[preset].overrides(),
        *(lora_overrides(adapter) if adapter is not None else []),
    ]
    return config.load("paper/opsd", [*settings, *overrides])


def lora_overrides(adapter: Path) -> list[str]:
    """The LoRA shape of a PEFT folder as settings of a recipe."""
    file = adapter / "adapter_config.json"
    try:
        saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha, targets = saved["r"], saved["lora_alpha"], saved["target_modules"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PastError(
            f"{file}: cannot be read as a PEFT LoRA configuration ({error!r}); give a PEFT folder"
        ) from None
    special = [key for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if saved.get(key)]
    if special:
        raise PastError(
            f"{file}: uses {special[0]}, which this package does not; merge the adapter into its base first"
        )
    return [
        f"model.lora.rank={rank}",
        f"model.lora.alpha={alpha}",
        f"model.lora.targets={json.dumps(sorted(targets) if is_list(targets) else targets)}",
    ]
