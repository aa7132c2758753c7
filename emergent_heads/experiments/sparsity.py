"""Finding 4: medium sparsity is the hardest, and with s = S only the shared parity is copied."""

from pathlib import Path

import numpy as np
import pandas as pd

from emergent_heads.experiments.comparisons import more
from emergent_heads.experiments.figures import by_setting
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import LINEAR_MAP, Arm, Check, Judgement, Study, select
from emergent_heads.statistics import share_interval
from emergent_heads.training.run import Run

COPIED = 0.6
"""Accuracy of the first output bit below which it counts as not learned: chance is one half."""


def _arms(recipes: Recipes) -> list[Arm]:
    size = recipes.sized(small=10, paper=16)
    sparsities = recipes.sized(small=[1, 2, 3, 5, 6, 8, 9, 10], paper=range(1, 17))
    seeds = range(recipes.sized(small=5, paper=3))
    return [Arm(LINEAR_MAP, "", s, recipes.linear_map(state_size=size, sparsity=s, seed=seeds)) for s in sparsities]


def _judge(runs: pd.DataFrame, folder: Path) -> Judgement:
    size = int(runs["x"].max())
    medium = select(runs, x=size // 2)
    return Judgement(
        [
            more(f"share learned at s = 2 less that at s = {size // 2}", select(runs, x=2), medium, "share_learned"),
            more(
                f"share learned at s = {size - 1} less that at s = {size // 2}",
                select(runs, x=size - 1),
                medium,
                "share_learned",
            ),
            _copies(select(runs, x=size), folder, size),
        ]
    )


def _copies(runs: pd.DataFrame, folder: Path, size: int) -> Check:
    """Whether runs at s = S have all output bits but the first, which is at chance."""
    copied = []
    for name in runs["run"]:
        positions = Run.open(folder / name).positions
        answers = positions.loc[(positions["step"] == positions["step"].max()) & positions["is_answer"]]
        first, *others = answers.sort_values("position")["accuracy"]
        copied.append(first < COPIED and min(others) >= 0.95)
    n, n_copied = len(copied), int(np.sum(copied))
    share = share_interval(n_copied, n)
    holds = None if n < 3 else n_copied > n / 2
    return Check(
        f"copies at s = {size}",
        holds,
        *share,
        n,
        f"at s = {size}, {n_copied} of {n} runs end with all output bits but the first, which is at chance",
    )


SPARSITY = Study(_arms, _judge, by_setting("ones in each row, s", "share_learned"), "sparsity")
