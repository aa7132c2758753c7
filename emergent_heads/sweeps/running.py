"""Running a sweep: each run in a process of its own, what is done once is not done again."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from emergent_heads.errors import whole_number
from emergent_heads.jobs import Ended, Executor, Job, run_jobs
from emergent_heads.models.mixers import mixer_class
from emergent_heads.storage import atomic_path, check_writable
from emergent_heads.sweeps.measures import measures_of
from emergent_heads.sweeps.result import Outcome, SweepResult, sweep_result
from emergent_heads.sweeps.runs import RunSpec, check_runs
from emergent_heads.training.folder import RunFolder
from emergent_heads.training.learner import Plan
from emergent_heads.training.loop import SAVE_EVERY_SECONDS, train
from emergent_heads.training.run import Run
from emergent_heads.training.seeds import train_stacked


def run_sweep(
    runs: Iterable[RunSpec],
    path: Path | str,
    executor: Executor | None = None,
    *,
    workers: int | None = None,
    together: int = 1,
    device: str = "cpu",
    save_every_seconds: float = SAVE_EVERY_SECONDS,
    progress: bool = True,
) -> SweepResult:
    """Trains every run into a folder of its own in `path`, and gives one table of what came out.

    Finished runs in `path` are not trained again, unfinished ones go on where they stopped, and failed ones are tried
    again. A run that fails, even one whose process dies, costs no other run: it stands in the table with its error,
    and `<run>.error.txt` has the whole of it. After an interrupt the same call goes on. Several calls may work on one
    folder at a time, on several machines: each trains what no other is training, and waits for what another is.

    Args:
        runs: what to train, as `grid` makes it; equal runs are trained once.
        path: folder of the run folders. Other processes and machines must see it under the same path.
        executor: anything whose `submit(function, *arguments)` gives futures, see `emergent_heads.executors`. By
            default processes of this machine with one torch thread each, which suits small models; a script starts
            them under `if __name__ == "__main__":`.
        workers: processes of the default executor: by default one for each core; 0 trains in this process.
        together: most runs that are trained in one process with stacked weights, as `train_seeds` does it: runs of one
            model, one way of training and one length of sequence, such as seeds. The same numbers up to rounding, and
            faster for small models on a GPU; on a CPU processes are faster as a rule.
        device: where the models are trained.
        save_every_seconds: how much work of a run a kill may cost.
        progress: whether to show a bar.

    Raises:
        ArgumentError: no runs, `together` below 1, or both an executor and workers. OutputError: the folder does not
            take files. ProcessStartError: no process could begin to work.
    """
    chosen = list({run.name: run for run in check_runs(runs)}.values())
    whole_number("together", together, least=1)
    path = Path(path)
    check_writable(path / "sweep.csv")
    outcomes = {run.name: found for run in chosen if (found := _finished(run, path)) is not None}
    missing = [run for run in chosen if run.name not in outcomes]
    groups = _stackable(missing, together)
    how: dict[str, Any] = {"title": "sweep", "unit": "run", "modules": _modules(missing), "progress": progress}
    while groups:
        jobs = {_job(group, path, device, save_every_seconds): group for group in groups}
        groups = []
        for ended in run_jobs(jobs, executor, workers=workers, done_before=len(outcomes), **how):
            found = _outcomes(ended, jobs[ended.job], path)
            groups += [[run] for run in jobs[ended.job] if run.name not in found]
            outcomes |= found
            for name, outcome in found.items():
                _keep_error(path / f"{name}.error.txt", outcome)
    return sweep_result(chosen, outcomes, path)


def _job(runs: Sequence[RunSpec], path: Path, device: str, save_every_seconds: float) -> Job:
    arguments = (runs, path.resolve(), device, save_every_seconds)
    return Job(runs[0].name, train_and_measure, arguments, size=len(runs))


def _outcomes(ended: Ended, runs: Sequence[RunSpec], path: Path) -> dict[str, Outcome]:
    """What became of the runs of a job, by their names.

    Of several that were trained together and failed, it tells only of those that are done nevertheless: which of the
    others it was that failed will show when each is trained alone.
    """
    if ended.error is None:
        return {run.name: outcome for run, outcome in zip(runs, ended.value, strict=True)}
    if len(runs) > 1:
        return {run.name: done for run in runs if (done := _finished(run, path)) is not None}
    return {runs[0].name: Outcome.failed(ended.error, ended.traceback)}


def train_and_measure(runs: Sequence[RunSpec], path: Path, device: str, save_every_seconds: float) -> list[Outcome]:
    """The job of runs that are trained together, in whatever process; `path` is the folder of the sweep."""
    trained = _trained(runs, path, device, save_every_seconds)
    return [Outcome(measures_of(run, trained[run.name])) for run in runs]


def _trained(runs: Sequence[RunSpec], path: Path, device: str, save_every_seconds: float) -> dict[str, Run]:
    """The runs by their names, trained, and before them those they start from."""
    starts: dict[str, Run] = {}
    earlier = {run.init_from.name: run.init_from for run in runs if run.init_from is not None}
    for group in _stackable(list(earlier.values()), len(runs)):
        starts |= _trained(group, path, device, save_every_seconds)
    start_of = {run.name: None if run.init_from is None else starts[run.init_from.name] for run in runs}
    how: dict[str, Any] = {"progress": False, "save_every_seconds": save_every_seconds}
    if len(runs) == 1:
        (run,) = runs
        how |= {each.name: getattr(run.training, each.name) for each in fields(run.training)}
        how |= {"seed": run.seed, "init_from": start_of[run.name], "carry": run.carry, "device": device}
        return {run.name: train(run.config, run.task, path / run.name, **how)}
    planned: list[tuple[Plan, RunFolder]] = []
    for run in runs:
        plan = Plan.of(run.config, run.task, run.training, device)
        plan = plan.starting_from(start_of[run.name], run.carry, path / run.name)
        planned.append((plan, RunFolder(path / run.name, plan.identity(run.seed))))
    return dict(zip((run.name for run in runs), train_stacked(planned, runs[0].name, **how), strict=True))


def _stackable(runs: Sequence[RunSpec], most: int) -> list[list[RunSpec]]:
    """The runs in groups of at most `most` that can be trained with stacked weights."""
    if most == 1:
        return [[run] for run in runs]
    alike: dict[str, list[RunSpec]] = {}
    for run in runs:
        # One attention bias is shared by all models of a stack, and it is the task's.
        task = run.task.length if run.training.bias is None else run.task.settings()
        key = json.dumps([run.config.settings(), run.training.settings(), task], sort_keys=True, default=str)
        alike.setdefault(key, []).append(run)
    return [group[start : start + most] for group in alike.values() for start in range(0, len(group), most)]


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
