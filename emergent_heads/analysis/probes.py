"""Probes: linear readouts of a feature from the residual stream, at every layer and place."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from emergent_heads.results import Result


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


@dataclass(frozen=True, repr=False, eq=False)
class Probes(Result):
    """Probes of one model.

    Attributes:
        table: one row per `feature`, `place` and `layer`: `kind`, `n_components`, `base_rate`, `penalty`; on the test
            data `loss` (nats, mean over components; mean squared error for continuous features), `accuracy`,
            `balanced_accuracy`, `auc`, `r2`; the same loss of the baselines `prior_loss`, `shuffled_loss`,
            `untrained_loss`, `last_token_loss`, `bag_loss`, of which `baseline_loss` is the lowest; `share_removed`
            = 1 - loss / baseline_loss; `validation_loss`, by which everything was chosen; `is_best`, whether the
            layer has the lowest one of its place.
        weights: the probes by `(feature, place, layer)`.
    """

    weights: Mapping[tuple[str, int, int], Probe]


@dataclass(frozen=True, repr=False, eq=False)
class ProbeSeries(Result):
    """Probes of the checkpoints of a series.

    Attributes:
        table: as that of `Probes`, with the column `step` before.
        by_step: the probes of each step, ascending.
    """

    by_step: Mapping[int, Probes]
