"""Losses over compute budgets: the best configuration of each budget, a power law, and where the losses leave it.

"Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997) draws the lowest loss under each budget, chosen and
reported on the same rows, of one seed. Here the choice is made on some rows and reported on others, over seeds. All
functions work on tables, wherever these come from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from emergent_heads.analysis.transition import HasLossRange, Transition, find_transition
from emergent_heads.errors import ArgumentError
from emergent_heads.plots import frontier as frontier_plots
from emergent_heads.randomness import numpy_generator
from emergent_heads.results import Result
from emergent_heads.statistics import Interval, bootstrap_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_BUDGETS = 3
"""Budgets that a power law is fitted to at the least."""
LEVEL = 0.999
"""Of the prediction interval below which a budget's loss has left the power law."""
LEAST_DEPARTURE = 0.01
"""In natural logarithms: a loss within 1 % of the power law has not left it, however little the losses scatter."""


@dataclass(frozen=True)
class PowerLaw:
    """Excess loss in nats = coefficient * flops ** -exponent, a straight line on logarithmic axes.

    Attributes:
        coefficient: in nats, at 1 FLOP; with its bootstrap interval over the runs of each budget.
        exponent: likewise; positive where the loss falls.
        spread: standard deviation of the runs around the line, in natural logarithms.
        flops: the least and the most that it was fitted to.
        n_budgets, n_runs: that it was fitted to.
    """

    coefficient: Interval
    exponent: Interval
    spread: float
    flops: tuple[float, float]
    n_budgets: int
    n_runs: int

    def excess_nats(self, flops: "float | Float[np.ndarray, '*budget']") -> "Float[np.ndarray, '*budget']":
        """The excess loss that the line gives."""
        return self.coefficient.value * np.asarray(flops, float) ** -self.exponent.value


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Frontier(Result):
    """The best that each compute budget buys.

    Attributes:
        table: one row per budget: `budget_flops`; the configuration chosen, by its settings; `flops` (true),
            `flops_paper`, `sequences` and `tokens` of its training; `n_configurations` it was chosen from;
            `selection_loss_nats`, the mean by which it was chosen; on the rows of the report `loss_nats` and
            `exact_match`, means over `n_seeds` with bootstrap intervals over seeds; `law_loss_nats` of the power law;
            `phase`: "slow" before the start of the transition, "fast" up to its end, "after".
        seeds: one row per budget and seed of the configuration chosen, with the same columns.
        runs: one row per run that could be chosen or not: `budget_flops`, the settings, `seed`, `status`,
            `selection_loss_nats`, `chosen`.
        transition: of the losses over `x`, one curve for each seed; see `find_transition`.
        law: the power law of the smooth part, the losses before they leave it; None for fewer than 3 budgets.
        leaves_at: first budget from which all losses lie below the 99.9 % prediction interval of the law (and at least
            1 % below the law itself); None where they never do.
        plateau, floor: of the task, in nats.
        x: how FLOPs were counted, "flops" or "flops_paper".
    """

    seeds: pd.DataFrame
    runs: pd.DataFrame
    transition: Transition
    law: PowerLaw | None
    leaves_at: float | None
    plateau: float
    floor: float
    x: str

    def headline(self) -> str:
        parts = [f"frontier of {len(self.table)} budgets", self.transition.headline()]
        if self.law is not None:
            left = "never left" if self.leaves_at is None else f"left at {self.leaves_at:.3g}"
            parts.append(f"power law C^{-self.law.exponent.value:.3g}, {left}")
        return "; ".join(parts)

    def shown(self) -> pd.DataFrame:
        hidden = {"flops", "flops_paper", "sequences", "tokens", "law_loss_nats"} - {self.x}
        return self.table.loc[:, [name for name in self.table if name not in hidden]]

    def plot(self) -> "Figure":
        """Loss above the floor against FLOPs on logarithmic axes: all runs, the frontier, the law; and exact match."""
        law = self.law
        return frontier_plots.frontier(
            self.runs,
            self.table,
            self.seeds,
            x=self.x,
            plateau=self.plateau,
            floor=self.floor,
            law=None if law is None else (law.flops, law.excess_nats),
            leaves_at=self.leaves_at,
            fast=(self.transition.start, self.transition.end),
        )


def frontier_from_tables(
    runs: pd.DataFrame,
    seeds: pd.DataFrame,
    task: HasLossRange,
    settings: Sequence[str],
    *,
    x: str = "flops",
    about: Mapping[str, Any] | None = None,
) -> Frontier:
    """The frontier of runs that were chosen (by `choose_configurations`) and evaluated on the rows of the report.

    Args:
        runs: as `choose_configurations` gives them.
        seeds: one row per run chosen: `budget_flops`, the settings, `seed`, `flops`, `flops_paper`, `sequences`,
            `tokens`, `selection_loss_nats`, `loss_nats`, `exact_match`.
        task: what knows plateau and floor.
        settings: columns that make a configuration.
        x: column of the FLOPs.
        about: of the result.

    Raises:
        ArgumentError: fewer than two budgets.
    """
    if seeds["budget_flops"].nunique() < 2:
        raise ArgumentError("a frontier needs at least two budgets under which a configuration could be chosen")
    curves = [rows for _, rows in seeds.groupby("seed") if len(rows) > 1]
    transition = find_transition(curves, task, x=x)
    law, leaves_at = smooth_part(seeds[x].to_numpy(float), seeds["loss_nats"].to_numpy(float) - task.floor)
    rows = [_row(rows, runs.loc[runs["budget_flops"] == budget], settings) for budget, rows in _by_budget(seeds)]
    table = pd.DataFrame(rows)
    places = table[x].to_numpy(float)
    table["law_loss_nats"] = np.nan if law is None else task.floor + law.excess_nats(places)
    table["phase"] = [_phase(place, transition) for place in places]
    return Frontier(
        table,
        seeds=seeds,
        runs=runs,
        transition=transition,
        law=law,
        leaves_at=leaves_at,
        plateau=float(task.plateau),
        floor=float(task.floor),
        x=x,
        about={**(about or {}), "plateau": float(task.plateau), "floor": float(task.floor), "flops_counted": x},
    )


def choose_configurations(runs: pd.DataFrame, settings: Sequence[str]) -> pd.DataFrame:
    """Chooses one configuration for each budget: the one with the lowest mean selection loss over its seeds.

    A configuration is passed over where one of its runs has no finite loss, or where another has more seeds under the
    same budget. Of equal means the first row wins.

    Args:
        runs: one row per run: `budget_flops`, the settings, `seed`, `selection_loss_nats` (NaN where it failed).
        settings: columns that make a configuration.

    Returns:
        The table with the column `chosen`; a budget of which no configuration is left has no run chosen.
    """
    chosen = pd.Series(False, index=runs.index)
    for _, rows in _by_budget(runs):
        groups = [group for _, group in rows.groupby(list(settings), sort=False, dropna=False)]
        most = max(len(group) for group in groups)
        whole = [group for group in groups if len(group) == most and np.isfinite(group["selection_loss_nats"]).all()]
        if whole:
            best = min(whole, key=lambda group: float(group["selection_loss_nats"].mean()))
            chosen[best.index] = True
    return runs.assign(chosen=chosen)


def smooth_part(
    flops: Float[np.ndarray, " run"], excess_nats: Float[np.ndarray, " run"]
) -> tuple[PowerLaw | None, float | None]:
    """The power law that the losses follow at first, and the first budget from which they have left it.

    The law is fitted to as few of the smallest budgets (at least 3) as it takes for the mean logarithms of *all* later
    budgets to lie below the 99.9 % prediction interval that the scatter of runs and budgets around the line gives, and
    at least 1 % below the line: one bad budget is no departure. Where that never happens, it is fitted to all.

    Args:
        flops: of each run; runs of the same budget have the same.
        excess_nats: loss minus floor of each run; 0 or less lies below every law.

    Returns:
        The law, None for fewer than 3 budgets with losses above the floor; and the budget, None where they stay.
    """
    flops, excess = np.asarray(flops, float), np.asarray(excess_nats, float)
    budgets = np.unique(flops)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(excess > 0, np.log(excess), -np.inf)
    for n in range(FEWEST_BUDGETS, len(budgets)):
        early = flops < budgets[n]
        if not np.isfinite(logs[early]).all():
            break
        line = _Line.fit(np.log(flops[early]), logs[early])
        if all(line.is_left(budget, logs[flops == budget]) for budget in budgets[n:]):
            return fit_power_law(flops[early], excess[early]), float(budgets[n])
    above = np.isfinite(logs)
    if len(np.unique(flops[above])) < FEWEST_BUDGETS:
        return None, None
    return fit_power_law(flops[above], excess[above]), None


def fit_power_law(
    flops: Float[np.ndarray, " run"], excess_nats: Float[np.ndarray, " run"], *, seed: int = 0, n_resamples: int = 2000
) -> PowerLaw:
    """Fits excess = a * flops ** -b by least squares on logarithms.

    The intervals (95 %) are of a bootstrap that draws runs anew within each budget; NaN with one run a budget.

    Args:
        flops: of each run; runs of the same budget have the same.
        excess_nats: loss minus floor of each run.
        seed: of the bootstrap.
        n_resamples: of the bootstrap.

    Raises:
        ArgumentError: fewer than two budgets, or a value that is not above 0.
    """
    flops, excess = np.asarray(flops, float), np.asarray(excess_nats, float)
    if not (np.isfinite(flops) & np.isfinite(excess) & (flops > 0) & (excess > 0)).all():
        raise ArgumentError("a power law needs FLOPs and excess losses above 0; leave the others out")
    budgets, budget_of = np.unique(flops, return_inverse=True)
    if len(budgets) < 2:
        raise ArgumentError(f"a power law needs at least two budgets, not {len(budgets)}")
    x, y = np.log(flops), np.log(excess)
    line = _Line.fit(x, y)
    low_high = [np.full(2, np.nan)] * 2
    if len(flops) > len(budgets):
        draws = numpy_generator(seed, "power law", len(flops)).random((n_resamples, len(flops)))
        slopes, intercepts = _resampled_lines(x, y, budget_of, draws)
        low_high = [np.quantile(values, [0.025, 0.975]) for values in (np.exp(intercepts), -slopes)]
    return PowerLaw(
        Interval(float(np.exp(line.intercept)), *map(float, low_high[0])),
        Interval(float(-line.slope), *map(float, low_high[1])),
        line.spread,
        (float(budgets[0]), float(budgets[-1])),
        len(budgets),
        len(flops),
    )


class _Line(NamedTuple):
    """A line by least squares on logarithms, and the runs' scatter around it.

    Attributes:
        slope, intercept: of the line.
        spread: standard deviation around it, with `freedom` degrees of freedom.
        middle, squares: mean of x, and the sum of the squared distances from it.
        n: runs.
    """

    slope: float
    intercept: float
    spread: float
    freedom: int
    middle: float
    squares: float
    n: int

    @classmethod
    def fit(cls, x: Float[np.ndarray, " run"], y: Float[np.ndarray, " run"]) -> "_Line":
        found = cast(Any, stats.linregress(x, y))
        slope, intercept, freedom = float(found.slope), float(found.intercept), max(1, len(x) - 2)
        spread = float(np.sqrt(((y - intercept - slope * x) ** 2).sum() / freedom))
        return cls(slope, intercept, spread, freedom, float(x.mean()), float(((x - x.mean()) ** 2).sum()), len(x))

    def is_left(self, budget: float, there: Float[np.ndarray, " run"]) -> bool:
        """Whether the mean of a later budget's runs lies below the prediction interval."""
        away = float(np.log(budget)) - self.middle
        error = self.spread * (1 / len(there) + 1 / self.n + away**2 / self.squares) ** 0.5
        half_width = max(LEAST_DEPARTURE, float(stats.t.ppf((1 + LEVEL) / 2, self.freedom)) * error)
        return bool(there.mean() < self.intercept + self.slope * np.log(budget) - half_width)


def _resampled_lines(
    x: Float[np.ndarray, " run"],
    y: Float[np.ndarray, " run"],
    budget_of: np.ndarray,
    draws: Float[np.ndarray, "resample run"],
) -> tuple[Float[np.ndarray, " resample"], Float[np.ndarray, " resample"]]:
    """Slopes and intercepts where each run is replaced by one of its own budget, drawn by a number from 0 to 1."""
    order = np.argsort(budget_of, kind="stable")
    sizes = np.bincount(budget_of)
    starts = np.concatenate([[0], sizes.cumsum()[:-1]])
    picked = order[starts[budget_of] + (draws * sizes[budget_of]).astype(int)]
    centred = x - x.mean()
    drawn = y[picked]
    slopes = drawn @ centred / (centred @ centred)
    return slopes, drawn.mean(axis=1) - slopes * x.mean()


def _row(rows: pd.DataFrame, runs: pd.DataFrame, settings: Sequence[str]) -> dict[str, Any]:
    """The row of a budget, from those of its seeds."""
    first = rows.iloc[0]
    row = {name: first[name] for name in ("budget_flops", *settings, "flops", "flops_paper", "sequences", "tokens")}
    row |= {
        "n_seeds": len(rows),
        "n_configurations": len(runs.groupby(list(settings), dropna=False)),
        "selection_loss_nats": float(rows["selection_loss_nats"].mean()),
    }
    for name in ("loss_nats", "exact_match"):
        interval = bootstrap_mean(rows[name].to_numpy(float), seed=0)
        row |= {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return row


def _phase(place: float, transition: Transition) -> str:
    if transition.slow_phase is not None and place <= transition.slow_phase[1]:
        return "slow"
    return "after" if transition.end is not None and place > transition.end else "fast"


def _by_budget(table: pd.DataFrame) -> "list[tuple[float, pd.DataFrame]]":
    return [(float(budget), rows) for budget, rows in table.groupby("budget_flops", sort=True)]  # pyright: ignore[reportArgumentType]
