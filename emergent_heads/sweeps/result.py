"""What came out of a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from emergent_heads.errors import ArgumentError, EmergentHeadsError, nearest
from emergent_heads.plots import sweeps as sweep_plots
from emergent_heads.results import Result
from emergent_heads.statistics import Interval, bootstrap_mean, censored_median, restricted_mean, share_interval
from emergent_heads.sweeps.measures import AT_THE_END, EVENTS, PLATEAU_LEFT
from emergent_heads.sweeps.runs import EARLIER, RunSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Outcome:
    """What became of one run: the measures, or the error.

    Attributes:
        measures: columns of the table.
        error: in one line.
        traceback: of the error.
    """

    measures: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    traceback: str = ""

    @classmethod
    def failed(cls, error: BaseException, told: str) -> "Outcome":
        """Of an error and its traceback, which may be that of another process."""
        own = isinstance(error, EmergentHeadsError)
        said = " ".join((str(error) if own else f"{type(error).__name__}: {error}").split())
        return cls(error=said, traceback=told)


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class SweepResult(Result):
    """What came out of a sweep.

    Attributes:
        table: one row per run: `run` (its folder), the settings that differ between the runs, `seed`, and
            `status`: "solved", "not solved", "diverged" (the loss was no number) or "failed" (see `error`);
            `step_left_plateau`: first evaluated step whose held-out loss has come 0.06 of the way from the task's
            plateau to its floor; `step_solved`: first evaluated step that is solved as `TrainingSettings.solved_at`
            says; both missing where the run never got there by its `last_step`, of the `steps` it was to have;
            `share_learned`, of the answer positions, at the end; `loss_nats` on held-out data at the end and
            `excess_loss_nats`, that minus the floor;
            `exact_match`, the share of held-out answers that were right as a whole at the end;
            `n_parameters`; `sequences` trained on, and their `tokens`; `flops` of the training, forward and backward,
            in matrix products and convolutions; `flops_paper`, by the formula of arXiv 2505.03997 (no padding, no
            unembedding; attention only); `seconds`; `error`.
        runs: the runs, in the order of the rows.
        path: the folder of the sweep; `path / run` is the folder of a run.
        varying: the columns of the settings that differ, without the seeds.
    """

    runs: tuple[RunSpec, ...]
    path: Path
    varying: tuple[str, ...]

    @property
    def failures(self) -> dict[str, str]:
        """Run -> its error, for runs that failed."""
        failed = self.table.loc[self.table["status"] == "failed"]
        return dict(zip(failed["run"], failed["error"], strict=True))

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per combination of the settings that differ, over its seeds.

        Columns: `n_seeds`, `n_failed` (not counted in what follows), `n_diverged`; `n_solved` and `share_solved` with
        its exact interval. For `step_solved` and `step_left_plateau`: the `median_` (Kaplan-Meier; infinite where half
        of the seeds never got there) and the `restricted_mean_` up to `restricted_to_step`, the fewest steps that a
        seed was to have, with a bootstrap interval over seeds; a run that never got there is censored at its last
        step, one that diverged at the last it was to have. Means with bootstrap intervals of `share_learned` and
        `excess_loss_nats` at the end.
        """
        if not self.varying:
            return pd.DataFrame([_summarise(self.table)])
        groups = self.table.groupby(list(self.varying), sort=False, dropna=False)
        rows = [
            {**dict(zip(self.varying, cast(tuple[Any, ...], values), strict=True)), **_summarise(rows)}
            for values, rows in groups
        ]
        return pd.DataFrame(rows)

    def headline(self) -> str:
        counts = self.table["status"].value_counts()
        said = ", ".join(f"{count} {status}" for status, count in counts.items())
        return f"sweep of {len(self.table)} runs: {said}"

    def shown(self) -> pd.DataFrame:
        kept = [*self.varying, "seed", "status", *EVENTS, *AT_THE_END, "seconds"]
        return self.table.loc[:, kept]

    def plot(self, x: str | None = None, y: str = "step_solved", by: str | Sequence[str] | None = None) -> "Figure":
        """A measure against a setting: a dot per run, crosses for runs that never got there, and a line of means.

        The line of steps is the restricted mean, of other measures the mean, with the 95 % intervals over seeds.

        Args:
            x: a setting that differs between the runs; by default the first one, and where none does, all runs stand
                in one place.
            y: "step_solved", "step_left_plateau" or another measure.
            by: setting or settings to tell apart by colour; by default those that differ at one and the same `x`.

        Raises:
            ArgumentError: no such column, or all runs failed.
        """
        of_runs = self.table
        if x is None and not self.varying:
            x, of_runs = "runs", self.table.assign(runs="all seeds")
            _check_axes([x], x, y)
        else:
            x = self.varying[0] if x is None else x
            _check_axes(self.varying, x, y)
        others = [name for name in self.varying if name != x]
        if by is None:
            by = []
            for name in others:  # not what x, or the settings already chosen, decide
                if of_runs.groupby([x, *by], dropna=False)[name].nunique(dropna=False).max() > 1:
                    by.append(name)
        keys = [by] if isinstance(by, str) else list(by)
        if unknown := [name for name in keys if name not in others]:
            raise ArgumentError(f"no setting {unknown[0]!r} that differs besides {x}; {nearest(unknown[0], others)}")
        table = of_runs.loc[of_runs["status"] != "failed"]
        if table.empty:
            raise ArgumentError(f"all {len(of_runs)} runs failed, so there is nothing to draw: see .failures")
        means = _means(table, keys, x, y)
        if y in EVENTS:
            times, censored = event_times(table, y)
            table = table.assign(**{y: times, "censored": censored})
        return sweep_plots.sweep(table, means, x=x, y=y, by=keys)


def sweep_result(runs: Sequence[RunSpec], outcomes: Mapping[str, Outcome], path: Path) -> SweepResult:
    """The table of the runs, in their order, with what became of each by its name."""
    settings = pd.DataFrame([run.columns for run in runs])
    differing = _varying(settings)
    varying = _without_seeds(differing)
    shown = [*varying, "seed"]
    if "task_seed" in differing and not settings["task_seed"].equals(settings["seed"]):
        shown.append("task_seed")
    measured = pd.DataFrame([_row(run, outcomes[run.name]) for run in runs])
    told = [name for name in shown if name not in measured]  # the steps stand among what was measured
    table = pd.concat([measured[["run"]], settings[told], measured.drop(columns="run")], axis=1)
    about = {
        "path": path,
        "settings": {name: settings[name].iloc[0] for name in settings if name not in {*differing, "seed"}},
        "step_left_plateau": f"held-out loss {PLATEAU_LEFT} of the way from plateau to floor",
    }
    return SweepResult(table.astype(_TYPES), runs=tuple(runs), path=path, varying=varying, about=about)


def varying_settings(runs: Sequence[RunSpec]) -> tuple[str, ...]:
    """Columns of the settings in which the runs differ, without the seeds."""
    return _without_seeds(_varying(pd.DataFrame([run.columns for run in runs])))


def check_axes(runs: Sequence[RunSpec], x: str, y: str) -> None:
    """Raises ArgumentError where a sweep of the runs cannot be drawn with `y` against `x`."""
    _check_axes(varying_settings(runs), x, y)


def _check_axes(varying: Sequence[str], x: str, y: str) -> None:
    if x not in varying:
        raise ArgumentError(f"no setting {x!r} that differs between the runs; {nearest(x, varying)}")
    measures = [*EVENTS, *(name for name in _TYPES if name not in EVENTS and name != "last_step")]
    if y not in measures:
        raise ArgumentError(f"no measure {y!r}; {nearest(y, measures)}")


def _varying(settings: pd.DataFrame) -> list[str]:
    # Settings of earlier runs are compared where there is one: that there is none is told by `init_from`.
    compared = {name: settings[name].dropna() if name.startswith(EARLIER) else settings[name] for name in settings}
    return [str(name) for name, values in compared.items() if values.map(repr).nunique() > 1]


def _without_seeds(settings: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in settings if name not in ("seed", "task_seed"))


_TYPES: Mapping[str, Any] = {
    **dict.fromkeys((*EVENTS, "last_step"), "Int64"),
    **dict.fromkeys((*AT_THE_END, "loss_nats", "exact_match"), "float64"),
    **dict.fromkeys(("n_parameters", "sequences"), "Int64"),
    **dict.fromkeys(("tokens", "flops", "flops_paper", "seconds"), "float64"),
}


def _row(run: RunSpec, outcome: Outcome) -> dict[str, Any]:
    empty = {"run": run.name, "status": "failed", "steps": run.training.steps, **dict.fromkeys(_TYPES)}
    order = ["run", "status", *EVENTS, "steps", "last_step", *AT_THE_END, "loss_nats"]
    values = {**empty, **outcome.measures, "error": outcome.error}
    return {name: values[name] for name in [*order, *(name for name in values if name not in order)]}


def _summarise(rows: pd.DataFrame) -> dict[str, Any]:
    there = rows.loc[rows["status"] != "failed"]
    solved = int(there["step_solved"].notna().sum())
    summary: dict[str, Any] = {
        "n_seeds": len(there),
        "n_failed": len(rows) - len(there),
        "n_diverged": int((there["status"] == "diverged").sum()),
        "n_solved": solved,
        **_columns("share_solved", share_interval(solved, len(there))),
        "restricted_to_step": there["steps"].min() if len(there) else pd.NA,
    }
    for event in reversed(EVENTS):
        summary |= _columns(f"median_{event}", censored_median(*event_times(there, event)))
        summary |= _columns(f"restricted_mean_{event}", _restricted(there, event))
    for measure in AT_THE_END:
        summary |= _columns(measure, _mean(there[measure]))
    return summary


def _restricted(rows: pd.DataFrame, event: str) -> Interval:
    horizon = float(rows["steps"].min()) if len(rows) else 0.0
    return restricted_mean(*event_times(rows, event), horizon, seed=0)


def _means(table: pd.DataFrame, by: Sequence[str], x: str, y: str) -> pd.DataFrame:
    """Means with intervals at each `x` of each group."""
    rows = []
    for values, group in table.groupby([*by, x], sort=False, dropna=False):
        interval = _restricted(group, y) if y in EVENTS else _mean(group[y])
        place = dict(zip([*by, x], cast(tuple[Any, ...], values), strict=True))
        rows.append({**place, "value": interval.value, "low": interval.low, "high": interval.high})
    return pd.DataFrame(rows)


def _mean(values: pd.Series) -> Interval:
    known = values.dropna().to_numpy(float)
    return bootstrap_mean(known, seed=0) if len(known) else Interval(*[float("nan")] * 3)


def event_times(table: pd.DataFrame, event: str) -> "tuple[Float[np.ndarray, ' run'], Bool[np.ndarray, ' run']]":
    """Steps to an event of `SweepResult.table`, and which of them are censored, for `emergent_heads.statistics`.

    A run that never got there is censored at its last step, and one that diverged, which never will get there, at the
    last step it was to have. Rows of failed runs have no place here.
    """
    censored = table[event].isna().to_numpy(bool)
    end = np.where(table["status"] == "diverged", table["steps"], table["last_step"]).astype(float)
    return np.where(censored, end, table[event].fillna(0).to_numpy(float)), censored


def _columns(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
