"""Where features are taken out of a model, and on which examples it is measured what that costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from emergent_heads.analysis.probe_data import choose_features
from emergent_heads.analysis.probes import Probe, Probes
from emergent_heads.errors import ArgumentError, ModelMismatchError
from emergent_heads.models.hooked import EMBEDDING, HookedModel
from emergent_heads.models.residual_engine import Reads
from emergent_heads.randomness import numpy_generator
from emergent_heads.tasks.features import Feature, FeatureValues
from emergent_heads.tasks.task import PromptTask, SequenceTask

SPLIT, REFERENCE_SPLIT = "ablation", "ablation reference"


@dataclass(frozen=True, eq=False)
class Examples:
    """Rows of a task, sorted by where their answers begin.

    Attributes:
        inputs: `[row, pos]`, what the model reads.
        reads: which of its predictions count.
        in_loss, in_answer: `[row, read]`, for the loss, and for exact match.
    """

    inputs: Int[Tensor, "row pos"]
    reads: Reads
    in_loss: Bool[np.ndarray, "row read"]
    in_answer: Bool[np.ndarray, "row read"]
    _all_tokens: Int[np.ndarray, "any_row pos"]
    _rows: Int[np.ndarray, " row"]
    _values: dict[int, FeatureValues] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.inputs)

    def values(self, feature: Feature) -> FeatureValues:
        """The feature's labels and positions in these rows; -1 also at tokens that the model does not read.

        Raises:
            ArgumentError: it cannot be read from these sequences.
        """
        if id(feature) not in self._values:
            try:
                values = feature.read(self._all_tokens)
            except ArgumentError:
                raise
            except Exception as error:
                raise ArgumentError(
                    f"feature {feature.name!r} cannot be read from these sequences ({type(error).__name__}: {error}); "
                    "is it a feature of another task?"
                ) from error
            labels, positions = values.labels[self._rows], values.positions[self._rows]
            self._values[id(feature)] = FeatureValues(
                labels, np.where(positions < self.inputs.shape[1], positions, -1)
            )
        return self._values[id(feature)]

    @cached_property
    def last_reads(self) -> Int[np.ndarray, " row"]:
        """The last position that is read in each row."""
        return self.reads.positions.max(dim=1).values.numpy()


def draw_examples(
    task: SequenceTask | PromptTask, model: HookedModel, n: int, n_reference: int, seed: int
) -> tuple[Examples, Examples]:
    """Rows to measure on, and others to fit on: of splits of their own, or parts of a task's fixed prompts.

    Raises:
        ArgumentError: tokens that the model does not know, or too few prompts to divide.
    """
    if isinstance(task, PromptTask):
        made = _divided_prompts(task, model, n, n_reference, seed)
    else:
        made = (_drawn(task, n, seed, SPLIT), _drawn(task, n_reference, seed, REFERENCE_SPLIT))
    if (largest := max(int(examples.inputs.max()) for examples in made)) >= model.vocabulary_size:
        raise ArgumentError(
            f"{task.name} has token ids up to {largest} and the model knows {model.vocabulary_size}; give a model of "
            "this task"
        )
    return made


def _drawn(task: SequenceTask, n: int, seed: int, split: str) -> Examples:
    batch = task.batch(n, seed=seed, split=split)
    loss, answer = batch.loss_mask.numpy(), batch.answer_mask.numpy()
    counts = loss | answer
    order = np.argsort(counts.argmax(axis=1), kind="stable")
    tokens, loss, answer, counts = (each[order] for each in (batch.tokens.numpy(), loss, answer, counts))
    place, there = _packed(counts)
    reads = Reads(
        torch.from_numpy(np.where(there, place - 1, -1)),  # the position before a token predicts it
        torch.from_numpy(np.take_along_axis(tokens, place, axis=1)),
    )
    in_loss, in_answer = (np.take_along_axis(mask, place, axis=1) & there for mask in (loss, answer))
    return Examples(torch.from_numpy(tokens[:, :-1]), reads, in_loss, in_answer, tokens, np.arange(n))


def _packed(mask: Bool[np.ndarray, "row pos"]) -> tuple[Int[np.ndarray, "row read"], Bool[np.ndarray, "row read"]]:
    """The positions under the mask, packed to the left, and which of the entries are such."""
    counts = mask.sum(axis=1)
    place = np.argsort(~mask, axis=1, kind="stable")[:, : max(1, counts.max())]
    return place, np.arange(place.shape[1]) < counts[:, None]


def _divided_prompts(
    task: PromptTask, model: HookedModel, n: int, n_reference: int, seed: int
) -> tuple[Examples, Examples]:
    batch = task.batch(model.tokenizer, vocabulary_size=model.vocabulary_size, context=model.context)
    order = numpy_generator(seed, "ablation prompts").permutation(len(batch))
    if len(order) < 2:
        raise ArgumentError(f"{task.name} has {len(order)} prompts; half of them are fitted on, so give 2 or more")
    half = max(1, len(order) // 2)
    tokens, made = batch.tokens.cpu(), []
    for rows in (order[:half][:n], order[half:][:n_reference]):
        reads = Reads(batch.positions.cpu()[rows][:, None], batch.targets.cpu()[rows][:, None])
        every = np.ones((len(rows), 1), dtype=bool)
        made.append(Examples(tokens[rows], reads, every, every, tokens.numpy(), rows))
    return made[0], made[1]


@dataclass(frozen=True, eq=False)
class Site:
    """One place of a feature after one layer, where a subspace is taken out.

    Attributes:
        probe: whose rows span the subspace.
        penalty: C of the probe, as scikit-learn's.
        last: whether no later layer is edited at this place.
    """

    probe: Probe
    penalty: float
    last: bool

    @property
    def place(self) -> int:
        return self.probe.place

    @property
    def layer(self) -> int:
        return self.probe.layer


def sites_of(probes: Probes, feature: str, layers: str) -> list[Site]:
    """Where a feature is taken out: at each place after the layer of its best probe, or after later ones as well."""
    table = probes.table.loc[probes.table["feature"] == feature]
    found = []
    for place, rows in table.groupby("place", sort=True):
        best = int(rows.loc[rows["is_best"].astype(bool), "layer"].iloc[0])
        rows = rows.sort_values("layer")
        chosen = rows.loc[rows["layer"] == best if layers == "probe" else rows["layer"] >= best]
        penalties = chosen["penalty"] if "penalty" in chosen else [1.0] * len(chosen)
        for number, (layer, penalty) in enumerate(zip(chosen["layer"], penalties, strict=True), start=1):
            probe = probes.weights[feature, int(place), int(layer)]  # pyright: ignore[reportArgumentType]
            found.append(Site(probe, float(penalty), number == len(chosen)))
    return sorted(found, key=lambda site: (site.layer, site.place))


def choose_probed_features(
    task: Any, probes: Probes, features: str | Feature | Sequence[str | Feature] | None, model: HookedModel
) -> tuple[Feature, ...]:
    """The features to take out: those asked for, or all that have probes.

    Raises:
        ArgumentError: a feature that the task does not have, or that has no probe.
        ModelMismatchError: the probes are of a model of another width or with more layers.
    """
    for probe in probes.weights.values():
        if probe.weights.shape[1] != model.d_model:
            raise ModelMismatchError(
                f"the probes read a residual stream of width {probe.weights.shape[1]} and this model's is "
                f"{model.d_model} wide; give probes of this model"
            )
        if not EMBEDDING <= probe.layer < model.n_layers:
            raise ModelMismatchError(
                f"there is a probe of layer {probe.layer} and this model has layers 0 to {model.n_layers - 1}; give "
                "probes of this model"
            )
    probed = tuple(dict.fromkeys(feature for feature, _, _ in probes.weights))
    chosen = choose_features(task, probed if features is None else features)
    for feature in chosen:
        if feature.name not in probed:
            raise ArgumentError(
                f"no probe of a feature {feature.name!r}; there are probes of {', '.join(probed) or 'none'}. Fit some "
                "with fit_probes"
            )
    return chosen


def check_fit(feature: Feature, values: FeatureValues, sites: Sequence[Site]) -> None:
    """Checks that the probes are of this feature, in the size at hand.

    Raises:
        ArgumentError: they are not, they have no direction, or no row has a place that is probed.
    """
    n_places, n_components = values.labels.shape[1:]
    places = [site.place for site in sites]
    if max(places) >= n_places:
        raise ArgumentError(
            f"feature {feature.name!r} has {n_places} places in this task and there are probes of its place "
            f"{max(places)}; give probes of this task"
        )
    if odd := [len(site.probe.weights) for site in sites if len(site.probe.weights) != n_components]:
        raise ArgumentError(
            f"feature {feature.name!r} has {n_components} components in this task and its probes have {odd[0]}; give "
            "probes of this task"
        )
    if not any(np.any(site.probe.weights) for site in sites):
        raise ArgumentError(
            f"the probes of {feature.name!r} have no direction (all their weights are 0), so nothing can be taken out"
        )
    positions = values.positions[:, sorted(set(places))]
    if not (positions >= 0).any():
        raise ArgumentError(
            f"feature {feature.name!r}: none of the {len(positions)} rows has a place that is probed and that the "
            "model reads"
        )
    ordered = np.sort(positions, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise ArgumentError(
            f"feature {feature.name!r} has two places at one token; make them one place, of the kind multilabel where "
            "several labels are read there"
        )
