"""A small model as a Hugging Face model of the same function: a GPT-NeoX or a Llama."""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from emergent_heads.errors import UnsupportedModelError
from emergent_heads.models.small import SmallModel, SmallModelConfig

if TYPE_CHECKING:
    from transformers import GPTNeoXForCausalLM, LlamaForCausalLM

_NEOX = {"norm": "layer", "mlp": "gelu", "positions": "rotary", "mixer": "attention", "unembed_bias": False}
_LLAMA = {**_NEOX, "norm": "rms", "mlp": "swiglu", "biases": False}
# The name of the family, what it asks of a configuration, and what makes one.
_FAMILIES = (("GPT-NeoX", _NEOX, "gpt_neox"), ("Llama", _LLAMA, "transformer_pp"))


def huggingface_family(config: SmallModelConfig) -> str:
    """The family that models of this configuration belong to: "GPT-NeoX" or "Llama".

    Raises:
        UnsupportedModelError: they are neither; the message names the settings of the more similar one that differ.
    """
    has = {name: getattr(config, name) for name in ("norm", "mlp", "positions", "biases")}
    mixers = set(config.mixers)
    has |= {"mixer": mixers.pop() if len(mixers) == 1 else config.mixer, "unembed_bias": config.unembedding_bias}
    wrong = {
        name: {key: wanted for key, wanted in asked.items() if has[key] != wanted} for name, asked, _ in _FAMILIES
    }
    name, _, maker = min(_FAMILIES, key=lambda family: len(wrong[family[0]]))
    told = [f"{key} is {has[key]!r} and must be {wanted!r}" for key, wanted in wrong[name].items()]
    if config.head_size * config.n_heads != config.d_model:
        told.append(f"d_head is {config.head_size} and must be d_model / n_heads, {config.d_model / config.n_heads:g}")
    if told:
        raise UnsupportedModelError(
            f"transformers has no such model, the nearest is a {name}, but {'; '.join(told)}. Train a model made by "
            f"SmallModelConfig.{maker} to take it elsewhere"
        )
    return name


def to_huggingface(model: SmallModel) -> "GPTNeoXForCausalLM | LlamaForCausalLM":
    """See `SmallModel.to_huggingface`."""
    family = huggingface_family(model.config)
    if any(getattr(block.token_mixer, "bias", None) is not None for block in model.block_list):
        raise UnsupportedModelError(
            f"this model has an attention bias, which a {family} has no place for: take it away by "
            "model.set_attention_bias(None), which makes it another function, or train with a bias that is annealed "
            "to zero and use a later step"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # transformers draws weights that are replaced here
        converted = _neox(model) if family == "GPT-NeoX" else _llama(model)
        converted.get_input_embeddings().weight.copy_(model.embed.weight)
        converted.get_output_embeddings().weight.copy_(model.unembed.weight)
    return converted.to(model.device).train(model.training)


def _neox(model: SmallModel) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = model.config
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    neox = GPTNeoXConfig(
        **_shape(config), rope_parameters=rope, use_parallel_residual=False, attention_bias=config.biases
    )
    converted: Any = GPTNeoXForCausalLM(neox)
    for block, layer in zip(model.block_list, converted.gpt_neox.layers, strict=True):
        attention, mlp = cast(Any, (block.token_mixer, block.mlp))
        _copy(layer.input_layernorm, block.ln1.weight, block.ln1.bias)
        _copy(layer.post_attention_layernorm, block.ln2.weight, block.ln2.bias)
        by_head = (3, config.n_heads, config.head_size)  # queries of all heads, then keys; a GPT-NeoX has head by head
        weight = attention.qkv.weight.view(*by_head, -1).transpose(0, 1).flatten(0, 2)
        bias = None if attention.qkv.bias is None else attention.qkv.bias.view(by_head).transpose(0, 1).flatten()
        _copy(layer.attention.query_key_value, weight, bias)
        _copy(layer.attention.dense, attention.out.weight, attention.out.bias)
        _copy(layer.mlp.dense_h_to_4h, mlp.input.weight, mlp.input.bias)
        _copy(layer.mlp.dense_4h_to_h, mlp.out.weight, mlp.out.bias)
    _copy(converted.gpt_neox.final_layer_norm, model.ln_final.weight, model.ln_final.bias)
    return converted


def _llama(model: SmallModel) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    eps = model.ln_final.eps
    converted: Any = LlamaForCausalLM(LlamaConfig(**_shape(model.config), rope_parameters=rope, rms_norm_eps=eps))
    for block, layer in zip(model.block_list, converted.model.layers, strict=True):
        attention, mlp = cast(Any, (block.token_mixer, block.mlp))
        _copy(layer.input_layernorm, block.ln1.weight)
        _copy(layer.post_attention_layernorm, block.ln2.weight)
        projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        for projection, weight in zip(projections, attention.qkv.weight.chunk(3), strict=True):
            _copy(projection, weight)
        _copy(layer.self_attn.o_proj, attention.out.weight)
        _copy(layer.mlp.gate_proj, mlp.gate.weight)
        _copy(layer.mlp.up_proj, mlp.input.weight)
        _copy(layer.mlp.down_proj, mlp.out.weight)
    _copy(converted.model.norm, model.ln_final.weight)
    return converted


def _shape(config: SmallModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": False,
        "bos_token_id": None,  # no id has a meaning of its own here
        "eos_token_id": None,
    }


def _copy(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
    """Weights into a module of transformers; a bias that the small model does not have is zero."""
    found: Any = module
    found.weight.copy_(weight)
    if getattr(found, "bias", None) is not None:
        found.bias.zero_() if bias is None else found.bias.copy_(bias)
