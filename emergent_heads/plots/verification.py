"""Figure of a verification: the norms of the weights along training."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from emergent_heads.plots.axes import step_axis
from emergent_heads.plots.look import GREY, VERMILION, style
from emergent_heads.plots.panels import panel_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def weight_norms(table: pd.DataFrame, *, outlier_at: float) -> "Figure":
    """Each matrix' norm as a multiple of its median over the checkpoints, a line each; outliers have a cross.

    Args:
        table: as `Verification.norms`.
        outlier_at: deviation from which on a norm is an outlier.
    """
    wide = table.pivot(index="step", columns="tensor", values="rms")
    usual = wide.median()
    relative = wide / usual.where(usual > 0, wide.max())  # a matrix that is zero at most checkpoints
    far = table.pivot(index="step", columns="tensor", values="deviation") >= outlier_at
    with style():
        figure, (axes,) = panel_grid(1, width=5.2, height=3.2)
        marker = "." if len(relative) <= 10 else None
        axes.plot(relative.index, relative.to_numpy(), color=GREY, alpha=0.5, linewidth=0.8, marker=marker)
        axes.plot([], [], color=GREY, linewidth=0.8, label=f"one of {wide.shape[1]} matrices")
        steps, matrices = np.nonzero(far.to_numpy())
        if len(steps):
            label = f"off its neighbours' line (deviation ≥ {outlier_at:g})"
            axes.plot(relative.index[steps], relative.to_numpy()[steps, matrices], "x", color=VERMILION, label=label)
        step_axis(axes.xaxis, wide.index.tolist())
        axes.set_xlabel("training step")
        axes.set_ylabel("norm of the matrix, over its median")
        figure.legend(loc="outside upper center", ncols=2)
    return figure
