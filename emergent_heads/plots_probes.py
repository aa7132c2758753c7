"""Figures of probes: how much of the strongest baseline's loss is gone, as maps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from emergent_heads.plots import new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_TICKS = 12


def layer_maps(table: pd.DataFrame) -> "Figure":
    """One map per feature, layer against place; the best layer of each place has a dot.

    Args:
        table: as `Probes.table`.
    """
    layers = sorted(set(table["layer"]), reverse=True)
    labels = ["embedding" if layer < 0 else str(layer) for layer in layers]
    return _maps(table, "layer", layers, labels, "layer", dots=True)


def step_maps(table: pd.DataFrame) -> "Figure":
    """One map per feature, step against place, of the layer that is best at each step.

    Args:
        table: as `ProbeSeries.table`.
    """
    steps = sorted(set(table["step"]), reverse=True)
    return _maps(table.loc[table["is_best"]], "step", steps, [f"{step:,}" for step in steps], "training step")


def _maps(
    table: pd.DataFrame, rows: str, values: Sequence[int], labels: Sequence[str], name: str, *, dots: bool = False
) -> "Figure":
    features = list(dict.fromkeys(table["feature"]))
    places = {feature: sorted(set(table.loc[table["feature"] == feature, "place"])) for feature in features}
    widths = [min(5.0, max(1.5, 0.19 * len(places[feature]) + 0.3)) for feature in features]
    with style():
        figure = new_figure(sum(widths) + 1.7, max(1.9, 0.19 * len(values) + 1.1))
        panels = figure.subplots(1, len(features), width_ratios=widths, sharey=True, squeeze=False)
        for axes, feature in zip(panels[0], features, strict=True):
            own = table.loc[table["feature"] == feature]
            cells = own.pivot(index=rows, columns="place", values="share_removed").reindex(list(values))
            axes.set_facecolor("#DDDDDD")
            image = axes.imshow(cells.to_numpy(float), vmin=0, vmax=1, aspect="auto")
            axes.set_title(feature.replace("_", " "))
            axes.set_xlabel("place")
            axes.set_xticks(*_some(list(map(str, places[feature]))))
            axes.set_yticks(*_some(list(labels)))
            axes.spines[:].set_visible(False)
            if dots:
                best = own.loc[own["is_best"]]
                across = [places[feature].index(place) for place in best["place"]]
                down = [list(values).index(value) for value in best[rows]]
                axes.plot(
                    across, down, linestyle="none", marker="o", color="white", markeredgecolor="black", markersize=3
                )
        panels[0][0].set_ylabel(name)
        bar = figure.colorbar(image, ax=list(panels[0]), label="share of baseline loss\nremoved", pad=0.02)  # pyright: ignore[reportPossiblyUnboundVariable]
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def _some(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """Places and labels of at most so many ticks."""
    every = -(-len(labels) // _MOST_TICKS)
    places = list(range(0, len(labels), every))
    return places, [labels[place] for place in places]
