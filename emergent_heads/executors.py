"""Who runs jobs: processes of this machine, Ray, or Slurm.

Each takes work by `submit(function, *arguments)`, as executors of `concurrent.futures` and
`dask.distributed.Client.get_executor()` do, which serve as well. Scheduling is theirs; see `emergent_heads.jobs` for
what is done with lost workers.
"""

import importlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.jobs import cores
from emergent_heads.processes import Local

__all__ = ["Local", "Ray", "Slurm", "open_executor"]

ExecutorName = Literal["local", "ray", "slurm"]
_TIMEOUTS = 100
"""How often Slurm may queue a job again that reached its time limit; each time it goes on from its last save."""
_BAD_PARAMETERS = (AssertionError, NameError, TypeError, ValueError)  # what submitit says of them


class Ray:
    """Tasks of Ray: on the cluster that runs already, or on one that is started on this machine.

    Workers import what the driver imports: the same Python environment on every node, or a `runtime_env`. Folders that
    are named to them must be on a disk that all nodes share. A task whose worker or node is lost is not tried again by
    Ray, but handed over again by the library, which counts how often.

    Leaving the context leaves Ray, if it was entered here, and ends a cluster that was started here.
    """

    def __init__(
        self, address: str | None = None, *, cpus_per_job: float = 1, gpus_per_job: float = 0, **init: Any
    ) -> None:
        """Connects to a cluster, or starts one.

        Args:
            address: of the cluster, such as "10.0.0.1:6379" or "auto". By default that of `RAY_ADDRESS` or of this
                machine, and where there is none, a new one is started; "local" always starts one.
            cpus_per_job: cores that a job takes, which is also its number of threads.
            gpus_per_job: GPUs that a job takes; a share such as 0.25 lets four jobs use one. Only those are visible
                to the job.
            **init: further arguments of `ray.init`, such as `num_cpus` of a cluster that is started here, or
                `runtime_env`. Where this process uses Ray already, it stays connected as it is, and they are not used.

        Raises:
            ArgumentError: Ray is not installed, no cluster answers, or arguments that make no sense.
        """
        ray = self._ray = _needed("ray", "ray")
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address=address, **init)
            except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
                raise ArgumentError(f"no Ray at {address or 'this machine'}: {_line(error)}") from error
        self._per_job = {"CPU": cpus_per_job, "GPU": gpus_per_job}
        try:
            # Handing a lost job over again is left to run_jobs, which would multiply Ray's own tries.
            self._run = ray.remote(_call).options(num_cpus=cpus_per_job, num_gpus=gpus_per_job, max_retries=0)
        except (TypeError, ValueError) as error:
            self.close()
            raise ArgumentError(f"what a job takes of Ray makes no sense: {_line(error)}") from error

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> "Future[Any]":
        """Begins `function(*arguments)` where and when Ray has room for it.

        The future raises what the function raises, and Ray's own errors where worker or node were lost. Cancelling it
        also interrupts a job that is running.
        """
        task = self._run.remote(function, arguments)
        future = task.future()
        future.add_done_callback(lambda done: self._ray.cancel(task) if done.cancelled() else None)
        return future

    def n_running(self) -> int:
        """Jobs for which the cluster's resources are taken, of all who use it."""
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        taken = [(there.get(name, 0) - free.get(name, 0)) / amount for name, amount in self._per_job.items() if amount]
        return int(min(taken, default=0))

    def close(self) -> None:
        """Leaves Ray if it was entered here, and ends a cluster that was started here."""
        if self._ours:
            self._ray.shutdown()

    def __enter__(self) -> "Ray":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Slurm:
    """Jobs of a Slurm cluster, through submitit; those that are submitted together are one job array.

    A job that is preempted or reaches its time limit is queued again by Slurm, and goes on from its last save; nobody
    need be there for that. Leaving the context cancels what has not ended.
    """

    def __init__(
        self, folder: Path | str, workers: int | None = None, *, cluster: str = "slurm", **parameters: Any
    ) -> None:
        """Submits nothing yet.

        Args:
            folder: for submitit's files and the logs of the jobs, on a disk that all nodes share.
            workers: most jobs of an array at a time; None for as many as Slurm lets run.
            cluster: "slurm"; "local" runs each job at once in a process of this machine, to try things out, and
                "debug" in this process.
            **parameters: what a job takes, as parameters of `submitit.AutoExecutor`: `timeout_min` (240 if left out),
                `cpus_per_task` (1 if left out), which is also its number of torch threads, `gpus_per_node`, `mem_gb`,
                `slurm_partition`, `slurm_account`, ...

        Raises:
            ArgumentError: submitit is not installed, there is no Slurm here, or a parameter that it does not know.
        """
        submitit = _needed("submitit", "slurm")
        parallel = {} if workers is None else {"slurm_array_parallelism": whole_number("workers", workers, least=1)}
        given = {"name": "emergent_heads", "timeout_min": 240, "cpus_per_task": 1, **parallel, **parameters}
        try:
            self._executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=_TIMEOUTS)
            self._executor.update_parameters(**given)
        except RuntimeError as error:
            raise ArgumentError(f"no Slurm on this machine: {_line(error)}") from error
        except _BAD_PARAMETERS as error:
            raise ArgumentError(f"submitit refuses these parameters: {_line(error)}") from error
        self._threads: int = given["cpus_per_task"]
        self._jobs: list[SlurmJob] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> "SlurmJob":
        """Queues `function(*arguments)`; within `batch()`, when that ends."""
        job = SlurmJob(self._executor.submit(_GoesOn(function, self._threads), *arguments))
        self._jobs.append(job)
        return job

    def batch(self) -> AbstractContextManager[None]:
        """What is submitted within is one job array; nothing can be asked of the jobs before its end."""
        return self._executor.batch()

    def close(self) -> None:
        """Cancels what has not ended."""
        for job in self._jobs:
            with suppress(AttributeError):  # one of an array that was never submitted
                if not job.done():
                    job.cancel()

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class SlurmJob:
    """A job of submitit as a future.

    Attributes:
        job: submitit's, with its logs.
    """

    job: Any

    def result(self) -> Any:
        """Waits for the end, and gives what the function returned or raises submitit's error."""
        return self.job.result()

    def done(self) -> bool:
        return self.job.done()

    def running(self) -> bool:
        """Whether Slurm said so when it was last asked, which it is every few minutes at most."""
        return self.job.state == "RUNNING"

    def cancel(self) -> None:
        """Takes the job out of the queue, or ends it."""
        self.job.cancel(check=False)


def open_executor(
    name: ExecutorName, workers: int | None = None, *, folder: Path | str = "slurm", **options: Any
) -> "Local | Ray | Slurm":
    """The executor of that name, as on the command line.

    Args:
        name: "local" for processes of this machine, "ray", or "slurm".
        workers: local: processes, one for each core if left out. Slurm: most jobs at a time. Ray: cores of the cluster
            that is started here; one that runs already has its own, so leave it out there.
        folder: of the logs of Slurm's jobs.
        **options: further arguments of `Local`, `Ray` or `Slurm`.

    Raises:
        ArgumentError: no such executor, arguments that it does not take, or it is not to be had here.
    """
    if workers is not None:
        whole_number("workers", workers, least=1)
    try:
        if name == "local":
            return Local(cores() if workers is None else workers, **options)
        if name == "ray":
            return Ray(**({} if workers is None else {"num_cpus": workers}), **options)
        if name == "slurm":
            return Slurm(folder, workers, **options)
    except TypeError as error:
        raise ArgumentError(f"options of the executor {name}: {_line(error)}") from error
    raise ArgumentError(f"no executor {name!r}; there are local, ray and slurm")


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


@dataclass(frozen=True)
class _GoesOn:
    """A function that Slurm runs again where it ran out of time; submitit asks for that by the method `checkpoint`."""

    function: Callable[..., Any]
    threads: int

    def __call__(self, *arguments: Any) -> Any:
        import torch

        torch.set_num_threads(self.threads)  # else as many as the node has cores, which other jobs may be using
        return self.function(*arguments)

    def checkpoint(self, *arguments: Any) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


def _needed(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ArgumentError(
            f"this needs {package}, which is not installed: pip install 'emergent-heads[{extra}]', or use processes "
            "of this machine"
        ) from error


def _line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())
