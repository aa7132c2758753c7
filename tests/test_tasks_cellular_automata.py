"""Cellular automata: their data and facts against plain Python, enumeration and the linear maps some of them are."""

import itertools
import json
import math
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emergent_heads.errors import ArgumentError
from emergent_heads.tasks import CellularAutomaton, LinearMap

# The centre column of rule 30 from a single cell, OEIS A051023.
RULE_30_CENTRE = [1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0]


@st.composite
def small_automata(draw, most_starts=10**9) -> CellularAutomaton:
    symbols = draw(st.integers(2, 4))
    size = draw(st.integers(1, min(9, int(math.log(most_starts, symbols)))))
    return CellularAutomaton(
        size,
        states=draw(st.integers(2, 5)),
        symbols=symbols,
        rules=draw(st.integers(1, 12)),
        radius=draw(st.integers(0, min(2, (size - 1) // 2))),
        iterations=draw(st.integers(1, 3)),
        boundary=draw(st.sampled_from(["periodic", "fixed"])),
        seed=draw(st.integers(0, 2**40)),
    )


def next_by_hand(task: CellularAutomaton, table, state) -> tuple[int, ...]:
    for _ in range(task.iterations):
        after = []
        for cell in range(task.state_size):
            number = 0
            for neighbour in range(cell - task.radius, cell + task.radius + 1):
                if task.boundary == "periodic":
                    value = state[neighbour % task.state_size]
                else:
                    value = state[neighbour] if 0 <= neighbour < task.state_size else 0
                number = number * task.symbols + value
            after.append(table[number])
        state = tuple(after)
    return state


def sequence_by_hand(task: CellularAutomaton, table, state) -> tuple[int, ...]:
    sequence = tuple(state)
    for _ in range(task.states - 1):
        state = next_by_hand(task, table, state)
        sequence += state
    return sequence


@settings(max_examples=60, deadline=None)
@given(small_automata(), st.integers(0, 2**40), st.integers(0, 10**6))
def test_every_sequence_follows_one_of_the_rules(task, seed, step):
    batch = task.batch(6, seed=seed, step=step)
    assert batch.tokens.shape == batch.loss_mask.shape == batch.answer_mask.shape == (6, task.length)
    assert batch.tokens.dtype == torch.int64
    tables = task.look_up.tolist()
    for row in batch.tokens.tolist():
        assert 0 <= min(row) <= max(row) < task.vocabulary_size
        assert any(sequence_by_hand(task, table, row[: task.state_size]) == tuple(row) for table in tables)


def test_every_rule_is_used_equally_often():
    """Eight rules that fill the state with their own number: the second state says which rule it was."""
    task = CellularAutomaton(3, 2, symbols=8, tables=[[number] * 512 for number in range(8)])
    counts = torch.bincount(task.batch(8000, seed=0).tokens[:, -1], minlength=8)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


def test_first_states_are_uniform():
    tokens = CellularAutomaton(3, symbols=3).batch(27_000, seed=0).tokens[:, :3]
    counts = torch.bincount(tokens @ torch.tensor([9, 3, 1]), minlength=27)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


def test_tables_are_drawn_once_with_even_entries():
    task = CellularAutomaton(rules=1000)
    assert task.look_up.shape == (1000, 64)
    assert np.array_equal(task.look_up, CellularAutomaton(8, 4, rules=1000).look_up)
    assert not np.array_equal(task.look_up, CellularAutomaton(rules=1000, seed=1).look_up)
    shares = np.bincount(task.look_up.ravel()) / 64_000  # standard error 0.0017
    assert np.abs(shares - 0.25).max() < 0.008
    assert np.abs(np.corrcoef(task.look_up[:8]) - np.eye(8)).max() < 0.6


# ---- Elementary rules -----------------------------------------------------------------------------------------------


def test_wolfram_numbers_against_a_published_sequence():
    task = CellularAutomaton.elementary(30, state_size=63, states=21)
    state = tuple(int(cell == 31) for cell in range(63))
    rows = np.reshape(sequence_by_hand(task, task.look_up[0].tolist(), state), (21, 63))
    assert rows[:, 31].tolist() == RULE_30_CENTRE
    assert rows[1, 30:33].tolist() == [1, 1, 1]
    assert rows[2, 29:34].tolist() == [1, 1, 0, 0, 1]  # not its mirror image, rule 86


@pytest.mark.parametrize("boundary", ["periodic", "fixed"])
@pytest.mark.parametrize("number", [30, 90, 110, 150, 184])
def test_elementary_data(number, boundary):
    task = CellularAutomaton.elementary(number, state_size=11, states=9, boundary=boundary)
    table = [number >> value & 1 for value in range(8)]
    for row in task.batch(10, seed=1).tokens.tolist():
        assert sequence_by_hand(task, table, row[:11]) == tuple(row)


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize(("number", "shifts"), [(90, (-1, 1)), (150, (-1, 0, 1)), (170, (1,)), (240, (-1,))])
def test_additive_rules_are_circulant_linear_maps(number, shifts, iterations):
    """Rule 90 is the sum of both neighbours, 150 with the cell itself, 170 and 240 shift by one cell; all modulo 2."""
    size, states = 9, 6
    circulant = sum(np.roll(np.eye(size, dtype=int), shift, axis=1) for shift in shifts)
    power = np.linalg.matrix_power(circulant, iterations) % 2
    automaton = CellularAutomaton.elementary(number, state_size=size, states=states, iterations=iterations)
    linear = LinearMap(matrix=power, states=states)
    for row in automaton.batch(20, seed=0).tokens.numpy().reshape(20, states, size):
        assert np.array_equal(row[1:], row[:-1] @ linear.transition.T % 2)
    for row in linear.batch(20, seed=0).tokens.tolist():
        assert sequence_by_hand(automaton, automaton.look_up[0].tolist(), row[:size]) == tuple(row)
    assert not (linear.pattern() & ~automaton.pattern()).any()
    if iterations == 1 and number == 150:
        assert torch.equal(linear.pattern(), automaton.pattern())
    assert automaton.floor == pytest.approx(linear.floor, rel=1e-12)
    assert automaton.plateau == pytest.approx(linear.plateau, rel=1e-12)


def test_several_elementary_rules_are_mixed():
    task = CellularAutomaton.elementary(0, 255, 204, state_size=12, states=2)
    assert (task.rules, task.symbols, task.radius) == (3, 2, 1)
    first, second = task.batch(900, seed=0).tokens.view(900, 2, 12).unbind(1)
    zeros, ones, same = ((second == other).all(1) for other in (0, 1, first))
    assert bool((zeros | ones | same).all())
    assert all(abs(int(kind.sum()) - 300) < 5 * 200**0.5 for kind in (zeros, ones, same))


# ---- Floor ----------------------------------------------------------------------------------------------------------


def loss_of_the_best_predictor(task: CellularAutomaton) -> float:
    """Mean loss over all sequences, token by token, with the rules' probabilities updated after each token."""
    tables = task.look_up.tolist()
    total, sequences = 0.0, 0
    for start in itertools.product(range(task.symbols), repeat=task.state_size):
        made = [sequence_by_hand(task, table, start) for table in tables]
        for truth in made:
            loss = (task.state_size - 1) * math.log(task.symbols)
            belief = [1 / len(tables)] * len(tables)
            for position in range(task.state_size, task.length):
                fits = [p * (m[position] == truth[position]) for p, m in zip(belief, made, strict=True)]
                loss -= math.log(sum(fits))
                belief = [p / sum(fits) for p in fits]
            total += loss / (task.length - 1)
            sequences += 1
    return total / sequences


@settings(max_examples=25, deadline=None)
@given(small_automata(most_starts=32))
def test_floor_is_the_loss_of_the_best_predictor(task):
    if task.length > 1:
        assert task.floor == pytest.approx(loss_of_the_best_predictor(task), rel=1e-12)
        assert task.floor_error == 0


@pytest.mark.parametrize(
    ("size", "floor"), [(4, 0.153), (8, 0.120), (16, 0.103), (32, 0.095), (64, 0.091), (128, 0.089)]
)
def test_floors_of_the_reference(size, floor):
    task = CellularAutomaton(size)
    assert task.floor == pytest.approx(floor, abs=6e-4)
    assert task.floor_error < 1e-4


def test_sampled_floor_is_within_its_error_of_the_exact_one():
    task = CellularAutomaton(6, 2, symbols=2, rules=200)
    exact, no_error = task.simulated_floor()
    assert (exact, no_error) == (task.floor, 0)
    deviations = []
    for seed in range(40):
        value, error = task.simulated_floor(60, seed)
        assert error > 0
        deviations.append((value - exact) / error)
    assert abs(np.mean(deviations)) < 5 / 40**0.5
    assert 0.6 < np.std(deviations) < 1.6
    assert task.simulated_floor(30, 7) == task.simulated_floor(30, 7)


def test_floor_in_parts_is_the_floor_at_once(monkeypatch):
    task = CellularAutomaton(5, 5, symbols=3, rules=9)
    at_once = task.simulated_floor(200)
    monkeypatch.setattr("emergent_heads.tasks.cellular_automata._CELLS_AT_ONCE", 100)
    assert task.simulated_floor(200) == pytest.approx(at_once, rel=1e-12)


def test_no_rule_to_infer_leaves_the_first_state():
    one, twice = CellularAutomaton(rules=1), CellularAutomaton.elementary(110, 110, 110)
    assert one.floor == pytest.approx(15 * math.log(4) / 255, rel=1e-12)
    assert twice.floor == pytest.approx(15 * math.log(2) / 255, rel=1e-12)
    assert one.floor_error == twice.floor_error == 0


@pytest.mark.parametrize("symbols", [2, 4, 7])
def test_plateau(symbols):
    task = CellularAutomaton(symbols=symbols)
    assert task.plateau == pytest.approx(math.log(symbols))
    assert task.floor < task.plateau


def test_many_rules_prefer_no_symbol():
    tokens = CellularAutomaton().batch(4000, seed=0).tokens
    for state in tokens.view(4000, 16, 16).unbind(1):
        shares = torch.bincount(state.flatten(), minlength=4) / state.numel()
        assert math.log(4) + float((shares * shares.log()).sum()) < 0.005


# ---- Pattern and masks ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(small_automata())
def test_pattern_is_the_window_and_never_looks_ahead(task):
    pattern, size = task.pattern(), task.state_size
    assert pattern.shape == (task.length, task.length)
    assert not pattern.triu(1).any()
    assert not pattern[: size - 1].any()
    assert not pattern[-1].any()
    reach = range(-task.radius * task.iterations, task.radius * task.iterations + 1)
    for token in range(size, task.length):
        state, cell = divmod(token, size)
        if task.boundary == "periodic":
            cells = {(cell + step) % size for step in reach}
        else:
            cells = {cell + step for step in reach if 0 <= cell + step < size}
        assert set(pattern[token - 1].nonzero().flatten().tolist()) == {(state - 1) * size + one for one in cells}


@settings(max_examples=30, deadline=None)
@given(small_automata(most_starts=600))
def test_cells_outside_the_window_do_not_matter(task):
    """For every rule, over all first states: equal cells in the window mean an equal next cell."""
    starts = list(itertools.product(range(task.symbols), repeat=task.state_size))
    for table in task.look_up[:3].tolist():
        after = [next_by_hand(task, table, start) for start in starts]
        for cell in range(task.state_size):
            window = np.flatnonzero(task.sources[cell])
            seen = {}
            for start, state in zip(starts, after, strict=True):
                assert seen.setdefault(tuple(start[at] for at in window), state[cell]) == state[cell]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(5, 1), (7, 2), (9, 4)]), st.sampled_from(["periodic", "fixed"]), st.integers(2, 5))
def test_every_cell_in_the_window_can_matter(size_radius, boundary, symbols):
    """A table that sums its window changes with each cell of it."""
    size, radius = size_radius
    table = [sum(digits) % symbols for digits in itertools.product(range(symbols), repeat=3)] if radius == 1 else None
    if table is None:
        symbols = 2
        table = [sum(digits) % 2 for digits in itertools.product(range(2), repeat=2 * radius + 1)]
    task = CellularAutomaton(size, 2, symbols, radius=radius, boundary=boundary, tables=[table])
    moved = np.array([next_by_hand(task, table, one) for one in np.eye(size, dtype=int).tolist()]).T != 0
    assert np.array_equal(moved, task.sources)


def test_a_window_that_outgrows_the_state_wraps_or_ends():
    assert CellularAutomaton(5, iterations=3).sources.all()
    fixed = CellularAutomaton(5, iterations=3, boundary="fixed").sources
    assert np.array_equal(fixed, np.abs(np.subtract.outer(range(5), range(5))) <= 3)


@settings(max_examples=30, deadline=None)
@given(small_automata())
def test_masks(task):
    batch = task.batch(3, seed=0)
    position = torch.arange(task.length)
    assert all(torch.equal(row, position > 0) for row in batch.loss_mask)
    assert all(torch.equal(row, position >= task.state_size) for row in batch.answer_mask)


# ---- Streams, forms and errors --------------------------------------------------------------------------------------


def test_any_step_is_made_again_alone():
    task = CellularAutomaton()
    torch.manual_seed(1)
    run = [task.batch(8, seed=3, step=step).tokens for step in range(5)]
    torch.manual_seed(2)
    assert torch.equal(CellularAutomaton().batch(8, seed=3, step=4).tokens, run[4])
    others = [
        *run,
        task.batch(8, seed=4, step=4).tokens,
        task.batch(8, seed=3, step=4, split="held-out").tokens,
    ]
    assert len({other.numpy().tobytes() for other in others}) == 7


def test_autocast_and_inference_mode_change_nothing():
    expected = CellularAutomaton().batch(8, seed=0).tokens
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        task = CellularAutomaton()
        assert torch.equal(task.batch(8, seed=0).tokens, expected)
    assert torch.equal(task.batch(8, seed=0).tokens, expected)


def test_the_last_entries_of_large_tables_are_reached():
    task = CellularAutomaton(3, 2, symbols=2**7, rules=2, seed=5)
    state = torch.full((2, 3), 127.0, dtype=torch.float64)
    after = task._next(state, task._offsets(torch.tensor([0.0, 1.0], dtype=torch.float64)))
    assert after.tolist() == [[task.look_up[rule, -1]] * 3 for rule in (0, 1)]


@pytest.mark.gpu
def test_on_a_gpu():
    task = CellularAutomaton.elementary(110, state_size=11, states=9)
    batch = task.batch(9, seed=0, device="cuda")
    assert {batch.tokens.device.type, batch.loss_mask.device.type, batch.answer_mask.device.type} == {"cuda"}
    for row in batch.tokens.tolist():
        assert sequence_by_hand(task, task.look_up[0].tolist(), row[:11]) == tuple(row)


def test_tables_of_ones_own_in_any_form_are_the_same_task():
    table = [[0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 0, 1, 1, 1, 0, 0]]
    tasks = [CellularAutomaton(8, symbols=2, tables=form(table)) for form in (list, np.array, torch.tensor)]
    assert len({*tasks}) == 1
    assert tasks[0].rules == 2
    assert CellularAutomaton(8, symbols=2, rules=2, tables=table) == tasks[0]
    assert CellularAutomaton.elementary(150, state_size=8).look_up.tolist() == [[0, 1, 1, 0, 1, 0, 0, 1]]


@settings(max_examples=30, deadline=None)
@given(small_automata())
def test_settings_go_through_json(task):
    for one in (task, CellularAutomaton.elementary(90, 110, state_size=5, boundary="fixed")):
        stored = json.loads(json.dumps(one.settings()))
        assert stored.pop("task") == "CellularAutomaton"
        again = CellularAutomaton(**stored)
        assert again == one
        assert torch.equal(again.batch(3, seed=1).tokens, one.batch(3, seed=1).tokens)


def test_pickled_without_what_was_computed():
    task = CellularAutomaton()
    size = len(pickle.dumps(task))
    tokens = task.batch(4, seed=0).tokens
    assert len(pickle.dumps(task)) == size
    assert torch.equal(pickle.loads(pickle.dumps(task)).batch(4, seed=0).tokens, tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"symbols": 1}, "symbols is 1; .* at least 2"),
        ({"states": 1}, "states is 1; .* at least 2"),
        ({"rules": 0}, "rules is 0; .* at least 1"),
        ({"radius": -1}, "radius is -1; .* at least 0"),
        ({"iterations": 0}, "iterations is 0; .* at least 1"),
        ({"state_size": "8"}, "state_size is '8'; it must be a whole number"),
        ({"boundary": "wrap"}, "unknown boundary 'wrap'; nearest: "),
        ({"boundary": "periodical"}, "nearest: periodic, fixed"),
        ({"state_size": 4, "radius": 2}, "a rule of radius 2 looks at 5 cells, but a state has 4"),
        ({"symbols": 10, "radius": 4}, r"256 tables of 10\*\*9 entries are more than 16777216"),
        ({"state_size": 600, "radius": 299}, r"tables of 4\*\*599 entries are more"),
        ({"symbols": 2, "tables": [[0, 1, 1]]}, r"shape \[1, 3\]; 1 rules of 2 symbols and radius 1 have .* \[1, 8\]"),
        ({"symbols": 2, "tables": [[0] * 8] * 2, "rules": 3}, r"shape \[2, 8\]; 3 rules"),
        ({"symbols": 2, "tables": [[0] * 7 + [2]]}, r"row 0 of tables is .* must lie in 0 to 1"),
        ({"symbols": 2, "tables": [[0.0] * 8]}, "tables must hold whole numbers"),
        ({"symbols": 2, "tables": [0] * 8}, "tables must have rows and columns"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        CellularAutomaton(**arguments)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((), "which elementary rules"), ((256,), "no elementary rule 256"), ((90, -1), "Wolfram number is -1")],
)
def test_wolfram_numbers_that_do_not_exist(numbers, message):
    with pytest.raises(ArgumentError, match=message):
        CellularAutomaton.elementary(*numbers)


def test_a_floor_needs_two_first_states():
    with pytest.raises(ArgumentError, match="n is 1; it must be a whole number, at least 2"):
        CellularAutomaton().simulated_floor(1)


def test_rules_differ_between_rows():
    """Over many rows of one batch, no rule takes all."""
    task = CellularAutomaton(16, 2, rules=256)
    tables = task.look_up
    used = Counter()
    for row in task.batch(60, seed=0).tokens.tolist():
        used[next(rule for rule in range(256) if next_by_hand(task, tables[rule], row[:16]) == tuple(row[16:]))] += 1
    assert len(used) > 30
