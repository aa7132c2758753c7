"""The short causal convolution in front of most recurrent mixers."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from emergent_heads.models.mixers.stacking import apply_to_stack


class CausalConv(nn.Conv1d):
    """Depthwise convolution over positions that sees the present and the `kernel_size - 1` positions before it.

    `y[t, c] = bias[c] + sum_k weight[c, 0, k] x[t - (kernel_size - 1) + k, c]`, with zeros before the sequence: what
    `nn.Conv1d(channels, channels, kernel_size, groups=channels)` computes on the left-padded sequence, with its
    parameters, but on `[row, pos, channel]` and with a backward pass that takes half the time on a CPU. It works under
    `torch.func` transforms.
    """

    def __init__(self, channels: int, kernel_size: int = 4, *, bias: bool = True) -> None:
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    def initialise(self, generator: torch.Generator) -> None:
        """Draws it as PyTorch does, uniformly within `1 / sqrt(kernel_size)`, whatever the model's linear maps have.

        With the standard deviation of 0.02 that suits wide matrices, four taps would let almost nothing through. For
        `Mixer.initialise`.
        """
        bound = self.kernel_size[0] ** -0.5
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)

    def forward(self, input: Float[Tensor, "row pos channel"]) -> Float[Tensor, "row pos channel"]:
        # Under autocast the input may be of lower precision; products of four taps are not worth the rounding.
        taps = self.weight[:, 0].T
        bias = taps.new_zeros(taps.shape[1]) if self.bias is None else self.bias
        return _ShiftedSum.apply(input.to(taps.dtype), taps, bias, False)


class _ShiftedSum(torch.autograd.Function):
    """`bias + sum_lag taps[-1 - lag] x[t - lag]` without a copy of the input for each tap; `reverse` for `x[t + lag]`.

    Of tensors `x` `[*stack, row, pos, channel]`, `taps` `[*stack, tap, channel]` and `bias` `[*stack, channel]`.
    """

    @staticmethod
    def forward(x: Tensor, taps: Tensor, bias: Tensor, reverse: bool) -> Tensor:
        rows = taps[..., None, None, :, :]
        y = torch.addcmul(bias[..., None, None, :], x, rows[..., -1, :])
        for lag in range(1, taps.shape[-2]):
            earlier, later = slice(None, -lag), slice(lag, None)
            to, source = (earlier, later) if reverse else (later, earlier)
            y[..., to, :].addcmul_(x[..., source, :], rows[..., -1 - lag, :])
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.reverse = inputs[3]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore
        x, taps = ctx.saved_tensors
        dx = _ShiftedSum.apply(dy, taps, taps.new_zeros(taps.shape[-1]), not ctx.reverse)
        early, late = (dy, x) if ctx.reverse else (x, dy)
        length = x.shape[-2]
        by_lag = [
            (late[..., lag:, :] * early[..., : max(length - lag, 0), :]).sum((-3, -2)) for lag in range(taps.shape[-2])
        ]
        return dx, torch.stack(by_lag[::-1], -2), dy.sum((-3, -2)), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return apply_to_stack(_ShiftedSum, info.batch_size, in_dims, arguments)
