"""Finding 3: the longer the context, the longer the plateau."""

from pathlib import Path

import pandas as pd

from emergent_heads.experiments.comparisons import slope
from emergent_heads.experiments.figures import by_setting
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import AUTOMATA, LINEAR_MAP, Arm, Judgement, Study, select


def _arms(recipes: Recipes) -> list[Arm]:
    seeds = range(recipes.sized(small=3, paper=3))
    linear_maps = recipes.sized(small=[6, 8, 10, 12], paper=[8, 16, 32])
    automata = recipes.sized(small=[4, 6, 8, 12], paper=[4, 8, 16, 32, 64, 128, 256, 512])
    return [
        *(Arm(LINEAR_MAP, "", size, recipes.linear_map(state_size=size, seed=seeds)) for size in linear_maps),
        *(Arm(AUTOMATA, "", size, recipes.automata(state_size=size, seed=seeds)) for size in automata),
    ]


def _judge(runs: pd.DataFrame, _: Path) -> Judgement:
    return Judgement([slope(task, select(runs, task=task), "step_left_plateau") for task in (LINEAR_MAP, AUTOMATA)])


CONTEXT_LENGTH = Study(_arms, _judge, by_setting("state size S", "step_left_plateau"), "state_size")
