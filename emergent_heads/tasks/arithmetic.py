"""Arithmetic on binary numbers: addition, multiplication, and a majority of majorities.

Formats and rules are those of "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997). Numbers are written
with the least significant bit first.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from emergent_heads.errors import whole_number
from emergent_heads.tasks.algorithmic import AlgorithmicTask, Instances, Layout, Ragged
from emergent_heads.tasks.features import Feature, Tokens

_PLUS = 2


class _BinaryTask(AlgorithmicTask):
    """Tasks written in `0`, `1` and `+`; a problem is its bits."""

    symbols: ClassVar[str] = "01+"


@dataclass(frozen=True)
class Addition(_BinaryTask):
    """The sum of two numbers of `bits` bits, least significant bit first: `0110+1100=10010<EOS>` is 6 + 3 = 9.

    `=` stands at 2 n + 1, bit j of the sum at 2 n + 2 + j. Features, at the token whose residual stream is read:

    * `first_operand`, `second_operand`: bit r of a and b, where bit r of the sum is to be predicted (2 n + 1 + r);
    * `carry`: out of column r into column r + 1, where bit r of the sum stands and bit r + 1 is to be predicted
      (2 n + 2 + r).

    a + b and b + a are in the same split.

    Attributes:
        bits: of each operand, n.
        layout: which tokens count, see `AlgorithmicTask`.

    Raises:
        ArgumentError: fewer than 1 bit, or an unknown layout.
    """

    bits: int = 16
    layout: Layout = "prompt"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole_number("bits", self.bits, least=1))
        self._check_layout()

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence: 3 n + 4."""
        return 3 * self.bits + 4

    @property
    def features(self) -> tuple[Feature, ...]:
        """`carry`, `first_operand`, `second_operand`."""
        predicts = 2 * self.bits + 1 + np.arange(self.bits)  # the position that predicts bit r of the sum
        return (
            Feature("carry", "binary", self._carries, predicts + 1),
            Feature("first_operand", "binary", lambda tokens: self.problems(tokens)[:, : self.bits], predicts),
            Feature("second_operand", "binary", lambda tokens: self.problems(tokens)[:, self.bits :], predicts),
        )

    def _carries(self, tokens: Tokens) -> Int[np.ndarray, "row column"]:
        return _add(*np.split(self.problems(tokens), 2, axis=1))[1]

    def _draw(self, n: int, generator: np.random.Generator) -> Instances:
        return generator.integers(2, size=(n, 2 * self.bits))

    def _split_parts(self, instances: Instances) -> Instances:
        first, second = np.split(instances, 2, axis=1)
        differ = first != second
        column = differ.argmax(axis=1)[:, None]
        swapped = np.take_along_axis(first, column, axis=1) > np.take_along_axis(second, column, axis=1)
        return np.where(swapped, np.hstack([second, first]), instances)

    def _prompts(self, instances: Instances) -> Ragged:
        plus = np.full((len(instances), 1), _PLUS)
        return Ragged.full(np.hstack([instances[:, : self.bits], plus, instances[:, self.bits :]]))

    def _answers(self, instances: Instances) -> Ragged:
        sums, carries = _add(*np.split(instances, 2, axis=1))
        return Ragged.full(np.hstack([sums, carries[:, -1:]]))

    def _read(self, prompts: Ragged) -> Instances:
        n = self.bits
        return np.hstack([prompts.tokens[:, :n], prompts.tokens[:, n + 1 : 2 * n + 1]])


def _add(
    first: Int[np.ndarray, "row column"], second: Int[np.ndarray, "row column"]
) -> tuple[Int[np.ndarray, "row column"], Int[np.ndarray, "row column"]]:
    """Digits of the sum, and the carry out of each column."""
    carries = np.empty_like(first)
    carry = np.zeros(len(first), dtype=first.dtype)
    for column in range(first.shape[1]):
        total = first[:, column] + second[:, column] + carry
        carry = carries[:, column] = total >> 1
    incoming = np.hstack([np.zeros((len(first), 1), dtype=first.dtype), carries[:, :-1]])
    return first ^ second ^ incoming, carries
