"""Attention as a model itself computes it, with the product of pattern and values intercepted.

For models whose attention cannot be run by a registered function (GPT-Neo, Bloom, Falcon, MPT, XGLM). Nothing of the
model is replaced: while its attention runs, torch hands over each of its function calls. The first product after a
softmax whose left side has the softmax's shape is pattern times values; masks, biases, scales and casts are the
model's own. A call of torch's fused attention is done in explicit steps instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from emergent_heads.models.hooks import replaced_forward

OnProduct = Callable[[Float[Tensor, "row head dest src"], Float[Tensor, "row head src d_head"]], Tensor | None]
"""Called with a pattern and the values it is about to be multiplied with; a tensor it returns is used instead."""

_SOFTMAX = frozenset({functional.softmax, torch.softmax, Tensor.softmax})
_PRODUCTS = frozenset({torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__})


class Products(TorchFunctionMode):
    """Inside it, products of a pattern and values are handed to `on_product`."""

    def __init__(self, n_heads: int, on_product: OnProduct) -> None:
        super().__init__()
        self._n_heads = n_heads
        self._on_product = on_product
        self._softmax: torch.Size | None = None  # its shape, until the product is seen

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _SOFTMAX:
            result = func(*args, **kwargs)
            self._softmax = result.shape if self._may_be_patterns(result.shape) else None
            return result
        if func in _PRODUCTS and self._softmax is not None and _same_matrices(args[0].shape, self._softmax):
            self._softmax = None
            return func(self._edited(args[0], args[1]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Float[Tensor, "row head dest d_head"],
        key: Float[Tensor, "row group src d_head"],
        value: Float[Tensor, "row group src d_value"],
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Float[Tensor, "row head dest d_value"]:
        """What `scaled_dot_product_attention` computes, with the pattern seen."""
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            scores = scores.where(attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        pattern = functional.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout_p)
        return self._edited(pattern, value) @ value

    def _may_be_patterns(self, shape: torch.Size) -> bool:
        return len(shape) > 2 and shape[-1] == shape[-2] and shape[:-2].numel() % self._n_heads == 0

    def _edited(self, left: Tensor, right: Tensor) -> Tensor:
        dest, src = left.shape[-2:]
        values = right.expand(*left.shape[:-2], *right.shape[-2:])  # one for several heads, say
        edited = self._on_product(
            left.reshape(-1, self._n_heads, dest, src), values.reshape(-1, self._n_heads, *right.shape[-2:])
        )
        return left if edited is None else edited.reshape(left.shape)


def _same_matrices(shape: torch.Size, other: torch.Size) -> bool:
    """Whether two tensors hold equally many matrices of one shape."""
    return shape[-2:] == other[-2:] and shape.numel() == other.numel()


@contextmanager
def intercepted(
    attention: Sequence[nn.Module], n_heads: int, callback: Callable[[int, Tensor, Tensor], Tensor | None]
) -> Iterator[None]:
    """Calls `callback` with (layer, pattern, values) where these modules, one a layer, multiply the two."""

    def watching(layer: int, forward: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            with Products(n_heads, lambda pattern, values: callback(layer, pattern, values)):
                return forward(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for layer, module in enumerate(attention):
            stack.enter_context(replaced_forward(module, watching(layer, module.forward)))
        yield
