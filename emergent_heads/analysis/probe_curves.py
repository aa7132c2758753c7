"""The loss of a feature's probes over the steps of a training, and where the feature emerges in it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from emergent_heads.analysis.probes import ProbeSeries
from emergent_heads.analysis.transition import MIDDLE, Crossing, find_crossing, log_places
from emergent_heads.errors import ArgumentError, nearest

NOTHING_LEFT = 0.01
"""Share of the prior's loss below which a baseline leaves nothing to be learned: what is left is noise."""

_NEEDED = ("step", "feature", "kind", "place", "is_best", "loss", "validation_loss", "baseline_loss", "prior_loss")


@dataclass(frozen=True)
class ProbeCurve:
    """Loss of a probe at each step, of the layer that was best at that step.

    Attributes:
        steps: `[step]`, ascending.
        losses: `[step]`, on the test data.
        validation_losses: `[step]`; everything is chosen by these.
        baseline: the strongest baseline's loss.
        prior: loss of the prior, which knows nothing but the labels' frequencies.
    """

    steps: Float[np.ndarray, " step"]
    losses: Float[np.ndarray, " step"]
    validation_losses: Float[np.ndarray, " step"]
    baseline: float
    prior: float

    @property
    def best(self) -> float:
        """Test loss at the step with the lowest validation loss, so that the lowest is not taken for its noise."""
        return float(self.losses[self.validation_losses.argmin()])

    @property
    def share_removed(self) -> float:
        """Share of the strongest baseline's loss that is gone at the best step."""
        return 1 - self.best / self.baseline if self.baseline > 0 else 0.0

    @property
    def share_left(self) -> Float[np.ndarray, " step"]:
        """Share of the strongest baseline's loss that is left at each step; 1 where the baseline has none."""
        return self.losses / self.baseline if self.baseline > 0 else np.ones_like(self.losses)

    @property
    def gap_left(self) -> Float[np.ndarray, " step"]:
        """Share of the way from the baseline (1) to the best (0) that is left at each step."""
        return (self.losses - self.best) / (self.baseline - self.best)

    def is_learned(self, least_share: float) -> bool:
        """Whether the best is clearly below the baseline, and the baseline left something to be learned."""
        return self.baseline > NOTHING_LEFT * self.prior and self.share_removed >= least_share

    def emergence(self, least_share: float) -> Crossing:
        """Where half of the way from the baseline to the best is done; "never" for what is not learned."""
        if not self.is_learned(least_share):
            return Crossing("never", None, float(self.steps[-1]), None)
        return find_crossing(self.steps, self.gap_left, MIDDLE)

    def share_removed_at(self, step: float) -> float:
        """Share of the baseline's loss that is gone at a step, interpolated; NaN outside the steps probed."""
        if not self.steps[0] <= step <= self.steps[-1] or self.baseline <= 0:
            return float("nan")
        places = log_places(np.append(self.steps, step))
        return float(1 - np.interp(places[-1], places[:-1], self.losses) / self.baseline)

    def rise_after(self, step: float) -> float:
        """Last loss minus the lowest from `step` on, as a share of the way from the baseline to the best.

        The lowest is chosen by validation loss, so that noise alone gives 0 on average. NaN with fewer than two such
        steps.
        """
        (after,) = np.nonzero(self.steps >= step)
        if len(after) < 2 or self.baseline <= self.best:
            return float("nan")
        lowest = after[self.validation_losses[after].argmin()]
        return float((self.losses[-1] - self.losses[lowest]) / (self.baseline - self.best))


@dataclass(frozen=True)
class FeatureCurves:
    """A feature's probes over the steps.

    Attributes:
        feature, kind: what is read.
        whole: means over the places.
        places: each place; one that was not probed at every step is left out.
    """

    feature: str
    kind: str
    whole: ProbeCurve
    places: Mapping[int, ProbeCurve]


def read_curves(series: ProbeSeries, run: int = 0) -> dict[str, FeatureCurves]:
    """The curves of every feature of a series, by name.

    Args:
        series: the probes.
        run: number of the series, for messages.

    Raises:
        ArgumentError: columns that are missing, fewer than two steps, or a feature without a place that was probed at
            every step.
    """
    table = series.table
    if missing := [name for name in _NEEDED if name not in table.columns]:
        raise ArgumentError(f"the probes of run {run} lack the column {missing[0]!r}; give what probe_series returns")
    if table["step"].nunique() < 2:
        raise ArgumentError(
            f"the probes of run {run} are of {table['step'].nunique()} checkpoint(s); to see when a feature "
            "was learned takes at least 2"
        )
    best = table.loc[table["is_best"].astype(bool)]
    return {str(name): _feature_curves(str(name), rows, run) for name, rows in best.groupby("feature", sort=False)}


def same_features(curves: Iterable[Mapping[str, FeatureCurves]]) -> list[str]:
    """Names of the features, which must be the same in all runs.

    Raises:
        ArgumentError: they are not.
    """
    first, *others = (list(each) for each in curves)
    for run, names in enumerate(others, start=1):
        if odd := set(first) ^ set(names):
            raise ArgumentError(
                f"run {run} was probed for other features than run 0 ({', '.join(sorted(odd))}); give runs of one "
                "task, probed for the same features"
            )
    return first


def choose_features(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The features asked for.

    Raises:
        ArgumentError: one was not probed, or none is asked for.
    """
    chosen, known = list(dict.fromkeys([names] if isinstance(names, str) else names)), list(known)
    for name in chosen:
        if name not in known:
            raise ArgumentError(f"the probes have no feature {name!r}; {nearest(name, known)}")
    if not chosen:
        raise ArgumentError(f"no feature named; the probes have {', '.join(known)}")
    return chosen


def _feature_curves(feature: str, rows: pd.DataFrame, run: int) -> FeatureCurves:
    if (twice := rows.duplicated(["step", "place"])).any():
        step, place = rows.loc[twice, ["step", "place"]].iloc[0]
        raise ArgumentError(
            f"the probes of run {run}: feature {feature!r} has two best layers at step {step}, place {place}"
        )
    columns = ("loss", "validation_loss", "baseline_loss", "prior_loss")
    wide = {name: rows.pivot(index="place", columns="step", values=name).sort_index(axis=1) for name in columns}
    complete = np.logical_and.reduce([np.isfinite(values).all(axis=1) for values in wide.values()])
    if not complete.any():
        raise ArgumentError(f"the probes of run {run}: feature {feature!r} has no place that was probed at every step")
    steps = wide["loss"].columns.to_numpy(float)
    losses, validation, baselines, priors = (wide[name].loc[complete].to_numpy(float) for name in columns)
    places = wide["loss"].index[complete]
    by_place = {
        int(place): ProbeCurve(
            steps, losses[at], validation[at], float(baselines[at].mean()), float(priors[at].mean())
        )
        for at, place in enumerate(places)
    }
    whole = ProbeCurve(
        steps, losses.mean(axis=0), validation.mean(axis=0), float(baselines.mean()), float(priors.mean())
    )
    return FeatureCurves(feature, str(rows["kind"].iloc[0]), whole, by_place)
