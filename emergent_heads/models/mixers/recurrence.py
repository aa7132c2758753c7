"""The diagonal linear recurrence, `h[t] = decay[t] h[t-1] + write[t]`, which several mixers share."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from emergent_heads.models.mixers.stacking import apply_to_stack


def linear_recurrence(
    decay: Float[Tensor, "row pos *state"], write: Float[Tensor, "row pos *state"]
) -> Float[Tensor, "row pos *state"]:
    """Every state `h[t] = decay[t] h[t-1] + write[t]` with `h[-1] = 0`, elementwise.

    One operation per position forwards and one backwards: the gradient runs through the same recurrence in the other
    direction. Works under `torch.func` transforms and can be differentiated twice. `decay` may have size 1 where
    `write` has more.
    """
    decay = decay.expand(write.shape)
    return _Recurrence.apply(decay.flatten(2), write.flatten(2), False).view(write.shape)


class _Recurrence(torch.autograd.Function):
    """Of tensors `[*stack, row, pos, channel]`; `reverse` for `h[t] = decay[t+1] h[t+1] + write[t]`, its adjoint."""

    @staticmethod
    def forward(decay: Tensor, write: Tensor, reverse: bool) -> Tensor:
        states = write.clone(memory_format=torch.contiguous_format)
        decays, by_position = decay.unbind(-2), states.unbind(-2)
        if reverse:
            for t in range(len(by_position) - 2, -1, -1):
                by_position[t].addcmul_(decays[t + 1], by_position[t + 1])
        else:
            for t in range(1, len(by_position)):
                by_position[t].addcmul_(decays[t], by_position[t - 1])
        return states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.reverse = inputs[2]

    @staticmethod
    def backward(ctx: Any, dstates: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        decay, states = ctx.saved_tensors
        dwrite = _Recurrence.apply(decay, dstates, not ctx.reverse)
        # The decay at t multiplies the states at t - 1 and t, whichever of them comes first.
        earlier, later = (dwrite, states) if ctx.reverse else (states, dwrite)
        ddecay = torch.cat([torch.zeros_like(states[..., :1, :]), later[..., 1:, :] * earlier[..., :-1, :]], -2)
        return ddecay, dwrite, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return apply_to_stack(_Recurrence, info.batch_size, in_dims, arguments)


def products_of_decays(log_decay: Float[Tensor, "*batch pos"]) -> Float[Tensor, "*batch dest src"]:
    """What is left at `dest` of a state written at `src`: `exp(log_decay[src+1] + ... + log_decay[dest])`.

    Zero where `src` is after `dest`. Differences of cumulative sums lose digits, so these are in double precision;
    they are never positive, so nothing overflows.
    """
    sums = log_decay.double().cumsum(-1)
    later = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=sums.device).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill(later, float("-inf")).exp().to(log_decay.dtype)
