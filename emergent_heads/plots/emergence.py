"""Figures of one evaluation, of an emergence along training, and of emergences against size."""

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from emergent_heads.plots.axes import line, log_steps, side_by_side, step_axis, whole_axis
from emergent_heads.plots.look import BLUE, GREEN, GREY, ORANGE, VERMILION, plain, style
from emergent_heads.plots.panels import legend_once, panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def evaluation(table: pd.DataFrame, *, mean: float) -> "Figure":
    """Probability of the target on each prompt, in descending order, with what was the top token marked.

    Args:
        table: as `Evaluation.table`.
        mean: of the probabilities, drawn as a dashed line.
    """
    rows = table.sort_values("p_target", ascending=False, ignore_index=True)
    with style():
        figure, (axes,) = panel_grid(1, width=5.2, height=3.0)
        size = 4 if len(rows) <= 200 else 2
        for matched, colour, marker, label in (
            (True, BLUE, "o", "target is the top token"),
            (False, VERMILION, "x", "another token is"),
        ):
            chosen = rows.index[rows["matched"] == matched]
            if len(chosen):
                of_all = f"{label} ({len(chosen)} of {len(rows)})"
                axes.plot(chosen + 1, rows["p_target"][chosen], marker, color=colour, markersize=size, label=of_all)
        axes.axhline(mean, color=GREY, linestyle="--", linewidth=1, label=f"mean {mean:.3g}")
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlim(0.5 - 0.02 * len(rows), len(rows) + 0.5 + 0.02 * len(rows))
        whole_axis(axes.xaxis, (rows.index + 1).tolist())
        axes.set_xlabel("prompts, by p(target)")
        axes.set_ylabel("p(target)")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def emergence_curve(
    table: pd.DataFrame, *, task: str, threshold: float, pre: int | None, post: int | None
) -> "Figure":
    """What was measured of a task at each evaluated checkpoint of one series.

    Args:
        table: column `step`, and either `share_matched` and `p_target` with their intervals, or `score`.
        task: name of the task, or of the score.
        threshold: drawn as a dashed line.
        pre: step of the last failing checkpoint; the interval up to `post` is shaded where both are given.
        post: step of the first passing checkpoint.
    """
    with style():
        figure, (axes,) = panel_grid(1, width=5.2, height=3.2)
        if "score" in table:
            line(axes, table, "score", BLUE, plain(task, 40))
        else:
            line(axes, table, "share_matched", BLUE, "share of prompts matched", ("share_low", "share_high"))
            line(axes, table, "p_target", VERMILION, "mean p(target)", ("p_low", "p_high"), marker="s")
            axes.set_ylim(-0.03, 1.03)
        axes.axhline(threshold, color=GREY, linestyle="--", linewidth=1, label=f"threshold {threshold:g}")
        if pre is not None and post is not None:
            axes.axvspan(pre, post, color=ORANGE, alpha=0.35, linewidth=0, label=f"emergence: {pre} to {post}")
        step_axis(axes.xaxis, table["step"].tolist())
        axes.set_xlabel("training step")
        axes.set_ylabel(plain(task if "score" in table else f"{task}: share, probability", 44))
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def emergence_scatter(table: pd.DataFrame, summary: pd.DataFrame) -> "Figure":
    """Steps to emergence against size, one panel per task.

    Args:
        table: one row per series and task, as `EmergenceTable.table`. A series without a size has a column of its own.
        summary: one row per size and task, as `EmergenceTable.summary`; its restricted means are drawn per size.
    """
    tasks = list(dict.fromkeys(table["task"]))
    labels_of_rows = table["size"].where(table["size"].notna(), table["series"]).astype(str)
    labels = sorted(dict.fromkeys(labels_of_rows), key=_magnitude)
    place_of = {label: place for place, label in enumerate(labels)}
    long_labels = max(map(len, labels)) > 6
    last = float(table["last_step"].max())
    with style():
        width = max(2.6 if len(tasks) > 1 else 4.8, 0.8 + (0.24 if long_labels else 0.5) * len(labels))
        figure, panels = panel_grid(len(tasks), width=width, height=3.8 if long_labels else 2.8)
        for axes, task in zip(panels, tasks, strict=True):
            rows = table.loc[table["task"] == task]
            _mean_line(axes, summary.loc[summary["task"] == task], place_of)
            _dots(axes, rows, labels_of_rows[rows.index].map(place_of).to_numpy(float), never=2 * last)
            axes.set_title(plain(task, max(20, int(13 * width))))
            axes.set_xticks(range(len(labels)), list(map(plain, labels)), rotation=90 if long_labels else 0)
            axes.set_xlim(-0.6, len(labels) - 0.4)
            if axes.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
                axes.set_ylabel("training steps to emergence")
        never = {2 * last: "never"} if table["censored"].any() else {}
        log_steps(panels[0].yaxis, [*table["steps_to_emergence"], last], extra=never)
        legend_once(figure, panels)
    return figure


def _dots(axes: "Axes", rows: pd.DataFrame, places: np.ndarray, never: float) -> None:
    """A mark per series, those of one column side by side; what never emerged stands at height `never`."""
    x = places + side_by_side(places)
    steps = rows["steps_to_emergence"].to_numpy(float)
    censored = rows["censored"].to_numpy(bool)
    lost = ~censored & (rows["persistent"].astype("boolean") == False).fillna(False).to_numpy(bool)  # noqa: E712
    start = ~censored & (rows["status"] == "from the start").to_numpy()
    marks: tuple[tuple[str, np.ndarray, dict[str, Any]], ...] = (
        ("emerged", ~censored & ~lost & ~start, {"marker": "o", "color": BLUE}),
        ("emerged, lost again later", lost & ~start, {"marker": "o", "color": BLUE, "markerfacecolor": "white"}),
        ("there from the start", start, {"marker": "^", "color": GREEN}),
        ("never, by the last step", censored, {"marker": "x", "color": GREY}),
    )
    for label, which, look in marks:
        if which.any():
            height = np.where(censored, never, steps)[which]
            axes.plot(x[which], height, linestyle="none", zorder=3, label=label, **look)


def _mean_line(axes: "Axes", summary: pd.DataFrame, place_of: dict[str, int]) -> None:
    means = summary.loc[summary["size"].notna()]
    if means.empty:
        return
    means = means.assign(place=means["size"].astype(str).map(place_of)).sort_values("place")
    mean = means["restricted_mean_step"]
    ends = [mean - means["restricted_mean_low"], means["restricted_mean_high"] - mean]
    ends = [end.fillna(0).clip(lower=0) for end in ends]  # a single seed has no interval
    look = {"color": VERMILION, "marker": "_", "markersize": 10, "linewidth": 0.9, "capsize": 2}
    axes.errorbar(means["place"], mean, yerr=ends, label="restricted mean, 95 % interval", **look)


def _magnitude(label: str) -> tuple[float, str]:
    """Sort key of a size such as "70m" or "pythia-1.4b-deduped", or of a plain number; other labels come last."""
    found = re.search(r"(?:^|[^\w.])(\d+(?:\.\d+)?)([kmbt]?)(?![\w.])", label.lower())
    if found is None:
        return float("inf"), ""
    return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2]], label
