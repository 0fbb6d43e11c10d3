"""Each loss against a second writing in plain Python loops, in value and gradient, and against third-party numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

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
    at_tokens,
    token_weights,
)
from past_opsd.core.nouns import PastError

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "loss"
INF = math.inf


def naive_kl(a, b, tau=INF):
    entries = []
    for x, y in zip(a, b, strict=True):
        if x == 0:
            entries.append(0.0)
        elif y == 0:
            entries.append(INF)
        else:
            entries.append(x * math.log(x / y))
    return math.fsum(min(entry, tau) for entry in entries)


def naive_jsd(p, q, beta, tau=INF):
    total = []
    for x, y in zip(p, q, strict=True):
        m = beta * x + (1 - beta) * y
        entry = (beta * x * math.log(x / m) if x else 0.0) + ((1 - beta) * y * math.log(y / m) if y else 0.0)
        total.append(min(entry, tau))
    return math.fsum(total)


def naive_topk(p, q, k, tail, tau=INF):
    order = sorted(range(len(p)), key=lambda v: -p[v])[:k]
    a, b = [p[v] for v in order], [q[v] for v in order]
    if tail:
        rest = [v for v in range(len(p)) if v not in order]
        if rest:
            a.append(math.fsum(p[v] for v in rest))
            b.append(math.fsum(q[v] for v in rest))
    else:
        a, b = [x / sum(a) for x in a], [x / sum(b) for x in b]
    return naive_kl(a, b, tau)


def naive_mixed(p, q, k, reverse):
    order = sorted(range(len(p)), key=lambda v: -p[v])[:k]
    a, b = ([view[v] / math.fsum(view[w] for w in order) for v in order] for view in (p, q))
    return (1 - reverse) * naive_kl(a, b) + reverse * naive_kl(b, a)


def naive_surrogate(q, old, token, advantage, epsilon):
    rho = q[token] / old[token]
    return -min(rho * advantage, min(max(rho, 1 - epsilon), 1 + epsilon) * advantage)


def softmax(z):
    top = max(z)
    e = [math.exp(x - top) for x in z]
    return [x / math.fsum(e) for x in e]


# name, loss, the naive value of one row as a function of (p, q, token)
CASES = [
    ("match", Match(), lambda p, q, y: naive_kl(p, q)),
    ("match_tau", Match(0.05), lambda p, q, y: naive_kl(p, q, 0.05)),
    ("match_zero", Match(0.0), lambda p, q, y: naive_kl(p, q, 0.0)),
    ("stay", Stay(), lambda p, q, y: naive_kl(q, p)),
    ("stay_tau", Stay(0.05), lambda p, q, y: naive_kl(q, p, 0.05)),
    ("jsd", GeneralizedJSD(0.5), lambda p, q, y: naive_jsd(p, q, 0.5)),
    ("jsd_third", GeneralizedJSD(0.3, 0.02), lambda p, q, y: naive_jsd(p, q, 0.3, 0.02)),
    ("jsd_0", GeneralizedJSD(0.0, 0.05), lambda p, q, y: naive_kl(p, q, 0.05)),
    ("jsd_1", GeneralizedJSD(1.0), lambda p, q, y: naive_kl(q, p)),
    ("imitate", Imitate(), lambda p, q, y: -math.log(q[y])),
    ("reinforce_good", Reinforce(1.5), lambda p, q, y: naive_surrogate(q, p, y, 1.5, 0.2)),
    ("reinforce_bad", Reinforce(-0.7, 0.3), lambda p, q, y: naive_surrogate(q, p, y, -0.7, 0.3)),
    ("topk", TopK(3), lambda p, q, y: naive_topk(p, q, 3, False)),
    ("topk_tail", TopK(3, tail=True, tau=0.1), lambda p, q, y: naive_topk(p, q, 3, True, 0.1)),
    ("topk_all", TopK(99, tail=True), lambda p, q, y: naive_kl(p, q)),
    ("mixed_topk", MixedTopK(4), lambda p, q, y: naive_mixed(p, q, 4, 0.5)),
    ("mixed_topk_all", MixedTopK(99, 0.3), lambda p, q, y: 0.7 * naive_kl(p, q) + 0.3 * naive_kl(q, p)),
]


def logits(T=12, V=9, scale=2.0, apart=0.8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    live = torch.randn(T, V, generator=draw, dtype=torch.float64) * scale
    frozen = live + torch.randn(T, V, generator=draw, dtype=torch.float64) * apart
    return live, frozen, torch.randint(V, (T,), generator=draw)


def value_and_gradient(loss, live, frozen, tokens):
    live = live.clone().requires_grad_()
    frozen = None if frozen is None else frozen.clone().requires_grad_()
    frozen_logp = None if frozen is None else torch.log_softmax(frozen, -1)
    value = loss(torch.log_softmax(live, -1), frozen_logp, tokens)
    (grad,) = torch.autograd.grad(value.sum(), live, retain_graph=True)
    if frozen is not None and value.requires_grad:
        (through_frozen,) = torch.autograd.grad(value.sum(), frozen, allow_unused=True)
        assert through_frozen is None, "the frozen view must get no gradient"
    return value.detach(), grad


@pytest.mark.parametrize(("loss", "naive"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_value_and_gradient_against_loops(loss, naive, scale):
    live, frozen, tokens = logits(scale=scale, apart=scale / 2)
    value, grad = value_and_gradient(loss, live, frozen, tokens)
    step = 1e-6
    for t in range(len(tokens)):
        p, z, y = softmax(frozen[t].tolist()), live[t].tolist(), int(tokens[t])
        assert float(value[t]) == pytest.approx(naive(p, softmax(z), y), abs=1e-12, rel=1e-10)
        for v in range(len(z)):
            up, down = list(z), list(z)
            up[v] += step
            down[v] -= step
            slope = (naive(p, softmax(up), y) - naive(p, softmax(down), y)) / (2 * step)
            assert float(grad[t, v]) == pytest.approx(slope, abs=2e-7, rel=1e-6), (t, v)


def test_sampled_tokens_value_and_gradient():
    live, frozen, tokens = logits()
    for loss in (SampledStay(), SampledMatch()):
        value, grad = value_and_gradient(loss, live, frozen, tokens)
        for t, y in enumerate(tokens.tolist()):
            p, q = softmax(frozen[t].tolist()), softmax(live[t].tolist())
            log_r = math.log(q[y]) - math.log(p[y])
            expected, slope = (log_r, log_r) if loss == SampledStay() else (q[y] / p[y] - 1 - log_r, q[y] / p[y] - 1)
            assert float(value[t]) == pytest.approx(expected)
            for v in range(len(q)):
                assert float(grad[t, v]) == pytest.approx(slope * ((v == y) - q[v]), abs=1e-12)


def enumerated(loss, live, frozen, weights):
    """Expected value and gradient of a loss of one position over every token it could have been given."""
    results = [value_and_gradient(loss, live, frozen, torch.tensor([y])) for y in range(len(weights))]
    return [sum(w * result[i] for w, result in zip(weights, results, strict=True)) for i in (0, 1)]


def test_sampled_tokens_estimate_the_divergence_that_their_view_allows():
    """Exactly, over a whole vocabulary: tokens of the live view give KL(live || frozen), of the frozen the other."""
    live, frozen, _ = logits(T=1)
    q, p = torch.softmax(live, -1)[0], torch.softmax(frozen, -1)[0]
    for sampled, exact, drawn in ((SampledStay(), Stay(), q), (SampledMatch(), Match(), p)):
        stated = value_and_gradient(exact, live, frozen, torch.zeros(1, dtype=torch.long))
        for got, wanted in zip(enumerated(sampled, live, frozen, drawn), stated, strict=True):
            torch.testing.assert_close(got, wanted)
        other = enumerated(sampled, live, frozen, p if drawn is q else q)
        assert not torch.allclose(other[0], stated[0], rtol=0.01)
        assert not torch.allclose(other[1], stated[1], rtol=0.01)


def test_sampled_tokens_hold_still_where_the_views_agree():
    """For every token, so also over tokens that an outcome chose; the likelihood of the chosen ones would pull."""
    live, _, tokens = logits()
    for loss in (SampledStay(), SampledMatch()):
        value, grad = value_and_gradient(loss, live, live, tokens)
        assert value.count_nonzero() == grad.count_nonzero() == 0
    assert value_and_gradient(Imitate(), live, live, tokens)[1].count_nonzero() > 0


def test_tokens_of_successes_alone_do_not_estimate_the_failed_path_kl():
    """Why K_j stays exact under every objective: its tokens are no draws of the teacher at their prefixes."""
    live, frozen, _ = logits(T=1)
    q = torch.softmax(live, -1)[0]
    success = torch.arange(len(q)) % 2 == 0
    chosen = q * success / (q * success).sum()
    exact = value_and_gradient(Stay(), live, frozen, torch.zeros(1, dtype=torch.long))
    for got, wanted in zip(enumerated(SampledStay(), live, frozen, chosen), exact, strict=True):
        assert not torch.allclose(got, wanted, rtol=0.01)


def test_the_papers_counterexample():
    p, q = torch.tensor([[0.9, 0.1]]).double(), torch.tensor([[0.001, 0.999]]).double()
    token = torch.zeros(1, dtype=torch.long)
    assert float(Match()(q.log(), p.log(), token)) == pytest.approx(5.892, abs=5e-4)
    assert float(Match(0.05)(q.log(), p.log(), token)) == pytest.approx(-0.180, abs=5e-4)


def test_a_clipped_entry_gets_no_push():
    """The right token, p = 0.85 against q = 0.4, lies above tau: the clipped step even lowers it."""
    p = torch.tensor([[0.85, 0.1, 0.05]]).double()
    z = torch.tensor([[0.4, 0.35, 0.25]]).double().log()
    token = torch.zeros(1, dtype=torch.long)
    _, free = value_and_gradient(Match(), z, p.log(), token)
    _, clipped = value_and_gradient(Match(0.05), z, p.log(), token)
    assert free[0, 0] < 0 < clipped[0, 0]
    assert float((free * clipped).sum()) < 0


def test_reinforce_at_ratio_one():
    live, _, tokens = logits()
    advantage = torch.linspace(-1, 1, len(tokens)).double()
    value, grad = value_and_gradient(Reinforce(advantage), live, None, tokens)
    torch.testing.assert_close(value, -advantage)
    onehot = torch.nn.functional.one_hot(tokens, live.shape[1])
    torch.testing.assert_close(grad, -advantage[:, None] * (onehot - torch.softmax(live, -1)))


def test_reinforce_stops_where_the_clip_binds():
    live = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.2, 0.8], [0.2, 0.8]]).double().log()
    frozen = torch.tensor([[0.2, 0.8], [0.2, 0.8], [0.5, 0.5], [0.5, 0.5]]).double().log()
    tokens = torch.zeros(4, dtype=torch.long)
    loss = Reinforce(torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), 0.2)
    value, grad = value_and_gradient(loss, live, frozen, tokens)
    assert value.tolist() == pytest.approx([-1.2, 2.5, -0.4, 0.8])
    assert (grad.abs().sum(-1) > 0).tolist() == [False, True, True, False]
    found, slope = loss.slope(live[:, 0], frozen[:, 0])
    torch.testing.assert_close(found, value)
    assert slope.tolist() == pytest.approx([0.0, 2.5, -0.4, 0.0])


@pytest.mark.parametrize("advantage", [1.3, -0.8])
@pytest.mark.parametrize(("strength", "width"), [(0.5, 0.2), (1.0, 0.9), (0.3, 1.0), (0.0, 0.2)])
def test_modulated_reinforce_value_and_gradient(advantage, strength, width):
    live, frozen, tokens = logits()
    loss = ModulatedReinforce(advantage, strength, width)
    value, grad = value_and_gradient(loss, live, frozen, tokens)
    found, slope = loss.slope(*(torch.log_softmax(z, -1).gather(1, tokens[:, None])[:, 0] for z in (live, frozen)))
    kinds = set()
    for t, y in enumerate(tokens.tolist()):
        p, q = softmax(frozen[t].tolist()), softmax(live[t].tolist())
        ratio = p[y] / q[y] if advantage > 0 else q[y] / p[y]
        kinds.add("low" if ratio < 1 - width else "high" if ratio > 1 + width else "free")
        scaled = advantage * ((1 - strength) + strength * min(max(ratio, 1 - width), 1 + width))
        assert scaled * advantage > 0
        assert float(value[t]) == pytest.approx(-scaled)
        assert (float(found[t]), float(slope[t])) == pytest.approx((-scaled, -scaled))
        for v in range(len(q)):
            assert float(grad[t, v]) == pytest.approx(-scaled * ((v == y) - q[v]), abs=1e-12)
    assert {"high", "free"} <= kinds


def test_modulated_reinforce_is_reinforce_where_there_is_nothing_to_scale():
    live, frozen, tokens = logits()
    advantage = torch.linspace(-1, 1, len(tokens)).double()
    plain = value_and_gradient(Reinforce(advantage), live, None, tokens)
    torch.testing.assert_close(value_and_gradient(ModulatedReinforce(advantage, 0.0), live, frozen, tokens), plain)
    torch.testing.assert_close(value_and_gradient(ModulatedReinforce(advantage), live, live, tokens), plain)
    scaled = value_and_gradient(ModulatedReinforce(advantage), live, frozen, tokens)
    assert float((scaled[0] - plain[0]).abs().max()) > 0.05


def test_some_positions_take_their_advantages_along():
    loss = Reinforce(torch.tensor([1.0, 2.0, 3.0]), 0.1)
    some = loss.at(torch.tensor([2, 0]))
    assert isinstance(some, Reinforce)
    assert some.advantage.tolist() == [3.0, 1.0]
    assert some.epsilon == 0.1
    assert Reinforce(0.5).at(slice(0, 1)) == Reinforce(0.5)
    some = ModulatedReinforce(torch.tensor([1.0, 2.0, 3.0]), 0.4, 0.3).at(slice(1, 3))
    assert isinstance(some, ModulatedReinforce)
    assert (some.advantage.tolist(), some.strength, some.width) == ([2.0, 3.0], 0.4, 0.3)
    assert Match(0.1).at(slice(0, 1)) == Match(0.1)


def test_losses_that_differ_in_their_advantage_alone_stack():
    losses = [ModulatedReinforce(a, 0.4, 0.3) for a in (1.5, -0.5)]
    assert losses[0].key == losses[1].key != ModulatedReinforce(1.5, 0.39, 0.3).key
    assert losses[0].key != Reinforce(1.5).key
    stacked = losses[0].stack(losses, torch.tensor([2, 3]))
    assert isinstance(stacked, ModulatedReinforce)
    assert stacked.advantage.tolist() == [1.5, 1.5, -0.5, -0.5, -0.5]
    assert (stacked.strength, stacked.width) == (0.4, 0.3)
    assert Match(0.1).stack([Match(0.1)] * 2, torch.tensor([2, 3])) == Match(0.1)
    assert Match(0.1).key != Match(0.2).key


def test_a_function_is_a_loss():
    def own(live_logp, frozen_logp, tokens):
        return (live_logp.exp() - frozen_logp.exp()).square().sum(-1)

    live, frozen, tokens = logits()
    views = torch.log_softmax(live, -1), torch.log_softmax(frozen, -1)
    loss = Loss.of(own)
    assert Loss.of(loss) is loss
    assert torch.equal(loss(*views, tokens), own(*views, tokens))
    found = loss.diagnostics(*views, tokens)
    for t in range(len(tokens)):
        p, q = softmax(frozen[t].tolist()), softmax(live[t].tolist())
        assert float(found["kl"][t]) == pytest.approx(naive_kl(p, q))
    assert (found["clipped"] == 0).all()
    assert (found["removed"] == 0).all()


def naive_entries(loss, p, q):
    """The entries a loss adds up and clips."""
    if isinstance(loss, TopK):
        order = sorted(range(len(p)), key=lambda v: -p[v])[: loss.k]
        rest = [v for v in range(len(p)) if v not in order]
        p, q = ([d[v] for v in order] + ([math.fsum(d[v] for v in rest)] if loss.tail else []) for d in (p, q))
        if not loss.tail:
            p, q = ([x / math.fsum(d) for x in d] for d in (p, q))
    if isinstance(loss, GeneralizedJSD):
        return [naive_jsd([x], [y], loss.beta) for x, y in zip(p, q, strict=True)]
    return [naive_kl([y], [x]) if isinstance(loss, Stay) else naive_kl([x], [y]) for x, y in zip(p, q, strict=True)]


CLIPPED = [Match(0.05), Stay(0.05), GeneralizedJSD(0.3, 0.02), TopK(4, tau=0.1), TopK(4, tail=True, tau=0.1)]


@pytest.mark.parametrize("loss", CLIPPED, ids=repr)
def test_every_clip_tells_what_it_holds_and_takes(loss):
    live, frozen, tokens = logits()
    found = loss.diagnostics(torch.log_softmax(live, -1), torch.log_softmax(frozen, -1), tokens)
    for t in range(len(tokens)):
        p, q = softmax(frozen[t].tolist()), softmax(live[t].tolist())
        entries = naive_entries(loss, p, q)
        assert float(found["kl"][t]) == pytest.approx(naive_kl(q, p) if isinstance(loss, Stay) else naive_kl(p, q))
        assert float(found["clipped"][t]) == pytest.approx(sum(c >= loss.tau for c in entries) / len(entries))
        assert float(found["removed"][t]) == pytest.approx(math.fsum(max(0.0, c - loss.tau) for c in entries))
    assert 0 < float(found["clipped"].mean()) < 1


UNCLIPPED = [
    Match(),
    Stay(),
    GeneralizedJSD(0.3),
    TopK(4),
    MixedTopK(4),
    SampledStay(),
    SampledMatch(),
    Reinforce(0.7, 1e3),
]


@pytest.mark.parametrize("loss", UNCLIPPED, ids=repr)
def test_a_loss_without_a_clip_logs_its_kl_and_zeros(loss):
    live, frozen, tokens = logits()
    found = loss.diagnostics(torch.log_softmax(live, -1), torch.log_softmax(frozen, -1), tokens)
    for t in range(len(tokens)):
        p, q = softmax(frozen[t].tolist()), softmax(live[t].tolist())
        assert float(found["kl"][t]) == pytest.approx(naive_kl(q, p) if isinstance(loss, Stay) else naive_kl(p, q))
    assert (found["clipped"] == 0).all()
    assert (found["removed"] == 0).all()


@pytest.mark.parametrize("loss", [Reinforce(0.7), Reinforce(-0.7), ModulatedReinforce(0.7), ModulatedReinforce(-0.7)])
def test_the_clips_of_policy_gradients_tell_what_they_take(loss):
    """What the value would be without its clip, minus what it is."""
    live, frozen, tokens = logits()
    views = torch.log_softmax(live, -1), torch.log_softmax(frozen, -1)
    wide = Reinforce(loss.advantage, 1e3) if isinstance(loss, Reinforce) else None
    found, value = loss.diagnostics(*views, tokens), loss(*views, tokens)
    for t, y in enumerate(tokens.tolist()):
        p, q = softmax(frozen[t].tolist()), softmax(live[t].tolist())
        if wide is not None:
            free = float(wide(*views, tokens)[t])
        else:
            w = p[y] / q[y] if loss.advantage > 0 else q[y] / p[y]
            free = -loss.advantage * (1 - loss.strength + loss.strength * w)
        taken = abs(free - float(value[t]))
        assert float(found["removed"][t]) == pytest.approx(taken, abs=1e-12)
        assert float(found["clipped"][t]) == (taken > 1e-12)
    assert 0 < float(found["clipped"].mean()) < 1
    alone = Reinforce(0.7).diagnostics(views[0], None, tokens)
    assert set(alone) == {"clipped", "removed"}
    assert not any(row.any() for row in alone.values())


DIVERGENCES = [
    Match(),
    Match(0.05),
    Stay(),
    Stay(0.05),
    GeneralizedJSD(0.5),
    GeneralizedJSD(0.3, 0.02),
    TopK(2),
    TopK(2, tail=True),
    MixedTopK(3),
]


@pytest.mark.parametrize("loss", DIVERGENCES, ids=repr)
def test_identical_views_give_zero_and_a_zero_gradient(loss):
    live, _, tokens = logits()
    value, grad = value_and_gradient(loss, live, live, tokens)
    assert value.abs().max() < 1e-12
    assert grad.abs().max() < 1e-12


@pytest.mark.parametrize("loss", DIVERGENCES, ids=repr)
def test_entries_outside_the_vocabulary_leave_no_trace(loss):
    """-inf in both views equals leaving the entry out, in value and gradient."""
    live, frozen, tokens = logits(V=7)
    value, grad = value_and_gradient(loss, live, frozen, tokens)
    gone = torch.full((len(tokens), 2), -INF).double()
    padded_value, padded_grad = value_and_gradient(
        loss, torch.cat((live, gone), 1), torch.cat((frozen, gone), 1), tokens
    )
    torch.testing.assert_close(padded_value, value)
    torch.testing.assert_close(padded_grad[:, :7], grad)
    assert (padded_grad[:, 7:] == 0).all()


@pytest.mark.parametrize("loss", [Match(), Match(0.05), GeneralizedJSD(0.4), TopK(2, tail=True)], ids=repr)
def test_zero_frozen_probability(loss):
    live, frozen, tokens = logits(V=5)
    frozen[:, 3] = -INF
    value, grad = value_and_gradient(loss, live, frozen, tokens)
    assert value.isfinite().all()
    assert grad.isfinite().all()


def test_zero_live_probability():
    live, frozen, tokens = logits(V=5)
    live[:, 3] = -INF
    tokens[:] = 0
    for loss in (Stay(), Stay(0.05), GeneralizedJSD(0.4), GeneralizedJSD(0.4, 0.02)):
        value, grad = value_and_gradient(loss, live, frozen, tokens)
        assert value.isfinite().all(), loss
        assert grad.isfinite().all(), loss
    value, grad = value_and_gradient(Match(), live, frozen, tokens)
    assert (value == INF).all()
    value, grad = value_and_gradient(Match(0.05), live, frozen, tokens)
    assert value.isfinite().all()
    assert grad.isfinite().all()


def test_infinite_reverse_kl_is_cut_without_nan():
    live, frozen, tokens = logits(V=5)
    frozen[:, 3] = -INF
    value, grad = value_and_gradient(Stay(0.05), live, frozen, tokens)
    assert value.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Match(-1.0),
        lambda: Match(math.nan),
        lambda: GeneralizedJSD(1.2),
        lambda: TopK(0),
        lambda: ModulatedReinforce(1.0, strength=1.5),
        lambda: ModulatedReinforce(1.0, width=-0.1),
        lambda: MixedTopK(0),
        lambda: MixedTopK(4, 1.5),
    ],
)
def test_senseless_losses_are_refused(make):
    with pytest.raises(PastError):
        make()


@pytest.mark.parametrize(
    "loss",
    [
        Match(),
        Stay(),
        GeneralizedJSD(),
        TopK(2),
        MixedTopK(2),
        SampledStay(),
        SampledMatch(),
        ModulatedReinforce(1.0),
    ],
    ids=repr,
)
def test_a_missing_frozen_view_is_named(loss):
    live, _, tokens = logits()
    with pytest.raises(PastError, match="frozen view"):
        loss(torch.log_softmax(live, -1), None, tokens)


def test_token_weights_sequence():
    assert token_weights([2, 8], [1.0, 0.5]) == [0.5, 0.0625]


def test_token_weights_token_is_one_mean_over_tokens():
    weights = token_weights([2, 8], [0.5, 0.5], "token")
    assert weights == pytest.approx([0.1, 0.1])
    uneven = token_weights([2, 8], [3.0, 1.0], "token")
    assert uneven == pytest.approx([12 / 14, 4 / 14])
    assert sum(w * n for w, n in zip(uneven, [2, 8], strict=True)) == pytest.approx(4.0)
    assert token_weights([2, 8], [0.0, 0.0], "token") == [0.0, 0.0]


@pytest.mark.parametrize(
    "arguments",
    [([2, 0], [1.0, 1.0]), ([2], [1.0, 1.0]), ([2, 2], [1.0, -1.0], "token"), ([2], [1.0], "row")],
)
def test_token_weights_refuses(arguments):
    with pytest.raises(PastError):
        token_weights(*arguments)


def records(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_clipped_forward_kl_vectors():
    rows = records("clipped_fkl_vectors.jsonl")
    assert len(rows) == 72
    for row in rows:
        live = torch.tensor(row["student_logits"], dtype=torch.float64, requires_grad=True)
        frozen = torch.tensor(row["teacher_logits"], dtype=torch.float64)
        mask = torch.tensor(row["mask"], dtype=torch.bool)
        loss = Match(INF if row["tau"] is None else row["tau"])
        views = [torch.log_softmax(z / row["temperature"], -1).flatten(0, 1) for z in (live, frozen)]
        value = loss(*views, torch.zeros(mask.numel(), dtype=torch.long)).view(mask.shape)
        expected = torch.tensor(row["per_token"], dtype=torch.float64)
        torch.testing.assert_close(value[mask], expected[mask], rtol=1e-9, atol=1e-11)
        token_mean = value[mask].mean()
        assert token_mean.item() == pytest.approx(row["loss_token_mean"])
        lengths = mask.sum(1).tolist()
        weights = token_weights(lengths, [1 / len(lengths)] * len(lengths), "sequence")
        by_sequence = sum(w * value[i][mask[i]].sum() for i, w in enumerate(weights))
        assert by_sequence.item() == pytest.approx(row["loss_seq_mean"])
        flat = token_weights(lengths, [1 / len(lengths)] * len(lengths), "token")
        by_token = sum(w * value[i][mask[i]].sum() for i, w in enumerate(flat))
        assert by_token.item() == pytest.approx(row["loss_token_mean"])
        (grad,) = torch.autograd.grad(token_mean, live)
        want = torch.tensor(row["grad_student_logits_of_token_mean"], dtype=torch.float64)
        torch.testing.assert_close(grad, want, rtol=1e-7, atol=1e-10)


def test_trl_generalized_jsd_vectors():
    rows = records("trl_generalized_jsd_vectors.jsonl")
    assert len(rows) == 108
    for row in rows:
        live = torch.tensor(row["student_logits"], dtype=torch.float64, requires_grad=True)
        frozen = torch.tensor(row["teacher_logits"], dtype=torch.float64)
        views = [torch.log_softmax(z / row["temperature"], -1).flatten(0, 1) for z in (live, frozen)]
        value = GeneralizedJSD(row["beta"])(*views, torch.zeros(len(views[0]), dtype=torch.long))
        if row["labels"] is None:
            # Without labels its "batchmean" divides by the batch, not by the tokens.
            total = value.sum() / live.shape[0]
        else:
            keep = torch.tensor(row["labels"]).flatten() != -100
            total = value[keep].mean()
        assert total.item() == pytest.approx(row["loss"], rel=1e-5, abs=1e-9)
        (grad,) = torch.autograd.grad(total, live)
        assert float(grad.norm()) == pytest.approx(row["grad_l2"], rel=1e-5, abs=1e-9)
        # The field's name notwithstanding, it holds the last position's gradient.
        want = torch.tensor(row["grad_first_row"], dtype=torch.float64)
        torch.testing.assert_close(grad.flatten(0, 1)[-1], want, rtol=1e-5, atol=1e-9)


def stated():
    return {row["name"]: row for row in records("stated_vectors.jsonl")}


def close(value, row, key=None):
    want = row["expected"] if key is None else row["expected"][key]
    torch.testing.assert_close(
        torch.as_tensor(value, dtype=torch.float64),
        torch.tensor(want, dtype=torch.float64).view_as(value),
        rtol=row["rtol"],
        atol=max(row["atol"], 1e-9),
    )


def probabilities(row):
    views = [
        torch.tensor(row["inputs"][name], dtype=torch.float64).log() for name in ("student_probs", "teacher_probs")
    ]
    return [view.flatten(0, 1) for view in views]


def test_stated_divergences():
    rows = stated()
    none = torch.zeros(2, dtype=torch.long)
    close(Match()(*probabilities(rows["trl_full_logit_fkl"]), none[:1]), rows["trl_full_logit_fkl"])
    masked = rows["trl_masked_token_ignored"]
    close(Match()(*probabilities(masked), none)[0], masked)
    for name in ("gkd_beta0", "gkd_beta1"):
        row = rows[name]
        close(GeneralizedJSD(row["inputs"]["beta"])(*probabilities(row), none[:1])[0], row)
    row = rows["gkd_uniform_zero"]
    views = [
        torch.log_softmax(torch.tensor(row["inputs"][f"{n}_logits"]), -1).flatten(0, 1) for n in ("student", "teacher")
    ]
    close(GeneralizedJSD(row["inputs"]["beta"])(*views, none[:1]).double()[0], row)
    row = rows["optax_kl_divergence"]
    live, p = (torch.tensor(row["inputs"][n], dtype=torch.float64) for n in ("pred_logprobs", "target_probs"))
    close(Match()(live, p.log(), none), row)


def test_stated_torchtune():
    """Its "forward KL" is a soft cross-entropy: KL plus the frozen view's entropy."""
    rows = stated()
    inputs = rows["torchtune_forward_true_kl"]["inputs"]
    live, frozen = (
        torch.log_softmax(torch.tensor(inputs[f"{n}_logits"]).bfloat16().double(), -1).flatten(0, 1)
        for n in ("student", "teacher")
    )
    tokens = torch.zeros(len(live), dtype=torch.long)
    forward, reverse = Match()(live, frozen, tokens).mean(), Stay()(live, frozen, tokens).mean()
    entropy = -(frozen.exp() * frozen).sum(-1).mean()
    close(forward, rows["torchtune_forward_true_kl"])
    close(reverse, rows["torchtune_test_reverse_kl_loss_expected"])
    close(forward + entropy, rows["torchtune_test_forward_kl_loss_expected"])
    close((forward + entropy + reverse) / 2, rows["torchtune_test_symmetric_kl_loss_expected"])


def test_stated_top_k_and_sampled_token():
    rows = stated()
    for name in ("trl_topk_renorm", "trl_topk_tail"):
        live, frozen = probabilities(rows[name])
        # There the support is the live view's top k; a hair more mass makes the frozen view's the same.
        frozen = frozen + torch.tensor([[1e-9, 0.0, 0.0]])
        loss = TopK(rows[name]["inputs"]["topk"], tail=rows[name]["inputs"]["add_tail"])
        close(loss(live, frozen, torch.zeros(1, dtype=torch.long)), rows[name])
    row = rows["trl_sampled_token"]
    live, frozen = probabilities(row)
    token = torch.tensor(row["inputs"]["completion_ids"]).flatten()
    # There the value is the log-ratio times the log-probability that carries the gradient.
    close(SampledStay()(live, frozen, token) * at_tokens(live, token), row)


def test_stated_policy_gradients():
    rows = stated()

    def two_entries(logprobs):
        p = torch.tensor(logprobs, dtype=torch.float64).flatten().exp()
        return torch.stack((p, 1 - p), -1).log()

    token = torch.zeros(3, dtype=torch.long)
    row = rows["nemo_ppo_clip"]
    advantage = torch.tensor(row["inputs"]["advantages"][0]).double()
    views = [two_entries(row["inputs"][n]) for n in ("logprobs", "old_logprobs")]
    close(Reinforce(advantage, row["inputs"]["eps"])(*views, token), row, "per_token")
    row = rows["nemo_on_policy_ratio1"]
    close(Reinforce(advantage)(two_entries(row["inputs"]["logprobs"]), None, token), row, "per_token")
    row = rows["nemo_reinforce"]
    close(advantage * Imitate()(two_entries(row["inputs"]["logprobs"]), None, token), row, "per_token")
    row = rows["rlax_clipped_surrogate"]
    inputs = row["inputs"]
    live, old = (
        torch.log_softmax(torch.tensor(inputs[n], dtype=torch.float64), -1).flatten(0, 1)
        for n in ("logits", "old_logits")
    )
    loss = Reinforce(torch.tensor(inputs["advantages"]).double().flatten(), inputs["eps"])
    value = loss(live, old, torch.tensor(inputs["actions"]).flatten())
    close(value.view(2, 3).mean(1), row)


def test_every_stated_vector_is_used_or_belongs_elsewhere():
    elsewhere = {"trl_is_clip", "nemo_k1k2k3", "nemo_k3_penalty", "nemo_k3_input_clamp_grad"}
    groups = {name for name in stated() if name.startswith("nemo_group")}
    source = Path(__file__).read_text()
    unused = [n for n in stated() if n not in elsewhere | groups and f'"{n}"' not in source]
    assert unused == []
