"""Sending series, models and tasks to workers: what can travel, and how it arrives."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from emergent_heads.checkpoints.run import RunSource
from emergent_heads.checkpoints.series import Checkpoint, CheckpointSeries, LoaderSource
from emergent_heads.jobs import Executor, cores
from emergent_heads.models.mixers import mixer_class
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.workers import Parcel, check_travels

_DEFINE = (
    "define functions and classes at the top level of a module, or give a concurrent.futures.ThreadPoolExecutor, "
    "which sends nothing"
)
_GIVE_CHECKPOINTS = "give checkpoints of a series, which workers load by themselves, or leave out executor and workers"


def check_series_travel(
    executor: Executor | None, series: Iterable[CheckpointSeries], more: Mapping[str, object] | None = None
) -> None:
    """Checks that series, and what else goes with their jobs, can be sent to the workers.

    Args:
        executor: None for processes of this machine.
        series: they.
        more: what else is called in the message -> it.

    Raises:
        ArgumentError: a loader's function, or something else, cannot be pickled.
    """
    things = {
        f"the loader of {each.name}": each.source.function for each in series if isinstance(each.source, LoaderSource)
    }
    check_travels(executor, {**things, **(more or {})}, _DEFINE)


def check_task_travels(executor: Executor | None, task: Any, more: Mapping[str, object] | None = None) -> None:
    """Checks that a task, and what else goes with its jobs, can be sent to the workers; arguments as before."""
    check_travels(executor, {f"the task {task.name}": task, **(more or {})}, _DEFINE)


def modules_of(series: Iterable[CheckpointSeries], things: Iterable[object] = ()) -> list[str]:
    """Modules that workers import first: of the runs' mixers, which register them, of loaders and of things."""
    classes: list[Any] = [type(thing) for thing in things]
    for source in (each.source for each in series):
        if isinstance(source, RunSource):
            classes += map(mixer_class, SmallModelConfig(**source.manifest["config"]).mixers)
        elif isinstance(source, LoaderSource):
            classes.append(getattr(source.function, "func", source.function))
    return sorted({name for each in classes if (name := getattr(each, "__module__", None))})


def piece_size(n: int, workers: int | None, most: int) -> int:
    """How many of `n` things one job does: at most so many, and few enough for two jobs a worker.

    Args:
        n: of things.
        workers: processes of this machine, None for one for each core; 0 where an executor does not say how many.
        most: things in a job.
    """
    jobs = 2 * (cores() if workers is None else workers)
    return min(most, max(1, -(-n // jobs))) if jobs else most


@dataclass(frozen=True, eq=False)
class SentModel:
    """A model on its way to workers: a checkpoint as it is, which they load, any other model pickled.

    Attributes:
        checkpoint: it; or else
        parcel: the model.
    """

    checkpoint: Checkpoint | None
    parcel: Parcel | None

    @classmethod
    def of(cls, model: Any, what: str, executor: Executor | None) -> "SentModel":
        """Prepares a model, which `what` names in messages.

        Raises:
            ArgumentError: it cannot be pickled, or is too large for that.
        """
        if isinstance(model, Checkpoint):
            check_series_travel(executor, [model.series])
            return cls(model, None)
        return cls(None, Parcel.of(model, what, _GIVE_CHECKPOINTS))

    @property
    def modules(self) -> list[str]:
        """Modules that workers import first."""
        return modules_of([self.checkpoint.series]) if self.checkpoint else []

    @staticmethod
    def arrived_together(*sent: "SentModel") -> list[Any]:
        """The models in the worker, of its own; checkpoints of one series share a resident model there, too."""
        copies: dict[str, CheckpointSeries] = {}
        return [each._arrived(copies) for each in sent]

    def _arrived(self, copies: dict[str, CheckpointSeries]) -> Any:
        if self.checkpoint is None:
            assert self.parcel is not None
            return self.parcel.unpacked()
        series = self.checkpoint.series
        return Checkpoint(copies.setdefault(series._key, series.for_worker()), self.checkpoint.step)
