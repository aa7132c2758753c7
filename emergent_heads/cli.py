"""The command line: the same functions as in Python, under the same names.

Each subcommand is a frozen dataclass: its fields are the options, its docstring is the help, and `run` does the work.
To add one, write the class and name it in `COMMANDS`. Heavy imports stay inside functions, so that `--help` answers
at once. Tables go to stdout, progress and messages to stderr.

Exit status: 0 done, 2 wrong arguments or input, 130 interrupted, 1 anything else.
"""

import io
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import tyro

from emergent_heads.errors import ArgumentError, EmergentHeadsError

if TYPE_CHECKING:
    import pandas as pd

    from emergent_heads.checkpoints.series import CheckpointSeries
    from emergent_heads.results import Result
    from emergent_heads.tasks.task import PromptTask

PROGRAM = "emergent-heads"
SUMMARY = "When did a capability emerge in training, and which attention heads made it emerge?"

TaskName = Literal["string_repetition", "in_context_repetition", "pattern_completion", "indirect_object"]
Strategy = Literal["bisect", "scan", "verify"]


def _unset(metavar: str) -> Any:
    """An option that may be left out, without "(default: None)" in the help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Name = Annotated[str | None, _unset("NAME")]
Number = Annotated[int | None, _unset("N")]
Share = Annotated[float | None, _unset("X")]
Folder = Annotated[Path | None, _unset("PATH")]
TableFile = Annotated[Path | None, _unset("FILE")]
FigureFile = Annotated[Path | None, _unset("FILE")]


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
    """seed of the suite's run (0 if left out)"""
    hub: Annotated[str | None, _unset("REPO")] = None
    """Hugging Face repository whose revisions carry the step"""
    pattern: Annotated[str | None, _unset("P")] = None
    """name of the repository's revisions ("step{step}" if left out)"""
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

    def series(self) -> "CheckpointSeries":
        """The checkpoints; nothing is loaded yet.

        Raises:
            ArgumentError: not exactly one source, or an option that does not go with it.
        """
        from emergent_heads.checkpoints.series import CheckpointSeries
        from emergent_heads.checkpoints.suites import suite

        _exactly_one({"--suite": self.suite, "--hub": self.hub, "--directory": self.directory, "--run": self.run})
        _goes_with("--seed", self.seed, "--suite", self.suite)
        _goes_with("--pattern", self.pattern, "--hub", self.hub)
        _check_device(self.device)
        fetching: dict[str, Any] = {"cache": self.cache, "disk_budget_gb": self.disk_budget_gb, "device": self.device}
        if self.suite is not None:
            return suite(self.suite, self.seed or 0, **fetching)
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
        _print_table(table)
        if self.out:
            _say(f"wrote {save_table(table, self.out, {'command_line': line})}")


@dataclass(frozen=True)
class Emergence:
    """When did a capability emerge? Searches the checkpoints of a run, or a table of scores you already have.

    Example: emergent-heads emergence --suite pythia-160m --seed 3 --task string_repetition --out point.csv

    Example: emergent-heads emergence --from-table scores.csv --group model --score lambada_openai --threshold 0.2
    """

    source: Source = field(default_factory=Source)
    tasks: Tasks = field(default_factory=Tasks)
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
    """write the table: .csv, .parquet or .json; with several tasks one file each, named <out>.<task>.<suffix>"""
    plot: FigureFile = None
    """draw the figure: .png, .pdf or .svg; with several tasks one file each"""

    def run(self, line: str) -> None:
        found = self._from_scores() if self.from_table is not None else self._from_models()
        for one, (out, plot) in found:
            _print_result(one)
            _write(one, out, plot, line)

    def _from_models(self) -> "list[tuple[Any, tuple[Path | None, Path | None]]]":
        for option, value in {"--group": self.group, "--score": self.score, "--step": self.step}.items():
            _goes_with(option, value or None, "--from-table", None)
        tasks = self.tasks.all()
        names = [task.name for task in tasks]
        if len(set(names)) < len(names):
            raise ArgumentError(f"a task is named twice: {', '.join(names)}")
        files = [(_file_of(self.out, name, names), _file_of(self.plot, name, names)) for name in names]
        for out, plot in files:
            _check_outputs(out, plot)
        series = self.source.series()
        from emergent_heads.analysis.emergence import find_emergence  # brings torch: arguments are checked first

        points = find_emergence(series, tasks, self.strategy or "bisect", threshold=_given(self.threshold, 0.5))
        return list(zip(points, files, strict=True))

    def _from_scores(self) -> "list[tuple[Any, tuple[Path | None, Path | None]]]":
        assert self.from_table is not None
        if self.source != Source() or self.tasks != Tasks():
            raise ArgumentError("--from-table takes its scores from the table: leave out checkpoints and tasks")
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
    batch_size: Number = None
    """most sequences run together (fitted to the memory if left out)"""

    def run(self, line: str) -> None:
        if self.top < 1:
            raise ArgumentError(f"--top is {self.top}: print at least one head")
        if self.controls < 0:
            raise ArgumentError(f"--controls is {self.controls}: give 0 or more random sets")
        if self.recovery is not None and self.out == self.recovery:
            raise ArgumentError(f"--out and --recovery are both {self.out}; name two files")
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

        curve = recovery_curve(
            series[pre], series[post], task, ranking, controls=self.controls, batch_size=self.batch_size
        )
        print()
        _print_result(curve)
        _write(curve, self.recovery, None, line)


@dataclass(frozen=True)
class Demo:
    """The whole job on this machine, without downloads: trains small models, finds when they learn to repeat what they
    have read, ranks their heads, and draws what a few of them recover. Takes about two minutes on two cores.

    Example: emergent-heads demo --out demo-results
    """

    out: Path = Path("demo-results")
    """folder for checkpoints, tables and figures; finished trainings in it are used again"""
    seeds: int = 3
    """models to train"""
    steps: int = 550
    """training steps"""

    def run(self, line: str) -> None:
        from emergent_heads.experiments.demo import run_demo
        from emergent_heads.experiments.small_language_model import Recipe

        for text in run_demo(self.out, seeds=self.seeds, recipe=Recipe(steps=self.steps)):
            print(text, flush=True)


COMMANDS: dict[str, type[Command]] = {"suites": Suites, "emergence": Emergence, "rank": Rank, "demo": Demo}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and gives its exit status.

    Raises:
        SystemExit: with status 0, after `--help`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _parse(arguments).run(shlex.join([PROGRAM, *arguments]))
    except EmergentHeadsError as error:
        return _fail(str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}", 1)
    return 0


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


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _file_of(path: Path | None, task: str, tasks: list[str]) -> Path | None:
    """The file of one task: the path itself when there is one task only."""
    if path is None or len(tasks) == 1:
        return path
    return path.with_name(f"{path.stem}.{task}{path.suffix}")


def _check_outputs(table: Path | None, figure: Path | None) -> None:
    """Both can be written, as far as can be told before the work.

    Raises:
        OutputError: unknown suffix, or a folder that does not take files.
    """
    from emergent_heads.plots import FIGURE_SUFFIXES
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


def _print_table(table: "pd.DataFrame") -> None:
    print(table.to_string(index=False, na_rep="-", float_format=lambda value: f"{value:.4g}"))


def _write(result: "Result", table: Path | None, figure: Path | None, line: str) -> None:
    if table is not None:
        _say(f"wrote {replace(result, about={**result.about, 'command_line': line}).save(table)}")
    if figure is not None:
        from emergent_heads.plots import save_figure

        save_figure(result.plot(), figure)  # pyright: ignore[reportAttributeAccessIssue]
        _say(f"wrote {figure}")
