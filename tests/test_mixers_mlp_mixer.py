"""The causal MLP-Mixer and the linear mixer, against loops written from their definition and against autograd."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from emergent_heads.errors import ArgumentError
from emergent_heads.models.mixers import Mixer
from emergent_heads.models.mixers.mlp_mixer import LinearMixer, MLPMixer
from emergent_heads.models.small import SmallModel, SmallModelConfig, effective_pattern


def model_of(mixer: str, context: int = 7, **settings: object) -> SmallModel:
    config = SmallModelConfig(1, 8, 2, mixer=mixer, vocabulary_size=5, context=context, **settings)  # pyright: ignore[reportArgumentType]
    return SmallModel(config, seed=3)


def mixer_of(model: SmallModel) -> Mixer:
    return model.block_list[0].token_mixer


def mixed_by_loops(mixer: MLPMixer, x: Tensor) -> Tensor:
    """Unit (s, j) reads positions up to s, output t reads the units of positions up to t."""
    k, context = mixer.hidden_units, mixer.read_weight.shape[1]
    read, write = mixer.read_weight.view(context, k, context), mixer.write_weight.view(context, context, k)
    length = x.shape[1]
    hidden = {}
    for s in range(length):
        for j in range(k):
            pre = sum(read[s, j, t] * x[:, t] for t in range(s + 1))
            if mixer.read_bias is not None:
                pre = pre + mixer.read_bias[s * k + j]
            hidden[s, j] = functional.gelu(pre)  # pyright: ignore[reportArgumentType]
    outputs = []
    for t in range(length):
        out = sum(write[t, s, j] * hidden[s, j] for s in range(t + 1) for j in range(k))
        outputs.append(out if mixer.write_bias is None else out + mixer.write_bias[t])
    return torch.stack(outputs, 1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("length", [7, 4])
@pytest.mark.parametrize("hidden_units", [1, 3])
def test_mlp_mixer_is_what_its_definition_says(hidden_units: int, length: int, biases: bool) -> None:
    model = model_of("mlp_mixer", mixer_options={"hidden_units": hidden_units}, biases=biases)
    mixer = mixer_of(model)
    assert isinstance(mixer, MLPMixer)
    x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixer(x), mixed_by_loops(mixer, x), atol=1e-6, rtol=1e-5)


def test_blocks_of_positions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = mixer_of(model_of("mlp_mixer", context=11, mixer_options={"hidden_units": 2}))
    x = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for block in (64, 3):
        monkeypatch.setattr("emergent_heads.models.mixers.mlp_mixer._BLOCK", block)
        mixer.zero_grad()
        out = mixer(x)
        out.square().sum().backward()
        results.append([out, *(parameter.grad.clone() for parameter in mixer.parameters())])  # pyright: ignore[reportOptionalMemberAccess]
    for whole, in_blocks in zip(*results, strict=True):
        torch.testing.assert_close(in_blocks, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [64, 3])
def test_listening_to_the_units_changes_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emergent_heads.models.mixers.mlp_mixer._BLOCK", block)
    model = model_of("mlp_mixer")
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0], [4, 4, 1, 0, 2, 2]])
    logits, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(logits, model(tokens), atol=1e-6, rtol=1e-5)
    pre, post = cache["blocks.0.mixer.hook_pre"], cache["blocks.0.mixer.hook_post"]
    assert pre.shape == (2, 6, 8, 8)
    assert torch.equal(post, functional.gelu(pre))
    # The first unit of position 2, from the normalised residual stream.
    x = cache["blocks.0.ln1.hook_normalized"]
    mixer = mixer_of(model)
    expected = torch.einsum("s,rsd->rd", mixer.read_weight[16, :3], x[:, :3]) + mixer.read_bias[16]  # pyright: ignore
    torch.testing.assert_close(pre[:, 2, 0], expected, atol=1e-5, rtol=1e-5)


def test_mlp_mixers_effective_pattern_is_its_mean_derivative() -> None:
    model = model_of("mlp_mixer")
    mixer = mixer_of(model)
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    pattern = mixer.effective_pattern(x)
    jacobian = torch.autograd.functional.jacobian(mixer, x)  # [row, pos, channel, row, pos, channel]
    same_row_and_channel = torch.einsum("rtcrsc->rtsc", jacobian)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(pattern[:, 0], same_row_and_channel.mean(-1), atol=1e-6, rtol=1e-5)
    total = torch.einsum("rtcqsd->", jacobian.abs())  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(total, same_row_and_channel.abs().sum())  # there is nothing else


@pytest.mark.parametrize("hidden_units", [0, 1.5, "8"])
def test_a_wrong_number_of_hidden_units_is_refused(hidden_units: object) -> None:
    with pytest.raises(ArgumentError, match="hidden_units must be a whole number"):
        model_of("mlp_mixer", mixer_options={"hidden_units": hidden_units})


def test_linear_mixer_sums_values_by_its_pattern() -> None:
    model = model_of("linear", context=6)
    mixer = mixer_of(model)
    assert isinstance(mixer, LinearMixer)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    v = mixer.value(x).view(3, 5, 2, 4)
    z = torch.zeros(3, 5, 2, 4)
    for head in range(2):
        for dest in range(5):
            for src in range(dest + 1):
                z[:, dest, head] += mixer.pattern[head, dest, src] * v[:, src, head]
    expected = mixer.out(z.flatten(2))
    torch.testing.assert_close(mixer(x), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(mixer.effective_pattern(x)[1], mixer.pattern[:, :5, :5].tril())


def test_replacing_the_linear_mixers_pattern_changes_one_row_only() -> None:
    model = model_of("linear", context=6)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0], [4, 4, 1, 0, 2, 2]])
    plain, cache = model.run_with_cache(tokens)
    pattern, v = cache["blocks.0.mixer.hook_pattern"], cache["blocks.0.mixer.hook_v"]
    assert pattern.shape == (2, 2, 6, 6)
    torch.testing.assert_close(
        torch.einsum("rhds,rshe->rdhe", pattern, v), cache["blocks.0.mixer.hook_z"], atol=1e-6, rtol=1e-5
    )

    def replace(pattern: Tensor, hook: object) -> Tensor:
        pattern[0, 1] = 0.0
        return pattern

    edited = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.mixer.hook_pattern", replace)])
    assert (edited[0] - plain[0]).abs().max() > 1e-3
    torch.testing.assert_close(edited[1], plain[1])
    torch.testing.assert_close(model(tokens), plain)  # the parameter was not written to


@pytest.mark.parametrize("mixer", ["linear", "mlp_mixer"])
def test_what_lies_in_the_future_is_never_used(mixer: str) -> None:
    """Changing the parameters above the diagonal changes nothing, whatever trained them."""
    model = model_of(mixer)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0, 1]])
    before, pattern = model(tokens), effective_pattern(model, tokens)[0]
    with torch.no_grad():
        for name, parameter in mixer_of(model).named_parameters():
            if name in ("pattern", "read_weight", "write_weight"):
                k = max(parameter.shape) // 7 if name != "pattern" else 1
                rows = torch.arange(parameter.shape[-2]) // (k if name == "read_weight" else 1)
                columns = torch.arange(parameter.shape[-1]) // (k if name == "write_weight" else 1)
                parameter += 5.0 * (rows[:, None] < columns)
    assert torch.equal(model(tokens), before)
    assert torch.equal(effective_pattern(model, tokens)[0], pattern)


def test_gpt2_initialisation_reaches_the_matrices() -> None:
    model = model_of("mlp_mixer", context=60, initialisation="gpt2")
    mixer = mixer_of(model)
    assert isinstance(mixer, MLPMixer)
    visible = mixer.read_weight[mixer.read_mask.bool()]
    assert visible.std().item() == pytest.approx(0.02, rel=0.05)
    assert mixer.write_weight[mixer.write_mask.bool()].std().item() == pytest.approx(0.02 / 2**0.5, rel=0.05)
    assert not mixer.read_bias.any()  # pyright: ignore[reportOptionalMemberAccess]
