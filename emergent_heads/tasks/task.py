"""What a prompt task is: prompts with one right next token each, as token ids by the model's own tokenizer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxtyping import Int

from emergent_heads.storage import digest

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts as token ids, right-padded, each read at its own last position.

    Attributes:
        tokens: `[prompt, pos]`, padded on the right (causal models never see the padding from an earlier position).
        positions: `[prompt]`, the position whose next token is the answer.
        targets: `[prompt]`, the answer's token id.
        texts: per prompt, its tokens as short strings, for plots and messages.
    """

    tokens: "Int[Tensor, 'prompt pos']"
    positions: "Int[Tensor, ' prompt']"
    targets: "Int[Tensor, ' prompt']"
    texts: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def key(self) -> str:
        """Content key: the same prompts and answers give the same key."""
        return digest(self.tokens, self.positions, self.targets)

    def to(self, device: object) -> "PromptBatch":
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "positions", "targets")}
        return replace(self, **moved)

    def select(self, rows: "Int[np.ndarray, ' rows']") -> "PromptBatch":
        """The batch of these rows only."""
        import torch

        index = torch.as_tensor(rows, device=self.tokens.device)
        return PromptBatch(
            self.tokens[index],
            self.positions[index],
            self.targets[index],
            tuple(self.texts[int(row)] for row in rows),
        )


class PromptTask(ABC):
    """A capability, as prompts with one right next token. Made without a tokenizer."""

    name: str

    @abstractmethod
    def batch(self, tokenizer: Any, *, vocabulary_size: int, context: int | None) -> PromptBatch:
        """Token ids of the prompts for one model.

        Args:
            tokenizer: a transformers tokenizer, or None for a model without one.
            vocabulary_size: number of token ids the model knows.
            context: longest prompt in tokens the model takes; None when it has no limit.

        Raises:
            TokenizerError: the task needs a tokenizer and there is none.
            PromptError: an answer that is not one token, a prompt longer than the context, a token id outside the
                vocabulary, or no prompts; the message names the row.
        """
