"""Cellular automata: every cell of a state follows from its neighbourhood, by a rule to be inferred from the sequence.

One of the two tasks of "Emergent Capabilities Arise Randomly from Learning Sparse Attention Patterns"
(arXiv 2606.25010, section 3.3 and appendix B.1). Rules are look-up tables, drawn once; each sequence follows one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from emergent_heads.errors import ArgumentError, nearest, whole_number
from emergent_heads.randomness import numpy_generator
from emergent_heads.tasks.state_sequences import StateSequenceTask, as_tuples, whole_numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Boundary = Literal["periodic", "fixed"]
BOUNDARIES = ("periodic", "fixed")
MOST_ENTRIES = 2**24  # of all tables together: 128 MB in double precision
_CELLS_AT_ONCE = 2**20  # of a simulation


@dataclass(frozen=True)
class CellularAutomaton(StateSequenceTask):
    """States of cells whose next value a table gives for the values of the 2 `radius` + 1 cells around them.

    The window's values are the digits of a number to the base `symbols`, the leftmost cell first, and the entry at
    that number is the next value; for two symbols and radius 1 this is Wolfram's numbering. `rules` tables of
    uniformly random entries are drawn once from the task's seed and shared by all sequences; each sequence picks one
    at random. With tables of one's own, or `elementary` rules, nothing is drawn.

    Attributes:
        state_size: cells in a state, S.
        states: states in a sequence, T.
        symbols: values of a cell, C.
        rules: number of tables, N. With tables, read from them where it is left at its default.
        radius: neighbours on either side that a table looks at.
        iterations: how often the rule is applied from one state to the next, k.
        boundary: "periodic" joins the two ends; with "fixed" the cells outside are always 0.
        seed: of the draw of the tables, not of the sequences.
        tables: the rules, `[rules, symbols ** (2 * radius + 1)]` with entries below `symbols`, as nested sequences, an
            array or a tensor; None draws them.

    Raises:
        ArgumentError: a number outside its range, an unknown boundary, a window wider than the state, tables of more
            than 2**24 entries, or tables that do not fit.
    """

    state_size: int = 16
    states: int = 16
    symbols: int = 4
    rules: int = 256
    radius: int = 1
    iterations: int = 1
    boundary: Boundary = "periodic"
    seed: int = 0
    tables: "Sequence[Sequence[int]] | Int[np.ndarray, 'rule entry'] | Int[Tensor, 'rule entry'] | None" = None

    def __post_init__(self) -> None:
        self._read_numbers(state_size=1, states=2, symbols=2, rules=1, radius=0, iterations=1, seed=0)
        if self.boundary not in BOUNDARIES:
            raise ArgumentError(f"unknown boundary {self.boundary!r}; {nearest(self.boundary, BOUNDARIES)}")
        if self.window > self.state_size:
            raise ArgumentError(
                f"a rule of radius {self.radius} looks at {self.window} cells, but a state has {self.state_size}; "
                "choose a smaller radius or a larger state_size"
            )
        if self.tables is not None:
            self._read_tables()
        if self.rules * self.symbols**self.window > MOST_ENTRIES:
            raise ArgumentError(
                f"{self.rules} tables of {self.symbols}**{self.window} entries are more than {MOST_ENTRIES} entries; "
                "choose fewer rules or symbols, or a smaller radius"
            )

    @classmethod
    def elementary(
        cls,
        *numbers: int,
        state_size: int = 16,
        states: int = 16,
        iterations: int = 1,
        boundary: Boundary = "periodic",
    ) -> "CellularAutomaton":
        """Elementary automata by their Wolfram numbers: two symbols, radius 1; several numbers are mixed evenly.

        After Wolfram, "Statistical mechanics of cellular automata" (Reviews of Modern Physics 55, 1983): bit v of the
        number is the next value of a cell whose neighbourhood reads v in binary.

        Args:
            numbers: of the rules, 0 to 255, such as 90 or 110.
            state_size: cells in a state.
            states: states in a sequence.
            iterations: how often the rule is applied from one state to the next.
            boundary: "periodic" or "fixed".

        Raises:
            ArgumentError: no number, one outside 0 to 255, or what the automaton itself refuses.
        """
        if not numbers:
            raise ArgumentError("which elementary rules? give Wolfram numbers, such as 90 or 110")
        for number in numbers:
            if whole_number("a Wolfram number", number, least=0) > 255:
                raise ArgumentError(f"there is no elementary rule {number}; Wolfram numbers are 0 to 255")
        tables = tuple(tuple(int(number) >> value & 1 for value in range(8)) for number in numbers)
        return cls(state_size, states, 2, len(tables), 1, iterations, boundary, tables=tables)

    @property
    def window(self) -> int:
        """Cells that a table looks at, in one iteration."""
        return 2 * self.radius + 1

    @cached_property
    def look_up(self) -> "Int[np.ndarray, 'rule entry']":
        """The tables, read-only."""
        if self.tables is not None:
            tables = np.array(self.tables)
        else:
            generator = numpy_generator(self.seed, "cellular automaton")
            tables = generator.integers(self.symbols, size=(self.rules, self.symbols**self.window))
        tables.setflags(write=False)
        return tables

    @property
    def sources(self) -> "Bool[np.ndarray, 'cell source']":
        """The window of a cell in the state before: the 2 * radius * iterations + 1 cells around it.

        With a periodic boundary it goes on at the other end, with a fixed one it ends at the end. Some tables look at
        fewer cells of it; this is what a table can look at.
        """
        cells = np.arange(self.state_size)
        distance = np.abs(cells[:, None] - cells)
        if self.boundary == "periodic":
            distance = np.minimum(distance, self.state_size - distance)
        return distance <= self.radius * self.iterations

    @property
    def plateau(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Loss of a model that finds every symbol equally likely, in nats: ln C.

        Many random tables together prefer no symbol. Single rules do, as most elementary ones: there the frequencies
        alone give a lower loss, and leaving this plateau is no sign that a pattern was found.
        """
        return self.chance

    @property
    def floor(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Lowest loss any model can reach, in nats: that of the best predictor that knows all tables.

        Simulated with a fixed stream of first states (see `simulated_floor`); `floor_error` is its standard error.
        """
        return self._floor_and_error[0]

    @property
    def floor_error(self) -> float:
        """Standard error of `floor`, in nats.

        0 where all first states were gone through, and where each one that was sampled tells all rules apart.
        """
        return self._floor_and_error[1]

    def simulated_floor(self, n: int | None = None, seed: int = 0) -> tuple[float, float]:
        """Loss in nats of the best predictor that knows all tables, and its standard error.

        It gives every rule that fits the sequence so far the same probability. The probabilities of a sequence's
        tokens multiply to the share of rules that make this very sequence from its first state, so the loss follows
        from the number of rules that share a sequence; the mean over rules is exact and only first states are sampled.
        Where there are at most `n` first states, all are used and the error is 0. With few first states sampled the
        error is too small at times: rare ones, such as all cells alike, tell far fewer rules apart than the others.

        Args:
            n: number of first states, at least 2; None takes 32 to 1,024, fewer for large states and many rules.
            seed: of the first states.

        Raises:
            ArgumentError: fewer than 2 first states.
        """
        if n is None:
            n = int(np.clip(4 * _CELLS_AT_ONCE // (self.rules * self.state_size), 32, 1024))
        n = whole_number("n", n, least=2)
        all_states = self.symbols**self.state_size <= n
        if all_states:
            first = np.indices((self.symbols,) * self.state_size).reshape(self.state_size, -1).T
        else:
            generator = numpy_generator(seed, "first states of the floor")
            first = generator.integers(self.symbols, size=(n, self.state_size))
        chunks = min(len(first), -(-first.size * self.rules // _CELLS_AT_ONCE))
        nats = np.concatenate([self._nats_to_tell_rules(chunk) for chunk in np.array_split(first, chunks)])
        error = 0.0 if all_states else float(nats.std(ddof=1)) / n**0.5
        return self._mean_loss(float(nats.mean())), error / (self.length - 1)

    @cached_property
    def _floor_and_error(self) -> tuple[float, float]:
        return self.simulated_floor()

    def _nats_to_tell_rules(self, first: "Int[np.ndarray, 'start cell']") -> "Float[np.ndarray, ' start']":
        """Per first state, the entropy of the sequences the rules make from it, each rule equally likely."""
        import torch

        _, rule, copies = np.unique(self.look_up, axis=0, return_index=True, return_counts=True)
        weight = np.tile(copies, len(first))  # of each first state under each distinct rule: a row
        row = np.arange(len(weight))  # rows whose sequence is not told apart from all others yet
        group = row // len(rule)  # rows in one group have made the same sequence so far
        alike = np.full(len(row), self.rules)  # number of rules that make a row's sequence
        state = torch.as_tensor(first).double().repeat_interleave(len(rule), dim=0)
        offsets = self._offsets(torch.as_tensor(rule).double().repeat(len(first)))
        for _ in range(self.states - 1):
            together = np.bincount(group)[group] > 1
            if not together.any():
                break
            row, group, keep = row[together], group[together], torch.from_numpy(together)
            offsets = offsets[keep]
            state = self._next(state[keep], offsets)
            group = _split(group, state.numpy())
            alike[row] = np.bincount(group, weights=weight[row])[group]
        nats = weight / self.rules * np.log(self.rules / alike)
        return nats.reshape(len(first), len(rule)).sum(axis=1)

    def _later_states(
        self, first: "Float[Tensor, 'row cell']", generator: "torch.Generator"
    ) -> "list[Float[Tensor, 'row cell']]":
        import torch

        rule = torch.randint(self.rules, (len(first),), generator=generator, device=first.device)
        offsets = self._offsets(rule.to(first.dtype))
        states = [first]
        for _ in range(self.states - 1):
            states.append(self._next(states[-1], offsets))
        return states[1:]

    def _offsets(self, rule: "Float[Tensor, ' row']") -> "Float[Tensor, 'row 1']":
        """Where each row's table begins in all tables."""
        return rule[:, None] * self.look_up.shape[1]

    def _next(
        self, state: "Float[Tensor, 'row cell']", offsets: "Float[Tensor, 'row 1']"
    ) -> "Float[Tensor, 'row cell']":
        """The next state. Three kernels an iteration: on a GPU, starting them is what takes time."""
        import torch

        place_values, tables = self._constants(state.device)
        for _ in range(self.iterations):
            state = tables[torch.addmm(offsets, state, place_values).long()]
        return state

    def _arrays(self) -> list[np.ndarray]:
        """Worth of each cell as a digit of each window's number, `[source, cell]`; all tables, one after the other."""
        place_values = np.zeros((self.state_size, self.state_size))
        for place, shift in enumerate(range(self.radius, -self.radius - 1, -1)):  # place 0 is the rightmost cell
            worth = np.full(self.state_size, float(self.symbols**place))
            if self.boundary == "periodic":
                place_values += np.roll(np.diag(worth), shift, axis=0)
            else:
                place_values += np.diag(worth[abs(shift) :], -shift)
        return [place_values, self.look_up.flatten()]

    def _read_tables(self) -> None:
        tables = whole_numbers("tables", self.tables, below=self.symbols)
        rules = len(tables) if self.rules == CellularAutomaton.rules else self.rules
        if tables.shape != (rules, self.symbols**self.window):
            raise ArgumentError(
                f"tables has the shape {list(tables.shape)}; {rules} rules of {self.symbols} symbols and radius "
                f"{self.radius} have the shape [{rules}, {self.symbols**self.window}]"
            )
        self._set("tables", as_tuples(tables))
        self._set("rules", rules)


def _split(group: "Int[np.ndarray, ' row']", state: "Float[np.ndarray, 'row cell']") -> "Int[np.ndarray, ' row']":
    """Groups, numbered from 0, of the rows that were in one group and have the same state."""
    numbers = np.column_stack([group, state]).astype(np.int32)
    return np.unique(numbers, axis=0, return_inverse=True)[1].reshape(-1)
