"""A small model as a `HookedTransformer` of transformer-lens 3.x."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emergent_heads.errors import UnsupportedModelError
from emergent_heads.models.mixers.attention import Attention

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

    from emergent_heads.models.small import Block, SmallModel


def to_hooked_transformer(model: "SmallModel") -> "HookedTransformer":
    """See `SmallModel.to_hooked_transformer`."""
    try:
        from transformer_lens import HookedTransformer, HookedTransformerConfig
    except ImportError as error:
        raise UnsupportedModelError(
            "this transformer-lens has no HookedTransformer (gone since 4.0); a SmallModel works with its tools as it "
            "is, or install 'transformer-lens<4'"
        ) from error
    others = sorted({name for name in model.config.mixers if name != "attention"})
    if others:
        raise UnsupportedModelError(f"a HookedTransformer has attention only; this model has {', '.join(others)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # who asks for one knows what it is
        converted = HookedTransformer(_config(model, HookedTransformerConfig))
    if model.tokenizer is not None:
        converted.set_tokenizer(model.tokenizer)
    converted.load_state_dict(_state(model), strict=False)  # masks and rotary tables are its own
    converted.train(model.training)
    return converted


def _config(model: "SmallModel", make: Callable[..., Any]) -> Any:
    config = model.config
    rotary = config.positions == "rotary"
    return make(
        n_layers=config.n_layers,
        d_model=config.d_model,
        n_ctx=config.context or 0,
        d_head=config.head_size,
        n_heads=config.n_heads,
        d_mlp=config.mlp_size,
        d_vocab=config.vocabulary_size or 0,
        act_fn="silu" if config.mlp == "swiglu" else "gelu",
        gated_mlp=config.mlp == "swiglu",
        attn_only=config.mlp == "none",
        normalization_type="LN" if config.norm == "layer" else "RMS",
        positional_embedding_type="rotary" if rotary else "standard",
        rotary_dim=config.head_size if rotary else None,
        final_rms=config.norm == "rms",
        device=str(model.device),
    )


@torch.no_grad()
def _state(model: "SmallModel") -> dict[str, Tensor]:
    width = model.config.d_model
    state = {"embed.W_E": model.W_E, "unembed.W_U": model.W_U, "unembed.b_U": model.b_U}
    if model.config.positions != "rotary":  # without positions, the ones it must have are zero
        positions = model.pos_embed.weight if model.pos_embed is not None else None
        state["pos_embed.W_pos"] = (
            positions if positions is not None else model.W_E.new_zeros(model.config.context or 0, width)
        )
    state |= _norm("ln_final", model.ln_final)
    for layer, block in enumerate(model.blocks):
        state |= {f"blocks.{layer}.{name}": tensor for name, tensor in _block(block).items()}  # pyright: ignore
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def _block(block: "Block") -> dict[str, Tensor]:
    attention = block.token_mixer
    assert isinstance(attention, Attention)
    state = {f"attn.{name}": getattr(attention, name) for name in ("W_Q", "W_K", "W_V", "W_O")}
    state |= {f"attn.{name}": getattr(attention, name) for name in ("b_Q", "b_K", "b_V", "b_O")}
    state |= _norm("ln1", block.ln1)
    mlp: Any = block.mlp
    if mlp is not None:
        state |= _norm("ln2", block.ln2)
        state |= {"mlp.W_in": mlp.input.weight.T, "mlp.W_out": mlp.out.weight.T}
        state |= {"mlp.b_in": _bias(mlp.input), "mlp.b_out": _bias(mlp.out)}
        if hasattr(mlp, "gate"):
            state["mlp.W_gate"] = mlp.gate.weight.T
    return state


def _norm(name: str, norm: Any) -> dict[str, Tensor]:
    state = {f"{name}.w": norm.weight}
    if norm.centred:
        state[f"{name}.b"] = norm.bias if norm.bias is not None else torch.zeros_like(norm.weight)
    return state


def _bias(linear: Any) -> Tensor:
    return linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.weight.shape[0])
