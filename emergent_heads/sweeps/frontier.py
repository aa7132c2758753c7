"""The compute-optimal frontier of a sweep: chosen on the held-out rows of the runs, reported on other rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from emergent_heads.analysis.scaling import Frontier, choose_configurations, frontier_from_tables
from emergent_heads.errors import ArgumentError, nearest, whole_number
from emergent_heads.statistics import share_interval
from emergent_heads.sweeps.budgets import COUNTS, MOST_OFF, Count
from emergent_heads.sweeps.measures import flops_of
from emergent_heads.sweeps.result import SweepResult
from emergent_heads.sweeps.runs import RunSpec
from emergent_heads.training.evaluation import evaluate
from emergent_heads.training.run import Run

REPORT = "report"
"""Split of the rows that the frontier is reported on; training and the choice see others."""
_SETTINGS = ("n_layers", "d_model", "batch_size", "learning_rate", "steps")
_DERIVED = {"steps", "warmup_steps", "evaluate_every", "checkpoints", "tokens_per_batch", "d_head", "d_mlp"}
_ROWS_AT_ONCE = 256


def compute_frontier(
    sweep: SweepResult,
    *,
    only: Mapping[str, Any] | None = None,
    budgets: Sequence[float] | None = None,
    count: Count = "flops",
    n_rows: int = 1000,
    device: str = "cpu",
) -> Frontier:
    """What each compute budget buys at best: loss and exact match over budgets, with the phases and a power law.

    Under each budget the configuration with the lowest mean held-out loss over its seeds is chosen, and all its seeds
    are reported on fresh rows of the split "report". (Where a task has few problems, as an addition of 4 bits, the
    rows of both splits are much the same.) With `only` fixing the size, this is the curve of one size over data
    budgets, each with its best learning rate and batch.

    Args:
        sweep: of `budget_grid`, or of any runs of one task that have several seeds under each budget.
        only: settings that the runs must have, such as `{"d_model": 32, "n_layers": 2}`.
        budgets: FLOPs under which the runs stand, each within 5 %; others are left out. By default runs whose true
            FLOPs lie so close to each other are of one budget, which is then their median.
        count: how FLOPs are counted, as in `budget_grid`.
        n_rows: rows to report on.
        device: where the models are evaluated.

    Raises:
        ArgumentError: runs of several tasks, or that stop when solved, which do not use their budget; no run with
            these settings or budgets; fewer than two budgets left.
        CheckpointError: the last checkpoint of a chosen run cannot be read.

    Example:
        `eh.compute_frontier(eh.run_sweep(eh.budget_grid(...), "sweeps/addition")).plot()`
    """
    if count not in COUNTS:
        raise ArgumentError(f"count must be {' or '.join(COUNTS)}, not {count!r}")
    whole_number("n_rows", n_rows, least=1)
    _check_runs(sweep.runs)
    settings = _settings(sweep)
    table = _candidates(sweep, settings, only or {}, count)
    table = _filed(table, budgets)
    runs = choose_configurations(table, settings)
    specs = {run.name: run for run in sweep.runs}
    chosen = runs.loc[runs["chosen"]]
    reported = [_report(sweep, specs[name], n_rows, device) for name in chosen["run"]]
    seeds = pd.concat(
        [chosen.drop(columns=["chosen", "status"]).reset_index(drop=True), pd.DataFrame(reported)], axis=1
    )
    task = sweep.runs[0].task
    about = {**task.settings(), "path": sweep.path, "only": dict(only or {}), "reported_rows": n_rows, "split": REPORT}
    return frontier_from_tables(runs, seeds, task, settings, x=count, about=about)


def check_frontier(runs: Sequence[RunSpec]) -> None:
    """Raises ArgumentError where no frontier can come of a sweep of the runs."""
    _check_runs(runs)
    planned = np.array([flops_of(run)["flops"] for run in runs])
    if len(np.unique(_groups(planned))) < 2:
        raise ArgumentError(f"a frontier needs at least two budgets; all runs have about {planned[0]:.3g} FLOPs")


def _check_runs(runs: Sequence[RunSpec]) -> None:
    tasks = [{key: value for key, value in run.task.settings().items() if key != "seed"} for run in runs]
    if other := next((task for task in tasks if task != tasks[0]), None):
        raise ArgumentError(
            f"runs of several tasks: {tasks[0]} and {other}; run the sweep again with the runs of one, in the same "
            "folder: nothing is trained twice"
        )
    if stopping := next((run for run in runs if run.training.stop_when_solved), None):
        raise ArgumentError(f"{stopping.name} stops when solved, so it does not use its budget; train it to its end")


def _settings(sweep: SweepResult) -> list[str]:
    """Columns that make a configuration."""
    others = [name for name in sweep.varying if name not in {*_SETTINGS, *_DERIVED}]
    return [*_SETTINGS, *others]


def _candidates(sweep: SweepResult, settings: Sequence[str], only: Mapping[str, Any], count: Count) -> pd.DataFrame:
    """One row per run: its settings, what it was planned to cost, and its selection loss, NaN where it has none."""
    rows = []
    for run, (_, found) in zip(sweep.runs, sweep.table.iterrows(), strict=True):
        columns = {**run.columns, "batch_size": run.training.batch_size(run.task)}
        if unknown := [name for name in only if name not in columns]:
            raise ArgumentError(f"no run has a setting {unknown[0]!r}; {nearest(unknown[0], columns)}")
        if all(columns[name] == value for name, value in only.items()):
            ended = found["status"] in ("solved", "not solved")
            rows.append(
                {
                    "run": run.name,
                    "planned": flops_of(run)[count],
                    **{name: columns[name] for name in settings},
                    "seed": run.seed,
                    **{name: found[name] for name in ("status", "flops", "flops_paper", "sequences", "tokens")},
                    "selection_loss_nats": found["loss_nats"] if ended else float("nan"),
                }
            )
    if not rows:
        raise ArgumentError(f"no run has {', '.join(f'{name} {value}' for name, value in only.items())}")
    return pd.DataFrame(rows)


def _filed(table: pd.DataFrame, budgets: Sequence[float] | None) -> pd.DataFrame:
    """The runs under their budgets, in the column `budget_flops`."""
    planned = table["planned"].to_numpy(float)
    if budgets is None:
        names = _groups(planned)
    else:
        given = np.asarray(budgets, float)
        off = planned[:, None] / given - 1
        nearest_one = np.abs(off).argmin(axis=1)
        close = np.abs(off[np.arange(len(off)), nearest_one]) <= MOST_OFF
        names = np.where(close, given[nearest_one], np.nan)
        if not close.any():
            raise ArgumentError(
                f"no run lies within {MOST_OFF:.0%} of these budgets; the runs have {planned.min():.3g} to "
                f"{planned.max():.3g} FLOPs"
            )
    filed = table.drop(columns="planned").assign(budget_flops=names)
    return filed.loc[filed["budget_flops"].notna(), ["budget_flops", *table.columns.drop("planned")]]


def _groups(planned: np.ndarray) -> np.ndarray:
    """For each run the median of the runs that can be of its budget: not further apart than both ways off it."""
    names = np.empty_like(planned)
    width = (1 + MOST_OFF) / (1 - MOST_OFF)
    left = np.sort(planned)
    while len(left):
        group = left[left <= left[0] * width]
        names[(planned >= group[0]) & (planned <= group[-1])] = np.median(group)
        left = left[len(group) :]
    return names


def _report(sweep: SweepResult, run: RunSpec, n_rows: int, device: str) -> dict[str, Any]:
    """Loss and exact match of a run's last model on the rows of the report."""
    model = Run.open(sweep.path / run.name).series.last.load().to(device)
    rows = run.task.batch(n_rows, seed=run.seed, split=REPORT, device=device)
    found = evaluate(model, rows, rows=_ROWS_AT_ONCE, dtype=run.training.dtype)
    matched = share_interval(round(found.exact_match * n_rows), n_rows)
    return {
        "loss_nats": found.loss_nats,
        "exact_match": found.exact_match,
        "exact_match_low": matched.low,
        "exact_match_high": matched.high,
    }
