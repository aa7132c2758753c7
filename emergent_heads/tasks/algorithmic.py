"""Algorithmic tasks: a problem, `=`, its answer, and an end mark, in single characters.

The ten tasks of "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997) have this shape. Their intermediate
quantities are known, as `features` that can be probed for.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt64

from emergent_heads.errors import ArgumentError, nearest, whole_number
from emergent_heads.randomness import derive_seed, numpy_generator
from emergent_heads.tasks.features import Feature, as_array
from emergent_heads.tasks.task import SequenceBatch, SequenceTask

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Layout = Literal["prompt", "paper"]
LAYOUTS: tuple[Layout, ...] = ("prompt", "paper")
END = "<EOS>"
HELD_OUT_SHARE = 8  # one in so many problems is kept from training
_MOST_IN_VAIN = 10_000  # problems drawn without one of the split before the task is called too small
_MOST_AT_ONCE = 2**15  # problems drawn at once, so that memory stays bounded
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
        """The problems that these prompts state (the inverse of `_prompts`).

        The tokens are `length` wide. Prompts may be anything, also of another task: where one states no problem, any
        problem may stand in its place, since what it says is written again and compared.
        """

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

    def separators(self, tokens: "Int[np.ndarray, 'row pos'] | Int[Tensor, 'row pos']") -> Int[np.ndarray, " row"]:
        """Index of the first `=` in each row.

        Raises:
            ArgumentError: a row without `=`.
        """
        found = as_array(tokens) == self.equals
        for row in np.flatnonzero(~found.any(axis=1)):
            raise ArgumentError(f"sequence {row} has no `=` (token {self.equals}); give sequences that {self!r} made")
        return found.argmax(axis=1)

    def problems(self, tokens: "Int[np.ndarray, 'row pos'] | Int[Tensor, 'row pos']") -> Instances:
        """The problems of these sequences, as the task's own whole numbers; the last token may be left out.

        Raises:
            ArgumentError: a sequence that states no problem of this task, such as one of another task or size.
        """
        tokens = as_array(tokens)
        if tokens.shape[1] not in (self.length, self.length - 1):
            raise ArgumentError(
                f"sequences of {tokens.shape[1]} tokens are not those of {self!r}, which have {self.length}; give "
                "sequences that this task made"
            )
        instances, right = self._stated(Ragged(tokens, self.separators(tokens)))
        for row in np.flatnonzero(~right):
            raise ArgumentError(f"sequence {row} states no problem of {self!r}; give sequences that this task made")
        return instances

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
        """One sequence in characters, up to its first `<EOS>`.

        Raises:
            ArgumentError: a token id that the task does not have.
        """
        characters = dict(enumerate([*self.symbols, "=", END]))
        found = [characters.get(int(token), "") for token in tokens]
        if "" in found:
            raise ArgumentError(
                f"token {int(tokens[found.index('')])} is none of {self.name}, which has {self.vocabulary_size}"
            )
        return "".join(found[: found.index(END) + 1] if END in found else found)

    def solve(self, *prompts: str) -> "Int[Tensor, 'prompt pos']":
        """Whole sequences of problems of your own, written as a prompt without `=`: `task.solve("0110+1100")`.

        Raises:
            ArgumentError: no prompt, or one that states no problem of this task.
        """
        import torch

        if not prompts:
            raise ArgumentError(f"{self.name}.solve needs at least one prompt, as a string without `=`")
        return torch.from_numpy(np.concatenate([self._solved(prompt) for prompt in prompts]))

    def _solved(self, prompt: str) -> Int[np.ndarray, "1 pos"]:
        ids = {character: place for place, character in enumerate(self.symbols)}
        if unknown := [character for character in prompt if character not in ids]:
            raise ArgumentError(f"the prompt {prompt!r} has {unknown[0]!r}; {self.name} writes {self.symbols!r}")
        tokens = np.array([[ids[character] for character in prompt]], dtype=int)
        instance, right = self._stated(Ragged.full(tokens))
        if not right.all():
            example = self._prompts(self._draw(1, numpy_generator(0, self.name, "example")))
            raise ArgumentError(
                f"the prompt {prompt!r} states no problem of {self!r}; one looks like "
                f"{self.text(example.tokens[0, : example.lengths[0]])!r}"
            )
        return self._written(instance)[0]

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
        """What simple predictors and a perfect model reach; frequencies are those of 20,000 random problems.

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
        instances = self._draw(_REFERENCE_ROWS, numpy_generator(0, self.name, "reference"))
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
        drawn, missing = 0, n
        while missing:
            if drawn > _MOST_IN_VAIN and missing == n:
                raise ArgumentError(
                    f"{self!r} has too few problems to part them into training and held-out ones; choose a larger size"
                )
            instances = self._draw(min(int(missing / share * 1.1) + 8, _MOST_AT_ONCE), generator)
            held_out = hashes(self._split_parts(instances)) % HELD_OUT_SHARE == 0
            found.append(instances[held_out != training][:missing])
            drawn += len(instances)
            missing -= len(found[-1])
        return np.concatenate(found)

    def _written(
        self, instances: Instances
    ) -> tuple[Int[np.ndarray, "row pos"], Int[np.ndarray, " row"], Int[np.ndarray, " row"]]:
        """Sequences, and the first and last position that count in each."""
        prompts, answers = self._prompts(instances), self._answers(instances)
        tokens = self._before_answer(prompts)
        _put(tokens, answers, prompts.lengths + 1)
        starts = prompts.lengths + (1 if self.layout == "prompt" else 0)
        return tokens, starts, prompts.lengths + 1 + answers.lengths

    def _before_answer(self, prompts: Ragged) -> Int[np.ndarray, "row pos"]:
        """Sequences with nothing but `<EOS>` after `=`."""
        tokens = np.full((len(prompts.lengths), self.length), self.end)
        _put(tokens, prompts, np.zeros_like(prompts.lengths))
        tokens[np.arange(len(tokens)), prompts.lengths] = self.equals
        return tokens

    def _stated(self, prompts: Ragged) -> tuple[Instances, Bool[np.ndarray, " row"]]:
        """The problems that these prompts state, and which of them say no less and no more than that."""
        lengths = np.minimum(prompts.lengths, self.length - 2)  # `=` and `<EOS>` must follow
        given = self._before_answer(Ragged(prompts.tokens, lengths))
        instances = self._read(Ragged(given, lengths))
        again = self._before_answer(self._prompts(instances))
        return instances, (prompts.lengths == lengths) & (given == again).all(axis=1)

    def _check_layout(self) -> None:
        if self.layout not in LAYOUTS:
            raise ArgumentError(f"layout must be {' or '.join(LAYOUTS)}, not {self.layout!r}")


def _put(tokens: Int[np.ndarray, "row pos"], rows: Ragged, starts: Int[np.ndarray, " row"]) -> None:
    """Writes each row's tokens into `tokens` from its start on."""
    row, place = np.nonzero(np.arange(rows.tokens.shape[1]) < rows.lengths[:, None])
    tokens[row, starts[row] + place] = rows.tokens[row, place]


_SALT = np.uint64(derive_seed(0, "split"))
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64


def hashes(parts: Int[np.ndarray, "row part"]) -> UInt64[np.ndarray, " row"]:
    """A 64-bit hash of each row, stable over processes and versions.

    Multilinear (Carter and Wegman, "Universal classes of hash functions", 1979): a sum modulo 2**64 with a fixed
    random weight for each part, then mixed so that every bit depends on all of it.
    """
    parts = np.asarray(parts).astype(np.uint64)
    return mixed(parts @ _hash_weights(parts.shape[1]) + _SALT)


@cache
def _hash_weights(n: int) -> UInt64[np.ndarray, " part"]:
    """Odd, so that no part is lost modulo 2**64; the same from the first on for every `n`."""
    return mixed(np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def mixed(values: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """The finaliser of splitmix64, elementwise; one to one."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


def _entropy_total(values: Int[np.ndarray, " row"]) -> float:
    """Nats that the values cost together under their own frequencies."""
    _, counts = np.unique(values, return_counts=True)
    return float(-(counts * np.log(counts / counts.sum())).sum())
