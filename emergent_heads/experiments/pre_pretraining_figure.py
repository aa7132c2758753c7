"""The figure of the experiment on pre-pretraining: when each run got there, and the difference to those without."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from emergent_heads.experiments.study import Judgement
from emergent_heads.plots.look import BLUE, GREY, VERMILION, style
from emergent_heads.plots.panels import panel_grid
from emergent_heads.statistics import restricted_mean, restricted_mean_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CLOCKS = {
    "steps_after": (BLUE, "o", "difference after pre-pretraining"),
    "steps_total": (VERMILION, "s", "difference in all"),
}


def overview(_: pd.DataFrame, judgement: Judgement) -> "Figure":
    """Above, a mark per run, hollow where it never got there; below, restricted means against those of the first arm.

    Args:
        judgement: its curves have a row per run and outcome: `arm`, `outcome`, `never`, and by each clock
            `steps_after`, `steps_total` and the last step there was, `last_step_after`, `last_step_total`.
    """
    curves = judgement.curves
    assert curves is not None
    arms, outcomes = (list(dict.fromkeys(curves[name])) for name in ("arm", "outcome"))
    with style():
        figure, panels = panel_grid(
            2 * len(outcomes), width=2.75, height=0.5 + 0.26 * len(arms), per_row=len(outcomes), share_y=False
        )
        for column, outcome in enumerate(outcomes):
            above, below = panels[column], panels[len(outcomes) + column]
            of_outcome = curves.loc[curves["outcome"] == outcome]
            _draw_runs(above, of_outcome, arms)
            _draw_differences(below, of_outcome, arms)
            above.set_title(outcome)
            if column:
                above.set_yticklabels([])
                below.set_yticklabels([])
        marks = [each.get_legend_handles_labels() for each in (panels[0], panels[len(outcomes)])]
        handles, labels = ([*above, *below] for above, below in zip(*marks, strict=True))
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _draw_runs(axes: "Axes", curves: pd.DataFrame, arms: Sequence[str]) -> None:
    horizon = curves["last_step_after"].min()
    for place, arm in enumerate(arms):
        rows = curves.loc[curves["arm"] == arm]
        steps, never = rows["steps_after"].to_numpy(float), rows["never"].to_numpy(bool)
        beside = place + np.linspace(-0.22, 0.22, len(rows))
        said = [None, None, None] if place else ["a run", "never by then", "restricted mean"]
        axes.plot(steps[~never], beside[~never], "o", color=GREY, alpha=0.7, markeredgewidth=0, label=said[0])
        axes.plot(steps[never], beside[never], "o", markerfacecolor="none", color=GREY, label=said[1])
        mean = restricted_mean(steps, never, horizon, seed=0).value
        axes.plot([mean, mean], [place - 0.36, place + 0.36], color="black", linewidth=1.6, label=said[2])
    axes.set_xlim(left=0)
    axes.set_xlabel("steps after pre-pretraining")
    _arm_axis(axes, arms)


def _draw_differences(axes: "Axes", curves: pd.DataFrame, arms: Sequence[str]) -> None:
    axes.axvline(0, color=GREY, linestyle=":", linewidth=1)
    first = curves.loc[curves["arm"] == arms[0]]
    for clock, (colour, marker, label) in _CLOCKS.items():
        horizon = curves[f"last_{clock.replace('steps', 'step')}"].min()
        for place, arm in enumerate(arms[1:], start=1):
            rows = curves.loc[curves["arm"] == arm]
            ours, theirs = ((each[clock].to_numpy(float), each["never"].to_numpy(bool)) for each in (rows, first))
            value, low, high = restricted_mean_difference(ours, theirs, horizon, seed=0)
            at = place + (-0.16 if clock == "steps_after" else 0.16)
            axes.plot([low, high], [at, at], color=colour, linewidth=1.2)
            axes.plot(value, at, marker, color=colour, label=label if place == 1 else None, linestyle="none")
    axes.set_xlabel(f"steps more than with {arms[0]}\n(95 % interval)")
    _arm_axis(axes, arms)


def _arm_axis(axes: "Axes", arms: Sequence[str]) -> None:
    axes.set_yticks(range(len(arms)), arms)
    axes.set_ylim(len(arms) - 0.5, -0.5)
