"""Hand-written gradients under `torch.vmap`, for training several seeds with their parameters stacked."""

from typing import Any

import torch
from torch import Tensor


def apply_to_stack(
    function: type[torch.autograd.Function],
    batch_size: int,
    in_dims: tuple[int | None, ...],
    arguments: tuple[Any, ...],
) -> tuple[Any, Any]:
    """`vmap` rule of a function whose tensors may all have further leading dimensions, the same for each.

    Brings the mapped dimension of every tensor to the front, repeats those that have none, and applies the function to
    the whole stack at once. For the static method `vmap` of a `torch.autograd.Function`, whose `forward` may then work
    in place, which PyTorch's generated rule would refuse or loop over.
    """

    def stacked(argument: Any, dim: int | None) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        if dim is None:
            return argument.expand(batch_size, *argument.shape)
        return argument.movedim(dim, 0)

    outputs = function.apply(*map(stacked, arguments, in_dims))
    return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0
