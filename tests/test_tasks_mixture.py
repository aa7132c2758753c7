"""Mixtures: exact counts along a schedule, rows that each belong to their task, and ids that mean one thing."""

import json
import pickle
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emergent_heads.errors import ArgumentError
from emergent_heads.randomness import torch_generator
from emergent_heads.tasks import CellularAutomaton, Dyck, LinearMap, Mixture, TextCorpus, from_settings, repeated_text
from emergent_heads.tasks.task import SequenceBatch, SequenceTask


@dataclass(frozen=True)
class Lot(SequenceTask):
    """Random tokens from `first` to `first + 9`; the last is the answer."""

    first: int
    length: int = 4
    plateau: float = 2.0
    floor: float = 1.0

    @property
    def vocabulary_size(self):
        return self.first + 10

    def batch(self, n, *, seed, step=0, split="train", device="cpu"):
        generator = torch_generator(seed, "lot", step, split)
        tokens = self.first + torch.randint(10, (n, self.length), generator=generator)
        position = torch.arange(self.length)
        return SequenceBatch(tokens, (position > 0).expand(n, -1), (position == self.length - 1).expand(n, -1))


LOW, HIGH = Lot(0), Lot(20, length=6, plateau=4.0, floor=3.0)


def rows_by_place(batch: SequenceBatch) -> list[str]:
    """Which of the two tasks each row is of."""
    return ["high" if row.max() >= 20 else "low" for row in batch.tokens]


# ---- shares ----


def test_counts_are_exact_and_no_matter_of_chance():
    mixture = Mixture((LOW, HIGH), (3, 1))
    for step in range(5):
        assert rows_by_place(mixture.batch(32, seed=0, step=step)) == ["low"] * 24 + ["high"] * 8
    assert [mixture.rows(n, 0) for n in (1, 2, 3, 4, 5)] == [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1)]
    assert Mixture((LOW, HIGH)).rows(3, 0) == (2, 1)  # of equal remainders, the first
    assert Mixture((LOW, HIGH, LOW), (0.1, 0.2, 0.7)).rows(10, 0) == (1, 2, 7)


@settings(deadline=None)
@example([17, 20, 6, 13], 52)  # equal remainders that differ in floating point
@example([2, 13, 13, 18, 20], 18)  # and that lie between two rounded values
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any), st.integers(1, 200))
def test_counts_are_those_of_largest_remainders(weights, n):
    mixture = Mixture((LOW,) * len(weights), weights)
    quotas = [Fraction(weight * n, sum(weights)) for weight in weights]
    counts = [int(quota) for quota in quotas]
    for place in sorted(range(len(weights)), key=lambda place: (counts[place] - quotas[place], place))[
        : n - sum(counts)
    ]:
        counts[place] += 1
    assert mixture.rows(n, 7) == tuple(counts)


def test_shares_change_at_once_or_step_by_step():
    points = ((0, (1, 0)), (10, (1, 1)), (20, (0, 1)))
    constant = Mixture((LOW, HIGH), points)
    linear = Mixture((LOW, HIGH), points, between="linear")
    assert [constant.rows(8, step)[0] for step in (0, 9, 10, 19, 20, 99)] == [8, 8, 4, 4, 0, 0]
    assert [linear.rows(8, step)[0] for step in (0, 5, 10, 15, 20, 99)] == [8, 6, 4, 2, 0, 0]
    assert linear.shares(1) == pytest.approx((0.95, 0.05))
    for step in range(25):
        for mixture in (constant, linear):
            assert sum(mixture.shares(step)) == pytest.approx(1)
            assert rows_by_place(mixture.batch(8, seed=3, step=step)).count("low") == mixture.rows(8, step)[0]


def test_held_out_rows_and_losses_go_by_the_last_shares():
    mixture = Mixture((LOW, HIGH), ((0, (1, 0)), (1000, (1, 3))), between="linear")
    for step in (0, 500):
        assert rows_by_place(mixture.batch(8, seed=0, step=step, split="held-out")) == ["low"] * 2 + ["high"] * 6
    assert mixture.plateau == pytest.approx(0.25 * 2 + 0.75 * 4)
    assert mixture.floor == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert mixture.mean_length == pytest.approx(0.25 * 4 + 0.75 * 6)


# ---- rows ----


def test_shorter_rows_are_filled_up_with_what_does_not_count():
    batch = Mixture((LOW, HIGH)).batch(6, seed=0)
    assert batch.tokens.shape == (6, 6)
    assert batch.loss_mask.tolist() == [[False, True, True, True, False, False]] * 3 + [[False] + [True] * 5] * 3
    assert batch.answer_mask.int().argmax(dim=1).tolist() == [3] * 3 + [5] * 3
    assert batch.answer_mask.sum(dim=1).tolist() == [1] * 6


def test_rows_are_valid_for_their_own_tasks():
    linear, automaton = LinearMap(4, 2, states=3), CellularAutomaton(state_size=6, states=2, symbols=3, rules=2)
    batch = Mixture((linear, automaton), (1, 3)).batch(40, seed=5, step=2)
    for row in batch.tokens[:10, : linear.length].reshape(10, 3, 4):
        for before, after in pairwise(row):
            assert after.tolist() == [
                sum(a * x for a, x in zip(line, before.tolist(), strict=True)) % 2
                for line in linear.transition.tolist()
            ]
    for before, after in batch.tokens[10:].reshape(30, 2, 6):
        cells = before.tolist()
        windows = [9 * cells[i - 1] + 3 * cells[i] + cells[(i + 1) % 6] for i in range(6)]
        assert after.tolist() in [table[windows].tolist() for table in automaton.look_up]


def test_the_same_arguments_give_the_same_rows():
    mixture = Mixture((LOW, HIGH, LOW), ((0, (1, 1, 1)), (10, (1, 2, 3))), between="linear")
    batch = mixture.batch(12, seed=1, step=4)
    mixture.batch(5, seed=8)
    again = pickle.loads(pickle.dumps(mixture)).batch(12, seed=1, step=4)
    assert (batch.tokens == again.tokens).all()
    for other in ({"seed": 2}, {"step": 5}, {"split": "held-out"}):
        assert (mixture.batch(12, **{"seed": 1, "step": 4, **other}).tokens != batch.tokens).any()


def test_the_same_task_twice_draws_twice():
    first, second = Mixture((HIGH, HIGH)).batch(40, seed=0).tokens.split(20)
    assert (first != second).any()


def test_a_task_without_rows_is_not_asked_for_any():
    class Silent(Lot):
        def batch(self, n, **arguments):
            raise AssertionError

    assert len(Mixture((LOW, Silent(0)), (1, 0)).batch(4, seed=0)) == 4


# ---- ids ----


def test_shared_ids_overlap_and_disjoint_ids_do_not():
    shared, disjoint = (Mixture((LOW, HIGH, LOW), vocabulary=vocabulary) for vocabulary in ("shared", "disjoint"))
    assert shared.vocabulary_size == 30
    assert (disjoint.offsets, disjoint.vocabulary_size) == ((0, 10, 40), 50)
    one, other = (mixture.batch(9, seed=0) for mixture in (shared, disjoint))
    added = torch.tensor([0] * 3 + [10] * 3 + [40] * 3)[:, None]
    real = other.loss_mask.clone()
    real[:, 0] = True
    assert ((one.tokens + added)[real] == other.tokens[real]).all()
    ids = [set(other.tokens[rows][real[rows]].tolist()) for rows in (slice(0, 3), slice(3, 6), slice(6, 9))]
    assert not ids[0] & ids[1]
    assert not ids[1] & ids[2]
    assert not ids[0] & ids[2]


@pytest.fixture
def text(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{number} and {number} make {2 * number}, they say\n" * 20)
    return TextCorpus(f"{tmp_path}/*.txt", vocabulary_size=40, context=12)


def test_tasks_on_one_text_keep_its_ids(text):
    brackets = Dyck()
    mixture = Mixture((brackets, text, repeated_text(text, passage=(2, 4))), vocabulary="disjoint")
    assert mixture.offsets == (40, 0, 0)
    assert mixture.vocabulary_size == 40 + brackets.vocabulary_size
    assert mixture.tokenizer is text.tokenizer
    assert Mixture((text, brackets)).vocabulary_size == max(40, brackets.vocabulary_size)
    assert Mixture((text, replace(text, context=6))).length == 12
    assert Mixture((LOW, HIGH)).tokenizer is None


def test_tasks_of_two_tokenizers_are_refused(text):
    for other in ({"vocabulary_size": 41}, {"separator": "\n"}, {"held_out_share": 0.3}):
        with pytest.raises(ArgumentError, match="different tokenizers"):
            Mixture((text, replace(text, **other)))


def test_what_makes_no_sense_is_refused():
    for tasks, arguments, message in (
        ((), {}, "at least one"),
        ((LOW, "text"), {}, "at least one"),
        ((LOW, HIGH), {"weights": (1,)}, r"weights \[1.0\] for 2 tasks"),
        ((LOW, HIGH), {"weights": (1, -1)}, "must not be below 0"),
        ((LOW, HIGH), {"weights": (0, 0)}, "one of them must be above"),
        ((LOW, HIGH), {"weights": (1, float("nan"))}, "must not be below 0"),
        ((LOW, HIGH), {"weights": 1}, "weights must be one number for each of the 2 tasks"),
        ((LOW, HIGH), {"weights": ()}, r"weights \[\] for 2 tasks"),
        ((LOW, HIGH), {"weights": ("a", "b")}, "weights must be one number"),
        ((LOW, HIGH), {"weights": ((0, (1, 1)), 3)}, "pairs of a step and such numbers"),
        ((LOW, HIGH), {"weights": ((5, (1, 1)),)}, "must rise from 0, and are 5"),
        ((LOW, HIGH), {"weights": ((0, (1, 1)), (0, (1, 0)))}, "must rise from 0, and are 0, 0"),
        ((LOW, HIGH), {"weights": ((0.5, (1, 1)),)}, "a step is 0.5"),
        ((LOW, HIGH), {"between": "cosine"}, "between must be constant or linear"),
        ((LOW, HIGH), {"vocabulary": "own"}, "vocabulary must be shared or disjoint"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Mixture(tasks, **arguments)
    with pytest.raises(ArgumentError, match="n is 0"):
        Mixture((LOW, HIGH)).batch(0, seed=0)


def test_a_mixture_is_made_again_from_its_settings():
    mixture = Mixture(
        (LinearMap(4, 2), Mixture((LinearMap(3, 2),))),
        [[0, [1, 0]], [10, [0.5, 0.5]]],
        between="linear",
        vocabulary="disjoint",
    )
    made = from_settings(json.loads(json.dumps(mixture.settings())))
    assert made == mixture
    assert hash(made) == hash(mixture)
    assert made.breakpoints == ((0, (1.0, 0.0)), (10, (0.5, 0.5)))
