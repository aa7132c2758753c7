"""Graph tasks: answers and features against networkx and plain Python, chances against counting all small graphs."""

import itertools
import json
import math
import pickle
from collections import Counter, defaultdict, deque
from string import ascii_uppercase

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networkx.algorithms.isomorphism import GraphMatcher
from networkx.generators.atlas import graph_atlas_g
from scipy.stats import chisquare

from emergent_heads.errors import ArgumentError
from emergent_heads.tasks import (
    BreadthFirstSearch,
    DepthFirstSearch,
    MinimumSpanningTree,
    ShortestPath,
    TopologicalSort,
)
from emergent_heads.tasks.algorithmic import HELD_OUT_SHARE, hashes
from emergent_heads.tasks.graph_algorithms import isomorphism_invariant, probability_connected
from emergent_heads.tasks.graph_task import GraphTask

CLASSES = [BreadthFirstSearch, DepthFirstSearch, ShortestPath, TopologicalSort, MinimumSpanningTree]
ALL = [*((one, {}) for one in CLASSES), (MinimumSpanningTree, {"weighted": True})]
every_task = pytest.mark.parametrize(
    ("kind", "options"), ALL, ids=[*(one.__name__ for one in CLASSES), "MinimumSpanningTree, weighted"]
)
HEADS = {BreadthFirstSearch: 1, DepthFirstSearch: 1, ShortestPath: 2, TopologicalSort: 0, MinimumSpanningTree: 0}
EXAMPLES = [
    (BreadthFirstSearch, "CACADBCBECDDE", "CABDE"),
    (DepthFirstSearch, "CACADBCBECDDE", "CDEBA"),
    (ShortestPath, "AEACADBCBECDDE", "ADE"),
    (TopologicalSort, "ACDABCBEDCDE", "DBEAC"),
    (MinimumSpanningTree, "ACADBCBECDDE", "ACADBCBE"),
]


@st.composite
def graph_tasks(draw, most=9) -> GraphTask:
    kind, options = draw(st.sampled_from(ALL))
    nodes = draw(st.integers(5, most))
    return kind(nodes, draw(st.floats(0.35, 0.8)), draw(st.sampled_from(["prompt", "paper"])), **options)


def graph_of(nodes, edges) -> nx.Graph:
    graph = nx.Graph(edges)
    graph.add_nodes_from(nodes)
    return graph


# ---- Plain Python ---------------------------------------------------------------------------------------------------


class Problem:
    """A sequence, taken apart letter by letter."""

    def __init__(self, task: GraphTask, row) -> None:
        self.prompt, self.answer = task.text(row).removesuffix("<EOS>").split("=")
        self.nodes = ascii_uppercase[: task.nodes]
        heads, width = HEADS[type(task)], 3 if getattr(task, "weighted", False) else 2
        self.heads, listed = self.prompt[:heads], self.prompt[heads:]
        assert len(listed) % width == 0
        self.listed = [listed[at : at + width] for at in range(0, len(listed), width)]
        self.directed = nx.DiGraph((edge[0], edge[1]) for edge in self.listed)
        self.graph = nx.Graph()
        self.graph.add_nodes_from(self.nodes)
        self.graph.add_weighted_edges_from((edge[0], edge[1], int(edge[2:] or 1)) for edge in self.listed)
        self.edge_end = [heads + width * (at + 1) - 1 for at in range(len(self.listed))]
        self.op = len(self.prompt)

    def neighbours(self, node):
        return sorted(self.graph[node])


def breadth_first(problem):
    [start] = problem.heads
    return [start, *(node for _, node in nx.bfs_edges(problem.graph, start, sort_neighbors=sorted))]


def depth_first(problem):
    def descending(nodes):
        return sorted(nodes, reverse=True)

    return list(nx.dfs_preorder_nodes(problem.graph, problem.heads, sort_neighbors=descending))


def first_shortest(problem):
    return min(nx.all_shortest_paths(problem.graph, *problem.heads))


def reverse_postorder(problem):
    left = []

    def visit(node):
        seen.add(node)
        for other in sorted(problem.directed[node], reverse=True):
            if other not in seen:
                visit(other)
        left.append(node)

    seen: set[str] = set()
    for root in problem.nodes:
        if root not in seen:
            visit(root)
    return left[::-1]


def kruskal(problem):
    """networkx takes edges of equal weight in the order of its graph, which is that of the list."""
    edges = nx.minimum_spanning_edges(problem.graph, algorithm="kruskal", data=False)
    return [letter for edge in edges for letter in sorted(edge)]


ANSWERS = {
    BreadthFirstSearch: breadth_first,
    DepthFirstSearch: depth_first,
    ShortestPath: first_shortest,
    TopologicalSort: reverse_postorder,
    MinimumSpanningTree: kruskal,
}


def members(problem, nodes):
    return [float(node in nodes) for node in problem.nodes]


def neighbour_rows(problem, order, of=None):
    of = problem.graph if of is None else of
    return [(problem.op + 1 + at, members(problem, set(of[node]))) for at, node in enumerate(order)]


def queue_by_hand(problem):
    """A breadth-first search with a real queue; its contents whenever a node has been expanded."""
    queue, seen, found = deque(problem.heads), set(problem.heads), []
    while queue:
        for other in problem.neighbours(queue.popleft()):
            if other not in seen:
                seen.add(other)
                queue.append(other)
        found.append((problem.op + 1 + len(found), members(problem, set(queue))))
    assert found[-1][1] == members(problem, set())
    return found[:-1]


def stack_by_hand(problem):
    """A depth-first search with a real stack that holds nodes several times, marked when popped."""
    stack, visited, found = list(problem.heads), [], []
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        assert problem.answer[len(visited)] == node
        visited.append(node)
        stack += problem.neighbours(node)
        found.append((problem.op + len(visited), members(problem, set(stack) - set(visited))))
    assert found[-1][1] == members(problem, set())
    return found[:-1]


def calls_by_hand(problem):
    """A recursive depth-first search; the nodes of its open calls whenever it enters one."""
    found, seen = [], set()

    def visit(node, above):
        seen.add(node)
        found.append((problem.op + 1 + len(found), members(problem, {*above, node})))
        for other in reversed(problem.neighbours(node)):
            if other not in seen:
                visit(other, [*above, node])

    visit(problem.heads, [])
    return found


def path_queue_by_hand(problem):
    """The queue of a breadth-first search at the moment when nothing nearer than its contents is left in it."""
    source, target = problem.heads
    queue, distance, found = deque([source]), {source: 0}, []
    while len(found) < nx.shortest_path_length(problem.graph, source, target):
        for _ in range(len(queue)):
            node = queue.popleft()
            for other in problem.neighbours(node):
                if other not in distance:
                    distance[other] = distance[node] + 1
                    queue.append(other)
        found.append((problem.op + 1 + len(found), members(problem, set(queue))))
        assert problem.answer[len(found)] in queue
    return found


def ready_by_hand(problem):
    found = []
    for at in range(len(problem.answer)):
        rest = problem.directed.subgraph(problem.answer[at:])
        found.append((problem.op + at, members(problem, {node for node, degree in rest.in_degree() if not degree})))
    return found


def matrix_by_hand(problem, of, pairs):
    return [(problem.op, [float(of.has_edge(*pair)) for pair in pairs])]


def component_by_hand(problem):
    """Kruskal's question, asked of every edge of the list about the edges before it that weigh no more."""
    found = []
    for at, edge in enumerate(problem.listed):
        forest = nx.utils.UnionFind(problem.nodes)
        for other in problem.listed[:at]:
            if other[2:] <= edge[2:]:
                forest.union(other[0], other[1])
        found.append((problem.edge_end[at], [float(forest[edge[0]] == forest[edge[1]])]))
    return found


def merged_by_hand(problem):
    found, tree = [], nx.Graph()
    for at in range(0, len(problem.answer), 2):
        tree.add_edge(*problem.answer[at : at + 2])
        component = nx.node_connected_component(tree, problem.answer[at])
        found.append((problem.op + 2 + at, members(problem, component)))
    return found


def distance_by_hand(problem):
    lengths = nx.single_source_shortest_path_length(problem.graph, problem.heads[0])
    return [(problem.op, [float(lengths[node])]) for node in problem.nodes]


FEATURES = {
    (BreadthFirstSearch, "queue"): queue_by_hand,
    (BreadthFirstSearch, "adjacency_list"): lambda one: neighbour_rows(one, one.answer),
    (DepthFirstSearch, "stack"): stack_by_hand,
    (DepthFirstSearch, "path"): calls_by_hand,
    (DepthFirstSearch, "adjacency_list"): lambda one: neighbour_rows(one, one.answer),
    (ShortestPath, "distance"): distance_by_hand,
    (ShortestPath, "queue"): path_queue_by_hand,
    (ShortestPath, "adjacency_list"): lambda one: neighbour_rows(one, one.answer),
    (ShortestPath, "adjacency_matrix"): lambda one: matrix_by_hand(
        one, one.graph, itertools.combinations(one.nodes, 2)
    ),
    (TopologicalSort, "ready"): ready_by_hand,
    (TopologicalSort, "adjacency_list"): lambda one: neighbour_rows(one, one.answer, one.directed),
    (TopologicalSort, "adjacency_matrix"): lambda one: matrix_by_hand(
        one, one.directed, itertools.permutations(one.nodes, 2)
    ),
    (MinimumSpanningTree, "component"): component_by_hand,
    (MinimumSpanningTree, "merged"): merged_by_hand,
}


# ---- Sequences and answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "prompt", "answer"), EXAMPLES)
@pytest.mark.parametrize("nodes", [5, 9])
def test_examples_of_the_paper(kind, prompt, answer, nodes):
    if nodes == 9:  # the same graph with a tail of later letters, which settles nothing before it
        prompt = prompt + "EFFGGHHI"
        answer = {
            BreadthFirstSearch: "CABDEFGHI",
            DepthFirstSearch: "CDEFGHIBA",
            ShortestPath: "ADE",
            TopologicalSort: "DBEFGHIAC",
            MinimumSpanningTree: "ACADBCBEEFFGGHHI",
        }[kind]
    task = kind(nodes)
    [row] = task.solve(prompt)
    assert task.text(row) == f"{prompt}={answer}<EOS>"
    assert len(row) == task.length
    assert set(row[len(prompt) + len(answer) + 1 :].tolist()) == {task.end}


def test_a_weighted_tree_goes_by_weight_and_then_by_the_list():
    task = MinimumSpanningTree(5, weighted=True)
    [row] = task.solve("AC2AD7BC1BE2CD2DE9")
    assert task.text(row) == "AC2AD7BC1BE2CD2DE9=BCACBECD<EOS>"
    assert task.vocabulary_size == 26 + 9 + 2
    assert MinimumSpanningTree(5).vocabulary_size == 28


@settings(max_examples=40, deadline=None)
@given(graph_tasks(), st.integers(0, 2**40), st.integers(0, 10**6), st.sampled_from(["train", "probe"]))
def test_every_sequence_is_a_connected_graph_and_its_answer(task, seed, step, split):
    batch = task.batch(6, seed=seed, step=step, split=split)
    assert batch.tokens.shape == batch.loss_mask.shape == batch.answer_mask.shape == (6, task.length)
    assert batch.tokens.dtype == torch.int64
    for row, mask in zip(batch.tokens.tolist(), batch.loss_mask, strict=True):
        problem = Problem(task, row)
        pairs = [tuple(sorted(edge[:2])) for edge in problem.listed]
        assert pairs == sorted(set(pairs))
        assert nx.is_connected(problem.graph)
        assert set(problem.graph) == set(problem.nodes)
        if isinstance(task, TopologicalSort):
            assert nx.is_directed_acyclic_graph(problem.directed)
        else:
            assert all(edge[0] < edge[1] for edge in problem.listed)
        assert len(set(problem.heads)) == len(problem.heads)
        assert list(problem.answer) == ANSWERS[type(task)](problem)
        counted = range(problem.op + (task.layout == "prompt"), problem.op + len(problem.answer) + 2)
        assert mask.nonzero().flatten().tolist() == list(counted)
    assert torch.equal(batch.loss_mask, batch.answer_mask)
    assert not batch.loss_mask[:, 0].any()


@every_task
def test_large_graphs(kind, options):
    task = kind(26, 0.2, **options)
    for row in task.batch(8, seed=0).tokens.tolist():
        problem = Problem(task, row)
        assert nx.is_connected(problem.graph)
        assert list(problem.answer) == ANSWERS[kind](problem)
        assert (row[-1], row.count(task.equals)) == (task.end, 1)


@settings(max_examples=30, deadline=None)
@given(graph_tasks(6), st.integers(0, 2**40))
def test_trees_have_the_least_weight_and_orders_lead_forwards(task, seed):
    for row in task.batch(4, seed=seed).tokens.tolist():
        problem = Problem(task, row)
        if isinstance(task, MinimumSpanningTree):
            tree = problem.graph.edge_subgraph(zip(problem.answer[::2], problem.answer[1::2], strict=True))
            assert nx.is_tree(tree)
            assert set(tree) == set(problem.nodes)
            assert tree.size("weight") == min(
                sum(problem.graph.edges[edge]["weight"] for edge in edges)
                for edges in itertools.combinations(problem.graph.edges, task.nodes - 1)
                if nx.is_connected(graph_of(problem.nodes, edges))
            )
        if isinstance(task, TopologicalSort):
            at = {node: place for place, node in enumerate(problem.answer)}
            assert all(at[tail] < at[head] for tail, head in problem.directed.edges)


@every_task
def test_the_complete_graph_has_room(kind, options):
    task = kind(8, **options)
    end = "5" if options else ""
    edges = "".join(first + second + end for first, second in itertools.combinations("ABCDEFGH", 2))
    prompt = "HA"[: HEADS[kind]] + edges
    [row] = task.solve(prompt)
    problem = Problem(task, row.tolist())
    assert list(problem.answer) == ANSWERS[kind](problem)
    if kind is not ShortestPath:
        assert (row == task.end).sum() == 1


def test_lengths_of_the_paper():
    assert BreadthFirstSearch().length == DepthFirstSearch().length == 124
    assert ShortestPath().length == 125
    # The paper leaves room for a start letter here too, which no sequence uses.
    assert TopologicalSort().length == 124 - 1
    assert MinimumSpanningTree().length == 133 - 1


# ---- Features -------------------------------------------------------------------------------------------------------


def test_every_feature_has_an_oracle():
    assert [(kind, one.name) for kind in CLASSES for one in kind().features] == list(FEATURES)


@settings(max_examples=40, deadline=None)
@given(graph_tasks(), st.integers(0, 2**40))
def test_features_are_those_made_by_hand_and_stand_where_they_say(task, seed):
    tokens = task.batch(5, seed=seed, split="probe").tokens
    for feature in task.features:
        values = feature.read(tokens)
        for row, labels, positions in zip(tokens.tolist(), values.labels, values.positions, strict=True):
            expected = FEATURES[type(task), feature.name](Problem(task, row))
            assert positions[: len(expected)].tolist() == [position for position, _ in expected]
            assert labels[: len(expected)].tolist() == [label for _, label in expected]
            assert (positions[len(expected) :] == -1).all()
            assert np.isnan(labels[len(expected) :]).all()


@settings(max_examples=30, deadline=None)
@given(graph_tasks(), st.integers(0, 2**40))
def test_positions_hold_the_tokens_that_the_features_name(task, seed):
    tokens = task.batch(5, seed=seed).tokens.numpy()
    op = task.separators(tokens)
    for feature in task.features:
        positions = feature.read(tokens).positions
        held = np.where(positions >= 0, np.take_along_axis(tokens, positions, axis=1), -1)
        if feature.name in ("queue", "stack", "path", "adjacency_list"):
            for row, found in enumerate(held):
                present = found[found >= 0]
                assert np.array_equal(present, tokens[row, op[row] + 1 :][: len(present)])
        elif feature.name in ("distance", "adjacency_matrix"):
            assert (held == task.equals).all()
        elif feature.name == "ready":
            assert (held[:, 0] == task.equals).all()
            following = np.take_along_axis(tokens, positions + 1, axis=1)
            labels = np.take_along_axis(feature.read(tokens).labels, following[..., None], axis=2)
            assert (labels == 1).all()
        elif feature.name == "merged":
            labels = feature.read(tokens).labels
            assert (np.take_along_axis(labels, held[..., None], axis=2) == 1).all()
            assert (labels[:, -1] == 1).all()
        else:
            assert feature.name == "component"
            before = positions[:, 0] + 1
            assert (positions.max(axis=1) == op - 1).all()
            assert ((positions >= 0).sum(axis=1) * before == op).all()


def test_example_features_of_the_paper():
    task = BreadthFirstSearch(5)
    values = task.feature("queue").read(task.solve("CACADBCBECDDE"))
    rows = [{"ABCDE"[node] for node in np.flatnonzero(row)} for row in values.labels[0]]
    assert rows == [set("ABD"), set("BD"), set("DE"), set("E")]
    assert values.positions.tolist() == [[14, 15, 16, 17]]


def test_queues_have_the_sizes_of_the_paper():
    """Mean sizes at density 0.5 for 11 nodes, given with one digit, and the share that is all unvisited nodes."""
    task = BreadthFirstSearch()
    labels = task.feature("queue").read(task.batch(4000, seed=0, split="probe").tokens).labels
    sizes = labels.sum(axis=2)
    assert sizes.mean(axis=0) == pytest.approx([5.0, 6.5, 6.8, 6.4, 5.7, 4.9, 3.9, 3.0, 2.0, 1.0], abs=0.1)
    everything = (sizes == 10 - np.arange(10)).mean(axis=0)
    assert everything == pytest.approx([0.00, 0.06, 0.27, 0.53, 0.74, 0.86, 0.93, 0.97, 0.99, 1.00], abs=0.03)


def test_positions_move_with_the_number_of_edges():
    task = BreadthFirstSearch()
    values = task.feature("queue").read(task.batch(300, seed=0).tokens)
    assert len(np.unique(values.positions[:, 0])) > 10
    assert (np.diff(values.positions, axis=1) == 1).all()


def test_features_do_not_depend_on_what_follows_the_prompt():
    """A model may have written the rest: only the problem counts."""
    for kind, options in ALL:
        task = kind(6, **options)
        tokens = task.batch(8, seed=0).tokens.numpy()
        changed = np.where(np.arange(task.length) > task.separators(tokens)[:, None], task.end, tokens)
        for feature in task.features:
            first, second = feature.read(tokens), feature.read(changed)
            assert np.array_equal(first.labels, second.labels, equal_nan=True)
            assert np.array_equal(first.positions, second.positions)


# ---- What is drawn --------------------------------------------------------------------------------------------------


def test_probability_connected_counts_labelled_graphs():
    """OEIS A001187."""
    for nodes, count in enumerate([1, 1, 4, 38, 728, 26704, 1866256, 251548592], start=1):
        assert probability_connected(nodes, 0.5) == pytest.approx(count / 2 ** math.comb(nodes, 2), rel=1e-12)
    assert probability_connected(4, 0.3) == pytest.approx(
        sum(
            0.3 ** len(edges) * 0.7 ** (6 - len(edges))
            for size in range(3, 7)
            for edges in itertools.combinations(itertools.combinations(range(4), 2), size)
            if nx.is_connected(graph_of(range(4), edges))
        )
    )


def edge_sets(nodes):
    """All connected graphs of so many nodes, as rows of 0 and 1 over the pairs in order."""
    pairs = list(itertools.combinations(range(nodes), 2))
    for row in itertools.product((0, 1), repeat=len(pairs)):
        if nx.is_connected(graph_of(range(nodes), itertools.compress(pairs, row))):
            yield row


@pytest.mark.parametrize("density", [0.5, 0.35])
def test_connected_graphs_are_drawn_with_their_probability(density):
    drawn = MinimumSpanningTree(5, density)._draw(40_000, np.random.default_rng(0))
    counts = Counter(map(tuple, drawn.tolist()))
    graphs = list(edge_sets(5))
    assert len(graphs) == 728
    weights = np.array([density ** sum(row) * (1 - density) ** (10 - sum(row)) for row in graphs])
    expected = 40_000 * weights / weights.sum()
    assert sum(counts[row] for row in graphs) == 40_000
    order = np.argsort(expected)  # rare ones together, so that every cell is expected at least 20 times
    cells = np.floor(expected[order].cumsum() / 20)
    observed = np.bincount(cells.astype(int), np.array([counts[graphs[at]] for at in order]))
    predicted = np.bincount(cells.astype(int), expected[order])
    kept = predicted > 5
    observed, predicted = observed[kept], predicted[kept]
    assert chisquare(observed, predicted * observed.sum() / predicted.sum()).pvalue > 1e-4


def test_edges_of_the_paper_s_graphs():
    """Mean and standard deviation for connected labelled graphs of 11 nodes at density 0.5."""
    edges = MinimumSpanningTree()._draw(20_000, np.random.default_rng(0)).sum(axis=1)
    assert edges.mean() == pytest.approx(27.58, abs=5 * 3.67 / 20_000**0.5)
    assert edges.std() == pytest.approx(3.67, abs=0.1)


def test_shortest_paths_have_the_distances_of_the_paper():
    problems = ShortestPath()._draw(20_000, np.random.default_rng(1))
    lengths = Counter((ShortestPath()._answers(problems).lengths - 1).tolist())
    assert [lengths[distance] / 20_000 for distance in (1, 2, 3)] == pytest.approx([0.495, 0.468, 0.037], abs=0.015)


def test_start_nodes_and_queries_are_uniform():
    starts = BreadthFirstSearch(7)._draw(7000, np.random.default_rng(0))[:, 0]
    assert chisquare(np.bincount(starts, minlength=7)).pvalue > 1e-4
    queries = Counter(map(tuple, ShortestPath(5)._draw(8000, np.random.default_rng(0))[:, :2].tolist()))
    assert set(queries) == set(itertools.permutations(range(5), 2))
    assert chisquare(list(queries.values())).pvalue > 1e-4


def test_directions_follow_a_uniform_order():
    """Of complete graphs the directions tell the order."""
    task = TopologicalSort(5, 0.95)
    drawn = task._draw(9000, np.random.default_rng(0))
    complete = drawn[(drawn > 0).all(axis=1)]
    orders = Counter(map(tuple, task._answers(complete).tokens.tolist()))
    assert len(complete) > 4000
    assert set(orders) == set(itertools.permutations(range(5)))
    assert chisquare(list(orders.values())).pvalue > 1e-4


def test_weights_are_uniform():
    drawn = MinimumSpanningTree(6, weighted=True)._draw(2000, np.random.default_rng(0))
    assert chisquare(np.bincount(drawn[drawn > 0], minlength=10)[1:]).pvalue > 1e-4


@every_task
def test_any_step_is_made_again_alone(kind, options):
    task = kind(6, **options)
    torch.manual_seed(1)
    np.random.seed(1)
    run = [task.batch(8, seed=3, step=step).tokens for step in range(4)]
    np.random.seed(2)
    assert torch.equal(kind(6, **options).batch(8, seed=3, step=2).tokens, run[2])
    others = [*run, task.batch(8, seed=4, step=2).tokens, task.batch(8, seed=3, step=2, split="probe").tokens]
    assert len({other.numpy().tobytes() for other in others}) == 6


def test_many_problems_are_drawn_in_parts(monkeypatch):
    """More graphs than are drawn at once, and still each one connected and the number right."""
    monkeypatch.setattr("emergent_heads.tasks.graph_task._NUMBERS_AT_ONCE", 700)
    task = BreadthFirstSearch(8, 0.3)
    tokens = task.batch(150, seed=0, split="probe").tokens
    assert len(tokens) == 150
    assert all(nx.is_connected(Problem(task, row).graph) for row in tokens.tolist())
    monkeypatch.undo()
    parts = task._split_parts(task.problems(tokens))
    monkeypatch.setattr("emergent_heads.tasks.graph_task._NUMBERS_AT_ONCE", 700)
    assert np.array_equal(task._split_parts(task.problems(tokens)), parts)


# ---- The split ------------------------------------------------------------------------------------------------------


def matrix(graph: nx.Graph) -> np.ndarray:
    return nx.to_numpy_array(graph, nodelist=sorted(graph), dtype=bool)


def test_isomorphic_graphs_have_one_invariant_and_others_nearly_always_another():
    generator = np.random.default_rng(0)
    found = defaultdict(list)
    for graph in graph_atlas_g():
        if graph.number_of_nodes() > 1 and nx.is_connected(graph):
            found[graph.number_of_nodes()].append(matrix(graph))
    assert [len(found[nodes]) for nodes in range(2, 8)] == [1, 2, 6, 21, 112, 853]
    for nodes, matrices in found.items():
        graphs = np.array(matrices)
        invariants = isomorphism_invariant(graphs)
        for _ in range(5):
            names = np.array([generator.permutation(nodes) for _ in graphs])
            rows = np.arange(len(graphs))[:, None, None]
            renamed = graphs[rows, names[:, :, None], names[:, None, :]]
            assert np.array_equal(isomorphism_invariant(renamed), invariants)
        assert len(np.unique(invariants)) >= (1 if nodes < 6 else 0.97) * len(graphs)


@settings(max_examples=25, deadline=None)
@given(st.integers(5, 26), st.floats(0.3, 0.9), st.integers(0, 2**32))
def test_renamed_graphs_stay_in_their_split(nodes, density, seed):
    generator = np.random.default_rng(seed)
    names = generator.permutation(nodes)
    for kind, options in ALL:
        task = kind(nodes, density, **options)
        problems = task._draw(3, generator)
        graphs = task._adjacency(problems)[:, names][:, :, names]
        renamed = problems.copy()
        first, second = np.triu_indices(nodes, 1)
        renamed[:, HEADS[kind] :] = graphs[:, first, second]
        assert np.array_equal(task._split_parts(renamed), task._split_parts(problems))


@every_task
@pytest.mark.parametrize("nodes", [5, 6, 7])
def test_training_shares_no_graph_with_other_splits(kind, options, nodes):
    task = kind(nodes, **options)

    def classes(split):
        graphs = [Problem(task, row).graph for row in task.batch(150, seed=0, split=split).tokens.tolist()]
        kept: dict[object, list[nx.Graph]] = defaultdict(list)
        for graph in graphs:
            alike = kept[tuple(sorted(dict(graph.degree()).values()))]
            if not any(nx.is_isomorphic(graph, other) for other in alike):
                alike.append(graph)
        return kept

    train, held_out = classes("train"), classes("probe")
    assert sum(map(len, held_out.values())) > 1
    for degrees, graphs in held_out.items():
        assert not any(nx.is_isomorphic(graph, other) for graph in graphs for other in train[degrees])


def test_the_held_out_share_of_small_graphs_is_near_one_in_eight():
    """Exactly, over the atlas: a class weighs as many labelled graphs as it has."""
    for nodes, least, most in ((5, 0.05, 0.3), (6, 0.08, 0.2)):
        graphs = [one for one in graph_atlas_g() if one.number_of_nodes() == nodes and nx.is_connected(one)]
        parts = isomorphism_invariant(np.array([matrix(one) for one in graphs]))[:, None]
        held_out = hashes(parts) % HELD_OUT_SHARE == 0
        symmetries = np.array([sum(1 for _ in GraphMatcher(one, one).isomorphisms_iter()) for one in graphs])
        labelled = math.factorial(nodes) / symmetries
        assert labelled.sum() == {5: 728, 6: 26704}[nodes]
        assert least < labelled[held_out].sum() / labelled.sum() < most


# ---- Reference lines ------------------------------------------------------------------------------------------------


def all_prompts(task):
    """Every prompt that the task can draw, with its probability; start nodes left out."""
    pairs = list(itertools.combinations(ascii_uppercase[: task.nodes], 2))
    total = 0.0
    found: Counter[str] = Counter()
    for row in edge_sets(task.nodes):
        weight = task.density ** sum(row) * (1 - task.density) ** (len(pairs) - sum(row))
        total += weight
        edges = list(itertools.compress(pairs, row))
        if not isinstance(task, TopologicalSort):
            found["".join(map("".join, edges))] += weight
            continue
        for order in itertools.permutations(ascii_uppercase[: task.nodes]):
            at = {node: place for place, node in enumerate(order)}
            written = "".join("".join(sorted(edge, key=at.__getitem__)) for edge in edges)
            found[written] += weight / math.factorial(task.nodes)
    return {prompt: weight / total for prompt, weight in found.items()}


def separator_by_counting(task):
    """Cost and share right of predicting `=`, from the chances of every next token after every beginning."""
    following: dict[str, Counter[str]] = defaultdict(Counter)
    prompts = all_prompts(task)
    for prompt, weight in prompts.items():
        for at, letter in enumerate(prompt + "="):
            following[prompt[:at]][letter] += weight
    cost = right = 0.0
    for prompt, weight in prompts.items():
        next_ = following[prompt]
        cost -= weight * math.log(next_["="] / next_.total())
        best = max(next_.values())
        ties = sum(value > best - 1e-9 * next_.total() for value in next_.values())
        right += weight * (next_["="] > best - 1e-9 * next_.total()) / ties
    return cost, right


@pytest.mark.parametrize("density", [0.5, 0.3, 0.7])
def test_predicting_the_separator_costs_what_counting_all_graphs_says(density):
    task = BreadthFirstSearch(5, density, "paper")
    cost, right = separator_by_counting(MinimumSpanningTree(5, density))
    problems = task._draw(50_000, np.random.default_rng(0))
    assert task._separator_surprise(problems) == pytest.approx((cost, right), abs=0.012)


@pytest.mark.parametrize("density", [0.5, 0.3])
def test_predicting_the_separator_of_directed_edges(density):
    task = TopologicalSort(5, density, "paper")
    cost, right = separator_by_counting(task)
    problems = task._draw(50_000, np.random.default_rng(0))
    assert task._separator_surprise(problems) == pytest.approx((cost, right), abs=0.02)


@pytest.fixture(scope="module")
def paper_tasks():
    """One of each with the layout of the paper: their reference lines take a moment."""
    return {kind: kind(layout="paper") for kind in CLASSES}


def test_floors_of_the_paper(paper_tasks):
    floors = {kind: task.floor for kind, task in paper_tasks.items()}
    for kind in (BreadthFirstSearch, DepthFirstSearch, TopologicalSort):
        assert floors[kind] == pytest.approx(0.053, abs=0.001)
    assert floors[MinimumSpanningTree] == pytest.approx(0.031, abs=0.001)
    assert floors[ShortestPath] == pytest.approx(0.15, abs=0.005)
    assert floors[BreadthFirstSearch] * 13 == pytest.approx(0.683, abs=0.02)


def test_a_perfect_model_is_right_as_often_as_the_paper_s_prompts_allow(paper_tasks):
    for task in paper_tasks.values():
        assert 0.5 < task.reference_lines["perfect_exact_match"] < 0.75


def test_a_perfect_model_is_always_right_where_the_prompt_ends_by_itself():
    lines = DepthFirstSearch().reference_lines
    assert lines["floor_loss_nats"] == 0
    assert lines["perfect_exact_match"] == 1


def test_the_plateau_of_a_search_lies_between_two_ways_of_guessing(paper_tasks):
    """Below a uniform guess among all nodes; above one among the nodes left, which a model must keep account of."""
    assert math.lgamma(11) / 13 < paper_tasks[BreadthFirstSearch].plateau < math.log(11) * 11 / 13


def test_mean_lengths_of_the_paper(paper_tasks):
    """The paper draws isomorphism classes with equal chances, which have 0.1 edges more on average."""
    means = {kind: task.mean_length for kind, task in paper_tasks.items()}
    assert means[BreadthFirstSearch] == pytest.approx(69.359, abs=0.4)
    assert means[DepthFirstSearch] == pytest.approx(69.359, abs=0.4)
    assert means[TopologicalSort] == pytest.approx(69.359 - 1, abs=0.4)  # the paper counts a start letter here too
    assert means[MinimumSpanningTree] == pytest.approx(77.359, abs=0.5)
    assert means[ShortestPath] == pytest.approx(61.914, abs=0.4)


# ---- Own prompts, settings and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "prompt"),
    [
        (BreadthFirstSearch(5), ""),
        (BreadthFirstSearch(5), "C"),
        (BreadthFirstSearch(5), "CACADBCBECDD"),  # half an edge
        (BreadthFirstSearch(5), "CACADBC"),  # E is missing
        (BreadthFirstSearch(5), "FACADBCBECDDE"),  # no such start
        (BreadthFirstSearch(5), "CACADBCBECDDF"),  # no such node
        (BreadthFirstSearch(5), "CADACBCBECDDE"),  # not in order
        (BreadthFirstSearch(5), "CACACADBCBECDDE"),  # twice
        (BreadthFirstSearch(5), "CACADCBBECDDE"),  # larger letter first
        (BreadthFirstSearch(5), "CAAACADBCBECDDE"),  # an edge to itself
        (BreadthFirstSearch(5), "C" + "ABACADAEBCBDBECDCEDE" + "DEDE"),  # too long
        (ShortestPath(5), "AAACADBCBECDDE"),
        (ShortestPath(5), "A"),
        (TopologicalSort(5), "ABCABCDE"),  # in two pieces
        (TopologicalSort(5), "ABCABCBDDE"),  # a circle: A B C A
        (MinimumSpanningTree(5), ""),
        (MinimumSpanningTree(5, weighted=True), "ACADBCBECDDE"),
        (MinimumSpanningTree(5, weighted=True), "AC2AD7BCABE2CD2DE9"),
        (MinimumSpanningTree(5, weighted=True), "AC2AD7BC1BE2CD2DEE"),
        (MinimumSpanningTree(5, weighted=True), "12AAD7BC1BE2CD2DE9"),
    ],
)
def test_prompts_that_state_no_problem(task, prompt):
    with pytest.raises(ArgumentError, match=r"states no problem of .*; one looks like '[A-Z1-9]+'"):
        task.solve(prompt)


def test_sequences_of_another_task_are_refused():
    tokens = BreadthFirstSearch(6).batch(4, seed=0).tokens
    with pytest.raises(ArgumentError, match="give sequences that this task made"):
        BreadthFirstSearch(5).feature("queue").read(tokens)
    weighted = MinimumSpanningTree(6, weighted=True).batch(4, seed=0).tokens
    with pytest.raises(ArgumentError):
        MinimumSpanningTree(6).feature("component").read(weighted)


def test_a_digit_is_no_letter_of_the_task_without_weights():
    with pytest.raises(ArgumentError, match="has '2'; MinimumSpanningTree writes"):
        MinimumSpanningTree(5).solve("AC2AD7BC1BE2CD2DE9")


@settings(max_examples=20, deadline=None)
@given(graph_tasks())
def test_settings_go_through_json(task):
    stored = json.loads(json.dumps(task.settings()))
    again = {kind.__name__: kind for kind in CLASSES}[stored.pop("task")](**stored)
    assert again == task
    assert torch.equal(again.batch(3, seed=1).tokens, task.batch(3, seed=1).tokens)
    assert torch.equal(pickle.loads(pickle.dumps(task)).batch(3, seed=1).tokens, task.batch(3, seed=1).tokens)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 4}, "nodes is 4; .* at least 5"),
        ({"nodes": 27}, "nodes is 27; there are letters for 26"),
        ({"nodes": "11"}, "nodes is '11'; it must be a whole number"),
        ({"density": 0}, "density is 0; it must be a number between 0 and 1"),
        ({"density": 1.0}, "density is 1.0; it must be"),
        ({"density": float("nan")}, "density is nan; it must be"),
        ({"density": "0.5"}, "density is '0.5'; it must be"),
        ({"density": 0.05}, r"density 0.05 leaves a share of .* of the graphs of 11 nodes connected; choose one"),
        ({"nodes": 26, "density": 1e-9}, "density 1e-09 leaves a share of .* of 26 nodes"),
        ({"layout": "plain"}, "layout must be prompt or paper, not 'plain'"),
    ],
)
def test_arguments_that_make_no_sense(kind, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        kind(**arguments)


def test_a_density_that_leaves_one_graph_only_has_no_splits():
    task = BreadthFirstSearch(5, 1 - 1e-12)
    [part] = hashes(task._split_parts(task._draw(1, np.random.default_rng(0))))
    with pytest.raises(ArgumentError, match="too few problems"):
        task.batch(10, seed=0, split="train" if part % HELD_OUT_SHARE == 0 else "probe")


def test_a_density_is_plain_whatever_it_came_as():
    task = BreadthFirstSearch(6, np.float32(0.5))
    assert task == BreadthFirstSearch(6, 0.5)
    assert type(task.density) is float
