"""Mamba against transformers' mixer, and its hooks and hand-written gradients against the recurrence step by step."""

import pytest
import recurrent_mixers as contract
import torch
from recurrent_mixers import LENGTH, ROWS, tokens
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

import emergent_heads as eh
from emergent_heads.models.mixers.mamba import Mamba, selective_scan

CHANNELS, STATE = 32, 5
HOOKS = {
    "hook_gate_input": (CHANNELS,),
    "hook_conv": (CHANNELS,),
    "hook_ssm_x": (CHANNELS,),
    "hook_ssm_dt": (CHANNELS,),
    "hook_ssm_B": (STATE,),
    "hook_ssm_C": (STATE,),
    "hook_ssm_decay": (CHANNELS, STATE),
    "hook_ssm_write": (CHANNELS, STATE),
    "hook_ssm_state": (CHANNELS, STATE),
    "hook_recurrence_out": (CHANNELS,),
    "hook_z": (CHANNELS,),
}


def small_model(seed=0, **settings):
    return contract.small_model("mamba", seed, **{"mixer_options": {"state_size": STATE}, **settings})


def mixer(seed=0, **settings) -> Mamba:
    return small_model(seed, **settings).block_list[0].token_mixer


def counterparts(theirs, of):
    input_weight, gate_weight = of(theirs.in_proj.weight).chunk(2)
    input_bias, gate_bias = of(theirs.in_proj.bias).chunk(2)
    return {
        "input.weight": input_weight,
        "input.bias": input_bias,
        "gate.weight": gate_weight,
        "gate.bias": gate_bias,
        "conv.weight": of(theirs.conv1d.weight),
        "conv.bias": of(theirs.conv1d.bias),
        "select.weight": of(theirs.x_proj.weight),
        "dt.weight": of(theirs.dt_proj.weight),
        "dt.bias": of(theirs.dt_proj.bias),
        "A_log": of(theirs.A_log),
        "D": of(theirs.D),
        "out.weight": of(theirs.out_proj.weight),
        "out.bias": of(theirs.out_proj.bias),
    }


@pytest.mark.parametrize("length", [1, 3, 8, 21])
def test_it_is_the_mixer_of_transformers_in_outputs_and_gradients(length):
    torch.manual_seed(0)
    ours = mixer()
    with torch.no_grad():  # away from the values they start with
        ours.A_log.add_(torch.randn_like(ours.A_log) * 0.3)
        ours.D.add_(torch.randn_like(ours.D))
        ours.select.weight.mul_(3)
    config = MambaConfig(hidden_size=16, state_size=STATE, time_step_rank=ours.dt_rank, use_bias=True)
    contract.check_same_as(ours, MambaMixer(config, 0), torch.randn(3, length, 16), counterparts)


def test_the_scans_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.double, requires_grad=True)

    def scan(x, log_dt, a_log, b, c, d):
        return selective_scan(x, log_dt.exp(), -a_log.exp(), b, c, d)

    arguments = (drawn(2, 11, 3), drawn(2, 11, 3), drawn(3, 2), drawn(2, 11, 2), drawn(2, 11, 2), drawn(3))
    assert torch.autograd.gradcheck(scan, arguments)


def test_no_output_depends_on_a_later_token():
    contract.check_causality(small_model())


def test_listening_changes_nothing_and_hears_everything():
    cache = contract.check_listening(small_model(), HOOKS)
    decay, write, state = (cache[f"blocks.0.mixer.hook_ssm_{name}"] for name in ("decay", "write", "state"))
    torch.testing.assert_close(state[:, 1:], decay[:, 1:] * state[:, :-1] + write[:, 1:])


@pytest.mark.parametrize("hook", HOOKS)
def test_editing_a_hook_reaches_the_output(hook):
    contract.check_editing(small_model(), hook)


def test_gradients_are_the_same_step_by_step():
    contract.check_gradients_when_listening(small_model(), "hook_ssm_state")


def test_its_pattern_mixes_the_scans_input_into_its_output():
    model = small_model()
    _, cache = model.run_with_cache(tokens())
    pattern = eh.effective_pattern(model, tokens(), [0])[0]
    assert pattern.shape == (ROWS, CHANNELS, LENGTH, LENGTH)
    x = cache["blocks.0.mixer.hook_ssm_x"]
    mixed = torch.einsum("rcds,rsc->rdc", pattern, x)
    skipped = cache["blocks.0.mixer.hook_recurrence_out"] - x * model.block_list[0].token_mixer.D
    torch.testing.assert_close(mixed, skipped, atol=1e-6, rtol=1e-4)
    assert mixed.abs().max() > 1e-4
    assert pattern.triu(1).abs().max() == 0


def test_seeds_train_with_stacked_parameters():
    contract.check_stacked_training([small_model(seed) for seed in range(2)])


def test_under_autocast_the_scan_keeps_single_precision():
    ours = mixer()
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(x)
    output.float().pow(2).sum().backward()
    torch.testing.assert_close(output.float(), ours(x), atol=0.02, rtol=0.05)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_second_derivatives_are_refused_with_a_way_out():
    ours = mixer()
    x = torch.randn(1, 4, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice; hook hook_ssm_state"):
        gradient.sum().backward()
    ours.hook_ssm_state.register_forward_hook(lambda *_: None)
    (gradient,) = torch.autograd.grad(ours(x).pow(2).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0


def test_it_starts_with_the_papers_values():
    contract.check_drawing(mixer, constant={"A_log", "D"})
    ours = mixer()
    steps = torch.nn.functional.softplus(ours.dt.bias)
    assert 0.0009 < steps.min() < 0.005
    assert 0.03 < steps.max() < 0.1001
    torch.testing.assert_close(ours.A_log.exp(), torch.arange(1.0, STATE + 1).expand(CHANNELS, STATE))
