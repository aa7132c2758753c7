"""The format in which the models trained for TransformerLens are published: its own names for sizes and weights.

A repository has a `config.json` in the words of `HookedTransformerConfig`, without a `model_type`, and weights in
files of `torch.save` under the names of a `HookedTransformer`. transformers cannot read it. With transformer-lens 3.x
such weights make a `HookedTransformer`, with 4.x a `TransformerBridge` of its native model; both compute the same.
"""

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from emergent_heads.checkpoints.kinds import kind_of_own_format
from emergent_heads.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from emergent_heads.checkpoints.series import ModelKind
    from emergent_heads.checkpoints.weights import Fingerprint, StoredWeights

_SIZES = ("n_layers", "d_model", "d_mlp", "d_head", "n_heads", "n_ctx", "d_vocab")
_NOT_WEIGHTS = (".mask", ".IGNORE")  # buffers that old versions stored
_MAY_BE_MISSING = "unembed.b_U"  # models trained without it


def check_kind(kind: "ModelKind") -> None:
    """Refuses kinds that the format does not become.

    Raises:
        UnsupportedModelError: with what it becomes, and why.
    """
    if kind == (made := kind_of_own_format()):
        return
    if kind in ("huggingface", "small"):
        why = "transformers cannot read it" if kind == "huggingface" else "it is no run of this library"
    else:
        why = f"transformer-lens {version('transformer-lens')} has no other class for it that takes edits of patterns"
    raise UnsupportedModelError(f"kind={kind!r}: weights in TransformerLens' own format load as {made!r}; {why}")


def new_model(config: Mapping[str, Any], device: "torch.device | str", tokenizer: Any | None) -> nn.Module:
    """A model of the shape that `config` says, its weights still to be filled.

    Raises:
        CheckpointError: the config lacks something.
        UnsupportedModelError: the installed transformer-lens cannot make the model.
    """
    shape = _shape(config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # who asks for one knows what it is
            make = _hooked_transformer if kind_of_own_format() == "hooked_transformer" else _bridge
            model = make(shape, device, tokenizer)
    except (ValueError, KeyError, AssertionError, AttributeError, TypeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"transformer-lens {version('transformer-lens')} cannot make the model of config.json: {error}"
        ) from error
    return model.eval().requires_grad_(False)


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    normalization = config.get("normalization", config.get("normalization_type"))
    attention_only = config.get("attn_only", False)
    needed = [*_SIZES, "act_fn"]
    if missing := [name for name in needed if config.get(name) is None and not (attention_only and name == "act_fn")]:
        raise CheckpointError(f"config.json has no {missing[0]}, which TransformerLens' own format has")
    return {name: config[name] for name in _SIZES} | {
        "act_fn": config.get("act_fn"),
        "attn_only": attention_only,
        "final_rms": config.get("final_rms", False),
        "normalization_type": normalization,
        "positional_embedding_type": "shortformer" if config.get("shortformer_pos") else "standard",
    }


def _hooked_transformer(shape: dict[str, Any], device: "torch.device | str", tokenizer: Any | None) -> nn.Module:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(**shape, device=str(device), init_weights=False)
    return HookedTransformer(config, tokenizer=tokenizer)


def _bridge(shape: dict[str, Any], device: "torch.device | str", tokenizer: Any | None) -> nn.Module:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot  # pyright: ignore[reportAttributeAccessIssue] - 4.x

    if shape["positional_embedding_type"] != "standard":
        raise NotImplementedError("positions added to keys and queries (shortformer) need transformer-lens 3.x")
    config = TransformerBridgeConfig(**shape, architecture="TransformerLensNative", init_weights=False)
    with torch.random.fork_rng(devices=[]):  # it draws weights before they are filled
        return boot(config, tokenizer=tokenizer, device=device)


def fill(model: nn.Module, stored: "StoredWeights", *, old_layout: bool) -> "Fingerprint":
    """Replaces the weights of `model` by stored ones and gives their fingerprint.

    Args:
        model: of `new_model`.
        stored: under the names of a `HookedTransformer`.
        old_layout: they are those of the oldest repositories, see `from_old_layout`.

    Raises:
        CheckpointError: weights are missing, unknown, of another shape or not finite. The model is then a mixture
            until the next call that succeeds.
    """
    from emergent_heads.checkpoints.weights import fingerprint

    weights = {name: read() for name, read in stored.items() if not name.endswith(_NOT_WEIGHTS)}
    config: Any = model.cfg
    if old_layout:
        weights = from_old_layout(weights, config.n_layers)
    weights.setdefault(_MAY_BE_MISSING, torch.zeros(config.d_vocab))
    try:
        if kind_of_own_format() == "bridge":
            from transformer_lens.utilities.tl_checkpoint_conversion import (  # pyright: ignore[reportMissingImports]
                convert_tl_checkpoint,
            )

            weights = convert_tl_checkpoint(weights, config)
        own = {name for name in model.state_dict() if not name.endswith(_NOT_WEIGHTS)}
        for verb, names in (("lacks", own - set(weights)), ("has", set(weights) - own)):
            if names:
                raise CheckpointError(f"it {verb} {min(names)}, unlike the model of config.json")
        model.load_state_dict(weights, strict=False)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"its weights do not fit the model: {' '.join(str(error).split())}") from error
    return fingerprint(model)


def from_old_layout(weights: Mapping[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """Weights of the oldest repositories (NeelNanda/*_old) as a `HookedTransformer` has them.

    There, layer norms are called "norm", matrices of models up to 6 layers map the other way, and so do the positions
    of models up to 8 layers (`convert_neel_solu_old_weights` in transformer-lens 3.x).
    """
    named = {
        ("ln_final." + name[5:] if name.startswith("norm.") else name.replace("norm", "ln")): weight
        for name, weight in weights.items()
    }

    def turned(name: str) -> bool:
        return n_layers <= 8 if name == "pos_embed.W_pos" else n_layers <= 6 and "W_" in name

    return {name: weight.transpose(-2, -1) if turned(name) else weight for name, weight in named.items()}
