"""What is taken out of the residual stream: a feature, and what it is compared with.

Kinds of runs, all at the feature's own places and layers:

* "feature": the subspace of the feature's probes, or what LEACE erases.
* "random": a random subspace of the same rank.
* "matched_variance": a random subspace of the same rank, orthogonal to the feature's, in which the removed component
  has the same mean square, or as nearly as there is one.
* "shuffled_labels": the same with probes (or LEACE) fitted on the feature's labels in random order.
* "other_features": the subspace of another feature of the task, at the place of it that is read at the same token
  (or nearest to it), by its probe after the same layer where there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from emergent_heads.analysis.ablation_examples import Examples, Site
from emergent_heads.analysis.linear_readouts import Activations
from emergent_heads.analysis.probes import Probe, Probes
from emergent_heads.analysis.subspaces import (
    How,
    Moments,
    Removal,
    basis_removal,
    complement,
    erasure,
    matched_bases,
    overlap,
    probe_removal,
    random_bases,
)
from emergent_heads.models.residual_engine import Edit
from emergent_heads.randomness import numpy_generator
from emergent_heads.tasks.features import Feature

Control = Literal["random", "matched_variance", "shuffled_labels", "other_features"]
FEWEST_ROWS = 20
"""Reference rows that a place needs."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of one kind.

    Attributes:
        kind: "feature" or a kind of control.
        names: per run, the other feature, or "".
        removals: what is taken out at each of the sites, one draw per run.
        same_position: per run, the share of places that the other feature is read at as well; NaN for other kinds.
    """

    kind: str
    names: tuple[str, ...]
    removals: Sequence[Removal]
    same_position: Float[np.ndarray, " run"]


def edits_of(
    removals: Sequence[Removal], sites: Sequence[Site], positions: Int[np.ndarray, "row place"], like: Tensor
) -> list[Edit]:
    """The edits that take out one removal at each site, one edit per layer; tensors as `like`."""
    made = []
    for layer in sorted({site.layer for site in sites}):
        here = [number for number, site in enumerate(sites) if site.layer == layer]
        parts = [removals[number] for number in here]
        rank = max(part.read.shape[2] for part in parts)
        read, write = (
            torch.stack([_wider(getattr(part, name), rank) for part in parts], dim=1) for name in ("read", "write")
        )
        target = torch.stack([_wider(part.target, rank) for part in parts], dim=1)[:, None]
        at = torch.from_numpy(positions[:, [sites[number].place for number in here]])
        made.append(Edit(layer, at.to(like.device), read.to(like), write.to(like), target.to(like)))
    return made


@dataclass(frozen=True, eq=False)
class Reference:
    """Reference rows at one site that have the place: residual stream, labels, and which rows they are."""

    x: Float[Tensor, "row d_model"]
    labels: Float[Tensor, "row component"]
    rows: Int[np.ndarray, " row"]
    moments: Moments


@dataclass(frozen=True, eq=False)
class Ablated:
    """One feature to be taken out of a model.

    Attributes:
        feature: it.
        sites: where, by layer and place.
        reference: of each site.
        runs: the feature's own run first, then the controls.
    """

    feature: Feature
    sites: Sequence[Site]
    reference: Sequence[Reference]
    runs: Sequence[Runs]

    def overlaps(self, runs: Runs) -> Float[np.ndarray, " run"]:
        """Mean over sites of the share of the feature's subspace that each run takes out as well."""
        of_feature = self.runs[0].removals
        each = [overlap(*pair) for pair in zip(runs.removals, of_feature, strict=True)]
        return torch.stack(each).mean(0).numpy()

    def variance_shares(self, runs: Runs) -> Float[np.ndarray, " run"]:
        """Mean over sites of the share of the residual stream's variance that each run takes out."""
        each = [
            removal.variance_share(reference.moments)
            for removal, reference in zip(runs.removals, self.reference, strict=True)
        ]
        return torch.stack(each).mean(0).numpy()

    def ranks(self, runs: Runs) -> Float[np.ndarray, " run"]:
        """Mean rank over sites."""
        return torch.stack([removal.ranks.double() for removal in runs.removals]).mean(0).numpy()


def reference_at(
    feature: Feature,
    sites: Sequence[Site],
    examples: Examples,
    resid: Mapping[tuple[str, int, int], Float[Tensor, "row d_model"]],
) -> list[Reference]:
    """The reference rows of each site, from the residual stream of all by feature, place and layer."""
    values, found = examples.values(feature), []
    for site in sites:
        rows = np.flatnonzero(values.positions[:, site.place] >= 0)
        x = resid[feature.name, site.place, site.layer][torch.from_numpy(rows)]
        labels = torch.from_numpy(values.labels[rows, site.place])
        found.append(Reference(x, labels, rows, Moments.of(x)))
    return found


def plan(
    feature: Feature,
    sites: Sequence[Site],
    reference: Sequence[Reference],
    own: Sequence[Removal],
    others: Mapping[Feature, Probes],
    examples: Examples,
    *,
    how: How,
    kinds: Sequence[Control],
    controls: int,
    seed: int,
) -> Ablated:
    """What is taken out in every run.

    Args:
        feature, sites, reference: of the feature.
        own: what takes the feature out at each site.
        others: the task's other features, and where their probes are.
        examples: the reference rows.
        how: as in `ablate_features`.
        kinds: of controls.
        controls: draws of each random kind.
        seed: of the draws.
    """
    runs = [Runs("feature", ("",), own, np.full(1, np.nan))]
    for kind in kinds:
        if kind == "other_features":
            runs += [_other_features(feature, sites, reference, others, examples, how)] if others else []
        elif controls:
            drawn = [
                _drawn(kind, how, site, at, removal, controls, numpy_generator(seed, kind, feature.name, *_key(site)))
                for site, at, removal in zip(sites, reference, own, strict=True)
            ]
            runs.append(Runs(kind, ("",) * controls, drawn, np.full(controls, np.nan)))
    return Ablated(feature, sites, reference, runs)


def _drawn(
    kind: str, how: How, site: Site, at: Reference, own: Removal, n: int, generator: np.random.Generator
) -> Removal:
    """Random removals at one site."""
    rank, d = int(own.ranks[0]), at.x.shape[1]
    if kind == "random":
        return basis_removal(how, random_bases(n, d, rank, generator), at.moments)
    if kind == "matched_variance":
        squares = at.moments.second if how == "projection" else at.moments.covariance
        rest = complement(own)  # a control that holds the feature's own direction would be none
        bases = matched_bases(n, rank, rest.T @ squares @ rest, float(own.mean_square(at.moments)[0]), generator)
        return basis_removal(how, rest @ bases, at.moments)
    mixed = torch.stack([at.labels[torch.from_numpy(generator.permutation(len(at.labels)))] for _ in range(n)])
    if how == "leace":
        return erasure(at.x, mixed, at.moments)
    return probe_removal(how, *_fitted(site, at.x, mixed), at.moments)


def _fitted(
    site: Site, x: Float[Tensor, "row d"], labels: Float[Tensor, "draw row component"]
) -> tuple[Float[Tensor, "draw component d"], Float[Tensor, "draw component"]]:
    """Probes of these labels, by the solver and at the penalty of the site's own probe; components that vary only."""
    varies = labels[0].amin(0) < labels[0].amax(0)
    wanted = labels[:, :, varies].mT
    n_draws, n_components = wanted.shape[:2]
    if not n_components:
        return x.new_zeros(n_draws, 1, x.shape[1]).double(), x.new_zeros(n_draws, 1).double()
    flat = wanted.flatten(0, 1)
    solver = Activations(x)
    if site.probe.kind == "continuous":
        (readouts,) = solver.ridge(flat, [site.penalty])
    else:
        readouts = solver.logistic_at(flat, [site.penalty] * len(flat))
    return readouts.weights.unflatten(0, (n_draws, -1)), readouts.intercepts.unflatten(0, (n_draws, -1))


def _other_features(
    feature: Feature,
    sites: Sequence[Site],
    reference: Sequence[Reference],
    others: Mapping[Feature, Probes],
    examples: Examples,
    how: How,
) -> Runs:
    """One run per other feature."""
    by_site: list[list[Removal]] = [[] for _ in sites]
    same = np.zeros((len(others), len(sites)))
    for number, (other, probes) in enumerate(others.items()):
        values = examples.values(other)
        for index, (site, at) in enumerate(zip(sites, reference, strict=True)):
            own_positions = examples.values(feature).positions[at.rows, site.place]
            place, same[number, index] = _nearest_place(other, probes, values.positions[at.rows], own_positions)
            if how == "leace":
                there = np.flatnonzero(values.positions[at.rows, place] >= 0)
                x = at.x[torch.from_numpy(there)]
                labels = torch.from_numpy(values.labels[at.rows[there], place])
                by_site[index].append(erasure(x, labels[None], Moments.of(x)))
            else:
                probe = _probe_near(probes, other.name, place, site.layer)
                by_site[index].append(probe_removal(how, probe.weights, probe.intercepts, at.moments))
    names = tuple(other.name for other in others)
    return Runs("other_features", names, [_together(removals) for removals in by_site], same.mean(1))


def _nearest_place(
    other: Feature,
    probes: Probes,
    positions: Int[np.ndarray, "row place"],
    own: Int[np.ndarray, " row"],
) -> tuple[int, float]:
    """The probed place of another feature that is nearest to `own` over the rows; share of rows where they agree."""
    probed = sorted({place for name, place, _ in probes.weights if name == other.name})
    there = positions[:, probed] >= 0
    distance = np.where(there, np.abs(positions[:, probed] - own[:, None]), positions.max() + 1)
    best = int(distance.mean(axis=0).argmin())
    return probed[best], float((distance[:, best] == 0).mean())


def _probe_near(probes: Probes, feature: str, place: int, layer: int) -> Probe:
    """The probe after this layer, or after the nearest one that was probed."""
    layers = [at for name, where, at in probes.weights if (name, where) == (feature, place)]
    return probes.weights[feature, place, min(layers, key=lambda at: (abs(at - layer), at))]


def _together(removals: Sequence[Removal]) -> Removal:
    """Removals of different ranks as draws of one."""
    rank = max(removal.read.shape[2] for removal in removals)
    read, write, target = (
        torch.cat([_wider(getattr(removal, name), rank) for removal in removals])
        for name in ("read", "write", "target")
    )
    return Removal(read, write, target, torch.cat([removal.ranks for removal in removals]))


def _wider(columns: Tensor, rank: int) -> Tensor:
    """Zero columns added up to this rank."""
    return functional.pad(columns, (0, rank - columns.shape[-1]))


def _key(site: Site) -> tuple[int, int]:
    return site.place, site.layer
