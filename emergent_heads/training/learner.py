"""One optimiser step of a small model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.tasks.task import SequenceTask
from emergent_heads.training.evaluation import autocast, next_token_losses
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
    """

    config: SmallModelConfig
    task: SequenceTask
    settings: TrainingSettings
    device: torch.device
    pattern: Bool[Tensor, "dest src"] | None

    @classmethod
    def of(
        cls, config: SmallModelConfig, task: SequenceTask, settings: TrainingSettings, device: str | torch.device
    ) -> "Plan":
        """The plan, checked as far as it can be before anything is made.

        Raises:
            ArgumentError: the task does not fit the model, or has no right attention pattern for the bias.
        """
        device = torch.device(device)
        pattern = task.pattern().to(device) if settings.bias is not None else None
        return cls(config.for_task(task), task, settings, device, pattern)

    def identity(self, seed: int) -> dict[str, Any]:
        """What makes two runs the same run, as plain values for a manifest."""
        return {
            "config": self.config.settings(),
            "task": self.task.settings(),
            "seed": seed,
            "training": self.settings.settings(),
        }

    def about(self) -> dict[str, Any]:
        """What else a reader of the run wants to know, for the manifest."""
        return {
            "device": str(self.device),
            "sequences_per_batch": self.settings.batch_size(self.task),
            "plateau": self.task.plateau,
            "floor": self.task.floor,
        }

    def new_model(self, seed: int) -> SmallModel:
        """The model of a seed before its first step."""
        model = SmallModel(self.config, seed).to(self.device)
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
        self.plan = plan
        self.seed = seed
        self.model = model
        self._n = plan.settings.batch_size(plan.task)
        self._parameters = list(model.parameters())
        plan.put_bias(model, step)
        self._optimizer = adamw(dict(model.named_parameters()), plan.settings)
        self.moments = set_moments(self._optimizer, dict(model.named_parameters()), moments, step)

    def write_back(self) -> None:
        """Nothing to do: model and moments are trained in place."""

    def advance(self, step: int) -> Float[Tensor, ""]:
        """The step that follows `step` steps; gives its training loss before the update."""
        settings = self.plan.settings
        batch = self.plan.task.batch(self._n, seed=self.seed, step=step, device=self.plan.device)
        with autocast(self.plan.device, settings.dtype):
            logits = self.model(batch.tokens[:, :-1])
        counts = batch.loss_mask[:, 1:]
        loss = (next_token_losses(logits, batch.tokens) * counts).sum() / counts.sum()
        self._optimizer.zero_grad()
        loss.backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        self._optimizer.step()
        if settings.bias is not None and settings.bias.changes_at(step + 1):
            self.plan.put_bias(self.model, step + 1)
        return loss.detach()


def adamw(parameters: Mapping[str, Tensor], settings: TrainingSettings, *, stacked: bool = False) -> torch.optim.AdamW:
    """AdamW that decays matrices only; `stacked` parameters have one dimension more."""
    matrices = [tensor for tensor in parameters.values() if tensor.ndim > 1 + stacked]
    others = [tensor for tensor in parameters.values() if tensor.ndim <= 1 + stacked]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=settings.learning_rate, betas=settings.betas, fused=True
    )


def set_moments(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, Tensor], moments: Mapping[str, Tensor], step: int
) -> dict[str, Tensor]:
    """Gives the optimizer its running means after `step` steps, zeros where there are none; returns them by name."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = {"step": torch.tensor(float(step), device=parameter.device)}
        for mean in ("exp_avg", "exp_avg_sq"):
            state[mean] = torch.zeros_like(parameter, requires_grad=False)
            if (known := moments.get(f"{name}.{mean}")) is not None:
                state[mean].copy_(known)
            found[f"{name}.{mean}"] = state[mean]
        optimizer.state[parameter] = state
    return found
