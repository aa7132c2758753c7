"""Figures of transitions and of the features learned before them, in the look of `emergent_heads.plots.look`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from emergent_heads.plots.axes import log_steps, step_axis
from emergent_heads.plots.look import BLUE, COLOURS, GREY, ORANGE, plain, style
from emergent_heads.plots.panels import legend_height, panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Span = tuple[float, float]

_HIGHEST = 1.3  # of the share of the gap left: an untrained model's loss may lie far above the plateau
_LINE_STYLES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))


def transition(table: pd.DataFrame, *, x: str, step: float | None, fast_phase: Span | None) -> "Figure":
    """Share of the gap between plateau and floor that is left, a line per run.

    Args:
        table: as `Transition.table`.
        x: its column along the axis.
        step: marked where there is one.
        fast_phase: shaded where there is one.
    """
    with style():
        figure, (axes,) = panel_grid(1, width=5.2, height=3.0)
        n_runs = table["run"].nunique()
        for run, rows in table.groupby("run"):
            label = None if run else "loss" if n_runs == 1 else "loss, a line per run"
            axes.plot(rows[x], rows["gap_left"], color="black", linewidth=1.4 if n_runs == 1 else 0.8, label=label)
        _shade(axes, step, fast_phase)
        gap_axes(axes, table[x].tolist(), "training step" if x == "step" else x)
        figure.legend(loc="outside upper center", ncols=3)
    return figure


def quiet_features(
    features: pd.DataFrame,
    curves: pd.DataFrame,
    losses: pd.DataFrame,
    *,
    transition: float | None,
    fast_phase: Span | None,
) -> "Figure":
    """The task's loss and each feature's probe loss, as shares of the way left; thin lines are seeds.

    Args:
        features: as `QuietFeatures.table`; what is not learned is named and not drawn.
        curves: as `QuietFeatures.curves`.
        losses: as `Transition.table`.
        transition: marked where there is one.
        fast_phase: shaded where there is one.
    """
    with style():
        figure, (axes,) = panel_grid(1, width=7.4, height=max(3.6, legend_height(len(features) + 3)))
        bundle(axes, losses, label="task loss: plateau to floor", color="black", linewidth=2.2, zorder=4)
        drawn = features.loc[features["verdict"] != "not learned"]
        for index, row in enumerate(drawn.to_dict("records")):
            # Styles change with every line, for grey print; colour and style together tell 24 features apart.
            dashes = _LINE_STYLES[(index + index // 12) % len(_LINE_STYLES)]
            look = {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes}
            bundle(axes, curves.loc[curves["feature"] == row["feature"]], label=_label(row), zorder=3, **look)
        _shade(axes, transition, fast_phase)
        for row in features.loc[features["verdict"] == "not learned", "feature"]:
            axes.plot([], [], linestyle="none", label=plain(f"{row}: not learned"))
        gap_axes(axes, [*losses["step"], *curves["step"]], "training step")
        axes.set_ylabel("share of the way left\n(1: plateau, baseline; 0: floor, best)")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    return figure


def early_warning(table: pd.DataFrame, *, correlation: float | None) -> "Figure":
    """Step of the transition against step of the warning, a dot per seed, with the line on which they are equal.

    Args:
        table: as `EarlyWarning.table`; runs without a warning are left out, those without a transition are crosses at
            the top.
        correlation: Spearman's, written above.
    """
    warned = table.loc[table["warning_step"].notna()]
    there = warned.loc[warned["transition_step"].notna()]
    never = warned.loc[warned["transition_status"] == "never"]
    steps = [*there["transition_step"], *warned["warning_step"]] or [1.0]
    top = 2 * max(steps)
    with style():
        figure, (axes,) = panel_grid(1, width=4.4, height=3.6)
        axes.plot(there["warning_step"], there["transition_step"], "o", color=BLUE, label="seed", zorder=3)
        if len(never):
            axes.plot(never["warning_step"], np.full(len(never), top), "x", color=GREY, label="no transition")
        ends = [min(steps) / 2, 2 * max(steps)]
        if warned.empty:
            axes.text(0.5, 0.9, "no seed was warned", ha="center", transform=axes.transAxes)
        axes.plot(ends, ends, color=GREY, linestyle=":", linewidth=1, label="no time between")
        log_steps(axes.xaxis, np.ceil(warned["warning_step"]).tolist() or [1.0])
        log_steps(axes.yaxis, np.ceil(steps).tolist(), extra={top: "never"} if len(never) else {})
        axes.set_xlabel("warning: step at which the probes left their baseline")
        axes.set_ylabel("step of the transition")
        if correlation is not None:
            axes.set_title(f"rank correlation {correlation:.2f}, {len(table)} seeds")
        figure.legend(loc="outside upper center", ncols=3)
    return figure


def bundle(axes: "Axes", rows: pd.DataFrame, *, label: str, **look: Any) -> None:
    """Median over the runs, above a thin line per run where there are several."""
    by_run = [(run["step"].to_numpy(float), run["gap_left"].to_numpy(float)) for _, run in rows.groupby("run")]
    steps, median = _median_curve(by_run)
    axes.plot(steps, median, label=label, **look)
    if len(by_run) > 1:
        for run_steps, gap_left in by_run:
            axes.plot(run_steps, gap_left, **{**look, "linewidth": 0.6, "alpha": 0.45})


def _median_curve(by_run: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Median at all steps that any run has, up to the last that all have; runs are joined by straight lines."""
    kept = [(steps, values) for steps, values in by_run if np.isfinite(values).any()]
    last = min(steps[-1] for steps, _ in kept)
    every = np.unique(np.concatenate([steps for steps, _ in kept]))
    every = every[every <= last]
    return every, np.median([np.interp(every, steps, values) for steps, values in kept], axis=0)


def _label(row: dict[str, Any]) -> str:
    lead = row["lead_steps"]
    if not np.isfinite(lead):
        return plain(f"{row['feature']}: {row['verdict']}", 44)
    when = f"{_steps(abs(lead))} steps {'before' if lead > 0 else 'after'}"
    return plain(f"{row['feature']}: {row['verdict']}, {when}", 44)


def _steps(steps: float) -> str:
    return f"{steps:,.0f}" if steps >= 10 else f"{steps:.1g}"


def _shade(axes: "Axes", step: float | None, fast_phase: Span | None) -> None:
    if fast_phase is not None:
        axes.axvspan(*fast_phase, color=ORANGE, alpha=0.25, linewidth=0, label="transition, 0.9 to 0.1", zorder=0)
    if step is not None:
        axes.axvline(step, color=ORANGE, linewidth=1, label=f"transition at {_steps(step)}", zorder=1)


def gap_axes(axes: "Axes", places: Sequence[float], label: str) -> None:
    for level in (0, 1):
        axes.axhline(level, color=GREY, linewidth=0.7, linestyle=":", zorder=0)
    axes.set_ylim(-0.12, _HIGHEST)
    step_axis(axes.xaxis, places)
    axes.set_xlabel(label)
    axes.set_ylabel("share of the gap left\n(1: plateau, 0: floor)")
