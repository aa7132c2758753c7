"""Where does a loss drop? The transition of a training, or of losses over data or compute budgets.

Losses are compared as the share of the gap that is left, u = (loss - floor) / (plateau - floor): 1 on the plateau, 0
at the floor. The transition is where u comes down to 0.5, its start and end where u comes down to 0.9 and 0.1. "Quiet
Feature Learning in Algorithmic Tasks" (arXiv 2505.03997) sets these borders by hand; this is a rule for them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import pandas as pd
from jaxtyping import Float

from emergent_heads.errors import ArgumentError
from emergent_heads.results import Result
from emergent_heads.statistics import Interval, bootstrap_median

if TYPE_CHECKING:
    from matplotlib.figure import Figure

START, MIDDLE, END = 0.9, 0.5, 0.1
"""Shares of the gap left at which a transition starts, takes place and ends."""
ARRIVAL = 1.1
"""Share of the gap left at which an untrained model's loss, often far above the plateau, has come down to it."""
EXACT_MATCH = 0.5
"""Share of exact matches from which a task counts as done by half."""

CrossingStatus = Literal["crossed", "never", "from the start"]
Span = tuple[float, float]


class HasLossRange(Protocol):
    """A task, or anything else that knows these losses in nats."""

    @property
    def plateau(self) -> float:
        """Loss of a model that knows nothing but the tokens' frequencies."""
        ...

    @property
    def floor(self) -> float:
        """Lowest loss that any model can reach."""
        ...


class LossRange(NamedTuple):
    """Plateau and floor of a task that is not at hand, in nats."""

    plateau: float
    floor: float


@dataclass(frozen=True)
class Crossing:
    """Where a falling curve comes down to a level.

    Attributes:
        status: "crossed"; "never" (by the last evaluation); or "from the start" (by the first).
        step: where, interpolated; None unless the status is "crossed".
        low: last evaluation before it: if never, the last of all; None if from the start.
        high: first evaluation after it: if from the start, the first of all; None if never.
    """

    status: CrossingStatus
    step: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Transition(Result):
    """Where the loss of one or more runs drops. All places are in the unit of `x`; None where there is none.

    Attributes:
        table: one row per evaluation: `run` (from 0), `x` under its own name, the loss under its own name, `gap_left`
            (u) and, if known, `exact_match`.
        runs: one row per run: `status` ("crossed", "never", "from the start"), `step`, `low` and `high` (the
            evaluations on both sides of it), `start`, `end`, `exact_match_step`, `plateau_step` (where u comes down to
            1.1, from an untrained model's loss; NaN if it starts there), `first` and `last` evaluation.
        step: where u comes down to 0.5: of one run interpolated between two evaluations, of several the median.
        low, high: of one run the evaluations on both sides of `step`; of several a bootstrap interval over the runs,
            with no upper end where too many runs never got there.
        start, end: where u comes down to 0.9 and to 0.1; medians likewise.
        exact_match_step: where the share of exact matches comes up to 0.5; None also where it was not measured.
        slow_phase: from the first evaluation to the start, or to the last evaluation if there is no start.
        fast_phase: from the start to the end.
        x: what the places are: "step", "tokens", "flops".
        caveats: what the numbers hide, in sentences.
    """

    runs: pd.DataFrame
    step: float | None
    low: float | None
    high: float | None
    start: float | None
    end: float | None
    exact_match_step: float | None
    slow_phase: Span | None
    fast_phase: Span | None
    x: str
    caveats: tuple[str, ...]

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """Where each run crosses."""
        places = self.runs[["step", "low", "high"]].itertuples(index=False, name=None)
        return tuple(
            Crossing(status, *map(_finite, ends)) for status, ends in zip(self.runs["status"], places, strict=True)
        )

    def headline(self) -> str:
        n = len(self.runs)
        counts = self.runs["status"].value_counts()
        others = [f"{count} {status}" for status, count in counts.items() if status != "crossed"]
        whose = ", ".join(["1 run" if n == 1 else f"{n} runs", *others])
        if self.step is None:
            return f"no transition: {whose}"
        phase = "" if self.fast_phase is None else f", from {_number(self.start)} to {_number(self.end)}"
        between = f"{_number(self.low)} to {_number(self.high)}"
        return f"transition at {self.x} {_number(self.step)} ({between}; {whose}){phase}"

    def shown(self) -> pd.DataFrame:
        return self.runs

    def notes(self) -> Iterable[str]:
        return [f"caveat: {caveat}" for caveat in self.caveats]

    def plot(self) -> "Figure":
        """Share of the gap left against `x`, a thin line per run, with the fast phase shaded."""
        from emergent_heads.plots import quiet as quiet_plots

        return quiet_plots.transition(self.table, x=self.x, step=self.step, fast_phase=self.fast_phase)


def find_transition(
    metrics: pd.DataFrame | Sequence[pd.DataFrame],
    task: HasLossRange,
    *,
    x: str = "step",
    loss: str = "loss_nats",
    seed: int = 0,
) -> Transition:
    """Finds where the loss drops from the task's plateau to its floor.

    Three views, by the table that is given: within a run (`run.metrics`); at a fixed size over data budgets (one row
    per budget, `x="tokens"`); on the compute-optimal frontier (one row per budget, `x="flops"`).

    A level is crossed where splitting the evaluations into "above" before and "at or below" from there on leaves the
    fewest on the wrong side (the first such place of several). From there on more than half of the evaluations are at
    or below the level, up to there more than half are above, so that one bad evaluation neither makes nor unmakes a
    crossing. The place is interpolated linearly in u on the logarithmic axis of `x`, on which 0 stands at half of the
    first value above 0. An evaluation whose loss is not finite counts as above.

    Args:
        metrics: one table with a row per evaluation or budget, or several, one per run (seed).
        task: what knows `plateau` and `floor`; `LossRange(plateau, floor)` where the task is not at hand.
        x: column to place the transition on.
        loss: column of the loss, in nats.
        seed: of the bootstrap over runs.

    Raises:
        ArgumentError: a series without metrics (no table, no such column, fewer than 2 rows), a value of `x` that is
            negative, missing or there twice, or a plateau that is not above the floor.
    """
    tables = as_list(metrics, pd.DataFrame, "metrics", "tables such as run.metrics")
    check_loss_range(task)
    curves = [_Curve.read(table, x, loss, task, run) for run, table in enumerate(tables)]
    found = [curve.crossings() for curve in curves]
    middles, starts = ([each[name] for each in found] for name in ("step", "start"))
    runs = pd.DataFrame([{"run": run, **_row(curves[run], each)} for run, each in enumerate(found)])
    about = {
        "analysis": "transition",
        "plateau": float(task.plateau),
        "floor": float(task.floor),
        "x": x,
        "loss": loss,
    }
    start, end, exact_match = (
        _finite(_median([each[name] for each in found], seed).value) for name in ("start", "end", "exact_match_step")
    )
    return Transition(
        pd.concat([curve.table for curve in curves], ignore_index=True),
        runs=runs,
        **_place(middles, seed),
        start=start,
        end=end,
        exact_match_step=exact_match,
        slow_phase=_slow_phase(runs, starts, start),
        fast_phase=_span(start, end),
        x=x,
        caveats=(*_caveats(curves, middles, x), *_without_plateau(runs, x)),
        about={**about, "n_runs": len(curves), "seed": seed},
    )


def find_crossing(x: Float[np.ndarray, " place"], values: Float[np.ndarray, " place"], level: float) -> Crossing:
    """Where `values` come down to `level`, by the rule of `find_transition`.

    Args:
        x: ascending, at least 0.
        values: one at each place; inf counts as above.
        level: to be reached.
    """
    below = values <= level
    # Wrong sides of a split before place i: those below before it, those above from it on. The last split is "never".
    wrong = np.concatenate([[0], below.cumsum()]) + np.concatenate([(~below)[::-1].cumsum()[::-1], [0]])
    place = int(wrong[:-1].argmin())
    if wrong[-1] <= wrong[place]:
        return Crossing("never", None, float(x[-1]), None)
    if place == 0:
        return Crossing("from the start", None, None, float(x[0]))
    before, after = log_places(x)[place - 1 : place + 1]
    above = values[place - 1]
    way = (above - level) / (above - values[place]) if np.isfinite(above) else 1.0
    low, high = float(x[place - 1]), float(x[place])
    return Crossing("crossed", min(max(float(np.exp(before + way * (after - before))), low), high), low, high)


def log_places(x: Float[np.ndarray, " place"]) -> Float[np.ndarray, " place"]:
    """Places on the logarithmic axis; 0 stands at half of the first value above 0."""
    least = x[x > 0].min(initial=np.inf)
    return np.log(np.where(x > 0, x, least / 2))


def as_list(values: Any, kind: type, name: str, what: str) -> list[Any]:
    """One thing or several as a list.

    Raises:
        ArgumentError: it is neither a `kind` nor a list of them, or the list is empty; `what` says what is wanted.
    """
    several = [values] if isinstance(values, kind) else list(values) if isinstance(values, Sequence) else None
    if not several or not all(isinstance(value, kind) for value in several):
        raise ArgumentError(f"{name} must be one or several {what}, one for each run; got {_described(values)}")
    return several


def check_loss_range(task: HasLossRange) -> None:
    """Checks that plateau and floor are there and make sense.

    Raises:
        ArgumentError: they do not.
    """
    try:
        plateau, floor = float(task.plateau), float(task.floor)
    except (AttributeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{_described(task)} does not say its plateau and floor; give a task, or LossRange(plateau, floor)"
        ) from error
    if not (np.isfinite([plateau, floor]).all() and plateau > floor):
        raise ArgumentError(
            f"plateau {plateau:g} and floor {floor:g}: the plateau must be above the floor, both finite"
        )


@dataclass(frozen=True)
class _Curve:
    """Evaluations of one run, by ascending x."""

    table: pd.DataFrame
    x: Float[np.ndarray, " place"]
    gap_left: Float[np.ndarray, " place"]
    not_matched: Float[np.ndarray, " place"] | None

    @classmethod
    def read(cls, metrics: pd.DataFrame, x: str, loss: str, task: HasLossRange, run: int) -> "_Curve":
        where = f"the metrics of run {run}"
        if missing := [name for name in (x, loss) if name not in metrics.columns]:
            raise ArgumentError(
                f"a series without metrics: {where} lack the column {', '.join(map(repr, missing))}; they have "
                f"{list(map(str, metrics.columns))}"
            )
        check_places(metrics[x], where)
        if len(metrics) < 2:
            raise ArgumentError(f"a series without metrics: {where} have {len(metrics)} row(s); a drop needs 2")
        columns = [x, loss, *(["exact_match"] if "exact_match" in metrics.columns else [])]
        table = metrics.loc[:, columns].sort_values(x, ignore_index=True)
        losses = table[loss].to_numpy(float)
        gap_left = (np.where(np.isfinite(losses), losses, np.inf) - task.floor) / (task.plateau - task.floor)
        not_matched = 1 - table["exact_match"].to_numpy(float) if "exact_match" in table else None
        table = table.assign(gap_left=gap_left)
        table.insert(0, "run", run)
        return cls(table, table[x].to_numpy(float), gap_left, not_matched)

    def crossings(self) -> dict[str, Crossing]:
        """Where it starts, takes place and ends, and where half of the answers match."""
        levels = {"step": MIDDLE, "start": START, "end": END, "plateau_step": ARRIVAL}
        found = {name: find_crossing(self.x, self.gap_left, level) for name, level in levels.items()}
        unknown = Crossing("never", None, float(self.x[-1]), None)
        matched = unknown if self.not_matched is None else find_crossing(self.x, self.not_matched, 1 - EXACT_MATCH)
        return {**found, "exact_match_step": matched}


def check_places(places: pd.Series, where: str) -> None:
    """Checks the steps, tokens or FLOPs of a table.

    Raises:
        ArgumentError: one is negative, missing or there twice; `where` says whose.
    """
    values = np.asarray(pd.to_numeric(places, errors="coerce"), dtype=float)
    if (bad := ~(np.isfinite(values) & (values >= 0))).any():
        raise ArgumentError(f"{where}: {places.name} is {places.tolist()[bad.argmax()]!r}; it must be at least 0")
    if (twice := places.duplicated().to_numpy(bool)).any():
        raise ArgumentError(
            f"{where}: {places.name} {places.tolist()[twice.argmax()]} is there twice; give one table for each run, "
            f"with one row for each {places.name}"
        )


def _row(curve: _Curve, found: dict[str, Crossing]) -> dict[str, Any]:
    middle = found["step"]
    places = {
        "step": middle.step,
        "low": middle.low,
        "high": middle.high,
        **{name: found[name].step for name in ("start", "end", "exact_match_step", "plateau_step")},
        "first": curve.x[0],
        "last": curve.x[-1],
    }
    return {"status": middle.status, **{name: np.nan if at is None else at for name, at in places.items()}}


def _place(crossings: Sequence[Crossing], seed: int) -> dict[str, float | None]:
    """Where the runs cross, `step`, with its interval `low` to `high`: over the runs, or of a single one its own."""
    step, low, high = _median(crossings, seed)
    if not np.isfinite(step):
        return dict.fromkeys(("step", "low", "high"))
    if len(crossings) == 1:
        low, high = crossings[0].low, crossings[0].high
    return {"step": step, "low": _finite(low), "high": _finite(high)}


def _median(crossings: Sequence[Crossing], seed: int) -> Interval:
    """Median with its interval; NaN where the half of the runs, or more, were there from the start.

    A run that never got there counts as later than all others, one that was there from the start as its first place.
    """
    if 2 * sum(each.status == "from the start" for each in crossings) >= len(crossings):
        return Interval(np.nan, np.nan, np.nan)
    places = [
        each.step if each.step is not None else each.high if each.high is not None else np.inf for each in crossings
    ]
    return bootstrap_median(np.array(places), seed=seed)


def _slow_phase(runs: pd.DataFrame, starts: Sequence[Crossing], start: float | None) -> Span | None:
    """From the first evaluation to the start; to the last where most runs never left the plateau."""
    if start is not None:
        return _span(runs["first"].min(), start)
    never = sum(each.status == "never" for each in starts)
    return _span(runs["first"].min(), runs["last"].max()) if 2 * never >= len(starts) else None


def _span(first: float | None, last: float | None) -> Span | None:
    first, last = _finite(first), _finite(last)
    return None if first is None or last is None or last < first else (first, last)


def _caveats(curves: Sequence[_Curve], crossings: Sequence[Crossing], x: str) -> Iterable[str]:
    for run, (curve, found) in enumerate(zip(curves, crossings, strict=True)):
        of_run = "" if len(curves) == 1 else f"run {run}: "
        if found.status == "never":
            yield f"{of_run}u does not come down to {MIDDLE} by {x} {_number(found.low)}"
            if (curve.gap_left <= MIDDLE).any():
                yield f"{of_run}u was at or below {MIDDLE} for a while, and came back"
        elif found.status == "from the start":
            yield f"{of_run}u is at or below {MIDDLE} at the first evaluation already, {x} {_number(found.high)}"
        if found.status != "never" and curve.gap_left[-1] > MIDDLE:
            yield f"{of_run}u is above {MIDDLE} again at the last evaluation"
        if found.status == "crossed" and found.high == curve.x[-1]:
            yield f"{of_run}u comes down to {MIDDLE} at the last evaluation only"


def _without_plateau(runs: pd.DataFrame, x: str) -> Iterable[str]:
    """Runs whose loss falls through the plateau: from 1.1 to 0.9 within less than a doubling of `x`."""
    for row in runs.loc[runs["start"] < 2 * runs["plateau_step"]].to_dict("records"):
        of_run = "" if len(runs) == 1 else f"run {row['run']}: "
        between = f"between {x} {_number(row['plateau_step'])} and {_number(row['start'])}"
        yield f"{of_run}no plateau: u falls from {ARRIVAL} to {START} {between}"


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None


def _number(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.3g}"


def _described(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        kinds = dict.fromkeys(type(each).__name__ for each in value)
        return f"a {type(value).__name__} of {' and '.join(kinds)}" if kinds else "an empty list"
    return f"a {type(value).__name__}"
