"""The linear map: its data and facts against enumeration, plain Python and closed forms."""

import itertools
import json
import math
import pickle
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emergent_heads.errors import ArgumentError
from emergent_heads.tasks import LinearMap

NILPOTENT = ((2, 2), (2, 2))  # modulo 4 its square is zero
SINGULAR = ((1, 1, 0), (1, 1, 0), (0, 1, 1))


@st.composite
def small_maps(draw, most_starts=300) -> LinearMap:
    """Drawn maps with so few first states that all can be gone through."""
    symbols = draw(st.integers(2, 6))
    size = draw(st.integers(1, int(math.log(most_starts, symbols))))
    states = draw(st.integers(2, 4))
    return LinearMap(size, draw(st.integers(1, size)), states, symbols, seed=draw(st.integers(0, 2**40)))


def step_by_hand(matrix, state, symbols) -> tuple[int, ...]:
    return tuple(sum(a * x for a, x in zip(row, state, strict=True)) % symbols for row in matrix)


def all_sequences(task: LinearMap) -> list[tuple[int, ...]]:
    """The sequences from all first states, each equally likely."""
    sequences = []
    for state in itertools.product(range(task.symbols), repeat=task.state_size):
        sequence = state
        for _ in range(task.states - 1):
            state = step_by_hand(task.transition.tolist(), state, task.symbols)
            sequence += state
        sequences.append(sequence)
    return sequences


def entropy(counts) -> float:
    total = sum(counts)
    return -sum(count / total * math.log(count / total) for count in counts)


def best_loss(sequences, context: bool) -> float:
    """Mean entropy of each token but the first, given all before it or nothing."""
    loss = 0.0
    for position in range(1, len(sequences[0])):
        after = defaultdict(Counter)
        for sequence in sequences:
            after[sequence[:position] if context else ()][sequence[position]] += 1
        loss += sum(sum(c.values()) / len(sequences) * entropy(c.values()) for c in after.values())
    return loss / (len(sequences[0]) - 1)


@settings(max_examples=30, deadline=None)
@given(small_maps(most_starts=100))
def test_floor_and_plateau_are_entropies_of_all_sequences(task):
    sequences = all_sequences(task)
    assert task.floor == pytest.approx(best_loss(sequences, context=True), abs=1e-9)
    assert task.plateau == pytest.approx(best_loss(sequences, context=False), abs=1e-9)


@pytest.mark.parametrize(("matrix", "symbols", "states"), [(NILPOTENT, 4, 4), (SINGULAR, 2, 4), (SINGULAR, 6, 3)])
def test_plateau_counts_tokens_that_take_fewer_values(matrix, symbols, states):
    task = LinearMap(matrix=matrix, symbols=symbols, states=states)
    sequences = all_sequences(task)
    assert task.floor == pytest.approx(best_loss(sequences, context=True), abs=1e-9)
    assert task.plateau == pytest.approx(best_loss(sequences, context=False), abs=1e-9)


def test_a_matrix_that_dies_out_has_a_plateau_below_chance():
    assert LinearMap(matrix=NILPOTENT, symbols=4, states=4).plateau < 0.6 * math.log(4)


@pytest.mark.parametrize(("size", "floor"), [(8, 0.3235), (16, 0.3354), (32, 0.3411)])
def test_values_of_the_paper(size, floor):
    task = LinearMap(state_size=size)
    assert task.floor == pytest.approx(floor, abs=6e-5)
    assert task.floor_paper == pytest.approx((size - 1) / (2 * size) * math.log(2), rel=1e-12)
    assert task.plateau == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize(("size", "loss"), [(16, 0.358), (32, 0.352)])
def test_dense_rows_leave_one_token_to_learn(size, loss):
    task = LinearMap(state_size=size, sparsity=size)
    assert task.n_distinct_rows == task.n_candidates == task.rank == 1
    assert task.loss_with_unlearned(task.n_distinct_rows) == pytest.approx(loss, abs=5e-4)
    assert task.loss_with_unlearned(1) == pytest.approx(size * math.log(2) / (2 * size - 1), rel=1e-12)
    tokens = task.batch(20, seed=0).tokens
    assert torch.equal(tokens[:, size:], tokens[:, :size].sum(dim=1, keepdim=True).remainder(2).expand(-1, size))


def test_loss_with_unlearned_tokens_runs_from_floor_to_chance():
    task = LinearMap(state_size=5, sparsity=2, states=3)
    assert task.loss_with_unlearned(0) == task.floor
    assert task.loss_with_unlearned(10) == pytest.approx(math.log(2))
    with pytest.raises(ArgumentError, match="n is 11, but a sequence has only 10"):
        task.loss_with_unlearned(11)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.data())
def test_drawn_rows_have_exactly_so_many_ones(size, data):
    sparsity, seed = data.draw(st.integers(1, size)), data.draw(st.integers(0, 2**32))
    task = LinearMap(size, sparsity, seed=seed)
    assert set(np.unique(task.transition)) <= {0, 1}
    assert (task.transition.sum(axis=1) == sparsity).all()
    assert np.array_equal(task.transition, LinearMap(size, sparsity, states=3, seed=seed).transition)
    assert task.n_candidates == math.comb(size, sparsity)
    denser = LinearMap(size, data.draw(st.integers(sparsity, size)), seed=seed)
    assert (denser.transition >= task.transition).all()


def test_places_of_the_ones_are_even_and_rows_independent():
    drawn = np.stack([LinearMap(6, 2, seed=seed).transition for seed in range(1500)])
    share = drawn.mean(axis=0)  # standard error sqrt(2/9 / 1500) = 0.012
    assert np.abs(share - 1 / 3).max() < 0.05
    same = (drawn[:, 0] == drawn[:, 1]).all(axis=1).mean()  # 1 of 15 pairs of places, standard error 0.0064
    assert abs(same - 1 / 15) < 0.026


@settings(max_examples=60, deadline=None)
@given(small_maps())
def test_rank_and_invertibility_by_counting_what_is_reached(task):
    starts = itertools.product(range(task.symbols), repeat=task.state_size)
    reached = {step_by_hand(task.transition.tolist(), start, task.symbols) for start in starts}
    assert task.invertible == (len(reached) == task.symbols**task.state_size)
    if task.symbols in (2, 3, 5):
        assert len(reached) == task.symbols**task.rank
    else:
        assert task.rank is None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 3, 4, 5, 6]), st.integers(1, 3), st.data())
def test_rank_of_any_matrix(symbols, size, data):
    entry = st.integers(0, symbols - 1)
    row = st.lists(entry, min_size=size, max_size=size).filter(any)
    task = LinearMap(matrix=data.draw(st.lists(row, min_size=size, max_size=size)), symbols=symbols)
    starts = itertools.product(range(symbols), repeat=size)
    reached = {step_by_hand(task.transition.tolist(), start, symbols) for start in starts}
    assert task.invertible == (len(reached) == symbols**size)
    assert task.rank is None or len(reached) == symbols**task.rank


@settings(max_examples=40, deadline=None)
@given(small_maps(most_starts=10**6), st.integers(0, 2**40), st.integers(0, 10**6))
def test_every_state_is_the_map_of_the_one_before(task, seed, step):
    batch = task.batch(7, seed=seed, step=step)
    assert batch.tokens.shape == batch.loss_mask.shape == batch.answer_mask.shape == (7, task.length)
    assert batch.tokens.dtype == torch.int64
    for row in batch.tokens.tolist():
        states = [tuple(row[at : at + task.state_size]) for at in range(0, task.length, task.state_size)]
        assert len(states) == task.states
        assert 0 <= min(row) <= max(row) < task.vocabulary_size
        for before, after in itertools.pairwise(states):
            assert after == step_by_hand(task.transition.tolist(), before, task.symbols)


def test_first_states_are_uniform():
    tokens = LinearMap(state_size=3, symbols=3).batch(27_000, seed=0).tokens[:, :3]
    counts = torch.bincount(tokens @ torch.tensor([9, 3, 1]), minlength=27)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


@settings(max_examples=40, deadline=None)
@given(small_maps())
def test_masks(task):
    batch = task.batch(3, seed=0)
    position = torch.arange(task.length)
    assert all(torch.equal(row, position > 0) for row in batch.loss_mask)
    assert all(torch.equal(row, position >= task.state_size) for row in batch.answer_mask)


@settings(max_examples=40, deadline=None)
@given(small_maps())
def test_pattern_never_looks_ahead_and_is_the_matrix(task):
    pattern, size = task.pattern(), task.state_size
    assert pattern.shape == (task.length, task.length)
    assert not pattern.triu(1).any()
    assert not pattern[: size - 1].any()
    assert not pattern[-1].any()
    for token in range(size, task.length):
        state, cell = divmod(token, size)
        expected = {(state - 1) * size + source for source in range(size) if task.transition[cell, source]}
        assert set(pattern[token - 1].nonzero().flatten().tolist()) == expected


@settings(max_examples=20, deadline=None)
@given(small_maps())
def test_pattern_holds_what_the_next_token_needs_and_nothing_else(task):
    """Over all sequences: tokens at the pattern's places decide the next token, and with one place less it is open."""
    sequences = np.array(all_sequences(task))
    pattern = task.pattern().numpy()
    for dest in range(task.state_size - 1, 2 * task.state_size - 1):
        places = np.flatnonzero(pattern[dest])
        assert n_distinct(sequences, places) == n_distinct(sequences, [*places, dest + 1])
        fewer = places[1:]
        assert n_distinct(sequences, fewer) * task.symbols == n_distinct(sequences, [*fewer, dest + 1])


def n_distinct(sequences: np.ndarray, places) -> int:
    return len({tuple(row) for row in sequences[:, places]})


def test_any_step_is_made_again_alone():
    task = LinearMap()
    torch.manual_seed(1)
    run = [task.batch(8, seed=3, step=step).tokens for step in range(5)]
    torch.manual_seed(2)
    assert torch.equal(LinearMap().batch(8, seed=3, step=4).tokens, run[4])
    others = [
        *run,
        task.batch(8, seed=4, step=4).tokens,
        task.batch(8, seed=3, step=4, split="held-out").tokens,
    ]
    assert len({other.numpy().tobytes() for other in others}) == 7


def test_batches_do_not_touch_the_global_generator():
    before = torch.get_rng_state()
    LinearMap().batch(8, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_and_inference_mode_change_nothing():
    """512 sources: a sum in bfloat16 would be off."""
    expected = LinearMap(512, 400).batch(4, seed=0).tokens
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        task = LinearMap(512, 400)
        assert torch.equal(task.batch(4, seed=0).tokens, expected)
    assert torch.equal(task.batch(4, seed=0).tokens, expected)


@pytest.mark.gpu
def test_on_a_gpu():
    batch = LinearMap().batch(9, seed=0, device="cuda")
    assert {batch.tokens.device.type, batch.loss_mask.device.type, batch.answer_mask.device.type} == {"cuda"}
    before, after = batch.tokens.cpu().numpy().reshape(9, 2, 16).transpose(1, 0, 2)
    assert np.array_equal(after, before @ LinearMap().transition.T % 2)


def test_a_matrix_of_ones_own_in_any_form_is_the_same_task():
    tasks = [LinearMap(matrix=form(SINGULAR)) for form in (tuple, np.array, torch.tensor, lambda m: [*map(list, m)])]
    assert len({*tasks}) == 1
    assert (tasks[0].state_size, tasks[0].sparsity, tasks[0].rank) == (3, 2, 2)
    assert np.array_equal(tasks[0].transition, SINGULAR)
    assert LinearMap(state_size=3, sparsity=2, matrix=SINGULAR) == tasks[0]


def test_rows_that_differ():
    task = LinearMap(matrix=np.tri(5, dtype=bool))
    assert task.sparsity is None
    assert task.n_candidates == math.comb(5, 2)
    assert task.invertible


@settings(max_examples=30, deadline=None)
@given(small_maps())
def test_settings_go_through_json(task):
    for one in (task, LinearMap(matrix=task.transition, states=task.states, symbols=task.symbols)):
        stored = json.loads(json.dumps(one.settings()))
        assert stored.pop("task") == "LinearMap"
        again = LinearMap(**stored)
        assert again == one
        assert torch.equal(again.batch(3, seed=1).tokens, one.batch(3, seed=1).tokens)


def test_numpy_numbers_are_taken_as_numbers():
    task = LinearMap(np.int64(8), np.int32(2), seed=np.int64(3))
    assert task == LinearMap(8, 2, seed=3)
    json.dumps(task.settings())


def test_pickled_without_what_was_computed():
    task = LinearMap()
    size = len(pickle.dumps(task))
    tokens = task.batch(4, seed=0).tokens
    assert len(pickle.dumps(task)) == size
    assert torch.equal(pickle.loads(pickle.dumps(task)).batch(4, seed=0).tokens, tokens)


def test_facts_need_no_torch():
    code = (
        "import sys; from emergent_heads.tasks import LinearMap; t = LinearMap(); "
        "t.floor, t.plateau, t.rank, t.settings(); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 17}, r"sparsity is 17, but a row has only 16 places"),
        ({"sparsity": 0}, "sparsity is 0; it must be a whole number, at least 1"),
        ({"sparsity": None}, "sparsity is None"),
        ({"symbols": 1}, "symbols is 1; .* at least 2"),
        ({"states": 1}, "states is 1; .* at least 2"),
        ({"state_size": 0}, "state_size is 0"),
        ({"state_size": 8.0}, "state_size is 8.0; it must be a whole number"),
        ({"seed": "zero"}, "seed is 'zero'; it must be a whole number"),
        ({"matrix": [[1, 0], [0, 1], [1, 1]]}, r"shape \[3, 2\]; for states of 3 it must be square"),
        ({"matrix": np.eye(3, dtype=int), "state_size": 4}, r"shape \[3, 3\]; for states of 4"),
        ({"matrix": [[1, 0], [1]]}, "rows of matrix differ in length"),
        ({"matrix": [1, 0]}, r"matrix must have rows and columns; its shape is \[2\]"),
        ({"matrix": []}, "matrix must have rows and columns"),
        ({"matrix": 3}, "matrix must have rows and columns"),
        ({"matrix": [[1.0, 0.5], [0.0, 1.0]]}, "matrix must hold whole numbers, not float64"),
        ({"matrix": [[1, 0], [2, 1]]}, r"row 1 of matrix is \[2, 1\]; its entries must lie in 0 to 1"),
        ({"matrix": [[1, 0], [-1, 1]]}, "row 1 of matrix"),
        ({"matrix": [[1, 0], [0, 0]]}, "row 1 of matrix is all zeros"),
        ({"matrix": [[1, 0], [0, 1]], "sparsity": 2}, r"sparsity is 2, but the rows of matrix have \[1\]"),
        ({"matrix": [[1, 0], [0, 1]], "symbols": 1}, "symbols is 1"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        LinearMap(**arguments)


def test_no_sequences():
    with pytest.raises(ArgumentError, match="n is 0; it must be a whole number, at least 1"):
        LinearMap().batch(0, seed=0)
