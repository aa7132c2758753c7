"""Training a small model into a run folder."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from emergent_heads.errors import OutputError, whole_number
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.tasks.task import SequenceTask
from emergent_heads.training.folder import RunFolder
from emergent_heads.training.initial_weights import Carry, Start
from emergent_heads.training.learner import Plan
from emergent_heads.training.reporting import OnStep, Reporter
from emergent_heads.training.run import Run
from emergent_heads.training.settings import TrainingSettings
from emergent_heads.training.track import Track

SAVE_EVERY_SECONDS = 30.0


def train(
    config: SmallModelConfig,
    task: SequenceTask,
    path: Path | str,
    *,
    steps: int,
    seed: int = 0,
    init_from: "Start | None" = None,
    carry: Carry = "all",
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
        init_from: an earlier run (or its folder), whose last weights this one starts from, or one of its checkpoints,
            `run.series[step]`. The optimizer starts fresh, and an attention bias of that run is not carried. Data are
            those of this run's seed: give another than the earlier run's to train on other sequences of the same task.
            Once begun, a run does not need the earlier one any more.
        carry: "all" weights, or "all but embeddings", which draws token embedding and unembedding (matrix and bias)
            from `seed`, for another vocabulary (arXiv 2603.10055). Learned positions are carried; the context must
            then be the same.
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
        ModelMismatchError: the weights of `init_from` do not fit the model. CheckpointError, NoCheckpointsError: they
            cannot be read.
        RunFolderError: the folder holds something else, or a run made by other settings or by another version.
            RunInUseError: another process is training there.
        OutputError: the folder cannot be written, or the disk is full. What was written before is kept.
    """
    seed = whole_number("seed", seed, least=0)
    plan = Plan.of(config, task, TrainingSettings(steps=steps, **settings), device)
    plan = plan.starting_from(init_from, carry, Path(path))
    folder = RunFolder(Path(path), plan.identity(seed))
    if folder.status() not in (None, "unfinished"):
        return Run.open(folder.path)
    with folder.locked():
        if folder.status() not in (None, "unfinished"):  # another process has finished it meanwhile
            return Run.open(folder.path)
        track = Track.start_or_resume(plan, folder, seed)
        with Reporter(folder.path.name, [track], on_step=on_step, wandb=wandb, progress=progress) as reporter:
            train_together(track.learner(), [track], plan.settings.steps, reporter, save_every_seconds)
    return Run.open(folder.path)


def train_together(
    learner: Any, tracks: Sequence[Track], until: int, reporter: Reporter, save_every_seconds: float
) -> None:
    """Trains runs that are at the same step up to step `until`, or until one of them ends.

    Args:
        learner: has `advance(step)`, which trains the tracks' models in place and gives the losses, one per run.
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
        for track, of_track in zip(tracks, losses, strict=True):
            track.passed(step, of_track)

    try:
        if not tracks[0].history.rows:
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
