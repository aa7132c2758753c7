"""One optimiser step of a small model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from emergent_heads.errors import ArgumentError
from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.tasks.task import SequenceBatch, SequenceTask
from emergent_heads.training.evaluation import autocast, next_token_losses
from emergent_heads.training.initial_weights import Carry, InitialWeights, Start, check_carry
from emergent_heads.training.settings import TrainingSettings


@dataclass(frozen=True)
class Plan:
    """What the runs of one training have in common.

    Attributes:
        config: of the model, with vocabulary and context.
        task: what it is trained on.
        settings: how.
        device: where.
        pattern: the task's ground-truth pattern on the device, where the settings ask for an attention bias.
        initial: the weights that are carried over from an earlier run; None where all are drawn.
    """

    config: SmallModelConfig
    task: SequenceTask
    settings: TrainingSettings
    device: torch.device
    pattern: Bool[Tensor, "dest src"] | None
    initial: InitialWeights | None = None

    @classmethod
    def of(
        cls, config: SmallModelConfig, task: SequenceTask, settings: TrainingSettings, device: str | torch.device
    ) -> "Plan":
        """The plan, checked as far as it can be before anything is made.

        Raises:
            ArgumentError: the task does not fit the model, the model cannot take the attention bias, the task has no
                right pattern for it, or there is no such device.
        """
        config, device, pattern = config.for_task(task), _usable(device), None
        if settings.bias is not None:
            config.check_attention(settings.bias.layers, settings.bias.heads)
            pattern = task.pattern().to(device)
        return cls(config, task, settings, device, pattern)

    def starting_from(self, start: Start | None, carry: Carry, folder: Path) -> "Plan":
        """This plan for the run in `folder`, with the weights of an earlier run where `start` names one.

        Raises:
            As `InitialWeights.of`; ArgumentError also where something is to be carried from nowhere.
        """
        check_carry(carry)
        if start is not None:
            return replace(self, initial=InitialWeights.of(start, carry, self.config, folder))
        if carry != "all":
            raise ArgumentError(f"carry={carry!r} goes with init_from, the run to carry weights from")
        return self

    @property
    def batch_size(self) -> int:
        """Sequences in a batch."""
        return self.settings.batch_size(self.task)

    def identity(self, seed: int) -> dict[str, Any]:
        """What makes two runs the same run, as plain values for a manifest."""
        start = {"init_from": self.initial.settings()} if self.initial is not None else {}
        return {
            "config": self.config.settings(),
            "task": self.task.settings(),
            "seed": seed,
            "training": self.settings.settings(),
            **start,
        }

    def about(self) -> dict[str, Any]:
        """What else a reader of the run wants to know, for the manifest."""
        return {
            "device": str(self.device),
            "sequences_per_batch": self.batch_size,
            "plateau": self.task.plateau,
            "floor": self.task.floor,
        }

    def new_model(self, seed: int) -> SmallModel:
        """The model of a seed before its first step."""
        model = SmallModel(self.config, seed).to(self.device)
        if self.initial is not None:
            self.initial.put_on(model)
        self.put_bias(model, 0)
        return model

    def put_bias(self, model: SmallModel, step: int) -> None:
        """Sets the model's attention bias to what it is after `step` steps."""
        if self.settings.bias is not None and self.pattern is not None:
            self.settings.bias.put_on(model, self.pattern, step)


class Learner:
    """A model with its optimizer: AdamW with decay on matrices only, and the gradient clipped by its norm.

    Attributes:
        model: trained in place.
        moments: the optimizer's running means, by `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`.
    """

    def __init__(self, plan: Plan, seed: int, model: SmallModel, moments: Mapping[str, Tensor], step: int) -> None:
        """Takes a model after `step` steps, with `moments` empty after none."""
        self.plan, self.seed, self.model = plan, seed, model
        self._parameters = list(model.parameters())
        plan.put_bias(model, step)
        self._optimizer = _adamw(self._parameters, plan.settings)
        self.moments = self._set_moments(moments, step)

    def advance(self, step: int) -> Float[Tensor, ""]:
        """The step that follows `step` steps; gives the training loss before the update."""
        batch = self.batch(step)
        with autocast(self.plan.device, self.plan.settings.dtype):
            logits = self.model(batch.tokens[:, :-1])
        loss = training_loss(logits, batch.tokens, batch.loss_mask)
        self._optimizer.zero_grad()
        loss.backward()
        self.update(step)
        return loss.detach()

    def batch(self, step: int) -> SequenceBatch:
        """The training data of the step that follows `step` steps."""
        return self.plan.task.batch(self.plan.batch_size, seed=self.seed, step=step, device=self.plan.device)

    def update(self, step: int) -> None:
        """Changes the weights after `step` steps by their gradients, and the attention bias with them."""
        settings = self.plan.settings
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        self._optimizer.step()
        if settings.bias is not None and settings.bias.changes_at(step + 1):
            self.plan.put_bias(self.model, step + 1)

    def _set_moments(self, moments: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Gives the optimizer its running means after `step` steps, zeros where there are none."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state = {"step": torch.tensor(float(step), device=parameter.device)}
            for mean in ("exp_avg", "exp_avg_sq"):
                known = moments.get(f"{name}.{mean}")
                state[mean] = (
                    torch.zeros_like(parameter, requires_grad=False) if known is None else known.to(parameter)
                )
                found[f"{name}.{mean}"] = state[mean]
            self._optimizer.state[parameter] = state
        return found


def training_loss(
    logits: Float[Tensor, "*run row pos vocabulary"],
    tokens: Int[Tensor, "*run row pos+1"],
    loss_mask: Bool[Tensor, "*run row pos+1"],
) -> Float[Tensor, "*run"]:
    """Mean loss in nats over the tokens that count."""
    counts = loss_mask[..., 1:]
    return (next_token_losses(logits, tokens) * counts).sum((-2, -1)) / counts.sum((-2, -1))


def _adamw(parameters: Sequence[nn.Parameter], settings: TrainingSettings) -> torch.optim.AdamW:
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


def _usable(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(
            f"cannot train on the device {device!s} ({reason}); leave device out for the CPU"
        ) from error
