"""Figures. Every function takes tables or arrays and gives a matplotlib figure, to be shown or saved by the caller."""

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from emergent_heads.storage import atomic_path, check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with any colour vision and in grey print.
BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE)
GREY = "#7F7F7F"
MARKERS = "os^dvP"


FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


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


def look_of(index: int) -> dict[str, Any]:
    """Colour and marker of the line of that index: told apart in grey print too, and 36 of them in colour."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
    }


def title_of(name: str, width: float) -> str:
    """Name of a feature or task as the title of a panel of this width in inches."""
    return plain(name.replace("_", " "), max(12, int(13 * width)))


def save_figure(figure: "Figure", path: Path | str) -> Path:
    """Writes a figure as .png, .pdf or .svg by the suffix; a killed process leaves no half of it.

    Raises:
        OutputError: unknown suffix, or a folder that does not take files.
    """
    path = check_writable(path, FIGURE_SUFFIXES)
    with atomic_path(path) as temporary:
        figure.savefig(temporary)
    return path


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


def evaluation(table: pd.DataFrame, *, mean: float) -> "Figure":
    """Probability of the target on each prompt, in descending order, with what was the top token marked.

    Args:
        table: as `Evaluation.table`.
        mean: of the probabilities, drawn as a dashed line.
    """
    rows = table.sort_values("p_target", ascending=False, ignore_index=True)
    with style():
        figure, (axes,) = panel_grid(1, width=5.2, height=3.0)
        size = 4 if len(rows) <= 200 else 2
        for matched, colour, marker, label in (
            (True, BLUE, "o", "target is the top token"),
            (False, VERMILION, "x", "another token is"),
        ):
            chosen = rows.index[rows["matched"] == matched]
            if len(chosen):
                of_all = f"{label} ({len(chosen)} of {len(rows)})"
                axes.plot(chosen + 1, rows["p_target"][chosen], marker, color=colour, markersize=size, label=of_all)
        axes.axhline(mean, color=GREY, linestyle="--", linewidth=1, label=f"mean {mean:.3g}")
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlim(0.5 - 0.02 * len(rows), len(rows) + 0.5 + 0.02 * len(rows))
        whole_axis(axes.xaxis, (rows.index + 1).tolist())
        axes.set_xlabel("prompts, by p(target)")
        axes.set_ylabel("p(target)")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def emergence_curve(
    table: pd.DataFrame, *, task: str, threshold: float, pre: int | None, post: int | None
) -> "Figure":
    """What was measured of a task at each evaluated checkpoint of one series.

    Args:
        table: column `step`, and either `share_matched` and `p_target` with their intervals, or `score`.
        task: name of the task, or of the score.
        threshold: drawn as a dashed line.
        pre: step of the last failing checkpoint; the interval up to `post` is shaded where both are given.
        post: step of the first passing checkpoint.
    """
    with style():
        figure, (axes,) = panel_grid(1, width=5.2, height=3.2)
        if "score" in table:
            _line(axes, table, "score", BLUE, plain(task, 40))
        else:
            _line(axes, table, "share_matched", BLUE, "share of prompts matched", ("share_low", "share_high"))
            _line(axes, table, "p_target", VERMILION, "mean p(target)", ("p_low", "p_high"), marker="s")
            axes.set_ylim(-0.03, 1.03)
        axes.axhline(threshold, color=GREY, linestyle="--", linewidth=1, label=f"threshold {threshold:g}")
        if pre is not None and post is not None:
            axes.axvspan(pre, post, color=ORANGE, alpha=0.35, linewidth=0, label=f"emergence: {pre} to {post}")
        step_axis(axes.xaxis, table["step"].tolist())
        axes.set_xlabel("training step")
        axes.set_ylabel(plain(task if "score" in table else f"{task}: share, probability", 44))
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def emergence_scatter(table: pd.DataFrame, summary: pd.DataFrame) -> "Figure":
    """Steps to emergence against size, one panel per task.

    Args:
        table: one row per series and task, as `EmergenceTable.table`. A series without a size has a column of its own.
        summary: one row per size and task, as `EmergenceTable.summary`; its restricted means are drawn per size.
    """
    tasks = list(dict.fromkeys(table["task"]))
    labels_of_rows = table["size"].where(table["size"].notna(), table["series"]).astype(str)
    labels = sorted(dict.fromkeys(labels_of_rows), key=_magnitude)
    place_of = {label: place for place, label in enumerate(labels)}
    long_labels = max(map(len, labels)) > 6
    last = float(table["last_step"].max())
    with style():
        width = max(2.6 if len(tasks) > 1 else 4.8, 0.8 + (0.24 if long_labels else 0.5) * len(labels))
        figure, panels = panel_grid(len(tasks), width=width, height=3.8 if long_labels else 2.8)
        for axes, task in zip(panels, tasks, strict=True):
            rows = table.loc[table["task"] == task]
            _mean_line(axes, summary.loc[summary["task"] == task], place_of)
            _dots(axes, rows, labels_of_rows[rows.index].map(place_of).to_numpy(float), never=2 * last)
            axes.set_title(plain(task, max(20, int(13 * width))))
            axes.set_xticks(range(len(labels)), list(map(plain, labels)), rotation=90 if long_labels else 0)
            axes.set_xlim(-0.6, len(labels) - 0.4)
            if axes.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
                axes.set_ylabel("training steps to emergence")
        never = {2 * last: "never"} if table["censored"].any() else {}
        log_steps(panels[0].yaxis, [*table["steps_to_emergence"], last], extra=never)
        _legend_once(figure, panels)
    return figure


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
        axes.xaxis.set_minor_locator(_no_ticks())
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
        _line(below, of_task, "p_target", VERMILION, "mean p(target)", marker="s")
        _line(below, of_task, "share_matched", "black", "share of prompts matched")
        for axes in (above, below):
            step_axis(axes.xaxis, table["step"].tolist())
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0)
        above.set_ylabel("attention score" if score is None else score.replace("_", " "))
        above.tick_params(labelbottom=False)
        below.set_ylim(-0.03, 1.03)
        below.set_ylabel("probability, share")
        below.set_xlabel("training step")
    return figure


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
            _plain_step_axis(axes.xaxis, metrics["step"].tolist())
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0)
        above.set_ylabel("loss (nats)")
        above.tick_params(labelbottom=False)
        below.set_ylabel("share")
        below.set_xlabel("training step")
    return figure


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
                places = places + aside + (0.2 * gap * _side_by_side(places) if apart else 0)
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


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of that size in inches, to be filled inside `style()`; the caller's to show or save."""
    from emergent_heads.plots_figure import Figure

    return Figure(figsize=(width, height))


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


def _line(
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


def _dots(axes: "Axes", rows: pd.DataFrame, places: np.ndarray, never: float) -> None:
    """A mark per series, those of one column side by side; what never emerged stands at height `never`."""
    x = places + _side_by_side(places)
    steps = rows["steps_to_emergence"].to_numpy(float)
    censored = rows["censored"].to_numpy(bool)
    lost = ~censored & (rows["persistent"].astype("boolean") == False).fillna(False).to_numpy(bool)  # noqa: E712
    start = ~censored & (rows["status"] == "from the start").to_numpy()
    marks: tuple[tuple[str, np.ndarray, dict[str, Any]], ...] = (
        ("emerged", ~censored & ~lost & ~start, {"marker": "o", "color": BLUE}),
        ("emerged, lost again later", lost & ~start, {"marker": "o", "color": BLUE, "markerfacecolor": "white"}),
        ("there from the start", start, {"marker": "^", "color": GREEN}),
        ("never, by the last step", censored, {"marker": "x", "color": GREY}),
    )
    for label, which, look in marks:
        if which.any():
            height = np.where(censored, never, steps)[which]
            axes.plot(x[which], height, linestyle="none", zorder=3, label=label, **look)


def _side_by_side(places: np.ndarray) -> np.ndarray:
    """Offsets, within 0.3 of the middle, that keep apart the marks of one place, in their order."""
    offsets = np.zeros(len(places))
    for place in np.unique(places):
        here = np.nonzero(places == place)[0]
        reach = min(0.3, 0.07 * (len(here) - 1))
        offsets[here] = np.linspace(-reach, reach, len(here))
    return offsets


def _mean_line(axes: "Axes", summary: pd.DataFrame, place_of: dict[str, int]) -> None:
    means = summary.loc[summary["size"].notna()]
    if means.empty:
        return
    means = means.assign(place=means["size"].astype(str).map(place_of)).sort_values("place")
    mean = means["restricted_mean_step"]
    ends = [mean - means["restricted_mean_low"], means["restricted_mean_high"] - mean]
    ends = [end.fillna(0).clip(lower=0) for end in ends]  # a single seed has no interval
    look = {"color": VERMILION, "marker": "_", "markersize": 10, "linewidth": 0.9, "capsize": 2}
    axes.errorbar(means["place"], mean, yerr=ends, label="restricted mean, 95 % interval", **look)


def step_axis(axis: "Axis", steps: Sequence[float]) -> None:
    """Training steps, on a logarithmic axis where they span more than 30-fold."""
    positive = [step for step in steps if step > 0]
    if positive and max(positive) > 30 * min(positive):
        log_steps(axis, steps)
    else:
        _plain_step_axis(axis, steps)


def _plain_step_axis(axis: "Axis", steps: Sequence[float]) -> None:
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


def _apart(places: Sequence[float] | np.ndarray, least: float, last: float) -> list[int]:
    """Which of the ascending places can have ticks: `least` apart, and `last` from the last, which always has one."""
    kept: list[int] = []
    for index, place in enumerate(places[:-1]):
        if (not kept or place - places[kept[-1]] >= least) and places[-1] - place >= last:
            kept.append(index)
    return [*kept, len(places) - 1]


def _token(text: str) -> str:
    """A token at an axis: white space shown, long ones cut."""
    text = text if text.strip() else repr(text)
    return plain(text if len(text) <= 14 else f"{text[:13]}…")


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True)


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


def _legend_once(figure: "Figure", panels: Sequence["Axes"]) -> None:
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
        axes.xaxis.set_minor_locator(_no_ticks())
    if named or len(places) == 1:
        axes.set_xlim(places[0] - 0.5, places[-1] + 0.5)


def _magnitude(label: str) -> tuple[float, str]:
    """Sort key of a size such as "70m" or "pythia-1.4b-deduped", or of a plain number; other labels come last."""
    found = re.search(r"(?:^|[^\w.])(\d+(?:\.\d+)?)([kmbt]?)(?![\w.])", label.lower())
    if found is None:
        return float("inf"), ""
    return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2]], label
