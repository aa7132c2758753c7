"""Figures of the experiments on quiet features: a panel for each task."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from emergent_heads.plots import quiet as quiet_plots
from emergent_heads.plots.look import COLOURS, style
from emergent_heads.plots.panels import panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOUD_LOOK = {"quiet": "-", "loud": (0, (4, 1.5)), "undecided": (0, (1, 1.5)), "not learned": (0, (1, 1.5))}


def transition_panels(curves: pd.DataFrame, *, x: str, label: str) -> "Figure":
    """Share of the gap left over steps or data, a line per seed.

    Args:
        curves: `task`, `run`, `x` and `gap_left`.
        x: its column along the axis.
        label: of the axis.
    """
    tasks = list(dict.fromkeys(curves["task"]))
    with style():
        figure, panels = panel_grid(len(tasks), width=2.75 if len(tasks) > 3 else 3.3, height=2.9)
        for axes, task in zip(panels, tasks, strict=True):
            of_task = curves.loc[curves["task"] == task]
            for run, rows in of_task.groupby("run"):
                axes.plot(
                    rows[x], rows["gap_left"], "-" if len(rows) > 20 else "o-", color=COLOURS[int(run) % len(COLOURS)]
                )
            quiet_plots.gap_axes(axes, of_task[x].tolist(), label)
            axes.set_title(task)
        _only_first(panels)
    return figure


def quiet_panels(curves: pd.DataFrame) -> "Figure":
    """Task loss (black) and probe losses (median over the seeds) as shares of the way left.

    Args:
        curves: `task`, `feature` ("" for the task itself), `verdict`, `run`, `step`, `gap_left`.
    """
    tasks = list(dict.fromkeys(curves["task"]))
    with style():
        figure, panels = panel_grid(len(tasks), width=3.6, height=3.4, per_row=min(3, len(tasks)))
        for axes, task in zip(panels, tasks, strict=True):
            of_task = curves.loc[curves["task"] == task]
            for index, (feature, rows) in enumerate(of_task.groupby("feature", sort=False)):
                if not rows["gap_left"].notna().any():
                    continue
                verdict = rows["verdict"].iloc[0]
                look: dict[str, Any] = {
                    "color": COLOURS[(index - 1) % len(COLOURS)],
                    "linestyle": _LOUD_LOOK.get(verdict, "-"),
                }
                if not feature:
                    look = {"color": "black", "linewidth": 2.0, "zorder": 4}
                quiet_plots.bundle(axes, rows, label=f"{feature}: {verdict}" if feature else "task loss", **look)
            quiet_plots.gap_axes(axes, of_task["step"].tolist(), "training step")
            axes.set_title(task)
            axes.legend(loc="lower left", fontsize=6, frameon=True, framealpha=0.8, edgecolor="none")
        _only_first(panels, per_row=min(3, len(tasks)))
    return figure


def order_panels(table: pd.DataFrame) -> "Figure":
    """Step at which a feature emerges at each place, with what the tokens alone give away below.

    Args:
        table: `task`, `feature`, `place`, `emergence_step`, `tokens_give_away`.
    """
    from matplotlib.ticker import MaxNLocator

    tasks = list(dict.fromkeys(table["task"]))
    with style():
        figure, panels = panel_grid(2 * len(tasks), width=3.2, height=2.6, per_row=len(tasks), share_y=False)
        for column, task in enumerate(tasks):
            above, below = panels[column], panels[len(tasks) + column]
            of_task = table.loc[table["task"] == task]
            for index, (feature, rows) in enumerate(of_task.groupby("feature", sort=False)):
                look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "markersize": 3}
                look["marker"] = "os"[index // len(COLOURS) % 2]
                above.plot(rows["place"], rows["emergence_step"], **look)
                below.plot(rows["place"], rows["tokens_give_away"].clip(lower=0), label=feature, **look)
            above.set_title(task)
            below.set(xlabel="place", ylim=(-0.05, 1.05))
            below.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), fontsize=6, ncols=3)
            for axes in (above, below):
                axes.set_xlim(of_task["place"].min() - 0.3, of_task["place"].max() + 0.3)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylabel("step of emergence")
        panels[len(tasks)].set_ylabel("share that the tokens\nalone give away")
    return figure


def _only_first(panels: "Sequence[Axes]", per_row: int = 4) -> None:
    """The label of the y axis stands at the first panel of each row only."""
    for place, axes in enumerate(panels):
        if place % per_row:
            axes.set_ylabel("")
