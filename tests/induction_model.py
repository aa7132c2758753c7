"""An attention-only model whose two heads are known because they were written by hand.

The residual stream holds three spaces: the token (one-hot), the position (one-hot) and, written by the previous-token
head, the token before. The induction head looks for the position whose token before is the present token and copies
that position's token to the output. All other heads are small random noise. The pre model's previous-token head has
no queries, so its pattern is uniform; everything else is the same in both.
"""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

PREVIOUS_TOKEN_HEAD, INDUCTION_HEAD = (0, 2), (1, 1)
VOCABULARY, POSITIONS, N_HEADS, D_HEAD = 20, 24, 4, 24
D_MODEL = N_HEADS * D_HEAD
_SHARPNESS, _COPY, _NOISE = 12.0, 4.0, 0.02


def hand_built_pair() -> tuple[Any, Any, int]:
    """`(pre, post, vocabulary size)`."""
    return _build(previous_token_head_works=False), _build(previous_token_head_works=True), VOCABULARY


def _build(previous_token_head_works: bool) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=D_MODEL,
        n_layer=2,
        n_head=N_HEADS,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).eval()
    token = torch.arange(VOCABULARY)
    position = VOCABULARY + torch.arange(POSITIONS)
    before = VOCABULARY + POSITIONS + torch.arange(VOCABULARY)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for block in model.transformer.h:
            block.attn.c_attn.weight.normal_(0, _NOISE, generator=generator)
            block.attn.c_proj.weight.normal_(0, _NOISE, generator=generator)
            block.mlp.c_proj.weight.zero_()
        model.transformer.wte.weight.zero_()[token, token] = 1
        model.transformer.wpe.weight.zero_()[torch.arange(POSITIONS), position] = 1
        model.lm_head.weight.zero_()[token, token] = _COPY
        query, key, value, out = _weights(model, PREVIOUS_TOKEN_HEAD)
        if previous_token_head_works:
            query[position[1:], torch.arange(POSITIONS - 1)] = _SHARPNESS
        key[position, torch.arange(POSITIONS)] = 1
        value[token, token] = 1
        out[token, before] = 1
        query, key, value, out = _weights(model, INDUCTION_HEAD)
        query[token, token] = _SHARPNESS
        key[before, token] = 1
        value[token, token] = 1
        out[token, token] = 3
    return model


def _weights(model: GPT2LMHeadModel, head: tuple[int, int]) -> list[torch.Tensor]:
    """Views of one head's query, key and value weights `[d_model, d_head]` and output `[d_head, d_model]`, zeroed."""
    layer, index = head
    attention = model.transformer.h[layer].attn
    columns = slice(index * D_HEAD, (index + 1) * D_HEAD)
    parts = [part[:, columns] for part in attention.c_attn.weight.split(D_MODEL, dim=1)]
    return [part.zero_() for part in (*parts, attention.c_proj.weight[columns])]
