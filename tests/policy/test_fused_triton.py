"""The Triton kernel gives what the other implementations give, in Triton's interpreter or on a GPU, and compiles.

Triton reads TRITON_INTERPRET when it is imported, so the kernel runs in a process of its own: this file as a program
answers calls over its pipes. Where torch sees a GPU the same tests run there, compiled.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest import Largest

from past_opsd.analysis.bench import kernel
from past_opsd.core.losses import (
    GeneralizedJSD,
    Imitate,
    Match,
    ModulatedReinforce,
    Reinforce,
    SampledMatch,
    SampledStay,
    Stay,
    TopK,
)
from past_opsd.core.nouns import PastError
from past_opsd.policy import fused
from past_opsd.policy.fused import Job, Result

pytestmark = pytest.mark.slow

T, V, H = 3, 37, 8
BLOCK = 32  # two blocks a row, the second one short
ADVANTAGE = torch.tensor([-0.9, 0.0, 0.8])
LOSSES = [
    Match(),
    Match(0.05),
    Match(0.0),
    Stay(),
    Stay(0.05),
    GeneralizedJSD(0.5),
    GeneralizedJSD(0.3, 0.02),
    GeneralizedJSD(0.0, 0.05),
    GeneralizedJSD(1.0),
    Reinforce(0.8),
    Reinforce(ADVANTAGE, 0.1),
    ModulatedReinforce(-0.8),
    ModulatedReinforce(ADVANTAGE, 0.7, 0.5),
    Imitate(),
    SampledStay(),
    SampledMatch(),
    TopK(5, tail=True, tau=0.1),
]
# Distances are in units of a tensor's largest entry. float64 shows that the formulas are the same; float32 is held
# to the exact result as closely as `fused` is.
EXACT, SINGLE = 1e-12, 2e-5

Run = Callable[..., Result]


def problem(T=T, V=V, H=H, seed=0, dtype=torch.float64, apart=0.5, scale=1.5):
    draw = torch.Generator().manual_seed(seed)
    live = torch.randn(T, H, generator=draw, dtype=torch.float64) * scale
    frozen = live + torch.randn(T, H, generator=draw, dtype=torch.float64) * apart
    head = torch.randn(V, H, generator=draw, dtype=torch.float64)
    bias = torch.randn(V, generator=draw, dtype=torch.float64)
    tokens = torch.randint(V, (T,), generator=draw)
    weight = torch.rand(T, generator=draw, dtype=torch.float64) + 0.1
    live, frozen, head, bias = (x.to(dtype) for x in (live, frozen, head, bias))
    return live, frozen, head, bias, tokens, weight


def answer(name: str, block: int, implementation: Any, *args: Any, **options: Any) -> Any:
    """In the process of the kernel: a call with its tensors where the kernel runs."""
    from past_opsd.policy import fused_triton

    def moved(value: Any, device: str) -> Any:
        if isinstance(value, list):
            return [moved(item, device) for item in value]
        if isinstance(value, Job):
            return replace(value, weight=value.weight.to(device))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    fused_triton.BLOCK = block
    if name == "trial":
        right = fused_triton.elementwise
        fused_triton.elementwise = (lambda *_: None) if implementation else right  # a kernel that does nothing
        try:
            return fused._trial(torch.device("cpu" if fused_triton.INTERPRETED else "cuda"))
        finally:
            fused_triton.elementwise = right
    device = "cpu" if fused_triton.INTERPRETED else "cuda"
    args = tuple(moved(value, device) for value in args)
    options = {key: moved(value, device) for key, value in options.items()}
    if name == "largest":
        with Largest(args[2]) as seen:
            fused.run(implementation, *args, **options)
        return seen.bytes
    found = fused.run(implementation, *args, **options)
    live, *rows = ({key: row.cpu() for key, row in rows.items()} for rows in (found.live, *found.diagnostics))
    return Result(found.grad.cpu(), moved(found.values, "cpu"), live, rows)


def serve() -> None:
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            args, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = True, answer(*args, **options)
        except PastError as error:
            reply = False, error
        except Exception:
            reply = False, RuntimeError(traceback.format_exc())
        pickle.dump(reply, replies)
        replies.flush()


def program(*words: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return [sys.executable, "-W", "ignore", __file__, *words], {**kept, "PYTHONPATH": path, **environment}


def need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'past-opsd[triton]'")


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    need_triton()
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command, environment = program("serve", **mode)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def call(*args: Any, **options: Any) -> Any:
            pickle.dump((args, options), child.stdin)
            child.stdin.flush()
            good, reply = pickle.load(child.stdout)
            if not good:
                raise reply
            return reply

        yield call
        child.stdin.close()


@pytest.fixture(scope="module")
def run(call) -> Run:
    return lambda *args, block=BLOCK, **options: call("run", block, "triton", *args, **options)


def distance(found, want):
    assert found.shape == want.shape
    if not want.numel():
        return 0.0
    return float((found.double() - want.double()).abs().max()) / max(float(want.abs().max()), 1e-3)


def assert_equal(found: Result, want: Result, tolerance: float) -> None:
    assert distance(found.grad, want.grad) <= tolerance
    for value, other in zip(found.values, want.values, strict=True):
        assert distance(value, other) <= tolerance
    assert_same_rows(found, want, tolerance)


def assert_same_rows(found: Result, want: Result, tolerance: float) -> None:
    for mine, theirs in zip((found.live, *found.diagnostics), (want.live, *want.diagnostics), strict=True):
        assert set(mine) == set(theirs)
        for name, row in theirs.items():
            assert distance(mine[name], row) <= tolerance, name


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: repr(loss)[:40])
def test_every_loss_is_the_reference(run, loss):
    live, frozen, head, bias, tokens, weight = problem()
    jobs = [Job(loss, weight)]
    exact = fused.run("reference", live, frozen, head, bias, tokens, jobs, temperature=1.1)
    found = run(live, frozen, head, bias, tokens, jobs, temperature=1.1)
    assert_equal(found, exact, EXACT)
    assert_equal(found, fused.run("fused", live, frozen, head, bias, tokens, jobs, temperature=1.1), EXACT)
    single = (x.float() for x in (live, frozen, head, bias))
    found = run(*single, tokens, jobs, temperature=1.1)
    assert found.grad.dtype == found.values[0].dtype == torch.float32
    assert_equal(found, exact, SINGLE)


def test_the_clips_of_these_problems_bind_for_some_rows_only():
    live, frozen, head, bias, tokens, weight = problem()
    for loss in LOSSES:
        if isinstance(loss, Match | Stay | GeneralizedJSD) and loss.tau < math.inf:
            found = fused.run("reference", live, frozen, head, bias, tokens, [Job(loss, weight)], temperature=1.1)
            assert 0 < float(found.diagnostics[0]["clipped"].mean()) < 1, loss


def mixture(T):
    """Rows with each set of jobs: weights of zero, one watched throughout, one that hides the frozen view, none."""
    row = torch.arange(T)
    weight = torch.linspace(0.2, 1.0, T, dtype=torch.float64)
    advantage = torch.linspace(-1, 1, T, dtype=torch.float64)
    return [
        Job(Match(0.05), weight * (row % 3 == 0)),
        Job(Reinforce(advantage), weight * (row % 3 == 1), frozen=False),
        Job(ModulatedReinforce(advantage), weight * (row % 4 == 1)),
        Job(Stay(), weight * (row % 2 == 1), always=True),
        Job(TopK(4, tail=True), weight * (row == 5)),
        Job(GeneralizedJSD(0.4, 0.02), weight * (row > 5)),
        Job(SampledStay(), torch.zeros(T, dtype=torch.float64)),
    ]


@pytest.mark.parametrize("budget", [1, 5 * V * 8, 2**20], ids=["a-row", "halves", "all"])
def test_many_losses_on_many_rows_in_chunks(run, budget):
    T = 9
    live, frozen, head, bias, tokens, _ = problem(T)
    jobs = mixture(T)
    want = fused.run("reference", live, frozen, head, bias, tokens, jobs, temperature=0.9)
    found = run(live, frozen, head, bias, tokens, jobs, temperature=0.9, budget_bytes=budget)
    assert_equal(found, want, EXACT)
    assert (found.values[6] == 0).all()
    assert (found.values[3] != 0).all()


def test_all_jobs_on_the_same_rows_and_rows_without_any(run):
    live, frozen, head, bias, tokens, weight = problem()
    jobs = [Job(loss, weight * (i + 1), frozen=i % 2 == 0) for i, loss in enumerate((Reinforce(0.7), Reinforce(-0.7)))]
    jobs += [Job(loss, weight) for loss in (Imitate(), Stay(0.05), SampledStay(), GeneralizedJSD(0.4), Match(0.1))]
    assert_equal(
        run(live, frozen, head, bias, tokens, jobs),
        fused.run("reference", live, frozen, head, bias, tokens, jobs),
        EXACT,
    )
    jobs = [Job(Match(0.05), weight * torch.tensor([0, 1, 0]))]
    want = fused.run("reference", live, frozen, head, bias, tokens, jobs)
    assert_equal(run(live, frozen, head, bias, tokens, jobs), want, EXACT)
    watched = run(live, None, head, bias, tokens, [])
    assert (watched.grad == 0).all()
    assert distance(watched.live["entropy"], want.live["entropy"]) <= EXACT
    quiet = run(live, frozen, head, bias, tokens, jobs, diagnostics=False)
    assert (quiet.live, quiet.diagnostics) == ({}, [{}])
    assert distance(quiet.grad, want.grad) <= EXACT
    assert run(live[:0], frozen[:0], head, bias, tokens[:0], [Job(Match(), weight[:0])]).grad.shape == (0, H)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_a_frozen_head_of_its_own(run, biased):
    live, _, head, bias, tokens, weight = problem()
    _, frozen, other, other_bias, _, _ = problem(H=12, seed=9)
    options = {"frozen_head": other, "frozen_bias": other_bias if biased else None, "budget_bytes": 4 * V * 8}
    args = live, frozen, head, None if biased else bias, tokens, [Job(Stay(0.05), weight)]
    assert_equal(run(*args, **options), fused.run("reference", *args, **options), EXACT)


def test_without_a_frozen_view(run):
    live, _, head, bias, tokens, weight = problem()
    args = live, None, head, bias, tokens, [Job(Imitate(), weight), Job(Reinforce(ADVANTAGE), weight)]
    found = run(*args)
    assert_equal(found, fused.run("reference", *args), EXACT)
    assert [set(rows) for rows in found.diagnostics] == [{"clipped", "removed"}] * 2
    for loss in (SampledStay(), ModulatedReinforce(1.0), Match()):
        with pytest.raises(PastError, match="compares with a frozen view"):
            run(live, None, head, bias, tokens, [Job(loss, weight)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_logits(run, dtype):
    """The same rounded logits as `fused`, so values agree as in float32; the gradient is rounded once."""
    live, frozen, head, bias, tokens, weight = problem(dtype=dtype)
    for loss in (Match(), GeneralizedJSD(0.5), Imitate()):
        args = live, frozen, head, bias, tokens, [Job(loss, weight.float())]
        found, want = run(*args, temperature=1.1), fused.run("fused", *args, temperature=1.1)
        assert found.grad.dtype == dtype
        assert found.values[0].dtype == torch.float32
        assert distance(found.grad, want.grad) <= 2 * torch.finfo(dtype).eps
        assert distance(found.values[0], want.values[0]) <= SINGLE
        assert_same_rows(found, want, SINGLE)


@settings(max_examples=16, deadline=None, derandomize=True, database=None)
@given(
    V=st.integers(1, 2 * BLOCK + 2),
    losses=st.lists(st.sampled_from([loss for loss in LOSSES if not isinstance(loss, TopK)]), min_size=1, max_size=2),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.1, 1.5, 30.0]),
    temperature=st.sampled_from([0.7, 1.0]),
)
def test_any_vocabulary(run, V, losses, seed, scale, temperature):
    live, frozen, head, bias, tokens, weight = problem(V=V, seed=seed, scale=scale)
    args = live, frozen, head, bias, tokens, [Job(loss, weight) for loss in losses]
    want = fused.run("reference", *args, temperature=temperature)
    assert_equal(run(*args, temperature=temperature), want, 1e-9)


def test_a_large_vocabulary_at_the_size_of_a_block(run):
    live, frozen, head, _, tokens, weight = problem(1, 151_936, 4, dtype=torch.float32)
    jobs = [Job(Match(1e-4), weight), Job(Imitate(), weight)]
    exact = fused.run("reference", live.double(), frozen.double(), head.double(), None, tokens, jobs)
    assert 0 < float(exact.diagnostics[0]["clipped"]) < 1
    found = run(live, frozen, head, None, tokens, jobs, block=2048)
    # The product back sums 151,936 float32 terms, in every implementation.
    assert distance(found.grad, exact.grad) <= 1e-4
    assert_equal(replace(found, grad=exact.grad), exact, SINGLE)


def test_near_and_equal_views(run):
    """float32 rounding of the log-ratio shows at a KL near 1e-6; the kernel loses no more than `fused`."""
    jobs = [Job(loss, torch.ones(T)) for loss in (Match(), Stay(), GeneralizedJSD(0.3))]
    exact = fused.run("reference", *problem(apart=1e-3)[:5], jobs)
    assert 1e-8 < float(exact.values[2].mean()) < 1e-5
    live, frozen, head, bias, tokens, _ = problem(apart=1e-3, dtype=torch.float32)
    found = run(live, frozen, head, bias, tokens, jobs)
    close = fused.run("fused", live, frozen, head, bias, tokens, jobs)
    for value, other, true in zip(found.values, close.values, exact.values, strict=True):
        assert float((value - true).abs().mean()) <= 2 * float((other - true).abs().mean()) + 1e-8
    assert distance(found.grad, exact.grad) <= 5e-3
    same = run(live, live, head, bias, tokens, jobs)
    assert float(same.grad.abs().max()) < 1e-6
    for value in same.values:
        assert float(value.abs().max()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_views_far_apart(run, dtype):
    """Probabilities underflow and log-ratios pass e^80: nothing becomes infinite that is not."""
    live, frozen, head, bias, tokens, weight = problem(dtype=dtype, apart=60.0)
    jobs = [Job(loss, weight) for loss in (Match(), Stay(0.05), GeneralizedJSD(0.3), Match(5.0))]
    exact = fused.run("reference", *(x.double() for x in (live, frozen, head, bias)), tokens, jobs)
    ratio = (frozen - live).double() @ head.double().t()
    assert float((ratio - ratio.mean(-1, keepdim=True)).abs().max()) > 200
    found = run(live, frozen, head, bias, tokens, jobs)
    if dtype == torch.float64:
        assert_equal(found, exact, EXACT)
        return
    # Logits of some 300 are known to 2e-5: so are log-ratios, and what multiplies two gradients to several times that.
    assert_equal(replace(found, live=exact.live, diagnostics=exact.diagnostics), exact, SINGLE)
    assert_same_rows(found, exact, 8 * SINGLE)


@pytest.mark.parametrize("loss", [Match(0.05), Stay(), GeneralizedJSD(0.5, 0.02), SampledStay()], ids=repr)
@pytest.mark.parametrize("gone", [slice(0, 33), slice(-3, None)], ids=["first-block", "end"])
def test_a_bias_of_minus_infinity_takes_entries_out(run, loss, gone):
    live, frozen, head, bias, tokens, weight = problem()
    bias[gone] = -math.inf
    tokens = torch.full_like(tokens, 33)
    args = live, frozen, head, bias, tokens, [Job(loss, weight)]
    found, want = run(*args), fused.run("reference", *args)
    assert want.grad.isfinite().all()
    assert_equal(found, want, EXACT)


def test_infinite_divergences_are_infinite_unless_clipped(run):
    live, frozen, head, bias, tokens, weight = problem()
    other = bias.clone()
    other[4] = -math.inf
    tokens = tokens.clamp(min=5)
    for loss, live_bias, frozen_bias in [
        (Match(0.05), other, bias),
        (Stay(0.05), bias, other),
        (Match(), bias, other),
        (Stay(), other, bias),
        (GeneralizedJSD(0.3), other, bias),
        (GeneralizedJSD(0.3), bias, other),
    ]:
        args = live, frozen, head, live_bias, tokens, [Job(loss, weight)]
        options: dict[str, Any] = {"frozen_head": head.clone(), "frozen_bias": frozen_bias}
        found, want = run(*args, **options), fused.run("reference", *args, **options)
        assert want.grad.isfinite().all()
        assert distance(found.grad, want.grad) <= EXACT
        assert distance(found.values[0], want.values[0]) <= EXACT
        assert distance(found.diagnostics[0]["clipped"], want.diagnostics[0]["clipped"]) <= EXACT
    for loss, live_bias, frozen_bias in [(Match(), other, bias), (Stay(), bias, other)]:
        options = {"frozen_head": head, "frozen_bias": frozen_bias}
        found = run(live, frozen, head, live_bias, tokens, [Job(loss, weight)], **options)
        assert (found.values[0] == math.inf).all()


def test_rows_are_independent(run):
    live, frozen, head, bias, tokens, weight = problem()
    for loss in (Match(0.05), Stay(), Reinforce(1.0)):
        clean = run(live, frozen, head, bias, tokens, [Job(loss, weight)])
        spoiled, hidden = live.clone(), frozen.clone()
        spoiled[1] = math.nan
        hidden[2] = math.nan
        found = run(spoiled, hidden, head, bias, tokens, [Job(loss, weight * torch.tensor([1.0, 1.0, 0.0]))])
        assert distance(found.grad[:1], clean.grad[:1]) <= EXACT
        assert distance(found.values[0][:1], clean.values[0][:1]) <= EXACT
        assert found.grad[1].isnan().all()
        assert found.values[0][1].isnan()
        assert (found.grad[2] == 0).all()
        assert float(found.values[0][2]) == 0


def test_inputs_that_are_views(run):
    live, frozen, head, bias, tokens, weight = problem(6)
    wide, long = torch.stack((bias, -bias), 1), torch.stack((tokens, tokens * 0), 1)
    want = fused.run("reference", live, frozen, head, bias, tokens, [Job(Match(0.05), weight)])
    found = run(live, frozen, head, wide[:, 0], long[:, 0], [Job(Match(0.05), weight)])
    assert_equal(found, want, EXACT)


def test_no_tensor_beyond_the_budget(call):
    T, V = 12, 400
    live, frozen, head, _, tokens, weight = problem(T, V, 4)
    budget = 6 * V * 8
    args = live, frozen, head, None, tokens, [Job(Match(0.05), weight), Job(Imitate(), weight)]
    assert budget / 2 < call("largest", 512, "triton", *args, budget_bytes=budget) <= budget
    assert call("largest", 512, "reference", *args) == T * V * 8


def test_where_it_cannot_run_it_says_so(monkeypatch):
    live, frozen, head, bias, tokens, weight = problem()
    args = live, frozen, head, bias, tokens, [Job(Match(), weight)]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        with pytest.raises(PastError, match=r"pip install 'past-opsd\[triton\]'"):
            fused.run("triton", *args)
    need_triton()
    if os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(PastError, match="needs a CUDA GPU, and the hidden states are on 'cpu'"):
            fused.run("triton", *args)


ALONE = ("match", "stay", "jsd", "tokens", "every")
COMPILED = [(name, "bf16", arch, False) for name in ALONE for arch in kernel.ARCHITECTURES]
COMPILED += [
    ("teacher", "bf16", 90, False),
    ("every", "fp16", 80, True),
    ("every", "fp32", 90, True),
    ("watching", "fp64", 80, False),
]


def compile_all() -> None:
    """What is launched, for three generations of GPUs, which needs none."""
    from past_opsd.policy import fused_triton

    for name, dtype, arch, biased in COMPILED:
        found = kernel.compiled(name, dtype, arch, fused_triton.shape(kernel.VOCABULARY), biased)
        print(name, dtype, arch, biased, found.registers, found.spilled, found.programs)


def test_what_is_launched_compiles_for_gpus_and_spills_nothing(tmp_path):
    """Every loss; and those of the paper's two steps have more than 20 KiB of a view's logits under way on an SM."""
    need_triton()
    command, environment = program("compile", TRITON_CACHE_DIR=str(tmp_path))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    print(done.stdout)  # registers, spilled bytes, programs on an SM
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [tuple(line[:4]) for line in lines] == [tuple(map(str, case)) for case in COMPILED]
    for name, dtype, _, _, registers, spilled, programs in lines:
        assert int(registers) > 16
        assert int(spilled) == 0, (name, dtype)
        if name in ("match", "teacher"):
            assert int(programs) * 2048 * kernel.BYTES[dtype] > 20 * 1024


def test_auto_tries_the_kernel_and_notices_a_wrong_one(call):
    assert call("trial", 2048, False) == ""
    assert "in its trial it was" in call("trial", 2048, True)


if __name__ == "__main__":
    {"serve": serve, "compile": compile_all}[sys.argv[1]]()
