"""Along a training: do latents that carry a feature appear before or after the probe can read it?

Two questions, answered side by side. Does the residual stream of a checkpoint fall apart into latents one of which
carries the feature? For that each checkpoint has an autoencoder of its own, by the same settings and seed. And since
when is the latent there that carries it in the end? For that the last checkpoint's best latents are read in all
checkpoints, their autoencoder as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.leads import Lead, at
from emergent_heads.analysis.patching import check_choice
from emergent_heads.analysis.probe_curves import read_curves
from emergent_heads.analysis.probe_data import Features
from emergent_heads.analysis.probes import Probes, ProbeSeries
from emergent_heads.checkpoints.known_issues import mark_steps, marks_in
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import ArgumentError, CheckpointError, NotFiniteError, RunFolderError, UnsafeWeightsError
from emergent_heads.results import Result
from emergent_heads.sae.autoencoder import CONFIG, OWN, SparseAutoencoder, load
from emergent_heads.sae.comparison import Comparing, Component
from emergent_heads.sae.training import Data, Positions, settings_of, train
from emergent_heads.storage import as_read_back
from emergent_heads.tasks.task import PromptTask, SequenceTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Readout = Literal["probe", "latent", "followed", "random"]
READOUTS: tuple[Readout, ...] = get_args(Readout)
_KEY = ["step", "feature", "place", "component"]
_COLUMNS = [
    *_KEY,
    "kind",
    "baseline_loss",
    "prior_loss",
    "probe_loss",
    "probe_validation_loss",
    "latent",
    "latent_loss",
    "latent_validation_loss",
    "random_loss",
    "gap_closed",
    "random_gap_closed",
    "active",
    "decoder_cosine",
    "followed_latent",
    "followed_loss",
    "followed_validation_loss",
]


@dataclass(frozen=True, repr=False, eq=False)
class LatentSeries(Result):
    """Latents against probes at the checkpoints of a series, all at one layer.

    Attributes:
        table: one row per `step`, `feature`, `place` and `component`: losses on the probes' test rows, in nats (mean
            squared error for continuous features): `baseline_loss` of the strongest baseline of the probes,
            `prior_loss`, `probe_loss`, `latent_loss` of the best `latent` of the checkpoint's own autoencoder,
            `random_loss` of the best of as many random latents, `followed_loss` of the last checkpoint's best latent
            (`followed_latent`), read at this checkpoint; further columns as in `LatentComparison.table`; `known_issue`
            (of the published weights) last.
        autoencoders: one row per `step`: `explained_variance`, `l0`, `n_dead`, `n_latents`.
        by_step: the autoencoder of each step.
        probes: the probes at this layer.
        problems: steps passed over, with the reason.
    """

    autoencoders: pd.DataFrame
    by_step: Mapping[int, SparseAutoencoder]
    probes: ProbeSeries
    problems: Mapping[int, str] = field(default_factory=dict, kw_only=True)

    @cached_property
    def emergence(self) -> pd.DataFrame:
        """Per `feature` and `readout` where it emerges, by the rule of `classify_features`.

        `status`, `emergence_step` with `emergence_low` and `emergence_high` (the checkpoints on both sides),
        `share_removed` of the strongest baseline's loss at best, and `lag_steps`, the emergence minus that of the
        probe (below 0: before it) with what the checkpoints on both sides allow, `lag_least` to `lag_most`. A readout
        that does not remove `least_share` of the baseline at best never emerges.
        """
        least_share = float(self.about["least_share"])
        rows = []
        curves = {readout: read_curves(self.as_probes(readout)) for readout in READOUTS}
        for feature in curves["probe"]:
            of_probe = curves["probe"][feature].whole.emergence(least_share)
            for readout in READOUTS:
                curve = curves[readout][feature].whole
                emergence = curve.emergence(least_share)
                lag = Lead.between(of_probe, emergence)
                rows.append(
                    {
                        "feature": feature,
                        "readout": readout,
                        "status": emergence.status,
                        "emergence_step": at(emergence.step),
                        "emergence_low": at(emergence.low),
                        "emergence_high": at(emergence.high),
                        "share_removed": curve.share_removed,
                        "lag_steps": lag.steps,
                        "lag_least": lag.least,
                        "lag_most": lag.most,
                        "lag_censored": lag.censored,
                    }
                )
        return pd.DataFrame(rows)

    def as_probes(self, readout: Readout) -> ProbeSeries:
        """The losses of one readout as a series of probes, for `classify_features` and everything else on curves."""
        check_choice("readout", readout, READOUTS)
        columns = {f"{readout}_loss": "loss", f"{readout}_validation_loss": "validation_loss"}
        table = self.table
        if readout == "random":  # chosen on training rows; its test loss serves for both
            table = table.assign(random_validation_loss=table["random_loss"])
        kept = ["baseline_loss", "prior_loss", *columns]
        keys = ["step", "feature", "kind", "place", "known_issue"]
        means: Any = table.groupby(keys, sort=False, as_index=False)[kept].mean()
        means = means.rename(columns=columns).assign(layer=self.about["layer"], is_best=True)
        return ProbeSeries(means, {}, about=self.probes.about)

    def headline(self) -> str:
        said = []
        for feature, rows in self.emergence.groupby("feature", sort=False):
            of = rows.set_index("readout")
            said.append(f"{feature}: {_said(of.loc['probe'])} by the probe, {_said(of.loc['latent'])} by a latent")
        return (
            f"LatentSeries of {self.about['series']}, layer {self.about['layer']}, {len(self.by_step)} checkpoint(s); "
            f"emergence of {'; '.join(said)}{self.caution}"
        )

    def shown(self) -> pd.DataFrame:
        return self.emergence.drop(columns=["emergence_low", "emergence_high", "lag_censored"])

    def plot(self) -> "Figure":
        """Losses over the steps as shares of the prior's, with where each readout emerges."""
        from emergent_heads.plots import sae as sae_plots

        return sae_plots.latent_series(self.table, self.emergence)


def _said(row: pd.Series) -> str:
    return f"step {row['emergence_step']:.0f}" if row["status"] == "crossed" else str(row["status"])


def latent_series(
    series: CheckpointSeries,
    task: SequenceTask | PromptTask,
    probes: ProbeSeries,
    *,
    layer: int,
    data: Data | None = None,
    features: Features = None,
    steps: Sequence[int] | None = None,
    path: Path | str | None = None,
    positions: Positions = "all",
    least_share: float = 0.1,
    seed: int = 0,
    progress: bool = True,
    **settings: Any,
) -> LatentSeries:
    """Trains an autoencoder for each checkpoint, and compares its latents with the checkpoint's probes.

    Args:
        series: the checkpoints.
        task: what was probed.
        probes: by `probe_series`, of these checkpoints, at `layer` among others.
        layer: whose residual stream is read.
        data: what the autoencoders are trained on, a task or token ids; by default the sequences of `task`.
        features: names, or features of your own, which must be given here again; None for all that were probed.
        steps: which checkpoints; None for all that were probed.
        path: a folder that keeps the autoencoder of each checkpoint, `step_00000000/`. A call that was stopped goes on
            where it was, and finished autoencoders are read without SAELens.
        positions: which tokens the autoencoders are trained on, as in `train`.
        least_share: share of the strongest baseline that a readout must remove to count as there.
        seed: of the autoencoders and the controls.
        progress: whether to show a bar.
        **settings: of `train`: `d_sae`, `k`, `n_activations`, `batch_size`, `learning_rate`, `n_held_out`.

    Raises:
        ArgumentError: a step or layer that was not probed, fewer than two checkpoints, or what `train` and
            `compare_features` refuse.
        RunFolderError: `path` holds autoencoders of other settings.
        CheckpointError: none of the checkpoints can be used.
    """
    if not isinstance(probes, ProbeSeries):
        raise ArgumentError(f"probes is a {type(probes).__name__}; give what probe_series returned")
    if not 0 < least_share < 1:
        raise ArgumentError(f"least_share is {least_share}: it is a share, above 0 and below 1")
    wanted = sorted({step for step in (probes.steps if steps is None else steps) if probes[step] is not None})
    if len(wanted) < 2:
        raise ArgumentError(f"{len(wanted)} checkpoint(s); to see when latents appear takes at least 2")
    at_layer = {step: probes[step].at_layers([layer]) for step in wanted}
    folder = None if path is None else Path(path)
    options = {"layer": layer, "positions": positions, "seed": seed, **settings}
    problems: dict[int, str] = {}
    autoencoders: dict[int, SparseAutoencoder] = {}
    for step in tqdm(wanted, desc="autoencoders", unit="checkpoint", leave=False, **notebook.bar(progress)):
        try:
            series.check_known_issues(step)  # also where its autoencoder is kept
            autoencoders[step] = _autoencoder(series, step, task if data is None else data, folder, options)
        except UnsafeWeightsError:
            raise
        except (CheckpointError, NotFiniteError) as error:
            problems[step] = str(error)
    if not autoencoders:
        raise CheckpointError(f"no checkpoint of {series.name} can be used; {next(iter(problems.values()))}")
    tables = _compared(series, task, at_layer, autoencoders, features, seed, progress)
    quality = pd.DataFrame([{"step": step, **_quality(sae)} for step, sae in autoencoders.items()])
    table = mark_steps(pd.concat(tables, ignore_index=True).loc[:, _COLUMNS], series.repository)
    kept = {step: at_layer[step] for step in autoencoders}
    of_layer = ProbeSeries(_joined(kept), kept, about=probes.about)
    about = {
        **{name: value for name, value in probes.about.items() if name != "layers"},
        "analysis": "latent_series",
        "features": list(dict.fromkeys(table["feature"])),
        "layer": layer,
        "steps": list(autoencoders),
        "least_share": least_share,
        "autoencoder": (next(iter(autoencoders.values())).metadata or {}).get(OWN, {}),
        "problems": problems,
        "known_issues": marks_in([(series.name, table)]),
    }
    return LatentSeries(table, quality, autoencoders, of_layer, problems=problems, about=about)


def _compared(
    series: CheckpointSeries,
    task: SequenceTask | PromptTask,
    probes: Mapping[int, Probes],
    autoencoders: Mapping[int, SparseAutoencoder],
    features: Features,
    seed: int,
    progress: bool,
) -> list[pd.DataFrame]:
    """The table of each step, ascending. The last step comes first, as its best latents are followed in the others."""
    last = max(autoencoders)
    comparing = Comparing.open(series.hooked(last), task, probes[last], features, seed=seed)
    found: dict[int, pd.DataFrame] = {}
    chosen: dict[Component, int] = {}
    order = [last, *(step for step in autoencoders if step != last)]
    for step in tqdm(order, desc="comparisons", unit="checkpoint", leave=False, **notebook.bar(progress)):
        model, sae = series.hooked(step), autoencoders[step]
        follow = (autoencoders[last], chosen) if chosen else None
        compared = comparing.compare(model, probes[step], sae, n_best=1, follow=follow)
        keys = list(compared.table[_KEY[1:]].itertuples(index=False, name=None))
        if step == last:
            chosen = dict(zip(keys, compared.table["latent"].tolist(), strict=True))
            followed = list(compared.table[["latent_loss", "validation_loss"]].itertuples(index=False, name=None))
        else:
            followed = [compared.followed[key] for key in keys]
        columns = {
            "followed_latent": [chosen[key] for key in keys],
            "followed_loss": [test for test, _ in followed],
            "followed_validation_loss": [validation for _, validation in followed],
        }
        table = compared.table.rename(columns={"validation_loss": "latent_validation_loss"}).assign(**columns)
        of_probe = probes[step].table.rename(columns={"validation_loss": "probe_validation_loss"})
        of_probe = of_probe[["feature", "place", "baseline_loss", "probe_validation_loss"]]
        found[step] = table.merge(of_probe, on=["feature", "place"], how="left").assign(step=step)
    return [found[step] for step in sorted(found)]


def _autoencoder(
    series: CheckpointSeries, step: int, data: Data, folder: Path | None, options: Mapping[str, Any]
) -> SparseAutoencoder:
    """The autoencoder of a step, read from the folder where it is kept there."""
    checkpoint = series[step]
    settings, identity = settings_of(checkpoint.hooked(), data, **options), series.identity(step)
    path = None if folder is None else folder / f"step_{step:08d}"
    if path is not None and (path / CONFIG).is_file():
        kept = load(path)
        own = dict((kept.metadata or {}).get(OWN, {}))
        of_weights = own.pop("identity", None)
        own.pop("quality", None)
        here = as_read_back(settings)
        if own != here:
            different = [f"{name} {own.get(name)!r} there, {value!r} here" for name, value in here.items()
                         if own.get(name) != value]  # fmt: skip
            raise RunFolderError(
                f"{path} holds an autoencoder by other settings: {'; '.join(different)}. Use these settings, or "
                "another folder"
            )
        if of_weights == identity:
            return kept
    found = train(checkpoint, data, progress=False, **options)
    if path is None:
        return found
    own = {**(found.metadata or {}).get(OWN, {}), "identity": identity}
    found = replace(found, metadata={**(found.metadata or {}), OWN: own})
    found.save(path)
    return found


def _quality(sae: SparseAutoencoder) -> dict[str, Any]:
    names = ("explained_variance", "l0", "n_dead", "n_latents")
    return {name: getattr(sae.quality, name) if sae.quality else np.nan for name in names}


def _joined(by_step: Mapping[int, Probes]) -> pd.DataFrame:
    table = pd.concat([probes.table.assign(step=step) for step, probes in by_step.items()], ignore_index=True)
    table.insert(0, "step", table.pop("step"))
    return table
