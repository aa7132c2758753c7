"""Features: intermediate quantities of a task, and where in the sequence each stands.

What "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997) probes for: the carries of an addition, the queue
of a search. A feature is a function of the tokens alone, so it can be asked of any batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Float, Int

from emergent_heads.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

FeatureKind = Literal["binary", "multilabel", "continuous"]
Tokens: TypeAlias = Int[np.ndarray, "row pos"]


@dataclass(frozen=True, eq=False)
class FeatureValues:
    """A feature of some rows.

    Attributes:
        labels: `[row, place, component]`, float64; one component unless the feature is multilabel. NaN where a row has
            no such place.
        positions: `[row, place]`, the index of the token at which it is read; -1 where a row has no such place.
    """

    labels: Float[np.ndarray, "row place component"]
    positions: Int[np.ndarray, "row place"]

    @property
    def base_rate(self) -> Float[np.ndarray, "place component"]:
        """Mean label over the rows that have the place; for binary and multilabel features the share of ones.

        NaN for a place that no row has.
        """
        present = (self.positions >= 0)[..., None]
        total = np.where(present, self.labels, 0.0).sum(axis=0)
        rows = present.sum(axis=0)
        return np.where(rows, total / np.maximum(rows, 1), np.nan)


@dataclass(frozen=True, eq=False)
class Feature:
    """An intermediate quantity with a place in the sequence, or with several, one after the other.

    Attributes:
        name: in the tables.
        kind: "binary" (labels 0 and 1), "multilabel" (several such labels at once) or "continuous".
        labels: `[row, place]`, multilabel `[row, place, component]`: a function of the tokens `[row, pos]` (a NumPy
            array, right-padded), or for a task with fixed prompts an array with one row per prompt.
        positions: the index of the token at which each label is read: `[row, place]` as such a function or array, or
            `[place]` where it is the same in all rows. -1 where a row has no such place.
    """

    name: str
    kind: FeatureKind
    labels: "Callable[[Tokens], Any] | np.ndarray | Tensor"
    positions: "Callable[[Tokens], Any] | np.ndarray | Tensor | Sequence[int] | Sequence[Sequence[int]]"

    def __post_init__(self) -> None:
        if self.kind not in get_args(FeatureKind):
            raise ArgumentError(
                f"feature {self.name!r}: kind is {self.kind!r}; use {', '.join(get_args(FeatureKind))}"
            )

    def read(self, tokens: "Tokens | Tensor") -> FeatureValues:
        """The feature's labels and positions in these sequences.

        Raises:
            ArgumentError: tokens, labels or positions of the wrong shape or type, positions outside the sequence, or
                labels that do not fit the kind.
        """
        tokens = as_array(tokens)
        if tokens.ndim != 2:
            raise ArgumentError(f"feature {self.name!r}: tokens {list(tokens.shape)} must be [row, pos]")
        n, length = tokens.shape
        positions = self._array("positions", tokens)
        if positions.dtype.kind not in "iu":
            raise ArgumentError(f"feature {self.name!r}: positions must be whole numbers, not {positions.dtype}")
        positions = positions.astype(np.int64)
        positions = np.broadcast_to(positions, (n, len(positions))) if positions.ndim == 1 else positions
        labels = self._array("labels", tokens)
        if labels.dtype.kind not in "biuf":
            raise ArgumentError(f"feature {self.name!r}: labels must be numbers, not {labels.dtype}")
        labels = labels.astype(np.float64)
        labels = labels[..., None] if self.kind != "multilabel" and labels.ndim == 2 else labels
        if positions.shape != (n, *labels.shape[1:2]) or labels.shape[:1] != (n,) or labels.ndim != 3:
            raise ArgumentError(
                f"feature {self.name!r}: labels {list(labels.shape)} and positions {list(positions.shape)} do not fit "
                f"{n} sequences; labels are [row, place] (multilabel [row, place, component]), positions [row, place]"
            )
        absent = positions < 0
        if outside := positions[positions >= length].tolist():
            raise ArgumentError(
                f"feature {self.name!r}: position {outside[0]} is outside the sequence of {length} tokens"
            )
        labels = np.where(absent[..., None], np.nan, labels)
        if not np.isfinite(labels[~absent]).all():
            raise ArgumentError(f"feature {self.name!r}: some labels are not finite numbers")
        if self.kind != "continuous" and not np.isin(labels[~absent], (0.0, 1.0)).all():
            raise ArgumentError(
                f"feature {self.name!r}: {self.kind} labels must be 0 or 1; other labels are of the kind continuous"
            )
        return FeatureValues(labels, np.where(absent, -1, positions))

    def _array(self, which: Literal["labels", "positions"], tokens: Tokens) -> np.ndarray:
        given = getattr(self, which)
        values = given(tokens) if callable(given) else given
        try:
            return as_array(values)
        except ValueError as error:
            raise ArgumentError(f"feature {self.name!r}: the {which} are rows that differ in length") from error

    def __repr__(self) -> str:
        return f"Feature({self.name!r}, {self.kind})"


def as_array(values: Any) -> np.ndarray:
    """A NumPy array of what may be a tensor on any device."""
    return np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
