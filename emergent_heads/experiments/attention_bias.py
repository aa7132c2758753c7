"""Finding 2: with the right pattern added to the attention scores there is no plateau."""

from pathlib import Path

import pandas as pd

from emergent_heads.experiments.comparisons import slower
from emergent_heads.experiments.figures import by_setting
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import AUTOMATA, LINEAR_MAP, Arm, Judgement, Study, select

STRENGTH = 5.0
"""The paper's c is not known; with 5 a head that reads three places gives each about a third of its attention."""
WITHOUT, WITH = "without bias", "with bias"


def _arms(recipes: Recipes) -> list[Arm]:
    seeds = range(recipes.sized(small=5, paper=3))
    sizes = recipes.sized(small=[8, 16], paper=[16])
    automata_sizes = recipes.sized(small=[4, 8], paper=[8, 16])
    arms = []
    for setting, strength in ((WITHOUT, None), (WITH, STRENGTH)):
        for size in sizes:
            runs = recipes.linear_map(state_size=size, attention_bias=strength, seed=seeds)
            arms.append(Arm(LINEAR_MAP, setting, size, runs))
        for size in automata_sizes:
            runs = recipes.automata(state_size=size, attention_bias=strength, seed=seeds)
            arms.append(Arm(AUTOMATA, setting, size, runs))
    return arms


def _judge(runs: pd.DataFrame, _: Path) -> Judgement:
    checks = []
    for task in dict.fromkeys(runs["task"]):
        size = runs.loc[runs["task"] == task, "x"].max()
        without, biased = (select(runs, task=task, x=size, setting=setting) for setting in (WITHOUT, WITH))
        where = f"{task}, S = {size:g}, without bias"
        checks.append(slower(f"{where}, plateau", without, biased, "step_left_plateau", above=2.0))
        checks.append(slower(where, without, biased))
    return Judgement(checks)


ATTENTION_BIAS = Study(_arms, _judge, by_setting("state size S"), "state_size")
