"""Figures of probes: how much of the strongest baseline's loss is gone, as maps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from emergent_heads.plots.look import style, title_of
from emergent_heads.plots.panels import panel_grid

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
    widest = max(map(len, places.values()))
    width = min(5.0, max(1.5, 0.19 * widest + 0.3))
    per_row = max(1, min(len(features), int(9.3 / width)))
    most_tall = 6.0 if len(features) <= per_row else 3.0
    height = min(most_tall, max(1.5, 0.19 * len(values))) + 0.7
    with style():
        figure, panels = panel_grid(len(features), width=width + 1.7 / per_row, height=height, per_row=per_row)
        for axes, feature in zip(panels, features, strict=True):
            own = table.loc[table["feature"] == feature]
            cells = own.pivot(index=rows, columns="place", values="share_removed").reindex(list(values))
            axes.set_facecolor("#DDDDDD")
            axes.imshow(cells.to_numpy(float), vmin=0, vmax=1, aspect="auto")
            axes.set_title(title_of(feature, width))
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
            if axes.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
                axes.set_ylabel(name)
        tall = height * -(-len(features) // per_row)
        label = "share of baseline loss\nremoved"
        look: dict[str, Any] = {"pad": 0.02, "shrink": min(1.0, 4 / tall), "aspect": 5 * min(4.0, tall)}
        bar = figure.colorbar(panels[0].images[0], ax=list(panels), label=label, **look)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def _some(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """Places and labels of at most so many ticks."""
    every = -(-len(labels) // _MOST_TICKS)
    places = list(range(0, len(labels), every))
    return places, [labels[place] for place in places]
