"""Several seeds of one training together, in one process."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from emergent_heads.errors import ArgumentError, RunInUseError, whole_number
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.tasks.task import SequenceTask
from emergent_heads.training.evaluation import autocast
from emergent_heads.training.folder import RunFolder
from emergent_heads.training.initial_weights import Carry, Start
from emergent_heads.training.learner import Learner, Plan, training_loss
from emergent_heads.training.loop import SAVE_EVERY_SECONDS, train_together
from emergent_heads.training.reporting import Reporter
from emergent_heads.training.run import Run
from emergent_heads.training.settings import TrainingSettings
from emergent_heads.training.stacking import StackedModel
from emergent_heads.training.track import Track

TOKENS_AT_ONCE_ON_CPU = 1024
"""More than so many tokens at once leave the processor's cache and cost more than the calls that stacking saves."""


def train_seeds(
    config: SmallModelConfig,
    task: SequenceTask,
    path: Path | str,
    *,
    seeds: Iterable[int],
    steps: int,
    init_from: "Start | Sequence[Start] | None" = None,
    carry: Carry = "all",
    device: "str | torch.device" = "cpu",
    wandb: Any = None,
    progress: bool = True,
    save_every_seconds: float = SAVE_EVERY_SECONDS,
    **settings: Any,
) -> list[Run]:
    """Trains several seeds of one configuration together, with stacked weights, into `path/seed_0`, `path/seed_1`, ...

    Each is a run as `train` makes it, of its own weights, data and optimizer, up to rounding: sums are taken in
    another order. What is saved is the call of each operation for each seed, which is most of the time on a GPU, and
    with batches of some hundred tokens on a CPU. A CPU is given so many seeds at once as are no slower together, which
    is one where a batch has a thousand tokens; train those in processes of their own.

    Seeds that are finished are left as they are, killed ones go on, and one that ends early leaves the others alone.
    Seconds in the metrics are those of all seeds together.

    Args:
        config, task, steps, carry, device, wandb, progress, save_every_seconds: as in `train`.
        path: folder of the folders.
        seeds: one run each.
        init_from: as in `train`: one start for all seeds, or a list of one for each.
        **settings: fields of `TrainingSettings`.

    Returns:
        The runs, in the order of `seeds`.

    Raises:
        ArgumentError, ModelMismatchError, NoCheckpointsError, CheckpointError, RunFolderError, OutputError: as
            `train`; ArgumentError also where `init_from` is a list of another length. RunInUseError: another process
            is training one of the seeds; the others are trained before that is said.
    """
    plan, seeds = Plan.of(config, task, TrainingSettings(steps=steps, **settings), device), _checked(seeds)
    runs: list[tuple[Plan, RunFolder]] = []
    for seed, start in zip(seeds, _starts(init_from, len(seeds)), strict=True):
        folder = Path(path) / f"seed_{seed}"
        own = plan.starting_from(start, carry, folder)
        runs.append((own, RunFolder(folder, own.identity(seed))))
    return train_stacked(runs, Path(path).name, wandb=wandb, progress=progress, save_every_seconds=save_every_seconds)


def train_stacked(
    runs: Sequence[tuple[Plan, RunFolder]],
    name: str,
    *,
    wandb: Any = None,
    progress: bool = True,
    save_every_seconds: float = SAVE_EVERY_SECONDS,
) -> list[Run]:
    """Trains runs together, with stacked weights, each into its folder.

    Args:
        runs: plan and folder of each. The plans have one configuration, settings and length of sequence, and one task
            where there is an attention bias.
        name: for the progress bar.
        wandb, progress, save_every_seconds: as in `train`.

    Returns:
        The runs, in order.

    Raises:
        RunFolderError: a folder holds something else. RunInUseError: another process is training into one of them; the
            others are trained before that is said. OutputError: as `train`.
    """
    unfinished = [(plan, folder) for plan, folder in runs if folder.status() in (None, "unfinished")]
    in_use: RunInUseError | None = None
    with ExitStack() as stack:
        tracks: list[Track] = []
        for plan, folder in unfinished:
            try:
                stack.enter_context(folder.locked())
            except RunInUseError as error:
                in_use = error
                continue
            if folder.status() in (None, "unfinished"):  # another process may have finished it meanwhile
                tracks.append(Track.start_or_resume(plan, folder, folder.wanted["seed"]))
        if tracks:
            reporter = stack.enter_context(Reporter(name, tracks, wandb=wandb, progress=progress))
            _train(tracks, reporter, save_every_seconds)
    if in_use is not None:
        raise in_use
    return [Run.open(folder.path) for _, folder in runs]


def _train(tracks: Sequence[Track], reporter: Reporter, save_every_seconds: float) -> None:
    """Trains all to their ends; those that are behind first, until they have caught up with the next."""
    while unfinished := [track for track in tracks if track.status == "unfinished"]:
        step = min(track.history.step for track in unfinished)
        group = [track for track in unfinished if track.history.step == step]
        ahead = [track.history.step for track in unfinished if track.history.step > step]
        until = min(ahead, default=group[0].plan.settings.steps)
        learners = LearnerGroup([track.learner() for track in group])
        train_together(learners, group, until, reporter, save_every_seconds)


class LearnerGroup:
    """Runs that are at the same step, as many at once as pays."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        plan = learners[0].plan
        tokens = plan.batch_size * plan.task.length
        at_once = max(1, TOKENS_AT_ONCE_ON_CPU // tokens) if plan.device.type == "cpu" else len(learners)
        parts = [learners[start : start + at_once] for start in range(0, len(learners), at_once)]
        self._learners = [part[0] if len(part) == 1 else StackedLearner(part) for part in parts]

    def advance(self, step: int) -> Float[Tensor, " run"]:
        """The step that follows `step` steps, of every run; gives their training losses before the update."""
        return torch.cat([learner.advance(step).view(-1) for learner in self._learners])


class StackedLearner:
    """Several learners that take their steps together, each with its own data, clipping and optimizer."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self._learners, self._plan = learners, learners[0].plan
        self._stacked = StackedModel([learner.model for learner in learners])

    def advance(self, step: int) -> Float[Tensor, " run"]:
        """The step that follows `step` steps; gives the runs' training losses before the update."""
        batches = [learner.batch(step) for learner in self._learners]
        tokens = torch.stack([batch.tokens for batch in batches])
        with autocast(self._plan.device, self._plan.settings.dtype):
            logits = self._stacked(tokens[..., :-1])
        losses = training_loss(logits, tokens, torch.stack([batch.loss_mask for batch in batches]))
        self._stacked.zero_grad()
        losses.sum().backward()  # no run's loss depends on the weights of another
        for learner in self._learners:
            learner.update(step)
        if self._plan.settings.bias is not None:
            self._stacked.share_bias()
        return losses.detach()


def _starts(given: "Start | Sequence[Start] | None", n_seeds: int) -> "list[Start | None]":
    if not isinstance(given, (list, tuple)):
        return [given] * n_seeds  # pyright: ignore[reportReturnType] - a string is no list of starts
    if len(given) != n_seeds:
        raise ArgumentError(f"init_from has {len(given)} runs for {n_seeds} seeds; give one for all, or one for each")
    return list(given)


def _checked(seeds: Iterable[int]) -> list[int]:
    found = [whole_number("a seed", seed, least=0) for seed in seeds]
    if not found or len(set(found)) < len(found):
        raise ArgumentError(f"seeds must name at least one seed, each once, not {found}")
    return found
