"""Six tasks on connected graphs: two searches, shortest paths, topological order, and minimum spanning trees.

Formats and the rules that settle ties are those of "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from emergent_heads.tasks.algorithmic import Instances, Ragged
from emergent_heads.tasks.features import Feature, Tokens
from emergent_heads.tasks.graph_algorithms import (
    FAR,
    ancestors,
    bottlenecks,
    breadth_first_order,
    depth_first_order,
    distances,
    fringe,
    of_nodes,
    reachable,
    shortest_path,
    topological_order,
)
from emergent_heads.tasks.graph_task import LETTERS, WEIGHTS, GraphTask, pairs_of


class _Search(GraphTask):
    """A graph and a node of it to start from; the answer is the order in which a search visits all nodes."""

    _heads: ClassVar[int] = 1

    def _asked(self, edges: Instances, generator: np.random.Generator) -> Instances:
        start = generator.integers(self.nodes, size=(len(edges), 1), dtype=np.int8)
        return np.hstack([start, edges])

    def _order(self, instances: Instances) -> Int[np.ndarray, "row place"]:
        raise NotImplementedError

    def _answers(self, instances: Instances) -> Ragged:
        return Ragged.full(self._order(instances))

    def _fringe(self, instances: Instances) -> Bool[np.ndarray, "row place node"]:
        return fringe(self._adjacency(instances), self._order(instances))[:, :-1]

    def _adjacency_list(self, instances: Instances) -> Bool[np.ndarray, "row place node"]:
        return of_nodes(self._adjacency(instances), self._order(instances))


@dataclass(frozen=True)
class BreadthFirstSearch(_Search):
    """The nodes of a graph in breadth-first order, neighbours ascending: `CACADBCBECDDE=CABDE<EOS>` starts at C.

    Features, at the r-th node of the answer, over all nodes:

    * `queue`: those in the queue when that node has been expanded (not after the last, when the queue is empty);
    * `adjacency_list`: its neighbours.

    Attributes:
        nodes, density, layout: see `GraphTask`.

    Raises:
        ArgumentError: as for every `GraphTask`.
    """

    @property
    def features(self) -> tuple[Feature, ...]:
        """`queue`, `adjacency_list`."""
        return (
            self._feature("queue", self._fringe, self.nodes - 1),
            self._feature("adjacency_list", self._adjacency_list),
        )

    def _order(self, instances: Instances) -> Int[np.ndarray, "row place"]:
        return breadth_first_order(self._adjacency(instances), instances[:, 0])


@dataclass(frozen=True)
class DepthFirstSearch(_Search):
    """The nodes of a graph in depth-first order, neighbours descending: `CACADBCBECDDE=CDEBA<EOS>` starts at C.

    This is the order in which a recursive search enters the nodes, and that of an explicit stack onto which all
    neighbours are pushed in ascending order. Features, at the r-th node of the answer, over all nodes:

    * `stack`: those on the explicit stack when that node has been expanded: pushed by then and not visited (not after
      the last, when all are visited);
    * `path`: the open calls of the recursive search: the way to that node in the tree of the search, both ends
      included;
    * `adjacency_list`: its neighbours.

    Attributes:
        nodes, density, layout: see `GraphTask`.

    Raises:
        ArgumentError: as for every `GraphTask`.
    """

    @property
    def features(self) -> tuple[Feature, ...]:
        """`stack`, `path`, `adjacency_list`."""
        return (
            self._feature("stack", self._fringe, self.nodes - 1),
            self._feature("path", self._path),
            self._feature("adjacency_list", self._adjacency_list),
        )

    def _order(self, instances: Instances) -> Int[np.ndarray, "row place"]:
        return depth_first_order(self._adjacency(instances), instances[:, 0])

    def _path(self, instances: Instances) -> Bool[np.ndarray, "row place node"]:
        return ancestors(self._adjacency(instances), self._order(instances))


@dataclass(frozen=True)
class ShortestPath(GraphTask):
    """The shortest path between two nodes, the first in the dictionary of several: `AEACADBCBECDDE=ADE<EOS>`, A to E.

    Features:

    * `distance`: from the first node to node r (in alphabetic order), at `=`, for all r;
    * `queue`: over all nodes, what a breadth-first search from the first node has in its queue when all nodes at
      distance r are expanded, which is the nodes at distance r + 1; at the r-th node of the path but the last, where
      one of these nodes is to be predicted;
    * `adjacency_list`: over all nodes, the neighbours of the r-th node of the path, at that node;
    * `adjacency_matrix`: for each pair of nodes, whether it has an edge, at `=`.

    Rows with a shorter path lack the later places.

    Attributes:
        nodes, density, layout: see `GraphTask`.

    Raises:
        ArgumentError: as for every `GraphTask`.
    """

    _heads: ClassVar[int] = 2

    @property
    def features(self) -> tuple[Feature, ...]:
        """`distance`, `queue`, `adjacency_list`, `adjacency_matrix`."""
        return (
            Feature("distance", "continuous", self._distance, self._at_equals),
            Feature("queue", "multilabel", self._queue, lambda tokens: self._at_path(tokens)[:, 1:] - 1),
            Feature("adjacency_list", "multilabel", self._adjacency_list, self._at_path),
            self._feature("adjacency_matrix", lambda found: self._edges(found)[:, None] > 0, 1, first=0),
        )

    def _path(self, instances: Instances) -> tuple[Int[np.ndarray, "row place"], Int[np.ndarray, " row"]]:
        return shortest_path(self._adjacency(instances), instances[:, 0], instances[:, 1])

    def _at_equals(self, tokens: Tokens) -> Int[np.ndarray, "row node"]:
        return np.repeat(self.separators(tokens)[:, None], self.nodes, axis=1)

    def _at_path(self, tokens: Tokens) -> Int[np.ndarray, "row place"]:
        place, (_, lengths) = np.arange(self.nodes), self._path(self.problems(tokens))
        return np.where(place < lengths[:, None], self.separators(tokens)[:, None] + 1 + place, -1)

    def _distance(self, tokens: Tokens) -> Int[np.ndarray, "row node"]:
        problems = self.problems(tokens)
        return distances(self._adjacency(problems), problems[:, 0])

    def _queue(self, tokens: Tokens) -> Bool[np.ndarray, "row place node"]:
        return self._distance(tokens)[:, None] == np.arange(1, self.nodes)[:, None]

    def _adjacency_list(self, tokens: Tokens) -> Bool[np.ndarray, "row place node"]:
        problems = self.problems(tokens)
        return of_nodes(self._adjacency(problems), self._path(problems)[0])

    def _asked(self, edges: Instances, generator: np.random.Generator) -> Instances:
        source, step = generator.integers((0, 1), self.nodes, size=(len(edges), 2)).T
        asked = np.stack([source, (source + step) % self.nodes], axis=1).astype(np.int8)
        return np.hstack([asked, edges])

    def _solvable(self, instances: Instances) -> Bool[np.ndarray, " row"]:
        return super()._solvable(instances) & (instances[:, 0] != instances[:, 1])

    def _answers(self, instances: Instances) -> Ragged:
        return Ragged(*self._path(instances))


@dataclass(frozen=True)
class TopologicalSort(GraphTask):
    """An order of the nodes in which every edge leads forwards: `ACDABCBEDCDE=DBEAC<EOS>`.

    The edges of a graph, sorted as those of the other tasks, are directed along a hidden random order of the nodes and
    written from tail to head. Many orders would do; the answer is the reverse of the order in which a depth-first
    search leaves the nodes, with roots ascending and the nodes that edges lead to descending. Features, over all
    nodes unless they say otherwise:

    * `ready`: those that may come next in any answer: not written yet, and all nodes with an edge to them written; at
      the token that predicts the r-th node of the answer;
    * `adjacency_list`: the nodes to which edges lead from the r-th node of the answer, at that node;
    * `adjacency_matrix`: for every two nodes in either order, whether an edge leads from one to the other, at `=`.

    `perfect_exact_match` is not quite exact here (up to 0.05 too high for five nodes): of a direction that does not
    follow from the edges read, both values are taken to be equally likely.

    Attributes:
        nodes, density, layout: see `GraphTask`.

    Raises:
        ArgumentError: as for every `GraphTask`.
    """

    @property
    def features(self) -> tuple[Feature, ...]:
        """`ready`, `adjacency_list`, `adjacency_matrix`."""
        return (
            self._feature("ready", self._ready, first=0),
            self._feature("adjacency_list", lambda found: of_nodes(self._directed(found), self._order(found))),
            self._feature("adjacency_matrix", self._matrix, 1, first=0),
        )

    def _directed(self, instances: Instances) -> Bool[np.ndarray, "row node node"]:
        first, second, _ = pairs_of(self.nodes)
        found = np.zeros((len(instances), self.nodes, self.nodes), dtype=bool)
        found[:, first, second] = instances == 1
        found[:, second, first] = instances == 2
        return found

    def _order(self, instances: Instances) -> Int[np.ndarray, "row place"]:
        return topological_order(self._directed(instances))

    def _ready(self, instances: Instances) -> Bool[np.ndarray, "row place node"]:
        at, place = np.argsort(self._order(instances), axis=1), np.arange(self.nodes)[:, None]
        last_before = np.where(self._directed(instances), at[:, :, None], -1).max(axis=1)
        return (last_before[:, None] < place) & (place <= at[:, None])

    def _matrix(self, instances: Instances) -> Bool[np.ndarray, "row place component"]:
        return self._directed(instances)[:, None, ~np.eye(self.nodes, dtype=bool)]

    def _asked(self, edges: Instances, generator: np.random.Generator) -> Instances:
        first, second, _ = pairs_of(self.nodes)
        ranks = generator.random((len(edges), self.nodes))
        return edges * np.where(ranks[:, first] < ranks[:, second], 1, 2).astype(np.int8)

    def _solvable(self, instances: Instances) -> Bool[np.ndarray, " row"]:
        circular = reachable(self._directed(instances)).diagonal(axis1=1, axis2=2).any(axis=1)
        return super()._solvable(instances) & ~circular

    def _edge_tokens(self, edges: Int[np.ndarray, "row pair"]) -> Int[np.ndarray, "row pair token"]:
        written = super()._edge_tokens(edges)
        return np.where(edges[..., None] == 2, written[..., ::-1], written)

    def _edge_values(self, tokens: Int[np.ndarray, "edge token"]) -> Int[np.ndarray, " edge"]:
        return np.where(tokens[:, 0] < tokens[:, 1], 1, 2)

    def _answers(self, instances: Instances) -> Ragged:
        return Ragged.full(self._order(instances))

    def _first_letters(
        self, instances: Instances, next_edge: Float[np.ndarray, "row pair"]
    ) -> Float[np.ndarray, "row node"]:
        first, second, _ = pairs_of(self.nodes)
        follows = reachable(self._directed(instances)).astype(float)
        forwards = (1 + follows[:, first, second] - follows[:, second, first]) / 2
        each = np.eye(self.nodes)
        return (next_edge * forwards) @ each[first] + (next_edge * (1 - forwards)) @ each[second]


@dataclass(frozen=True)
class MinimumSpanningTree(GraphTask):
    """The edges of a minimum spanning tree in the order in which Kruskal's algorithm finds them.

    Without weights all edges weigh the same, and the answer is every edge of the list whose ends are not connected by
    those before: `ACADBCBECDDE=ACADBCBE<EOS>`. With weights each edge is followed by a random digit from 1 to 9, as in
    `AC2AD7BC1...`; the answer, still letters alone, goes by weight, and by the list among equal weights. Features:

    * `component`: for the r-th edge of the list, at its last token, whether its ends are in one component by edges
      that stand before it and weigh no more; such an edge is in no answer. Without weights this is the question
      Kruskal's algorithm puts when it comes to the edge, and all other edges are in the answer;
    * `merged`: over all nodes, the component that the r-th edge of the answer makes, at that edge's second letter.

    Graphs with fewer edges lack the later places of `component`.

    Attributes:
        nodes, density, layout: see `GraphTask`.
        weighted: whether edges have weights; the digits are then part of the vocabulary.

    Raises:
        ArgumentError: as for every `GraphTask`.
    """

    weighted: bool = False

    @property
    def symbols(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The letters, and with weights the digits after them."""
        return LETTERS + WEIGHTS if self.weighted else LETTERS

    @property
    def _edge_length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 3 if self.weighted else 2

    @property
    def _answer_length(self) -> int:
        return 2 * (self.nodes - 1)

    @property
    def features(self) -> tuple[Feature, ...]:
        """`component`, `merged`."""
        return (
            Feature("component", "binary", self._component, self._at_edges),
            Feature("merged", "multilabel", self._merged, self._at_answer),
        )

    def _keys(self, edges: Int[np.ndarray, "row pair"]) -> Int[np.ndarray, "row pair"]:
        """Numbers in the order in which Kruskal's algorithm takes the edges, by weight and then by the list."""
        pairs = edges.shape[1]
        return np.where(edges > 0, edges.astype(np.int16) * pairs + np.arange(pairs, dtype=np.int16), FAR)

    def _bottlenecks(self, keys: Int[np.ndarray, "row pair"]) -> Int[np.ndarray, "row node node"]:
        first, second, _ = pairs_of(self.nodes)
        table = np.full((len(keys), self.nodes, self.nodes), FAR, dtype=np.int16)
        table[:, first, second] = table[:, second, first] = keys
        return bottlenecks(table)

    def _tree(self, instances: Instances) -> Int[np.ndarray, "row edge"]:
        """The edges of the answer, as places in the order of all pairs."""
        first, second, _ = pairs_of(self.nodes)
        keys = self._keys(instances)
        taken = self._bottlenecks(keys)[:, first, second] == keys
        return np.where(taken, keys, FAR).argsort(axis=1)[:, : self.nodes - 1]

    def _component(self, tokens: Tokens) -> Bool[np.ndarray, "row place"]:
        first, second, _ = pairs_of(self.nodes)
        edges = self.problems(tokens)
        place = np.arange(edges.shape[1], dtype=np.int16)
        inside = np.zeros(edges.shape, dtype=bool)
        for weight in np.unique(edges[edges > 0]):
            before = self._bottlenecks(np.where((edges > 0) & (edges <= weight), place, FAR))
            inside |= (edges == weight) & (before[:, first, second] < place)
        listed = np.argsort(edges == 0, axis=1, kind="stable")
        return np.take_along_axis(inside, listed, axis=1)

    def _at_edges(self, tokens: Tokens) -> Int[np.ndarray, "row place"]:
        place = np.arange(len(pairs_of(self.nodes).first))
        last = self._edge_length * (place + 1) - 1
        return np.where(last < self.separators(tokens)[:, None], last, -1)

    def _merged(self, tokens: Tokens) -> Bool[np.ndarray, "row place node"]:
        problems = self.problems(tokens)
        tree, keys = self._tree(problems), self._keys(problems)
        ends = pairs_of(self.nodes).first[tree]
        way = self._bottlenecks(keys)[np.arange(len(keys))[:, None], ends]
        own = ends[..., None] == np.arange(self.nodes)
        return own | (way <= np.take_along_axis(keys, tree, axis=1)[..., None])

    def _at_answer(self, tokens: Tokens) -> Int[np.ndarray, "row place"]:
        return self.separators(tokens)[:, None] + 2 * np.arange(1, self.nodes)

    def _asked(self, edges: Instances, generator: np.random.Generator) -> Instances:
        if not self.weighted:
            return edges
        return edges * generator.integers(1, len(WEIGHTS) + 1, size=edges.shape, dtype=np.int8)

    def _edge_tokens(self, edges: Int[np.ndarray, "row pair"]) -> Int[np.ndarray, "row pair token"]:
        ends = super()._edge_tokens(edges)
        if not self.weighted:
            return ends
        digits = len(LETTERS) - 1 + edges[..., None].astype(int)
        return np.concatenate([ends, digits], axis=-1)

    def _edge_values(self, tokens: Int[np.ndarray, "edge token"]) -> Int[np.ndarray, " edge"]:
        if not self.weighted:
            return super()._edge_values(tokens)
        weights = tokens[:, 2] - len(LETTERS) + 1
        return np.where((weights >= 1) & (weights <= len(WEIGHTS)), weights, 0)

    def _answers(self, instances: Instances) -> Ragged:
        first, second, _ = pairs_of(self.nodes)
        tree = self._tree(instances)
        return Ragged.full(np.stack([first[tree], second[tree]], axis=-1).reshape(len(tree), -1))
