"""Fitting the probes of one model: activations streamed site by site, all labels of a site solved together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from emergent_heads.analysis.linear_readouts import Activations, Readouts
from emergent_heads.analysis.probe_data import ProbeData, Site, Target
from emergent_heads.analysis.readout_scores import Scores, losses, scores
from emergent_heads.errors import NotFiniteError
from emergent_heads.models.hooked import HookedModel
from emergent_heads.randomness import numpy_generator

_TOKENS_AT_ONCE = 2**13  # of a forward pass
FitKey = tuple[str, int, int]
"""`(feature, place, layer)`."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A probe as it was fitted, with its scores.

    Attributes:
        layer: it reads the residual stream after this block, -1 for the embedding.
        target: what it reads.
        penalty: C, chosen on the validation rows.
        readouts: weights and intercepts of the components that vary.
        validation_loss: by which it is chosen.
        scores: on the test rows.
        shuffled: the same fitted to training labels in random order, and its test loss; None where not asked for.
    """

    layer: int
    target: Target
    penalty: float
    readouts: Readouts
    validation_loss: float
    scores: Scores
    shuffled: tuple[Readouts, float] | None

    @property
    def key(self) -> FitKey:
        return (*self.target.key, self.layer)


@dataclass(frozen=True, eq=False)
class Fitting:
    """How probes are fitted.

    Attributes:
        layers: which, -1 for the embedding.
        penalties: values of C to choose from, ascending.
        seed: of the shuffled labels.
        memory_gb: most activations held at a time, in 10^9 bytes; the site being solved takes a few times its own
            on top.
    """

    layers: tuple[int, ...]
    penalties: tuple[float, ...]
    seed: int
    memory_gb: float

    def fit(
        self,
        model: HookedModel,
        data: ProbeData,
        *,
        shuffled: bool,
        done: Callable[[], object] = lambda: None,
    ) -> list[Fit]:
        """Fits all probes of a model.

        Args:
            model: whose residual stream is read.
            data: rows and labels.
            shuffled: whether to fit shuffled labels as well.
            done: called after each layer of each site.

        Raises:
            NotFiniteError: the residual stream is not finite.
        """
        found = []
        for layer, site, x in self.blocks(model, data):
            found += self.fit_site(layer, site, x, shuffled=shuffled)
            done()
        return found

    # ---- activations ----

    def blocks(self, model: HookedModel, data: ProbeData) -> Iterator[tuple[int, Site, Float[Tensor, "here d_model"]]]:
        """The activations of each layer at each site, by as few passes as the memory allows."""
        todo = [(layer, site) for layer in self.layers for site in data.sites]
        while todo:
            taken, bytes_held = 0, 0
            for _, site in todo:
                bytes_held += 4 * len(site.rows) * model.d_model
                if taken and bytes_held > 1e9 * self.memory_gb:
                    break
                taken += 1
            blocks = _read_blocks(model, data, todo[:taken])
            for place, (layer, site) in enumerate(todo[:taken]):
                block, blocks[place] = blocks[place], torch.empty(0)  # its memory is free after use
                if not torch.isfinite(block).all():
                    raise NotFiniteError(
                        f"the residual stream of this {model.kind} after layer {layer} is NaN or infinite: its "
                        "weights are damaged, or its dtype overflows"
                    )
                yield layer, site, block
            todo = todo[taken:]

    # ---- probes of one site ----

    def fit_site(
        self,
        layer: int,
        site: Site,
        x: Float[Tensor, "here d_model"],
        *,
        shuffled: bool,
    ) -> list[Fit]:
        activations = Activations(x[site.train])
        found = []
        for continuous in (False, True):
            targets = [target for target in site.targets if target.continuous == continuous]
            if targets:
                found += self._fit_targets(layer, site, x, activations, targets, shuffled=shuffled)
        return found

    def _fit_targets(
        self,
        layer: int,
        site: Site,
        x: Float[Tensor, "here d_model"],
        activations: Activations,
        targets: Sequence[Target],
        *,
        shuffled: bool,
    ) -> list[Fit]:
        continuous = targets[0].continuous
        labels = torch.cat([target.labels for target in targets]).to(x.device)
        train, validation = labels[:, site.train], labels[:, site.validation]
        if continuous:
            path = activations.ridge(train, self.penalties)
        else:
            path = activations.logistic(train, self.penalties)
        by_penalty = np.stack([losses(each(x[site.validation]), validation, continuous=continuous) for each in path])
        parts = label_slices(targets)
        chosen = [int(by_penalty[:, part].mean(1).argmin()) for part in parts]
        readouts = [_part(path[penalty], part) for penalty, part in zip(chosen, parts, strict=True)]
        controls = self._shuffled(site, activations, train, chosen, parts, continuous) if shuffled else None
        fits = []
        for number, (target, part) in enumerate(zip(targets, parts, strict=True)):
            test = labels[part, site.test]
            control = None
            if controls is not None:
                read = controls[number](x[site.test])
                control = controls[number], float(losses(read, test, continuous=continuous).mean())
            fits.append(
                Fit(
                    layer=layer,
                    target=target,
                    penalty=self.penalties[chosen[number]],
                    readouts=readouts[number],
                    validation_loss=float(by_penalty[chosen[number], part].mean()),
                    scores=scores(readouts[number](x[site.test]), test, continuous=continuous),
                    shuffled=control,
                )
            )
        return fits

    def _shuffled(
        self,
        site: Site,
        activations: Activations,
        labels: Float[Tensor, "label row"],
        chosen: Sequence[int],
        parts: Sequence[slice],
        continuous: bool,
    ) -> list[Readouts]:
        """Readouts of labels in random order, at the penalties chosen for the labels in their own."""
        order = numpy_generator(self.seed, "shuffled labels", site.number).permutation(labels.shape[1])
        mixed = labels[:, torch.from_numpy(order).to(labels.device)]
        penalties = [self.penalties[number] for number in chosen]
        if continuous:
            solved = activations.ridge(mixed, self.penalties)
            return [_part(solved[number], part) for number, part in zip(chosen, parts, strict=True)]
        each = [c for c, part in zip(penalties, parts, strict=True) for _ in range(part.stop - part.start)]
        solved = activations.logistic_at(mixed, each)
        return [_part(solved, part) for part in parts]


def _read_blocks(
    model: HookedModel, data: ProbeData, wanted: Sequence[tuple[int, Site]]
) -> list[Float[Tensor, "here d_model"]]:
    """The residual stream at some layers and sites, by one pass over the rows."""
    layers = sorted({layer for layer, _ in wanted})
    sites = list({site.number: site for _, site in wanted}.values())
    column = {site.number: number for number, site in enumerate(sites)}
    positions = np.zeros((len(data.tokens), len(sites)), dtype=np.int64)
    for number, site in enumerate(sites):
        positions[site.rows, number] = site.positions
    where = torch.from_numpy(positions)
    device = "cpu" if model.device.type == "mps" else model.device  # which has no float64 to solve in
    blocks = [torch.empty(len(site.rows), model.d_model, device=device) for _, site in wanted]
    at_once = max(1, _TOKENS_AT_ONCE // data.tokens.shape[1])
    for first in range(0, len(data.tokens), at_once):
        rows = slice(first, first + at_once)
        resid = model.residual(data.tokens[rows], layers, where[rows])
        for block, (layer, site) in zip(blocks, wanted, strict=True):
            low, high = np.searchsorted(site.rows, [first, first + at_once])
            inside = torch.from_numpy(site.rows[low:high] - first).to(resid.device)
            block[low:high] = resid[layers.index(layer), inside, column[site.number]].float()
    return blocks


def label_slices(targets: Sequence[Target]) -> list[slice]:
    """Where each target's labels are among those of all."""
    ends = np.cumsum([len(target.labels) for target in targets]).tolist()
    return [slice(low, high) for low, high in pairwise([0, *ends])]


def _part(readouts: Readouts, part: slice) -> Readouts:
    return Readouts(readouts.weights[part], readouts.intercepts[part])
