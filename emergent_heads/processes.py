"""Work in other processes of this machine, with one torch thread each.

`concurrent.futures.ProcessPoolExecutor` fails every job, running or waiting, when one of its processes dies, and does
not say which job it was. Here a process that dies costs its own job only, and the next job gets a new process.
"""

import importlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from emergent_heads.errors import ArgumentError, EmergentHeadsError, whole_number

_GPUS = "CUDA_VISIBLE_DEVICES"
_Value = TypeVar("_Value")
_READY = "ready"
_PATIENCE_SECONDS = 5.0


class ProcessDiedError(RuntimeError):
    """A process ended before its job did; other jobs are not touched."""


class ProcessStartError(EmergentHeadsError, RuntimeError):
    """A process could not begin to work, so no job can be run; the message says what to look at."""

    exit_status = 1


class Local:
    """Processes of this machine: `submit(function, *arguments)` runs in one of them and gives a future.

    Processes are spawned, not forked, because torch's threads do not survive a fork: function and arguments must be
    picklable, and a script starts them under `if __name__ == "__main__":`. Leaving the context ends the processes,
    also those at work.

    Where there are GPUs, each process sees one of them, in turn: `device="cuda"` is another GPU in each.
    """

    def __init__(self, workers: int, gpus: int | None = None) -> None:
        """Starts nothing yet; a process starts with the first job it gets.

        Args:
            workers: most processes at a time.
            gpus: how many of the GPUs that this process sees are shared out, the first of them; worker i sees GPU i
                modulo their number, by `CUDA_VISIBLE_DEVICES`. All if left out; 0 hides them.

        Raises:
            ArgumentError: no workers, or more GPUs than this process sees.
        """
        whole_number("workers", workers, least=1)
        visible = _visible_gpus(gpus)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="process")
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._processes = [_Process(visible[i % len(visible)] if visible else None) for i in range(workers)]
        for process in self._processes:
            self._idle.put(process)

    def submit(self, function: Callable[..., _Value], /, *arguments: Any) -> "Future[_Value]":
        """Runs `function(*arguments)` as soon as a process is free.

        The future raises what the function raises, `ProcessDiedError` where its process ended, and `ProcessStartError`
        where there was none to be had.
        """
        return self._threads.submit(self._run, function, arguments)

    def close(self) -> None:
        """Drops the jobs that wait and ends the processes, also those at work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.end()
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.wait()

    def __enter__(self) -> "Local":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, function: Callable[..., _Value], arguments: tuple[Any, ...]) -> _Value:
        process = self._idle.get()
        try:
            return process.run(function, arguments)
        finally:
            self._idle.put(process)


class _Process:
    """One process, started when it is needed and again after it died."""

    def __init__(self, gpus: str | None) -> None:
        """Takes what `CUDA_VISIBLE_DEVICES` is to be there; None for what it is here."""
        self._gpus = gpus
        self._process: Any = None
        self._connection: Any = None
        self._busy = self._ended = False

    def run(self, function: Callable[..., _Value], arguments: tuple[Any, ...]) -> _Value:
        if self._process is not None and not self._process.is_alive():
            self._forget()  # it died with nothing to do
        connection = self._connection or self._start()
        try:
            self._busy = True
            connection.send_bytes(_pickled((function, arguments)))
            good, value = connection.recv()
        except (EOFError, OSError):
            raise ProcessDiedError(f"its process ended ({self._forget()})") from None
        finally:
            self._busy = False
        if good:
            return value
        raise value

    def end(self) -> None:
        """Ends the process: one without a job by telling it, one with a job by a signal."""
        self._ended = True
        if self._process is None:
            return
        if self._busy:
            self._process.terminate()
        elif self._connection is not None:
            self._connection.close()

    def wait(self) -> None:
        """Waits for the end, and makes it come."""
        if self._process is None:
            return
        self._process.join(_PATIENCE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._forget()

    def _start(self) -> Any:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._gpus), daemon=True)
        try:
            process.start()
        except RuntimeError as error:  # what multiprocessing says in a script's copy of itself
            raise ProcessStartError(f"no process could be started: {str(error).strip().splitlines()[0]}") from error
        finally:
            theirs.close()
        self._process, self._connection = process, ours
        if self._ended:  # while it was started
            process.terminate()
        try:
            said = ours.recv()
        except (EOFError, OSError):
            raise ProcessStartError(
                f"a new process ended before it could work ({self._forget()}); a script starts processes under "
                'if __name__ == "__main__":, and what it imports must be importable there, too'
            ) from None
        if said != _READY:
            self._forget()
            raise ProcessStartError(f"a new process could not get ready to work: {said}")
        return ours

    def _forget(self) -> str:
        """Puts the process away and says how it ended."""
        self._process.join()
        code = self._process.exitcode
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
        return f"exit status {code}"


def _visible_gpus(gpus: int | None) -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` is for the workers in turn; nothing where there is no GPU to choose from."""
    if gpus == 0:
        return [""]
    told = os.environ.get(_GPUS)
    names = told.split(",") if told else [str(number) for number in range(0 if told == "" else _count_gpus())]
    if gpus is not None and not 0 < gpus <= len(names):
        raise ArgumentError(f"gpus is {gpus}; this process sees {len(names)} GPUs")
    return names[:gpus]


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _serve(connection: Any, gpus: str | None) -> None:
    """What a process does: one job after the other, until the other end of the connection is closed."""
    if gpus is not None:
        os.environ[_GPUS] = gpus  # before torch looks for GPUs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is open is put away
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import torch

        torch.set_num_threads(1)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(_READY)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        except Exception as error:  # a job that cannot be unpickled here
            connection.send((False, sendable(error)))
            continue
        try:
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, sendable(error))
        try:
            connection.send_bytes(_pickled(answer))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            connection.send((False, RuntimeError(f"what the job returned cannot be pickled: {error}")))


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, even one that was killed: nobody waits for the job any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def load_module(name: str, file: Path | None = None) -> ModuleType:
    """The module of that name; one that is not on the import path is run from `file`, once, under that name."""
    if name in sys.modules:
        return sys.modules[name]
    if file is None:
        return importlib.import_module(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".")[0]:
            raise
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def with_files(modules: Iterable[str]) -> list[tuple[str, Path | None]]:
    """Modules with the file each was loaded from; a script's own module is made anew by `multiprocessing` itself."""
    found = []
    for name in dict.fromkeys(modules):
        if name not in ("__main__", "builtins"):
            file = getattr(sys.modules.get(name), "__file__", None)
            found.append((name, Path(file).resolve() if file else None))
    return found


def _pickled(thing: object) -> bytes:
    """By plain pickle: torch teaches multiprocessing's own to share memory, of which many tensors would take too much.

    Each would keep a file open, and containers may have as little as 64 MB of such memory.
    """
    return pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL)


def sendable(error: Exception) -> Exception:
    """For another process: the error itself where it survives pickling, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
