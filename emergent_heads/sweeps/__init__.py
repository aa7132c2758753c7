"""Many trainings of small models: a grid of runs, run in parallel, and one tidy table of what came out.

A sweep is a folder of run folders. What a run is called depends on its own settings only, so a sweep that is
interrupted, widened or begun again in the same folder trains just what is missing.
"""

from emergent_heads.sweeps.budgets import BudgetRuns, budget_grid
from emergent_heads.sweeps.file import load_runs
from emergent_heads.sweeps.frontier import check_frontier, compute_frontier
from emergent_heads.sweeps.result import SweepResult, check_axes, event_times
from emergent_heads.sweeps.running import run_sweep
from emergent_heads.sweeps.runs import RunSpec, grid

__all__ = [
    "BudgetRuns",
    "RunSpec",
    "SweepResult",
    "budget_grid",
    "check_axes",
    "check_frontier",
    "compute_frontier",
    "event_times",
    "grid",
    "load_runs",
    "run_sweep",
]
