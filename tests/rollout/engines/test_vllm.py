"""vLLM beyond the contract: adapters that are swapped, refused and lost, servers that die, whole runs."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from ranks import Launcher
from rollout.engines.parts import QUICK, ServerProcess, move, need_vllm, perturbed, publish

from past_opsd.core import config
from past_opsd.core.config import LoraSection, ModelSection, Sampling
from past_opsd.core.nouns import PastError, View, derive_seed
from past_opsd.policy.model import Model
from past_opsd.policy.pretrained import cache
from past_opsd.rollout.engines import Request, vllm
from past_opsd.rollout.engines._draw import choose, uniforms_of
from past_opsd.rollout.engines.vllm_backend import (
    Draw,
    Options,
    Probe,
    Served,
    arguments,
    environment,
    parameters,
    share,
    silence,
    trainer_needs,
)
from past_opsd.rollout.engines.vllm_server import FaultError, Server
from past_opsd.run import checkpoint
from past_opsd.run.export import export
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import session, train

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn about themselves

SAMPLING = Sampling(max_new_tokens=34)


@pytest.fixture
def mine(folder: Path) -> Model:
    """A model that a test may change."""
    return perturbed(folder)


@pytest.fixture(scope="module", params=["vllm-local", "vllm-server"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def kept(kind: str, make: Callable[..., Any], folder: Path) -> Iterator[tuple[vllm.VllmEngine, Model]]:
    """An engine with a model of its own; tests that break either put it right again."""
    model = perturbed(folder)
    engine = publish(make(kind, model), model)
    yield engine, model
    engine.close()


def listed(url: str) -> dict[str, str]:
    """The adapters a server says it has, and where from."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return {c["id"]: c["root"] for c in json.load(response)["data"] if c["parent"] is not None}


def students(requests: list[Request]) -> list[Request]:
    return [Request(View("student", r.view.prompt), r.seed) for r in requests]


def test_every_version_has_a_name_a_number_and_a_folder_of_its_own(
    kept: tuple[vllm.VllmEngine, Model], kind: str, server: ServerProcess
):
    engine, model = kept
    seen = []
    for _ in range(3):
        move(model, "student")
        engine.publish("student", model.versions["student"])
        engine.publish("student", model.versions["student"])  # nothing moved, nothing to do
        seen.append(engine._served["student"])
    assert len({s.name for s in seen}) == len({s.number for s in seen}) == len({s.folder for s in seen}) == 3
    assert [s.name.rsplit("-", 2)[0] for s in seen] == [f"student-c{s.version:05d}" for s in seen]
    current = {s.name: str(s.folder) for s in engine._served.values()}
    assert sorted(current) == sorted(p.name for p in engine._folder.iterdir())
    if kind == "vllm-server":
        mine = {name: root for name, root in listed(server.url).items() if root.startswith(str(engine._folder))}
        assert mine == current
    else:
        assert engine._backend._llm.llm_engine.list_loras() == {s.number for s in engine._served.values()}


def test_another_adapter_under_the_name_is_refused(
    kept: tuple[vllm.VllmEngine, Model], monkeypatch: pytest.MonkeyPatch
):
    """The folder is changed between the trainer's writing and vLLM's reading."""
    engine, model = kept
    backend, load = engine._backend, engine._backend.load

    def tampered(served: Any) -> None:
        shutil.copy(engine._served["teacher"].folder / "adapter_model.safetensors", served.folder)
        load(served)

    move(model, "student")
    monkeypatch.setattr(backend, "load", tampered)
    with pytest.raises(PastError, match="serves something else than student-c"):
        engine.publish("student", model.versions["student"])
    monkeypatch.undo()
    move(model, "student")
    engine.publish("student", model.versions["student"])


def test_a_file_that_is_not_the_adapter_is_refused(
    kept: tuple[vllm.VllmEngine, Model], monkeypatch: pytest.MonkeyPatch
):
    engine, model = kept
    save = model.save_adapter
    move(model, "student")
    monkeypatch.setattr(model, "save_adapter", lambda adapter, folder: save("teacher", folder))
    with pytest.raises(PastError, match="is not the student in memory"):
        engine.publish("student", model.versions["student"])
    monkeypatch.undo()
    move(model, "student")
    engine.publish("student", model.versions["student"])


def test_responses_of_other_weights_are_refused(kept: tuple[vllm.VllmEngine, Model], requests: list[Request]):
    """The trainer moved without a new version: nothing but the comparison can see it."""
    engine, model = kept
    parameter = next(p for n, p in model.parameters("student").items() if "lora_B" in n)
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(0.3)
    try:
        with pytest.raises(PastError, match="differ from the trainer's by") as refused:
            engine.sample(students(requests), SAMPLING, model.versions)
    finally:
        with torch.no_grad():
            parameter.copy_(before)
    assert all(word in str(refused.value) for word in ("dtype", "adapter", "template", "attention"))
    engine.sample(students(requests), SAMPLING, model.versions)


def test_the_distance_to_the_trainer_is_reported(
    kept: tuple[vllm.VllmEngine, Model], requests: list[Request], kind: str
):
    engine, model = kept
    engine.metrics()
    responses = engine.sample(requests, Sampling(max_new_tokens=34, temperature=1.4, top_p=0.9), model.versions)
    move(model, "teacher")
    engine.publish("teacher", model.versions["teacher"])
    said = engine.metrics()
    assert 0 < said["engine/logprob_mean_abs"] <= said["engine/logprob_max_abs"] < 1e-4
    assert 0 < said["engine/probe_mean_abs"] < 1e-4
    assert 0 < said["engine/logprob_tokens"] < sum(len(r.tokens) for r in responses)
    assert said.get("engine/retries") == (0 if kind == "vllm-server" else None)


def test_servers_that_die_and_return_change_no_sample(
    mine: Model, requests: list[Request], server: ServerProcess, second: ServerProcess
):
    """One of two servers is killed in the middle of a batch, which the other ends; started again, it has lost its
    adapters."""
    work = [Request(r.view, derive_seed(r.seed, i)) for i in range(3) for r in requests]
    urls = {"mode": "server", "urls": [server.url, second.url], "in_flight": 2, "mismatch_samples": 1}
    engine = publish(vllm.build(Options.model_validate(urls), mine), mine)
    alone = urls | {"urls": [second.url], "patience_seconds": 0.5}
    impatient = publish(vllm.build(Options.model_validate(alone), mine), mine)
    undisturbed = engine.sample(work, SAMPLING, mine.versions)
    engine.metrics()
    answered = _count(engine._backend._servers[1])

    again: list[Any] = []
    thread = threading.Thread(target=lambda: again.extend(engine.sample(work, SAMPLING, mine.versions)))
    thread.start()
    while len(answered) < 5:
        time.sleep(0.01)
    second.kill()
    with pytest.raises(PastError, match=r"no vLLM server came back within .* continue the run with --resume"):
        impatient.sample(work, SAMPLING, mine.versions)
    thread.join(timeout=400)
    assert [r.tokens for r in again] == [r.tokens for r in undisturbed]
    assert engine.metrics()["engine/retries"] > 0
    second.start()
    second.wait()
    half = len(answered)
    deadline = time.monotonic() + 100
    while len(answered) == half and time.monotonic() < deadline:
        again = engine.sample(work, SAMPLING, mine.versions)
    assert half < len(answered), "it gets no requests"
    assert [r.tokens for r in again] == [r.tokens for r in undisturbed]
    assert {s.name for s in engine._served.values()} <= set(listed(second.url))
    for made in (engine, impatient):
        made.close()


def _count(server: Any) -> list[int]:
    """Completed requests of a server, as they come."""
    done: list[int] = []
    complete = server.complete

    def counted(*args: Any) -> Any:
        answer = complete(*args)
        done.append(1)
        return answer

    server.complete = counted
    return done


def test_a_server_that_does_not_answer_in_time_ends_the_run(
    mine: Model, requests: list[Request], server: ServerProcess
):
    options = Options.model_validate({"mode": "server", "urls": [server.url], "patience_seconds": 0.0, "retries": 1})
    engine = publish(vllm.build(options, mine), mine)
    engine._backend._servers[0]._options = options.model_copy(update={"timeout_seconds": 1e-4})
    with pytest.raises(PastError, match="--resume"):
        engine.sample(requests, SAMPLING, mine.versions)
    engine._backend._servers[0]._options = options
    assert len(engine.sample(requests, SAMPLING, mine.versions)) == len(requests)
    engine.close()
    assert not engine._folder.exists()


def test_a_server_of_another_shape_is_refused(mine: Model, folder: Path, server: ServerProcess, tmp_path: Path):
    with pytest.raises(PastError, match="takes 256 tokens, the recipe needs 1024"):
        vllm.build(Options.model_validate({"mode": "server", "urls": [server.url], "max_model_len": 1024}), mine)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 0.9
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    model = Model(ModelSection(path=str(other), lora=LoraSection(rank=4, alpha=8)), seed=1)
    with pytest.raises(PastError, match="serves something else than base"):
        vllm.build(Options.model_validate({"mode": "server", "urls": [server.url]}), model)


RUN = [
    "run.cycles=2",
    "rollout.problems_per_cycle=6",
    "method.group_max=4",
    "task.train_problems=30",
    "task.eval_problems=8",
    "evaluation.samples=4",
    "evaluation.pass_k=[1, 4]",
    "evaluation.at=[0.0, 1.0]",
]


def test_runs_agree_across_engines(folder: Path, tmp_path: Path, server: ServerProcess, quiet: Any):
    """Two cycles of PAST: the same rollouts, continuations and evaluations, token by token, in every engine."""
    vllm_options = ["engine.name=vllm", f"engine.arguments={config.toml_value(QUICK)}"]
    engines = {
        "torch": [],
        "local": vllm_options,
        "server": [*vllm_options, "engine.mode=server", f'engine.urls=["{server.url}"]'],
    }
    runs = {}
    for name, settings in engines.items():
        recipe = config.load("embedded/past", [*RUN, f"model.path={folder}", *settings])
        runs[name] = train(recipe, tmp_path / name, resume=False, display=quiet).evaluations
    drawn = {name: _drawn(tmp_path / name) for name in engines}
    assert len(drawn["torch"]) > 12
    assert {row["correct"] for row in drawn["torch"]} == {True, False}
    assert drawn["torch"] == drawn["local"] == drawn["server"]
    for step in (0, 2):
        assert runs["torch"][step] == runs["local"][step] == runs["server"][step]
    for name in ("local", "server"):
        for line in RunFolder(tmp_path / name).read_metrics():
            assert 0 < line["engine/logprob_mean_abs"] < 1e-4
    assert not any(key.startswith("engine/") for key in RunFolder(tmp_path / "torch").read_metrics()[0])


def _drawn(run: Path) -> list[dict[str, Any]]:
    """Every rollout and continuation of a run, without the numerics."""
    files = sorted([*(run / "rollouts").iterdir(), *(run / "continuations").iterdir()])
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [{key: value for key, value in row.items() if key != "logprobs"} for row in rows]


def test_a_real_model_agrees_with_the_trainer(make: Callable[..., Any]):
    """SmolLM2 in float32 under a moved adapter, sampled hot and cut."""
    need_vllm()
    if not (cache() / "smollm2-135m" / "config.json").is_file():
        pytest.skip("past models pull smollm2-135m")
    model = Model(ModelSection(path="smollm2-135m", max_context=256, lora=LoraSection(rank=8, alpha=16)), seed=1)
    move(model, "student", 0.02)
    engine = publish(make("vllm-local", model), model)
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count to five."}], tokenize=False, add_generation_prompt=True
    )
    prompt = tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    wanted = [Request(View(adapter, prompt), 7) for adapter in ("student", "base", "student")]
    sampling = Sampling(temperature=1.1, top_p=0.95, top_k=20, max_new_tokens=12)
    responses = engine.sample(wanted, sampling, model.versions)
    engine.close()
    assert responses[0].tokens == responses[2].tokens != responses[1].tokens
    for request, response in zip(wanted, responses, strict=True):
        expected = vllm.logprobs(model, request.view, response.tokens, 1.1)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-3)
    embedded = publish(make("torch", model), model).sample(wanted, sampling, model.versions)
    assert [r.tokens for r in embedded] == [r.tokens for r in responses]


def test_both_interfaces_draw_a_seeds_token_at_its_position():
    need_vllm()
    from past_opsd.rollout.engines.vllm_logits import Draws

    sampling = Sampling(temperature=1.3, top_p=0.8, min_p=0.05)
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)) * 2
    seeds, written, lengths = [2**64 - 5, 11, 12], [[], [4, 4], [1] * 300], np.array([9, 4, 6])
    plain = {"temperature": 1.3, "top_p": 0.8, "top_k": 0, "min_p": 0.05}
    params = [SimpleNamespace(**plain, extra_args={"past_seed": str(seed)}) for seed in seeds]
    by_slot = Draws(None, SimpleNamespace(prompt_len=SimpleNamespace(np=lengths)))
    by_row = Draws(None, torch.device("cpu"), False)
    for slot, param in enumerate(params):
        by_slot.add_request(slot, param)
    added = [(row, param, None, out) for row, (param, out) in enumerate(zip(params, written, strict=True))]
    by_row.update_state(SimpleNamespace(batch_size=3, added=added, removed=[], moved=[]))
    uniforms = [uniforms_of(seed, 301)[len(out)] for seed, out in zip(seeds, written, strict=True)]
    picked, logp = choose(logits, torch.tensor(uniforms), sampling)
    now = lengths + np.array([len(out) for out in written])
    for out in (
        by_row.apply(logits.clone()),
        by_slot.apply(logits.clone(), SimpleNamespace(idx_mapping_np=np.arange(3), seq_lens_upper_bound_np=now)),
    ):
        assert torch.isfinite(out).sum(1).tolist() == [1, 1, 1]
        assert out.argmax(1).tolist() == picked.tolist()
        torch.testing.assert_close(out.max(1).values / 1.3, logp, atol=1e-5, rtol=1e-5)


def test_both_interfaces_of_the_logits_processor_normalise_at_each_requests_temperature():
    need_vllm()
    from past_opsd.rollout.engines.vllm_logits import Draws

    wanted = {0: 1.0, 1: 0.5, 2: 0.0, 3: 1.7}
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(0)) * 3
    lengths = np.array([5, 6, 7, 8])
    by_slot = Draws(None, SimpleNamespace(prompt_len=SimpleNamespace(np=lengths)))
    by_row = Draws(None, torch.device("cpu"), False)
    plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "extra_args": None}
    params = {slot: SimpleNamespace(temperature=t, **plain) for slot, t in wanted.items()}
    for slot, param in params.items():
        assert by_slot.add_request(slot, param)
    slots = torch.tensor([2, 0, 3, 1])
    added = [(row, params[int(slot)], None, []) for row, slot in enumerate(slots)]
    by_row.update_state(SimpleNamespace(batch_size=4, added=added, removed=[], moved=[]))
    temperatures = torch.tensor([wanted[int(s)] or 1.0 for s in slots])[:, None]
    expected = (logits / temperatures).log_softmax(-1)
    for out in (
        by_slot.apply(
            logits.clone(), SimpleNamespace(idx_mapping_np=slots.numpy(), seq_lens_upper_bound_np=lengths[slots])
        ),
        by_row.apply(logits.clone()),
    ):
        torch.testing.assert_close(out / temperatures, expected, atol=1e-5, rtol=1e-5)


def test_a_missing_server_is_said_at_once(model: Model):
    with pytest.raises(PastError, match=r"no vLLM server answers at http://127\.0\.0\.1:9 .*past serve"):
        vllm.build(Options.model_validate({"mode": "server", "urls": ["http://127.0.0.1:9/"]}), model)


def test_an_adapter_folder_that_is_not_there_is_said(model: Model):
    with pytest.raises(PastError, match="adapter_folder"):
        vllm.build(Options.model_validate({"mode": "server", "adapter_folder": "/nowhere/at/all"}), model)


def test_a_probe_weighs_differences_as_tokens_are_sampled():
    probe = Probe((1, 2), np.log(np.array([0.7, 0.2, 0.1])))
    same = {i: float(v) for i, v in enumerate(probe.expected)}
    assert probe.distance(same) == 0
    assert probe.distance(same | {2: same[2] + 1}) == pytest.approx(0.1)
    assert probe.distance({0: same[0] - 0.5, 1: same[1]}) == pytest.approx(0.7 * 0.5 / 0.9)


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (4, 8), (16, 16), (65, 128)])
def test_the_rank_is_the_next_that_vllm_has(rank: int, served: int):
    section = ModelSection(path="embedded", lora=LoraSection(rank=rank))
    assert arguments(section, Options())["max_lora_rank"] == served


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        pytest.param({"lora": LoraSection(rank=1024)}, {}, "up to rank 512", id="rank"),
        pytest.param({}, {"arguments": {"dtype": "half"}}, "'dtype' is decided by the recipe", id="reserved"),
        pytest.param({"path": "embedded", "gguf_file": "x.gguf"}, {}, "cannot serve x.gguf", id="gguf"),
    ],
)
def test_what_vllm_cannot_serve_is_said(section: dict, options: dict, message: str):
    with pytest.raises(PastError, match=message):
        arguments(ModelSection(**({"path": "embedded"} | section)), Options.model_validate(options))


def test_an_address_needs_a_scheme():
    with pytest.raises(PastError, match="not an address like http"):
        config.load("embedded/past", ["engine.name=vllm", 'engine.urls=["localhost:8000"]'])


def test_sampling_is_said_in_full():
    said = parameters(Sampling(temperature=1.1, top_p=0.9, top_k=20, min_p=0.1, max_new_tokens=7), [1, 2], 0)
    expected = {"temperature": 1.1, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_tokens": 7, "stop_token_ids": [1, 2]}
    assert expected.items() <= said.items()
    assert said["repetition_penalty"] == 1


GIB = 2**30


def test_vllm_takes_of_a_gpu_what_the_trainer_leaves():
    # 80 GiB of which 70 are free; the trainer will take 20, so 50 are left; weights of 4 GiB.
    assert share(80 * GIB, 70 * GIB, 20 * GIB, 4 * GIB) == pytest.approx(50 / 80)
    assert share(80 * GIB, 80 * GIB, 1 * GIB, 4 * GIB) == 0.9  # the largest share
    assert share(80 * GIB, 20 * GIB, 10 * GIB, 8 * GIB) == pytest.approx(10 / 80)  # 9.8 GiB are the least
    message = r"of 80\.0 GiB of GPU memory 19\.0 are free .* will take about 10\.0 .* vLLM needs 9\.8"
    with pytest.raises(PastError, match=message):
        share(80 * GIB, 19 * GIB, 10 * GIB, 8 * GIB)


def test_what_the_trainer_will_take_covers_steps_that_were_traced():
    """Activations, gradients and loss of a teacher step at 16,384 tokens of Qwen3-1.7B's shape take 10.64 GiB."""
    adapter = 70_000_000
    optimizer = 2 * 2 * 4 * adapter  # two adapters, two moments of four bytes
    step = trainer_needs(adapter, 40_960, 28, 2048, 2) - optimizer
    assert 10.64 < step / GIB < 1.1 * 10.64
    assert trainer_needs(adapter, 1_024, 28, 2048, 2) < trainer_needs(adapter, 40_960, 28, 2048, 2)


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 1800), (8192, 1800), (16384, 3600), (38912, 8550)])
def test_long_responses_are_given_more_time(tokens: int, seconds: float):
    assert silence(1800, tokens) == seconds


@pytest.fixture
def slow() -> Iterator[tuple[Server, threading.Event]]:
    """A server that answers once it is told to, and who asks it with little patience."""
    go = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            go.wait(30)
            logprobs = {"top_logprobs": [{"token_id:5": -0.1}], "token_logprobs": [-0.1]}
            body = json.dumps({"choices": [{"token_ids": [5], "logprobs": logprobs}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    options = Options.model_validate({"mode": "server", "timeout_seconds": 0.2})
    yield Server(f"http://127.0.0.1:{serving.server_port}", options, 0.1, threading.Event(), threading.Condition()), go
    go.set()
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_a_server_that_answers_others_is_waited_for(slow: tuple[Server, threading.Event]):
    server, go = slow
    draw, settings = Draw(Served("base", 0, 0, "", None, ()), (1, 2), 3), parameters(SAMPLING, [], 0)
    with pytest.raises(FaultError, match=r"no answer to anybody for 0\.2 s"):
        server._complete(draw, settings)
    server._answered = time.monotonic() + 20  # as if it had answered others until then
    threading.Timer(0.6, go.set).start()  # three times its patience
    assert server._complete(draw, settings).tokens == (5,)
    assert server._answered <= time.monotonic()


def test_what_a_person_set_in_the_environment_stays():
    section = ModelSection(path="embedded")
    assert environment(section, {})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment(ModelSection(path="Qwen/Qwen3-1.7B"), {})
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(section, {"VLLM_CPU_KVCACHE_SPACE": "8"})


def test_an_exported_adapter_is_served_as_the_student(
    folder: Path, tmp_path: Path, server: ServerProcess, quiet: Any, requests: list[Request]
):
    settings = [f"model.path={folder}", "run.cycles=2", "learner.student.lr=0.01", "evaluation.at=[]"]
    recipe = config.load("embedded/past", [*settings, "task.train_problems=60", "model.lora.rank=4"])
    train(recipe, tmp_path / "run", False, quiet)
    out = export(tmp_path / "run", tmp_path / "exported")
    _post(f"{server.url}/v1/load_lora_adapter", {"lora_name": "exported", "lora_path": str(out)})
    with session(recipe) as parts:
        checkpoint.load_adapter(parts.model, "student", out)
        parts.loop.publish()
        asked = [Request(View("student", r.view.prompt), 0) for r in requests[:8]]
        greedy = Sampling(max_new_tokens=34, temperature=0.0)
        wanted = [list(r.tokens) for r in parts.loop.lab.engine.sample(asked, greedy, parts.model.versions)]
        plain = [Request(View("base", r.view.prompt), 0) for r in asked]
        base = [list(r.tokens) for r in parts.loop.lab.engine.sample(plain, greedy, parts.model.versions)]
    body = {"model": "exported", "max_tokens": 34, "temperature": 0, "return_token_ids": True}
    served = [
        _post(f"{server.url}/v1/completions", body | {"prompt": list(request.view.prompt)})["choices"][0]["token_ids"]
        for request in asked
    ]
    _post(f"{server.url}/v1/unload_lora_adapter", {"lora_name": "exported"})
    assert served == wanted
    assert served != base, "the adapter changes nothing: the comparison says nothing"


def test_processes_share_the_server_and_its_adapters(folder: Path, tmp_path: Path, server: ServerProcess):
    """One process publishes, all sample, and a sharded base is never put together; nothing stays on the server."""
    before = listed(server.url)
    settings = [f"model.path={folder}", "run.cycles=2", "evaluation.at=[1.0]", "evaluation.samples=2"]
    settings += ["evaluation.pass_k=[1]", "task.eval_problems=2", "rollout.problems_per_cycle=3"]
    settings += ["task.train_problems=60", "model.lora.rank=4", "distributed.shard=full"]
    settings += ["engine.name=vllm", "engine.mode=server", f"engine.urls=['{server.url}']", "engine.mismatch_samples=4"]
    launcher = Launcher(tmp_path)
    for size in (1, 2):
        out = ["--out", str(tmp_path / f"{size}")]
        ended = launcher(size, "train", "embedded/past", *(w for s in settings for w in ("--set", s)), *out)
        assert ended.codes == [0] * size, ended.err
    ended = launcher(2, "train", "embedded/past", "--set", "engine.name=vllm", "--out", str(tmp_path / "local"))
    launcher.close()
    assert [m.split(":")[0] for m in ended.messages] == [
        "engine.mode = 'local' runs vLLM inside one process, but there are several"
    ]
    one, two = (RunFolder(tmp_path / f"{size}").read_metrics() for size in (1, 2))
    files = [tmp_path / f"{size}" / "rollouts" / "cycle-00000.parquet" for size in (1, 2)]
    first, second = (pq.read_table(file).to_pydict()["tokens"] for file in files)
    assert first == second
    assert [line["rollout/success"] for line in one] == [line["rollout/success"] for line in two]
    assert all(line["engine/logprob_tokens"] > 100 and line["engine/logprob_max_abs"] < 1e-3 for line in two)
    assert listed(server.url) == before


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read()
    return json.loads(text) if text.startswith(b"{") else None
