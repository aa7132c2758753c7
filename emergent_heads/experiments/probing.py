"""What the experiments on quiet features share: their runs, and the probes of every run, kept in its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from emergent_heads import tasks
from emergent_heads.analysis.probes import ProbeSeries, open_probes, probe_series
from emergent_heads.analysis.quiet import QuietFeatures, classify_features
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import Arm, Check, select
from emergent_heads.statistics import Interval
from emergent_heads.tasks import AlgorithmicTask
from emergent_heads.training.run import Run

PROBES = "probes"
N_TRAIN, N_TEST = 1000, 500


@dataclass(frozen=True)
class Problem:
    """An algorithmic task at a size that takes about a minute to train.

    Attributes:
        title: in tables and figures.
        task: the task.
        steps: of training.
        n_layers: blocks of the model.
        n_seeds: runs, where an experiment needs no other number.
    """

    title: str
    task: AlgorithmicTask
    steps: int
    n_layers: int = 2
    n_seeds: int = 3

    def arm(self, recipes: Recipes, n_seeds: int | None = None) -> Arm:
        """Runs of it, one per seed."""
        seeds = range(n_seeds or self.n_seeds)
        runs = recipes.algorithm(self.task, steps=self.steps, n_layers=self.n_layers, seed=seeds)
        return Arm(self.title, "", self.title, runs)


ADDITION_8 = Problem("addition, 8 bits", tasks.Addition(8), 400, n_seeds=5)
ADDITION_12 = Problem("addition, 12 bits", tasks.Addition(12), 600)
ADDITION_16 = Problem("addition, 16 bits", tasks.Addition(16), 900)
MULTIPLICATION = Problem("multiplication, 6 bits", tasks.Multiplication(6), 1500)
MAJORITY = Problem("majority of majorities, 16 bits", tasks.MajorityOfMajorities(16), 600)
SUBARRAY = Problem("maximum subarray, 10 values", tasks.MaximumSubarray(10), 1000)
ACTIVITIES = Problem("activity selection, 5 activities", tasks.ActivitySelection(5), 1200)
BREADTH_FIRST = Problem("breadth-first search, 6 nodes", tasks.BreadthFirstSearch(6), 1500)
DEPTH_FIRST = Problem("depth-first search, 6 nodes", tasks.DepthFirstSearch(6), 1200)
PATH = Problem("shortest path, 6 nodes", tasks.ShortestPath(6), 1200)
TOPOLOGICAL = Problem("topological sort, 5 nodes", tasks.TopologicalSort(5), 900)
SPANNING_TREE = Problem("minimum spanning tree, 6 nodes", tasks.MinimumSpanningTree(6), 800)
PROBLEMS = (
    ADDITION_8,
    MULTIPLICATION,
    MAJORITY,
    SUBARRAY,
    ACTIVITIES,
    BREADTH_FIRST,
    DEPTH_FIRST,
    PATH,
    TOPOLOGICAL,
    SPANNING_TREE,
)
"""Every task, at a size that takes about a minute to train. All but multiplication are solved by then."""


def probe_run(folder: Path) -> None:
    """Probes all features at all checkpoints of a run, once: the probes stay in its folder."""
    run = Run.open(folder)
    probe_series(
        run.series, run.task, path=folder / PROBES, n_train=N_TRAIN, n_test=N_TEST, seed=run.seed, progress=False
    )


@dataclass(frozen=True)
class ProbedRuns:
    """The runs of one task that were trained and probed, in the order of their seeds."""

    title: str
    folders: Sequence[Path]

    @cached_property
    def runs(self) -> list[Run]:
        return [Run.open(folder) for folder in self.folders]

    @cached_property
    def probes(self) -> list[ProbeSeries]:
        return [open_probes(folder / PROBES) for folder in self.folders]

    @property
    def metrics(self) -> list[pd.DataFrame]:
        return [run.metrics for run in self.runs]

    @property
    def task(self) -> AlgorithmicTask:
        task = self.runs[0].task
        assert isinstance(task, AlgorithmicTask)
        return task

    @cached_property
    def exact_match(self) -> float:
        """Share of exact matches in the end, mean over the runs."""
        return float(np.mean([metrics["exact_match"].iloc[-1] for metrics in self.metrics]))

    @cached_property
    def classified(self) -> QuietFeatures:
        """Its features, quiet and loud."""
        return classify_features(self.probes, self.metrics)


def probed_runs(runs: pd.DataFrame, folder: Path) -> Mapping[str, ProbedRuns]:
    """The runs of an experiment by task, from the rows of `runs_table`."""
    found = {}
    for title in dict.fromkeys(runs["task"]):
        rows = select(runs, task=title).sort_values("seed")
        if len(rows):
            found[title] = ProbedRuns(title, [folder / name for name in rows["run"]])
    return found


def of_interval(part: str, interval: Interval, n_seeds: int, says: str, *, above: float, below: float) -> Check:
    """Holds if the whole interval lies above `above`, does not hold if it lies wholly below `below`."""
    holds = True if interval.low > above else False if interval.high < below else None
    return Check(part, holds, *interval, n_seeds, f"{part}: {says}")
