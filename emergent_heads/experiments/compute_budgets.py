"""On the compute-optimal frontier the loss sinks slowly, then drops."""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from emergent_heads.analysis.scaling import Frontier
from emergent_heads.analysis.transition import LossRange, find_transition
from emergent_heads.experiments.comparisons import NAN
from emergent_heads.experiments.plateau_then_drop import abrupt
from emergent_heads.experiments.probing import ADDITION_8
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import Arm, Check, Judgement, Study, own_plot, select
from emergent_heads.sweeps import RunSpec, budget_grid, compute_frontier, run_sweep
from emergent_heads.training.run import Run

DECADE = 10.0
"""Most by which the budget may grow while the loss drops: the paper's budgets are that far apart."""
_BUDGETS = {
    "small": tuple(10**power for power in (9.5, 10, 10.5, 10.75, 11, 11.25, 11.5)),
    "paper": tuple(10.0**power for power in range(10, 15)),
}


def _arms(recipes: Recipes) -> list[Arm]:
    problem = ADDITION_8.at(recipes.scale)
    arms: dict[tuple[float, str], list[RunSpec]] = {}
    for budget in _BUDGETS[recipes.scale]:
        runs = budget_grid(
            problem.task,
            budget,
            d_model=recipes.sized(small=[8, 16, 32, 64], paper=[8, 16, 32, 64, 128, 256, 512]),
            n_layers=recipes.sized(small=2, paper=[4, 16]),
            learning_rate=recipes.sized(small=[1e-2, 3e-3], paper=[1e-1, 1e-2, 1e-3, 1e-4]),
            seeds=range(3),
            max_steps=recipes.sized(small=1200, paper=100_000),
        )
        for run in runs:
            setting = f"{run.config.n_layers} x {run.config.d_model}, lr {run.training.learning_rate:g}"
            arms.setdefault((budget, setting), []).append(_cut_short(run, recipes))
    return [Arm(problem.title, setting, budget, runs) for (budget, setting), runs in arms.items()]


def _cut_short(run: RunSpec, recipes: Recipes) -> RunSpec:
    """The run with no more steps than the recipes allow, to try it out."""
    steps = recipes.steps(run.training.steps)
    if steps == run.training.steps:
        return run
    shorter = replace(run.training, steps=steps, checkpoints=(), warmup_steps=steps // 10, evaluate_every=steps)
    return replace(run, training=shorter)


def frontier_of(runs: pd.DataFrame, folder: Path) -> Frontier:
    """The frontier of runs that were trained."""
    trained = [Run.open(folder / name) for name in select(runs)["run"].unique()]
    specs = [RunSpec(run.config, run.task, run.settings, run.seed) for run in trained]
    return compute_frontier(run_sweep(specs, folder, workers=0, progress=False))


def _judge(runs: pd.DataFrame, folder: Path) -> Judgement:
    frontier = frontier_of(runs, folder)
    title = str(runs["task"].iloc[0])
    tables = [rows for _, rows in frontier.seeds.groupby("seed")]
    drop = abrupt(title, find_transition(tables, LossRange(frontier.plateau, frontier.floor), x="flops"), most=DECADE)
    return Judgement([drop, _leaves(title, frontier)], table=_table(frontier), drawn=frontier)


def _leaves(title: str, frontier: Frontier) -> Check:
    """Whether the drop is more than the power law of the budgets before it goes on."""
    part, n = f"{title}, the drop leaves the power law", frontier.seeds["seed"].nunique()
    if frontier.law is None:
        return Check(part, None, NAN, NAN, NAN, n, f"{part}: too few budgets before the drop to fit one")
    exponent = frontier.law.exponent
    law = f"loss above the floor falls as C^-{exponent.value:.3f} ({exponent.low:.3f} to {exponent.high:.3f})"
    if frontier.leaves_at is None:
        return Check(part, False, *exponent, n, f"{part}: {law} throughout")
    return Check(part, True, *exponent, n, f"{part}: {law}, and leaves it at {frontier.leaves_at:.2g} FLOPs")


def _table(frontier: Frontier) -> pd.DataFrame:
    columns = ["budget_flops", "phase", "d_model", "learning_rate", "steps", "loss_nats", "exact_match"]
    return frontier.table.loc[:, [name for name in columns if name in frontier.table]]


COMPUTE_BUDGETS = Study(_arms, _judge, own_plot, "budget_flops")
