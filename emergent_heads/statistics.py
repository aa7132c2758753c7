"""Intervals for what the library reports: shares, means over prompts or runs, and times that may be censored.

Every function works on plain arrays and knows nothing of models. Intervals are two-sided at `level`.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from emergent_heads.randomness import numpy_generator


class Interval(NamedTuple):
    """Estimate with the ends of its interval, all in the unit of the data."""

    value: float
    low: float
    high: float


def share_interval(successes: int, n: int, level: float = 0.95) -> Interval:
    """Share `successes / n` with its exact (Clopper-Pearson) interval; NaN throughout when `n` is 0."""
    if n == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    bounds = stats.binomtest(successes, n).proportion_ci(confidence_level=level, method="exact")
    return Interval(successes / n, float(bounds.low), float(bounds.high))


def bootstrap_means(
    values: Float[np.ndarray, "*rows n"], *, seed: int, level: float = 0.95, n_resamples: int = 2000
) -> tuple[Float[np.ndarray, "*rows"], Float[np.ndarray, "*rows"], Float[np.ndarray, "*rows"]]:
    """Mean over the last axis with a percentile bootstrap interval: `(mean, low, high)`.

    All rows are resampled with the same draws, as prompts are shared by all heads. With fewer than two values per
    row there is nothing to resample and the interval is NaN.
    """
    values = np.asarray(values, dtype=np.float64)
    mean = values.mean(axis=-1)
    n = values.shape[-1]
    if n < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    # The mean of a resample is a weighted mean: multinomial counts times values is one matrix product for all rows.
    counts = numpy_generator(seed, "bootstrap", n).multinomial(n, np.full(n, 1 / n), size=n_resamples)
    resampled = values @ (counts.T / n)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2], axis=-1)
    return mean, low, high


def bootstrap_mean(values: Float[np.ndarray, " n"], *, seed: int, level: float = 0.95) -> Interval:
    """Mean of one sample with its percentile bootstrap interval."""
    mean, low, high = bootstrap_means(np.asarray(values)[None], seed=seed, level=level)
    return Interval(float(mean[0]), float(low[0]), float(high[0]))


def bootstrap_ratio(
    numerator: Float[np.ndarray, " n"],
    denominator: Float[np.ndarray, " n"],
    *,
    seed: int,
    level: float = 0.95,
    n_resamples: int = 2000,
) -> Interval:
    """Ratio of two means over the same items, with a percentile bootstrap interval over the items.

    NaN where the denominator's mean is 0; resamples in which it is are left out of the interval.
    """
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    n, nan = len(numerator), float("nan")
    if n == 0 or denominator.mean() == 0:
        return Interval(nan, nan, nan)
    value = float(numerator.mean() / denominator.mean())
    if n < 2:
        return Interval(value, nan, nan)
    counts = numpy_generator(seed, "bootstrap", n).multinomial(n, np.full(n, 1 / n), size=n_resamples)
    above, below = counts @ numerator, counts @ denominator
    low, high = np.quantile(above[below != 0] / below[below != 0], [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def bootstrap_median(
    values: Float[np.ndarray, " n"], *, seed: int, level: float = 0.95, n_resamples: int = 2000
) -> Interval:
    """Median of one sample with its percentile bootstrap interval.

    Values may be infinite in one direction, as a time is that never came: an end that falls among them is infinite.
    Of up to five values the 95 % interval reaches from the least to the greatest. With fewer than two values there is
    nothing to resample and the interval is NaN.
    """
    values, nan = np.asarray(values, np.float64), float("nan")
    n = values.size
    if n == 0:
        return Interval(nan, nan, nan)
    if n < 2:
        return Interval(float(values[0]), nan, nan)
    draws = numpy_generator(seed, "bootstrap median", n).integers(n, size=(n_resamples, n))
    medians = np.sort(np.median(values[draws], axis=1))
    # No interpolation between the resamples: it has no meaning where one of two is infinite.
    low = medians[int(np.floor((1 - level) / 2 * (n_resamples - 1)))]
    high = medians[int(np.ceil((1 + level) / 2 * (n_resamples - 1)))]
    return Interval(float(np.median(values)), float(low), float(high))


def bootstrap_rank_correlation(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    *,
    seed: int,
    level: float = 0.95,
    n_resamples: int = 2000,
) -> Interval:
    """Spearman's rank correlation with a percentile bootstrap interval over the items.

    Only the order counts, so values may be infinite. NaN throughout where one side has fewer than two different
    values; resamples in which that is so are left out of the interval.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    n, nan = len(x), float("nan")
    value = float(_rank_correlations(x[None], y[None])[0]) if n else nan
    if not np.isfinite(value):
        return Interval(nan, nan, nan)
    draws = numpy_generator(seed, "bootstrap rank correlation", n).integers(n, size=(n_resamples, n))
    resampled = _rank_correlations(x[draws], y[draws])
    low, high = np.quantile(resampled[np.isfinite(resampled)], [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def bootstrap_mean_rank_correlation(
    groups: Sequence[tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]],
    *,
    seed: int,
    level: float = 0.95,
    n_resamples: int = 2000,
) -> Interval:
    """Mean of Spearman's rank correlation over groups, with a bootstrap interval over the groups and their items.

    A resample draws groups, and items anew in each. A correlation in which one side is constant counts as 0: there is
    no order. NaN throughout without groups.
    """
    if not groups:
        return Interval(*[float("nan")] * 3)
    values, resampled = [], []
    for index, (x, y) in enumerate(groups):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        draws = numpy_generator(seed, "items", index).integers(len(x), size=(n_resamples, len(x)))
        values.append(np.nan_to_num(_rank_correlations(x[None], y[None])[0]))
        resampled.append(np.nan_to_num(_rank_correlations(x[draws], y[draws])))
    generator = numpy_generator(seed, "groups", len(groups))
    drawn, of_drawn = (generator.integers(n, size=(n_resamples, len(groups))) for n in (len(groups), n_resamples))
    means = np.array(resampled)[drawn, of_drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.mean(values)), float(low), float(high))


def sign_flip_p(
    differences: Float[np.ndarray, "*rows n"], *, seed: int, n_resamples: int = 10_000
) -> Float[np.ndarray, "*rows"]:
    """Two-sided p-value of a mean of paired differences, by a permutation test that flips their signs.

    How often a mean at least as far from 0 comes about when each pair is swapped at random: exact over all flips where
    these are no more than `n_resamples`, else over so many draws, the data themselves counted. All rows are flipped
    alike. NaN without differences.
    """
    differences = np.asarray(differences, dtype=np.float64)
    n = differences.shape[-1]
    if n == 0:
        return np.full(differences.shape[:-1], np.nan)
    exact = 2**n <= n_resamples
    if exact:
        up = np.arange(2**n)[:, None] >> np.arange(n) & 1
    else:
        up = numpy_generator(seed, "sign flips", n).integers(2, size=(n_resamples, n), dtype=np.int8)
    sums = np.abs(differences @ (2.0 * up - 1).T)
    least = np.abs(differences.sum(axis=-1, keepdims=True))
    as_far = (sums >= least * (1 - 1e-9) - 1e-12).sum(axis=-1)
    return as_far / len(up) if exact else (1 + as_far) / (1 + len(up))


def censored_median(
    times: Float[np.ndarray, " n"], censored: Bool[np.ndarray, " n"], *, level: float = 0.95
) -> Interval:
    """Median time under right censoring (Kaplan-Meier), with the interval where the survival band crosses one half.

    An end is infinite when the curve, or the edge of its band (log-log Greenwood), never falls to one half: more than
    half of the runs never got there. The lower end is NaN where the data say nothing of it, as with a single run, or
    when every run is censored. Ends follow `survfit` of R's survival package.
    """
    times, censored = np.asarray(times, float), np.asarray(censored, bool)
    if times.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    survival = _survival(times, censored)
    band = _confidence_band(survival, level)
    median = _first_at_or_below_half(survival.quantiles, survival.probabilities)
    # The band is undefined where the curve is 1 or 0; neither end may be read off there.
    low, high = (
        _first_at_or_below_half(survival.quantiles, np.nan_to_num(edge.probabilities, nan=1.0))
        for edge in (band.low, band.high)
    )
    return Interval(median, low if np.isfinite(low) else float("nan"), high)


def restricted_mean(
    times: Float[np.ndarray, " n"],
    censored: Bool[np.ndarray, " n"],
    horizon: float,
    *,
    seed: int,
    level: float = 0.95,
    n_resamples: int = 1000,
) -> Interval:
    """Restricted mean time up to `horizon`: area under the Kaplan-Meier curve, with a bootstrap interval over runs.

    Runs that never got there count as `horizon`, which the name says; the plain mean would hide it.
    """
    times, censored = np.asarray(times, float), np.asarray(censored, bool)
    n = times.size
    if n == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    (value,) = _areas(times, censored, np.ones((1, n)), horizon)
    if n < 2:
        return Interval(float(value), float("nan"), float("nan"))
    counts = numpy_generator(seed, "restricted mean", n).multinomial(n, np.full(n, 1 / n), size=n_resamples)
    low, high = np.quantile(_areas(times, censored, counts, horizon), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))


def restricted_mean_difference(
    first: "tuple[Float[np.ndarray, ' n'], Bool[np.ndarray, ' n']]",
    second: "tuple[Float[np.ndarray, ' m'], Bool[np.ndarray, ' m']]",
    horizon: float,
    *,
    seed: int,
    level: float = 0.95,
    n_resamples: int = 2000,
) -> Interval:
    """Restricted mean of the first sample minus that of the second, with a bootstrap interval over the runs of both.

    Each sample is `(times, censored)` as in `restricted_mean`, and is resampled by itself. The interval is NaN where a
    sample has fewer than two runs, and all is NaN where one has none.
    """
    nan, values, resampled = float("nan"), [], []
    for name, (times, censored) in (("first", first), ("second", second)):
        times, censored = np.asarray(times, float), np.asarray(censored, bool)
        n = times.size
        if n == 0:
            return Interval(nan, nan, nan)
        values.append(float(_areas(times, censored, np.ones((1, n)), horizon)[0]))
        generator = numpy_generator(seed, "restricted mean difference", name, n)
        counts = generator.multinomial(n, np.full(n, 1 / n), size=n_resamples)
        resampled.append(_areas(times, censored, counts, horizon) if n > 1 else np.full(n_resamples, nan))
    low, high = np.quantile(resampled[0] - resampled[1], [(1 - level) / 2, (1 + level) / 2])
    return Interval(values[0] - values[1], float(low), float(high))


def log_rank_p(
    first: "tuple[Float[np.ndarray, ' n'], Bool[np.ndarray, ' n']]",
    second: "tuple[Float[np.ndarray, ' m'], Bool[np.ndarray, ' m']]",
) -> float:
    """Two-sided p-value of the log-rank test that two samples of times, `(times, censored)`, have the same law.

    After Mantel (1966), as in `scipy.stats.logrank`: the test is asymptotic, and rough below some ten runs. NaN where
    no run of either got there.
    """
    samples = [(np.asarray(times, float), np.asarray(censored, bool)) for times, censored in (first, second)]
    if any(times.size == 0 for times, _ in samples) or all(censored.all() for _, censored in samples):
        return float("nan")
    ours, theirs = (stats.CensoredData.right_censored(times, censored) for times, censored in samples)
    return float(stats.logrank(ours, theirs).pvalue)


def holm_p(p_values: Float[np.ndarray, " test"]) -> Float[np.ndarray, " test"]:
    """P-values corrected for their number, in the given order (Holm 1979: holds whatever the tests share)."""
    p_values = np.asarray(p_values, np.float64)
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(np.maximum.accumulate(factors * p_values[order]), 1.0)
    return corrected


def _rank_correlations(x: Float[np.ndarray, "rows n"], y: Float[np.ndarray, "rows n"]) -> Float[np.ndarray, " rows"]:
    """Spearman's correlation of each row; NaN where one side is constant."""
    ranks = [stats.rankdata(side, axis=1) for side in (x, y)]
    x_centred, y_centred = (side - side.mean(axis=1, keepdims=True) for side in ranks)
    together = (x_centred * y_centred).sum(axis=1)
    apart = np.sqrt((x_centred**2).sum(axis=1) * (y_centred**2).sum(axis=1))
    return np.divide(together, apart, out=np.full(len(together), np.nan), where=apart > 0)


def _survival(times: np.ndarray, censored: np.ndarray):
    return stats.ecdf(stats.CensoredData.right_censored(times, censored)).sf


def _confidence_band(survival, level: float):
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # the log-log band is undefined where the curve is 0 or 1
        return survival.confidence_interval(confidence_level=level, method="log-log")


def _first_at_or_below_half(times: np.ndarray, probabilities: np.ndarray) -> float:
    below = np.nonzero(probabilities <= 0.5 + 1e-9)[0]  # a product of shares that is one half may round above it
    return float(times[below[0]]) if below.size else float("inf")


def _areas(
    times: Float[np.ndarray, " n"],
    censored: Bool[np.ndarray, " n"],
    counts: Float[np.ndarray, "resamples n"],
    horizon: float,
) -> Float[np.ndarray, " resamples"]:
    """Area up to `horizon` under the Kaplan-Meier curve of each resample, in which run i stands `counts[:, i]` times.

    A curve stays level after its last run. All resamples are done at once: one curve each is 500 times slower.
    """
    order = np.lexsort((censored, times))  # of runs at the same time, those censored there were still at risk
    counts = np.asarray(counts, float)[:, order]
    at_risk = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    events = counts * ~censored[order]
    hazard = np.divide(events, at_risk, out=np.zeros_like(events), where=at_risk > 0)
    survival = np.cumprod(1 - hazard, axis=1)
    edges = np.concatenate([[0.0], np.clip(times[order], 0, horizon), [horizon]])
    return edges[1] + survival @ np.diff(edges[1:])
