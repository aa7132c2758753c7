"""Mamba-2 against transformers' mixer, its chunks against the recurrence step by step, and its hooks."""

import pytest
import recurrent_mixers as contract
import torch
from recurrent_mixers import LENGTH, ROWS, tokens
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

import emergent_heads as eh
from emergent_heads.models.mixers.mamba2 import Mamba2, chunked_recurrence

HEADS, SIZE, STATE = 4, 8, 6
HOOKS = {
    "hook_gate_input": (HEADS * SIZE,),
    "hook_conv": (HEADS * SIZE + 2 * STATE,),
    "hook_ssm_x": (HEADS, SIZE),
    "hook_ssm_B": (STATE,),
    "hook_ssm_C": (STATE,),
    "hook_ssm_dt": (HEADS,),
    "hook_ssm_decay": (HEADS,),
    "hook_ssm_write": (HEADS, SIZE, STATE),
    "hook_ssm_state": (HEADS, SIZE, STATE),
    "hook_recurrence_out": (HEADS, SIZE),
    "hook_z": (HEADS * SIZE,),
}


def small_model(seed=0, chunk_size=8):
    return contract.small_model("mamba2", seed, mixer_options={"state_size": STATE, "chunk_size": chunk_size})


def mixer(seed=0, chunk_size=8) -> Mamba2:
    return small_model(seed, chunk_size).block_list[0].token_mixer


def counterparts(theirs, of):
    sizes = [HEADS * SIZE, HEADS * SIZE + 2 * STATE, HEADS]
    gate_weight, input_weight, dt_weight = of(theirs.in_proj.weight).split(sizes)
    gate_bias, input_bias, dt_bias = of(theirs.in_proj.bias).split(sizes)
    return {
        "gate.weight": gate_weight,
        "gate.bias": gate_bias,
        "input.weight": input_weight,
        "input.bias": input_bias,
        "dt.weight": dt_weight,
        "dt.bias": dt_bias,
        "conv.weight": of(theirs.conv1d.weight),
        "conv.bias": of(theirs.conv1d.bias),
        "dt_bias": of(theirs.dt_bias),
        "A_log": of(theirs.A_log),
        "D": of(theirs.D),
        "norm_weight": of(theirs.norm.weight),
        "out.weight": of(theirs.out_proj.weight),
        "out.bias": of(theirs.out_proj.bias),
    }


@pytest.mark.parametrize(("length", "chunk_size"), [(1, 8), (3, 8), (8, 8), (21, 8), (21, 5), (21, 64), (20, 1)])
def test_it_is_the_mixer_of_transformers_in_outputs_and_gradients(length, chunk_size):
    torch.manual_seed(0)
    ours = mixer(chunk_size=chunk_size)
    with torch.no_grad():  # away from the values they start with
        ours.D.add_(torch.randn_like(ours.D))
        ours.norm_weight.add_(torch.randn_like(ours.norm_weight) * 0.3)
        ours.input.weight.mul_(2)
    config = Mamba2Config(
        hidden_size=16, num_heads=HEADS, head_dim=SIZE, state_size=STATE, n_groups=1, chunk_size=7, use_bias=True
    )
    contract.check_same_as(ours, Mamba2Mixer(config, 0), torch.randn(3, length, 16), counterparts)


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 100])
def test_chunks_are_the_recurrence_however_strong_the_decay(chunk_size):
    torch.manual_seed(0)
    x = torch.randn(2, 19, 3, 4, dtype=torch.double)
    b, c = torch.randn(2, 2, 19, 5, dtype=torch.double)
    dt = torch.rand(2, 19, 3, dtype=torch.double)
    a, d = -torch.tensor([0.01, 1.0, 3000.0], dtype=torch.double), torch.randn(3, dtype=torch.double)
    state, outputs = torch.zeros(2, 3, 4, 5, dtype=torch.double), []
    for t in range(19):
        decay, write = (dt[:, t] * a).exp(), dt[:, t, :, None] * x[:, t]
        state = decay[..., None, None] * state + write[..., None] * b[:, t, None, None]
        outputs.append(torch.einsum("rhps,rs->rhp", state, c[:, t]) + d[:, None] * x[:, t])
    arguments = (x, dt, a, b, c, d)
    for argument in arguments:
        argument.requires_grad_()
    output = chunked_recurrence(*arguments, chunk_size)
    torch.testing.assert_close(output, torch.stack(outputs, 1))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), arguments))


def test_no_output_depends_on_a_later_token():
    contract.check_causality(small_model())


def test_listening_changes_nothing_and_hears_everything():
    cache = contract.check_listening(small_model(), HOOKS)
    decay, write, state = (cache[f"blocks.0.mixer.hook_ssm_{name}"] for name in ("decay", "write", "state"))
    torch.testing.assert_close(state[:, 1:], decay[:, 1:, :, None, None] * state[:, :-1] + write[:, 1:])


@pytest.mark.parametrize("hook", HOOKS)
def test_editing_a_hook_reaches_the_output(hook):
    contract.check_editing(small_model(), hook)


def test_gradients_are_the_same_step_by_step():
    contract.check_gradients_when_listening(small_model(), "hook_ssm_state")


def test_its_pattern_mixes_the_heads_inputs_into_their_outputs():
    model = small_model()
    _, cache = model.run_with_cache(tokens())
    pattern = eh.effective_pattern(model, tokens(), [0])[0]
    assert pattern.shape == (ROWS, HEADS, LENGTH, LENGTH)
    x = cache["blocks.0.mixer.hook_ssm_x"]
    mixed = torch.einsum("rhds,rshp->rdhp", pattern, x)
    skipped = cache["blocks.0.mixer.hook_recurrence_out"] - x * model.block_list[0].token_mixer.D[:, None]
    torch.testing.assert_close(mixed, skipped, atol=1e-6, rtol=1e-4)
    assert mixed.abs().max() > 1e-4
    assert pattern.triu(1).abs().max() == 0


def test_seeds_train_with_stacked_parameters():
    contract.check_stacked_training([small_model(seed) for seed in range(2)])


def test_under_autocast_it_stays_near_single_precision():
    ours = mixer()
    x = torch.randn(2, 19, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(x)
    output.float().pow(2).sum().backward()
    torch.testing.assert_close(output.float(), ours(x), atol=0.03, rtol=0.05)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_it_starts_with_the_papers_values():
    contract.check_drawing(mixer, constant={"D", "norm_weight"})
    ours = mixer()
    assert 0.0009 < torch.nn.functional.softplus(ours.dt_bias).min() < 0.1001
    assert 1 <= ours.A_log.exp().min() < ours.A_log.exp().max() <= 16
