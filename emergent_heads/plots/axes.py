"""Axes of training steps and of whole numbers: scale, limits and ticks; lines and marks along them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


def line(
    axes: "Axes",
    table: pd.DataFrame,
    column: str,
    colour: str,
    label: str,
    interval: tuple[str, str] | None = None,
    marker: str = "o",
) -> None:
    axes.plot(table["step"], table[column], color=colour, marker=marker, label=label)
    if interval is not None:
        axes.fill_between(table["step"], table[interval[0]], table[interval[1]], color=colour, alpha=0.18, linewidth=0)


def side_by_side(places: np.ndarray) -> np.ndarray:
    """Offsets, within 0.3 of the middle, that keep apart the marks of one place, in their order."""
    offsets = np.zeros(len(places))
    for place in np.unique(places):
        here = np.nonzero(places == place)[0]
        reach = min(0.3, 0.07 * (len(here) - 1))
        offsets[here] = np.linspace(-reach, reach, len(here))
    return offsets


def step_axis(axis: "Axis", steps: Sequence[float]) -> None:
    """Training steps, on a logarithmic axis where they span more than 30-fold."""
    positive = [step for step in steps if step > 0]
    if positive and max(positive) > 30 * min(positive):
        log_steps(axis, steps)
    else:
        plain_step_axis(axis, steps)


def plain_step_axis(axis: "Axis", steps: Sequence[float]) -> None:
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))
    whole_axis(axis, steps)


def whole_axis(axis: "Axis", places: Sequence[float]) -> None:
    """Ticks at whole numbers; a single place has the only one, as the fractions around it say nothing."""
    if len(single := set(places)) == 1:
        axis.set_ticks(list(single))
    else:
        axis.set_major_locator(_whole_numbers())


def log_steps(axis: "Axis", steps: Sequence[float], extra: Mapping[float, str] | None = None) -> None:
    """Logarithmic axis for `steps`, with a place for step 0 where there is one, and ticks at `extra` heights."""
    from matplotlib.ticker import EngFormatter, NullLocator

    marks = dict(extra or {})
    low = min((step for step in steps if step > 0), default=1.0)
    high = max([*steps, low])
    x = axis is axis.axes.xaxis
    set_scale, set_limits = (
        (axis.axes.set_xscale, axis.axes.set_xlim) if x else (axis.axes.set_yscale, axis.axes.set_ylim)
    )
    top = 1.25 * max([high, *marks])
    if min(steps) > 0:
        set_scale("log")
        set_limits(low / 1.25, top)
    else:
        set_scale("symlog", linthresh=low, linscale=0.4)
        set_limits(-0.2 * low, top)
    first = 0.8 * low if min(steps) > 0 else 2 * low  # nearer to 0 than that, it would stand in its label
    ticks = _round_numbers(first, high)
    if len(ticks) < 2:  # a narrow range: its ends say more than a round number
        ticks = [float(low), float(high)] if high > 1.2 * low else [_rounded((low * high) ** 0.5)]
    if min(steps) <= 0:
        ticks = [0.0, *(tick for tick in ticks if tick >= first)]
    name = EngFormatter(sep="")
    axis.set_ticks([*ticks, *marks], [*(name(_rounded(tick)) for tick in ticks), *marks.values()])
    axis.set_minor_locator(NullLocator())


def _round_numbers(low: float, high: float) -> list[float]:
    """Powers of ten in the range; where these are fewer than three, also numbers in between."""
    found: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [factor * 10.0**power for power in range(-1, 19) for factor in factors]
        found = [number for number in found if low <= number <= high]
        if len(found) >= 3:
            break
    return found


def _rounded(number: float, digits: int = 3) -> float:
    return float(f"{number:.{digits}g}")


def no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True)
