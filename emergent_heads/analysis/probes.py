"""Probes: linear readouts of a feature from the residual stream, at every layer and place.

What a probe finds means little by itself: labels may be told by their frequencies, by the tokens that can be seen, or
by any network with that many dimensions. So every probe stands beside the losses of such baselines.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.baselines import token_baselines
from emergent_heads.analysis.evaluation import model_name
from emergent_heads.analysis.linear_readouts import Readouts
from emergent_heads.analysis.probe_data import Features, ProbeData, Site, Target, choose_features, draw_data
from emergent_heads.analysis.probe_fits import Fit, FitKey, Fitting
from emergent_heads.analysis.probe_folder import ProbeFolder
from emergent_heads.analysis.readout_scores import Scores
from emergent_heads.analysis.sending import check_series_travel, modules_of
from emergent_heads.checkpoints.known_issues import mark_of, mark_steps, marks_in, marks_of
from emergent_heads.checkpoints.series import CheckpointSeries, Learned
from emergent_heads.errors import (
    ArgumentError,
    CheckpointError,
    NotFiniteError,
    UnsafeWeightsError,
    nearest,
    whole_number,
)
from emergent_heads.jobs import Ended, Executor, Job, run_jobs
from emergent_heads.models.hooked import EMBEDDING, HookedModel, hooked
from emergent_heads.models.untrained import untrained
from emergent_heads.results import Result, without_empty_marks
from emergent_heads.tasks.features import Feature
from emergent_heads.tasks.task import PromptTask, SequenceTask
from emergent_heads.workers import raise_failures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PENALTIES = (1e-4, 1e-2, 1.0, 100.0)
"""Values of C that the penalty is chosen from."""
_MAPS = ("weights", "shuffled")
_BASELINES = ["prior_loss", "untrained_loss", "last_token_loss", "bag_loss"]
_KEY = ["feature", "place", "layer"]
_COLUMNS = [
    *_KEY,
    "kind",
    "n_components",
    "base_rate",
    "penalty",
    *Scores._fields,
    "prior_loss",
    "shuffled_loss",
    "untrained_loss",
    "last_token_loss",
    "bag_loss",
    "baseline_loss",
    "share_removed",
    "validation_loss",
    "is_best",
    "n_train",
    "n_test",
]


@dataclass(frozen=True, eq=False)
class Probe:
    """One linear readout: label = weights @ residual + intercept (log-odds of 1, for binary and multilabel features).

    Attributes:
        feature, kind: what it reads.
        place: which of the feature's places in the sequence.
        layer: it reads the residual stream after this block; -1 for the embedding.
        weights: `[component, d_model]`, in the units of the residual stream (whatever was standardised is undone).
            Zero for a component whose labels do not vary.
        intercepts: `[component]`.
    """

    feature: str
    kind: str
    place: int
    layer: int
    weights: Float[np.ndarray, "component d_model"]
    intercepts: Float[np.ndarray, " component"]

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.weights.shape))
        return f"Probe({self.feature!r}, {self.kind}, place {self.place}, layer {self.layer}, weights {shape})"


@dataclass(frozen=True, repr=False, eq=False)
class Probes(Result):
    """Probes of one model.

    Attributes:
        table: one row per `feature`, `place` and `layer`: `kind`, `n_components` (that vary), `base_rate` (mean label
            of the training rows), `penalty` (scikit-learn's C; alpha is 1/C); on the test data `loss` (nats, mean over
            components; mean squared error for continuous features), `accuracy`, `balanced_accuracy`, `auc`, `r2`; the
            same loss of the baselines `prior_loss`, `shuffled_loss`, `untrained_loss`, `last_token_loss`, `bag_loss`;
            `baseline_loss`, the lowest of the prior, the untrained models, the last token and the bag;
            `share_removed` = 1 - loss / baseline_loss; `validation_loss`, by which everything was chosen; `is_best`,
            whether the layer has the lowest one of its place; `n_train` and `n_test`, the rows that have the place.
        weights: the probes by `(feature, place, layer)`.
        shuffled: probes of the same labels in random order, by the same keys: what such a probe finds in noise.
    """

    weights: Mapping[tuple[str, int, int], Probe]
    shuffled: Mapping[tuple[str, int, int], Probe] = field(default_factory=dict, kw_only=True)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(dict.fromkeys(self.table["feature"]))

    @property
    def best(self) -> pd.DataFrame:
        """The table's rows of the best layer of each place."""
        return self.table.loc[self.table["is_best"]].reset_index(drop=True)

    def probe(self, feature: str, place: int, layer: int | None = None) -> Probe:
        """One probe.

        Args:
            feature: its name.
            place: which of the feature's places.
            layer: -1 for the embedding; None for the layer that is best on the validation rows.

        Raises:
            ArgumentError: there is no such probe; the message says which there are.
        """
        rows = self.table.loc[self.table["feature"] == feature]
        if rows.empty:
            raise ArgumentError(f"no probe of a feature {feature!r}; {nearest(feature, self.features)}")
        here = rows.loc[rows["place"] == place]
        if here.empty:
            places = ", ".join(map(str, sorted(set(rows["place"]))))
            raise ArgumentError(f"feature {feature!r} was not probed at place {place}; it was at {places}")
        if layer is None:
            layer = int(here.loc[here["is_best"], "layer"].iloc[0])
        if (key := (feature, place, layer)) not in self.weights:
            layers = ", ".join(map(str, sorted(set(here["layer"]))))
            raise ArgumentError(f"feature {feature!r} was not probed at layer {layer}; it was at {layers}")
        return self.weights[key]

    def at_layers(self, layers: Sequence[int]) -> "Probes":
        """The probes of these layers only, each place's best layer chosen among them.

        What is read after the last block, only the unembedding reads as well: to see whether later positions use a
        feature, take its probes from below.

        Raises:
            ArgumentError: one of the layers was not probed.
        """
        known = sorted(set(self.table["layer"]))
        if missing := [layer for layer in layers if layer not in known]:
            raise ArgumentError(f"layer {missing[0]} was not probed; it was at {', '.join(map(str, known))}")
        table = self.table.loc[self.table["layer"].isin(list(layers))].reset_index(drop=True)
        lowest = table.groupby(["feature", "place"])["validation_loss"].transform("idxmin")
        kept = {name: {key: each for key, each in getattr(self, name).items() if key[2] in layers} for name in _MAPS}
        return replace(self, table=table.assign(is_best=lowest == table.index), **kept)

    def headline(self) -> str:
        n = len(self.best)
        return (
            f"Probes: {self.about.get('model', 'a model')}, {self.about.get('task_name', 'a task')}, "
            f"{len(self.features)} feature(s) at {n} place(s){self.caution}, best layers:"
        )

    def shown(self) -> pd.DataFrame:
        columns = ["feature", "place", "layer", "loss", "baseline_loss", "share_removed", "accuracy", "auc", "r2"]
        best = self.best
        return best.loc[:, [name for name in columns if name in best and not best[name].isna().all()]]

    def plot(self) -> "Figure":
        """Share of the strongest baseline's loss that each probe removes: a map of layer and place per feature."""
        from emergent_heads.plots import probes as probe_plots

        return probe_plots.layer_maps(self.table)


@dataclass(frozen=True, repr=False, eq=False)
class ProbeSeries(Result):
    """Probes of the checkpoints of a series.

    Attributes:
        table: as that of `Probes`, with the column `step` before and `known_issue` (of the published weights) last.
        by_step: the probes of each step, ascending.
        problems: steps passed over, with the reason.
    """

    by_step: Mapping[int, Probes]
    problems: Mapping[int, str] = field(default_factory=dict, kw_only=True)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that were probed, ascending."""
        return tuple(self.by_step)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(dict.fromkeys(self.table["feature"]))

    @property
    def last(self) -> Probes:
        """The probes of the last step."""
        return self.by_step[self.steps[-1]]

    def __getitem__(self, step: int) -> Probes:
        if step not in self.by_step:
            raise ArgumentError(f"step {step} was not probed; the steps are {', '.join(map(str, self.steps))}")
        return self.by_step[step]

    def headline(self) -> str:
        return (
            f"ProbeSeries: {self.about.get('series', 'a series')}, {self.about.get('task_name', 'a task')}, "
            f"{len(self.steps)} checkpoint(s), steps {self.steps[0]} to {self.steps[-1]}; means over places at the "
            "best layers:"
        )

    def shown(self) -> pd.DataFrame:
        best = self.table.loc[self.table["is_best"]]
        keys = ["step", "feature", "known_issue"]
        means = best.groupby(keys, sort=False)[["loss", "baseline_loss"]].mean().reset_index()
        means.insert(4, "share_removed", 1 - means["loss"] / means["baseline_loss"])
        return without_empty_marks(means)

    def plot(self) -> "Figure":
        """Share of the strongest baseline's loss that the best layer's probe removes: step and place per feature."""
        from emergent_heads.plots import probes as probe_plots

        return probe_plots.step_maps(self.table)


@dataclass(frozen=True)
class _Settings:
    """The arguments that decide what comes out."""

    n_train: int
    n_test: int
    layers: "Literal['all'] | tuple[int, ...]"
    seed: int
    penalties: tuple[float, ...]
    n_untrained: int
    memory_gb: float

    @classmethod
    def checked(
        cls,
        n_train: int,
        n_test: int,
        layers: "Literal['all'] | Sequence[int]",
        seed: int,
        penalties: Sequence[float],
        n_untrained: int,
        memory_gb: float,
    ) -> "_Settings":
        """The arguments, checked as far as they can be without a model."""
        c = tuple(sorted({float(each) for each in penalties}))
        if not c or not all(math.isfinite(each) and each > 0 for each in c):
            raise ArgumentError(f"penalties are values of C, above 0; give at least one, not {penalties!r}")
        if not memory_gb > 0:
            raise ArgumentError(f"memory_gb must be above 0, not {memory_gb!r}")
        if layers != "all" and (isinstance(layers, (str, int)) or not len(layers)):
            raise ArgumentError(f'layers is {layers!r}; give "all" or a list of layers, -1 for the embedding')
        return cls(
            n_train=whole_number("n_train", n_train, least=1),
            n_test=whole_number("n_test", n_test, least=1),
            layers="all" if layers == "all" else tuple(sorted({int(layer) for layer in layers})),
            seed=seed,
            penalties=c,
            n_untrained=whole_number("n_untrained", n_untrained, least=0),
            memory_gb=float(memory_gb),
        )

    @property
    def kept(self) -> dict[str, Any]:
        """Those on which the numbers depend, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "memory_gb"}

    def fitting(self, model: HookedModel) -> Fitting:
        """The same for a model, whose layers are checked."""
        layers = range(EMBEDDING, model.n_layers) if self.layers == "all" else self.layers
        if unknown := [layer for layer in layers if not EMBEDDING <= layer < model.n_layers]:
            raise ArgumentError(
                f"layer {unknown[0]}: this model has layers 0 to {model.n_layers - 1}, and -1 for the embedding"
            )
        return Fitting(tuple(layers), self.penalties, self.seed, self.memory_gb)


def fit_probes(
    model: Any,
    task: SequenceTask | PromptTask,
    features: Features = None,
    n_train: int = 10_000,
    n_test: int = 1_000,
    layers: "Literal['all'] | Sequence[int]" = "all",
    *,
    seed: int = 0,
    penalties: Sequence[float] = PENALTIES,
    n_untrained: int = 2,
    memory_gb: float = 1.0,
    progress: bool = True,
) -> Probes:
    """Fits a linear probe of each feature at every layer and place, beside baselines that the model does not need.

    Binary features are read by logistic regression, the components of multilabel features by one each, continuous ones
    by ridge regression. The penalty is chosen on validation rows, and so is the best layer of each place; test rows
    are used for nothing but the scores. Components whose labels do not vary are left out, and so are places that too
    few rows have.

    The baselines: the prior (mean label of the training rows); the same probe on untrained models of the same shape
    (mean over the draws, each at its own best layer); a table of the last token; a probe on the bag of tokens seen so
    far (see `baselines.py`); and for comparison shuffled labels, the same probe fitted to training labels in random
    order.

    Args:
        model: a checkpoint of a series, or any model that `eh.hooked` takes.
        task: whose sequences are read. Sequences are fresh ones, drawn apart from those of the training; a task with
            fixed prompts has its prompts divided.
        features: names, or features of your own; by default all features of the task.
        n_train: training rows.
        n_test: test rows, and as many validation rows.
        layers: "all", or those to read: -1 for the embedding, else the residual stream after the block.
        seed: of the rows, the untrained models and the shuffled labels.
        penalties: values of C as in scikit-learn's `LogisticRegression`, larger is weaker; ridge regression takes
            alpha = 1/C.
        n_untrained: untrained models; 0 leaves this baseline out.
        memory_gb: most activations held at a time, in 10^9 bytes. What does not fit takes further forward passes.
        progress: whether to show a bar.

    Raises:
        ArgumentError: an argument that makes no sense, a feature the task does not have or that cannot be read from
            its sequences, labels that are constant everywhere, or too few examples.
        NotFiniteError: the residual stream is not finite.
        UnsupportedModelError: `model` is nothing the library reads.
    """
    chosen = choose_features(task, features)
    settings = _Settings.checked(n_train, n_test, layers, seed, penalties, n_untrained, memory_gb)
    the_model = hooked(model)
    fitting = settings.fitting(the_model)
    data = draw_data(task, chosen, the_model, n_train=n_train, n_test=n_test, seed=seed)
    n_blocks = (1 + settings.n_untrained) * len(fitting.layers) * len(data.sites)
    with tqdm(total=n_blocks, desc="probes", unit="site", leave=False, **notebook.bar(progress)) as bar:
        baselines = _baselines(the_model, data, fitting, settings.n_untrained, bar.update)
        fits = fitting.fit(the_model, data, shuffled=True, done=bar.update)
    about = {**_about(task, chosen, settings, data), "analysis": "fit_probes", "model": model_name(model)}
    about["known_issues"] = marks_of(model)
    return _probes(fits, data, baselines, about, [feature.name for feature in chosen])


def probe_series(
    series: CheckpointSeries,
    task: SequenceTask | PromptTask,
    features: Features = None,
    n_train: int = 10_000,
    n_test: int = 1_000,
    layers: "Literal['all'] | Sequence[int]" = "all",
    *,
    steps: Sequence[int] | None = None,
    path: Path | str | None = None,
    seed: int = 0,
    penalties: Sequence[float] = PENALTIES,
    n_untrained: int = 2,
    memory_gb: float = 1.0,
    executor: Executor | None = None,
    workers: int | None = 0,
    progress: bool = True,
) -> ProbeSeries:
    """Fits the probes of `fit_probes` at the checkpoints of a series.

    All checkpoints are read on the same rows and stand beside the same baselines, which are found once and here. No
    checkpoint needs another's probes. Checkpoints that cannot be used are passed over and noted in `.problems`.

    Args:
        series: the checkpoints.
        task, features, n_train, n_test, layers, seed, penalties, n_untrained, memory_gb: as in `fit_probes`.
        steps: which checkpoints; all by default.
        path: a folder where the probes of each checkpoint are kept, so that a call that was stopped goes on where it
            was, and `open_probes` reads them later. A checkpoint whose file has changed is probed again. Workers write
            there, so other machines must see it under the same path.
        executor: anything whose `submit(function, *arguments)` gives futures: each checkpoint is a job. What comes out
            is the same. A checkpoint that fails costs the others nothing; the error is raised at the end.
        workers: processes of this machine in its place; 0 probes in this process, None takes one for each core.
        progress: whether to show a bar.

    Raises:
        ArgumentError: as `fit_probes`, no steps, both an executor and workers, or a loader that cannot be sent to
            another process.
        UnknownStepError: the series has no such step.
        RunFolderError: `path` holds probes of other settings; the message names the differences.
        CheckpointError: none of the checkpoints can be used.
    """
    chosen = choose_features(task, features)
    settings = _Settings.checked(n_train, n_test, layers, seed, penalties, n_untrained, memory_gb)
    wanted = series.steps if steps is None else sorted({series[step].step for step in steps})
    if not wanted:
        raise ArgumentError("steps is empty; give steps of the series, or None for all")
    problems: dict[int, str] = {}
    model = _first_usable(series, wanted, problems)
    fitting = settings.fitting(model)
    data = draw_data(task, chosen, model, n_train=n_train, n_test=n_test, seed=seed)
    about = {**_about(task, chosen, settings, data), "analysis": "probe_series", "series": series.name}
    about["repository"] = series.repository
    folder = None if path is None else ProbeFolder.open(path, about)
    baselines = None if folder is None else folder.baselines
    if baselines is None:
        baselines = _baselines(model, data, fitting, settings.n_untrained, lambda _=1: None)
        if folder is not None:
            folder.keep_baselines(baselines)
    if folder is not None:
        folder = replace(folder, path=folder.path.absolute())  # where workers are elsewhere
    work = _Work(fitting, data, baselines, about, tuple(feature.name for feature in chosen), folder)
    by_step, missing = _kept(series, wanted, work, problems)
    for step, outcome in _probed(series, missing, work, len(by_step), executor, workers, progress):
        if isinstance(outcome, Probes):
            by_step[step] = outcome
        else:
            problems[step] = outcome
    if not by_step:
        raise CheckpointError(
            f"no checkpoint of {series.name} can be used; at step {min(problems)}: {problems[min(problems)]}"
        )
    return _series(dict(sorted(by_step.items())), about, dict(sorted(problems.items())))


def open_probes(path: Path | str) -> ProbeSeries:
    """The probes that `probe_series` kept in the folder `path`, as far as they have come.

    Raises:
        NoCheckpointsError: the folder holds no probes.
        RunFolderError: they were kept by a version of the library that wrote them in another way.
    """
    folder = ProbeFolder.read_only(path)
    about = folder.settings
    return _series({step: _unpacked(*folder.kept(step), about) for step in folder.steps}, about, {})


# ---- checkpoints ----


@dataclass(frozen=True, eq=False)
class _Work:
    """What it takes to probe a checkpoint; can be sent to workers, as the features have been read.

    Attributes:
        fitting, data, baselines: how, on what, and beside what.
        about: of the result.
        features: their names, in order.
        folder: where the probes are kept, if they are.
    """

    fitting: Fitting
    data: ProbeData
    baselines: pd.DataFrame
    about: Mapping[str, Any]
    features: tuple[str, ...]
    folder: ProbeFolder | None

    def kept(self, series: CheckpointSeries, step: int) -> "Probes | None":
        """The probes of a checkpoint that the folder holds."""
        found = None if self.folder is None else self.folder.read(step, series.identity(step))
        return None if found is None else _unpacked(*found, self.about)

    def do(self, series: CheckpointSeries, step: int) -> "Probes | str":
        """The probes of a checkpoint, kept in the folder; or why it cannot be used."""
        try:
            fits = self.fitting.fit(series.hooked(step), self.data, shuffled=True)
        except UnsafeWeightsError:
            raise
        except (CheckpointError, NotFiniteError) as error:
            return str(error)
        probes = _probes(fits, self.data, self.baselines, self.about, self.features)
        if self.folder is not None:
            self.folder.keep(step, probes.table, _packed(probes), series.identity(step))
        return probes


def _kept(
    series: CheckpointSeries, steps: Sequence[int], work: _Work, problems: dict[int, str]
) -> tuple[dict[int, Probes], list[int]]:
    """The probes that the folder holds, and the steps that are to be probed; adds those refused to the problems."""
    found: dict[int, Probes] = {}
    missing: list[int] = []
    for step in steps:
        try:
            series.check_known_issues(step)  # also where its probes are kept
        except CheckpointError as error:
            problems[step] = str(error)
            continue
        if (kept := work.kept(series, step)) is not None:
            found[step] = kept
        elif step not in problems:
            missing.append(step)
    return found, missing


def _probed(
    series: CheckpointSeries,
    steps: Sequence[int],
    work: _Work,
    n_kept: int,
    executor: Executor | None,
    workers: int | None,
    progress: bool,
) -> Iterator[tuple[int, "Probes | str"]]:
    """The probes of each step, or why it cannot be used, in whatever order.

    Raises:
        Exception: of a job; of jobs that workers did, after all have ended.
    """
    if executor is None and workers == 0:
        shown = {"initial": n_kept, "total": n_kept + len(steps), **notebook.bar(progress)}
        for step in tqdm(steps, desc="checkpoints", unit="checkpoint", leave=False, **shown):
            yield step, work.do(series, step)
        return
    check_series_travel(executor, [series])
    jobs = {Job(f"step {step}", _probe_in_worker, (series, step, work)): step for step in steps}
    how: dict[str, Any] = {"workers": workers, "modules": modules_of([series]), "done_before": n_kept}
    failed: list[Ended] = []
    for ended in run_jobs(jobs, executor, title="probes", unit="checkpoint", **how, progress=progress):
        if ended.error is not None:
            failed.append(ended)
            continue
        outcome, learned = ended.value
        series.learn(learned)
        yield jobs[ended.job], outcome
    raise_failures(sorted(failed, key=lambda ended: jobs[ended.job]), len(jobs))


def _probe_in_worker(series: CheckpointSeries, step: int, work: _Work) -> "tuple[Probes | str, Learned]":
    """The job of a checkpoint."""
    series = series.in_worker()
    outcome = work.kept(series, step) or work.do(series, step)  # kept by a worker that was lost after that
    return outcome, series.learned()


# ---- parts of both ----


def _about(task: Any, features: Sequence[Feature], settings: _Settings, data: ProbeData) -> dict[str, Any]:
    own = {name: float(value) for name in ("plateau", "floor") if (value := getattr(task, name, None)) is not None}
    parts = ("train", "validation", "test")
    return {
        "task": repr(task),
        "task_name": task.name,
        **own,
        "features": [feature.name for feature in features],
        **settings.kept,
        "rows": dict(zip(parts, data.sizes, strict=True)),
        "distinct_rows": dict(zip(parts, data.n_distinct, strict=True)),
        "data_key": data.key,
    }


def _baselines(
    model: HookedModel, data: ProbeData, fitting: Fitting, n_untrained: int, done: Callable[[], object]
) -> pd.DataFrame:
    """One row per `feature` and `place` with the baselines' losses and the lowest of them."""
    rows: dict[tuple[str, int], dict[str, Any]] = {
        key: {"feature": key[0], "place": key[1], **losses}
        for key, losses in token_baselines(data, fitting.penalties).items()
    }
    best_of_draws: dict[tuple[str, int], list[float]] = {key: [] for key in rows}
    for draw in range(n_untrained):
        best: dict[tuple[str, int], Fit] = {}
        for fit in fitting.fit(untrained(model, fitting.seed + draw), data, shuffled=False, done=done):
            key = fit.target.key
            if key not in best or fit.validation_loss < best[key].validation_loss:
                best[key] = fit
        for key, fit in best.items():
            best_of_draws[key].append(fit.scores.loss)
    for key, losses in best_of_draws.items():
        rows[key]["untrained_loss"] = float(np.mean(losses)) if losses else float("nan")
    table = pd.DataFrame(list(rows.values()))
    return table.assign(baseline_loss=table[_BASELINES].min(axis=1))


def _probes(
    fits: Sequence[Fit],
    data: ProbeData,
    baselines: pd.DataFrame,
    about: Mapping[str, Any],
    features: Sequence[str],
) -> Probes:
    order = {name: number for number, name in enumerate(features)}
    fits = sorted(fits, key=lambda fit: (order[fit.target.feature], fit.target.place, fit.layer))
    sites = {target.key: site for site in data.sites for target in site.targets}
    table = pd.DataFrame([_row(fit, sites[fit.target.key]) for fit in fits])
    table = table.merge(baselines, on=["feature", "place"], how="left", validate="many_to_one")
    lowest = table.groupby(["feature", "place"])["validation_loss"].transform("idxmin")
    baseline = table["baseline_loss"].where(table["baseline_loss"] > 0)
    table = table.assign(share_removed=1 - table["loss"] / baseline, is_best=lowest == table.index)
    return Probes(
        table.loc[:, _COLUMNS],
        {fit.key: _probe(fit.layer, fit.target, fit.readouts) for fit in fits},
        shuffled={fit.key: _probe(fit.layer, fit.target, fit.shuffled[0]) for fit in fits if fit.shuffled},
        about=about,
    )


def _row(fit: Fit, site: Site) -> dict[str, Any]:
    target = fit.target
    return {
        "feature": target.feature,
        "place": target.place,
        "layer": fit.layer,
        "kind": target.kind,
        "n_components": len(target.labels),
        "base_rate": float(target.rates.mean()),
        "penalty": fit.penalty,
        **fit.scores._asdict(),
        "shuffled_loss": fit.shuffled[1] if fit.shuffled else float("nan"),
        "validation_loss": fit.validation_loss,
        "n_train": site.ends[0],
        "n_test": len(site.rows) - site.ends[1],
    }


def _probe(layer: int, target: Target, readouts: Readouts) -> Probe:
    """A probe of all components; those that do not vary have weight 0."""
    weights = np.zeros((len(target.varies), readouts.weights.shape[1]), dtype=np.float32)
    intercepts = _constant_readouts(target)
    weights[target.varies] = readouts.weights.cpu().numpy()
    intercepts[target.varies] = readouts.intercepts.cpu().numpy()
    return Probe(target.feature, target.kind, target.place, layer, weights, intercepts)


def _constant_readouts(target: Target) -> Float[np.ndarray, " component"]:
    """What labels that do not vary are read as: their value, or finite log-odds of it."""
    if target.continuous:
        return target.rates.astype(np.float32)
    n = target.labels.shape[1]
    rates = (n * target.rates + 0.5) / (n + 1)
    return np.log(rates / (1 - rates)).astype(np.float32)


def _first_usable(series: CheckpointSeries, steps: Sequence[int], problems: dict[int, str]) -> HookedModel:
    """The model of the first checkpoint that can be used; notes in `problems` those that cannot."""
    for step in steps:
        try:
            return series.hooked(step)
        except UnsafeWeightsError:
            raise
        except CheckpointError as error:
            problems[step] = str(error)
    raise CheckpointError(f"no checkpoint of {series.name} can be used; at step {steps[0]}: {problems[steps[0]]}")


def _series(by_step: Mapping[int, Probes], about: Mapping[str, Any], problems: Mapping[int, str]) -> ProbeSeries:
    tables, named = [], {}
    for step, probes in by_step.items():
        table = probes.table.copy()
        table.insert(0, "step", step)
        tables.append(table)
        model, mark = f"{about['series']} at step {step}", mark_of(about.get("repository"), step)
        known = {"known_issues": {model: mark} if mark else {}}
        named[step] = replace(probes, about={**probes.about, "model": model, "step": step, **known})
    joined = mark_steps(pd.concat(tables, ignore_index=True), about.get("repository"))
    known = {"known_issues": marks_in([(about["series"], joined)])}
    return ProbeSeries(joined, named, problems=dict(problems), about={**about, **known})


# ---- probes as arrays, to be kept ----


def _packed(probes: Probes) -> dict[str, np.ndarray]:
    """Weights and intercepts one under the other, in the order of the table."""
    keys = [(feature, place, layer) for feature, place, layer in probes.table[_KEY].itertuples(index=False)]
    arrays = {"components": np.array([len(probes.weights[key].intercepts) for key in keys])}
    for name, held in (("", probes.weights), ("shuffled_", probes.shuffled)):
        arrays[f"{name}weights"] = np.concatenate([held[key].weights for key in keys])
        arrays[f"{name}intercepts"] = np.concatenate([held[key].intercepts for key in keys])
    return arrays


def _unpacked(table: pd.DataFrame, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> Probes:
    ends = np.cumsum(arrays["components"])[:-1]
    found: list[dict[FitKey, Probe]] = []
    for name in ("", "shuffled_"):
        weights = np.split(arrays[f"{name}weights"], ends)
        intercepts = np.split(arrays[f"{name}intercepts"], ends)
        rows = table[[*_KEY, "kind"]].itertuples(index=False)
        found.append(
            {
                (feature, place, layer): Probe(feature, kind, place, layer, *of_row)
                for (feature, place, layer, kind), *of_row in zip(rows, weights, intercepts, strict=True)
            }
        )
    return Probes(table, found[0], shuffled=found[1], about=about)
