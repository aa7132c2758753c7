"""Making the data of a training step, against the step itself: a plain PyTorch transformer and AdamW, one thread."""

import time

import pytest
import torch
from torch import nn

from emergent_heads.tasks import CellularAutomaton, LinearMap, SequenceTask

pytestmark = pytest.mark.benchmark

TOKENS = 8192


class PlainTransformer(nn.Module):
    """2 layers, d_model 128, 4 heads, causal, through PyTorch's own layers."""

    def __init__(self, task: SequenceTask) -> None:
        super().__init__()
        self.embed = nn.Embedding(task.vocabulary_size, 128)
        self.positions = nn.Parameter(torch.zeros(task.length, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.unembed = nn.Linear(128, task.vocabulary_size)

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
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, rows = PlainTransformer(task), TOKENS // task.length
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
    assert ratio <= 0.05
