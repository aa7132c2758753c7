"""Figures of the experiments, in the look of `emergent_heads.plots.look`."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from emergent_heads.experiments.study import Judgement, restricted_steps
from emergent_heads.plots.figure import new_figure
from emergent_heads.plots.look import COLOURS, style
from emergent_heads.statistics import Interval, bootstrap_mean
from emergent_heads.sweeps import event_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVENTS = {"step_solved": "steps to solve", "step_left_plateau": "steps to leave the plateau"}
AT_THE_END = {"share_learned": "share of output tokens learned", "excess_loss_nats": "loss above the floor (nats)"}


def by_setting(
    varied: str, measure: "str | Mapping[str, str]" = "step_solved", *, log: bool = True
) -> "Callable[[pd.DataFrame, Judgement], Figure]":
    """A figure with a panel per task, the varied setting along x and a line per setting; a `Study.draw`.

    Args:
        varied: label of the x axis.
        measure: "step_solved", "step_left_plateau", "share_learned" or "excess_loss_nats"; or one per task.
        log: whether a numerical x axis is logarithmic.
    """

    def draw(runs: pd.DataFrame, _: Judgement) -> "Figure":
        return panels(runs, varied, measure, log=log)

    return draw


def panels(runs: pd.DataFrame, varied: str, measure: "str | Mapping[str, str]", *, log: bool = True) -> "Figure":
    """A mark per run, a cross at the top for one that never got there, and means with 95 % intervals over seeds."""
    runs = runs.loc[runs["status"] != "failed"]
    tasks = list(dict.fromkeys(runs["task"]))
    most = max(runs.loc[runs["task"] == task, "x"].nunique() for task in tasks)
    named = not pd.api.types.is_numeric_dtype(runs["x"])
    width = max(3.6, 1.6 + (0.45 if named else 0.3) * most)
    with style():
        figure = new_figure(width * len(tasks), 3.6 if named and most > 3 else 3.1)
        grid = figure.subplots(1, len(tasks), squeeze=False)
        settings = list(dict.fromkeys(runs["setting"]))
        for axes, task in zip(grid.flat, tasks, strict=True):
            of_task = measure if isinstance(measure, str) else measure[task]
            _panel(axes, runs.loc[runs["task"] == task], settings, of_task, log=log)
            axes.set_title(task)
            axes.set_xlabel(varied)
            if task == tasks[0] or not isinstance(measure, str):
                axes.set_ylabel({**EVENTS, **AT_THE_END}[of_task])
        if settings != [""]:
            entries: dict[str, Any] = {}
            for axes in grid.flat:
                entries |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            figure.legend(
                list(entries.values()), list(entries), loc="outside upper center", ncols=max(2, min(3, len(settings)))
            )
    return figure


def _panel(axes: "Axes", runs: pd.DataFrame, settings: Sequence[str], measure: str, *, log: bool) -> None:
    values = list(dict.fromkeys(runs["x"]))
    named = any(isinstance(value, str) for value in values)
    values = values if named else sorted(values)
    places = {value: float(index if named or log else value) for index, value in enumerate(values)}
    present = [setting for setting in settings if (runs["setting"] == setting).any()]
    never = _never_height(runs, measure)
    any_never = False
    for index, setting in enumerate(present):
        colour = COLOURS[settings.index(setting) % len(COLOURS)]
        aside = 0.16 * (index - (len(present) - 1) / 2)
        line = []
        for value in values:
            rows = runs.loc[(runs["setting"] == setting) & (runs["x"] == value)]
            if rows.empty:
                continue
            place = places[value] + aside
            heights, absent = _heights(rows, measure)
            beside = place + np.linspace(-0.05, 0.05, len(rows)) * (len(rows) > 1)
            axes.plot(beside[~absent], heights[~absent], "o", color=colour, alpha=0.4, markeredgewidth=0)
            axes.plot(beside[absent], np.full(absent.sum(), never), "x", color=colour)
            any_never |= bool(absent.any())
            line.append((place, *_mean(rows, measure)))
        x, mean, low, high = np.array(line).T
        ends = np.nan_to_num(np.clip([mean - low, high - mean], 0, None))
        look: dict[str, Any] = {"color": colour, "marker": "_", "markersize": 8, "capsize": 2}
        axes.errorbar(x, mean, yerr=ends, linestyle="none" if named else "-", label=setting, **look)
    axes.set_xticks(list(places.values()), [f"{value:g}" if not named else str(value) for value in values])
    if named and len(values) > 3:
        axes.tick_params(axis="x", rotation=40)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    axes.set_xlim(min(places.values()) - 0.5, max(places.values()) + 0.5)
    if measure in EVENTS:
        _log_steps(axes, runs, measure, never if any_never else None)
    elif measure == "share_learned":
        axes.set_ylim(-0.04, 1.04)


def _log_steps(axes: "Axes", runs: pd.DataFrame, measure: str, never: float | None) -> None:
    from matplotlib.ticker import NullLocator

    steps = event_times(runs, measure)[0]
    low, high = max(steps.min(), 10.0) / 1.3, steps.max() * 1.2
    axes.set_yscale("log")
    ticks = _round_steps((10, 20, 50), low, high)
    if len(ticks) < 3:
        ticks = _round_steps((10, 15, 20, 30, 40, 50, 60, 80), low, high)
    labels = [f"{step:,}" for step in ticks]
    if never is not None:
        high = never * 1.15
        kept = [(step, label) for step, label in zip(ticks, labels, strict=True) if step < never / 1.3]
        ticks, labels = [step for step, _ in kept] + [never], [label for _, label in kept] + ["never"]
    axes.set_yticks(ticks, labels)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low, high)


def _round_steps(leading: Sequence[int], low: float, high: float) -> list[int]:
    return [step * 10**power for power in range(5) for step in leading if low <= step * 10**power <= high]


def _never_height(runs: pd.DataFrame, measure: str) -> float:
    return 1.35 * float(runs["steps"].max()) if measure in EVENTS else 0.0


def _heights(rows: pd.DataFrame, measure: str) -> tuple[np.ndarray, np.ndarray]:
    if measure in EVENTS:
        steps, never = event_times(rows, measure)
        return np.maximum(steps, 10.0), never
    return rows[measure].to_numpy(float), np.zeros(len(rows), dtype=bool)


def _mean(rows: pd.DataFrame, measure: str) -> Interval:
    if measure in EVENTS:
        return Interval(*(max(end, 10.0) for end in restricted_steps(rows, measure)))
    return bootstrap_mean(rows[measure].to_numpy(float), seed=0)
