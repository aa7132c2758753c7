"""The figures that the library draws: no window of pyplot's holds them, and they look the same whatever its settings.

pyplot keeps the figures it makes, picks a backend for them and may open a window; a figure that a call returns needs
none of it. A notebook draws a figure of pyplot's twice where it is both returned and kept, and does not draw one that
pyplot has never seen, unless pyplot is loaded: hence the PNG repr.
"""

import io
from typing import Any

from matplotlib.figure import Figure as _MatplotlibFigure

from emergent_heads.plots.look import style


class Figure(_MatplotlibFigure):
    """A matplotlib figure that the caller shows or saves."""

    def draw(self, renderer: Any) -> None:
        # Ticks and layout are made while drawing, by the settings of that moment.
        with style():
            super().draw(renderer)

    def get_tightbbox(self, *args: Any, **kwargs: Any) -> Any:
        with style():
            return super().get_tightbbox(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()
