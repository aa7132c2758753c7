"""What is learned before the loss moves: quiet and loud features, their order over places, and their U shape."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from emergent_heads.analysis.early_warning import EarlyWarning, early_warning
from emergent_heads.experiments.comparisons import LEAST_SEEDS, NAN, of_interval
from emergent_heads.experiments.probing import (
    ADDITION_8,
    ADDITION_12,
    ADDITION_16,
    BREADTH_FIRST,
    MULTIPLICATION,
    PROBLEMS,
    ProbedRuns,
    arms_of,
    probe_run,
    probed_runs,
)
from emergent_heads.experiments.quiet_figures import order_panels, quiet_panels
from emergent_heads.experiments.study import Check, Judgement, Study, own_plot
from emergent_heads.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARNING_SEEDS = 10
SOLVED = 0.5
"""Exact match in the end from which a task counts as solved."""
RISEN = 0.02
"""Share of the way from baseline to best by which a probe's loss must rise again to count as a U."""

PAPER = {
    ("addition", "first_operand"): "quiet",
    ("addition", "carry"): "quiet",
    ("multiplication", "first_operand"): "quiet",
    ("multiplication", "carry_k"): "quiet",
    ("breadth-first search", "queue"): "quiet",
    ("breadth-first search", "adjacency_list"): "loud",
    ("depth-first search", "adjacency_list"): "loud",
    ("maximum subarray", "is_prev_negative"): "quiet",
    ("maximum subarray", "max_ending_here"): "loud",
    ("activity selection", "start_time"): "loud",
}
"""What the paper's figures show: which features are quiet and which are loud."""


def _table(probed: Mapping[str, ProbedRuns]) -> pd.DataFrame:
    """One row per task and feature."""
    columns = [
        "feature",
        "verdict",
        "n_seeds",
        "lead_steps",
        "lead_low",
        "lead_high",
        "emergence_step",
        "transition_step",
        "share_removed_at_start",
        "share_removed",
    ]
    tables = [
        one.classified.table.loc[:, columns].assign(task=title, exact_match=one.exact_match)
        for title, one in probed.items()
    ]
    table = pd.concat(tables, ignore_index=True)
    return table.loc[:, ["task", *columns, "exact_match"]]


def _curves(probed: Mapping[str, ProbedRuns]) -> pd.DataFrame:
    """The task's loss (feature "") and the probes' losses, as shares of the way left."""
    parts = []
    for title, one in probed.items():
        loss = one.classified.transition.table.assign(feature="", verdict="")
        features = one.classified.curves.merge(one.classified.table[["feature", "verdict"]], on="feature")
        parts += [each.assign(task=title) for each in (loss, features)]
    columns = ["task", "feature", "verdict", "run", "step", "gap_left"]
    return pd.concat(parts, ignore_index=True).loc[:, columns]


def _has_verdict(title: str, row: Mapping[str, Any], wanted: str) -> Check:
    """Whether a feature is quiet, or loud, as it should be."""
    part = f"{title}, {row['feature']} is {wanted}"
    holds = {"quiet": wanted == "quiet", "loud": wanted == "loud"}.get(row["verdict"])
    says = f"{row['verdict']}, {row['reason']}" if row["reason"] else row["verdict"]
    if pd.notna(row["lead_steps"]):
        says += f", lead {row['lead_steps']:.0f} steps ({row['lead_low']:.0f} to {row['lead_high']:.0f})"
        says += f"; {row['share_removed_at_start']:.0%} of the baseline's loss is gone when the drop begins"
    return Check(
        part, holds, row["lead_steps"], row["lead_low"], row["lead_high"], int(row["n_seeds"]), f"{part}: {says}"
    )


def _judge_carry(runs: pd.DataFrame, folder: Path) -> Judgement:
    probed = probed_runs(runs, folder)
    checks = [_has_verdict(title, _row(one, "carry"), "quiet") for title, one in probed.items()]
    return Judgement(checks, table=_table(probed), curves=_curves(probed))


def _judge_all(runs: pd.DataFrame, folder: Path) -> Judgement:
    probed = probed_runs(runs, folder)
    checks = []
    for title, one in probed.items():
        for row in one.classified.table.to_dict("records"):
            kind = "carry_k" if row["feature"].startswith("carry_") else row["feature"]
            if wanted := PAPER.get((title.partition(",")[0], kind)):
                check = _has_verdict(title, row, wanted)
                if one.exact_match < SOLVED:
                    check = replace(
                        check, holds=None, says=f"{check.says} (not solved: exact match {one.exact_match:.2f})"
                    )
                checks.append(check)
    return Judgement(checks, table=_table(probed), curves=_curves(probed))


def _judge_order(runs: pd.DataFrame, folder: Path) -> Judgement:
    probed = probed_runs(runs, folder)
    checks = []
    for title, one in probed.items():
        for row in one.classified.table.to_dict("records"):
            if order := _paper_order(title, row["feature"]):
                checks.append(_ordered(title, row, order))
    places = _order_table(probed)
    judged = [
        _paper_order(title, name) is not None for title, name in zip(places["task"], places["feature"], strict=True)
    ]
    return Judgement(checks, table=places.loc[judged], curves=places)


def _paper_order(title: str, feature: str) -> str | None:
    """Which places the paper finds to be first."""
    if feature.startswith("carry"):
        return "early first"
    return "late first" if feature == "queue" and title.startswith("breadth") else None


def _ordered(title: str, row: Mapping[str, Any], wanted: str) -> Check:
    part = f"{title}, {row['feature']}: {wanted}"
    sign = 1 if wanted == "early first" else -1
    ends = sorted(sign * row[name] for name in ("order_low", "order_high"))
    interval = Interval(sign * row["order_rho"], *ends)
    found = f"{row['order_rho']:.2f} ({row['order_low']:.2f} to {row['order_high']:.2f})"
    says = f"rank correlation of place and emergence {found}"
    n = int(row["n_seeds"])
    if n < LEAST_SEEDS or row["verdict"] == "not learned":
        return Check(part, None, *interval, n, f"{part}: {row['verdict']} ({row['reason']})")
    if pd.isna(row["order_rho"]):
        return Check(part, None, *interval, n, f"{part}: too few places beat what the tokens alone give away")
    return of_interval(part, interval, n, says, above=0.0)


def _order_table(probed: Mapping[str, ProbedRuns]) -> pd.DataFrame:
    """One row per task, feature and place: when it is learned, and what the tokens alone give away."""
    rows = []
    for title, one in probed.items():
        places = one.classified.places.groupby(["feature", "place"], sort=False)["emergence_step"].median()
        tables = pd.concat([probes.table for probes in one.probes])
        last = tables.loc[tables["step"] == tables["step"].max()]
        by_place = last.groupby(["feature", "place"], sort=False)
        found = by_place[["prior_loss", "last_token_loss", "bag_loss"]].mean().join(places).reset_index()
        rows.append(
            found.assign(
                task=title,
                tokens_give_away=1 - found[["last_token_loss", "bag_loss"]].min(axis=1) / found["prior_loss"],
            )
        )
    table = pd.concat(rows, ignore_index=True)
    return table.loc[:, ["task", "feature", "place", "emergence_step", "prior_loss", "tokens_give_away"]]


def _judge_u_shape(runs: pd.DataFrame, folder: Path) -> Judgement:
    probed = probed_runs(runs, folder)
    checks = [
        _rises(title, row, one.classified.seeds)
        for title, one in probed.items()
        for row in one.classified.table.to_dict("records")
        if row["verdict"] == "quiet"
    ]
    if not checks:
        checks = [Check("quiet features", None, NAN, NAN, NAN, 0, "quiet features: there are none in these runs")]
    risen = [check.holds for check in checks]
    verdict = "holds" if any(risen) else "does not hold" if risen and all(each is False for each in risen) else None
    return Judgement(checks, verdict=verdict or "not settled", table=_rise_table(probed), curves=_curves(probed))


def _rises(title: str, row: Mapping[str, Any], seeds: pd.DataFrame) -> Check:
    part = f"{title}, {row['feature']}: rises again"
    interval = Interval(row["rise"], row["rise_low"], row["rise_high"])
    n = int(seeds.loc[seeds["feature"] == row["feature"], "rise"].notna().sum())
    says = f"by {interval.value:.1%} of the way from baseline to best ({interval.low:.1%} to {interval.high:.1%})"
    if n < LEAST_SEEDS:
        return Check(part, None, NAN, NAN, NAN, n, f"{part}: {n} seeds")
    return of_interval(part, interval, n, says, above=RISEN)


def _rise_table(probed: Mapping[str, ProbedRuns]) -> pd.DataFrame:
    columns = ["feature", "verdict", "rise", "rise_low", "rise_high", "share_removed"]
    tables = [one.classified.table.loc[:, columns].assign(task=title) for title, one in probed.items()]
    return pd.concat(tables, ignore_index=True).loc[:, ["task", *columns]]


def _judge_warning(runs: pd.DataFrame, folder: Path) -> Judgement:
    ((title, one),) = probed_runs(runs, folder).items()
    quiet = one.classified.quiet
    found = early_warning(one.probes, one.metrics, quiet or one.classified.table["feature"])
    between = _interval(found.steps_between, found.steps_low, found.steps_high)
    ranks = _interval(found.correlation, found.correlation_low, found.correlation_high)
    first, second = (
        f"{title}, the warning comes before the transition",
        f"{title}, its step predicts that of the transition",
    )
    by = ", ".join(found.features)
    checks = [
        _warned(first, between, found, f"{_span(between, 0)} steps, by {by}", quiet=bool(quiet)),
        _warned(second, ranks, found, f"rank correlation {_span(ranks, 2)}", quiet=bool(quiet)),
    ]
    kept = ["task", "run", "warning_step", "transition_step", "steps_between"]
    table = found.table.assign(task=title).loc[:, kept].rename(columns={"run": "seed"})
    return Judgement(checks, table=table, drawn=found)


def _warned(part: str, interval: Interval, found: EarlyWarning, says: str, *, quiet: bool) -> Check:
    n = len(found.table)
    if not quiet:
        return Check(part, None, *interval, n, f"{part}: no feature is quiet in these runs; {says}")
    return of_interval(part, interval, n, says, above=0.0)


def _interval(*ends: float | None) -> Interval:
    return Interval(*(NAN if end is None else end for end in ends))


def _span(interval: Interval, digits: int) -> str:
    value, low, high = (f"{end:.{digits}f}" for end in interval)
    return f"{value} ({low} to {high})"


def _row(one: ProbedRuns, feature: str) -> Mapping[str, Any]:
    table = one.classified.table
    return table.loc[table["feature"] == feature].iloc[0].to_dict()


def _draw_quiet(_: pd.DataFrame, judgement: Judgement) -> "Figure":
    assert judgement.curves is not None
    return quiet_panels(judgement.curves)


def _draw_order(_: pd.DataFrame, judgement: Judgement) -> "Figure":
    assert judgement.curves is not None
    return order_panels(judgement.curves)


ADDITIONS = (ADDITION_8, ADDITION_12, ADDITION_16)
QUIET_CARRY = Study(arms_of(ADDITIONS), _judge_carry, _draw_quiet, "task", probe_run)
QUIET_FEATURES = Study(arms_of(PROBLEMS), _judge_all, _draw_quiet, "task", probe_run)
POSITION_ORDER = Study(
    arms_of((ADDITION_8, ADDITION_16, MULTIPLICATION, BREADTH_FIRST)), _judge_order, _draw_order, "task", probe_run
)
U_SHAPE = Study(arms_of(PROBLEMS), _judge_u_shape, _draw_quiet, "task", probe_run)
EARLY_WARNING = Study(arms_of((ADDITION_8,), WARNING_SEEDS), _judge_warning, own_plot, "task", probe_run)
