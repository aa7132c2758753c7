"""Plain Hugging Face causal language models, as they are: nothing of the model is replaced or renamed.

transformers lets a model's attention run through a function registered by name. While the library reads or edits
patterns, the model uses one that hands the pattern over; otherwise it uses its own (SDPA, say), at full speed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from emergent_heads.errors import InterventionHasNoEffect, UnsupportedModelError
from emergent_heads.models.hooked import HookedModel, OnPattern
from emergent_heads.models.hooks import editing_input, without_running

_NAME = "emergent_heads"
_CALLBACK = "_emergent_heads_on_pattern"
_MLP_NAMES = ("mlp", "feed_forward", "ffn")


class HuggingFaceModel(HookedModel):
    """A `PreTrainedModel` with a language-model head."""

    kind = "Hugging Face model"

    @staticmethod
    def accepts(model: Any) -> bool:
        return isinstance(model, PreTrainedModel)

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        super().__init__()
        config = model.config.get_text_config()
        unembedding = model.get_output_embeddings()
        if unembedding is None or getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"{type(model).__name__} is no causal language model: load it with AutoModelForCausalLM"
            )
        self.kind = f"Hugging Face {type(model).__name__}"
        self._module = self._model = model
        self.unembedding = unembedding
        self.n_layers = config.num_hidden_layers
        self.n_heads = config.num_attention_heads
        self.d_model = config.hidden_size
        self.vocabulary_size = int(cast(Any, model.get_input_embeddings()).weight.shape[0])
        self.context = getattr(config, "max_position_embeddings", None)
        self.tokenizer = tokenizer
        self.blocks = _block_list(model, self.n_layers)
        self.attention, self._projections = self._find_attention()
        self.mlp = [_first_child(block, _MLP_NAMES) for block in self.blocks]

    def run(self, tokens: Int[Tensor, "row pos"]) -> Float[Tensor, "row kept vocabulary"]:
        return self._model(input_ids=tokens, use_cache=False).logits

    @contextmanager
    def on_pattern(self, callback: OnPattern) -> Iterator[None]:
        with _watched(self._model, self.attention, callback):
            yield

    @contextmanager
    def on_z(self, layer: int, callback: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        with editing_input(self._projections[layer], callback):
            yield

    def project(self, layer: int, z: Float[Tensor, "*rows z"]) -> Float[Tensor, "*rows d_model"]:
        return self._projections[layer](z)

    def _find_attention(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Per layer, the module that computes attention and its output projection, found by running it once.

        Names differ between architectures; what happens does not: the projection is the first submodule that the
        attention calls on the heads' outputs.
        """
        attention: dict[int, nn.Module] = {}
        projections: dict[int, nn.Module] = {}

        def on_pattern(layer: int, _pattern: Tensor, _values: Tensor) -> None:
            attention[layer] = by_layer[layer]

        def note(layer: int, child: nn.Module) -> Callable[[Tensor], None]:
            def called(_: Tensor) -> None:
                if layer in attention and layer not in projections:
                    projections[layer] = child

            return called

        candidates: list[Any] = [
            module for block in self.blocks for module in block.modules() if hasattr(module, "layer_idx")
        ]
        by_layer: dict[int, nn.Module] = {module.layer_idx: module for module in candidates}
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        try:
            with (
                self.evaluating(),
                _watched(self._model, candidates, on_pattern),
                without_running(self.unembedding),
                ExitStack() as stack,
            ):
                for layer, module in by_layer.items():
                    for child in module.children():
                        if next(child.parameters(), None) is not None:
                            stack.enter_context(editing_input(child, note(layer, child)))
                self.run(tokens)
        except (KeyError, ValueError) as error:
            raise InterventionHasNoEffect(
                f"the attention of this {self.kind} cannot be run by a function of the library's ({error}), so its "
                "patterns cannot be read or edited"
            ) from error
        self.check_all_seen(projections, range(self.n_layers))
        return [attention[i] for i in range(self.n_layers)], [projections[i] for i in range(self.n_layers)]


def _block_list(model: PreTrainedModel, n_layers: int) -> Sequence[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {n_layers} blocks to work with")


def _first_child(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    return next((child for name, child in module.named_children() if name in names), None)


@contextmanager
def _watched(model: PreTrainedModel, modules: Sequence[nn.Module], callback: OnPattern) -> Iterator[None]:
    """The model's attention runs through `_watched_attention`, which calls `callback`."""
    AttentionInterface.register(_NAME, _watched_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    own = model.config._attn_implementation or "eager"
    for module in modules:
        object.__setattr__(module, _CALLBACK, callback)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(own)
        for module in modules:
            object.__delattr__(module, _CALLBACK)


def _watched_attention(
    module: nn.Module,
    query: Float[Tensor, "row head dest d_head"],
    key: Float[Tensor, "row group src d_head"],
    value: Float[Tensor, "row group src d_value"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "row dest head d_value"], Tensor]:
    """Explicit attention, as transformers' eager functions compute it, with the pattern handed to the callback."""
    if s_aux is not None:
        raise UnsupportedModelError("attention with sinks has no pattern whose rows sum to one; it cannot be patched")
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    pattern = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    edited = getattr(module, _CALLBACK)(module.layer_idx, pattern, value)
    pattern = pattern if edited is None else edited
    return (pattern @ value).transpose(1, 2).contiguous(), pattern
