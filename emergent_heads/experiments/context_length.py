"""Finding 3: the longer the context, the longer it takes."""

from pathlib import Path

import pandas as pd

from emergent_heads.experiments.comparisons import slope
from emergent_heads.experiments.figures import by_setting
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import AUTOMATA, LINEAR_MAP, Arm, Judgement, Study, select, verdict_of


def _arms(recipes: Recipes) -> list[Arm]:
    seeds = range(recipes.sized(small=5, paper=3))
    linear_maps = recipes.sized(small=[6, 8, 10, 12], paper=[8, 16, 32])
    automata = recipes.sized(small=[4, 6, 8, 12], paper=[4, 8, 16, 32, 64, 128, 256, 512])
    return [
        *(Arm(LINEAR_MAP, "", size, recipes.linear_map(state_size=size, seed=seeds)) for size in linear_maps),
        *(Arm(AUTOMATA, "", size, recipes.automata(state_size=size, seed=seeds)) for size in automata),
    ]


def _judge(runs: pd.DataFrame, _: Path) -> Judgement:
    checks = [
        slope(f"{task}, {what}", select(runs, task=task), event)
        for event, what in (("step_solved", "steps to solve"), ("step_left_plateau", "steps to leave the plateau"))
        for task in (LINEAR_MAP, AUTOMATA)
    ]
    return Judgement(checks, verdict=verdict_of([check.holds for check in checks[:2]]))


CONTEXT_LENGTH = Study(_arms, _judge, by_setting("state size S"), "state_size")
