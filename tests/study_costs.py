"""What a study of many series costs: checkpoints, bytes, floating-point operations and hours, by stated formulas.

`docs/scaling.md` is made from these (`tests/scaling.py`), and `tests/test_scaling_costs.py` holds them to sums worked
by hand and to the operations that torch counts. Nothing here needs a model.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from emergent_heads.analysis.search import Strategy, search

CAPABILITIES = ("string_repetition", "in_context_repetition", "pattern_completion", "indirect_object")
N_PROMPTS = 32
KS, CONTROLS = (1, 2, 4, 8, 16), 100
SWAPS_OF_A_RANKING = 4  # rank_heads and recovery_curve read post and pre each


@dataclass(frozen=True)
class Shape:
    """A model and the file with its weights.

    Attributes:
        qkv, projection, mlp: numbers in the matrices of one block: into attention, out of it, and of the MLP.
        parallel: whether attention and MLP of a block read the same residual stream.
        parameters: of the whole model.
        file_bytes: of one checkpoint's weights on the hub.
    """

    name: str
    n_layers: int
    n_heads: int
    d_model: int
    vocabulary: int
    qkv: int
    projection: int
    mlp: int
    parallel: bool
    parameters: int
    file_bytes: int


def pythia(name: str, n_layers: int, n_heads: int, d_model: int) -> Shape:
    """A GPT-NeoX with the 50,304 rows of Pythia's embeddings, and its file: half precision, with the causal masks.

    The masks are 2048 x 2048 bytes a layer.
    """
    d, vocabulary = d_model, 50304
    parameters = n_layers * (12 * d**2 + 13 * d) + 2 * d + 2 * vocabulary * d
    file_bytes = 2 * parameters + n_layers * 2048**2
    return Shape(name, n_layers, n_heads, d, vocabulary, 3 * d**2, d**2, 8 * d**2, True, parameters, file_bytes)


PYTHIAS = (
    pythia("14m", 6, 4, 128),
    pythia("31m", 6, 8, 256),
    pythia("70m", 6, 8, 512),
    pythia("160m", 12, 12, 768),
    pythia("410m", 24, 16, 1024),
)
# From its config.json: 8 of 40 heads have keys and values of their own, a gated MLP of 27,648, float32.
OLMO_2_32B = Shape(
    name="olmo-2-32b",
    n_layers=64,
    n_heads=40,
    d_model=5120,
    vocabulary=100352,
    qkv=5120 * (5120 + 2 * 1024),
    projection=5120**2,
    mlp=3 * 5120 * 27648,
    parallel=False,
    parameters=32_234_279_936,
    file_bytes=4 * 32_234_279_936,
)
OLMO_2_32B_CHECKPOINTS = 741  # different steps in the training's own list, configs/official-0325 of allenai/OLMo

# ---- floating-point operations ----


def evaluate_flops(shape: Shape, n_prompts: int, length: int) -> float:
    """One forward pass over `n_prompts` prompts of `length` tokens, unembedded at one position each."""
    return n_prompts * (length * shape.n_layers * _block(shape, length) + _unembedding(shape))


def rank_flops(shape: Shape, n_prompts: int, length: int) -> float:
    """Every head patched alone: a pass of each model, and for each head the blocks after its own.

    In the last block only queries, keys and values are computed at every position.
    """
    last = 2 * shape.qkv + 4 * length * shape.d_model
    one_of_each_layer = 0.0
    for layer in range(shape.n_layers):
        after = shape.n_layers - 1 - layer
        blocks = (after - 1) * _block(shape, length) + last if after else 0.0
        own = 2 * shape.projection + (0 if shape.parallel else 2 * shape.mlp)
        one_of_each_layer += n_prompts * (length * (blocks + own) + _unembedding(shape))
    return shape.n_heads * one_of_each_layer + 2 * evaluate_flops(shape, n_prompts, length)


def set_flops(shape: Shape, n_prompts: int, length: int) -> float:
    """Heads patched together, from the first block on: the most that a head set of a recovery curve takes."""
    return evaluate_flops(shape, n_prompts, length)


def _block(shape: Shape, length: int) -> float:
    """One token through one block; attention to all positions, as it is computed."""
    return 2 * (shape.qkv + shape.projection + shape.mlp) + 4 * length * shape.d_model


def _unembedding(shape: Shape) -> float:
    return 2 * shape.d_model * shape.vocabulary


# ---- how many checkpoints ----


@cache
def asked_by_search(strategy: Strategy, n: int) -> tuple[frozenset[int], ...]:
    """The places that the library's search asks for, where `crossing` is the first of the passing ones, for each."""
    return tuple(
        frozenset(search(strategy, n, lambda place, crossing=crossing: place >= crossing).answers)
        for crossing in range(1, n)
    )


def mean_union(asked: Sequence[frozenset[int]], n_tasks: int) -> float:
    """Places asked for by at least one of several tasks, whose crossings are anywhere, independently; the mean."""
    places = set().union(*asked)
    shares = [sum(place in each for each in asked) / len(asked) for place in places]
    return sum(1 - (1 - share) ** n_tasks for share in shares)


def head_sets(n_heads: int, ks: Sequence[int] = KS, controls: int = CONTROLS) -> int:
    """Most head sets that a recovery curve runs: the ranked ones, all heads, and the random ones.

    A set is run once however often it is drawn, so a single head has no more controls than its layer has heads. Larger
    sets are counted as all different.
    """
    return len(ks) + 1 + sum(min(controls, n_heads) if k == 1 else controls for k in ks)


# ---- hours ----


@dataclass(frozen=True)
class Units:
    """Seconds of one worker.

    Attributes:
        swap: reading a checkpoint from the disk into the resident model.
        evaluate: all capabilities on one checkpoint.
        rank: all heads, on string repetition.
        head_set: one head set of the recovery curve, on string repetition.
    """

    swap: float
    evaluate: float
    rank: float
    head_set: float


@dataclass(frozen=True)
class Machine:
    """Where units are modelled: operations a second that are reached, and bytes a second from file to weights."""

    flops: float
    read_bytes: float


def modelled(shape: Shape, machine: Machine, lengths: Mapping[str, int]) -> Units:
    """Units from operations and bytes alone."""
    evaluate = sum(evaluate_flops(shape, N_PROMPTS, length) for length in lengths.values())
    reference = lengths[CAPABILITIES[0]]
    return Units(
        swap=shape.file_bytes / machine.read_bytes,
        evaluate=evaluate / machine.flops,
        rank=rank_flops(shape, N_PROMPTS, reference) / machine.flops,
        head_set=set_flops(shape, N_PROMPTS, reference) / machine.flops,
    )


def scaled(units: Units, measured: Shape, shape: Shape, length: int) -> Units:
    """Units of another shape whose ranking was not measured, at the operations a second that were reached here."""
    return replace(
        units,
        rank=units.rank * rank_flops(shape, N_PROMPTS, length) / rank_flops(measured, N_PROMPTS, length),
        head_set=units.head_set * set_flops(shape, N_PROMPTS, length) / set_flops(measured, N_PROMPTS, length),
    )


def search_seconds(units: Units, n_checkpoints: float) -> float:
    """Reading and evaluating so many checkpoints of one series."""
    return n_checkpoints * (units.swap + units.evaluate)


def ranking_seconds(units: Units, shape: Shape, lengths: Mapping[str, int]) -> float:
    """Ranking and recovery curve of one series, for each capability."""
    reference = lengths[CAPABILITIES[0]]

    def ratio(flops: Callable[[Shape, int, int], float], length: int) -> float:
        return flops(shape, N_PROMPTS, length) / flops(shape, N_PROMPTS, reference)

    return sum(
        SWAPS_OF_A_RANKING * units.swap
        + units.rank * ratio(rank_flops, length)
        + head_sets(shape.n_heads) * units.head_set * ratio(set_flops, length)
        for length in lengths.values()
    )


def wall_seconds(jobs: Sequence[float], workers: int) -> float:
    """When the last of `workers` is done, the longest job begun first."""
    busy_until = [0.0] * workers
    for job in sorted(jobs, reverse=True):
        heapq.heapreplace(busy_until, busy_until[0] + job)
    return max(busy_until)
