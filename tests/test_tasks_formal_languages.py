"""Dyck and shuffle Dyck: every sequence by rule, tiny languages by enumeration, exact floors by other means."""

import itertools
import json
import math
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from emergent_heads.errors import ArgumentError
from emergent_heads.tasks import Dyck, ShuffleDyck, from_settings

CATALAN = [1, 1, 2, 5, 14, 42, 132]
# Words of 2n brackets of two types, each balanced by itself: OEIS A005568, a product of two Catalan numbers.
TWO_SHUFFLED = [1, 2, 10, 70, 588]

LANGUAGES = pytest.mark.parametrize("language", [Dyck, ShuffleDyck])
TINY = [
    Dyck(2, 2, 0.4, 6),
    Dyck(2, 3, 0.4, 6, balanced=True),
    Dyck(1, 2, 0.7, 7),
    ShuffleDyck(2, 3, 0.6, 6),
    ShuffleDyck(2, 3, 0.6, 6, balanced=True),
    ShuffleDyck(3, 2, 0.3, 5),
    ShuffleDyck(2, 9, 0.8, 6),
]


@st.composite
def languages(draw) -> Any:
    balanced = draw(st.booleans())
    return draw(st.sampled_from([Dyck, ShuffleDyck]))(
        brackets=draw(st.integers(1, 9)),
        max_depth=draw(st.integers(1, 9)),
        p_open=draw(st.floats(0.05, 0.95)),
        length=2 * draw(st.integers(1, 30)) + (0 if balanced else draw(st.integers(0, 1))),
        balanced=balanced,
    )


def closable(task: Any, open_brackets: tuple[int, ...]) -> list[int]:
    """Types of the brackets that may close, each as likely as the others; the open ones in order of opening."""
    if isinstance(task, Dyck):
        return list(open_brackets[-1:])
    return sorted(set(open_brackets))


def closed(task: Any, open_brackets: tuple[int, ...], kind: int) -> tuple[int, ...]:
    """The brackets that are left: the last one of that type goes."""
    place = len(open_brackets) - 1 - open_brackets[::-1].index(kind)
    return open_brackets[:place] + open_brackets[place + 1 :]


def next_tokens(task: Any, open_brackets: tuple[int, ...], position: int) -> dict[int, float]:
    """Probability of each next token, written down from the description of the process."""
    depth, left = len(open_brackets), task.length - position
    if depth == 0:
        opens = 1.0
    elif depth == task.max_depth or (task.balanced and depth == left):
        opens = 0.0
    else:
        opens = task.p_open
    chances = dict.fromkeys(range(task.brackets), opens / task.brackets)
    for kind in closable(task, open_brackets):
        chances[task.brackets + kind] = (1 - opens) / len(closable(task, open_brackets))
    return {token: chance for token, chance in chances.items() if chance}


def words(task: Any) -> Iterator[tuple[tuple[int, ...], float]]:
    """All sequences of a task and their probabilities, by going through every choice."""

    def rest(word: tuple[int, ...], open_brackets: tuple[int, ...], chance: float) -> Any:
        if len(word) == task.length:
            yield word, chance
            return
        for token, part in next_tokens(task, open_brackets, len(word)).items():
            kind = token % task.brackets
            after = (*open_brackets, kind) if token < task.brackets else closed(task, open_brackets, kind)
            yield from rest((*word, token), after, chance * part)

    yield from rest((), (), 1.0)


def follows_the_rules(task: Any, word: Any) -> bool:
    """Every prefix balanced or open, in plain Python."""
    open_brackets: tuple[int, ...] = ()
    for token in word:
        kind = token % task.brackets
        if token < task.brackets:
            open_brackets = (*open_brackets, kind)
        elif kind in closable(task, open_brackets):
            open_brackets = closed(task, open_brackets, kind)
        else:
            return False
        if len(open_brackets) > task.max_depth:
            return False
    return not (task.balanced and open_brackets)


@settings(max_examples=100, deadline=None)
@given(languages(), st.integers(0, 2**40), st.integers(0, 10**6))
def test_every_sequence_is_in_the_language(task, seed, step):
    batch = task.batch(5, seed=seed, step=step)
    assert batch.tokens.shape == batch.loss_mask.shape == batch.answer_mask.shape == (5, task.length)
    assert batch.tokens.dtype == torch.int64
    assert batch.loss_mask.tolist() == [[False] + [True] * (task.length - 1)] * 5
    rows = batch.tokens.tolist()
    for row in rows:
        assert 0 <= min(row) <= max(row) < task.vocabulary_size == 2 * task.brackets
        assert follows_the_rules(task, row)
    assert task.is_valid(batch.tokens).all()


@settings(max_examples=100, deadline=None)
@given(languages(), st.data())
def test_the_checker_says_the_same_as_the_rules(task, data):
    """Of sequences with one token changed, and of any tokens at all."""
    row = task.batch(1, seed=data.draw(st.integers(0, 99))).tokens[0].tolist()
    row[data.draw(st.integers(0, task.length - 1))] = data.draw(st.integers(0, task.vocabulary_size - 1))
    other = data.draw(st.lists(st.integers(0, task.vocabulary_size - 1), min_size=task.length, max_size=task.length))
    expected = [follows_the_rules(task, each) for each in (row, other)]
    assert task.is_valid(torch.tensor([row, other])).tolist() == expected


def test_the_checker_knows_crossing_brackets_from_nested_ones():
    """With round brackets 0 and 2, square ones 1 and 3: ([)] and ([]) and ([]] and (((("""
    rows = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2], [0, 1, 3, 3], [0, 0, 0, 0]])
    assert Dyck(2, 3, length=4).is_valid(rows).tolist() == [False, True, False, False]
    assert ShuffleDyck(2, 3, length=4).is_valid(rows).tolist() == [True, True, False, False]
    assert ShuffleDyck(2, 4, length=4).is_valid(rows).tolist() == [True, True, False, True]
    assert ShuffleDyck(2, 4, length=4, balanced=True).is_valid(rows).tolist() == [True, True, False, False]
    assert Dyck(2, 3, length=4).is_valid(np.array([[0, 4, 0, 1], [-1, 0, 1, 0]])).tolist() == [False, False]


@pytest.mark.parametrize("task", TINY, ids=str)
def test_every_word_of_a_tiny_language_comes_as_often_as_it_should(task):
    expected = dict(words(task))
    assert math.isclose(sum(expected.values()), 1)
    n = 10_000
    counts = Counter(map(tuple, task.batch(n, seed=1).tokens.tolist()))
    assert counts.keys() <= expected.keys()
    assert {word for word, chance in expected.items() if chance * n > 20} <= counts.keys()
    common = [word for word, chance in expected.items() if chance * n >= 5]
    seen = np.array([counts[word] for word in common] + [0.0])
    due = np.array([expected[word] * n for word in common] + [0.0])
    seen[-1], due[-1] = n - seen.sum(), n - due.sum()  # all rare words together
    keep = due > 1e-6
    assert stats.chisquare(seen[keep], due[keep]).pvalue > 1e-4


@pytest.mark.parametrize("task", TINY, ids=str)
def test_the_checker_accepts_exactly_the_words_of_a_tiny_language(task):
    every = list(itertools.product(range(task.vocabulary_size), repeat=task.length))
    accepted = {word for word, good in zip(every, task.is_valid(torch.tensor(every)), strict=True) if good}
    assert accepted == {word for word, _ in words(task)}


@pytest.mark.parametrize("task", TINY, ids=str)
def test_plateau_and_floor_are_those_of_the_enumerated_words(task):
    """The floor from the probabilities of whole words, the plateau from each position's tokens."""
    chances = dict(words(task))
    entropy = -sum(chance * math.log(chance) for chance in chances.values())
    assert task.floor == pytest.approx((entropy - math.log(task.brackets)) / (task.length - 1), abs=1e-12)
    plateau = 0.0
    for position in range(1, task.length):
        tokens: Counter[int] = Counter()
        for word, chance in chances.items():
            tokens[word[position]] += chance  # pyright: ignore[reportArgumentType]
        plateau -= sum(chance * math.log(chance) for chance in tokens.values())
    assert task.plateau == pytest.approx(plateau / (task.length - 1), abs=1e-12)


@pytest.mark.parametrize("half", range(1, 5))
def test_there_are_as_many_balanced_words_as_catalan_numbers_say(half):
    for task, expected in (
        (Dyck(1, 9, length=2 * half, balanced=True), CATALAN[half]),
        (Dyck(2, 9, length=2 * half, balanced=True), 2**half * CATALAN[half]),
        (ShuffleDyck(1, 9, length=2 * half, balanced=True), CATALAN[half]),
        (ShuffleDyck(2, 9, length=2 * half, balanced=True), TWO_SHUFFLED[half]),
    ):
        every = torch.tensor(list(itertools.product(range(task.vocabulary_size), repeat=task.length)))
        assert task.is_valid(every).sum() == expected
        if expected < 100:
            assert len({tuple(row) for row in task.batch(6_000, seed=0).tokens.tolist()}) == expected


@pytest.mark.parametrize(
    "task",
    [Dyck(length=256), ShuffleDyck(length=256), ShuffleDyck(5, 12, 0.6, 200, balanced=True), Dyck(3, 40, length=300)],
    ids=str,
)
def test_the_floor_is_the_loss_of_the_predictor_that_knows_the_process(task):
    """Of the token probabilities as described, on sequences of the generator: both would have to be wrong alike."""
    losses = []
    for row in task.batch(60, seed=3).tokens.tolist():
        open_brackets: tuple[int, ...] = ()
        nats = 0.0
        for position, token in enumerate(row):
            if position:
                nats -= math.log(next_tokens(task, open_brackets, position)[token])
            kind = token % task.brackets
            open_brackets = (*open_brackets, kind) if token < task.brackets else closed(task, open_brackets, kind)
        losses.append(nats / (task.length - 1))
    error = float(np.std(losses, ddof=1)) / len(losses) ** 0.5
    assert abs(np.mean(losses) - task.floor) < 4 * error
    assert error < 0.02
    assert task.floor < task.plateau


@LANGUAGES
def test_the_plateau_is_the_entropy_of_the_tokens_frequencies(language):
    task = language(4, 5, 0.45, 40)
    tokens = task.batch(10_000, seed=0).tokens
    shares = torch.stack([torch.bincount(column, minlength=8) for column in tokens.T[1:]]) / len(tokens)
    assert task.plateau == pytest.approx(float(torch.special.entr(shares.double()).sum(dim=1).mean()), abs=2e-3)
    opening = (tokens < task.brackets).double().mean(dim=0).numpy()
    assert np.abs(opening - task.p_opens).max() < 5 * 0.5 / len(tokens) ** 0.5


def test_answers_are_the_closing_brackets_whose_type_is_forced():
    for task in (Dyck(3, 4, length=60), ShuffleDyck(3, 4, length=60)):
        batch = task.batch(20, seed=0)
        for row, answers in zip(batch.tokens.tolist(), batch.answer_mask.tolist(), strict=True):
            open_brackets: tuple[int, ...] = ()
            for token, answer in zip(row, answers, strict=True):
                kind = token % task.brackets
                closing = token >= task.brackets
                assert answer == (closing and len(closable(task, open_brackets)) == 1)
                open_brackets = closed(task, open_brackets, kind) if closing else (*open_brackets, kind)
        assert batch.answer_mask.any(dim=1).all()


def test_the_best_guess_at_an_answer_is_right():
    """So a perfect model reaches an accuracy of 1, as the docstrings say."""
    for task in (Dyck(length=128), ShuffleDyck(length=128)):
        batch = task.batch(4, seed=0)
        for row, answers in zip(batch.tokens.tolist(), batch.answer_mask.tolist(), strict=True):
            open_brackets: tuple[int, ...] = ()
            for position, (token, answer) in enumerate(zip(row, answers, strict=True)):
                chances = next_tokens(task, open_brackets, position)
                assert not answer or max(chances, key=lambda each: chances[each]) == token
                kind = token % task.brackets
                open_brackets = (*open_brackets, kind) if token < task.brackets else closed(task, open_brackets, kind)


@LANGUAGES
def test_sequences_depend_on_seed_step_and_split_and_on_nothing_else(language):
    task = language(5, 4, length=50)
    first = task.batch(4, seed=1, step=2).tokens
    task.batch(4, seed=1, step=3)
    assert torch.equal(first, language(5, 4, length=50).batch(4, seed=1, step=2, device=torch.device("cpu")).tokens)
    for other in ({"seed": 2, "step": 2}, {"seed": 1, "step": 3}, {"seed": 1, "step": 2, "split": "held-out"}):
        assert not torch.equal(first, task.batch(4, **other).tokens)


@LANGUAGES
def test_a_batch_is_put_on_the_device_that_is_asked_for(language):
    batch = language(5, 4, length=50).batch(4, seed=1, device="meta")
    assert {each.device.type for each in (batch.tokens, batch.loss_mask, batch.answer_mask)} == {"meta"}


@LANGUAGES
def test_settings_travel_and_make_the_same_task(language):
    task = language(5, 4, 0.3, 50, True)
    assert task.floor > 0
    again = pickle.loads(pickle.dumps(task))
    assert again == task
    assert "floor" not in vars(again)
    assert from_settings(json.loads(json.dumps(task.settings()))) == task
    with pytest.raises(ArgumentError, match="no single right attention pattern"):
        task.pattern()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"brackets": 0}, "brackets is 0; it must be a whole number, at least 1"),
        ({"max_depth": 0}, "max_depth is 0"),
        ({"length": 1}, "length is 1; it must be a whole number, at least 2"),
        ({"p_open": 1.0}, "p_open is 1.0; it must be a probability between 0 and 1"),
        ({"p_open": 0}, "p_open is 0"),
        ({"length": 7, "balanced": True}, "a balanced sequence cannot have 7 tokens; choose an even length"),
    ],
)
@LANGUAGES
def test_numbers_that_make_no_sense_are_refused(language, wrong, message):
    with pytest.raises(ArgumentError, match=message):
        language(**wrong)


def test_shuffle_dyck_refuses_what_its_floor_could_not_be_computed_for():
    with pytest.raises(ArgumentError, match="64 types of brackets up to a depth of 40 can be open in 215308 ways"):
        ShuffleDyck(max_depth=40)
    assert ShuffleDyck(brackets=2, max_depth=40, length=64).floor > 0  # few types: few ways
    with pytest.raises(ArgumentError, match="n is 0"):
        ShuffleDyck().batch(0, seed=0)
