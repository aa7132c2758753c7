"""What a task is, in both kinds.

A prompt task asks an existing model: prompts with one right next token each, as token ids by the model's tokenizer.
A sequence task also trains models: fresh random sequences at every step, in a vocabulary of its own.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Int

from emergent_heads import notebook
from emergent_heads.errors import ArgumentError, TokenizerError
from emergent_heads.storage import digest

if TYPE_CHECKING:
    import numpy as np
    import torch
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

    def _repr_html_(self) -> str:
        settings = {each.name: getattr(self, each.name) for each in fields(self)} if is_dataclass(self) else {}
        settings |= {"n_prompts": getattr(self, "n_prompts", None)}
        settings = {name: value for name, value in settings.items() if name not in ("rows", "targets", "name")}
        return notebook.page(notebook.card(self.name, settings), self._first_prompts())

    def _first_prompts(self) -> str:
        """Some prompts as a table, where they can be made without a tokenizer."""
        make: Any = getattr(self, "prompts", None)
        if make is None:
            return ""
        try:
            return notebook.rows(make().head(3).map(repr))  # as in code: spaces at the ends matter
        except TokenizerError:
            return ""

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


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    """Sequences of token ids and which of the tokens count.

    A model reads `tokens[:, :-1]` and predicts `tokens[:, 1:]`.

    Attributes:
        tokens: `[row, pos]`.
        loss_mask: `[row, pos]`, True at tokens whose prediction counts in the loss; never at the first.
        answer_mask: `[row, pos]`, True at tokens that are the answer: accuracy and exact match look at these.
    """

    tokens: "Int[Tensor, 'row pos']"
    loss_mask: "Bool[Tensor, 'row pos']"
    answer_mask: "Bool[Tensor, 'row pos']"

    def __len__(self) -> int:
        return len(self.tokens)


class SequenceTask(ABC):
    """A task that models are trained on: a frozen dataclass whose fields are its settings.

    Losses are in nats, as means over the tokens that count (`SequenceBatch.loss_mask`).

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens of a sequence.
        plateau: loss of a model that knows nothing but the tokens' frequencies.
        floor: lowest loss that any model can reach.
    """

    vocabulary_size: int
    length: int
    plateau: float
    floor: float

    @property
    def name(self) -> str:
        """The task's name, as in the tables."""
        return type(self).__name__

    @abstractmethod
    def batch(
        self, n: int, *, seed: int, step: int = 0, split: str = "train", device: "torch.device | str" = "cpu"
    ) -> SequenceBatch:
        """`n` fresh sequences, generated on `device`.

        The same arguments give the same sequences, whatever was drawn before, so any step can be made again alone.

        Args:
            n: number of sequences.
            seed: of the run.
            step: of the training.
            split: name of a stream of its own: "train", "held-out".
            device: where the batch is made.
        """

    @property
    def mean_length(self) -> float:
        """Mean tokens of a sequence without padding."""
        return float(self.length)

    def pattern(self) -> "Bool[Tensor, 'dest src']":
        """The ground-truth attention pattern of a next-token predictor, `[length, length]`.

        True where the position `dest`, which predicts token `dest + 1`, must read position `src <= dest`. A model that
        reads fewer tokens takes the upper left corner.

        Raises:
            ArgumentError: this task has no such pattern.
        """
        raise ArgumentError(f"{self.name} has no single right attention pattern")

    @property
    def tokenizer(self) -> Any | None:
        """The transformers tokenizer that gives the token ids, for tasks on text; None for all others."""
        return None

    @property
    def encoding(self) -> str | None:
        """Key of what the token ids stand for: tasks with the same one have the same tokenizer. None without one."""
        return None

    @property
    def label(self) -> str:
        """The name and what is told in few words of the settings, for names of folders.

        Those that are not the default ones, if they are numbers or words, and the names of tasks within the task.
        """
        told: list[str] = []
        for each in fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, each.name)
            if isinstance(value, SequenceTask) or _are_tasks(value):
                told.append("+".join(task.name for task in ([value] if isinstance(value, SequenceTask) else value)))
            elif each.init and each.repr and isinstance(value, (int, float, str)) and value != each.default:
                told.append(f"{'task_seed' if each.name == 'seed' else each.name}={value}")
        return "-".join([self.name, *told])

    def settings(self) -> dict[str, Any]:
        """Name and fields, as plain values for a manifest; two tasks with equal settings are the same task.

        `emergent_heads.tasks.from_settings` makes a task of the library again.
        """
        values = {each.name: _plain(getattr(self, each.name)) for each in fields(self) if each.init}  # pyright: ignore[reportArgumentType]
        return {"task": self.name, **values}

    def _repr_html_(self) -> str:
        settings = {name: value for name, value in self.settings().items() if name != "task"}
        sizes = {"vocabulary_size": self.vocabulary_size, "length": self.length}
        return notebook.page(notebook.card(self.name, {**settings, **sizes}))


def _plain(value: Any) -> Any:
    """A field's value for a manifest: a task by its settings."""
    if isinstance(value, SequenceTask):
        return value.settings()
    return [each.settings() for each in value] if _are_tasks(value) else value


def _are_tasks(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(each, SequenceTask) for each in value)
