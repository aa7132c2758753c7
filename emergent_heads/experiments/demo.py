"""The whole job on one machine without downloads: train, find the points of emergence, rank heads, recover the gap.

Small GPT-NeoX models learn to repeat what they have read (see `small_language_model`). Everything after their
training is what a user would write for a published suite.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emergent_heads.errors import ArgumentError
from emergent_heads.experiments.small_language_model import Recipe, tokens_seen, train_series
from emergent_heads.plots.figure import save_figure
from emergent_heads.storage import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emergent_heads.analysis.emergence import EmergencePoint
    from emergent_heads.analysis.heads import HeadRanking
    from emergent_heads.analysis.recovery import RecoveryCurve
    from emergent_heads.checkpoints.series import CheckpointSeries
    from emergent_heads.tasks.language import TokenRepetition

RECIPE = Recipe()
PROCESSES = 2
LENGTH = 24
KS = (1, 2, 4)
FEW = 2  # of four heads in a layer: more random ones are nearly always the same
CONTROLS = 100


def run_demo(out: Path | str, *, seeds: int = 3, recipe: Recipe = RECIPE) -> Iterator[str]:
    """Runs the demo and tells what comes out, a paragraph or table at a time.

    Args:
        out: folder for checkpoints, tables (.csv) and figures (.png). Finished trainings in it are used again.
        seeds: models to train.
        recipe: what to train; each model gets a seed of its own.

    Raises:
        ArgumentError: no seeds, or the folder holds trainings of another recipe.
        OutputError: the folder does not take files.
    """
    out = Path(out)
    if seeds < 1:
        raise ArgumentError(f"seeds is {seeds}: train at least one model")
    check_writable(out / "emergence.csv")
    recipes = [replace(recipe, seed=seed) for seed in range(seeds)]
    yield (
        "Training a GPT-NeoX of 67,000 parameters on the text of the Python standard library: "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}, {recipe.steps} steps each."
    )
    folders = train_all(out / "checkpoints", recipes)
    with _one_thread():
        yield from _analyse(out, folders)


def train_all(out: Path, recipes: Sequence[Recipe]) -> list[Path]:
    """Trains a run per recipe, `out/seed0`, `out/seed1`, ..., two at a time; finished ones are left as they are."""
    folders = [out / f"seed{recipe.seed}" for recipe in recipes]
    missing = [row for row, folder in enumerate(folders) if not folder.exists()]
    for row in set(range(len(recipes))) - set(missing):
        train_series(folders[row], recipes[row])  # checks that it is the same recipe
    if missing:
        _train_in_processes([(folders[row], recipes[row], row) for row in missing])
    return folders


def _train_in_processes(jobs: Sequence[tuple[Path, Recipe, int]]) -> None:
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context, _prepare_process, (context.RLock(),)) as pool:
        waiting, running = list(jobs), set()
        while waiting or running:
            # No more than run at once: one that the pool holds ready would still be trained after an interrupt.
            while waiting and len(running) < PROCESSES:
                path, recipe, row = waiting.pop(0)
                running.add(pool.submit(train_series, path, recipe, progress_row=row))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for job in done:
                job.result()


def _prepare_process(lock: Any) -> None:
    import torch
    from tqdm.auto import tqdm
    from transformers.utils import logging

    torch.set_num_threads(1)
    tqdm.set_lock(lock)  # the bars of all processes share one terminal
    logging.disable_progress_bar()  # transformers' own, one for every checkpoint saved


def repetition_task(folders: Sequence[Path], n_prompts: int = 64) -> "TokenRepetition":
    """Random tokens that every run has seen in training, said twice without the last one."""
    from emergent_heads.tasks.language import TokenRepetition, in_context_repetition

    known = set.intersection(*(set(tokens_seen(folder)) for folder in folders))
    task = in_context_repetition(n_prompts, length=LENGTH, n_repeated=LENGTH - 1, vocabulary=sorted(known))
    assert isinstance(task, TokenRepetition)
    return task


def _analyse(out: Path, folders: Sequence[Path]) -> Iterator[str]:
    from emergent_heads.analysis.emergence import emergence_table
    from emergent_heads.checkpoints.series import CheckpointSeries

    task = repetition_task(folders)
    yield (
        f"\nThe capability: {task.length} different random tokens, said again; which is the last one? "
        f"{task.n_prompts} prompts; a guess is right once in {len(task.ids)}."
    )
    series = [CheckpointSeries.from_directory(folder) for folder in folders]
    emergence = emergence_table(series, task, "scan")
    emergence.save(out / "emergence.csv")
    yield "\n" + repr(emergence)
    curves: dict[str, RecoveryCurve] = {}
    for one, point in zip(series, emergence.points, strict=True):
        point.save(out / f"emergence-{one.name}.csv")
        save_figure(point.plot(), out / f"emergence-{one.name}.png")
        if point.status == "emerged":
            ranking, curves[one.name] = _rank(out, one, task, point)
            yield f"\n{ranking!r}\n\n{curves[one.name]!r}"
    save_figure(_overview(emergence.points, curves), out / "overview.png")
    yield "\n" + "\n".join(_sentences(emergence.points, curves))
    yield f"\nTables and figures are in {out}/; begin with {out / 'overview.png'}."


def _rank(
    out: Path, series: "CheckpointSeries", task: "TokenRepetition", point: "EmergencePoint"
) -> "tuple[HeadRanking, RecoveryCurve]":
    from emergent_heads.analysis.heads import rank_heads
    from emergent_heads.analysis.recovery import recovery_curve
    from emergent_heads.analysis.trajectories import head_trajectories

    pre, post = (series[step] for step in point.require())
    ranking = rank_heads(pre, post, task)
    curve = recovery_curve(pre, post, task, ranking, ks=KS, controls=CONTROLS)
    trajectories = head_trajectories(series, task, ranking)
    for name, result in {"heads": ranking, "recovery": curve, "trajectories": trajectories}.items():
        result.save(out / f"{name}-{series.name}.csv")
        save_figure(result.plot(), out / f"{name}-{series.name}.png")
    save_figure(ranking.plot_patterns(2), out / f"patterns-{series.name}.png")
    return ranking, curve


def _sentences(points: "Sequence[EmergencePoint]", curves: "dict[str, RecoveryCurve]") -> Iterator[str]:
    """What came out, in words."""
    solved = [point for point in points if point.status == "emerged"]
    steps = sorted({point.post for point in solved if point.post is not None})
    yield (
        f"{len(solved)} of {len(points)} models came to repeat the tokens"
        + (f", at {_listed('step', steps)}; they differ in their seed only." if steps else ".")
    )
    for point in points:
        yield _sentence(point, curves[point.series]) if point.series in curves else f"{point.headline()}."


def _sentence(point: "EmergencePoint", curve: "RecoveryCurve") -> str:
    columns = (curve.table[name].tolist() for name in ("heads", "k", "recovered_gap"))
    gaps = {(heads, k): gap for heads, k, gap in zip(*columns, strict=True)}
    best = [f"L{layer}H{head}" for layer, head in curve.about["heads"]]
    n_heads = max(k for _, k in gaps)
    return (
        f"{point.series}, step {point.pre} to {point.post}: the later patterns of the best {FEW} heads "
        f"({', '.join(best[:FEW])}) recover {gaps['ranked', FEW]:.0%} of the gap in p; {FEW} random heads of the same "
        f"layers {gaps['random', FEW]:.0%} on average, the best {KS[-1]} heads {gaps['ranked', KS[-1]]:.0%}, all "
        f"{n_heads} {gaps['ranked', n_heads]:.0%}."
    )


def _listed(noun: str, values: Sequence[int]) -> str:
    *others, last = map(str, values)
    return f"{noun}s {', '.join(others)} and {last}" if others else f"{noun} {last}"


def _overview(points: "Sequence[EmergencePoint]", curves: "dict[str, RecoveryCurve]") -> "Figure":
    """Left: share of prompts matched over the steps; right: recovered gap against K, random heads dashed."""
    from emergent_heads.plots.figure import new_figure
    from emergent_heads.plots.look import COLOURS, GREY, style

    with style():
        figure = new_figure(8.0, 3.2)
        left, right = figure.subplots(1, 2)
        for colour, point in zip(cycle(COLOURS), points, strict=False):
            left.plot(point.table["step"], point.table["share_matched"], "o-", color=colour, label=point.series)
            if point.series in curves:
                _draw_recovery(right, curves[point.series], colour)
        left.axhline(points[0].threshold, color=GREY, linestyle=":", linewidth=1)
        left.set(xlabel="training step", ylabel="share of prompts matched", ylim=(-0.03, 1.03))
        left.set_title("When did the capability emerge?")
        left.legend()
        right.axhline(0, color=GREY, linestyle=":", linewidth=1)
        right.set(xlabel="heads patched together (K)", ylabel="recovered share of the gap")
        right.set_title("Which heads made it? (dashed: random heads)")
    return figure


def _draw_recovery(axes: "Axes", curve: "RecoveryCurve", colour: str) -> None:
    table = curve.table.sort_values("k")
    for heads, look in (("ranked", "o-"), ("random", "s--")):
        rows = table[table["heads"] == heads]
        axes.plot(rows["k"], rows["recovered_gap"], look, color=colour, alpha=1.0 if heads == "ranked" else 0.6)
    axes.set_xscale("log", base=2)
    ks = table["k"].unique().tolist()
    axes.set_xticks(ks, [*map(str, ks[:-1]), f"all {ks[-1]}"])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small run slower on two threads than on one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
