"""Figure of a training: loss and what is learned."""

from typing import TYPE_CHECKING, Any

import pandas as pd

from emergent_heads.plots.axes import plain_step_axis
from emergent_heads.plots.look import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, style
from emergent_heads.plots.panels import stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def training_curve(metrics: pd.DataFrame, *, plateau: float, floor: float, solved_step: int | None = None) -> "Figure":
    """Loss of a training between the task's plateau and floor, above the share of answer positions learned.

    Args:
        metrics: as `Run.metrics`.
        plateau, floor: in nats, drawn as dashed lines.
        solved_step: marked by a vertical line.
    """
    with style():
        figure, (above, below) = stacked(5.4, 2.2, 2.2)
        look: dict[str, Any] = {"marker": "o" if len(metrics) <= 10 else None}
        above.plot(metrics["step"], metrics["train_loss_nats"], color=SKY, linewidth=1, label="training loss", **look)
        above.plot(metrics["step"], metrics["loss_nats"], color=BLUE, label="held-out loss", **look)
        above.axhline(plateau, color=GREY, linestyle="--", linewidth=1, label="plateau")
        above.axhline(floor, color="black", linestyle=":", linewidth=1, label="floor")
        below.plot(metrics["step"], metrics["share_learned"], color=VERMILION, label="positions learned", **look)
        below.plot(metrics["step"], metrics["exact_match"], color=GREEN, label="exact match", linestyle="--", **look)
        below.set_ylim(-0.03, 1.03)
        for axes in (above, below):
            if solved_step is not None:
                axes.axvline(solved_step, color=ORANGE, linewidth=1, label="solved")
            plain_step_axis(axes.xaxis, metrics["step"].tolist())
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0)
        above.set_ylabel("loss (nats)")
        above.tick_params(labelbottom=False)
        below.set_ylabel("share")
        below.set_xlabel("training step")
    return figure
