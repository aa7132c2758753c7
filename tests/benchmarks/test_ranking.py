"""Ranking all heads, against TransformerLens' own patching loop on the same weights in the same run, one thread.

Prints the ratio of CPU times (the machine may be shared); the results must be equal. `make bench` runs it.
"""

import time

import numpy as np
import pytest
import torch
from tiny_models import HAS_HOOKED_TRANSFORMER, bridge, hooked_transformer
from transformer_lens import patching
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import emergent_heads as eh

pytestmark = pytest.mark.benchmark

VOCABULARY, PROMPTS, LENGTH = 50304, 16, 30
SHAPES = {"14m": (6, 128, 4), "160m": (12, 768, 12)}
WANTED = {"14m": 8.0, "160m": 3.0}
# TransformerLens cannot patch a plain model: its loop runs on the bridge of the same weights.
LOOPS = {"bridge": ("plain", "bridge")} | (
    {"HookedTransformer": ("HookedTransformer",)} if HAS_HOOKED_TRANSFORMER else {}
)


def model(shape, seed):
    n_layers, d_model, n_heads = SHAPES[shape]
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        hidden_size=d_model,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        intermediate_size=4 * d_model,
        vocab_size=VOCABULARY,
    )
    made = GPTNeoXForCausalLM(config).eval()
    with torch.no_grad():
        for layer in made.gpt_neox.layers:  # patterns far from uniform, so that patching them matters
            layer.attention.query_key_value.weight.mul_(5)
        made.lm_head.weight.mul_(200 / d_model**0.5)  # logits with a standard deviation of 4: p far from uniform
    return made


def pair(shape, kind, folder):
    models = [model(shape, seed) for seed in (0, 1)]
    if kind == "bridge":
        return [bridge(one) for one in models]
    if kind == "HookedTransformer":
        return [hooked_transformer(one, folder) for one in models]
    return models


def transformer_lens_loop(pre, post, tokens, targets):
    def p_target(logits):
        return logits[:, -1].softmax(-1)[range(PROMPTS), targets].mean()

    with torch.no_grad():
        _, cache = post.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_pattern"))
        patched = patching.get_act_patch_attn_head_pattern_all_pos(pre, tokens, cache, p_target)
        return (patched - p_target(pre(tokens))).numpy()


@pytest.mark.parametrize("shape", SHAPES)
def test_ranking_against_the_transformer_lens_loop(shape, tmp_path, capsys):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (PROMPTS, LENGTH), generator=generator)
    with torch.no_grad():  # the likeliest tokens, so that p is large enough to change
        targets = model(shape, 0)(tokens, logits_to_keep=1).logits[:, -1].argmax(-1)
    task = eh.tasks.from_tokens(tokens, targets)
    eh.rank_heads(*pair("14m", "plain", tmp_path), eh.tasks.from_tokens(tokens[:1], targets[:1]))  # imports
    for loop_kind, kinds in LOOPS.items():
        models = pair(shape, loop_kind, tmp_path)
        start = time.process_time()
        loop = transformer_lens_loop(*models, tokens, targets)
        loop_seconds = time.process_time() - start
        assert np.abs(loop).max() > 1e-3
        for kind in kinds:
            models = pair(shape, kind, tmp_path)
            start = time.process_time()
            delta_p = eh.rank_heads(*models, task).delta_p.mean(-1)
            seconds = time.process_time() - start
            np.testing.assert_allclose(delta_p, loop, atol=1e-5)
            assert np.corrcoef(delta_p.ravel(), loop.ravel())[0, 1] > 0.999
            with capsys.disabled():
                print(
                    f"\n{shape}, {kind}: TransformerLens loop {loop_seconds:.1f} s, rank_heads {seconds:.2f} s: "
                    f"{loop_seconds / seconds:.1f} times faster (wanted {WANTED[shape]:g}); delta_p up to "
                    f"{np.abs(loop).max():.1e}, equal to {np.abs(delta_p - loop).max():.1e}"
                )
