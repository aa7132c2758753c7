"""The mixers' causal convolution, against PyTorch's own on the left-padded sequence."""

import pytest
import torch
from torch.nn import functional

from emergent_heads.models.mixers.convolution import CausalConv


@pytest.mark.parametrize("length", [1, 3, 4, 17])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_conv1d_on_the_padded_sequence(length, bias):
    torch.manual_seed(0)
    conv = CausalConv(5, bias=bias).double()
    x = torch.randn(2, length, 5, dtype=torch.double, requires_grad=True)
    padded = functional.pad(x.transpose(1, 2), (3, 0))
    expected = functional.conv1d(padded, conv.weight, conv.bias, groups=5).transpose(1, 2)
    sources = [x, *conv.parameters()]
    weight = torch.randn_like(expected)
    torch.testing.assert_close(conv(x), expected)
    for ours, theirs in zip(
        torch.autograd.grad((conv(x) * weight).sum(), sources),
        torch.autograd.grad((expected * weight).sum(), sources),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_stacked_parameters_are_those_of_each():
    torch.manual_seed(0)
    convs = [CausalConv(5) for _ in range(3)]
    x = torch.randn(3, 2, 7, 5)
    parameters, _ = torch.func.stack_module_state(convs)  # pyright: ignore[reportArgumentType]

    def loss(parameters, x):
        return torch.func.functional_call(convs[0], parameters, (x,)).pow(2).sum()

    together = torch.vmap(torch.func.grad(loss))(parameters, x)
    for seed, conv in enumerate(convs):
        conv(x[seed]).pow(2).sum().backward()
        for name, parameter in conv.named_parameters():
            torch.testing.assert_close(together[name][seed], parameter.grad)


def test_second_derivatives():
    conv = CausalConv(2, 3).double()
    x = torch.randn(1, 5, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: conv(x).pow(3), (x,))


def test_initialise_draws_within_the_bound_and_not_less():
    conv = CausalConv(64)
    with torch.no_grad():
        conv.weight.zero_()
        conv.initialise(torch.Generator().manual_seed(0))
    assert 0.45 < conv.weight.abs().max() <= 0.5
    assert 0.4 < conv.bias.abs().max() <= 0.5  # pyright: ignore[reportOptionalMemberAccess]
