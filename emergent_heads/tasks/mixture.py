"""Several sequence tasks in one batch, by shares that may change over the training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.randomness import derive_seed
from emergent_heads.tasks.task import SequenceBatch, SequenceTask

if TYPE_CHECKING:
    import torch

Shares = tuple[float, ...]


@dataclass(frozen=True)
class Mixture(SequenceTask):
    """Rows of several tasks in one batch, in the order of the tasks.

    How many rows each task has is no matter of chance: the share of the rows, rounded by largest remainders. Shorter
    sequences are filled up on the right with tokens that do not count. Each task draws from a stream of its own.

    All splits but "train" have the last shares, whatever the step: what the training comes to. Plateau and floor are
    the tasks' means by these shares, which is exact where as many tokens count in each task's sequences.

    Attributes:
        tasks: what is mixed.
        weights: how the rows are divided, one number per task, in any unit: `(3, 1)`. Or such numbers from certain
            steps on: `((0, (1, 0)), (1000, (0, 1)))`. None for equal shares.
        between: what happens between two of these steps: "constant" keeps the shares until the next, "linear" goes
            over to them step by step.
        vocabulary: "shared" lets the ids of all tasks overlap, as where a model is trained on one task and then on
            another with the same embeddings. "disjoint" gives each task ids of its own; those that have the same
            tokenizer keep its ids.

    Raises:
        ArgumentError: no tasks, weights that do not fit them, steps that do not rise from 0, or tasks of different
            tokenizers.
    """

    tasks: tuple[SequenceTask, ...]
    weights: "Sequence[float] | Sequence[tuple[int, Sequence[float]]] | None" = None
    between: Literal["constant", "linear"] = "constant"
    vocabulary: Literal["shared", "disjoint"] = "shared"

    def __post_init__(self) -> None:
        tasks = tuple(self.tasks)
        if not tasks or not all(isinstance(task, SequenceTask) for task in tasks):
            raise ArgumentError(f"a mixture is of tasks that models are trained on, at least one, not {self.tasks!r}")
        object.__setattr__(self, "tasks", tasks)
        for name, allowed in (("between", ("constant", "linear")), ("vocabulary", ("shared", "disjoint"))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name} must be {' or '.join(allowed)}, not {getattr(self, name)!r}")
        object.__setattr__(self, "weights", _read_weights(self.weights, len(tasks)))
        if len({task.encoding for task in tasks if task.encoding is not None}) > 1:
            raise ArgumentError(
                "tasks of different tokenizers cannot be mixed, since a token id would mean two things; make them of "
                "one text, with one vocabulary_size"
            )

    # ---- shares ----

    @cached_property
    def breakpoints(self) -> tuple[tuple[int, Shares], ...]:
        """The steps from which on shares hold, ascending from 0, and the shares, which sum to 1."""
        weights: Any = self.weights
        points = weights if isinstance(weights[0], tuple) else ((0, weights),)
        return tuple((step, tuple(weight / sum(values) for weight in values)) for step, values in points)

    def shares(self, step: int) -> Shares:
        """Share of each task in the training data of the step that follows `step` steps."""
        steps = [point for point, _ in self.breakpoints]
        of_steps = np.array([values for _, values in self.breakpoints])
        if self.between == "linear":
            return tuple(float(np.interp(step, steps, column)) for column in of_steps.T)
        return self.breakpoints[int(np.searchsorted(steps, step, side="right")) - 1][1]

    def rows(self, n: int, step: int) -> tuple[int, ...]:
        """How many of `n` training rows each task has, in the step that follows `step` steps."""
        return _largest_remainders(self.shares(step), n)

    # ---- a task ----

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of the longest task's sequences."""
        return max(task.length for task in self.tasks)

    @property
    def mean_length(self) -> float:
        """Mean tokens of a sequence without padding, by the last shares."""
        return self._mean("mean_length")

    @property
    def plateau(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tasks' mean, by the last shares."""
        return self._mean("plateau")

    @property
    def floor(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tasks' mean, by the last shares."""
        return self._mean("floor")

    @property
    def vocabulary_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of token ids."""
        return max(offset + task.vocabulary_size for offset, task in zip(self.offsets, self.tasks, strict=True))

    @property
    def tokenizer(self) -> Any | None:
        """The one of those tasks that have one."""
        return next((task.tokenizer for task in self.tasks if task.encoding is not None), None)

    @property
    def encoding(self) -> str | None:
        """See `SequenceTask.encoding`."""
        return next((task.encoding for task in self.tasks if task.encoding is not None), None)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """What is added to the token ids of each task: 0, but for a "disjoint" vocabulary of several."""
        if self.vocabulary == "shared":
            return (0,) * len(self.tasks)
        used = max((task.vocabulary_size for task in self.tasks if task.encoding is not None), default=0)
        found: list[int] = []
        for task in self.tasks:
            found.append(used if task.encoding is None else 0)
            used += task.vocabulary_size if task.encoding is None else 0
        return tuple(found)

    def batch(
        self, n: int, *, seed: int, step: int = 0, split: str = "train", device: "torch.device | str" = "cpu"
    ) -> SequenceBatch:
        """`n` sequences, the first task's first; see `rows`.

        Args:
            n: number of sequences.
            seed: of the run.
            step: of the training.
            split: name of a stream of its own; all but "train" have the last shares.
            device: where the tasks make their sequences.

        Raises:
            ArgumentError: fewer than 1 sequence, or what a task refuses.
        """
        import torch

        n = whole_number("n", n, least=1)
        rows = self.rows(n, step if split == "train" else self.breakpoints[-1][0])
        parts = [
            self._padded(
                task.batch(count, seed=derive_seed(seed, "mixture", place), step=step, split=split, device=device),
                self.offsets[place],
            )
            for place, (task, count) in enumerate(zip(self.tasks, rows, strict=True))
            if count
        ]
        return SequenceBatch(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.loss_mask for part in parts]),
            torch.cat([part.answer_mask for part in parts]),
        )

    def _padded(self, part: SequenceBatch, offset: int) -> SequenceBatch:
        """The rows as long as the mixture's, with the mixture's ids."""
        from torch.nn.functional import pad

        right = (0, self.length - part.tokens.shape[1])
        return SequenceBatch(
            pad(part.tokens + offset, right), pad(part.loss_mask, right), pad(part.answer_mask, right)
        )

    def _mean(self, name: str) -> float:
        shares = self.breakpoints[-1][1]
        return sum(share * getattr(task, name) for share, task in zip(shares, self.tasks, strict=True) if share)


def _read_weights(weights: Any, n_tasks: int) -> "Shares | tuple[tuple[int, Shares], ...]":
    """The weights as tuples, checked."""
    if weights is None:
        return (1.0,) * n_tasks
    try:
        given = list(weights)
        if not any(isinstance(each, (list, tuple)) for each in given):
            return _numbers(given, n_tasks)
        points = tuple((whole_number("a step", step, least=0), _numbers(values, n_tasks)) for step, values in given)
    except (TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"weights must be one number for each of the {n_tasks} tasks, or pairs of a step and such numbers, not "
            f"{weights!r}"
        ) from error
    steps = [step for step, _ in points]
    if steps[0] != 0 or any(later <= earlier for earlier, later in pairwise(steps)):
        raise ArgumentError(f"the steps of weights must rise from 0, and are {', '.join(map(str, steps))}")
    return points


def _numbers(values: Any, n_tasks: int) -> Shares:
    numbers = tuple(float(value) for value in values)
    if len(numbers) != n_tasks:
        raise ArgumentError(f"weights {list(numbers)} for {n_tasks} tasks; give one number for each")
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or sum(numbers) <= 0:
        raise ArgumentError(f"weights {list(numbers)} must not be below 0, and one of them must be above")
    return numbers


def _largest_remainders(shares: Sequence[float], n: int) -> tuple[int, ...]:
    """`n` divided by shares: whole parts first, what is left to the largest remainders, of equal ones to the first."""
    exact = np.round(np.array(shares) * n, 9)  # so that 0.1 * 3 has no remainder of its own
    counts = np.floor(exact).astype(int)
    remainders = exact - counts - 1e-7 * np.arange(len(exact))  # equal ones differ by rounding: the first goes first
    for place in np.argsort(-remainders, kind="stable")[: n - counts.sum()]:
        counts[place] += 1
    return tuple(counts.tolist())
