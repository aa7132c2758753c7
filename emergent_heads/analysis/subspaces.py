"""Subspaces of the residual stream, and what is left when one is taken out of it. All in float64.

A removal is an affine map x -> x - write (read^T x - target). Several of one kind go together, along the first axis
(`draw`), at one place in the sequence; columns beyond a removal's own rank are zero.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

How = Literal["projection", "hyperplane", "mean", "leace"]

_PARALLEL = 1e-3
"""Directions that stand out of the span of the others by less than this share of a unit are dropped."""
_TINY = 1e-6
"""Share of the largest below which whitened covariances with the labels are taken for none."""
_ROUNDING = (100 * torch.finfo(torch.float32).eps) ** 2
"""Share of the mean square below which LEACE leaves a direction's variance alone, as a float32 model's rounding."""
_HALVINGS = 30
_MOST_STRETCH = 300.0  # as a logarithm: its square is still a number


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and mean square of the residual stream at one place.

    Attributes:
        mean: `[d]`.
        second: `[d, d]`, the mean of x x^T.
    """

    mean: Float[Tensor, " d"]
    second: Float[Tensor, "d d"]

    @classmethod
    def of(cls, x: Float[Tensor, "row d"]) -> "Moments":
        x = x.double()
        return cls(x.mean(0), x.T @ x / len(x))

    @cached_property
    def covariance(self) -> Float[Tensor, "d d"]:
        return self.second - torch.outer(self.mean, self.mean)


@dataclass(frozen=True, eq=False)
class Removal:
    """Affine maps x -> x - write (read^T x - target).

    Attributes:
        read, write: `[draw, d, rank]`; of an orthogonal projection both are the same orthonormal basis.
        target: `[draw, rank]`, what read^T x is afterwards.
        ranks: `[draw]`, how many columns are not zero.
    """

    read: Float[Tensor, "draw d rank"]
    write: Float[Tensor, "draw d rank"]
    target: Float[Tensor, "draw rank"]
    ranks: Int[Tensor, " draw"]

    def __len__(self) -> int:
        return len(self.read)

    def unchanged(self) -> "Removal":
        """A removal like this one that removes nothing."""
        return Removal(*(torch.zeros_like(part) for part in (self.read, self.write, self.target, self.ranks)))

    def apply(self, x: Float[Tensor, "row d"]) -> Float[Tensor, "draw row d"]:
        """What becomes of `x`."""
        component = x.double() @ self.read - self.target[:, None]
        return x.double() - component @ self.write.mT

    def mean_square(self, moments: Moments) -> Float[Tensor, " draw"]:
        """Mean of |x - removed x|^2."""
        shift = (moments.mean @ self.read)[:, :, None] * self.target[:, None]
        component = self.read.mT @ moments.second @ self.read - shift - shift.mT
        component = component + self.target[:, :, None] * self.target[:, None]
        return ((self.write.mT @ self.write) * component).sum((1, 2))

    def variance_share(self, moments: Moments) -> Float[Tensor, " draw"]:
        """How much less variance there is afterwards, as a share."""
        left = torch.eye(self.read.shape[1], dtype=torch.float64) - self.write @ self.read.mT
        kept = ((left @ moments.covariance) * left).sum((1, 2))
        return 1 - kept / moments.covariance.trace()

    def relative_size(self, x: Float[Tensor, "row d"]) -> Float[Tensor, " draw"]:
        """Mean over rows of |x - removed x| / |x|."""
        x = x.double()
        component = x @ self.read - self.target[:, None]
        squared = ((component @ (self.write.mT @ self.write)) * component).sum(2).clamp_min(0)
        return (squared.sqrt() / x.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)).mean(1)


def probe_removal(
    how: How,
    weights: Float[np.ndarray, "*draw component d"] | Float[Tensor, "*draw component d"],
    intercepts: Float[np.ndarray, "*draw component"] | Float[Tensor, "*draw component"],
    moments: Moments,
) -> Removal:
    """The span of probes' rows taken out of the residual stream.

    Rows are brought to unit length; by singular values, zero rows and what nearly parallel rows differ by are left
    out, so that the basis is orthonormal and the map a projection whatever the rows are.

    Args:
        how: what takes the component's place: "projection" nothing, "mean" its mean, "hyperplane" the nearest point
            where all probes read 0 (or come nearest to it).
        weights, intercepts: label = weights @ x + intercepts, of one probe or of several.
        moments: of the residual stream; its mean.
    """
    rows = torch.as_tensor(weights, dtype=torch.float64)
    offsets = torch.as_tensor(intercepts, dtype=torch.float64)
    rows, offsets = (rows[None], offsets[None]) if rows.ndim == 2 else (rows, offsets)
    lengths = rows.norm(dim=2)
    there = lengths > torch.finfo(torch.float64).eps * lengths.amax(1, keepdim=True)
    scale = torch.where(there, 1 / lengths.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    left, sizes, right = torch.linalg.svd(rows * scale[:, :, None], full_matrices=False)
    kept = sizes > _PARALLEL * sizes[:, :1].clamp_min(torch.finfo(torch.float64).tiny)
    basis = right.mT * kept[:, None]
    if how == "hyperplane":  # basis @ target is minus the pseudo-inverse of the rows times the intercepts
        inverse = torch.where(kept, 1 / sizes.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        target = -inverse * (left.mT @ (offsets * scale)[:, :, None])[:, :, 0]
    else:
        target = _reached(how, basis, moments)
    return Removal(basis, basis, target, kept.sum(1))


def basis_removal(how: How, basis: Float[Tensor, "draw d rank"], moments: Moments) -> Removal:
    """Subspaces that no probe gave: as "projection", or with the mean in their place for any other `how`.

    The mean is where a hyperplane of no probe would be put, so that it goes through the data.
    """
    ranks = torch.full((len(basis),), basis.shape[2])
    return Removal(basis, basis, _reached(how, basis, moments), ranks)


def erasure(x: Float[Tensor, "row d"], labels: Float[Tensor, "draw row component"], moments: Moments) -> Removal:
    """LEACE: the least change of x after which no linear readout of the labels beats a constant.

    Belrose et al. 2023 (arXiv 2306.03819), theorem 4.3: x is whitened, the span of its covariance with the labels
    projected out, and the whitening undone. Optimal over the rows it is fitted on.
    """
    variances, axes = torch.linalg.eigh(moments.covariance)
    there = variances > _ROUNDING * moments.second.trace()
    root = variances.clamp_min(0).sqrt()
    whiten = (axes * torch.where(there, 1 / root, 0.0)) @ axes.T
    unwhiten = (axes * torch.where(there, root, 0.0)) @ axes.T
    centred = labels - labels.mean(1, keepdim=True)
    crossed = (x.double() - moments.mean).T @ centred / len(x)
    span, sizes, _ = torch.linalg.svd(whiten @ crossed, full_matrices=False)
    kept = sizes > _TINY * sizes[:, :1].clamp_min(torch.finfo(torch.float64).tiny)
    span = span * kept[:, None]
    read, write = whiten @ span, unwhiten @ span
    return Removal(read, write, moments.mean @ read, kept.sum(1))


def random_bases(n: int, d: int, rank: int, generator: np.random.Generator) -> Float[Tensor, "draw d rank"]:
    """Orthonormal bases of random subspaces, uniformly distributed."""
    return torch.linalg.qr(torch.from_numpy(generator.standard_normal((n, d, rank)))).Q


def matched_bases(
    n: int, rank: int, squares: Float[Tensor, "d d"], wanted: float, generator: np.random.Generator
) -> Float[Tensor, "draw d rank"]:
    """Orthonormal bases of random subspaces in which the data have a given mean square, each of them.

    Gaussian vectors are stretched along the principal axes by a power of the data's size there, as if drawn from the
    data's own covariance (power 1/2) or from its inverse; for each draw the power is found by bisection. Where no
    subspace of that rank has so large or so small a mean square, the draws are as close as it gets.

    Args:
        n: how many.
        rank: of each.
        squares: `[d, d]`, mean of x x^T, about the origin or about the mean.
        wanted: mean of |component|^2 in the subspace.
        generator: for the draws.
    """
    values, axes = torch.linalg.eigh(squares)
    values = values.clamp_min(values[-1] * 1e-12)
    logs = 0.5 * (values / values[-1]).log()
    rank = min(rank, len(values))
    vectors = torch.from_numpy(generator.standard_normal((n, len(values), rank)))

    def bases(tilt: Float[Tensor, " draw"]) -> Float[Tensor, "draw d rank"]:
        stretch = tilt[:, None] * logs
        stretch = (stretch - stretch.amax(1, keepdim=True)).exp()
        # Largest rows first: orthogonalisation is exact then, however much rows differ in size.
        order = torch.where((tilt >= 0)[:, None], torch.arange(len(logs)).flip(0), torch.arange(len(logs)))
        order = order[:, :, None].expand_as(vectors)
        ordered = torch.linalg.qr((stretch[:, :, None] * vectors).gather(1, order)).Q
        return torch.empty_like(ordered).scatter_(1, order, ordered)

    high = torch.full((n,), _MOST_STRETCH / max(float(-logs[0]), 1e-9), dtype=torch.float64)
    low = -high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        too_small = (bases(middle).square() * values[:, None]).sum((1, 2)) < wanted
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    return axes @ bases((low + high) / 2)


def complement(removal: Removal) -> Float[Tensor, "d rest"]:
    """Orthonormal basis of what the first draw leaves alone."""
    columns = _orthonormal(removal.write[:1])[0]
    basis = torch.linalg.svd(columns, full_matrices=True).U
    return basis[:, int((columns.square().sum(0) > 0.5).sum()) :]


def overlap(removal: Removal, other: Removal) -> Float[Tensor, " draw"]:
    """Share of `other`'s first subspace that lies in each subspace of `removal`: 0 where they are orthogonal."""
    ours, theirs = (_orthonormal(each.write) for each in (removal, other))
    return (ours.mT @ theirs).square().sum((1, 2)) / other.ranks[0].clamp_min(1)


def _orthonormal(columns: Float[Tensor, "draw d rank"]) -> Float[Tensor, "draw d rank"]:
    span, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    return span * (sizes > _TINY * sizes[:, :1].clamp_min(torch.finfo(torch.float64).tiny))[:, None]


def _reached(how: How, basis: Float[Tensor, "draw d rank"], moments: Moments) -> Float[Tensor, "draw rank"]:
    component = moments.mean @ basis
    return torch.zeros_like(component) if how == "projection" else component
