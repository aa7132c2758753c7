"""Leads: how many steps something comes before the transition, in runs that were probed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from emergent_heads.analysis.probe_curves import FeatureCurves, read_curves
from emergent_heads.analysis.probes import ProbeSeries
from emergent_heads.analysis.transition import (
    Crossing,
    HasLossRange,
    LossRange,
    Transition,
    as_list,
    find_transition,
)
from emergent_heads.checkpoints.known_issues import marks_in
from emergent_heads.errors import ArgumentError
from emergent_heads.statistics import Interval, bootstrap_median

FEWEST_SEEDS = 3
"""Seeds that a claim over seeds needs."""

_NAN = float("nan")


class Lead(NamedTuple):
    """Steps from one crossing to a later one.

    Attributes:
        steps: between the two; of a censored lead the bound. NaN where nothing is known.
        least, most: what the evaluations on both sides of the crossings allow.
        censored: "at least", "at most" or "".
    """

    steps: float
    least: float
    most: float
    censored: str

    @classmethod
    def between(cls, early: Crossing, late: Crossing) -> "Lead":
        """From `early` to `late`; below 0 where `late` comes first."""
        unknown = cls(_NAN, _NAN, _NAN, "")
        at_least = late.status == "never" or early.status == "from the start"
        at_most = late.status == "from the start" or early.status == "never"
        steps = _or_bound(late) - _or_bound(early)
        # A bound tells the order only if it is on its own side of 0: "at most 500" may be anything.
        if (at_least and at_most) or (at_least and steps < 0) or (at_most and steps > 0):
            return unknown
        least = -np.inf if at_most else at(late.low) - at(early.high)
        most = np.inf if at_least else at(late.high) - at(early.low)
        return cls(steps, least, most, "at least" if at_least else "at most" if at_most else "")


def lead_interval(steps: pd.Series, least: pd.Series, most: pd.Series, seed: int) -> Interval:
    """Median lead with an interval that covers the seeds and, at both ends, what the evaluations allow.

    Of one seed it is what the evaluations allow. NaN rows are left out.
    """
    value, low, high = (each.dropna().to_numpy(float) for each in (steps, least, most))
    if not len(value):
        return Interval(_NAN, _NAN, _NAN)
    if len(value) == 1:
        return Interval(float(value[0]), float(low[0]), float(high[0]))
    return Interval(
        float(np.median(value)), bootstrap_median(low, seed=seed).low, bootstrap_median(high, seed=seed).high
    )


def known_issues_of(probes: ProbeSeries | Sequence[ProbeSeries]) -> dict[str, str]:
    """What is known of the published weights that were probed, for a result's `.about`."""
    runs = [probes] if isinstance(probes, ProbeSeries) else probes
    return marks_in((each.about.get("series", "a series"), each.table) for each in runs)


def read_runs(
    probes: ProbeSeries | Sequence[ProbeSeries],
    metrics: pd.DataFrame | Sequence[pd.DataFrame],
    task: HasLossRange | None,
    seed: int,
) -> tuple[list[dict[str, FeatureCurves]], Transition, tuple[Crossing, ...]]:
    series = as_list(probes, ProbeSeries, "probes", "series of probes, as probe_series gives them")
    tables = as_list(metrics, pd.DataFrame, "metrics", "tables such as run.metrics")
    if len(series) != len(tables):
        raise ArgumentError(
            f"{len(series)} series of probes and {len(tables)} tables of metrics; give one table for each series, in "
            "the same order"
        )
    transition = find_transition(tables, task or _loss_range(series), seed=seed)
    return [read_curves(each, run) for run, each in enumerate(series)], transition, transition.crossings


def _loss_range(series: Sequence[ProbeSeries]) -> LossRange:
    """Plateau and floor as the probes say them."""
    said = [(each.about.get("plateau"), each.about.get("floor")) for each in series]
    if any(end is None for ends in said for end in ends):
        raise ArgumentError(
            "the probes do not say the plateau and floor of their task; give task=, or LossRange(plateau, floor)"
        )
    if len(set(said)) > 1:
        raise ArgumentError(f"the probes are of tasks with different plateaus and floors: {sorted(set(said))}")
    return LossRange(*map(float, said[0]))  # pyright: ignore[reportArgumentType]


def at(place: float | None) -> float:
    return _NAN if place is None else float(place)


def _or_bound(crossing: Crossing) -> float:
    """Where it is; of "never" the last evaluation, of "from the start" the first."""
    bound = crossing.low if crossing.status == "never" else crossing.high
    return at(bound if crossing.step is None else crossing.step)
