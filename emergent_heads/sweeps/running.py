"""Running a sweep: each run in a process of its own, what is done once is not done again."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.errors import ArgumentError
from emergent_heads.models.mixers import mixer_class
from emergent_heads.processes import LocalProcesses, ProcessStartError
from emergent_heads.storage import atomic_path, check_writable
from emergent_heads.sweeps.measures import measures_of
from emergent_heads.sweeps.result import Outcome, SweepResult, sweep_result
from emergent_heads.sweeps.runs import RunSpec, check_runs
from emergent_heads.training.loop import train
from emergent_heads.training.run import Run


class Executor(Protocol):
    """What runs the jobs of a sweep: those of `concurrent.futures`, of submitit, of dask, or your own."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Begins `function(*arguments)`, elsewhere or later, and gives a future: its `result()` waits for the end."""
        ...


def run_sweep(
    runs: Iterable[RunSpec],
    path: Path | str,
    executor: Executor | None = None,
    *,
    workers: int | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> SweepResult:
    """Trains every run into a folder of its own in `path`, and gives one table of what came out.

    Finished runs in `path` are not trained again, unfinished ones go on where they stopped, and failed ones are tried
    again. A run that fails, even one whose process dies, costs no other run: it stands in the table with its error,
    and `<run>.error.txt` has the whole of it. After an interrupt the same call goes on.

    Args:
        runs: what to train, as `grid` makes it; equal runs are trained once.
        path: folder of the run folders. Other processes and machines must see it under the same path.
        executor: anything whose `submit(function, *arguments)` gives futures. By default processes of this machine
            with one torch thread each, which suits small models; a script starts them under
            `if __name__ == "__main__":`.
        workers: processes of the default executor: by default one for each core; 0 trains in this process.
        device: where the models are trained.
        progress: whether to show a bar.

    Raises:
        ArgumentError: no runs, or both an executor and workers. OutputError: the folder does not take files.
        ProcessStartError: no process could begin to work.
    """
    chosen = list({run.name: run for run in check_runs(runs)}.values())
    path = Path(path)
    check_writable(path / "sweep.csv")
    if executor is not None and workers is not None:
        raise ArgumentError("workers are of the default executor; leave them out, or the executor")
    if workers is not None and workers < 0:
        raise ArgumentError(f"workers is {workers}; give the number of processes, or 0 for this process")
    outcomes = {run.name: found for run in chosen if (found := _finished(run, path)) is not None}
    missing = [run for run in chosen if run.name not in outcomes]
    with ExitStack() as stack:
        bar = tqdm(total=len(chosen), initial=len(outcomes), desc="sweep", unit="run", **notebook.bar(progress))
        stack.callback(bar.close)
        if executor is None:
            count = min(_cores() if workers is None else workers, len(missing))
            executor = stack.enter_context(LocalProcesses(count, _modules(missing))) if count else _Here()
        for run, outcome in _train_all(missing, path.resolve(), executor, device, bar):
            outcomes[run.name] = outcome
            _keep_error(path / f"{run.name}.error.txt", outcome)
    return sweep_result(chosen, outcomes, path)


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


def train_run(run: RunSpec, path: Path, device: str) -> Outcome:
    """The job of one run, in whatever process; `path` is the folder of the sweep."""
    try:
        settings = {each.name: getattr(run.training, each.name) for each in fields(run.training)}
        trained = train(
            run.config, run.task, path / run.name, seed=run.seed, device=device, progress=False, **settings
        )
        return Outcome(measures_of(run, trained))
    except Exception as error:
        return Outcome.failed(error)


def _train_all(
    runs: Sequence[RunSpec], path: Path, executor: Executor, device: str, bar: Any
) -> Iterator[tuple[RunSpec, Outcome]]:
    """Each run with what became of it, as they end."""
    waiting: list[tuple[Any, RunSpec]] = []
    failed = 0
    try:
        for run in runs:
            waiting.append((executor.submit(train_run, run, path, device), run))
        while waiting:
            bar.set_postfix({"running": sum(map(_is_running, waiting)), "failed": failed})
            for ended in _next_ended(waiting):
                waiting.remove(ended)
                outcome = _outcome(ended[0])
                failed += outcome.error is not None
                bar.update()
                yield ended[1], outcome
        bar.set_postfix({"running": 0, "failed": failed})
    finally:  # after an interrupt, what has not begun is not begun
        for future, _ in waiting:
            if hasattr(future, "cancel"):
                future.cancel()


def _outcome(future: Any) -> Outcome:
    try:
        return future.result()
    except ProcessStartError:
        raise  # nothing else would start either
    except Exception as error:
        return Outcome.failed(error)


def _next_ended(waiting: "Sequence[tuple[Any, RunSpec]]") -> "list[tuple[Any, RunSpec]]":
    """Those whose future has ended, at least one; of futures that cannot be asked, the first."""
    if all(isinstance(future, Future) for future, _ in waiting):
        wait([future for future, _ in waiting], return_when=FIRST_COMPLETED)
    elif not all(hasattr(future, "done") for future, _ in waiting):
        return [waiting[0]]
    while not (ended := [each for each in waiting if each[0].done()]):
        time.sleep(0.2)
    return ended


def _is_running(job: "tuple[Any, RunSpec]") -> bool:
    running = getattr(job[0], "running", None)
    return bool(running()) if callable(running) else False


def _keep_error(path: Path, outcome: Outcome) -> None:
    if outcome.error is None:
        path.unlink(missing_ok=True)
        return
    with atomic_path(path) as temporary:
        temporary.write_text(outcome.traceback)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _modules(runs: Sequence[RunSpec]) -> list[str]:
    """Modules that define the tasks and mixers of the runs: importing them registers the mixers in a new process."""
    classes: set[type] = {type(run.task) for run in runs}
    classes |= {mixer_class(name) for run in runs for name in run.config.mixers}
    return sorted({each.__module__ for each in classes})


def _finished(run: RunSpec, path: Path) -> Outcome | None:
    """What came out of a run that is there and done; None where it is to be trained."""
    try:
        found = Run.open(path / run.name)
        return None if found.status == "unfinished" else Outcome(measures_of(run, found))
    except Exception:  # mostly that it is not there; what else is wrong, the training will say
        return None
