"""Engines on one small model; vLLM starts once for the whole session, where it is installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rollout.engines.parts import ADAPTERS, QUICK, ServerProcess, has_vllm, need_vllm, perturbed
from safetensors.torch import load_file, save_file

from past_opsd.core.nouns import View, derive_seed
from past_opsd.policy.model import Model, resolve
from past_opsd.rollout.engines import Engine, Request
from past_opsd.tasks import embedded


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with heads of 32 instead of 16, which is the least that vLLM's CPU attention takes.

    The same function: the new dimensions are zero, a head's dimensions go where the rotary frequencies are theirs, and
    the norms of queries and keys make up for the new mean and the new softmax scale.
    """
    source, target = Path(resolve("embedded")), tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(source, target)
    plain = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(plain | {"head_dim": 32}))
    place = torch.cat([torch.arange(0, 16, 2), torch.arange(16, 32, 2)])

    def widen(weight: torch.Tensor) -> torch.Tensor:
        rows = weight.reshape(-1, 16, *weight.shape[1:])
        wide = torch.zeros(len(rows), 32, *weight.shape[1:])
        wide[:, place] = rows
        return wide.flatten(0, 1)

    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] = widen(weight) * 2**-0.25
        elif name.endswith("o_proj.weight"):
            tensors[name] = widen(weight.T.contiguous()).T.contiguous()
        elif ".self_attn." in name:
            tensors[name] = widen(weight)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="session")
def model(folder: Path) -> Model:
    return perturbed(folder)


@pytest.fixture(scope="session")
def requests(model: Model) -> list[Request]:
    """Two samples of each of twelve problems, the three policies mixed."""
    problems = embedded.build(embedded.Options(train_problems=12)).train()
    out = []
    for i, problem in enumerate(problems):
        message = [{"role": "user", "content": embedded.STUDENT.replace("{problem}", problem.text)}]
        text = model.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt = tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])
        out += [Request(View(ADAPTERS[i % 3], prompt), derive_seed(i, draw)) for draw in (0, 1)]
    return out


@pytest.fixture(scope="session", autouse=True)
def _servers(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    """The servers that tests of this session need; they start in the background while the first tests run."""
    logs = tmp_path_factory.mktemp("servers")
    processes = {name: ServerProcess(folder, logs / name) for name in ("server", "second")}
    for name, process in processes.items():
        wanted = any(name in i.fixturenames or f"vllm-{name}" in i.name for i in request.session.items)
        if has_vllm() and wanted:
            process.start()
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()


@pytest.fixture(scope="session")
def server(_servers: dict[str, ServerProcess]) -> ServerProcess:
    need_vllm()
    _servers["server"].wait()
    return _servers["server"]


@pytest.fixture(scope="session")
def second(_servers: dict[str, ServerProcess]) -> ServerProcess:
    need_vllm()
    _servers["second"].wait()
    return _servers["second"]


@pytest.fixture(scope="session")
def make(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """`make(kind, model, **options)`: an unpublished engine."""

    def build(kind: str, model: Model, **options: object) -> Engine:
        if kind == "torch":
            from past_opsd.rollout.engines import torch as module

            return module.build(module.Options(batch=16), model)
        need_vllm()
        from past_opsd.rollout.engines import vllm as module

        if kind == "vllm-server":
            options |= {"mode": "server", "urls": [request.getfixturevalue("server").url]}
        return module.build(module.Options.model_validate({"arguments": QUICK} | options), model)

    return build
