"""Recipes: strict TOML files, one per experiment, validated before anything runs.

A recipe may extend another (`extends = "base.toml"`, beside it, or a shipped recipe by name); its own keys win, and
everything but the description is inherited. `--set a.b=c` overrides win over both. An unknown key, a wrong type or an
impossible combination is one `PastError` that names the file, the line, the key and the nearest known key.

The sections `method`, `task`, `verifier` and `engine` are chosen by `name`: the module
`past_opsd.<kind>s.<name>` (or a dotted path to a module of the user's, or `module:Class`) holds a `Section` called
`Options` with the section's other keys. Adding one is adding a file; a script or a notebook may give the class itself.

A shipped recipe that is another one but for a key or two is a table of its folder's `variants.toml`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from past_opsd.core import own
from past_opsd.core.nouns import Forks, PastError
from past_opsd.core.reading import SMALL, is_table, read_text, read_toml

SHIPPED = Path(__file__).parents[1] / "recipes"
VARIANTS = "variants.toml"  # beside shipped recipes: those that are another one but for a key or two, a table each
EMBEDDED = {"embedded": "embedded_model", "embedded-expert": "embedded_expert"}  # models of the package, by name
HUB = "hf:"  # before the name of a dataset on the Hugging Face hub
Role = Literal["student", "evaluation", "reference", "hindsight", "removed", "rephrase", "hint", "write_hint"]
"""Who reads a prompt; each has its message in `[prompts]`."""
PLUGINS = {"method": "methods", "task": "tasks", "verifier": "rollout.verifiers", "engine": "rollout.engines"}
FUNCTION = "function"  # the task and the verifier that a function of the user's is, under the key `path`


class Section(BaseModel):
    """A table of a recipe: no unknown keys, no coercion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=True)

    former: ClassVar[tuple[str, ...]] = ()
    """Keys that recipes once had and that changed nothing: they are read, and left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_former(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if k not in cls.former} if is_table(data) else data


class MethodOptions(Section):
    """A method's keys, and what others ask of a method without knowing it; a method says what is otherwise."""

    headline: ClassVar[bool] = False
    """The method that reports are about, drawn first."""
    baseline: ClassVar[bool] = False
    """The method that reports compare the others with."""

    @property
    def continuations(self) -> int:
        """Most that the teacher draws for a failed response at a time; 0 where it draws none."""
        return 0

    @property
    def reads_response(self) -> bool:
        """Whether the teacher's prompt holds the student's whole response."""
        return False

    def small(self, most: int) -> Self:
        """The same method with little to do, for a quick check: groups, for instance, of at most so many."""
        return self

    def on(self, there: MethodOptions) -> Self:
        """The same method on the model and task of another recipe of it: what follows those is taken from there."""
        return self

    def losses(self) -> Mapping[str, Callable[..., Any]]:
        """What these options say each term's loss is, by the term's name, for a check against the terms themselves.

        An advantage is left at 0. Empty where a method says nothing of it.
        """
        return {}


class DistillingOptions(MethodOptions):
    """The keys of a method whose student learns from a teacher's distribution along its own responses."""

    forks: Literal["keep", "mask", "down-weight"] = Field(
        default="keep", description="what distillation does where the student is least decided; 'keep' is the paper's"
    )
    fork_share: float = Field(
        default=0.2, gt=0, lt=1, description="part of each response, its highest entropies, that counts as forks"
    )
    fork_weight: float = Field(
        default=0.25, gt=0, lt=1, description="weight of a fork in 'down-weight', beside 1 elsewhere"
    )

    @property
    def at_forks(self) -> Forks | None:
        """How distillation terms treat forks; None where they are as any position."""
        if self.forks == "keep":
            return None
        return Forks(self.fork_share, 0.0 if self.forks == "mask" else self.fork_weight)


class EngineOptions(Section):
    """An engine's keys, and what others ask of an engine without knowing it; an engine says what is otherwise."""

    here: ClassVar[bool] = False
    """Whether it decodes on the trainer's own weights, in rows that grow in the trainer's memory."""

    @property
    def elsewhere(self) -> bool:
        """Whether responses are drawn outside of this machine's memory."""
        return False

    def unvouched(self) -> list[str]:
        """What needs a person's word before it is done for somebody else's recipe, as `key = value`."""
        return []


@dataclass(frozen=True)
class Place:
    """Marks a text that names a file or folder, or may do so: a relative one is looked for beside its recipe first."""

    surely: bool = False
    """It names one, unless it begins with 'hf:': what is not there is missing beside the recipe."""


class Unread(Section):
    """A section of a module that is not imported: its keys as they stand."""

    model_config = ConfigDict(extra="allow")


class Sampling(Section):
    """How one role samples."""

    temperature: float = Field(default=1.0, ge=0, description="softmax temperature; 0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass kept; 1 keeps all")
    top_k: int = Field(default=0, ge=0, description="entries kept; 0 keeps all")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="entries below this share of the largest are cut; 0 keeps all"
    )
    max_new_tokens: int = Field(default=1024, ge=1, description="longer responses are cut and count as failures")


class LoraSection(Section):
    """Both adapters' shape."""

    rank: int = Field(default=64, ge=1, description="rank of both LoRA adapters")
    alpha: float = Field(default=128, gt=0, description="LoRA alpha; the update is scaled by alpha / rank")
    targets: str | list[str] = Field(
        default="auto", description="module names to adapt; 'auto' takes every linear projection of the decoder blocks"
    )
    dtype: Literal["float32", "base"] = Field(
        default="float32", description="dtype of the adapters; 'base' follows the base"
    )
    compute: Literal["auto", "float32", "base"] = Field(
        default="auto",
        description="dtype of products with float32 adapters; 'auto' is the base's beside bfloat16, else 'float32'",
    )


class ModelSection(Section):
    """The frozen base and its two adapters."""

    path: Annotated[str, Place()] = Field(
        description="'embedded', a pulled model, a local folder, a .gguf file, or a hub id"
    )
    revision: str | None = Field(default=None, description="hub revision")
    gguf_file: str | None = Field(default=None, description="the GGUF file of a folder or hub repository with several")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="dtype of the frozen base"
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        default="auto", description="attention implementation; 'auto' is 'sdpa', which prompts are shared with"
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="'auto', 'cpu', 'cuda:1', 'mps'"
    )
    device_map: Literal["single", "auto"] = Field(default="single", description="'auto' spreads the base over all GPUs")
    gradient_checkpointing: Literal["auto"] | bool = Field(
        default="auto", description="recompute activations in the backward pass: less memory, more time"
    )
    trust_remote_code: bool = Field(default=False, description="run code that a model repository ships; off by default")
    max_context: int | None = Field(default=None, ge=8, description="prompt + response limit; default: the model's own")
    expert: Annotated[str | None, Place()] = Field(
        default=None, description="a separate frozen teacher for methods that distill from one (OPD)"
    )
    lora: LoraSection = LoraSection()


class ExampleSection(Section):
    """A solved problem that a model reads before its prompt, as an earlier exchange.

    Either `user` is what was asked, to the letter, or the fields are put into each role's own message, so that a
    teacher is shown how what it is told in private is used.
    """

    user: str | None = Field(default=None, description="what was asked, to the letter, in every role")
    problem: str | None = Field(default=None, description="instead of 'user': {problem} of each role's own message")
    student_output: str | None = Field(default=None, description="with 'problem': {student_output} where a role has it")
    reference_solution: str | None = Field(
        default=None, description="with 'problem': {reference_solution} where a role has it"
    )
    hint: str | None = Field(default=None, description="with 'problem': {hint} where a role has it")
    assistant: str = Field(description="what was answered")
    roles: list[Role] | None = Field(default=None, description="the roles that read it; default: all")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        fields = [name for name in ("student_output", "reference_solution", "hint") if getattr(self, name) is not None]
        if (self.user is None) == (self.problem is None):
            raise ValueError("an example has either 'user', the message to the letter, or 'problem'")
        if fields and self.problem is None:
            raise ValueError(f"'{fields[0]}' of an example goes with 'problem', not with 'user'")
        return self


class PromptsSection(Section):
    """What each role reads; fields are {problem}, {student_output}, {reference_solution}, {hint}."""

    student: str = Field(description="the student's user message")
    evaluation: str = Field(description="the user message in evaluation")
    reference: str = Field(description="the user message of a teacher that reads no attempt (Vanilla OPSD)")
    hindsight: str = Field(description="the hindsight teacher's user message (PAST)")
    removed: str = Field(description="'past probe': the hindsight message, the student's attempt cut out")
    rephrase: str = Field(default="", description="H2SD's teacher on a success: {problem} and {student_output}")
    hint: str = Field(default="", description="H2SD's teacher on a failure: {problem} and {hint}")
    write_hint: str = Field(default="", description="H2SD's request for a hint: {problem} and {reference_solution}")
    student_kwargs: dict[str, Any] = Field(default={}, description="chat_template_kwargs of the student's prompt")
    teacher_kwargs: dict[str, Any] = Field(default={}, description="chat_template_kwargs of every teacher prompt")
    evaluation_kwargs: dict[str, Any] = Field(default={}, description="chat_template_kwargs in evaluation")
    examples: list[ExampleSection] = Field(
        default=[], description="earlier exchanges, for models that do not know the format; they may differ by role"
    )
    strip_thinking: bool = Field(default=False, description="cut <think> blocks out of {student_output}")


class RolloutSection(Section):
    """The on-policy batch of one cycle."""

    problems_per_cycle: int = Field(
        default=4, ge=1, description="problems drawn a cycle, without repeats within an epoch"
    )
    samples_per_problem: int = Field(default=1, ge=1, description="student responses per problem")
    dynamic_rounds: int = Field(
        default=0,
        ge=0,
        description="dynamic sampling: most further rounds of a cycle that ask new problems in place of those whose "
        "responses teach the method nothing; 0 keeps the first draw",
    )
    stream: bool = Field(
        default=False,
        description="verify responses as they end, and draw continuations of failed ones while others are still being "
        "verified or decoded: the same run, in less time",
    )
    student: Sampling = Field(default=Sampling(), description="how the student samples Y")
    teacher: Sampling = Field(default=Sampling(), description="how the teacher samples C_j")


class OptimizerSection(Section):
    """AdamW for one adapter."""

    lr: float = Field(default=5e-6, gt=0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="decay after the warm-up")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW beta1")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW beta2")
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay")
    max_grad_norm: float = Field(default=0.1, gt=0, description="gradients are clipped to this norm")


class LearnerSection(Section):
    """How terms become one optimizer step."""

    reduction: Literal["sequence", "token"] = Field(
        default="sequence", description="'sequence' is the paper's 1/T_i, 'token' upstream OPSD's mean over all tokens"
    )
    implementation: Literal["auto", "fused", "triton", "chunked", "bf16", "reference"] = Field(
        default="auto",
        description="how full-vocabulary losses are computed; 'auto' is 'triton' on a CUDA GPU where that is "
        "installed, else 'fused'; 'past bench divergence' compares the others",
    )
    token_budget: int = Field(default=16384, ge=16, description="padded tokens in one micro-batch")
    shared_prompts: bool = Field(
        default=True,
        description="prompts that begin alike share that part's forward and backward where that pays; exact",
    )
    loss_memory_mib: int = Field(default=128, ge=1, description="memory for logits inside the loss")
    importance_cap: float = Field(
        default=2.0,
        ge=0,
        description="a policy gradient's tokens weigh min(p_trainer / p_engine, this), since two ways of computing "
        "differ; 1 for all of them where the embedded engine samples in float32; 0 turns it off",
    )
    student: OptimizerSection = Field(default=OptimizerSection(), description="the student's optimizer")
    teacher: OptimizerSection = Field(default=OptimizerSection(), description="the teacher's optimizer")


class EvaluationSection(Section):
    """Avg@k on the task's held-out sets."""

    samples: int = Field(default=12, ge=1, description="responses per problem, the k of Avg@k")
    pass_k: list[int] = Field(default=[1, 4, 12], description="the k of pass@k")
    at: list[float] = Field(
        default=[0.0, 0.25, 0.5, 0.75, 1.0], description="fractions of the run at which to evaluate"
    )
    beside: bool = Field(
        default=False,
        description="leave evaluation to 'past eval --follow RUN'; the checkpoints for it are kept",
    )
    sampling: Sampling = Field(default=Sampling(), description="how responses are sampled")

    @model_validator(mode="after")
    def _possible(self) -> EvaluationSection:
        if any(not 1 <= k <= self.samples for k in self.pass_k):
            raise ValueError(f"pass_k {self.pass_k} must lie between 1 and samples = {self.samples}")
        if any(not 0 <= at <= 1 for at in self.at):
            raise ValueError(f"at {self.at} are fractions of the run, between 0 and 1")
        return self


class RunSection(Section):
    """Length, seed and what is kept."""

    cycles: int = Field(default=100, ge=1, lt=10**9, description="student updates; the only length knob")
    seed: int = Field(default=17, ge=0, description="training seed; every random draw derives from it")
    evaluation_seed: int = Field(
        default=0, ge=0, description="with the training seed decides evaluation draws, for all methods"
    )
    checkpoint_every: int = Field(
        default=5, ge=1, description="cycles between checkpoints; the last one is always written"
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept besides the evaluated ones")
    threads: int = Field(default=0, ge=0, description="CPU threads; 0 leaves the default")


class DistributedSection(Section):
    """Several processes, started by torchrun, accelerate launch or srun; one process needs nothing of it."""

    shard: Literal["none", "full", "hybrid"] = Field(
        default="none",
        description="'full' spreads the frozen base's blocks over the processes (FSDP2): less memory, more time; "
        "'hybrid' over those of a machine, every machine with a copy: less between machines",
    )
    split: int = Field(
        default=1,
        ge=1,
        description="so many neighbouring processes hold every row of a training step together, each a part of its "
        "tokens: for rows that one cannot hold; attention heads must divide (Ulysses)",
    )
    timeout_seconds: float = Field(
        default=3600.0, gt=0, description="a process that waits for the others for so long gives up"
    )


class RecipeBase(Section):
    """The sections that every recipe has; `method`, `task`, `verifier`, `engine` are added by name."""

    name: str = Field(description="name of the recipe")
    description: str = Field(default="", description="one line on what makes this recipe")
    run: RunSection = RunSection()
    model: ModelSection
    prompts: PromptsSection
    rollout: RolloutSection = RolloutSection()
    learner: LearnerSection = LearnerSection()
    evaluation: EvaluationSection = EvaluationSection()
    distributed: DistributedSection = DistributedSection()


class Recipe(RecipeBase):
    """A whole recipe. The four chosen sections hold the `Options` of the module named there."""

    method: Any
    task: Any
    verifier: Any
    engine: Any


def ask_method(recipe: Recipe) -> MethodOptions:
    """The recipe's method, where its options can be asked; one that says nothing of itself in the place of others."""
    return recipe.method if isinstance(recipe.method, MethodOptions) else MethodOptions()


def ask_engine(recipe: Recipe) -> EngineOptions:
    """The recipe's engine, where its options can be asked; one that says nothing of itself in the place of others."""
    return recipe.engine if isinstance(recipe.engine, EngineOptions) else EngineOptions()


@dataclass(frozen=True)
class Source:
    """Where a key was written, for error messages."""

    where: str
    line: int | None

    def __str__(self) -> str:
        return f"{self.where}:{self.line}" if self.line else self.where


def load(name: str | Path, overrides: Sequence[str] | Mapping[str, Any] = (), *, imports: bool = True) -> Recipe:
    """Read a recipe, lay overrides over it and check all of it.

    Args:
        name: a shipped recipe such as "embedded/past" (`recipes()` lists them), or a .toml file.
        overrides: what differs. Texts as `past train --set` takes them, ["run.cycles=5"]; or a dict with Python values,
            {"run.cycles": 5}, or with tables as a file has them, {"run": {"cycles": 5}}. Where the name of a method,
            task, verifier or engine stands, a dict may hold a class or function of yours: {"method.name": Mine}.
        imports: False for a recipe in the folder of a run that may be somebody else's: no module outside the package is
            imported, the sections that name one are taken as they are, and no other file is read.

    Returns:
        The recipe, frozen; `recipe.run.cycles` and so on are its settings.

    Raises:
        PastError: no such recipe, or a key or value that cannot be; it names the file, the line and the nearest key.
    """
    data, sources = _read(locate(name), imports)
    if isinstance(overrides, str):
        raise PastError(f"overrides = {overrides!r}: give a list of such texts, or a dict")
    if isinstance(overrides, Mapping):
        _lay(data, sources, overrides, imports)
    else:
        for override in overrides:
            _override(data, sources, override)
    return validate(data, sources, str(name), imports=imports)


def _lay(data: dict[str, Any], sources: dict[str, Source], overrides: Mapping[str, Any], imports: bool) -> None:
    """Python values over a recipe: a dotted key is one setting, as with `--set`; a table is laid over as a file's."""
    named_first = sorted(overrides.items(), key=lambda item: not str(item[0]).endswith(".name"))
    for key, value in named_first:
        path, tree = str(key).split("."), value
        for part in reversed(path):
            tree = {part: tree}
        if path[0] in PLUGINS and isinstance(tree[path[0]], Mapping):
            tree[path[0]] = _named(path[0], tree[path[0]])
        _merge(data, tree, None if len(path) > 1 else Recipe, imports)
        for place in _places_in(tree):
            sources[place] = Source("the overrides", None)


def _named(kind: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """A section with the name of the class or function that stands in it."""
    thing = table.get("name")
    if thing is None or isinstance(thing, str):
        return dict(table)
    name = own.name_of(thing, f"{kind}.name")
    if not isinstance(thing, FunctionType):
        return {**table, "name": name}
    if kind not in ("task", "verifier"):
        raise PastError(f"{kind}.name: {name} is a function; a {kind} is a class with Options and build")
    here = {"workers": 0} if kind == "verifier" and own.only_here(thing) else {}
    return {"path": name, **here, **table, "name": FUNCTION}


def _places_in(tree: Mapping[str, Any], path: str = "") -> list[str]:
    inner = [(f"{path}{key}", value) for key, value in tree.items()]
    return [key for key, _ in inner] + [
        place for key, value in inner if is_table(value) for place in _places_in(value, f"{key}.")
    ]


@dataclass(frozen=True)
class Written:
    """Where a recipe is written: in a file of its own, or as a table of a folder's variants."""

    file: Path
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.file}, [{self.variant}]" if self.variant else str(self.file)

    def read(self) -> tuple[dict[str, Any], dict[str, Source]]:
        """Its tables as they stand, and the line of each key."""
        text = read_text(self.file, SMALL)
        table, lines = read_toml(self.file, text), _lines(text, str(self.file))
        if not self.variant:
            return table, lines
        own, name = f"{self.variant}.", f"{self.file.parent.name}/{self.variant}"
        lines = {key.removeprefix(own): source for key, source in lines.items() if key.startswith(own)}
        return {"name": name} | table[self.variant], lines


def shipped() -> list[str]:
    """Names of the recipes that come with the package (files starting with `_` only serve as bases)."""
    return sorted(_shipped())


def shipped_descriptions() -> dict[str, str]:
    """The shipped recipes' own lines of description, read without anything that a recipe is validated with."""
    return {name: written.read()[0].get("description", "") for name, written in sorted(_shipped().items())}


def _shipped() -> dict[str, Written]:
    found: dict[str, Written] = {}
    for file in SHIPPED.rglob("*.toml"):
        family = file.parent.relative_to(SHIPPED)
        if file.name == VARIANTS:
            found |= {str(family / key): Written(file, key) for key in read_toml(file, read_text(file, SMALL))}
        elif not file.name.startswith("_") and file.stem != "suites":
            found[str(family / file.stem)] = Written(file)
    return found


def is_recipe(name: str | Path) -> bool:
    """Whether this names a recipe, rather than the folder of a run."""
    return str(name) in shipped() or Path(name).suffix == ".toml"


def locate(name: str | Path) -> Written:
    """Where a recipe is written: the path as given, or a shipped recipe by name."""
    for path in (Path(name), SHIPPED / f"{name}.toml"):
        if path.is_file():
            return Written(path)
    known = _shipped()
    if str(name) in known:
        return known[str(name)]
    near = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise PastError(
        f"no recipe '{name}': {hint}'past recipes' lists the shipped ones, a path to a .toml file works too"
    )


def plugin(kind: str, name: str) -> Any:
    """What `[kind] name = ...` names: a module, shipped (`past_opsd.methods.past`) or the user's, or a class in one."""
    package = f"past_opsd.{PLUGINS[kind]}"
    if own.is_own(name):
        found = own.find(name, f"{kind}.name")
        if not (hasattr(found, "Options") and hasattr(found, "build")):
            raise PastError(
                f"{kind}.name = '{name}' is no {kind}: it needs a class Options and a function build"
                + ", which a subclass of past_opsd.Method has" * (kind == "method")
            )
        return found
    path = name if "." in name else f"{package}.{name}"
    try:
        found = all(importlib.util.find_spec(part) is not None for part in (path.rpartition(".")[0], path))
        problem = ""
    except (ImportError, ValueError) as error:
        found, problem = False, f" ({error})"
    if not found:
        raise PastError(
            f"{kind}.name: no {kind} '{name}'{problem}; known are {', '.join(known(kind))}, "
            "or a dotted path to a module, or module:Class"
        )
    try:
        module = importlib.import_module(path)
    except Exception as error:  # whatever a module of the user's does while it is imported
        raise PastError(
            f"{kind}.name: the module {path} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not {"Options", "build"} <= set(vars(module)):
        raise PastError(f"{kind}.name: the module {path} is no {kind}: it needs a class Options and a function build")
    return module


def known(kind: str) -> list[str]:
    """Names of the package's own methods, tasks, verifiers or engines."""
    folder = Path(__file__).parents[1].joinpath(*PLUGINS[kind].split("."))
    return sorted(p.stem for p in folder.glob("*.py") if "\ndef build(" in p.read_text(encoding="utf-8"))


def is_foreign(name: str) -> bool:
    """Whether a section's name is the path of a module outside the package, or of something in one."""
    return ("." in name or own.is_own(name)) and not name.startswith("past_opsd.")


def validate(data: Mapping[str, Any], sources: Mapping[str, Source], where: str, *, imports: bool = True) -> Recipe:
    """Validate a plain tree of tables against the sections and the chosen modules' options."""
    chosen: dict[str, Any] = {}
    for kind in PLUGINS:
        table = data.get(kind)
        if not is_table(table) or not isinstance(table.get("name"), str):
            raise PastError(f'{where}: [{kind}] needs a name, e.g. [{kind}] name = "..."')
        try:
            unread = not imports and is_foreign(table["name"])
            options = Unread if unread else plugin(kind, table["name"]).Options
        except PastError as error:
            raise PastError(f"{sources.get(f'{kind}.name', where)}: {error}") from None
        literal: Any = Literal[table["name"]]  # pyright: ignore[reportInvalidTypeForm]
        named = (literal, Field(default=table["name"], description=f"which {kind}"))
        chosen[kind] = (
            create_model(options.__name__, __base__=options, __module__=options.__module__, name=named),
            ...,
        )
    schema = create_model("Recipe", __base__=Recipe, **chosen)
    try:
        recipe = schema.model_validate(_placed(schema, data, sources))
        dump(recipe)
    except ValidationError as error:
        lines = [_explain(schema, item, sources, where) for item in error.errors()]
        raise PastError("\n".join(lines)) from None
    except TypeError as error:
        raise PastError(f"{where}: dates and times have no meaning in a recipe ({error})") from None
    return recipe


def _placed(
    schema: type[BaseModel], data: Mapping[str, Any], sources: Mapping[str, Source], path: str = ""
) -> dict[str, Any]:
    """The tree with every relative file or folder made absolute: found beside the recipe that names it, else here."""
    out = dict(data)
    for key, info in schema.model_fields.items():
        value, here = out.get(key), f"{path}{key}"
        place = next((mark for mark in info.metadata if isinstance(mark, Place)), None)
        if place is not None and is_table(value):
            out[key] = {name: _find(text, place, _folder(sources, f"{here}.{name}")) for name, text in value.items()}
        elif place is not None and key in out:
            out[key] = _find(value, place, _folder(sources, here))
        elif is_table(value) and (inner := _section(schema, key)) is not None:
            out[key] = _placed(inner, value, sources, f"{here}.")
    return out


def places(recipe: BaseModel, path: str = "") -> set[str]:
    """The keys of a recipe that name files and folders, or may do so."""
    found: set[str] = set()
    for key, info in type(recipe).model_fields.items():
        value = recipe.__dict__[key]
        if isinstance(value, BaseModel):
            found |= places(value, f"{path}{key}.")
        elif any(isinstance(mark, Place) for mark in info.metadata):
            found |= {f"{path}{key}.{name}" for name in value} if is_table(value) else {f"{path}{key}"}
    return found


def _folder(sources: Mapping[str, Source], key: str) -> Path:
    """The folder of the file that wrote a key; the working folder where a command line did."""
    while key and key not in sources:
        key = key.rpartition(".")[0]
    source = sources.get(key)
    return Path(source.where).parent if source is not None and source.line is not None else Path()


def _find(value: Any, place: Place, folder: Path) -> Any:
    if not isinstance(value, str) or not value or value in EMBEDDED:
        return value
    prefix = HUB if value.startswith(HUB) else ""
    name, sign, query = value.removeprefix(HUB).partition("?") if prefix else (value, "", "")
    found = [path for path in (folder / name, Path(name)) if path.exists()]
    if found or (place.surely and not prefix):
        return f"{prefix}{os.path.abspath(found[0] if found else folder / name)}{sign}{query}"
    return value


def former(recipe: Recipe) -> set[str]:
    """Keys that a run's own recipe may still have, and that changed nothing."""
    return {f"{name}.{key}" for name, section in recipe if isinstance(section, Section) for key in section.former}


def defaults(section: BaseModel, path: str = "") -> set[str]:
    """Keys of a recipe that have their default."""
    found: set[str] = set()
    for key, info in type(section).model_fields.items():
        value = section.__dict__[key]
        if isinstance(value, BaseModel):
            found |= defaults(value, f"{path}{key}.")
        elif not info.is_required() and value == info.get_default(call_default_factory=True, validated_data={}):
            found.add(f"{path}{key}")
    return found


def dump(recipe: BaseModel) -> dict[str, Any]:
    """The resolved recipe as plain data (inf kept as the string 'inf', so that it is JSON)."""
    plain = recipe.model_dump(mode="python")
    return json.loads(json.dumps(_finite(plain)))


def to_toml(recipe: BaseModel) -> str:
    """The full resolved recipe as TOML, each field with its line of explanation."""
    out: list[str] = []
    _write_table(recipe, "", out)
    return "\n".join(out).strip() + "\n"


def _write_table(section: BaseModel, prefix: str, out: list[str]) -> None:
    tables: list[tuple[str, BaseModel]] = []
    for key, info in type(section).model_fields.items():
        value = section.__dict__[key]
        if isinstance(value, BaseModel):
            tables.append((key, value))
        else:
            if info.description:
                out.append(f"# {info.description}")
            out.append(f"{key} = {toml_value(value)}" if value is not None else f"# {key} is not set")
    out.extend(f"{toml_key(name)} = {toml_value(value)}" for name, value in (section.model_extra or {}).items())
    for key, value in tables:
        path = f"{prefix}.{key}" if prefix else key
        info = type(section).model_fields[key]
        doc = info.description or (type(value).__doc__ or "").strip().split("\n")[0]
        out.extend(["", f"# {doc}"] if doc else [""])
        out.append(f"[{path}]")
        _write_table(value, path, out)


def toml_value(value: Any) -> str:
    """A value as TOML writes it; a text of several lines stays as it is, where TOML can read it again."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        plain = "'''" not in value and not value.endswith("'") and not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", value)
        return f"'''\n{value}'''" if "\n" in value and plain else _quoted(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, cast(Sequence[Any], value))) + "]"
    if is_table(value):
        return "{ " + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    return str(value)


def toml_key(text: str) -> str:
    """A key as TOML writes it."""
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(written: Written, imports: bool = True) -> tuple[dict[str, Any], dict[str, Source]]:
    """A recipe's tables merged over those of the one it extends, with the place each key came from."""
    chain: list[Written] = []
    data: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    current: Written | None = written
    layers: list[tuple[dict[str, Any], dict[str, Source]]] = []
    while current is not None:
        place = Written(current.file.resolve(), current.variant)
        if place in chain:
            raise PastError(f"{current}: 'extends' runs in a circle")
        chain.append(place)
        table, lines = current.read()
        parent = table.pop("extends", None)
        if parent is not None and not imports:
            raise PastError(f"{current}: a run's recipe is complete; it does not follow 'extends' to another file")
        layers.append((table, lines))
        current = _parent(current.file, parent) if parent is not None else None
    for table, lines in reversed(layers):
        data.pop("description", None)  # what a parent says of itself is not true of its child
        _merge(data, table, Recipe, imports)
        sources.update(lines)
    return data, sources


def _parent(path: Path, parent: Any) -> Written:
    if not isinstance(parent, str):
        raise PastError(f"{path}: 'extends' must be the path or name of a recipe, not {parent!r}")
    beside = path.parent / parent
    return Written(beside) if beside.is_file() else locate(parent)


def _merge(
    into: dict[str, Any], table: Mapping[str, Any], schema: type[BaseModel] | None, imports: bool = True
) -> None:
    """Lay a table over another: sections key by key, a value that is a table (`evaluation = {...}`) as a whole.

    Without a schema every table counts as a section.
    """
    for key, value in table.items():
        old = into.get(key)
        if not is_table(value) or not is_table(old):
            into[key] = value
            continue
        name = value.get("name", old.get("name"))
        if key in PLUGINS and name != old.get("name"):  # options of the inherited module do not carry over
            old = into[key] = {}
        if schema is None:
            _merge(old, value, None)
        elif key in PLUGINS:
            _merge(old, value, _options(key, name, imports))
        elif (inner := _section(schema, key)) is not None:
            _merge(old, value, inner)
        else:
            into[key] = value


def _section(schema: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The schema of a field that is a section, None for any other."""
    info = schema.model_fields.get(key)
    inner = info.annotation if info is not None else None
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def _options(kind: str, name: Any, imports: bool) -> type[BaseModel] | None:
    """The schema of a chosen module's options; None where it is unknown, which `validate` tells."""
    if not isinstance(name, str) or (not imports and is_foreign(name)):
        return None
    try:
        return plugin(kind, name).Options
    except PastError:
        return None


def _override(data: dict[str, Any], sources: dict[str, Source], text: str) -> None:
    key, sign, value = text.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts):
        raise PastError(f"--set {text}: write it as --set section.key=value, e.g. --set run.cycles=20")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except (ValueError, RecursionError):
        parsed = value.strip()
    tree: Any = parsed
    for part in reversed(parts):
        tree = {part: tree}
    _merge(data, tree, None)
    sources[".".join(parts)] = Source(f"--set {text}", None)


def _lines(text: str, where: str) -> dict[str, Source]:
    """The line of every table header and `key =`, skipping the inside of multi-line strings."""
    found: dict[str, Source] = {}
    table = ""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        if fence:
            fence = "" if fence in line else fence
            continue
        header = re.match(r"""\s*\[+\s*"?([\w.\-]+)"?\s*\]+""", line)
        entry = re.match(r"\s*([\w.\-]+)\s*=\s*(.*)", line)
        if header:
            table = header[1]
            found[table] = Source(where, number)
        elif entry:
            found[f"{table}.{entry[1]}" if table else entry[1]] = Source(where, number)
            for mark in ("'''", '"""'):
                if entry[2].count(mark) == 1:
                    fence = mark
    return found


def _explain(schema: type[BaseModel], item: Mapping[str, Any], sources: Mapping[str, Source], where: str) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    spots = [sources[".".join(path[:n])] for n in range(len(path), 0, -1) if ".".join(path[:n]) in sources]
    place = f"{spots[0] if spots else where}: {key}: " if key else f"{where}: "
    if item["type"] == "extra_forbidden":
        fields = _fields_at(schema, path[:-1])
        near = difflib.get_close_matches(path[-1], fields, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys here: {', '.join(fields)}"
        return f"{place}unknown key; {hint}"
    if item["type"] == "missing":
        return f"{place}is missing and has no default"
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if message[:5] == "Input" else message
    given = f" (given: {item['input']!r})" if not isinstance(item["input"], dict | BaseModel) else ""
    return f"{place}{message}{given}"


def _fields_at(schema: type[BaseModel], path: Sequence[str]) -> list[str]:
    for part in path:
        info: FieldInfo | None = schema.model_fields.get(part)
        inner = info.annotation if info else None
        options = [t for t in (inner, *get_args(inner)) if isinstance(t, type) and issubclass(t, BaseModel)]
        if not options:
            return []
        schema = options[0]
    return list(schema.model_fields)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if is_table(value):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_finite, cast(Sequence[Any], value)))
    return value
