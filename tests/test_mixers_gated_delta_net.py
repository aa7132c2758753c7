"""Gated DeltaNet: against a slow recurrence and transformers' own module, causality, hooks, the matrix it implies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_mixers import check_half_precision, check_pattern_mixes_any_values, check_stacked_gradients, drawn
from transformer_lens.hook_points import HookPoint

import emergent_heads as eh
from emergent_heads.errors import ArgumentError
from emergent_heads.models.mixers.gated_delta_net import GatedDeltaNet, gated_delta_rule, gated_delta_states
from emergent_heads.models.small import SmallModel, SmallModelConfig

HOOKS = {"q", "k", "v", "beta", "log_decay", "state", "recurrence_out", "gate_input", "z"}
OPTIONS = {"d_key": 6, "d_value": 10, "chunk_size": 8}


def config_of(**changed) -> SmallModelConfig:
    shape = {"mixer": "gated_delta_net", "mixer_options": OPTIONS, "vocabulary_size": 11, "context": 40}
    return SmallModelConfig(2, 16, **{"n_heads": 2, **shape, **changed})


def inputs(length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, beta, log decay of two rows and three heads."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(2, length, 3, *shape, generator=generator, dtype=dtype)

    drawn_inputs = [normal(5), normal(5), normal(7), normal().sigmoid(), -normal().exp() / 3]
    return [each.requires_grad_() for each in drawn_inputs]


def slow(q, k, v, beta, log_decay):
    """Output and states, from the paper's equation (10): S <- S (a (I - b k k^T)) + b v k^T, one head at a time."""
    outs, states = torch.zeros_like(v), torch.zeros(*v.shape, k.shape[-1], dtype=v.dtype)
    q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / q.shape[-1] ** 0.5
    k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    for row in range(v.shape[0]):
        for head in range(v.shape[2]):
            state = torch.zeros(v.shape[-1], k.shape[-1], dtype=v.dtype)
            for t in range(v.shape[1]):
                key, strength = k[row, t, head], beta[row, t, head]
                kept = torch.eye(len(key), dtype=v.dtype) - strength * torch.outer(key, key)
                state = log_decay[row, t, head].exp() * state @ kept + strength * torch.outer(v[row, t, head], key)
                outs = outs.index_put(tuple(map(torch.tensor, (row, t, head))), state @ q[row, t, head])
                states = states.index_put(tuple(map(torch.tensor, (row, t, head))), state)
    return outs, states.transpose(-1, -2)


def assert_same_function(ours, theirs, tensors, **tolerance):
    """Both give the same output, and the same gradients of a random weighting of it, for every tensor."""
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9)).to(ours)
    torch.testing.assert_close(ours, theirs, **tolerance)
    gradients = [torch.autograd.grad((out * weights).sum(), tensors) for out in (ours, theirs)]
    for ours_gradient, their_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(ours_gradient, their_gradient, **tolerance)


@settings(max_examples=12, deadline=None)
@given(length=st.integers(1, 13), chunk_size=st.integers(1, 14), seed=st.integers(0, 99))
def test_chunks_of_any_size_agree_with_the_slow_recurrence(length, chunk_size, seed):
    tensors = inputs(length, seed=seed)
    assert_same_function(gated_delta_rule(*tensors, chunk_size), slow(*tensors)[0], tensors, rtol=1e-9, atol=1e-10)


def test_states_agree_with_the_slow_recurrence():
    tensors = inputs(9)
    assert_same_function(gated_delta_states(*tensors[1:]), slow(*tensors)[1], tensors[1:], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length", [1, 31, 64, 77])
@pytest.mark.parametrize("theirs", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_rule_agrees_with_transformers(theirs, length):
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    if not hasattr(module, theirs):
        pytest.skip(f"this transformers has no {theirs}")
    tensors = inputs(length, torch.float32)
    q, k, v, beta, log_decay = tensors
    reference, _ = getattr(module, theirs)(q, k, v, g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True)
    assert_same_function(gated_delta_rule(*tensors, 16), reference, tensors, rtol=1e-4, atol=1e-4)


def test_the_mixer_agrees_with_qwen3_next_with_its_weights():
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    if not hasattr(module, "Qwen3NextGatedDeltaNet"):
        pytest.skip("this transformers has no Qwen3NextGatedDeltaNet")
    d_key, d_value, heads = OPTIONS["d_key"], OPTIONS["d_value"], 2
    their_config = module.Qwen3NextConfig(
        hidden_size=16,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=d_key,
        linear_value_head_dim=d_value,
    )
    theirs = drawn(module.Qwen3NextGatedDeltaNet(their_config, 0))
    ours = GatedDeltaNet(config_of(biases=False), 0, **OPTIONS)

    # Theirs has q, k, v and gate of each head together, and so the rows of beta and decay.
    def in_our_order(qkvz, gates):
        by_head = qkvz.unflatten(0, (heads, -1)).split((d_key, d_key, d_value, d_value), 1)
        return torch.cat([*(each.flatten(0, 1) for each in by_head), *gates.unflatten(0, (heads, 2)).transpose(0, 1)])

    with torch.no_grad():
        ours.input.weight.copy_(in_our_order(theirs.in_proj_qkvz.weight, theirs.in_proj_ba.weight))
        ours.convolution.weight.copy_(theirs.conv1d.weight)
        ours.log_rate.copy_(theirs.A_log)
        ours.rate_bias.copy_(theirs.dt_bias)
        ours.norm_weight.copy_(theirs.norm.weight)
        ours.out.weight.copy_(theirs.out_proj.weight)
    x = torch.randn(3, 29, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert_same_function(ours(x), theirs(x), [x], rtol=1e-4, atol=1e-4)
    for mixer in (ours, theirs):
        mixer(x).square().sum().backward()
    pairs = [
        (ours.convolution.weight, theirs.conv1d.weight),
        (ours.log_rate, theirs.A_log),
        (ours.rate_bias, theirs.dt_bias),
        (ours.norm_weight, theirs.norm.weight),
        (ours.out.weight, theirs.out_proj.weight),
    ]
    for our_parameter, their_parameter in pairs:
        torch.testing.assert_close(our_parameter.grad, their_parameter.grad, rtol=1e-4, atol=1e-4)
    expected = in_our_order(theirs.in_proj_qkvz.weight.grad, theirs.in_proj_ba.weight.grad)
    torch.testing.assert_close(ours.input.weight.grad, expected, rtol=1e-4, atol=1e-4)


def test_repeated_keys_lose_no_precision():
    """The triangular system is at its worst when every position has the same key and overwrites it."""
    q, k, v, _, _ = inputs(64)
    k = k[:, :1].expand_as(k)
    ones = torch.ones(k.shape[:3], dtype=k.dtype)
    exact = gated_delta_rule(q, k, v, ones, 0 * ones, chunk_size=1)
    single = gated_delta_rule(*(each.float() for each in (q, k, v, ones, 0 * ones)), chunk_size=64)
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", [0, 7, 8, 20])
def test_no_output_depends_on_later_tokens(position):
    model = drawn(SmallModel(config_of()))
    tokens = torch.randint(11, (2, 21), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, position] = (tokens[:, position] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :position], after[:, :position], rtol=1e-5, atol=1e-6)
    assert ((before - after).abs().amax(-1)[:, position:] > 1e-6).all()


def test_editing_any_hook_changes_the_output():
    model = drawn(SmallModel(config_of()))
    tokens = torch.randint(11, (2, 19), generator=torch.Generator().manual_seed(0))
    plain = model(tokens)
    points = {name for name, each in model.blocks[0].mixer.named_modules() if isinstance(each, HookPoint)}
    assert points == {f"hook_{name}" for name in HOOKS}
    generator = torch.Generator().manual_seed(0)

    def scale(value, hook):
        return value * (1 + torch.rand(value.shape, generator=generator))

    for name in points:
        edited = model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.0.mixer.{name}", scale)])
        assert (edited - plain).abs().max() > 1e-4, name


def test_listening_to_the_states_changes_nothing():
    model = drawn(SmallModel(config_of()))
    tokens = torch.randint(11, (2, 27), generator=torch.Generator().manual_seed(0))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(tokens, "loss").backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    logits, plain = model(tokens), gradients()
    listened, cache = model.run_with_cache(tokens)
    with model.hooks(fwd_hooks=[("blocks.0.mixer.hook_state", lambda value, hook: None)]):
        stepwise = gradients()
    torch.testing.assert_close(listened, logits, rtol=1e-5, atol=1e-5)
    for one, other in zip(plain, stepwise, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    arguments = (cache[f"blocks.1.mixer.hook_{name}"] for name in ("q", "k", "v", "beta", "log_decay"))
    out, states = slow(*arguments)
    torch.testing.assert_close(cache["blocks.1.mixer.hook_state"], states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache["blocks.1.mixer.hook_recurrence_out"], out, rtol=1e-5, atol=1e-5)


def test_the_effective_pattern_mixes_any_values_as_the_recurrence_does():
    check_pattern_mixes_any_values(drawn(SmallModel(config_of())), OPTIONS["d_value"], rtol=1e-5, atol=1e-5)


def test_stacked_parameters_give_each_seed_its_own_gradients():
    check_stacked_gradients([drawn(GatedDeltaNet(config_of(), 0, **OPTIONS), seed) for seed in (0, 1)])


def test_half_precision_is_kept_out_of_the_recurrence():
    check_half_precision(GatedDeltaNet(config_of(), 0, **OPTIONS))


def test_decays_start_with_the_papers_spread():
    mixers = [SmallModel(config_of(n_heads=16, d_head=1), seed).blocks[0].mixer for seed in (0, 0, 1)]
    rates = mixers[0].log_rate.exp()
    steps = torch.nn.functional.softplus(mixers[0].rate_bias)
    assert ((rates > 0.01) & (rates < 16)).all()
    assert rates.std() > 1
    assert ((steps > 0.0009) & (steps < 0.11)).all()
    assert steps.log().std() > 0.3
    assert torch.equal(mixers[0].log_rate, mixers[1].log_rate)
    assert not torch.equal(mixers[0].log_rate, mixers[2].log_rate)


@pytest.mark.parametrize("option", ["d_key", "d_value", "chunk_size", "kernel_size"])
def test_sizes_below_one_are_refused(option):
    with pytest.raises(ArgumentError, match=option):
        SmallModel(config_of(mixer_options={option: 0}))


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(ArgumentError, match="chunk_size"):
        eh.SmallModelConfig(2, 16, 2, mixer="gated_delta_net", mixer_options={"chunksize": 8})
