import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from past_opsd.core.nouns import PastError, derive_seed
from past_opsd.core.stats import (
    Unit,
    _resample_draws,
    _resample_problems,
    avg_at_k,
    bootstrap,
    bootstrap_scores,
    macro,
    majority_at_k,
    majority_scores,
    paired_bootstrap,
    pass_at_k,
    pass_scores,
    wilson,
)

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "metrics" / "at_k_cases.jsonl"
UNITS: tuple[Unit, ...] = ("sample", "problem", "problem+seed")
property_test = settings(deadline=None, derandomize=True, max_examples=100)


def outcomes(rng: np.random.Generator, *shape: int, p: float = 0.5) -> np.ndarray:
    return (rng.random(shape) < p).astype(int)


def result_set(seed: int, shapes=((3, 10, 6), (3, 7, 6)), p: float = 0.5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"task{i}": outcomes(rng, *shape, p=p) for i, shape in enumerate(shapes)}


def test_scores_by_hand():
    run = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert avg_at_k(run) == 3 / 12
    assert pass_at_k(run, 1) == 3 / 12
    # C(2,2)/C(4,2) = 1/6 and C(3,2)/C(4,2) = 1/2 of the pairs hold no success.
    assert pass_scores(run, 2).tolist() == [5 / 6, 0.0, 1 / 2]
    assert pass_at_k(run, 4) == 2 / 3
    assert pass_scores(run, 2, at_least=2).tolist() == [1 / 6, 0.0, 0.0]
    assert avg_at_k([run, run]) == 3 / 12
    assert pass_scores([run, run], 2).shape == (2, 3)


def test_macro_gives_tasks_equal_weight():
    # The base row of the paper's main table.
    assert macro({"AIME24": 53.056, "AIME25": 34.907, "HMMT25": 27.870}) == pytest.approx(38.611, abs=5e-4)
    results = {"small": np.ones((1, 2, 4)), "large": np.zeros((1, 200, 4))}
    assert bootstrap(results, unit="sample").estimate == 0.5
    with pytest.raises(PastError, match="no task"):
        macro({})


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 2), (12, 4), (12, 12), (64, 10), (400, 200)])
def test_pass_at_k_against_scipy(n, k):
    run = np.tri(n + 1, n, -1, dtype=int)
    correct = np.arange(n + 1)
    assert run.sum(axis=1).tolist() == correct.tolist()
    closed = 1 - scipy.special.comb(n - correct, k) / scipy.special.comb(n, k)
    np.testing.assert_allclose(pass_scores(run, k), closed, rtol=0, atol=1e-12)
    for m in {1, (k + 1) // 2, k}:
        tail = scipy.stats.hypergeom.sf(m - 1, n, correct, k)
        np.testing.assert_allclose(pass_scores(run, k, at_least=m), tail, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("n", "k"), [(4, 1), (5, 3), (6, 6)])
def test_pass_at_k_counts_subsets(n, k):
    for row in itertools.product((0, 1), repeat=n):
        subsets = [any(chosen) for chosen in itertools.combinations(row, k)]
        assert pass_at_k([row], k) == sum(subsets) / len(subsets)


def test_pass_at_k_keeps_its_digits_where_the_binomials_overflow():
    run = np.zeros((1, 4000), dtype=int)
    run[0, 0] = 1
    # One correct of n: exactly k / n.
    assert pass_at_k(run, 2000) == 0.5
    assert pass_at_k(run, 1) == 1 / 4000
    assert not np.isfinite(scipy.special.comb(4000, 2000))


@pytest.mark.parametrize(("k", "at_least"), [(0, 1), (5, 1), (2, 0), (2, 3)])
def test_pass_at_k_refuses_what_cannot_be_drawn(k, at_least):
    with pytest.raises(PastError, match="pass_at_k"):
        pass_at_k([[0, 1, 0, 1]], k, at_least)


def test_majority_by_hand():
    verdicts = [[1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]]
    answers = [
        ["4", "5", "4", "6"],  # plurality, correct
        ["5", "4", "5", "4"],  # tie: 5 came first, wrong
        [None, None, "4", "4"],  # those without an answer do not vote
        [None, None, None, None],  # no vote is wrong
        ["5", "4", "5", "5"],  # majority, wrong
    ]
    assert majority_scores(verdicts, answers).tolist() == [1, 0, 1, 0, 0]
    assert majority_at_k(verdicts, answers) == 2 / 5
    assert majority_scores([verdicts], [answers]).shape == (1, 5)
    # The same tie the other way round: 4 came first.
    assert majority_at_k([[1, 0, 1, 0]], [["4", "5", "4", "5"]]) == 1


def test_majority_judges_an_answer_by_its_first_occurrence():
    assert majority_at_k([[0, 1, 1]], [["4", "4", "4"]]) == 0
    assert majority_at_k([[1, 0, 0]], [["4", "4", "4"]]) == 1


def test_majority_needs_one_answer_a_sample():
    with pytest.raises(PastError, match="one each"):
        majority_at_k([[1, 0]], [["4"]])
    with pytest.raises(PastError, match="one each"):
        majority_at_k([[1, 0], [1, 0]], [["4", "5"], ["4"]])


def load_cases() -> list:
    if not CASES.exists():
        return [pytest.param(None, id="missing")]
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.mark.parametrize("case", load_cases())
def test_public_cases(case):
    if case is None:
        pytest.skip(f"no metric cases at {CASES}")
    math_verify = pytest.importorskip("math_verify")
    gold = math_verify.parse(case["gold"])
    run = [[int(math_verify.verify(gold, math_verify.parse(response))) for response in case["responses"]]]
    k = case["params"]["k"]
    for name, expected in case["expected"].items():
        if case["metric"] == "avg_at_k_math":
            got = avg_at_k(run)
        elif case["metric"] == "pass_at_k_math":
            got = pass_at_k(run, k)
        elif name.startswith("mmath_g-pass"):
            got = 2 / k * sum(pass_at_k(run, k, at_least=i) for i in range(math.ceil(k / 2) + 1, k + 1))
        else:
            threshold = float(name.rpartition("_")[2])
            got = pass_at_k(run, k, at_least=max(1, math.ceil(threshold * k)))
        assert got == pytest.approx(expected, abs=case["tolerance"])


@pytest.mark.parametrize("unit", UNITS)
def test_intervals_are_a_function_of_the_seed_and_not_of_the_order_of_tasks(unit):
    a, b = result_set(1), result_set(2)
    one = paired_bootstrap(a, b, unit=unit, seed=5)
    assert paired_bootstrap(dict(reversed(a.items())), b, unit=unit, seed=5) == one
    other = paired_bootstrap(a, b, unit=unit, seed=6)
    assert other.estimate == one.estimate
    assert (other.low, other.high) != (one.low, one.high)
    assert (one.resamples, one.level, one.unit) == (10_000, 0.95, unit)


@pytest.mark.parametrize("unit", UNITS)
def test_a_difference_changes_sign_with_its_sides(unit):
    a, b = result_set(1, p=0.7), result_set(2)
    forward, backward = paired_bootstrap(a, b, unit=unit), paired_bootstrap(b, a, unit=unit)
    assert forward.estimate == -backward.estimate > 0
    assert forward.low < forward.estimate < forward.high
    # Two sets of 10,000 resamples: the ends agree up to their own noise.
    assert forward.low == pytest.approx(-backward.high, abs=0.01)
    assert forward.high == pytest.approx(-backward.low, abs=0.01)


@pytest.mark.parametrize("unit", UNITS)
def test_methods_with_equal_outcomes_differ_by_nothing_seen(unit):
    a = result_set(1)
    interval = paired_bootstrap(a, a, unit=unit)
    assert interval.estimate == 0
    # No pair differed; how many might is bounded by their number, task by task: 180 and 126 draws, 10 and 7 problems.
    sizes = (180, 126) if unit == "sample" else (10, 7)
    bound = math.hypot(*(wilson(0, n)[1] for n in sizes)) / 2
    assert (-interval.low, interval.high) == pytest.approx((bound, bound))


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (0, 12), (12, 12), (3, 12), (1, 1200), (600, 1200)])
def test_wilson_against_scipy(successes: int, n: int):
    reference = scipy.stats.binomtest(successes, n).proportion_ci(0.9, method="wilson")
    assert wilson(successes, n, 0.9) == pytest.approx((reference.low, reference.high), abs=1e-12)
    with pytest.raises(PastError, match="impossible"):
        wilson(n + 1, n)


def test_what_never_happened_is_not_impossible():
    """0 of 12 has Wilson's interval, whoever makes it; so has 12 of 12, and the two sides of a difference."""
    none, all_ = {"t": np.zeros((1, 1, 12))}, {"t": np.ones((1, 1, 12))}
    bound = wilson(0, 12)[1]
    assert bound == pytest.approx(0.2425, abs=5e-5)
    nothing = bootstrap(none)
    assert (nothing.estimate, nothing.low, nothing.high) == pytest.approx((0, 0, bound))
    everything = bootstrap(all_)
    assert (everything.estimate, everything.low, everything.high) == pytest.approx((1, 1 - bound, 1))
    # Newcombe's interval of 12 of 12 minus 0 of 12.
    gap = paired_bootstrap(all_, none)
    assert (gap.estimate, gap.low, gap.high) == pytest.approx((1, 1 - math.sqrt(2) * bound, 1))
    tie = paired_bootstrap(none, none)
    assert (tie.low, tie.high) == pytest.approx((-bound, bound))


def test_the_edge_over_problems_and_tasks():
    """Half of the problems always right and half never: nothing to resample, and an interval all the same."""
    mixed = np.zeros((1, 10, 12))
    mixed[:, :5] = 1
    found = bootstrap({"t": mixed})
    bound = wilson(0, 60)[1] / 2
    assert (found.estimate, found.low, found.high) == pytest.approx((0.5, 0.5 - bound, 0.5 + bound))
    # Tasks are independent: three that never succeed leave less room than one, but more than one of thrice the size.
    one, three = bootstrap({"a": mixed[:, 5:]}), bootstrap(dict.fromkeys("abc", mixed[:, 5:]))
    assert wilson(0, 180)[1] < three.high < one.high
    # One success does not close the interval again.
    rare = np.zeros((1, 100, 12))
    rare[0, 0, 0] = 1
    assert bootstrap({"t": rare}).high > wilson(0, 1200)[1]
    # Over other problems the number of problems counts, not that of draws.
    over = bootstrap({"t": np.zeros((3, 20, 12))}, unit="problem")
    assert (over.low, over.high) == pytest.approx((0, wilson(0, 20)[1]))


def test_scores_of_a_known_range_get_the_edge_too():
    same = {"t": np.zeros((1, 8))}
    assert bootstrap_scores(same).high == 0
    assert bootstrap_scores(same, bounds=(0, 1)).high == pytest.approx(wilson(0, 8)[1])
    with pytest.raises(PastError, match="outside of the bounds"):
        bootstrap_scores({"t": np.full((1, 8), 2.0)}, bounds=(0, 1))


@pytest.mark.parametrize("unit", UNITS)
def test_ordinary_results_keep_the_plain_percentile_interval(unit):
    a, b = result_set(1, ((3, 40, 12), (3, 30, 12)), 0.6), result_set(2, ((3, 40, 12), (3, 30, 12)), 0.4)
    rng = np.random.default_rng(derive_seed(0, "bootstrap"))
    values = {task: a[task] - b[task] for task in a}
    if unit == "sample":
        replicates = _resample_draws(values, 10_000, rng)
    else:
        scores = {task: value.mean(axis=2) for task, value in values.items()}
        replicates = _resample_problems(scores, 10_000, rng, seeds=unit == "problem+seed")
    found = paired_bootstrap(a, b, unit=unit)
    assert (found.low, found.high) == pytest.approx(np.quantile(replicates, [0.025, 0.975]), rel=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.02, 0.1, 0.5])
def test_the_interval_covers_small_rates(p: float):
    """One problem, 12 draws, a known rate: the truth lies inside as often as the binomial distribution says."""
    inside = [
        found.low - 1e-12 <= p <= found.high
        for c in range(13)
        for found in [bootstrap({"t": np.array([[[1] * c + [0] * (12 - c)]])})]
    ]
    covered = sum(scipy.stats.binom.pmf(c, 12, p) for c in range(13) if inside[c])
    assert covered > 0.85


def test_pairing_follows_the_draw_and_the_problem():
    # The same 6 of 12 draws succeed in both methods: paired none of 48 differs, shifted by one all do.
    a = {"t": np.tile([0, 1], (1, 4, 6))}
    b = {"t": np.tile([1, 0], (1, 4, 6))}
    assert paired_bootstrap(a, a).high == pytest.approx(wilson(0, 48)[1], rel=1e-12)
    assert paired_bootstrap(a, b).high > 0.2
    # Every problem gains exactly 1/12 although problems differ widely: other problems would gain as much.
    ladder = np.tri(11, 12, -1, dtype=int)[None]
    better = np.tri(11, 12, 0, dtype=int)[None]
    problems, bound = {"t": better.mean(axis=2)}, wilson(0, 11)[1]
    assert _resample_problems({"t": problems["t"] - ladder.mean(axis=2)}, 100, np.random.default_rng(0), False) == (
        pytest.approx(np.full(100, 1 / 12))
    )
    # ... as far as 11 problems can tell: an unseen one in four might gain everything.
    interval = paired_bootstrap({"t": better}, {"t": ladder}, unit="problem")
    assert interval.high == pytest.approx(1 / 12 + bound * 11 / 12)


def test_sample_unit_against_scipy_on_one_stratum():
    rng = np.random.default_rng(3)
    a, b = outcomes(rng, 40, p=0.6), outcomes(rng, 40, p=0.4)
    ours = paired_bootstrap({"t": a[None, None]}, {"t": b[None, None]}, resamples=40_000)
    theirs = scipy.stats.bootstrap(
        (a, b),
        lambda x, y, axis: (x - y).mean(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=40_000,
        rng=np.random.default_rng(4),
    ).confidence_interval
    # Means lie on a grid of 1/40; two runs may settle on neighbouring points.
    assert ours.estimate == (a - b).mean()
    assert ours.low == pytest.approx(theirs.low, abs=1 / 40 + 1e-12)
    assert ours.high == pytest.approx(theirs.high, abs=1 / 40 + 1e-12)


def test_problem_unit_against_scipy_on_one_task():
    rng = np.random.default_rng(3)
    scores = rng.random((1, 60))
    ours = bootstrap_scores({"t": scores}, resamples=40_000)
    theirs = scipy.stats.bootstrap(
        (scores[0],), np.mean, method="percentile", n_resamples=40_000, rng=np.random.default_rng(4)
    ).confidence_interval
    # The sampling error of an estimated 2.5 % point of a normal: sqrt(q (1 - q) / n) / density, both runs.
    noise = scores.std() / math.sqrt(60) * math.sqrt(2 * 0.025 * 0.975 / 40_000) / scipy.stats.norm.pdf(1.96)
    assert ours.low == pytest.approx(theirs.low, abs=5 * noise)
    assert ours.high == pytest.approx(theirs.high, abs=5 * noise)


def test_resampled_draws_have_the_exact_distribution():
    values = np.array([[[-1, 0, 1, 1]], [[0, 0, 1, 0]]])
    k, resamples = 4, 60_000
    counts: dict[int, int] = {}
    for picks in itertools.product(itertools.product(range(k), repeat=k), repeat=2):
        total = sum(int(values[s, 0, i]) for s in range(2) for i in picks[s])
        counts[total] = counts.get(total, 0) + 1
    drawn = _resample_draws({"t": values}, resamples, np.random.default_rng(8))
    support = sorted(counts)
    expected = np.array([counts[t] for t in support]) / k ** (2 * k) * resamples
    observed = np.array([np.isclose(drawn * values.size, t).sum() for t in support])
    assert observed.sum() == resamples
    assert expected.min() > 5, "chi-square needs some expected mass in each cell"
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-4


def by_index(values: dict[str, np.ndarray], resamples: int, rng: np.random.Generator) -> np.ndarray:
    """The stratified bootstrap written out: pick k of k draws in each stratum, average, repeat."""
    means = []
    for _ in range(resamples):
        tasks = []
        for array in values.values():
            picks = rng.integers(array.shape[2], size=array.shape)
            tasks.append(np.take_along_axis(array, picks, axis=2).mean())
        means.append(np.mean(tasks))
    return np.array(means)


def test_resampled_draws_agree_with_resampling_indices():
    a, b = result_set(11, ((3, 20, 12), (2, 9, 5)), p=0.6), result_set(12, ((3, 20, 12), (2, 9, 5)))
    values = {task: a[task] - b[task] for task in a}
    fast = _resample_draws(values, 20_000, np.random.default_rng(0))
    slow = by_index(values, 4_000, np.random.default_rng(1))
    assert scipy.stats.ks_2samp(fast, slow).pvalue > 1e-3  # pyright: ignore[reportAttributeAccessIssue]
    tasks = [v.var(axis=2).sum() / v.shape[2] / (v.shape[0] * v.shape[1]) ** 2 for v in values.values()]
    variance = float(sum(tasks)) / len(tasks) ** 2
    assert_variance(fast, variance)
    assert fast.mean() == pytest.approx(np.mean([v.mean() for v in values.values()]), abs=5 * math.sqrt(variance / 2e4))


def assert_variance(replicates: np.ndarray, variance: float) -> None:
    """The sample variance of n near-normal replicates has the standard error variance * sqrt(2 / n)."""
    assert replicates.var() == pytest.approx(variance, rel=5 * math.sqrt(2 / len(replicates)))


def multinomial_second_moment(n: int) -> np.ndarray:
    """E[w w^T] of the counts of n picks among n."""
    return np.eye(n) - 1 / n + np.ones((n, n))


@pytest.mark.parametrize("seeds", [False, True])
def test_resampled_problems_have_the_exact_variance(seeds):
    rng = np.random.default_rng(21)
    scores = {"a": rng.random((3, 15)), "b": rng.random((3, 8)) + np.array([[0.0], [0.3], [0.6]])}
    drawn = _resample_problems(scores, 40_000, np.random.default_rng(5), seeds=seeds)
    first = np.ones((3, 3))
    shared = multinomial_second_moment(3) if seeds else first
    # E[(w' X v)^2] within a task; between tasks the seeds are shared and the problems are not.
    second = 0.0
    for one, x in scores.items():
        for other, y in scores.items():
            n = x.shape[1]
            moment = multinomial_second_moment(n) if one == other else np.ones((n, y.shape[1]))
            second += np.einsum("sp,tq,st,pq->", x / x.size, y / y.size, shared, moment)
    mean = sum(x.mean() for x in scores.values())
    assert_variance(drawn, (second - mean**2) / 4)
    assert drawn.mean() == pytest.approx(mean / 2, abs=5 * math.sqrt((second - mean**2) / 4 / 40_000))


def test_chunks_do_not_show(monkeypatch):
    a, b = result_set(1), result_set(2)
    whole = paired_bootstrap(a, b, unit="problem")
    monkeypatch.setattr("past_opsd.core.stats._CHUNK", 64)
    assert paired_bootstrap(a, b, unit="problem") == whole
    seeded = paired_bootstrap(a, b, unit="problem+seed")
    monkeypatch.undo()
    assert paired_bootstrap(a, b, unit="problem+seed") == seeded


def test_units_widen_as_they_generalise():
    rng = np.random.default_rng(9)
    gain = rng.normal(0.1, 0.2, size=(1, 40, 1)) + np.array([-0.15, 0.0, 0.15]).reshape(3, 1, 1)
    base = rng.uniform(0.3, 0.6, size=(1, 40, 1))
    a = {"t": (rng.random((3, 40, 12)) < base + gain).astype(int)}
    b = {"t": (rng.random((3, 40, 12)) < base).astype(int)}
    widths = [i.high - i.low for i in (paired_bootstrap(a, b, unit=unit) for unit in UNITS)]
    assert widths[0] * 1.2 < widths[1]
    assert widths[1] * 1.2 < widths[2]


def covered(unit: Unit, k: int, new_problems: bool, trials: int, seed: int) -> int:
    """How often a 95 % interval of a difference holds the truth, for problems given or newly drawn."""
    rng = np.random.default_rng(seed)
    hits = 0
    for trial in range(trials):
        tasks = ("t", "u")
        base = {t: rng.uniform(0.25, 0.75, size=(1, 40, 1)) for t in tasks}
        gain = {t: rng.normal(0.05, 0.20, size=(1, 40, 1)).clip(-0.4, 0.5) for t in tasks}
        a = {t: (rng.random((2, 40, k)) < base[t] + gain[t] / 2).astype(int) for t in tasks}
        b = {t: (rng.random((2, 40, k)) < base[t] - gain[t] / 2).astype(int) for t in tasks}
        truth = 0.05 if new_problems else float(np.mean([gain[t].mean() for t in tasks]))
        interval = paired_bootstrap(a, b, unit=unit, resamples=1_000, seed=trial)
        hits += interval.low <= truth <= interval.high
    return hits


@pytest.mark.parametrize("k", [3, 6])
@pytest.mark.slow
def test_sample_intervals_cover_the_given_problems(k):
    trials = 300
    hits = covered("sample", k, new_problems=False, trials=trials, seed=100 + k)
    # Resampling k draws has (k - 1) / k of their variance: the nominal 95 % becomes this.
    nominal = 1 - 2 * scipy.stats.norm.sf(1.96 * math.sqrt((k - 1) / k))
    assert nominal == pytest.approx({3: 0.890, 6: 0.926}[k], abs=1e-3)
    # Two points for the lattice and the 1,000 resamples, then the binomial's own spread.
    assert scipy.stats.binom.ppf(1e-4, trials, nominal - 0.02) <= hits
    assert hits <= scipy.stats.binom.ppf(1 - 1e-4, trials, min(1, nominal + 0.02))


@pytest.mark.slow
def test_problem_intervals_cover_new_problems_and_sample_intervals_do_not():
    trials = 300
    hits = covered("problem", 6, new_problems=True, trials=trials, seed=7)
    assert scipy.stats.binom.ppf(1e-4, trials, 0.92) <= hits <= scipy.stats.binom.ppf(1 - 1e-4, trials, 0.97)
    narrow = covered("sample", 6, new_problems=True, trials=trials, seed=7)
    assert narrow < scipy.stats.binom.ppf(1e-4, trials, 0.92)


def test_level_and_resamples():
    a = result_set(1)
    wide, narrow = bootstrap(a, level=0.99), bootstrap(a, level=0.5)
    assert wide.low < narrow.low < narrow.high < wide.high
    with pytest.raises(PastError, match="too few"):
        bootstrap(a, resamples=39)
    assert bootstrap(a, resamples=40).resamples == 40
    for level in (0.0, 1.0, 95):
        with pytest.raises(PastError, match="level"):
            bootstrap(a, level=level)
    with pytest.raises(PastError, match="unknown unit 'seed'"):
        bootstrap(a, unit="seed")  # pyright: ignore[reportArgumentType]


def test_single_interval_is_the_difference_to_nothing():
    a = result_set(1)
    nothing = {task: np.zeros_like(array) for task, array in a.items()}
    for unit in UNITS:
        assert bootstrap(a, unit=unit, seed=3) == paired_bootstrap(a, nothing, unit=unit, seed=3)


def test_scores_give_the_interval_of_the_samples_behind_them():
    a = result_set(1)
    rates = {task: array.mean(axis=2) for task, array in a.items()}
    assert bootstrap_scores(rates, seed=2) == bootstrap(a, unit="problem", seed=2)
    gains = {task: pass_scores(a[task], 4) - pass_scores(b, 4) for task, b in result_set(2).items()}
    interval = bootstrap_scores(gains, unit="problem+seed")
    assert interval.low < interval.estimate < interval.high


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[0, 2]], "0 or 1"),
        ([[0.5, 1.0]], "0 or 1"),
        ([[float("nan"), 1.0]], "0 or 1"),
        ([[0, -1]], "0 or 1"),
        ([0, 1], "shape"),
        ([[[[0, 1]]]], "shape"),
        ([], "shape"),
        ([[], []], "empty"),
        ([[0, 1], [0]], "same number"),
        ([["0", "1"]], "numbers"),
    ],
)
def test_outcomes_that_are_none_are_refused(values, message):
    with pytest.raises(PastError, match=message):
        avg_at_k(values)


def test_result_sets_that_do_not_match_are_refused():
    a = result_set(1)
    with pytest.raises(PastError, match="no task"):
        bootstrap({})
    with pytest.raises(PastError, match="like with like"):
        paired_bootstrap(a, {"task0": a["task0"]})
    for axis in range(3):
        short = a | {"task1": np.delete(a["task1"], 0, axis=axis)}
        with pytest.raises(PastError, match=r"'task1' is \(3, 7, 6\)"):
            paired_bootstrap(a, short)
    with pytest.raises(PastError, match=r"results\['t'\].*seeds, problems, k"):
        bootstrap({"t": [[0, 1]]})
    with pytest.raises(PastError, match=r"a\['t'\]: empty"):
        paired_bootstrap({"t": np.zeros((3, 0, 12))}, {"t": np.zeros((3, 0, 12))})


def test_intervals_that_could_have_no_width_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(PastError, match="one sample"):
        bootstrap({"t": outcomes(rng, 3, 5, 1)}, unit="sample")
    with pytest.raises(PastError, match="one problem"):
        bootstrap({"t": outcomes(rng, 3, 1, 5)}, unit="problem")
    with pytest.raises(PastError, match="two seeds"):
        bootstrap({"t": outcomes(rng, 1, 5, 5)}, unit="problem+seed")
    with pytest.raises(PastError, match="same seeds"):
        bootstrap(result_set(0, ((3, 5, 5), (2, 5, 5))), unit="problem+seed")
    bootstrap({"t": outcomes(rng, 1, 5, 1)}, unit="problem")


def test_scores_are_checked():
    with pytest.raises(PastError, match="not known"):
        bootstrap_scores({"t": [[0.5, 0.1]]}, unit="sample")
    with pytest.raises(PastError, match="finite"):
        bootstrap_scores({"t": [[0.5, float("inf")]]})
    with pytest.raises(PastError, match="no task"):
        bootstrap_scores({})
    with pytest.raises(PastError, match=r"\[seeds, problems\]"):
        bootstrap_scores({"t": [0.5, 0.1]})


@property_test
@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_pass_at_k_runs_from_the_mean_to_any(n, problems, random):
    run = np.array([[random.randint(0, 1) for _ in range(n)] for _ in range(problems)])
    curve = [pass_at_k(run, k) for k in range(1, n + 1)]
    assert curve[0] == pytest.approx(avg_at_k(run), abs=1e-15)
    assert curve[-1] == pytest.approx(run.any(axis=1).mean(), abs=1e-15)
    assert all(x <= y + 1e-15 for x, y in itertools.pairwise(curve))


@property_test
@given(st.integers(0, 10**6), st.sampled_from(UNITS))
def test_an_interval_stays_in_range_and_bools_are_outcomes(seed, unit):
    a, b = result_set(seed, ((2, 3, 4),)), result_set(seed + 1, ((2, 3, 4),))
    interval = paired_bootstrap(a, b, unit=unit, resamples=200)
    assert -1 <= interval.low <= interval.high <= 1
    truth = {task: array.astype(bool) for task, array in a.items()}
    assert paired_bootstrap(truth, b, unit=unit, resamples=200) == interval
