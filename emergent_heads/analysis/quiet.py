"""What was learned before the loss moved: quiet and loud features, and what quiet ones say of the transition to come.

A feature emerges where the loss of its probe is half-way from the strongest baseline to the best it reaches, and the
task's transition is where its loss is half-way from plateau to floor; both by the rule of `find_transition`. The lead
is the transition minus the emergence, in steps: above 0 the feature is quiet, otherwise loud. "Quiet Feature Learning
in Algorithmic Tasks" (arXiv 2505.03997) tells them apart by eye, from one run each; here several seeds must agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from emergent_heads.analysis.leads import FEWEST_SEEDS, Lead, at, known_issues_of, lead_interval, read_runs
from emergent_heads.analysis.probe_curves import FeatureCurves, same_features
from emergent_heads.analysis.probes import ProbeSeries
from emergent_heads.analysis.transition import Crossing, HasLossRange, Transition
from emergent_heads.errors import ArgumentError
from emergent_heads.results import Result
from emergent_heads.statistics import Interval, bootstrap_mean_rank_correlation, bootstrap_median

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_PLACES = 4
"""Learned places that an order over places needs."""

_VERDICTS = ("quiet", "loud", "undecided", "not learned")
_ENDS = ("", "_low", "_high")
_NAN = float("nan")


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class QuietFeatures(Result):
    """Which features are quiet and which are loud.

    Numbers over seeds are medians with a bootstrap interval over the seeds, `..._low` to `..._high`; NaN if unknown.

    Attributes:
        table: one row per `feature`: `kind`, `verdict` ("quiet", "loud", "undecided", "not learned") and its `reason`;
            `n_seeds` with a known lead, of which `n_censored` only at least or at most (no transition by the last
            step, or there from the start) and `n_before_start` with the emergence before the transition's start;
            `lead_steps` with an interval that covers the seeds and the distance between evaluations; `lead_ratio`, the
            transition step over the emergence step; `emergence_step`, `transition_step`; `order` over places ("early
            first", "late first", "no order", "undecided") by `order_rho`, the mean over seeds of Spearman's
            correlation of place and emergence step, with an interval over seeds and places; `rise`, the last probe
            loss minus the lowest after the transition as a share of the way from baseline to best, with its interval
            (wholly above 0: the curve is a U); `share_removed` of the strongest baseline at best, and
            `share_removed_at_start` of the transition, with its interval.
        seeds: the same numbers of each feature in each `run`. `lead_least` and `lead_most` are what the evaluations on
            both sides of emergence and transition allow; `lead_censored` is "at least", "at most" or "".
        places: one row per `run`, `feature` and `place`: `emergence_step` with its `status`, `lead_steps`,
            `baseline_loss`, `best_loss`, `share_removed`.
        curves: one row per `run`, `feature` and `step`: `loss`, the mean over places, and `gap_left`, the share of the
            way from the strongest baseline to the best that is left (NaN where the feature is not learned).
        transition: of the task's loss.
    """

    seeds: pd.DataFrame
    places: pd.DataFrame
    curves: pd.DataFrame
    transition: Transition

    @property
    def quiet(self) -> list[str]:
        """Names of the quiet features."""
        return self.named("quiet")

    @property
    def loud(self) -> list[str]:
        """Names of the loud features."""
        return self.named("loud")

    def named(self, verdict: str) -> list[str]:
        """Names of the features with this verdict."""
        return self.table.loc[self.table["verdict"] == verdict, "feature"].tolist()

    def headline(self) -> str:
        said = [f"{verdict}: {', '.join(names)}" for verdict in _VERDICTS if (names := self.named(verdict))]
        return f"{'; '.join(said)} ({self.transition.headline()}){self.caution}"

    def shown(self) -> pd.DataFrame:
        columns = ["feature", "verdict", "n_seeds", "lead_steps", "lead_low", "lead_high", "order", "rise", "reason"]
        return self.table.loc[:, columns]

    def plot(self) -> "Figure":
        """The task's loss and each feature's probe loss on one axis of steps, with the transition shaded."""
        from emergent_heads.plots import quiet as quiet_plots

        return quiet_plots.quiet_features(
            self.table,
            self.curves,
            self.transition.table,
            transition=self.transition.step,
            fast_phase=self.transition.fast_phase,
        )


def classify_features(
    probes: ProbeSeries | Sequence[ProbeSeries],
    metrics: pd.DataFrame | Sequence[pd.DataFrame],
    *,
    task: HasLossRange | None = None,
    least_share: float = 0.1,
    seed: int = 0,
) -> QuietFeatures:
    """Tells quiet from loud features by when their probes' losses fall, against when the task's loss falls.

    Quiet means that the whole interval of the lead lies above 0, loud that none of it does; anything else, or fewer
    than 3 seeds, is undecided. The interval's low end comes from the least leads that the evaluations on both sides of
    emergence and transition allow, its high end from the greatest: where checkpoints stand too far apart to tell the
    order, the verdict is undecided. Of up to five seeds the interval spans all, so they must all agree. A lead that is
    only known to be at least (or at most) so long, as there was no transition by the last step, counts by that; a
    verdict needs a transition in 3 seeds all the same.

    Args:
        probes: one series of probes, or several, one per seed.
        metrics: `run.metrics` of each, in the same order.
        task: what knows plateau and floor; by default they are what the probes say in their `.about`.
        least_share: share of the strongest baseline that the probe's loss must lose for a feature to count as learned.
        seed: of the bootstrap over seeds.

    Raises:
        ArgumentError: numbers of series and of metrics that differ, series without metrics, probes of fewer than two
            checkpoints or of other features in each run, a `least_share` outside 0 to 1, or no plateau and floor.
    """
    if not 0 < least_share < 1:
        raise ArgumentError(f"least_share is {least_share}: it is a share, above 0 and below 1")
    curves, transition, crossings = read_runs(probes, metrics, task, seed)
    names = same_features(curves)
    seeds, places, lines = [], [], []
    for run, (features, crossing) in enumerate(zip(curves, crossings, strict=True)):
        start = float(transition.runs["start"].iloc[run])
        for feature in features.values():
            of_places = pd.DataFrame(_place_rows(run, feature, crossing, least_share))
            seeds.append(_seed_row(run, feature, crossing, start, of_places, least_share))
            places.append(of_places)
            lines.append(_lines(run, feature, least_share))
    by_seed = pd.DataFrame(seeds)
    by_place = pd.concat(places, ignore_index=True)
    of_feature = [(by_seed["feature"] == name, by_place["feature"] == name) for name in names]
    rows = [_feature_row(by_seed.loc[seeds], by_place.loc[places], transition, seed) for seeds, places in of_feature]
    return QuietFeatures(
        pd.DataFrame(rows),
        seeds=by_seed,
        places=by_place,
        curves=pd.concat(lines, ignore_index=True),
        transition=transition,
        about={
            **transition.about,
            "analysis": "quiet features",
            "least_share": least_share,
            "seed": seed,
            "known_issues": known_issues_of(probes),
        },
    )


def _seed_row(
    run: int,
    feature: FeatureCurves,
    transition: Crossing,
    start: float,
    places: pd.DataFrame,
    least_share: float,
) -> dict[str, Any]:
    curve = feature.whole
    emergence = curve.emergence(least_share)
    lead = Lead.between(emergence, transition)
    return {
        "run": run,
        "feature": feature.feature,
        "kind": feature.kind,
        "status": emergence.status,
        "emergence_step": at(emergence.step),
        "emergence_low": at(emergence.low),
        "emergence_high": at(emergence.high),
        "transition_step": at(transition.step),
        "transition_start": start,
        "transition_status": transition.status,
        "lead_steps": lead.steps,
        "lead_least": lead.least,
        "lead_most": lead.most,
        "lead_censored": lead.censored,
        "lead_ratio": at(transition.step) / at(emergence.step),
        "order_rho": _order(places, seed=0).value,
        "n_places": len(places),
        "n_places_learned": int((places["status"] != "never").sum()),
        "rise": curve.rise_after(at(transition.step)) if emergence.status != "never" else _NAN,
        "share_removed": curve.share_removed,
        "share_removed_at_start": curve.share_removed_at(start),
    }


def _place_rows(run: int, feature: FeatureCurves, transition: Crossing, least_share: float) -> list[dict[str, Any]]:
    rows = []
    for place, curve in feature.places.items():
        emergence = curve.emergence(least_share)
        rows.append(
            {
                "run": run,
                "feature": feature.feature,
                "place": place,
                "status": emergence.status,
                "emergence_step": at(emergence.high if emergence.status == "from the start" else emergence.step),
                "lead_steps": Lead.between(emergence, transition).steps,
                "baseline_loss": curve.baseline,
                "best_loss": curve.best,
                "share_removed": curve.share_removed,
            }
        )
    return rows


def _lines(run: int, feature: FeatureCurves, least_share: float) -> pd.DataFrame:
    curve = feature.whole
    learned = curve.emergence(least_share).status != "never"
    columns = {"step": curve.steps.astype(int), "loss": curve.losses, "gap_left": curve.gap_left if learned else _NAN}
    return pd.DataFrame({"run": run, "feature": feature.feature, **columns})


def _feature_row(rows: pd.DataFrame, places: pd.DataFrame, transition: Transition, seed: int) -> dict[str, Any]:
    """One feature over its seeds."""
    known = rows.loc[rows["lead_steps"].notna() & _is_learned(rows)]
    lead = lead_interval(known["lead_steps"], known["lead_least"], known["lead_most"], seed)
    verdict, reason = _verdict(rows, known, lead, seed)
    order = _order(places, seed)
    of_seeds = {name: _over_seeds(rows[name], seed) for name in ("rise", "share_removed_at_start")}
    return {
        "feature": rows["feature"].iloc[0],
        "kind": rows["kind"].iloc[0],
        "verdict": verdict,
        "n_seeds": len(known),
        "n_censored": int((known["lead_censored"] != "").sum()),
        "n_before_start": int(
            (rows["emergence_step"].fillna(rows["emergence_high"]) < rows["transition_start"]).sum()
        ),
        "lead_steps": lead.value,
        "lead_low": lead.low,
        "lead_high": lead.high,
        "lead_ratio": _over_seeds(rows["lead_ratio"], seed).value,
        "emergence_step": _over_seeds(rows["emergence_step"], seed).value,
        "transition_step": at(transition.step),
        "order": _order_over_seeds(order, n_seeds=int(rows["order_rho"].notna().sum())),
        "order_rho": order.value,
        "order_low": order.low,
        "order_high": order.high,
        **{f"{name}{end}": found for name, each in of_seeds.items() for end, found in zip(_ENDS, each, strict=True)},
        "share_removed": _over_seeds(rows["share_removed"], seed).value,
        "reason": reason,
    }


def _verdict(rows: pd.DataFrame, known: pd.DataFrame, lead: Interval, seed: int) -> tuple[str, str]:
    """Quiet, loud, undecided or not learned, and why."""
    n = len(rows)
    learned = int((rows["status"] != "never").sum())
    solved = int((rows["transition_status"] == "crossed").sum())
    if not _is_learned(rows):
        share = rows["share_removed"].median()
        return "not learned", f"learned in {learned} of {n} seeds; removes {share:.0%} of the strongest baseline"
    if min(len(known), solved) < FEWEST_SEEDS:
        what = "lead is known" if len(known) < solved else "loss has a transition"
        return "undecided", f"the {what} in {min(len(known), solved)} of {n} seeds; {FEWEST_SEEDS} are needed"
    note = "" if learned == n else f"not learned in {n - learned} of {n} seeds"
    if lead.low > 0:
        return "quiet", note
    if lead.high <= 0:
        return "loud", note
    seeds = bootstrap_median(known["lead_steps"].to_numpy(float), seed=seed)
    if seeds.low > 0 or seeds.high <= 0:
        return "undecided", "too few checkpoints between emergence and transition to tell which comes first"
    return "undecided", "the lead's interval holds 0"


def _is_learned(rows: pd.DataFrame) -> bool:
    """Whether a feature is learned in at least half of the seeds."""
    return bool((rows["status"] != "never").mean() >= 0.5)


def _order(places: pd.DataFrame, seed: int) -> Interval:
    """Mean over the runs of Spearman's correlation of place and emergence step, over the places that were learned.

    Runs with too few such places are left out. The interval is over runs and places.
    """
    learned = places.loc[places["status"] != "never"]
    sides = [
        (rows["place"].to_numpy(float), rows["emergence_step"].to_numpy(float)) for _, rows in learned.groupby("run")
    ]
    return bootstrap_mean_rank_correlation([side for side in sides if len(side[0]) >= FEWEST_PLACES], seed=seed)


def _order_over_seeds(order: Interval, n_seeds: int) -> str:
    if n_seeds < FEWEST_SEEDS:
        return "undecided"
    return "early first" if order.low > 0 else "late first" if order.high < 0 else "no order"


def _over_seeds(values: pd.Series, seed: int) -> Interval:
    return bootstrap_median(values.dropna().to_numpy(float), seed=seed)
