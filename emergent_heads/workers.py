"""What a worker keeps from one job to the next, and what can be sent to a worker.

A worker is a process, or a thread of a pool of threads, that does the jobs of `emergent_heads.jobs`.
"""

import importlib
import pickle
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from emergent_heads.errors import ArgumentError, EmergentHeadsError
from emergent_heads.jobs import Ended, Executor, check_workers, cores
from emergent_heads.processes import Local, ProcessDiedError

_Value = TypeVar("_Value")
_MOST_SENT_GB = 1.0
_last = threading.local()


def kept_by_worker(key: Hashable, make: Callable[[], _Value]) -> _Value:
    """What `make` made for the last job of this worker under the same key, else what it makes now.

    One thing is kept, as it may hold a model: that of the job before goes before the next is made. Threads of one
    process keep theirs apart, so that no two change one model.
    """
    if getattr(_last, "key", None) != key:
        _last.key = _last.value = None
        _last.value = make()
        _last.key = key
    return _last.value


@contextmanager
def opened(executor: Executor | None, workers: int | None) -> Iterator[Executor | None]:
    """One executor for several rounds of jobs: the one given, or processes that live as long as the block.

    None where the work is to be done in this process.

    Raises:
        ArgumentError: both an executor and workers, or a negative number of workers.
    """
    check_workers(executor, workers)
    if executor is not None or workers == 0:
        yield executor
        return
    with Local(workers or cores()) as processes:
        yield processes


def check_travels(executor: Executor | None, things: Mapping[str, object], advice: str) -> None:
    """Checks that things can be sent to the workers, before any work is done.

    Args:
        executor: None for processes of this machine.
        things: what they are called in the message -> what is to be sent.
        advice: what to do where one cannot be sent.

    Raises:
        ArgumentError: one cannot be pickled, or is defined in a notebook, which other processes cannot import.
    """
    if isinstance(executor, ThreadPoolExecutor):
        return
    plain = executor is None or isinstance(executor, Local | ProcessPoolExecutor)
    dumps = pickle.dumps if plain else _best_dumps()
    for name, thing in things.items():
        try:
            sent = dumps(thing)
        except Exception as error:
            raise ArgumentError(f"{name} cannot be sent to another process ({error}): {advice}") from error
        if plain and b"__main__" in sent and not hasattr(sys.modules["__main__"], "__file__"):
            raise ArgumentError(
                f"{name} is defined in this session, which other processes cannot import: put it into a module, or "
                f"{advice}"
            )


def _best_dumps() -> Callable[[object], bytes]:
    """As Ray, submitit and dask send things: functions without a name, too."""
    try:
        return importlib.import_module("cloudpickle").dumps
    except ImportError:
        return pickle.dumps


@dataclass(frozen=True, eq=False)
class Parcel:
    """Something large that many jobs need, pickled once; each worker unpacks it once.

    Threads get copies of their own.
    """

    content: bytes

    @classmethod
    def of(cls, thing: object, what: str, advice: str) -> "Parcel":
        """Packs a thing, which `what` names in messages.

        Raises:
            ArgumentError: it cannot be pickled, or is too large to be sent with every job.
        """
        try:
            content = pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise ArgumentError(f"{what} cannot be sent to another process ({error}): {advice}") from error
        if len(content) > 1e9 * _MOST_SENT_GB:
            raise ArgumentError(
                f"{what} takes {len(content) / 1e9:.2g} GB, too much to be sent with every job: {advice}"
            )
        return cls(content)

    def unpacked(self) -> Any:
        return pickle.loads(self.content)


def raise_failures(failed: Sequence[Ended], total: int) -> None:
    """Raises the first error, and says what else failed; does nothing where nothing did.

    Args:
        failed: jobs that raised, the most important first.
        total: number of all jobs.
    """
    if not failed:
        return
    error = failed[0].error
    assert error is not None
    if not isinstance(error, EmergentHeadsError | ProcessDiedError):
        raise error
    names = ", ".join(dict.fromkeys(each.job.name for each in failed[:5]))
    raise type(error)(
        f"{error} ({len(failed)} of {total} jobs failed, of {names}; what was done is kept, and the same call does "
        "only the rest)"
    ) from error
