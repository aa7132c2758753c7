"""Grids of runs under compute budgets, as in "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997).

A combination of width, depth, batch and learning rate is trained for as many steps as a budget pays for. One that
would get only a handful of steps is left out: it would stand under a budget that it did not keep.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, product
from typing import Any, Literal

import numpy as np
import pandas as pd

from emergent_heads.errors import ArgumentError, nearest, whole_number
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.sweeps.measures import flops_of
from emergent_heads.sweeps.runs import RunSpec
from emergent_heads.tasks.task import SequenceTask
from emergent_heads.training.settings import TrainingSettings

Count = Literal["flops", "flops_paper"]
COUNTS: tuple[Count, ...] = ("flops", "flops_paper")
MOST_OFF = 0.05
"""Largest share by which the true FLOPs of a run may differ from the budget it stands under."""
LEAST_APART = 1.25
"""Least ratio of two budgets: the runs of closer ones could not be told apart by their true FLOPs."""
SELECTION_ROWS = 1000
_EVALUATIONS = 10
_WARMUP_SHARE = 0.1
_SETTINGS = ("n_layers", "d_model", "batch_size", "learning_rate")
_OWN = ("n_layers", "d_model", "learning_rate", "tokens_per_batch", "steps", "stop_when_solved")


class BudgetRuns(list[RunSpec]):
    """The runs of a budget grid: a list, which also says what was left out.

    Attributes:
        table: one row per budget and combination of settings, without the seeds: `budget_flops`, `n_layers`,
            `d_model`, `batch_size`, `learning_rate`, `steps` (budget over cost of a step, rounded), `flops` and
            `flops_paper` of the whole training in both counts, `off_share` (true FLOPs over budget, minus 1), and
            `left_out`: why, or None where it is trained.
    """

    def __init__(self, runs: Iterable[RunSpec], table: pd.DataFrame) -> None:
        super().__init__(runs)
        self.table = table

    def headline(self) -> str:
        """One line that says how many runs there are, and how many combinations were left out for what."""
        told = [f"{len(self)} runs under {self.table['budget_flops'].nunique()} budgets"]
        reasons = self.table["left_out"].value_counts()
        told += [f"{count} combinations left out ({reason})" for reason, count in reasons.items()]
        return "; ".join(told)

    def __repr__(self) -> str:
        return f"BudgetRuns({self.headline()})"


def budget_grid(
    task: SequenceTask,
    budgets: "float | Sequence[float]",
    *,
    d_model: "int | Sequence[int]",
    n_layers: "int | Sequence[int]",
    batch_size: "int | Sequence[int]" = 64,
    learning_rate: "float | Sequence[float]" = (1e-2, 1e-3, 1e-4),
    seeds: "int | Iterable[int]" = range(3),
    min_steps: int = 100,
    max_steps: int = 100_000,
    count: Count = "flops",
    **settings: Any,
) -> BudgetRuns:
    """Every combination of width, depth, batch and learning rate that can keep a compute budget, for each budget.

    The models are `SmallModelConfig.transformer_pp`, and training is the paper's: AdamW with betas (0.9, 0.95) and
    weight decay 0.1 (on matrices; the paper decays the gains of norms, too), gradients clipped at 1, a warm-up over a
    tenth of the steps, then a cosine down to a tenth of the learning rate. Each run keeps one checkpoint, its last,
    and is evaluated ten times on 1,000 held-out rows, by which `compute_frontier` chooses. The paper trains runs of
    one step too, far above the budget they stand under; here the steps have a lower bound.

    Args:
        task: what all are trained on.
        budgets: FLOPs of a whole training, forward and backward.
        d_model, n_layers, batch_size, learning_rate: one value or several of each; `batch_size` in sequences.
        seeds: of the runs; a number is one seed.
        min_steps, max_steps: a combination is left out where the budget pays for fewer or for more steps.
        count: "flops" counts what the machine does, padding included; "flops_paper" is the paper's formula.
        **settings: other fields of `SmallModelConfig` and `TrainingSettings`, for all runs, in place of the above.

    Returns:
        The runs, a list with the combinations left out in its `table`; smallest budgets first, seeds changing fastest.

    Raises:
        ArgumentError: a value that makes no sense, a setting that nothing takes or that the grid decides, or a budget
            that no combination can keep.

    Example:
        `eh.budget_grid(eh.tasks.Addition(8), [1e10, 1e11, 1e12], d_model=[16, 32, 64], n_layers=2,
        learning_rate=[1e-2, 1e-3], seeds=range(3))`
    """
    if not isinstance(task, SequenceTask):
        raise ArgumentError(f"task must be one that models are trained on, made already, not {task!r}")
    if count not in COUNTS:
        raise ArgumentError(f"count must be {' or '.join(COUNTS)}, not {count!r}")
    if whole_number("min_steps", min_steps, least=1) > whole_number("max_steps", max_steps, least=1):
        raise ArgumentError(f"min_steps is {min_steps} and max_steps {max_steps}; no number of steps is in between")
    _check_settings(settings)
    axes = [_values("n_layers", n_layers), _values("d_model", d_model)]
    axes += [_values("batch_size", batch_size), _values("learning_rate", learning_rate)]
    own_seeds = [whole_number("seeds", seed, least=0) for seed in _values("seeds", seeds)]
    runs, rows = [], []
    for budget in _budgets(budgets):
        for values in product(*axes):
            made = _Combination.of(task, dict(zip(_SETTINGS, values, strict=True)), budget, count, settings)
            reason = made.left_out(min_steps, max_steps)
            rows.append(made.row(reason))
            if reason is None:
                runs += [made.run(seed, settings) for seed in own_seeds]
    table = pd.DataFrame(rows)
    _check_every_budget(table, min_steps, max_steps)
    return BudgetRuns({run.name: run for run in runs}.values(), table)


@dataclass(frozen=True)
class _Combination:
    """One model and way of training under a budget, for all seeds."""

    task: SequenceTask
    config: SmallModelConfig
    chosen: Mapping[str, Any]
    budget: float
    steps: int
    flops: Mapping[str, float]  # of all steps, in both counts
    count: Count

    @classmethod
    def of(
        cls, task: SequenceTask, chosen: Mapping[str, Any], budget: float, count: Count, settings: Mapping[str, Any]
    ) -> "_Combination":
        of_config = {name: value for name, value in settings.items() if name in _names(SmallModelConfig)}
        config = SmallModelConfig.transformer_pp(chosen["n_layers"], chosen["d_model"], **of_config).for_task(task)
        tokens = whole_number("batch_size", chosen["batch_size"], least=1) * task.length
        a_step = flops_of(RunSpec(config, task, TrainingSettings(steps=1, tokens_per_batch=tokens)))
        if not np.isfinite(a_step[count]):
            raise ArgumentError(f'{count} knows models of attention only, not {config.mixer!r}; give count="flops"')
        steps = max(1, round(budget / a_step[count]))
        total = {name: cost * steps for name, cost in a_step.items()}
        return cls(task, config, chosen, budget, steps, total, count)

    @property
    def off(self) -> float:
        """True FLOPs over the budget, minus 1."""
        return self.flops[self.count] / self.budget - 1

    def left_out(self, min_steps: int, max_steps: int) -> str | None:
        """Why it cannot keep the budget; None where it can."""
        if self.steps < min_steps:
            return f"fewer than {min_steps} steps"
        if self.steps > max_steps:
            return f"more than {max_steps} steps"
        return f"more than {MOST_OFF:.0%} off the budget" if abs(self.off) > MOST_OFF else None

    def row(self, reason: str | None) -> dict[str, Any]:
        found = {"budget_flops": self.budget, **self.chosen, "steps": self.steps, **self.flops}
        return {**found, "off_share": self.off, "left_out": reason}

    def run(self, seed: int, settings: Mapping[str, Any]) -> RunSpec:
        papers: dict[str, Any] = {
            "weight_decay": 0.1,
            "warmup_steps": int(_WARMUP_SHARE * self.steps),
            "schedule": "cosine",
            "checkpoints": (self.steps,),
            "evaluate_every": -(-self.steps // _EVALUATIONS),
            "n_held_out": SELECTION_ROWS,
        }
        given = {name: value for name, value in settings.items() if name in _names(TrainingSettings)}
        training = TrainingSettings(
            steps=self.steps,
            tokens_per_batch=self.chosen["batch_size"] * self.task.length,
            learning_rate=self.chosen["learning_rate"],
            **{**papers, **given},
        )
        return RunSpec(self.config, self.task, training, seed)


def _check_settings(settings: Mapping[str, Any]) -> None:
    known = sorted((_names(SmallModelConfig) | _names(TrainingSettings)) - set(_OWN))
    for name in settings:
        if name in _OWN:
            raise ArgumentError(f"{name} follows from the budget grid; leave it out")
        if name not in known:
            raise ArgumentError(f"no model or training takes {name!r}; {nearest(name, known)}")


def _check_every_budget(table: pd.DataFrame, min_steps: int, max_steps: int) -> None:
    for budget, rows in table.groupby("budget_flops"):
        if rows["left_out"].notna().all():
            raise ArgumentError(
                f"no combination can keep the budget of {budget:.3g} FLOPs in {min_steps} to {max_steps} steps: it "
                f"pays for {rows['steps'].min()} to {rows['steps'].max()}; change d_model, n_layers, batch_size or "
                "the bounds, or leave the budget out"
            )


def _budgets(given: Any) -> list[float]:
    budgets = sorted({float(each) for each in _values("budgets", given)})
    if wrong := [each for each in budgets if not (np.isfinite(each) and each > 0)]:
        raise ArgumentError(f"budgets must be FLOPs above 0, not {wrong[0]}")
    for low, high in pairwise(budgets):
        if high < LEAST_APART * low:
            raise ArgumentError(
                f"the budgets {low:.4g} and {high:.4g} are too close to tell their runs apart; each must be at least "
                f"{LEAST_APART:g} times the one before"
            )
    return budgets


def _values(name: str, given: Any) -> list[Any]:
    values = given.tolist() if isinstance(given, np.ndarray) else given
    values = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]
    if not values:
        raise ArgumentError(f"{name} is empty; give at least one value")
    return values


def _names(cls: Any) -> set[str]:
    return {each.name for each in fields(cls) if each.init}
