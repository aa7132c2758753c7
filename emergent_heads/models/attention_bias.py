"""The attention bias of a training: the task's right pattern, added to the attention scores."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from emergent_heads.errors import ArgumentError
from emergent_heads.models.small import SmallModel, refusing_unknown_keys


@refusing_unknown_keys
@dataclass(frozen=True)
class AttentionBias:
    """`strength` times the task's ground-truth pattern, added to attention scores (arXiv 2606.25010, App. B.3).

    Attributes:
        strength: c in the paper, which does not give its value; 1 to 10 were tried by others.
        layers: the layers that get it; None for all, which must then be attention.
        heads: the heads of each of these layers; None for all.
        from_step: step of training from which it is there.
        anneal_until: step at which it has come down to zero, linearly from `from_step`; None keeps it as it is.

    Raises:
        ArgumentError: the steps are negative or out of order, or no layer or head is named.
    """

    strength: float
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    from_step: int = 0
    anneal_until: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "heads"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _numbers(name, value))
        if self.from_step < 0:
            raise ArgumentError(f"from_step is {self.from_step}; give a step of training, from 0 up")
        if self.anneal_until is not None and self.anneal_until <= self.from_step:
            raise ArgumentError(f"anneal_until must come after from_step {self.from_step}, not at {self.anneal_until}")

    def strength_at(self, step: int) -> float:
        """What the pattern is multiplied with after `step` optimiser steps."""
        if step < self.from_step:
            return 0.0
        if self.anneal_until is None:
            return self.strength
        return self.strength * max(0.0, (self.anneal_until - step) / (self.anneal_until - self.from_step))

    def changes_at(self, step: int) -> bool:
        """Whether the strength after `step` steps is another than one step before."""
        return step == 0 or self.strength_at(step) != self.strength_at(step - 1)

    def put_on(self, model: SmallModel, pattern: Bool[Tensor, "dest src"], step: int) -> None:
        """Sets the model's bias to what it is after `step` steps.

        Raises:
            ArgumentError: a layer that is not attention, there is no such layer or head, or the pattern is too short.
        """
        strength = self.strength_at(step)
        model.set_attention_bias(pattern if strength else None, strength, layers=self.layers, heads=self.heads)

    def settings(self) -> dict[str, Any]:
        """The fields as plain values, for a manifest."""
        return asdict(self)

    @classmethod
    def read(cls, given: "float | AttentionBias | Mapping[str, Any] | None") -> "AttentionBias | None":
        """A bias from a strength alone, from itself, or from a manifest; None for none, as is a strength of 0."""
        if isinstance(given, Mapping):
            given = cls(**given)
        elif isinstance(given, (int, float)):
            given = cls(float(given))
        if given is None or not given.strength:
            return None
        return given


def _numbers(name: str, value: Sequence[int]) -> tuple[int, ...]:
    numbers = tuple(int(number) for number in value)
    if not numbers:
        raise ArgumentError(f"{name} is empty; name at least one, or leave it out for all")
    return numbers
