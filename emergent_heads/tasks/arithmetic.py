"""Tasks on bits: addition, multiplication, and a majority of majorities.

Formats and rules are those of "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997). Numbers are written
with the least significant bit first.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.tasks.algorithmic import AlgorithmicTask, Instances, Layout, Ragged, hashes
from emergent_heads.tasks.features import Feature, Tokens

_PLUS = 2
Bits = Int[np.ndarray, "row column"]


class _BinaryTask(AlgorithmicTask):
    """Tasks written in `0`, `1` and `+`; a problem is its bits."""

    symbols: ClassVar[str] = "01+"


class _OperandTask(_BinaryTask):
    """Two numbers of `bits` bits each, with `+` between them."""

    bits: int
    layout: Layout

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole_number("bits", self.bits, least=1))
        self._check_layout()

    def _operands(self, tokens: Tokens) -> tuple[Bits, Bits]:
        return _halves(self.problems(tokens))

    def _operand_features(self) -> tuple[Feature, Feature]:
        """Bit r of each operand, where bit r of the answer is to be predicted."""
        predicts = 2 * self.bits + 1 + np.arange(self.bits)
        return (
            Feature("first_operand", "binary", lambda tokens: self._operands(tokens)[0], predicts),
            Feature("second_operand", "binary", lambda tokens: self._operands(tokens)[1], predicts),
        )

    def _draw(self, n: int, generator: np.random.Generator) -> Instances:
        return generator.integers(2, size=(n, 2 * self.bits))

    def _split_parts(self, instances: Instances) -> Instances:
        return hashes(instances.reshape(-1, self.bits)).reshape(-1, 2).sum(axis=1, keepdims=True)

    def _prompts(self, instances: Instances) -> Ragged:
        return Ragged.full(np.insert(instances, self.bits, _PLUS, axis=1))

    def _read(self, prompts: Ragged) -> Instances:
        return _read_bits(np.delete(prompts.tokens[:, : 2 * self.bits + 1], self.bits, axis=1))


@dataclass(frozen=True)
class Addition(_OperandTask):
    """The sum of two numbers of `bits` bits, least significant bit first: `0110+1100=10010<EOS>` is 6 + 3 = 9.

    `=` stands at 2 n + 1, bit j of the sum at 2 n + 2 + j. Features, at the token whose residual stream is read:

    * `carry`: out of column r into column r + 1, where bit r of the sum stands and bit r + 1 is to be predicted
      (2 n + 2 + r);
    * `first_operand`, `second_operand`: bit r of a and b, where bit r of the sum is to be predicted (2 n + 1 + r).

    a + b and b + a are in the same split.

    Attributes:
        bits: of each operand, n.
        layout: which tokens count, see `AlgorithmicTask`.

    Raises:
        ArgumentError: fewer than 1 bit, or an unknown layout.
    """

    bits: int = 16
    layout: Layout = "prompt"

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence: 3 n + 4."""
        return 3 * self.bits + 4

    @property
    def features(self) -> tuple[Feature, ...]:
        """`carry`, `first_operand`, `second_operand`."""
        stands = 2 * self.bits + 2 + np.arange(self.bits)
        carry = Feature("carry", "binary", lambda tokens: _add(*self._operands(tokens))[1], stands)
        return (carry, *self._operand_features())

    def _answers(self, instances: Instances) -> Ragged:
        digits, carries = _add(*_halves(instances))
        return Ragged.full(np.hstack([digits, carries[:, -1:]]))


@dataclass(frozen=True)
class Multiplication(_OperandTask):
    """The product of two numbers of `bits` bits, least significant bit first: `0110+1100=01001000<EOS>` is 6 * 3 = 18.

    The two are parted by `+`, as in arXiv 2505.03997. `=` stands at 2 n + 1, bit j of the product at 2 n + 2 + j.
    Features, at the token whose residual stream is read:

    * `carry_k` for k from 2 to n, of long multiplication: when a times bit k - 1 of b, moved up by k - 1 columns, is
      added to the sum of the k - 1 such partial products before it, the carry out of column k - 1 + r, r = 0 .. n - 1,
      where the bit it goes into is to be predicted (2 n + 1 + k + r). 0 where that bit of b is 0;
    * `first_operand`, `second_operand`: bit r of a and b, where bit r of the product is to be predicted (2 n + 1 + r).

    a * b and b * a are in the same split.

    Attributes:
        bits: of each operand, n.
        layout: which tokens count, see `AlgorithmicTask`.

    Raises:
        ArgumentError: fewer than 1 bit, or an unknown layout.
    """

    bits: int = 16
    layout: Layout = "prompt"

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence: 4 n + 3."""
        return 4 * self.bits + 3

    @property
    def features(self) -> tuple[Feature, ...]:
        """`carry_2` to `carry_n`, `first_operand`, `second_operand`."""
        carries = [self._carry_feature(partial) for partial in range(2, self.bits + 1)]
        return (*carries, *self._operand_features())

    def _carry_feature(self, partial: int) -> Feature:
        def carries(tokens: Tokens) -> Bits:
            first, second = self._operands(tokens)
            earlier = np.where(np.arange(self.bits) < partial - 1, second, 0)
            before = _multiply(first, earlier)[:, partial - 1 : partial - 1 + self.bits]
            return _add(before, first * second[:, partial - 1 : partial])[1]

        into = 2 * self.bits + 1 + partial + np.arange(self.bits)
        return Feature(f"carry_{partial}", "binary", carries, into)

    def _answers(self, instances: Instances) -> Ragged:
        return Ragged.full(_multiply(*_halves(instances)))


@dataclass(frozen=True)
class MajorityOfMajorities(_BinaryTask):
    """Whether most groups of bits have mostly ones: `11010010=0<EOS>`, with 4 groups of 2 bits.

    A group votes 1 if more than half of its bits are 1; the answer is 1 if more than half of the groups vote 1. A tie
    counts as 0 both times. With 4 groups of 16 bits the answer is 1 in 18 % of the problems. arXiv 2505.03997 halves
    the number of bits: what it calls 32 is `MajorityOfMajorities(64)`.

    `=` stands at n, the answer at n + 1. Features, at the token whose residual stream is read:

    * `group_vote`: the vote of group r, at the last bit of the group, where it is known for the first time;
    * `votes`: the votes of all groups, at `=`, where the answer is to be predicted;
    * `running_count`: ones in the group of bit r up to and with bit r, at bit r.

    Attributes:
        bits: of the whole problem, n.
        groups: equal parts that the bits are divided into, in order.
        layout: which tokens count, see `AlgorithmicTask`.

    Raises:
        ArgumentError: fewer than 1 bit or group, bits that do not divide into the groups, or an unknown layout.
    """

    bits: int = 64
    groups: int = 4
    layout: Layout = "prompt"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole_number("bits", self.bits, least=1))
        object.__setattr__(self, "groups", whole_number("groups", self.groups, least=1))
        if self.bits % self.groups:
            raise ArgumentError(
                f"{self.bits} bits do not divide into {self.groups} equal groups; change bits or groups"
            )
        self._check_layout()

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence: n + 3."""
        return self.bits + 3

    @property
    def features(self) -> tuple[Feature, ...]:
        """`group_vote`, `votes`, `running_count`."""
        position = np.arange(self.bits)
        last = position.reshape(self.groups, -1)[:, -1]
        return (
            Feature("group_vote", "binary", lambda tokens: self._votes(self.problems(tokens)), last),
            Feature("votes", "multilabel", lambda tokens: self._votes(self.problems(tokens))[:, None], [self.bits]),
            Feature("running_count", "continuous", self._running_counts, position),
        )

    def _by_group(self, instances: Instances) -> Int[np.ndarray, "row group bit"]:
        return instances.reshape(-1, self.groups, self.bits // self.groups)

    def _votes(self, instances: Instances) -> Int[np.ndarray, "row group"]:
        return _majority(self._by_group(instances))

    def _running_counts(self, tokens: Tokens) -> Int[np.ndarray, "row pos"]:
        return self._by_group(self.problems(tokens)).cumsum(axis=-1).reshape(-1, self.bits)

    def _draw(self, n: int, generator: np.random.Generator) -> Instances:
        return generator.integers(2, size=(n, self.bits))

    def _prompts(self, instances: Instances) -> Ragged:
        return Ragged.full(instances)

    def _answers(self, instances: Instances) -> Ragged:
        return Ragged.full(_majority(self._votes(instances))[:, None])

    def _read(self, prompts: Ragged) -> Instances:
        return _read_bits(prompts.tokens[:, : self.bits])


def _read_bits(tokens: Tokens) -> Bits:
    """The bits that these tokens are, and 0 for a token that is none."""
    return (tokens == 1).astype(int)


def _halves(instances: Instances) -> tuple[Bits, Bits]:
    n = instances.shape[1] // 2
    return instances[:, :n], instances[:, n:]


def _add(first: Bits, second: Bits) -> tuple[Bits, Bits]:
    """Digits of the sum, and the carry out of each column."""
    carries = np.empty_like(first)
    carry = np.zeros(len(first), dtype=first.dtype)
    for column in range(first.shape[1]):
        total = first[:, column] + second[:, column] + carry
        carry = carries[:, column] = total >> 1
    incoming = np.hstack([np.zeros((len(first), 1), dtype=first.dtype), carries[:, :-1]])
    return first ^ second ^ incoming, carries


def _multiply(first: Bits, second: Bits) -> Bits:
    """Digits of the product, twice as many as each factor has."""
    n = first.shape[1]
    columns = np.zeros((len(first), 2 * n), dtype=first.dtype)
    for shift in range(n):
        columns[:, shift : shift + n] += first * second[:, shift : shift + 1]
    for column in range(2 * n - 1):
        columns[:, column + 1] += columns[:, column] >> 1
    return columns & 1


def _majority(votes: Int[np.ndarray, "*row voter"]) -> Int[np.ndarray, "*row"]:
    """1 where more than half of the voters are 1."""
    return (2 * votes.sum(axis=-1) > votes.shape[-1]).astype(int)
