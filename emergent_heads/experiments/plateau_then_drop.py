"""Within a run, and from run to run over data budgets: the loss stays on a plateau, then drops."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from emergent_heads.analysis.transition import Transition, find_transition
from emergent_heads.experiments.comparisons import LEAST_SEEDS, NAN
from emergent_heads.experiments.probing import ADDITION_8, ADDITION_16, BREADTH_FIRST, SUBARRAY, arms_of
from emergent_heads.experiments.quiet_figures import transition_panels
from emergent_heads.experiments.recipes import ROWS, Recipes
from emergent_heads.experiments.study import Arm, Check, Judgement, Study, select
from emergent_heads.statistics import Interval, bootstrap_mean
from emergent_heads.training.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABRUPT = 5.0
"""Most by which the steps (or data) may grow while the loss comes down from 0.9 to 0.1 of the gap.

An exponential approach to the floor, without any plateau, takes a factor of ln 0.1 / ln 0.9 = 21.9.
"""
SMOOTH = float(np.log(0.1) / np.log(0.9))
_BUDGETS = {
    "small": (80, 113, 160, 226, 320, 453, 640),
    "paper": (500, 1000, 2000, 4000, 8000, 16_000, 32_000),
}


def abrupt(part: str, transition: Transition, *, most: float = ABRUPT) -> Check:
    """Whether the drop of all runs together takes at most a factor of `most`, from 0.9 to 0.1 of the gap."""
    runs = transition.runs
    ended = runs.loc[runs["start"].notna() & runs["end"].notna()]
    n = len(ended)
    if n < LEAST_SEEDS:
        return Check(part, None, NAN, NAN, NAN, n, f"{part}: {n} of {len(runs)} runs came down to 0.1 of the gap")
    factor = Interval(*np.exp(bootstrap_mean(np.log(ended["end"] / ended["start"]).to_numpy(float), seed=0)))
    says = (
        f"from {ended['start'].median():,.0f} to {ended['end'].median():,.0f} {_unit(transition.x)} the loss falls "
        f"from 0.9 to 0.1 of the gap, a factor of {factor.value:.2f} ({factor.low:.2f} to {factor.high:.2f})"
    )
    if n < len(runs):
        says += f"; {len(runs) - n} of {len(runs)} runs did not get there"
    holds = True if factor.high <= most else False if factor.low > most else None
    return Check(part, holds, *factor, n, f"{part}: {says}")


def _unit(x: str) -> str:
    return {"step": "steps", "flops": "FLOPs"}.get(x, x)


def _within(runs: pd.DataFrame, folder: Path) -> Mapping[str, Transition]:
    found = {}
    for title in dict.fromkeys(runs["task"]):
        of_task = [Run.open(folder / name) for name in select(runs, task=title)["run"]]
        if of_task:
            found[title] = find_transition([run.metrics for run in of_task], of_task[0].task)
    return found


def _judge_within(runs: pd.DataFrame, folder: Path) -> Judgement:
    transitions = _within(runs, folder)
    return Judgement(
        [abrupt(title, transition) for title, transition in transitions.items()],
        table=_table(transitions),
        curves=_curves(transitions),
    )


def _data_arms(recipes: Recipes) -> list[Arm]:
    arms = []
    problem, budgets = ADDITION_8.at(recipes.scale), _BUDGETS[recipes.scale]
    share = recipes.steps(budgets[-1]) / budgets[-1]  # to try it out, all shrink together
    for budget in budgets:
        steps = max(1, round(budget * share))
        # Each budget is a training of its own, with a schedule that comes to its end.
        how = {"schedule": "cosine", "warmup_steps": max(1, steps // 10), "checkpoints": [()]}
        runs = recipes.algorithm(problem.task, steps=steps, seed=range(3), **how)
        arms.append(Arm(problem.title, "", steps * ROWS, runs))
    return arms


def _judge_data(runs: pd.DataFrame, folder: Path) -> Judgement:
    ended = select(runs).drop_duplicates("run")
    tables = [rows.loc[:, ["sequences", "loss_nats", "exact_match"]] for _, rows in ended.groupby("seed")]
    task = Run.open(folder / ended["run"].iloc[0]).task
    title = str(ended["task"].iloc[0])
    transitions = {title: find_transition(tables, task, x="sequences")}
    check = abrupt(f"{title}, over data", transitions[title])
    measures = ["sequences", "seed", "loss_nats", "exact_match"]
    return Judgement([check], table=ended.loc[:, measures], curves=_curves(transitions))


def _table(transitions: Mapping[str, Transition]) -> pd.DataFrame:
    rows = [transition.runs.assign(task=title) for title, transition in transitions.items()]
    table = pd.concat(rows, ignore_index=True)
    columns = ["task", "run", "start", "step", "end", "exact_match_step"]
    return table.loc[:, columns].rename(columns={"run": "seed", "step": "transition"})


def _curves(transitions: Mapping[str, Transition]) -> pd.DataFrame:
    return pd.concat(
        [transition.table.assign(task=title) for title, transition in transitions.items()], ignore_index=True
    )


def _draw(x: str, label: str) -> "Callable[[pd.DataFrame, Judgement], Figure]":
    def draw(_: pd.DataFrame, judgement: Judgement) -> "Figure":
        assert judgement.curves is not None
        return transition_panels(judgement.curves, x=x, label=label)

    return draw


PLATEAU_THEN_DROP = Study(
    arms_of((ADDITION_8, ADDITION_16, BREADTH_FIRST, SUBARRAY)), _judge_within, _draw("step", "training step"), "task"
)
DATA_BUDGETS = Study(_data_arms, _judge_data, _draw("sequences", "training sequences"), "sequences")
