"""RG-LRU against RecurrentGemma's recurrent block in transformers, and its hooks against its fast path."""

import pytest
import recurrent_mixers as contract
import torch
from recurrent_mixers import LENGTH, ROWS, tokens
from transformers.models.recurrent_gemma.configuration_recurrent_gemma import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

import emergent_heads as eh
from emergent_heads.errors import ArgumentError
from emergent_heads.models.mixers.linear_rnn import LinearRNN
from emergent_heads.models.mixers.recurrence import linear_recurrence

WIDTH, HEADS = 24, 4
HOOKS = (
    "hook_gate_input",
    "hook_conv",
    "hook_input_gate",
    "hook_recurrence_gate",
    "hook_ssm_decay",
    "hook_ssm_write",
    "hook_ssm_state",
    "hook_z",
)


def small_model(seed=0, **settings):
    return contract.small_model("linear_rnn", seed, **{"mixer_options": {"width": WIDTH}, **settings})


def mixer(seed=0) -> LinearRNN:
    return small_model(seed).block_list[0].token_mixer


def counterparts(theirs, of):
    return {
        "gate.weight": of(theirs.linear_y.weight),
        "gate.bias": of(theirs.linear_y.bias),
        "input.weight": of(theirs.linear_x.weight),
        "input.bias": of(theirs.linear_x.bias),
        "conv.weight": of(theirs.conv_1d.weight),
        "conv.bias": of(theirs.conv_1d.bias),
        "decay_parameter": of(theirs.rg_lru.recurrent_param),
        "input_gate_weight": of(theirs.rg_lru.input_gate_weight),
        "input_gate_bias": of(theirs.rg_lru.input_gate_bias),
        "recurrence_gate_weight": of(theirs.rg_lru.recurrent_gate_weight),
        "recurrence_gate_bias": of(theirs.rg_lru.recurrent_gate_bias),
        "out.weight": of(theirs.linear_out.weight),
        "out.bias": of(theirs.linear_out.bias),
    }


@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_it_is_recurrent_gemmas_block_in_outputs_and_gradients(length):
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(hidden_size=16, lru_width=WIDTH, num_attention_heads=HEADS)
    positions = torch.arange(length)[None].expand(3, -1)

    def call(block, x):
        return block(x, positions, attention_mask=None, use_cache=False)[0]

    block = RecurrentGemmaRecurrentBlock(config, 0)
    contract.check_same_as(mixer(), block, torch.randn(3, length, 16), counterparts, call)


def test_recurrence_is_a_loop_with_its_gradients():
    torch.manual_seed(0)
    decay = torch.rand(1, 5, 1, 2, dtype=torch.double, requires_grad=True)
    write = torch.randn(1, 5, 2, 2, dtype=torch.double, requires_grad=True)
    state, states = torch.zeros(1, 2, 2, dtype=torch.double), []
    for t in range(5):
        state = decay[:, t] * state + write[:, t]
        states.append(state)
    torch.testing.assert_close(linear_recurrence(decay, write), torch.stack(states, 1))
    assert torch.autograd.gradcheck(linear_recurrence, (decay, write))
    assert torch.autograd.gradgradcheck(linear_recurrence, (decay, write))


def test_no_output_depends_on_a_later_token():
    contract.check_causality(small_model())


def test_listening_changes_nothing_and_hears_everything():
    cache = contract.check_listening(small_model(), dict.fromkeys(HOOKS, (WIDTH,)))
    decay, write, state = (cache[f"blocks.0.mixer.hook_ssm_{name}"] for name in ("decay", "write", "state"))
    torch.testing.assert_close(state[:, 1:], decay[:, 1:] * state[:, :-1] + write[:, 1:])


@pytest.mark.parametrize("hook", HOOKS)
def test_editing_a_hook_reaches_the_output(hook):
    contract.check_editing(small_model(), hook)


def test_its_pattern_mixes_the_convolutions_output_into_the_states():
    model = small_model()
    _, cache = model.run_with_cache(tokens())
    pattern = eh.effective_pattern(model, tokens(), [0])[0]
    assert pattern.shape == (ROWS, WIDTH, LENGTH, LENGTH)
    mixed = torch.einsum("rcds,rsc->rdc", pattern, cache["blocks.0.mixer.hook_conv"])
    torch.testing.assert_close(mixed, cache["blocks.0.mixer.hook_ssm_state"], atol=1e-5, rtol=1e-4)
    assert pattern.triu(1).abs().max() == 0


def test_seeds_train_with_stacked_parameters():
    contract.check_stacked_training([small_model(seed) for seed in range(2)])


def test_a_width_that_does_not_divide_into_the_heads_is_refused():
    with pytest.raises(ArgumentError, match="18 channels do not divide into 4 heads"):
        small_model(mixer_options={"width": 18})


def test_draws_are_slow_decays_and_depend_on_the_seed():
    contract.check_drawing(mixer, constant={"input_gate_bias", "recurrence_gate_bias"})
    decay = torch.exp(-torch.nn.functional.softplus(mixer().decay_parameter))
    assert 0.8999 <= decay.min() < decay.max() <= 0.9991
