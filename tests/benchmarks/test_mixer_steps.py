"""A training step of small models with each mixer, against the same model with attention.

One thread, forward, backward and AdamW, taken in turns in one run; prints the ratio of the best CPU times (the machine
may be shared). `make bench` runs it.
"""

import math
import time

import pytest
import torch

import emergent_heads as eh

pytestmark = pytest.mark.benchmark

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS = 32, 256, 64, 128, 4, 2
ROUNDS = 6
# Mixer, its options, and how many times the attention model's step its own may take (None: only to know).
CASES = [
    ("mlp_mixer", {"hidden_units": 1}, 0.8),
    ("mlp_mixer", {"hidden_units": 8}, None),
    ("mamba", {}, 2.5),
    ("mamba2", {}, 2.0),
    ("mamba2", {"state_size": 64}, None),
    ("gated_delta_net", {}, 2.0),
    ("rwkv4", {}, 2.0),
    ("rwkv7", {}, 2.5),
    ("xlstm", {}, 2.0),
    ("linear_rnn", {}, 2.0),
]


def model_and_optimizer(mixer, options):
    config = eh.SmallModelConfig(
        LAYERS, WIDTH, HEADS, mixer=mixer, mixer_options=options, vocabulary_size=VOCABULARY, context=LENGTH
    )
    model = eh.SmallModel(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer, tokens):
    started = time.process_time()
    loss = model(tokens, "loss")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - started, loss.item()


@pytest.mark.parametrize(("mixer", "options", "wanted"), CASES)
def test_a_training_step(mixer, options, wanted, capsys):
    torch.set_num_threads(1)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    contestants = {"attention": model_and_optimizer("attention", {}), mixer: model_and_optimizer(mixer, options)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, (model, optimizer) in contestants.items():
            taken, loss = step(model, optimizer, tokens)
            seconds[name].append(taken)
            losses[name].append(loss)
    for curve in losses.values():  # the same batch over and over must be learned
        assert all(map(math.isfinite, curve))
        assert curve[-1] < curve[0]
    attention, own = min(seconds["attention"]), min(seconds[mixer])
    told = f"{mixer} {options or ''}: {own:.3f} s, attention {attention:.3f} s: {own / attention:.2f} times as long"
    with capsys.disabled():
        print(f"\n{told}" + ("" if wanted is None else f" (at most {wanted:g} wanted)"))
