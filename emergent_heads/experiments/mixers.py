"""Findings 8 to 10: the causal MLP-Mixer and the other token mixers against attention."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from emergent_heads.experiments.comparisons import slower
from emergent_heads.experiments.figures import by_setting
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import AUTOMATA, LINEAR_MAP, Arm, Judgement, Study, Verdict, select
from emergent_heads.sweeps import RunSpec

ATTENTION, MLP_MIXER = "attention", "mlp_mixer"
EVENTS = {LINEAR_MAP: "step_solved", AUTOMATA: "step_left_plateau"}
"""What counts for the other mixers: few of them solve the longer automata by the last step."""
OTHERS = ("mamba", "mamba2", "gated_delta_net", "rwkv4", "rwkv7", "xlstm", "linear_rnn")


def _mixer_linear_map(recipes: Recipes) -> list[Arm]:
    return _with_the_mixer(LINEAR_MAP, recipes.linear_map, recipes.sized(small=[8, 10], paper=[16]))


def _mixer_automata(recipes: Recipes) -> list[Arm]:
    return _with_the_mixer(AUTOMATA, recipes.automata, recipes.sized(small=[4, 8], paper=[16]))


def _with_the_mixer(task: str, runs_of: Callable[..., list[RunSpec]], sizes: Sequence[int]) -> list[Arm]:
    return [
        Arm(task, mixer, size, runs_of(mixer=mixer, state_size=size, seed=range(5)))
        for mixer in (ATTENTION, MLP_MIXER)
        for size in sizes
    ]


def _judge_mixer_linear_map(runs: pd.DataFrame, _: Path) -> Judgement:
    return _slower_at_each_size(runs, f"{LINEAR_MAP}, S = {{}}, attention against MLP-Mixer", ATTENTION, MLP_MIXER)


def _judge_mixer_automata(runs: pd.DataFrame, _: Path) -> Judgement:
    return _slower_at_each_size(runs, f"{AUTOMATA}, S = {{}}, MLP-Mixer against attention", MLP_MIXER, ATTENTION)


def _slower_at_each_size(runs: pd.DataFrame, part: str, slow: str, fast: str) -> Judgement:
    return Judgement(
        [
            slower(part.format(f"{size:g}"), select(runs, x=size, setting=slow), select(runs, x=size, setting=fast))
            for size in sorted(runs["x"].unique())
        ]
    )


def _others(recipes: Recipes) -> list[Arm]:
    # Automata at two sizes: a short convolution, which most of these mixers have, covers much of a small state.
    # The two slowest mixers would take most of the time on the larger one.
    quick = tuple(mixer for mixer in OTHERS if mixer not in ("mamba", "rwkv7"))
    small = ((LINEAR_MAP, 8, OTHERS), (AUTOMATA, 4, OTHERS), (AUTOMATA, 12, quick))
    makers = {LINEAR_MAP: recipes.linear_map, AUTOMATA: recipes.automata}
    return [
        Arm(task, f"S = {size}", mixer, makers[task](mixer=mixer, state_size=size, seed=range(3)))
        for task, size, mixers in recipes.sized(small=small, paper=((LINEAR_MAP, 16, OTHERS), (AUTOMATA, 16, OTHERS)))
        for mixer in (ATTENTION, *mixers)
    ]


def _judge_others(runs: pd.DataFrame, _: Path) -> Judgement:
    arms = dict.fromkeys(zip(runs["task"], runs["setting"], runs["x"], strict=True))
    checks = [
        slower(
            f"{task}, {size}, {mixer} against attention",
            select(runs, task=task, setting=size, x=mixer),
            select(runs, task=task, setting=size, x=ATTENTION),
            EVENTS[task],
        )
        for task, size, mixer in arms
        if mixer != ATTENTION
    ]
    return Judgement(checks, verdict=most([check.holds for check in checks]))


def most(parts: list[bool | None]) -> Verdict:
    """Holds if more than half of the parts do, does not hold if more than half do not."""
    half = len(parts) / 2
    if sum(part is True for part in parts) > half:
        return "holds"
    if sum(part is False for part in parts) > half:
        return "does not hold"
    return "not settled"


MIXER_LINEAR_MAP = Study(_mixer_linear_map, _judge_mixer_linear_map, by_setting("state size S"), "state_size")
MIXER_AUTOMATA = Study(_mixer_automata, _judge_mixer_automata, by_setting("state size S"), "state_size")
OTHER_MIXERS = Study(_others, _judge_others, by_setting("token mixer", EVENTS), "mixer")
