"""Small models as any hooked model, against TransformerLens' own patching and hooks set by hand."""

import itertools

import numpy as np
import pytest
import torch
from tiny_models import HAS_HOOKED_TRANSFORMER
from transformer_lens import patching

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.tasks.task import PromptBatch

VOCABULARY, PROMPTS, LENGTH, LAYERS, HEADS = 13, 4, 9, 3, 4
HEADS_OF_ALL = list(itertools.product(range(LAYERS), range(HEADS)))
SETTINGS = {
    "attention": {},
    "Llama style": {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "biases": False},
    "attention only": {"mlp": "none"},
    "linear": {"mixer": "linear"},
    "both": {"mixer": ("linear", "attention", "linear")},
}


def small(settings: str, seed: int = 0) -> eh.SmallModel:
    config = eh.SmallModelConfig(
        LAYERS, 32, HEADS, vocabulary_size=VOCABULARY, context=LENGTH + 3, **SETTINGS[settings]
    )
    model = eh.SmallModel(config, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)  # patterns far from uniform
    return model.eval()  # TransformerLens 4 patches no model in training mode


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def targets():
    return torch.tensor([1, 5, 2, 9])


@pytest.fixture
def task(tokens, targets):
    return eh.tasks.from_tokens(tokens, targets)


def by_hand(model, tokens, targets, hooks):
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)[:, -1]
    return logits.softmax(-1)[range(PROMPTS), targets].mean().item()


def pattern_point(model, layer):
    return next(
        name for name in model.hook_dict if name.startswith(f"blocks.{layer}.") and name.endswith("hook_pattern")
    )


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_read_is_what_hooks_by_hand_give(settings, tokens, targets):
    model = small(settings)
    logits, cache = model.run_with_cache(tokens)
    hooked = eh.hooked(model)
    assert eh.hooked(hooked) is hooked
    positions = torch.tensor([8, 5, 0, 7])
    torch.testing.assert_close(
        hooked.logits(tokens, positions), logits[range(PROMPTS), positions].detach(), atol=1e-5, rtol=1e-5
    )
    for layer, pattern in hooked.patterns(tokens).items():
        torch.testing.assert_close(pattern, cache[pattern_point(model, layer)].expand_as(pattern))
        assert pattern.shape == (PROMPTS, HEADS, LENGTH, LENGTH)
    resid = hooked.residual(tokens, [0, 2])
    expected = torch.stack([cache["resid_post", layer] for layer in (0, 2)])
    torch.testing.assert_close(resid, expected, atol=1e-5, rtol=1e-5)
    eh.check_intervention(model)


@pytest.mark.parametrize("settings", SETTINGS)
def test_delta_p_equals_patches_by_hand(settings, tokens, targets, task):
    pre, post = small(settings), small(settings, seed=1)
    _, cache = post.run_with_cache(tokens)
    ranking = eh.rank_heads(pre, post, task).table.set_index(["layer", "head"])["delta_p"]
    plain = by_hand(pre, tokens, targets, [])
    for layer, head in HEADS_OF_ALL:
        point = pattern_point(pre, layer)

        def replace(pattern, hook, head=head):
            pattern = pattern.clone()
            pattern[:, head] = cache[hook.name][:, head]
            return pattern

        delta_p = by_hand(pre, tokens, targets, [(point, replace)]) - plain
        assert ranking[layer, head] == pytest.approx(delta_p, abs=1e-6)
    assert np.abs(ranking).max() > 1e-3


@pytest.mark.parametrize("settings", ["attention", "Llama style", "attention only"])
def test_delta_p_equals_transformer_lens_own_loop(settings, tokens, targets, task):
    """Their patching function runs on a small model as it is, with 3.x and 4.x."""
    pre, post = small(settings), small(settings, seed=1)

    def p_target(logits):
        return logits[:, -1].softmax(-1)[range(PROMPTS), targets].mean()

    with torch.no_grad():
        _, cache = post.run_with_cache(tokens)
        patched = patching.get_act_patch_attn_head_pattern_all_pos(pre, tokens, cache, p_target)
        truth = (patched - p_target(pre(tokens))).numpy()
    table = eh.rank_heads(pre, post, task).table.sort_values(["layer", "head"])
    np.testing.assert_allclose(table["delta_p"].to_numpy().reshape(LAYERS, HEADS), truth, atol=1e-6, rtol=0)
    if HAS_HOOKED_TRANSFORMER:
        mixed = eh.rank_heads(pre, post.to_hooked_transformer(), task).table.sort_values(["layer", "head"])
        np.testing.assert_allclose(mixed["delta_p"].to_numpy().reshape(LAYERS, HEADS), truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS)
def test_shortcuts_hold(settings, tokens, targets):
    hooked = eh.hooked(small(settings))
    trace = hooked.engine.trace(PromptBatch(tokens, torch.tensor([8, 5, 4, 7]), targets, ((),) * PROMPTS))
    assert hooked.engine.uses_shortcuts
    assert len(trace.patterns) == LAYERS


def test_an_edit_of_the_residual_stream_equals_a_hook_by_hand(tokens):
    model = small("attention")
    last = torch.full((PROMPTS,), LENGTH - 1)
    edited = eh.hooked(model).logits_with_residual(tokens, last, {1: lambda resid: resid * 0.5})
    with torch.no_grad():
        truth = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", lambda resid, hook: resid * 0.5)])
    torch.testing.assert_close(edited, truth[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mixer", ["mlp_mixer", ("attention", "mlp_mixer", "attention")])
def test_a_mixer_without_a_pattern_is_refused_by_name(mixer, tokens, task):
    config = eh.SmallModelConfig(LAYERS, 32, HEADS, mixer=mixer, vocabulary_size=VOCABULARY, context=LENGTH)
    model = eh.SmallModel(config)
    with pytest.raises(errors.InterventionHasNoEffect, match=r"at layer .*1.* of this SmallModel with .*mlp_mixer"):
        eh.rank_heads(model, eh.SmallModel(config, seed=1), task)
    resid = eh.hooked(model).residual(tokens, [0])  # what needs no pattern works
    assert resid.shape == (1, PROMPTS, LENGTH, 32)
    eh.hooked(model).check_residual_edits()
