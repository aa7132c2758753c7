"""Finding 1: on the linear map output bits are learned one at a time, each when some head's entropy drops.

As in the paper, a head's attention is averaged over held-out sequences, and its entropy at the query that predicts an
output bit is summed over the keys of the first state.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from emergent_heads.experiments.comparisons import LEAST_SEEDS
from emergent_heads.experiments.recipes import LINEAR_MAP as RECIPE
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import LINEAR_MAP, Arm, Check, Judgement, Study
from emergent_heads.plots.figure import new_figure
from emergent_heads.plots.look import GREY, style
from emergent_heads.statistics import Interval, bootstrap_mean
from emergent_heads.tasks import LinearMap
from emergent_heads.training.evaluation import LEARNED
from emergent_heads.training.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from emergent_heads.models.small import SmallModel

EVERY = 20  # steps between two looks at the attention
WINDOW = 60  # steps before a bit is learned, in which a head's entropy should fall
ROWS = 256
COLUMNS = ["seed", "bit", "learned_step", "rise_steps", "head", "entropy_drop_nats", "drop_elsewhere_nats"]


def _arms(recipes: Recipes) -> list[Arm]:
    every = recipes.sized(small=EVERY, paper=50)
    # Larger than the base configuration, so that bits are learned far enough apart, and without an early stop.
    longer = recipes.sized(small={"state_size": 12, "steps": 3000, "stop_when_solved": False}, paper={})
    steps = recipes.steps(longer.get("steps", RECIPE[recipes.scale]["steps"]))
    runs = recipes.linear_map(
        **longer,
        seed=range(recipes.sized(small=5, paper=3)),
        evaluate_every=every // 2,
        checkpoints=tuple(range(0, steps + 1, every)),
    )
    return [Arm(LINEAR_MAP, "", LINEAR_MAP, runs)]


def _judge(runs: pd.DataFrame, folder: Path) -> Judgement:
    rows, curves = [], []
    spans: dict[int, int] = {}
    for name in runs.loc[runs["status"] != "failed", "run"]:
        run = Run.open(folder / name)
        of_run = _bits(run)
        rows.append(of_run.table)
        curves.append(of_run.curves)
        spans[run.seed] = of_run.span
    table = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=COLUMNS)
    learned = table.loc[table["learned_step"].notna()]
    return Judgement([_abrupt(learned, spans), _entropy_falls(learned)], table=table, curves=pd.concat(curves))


def _abrupt(learned: pd.DataFrame, spans: dict[int, int]) -> Check:
    shares = [rows["rise_steps"].median() / spans[seed] for seed, rows in learned.groupby("seed") if spans[seed] > 0]  # pyright: ignore[reportArgumentType]
    interval = bootstrap_mean(np.array(shares, dtype=float), seed=0) if shares else Interval(*[float("nan")] * 3)
    part, n = "bits are learned abruptly", len(shares)
    says = (
        f"{part}: the median bit rises within {interval.value:.2f} of the steps from the first learned bit to the "
        f"last ({interval.low:.2f} to {interval.high:.2f})"
    )
    holds = True if interval.high < 0.5 else False if interval.low > 0.5 else None
    return Check(part, holds if n >= LEAST_SEEDS else None, *interval, n, says)


def _entropy_falls(learned: pd.DataFrame) -> Check:
    further = learned["entropy_drop_nats"] - learned["drop_elsewhere_nats"]
    per_seed = further.dropna().groupby(learned["seed"]).mean().to_numpy(float)
    interval = bootstrap_mean(per_seed, seed=0) if len(per_seed) else Interval(*[float("nan")] * 3)
    part, n = "a head's entropy falls when a bit is learned", len(per_seed)
    says = (
        f"{part}: in the {WINDOW} steps before, by {interval.value:+.2f} nats more than in other windows "
        f"({interval.low:+.2f} to {interval.high:+.2f})"
    )
    holds = True if interval.low > 0 else False if interval.high < 0 else None
    return Check(part, holds if n >= LEAST_SEEDS else None, *interval, n, says)


class _Bits:
    """What happened to each output bit of one run.

    Attributes:
        table: one row per bit.
        curves: loss of each bit and entropy of the head that is taken for it, over the checkpoints.
        span: steps from the first learned bit to the last.
    """

    def __init__(self, seed: int, bits: list[dict[str, float]], curves: pd.DataFrame) -> None:
        self.table = pd.DataFrame(bits, columns=COLUMNS).assign(seed=seed)
        self.curves = curves.assign(seed=seed)
        learned = self.table["learned_step"].dropna()
        self.span = int(learned.max() - learned.min()) if len(learned) else 0


def _bits(run: Run) -> _Bits:
    task = LinearMap(**{name: value for name, value in run.task_settings.items() if name != "task"})
    steps, entropies = head_entropies(run, task)
    answers = run.positions.loc[run.positions["is_answer"]]
    repeated = repeated_rows(task.transition)
    bits, curves = [], []
    for bit, (_, rows) in enumerate(answers.groupby("position")):
        if repeated[bit]:
            continue
        learned = rows.loc[rows["accuracy"] >= LEARNED, "step"]
        learned_step = float(learned.iloc[0]) if len(learned) else float("nan")
        drop, elsewhere, head = entropy_drop(steps, entropies[:, :, bit], learned_step)
        bits.append(
            {
                "bit": bit,
                "learned_step": learned_step,
                "rise_steps": rise(rows["step"].to_numpy(), rows["loss_nats"].to_numpy(), learned_step),
                "head": head,
                "entropy_drop_nats": drop,
                "drop_elsewhere_nats": elsewhere,
            }
        )
        losses = np.interp(steps, rows["step"], rows["loss_nats"])
        curves.append(
            pd.DataFrame({"bit": bit, "step": steps, "loss_nats": losses, "entropy_nats": entropies[:, head, bit]})
        )
    return _Bits(run.seed, bits, pd.concat(curves, ignore_index=True))


def repeated_rows(matrix: Int[np.ndarray, "cell source"]) -> list[bool]:
    """Which rows are the same as an earlier one."""
    rows = [tuple(row) for row in matrix.tolist()]
    return [row in rows[:index] for index, row in enumerate(rows)]


def head_entropies(run: Run, task: LinearMap) -> tuple[Int[np.ndarray, " step"], Float[np.ndarray, "step head bit"]]:
    """Entropy in nats of every head at the query of every output bit, at each checkpoint; heads of all layers."""
    tokens = task.batch(ROWS, seed=run.seed, split="held-out").tokens[:, :-1]
    series = run.series
    found = [_entropies(series[step].load(), tokens, task.state_size) for step in series.steps]
    return np.array(series.steps), torch.stack(found).numpy()


@torch.no_grad()
def _entropies(model: "SmallModel", tokens: Int[Tensor, "row pos"], size: int) -> Float[Tensor, "head bit"]:
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.config.n_layers)]
    _, cache = model.run_with_cache(tokens, names_filter=names, return_cache_object=False)
    pattern = torch.cat([cache[name].mean(dim=0) for name in names])[:, size - 1 : 2 * size - 1, :size]
    return -torch.xlogy(pattern, pattern).sum(dim=-1)


def rise(steps: Int[np.ndarray, " step"], losses: Float[np.ndarray, " step"], learned_step: float) -> float:
    """Steps in which a bit's loss comes down from 90 % to 10 % of ln 2; NaN for one that is not learned."""
    if not np.isfinite(learned_step):
        return float("nan")
    before = steps[(steps <= learned_step) & (losses > 0.9 * math.log(2))]
    start = float(before[-1]) if len(before) else float(steps[0])
    after = steps[(steps >= start) & (losses < 0.1 * math.log(2))]
    return float(after[0] if len(after) else steps[-1]) - start


def entropy_drop(
    steps: Int[np.ndarray, " step"], entropies: Float[np.ndarray, "step head"], learned_step: float
) -> tuple[float, float, int]:
    """How far a head's entropy falls in the window before a bit is learned, and in other windows of that length.

    Returns:
        The largest fall over heads in the window that ends at the first checkpoint from `learned_step` on; the mean
        over all windows that do not overlap with it of the largest fall over heads; the head of the first. NaNs and
        the head with the lowest entropy at the end for a bit that is not learned.
    """
    nan = float("nan")
    n = max(1, round(WINDOW / np.median(np.diff(steps)))) if len(steps) > 1 else 1
    if not np.isfinite(learned_step) or len(steps) <= n:
        return nan, nan, int(entropies[-1].argmin())
    ends = np.arange(n, len(steps))
    falls = entropies[ends - n] - entropies[ends]
    here = int(np.searchsorted(steps[ends], learned_step).clip(0, len(ends) - 1))
    apart = np.abs(np.arange(len(ends)) - here) >= n
    elsewhere = float(falls[apart].max(axis=1).mean()) if apart.any() else nan
    return float(falls[here].max()), elsewhere, int(falls[here].argmax())


def _draw(_: pd.DataFrame, judgement: Judgement) -> "Figure":
    import matplotlib as mpl

    assert judgement.curves is not None
    assert judgement.table is not None
    seed = judgement.curves["seed"].min()
    curves = judgement.curves.loc[judgement.curves["seed"] == seed]
    learned = judgement.table.loc[judgement.table["seed"] == seed].set_index("bit")["learned_step"]
    order = list(learned.dropna().sort_values().index)
    with style():
        figure = new_figure(6.4, 4.8)
        above, below = figure.subplots(2, 1, sharex=True)
        never = curves.loc[~curves["bit"].isin(order)]
        for index, (_, rows) in enumerate(never.groupby("bit")):
            label = "" if index else "not learned"
            above.plot(rows["step"], rows["loss_nats"], color=GREY, linewidth=0.6, label=label)
        for place, bit in enumerate(order):
            rows = curves.loc[curves["bit"] == bit]
            colour = mpl.colormaps["viridis"](place / max(1, len(order) - 1))
            above.plot(rows["step"], rows["loss_nats"], color=colour, label=f"bit {bit}")
            below.plot(rows["step"], rows["entropy_nats"], color=colour)
            at = float(np.interp(learned[bit], rows["step"], rows["entropy_nats"]))
            below.plot(learned[bit], at, "o", color=colour)
        above.set_ylabel("loss of an output bit (nats)")
        below.set_ylabel("entropy of its head (nats)")
        below.set_xlabel("training step (dots: the bit is learned)")
        figure.legend(loc="outside right upper")
    return figure


BITS = Study(_arms, _judge, _draw, "configuration")
