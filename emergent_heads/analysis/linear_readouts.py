"""Linear readouts of many labels from the same activations, solved together.

The objectives are scikit-learn's: `LogisticRegression(C=C)` minimises `0.5 |w|^2 + C * (sum of log losses)` and
`Ridge(alpha=1/C)` minimises `|w|^2 / C + (sum of squared errors)`; the intercept is not penalised.

Activations are centred and turned onto their principal axes once. There ridge regression is a division, and the
Hessian of logistic regression is close to diagonal, so that a few steps of conjugate gradients, preconditioned by its
diagonal, make a Newton step. Each such step is two matrix products for all labels at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_MOST_NEWTON_STEPS = 100
_MOST_CG_STEPS = 200
_MOST_HALVINGS = 30
_STEP = 3e-3  # a problem is solved when a Newton step changes its weights by less than this share of their norm
_CG_ERROR = 0.1  # to which share of the gradient (in the preconditioner's norm) a Newton step is solved
_OVERSHOT = 0.1  # a step is shortened where the slope along it is up again by this share of what it was down


@dataclass(frozen=True, eq=False)
class Readouts:
    """Linear readouts `x @ weights.T + intercepts` of several labels.

    Attributes:
        weights: `[label, d]`, in the units of the activations.
        intercepts: `[label]`.
    """

    weights: Float[Tensor, "label d"]
    intercepts: Float[Tensor, " label"]

    def __call__(self, x: Float[Tensor, "row d"]) -> Float[Tensor, "label row"]:
        """What is read: log-odds of 1, or the predicted value."""
        return torch.addmm(self.intercepts[:, None], self.weights, x.T)


class Activations:
    """Activations `[row, d]` made ready for many readouts.

    Attributes:
        newton_steps, products: work done so far, as numbers of labels times steps, and times pairs of products with
            the activations.
    """

    def __init__(self, x: Float[Tensor, "row d"]) -> None:
        centred = x.double()
        self._mean = centred.mean(0)
        centred -= self._mean
        self._axes, self._variances = _principal_axes(centred)
        # The last column carries the intercept.
        self._rows = torch.cat([(centred @ self._axes).float(), x.new_ones(len(x), 1, dtype=torch.float32)], dim=1)
        self._columns = self._rows.T.contiguous()
        self._squares = self._rows.square()
        self.newton_steps = self.products = 0

    # ---- the two kinds ----

    def ridge(self, labels: Float[Tensor, "label row"], penalties: Sequence[float]) -> list[Readouts]:
        """Ridge regression, for each C of `penalties` (alpha is 1/C), by the normal equations."""
        labels = labels.double()
        means = labels.mean(1)
        moments = (labels - means[:, None]) @ self._rows[:, :-1].double()
        return [
            self._in_units(torch.cat([moments / (self._variances + 1 / c), means[:, None]], dim=1)) for c in penalties
        ]

    def logistic(self, labels: Float[Tensor, "label row"], penalties: Sequence[float]) -> list[Readouts]:
        """Logistic regression for each C of `penalties`, each from the solution before, so give them ascending.

        Args:
            labels: 0 and 1; no label may be constant.
            penalties: values of C.
        """
        labels = labels.to(self._rows)
        weights = self._prior(labels)
        found = []
        for c in penalties:
            weights = self._newton(weights, 1 - 2 * labels, self._penalty_of(labels, [c] * len(labels)))
            found.append(self._in_units(weights.double()))
        return found

    def logistic_at(self, labels: Float[Tensor, "label row"], penalties: Sequence[float]) -> Readouts:
        """Logistic regression with a C of its own for each label."""
        labels = labels.to(self._rows)
        return self._in_units(
            self._newton(self._prior(labels), 1 - 2 * labels, self._penalty_of(labels, penalties)).double()
        )

    # ---- the solver ----

    def _newton(
        self,
        weights: Float[Tensor, "label d1"],
        signs: Float[Tensor, "label row"],
        penalty: Float[Tensor, "label d1"],
    ) -> Float[Tensor, "label d1"]:
        """Newton's method from `weights`; labels that are solved drop out."""
        solved = weights.clone()
        left = torch.arange(len(weights), device=weights.device)
        wrong, gradient = self._gradient(weights, signs, penalty)
        for _ in range(_MOST_NEWTON_STEPS):
            step = self._newton_step(wrong * (1 - wrong), gradient, penalty)
            weights, wrong, gradient, taken = self._along(weights, step, gradient, signs, penalty)
            solved[left] = weights
            self.newton_steps += len(left)
            # A full step this small leaves an error that is smaller by far: Newton's method squares it.
            size = weights[:, :-1].norm(dim=1) + 1e-6 * weights[:, -1].abs()
            going_on = (taken[:, None] * step)[:, :-1].norm(dim=1) > _STEP * size
            if not going_on.any():
                break
            if not going_on.all():
                left, weights, wrong, gradient, signs, penalty = (
                    each[going_on] for each in (left, weights, wrong, gradient, signs, penalty)
                )
        return solved

    def _gradient(self, weights: Tensor, signs: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities of the wrong label `[label, row]`, and the objective's gradient.

        `signs` are 1 for label 0 and -1 for label 1. Where a label is read well its error is tiny, and `p - 1` would
        have lost it in rounding.
        """
        wrong = (weights @ self._columns).mul_(signs).sigmoid_()
        self.products += len(weights)
        return wrong, (wrong * signs) @ self._rows + penalty * weights

    def _newton_step(
        self, curvature: Float[Tensor, "label row"], gradient: Float[Tensor, "label d1"], penalty: Tensor
    ) -> Float[Tensor, "label d1"]:
        """Solves `Hessian @ step = -gradient` roughly, by preconditioned conjugate gradients."""
        diagonal = curvature @ self._squares + penalty
        step = torch.zeros_like(gradient)
        rest = -gradient
        scaled = rest / diagonal
        direction = scaled
        size = (rest * scaled).sum(1)
        enough = _CG_ERROR**2 * size
        left = torch.arange(len(step), device=step.device)
        moved = step
        for _ in range(_MOST_CG_STEPS):
            bent = ((direction @ self._columns).mul_(curvature)) @ self._rows + penalty * direction
            self.products += len(direction)
            length = (size / (direction * bent).sum(1).clamp(min=1e-30))[:, None]
            moved = moved + length * direction
            rest = rest - length * bent
            scaled = rest / diagonal
            size, before = (rest * scaled).sum(1), size
            going_on = size > enough
            step[left] = moved
            if not going_on.any():
                break
            direction = scaled + (size / before)[:, None] * direction
            if int(going_on.sum()) <= 0.75 * len(going_on):  # dropping a few costs more than it saves
                left, moved, rest, direction, size, enough, diagonal, curvature, penalty = (
                    each[going_on]
                    for each in (left, moved, rest, direction, size, enough, diagonal, curvature, penalty)
                )
        return step

    def _along(
        self, weights: Tensor, step: Tensor, gradient: Tensor, signs: Tensor, penalty: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Float[Tensor, " label"]]:
        """Takes the step, shortened where it overshoots: as `_gradient`, between the weights and the share taken.

        The objective is convex, so its slope along the step tells whether the lowest point was passed; no loss needs
        to be computed.
        """
        slope = (gradient * step).sum(1).abs()
        taken = torch.ones_like(slope)
        for _ in range(_MOST_HALVINGS):
            new = weights + taken[:, None] * step
            wrong, new_gradient = self._gradient(new, signs, penalty)
            rise = (new_gradient * step).sum(1)
            over = rise > _OVERSHOT * slope
            if not over.any():
                break
            taken = torch.where(over, taken * (slope / (slope + rise)).clamp(0.1, 0.9), taken)
        return new, wrong, new_gradient, taken  # pyright: ignore[reportPossiblyUnboundVariable]

    def _prior(self, labels: Float[Tensor, "label row"]) -> Float[Tensor, "label d1"]:
        """Readouts that know the labels' frequencies only."""
        weights = labels.new_zeros(len(labels), self._rows.shape[1])
        weights[:, -1] = torch.logit(labels.mean(1))
        return weights

    def _penalty_of(self, labels: Tensor, penalties: Sequence[float]) -> Float[Tensor, "label d1"]:
        """What the penalty adds to the Hessian's diagonal."""
        penalty = (1 / torch.tensor(penalties, device=labels.device, dtype=labels.dtype))[:, None]
        penalty = penalty.repeat(1, self._rows.shape[1])
        penalty[:, -1] = 0
        return penalty

    def _in_units(self, weights: Float[Tensor, "label d1"]) -> Readouts:
        """Readouts in the units of the activations."""
        own = weights[:, :-1] @ self._axes.T
        return Readouts(own.float(), (weights[:, -1] - own @ self._mean).float())


def _principal_axes(centred: Float[Tensor, "row d"]) -> tuple[Float[Tensor, "d axis"], Float[Tensor, " axis"]]:
    """Axes and the sums of squares along them. Of fewer rows than dimensions, only axes that the rows span.

    That is enough, as the penalty keeps weights from leaving them.
    """
    if len(centred) < centred.shape[1]:
        _, spreads, axes = torch.linalg.svd(centred, full_matrices=False)
        return axes.T, spreads.square()
    squares, axes = torch.linalg.eigh(centred.T @ centred)
    return axes, squares.clamp(min=0)
