"""Intervals against scipy, enumeration, and survival curves worked out by hand."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from emergent_heads.statistics import (
    bootstrap_mean,
    bootstrap_mean_rank_correlation,
    bootstrap_means,
    bootstrap_median,
    bootstrap_rank_correlation,
    censored_median,
    holm_p,
    log_rank_p,
    restricted_mean,
    restricted_mean_difference,
    share_interval,
)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_share_interval_is_clopper_pearson(level):
    tail = (1 - level) / 2
    for n in (1, 2, 7, 32):
        for k in range(n + 1):
            share = share_interval(k, n, level)
            assert share.value == k / n
            assert share.low == pytest.approx(stats.beta.ppf(tail, k, n - k + 1) if k else 0.0)
            assert share.high == pytest.approx(stats.beta.ppf(1 - tail, k + 1, n - k) if k < n else 1.0)


def test_share_of_nothing_is_unknown():
    assert np.isnan(share_interval(0, 0)).all()


def test_bootstrap_interval_is_that_of_all_resamples():
    values = np.array([0.0, 1.0, 5.0, 6.0])
    means = [np.mean(draw) for draw in itertools.product(values, repeat=4)]
    mean, low, high = bootstrap_means(values, seed=3, n_resamples=200_000)
    assert mean == 3.0
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.02)


def test_bootstrap_agrees_with_scipy():
    values = np.random.default_rng(0).beta(0.5, 2, size=40)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, random_state=0)
    ours = bootstrap_mean(values, seed=0)
    assert ours.value == pytest.approx(values.mean())
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.01)


def test_bootstrap_rows_share_their_draws_and_repeat():
    values = np.random.default_rng(1).normal(size=(3, 10))
    mean, low, high = bootstrap_means(np.stack([values, values + 2]), seed=5)
    assert mean.shape == low.shape == high.shape == (2, 3)
    np.testing.assert_allclose(low[1] - low[0], 2)
    np.testing.assert_array_equal(bootstrap_means(values, seed=5)[1], low[0])
    assert (bootstrap_means(values, seed=6)[1] != low[0]).any()


def test_bootstrap_of_one_value_has_no_interval():
    one = bootstrap_mean(np.array([0.25]), seed=0)
    assert one.value == 0.25
    assert np.isnan([one.low, one.high]).all()


def kaplan_meier(times, censored):
    """Survival after each time at which something happened, by the product over the runs still at risk."""
    curve, survival = [], 1.0
    for time in sorted({t for t, c in zip(times, censored, strict=True) if not c}):
        at_risk = sum(t >= time for t in times)
        events = sum(t == time and not c for t, c in zip(times, censored, strict=True))
        survival *= 1 - events / at_risk
        curve.append((time, survival))
    return curve


def area(curve, horizon):
    """Area under a step curve that starts at 1, summed in narrow slices' exact breakpoints."""
    total, height, since = 0.0, 1.0, 0.0
    for time, survival in [*curve, (horizon, 0.0)]:
        until = min(time, horizon)
        total, height, since = total + height * (until - since), survival, until
    return total


def samples():
    """Every censoring of a few small sets of times, ties included."""
    for times in ([4.0], [2.0, 5.0], [1.0, 1.0, 3.0], [1.0, 2.0, 2.0, 7.0, 9.0], [3.0, 3.0, 3.0, 3.0, 8.0, 8.0]):
        for censored in itertools.product([False, True], repeat=len(times)):
            yield times, list(censored)


def test_restricted_mean_is_the_area_under_kaplan_meier():
    for times, censored in samples():
        for horizon in (2.5, 9.0, 12.0):
            ours = restricted_mean(times, censored, horizon, seed=0, n_resamples=10)
            assert ours.value == pytest.approx(area(kaplan_meier(times, censored), horizon)), (times, censored)


def test_restricted_mean_by_hand():
    # Runs at 1, 2 (censored), 3, 5 (censored at the end): survival is 3/4 from 1 and 3/8 from 3.
    ours = restricted_mean([1, 2, 3, 5], [False, True, False, True], 5, seed=0)
    assert ours.value == pytest.approx(1 + 2 * 3 / 4 + 2 * 3 / 8)


def test_restricted_mean_counts_never_as_the_last_step():
    # The ten 14M runs read off the paper's figure: six points of emergence, four never; it draws a mean of 77.8k.
    times = [2500, 3500, 7500, 13_500, 66_500, 112_500] + 4 * [143_000]
    ours = restricted_mean(times, [False] * 6 + [True] * 4, 143_000, seed=0)
    assert ours.value == pytest.approx(77_800)
    assert ours.low < ours.value < ours.high


def test_restricted_mean_interval_is_the_bootstrap_of_the_mean_without_early_censoring():
    times = np.array([1.0, 2.0, 4.0, 8.0, 9.0, 10.0])
    ours = restricted_mean(times, times == 10, 10, seed=0, n_resamples=50_000)
    theirs = stats.bootstrap((times,), np.mean, method="percentile", n_resamples=50_000, random_state=0)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.1)


def test_restricted_mean_interval_resamples_runs_with_their_censoring():
    times, censored, horizon = [1.0, 2.0, 4.0], [False, True, False], 5.0
    every = [
        area(kaplan_meier([times[i] for i in draw], [censored[i] for i in draw]), horizon)
        for draw in itertools.product(range(3), repeat=3)
    ]
    ours = restricted_mean(times, censored, horizon, seed=0, level=0.6, n_resamples=20_000)
    assert (ours.low, ours.high) == pytest.approx(tuple(np.quantile(every, [0.2, 0.8])), abs=0.05)


def test_restricted_mean_of_few_runs():
    assert np.isnan(restricted_mean([], [], 5, seed=0)).all()
    one = restricted_mean([3.0], [False], 5, seed=0)
    assert one.value == 3
    assert np.isnan([one.low, one.high]).all()


def test_median_is_where_kaplan_meier_falls_to_one_half():
    for times, censored in samples():
        below = [time for time, survival in kaplan_meier(times, censored) if survival <= 0.5 + 1e-12]
        assert censored_median(times, censored).value == (below[0] if below else np.inf), (times, censored)


def test_median_is_not_moved_by_rounding():
    random = np.random.default_rng(0)
    for _ in range(300):
        n = int(random.integers(9, 30))
        censored = random.random(n) < 0.3
        survival, median = Fraction(1), np.inf
        for place in range(n):
            survival *= 1 if censored[place] else 1 - Fraction(1, n - place)
            if survival <= Fraction(1, 2):
                median = place + 1
                break
        assert censored_median(np.arange(1.0, n + 1), censored).value == median
    twelve_of_24 = np.arange(24) >= 12
    assert censored_median(np.arange(1.0, 25), twelve_of_24).value == 12


def test_median_interval_by_hand():
    # Ten events at 1 to 10. Log-log Greenwood band at survival s after k of n events, without censoring:
    # s ** exp(+-z * sqrt((1 - s) / (n s)) / log s).
    n, z = 10, stats.norm.ppf(0.975)
    s = 1 - np.arange(1, n) / n
    width = z * np.sqrt((1 - s) / (n * s)) / np.log(s)
    lower, upper = s ** np.exp(-width), s ** np.exp(width)
    ours = censored_median(np.arange(1.0, n + 1), np.zeros(n, bool))
    assert ours.value == 5
    assert ours.low == 1 + np.nonzero(lower <= 0.5)[0][0]
    assert ours.high == 1 + np.nonzero(upper <= 0.5)[0][0]
    assert ours.low < ours.value < ours.high


def test_median_interval_holds_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        times, limit = random.exponential(1 / np.log(2), 25), 2.0  # true median 1
        found = censored_median(np.minimum(times, limit), times > limit)
        hits += found.low <= 1 <= found.high
    assert 0.90 <= hits / 300 <= 0.99


def test_median_when_most_never_got_there():
    most = censored_median([1.0, 5.0, 5.0, 5.0], [False, True, True, True])
    assert most.value == most.high == np.inf
    none = censored_median([5.0, 5.0], [True, True])
    assert none.value == none.high == np.inf
    assert np.isnan(none.low)
    assert np.isnan(censored_median([], [])).all()


def test_median_of_a_single_run_has_no_lower_end():
    one = censored_median([4.0], [False])
    assert one.value == 4
    assert np.isnan(one.low)
    assert one.high == np.inf


def test_bootstrap_median_agrees_with_scipy():
    values = np.random.default_rng(2).lognormal(size=31)
    theirs = stats.bootstrap((values,), np.median, method="percentile", n_resamples=20_000, random_state=0)
    ours = bootstrap_median(values, seed=0, n_resamples=20_000)
    assert ours.value == np.median(values)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), rel=0.05)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_bootstrap_median_of_few_values_reaches_from_the_least_to_the_greatest(n):
    values = np.random.default_rng(n).normal(size=n)
    ours = bootstrap_median(values, seed=0)
    assert ours == (np.median(values), values.min(), values.max())


def test_bootstrap_median_takes_infinite_values():
    assert bootstrap_median([1.0, 2.0, 3.0, np.inf, np.inf], seed=0) == (3, 1, np.inf)
    assert bootstrap_median([1.0, 2.0, np.inf, np.inf], seed=0) == (np.inf, 1, np.inf)
    assert bootstrap_median([-np.inf, 2.0, 3.0], seed=0) == (2, -np.inf, 3)


def test_bootstrap_median_of_one_or_no_value_has_no_interval():
    one = bootstrap_median([4.0], seed=0)
    assert one.value == 4
    assert np.isnan([one.low, one.high]).all()
    assert np.isnan(bootstrap_median([], seed=0)).all()


@pytest.mark.parametrize("ties", [False, True])
def test_bootstrap_rank_correlation_agrees_with_scipy(ties):
    random = np.random.default_rng(5)
    x = random.normal(size=25)
    y = x + random.normal(size=25)
    x, y = (np.round(x), np.round(y)) if ties else (x, y)
    theirs = stats.bootstrap(
        (x, y),
        lambda a, b: stats.spearmanr(a, b).statistic,
        paired=True,
        vectorized=False,
        method="percentile",
        n_resamples=1000,
        random_state=0,
    ).confidence_interval
    ours = bootstrap_rank_correlation(x, y, seed=0)
    assert ours.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.05)


def test_bootstrap_rank_correlation_looks_at_the_order_alone():
    x, y = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([3.0, 1.0, 4.0, 5.0, 9.0])
    plain = bootstrap_rank_correlation(x, y, seed=0)
    assert bootstrap_rank_correlation(np.exp(x), y**3, seed=0) == plain
    assert bootstrap_rank_correlation([1.0, 2.0, 3.0, 4.0, np.inf], y, seed=0) == plain


def test_bootstrap_rank_correlation_of_constants_is_unknown():
    assert np.isnan(bootstrap_rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], seed=0)).all()
    assert np.isnan(bootstrap_rank_correlation([1.0], [1.0], seed=0)).all()
    assert np.isnan(bootstrap_rank_correlation([], [], seed=0)).all()


def test_mean_rank_correlation_over_groups():
    random = np.random.default_rng(7)
    groups = [(np.arange(n, dtype=float), np.arange(n) + 3 * random.normal(size=n)) for n in (6, 9, 12)]
    ours = bootstrap_mean_rank_correlation(groups, seed=0)
    assert ours.value == pytest.approx(np.mean([stats.spearmanr(*group).statistic for group in groups]))
    assert ours.low < ours.value < ours.high <= 1
    assert bootstrap_mean_rank_correlation([(x, -y) for x, y in groups], seed=0) == pytest.approx(
        (-ours.value, -ours.high, -ours.low)
    )
    assert np.isnan(bootstrap_mean_rank_correlation([], seed=0)).all()


def test_mean_rank_correlation_of_one_group_is_the_bootstrap_over_its_items():
    random = np.random.default_rng(8)
    x, y = np.arange(20.0), np.arange(20) + 8 * random.normal(size=20)
    ours = bootstrap_mean_rank_correlation([(x, y)], seed=0, n_resamples=5000)
    theirs = bootstrap_rank_correlation(x, y, seed=1, n_resamples=5000)
    assert tuple(ours) == pytest.approx(tuple(theirs), abs=0.03)


def test_mean_rank_correlation_counts_no_order_as_0():
    x, same = np.arange(5.0), np.ones(5)
    assert bootstrap_mean_rank_correlation([(x, same)], seed=0) == (0, 0, 0)
    assert bootstrap_mean_rank_correlation([(x, x), (x, same)], seed=0).value == pytest.approx(0.5)


def test_mean_rank_correlation_seldom_sees_an_order_where_there_is_none():
    random, seen = np.random.default_rng(9), 0
    for trial in range(100):
        groups = [(np.arange(8.0), random.normal(size=8)) for _ in range(3)]
        found = bootstrap_mean_rank_correlation(groups, seed=trial, n_resamples=300)
        seen += found.low > 0 or found.high < 0
    assert seen <= 8


def test_log_rank_of_a_published_table():
    """Remission of leukaemia under 6-MP against placebo (Freireich et al. 1963): chi-square 16.79 in the textbooks."""
    drug = [6, 6, 6, 7, 10, 13, 16, 22, 23, 6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    placebo = [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]
    p = log_rank_p((drug, [False] * 9 + [True] * 12), (placebo, [False] * 21))
    assert p == pytest.approx(stats.chi2.sf(16.79, df=1), rel=2e-3)
    assert log_rank_p((placebo, [False] * 21), (placebo, [False] * 21)) == pytest.approx(1.0)


def test_log_rank_is_unknown_where_nothing_happened():
    never = ([10, 10], [True, True])
    assert np.isnan(log_rank_p(never, never))
    assert np.isnan(log_rank_p(([], []), never))
    assert 0 < log_rank_p(([3, 4], [False, False]), never) < 0.1


def test_difference_of_restricted_means_is_that_of_plain_means_without_censoring():
    first, second = np.array([1.0, 2.0, 6.0]), np.array([4.0, 5.0, 9.0, 10.0])
    none = [np.zeros(3, bool), np.zeros(4, bool)]
    ours = restricted_mean_difference((first, none[0]), (second, none[1]), 100, seed=0, n_resamples=100_000)
    draws = [[np.mean(draw) for draw in itertools.product(values, repeat=len(values))] for values in (first, second)]
    differences = np.subtract.outer(*draws).ravel()
    assert ours.value == pytest.approx(first.mean() - second.mean())
    assert ours[1:] == pytest.approx(np.quantile(differences, [0.025, 0.975]), abs=0.05)


def test_difference_of_restricted_means_counts_never_as_the_horizon():
    ours = restricted_mean_difference(([5, 20], [False, True]), ([20, 20], [True, True]), 20, seed=0)
    assert ours.value == -7.5
    assert ours.low == -15
    assert ours.high == 0
    assert np.isnan(restricted_mean_difference(([], []), ([20, 20], [True, True]), 20, seed=0)).all()
    assert np.isnan(restricted_mean_difference(([3], [False]), ([20, 20], [True, True]), 20, seed=0)[1:]).all()


def test_holm_by_hand():
    assert holm_p([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_p([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm_p([]).size == 0
