"""When did a capability emerge in a training run, and how much does that depend on the seed?

The point of emergence lies between the last failing and the first passing checkpoint, after "Emergent Capabilities
Arise Randomly from Learning Sparse Attention Patterns" (arXiv 2606.25010). Real curves rise, fall and rise again, so
each result also says where the crossing that lasts is, and what the search could not know.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.evaluation import Measured, SeriesEvaluations
from emergent_heads.analysis.search import STRATEGIES, Found, Strategy, persistent_place, search
from emergent_heads.analysis.sending import check_series_travel, modules_of, piece_size
from emergent_heads.checkpoints.known_issues import is_grave, marks_in
from emergent_heads.errors import ArgumentError, CheckpointError, EmergenceError, nearest
from emergent_heads.jobs import Ended, Executor, Job, run_jobs
from emergent_heads.plots import emergence as emergence_plots
from emergent_heads.results import Result, without_empty_marks
from emergent_heads.statistics import censored_median, restricted_mean, share_interval
from emergent_heads.tasks.task import PromptTask
from emergent_heads.workers import raise_failures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from emergent_heads.checkpoints.series import CheckpointSeries

Status = Literal["emerged", "never", "from the start"]
_MOST_IN_PIECE = 8  # checkpoints of a scan that one job evaluates


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class EmergencePoint(Result):
    """Where one series comes to pass the threshold on one task.

    Attributes:
        table: one row per checkpoint evaluated, by step. From models: `share_matched` with its exact interval,
            `p_target` (mean) with its bootstrap interval, mean `log_p_target_nats`, median `rank` of the target,
            `n_prompts`, `reused` (kept from an earlier call), `known_issue` (of the published weights), `passed`. From
            a table of scores: `score`, `passed`.
        series: name of the series.
        task: name of the task.
        status: "emerged", "never" (nothing the search asked for passes) or "from the start" (the first usable
            checkpoint passes).
        pre: step of the last failing checkpoint before `post`; None unless the status is "emerged".
        post: step of the first passing checkpoint the search found; None if never.
        first_crossing: first passing step among all evaluated.
        persistent_crossing: first step from which every later evaluated checkpoint passes; None if the last one fails.
        persistent: whether the first crossing lasts; None if never, or where `bisect` did not look.
        missed_by_bisect: whether plain bisection would give a later step, or none; None if bisection is all there was.
        threshold: share of prompts (or score) that counts as emerged.
        strategy: how the checkpoints were chosen.
        n_checkpoints: checkpoints in the series.
        caveats: what the search could not know, in sentences.
        problems: step -> what is wrong with that checkpoint.
    """

    series: str
    task: str
    status: Status
    pre: int | None
    post: int | None
    first_crossing: int | None
    persistent_crossing: int | None
    persistent: bool | None
    missed_by_bisect: bool | None
    threshold: float
    strategy: Strategy
    n_checkpoints: int
    caveats: tuple[str, ...]
    problems: Mapping[int, str]

    @property
    def midpoint(self) -> float | None:
        """Mean of `pre` and `post` in steps, the value the paper plots; None unless the status is "emerged"."""
        return None if self.pre is None or self.post is None else (self.pre + self.post) / 2

    @property
    def step(self) -> int | None:
        """Step of emergence: the same as `post`."""
        return self.post

    def require(self) -> tuple[int, int]:
        """`(pre, post)`, for what needs both.

        Raises:
            EmergenceError: the capability never emerged, or was there from the start.
        """
        if self.pre is not None and self.post is not None:
            return self.pre, self.post
        raise EmergenceError(
            f"no checkpoints before and after emergence: {self.headline()}. Give the two steps yourself, try another "
            'threshold or strategy="verify", or choose another task'
        )

    def headline(self) -> str:
        where = {
            "emerged": f"emerged between step {self.pre} and step {self.post}",
            "never": f"never emerged by step {self.table['step'].max()}",
            "from the start": f"there from the start (step {self.post})",
        }[self.status]
        lasting = ", lost again later" if self.persistent is False else ""
        if lasting and self.persistent_crossing is not None:
            lasting += f", for good from step {self.persistent_crossing}"
        missed = ", missed by plain bisection" if self.missed_by_bisect else ""
        return (
            f"{self.task} in {self.series}: {where}{lasting}{missed} "
            f"({self.strategy}, threshold {self.threshold:g}, {len(self.table)} of {self.n_checkpoints} checkpoints)"
        )

    def notes(self) -> Iterable[str]:
        yield from (f"caveat: {caveat}" for caveat in self.caveats)
        if self.problems:
            yield f"problems (see .problems): step {', '.join(map(str, self.problems))}"

    def plot(self) -> "Figure":
        """What was measured against the training step, with the interval between `pre` and `post` shaded."""
        return emergence_plots.emergence_curve(
            self.table, task=self.task, threshold=self.threshold, pre=self.pre, post=self.post
        )


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class EmergenceTable(Result):
    """Points of emergence of several series on several tasks.

    Attributes:
        table: one row per series and task: `series`, `size`, `seed`, `task`, `status`, `pre`, `post`, `midpoint`,
            `first_crossing`, `persistent_crossing`, `persistent`, `steps_to_emergence` (the midpoint; the first step
            if there from the start; the last step if never, and then `censored`), `censored`, `last_step` (the last
            checkpoint evaluated), `n_evaluated`, `n_problems`, `known_issue` (of the published weights of `pre` and
            `post`).
        points: the point of emergence behind each row.
    """

    points: tuple[EmergencePoint, ...]

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per size and task, over its series ("seeds").

        Columns: `n_seeds`; `n_solved` (passing at a checkpoint the search found) and `share_solved` with its exact
        interval; `n_persistent`, of those the ones that last (missing after `bisect`, which does not look);
        `median_step` of the steps to emergence (Kaplan-Meier, "never" censored at its last step; infinite where half
        of the seeds never got there); and `restricted_mean_step` up to `restricted_to_step`, the smallest last step
        among the seeds, with a bootstrap interval over seeds.
        """
        groups = self.table.groupby(["size", "task"], sort=False, dropna=False)
        rows = [{"size": size, "task": task, **_summarise(rows)} for (size, task), rows in groups]  # pyright: ignore[reportGeneralTypeIssues]
        return pd.DataFrame(rows).astype({"n_persistent": "Int64"})

    def headline(self) -> str:
        counts = self.table["status"].value_counts()
        said = ", ".join(f"{count} {status}" for status, count in counts.items())
        return f"points of emergence of {self.table['series'].nunique()} series: {said}"

    def shown(self) -> pd.DataFrame:
        kept = ["series", "task", "status", "pre", "post", "persistent_crossing", "n_evaluated", "known_issue"]
        return without_empty_marks(self.table.loc[:, kept])

    def plot(self) -> "Figure":
        """Steps to emergence against size: a dot per series, crosses for never, the restricted mean as a line."""
        return emergence_plots.emergence_scatter(self.table, self.summary)


@overload
def find_emergence(
    series: "CheckpointSeries",
    task: PromptTask,
    strategy: Strategy = "bisect",
    *,
    threshold: float = 0.5,
    batch_size: int = 64,
    executor: Executor | None = None,
    workers: int | None = 0,
    progress: bool = True,
) -> EmergencePoint: ...
@overload
def find_emergence(
    series: "CheckpointSeries",
    task: Sequence[PromptTask],
    strategy: Strategy = "bisect",
    *,
    threshold: float = 0.5,
    batch_size: int = 64,
    executor: Executor | None = None,
    workers: int | None = 0,
    progress: bool = True,
) -> list[EmergencePoint]: ...
def find_emergence(
    series: "CheckpointSeries",
    task: PromptTask | Sequence[PromptTask],
    strategy: Strategy = "bisect",
    *,
    threshold: float = 0.5,
    batch_size: int = 64,
    executor: Executor | None = None,
    workers: int | None = 0,
    progress: bool = True,
) -> EmergencePoint | list[EmergencePoint]:
    """Finds where a series comes to pass the threshold on a task.

    A checkpoint passes if the target is the greedy next token in at least `threshold` of the prompts; one prompt with
    threshold 1 is the paper's criterion. Checkpoints that cannot be used are passed over. Evaluations are kept, so a
    wider search of the same series costs only what is new.

    Args:
        series: the checkpoints.
        task: a task, or several, which then share each loaded checkpoint.
        strategy: "bisect" is the paper's: the last checkpoint first (a failure means never), then bisection, at most
            ceil(log2 n) + 2 evaluations. "scan" evaluates every checkpoint. "verify" bisects, then looks at the
            neighbours and at a spread of earlier and later checkpoints, and searches on below an earlier pass.
        threshold: share of prompts, above 0 and up to 1.
        batch_size: prompts per forward pass.
        executor: anything whose `submit(function, *arguments)` gives futures. A scan is divided into pieces, of which
            each worker evaluates some; the other strategies search in one worker. What comes out is the same.
        workers: processes of this machine in its place; 0 searches in this process, None takes one for each core.
        progress: shows a progress bar in terminals and notebooks.

    Returns:
        The point of emergence; a list in the order of the tasks if several were given.

    Raises:
        ArgumentError: unknown strategy, a threshold outside its range, no task, both an executor and workers, or
            something that cannot be sent to another process.
        CheckpointError: no checkpoint of the series can be used, or one would run code when read.
        TokenizerError, PromptError: the prompts do not fit the model.
    """
    several = isinstance(task, Sequence)
    tasks = list(task) if several else [task]
    _check_search(tasks, strategy, threshold)
    if executor is None and workers == 0:
        total = len(series.steps) if strategy == "scan" else None
        with tqdm(total=total, desc=series.name, unit="checkpoint", leave=False, **notebook.bar(progress)) as bar:
            evaluations = SeriesEvaluations(series, tasks, batch_size, done=bar.update)
            for index in range(len(tasks)):
                _search(evaluations, index, strategy, threshold)
    else:
        options: dict[str, Any] = {"executor": executor, "workers": workers, "progress": progress}
        (evaluations,) = _searched_by_workers([series], tasks, strategy, threshold, batch_size, **options)
    points = _points(evaluations, strategy, threshold)
    return points if several else points[0]


def emergence_table(
    series: Sequence["CheckpointSeries"],
    task: PromptTask | Sequence[PromptTask],
    strategy: Strategy = "bisect",
    *,
    threshold: float = 0.5,
    batch_size: int = 64,
    executor: Executor | None = None,
    workers: int | None = 0,
    progress: bool = True,
) -> EmergenceTable:
    """Points of emergence of each series on each task, with a summary per size; arguments as in `find_emergence`.

    With an executor or workers, each series is a job, or several in a scan, and a checkpoint is read once for all
    tasks. A series that fails costs the others nothing: their evaluations are kept, and the error is raised at the
    end. A worker that is lost costs the evaluation it was at.

    Raises:
        ArgumentError: as `find_emergence`; also no series, or the same task or name of a series twice.
        CheckpointError, TokenizerError, PromptError: as `find_emergence`.
    """
    tasks = list(task) if isinstance(task, Sequence) else [task]
    if not series:
        raise ArgumentError("no series given: give a list with at least one")
    _check_distinct("series of the same name", [one.name for one in series])
    _check_distinct("tasks", _names(tasks))
    points, rows = [], []
    for one, found in _found(series, tasks, strategy, threshold, batch_size, executor, workers, progress):
        points += found
        rows += [_row(point, size=one.size, seed=one.seed) for point in found]
    return _emergence_table(points, rows, strategy, threshold)


def _found(
    series: Sequence["CheckpointSeries"],
    tasks: Sequence[PromptTask],
    strategy: Strategy,
    threshold: float,
    batch_size: int,
    executor: Executor | None,
    workers: int | None,
    progress: bool,
) -> Iterator[tuple["CheckpointSeries", list[EmergencePoint]]]:
    """Each series with its points."""
    if executor is None and workers == 0:
        for one in series:
            yield (
                one,
                find_emergence(one, tasks, strategy, threshold=threshold, batch_size=batch_size, progress=progress),
            )
            one.unload()  # one model in memory, however many series there are
        return
    _check_search(tasks, strategy, threshold)
    options: dict[str, Any] = {"executor": executor, "workers": workers, "progress": progress}
    for evaluations in _searched_by_workers(series, tasks, strategy, threshold, batch_size, **options):
        yield evaluations.series, _points(evaluations, strategy, threshold)


def emergence_from_table(
    df: pd.DataFrame,
    threshold: float,
    group: Sequence[str] = ("model",),
    *,
    step: str = "step",
    score: str | Sequence[str] = "score",
    size: str | None = None,
    seed: str | None = None,
    strategy: Strategy = "scan",
) -> EmergenceTable:
    """Points of emergence from scores that are there already; no model is needed.

    Args:
        df: one row per series and step.
        threshold: score from which on a step passes. For a score that falls, such as a loss, give its negative.
        group: columns that tell the series apart.
        step: column of the training steps.
        score: column of the scores, or several columns, which become the tasks.
        size: which of the group columns is the size, for the summary and the plot.
        seed: which of the group columns is the seed.
        strategy: as in `find_emergence`; "scan" looks at every row, the others show what they would have found.

    Raises:
        ArgumentError: a column is missing, a step stands twice in a series, a step is no whole number, a score or the
            threshold is not finite, the table is empty, `size` or `seed` is no group column, or unknown strategy.
    """
    group = [group] if isinstance(group, str) else list(group)
    scores = [score] if isinstance(score, str) else list(score)
    _check_strategy(strategy)
    _check_scores(df, group, step, scores, {"size": size, "seed": seed}, threshold)
    df = df.assign(**{name: pd.to_numeric(df[name]) for name in [step, *scores]})  # "1000" would sort before "2"
    points, rows = [], []
    for keys, block in df.groupby(group, sort=False, dropna=False):
        key_of: dict[str, Any] = dict(zip(group, keys, strict=True))  # pyright: ignore[reportArgumentType, reportCallIssue]
        name = " ".join(str(key) for key in key_of.values())
        _check_distinct(f"steps of {name}", block[step].tolist())
        block = block.sort_values(step)
        for column in scores:
            point = _point_from_scores(block[step], block[column], name, strategy, threshold)
            points.append(point)
            rows.append(_row(point, size=key_of[size] if size else None, seed=key_of[seed] if seed else None))
    return _emergence_table(points, rows, strategy, threshold)


def _search(evaluations: SeriesEvaluations, task: int, strategy: Strategy, threshold: float) -> Found:
    series = evaluations.series

    def passes(place: int) -> bool | None:
        measured = evaluations.at(series.steps[place])
        return None if measured is None else measured[task]["share_matched"] >= threshold

    return search(strategy, len(series.steps), passes)


def _points(evaluations: SeriesEvaluations, strategy: Strategy, threshold: float) -> list[EmergencePoint]:
    """The points of all tasks, once all that the searches ask for has been measured.

    Raises:
        CheckpointError: no checkpoint of the series can be used.
    """
    series, tasks = evaluations.series, evaluations.tasks
    found = [_search(evaluations, index, strategy, threshold) for index in range(len(tasks))]
    if all(answer is None for answer in found[0].answers.values()):
        reason = evaluations.problems()[series.steps[-1]]
        raise CheckpointError(f"none of the {len(series.steps)} checkpoints of {series.name} can be used: {reason}")
    return [
        _point(
            one,
            steps=series.steps,
            table=_with_passed(evaluations.table(index), "share_matched", threshold),
            series=series.name,
            task=name,
            threshold=threshold,
            strategy=strategy,
            problems=evaluations.problems(),
        )
        for index, (one, name) in enumerate(zip(found, _names(tasks), strict=True))
    ]


# ---- searches by workers ----


def _searched_by_workers(
    series: Sequence["CheckpointSeries"],
    tasks: Sequence[PromptTask],
    strategy: Strategy,
    threshold: float,
    batch_size: int,
    *,
    executor: Executor | None,
    workers: int | None,
    progress: bool,
) -> list[SeriesEvaluations]:
    """Evaluations of each series, all that the searches will ask for.

    Raises:
        Exception: the first error of a job, after all jobs have ended.
    """
    check_series_travel(executor, series, {f"the task {task.name}": task for task in tasks})
    jobs: list[Job] = []
    evaluations: dict[Job, SeriesEvaluations] = {}
    found = [SeriesEvaluations(one, tasks, batch_size) for one in series]
    for one, of_one in zip(series, found, strict=True):
        if strategy == "scan":
            size = piece_size(len(one.steps) * len(series), 0 if executor else workers, _MOST_IN_PIECE)
            pieces = [one.steps[start : start + size] for start in range(0, len(one.steps), size)]
            new = [Job(one.name, _measure, (one, tasks, batch_size, piece), size=len(piece)) for piece in pieces]
        else:
            new = [Job(one.name, _measure_by_searching, (one, tasks, batch_size, strategy, threshold))]
        jobs += new
        evaluations |= dict.fromkeys(new, of_one)
    failed: list[Ended] = []
    how: dict[str, Any] = {"workers": workers, "modules": modules_of(series, tasks), "progress": progress}
    unit = "checkpoint" if strategy == "scan" else "series"
    for ended in run_jobs(jobs, executor, title="emergence", unit=unit, **how):
        if ended.error is None:
            evaluations[ended.job].take(ended.value)
        else:
            failed.append(ended)
    raise_failures(sorted(failed, key=lambda ended: jobs.index(ended.job)), len(jobs))
    return found


def _measure(
    series: "CheckpointSeries", tasks: Sequence[PromptTask], batch_size: int, steps: Sequence[int]
) -> Measured:
    """The job of some checkpoints."""
    evaluations = SeriesEvaluations(series.in_worker(), tasks, batch_size)
    for step in steps:
        evaluations.at(step)
    return evaluations.measured


def _measure_by_searching(
    series: "CheckpointSeries", tasks: Sequence[PromptTask], batch_size: int, strategy: Strategy, threshold: float
) -> Measured:
    """The job of a whole series: what the searches of all tasks ask for."""
    evaluations = SeriesEvaluations(series.in_worker(), tasks, batch_size)
    for index in range(len(tasks)):
        _search(evaluations, index, strategy, threshold)
    return evaluations.measured


def _point_from_scores(
    steps: pd.Series, scores: pd.Series, name: str, strategy: Strategy, threshold: float
) -> EmergencePoint:
    values = scores.to_numpy(dtype=float)
    found = search(strategy, len(values), lambda place: bool(values[place] >= threshold))
    asked = sorted(found.answers)
    table = pd.DataFrame({"step": steps.to_numpy()[asked].astype(int), "score": values[asked]})
    return _point(
        found,
        steps=tuple(int(step) for step in steps),
        table=_with_passed(table, "score", threshold),
        series=name,
        task=str(scores.name),
        threshold=threshold,
        strategy=strategy,
        problems={},
    )


def _with_passed(table: pd.DataFrame, column: str, threshold: float) -> pd.DataFrame:
    return table.assign(passed=table[column] >= threshold)


def _point(
    found: Found,
    *,
    steps: Sequence[int],
    table: pd.DataFrame,
    series: str,
    task: str,
    threshold: float,
    strategy: Strategy,
    problems: Mapping[int, str],
) -> EmergencePoint:
    passed = {int(step): bool(answer) for step, answer in zip(table["step"], table["passed"], strict=True)}
    pre, post = (None if place is None else steps[place] for place in (found.crossing.pre, found.crossing.post))
    first = min((step for step, answer in passed.items() if answer), default=None)
    persistent_crossing = persistent_place(passed)
    status: Status = "never" if post is None else "from the start" if pre is None else "emerged"
    persistent = None if status == "never" else first == persistent_crossing
    if persistent and strategy == "bisect" and len(found.answers) < len(steps):
        persistent = None  # bisection takes it for granted
    said = {
        "series": series,
        "task": task,
        "status": status,
        "pre": pre,
        "post": post,
        "first_crossing": first,
        "persistent_crossing": persistent_crossing,
        "persistent": persistent,
        "missed_by_bisect": found.missed_by_bisect,
        "threshold": threshold,
        "strategy": strategy,
        "n_checkpoints": len(steps),
        "caveats": (*_caveats(found, steps, strategy, first), *_grave(table, (pre, post))),
        "problems": dict(problems),
    }
    known = marks_in([(series, table)])
    return EmergencePoint(table, **said, about={"analysis": "emergence", **said, "known_issues": known})


def _caveats(found: Found, steps: Sequence[int], strategy: Strategy, first_crossing: int | None) -> Iterable[str]:
    pre, post = found.crossing.pre, found.crossing.post
    if unasked := len(steps) - len(found.answers):
        said = f"{unasked} of {len(steps)} checkpoints were not evaluated"
        if strategy == "verify":
            yield f"{said}: a crossing or a loss that comes and goes between two that were would be missed"
        elif post is None:
            yield f"bisect stops where the last checkpoint fails: {said}, a crossing lost again would be missed"
        else:
            yield f"bisect assumes one rise: {said}, an earlier crossing or a later loss would be missed"
    if first_crossing is not None and (post is None or first_crossing < steps[post]):
        yield f"step {first_crossing}, evaluated for another task, passes earlier: strategy {strategy} did not look"
    unusable = [place for place, answer in sorted(found.answers.items()) if answer is None]
    if post is not None and (around := [place for place in unusable if (-1 if pre is None else pre) < place < post]):
        yield f"no checkpoint just before step {steps[post]} could be used: {_named(around, steps)}"
    usable = [place for place, answer in found.answers.items() if answer is not None]
    if after := [place for place in unusable if place > max(usable)]:
        yield f"the last checkpoints could not be used: {_named(after, steps)}"


def _grave(table: pd.DataFrame, steps: Sequence[int | None]) -> Iterable[str]:
    for step, mark in _marks(table, steps).items():
        if is_grave(mark):
            yield f"the crossing rests on step {step}, whose published weights are not to be trusted ({mark})"


def _marks(table: pd.DataFrame, steps: Sequence[int | None]) -> dict[int, str]:
    """What is known of those of the steps that have something."""
    if "known_issue" not in table:
        return {}
    rows = table.loc[table["step"].isin([step for step in steps if step is not None]) & (table["known_issue"] != "")]
    return dict(zip(rows["step"].astype(int), rows["known_issue"], strict=True))


def _named(places: Sequence[int], steps: Sequence[int]) -> str:
    named = ", ".join(str(steps[place]) for place in places[:5])
    return f"step {named}" + (f" and {len(places) - 5} more" if len(places) > 5 else "")


def _row(point: EmergencePoint, *, size: object, seed: object) -> dict[str, object]:
    last_step = int(point.table["step"].max())
    reached = point.post if point.midpoint is None else point.midpoint
    return {
        "series": point.series,
        "size": size,
        "seed": seed,
        "task": point.task,
        "status": point.status,
        "pre": point.pre,
        "post": point.post,
        "midpoint": point.midpoint,
        "first_crossing": point.first_crossing,
        "persistent_crossing": point.persistent_crossing,
        "persistent": point.persistent,
        "steps_to_emergence": float(last_step if reached is None else reached),
        "censored": point.status == "never",
        "last_step": last_step,
        "n_evaluated": len(point.table),
        "n_problems": len(point.problems),
        "known_issue": "; ".join(dict.fromkeys(_marks(point.table, (point.pre, point.post)).values())),
    }


def _emergence_table(
    points: Sequence[EmergencePoint], rows: Sequence[Mapping[str, object]], strategy: Strategy, threshold: float
) -> EmergenceTable:
    steps = dict.fromkeys(("pre", "post", "first_crossing", "persistent_crossing"), "Int64")
    table = pd.DataFrame(rows).astype({**steps, "midpoint": "float64", "persistent": "boolean"})
    about = {
        "analysis": "emergence table",
        "strategy": strategy,
        "threshold": threshold,
        "caveats": {f"{point.task} in {point.series}": point.caveats for point in points if point.caveats},
        "problems": {point.series: point.problems for point in points if point.problems},
    }
    return EmergenceTable(table, points=tuple(points), about=about)


def _summarise(rows: pd.DataFrame) -> dict[str, float | None]:
    times, censored = rows["steps_to_emergence"].to_numpy(), rows["censored"].to_numpy()
    lasting = rows.loc[~censored, "persistent"]
    horizon = int(rows["last_step"].min())
    share = share_interval(int((~censored).sum()), len(rows))
    median = censored_median(times, censored)
    mean = restricted_mean(times, censored, horizon, seed=0)
    return {
        "n_seeds": len(rows),
        "n_solved": int((~censored).sum()),
        "share_solved": share.value,
        "share_low": share.low,
        "share_high": share.high,
        "n_persistent": None if lasting.isna().any() else int(lasting.sum()),
        "median_step": median.value,
        "median_low": median.low,
        "median_high": median.high,
        "restricted_mean_step": mean.value,
        "restricted_mean_low": mean.low,
        "restricted_mean_high": mean.high,
        "restricted_to_step": horizon,
    }


def _names(tasks: Sequence[PromptTask]) -> list[str]:
    """Names of the tasks; those that share one are told apart by their arguments."""
    names = [task.name for task in tasks]
    return [name if names.count(name) == 1 else repr(task) for name, task in zip(names, tasks, strict=True)]


def _check_search(tasks: Sequence[PromptTask], strategy: str, threshold: float) -> None:
    _check_strategy(strategy)
    if not 0 < threshold <= 1:
        raise ArgumentError(f"threshold is {threshold}: it is a share of prompts, above 0 and up to 1")
    if not tasks:
        raise ArgumentError("no task given: give a task, or a list with at least one")


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise ArgumentError(f"unknown strategy {strategy!r}: {nearest(strategy, STRATEGIES)}")


def _check_distinct(what: str, names: Sequence[Hashable]) -> None:
    twice = sorted({str(name) for name in names if list(names).count(name) > 1})
    if twice:
        raise ArgumentError(f"{what} given twice: {', '.join(twice[:5])}; give each once")


def _check_scores(
    df: pd.DataFrame,
    group: Sequence[str],
    step: str,
    scores: Sequence[str],
    roles: Mapping[str, str | None],
    threshold: float,
) -> None:
    if missing := [name for name in [*group, step, *scores] if name not in df.columns]:
        raise ArgumentError(f"the table has no column {missing}; it has {list(map(str, df.columns))}")
    if not group or not scores:
        raise ArgumentError("give at least one group column and one score column")
    _check_distinct("score columns", scores)
    for role, name in roles.items():
        if name is not None and name not in group:
            raise ArgumentError(f"{role}={name!r} is none of the group columns {list(group)}; add it to group")
    if df.empty:
        raise ArgumentError("the table of scores has no rows")
    if not np.isfinite(threshold):
        raise ArgumentError(f"threshold is {threshold}: it must be a finite number")
    for name in [step, *scores]:
        values = np.asarray(pd.to_numeric(df[name], errors="coerce"), dtype=float)
        whole = name != step or np.equal(values, np.round(values))
        if not (good := np.isfinite(values) & whole).all():
            row = df.iloc[int(np.nonzero(~good)[0][0])]
            wanted = "whole numbers" if name == step else "finite numbers"
            where = ", ".join(f"{column} {row[column]}" for column in [*group, step])
            raise ArgumentError(f"column {name!r} must hold {wanted}: it holds {row[name]!r} at {where}")
