"""One frozen base with two LoRA adapters, `student` and `teacher`, both starting as the identity (q_0 = p_0).

`hidden` gives the final hidden states of (view, tokens) for the training side; `sampling` lends the same network with
one adapter folded into the weights for the rollout side, and puts the weights back as they were, bit for bit.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import peft
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from past_opsd.core.config import LoraSection, ModelSection
from past_opsd.core.nouns import Adapter, PastError, View
from past_opsd.core.reading import is_list
from past_opsd.policy import attention, fused, packing
from past_opsd.policy.distributed import World
from past_opsd.policy.fingerprint import fingerprint
from past_opsd.policy.pretrained import Choice, empty_network, hardware, load_network, load_tokenizer, resolve
from past_opsd.policy.split import Split, possible

__all__ = ["TRAINABLE", "Model", "Network", "linear_targets", "load_tokenizer", "resolve"]

Shard = Literal["none", "full", "hybrid"]
TRAINABLE: tuple[Adapter, Adapter] = ("student", "teacher")
# Floating-point operations a device could do in the time that one more segment of a shared row takes in a layer,
# forward and backward. On a CPU about 0.4 ms were measured beside products at 60 GFLOP/s; for a GPU it is an estimate
# from some fifteen kernel launches.
SEGMENT = {"cpu": 25e6, "gpu": 20e9}
LAYER = re.compile(r"\.\d+\.")  # a name inside one of the blocks
# Rotary frequencies that follow the longest position of a forward.
STRETCHED = frozenset({"dynamic", "longrope"})
# Mixture-of-experts routers: which expert computes is not what an adapter should learn.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


def _tokenizer_text(tokenizer: Any) -> str:
    """What decides how text becomes ids; calls leave their padding and truncation behind, so those are left out."""
    if not tokenizer.is_fast:
        return json.dumps([tokenizer.get_vocab(), str(tokenizer.special_tokens_map)], sort_keys=True)
    plain = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps({k: v for k, v in plain.items() if k not in ("padding", "truncation")}, sort_keys=True)


def in_order(targets: Any) -> Any:
    """Names of target modules as they are written: PEFT holds them in a set, whose order changes with the process."""
    return targets if targets is None or isinstance(targets, str) else sorted(targets)


def linear_targets(network: nn.Module, layers: int) -> tuple[list[str], bool]:
    """LoRA targets: every linear projection inside the decoder blocks; and whether they are GPT-2's transposed ones.

    Short names (`q_proj`) where they mean the blocks alone, full names otherwise.
    """
    modules: dict[str, nn.Module] = dict(cast(Any, network).named_modules())
    blocks = tuple(f"{n}." for n, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) == layers)
    linear = {n: m for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D)}
    inside = [n for n in linear if n.startswith(blocks) and n.rpartition(".")[2] not in ROUTERS]
    if not inside:
        raise PastError("model.lora.targets = 'auto' finds no linear projection in this model's blocks; name them")
    short = {n.rpartition(".")[2] for n in inside}
    clear = not any(n.rpartition(".")[2] in short for n in linear if n not in inside)
    return sorted(short if clear else inside), all(isinstance(linear[n], Conv1D) for n in inside)


def settle_lora(lora: LoraSection, base: str) -> str:
    """The dtype in which adapters are multiplied, beside a base of this dtype.

    float32 products take many times as long as a GPU's bfloat16 ones and need float32 copies of the activations, and
    the layer's sum is rounded to the base's dtype in any case. float16 is not chosen by itself: the gradients of the
    factors would be rounded to it too, and its smallest number is 6e-8.
    """
    follows = lora.compute == "base" or (lora.compute == "auto" and base == "bfloat16")
    return base if follows or lora.dtype == "base" else "float32"


class Factor(nn.Linear):
    """A factor of an adapter that is multiplied in its input's dtype.

    Its own weight stays float32, and so do its gradients' sums and the optimizer's steps, however small.
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight.to(input.dtype))  # PEFT makes factors without a bias here


def multiply_in_base(layers: Sequence[LoraLayer]) -> None:
    """Have these layers' adapters, all of them, take their inputs as they come instead of as float32."""
    for layer in layers:
        factors = [*layer.lora_A.values(), *layer.lora_B.values()]
        if all(type(factor) is nn.Linear for factor in factors):  # not the factors of a convolution
            layer.cast_input_dtype_enabled = False
            for factor in factors:
                factor.__class__ = Factor


def place(choice: Choice, world: World) -> Choice:
    """This rank's device: every process of a machine takes the GPU of its local rank."""
    if world.alone:
        return choice
    if choice.device_map is not None:
        raise PastError(
            "model.device_map = 'auto' spreads one process's base over all GPUs; with several processes leave it and "
            "set distributed.shard = 'full'"
        )
    if not choice.device.startswith("cuda"):
        return choice
    if choice.device != "cuda":
        raise PastError(f"model.device = '{choice.device}' puts every process on the same GPU; set it to 'auto'")
    count = torch.cuda.device_count()
    if count not in (1, world.local_size) and world.local_rank >= count:
        raise PastError(f"{world.local_size} processes on a machine with {count} GPUs; start as many as there are GPUs")
    index = 0 if count == 1 else world.local_rank  # a launcher may show each process its own GPU alone
    torch.cuda.set_device(index)
    return replace(choice, device=f"cuda:{index}")


class Network:
    """A frozen causal language model: hidden states and the output projection."""

    def __init__(self, section: ModelSection, path: str, choice: Choice | None = None, world: World | None = None):
        self.choice = choice or hardware(section)
        self.world = world or World()
        self.config, self.network = self._load(section, path)
        if self.choice.attention == "sdpa":
            cast(Any, self.network).set_attn_implementation(attention.NAME)
        self.device = cast(Any, self.network).get_input_embeddings().weight.device
        self._scale = self._logit_scale(path)
        self.split = Split()
        """Which ranks share the rows of a forward."""
        self.tick: Callable[[], None] = lambda: None
        """Called before every forward of the training side and every decoding step: for a profiler."""
        self._prove(path)

    def _load(self, section: ModelSection, path: str) -> tuple[Any, nn.Module]:
        """The first process reads the weights; the others receive them, one tensor after the other."""
        config, network = (load_network if self.world.first else empty_network)(section, path, self.choice)
        if not self.world.alone:
            named = dict([*network.named_parameters(), *network.named_buffers()])
            shapes = str([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()])
            digest = hashlib.sha256(shapes.encode()).hexdigest()[:16]
            self.world.agree(f"'{path}'", f"{type(network).__name__} {digest}")
            self.world.give(named.values())
            cast(Any, network).generation_config = self.world.share(lambda: cast(Any, network).generation_config)
        return config, network

    def _logit_scale(self, path: str) -> float:
        plain = self.config.get_text_config().to_dict()
        if plain.get("final_logit_softcapping") is not None:
            raise PastError(
                f"'{path}' caps its logits (final_logit_softcapping); the losses here are computed from hidden states "
                "and a linear head and would be wrong, so this architecture is not supported"
            )
        scale, divisor = plain.get("logit_scale"), plain.get("logits_scaling")
        return (1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor))

    @torch.no_grad()
    def _prove(self, path: str) -> None:
        """The head applied to the hidden states must be the model's own logits, or every loss would be wrong."""
        ids = torch.arange(1, 5, device=self.device)[None] % len(self.head)
        states = cast(Any, self.network).base_model(input_ids=ids, use_cache=False).last_hidden_state
        ours = self.logits(self._scaled(states).to(self.head.device)).float()
        own = cast(Any, self.network)(input_ids=ids, use_cache=False).logits.to(ours.device).float()
        tolerance = 1e-3 if self.head.dtype == torch.float32 else 3e-2
        if ours.shape != own.shape or float((ours - own).abs().max()) > tolerance * float(own.abs().max()):
            raise PastError(
                f"'{path}' ({self.config.model_type}) computes its logits otherwise than by a linear head on its last "
                "hidden states; losses from hidden states would be wrong, so this architecture is not supported"
            )

    def _scaled(self, states: Tensor) -> Tensor:
        return states if self._scale == 1.0 else states * self._scale

    @property
    def head(self) -> Tensor:
        """The output projection [V, H]."""
        return cast(Any, self.network).get_output_embeddings().weight

    @property
    def head_bias(self) -> Tensor | None:
        """The output projection's bias, where there is one."""
        return cast(Any, self.network).get_output_embeddings().bias

    def log_probs(self, states: Tensor, temperature: float = 1.0) -> Tensor:
        """Final hidden states [T, H] to float32 log-probabilities [T, V]."""
        return fused.log_probs(self.logits(states), temperature)

    def logits(self, states: Tensor) -> Tensor:
        """Final hidden states [T, H] to logits [T, V]."""
        return fused.project(states, self.head, self.head_bias)

    def states(self, paths: Sequence[packing.Read], sizes: Sequence[int] = ()) -> Tensor:
        """Final hidden states at the positions that predict each path's tokens, paths one after the other [sum T, H].

        Row t of a path is [eq:student-prefix-state]: it reads the prompt and y_<t and predicts y_t. Nothing is
        re-tokenised and the last token itself is never read. Each path is a row of the forward; `sizes` puts so many
        of them, in order, into rows that share what they begin with, for networks that can (`shares_prompts`).
        """
        if max(sizes, default=1) == 1 and self.split.size == 1:
            return self._run(packing.plain(paths))
        return self._run(packing.shared(paths, sizes or [1] * len(paths), self.worth))

    def _run(self, packed: packing.Packed) -> Tensor:
        self.tick()
        if packed.mask is not None:
            arguments: dict[str, Any] = {"attention_mask": packed.mask.to(self.device)}
        else:
            positions = self.split.own(packed.positions)
            arguments = {"attention_mask": self._shared_mask(packed), "position_ids": positions.to(self.device)}
        backbone = cast(Any, self.network).base_model
        ids = self.split.own(packed.ids).to(self.device)
        states = backbone(input_ids=ids, use_cache=False, **arguments).last_hidden_state
        return self.split.deal(self._scaled(states.to(self.head.device)), packed)

    def _shared_mask(self, packed: packing.Packed) -> Tensor:
        width = packed.ids.shape[1]
        if self.choice.attention != "eager":
            return attention.SharedMask.of(packed.segments, width, self.device, self.split)
        hidden = ~packing.dense(packed.segments, width).to(self.device)
        lowest = torch.finfo(self.head.dtype).min  # eager attention adds its mask to the scores
        return torch.zeros_like(hidden, dtype=self.head.dtype).masked_fill_(hidden, lowest)

    @contextmanager
    def otherwise(self) -> Generator[None]:
        """Inside, attention is another implementation: the same function, rounded otherwise."""
        network, chosen = cast(Any, self.network), self.choice.attention
        network.set_attn_implementation("sdpa" if chosen == "eager" else "eager")
        try:
            yield
        finally:
            network.set_attn_implementation(attention.NAME if chosen == "sdpa" else chosen)

    @property
    def attention_kinds(self) -> set[str]:
        """What the layers read: every earlier token, a window of them, or something else."""
        plain = self.config.get_text_config().to_dict()
        windowed = "sliding_attention" if plain.get("sliding_window") else "full_attention"
        return set(plain.get("layer_types") or [windowed])

    @property
    def full_attention(self) -> bool:
        """Whether every layer reads every earlier token."""
        return self.attention_kinds == {"full_attention"}

    @cached_property
    def shares_prompts(self) -> bool:
        """Whether this network computes the same from a shared row: tried once, on a few tokens.

        Flash attention takes no such mask, a sliding window would be lost in it, ALiBi does not read positions.
        """
        if self.choice.attention not in ("sdpa", "eager") or not self.full_attention:
            return False
        paths = self._trial()
        with torch.no_grad():
            alone, together = self.states(paths).float(), self._run(packing.shared(paths, [len(paths)])).float()
        scale = alone.abs().max()
        return bool((alone - together).abs().max() <= 0.02 * scale)

    def _trial(self) -> list[packing.Read]:
        """Three paths of a few tokens that begin alike."""
        ids = [1 + i % (len(self.head) - 1) for i in range(40)]
        prompt, rests = ids[:16], [ids[16 + 5 * i : 24 + 5 * i] for i in range(3)]
        return [(View("base", (*prompt, *rest[:i])), tuple(rest[i:])) for i, rest in enumerate(rests)]

    def require(self, split: Split, path: str) -> None:
        """Refuse to split the rows of a network that would compute something else from them; tried on a few tokens."""
        text, asked = self.config.get_text_config(), f"distributed.split = {split.size}"
        heads = text.num_attention_heads
        allowed = possible(heads, getattr(text, "num_key_value_heads", None) or heads)
        if split.size not in allowed:
            raise PastError(
                f"{asked}: the {heads} attention heads of '{path}' divide over {', '.join(map(str, allowed))} processes"
            )
        if self.choice.attention != "sdpa":
            raise PastError(f"{asked} needs model.attention = 'sdpa', and it is '{self.choice.attention}'")
        if not self.shares_prompts or self._stretched or self.world.any(not self._divides(split)):
            raise PastError(
                f"{asked}: '{path}' ({self.config.model_type}) would compute something else from split rows: not every "
                "layer is attention to all earlier tokens, or positions depend on the longest row; set it to 1"
            )

    @property
    def _stretched(self) -> bool:
        """Whether the rotary frequencies of a position depend on others."""
        rope: dict[str, Any] = self.config.get_text_config().to_dict().get("rope_parameters") or {}
        return rope.get("rope_type") in STRETCHED

    @torch.no_grad()
    def _divides(self, split: Split) -> bool:
        paths = self._trial()
        whole = self.states(paths).float()
        try:
            self.split = split
            own = self.states(paths, [len(paths)]).float()
        finally:
            self.split = Split()
        apart = own - whole[split.here([len(y) for _, y in paths], whole.device)]
        return bool((apart.abs() <= 0.02 * whole.abs().max()).all())

    @cached_property
    def worth(self) -> int:
        """How many positions a segment of a shared row must save: what it costs, over what a position costs.

        A segment is an attention of its own in every layer, forward and backward; a position is a product with every
        weight of the layer in either.
        """
        layers = self.config.get_text_config().num_hidden_layers
        weights = sum(p.numel() for n, p in self.network.named_parameters() if LAYER.search(n) and "lora_" not in n)
        cost = SEGMENT["cpu" if self.device.type == "cpu" else "gpu"]
        return max(1, round(cost / (4 * max(1, weights) / layers)))

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

    def __init__(
        self,
        section: ModelSection,
        seed: int = 0,
        world: World | None = None,
        shard: Shard = "none",
        split: int = 1,
    ):
        self.section = section
        self.tokenizer = self._read_tokenizer(section)
        super().__init__(section, section.path, place(hardware(section), world or World()), world)
        self._fit_vocabulary()
        self.expert = None if section.expert is None else self._load_expert(section.expert)
        self.peft = self._adapters(self.network, seed)
        if self.choice.device_map is None:
            self.peft.to(self.device)
        self.peft.eval()  # no dropout anywhere: live and frozen views are functions
        self._blocks = self._checkpointed_blocks()
        self._layers = [m for m in self.peft.modules() if isinstance(m, LoraLayer)]
        self.lora_dtype = settle_lora(section.lora, self.choice.dtype)
        if section.lora.dtype == "float32" and self.lora_dtype != "float32":
            multiply_in_base(self._layers)
        self._parameters = {a: self._named(a) for a in TRAINABLE}
        self._phase: Adapter | None = None
        self._active: Adapter | None = None
        self.versions: dict[Adapter, int] = {"base": 0, "student": 0, "teacher": 0}
        self._folded: tuple[Adapter, int, list[Tensor]] | None = None
        self._base_digest: str | None = None
        self._shards: list[Any] = []
        self.activate("base")
        self._group = self._settle_split(1 if self.world.alone else split)
        if shard != "none" and not self.world.alone:
            self._shard(shard)

    def _read_tokenizer(self, section: ModelSection) -> Any:
        return load_tokenizer(section)

    @property
    def stops(self) -> frozenset[int]:
        """The ids that end a response: the model's generation settings' and the tokenizer's."""
        configured = cast(Any, self.network).generation_config.eos_token_id
        ids = configured if is_list(configured) else [configured]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if i is not None)

    @property
    def sharded(self) -> bool:
        """Whether a forward exchanges weights, so that all ranks must make the same ones."""
        return bool(self._shards)

    def _settle_split(self, size: int) -> Split:
        """The ranks that share this one's rows in a phase, and only there."""
        if size == 1:
            return Split()
        if self.world.size % size:
            raise PastError(
                f"distributed.split = {size}: {self.world.size} processes are no groups of {size}; start a multiple of "
                f"{size}"
            )
        split = Split(size, self.world)
        self.require(split, self.section.path)
        if self.expert is not None:
            self.expert.require(split, self.section.expert or "")
        return split

    def _share_rows(self, split: Split) -> None:
        self.split = split
        if self.expert is not None:
            self.expert.split = split

    def _shard(self, shard: Shard) -> None:
        """Spread the blocks' frozen weights over the ranks. Embeddings, norm and head, which the losses read, stay."""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        if "ignored_params" not in inspect.signature(fully_shard).parameters:
            raise PastError(
                f"distributed.shard = '{shard}' needs a newer torch than {torch.__version__}; 2.13 is tested"
            )
        self._base_digest = self.digest_base()
        _ = self.shares_prompts  # tried on the whole base
        layers = self.config.get_text_config().num_hidden_layers
        stacks = [m for m in self.network.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
        mesh = self._mesh(shard)
        adapters = {parameter for name in TRAINABLE for parameter in self._parameters[name].values()}
        blocks = list(stacks[0])
        for block in blocks:
            fully_shard(block, mesh=mesh, ignored_params=adapters)
        backbone = cast(Any, self.network).base_model
        whole = {parameter for parameter in backbone.parameters() if not isinstance(parameter, DTensor)}
        fully_shard(backbone, mesh=mesh, ignored_params=whole)
        self._shards = blocks

    def _mesh(self, shard: Shard) -> Any:
        """All ranks in a row, or for 'hybrid' a row for each machine: its ranks share the weights."""
        from torch.distributed.device_mesh import init_device_mesh

        size, local = self.world.size, self.world.local_size
        if shard == "full" or size == local:
            return init_device_mesh(self.device.type, (size,))
        if size % local or self.world.rank % local != self.world.local_rank:
            raise PastError(
                "distributed.shard = 'hybrid' needs as many processes on every machine, numbered machine by machine "
                "(srun: a block distribution); else use 'full'"
            )
        return init_device_mesh(self.device.type, (size // local, local), mesh_dim_names=("copy", "shard"))

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Inside, every rank holds the whole base, and ranks may make different forwards: for sampling."""
        for block in self._shards:
            block.set_reshard_after_forward(False)
            block.unshard()
        try:
            yield
        finally:
            for block in self._shards:
                block.reshard()
                block.set_reshard_after_forward(True)
            if self._shards:
                self._folded = None

    @torch.no_grad()
    def idle(self, forwards: int) -> None:
        """Forwards for nothing, beside those that other ranks of a sharded base make."""
        for _ in range(forwards):
            self.states([(View("base", (0,)), (0,))])

    def digest_base(self) -> str:
        """A hash of the frozen weights, as they were before they were spread."""
        return self._base_digest or super().digest_base()

    def _fit_vocabulary(self) -> None:
        highest = max(self.tokenizer.get_vocab().values())
        if highest >= len(self.head):
            raise PastError(
                f"model.path: the tokenizer of '{self.section.path}' has ids up to {highest}, but the model's head has "
                f"{len(self.head)} rows; the two do not belong together, or the head must be resized and saved first"
            )

    def _adapters(self, base: Any, seed: int) -> PeftModel:
        lora = self.section.lora
        targets, transposed = lora.targets, False
        if targets == "auto":
            targets, transposed = linear_targets(base, self.config.get_text_config().num_hidden_layers)
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=0.0,
            target_modules=targets,
            fan_in_fan_out=transposed,
            task_type="CAUSAL_LM",
            bias="none",
        )
        upcast = lora.dtype == "float32"
        try:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = get_peft_model(base, config, adapter_name="student", autocast_adapter_dtype=upcast)
                model.add_adapter("teacher", config, autocast_adapter_dtype=upcast)
        except ValueError as error:
            raise PastError(f"model.lora.targets = {lora.targets!r} does not fit this model: {error}") from None
        return cast(PeftModel, model)

    def _checkpointed_blocks(self) -> list[nn.Module]:
        if not self.choice.gradient_checkpointing:
            return []
        network = cast(Any, self.network)
        if not network.supports_gradient_checkpointing:
            if self.section.gradient_checkpointing == "auto":
                return []
            raise PastError(f"model.gradient_checkpointing: '{self.section.path}' does not support it; set it to false")
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return [m for m in network.modules() if isinstance(m, GradientCheckpointingLayer)]

    def _load_expert(self, path: str) -> Network:
        # Beside the student's head, where both views' states meet in the loss.
        choice = replace(self.choice, device=str(self.head.device), device_map=None)
        expert = Network(self.section, path, choice, self.world)
        tokenizer = load_tokenizer(self.section.model_copy(update={"path": path, "revision": None, "gguf_file": None}))
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

    @property
    def sizes(self) -> dict[str, int]:
        """Parameters of the frozen base and of one adapter: what is served is one of each."""
        base = sum(p.numel() for name, p in self.network.named_parameters() if "lora_" not in name)
        return {"base": base, "adapter": sum(p.numel() for p in self.parameters("student").values())}

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
    def training(self, adapter: Adapter) -> Generator[None]:
        """A phase: inside it exactly this adapter's parameters are trainable; outside none are."""
        self._phase = adapter
        self.activate(adapter)
        self._folded = None  # the phase moves the adapter, and its activations need the room
        self._checkpointing(True)
        self._share_rows(self._group)
        try:
            yield
        finally:
            self._share_rows(Split())
            self._checkpointing(False)
            self._phase = None
            self.activate("base")

    def _checkpointing(self, on: bool) -> None:
        # A block checkpoints only in training mode, and drops its cache then: its own flag is raised, for a phase, and
        # none of its parts'.
        for block in self._blocks:
            block.training = on

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

    def fingerprint(self, adapter: Adapter) -> str:
        """Whether an adapter is bit for bit what it was."""
        return fingerprint(self._parameters[adapter].values())

    def mark(self, adapter: Adapter, bits: bool) -> tuple[str, ...]:
        """Changes when the adapter does: torch's own count of writes to each tensor and, where asked, every bit.

        The count costs next to nothing; what is written through `.data` escapes it, and nothing escapes the bits.
        """
        writes = " ".join(str(parameter._version) for parameter in self._parameters[adapter].values())
        return (writes, self.fingerprint(adapter)) if bits else (writes,)

    def digest(self, adapter: Adapter) -> str:
        """A hash of an adapter's bytes."""
        digest = hashlib.sha256()
        for name, parameter in self._parameters[adapter].items():
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def save_adapter(self, adapter: Adapter, folder: Path) -> None:
        """Write an adapter as plain PEFT loads it."""
        tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(self.peft, adapter_name=adapter)
        safetensors.torch.save_file(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, folder / "adapter_model.safetensors"
        )
        config = cast(LoraConfig, copy(self.peft.peft_config[adapter]))
        config.inference_mode = True
        config.target_modules = in_order(config.target_modules)
        config.save_pretrained(str(folder))

    @property
    def max_context(self) -> int:
        """Prompt plus response, in tokens."""
        text = self.config.get_text_config()
        own = text.to_dict().get(text.attribute_map.get("max_position_embeddings", "max_position_embeddings"))
        limits = [n for n in (own, self.section.max_context) if n is not None]
        if not limits:
            raise PastError(f"'{self.section.path}' names no longest context; set model.max_context")
        return min(limits)

    def hidden(self, paths: Sequence[packing.Read], sizes: Sequence[int] = ()) -> Tensor:
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
            return self.expert.states(paths, sizes)
        self.activate(adapter)
        return self.states(paths, sizes)

    @torch.no_grad()
    def perturb(self, seed: int, scale: float) -> None:
        """Move both adapters off the identity, for measurements: fresh ones do nothing, and agree exactly."""
        draw = torch.Generator().manual_seed(seed)
        for adapter in TRAINABLE:
            for parameter in self._parameters[adapter].values():
                parameter.add_(scale * torch.randn(parameter.shape, generator=draw).to(parameter))
            self.bump(adapter)

    @property
    def folds(self) -> bool:
        """Whether `sampling` folds the adapter into the weights."""
        return self.choice.dtype == "float32"

    @contextmanager
    def sampling(self, adapter: Adapter) -> Generator[nn.Module]:
        """The network as one adapter's policy, fast: folded into the weights, which are put back afterwards.

        Half-precision weights would round a small update away, so there the adapter stays beside them, as in training.
        """
        if not self.folds:
            self.activate(adapter)
            yield self.network
            return
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
            "compute": f"{self.choice.dtype} {self.choice.attention}",
        }
