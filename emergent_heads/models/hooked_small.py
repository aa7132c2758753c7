"""Small models of the library through the interface of every hooked model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from emergent_heads.models.hooked import HookedModel, KeysAndValues, OnPattern
from emergent_heads.models.hooks import editing_input, editing_output, keep_in
from emergent_heads.models.layers import listened_to
from emergent_heads.models.mixers.attention import Attention
from emergent_heads.models.small import SmallModel


class HookedSmallModel(HookedModel):
    """A `SmallModel` with any mixers; only those with a pattern can have it read and replaced."""

    kind = "SmallModel"

    @staticmethod
    def accepts(model: Any) -> bool:
        return isinstance(model, SmallModel)

    def __init__(self, model: SmallModel, tokenizer: Any = None) -> None:
        super().__init__()
        config = model.config
        mixers = list(dict.fromkeys(config.mixers))
        self.kind = f"SmallModel with {' and '.join(mixers)}"
        self._module = self._model = model
        self.unembedding = model.unembed
        self.n_layers = config.n_layers
        self.n_heads = config.n_heads
        self.d_model = config.d_model
        self.vocabulary_size = model.embed.num_embeddings
        self.context = config.context
        self.tokenizer = model.tokenizer if tokenizer is None else tokenizer
        self.blocks = model.block_list
        self.attention = [block.token_mixer for block in self.blocks]
        self.mlp = [block.mlp for block in self.blocks]
        self._modules = list(model.modules())

    def run(self, tokens: Int[Tensor, "row pos"]) -> Float[Tensor, "row kept vocabulary"]:
        return self._model(tokens)

    @contextmanager
    def on_pattern(self, callback: OnPattern) -> Iterator[None]:
        values: dict[int, Tensor] = {}

        def call(layer: int) -> Callable[[Tensor], Tensor | None]:
            return lambda pattern: callback(layer, pattern, values[layer].transpose(1, 2))

        with ExitStack() as stack:
            for layer, mixer in enumerate(self.attention):
                if mixer.has_pattern:
                    stack.enter_context(editing_output(mixer.hook_v, keep_in(values, layer)))
                    stack.enter_context(editing_output(mixer.hook_pattern, call(layer)))
            yield

    def on_z(self, layer: int, callback: Callable[[Tensor], Tensor | None]) -> AbstractContextManager[None]:
        return editing_input(self.attention[layer].out, callback)

    def project(self, layer: int, z: Float[Tensor, "*rows z"]) -> Float[Tensor, "*rows d_model"]:
        return self.attention[layer].out(z)

    @property
    def continues(self) -> bool:
        # What a user hooked to the model is to see whole sequences. Mixers other than attention have no keys to keep.
        return all(type(mixer) is Attention for mixer in self.attention) and not listened_to(*self._modules)

    @contextmanager
    def keeping_keys_and_values(self, found: dict[int, KeysAndValues]) -> Iterator[None]:
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for layer, mixer in enumerate(self.attention):
                key_point = mixer.hook_k if mixer.rotary is None else mixer.hook_rot_k
                stack.enter_context(editing_output(key_point, keep_in(keys, layer)))
                stack.enter_context(editing_output(mixer.hook_v, keep_in(values, layer)))
            yield
        found.update({layer: (keys[layer], values[layer]) for layer in keys})

    def continued(
        self,
        layer: int,
        resid: Float[Tensor, "row pos d_model"],
        keys_and_values: KeysAndValues,
        first: int = 0,
    ) -> Float[Tensor, "row kept d_model"]:
        block = self.blocks[layer]
        resid = resid[:, first:] + self.attention[layer].continued(block.ln1(resid), *keys_and_values, first)
        return resid if block.mlp is None else resid + block.mlp(block.ln2(resid))

    def unembedded(self, resid: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocabulary"]:
        return self._model.unembed(self._model.ln_final(resid))
