"""What an experiment is made of, and what comes out: runs in arms, checks of a claim, a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import pandas as pd

from emergent_heads.experiments.recipes import Recipes
from emergent_heads.statistics import Interval, bootstrap_mean, censored_median, restricted_mean, share_interval
from emergent_heads.sweeps import RunSpec, SweepResult, event_times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["holds", "does not hold", "not settled"]

LINEAR_MAP, AUTOMATA = "linear map", "cellular automata"


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed only.

    Attributes:
        task: "linear map" or "cellular automata"; a panel of the figure.
        setting: what tells arms at one `x` apart; a line of the figure. May be "".
        x: value of what is varied; a number, or a name.
        runs: one per seed.
    """

    task: str
    setting: str
    x: "float | str"
    runs: Sequence[RunSpec]


@dataclass(frozen=True)
class Check:
    """One part of a claim.

    Attributes:
        part: what was looked at.
        holds: True, False, or None where the runs do not settle it.
        value, low, high: the measure with its 95 % interval.
        n_seeds: seeds that went into it.
        says: the outcome in words.
    """

    part: str
    holds: bool | None
    value: float
    low: float
    high: float
    n_seeds: int
    says: str


class HasPlot(Protocol):
    def plot(self) -> "Figure": ...


@dataclass(frozen=True)
class Judgement:
    """What came out of the runs of an experiment.

    Attributes:
        checks: the parts of the claim.
        verdict: None for the usual one: holds if all parts do, does not hold if one does not.
        table: a table of the experiment's own; None for a row per arm.
        curves: what the figure shows beside the runs; None for nothing.
        drawn: a result of the library whose own plot is the figure; None where the study draws it.
    """

    checks: Sequence[Check]
    verdict: Verdict | None = None
    table: pd.DataFrame | None = None
    curves: pd.DataFrame | None = None
    drawn: "HasPlot | None" = None

    @property
    def final(self) -> Verdict:
        return self.verdict or verdict_of([check.holds for check in self.checks])


@dataclass(frozen=True)
class Study:
    """How one experiment is done.

    Attributes:
        arms: its runs.
        judge: what they say; gets one row per run (see `runs_table`) and the folder of the run folders.
        draw: the figure, from the same rows and the judgement.
        varied: what `Arm.x` is, for the table and the axis.
        measure: what else is measured of a trained run, from its folder, once: it keeps what it finds there. None for
            nothing.
    """

    arms: Callable[[Recipes], list[Arm]]
    judge: Callable[[pd.DataFrame, Path], Judgement]
    draw: "Callable[[pd.DataFrame, Judgement], Figure]"
    varied: str
    measure: "Callable[[Path], None] | None" = None


def verdict_of(parts: Sequence[bool | None]) -> Verdict:
    """Holds if every part does, does not hold if any does not, and is not settled otherwise."""
    if any(part is False for part in parts):
        return "does not hold"
    return "holds" if parts and all(parts) else "not settled"


def runs_table(arms: Sequence[Arm], sweep: SweepResult) -> pd.DataFrame:
    """One row per arm and run: `task`, `setting`, `x`, and the sweep's columns; a run may stand in several arms."""
    measures = sweep.table.set_index("run")
    rows = [
        {"task": arm.task, "setting": arm.setting, "x": arm.x, "run": run.name, "seed": run.seed}
        for arm in arms
        for run in arm.runs
    ]
    kept = [name for name in measures if name not in {*sweep.varying, "seed", "task_seed"} or name == "steps"]
    return pd.DataFrame(rows).join(measures[kept], on="run")


def arms_table(runs: pd.DataFrame, varied: str) -> pd.DataFrame:
    """One row per arm: seeds, how many solved, steps (restricted means with intervals), what was learned, seconds."""
    rows = []
    for key, group in runs.groupby(["task", "setting", "x"], sort=False):
        task, setting, x = cast(tuple[str, str, Any], key)
        there = group.loc[group["status"] != "failed"]
        solved = int(there["step_solved"].notna().sum())
        row = {"task": task, "setting": setting, varied: x, "n_seeds": len(there), "n_solved": solved}
        row |= _named("share_solved", share_interval(solved, len(there)))
        for event in ("step_solved", "step_left_plateau"):
            row |= _named(f"restricted_mean_{event}", restricted_steps(there, event))
            row[f"median_{event}"] = censored_median(*event_times(there, event)).value
        for measure in ("share_learned", "excess_loss_nats"):
            row |= _named(measure, bootstrap_mean(there[measure].to_numpy(float), seed=0))
        row |= {"n_parameters": there["n_parameters"].max(), "seconds_per_run": there["seconds"].mean()}
        rows.append(row)
    return pd.DataFrame(rows)


def restricted_steps(rows: pd.DataFrame, event: str) -> Interval:
    """Restricted mean of the steps to an event, over runs."""
    if rows.empty:
        return Interval(*[float("nan")] * 3)
    return restricted_mean(*event_times(rows, event), float(rows["steps"].min()), seed=0)


def settings_of(arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
    """Per task, the settings that all of its runs share."""
    shared = {}
    for task in dict.fromkeys(arm.task for arm in arms):
        columns = pd.DataFrame([run.columns for arm in arms if arm.task == task for run in arm.runs])
        same = [name for name in columns if columns[name].map(repr).nunique() == 1]
        shared[task] = {name: columns[name].iloc[0] for name in same}
    return shared


def select(runs: pd.DataFrame, **values: object) -> pd.DataFrame:
    """The rows with these values that were trained."""
    chosen = runs["status"] != "failed"
    for name, value in values.items():
        chosen &= runs[name] == value
    return runs.loc[chosen]


def _named(name: str, interval: Interval) -> Mapping[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def own_plot(_: pd.DataFrame, judgement: Judgement) -> "Figure":
    """A `Study.draw`: the plot of the result that was judged."""
    assert judgement.drawn is not None
    return judgement.drawn.plot()
