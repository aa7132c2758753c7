"""Running a sweep: each run in a process of its own, what is done once is not done again."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from emergent_heads.jobs import Executor, Job, run_jobs
from emergent_heads.models.mixers import mixer_class
from emergent_heads.storage import atomic_path, check_writable
from emergent_heads.sweeps.measures import measures_of
from emergent_heads.sweeps.result import Outcome, SweepResult, sweep_result
from emergent_heads.sweeps.runs import RunSpec, check_runs
from emergent_heads.training.loop import train
from emergent_heads.training.run import Run


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
    outcomes = {run.name: found for run in chosen if (found := _finished(run, path)) is not None}
    missing = {run.name: run for run in chosen if run.name not in outcomes}
    jobs = [Job(name, train_run, (run, path.resolve(), device)) for name, run in missing.items()]
    how: dict[str, Any] = {"title": "sweep", "unit": "run", "done_before": len(outcomes), "progress": progress}
    for ended in run_jobs(jobs, executor, workers=workers, modules=_modules(list(missing.values())), **how):
        outcome = ended.value if ended.error is None else Outcome.failed(ended.error, ended.traceback)
        outcomes[ended.job.name] = outcome
        _keep_error(path / f"{ended.job.name}.error.txt", outcome)
    return sweep_result(chosen, outcomes, path)


def train_run(run: RunSpec, path: Path, device: str) -> Outcome:
    """The job of one run, in whatever process; `path` is the folder of the sweep."""
    return Outcome(measures_of(run, _trained(run, path, device, wait=False)))


def _trained(run: RunSpec, path: Path, device: str, *, wait: bool) -> Run:
    """The run, trained, and before it the one it starts from, which another process may be training just now."""
    start = None if run.init_from is None else _trained(run.init_from, path, device, wait=True)
    settings = {each.name: getattr(run.training, each.name) for each in fields(run.training)}
    how: dict[str, Any] = {"seed": run.seed, "init_from": start, "carry": run.carry, "device": device, "wait": wait}
    return train(run.config, run.task, path / run.name, progress=False, **how, **settings)


def _keep_error(path: Path, outcome: Outcome) -> None:
    if outcome.error is None:
        path.unlink(missing_ok=True)
        return
    with atomic_path(path) as temporary:
        temporary.write_text(outcome.traceback)


def _modules(runs: Sequence[RunSpec]) -> list[str]:
    """Modules that define the tasks and mixers of the runs: importing them registers the mixers in a new process."""
    all_runs = [one for run in runs for one in run.chain]
    classes: set[type] = {type(run.task) for run in all_runs}
    classes |= {mixer_class(name) for run in all_runs for name in run.config.mixers}
    return sorted({each.__module__ for each in classes})


def _finished(run: RunSpec, path: Path) -> Outcome | None:
    """What came out of a run that is there and done; None where it is to be trained."""
    try:
        found = Run.open(path / run.name)
        return None if found.status == "unfinished" else Outcome(measures_of(run, found))
    except Exception:  # mostly that it is not there; what else is wrong, the training will say
        return None
