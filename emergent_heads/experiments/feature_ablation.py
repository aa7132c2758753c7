"""A solved model needs its quiet features: their directions are taken out, and matched controls."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from emergent_heads.analysis.ablation import CONTROLS, ablate_features
from emergent_heads.analysis.probes import Probes, fit_probes
from emergent_heads.analysis.subspaces import How
from emergent_heads.experiments.comparisons import LEAST_SEEDS, of_interval
from emergent_heads.experiments.probing import (
    ADDITION_8,
    ADDITION_12,
    ADDITION_16,
    BREADTH_FIRST,
    N_TEST,
    N_TRAIN,
    SUBARRAY,
    arms_of,
)
from emergent_heads.experiments.study import Check, Judgement, Study, select
from emergent_heads.models.hooked import EMBEDDING
from emergent_heads.plots.look import COLOURS, GREY, style
from emergent_heads.plots.panels import panel_grid
from emergent_heads.statistics import bootstrap_mean
from emergent_heads.storage import atomic_path
from emergent_heads.training.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEEDED = 0.2
"""Exact match that the best control must keep above the ablated feature."""
_PROBLEMS = (ADDITION_8, ADDITION_12, ADDITION_16, BREADTH_FIRST, SUBARRAY)
_KEPT = "ablation.parquet"
_LOUD = ("adjacency_list", "max_ending_here")  # of these tasks' features, loud in the paper
DRAWS = 32
LEACE = "LEACE below the last block"
PLANE = "hyperplane below the last block"
PAPER = "hyperplane at the best layer"
SAID = {"none": "no edit", "feature": "feature erased"}


def ablate_run(folder: Path) -> None:
    """Takes every feature out of a run's last checkpoint, once: the table stays in its folder."""
    if (folder / _KEPT).is_file():
        return
    run = Run.open(folder)
    how_much = {"n_train": N_TRAIN, "n_test": N_TEST, "seed": run.seed, "progress": False}
    probes = fit_probes(run.series.last, run.task, **how_much)
    below = probes.at_layers(range(EMBEDDING, run.config.n_layers - 1))
    ways: dict[str, tuple[Probes, How]] = {
        LEACE: (below, "leace"),
        PLANE: (below, "hyperplane"),
        PAPER: (probes, "hyperplane"),
    }
    tables = []
    for way, (chosen, how) in ways.items():
        found = ablate_features(run.series.last, run.task, chosen, DRAWS, how, seed=run.seed, progress=False)
        tables.append(found.table.assign(how=way))
    with atomic_path(folder / _KEPT) as temporary:
        pd.concat(tables, ignore_index=True).to_parquet(temporary)


def _judge(runs: pd.DataFrame, folder: Path) -> Judgement:
    rows = select(runs).loc[:, ["task", "run", "seed"]]
    tables = [
        pd.read_parquet(folder / row.run / _KEPT).assign(task=row.task, seed=row.seed) for row in rows.itertuples()
    ]
    found = pd.concat(tables, ignore_index=True)
    erased = found.loc[found["how"] == LEACE]
    checks = [
        _needed(str(task), str(feature), of_feature)
        for (task, feature), of_feature in erased.groupby(["task", "feature"], sort=False)  # pyright: ignore[reportGeneralTypeIssues]
        if feature not in _LOUD
    ]
    return Judgement(checks, table=_table(found), curves=found)


def _needed(task: str, feature: str, rows: pd.DataFrame) -> Check:
    """Whether the feature costs more exact match than the control that costs most, seed by seed."""
    kept = rows.pivot(index="seed", columns="edit", values="exact_match")
    lost = kept.loc[:, [name for name in CONTROLS if name in kept]].min(axis=1) - kept["feature"]
    interval = bootstrap_mean(lost.to_numpy(float), seed=0)
    means = kept.mean()
    controls = ", ".join(f"{name.replace('_', ' ')} {means[name]:.2f}" for name in CONTROLS if name in means)
    says = (
        f"exact match {means['none']:.2f} to {means['feature']:.2f}; {controls}; below the lowest control by "
        f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"
    )
    part = f"{task}, {feature} is needed"
    if len(lost) < LEAST_SEEDS:
        return Check(part, None, *interval, len(lost), f"{part}: {says}; only {len(lost)} seeds")
    return of_interval(part, interval, len(lost), says, above=NEEDED)


def _table(found: pd.DataFrame) -> pd.DataFrame:
    """Means over the seeds, a row per task, feature and way of taking it out."""
    means = found.pivot_table(
        index=["task", "feature", "how"], columns="edit", values="exact_match", aggfunc="mean", sort=False
    )
    removed = found.loc[found["edit"] == "feature"].groupby(["task", "feature", "how"], sort=False)
    more = removed[["removed_norm", "removed_variance", "refit_accuracy", "prior_accuracy"]].mean()
    columns = ["none", "feature", *[name for name in CONTROLS if name in means]]
    said = {"none": "no_edit", "feature": "feature_removed"}
    return means.loc[:, columns].rename(columns=said).join(more).reset_index()


def _draw(_: pd.DataFrame, judgement: Judgement) -> "Figure":
    """Exact match with the feature erased, and with the controls; a mark per seed."""
    assert judgement.curves is not None
    rows = judgement.curves
    rows = rows.loc[(rows["how"] == LEACE) & ~rows["feature"].isin(_LOUD)]
    tasks = list(dict.fromkeys(rows["task"]))
    edits = ["none", "feature", *CONTROLS]
    with style():
        figure, panels = panel_grid(len(tasks), width=3.9, height=2.9, per_row=3)
        for axes, task in zip(panels, tasks, strict=True):
            of_task = rows.loc[rows["task"] == task]
            features = list(dict.fromkeys(of_task["feature"]))
            for index, edit in enumerate(edits):
                colour = {"none": "black", "feature": COLOURS[1]}.get(
                    edit, [COLOURS[0], COLOURS[2], COLOURS[4], GREY][index - 2]
                )
                for place, feature in enumerate(features):
                    seeds = of_task.loc[(of_task["feature"] == feature) & (of_task["edit"] == edit), "exact_match"]
                    x = np.full(len(seeds), place + 0.12 * (index - 2.5))
                    axes.plot(
                        x,
                        seeds,
                        "o",
                        color=colour,
                        markersize=3,
                        alpha=0.8,
                        label=None if place else SAID.get(edit, edit.replace("_", " ")),
                    )
            axes.set_xticks(range(len(features)), [name.replace("_", "\n") for name in features], fontsize=6)
            axes.set(title=task, ylim=(-0.04, 1.06), xlim=(-0.6, len(features) - 0.4))
        panels[0].set_ylabel("exact match")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6)
    return figure


FEATURE_ABLATION = Study(arms_of(_PROBLEMS), _judge, _draw, "task", ablate_run)
