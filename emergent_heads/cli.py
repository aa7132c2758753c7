"""The command line: the same functions as in Python, under the same names.

Each subcommand is a frozen dataclass: its fields are the options, its docstring is the help, and `run` does the work.
To add one, write the class and name it in `COMMANDS`. Heavy imports stay inside functions, so that `--help` answers
at once. Tables go to stdout, progress and messages to stderr.

Exit status: 0 done, 2 wrong arguments or input, 130 interrupted, 1 anything else.
"""

import io
import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, fields, replace
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import tyro

from emergent_heads.errors import ArgumentError, EmergentHeadsError, KnownIssueWarning, WaitingWarning

if TYPE_CHECKING:
    import pandas as pd

    from emergent_heads.checkpoints.series import CheckpointSeries
    from emergent_heads.models.small import SmallModelConfig
    from emergent_heads.results import Result
    from emergent_heads.tasks.task import PromptTask, SequenceTask
    from emergent_heads.training.run import Run

PROGRAM = "emergent-heads"
SUMMARY = (
    "When did a capability emerge in training, which attention heads made it emerge, and what was learned before the "
    "loss moved?"
)

TaskName = Literal["string_repetition", "in_context_repetition", "pattern_completion", "indirect_object"]
Strategy = Literal["bisect", "scan", "verify"]
TrainingTaskName = Literal[
    "linear_map",
    "cellular_automaton",
    "addition",
    "multiplication",
    "majority_of_majorities",
    "breadth_first_search",
    "depth_first_search",
    "shortest_path",
    "topological_sort",
    "minimum_spanning_tree",
    "maximum_subarray",
    "activity_selection",
    "dyck",
    "shuffle_dyck",
    "neural_cellular_automata",
    "text_corpus",
    "repeated_text",
    "shuffled_tokens",
]


def _unset(metavar: str) -> Any:
    """An option that may be left out, without "(default: None)" in the help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Name = Annotated[str | None, _unset("NAME")]
Number = Annotated[int | None, _unset("N")]
Share = Annotated[float | None, _unset("X")]
Folder = Annotated[Path | None, _unset("PATH")]
TableFile = Annotated[Path | None, _unset("FILE")]
FigureFile = Annotated[Path | None, _unset("FILE")]
Together = Annotated[int, tyro.conf.arg(metavar="N")]


_OVER_SEEDS = [
    "size", "task", "n_seeds", "n_solved", "share_low", "share_high", "median_step", "median_low", "median_high",
    "restricted_mean_step", "restricted_to_step",
]  # fmt: skip


class WorkFailedError(EmergentHeadsError):
    """Some of the work could not be done; what was done is kept."""

    exit_status = 1


class Command(Protocol):
    def run(self, line: str) -> None:
        """Does the work; `line` is the command line, for the side file of what is written."""
        ...


@dataclass(frozen=True)
class Source:
    """Give exactly one of --suite, --hub, --directory and --run."""

    suite: Name = None
    """published run, such as pythia-160m; "emergent-heads suites" lists them"""
    seed: Number = None
    """seed of the suite's run (its first if left out)"""
    hub: Annotated[str | None, _unset("REPO")] = None
    """Hugging Face repository whose revisions, or files *.pth, carry the step"""
    pattern: Annotated[str | None, _unset("P")] = None
    """name of the repository's revisions, or path of its files ("step{step}" if left out)"""
    directory: Folder = None
    """folder with step*/ or checkpoint-*/ folders of saved models"""
    run: Folder = None
    """folder of a run of this library"""
    device: Annotated[str, tyro.conf.arg(metavar="NAME")] = "cpu"
    """where the models go, such as cuda"""
    cache: Literal["keep", "evict"] = "keep"
    """what becomes of fetched checkpoints after use"""
    disk_budget_gb: Annotated[float | None, _unset("GB")] = None
    """most disk that fetched checkpoints may take"""
    allow_known_bad: bool = True
    """use published weights that are known to be wrong, with a warning; or pass over them"""

    def series(self, *, used_here: bool = True) -> "CheckpointSeries":
        """The checkpoints; nothing is loaded yet.

        Args:
            used_here: whether this machine will use them, and must have the device.

        Raises:
            ArgumentError: not exactly one source, or an option that does not go with it.
        """
        from emergent_heads.checkpoints.series import CheckpointSeries
        from emergent_heads.checkpoints.suites import suite

        _exactly_one({"--suite": self.suite, "--hub": self.hub, "--directory": self.directory, "--run": self.run})
        _goes_with("--seed", self.seed, "--suite", self.suite)
        _goes_with("--pattern", self.pattern, "--hub", self.hub)
        if used_here:
            _check_device(self.device)
        fetching: dict[str, Any] = {
            "cache": self.cache,
            "disk_budget_gb": self.disk_budget_gb,
            "device": self.device,
            "allow_known_bad": self.allow_known_bad,
        }
        if self.suite is not None:
            return suite(self.suite, self.seed, **fetching)
        if self.hub is not None:
            return CheckpointSeries.from_hub(self.hub, self.pattern or "step{step}", **fetching)
        if self.directory is not None:
            return CheckpointSeries.from_directory(self.directory, device=self.device)
        assert self.run is not None
        return CheckpointSeries.from_run(self.run, device=self.device)


@dataclass(frozen=True)
class Tasks:
    """The capability: --task or --prompts, each of them as often as you like where several make sense."""

    task: tyro.conf.UseAppendAction[tuple[TaskName, ...]] = ()
    """generated prompts"""
    prompts: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")] = ()
    """your own prompts: .csv, .tsv, .json, .jsonl or .parquet with the columns prompt and target"""
    n_prompts: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """generated prompts per task"""
    task_seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """seed of the generated prompts"""
    vocabulary: Number = None
    """in_context_repetition on random token ids 0 to N-1 in place of words"""

    def all(self) -> "list[PromptTask]":
        """The tasks in the order: generated, then the user's own.

        Raises:
            ArgumentError: none given. PromptError: a prompt table that cannot be used.
        """
        from emergent_heads import tasks

        if not self.task and not self.prompts:
            raise ArgumentError("which capability? give --task NAME or --prompts FILE")
        _goes_with(
            "--vocabulary", self.vocabulary, "--task in_context_repetition", "in_context_repetition" in self.task
        )
        makers: dict[TaskName, Any] = {
            "string_repetition": tasks.string_repetition,
            "in_context_repetition": tasks.in_context_repetition,
            "pattern_completion": tasks.pattern_completion,
            "indirect_object": tasks.indirect_object,
        }
        options: dict[TaskName, Any] = {"in_context_repetition": {"vocabulary": self.vocabulary}}
        made = [makers[name](self.n_prompts, seed=self.task_seed, **options.get(name, {})) for name in self.task]
        return made + [tasks.from_table(path) for path in self.prompts]


@dataclass(frozen=True)
class Workers:
    """Who does the work; the same line again, anywhere, does only what is missing"""

    executor: Literal["local", "ray", "slurm"] = "local"
    """processes of this machine, tasks of Ray (a running cluster, or one of this machine), or jobs of Slurm"""
    workers: Number = None
    """local: processes (one for each core if left out; 0: none, all is done in this one); ray: cores of a cluster that
    is started here; slurm: most jobs at a time"""
    executor_option: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUE", help_behavior_hint="")
    ] = ()
    """as in emergent_heads.executors: gpus=2 (local), address=auto or gpus_per_job=0.5 (ray), timeout_min=60,
    gpus_per_node=1 or slurm_partition=gpu (slurm); as often as you like"""

    @contextmanager
    def open(self, folder: Path) -> "Iterator[dict[str, Any]]":
        """The arguments `executor` and `workers` of what is called; `folder` is for the logs of Slurm's jobs.

        Raises:
            ArgumentError: options that do not go together, or no such executor here.
        """
        if self.executor == "local" and not self.executor_option:
            yield {"executor": None, "workers": self.workers}
            return
        if self.workers is not None and self.workers < 1:
            raise ArgumentError(f"--workers is {self.workers}; with {self._told()} give at least 1, or leave it out")
        from emergent_heads.executors import open_executor

        options = dict(_pair(each, "--executor-option") for each in self.executor_option)
        with open_executor(self.executor, self.workers, folder=folder / "slurm", **options) as executor:
            yield {"executor": executor, "workers": None}

    def check_device(self, device: str) -> None:
        """Checks that there is such a device, where the work is done on this machine.

        Raises:
            ArgumentError: there is none.
        """
        if self.executor == "local":
            _check_device(device)

    def _told(self) -> str:
        return f"--executor {self.executor}" if self.executor != "local" else "--executor-option"


@dataclass(frozen=True)
class Helpers(Workers):
    """Who does the work, this process if you do not say; the same line again, anywhere, does only what is missing"""

    workers: Number = None
    """local: processes (if left out, none: all is done in this one); ray: cores of a cluster that is started here;
    slurm: most jobs at a time"""

    @contextmanager
    def open(self, folder: Path) -> "Iterator[dict[str, Any]]":
        if self == type(self)():
            yield {"executor": None, "workers": 0}
            return
        with super().open(folder) as who:
            yield who


@dataclass(frozen=True)
class Suites:
    """Lists the published suites of checkpoints.

    Example: emergent-heads suites
    """

    out: TableFile = None
    """also write the table: .csv, .parquet or .json"""

    def run(self, line: str) -> None:
        from emergent_heads.checkpoints.suites import suites
        from emergent_heads.storage import check_writable, save_table

        if self.out:
            check_writable(self.out)
        table = suites()
        print(_suites_shown(table))
        if self.out:
            _say(f"wrote {save_table(table, self.out, {'command_line': line})}")


@dataclass(frozen=True)
class Verify:
    """Are the checkpoints what their names say? Compares file hashes, without fetching weights, and known issues.

    Example: emergent-heads verify --suite pythia-2.8b --out verified.csv
    """

    source: Source = field(default_factory=Source)
    steps: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N", help_behavior_hint="")] = ()
    """which checkpoints (all if left out)"""
    weights: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """also read the weights, one checkpoint after the other; those on the disk are always read"""
    out: TableFile = None
    """write the table: .csv, .parquet or .json"""
    plot: FigureFile = None
    """draw the norms of the weights: .png, .pdf or .svg"""

    def run(self, line: str) -> None:
        _check_outputs(self.out, self.plot)
        if self.plot is not None and not (self.weights or self.source.directory or self.source.run):
            raise ArgumentError("--plot needs --weights: the figure is of their norms")
        found = self.source.series().verify(self.steps or None, weights=self.weights or None)
        _print_result(found)
        _write(found, self.out, self.plot, line)


@dataclass(frozen=True)
class Emergence:
    """When did a capability emerge? Searches the checkpoints of a run, or a table of scores you already have.

    Example: emergent-heads emergence --suite pythia-160m --seed 3 --task string_repetition --out point.csv

    Example: emergent-heads emergence --suite pythia-160m --seeds 1 2 3 --task string_repetition --workers 2

    Example: emergent-heads emergence --from-table scores.csv --group model --score lambada_openai --threshold 0.2
    """

    source: Source = field(default_factory=Source)
    tasks: Tasks = field(default_factory=Tasks)
    workers: Helpers = field(default_factory=Helpers)
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N ...]", help_behavior_hint="")] = ()
    """several runs of the suite, in one table for all tasks, with a summary over them"""
    strategy: Annotated[Strategy | None, _unset("{bisect,scan,verify}")] = None
    """bisect: few checkpoints; scan: all; verify: bisect, then look around (bisect, for a table scan, if left out)"""
    threshold: Share = None
    """share of prompts matched that counts as emerged (0.5 if left out), or the score with --from-table"""
    from_table: TableFile = None
    """scores, one row per run and step"""
    group: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """column of the table that tells the runs apart (model if left out)"""
    score: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """column of the table with the scores (score if left out)"""
    step: Annotated[str | None, _unset("COLUMN")] = None
    """column of the table with the training steps (step if left out)"""
    out: TableFile = None
    """write the table: .csv, .parquet or .json; with several tasks of one run one file each, <out>.<task>.<suffix>"""
    plot: FigureFile = None
    """draw the figure: .png, .pdf or .svg; with several tasks of one run one file each"""

    def run(self, line: str) -> None:
        if self.from_table is not None:
            found = self._from_scores()
        else:
            found = self._from_seeds() if self.seeds else self._from_models()
        for one, (out, plot) in found:
            _print_result(one)
            if self.seeds:
                print("\nover the seeds:")
                _print_table(one.summary.loc[:, _OVER_SEEDS])
            _write(one, out, plot, line)

    def _from_seeds(self) -> "list[tuple[Any, tuple[Path | None, Path | None]]]":
        self._check_no_table()
        _goes_with("--seeds", self.seeds, "--suite", self.source.suite)
        if self.source.seed is not None:
            raise ArgumentError("give --seed for one run or --seeds for several, not both")
        _check_outputs(self.out, self.plot)
        tasks, here = self.tasks.all(), self.workers.executor == "local"
        series = [replace(self.source, seed=seed).series(used_here=here) for seed in self.seeds]
        from emergent_heads.analysis.emergence import emergence_table

        with self.workers.open(_folder_of(self.out)) as who:
            threshold = _given(self.threshold, 0.5)
            table = emergence_table(series, tasks, self.strategy or "bisect", threshold=threshold, **who)
        return [(table, (self.out, self.plot))]

    def _check_no_table(self) -> None:
        for option, value in {"--group": self.group, "--score": self.score, "--step": self.step}.items():
            _goes_with(option, value or None, "--from-table", None)

    def _from_models(self) -> "list[tuple[Any, tuple[Path | None, Path | None]]]":
        self._check_no_table()
        tasks = self.tasks.all()
        names = [task.name for task in tasks]
        if len(set(names)) < len(names):
            raise ArgumentError(f"a task is named twice: {', '.join(names)}")
        files = [(_file_of(self.out, name, names), _file_of(self.plot, name, names)) for name in names]
        for out, plot in files:
            _check_outputs(out, plot)
        series = self.source.series(used_here=self.workers.executor == "local")
        from emergent_heads.analysis.emergence import find_emergence  # brings torch: arguments are checked first

        with self.workers.open(_folder_of(self.out)) as who:
            threshold = _given(self.threshold, 0.5)
            points = find_emergence(series, tasks, self.strategy or "bisect", threshold=threshold, **who)
        return list(zip(points, files, strict=True))

    def _from_scores(self) -> "list[tuple[Any, tuple[Path | None, Path | None]]]":
        assert self.from_table is not None
        if self.source != Source() or self.tasks != Tasks() or self.seeds or self.workers != Helpers():
            raise ArgumentError(
                "--from-table takes its scores from the table: leave out checkpoints, tasks, seeds and workers"
            )
        if self.threshold is None:
            raise ArgumentError("--from-table needs --threshold: which score counts as emerged?")
        _check_outputs(self.out, self.plot)
        scores = _read(self.from_table)
        from emergent_heads.analysis.emergence import emergence_from_table

        table = emergence_from_table(
            scores,
            self.threshold,
            self.group or ("model",),
            step=self.step or "step",
            score=self.score or "score",
            strategy=self.strategy or "scan",
        )
        return [(table, (self.out, self.plot))]


@dataclass(frozen=True)
class Rank:
    """Which attention heads made it emerge? Puts the later checkpoint's patterns into the earlier one, head by head.

    Without --pre and --post the point of emergence is searched first.

    Example: emergent-heads rank --suite pythia-160m --seed 3 --task string_repetition --out heads.csv --plot heads.png
    """

    source: Source = field(default_factory=Source)
    tasks: Tasks = field(default_factory=Tasks)
    pre: Number = None
    """step before emergence"""
    post: Number = None
    """step at emergence"""
    strategy: Strategy = "bisect"
    """how to search where --pre and --post are left out"""
    threshold: Annotated[float, tyro.conf.arg(metavar="X")] = 0.5
    """share of prompts matched that counts as emerged, for the search"""
    method: Literal["exact", "screen"] = "exact"
    """screen: a gradient estimate of all heads, exact values for the best and for a sample of the rest"""
    rows: Literal["all", "last"] = "all"
    """replace whole patterns, or only the row of the answer's position"""
    prompts_used: Literal["all", "flipped"] = "all"
    """flipped: prompts that are wrong before and right after"""
    top: Annotated[int, tyro.conf.arg(metavar="K")] = 16
    """heads to print"""
    out: TableFile = None
    """write the ranking of all heads: .csv, .parquet or .json"""
    plot: FigureFile = None
    """draw the map of delta_p: .png, .pdf or .svg"""
    recovery: TableFile = None
    """also patch the top heads together, against random heads, and write what they recover"""
    controls: Annotated[int, tyro.conf.arg(metavar="N")] = 100
    """random sets of heads for --recovery"""
    workers: Helpers = field(default_factory=Helpers)
    batch_size: Number = None
    """most sequences run together (fitted to the memory if left out)"""

    def run(self, line: str) -> None:
        if self.top < 1:
            raise ArgumentError(f"--top is {self.top}: print at least one head")
        if self.controls < 0:
            raise ArgumentError(f"--controls is {self.controls}: give 0 or more random sets")
        if self.recovery is not None and self.out == self.recovery:
            raise ArgumentError(f"--out and --recovery are both {self.out}; name two files")
        if self.recovery is None and self.workers != Helpers():
            raise ArgumentError("--workers and --executor are for the random heads of --recovery, which is not given")
        _check_outputs(self.out, self.plot)
        _check_outputs(self.recovery, None)
        tasks = self.tasks.all()
        if len(tasks) != 1:
            raise ArgumentError(f"rank takes one task, not {len(tasks)}: {', '.join(task.name for task in tasks)}")
        series = self.source.series()
        pre, post = self._steps(series, tasks[0])
        from emergent_heads.analysis.heads import rank_heads

        ranking = rank_heads(
            series[pre],
            series[post],
            tasks[0],
            method=self.method,
            rows=self.rows,
            prompts=self.prompts_used,
            batch_size=self.batch_size,
        )
        print(ranking.headline())
        _print_table(ranking.shown().head(self.top))
        _write(ranking, self.out, self.plot, line)
        if self.recovery is not None:
            self._recover(series, pre, post, tasks[0], ranking, line)

    def _steps(self, series: "CheckpointSeries", task: "PromptTask") -> tuple[int, int]:
        if self.pre is not None and self.post is not None:
            return series[self.pre].step, series[self.post].step
        if self.pre is not None or self.post is not None:
            raise ArgumentError("give both --pre and --post, or neither to search for them")
        from emergent_heads.analysis.emergence import find_emergence

        point = find_emergence(series, task, self.strategy, threshold=self.threshold)
        _print_result(point)
        print()
        return point.require()

    def _recover(
        self, series: "CheckpointSeries", pre: int, post: int, task: "PromptTask", ranking: Any, line: str
    ) -> None:
        from emergent_heads.analysis.recovery import recovery_curve

        how: dict[str, Any] = {"controls": self.controls, "batch_size": self.batch_size}
        with self.workers.open(_folder_of(self.recovery)) as who:
            curve = recovery_curve(series[pre], series[post], task, ranking, **how, **who)
        print()
        _print_result(curve)
        _write(curve, self.recovery, None, line)


@dataclass(frozen=True)
class TrainingTask:
    """What the model is trained on; what is left out has the task's own value."""

    task: TrainingTaskName
    """tasks whose right attention pattern or whose features are known, text, and sequences to learn from before it"""
    state_size: Number = None
    """linear_map, cellular_automaton: tokens in a state"""
    states: Number = None
    """linear_map, cellular_automaton: states in a sequence"""
    symbols: Number = None
    """linear_map, cellular_automaton: values of a token"""
    sparsity: Number = None
    """linear_map: tokens that each sum is of"""
    rules: Number = None
    """cellular_automaton, neural_cellular_automata: number of rules"""
    radius: Number = None
    """cellular_automaton: neighbours on either side that a rule looks at"""
    iterations: Number = None
    """cellular_automaton: how often the rule is applied from one state to the next"""
    boundary: Annotated[Literal["periodic", "fixed"] | None, _unset("{periodic,fixed}")] = None
    """cellular_automaton: what lies beyond the ends of a state"""
    bits: Number = None
    """addition, multiplication: of each number; majority_of_majorities: of the input"""
    groups: Number = None
    """majority_of_majorities: groups that vote"""
    nodes: Number = None
    """of a graph"""
    density: Share = None
    """share of the pairs of nodes that have an edge"""
    weighted: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """minimum_spanning_tree: edges have weights"""
    values: Number = None
    """maximum_subarray: numbers in the array"""
    activities: Number = None
    """activity_selection: activities to choose from"""
    layout: Annotated[Literal["prompt", "paper"] | None, _unset("{prompt,paper}")] = None
    """algorithms: whether the = belongs to the prompt, or is to be predicted as in the paper"""
    brackets: Number = None
    """dyck, shuffle_dyck: types of brackets"""
    max_depth: Number = None
    """dyck, shuffle_dyck: most brackets open at a time"""
    p_open: Share = None
    """dyck, shuffle_dyck: probability that a bracket opens, where one may open or close"""
    balanced: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """dyck, shuffle_dyck: all brackets are closed at the end"""
    length: Number = None
    """dyck, shuffle_dyck, neural_cellular_automata: tokens of a sequence"""
    grid: Number = None
    """neural_cellular_automata: cells along an edge of the grid"""
    colours: Number = None
    """neural_cellular_automata: states of a cell"""
    patch: Number = None
    """neural_cellular_automata: cells along an edge of the patch that a token stands for"""
    burn_in: Number = None
    """neural_cellular_automata: steps before the first grid that is shown"""
    complexity: Annotated[tuple[float, float] | None, _unset("LOW HIGH")] = None
    """neural_cellular_automata: least and greatest compressed size of a rule's trajectory, as a share of its own"""
    token_bytes: Number = None
    """neural_cellular_automata: bytes of a token before it is compressed"""
    paths: Annotated[tuple[str, ...] | None, _unset("FILE [FILE ...]")] = None
    """text: files of UTF-8 text, or patterns in quotes; or stdlib, the Python standard library (if left out)"""
    vocabulary_size: Number = None
    """text: tokens of the byte-pair encoding"""
    context: Number = None
    """text: tokens of a sequence"""
    held_out_share: Share = None
    """text: share of it that is held out"""
    separator: Annotated[str | None, _unset("TEXT")] = None
    """text: what parts the documents of a file (a file is one if left out)"""
    repeated_share: Share = None
    """repeated_text: share of the rows that are one passage said over and over; the others are plain text"""
    passage: Annotated[tuple[int, int] | None, _unset("SHORTEST LONGEST")] = None
    """repeated_text: tokens of a passage"""
    task_seed: Number = None
    """linear_map, cellular_automaton, neural_cellular_automata: seed of the matrix, or of the rules (0 if left out)"""

    def make(self) -> "SequenceTask":
        """The task.

        Raises:
            ArgumentError: an option of another task, or one that makes no sense.
        """
        from emergent_heads import tasks

        around: dict[str, Any] = {"repeated_text": tasks.repeated_text, "shuffled_tokens": tasks.ShuffledTokens}
        made_of_text = around.get(self.task)
        task = tasks.TextCorpus if made_of_text else getattr(tasks, self.task.title().replace("_", ""))
        known = {each.name for each in fields(task)}
        renamed = {"task_seed": "seed", "repeated_share": "share"}
        given = {name: value for name, value in _told(self).items() if name != "task" and value is not False}
        if self.paths is not None and len(self.paths) == 1:
            given["paths"] = self.paths[0]
        of_repetition = ("repeated_share", "passage") if self.task == "repeated_text" else ()
        more = {renamed.get(name, name): given.pop(name) for name in of_repetition if name in given}
        for name in given:
            if renamed.get(name, name) not in known:
                raise ArgumentError(f"{_option(name)} is no option of the task {self.task}")
        made = task(**{renamed.get(name, name): value for name, value in given.items()})
        return made_of_text(made, **more) if made_of_text else made


@dataclass(frozen=True)
class Model:
    """Its shape; what is left out has the value of `SmallModelConfig`."""

    n_layers: Annotated[int, tyro.conf.arg(metavar="N")]
    """blocks"""
    d_model: Annotated[int, tyro.conf.arg(metavar="N")]
    """width of the residual stream"""
    n_heads: Number = None
    """heads of each layer"""
    d_head: Number = None
    """width of a head (d_model / n_heads if left out)"""
    d_mlp: Number = None
    """hidden units of each MLP"""
    mixer: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ("attention",)
    """token mixer of all layers, or one for each: attention, mlp_mixer, mamba, ..."""
    mixer_option: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE", help_behavior_hint="")] = ()
    """options of the mixer, such as hidden_units=8"""
    norm: Annotated[Literal["layer", "rms"] | None, _unset("{layer,rms}")] = None
    """kind of norm"""
    positions: Annotated[Literal["learned", "rotary", "none"] | None, _unset("{learned,rotary,none}")] = None
    """kind of positions"""
    mlp: Annotated[Literal["gelu", "swiglu", "none"] | None, _unset("{gelu,swiglu,none}")] = None
    """kind of MLP"""
    biases: bool = True
    """whether linear maps and norms have biases"""
    initialisation: Annotated[Literal["pytorch", "gpt2"] | None, _unset("{pytorch,gpt2}")] = None
    """how weights are drawn"""
    embedding_std: Share = None
    """standard deviation of the embeddings"""
    transformer_pp: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """the Llama-style block of the quiet-features paper: rms norm, rotary positions, SwiGLU, no biases"""
    gpt_neox: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """a GPT-NeoX: rotary positions, no bias on the unembedding"""

    def make(self) -> "SmallModelConfig":
        """The configuration.

        Raises:
            ArgumentError: a setting that is unknown or makes no sense.
        """
        from emergent_heads.models.small import SmallModelConfig

        values = _told(self)
        options = dict(map(_pair, values.pop("mixer_option")))
        values |= {"mixer": self.mixer[0] if len(self.mixer) == 1 else self.mixer, "mixer_options": options}
        transformer_pp, gpt_neox = values.pop("transformer_pp"), values.pop("gpt_neox")
        if transformer_pp and gpt_neox:
            raise ArgumentError("--transformer-pp and --gpt-neox are two kinds of model; give one")
        if transformer_pp and values["biases"]:
            del values["biases"]  # its own default
        make = SmallModelConfig.transformer_pp if transformer_pp else SmallModelConfig
        return (SmallModelConfig.gpt_neox if gpt_neox else make)(**values)


@dataclass(frozen=True)
class Training:
    """How it is trained; what is left out has the value of `TrainingSettings`."""

    steps: Annotated[int, tyro.conf.arg(metavar="N")]
    """optimiser steps"""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """seed of weights and sequences"""
    learning_rate: Share = None
    """of AdamW"""
    weight_decay: Share = None
    """of AdamW, on matrices"""
    warmup_steps: Number = None
    """steps in which the learning rate rises"""
    schedule: Annotated[Literal["constant", "cosine"] | None, _unset("{constant,cosine}")] = None
    """of the learning rate"""
    clip: Share = None
    """largest norm of the gradient"""
    tokens_per_batch: Number = None
    """tokens in a batch"""
    checkpoints: Annotated[tuple[int, ...] | None, _unset("STEP [STEP ...]")] = None
    """steps to keep (0, 1, 2, 4, ..., 512, 1000, 2000, ... if left out)"""
    evaluate_every: Number = None
    """steps between evaluations"""
    attention_bias: Share = None
    """strength at which the right attention pattern is added to the attention scores"""
    bias_from_step: Number = None
    """step from which the bias is there"""
    bias_until_step: Number = None
    """step at which the bias has come down to zero"""
    stop_when_solved: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """end as soon as the task is solved"""
    solved_at: Share = None
    """share of the way from plateau to floor at which the task is solved"""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, _unset("{float32,bfloat16}")] = None
    """bfloat16: automatic mixed precision"""
    device: Annotated[str, tyro.conf.arg(metavar="NAME")] = "cpu"
    """where to train, such as cuda"""

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of `emergent_heads.train`.

        Raises:
            ArgumentError: an option that does not go with the others.
        """
        from emergent_heads.models.attention_bias import AttentionBias

        values = _told(self)
        when = {"from_step": values.pop("bias_from_step", None), "anneal_until": values.pop("bias_until_step", None)}
        for name, value in zip(("--bias-from-step", "--bias-until-step"), when.values(), strict=True):
            _goes_with(name, value, "--attention-bias", self.attention_bias)
        if self.attention_bias is not None:
            given = {name: value for name, value in when.items() if value is not None}
            values["attention_bias"] = AttentionBias(self.attention_bias, **given)
        return values


@dataclass(frozen=True)
class Start:
    """Where its weights come from, if not drawn."""

    init_from: Folder = None
    """folder of a finished run of this library, to start from its last weights"""
    init_step: Number = None
    """checkpoint of that run to start from (the last if left out)"""
    carry: Annotated[Literal["all", "all but embeddings"] | None, _unset("{all,'all but embeddings'}")] = None
    """which weights to take (all if left out); the others are drawn from the seed"""

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of `emergent_heads.train`.

        Raises:
            ArgumentError: an option without --init-from. NoCheckpointsError, UnknownStepError: no such run or step.
        """
        _goes_with("--init-step", self.init_step, "--init-from", self.init_from)
        _goes_with("--carry", self.carry, "--init-from", self.init_from)
        if self.init_from is None:
            return {}
        start: Any = self.init_from
        if self.init_step is not None:
            from emergent_heads.training.run import Run

            start = Run.open(self.init_from).series[self.init_step]
        return {"init_from": start, "carry": self.carry or "all"}


@dataclass(frozen=True)
class Train:
    """Trains a small model, with every hook in place: on a task whose right attention pattern or features are known,
    on text, or on sequences to learn from before text.

    A finished run is read again, and one that was interrupted goes on.

    Example: emergent-heads train --task linear_map --n-layers 1 --d-model 128 --steps 500 --out runs/linear-map

    Example: emergent-heads train --task repeated_text --gpt-neox --n-layers 2 --d-model 64 --steps 600 --out runs/text
    """

    task: TrainingTask
    model: Model
    training: Training
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """folder of the run"""
    start: Start = field(default_factory=Start)
    plot: FigureFile = None
    """draw loss and accuracy over the steps: .png, .pdf or .svg"""
    export: Annotated[Path | None, _unset("DIR")] = None
    """also write the checkpoints as Hugging Face folders step0/, step1/, ... (for --gpt-neox and --transformer-pp)"""

    def run(self, line: str) -> None:
        _check_outputs(None, self.plot)
        _check_device(self.training.device)
        config, task, settings = self.model.make(), self.task.make(), self.training.settings()
        if self.export is not None:
            self._check_export(config, settings)
        from emergent_heads.training.loop import train

        run = train(config, task, self.out, **settings, **self.start.settings())
        print(run)
        _print_table(run.metrics.iloc[-1:])
        if self.export is not None:
            _say(f"wrote {run.export_huggingface(self.export)}")
        if self.plot is not None:
            from emergent_heads.plots.figure import save_figure

            _say(f"wrote {save_figure(run.plot(), self.plot)}")
        if run.status == "diverged":
            raise WorkFailedError(f"{run!r}; its checkpoints before that are in {self.out}")

    def _check_export(self, config: "SmallModelConfig", settings: dict[str, Any]) -> None:
        """What cannot be exported is refused before it is trained."""
        from emergent_heads.training.export import check_export
        from emergent_heads.training.settings import TrainingSettings

        training = TrainingSettings(
            **{name: value for name, value in settings.items() if name not in ("seed", "device")}
        )
        assert self.export is not None
        check_export(config, training, training.checkpoint_steps(), self.export)


@dataclass(frozen=True)
class TrainedRuns:
    """Runs that the library trained on one algorithmic task; several are seeds."""

    run: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="DIR")] = ()
    """folder of a run; give it again for every seed"""

    def open(self) -> "list[Run]":
        """The runs.

        Raises:
            ArgumentError: none, two of one name, or runs of different tasks. NoCheckpointsError: not the library's.
        """
        from emergent_heads.training.run import Run

        if not self.run:
            raise ArgumentError("which run? give --run DIR")
        runs = [Run.open(path) for path in self.run]
        names = [run.name for run in runs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ArgumentError(f"two runs are named {twice[0]}; rename the folder of one")
        if other := [run for run in runs if run.task_settings != runs[0].task_settings]:
            raise ArgumentError(f"{runs[0].name} and {other[0].name} were trained on different tasks")
        return runs


@dataclass(frozen=True)
class Probe:
    """Since when can a feature be read from the residual stream, and was that before the loss moved? Probes the
    checkpoints of a run at every layer and place, and tells quiet from loud features. A verdict takes three seeds.

    The same line again probes only what is missing.

    Example: emergent-heads probe --run runs/add --feature carry --out probes/add --plot quiet.png
    """

    runs: TrainedRuns = field(default_factory=TrainedRuns)
    feature: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """feature to probe for (all of the task if left out)"""
    steps: Annotated[tuple[int, ...] | None, _unset("STEP [STEP ...]")] = None
    """checkpoints to probe (all if left out)"""
    n_train: Annotated[int, tyro.conf.arg(metavar="N")] = 10_000
    """training rows of each probe"""
    n_test: Annotated[int, tyro.conf.arg(metavar="N")] = 1000
    """test rows, and as many to choose penalty and layer by"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("probes")
    """folder for the probes of each run, and features.csv (a row per feature)"""
    workers: Helpers = field(default_factory=Helpers)
    plot: FigureFile = None
    """draw task loss and probe losses over the steps: .png, .pdf or .svg"""

    def run(self, line: str) -> None:
        _check_outputs(self.out / "features.csv", self.plot)
        runs = self.runs.open()
        from emergent_heads.analysis.probes import probe_series
        from emergent_heads.analysis.quiet import classify_features

        with self.workers.open(self.out) as who:
            probes = [
                probe_series(
                    run.series,
                    run.task,
                    self.feature or None,
                    steps=self.steps,
                    n_train=self.n_train,
                    n_test=self.n_test,
                    path=self.out / run.name,
                    **who,
                )
                for run in runs
            ]
        for each in probes:
            print(each.last.headline())
            _print_table(each.last.shown())
            print()
        found = classify_features(probes, [run.metrics for run in runs], task=runs[0].task)
        _print_result(found)
        _write(found, self.out / "features.csv", self.plot, line)


@dataclass(frozen=True)
class Ablate:
    """Does the model need a feature? Takes the directions of its probes out of the residual stream of a checkpoint,
    and directions like them for comparison: random ones of the same rank, ones that remove as much variance, probes of
    shuffled labels, the other features.

    The probes are those of "emergent-heads probe".

    Example: emergent-heads ablate --run runs/add --probes probes --feature carry --how leace --at-layers 0
    """

    run_folder: Annotated[Path, tyro.conf.arg(name="run", metavar="DIR")]
    """folder of the run"""
    probes: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """folder of the run's probes: --out of the probing, or the run's folder in it"""
    feature: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """feature to take out (each of those probed, one at a time, if left out)"""
    step: Number = None
    """checkpoint (the last that was probed if left out)"""
    how: Literal["projection", "hyperplane", "mean", "leace"] = "projection"
    """remove the component, put it where the probe reads 0, put its mean there, or LEACE (arXiv 2306.03819)"""
    layers: Literal["probe", "later"] = "probe"
    """at the layer of each place's best probe, or after all later layers too"""
    at_layers: Annotated[tuple[int, ...] | None, _unset("LAYER [LAYER ...]")] = None
    """choose the best probe among these (what comes after the last block, only the unembedding reads)"""
    controls: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """draws of each random control"""
    rows: Annotated[int, tyro.conf.arg(metavar="N")] = 1000
    """sequences to measure on"""
    workers: Helpers = field(default_factory=Helpers)
    out: TableFile = None
    """write the table: .csv, .parquet or .json"""
    plot: FigureFile = None
    """draw exact match without edit, with the feature taken out, and with the controls: .png, .pdf or .svg"""

    def run(self, line: str) -> None:
        _check_outputs(self.out, self.plot)
        from emergent_heads.training.run import Run

        run = Run.open(self.run_folder)
        task, series = run.task, run.series
        from emergent_heads.analysis.ablation import ablate_features
        from emergent_heads.analysis.probes import open_probes

        inside = self.probes / run.name
        along = open_probes(inside if inside.is_dir() else self.probes)
        checkpoint = series[along.steps[-1] if self.step is None else self.step]
        probes = along[checkpoint.step]
        with self.workers.open(_folder_of(self.out)) as who:
            found = ablate_features(
                checkpoint,
                task,
                probes if self.at_layers is None else probes.at_layers(self.at_layers),
                self.controls,
                self.how,
                features=self.feature or None,
                layers=self.layers,
                n=self.rows,
                **who,
            )
        _print_result(found)
        _write(found, self.out, self.plot, line)


@dataclass(frozen=True)
class Sweep:
    """Trains the runs that a Python file defines, several at a time, and tabulates when each left its plateau, when it
    solved its task, what it had learned in the end, and what it took.

    The file defines runs, as emergent_heads.grid makes them. The same line again trains what is missing or failed.

    Example: emergent-heads sweep heads.py --out sweeps/heads --workers 2 --x n_heads

    Example: emergent-heads sweep budgets.py --out sweeps/addition --workers 2 --frontier
    """

    file: tyro.conf.Positional[Path]
    """Python file that defines the list runs"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """folder for the runs, sweep.csv (a row per run) and summary.csv (over the seeds)"""
    workers: Workers = field(default_factory=Workers)
    together: Together = 1
    """most seeds of one configuration that are trained together, in one process: for small models on a GPU"""
    device: Annotated[str, tyro.conf.arg(metavar="NAME")] = "cpu"
    """where to train, such as cuda"""
    x: Annotated[str | None, _unset("SETTING")] = None
    """also draw sweep.png, against this setting"""
    y: Annotated[str | None, _unset("MEASURE")] = None
    """what to draw (step_solved if left out)"""
    frontier: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """of runs by emergent_heads.budget_grid: also write and draw the best of each (frontier.csv, frontier.png)"""

    def run(self, line: str) -> None:
        _goes_with("--y", self.y, "--x", self.x)
        _check_outputs(self.out / "sweep.csv", None)
        from emergent_heads.storage import save_table
        from emergent_heads.sweeps import BudgetRuns, check_axes, check_frontier, load_runs, run_sweep

        runs = load_runs(self.file)
        if self.frontier:
            check_frontier(runs)
        if self.x is not None:
            check_axes(runs, self.x, self.y or "step_solved")
        self.workers.check_device(self.device)
        if isinstance(runs, BudgetRuns):
            _say(runs.headline())
        with self.workers.open(self.out) as who:
            result = run_sweep(runs, self.out, together=self.together, device=self.device, **who)
        _print_result(result)
        _write(result, self.out / "sweep.csv", None, line)
        _say(f"wrote {save_table(result.summary, self.out / 'summary.csv', {'command_line': line})}")
        if self.x is not None:
            from emergent_heads.plots.figure import save_figure

            figure = result.plot(self.x, self.y or "step_solved")
            _say(f"wrote {save_figure(figure, self.out / 'sweep.png')}")
        if self.frontier:
            self._write_frontier(result, line)
        if failures := result.failures:
            error = next(iter(failures.values()))
            raise WorkFailedError(
                f"{len(failures)} of {len(runs)} runs failed (see {self.out}/*.error.txt), the first with: {error}"
            )

    def _write_frontier(self, result: Any, line: str) -> None:
        from emergent_heads.sweeps import compute_frontier

        frontier = compute_frontier(result, device=self.device)
        print()
        _print_result(frontier)
        _write(frontier, self.out / "frontier.csv", self.out / "frontier.png", line)


@dataclass(frozen=True)
class Reproduce:
    """Reproduces a finding of the two papers (arXiv 2606.25010 and 2505.03997): trains, judges the claim by a stated
    rule, and draws. Without a name it lists the findings with their claims.

    The same line again trains only what is missing; findings in one folder share their runs.

    Example: emergent-heads reproduce sparsity --scale small --out findings --workers 2
    """

    name: Annotated[tyro.conf.Positional[str | None], _unset("NAME")] = None
    """which finding; left out, all are listed"""
    scale: Literal["small", "paper"] = "small"
    """small: sizes for two cores, in minutes; paper: the paper's sizes, for a GPU"""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("findings")
    """folder for the runs, and for a folder of tables and the figure for each finding"""
    workers: Workers = field(default_factory=Workers)
    together: Together = 1
    """most seeds of one configuration that are trained together, in one process: for small models on a GPU"""
    device: Annotated[str, tyro.conf.arg(metavar="NAME")] = "cpu"
    """where to train, such as cuda"""
    max_steps: Number = None
    """stop every run here, to try a finding out"""
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """list the findings with their claims"""

    def run(self, line: str) -> None:
        from emergent_heads.experiments.registry import EXPERIMENTS, find_experiment

        if self.list or self.name is None:
            for each in EXPERIMENTS.values():
                print(f"{each.name}\n    {each.claim}")
            return
        find_experiment(self.name)
        self.workers.check_device(self.device)
        from emergent_heads.experiments.reproduce import run_experiment

        with self.workers.open(self.out) as who:
            finding = run_experiment(
                self.name,
                self.out,
                scale=self.scale,
                together=self.together,
                device=self.device,
                max_steps=self.max_steps,
                **who,
            )
        _print_result(finding)
        _say(f"tables and figure are in {finding.figure.parent}")
        if failed := int((finding.runs["status"] == "failed").sum()):
            raise WorkFailedError(
                f"{failed} of {len(finding.runs)} runs failed and were left out (see {self.out}/runs/*.error.txt)"
            )


@dataclass(frozen=True)
class Demo:
    """The whole job on this machine, without downloads. First: trains small models, finds when they learn to repeat
    what they have read, ranks their heads, and draws what a few of them recover. Then: trains a model to add, shows
    what it had learned before its loss moved, and whether it needs it. Takes about two minutes on two cores.

    Example: emergent-heads demo --out demo-results
    """

    out: Path = Path("demo-results")
    """folder for checkpoints, tables and figures; finished trainings in it are used again"""
    seeds: int = 3
    """models to train in the first part"""
    steps: int = 550
    """training steps of these"""
    addition_steps: int = 400
    """training steps of the model that adds"""

    def run(self, line: str) -> None:
        from emergent_heads.experiments.demo import run_demo
        from emergent_heads.experiments.quiet_demo import run_quiet_demo
        from emergent_heads.experiments.small_language_model import Recipe

        for text in run_demo(self.out, seeds=self.seeds, recipe=Recipe(steps=self.steps)):
            print(text, flush=True)
        print()
        for text in run_quiet_demo(self.out / "addition", steps=self.addition_steps):
            print(text, flush=True)


COMMANDS: dict[str, type[Command]] = {
    "suites": Suites,
    "verify": Verify,
    "emergence": Emergence,
    "rank": Rank,
    "train": Train,
    "probe": Probe,
    "ablate": Ablate,
    "sweep": Sweep,
    "reproduce": Reproduce,
    "demo": Demo,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and gives its exit status.

    Raises:
        SystemExit: with status 0, after `--help`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with _plain_warnings():
            _parse(arguments).run(shlex.join([PROGRAM, *arguments]))
    except EmergentHeadsError as error:
        return _fail(str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}", 1)
    return 0


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """The library's own warnings as one line on stderr, without the place in the code that Python would name."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, KnownIssueWarning | WaitingWarning):
            return as_ever(message, category, *where, **more)
        from tqdm.auto import tqdm

        tqdm.write(f"{PROGRAM}: warning: {message}", file=sys.stderr)  # a bar may stand on the line

    with warnings.catch_warnings():
        as_ever = warnings.showwarning
        warnings.showwarning = show
        yield


def _parse(arguments: list[str]) -> Command:
    """The command that the arguments name, with its options.

    Raises:
        ArgumentError: unknown command or option, or a value that cannot be read.
        SystemExit: with status 0, after `--help`.
    """
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            if arguments and (command := COMMANDS.get(arguments[0])):
                prog = f"{PROGRAM} {arguments[0]}"
                config = (tyro.conf.OmitArgPrefixes,)
                return tyro.cli(command, prog=prog, description=getdoc(command), args=arguments[1:], config=config)
            return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog=PROGRAM, description=SUMMARY, args=arguments)
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ArgumentError(_without_box(said.getvalue())) from None


def _without_box(text: str) -> str:
    """The words of tyro's framed message in one line, its paragraphs parted by semicolons."""
    rows = [row.strip(" │") for row in text.splitlines() if row.startswith("│")]
    paragraphs = re.split(r"─{3,}", " ".join(rows) or text)
    return "; ".join(" ".join(paragraph.split()).rstrip(".") for paragraph in paragraphs)


def _fail(message: str, status: int) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _exactly_one(options: dict[str, Any]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        found = f"{' and '.join(given)} are given" if given else "none is given"
        raise ArgumentError(f"where are the checkpoints? give one of {', '.join(options)}; {found}")


def _goes_with(option: str, value: object, other: str, other_value: object) -> None:
    if value is not None and not other_value:
        raise ArgumentError(f"{option} goes with {other}, which is not given")


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"no device {device!r} here: {str(error).splitlines()[0]}") from error


def _told(options: Any) -> dict[str, Any]:
    """The options that were given, or have a value of their own."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    return {name: value for name, value in values.items() if value is not None}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _pair(text: str, option: str = "--mixer-option") -> tuple[str, Any]:
    """Name and value of "name=value"; the value is a number, true or false where it reads as one.

    Raises:
        ArgumentError: there is no equals sign.
    """
    name, sign, value = text.partition("=")
    if not sign:
        raise ArgumentError(f"{option} {text}: write NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _file_of(path: Path | None, task: str, tasks: list[str]) -> Path | None:
    """The file of one task: the path itself when there is one task only."""
    if path is None or len(tasks) == 1:
        return path
    return path.with_name(f"{path.stem}.{task}{path.suffix}")


def _folder_of(path: Path | None) -> Path:
    """Where a file goes, for what is written beside it; else the working folder."""
    return Path() if path is None else path.parent


def _check_outputs(table: Path | None, figure: Path | None) -> None:
    """Both can be written, as far as can be told before the work.

    Raises:
        OutputError: unknown suffix, or a folder that does not take files.
    """
    from emergent_heads.plots.figure import FIGURE_SUFFIXES
    from emergent_heads.storage import check_writable

    if table is not None:
        check_writable(table)
    if figure is not None:
        check_writable(figure, FIGURE_SUFFIXES)


def _read(path: Path) -> "pd.DataFrame":
    from emergent_heads.storage import read_table

    try:
        return read_table(path)
    except EmergentHeadsError:
        raise
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read the table {path}: {error}") from error


def _print_result(result: "Result") -> None:
    print(result.headline())
    _print_table(result.shown())
    for caveat in getattr(result, "caveats", ()):
        print(f"note: {caveat}")


def _suites_shown(table: "pd.DataFrame") -> str:
    """The table of suites in 100 columns; the repository comes last, as its length varies most."""
    known = table["steps"].notna()
    steps = (table["steps"].astype(str) + " to " + table["last"].astype(str)).where(known, "ask the hub")
    columns = {"name": table["name"], "seeds": table["seeds"], "checkpoints": steps}
    columns["repository of the first seed"] = table["repository"]
    padded = [
        [cell.ljust(max(map(len, [head, *cells]))) for cell in [head, *cells]] for head, cells in columns.items()
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))


def _print_table(table: "pd.DataFrame") -> None:
    print(table.to_string(index=False, na_rep="-", float_format=lambda value: f"{value:.4g}"))


def _write(result: "Result", table: Path | None, figure: Path | None, line: str) -> None:
    if table is not None:
        _say(f"wrote {replace(result, about={**result.about, 'command_line': line}).save(table)}")
    if figure is not None:
        from emergent_heads.plots.figure import save_figure

        save_figure(result.plot(), figure)  # pyright: ignore[reportAttributeAccessIssue]
        _say(f"wrote {figure}")
