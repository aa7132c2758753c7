"""How well a model does a task: greedy match, probability and rank of the target, per prompt.

Evaluations of a series' checkpoints are kept and reused: same weights, same prompts, same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from emergent_heads.checkpoints.known_issues import mark_steps, marks_of
from emergent_heads.errors import ArgumentError, CheckpointError, NotFiniteError, UnsafeWeightsError
from emergent_heads.plots import emergence as emergence_plots
from emergent_heads.results import Result
from emergent_heads.statistics import Interval, bootstrap_mean, share_interval
from emergent_heads.storage import KeptTables, digest
from emergent_heads.tasks.task import PromptBatch, PromptTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from emergent_heads.checkpoints.series import Checkpoint, CheckpointSeries, Learned
    from emergent_heads.models.hooked import HookedModel


_KEPT_VERSION = "evaluation-1"  # part of the key of kept evaluations: change it when their numbers would change


@dataclass(frozen=True, repr=False, eq=False)
class Evaluation(Result):
    """One model on one task.

    Attributes:
        table: one row per prompt: `prompt` (index), `matched` (the target is the greedy next token), `p_target`,
            `log_p_target_nats`, `rank` of the target among all tokens (1 = top).
        model: what was evaluated.
        task: name of the task.
    """

    model: str
    task: str

    @property
    def share(self) -> Interval:
        """Share of prompts matched, with its exact interval."""
        return share_interval(int(self.table["matched"].sum()), len(self.table))

    @property
    def p_target(self) -> Interval:
        """Mean probability of the target, with its bootstrap interval over prompts."""
        return bootstrap_mean(self.table["p_target"].to_numpy(), seed=0)

    def headline(self) -> str:
        share, p = self.share, self.p_target
        spread = "" if np.isnan(p.low) else f" ({p.low:.3f} to {p.high:.3f})"
        return (
            f"{self.task} in {self.model}: {self.table['matched'].sum()} of {len(self.table)} prompts matched "
            f"({share.value:.2f}, 95 % interval {share.low:.2f} to {share.high:.2f}), "
            f"mean p(target) {p.value:.3f}{spread}{self.caution}"
        )

    def plot(self) -> "Figure":
        """Probability of the target on each prompt, in descending order."""
        return emergence_plots.evaluation(self.table, mean=self.p_target.value)


def evaluate(model: "Checkpoint | HookedModel | object", task: PromptTask, *, batch_size: int = 64) -> Evaluation:
    """Evaluates one model on one task.

    Args:
        model: a checkpoint of a series, or any model that `eh.hooked` takes.
        task: the prompts.
        batch_size: prompts per forward pass.

    Raises:
        NotFiniteError: a logit is NaN or infinite.
        ArgumentError: `batch_size` is below 1.
        TokenizerError, PromptError: the prompts do not fit the model, see `PromptTask.batch`.
        CheckpointError: the weights of the checkpoint cannot be used.
        UnsupportedModelError: `model` is nothing the library reads.
    """
    from emergent_heads.models.hooked import hooked

    the_model = hooked(model)
    batch = _batch_for(task, the_model)
    name = model_name(model)
    table = evaluate_batch(the_model, batch, name=name, batch_size=batch_size)
    about = {
        "analysis": "evaluate",
        "model": name,
        "task": task.name,
        "prompts_key": batch.key,
        "known_issues": marks_of(model),
    }
    return Evaluation(table, name, task.name, about=about)


def evaluate_batch(model: "HookedModel", batch: PromptBatch, *, name: str, batch_size: int = 64) -> pd.DataFrame:
    """Table of an `Evaluation` for prompts that are token ids already; `name` is the model's name in messages.

    Raises:
        NotFiniteError: a logit is NaN or infinite.
        ArgumentError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ArgumentError(f"batch_size is {batch_size}: it must be at least 1")
    chunks = [
        _score_chunk(model, batch.select(np.arange(start, min(start + batch_size, len(batch)))), name, start)
        for start in range(0, len(batch), batch_size)
    ]
    table = pd.concat(chunks, ignore_index=True)
    table.insert(0, "prompt", np.arange(len(table)))
    return table


def model_name(model: object) -> str:
    """Name of a model in tables and messages: series and step of a checkpoint, else its kind or class."""
    from emergent_heads.models.hooked import HookedModel

    series, step = getattr(model, "series", None), getattr(model, "step", None)
    if series is not None and step is not None:
        return f"{series.name} at step {step}"
    return model.kind if isinstance(model, HookedModel) else type(model).__name__


def _score_chunk(model: "HookedModel", batch: PromptBatch, name: str, first_row: int) -> pd.DataFrame:
    batch = batch.to(model.device)
    logits = model.logits(batch.tokens, batch.positions)
    finite = torch.isfinite(logits).all(dim=-1)
    if not finite.all():
        row = first_row + int(finite.logical_not().nonzero()[0])
        raise NotFiniteError(
            f"logits of {name} are NaN or infinite, first for prompt {row}: the weights may be damaged; "
            "use another checkpoint, or float32 if the model runs in half precision"
        )
    return score_logits(logits, batch.targets)


def score_logits(logits: Float[Tensor, "prompt vocabulary"], targets: Int[Tensor, " prompt"]) -> pd.DataFrame:
    """Match, probability, log probability and rank of each target.

    The softmax runs in float32 or wider. Tokens of equal logit rank by their id, so a model that gives every token
    the same logit matches nothing but token 0, on every device.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_logits = logits.gather(1, targets[:, None])
    log_p = (target_logits[:, 0] - logits.logsumexp(dim=1)).double()
    tied_before = (logits == target_logits) & (torch.arange(logits.shape[1], device=logits.device) < targets[:, None])
    rank = 1 + ((logits > target_logits) | tied_before).sum(dim=1)
    return pd.DataFrame(
        {
            "matched": (rank == 1).cpu().numpy(),
            "p_target": log_p.exp().cpu().numpy(),
            "log_p_target_nats": log_p.cpu().numpy(),
            "rank": rank.cpu().numpy(),
        }
    )


Rows = list[dict[str, float]] | None
"""What was measured at a step, per task; None where the checkpoint cannot be used."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What a worker measured, to be sent back.

    Attributes:
        rows: by step.
        tables: new evaluations by key, to be kept.
        learned: of the series.
    """

    rows: Mapping[int, Rows]
    tables: Mapping[str, pd.DataFrame]
    learned: "Learned"


@dataclass
class SeriesEvaluations:
    """Evaluations of one series on the tasks of one call; each checkpoint is loaded at most once, for all tasks.

    Attributes:
        series: the checkpoints.
        tasks: the tasks.
        batch_size: prompts per forward pass.
        done: called after each checkpoint, for a progress bar.
    """

    series: "CheckpointSeries"
    tasks: Sequence[PromptTask]
    batch_size: int = 64
    done: Callable[[], object] = lambda: None
    _batches: list[PromptBatch] | None = None
    _rows: dict[int, Rows] = field(default_factory=dict)
    _new: dict[str, pd.DataFrame] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kept: KeptTables = self.series.evaluations

    @property
    def measured(self) -> Measured:
        """All of it, for `take`."""
        return Measured(self._rows, self._new, self.series.learned())

    def take(self, measured: Measured) -> None:
        """Takes over what a worker measured."""
        self.series.learn(measured.learned)
        self._rows.update(measured.rows)
        for key, table in measured.tables.items():
            if self._kept.get(key) is None:  # on a disk that the worker shares it is there already
                self._kept.put(key, table)

    def at(self, step: int) -> Rows:
        """Per task what was measured at `step`; None where the checkpoint cannot be used (`series.problems` says why).

        Raises:
            UnsafeWeightsError: no checkpoint to pass over in silence, as the others are likely to be stored alike.
        """
        if step not in self._rows:
            self._rows[step] = self._measure_if_usable(step)
            self.done()
        return self._rows[step]

    def table(self, task: int) -> pd.DataFrame:
        """What was measured for the task of that index, one row per usable checkpoint, by step."""
        rows = [rows[task] for _, rows in sorted(self._rows.items()) if rows is not None]
        return mark_steps(pd.DataFrame(rows), self.series.repository)

    def problems(self) -> dict[int, str]:
        """What is wrong with the checkpoints met so far."""
        return {step: self.series.problems[step] for step in sorted(self._rows) if step in self.series.problems}

    def _measure_if_usable(self, step: int) -> Rows:
        try:
            return self._measure(step)
        except UnsafeWeightsError:
            raise
        except (CheckpointError, NotFiniteError) as error:
            self.series.problems[step] = str(error)
            return None

    def _measure(self, step: int) -> list[dict[str, float]]:
        self.series.check_known_issues(step)  # also where all is reused
        load = cache(lambda: self.series.hooked(step))  # weights are swapped in once, and only if something is new
        if self._batches is None:
            self._batches = [_batch_for(task, load()) for task in self.tasks]  # needs the tokenizer of a model
        rows = []
        for batch in self._batches:
            key = _kept_key(self.series, step, batch)
            table = self._kept.get(key)
            reused = table is not None
            if table is None:
                name = f"{self.series.name} at step {step}"
                table = evaluate_batch(load(), batch, name=name, batch_size=self.batch_size)
                self._kept.put(key, table)
                self._new[key] = table
            rows.append(_summary_row(step, table, reused))
        return rows


def _batch_for(task: PromptTask, model: "HookedModel") -> PromptBatch:
    return task.batch(model.tokenizer, vocabulary_size=model.vocabulary_size, context=model.context)


def _summary_row(step: int, table: pd.DataFrame, reused: bool) -> dict[str, float]:
    share = share_interval(int(table["matched"].sum()), len(table))
    p = bootstrap_mean(table["p_target"].to_numpy(), seed=0)
    return {
        "step": step,
        "share_matched": share.value,
        "share_low": share.low,
        "share_high": share.high,
        "p_target": p.value,
        "p_low": p.low,
        "p_high": p.high,
        "log_p_target_nats": float(table["log_p_target_nats"].mean()),
        "rank": float(table["rank"].median()),
        "n_prompts": len(table),
        "reused": reused,
    }


def _kept_key(series: "CheckpointSeries", step: int, batch: PromptBatch) -> str:
    identity = series.identity(step)
    # Without an identity of the weights the store lives in memory, for this series alone, so the step is enough.
    return digest(f"step {step}" if identity is None else identity, batch.key, _KEPT_VERSION)
