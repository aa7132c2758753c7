"""Tiny random models of many architectures, with attention patterns that are far from uniform."""

from collections.abc import Callable
from typing import Any

import torch
import transformer_lens
import transformers
from transformer_lens.model_bridge.sources import build_bridge_from_module

VOCABULARY = 50
_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "GPTNeoX": lambda: transformers.GPTNeoXConfig(**_SHAPE),
    "GPTNeoX sequential": lambda: transformers.GPTNeoXConfig(**_SHAPE, use_parallel_residual=False),
    "Llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "GPT2": lambda: transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=64),
    "OLMo2": lambda: transformers.Olmo2Config(**_SHAPE, pad_token_id=0, eos_token_id=1),
    "Qwen3": lambda: transformers.Qwen3Config(**_GROUPED, head_dim=8),
    "Gemma2": lambda: transformers.Gemma2Config(**_GROUPED, head_dim=8, sliding_window=4),
    "Phi": lambda: transformers.PhiConfig(**_SHAPE),
    "OPT": lambda: transformers.OPTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        ffn_dim=64,
        vocab_size=VOCABULARY,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
    ),
    "GPTJ": lambda: transformers.GPTJConfig(
        n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=64, rotary_dim=8
    ),
    "GPTNeo": lambda: transformers.GPTNeoConfig(
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        attention_types=[[["global"], 3]],
    ),
}
MAIN = ("GPTNeoX", "Llama", "GPT2", "OLMo2", "Qwen3")
HAS_HOOKED_TRANSFORMER = "HookedTransformer" in vars(transformer_lens)


def tiny(name: str, seed: int = 0) -> Any:
    """A random Hugging Face model in evaluation mode; weights large enough for patterns and outputs to differ."""
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[name]())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.4, generator=generator)
    return model.eval()


def bridge(model: Any) -> Any:
    """A TransformerBridge around (and in place of) the model."""
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config).eval()


def hooked_transformer(model: Any, folder: Any) -> Any:
    """A HookedTransformer of the same weights (3.x), by the recipe that needs no hub."""
    import transformer_lens.loading_from_pretrained as loading  # pyright: ignore[reportMissingImports]

    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    config = loading.get_pretrained_model_config(str(folder), fold_ln=False, device="cpu")
    config.tokenizer_name = None
    weights = loading.get_pretrained_state_dict(str(folder), config, hf_model=model)
    made = transformer_lens.HookedTransformer(config, tokenizer=None, move_to_device=False)
    unchanged = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    made.load_and_process_state_dict(weights, **dict.fromkeys(unchanged, False))
    return made.eval()
