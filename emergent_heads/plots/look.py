"""The look of all figures: colours, markers, matplotlib's settings, and text as it is written in them."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Okabe and Ito's colours, told apart with any colour vision and in grey print.
BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE)
GREY = "#7F7F7F"
MARKERS = "os^dvP"
_LOOKS = (
    "axes",
    "errorbar",
    "figure",
    "grid",
    "hatch",
    "image",
    "legend",
    "lines",
    "patch",
    "scatter",
    "text",
    "xtick",
)


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures, for what is drawn inside the block: of the caller's settings, only fonts matter."""
    import matplotlib as mpl
    from cycler import cycler

    plain = {name: value for name, value in mpl.rcParamsDefault.items() if name.split(".")[0] in (*_LOOKS, "ytick")}
    look: dict[Any, Any] = {
        **plain,
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": "medium",
        "figure.constrained_layout.use": True,
        "figure.dpi": 150,
        "font.size": 9,
        "image.cmap": "cividis",
        "legend.frameon": False,
        "legend.handlelength": 1.5,
        "lines.linewidth": 1.4,
        "lines.markersize": 4,
        "savefig.dpi": 150,
    }
    with mpl.rc_context(look):
        yield


def look_of(index: int) -> dict[str, Any]:
    """Colour and marker of the line of that index: told apart in grey print too, and 36 of them in colour."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
    }


def title_of(name: str, width: float) -> str:
    """Name of a feature or task as the title of a panel of this width in inches."""
    return plain(name.replace("_", " "), max(12, int(13 * width)))


def plain(text: str, width: int | None = None) -> str:
    """Text of a user's as matplotlib shall write it: no mathematics, every character visible, lines of this width.

    Two dollars would start mathematics, and a legend leaves out what begins with "_". A character that the font in use
    does not have is written by its number.
    """
    known = _characters()
    shown = "".join(
        char if ord(char) in known and char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    shown = textwrap.fill(shown, width) if width else shown
    shown = shown.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _characters() -> set[int]:
    """Numbers of the characters that the fonts in use have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    paths = {findfont(FontProperties(family=[family])) for family in FontProperties().get_family()}
    return {number for path in paths for number in get_font(path).get_charmap()}
