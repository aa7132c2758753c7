"""Features: what is read from tokens, in which shape, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emergent_heads.errors import ArgumentError
from emergent_heads.tasks import Addition, Feature, MaximumSubarray, Multiplication

TOKENS = np.arange(12).reshape(3, 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32))
def test_reads_what_it_was_given_in_every_form(rows, places, components, seed):
    """Arrays, tensors, lists and functions of the tokens say the same; absent places have no label."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(9, size=(rows, 7))
    labels = generator.integers(2, size=(rows, places, components))
    positions = generator.integers(-3, 7, size=(rows, places))
    forms = [
        Feature("f", "multilabel", labels, positions),
        Feature("f", "multilabel", torch.from_numpy(labels), torch.from_numpy(positions)),
        Feature("f", "multilabel", lambda _: labels.tolist(), positions.tolist()),
        Feature("f", "multilabel", lambda _: labels == 1, lambda _: torch.from_numpy(positions)),
    ]
    for feature in forms:
        found = feature.read(torch.from_numpy(tokens))
        assert found.labels.dtype == np.float64
        for row in range(rows):
            for place in range(places):
                if positions[row, place] < 0:
                    assert found.positions[row, place] == -1
                    assert np.isnan(found.labels[row, place]).all()
                else:
                    assert found.positions[row, place] == positions[row, place]
                    assert found.labels[row, place].tolist() == labels[row, place].tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32))
def test_base_rate_is_the_mean_over_rows_that_have_the_place(rows, places, seed):
    generator = np.random.default_rng(seed)
    labels = generator.standard_normal((rows, places))
    positions = generator.integers(-1, 2, size=(rows, places))
    rate = Feature("f", "continuous", labels, positions).read(np.zeros((rows, 2), dtype=int)).base_rate
    assert rate.shape == (places, 1)
    for place in range(places):
        present = [labels[row, place] for row in range(rows) if positions[row, place] >= 0]
        if present:
            assert rate[place, 0] == pytest.approx(sum(present) / len(present))
        else:
            assert np.isnan(rate[place, 0])


def test_functions_are_given_the_tokens_as_an_array():
    feature = Feature("last two", "continuous", lambda tokens: tokens[:, -2:], [2, 3])
    found = feature.read(torch.from_numpy(TOKENS))
    assert found.labels[..., 0].tolist() == [[2, 3], [6, 7], [10, 11]]
    assert found.positions.tolist() == [[2, 3]] * 3


def test_labels_of_absent_places_are_not_looked_at():
    labels = [[1.0, np.nan], [7.0, 0.0], [0.0, 1.0]]
    found = Feature("f", "binary", labels, [[0, -1], [-5, 1], [2, 3]]).read(TOKENS)
    np.testing.assert_array_equal(found.labels[..., 0], [[1, np.nan], [np.nan, 0], [0, 1]])
    assert found.positions.tolist() == [[0, -1], [-1, 1], [2, 3]]


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (Feature("f", "binary", np.zeros((3, 2)), [0, 4]), "'f': position 4 is outside the sequence of 4 tokens"),
        (Feature("f", "binary", np.full((3, 1), 2), [0]), "binary labels must be 0 or 1; .* kind continuous"),
        (Feature("f", "multilabel", np.full((3, 1, 2), 0.5), [0]), "multilabel labels must be 0 or 1"),
        (Feature("f", "continuous", np.full((3, 1), np.nan), [0]), "not finite"),
        (Feature("f", "continuous", np.full((3, 1), np.inf), [0]), "not finite"),
        (Feature("f", "binary", np.zeros((3, 2)), [0]), r"labels \[3, 2, 1\] and positions \[3, 1\] do not fit 3"),
        (Feature("f", "binary", np.zeros((2, 1)), [0]), r"labels \[2, 1, 1\] .* do not fit 3 sequences"),
        (Feature("f", "binary", np.zeros((3, 1)), [[0], [1]]), r"positions \[2, 1\] do not fit 3 sequences"),
        (Feature("f", "multilabel", np.zeros((3, 1)), [0]), r"multilabel \[row, place, component\]"),
        (Feature("f", "binary", np.zeros(3), [0]), r"labels are \[row, place\]"),
        (Feature("f", "binary", np.zeros((3, 1)), np.array(0)), "do not fit"),
        (Feature("f", "binary", np.zeros((3, 1)), [0.5]), "positions must be whole numbers, not float64"),
        (Feature("f", "binary", [["a"]] * 3, [0]), "labels must be numbers"),
        (Feature("f", "binary", [[0], [0, 1], [1]], [0]), "the labels are rows that differ in length"),
        (Feature("f", "binary", np.zeros((3, 1)), lambda _: [[0], [0, 1], [1]]), "the positions are rows that differ"),
    ],
)
def test_what_does_not_fit_is_refused(feature, message):
    with pytest.raises(ArgumentError, match=message):
        feature.read(TOKENS)


def test_tokens_must_be_rows():
    with pytest.raises(ArgumentError, match=r"tokens \[4\] must be \[row, pos\]"):
        Feature("f", "binary", np.zeros((3, 1)), [0]).read(TOKENS[0])


def test_an_error_of_the_users_own_function_is_not_hidden():
    def broken(tokens):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        Feature("f", "binary", broken, [0]).read(TOKENS)


def test_unknown_kind():
    with pytest.raises(ArgumentError, match="'f': kind is 'ternary'; use binary, multilabel, continuous"):
        Feature("f", "ternary", np.zeros((3, 1)), [0])


@pytest.mark.parametrize("other", [Addition(4), Multiplication(3), MaximumSubarray(5)])
def test_sequences_of_another_task_are_refused(other):
    with pytest.raises(ArgumentError, match=r"Addition\(bits=3, layout='prompt'\)"):
        Addition(3).feature("carry").read(other.batch(2, seed=0).tokens)
