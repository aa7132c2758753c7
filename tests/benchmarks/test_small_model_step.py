"""A training step of a small model, against a plain PyTorch model of the same layers and `HookedTransformer`.

One thread, forward, backward and AdamW, taken in turns in one run; prints the ratio of the best CPU times (the machine
may be shared). The three models have the same weights, so their losses must agree. `make bench` runs it.
"""

import time

import pytest
import torch
from tiny_models import HAS_HOOKED_TRANSFORMER
from torch import nn
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

import emergent_heads as eh

pytestmark = pytest.mark.benchmark

ROWS, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS = 64, 128, 64, 128, 4, 2
ROUNDS = 12
WANTED = {"plain PyTorch": 1.1, "HookedTransformer": 0.75}


class PlainBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        normed = layer_norm(x, (WIDTH,), self.ln1.weight, self.ln1.bias)
        q, k, v = self.qkv(normed).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(layer_norm(x, (WIDTH,), self.ln2.weight, self.ln2.bias))))


class PlainModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos_embed = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.ln_final, self.unembed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos_embed.weight
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.ln_final(x))


def plain_copy(model):
    plain = PlainModel()
    names = {"attn.qkv": "qkv", "attn.out": "out", "mlp.input": "up", "mlp.out": "down"}
    state = {}
    for name, value in model.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        state[name] = value
    plain.load_state_dict(state)
    return plain


def step(model, optimizer, tokens):
    started = time.process_time()
    logits = model(tokens)
    loss = cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - started, loss.item()


def test_a_training_step(capsys):
    config = eh.SmallModelConfig(LAYERS, WIDTH, HEADS, vocabulary_size=VOCABULARY, context=LENGTH)
    small = eh.SmallModel(config)
    models = {"small model": small, "plain PyTorch": plain_copy(small)}
    if HAS_HOOKED_TRANSFORMER:
        models["HookedTransformer"] = small.to_hooked_transformer()
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for name, model in models.items()}
    generator = torch.Generator().manual_seed(0)
    seconds = {name: [] for name in models}
    losses = {name: [] for name in models}
    for _ in range(ROUNDS):
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        for name, model in models.items():
            taken, loss = step(model, optimizers[name], tokens)
            seconds[name].append(taken)
            losses[name].append(loss)
    for name in models:
        assert losses[name] == pytest.approx(losses["small model"], abs=1e-4), f"{name} is not the same model"
    best = {name: min(times) for name, times in seconds.items()}
    with capsys.disabled():
        print(f"\ntraining step, {LAYERS} layers, d_model {WIDTH}, {ROWS} x {LENGTH} tokens:")
        for name, wanted in WANTED.items():
            if name in best:
                ratio = best["small model"] / best[name]
                print(f"  small model / {name}: {ratio:.2f} (wanted at most {wanted}; {best[name] * 1e3:.0f} ms)")
