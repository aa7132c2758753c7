"""Many independent pieces of work on an executor: anything whose `submit(function, *arguments)` gives futures.

Which machine does what is the executor's business. Here jobs are handed over, their ends are taken as they come, jobs
whose worker was lost and jobs that another process is at are handed over again, and progress is shown. A job must be
one that can be repeated: it keeps what it makes by renaming, and finds what is there already.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.errors import ArgumentError, RunInUseError
from emergent_heads.processes import Local, ProcessStartError, load_module, sendable, with_files

TRIES = 3
"""How often a job is handed over whose worker is lost each time."""
FIRST_REST_SECONDS = 0.5
LONGEST_REST_SECONDS = 60.0
"""Rests of a job that another process is at, before it is handed over again; each is twice the one before."""
_GLANCE_SECONDS = 1.0  # between two looks at what is running
_PAUSE_SECONDS = 0.2  # between two times that futures are asked whether they are done,
_QUESTION_SECONDS = 0.005  # and for each of them, as it may look at a shared disk for that


class Executor(Protocol):
    """What runs jobs: those of `emergent_heads.executors`, of `concurrent.futures`, of dask, or your own.

    One that has `batch()`, a context manager as submitit has it, is given all jobs of the beginning within it. One
    whose futures do not say what is running may have `n_running()`.
    """

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
        size: what it counts on the progress bar.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    size: int = 1


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

    A job that raises has ended. One whose worker is lost (killed, out of memory, on a node that went away) is handed
    over again, `TRIES` times in all. One that raises `RunInUseError` is handed over again after a while, until the
    other process has done it or let go of it. Leaving the iteration early drops what has not begun, and stops what is
    running where the executor can.

    Args:
        jobs: what to do.
        executor: who does it. None for processes of this machine, or for this process.
        workers: processes of this machine: None for one for each core; 0 for none, each job is then done here when
            its turn comes.
        modules: that workers import first, such as one that registers a mixer.
        title, unit: of the progress bar.
        done_before: what need not be done any more, for the bar.
        progress: whether to show a bar, with what is running, what has failed and the time left.

    Raises:
        ArgumentError: both an executor and workers, or a negative number of workers.
        ProcessStartError: no process could begin to work.
    """
    jobs = list(jobs)
    check_workers(executor, workers)
    with ExitStack() as stack:
        total = done_before + sum(job.size for job in jobs)
        bar = tqdm(total=total, initial=done_before, desc=title, unit=unit, **notebook.bar(progress))
        stack.callback(bar.close)
        if executor is None:
            count = min(cores() if workers is None else workers, len(jobs))
            executor = stack.enter_context(Local(count)) if count else _Here()
        yield from _Round(executor, _Modules(with_files(modules)), bar).run(jobs)


def values(ended: Iterable[Ended]) -> Iterator[tuple[Job, Any]]:
    """Each job with what it returned, for work that makes no sense in part.

    Raises:
        Exception: the first error of a job.
    """
    for each in ended:
        if each.error is not None:
            raise each.error
        yield each.job, each.value


def check_workers(executor: Executor | None, workers: int | None) -> None:
    """Checks that work is given to one of the two.

    Raises:
        ArgumentError: both an executor and workers, or a negative number of workers.
    """
    if executor is not None and workers not in (None, 0):
        raise ArgumentError("workers are of the default executor; leave them out, or the executor")
    if workers is not None and workers < 0:
        raise ArgumentError(f"workers is {workers}; give the number of processes, or 0 for this process")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Here:
    """Runs each job in this process, when its result is asked for."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> "_Later":
        return _Later(function, arguments)

    def n_running(self) -> int:
        return 1


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


class _Modules(tuple[tuple[str, Path | None], ...]):
    """Modules with their files, which are loaded where this is unpickled: before what stands behind it in a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (tuple(self),)


def _loaded(modules: Iterable[tuple[str, Path | None]]) -> _Modules:
    for name, file in modules:
        load_module(name, file)
    return _Modules(modules)


class _Parcel:
    """A job for a worker, in one piece, the modules first: its function and arguments may be of their classes."""

    def __init__(self, modules: _Modules, job: Job) -> None:
        self.modules, self.function, self.arguments = modules, job.function, job.arguments


def _attempt(parcel: _Parcel) -> Any:
    """Runs a job in a worker."""
    try:
        return parcel.function(*parcel.arguments)
    except Exception as error:
        return _Raised(sendable(error), "".join(traceback.format_exception(error)))


@dataclass(eq=False)
class _Handed:
    """A job that was handed over.

    Attributes:
        job: the job.
        future: of the last time.
        lost: workers that it has lost so far.
        rest: seconds of its last rest.
        due: when its rest is over, by the clock of `time.monotonic`.
    """

    job: Job
    future: Any = None
    lost: int = 0
    rest: float = 0.0
    due: float = 0.0


class _Round:
    """The jobs of one call: handed over and waited for, or resting because another process is at them."""

    def __init__(self, executor: Executor, modules: _Modules, bar: Any) -> None:
        self._executor: Any = executor
        self._modules, self._bar = modules, bar
        self._handed: dict[_Handed, None] = {}  # in order
        self._resting: list[_Handed] = []
        self._silent: set[_Handed] = set()  # whose futures do not call back
        self._called_back: SimpleQueue[_Handed] = SimpleQueue()
        self._failed, self._known, self._next_glance = 0, False, 0.0

    def run(self, jobs: Sequence[Job]) -> Iterator[Ended]:
        try:
            if jobs:
                with self._batch():
                    for job in jobs:
                        self._hand_over(_Handed(job))
            while self._handed or self._resting:
                self._wake()
                self._show()
                for each in self._next_ended():
                    del self._handed[each]
                    self._silent.discard(each)
                    if (ended := self._taken(each)) is not None:
                        self._failed += ended.error is not None
                        self._bar.update(ended.job.size)
                        yield ended
            self._next_glance = 0.0
            self._show()
        finally:  # after an interrupt, what has not begun is not begun
            for each in self._handed:
                with suppress(Exception):  # one that cannot be cancelled keeps no other from it
                    each.future.cancel()

    def _batch(self) -> AbstractContextManager[Any]:
        return self._executor.batch() if hasattr(self._executor, "batch") else nullcontext()

    def _hand_over(self, each: _Handed) -> None:
        self._handed[each] = None
        each.future = self._executor.submit(_attempt, _Parcel(self._modules, each.job))
        if isinstance(each.future, Future):
            each.future.add_done_callback(lambda _: self._called_back.put(each))
        else:
            self._silent.add(each)

    def _wake(self) -> None:
        """Hands over what has rested long enough."""
        now = time.monotonic()
        for each in [each for each in self._resting if each.due <= now]:
            self._resting.remove(each)
            self._hand_over(each)

    def _next_ended(self) -> list[_Handed]:
        """Those whose future has ended, or none after a while; the first where futures cannot be asked."""
        if any(not hasattr(each.future, "done") for each in self._silent):
            return [next(iter(self._handed))]
        ended = [each for each in self._silent if each.future.done()]
        asked_again = _PAUSE_SECONDS + _QUESTION_SECONDS * len(self._silent) if self._silent else _GLANCE_SECONDS
        due = min((each.due for each in self._resting), default=float("inf"))
        patience = 0.0 if ended else max(0.0, min(asked_again, due - time.monotonic()))
        try:
            ended.append(self._called_back.get(timeout=patience))
            while True:
                ended.append(self._called_back.get_nowait())
        except Empty:
            return ended

    def _taken(self, each: _Handed) -> Ended | None:
        """What became of a job whose future has ended; None where it is to be handed over again."""
        try:
            value = each.future.result()
        except ProcessStartError:
            raise  # nothing else would start either
        except Exception as error:
            each.lost += 1
            if each.lost < TRIES:
                self._hand_over(each)
                return None
            return Ended(each.job, error=error, traceback="".join(traceback.format_exception(error)))
        if not isinstance(value, _Raised):
            return Ended(each.job, value)
        if isinstance(value.error, RunInUseError):
            each.rest = min(LONGEST_REST_SECONDS, 2 * each.rest or FIRST_REST_SECONDS)
            each.due = time.monotonic() + each.rest
            self._resting.append(each)
            return None
        return Ended(each.job, error=value.error, traceback=value.traceback)

    def _show(self) -> None:
        """Says on the bar, now and then, what has failed and what is running, as far as that is known."""
        if time.monotonic() < self._next_glance:
            return
        self._next_glance = time.monotonic() + _GLANCE_SECONDS
        if hasattr(self._executor, "n_running"):
            running, self._known = min(self._executor.n_running(), len(self._handed)), True
        else:
            running = sum(bool(each.future.running()) for each in self._handed if hasattr(each.future, "running"))
            self._known |= running > 0  # a future that never says so may not know
        told = {"running": running} if self._known else {"unfinished": len(self._handed)}
        if self._resting:
            told["elsewhere"] = len(self._resting)
        self._bar.set_postfix({**told, "failed": self._failed})
