"""What the experiments on quiet features share: their runs, and the probes of every run, kept in its folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from emergent_heads import tasks
from emergent_heads.analysis.probes import ProbeSeries, open_probes, probe_series
from emergent_heads.analysis.quiet import QuietFeatures, classify_features
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.registry import Scale
from emergent_heads.experiments.study import Arm, select
from emergent_heads.tasks import AlgorithmicTask
from emergent_heads.training.run import Run

PROBES = "probes"
N_TRAIN, N_TEST = 1000, 500
PAPER_STEPS = 50_000


@dataclass(frozen=True)
class Problem:
    """An algorithmic task at a size that takes about a minute to train.

    Attributes:
        title: in tables and figures.
        task: the task.
        steps: of training.
        paper: title and task of the paper's size, trained for `PAPER_STEPS`.
        n_seeds: runs, where an experiment needs no other number.
    """

    title: str
    task: AlgorithmicTask
    steps: int
    paper: tuple[str, AlgorithmicTask]
    n_seeds: int = 3

    def at(self, scale: Scale) -> "Problem":
        """The problem at the sizes of a scale."""
        return self if scale == "small" else Problem(*self.paper, PAPER_STEPS, self.paper, self.n_seeds)

    def arm(self, recipes: Recipes, n_seeds: int | None = None) -> Arm:
        """Runs of it, one per seed."""
        sized = self.at(recipes.scale)
        runs = recipes.algorithm(sized.task, steps=sized.steps, seed=range(n_seeds or self.n_seeds))
        return Arm(sized.title, "", sized.title, runs)


def arms_of(problems: Sequence[Problem], n_seeds: int | None = None) -> Callable[[Recipes], list[Arm]]:
    """A `Study.arms`: the runs of these problems."""
    return lambda recipes: [problem.arm(recipes, n_seeds) for problem in problems]


ADDITION_8 = Problem("addition, 8 bits", tasks.Addition(8), 400, ("addition, 16 bits", tasks.Addition(16)), n_seeds=5)
ADDITION_12 = Problem("addition, 12 bits", tasks.Addition(12), 600, ("addition, 32 bits", tasks.Addition(32)))
ADDITION_16 = Problem("addition, 16 bits", tasks.Addition(16), 900, ("addition, 64 bits", tasks.Addition(64)))
MULTIPLICATION = Problem(
    "multiplication, 6 bits", tasks.Multiplication(6), 1500, ("multiplication, 16 bits", tasks.Multiplication(16))
)
MAJORITY = Problem(
    "majority of majorities, 16 bits",
    tasks.MajorityOfMajorities(16),
    600,
    ("majority of majorities, 64 bits", tasks.MajorityOfMajorities(64)),
)
SUBARRAY = Problem(
    "maximum subarray, 10 values",
    tasks.MaximumSubarray(10),
    1000,
    ("maximum subarray, 64 values", tasks.MaximumSubarray(64)),
)
ACTIVITIES = Problem(
    "activity selection, 5 activities",
    tasks.ActivitySelection(5),
    1200,
    ("activity selection, 16 activities", tasks.ActivitySelection(16)),
)
BREADTH_FIRST = Problem(
    "breadth-first search, 6 nodes",
    tasks.BreadthFirstSearch(6),
    1500,
    ("breadth-first search, 11 nodes", tasks.BreadthFirstSearch(11)),
)
DEPTH_FIRST = Problem(
    "depth-first search, 6 nodes",
    tasks.DepthFirstSearch(6),
    1200,
    ("depth-first search, 11 nodes", tasks.DepthFirstSearch(11)),
)
PATH = Problem(
    "shortest path, 6 nodes", tasks.ShortestPath(6), 1200, ("shortest path, 11 nodes", tasks.ShortestPath(11))
)
TOPOLOGICAL = Problem(
    "topological sort, 5 nodes",
    tasks.TopologicalSort(5),
    900,
    ("topological sort, 11 nodes", tasks.TopologicalSort(11)),
)
SPANNING_TREE = Problem(
    "minimum spanning tree, 6 nodes",
    tasks.MinimumSpanningTree(6),
    800,
    ("minimum spanning tree, 11 nodes", tasks.MinimumSpanningTree(11)),
)
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
