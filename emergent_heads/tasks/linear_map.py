"""The linear map: every token of a state is the sum of a few tokens of the state before, modulo the symbols.

One of the two tasks of "Emergent Capabilities Arise Randomly from Learning Sparse Attention Patterns"
(arXiv 2606.25010, section 3.2): a head that attends to the right few tokens solves one output token, and no other
pattern helps at all, so output tokens are learned one at a time and abruptly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.randomness import numpy_generator
from emergent_heads.tasks.state_sequences import StateSequenceTask, as_tuples, whole_numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class LinearMap(StateSequenceTask):
    """States x of which each is the last one times a matrix: x[t + 1] = A x[t] mod `symbols`.

    A is the same in all sequences. It is drawn from the task's seed: each row has exactly `sparsity` ones, at places
    drawn without replacement, the rows independent of each other; nothing keeps A invertible. With one seed and size,
    the ones of a sparser matrix are also ones of a denser one. A matrix of one's own takes the place of the draw.

    With `sparsity` equal to `state_size` all output tokens of the second state are one and the same sum. A model that
    copies it from the token before has all but the first right, at a loss of `loss_with_unlearned(1)`, without having
    learned the sum.

    Attributes:
        state_size: tokens in a state, S.
        sparsity: ones in each row of A, s. With a matrix, its non-zero entries in each row, None where rows differ.
        states: states in a sequence, T.
        symbols: values of a token, C.
        seed: of the draw of A, not of the sequences.
        matrix: A, `[state_size, state_size]` with entries below `symbols`, as nested sequences, an array or a tensor;
            None draws it. The state size and sparsity are read from it where they are left at their defaults.

    Raises:
        ArgumentError: a number outside its range, sparsity above the state size, or a matrix that does not fit:
            another shape, other entries, another number of non-zero entries in each row, a row of zeros.
    """

    state_size: int = 16
    sparsity: int | None = 3
    states: int = 2
    symbols: int = 2
    seed: int = 0
    matrix: "Sequence[Sequence[int]] | Int[np.ndarray, 'cell source'] | Int[Tensor, 'cell source'] | None" = None

    def __post_init__(self) -> None:
        if self.matrix is not None:
            self._read_matrix()
        else:
            self._read_numbers(sparsity=1)
        self._read_numbers(state_size=1, states=2, symbols=2, seed=0)
        if self.sparsity is not None and self.sparsity > self.state_size:
            raise ArgumentError(
                f"sparsity is {self.sparsity}, but a row has only {self.state_size} places (state_size); "
                "give at most that many ones"
            )

    @cached_property
    def transition(self) -> "Int[np.ndarray, 'cell source']":
        """The matrix A, read-only."""
        if self.matrix is not None:
            matrix = np.array(self.matrix)
        else:
            matrix = _sparse_rows(self.state_size, self.sparsity or 0, self.seed)
        matrix.setflags(write=False)
        return matrix

    @property
    def sources(self) -> "Bool[np.ndarray, 'cell source']":
        """Which tokens of the state before each token is a sum of: the non-zero entries of A."""
        return self.transition != 0

    @property
    def floor(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Lowest loss any model can reach, in nats: (S - 1) / (S T - 1) ln C.

        The first state is random and its first token is not predicted; it decides all later states.
        """
        return self._mean_loss(0.0)

    @property
    def floor_paper(self) -> float:
        """The floor as the paper writes it, in nats: (S - 1) / (S T) ln C, a mean over all tokens and not all but one.

        A model's mean loss over the predicted tokens cannot come down to it; compare losses with `floor`.
        """
        return (self.state_size - 1) / self.length * self.chance

    @cached_property
    def plateau(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Loss of a model that knows only how often each symbol stands at each position, in nats.

        ln C while every token is uniformly distributed, which two states of a drawn matrix always are. Row i of A^t
        makes token i of state t uniform over the multiples of g, the greatest common divisor of the row and C: C / g
        values. Powers of a matrix that is not invertible can have rows of zeros (g = C), whose token is always 0.
        """
        power, later = np.eye(self.state_size), 0.0
        for _ in range(self.states - 1):
            power = np.mod(power @ self.transition, self.symbols)  # in floating point, exact for whole numbers
            divisors = np.gcd.reduce(power.astype(int), axis=1, initial=self.symbols)
            later += float(np.log(self.symbols / divisors).sum())
        return self._mean_loss(later)

    def loss_with_unlearned(self, n: int) -> float:
        """Loss in nats of a model with `n` output tokens at chance and all others right: floor + n ln C / (S T - 1).

        `n=1` is the loss of copying where the sparsity is the state size (two states): S ln C / (2 S - 1).

        Raises:
            ArgumentError: more output tokens than the sequence has, or fewer than none.
        """
        outputs = self.length - self.state_size
        if whole_number("n", n, least=0) > outputs:
            raise ArgumentError(f"n is {n}, but a sequence has only {outputs} output tokens")
        return self._mean_loss(n * self.chance)

    @property
    def n_candidates(self) -> int:
        """Sets of places a row can have: C(S, s), "S choose s"; with rows that differ, of the row with most sets.

        The more there are, the harder a row is to find: a public reproduction of the paper (16 seeds) solved rows with
        up to about 500 and none with more than 8,000.
        """
        return max(math.comb(self.state_size, int(ones)) for ones in set(self.sources.sum(axis=1)))

    @property
    def n_distinct_rows(self) -> int:
        """Distinct rows of A: output tokens of a state that cannot be had by copying an earlier one."""
        return len(np.unique(self.transition, axis=0))

    @cached_property
    def rank(self) -> int | None:
        """Rank of A over the field of `symbols` elements; None where `symbols` is not prime.

        Numbers modulo a composite number are no field, and a matrix over them has no rank in this sense; whether it is
        invertible can be said all the same.
        """
        return _rank(self.transition, self.symbols) if _prime_factors(self.symbols) == [self.symbols] else None

    @cached_property
    def invertible(self) -> bool:
        """Whether the last state can be had back from the next: A has full rank modulo each prime factor of C."""
        return all(_rank(self.transition, prime) == self.state_size for prime in _prime_factors(self.symbols))

    def _later_states(
        self, first: "Float[Tensor, 'row cell']", generator: "torch.Generator"
    ) -> "list[Float[Tensor, 'row cell']]":
        (transposed,) = self._constants(first.device)
        states = [first]
        for _ in range(self.states - 1):
            states.append((states[-1] @ transposed).remainder_(self.symbols))
        return states[1:]

    def _arrays(self) -> list[np.ndarray]:
        return [self.transition.T.copy()]

    def _read_matrix(self) -> None:
        matrix = whole_numbers("matrix", self.matrix, below=whole_number("symbols", self.symbols, least=2))
        size = len(matrix) if self.state_size == LinearMap.state_size else self.state_size
        if matrix.shape != (size, size):
            raise ArgumentError(f"matrix has the shape {list(matrix.shape)}; for states of {size} it must be square")
        counts = np.count_nonzero(matrix, axis=1)
        if 0 in counts:
            raise ArgumentError(f"row {counts.argmin()} of matrix is all zeros, so its output would never change")
        sparsity = int(counts[0]) if len(set(counts)) == 1 else None
        if self.sparsity not in (None, LinearMap.sparsity, sparsity):
            raise ArgumentError(
                f"sparsity is {self.sparsity}, but the rows of matrix have {sorted(set(counts.tolist()))} non-zero "
                "entries; leave sparsity out, it is read from the matrix"
            )
        for name, value in (("matrix", as_tuples(matrix)), ("state_size", size), ("sparsity", sparsity)):
            self._set(name, value)


def _sparse_rows(size: int, ones: int, seed: int) -> "Int[np.ndarray, 'cell source']":
    """A square matrix with so many ones in each row: where the smallest of the row's random numbers are."""
    order = numpy_generator(seed, "linear map").random((size, size)).argsort(axis=1)
    matrix = np.zeros((size, size), dtype=int)
    np.put_along_axis(matrix, order[:, :ones], 1, axis=1)
    return matrix


def _rank(matrix: "Int[np.ndarray, 'row column']", prime: int) -> int:
    """Rank over the field of `prime` elements, by elimination."""
    rows, rank = matrix % prime, 0
    for column in range(rows.shape[1]):
        below = np.flatnonzero(rows[rank:, column])
        if not len(below):
            continue
        rows[[rank, rank + below[0]]] = rows[[rank + below[0], rank]]
        rows[rank] = rows[rank] * pow(int(rows[rank, column]), -1, prime) % prime
        others = rows[rank + 1 :]
        others -= np.outer(others[:, column], rows[rank])
        others %= prime
        rank += 1
        if rank == len(rows):
            break
    return rank


def _prime_factors(number: int) -> list[int]:
    """Distinct prime factors, in order."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            factors.append(divisor)
            while number % divisor == 0:
                number //= divisor
        divisor += 1
    return factors + [number] * (number > 1)
