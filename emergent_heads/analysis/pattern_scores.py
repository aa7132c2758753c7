"""What an attention pattern does, in the field's standard scores.

For a head's pattern `[dest, src]` over a prompt's own tokens (padding left out):

* previous token: attention from each position to the one before it, mean over positions from 1 on;
* duplicate token: attention to earlier occurrences of the same token, summed over them, mean over the positions that
  have any (Wang et al. 2022, arXiv 2211.00593);
* induction: attention to the tokens right after those earlier occurrences, likewise (Olsson et al. 2022,
  arXiv 2209.11895);
* first token: attention to position 0, mean over positions from 1 on;
* entropy: of each row, in nats, mean over positions.

A score that a prompt has no position for (no repeated token, say) is NaN there and left out of the mean over prompts.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emergent_heads.tasks.task import PromptBatch

SCORES = ("entropy_nats", "previous_token", "induction", "duplicate_token", "first_token")


def pattern_scores(
    patterns: Float[Tensor, "prompt head dest src"], batch: PromptBatch
) -> dict[str, Float[Tensor, "prompt head"]]:
    """The scores of each head on each prompt, by name, on the patterns' device."""
    batch = batch.to(patterns.device)
    patterns = patterns.float()
    length = batch.tokens.shape[1]
    position = torch.arange(length, device=patterns.device)
    own = position <= batch.positions[:, None]
    before = position[:, None] - 1 == position
    earlier = batch.tokens[:, :, None] == batch.tokens[:, None, :]
    earlier = earlier & (position[:, None] > position)
    after_earlier = torch.zeros_like(earlier)
    after_earlier[..., 1:] = earlier[..., :-1]
    entropy = -(patterns * patterns.clamp_min(1e-30).log()).sum(-1)
    return {
        "entropy_nats": _mean_over(entropy, own),
        "previous_token": _score(patterns, before.expand_as(earlier), own),
        "induction": _score(patterns, after_earlier, own),
        "duplicate_token": _score(patterns, earlier, own),
        "first_token": _score(patterns, ((position[:, None] > 0) & (position == 0)).expand_as(earlier), own),
    }


def _score(
    patterns: Float[Tensor, "prompt head dest src"],
    wanted: Bool[Tensor, "prompt dest src"],
    own: Bool[Tensor, "prompt dest"],
) -> Float[Tensor, "prompt head"]:
    """Attention to the wanted sources, summed over them, mean over the destinations that have any."""
    attention = (patterns * wanted[:, None]).sum(-1)
    return _mean_over(attention, own & wanted.any(-1))


def _mean_over(
    values: Float[Tensor, "prompt head dest"], counted: Bool[Tensor, "prompt dest"]
) -> Float[Tensor, "prompt head"]:
    total = (values * counted[:, None]).sum(-1)
    count: Int[Tensor, " prompt"] = counted.sum(-1)
    return torch.where(count[:, None] > 0, total / count[:, None].clamp_min(1), torch.nan)
