"""What the engines' tests share."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from past_opsd.core import config
from past_opsd.core.config import LoraSection, ModelSection
from past_opsd.core.nouns import Adapter, derive_seed
from past_opsd.policy.model import Model
from past_opsd.rollout import serve
from past_opsd.rollout.engines import Engine

# Compiling would cost minutes and change nothing that is tested here.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
QUICK = {"enforce_eager": True, "max_num_seqs": 32, "distributed_executor_backend": "uni"}
ADAPTERS: tuple[Adapter, ...] = ("student", "teacher", "base")


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def need_vllm() -> None:
    if not has_vllm():
        pytest.skip("vLLM is not installed here; 'make test-vllm' runs this")


def perturbed(folder: Path) -> Model:
    """Student and teacher at version 1, each moved away from the base and from the other."""
    made = Model(ModelSection(path=str(folder), lora=LoraSection(rank=4, alpha=8)), seed=1)
    for adapter in ("student", "teacher"):
        move(made, adapter)
    return made


def move(model: Model, adapter: Adapter, scale: float = 0.05) -> None:
    """What an optimizer step does: other weights under the next version."""
    generator = torch.Generator().manual_seed(derive_seed(adapter, model.versions[adapter]) >> 1)
    with torch.no_grad():
        for parameter in model.parameters(adapter).values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    model.bump(adapter)


def publish(engine: Engine, model: Model) -> Engine:
    for adapter in ("student", "teacher"):
        engine.publish(adapter, model.versions[adapter])
    return engine


class ServerProcess:
    """`past serve` as a user runs it, on a port of its own."""

    def __init__(self, folder: Path, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        settings = [f"model.path={folder}", "engine.name=vllm", f"engine.arguments={config.toml_value(QUICK)}"]
        self._recipe = config.load("embedded/past", settings)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = serve.command(self._recipe, "127.0.0.1", self.port)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                words, env=os.environ | serve.variables_of(self._recipe), stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.3)
        pytest.fail(f"the server did not start:\n{self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        """As if the machine had gone: no signal handler runs, and neither does any of its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
