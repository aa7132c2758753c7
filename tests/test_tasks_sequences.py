"""Maximum subarray and activity selection, against trying everything and the algorithms in plain Python."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emergent_heads.errors import ArgumentError
from emergent_heads.tasks import ActivitySelection, MaximumSubarray

LETTERS = "ABCDEFGHIJKLMNOPQRS"


def letters(numbers) -> str:
    return "".join(LETTERS[number] for number in numbers)


def sequences_of(task, tokens):
    """Per row: the numbers before `=`, the numbers after it, the index of `=`."""
    for row in tokens:
        prompt, answer = task.text(row).removesuffix("<EOS>").split("=")
        yield [LETTERS.index(each) for each in prompt], [LETTERS.index(each) for each in answer], len(prompt)


def read_at(task, name, tokens):
    """Labels of a feature by the position at which they are read, for each row."""
    values = task.feature(name).read(tokens)
    for labels, positions in zip(values.labels[..., 0], values.positions, strict=True):
        there = positions >= 0
        assert len(set(positions[there])) == there.sum()
        yield {int(position): label for position, label in zip(positions[there], labels[there], strict=True)}


# ---- Maximum subarray -----------------------------------------------------------------------------------------------


def best_run(values) -> list[int]:
    """Of all runs the largest sum; of those the first to end; of those the longest."""
    runs = [(start, end) for end in range(len(values)) for start in range(end + 1)]
    start, end = min(runs, key=lambda run: (-sum(values[run[0] : run[1] + 1]), run[1], run[0]))
    return values[start : end + 1]


def test_worked_example_of_the_maximum_subarray():
    task = MaximumSubarray(5)
    (row,) = task.solve("LGNIL")
    assert task.text(row) == "LGNIL=NIL<EOS>"
    assert row.tolist()[9:] == [20, 20, 20]  # <EOS> up to 12 tokens
    assert list(read_at(task, "max_ending_here", row[None])) == [{1: 2, 2: -1, 3: 4, 4: 3, 5: 5}]
    assert list(read_at(task, "is_prev_negative", row[None])) == [{1: 0, 2: 1, 3: 0, 4: 1}]


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ([-3, -1, -2], [-1]),  # all below 0: one number
        ([-1, -2, -1], [-1]),
        ([0, 0, 5, 0], [0, 0, 5]),  # zeros before, not after
        ([2, -2, 3, -4, 3], [2, -2, 3]),  # a sum of 0 goes on; the first end of two
        ([0, 0, -1], [0]),  # the first end
        ([9, 9, 9], [9, 9, 9]),
        ([-9, -9], [-9]),
    ],
)
def test_ties_of_the_maximum_subarray(values, answer):
    task = MaximumSubarray(len(values))
    prompt = letters(value + 9 for value in values)
    assert task.text(task.solve(prompt)[0]) == f"{prompt}={letters(value + 9 for value in answer)}<EOS>"
    assert best_run(values) == answer


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=12) | st.lists(st.integers(-1, 1), min_size=2, max_size=12))
def test_every_answer_and_feature_of_problems_of_ones_own(values):
    check_maximum_subarray(
        MaximumSubarray(len(values)), MaximumSubarray(len(values)).solve(letters(np.add(values, 9)))
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 20), st.integers(0, 2**40), st.integers(0, 10**6))
def test_every_answer_and_feature_of_the_maximum_subarray(n, seed, step):
    check_maximum_subarray(MaximumSubarray(n), MaximumSubarray(n).batch(4, seed=seed, step=step).tokens)


def check_maximum_subarray(task, tokens):
    assert tokens.shape[1] == task.length == 2 * task.values + 2
    sums, negative = read_at(task, "max_ending_here", tokens), read_at(task, "is_prev_negative", tokens)
    for prompt, answer, equals in sequences_of(task, tokens):
        assert equals == task.values
        values = [each - 9 for each in prompt]
        assert [each - 9 for each in answer] == best_run(values)
        ending_here = [max(sum(values[start : end + 1]) for start in range(end + 1)) for end in range(len(values))]
        assert next(sums) == {r + 1: ending_here[r] for r in range(equals)}
        assert next(negative) == {r + 1: float(values[r] < 0) for r in range(equals - 1)}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=40))
def test_sums_are_those_of_kadanes_algorithm(values):
    task = MaximumSubarray(len(values))
    running, sums = -1, []
    for value in values:
        running = value if running < 0 else running + value
        sums.append(running)
    (found,) = read_at(task, "max_ending_here", task.solve(letters(np.add(values, 9))))
    assert list(found.values()) == sums


def test_lengths_of_the_reference():
    """Mean length of the best run 29.4, quantiles 3, 10, 24, 51 and 63, and 13 % with 60 or more of 64 numbers."""
    task = MaximumSubarray(64)
    mask = task.batch(20_000, seed=5).answer_mask
    runs = mask.sum(dim=1).numpy() - 1
    assert runs.mean() == pytest.approx(29.4, abs=0.7)  # standard error 0.15
    for quantile, length in ((0.05, 3), (0.25, 10), (0.5, 24), (0.75, 51), (0.95, 63)):
        assert np.quantile(runs, quantile) == pytest.approx(length, abs=1.5)
    assert (runs >= 60).mean() == pytest.approx(0.13, abs=0.01)
    assert task.mean_length == pytest.approx(95.4, abs=0.7)


# ---- Activity selection ---------------------------------------------------------------------------------------------


def chosen_by_hand(starts, ends) -> list[int]:
    """The greedy rule, with Python's stable sort: start and end of each chosen activity, one after the other."""
    chosen = []
    for start, end in sorted(zip(starts, ends, strict=True), key=lambda activity: activity[1]):
        if not chosen or start >= chosen[-1]:
            chosen += [start, end]
    return chosen


def most_without_overlap(starts, ends) -> int:
    """Size of the largest set of activities of which none overlap, by trying all sets."""
    activities = list(zip(starts, ends, strict=True))
    for size in range(len(activities), 0, -1):
        for some in itertools.combinations(sorted(activities), size):
            if all(before[1] <= after[0] for before, after in itertools.pairwise(some)):
                return size
    return 0


def test_worked_example_of_activity_selection():
    task = ActivitySelection(3)
    (row,) = task.solve("BDCDHD")
    assert task.text(row) == "BDCDHD=BDDH<EOS>"
    assert row.tolist()[11:] == [20, 20, 20]  # <EOS> up to 14 tokens
    assert list(read_at(task, "start_time", row[None])) == [{3: 1, 4: 3, 5: 2}]
    assert list(read_at(task, "running_end_time", row[None])) == [{8: 3, 9: 3, 10: 7}]


def test_equal_ends_go_by_their_place_in_the_prompt():
    task = ActivitySelection(2)
    assert task.text(task.solve("CBDD")[0]) == "CBDD=CD<EOS>"  # 2 to 3, then 1 to 3
    assert task.text(task.solve("BCDD")[0]) == "BCDD=BD<EOS>"


def test_nine_activities_at_most_follow_each_other():
    task = ActivitySelection(12)
    starts = [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1]
    tokens = task.solve(letters(starts) + letters(start + 1 for start in starts))
    ((_, answer, _),) = sequences_of(task, tokens)
    assert answer == [time for start in range(1, 10) for time in (start, start + 1)]
    assert task.feature("running_end_time").read(tokens).positions.tolist() == [list(range(26, 43))]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 24), st.integers(0, 2**40), st.integers(0, 10**6))
def test_every_answer_and_feature_of_activity_selection(n, seed, step):
    task = ActivitySelection(n)
    tokens = task.batch(4, seed=seed, step=step).tokens
    assert tokens.shape[1] == task.length == 4 * n + 2
    ends_so_far, start_times = read_at(task, "running_end_time", tokens), read_at(task, "start_time", tokens)
    for prompt, answer, equals in sequences_of(task, tokens):
        starts, ends = prompt[:n], prompt[n:]
        assert all(1 <= start <= 9 and 1 <= end - start <= 9 for start, end in zip(starts, ends, strict=True))
        assert equals == 2 * n
        assert answer == chosen_by_hand(starts, ends)
        if n <= 8:
            assert len(answer) == 2 * most_without_overlap(starts, ends)
        assert next(start_times) == {n + r: starts[r] for r in range(n)}
        expected, last_end = {}, None
        for place, time in enumerate(answer):
            last_end = time if place % 2 else last_end
            if last_end is not None:
                expected[equals + 1 + place] = last_end
        assert next(ends_so_far) == expected


def test_shares_of_the_reference():
    """Numbers of chosen activities 1 to 7 in 1.7, 26.6, 40.8, 22.8, 6.7, 1.2 and 0.1 %, 3.10 in the mean."""
    task = ActivitySelection(16)
    chosen = (task.batch(20_000, seed=5).answer_mask.sum(dim=1).numpy() - 1) // 2
    assert chosen.mean() == pytest.approx(3.10, abs=0.04)  # standard error 0.007
    for count, share in enumerate((0.017, 0.266, 0.408, 0.228, 0.067, 0.012, 0.001), start=1):
        tolerance = 4 * math.sqrt(share * (1 - share) / 20_000) + 0.001
        assert (chosen == count).mean() == pytest.approx(share, abs=tolerance)
    assert task.mean_length == pytest.approx(40.2, abs=0.1)


# ---- Both -----------------------------------------------------------------------------------------------------------


def test_every_multiset_is_equally_likely_and_then_shuffled():
    """Two numbers of 19: a pair of equal ones is one multiset in one order, of different ones in two."""
    tokens = MaximumSubarray(2).batch(60_000, seed=0).tokens[:, :2].numpy()
    counts = np.bincount(tokens[:, 0] * 19 + tokens[:, 1], minlength=361).reshape(19, 19)
    in_training = counts > 0
    assert 0.75 < in_training.mean() < 0.97  # seven in eight problems, and each of them came up
    expected = np.where(np.eye(19), 2.0, 1.0) * in_training
    expected *= counts.sum() / expected.sum()
    surprise = ((counts - expected) ** 2 / np.maximum(expected, 1)).sum()
    freedom = in_training.sum() - 1
    assert abs(surprise - freedom) < 4 * math.sqrt(2 * freedom)


def test_durations_are_as_even_as_starts():
    tokens = ActivitySelection(16).batch(4000, seed=0).tokens.numpy()
    starts, durations = tokens[:, :16], tokens[:, 16:32] - tokens[:, :16]
    for values in (starts, durations):  # within a row alike values crowd: standard error about 0.0015
        np.testing.assert_allclose(np.bincount(values.ravel(), minlength=10)[1:] / values.size, 1 / 9, atol=0.008)
    assert (starts[:, 0] == starts[:, 1]).mean() == pytest.approx(2 / 10, abs=0.03)  # 1/9 if drawn independently
    assert (starts[:, 0] == durations[:, 1]).mean() == pytest.approx(2 / 10, abs=0.03)


@pytest.mark.parametrize("task", [MaximumSubarray(2), ActivitySelection(1)])
def test_splits_share_no_problem(task):
    """All 361 pairs of numbers, all 81 activities come up, each in training or elsewhere."""
    train = {task.text(row) for row in task.batch(6000, seed=0).tokens}
    elsewhere = {task.text(row) for row in task.batch(6000, seed=0, split="probe").tokens}
    everything = 361 if isinstance(task, MaximumSubarray) else 81
    assert len(train) + len(elsewhere) == len(train | elsewhere) == everything


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaximumSubarray(0), "values is 0; it must be a whole number, at least 2"),
        (lambda: MaximumSubarray(1), "values is 1; it must be a whole number, at least 2"),
        (lambda: MaximumSubarray(4.0), "values is 4.0; it must be a whole number"),
        (lambda: MaximumSubarray(4, layout="neat"), "layout must be prompt or paper, not 'neat'"),
        (lambda: ActivitySelection(0), "activities is 0; it must be a whole number, at least 1"),
        (lambda: ActivitySelection(4, layout=None), "layout must be prompt or paper, not None"),
    ],
)
def test_sizes_that_make_no_sense(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize("prompt", ["AC", "BB", "CB", "KL", "BL", "B", "BCD", ""])
def test_times_that_are_no_activity(prompt):
    """Starts are B to J (1 to 9) and the end is 1 to 9 later."""
    with pytest.raises(ArgumentError, match="states no problem of ActivitySelection"):
        ActivitySelection(1).solve(prompt)
