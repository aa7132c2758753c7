"""How well readouts do on labels they were not fitted to, for many labels at once."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata
from torch import Tensor
from torch.nn import functional


class Scores(NamedTuple):
    """Means over components; NaN where a score says nothing of the kind of label, or the labels are all alike."""

    loss: float
    accuracy: float
    balanced_accuracy: float
    auc: float
    r2: float


def log_losses(logits: Float[Tensor, "label row"], labels: Float[Tensor, "label row"]) -> Float[np.ndarray, " label"]:
    """Mean loss in nats of log-odds against labels 0 and 1."""
    logits, labels = logits.double(), labels.double()
    return (functional.softplus(logits) - labels * logits).mean(1).cpu().numpy()


def squared_errors(
    predicted: Float[Tensor, "label row"], labels: Float[Tensor, "label row"]
) -> Float[np.ndarray, " label"]:
    """Mean squared errors."""
    return (predicted.double() - labels.double()).square().mean(1).cpu().numpy()


def losses(
    read: Float[Tensor, "label row"], labels: Float[Tensor, "label row"], *, continuous: bool
) -> Float[np.ndarray, " label"]:
    """The loss of each label: mean squared error of continuous ones, else nats."""
    return squared_errors(read, labels) if continuous else log_losses(read, labels)


def scores(read: Float[Tensor, "label row"], labels: Float[Tensor, "label row"], *, continuous: bool) -> Scores:
    """All scores of one feature's readout on test data, as means over its components."""
    loss = float(losses(read, labels, continuous=continuous).mean())
    nan = float("nan")
    if continuous:
        return Scores(loss, nan, nan, nan, _mean(_r2(read, labels)))
    right = (read > 0) == (labels > 0.5)
    positives = labels.double().mean(1)
    of_ones = (right * labels).double().mean(1) / positives
    of_zeros = (right * (1 - labels)).double().mean(1) / (1 - positives)
    balanced = (of_ones + of_zeros) / 2  # NaN where all test labels are alike
    return Scores(
        loss, float(right.double().mean()), _mean(balanced.cpu().numpy()), _mean(auc(read.cpu(), labels.cpu())), nan
    )


def auc(read: Float[Tensor, "label row"], labels: Float[Tensor, "label row"]) -> Float[np.ndarray, " label"]:
    """Area under the receiver's operating characteristic, by ranks; NaN where all labels are alike."""
    ones = labels.numpy() > 0.5
    n_ones = ones.sum(1)
    pairs = n_ones * (ones.shape[1] - n_ones)
    above = (rankdata(read.numpy(), axis=1) * ones).sum(1) - n_ones * (n_ones + 1) / 2
    return np.where(pairs > 0, above / np.maximum(pairs, 1), np.nan)


def _r2(predicted: Tensor, labels: Tensor) -> Float[np.ndarray, " label"]:
    spread = labels.double().var(1, correction=0).cpu().numpy()
    error = squared_errors(predicted, labels)
    return np.where(spread > 0, 1 - error / np.where(spread > 0, spread, 1), np.nan)


def _mean(values: Float[np.ndarray, " label"]) -> float:
    """Mean over the components that have the score."""
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else float("nan")
