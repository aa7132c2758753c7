"""Sequence tasks on real text: plain text, passages said over and over, and a control without order.

Texts are files of one's own or the Python standard library, which every machine has; `encoded_text` makes token ids of
them.
"""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.randomness import numpy_generator, torch_generator
from emergent_heads.storage import digest
from emergent_heads.tasks.encoded_text import STANDARD_LIBRARY, EncodedText, TextSource, TokenIds, encoded_text
from emergent_heads.tasks.mixture import Mixture
from emergent_heads.tasks.task import SequenceBatch, SequenceTask

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TextCorpus(SequenceTask):
    """Stretches of real text, as tokens of a byte-level byte-pair encoding that is trained on the text itself.

    The documents stand one after the other in the order of the files, an end-of-text token after each, and a sequence
    is `context` tokens from a random place, so it may run over the end of a document. About `held_out_share` of the
    text is held out, whole documents, chosen by a hash of what they say; neither training nor the encoding sees them.
    Every split but "train" reads these. The ids are worked out once and memory-mapped from the cache folder
    (`EMERGENT_HEADS_CACHE`).

    The plateau is the entropy of the tokens' frequencies in the training text. The lowest loss that is possible on
    real text is not known: the floor is 0, which no model reaches.

    Attributes:
        paths: files of UTF-8 text, or patterns such as "texts/**/*.txt"; one or several. "stdlib" stands for the
            top-level modules of the Python standard library, without what is not ASCII.
        vocabulary_size: tokens of the encoding, the end-of-text token (id 0) and all bytes of the text among them.
        context: tokens of a sequence.
        held_out_share: share of the characters to hold out.
        separator: text that parts the documents of a file; None: a file is one document.
        text_digest: what `digest` gave when the task was made before; a text that differs is then refused.

    Raises:
        ArgumentError: a number outside its range, or a text that is not the one of `text_digest`. When the text is
            first needed: no such file, no UTF-8, one document only, more different bytes than `vocabulary_size`
            takes, or a split shorter than `context`.
    """

    paths: str | tuple[str, ...] = STANDARD_LIBRARY
    vocabulary_size: int = 512
    context: int = 64
    held_out_share: float = 0.1
    separator: str | None = None
    text_digest: str | None = field(default=None, repr=False, compare=False)

    floor = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", _as_text(self.paths))
        for name, least in (("vocabulary_size", 2), ("context", 2)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=least))
        if not 0 < self.held_out_share < 1:
            raise ArgumentError(f"held_out_share is {self.held_out_share!r}; it is a share between 0 and 1")
        if self.separator == "":
            raise ArgumentError("separator is empty; leave it out where a file is one document")
        if self.text_digest is not None and self.text_digest != self.digest:
            raise ArgumentError(
                f"the text of {self!r} is not the one the task was made with: its digest is {self.digest} here, and "
                f"was {self.text_digest}; give the same files, or leave text_digest out to use the text as it is now"
            )

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence."""
        return self.context

    @cached_property
    def plateau(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Entropy of the tokens' frequencies in the training text, in nats."""
        shares = self.token_counts[self.token_counts > 0] / self.token_counts.sum()
        return float(-(shares * np.log(shares)).sum())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the documents, 32 hexadecimal digits."""
        return self._source.digest()

    @property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """What gives the token ids, for models that are trained on them."""
        return self._encoded.tokenizer

    @property
    def encoding(self) -> str:
        """See `SequenceTask.encoding`; texts that differ in `context` alone have the same."""
        return digest(self._source, self.vocabulary_size, self.held_out_share)

    @property
    def token_counts(self) -> "Int[np.ndarray, ' vocabulary']":
        """How often each token occurs in the training text."""
        return self._encoded.counts

    def frequent_tokens(self, at_least: int = 50) -> list[int]:
        """Ids of the tokens that the training text has at least so often, the end-of-text token left out.

        For prompts of random tokens that a model can know: `in_context_repetition(vocabulary=text.frequent_tokens())`.
        """
        end = self.tokenizer.eos_token_id
        return [token for token in np.flatnonzero(self.token_counts >= at_least).tolist() if token != end]

    def tokens(self, split: str = "train") -> TokenIds:
        """All of a split's text as token ids, read-only: of "train", or with any other name of what is held out.

        Raises:
            ArgumentError: it has fewer than `context` tokens.
        """
        tokens = self._encoded.splits["train" if split == "train" else "held-out"]
        if len(tokens) < self.context:
            raise ArgumentError(
                f"the text of the split {split!r} has {len(tokens)} tokens, fewer than a context of {self.context}; "
                "give more text or a shorter context"
            )
        return tokens

    def batch(
        self, n: int, *, seed: int, step: int = 0, split: str = "train", device: "torch.device | str" = "cpu"
    ) -> SequenceBatch:
        """`n` sequences at random places, drawn on the CPU and moved to `device`: the same on every device.

        Every token but the first counts, in loss and answer.

        Args:
            n: number of sequences.
            seed: of the run.
            step: of the training.
            split: "train", or the name of a stream of places in what is held out.
            device: where the batch goes.

        Raises:
            ArgumentError: fewer than 1 sequence, or a text that cannot be used.
        """
        text = self.tokens(split)
        generator = numpy_generator(seed, "text", split, step)
        starts = generator.integers(len(text) - self.context + 1, size=whole_number("n", n, least=1))
        tokens = passages(text, starts, np.full(n, self.context), self.context)
        return _batch(tokens, np.ones(n, dtype=int), device)

    def settings(self) -> dict[str, Any]:
        """Name and fields as plain values, with the digest of the text."""
        return {**super().settings(), "text_digest": self.digest}

    @cached_property
    def _source(self) -> TextSource:
        return TextSource((self.paths,) if isinstance(self.paths, str) else self.paths, self.separator)

    @cached_property
    def _encoded(self) -> EncodedText:
        return encoded_text(self._source, self.vocabulary_size, self.held_out_share)

    def __getstate__(self) -> dict[str, Any]:
        """The settings only: another process maps the text for itself."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class RepeatedText(SequenceTask):
    """Every sequence is one passage of a text, said over and over: what teaches a model to look up what came before.

    Plateau and floor are the text's: repetition changes neither the tokens' frequencies nor what is known of the
    passage itself, which has to be said once.

    Attributes:
        text: where the passages are from; held-out ones from its held-out documents.
        passage: shortest and longest passage in tokens; all lengths between are equally likely.

    Raises:
        ArgumentError: a passage of less than 1 token or not shorter than the text's context, or a shortest one that is
            longer than the longest.
    """

    text: TextCorpus
    passage: tuple[int, int] = (8, 32)

    floor = 0.0

    def __post_init__(self) -> None:
        shortest, longest = (whole_number("passage", tokens, least=1) for tokens in self.passage)
        if not shortest <= longest < self.text.context:
            raise ArgumentError(
                f"passage {shortest} to {longest} tokens: give the shortest first, and a longest that is shorter than "
                f"the text's context of {self.text.context}, so that it is said again"
            )
        object.__setattr__(self, "passage", (shortest, longest))

    @property
    def vocabulary_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of token ids."""
        return self.text.vocabulary_size

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence."""
        return self.text.context

    @property
    def plateau(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Entropy of the tokens' frequencies in the training text, in nats."""
        return self.text.plateau

    @property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The text's."""
        return self.text.tokenizer

    @property
    def encoding(self) -> str:
        """The text's."""
        return self.text.encoding

    def batch(
        self, n: int, *, seed: int, step: int = 0, split: str = "train", device: "torch.device | str" = "cpu"
    ) -> SequenceBatch:
        """`n` sequences, as `TextCorpus.batch`.

        Every token but the first counts in the loss; the answer is what follows the first saying, which can be known.
        """
        text = self.text.tokens(split)
        generator = numpy_generator(seed, "repeated text", split, step)
        starts = generator.integers(len(text) - self.length + 1, size=whole_number("n", n, least=1))
        lengths = generator.integers(self.passage[0], self.passage[1] + 1, size=n)
        return _batch(passages(text, starts, lengths, self.length), lengths, device)


@dataclass(frozen=True)
class ShuffledTokens(SequenceTask):
    """A control: the sequences of another task, the tokens of each in random order.

    The tokens are the same, and how often; nothing else of the task is left. Every token but the first counts, in loss
    and answer, also those that only fill up a sequence. The plateau is the task's, which is right where all its tokens
    count, as in text. The floor is 0, which no model reaches.

    Attributes:
        of: the task whose sequences they are.
    """

    of: SequenceTask

    floor = 0.0

    @property
    def vocabulary_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of token ids."""
        return self.of.vocabulary_size

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence."""
        return self.of.length

    @property
    def plateau(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The task's."""
        return self.of.plateau

    @property
    def tokenizer(self) -> Any | None:
        """The task's."""
        return self.of.tokenizer

    @property
    def encoding(self) -> str | None:
        """The task's."""
        return self.of.encoding

    def batch(
        self, n: int, *, seed: int, step: int = 0, split: str = "train", device: "torch.device | str" = "cpu"
    ) -> SequenceBatch:
        """The task's own batch of the same arguments, each row in an order drawn on `device`."""
        import torch

        tokens = self.of.batch(n, seed=seed, step=step, split=split, device=device).tokens
        generator = torch_generator(seed, "shuffled tokens", split, step, device=tokens.device)
        order = torch.rand(tokens.shape, generator=generator, device=tokens.device, dtype=torch.float64).argsort(dim=1)
        counts = (torch.arange(self.length, device=tokens.device) >= 1).expand(n, -1)
        return SequenceBatch(tokens.gather(1, order), counts, counts)


def repeated_text(text: TextCorpus, share: float = 0.75, passage: tuple[int, int] = (8, 32)) -> Mixture:
    """Repeated passages and plain text in one batch: a recipe by which a small model soon learns to repeat.

    With three quarters of the rows repeated, induction heads form within some hundred steps at batches of 2,048
    tokens; with half of them later and less surely.

    Args:
        text: where both are from.
        share: of the rows that are repeated passages, 0 to 1.
        passage: shortest and longest passage in tokens.

    Raises:
        ArgumentError: a share outside 0 to 1, or a passage that does not fit the text's context.
    """
    if not 0 <= share <= 1:
        raise ArgumentError(f"share is {share!r}; it is a share of the rows, 0 to 1")
    return Mixture((RepeatedText(text, passage), text), (share, 1 - share))


def passages(
    text: TokenIds, starts: "Int[np.ndarray, ' row']", lengths: "Int[np.ndarray, ' row']", context: int
) -> "Int[np.ndarray, 'row pos']":
    """Rows of `context` tokens: the `lengths` tokens of the text from `starts` on, over and over."""
    return text[starts[:, None] + np.arange(context) % lengths[:, None]]


def _batch(
    tokens: "Int[np.ndarray, 'row pos']", answers_from: "Int[np.ndarray, ' row']", device: "torch.device | str"
) -> SequenceBatch:
    """A batch in which every token but the first counts, and those from a place on are the answer."""
    import torch

    position = np.arange(tokens.shape[1])
    counts = torch.from_numpy(position >= 1).to(device).expand(len(tokens), -1)
    answer = torch.from_numpy(position >= answers_from[:, None]).to(device)
    return SequenceBatch(torch.from_numpy(tokens.astype(np.int64)).to(device), counts, answer)


def _as_text(paths: Any) -> str | tuple[str, ...]:
    """One path, or several, as text."""
    if isinstance(paths, (list, tuple)):
        if not paths:
            raise ArgumentError('paths is empty; give text files, or "stdlib"')
        return tuple(map(str, paths))
    return str(paths)
