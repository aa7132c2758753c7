"""Running an experiment: train what is missing, judge, draw, and keep what came out."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from emergent_heads.errors import ArgumentError, NoCheckpointsError, nearest
from emergent_heads.experiments.registry import SCALES, Scale, find_experiment
from emergent_heads.jobs import Executor, Job, run_jobs, values
from emergent_heads.plots.figure import picture, save_figure
from emergent_heads.results import Result
from emergent_heads.storage import check_writable, read_table, save_table, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from emergent_heads.experiments.study import Verdict

RUNS = "runs"
_TABLES = ("checks", "runs", "arms")


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Finding(Result):
    """What an experiment found.

    Attributes:
        table: one row per arm (setting) with its seeds, steps to solve and what was learned, or a table of the
            experiment's own.
        name, title, claim, rule: of the experiment.
        verdict: "holds", "does not hold" or "not settled".
        checks: one row per part of the claim: `part`, `holds`, `value`, `low`, `high`, `n_seeds`, `says`.
        runs: one row per run.
        scale: "small" or "paper".
        seconds: of training, all runs together, whenever they were trained.
        figure: where the figure is.
    """

    name: str
    title: str
    claim: str
    rule: str
    verdict: "Verdict"
    checks: pd.DataFrame
    runs: pd.DataFrame
    scale: Scale
    seconds: float
    figure: Path

    def headline(self) -> str:
        return f"{self.name}: {self.verdict}. {self.claim}"

    def plot(self) -> "Figure":
        """The figure in the folder of the results, as it was drawn when the experiment was done."""
        return picture(self.figure)

    def shown(self) -> pd.DataFrame:
        return self.checks.loc[:, ["part", "value", "low", "high", "n_seeds", "holds"]]


def run_experiment(
    name: str,
    out: Path | str,
    *,
    scale: Scale = "small",
    workers: int | None = None,
    executor: Executor | None = None,
    together: int = 1,
    device: str = "cpu",
    max_steps: int | None = None,
    progress: bool = True,
) -> Finding:
    """Reproduces one of the findings of the two papers (arXiv 2606.25010 and 2505.03997).

    Args:
        name: of the experiment, see `emergent_heads.experiments.registry.EXPERIMENTS`.
        out: folder of the results. Runs go to `out/runs`, where experiments find those they share; the tables, the
            figure and the verdict to `out/<name>`. What is there is not trained again.
        scale: "small" for sizes that two cores can do in minutes, "paper" for the paper's sizes.
        workers: processes that train, and then measure, at once: by default one for each core; 0 for this process.
        executor: trains and measures in place of `workers`, as in `run_sweep`.
        together: most runs that are trained in one process with stacked weights, as in `run_sweep`.
        device: where to train.
        max_steps: stop every run here, to try an experiment out.
        progress: whether to show a bar.

    Raises:
        ArgumentError: an unknown name or scale. OutputError: the folder cannot be written.
    """
    experiment = find_experiment(name)
    if scale not in SCALES:
        raise ArgumentError(f"no scale {scale!r}; {nearest(scale, SCALES)}")
    if max_steps is not None and max_steps < 1:
        raise ArgumentError(f"max_steps is {max_steps}; give at least 1")
    folder = Path(out) / name
    check_writable(folder / "arms.csv")
    from emergent_heads.experiments.recipes import Recipes
    from emergent_heads.experiments.study import arms_table, runs_table, settings_of
    from emergent_heads.sweeps import run_sweep

    study = experiment.study()
    arms = study.arms(Recipes(scale, max_steps))
    wanted = [run for arm in arms for run in arm.runs]
    how: dict[str, Any] = {"executor": executor, "workers": workers, "progress": progress}
    sweep = run_sweep(wanted, Path(out) / RUNS, together=together, device=device, **how)
    runs = runs_table(arms, sweep)
    if study.measure is not None:
        trained = runs.loc[runs["status"] != "failed", "run"].unique()
        _measure_all(study.measure, [(Path(out) / RUNS / name).resolve() for name in trained], **how)
    judgement = study.judge(runs, Path(out) / RUNS)
    finding = Finding(
        table=arms_table(runs, study.varied) if judgement.table is None else judgement.table,
        about={"scale": scale, "max_steps": max_steps, "settings": settings_of(arms)},
        name=name,
        title=experiment.title,
        claim=experiment.claim,
        rule=experiment.rule,
        verdict=judgement.final,
        checks=pd.DataFrame([asdict(check) for check in judgement.checks]),
        runs=runs,
        scale=scale,
        seconds=float(sweep.table["seconds"].sum()),
        figure=folder / "figure.png",
    )
    save_figure(study.draw(runs, judgement), finding.figure)
    if judgement.curves is not None:
        save_table(judgement.curves, folder / "curves.csv")
    _save(finding, folder)
    return finding


def _measure_all(measure: "Callable[[Path], None]", folders: Sequence[Path], **how: Any) -> None:
    """Measures trained runs; what was measured before is found by `measure`."""
    jobs = [Job(folder.name, measure, (folder,)) for folder in folders]
    for _ in values(run_jobs(jobs, modules=[measure.__module__], title="measuring", unit="run", **how)):
        pass


def read_finding(folder: Path | str) -> Finding:
    """What an experiment found earlier, from its folder `out/<name>`.

    Raises:
        NoCheckpointsError: no experiment was finished there.
    """
    folder = Path(folder)
    if not (folder / "finding.json").is_file():
        raise NoCheckpointsError(f"{folder} holds no finished experiment; run it first")
    about = json.loads((folder / "finding.json").read_text())
    checks, runs, table = (read_table(folder / f"{name}.csv") for name in _TABLES)
    plain = {name: about[name] for name in _plain_fields()}
    return Finding(table=table, about=about["about"], checks=checks, runs=runs, figure=folder / "figure.png", **plain)


def _save(finding: Finding, folder: Path) -> None:
    for name, table in zip(_TABLES, (finding.checks, finding.runs, finding.table), strict=True):
        save_table(table, folder / f"{name}.csv", finding.about)
    plain = {name: getattr(finding, name) for name in _plain_fields()}
    write_json(folder / "finding.json", {**plain, "about": dict(finding.about)})  # last: it says that all is there


def _plain_fields() -> Sequence[str]:
    return [each.name for each in fields(Finding) if each.name not in {"table", "about", "checks", "runs", "figure"}]
