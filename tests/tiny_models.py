"""Tiny random models of many architectures, with attention patterns that are far from uniform."""

from collections.abc import Callable
from typing import Any

import torch
import transformer_lens
import transformers
from transformer_lens.model_bridge.sources import build_bridge_from_module

VOCABULARY = 50
WINDOW = 4
"""Of the architectures with sliding windows, shorter than the tests' prompts."""

_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {}


def _add(name: str, config: Callable[..., transformers.PretrainedConfig], *shapes: dict[str, Any], **own: Any) -> None:
    _CONFIGS[name] = lambda: config(**{key: value for shape in shapes for key, value in shape.items()}, **own)


_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_OLD: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
_OPT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_BLOOM: dict[str, Any] = {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCABULARY}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}  # where the defaults lie beyond 50
_EIGHT = {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 16}

_add("GPT2", transformers.GPT2Config, _OLD, _TOKENS, n_ctx=64)  # which published configs have
_add(
    "GPT2 scaled by layer",  # as of stanford-crfm
    transformers.GPT2Config,
    _OLD,
    _TOKENS,
    n_ctx=64,
    scale_attn_by_inverse_layer_idx=True,
    reorder_and_upcast_attn=True,
)
_add("GPTNeoX", transformers.GPTNeoXConfig, _SHAPE)
_add("GPTNeoX sequential", transformers.GPTNeoXConfig, _SHAPE, use_parallel_residual=False)
_add("Llama", transformers.LlamaConfig, _GROUPED)
_add("OLMo", transformers.OlmoConfig, _GROUPED, _TOKENS, clip_qkv=2.0)
_add("OLMo2", transformers.Olmo2Config, _SHAPE, pad_token_id=0, eos_token_id=1)
_add("OLMo3", transformers.Olmo3Config, _GROUPED, _TOKENS, sliding_window=WINDOW)
_add("OLMoE", transformers.OlmoeConfig, _GROUPED, _TOKENS, _EXPERTS)
_add("Qwen2", transformers.Qwen2Config, _GROUPED)
_add(
    "Qwen2 with windows",
    transformers.Qwen2Config,
    _GROUPED,
    use_sliding_window=True,
    sliding_window=WINDOW,
    max_window_layers=1,
)
_add("Qwen3", transformers.Qwen3Config, _GROUPED, _EIGHT)
_add("Qwen3 mixture of experts", transformers.Qwen3MoeConfig, _GROUPED, _EIGHT, _SMALL_EXPERTS)
_add("Mistral", transformers.MistralConfig, _GROUPED, sliding_window=WINDOW)
_add("Mixtral", transformers.MixtralConfig, _GROUPED, num_local_experts=4)
_add("Phi", transformers.PhiConfig, _SHAPE)
_add("Phi3", transformers.Phi3Config, _GROUPED, _TOKENS, sliding_window=WINDOW)
_add("Gemma", transformers.GemmaConfig, _GROUPED, _EIGHT)
_add("Gemma2", transformers.Gemma2Config, _GROUPED, _EIGHT, sliding_window=WINDOW)
_add("Gemma3", transformers.Gemma3TextConfig, _GROUPED, _EIGHT, sliding_window=WINDOW, sliding_window_pattern=2)
_add("SmolLM3", transformers.SmolLM3Config, _GROUPED, _TOKENS, no_rope_layer_interval=2)
_add("Granite", transformers.GraniteConfig, _GROUPED, attention_multiplier=0.2, residual_multiplier=0.7)
_add("Cohere", transformers.CohereConfig, _GROUPED, _TOKENS, logit_scale=0.7)
_add("Cohere2", transformers.Cohere2Config, _GROUPED, _TOKENS, sliding_window=WINDOW, logit_scale=0.7)
_add("StableLM", transformers.StableLmConfig, _GROUPED, _TOKENS)
_add("StableLM parallel", transformers.StableLmConfig, _GROUPED, _TOKENS, use_parallel_residual=True)
_add("Starcoder2", transformers.Starcoder2Config, _GROUPED, sliding_window=WINDOW)
_add("GPT-BigCode", transformers.GPTBigCodeConfig, _OLD, _TOKENS, multi_query=True)
_add("CodeGen", transformers.CodeGenConfig, _OLD, _TOKENS, rotary_dim=4)
_add("GPTJ", transformers.GPTJConfig, _OLD, _TOKENS, rotary_dim=8)
_add(
    "GPTNeo",
    transformers.GPTNeoConfig,
    _TOKENS,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    window_size=WINDOW,
    attention_types=[[["global", "local"], 1], [["global"], 1]],
)
_add("OPT", transformers.OPTConfig, _OPT, word_embed_proj_dim=32)
_add("OPT normed after", transformers.OPTConfig, _OPT, word_embed_proj_dim=16, do_layer_norm_before=False)  # as 350M
_add("Bloom", transformers.BloomConfig, _BLOOM)
_add("Bloom normed residual", transformers.BloomConfig, _BLOOM, apply_residual_connection_post_layernorm=True)
_add("Falcon multi-query", transformers.FalconConfig, _SHAPE, _TOKENS, multi_query=True, parallel_attn=True)
_add("Falcon grouped", transformers.FalconConfig, _SHAPE, _TOKENS, new_decoder_architecture=True, num_kv_heads=2)
_add(
    "Falcon ALiBi",  # as falcon-rw
    transformers.FalconConfig,
    _SHAPE,
    _TOKENS,
    alibi=True,
    multi_query=False,
    parallel_attn=False,
    bias=True,
)
_add("MPT", transformers.MptConfig, d_model=32, n_heads=4, n_layers=3, max_seq_len=64, vocab_size=VOCABULARY)
_add(
    "XGLM",
    transformers.XGLMConfig,
    d_model=32,
    ffn_dim=64,
    num_layers=3,
    attention_heads=4,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
)
_add("BioGPT", transformers.BioGptConfig, _SHAPE, max_position_embeddings=64)
_add("Persimmon", transformers.PersimmonConfig, _SHAPE)
_add("Nemotron", transformers.NemotronConfig, _GROUPED, _EIGHT)
_add("Apertus", transformers.ApertusConfig, _GROUPED, _TOKENS)
_add(
    "DeepSeek-V3",
    transformers.DeepseekV3Config,
    {**_SHAPE, "num_key_value_heads": 4},
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
)
_add("gpt-oss", transformers.GptOssConfig, _GROUPED, _EIGHT, num_local_experts=4, num_experts_per_tok=2)
_add("LFM2", transformers.Lfm2Config, _GROUPED, full_attn_idxs=[1])
_add("Mamba", transformers.MambaConfig, hidden_size=32, num_hidden_layers=3, vocab_size=VOCABULARY)

NAMES = tuple(_CONFIGS)
MAIN = ("GPTNeoX", "Llama", "GPT2", "OLMo2", "Qwen3")
HAS_HOOKED_TRANSFORMER = "HookedTransformer" in vars(transformer_lens)


def config_of(name: str) -> transformers.PretrainedConfig:
    return _CONFIGS[name]()


def tiny(name: str, seed: int = 0, **options: Any) -> Any:
    """A random Hugging Face model in evaluation mode; weights large enough for patterns and outputs to differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config_of(name), **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4, generator=generator)
            else:  # biases, and weights of norms
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
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
