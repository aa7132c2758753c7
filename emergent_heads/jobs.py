"""Many independent pieces of work on an executor: anything whose `submit(function, *arguments)` gives futures.

Which machine does what is the executor's business. Here jobs are handed over, their ends are taken as they come, jobs
whose worker was lost are handed over again, and progress is shown. A job must be one that can be repeated: it keeps
what it makes by renaming, and finds what is there already.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.errors import ArgumentError
from emergent_heads.processes import LocalProcesses, ProcessStartError, load_module, with_files

TRIES = 3
"""How often a job is handed over whose worker is lost each time."""
_PAUSE_SECONDS = 0.2


class Executor(Protocol):
    """What runs jobs: those of `emergent_heads.executors`, of `concurrent.futures`, of dask, or your own."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Begins `function(*arguments)`, elsewhere or later, and gives a future: its `result()` waits for the end."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """One piece of work.

    Attributes:
        name: in messages.
        function: of a module, so that it can be sent to another process.
        arguments: picklable.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Ended:
    """What became of a job.

    Attributes:
        job: the job.
        value: what it returned.
        error: what it raised, or what the executor says became of its worker; None where it returned.
        traceback: of the error, from the worker where it was raised there.
    """

    job: Job
    value: Any = None
    error: Exception | None = None
    traceback: str = ""


def run_jobs(
    jobs: Iterable[Job],
    executor: Executor | None = None,
    *,
    workers: int | None = 0,
    modules: Iterable[str] = (),
    title: str = "jobs",
    unit: str = "job",
    done_before: int = 0,
    progress: bool = True,
) -> Iterator[Ended]:
    """Runs the jobs and gives each as it ends, in whatever order.

    A job that raises has ended; one whose worker is lost (killed, out of memory, on a node that went away) is handed
    over again, `TRIES` times in all. Leaving the iteration early drops what has not begun.

    Args:
        jobs: what to do.
        executor: who does it. None for processes of this machine, or for this process.
        workers: processes of this machine: None for one for each core; 0 for none, each job is then done here when
            its turn comes.
        modules: that workers import first, such as one that registers a mixer.
        title, unit: of the progress bar.
        done_before: jobs that need not be done any more, for the bar.
        progress: whether to show a bar, with what is running, what has failed and the time left.

    Raises:
        ArgumentError: both an executor and workers, or a negative number of workers.
        ProcessStartError: no process could begin to work.
    """
    jobs, modules = list(jobs), list(modules)
    if executor is not None and workers not in (None, 0):
        raise ArgumentError("workers are of the default executor; leave them out, or the executor")
    if workers is not None and workers < 0:
        raise ArgumentError(f"workers is {workers}; give the number of processes, or 0 for this process")
    with ExitStack() as stack:
        bar = tqdm(total=done_before + len(jobs), initial=done_before, desc=title, unit=unit, **notebook.bar(progress))
        stack.callback(bar.close)
        if executor is None:
            count = min(_cores() if workers is None else workers, len(jobs))
            executor = stack.enter_context(LocalProcesses(count)) if count else _Here()
        yield from _run_all(jobs, executor, with_files(modules), bar)


def values(ended: Iterable[Ended]) -> Iterator[tuple[Job, Any]]:
    """Each job with what it returned, for work that makes no sense in part.

    Raises:
        Exception: the first error of a job.
    """
    for each in ended:
        if each.error is not None:
            raise each.error
        yield each.job, each.value


class _Here:
    """Runs each job in this process, when its result is asked for."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> "_Later":
        return _Later(function, arguments)


@dataclass(frozen=True)
class _Later:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def result(self) -> Any:
        return self.function(*self.arguments)


@dataclass(frozen=True, eq=False)
class _Raised:
    """An error of the job itself, which comes back as a value: errors of the future are then the executor's."""

    error: Exception
    traceback: str


def _attempt(
    modules: Sequence[tuple[str, Path | None]], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Runs a job in a worker."""
    try:
        for name, file in modules:
            load_module(name, file)
        return function(*arguments)
    except Exception as error:
        return _Raised(error, "".join(traceback.format_exception(error)))


@dataclass(eq=False)
class _Begun:
    job: Job
    future: Any
    tries: int


def _run_all(
    jobs: Sequence[Job], executor: Executor, modules: Sequence[tuple[str, Path | None]], bar: Any
) -> Iterator[Ended]:
    def begin(job: Job, tries: int) -> _Begun:
        return _Begun(job, executor.submit(_attempt, modules, job.function, job.arguments), tries)

    waiting: list[_Begun] = []
    failed = 0
    try:
        for job in jobs:
            waiting.append(begin(job, 1))
        while waiting:
            bar.set_postfix({"running": sum(map(_is_running, waiting)), "failed": failed})
            for each in _next_ended(waiting):
                waiting.remove(each)
                ended = _ended(each)
                if ended is None:
                    waiting.append(begin(each.job, each.tries + 1))
                    continue
                failed += ended.error is not None
                bar.update()
                yield ended
        bar.set_postfix({"running": 0, "failed": failed})
    finally:  # after an interrupt, what has not begun is not begun
        for each in waiting:
            if hasattr(each.future, "cancel"):
                each.future.cancel()


def _ended(begun: _Begun) -> Ended | None:
    """What became of a job whose future has ended; None where its worker was lost and it is to be tried again."""
    try:
        value = begun.future.result()
    except ProcessStartError:
        raise  # nothing else would start either
    except Exception as error:
        if begun.tries < TRIES:
            return None
        return Ended(begun.job, error=error, traceback="".join(traceback.format_exception(error)))
    if isinstance(value, _Raised):
        return Ended(begun.job, error=value.error, traceback=value.traceback)
    return Ended(begun.job, value)


def _next_ended(waiting: Sequence[_Begun]) -> list[_Begun]:
    """Those whose future has ended, at least one; of futures that cannot be asked, the first."""
    if all(isinstance(each.future, Future) for each in waiting):
        wait([each.future for each in waiting], return_when=FIRST_COMPLETED)
    elif not all(hasattr(each.future, "done") for each in waiting):
        return [waiting[0]]
    while not (ended := [each for each in waiting if each.future.done()]):
        time.sleep(_PAUSE_SECONDS)
    return ended


def _is_running(begun: _Begun) -> bool:
    running = getattr(begun.future, "running", None)
    return bool(running()) if callable(running) else False


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
