"""Tiny random models saved as checkpoint folders."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 64
TOKENS = torch.arange(2 * 7).reshape(2, 7) % VOCABULARY


def tiny_neox(seed: int, **changes):
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "rotary_pct": 0.5,
    }
    return scrambled(GPTNeoXForCausalLM(GPTNeoXConfig(**(shape | changes))), seed)


def tiny_gpt2(seed: int):
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=32)
    return scrambled(GPT2LMHeadModel(config), seed)


def tiny_llama(seed: int):
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    return scrambled(LlamaForCausalLM(config), seed)


def scrambled(model, seed: int):
    """Every parameter random, so that no two are equal by their initial zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def save(model, folder: Path, tokenizer: bool = False) -> Path:
    model.save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def save_as_old_pythia(model, folder: Path) -> Path:
    """As the first Pythia revisions: `pytorch_model.bin` in half precision, with `embed_out` and the mask buffers."""
    folder.mkdir(parents=True)
    config = model.config.to_dict()
    config["architectures"] = ["GPTNeoXForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name.replace("lm_head.weight", "embed_out.weight"): tensor.half()
        for name, tensor in model.state_dict().items()
    }
    for layer in range(model.config.num_hidden_layers):
        at = f"gpt_neox.layers.{layer}.attention"
        weights[f"{at}.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
        weights[f"{at}.masked_bias"] = torch.tensor(-1e9)
        weights[f"{at}.rotary_emb.inv_freq"] = torch.ones(4)
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")))


@torch.no_grad()
def logits_of(folder: Path):
    """What transformers computes from the folder: the oracle."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(TOKENS).logits


@torch.no_grad()
def logits(model):
    out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits
