"""RWKV's time mixing: version 4 against transformers' own module, version 7 against its paper's equations."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

from emergent_heads.errors import ArgumentError
from emergent_heads.models.mixers import Mixer
from emergent_heads.models.mixers.rwkv import RWKV4, RWKV7
from emergent_heads.models.small import SmallModel, SmallModelConfig, effective_pattern


def model_of(mixer: str, n_layers: int = 2, **settings: object) -> SmallModel:
    config = SmallModelConfig(n_layers, 16, 2, mixer=mixer, vocabulary_size=5, context=40, **settings)  # pyright: ignore[reportArgumentType]
    return SmallModel(config, seed=3)


def mixer_of(model: SmallModel, layer: int = 1) -> Mixer:
    return model.block_list[layer].token_mixer


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scattered(mixer: Mixer) -> None:
    """Moves every parameter, so that none is tested at the value it starts with."""
    with torch.no_grad():
        for number, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * random(*parameter.shape, seed=number)


def gradients(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = random(*output.shape, seed=99)
    return torch.autograd.grad((output * weights).sum(), inputs)


def theirs_with_our_weights(mixer: RWKV4) -> tuple[RwkvSelfAttention, dict[str, str]]:
    """transformers' module, and which of its parameters each of ours is."""
    theirs = RwkvSelfAttention(RwkvConfig(hidden_size=mixer.d_model, num_hidden_layers=1, context_length=40))
    names = {
        "log_decay_rate": "time_decay",
        "bonus": "time_first",
        "mix_k": "time_mix_key",
        "mix_v": "time_mix_value",
        "mix_r": "time_mix_receptance",
        "key.weight": "key.weight",
        "value.weight": "value.weight",
        "receptance.weight": "receptance.weight",
        "out.weight": "output.weight",
    }
    with torch.no_grad():
        for ours, parameter in mixer.named_parameters():
            target = theirs.get_parameter(names[ours])
            target.copy_(parameter.view_as(target))
    return theirs, names


@pytest.mark.parametrize("scale", [1.0, 40.0], ids=["usual keys", "keys whose exponentials overflow"])
def test_rwkv4_is_transformers_rwkv(scale: float) -> None:
    mixer = mixer_of(model_of("rwkv4"))
    assert isinstance(mixer, RWKV4)
    scattered(mixer)
    with torch.no_grad():
        mixer.key.weight *= scale
    theirs, names = theirs_with_our_weights(mixer)
    x = random(3, 33, 16).requires_grad_()
    ours, expected = mixer(x), theirs(x)[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    own, their = dict(mixer.named_parameters()), dict(theirs.named_parameters())
    got = gradients(ours, x, *own.values())
    wanted = gradients(expected, x, *(their[names[name]] for name in own))
    for mine, reference in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, reference.view_as(mine), atol=1e-4 * scale, rtol=1e-4)


def test_rwkv4s_memory_is_the_mean_of_the_past_and_its_weight() -> None:
    model = model_of("rwkv4")
    _, cache = model.run_with_cache(torch.randint(5, (2, 9), generator=torch.Generator().manual_seed(0)))
    mixer = mixer_of(model)
    k, v = cache["blocks.1.mixer.hook_k"], cache["blocks.1.mixer.hook_v"]
    rate = mixer.log_decay_rate.exp()  # pyright: ignore[reportCallIssue]
    for t in (0, 4, 8):
        weights = torch.stack([(k[:, i] - (t - i) * rate).exp() for i in range(t + 1)])
        total = weights.sum(0)
        mean = (weights * v[:, : t + 1].transpose(0, 1)).sum(0) / total
        torch.testing.assert_close(cache["blocks.1.mixer.hook_mean"][:, t], mean, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(cache["blocks.1.mixer.hook_log_weight"][:, t], total.log(), atol=1e-4, rtol=1e-4)


def test_rwkv4s_pattern_gives_its_output_from_its_values() -> None:
    model = model_of("rwkv4")
    tokens = torch.randint(5, (2, 9), generator=torch.Generator().manual_seed(0))
    pattern = effective_pattern(model, tokens)[1]
    _, cache = model.run_with_cache(tokens)
    assert pattern.shape == (2, 16, 9, 9)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 16, 9))
    mixed = torch.einsum("rcds,rsc->rdc", pattern, cache["blocks.1.mixer.hook_v"])
    torch.testing.assert_close(mixed, cache["blocks.1.mixer.hook_wkv"], atol=1e-5, rtol=1e-4)


def time_mix_of_the_paper(mixer: RWKV7, x: Tensor) -> Tensor:
    """RWKV-7's time mixing as arXiv 2503.14456 (section 4) writes it: row vectors, states as explicit matrices."""
    heads, size = mixer.n_heads, mixer.d_head
    rank = mixer.down.weight.shape[0] // 3
    down_decay, down_a, down_gate = mixer.down.weight.split(rank)
    outputs = []
    for sequence in x:
        states = [torch.zeros(size, size) for _ in range(heads)]
        before = torch.zeros_like(sequence[0])
        rows = []
        for x_t in sequence:
            for_r, for_k, for_v, for_decay, for_a, for_g = (before + (x_t - before) * mix for mix in mixer.mix)
            before = x_t
            r, k, v = mixer.receptance(for_r), mixer.key(for_k), mixer.value(for_v)
            d = mixer.decay_up(torch.tanh(down_decay @ for_decay))
            w = torch.exp(-math.exp(-0.5) * torch.sigmoid(d))
            a = torch.sigmoid(mixer.a_up(down_a @ for_a))
            g = mixer.gate_up(torch.sigmoid(down_gate @ for_g))
            removal, replacement, bonus = mixer.removal.flatten(), mixer.replacement.flatten(), mixer.bonus.flatten()
            kappa = k * removal
            k_tilde = k * (1 + (a - 1) * replacement)
            parts = []
            for head in range(heads):
                of = slice(head * size, (head + 1) * size)
                unit = kappa[of] / kappa[of].norm()
                transition = torch.diag(w[of]) - torch.outer(unit, a[of] * unit)
                states[head] = states[head] @ transition + torch.outer(v[of], k_tilde[of])
                wkv = r[of] @ states[head].T
                centred = wkv - wkv.mean()
                p = centred / (centred.square().mean() + 1e-5 * size).sqrt()
                p = p * mixer.norm_weight[head] + mixer.norm_bias[head]
                parts.append(p + (r[of] @ (bonus[of] * k_tilde[of])) * v[of])
            rows.append(mixer.out(torch.cat(parts) * g))
        outputs.append(torch.stack(rows))
    return torch.stack(outputs)


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_rwkv7_is_what_its_paper_says(chunk_size: int) -> None:
    mixer = mixer_of(model_of("rwkv7", mixer_options={"rank": 3, "chunk_size": chunk_size}))
    assert isinstance(mixer, RWKV7)
    scattered(mixer)
    x = random(2, 30, 16).requires_grad_()
    ours, expected = mixer(x), time_mix_of_the_paper(mixer, x)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    parameters = list(mixer.parameters())
    for mine, reference in zip(gradients(ours, x, *parameters), gradients(expected, x, *parameters), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-4, rtol=1e-4)


def test_rwkv7_stays_exact_where_all_forgets_as_fast_as_it_can() -> None:
    """Dividing by a chunk's decay meets numbers near 1e17 here, and repeated keys the worst of removals."""
    model = model_of("rwkv7", mixer_options={"chunk_size": 64})
    mixer = mixer_of(model)
    assert isinstance(mixer, RWKV7)
    with torch.no_grad():
        mixer.decay_up.bias.fill_(30.0)
        mixer.a_up.bias.fill_(30.0)
    x = (random(1, 1, 16) + 0.01 * random(1, 150, 16)).requires_grad_()
    ours = mixer(x)
    mixer.hook_state.add_hook(lambda tensor, hook: tensor)
    by_steps = mixer(x)
    torch.testing.assert_close(ours, by_steps, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradients(ours, x), gradients(by_steps, x), atol=1e-4, rtol=1e-3)


def test_listening_to_rwkv7s_states_changes_nothing() -> None:
    model = model_of("rwkv7", mixer_options={"chunk_size": 4})
    tokens = torch.randint(5, (2, 11), generator=torch.Generator().manual_seed(0))
    logits, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(logits, model(tokens), atol=1e-5, rtol=1e-4)
    states = cache["blocks.1.mixer.hook_state"]
    assert states.shape == (2, 11, 2, 8, 8)
    read = torch.einsum("rphvk,rphk->rphv", states, cache["blocks.1.mixer.hook_r"])
    torch.testing.assert_close(read, cache["blocks.1.mixer.hook_wkv"], atol=1e-5, rtol=1e-4)


def test_rwkv7s_pattern_gives_its_output_from_its_values() -> None:
    model = model_of("rwkv7", mixer_options={"chunk_size": 4})
    tokens = torch.randint(5, (2, 11), generator=torch.Generator().manual_seed(0))
    pattern = effective_pattern(model, tokens)[1]
    _, cache = model.run_with_cache(tokens)
    assert pattern.shape == (2, 2, 11, 11)
    mixed = torch.einsum("rhds,rshe->rdhe", pattern, cache["blocks.1.mixer.hook_v"])
    torch.testing.assert_close(mixed, cache["blocks.1.mixer.hook_wkv"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rank": 0}, "rank must be"), ({"chunk_size": 65}, "at most 64"), ({"chunk_size": 1.5}, "chunk_size must be")],
)
def test_wrong_sizes_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        model_of("rwkv7", mixer_options=options)


@pytest.mark.parametrize("mixer", ["rwkv4", "rwkv7"])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_decays_start_spread_over_channels(mixer: str, n_layers: int) -> None:
    """Some channels forget within a few positions, others keep most of what they hold for a hundred."""
    model = model_of(mixer, n_layers)
    for layer in range(n_layers):
        module = mixer_of(model, layer)
        if isinstance(module, RWKV4):
            kept = (-module.log_decay_rate.exp()).exp()
        else:
            assert isinstance(module, RWKV7)
            kept = (-math.exp(-0.5) * torch.sigmoid(module.decay_up.bias)).exp()
        assert kept.min() < 0.95 < 0.99 < kept.max()
        assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("mixer", ["rwkv4", "rwkv7"])
def test_half_precision_keeps_the_recurrence_in_full(mixer: str) -> None:
    module = mixer_of(model_of(mixer))
    x = random(2, 40, 16)
    with torch.no_grad():
        exact = module(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x).float()
    assert not torch.equal(out, exact)
    assert functional.cosine_similarity(out.flatten(), exact.flatten(), dim=0) > 0.999
