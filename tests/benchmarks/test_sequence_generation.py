"""Making the data of a training step, against the step itself: a plain PyTorch transformer and AdamW, one thread."""

import time

import pytest
import torch
from torch import nn

from emergent_heads.tasks import (
    ActivitySelection,
    Addition,
    BreadthFirstSearch,
    CellularAutomaton,
    Dyck,
    LinearMap,
    MaximumSubarray,
    MinimumSpanningTree,
    Multiplication,
    NeuralCellularAutomata,
    SequenceTask,
    ShuffleDyck,
    TopologicalSort,
)

pytestmark = pytest.mark.benchmark

TOKENS = 8192


class PlainTransformer(nn.Module):
    """4 heads, causal, through PyTorch's own layers."""

    def __init__(self, task: SequenceTask, n_layers: int, d_model: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(task.vocabulary_size, d_model)
        self.positions = nn.Parameter(torch.zeros(task.length, d_model))
        layer = nn.TransformerEncoderLayer(d_model, 4, 4 * d_model, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.unembed = nn.Linear(d_model, task.vocabulary_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        return self.unembed(self.layers(self.embed(tokens) + self.positions[:n], mask, is_causal=True))


@pytest.mark.parametrize(
    "task",
    [LinearMap(), LinearMap(128), CellularAutomaton(8), CellularAutomaton(), CellularAutomaton(64, iterations=4)],
    ids=["linear map 16", "linear map 128", "automaton 8", "automaton 16", "automaton 64, 4 iterations"],
)
def test_making_a_batch_takes_at_most_a_twentieth_of_a_training_step(task: SequenceTask) -> None:
    assert share_of_a_step(task, rows=TOKENS // task.length, n_layers=2, d_model=128) <= 0.05


@pytest.mark.parametrize(
    "task",
    [
        Addition(16),
        Multiplication(16),
        MaximumSubarray(64),
        ActivitySelection(16),
        BreadthFirstSearch(),
        TopologicalSort(),
        MinimumSpanningTree(weighted=True),
    ],
    ids=lambda task: task.name,
)
def test_making_a_batch_of_an_algorithmic_task_takes_at_most_a_twentieth(task: SequenceTask) -> None:
    """At the batch size and the shape of the quiet-features paper's smaller models."""
    assert share_of_a_step(task, rows=64, n_layers=4, d_model=64) <= 0.05


@pytest.mark.parametrize(
    "task",
    [
        Dyck(length=256),
        ShuffleDyck(length=256),
        NeuralCellularAutomata(length=256, rules=64),
        NeuralCellularAutomata(colours=4, token_bytes=1, length=256, rules=64),
    ],
    ids=["Dyck", "shuffle Dyck", "cellular networks, 10 colours", "cellular networks, 4 colours"],
)
def test_making_a_batch_for_pre_pretraining_takes_at_most_a_tenth(task: SequenceTask) -> None:
    """At 2,048 tokens a step, where what a batch costs whatever its size weighs most."""
    assert share_of_a_step(task, rows=2048 // task.length, n_layers=2, d_model=128) <= 0.1


def share_of_a_step(task: SequenceTask, *, rows: int, n_layers: int, d_model: int) -> float:
    """CPU time of making a batch over that of a training step; best of four each, in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = PlainTransformer(task, n_layers, d_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = task.batch(rows, seed=0)
    making, training = [], []
    for step in range(4):
        start = time.process_time()
        for part in range(10):
            batch = task.batch(rows, seed=0, step=10 * step + part)
        middle = time.process_time()
        optimizer.zero_grad()
        logits = model(batch.tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten()).backward()
        optimizer.step()
        making.append((middle - start) / 10)
        training.append(time.process_time() - middle)
    ratio = min(making) / min(training)
    print(f"\nbatch {1e3 * min(making):.2f} ms, training step {1e3 * min(training):.0f} ms, ratio {ratio:.4f}")
    return ratio
