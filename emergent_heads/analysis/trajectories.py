"""Do the heads' patterns change when the capability appears? Chosen heads' scores and the task's p, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.heads import HeadRanking
from emergent_heads.analysis.pattern_scores import pattern_scores
from emergent_heads.checkpoints.known_issues import mark_steps
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import ArgumentError, CheckpointError, NotFiniteError, UnsafeWeightsError
from emergent_heads.models.engine import Head
from emergent_heads.models.hooked import HookedModel
from emergent_heads.plots import heads as head_plots
from emergent_heads.results import Result
from emergent_heads.tasks.task import PromptTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False, eq=False)
class HeadTrajectories(Result):
    """Pattern scores of chosen heads over the checkpoints of a series.

    Attributes:
        table: one row per step and head: `step`, `layer`, `head`, the pattern scores (mean over prompts), and the
            task's `p_target` and `share_matched` at that step, and `known_issue` (of the published weights).
        problems: steps passed over, with the reason.
    """

    problems: dict[int, str]

    def headline(self) -> str:
        steps = self.table["step"].nunique()
        return f"HeadTrajectories: {self.about['series']}, {steps} checkpoints, {self.about['task_name']}"

    def plot(self, score: str | None = None) -> "Figure":
        """The heads' scores and the task's p over the steps; by default the score that changes most for each head."""
        return head_plots.trajectories(self.table, score)


def head_trajectories(
    series: CheckpointSeries,
    task: PromptTask,
    heads: HeadRanking | Sequence[Head],
    *,
    steps: Sequence[int] | None = None,
    progress: bool = True,
) -> HeadTrajectories:
    """Follows chosen heads' attention patterns through training, on the task's prompts.

    Args:
        series: the checkpoints.
        task: the capability.
        heads: `(layer, head)` pairs, or a ranking, of which the first four are taken.
        steps: which checkpoints; all by default.
        progress: whether to show a bar.

    Raises:
        UnknownStepError: the series has no such step.
        ArgumentError: no heads, or a head the model does not have.
    """
    pairs = heads.top(4) if isinstance(heads, HeadRanking) else [(int(layer), int(head)) for layer, head in heads]
    if not pairs:
        raise ArgumentError("no heads to follow: give at least one (layer, head)")
    rows, problems = [], {}
    chosen = series.steps if steps is None else sorted(steps)
    for step in tqdm(chosen, desc="checkpoints", leave=False, **notebook.bar(progress)):
        checkpoint = series[step]
        try:
            rows += _at_step(checkpoint.hooked(), task, pairs, step)
        except UnsafeWeightsError:
            raise
        except (CheckpointError, NotFiniteError) as error:
            problems[step] = str(error)
    about = {"series": series.name, "task": repr(task), "task_name": task.name, "heads": pairs}
    return HeadTrajectories(mark_steps(pd.DataFrame(rows), series.repository), problems, about=about)


def _at_step(model: HookedModel, task: PromptTask, heads: Sequence[Head], step: int) -> list[dict[str, float]]:
    if unknown := [(layer, head) for layer, head in heads if layer >= model.n_layers or head >= model.n_heads]:
        raise ArgumentError(
            f"heads {unknown} are not in this model: it has {model.n_layers} layers of {model.n_heads} heads"
        )
    batch = task.batch(model.tokenizer, vocabulary_size=model.vocabulary_size, context=model.context)
    answers = model.answers(batch)
    task_row = {
        "p_target": float(answers.log_p.double().exp().mean()),
        "share_matched": float(answers.matched.double().mean()),
    }
    patterns = model.patterns(batch.tokens, sorted({layer for layer, _ in heads}))
    scores = {
        layer: {name: values.nanmean(0) for name, values in pattern_scores(pattern, batch).items()}
        for layer, pattern in patterns.items()
    }
    return [
        {
            "step": step,
            "layer": layer,
            "head": head,
            **{name: float(values[head]) for name, values in scores[layer].items()},
            **task_row,
        }
        for layer, head in heads
    ]
