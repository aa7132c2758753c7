"""Readouts of a label from one latent alone, for all latents at once, solved exactly.

The objectives are those of the probes (`analysis/linear_readouts.py`), with one input: scikit-learn's
`LogisticRegression(C)` and `Ridge(alpha=1/C)` on the latent brought to unit variance. A latent is 0 in most rows, and
all rows in which it is 0 are read alike, so that sums over rows are sums over the few others and one product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

PENALTY = 1.0
"""C of all readouts of one latent; of two parameters and thousands of rows it decides next to nothing."""
_NUMBERS_AT_ONCE = 2**23
_MOST_STEPS = 100
_MOST_HALVINGS = 30
_STEP = 1e-8


@dataclass(frozen=True, eq=False)
class Sparse:
    """Latents of some rows, without the zeros.

    Attributes:
        latents: `[entry]`, whose value it is.
        rows: `[entry]`, in which row.
        values: `[entry]`, float64.
        n_rows, n_latents: of all.
    """

    latents: Int[Tensor, " entry"]
    rows: Int[Tensor, " entry"]
    values: Float[Tensor, " entry"]
    n_rows: int
    n_latents: int

    @classmethod
    def of(
        cls, encode: Callable[[Float[Tensor, "row d"]], Float[Tensor, "row latent"]], x: Float[Tensor, "row d"], n: int
    ) -> "Sparse":
        """The latents of `x`, of which there are `n`, encoded in parts."""
        latents, rows, values = [], [], []
        for first, part in _parts(x, max(1, _NUMBERS_AT_ONCE // n)):
            dense = encode(part)
            at = dense.nonzero(as_tuple=True)
            rows.append((at[0] + first).cpu())
            latents.append(at[1].cpu())
            values.append(dense[at].double().cpu())
        return cls(torch.cat(latents), torch.cat(rows), torch.cat(values), len(x), n)

    def only(self, rows: slice) -> "Sparse":
        """Of some rows in a row."""
        kept = (self.rows >= rows.start) & (self.rows < rows.stop)
        parts = self.latents[kept], self.rows[kept] - rows.start, self.values[kept]
        return Sparse(*parts, rows.stop - rows.start, self.n_latents)

    @cached_property
    def active(self) -> Float[Tensor, " latent"]:
        """In how many rows each latent is not 0."""
        return torch.bincount(self.latents, minlength=self.n_latents).double()

    @cached_property
    def spread(self) -> Float[Tensor, " latent"]:
        """Standard deviation of each latent over all rows; 1 where it does not vary."""
        mean, square = (self.total(part) / self.n_rows for part in (self.values, self.values.square()))
        variance = (square - mean.square()).clamp_min(0)
        varies = variance > 1e-12 * square
        return torch.where(varies, variance, 1.0).sqrt()

    def total(self, values: Float[Tensor, "*label entry"]) -> Float[Tensor, "*label latent"]:
        """Sums over the entries of each latent."""
        zeros = values.new_zeros(*values.shape[:-1], self.n_latents)
        return zeros.index_add_(-1, self.latents, values)


@dataclass(frozen=True, eq=False)
class OneLatentReadouts:
    """Log-odds (or value) = slope * latent + intercept, for each label and latent.

    Attributes:
        slopes, intercepts: `[label, latent]`, in the units of the latents.
        continuous: whether values are read, not log-odds.
    """

    slopes: Float[Tensor, "label latent"]
    intercepts: Float[Tensor, "label latent"]
    continuous: bool

    def losses(self, x: Sparse, labels: Float[Tensor, "label row"]) -> Float[Tensor, "label latent"]:
        """Mean loss over the rows: nats, or mean squared error."""
        labels = labels.double()
        at_entries = labels[:, x.rows]
        read = self.slopes[:, x.latents] * x.values + self.intercepts[:, x.latents]
        if self.continuous:
            of_entries = (read - at_entries).square()
            n_zero, sums = x.n_rows - x.active, labels.sum(1, keepdim=True) - x.total(at_entries)
            squares = labels.square().sum(1, keepdim=True) - x.total(at_entries.square())
            zero = squares - 2 * self.intercepts * sums + n_zero * self.intercepts.square()
            return (x.total(of_entries) + zero) / x.n_rows
        return _log_loss(x, labels, read, at_entries, self.intercepts) / x.n_rows


def fit(
    x: Sparse, labels: Float[Tensor, "label row"], *, continuous: bool, penalty: float = PENALTY
) -> OneLatentReadouts:
    """The best readout of each label from each latent alone.

    Args:
        x: the latents of the training rows.
        labels: of these rows; 0 and 1 unless `continuous`, no label constant.
        continuous: ridge regression in place of logistic regression.
        penalty: C, as scikit-learn's, for the latent brought to unit variance.
    """
    labels = labels.double()
    if continuous:
        return _ridge(x, labels, penalty)
    found = [_logistic(x, part, penalty) for _, part in _parts(labels, _NUMBERS_AT_ONCE // max(1, len(x.values)) or 1)]
    slopes, intercepts = (torch.cat(parts) for parts in zip(*found, strict=True))
    return OneLatentReadouts(slopes / x.spread, intercepts, continuous)


def _ridge(x: Sparse, labels: Float[Tensor, "label row"], penalty: float) -> OneLatentReadouts:
    values = x.values / x.spread[x.latents]
    mean, mean_label = x.total(values) / x.n_rows, labels.mean(1, keepdim=True)
    squares = x.total(values.square()) - x.n_rows * mean.square()
    products = x.total(values * labels[:, x.rows]) - x.n_rows * mean * mean_label
    slopes = products / (squares + 1 / penalty)
    return OneLatentReadouts(slopes / x.spread, mean_label - slopes * mean, continuous=True)


def _logistic(x: Sparse, labels: Float[Tensor, "label row"], penalty: float) -> tuple[Tensor, Tensor]:
    """Newton's method in two variables, for latents of unit variance; steps are halved where the loss would rise."""
    values, at_entries = x.values / x.spread[x.latents], labels[:, x.rows]
    n_zero = x.n_rows - x.active
    ones_of_zero = labels.sum(1, keepdim=True) - x.total(at_entries)

    def objective(slopes: Tensor, intercepts: Tensor) -> Tensor:
        read = slopes[:, x.latents] * values + intercepts[:, x.latents]
        return _log_loss(x, labels, read, at_entries, intercepts) + slopes.square() / (2 * penalty)

    slopes = labels.new_zeros(len(labels), x.n_latents)
    intercepts = torch.logit(labels.mean(1, keepdim=True)).expand_as(slopes).clone()
    loss = objective(slopes, intercepts)
    for _ in range(_MOST_STEPS):
        p = (slopes[:, x.latents] * values + intercepts[:, x.latents]).sigmoid()
        p_zero = intercepts.sigmoid()
        curvature, curvature_zero = p * (1 - p), n_zero * p_zero * (1 - p_zero)
        wrong = p - at_entries
        of_slope = x.total(wrong * values) + slopes / penalty
        of_intercept = x.total(wrong) + n_zero * p_zero - ones_of_zero
        a = x.total(curvature * values.square()) + 1 / penalty
        b, c = x.total(curvature * values), x.total(curvature) + curvature_zero
        determinant = (a * c - b * b).clamp_min(torch.finfo(torch.float64).tiny)
        steps = (b * of_intercept - c * of_slope) / determinant, (b * of_slope - a * of_intercept) / determinant
        share = torch.ones_like(slopes)
        for _ in range(_MOST_HALVINGS):
            new = slopes + share * steps[0], intercepts + share * steps[1]
            new_loss = objective(*new)
            rises = new_loss > loss + 1e-12 * loss.abs()
            if not rises.any():
                break
            share = torch.where(rises, share / 2, share)
        else:
            share = torch.where(rises, 0.0, share)  # pyright: ignore[reportPossiblyUnboundVariable]
            new = slopes + share * steps[0], intercepts + share * steps[1]
            new_loss = objective(*new)
        slopes, intercepts = new  # pyright: ignore[reportPossiblyUnboundVariable]
        loss = new_loss  # pyright: ignore[reportPossiblyUnboundVariable]
        moved = torch.stack([share * step.abs() for step in steps])
        if not (moved > _STEP * (1 + torch.stack([slopes, intercepts]).abs())).any():
            break
    return slopes, intercepts


def _log_loss(
    x: Sparse,
    labels: Float[Tensor, "label row"],
    read: Float[Tensor, "label entry"],
    at_entries: Float[Tensor, "label entry"],
    intercepts: Float[Tensor, "label latent"],
) -> Float[Tensor, "label latent"]:
    """Sum over the rows, in nats."""
    of_entries = x.total(functional.softplus(read) - at_entries * read)
    ones_of_zero = labels.sum(1, keepdim=True) - x.total(at_entries)
    return of_entries + (x.n_rows - x.active) * functional.softplus(intercepts) - ones_of_zero * intercepts


def _parts(x: Tensor, size: int) -> list[tuple[int, Tensor]]:
    """Parts with the number of their first row."""
    return [(first, x[first : first + size]) for first in range(0, len(x), size)]
