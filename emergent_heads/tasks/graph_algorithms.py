"""Algorithms on many small graphs at once.

A graph is one row of a Boolean array `[row, node, node]`, which is symmetric unless its edges have a direction. Loops
run over nodes or distances, never over graphs. What several answers are possible for is settled by the order of the
nodes, as each function says.
"""

import math

import numpy as np
from jaxtyping import Bool, Int, UInt64

from emergent_heads.tasks.algorithmic import mixed

FAR = np.iinfo(np.int16).max
"""Key of what is no edge; see `bottlenecks`."""
_COLOUR_ROUNDS = 3


def probability_connected(nodes: int, density: float) -> float:
    """Probability that a graph is connected in which each pair of nodes has an edge with probability `density`.

    By the size k of the first node's component: 1 = sum over k of binomial(n - 1, k - 1) P(k) (1 - p)^(k (n - k)).
    """
    found: list[float] = []
    for n in range(1, nodes + 1):
        smaller = (math.comb(n - 1, k - 1) * p * (1 - density) ** (k * (n - k)) for k, p in enumerate(found, 1))
        found.append(1 - sum(smaller))
    return found[-1]


def connected(adjacency: Bool[np.ndarray, "row node node"]) -> Bool[np.ndarray, " row"]:
    """Whether each graph is in one piece."""
    start = np.zeros(len(adjacency), dtype=int)
    return distances(adjacency, start).min(axis=1) >= 0


def isomorphism_invariant(adjacency: Bool[np.ndarray, "row node node"]) -> UInt64[np.ndarray, " row"]:
    """A number that is equal for graphs which differ only in the names of their nodes.

    Colour refinement: a node's colour is a hash of its own and of the multiset of its neighbours' colours, three times
    over; the number is a hash of the multiset of colours. Graphs that are not isomorphic nearly always differ.
    """
    colours = mixed(adjacency.sum(axis=2, dtype=np.uint64) + np.uint64(1))
    for _ in range(_COLOUR_ROUNDS):
        # The sum of hashes, modulo 2^64, stands for a multiset: it knows no order.
        around = np.where(adjacency, mixed(colours)[:, None, :], np.uint64(0)).sum(axis=2, dtype=np.uint64)
        colours = mixed(np.uint64(3) * colours + around)
    return mixed(colours).sum(axis=1, dtype=np.uint64)


def breadth_first_order(
    adjacency: Bool[np.ndarray, "row node node"], start: Int[np.ndarray, " row"]
) -> Int[np.ndarray, "row place"]:
    """Nodes of connected graphs in the order of a breadth-first search, neighbours in ascending order."""
    rows, n = np.arange(len(adjacency)), adjacency.shape[1]
    order = np.empty((len(rows), n), dtype=int)
    unseen, done = n * n, n * n + 1
    turn = np.full((len(rows), n), unseen)  # a seen node's turn: by its first visited neighbour, then by its own name
    node = start
    for place in range(n):
        order[:, place] = node
        np.copyto(turn, place * n + np.arange(n), where=adjacency[rows, node] & (turn == unseen))
        turn[rows, node] = done
        node = turn.argmin(axis=1)
    return order


def depth_first_order(
    adjacency: Bool[np.ndarray, "row node node"], start: Int[np.ndarray, " row"]
) -> Int[np.ndarray, "row place"]:
    """Nodes of connected graphs in the order of a depth-first search, neighbours in descending order.

    That of visiting a node, then, from each neighbour not visited by then, the same again. An explicit stack gives the
    same order if all neighbours are pushed in ascending order and a node counts as visited once it is popped.
    """
    rows, n = np.arange(len(adjacency)), adjacency.shape[1]
    order = np.empty((len(rows), n), dtype=int)
    unseen, done = -1, -2
    turn = np.full((len(rows), n), unseen)  # a seen node's turn: by its last visited neighbour, then by its own name
    node = start
    for place in range(n):
        order[:, place] = node
        np.copyto(turn, place * n + np.arange(n), where=adjacency[rows, node] & (turn != done))
        turn[rows, node] = done
        node = turn.argmax(axis=1)
    return order


def fringe(
    adjacency: Bool[np.ndarray, "row node node"], order: Int[np.ndarray, "row place"]
) -> Bool[np.ndarray, "row place node"]:
    """Nodes not visited, but with a visited neighbour, once the node at each place of the order is visited."""
    visited = np.argsort(order, axis=1)[:, None, :] <= np.arange(order.shape[1])[:, None]
    return np.logical_or.accumulate(of_nodes(adjacency, order), axis=1) & ~visited


def of_nodes(
    adjacency: Bool[np.ndarray, "row node node"], nodes: Int[np.ndarray, "row place"]
) -> Bool[np.ndarray, "row place node"]:
    """The neighbours of the node at each place."""
    return adjacency[np.arange(len(nodes))[:, None], nodes]


def ancestors(
    adjacency: Bool[np.ndarray, "row node node"], order: Int[np.ndarray, "row place"]
) -> Bool[np.ndarray, "row place node"]:
    """Nodes on the way from the first to the one at each place, both included, in the tree of a depth-first search.

    They are the open calls of a recursive search. A node is reached from its neighbour that was visited last.
    """
    rows, n = np.arange(len(order)), order.shape[1]
    visited = np.argsort(order, axis=1)
    found = np.zeros((len(order), n, n), dtype=bool)
    found[rows, 0, order[:, 0]] = True
    for place in range(1, n):
        node = order[:, place]
        times = np.where(adjacency[rows, node] & (visited < place), visited, 0)
        found[:, place] = found[rows, times.max(axis=1)]
        found[rows, place, node] = True
    return found


def distances(
    adjacency: Bool[np.ndarray, "row node node"], start: Int[np.ndarray, " row"]
) -> Int[np.ndarray, "row node"]:
    """Edges on a shortest way from the start to every node; -1 where there is no way."""
    n = adjacency.shape[1]
    found = np.full((len(adjacency), n), -1)
    front = np.arange(n) == start[:, None]
    for distance in range(n):
        found[front] = distance
        front = (adjacency & front[:, :, None]).any(axis=1) & (found < 0)
        if not front.any():
            break
    return found


def shortest_path(
    adjacency: Bool[np.ndarray, "row node node"], source: Int[np.ndarray, " row"], target: Int[np.ndarray, " row"]
) -> tuple[Int[np.ndarray, "row place"], Int[np.ndarray, " row"]]:
    """The lexicographically first of all shortest paths without directions, filled up with the target; nodes on it."""
    rows = np.arange(len(adjacency))
    left = distances(adjacency, target)
    lengths = left[rows, source] + 1
    path = np.repeat(target[:, None], adjacency.shape[1], axis=1)
    node = source
    for place in range(int(lengths.max(initial=1))):
        path[:, place] = node
        nearer = adjacency[rows, node] & (left == left[rows, node, None] - 1)
        node = np.where(node == target, target, nearer.argmax(axis=1))
    return path, lengths


def topological_order(adjacency: Bool[np.ndarray, "row node node"]) -> Int[np.ndarray, "row place"]:
    """Nodes in the reverse of the order in which a depth-first search leaves them.

    Roots are taken in ascending order, the nodes that edges lead to in descending order. If the graph has no cycle,
    every edge leads to a later node.
    """
    rows, n = np.arange(len(adjacency)), adjacency.shape[1]
    after = np.zeros((len(rows), n + 1), dtype=int)  # sets of nodes are bits; the last row belongs to no node
    after[:, :n] = adjacency @ (1 << np.arange(n))
    unseen, nowhere = np.full(len(rows), (1 << n) - 1), n
    caller, order = np.full((len(rows), n + 1), nowhere), np.empty((len(rows), n), dtype=int)
    node, slot = np.full(len(rows), nowhere), np.full(len(rows), n - 1)
    for _ in range(2 * n):  # each row enters a node or leaves one, and does both once for each node
        open_ = np.where(node == nowhere, unseen & -unseen, after[rows, node] & unseen)
        entered = np.frexp(open_)[1] - 1  # the highest bit; -1, which is `nowhere` as an index, where none is set
        leaves = open_ == 0
        order[rows, slot] = node  # stays if the node is left now, and is overwritten if another is left before
        caller[rows, entered] = np.where(leaves, nowhere, node)
        unseen &= ~((1 << (entered + 1)) >> 1)
        node = np.where(leaves, caller[rows, node], entered)
        slot = slot - leaves
    return order


def reachable(adjacency: Bool[np.ndarray, "row node node"]) -> Bool[np.ndarray, "row node node"]:
    """Whether there is a way from each node to each other one along the direction of the edges."""
    found = adjacency.copy()
    for node in range(adjacency.shape[1]):
        found |= found[:, :, node, None] & found[:, None, node, :]
    return found


def bottlenecks(keys: Int[np.ndarray, "row node node"]) -> Int[np.ndarray, "row node node"]:
    """The lowest key that is the highest on some way between two nodes; `FAR` where there is no way.

    With different keys on all edges, the edges of the minimum spanning forest are those whose key is their own
    bottleneck; and an algorithm that takes edges in ascending order (Kruskal's) finds two nodes connected before key k
    exactly if their bottleneck is below k.

    Args:
        keys: symmetric, below `FAR` on edges and `FAR` elsewhere.
    """
    found = keys.astype(np.int16)
    for node in range(keys.shape[1]):
        np.minimum(found, np.maximum(found[:, :, node, None], found[:, None, node, :]), out=found)
    return found
