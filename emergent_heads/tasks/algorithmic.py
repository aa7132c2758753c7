"""Algorithmic tasks: a problem, `=`, its answer, and an end mark, in single characters.

The ten tasks of "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997) have this shape. Their intermediate
quantities are known, as `features` that can be probed for.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from emergent_heads.errors import ArgumentError, nearest, whole_number
from emergent_heads.randomness import derive_seed, numpy_generator
from emergent_heads.tasks.features import Feature
from emergent_heads.tasks.task import SequenceBatch, SequenceTask

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Layout = Literal["prompt", "paper"]
LAYOUTS: tuple[Layout, ...] = ("prompt", "paper")
END = "<EOS>"
HELD_OUT_SHARE = 8  # one in so many problems is kept from training
_MOST_ROUNDS = 1000
_REFERENCE_ROWS = 20_000

Instances = Int[np.ndarray, "row part"]
"""Problems as whole numbers; what a column means is the task's own."""


class Ragged(NamedTuple):
    """Token ids of rows that differ in length; what stands beyond a row's length means nothing."""

    tokens: Int[np.ndarray, "row pos"]
    lengths: Int[np.ndarray, " row"]

    @classmethod
    def full(cls, tokens: Int[np.ndarray, "row pos"]) -> "Ragged":
        """Rows that all are as long as the array."""
        return cls(tokens, np.full(len(tokens), tokens.shape[1]))


class AlgorithmicTask(SequenceTask):
    """A task whose sequences are PROMPT `=` ANSWER `<EOS>`, filled up with `<EOS>` to one length.

    Every answer follows from the prompt, by stated rules where several would do. Problems are divided between training
    and everything else by a hash of the problem (of its `_split_parts`): a split other than "train" holds none that
    training can see. A mean loss is over the tokens that count, so longer answers weigh more.

    Attributes:
        symbols: the characters before `=` and `<EOS>`, in the order of their token ids.
        layout: which tokens count, in loss and exact match. With "prompt" the answer and the first `<EOS>`: `=`
            belongs to the prompt, and a perfect model has them all right. With "paper" `=` counts as well, as in
            arXiv 2505.03997; where prompts differ in length nobody can know when it comes.
    """

    symbols: ClassVar[str]
    layout: Layout

    # ---- what a task must say ----

    @property
    @abstractmethod
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence: the longest prompt and answer, `=`, and at least one `<EOS>`."""

    @property
    def features(self) -> tuple[Feature, ...]:
        """The intermediate quantities that can be probed for."""
        return ()

    @abstractmethod
    def _draw(self, n: int, generator: np.random.Generator) -> Instances:
        """`n` random problems."""

    @abstractmethod
    def _prompts(self, instances: Instances) -> Ragged:
        """The problems in writing, without `=`."""

    @abstractmethod
    def _answers(self, instances: Instances) -> Ragged:
        """Their answers in writing, without `<EOS>`."""

    @abstractmethod
    def _read(self, prompts: Ragged) -> Instances:
        """The problems that these prompts state (the inverse of `_prompts`)."""

    def _split_parts(self, instances: Instances) -> Int[np.ndarray, "row part"]:
        """Whole numbers that decide a problem's split: equal for problems that must not be parted."""
        return instances

    # ---- what all have ----

    @property
    def vocabulary_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of token ids."""
        return len(self.symbols) + 2

    @property
    def equals(self) -> int:
        """Token id of `=`."""
        return len(self.symbols)

    @property
    def end(self) -> int:
        """Token id of `<EOS>`."""
        return len(self.symbols) + 1

    def batch(
        self, n: int, *, seed: int, step: int = 0, split: str = "train", device: "torch.device | str" = "cpu"
    ) -> SequenceBatch:
        """`n` fresh sequences, generated on the CPU and moved to `device`: the same on every device.

        Args:
            n: number of sequences.
            seed: of the run.
            step: of the training.
            split: name of a stream of its own. What "train" holds stands in no other split, and the other way round.
            device: where the batch goes.

        Raises:
            ArgumentError: fewer than 1 sequence, or a task so small that a split has no problems.
        """
        import torch

        instances = self._instances(whole_number("n", n, least=1), seed, step, split)
        tokens, starts, ends = self._written(instances)
        position = np.arange(self.length)
        answer = (position >= starts[:, None]) & (position <= ends[:, None])
        mask = torch.from_numpy(answer).to(device)
        return SequenceBatch(torch.from_numpy(tokens).to(device), mask, mask)

    def separators(self, tokens: "Int[np.ndarray, 'row pos']") -> Int[np.ndarray, " row"]:
        """Index of `=` in each row."""
        return (np.asarray(tokens) == self.equals).argmax(axis=1)

    def problems(self, tokens: "Int[np.ndarray, 'row pos']") -> Instances:
        """The problems of these sequences, as the task's own whole numbers."""
        tokens = np.asarray(tokens)
        return self._read(Ragged(tokens, self.separators(tokens)))

    def feature(self, name: str) -> Feature:
        """The feature of that name.

        Raises:
            ArgumentError: there is none; the message names those there are.
        """
        for each in self.features:
            if each.name == name:
                return each
        raise ArgumentError(
            f"{self.name} has no feature {name!r}; {nearest(name, [each.name for each in self.features])}"
        )

    def text(self, tokens: "Int[np.ndarray, ' pos'] | Int[Tensor, ' pos'] | Sequence[int]") -> str:
        """One sequence in characters, up to its first `<EOS>`."""
        characters = [*self.symbols, "=", END]
        found = [characters[int(token)] for token in tokens]
        return "".join(found[: found.index(END) + 1] if END in found else found)

    def solve(self, *prompts: str) -> "Int[Tensor, 'prompt pos']":
        """Whole sequences of problems of your own, written as a prompt without `=`: `task.solve("0110+1100")`.

        Raises:
            ArgumentError: a prompt that states no problem of this task.
        """
        import torch

        ids = {character: place for place, character in enumerate(self.symbols)}
        rows = []
        for prompt in prompts:
            if unknown := [character for character in prompt if character not in ids]:
                raise ArgumentError(f"the prompt {prompt!r} has {unknown[0]!r}; {self.name} writes {self.symbols!r}")
            instance = self._read(Ragged.full(np.array([[ids[character] for character in prompt]])))
            written = self._prompts(instance)
            if self.text(written.tokens[0, : written.lengths[0]]) != prompt:
                raise ArgumentError(f"the prompt {prompt!r} states no problem of {self!r}")
            rows.append(self._written(instance)[0][0])
        return torch.from_numpy(np.array(rows))

    # ---- reference lines ----

    @property
    def floor(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Lowest mean loss that any model can reach, in nats."""
        return self._references["floor"]

    @property
    def plateau(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Mean loss in nats of a model that knows how often each token stands at each place of the answer, no more."""
        return self._references["position_marginals"]

    @property
    def mean_length(self) -> float:
        """Mean tokens of a sequence up to its first `<EOS>`, that included."""
        return self._references["mean_length"]

    @property
    def reference_lines(self) -> Mapping[str, float]:
        """What simple predictors and a perfect model reach; estimated on 20,000 sequences where no formula is known.

        `uniform_loss_nats`: every token id equally likely. `position_marginals_loss_nats`: the plateau.
        `floor_loss_nats`. `constant_answer_exact_match`: always giving the most frequent answer.
        `perfect_exact_match`: of a model that makes no mistake; below 1 only with the layout "paper".
        """
        found = self._references
        return {
            "uniform_loss_nats": float(np.log(self.vocabulary_size)),
            "position_marginals_loss_nats": found["position_marginals"],
            "floor_loss_nats": found["floor"],
            "constant_answer_exact_match": found["constant_answer"],
            "perfect_exact_match": found["perfect"],
        }

    @cached_property
    def _references(self) -> dict[str, float]:
        instances = self._instances(_REFERENCE_ROWS, 0, 0, "reference")
        tokens, starts, ends = self._written(instances)
        counts = ends - starts + 1
        by_place = np.full((len(tokens), int(counts.max())), -1)
        for place in range(by_place.shape[1]):
            rows = counts > place
            by_place[rows, place] = tokens[rows, starts[rows] + place]
        total = float(counts.sum())
        nats = sum(_entropy_total(by_place[counts > place, place]) for place in range(by_place.shape[1]))
        surprise, perfect = self._separator_surprise(instances) if self.layout == "paper" else (0.0, 1.0)
        _, times = np.unique(by_place, axis=0, return_counts=True)
        return {
            "position_marginals": (nats + surprise * len(tokens)) / total,
            "floor": surprise * len(tokens) / total,
            "constant_answer": float(times.max() / len(tokens)) * perfect,
            "perfect": perfect,
            "mean_length": float((ends + 1).mean()),
        }

    def _separator_surprise(self, instances: Instances) -> tuple[float, float]:
        """What predicting `=` costs a perfect model: mean nats a sequence, and the share it gets right."""
        return 0.0, 1.0

    # ---- sequences ----

    def _instances(self, n: int, seed: int, step: int, split: str) -> Instances:
        """`n` problems of a split: drawn until enough belong to it."""
        generator = numpy_generator(seed, self.name, split, step)
        training = split == "train"
        share = 1 - 1 / HELD_OUT_SHARE if training else 1 / HELD_OUT_SHARE
        found: list[Instances] = []
        missing = n
        for _ in range(_MOST_ROUNDS):
            drawn = self._draw(int(missing / share * 1.1) + 8, generator)
            held_out = _hashes(self._split_parts(drawn)) % HELD_OUT_SHARE == 0
            kept = drawn[held_out != training][:missing]
            found.append(kept)
            missing -= len(kept)
            if not missing:
                return np.concatenate(found)
        raise ArgumentError(
            f"{self!r} has too few problems to part them into training and held-out ones; choose a larger size"
        )

    def _written(
        self, instances: Instances
    ) -> tuple[Int[np.ndarray, "row pos"], Int[np.ndarray, " row"], Int[np.ndarray, " row"]]:
        """Sequences, and the first and last position that count in each."""
        prompts, answers = self._prompts(instances), self._answers(instances)
        tokens = np.full((len(instances), self.length), self.end)
        position = np.arange(self.length)
        _put(tokens, prompts, np.zeros(len(tokens), dtype=int), position)
        tokens[np.arange(len(tokens)), prompts.lengths] = self.equals
        _put(tokens, answers, prompts.lengths + 1, position)
        starts = prompts.lengths + (1 if self.layout == "prompt" else 0)
        return tokens, starts, prompts.lengths + 1 + answers.lengths

    def _check_layout(self) -> None:
        if self.layout not in LAYOUTS:
            raise ArgumentError(f"layout must be {' or '.join(LAYOUTS)}, not {self.layout!r}")


def _put(
    tokens: Int[np.ndarray, "row pos"],
    rows: Ragged,
    starts: Int[np.ndarray, " row"],
    position: Int[np.ndarray, " pos"],
) -> None:
    """Writes each row's tokens into `tokens` from its start on."""
    if not rows.tokens.shape[1]:
        return
    place = position - starts[:, None]
    inside: Bool[np.ndarray, "row pos"] = (place >= 0) & (place < rows.lengths[:, None])
    values = np.take_along_axis(rows.tokens, np.clip(place, 0, rows.tokens.shape[1] - 1), axis=1)
    np.copyto(tokens, values, where=inside)


_SALT = np.uint64(derive_seed(0, "split"))
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64


def _hashes(parts: Int[np.ndarray, "row part"]) -> "np.ndarray":
    """A 64-bit hash of each row, stable over processes and versions."""
    found = np.full(len(parts), _SALT, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in np.asarray(parts).T.astype(np.uint64):
            found = mixed(found ^ mixed(part + np.uint64(0x9E3779B97F4A7C15)))
    return found


def mixed(values: "np.ndarray") -> "np.ndarray":
    """The finaliser of splitmix64, elementwise on unsigned 64-bit numbers."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * _MIX[0]
        values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


def _entropy_total(values: Int[np.ndarray, " row"]) -> float:
    """Nats that the values cost together under their own frequencies."""
    _, counts = np.unique(values, return_counts=True)
    return float(-(counts * np.log(counts / counts.sum())).sum())
