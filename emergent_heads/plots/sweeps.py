"""Figure of a sweep: a measure of many runs against a setting."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from emergent_heads.plots.axes import log_steps, no_ticks, side_by_side
from emergent_heads.plots.figure import new_figure
from emergent_heads.plots.look import look_of, plain, style
from emergent_heads.plots.panels import legend_height

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def sweep(table: pd.DataFrame, means: pd.DataFrame, *, x: str, y: str, by: Sequence[str]) -> "Figure":
    """A measure of many runs against a setting: a mark per run and a line of means for each group.

    Args:
        table: one row per run; with a column `censored`, `y` is in steps, and runs that never got there are crosses at
            the top.
        means: one row per group and `x`, with `value`, `low` and `high`.
        x: column of the setting; numbers that span more than 6-fold stand on a logarithmic axis.
        y: column of the measure.
        by: columns of the settings that tell the groups apart, by colour.
    """
    if table[x].isna().any():
        table, means = (each.assign(**{x: each[x].map(str)}) for each in (table, means))
    place_of = _places(table[x])
    is_log = _is_log(place_of)
    gap = _smallest_gap([np.log2(place) if is_log else place for place in place_of.values()])
    censored = table["censored"].to_numpy(bool) if "censored" in table else np.zeros(len(table), dtype=bool)
    never = 2 * float(table["steps"].max()) if "censored" in table else 0.0
    groups = _groups(table, by)
    aside_legend = len(groups) > 8
    with style():
        longest = max(map(len, groups.values()))
        width = 5.6 + 0.07 * longest if aside_legend else 5.2
        figure = new_figure(width, max(3.8, legend_height(len(groups) + 1) if aside_legend else 0))
        axes = figure.subplots()
        for index, (key, label) in enumerate(groups.items()):
            aside = gap * min(0.1, 0.6 / len(groups)) * (index - (len(groups) - 1) / 2)

            def place(rows: pd.DataFrame, aside: float = aside, *, apart: bool = False) -> np.ndarray:
                places = rows[x].map(place_of).to_numpy(float)
                places = np.log2(places) if is_log else places
                places = places + aside + (0.2 * gap * side_by_side(places) if apart else 0)
                return np.exp2(places) if is_log else places

            look = look_of(index)
            marker = look.pop("marker")
            mine = _rows_of(table, by, key).to_numpy(bool)
            there, never_there = table.loc[mine & ~censored], table.loc[mine & censored]
            beside = place(there, apart=len(place_of) == 1)
            axes.plot(beside, there[y].to_numpy(float), marker, alpha=0.45, markeredgewidth=0, **look)
            axes.plot(place(never_there, apart=True), np.full(len(never_there), never), "x", **look)
            line = means.loc[_rows_of(means, by, key)].dropna(subset="value")
            line = line.iloc[np.argsort(place(line))]
            ends = [line["value"] - line["low"], line["high"] - line["value"]]
            ends = [end.fillna(0).clip(lower=0) for end in ends]  # a single run has no interval
            axes.errorbar(place(line), line["value"], yerr=ends, capsize=2, marker=marker, label=label, **look)
        if "censored" in table:
            extra = {never: "never"} if censored.any() else {}
            ends = means[["value", "low", "high"]].to_numpy(float)
            steps = [*table.loc[~censored, y], *ends[np.isfinite(ends) & (ends > 0)]]
            log_steps(axes.yaxis, steps or [1.0], extra=extra)
        _setting_axis(axes, place_of, is_log=is_log)
        axes.set_xlabel(x.replace("_", " "))
        axes.set_ylabel(y.replace("_nats", " (nats)").replace("_", " "))
        if by:
            named = ", ".join(by).replace("_", " ")
            if aside_legend:
                figure.legend(loc="outside right upper", title=named)
            else:
                figure.legend(loc="outside upper center", ncols=2 if longest > 12 else 4, title=named)
    return figure


def _groups(table: pd.DataFrame, by: Sequence[str]) -> dict[tuple[Any, ...], str]:
    """Values of the columns `by` that occur together, each with a label that names the values."""
    if not by:
        return {(): ""}
    keys = table.loc[:, list(by)].drop_duplicates().itertuples(index=False, name=None)
    return {key: plain(", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in key)) for key in keys}


def _rows_of(table: pd.DataFrame, by: Sequence[str], key: tuple[Any, ...]) -> pd.Series:
    """Which rows have these values, where a missing value equals itself."""
    mine = pd.Series(True, index=table.index)
    for name, value in zip(by, key, strict=True):
        mine &= table[name].isna() if pd.isna(value) else table[name] == value
    return mine


def _places(setting: pd.Series) -> dict[Any, float]:
    """Place on the axis of each value of a setting: itself where all are numbers, else its number in order."""
    values = list(dict.fromkeys(setting))
    if pd.api.types.is_numeric_dtype(setting) and not pd.api.types.is_bool_dtype(setting):
        return {value: float(value) for value in values}
    return {value: float(place) for place, value in enumerate(values)}


def _is_log(place_of: Mapping[Any, float]) -> bool:
    """Whether values of a setting are numbers that span more than 6-fold."""
    places = list(place_of.values())
    named = any(value != place for value, place in place_of.items())
    return not named and min(places) > 0 and max(places) > 6 * min(places)


def _smallest_gap(places: Sequence[float]) -> float:
    return float(np.diff(np.unique(places)).min()) if len(set(places)) > 1 else 1.0


def _setting_axis(axes: "Axes", place_of: Mapping[Any, float], *, is_log: bool) -> None:
    """An axis with a tick at each value of a setting."""
    places = sorted(place_of.values())
    named = any(value != place for value, place in place_of.items())
    if is_log:
        axes.set_xscale("log", base=2)
    if named or len(places) <= 10:
        labels = {place: str(value) if named else f"{value:g}" for value, place in place_of.items()}
        long = named and sum(map(len, labels.values())) > 44
        axes.set_xticks(places, [plain(labels[place]) for place in places], rotation=90 if long else 0)
        axes.xaxis.set_minor_locator(no_ticks())
    if named or len(places) == 1:
        axes.set_xlim(places[0] - 0.5, places[-1] + 0.5)
