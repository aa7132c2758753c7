"""What a training tells while it runs: a progress bar, callbacks, and wandb where it is asked for."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.errors import ArgumentError
from emergent_heads.models.small import SmallModel
from emergent_heads.training.track import Track

OnStep = Callable[[int, SmallModel, Tensor], object]
"""Called after a step with (steps done, model, training loss before the update)."""


class Reporter:
    """Tells of a training while its context lasts."""

    def __init__(
        self,
        name: str,
        tracks: Sequence[Track],
        *,
        on_step: OnStep | Iterable[OnStep] = (),
        wandb: Any = None,
        progress: bool = True,
    ) -> None:
        """Takes what `train` takes; callbacks get the model of the first track."""
        self._name, self._tracks, self._progress = name, tracks, progress
        self._plan = tracks[0].plan
        self._callbacks = [on_step] if callable(on_step) else list(on_step)
        self._wandb, self._wandb_is_ours = wandb, False
        self._bar: Any = None

    def __enter__(self) -> "Reporter":
        if isinstance(self._wandb, str):
            self._wandb, self._wandb_is_ours = self._begin_wandb(self._wandb), True
        self._bar = tqdm(
            total=self._plan.settings.steps,
            initial=min(track.history.step for track in self._tracks),
            desc=self._name,
            unit="step",
            **notebook.bar(self._progress),
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
        if self._wandb_is_ours:
            self._wandb.finish(exit_code=int(exception[0] is not None))

    def step_done(self, step: int, loss: Tensor) -> None:
        """A step is done, the `step`-th."""
        self._bar.update()
        for callback in self._callbacks:
            callback(step, self._tracks[0].model, loss)

    def evaluated(self, track: Track, row: dict[str, float]) -> None:
        """A run has a new row of metrics."""
        self._bar.set_postfix(loss=f"{row['loss_nats']:.4f}", accuracy=f"{row['accuracy']:.3f}", refresh=False)
        if self._wandb is not None:
            prefix = f"seed_{track.seed}/" if len(self._tracks) > 1 else ""
            values = {f"{prefix}{name}": value for name, value in row.items() if name != "step"}
            self._wandb.log(values, step=int(row["step"]))

    def _begin_wandb(self, project: str) -> Any:
        try:
            import wandb
        except ImportError as error:
            raise ArgumentError(
                f"wandb={project!r} needs wandb, which is not installed: pip install wandb, or leave it out"
            ) from error
        identity = self._plan.identity(self._tracks[0].seed)
        return wandb.init(project=project, name=self._name, config=identity)
