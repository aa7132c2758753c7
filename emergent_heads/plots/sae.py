"""Figures of sparse autoencoders: what one latent reads of a feature, at each place and along a training."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from emergent_heads.plots.axes import step_axis, whole_axis
from emergent_heads.plots.look import BLUE, GREY, ORANGE, VERMILION, style, title_of
from emergent_heads.plots.panels import panel_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = (
    ("probe", "probe", BLUE, "o", "-"),
    ("latent", "best latent", VERMILION, "s", "-"),
    ("followed", "last checkpoint's latent", ORANGE, "^", "--"),
    ("random", "best random latent", GREY, "x", ":"),
)


def comparison(table: pd.DataFrame) -> "Figure":
    """Loss as a share of the prior's against the place, one panel per feature; means over components.

    Args:
        table: as `LatentComparison.table`.
    """
    features = list(dict.fromkeys(table["feature"]))
    with style():
        figure, panels = panel_grid(len(features), width=2.9 if len(features) > 1 else 4.2, height=2.3)
        for axes, feature in zip(panels, features, strict=True):
            means = table.loc[table["feature"] == feature].groupby("place").mean(numeric_only=True)
            axes.axhline(1, color="black", linewidth=0.8, linestyle=(0, (1, 2)), label="prior")
            for name, label, colour, marker, dash in _LINES:
                if f"{name}_loss" in means:
                    share = means[f"{name}_loss"] / means["prior_loss"]
                    axes.plot(means.index, share, dash, color=colour, marker=marker, label=label)
            axes.set_title(title_of(feature, 2.9))
            axes.set_xlabel("place")
            axes.set_ylim(-0.05, max(1.1, axes.get_ylim()[1]))
            whole_axis(axes.xaxis, means.index.tolist())
            if axes.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
                axes.set_ylabel("loss, share of the prior's")
        columns = 2 if len(features) == 1 else 4
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=columns)
    return figure


def latent_series(table: pd.DataFrame, emergence: pd.DataFrame) -> "Figure":
    """Loss as a share of the prior's over the steps, one panel per feature, with where each readout emerges.

    Args:
        table: as `LatentSeries.table`.
        emergence: as `LatentSeries.emergence`; the steps are thin vertical lines in the colour of the curve.
    """
    features = list(dict.fromkeys(table["feature"]))
    with style():
        figure, panels = panel_grid(len(features), width=3.3 if len(features) > 1 else 4.6, height=2.6)
        for axes, feature in zip(panels, features, strict=True):
            means = table.loc[table["feature"] == feature].groupby("step").mean(numeric_only=True)
            said = emergence.loc[emergence["feature"] == feature].set_index("readout")
            axes.axhline(1, color="black", linewidth=0.8, linestyle=(0, (1, 2)), label="prior")
            baseline = float((means["baseline_loss"] / means["prior_loss"]).mean())
            axes.axhline(baseline, color="black", linewidth=0.8, linestyle="--", label="strongest baseline")
            for name, label, colour, marker, dash in _LINES:
                share = (means[f"{name}_loss"] / means["prior_loss"]).to_numpy(float)
                axes.plot(means.index, share, dash, color=colour, marker=marker, label=label)
                if name in said.index and np.isfinite(step := float(said.loc[name, "emergence_step"])):  # pyright: ignore[reportArgumentType]
                    axes.axvline(step, color=colour, linewidth=0.9, alpha=0.7, linestyle=dash, zorder=0)
            axes.set_title(title_of(feature, 2.9))
            axes.set_xlabel("training step")
            axes.set_ylim(-0.05, 1.35)
            step_axis(axes.xaxis, means.index.tolist())
            if axes.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
                axes.set_ylabel("loss, share of the prior's")
        columns = 2 if len(features) == 1 else 3
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=columns)
    return figure
