"""What the tasks on connected graphs have in common: how a graph is drawn, written, and kept in its split.

Nodes are letters; a graph is the list of its edges, each as two letters, in the order of the dictionary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from string import ascii_uppercase
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.tasks.algorithmic import AlgorithmicTask, Instances, Layout, Ragged
from emergent_heads.tasks.features import Feature
from emergent_heads.tasks.graph_algorithms import connected, isomorphism_invariant, probability_connected

LETTERS = ascii_uppercase
WEIGHTS = "123456789"
_FEWEST_NODES = 5  # four nodes have 6 connected graphs, too few to keep some of them from training
_LEAST_CONNECTED = 0.02
_NUMBERS_AT_ONCE = 2**20  # keeps the temporary arrays of many drawn graphs small


class Pairs(NamedTuple):
    """All pairs of nodes, in the order of the dictionary.

    Attributes:
        first, second: the pair's nodes, `first < second`.
        place: `[letter, letter]`, a pair's place in that order, written either way; the number of pairs where two
            letters are no pair of nodes.
    """

    first: Int[np.ndarray, " pair"]
    second: Int[np.ndarray, " pair"]
    place: Int[np.ndarray, "token token"]


@lru_cache
def pairs_of(nodes: int) -> Pairs:
    first, second = np.triu_indices(nodes, 1)
    tokens = len(LETTERS + WEIGHTS) + 2  # of the task with the largest vocabulary
    place = np.full((tokens, tokens), len(first))
    place[first, second] = place[second, first] = np.arange(len(first))
    return Pairs(first, second, place)


@dataclass(frozen=True)
class GraphTask(AlgorithmicTask):
    """A task on a connected graph: its prompt is the list of edges, sometimes after one or two nodes.

    Graphs are drawn by giving each pair of nodes an edge with probability `density`, until the graph is connected.
    Every naming of the nodes is then equally likely, so nothing is renamed. Graphs that differ only in the names of
    their nodes are in the same split, with all start nodes, directions and weights they may be asked with; so no graph
    of training is met again under other names. With the layout "paper" nobody can know whether the list of edges goes
    on, which a perfect model pays for: `floor` and the `perfect_exact_match` of `reference_lines`.

    A problem is a row of whole numbers: the nodes before the list, then for each pair of nodes, in the order of the
    dictionary, 0 without an edge and 1 with one. A direction or a weight is written in place of the 1.

    Attributes:
        nodes: of each graph, 5 to 26.
        density: probability of an edge between two nodes, before unconnected graphs are thrown away.
        layout: which tokens count, see `AlgorithmicTask`.

    Raises:
        ArgumentError: too few or too many nodes, a density that leaves less than 1 graph in 50 connected or no graph
            but one, or an unknown layout.
    """

    symbols: ClassVar[str] = LETTERS
    _heads: ClassVar[int] = 0  # nodes written before the list of edges
    _edge_length: ClassVar[int] = 2

    nodes: int = 11
    density: float = 0.5
    layout: Layout = "prompt"

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", whole_number("nodes", self.nodes, least=_FEWEST_NODES))
        if self.nodes > len(LETTERS):
            raise ArgumentError(f"nodes is {self.nodes}; there are letters for {len(LETTERS)}")
        if not isinstance(self.density, (int, float, np.floating)) or not 0 < self.density < 1:
            raise ArgumentError(f"density is {self.density!r}; it must be a number between 0 and 1")
        object.__setattr__(self, "density", float(self.density))
        if self._share_connected < _LEAST_CONNECTED:
            raise ArgumentError(
                f"density {self.density:g} leaves a share of {max(self._share_connected, 0):.2g} of the graphs of "
                f"{self.nodes} nodes connected; choose one that leaves at least {_LEAST_CONNECTED:g}"
            )
        self._check_layout()

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a sequence: room for all pairs of nodes as edges, the longest answer, `=` and one `<EOS>`."""
        return self._heads + self._edge_length * len(pairs_of(self.nodes).first) + self._answer_length + 2

    @property
    def _answer_length(self) -> int:
        return self.nodes

    @cached_property
    def _share_connected(self) -> float:
        return probability_connected(self.nodes, self.density)

    # ---- problems ----

    def _draw(self, n: int, generator: np.random.Generator) -> Instances:
        pairs = len(pairs_of(self.nodes).first)
        found: list[Instances] = []
        missing = n
        while missing:
            rows = min(int(missing / self._share_connected * 1.1) + 8, _NUMBERS_AT_ONCE // pairs)
            edges = (generator.random((rows, pairs)) < self.density).astype(np.int8)
            found.append(edges[connected(self._adjacency(edges))][:missing])
            missing -= len(found[-1])
        return self._asked(np.concatenate(found), generator)

    def _asked(self, edges: Instances, generator: np.random.Generator) -> Instances:
        """Problems about these graphs, with whatever else is drawn at random."""
        return edges

    def _edges(self, instances: Instances) -> Int[np.ndarray, "row pair"]:
        """What is written of each pair of nodes; 0 where there is no edge."""
        return instances[:, self._heads :]

    def _adjacency(self, instances: Instances) -> Bool[np.ndarray, "row node node"]:
        """Which nodes have an edge, whatever its direction; of problems, or of their edges alone."""
        first, second, _ = pairs_of(self.nodes)
        edges = instances[:, -len(first) :] > 0
        found = np.zeros((len(instances), self.nodes, self.nodes), dtype=bool)
        found[:, first, second] = edges
        found[:, second, first] = edges
        return found

    def _split_parts(self, instances: Instances) -> Instances:
        at_once = max(_NUMBERS_AT_ONCE // self.nodes**2, 1)
        parts = [instances[start : start + at_once] for start in range(0, len(instances), at_once)]
        return np.concatenate([isomorphism_invariant(self._adjacency(part)) for part in parts])[:, None]

    def _solvable(self, instances: Instances) -> Bool[np.ndarray, " row"]:
        """Which of the problems that somebody wrote have an answer."""
        heads = instances[:, : self._heads]
        return (heads < self.nodes).all(axis=1) & connected(self._adjacency(instances))

    # ---- writing and reading ----

    def _prompts(self, instances: Instances) -> Ragged:
        edges = self._edges(instances)
        present = edges > 0
        counts = present.sum(axis=1)
        listed = np.zeros((*edges.shape, self._edge_length), dtype=int)
        listed[np.arange(edges.shape[1]) < counts[:, None]] = self._edge_tokens(edges)[present]
        tokens = np.hstack([instances[:, : self._heads], listed.reshape(len(edges), -1)])
        return Ragged(tokens, self._heads + self._edge_length * counts)

    def _edge_tokens(self, edges: Int[np.ndarray, "row pair"]) -> Int[np.ndarray, "row pair token"]:
        """How each pair would be written."""
        first, second, _ = pairs_of(self.nodes)
        return np.broadcast_to(np.stack([first, second], axis=-1), (*edges.shape, 2))

    def _edge_values(self, tokens: Int[np.ndarray, "edge token"]) -> Int[np.ndarray, " edge"]:
        """What these tokens say of their pair of nodes, the inverse of `_edge_tokens`."""
        return np.ones(len(tokens), dtype=int)

    def _read(self, prompts: Ragged) -> Instances:
        _, _, place_of = pairs_of(self.nodes)
        n, pairs = len(prompts.tokens), self.nodes * (self.nodes - 1) // 2
        tokens = np.clip(prompts.tokens[:, : self._heads + self._edge_length * pairs], 0, len(place_of) - 1)
        heads, listed = tokens[:, : self._heads], tokens[:, self._heads :].reshape(n, pairs, self._edge_length)
        row, place = np.nonzero(np.arange(pairs) < (prompts.lengths[:, None] - self._heads) // self._edge_length)
        edge = listed[row, place]
        values = np.zeros((n, pairs + 1), dtype=int)  # the last takes what is no pair of nodes
        values[row, place_of[edge[:, 0], edge[:, 1]]] = self._edge_values(edge)
        found = np.hstack([heads, values[:, :pairs]])
        complete = np.concatenate([np.arange(self._heads), np.ones(pairs, dtype=int)])
        return np.where(self._solvable(found)[:, None], found, complete)

    # ---- features ----

    def _feature(
        self, name: str, labels: Callable[[Instances], np.ndarray], places: int | None = None, *, first: int = 1
    ) -> Feature:
        """A multilabel feature of the problem, read at the `first` token after `=` (0: at `=` itself) and onwards."""
        place = np.arange(self.nodes if places is None else places)
        return Feature(
            name,
            "multilabel",
            lambda tokens: labels(self.problems(tokens)),
            lambda tokens: self.separators(tokens)[:, None] + first + place,
        )

    # ---- reference lines ----

    def _separator_surprise(self, instances: Instances) -> tuple[float, float]:
        """What predicting `=` costs a model that knows how graphs are drawn, and how often it is the likeliest token.

        When the list ends, all later pairs are without an edge; as the graph is connected by then, each had one with
        probability `density`, independently. Among equally likely tokens each is chosen equally often.
        """
        edges = self._edges(instances) > 0
        pairs = edges.shape[1]
        behind = np.arange(pairs) - (pairs - 1 - edges[:, ::-1].argmax(axis=1))[:, None]  # pairs after the last edge
        nothing = (1 - self.density) ** behind[:, -1]
        next_edge = np.where(behind > 0, self.density * (1 - self.density) ** np.maximum(behind - 1, 0), 0.0)
        letters = self._first_letters(instances, next_edge)
        likeliest = letters.max(axis=1)
        equal = (np.abs(letters - nothing[:, None]) < 1e-9).sum(axis=1)
        right = np.where(nothing > likeliest - 1e-9, 1 / (1 + equal), 0.0)
        return float(-np.log(1 - self.density) * behind[:, -1].mean()), float(right.mean())

    def _first_letters(
        self, instances: Instances, next_edge: Float[np.ndarray, "row pair"]
    ) -> Float[np.ndarray, "row node"]:
        """Probability that each node is the next letter, from the probability that each pair is the next edge."""
        return next_edge @ np.eye(self.nodes)[pairs_of(self.nodes).first]
