"""From a name to weights: where a model lies, how this machine computes it, and what cannot be loaded.

A path is a model of the package, one that `past models pull` fetched, a folder, a `.gguf` file, or a hub id. Every way
in which loading can fail ends in one `PastError`.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from past_opsd.core.config import EMBEDDED as SHIPPED
from past_opsd.core.config import ModelSection
from past_opsd.core.lazy import Lazy
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import MOST, plain, read_json

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = Lazy("torch")

PULLABLE = ("smollm2-135m",)
ORIGINS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # what a pulled model is on the hub
_TEXTS = (".json", ".jinja", ".txt", ".model")


def cache() -> Path:
    """Where pulled models live: `past-opsd/models` in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "past-opsd" / "models"


def resolve(path: str) -> str:
    """The folder of a shipped or pulled model; anything else is a folder, a .gguf file or a hub id, as given."""
    if path in SHIPPED:
        return str(Path(__file__).parents[1] / "tasks" / SHIPPED[path])
    if path in PULLABLE and not Path(path).exists():
        pulled = cache() / path
        if not (pulled / "config.json").is_file():
            raise PastError(f"model.path: '{path}' is not on this machine yet; fetch it with: past models pull {path}")
        return str(pulled)
    return path


def on_disk(path: str, revision: str | None = None) -> bool:
    """Whether a model is on this machine: a file, a folder, one of the package or in the hub's cache."""
    if path in SHIPPED or path in PULLABLE or Path(path).exists():
        return True
    import huggingface_hub

    try:
        return bool(huggingface_hub.snapshot_download(path, revision=revision, local_files_only=True))
    except OSError:
        return False
    except ValueError:
        return True  # not even the name of one: nothing will be fetched


def hub_id(path: str) -> str | None:
    """What a model is called on the hub: as given, what a pulled model or a folder of the hub's cache came from.

    None for a model that only this machine knows: a shipped one, a folder, a file.
    """
    if path in SHIPPED:
        return None
    if path in ORIGINS and not Path(path).exists():
        return ORIGINS[path]
    cached = re.search(r"models--([^/]+?)--([^/]+)/snapshots(/|$)", Path(path).as_posix())
    if cached:
        return f"{cached[1]}/{cached[2]}"
    named = re.fullmatch(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", path)
    return path if named and not path.endswith(".gguf") and not Path(path).exists() else None


@dataclass(frozen=True)
class Source:
    """What transformers is asked for: a folder or hub id, and the GGUF file inside it, if that is what it holds."""

    path: str
    gguf_file: str | None = None


def locate(path: str, gguf_file: str | None = None) -> Source:
    """A .gguf file, or a folder that holds one and no other model, is loaded as GGUF."""
    place = Path(resolve(path))
    if place.is_file() and place.suffix == ".gguf":
        return Source(str(place.parent), place.name)
    if place.is_dir() and gguf_file is None and not (place / "config.json").is_file():
        found = sorted(p.name for p in place.glob("*.gguf"))
        if len(found) > 1:
            raise PastError(f"model.path: '{path}' holds {len(found)} GGUF files; choose with model.gguf_file: {found}")
        return Source(str(place), found[0] if found else None)
    return Source(resolve(path), gguf_file)


Capability = tuple[int, int]
NATIVE_BFLOAT16: Capability = (8, 0)  # Ampere; torch emulates it on older GPUs (T4, V100)


@dataclass(frozen=True)
class Machine:
    """What there is to compute with: the GPU's compute capability, None without one."""

    capability: Capability | None

    @staticmethod
    def here(section: ModelSection) -> Machine:
        """Of the GPU that the recipe means; of the least one where the base is spread over all."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            return Machine(None)
        index = int(section.device.partition("cuda:")[2] or 0)
        if index >= count:
            raise PastError(f"model.device = '{section.device}', but torch sees {count} GPU(s) here, from cuda:0 on")
        chosen = range(count) if section.device_map == "auto" else [index]
        return Machine(min(torch.cuda.get_device_capability(i) for i in chosen))


@dataclass(frozen=True)
class Choice:
    """How a model is computed; every 'auto' of the recipe settled."""

    device: str
    dtype: str
    attention: str
    gradient_checkpointing: bool
    device_map: str | None

    def __str__(self) -> str:
        place = f"spread over {self.device}s" if self.device_map else f"on {self.device}"
        checkpointing = ", gradient checkpointing" if self.gradient_checkpointing else ""
        return f"{self.dtype}, {self.attention} {place}{checkpointing}"


def settle_dtype(requested: str, capability: Capability | None) -> str:
    """The base's dtype: what is asked for, or bfloat16 on a GPU that has it and float32 elsewhere.

    Emulated bfloat16 is refused: each product goes through float32 and takes longer than float32 itself. float16 is
    never chosen by itself, since the backward pass scales no loss, and small gradients would become zero.
    """
    native = capability is not None and capability >= NATIVE_BFLOAT16
    if requested == "auto":
        return "bfloat16" if native else "float32"
    if requested == "bfloat16" and capability is not None and not native:
        major, minor = capability
        raise PastError(
            f"model.dtype = 'bfloat16': this GPU (compute capability {major}.{minor}) has no bfloat16 units, and "
            "emulated it is slower than float32; use 'auto', which is float32 here, or 'float16', at the risk of "
            "gradients too small for it"
        )
    return requested


def hardware(section: ModelSection, machine: Machine | None = None) -> Choice:
    """Settle what the recipe leaves to the machine.

    CUDA: bfloat16 where the GPU has it, checkpointing on. Elsewhere float32; on the CPU memory is rarely short, so
    checkpointing is off. MPS only when asked for. Attention is torch's own everywhere, whose flash kernels need no
    package: rows that share prompts and the written-out decoder build on it, flash-attn takes neither.
    """
    machine = machine or Machine.here(section)
    there = machine.capability is not None
    device = section.device if section.device != "auto" else "cuda" if there else "cpu"
    if device.startswith("cuda") and not there:
        raise PastError(f"model.device = '{section.device}', but torch sees no CUDA GPU here; use 'auto' or 'cpu'")
    checkpointing = section.gradient_checkpointing
    return Choice(
        device=device,
        dtype=settle_dtype(section.dtype, machine.capability if device.startswith("cuda") else None),
        attention="sdpa" if section.attention == "auto" else section.attention,
        gradient_checkpointing=device != "cpu" if checkpointing == "auto" else checkpointing,
        device_map=None if section.device_map == "single" else section.device_map,
    )


def load_tokenizer(section: ModelSection) -> Any:
    """The model's own tokenizer."""
    source = locate(section.path, section.gguf_file)
    _need_gguf(source)
    with _loading("tokenizer", section.path, source):
        return _transformers().AutoTokenizer.from_pretrained(source.path, **_common(section, section.path, source))


def read_config(section: ModelSection) -> Any:
    """The model's configuration alone: its shape, without a weight."""
    source = locate(section.path, section.gguf_file)
    _need_gguf(source)
    with _loading("configuration", section.path, source):
        return _transformers().AutoConfig.from_pretrained(source.path, **_common(section, section.path, source))


def load_network(section: ModelSection, path: str, choice: Choice) -> tuple[Any, nn.Module]:
    """Configuration and frozen weights; all dropout is off.

    Weights go from the file to the chosen device one by one, so that the host never holds the model.
    """
    source = locate(path, section.gguf_file if path == section.path else None)
    transformers = _transformers()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its tables would bury the one message
    try:
        with _loading("causal language model", path, source):
            config, common = _configured(section, path, source)
            if source.gguf_file is not None and hasattr(transformers, "GgufConfig"):  # before, always unpacked
                common["quantization_config"] = transformers.GgufConfig(dequantize=True)
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                source.path,
                config=config,
                dtype=getattr(torch, choice.dtype),
                attn_implementation=choice.attention,
                device_map=choice.device_map or choice.device,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below
                **common,
            )
            network, report = loaded
    finally:
        transformers.logging.set_verbosity(verbosity)
    _complete(path, type(network).__name__, report)
    return config, network.requires_grad_(False).eval()


def empty_network(section: ModelSection, path: str, choice: Choice) -> tuple[Any, nn.Module]:
    """The same as `load_network` without reading a weight: what is in them is for somebody else to say."""
    from transformers.initialization import no_init_weights

    source = locate(path, section.gguf_file if path == section.path else None)
    with _loading("causal language model", path, source):
        config, common = _configured(section, path, source)
        with torch.device(choice.device), no_init_weights():
            network: Any = _transformers().AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, choice.dtype),
                attn_implementation=choice.attention,
                trust_remote_code=common["trust_remote_code"],
            )
        network.tie_weights()
    return config, network.requires_grad_(False).eval()


def _configured(section: ModelSection, path: str, source: Source) -> tuple[Any, dict[str, Any]]:
    """A configuration that can be built, and what else its loading is told."""
    _need_gguf(source)
    common = _common(section, path, source)
    config = _transformers().AutoConfig.from_pretrained(source.path, **common)
    _refuse(config, path)
    _still(config)
    return config, common


def _transformers() -> Any:
    """The library, without its progress bars."""
    import transformers

    transformers.logging.disable_progress_bar()
    return transformers


@contextmanager
def _loading(what: str, path: str, source: Source) -> Generator[None]:
    """Whatever the libraries make of a folder's files, a failure is one message: damage makes them raise anything."""
    folder = Path(source.path)
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in _TEXTS:
            plain(file, MOST)
    try:
        yield
    except PastError:
        raise
    except Exception as error:
        raise PastError(_unloadable(what, path, source, error)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a library written in Rust ends in
            raise
        raise PastError(_unloadable(what, path, source, RuntimeError(str(error)))) from None


def _common(section: ModelSection, path: str, source: Source) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"trust_remote_code": section.trust_remote_code}
    if path == section.path:
        kwargs["revision"] = section.revision
    if source.gguf_file is not None:
        kwargs["gguf_file"] = source.gguf_file
    return kwargs


def _need_gguf(source: Source) -> None:
    if source.gguf_file is not None and importlib.util.find_spec("gguf") is None:
        raise PastError(f"reading {source.gguf_file} needs the gguf package: pip install gguf")


def _refuse(config: Any, path: str) -> None:
    plain = config.to_dict()
    if plain.get("is_encoder_decoder"):
        raise PastError(f"model.path: '{path}' is an encoder-decoder ({config.model_type}); a causal LM is needed")
    quantised = plain.get("quantization_config")
    if quantised is not None:
        kind = quantised.get("quant_method", "unknown method")
        raise PastError(
            f"model.path: '{path}' holds quantised weights ({kind}), which adapters cannot be trained on and folded "
            "into here; use the model's unquantised weights, or a GGUF file, which is unpacked"
        )


def _complete(path: str, kind: str, report: dict[str, Any]) -> None:
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        raise PastError(
            f"model.path: '{path}' lacks {len(missing)} weights of a {kind}, e.g. {missing[0]}; "
            "it has no language-model head, or its files are incomplete"
        )
    if mismatched:
        name, stored, wanted = mismatched[0]
        raise PastError(
            f"model.path: '{path}' holds {name} as {list(stored)} where its config.json means {list(wanted)}; "
            "the two do not belong together"
        )


def _still(config: Any) -> None:
    """No dropout, also where a layer reads its rate from the configuration: views are functions."""
    text = config.get_text_config()
    for key, value in text.to_dict().items():
        if ("dropout" in key or "pdrop" in key) and isinstance(value, float):
            setattr(text, key, 0.0)


def _unloadable(what: str, path: str, source: Source, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    folder = Path(source.path)
    if "trust_remote_code" in str(error):
        return (
            f"model.path: '{path}' brings code of its own for its {what}, which is not run; if you have read it and "
            "trust it, set model.trust_remote_code = true"
        )
    if isinstance(error, pickle.UnpicklingError):
        return (
            f"model.path: '{path}' cannot be loaded: its weights are a pickle that holds more than tensors, which "
            "could run code; use a copy in safetensors format"
        )
    if isinstance(error, ImportError) and "flash" in str(error).lower():
        return f"model.attention: flash attention is not installed ({reason}); use model.attention = 'sdpa'"
    if isinstance(error, SafetensorError):
        return f"model.path: a weights file in '{path}' is damaged ({reason}); fetch the model again"
    if (folder / "config.json").is_file() and _model_type(folder / "config.json") is None:
        return f"model.path: the config.json in '{path}' cannot be read, or names no model_type; fetch the model again"
    if folder.is_dir() and what == "tokenizer":
        return (
            f"model.path: '{path}' holds no tokenizer that can be loaded ({reason}); "
            "put the model's tokenizer.json and tokenizer_config.json beside its weights"
        )
    if (folder / "config.json").is_file():
        kind = _model_type(folder / "config.json")
        return f"model.path: '{path}' ({kind}) cannot be loaded as a causal language model: {reason}"
    if folder.is_dir() and source.gguf_file is not None:
        return f"model.path: {folder / source.gguf_file} cannot be loaded as GGUF: {reason}"
    return f"model.path: no {what} can be loaded from '{path}' ({reason}); give a local folder or a hub id that exists"


def _model_type(file: Path) -> str | None:
    try:
        found = read_json(file)["model_type"]
    except (PastError, KeyError, TypeError, IndexError):
        return None
    return found if isinstance(found, str) else None
