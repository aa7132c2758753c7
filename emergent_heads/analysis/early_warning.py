"""Early warning: how long before the transition the probes of quiet features have left their baseline."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from emergent_heads.analysis.leads import FEWEST_SEEDS, Lead, at, known_issues_of, lead_interval, read_runs
from emergent_heads.analysis.probe_curves import ProbeCurve, choose_features, same_features
from emergent_heads.analysis.probes import ProbeSeries
from emergent_heads.analysis.quiet import classify_features
from emergent_heads.analysis.transition import START, Crossing, HasLossRange, find_crossing
from emergent_heads.errors import ArgumentError
from emergent_heads.results import Result
from emergent_heads.statistics import Interval, bootstrap_rank_correlation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_SEEDS_FOR_RANKS = 5
"""Seeds that an interval of a rank correlation over seeds needs."""

_NAN = float("nan")


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class EarlyWarning(Result):
    """How long before the transition the probes of some features have left their baseline.

    Attributes:
        table: one row per `run`: `warning_step` with its `warning_status` and `transition_step` with its
            `transition_status` ("crossed", "never", "from the start"), `steps_between` with what the evaluations allow
            (`steps_least`, `steps_most`) and `censored` ("at least", "at most" or ""), `ratio` of the two steps.
        features: whose probes were watched.
        steps_between: median over the seeds, with a bootstrap interval over the seeds that also covers the distance
            between evaluations (`steps_low`, `steps_high`); None where unknown.
        correlation: Spearman's rank correlation of warning and transition over the seeds, None with fewer than 3; with
            a bootstrap interval over the seeds (`correlation_low`, `correlation_high`), None with fewer than 5. A run
            without a warning, or without a transition, counts as later than all that have one.
        caveats: what the numbers hide, in sentences.
    """

    features: tuple[str, ...]
    steps_between: float | None
    steps_low: float | None
    steps_high: float | None
    correlation: float | None
    correlation_low: float | None
    correlation_high: float | None
    caveats: tuple[str, ...]

    def headline(self) -> str:
        n = len(self.table)
        between = _said(self.steps_between, self.steps_low, self.steps_high)
        rank = _said(self.correlation, self.correlation_low, self.correlation_high)
        return (
            f"warning to transition: {between} steps; rank correlation {rank}; {n} seed{'s' * (n > 1)}; "
            f"features: {', '.join(self.features)}{self.caution}"
        )

    def notes(self) -> Iterable[str]:
        return [f"caveat: {caveat}" for caveat in self.caveats]

    def plot(self) -> "Figure":
        """Step of the transition against step of the warning, a dot per seed."""
        from emergent_heads.plots import quiet as quiet_plots

        return quiet_plots.early_warning(self.table, correlation=self.correlation)


def early_warning(
    probes: ProbeSeries | Sequence[ProbeSeries],
    metrics: pd.DataFrame | Sequence[pd.DataFrame],
    features: Iterable[str] | None = None,
    *,
    task: HasLossRange | None = None,
    seed: int = 0,
) -> EarlyWarning:
    """How many steps before the transition the mean probe of quiet features had left its baseline.

    The warning is where the mean over the features of probe loss / strongest baseline comes down to 0.9, by the rule
    of `find_transition`. Unlike emergence it needs no best value, which nobody knows before the end.

    Args:
        probes, metrics, task: as in `classify_features`.
        features: names of those to watch; by default those that `classify_features` finds quiet in the same runs.
        seed: of the bootstraps over seeds.

    Raises:
        ArgumentError: as `classify_features`; also features that were not probed, or none named and none quiet.
    """
    curves, transition, crossings = read_runs(probes, metrics, task, seed)
    known = same_features(curves)
    if features is None:
        features = classify_features(probes, metrics, task=task, seed=seed).quiet
        if not features:
            raise ArgumentError(
                f"no feature is quiet in these {len(curves)} run(s); name those to watch: {', '.join(known)}"
            )
    chosen = choose_features(features, known)
    warnings = [_warning([run[name].whole for name in chosen]) for run in curves]
    table = pd.DataFrame([_warning_row(run, *pair) for run, pair in enumerate(zip(warnings, crossings, strict=True))])
    between = lead_interval(table["steps_between"], table["steps_least"], table["steps_most"], seed)
    ranks = _rank_correlation(warnings, crossings, seed)
    return EarlyWarning(
        table,
        features=tuple(chosen),
        **dict(zip(("steps_between", "steps_low", "steps_high"), map(_known, between), strict=True)),
        **dict(zip(("correlation", "correlation_low", "correlation_high"), map(_known, ranks), strict=True)),
        caveats=tuple(_warning_caveats(table)),
        about={
            **transition.about,
            "analysis": "early warning",
            "features": chosen,
            "seed": seed,
            "known_issues": known_issues_of(probes),
        },
    )


def _warning(curves: Sequence[ProbeCurve]) -> Crossing:
    """Where the mean probe has left its baseline."""
    steps = curves[0].steps
    return find_crossing(steps, np.mean([curve.share_left for curve in curves], axis=0), START)


def _warning_row(run: int, warning: Crossing, transition: Crossing) -> dict[str, Any]:
    between = Lead.between(warning, transition)
    return {
        "run": run,
        "warning_step": at(warning.step),
        "warning_status": warning.status,
        "transition_step": at(transition.step),
        "transition_status": transition.status,
        "steps_between": between.steps,
        "steps_least": between.least,
        "steps_most": between.most,
        "censored": between.censored,
        "ratio": at(transition.step) / at(warning.step),
    }


def _rank_correlation(warnings: Sequence[Crossing], transitions: Sequence[Crossing], seed: int) -> Interval:
    if len(warnings) < FEWEST_SEEDS:
        return Interval(_NAN, _NAN, _NAN)
    ends = {"never": np.inf, "from the start": -np.inf}
    early, late = (
        [at(each.step) if each.step is not None else ends[each.status] for each in side]
        for side in (warnings, transitions)
    )
    found = bootstrap_rank_correlation(np.array(early), np.array(late), seed=seed)
    return found if len(warnings) >= FEWEST_SEEDS_FOR_RANKS else Interval(found.value, _NAN, _NAN)


def _warning_caveats(table: pd.DataFrame) -> Iterable[str]:
    n = len(table)
    if n < FEWEST_SEEDS:
        yield f"{n} seed(s): a rank correlation over seeds needs {FEWEST_SEEDS}, its interval {FEWEST_SEEDS_FOR_RANKS}"
    elif n < FEWEST_SEEDS_FOR_RANKS:
        yield f"{n} seeds: the interval of a rank correlation needs {FEWEST_SEEDS_FOR_RANKS}"
    for what in ("warning", "transition"):
        for status, count in table[f"{what}_status"].value_counts().items():
            if status != "crossed":
                yield f"{count} of {n} runs: {what} {status}"


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _said(value: float | None, low: float | None, high: float | None) -> str:
    value_said, *ends = (
        "unknown" if each is None else f"{each:,.0f}" if abs(each) >= 100 else f"{each:.2g}"
        for each in (value, low, high)
    )
    return value_said if low is None or high is None else f"{value_said} ({' to '.join(ends)})"
