"""Neural cellular automata: rules against plain loops and torch's convolution, the filter against zlib."""

import json
import math
import pickle
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from emergent_heads.errors import ArgumentError
from emergent_heads.randomness import numpy_generator
from emergent_heads.tasks import NeuralCellularAutomata, from_settings
from emergent_heads.tasks.neural_cellular_automata import COMPLEXITY_GRIDS, RuleNetworks

ALL = (0.0, 9.0)
SMALL = NeuralCellularAutomata(4, 3, 2, length=25, rules=6, burn_in=2, complexity=ALL, token_bytes=1, seed=5)
KINDS = [
    {"grid": 4, "colours": 3, "patch": 2},
    {"grid": 3, "colours": 2, "patch": 1},
    {"grid": 3, "colours": 2, "patch": 3, "token_bytes": 2},
    {"grid": 6, "colours": 10, "patch": 2, "token_bytes": 4},
]


def small(**changes: Any) -> NeuralCellularAutomata:
    changes.pop("task", None)
    numbers = {"length": 40, "rules": 5, "burn_in": 1, "complexity": ALL, "token_bytes": 1, "seed": 3}
    return NeuralCellularAutomata(**{**KINDS[0], **numbers, **changes})


def next_by_hand(hidden: list, output: list, grid: list[list[int]]) -> list[list[int]]:
    """One step in plain Python: whole numbers of any size."""
    size = len(grid)
    after = [[0] * size for _ in grid]
    for y in range(size):
        for x in range(size):
            features = [0] * len(hidden[0][0])
            for neighbour in range(9):
                colour = grid[(y + neighbour // 3 - 1) % size][(x + neighbour % 3 - 1) % size]
                for feature, weight in enumerate(hidden[neighbour][colour]):
                    features[feature] += weight
            scores = [sum(w * max(f, 0) for w, f in zip(row, features, strict=True)) for row in output]
            after[y][x] = scores.index(max(scores))
    return after


def next_by_convolution(networks: RuleNetworks, rule: int, grids: torch.Tensor) -> torch.Tensor:
    """One step of grids by one rule, through one-hot colours and torch's own convolution in double precision."""
    kernel = torch.from_numpy(networks.hidden[rule]).double().permute(2, 1, 0).unflatten(-1, (3, 3))
    colours = functional.one_hot(grids, kernel.shape[1]).permute(0, 3, 1, 2).double()
    features = functional.conv2d(functional.pad(colours, (1, 1, 1, 1), mode="circular"), kernel).relu()
    return torch.einsum("cf,rfyx->rcyx", torch.from_numpy(networks.output[rule]).double(), features).argmax(dim=1)


def tokens_by_hand(task: NeuralCellularAutomata, grid: list[list[int]]) -> list[int]:
    tokens = [task.colours ** (task.patch**2)]
    for top in range(0, task.grid, task.patch):
        for left in range(0, task.grid, task.patch):
            cells = [grid[top + y][left + x] for y in range(task.patch) for x in range(task.patch)]
            tokens.append(sum(cell * task.colours**place for place, cell in enumerate(cells)))
    return [*tokens, tokens[0] + 1]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_grid_follows_from_the_one_before_by_one_rule(kind):
    """Sequences of the task against plain Python that knows nothing of patches, offsets or tables."""
    task = small(**kind, rules=3)
    span = task.patches + 2
    task = small(**kind, rules=3, length=3 * span + 2)
    hidden, output = task.networks.hidden.tolist(), task.networks.output.tolist()
    batch = task.batch(6, seed=1)
    assert batch.tokens.shape == batch.loss_mask.shape == batch.answer_mask.shape == (6, task.length)
    for row, grids in zip(batch.tokens.tolist(), task.decode(batch.tokens).tolist(), strict=True):
        assert len(grids) == 3
        assert row[:span] == tokens_by_hand(task, grids[0])
        fits = []
        for rule in range(task.rules):
            made = tokens_by_hand(task, grids[0])
            grid = grids[0]
            while len(made) < task.length:
                grid = next_by_hand(hidden[rule], output[rule], grid)
                made += tokens_by_hand(task, grid)
            fits.append(made[: task.length] == row)
        assert any(fits)


def test_a_rule_does_what_a_convolution_does():
    task = NeuralCellularAutomata(rules=4, complexity=ALL)
    grids = torch.from_numpy(np.random.default_rng(0).integers(task.colours, size=(20, 12, 12)))
    for rule in range(4):
        expected = next_by_convolution(task.networks, rule, grids)
        assert torch.equal(task.next_grids(grids, torch.full((20,), rule)), expected)
        assert len(expected.unique()) > 1
    mixed = torch.tensor([0, 1, 2, 3] * 5)
    each = torch.stack([next_by_convolution(task.networks, int(rule), grids)[i] for i, rule in enumerate(mixed)])
    assert torch.equal(task.next_grids(grids, mixed), each)


def test_equal_scores_go_to_the_lowest_colour():
    """A network without hidden features has the score 0 for every colour, one with a copied output pairs of them."""
    task = small(colours=3, rules=2)
    networks = RuleNetworks(task.networks.hidden.copy(), task.networks.output.copy())
    networks.hidden[0] = -1
    networks.output[1, 2] = networks.output[1, 1]
    vars(task)["networks"] = networks
    grids = torch.from_numpy(np.random.default_rng(0).integers(3, size=(30, 4, 4)))
    assert not task.next_grids(grids, torch.zeros(30, dtype=torch.int64)).any()
    second = task.next_grids(grids, torch.ones(30, dtype=torch.int64))
    assert set(second.unique().tolist()) == {0, 1}
    assert torch.equal(second, next_by_convolution(networks, 1, grids))


@pytest.mark.parametrize("colours", [2, 10])
def test_random_networks_are_drawn_as_they_should_be_and_stay_exact(colours):
    networks = RuleNetworks.random(2000, colours, np.random.default_rng(0))
    assert networks.hidden.shape == (2000, 9, colours, 16)
    assert networks.output.shape == (2000, colours, 16)
    assert 9 * np.abs(networks.hidden).max() < 2**24  # sums of nine, in single precision
    # Truncated at two standard deviations of the normal distribution before it is scaled to variance 1 / 16.
    output = networks.output / 2**10
    assert output.std() == pytest.approx(0.25, rel=0.01)
    assert np.abs(output).max() == pytest.approx(0.25 * 2 / 0.87962566, rel=0.01)
    # A sum of 4 products of variance 1 / (9 colours) and 1 / 4.
    assert (networks.hidden / 2**18).std() == pytest.approx((9 * colours) ** -0.5, rel=0.03)
    assert np.linalg.matrix_rank(networks.hidden[0].reshape(-1, 16)) == 4  # four filters


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 2**30), st.integers(1, 4))
def test_grids_and_tokens_go_over_into_each_other(kind, seed, times):
    task = small(**kind)
    cells = np.random.default_rng(seed).integers(task.colours, size=(3, times, task.grid, task.grid))
    tokens = task.encode(torch.from_numpy(cells))
    assert tokens.tolist() == [
        [token for grid in row for token in tokens_by_hand(task, grid)] for row in cells.tolist()
    ]
    assert tokens.max() < task.vocabulary_size == task.colours ** (task.patch**2) + 2
    assert torch.equal(task.decode(tokens), torch.from_numpy(cells))
    assert task.decode(tokens[:, :-1]).shape[1] == times - 1


# ---- The filter -----------------------------------------------------------------------------------------------------


def test_the_rules_are_those_whose_trajectories_compress_as_asked():
    """The draws made again here, evolved by torch's convolution and compressed by zlib."""
    task = NeuralCellularAutomata(6, 3, 2, rules=90, burn_in=2, complexity=(0.4, 0.8), token_bytes=1, seed=2)
    kept, shares, part = [], [], 0
    while len(kept) < task.rules:
        generator = numpy_generator(2, "neural cellular automata", part)
        drawn = RuleNetworks.random(128, 3, generator)
        weights = np.exp(generator.standard_normal((128, 3)))
        steps = (weights / weights.sum(axis=1, keepdims=True)).cumsum(axis=1)
        draws = generator.random((128, 36))
        first = [
            [int(np.searchsorted(step[:-1], draw)) for draw in row] for step, row in zip(steps, draws, strict=True)
        ]
        for rule in range(128):
            grid = torch.tensor(first[rule]).view(1, 6, 6)
            trajectory = []
            for _ in range(2 + COMPLEXITY_GRIDS):
                trajectory.append(grid)
                grid = next_by_convolution(drawn, rule, grid)
            raw = b"".join(bytes(tokens_by_hand(task, each[0].tolist())[1:-1]) for each in trajectory[2:])
            deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
            share = (len(deflate.compress(raw) + deflate.flush()) + 18) / len(raw)  # gzip adds 18 bytes
            shares.append(share)
            if 0.4 <= share <= 0.8:
                kept.append((drawn.hidden[rule], drawn.output[rule]))
        part += 1
    assert part > 1
    assert min(shares) < 0.4
    assert max(shares) > 0.8
    assert len(task.networks) == 90
    assert np.array_equal(task.networks.hidden, [hidden for hidden, _ in kept[:90]])
    assert np.array_equal(task.networks.output, [output for _, output in kept[:90]])


def test_grids_at_rest_compress_and_noise_does_not():
    task = NeuralCellularAutomata(colours=4, token_bytes=1)
    noise = torch.from_numpy(np.random.default_rng(0).integers(4, size=(2, 10, 12, 12)))
    still = noise[:, :1].expand(-1, 10, -1, -1)
    assert task.compressed_share(noise).min() > 0.95
    assert task.compressed_share(still).max() < 0.25
    assert task.compressed_share(torch.zeros_like(noise)).max() < 0.1
    four = NeuralCellularAutomata(colours=4, token_bytes=4)  # three zero bytes of each four
    assert four.compressed_share(noise).max() < 0.45


def test_a_filter_that_hardly_any_rule_passes_is_refused():
    with pytest.raises(
        ArgumentError, match=r"only 0 of 1024 random rules compress to a share in complexity = \(0.9, "
    ):
        _ = small(complexity=(0.9, 0.91), token_bytes=4).networks


# ---- Sequences ------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 70), st.integers(0, 2**40))
def test_sequences_are_valid_and_changed_ones_are_not(kind, length, seed):
    task = small(**kind, length=length + 1)
    batch = task.batch(3, seed=seed)
    assert batch.tokens.shape == (3, length + 1)
    assert batch.tokens.dtype == torch.int64
    assert task.is_valid(batch.tokens).all()
    assert batch.loss_mask.tolist() == [[False] + [True] * length] * 3
    span = task.patches + 2
    expected = [at >= span and 0 < at % span < span - 1 for at in range(length + 1)]
    assert batch.answer_mask.tolist() == [expected] * 3
    broken = batch.tokens.clone()
    place = seed % (length + 1)
    broken[:, place] = (broken[:, place] + 1) % task.vocabulary_size
    changed = batch.tokens[:, place] != broken[:, place]
    if place % span in (0, span - 1):
        assert not task.is_valid(broken).any()  # no start or no end
    assert not task.is_valid(torch.full_like(broken, task.vocabulary_size)).any()
    assert changed.all()


def test_a_wrong_patch_a_change_of_rule_and_a_late_mistake_are_found():
    task = NeuralCellularAutomata(6, 4, 2, length=50, rules=8, complexity=(0.5, 1.0), token_bytes=1, burn_in=0)
    tokens = task.batch(16, seed=0).tokens
    assert task.is_valid(tokens).all()
    for place in (12, 23, 46, 49):  # the second grid's first patch, the third's, the last grid's, its last token
        wrong = tokens.clone()
        wrong[:, place] = (wrong[:, place] + 1) % task.start
        assert not task.is_valid(wrong).any()
    # The third grid by a rule that is not the one of the second: right by itself, but not one rule.
    grids = task.decode(tokens)[:, :2]
    rules = [
        next(r for r in range(8) if torch.equal(task.next_grids(first[None], torch.tensor([r]))[0], second))
        for first, second in grids
    ]
    other = torch.tensor([(rule + 1) % 8 for rule in rules])
    mixed = torch.cat([grids, task.next_grids(grids[:, 1], other)[:, None]], dim=1)
    assert not task.is_valid(task.encode(mixed)).any()
    assert len(set(rules)) > 3


def test_the_burn_in_is_what_comes_before():
    late, early = small(burn_in=3, length=60), small(burn_in=0, length=60 + 3 * 6)
    assert np.array_equal(late.networks.hidden, early.networks.hidden)  # with a filter that all rules pass
    assert torch.equal(late.batch(9, seed=2).tokens, early.batch(9, seed=2).tokens[:, 3 * 6 :])


def test_first_grids_have_colours_of_their_own_frequencies():
    """Without burn-in: softmax of normal numbers for each sequence, the cells independent."""
    task = NeuralCellularAutomata(12, 3, 1, length=146, rules=1, burn_in=0, complexity=ALL, token_bytes=1)
    first = task.decode(task.batch(3000, seed=0).tokens)[:, 0].flatten(1)
    shares = functional.one_hot(first, 3).double().mean(dim=1)
    weights = torch.from_numpy(np.exp(np.random.default_rng(1).standard_normal((200_000, 3))))
    expected = weights / weights.sum(dim=1, keepdim=True)
    spread = expected.var(dim=0) + (expected * (1 - expected)).mean(dim=0) / 144
    assert torch.allclose(shares.mean(dim=0), torch.full((3,), 1 / 3, dtype=torch.float64), atol=0.02)
    assert torch.allclose(shares.var(dim=0), spread, rtol=0.1)


def test_sequences_depend_on_seed_step_and_split_and_on_nothing_else():
    first = SMALL.batch(4, seed=1, step=2).tokens
    SMALL.batch(4, seed=1, step=3)
    again = pickle.loads(pickle.dumps(SMALL))
    assert "networks" not in vars(again)
    assert torch.equal(first, again.batch(4, seed=1, step=2, device=torch.device("cpu")).tokens)
    assert torch.equal(first[:, :12], small(**{**SMALL.settings(), "length": 12}).batch(4, seed=1, step=2).tokens)
    assert not torch.equal(first, SMALL.batch(4, seed=2, step=2).tokens)
    assert not torch.equal(first, SMALL.batch(4, seed=1, step=3).tokens)
    assert not torch.equal(first, SMALL.batch(4, seed=1, step=2, split="held-out").tokens)
    assert not np.array_equal(SMALL.networks.hidden, small(**{**SMALL.settings(), "seed": 6}).networks.hidden)


def test_every_rule_is_used_equally_often():
    """Four networks that paint every cell in their own colour, whatever they see."""
    task = NeuralCellularAutomata(3, 4, 1, length=20, rules=4, burn_in=0, complexity=ALL, token_bytes=1)
    hidden, output = np.ones((4, 9, 4, 16), dtype=np.int64), np.zeros((4, 4, 16), dtype=np.int64)
    output[range(4), range(4)] = 1
    vars(task)["networks"] = RuleNetworks(hidden, output)
    counts = torch.bincount(task.batch(4000, seed=0).tokens[:, 12], minlength=4)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


# ---- Known losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [25, 29, 30, 31])
def test_the_plateau_is_the_entropy_of_the_patches(length):
    """Counted here in far more sequences; the places of start and end tokens cost nothing."""
    task = small(length=length, rules=4)
    tokens = task.batch(20_000, seed=9).tokens[:, 1:]
    patches = tokens[tokens < task.start]
    shares = torch.bincount(patches).double() / len(patches)
    expected = float(torch.special.entr(shares).sum()) * len(patches) / tokens.numel()
    assert task.plateau == pytest.approx(expected, rel=0.02)


def test_the_floor_is_the_chance_in_a_first_grid_that_is_drawn():
    """By numerical integration for two colours, of which one has the frequency sigmoid(x), x normal of variance 2."""
    x = np.linspace(-12, 12, 100_001)
    p = 1 / (1 + np.exp(-x))
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    expected = np.trapezoid(entropy * np.exp(-(x**2) / 4) / math.sqrt(4 * math.pi), x)
    task = NeuralCellularAutomata(6, 2, 2, length=44, rules=2, burn_in=0, complexity=ALL, token_bytes=1)
    assert task.floor == pytest.approx(36 * expected / 43, rel=0.005)
    short = NeuralCellularAutomata(6, 2, 2, length=6, rules=2, burn_in=0, complexity=ALL, token_bytes=1)
    assert short.floor == pytest.approx(5 * 4 * expected / 5, rel=0.005)  # five patches of four cells
    assert small(burn_in=1).floor == 0
    assert task.floor < task.plateau


def test_no_predictor_is_better_than_the_floor():
    """One that is told the colours' frequencies of each sequence, on its drawn first grid."""
    task = NeuralCellularAutomata(6, 3, 1, length=38, rules=1, burn_in=0, complexity=ALL, token_bytes=1)
    first = task.batch(4000, seed=0).tokens[:, 1:37]
    counts = functional.one_hot(first, 3).double().sum(dim=1)
    own = torch.special.entr(counts / 36).sum(dim=1) * 36 / 37  # frequencies fitted to the sequence: lower still
    assert float(own.mean()) < task.floor < float(own.mean()) * 1.1


# ---- Settings -------------------------------------------------------------------------------------------------------


def test_settings_travel_and_make_the_same_task():
    assert from_settings(json.loads(json.dumps(SMALL.settings()))) == SMALL
    assert (SMALL.patches, SMALL.start, SMALL.vocabulary_size, SMALL.grids) == (4, 81, 83, 5)
    with pytest.raises(ArgumentError, match="no single right attention pattern"):
        SMALL.pattern()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"grid": 2}, "grid is 2; it must be a whole number, at least 3"),
        ({"colours": 1}, "colours is 1"),
        ({"patch": 5}, "patches of 5 x 5 cells do not tile a grid of 12 x 12; choose a patch that divides the grid"),
        ({"patch": 3}, "10 colours in patches of 3 x 3 cells make 1000000002 tokens, more than 1048576"),
        ({"token_bytes": 1}, "token_bytes is 1; it must be 1, 2 or 4 and hold all 10000 patch tokens"),
        ({"token_bytes": 3}, "token_bytes is 3"),
        ({"complexity": (0.5, 0.5)}, r"complexity is \(0.5, 0.5\); give two numbers from 0, the smaller first"),
        ({"complexity": (0.5,)}, "give two numbers"),
        ({"complexity": (-1, 1)}, "give two numbers from 0"),
        ({"rules": 0}, "rules is 0"),
        ({"burn_in": -1}, "burn_in is -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        NeuralCellularAutomata(**wrong)


def test_no_sequences_are_refused():
    with pytest.raises(ArgumentError, match="n is 0"):
        SMALL.batch(0, seed=0)


@pytest.mark.gpu
def test_a_gpu_makes_the_same_sequences():
    task = NeuralCellularAutomata(rules=64)
    batch = task.batch(64, seed=0, device="cuda")
    assert batch.tokens.device.type == batch.loss_mask.device.type == batch.answer_mask.device.type == "cuda"
    assert torch.equal(batch.tokens.cpu(), task.batch(64, seed=0).tokens)
