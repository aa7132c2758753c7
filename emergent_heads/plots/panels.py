"""Panels of a figure, in grids, columns and stacks, and the legends beside them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from emergent_heads.plots.figure import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def panel_grid(
    n: int, *, width: float, height: float, per_row: int | None = None, share_y: bool = True
) -> tuple["Figure", Sequence["Axes"]]:
    """Figure with `n` panels of that size in inches, by default in rows of at most four or 11 inches."""
    per_row = per_row or max(1, min(n, 4, int(11 / width)))
    n_rows = -(-n // per_row)
    figure = new_figure(width * per_row, height * n_rows + 0.4)
    grid = figure.subplots(n_rows, per_row, sharey=share_y, squeeze=False)
    for unused in grid.flat[n:]:
        unused.remove()
    return figure, list(grid.flat[:n])


def columns_grid(
    n: int, rows: int, *, width: float, height: float, most: int = 4, share_y: bool = False
) -> tuple["Figure", Sequence[Sequence["Axes"]]]:
    """Figure with `n` columns of `rows` panels one above another; of the columns, at most `most` side by side."""
    across = min(n, most)
    figure, panels = panel_grid(
        rows * across * -(-n // across), width=width, height=height, per_row=across, share_y=share_y
    )
    columns = [
        [panels[(column // across * rows + row) * across + column % across] for row in range(rows)]
        for column in range(rows and len(panels) // rows)
    ]
    for unused in columns[n:]:
        for axes in unused:
            axes.remove()
    return figure, columns[:n]


def stacked(width: float, *heights: float) -> tuple["Figure", Sequence["Axes"]]:
    """Figure with panels of these heights in inches, one above another."""
    figure = new_figure(width, sum(heights) + 0.4)
    grid = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)
    return figure, list(grid.flat)


def legend_height(entries: int) -> float:
    """Inches that a legend of so many entries needs."""
    return 0.19 * entries + 0.2


def legend_once(figure: "Figure", panels: Sequence["Axes"]) -> None:
    """One legend for all panels, above them."""
    entries = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(dict(zip(labels, handles, strict=True)))
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside upper center",
        ncols=max(1, int(figure.get_figwidth() / 2.1)),
    )
