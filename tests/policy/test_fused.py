"""The four implementations give the same values, gradients and diagnostics, and hold no more than a chunk."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from largest import Largest

from past_opsd.core.losses import (
    GeneralizedJSD,
    Imitate,
    Loss,
    Match,
    MixedTopK,
    ModulatedReinforce,
    Reinforce,
    SampledMatch,
    SampledStay,
    Stay,
    TopK,
)
from past_opsd.core.nouns import PastError
from past_opsd.policy import fused
from past_opsd.policy.fused import Job, run

T, V, H = 41, 53, 8
IMPLEMENTATIONS = ["reference", "bf16", "chunked", "fused"]
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
    Reinforce(torch.linspace(-1, 1, T)),
    ModulatedReinforce(-0.8),
    ModulatedReinforce(torch.linspace(-1, 1, T), 0.7, 0.5),
    Imitate(),
    SampledStay(),
    SampledMatch(),
    TopK(5),
    TopK(5, tail=True, tau=0.1),
    MixedTopK(5),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Own:
    """A user's loss: no closed form, known to nobody."""

    def __repr__(self) -> str:
        return "Own()"

    def __call__(self, live_logp, frozen_logp, tokens):
        return (live_logp.exp() - frozen_logp.exp()).square().sum(-1)


def problem(T=T, V=V, H=H, seed=0, dtype=torch.float32, apart=0.5):
    draw = torch.Generator().manual_seed(seed)
    live = torch.randn(T, H, generator=draw, dtype=torch.float64) * 1.5
    frozen = live + torch.randn(T, H, generator=draw, dtype=torch.float64) * apart
    head = torch.randn(V, H, generator=draw, dtype=torch.float64)
    bias = torch.randn(V, generator=draw, dtype=torch.float64)
    tokens = torch.randint(V, (T,), generator=draw)
    weight = torch.rand(T, generator=draw, dtype=torch.float64) + 0.1
    live, frozen, head, bias, weight = (x.to(dtype) for x in (live, frozen, head, bias, weight))
    return live, frozen, head, bias, tokens, weight


def definition(loss, live, frozen, head, bias, tokens, weight, temperature):
    """The result from autograd on the whole problem, with no help from the module under test."""
    live = live.clone().requires_grad_()
    live_logp = torch.log_softmax((live @ head.t() + bias) / temperature, -1)
    frozen_logp = torch.log_softmax((frozen @ head.t() + bias) / temperature, -1)
    value = loss(live_logp, frozen_logp, tokens)
    (grad,) = torch.autograd.grad((weight * value).sum(), live)
    return value.detach(), grad


def assert_same(found, want, tolerance):
    """Close on the scale of the whole tensor."""
    assert found.shape == want.shape
    scale = max(float(want.abs().max()), 1e-3)
    error = float((found.double() - want.double()).abs().max()) / scale
    assert error <= tolerance, error


@pytest.mark.parametrize("loss", [*LOSSES, Own()], ids=lambda loss: repr(loss)[:40])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_gradient_are_the_definition(implementation, loss):
    exact = problem(dtype=torch.float64)
    value, grad = definition(loss, *exact[:5], exact[5], 1.1)
    live, frozen, head, bias, tokens, weight = problem()
    result = run(implementation, live, frozen, head, bias, tokens, [Job(loss, weight)], temperature=1.1)
    assert result.grad.dtype == live.dtype
    assert not result.grad.requires_grad
    if implementation != "bf16":
        assert_same(result.values[0], value, 2e-5)
        assert_same(result.grad, grad, 2e-5)
        return
    # A clip or a top-k set can fall otherwise on rounded logits; then single rows jump and the mass stays close.
    assert float((result.values[0] - value).abs().median()) < 0.05 * float(value.abs().max())
    assert float((result.grad - grad).norm(dim=1).median()) < 0.05 * float(grad.norm(dim=1).max())


@pytest.mark.parametrize("loss", [*LOSSES, Own()], ids=lambda loss: repr(loss)[:40])
def test_diagnostics_are_their_definition(loss):
    """`Loss.diagnostics` is dense and by definition; gradients of clipped divergences are taken here by autograd."""
    live, frozen, head, bias, tokens, weight = problem(dtype=torch.float64)
    z = (live @ head.t() + bias).requires_grad_()
    live_logp, frozen_logp = torch.log_softmax(z, -1), torch.log_softmax(frozen @ head.t() + bias, -1)
    q, p = live_logp.detach().exp(), frozen_logp.exp()
    frozen_logp = frozen_logp if Loss.of(loss).reads_frozen else None
    want = Loss.of(loss).diagnostics(live_logp.detach(), frozen_logp, tokens)
    if not isinstance(loss, Imitate):
        forward = (p * (p / q).log()).sum(-1)
        assert_same(want["kl"], (q * (q / p).log()).sum(-1) if isinstance(loss, Stay) else forward, 1e-9)
    if isinstance(loss, Match | Stay | GeneralizedJSD):
        value = loss(live_logp, frozen_logp, tokens)
        (clipped,) = torch.autograd.grad(value.sum(), z, retain_graph=True)
        whole = type(loss)(**{**vars(loss), "tau": math.inf})(live_logp, frozen_logp, tokens)
        (unclipped,) = torch.autograd.grad(whole.sum(), z)
        assert_same(want["removed"], (whole - value).detach(), 1e-9)
        assert_same(want["dot"], (clipped * unclipped).sum(-1), 1e-9)
        assert_same(want["norm_clipped"], clipped.norm(dim=-1), 1e-9)
        assert_same(want["norm_unclipped"], unclipped.norm(dim=-1), 1e-9)
        if loss.tau < math.inf:
            assert 0 < float(want["clipped"].mean()) < 1
    seen = {"entropy": -(q * q.log()).sum(-1), "token_logp": q.log()[torch.arange(T), tokens]}
    for implementation in ("reference", "chunked", "fused"):
        found = run(implementation, live, frozen, head, bias, tokens, [Job(loss, weight)])
        for mine, theirs in ((found.live, seen), (found.diagnostics[0], want)):
            assert set(mine) == set(theirs)
            for name, row in theirs.items():
                assert_same(mine[name], row, 1e-9)
    live, frozen, head, bias, tokens, weight = problem()
    for implementation in ("reference", "chunked", "fused", "bf16"):
        result = run(implementation, live, frozen, head, bias, tokens, [Job(loss, weight)])
        for name, row in (seen | want).items():
            found = (result.live | result.diagnostics[0])[name]
            if implementation == "bf16":
                assert float((found - row).abs().median()) < 0.05 * max(float(row.abs().max()), 1e-3), name
            else:
                assert_same(found, row, 2e-5)


def test_two_losses_on_the_same_views_log_each_their_own():
    live, frozen, head, bias, tokens, weight = problem(dtype=torch.float64)
    losses = [Match(0.05), Stay(), SampledStay(), GeneralizedJSD(0.3, 0.02), TopK(5, tau=0.1)]
    for implementation in ("reference", "chunked", "fused"):
        together = run(implementation, live, frozen, head, bias, tokens, [Job(loss, weight) for loss in losses])
        for loss, found in zip(losses, together.diagnostics, strict=True):
            alone = run(implementation, live, frozen, head, bias, tokens, [Job(loss, weight)]).diagnostics[0]
            assert set(found) == set(alone)
            for name, row in alone.items():
                assert_same(found[name], row, 1e-12)


def mixture(weight):
    """Rows with Match alone, with Reinforce and Stay, with Reinforce alone, with a loss without closed form, none."""
    correct, failed, paths, other = (torch.zeros(T), torch.zeros(T), torch.zeros(T), torch.zeros(T))
    correct[:10] = weight[:10].float()
    failed[10:30] = weight[10:30].float()
    paths[10:20] = 0.05
    other[28:35] = 0.7
    advantage = torch.linspace(-1, 1, T)
    jobs = [
        Job(Match(0.05), correct),
        Job(Reinforce(advantage), failed, frozen=False),
        Job(Stay(), paths),
        Job(TopK(4, tail=True), other),
        Job(SampledStay(), other),
    ]
    order = torch.randperm(T, generator=torch.Generator().manual_seed(5))
    return [
        Job(Reinforce(advantage[order]) if isinstance(j.loss, Reinforce) else j.loss, j.weight[order], j.frozen)
        for j in jobs
    ]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_mixture_is_the_sum_of_its_jobs_on_their_rows(implementation):
    live, frozen, head, bias, tokens, weight = problem()
    jobs = mixture(weight)
    found = run(implementation, live, frozen, head, bias, tokens, jobs, temperature=0.9)
    total = torch.zeros_like(live)
    for job, value, rows in zip(jobs, found.values, found.diagnostics, strict=True):
        on = job.weight != 0
        loss = Reinforce(job.loss.advantage[on]) if isinstance(job.loss, Reinforce) else job.loss
        alone = run(
            implementation, live[on], frozen[on] if job.frozen else None, head, bias, tokens[on],
            [Job(loss, job.weight[on])], temperature=0.9,
        )  # fmt: skip
        total[on] += alone.grad
        tolerance = 2e-2 if implementation == "bf16" else 1e-5
        assert_same(value[on], alone.values[0], tolerance)
        assert (value[~on] == 0).all()
        for name, row in alone.live.items():
            assert_same(found.live[name][on], row, tolerance)
        assert set(rows) == set(alone.diagnostics[0])
        for name, row in alone.diagnostics[0].items():
            assert_same(rows[name][on], row, tolerance)
            assert (rows[name][~on] == 0).all()
    assert_same(found.grad, total, 2e-2 if implementation == "bf16" else 1e-5)
    idle = torch.stack([job.weight for job in jobs]).abs().sum(0) == 0
    assert idle.any()
    assert (found.grad[idle] == 0).all()
    assert (found.live["entropy"][idle] > 0).all()


def test_reinforce_beside_stay_has_ratio_one_only_when_the_frozen_view_is_hidden():
    live, frozen, head, bias, tokens, weight = problem()
    for implementation in IMPLEMENTATIONS:
        hidden, read = (
            run(implementation, live, frozen, head, bias, tokens, [Job(Reinforce(1.0), weight, f), Job(Stay(), weight)])
            for f in (False, True)
        )
        torch.testing.assert_close(hidden.values[0], torch.full((T,), -1.0))
        assert float((read.values[0] + 1).abs().max()) > 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_are_independent(implementation):
    """Garbage in a row that no job reads, and NaN in a row that one does, stay where they are."""
    live, frozen, head, bias, tokens, weight = problem()
    clean = run(implementation, live, frozen, head, bias, tokens, [Job(Match(0.05), weight)])
    weight = weight.clone()
    weight[3] = 0
    live, frozen = live.clone(), frozen.clone()
    frozen[3] = math.nan
    live[7] = math.nan
    found = run(implementation, live, frozen, head, bias, tokens, [Job(Match(0.05), weight)])
    others = [t for t in range(T) if t not in (3, 7)]
    tolerance = 2e-2 if implementation == "bf16" else 1e-6
    assert_same(found.grad[others], clean.grad[others], tolerance)
    assert_same(found.values[0][others], clean.values[0][others], tolerance)
    for name, row in found.diagnostics[0].items():
        assert_same(row[others], clean.diagnostics[0][name][others], tolerance)
    assert (found.grad[3] == 0).all()
    assert float(found.values[0][3]) == 0
    assert found.grad[7].isnan().all()
    assert found.values[0][7].isnan()


@pytest.mark.parametrize("implementation", ["chunked", "fused"])
@pytest.mark.parametrize(
    "loss", [Match(0.05), Stay(), TopK(5), Reinforce(torch.linspace(-1, 1, T))], ids=lambda x: repr(x)[:12]
)
def test_the_chunk_size_changes_nothing(implementation, loss, monkeypatch):
    live, frozen, head, bias, tokens, weight = problem(dtype=torch.float64)
    whole = run(implementation, live, frozen, head, bias, tokens, [Job(loss, weight)])
    for budget, block in ((1, 1), (30_000, 2 * V * 8), (100_000, 7 * V * 8)):
        monkeypatch.setattr("past_opsd.policy.fused.BLOCK_BYTES", {"cpu": block})
        monkeypatch.setattr("past_opsd.policy.fused._TILE", 20)
        part = run(implementation, live, frozen, head, bias, tokens, [Job(loss, weight)], budget_bytes=budget)
        assert_same(part.grad, whole.grad, 1e-12)
        assert_same(part.values[0], whole.values[0], 1e-12)
        for name, row in part.diagnostics[0].items():
            assert_same(row, whole.diagnostics[0][name], 1e-12)


@pytest.mark.parametrize("loss", [Match(0.05), Stay(), GeneralizedJSD(0.5), TopK(9), Own()], ids=lambda x: repr(x)[:14])
@pytest.mark.parametrize("implementation", ["chunked", "fused"])
def test_no_dense_tensor_beyond_the_budget(implementation, loss, monkeypatch):
    monkeypatch.setattr("past_opsd.policy.fused.BLOCK_BYTES", {"cpu": 2**14})
    T, V = 400, 1000
    live, frozen, head, _, tokens, weight = problem(T, V, 4)
    budget = 40 * V * 4
    with Largest(head) as seen:
        run(implementation, live, frozen, head, None, tokens, [Job(loss, weight)], budget_bytes=budget)
    assert 0 < seen.bytes <= budget
    with Largest(head) as seen:
        run("reference", live, frozen, head, None, tokens, [Job(loss, weight)], budget_bytes=budget)
    assert seen.bytes == T * V * 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_a_frozen_view(implementation):
    live, _, head, bias, tokens, weight = problem()
    jobs = [Job(Imitate(), weight), Job(Reinforce(torch.linspace(-1, 1, T)), weight)]
    found = run(implementation, live, None, head, bias, tokens, jobs)
    q = torch.softmax(live @ head.t() + bias, -1)
    onehot = torch.nn.functional.one_hot(tokens, V)
    want = ((weight * (1 + torch.linspace(-1, 1, T)))[:, None] * (q - onehot)) @ head
    assert_same(found.grad, want, 2e-2 if implementation == "bf16" else 1e-5)
    assert [set(rows) for rows in found.diagnostics] == [{"clipped", "removed"}] * 2
    with pytest.raises(PastError, match="frozen view"):
        run(implementation, live, None, head, bias, tokens, [Job(Match(), weight)])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_frozen_head_of_its_own(implementation):
    live, _, head, bias, tokens, weight = problem()
    _, frozen, other, other_bias, _, _ = problem(H=12, seed=9)
    found = run(
        implementation, live, frozen, head, bias, tokens, [Job(Match(), weight)],
        frozen_head=other, frozen_bias=other_bias, budget_bytes=8_000,
    )  # fmt: skip
    q, p = torch.softmax(live @ head.t() + bias, -1), torch.softmax(frozen @ other.t() + other_bias, -1)
    assert_same(found.grad, weight[:, None] * (q - p) @ head, 3e-2 if implementation == "bf16" else 1e-5)
    assert_same(found.values[0], (p * (p / q).log()).sum(-1), 3e-2 if implementation == "bf16" else 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("loss", [Match(0.05), Stay(), GeneralizedJSD(0.5)], ids=repr)
def test_a_bias_of_minus_infinity_takes_entries_out(implementation, loss):
    live, frozen, head, bias, tokens, weight = problem()
    tokens = tokens % (V - 3)
    less = run(implementation, live, frozen, head[:-3], bias[:-3], tokens, [Job(loss, weight)])
    bias = bias.clone()
    bias[-3:] = -math.inf
    found = run(implementation, live, frozen, head, bias, tokens, [Job(loss, weight)])
    assert_same(found.grad, less.grad, 1e-5)
    assert_same(found.values[0], less.values[0], 1e-5)
    for name in {*found.diagnostics[0]} - {"clipped"}:
        assert_same(found.diagnostics[0][name], less.diagnostics[0][name], 1e-5)


@pytest.mark.parametrize("implementation", ["chunked", "fused"])
def test_half_precision_heads(implementation):
    live, frozen, head, bias, tokens, weight = (x.bfloat16() if x.is_floating_point() else x for x in problem())
    found = run(implementation, live, frozen, head, bias, tokens, [Job(Match(), weight.float())], temperature=1.1)
    exact = run(
        "reference", live.double(), frozen.double(), head.double(), bias.double(), tokens,
        [Job(Match(), weight.double())], temperature=1.1,
    )  # fmt: skip
    assert found.grad.dtype == torch.bfloat16
    assert found.values[0].dtype == torch.float32
    assert_same(found.grad, exact.grad, 3e-2)
    assert_same(found.values[0], exact.values[0], 3e-2)


def test_near_equal_views_keep_their_precision():
    """At a KL near 1e-6 float32 rounding of the log-ratio shows; the closed form loses no more than autograd."""
    exact = run("reference", *problem(dtype=torch.float64, apart=1e-3)[:5], [Job(Match(), torch.ones(T).double())])
    assert 1e-7 < float(exact.diagnostics[0]["kl"].mean()) < 1e-4
    live, frozen, head, bias, tokens, _ = problem(apart=1e-3)
    error = {}
    for implementation in ("reference", "fused"):
        found = run(implementation, live, frozen, head, bias, tokens, [Job(Match(), torch.ones(T))])
        error[implementation] = float((found.values[0] - exact.values[0]).abs().mean())
        assert_same(found.grad, exact.grad, 5e-3)
    assert error["fused"] <= 2 * error["reference"] + 1e-8


def test_identical_views_are_a_fixed_point():
    live, _, head, bias, tokens, weight = problem()
    found = run("fused", live, live, head, bias, tokens, [Job(Match(0.05), weight), Job(Stay(), weight)])
    assert float(found.grad.abs().max()) < 1e-6
    assert float(found.diagnostics[0]["kl"].abs().max()) < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_degenerate_sizes(implementation):
    live, frozen, head, bias, tokens, weight = problem()
    none = run(implementation, live[:0], frozen[:0], head, bias, tokens[:0], [Job(Match(), weight[:0])])
    assert none.grad.shape == (0, H)
    assert none.values[0].shape == (0,)
    one = run(implementation, live[:1], frozen[:1], head[:1], bias[:1], tokens[:1] * 0, [Job(Match(0.05), weight[:1])])
    assert float(one.grad.abs().max()) == 0
    assert float(one.live["entropy"]) == 0
    watch = run(implementation, live, None, head, bias, tokens, [])
    assert (watch.grad == 0).all()
    assert (watch.live["entropy"] > 0).all()


def test_nothing_leaves_but_the_result():
    live, frozen, head, bias, tokens, weight = problem()
    live.requires_grad_()
    head.requires_grad_()
    for implementation in IMPLEMENTATIONS:
        kept = [x.detach().clone() for x in (live, frozen, head, bias)]
        found = run(implementation, live, frozen, head, bias, tokens, [Job(Match(0.05), weight)], diagnostics=False)
        assert (found.live, found.diagnostics) == ({}, [{}])
        assert not found.grad.requires_grad
        assert live.grad is None
        assert head.grad is None
        for before, after in zip(kept, (live, frozen, head, bias), strict=True):
            assert torch.equal(before, after)


def test_misuse_is_refused():
    live, frozen, head, bias, tokens, weight = problem()
    job = [Job(Match(), weight)]
    with pytest.raises(PastError, match="unknown implementation"):
        run("fast", live, frozen, head, bias, tokens, job)  # type: ignore[arg-type]
    with pytest.raises(PastError, match="live hidden states"):
        run("fused", live[:, :3], frozen, head, bias, tokens, job)
    with pytest.raises(PastError, match="frozen hidden states"):
        run("fused", live, frozen[:3], head, bias, tokens, job)
    with pytest.raises(PastError, match="vocabulary"):
        run("fused", live, frozen, head, bias, tokens, job, frozen_head=head[:5])
    with pytest.raises(PastError, match="job 0"):
        run("fused", live, frozen, head, bias, tokens, [Job(Match(), weight[:3])])


def threads_of_a_new_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("loss", [Match(0.05), Stay(), TopK(5)], ids=repr)
def test_threads_change_nothing(loss, monkeypatch):
    monkeypatch.setattr("past_opsd.policy.fused.BLOCK_BYTES", {"cpu": 3 * V * 8})
    live, frozen, head, bias, tokens, weight = problem(dtype=torch.float64)
    head.requires_grad_()
    bias.requires_grad_()
    one = run("fused", live, frozen, head, bias, tokens, [Job(loss, weight)])
    torch.set_num_threads(2)
    two = run("fused", live, frozen, head, bias, tokens, [Job(loss, weight)])
    assert torch.get_num_threads() == 2
    assert threads_of_a_new_thread() == 2
    assert_same(two.grad, one.grad, 1e-12)
    assert_same(two.values[0], one.values[0], 1e-12)
    for name, row in two.diagnostics[0].items():
        assert_same(row, one.diagnostics[0][name], 1e-12)


def test_a_failing_loss_leaves_the_thread_count(monkeypatch):
    def fails(live_logp, frozen_logp, tokens):
        raise ValueError("mine")

    monkeypatch.setattr("past_opsd.policy.fused.BLOCK_BYTES", {"cpu": 3 * V * 4})
    live, frozen, head, bias, tokens, weight = problem()
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="mine"):
        run("fused", live, frozen, head, bias, tokens, [Job(fails, weight)])
    assert torch.get_num_threads() == 2
    assert threads_of_a_new_thread() == 2


@pytest.mark.parametrize(
    ("capability", "installed", "trial", "chosen", "told"),
    [
        ((9, 0), True, "", "triton", "losses by the GPU kernel"),
        ((8, 0), True, "", "triton", "losses by the GPU kernel"),
        ((7, 5), True, "", "fused", "compute capability 8.0, and this GPU has 7.5"),
        ((9, 0), False, "", "fused", "pip install"),
        ((9, 0), True, "in its trial it was 1.0e+00 off", "fused", "not by the GPU kernel: in its trial"),
    ],
)
def test_auto_is_the_kernel_where_it_runs_and_is_right(monkeypatch, capability, installed, trial, chosen, told):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(fused, "_trial", lambda device: trial)
    found, note = fused.settle("auto", torch.device("cuda:0"))
    assert found == chosen
    assert told in note


def test_auto_is_fused_on_a_cpu_and_what_is_named_is_taken():
    assert fused.settle("auto", torch.device("cpu")) == ("fused", "")
    assert fused.settle("chunked", torch.device("cpu")) == ("chunked", "")


def test_the_trial_tells_what_a_kernel_dies_of(monkeypatch):
    def die(device):
        raise RuntimeError("no\nPTX")

    monkeypatch.setattr(fused, "_kernel", die)
    assert fused._trial(torch.device("cpu")) == "its trial ended in RuntimeError: no PTX"
