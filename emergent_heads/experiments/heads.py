"""Findings 5 and 6: more heads help; larger heads help, less and less, and automata need a minimum."""

from pathlib import Path

import numpy as np
import pandas as pd

from emergent_heads.experiments.comparisons import LEAST_SEEDS, in_order, log_savings, slower
from emergent_heads.experiments.figures import by_setting
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import AUTOMATA, LINEAR_MAP, Arm, Check, Judgement, Study
from emergent_heads.statistics import bootstrap_mean

FIXED_WIDTH, FIXED_SIZE = "fixed width", "fixed head size"


def _heads(recipes: Recipes) -> list[Arm]:
    numbers = recipes.sized(small=[1, 2, 4, 8, 16], paper=[1, 2, 4, 8, 16, 32, 64, 128])
    size = recipes.sized(small=8, paper=16)
    width = recipes.sized(small=64, paper=128)
    seeds = range(3)
    arms = []
    for task, runs in ((LINEAR_MAP, recipes.linear_map), (AUTOMATA, recipes.automata)):
        for n in numbers:
            arms.append(Arm(task, FIXED_WIDTH, n, runs(n_heads=n, d_model=width, seed=seeds)))
        for n in numbers:
            arms.append(Arm(task, FIXED_SIZE, n, runs(n_heads=n, d_model=n * size, seed=seeds)))
    return arms


def _judge_heads(runs: pd.DataFrame, _: Path) -> Judgement:
    checks = []
    for task in (LINEAR_MAP, AUTOMATA):
        for setting in (FIXED_WIDTH, FIXED_SIZE):
            fewest, *_others, most = in_order(runs, task=task, setting=setting)
            part = f"{task}, {setting}, {_x(fewest)} against {_x(most)} heads"
            checks.append(slower(part, fewest, most))
    return Judgement(checks)


def _dimensions(recipes: Recipes) -> list[Arm]:
    dimensions = recipes.sized(small=[1, 2, 4, 8, 16], paper=[1, 2, 4, 8, 16, 32, 64])
    seeds = range(recipes.sized(small=5, paper=3))
    return [
        Arm(task, "", dimension, runs(d_head=dimension, seed=seeds))
        for task, runs in ((LINEAR_MAP, recipes.linear_map), (AUTOMATA, recipes.automata))
        for dimension in dimensions
    ]


def _judge_dimensions(runs: pd.DataFrame, _: Path) -> Judgement:
    linear_map, automata = (in_order(runs, task=task) for task in (LINEAR_MAP, AUTOMATA))
    ends = f"heads of {_x(linear_map[0])} against {_x(linear_map[-1])}"
    return Judgement(
        [
            slower(f"{LINEAR_MAP}, {ends}", linear_map[0], linear_map[-1]),
            _diminishing(linear_map),
            slower(f"{AUTOMATA}, {ends}", automata[0], automata[-1], above=2.0),
        ]
    )


def _diminishing(arms: list[pd.DataFrame]) -> Check:
    """Whether the first half of the doublings saves more, in log steps, than the second half."""
    part = f"{LINEAR_MAP}, diminishing returns"
    savings = log_savings(arms, "step_solved")
    half = len(savings) // 2
    per_seed = savings[:half].sum(axis=0) - savings[half:].sum(axis=0)
    interval = bootstrap_mean(np.asarray(per_seed), seed=0)
    n = len(per_seed)
    holds = True if interval.low > 0 else False if interval.high < 0 else None
    says = (
        f"{part}: the first {half} doublings save {interval.value:+.2f} log steps more than the others "
        f"({interval.low:+.2f} to {interval.high:+.2f})"
    )
    return Check(part, holds if n >= LEAST_SEEDS else None, *interval, n, says)


def _x(rows: pd.DataFrame) -> str:
    return f"{rows['x'].iloc[0]:g}"


HEADS = Study(_heads, _judge_heads, by_setting("heads"), "n_heads")
HEAD_DIMENSION = Study(_dimensions, _judge_dimensions, by_setting("head dimension"), "d_head")
