"""The comparisons that verdicts rest on: two arms with the same seeds, in pairs, with intervals over the seeds."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from jaxtyping import Float

from emergent_heads.experiments.study import Check, select
from emergent_heads.statistics import Interval, bootstrap_mean, bootstrap_ratio
from emergent_heads.sweeps import event_times

NO_SLOWER = 1.25
"""A ratio of steps whose whole interval is below this counts as no difference that matters."""
LEAST_SEEDS = 3
NAN = float("nan")


def slower(
    part: str,
    slow: pd.DataFrame,
    fast: pd.DataFrame,
    event: str = "step_solved",
    *,
    above: float = 1.0,
    no_more_than: float = NO_SLOWER,
) -> Check:
    """Whether the runs `slow` take more steps to an event than the runs `fast`.

    Runs that never got there count with their last step, so a ratio whose slow runs did not all get there is a lower
    bound, and settles nothing where it is small. Where no run of either got there, nothing is settled.

    Args:
        part: what is compared.
        slow, fast: rows of `runs_table`; seeds that only one of them has are left out.
        event: "step_solved" or "step_left_plateau".
        above: holds if the whole interval of the ratio is above this,
        no_more_than: and does not hold if it is wholly below this (at least `above`).
    """
    slow, fast = _paired(slow, fast)
    (slow_steps, slow_never), (fast_steps, fast_never) = _clipped(slow, fast, event)
    n = len(slow)
    ratio = bootstrap_ratio(slow_steps, fast_steps, seed=0)
    what = "to leave the plateau" if event == "step_left_plateau" else "to solve"
    if n < LEAST_SEEDS or (slow_never.all() and fast_never.all()):
        reason = f"only {n} seeds" if n < LEAST_SEEDS else "no run of either got there"
        return Check(part, None, *ratio, n, f"{part}: {reason}")
    holds = _above(ratio, above, max(above, no_more_than))
    if holds is False and slow_never.sum() > fast_never.sum():
        holds = None  # the ratio would have grown with longer runs
    bound = "at least " if slow_never.any() and not fast_never.any() else ""
    says = f"{part}: {bound}{ratio.value:.2f} times the steps {what} ({ratio.low:.2f} to {ratio.high:.2f})"
    if slow_never.any() or fast_never.any():
        says += f"; never by the last step: {slow_never.sum()} of {n} against {fast_never.sum()} of {n}"
    return Check(part, holds, *ratio, n, says)


def more(part: str, higher: pd.DataFrame, lower: pd.DataFrame, measure: str, *, none: float = 0.05) -> Check:
    """Whether a measure at the end is higher in one arm than in the other, in pairs of seeds.

    Holds if the whole interval of the mean difference is above 0; does not hold if it is wholly below `none`.
    """
    higher, lower = _paired(higher, lower)
    n = len(higher)
    difference = bootstrap_mean(higher[measure].to_numpy(float) - lower[measure].to_numpy(float), seed=0)
    if n < LEAST_SEEDS:
        return Check(part, None, *difference, n, f"{part}: only {n} seeds")
    says = f"{part}: {difference.value:+.2f} ({difference.low:+.2f} to {difference.high:+.2f})"
    return Check(part, _above(difference, 0.0, none), *difference, n, says)


def slope(part: str, runs: pd.DataFrame, event: str) -> Check:
    """Slope of log steps to an event against log `x`, one line per seed, with a bootstrap interval over seeds.

    Runs that never got there count with their last step: then the slope is a lower bound. Where none did, nothing is
    settled.
    """
    steps, never = event_times(runs, event)
    table = pd.DataFrame(
        {"seed": runs["seed"].to_numpy(), "x": runs["x"].to_numpy(float), "steps": np.maximum(steps, 1.0)}
    )
    slopes = np.array([_slope(group) for _, group in table.groupby("seed") if group["x"].nunique() > 1])
    n = len(slopes)
    if n < LEAST_SEEDS or never.all():
        reason = f"only {n} seeds" if n < LEAST_SEEDS else "no run got there"
        return Check(part, None, NAN, NAN, NAN, n, f"{part}: {reason}")
    interval = bootstrap_mean(slopes, seed=0)
    says = f"{part}: slope {interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"
    if never.any():
        says += f", at least: {never.sum()} of {len(never)} runs never got there"
    return Check(part, _above(interval, 0.0, 0.0), *interval, n, says)


def of_interval(part: str, interval: Interval, n_seeds: int, says: str, *, above: float) -> Check:
    """Holds if the whole interval lies above `above`, does not hold if it lies wholly below."""
    return Check(part, _above(interval, above, above), *interval, n_seeds, f"{part}: {says}")


def log_savings(arms: Sequence[pd.DataFrame], event: str) -> Float[np.ndarray, "arm-1 seed"]:
    """Log ratio of the steps of each arm to those of the next, seed by seed; arms have the same seeds."""
    steps = [np.log(np.maximum(event_times(arm.sort_values("seed"), event)[0], 1.0)) for arm in arms]
    return np.array([before - after for before, after in pairwise(steps)])


def in_order(runs: pd.DataFrame, **values: object) -> list[pd.DataFrame]:
    """The arms with these values, by ascending `x`."""
    chosen = select(runs, **values)
    return [chosen.loc[chosen["x"] == x] for x in sorted(chosen["x"].unique())]


def _above(interval: Interval, level: float, none: float) -> bool | None:
    if interval.low > level:
        return True
    return False if interval.high < max(level, none) else None


def _paired(one: pd.DataFrame, other: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    seeds = sorted(set(one["seed"]) & set(other["seed"]))
    return tuple(each.set_index("seed", drop=False).loc[seeds] for each in (one, other))  # pyright: ignore[reportReturnType]


def _clipped(one: pd.DataFrame, other: pd.DataFrame, event: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Steps and which never got there, up to the fewest steps that any run was to have."""
    horizon = float(min(one["steps"].min(), other["steps"].min())) if len(one) else 0.0
    found = []
    for rows in (one, other):
        steps, never = event_times(rows, event)
        # An event at step 0 would make a ratio of nothing: the first evaluation counts as step 1.
        found.append((np.clip(steps, 1.0, max(horizon, 1.0)), never | (steps > horizon)))
    return found


def _slope(rows: pd.DataFrame) -> float:
    return float(np.polyfit(np.log(rows["x"].to_numpy(float)), np.log(rows["steps"].to_numpy(float)), 1)[0])
