"""The kinds of model a checkpoint can be loaded as."""

import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from emergent_heads.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

    from emergent_heads.checkpoints.series import ModelKind

_ROTARY_BASE_OF_OLD_CONVERSION = 10_000
_LOGIT_TOLERANCE = 1e-3
"""Share of the largest logit by which another kind may differ; what transformer-lens gets wrong is off by more."""
# Whatever its adapters stumble over in a model they were not written for.
_FAILURES = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def default_kind(source: object) -> "ModelKind":
    """What checkpoints are loaded as when nobody says."""
    from emergent_heads.checkpoints.files import FileSource

    return kind_of_own_format() if isinstance(source, FileSource) else "bridge"


def kind_of_own_format() -> "ModelKind":
    """What the installed transformer-lens makes of weights in its own format."""
    return "hooked_transformer" if version("transformer-lens").startswith("3.") else "bridge"


def check_kind(kind: "ModelKind") -> None:
    """Refuses a kind that the installed transformer-lens does not have.

    Raises:
        UnsupportedModelError: "hooked_transformer" with transformer-lens 4.
    """
    if kind != "hooked_transformer":
        return
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError as error:
        raise UnsupportedModelError(
            "this transformer-lens has no HookedTransformer (gone since 4.0); load as 'bridge', or install "
            "'transformer-lens<4'"
        ) from error


def as_kind(model: Any, kind: "ModelKind", tokenizer: Any | None) -> Any:
    """`model`, a Hugging Face causal language model, as the kind asked for; it may be built into the result.

    Raises:
        UnsupportedModelError: transformer-lens cannot represent the model as this kind, or what it makes of it
            computes other logits.
    """
    if kind == "bridge":
        return _as_bridge(model, tokenizer)
    if kind == "hooked_transformer":
        return _as_hooked_transformer(model, tokenizer)
    return model


def _as_bridge(model: Any, tokenizer: Any | None) -> Any:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    architecture = type(model).__name__
    tokens = _sample_tokens(model)
    own = _logits(lambda: model(tokens, use_cache=False).logits)  # before: the bridge is built into the model
    try:
        bridge = build_bridge_from_module(model, architecture, hf_config=model.config, tokenizer=tokenizer)
        bridge.eval().requires_grad_(False)
        found = _logits(lambda: bridge.original_model(tokens, use_cache=False).logits)
    except _FAILURES as error:
        raise UnsupportedModelError(
            f"transformer-lens has no TransformerBridge for this {architecture} ({error}); load it as 'huggingface'"
        ) from error
    _check_same("TransformerBridge", architecture, found, own, "load it as 'huggingface'")
    return bridge


def _as_hooked_transformer(model: Any, tokenizer: Any | None) -> Any:
    """Conversion by transformer-lens 3.x, without folding or centring, so activations are the model's own."""
    import transformer_lens.loading_from_pretrained as loading
    from transformer_lens import HookedTransformer

    _check_rotary_base(model.config)
    architecture = type(model).__name__
    model.config.architectures = [architecture]
    tokens = _sample_tokens(model)
    try:
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            model.config.save_pretrained(folder)
            config = loading.get_pretrained_model_config(folder, fold_ln=False, device=str(model.device))
            config.tokenizer_name = None  # it would be looked up on the hub
            weights = loading.get_pretrained_state_dict(folder, config, hf_model=model)
        converted = HookedTransformer(config, tokenizer=tokenizer)
        converted.load_and_process_state_dict(
            weights, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
        )
        converted.eval().requires_grad_(False)
        found = _logits(lambda: converted(tokens, padding_side="right"))
    except _FAILURES as error:
        raise UnsupportedModelError(
            f"transformer-lens cannot convert this {architecture} to a HookedTransformer ({error}); load as 'bridge'"
        ) from error
    own = _logits(lambda: model(tokens, use_cache=False).logits)
    _check_same("HookedTransformer", architecture, found, own, "load as 'bridge' or 'huggingface'")
    return converted


def _sample_tokens(model: Any) -> "Tensor":
    import torch

    from emergent_heads.randomness import torch_generator

    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (1, 8), generator=torch_generator(0, "sample tokens")).to(model.device)


def _logits(run: "Callable[[], Tensor]") -> "Tensor":
    import torch

    with torch.no_grad():
        return run()


def _check_same(kind: str, architecture: str, found: "Tensor", own: "Tensor", instead: str) -> None:
    """Refuses what transformer-lens computes in another way than transformers.

    Of Cohere (3.9), a Falcon with ALiBi or a Qwen2 with sliding windows (HookedTransformer), for example.
    """
    largest = float(own.abs().max())
    difference = float((found - own).abs().max())
    if difference > _LOGIT_TOLERANCE * largest:
        raise UnsupportedModelError(
            f"transformer-lens' {kind} of this {architecture} computes other logits than the model itself (off by "
            f"{difference:.2g} where the largest is {largest:.2g}); {instead}"
        )


def _check_rotary_base(config: Any) -> None:
    """transformer-lens 3.x drops the rotary base of a GPT-NeoX config and would compute something else."""
    if config.model_type != "gpt_neox":
        return
    rope = getattr(config, "rope_parameters", None) or {}
    base = rope.get("rope_theta", getattr(config, "rotary_emb_base", _ROTARY_BASE_OF_OLD_CONVERSION))
    if base != _ROTARY_BASE_OF_OLD_CONVERSION:
        raise UnsupportedModelError(
            f"transformer-lens 3 ignores the rotary base {base:g} of this GPT-NeoX and would give wrong numbers; "
            "load as 'bridge'"
        )
