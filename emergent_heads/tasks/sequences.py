"""Tasks on short sequences of numbers, each number a letter: the maximum subarray, and a selection of activities.

Formats, rules and distribution are those of "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997): of the
multisets of values each is equally likely, and its values stand in a random order.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int

from emergent_heads.errors import whole_number
from emergent_heads.tasks.algorithmic import AlgorithmicTask, Instances, Layout, Ragged
from emergent_heads.tasks.features import Feature, Tokens

_LARGEST = 9  # of the values, either sign; of the start times and durations


class _LetterTask(AlgorithmicTask):
    """Tasks written in the letters A to S."""

    symbols: ClassVar[str] = "ABCDEFGHIJKLMNOPQRS"


@dataclass(frozen=True)
class MaximumSubarray(_LetterTask):
    """The run of neighbouring numbers with the largest sum: `LGNIL=NIL<EOS>` is 4, -1, 2 out of 2, -3, 4, -1, 2.

    Numbers are -9 to 9, written A to S (0 is J); the answer is at least one number. Of several best runs it is the one
    that ends first, and of those the longest, which is what Kadane's algorithm finds if it starts anew only after a
    sum below 0 (Bentley, "Programming pearls: algorithm design techniques", 1984). `=` stands at n. Features, at the
    token after value r, so that the value itself does not give them away:

    * `max_ending_here`: Kadane's sum, the largest sum of a run that ends with value r, at r + 1, from the first value
      to the last (at `=`);
    * `is_prev_negative`: whether value r is below 0, at r + 1, r = 0 .. n - 2.

    Attributes:
        values: numbers to search, n. (`length` is the number of tokens, as for every task.)
        layout: which tokens count, see `AlgorithmicTask`.

    Raises:
        ArgumentError: fewer than 2 values, or an unknown layout.
    """

    values: int = 64
    layout: Layout = "prompt"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", whole_number("values", self.values, least=2))
        self._check_layout()

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence: 2 n + 2."""
        return 2 * self.values + 2

    @property
    def features(self) -> tuple[Feature, ...]:
        """`max_ending_here`, `is_prev_negative`."""
        after = 1 + np.arange(self.values)
        return (
            Feature("max_ending_here", "continuous", lambda tokens: _kadane(self.problems(tokens)).sums, after),
            Feature("is_prev_negative", "binary", lambda tokens: self.problems(tokens)[:, :-1] < 0, after[:-1]),
        )

    def _draw(self, n: int, generator: np.random.Generator) -> Instances:
        return _uniform_multisets(n, self.values, 2 * _LARGEST + 1, generator) - _LARGEST

    def _prompts(self, instances: Instances) -> Ragged:
        return Ragged.full(instances + _LARGEST)

    def _answers(self, instances: Instances) -> Ragged:
        best = _kadane(instances)
        column = np.minimum(best.starts[:, None] + np.arange(self.values), self.values - 1)
        return Ragged(np.take_along_axis(instances, column, axis=1) + _LARGEST, best.ends - best.starts + 1)

    def _read(self, prompts: Ragged) -> Instances:
        return np.clip(prompts.tokens[:, : self.values], 0, 2 * _LARGEST) - _LARGEST


class _Kadane(NamedTuple):
    """Largest sum of a run that ends at each value; first and last index of the best run."""

    sums: Int[np.ndarray, "row value"]
    starts: Int[np.ndarray, " row"]
    ends: Int[np.ndarray, " row"]


def _kadane(values: Int[np.ndarray, "row value"]) -> _Kadane:
    """Kadane's algorithm in sums of prefixes: the best run to an end starts after the lowest prefix before it.

    A prefix that is as low as one before does not count (a sum of 0 goes on), nor does a sum as large as one before.
    """
    prefix = values.cumsum(axis=1)
    before = prefix - values
    lowest = np.minimum.accumulate(before, axis=1)
    sums = prefix - lowest
    ends = sums.argmax(axis=1)
    starts = (before == np.take_along_axis(lowest, ends[:, None], axis=1)).argmax(axis=1)
    return _Kadane(sums, starts, ends)


@dataclass(frozen=True)
class ActivitySelection(_LetterTask):
    """As many activities as possible, none overlapping: `BDCDHD=BDDH<EOS>` takes 1 to 3 and 3 to 7, not 2 to 3.

    Start times are 1 to 9 and durations 1 to 9, so that times are 1 to 18, written B to S. The prompt has all start
    times, then all end times; the answer the start and end of each chosen activity in order of time. Activities are
    gone through by end time, equal ones in the order of the prompt, and taken if they start no earlier than the last
    one taken ends. `=` stands at 2 n. Features, at the token whose residual stream is read:

    * `start_time`: of activity r, at its end time (n + r);
    * `running_end_time`: when the last of the activities written so far ends, at every token of the answer from its
      first end time (2 n + 2 + r): at an end time it is that token's own, at a start time that of the activity before.
      Nine activities at most fit, so there are 17 places or fewer.

    Attributes:
        activities: to choose from, n.
        layout: which tokens count, see `AlgorithmicTask`.

    Raises:
        ArgumentError: fewer than 1 activity, or an unknown layout.
    """

    activities: int = 16
    layout: Layout = "prompt"

    def __post_init__(self) -> None:
        object.__setattr__(self, "activities", whole_number("activities", self.activities, least=1))
        self._check_layout()

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence: 4 n + 2."""
        return 4 * self.activities + 2

    @property
    def features(self) -> tuple[Feature, ...]:
        """`running_end_time`, `start_time`."""
        n = self.activities
        return (
            Feature("running_end_time", "continuous", self._running_end_times, self._answer_positions),
            Feature("start_time", "continuous", lambda tokens: self.problems(tokens)[:, :n], n + np.arange(n)),
        )

    def _running_end_times(self, tokens: Tokens) -> Int[np.ndarray, "row place"]:
        chosen = self._answers(self.problems(tokens)).tokens
        return np.repeat(chosen[:, 1::2], 2, axis=1)[:, :-1]

    def _answer_positions(self, tokens: Tokens) -> Int[np.ndarray, "row place"]:
        """Where the answer's tokens stand, from its second one; -1 beyond its last."""
        answers = self._answers(self.problems(tokens))
        place = np.arange(1, answers.tokens.shape[1])
        return np.where(place < answers.lengths[:, None], 2 * self.activities + 1 + place, -1)

    def _draw(self, n: int, generator: np.random.Generator) -> Instances:
        starts, durations = np.split(_uniform_multisets(n, 2 * self.activities, _LARGEST, generator) + 1, 2, axis=1)
        return np.hstack([starts, starts + durations])

    def _prompts(self, instances: Instances) -> Ragged:
        return Ragged.full(instances)

    def _answers(self, instances: Instances) -> Ragged:
        starts, ends = np.split(instances, 2, axis=1)
        by_end = np.argsort(ends, axis=1, kind="stable")
        activities = np.stack([np.take_along_axis(each, by_end, axis=1) for each in (starts, ends)], axis=-1)
        row = np.arange(len(instances))
        chosen = np.zeros((len(instances), min(self.activities, _LARGEST), 2), dtype=int)
        last_end, count = np.zeros((2, len(instances)), dtype=int)
        for step in range(chosen.shape[1]):
            possible = activities[..., 0] >= last_end[:, None]  # never one that was passed over: it ended by then
            found = possible.any(axis=1)
            if not found.any():
                break
            chosen[:, step] = activities[row, possible.argmax(axis=1)]
            last_end = np.where(found, chosen[:, step, 1], last_end)
            count += found
        return Ragged(chosen.reshape(len(instances), -1), 2 * count)

    def _read(self, prompts: Ragged) -> Instances:
        starts, ends = np.split(prompts.tokens[:, : 2 * self.activities], 2, axis=1)
        starts = np.clip(starts, 1, _LARGEST)
        return np.hstack([starts, starts + np.clip(ends - starts, 1, _LARGEST)])


def _uniform_multisets(n: int, size: int, kinds: int, generator: np.random.Generator) -> Int[np.ndarray, "row value"]:
    """`n` random multisets of `size` values below `kinds`, all equally likely, in random order.

    Such values are drawn independently with probabilities that are themselves drawn uniformly from the simplex.
    """
    bounds = generator.standard_exponential((n, kinds)).cumsum(axis=1)  # over their sum: a flat Dirichlet draw
    drawn = generator.random((n, size)) * bounds[:, -1:]
    values = np.zeros((n, size), dtype=int)
    for bound in bounds[:, :-1].T:
        values += drawn >= bound[:, None]
    return values
