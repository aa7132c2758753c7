"""Formal languages of brackets, as data to train on before a language: Dyck and shuffle Dyck.

After "Between Circuits and Chomsky: Pre-pretraining on Formal Languages Imparts Linguistic Biases" (Hu et al. 2025,
arXiv 2502.19249) and its public code, michahu/pre-pretraining. A random walk says at each position whether a bracket
opens or closes; the two languages differ in which brackets may close.
"""

import math
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.randomness import numpy_generator
from emergent_heads.tasks.task import SequenceBatch, SequenceTask

if TYPE_CHECKING:
    import torch
    from scipy.sparse import csr_matrix
    from torch import Tensor

MOST_STATES = 50_000  # of the open brackets, in the exact floor of shuffle Dyck


class BracketTask(SequenceTask):
    """Sequences of brackets of several types; token i opens a bracket of type i, token `brackets` + i closes one.

    The depth is the number of open brackets. Where none is open, one opens; at `max_depth` one closes; elsewhere one
    opens with probability `p_open`. Its type is uniformly random.
    """

    brackets: int
    max_depth: int
    p_open: float
    length: int
    balanced: bool

    def __post_init__(self) -> None:
        for name, least in (("brackets", 1), ("max_depth", 1), ("length", 2)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=least))
        if not 0 < self.p_open < 1:
            raise ArgumentError(f"p_open is {self.p_open!r}; it must be a probability between 0 and 1, and neither")
        if self.balanced and self.length % 2:
            raise ArgumentError(f"a balanced sequence cannot have {self.length} tokens; choose an even length")

    @property
    def vocabulary_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of token ids: an opening and a closing bracket of each type."""
        return 2 * self.brackets

    @cached_property
    def plateau(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Loss of a model that knows only how often each token stands at each position, in nats; exact.

        The types are all alike: ln `brackets` for them and the entropy of "opens or closes".
        """
        return math.log(self.brackets) + float(_binary_entropy(self.p_opens[1:]).mean())

    @cached_property
    def floor(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Lowest loss any model can reach, in nats: the process' own entropy, exact.

        The brackets that are open say all about the next token: whether one opens (nothing to learn where that is
        forced), which one if it opens, which one if it closes.
        """
        choice = sum(
            float(depths @ _binary_entropy(self._chance_to_open(position)))
            for position, depths in enumerate(self._depths[1:], start=1)
        )
        which = float(self.p_opens[1:].sum()) * math.log(self.brackets) + self._nats_of_closings()
        return (choice + which) / (self.length - 1)

    @cached_property
    def p_opens(self) -> "Float[np.ndarray, ' pos']":
        """Probability that the token at each position opens a bracket."""
        return np.array([depths @ self._chance_to_open(position) for position, depths in enumerate(self._depths)])

    def batch(
        self, n: int, *, seed: int, step: int = 0, split: str = "train", device: "torch.device | str" = "cpu"
    ) -> SequenceBatch:
        """`n` fresh sequences, the same on every device: they are made on the CPU.

        The answers are the closing brackets whose type is forced (see the class). Splits are streams of their own.

        Args:
            n: number of sequences.
            seed: of the run.
            step: of the training.
            split: name of a stream of its own: "train", "held-out".
            device: where the batch is put.

        Raises:
            ArgumentError: fewer than 1 sequence.
        """
        import torch

        whole_number("n", n, least=1)
        generator = numpy_generator(seed, self.name, split, step)
        opens, depths = self._walk(generator.random((self.length, n)))
        kinds, forced = self._kinds(opens, depths, generator)
        tokens = torch.from_numpy(kinds + self.brackets * ~opens).to(device)
        position = torch.arange(self.length, device=device)
        return SequenceBatch(
            tokens=tokens,
            loss_mask=(position >= 1).expand(n, -1),
            answer_mask=torch.from_numpy(forced & ~opens).to(device),
        )

    def is_valid(self, tokens: "Int[Tensor, 'row pos'] | Int[np.ndarray, 'row pos']") -> "Bool[np.ndarray, ' row']":
        """Which rows are in the language: known tokens, every closing bracket right, the depth kept.

        Brackets may be open at the end, unless the task is `balanced`.
        """
        tokens = np.asarray(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
        known = ((tokens >= 0) & (tokens < self.vocabulary_size)).all(axis=1)
        opens, kinds = tokens < self.brackets, tokens % self.brackets
        depths = np.cumsum(2 * opens - 1, axis=1)
        kept = ((depths >= 0) & (depths <= self.max_depth)).all(axis=1)
        ended = (depths[:, -1] == 0) | (not self.balanced)
        return known & kept & ended & self._closings_fit(opens, depths, kinds)

    @abstractmethod
    def _kinds(
        self,
        opens: "Bool[np.ndarray, 'row pos']",
        depths: "Int[np.ndarray, 'row pos']",
        generator: np.random.Generator,
    ) -> "tuple[Int[np.ndarray, 'row pos'], Bool[np.ndarray, 'row pos']]":
        """Each bracket's type, and at which closing ones it is forced; `depths` are those after each token."""

    @abstractmethod
    def _closings_fit(
        self,
        opens: "Bool[np.ndarray, 'row pos']",
        depths: "Int[np.ndarray, 'row pos']",
        kinds: "Int[np.ndarray, 'row pos']",
    ) -> "Bool[np.ndarray, ' row']":
        """In which rows each closing bracket is one that may close; any answer where the depths are wrong."""

    @abstractmethod
    def _nats_of_closings(self) -> float:
        """Expected entropy of the closing brackets' types in a whole sequence, in nats."""

    @cached_property
    def _ceilings(self) -> "Int[np.ndarray, ' pos']":
        """A bracket can open at a position only below this depth: a balanced sequence must be able to end."""
        highest = np.full(self.length, self.max_depth)
        return np.minimum(highest, np.arange(self.length)[::-1]) if self.balanced else highest

    def _chance_to_open(self, position: int) -> "Float[np.ndarray, ' depth']":
        """Probability that this position opens a bracket, for each depth before it."""
        depth = np.arange(self.max_depth + 1)
        return np.where(depth == 0, 1.0, np.where(depth < self._ceilings[position], self.p_open, 0.0))

    @cached_property
    def _depths(self) -> "Float[np.ndarray, 'pos depth']":
        """Probability of each depth before each position."""
        before = np.zeros((self.length, self.max_depth + 1))
        before[0, 0] = 1
        for position in range(self.length - 1):
            chance = self._chance_to_open(position)
            before[position + 1, 1:] = (before[position] * chance)[:-1]
            before[position + 1, :-1] += (before[position] * (1 - chance))[1:]
        return before

    def _walk(
        self, draws: "Float[np.ndarray, 'pos row']"
    ) -> "tuple[Bool[np.ndarray, 'row pos'], Int[np.ndarray, 'row pos']]":
        """Which positions open a bracket, and the depth after each."""
        limits = np.where(draws < self.p_open, self._ceilings[:, None], 1)  # opens below: at 0 always, else by chance
        # depth = position - 2 * closed, so "depth >= limit" says the same of the number of closing brackets so far.
        bounds = (np.arange(self.length)[:, None] - limits) // 2
        closes, closed = np.empty(bounds.shape, dtype=bool), np.zeros(bounds.shape[1], dtype=np.int64)
        for bound, closing in zip(bounds, closes, strict=True):
            np.less_equal(closed, bound, out=closing)
            closed += closing
        opens = np.ascontiguousarray(~closes.T)
        return opens, np.cumsum(2 * opens - 1, axis=1)

    def __getstate__(self) -> dict[str, Any]:
        """The settings only: what was computed from them need not travel to another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Dyck(BracketTask):
    """Well-nested brackets of several types: a closing bracket closes the one that was opened last.

    The answers are all closing brackets: the stack says which type each has. Whether a bracket closes is chance, so a
    perfect model's best guess is the right closing bracket where 1 - `p_open` > `p_open` / `brackets`: always, but for
    a single type or a high `p_open`.

    Hu et al. set words of a Dyck language one after the other and cut them at the end, which is this process: a word
    ends where no bracket is open. Theirs are closed after about 510 tokens at the latest, ours go on; their public
    code takes 30 types, the paper 64.

    Attributes:
        brackets: number of types, k.
        max_depth: most brackets open at once.
        p_open: probability that a bracket opens where both are possible.
        length: tokens of a sequence.
        balanced: whether all brackets are closed at the end: one closes where the rest of the sequence is needed for
            that. Without it the sequence is cut wherever it stands, as in Hu et al.

    Raises:
        ArgumentError: a number outside its range, or an odd length of balanced sequences.
    """

    brackets: int = 64
    max_depth: int = 16
    p_open: float = 0.5
    length: int = 2048
    balanced: bool = False

    def _kinds(
        self,
        opens: "Bool[np.ndarray, 'row pos']",
        depths: "Int[np.ndarray, 'row pos']",
        generator: np.random.Generator,
    ) -> "tuple[Int[np.ndarray, 'row pos'], Bool[np.ndarray, 'row pos']]":
        kinds = generator.integers(self.brackets, size=opens.shape)
        order = _by_level(opens, depths)
        ordered, opening = np.take_along_axis(kinds, order, axis=1), np.take_along_axis(opens, order, axis=1)
        ordered[:, 1:] = np.where(opening[:, 1:], ordered[:, 1:], ordered[:, :-1])
        np.put_along_axis(kinds, order, ordered, axis=1)
        return kinds, np.ones_like(opens)

    def _closings_fit(
        self,
        opens: "Bool[np.ndarray, 'row pos']",
        depths: "Int[np.ndarray, 'row pos']",
        kinds: "Int[np.ndarray, 'row pos']",
    ) -> "Bool[np.ndarray, ' row']":
        order = _by_level(opens, depths)
        ordered, opening = np.take_along_axis(kinds, order, axis=1), np.take_along_axis(opens, order, axis=1)
        return (opening[:, 1:] | (ordered[:, 1:] == ordered[:, :-1])).all(axis=1)

    def _nats_of_closings(self) -> float:
        return 0.0


@dataclass(frozen=True)
class ShuffleDyck(BracketTask):
    """k-shuffle Dyck: brackets of several types, each type balanced by itself, while types may cross, as in "([)]".

    A closing bracket is of any type that has one open, all equally likely however many are open. The answers are the
    closing brackets whose type is forced, because only one type is open.

    Defaults and process are those of Hu et al.'s public code; their paper gives p_open = 1/2 and a depth of 16.

    Attributes:
        brackets: number of types, k.
        max_depth: most brackets open at once, of all types together.
        p_open: probability that a bracket opens where both are possible.
        length: tokens of a sequence.
        balanced: whether all brackets are closed at the end: one closes where the rest of the sequence is needed for
            that. Without it the sequence is cut wherever it stands, as in Hu et al.

    Raises:
        ArgumentError: a number outside its range, or an odd length of balanced sequences.
    """

    brackets: int = 64
    max_depth: int = 8
    p_open: float = 0.51
    length: int = 2048
    balanced: bool = False

    def _kinds(
        self,
        opens: "Bool[np.ndarray, 'row pos']",
        depths: "Int[np.ndarray, 'row pos']",
        generator: np.random.Generator,
    ) -> "tuple[Int[np.ndarray, 'row pos'], Bool[np.ndarray, 'row pos']]":
        kinds = generator.integers(self.brackets, size=opens.shape)
        draws = generator.random(opens.shape)
        rows = [
            _close(*row, self.brackets) for row in zip(opens.tolist(), kinds.tolist(), draws.tolist(), strict=True)
        ]
        kinds, choices = np.array(rows).transpose(1, 0, 2)
        return kinds, choices == 1

    def _closings_fit(
        self,
        opens: "Bool[np.ndarray, 'row pos']",
        depths: "Int[np.ndarray, 'row pos']",
        kinds: "Int[np.ndarray, 'row pos']",
    ) -> "Bool[np.ndarray, ' row']":
        fit = np.ones(len(opens), dtype=bool)
        for kind in range(self.brackets):
            fit &= (np.cumsum((kinds == kind) * (2 * opens - 1), axis=1) >= 0).all(axis=1)
        return fit

    def __post_init__(self) -> None:
        super().__post_init__()
        states = _number_of_states(self.max_depth, self.brackets)
        if states > MOST_STATES:
            raise ArgumentError(
                f"{self.brackets} types of brackets up to a depth of {self.max_depth} can be open in {states} ways, "
                f"more than the {MOST_STATES} of the exact floor; choose a smaller max_depth"
            )

    def _nats_of_closings(self) -> float:
        """Expected ln of the number of open types, over the closing brackets.

        Types are all alike, so how many brackets each type has open, as a multiset, is a Markov chain.
        """
        depths, types, opening, closing = _open_brackets(self.max_depth, self.brackets)
        entropy = np.log(np.maximum(types, 1))
        share, nats = np.zeros(len(depths)), 0.0
        share[0] = 1
        for position in range(self.length):
            chance = self._chance_to_open(position)[depths]
            opened, closed = share * chance, share * (1 - chance)
            nats += float(closed @ entropy)
            share = opened @ opening + closed @ closing
        return nats


def _close(opens: list[bool], kinds: list[int], draws: list[float], brackets: int) -> tuple[list[int], list[int]]:
    """One row's types, each closing one drawn among the open types; and how many there were to draw from.

    Plain Python: which types are open depends on every draw before, and for up to some hundred rows a loop over
    numbers is faster than one over arrays of a position's rows.
    """
    number = [0] * brackets  # of open brackets of each type
    present: list[int] = []  # types of which there are some
    taken, choices = [], []
    for opening, kind, draw in zip(opens, kinds, draws, strict=True):
        choices.append(len(present))
        if opening:
            if not number[kind]:
                present.append(kind)
            number[kind] += 1
        else:
            place = int(draw * len(present))
            kind = present[place]
            number[kind] -= 1
            if not number[kind]:
                present[place] = present[-1]
                present.pop()
        taken.append(kind)
    return taken, choices


def _number_of_states(max_depth: int, brackets: int) -> int:
    """Multisets of at most `brackets` positive numbers whose sum is at most `max_depth`."""
    ways = [1] + [0] * max_depth  # by sum; as many as there are with parts of at most `brackets`
    for part in range(1, min(brackets, max_depth) + 1):
        for total in range(part, max_depth + 1):
            ways[total] += ways[total - part]
    return sum(ways)


def _open_brackets(
    max_depth: int, brackets: int
) -> "tuple[Int[np.ndarray, ' state'], Int[np.ndarray, ' state'], csr_matrix, csr_matrix]":
    """The chain of how many brackets each type has open, in no order of the types; nothing open comes first.

    Returns:
        Per state the number of open brackets and of types that have some; and the probabilities of the next state if a
        bracket opens, and if one closes, `[state, next]`.
    """
    from scipy.sparse import csr_matrix

    index: dict[tuple[int, ...], int] = {(): 0}
    entries: dict[bool, list[tuple[float, int, int]]] = {True: [], False: []}
    order: list[tuple[int, ...]] = [()]
    for state in order:  # grows while it is gone through
        absent = (0,) * (brackets - len(state))
        for opens in (True, False):
            among = Counter(state + absent) if opens else Counter(state)
            for number, types in among.items():
                after = _replaced(state, number, number + (1 if opens else -1))
                if sum(after) > max_depth:
                    continue
                if after not in index:
                    index[after] = len(order)
                    order.append(after)
                entries[opens].append((types / among.total(), index[state], index[after]))
    matrices = []
    for opens in (True, False):
        shares, before, after = zip(*entries[opens], strict=True)
        matrices.append(csr_matrix((shares, (before, after)), shape=(len(order), len(order))))
    return np.array([sum(state) for state in order]), np.array([len(state) for state in order]), *matrices


def _replaced(state: tuple[int, ...], number: int, other: int) -> tuple[int, ...]:
    """The multiset with one number replaced by another, where 0 stands for none."""
    rest = list(state)
    if number:
        rest.remove(number)
    return tuple(sorted([*rest, other] if other else rest))


def _by_level(
    opens: "Bool[np.ndarray, 'row pos']", depths: "Int[np.ndarray, 'row pos']"
) -> "Int[np.ndarray, 'row pos']":
    """Positions in order of the level their bracket is on, first to last within a level.

    On one level, opening and closing brackets alternate, so each closing bracket comes right after its partner.
    """
    return np.argsort(depths + ~opens, axis=1, kind="stable")


def _binary_entropy(p: "Float[np.ndarray, ' *shape']") -> "Float[np.ndarray, ' *shape']":
    """Entropy in nats of an event of probability p."""
    p = np.clip(p, 0.0, 1.0)
    other = 1 - p
    return -(p * np.log(np.where(p > 0, p, 1)) + other * np.log(np.where(other > 0, other, 1)))
