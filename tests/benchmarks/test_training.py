"""What a training step costs beside the model, and what training seeds together saves.

One thread, taken in turns in one run; prints ratios of the best CPU times (the machine may be shared). `make bench`
runs it.
"""

import time

import pytest
import torch
from torch.nn.functional import cross_entropy

import emergent_heads as eh
from emergent_heads.training.learner import Learner, Plan
from emergent_heads.training.seeds import LearnerGroup
from emergent_heads.training.settings import TrainingSettings

pytestmark = pytest.mark.benchmark

ROUNDS = 10


def plan_of(state_size, d_model, n_heads, tokens):
    task = eh.tasks.LinearMap(state_size=state_size)
    config = eh.SmallModelConfig(n_layers=1, d_model=d_model, n_heads=n_heads)
    return Plan.of(config, task, TrainingSettings(steps=1000, tokens_per_batch=tokens), "cpu")


def learner_of(plan, seed):
    return Learner(plan, seed, plan.new_model(seed), {}, 0)


def best_of(repeats, *functions):
    """CPU seconds of each function, the best of `ROUNDS`, taken in turns."""
    best = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for index, function in enumerate(functions):
            started = time.process_time()
            for step in range(repeats):
                function(step)
            best[index] = min(best[index], (time.process_time() - started) / repeats)
    return best


def test_a_step_beside_forward_backward_and_adamw(capsys):
    plan = plan_of(16, 128, 8, 4096)
    learner, bare = learner_of(plan, 0), plan.new_model(0)
    optimizer = torch.optim.AdamW(bare.parameters(), fused=True)
    tokens = learner.batch(0).tokens

    def bare_step(step):
        optimizer.zero_grad()
        cross_entropy(bare(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    ours, theirs = best_of(3, learner.advance, bare_step)
    with capsys.disabled():
        print(f"\ntraining step {ours * 1e3:.1f} ms, {ours / theirs:.2f} times forward, backward and AdamW alone")
    assert ours / theirs < 1.1


@pytest.mark.parametrize(("tokens", "wanted"), [(128, 1.3), (256, 1.15), (4096, 0.9)])
def test_seeds_together(capsys, tokens, wanted):
    plan, n_seeds = plan_of(8, 64, 8, tokens), 8
    alone = [learner_of(plan, seed) for seed in range(n_seeds)]
    group = LearnerGroup([learner_of(plan, seed) for seed in range(n_seeds)])
    one_by_one, together = best_of(
        3 if tokens > 1000 else 8, lambda step: [learner.advance(step) for learner in alone], group.advance
    )
    with capsys.disabled():
        print(f"\n{n_seeds} seeds, {tokens} tokens a batch: {one_by_one / together:.2f} times the throughput")
    assert one_by_one / together > wanted
