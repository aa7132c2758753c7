"""Figures of ablations: what is left with a feature taken out, beside the controls."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from emergent_heads.plots.axes import step_axis
from emergent_heads.plots.look import BLUE, GREEN, GREY, MARKERS, ORANGE, PURPLE, SKY, VERMILION, style, title_of
from emergent_heads.plots.panels import columns_grid, panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {
    "none": "no edit",
    "feature": "feature removed",
    "pre": "earlier checkpoint",
    "post": "later checkpoint",
    "transplanted": "transplanted",
    "random": "random",
    "matched_variance": "random, same variance",
    "matched_change": "random, same size",
    "shuffled_labels": "shuffled labels",
    "other_features": "other features",
    "latents": "latents subtracted",
    "turned_latents": "latents, turned at random",
    "matched_latents": "latents of the same size",
    "other_latents": "other latents",
}
_COLOURS = {
    "none": "black",
    "feature": VERMILION,
    "pre": "black",
    "post": GREEN,
    "transplanted": VERMILION,
    "random": BLUE,
    "matched_variance": SKY,
    "matched_change": SKY,
    "shuffled_labels": ORANGE,
    "other_features": PURPLE,
    "latents": GREEN,
    "turned_latents": BLUE,
    "matched_latents": SKY,
    "other_latents": PURPLE,
}
_ALWAYS_WRONG = 0.05


def ablation(table: pd.DataFrame, controls: pd.DataFrame) -> "Figure":
    """One panel per feature: a mark with its interval per edit, and a small mark for each run of the controls.

    Exact match, or the loss where hardly any answer is right without an edit.

    Args:
        table: as `Ablation.table`.
        controls: as `Ablation.controls`.
    """
    features = list(dict.fromkeys(table["feature"]))
    edits = list(dict.fromkeys(table["edit"]))
    solved = bool(table["exact_match"].max() >= _ALWAYS_WRONG)
    with style():
        figure, panels = panel_grid(len(features), width=2.9, height=0.3 * len(edits) + 0.8)
        for axes, feature in zip(panels, features, strict=True):
            rows, runs = (each.loc[each["feature"] == feature] for each in (table, controls))
            _marks(axes, rows, runs, edits, "exact_match" if solved else "loss_nats")
            axes.set_title(title_of(feature, 2.9))
            axes.set_xlabel("exact match" if solved else "loss (nats)")
            if solved:
                axes.set_xlim(-0.04, 1.04)
        panels[0].set_yticks(range(len(edits)), [_NAMES[edit] for edit in edits])
        panels[0].set_ylim(len(edits) - 0.5, -0.5)
    return figure


def _marks(axes: "Axes", rows: pd.DataFrame, runs: pd.DataFrame, edits: list[str], column: str) -> None:
    stem = column.removesuffix("_nats")
    for place, edit in enumerate(edits):
        own = rows.loc[rows["edit"] == edit]
        if own.empty:
            continue
        row = own.iloc[0]
        of_run = runs.loc[runs["edit"] == edit, column].to_numpy(float)
        if len(of_run):
            spread = 0.28 * (np.arange(len(of_run)) % 5 - 2) / 2  # so that equal ones are told apart
            axes.plot(of_run, place + spread, "o", color=_COLOURS[edit], alpha=0.3, markersize=2.5, markeredgewidth=0)
        ends = np.abs(np.array([[row[f"{stem}_low"]], [row[f"{stem}_high"]]], float) - row[column])
        axes.errorbar(row[column], place, xerr=ends, fmt="D", color=_COLOURS[edit], capsize=2.5, markersize=4.5)
    first = rows.loc[rows["edit"] == edits[0], column]
    axes.axvline(float(first.iloc[0]), color=GREY, linewidth=0.8, linestyle="--", zorder=0)
    axes.grid(axis="y", color="#EEEEEE")


def ablation_series(table: pd.DataFrame) -> "Figure":
    """Loss above exact match over the steps, one column per feature: without edit, without the feature, with controls.

    Args:
        table: as `AblationSeries.table`.
    """
    features = list(dict.fromkeys(table["feature"]))
    with style():
        width = 4.6 if len(features) == 1 else 3.0
        figure, columns = columns_grid(len(features), 2, width=width, height=1.9)
        for feature, (above, below) in zip(features, columns, strict=True):
            rows = table.loc[table["feature"] == feature]
            for index, (edit, own) in enumerate(rows.groupby("edit", sort=False)):
                look: dict[str, Any] = {"color": _COLOURS[str(edit)], "label": _NAMES[str(edit)]}
                look["marker"] = MARKERS[index % len(MARKERS)]
                for axes, column, stem in ((above, "loss_nats", "loss"), (below, "exact_match", "exact_match")):
                    axes.plot(own["step"], own[column], zorder=3 if edit in ("none", "feature") else 2, **look)
                    axes.fill_between(
                        own["step"].to_numpy(float),
                        own[f"{stem}_low"].to_numpy(float),
                        own[f"{stem}_high"].to_numpy(float),
                        color=look["color"],
                        alpha=0.15,
                        linewidth=0,
                    )
            above.set_title(title_of(feature, width))
            below.set_ylim(-0.03, 1.03)
            below.set_xlabel("training step")
            for axes in (above, below):
                step_axis(axes.xaxis, rows["step"].tolist())
            above.tick_params(labelbottom=False)
            if above.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
                above.set_ylabel("loss (nats)")
                below.set_ylabel("exact match")
        entries = columns[0][0].get_legend_handles_labels()
        figure.legend(*entries, loc="outside upper center", ncols=int(figure.get_figwidth() / 1.9))
    return figure
