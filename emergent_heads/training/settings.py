"""What decides a training beside the model, the task and the seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.models.attention_bias import AttentionBias
from emergent_heads.models.small import refusing_unknown_keys
from emergent_heads.tasks.task import SequenceTask

COSINE_END = 0.1
"""Share of the learning rate that the cosine schedule comes down to."""
_HELD_OUT_BATCHES = 4


@refusing_unknown_keys
@dataclass(frozen=True)
class TrainingSettings:
    """How a small model is trained.

    Attributes:
        steps: optimiser steps.
        learning_rate: of AdamW, once warmed up.
        betas: of AdamW.
        weight_decay: of AdamW, on matrices (embeddings too); not on biases and norms.
        warmup_steps: the learning rate rises linearly over these steps.
        schedule: "constant", or "cosine", which comes down to a tenth of the learning rate at the last step.
        clip: largest norm of the gradient over all parameters; None for no clipping.
        tokens_per_batch: a batch has as many sequences as fit into so many tokens, and at least one.
        checkpoints: "pythia" for the steps 0, 1, 2, 4, ..., 512, then every 1000; or steps of one's own. The last step
            is always one.
        evaluate_every: steps between two evaluations on held-out data; checkpoints are evaluated too.
        n_held_out: held-out sequences; None for four batches.
        attention_bias: an `AttentionBias`, or its strength; None for none.
        stop_when_solved: end the training at the first evaluation that is solved.
        solved_at: a run is solved when the held-out loss has come down by this share of the way from the task's
            plateau to its floor, or when 0.99 of the held-out answers match exactly.
        dtype: "float32", or "bfloat16" for automatic mixed precision; the weights stay in float32.

    Raises:
        ArgumentError: a setting that is unknown or makes no sense.
    """

    steps: int
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup_steps: int = 100
    schedule: Literal["constant", "cosine"] = "constant"
    clip: float | None = 1.0
    tokens_per_batch: int = 4096
    checkpoints: "Literal['pythia'] | Sequence[int]" = "pythia"
    evaluate_every: int = 50
    n_held_out: int | None = None
    attention_bias: "AttentionBias | float | None" = None
    stop_when_solved: bool = False
    solved_at: float = 0.98
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("tokens_per_batch", 1),
            ("evaluate_every", 1),
            ("n_held_out", 1),
            ("warmup_steps", 0),
        ):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(name, value, least=least))
        for name, low in (("learning_rate", True), ("clip", True), ("weight_decay", False)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and (value > 0 if low else value >= 0)):
                raise ArgumentError(f"{name} must be {'above' if low else 'at least'} 0, not {value!r}")
        for name, allowed in (("schedule", ("constant", "cosine")), ("dtype", ("float32", "bfloat16"))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name} must be {' or '.join(allowed)}, not {getattr(self, name)!r}")
        if not 0 < self.solved_at <= 1:
            raise ArgumentError(
                f"solved_at is a share of the way to the floor, above 0 and up to 1, not {self.solved_at}"
            )
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "attention_bias", AttentionBias.read(self.attention_bias))
        if self.checkpoints != "pythia":
            object.__setattr__(self, "checkpoints", self._own_checkpoints())

    @property
    def bias(self) -> AttentionBias | None:
        """The attention bias, whatever way it was given."""
        return AttentionBias.read(self.attention_bias)

    def checkpoint_steps(self) -> list[int]:
        """The steps at which a checkpoint is kept, ascending."""
        if self.checkpoints == "pythia":
            steps = {0, *(2**power for power in range(10)), *range(1000, self.steps, 1000)}
        else:
            steps = set(self.checkpoints)
        return sorted({step for step in steps if step < self.steps} | {self.steps})

    def evaluation_steps(self) -> list[int]:
        """The steps at which the model is evaluated, ascending: step 0, regular ones, and all checkpoints."""
        return sorted({*range(0, self.steps, self.evaluate_every), *self.checkpoint_steps()})

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of the update that follows `step` updates."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (COSINE_END + (1 - COSINE_END) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

    def batch_size(self, task: SequenceTask) -> int:
        """Sequences in a batch."""
        return max(1, self.tokens_per_batch // task.length)

    def held_out_size(self, task: SequenceTask) -> int:
        """Held-out sequences."""
        return self.n_held_out or _HELD_OUT_BATCHES * self.batch_size(task)

    def settings(self) -> dict[str, Any]:
        """The fields as plain values, for a manifest; `TrainingSettings(**settings)` makes it again."""
        return asdict(self)

    def _own_checkpoints(self) -> tuple[int, ...]:
        try:
            steps = tuple(sorted({int(step) for step in self.checkpoints}))
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"checkpoints must be 'pythia' or a list of steps, not {self.checkpoints!r}"
            ) from error
        if wrong := [step for step in steps if not 0 <= step <= self.steps]:
            raise ArgumentError(f"checkpoints names step {wrong[0]}; the training has the steps 0 to {self.steps}")
        return steps


def differences(there: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> list[str]:
    """What differs between two manifests' settings, as "config.d_model 64 there, 128 now"."""
    found: list[str] = []
    for key in dict.fromkeys([*there, *now]):
        full, old, new = f"{name}{key}", there.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{full}.")
        elif old != new:
            found.append(f"{full} {_short(old)} there, {_short(new)} now")
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
