"""Plain Hugging Face causal language models, as they are: nothing of the model is replaced or renamed.

transformers lets a model's attention run through a function registered by name. While the library reads or edits
patterns, the model uses one that hands the pattern over; otherwise it uses its own (SDPA, say), at full speed. Where a
model has no such choice, or computes something else by it, its own attention is run and intercepted
(`own_attention.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from emergent_heads.errors import InterventionHasNoEffect, UnsupportedModelError
from emergent_heads.models.hooked import HookedModel, OnPattern, listed
from emergent_heads.models.hooks import editing_input, keep_in, without_running
from emergent_heads.models.own_attention import Products, intercepted

_NAME = "emergent_heads"
_CALLBACK = "_emergent_heads_on_pattern"
_MLP_NAMES = ("mlp", "feed_forward", "ffn")
_CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len")


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
        if getattr(config, "num_attention_heads", None) is None:
            raise UnsupportedModelError(f"{type(model).__name__} has no attention heads, so no patterns to work with")
        self.kind = f"Hugging Face {type(model).__name__}"
        self._module = self._model = model
        self.unembedding = unembedding
        self.n_layers = config.num_hidden_layers
        self.n_heads = config.num_attention_heads
        self.d_model = config.hidden_size
        self.vocabulary_size = int(cast(Any, model.get_input_embeddings()).weight.shape[0])
        self.context = next((size for name in _CONTEXT_NAMES if (size := getattr(config, name, None))), None)
        self.tokenizer = tokenizer
        self.blocks = _block_list(model, self.n_layers)
        self.runs_own_attention = False
        self.attention, self._projections = self._find_attention()
        self.mlp = [_first_child(block, _MLP_NAMES) for block in self.blocks]

    def run(self, tokens: Int[Tensor, "row pos"]) -> Float[Tensor, "row kept vocabulary"]:
        return self._model(input_ids=tokens, use_cache=False).logits

    def on_pattern(self, callback: OnPattern) -> AbstractContextManager[None]:
        if self.runs_own_attention:
            return self._intercepted(callback)
        return _watched(self._model, {module: partial(callback, i) for i, module in enumerate(self.attention)})

    @contextmanager
    def on_z(self, layer: int, callback: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        with editing_input(self._projections[layer], callback):
            yield

    def project(self, layer: int, z: Float[Tensor, "*rows z"]) -> Float[Tensor, "*rows d_model"]:
        return self._projections[layer](z)

    @contextmanager
    def _intercepted(self, callback: OnPattern) -> Iterator[None]:
        with _in_open_steps(self._model), intercepted(self.attention, self.n_heads, callback):
            yield

    # ---- where attention is ----

    def _find_attention(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Per layer, the module that computes attention and its output projection, found by running the model.

        A registered function is used where the heads' outputs are the model's own with it; else the model's own
        attention is intercepted.
        """
        self.runs_own_attention = not self._model._can_set_attn_implementation()
        found = self._located()
        if not self.runs_own_attention and not self._computes_its_own(*found):
            self.runs_own_attention = True
            found = self._located()
        if self.runs_own_attention and not self._computes_its_own(*found):
            raise UnsupportedModelError(
                f"this {self.kind} computes something else when its attention patterns are looked at; load it with "
                'attn_implementation="eager"'
            )
        return found

    def _located(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules of every layer, by one pass.

        Names differ between architectures; what happens does not: the projection is the first submodule that the
        attention calls on the heads' outputs.
        """
        attention: dict[int, nn.Module] = {}
        projections: dict[int, nn.Module] = {}

        def on_pattern(layer: int, module: nn.Module, pattern: Tensor, _values: Tensor) -> None:
            if layer in attention:
                raise UnsupportedModelError(f"layer {layer} of this {self.kind} has more than one attention")
            if pattern.shape[1] != self.n_heads:
                raise UnsupportedModelError(
                    f"layer {layer} of this {self.kind} has {pattern.shape[1]} heads where its config says "
                    f"{self.n_heads}"
                )
            attention[layer] = module

        def on_child(layer: int, parent: nn.Module, child: nn.Module, _input: Tensor) -> None:
            if attention.get(layer) is parent:
                projections.setdefault(layer, child)

        with ExitStack() as stack:
            for layer, block in enumerate(self.blocks):
                for parent in block.modules():
                    for child in parent.children():
                        if next(child.parameters(), None) is not None:
                            stack.enter_context(editing_input(child, partial(on_child, layer, parent, child)))
            stack.enter_context(self._watching_everything(on_pattern))
            stack.enter_context(without_running(self.unembedding))
            stack.enter_context(self.evaluating())
            self.run(self.sample_tokens(1, 5))
        if missing := [layer for layer in range(self.n_layers) if layer not in projections]:
            raise InterventionHasNoEffect(
                f"no attention pattern can be read or edited at layer {listed(missing)} of this {self.kind}: these "
                "layers have no attention, or compute it by a kernel that makes no pattern"
            )
        return [attention[i] for i in range(self.n_layers)], [projections[i] for i in range(self.n_layers)]

    @contextmanager
    def _watching_everything(self, on_pattern: Callable[[int, nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
        """Calls `on_pattern` with (layer, module, pattern, values), whichever module of a block computes attention."""
        modules = {module: layer for layer, block in enumerate(self.blocks) for module in block.modules()}
        if not self.runs_own_attention:
            with _watched(self._model, {module: partial(on_pattern, at, module) for module, at in modules.items()}):
                yield
            return
        running: list[nn.Module] = []

        def on_product(pattern: Tensor, values: Tensor) -> None:
            if running:
                on_pattern(modules[running[-1]], running[-1], pattern, values)

        with _in_open_steps(self._model), ExitStack() as stack:
            for module in modules:
                stack.enter_context(_noting_runs(module, running))
            stack.enter_context(Products(self.n_heads, on_product))
            yield

    def _computes_its_own(self, attention: Sequence[nn.Module], projections: Sequence[nn.Module]) -> bool:
        """Whether the heads' outputs, seen at the projections, are those of the model left alone."""
        self.attention, self._projections = attention, projections

        def z() -> dict[int, Tensor]:
            found: dict[int, Tensor] = {}
            with ExitStack() as stack:
                for layer in range(self.n_layers):
                    stack.enter_context(self.on_z(layer, keep_in(found, layer)))
                self.run(self.sample_tokens(1, 7))
            return found

        with self.evaluating(), without_running(self.unembedding):
            own = z()
            with self.on_pattern(lambda *_: None):
                watched = z()
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 5e-2
        return all(_agree(watched[layer], own[layer], tolerance) for layer in range(self.n_layers))


def _agree(found: Tensor, own: Tensor, tolerance: float) -> bool:
    """Whether no number is off by more than a share of the largest; those of damaged weights are told elsewhere."""
    largest = own.abs().nan_to_num(0, posinf=0).max()
    return not bool(((found - own).abs() > tolerance * largest).any())


def _block_list(model: PreTrainedModel, n_layers: int) -> Sequence[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {n_layers} blocks to work with")


def _first_child(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    return next((child for name, child in module.named_children() if name in names), None)


@contextmanager
def _noting_runs(module: nn.Module, running: list[nn.Module]) -> Iterator[None]:
    """Puts the module at the end of `running` while it runs."""
    with (
        module.register_forward_pre_hook(lambda *_: running.append(module)),
        module.register_forward_hook(lambda *_: running.remove(module)),
    ):
        yield


@contextmanager
def _in_open_steps(model: PreTrainedModel) -> Iterator[None]:
    """The model computes attention by calls that torch hands over."""
    own = model.config._attn_implementation
    if own in (None, "eager", "sdpa"):
        yield
        return
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = own


@contextmanager
def _watched(
    model: PreTrainedModel, callbacks: Mapping[nn.Module, Callable[[Tensor, Tensor], Tensor | None]]
) -> Iterator[None]:
    """The model's attention runs through `_watched_attention`, which calls the callback of the module it is in."""
    AttentionInterface.register(_NAME, _watched_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    own = model.config._attn_implementation or "eager"
    for module, callback in callbacks.items():
        object.__setattr__(module, _CALLBACK, callback)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(own)
        for module in callbacks:
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
    """Explicit attention, as transformers' eager functions compute it, with the pattern handed to the callback.

    With sinks (`s_aux`, one score a head, as of gpt-oss), what a row of the pattern lacks to one went to the sink.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks.to(scores)], dim=-1)
    pattern = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype)
    edited = getattr(module, _CALLBACK)(pattern, value)
    pattern = pattern if edited is None else edited
    return (pattern @ value).transpose(1, 2).contiguous(), pattern
