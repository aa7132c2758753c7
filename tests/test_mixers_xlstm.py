"""mLSTM: against a slow recurrence and transformers' own layer, causality, hooks, the matrix it implies."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_mixers import check_half_precision, check_pattern_mixes_any_values, check_stacked_gradients, drawn
from transformer_lens.hook_points import HookPoint

import emergent_heads as eh
from emergent_heads.errors import ArgumentError
from emergent_heads.models.mixers import xlstm
from emergent_heads.models.mixers.xlstm import XLSTM, mlstm, mlstm_states
from emergent_heads.models.small import SmallModel, SmallModelConfig

HOOKS = {
    *("q", "k", "v", "input_gate", "forget_gate", "state", "normaliser"),
    *("recurrence_out", "output_gate", "z"),
}
OPTIONS = {"d_key": 6, "d_value": 10, "chunk_size": 8}


def config_of(**changed) -> SmallModelConfig:
    shape = {"mixer": "xlstm", "mixer_options": OPTIONS, "vocabulary_size": 11, "context": 40}
    return SmallModelConfig(2, **{"d_model": 16, "n_heads": 2, **shape, **changed})


def inputs(length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, input and forget gate (before exponential and sigmoid) of two rows and three heads."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(2, length, 3, *shape, generator=generator, dtype=dtype)

    return [each.requires_grad_() for each in (normal(5), normal(5), normal(7), normal(), normal() + 1)]


def slow(q, k, v, input_gate, forget_gate):
    """Output, state and normaliser as the paper's equations (19) to (21) have them, one head at a time, undivided."""
    outs, states, normalisers = (torch.zeros_like(v), torch.zeros(*v.shape, k.shape[-1], dtype=v.dtype), 0 * k)
    for row in range(v.shape[0]):
        for head in range(v.shape[2]):
            state, normaliser = 0 * torch.outer(v[row, 0, head], k[row, 0, head]), 0 * k[row, 0, head]
            for t in range(v.shape[1]):
                key, query = k[row, t, head], q[row, t, head] / q.shape[-1] ** 0.5
                keep, enter = forget_gate[row, t, head].sigmoid(), input_gate[row, t, head].exp()
                state = keep * state + enter * torch.outer(v[row, t, head], key)
                normaliser = keep * normaliser + enter * key
                index = tuple(map(torch.tensor, (row, t, head)))
                outs = outs.index_put(index, state @ query / (normaliser @ query).abs().clamp(min=1.0))
                states = states.index_put(index, state)
                normalisers = normalisers.index_put(index, normaliser)
    return outs, states.transpose(-1, -2), normalisers


def assert_same_function(ours, theirs, tensors, **tolerance):
    """Both give the same output, and the same gradients of a random weighting of it, for every tensor."""
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9)).to(ours)
    torch.testing.assert_close(ours, theirs, **tolerance)
    gradients = [torch.autograd.grad((out * weights).sum(), tensors, materialize_grads=True) for out in (ours, theirs)]
    for ours_gradient, their_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(ours_gradient, their_gradient, **tolerance)


@settings(max_examples=12, deadline=None)
@given(length=st.integers(1, 13), chunk_size=st.integers(1, 14), seed=st.integers(0, 99))
def test_chunks_of_any_size_agree_with_the_slow_recurrence(length, chunk_size, seed):
    tensors = inputs(length, seed=seed)
    with mock.patch.object(xlstm, "_EPSILON", 0.0):  # the paper's equations have none
        ours = mlstm(*tensors, chunk_size)
    assert_same_function(ours, slow(*tensors)[0], tensors, rtol=1e-9, atol=1e-10)


def test_states_agree_with_the_slow_recurrence():
    tensors = inputs(9)
    state, normaliser, log_scale = mlstm_states(*tensors[1:])
    _, slow_state, slow_normaliser = slow(*tensors)
    ours = torch.cat([state, normaliser[..., None]], dim=-1) * log_scale.exp()[..., None, None]
    theirs = torch.cat([slow_state, slow_normaliser[..., None]], dim=-1)
    assert_same_function(ours, theirs, tensors[1:], rtol=1e-9, atol=1e-10)


def transformers_xlstm():
    module = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    if not hasattr(module, "xLSTMLayer") or not hasattr(module, "mlstm_recurrent_sequence_native"):
        pytest.skip("this transformers has no native mLSTM, or the package xlstm stands in its place")
    return module


@pytest.mark.parametrize("length", [1, 31, 64, 77])
@pytest.mark.parametrize("theirs", ["mlstm_recurrent_sequence_native", "mlstm_chunkwise_native_autograd"])
def test_the_cell_agrees_with_transformers(theirs, length):
    function = getattr(transformers_xlstm(), theirs)
    tensors = inputs(length, torch.float64)
    by_head = [each.transpose(1, 2) for each in tensors]
    chunk = {"chunk_size": 32 if length == 64 else length} if "chunkwise" in theirs else {}
    if chunk:  # it takes views, which want contiguous tensors
        by_head = [each.contiguous() for each in by_head]
    kept = {} if chunk else {"dtype_state": torch.float64}
    reference = function(*by_head, **chunk, **kept).transpose(1, 2)
    assert_same_function(mlstm(*tensors, 16), reference, tensors, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_the_mixer_agrees_with_transformers_layer_with_its_weights(mode, biases):
    module = transformers_xlstm()
    their_config = module.xLSTMConfig(
        hidden_size=20, num_heads=2, qk_dim_factor=0.6, v_dim_factor=1.0, mode=mode, chunk_size=16, use_bias=biases
    )
    theirs = drawn(module.xLSTMLayer(their_config))
    ours = XLSTM(config_of(d_model=20, biases=biases), 0, **OPTIONS)
    ours_to_theirs = {
        "input": (theirs.q, theirs.k, theirs.v, theirs.ogate_preact),
        "gates": (theirs.igate_preact, theirs.fgate_preact),
        "out": (theirs.out_proj,),
    }
    with torch.no_grad():
        for name, modules in ours_to_theirs.items():
            ours.get_submodule(name).weight.copy_(torch.cat([each.weight for each in modules]))
            if modules[0].bias is not None:
                ours.get_submodule(name).bias.copy_(torch.cat([each.bias for each in modules]))
        ours.norm_weight.copy_(theirs.multihead_norm.weight.view(2, -1))
        if biases:
            ours.norm_bias.copy_(theirs.multihead_norm.bias.view(2, -1))
    x = torch.randn(3, 48, 20, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert_same_function(ours(x), theirs(x)[0], [x], rtol=1e-4, atol=1e-4)
    ours(x).square().mean().backward()
    theirs(x)[0].square().mean().backward()
    for name, modules in ours_to_theirs.items():
        for part in ("weight", "bias") if biases or name == "gates" else ("weight",):
            gradient = getattr(ours.get_submodule(name), part).grad
            expected = torch.cat([getattr(each, part).grad for each in modules])
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        ours.norm_weight.grad.flatten(), theirs.multihead_norm.weight.grad, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("extreme", [15.0, -15.0])
def test_gates_at_their_cap_overflow_nowhere(extreme):
    """Far more than 88, the most that a 32-bit exponential takes, adds up over the sequence."""
    tensors = inputs(40, torch.float32)
    gates = [torch.full_like(tensors[3], sign * extreme).requires_grad_() for sign in (1, -1)]
    out = mlstm(*tensors[:3], *gates, 16)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(each.grad.isfinite().all() for each in (*tensors[:3], *gates))


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

    for name in points - {"hook_normaliser"}:
        edited = model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.0.mixer.{name}", scale)])
        assert (edited - plain).abs().max() > 1e-4, name


def test_editing_the_normaliser_changes_what_the_cell_reads():
    """Not much of the output: the heads' LayerNorm takes the scale of what was read away again."""
    model = drawn(SmallModel(config_of()))
    tokens = torch.randint(11, (2, 19), generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(tokens)
    with model.hooks(fwd_hooks=[("blocks.0.mixer.hook_normaliser", lambda value, hook: 10 * value)]):
        _, edited = model.run_with_cache(tokens)
    change = edited["blocks.0.mixer.hook_recurrence_out"] / cache["blocks.0.mixer.hook_recurrence_out"]
    assert change.min() < 0.5
    assert not torch.equal(edited["blocks.0.hook_mixer_out"], cache["blocks.0.hook_mixer_out"])


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
    arguments = [cache[f"blocks.1.mixer.hook_{name}"] for name in ("q", "k", "v", "input_gate", "forget_gate")]
    out, state, normaliser = slow(*arguments)
    scale = mlstm_states(*arguments[1:])[2].exp()[..., None]
    torch.testing.assert_close(cache["blocks.1.mixer.hook_state"] * scale[..., None], state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache["blocks.1.mixer.hook_normaliser"] * scale, normaliser, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache["blocks.1.mixer.hook_recurrence_out"], out, rtol=1e-4, atol=1e-5)


def test_the_effective_pattern_mixes_any_values_as_the_cell_does():
    check_pattern_mixes_any_values(drawn(SmallModel(config_of())), OPTIONS["d_value"], rtol=1e-4, atol=1e-5)


def test_stacked_parameters_give_each_seed_its_own_gradients():
    check_stacked_gradients([drawn(XLSTM(config_of(), 0, **OPTIONS), seed) for seed in (0, 1)])


def test_half_precision_is_kept_out_of_the_recurrence():
    check_half_precision(XLSTM(config_of(), 0, **OPTIONS))


def test_gates_start_nearly_all_kept_and_the_same_for_every_input():
    mixers = [SmallModel(config_of(), seed).blocks[0].mixer for seed in (0, 0, 1)]
    assert (mixers[0].gates.weight == 0).all()
    input_biases, forget_biases = mixers[0].gates.bias.chunk(2)
    assert forget_biases.tolist() == [3.0, 6.0]
    assert ((input_biases != 0) & (input_biases.abs() < 0.6)).all()
    assert torch.equal(mixers[0].gates.bias, mixers[1].gates.bias)
    assert not torch.equal(mixers[0].gates.bias, mixers[2].gates.bias)


@pytest.mark.parametrize("option", ["d_key", "d_value", "chunk_size", "gate_cap"])
def test_sizes_and_caps_that_make_no_sense_are_refused(option):
    with pytest.raises(ArgumentError, match=option):
        SmallModel(config_of(mixer_options={option: 0}))


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(ArgumentError, match="gate_cap"):
        eh.SmallModelConfig(2, 16, 2, mixer="xlstm", mixer_options={"gatecap": 8})
