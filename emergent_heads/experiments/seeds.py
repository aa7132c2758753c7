"""Finding 11: at a fixed configuration, which seeds solve the task, and when, is random."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from jaxtyping import Float

from emergent_heads.experiments.comparisons import NAN
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import AUTOMATA, LINEAR_MAP, Arm, Check, Judgement, Study, select
from emergent_heads.plots.figure import new_figure
from emergent_heads.plots.look import BLUE, style
from emergent_heads.randomness import numpy_generator
from emergent_heads.statistics import Interval
from emergent_heads.sweeps import event_times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_SEEDS = 10
SAME = 1.1
"""Factor by which steps to solve must vary to count as different."""


def _arms(recipes: Recipes) -> list[Arm]:
    fixed = {"task_seed": 0, "seed": range(N_SEEDS)}  # the matrix and the tables are the same for all seeds
    return [
        Arm(LINEAR_MAP, "", LINEAR_MAP, recipes.linear_map(**fixed)),
        Arm(AUTOMATA, "", AUTOMATA, recipes.automata(**fixed)),
    ]


def _judge(runs: pd.DataFrame, _: Path) -> Judgement:
    return Judgement([_spread(task, select(runs, task=task)) for task in (LINEAR_MAP, AUTOMATA)])


def _spread(task: str, runs: pd.DataFrame) -> Check:
    steps, never = event_times(runs, "step_solved")
    part, n = f"{task}, spread of steps to solve", len(runs)
    if n < N_SEEDS or never.all():
        return Check(part, None, NAN, NAN, NAN, n, f"{part}: {n} seeds, {never.sum()} never solved it")
    interval = spread_factor(np.maximum(steps, 1.0))
    holds = True if interval.low > SAME else False if interval.high < SAME else None
    last = "never" if never.any() else f"{steps.max():.0f}"
    return Check(
        part,
        holds,
        *interval,
        n,
        f"{part}: a factor of {interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f}) over {n} seeds, from "
        f"step {steps.min():.0f} to {last}; {never.sum()} never solved it",
    )


def spread_factor(steps: Float[np.ndarray, " seed"], *, level: float = 0.95, n_resamples: int = 2000) -> Interval:
    """Exponential of the standard deviation of log steps, with a percentile bootstrap interval over seeds."""
    logs = np.log(steps)
    rows = numpy_generator(0, "spread", len(logs)).integers(len(logs), size=(n_resamples, len(logs)))
    low, high = np.quantile(np.exp(logs[rows].std(axis=1, ddof=1)), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.exp(logs.std(ddof=1))), float(low), float(high))


def _draw(runs: pd.DataFrame, _: Judgement) -> "Figure":
    """Share of the seeds that have solved the task by each step."""
    with style():
        figure = new_figure(7.2, 3.1)
        grid = figure.subplots(1, 2, sharey=True)
        for axes, task in zip(grid, (LINEAR_MAP, AUTOMATA), strict=True):
            steps, never = event_times(select(runs, task=task), "step_solved")
            solved = np.sort(steps[~never])
            share = np.arange(1, len(solved) + 1) / max(1, len(steps))
            ends = np.concatenate([[0.0], solved, [steps.max() if len(steps) else 1.0]])
            axes.step(ends, np.concatenate([[0.0], share, share[-1:] if len(share) else [0.0]]), where="post")
            axes.plot(solved, share, "o", color=BLUE)
            axes.set(title=task, xlabel="training step", xlim=(0, None), ylim=(-0.03, 1.03))
        grid[0].set_ylabel(f"share of {N_SEEDS} seeds that have solved it")
    return figure


SEEDS = Study(_arms, _judge, _draw, "configuration")
