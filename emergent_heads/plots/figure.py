"""Figures from nothing to a file: an empty one, one that shows a picture, one saved."""

from pathlib import Path
from typing import TYPE_CHECKING

from emergent_heads.plots.look import style
from emergent_heads.storage import atomic_path, check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of that size in inches, to be filled inside `style()`; the caller's to show or save."""
    from emergent_heads.plots.windowless import Figure

    return Figure(figsize=(width, height))


def save_figure(figure: "Figure", path: Path | str) -> Path:
    """Writes a figure as .png, .pdf or .svg by the suffix; a killed process leaves no half of it.

    Raises:
        OutputError: unknown suffix, or a folder that does not take files.
    """
    path = check_writable(path, FIGURE_SUFFIXES)
    with atomic_path(path) as temporary:
        figure.savefig(temporary)
    return path


def picture(path: Path | str) -> "Figure":
    """A figure that shows a .png file, at its own size."""
    from matplotlib.image import imread

    pixels = imread(path)
    with style():
        height, width = (length / 150 for length in pixels.shape[:2])
        figure = new_figure(width, height)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.imshow(pixels)
        axes.set_axis_off()
    return figure
