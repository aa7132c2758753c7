"""Figure of a compute frontier: the best loss of each budget, and its exact match."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from emergent_heads.plots.look import BLUE, GREY, ORANGE, SKY, VERMILION, style
from emergent_heads.plots.panels import stacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def frontier(
    runs: pd.DataFrame,
    table: pd.DataFrame,
    seeds: pd.DataFrame,
    *,
    x: str,
    plateau: float,
    floor: float,
    law: "tuple[tuple[float, float], Callable[[np.ndarray], np.ndarray]] | None",
    leaves_at: float | None,
    fast: tuple[float | None, float | None],
) -> "Figure":
    """Loss above the floor of all runs and of the best of each compute budget, above the latter's exact match.

    Args:
        runs: one row per run, with `selection_loss_nats`.
        table: one row per budget, with `loss_nats` and `exact_match` and their intervals.
        seeds: one row per budget and seed, with the same columns.
        x: column of the FLOPs in all three.
        plateau, floor: in nats; the plateau is drawn as a dashed line. A solved task's losses are as good as 0: what
            lies below a thousandth of the way from floor to plateau stands on the lower edge.
        law: the FLOPs that a power law was fitted to, and the loss above the floor that it gives; dotted beyond.
        leaves_at: where the losses leave the law, a vertical line.
        fast: start and end of the transition; the part before is shaded as slow, up to the end as fast.
    """
    with style():
        figure, (above, below) = stacked(5.6, 2.6, 2.6)
        least = 1e-3 * (plateau - floor)
        losses = (runs["selection_loss_nats"] - floor).clip(lower=least)
        above.plot(runs[x], losses, "o", color=GREY, alpha=0.35, markeredgewidth=0, label="all runs")
        above.set_yscale("log")
        for axes, column, shift, lowest in ((above, "loss_nats", floor, least), (below, "exact_match", 0.0, 0.0)):
            mean, low, high = ((table[f"{column}{end}"] - shift).clip(lower=lowest) for end in ("", "_low", "_high"))
            ends = [end.fillna(0).clip(lower=0) for end in (mean - low, high - mean)]  # a single seed has none
            axes.plot(seeds[x], (seeds[column] - shift).clip(lower=lowest), "o", color=SKY, markersize=2.5, zorder=3)
            axes.errorbar(table[x], mean, yerr=ends, color=BLUE, marker="o", capsize=2, label="best of each budget")
        above.axhline(plateau - floor, color=GREY, linestyle="--", linewidth=1, label="plateau")
        if law is not None:
            (low, high), excess = law
            reach = np.geomspace(low, float(table[x].max()), 100)
            inside = reach <= high * 1.0001
            above.plot(reach[inside], excess(reach[inside]), color=VERMILION, label="power law")
            above.plot(reach[~inside], excess(reach[~inside]), color=VERMILION, linestyle=":")
        if leaves_at is not None:
            above.axvline(leaves_at, color=VERMILION, linewidth=0.8, label="losses leave the law")
        for axes in (above, below):
            axes.set_xscale("log")
            _shade_phases(axes, *fast)
        above.set_ylim(bottom=0.8 * least if min(above.get_ylim()) < least else None)
        above.set_ylabel("loss (nats)" if floor == 0 else "loss above the floor (nats)")
        above.tick_params(labelbottom=False)
        above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0)
        below.set_ylim(-0.03, 1.03)
        below.set_ylabel("exact match")
        below.set_xlabel("FLOPs of the training" + (", by the paper's formula" if x == "flops_paper" else ""))
    return figure


def _shade_phases(axes: "Axes", start: float | None, end: float | None) -> None:
    """Shades what comes before the start of a transition, and what comes from there to its end."""
    low, high = axes.get_xlim()
    if start is not None:
        axes.axvspan(low, start, color=SKY, alpha=0.12, linewidth=0, label="slow phase")
        axes.axvspan(start, high if end is None else end, color=ORANGE, alpha=0.2, linewidth=0, label="fast phase")
    axes.set_xlim(low, high)
