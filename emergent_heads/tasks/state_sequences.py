"""Sequences of states, each computed from the one before by a rule that the model has to find.

The two synthetic tasks of "Emergent Capabilities Arise Randomly from Learning Sparse Attention Patterns"
(arXiv 2606.25010) have this shape: a state is a row of cells, the first one is drawn uniformly, and the states are
written one after the other without separators. Which cells of the last state a cell needs is known, and with it the
attention pattern that a next-token predictor has to learn.
"""

import math
from abc import abstractmethod
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.randomness import torch_generator
from emergent_heads.tasks.task import SequenceBatch, SequenceTask

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class StateSequenceTask(SequenceTask):
    """Sequences of `states` states of `state_size` cells with one of `symbols` values each.

    The token of cell `i` in state `t` stands at position `t * state_size + i`.
    """

    state_size: int
    states: int
    symbols: int

    @property
    def vocabulary_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of token ids: a token is the value of a cell."""
        return self.symbols

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence."""
        return self.states * self.state_size

    @property
    def chance(self) -> float:
        """Loss in nats of a model that finds every symbol equally likely."""
        return math.log(self.symbols)

    @property
    @abstractmethod
    def sources(self) -> "Bool[np.ndarray, 'cell source']":
        """Which cells of the state before a cell of the next state is computed from."""

    @abstractmethod
    def _later_states(
        self, first: "Float[Tensor, 'row cell']", generator: "torch.Generator"
    ) -> "list[Float[Tensor, 'row cell']]":
        """The states after the first, as floating-point whole numbers (see `_constants`)."""

    @abstractmethod
    def _arrays(self) -> "list[np.ndarray]":
        """Arrays of whole numbers that `_later_states` needs on the device."""

    def batch(
        self, n: int, *, seed: int, step: int = 0, split: str = "train", device: "torch.device | str" = "cpu"
    ) -> SequenceBatch:
        """`n` fresh sequences, generated on `device`.

        The answer is every token after the first state; the same for all rows. Splits are streams of their own, not
        disjoint sets: where there are few first states, training has seen most of those in "held-out" too. Kinds of
        device have generators of their own, so a CPU and a GPU draw different sequences from the same arguments.

        Args:
            n: number of sequences.
            seed: of the run.
            step: of the training.
            split: name of a stream of its own: "train", "held-out".
            device: where the batch is made.

        Raises:
            ArgumentError: fewer than 1 sequence.
        """
        import torch

        whole_number("n", n, least=1)
        generator = torch_generator(seed, self.name, split, step, device=device)
        first = torch.randint(self.symbols, (n, self.state_size), generator=generator, device=device)
        later = self._later_states(first.to(_exact_type(first.device)), generator)
        tokens = torch.cat([first, *(state.long() for state in later)], dim=1)
        position = torch.arange(self.length, device=device)
        return SequenceBatch(
            tokens=tokens,
            loss_mask=(position >= 1).expand(n, -1),
            answer_mask=(position >= self.state_size).expand(n, -1),
        )

    def pattern(self) -> "Bool[Tensor, 'dest src']":
        """The ground-truth attention pattern of a next-token predictor, `[length, length]`, on the CPU.

        The first cell of a state is predicted at the last position of the state before. Rows of positions that predict
        a token of the first state, and of the last position, which predicts nothing, are empty.
        """
        import torch

        size = self.state_size
        pattern = np.zeros((self.length, self.length), dtype=bool)
        for start in range(0, self.length - size, size):
            pattern[start + size - 1 : start + 2 * size - 1, start : start + size] = self.sources
        return torch.from_numpy(pattern)

    def _mean_loss(self, later_nats: float) -> float:
        """Mean over the predicted tokens: a first state nobody can predict, and `later_nats` for all that follow."""
        return ((self.state_size - 1) * self.chance + later_nats) / (self.length - 1)

    def _constants(self, device: "torch.device") -> "list[Tensor]":
        """`_arrays` on a device, as floating point: matrix products of integers are slow, or missing on a GPU.

        Double precision is exact here and left alone by autocast and TF32.
        """
        import torch

        if device not in self._constants_by_device:
            dtype = _exact_type(device)
            self._constants_by_device[device] = [
                torch.as_tensor(array, dtype=dtype, device=device) for array in self._arrays()
            ]
        return self._constants_by_device[device]

    @cached_property
    def _constants_by_device(self) -> "dict[torch.device, list[Tensor]]":
        return {}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way of a frozen dataclass in its own __post_init__

    def _read_numbers(self, **least: int) -> None:
        """Turns these fields into plain ints, each at least so large."""
        for name, smallest in least.items():
            self._set(name, whole_number(name, getattr(self, name), least=smallest))

    def __getstate__(self) -> dict[str, Any]:
        """The settings only: what was computed from them need not travel to another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # pyright: ignore[reportArgumentType]


def whole_numbers(name: str, values: Any, *, below: int) -> "Int[np.ndarray, 'row column']":
    """A matrix of whole numbers from 0 to `below` - 1, from nested sequences, an array or a tensor.

    Raises:
        ArgumentError: it is no matrix, or an entry is no whole number in that range.
    """
    try:
        matrix = np.asarray(values.tolist() if hasattr(values, "tolist") else values)  # tensors on any device
    except ValueError as error:
        raise ArgumentError(f"the rows of {name} differ in length; give rows of equal length") from error
    if matrix.ndim != 2 or not matrix.size:
        raise ArgumentError(f"{name} must have rows and columns; its shape is {list(matrix.shape)}")
    if matrix.dtype.kind not in "iub":
        raise ArgumentError(f"{name} must hold whole numbers, not {matrix.dtype}")
    for row in np.flatnonzero(((matrix < 0) | (matrix >= below)).any(axis=1)):
        raise ArgumentError(f"row {row} of {name} is {matrix[row].tolist()}; its entries must lie in 0 to {below - 1}")
    return matrix.astype(int)


def as_tuples(matrix: "Int[np.ndarray, 'row column']") -> tuple[tuple[int, ...], ...]:
    """A matrix as it stands in a task: it compares, hashes and goes into a manifest."""
    return tuple(map(tuple, matrix.tolist()))


def _exact_type(device: "torch.device") -> "torch.dtype":
    import torch

    # Apple's GPUs have no double precision. Single is exact below 2**24, and they have no TF32.
    return torch.float32 if device.type == "mps" else torch.float64
