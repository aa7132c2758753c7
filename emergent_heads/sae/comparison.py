"""Which latents of a sparse autoencoder carry a probed feature?

Two answers, at each place of a feature. By direction: the cosine of the probe's direction with those along which a
latent is read and written. By what is read: the loss of a readout that sees one latent and nothing else, between that
of the prior, which knows the labels' frequencies only, and that of the probe, which sees the whole residual stream.

One of some hundred latents tells something of any label. So the best latent is chosen on training rows and its loss is
told on test rows, those of the probe; and beside it stands the best of as many random latents: for each latent that is
active at the place a random direction, with the threshold at which it is active as often.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.ablation import probes_of
from emergent_heads.analysis.evaluation import model_name
from emergent_heads.analysis.linear_readouts import Readouts
from emergent_heads.analysis.probe_data import Features, ProbeData, Site, Target, choose_features, draw_data
from emergent_heads.analysis.probe_fits import Fitting
from emergent_heads.analysis.probes import PENALTIES, Probe, Probes, ProbeSeries
from emergent_heads.analysis.readout_scores import losses
from emergent_heads.checkpoints.known_issues import marks_of
from emergent_heads.errors import ArgumentError, ModelMismatchError, whole_number
from emergent_heads.models.hooked import HookedModel, hooked
from emergent_heads.randomness import numpy_generator, torch_generator
from emergent_heads.results import Result
from emergent_heads.sae.autoencoder import SparseAutoencoder, latent_names
from emergent_heads.sae.one_latent import Sparse, fit
from emergent_heads.tasks.task import PromptTask, SequenceTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Component = tuple[str, int, int]
"""`(feature, place, component)`."""

_SAME_LOSS = 0.01, 1e-3  # share of the loss, and nats, by which a probe's loss may differ from what was measured
_MEMORY_GB = 1.0
_KEY = ["feature", "place", "component"]
_LOSSES = ("prior_loss", "probe_loss", "latent_loss", "random_loss", "shuffled_loss")


@dataclass(frozen=True, repr=False, eq=False)
class LatentComparison(Result):
    """Latents of one autoencoder against the probes at its layer.

    Attributes:
        table: one row per `feature`, `place` and `component` (of features with several labels; else 0): `kind`,
            `layer`; on the probes' test rows, in nats (mean squared error for continuous features), the `prior_loss`,
            the `probe_loss`, and the `latent_loss` of the one `latent` that is best on the training rows; beside it
            the `random_loss` of the best of as many random latents, and the `shuffled_loss` of the best latent for
            training labels in random order. `gap_closed` and `random_gap_closed`: the share of the way from the prior
            to the probe that one latent goes (NaN where the probe is not below the prior). `validation_loss` of the
            latent; its `slope` (above 0: active means 1); `active`, the share of test rows in which it is not 0;
            `decoder_cosine` and `encoder_cosine` of the probe's direction with those of the latent.
            `nearest_latent` and `nearest_cosine`: of the latents that are active at this place the one whose decoder
            direction is nearest to the probe's, or to its opposite; `random_cosine`, the size of that of the nearest
            of as many random directions.
        latents: for each of these rows the best latents on the training rows, by `rank` from 0, with the same numbers.
    """

    latents: pd.DataFrame

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Per feature the mean losses over places and components, and the share of the gap that these close."""
        means: Any = self.table.groupby("feature", sort=False, as_index=False)[list(_LOSSES)].mean()
        means.insert(1, "n", self.table.groupby("feature", sort=False).size().to_numpy())
        return means.assign(**_gaps(means))

    def latents_of(self, feature: str, n: int = 1) -> dict[int, tuple[int, ...]]:
        """The `n` best latents of each component at each place of a feature, without repetition.

        Raises:
            ArgumentError: the feature was not compared, or more latents are asked for than were kept.
        """
        rows = self.latents.loc[self.latents["feature"] == feature]
        if rows.empty:
            known = ", ".join(dict.fromkeys(self.table["feature"]))
            raise ArgumentError(f"feature {feature!r} was not compared; {known} were")
        if n > (most := int(rows["rank"].max()) + 1):
            raise ArgumentError(
                f"n is {n}, and the {most} best latents were kept; give n_best={n} to compare_features"
            )
        kept = rows.loc[rows["rank"] < n]
        return {
            int(place): tuple(dict.fromkeys(of_place["latent"].astype(int)))  # pyright: ignore[reportArgumentType]
            for place, of_place in kept.groupby("place", sort=True)
        }

    def headline(self) -> str:
        columns = self.summary[["feature", "gap_closed", "random_gap_closed"]].itertuples(index=False, name=None)
        said = [f"{feature} {closed:.2f} (random {random:.2f})" for feature, closed, random in columns]
        return (
            f"LatentComparison: {self.about['autoencoder']} of {self.about['model']}; share of the way from prior to "
            f"probe that the best latent goes: {', '.join(said)}{self.caution}"
        )

    def shown(self) -> pd.DataFrame:
        return self.summary

    def plot(self) -> "Figure":
        """Loss as a share of the prior's at each place: the probe, the best latent, the best random latent."""
        from emergent_heads.plots import sae as sae_plots

        return sae_plots.comparison(self.table)


def compare_features(
    probes: Probes | ProbeSeries,
    sae: SparseAutoencoder,
    model: Any,
    task: SequenceTask | PromptTask,
    *,
    features: Features = None,
    n_best: int = 5,
    seed: int = 0,
    progress: bool = True,
) -> LatentComparison:
    """Finds the latents that carry probed features, at every place, on the rows that the probes were fitted to.

    Args:
        probes: by `fit_probes` or `probe_series` (those of the checkpoint's step, or of the last step); the ones at
            the autoencoder's layer are used.
        sae: the autoencoder.
        model: what was probed: a checkpoint, or a model of any supported kind.
        task: what it was probed on.
        features: names, or features of your own, which must be given here again; None for all that were probed.
        n_best: how many latents of each feature, place and component are kept in `.latents`.
        seed: of the random latents and the shuffled labels.
        progress: whether to show a bar.

    Raises:
        ArgumentError: the autoencoder's layer is not known or was not probed, or a feature was not.
        ModelMismatchError: the autoencoder has another width than the model, or the probes are not of this model and
            task: their losses are not the measured ones.
    """
    probes = probes_of(model, probes)
    comparing = Comparing.open(hooked(model), task, probes, features, seed=seed)
    n_best = whole_number("n_best", n_best, least=1)
    with tqdm(total=comparing.n_sites, desc="sites", leave=False, **notebook.bar(progress)) as bar:
        found = comparing.compare(hooked(model), probes, sae, n_best=n_best, done=bar.update)
    table = found.table.loc[found.table["rank"] == 0]
    about = {
        "model": model_name(model),
        "task": repr(task),
        "task_name": task.name,
        "autoencoder": repr(sae),
        "features": list(dict.fromkeys(table["feature"])),
        "layer": sae.layer,
        "n_latents": sae.d_sae,
        "rows": dict(zip(("train", "validation", "test"), comparing.data.sizes, strict=True)),
        "seed": seed,
        "known_issues": marks_of(model),
    }
    kept = ["feature", "place", "component", "rank", "latent", "train_loss", "latent_loss", "slope", "active"]
    kept += ["decoder_cosine", "encoder_cosine"]
    table = table.drop(columns=["rank", "train_loss"]).reset_index(drop=True)
    return LatentComparison(table, found.table.loc[:, kept].reset_index(drop=True), about=about)


# ---- comparing ----


@dataclass(frozen=True, eq=False)
class Compared:
    """What was found of one model.

    Attributes:
        table: as `LatentComparison.table`, one row for each of the best latents, with `rank` and `train_loss`.
        followed: test and validation loss of given latents, by feature, place and component.
    """

    table: pd.DataFrame
    followed: Mapping[Component, tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Comparing:
    """The rows that probes were fitted to, to compare latents on.

    Attributes:
        data: the rows, divided as the probes' were.
        seed: of the controls.
    """

    data: ProbeData
    seed: int

    @classmethod
    def open(
        cls, model: HookedModel, task: SequenceTask | PromptTask, probes: Probes, features: Features, *, seed: int
    ) -> "Comparing":
        """Draws the same rows again."""
        probed = probes.features
        chosen = choose_features(task, list(probed) if features is None else features)
        if odd := [feature.name for feature in chosen if feature.name not in probed]:
            raise ArgumentError(f"no probe of a feature {odd[0]!r}; there are probes of {', '.join(probed)}")
        if missing := [name for name in ("n_train", "n_test", "seed") if name not in probes.about]:
            raise ArgumentError(
                f"the probes do not say the {missing[0]} they were fitted with; give what fit_probes or probe_series "
                "returned"
            )
        options = {name: int(probes.about[name]) for name in ("n_train", "n_test", "seed")}
        return cls(draw_data(task, chosen, model, **options), seed)

    @property
    def n_sites(self) -> int:
        return len(self.data.sites)

    def compare(
        self,
        model: HookedModel,
        probes: Probes,
        sae: SparseAutoencoder,
        *,
        n_best: int,
        follow: tuple[SparseAutoencoder, Mapping[Component, int]] | None = None,
        done: Callable[[], object] = lambda: None,
    ) -> Compared:
        """Compares the latents with the probes of a model at the autoencoder's layer.

        Args:
            model: whose residual stream is read.
            probes: of this model.
            sae: the autoencoder.
            n_best: rows per feature, place and component.
            follow: another autoencoder of the same layer, and which of its latents are read as well.
            done: called after each site.
        """
        layer = layer_for(sae, model, probes)
        rows: list[dict[str, Any]] = []
        followed: dict[Component, tuple[float, float]] = {}
        fitting = Fitting((layer,), PENALTIES, self.seed, _MEMORY_GB)
        for _, site, x in fitting.blocks(model, self.data):
            reading = _Reading(site, x, sae, self.seed)
            for target in site.targets:
                if (key := (target.feature, target.place, layer)) in probes.weights:
                    rows += reading.rows(target, probes.weights[key], self._measured(probes, key), n_best)
                    if follow is not None:
                        followed |= reading.followed(target, *follow)
            done()
        table = pd.DataFrame(rows).sort_values([*_KEY, "rank"], kind="stable")
        order = {name: number for number, name in enumerate(probes.features)}
        table = table.sort_values("feature", key=lambda names: names.map(order), kind="stable").reset_index(drop=True)
        return Compared(table.assign(**_gaps(table)), followed)

    def _measured(self, probes: Probes, key: tuple[str, int, int]) -> float:
        table = probes.table
        here = (table["feature"] == key[0]) & (table["place"] == key[1]) & (table["layer"] == key[2])
        return float(table.loc[here, "loss"].iloc[0])


def layer_for(sae: SparseAutoencoder, model: HookedModel, probes: Probes) -> int:
    """The layer that an autoencoder reads, where probes and model go with it.

    Raises:
        ArgumentError: it is not known, or was not probed.
        ModelMismatchError: another width, or fewer layers.
    """
    if sae.layer is None:
        raise ArgumentError(
            f"the autoencoder reads {sae.name}, and features are read from the residual stream after a layer: where "
            "the folder names that in another way than TransformerLens does, say eh.sae.load(path, layer=...)"
        )
    if sae.d_in != model.d_model:
        raise ModelMismatchError(
            f"the autoencoder reads a residual stream of width {sae.d_in} and this model's is {model.d_model} wide"
        )
    if sae.layer not in (probed := sorted(set(probes.table["layer"]))):
        raise ArgumentError(
            f"the autoencoder reads layer {sae.layer} and the probes {latent_names(probed)}; probe its layer too"
        )
    return sae.layer


class _Reading:
    """The latents at one site, real and random ones."""

    def __init__(self, site: Site, x: Float[Tensor, "here d"], sae: SparseAutoencoder, seed: int) -> None:
        self._site, self._x, self._sae = site, x, sae
        self._latents = Sparse.of(sae.encode, x, sae.d_sae)
        self._train = self._latents.only(site.train)
        generator = torch_generator(seed, "random latents")
        directions = torch.randn(sae.d_sae, sae.d_in, generator=generator)
        self._random_directions = torch.nn.functional.normalize(directions, dim=1)
        self._random = self._random_latents()
        self._order = torch.from_numpy(
            numpy_generator(seed, "shuffled labels of latents", site.number).permutation(site.ends[0])
        )

    def _random_latents(self) -> Sparse:
        """Random directions above thresholds at which each is as often active in the training rows as its latent.

        Latents that are never active here have no counterpart: neither could be chosen.
        """
        counts = self._train.active.long()
        there = counts.nonzero()[:, 0]
        directions = self._random_directions[there].to(self._x)
        read = directions @ self._x[self._site.train].T
        ordered = read.sort(dim=1, descending=True).values
        above = counts[there].clamp_max(ordered.shape[1] - 1).to(read.device)
        thresholds = ordered.gather(1, above[:, None])[:, 0]

        def encode(x: Tensor) -> Tensor:
            return (x @ directions.T - thresholds).relu()

        return Sparse.of(encode, self._x, max(1, len(there)))

    def rows(self, target: Target, probe: Probe, measured: float, n_best: int) -> list[dict[str, Any]]:
        """Rows of the table."""
        site, continuous = self._site, target.continuous
        labels = target.labels
        train, test = labels[:, site.train], labels[:, site.test]
        n = len(labels)
        components = np.flatnonzero(target.varies)
        read = Readouts(torch.from_numpy(probe.weights[components]), torch.from_numpy(probe.intercepts[components]))
        probe_losses = losses(read(self._x[site.test].cpu()), test, continuous=continuous)
        self._check(target, float(probe_losses.mean()), measured)
        means = train.double().mean(1)
        prior = (means if continuous else torch.logit(means))[:, None].expand(n, test.shape[1])
        prior_losses = losses(prior, test, continuous=continuous)
        own = fit(self._train, torch.cat([train, train[:, self._order]]), continuous=continuous)
        train_losses = own.losses(self._train, torch.cat([train, train[:, self._order]]))
        held = {
            part: own.losses(self._latents.only(rows), labels[:, rows].repeat(2, 1))
            for part, rows in (("validation", site.validation), ("test", site.test))
        }
        random_losses = self._random_losses(train, test, continuous)
        active = self._latents.only(site.test).active / test.shape[1]
        order = train_losses.sort(dim=1, stable=True).indices
        rows = []
        for index, component in enumerate(components.tolist()):
            cosines = self._cosines(probe.weights[component])
            shuffled = int(order[n + index, 0])
            common = {
                "feature": target.feature,
                "place": target.place,
                "component": component,
                "kind": target.kind,
                "layer": probe.layer,
                "prior_loss": float(prior_losses[index]),
                "probe_loss": float(probe_losses[index]),
                "random_loss": float(random_losses[index]),
                "shuffled_loss": float(held["test"][n + index, shuffled]),
                **{name: cosines[name] for name in ("nearest_latent", "nearest_cosine", "random_cosine")},
            }
            for rank, latent in enumerate(order[index, :n_best].tolist()):
                rows.append(
                    {
                        **common,
                        "rank": rank,
                        "latent": latent,
                        "train_loss": float(train_losses[index, latent]),
                        "latent_loss": float(held["test"][index, latent]),
                        "validation_loss": float(held["validation"][index, latent]),
                        "slope": float(own.slopes[index, latent]),
                        "active": float(active[latent]),
                        "decoder_cosine": float(cosines["decoder"][latent]),
                        "encoder_cosine": float(cosines["encoder"][latent]),
                    }
                )
        return rows

    def followed(
        self, target: Target, sae: SparseAutoencoder, latents: Mapping[Component, int]
    ) -> dict[Component, tuple[float, float]]:
        """Test and validation loss of given latents of another autoencoder."""
        found = {}
        for index, component in enumerate(np.flatnonzero(target.varies).tolist()):
            key = (target.feature, target.place, component)
            if key not in latents:
                continue
            column = latents[key]
            one = Sparse.of(lambda x, at=column: sae.encode(x)[:, [at]], self._x, 1)
            labels = target.labels[[index]]
            site = self._site
            readout = fit(one.only(site.train), labels[:, site.train], continuous=target.continuous)
            test, validation = (
                float(readout.losses(one.only(part), labels[:, part])) for part in (site.test, site.validation)
            )
            found[key] = test, validation
        return found

    def _random_losses(self, train: Tensor, test: Tensor, continuous: bool) -> Float[np.ndarray, " component"]:
        """Test loss of the random latent that is best on the training rows."""
        fitted_to = self._random.only(self._site.train)
        readouts = fit(fitted_to, train, continuous=continuous)
        best = readouts.losses(fitted_to, train).argmin(dim=1, keepdim=True)
        return readouts.losses(self._random.only(self._site.test), test).gather(1, best)[:, 0].numpy()

    def _cosines(self, direction: Float[np.ndarray, " d"]) -> dict[str, Any]:
        unit = torch.nn.functional.normalize(torch.from_numpy(direction).float(), dim=0)
        decoder, encoder = (getattr(self._sae, f"{name}_directions").cpu() @ unit for name in ("decoder", "encoder"))
        there: Int[Tensor, " active"] = self._train.active.nonzero()[:, 0]
        found = {"decoder": decoder, "encoder": encoder, "nearest_latent": -1}
        if not len(there):
            return {**found, "nearest_cosine": float("nan"), "random_cosine": float("nan")}
        nearest = int(there[decoder[there].abs().argmax()])
        random = float((self._random_directions[there] @ unit).abs().max())
        return {
            **found,
            "nearest_latent": nearest,
            "nearest_cosine": float(decoder[nearest]),
            "random_cosine": random,
        }

    def _check(self, target: Target, found: float, measured: float) -> None:
        share, nats = _SAME_LOSS
        if abs(found - measured) > share * measured + nats:
            raise ModelMismatchError(
                f"the probe of {target.feature!r} at place {target.place} has a test loss of {found:.4f} here and "
                f"{measured:.4f} in its table: the probes are of another checkpoint, or of another task"
            )


def _gaps(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Shares of the way from the prior to the probe."""
    gap = table["prior_loss"] - table["probe_loss"]
    gap = gap.where(gap > 0)
    return {
        name: (table["prior_loss"] - table[loss]) / gap
        for name, loss in (("gap_closed", "latent_loss"), ("random_gap_closed", "random_loss"))
    }
