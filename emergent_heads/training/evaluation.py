"""How well a small model does on held-out sequences, as a whole and position by position."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from emergent_heads.models.small import SmallModel
from emergent_heads.tasks.task import SequenceBatch

LEARNED = 0.95
"""Accuracy from which an answer position counts as learned."""
SOLVED_EXACT_MATCH = 0.99
"""Share of exact matches from which a run counts as solved."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured on held-out sequences.

    Attributes:
        loss_nats: mean over all tokens that count in the loss.
        accuracy: share of the answer tokens that are the model's first choice.
        exact_match: share of the sequences whose answer tokens all are.
        share_learned: share of the answer positions with an accuracy of at least `LEARNED`.
        position_loss_nats: `[pos]`, mean loss of each token but the first; NaN where none counts.
        position_accuracy: `[pos]`, the same for the accuracy.
    """

    loss_nats: float
    accuracy: float
    exact_match: float
    share_learned: float
    position_loss_nats: Float[np.ndarray, " pos"]
    position_accuracy: Float[np.ndarray, " pos"]

    @property
    def finite(self) -> bool:
        """Whether the model's losses are numbers."""
        return bool(np.isfinite(self.loss_nats))

    def metrics(self) -> dict[str, float]:
        """The numbers of the whole, by name."""
        return {name: getattr(self, name) for name in ("loss_nats", "accuracy", "exact_match", "share_learned")}


def next_token_losses(
    logits: Float[Tensor, "... pos vocabulary"], tokens: Int[Tensor, "... pos+1"]
) -> Float[Tensor, "... pos"]:
    """Cross-entropy in nats of each token but the first, in float32."""
    targets = tokens[..., 1:]
    losses = functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def autocast(device: torch.device, dtype: str) -> Any:
    """The context in which a model of that `dtype` setting runs."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


@torch.no_grad()
def evaluate(model: SmallModel, held_out: SequenceBatch, *, rows: int, dtype: str = "float32") -> Evaluation:
    """Evaluates a model as it is, attention bias included.

    Args:
        model: the model; its training or evaluation mode is left as it was.
        held_out: the sequences, on the model's device.
        rows: sequences run at a time.
        dtype: as in `TrainingSettings`.
    """
    training = model.training
    model.eval()
    losses: list[Tensor] = []
    right: list[Tensor] = []
    for tokens in held_out.tokens.split(rows):
        with autocast(tokens.device, dtype):
            logits = model(tokens[:, :-1])
        losses.append(next_token_losses(logits, tokens))
        right.append(logits.argmax(-1) == tokens[:, 1:])
    model.train(training)
    return _measured(torch.cat(losses), torch.cat(right), held_out.loss_mask[:, 1:], held_out.answer_mask[:, 1:])


def _measured(
    losses: Float[Tensor, "row pos"],
    right: Bool[Tensor, "row pos"],
    counts: Bool[Tensor, "row pos"],
    answer: Bool[Tensor, "row pos"],
) -> Evaluation:
    losses, right = losses.cpu().double(), right.cpu()
    counts, answer = counts.cpu(), answer.cpu()
    has_answer = answer.any(dim=1)
    all_right = (right | ~answer).all(dim=1)[has_answer]
    answer_accuracy = _mean(right.double(), answer, dim=0)[answer.any(dim=0)]
    return Evaluation(
        loss_nats=float(_mean(losses, counts)),
        accuracy=float(_mean(right.double(), answer)),
        exact_match=float(all_right.double().mean()),
        share_learned=float((answer_accuracy >= LEARNED).double().mean()),
        position_loss_nats=_mean(losses, counts, dim=0).numpy(),
        position_accuracy=_mean(right.double(), counts, dim=0).numpy(),
    )


def _mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values under the mask; NaN where there are none."""
    kept = torch.where(mask, values, 0.0)
    return kept.sum() / mask.sum() if dim is None else kept.sum(dim) / mask.sum(dim)


def is_solved(evaluation: Evaluation, *, plateau: float, floor: float, solved_at: float) -> bool:
    """Whether the loss has come down far enough from the plateau to the floor, or the answers match exactly."""
    if evaluation.exact_match >= SOLVED_EXACT_MATCH:
        return True
    gap = plateau - floor
    return gap > 0 and (plateau - evaluation.loss_nats) / gap >= solved_at
