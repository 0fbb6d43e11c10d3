from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rounding import assert_rounding, follow

from past_opsd.core.config import OptimizerSection
from past_opsd.core.losses import (
    GeneralizedJSD,
    Imitate,
    Match,
    MixedTopK,
    ModulatedReinforce,
    Reinforce,
    SampledMatch,
    SampledStay,
    Stay,
    TopK,
)
from past_opsd.core.nouns import PastError, Term, View
from past_opsd.learner import Bundle, NonFiniteError, Path, bundle, gather_paths, learning_rate, micro_batches
from past_opsd.policy import packing
from past_opsd.policy.model import Model
from past_opsd.run.train import Session, session

HINT, PLAIN = (1, 5, 7, 2, 9, 9), (1, 5, 2)


def term(name: str, tokens: tuple[int, ...], loss, frozen: bool = True, weight: float = 1.0, adapter="teacher") -> Term:
    other = "student" if adapter == "teacher" else "teacher"
    return Term(name, View(adapter, HINT), View(other, PLAIN) if frozen else None, tokens, loss, weight)


def some_terms(adapter: str = "teacher") -> list[Term]:
    return [
        term("correct", (6, 7, 8), Match(0.5), weight=0.3, adapter=adapter),
        term("correct", (4,), Match(0.5), weight=0.2, adapter=adapter),
        term("reinforce", (6, 6, 6, 3), Reinforce(1.5), frozen=False, weight=0.25, adapter=adapter),
        term("reinforce", (8, 6), Reinforce(-0.7), frozen=False, weight=0.25, adapter=adapter),
        term("stay", (6, 6, 6, 3), Stay(), weight=0.05, adapter=adapter),
    ]


def update(small_recipe, terms: list[Term], *overrides: str) -> torch.Tensor:
    """By how much every entry moved in one step that follows the gradient."""
    with session(small_recipe("embedded/past", *follow("teacher"), *overrides)) as parts:
        perturb(parts)
        before = values(parts)
        parts.learner.step("teacher", terms)
        return values(parts) - before


def values(parts: Session) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in parts.model.parameters("teacher").values()]).double()


def assert_same_update(found: torch.Tensor, want: torch.Tensor) -> None:
    largest = float(want.abs().max())
    assert largest > 0.01
    assert_rounding(found, want, largest)


def perturb(parts: Session) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in ("student", "teacher"):
            for parameter in parts.model.parameters(adapter).values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_one_live_forward_serves_all_terms_that_read_it():
    paths = gather_paths(some_terms(), "sequence")
    assert [len(p.terms) for p in paths] == [1, 1, 2, 1]


def test_the_same_response_drawn_twice_counts_twice():
    once, twice = (gather_paths([t for t in some_terms() for _ in range(n)], "sequence") for n in (1, 2))
    assert len(twice) == 2 * len(once)


def test_row_weights_are_the_papers_one_over_length():
    weights = {(t.name, len(t.tokens)): w for p in gather_paths(some_terms(), "sequence") for t, w in p.terms}
    assert weights[("correct", 3)] == pytest.approx(0.3 / 3)
    assert weights[("stay", 4)] == pytest.approx(0.05 / 4)


def test_micro_batches_respect_the_budget_and_cut_nothing():
    paths = [Path(View("teacher", (0,) * n), (1,) * n) for n in (3, 9, 1, 5, 7, 2, 40)]
    batches = list(micro_batches(bundle(paths, 30, worth=20), 30))
    assert sorted(len(p.tokens) for batch in batches for b in batch for p in b.paths) == [1, 2, 3, 5, 7, 9, 40]
    assert all(len(batch) == 1 or len(batch) * max(b.width for b in batch) <= 30 for batch in batches)


def test_bundles_stay_within_the_budget_and_lose_nothing():
    paths = [Path(View("teacher", (0,) * 20), (n,) * n) for n in (3, 9, 1, 5, 7, 2, 4)]
    made = bundle(paths, 32, worth=1)
    assert sorted(len(p.tokens) for b in made for p in b.paths) == [1, 2, 3, 4, 5, 7, 9]
    assert 1 < len(made) < len(paths)
    assert all(b.width <= 32 for b in made)
    assert all(len(b.paths) == 1 for b in bundle(paths, 32, worth=None))


def test_paths_that_begin_alike_share_a_row_where_it_saves_more_than_its_segments_cost():
    begin, a, b, other = (0,) * 20, (1,) * 6, (2,) * 6, (3,) * 20

    def rows(worth: int, *prompts: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
        made = bundle([Path(View("teacher", p), (9, 9)) for p in prompts], 1000, worth)
        return [[path.live.prompt for path in item.paths] for item in made]

    # Two paths in three segments save 20 positions.
    assert rows(6, begin + a, other, begin + b) == [[begin + a, begin + b], [other]]
    assert rows(7, begin + a, other, begin + b) == [[begin + a], [other], [begin + b]]
    assert rows(6, *[begin + a] * 3, begin + b) == [[begin + a] * 3 + [begin + b]]
    assert rows(4, other, begin[:3] + a, begin[:3] + b) == [[other], [begin[:3] + a], [begin[:3] + b]]


def test_a_frozen_forward_has_the_rows_of_the_live_one():
    read = [View("student", PLAIN), View("student", HINT)]
    terms = [Term("stay", View("teacher", HINT), view, (6, 7), Stay(), 1.0) for view in read]
    alone = Path(View("teacher", HINT), (6, 7), [(t, 1.0) for t in terms])
    other = Path(View("teacher", HINT), (8,), [(terms[0], 1.0)])
    assert Bundle([alone]).frozen == {"student": [[(read[0], (6, 7))], [(read[1], (6, 7))]]}
    assert (Bundle([alone]).height, Bundle([alone]).width) == (2, 7)
    assert Bundle([alone, other]).frozen == {"student": [[(read[0], (6, 7)), (read[1], (6, 7)), (read[0], (8,))]]}
    assert Bundle([alone, other]).height == 1


def tree_terms() -> list[Term]:
    """Responses that begin alike below prompts that begin alike, and one of them drawn twice."""
    drawn = [((), (6, 7, 8, 8)), ((), (6, 7, 8, 2)), ((), (6, 7, 8, 8)), ((4,), (6, 7)), ((4,), (6, 7, 1)), ((), (6,))]
    made = []
    for i, (rest, tokens) in enumerate(drawn):
        live = View("teacher", HINT + rest)
        made.append(Term("stay", live, View("student", PLAIN + rest), tokens, Stay(), 0.2))
        made.append(Term("reinforce", live, None, tokens, Reinforce(1.5 - i % 2), 0.3))
    return made


def branching_terms() -> list[Term]:
    """Prompts that begin alike and go on, or not; live and frozen ones of different lengths."""
    made = []
    for i, (rest, tokens) in enumerate([((), (6, 7, 8)), ((4, 3), (5,)), ((4, 6, 6), (7, 2, 2)), ((4, 3), (8, 8))]):
        live, frozen = View("teacher", HINT + rest), View("student", PLAIN + rest[:1])
        made.append(Term("correct", live, frozen, tokens, Match(0.5), 0.1 + i))
        made.append(Term("reinforce", live, None, tokens, Reinforce(1.5 - i), 0.3))
    return made


@pytest.mark.parametrize("terms", [some_terms, branching_terms, tree_terms])
@pytest.mark.parametrize("budget", [24, 4096])
def test_shared_prompts_do_not_change_the_update(small_recipe, monkeypatch: pytest.MonkeyPatch, budget: int, terms):
    alone = update(small_recipe, terms(), "learner.shared_prompts=false")
    monkeypatch.setattr(Model, "worth", 1)
    saved: list[int] = []
    real = packing.Tree
    monkeypatch.setattr(packing, "Tree", lambda *a: saved.append(real(*a).saved) or real(*a))
    together = update(small_recipe, terms(), f"learner.token_budget={budget}")
    assert max(saved) > 10, "nothing was shared"
    assert_same_update(together, alone)


def test_rows_are_shared_only_where_every_network_can(small_recipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Model, "worth", 1)
    terms = [Term("d", View("student", HINT), View("expert", HINT), (6, n), Match(), 1.0) for n in (7, 8)]
    with session(small_recipe("embedded/opd")) as parts:
        for able in (True, False):
            parts.model.expert.__dict__["shares_prompts"] = able
            ((batch,),) = parts.learner._plan(terms)
            assert [len(item.paths) for item in batch] == ([2] if able else [1, 1])


def test_frozen_prompts_count_in_the_width():
    paths = gather_paths([Term("t", View("student", PLAIN), View("teacher", HINT), (1, 2), Match())], "sequence")
    assert Bundle(paths).width == len(HINT) + 1


@pytest.mark.parametrize("budget", [16, 24, 64])
def test_micro_batching_and_padding_do_not_change_the_update(small_recipe, budget: int):
    whole = update(small_recipe, some_terms())
    split = update(small_recipe, some_terms()[::-1], f"learner.token_budget={budget}")
    assert_same_update(split, whole)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can run the kernel")
def test_an_implementation_that_cannot_run_here_is_refused_before_anything_is_sampled(small_recipe):
    with (
        pytest.raises(PastError, match="triton"),
        session(small_recipe("embedded/past", "learner.implementation='triton'")),
    ):
        pass


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_implementations_make_the_same_update(small_recipe, implementation: str):
    other = update(small_recipe, some_terms(), f"learner.implementation='{implementation}'")
    assert_same_update(other, update(small_recipe, some_terms()))


def test_no_terms_no_step_and_nothing_advances(past: Session):
    before = past.model.digest("teacher")
    assert past.learner.step("teacher", []) == {"teacher/stepped": 0.0}
    assert past.learner.steps == {"student": 0, "teacher": 0}
    assert not past.learner.optimizers["teacher"].state
    assert (past.model.digest("teacher"), past.model.versions["teacher"]) == (before, 0)


def state_of(parts: Session, adapter: str) -> list[torch.Tensor]:
    """Weights and the optimizer's moments and counters, copied."""
    parameters = list(parts.model.parameters(adapter).values())
    state = parts.learner.optimizers[adapter].state
    return [p.detach().clone() for p in parameters] + [v.clone() for p in parameters for v in state[p].values()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(
    "terms",
    [
        [term("reinforce", (6, 7), Reinforce(0.0), frozen=False)],
        [term("stay", (6, 7), Stay(), weight=0.0), term("modulated", (6, 7), ModulatedReinforce(0.0))],
    ],
)
def test_where_nothing_pulls_momentum_moves_nothing(past: Session, terms: list[Term]):
    past.learner.step("teacher", some_terms())  # so that there is momentum
    before = state_of(past, "teacher")
    assert past.learner.step("teacher", terms) == {"teacher/stepped": 0.0}
    assert same(state_of(past, "teacher"), before)
    assert (past.learner.steps["teacher"], past.model.versions["teacher"]) == (1, 1)
    past.learner.step("teacher", [*terms, *some_terms()])
    assert not same(state_of(past, "teacher"), before)


def test_a_term_of_weight_zero_is_not_computed(past: Session, monkeypatch: pytest.MonkeyPatch):
    read: list[packing.Read] = []
    hidden = past.model.hidden
    monkeypatch.setattr(past.model, "hidden", lambda paths, *a: read.extend(paths) or hidden(paths, *a))
    nothing = [term("stay", (9, 9, 9), Stay(), weight=0.0), replace(some_terms()[-1], weight=0.0)]
    metrics = past.learner.step("teacher", [*some_terms()[:-1], *nothing])
    assert {tokens for view, tokens in read if view.adapter == "student"} == {(6, 7, 8), (4,)}
    assert (9, 9, 9) not in {tokens for _, tokens in read}
    assert not any("stay" in key for key in metrics)


def test_a_weight_of_zero_keeps_copies_of_a_response_apart():
    """The n-th term of a name belongs to the n-th copy, whatever its weight."""
    paths = gather_paths([t for w in (0.0, 1.0) for t in replaced(w)], "sequence")
    assert [[t.name for t, _ in p.terms] for p in paths] == [["reinforce"], ["reinforce", "stay"]]


def replaced(weight: float) -> list[Term]:
    return [term("reinforce", (6, 6), Reinforce(1.0), frozen=False), term("stay", (6, 6), Stay(), weight=weight)]


def test_a_step_moves_exactly_one_adapter_and_its_version(past: Session):
    before = {a: past.model.digest(a) for a in ("student", "teacher")}
    past.learner.step("teacher", some_terms())
    assert past.model.digest("student") == before["student"]
    assert past.model.digest("teacher") != before["teacher"]
    assert past.model.versions == {"base": 0, "student": 0, "teacher": 1}
    assert past.learner.steps == {"student": 0, "teacher": 1}
    assert not past.learner.optimizers["student"].state


def test_terms_of_the_other_phase_are_refused(past: Session):
    with pytest.raises(ValueError, match="live terms of"):
        past.learner.step("student", some_terms("teacher"))


@pytest.mark.parametrize(("steps", "counted"), [(0, True), (3, True), (10, True), (0, False), (10, False)])
def test_a_moved_frozen_adapter_is_noticed(past: Session, monkeypatch: pytest.MonkeyPatch, steps: int, counted: bool):
    """At every step where torch counts the write, and at every tenth whatever it was."""

    def step(*_: object) -> None:
        weight = next(iter(past.model.parameters("student").values()))
        (weight.detach() if counted else weight.data).add_(1.0)

    past.learner.steps["teacher"] = steps
    monkeypatch.setattr(past.learner.optimizers["teacher"], "step", step)
    with pytest.raises(RuntimeError, match="the student adapter moved during the teacher step"):
        past.learner.step("teacher", some_terms())


def test_most_steps_read_no_bits(past: Session, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    monkeypatch.setattr(past.model, "fingerprint", lambda adapter: read.append(adapter) or "")
    for _ in range(11):
        past.learner.step("teacher", some_terms())
    assert read == ["student"] * 4


def test_stray_trainable_parameters_are_noticed(past: Session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(past.model, "trainable", lambda: set(past.model.parameters("student")))
    with pytest.raises(RuntimeError, match="other parameters than the teacher adapter's"):
        past.learner.step("teacher", some_terms())


@pytest.mark.parametrize("bad", ["correct", "reinforce"])
def test_a_non_finite_loss_stops_the_step_and_names_the_term(past: Session, bad: str):
    terms = [t if t.name != bad else term(bad, t.tokens, Broken(), frozen=False) for t in some_terms()]
    before = past.model.digest("teacher")
    with pytest.raises(NonFiniteError, match=f"term '{bad}'"):
        past.learner.step("teacher", terms)
    assert past.model.digest("teacher") == before
    assert past.learner.steps["teacher"] == 0
    assert all(p.grad is None for p in past.model.parameters("teacher").values())
    past.learner.step("teacher", some_terms())


class Broken:
    """A loss that is not a number."""

    def __call__(self, live_logp: torch.Tensor, frozen_logp: object, tokens: torch.Tensor) -> torch.Tensor:
        return live_logp[:, 0] * math.nan

    def __repr__(self) -> str:
        return "Broken()"


def test_diagnostics_of_the_appendix_are_there(past: Session):
    perturb(past)
    metrics = past.learner.step("teacher", some_terms())
    for key in ("loss", "kl", "clip_fraction", "removed_mass", "alignment", "entropy", "objective"):
        assert f"teacher/correct/{key}" in metrics
    for key in ("kl_q10", "kl_q50", "kl_q90", "kl_max"):
        assert f"teacher/stay/{key}" in metrics
    assert metrics["teacher/nonfinite"] == 0
    assert metrics["teacher/grad_norm"] > 0
    assert metrics["teacher/correct/loss"] <= metrics["teacher/correct/kl"] + 1e-6
    removed = metrics["teacher/correct/kl"] - metrics["teacher/correct/loss"]
    assert metrics["teacher/correct/removed_mass"] == pytest.approx(removed, abs=1e-5)


def logged(parts: Session, terms: list[Term]) -> dict[str, float]:
    """What a step on these terms would log, without the step."""
    try:
        with parts.model.training("teacher"):
            return parts.learner._accumulate("teacher", terms).summary()
    finally:
        parts.learner.optimizers["teacher"].zero_grad(set_to_none=True)


def test_positions_before_the_start_are_read_and_not_supervised(past: Session):
    """The same as with those tokens in both prompts: values, means, gradient; beside a term that supervises all."""
    perturb(past)
    tokens = (6, 7, 8, 6)
    whole = [replace(term("stay", tokens, Stay()), start=1), replace(term("stay", tokens, Stay(), weight=0.5), start=3)]
    whole.append(term("reinforce", tokens, Reinforce(1.5), frozen=False))
    cut = [term("reinforce", tokens, Reinforce(1.5), frozen=False)]
    for t in whole[:2]:
        assert t.frozen is not None
        head, rest = tokens[: t.start], tokens[t.start :]
        moved = [View(v.adapter, v.prompt + head) for v in (t.live, t.frozen)]
        cut.append(replace(t, live=moved[0], frozen=moved[1], tokens=rest, start=0))
    for reduction in ("sequence", "token"):
        past.learner._section = past.learner._section.model_copy(update={"reduction": reduction})
        (value, grad), (wanted, other) = (past.learner.gradient("teacher", terms) for terms in (whole, cut))
        assert_rounding(torch.tensor(value), torch.tensor(wanted), 1.0)
        assert_rounding(grad, other, float(other.abs().max()))
    found, expected = logged(past, whole), logged(past, cut)
    for key in ("loss", "kl", "entropy", "alignment", "kl_max", "objective"):
        assert found[f"stay/{key}"] == pytest.approx(expected[f"stay/{key}"], rel=1e-4)
    assert "stay/kl@00" in found
    without = logged(past, [replace(t, start=0) for t in whole])
    assert without["stay/kl"] != pytest.approx(found["stay/kl"], rel=1e-2)


@pytest.mark.parametrize(
    "loss",
    [
        GeneralizedJSD(0.5, 1e-3),
        TopK(3, tau=1e-3),
        MixedTopK(3),
        SampledStay(),
        SampledMatch(),
        ModulatedReinforce(1.5, width=1e-3),
        lambda live_logp, frozen_logp, tokens: (live_logp - frozen_logp).square().sum(-1),
    ],
)
def test_every_objective_logs_the_kl_and_its_clip(past: Session, loss):
    """The KL of a step is the one that `Match` logs on the same views."""
    perturb(past)
    match = logged(past, [term("match", (6, 7, 8), Match())])
    found = logged(past, [term("own", (6, 7, 8), loss)])
    for key in ("kl", "kl_q50", "kl_max", "kl@00", "kl@02"):
        assert found[f"own/{key}"] == pytest.approx(match[f"match/{key}"], rel=1e-4), key
    clips = isinstance(loss, GeneralizedJSD | TopK | ModulatedReinforce)
    assert (found["own/clip_fraction"] > 0) is clips
    assert (found["own/removed_mass"] > 0) is clips


def test_a_policy_gradient_without_a_frozen_view_clips_nothing(past: Session):
    perturb(past)
    found = logged(past, [term("own", (6, 7), Reinforce(1.5), frozen=False)])
    assert (found["own/clip_fraction"], found["own/removed_mass"]) == (0.0, 0.0)
    assert "own/kl" not in found


@pytest.mark.parametrize("reduction", ["sequence", "token"])
@pytest.mark.parametrize("implementation", ["fused", "chunked"])
def test_two_terms_of_one_objective_are_its_sum(small_recipe, reduction: str, implementation: str):
    """KL + CE as two terms: the gradient of one loss that adds them, and its value in the log."""

    def both(live_logp, frozen_logp, tokens):
        return Match(0.05)(live_logp, frozen_logp, tokens) + 0.25 * Imitate()(live_logp, None, tokens)

    paths = [((6, 7, 8), 0.7), ((4,), 0.3)]
    whole = [term("d", tokens, both, weight=weight) for tokens, weight in paths]
    apart = [
        made
        for tokens, weight in paths
        for made in (
            term("d", tokens, Match(0.05), weight=weight),
            term("d/ce", tokens, Imitate(), frozen=False, weight=0.25 * weight),
        )
    ]
    overrides = [f"learner.reduction='{reduction}'", f"learner.implementation='{implementation}'"]
    with session(small_recipe("embedded/past", *overrides)) as parts:
        perturb(parts)
        (value, gradient), (other_value, other) = (parts.learner.gradient("teacher", t) for t in (whole, apart))
        assert_rounding(other, gradient, float(gradient.abs().max()))
        assert other_value == pytest.approx(value, rel=1e-5)
        logs = [logged(parts, t) for t in (whole, apart)]
    for key in ("d/loss", "d/objective", "d/kl", "d/entropy"):
        assert logs[1][key] == pytest.approx(logs[0][key], rel=1e-4), key
    assert logs[1]["d/clip_fraction"] > 0
    nll = (logs[1]["d/loss"] - (logs[1]["d/kl"] - logs[1]["d/removed_mass"])) / 0.25
    assert logs[1]["d/ce/loss"] == pytest.approx(nll, rel=1e-4)
    assert "d/ce/objective" not in logs[1]


def test_alignment_is_one_without_clipping_and_negative_when_the_clip_takes_the_push(past: Session):
    """The right token's entry is clipped away and the rest still pushes: the wrong tau that destroys a run."""
    perturb(past)
    free = past.learner.step("teacher", [term("correct", (6, 7, 8), Match())])
    assert free["teacher/correct/alignment"] == pytest.approx(1.0, abs=1e-5)
    clipped = past.learner.step("teacher", [term("correct", (6, 7, 8), Match(1e-4))])
    assert clipped["teacher/correct/alignment"] < 0.9


def test_gradients_are_clipped(small_recipe):
    with session(small_recipe("embedded/past", "learner.teacher.max_grad_norm=1e-3")) as parts:
        seen: list[float] = []
        step = parts.learner.optimizers["teacher"].step

        def spy() -> None:
            grads = [p.grad for p in parts.model.parameters("teacher").values() if p.grad is not None]
            seen.append(float(torch.cat([g.flatten() for g in grads]).norm()))
            step()

        parts.learner.optimizers["teacher"].step = spy
        norm = parts.learner.step("teacher", some_terms())["teacher/grad_norm"]
    assert norm > 1e-3
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


def test_imitate_matches_plain_cross_entropy(past: Session):
    metrics = past.learner.step("student", [term("sft", (6, 7), Imitate(), frozen=False, adapter="student")])
    ids = torch.tensor([(*HINT, 6, 7)])
    past.model.activate("base")
    with torch.no_grad():
        logits = past.model.network(input_ids=ids).logits[0, len(HINT) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([6, 7]))
    assert metrics["student/sft/loss"] == pytest.approx(float(expected), rel=1e-4)


def test_schedules():
    constant = OptimizerSection(lr=1.0, warmup_steps=4)
    assert [learning_rate(constant, s, 10) for s in (0, 3, 4, 9)] == [0.25, 1.0, 1.0, 1.0]
    linear = OptimizerSection(lr=1.0, schedule="linear", warmup_steps=2)
    assert [learning_rate(linear, s, 10) for s in (1, 2, 6)] == [1.0, 1.0, 0.5]
    cosine = OptimizerSection(lr=1.0, schedule="cosine")
    assert [learning_rate(cosine, s, 10) for s in (0, 5, 10, 15)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
