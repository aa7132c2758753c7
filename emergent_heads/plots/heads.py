"""Figures of heads: the map of a ranking, patterns before and after, recovery, scores along training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from emergent_heads.plots.axes import line, no_ticks, step_axis
from emergent_heads.plots.figure import new_figure
from emergent_heads.plots.look import BLUE, GREEN, GREY, VERMILION, look_of, plain, style
from emergent_heads.plots.panels import columns_grid, legend_height, panel_grid, stacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def head_map(delta_p: np.ndarray) -> "Figure":
    """Map of delta_p `[layer, head]`, first layer at the top; heads that were not run (NaN) are hatched."""
    from matplotlib.patches import Patch

    n_layers, n_heads = delta_p.shape
    limit = float(np.nanmax(np.abs(delta_p), initial=0.0)) or 1e-3
    with style():
        across, down = (min(0.42 if n_heads <= 12 else 0.3, 9 / n) for n in (n_heads, n_layers))
        figure = new_figure(max(3.2, across * n_heads + 1.6), max(2.0, down * n_layers + 0.9))
        axes = figure.subplots()
        if np.isnan(delta_p).any():
            axes.patch.set(facecolor="#EEEEEE", hatch="//////", edgecolor="#AAAAAA", linewidth=0)
            figure.legend(
                [Patch(facecolor="#EEEEEE", hatch="//////", edgecolor="#AAAAAA")],
                ["not run"],
                loc="outside upper left",
            )
        # Told apart with any colour vision, and in grey print by the rise being the darker one; zero is white.
        image = axes.imshow(delta_p, cmap=_diverging(), vmin=-limit, vmax=limit, aspect="auto")
        axes.spines[:].set_visible(False)
        axes.set_xticks(*_ticks(n_heads))
        axes.set_yticks(*_ticks(n_layers))
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        bar = figure.colorbar(image, ax=axes, label="Δp(target)", pad=0.03)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        if limit > 0.005 and min(across, down) >= 0.42:
            _write_cells(axes, delta_p, limit)
    return figure


def pattern_pairs(pairs: Sequence[tuple[str, np.ndarray, np.ndarray]], tokens: Sequence[str]) -> "Figure":
    """Attention patterns `[dest, src]` of heads on one prompt: pre above, post below, one column per head.

    Args:
        pairs: per head its title, its pattern before and its pattern after.
        tokens: the prompt's tokens; written at the axes where they are few enough to be read.
    """
    n = len(tokens)
    readable = n <= 32
    texts = [_token(token) for token in tokens]
    side = max(2.1, 0.105 * n + 0.6) if readable else 2.6
    side += 0.05 * max(map(len, texts)) if readable else 0
    marks = (list(range(n)), texts) if readable else _ticks(n, most=8)
    look: dict[str, Any] = {"fontsize": 6 if readable else 7}
    with style():
        width = side + 1.4 / min(4, len(pairs))  # the colour bar and the labels take their share
        figure, columns = columns_grid(len(pairs), 2, width=width, height=side, share_y=True)
        image: Any = None
        for column, ((title, pre, post), panels) in enumerate(zip(pairs, columns, strict=True)):
            for row, (axes, pattern) in enumerate(zip(panels, (pre, post), strict=True)):
                image = axes.imshow(pattern, cmap="Blues", vmin=0, vmax=1)
                axes.set_xticks([])
                if row == 0:
                    axes.set_title(title)
                else:
                    axes.set_xticks(*marks, rotation=90 if readable else 0, **look)
                if column % len(columns) == 0 or axes.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
                    axes.set_ylabel(f"{('before', 'after')[row]}: destination")
                    axes.set_yticks(*marks, **look)
        figure.supxlabel("source token" if readable else "source position", fontsize=9)
        every = [axes for panels in columns for axes in panels]
        figure.colorbar(image, ax=every, label="attention", shrink=0.6, pad=0.02)
    return figure


def recovery(table: pd.DataFrame) -> "Figure":
    """Recovered gap against the number of heads patched, with the band of the random sets."""
    with style():
        figure, (axes,) = panel_grid(1, width=5.2, height=3.2)
        random = table[table["heads"] == "random"]
        if len(random):
            axes.fill_between(
                random["k"], random["recovered_low"], random["recovered_high"], color=GREY, alpha=0.25, linewidth=0
            )
            axes.plot(random["k"], random["recovered_gap"], color=GREY, marker="s", label="random heads, same layers")
        for name, colour, marker, label in (
            ("greedy", GREEN, "^", "greedy order (chosen on these prompts)"),
            ("ranked", BLUE, "o", "top heads by Δp"),
        ):
            rows = table.loc[table["heads"] == name].sort_values("k")
            if len(rows):
                ends = [
                    (rows["recovered_gap"] - rows["recovered_low"]).clip(lower=0),
                    (rows["recovered_high"] - rows["recovered_gap"]).clip(lower=0),
                ]
                beside = rows["k"] * (0.96 if name == "greedy" else 1)  # so that neither hides the other
                axes.errorbar(
                    beside, rows["recovered_gap"], yerr=ends, color=colour, marker=marker, capsize=2, label=label
                )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        ks = [int(k) for k in sorted(table["k"].unique())]
        axes.set_xscale("log", base=2)
        axes.set_xlim(ks[0] / 1.25, ks[-1] * 1.25)
        ticks = _apart(np.log2(ks), 0.045 * np.log2(ks[-1] / ks[0]), 0.16 * np.log2(ks[-1] / ks[0]))
        axes.set_xticks([ks[tick] for tick in ticks], [*(str(ks[tick]) for tick in ticks[:-1]), f"all {ks[-1]}"])
        axes.xaxis.set_minor_locator(no_ticks())
        axes.set_xlabel("heads patched together (K)")
        axes.set_ylabel("recovered share of the gap")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def trajectories(table: pd.DataFrame, score: str | None = None) -> "Figure":
    """Each head's pattern score over the steps, above the task's p.

    Args:
        table: as `HeadTrajectories.table`.
        score: one score for all heads; by default, for each head the one that changes most.
    """
    with style():
        n_heads = len(table.groupby(["layer", "head"]))
        figure, (above, below) = stacked(5.4, max(2.5, legend_height(n_heads)), 2.5)
        for index, (head, rows) in enumerate(table.groupby(["layer", "head"], sort=False)):
            shares = ["previous_token", "induction", "duplicate_token", "first_token"]
            name = score or str((rows[shares].max() - rows[shares].min()).idxmax())
            label = "L{}H{}".format(*cast(tuple[int, int], head))
            above.plot(rows["step"], rows[name], label=f"{label}: {name.replace('_', ' ')}", **look_of(index))
        of_task = table.drop_duplicates("step")
        line(below, of_task, "p_target", VERMILION, "mean p(target)", marker="s")
        line(below, of_task, "share_matched", "black", "share of prompts matched")
        for axes in (above, below):
            step_axis(axes.xaxis, table["step"].tolist())
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0)
        above.set_ylabel("attention score" if score is None else score.replace("_", " "))
        above.tick_params(labelbottom=False)
        below.set_ylim(-0.03, 1.03)
        below.set_ylabel("probability, share")
        below.set_xlabel("training step")
    return figure


def _ticks(n: int, most: int = 16) -> tuple[list[int], list[str]]:
    """Places and numbers of at most so many ticks for things counted from 0."""
    every = -(-n // most)
    places = list(range(0, n, every))
    return places, list(map(str, places))


def _diverging() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    ends = [(0.0, "#EE8C2B"), (0.5, "#FFFFFF"), (0.8, BLUE), (1.0, "#003B66")]
    return LinearSegmentedColormap.from_list("orange-white-blue", ends)


def _write_cells(axes: "Axes", values: np.ndarray, limit: float) -> None:
    """The number in each cell, in thousandths where they are small, so that they fit."""
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        text = f"{value:+.3f}".replace("0.", ".")
        colour = "white" if value > 0.4 * limit else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=5, color=colour)


def _token(text: str) -> str:
    """A token at an axis: white space shown, long ones cut."""
    text = text if text.strip() else repr(text)
    return plain(text if len(text) <= 14 else f"{text[:13]}…")


def _apart(places: Sequence[float] | np.ndarray, least: float, last: float) -> list[int]:
    """Which of the ascending places can have ticks: `least` apart, and `last` from the last, which always has one."""
    kept: list[int] = []
    for index, place in enumerate(places[:-1]):
        if (not kept or place - places[kept[-1]] >= least) and places[-1] - place >= last:
            kept.append(index)
    return [*kept, len(places) - 1]
