"""Finding 7: depth hurts the linear map and helps automata of many rules."""

from pathlib import Path

import pandas as pd

from emergent_heads.experiments.comparisons import in_order, slower
from emergent_heads.experiments.figures import by_setting
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import AUTOMATA, LINEAR_MAP, Arm, Judgement, Study


def _arms(recipes: Recipes) -> list[Arm]:
    depths = recipes.sized(small=[1, 2, 4], paper=[1, 2, 4, 8])
    seeds = range(recipes.sized(small=5, paper=3))
    many_rules = recipes.sized(small={"rules": 8}, paper={})
    return [
        *(Arm(LINEAR_MAP, "", n, recipes.linear_map(n_layers=n, seed=seeds)) for n in depths),
        *(Arm(AUTOMATA, "", n, recipes.automata(n_layers=n, seed=seeds, **many_rules)) for n in depths),
    ]


def _judge(runs: pd.DataFrame, _: Path) -> Judgement:
    linear_map, automata = (in_order(runs, task=task) for task in (LINEAR_MAP, AUTOMATA))
    layers = f"{linear_map[-1]['x'].iloc[0]:g}"
    return Judgement(
        [
            slower(f"{LINEAR_MAP}, {layers} layers against 1", linear_map[-1], linear_map[0]),
            slower(f"{AUTOMATA}, 1 layer against {layers}", automata[0], automata[-1]),
        ]
    )


DEPTH = Study(_arms, _judge, by_setting("layers"), "n_layers")
