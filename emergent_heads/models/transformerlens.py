"""TransformerLens models through their hook points: `HookedTransformer` (3.x) and `TransformerBridge` (3.x, 4.x)."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import transformer_lens
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.model_bridge import TransformerBridge

from emergent_heads.errors import InterventionHasNoEffect, UnsupportedModelError
from emergent_heads.models.hooked import HookedModel, OnPattern, listed
from emergent_heads.models.hooks import editing_input, editing_output, keep_in, replaced_forward


class _TransformerLensModel(HookedModel):
    """What both have: `blocks.{layer}.attn.hook_pattern`, hooked before it is used where the adapter is right."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        super().__init__()
        self._module = self._model = model
        self.unembedding = model.unembed
        self.n_layers = model.cfg.n_layers
        self.n_heads = model.cfg.n_heads
        self.d_model = model.cfg.d_model
        self.vocabulary_size = model.cfg.d_vocab
        self.context = model.cfg.n_ctx
        self.tokenizer = tokenizer if tokenizer is not None else model.tokenizer
        self._d_head = model.cfg.d_head
        self.blocks = list(model.blocks)
        self.attention: Sequence[Any] = [getattr(block, "attn", None) for block in self.blocks]
        self.mlp = [getattr(block, "mlp", None) for block in self.blocks]
        if without := [layer for layer, module in enumerate(self.attention) if module is None]:
            raise InterventionHasNoEffect(
                f"no attention pattern can be read or edited at layer {listed(without)} of this {self.kind}: these "
                "layers have no attention"
            )
        hooked = [layer for layer, module in enumerate(self.attention) if hasattr(module, "hook_pattern")]
        self.check_all_seen(hooked, range(self.n_layers))
        if not all(self._has_values(attention) for attention in self.attention):
            raise UnsupportedModelError(
                f"the attention of this {self.kind} keeps no values of single heads, which a pattern multiplies"
                f"{self.way_out}"
            )

    @contextmanager
    def on_pattern(self, callback: OnPattern) -> Iterator[None]:
        values: dict[int, Tensor] = {}

        def call(layer: int) -> Callable[[Tensor], Tensor | None]:
            return lambda pattern: callback(layer, pattern, self._by_head(values[layer]))

        with ExitStack() as stack:
            for layer, attention in enumerate(self.attention):
                stack.enter_context(editing_output(self._value_point(attention), keep_in(values, layer)))
                stack.enter_context(editing_output(attention.hook_pattern, call(layer)))
            yield

    @abstractmethod
    def _value_point(self, attention: Any) -> nn.Module:
        """The module whose output is the layer's values."""

    def _has_values(self, attention: Any) -> bool:
        try:
            return isinstance(self._value_point(attention), nn.Module)
        except AttributeError:
            return False

    def _by_head(self, values: Tensor) -> Float[Tensor, "row head src d_head"]:
        """Values `[row, src, ...]` of heads or groups of heads, one per head."""
        values = values.reshape(*values.shape[:2], -1, self._d_head).transpose(1, 2)
        return values.repeat_interleave(self.n_heads // values.shape[1], dim=1)


class BridgeModel(_TransformerLensModel):
    """A `TransformerBridge`: the Hugging Face model with hooked modules in place of its own."""

    kind = "TransformerBridge"
    way_out = (
        '. Use the plain Hugging Face model: load it with kind="huggingface", or give the checkpoint of a series '
        "itself, `series[step]`"
    )

    @staticmethod
    def accepts(model: Any) -> bool:
        return isinstance(model, TransformerBridge)

    def run(self, tokens: Int[Tensor, "row pos"]) -> Float[Tensor, "row kept vocabulary"]:
        output = self._model.original_model(input_ids=tokens, use_cache=False)
        return output if isinstance(output, Tensor) else output.logits  # a model of TransformerLens' own gives logits

    def _value_point(self, attention: Any) -> nn.Module:
        return attention.v

    def on_z(self, layer: int, callback: Callable[[Tensor], Tensor | None]) -> AbstractContextManager[None]:
        return editing_input(self.attention[layer].o, callback)

    def project(self, layer: int, z: Float[Tensor, "*rows z"]) -> Float[Tensor, "*rows d_model"]:
        return self.attention[layer].o(z)


class HookedTransformerModel(_TransformerLensModel):
    """A `HookedTransformer`, processed or not."""

    kind = "HookedTransformer"

    @staticmethod
    def accepts(model: Any) -> bool:
        # In 4.x the class is gone, and even `hasattr` of the package raises.
        known = vars(transformer_lens).get("HookedTransformer")
        return isinstance(known, type) and isinstance(model, known)

    def run(self, tokens: Int[Tensor, "row pos"]) -> Float[Tensor, "row kept vocabulary"]:
        with self._unembedding_without_a_copy():
            # Left padding would shift positions wherever a prompt holds the pad token.
            return self._model(tokens, return_type="logits", padding_side="right")

    @contextmanager
    def _unembedding_without_a_copy(self) -> Iterator[None]:
        """The unembedding copies its whole matrix at each call, which for few rows takes longer than using it."""
        unembed = self._model.unembed

        def forward(resid: Tensor) -> Tensor:
            return unembed.hook_out(functional.linear(unembed.hook_in(resid), unembed.W_U.T, unembed.b_U))

        if "forward" in vars(unembed):  # something stands in for it already
            yield
        else:
            with replaced_forward(unembed, forward):
                yield

    def _value_point(self, attention: Any) -> nn.Module:
        return attention.hook_v

    def on_z(self, layer: int, callback: Callable[[Tensor], Tensor | None]) -> AbstractContextManager[None]:
        def flat(z: Tensor) -> Tensor | None:
            new = callback(z.flatten(-2))
            return None if new is None else new.unflatten(-1, z.shape[-2:])

        return editing_output(self.attention[layer].hook_z, flat)

    def project(self, layer: int, z: Float[Tensor, "*rows z"]) -> Float[Tensor, "*rows d_model"]:
        attention = self.attention[layer]
        return functional.linear(z, attention.W_O.flatten(0, 1).T, attention.b_O)


KINDS = (HookedTransformerModel, BridgeModel)
