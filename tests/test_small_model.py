"""Small models: TransformerLens' names and tools, fast and explicit paths, conversion, attention bias, bad input."""

import math

import pytest
import torch
from tiny_models import HAS_HOOKED_TRANSFORMER
from torch import nn
from torch.nn import functional
from transformer_lens import ActivationCache

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.models.layers import listened_to
from emergent_heads.tasks.task import SequenceBatch, SequenceTask

SHAPES = {
    "GPT-2 style": {},
    "Llama style": {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "biases": False},
    "attention only": {"mlp": "none"},
    "rotary with biases": {"positions": "rotary", "mlp": "swiglu"},
    "no positions": {"positions": "none", "norm": "rms"},
    "wide heads": {"d_head": 12, "d_mlp": 20},
}
VOCABULARY, CONTEXT = 11, 16


def config_of(shape: str, **settings) -> eh.SmallModelConfig:
    return eh.SmallModelConfig(
        2, 32, 4, **{"vocabulary_size": VOCABULARY, "context": CONTEXT, **SHAPES[shape], **settings}
    )


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(3))


def sharpened(model: eh.SmallModel) -> eh.SmallModel:
    """Larger weights, so that patterns are far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    return model


def gradients(model: eh.SmallModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens, "loss").backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_fast_and_the_explicit_path_agree(shape, tokens):
    model = sharpened(eh.SmallModel(config_of(shape)))
    fast, fast_gradients = model(tokens), gradients(model, tokens)
    seen = []
    with model.hooks(fwd_hooks=[(lambda name: True, lambda value, hook: seen.append(hook.name))]):
        explicit, explicit_gradients = model(tokens), gradients(model, tokens)
    assert {f"blocks.{layer}.attn.{name}" for layer in (0, 1) for name in ("hook_attn_scores", "hook_pattern")} <= set(
        seen
    )
    torch.testing.assert_close(explicit, fast, atol=1e-5, rtol=1e-5)
    for name, gradient in fast_gradients.items():
        torch.testing.assert_close(explicit_gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_attention_is_explicit_only_when_somebody_listens(tokens, monkeypatch):
    from emergent_heads.models.mixers import attention

    calls = []
    fused = attention.scaled_dot_product_attention
    monkeypatch.setattr(
        attention, "scaled_dot_product_attention", lambda *args, **kw: calls.append(1) or fused(*args, **kw)
    )
    model = eh.SmallModel(config_of("GPT-2 style"))
    model(tokens)
    model.run_with_cache(tokens, names_filter="blocks.1.hook_resid_post")
    assert len(calls) == 4, "both layers, twice"
    model.run_with_cache(tokens)
    assert len(calls) == 4
    model.run_with_cache(tokens, names_filter="blocks.0.attn.hook_pattern")
    assert len(calls) == 5, "only the layer that is listened to is explicit"
    assert not listened_to(*model.hook_dict.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_hook_fires_and_every_edit_reaches_the_output(shape, tokens):
    model = sharpened(eh.SmallModel(config_of(shape)))
    plain, cache = model.run_with_cache(tokens)
    assert isinstance(cache, ActivationCache)
    assert set(cache.keys()) == set(model.hook_dict)
    for name in model.hook_dict:

        def edit(value, hook):
            return value.roll(1, dims=1) if value.ndim == 3 else value * 0.5

        edited = model.run_with_hooks(tokens, fwd_hooks=[(name, edit)])
        assert (edited - plain).abs().max() > 1e-4, f"an edit at {name} is dropped"
    assert torch.equal(model(tokens), plain) or torch.allclose(model(tokens), plain, atol=1e-5)


def test_the_names_are_those_of_transformer_lens(tokens):
    _, cache = eh.SmallModel(config_of("GPT-2 style")).run_with_cache(tokens)
    shapes = {name: tuple(value.shape) for name, value in cache.items()}
    for name in ("hook_embed", "hook_pos_embed", "ln_final.hook_normalized", "blocks.0.hook_resid_pre"):
        assert shapes[name] == (3, 10, 32)
    for name in ("hook_attn_out", "hook_mlp_out", "hook_resid_mid", "hook_resid_post", "ln1.hook_normalized"):
        assert shapes[f"blocks.1.{name}"] == (3, 10, 32)
    for name in ("hook_q", "hook_k", "hook_v", "hook_z"):
        assert shapes[f"blocks.1.attn.{name}"] == (3, 10, 4, 8)
    for name in ("hook_attn_scores", "hook_pattern"):
        assert shapes[f"blocks.1.attn.{name}"] == (3, 4, 10, 10)
    assert shapes["blocks.1.mlp.hook_post"] == (3, 10, 128)
    assert shapes["blocks.1.ln2.hook_scale"] == (3, 10, 1)


@pytest.mark.parametrize("shape", ["GPT-2 style", "Llama style", "attention only"])
def test_the_tools_of_the_cache_decompose_the_logits(shape, tokens):
    """TransformerLens' own decomposition: heads, MLPs and biases add up to the residual stream and to the logits."""
    model = sharpened(eh.SmallModel(config_of(shape)))
    logits, cache = model.run_with_cache(tokens)
    final = cache["blocks.1.hook_resid_post"]
    torch.testing.assert_close(cache.decompose_resid(layer=-1).sum(0), final, atol=1e-4, rtol=1e-4)
    heads = cache.stack_head_results(layer=-1)
    from_attention = sum(cache["attn_out", layer] - model.block_list[layer].token_mixer.b_O for layer in (0, 1))
    torch.testing.assert_close(heads.sum(0), from_attention, atol=1e-4, rtol=1e-4)
    target = tokens.roll(-1, dims=1)
    attributed = cache.logit_attrs(cache.decompose_resid(layer=-1), target).sum(0)
    normalised = cache["ln_final.hook_normalized"]
    expected = (normalised * model.W_U.T[target]).sum(-1)
    torch.testing.assert_close(attributed, expected, atol=1e-3, rtol=1e-3)
    direct = (normalised * model.ln_final.weight) @ model.W_U + model.b_U
    if model.ln_final.bias is not None:
        direct = direct + model.ln_final.bias @ model.W_U
    torch.testing.assert_close(direct, logits, atol=1e-4, rtol=1e-4)


def test_circuitsvis_shows_its_patterns(tokens):
    circuitsvis = pytest.importorskip("circuitsvis", reason="needs circuitsvis, of the extra notebook")
    _, cache = eh.SmallModel(config_of("GPT-2 style")).run_with_cache(tokens)
    shown = circuitsvis.attention.attention_patterns(
        [str(token) for token in tokens[0].tolist()], cache["pattern", 0][0]
    )
    assert "AttentionPatterns" in str(shown)


def test_stopping_at_a_layer_and_losses(tokens):
    model = eh.SmallModel(config_of("GPT-2 style"))
    logits, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(model(tokens, stop_at_layer=1), cache["blocks.1.hook_resid_pre"])
    torch.testing.assert_close(model(tokens, stop_at_layer=-1), cache["blocks.1.hook_resid_pre"])
    both, loss = model(tokens, "both")
    torch.testing.assert_close(both, logits)
    expected = functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model(tokens, "loss"), expected)
    assert model(tokens, None) is None


@pytest.mark.skipif(not HAS_HOOKED_TRANSFORMER, reason="transformer-lens 4.x has no HookedTransformer")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_hooked_transformer_of_the_same_weights_computes_the_same(shape, tokens):
    model = sharpened(eh.SmallModel(config_of(shape)))
    converted = model.to_hooked_transformer()
    logits, cache = model.run_with_cache(tokens)
    other_logits, other_cache = converted.run_with_cache(tokens)
    torch.testing.assert_close(other_logits, logits, atol=1e-5, rtol=1e-5)
    assert set(cache.keys()) <= set(other_cache.keys())
    for name, value in cache.items():
        torch.testing.assert_close(other_cache[name], value, atol=1e-5, rtol=1e-4, msg=name)
    with torch.no_grad():
        converted.W_E.zero_()
    torch.testing.assert_close(model(tokens), logits, msg="the conversion must copy the weights")


@pytest.mark.skipif(HAS_HOOKED_TRANSFORMER, reason="transformer-lens 3.x has HookedTransformer")
def test_without_hooked_transformer_the_conversion_says_what_to_do():
    with pytest.raises(errors.UnsupportedModelError, match="gone since 4"):
        eh.SmallModel(config_of("GPT-2 style")).to_hooked_transformer()


@pytest.mark.skipif(not HAS_HOOKED_TRANSFORMER, reason="transformer-lens 4.x has no HookedTransformer")
def test_other_mixers_are_not_converted():
    model = eh.SmallModel(config_of("GPT-2 style", mixer="linear"))
    with pytest.raises(errors.UnsupportedModelError, match="attention only; this model has linear"):
        model.to_hooked_transformer()


@pytest.mark.parametrize("shape", SHAPES)
def test_no_output_depends_on_a_later_token(shape, tokens):
    model = eh.SmallModel(config_of(shape)).double()
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_attention_is_pytorchs_own_multihead_attention(tokens):
    model = sharpened(eh.SmallModel(config_of("GPT-2 style")))
    attention = model.block_list[0].token_mixer
    oracle = nn.MultiheadAttention(32, 4, batch_first=True)
    oracle.load_state_dict(
        {
            "in_proj_weight": attention.qkv.weight,
            "in_proj_bias": attention.qkv.bias,
            "out_proj.weight": attention.out.weight,
            "out_proj.bias": attention.out.bias,
        }
    )
    x = torch.randn(3, 10, 32, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(10, 10, dtype=torch.bool).triu(1)
    expected, patterns = oracle(x, x, x, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(attention(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attention.effective_pattern(x), patterns, atol=1e-5, rtol=1e-5)


def test_the_same_seed_draws_the_same_weights_whatever_else_is_drawn(tokens):
    state = torch.get_rng_state()
    first = eh.SmallModel(config_of("GPT-2 style"), seed=5)
    assert torch.equal(torch.get_rng_state(), state), "the global generator must be left alone"
    torch.manual_seed(99)
    again, other = eh.SmallModel(config_of("GPT-2 style"), seed=5), eh.SmallModel(config_of("GPT-2 style"), seed=6)
    for (name, mine), theirs in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert not torch.equal(first(tokens), other(tokens))
    deeper = eh.SmallModel(eh.SmallModelConfig(3, 32, 4, vocabulary_size=VOCABULARY, context=CONTEXT), seed=5)
    assert torch.equal(deeper.blocks[1].attn.qkv.weight, first.blocks[1].attn.qkv.weight)


@pytest.mark.parametrize(("initialisation", "embedding_std"), [("pytorch", None), ("gpt2", None), ("gpt2", 0.5)])
def test_the_initialisation_has_the_scale_it_says(initialisation, embedding_std):
    config = eh.SmallModelConfig(
        2,
        256,
        4,
        vocabulary_size=200,
        context=64,
        initialisation=initialisation,
        embedding_std=embedding_std,
    )
    model = eh.SmallModel(config)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    default = {"pytorch": 1.0, "gpt2": 0.02}[initialisation]
    assert weights["embed.weight"].std() == pytest.approx(embedding_std or default, rel=0.05)
    assert weights["pos_embed.weight"].std() == pytest.approx(embedding_std or default, rel=0.05)
    inner, writing = weights["blocks.0.attn.qkv.weight"], weights["blocks.0.mlp.out.weight"]
    if initialisation == "pytorch":
        reference = nn.Linear(1024, 256)
        assert writing.std() == pytest.approx(reference.weight.std().item(), rel=0.05)
        assert writing.abs().max() <= 1024**-0.5
        assert inner.std() == pytest.approx((256 * 3) ** -0.5, rel=0.05)
        assert weights["blocks.0.mlp.out.bias"].std() > 0
    else:
        assert inner.std() == pytest.approx(0.02, rel=0.05)
        assert writing.std() == pytest.approx(0.01, rel=0.05)
        assert weights["blocks.0.mlp.out.bias"].abs().max() == 0
    assert (weights["ln_final.weight"] == 1).all()


class Copying(SequenceTask):
    """Six random tokens, then the same again."""

    vocabulary_size, length, plateau, floor = 5, 12, math.log(5), math.log(5) * 5 / 11

    def batch(self, n, *, seed, step=0, split="train", device="cpu"):
        half = torch.randint(5, (n, 6), generator=torch.Generator().manual_seed(seed))
        tokens = torch.cat([half, half], dim=1)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        return SequenceBatch(tokens, mask, mask)

    def pattern(self):
        pattern = torch.zeros(12, 12, dtype=torch.bool)
        pattern[range(5, 11), range(6)] = True
        return pattern


def test_the_bias_reaches_the_pattern_of_the_chosen_heads():
    task = Copying()
    model = eh.SmallModel(eh.SmallModelConfig(2, 32, 4).for_task(task))
    tokens, truth = task.batch(4, seed=0).tokens, task.pattern()
    on_target = torch.tensor([[5 + i, i] for i in range(6)])

    def mass():
        _, cache = model.run_with_cache(tokens)
        patterns = torch.stack([cache["pattern", layer] for layer in (0, 1)])
        torch.testing.assert_close(patterns.sum(-1), torch.ones(2, 4, 4, 12))
        return patterns[..., on_target[:, 0], on_target[:, 1]].mean((1, 3))  # [layer, head]

    before, plain = mass(), model(tokens)
    with model.attention_bias(truth, 20.0):
        assert (mass() > 0.99).all()
        fast = model(tokens)
        explicit = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda x, hook: x)])
        torch.testing.assert_close(fast, explicit, atol=1e-5, rtol=1e-5)
        assert (fast - plain).abs().max() > 1e-2
        short = model(tokens[:, :8])  # the corner of the pattern
        torch.testing.assert_close(short, fast[:, :8], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mass(), before)
    with model.attention_bias(truth, 20.0, layers=[1], heads=[0, 3]):
        biased = mass()
        assert (biased[1, [0, 3]] > 0.99).all()
        torch.testing.assert_close(biased[0], before[0])
        torch.testing.assert_close(biased[1, [1, 2]], before[1, [1, 2]])
    model.set_attention_bias(truth, 20.0, layers=[0])
    assert (mass()[0] > 0.99).all()
    with model.attention_bias(truth, 0.0, layers=[0]):
        torch.testing.assert_close(mass()[0], before[0])
    assert (mass()[0] > 0.99).all(), "the context gives back the bias that was there"
    model.set_attention_bias(None)
    torch.testing.assert_close(mass(), before)


def test_effective_pattern_of_attention_is_its_pattern(tokens):
    model = sharpened(eh.SmallModel(config_of("GPT-2 style")))
    _, cache = model.run_with_cache(tokens)
    found = eh.effective_pattern(model, tokens)
    assert list(found) == [0, 1]
    for layer, pattern in found.items():
        torch.testing.assert_close(pattern, cache["pattern", layer])
    assert list(eh.effective_pattern(model, tokens, layers=[1])) == [1]
    with pytest.raises(errors.ArgumentError, match="layer 2"):
        eh.effective_pattern(model, tokens, layers=[2])
    with pytest.raises(errors.ArgumentError, match="not a Linear"):
        eh.effective_pattern(nn.Linear(2, 2), tokens)


def test_the_quiet_features_block():
    """Sizes of the reference implementation: hidden units by width, and parameters at width 8 and 64 with 4 layers."""
    hidden = {8: 22, 16: 42, 32: 86, 64: 170, 128: 342, 256: 682, 512: 1366}
    for d_model, d_mlp in hidden.items():
        assert eh.SmallModelConfig.transformer_pp(4, d_model).mlp_size == d_mlp
    for d_model, expected in ((8, 3_208), (64, 196_672)):
        config = eh.SmallModelConfig.transformer_pp(4, d_model)
        model = eh.SmallModel(eh.SmallModelConfig(**{**config.settings(), "vocabulary_size": 9, "context": 32}))
        outside = model.embed.weight.numel() + model.unembed.weight.numel()
        assert sum(parameter.numel() for parameter in model.parameters()) - outside == expected


def test_llama_style_blocks_compute_what_transformers_llama_does(tokens):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = sharpened(eh.SmallModel(config_of("Llama style")))
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=model.config.mlp_size,
            vocab_size=VOCABULARY,
            rms_norm_eps=1e-5,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    weights = {"model.embed_tokens.weight": model.embed.weight, "lm_head.weight": model.unembed.weight}
    weights["model.norm.weight"] = model.ln_final.weight
    for layer, block in enumerate(model.block_list):
        place = f"model.layers.{layer}"
        for name, part in zip("qkv", block.token_mixer.qkv.weight.chunk(3), strict=True):
            weights[f"{place}.self_attn.{name}_proj.weight"] = part
        weights[f"{place}.self_attn.o_proj.weight"] = block.token_mixer.out.weight
        weights[f"{place}.mlp.gate_proj.weight"] = block.mlp.gate.weight
        weights[f"{place}.mlp.up_proj.weight"] = block.mlp.input.weight
        weights[f"{place}.mlp.down_proj.weight"] = block.mlp.out.weight
        weights[f"{place}.input_layernorm.weight"] = block.ln1.weight
        weights[f"{place}.post_attention_layernorm.weight"] = block.ln2.weight
    llama.load_state_dict(weights)
    torch.testing.assert_close(model(tokens), llama(input_ids=tokens).logits, atol=1e-5, rtol=1e-5)


def test_settings_make_the_same_config_again():
    config = config_of("Llama style", mixer=("attention", "linear"))
    assert eh.SmallModelConfig(**config.settings()) == config


def test_for_task_fills_in_what_is_open():
    config = eh.SmallModelConfig(1, 32).for_task(Copying())
    assert (config.vocabulary_size, config.context) == (5, 12)
    assert eh.SmallModelConfig(1, 32, vocabulary_size=9, context=11).for_task(Copying()).context == 11


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_layer": 2}, "no setting 'n_layer'; nearest: n_layers"),
        ({"n_heads": 5}, "d_model 32 does not divide into 5 heads"),
        ({"n_layers": 0}, "n_layers must be a whole number of at least 1, not 0"),
        ({"d_model": 32.0}, "d_model must be a whole number"),
        ({"mixer": "atention"}, "no mixer 'atention'; nearest: attention"),
        ({"mixer": ("attention",)}, "1 mixers for 2 layers"),
        ({"mixer_options": {"hidden_unit": 3}}, "no mixer option 'hidden_unit' for attention; it takes none"),
        ({"mixer": "mamba", "mixer_options": {"state_size": 0}}, "mixer option state_size must be .* not 0"),
        ({"mixer": "mamba", "mixer_options": {"dt_rank": 2.5}}, "mixer option dt_rank must be .* not 2.5"),
        ({"mixer": "mamba", "mixer_options": {"expand": None}}, "mixer option expand must be .* not None"),
        ({"norm": "batch"}, "norm must be layer or rms, not 'batch'"),
        ({"positions": "alibi"}, "positions must be learned or rotary or none"),
        ({"mlp": "relu"}, "mlp must be gelu or swiglu or none"),
        ({"initialisation": "zeros"}, "initialisation must be pytorch or gpt2"),
        ({"positions": "rotary", "d_head": 5}, "rotary positions need an even d_head, not 5"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(errors.ArgumentError, match=message):
        eh.SmallModelConfig(**{"n_layers": 2, "d_model": 32, "n_heads": 4, **settings})


def test_a_task_that_does_not_fit_the_config_is_refused():
    with pytest.raises(errors.ArgumentError, match="5 token ids and the model 4"):
        eh.SmallModelConfig(1, 32, vocabulary_size=4).for_task(Copying())
    with pytest.raises(errors.ArgumentError, match="12 tokens and the model takes at most 10"):
        eh.SmallModelConfig(1, 32, context=10).for_task(Copying())
    with pytest.raises(errors.ArgumentError, match="vocabulary_size and a context"):
        eh.SmallModel(eh.SmallModelConfig(1, 32))
    with pytest.raises(errors.ArgumentError, match="no model for Copying"):
        eh.SmallModelConfig.paper(Copying())


def test_bad_tokens_and_biases_are_refused(tokens):
    model = eh.SmallModel(config_of("GPT-2 style", mixer=("attention", "linear")))
    with pytest.raises(errors.ArgumentError, match="17 tokens; this model takes at most 16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(errors.ArgumentError, match="token id 11: this model has ids 0 to 10"):
        model(torch.tensor([[1, 11]]))
    with pytest.raises(errors.ArgumentError, match="token id -1"):
        model(torch.tensor([[1, -1]]))
    with pytest.raises(errors.ArgumentError, match="must be ids"):
        model(torch.zeros(1, 4))
    pattern = torch.ones(16, 16, dtype=torch.bool)
    with pytest.raises(errors.ArgumentError, match="the mixer of layer 1 is linear"):
        model.set_attention_bias(pattern, 5.0)
    with pytest.raises(errors.ArgumentError, match="layer 2: this model has layers 0 to 1"):
        model.set_attention_bias(pattern, 5.0, layers=[2])
    with pytest.raises(errors.ArgumentError, match="head 4"):
        model.set_attention_bias(pattern, 5.0, layers=[0], heads=[4])
    with pytest.raises(errors.ArgumentError, match=r"shape \[8, 8\] and the model reads 15 positions"):
        model.set_attention_bias(pattern[:8, :8], 5.0, layers=[0])
    assert model.blocks[0].attn.bias is None


def test_the_repr_says_what_it_is():
    assert repr(eh.SmallModel(config_of("GPT-2 style"))).startswith("SmallModel(attention: n_layers=2, d_model=32,")
