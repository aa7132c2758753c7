"""Training a small model into a run folder."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from emergent_heads.errors import OutputError
from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.tasks.task import SequenceBatch, SequenceTask
from emergent_heads.training.evaluation import evaluate, is_solved
from emergent_heads.training.folder import History, ResumePoint, RunFolder, RunStatus
from emergent_heads.training.learner import Learner, Plan
from emergent_heads.training.reporting import OnStep, Reporter
from emergent_heads.training.run import Run
from emergent_heads.training.settings import TrainingSettings

SAVE_EVERY_SECONDS = 30.0


def train(
    config: SmallModelConfig,
    task: SequenceTask,
    path: Path | str,
    *,
    steps: int,
    seed: int = 0,
    device: "str | torch.device" = "cpu",
    on_step: "OnStep | Iterable[OnStep]" = (),
    wandb: Any = None,
    progress: bool = True,
    save_every_seconds: float = SAVE_EVERY_SECONDS,
    **settings: Any,
) -> Run:
    """Trains a small model on a task into a run folder.

    A finished run of the same settings is returned as it is; a killed one goes on where it stopped, and ends with the
    same weights and metrics, bit for bit on one machine, as if it had never stopped. Use one torch thread for the
    smallest models (`torch.set_num_threads(1)`): more are slower there.

    Args:
        config: of the model; vocabulary and context are filled in from the task.
        task: what to train on; fresh sequences at every step.
        path: folder of the run.
        steps: optimiser steps.
        seed: of the initial weights and of the data.
        device: where to train. Data are drawn there, so a GPU sees other sequences than the CPU.
        on_step: called after every step as `on_step(step, model, loss)`, `step` being the steps done and `loss` the
            training loss before the update, a tensor, so that nobody waits for a GPU unasked. Several may be given. A
            finished run calls none.
        wandb: a project's name, or a run of wandb, to which each row of the metrics is logged as well.
        progress: whether to show a progress bar, with the loss and the time left.
        save_every_seconds: how much work a kill may cost.
        **settings: fields of `TrainingSettings`, which has their defaults: `learning_rate`, `betas`, `weight_decay`,
            `warmup_steps`, `schedule`, `clip`, `tokens_per_batch`, `checkpoints`, `evaluate_every`, `n_held_out`,
            `attention_bias`, `stop_when_solved`, `solved_at`, `dtype`.

    Returns:
        The run. Its `status` is "finished", "solved" where it stopped early for that, or "diverged" where the loss or
        the weights became NaN or infinite; the checkpoints before are kept.

    Raises:
        ArgumentError: a setting that is unknown or makes no sense, or a task that does not fit the model.
        RunFolderError: the folder holds something else, a run made by other settings or by another version, or another
            process is training there.
        OutputError: the folder cannot be written, or the disk is full. What was written before is kept.
    """
    plan = Plan.of(config, task, TrainingSettings(steps=steps, **settings), device)
    folder = RunFolder(Path(path), plan.identity(seed))
    if folder.status() not in (None, "unfinished"):
        return Run.open(folder.path)
    with folder.locked():
        if folder.status() not in (None, "unfinished"):  # another process has finished it meanwhile
            return Run.open(folder.path)
        track = Track.start_or_resume(plan, folder, seed)
        reporter = Reporter(folder.path.name, plan, [track], on_step=on_step, wandb=wandb, progress=progress)
        learner = Learner(plan, seed, track.model, track.moments, track.history.step)
        track.moments = learner.moments
        with reporter:
            train_together(learner, [track], plan.settings.steps, reporter, save_every_seconds)
    return Run.open(folder.path)


@dataclass(eq=False)
class Track:
    """One run while it is trained.

    Attributes:
        plan, folder, seed: what it is.
        held_out: its held-out sequences.
        model: with the weights of the step that `history` is at, whenever the learner has written them back.
        moments: the optimizer's running means at that step.
        history: what was measured of it.
        status: "unfinished" until it ends.
        diverged_step: first step at which something was not finite.
    """

    plan: Plan
    folder: RunFolder
    seed: int
    held_out: SequenceBatch
    model: SmallModel
    moments: dict[str, Tensor]
    history: History
    status: RunStatus = "unfinished"
    diverged_step: int | None = None
    _clock: float = field(default_factory=time.perf_counter)

    @classmethod
    def start_or_resume(cls, plan: Plan, folder: RunFolder, seed: int) -> "Track":
        """The run in the folder, or a new one; the folder is locked."""
        n = plan.settings.held_out_size(plan.task)
        # Drawn on the CPU, so that a run on any device is measured by the same sequences.
        batch = plan.task.batch(n, seed=seed, split="held-out")
        held_out = SequenceBatch(
            batch.tokens.to(plan.device), batch.loss_mask.to(plan.device), batch.answer_mask.to(plan.device)
        )
        model = plan.new_model(seed)
        folder.clear_leftovers()
        point = folder.resume_point() if folder.status() == "unfinished" else None
        if point is None:
            folder.begin(plan.about(), plan.pattern)
            return cls(plan, folder, seed, held_out, model, {}, History())
        model.load_state_dict(point.weights)
        return cls(plan, folder, seed, held_out, model, point.moments, point.history)

    @property
    def is_answer(self) -> np.ndarray:
        """`[pos]`, whether each token but the first is an answer in any held-out sequence."""
        return self.held_out.answer_mask[:, 1:].any(dim=0).cpu().numpy()

    def passed(self, step: int, losses: Sequence[float]) -> None:
        """Notes steps that were done, up to `step`, by their training losses."""
        now = time.perf_counter()
        self.history.seconds += now - self._clock
        self.history.step = step
        self.history.train_losses += losses
        self._clock = now

    def measure(self, *, keep: bool) -> dict[str, float]:
        """Evaluates the model at the present step, keeps it as a checkpoint if asked to, and ends a run that is over.

        Returns:
            The row of the metrics.
        """
        plan, history, settings = self.plan, self.history, self.plan.settings
        lost = history.first_lost_step()
        evaluation = evaluate(self.model, self.held_out, rows=settings.batch_size(plan.task), dtype=settings.dtype)
        row = history.add(
            evaluation,
            tokens=history.step * settings.batch_size(plan.task) * plan.task.length,
            learning_rate=settings.learning_rate_at(max(0, history.step - 1)),
            attention_bias=settings.bias.strength_at(history.step) if settings.bias else 0.0,
        )
        if lost is not None or not evaluation.finite or not _is_finite(self.model):
            self.status, self.diverged_step = "diverged", lost or history.step
            return row
        if history.solved_step is None and is_solved(
            evaluation, plateau=plan.task.plateau, floor=plan.task.floor, solved_at=settings.solved_at
        ):
            history.solved_step = history.step
        if history.step == settings.steps:
            self.status = "finished"
        elif settings.stop_when_solved and history.solved_step is not None:
            self.status = "solved"
        if keep or self.status != "unfinished":
            self.folder.save_checkpoint(history.step, self.model.state_dict())
        return row

    def save(self) -> None:
        """Writes the point to go on from, or the end of the run."""
        if self.status == "unfinished":
            point = ResumePoint(self.model.state_dict(), self.moments, self.history)
            self.folder.save_resume_point(point, self.is_answer)
        else:
            about = {**self.plan.about(), "diverged_step": self.diverged_step}
            self.folder.finish(self.status, about, self.history, self.is_answer)


def train_together(
    learner: Any, tracks: Sequence[Track], until: int, reporter: Reporter, save_every_seconds: float
) -> None:
    """Trains runs that are at the same step up to step `until`, or until one of them ends.

    Args:
        learner: has `advance(step)`, which gives the losses, one per run, and `write_back()`, which makes the models
            and moments of the tracks current.
        tracks: the runs.
        until: step to stop at.
        reporter: of progress.
        save_every_seconds: time between two resume points.
    """
    settings = tracks[0].plan.settings
    evaluations, checkpoints = set(settings.evaluation_steps()), set(settings.checkpoint_steps())
    first = tracks[0].history.step
    pending: list[Float[Tensor, "*run"]] = []
    saved = time.monotonic()

    def measure(step: int) -> None:
        for track in tracks:
            reporter.evaluated(track, track.measure(keep=step in checkpoints))

    def flush(step: int) -> None:
        losses = torch.stack(pending).view(len(pending), len(tracks)).T.tolist() if pending else [[]] * len(tracks)
        pending.clear()
        learner.write_back()
        for track, of_track in zip(tracks, losses, strict=True):
            track.passed(step, of_track)

    try:
        if first == 0:
            flush(0)
            measure(0)
        for step in range(first, until):
            if any(track.status != "unfinished" for track in tracks):
                break
            loss = learner.advance(step)
            pending.append(loss)
            reporter.step_done(step + 1, loss)
            if step + 1 in evaluations:
                flush(step + 1)
                measure(step + 1)
            if time.monotonic() - saved >= save_every_seconds:
                flush(step + 1)
                _save_unfinished(tracks)
                saved = time.monotonic()
        flush(tracks[0].history.step + len(pending))
        for track in tracks:
            if track.status != "unfinished":
                track.save()
    except OutputError as error:
        raise OutputError(
            f"{error}. The run is kept up to its last saved step; call the training again to go on from there"
        ) from error


def _save_unfinished(tracks: Sequence[Track]) -> None:
    for track in tracks:
        # Losses that are not finite are left to the next evaluation, which ends the run.
        if track.status == "unfinished" and track.history.first_lost_step() is None:
            track.save()


def _is_finite(model: SmallModel) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in model.parameters())
